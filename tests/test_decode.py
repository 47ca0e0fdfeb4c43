"""Speculative decoding must give the target's own greedy answer, whatever the drafter; and z-lab's
client's numbers."""

import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from common import batch_of, fit, loss_of_row, tiny_config
from dflash_trainer import checkpoints, decoding
from dflash_trainer.decoding import speculative_generate
from dflash_trainer.features import Taps
from flex_utils import attend_dense, dense_mask
from model_drafter import Drafter, Head, LossSpec, walk

VOCAB, HIDDEN, K = 61, 32, 4
FULL, SLIDING = "full_attention", "sliding_attention"
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.4,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON))


def windowed():
    """Sliding layers of window 6 forget for good, unless the cache records what it may have to bring back."""
    kinds = [SLIDING, FULL, SLIDING, FULL]
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **COMMON, head_dim=8, layer_types=kinds, sliding_window=6, use_sliding_window=True
        )
    )


def hybrid():
    """Qwen3.5's recurrent layers: a rejected token stays in their state unless somebody takes it out."""
    if not hasattr(transformers, "Qwen3_5TextConfig"):
        pytest.skip("this transformers has no Qwen3.5")
    kinds = ["linear_attention", "linear_attention", FULL, "linear_attention"]
    return transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(
            **COMMON,
            head_dim=8,
            layer_types=kinds,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_conv_kernel_dim=4,
        )
    )


MAKERS = {"llama": llama, "windowed": windowed, "hybrid": hybrid}
_targets = {}


def target_of(kind):
    """Random weights, large enough that answers vary; rows of the head of one length, so that an
    oracle can ask for any."""
    if kind not in _targets:
        torch.manual_seed(7)
        target = MAKERS[kind]().eval().requires_grad_(False)
        target.lm_head.weight.copy_(nn.functional.normalize(target.lm_head.weight, dim=1) * 8)
        _targets[kind] = target
    return _targets[kind]


def config(**changes):
    """For the targets above: 4 layers, of which the drafter reads two."""
    ours = dict(num_layers=2, head_dim=8, target_layer_ids=(0, 2), num_target_layers=4,
                layer_types=(SLIDING, FULL), sliding_window=9, rope_theta=1e4)
    return tiny_config(**ours | changes)


def random_drafter():
    drafter = Drafter(config(), attend_dense)
    drafter.init_weights(0)
    return drafter


class Oracle:
    """Drafts the reference answer, but wrong wherever position % wrong == 0: every count of accepted
    tokens occurs."""

    def __init__(self, sequence, head, wrong):
        self.config, self.sequence, self.head, self.wrong = config(), sequence, head, wrong

    def __call__(self, target_hidden, block_embeds, context_pos, block_pos, masks, past):
        assert context_pos.numel() == target_hidden.shape[1] and int(block_pos[0]) == int(context_pos[-1]) + 1
        tokens = [self.sequence[min(p, len(self.sequence) - 1)] for p in block_pos.tolist()]
        tokens = [(t + 1) % VOCAB if p % self.wrong == 0 else t for t, p in zip(tokens, block_pos.tolist())]
        return self.head.weight[tokens][None]


def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 60, (1, n), generator=generator) for n in (1, 5, 12)]


def greedy(target, prompt, limit, stop=()):
    """The reference: transformers' own generate."""
    out = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=list(stop) or None,
        pad_token_id=0,
    )
    return out[0, prompt.shape[1] :].tolist()


def drafters(target, prompt, answer):
    sequence = prompt[0].tolist() + answer
    return [random_drafter()] + [Oracle(sequence, target.lm_head, wrong) for wrong in (3, 5, 1000)]


def decode(drafter, target, prompt, limit, stop=(), **how):
    answer, produced = speculative_generate(
        drafter,
        target.get_input_embeddings(),
        Head(target.lm_head),
        target,
        target.get_decoder().layers,
        prompt,
        limit,
        set(stop),
        **how,
    )
    return answer.tolist(), produced


@pytest.mark.parametrize("prompt", range(3))
@pytest.mark.parametrize("kind", MAKERS)
def test_greedy_answer_is_the_targets_own(kind, prompt):
    target, prompt = target_of(kind), prompts()[prompt]
    want = greedy(target, prompt, 30)
    assert len(set(want)) > 5  # an answer that repeats one token would hide a cache that is not rolled back
    for drafter in drafters(target, prompt, want):
        answer, produced = decode(drafter, target, prompt, 30)
        assert answer == want and sum(produced) == len(answer) - 1
        assert all(1 <= n <= K for n in produced)
    assert len(produced) == math.ceil(29 / K)  # the oracle that is never wrong: whole blocks


def test_the_targets_answer_depends_on_more_than_the_last_token():
    """Positive control for the test above, one per target: forget to roll back and the answer changes."""
    for kind in MAKERS:
        target, prompt = target_of(kind), prompts()[2]
        other = prompt.clone()
        other[0, -4:-1] = (other[0, -4:-1] + 5) % 60
        assert greedy(target, prompt, 8) != greedy(target, other, 8)


@pytest.mark.parametrize("limit", [1, 2, 3, K, K + 1, K + 2, 13])
def test_limits(limit):
    target, prompt = target_of("llama"), prompts()[1]
    want = greedy(target, prompt, limit)
    for drafter in drafters(target, prompt, greedy(target, prompt, 30)):
        answer, produced = decode(drafter, target, prompt, limit)
        assert answer == want and sum(produced) == limit - 1


@pytest.mark.parametrize("at", range(0, 14))
@pytest.mark.parametrize("kind", ["llama", "windowed"])
def test_stop_tokens(kind, at):
    """The stop token is part of the answer, nothing after it, wherever in a block it falls, the first
    token included."""
    target, prompt = target_of(kind), prompts()[1]
    free = greedy(target, prompt, 30)
    stop = {free[at], 59}
    want = greedy(target, prompt, 30, stop)
    assert want == free[: free.index(free[at]) + 1] or 59 in want
    for drafter in drafters(target, prompt, free):
        answer, produced = decode(drafter, target, prompt, 30, stop)
        assert answer == want and sum(produced) == len(answer) - 1


def test_hooks_are_removed_even_when_decoding_fails():
    target = target_of("llama")

    def broken(*_):
        raise KeyError("drafter")

    broken.config = config()
    with pytest.raises(KeyError):
        decode(broken, target, prompts()[1], 9)
    assert not any(layer._forward_hooks for layer in target.model.layers)


@pytest.mark.parametrize("kind", MAKERS)
def test_taps_equal_hidden_states_one_later(kind):
    """Design 3.7: tap i is the output of decoder layer i, entry i+1 of output_hidden_states."""
    target, prompt = target_of(kind), prompts()[2]
    taps = Taps(target.get_decoder().layers, (0, 2))
    states = target(prompt, output_hidden_states=True).hidden_states
    caught = taps.collect()
    taps.remove()
    assert len(states) == 5 and torch.equal(caught, torch.cat([states[1], states[3]], -1))


def test_sampling_draws_from_the_target():
    """First two tokens of 400 decodes against the target's own probabilities: chi-square over ten
    likely pairs."""
    target, prompt = target_of("llama"), prompts()[1]
    heat, generator = 3.0, torch.Generator().manual_seed(1)
    drafter = Oracle(prompt[0].tolist() + greedy(target, prompt, 4), target.lm_head, 1000)
    pairs = [
        tuple(decode(drafter, target, prompt, 2, temperature=heat, generator=generator)[0])
        for _ in range(400)
    ]
    first = (target(prompt).logits[0, -1] / heat).softmax(-1)
    firsts = torch.arange(VOCAB)[:, None]
    after = target(torch.cat([prompt.expand(VOCAB, -1), firsts], 1)).logits[:, -1]
    joint = (first[:, None] * (after / heat).softmax(-1)).flatten()
    seen = torch.bincount(torch.tensor([a * VOCAB + b for a, b in pairs]), minlength=VOCAB**2)
    likely = joint.topk(10).indices
    cells = torch.cat([joint[likely], 1 - joint[likely].sum()[None]]) * 400
    got = torch.cat([seen[likely], 400 - seen[likely].sum()[None]])
    assert cells.min() > 5 and ((got - cells) ** 2 / cells).sum() < 35.564  # 10 degrees of freedom, p = 1e-4


# -------------------------------------------------------------------------- the client on the same checkpoint


def greedy_data(target, n=12, length=24):
    """n prompts and the target's own answers of `length` tokens."""
    generator = torch.Generator().manual_seed(9)
    return [
        (p, greedy(target, p, length))
        for p in (torch.randint(1, 60, (1, 6), generator=generator) for _ in range(n))
    ]


def row_of(target, prompt, answer):
    """One conversation as a row: hidden states of the taps, slots of every valid anchor (all of the
    answer but its end)."""
    ids = torch.cat([prompt, torch.tensor([answer])], 1)
    taps = Taps(target.get_decoder().layers, (0, 2))
    with torch.no_grad():
        target(ids)
    hidden, s, first = taps.collect(), ids.shape[1], prompt.shape[1]
    taps.remove()
    run = np.array([s - 1 - i if i >= first else 0 for i in range(s)])
    slots = batch_of(
        ids[0].numpy(),
        np.arange(s),
        np.zeros(s, dtype=np.int64),
        np.arange(first, s - 1),
        run,
        s - 1 - first,
        K,
        K,
    )
    return hidden, slots


def fitted(target, data):
    """A drafter fitted to these answers."""
    drafter = Drafter(config(), attend_dense)
    drafter.init_weights(0)
    fit(drafter, [(target, *row_of(target, *d)) for d in data], loss_of)
    return drafter


def loss_of(drafter, target, hidden, slots):
    return loss_of_row(
        drafter,
        target.get_input_embeddings(),
        Head(target.lm_head),
        hidden,
        slots,
        dense_mask,
        LossSpec("decay", 2.0, "checkpoint", K),
    )


@pytest.fixture(scope="module")
def beside_the_client(tmp_path_factory):
    """Our decoder, the client's and the walk on one checkpoint and the prompts it was fitted to."""
    client = pytest.importorskip(
        "dflash.model", reason="the dflash client (pip install --no-deps dflash==0.1.0) is the reference"
    )
    keep, client._cuda_time = client._cuda_time, time.perf_counter  # its clock synchronises CUDA
    target, directory = target_of("llama"), tmp_path_factory.mktemp("drafter")
    data = greedy_data(target)
    drafter = fitted(target, data)
    checkpoints.save_drafter(directory, drafter.config, drafter.state_dict())
    served = client.DFlashDraftModel.from_pretrained(directory, dtype=torch.float32).eval()
    c, state = checkpoints.load_drafter(directory)
    ours = Drafter(c, attend_dense)
    ours.load_state_dict({n: t.float() for n, t in state.items()})
    yield SimpleNamespace(generate=client.dflash_generate, served=served, ours=ours, target=target, data=data)
    client._cuda_time = keep


def assert_decodes_as_the_client(x, decode):
    """x: what a fixture `beside_the_client` gives. Answers end in a stop token and the limit leaves K to
    spare (the client shortens its last blocks otherwise)."""
    lengths = []
    for prompt, answer in x.data:
        stop = [answer[-1]]
        want = x.generate(x.served, x.target, prompt, len(answer) + K, stop, return_stats=True)
        got, produced = decode(x.ours, x.target, prompt, len(answer) + K, stop)
        assert got == want.output_ids[0, prompt.shape[1] :].tolist() and got[-1] == stop[0]
        assert produced == want.acceptance_lengths
        lengths += produced
    assert sum(lengths) / len(lengths) >= 2, "too weak a drafter to compare acceptance with"
    assert set(lengths) >= {1, 2, 3, 4}


def test_same_ids_and_accepted_lengths_as_the_client(beside_the_client):
    assert_decodes_as_the_client(beside_the_client, decode)


def test_the_walk_over_a_row_gives_the_clients_numbers(beside_the_client):
    """Design 4: tau of the teacher-forced row equals, not merely nears, what decoding produced."""
    x, walks, clients = beside_the_client, [], []
    for prompt, answer in x.data:
        stop = [answer[-1]]
        said = x.generate(x.served, x.target, prompt, len(answer) + K, stop, return_stats=True)
        mine = said.output_ids[0, prompt.shape[1] :].tolist()
        if len(mine) < 2:
            continue
        with torch.no_grad():
            matches = loss_of(x.ours, x.target, *row_of(x.target, prompt, mine)).matches.tolist()
        walks.append(walk(matches, len(mine)))
        clients.append(said.acceptance_lengths)
    assert walks == clients and len(walks) >= 5


def test_answers_that_differ_are_told_with_the_targets_own_margin():
    """Where rounding can decide, the two logits are close; a fault of ours would leave a wide gap."""
    target, prompt = target_of("llama"), prompts()[1]
    plain = torch.tensor(greedy(target, prompt, 8))
    other = plain.clone()
    other[5] = (plain[5] + 1) % VOCAB
    logits = target(torch.cat([prompt, plain[None, :5]], 1)).logits[0, -1]
    margin = (logits[plain[5]] - logits[other[5]]).item()
    assert margin > 0
    told = decoding.explain_mismatch(target, prompt, plain, other)
    assert told.startswith("False, from token 5 on") and f" {margin:.3g} apart, in torch.float32" in told
    assert "one ends at token 3" in decoding.explain_mismatch(target, prompt, plain, plain[:3])

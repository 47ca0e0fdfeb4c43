"""Decoding with the heads: greedy is the target's own answer, sampling its distribution; DFlash 2 beside
z-lab's client on one trained checkpoint."""
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import model_drafter as md
from common import fit, loss_of_row
from dflash_trainer import checkpoints, decoding
from dflash_trainer.decoding import speculative_generate
from dflash_trainer.features import Taps
from flex_utils import attend_dense, dense_mask
from model_drafter import Head, LossSpec, LossTerms, walk
from test_decode import (
    VOCAB,
    K,
    assert_decodes_as_the_client,
    greedy,
    greedy_data,
    prompts,
    target_of,
)
from test_heads import config_of

FULL = ("full_attention",) * 2
SLIDING = ("sliding_attention", "full_attention")


def config(head, **changes):
    """For test_decode's targets: four layers, of which the drafter reads two."""
    ours = dict(num_layers=2, head_dim=8, target_layer_ids=(0, 2), num_target_layers=4, layer_types=FULL,
                rope_theta=1e4, block_size=K, vocab_size=VOCAB)
    if head == "dflash2":
        ours |= dict(layer_types=SLIDING, sliding_window=9, in_block="bidirectional", selector_rank=16,
                     selector_top_k=16)
    return config_of(head, **ours | changes)


def random_drafter(head, seed=5, **changes):
    """Weights that matter, the head's too."""
    drafter = md.Drafter(config(head, **changes), attend_dense)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in drafter.parameters():
            spread = torch.randn(param.shape, generator=generator)
            param.copy_(1 + 0.2 * spread if param.dim() == 1 else 0.3 * spread)
    return drafter


def decode(drafter, target, prompt, limit, stop=(), **how):
    answer, produced = speculative_generate(
        drafter, target.get_input_embeddings(), Head(target.lm_head), target, target.get_decoder().layers,
        prompt, limit, set(stop), **how)
    return answer.tolist(), produced


@pytest.mark.parametrize("kind", ["llama", "windowed", "hybrid"])
@pytest.mark.parametrize("head", ["dflash2", "dspark"])
def test_greedy_answers_are_the_targets_own(head, kind):
    target = target_of(kind)
    for prompt in prompts():
        want = greedy(target, prompt, 20)
        answer, produced = decode(random_drafter(head), target, prompt, 20)
        assert answer == want and sum(produced) == 19


@pytest.mark.parametrize("limit", [1, 2, K, K + 1, K + 2])
def test_dspark_drafts_and_verifies_one_token_more(limit):
    """A drafter that is always right: passes of K + 1 tokens."""
    target = target_of("llama")
    prompt = prompts()[1]
    want = greedy(target, prompt, 30)
    sequence = prompt[0].tolist() + want

    class Oracle(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = config("dspark")
            self.markov_head = md.MarkovHead(self.config)
            nn.init.zeros_(self.markov_head.markov_w2.weight)

        def forward(self, target_hidden, block_embeds, context_pos, block_pos, masks, past):
            return target.lm_head.weight[[sequence[p + 1] for p in block_pos.tolist()]][None]

    answer, produced = decode(Oracle(), target, prompt, limit)
    assert answer == want[:limit]
    assert produced == [min(K + 1, limit - 1 - at) for at in range(0, limit - 1, K + 1)]


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("head", ["dflash2", "dspark"])
def test_sampling_keeps_the_targets_distribution(head):
    """The first token of a pass follows the target, tokens that are no candidate included.

    One pass on logits by hand: the walk's own proposals against a target distribution over all 61 tokens.
    """
    drafter = random_drafter(head, selector_top_k=5) if head == "dflash2" else random_drafter(head)
    linear = nn.Linear(32, VOCAB, bias=False)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(VOCAB, 32, generator=generator) * 0.3)
    hidden = torch.randn(drafter.config.n_drafts, 32, generator=generator)
    target = torch.softmax(torch.randn(drafter.config.n_drafts + 1, VOCAB, generator=generator), -1)
    runs = 6000
    first = torch.zeros(VOCAB)
    uncovered = 0
    with torch.no_grad():
        for _ in range(runs):
            draft, proposal = decoding.draft_tokens(
                drafter, Head(linear), hidden, torch.tensor([7]), 1.0, generator)
            n, bonus = decoding.accept_sampled(draft, proposal, target, generator)
            token = int(draft[0] if n else bonus)
            first[token] += 1
            uncovered += proposal[0, token] == 0
    likely = target[0].topk(20).indices
    counts = torch.cat([first[likely], (runs - first[likely].sum())[None]])
    expected = torch.cat([target[0][likely], (1 - target[0][likely].sum())[None]]) * runs
    assert expected.min() > 5 and chi_square(counts, expected) < 52.386  # 20 degrees of freedom, p = 1e-4
    assert (uncovered > runs / 2) == (head == "dflash2")  # most of the target's mass: five candidates of 61
    q = decoding.draft_tokens(drafter, Head(linear), hidden, torch.tensor([7]), 1.0, generator)[1][0]
    wrong = torch.cat([q[likely], (1 - q[likely].sum())[None]]) * runs  # what drafts alone would give
    assert chi_square(counts, wrong.clamp(min=1)) > 52.386


# ------------------------------------------------------------ z-lab's client on the same trained checkpoint

def row_of(target, prompt, answer, c):
    """One conversation as a Batch: hidden states of the taps, every anchor of the answer but its end."""
    ids = torch.cat([prompt, torch.tensor([answer])], 1)
    taps = Taps(target.get_decoder().layers, (0, 2))
    with torch.no_grad():
        last = target.model(ids).last_hidden_state
    hidden = torch.cat([taps.collect(), last], -1)
    taps.remove()
    n, first = ids.shape[1], prompt.shape[1]
    run_length = np.array([n - 1 - i if i >= first else 0 for i in range(n)])
    blocks = md.block_arrays(np.zeros(n, np.int64), run_length, np.arange(first, n - 1), n - 1 - first, K, K,
                             c.first_slot, whole_blocks=True)
    tensors = [torch.from_numpy(np.asarray(array)) for array in (ids[0].numpy(), np.arange(n), *blocks)]
    return hidden, md.Batch(None, *tensors)


def loss_of(drafter, target, hidden, batch):
    c = drafter.config
    spec = LossSpec("decay", 2.0, "checkpoint", K)
    if c.head == "dspark":
        spec = spec._replace(terms=LossTerms(ce=1.0, tv=0.5), confidence=1.0)
    else:
        hidden = hidden[..., :64]
    return loss_of_row(
        drafter, target.get_input_embeddings(), Head(target.lm_head), hidden, batch, dense_mask, spec)


def fitted(target, data, head):
    """A drafter with this head, fitted to these answers."""
    drafter = md.Drafter(config(head), attend_dense)
    drafter.init_weights(0)
    rows = [(target, *row_of(target, prompt, answer, drafter.config)) for prompt, answer in data]
    fit(drafter, rows, loss_of)
    return drafter


@pytest.fixture(scope="module")
def beside_the_client(tmp_path_factory):
    """A trained DFlash 2 checkpoint in the client's class and in ours."""
    client = pytest.importorskip(
        "dflash.model", reason="the dflash client (pip install --no-deps dflash==0.1.0) is the reference")
    clock = client._cuda_time
    client._cuda_time = time.perf_counter  # its clock synchronises CUDA
    target = target_of("llama")
    data = greedy_data(target)
    drafter = fitted(target, data, "dflash2")
    directory = tmp_path_factory.mktemp("dflash2")
    checkpoints.save_drafter(directory, drafter.config, drafter.state_dict())
    served, info = client.DFlash2DraftModel.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True)
    c, state = checkpoints.load_drafter(directory)
    ours = md.Drafter(c, attend_dense)
    ours.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    yield SimpleNamespace(generate=client.dflash_generate, served=served.eval(), info=info, ours=ours,
                          target=target, data=data)
    client._cuda_time = clock


def test_the_client_loads_every_tensor_and_no_other(beside_the_client):
    info = beside_the_client.info
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_same_ids_and_accepted_lengths_as_the_client(beside_the_client):
    assert_decodes_as_the_client(beside_the_client, decode)


def test_the_walk_over_a_row_gives_what_decoding_produces(beside_the_client):
    """Teacher-forced matches give the passes of the decoding walk, for both heads: training needs no walk."""
    target, data = beside_the_client.target, beside_the_client.data
    for drafter in (beside_the_client.ours, fitted(target, data, "dspark")):
        n_equal = 0
        for prompt, answer in data:
            stop = [answer[-1]]
            got, produced = decode(drafter, target, prompt, len(answer) + K + 1, stop)
            if len(got) < 2:
                continue
            with torch.no_grad():
                result = loss_of(drafter, target, *row_of(target, prompt, got, drafter.config))
            n = len(got) - 1
            assert walk(result.matches[:n].tolist(), len(got)) == produced
            n_equal += 1
        assert n_equal >= 5

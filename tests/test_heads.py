"""The heads DFlash 2 and DSpark and the losses on the target's distribution, against tensors made by the
public packages, numbers by hand, autograd and finite differences.

data/heads/ holds outputs of z-lab's `dflash` 0.1.0 (DFlash 2), of DeepSpec's model and loss code (DSpark) and
of `speculators` 0.9.0 (the losses) on fixed random weights, fp32, CPU: one packed row of 32 tokens, conversation
A 0..19 (supervised 4..11 and 15..19), B 20..31 (23..31), seven anchors. Those packages know no packing: every
block was run by itself. Labels are the drafter's own picks in places, so that matches differ.
"""
import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import model_drafter as md
from dflash_trainer import checkpoints, decoding
from flex_utils import attend_dense, dense_mask
from model_drafter import Head, LossSpec, LossTerms

GOLDEN = Path(__file__).parent / "data" / "heads"
CASES = ["dflash2_k4", "dflash2_k8", "dspark_b4", "dspark_b8"]
DFLASH2 = CASES[:2]
DSPARK = CASES[2:]
FORMS = ["checkpoint", "fused"]


class Case:
    """One golden case: its drafter, the target's embedding and head, a Batch with a padding block."""

    def __init__(self, name):
        family, size = name.split("_")
        facts = json.loads((GOLDEN / f"{family}.json").read_text())
        self.facts = facts[size]
        self.tensors = load_file(GOLDEN / f"{name}.safetensors")
        weights = load_file(GOLDEN / f"{family}_weights.safetensors")
        self.embed = nn.Embedding.from_pretrained(weights.pop("target.embed"))
        linear = nn.Linear(64, 256, bias=False)
        linear.weight = nn.Parameter(weights.pop("target.head"), requires_grad=False)
        self.head = Head(linear)
        self.config = checkpoints.config_from_json(self.facts["config"])
        self.drafter = md.Drafter(self.config, attend_dense)
        self.drafter.load_state_dict(weights)
        self.n_blocks = len(self.tensors["anchors"])

    def batch(self, chunk=16):
        t = self.tensors
        start, run_length, anchors = (t[name].numpy() for name in ("start", "run_length", "anchors"))
        arrays = md.block_arrays(start, run_length, anchors, self.n_blocks + 1, self.config.block_size, chunk,
                                 self.config.first_slot, whole_blocks=True)
        features = torch.cat([t["target_hidden"], t["target_last_hidden"]], -1)[None]
        return md.Batch(features, t["ids"], t["pos"], *(torch.from_numpy(array) for array in arrays))

    def spec(self, form="checkpoint", chunk=16, **changes):
        """The loss that the golden gradients are of."""
        spec = LossSpec("decay", self.facts["gamma"], form, chunk)
        if self.config.head == "dspark":
            spec = spec._replace(terms=LossTerms(ce=0.1, tv=1.8), confidence=1.0)
        return spec._replace(**changes)

    def loss(self, batch=None, spec=None, make_mask=dense_mask):
        batch = self.batch() if batch is None else batch
        spec = self.spec() if spec is None else spec
        if not spec.needs_last(self.config.head):
            batch = batch._replace(target_hidden=batch.target_hidden[..., :128])
        return md.row_loss(self.drafter, self.embed, self.head, batch, 0, make_mask, spec)

    def hidden(self, **changes):
        """(N, K, D) of the blocks that are no padding."""
        caught = []
        hook = self.drafter.register_forward_hook(lambda module, args, out: caught.append(out.detach()))
        with torch.no_grad():
            self.loss(self.batch()._replace(**changes))
        hook.remove()
        return caught[0].view(self.n_blocks + 1, self.config.block_size, -1)[:-1]


@functools.cache
def cached(name):
    return Case(name)


@pytest.fixture(params=CASES)
def case(request):
    return cached(request.param)


def close(found, wanted, limit=1e-5):
    """Within `limit` of the largest magnitude, of 1 at least."""
    assert found.shape == wanted.shape
    error = (found - wanted).abs().max().item()
    assert error <= limit * max(1.0, wanted.abs().max().item()), error


# ------------------------------------------------------------------------------------------- golden tensors

def test_hidden_states_of_the_packed_row(case):
    close(case.hidden(), case.tensors["hidden"])


@pytest.mark.parametrize("name", DFLASH2)
def test_a_plain_drafter_with_the_same_weights(name):
    case = cached(name)
    config = checkpoints.config_from_json(case.facts["config"] | {"architectures": ["DFlashDraftModel"]})
    plain = md.Drafter(config, attend_dense)
    weights = case.drafter.state_dict()
    plain.load_state_dict({key: weights[key] for key in plain.state_dict()})
    spec = case.spec()
    batch = case.batch()
    caught = []
    plain.register_forward_hook(lambda module, args, out: caught.append(out.detach()))
    batch = batch._replace(target_hidden=batch.target_hidden[..., :128])
    md.row_loss(plain, case.embed, case.head, batch, 0, dense_mask, spec)
    close(caught[0].view(case.n_blocks + 1, config.block_size, -1)[:-1], case.tensors["hidden_plain"])


@pytest.mark.parametrize("stage", ["attention_conv", "mlp_conv"])
@pytest.mark.parametrize("name", DFLASH2)
def test_convolutions(name, stage):
    case = cached(name)
    conv = getattr(case.drafter.layers[0], stage)
    at = {side: case.tensors[f"layer0.{stage}.{side}.in"] for side in ("prepare", "finish")}
    with torch.no_grad():
        before, after = conv.kernels(at["prepare"].reshape(1, -1, 64))
        close(conv.convolve(before, at["prepare"]), case.tensors[f"layer0.{stage}.prepare.out"])
        close(conv.convolve(after, at["finish"]), case.tensors[f"layer0.{stage}.finish.out"])


@pytest.mark.parametrize("name", DFLASH2)
def test_candidates_and_scores(name):
    case = cached(name)
    t = case.tensors
    k = case.config.block_size
    hidden = t["hidden"].flatten(0, 1)
    place = t["anchors"][:, None] + torch.arange(k) - 1  # of each slot's predecessor
    in_row = (place >= t["anchors"][:, None]) & (place < 32)  # slot 0's row of scores means nothing
    place = place.clamp(max=31).flatten()
    with torch.no_grad():
        logits = case.head(hidden)
        unary, candidates = logits.topk(16)
        scores = case.drafter.candidate_selector(hidden, t["ids"][place], candidates, unary)
    close(logits.view(t["logits"].shape), t["logits"])
    close(unary.view(t["unary"].shape), t["unary"])
    real = in_row & (t["start"][place].view(-1, k) == t["start"][t["anchors"]][:, None])
    assert (real & t["counts"]).sum() == t["counts"].sum()
    found = scores.gather(1, candidates.argsort(1)).view(-1, k, 16)[real]
    wanted = t["scores"].gather(2, t["candidates"].argsort(2))[real]
    close(found, wanted)
    assert torch.equal(candidates.sort(1).values.view(-1, k, 16), t["candidates"].sort(2).values)


def test_counts_weights_and_losses_of_slots(case):
    t = case.tensors
    result = case.loss(spec=case.spec(terms=LossTerms(ce=0.1, tv=1.8)))
    counts = case.loss().ce[:-1] != 0
    assert torch.equal(counts, t["counts"]) and not result.ce[-1].any()
    blocks = md.Blocks(case.batch().slots[0], case.batch().counted[0], case.config, case.spec())
    weights = md.slot_weights(result.ce, blocks.counts, "decay", case.facts["gamma"],
                              first_slot=case.config.first_slot)
    close(weights[:-1], t["weights"])
    alpha = t["accept"] if "accept" in t else 1 - t["backbone_tv"]
    close(result.tv, (t["weights"] * (1 - alpha) * t["counts"]).sum())
    reach = (alpha * t["counts"])[:, case.config.first_slot:].cumprod(1).sum(1)
    close(result.expected_len[:-1], 1 + reach)
    if case.config.head == "dflash2":
        close(result.ce[:-1], t["ce"] * t["counts"])
        assert torch.equal(result.covered[:-1], t["covered"] & t["counts"])
        assert result.covered.sum() / t["counts"].sum() == pytest.approx(case.facts["recall"])


def test_matches(case):
    result = case.loss()
    facts = case.facts
    first = case.config.first_slot
    found = [grid[:-1, first:].cumprod(1).sum(1).tolist()
             for grid in (result.correct, result.backbone_correct, result.covered) if grid is not None]
    assert result.matches[:-1].tolist() == found[0] and result.matches[-1] == 0
    if case.config.head == "dflash2":
        assert found == [facts["matches_selector"], facts["matches_backbone"], facts["matches_oracle"]]
    else:
        assert found[0] == facts["matches"]


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_every_gradient(case, form):
    case.drafter.zero_grad()
    result = case.loss(spec=case.spec(form))
    mean = result.loss / result.weight
    mean.backward()
    assert mean.item() == pytest.approx(case.facts["loss"], rel=1e-5)
    grads = {name: param.grad for name, param in case.drafter.named_parameters()}
    wanted = {key.removeprefix("grad."): case.tensors[key] for key in case.tensors if key.startswith("grad.")}
    assert len(wanted) >= 15
    for name in wanted:
        close(grads[name], wanted[name])
    case.drafter.zero_grad()


@pytest.mark.parametrize("name", DFLASH2)
def test_the_selectors_loss_on_the_targets_distribution(name):
    case = cached(name)
    t = case.tensors
    spec = case.spec(terms=LossTerms(ce=0.0, tv=1e-30), selector_terms=LossTerms(ce=0.0, tv=1.0))
    for form in FORMS:
        result = case.loss(spec=spec._replace(form=form))
        close(result.loss.detach(), (t["weights"] * t["selector_tv"] * t["counts"]).sum())


def test_the_metrics_of_DeepSpec():
    for name in DSPARK:
        case = cached(name)
        metrics = case.facts["metrics"]
        result = case.loss()
        weights = case.tensors["weights"]
        assert result.tv.item() / result.weight.item() == pytest.approx(metrics["l1_loss"] / 2, rel=1e-5)
        expected = result.expected_len[:-1].mean()
        assert expected.item() == pytest.approx(metrics["tau_probabilistic"], rel=1e-5)
        error = (weights * result.confidence_error[:-1]).sum() / weights.sum()
        assert error.item() == pytest.approx(metrics["confidence_abs_error"], rel=1e-5)


def first_tokens(case):
    return case.tensors["ids"][case.tensors["anchors"]]


def test_greedy_walks(case):
    t = case.tensors
    for n, token in enumerate(first_tokens(case)):
        hidden = t["hidden"][n, case.config.first_slot:]
        with torch.no_grad():
            tokens, proposal = decoding.draft_tokens(case.drafter, case.head, hidden, token[None], 0.0, None)
        assert torch.equal(tokens, t["path"][n]) and proposal is None


@pytest.mark.parametrize("name", DFLASH2)
def test_proposals_of_a_sampled_walk(name, monkeypatch):
    """The client's draws, in its order: the distributions that they came from."""
    case = cached(name)
    t = case.tensors
    for n, token in enumerate(first_tokens(case)):
        path = iter(t["sampled_path"][n])

        def same_draw(scores, temperature, generator, path=path, n=n):
            wanted = next(path)
            return same_draw.candidates.pop(0).eq(wanted).nonzero()[0]

        hidden = t["hidden"][n, 1:]
        with torch.no_grad():
            same_draw.candidates = list(case.head(hidden).topk(16).indices)
            monkeypatch.setattr(decoding, "pick", same_draw)
            tokens, proposal = decoding.draft_tokens(case.drafter, case.head, hidden, token[None], 0.7, None)
        assert torch.equal(tokens, t["sampled_path"][n])
        close(proposal.gather(1, t["sampled_candidates"][n]), t["sampled_q"][n])
        close(proposal.sum(1), torch.ones(len(tokens)))


@pytest.mark.parametrize("name", DSPARK)
def test_logits_and_confidence_along_the_walk(name):
    case = cached(name)
    t = case.tensors
    for n, first in enumerate(first_tokens(case)):
        before = torch.cat([first[None], t["path"][n, :-1]])
        with torch.no_grad():
            logits = case.head(t["hidden"][n]) + case.drafter.markov_head.bias(before)
            embedded = case.drafter.markov_head.markov_w1(before)
            confidence = case.drafter.confidence_head(t["hidden"][n], embedded)
        close(logits, t["walk_logits"][n])
        close(confidence, t["confidence_walk"][n])
        for threshold, prefixes in case.facts["prefix_at_threshold"].items():
            sure = torch.sigmoid(confidence) >= float(threshold)
            assert int(sure.int().cumprod(0).sum()) == prefixes[n]


# ------------------------------------------------------------------------- losses, against speculators' own

LOSSES = {"tv": "tv_loss", "kl": "kl_div_loss", "nla": "neg_log_acceptance_loss", "lk": "lk_hybrid_loss"}


@pytest.mark.parametrize("term", LOSSES)
def test_terms_equal_those_of_speculators(term):
    golden = load_file(GOLDEN / "losses.safetensors")
    logits = golden["draft_logits"][0].clone().requires_grad_()
    target = golden["target_logits"][0]
    labels = torch.zeros(len(logits), dtype=torch.int64)
    terms = LossTerms(ce=0.0, **{term: 1.0})
    found = md.terms_of_logits(logits, target, labels, terms)
    (found.loss * golden["incoming"][0]).sum().backward()
    close(found.loss.detach(), golden[LOSSES[term]][0], 2e-6)
    close(logits.grad, golden[f"{LOSSES[term]}.grad"][0], 2e-6)
    raw = golden["draft_logits"][0].clone()
    loss, *_, grad = md.terms_and_grad(raw, target, labels, None, terms)
    close(loss, golden[LOSSES[term]][0], 2e-6)
    close(grad * golden["incoming"][0][:, None], golden[f"{LOSSES[term]}.grad"][0], 2e-6)


def test_three_taps():
    golden = load_file(GOLDEN / "losses.safetensors")
    config = md.DrafterConfig(64, 64, 1, 4, 2, 16, 256, 4, 255, (1,), 6, ("full_attention",), head="dflash2",
                              conv_taps=3, conv_group=16)
    conv = md.BlockConv(config)
    kernel = golden["conv3.base"].view(3, 4, 16) + golden["conv3.delta"].view(3, 4, 3, 4)[..., None]
    close(conv.convolve(kernel, golden["conv3.x"]), golden["conv3.y"])


def test_dpace_weights():
    golden = load_file(GOLDEN / "losses.safetensors")
    mask = golden["dpace.mask"].view(-1, 8).bool() if golden["dpace.mask"].numel() % 8 == 0 else None
    ce = golden["dpace.ce"].view(-1, 8)
    close(md.slot_weights(ce, mask, "dpace", 1.0), golden["dpace.weights"].view(-1, 8))


# ---------------------------------------------------------------------------------------------------- by hand

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
BY_HAND = [  # term, value, gradient by the logits
    ("ce", -math.log(0.3), (0.5, -0.7, 0.2)),
    ("tv", 0.3, (0.25, -0.15, -0.10)),
    ("kl", 0.19379, (0.3, -0.2, -0.1)),
    ("nla", 0.35667, (0.3571, -0.2143, -0.1429)),
    ("lk", 0.28699, None),
]


@pytest.mark.parametrize("term, value, grad", BY_HAND)
def test_terms_by_hand(term, value, grad):
    logits = P.log()[None].float().requires_grad_()
    terms = LossTerms(**({"ce": 0.0} | {term: 1.0}))
    found = md.terms_of_logits(logits, Q.log()[None], torch.tensor([1]), terms)
    found.loss.sum().backward()
    assert found.loss.item() == pytest.approx(value, abs=1e-5) and found.alpha.item() == pytest.approx(0.7)
    if grad is None:  # the hybrid: exp(-2.1) of kl's
        share = math.exp(-2.1)
        grad = [share * kl + (1 - share) * tv for kl, tv in zip(BY_HAND[2][2], BY_HAND[1][2], strict=True)]
        assert share == pytest.approx(0.12246, abs=1e-5)
    assert logits.grad[0].tolist() == pytest.approx(list(grad), abs=1e-4)


def test_convolution_by_hand():
    """One channel, taps 2, base (1, .5), two blocks of two: the second block sees nothing of the first."""
    config = md.DrafterConfig(1, 1, 1, 1, 1, 1, 9, 2, 8, (1,), 6, ("full_attention",), head="dflash2",
                              conv_taps=2, conv_group=1)
    conv = md.BlockConv(config)
    with torch.no_grad():
        conv.base_kernel[:] = torch.tensor([1.0, 0.5])[None, :, None]
        conv.kernel_projection.weight.zero_()
        x = torch.tensor([1.0, 2.0, 3.0, 4.0])[None, :, None]
        before, after = conv.kernels(x)
        assert conv.convolve(before, x).flatten().tolist() == [1.0, 2.5, 3.0, 5.5]
        assert conv.convolve(after, x).flatten().tolist() == [1.0, 2.5, 3.0, 5.5]


def test_selectors_walk_by_hand():
    """Tokens A..E are 0..4; rank 1, Wh h = 1, two candidates a slot: the selector's walk is C, E, the
    backbone's B, D."""
    config = md.DrafterConfig(2, 1, 1, 1, 1, 2, 5, 3, 4, (1,), 6, ("full_attention",), head="dflash2",
                              conv_taps=1, conv_group=1, selector_rank=1, selector_top_k=2)
    selector = md.CandidateSelector(config)
    linear = nn.Linear(2, 5, bias=False)
    with torch.no_grad():
        selector.predecessor_codebook[:] = torch.tensor([1.0, 0, 2, 0, 0])[:, None]
        selector.successor_codebook[:] = torch.tensor([0, 0, 0.3, -0.5, 0.2])[:, None]
        selector.hidden_projection.weight.fill_(1.0)
        # logits of slot 1 (hidden 1, 0) and of slot 2 (hidden 0, 1)
        linear.weight[:] = torch.tensor([[0, 0], [1.0, 0], [0.9, 0], [0, 2.0], [0, 1.5]])
        hidden = torch.eye(2)
        tokens, _ = decoding.walk_selector(selector, Head(linear), 1.0, hidden, torch.tensor([0]), 0.0, None)
    assert tokens.tolist() == [2, 4] and Head(linear)(hidden).argmax(-1).tolist() == [1, 3]


def test_the_worked_example_with_dspark():
    """Twelve tokens, supervised 3-5 and 8-11, K 4: every slot predicts one token further than in DFlash."""
    run_length = np.array([0, 0, 0, 2, 1, 0, 0, 0, 3, 2, 1, 0])
    anchors = np.array([3, 4, 8, 9, 10])
    blocks = md.block_arrays(np.zeros(12, np.int64), run_length, anchors, 6, 4, 8, first_slot=0)
    assert blocks[2].tolist() == [[2, 1, 3, 2, 1, 0]]
    assert blocks[3][0, :9].tolist() == [0, 1, 4, 8, 9, 10, 12, 13, 16] and (blocks[3][0, 9:] == 24).all()
    long = md.block_arrays(np.zeros(12, np.int64), np.full(12, 9), anchors, 6, 4, 8, first_slot=0)
    assert long[2][0, 0] == 4
    counts = torch.tensor([[True, True, False, False]])
    weights = md.slot_weights(torch.zeros(1, 4), counts, "decay", 2.0, first_slot=0)
    assert weights[0].tolist() == pytest.approx([1, math.exp(-0.5), 0, 0])
    assert md.walk([1, 9, 1], 4) == [2, 1] and md.walk([3, 0, 0], 4) == [3]


def test_expected_length_by_hand():
    """alpha .5, .5, then a slot that doesn't count: 1 + .5 + .25."""
    config = cached("dspark_b4").config
    blocks = md.Blocks(torch.tensor([0, 1]), torch.tensor([2]), config, cached("dspark_b4").spec())
    half = torch.tensor([0.5, 0.5])
    ones = torch.ones(2)
    slots = md.SlotTerms(ones, ones, ones.bool(), tv=half, kl=half, alpha=half)
    result = md.row_result(ones.sum(), blocks.weights(ones), slots, ones.bool(), blocks)
    assert result.expected_len.tolist() == [1.75]


def test_blocks_stay_whole_in_chunks():
    run_length = np.full(40, 3)
    run_length[7] = 1
    blocks = md.block_arrays(np.zeros(40, np.int64), run_length, np.arange(5, 12), 7, 4, 8, whole_blocks=True)
    slots = blocks[3][0]
    pad = 28
    assert slots.tolist() == [1, 2, 3, 5, 6, 7, 9, pad, 13, 14, 15, 17, 18, 19, pad, pad,
                              21, 22, 23, 25, 26, 27, pad, pad]

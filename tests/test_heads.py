"""The heads DFlash 2 and DSpark and the losses on the target's distribution, against tensors made by the
public packages, numbers by hand, autograd and finite differences.

data/heads/ holds outputs of z-lab's `dflash` 0.1.0 (DFlash 2), of DeepSpec's model and loss code (DSpark) and
of `speculators` 0.9.0 (the losses) on fixed random weights, fp32, CPU: one packed row of 32 tokens,
conversation A 0..19 (supervised 4..11 and 15..19), B 20..31 (23..31), seven anchors. Those packages know no
packing: every block was run by itself. Labels are the drafter's own picks in places, so that matches differ.
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


def compiled_with_inductor(function):
    return torch.compile(function, dynamic=False)


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


@pytest.mark.parametrize("taps, block_size, compiled", [
    (1, 4, False), (2, 4, False), (3, 4, False), (3, 2, False), (2, 4, True)])
def test_convolution_and_its_gradients(taps, block_size, compiled):
    """Against the definition, slot by slot in fp64, and autograd of that: N 3, D 8, groups of 4 channels."""
    torch.manual_seed(0)
    config = md.DrafterConfig(8, 8, 1, 1, 1, 8, 16, block_size, 15, (1,), 2, ("full_attention",),
                              head="dflash2", conv_taps=taps, conv_group=4)
    conv = md.BlockConv(config)
    exact = {}
    for name, param in conv.named_parameters():
        nn.init.normal_(param)
        exact[name] = param.detach().double().requires_grad_()
    x = torch.randn(1, 3 * block_size, 8, requires_grad=True)
    exact_x = x.detach().double().requires_grad_()
    made = (exact_x @ exact["kernel_projection.weight"].t()).view(3, block_size, 2, taps, 2)
    weight = torch.randn(2, *x.shape)
    loss = 0.0
    wanted_loss = 0.0

    def both_sides(x):
        return [conv.convolve(kernel, x) for kernel in conv.kernels(x)]
    if compiled:
        both_sides = compiled_with_inductor(both_sides)
    for side, found in enumerate(both_sides(x)):
        blocks = exact_x.view(3, block_size, 8)
        wanted = torch.stack([
            sum((made[:, k, side, tau].repeat_interleave(4, -1) + exact["base_kernel"][side, tau])
                * blocks[:, k - tau] for tau in range(min(k + 1, taps)))
            for k in range(block_size)], 1).view(x.shape)
        close(found, wanted, 2e-6)
        loss = loss + (found * weight[side]).sum()
        wanted_loss = wanted_loss + (wanted * weight[side]).sum()
    loss.backward()
    wanted_loss.backward()
    close(x.grad, exact_x.grad, 5e-6)
    for name, param in conv.named_parameters():
        close(param.grad, exact[name].grad, 5e-6)


def test_three_taps():
    golden = load_file(GOLDEN / "losses.safetensors")
    config = md.DrafterConfig(64, 64, 1, 4, 2, 16, 256, 4, 255, (1,), 6, ("full_attention",), head="dflash2",
                              conv_taps=3, conv_group=16)
    conv = md.BlockConv(config)
    kernel = golden["conv3.delta"].view(3, 4, 3, 4), golden["conv3.base"].view(3, 4, 16)
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


# ----------------------------------------------------------------------------- forms, chunks, the soft cap

ALL_TERMS = LossTerms(ce=0.3, tv=0.7, kl=0.2, nla=0.4, lk=0.5)


def scaled_case(name, cap=None):
    """A case whose logits are far apart, so that the terms and the cap mean something."""
    case = Case(name)
    with torch.no_grad():
        case.head.linear.weight *= 6
    case.head.softcap = cap
    return case


def gradients(case, spec, batch=None):
    case.drafter.zero_grad()
    result = case.loss(case.batch(spec.chunk) if batch is None else batch, spec)
    result.loss.backward()
    return result, {name: param.grad.clone() for name, param in case.drafter.named_parameters()}


def unchunked(case, spec):
    """The same loss in one autograd pass over all slots, nothing chunked, checkpointed or fused."""
    case.drafter.zero_grad()
    config = case.config
    k = config.block_size
    t = case.tensors
    caught = []
    hook = case.drafter.register_forward_hook(lambda module, args, out: caught.append(out))
    case.loss(spec=spec)
    hook.remove()
    hidden = caught[0][0][:-k]
    draft = torch.arange(k) + config.shift
    counted = t["run_length"][t["anchors"]].clamp(max=config.n_drafts)
    counts = (draft >= 1) & (draft <= counted[:, None])
    label_at = (t["anchors"][:, None] + draft).clamp(max=31)
    labels, before = t["ids"][label_at].flatten(), (label_at - 1).clamp(min=0).flatten()
    logits = case.head(hidden)
    target = case.head(t["target_last_hidden"][before]).detach()
    extra = 0
    if config.head == "dspark":
        embedded = case.drafter.markov_head.markov_w1(t["ids"][before])
        logits = logits + case.drafter.markov_head.markov_w2(embedded)
    slots = md.terms_of_logits(logits, target, labels, spec.terms)
    ce = slots.ce.view(-1, k)
    weights = md.slot_weights(ce, counts, spec.kind, spec.gamma, first_slot=config.first_slot)
    if config.head == "dflash2":
        unary, candidates = logits.topk(16)
        scores = case.drafter.candidate_selector(hidden, t["ids"][before], candidates, unary)
        is_label = candidates == labels[:, None]
        ce = torch.where(is_label.any(1), scores.logsumexp(1) - (scores * is_label).sum(1), 0)
        kept = torch.minimum(scores.softmax(1), target.softmax(1).gather(1, candidates)).sum(1)
        extra = spec.selector_terms.ce * ce + spec.selector_terms.tv * (1 - kept)
    elif config.head == "dspark":
        logit = case.drafter.confidence_head(hidden, embedded)
        alpha = slots.alpha.detach()
        extra = -spec.confidence * (alpha * nn.functional.logsigmoid(logit)
                                    + (1 - alpha) * nn.functional.logsigmoid(-logit))
    loss = (weights.flatten() * (slots.loss + extra) * counts.flatten()).sum()
    loss.backward()
    return loss.item(), {name: param.grad.clone() for name, param in case.drafter.named_parameters()}


@pytest.mark.parametrize("kind", ["decay", "dpace"])
@pytest.mark.parametrize("cap", [None, 20.0])
@pytest.mark.parametrize("name", ["dflash2_k4", "dspark_b8"])
def test_all_forms_and_chunk_sizes_give_one_autograd_passs_gradients(name, cap, kind):
    case = scaled_case(name, cap)
    spec = case.spec(kind=kind, terms=ALL_TERMS, selector_terms=LossTerms(ce=0.6, tv=0.5))
    wanted_loss, wanted = unchunked(case, spec)
    k = case.config.block_size
    for form in FORMS:
        for chunk in (k, 3 * k, 128):
            result, grads = gradients(case, spec._replace(form=form, chunk=chunk))
            assert result.loss.item() == pytest.approx(wanted_loss, rel=2e-6)
            for param in wanted:
                close(grads[param], wanted[param], 5e-6)


def test_dspark_on_tokens_alone_needs_no_target():
    """ce alone, no confidence head: the target's last state may be missing."""
    case = scaled_case("dspark_b8")
    spec = case.spec(terms=LossTerms(ce=0.7), confidence=0.0)
    assert not spec.needs_last("dspark")
    wanted_loss, wanted = unchunked(case, spec)
    for form in FORMS:
        batch = case.batch(spec.chunk)
        n_features = len(case.config.target_layer_ids) * case.config.hidden_size
        batch = batch._replace(target_hidden=batch.target_hidden[..., :n_features])
        case.drafter.zero_grad(set_to_none=True)
        result = case.loss(batch, spec._replace(form=form))
        result.loss.backward()
        assert result.loss.item() == pytest.approx(wanted_loss, rel=2e-6)
        assert result.expected_len is None
        for name, param in case.drafter.named_parameters():
            if not name.startswith("confidence_head"):
                close(param.grad, wanted[name], 5e-6)


def test_reductions_over_the_vocabulary():
    """Against torch's own: the first of equals, whole groups of -inf, vocabularies of one group."""
    torch.manual_seed(0)
    for vocab_size in (64, 100, 128, 640, 2050, 4096):
        for levels in (1, 3, 50, 10**6):
            logits = torch.randint(levels, (40, vocab_size)).double()
            logits[:5, : vocab_size // 2] = -torch.inf
            assert torch.equal(md.argmax(logits), logits.argmax(-1))
            close(md.logsumexp(logits), logits.logsumexp(-1), 1e-14)
            close(md.total(logits[5:]), logits[5:].sum(-1), 1e-14)
        logits[7, vocab_size // 3] = torch.nan
        assert md.argmax(logits)[7] == vocab_size // 3 and md.logsumexp(logits)[7].isnan()


def test_the_likeliest_tokens():
    """Against a full sort; many equal values, whole groups of them, and vocabularies that have no groups."""
    torch.manual_seed(0)
    for vocab_size in (64, 100, 640, 2048, 2050, 4096):
        for levels in (3, 50, 10**6):
            logits = torch.randint(levels, (40, vocab_size)).float()
            logits[:5, : vocab_size // 2] = levels + 1.0
            values, tokens = md.likeliest(logits, 16)
            assert torch.equal(values, logits.sort(dim=-1, descending=True).values[:, :16])
            assert torch.equal(values, logits.gather(1, tokens))
            assert all(len(set(row)) == 16 for row in tokens.tolist())


@pytest.mark.parametrize("form", FORMS)
def test_a_soft_loss_without_a_gradient_is_the_same(case, form):
    spec = case.spec(form, terms=ALL_TERMS, selector_terms=LossTerms(ce=1.0, tv=1.0))
    with_grad = case.loss(spec=spec)
    with torch.no_grad():
        without = case.loss(spec=spec)
    for found, wanted in zip(without, with_grad, strict=True):
        if wanted is not None:
            close(found.float(), wanted.detach().float(), 1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_a_row_without_a_valid_anchor_has_loss_0_and_no_nan(name, form):
    case = cached(name)
    case.drafter.zero_grad()
    arrays = md.block_arrays(np.zeros(32, np.int64), np.zeros(32, np.int64), np.array([], np.int64), 3,
                             case.config.block_size, 16, case.config.first_slot, whole_blocks=True)
    batch = case.batch()._replace(anchors=torch.from_numpy(arrays[0]), starts=torch.from_numpy(arrays[1]),
                                  counted=torch.from_numpy(arrays[2]), slots=torch.from_numpy(arrays[3]))
    result = case.loss(batch, case.spec(form))
    result.loss.backward()
    assert result.loss.item() == 0 and result.weight.item() == 0 and not result.matches.any()
    for param in case.drafter.parameters():
        assert param.grad is None or not param.grad.any()
    case.drafter.zero_grad()


def test_the_gradient_of_nla_is_exact_where_the_distributions_hardly_meet():
    """alpha 4e-5: a difference of two numbers near 1 would be off by a percent of the gradient."""
    logits = torch.tensor([[0.0, -11.0, -12.0]])
    target = torch.tensor([[-11.0, 0.0, -13.0]])
    terms = LossTerms(ce=0.0, nla=1.0)
    *_, exact = md.terms_with_grad(logits.double(), target.double(), torch.tensor([0]), terms)
    *_, grad = md.terms_with_grad(logits, target, torch.tensor([0]), terms)
    torch.testing.assert_close(grad.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("terms", [LossTerms(ce=0, tv=1.0), LossTerms(ce=0, nla=1.0), LossTerms(ce=0, lk=1.0),
                                   LossTerms(ce=0, kl=1.0), ALL_TERMS], ids=str)
def test_gradients_are_the_slopes_of_the_values(terms):
    """Finite differences in fp64, no two probabilities tied. lk's share is a constant of its gradient."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    target = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 3, 6])
    *_, grad = md.terms_with_grad(logits, target, labels, terms)
    share = torch.exp(-3 * torch.minimum(logits.softmax(1), target.softmax(1)).sum(1))

    def value(at):
        p, q = at.softmax(1), target.softmax(1)
        ce = -at.log_softmax(1).gather(1, labels[:, None])[:, 0]
        tv = 0.5 * (p - q).abs().sum(1)
        kl = (q * (q.log() - p.log())).sum(1)
        nla = -(1 - tv).log()
        return (terms.ce * ce + terms.tv * tv + terms.kl * kl + terms.nla * nla
                + terms.lk * (share * kl + (1 - share) * tv))

    step = 1e-6
    for v in range(7):
        moved = torch.zeros(3, 7, dtype=torch.float64)
        moved[:, v] = step
        slope = (value(logits + moved) - value(logits - moved)) / (2 * step)
        torch.testing.assert_close(grad[:, v], slope, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_compiled_soft_losses(biased):
    """Inductor's code, which writes the gradient over the logits, against the same in fp64."""
    torch.manual_seed(0)
    logits, bias, target = torch.randn(3, 16, 1024)
    labels = torch.randint(0, 1024, (16,))
    function = md.biased_terms_and_grad if biased else md.terms_and_grad

    def run(apply, cast):
        tables = [cast(table) for table in ((logits, bias, target) if biased else (logits, target))]
        return apply(function)(*tables, labels, *(() if biased else (3.0,)), ALL_TERMS)
    wanted = run(lambda plain: plain, torch.Tensor.double)
    found = run(compiled_with_inductor, torch.Tensor.clone)
    for one, two in zip(found, wanted, strict=True):
        close(one, two, 2e-5)


F32 = torch.float32
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype, softcap, biased, compiled", [
    (F32, None, True, False), (F32, 3.0, False, False), (F32, 3.0, True, False), (BF16, None, True, False),
    (BF16, 3.0, False, False), (BF16, None, True, True), (BF16, 3.0, False, True)])
def test_cross_entropy_over_its_logits(dtype, softcap, biased, compiled):
    """Value, argmax and gradient against autograd in fp64; some slots are sure of their label."""
    torch.manual_seed(0)
    logits, bias = torch.randn(2, 16, 1024).to(dtype)
    labels = torch.randint(0, 1024, (16,))
    logits[torch.arange(8), labels[:8]] = torch.linspace(5, 30, 8).to(dtype)
    exact = logits.double().requires_grad_()
    biased_logits = exact + bias.double() if biased else exact
    capped = biased_logits if softcap is None else softcap * torch.tanh(biased_logits / softcap)
    wanted = torch.nn.functional.cross_entropy(capped, labels, reduction="none")
    wanted.sum().backward()
    cross_entropy = md.CrossEntropy(compiled_with_inductor) if compiled else md.CrossEntropy()
    its_bias = bias if biased else None
    assert torch.equal(cross_entropy.argmax(logits, its_bias), biased_logits.argmax(-1))
    ce, grad = cross_entropy(logits, labels, softcap, its_bias)
    close(ce, wanted.detach(), 2e-6)
    close(grad, exact.grad, 4e-3 if dtype == BF16 else 2e-6)
    assert grad.data_ptr() == logits.data_ptr()


def test_a_soft_loss_makes_one_chunk_of_logits_at_a_time():
    """M 64, chunk 8, V 1000, both forms; whole logits would be 64,000 elements."""
    from test_model import cost_of
    head = Head(nn.Linear(8, 1000, bias=False).requires_grad_(False))
    config = config_of("dflash2", hidden_size=8, vocab_size=1000, selector_top_k=16)
    selector = random_drafter(config).candidate_selector
    last = torch.randn(64, 8)
    for form in FORMS:
        spec = LossSpec("decay", 4.0, form, 8, terms=ALL_TERMS)

        def loss(hidden, spec=spec):
            inputs = md.SlotInputs(hidden, torch.arange(64), torch.arange(64), last)
            return md.chunked_terms(inputs, head, spec, selector).loss

        biggest, kept = cost_of(loss, torch.randn(64, 8).requires_grad_())
        assert biggest <= 8 * 1000 and kept < 8 * 1000, (form, biggest, kept)


# --------------------------------------------------------------------------------------------- what sees what

def config_of(head, **changes):
    sizes = {"dflash2": dict(conv_taps=2, conv_group=8, selector_rank=4, selector_top_k=5),
             "dspark": dict(markov_rank=4, confidence=True)}.get(head, {})
    base = dict(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
                vocab_size=61, block_size=4, mask_token_id=60, target_layer_ids=(1, 3), num_target_layers=6,
                layer_types=("full_attention",) * 2, head=head)
    return md.DrafterConfig(**base | sizes | changes)


def random_drafter(config, seed=1):
    drafter = md.Drafter(config, attend_dense)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in drafter.parameters():
            spread = torch.randn(param.shape, generator=generator)
            param.copy_(1 + 0.3 * spread if param.dim() == 1 else 0.15 * spread)
    return drafter


class Row:
    """A packed row of two conversations, all supervised, with a loss on the target's distribution."""

    def __init__(self, config, seed=2):
        generator = torch.Generator().manual_seed(seed)
        self.config = config
        self.drafter = random_drafter(config)
        self.embed = nn.Embedding.from_pretrained(torch.randn(61, 32, generator=generator))
        linear = nn.Linear(32, 61, bias=False).requires_grad_(False)
        linear.weight.copy_(torch.randn(61, 32, generator=generator))
        self.head = Head(linear)
        run_length = np.concatenate([np.arange(19, -1, -1), np.arange(19, -1, -1)])
        anchors = np.array([3, 8, 9, 20, 21, 29])
        start = np.repeat([0, 20], 20)
        arrays = md.block_arrays(start, run_length, anchors, 7, config.block_size, 2 * config.block_size,
                                 config.first_slot, whole_blocks=True)
        self.anchors = anchors.tolist()
        self.batch = md.Batch(
            torch.randn(1, 40, 96, generator=generator), torch.randint(0, 60, (40,), generator=generator),
            torch.arange(40) % 20, *(torch.from_numpy(array) for array in arrays))
        self.spec = LossSpec("decay", 4.0, "checkpoint", 2 * config.block_size,
                             terms=LossTerms(ce=1.0, tv=1.0), confidence=float(config.confidence))

    @torch.no_grad()
    def hidden(self, batch=None):
        """(N, K, D)."""
        caught = []
        hook = self.drafter.register_forward_hook(lambda module, args, out: caught.append(out))
        batch = self.batch if batch is None else batch
        self.result = md.row_loss(self.drafter, self.embed, self.head, batch, 0, dense_mask, self.spec)
        hook.remove()
        return caught[0].view(7, self.config.block_size, -1)


@pytest.mark.parametrize("k", [4, 7, 10, 16])
@pytest.mark.parametrize("head, changes", [
    ("dflash2", dict(conv_taps=1)), ("dflash2", dict(conv_taps=2)), ("dflash2", dict(conv_taps=3)),
    ("dspark", {})])
def test_nothing_from_the_anchor_on_reaches_its_block(head, changes, k):
    row = Row(config_of(head, block_size=k, **changes))
    before = row.hidden()
    for n, anchor in enumerate(row.anchors):
        ids = row.batch.ids.clone()
        ids[anchor + 1:] = (ids[anchor + 1:] + 7) % 60
        features = row.batch.target_hidden.clone()
        features[:, anchor:] += 3.0   # taps from the anchor on
        features[..., 64:] += 3.0     # the last hidden state everywhere: it is for the loss alone
        after = row.hidden(row.batch._replace(ids=ids, target_hidden=features))
        assert torch.equal(before[n], after[n])
        assert not torch.equal(before[n + 1:-1], after[n + 1:-1]) or n == len(row.anchors) - 1


@pytest.mark.parametrize("head", ["dflash2", "dspark"])
def test_a_predecessor_moves_the_scores_or_the_bias_of_its_own_slots_alone(head, monkeypatch):
    """What the head adds to a slot, (M, ..), before and after one token of the row is another."""
    row = Row(config_of(head))
    seen = []
    scores = md.edge_scores

    def noted_scores(*arguments):
        seen.append(scores(*arguments))
        return seen[-1]

    monkeypatch.setattr(md, "edge_scores", noted_scores)
    if head == "dspark":
        markov = row.drafter.markov_head.markov_w1
        markov.register_forward_hook(lambda module, arguments, out: seen.append(out))
    row.hidden()
    before = torch.cat(seen)
    seen.clear()
    changed = 10  # inside the blocks of anchors 8 and 9
    ids = row.batch.ids.clone()
    ids[changed] = (ids[changed] + 1) % 60
    row.hidden(row.batch._replace(ids=ids))
    after = torch.cat(seen)
    slots = row.batch.slots[0]
    real = slots < 28
    block, slot = slots // 4, slots % 4
    anchor = torch.tensor(row.anchors + [0, 0])[block]
    is_predecessor = (anchor + slot + row.config.shift - 1 == changed) & real
    moved = (before != after).any(-1)
    assert torch.equal(moved[real], is_predecessor[real]) and is_predecessor.sum() == 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head", ["dflash", "dflash2", "dspark"])
def test_a_drafter_that_says_what_the_target_says_has_no_distance_to_it(head, form):
    """Hidden states replaced by the target's own, one before the label: an index off by one shows."""
    row = Row(config_of(head))
    config = row.config
    if head == "dspark":
        with torch.no_grad():
            row.drafter.markov_head.markov_w2.weight.zero_()
    before = (torch.tensor(row.anchors + [0])[:, None] + torch.arange(4) + config.shift - 1).clamp(min=0)
    own = row.batch.target_hidden[0, :, 64:][before].view(1, -1, 32)

    class Perfect(nn.Module):
        def forward(self, *args):
            return own

    perfect = Perfect()
    perfect.config = config
    for part in ("candidate_selector", "markov_head", "confidence_head"):
        if hasattr(row.drafter, part):
            setattr(perfect, part, getattr(row.drafter, part))
    result = md.row_loss(perfect, row.embed, row.head, row.batch, 0, dense_mask, row.spec._replace(form=form))
    assert result.tv.item() == pytest.approx(0, abs=1e-5) and result.kl.item() == pytest.approx(0, abs=1e-5)
    counted = row.batch.counted[0].float()
    torch.testing.assert_close(result.expected_len, 1 + counted, atol=1e-4, rtol=0)
    shifted = row.batch._replace(target_hidden=row.batch.target_hidden.roll(1, 1))
    wrong = md.row_loss(perfect, row.embed, row.head, shifted, 0, dense_mask, row.spec._replace(form=form))
    assert wrong.tv.item() > 0.3 * wrong.weight.item()


# ------------------------------------------------------------------------------------------- without effect

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", ["dflash2", "dspark"])
def test_a_fresh_head_changes_no_bit_of_the_backbone(head, dtype):
    plain = md.Drafter(config_of("dflash"), attend_dense)
    plain.init_weights(3)
    headed = md.Drafter(config_of(head), attend_dense)
    headed.init_weights(3)
    weights = headed.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.state_dict().items())
    row = Row(config_of("dflash"))
    features = row.batch.target_hidden[..., :64].to(dtype)
    ids = torch.randint(0, 60, (2, 4), generator=torch.Generator().manual_seed(0))
    embeds = row.embed(ids).view(1, 8, 32).to(dtype)
    anchors = torch.tensor([5, 30])
    masks = {"full_attention": dense_mask(torch.tensor([0, 20]), anchors, 40, 4, None)}
    positions = (anchors[:, None] + torch.arange(4)).flatten()
    with torch.no_grad():
        out = [drafter.to(dtype)(features, embeds, torch.arange(40), positions, masks)
               for drafter in (plain, headed)]
        assert torch.equal(*out)
        head_of_target = Head(row.head.linear.to(dtype))
        for block in out[1].view(2, 4, 32):
            hidden = block[headed.config.first_slot:]
            tokens, _ = decoding.draft_tokens(headed, head_of_target, hidden, ids[0, :1], 0.0, None)
            assert torch.equal(tokens, head_of_target(hidden).argmax(-1))
            if head == "dspark":
                biased = head_of_target(hidden) + headed.markov_head.bias(ids[0, :1])
                assert torch.equal(biased, head_of_target(hidden))


@pytest.mark.parametrize("form", FORMS)
def test_cross_entropy_alone_is_the_plain_loss_bit_for_bit(form):
    row = Row(config_of("dflash"))
    batch = row.batch._replace(target_hidden=row.batch.target_hidden[..., :64])
    spec = LossSpec("dpace", 4.0, form, 8)
    grads = []
    for given in (spec, spec._replace(terms=LossTerms(ce=1.0))):
        row.drafter.zero_grad()
        result = md.row_loss(row.drafter, row.embed, row.head, batch, 0, dense_mask, given)
        result.loss.backward()
        assert result.tv is None and not given.needs_last("dflash")
        grads.append([result.loss, *(param.grad for param in row.drafter.parameters())])
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


@pytest.mark.parametrize("selector_detach", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("terms, selector_terms", [
    (LossTerms(ce=0.1), LossTerms(ce=0.7)), (LossTerms(ce=0.1), LossTerms(ce=0.1, tv=0.9)),
    (LossTerms(ce=0.2, tv=0.5), LossTerms(ce=1.0))])
def test_a_share_of_the_selectors_loss(terms, selector_terms, softcap, selector_detach):
    """Gradients of the fused form against the checkpointed one, which is plain autograd: ramp 0.3, D-PACE."""
    row = Row(config_of("dflash2"))
    row.head.softcap = softcap
    spec = LossSpec("dpace", 4.0, "checkpoint", 8, terms=terms, selector_terms=selector_terms,
                    selector_detach=selector_detach)
    batch = row.batch
    if not spec.needs_last("dflash2"):
        batch = batch._replace(target_hidden=batch.target_hidden[..., :64])
    results = []
    for form in FORMS:
        row.drafter.zero_grad()
        result = md.row_loss(row.drafter, row.embed, row.head, batch, 0, dense_mask,
                             spec._replace(form=form), torch.tensor(0.3))
        result.loss.backward()
        results.append([result.loss.detach(), *(param.grad for param in row.drafter.parameters())])
    for one, two in zip(*results, strict=True):
        close(one, two, 5e-6)


# ------------------------------------------------------------------------------------------------------ files

BACKBONE = 58
KEYS = {"dflash": BACKBONE, "dflash2": BACKBONE + 20 + 3, "dspark": BACKBONE + 4}


@pytest.mark.parametrize("head", KEYS)
def test_saved_tensors_and_a_round_trip(head, tmp_path):
    """A server does not notice a missing one: key sets are compared, and bytes."""
    config = config_of(head, num_layers=5, layer_types=("full_attention",) * 5)
    drafter = random_drafter(config)
    checkpoints.save_drafter(tmp_path, config, drafter.state_dict())
    names = set(load_file(tmp_path / "model.safetensors"))
    assert len(names) == KEYS[head] and names == set(drafter.state_dict())
    parts = {
        "dflash2": {"layers.4.mlp_conv.base_kernel", "layers.0.attention_conv.kernel_projection.weight",
                    "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook",
                    "candidate_selector.hidden_projection.weight"},
        "dspark": {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
                   "confidence_head.proj.weight", "confidence_head.proj.bias"}}
    assert parts.get(head, set()) <= names
    again, weights = checkpoints.load_drafter(tmp_path)
    assert again == config
    other = tmp_path / "again"
    other.mkdir()
    checkpoints.save_drafter(other, again, weights)
    for file in ("model.safetensors", "config.json"):
        assert (other / file).read_bytes() == (tmp_path / file).read_bytes()


def test_config_of_dflash2():
    plain = checkpoints.config_json(config_of("dflash"))
    found = checkpoints.config_json(config_of("dflash2", in_block="bidirectional"))
    assert found["architectures"] == ["DFlash2DraftModel"] and found["is_causal"] is False
    assert found["dflash_config"] == plain["dflash_config"] | dict(
        conv_kernel_size=2, conv_group_size=8, selector_rank=4, selector_top_k=5)
    assert set(found) == set(plain) | {"is_causal"}
    assert "is_causal" not in checkpoints.config_json(config_of("dflash2"))


def test_config_of_dspark():
    plain = checkpoints.config_json(config_of("dflash"))
    found = checkpoints.config_json(config_of("dspark", num_anchors=7))
    new = dict(mask_token_id=60, target_layer_ids=[1, 3], num_anchors=7, markov_rank=4,
               markov_head_type="vanilla", enable_confidence_head=True, confidence_head_with_markov=True,
               sample_from_anchor=True)
    assert found == plain | new | {"architectures": ["Qwen3DSparkModel"]}
    assert "sample_from_anchor" not in found["dflash_config"] and "is_causal" not in found
    without = checkpoints.config_json(config_of("dspark", confidence=False))
    assert without["enable_confidence_head"] is False


@pytest.mark.parametrize("name", ["DSparkDraftModel", "DSparkSpeculator", "LlamaForCausalLM"])
def test_another_architecture_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        checkpoints.config_from_json(checkpoints.config_json(config_of("dspark")) | {"architectures": [name]})


def test_other_markov_heads_are_refused():
    with pytest.raises(ValueError, match="gated"):
        checkpoints.config_from_json(
            checkpoints.config_json(config_of("dspark")) | {"markov_head_type": "gated"})


def test_a_file_of_DeepSpecs_holds_the_targets_tables_too(tmp_path, capsys):
    config = config_of("dspark")
    state = random_drafter(config).state_dict()
    tables = {"embed_tokens.weight": torch.zeros(61, 32), "lm_head.weight": torch.zeros(61, 32)}
    checkpoints.save_drafter(tmp_path, config, state | tables)
    _, weights = checkpoints.load_drafter(tmp_path)
    assert set(weights) == set(state) and "embed_tokens.weight, lm_head.weight" in capsys.readouterr().out

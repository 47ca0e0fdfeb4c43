"""Drafter, slots, loss, acceptance and files, against z-lab's client, plain loops in fp64, and numbers
by hand."""

import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import model_drafter as md
from common import batch_of, loss_of_row
from common import tiny_config as config
from dflash_trainer import (
    checkpoints,
    decoding,
)
from flex_utils import attend_dense, dense_mask
from model_drafter import Drafter, Head, LossSpec, chunked_ce, walk

CPU = torch.device("cpu")
SLIDING, FULL = "sliding_attention", "full_attention"


def drafter_of(c, seed=1):
    """Random weights that matter: norms away from 1, and rounded to bf16 so that a saved file holds
    the same."""
    drafter, generator = Drafter(c, attend_dense), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in drafter.parameters():
            spread = torch.randn(p.shape, generator=generator)
            p.copy_((1 + 0.3 * spread if p.dim() == 1 else 0.15 * spread).bfloat16())
    return drafter


def run_lengths(turns, s):
    """turns: [first, end) of each supervised turn, row indices -> (S,) supervised tokens that follow
    in the turn."""
    out = np.zeros(s, dtype=np.int64)
    for first, end in turns:
        for i in range(first, end):
            out[i] = end - 1 - i
    return out


def row_of(lengths, vocab=60, seed=0):
    """Packed conversations -> ids, position of each token in its own, start of each token's own; plain
    lists."""
    rng = random.Random(seed)
    pos = [i for n in lengths for i in range(n)]
    return [rng.randrange(vocab) for _ in pos], pos, [i - p for i, p in enumerate(pos)]


def make_slots(lengths, turns, anchors, n_anchors=None, k=4, chunk=4, seed=0):
    ids, pos, start = (np.array(x, dtype=np.int64) for x in row_of(lengths, seed=seed))
    anchors = np.array(anchors, dtype=np.int64)
    return batch_of(
        ids, pos, start, anchors, run_lengths(turns, len(ids)), n_anchors or len(anchors), k, chunk
    )


def spec(kind="decay", form="checkpoint", gamma=2.0, chunk=4):
    return LossSpec(kind, gamma, form, chunk)


# -------------------------------------------------------------------------------- forward, against the client


def client_model(directory):
    reason = "the dflash client (pip install --no-deps dflash==0.1.0) is the reference here"
    model = pytest.importorskip("dflash.model", reason=reason)
    return model.DFlashDraftModel.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "kinds", [(SLIDING, FULL, SLIDING), (FULL,) * 3, (SLIDING,) * 3], ids=["mixed", "full", "sliding"]
)
@pytest.mark.parametrize("window", [3, 6, 100])
def test_packed_blocks_equal_one_client_call_each(tmp_path, kinds, window):
    """Three conversations, nine blocks in one call, two of them padding, against nothing but the
    block's own context."""
    c = config(layer_types=kinds, sliding_window=window if SLIDING in kinds else None)
    drafter = drafter_of(c)
    checkpoints.save_drafter(tmp_path, c, drafter.state_dict())
    client, embed = client_model(tmp_path), nn.Embedding(61, 32)
    ids, pos, start = row_of((13, 21, 9))
    hidden = torch.randn(1, 43, 64, generator=torch.Generator().manual_seed(2))
    anchors = [1, 5, 6, 12, 14, 25, 33, 35, 42]
    got = packed_forward(drafter, embed, ids, pos, start, hidden, anchors)
    for n, a in enumerate(anchors):
        here, block = start[a], torch.tensor([[ids[a]] + [60] * 3])
        want = client(
            position_ids=torch.arange(a - here + 4)[None],
            noise_embedding=embed(block),
            target_hidden=hidden[:, here:a],
        )
        torch.testing.assert_close(got[n], want[0], atol=2e-5, rtol=1e-4)


def packed_forward(drafter, embed, ids, pos, start, hidden, anchors, padding=2):
    """The whole row in one call -> (N, K, D) of the blocks that are no padding."""
    c, k, n = drafter.config, drafter.config.block_size, len(anchors)
    a, s = torch.tensor(anchors + [0] * padding), torch.tensor([start[x] for x in anchors] + [0] * padding)
    block = torch.full((n + padding, k), c.mask_token_id)
    block[:, 0] = torch.tensor(ids)[a]
    block_pos = (torch.tensor(pos)[a][:, None] + torch.arange(k)).flatten()
    masks = {
        kind: dense_mask(s, a, len(ids), k, c.sliding_window if kind == SLIDING else None)
        for kind in c.layer_types
    }
    return drafter(hidden, embed(block.view(1, -1)), torch.tensor(pos), block_pos, masks)[0].view(
        n + padding, k, -1
    )[:n]


def test_an_anchor_at_the_first_token_sees_its_own_block_only():
    """Nothing of the conversation before it: any hidden states give the same."""
    drafter, embed = drafter_of(config()), nn.Embedding(61, 32)
    ids, pos, start = row_of((7, 9))
    hiddens = [torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    one, two = (packed_forward(drafter, embed, ids, pos, start, h, [0, 7, 8]) for h in hiddens)
    assert torch.equal(one[:2], two[:2]) and not torch.equal(one[2], two[2])


# --------------------------------------------------------------------------------------------------- the leak


class Leak:
    """row_loss with everything supervised; .blocks() gives the logits of every slot, (N, K, V), seen
    by a hook."""

    lengths, anchors = (20, 20), [8, 9, 10, 11, 20, 21, 29]

    def __init__(self):
        self.drafter, self.embed = drafter_of(config()), nn.Embedding(61, 32)
        self.head = Head(nn.Linear(32, 61, bias=False))
        self.slots = make_slots(self.lengths, [(0, 20), (20, 40)], self.anchors, 9)
        self.hidden = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(5))
        self.drafter.register_forward_hook(lambda m, i, out: setattr(self, "out", out))

    @torch.no_grad()
    def blocks(self, ids=None, hidden=None, make_mask=dense_mask):
        slots = self.slots if ids is None else self.slots._replace(ids=ids)
        loss_of_row(
            self.drafter,
            self.embed,
            self.head,
            self.hidden if hidden is None else hidden,
            slots,
            make_mask,
            spec(),
        )
        return self.head(self.out[0]).view(9, 4, 61)

    def changed(self, ids_from, hidden_from):
        """ids at and after ids_from and hidden states at and after hidden_from made different."""
        ids, hidden = self.slots.ids.clone(), self.hidden.clone()
        ids[ids_from:] = (ids[ids_from:] + 7) % 60
        hidden[:, hidden_from:] += 3.0
        return ids, hidden


@pytest.mark.parametrize("n", range(len(Leak.anchors)))
def test_nothing_from_the_anchor_on_reaches_its_block(n):
    leak, a = Leak(), Leak.anchors[n]
    before, after = leak.blocks(), leak.blocks(*leak.changed(a + 1, a))
    assert torch.equal(before[n], after[n])
    assert all(
        not torch.equal(before[m], after[m]) for m in range(n + 1, 7)
    )  # later anchors do see the change
    assert torch.equal(before[:n], after[:n])


@pytest.mark.parametrize("n", range(len(Leak.anchors)))
def test_anchor_token_and_the_hidden_state_before_it_do_reach_the_block(n):
    leak, a = Leak(), Leak.anchors[n]
    ids, hidden = leak.slots.ids.clone(), leak.hidden.clone()
    ids[a] = (ids[a] + 7) % 60
    hidden[:, a - 1] += 3.0
    before = leak.blocks()
    assert not torch.equal(before[n], leak.blocks(ids=ids)[n])
    first_of_its_conversation = a == 20
    assert torch.equal(before[n], leak.blocks(hidden=hidden)[n]) == first_of_its_conversation


def test_the_leak_test_finds_a_leak():
    """Positive control: a mask that also shows the anchor's own hidden state, which tells the next token."""
    leak = Leak()

    def leaky(start, anchor, *rest):
        return dense_mask(start, anchor + (anchor > 0), *rest)

    before = leak.blocks(make_mask=leaky)
    for n, a in enumerate(Leak.anchors):
        assert not torch.equal(before[n], leak.blocks(*leak.changed(a + 1, a), make_mask=leaky)[n])


# ------------------------------------------------------------------------------------------- slots and labels


def test_worked_example_slots():
    """Design 12: supervised 3-5 and 8-11; anchor 4 counts slot 1 only, anchor 9 slots 1 and 2, anchor
    3 slots 1 and 2."""
    slots = make_slots((12,), [(3, 6), (8, 12)], [3, 4, 8, 9, 10], n_anchors=7, chunk=8)
    assert slots.counted[0].tolist() == [2, 1, 3, 2, 1, 0, 0]
    assert slots.anchors[0].tolist() == [3, 4, 8, 9, 10, 0, 0] and slots.starts[0].tolist() == [0] * 7
    assert slots.slots[0].tolist() == [1, 2, 5, 9, 10, 11, 13, 14, 17] + [28] * 7  # padded to two chunks of 8
    assert slots.positions.tolist() == list(range(12))


def test_slots_of_packed_conversations_and_block_longer_than_the_turn():
    slots = make_slots((6, 5), [(2, 6), (7, 11)], [2, 7, 9], n_anchors=3, k=10, chunk=1)
    assert slots.starts[0].tolist() == [0, 6, 6] and slots.counted[0].tolist() == [3, 3, 1]
    assert slots.slots[0].tolist() == [1, 2, 3, 11, 12, 13, 21]


def labels_of_row_loss(slots, k=4):
    """The labels that reach the loss, by slot: a drafter whose hidden state asks for nothing, ce read
    as -log p(label)."""
    vocab = 61
    bias = torch.log_softmax(
        torch.arange(vocab, dtype=torch.float32) / 10, -1
    )  # p differs for every token: ce names it
    linear = nn.Linear(8, vocab)
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.copy_(bias)
    out = torch.zeros(1, slots.anchors[0].numel() * k, 8)
    with torch.no_grad():
        result = loss_of_row(
            Fake(out, k), nn.Embedding(vocab, 8), Head(linear), None, slots, dense_mask, spec()
        )
    return [[int((bias + ce).abs().argmin()) if ce else None for ce in row] for row in result.ce]


class Fake:
    """A drafter whose output is given; records what it was fed."""

    def __init__(self, out, k, mask_token=60):
        self.out, self.config = out, config(block_size=k, mask_token_id=mask_token)

    def __call__(self, target_hidden, block_embeds, context_pos, block_pos, masks):
        self.embeds, self.context_pos, self.block_pos = block_embeds, context_pos, block_pos
        return self.out


def test_slot_k_is_trained_on_token_a_plus_k():
    slots = make_slots((12, 9), [(3, 6), (8, 12), (14, 21)], [3, 4, 8, 10, 14, 19], n_anchors=8)
    ids = slots.ids.tolist()
    assert labels_of_row_loss(slots) == [
        [None, ids[4], ids[5], None],
        [None, ids[5], None, None],
        [None, ids[9], ids[10], ids[11]],
        [None, ids[11], None, None],
        [None, ids[15], ids[16], ids[17]],
        [None, ids[20], None, None],
        [None] * 4,
        [None] * 4,
    ]


def test_input_of_a_block_is_anchor_then_masks_at_the_positions_of_its_own_conversation():
    slots, embed = make_slots((12, 9), [(3, 12), (14, 21)], [4, 14], n_anchors=3), nn.Embedding(61, 8)
    fake = Fake(torch.zeros(1, 12, 8), 4)
    loss_of_row(fake, embed, Head(nn.Linear(8, 61)), None, slots, dense_mask, spec())
    fed = [
        [int((embed.weight - e).abs().sum(1).argmin()) for e in block] for block in fake.embeds.view(3, 4, 8)
    ]
    assert fed[:2] == [[int(slots.ids[a]), 60, 60, 60] for a in (4, 14)]
    assert fake.block_pos.tolist()[:8] == [
        4,
        5,
        6,
        7,
        2,
        3,
        4,
        5,
    ]  # row index 14 is position 2 of the second one
    assert fake.context_pos.tolist() == list(range(12)) + list(range(9))


@pytest.mark.parametrize("form", ["checkpoint", "fused"])
@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_row_without_a_valid_anchor_has_loss_zero_and_no_nan(kind, form):
    slots = make_slots((8,), [], [], n_anchors=3)
    assert slots.counted[0].tolist() == [0] * 3 and slots.slots[0].tolist() == [12] * 4
    drafter = drafter_of(config())
    result = loss_of_row(
        drafter,
        nn.Embedding(61, 32),
        Head(nn.Linear(32, 61)),
        torch.randn(1, 8, 64),
        slots,
        dense_mask,
        spec(kind, form),
    )
    result.loss.backward()
    assert result.loss.item() == 0 and result.weight.item() == 0 and result.matches.tolist() == [0] * 3
    assert all(p.grad is None or not p.grad.any() for p in drafter.parameters())  # NaN counts as any()


# ------------------------------------------------------------------------------------------------------- loss


def reference(hidden, weight, bias, cap, ids, turns, anchors, n, k, kind, gamma):
    """Design 3.5, 3.6, 3.10 written out, fp64, all logits at once -> loss, ce, matches, correct,
    weights."""
    turn = {i: t for t, (first, end) in enumerate(turns) for i in range(first, end)}
    loss = torch.zeros((), dtype=torch.float64)
    ce, matches, correct, weights = np.zeros((n, k)), [0] * n, np.zeros((n, k), dtype=bool), np.zeros((n, k))
    for b, a in enumerate(anchors):
        mine = {}
        for slot in range(1, k):
            if any(turn.get(a + i) is None or turn.get(a + i) != turn[a] for i in range(slot + 1)):
                break
            z = (weight * hidden[b * k + slot]).sum(1) + bias
            z = z if cap is None else torch.tanh(z / cap) * cap
            mine[slot] = torch.log(torch.exp(z).sum()) - z[ids[a + slot]]
            ce[b, slot], correct[b, slot] = mine[slot].item(), int(z.argmax()) == ids[a + slot]
        while matches[b] + 1 in mine and correct[b, matches[b] + 1]:
            matches[b] += 1
        for slot, w in (decay_weights if kind == "decay" else dpace_weights)(mine, gamma).items():
            loss, weights[b, slot] = loss + w * mine[slot], w
    return SimpleNamespace(loss=loss, ce=ce, matches=matches, correct=correct, weights=weights)


def decay_weights(ce, gamma):
    return {slot: math.exp(-(slot - 1) / gamma) for slot in ce}


def dpace_weights(ce, _):
    reach = {}  # C_j = prod over i <= j of (0.5 q_i + 0.5)
    for slot in sorted(ce):
        reach[slot] = reach.get(slot - 1, 1.0) * (0.5 * math.exp(-ce[slot].item()) + 0.5)
    return {slot: sum(reach[m] for m in reach if m >= slot) for slot in ce}


TURNS, ANCHORS, LENGTHS = [(3, 6), (8, 12), (14, 40)], [3, 4, 8, 9, 10, 14, 15, 30, 37, 38], (12, 28)


def problem(cap, bias):
    """Logits of spread 4 or so, most labels hit on purpose, so that matches and the cap mean something."""
    generator = torch.Generator().manual_seed(3)
    slots = make_slots(LENGTHS, TURNS, ANCHORS, n_anchors=12)
    linear = nn.Linear(16, 61, bias=bias).requires_grad_(False)
    linear.weight.copy_(torch.randn(61, 16, generator=generator))
    hidden = torch.randn(48, 16, generator=generator)
    for b, a in enumerate(ANCHORS):
        for slot in range(1, 4):
            if a + slot < 40 and (b + slot) % 5 != 1:
                hidden[b * 4 + slot] = 0.7 * linear.weight[slots.ids[a + slot]]
    return slots, Head(linear, cap), hidden


@pytest.mark.parametrize("kind", ["decay", "dpace"])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["checkpoint", "fused"])
def test_loss_and_gradient_equal_an_unchunked_fp64_loop(kind, cap, bias, form):
    slots, head, hidden = problem(cap, bias)
    exact = hidden.double().requires_grad_()
    b = head.linear.bias.double() if bias else torch.zeros(61, dtype=torch.float64)
    want = reference(
        exact, head.linear.weight.double(), b, cap, slots.ids.tolist(), TURNS, ANCHORS, 12, 4, kind, 1.5
    )
    (want.loss / want.weights.sum()).backward()
    leaf = hidden.clone().requires_grad_()
    got = loss_of_row(
        Fake(leaf[None], 4), nn.Embedding(61, 16), head, None, slots, dense_mask, spec(kind, form, gamma=1.5)
    )
    (got.loss / got.weight).backward()
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-5)
    assert got.weight.item() == pytest.approx(want.weights.sum(), rel=1e-6)
    assert got.matches.tolist() == want.matches and max(want.matches) == 3 and min(want.matches[:10]) == 0
    assert (got.correct.numpy() == want.correct).all()
    assert (
        sum(want.matches) < want.correct.sum()
    )  # some block hits after a miss, which matches must not count
    np.testing.assert_allclose(got.ce, want.ce, atol=1e-5)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, atol=1e-6, rtol=1e-4)
    assert got.ce.requires_grad is False


def decay_reference(hidden, head, softcap, slots):
    """The loop's result for problem(), decay weights with gamma 2."""
    linear = head.linear
    bias = 0.0 if linear.bias is None else linear.bias.double()
    return reference(
        hidden.double(),
        linear.weight.double(),
        bias,
        softcap,
        slots.ids.tolist(),
        TURNS,
        ANCHORS,
        12,
        4,
        "decay",
        2.0,
    )


@pytest.mark.parametrize("form", ["checkpoint", "fused"])
def test_without_gradient_the_loss_is_the_same(form):
    """Evaluation: the form must not matter there."""
    slots, head, hidden = problem(None, False)
    want = decay_reference(hidden, head, None, slots)
    with torch.no_grad():
        got = loss_of_row(
            Fake(hidden[None], 4), nn.Embedding(61, 16), head, None, slots, dense_mask, spec(form=form)
        )
    assert (
        got.loss.item() == pytest.approx(want.loss.item(), rel=1e-5) and got.matches.tolist() == want.matches
    )


@pytest.mark.parametrize("chunk", [1, 4, 40])
@pytest.mark.parametrize("form", ["checkpoint", "fused"])
def test_chunk_size_changes_nothing(chunk, form):
    slots, head, hidden = problem(3.0, True)
    slots = make_slots(LENGTHS, TURNS, ANCHORS, n_anchors=12, chunk=chunk)
    want = decay_reference(hidden, head, 3.0, slots)
    got = loss_of_row(
        Fake(hidden[None].requires_grad_(), 4),
        nn.Embedding(61, 16),
        head,
        None,
        slots,
        dense_mask,
        spec(form=form, chunk=chunk),
    )
    assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-5)


class Biggest(TorchDispatchMode):
    """Elements of the biggest tensor any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            self.elements = max(self.elements, t.numel() if isinstance(t, torch.Tensor) else 0)
        return out


def cost_of(loss, hidden):
    """-> (biggest tensor of forward and backward, elements that autograd keeps between them)."""
    kept = []
    with Biggest() as biggest:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            ce = loss(hidden)
        ce.sum().backward()
    return biggest.elements, sum(kept)


@pytest.mark.parametrize("form", ["checkpoint", "fused"])
def test_loss_makes_one_chunk_of_logits_at_a_time_and_keeps_none(form):
    """M 64, chunk 8, V 1000. Whole logits would be 64,000 elements; the plain loss is the positive
    control."""
    head, labels = Head(nn.Linear(8, 1000, bias=False).requires_grad_(False)), torch.arange(64)
    hidden = torch.randn(64, 8).requires_grad_()
    biggest, kept = cost_of(lambda h: chunked_ce(h, head, labels, 8, form)[0], hidden)
    assert biggest <= 8 * 1000 and kept < 8 * 1000, (biggest, kept)
    biggest, kept = cost_of(lambda h: nn.functional.cross_entropy(head(h), labels, reduction="none"), hidden)
    assert biggest >= 64 * 1000 and kept >= 64 * 1000, (biggest, kept)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures CUDA memory")
@pytest.mark.parametrize("form", ["checkpoint", "fused"])
def test_loss_memory_does_not_grow_with_the_rows_of_logits(form):
    device, peaks = torch.device("cuda"), []
    head = Head(nn.Linear(64, 50000, bias=False, device=device).requires_grad_(False))
    for m in (1024, 8192):
        hidden = torch.randn(m, 64, device=device).requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        chunked_ce(hidden, head, torch.zeros(m, dtype=torch.int64, device=device), 512, form)[
            0
        ].sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] - peaks[0] < 64 << 20, peaks  # logits of 7168 more rows in fp32: 1.4 GB


def test_weights_by_hand():
    """Design 12: anchor 9 counts slots 1 and 2, gamma 2: 1 and e^-0.5. D-PACE with q = 1/2, 1/4: q'
    3/4, 5/8."""
    counts = torch.tensor([[False, True, True, False], [False] * 4])
    ce = torch.tensor([[9.0, math.log(2), math.log(4), 9.0], [9.0] * 4])
    decay = md.slot_weights(ce, counts, "decay", 2.0)
    torch.testing.assert_close(decay, torch.tensor([[0, 1, math.exp(-0.5), 0], [0] * 4]))
    dpace = md.slot_weights(ce, counts, "dpace", 2.0)
    c1, c2 = 3 / 4, 3 / 4 * 5 / 8
    torch.testing.assert_close(dpace, torch.tensor([[0, c1 + c2, c2, 0], [0] * 4]))


def test_weights_carry_no_gradient():
    ce = torch.rand(2, 4).requires_grad_()
    for kind in ("decay", "dpace"):
        assert not md.slot_weights(ce, torch.ones(2, 4).bool(), kind, 2.0).requires_grad


def test_default_gamma():
    assert [md.default_gamma(drafts) for drafts in (15, 9, 7, 3, 4, 31)] == [7, 5, 4, 2, 2.5, 16]


def test_first_loss_of_a_random_drafter_is_near_ln_v():
    c = config()
    drafter = Drafter(c, attend_dense)
    drafter.init_weights(0)
    head = nn.Linear(32, 61, bias=False)
    nn.init.normal_(head.weight, std=0.02)
    got = loss_of_row(
        drafter,
        nn.Embedding(61, 32),
        Head(head),
        torch.randn(1, 40, 64),
        make_slots(LENGTHS, TURNS, ANCHORS),
        dense_mask,
        spec(),
    )
    assert (got.loss / got.weight).item() == pytest.approx(math.log(61), abs=0.1)


def test_init_is_a_function_of_the_seed_and_leaves_norms_at_one():
    torch.manual_seed(0)
    one, two, other = (Drafter(config(), attend_dense) for _ in range(3))
    one.init_weights(3)
    torch.rand(5)  # the default generator plays no part
    two.init_weights(3)
    other.init_weights(4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert one.fc.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert all((p == 1).all() for p in one.parameters() if p.dim() == 1)


def test_rope_of_a_bf16_drafter_keeps_fp32_frequencies():
    """Position 30000 with theta 1e6: bf16 frequencies would turn by many radians too much."""
    cos, sin = md.rope_table(torch.tensor([30000]), 8, 1e6, torch.bfloat16)
    for i in range(4):
        angle = 30000 * 1e6 ** (-2 * i / 8)
        assert cos[0, i].item() == cos[0, i + 4].item() == pytest.approx(math.cos(angle), abs=0.01)
        assert sin[0, i].item() == pytest.approx(math.sin(angle), abs=0.01)


@pytest.mark.parametrize("head_dim, theta", [(64, 1e5), (128, 1e6), (128, 1e7), (256, 1e4)])
def test_rope_far_out_equals_that_of_the_layers_which_serve_the_drafter(head_dim, theta):
    """Bit for bit transformers' Qwen3 tables, at positions where an ulp of a frequency shows."""
    positions = torch.tensor([0, 1, 4095, 40_000, 262_143])
    rope = {"rope_type": "default", "rope_theta": theta}
    served = Qwen3RotaryEmbedding(Qwen3Config(head_dim=head_dim, rope_theta=theta, rope_parameters=rope))
    cos, sin = served(torch.zeros(1, 5, 8), positions[None])
    got = md.rope_table(positions, head_dim, theta, torch.float32)
    assert torch.equal(got[0], cos[0]) and torch.equal(got[1], sin[0])


# ------------------------------------------------------------------------------------------------- acceptance


def test_walk_of_the_worked_example():
    produced = walk([1, 9, 1], 4)  # matches of anchors 8, 9 (never an anchor of the walk), 10
    assert produced == [2, 1] and sum(produced) / len(produced) == 1.5


def test_walk_clamps_its_end_and_knows_short_answers():
    assert walk([15] * 20, 20) == [16, 3] and walk([15] * 20, 17) == [16]
    assert walk([0] * 5, 5) == [1] * 4 and walk([7], 2) == [1]
    assert walk([], 1) == [] and walk([], 0) == []


def simulated_client(truth, drafts, k, limit, stop):
    """z-lab's greedy loop with lists: truth = what the target says for ever, drafts[p] = K-1 guesses
    after token p."""
    start, lengths, stopped = 0, [], truth[0] == stop
    while start + 1 < limit and not stopped:
        verify = min(k, limit - start)
        block, accepted = drafts[start][: verify - 1], 0
        while accepted < len(block) and block[accepted] == truth[start + 1 + accepted]:
            accepted += 1
        produced = min(accepted + 1, limit - start - 1)
        said = truth[start + 1 : start + 1 + produced]
        if stop in said:
            produced, stopped = said.index(stop) + 1, True
        start += produced
        lengths.append(produced)
    return lengths


def test_walk_equals_a_simulation_of_the_clients_loop():
    rng = random.Random(1)
    for _ in range(500):
        k, t, good = rng.choice((2, 4, 8, 16)), rng.randrange(1, 40), rng.random()
        answer = [rng.randrange(1, 9) for _ in range(t - 1)] + [0]  # 0: end of turn
        truth = answer + [rng.randrange(1, 9) for _ in range(2 * k)]
        drafts = [[truth[p + i] if rng.random() < good else 9 for i in range(1, k)] for p in range(t)]
        matches = []
        for p in range(t):  # design 4: leading hits, ending at the first slot outside the answer
            inside = [drafts[p][i - 1] == answer[p + i] for i in range(1, k) if p + i < t]
            matches.append((inside + [False]).index(False))
        want = simulated_client(truth, drafts, k, t + k, 0)
        assert walk(matches, t) == want and sum(want) == t - 1


def test_accept_greedy_by_hand():
    def logits(*best):
        return nn.functional.one_hot(torch.tensor(best), 9).float()

    for draft, best, want in [
        ((1, 2, 3), (1, 2, 3, 4), (3, 4)),
        ((1, 2, 3), (1, 5, 3, 4), (1, 5)),
        ((1, 2, 3), (0, 2, 3, 4), (0, 0)),
        ((), (7,), (0, 7)),
    ]:
        n, token = decoding.accept_greedy(torch.tensor(draft, dtype=torch.int64), logits(*best))
        assert (n, token.tolist()) == (want[0], [want[1]])


# Two drafted tokens over 5, drafter and target far apart; row i of the target holds whatever was accepted
# before.
DRAFT = torch.tensor([[0.60, 0.10, 0.10, 0.10, 0.10], [0.05, 0.05, 0.30, 0.30, 0.30]])
TARGET = torch.tensor(
    [[0.10, 0.40, 0.20, 0.20, 0.10], [0.30, 0.30, 0.10, 0.10, 0.20], [0.02, 0.08, 0.20, 0.30, 0.40]]
)
CRITICAL = 23.513  # chi-square, 4 degrees of freedom, p = 1e-4


def always(draft, draft_probs, target_probs, generator):
    return 2, torch.multinomial(target_probs[2], 1, generator=generator)


def no_residual(draft, draft_probs, target_probs, generator):
    n, _ = decoding.accept_sampled(draft, draft_probs, target_probs, generator)
    return n, torch.multinomial(target_probs[n], 1, generator=generator)


def inverted(draft, draft_probs, target_probs, generator):
    return decoding.accept_sampled(
        draft, target_probs[:2], torch.cat([draft_probs, target_probs[2:]]), generator
    )


def last_row_residual(draft, draft_probs, target_probs, generator):
    n, token = decoding.accept_sampled(draft, draft_probs, target_probs, generator)
    wrong = (target_probs[2] - draft_probs[1]).clamp(min=0)
    return n, token if n < 2 else torch.multinomial(wrong, 1, generator=generator)


def chi_squares(accept, runs=6000):
    """Token i of the output, given that one came out there, must follow row i of the target ->
    statistic per row."""
    generator, counts = torch.Generator().manual_seed(11), torch.zeros(3, 5)
    drafts = torch.multinomial(DRAFT, runs, replacement=True, generator=generator).T
    for draft in drafts:
        n, token = accept(draft, DRAFT, TARGET, generator)
        for i, t in enumerate(draft[:n].tolist() + token.tolist()):
            counts[i, t] += 1
    expected = counts.sum(1, keepdim=True) * TARGET
    assert expected.min() > 5, expected  # else the statistic is no chi-square
    return ((counts - expected) ** 2 / expected).sum(1).tolist()


def test_accept_sampled_keeps_the_targets_distribution():
    assert max(chi_squares(decoding.accept_sampled)) < CRITICAL


@pytest.mark.parametrize("wrong", [always, no_residual, inverted, last_row_residual])
def test_the_chi_square_finds_wrong_rules(wrong):
    assert max(chi_squares(wrong)) > CRITICAL


def test_accept_sampled_accepts_all_of_an_equal_drafter():
    generator, p = torch.Generator().manual_seed(0), TARGET[:2]
    for draft in torch.multinomial(p, 200, replacement=True, generator=generator).T:
        n, token = decoding.accept_sampled(draft, p, TARGET, generator)
        assert n == 2 and 0 <= int(token) < 5


# ------------------------------------------------------------------------------------------------------ files

FIVE = dict(
    num_layers=5, layer_types=(SLIDING,) * 4 + (FULL,), eos_token_id=[7, 8], bos_token_id=1, rope_theta=1e7
)
KEYS = {
    "architectures", "model_type", "block_size", "dflash_config", "num_target_layers", "layer_types",
    "sliding_window", "use_sliding_window", "max_window_layers", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "attention_bias", "attention_dropout", "initializer_range", "max_position_embeddings",
    "tie_word_embeddings", "vocab_size", "dtype", "torch_dtype", "bos_token_id", "eos_token_id",
    "pad_token_id", "rope_theta", "rope_parameters", "rope_scaling",
}
FORBIDDEN = {"partial_rotary_factor", "mrope_section", "mrope_interleaved", "causal", "is_causal"}


def saved(directory, **changes):
    c = config(**changes)
    checkpoints.save_drafter(directory, c, drafter_of(c).state_dict())
    return c, json.loads((directory / "config.json").read_text())


def test_file_holds_exactly_the_58_published_tensors_in_bf16(tmp_path):
    saved(tmp_path, **FIVE)
    layer = [f"self_attn.{p}_proj" for p in "qkvo"] + [
        "self_attn.q_norm",
        "self_attn.k_norm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    ]
    want = {f"layers.{i}.{name}.weight" for i in range(5) for name in layer} | {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
    }
    with safe_open(tmp_path / "model.safetensors", "pt") as f:
        assert set(f.keys()) == want and len(want) == 58 and f.metadata() == {"format": "pt"}
        assert {f.get_tensor(n).dtype for n in want} == {torch.bfloat16}
        assert f.get_tensor("fc.weight").shape == (32, 2 * 32)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_config_has_exactly_the_keys_of_the_contract(tmp_path):
    c, j = saved(tmp_path, **FIVE)
    assert set(j) == KEYS and set(j["dflash_config"]) == {"mask_token_id", "target_layer_ids", "block_size"}
    nested = [k for v in [j] + [v for v in j.values() if isinstance(v, dict)] for k in v]
    assert not FORBIDDEN & set(nested)
    want = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "rope_scaling": None,
        "rope_theta": 1e7,
        "use_sliding_window": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "sliding_window": 6,
        "num_hidden_layers": 5,
        "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 3], "block_size": 4},
        "num_target_layers": 6,
        "layer_types": [SLIDING] * 4 + [FULL],
        "eos_token_id": [7, 8],
        "vocab_size": 61,
        "max_window_layers": 5,
    }
    assert {k: j[k] for k in want} == want


def test_full_attention_only_says_no_window(tmp_path):
    _, j = saved(tmp_path, layer_types=(FULL,) * 3, sliding_window=None)
    assert j["sliding_window"] is None and j["use_sliding_window"] is False


def test_scaled_targets_name_scale_and_cap(tmp_path):
    c, j = saved(tmp_path, input_embedding_scale=5.5, final_logit_softcapping=30.0)
    assert (
        j["dflash_config"]["input_embedding_scale"] == 5.5
        and j["dflash_config"]["final_logit_softcapping"] == 30.0
    )
    assert checkpoints.load_drafter(tmp_path)[0] == c


def test_qwen3_config_of_transformers_reads_the_same(tmp_path):
    from transformers import Qwen3Config

    saved(tmp_path, **FIVE)
    read = Qwen3Config.from_pretrained(tmp_path)
    assert read.rope_parameters["rope_theta"] == 1e7 and read.rope_parameters["rope_type"] == "default"
    assert read.layer_types == [SLIDING] * 4 + [FULL] and read.sliding_window == 6
    assert (read.head_dim, read.num_key_value_heads, read.num_hidden_layers) == (16, 2, 5)


@pytest.mark.parametrize(
    "changes", [{}, FIVE, dict(layer_types=(FULL,) * 3, sliding_window=None, eos_token_id=3)]
)
def test_round_trip(tmp_path, changes):
    c, _ = saved(tmp_path, **changes)
    again, state = checkpoints.load_drafter(tmp_path)
    want = drafter_of(c).state_dict()
    assert again == c and checkpoints.differences(c, again) == [] and set(state) == set(want)
    assert all(torch.equal(state[n].float(), want[n]) for n in want)


def test_differences_name_both_values():
    lines = checkpoints.differences(config(), config(block_size=8, target_layer_ids=(1, 4)))
    assert len(lines) == 2 and any("4" in line and "8" in line for line in lines)
    assert checkpoints.differences(config(), config(initializer_range=0.5, eos_token_id=9)) == []


PUBLISHED = {  # as z-lab's first releases: no layer_types, no rope_parameters, block_size at the top only
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "hidden_size": 2560,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "num_target_layers": 36,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}


def test_published_config_without_layer_types_or_rope_parameters():
    c = checkpoints.config_from_json(PUBLISHED)
    assert (
        c.layer_types == (FULL,) * 5
        and c.rope_theta == 1e6
        and c.block_size == 16
        and c.mask_token_id == 151669
    )
    assert c.target_layer_ids == (1, 9, 17, 25, 33) and c.sliding_window is None and c.head_dim == 128
    new = {k: v for k, v in PUBLISHED.items() if k != "rope_theta"} | {"rope_parameters": {"rope_theta": 5e6}}
    assert checkpoints.config_from_json(new).rope_theta == 5e6


@pytest.mark.parametrize("key", ["hidden_size", "block_size", "num_target_layers"])
def test_a_missing_key_is_named(key):
    with pytest.raises(ValueError, match=key):
        checkpoints.config_from_json({k: v for k, v in PUBLISHED.items() if k != key})

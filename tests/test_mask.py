"""The mask against a triple loop that knows conversations by id, not by [start, anchor) intervals."""

import random

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import flex_utils
from flex_utils import EMPTY, FULL, PARTIAL, TILE, block_mask, dense_mask, tile_states

PAD = None  # a padding block: no anchor


def truth(conversation, anchors, k, window, bidirectional=False):
    """conversation: id of each token of the row; anchors: row indices or PAD -> (Q, KV) bool. Design
    3.1, 3.3, 3.5."""
    s, n = len(conversation), len(anchors)
    rows = [[False] * (s + n * k) for _ in range(n * k)]
    for b, a in enumerate(anchors):
        for slot in range(k):
            row = rows[b * k + slot]
            for kv in range(s):
                if a is not PAD and kv < a and conversation[kv] == conversation[a]:
                    row[kv] = window is None or kv >= a + slot - (window - 1)
            for other in range(k):  # own block only: full layers see all of it, sliding ones max(0, k-W+1)..k
                if window is None:
                    row[s + b * k + other] = True
                elif bidirectional:
                    row[s + b * k + other] = abs(other - slot) < window
                else:
                    row[s + b * k + other] = max(0, slot - window + 1) <= other <= slot
    return torch.tensor(rows)


def tensors(conversation, anchors):
    """-> start, anchor as the mask takes them; a padding block is anchor 0, start 0."""
    first = {c: conversation.index(c) for c in set(conversation)}
    start = [0 if a is PAD else first[conversation[a]] for a in anchors]
    return torch.tensor(start), torch.tensor([0 if a is PAD else a for a in anchors])


def packed(lengths):
    return [i for i, n in enumerate(lengths) for _ in range(n)]


def random_rows():
    """(conversation, anchors, K, W): packed rows, anchors sorted, clumped or spread, padding blocks at
    the end."""
    rng = random.Random(0)
    for k in (1, 2, 4, 7, 10, 16, 33, 130):
        for window in (None, 1, 5, 17, 150):
            lengths = [rng.choice((1, 3, 40, 127, 128, 129)) for _ in range(rng.choice((1, 2, 3)))]
            s, n = sum(lengths), rng.choice((1, 3, 9)) if k < 30 else 2
            low = rng.choice((0, s // 2))
            anchors = sorted(rng.randrange(low, s) for _ in range(n)) + [PAD] * rng.choice((0, 1, 3))
            yield packed(lengths), anchors, k, window


ROWS = list(random_rows())
# Q a multiple of TILE and K < TILE: there create_block_mask's full tiles are well defined everywhere
WHOLE = [
    (packed([512]), list(range(384, 512, 4)), 16, None),  # context tiles full for every query tile
    (packed([512]), list(range(300, 396, 3)), 16, 220),  # full only where the window of every slot reaches
    (packed([130, 382]), sorted(list(range(0, 500, 30))) + list(range(497, 512)), 16, None),
    (
        packed([128, 300, 84]),
        list(range(200, 320, 2)) + [PAD] * 4,
        10,
        None,
    ),  # 640 slots, blocks over two tiles
    (packed([300]), list(range(290, 298)) + [PAD] * 8, 16, 100),  # S not a multiple of the tile
]


def tiles(matrix):
    """(Q, KV) -> (some pair visible, all pairs visible), one entry per tile; ragged tiles count what
    exists."""
    some = torch.zeros(-(-matrix.shape[0] // TILE), -(-matrix.shape[1] // TILE), dtype=torch.bool)
    every = some.clone()
    for i in range(some.shape[0]):
        for j in range(some.shape[1]):
            tile = matrix[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
            some[i, j], every[i, j] = tile.any(), tile.all()
    return some, every


def table(counts, indices):
    """The valid part of a BlockMask's (count, index) table as a list of sorted lists."""
    return [sorted(row[:n].tolist()) for n, row in zip(counts[0, 0], indices[0, 0])]


def tables(mask):
    """{name: table} for partial and full tiles, seen from queries (forward) and from keys (backward)."""
    for indices in (mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices):
        assert (
            indices.is_contiguous()
        )  # the kernels step through a row with stride 1, whatever the strides say
    return {
        "partial": table(mask.kv_num_blocks, mask.kv_indices),
        "full": table(mask.full_kv_num_blocks, mask.full_kv_indices),
        "partial of keys": table(mask.q_num_blocks, mask.q_indices),
        "full of keys": table(mask.full_q_num_blocks, mask.full_q_indices),
    }


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("k", [4, 10, 16])
def test_every_length_around_the_block_and_the_tile(k, window):
    for s in (1, 2, k - 1, k, k + 1, 127, 128, 129):
        anchors = sorted({0, 1, s // 2, s - 2, s - 1} & set(range(s)))
        got = dense_mask(*tensors([0] * s, anchors), s, k, window)
        assert torch.equal(got, truth([0] * s, anchors, k, window)), (s, k, window)


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_dense_mask_and_tiles_of_random_packed_rows(row):
    conversation, anchors, k, window = ROWS[row]
    want, (start, anchor) = truth(conversation, anchors, k, window), tensors(conversation, anchors)
    assert torch.equal(dense_mask(start, anchor, len(conversation), k, window), want)
    check_tiles(tile_states(start, anchor, len(conversation), k, window), want, len(conversation))


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_masks_that_are_bidirectional_in_the_block(row):
    """is_causal false: sliding layers see later slots of their block, too; full layers see what they saw."""
    conversation, anchors, k, window = ROWS[row]
    want, (start, anchor) = truth(conversation, anchors, k, window, True), tensors(conversation, anchors)
    n = len(conversation)
    assert torch.equal(dense_mask(start, anchor, n, k, window, True), want)
    check_tiles(tile_states(start, anchor, n, k, window, True), want, n)
    mask = block_mask(start, anchor, n, k, window, True)
    q, kv = torch.arange(want.shape[0])[:, None], torch.arange(want.shape[1])[None, :]
    assert torch.equal(mask.mask_mod(0, 0, q, kv), want)


def check_tiles(state, want, s):
    some, every = tiles(want)
    assert torch.equal(
        state == 0, ~some
    )  # a skipped tile with a visible pair: lost context; the reverse: slow
    assert not ((state == 2) & ~every).any()  # full tiles skip the mask function: a wrong one leaks
    in_context = (torch.arange(every.shape[1]) + 1) * TILE <= s
    assert torch.equal(state == 2, every & in_context)  # and none is missed, or flex is slow


@pytest.mark.parametrize("row", range(len(WHOLE)))
def test_block_mask_equals_create_block_mask(row):
    conversation, anchors, k, window = WHOLE[row]
    want, (start, anchor), s = (
        truth(conversation, anchors, k, window),
        tensors(conversation, anchors),
        len(conversation),
    )
    torchs = create_block_mask(lambda b, h, q, kv: want[q, kv], None, None, *want.shape, device="cpu")
    ours = block_mask(start, anchor, s, k, window)
    assert len(anchors) * k % TILE == 0 and tables(ours) == tables(torchs)
    check_tiles(tile_states(start, anchor, s, k, window), want, s)
    assert ours.seq_lengths == tuple(want.shape) and ours.BLOCK_SIZE == (TILE, TILE)


def test_the_rows_above_have_full_tiles_or_the_comparison_is_idle():
    full = [sum(map(len, tables(block_mask(*tensors(c, a), len(c), k, w))["full"])) for c, a, k, w in WHOLE]
    assert all(n > 0 for n in full[:4]), full


@pytest.mark.parametrize("row", range(0, len(ROWS), 3))
def test_block_mask_of_ragged_rows(row):
    """Ragged Q: the last query tile may be full here, torch calls it partial; both must visit the same
    tiles."""
    conversation, anchors, k, window = ROWS[row]
    want, (start, anchor) = truth(conversation, anchors, k, window), tensors(conversation, anchors)
    mask = block_mask(start, anchor, len(conversation), k, window)
    some, every = tiles(want)
    both = [sorted(p + f) for p, f in zip(tables(mask)["partial"], tables(mask)["full"])]
    assert both == [row.nonzero()[:, 0].tolist() for row in some]
    backward = [sorted(p + f) for p, f in zip(tables(mask)["partial of keys"], tables(mask)["full of keys"])]
    assert backward == [row.nonzero()[:, 0].tolist() for row in some.T]
    assert all(every[i, j] for i, row in enumerate(tables(mask)["full"]) for j in row)
    q, kv = torch.arange(want.shape[0])[:, None], torch.arange(want.shape[1])[None, :]
    assert torch.equal(mask.mask_mod(0, 0, q, kv), want)  # what partial tiles evaluate


@pytest.mark.parametrize("window", [None, 3])
def test_padding_block_sees_itself_only(window):
    start, anchor = tensors([0] * 40, [7, PAD])
    got = dense_mask(start, anchor, 40, 4, window)[4:]
    own = torch.ones(4, 4).tril().triu(-2).bool() if window else torch.ones(4, 4).bool()
    assert not got[:, :44].any() and torch.equal(got[:, 44:], own)


def test_worked_example():
    """Design 12: K 4, 12 tokens; anchor 4 sees context 0-3, anchor 9 sees 0-8, each its own block."""
    got = dense_mask(torch.tensor([0, 0]), torch.tensor([4, 9]), 12, 4, None)
    for slot in range(4):
        assert got[slot].nonzero()[:, 0].tolist() == [0, 1, 2, 3] + [12, 13, 14, 15]
        assert got[4 + slot].nonzero()[:, 0].tolist() == list(range(9)) + [16, 17, 18, 19]


def test_tile_states_of_the_worked_example(monkeypatch):
    """The same two blocks in tiles of 4 by 4, as drawn in tile_states' docstring."""
    monkeypatch.setattr(flex_utils, "TILE", 4)
    states = tile_states(torch.tensor([0, 0]), torch.tensor([4, 9]), 12, 4, None)
    assert states.tolist() == [[FULL, EMPTY, EMPTY, PARTIAL, EMPTY], [FULL, FULL, PARTIAL, EMPTY, PARTIAL]]


def test_sliding_example_by_hand():
    """W 3, anchor 4: slot k at position 4+k sees positions 2+k..4+k: context 2,3 then 3 then none;
    block causally."""
    got = dense_mask(torch.tensor([0]), torch.tensor([4]), 12, 4, 3)
    assert [row.nonzero()[:, 0].tolist() for row in got] == [
        [2, 3, 12],
        [3, 12, 13],
        [12, 13, 14],
        [13, 14, 15],
    ]

"""Packing, rows, run lengths, anchors."""

import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_trainer import rows as rows_module
from dflash_trainer import token_cache as tc


def test_pack_is_a_pure_function_and_wastes_little():
    rng = np.random.default_rng(1)
    for lengths in (
        np.clip(rng.lognormal(6, 1.2, 20000), 2, 4096).astype(int),
        rng.integers(20, 200, 300),
        np.full(100, 4096),
    ):
        rows = rows_module.pack(lengths, 0, 0, 4096)
        assert sorted(i for r in rows for i in r) == list(range(len(lengths)))
        assert max(lengths[r].sum() for r in rows) <= 4096
        assert 1 - lengths.sum() / (len(rows) * 4096) < 0.05
        assert rows == rows_module.pack(lengths, 0, 0, 4096)
    many = np.clip(rng.lognormal(6, 1.2, 2000), 2, 4096).astype(int)
    assert (
        rows_module.pack(many, 0, 1, 4096)
        != rows_module.pack(many, 0, 0, 4096)
        != rows_module.pack(many, 1, 0, 4096)
    )
    assert rows_module.pack([], 0, 0, 64) == []


def work_of_packing(lengths):
    """Lines of Python that pack() runs for them, and calls of C functions."""
    count = [0]

    def line(frame, event, arg):
        count[0] += event == "line"
        return line

    def call(frame, event, arg):
        count[0] += event == "c_call"
    before = sys.gettrace(), sys.getprofile()
    sys.settrace(line)
    sys.setprofile(call)
    try:
        rows_module.pack(lengths, 0, 0, 4096)
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return count[0]


@pytest.mark.parametrize("window", [1000, 1 << 20])
def test_packing_takes_work_in_proportion_to_the_conversations(window, monkeypatch):
    """Eight times as many take eight times the work, where 64 would be quadratic: over many windows, and
    within a large one. Counted, so that no machine's speed decides."""
    monkeypatch.setattr(rows_module, "PACK_WINDOW", window)
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 16_000), 2, 4096).astype(int)
    few = work_of_packing(lengths[:2000])
    many = work_of_packing(lengths)
    assert few > 2000  # each conversation costs something: the count counts
    assert many < 1.2 * 8 * few, (few, many)


def test_a_window_is_packed_whatever_the_others_hold(monkeypatch):
    """So that a window's size bounds what one conversation can cost: other lengths in the second window leave
    the rows of the first as they are."""
    monkeypatch.setattr(rows_module, "PACK_WINDOW", 500)
    lengths = np.random.default_rng(1).integers(2, 900, 1000)
    order = np.random.default_rng((3, 0)).permutation(1000)
    changed = lengths.copy()
    changed[order[500:]] = 4096
    first = set(order[:500].tolist())
    rows, others = (rows_module.pack(some, 3, 0, 4096) for some in (lengths, changed))
    of_first = sorted(row for row in rows if row[0] in first)
    assert sorted(i for row in of_first for i in row) == sorted(first)
    assert of_first == sorted(row for row in others if row[0] in first)


class Given(list):
    """Conversations from arrays."""


def conversation(turn, first=0):
    return tc.Conversation(
        np.arange(first, first + len(turn), dtype=np.int32), np.array(turn, np.int16), f"s{first}", False
    )


def test_worked_example():
    turn = [0, 0, 0, 1, 1, 1, 0, 0, 2, 2, 2, 2]
    row = rows_module.make_row(Given([conversation(turn)]), [0], 16, 7)
    length = rows_module.run_length(row.turn, row.conversation)
    assert length.tolist() == [0, 0, 0, 2, 1, 0, 0, 0, 3, 2, 1, 0, 0, 0, 0, 0]
    assert rows_module.draw_anchors(row, 16, np.random.default_rng(0)).tolist() == [3, 4, 8, 9, 10]
    assert row.index == 7 and row.lengths == [12] and row.sources == ["s0"]


def test_row():
    row = rows_module.make_row(
        Given([conversation([0, 1, 1]), conversation([1, 1], 50), conversation([0, 0, 1, 1], 90)]),
        [2, 1, 0],
        12,
        0,
    )
    assert row.ids.tolist() == [90, 91, 92, 93, 50, 51, 0, 1, 2, 0, 0, 0]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 0, 0, 0]
    assert row.conversation.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, -1, -1, -1]
    assert row.turn.tolist() == [
        0,
        0,
        1,
        1,
        1,
        1,
        0,
        1,
        1,
        0,
        0,
        0,
    ]  # turns meet at 3 | 4: conversations part them
    assert row.conversation_start.tolist()[:9] == [0, 0, 0, 0, 4, 4, 6, 6, 6]
    assert rows_module.run_length(row.turn, row.conversation).tolist() == [0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0]
    assert [a.dtype for a in row[:5]] == [np.int64, np.int64, np.int32, np.int32, np.int64]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_run_length_against_a_loop(pairs):
    turn, doc = np.array([p[0] for p in pairs]), np.sort(np.array([p[1] for p in pairs]))
    want = []
    for p in range(len(turn)):
        n = 0
        while turn[p] and p + n + 1 < len(turn) and turn[p + n + 1] == turn[p] and doc[p + n + 1] == doc[p]:
            n += 1
        want.append(n)
    assert rows_module.run_length(turn, doc).tolist() == want


@pytest.mark.parametrize(
    "n, weights, room, want",
    [
        (10, [50, 30, 20], [49, 29, 19], [5, 3, 2]),
        (10, [45, 35, 20], [44, 34, 19], [5, 3, 2]),  # quotas 4.5, 3.5, 2: the tie goes to the first
        (10, [97, 1, 1, 1], [96, 9, 9, 9], [7, 1, 1, 1]),  # at least one each
        (
            12,
            [60, 30, 2],
            [59, 29, 1],
            [7, 4, 1],
        ),  # the third has room for 1: 11 for the others, 7.33 and 3.67
        (10, [40, 40, 20], [3, 39, 19], [3, 5, 2]),  # the first is full at 3: 7 for the others, 4.67 and 2.33
        (2, [5, 9, 7], [4, 8, 6], [0, 1, 1]),  # more conversations than places
        (7, [10, 10, 10], [9, 9, 9], [3, 2, 2]),
    ],
)
def test_shares_by_hand(n, weights, room, want):
    assert rows_module.share_out(n, weights, room).tolist() == want


@given(st.lists(st.integers(2, 40), min_size=1, max_size=12), st.integers(1, 60), st.integers(0, 9))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_anchors(lengths, n, seed):
    row = rows_module.make_row(
        Given([conversation([1] * k) for k in lengths]), list(range(len(lengths))), 512, 0
    )
    anchors = rows_module.draw_anchors(row, n, np.random.default_rng(seed))
    valid = np.flatnonzero(rows_module.run_length(row.turn, row.conversation) >= 1)
    assert (
        len(anchors) == min(n, len(valid)) and (np.diff(anchors) > 0).all() and np.isin(anchors, valid).all()
    )
    assert (anchors == rows_module.draw_anchors(row, n, np.random.default_rng(seed))).all()
    if n >= len(lengths):
        assert len(np.unique(row.conversation[anchors])) == len(lengths)

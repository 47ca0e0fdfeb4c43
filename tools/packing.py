"""Conversations -> packed rows with anchors: pure functions of (seed, epoch, index), on the host.

    RowStream.row(i)   training row i and its anchors: pack, make_row, draw_anchors
    EvalRows.row(i)    held-out row i and every valid anchor
    target_calls       the few fixed (batch, length) shapes in which a target runs conversations
    Calls.plan         a row's conversations in those shapes
    inspect_data       prints what is in the files
"""
import sys
import threading
from typing import NamedTuple

import numpy as np

from tools.conversations import render


BATCHES = np.unique(np.geomspace(1, 512, 48).round().astype(int))  # conversations a call, to choose from


class Row(NamedTuple):
    """S packed tokens, host arrays."""
    ids: np.ndarray        # int64 (S,)
    pos: np.ndarray        # int64 (S,) position within the conversation
    doc: np.ndarray        # int32 (S,) conversation number in the row, -1 for padding
    turn: np.ndarray       # int32 (S,)
    doc_start: np.ndarray  # int64 (S,) where the token's conversation starts in the row
    run_length: np.ndarray  # int64 (S,) how many next positions are supervised: run_length()
    lengths: list          # of the row's conversations, in order
    sources: list          # str each
    index: int             # row number in the stream


def pack(lengths, seed, epoch, seq_len):
    """Every conversation once, in rows of at most seq_len tokens: [[conversation numbers]]. A pure function.

    Within windows of a shuffled order a row takes the longest conversation left, then again and again the
    longest that still fits. The lengths left are the bits of one integer: that search is one bit_length.
    """
    rng, rows, window = np.random.default_rng((seed, epoch)), [], 16384
    order = rng.permutation(len(lengths))
    for start in range(0, len(order), window):
        some, buckets, left = order[start:start + window], {}, 0
        for i, n in zip(some.tolist(), np.asarray(lengths)[some].tolist()):
            buckets.setdefault(n, []).append(i)
            left |= 1 << n
        while left:
            row, room = [], seq_len
            while fits := left & ((2 << room) - 1):
                n = fits.bit_length() - 1
                row.append(buckets[n].pop())
                room -= n
                if not buckets[n]:
                    left ^= 1 << n
            assert row, f"a conversation of {left.bit_length() - 1} tokens in rows of {seq_len}"
            rows.append(row)
    return [rows[i] for i in rng.permutation(len(rows))]


def target_lengths(lengths, seq_len, most):
    """The at most `most` lengths, rising, that pad conversations least: dynamic programming on a grid of 64
    multiples of 8."""
    longest = int(max(lengths))
    step = -(-longest // 512) * 8
    grid = np.array([*range(step, longest, step), min(seq_len, -(-longest // 8) * 8)])
    cell = np.searchsorted(grid, lengths)
    count, total = np.bincount(cell, minlength=len(grid)), np.bincount(cell, lengths, len(grid))
    count, total = np.concatenate([[0], np.cumsum(count)]), np.concatenate([[0], np.cumsum(total)])
    # cost[i, j]: padding when grid[j] takes all conversations longer than grid[i - 1]
    cost = grid[None, :] * (count[None, 1:] - count[:, None]) - (total[None, 1:] - total[:, None])
    cost = cost.astype(float)
    cost[np.tril_indices(len(count), -1, len(grid))] = np.inf
    best, chosen = cost[0], [[j] for j in range(len(grid))]
    for _ in range(most - 1):
        with_one_more = best[:, None] + cost[1:]                 # (last but one, last)
        before = with_one_more.argmin(0)
        better = with_one_more.min(0) < best
        chosen = [chosen[before[j]] + [j] if better[j] else chosen[j] for j in range(len(grid))]
        best = np.minimum(best, with_one_more.min(0))
    return [int(grid[j]) for j in chosen[-1]]


def target_calls(lengths, seq_len, call_tokens, most=6):
    """Calls of at most `most` shapes for such conversations in rows of seq_len tokens. Each shape in turn is
    the one that makes some rows cheapest; then each is chosen once more beside the others."""
    sample = np.asarray(lengths)[::max(1, len(lengths) // 16384)]
    rows = [sorted(sample[m].tolist(), reverse=True) for m in pack(sample, 0, 0, seq_len)[:24]]
    table = np.zeros((len(rows), max(map(len, rows))), np.int64)  # 0 where a row has fewer
    for r, row in enumerate(rows):
        table[r, :len(row)] = row
    grid = target_lengths(lengths, seq_len, 16)
    choices = [(b, n) for n in grid for b in BATCHES.tolist() if b == 1 or b * n <= 2 * seq_len]
    shapes = [(1, grid[-1])]
    for i in [*range(1, most), *range(1, most)]:
        others = shapes[:i] + shapes[i + 1:]
        shapes[i:i + 1] = [choices[int(np.argmin(row_costs(table, others, choices, call_tokens)))]]
    return Calls(sorted(set(shapes), key=lambda s: s[::-1]), call_tokens)


def row_costs(table, shapes, choices, call_tokens):
    """(C,): what the rows of `table` (R, n), lengths falling, cost with `shapes` and each of C choices."""
    batch, length = np.array(choices).T
    which, best = np.arange(len(choices)), np.zeros((len(choices), len(table), table.shape[1] + 1))
    for i in reversed(range(table.shape[1])):  # best[..., i]: of conversations i, i+1, ...
        after = best[which, :, np.minimum(i + batch, table.shape[1])]
        cost = (call_tokens + batch * length)[:, None] + after
        cost = np.where(length[:, None] >= table[:, i], cost, np.inf)
        for b, n in shapes:
            after = best[:, :, min(i + b, table.shape[1])]
            cost = np.minimum(cost, np.where(n >= table[:, i], call_tokens + b * n + after, np.inf))
        best[..., i] = np.where(table[:, i] > 0, cost, 0)
    return best[..., 0].sum(1)


class Calls(NamedTuple):
    """How a target runs a row's conversations: in few shapes, since what is new to a thread runs alone."""
    shapes: list         # (batch, length), by length; the last holds the longest conversation
    call_tokens: float   # what a call costs by itself, in tokens computed

    def plan(self, row_lengths):
        """-> [(batch, length, [positions in the row])], longest first: the calls in which it runs soonest.

        A call costs call_tokens and its tokens, padding included; neighbours by length share one.
        """
        order = sorted(range(len(row_lengths)), key=lambda m: -row_lengths[m])
        n = len(order)
        best, shapes = [0] * (n + 1), [None] * n  # cost of, first shape in: conversations i, i+1, ...
        for i in reversed(range(n)):
            best[i], shapes[i] = min((self.call_tokens + b * length + best[min(i + b, n)], (b, length))
                                     for b, length in self.shapes if length >= row_lengths[order[i]])
        calls, i = [], 0
        while i < n:
            batch, length = shapes[i]
            calls.append((batch, length, order[i:i + batch]))
            i += batch
        return calls


def make_row(conversations, members, seq_len, index):
    """Conversations side by side, padding at the end -> Row."""
    taken = [conversations[m] for m in members]
    lengths = [len(c.ids) for c in taken]
    starts, used = np.cumsum([0, *lengths[:-1]]), sum(lengths)
    ids, pos, turn, doc_start = (np.zeros(seq_len, kind) for kind in (np.int64, np.int64, np.int32, np.int64))
    doc = np.full(seq_len, -1, np.int32)
    ids[:used], turn[:used] = np.concatenate([c.ids for c in taken]), np.concatenate([c.turn for c in taken])
    doc[:used], doc_start[:used] = np.repeat(np.arange(len(taken)), lengths), np.repeat(starts, lengths)
    pos[:used] = np.arange(used) - doc_start[:used]
    sources = [c.source for c in taken]
    return Row(ids, pos, doc, turn, doc_start, run_length(turn, doc), lengths, sources, index)


def run_length(turn, doc):
    """(S,) -> int64 (S,): how many next positions are supervised, in its turn and conversation.

    Anchor a is valid iff it is >= 1 there; slot k of anchor a counts iff k <= it.
    """
    goes_on = (turn[:-1] > 0) & (turn[:-1] == turn[1:]) & (doc[:-1] == doc[1:])
    place = np.arange(len(turn))
    stop = np.where(np.append(goes_on, False), len(turn), place)
    return np.minimum.accumulate(stop[::-1])[::-1] - place


def share_out(n, weights, room):
    """n places by largest remainder: at least 1 each where n allows, at most `room` each."""
    weights, room, shares = np.asarray(weights, float), np.asarray(room), np.zeros(len(weights), np.int64)
    free = np.ones(len(weights), bool)
    while free.any():
        quota = np.where(free, (n - shares.sum()) * weights / weights[free].sum(), 0)
        full, small = free & (quota >= room), free & (quota < 1) & (len(weights) <= n)
        fixed = full if full.any() else small
        if not fixed.any():
            break
        shares[fixed], free = np.where(full, room, 1)[fixed], free & ~fixed
    if free.any():
        shares[free] = np.floor(quota[free])
        order = np.argsort(np.where(free, shares - quota, 1), kind="stable")
        shares[order[:n - shares.sum()]] += 1
    return shares


def draw_anchors(row, n, rng):
    """Row -> sorted int64 (<= n,) valid anchors, without replacement, shared out by supervised tokens."""
    valid = np.flatnonzero(row.run_length >= 1)
    if len(valid) <= n:
        return valid
    groups = [valid[row.doc[valid] == d] for d in np.unique(row.doc[valid])]
    supervised = [np.count_nonzero(row.turn[row.doc == row.doc[g[0]]]) for g in groups]
    shares = share_out(n, supervised, [len(g) for g in groups])
    return np.sort(np.concatenate([rng.choice(g, k, replace=False) for g, k in zip(groups, shares)]))


class RowStream:
    """Row i of training, epoch after epoch, for ever. A pure function of (SEED, epoch, index)."""

    def __init__(self, conversations, seq_len, num_anchors, seed):
        self.conversations, self.seq_len = conversations, seq_len
        self.num_anchors, self.seed = num_anchors, seed
        self.starts, self.packs, self.lock = [0], {}, threading.Lock()

    def pack(self, epoch):
        if epoch not in self.packs:
            near = {e: self.packs[e] for e in self.packs if abs(e - epoch) <= 1}  # two epochs are in flight
            self.packs = {**near, epoch: pack(self.conversations.lengths, self.seed, epoch, self.seq_len)}
        return self.packs[epoch]

    def locate(self, i):
        """Row number -> (epoch, members of the row)."""
        with self.lock:
            while self.starts[-1] <= i:
                self.starts.append(self.starts[-1] + len(self.pack(len(self.starts) - 1)))
            epoch = int(np.searchsorted(self.starts, i, side="right")) - 1
            return epoch, self.pack(epoch)[i - self.starts[epoch]]

    def row(self, i):
        """-> (Row, its sorted anchors)."""
        epoch, members = self.locate(i)
        row = make_row(self.conversations, members, self.seq_len, i)
        rng = np.random.default_rng((self.seed, epoch, i - self.starts[epoch]))
        return row, draw_anchors(row, self.num_anchors, rng)

    def total(self, epochs):
        with self.lock:
            while len(self.starts) <= epochs:
                self.starts.append(self.starts[-1] + len(self.pack(len(self.starts) - 1)))
            return self.starts[epochs]


class EvalRows:
    """The held-out conversations, packed once. Every valid anchor is evaluated, NUM_ANCHORS at a time."""

    def __init__(self, conversations, seq_len):
        self.conversations, self.seq_len = conversations, seq_len
        self.rows = pack(conversations.lengths, 0, 0, seq_len)

    def row(self, i):
        row = make_row(self.conversations, self.rows[i], self.seq_len, i)
        return row, np.flatnonzero(row.run_length >= 1)


def inspect_data(conversations, tokenizer, seq_len, n):
    """Prints what the reader made of the files and n conversations with their supervised tokens marked."""
    s, lengths, how, marks = conversations.stats, conversations.lengths, "between ⟦ ⟧", ("⟦", "⟧")
    if sys.stdout.isatty():
        how, marks = "green", ("\x1b[32m", "\x1b[0m")
    rows, quantiles = pack(lengths, 0, 0, seq_len), (0, 10, 50, 90, 99, 100)
    print(f"{s['lines']} lines: {s['rows']} conversations, {s['bad']} malformed, {s['thin']} without two "
          f"supervised tokens in a row\n{s['tokens']} tokens, {s['supervised']} of them supervised "
          f"({s['supervised'] / s['tokens']:.3f})")
    quantiles = [f"{q}%: {int(v)}" for q, v in zip(quantiles, np.percentile(lengths, quantiles))]
    print(f"length quantiles: {', '.join(quantiles)}\n{len(rows)} rows of SEQ_LEN = {seq_len} an epoch, "
          f"{1 - s['tokens'] / (len(rows) * seq_len):.3f} of them padding")
    for title, counts in (("malformed", s["reasons"]), ("source", s["sources"])):
        for name, count in counts.items():
            print(f"{title} {name or 'not given'}: {count}")
    for i in np.linspace(0, len(conversations) - 1, min(n, len(conversations))).astype(int).tolist():
        print(f"---- conversation {i}, {lengths[i]} tokens, supervised {how}\n"
              + render(conversations[i], tokenizer, marks))

"""Conversations -> packed rows with anchors: pure functions of (seed, epoch, index), on the host.

    RowStream.row(i)   training row i and its anchors: pack, make_row, draw_anchors
    EvalRows.row(i)    held-out row i and every valid anchor
    inspect_data       prints what is in the files
"""
import sys
import threading
from typing import NamedTuple

import numpy as np

from dflash_trainer.token_cache import render



class Row(NamedTuple):
    """S packed tokens, host arrays."""
    ids: np.ndarray        # int64 (S,)
    pos: np.ndarray        # int64 (S,) position within the conversation
    doc: np.ndarray        # int32 (S,) conversation number in the row, -1 for padding
    turn: np.ndarray       # int32 (S,)
    conversation_start: np.ndarray  # int64 (S,) where the token's conversation starts in the row
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


def make_row(conversations, members, seq_len, index):
    """Conversations side by side, padding at the end -> Row."""
    taken = [conversations[m] for m in members]
    lengths = [len(c.ids) for c in taken]
    starts, used = np.cumsum([0, *lengths[:-1]]), sum(lengths)
    ids, pos, turn, conversation_start = (np.zeros(seq_len, kind) for kind in (np.int64, np.int64, np.int32, np.int64))
    doc = np.full(seq_len, -1, np.int32)
    ids[:used], turn[:used] = np.concatenate([c.ids for c in taken]), np.concatenate([c.turn for c in taken])
    doc[:used], conversation_start[:used] = np.repeat(np.arange(len(taken)), lengths), np.repeat(starts, lengths)
    pos[:used] = np.arange(used) - conversation_start[:used]
    sources = [c.source for c in taken]
    return Row(ids, pos, doc, turn, conversation_start, run_length(turn, doc), lengths, sources, index)


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
    starts = np.flatnonzero(np.diff(row.doc[valid], prepend=-1))
    groups = np.split(valid, starts[1:])
    supervised = np.bincount(row.doc[row.turn > 0])[row.doc[valid[starts]]]
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
    print(f"length quantiles: {', '.join(quantiles)}; {int((lengths >= seq_len).sum())} cut at SEQ_LEN or just "
          f"as long\n{len(rows)} rows of SEQ_LEN = {seq_len} an epoch, "
          f"{1 - s['tokens'] / (len(rows) * seq_len):.3f} of them padding")
    for title, counts in (("malformed", s["reasons"]), ("source", s["sources"])):
        for name, count in counts.items():
            print(f"{title} {name or 'not given'}: {count}")
    for i in np.linspace(0, len(conversations) - 1, min(n, len(conversations))).astype(int).tolist():
        print(f"---- conversation {i}, {lengths[i]} tokens, supervised {how}\n"
              + render(conversations[i], tokenizer, marks))

"""Conversations -> packed rows with anchors: pure functions of (seed, epoch, index), on the host.

    RowStream.row(i)   training row i and its anchors: pack, make_row, draw_anchors
    EvalRows.row(i)    held-out row i and every valid anchor
    inspect_data       prints what is in the files

A ROW is S packed context tokens, several conversations side by side; an ANCHOR is a token from which a block
is predicted.
"""
import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_trainer.token_cache import Conversations, render


class Row(NamedTuple):
    """S packed tokens, host arrays."""
    ids: np.ndarray                 # int64 (S,)
    positions: np.ndarray           # int64 (S,) position within the conversation
    conversation: np.ndarray        # int32 (S,) its number within the row, -1 for padding
    turn: np.ndarray                # int32 (S,) number of the answer, 0: not supervised
    conversation_start: np.ndarray  # int64 (S,) where the token's conversation starts
    run_length: np.ndarray          # int64 (S,) how many next positions are supervised
    lengths: list                   # of the row's conversations, in order, in tokens
    sources: list                   # of the row's conversations, in order: str each
    index: int                      # number of the row in the stream


PACK_WINDOW = 16384  # conversations among which a row is packed: more waste less, and take longer


def pack(lengths: Sequence[int], seed: int, epoch: int, seq_len: int) -> list[list[int]]:
    """Every conversation once, in rows of at most seq_len tokens: [[conversation numbers]]. A pure function.

    Within windows of a shuffled order a row takes the longest conversation left, then again and again the
    longest that still fits.
    """
    lengths = np.asarray(lengths)
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(lengths))
    rows = []
    for first in range(0, len(order), PACK_WINDOW):
        window = order[first:first + PACK_WINDOW]
        of_length = {}     # tokens -> conversations of that length that are in no row yet
        lengths_left = 0   # bit n: of_length[n] isn't empty. The longest that fits is one bit_length away
        for number, n_tokens in zip(window.tolist(), lengths[window].tolist(), strict=True):
            of_length.setdefault(n_tokens, []).append(number)
            lengths_left |= 1 << n_tokens
        while lengths_left:
            row = []
            room = seq_len
            while fitting := lengths_left & ((1 << room + 1) - 1):
                n_tokens = fitting.bit_length() - 1
                row.append(of_length[n_tokens].pop())
                room -= n_tokens
                if not of_length[n_tokens]:
                    lengths_left ^= 1 << n_tokens
            assert row, f"a conversation of {lengths_left.bit_length() - 1} tokens in rows of {seq_len}"
            rows.append(row)
    return [rows[i] for i in rng.permutation(len(rows))]


def make_row(conversations: Conversations, members: Sequence[int], seq_len: int, index: int) -> Row:
    """Conversations side by side, padding at the end."""
    taken = [conversations[m] for m in members]
    lengths = [len(c.ids) for c in taken]
    sources = [c.source for c in taken]
    starts = np.cumsum([0, *lengths[:-1]])
    used = sum(lengths)

    ids = np.zeros(seq_len, np.int64)
    ids[:used] = np.concatenate([c.ids for c in taken])
    turn = np.zeros(seq_len, np.int32)
    turn[:used] = np.concatenate([c.turn for c in taken])
    conversation = np.full(seq_len, -1, np.int32)
    conversation[:used] = np.repeat(np.arange(len(taken)), lengths)
    conversation_start = np.zeros(seq_len, np.int64)
    conversation_start[:used] = np.repeat(starts, lengths)
    positions = np.zeros(seq_len, np.int64)
    positions[:used] = np.arange(used) - conversation_start[:used]
    return Row(ids, positions, conversation, turn, conversation_start,
               run_length(turn, conversation), lengths, sources, index)


def run_length(turn: np.ndarray, conversation: np.ndarray) -> np.ndarray:
    """(S,) -> int64 (S,): how many next positions are supervised, in the same turn and conversation.

    Anchor a is valid iff it is >= 1 there; draft j = 1.. of anchor a counts iff j <= it.
    """
    same_turn = (turn[:-1] > 0) & (turn[:-1] == turn[1:])
    goes_on = same_turn & (conversation[:-1] == conversation[1:])
    place = np.arange(len(turn))
    last = np.where(np.append(goes_on, False), len(turn), place)   # its own place where a run ends
    end_of_run = np.minimum.accumulate(last[::-1])[::-1]           # the nearest such place from here on
    return end_of_run - place


def share_out(n: int, weights: Sequence[float], room: Sequence[int]) -> np.ndarray:
    """n places shared out in proportion to `weights`, by largest remainder: at least 1 each where n allows
    that, at most room[i]. -> int64, one share per weight.

    A share that its bound decides is settled first; what is left is shared out among the others, whose quotas
    change with it.
    """
    weights = np.asarray(weights, float)
    room = np.asarray(room)
    shares = np.zeros(len(weights), np.int64)
    unsettled = np.ones(len(weights), bool)
    while unsettled.any():
        left = n - shares.sum()
        quota = np.where(unsettled, left * weights / weights[unsettled].sum(), 0)
        too_many = unsettled & (quota >= room)
        too_few = unsettled & (quota < 1)
        if too_many.any():
            shares[too_many] = room[too_many]
            unsettled &= ~too_many
        elif too_few.any() and len(weights) <= n:
            shares[too_few] = 1
            unsettled &= ~too_few
        else:
            break
    if unsettled.any():
        shares[unsettled] = np.floor(quota[unsettled])
        rounded_off = np.where(unsettled, quota - shares, -1)
        largest_first = np.argsort(-rounded_off, kind="stable")
        left = n - shares.sum()
        shares[largest_first[:left]] += 1
    return shares


def draw_anchors(row: Row, n: int, rng: np.random.Generator) -> np.ndarray:
    """-> sorted int64 (<= n,) valid anchors, without replacement, shared out by supervised tokens."""
    valid = np.flatnonzero(row.run_length >= 1)
    if len(valid) <= n:
        return valid
    firsts = np.flatnonzero(np.diff(row.conversation[valid], prepend=-1))  # in `valid`, of each conversation
    groups = np.split(valid, firsts[1:])
    supervised = np.bincount(row.conversation[row.turn > 0])
    weights = supervised[row.conversation[valid[firsts]]]
    shares = share_out(n, weights, [len(group) for group in groups])
    drawn = []
    for group, share in zip(groups, shares, strict=True):
        drawn.append(rng.choice(group, share, replace=False))
    return np.sort(np.concatenate(drawn))


class RowStream:
    """Row i of training, epoch after epoch, for ever. A pure function of (SEED, epoch, index)."""

    def __init__(self, conversations: Conversations, seq_len: int, num_anchors: int, seed: int):
        self.conversations = conversations
        self.seq_len = seq_len
        self.num_anchors = num_anchors
        self.seed = seed
        self.starts = [0]             # number of each epoch's first row, as far as they are known
        self.packs = {}               # epoch -> its rows, of the epochs in use
        self.lock = threading.Lock()  # target threads ask for rows at the same time

    def pack(self, epoch: int) -> list[list[int]]:
        """Call it with the lock held."""
        if epoch not in self.packs:
            # two epochs are in flight around the end of one
            near = {e: rows for e, rows in self.packs.items() if abs(e - epoch) <= 1}
            packed = pack(self.conversations.lengths, self.seed, epoch, self.seq_len)
            self.packs = {**near, epoch: packed}
        return self.packs[epoch]

    def pack_next(self) -> None:
        """Call it with the lock held."""
        epoch = len(self.starts) - 1
        self.starts.append(self.starts[-1] + len(self.pack(epoch)))

    def locate(self, i: int) -> tuple[int, list[int]]:
        """Number of a row -> (epoch, members of the row)."""
        with self.lock:
            while self.starts[-1] <= i:
                self.pack_next()
            epoch = int(np.searchsorted(self.starts, i, side="right")) - 1
            return epoch, self.pack(epoch)[i - self.starts[epoch]]

    def row(self, i: int) -> tuple[Row, np.ndarray]:
        """-> (row i, its sorted anchors)."""
        epoch, members = self.locate(i)
        row = make_row(self.conversations, members, self.seq_len, i)
        rng = np.random.default_rng((self.seed, epoch, i - self.starts[epoch]))
        return row, draw_anchors(row, self.num_anchors, rng)

    def total(self, epochs: int) -> int:
        """Rows of the first so many epochs."""
        with self.lock:
            while len(self.starts) <= epochs:
                self.pack_next()
            return self.starts[epochs]


class EvalRows:
    """The held-out conversations, packed once. Every valid anchor is evaluated, NUM_ANCHORS at a time."""

    def __init__(self, conversations: Conversations, seq_len: int):
        self.conversations = conversations
        self.seq_len = seq_len
        self.rows = pack(conversations.lengths, 0, 0, seq_len)

    def row(self, i: int) -> tuple[Row, np.ndarray]:
        """-> (row i, every valid anchor)."""
        row = make_row(self.conversations, self.rows[i], self.seq_len, i)
        return row, np.flatnonzero(row.run_length >= 1)


def inspect_data(conversations: Conversations, tokenizer, seq_len: int, n: int) -> None:
    """Print what the reader made of the files, and n conversations with their supervised tokens marked."""
    stats = conversations.stats
    lengths = conversations.lengths
    how = "between ⟦ ⟧"
    marks = "⟦", "⟧"
    if sys.stdout.isatty():
        how = "green"
        marks = "\x1b[32m", "\x1b[0m"

    print(f"{stats['lines']} lines: {stats['rows']} conversations, {stats['bad']} malformed, {stats['thin']} "
          "too short to train on (fewer than two consecutive supervised tokens)")
    share = stats["supervised"] / stats["tokens"]
    print(f"{stats['tokens']} tokens, {stats['supervised']} of them supervised ({share:.3f})")
    percents = 0, 10, 50, 90, 99, 100
    quantiles = []
    for percent, value in zip(percents, np.percentile(lengths, percents), strict=True):
        quantiles.append(f"{percent}%: {int(value)}")
    n_cut = int((lengths >= seq_len).sum())
    print(f"length quantiles: {', '.join(quantiles)}; {n_cut} cut at SEQ_LEN or just as long")
    n_rows = len(pack(lengths, 0, 0, seq_len))
    padding = 1 - stats["tokens"] / (n_rows * seq_len)
    print(f"{n_rows} rows of SEQ_LEN = {seq_len} an epoch, {padding:.3f} of them padding")
    for title, counts in (("malformed", stats["reasons"]), ("source", stats["sources"])):
        for name, count in counts.items():
            print(f"{title} {name or 'not given'}: {count}")

    for i in np.linspace(0, len(conversations) - 1, min(n, len(conversations))).astype(int).tolist():
        print(f"---- conversation {i}, {lengths[i]} tokens, supervised {how}")
        print(render(conversations[i], tokenizer, marks))

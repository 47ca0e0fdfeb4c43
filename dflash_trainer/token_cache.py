"""Any chat file -> token ids and turns, tokenised once into a memory-mapped cache.

    tokenise_files                        data_files, chat_lines and answer_mask on many rows at a time
    build_conversations -> Conversations  the cache; a second run starts at once

The trainer's reader: `python train_dflash.py inspect DATA=...` shows what it makes of a file.
"""
import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import transformers
from tqdm import tqdm

from dflash_trainer.answer_mask import AnswerFinder, mask_tokens
from dflash_trainer.chat_lines import BadLine, Tokens, parse_row
from dflash_trainer.data_files import load_row, read_rows, resolve_files
from dflash_trainer.errors import UserError

DATA_VERSION = 3       # raise it when a change below changes any token or turn: caches are made anew
SMALL_FILE = 16 << 20  # bytes; smaller files are known by their content
ROWS_AT_ONCE = 512     # rows that the tokenizer's own threads share
SHOW_BAR_FROM = 4 << 20  # bytes of input


class Conversation(NamedTuple):
    """One row, cut to SEQ_LEN."""
    ids: np.ndarray   # int32 (n,)
    turn: np.ndarray  # int16 (n,): 0 not supervised, t >= 1 said by the assistant in its turn t
    source: str       # "" if the row has none
    cut: bool         # a length limit ended the last answer: it has no end of turn of its own


class Settings(NamedTuple):
    """All that the tokens depend on beside the files."""
    tokenizer: object         # of transformers; None: rows of input_ids + loss_mask alone
    seq_len: int              # tokens kept of a conversation
    template_kwargs: dict     # CHAT_TEMPLATE_KWARGS
    vocab: int                # token ids are below it
    end_tokens: tuple = ()    # tokens that end a turn, as the target's config lists them


# ---------------------------------------------------------------------------------------------- tokenising


class Prepared(NamedTuple):
    """A row before its text is encoded."""
    text: str            # "" for a row of token ids
    stretches: list      # Stretch: what the assistant says in the text
    given: tuple | None  # (ids, turn) of a row of token ids
    source: str
    cut: bool


class Results(NamedTuple):
    """What became of some rows, in their order."""
    conversations: list
    bad: list        # {"file", "line", "reason"}
    n_thin: int      # rows without two supervised tokens in a row


class Tokeniser:
    """Rows -> conversations, many at a time: the texts first, then the tokenizer's own threads."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.finder = None
        if settings.tokenizer is not None:
            self.backend = settings.tokenizer.backend_tokenizer
            self.backend.no_truncation()
            self.backend.no_padding()

    def prepare(self, row: object) -> Prepared:
        """A row as it was read -> its text and what the assistant says in it. BadLine."""
        chat = parse_row(load_row(row))
        if isinstance(chat, Tokens):
            ids = np.array(self.checked(chat.ids), np.int32)
            mask = np.array(chat.mask, bool)
            begins = mask & ~np.concatenate([[False], mask[:-1]])
            return Prepared("", [], (ids, np.cumsum(begins) * mask), chat.source, chat.cut)
        if self.finder is None:
            settings = self.settings
            self.finder = AnswerFinder(settings.tokenizer, settings.template_kwargs, settings.end_tokens)
        text, stretches = self.finder.find(chat)
        last = max(number for number, message in enumerate(chat.messages) if message["role"] == "assistant")
        return Prepared(text, stretches, None, chat.source, last in chat.cut)

    def checked(self, ids: list) -> list:
        """Token ids, all inside the target's table. BadLine."""
        vocab = self.settings.vocab
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            outside = next(i for i in ids if not 0 <= i < vocab)
            raise BadLine(f"token id {outside} is outside the vocabulary of {vocab}")
        return ids

    def encode(self, texts: list[str]) -> list:
        """Texts -> encodings, by as many threads as the machine has cores. Lets other Python threads run."""
        return self.backend.encode_batch(texts, add_special_tokens=False) if texts else []

    def finish(self, prepared: Prepared, encoding) -> Conversation | None:
        """-> None for a thin row. BadLine."""
        if prepared.given is not None:
            ids, turn = prepared.given
        else:
            ids = np.array(self.checked(encoding.ids), np.int32)
            flat = itertools.chain.from_iterable(encoding.offsets)  # four times as fast as np.array
            offsets = np.fromiter(flat, np.int64, 2 * len(ids)).reshape(-1, 2)
            turn = mask_tokens(offsets, prepared.stretches)
        ids = ids[:self.settings.seq_len]
        turn = turn[:self.settings.seq_len]
        n_turns = prepared.stretches[-1].turn if prepared.stretches else int(turn.max(initial=0))
        if n_turns > np.iinfo(np.int16).max:
            raise BadLine(f"{n_turns} assistant turns")
        if not ((turn[:-1] > 0) & (turn[:-1] == turn[1:])).any():
            return None
        return Conversation(ids, turn.astype(np.int16), prepared.source, prepared.cut)

    def prepare_all(self, rows: list) -> list:
        """[(file, number, row)] -> [(file, number, Prepared or BadLine)]."""
        prepared = []
        for file, number, row in rows:
            try:
                prepared.append((file, number, self.prepare(row)))
            except BadLine as e:
                prepared.append((file, number, e))
        return prepared

    def finish_all(self, prepared: list, encodings: list) -> Results:
        encodings = iter(encodings)
        used = []
        bad = []
        n_thin = 0
        for file, number, row in prepared:
            try:
                if isinstance(row, BadLine):
                    raise row
                conversation = self.finish(row, None if row.given is not None else next(encodings))
            except BadLine as e:
                bad.append({"file": file, "line": number, "reason": str(e)})
                continue
            if conversation is None:
                n_thin += 1
            else:
                used.append(conversation)
        return Results(used, bad, n_thin)


def texts_of(prepared: list) -> list[str]:
    return [row.text for _, _, row in prepared if not isinstance(row, BadLine) and row.given is None]


def tokenise_files(files: list[Path], what: str, settings: Settings) -> Iterator[Results]:
    """Yields what becomes of all rows, in order. While the tokenizer's threads encode some rows, this thread
    renders the next ones: no other process has to start, and more cores are never slower."""
    tokeniser = Tokeniser(settings)
    size = sum(file.stat().st_size for file in files)
    with (tqdm(total=size, unit="B", unit_scale=True, desc=f"tokenising {what}", mininterval=2,
               disable=size < SHOW_BAR_FROM) as bar,
          ThreadPoolExecutor(1) as encoder):
        rows = ((str(file), number, row) for file in files for number, row in read_rows(file, bar))
        waiting = deque()
        while chunk := list(itertools.islice(rows, ROWS_AT_ONCE)):
            prepared = tokeniser.prepare_all(chunk)
            waiting.append((prepared, encoder.submit(tokeniser.encode, texts_of(prepared))))
            if len(waiting) > 1:
                prepared, encodings = waiting.popleft()
                yield tokeniser.finish_all(prepared, encodings.result())
        for prepared, encodings in waiting:
            yield tokeniser.finish_all(prepared, encodings.result())


# ----------------------------------------------------------------------------------------------- the cache


class Conversations:
    """The tokens of all conversations, memory-mapped: nothing is read before it is asked for."""

    def __init__(self, directory):
        self.stats = json.loads((directory / "stats.json").read_text())
        self.fingerprint = self.stats["fingerprint"]  # of tokens and turns: the same for a copied file
        self.lengths, self.supervised, self.source_number, self.cut = (
            np.load(directory / f"{name}.npy") for name in ("lengths", "supervised", "source", "cut"))
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self.ids, self.turn = (
            np.memmap(directory / name, kind, "r") if len(self.lengths) else np.zeros(0, kind)
            for name, kind in (("ids.bin", np.int32), ("turn.bin", np.int16)))
        self.source_names = json.loads((directory / "sources.json").read_text())
        self.bad_rows = [json.loads(line) for line in (directory / "bad.jsonl").read_text().splitlines()]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        span, source = slice(self.offsets[i], self.offsets[i + 1]), self.source_names[self.source_number[i]]
        return Conversation(np.array(self.ids[span]), np.array(self.turn[span]), source, bool(self.cut[i]))


def build_conversations(spec, settings, max_bad_share, what="DATA", out=None, tick=lambda: None):
    """Files -> Conversations: tokenised once, then from the cache. UserError for too many malformed lines.

    stats: lines, rows, tokens, supervised, bad, thin (counts), reasons and sources (counts by name).
    `out`: the run's directory, for bad_rows.jsonl. `tick` is called as lines are done.
    """
    files = resolve_files(spec, what, announce=True)
    if settings.tokenizer is not None and not settings.tokenizer.is_fast:
        raise UserError("TARGET: its tokenizer has no character offsets (it is not a fast one)")
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_trainer"
    directory = root / f"tokens_{cache_key(files, settings)}"
    if not directory.exists():
        try:
            build_cache(directory, files, what, settings, tick)
        except OSError as e:
            raise UserError(f"the token cache can't be written: {e}; XDG_CACHE_HOME moves it") from None
    conversations = Conversations(directory)
    report_bad(conversations, spec, what, settings.seq_len, max_bad_share, out)
    return conversations


def cache_key(files, settings):
    """Hash over all that the tokens depend on. A large file is known by its path, size and time of change."""
    key, t = hashlib.sha256(), settings.tokenizer
    for path in files:
        stat = path.stat()
        key.update(repr((str(path.resolve()), stat.st_size)).encode())
        key.update(path.read_bytes() if stat.st_size < SMALL_FILE else str(stat.st_mtime_ns).encode())
    rest = [DATA_VERSION, transformers.__version__, *settings[1:]]
    if t is not None:
        rest += [t.backend_tokenizer.to_str(), t.chat_template, t.special_tokens_map, len(t)]
    key.update(json.dumps(rest, sort_keys=True, default=str).encode())
    return key.hexdigest()[:24]


def build_cache(directory, files, what, settings, tick):
    """Tokenise into a directory of another name, renamed when all is on the disk: never a killed build."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    for left in directory.parent.glob("tokens_*.tmp"):
        if not locked(left):  # its process was killed
            shutil.rmtree(left, ignore_errors=True)
    tmp = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
    tmp.mkdir()
    try:
        with open(tmp / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_cache(tmp, tokenise_files(files, what, settings), tick)
            for name in os.listdir(tmp):
                with open(tmp / name, "rb") as file:
                    os.fsync(file.fileno())
            if not directory.exists():  # another run may have made it meanwhile
                os.rename(tmp, directory)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def locked(tmp):
    try:
        with open(tmp / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:  # held, or its directory is a moment old
        return True


def write_cache(tmp, results, tick):
    """All that Conversations reads. The tokens stream to the disk, in the order of the lines."""
    rows, numbers, reasons, thin = [], {"": 0}, Counter(), 0
    digest = hashlib.blake2b(digest_size=12)
    with (open(tmp / "ids.bin", "wb") as ids, open(tmp / "turn.bin", "wb") as turn,
          open(tmp / "bad.jsonl", "w") as bad):
        for used, bad_rows, thin_rows in results:
            tick()
            for c in used:
                for part, file in ((c.ids, ids), (c.turn, turn)):
                    file.write(part.tobytes())
                    digest.update(part.tobytes())
                number = numbers.setdefault(c.source, len(numbers))
                rows.append((len(c.ids), np.count_nonzero(c.turn), number, c.cut))
            bad.writelines(json.dumps(b) + "\n" for b in bad_rows)
            reasons.update(b["reason"] for b in bad_rows)
            thin += thin_rows
    table = np.array(rows, np.int64).reshape(-1, 4)
    digest.update(table[:, 0].tobytes())
    kinds = {"lengths": np.int64, "supervised": np.int64, "source": np.int32, "cut": bool}
    for (name, kind), column in zip(kinds.items(), table.T):
        np.save(tmp / f"{name}.npy", column.astype(kind))
    names, bad_count = list(numbers), reasons.total()
    (tmp / "sources.json").write_text(json.dumps(names))
    (tmp / "stats.json").write_text(json.dumps({
        "lines": len(rows) + bad_count + thin, "rows": len(rows), "bad": bad_count, "thin": thin,
        "tokens": int(table[:, 0].sum()), "supervised": int(table[:, 1].sum()),
        "reasons": dict(reasons.most_common(50)),
        "sources": {names[n]: k for n, k in Counter(table[:, 2].tolist()).most_common(50)},
        "fingerprint": digest.hexdigest()}))


def report_bad(conversations, spec, what, seq_len, max_bad_share, out):
    """Ten bad lines to the screen, all to OUT/bad_rows.jsonl; UserError for too many, or nothing left."""
    bad, s = conversations.bad_rows, conversations.stats
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        with open(Path(out) / "bad_rows.jsonl", "w" if what == "DATA" else "a") as file:
            file.writelines(json.dumps({"setting": what, **b}) + "\n" for b in bad)
    for b in bad[:10]:
        print(f"{what}: bad line {b['file']}:{b['line']}: {b['reason']}")
    counts = f"{len(bad)} malformed, {s['thin']} without two supervised tokens in a row"
    if bad or s["thin"]:
        print(f"{what}: {s['rows']} of {s['lines']} lines used, {counts}")
    first = f"; the first: {bad[0]['file']}:{bad[0]['line']}: {bad[0]['reason']}" if bad else ""
    if not len(conversations):
        raise UserError(f"{what} = {spec}: none of {s['lines']} lines can be used within SEQ_LEN = {seq_len}"
                        f": {counts}{first}")
    if s["lines"] >= 1000 and len(bad) > max_bad_share * s["lines"]:
        raise UserError(f"{what} = {spec}: {len(bad)} of {s['lines']} lines are malformed, a share of "
                        f"{len(bad) / s['lines']:.4f}, more than MAX_BAD_SHARE = {max_bad_share}{first}")


def overlap(train, held_out):
    """-> (different conversations of held_out that are in train too, token for token; all different ones).
    Tokens are read where a conversation's length and three of its tokens agree: few of a million."""
    def keys(c):
        key = c.lengths.copy()
        for quarter in (1, 2, 3):
            key = key * 1000003 + c.ids[c.offsets[:-1] + c.lengths * quarter // 4]
        return key

    wanted = {held_out[i].ids.tobytes() for i in range(len(held_out))}
    found = np.flatnonzero(np.isin(keys(train), keys(held_out)))
    return len(wanted & {train[int(i)].ids.tobytes() for i in found}), len(wanted)


def render(c, tokenizer, marks=("⟦", "⟧")):
    """A conversation's text with its supervised stretches between marks."""
    edges = np.flatnonzero(np.diff(c.turn, prepend=c.turn[:1])).tolist()
    text = ""
    for a, b in zip([0, *edges], [*edges, len(c.ids)]):
        piece = tokenizer.decode(c.ids[a:b].tolist(), skip_special_tokens=False)
        text += f"{marks[0]}{piece}{marks[1]}" if c.turn[a] else piece
    return text

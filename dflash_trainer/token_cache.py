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
from collections.abc import Callable, Iterator
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

DATA_VERSION = 5       # raise it when a change below changes any token or turn: caches are made anew
SMALL_FILE = 16 << 20  # bytes; smaller files are known by their content
ROWS_AT_ONCE = 512     # rows that the tokenizer's own threads share
SHOW_BAR_FROM = 4 << 20  # bytes of input
FEW_LINES = 1000       # of fewer lines any share may be malformed


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
        rows = ((str(file), number, row) for file in files for number, row in read_rows(file, what, bar))
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
    """The tokens of all conversations, memory-mapped: nothing is read before it is asked for.

    lengths, supervised   int64 (n,): tokens of each conversation, and supervised ones
    offsets               int64 (n + 1,): where each one begins in ids and turn
    ids, turn             int32, int16: the tokens of all, and the assistant's turns
    stats                 what build_conversations says
    fingerprint           of tokens and turns: the same for a copied file
    bad_rows              {"file", "line", "reason"} of each malformed line
    """

    def __init__(self, directory: Path):
        self.stats = json.loads((directory / "stats.json").read_text())
        self.fingerprint = self.stats["fingerprint"]
        self.lengths = np.load(directory / "lengths.npy")
        self.supervised = np.load(directory / "supervised.npy")
        self.source_number = np.load(directory / "source.npy")
        self.cut = np.load(directory / "cut.npy")
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self.ids = self.mapped(directory / "ids.bin", np.int32)
        self.turn = self.mapped(directory / "turn.bin", np.int16)
        self.source_names = json.loads((directory / "sources.json").read_text())
        bad_lines = (directory / "bad.jsonl").read_text().splitlines()
        self.bad_rows = [json.loads(line) for line in bad_lines]

    def mapped(self, path: Path, kind: type) -> np.ndarray:
        return np.memmap(path, kind, "r") if len(self.lengths) else np.zeros(0, kind)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Conversation:
        span = slice(self.offsets[i], self.offsets[i + 1])
        source = self.source_names[self.source_number[i]]
        return Conversation(np.array(self.ids[span]), np.array(self.turn[span]), source, bool(self.cut[i]))


def build_conversations(spec: object, settings: Settings, max_bad_share: float, what: str = "DATA",
                        out: str | Path | None = None, tick: Callable[[], object] = lambda: None
                        ) -> Conversations:
    """Files -> Conversations: tokenised once, then from the cache. UserError for too many malformed lines.

    stats: lines, rows (conversations), tokens, supervised, bad, thin (counts), reasons and sources (counts by
    name). `out`: the run's directory, for bad_rows.jsonl. `tick` is called as lines are done.
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


def cache_key(files: list[Path], settings: Settings) -> str:
    """Hash over all that the tokens depend on. A large file is known by its path, size and time of change."""
    key = hashlib.sha256()
    for path in files:
        stat = path.stat()
        key.update(repr((str(path.resolve()), stat.st_size)).encode())
        key.update(path.read_bytes() if stat.st_size < SMALL_FILE else str(stat.st_mtime_ns).encode())
    rest = [DATA_VERSION, transformers.__version__, *settings[1:]]
    tokenizer = settings.tokenizer
    if tokenizer is not None:
        rest.append(tokenizer.backend_tokenizer.to_str())
        rest += [tokenizer.chat_template, tokenizer.special_tokens_map, len(tokenizer)]
    key.update(json.dumps(rest, sort_keys=True, default=str).encode())
    return key.hexdigest()[:24]


def build_cache(directory: Path, files: list[Path], what: str, settings: Settings,
                tick: Callable[[], object]) -> None:
    """Tokenise into a directory of another name, renamed when all is on the disk: never a killed build."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    for left in directory.parent.glob("tokens_*.tmp"):
        if not is_locked(left):  # its process was killed
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


def is_locked(tmp: Path) -> bool:
    try:
        with open(tmp / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:  # held, or its directory is a moment old
        return True


def write_cache(tmp: Path, results: Iterator[Results], tick: Callable[[], object]) -> None:
    """All that Conversations reads. The tokens stream to the disk, in the order of the lines."""
    table = []            # length, supervised tokens, number of the source, cut, of each conversation
    sources = {"": 0}     # name -> number
    reasons = Counter()
    n_thin = 0
    digest = hashlib.blake2b(digest_size=12)
    with (open(tmp / "ids.bin", "wb") as ids,
          open(tmp / "turn.bin", "wb") as turn,
          open(tmp / "bad.jsonl", "w") as bad):
        for result in results:
            tick()
            for conversation in result.conversations:
                for part, file in ((conversation.ids, ids), (conversation.turn, turn)):
                    data = part.tobytes()
                    file.write(data)
                    digest.update(data)
                source = sources.setdefault(conversation.source, len(sources))
                supervised = np.count_nonzero(conversation.turn)
                table.append((len(conversation.ids), supervised, source, conversation.cut))
            for line in result.bad:
                bad.write(json.dumps(line) + "\n")
                reasons[line["reason"]] += 1
            n_thin += result.n_thin
    columns = np.array(table, np.int64).reshape(-1, 4).T
    lengths, supervised, source, cut = columns
    digest.update(lengths.tobytes())
    np.save(tmp / "lengths.npy", lengths)
    np.save(tmp / "supervised.npy", supervised)
    np.save(tmp / "source.npy", source.astype(np.int32))
    np.save(tmp / "cut.npy", cut.astype(bool))
    names = list(sources)
    by_source = Counter(source.tolist()).most_common(50)
    stats = {
        "lines": len(table) + reasons.total() + n_thin,
        "rows": len(table),
        "bad": reasons.total(),
        "thin": n_thin,
        "tokens": int(lengths.sum()),
        "supervised": int(supervised.sum()),
        "reasons": dict(reasons.most_common(50)),
        "sources": {names[number]: count for number, count in by_source},
        "fingerprint": digest.hexdigest()}
    (tmp / "sources.json").write_text(json.dumps(names))
    (tmp / "stats.json").write_text(json.dumps(stats))


def report_bad(conversations: Conversations, spec: object, what: str, seq_len: int, max_bad_share: float,
               out: str | Path | None) -> None:
    """Ten bad lines to the screen, all to OUT/bad_rows.jsonl; UserError for too many, or nothing left."""
    bad = conversations.bad_rows
    stats = conversations.stats
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        with open(Path(out) / "bad_rows.jsonl", "w" if what == "DATA" else "a") as file:
            file.writelines(json.dumps({"setting": what, **line}) + "\n" for line in bad)
    for line in bad[:10]:
        print(f"{what}: bad line {line['file']}:{line['line']}: {line['reason']}")
    n_lines = stats["lines"]
    counts = (f"{len(bad)} malformed, {stats['thin']} too short to train on (fewer than two consecutive "
              "supervised tokens)")
    if bad or stats["thin"]:
        print(f"{what}: {stats['rows']} of {n_lines} lines used, {counts}")
    first = f"; the first: {bad[0]['file']}:{bad[0]['line']}: {bad[0]['reason']}" if bad else ""
    if not len(conversations):
        raise UserError(f"{what} = {spec}: none of {n_lines} lines can be used within SEQ_LEN = {seq_len}: "
                        f"{counts}{first}")
    if n_lines >= FEW_LINES and len(bad) > max_bad_share * n_lines:
        raise UserError(f"{what} = {spec}: {len(bad)} of {n_lines} lines are malformed, a share of "
                        f"{len(bad) / n_lines:.4f}, more than MAX_BAD_SHARE = {max_bad_share}{first}")


# --------------------------------------------------------------------------------- what is done with them


def overlap(train: Conversations, held_out: Conversations) -> tuple[int, int]:
    """-> (different conversations of held_out that are in train too, token for token; all different ones).
    Tokens are read where a conversation's length and three of its tokens agree: few of a million."""
    def keys(conversations):
        key = conversations.lengths.copy()
        for quarter in (1, 2, 3):
            places = conversations.offsets[:-1] + conversations.lengths * quarter // 4
            key = key * 1000003 + conversations.ids[places]
        return key

    wanted = {held_out[i].ids.tobytes() for i in range(len(held_out))}
    candidates = np.flatnonzero(np.isin(keys(train), keys(held_out)))
    found = {train[i].ids.tobytes() for i in candidates.tolist()}
    return len(wanted & found), len(wanted)


def render(conversation: Conversation, tokenizer, marks: tuple[str, str] = ("⟦", "⟧")) -> str:
    """A conversation's text with its supervised stretches between marks."""
    turn = conversation.turn
    edges = np.flatnonzero(np.diff(turn, prepend=turn[:1])).tolist()
    text = ""
    for begin, end in zip([0, *edges], [*edges, len(turn)], strict=True):
        piece = tokenizer.decode(conversation.ids[begin:end].tolist(), skip_special_tokens=False)
        text += f"{marks[0]}{piece}{marks[1]}" if turn[begin] else piece
    return text

"""Any chat file -> token ids and turns, tokenised once into a memory-mapped cache.

    resolve_files -> read_lines         the lines of files, folders and globs
    tokenise_line                       chat_lines and answer_mask on one of them
    build_conversations -> Conversations          several processes, one cache; a second run starts at once

The trainer's reader: `python train_dflash.py inspect DATA=...` shows what it makes of a file.
"""
import fcntl
import glob
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import zlib
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
import transformers
from tqdm import tqdm

from dflash_trainer.answer_mask import supervise
from dflash_trainer.chat_lines import BadLine, load_json, parse_line
from dflash_trainer.errors import UserError, user_error_on

DATA_VERSION = 2       # raise it when a change below changes any token or turn: caches are made anew
SMALL_FILE = 16 << 20  # bytes; smaller files are known by their content
PER_PROCESS = 4 << 20  # bytes of input that are worth another process: each takes seconds to start


class Conversation(NamedTuple):
    """One JSONL line, cut to SEQ_LEN."""
    ids: np.ndarray   # int32 (n,)
    turn: np.ndarray  # int16 (n,): 0 not supervised, t >= 1 said by the assistant in its turn t
    source: str       # "" if the line has none
    cut: bool         # finish_reason "length": the last answer has no end of turn of its own


def unreadable(error):
    raise error


def resolve_files(spec, what="DATA"):
    """files_of, for which what can't be read is a UserError."""
    with user_error_on(f"{what} = {spec}: can't be read", OSError):
        files = files_of(spec, what)
        for path in files:
            open(path).close()
    return files


def files_of(spec, what):
    """File, directory, glob, list or comma-separated mix of them -> [Path], each once, directories sorted."""
    words = [str(s) for s in spec] if isinstance(spec, (list, tuple)) else [str(spec)]
    if len(words) == 1 and (not words[0] or not Path(words[0]).expanduser().exists()):
        words = [w.strip() for w in words[0].split(",") if w.strip()]
    files = {}
    for word in words:
        path = Path(word).expanduser()
        if path.is_dir():
            found = [Path(folder, name) for folder, _, names in os.walk(path, onerror=unreadable)
                     for name in names if name.endswith((".jsonl", ".jsonl.gz"))]
        else:
            found = [path] if path.is_file() else [Path(p) for p in glob.glob(str(path), recursive=True)]
        found = sorted(p for p in found if p.is_file())
        if not found:
            wrong = "no .jsonl or .jsonl.gz in directory" if path.is_dir() else "no such file"
            raise UserError(f"{what} = {spec}: {wrong}: {word}. To make one: bash run.sh tools/regenerate.py "
                            f"PROMPTS=prompts.jsonl TARGET=<model> OUT={word}")
        files.update(dict.fromkeys(found))
    if not files:
        raise UserError(f"{what} = {spec!r} names no file")
    return list(files)


def read_lines(path, bar=None):
    """Yields (line number from 1, bytes) of lines that aren't blank; UserError for what isn't JSONL."""
    try:
        with open(path, "rb") as raw:
            lines, head, at = gzip.GzipFile(fileobj=raw) if path.name.endswith(".gz") else raw, None, 0
            for number, line in enumerate(lines, 1):
                line = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
                if bar is not None:
                    bar.update(raw.tell() - at)
                    at = raw.tell()
                if line and head is None:
                    head = check_head(path, line)
                if line:
                    yield number, line
    except (OSError, EOFError, zlib.error) as e:
        raise UserError(f"{path}: can't be read to its end: {e}") from None
    if head is None:
        raise UserError(f"{path}: is empty; JSONL with one conversation a line is expected")


def check_head(path, line):
    """Its first line tells a file that isn't JSONL from one with a bad line."""
    if line[:1] == b"[":
        raise UserError(f"{path}: is one JSON array, not a conversation a line: jq -c '.[]' {path}")
    magic = line.startswith((b"\x1f\x8b", b"PK", b"\xff\xfe", b"\xfe\xff", b"PAR1"))
    if line[:1] != b"{" and (magic or b"\0" in line):
        raise UserError(f"{path}: is a binary file (compressed, parquet, UTF-16?), not UTF-8 JSONL")
    return line


def tokenise_line(line, settings):
    """One line -> Conversation, or None if it is thin. BadRow."""
    row = parse_line(load_json(line))
    cut = row["finish_reason"] == "length"
    if "input_ids" in row:
        outside = [i for i in row["input_ids"] if not 0 <= i < settings.vocab]
        if outside:
            raise BadLine(f"token id {outside[0]} is outside the vocabulary of {settings.vocab}")
        ids, mask = np.array(row["input_ids"], np.int32), np.array(row["loss_mask"], bool)
        turn = np.cumsum(mask & ~np.concatenate([[False], mask[:-1]])) * mask
    else:
        chat = row["messages"], row["tools"], settings.template_kwargs
        ids, turn = supervise(settings.tokenizer, *chat, cut)
    ids, turn = ids[:settings.seq_len], turn[:settings.seq_len]
    if turn.max(initial=0) > np.iinfo(np.int16).max:
        raise BadLine(f"{turn.max()} assistant turns")
    thin = not ((turn[:-1] > 0) & (turn[:-1] == turn[1:])).any()
    return None if thin else Conversation(ids, turn.astype(np.int16), row["source"], cut)


def tokenise_lines(chunk, settings):
    """[(file, line number, bytes)] -> (conversations, bad rows, number of thin ones)."""
    done, bad = [], []
    for file, number, line in chunk:
        try:
            done.append(tokenise_line(line, settings))
        except BadLine as e:
            bad.append({"file": file, "line": number, "reason": str(e)})
    used = [c for c in done if c is not None]
    return used, bad, len(done) - len(used)


WORKER_SETTINGS = None  # set in each worker process


def start_tokeniser(settings):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    globals()["WORKER_SETTINGS"] = settings


def tokenise_in_worker(chunk):
    return tokenise_lines(chunk, WORKER_SETTINGS)


def tokenise_files(files, what, settings):
    """Yields tokenise_lines of all lines, in order, by one process a core where that pays."""
    size = sum(f.stat().st_size for f in files)
    workers = min(len(os.sched_getaffinity(0)), 32, size // PER_PROCESS)
    with tqdm(total=size, unit="B", unit_scale=True, desc=f"tokenising {what}", mininterval=2,
              disable=size < PER_PROCESS) as bar:
        lines = ((str(f), number, line) for f in files for number, line in read_lines(f, bar))
        chunks = iter(lambda: list(itertools.islice(lines, 128)), [])
        if workers <= 1:
            yield from (tokenise_lines(chunk, settings) for chunk in chunks)
            return
        # spawn: a fork of a process with threads can hang. Not a Pool: it waits for ever for a killed worker
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, spawn, start_tokeniser, (settings,)) as pool:
            waiting = deque(pool.submit(tokenise_in_worker, c) for c in itertools.islice(chunks, 4 * workers))
            while waiting:
                yield waiting.popleft().result()
                waiting.extend(pool.submit(tokenise_in_worker, c) for c in itertools.islice(chunks, 1))


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


class Settings(NamedTuple):
    """All that the tokens depend on beside the files."""
    tokenizer: object        # of transformers; None: rows of input_ids + loss_mask alone
    seq_len: int             # tokens kept of a conversation
    template_kwargs: dict    # CHAT_TEMPLATE_KWARGS
    vocab: int               # token ids are below it


def build_conversations(spec, settings, max_bad_share, what="DATA", out=None, tick=lambda: None):
    """Files -> Conversations: tokenised once, then from the cache. UserError for too many malformed lines.

    stats: lines, rows, tokens, supervised, bad, thin (counts), reasons and sources (counts by name).
    `out`: the run's directory, for bad_rows.jsonl. `tick` is called as lines are done.
    """
    files = resolve_files(spec, what)
    if settings.tokenizer is not None and not settings.tokenizer.is_fast:
        raise UserError("TARGET: its tokenizer has no character offsets (it is not a fast one)")
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_trainer"
    directory = root / f"tokens_{cache_key(files, settings)}"
    if not directory.exists():
        try:
            build_cache(directory, files, what, settings, tick)
        except OSError as e:
            raise UserError(f"the token cache can't be written: {e}; XDG_CACHE_HOME moves it") from None
        except BrokenProcessPool:
            raise UserError(f"{what} = {spec}: a tokenising process was killed; out of memory?") from None
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

"""Files, folders and globs -> rows: JSONL, JSON arrays and parquet, one reader for all programs.

    resolve_files(spec)    the files that a setting names
    read_rows(path, what)  the rows of one of them, numbered from 1
    load_row(row)          a row as it was read -> its JSON value
"""
import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from dflash_trainer.chat_lines import BadLine, load_json
from dflash_trainer.errors import UserError, user_error_on

JSON_LINES = ".jsonl", ".jsonl.gz"
JSON = ".json", ".json.gz"
PARQUET = ".parquet"
HEAD = 1 << 16  # bytes at a file's beginning that tell what it is


def has_pyarrow() -> bool:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        return False
    return True


# --------------------------------------------------------------------------------------------- which files


def resolve_files(spec: object, what: str = "DATA", announce: bool = False) -> list[Path]:
    """A file, folder, glob, list or comma-separated mix of them -> files, each once, those of a folder
    sorted. UserError for what isn't there or can't be read. `announce`: print which files of a folder are not
    read."""
    with user_error_on(f"{what} = {spec}: can't be read", OSError):
        files, others = find_files(spec, what)
        for path in files:
            open(path).close()
    if others and announce:
        names = ", ".join(str(path) for path in others[:10])
        more = f" and {len(others) - 10} more" if len(others) > 10 else ""
        print(f"{what}: not read: {names}{more}")
    return files


def find_files(spec: object, what: str) -> tuple[list[Path], list[Path]]:
    """-> (files to read, other files of the folders)."""
    words = [str(word) for word in spec] if isinstance(spec, (list, tuple)) else [str(spec)]
    if len(words) == 1 and (not words[0] or not Path(words[0]).expanduser().exists()):
        words = [word.strip() for word in words[0].split(",") if word.strip()]
    files = {}
    others = []
    for word in words:
        path = Path(word).expanduser()
        if path.is_dir():
            in_folder = files_below(path)
            found = [file for file in in_folder if is_data(file)]
            others += [file for file in in_folder if file not in set(found)]
        elif path.is_file():
            found = [path]
        else:
            found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
            found = [file for file in found if file.is_file()]
        if not found:
            wrong = "no .jsonl, .json or .parquet in directory" if path.is_dir() else "no such file"
            hint = ""
            if what != "PROMPTS":
                hint = (". To make one: bash run.sh tools/regenerate.py PROMPTS=prompts.jsonl "
                        f"TARGET=<model> OUT={word}")
            which = "" if str(spec) == word else f": {word}"  # of several
            raise UserError(f"{what} = {spec}: {wrong}{which}{hint}")
        for file in found:
            if file.name.endswith(PARQUET) and not has_pyarrow():
                raise UserError(f"{what} = {file}: parquet needs pyarrow: pip install pyarrow")
        files.update(dict.fromkeys(found))
    if not files:
        raise UserError(f"{what} = {spec!r} names no file")
    return list(files), others


def files_below(folder: Path) -> list[Path]:
    def unreadable(error):
        raise error
    found = [Path(parent, name) for parent, _, names in os.walk(folder, onerror=unreadable) for name in names]
    return sorted(file for file in found if file.is_file())


def is_data(file: Path) -> bool:
    """Whether a file of a folder is read: by its name; .json also by its content, for it may be a config."""
    if file.name.endswith(JSON_LINES):
        return True
    if file.name.endswith(PARQUET):
        return has_pyarrow()
    if not file.name.endswith(JSON):
        return False
    try:
        return kind_of(file) != "object"
    except (OSError, EOFError, zlib.error, UserError):
        return True  # to be named as an error


def open_bytes(path: Path):
    """A file opened for reading, unpacked where its name ends in .gz."""
    return gzip.open(path) if path.name.endswith(".gz") else open(path, "rb")


def kind_of(path: Path) -> str:
    """"parquet", "array", "object" (one JSON object over several lines) or "lines". UserError for a file that
    is neither JSON nor parquet."""
    if path.name.endswith(PARQUET):
        return "parquet"
    with open_bytes(path) as file:
        head = file.read(HEAD).removeprefix(b"\xef\xbb\xbf").lstrip()
    is_magic = head.startswith((b"\x1f\x8b", b"PK", b"\xff\xfe", b"\xfe\xff", b"PAR1"))
    if head[:1] not in (b"{", b"[") and (is_magic or b"\0" in head.partition(b"\n")[0]):
        raise UserError(f"{path}: is a binary file (compressed, parquet, UTF-16?), not UTF-8 JSON")
    if head[:1] == b"[":
        return "array"
    if path.name.endswith(JSON) and head[:1] == b"{" and b"\n" in head:
        try:
            load_json(head.partition(b"\n")[0])
        except BadLine:
            return "object"
    return "lines"


# ----------------------------------------------------------------------------------------------- their rows


def read_rows(path: Path, what: str, bar=None) -> Iterator[tuple[int, object]]:
    """Yields (line or place from 1, row as it was read) of a file; blank lines are no rows. UserError for a
    file that can't be read, or that is empty. `what`: the setting that names it, for errors. `bar`: a
    progress bar over the bytes of the file."""
    try:
        kind = kind_of(path)
        if kind == "object":
            raise UserError(f"{path}: is one JSON object; a conversation a line (JSONL), or an array of "
                            "them, is expected")
        readers = {"parquet": read_parquet, "array": read_array, "lines": read_lines}
        is_empty = True
        for number, row in readers[kind](path, bar):
            is_empty = False
            yield number, row
        if is_empty:
            raise UserError(f"{path}: is empty; one conversation a line is expected")
    except (OSError, EOFError, zlib.error) as e:
        raise UserError(f"{what} = {path}: can't be read to its end: {e}") from None
    except UserError as e:  # begins with the path
        raise UserError(f"{what} = {e}") from None


def read_lines(path: Path, bar) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as raw:
        lines = gzip.GzipFile(fileobj=raw) if path.name.endswith(".gz") else raw
        at = 0
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if bar is not None:
                bar.update(raw.tell() - at)
                at = raw.tell()
            line = line.strip()
            if line:
                yield number, line


def read_array(path: Path, bar) -> Iterator[tuple[int, object]]:
    """The elements of one JSON array. What follows a damaged element can't be read: it is the last, and
    bad."""
    with open_bytes(path) as file:
        text = file.read().removeprefix(b"\xef\xbb\xbf").decode(errors="surrogateescape")
    size = path.stat().st_size
    not_json = []
    decoder = json.JSONDecoder(parse_constant=not_json.append)
    at = skip_blank(text, text.index("[") + 1)
    number = 0
    while not text.startswith("]", at):
        number += 1
        not_json.clear()
        try:
            row, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield number, BadLine("the array is damaged here: this element is not JSON, what follows is not "
                                  "read")
            return
        if not_json:
            row = BadLine(f"the element has {not_json[0]}, which is not JSON")
        yield number, row
        if bar is not None:
            bar.update((end - at) * size // len(text))
        at = skip_blank(text, end)
        if text.startswith(",", at):
            at = skip_blank(text, at + 1)
        elif not text.startswith("]", at):
            yield number + 1, BadLine("the array is damaged here: what follows is not read")
            return
    if text[at + 1:].strip():
        yield number + 1, BadLine("text after the end of the array: it is not read")


def skip_blank(text: str, at: int) -> int:
    while text[at:at + 1] in (" ", "\n", "\r", "\t"):
        at += 1
    return at


def read_parquet(path: Path, bar) -> Iterator[tuple[int, dict]]:
    import pyarrow
    import pyarrow.parquet
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            share = path.stat().st_size // max(1, file.metadata.num_rows)
            for batch in file.iter_batches(1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
                if bar is not None:
                    bar.update(batch.num_rows * share)
    except pyarrow.ArrowException as e:
        raise UserError(f"{path}: can't be read to its end: {str(e).splitlines()[0]}") from None


def load_row(row: object) -> object:
    """A row as it was read -> its JSON value. BadLine."""
    if isinstance(row, BadLine):
        raise row
    if isinstance(row, (bytes, str)):
        return load_json(row)
    return row

"""JSONL files that a killed program leaves whole: one write a line, one writer, a torn last line goes."""
import fcntl
import json
from pathlib import Path
from typing import BinaryIO

from dflash_trainer.errors import UserError


def open_lines(path: str | Path, setting: str) -> tuple[BinaryIO, list]:
    """A file for append_line and the lines that it holds. UserError, naming the setting, where another
    process writes it, or a line isn't JSON."""
    name = f"{setting} = {path}"
    try:
        file = open(path, "a+b")  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{name}: another process is writing it") from None
    except OSError as e:
        raise UserError(f"{name}: {e.strerror}") from None
    file.seek(0)
    whole = 0
    lines = []
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        try:
            lines.append(json.loads(line))
        except ValueError:
            file.close()
            raise UserError(f"{name}: line {number} is not JSON: not a file of this tool, or a damaged one"
                            ) from None
        whole += len(line)
    file.truncate(whole)
    return file, lines


def append_line(file: BinaryIO, value: object) -> None:
    file.write(json.dumps(value).encode() + b"\n")
    file.flush()  # one write for each line: a kill can cut the last one only

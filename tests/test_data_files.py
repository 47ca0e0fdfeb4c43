"""Which files are read, and what is made of files that hold something else."""
import gzip
import json
import os
from pathlib import Path

import pytest

import train_dflash as td
from chats import (
    GOOD,
    build,
    own_cache,  # noqa: F401  a fixture of every test here
    tokenizer,
    write,
)
from dflash_trainer import data_files
from dflash_trainer.errors import UserError


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "empty"),
        (b"\n \r\n", "empty"),
        (b"[\n  {}\n]", "none of 1 lines"),
        (b"[", "none of 1 lines"),
        (b"PAR1\x00\x15\x04", "binary"),
        (b"\x1f\x8b\x08\x00abc\n", "binary"),
        (b"\xff\xfe{\x00}\x00", "binary"),
        (b"\x00\x01\x02\x03", "binary"),
    ],
)
def test_files_that_are_not_jsonl(content, words, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=rf"^DATA = .*x\.jsonl.*{words}"):
        build(tmp_path / "x.jsonl")


def test_a_damaged_gz(tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(json.dumps(GOOD).encode() * 50)[:60])
    with pytest.raises(UserError, match=r"^DATA = .*x\.jsonl\.gz: can't be read to its end"):
        build(tmp_path / "x.jsonl.gz")


def test_which_files(tmp_path):
    a, b = write(tmp_path / "a.jsonl", [GOOD]), tmp_path / "sub" / "b.jsonl.gz"
    b.parent.mkdir()
    b.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    write(tmp_path / "notes.txt", ["x"])
    both = [Path(a), b]
    assert (
        data_files.resolve_files(str(tmp_path)) == both
        and data_files.resolve_files(f"{a}, {b}") == both
        and data_files.resolve_files([a, b, a]) == both
    )
    assert data_files.resolve_files(str(tmp_path / "*.jsonl")) == [Path(a)] and data_files.resolve_files(
        str(tmp_path / "**/*.gz")
    ) == [b]
    assert len(build(tmp_path)) == 2
    (tmp_path / "none").mkdir()
    for missing in (
        "nowhere.jsonl",
        str(tmp_path / "none"),
        str(tmp_path / "*.csv"),
        f"{a},nowhere.jsonl",
        "",
    ):
        with pytest.raises(UserError, match="DATA"):
            data_files.resolve_files(missing)
    with pytest.raises(UserError, match="regenerate.py"):
        data_files.resolve_files("nowhere.jsonl")
    with pytest.raises(UserError, match="EVAL_DATA"):
        td.read_conversations("EVAL_DATA", "nowhere.jsonl", tokenizer(), 400)


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refused(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError, match="EVAL_DATA = .*can't be read: .*Permission denied.*closed"):
        data_files.resolve_files(str(tmp_path), "EVAL_DATA")

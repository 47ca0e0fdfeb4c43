"""Seconds of a start-up."""
import time

import pytest

from common import train_ok
from dflash_trainer import start_clock
from dflash_trainer.start_clock import StartClock, process_age, table


def test_the_age_of_a_process_grows_with_the_clock():
    first = process_age()
    time.sleep(0.05)
    assert first > 0 and process_age() - first >= 0.04


def test_parts_add_up_in_their_order(monkeypatch):
    """A clock that stands still but for what the parts take."""
    now = [100.0]
    monkeypatch.setattr(start_clock.time, "perf_counter", lambda: now[0])
    clock = StartClock(age=5.0)
    for name, seconds in (("data", 1.0), ("target", 3.0), ("data", 0.5)):
        with clock.part(name):
            now[0] += seconds
    now[0] += 2.0
    assert clock.seconds == {"imports": 5.0, "data": 1.5, "target": 3.0}
    assert list(clock.seconds) == ["imports", "data", "target"]
    assert clock.total() == pytest.approx(11.5)


def test_the_table_names_what_no_part_has():
    lines = table({"imports": 5.0, "data": 1.5}, 8.0, {"target": 0.25, "train": 1.0})
    assert lines[0] == "start-up took 8.0 s"
    words = [line.split() for line in lines[1:4]]
    assert words == [["imports", "5.0"], ["data", "1.5"], ["the", "rest", "1.5"]]
    assert lines[4].endswith("1.2  (target 0.2, train 1.0)")
    assert all(len(line) <= 100 for line in lines)


def test_a_run_ends_its_start_with_the_table(tmp_path):
    """After the first step, once, with every part that the trainer times."""
    out = train_ok(tmp_path / "o", STEPS=2, EVAL_EVERY=2)
    lines = (out / "train.log").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("start-up took"))
    parts = [
        "imports", "configuration", "data", "weights to begin with", "checking devices", "loading the target",
        "proof", "copies to devices", "the target's batch shapes", "drafters", "first evaluation",
        "first step", "the rest"]
    end = at + 1 + len(parts)
    assert [line[2:32].strip() for line in lines[at + 1:end]] == parts
    assert lines[end].startswith("  in these: first calls, compiling")
    assert all(kind in lines[end] for kind in ("target", "eval", "train", "update"))
    before = next(i for i, line in enumerate(lines) if line.startswith("step 1 |"))
    assert at < before and sum(line.startswith("start-up took") for line in lines) == 1

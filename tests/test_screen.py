"""What a run shows on a terminal: short lines; the log keeps the long ones."""
import threading
from types import SimpleNamespace

import pytest

import common
from common import train_ok
from dflash_trainer.run_log import METRICS, LogFiles, Progress, RunLog, format_duration, format_screen_line


@pytest.mark.parametrize("seconds, text", [
    (0.2, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (599, "9 min 59 s"), (600, "10 min"),
    (3600, "1 h 0 min"), (90_000, "25 h 0 min")])
def test_durations_in_words(seconds, text):
    assert format_duration(seconds) == text


def test_the_line_of_a_long_run_fits_a_terminal():
    values = dict.fromkeys(METRICS, 0) | {
        "step": 123_456, "loss": 1.23456, "accept_len": 12.345, "tokens_per_s": 123_456.7}
    line = format_screen_line(values, 1_234_567, 86_000)
    assert line == ("step 123456 of 1234567 | loss 1.235 | accepted 12.35 | 123,457 tokens/s | "
                    "23 h 53 min left")
    assert len(line) <= 90
    assert format_screen_line(values | {"loss": None}, 9, 1).startswith("step 123456 of 9 | loss - |")


def test_a_run_of_the_real_trainer_in_short_lines(tmp_path, capfd):
    """Every line of a step and an evaluation has its long form in the log; no constant is on the screen."""
    out = train_ok(tmp_path / "o", STEPS=4, EVAL_EVERY=2, LOG_EVERY=2)
    shown = capfd.readouterr().out.splitlines()
    logged = (out / "train.log").read_text().splitlines()
    for lines in (shown, logged):  # said before it, once: the others follow a step
        (first,) = (i for i, line in enumerate(lines) if line.startswith("first evaluation: "))
        assert lines[first + 1].startswith("eval step 0 |")
        assert lines[first] == "first evaluation: 3 held-out rows"
    for lines, mark in ((shown, "step 2 of 4 | loss"), (logged, "step 2 | loss")):
        assert sum(line.startswith(mark) for line in lines) == 1
    assert sum(line.startswith("eval step ") for line in shown) == 3 == len(common.eval_lines(out))
    assert not [line for line in shown if "NUM_ANCHORS" in line or line.startswith(("torch:", "setting "))]
    assert [line for line in logged if line.startswith("constants: ") and "NUM_ANCHORS=8" in line]
    for line in shown:
        assert len(line) <= 100 or str(tmp_path) in line or line.startswith("WARNING: "), line


def test_a_terminal_shows_the_rows_of_an_evaluation(tmp_path, capfd):
    """Of all drafters, of those too that are ahead of the first one, which opens the bar."""
    schedule = SimpleNamespace(start=0, end=9)
    log = RunLog(None, LogFiles(tmp_path), Progress(), schedule, None, 0)

    def drafter(rows):
        for _ in range(rows):
            log.count_evaluated_row()

    with log.files.progress_bar(0, 9, shown=True):
        for _ in range(2):  # the second evaluation counts from 0 again
            drafter(3)
            with log.evaluating(403, is_first=False):
                threads = [threading.Thread(target=drafter, args=(100,)) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert log.evaluation_bar.n == 403
    shown = capfd.readouterr().err
    assert "0/9 [" in shown and "evaluating:   0%|" in shown and "/403 [" in shown


def test_without_a_terminal_there_is_no_bar(tmp_path, capfd):
    log = RunLog(None, LogFiles(tmp_path), Progress(), SimpleNamespace(start=0, end=9), None, 0)
    with log.files.progress_bar(0, 9, shown=False), log.evaluating(5, is_first=True):
        log.count_evaluated_row()
    shown = capfd.readouterr()
    assert shown.out == "first evaluation: 5 held-out rows\n" and shown.err == ""

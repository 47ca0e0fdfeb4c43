"""What a run shows on a terminal: short lines; the log keeps the long ones."""
import pytest

import common
from common import train_ok
from dflash_trainer.run_log import METRICS, format_duration, format_screen_line


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
    for lines, mark in ((shown, "step 2 of 4 | loss"), (logged, "step 2 | loss")):
        assert sum(line.startswith(mark) for line in lines) == 1
    assert sum(line.startswith("eval step ") for line in shown) == 3 == len(common.eval_lines(out))
    assert not [line for line in shown if "NUM_ANCHORS" in line or line.startswith(("torch:", "setting "))]
    assert [line for line in logged if line.startswith("constants: ") and "NUM_ANCHORS=8" in line]
    for line in shown:
        assert len(line) <= 100 or str(tmp_path) in line or line.startswith("WARNING: "), line

"""dev/compile_race.py on the CPU: the gate survives new shapes, doing nothing does not (torch 2.11, 2.12)."""
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dev"))
import compile_race
from dflash_trainer import settings


@pytest.fixture(autouse=True)
def short():
    with settings.changed(compile_race, STEPS=10, NEW_LENGTH_AT=5, JITTER_S=0.2, TIMEOUT_S=600.0):
        yield


@pytest.mark.parametrize("seed", [0, 1])
def test_gate_survives_a_new_length(seed):
    run = compile_race.cold_run("race", "gate", compile_race.NEW_LENGTH_AT, seed)
    assert run["failures"] == {}, run["text"]
    assert min(run["steps"]) >= compile_race.STEPS


def test_a_storm_runs():
    """The real one, of a thousand compiles, is no test: its logs are in results/."""
    with settings.changed(compile_race, COMPILES=12, STORM_TARGETS=1, DEVICES=["cpu"], STORM_S=600.0):
        run = compile_race.cold_run("storm", "gate", 0, 0)
    assert run["failures"] == {}, run["text"]
    assert run["compiles"] >= 12 and max(run["shapes"]) >= 2


MINOR = torch.__version__.split(".")[1]


@pytest.mark.skipif(MINOR not in ("11", "12"), reason="from 2.13 on the flag is masked")
def test_doing_nothing_fails():
    runs = (compile_race.cold_run("race", "none", 0, seed) for seed in range(20))
    assert any("FX crash" in run["failures"].values() for run in runs)  # stops at the first that fails


@pytest.mark.parametrize("word", [
    "NO_SUCH=1", "SEEDS=x", "FIXES=nofix", "DEVICES=cpu,cuda:0", "NEW_LENGTH_AT=99", "stormy"])
def test_a_wrong_setting_is_one_line(word, capsys):
    assert compile_race.main([word]) == settings.EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and word.split("=")[0] in line

"""dev/compile_race.py on the CPU: the gate survives a new length, doing nothing does not (torch 2.11, 2.12)."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dev"))
import compile_race  # noqa: E402


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name, value in {"STEPS": 10, "NEW_LENGTH_AT": 5, "JITTER_S": 0.2}.items():
        monkeypatch.setattr(compile_race, name, value)


@pytest.mark.parametrize("seed", [0, 1])
def test_gate_survives_a_new_length(seed):
    run = compile_race.one_run("gate", compile_race.NEW_LENGTH_AT, seed)
    assert run["kinds"] == {}, run["text"]
    assert min(run["steps"]) >= compile_race.STEPS


@pytest.mark.skipif(torch.__version__.split(".")[1] not in ("11", "12"), reason="from 2.13 on the flag is masked")
def test_doing_nothing_fails():
    runs = (compile_race.one_run("none", 0, seed) for seed in range(4))
    assert any("FX crash" in run["kinds"].values() for run in runs)  # stops at the first that fails


@pytest.mark.parametrize("word", ["NO_SUCH=1", "SEEDS=x", "FIXES=nofix", "DEVICES=cpu,cuda:0", "NEW_LENGTH_AT=99"])
def test_a_wrong_setting_is_one_line(word, monkeypatch):
    for name in compile_race.SETTINGS:  # override() sets them: restore each afterwards
        monkeypatch.setattr(compile_race, name, getattr(compile_race, name))
    with pytest.raises(SystemExit) as stop:
        compile_race.override([word])
    assert word.split("=")[0] in str(stop.value) and "\n" not in str(stop.value)

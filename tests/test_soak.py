"""tests/soak.py: a few kills; what it compares does find a difference."""
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import common  # noqa: E402
import soak  # noqa: E402


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    for name in soak.SETTINGS:  # main() sets them: all are put back afterwards
        monkeypatch.setattr(soak, name, getattr(soak, name))
    monkeypatch.setenv("XDG_CACHE_HOME", "")


def test_two_kills_and_a_difference(capsys):
    assert soak.main(["PARTS=kills", "KILLS=2", "STEPS=25"]) == 0, capsys.readouterr()
    text = capsys.readouterr().out
    assert "| all | 1 | 2 |" in text and "nothing lost" in text
    base, other = soak.Job("base_0_1", (), 0), soak.Job("base_1_1", (), 0)
    with pytest.raises(AssertionError, match="tensors differ"):
        base.compare(other)
    log = base.out / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(True)[:-1]))
    with pytest.raises(AssertionError, match="metrics.jsonl differs"):
        base.compare(soak.Job("base_0_2", (), 0))


@pytest.mark.parametrize("word", ["NO_SUCH=1", "KILLS=x", "PARTS=nothing", "STEPS=3"])
def test_a_wrong_setting_is_one_line(word):
    with pytest.raises(SystemExit) as stop:
        soak.override([word])
    assert word.split("=")[0] in str(stop.value) and "\n" not in str(stop.value)
    assert common.DEFAULTS["STEPS"] is None

"""tests/soak.py: a few kills; its comparison does find a difference."""
import pytest

import common
import soak
from dflash_trainer import settings


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # main() sets it: put back afterwards


def test_two_kills_and_a_difference(capsys):
    assert soak.main(["PARTS=kills", "KILLS=2", "STEPS=25"]) == 0, capsys.readouterr()
    text = capsys.readouterr().out
    assert "| all | 1 | 2 |" in text and "nothing lost" in text
    with settings.changed(soak, STEPS=25):
        base, other, again = (soak.Job(name, (), 0) for name in ("base_0_1", "base_1_1", "base_0_2"))
    with pytest.raises(AssertionError, match="tensors differ"):
        base.compare(other)
    log = base.out / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(True)[:-1]))
    with pytest.raises(AssertionError, match="metrics.jsonl differs"):
        base.compare(again)


@pytest.mark.parametrize("word", ["NO_SUCH=1", "KILLS=x", "PARTS=nothing", "STEPS=3"])
def test_a_wrong_setting_is_one_line(word, capsys):
    assert soak.main([word]) == settings.EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and word.split("=")[0] in line
    assert common.DEFAULTS["STEPS"] is None

"""dev/bench.py: its FLOP count is the published one, and it runs through where there is no GPU."""
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "dev"))
import bench
import bench_rig
import model_drafter as md
import train_dflash as td
from dflash_trainer import settings


def test_flops_of_the_27b_shape():
    sizes, constants = bench_rig.SHAPES["qwen3.6-27b"]
    c = md.DrafterConfig(**sizes, block_size=16, mask_token_id=0, layer_types=("full_attention",) * 5)
    terms = bench.flops(c, constants["SEQ_LEN"], constants["NUM_ANCHORS"])
    assert sum(terms.values()) / 1e12 == pytest.approx(123.7, abs=0.05)
    with torch.device("meta"):
        weights = sum(p.numel() for p in md.Drafter(c, None).parameters() if p.dim() > 1)
    per_slot = terms["layers"] / 6 / 8192 / 5  # k and v run over 1.5 x the slots
    kv = 2 * 5120 * 1024
    assert (per_slot - 0.5 * kv) * 5 + 5 * 5120 * 5120 == weights
    fewer = bench.flops(c, 4096, 512, head_rows=512 * 15)
    assert (fewer["head"] * 16, fewer["layers"]) == (terms["head"] * 15, terms["layers"])


def test_tiny_shape_runs_through(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    constants = settings.values(td)
    threads = torch.get_num_threads()
    out = tmp_path / "bench.md"
    variants = "VARIANTS=fused,sliding,dflash2_soft,dspark_tokens,dspark"
    words = ["SHAPE=tiny", "DEVICE=cpu", "REPEATS=1", "WARM_UP=1", variants, f"OUT={out}"]
    assert bench.main(words) == 0
    torch.set_num_threads(threads)
    assert settings.values(td) == constants
    printed = capsys.readouterr().out
    assert "FAILED" not in printed
    last = printed[printed.index("| variant |"):].splitlines()
    assert [line[:25] for line in last[2:4]] == ["| fused loss, full layers", "| fused loss, sliding lay"]
    assert all(line in out.read_text() for line in last)
    assert all(f"two drafters, {rows} rows each a step" in printed for rows in (1, 4))


@pytest.mark.parametrize("word, error", [
    ("VARIANTS=fast", "an entry of VARIANTS = 'fast': must be one of fused"),
    ("PARTS=loop", "an entry of PARTS = 'loop': must be one of ceiling"),
    ("SHAPE=large", "SHAPE = 'large': must be one of qwen3.6-27b, smollm2-135m, tiny"),
    ("REPEATS=x", "REPEATS=x: expected int"),
    ("REPEATED=3", "unknown setting 'REPEATED'"),
])
def test_wrong_settings_are_named(word, error, capsys):
    words = [word] if word.startswith("SHAPE") else ["SHAPE=tiny", word]
    assert bench.main(words) == settings.EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {error}")

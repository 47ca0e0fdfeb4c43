"""dev/bench.py: its FLOP count is the published one, and it runs through where there is no GPU."""
import re
import sys
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[1] / "dev"
sys.path.insert(0, str(TOOLS))


def test_flops_of_the_27b_shape():
    import bench
    import bench_rig
    import model_drafter as md
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
    import bench
    import train_dflash as td
    for module in (td, bench):  # main() sets their constants: all are put back afterwards
        for name in [n for n in vars(module) if n.isupper()]:
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    threads, out = torch.get_num_threads(), tmp_path / "bench.md"
    bench.main(f"SHAPE=tiny DEVICE=cpu REPEATS=1 WARM_UP=1 VARIANTS=fused,sliding OUT={out}".split())
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "FAILED" not in printed
    last = printed[printed.index("| variant |"):].splitlines()
    assert [line[:25] for line in last[2:4]] == ["| fused loss, full layers", "| fused loss, sliding lay"]
    assert all(line in out.read_text() for line in (*last, "| loss | ms, 256 rows | extra GiB, 256 rows"))


@pytest.mark.parametrize("word, error", [("VARIANTS=fast", "VARIANTS = fast; there are fused"),
                                         ("REPEATS=x", "REPEATS=x")])
def test_wrong_settings_are_named(word, error, monkeypatch):
    import bench
    name = word.partition("=")[0]
    monkeypatch.setattr(bench, name, getattr(bench, name))
    with pytest.raises(bench.errors.UserError, match=error):
        bench.main([word])


def test_what_the_readme_links_to_is_there():
    root = Path(__file__).resolve().parents[1]
    links = re.findall(r"\]\(([^)#]+)\)", (root / "README.md").read_text())
    assert len(links) > 15 and [link for link in links if not (root / link).exists()] == []

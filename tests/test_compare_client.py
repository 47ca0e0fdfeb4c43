"""tools/compare_client.py: z-lab's client and the trainer count alike for the heads that the client has."""
import json
import sys

import pytest

pytest.importorskip("dflash")
from common import ROOT, plus_one_target, train_ok

sys.path.insert(0, str(ROOT / "tools"))
import compare_client

MAX = 62  # the last word; the target goes on with <unk>, <pad>, <bos> and the end of the turn


def words_of(ckpt, tmp_path):
    """The target says t + 1 after t: from `assistant` on, its answers are all words in turn."""
    answer = " ".join(f"w{i}" for i in range(7, MAX + 1))
    lines = []
    for first in (9, 30):
        user = {"role": "user", "content": f"w{first} w{first + 1}"}
        lines.append(json.dumps({"messages": [user, {"role": "assistant", "content": answer}]}))
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(lines) + "\n")
    return [f"CKPT={ckpt}", f"TARGET={plus_one_target()}", f"DATA={data}", "N=2"]


@pytest.mark.parametrize("head", [dict(), dict(HEAD="dflash2", SELECTOR_TOP_K=8, SELECTOR_RANK=16)])
def test_the_client_counts_what_the_trainer_counts(head, tmp_path, capfd):
    out = train_ok(tmp_path / "o", TARGET=plus_one_target(), STEPS=30, LR=0.01, LOG_EVERY=10, **head)
    capfd.readouterr()
    assert compare_client.main(words_of(out / "latest", tmp_path)) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("2 prompts, 0 answers differ from plain greedy; 2 ended by themselves: client ")


def test_a_head_that_the_client_has_not_is_refused_by_name(tmp_path, capfd):
    out = train_ok(tmp_path / "o", TARGET=plus_one_target(), STEPS=1, HEAD="dspark", MARKOV_RANK=16)
    capfd.readouterr()
    assert compare_client.main(words_of(out / "latest", tmp_path)) == 2
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"error: CKPT = {out}/latest: its architecture is Qwen3DSparkModel, and z-lab's client has "
        "DFlashDraftModel and DFlash2DraftModel alone")

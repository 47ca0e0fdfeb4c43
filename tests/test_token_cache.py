# ruff: noqa: E501
"""The cache of tokens: the same conversations a second time, never half of them."""
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

import train_dflash as td
from chats import (
    GOOD,
    GPT_OSS,
    QWEN3,
    answer,
    build,
    own_cache,  # noqa: F401  a fixture of every test here
    tokenizer,
    user,
    write,
)
from dflash_trainer import rows as rows_module
from dflash_trainer import token_cache as tc


def test_second_load_is_equal_and_tokenises_nothing(monkeypatch):
    one = build("bom.jsonl")
    monkeypatch.setattr(tc, "tokenise_files", None)
    two = build("bom.jsonl")
    assert two.fingerprint == one.fingerprint and two.stats == one.stats
    assert all(
        (a.ids == b.ids).all() and (a.turn == b.turn).all() and a[2:] == b[2:] for a, b in zip(one, two)
    )
    assert (one.lengths == [len(c.ids) for c in one]).all() and (
        one.supervised == [(c.turn > 0).sum() for c in one]
    ).all()


def test_key_covers_what_tokens_depend_on(tmp_path, monkeypatch):
    file, base = [Path(write(tmp_path / "x.jsonl", [GOOD]))], tc.Settings(tokenizer(), 512, {}, 400)
    others = [tokenizer(QWEN3), tokenizer(eos="</s>"), None]
    keys = [tc.cache_key(file, base), *(tc.cache_key(file, base._replace(tokenizer=t)) for t in others)]
    for name, value in (("seq_len", 256), ("template_kwargs", {"enable_thinking": False}), ("vocab", 401)):
        keys.append(tc.cache_key(file, base._replace(**{name: value})))
    os.utime(file[0], (1, 1))  # a small file is known by its content
    assert tc.cache_key(file, base) == keys[0]
    monkeypatch.setattr(tc, "DATA_VERSION", -1)
    keys.append(tc.cache_key(file, base))
    write(file[0], [GOOD, GOOD])
    keys.append(tc.cache_key(file, base))
    assert len(set(keys)) == len(keys) == 9


def test_template_arguments_reach_the_template(monkeypatch):
    plain = build("bom.jsonl", GPT_OSS)
    monkeypatch.setattr(td, "CHAT_TEMPLATE_KWARGS", {"reasoning_effort": "high"})
    high = build("bom.jsonl", GPT_OSS)
    assert "Effort: high" in tokenizer().decode(
        high[0].ids.tolist()
    ) and "Effort: high" not in tokenizer().decode(plain[0].ids.tolist())


def test_a_killed_build_is_not_taken_for_a_whole_one(tmp_path):
    file = write(tmp_path / "x.jsonl", [GOOD] * 400)
    tokenizer().save_pretrained(tmp_path / "tok")
    code = (
        "import sys, time\nsys.path[:0] = [sys.argv[1]]\nimport train_dflash as td\nfrom transformers import AutoTokenizer\n"
        "from dflash_trainer import token_cache as tc\nreal, n = tc.Tokeniser.prepare, [0]\n"
        "def slow(*a):\n    n[0] += 1\n    if n[0] == 300: print('half', flush=True); time.sleep(1000)\n    return real(*a)\n"
        "tc.Tokeniser.prepare, td.SEQ_LEN = slow, 512\n"
        "td.read_conversations('DATA', sys.argv[2], AutoTokenizer.from_pretrained(sys.argv[3]), 1000)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(td.__file__).parent), file, str(tmp_path / "tok")],
        stdout=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert child.stdout.readline() == b"half\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    left = list((tmp_path / "cache" / "dflash_trainer").iterdir())
    assert len(left) == 1 and left[0].name.endswith(".tmp")
    assert len(build(file)) == 400
    assert [p.name.endswith(".tmp") for p in (tmp_path / "cache" / "dflash_trainer").iterdir()] == [False]


def test_a_build_under_way_is_left_alone(tmp_path):
    import fcntl

    other = tmp_path / "cache" / "dflash_trainer" / "tokens_0.1.tmp"
    other.mkdir(parents=True)
    with open(other / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build("bom.jsonl")
        assert other.exists()


def test_many_rows_at_a_time_give_the_same_as_one(tmp_path, monkeypatch):
    rows = [
        {"messages": [user(f"Say {i}."), answer(f"{i} it is.")], "source": f"s{i % 3}"} for i in range(600)
    ] + ["{"]
    file = write(tmp_path / "x.jsonl", rows)
    one = build(file)
    monkeypatch.setattr(tc, "ROWS_AT_ONCE", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    many = build(file)
    assert (
        many.fingerprint == one.fingerprint
        and many.stats == one.stats
        and many[5].source == one[5].source == "s2"
    )
    assert one.stats["sources"] == {"s0": 200, "s1": 200, "s2": 200}


def test_many_texts_at_a_time_have_the_tokens_of_one(tmp_path):
    """Against the tokenizer called once a text, and a mask made by finding the answers in it."""
    rows = [{"prompt": f"Say {i}. 世界 🙂" * (1 + i % 7), "response": f"{i}  it\n\nis. é" * (1 + i % 5)} for i in range(99)]
    tok = tokenizer()
    for row, got in zip(rows, build(write(tmp_path / "x.jsonl", rows)), strict=True):
        text = tok.apply_chat_template(
            [user(row["prompt"]), answer(row["response"])], tokenize=False)
        one = tok(text, add_special_tokens=False, return_offsets_mapping=True)
        start = text.rindex(row["response"])
        end = text.index("<|im_end|>", start) + len("<|im_end|>")
        mask = [start <= a and b <= end for a, b in one["offset_mapping"]]
        assert got.ids.tolist() == one["input_ids"][:512] and (got.turn > 0).tolist() == mask[:512]


def test_one_long_ten_short_share_anchors(monkeypatch):
    monkeypatch.setattr(td, "SEQ_LEN", 8192)
    got = build("one_long_ten_short.jsonl")
    row = rows_module.make_row(got, list(range(len(got))), 8192, 0)
    anchors = rows_module.draw_anchors(row, 512, np.random.default_rng(0))
    counts = np.bincount(row.conversation[anchors], minlength=len(got))
    quota = 512 * got.supervised / got.supervised.sum()
    assert counts.sum() == 512 and counts.min() >= 1 and (abs(counts - quota) <= 1).all()


def test_inspect(capsys, monkeypatch):
    got = build("thin_rows.jsonl")
    rows_module.inspect_data(got, tokenizer(), 512, 2)
    shown = capsys.readouterr().out
    assert (
        "13 lines: 7 conversations, 6 malformed" in shown
        and "supervised (0." in shown
        and "no assistant message: 1" in shown
    )
    assert "⟦0 plus 3 equals 3. You can check it by counting 3 steps up from 0.<|im_end|>⟧" in shown
    assert shown.count("---- conversation") == 2

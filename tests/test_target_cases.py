"""Targets whose configs or weights break trainers: each trains, or ends in one `error: TARGET = ...` line."""
import json
import shutil

import pytest
import torch
import transformers

import common
from common import ROOT
from dflash_trainer import settings
from dflash_trainer.errors import UserError
from dflash_trainer.target_config import drafter_config, load_config, read_sizes

CASES = ROOT / "tests" / "data" / "cases2"
BEHIND_LAYER_1 = "model.layers.1.mlp.down_proj.weight"


def make_target(folder, config, weights=False, not_finite=None, value=float("nan")):
    """A folder with a config and, where wanted, random weights, one of which has a row that isn't finite."""
    folder.mkdir(exist_ok=True)
    text = json.dumps(config)
    (folder / "config.json").write_text(text)
    if weights:
        torch.manual_seed(0)
        kind = getattr(transformers, config["architectures"][0])
        model = kind._from_config(transformers.AutoConfig.from_pretrained(folder))
        if not_finite:
            model.get_parameter(not_finite).data[0] = value
        model.save_pretrained(folder)
        (folder / "config.json").write_text(text)
    return str(folder) if weights else f"random:{folder}"


def case(name):
    return json.loads((CASES / "targets" / f"{name}.json").read_text())


def run(tmp_path, target, data=CASES / "ids.jsonl", **more):
    code = common.run_main(
        "train", f"TARGET={target}", f"DATA={data}", "TARGET_DEVICES=cpu", "DRAFTER_DEVICES=cpu",
        "SEQ_LEN=64", "NUM_ANCHORS=8", "BLOCK_SIZE=4", "DRAFT_LAYERS=1", "TARGET_LAYER_IDS=0,2", "STEPS=2",
        "ROWS_PER_STEP=1", "EVAL_EVERY=0", "MASK_TOKEN_ID=3", f"OUT={tmp_path / 'out'}",
        *(f"{name}={value}" for name, value in more.items()))
    return code


def drafter_json(tmp_path):
    return json.loads((tmp_path / "out" / "latest" / "config.json").read_text())


def error_line(capsys):
    """The one line of a refusal."""
    told = capsys.readouterr()
    assert "Traceback" not in told.out + told.err
    (line,) = [line for line in told.err.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize("name, weights, sizes", [
    ("qwen3_5_moe", False, {"intermediate_size": 96}),
    ("qwen3_moe", False, {"intermediate_size": 96}),
    ("gpt_neox", False, {"head_dim": 16, "num_key_value_heads": 4}),
    ("gemma4", False, {"head_dim": 16, "intermediate_size": 96}),
    ("granite", False, {"head_dim": 16, "intermediate_size": 96}),
    ("mistral3", True, {"intermediate_size": 96, "vocab_size": 64}),
    ("mistral3", False, {"intermediate_size": 96, "vocab_size": 64}),
    ("qwen3_vl", True, {"intermediate_size": 96, "vocab_size": 64}),
    ("qwen3_vl", False, {"intermediate_size": 96, "vocab_size": 64})])
def test_a_target_that_trains(name, weights, sizes, tmp_path, capsys):
    target = make_target(tmp_path / "target", case(name), weights)
    assert run(tmp_path, target) == 0
    found = drafter_json(tmp_path)
    assert {size: found[size] for size in sizes} == sizes
    told = capsys.readouterr().out
    if name == "qwen3_5_moe":
        assert "no intermediate_size: 96, the active width: 2 experts of 32 and a shared one of 32" in told
    if name in ("mistral3", "qwen3_vl"):
        assert "only the language model is trained on, not " in told


@pytest.mark.parametrize("name, weights, why", [
    ("gpt2", False, "has no list `layers`"),
    ("gemma3n", False, "not one stream"),
    ("llama4", False, "has no list `layers`"),
    ("quantised", True, "names no quant_method")])
def test_a_target_that_can_not_be_used_is_refused_in_one_line(name, weights, why, tmp_path, capsys):
    target = make_target(tmp_path / "target", case(name), weights)
    assert run(tmp_path, target) == settings.EXIT_USER_ERROR
    line = error_line(capsys)
    assert line.startswith(f"error: TARGET = {target}") and why in line


@pytest.mark.parametrize("weight, value, where", [
    (BEHIND_LAYER_1, float("nan"), "from layer 1 on"),
    (BEHIND_LAYER_1, float("inf"), "from layer 1 on"),
    ("model.embed_tokens.weight", float("nan"), None),
    ("model.norm.weight", float("nan"), "the final norm"),
    ("lm_head.weight", float("nan"), "from the logits on")])
def test_hidden_states_that_are_not_finite_are_named_with_their_layer(weight, value, where, tmp_path, capsys):
    target = make_target(tmp_path / "target", case("llama"), True, weight, value)
    code = run(tmp_path, target)
    if where is None:  # of token 0 alone, which no conversation has
        assert code == 0
        return
    assert code == settings.EXIT_USER_ERROR
    line = error_line(capsys)
    assert "not finite (NaN or inf)" in line and where in line and "hooks" not in line


def test_one_conversation_that_is_not_finite_is_named(tmp_path, capsys):
    """Token 0's embedding is NaN, and the second of four conversations has that token."""
    target = make_target(tmp_path / "target", case("llama"), True, "model.embed_tokens.weight")
    lines = []
    for number in range(4):
        ids = [10 + number + i for i in range(30)]
        if number == 1:
            ids[20] = 0
        lines.append({"input_ids": ids, "loss_mask": [0] * 5 + [1] * 25})
    data = common.write_lines(tmp_path / "data.jsonl", lines)
    assert run(tmp_path, target, data, SEQ_LEN=32) == 0
    told = capsys.readouterr().out
    assert "hidden states of conversation 1 are not finite (NaN or inf) from the embeddings on" in told
    assert "WARNING: " in told and "hooks on" not in told


# ------------------------------------------------------------------------------ sizes of configs alone


def sizes_of(tmp_path, log=lambda text: None, **config):
    target = make_target(tmp_path / "target", config)
    return read_sizes(target, load_config(target), log)


def test_the_width_of_qwen3_5_35b_a3b(tmp_path):
    """Its experts for a token and the shared one: 8 x 512 + 512."""
    told = []
    sizes = sizes_of(
        tmp_path, told.append, model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40,
        num_attention_heads=16, num_key_value_heads=2, head_dim=256, num_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, vocab_size=248320)
    assert sizes.intermediate_size == 4608 and sizes.head_dim == 256 and sizes.num_layers == 40
    assert len(told) == 1 and "8 experts of 512 and a shared one of 512" in told[0]


@pytest.mark.parametrize("config, wanted", [
    (dict(model_type="opt", hidden_size=64, ffn_dim=100, num_attention_heads=4, num_hidden_layers=3),
     (100, 4, 16)),
    (dict(model_type="falcon", hidden_size=64, num_attention_heads=4, num_hidden_layers=3),
     (256, None, 16)),
    (dict(model_type="gpt2", n_embd=60, n_head=4, n_layer=3), (240, 4, 16)),  # 60 / 4 is odd
    (dict(model_type="bloom", hidden_size=64, n_head=4, n_layer=3), (256, 4, 16)),
    (dict(model_type="gemma4_text", hidden_size=64, num_hidden_layers=6, num_attention_heads=4,
          num_key_value_heads=2, head_dim=16, global_head_dim=32, intermediate_size=96), (96, 2, 16)),
    (dict(model_type="gemma3n_text", hidden_size=64, num_hidden_layers=4, num_attention_heads=4, head_dim=16,
          num_key_value_heads=2, intermediate_size=[80, 96, 96, 96],
          layer_types=["full_attention"] + ["sliding_attention"] * 3), (96, 2, 16))])
def test_sizes_under_other_names(config, wanted, tmp_path):
    sizes = sizes_of(tmp_path, **config)
    width, kv_heads, head_dim = wanted
    assert (sizes.intermediate_size, sizes.head_dim) == (width, head_dim)
    assert kv_heads is None or sizes.num_kv_heads == kv_heads


def test_a_model_without_attention_is_refused(tmp_path):
    with pytest.raises(UserError, match="TARGET = .* says no num_attention_heads"):
        sizes_of(tmp_path, model_type="mamba", hidden_size=64, num_hidden_layers=4)


@pytest.mark.parametrize("change", [
    {"model_type": "no_such_family"}, {"model_type": None}, {"hidden_size": "sixty"},
    {"num_hidden_layers": None}])
def test_a_config_that_can_not_be_read_is_one_line(change, tmp_path):
    target = make_target(tmp_path / "target", {**case("llama"), **change})
    with pytest.raises(UserError, match="TARGET = ") as error:
        config = load_config(target)
        drafter_config(target, config, None, 4, 1, None, 16, [0, 2], 3, 0.02)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", [
    {"model_type": "bert", "architectures": ["BertModel"]}, {"model_type": "t5"}, {"model_type": "whisper"},
    {"num_attention_heads": 5}])
def test_a_config_of_no_causal_model_is_refused_in_one_line(change, tmp_path, capsys):
    target = make_target(tmp_path / "target", {**case("llama"), **change})
    assert run(tmp_path, target) in (0, settings.EXIT_USER_ERROR)
    told = capsys.readouterr()
    assert "Traceback" not in told.out + told.err
    shutil.rmtree(tmp_path / "out", ignore_errors=True)

"""Loading the target: what a checkpoint may lack or hold, quantised ones, random weights, kernels, copies."""
import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import common
import flex_utils
from dflash_trainer import settings
from dflash_trainer import target as target_files
from dflash_trainer.devices import replica_of
from dflash_trainer.errors import UserError
from dflash_trainer.target_config import load_config
from test_families import SHAPE, qwen3_5
from tools import random_target

UP = "model.language_model.layers.1.mlp.up_proj.weight"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def wrapper():
    """(folder, weights) of an image-text wrapper, with layers for drafting as published ones have."""
    torch.manual_seed(0)
    folder = common.scratch() / "wrapper"
    qwen3_5(text_only=False).save_pretrained(folder)
    return folder, {**load_file(folder / "model.safetensors"), "mtp.fc.weight": torch.zeros(2, 2)}


def load(wrapper, changes, dtype=torch.float32):
    """The wrapper's language model; changes: {name: tensor, or None to leave it out}."""
    folder, weights = wrapper
    weights = {n: w for n, w in {**weights, **changes}.items() if w is not None}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return target_files.load_model(str(folder), CPU, dtype, 0)


def test_only_the_language_model_of_a_wrapper_is_loaded(wrapper, capsys):
    model = load(wrapper, {})
    out = capsys.readouterr().out
    assert "visual.* (" in out and "mtp.* (1 weights)" in out and out.count("\n") == 1
    assert not [n for n, _ in model.named_parameters() if "visual" in n or "mtp" in n]
    assert torch.equal(model.get_decoder().layers[1].mlp.up_proj.weight, wrapper[1][UP])
    assert not any(p.requires_grad for p in model.parameters()) and not model.training


@pytest.mark.parametrize("changes, fault, name", [
    ({UP: None}, "missing", "layers.1.mlp.up_proj.weight"),
    ({UP: torch.zeros(3, 3)}, "of another shape", "layers.1.mlp.up_proj.weight"),
    ({"lm_head.weight": None}, "missing", "lm_head.weight"),
    ({"model.language_model.layers.0.mlp.extra.weight": torch.zeros(2)}, "not known to this model",
     "layers.0.mlp.extra.weight"),
    ({"model.language_model.layers.4.mlp.up_proj.weight": torch.zeros(2)}, "not known to this model",
     "layers.4.mlp.up_proj.weight")])
def test_a_wrong_language_weight_is_an_error_with_its_name(wrapper, changes, fault, name):
    with pytest.raises(UserError, match=f"weights that are {fault}: 1: .*{name}"):
        load(wrapper, changes)


def test_other_parts_of_a_wrapper_may_be_missing(wrapper):
    load(wrapper, {n: None for n in wrapper[1] if "visual" in n})


def test_a_damaged_file_is_one_line(wrapper):
    load(wrapper, {})
    path = wrapper[0] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UserError, match="weights can't be loaded"):
        target_files.load_model(str(wrapper[0]), CPU, torch.float32, 0)


def test_weights_stay_mapped_until_they_move(wrapper):
    """What keeps a second copy out of host memory: a weight of the file's dtype lies in its mapping."""
    model = load(wrapper, {})
    addresses = sorted(p.untyped_storage().data_ptr() for p in model.parameters())
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [x.split()[0].split("-") for x in lines if str(wrapper[0]) in x]
    inside = [a for a in addresses if any(int(b, 16) <= a < int(e, 16) for b, e in mapped)]
    assert len(inside) > 0.9 * len(addresses)


def quantised(tmp_path, config):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "quantization_config": config}))
    return str(tmp_path)


@pytest.mark.parametrize("config", [
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "bitsandbytes", "load_in_4bit": True}])
def test_a_quantised_target_without_its_packages_is_refused_in_one_line(tmp_path, config):
    if transformers.utils.is_accelerate_available():
        pytest.skip("accelerate is installed")
    target, method = quantised(tmp_path, config), config["quant_method"]
    wanted = rf"\(quantised: {method}\): weights can't be loaded: .*accelerate"
    with pytest.raises(UserError, match=wanted) as error:
        target_files.load_model(target, CPU, torch.float32, 0)
    assert "\n" not in str(error.value)


def test_weights_of_a_class_of_their_own_are_refused():
    class Packed(torch.nn.Parameter):
        pass

    model = torch.nn.Linear(2, 2)
    model.weight = Packed(torch.zeros(2, 2))
    with pytest.raises(UserError, match="of class Packed"):
        target_files.check_weights("TARGET = x", model, {})


class Float8Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.ones(1, 1), requires_grad=False)
        self.register_buffer("table", torch.randn(3).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("bad", [frozenset(), frozenset([(CPU, torch.device("meta"))])])
def test_replicas_of_float8_modules_keep_dtype_and_bits(bad):
    module = torch.nn.Sequential(Float8Linear(), torch.nn.Linear(2, 2).requires_grad_(False)).eval()
    here, there = replica_of(module, CPU), replica_of(module, torch.device("meta"), bad)
    for name, tensor in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
        copies = [{**dict(m.named_parameters()), **dict(m.named_buffers())}[name] for m in (here, there)]
        assert [c.dtype for c in copies] == [tensor.dtype] * 2 and not any(c.requires_grad for c in copies)
        assert copies[0].data_ptr() == tensor.data_ptr() and copies[1].device.type == "meta"
    assert here[0] is not module[0] and isinstance(here[0].weight, torch.nn.Parameter)


# ------------------------------------------------------------------------------------------ random weights


@pytest.fixture(scope="module")
def small():
    folder = common.scratch() / "random_small"
    random_target.main([str(folder), "small", "CONVERSATIONS=40", "SHORTEST=20", "LONGEST=64", "WORDS=30"])
    return folder


def test_the_whole_config_is_that_of_the_27b(tmp_path, capsys):
    assert random_target.main([str(tmp_path), "CONVERSATIONS=2"]) == 0
    config = load_config(f"random:{tmp_path}")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 1) == 26.9
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert len(config.layer_types) == 64 and full == list(range(3, 64, 4))
    rope = config.rope_parameters
    assert rope["rope_theta"] == 1e7 and rope["partial_rotary_factor"] == 0.25
    assert random_target.main([str(tmp_path), "LAYERS=16", "CONVERSATIONS=2"]) == 0
    assert load_config(str(tmp_path)).num_hidden_layers == 16
    assert random_target.main([str(tmp_path), "CONFIG={'hidden': 3}"]) == 2
    assert capsys.readouterr().err == "error: CONFIG has hidden: not in the config\n"


def test_a_random_target_trains_from_near_ln_vocabulary(small, capsys):
    out = common.train_ok(small / "out", TARGET=f"random:{small}", DATA=small / "data.jsonl", MASK_TOKEN_ID=0,
                          STEPS=8)
    losses = common.losses(out)
    assert abs(losses[0] - torch.tensor(512.0).log()) < 0.1 and losses[-1] < losses[0]
    said = capsys.readouterr().out
    assert "flash-linear-attention is" in said and "only rows of input_ids are read" in said


def test_random_weights_follow_the_seed_and_the_models_own_init(small):
    one, same, other = (target_files.load_model(f"random:{small}", CPU, torch.bfloat16, s) for s in (1, 1, 2))
    for a, b in zip(one.parameters(), same.parameters()):
        assert torch.equal(a, b) and a.dtype == torch.bfloat16 and not a.requires_grad
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.lm_head.weight.float().std().item() == pytest.approx(0.02, rel=0.05)


# ------------------------------------------------------------------------------------------ kernels


def test_absent_kernels_are_said_with_their_cost(small, capsys):
    decoder = target_files.load_model(f"random:{small}", CPU, torch.float32, 0).get_decoder()
    if target_files.importlib.util.find_spec("fla"):
        pytest.skip("flash-linear-attention is installed")
    target_files.report_kernels(decoder)
    line = capsys.readouterr().out
    assert line.count("\n") == 1 and "causal-conv1d is not installed" in line
    assert "flash-linear-attention is not installed: the target runs about 1.6 times slower" in line


def test_installed_kernels_are_said(small, capsys, monkeypatch):
    decoder = target_files.load_model(f"random:{small}", CPU, torch.float32, 0).get_decoder()
    monkeypatch.setattr(target_files.importlib.util, "find_spec", lambda name: name)
    target_files.report_kernels(decoder)
    line = capsys.readouterr().out
    assert (
        line == "linear-attention layers: flash-linear-attention is installed; causal-conv1d is installed\n"
    )


def test_targets_without_linear_attention_say_nothing(capsys):
    target_files.report_kernels(common.llama().model)
    assert capsys.readouterr().out == ""


def test_small_kernels_follow_the_device_and_the_constant(monkeypatch):
    chosen, cuda = [], torch.device("cuda", 0)
    monkeypatch.setattr(flex_utils, "attend_flex", chosen.append)
    for limit, small in ((232448, None), (101376, None), (232448, True), (101376, False)):
        props = types.SimpleNamespace(shared_memory_per_block_optin=limit)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, props=props: props)
        flex_utils.make_attention(cuda, True, small)
    options = flex_utils.small_kernel_options()
    assert chosen == [None, options, options, None]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_kernel_too_large_for_the_card_ends_in_one_line(wrapped, monkeypatch, capsys):
    text = "out of resource: shared memory, Required: 180224, Hardware limit: 101376. Reducing may help."

    def attend(q, k, v, mask):
        if wrapped:  # as inductor passes it on
            raise RuntimeError(f"No valid triton configs. OutOfResources: {text}\n\nSet TORCH_VERBOSE=1")
        raise ValueError(text)

    monkeypatch.setattr(flex_utils, "attend_dense", attend)
    assert common.train(common.scratch() / f"too_large_{wrapped}") == settings.EXIT_ERROR
    said = capsys.readouterr().out
    assert f"thread drafter-0: {text} Set SMALL_KERNELS = True, or COMPILE = False" in said
    assert "Traceback" not in said and "VERBOSE" not in said


def conversation_from(first_label):
    """Twenty tokens, each one more than the one before, supervised from place `first_label` on."""
    return types.SimpleNamespace(ids=np.arange(5, 25), turn=(np.arange(20) >= first_label).astype(np.int32))


@pytest.mark.parametrize("first_label, labels", [
    (5, "1.000 of 3 labels equal the target's argmax"),
    (15, "no label stands in the first 8 tokens of the 2 conversations looked at")])
def test_the_proof_reads_the_beginning_of_long_conversations(first_label, labels, monkeypatch, capsys):
    """8 tokens of 20, the first one a conversation whose labels come late; logits compared 3 at a time."""
    monkeypatch.setattr(target_files, "PROVED_TOKENS", 8)
    monkeypatch.setattr(target_files, "LOGITS_COMPARED", 3)
    model = target_files.load_model(str(common.plus_one_target()), CPU, torch.float32, 0)
    config = common.tiny_config(target_layer_ids=(0, 1))
    conversations = [conversation_from(15), conversation_from(first_label)]
    target_files.verify_target("T", model, config, conversations, None)
    assert capsys.readouterr().out.splitlines()[1] == f"       {labels}"


def test_a_head_that_is_not_the_models_own_is_refused(monkeypatch):
    """Off in the last of the chunks alone."""
    monkeypatch.setattr(target_files, "LOGITS_COMPARED", 3)
    model = target_files.load_model(str(common.plus_one_target()), CPU, torch.float32, 0)
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        out = target_files.forward_whole(model, ids)
        head = target_files.make_head(model)
        target_files.require_same_logits("T", head, out)
        out.logits[0, -1, 7] += out.logits.abs().max() * 0.1
        with pytest.raises(UserError, match="TARGET = T: its logits are not its head"):
            target_files.require_same_logits("T", head, out)

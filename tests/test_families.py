"""Targets of many families, tiny and random: each trains, saves, evaluates again to the same tau, and decodes
without loss. What differs is real: norms, scaled embeddings and logits, tied heads, experts, linear layers,
wrappers. docs/families.md lists them."""
import json
import re
from contextlib import nullcontext

import pytest
import torch
import transformers

import common
import train_dflash as td
from common import BOS, EOS, MASK, PAD, ROOT, VOCAB
from dflash_trainer import checkpoints, decoding
from dflash_trainer import target as target_files
from dflash_trainer.features import TappedForward

SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=512, bos_token_id=BOS, eos_token_id=EOS,
    pad_token_id=PAD)
WITHOUT_HEAD_DIM = {name: value for name, value in SHAPE.items() if name != "head_dim"}
LINEAR = dict(
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
SLIDING = dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2)
EXPERTS = dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
SHARED_EXPERT = dict(shared_expert_intermediate_size=32)
GEMMA4 = dict(vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, global_head_dim=16,
              num_kv_shared_layers=0)
MROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]})
VISION = dict(depth=1, hidden_size=16, intermediate_size=32, num_heads=2, out_hidden_size=32)
QWEN3_VISION = dict(VISION, patch_size=4, spatial_merge_size=2, temporal_patch_size=2,
                    num_position_embeddings=16, deepstack_visual_indexes=[0])
QWEN3_TOKENS = dict(image_token_id=60, video_token_id=61, vision_start_token_id=58, vision_end_token_id=59)


def of(model_type, shape=SHAPE, **more):
    """A model of random weights, from the config class of a model_type."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config = transformers.AutoConfig.for_model(model_type, **{**shape, **more})
    auto = transformers.AutoModelForCausalLM
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = transformers.AutoModelForImageTextToText
    return auto.from_config(config)


def wrapper(model_type, text, vision, **more):
    return of(model_type, {}, text_config=text, vision_config=vision, **more)


def qwen3_5(text_only):
    text = transformers.Qwen3_5TextConfig(**SHAPE, **LINEAR)
    if text_only:
        return transformers.Qwen3_5ForCausalLM(text)
    both = transformers.Qwen3_5Config(text_config=text.to_dict(), vision_config=VISION)
    return transformers.Qwen3_5ForConditionalGeneration(both)


FAMILIES = {
    "llama": lambda: of("llama"),
    "qwen2": lambda: of("qwen2", WITHOUT_HEAD_DIM),
    "qwen3": lambda: of("qwen3"),
    "mistral": lambda: of("mistral", sliding_window=16),
    "gemma2": lambda: of("gemma2", query_pre_attn_scalar=8, **SLIDING),
    "gemma3": lambda: of("gemma3_text", **SLIDING),
    "gemma4": lambda: of("gemma4_text", **SLIDING, **GEMMA4),
    "gemma4_shared_keys": lambda: of("gemma4_text", **SLIDING, **{**GEMMA4, "num_kv_shared_layers": 2}),
    "phi3": lambda: of("phi3", WITHOUT_HEAD_DIM),
    "olmo2": lambda: of("olmo2", WITHOUT_HEAD_DIM),
    "olmo3": lambda: of("olmo3", WITHOUT_HEAD_DIM, **SLIDING),
    "smollm3": lambda: of("smollm3", WITHOUT_HEAD_DIM),
    "granite": lambda: of("granite", WITHOUT_HEAD_DIM, logits_scaling=8.0, embedding_multiplier=12.0,
                          residual_multiplier=0.22, attention_multiplier=0.0625),
    "cohere": lambda: of("cohere", WITHOUT_HEAD_DIM, logit_scale=0.0625),
    "cohere2": lambda: of("cohere2", logit_scale=0.25, **SLIDING),
    "glm4": lambda: of("glm4"),
    "gpt_neox": lambda: of("gpt_neox", WITHOUT_HEAD_DIM),
    "starcoder2": lambda: of("starcoder2", WITHOUT_HEAD_DIM),
    "stablelm": lambda: of("stablelm", WITHOUT_HEAD_DIM),
    "exaone4": lambda: of("exaone4", **SLIDING),
    "ernie4_5": lambda: of("ernie4_5"),
    "seed_oss": lambda: of("seed_oss"),
    "nemotron": lambda: of("nemotron"),
    "opt": lambda: of("opt", dict(vocab_size=VOCAB, hidden_size=32, ffn_dim=64, num_hidden_layers=4,
                                  num_attention_heads=4, word_embed_proj_dim=32, max_position_embeddings=512,
                                  eos_token_id=EOS, pad_token_id=PAD)),
    "nanochat": lambda: of("nanochat"),
    "hyperclovax": lambda: of("hyperclovax", logits_scaling=0.25),
    "gpt_oss": lambda: of("gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
    "mixtral": lambda: of("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: of("qwen3_moe", **EXPERTS),
    "olmoe": lambda: of("olmoe", WITHOUT_HEAD_DIM, num_experts=4, num_experts_per_tok=2),
    "granitemoe": lambda: of("granitemoe", WITHOUT_HEAD_DIM, num_local_experts=4, num_experts_per_tok=2,
                             logits_scaling=4.0),
    "glm4_moe": lambda: of("glm4_moe", moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
                           n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1),
    "deepseek_v3": lambda: of(
        "deepseek_v3", {**WITHOUT_HEAD_DIM, "num_key_value_heads": 4}, moe_intermediate_size=32,
        n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
        topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8),
    "qwen3_5_text": lambda: qwen3_5(True),
    "qwen3_5_wrapper": lambda: qwen3_5(False),
    "qwen3_5_moe": lambda: of("qwen3_5_moe_text", **SHARED_EXPERT, **EXPERTS, **LINEAR),
    "qwen3_5_moe_wrapper": lambda: wrapper(
        "qwen3_5_moe", {**SHAPE, **SHARED_EXPERT, **EXPERTS, **LINEAR, "model_type": "qwen3_5_moe_text"},
        VISION),
    "qwen3_next": lambda: of("qwen3_next", **SHARED_EXPERT, **EXPERTS, **LINEAR),
    "lfm2": lambda: of("lfm2", WITHOUT_HEAD_DIM, full_attn_idxs=[1, 3], conv_L_cache=3),
    "falcon_h1": lambda: of("falcon_h1", mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1,
                            mamba_d_state=8, lm_head_multiplier=0.25),
    "bamba": lambda: of("bamba", mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8,
                        attn_layer_indices=[1, 3]),
    "mistral3_wrapper": lambda: wrapper(
        "mistral3", {**SHAPE, "model_type": "mistral"},
        dict(model_type="pixtral", hidden_size=16, intermediate_size=32, num_hidden_layers=1,
             num_attention_heads=2, image_size=28, patch_size=14, head_dim=8), image_token_index=60),
    "gemma3_wrapper": lambda: wrapper(
        "gemma3", {**SHAPE, **SLIDING, "model_type": "gemma3_text"},
        dict(model_type="siglip_vision_model", hidden_size=16, intermediate_size=32, num_hidden_layers=1,
             num_attention_heads=2, image_size=28, patch_size=14), mm_tokens_per_image=4),
    "gemma4_wrapper": lambda: wrapper(
        "gemma4", {**SHAPE, **SLIDING, **GEMMA4, "model_type": "gemma4_text"},
        dict(model_type="gemma4_vision", hidden_size=16, intermediate_size=32, num_hidden_layers=1,
             num_attention_heads=2, num_key_value_heads=2, head_dim=8), audio_config=None),
    "qwen2_5_vl_wrapper": lambda: wrapper(
        "qwen2_5_vl", {**WITHOUT_HEAD_DIM, **MROPE, "model_type": "qwen2_5_vl_text"},
        {**VISION, "patch_size": 4}),
    "qwen3_vl_wrapper": lambda: wrapper(
        "qwen3_vl", {**SHAPE, **MROPE, "model_type": "qwen3_vl_text"}, QWEN3_VISION, **QWEN3_TOKENS),
    "qwen3_vl_moe_wrapper": lambda: wrapper(
        "qwen3_vl_moe", {**SHAPE, **EXPERTS, **MROPE, "model_type": "qwen3_vl_moe_text"}, QWEN3_VISION,
        **QWEN3_TOKENS),
}

# what stands around the layers of these is more than an embedding: they run without a CUDA graph
MORE_THAN_LAYERS = "gemma4", "gemma4_shared_keys", "gemma4_wrapper", "granite", "nanochat", "opt"


def test_the_table_in_the_docs_lists_these():
    table = (ROOT / "docs" / "families.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|.*\| (?:yes|no) \|$", table, re.M) == sorted(FAMILIES)
    without_graph = re.findall(r"^\| `(\w+)` \|.*\| no \|$", table, re.M)
    assert without_graph == sorted(MORE_THAN_LAYERS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_saves_and_decodes(family, capsys):
    torch.manual_seed(0)
    target = common.save_target(FAMILIES[family](), f"family_{family}")
    out = common.scratch() / f"out_{family}"
    data = common.data_file()
    code = common.train(out, TARGET=target, DATA=data, EVAL_DATA=data, STEPS=12, EVAL_EVERY=12,
                        MASK_TOKEN_ID=MASK, ROWS_PER_STEP=1, LR=0.01)
    assert code == 0, capsys.readouterr()
    losses = common.losses(out)
    assert min(losses[-3:]) < losses[0]
    logged = common.eval_lines(out)[-1]["tau"]
    capsys.readouterr()
    assert common.run_main("eval", f"CKPT={out / 'latest'}", f"TARGET={target}", f"EVAL_DATA={data}",
                           "TARGET_DEVICES=cpu", "SEQ_LEN=64", "NUM_ANCHORS=8") == 0
    # the file is bf16, the log's drafter fp32: a few argmaxes of a barely trained drafter may differ
    tau = json.loads(capsys.readouterr().out.splitlines()[-1])["tau"]
    assert tau == pytest.approx(logged, abs=0.05)
    config, weights = checkpoints.load_drafter(out / "latest")
    assert len(weights) == 2 * 11 + 3 and not any("embed" in n or "head" in n for n in weights)  # tied or not
    assert config.head_dim == 8 and config.num_target_layers == 4
    scaled = family.startswith("gemma")
    assert config.input_embedding_scale == (pytest.approx(32 ** 0.5) if scaled else 1.0)
    assert_lossless(target, config, weights)


def assert_lossless(target, config, weights):
    model = target_files.load_model(str(target), torch.device("cpu"), torch.float32, 0)
    replica = td.Replica(0, config, torch.device("cpu"), model.get_input_embeddings(),
                         target_files.make_head(model), weights, compile=False)
    assert not hasattr(replica, "masters") and not hasattr(replica, "moments")  # 12 bytes a weight
    prompt = torch.arange(10, 22)[None]
    plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24,
                           eos_token_id=EOS)
    answer, produced = decoding.speculative_generate(
        replica.drafter, replica.embed, replica.head, model, model.get_decoder().layers, prompt, 24, {EOS})
    assert answer.tolist() == plain[0, 12:].tolist()
    assert sum(produced) == len(answer) - 1


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_and_layers_alone_are_the_whole_forward(family):
    """What a CUDA graph of a target holds, with another call's arguments, against transformers' forward."""
    torch.manual_seed(0)
    decoder = FAMILIES[family]().eval().get_decoder()
    forward = TappedForward(decoder, (0, 2))
    ids, other = torch.randint(5, VOCAB, (2, 3, 20))
    with torch.no_grad():
        alone = forward.layers_alone(ids, forward.layer_arguments(other))
        whole = forward.eager(ids)
    if family in MORE_THAN_LAYERS:
        assert forward.difference(alone, whole)  # the check of a capture sees it
    else:
        assert torch.equal(alone, whole)
    assert not any(layer._forward_pre_hooks for layer in decoder.layers)


@pytest.fixture
def cuda(monkeypatch):
    """The calls of torch.cuda that a capture makes, noted; a captured forward runs at once, a replay does
    nothing."""
    calls = []

    class Stream:
        def wait_stream(self, other):
            calls.append("wait")

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            calls.append(f"begin {pool} {capture_error_mode}")

        def capture_end(self):
            calls.append("end")
            if "broken" in calls:
                raise RuntimeError("the capture was invalidated")

        def replay(self):
            calls.append("replay")
    for name, fake in (("Stream", Stream), ("CUDAGraph", Graph), ("current_stream", lambda *_: Stream()),
                       ("device", lambda _: nullcontext()), ("stream", lambda _: nullcontext()),
                       ("graph_pool_handle", lambda: "pool")):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda _, pool: calls.append(f"release {pool}"),
                        raising=False)
    return calls


@torch.no_grad()
def test_a_capture_warms_up_before_and_waits_after(cuda):
    forward = TappedForward(FAMILIES["llama"]().eval().get_decoder(), (0, 2))
    ids = torch.randint(5, VOCAB, (3, 20))
    want = forward.eager(ids)
    forward.layers[0].register_forward_hook(lambda *_: cuda.append("layer"))
    assert torch.equal(forward.capture_and_check(ids), want) and not forward.refused
    assert cuda == ["layer", "wait", "layer", "begin pool thread_local", "layer", "end", "wait", "replay"]
    assert torch.equal(forward.replay(ids), want) and list(forward.graphs) == [ids.shape]


@torch.no_grad()
def test_a_failed_capture_is_ended_released_and_explained(cuda, capsys):
    forward = TappedForward(FAMILIES["llama"]().eval().get_decoder(), (0, 2))
    ids = torch.randint(5, VOCAB, (3, 20))
    want = forward.eager(ids)

    def waits_for_its_device(*_):
        if cuda and cuda[-1].startswith("begin"):
            cuda.append("broken")
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
    forward.layers[1].register_forward_hook(waits_for_its_device)
    assert torch.equal(forward.capture_and_check(ids), want)
    assert cuda[-3:] == ["broken", "end", "release pool"] and forward.refused and not forward.graphs
    said = capsys.readouterr().out
    assert "(3, 20)" in said and "operation not permitted" in said and len(said.splitlines()) == 1
    assert not forward.taps.caught and torch.equal(forward(ids), want)


@torch.no_grad()
def test_a_graph_that_differs_from_the_forward_is_refused(cuda, capsys, monkeypatch):
    forward = TappedForward(FAMILIES["llama"]().eval().get_decoder(), (0, 2))
    ids = torch.randint(5, VOCAB, (3, 20))
    alone = forward.layers_alone

    def one_token_off(*given):
        hidden = alone(*given)
        hidden[1, 7] *= 1.2
        return hidden
    monkeypatch.setattr(forward, "layers_alone", one_token_off)
    forward.graphs[7, 7] = "made before"
    assert torch.equal(forward.capture_and_check(ids), forward.eager(ids))
    assert forward.refused and list(forward.graphs) == [(7, 7)]
    assert "a token differs from transformers' forward by 0.2" in capsys.readouterr().out

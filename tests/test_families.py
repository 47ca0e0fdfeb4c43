"""Targets of other families, tiny and random: each trains, saves, evaluates again to the same tau, and decodes
without loss. What differs is real: q/k norms, scaled embeddings, tied heads, experts, linear layers, a wrapper."""
import json
from contextlib import nullcontext

import pytest
import torch
import transformers

import common
import train_dflash as td
from common import EOS, MASK, PAD, VOCAB
from dflash_trainer import (
    checkpoints,
    decoding,
)
from dflash_trainer import target as target_files
from dflash_trainer.features import TappedForward

SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=512, eos_token_id=EOS, pad_token_id=PAD)
LINEAR = dict(layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
              linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)


def qwen3_5(text_only):
    text = transformers.Qwen3_5TextConfig(**SHAPE, **LINEAR)
    if text_only:
        return transformers.Qwen3_5ForCausalLM(text)
    vision = dict(depth=1, hidden_size=16, intermediate_size=32, num_heads=2, out_hidden_size=32)
    both = transformers.Qwen3_5Config(text_config=text.to_dict(), vision_config=vision)
    return transformers.Qwen3_5ForConditionalGeneration(both)


FAMILIES = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SHAPE, sliding_window=16)),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(transformers.GptOssConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)),
    "qwen3_5_text": lambda: qwen3_5(True),
    "qwen3_5_wrapper": lambda: qwen3_5(False),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_saves_and_decodes(family, capsys):
    torch.manual_seed(0)
    target = common.save_target(FAMILIES[family](), f"family_{family}")
    out = common.scratch() / f"out_{family}"
    data = common.data_file()
    code = common.train(out, TARGET=target, DATA=data, EVAL_DATA=data, STEPS=20, EVAL_EVERY=20, MASK_TOKEN_ID=MASK)
    assert code == 0, capsys.readouterr()
    assert common.losses(out)[-1] < common.losses(out)[0]
    logged = common.eval_lines(out)[-1]["tau"]
    capsys.readouterr()
    assert common.run_main("eval", f"CKPT={out / 'latest'}", f"TARGET={target}", f"EVAL_DATA={data}",
                       "TARGET_DEVICES=cpu", "SEQ_LEN=64", "NUM_ANCHORS=8") == 0
    # the file is bf16, the log's drafter fp32: a few argmaxes of a barely trained drafter may differ
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tau"] == pytest.approx(logged, abs=0.05)
    config, weights = checkpoints.load_drafter(out / "latest")
    assert len(weights) == 2 * 11 + 3 and not any("embed" in n or "head" in n for n in weights)  # tied or not
    assert config.head_dim == 8 and config.num_target_layers == 4
    assert config.input_embedding_scale == (pytest.approx(32 ** 0.5) if family == "gemma3" else 1.0)
    assert_lossless(target, config, weights)


def assert_lossless(target, config, weights):
    model = transformers.AutoModelForCausalLM.from_pretrained(target).eval().requires_grad_(False)
    w = td.Replica(0, config, torch.device("cpu"), model.get_input_embeddings(), target_files.make_head(model), weights, trains=False)
    assert not hasattr(w, "masters") and not hasattr(w, "moments")  # decoding and `eval` need no 12 bytes a weight
    prompt = torch.arange(10, 22)[None]
    plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24,
                           eos_token_id=EOS)
    answer, produced = decoding.speculative_generate(w.drafter, w.embed, w.head, model, model.get_decoder().layers,
                                               prompt, 24, {EOS})
    assert answer.tolist() == plain[0, 12:].tolist()
    assert sum(produced) == len(answer) - 1


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_and_layers_alone_are_the_whole_forward(family):
    """What a CUDA graph of a target holds, with the arguments of another call, against transformers' forward."""
    torch.manual_seed(0)
    decoder = FAMILIES[family]().eval().get_decoder()
    forward = TappedForward(decoder, (0, 2))
    ids, other = torch.randint(5, VOCAB, (2, 3, 20))
    with torch.no_grad():
        assert torch.equal(forward.layers_alone(ids, forward.layer_arguments(other)), forward.eager(ids))
    assert not any(layer._forward_pre_hooks for layer in decoder.layers)


@pytest.fixture
def cuda(monkeypatch):
    """The calls of torch.cuda that a capture makes, noted; a captured forward runs at once, a replay does nothing."""
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

"""The short checks: `python test_smoke.py`, with torch, transformers and safetensors alone.

    on a CPU    masks, loss and metric against hand-made truths; the real main() with 2 + 2 threads, resumed
    on a GPU    the same, and: compiled attention, CUDA graphs, main() compiled from empty caches

One line a check, the counts at the end, exit code 0 if nothing failed. `python test_smoke.py gpu` runs those
with `gpu` in their names. pytest collects the same functions: `test_*`, with what must hold in the docstring.
"""
import contextlib
import functools
import io
import json
import math
import os
import random
import sys
import tempfile
import threading
import time
import traceback
import unittest
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

import flex_utils
import model_drafter as md
import train_dflash as trainer
from dflash_trainer import features, rows, settings
from dflash_trainer import target as target_files

SLIDING = "sliding_attention"
FULL = "full_attention"


def close(a: float, b: float, tolerance: float = 1e-6) -> bool:
    return abs(a - b) <= tolerance


# -------------------------------------------------------------------------------- the worked example, by hand
# Twelve tokens, two answers: turn 1 ends at token 5, the user speaks at 6 and 7, turn 2 ends at 11. K is 4.

TURN = np.array([0, 0, 0, 1, 1, 1, 0, 0, 2, 2, 2, 2], dtype=np.int32)
TOKENS = np.arange(20, 32)
MASK = 63


def example_batch(anchors: list[int]) -> md.Batch:
    length = rows.run_length(TURN, np.zeros(12, np.int32))
    position = np.arange(12)
    start = np.zeros(12, np.int64)
    blocks = md.block_arrays(start, length, anchors, len(anchors), 4, 128)
    tensors = [torch.from_numpy(array) for array in (TOKENS, position, *blocks)]
    return md.Batch(torch.zeros(1, 12, 16), *tensors)


def what_the_drafter_gets(batch: md.Batch) -> tuple[list, list, torch.Tensor]:
    """row_loss with a drafter that notes its input -> (token ids per block, positions per block, mask)."""
    seen = {}

    def drafter(hidden, embeds, context_pos, block_pos, masks):
        seen["ids"] = embeds[0, :, 0].long().view(-1, 4).tolist()
        seen["positions"] = block_pos.view(-1, 4).tolist()
        seen["mask"] = masks[FULL]
        return torch.zeros(1, embeds.shape[1], 8, requires_grad=True)

    drafter.config = md.DrafterConfig(
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=64,
        block_size=4,
        mask_token_id=MASK,
        target_layer_ids=(1,),
        num_target_layers=4,
        layer_types=(FULL,),
    )

    def embed(ids):  # the embedding of a token is its id
        return ids[..., None].float()

    head = md.Head(torch.nn.Linear(8, 64))
    spec = md.LossSpec("decay", md.default_gamma(3), "checkpoint", 128)
    md.row_loss(drafter, embed, head, batch, 0, flex_utils.dense_mask, spec)
    return seen["ids"], seen["positions"], seen["mask"]


def test_anchors_and_the_slots_that_count():
    """An anchor has a supervised token after it in its turn; a slot counts up to the end of the turn."""
    length = rows.run_length(TURN, np.zeros(12, np.int32))
    assert np.flatnonzero(length >= 1).tolist() == [3, 4, 8, 9, 10]
    batch = example_batch([3, 4, 8, 9, 10])
    assert batch.counted[0].tolist() == [2, 1, 3, 2, 1]
    counts = (torch.arange(4) >= 1) & (torch.arange(4) <= batch.counted[0, :, None])
    weights = md.slot_weights(torch.zeros(5, 4), counts, "decay", md.default_gamma(3)).tolist()
    assert weights[1] == [0, 1, 0, 0]
    assert weights[3][0] == 0 and weights[3][1] == 1 and weights[3][3] == 0
    assert close(weights[3][2], math.exp(-1 / 2))


def test_a_block_sees_the_tokens_before_its_anchor():
    """A block is the anchor and masks; it sees the context before the anchor, and itself."""
    anchors = [3, 4, 8, 9, 10]
    ids, positions, mask = what_the_drafter_gets(example_batch(anchors))
    assert ids[1] == [24, MASK, MASK, MASK]
    assert positions[1] == [4, 5, 6, 7]
    for block, anchor in enumerate(anchors):
        own = [12 + 4 * block + slot for slot in range(4)]
        for slot in range(4):
            visible = mask[4 * block + slot].nonzero()[:, 0].tolist()
            assert visible == list(range(anchor)) + own


def test_tau_counts_as_a_server_does():
    """The walk: 1, 0, 1, 0 matches at the tokens of a four-token answer are two passes for three tokens."""
    produced = md.walk([1, 0, 1, 0], 4)
    assert produced == [2, 1]


# ------------------------------------------------------------------------------------------- mask and loss

def looped_mask(starts, anchors, s, k, window) -> torch.Tensor:
    """The definition of what a slot sees, pair by pair."""
    n = len(anchors) * k
    out = torch.zeros(n, s + n, dtype=torch.bool)
    for q in range(n):
        block, slot = divmod(q, k)
        for kv in range(s + n):
            if kv < s:
                near = window is None or kv >= anchors[block] + slot - (window - 1)
                out[q, kv] = starts[block] <= kv < anchors[block] and near
            elif (kv - s) // k == block:
                behind = slot - (kv - s) % k
                out[q, kv] = window is None or 0 <= behind < window
    return out


def test_the_mask_equals_a_triple_loop():
    """Three packed conversations, full and sliding layers; the block-sparse form agrees tile by tile."""
    starts, anchors, s, k = [0, 0, 50, 50, 130, 130], [9, 10, 51, 129, 131, 149], 150, 10
    for window in (None, 6):
        wanted = looped_mask(starts, anchors, s, k, window)
        arguments = torch.tensor(starts), torch.tensor(anchors), s, k, window
        assert torch.equal(flex_utils.dense_mask(*arguments), wanted)
        states = flex_utils.tile_states(*arguments)  # 0: nothing visible, 1: some, 2: all
        for i in range(states.shape[0]):
            for j in range(states.shape[1]):
                tile = wanted[i * 128:i * 128 + 128, j * 128:j * 128 + 128]
                if states[i, j] == 2:
                    assert tile.all()
                else:
                    assert states[i, j] == int(tile.any())


def test_the_chunked_loss_equals_a_plain_one():
    """Cross-entropy and gradient by chunks through a frozen head, both forms, against fp64 log-softmax."""
    for form in ("checkpoint", "fused"):
        torch.manual_seed(0)
        head = md.Head(torch.nn.Linear(8, 31, bias=False, dtype=torch.float64).requires_grad_(False))
        hidden = torch.randn(24, 8, dtype=torch.float64)
        labels = torch.randint(0, 31, (24,))
        weights = torch.rand(24, dtype=torch.float64)
        ours = hidden.clone().requires_grad_()
        plain = hidden.clone().requires_grad_()
        ce, right = md.chunked_ce(ours, head, labels, 8, form)
        wanted = -torch.log_softmax(plain @ head.linear.weight.T, -1)[range(24), labels]
        (ce * weights).sum().backward()
        (wanted * weights).sum().backward()
        assert torch.allclose(ce.double(), wanted, rtol=0, atol=1e-5)
        assert torch.allclose(ours.grad, plain.grad, rtol=0, atol=1e-6)
        assert torch.equal(right, (hidden @ head.linear.weight.T).argmax(-1) == labels)


# ------------------------------------------------------------------------------ a tiny target and its chats

VOCAB = 64
SPECIAL = ["<pad>", "<bos>", "<|im_end|>", "<|unused|>", "<|im_start|>", "user", "assistant"]
FIRST_WORD = len(SPECIAL)  # words w7..w62 follow, then <unk>
TEMPLATE = ("{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
            "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}")


@functools.cache
def scratch() -> Path:
    """A folder for everything written here, the token cache included; gone at the end."""
    folder = tempfile.TemporaryDirectory(prefix="dflash_smoke_")
    scratch.keep = folder
    os.environ["XDG_CACHE_HOME"] = folder.name
    return Path(folder.name)


@functools.cache
def tiny_target(hidden: int = 32, heads: int = 4) -> Path:
    """A Llama of four layers with random weights, words for tokens and a ChatML template."""
    folder = scratch() / f"target_{hidden}"
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=4,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=512,
        pad_token_id=0, bos_token_id=1, eos_token_id=2))
    model.save_pretrained(folder)
    words = SPECIAL + [f"w{i}" for i in range(FIRST_WORD, VOCAB - 1)] + ["<unk>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<bos>",
        eos_token="<|im_end|>", additional_special_tokens=["<|unused|>", "<|im_start|>"])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def chats(name: str, count: int, longest: int, seed: int) -> Path:
    """Chats whose words count up, so that a drafter can learn them; every second has two turns."""
    rng = random.Random(seed)
    lines = []
    for i in range(count):
        word = rng.randrange(40)
        messages = []
        for _ in range(1 + i % 2):
            for role, length in (("user", rng.randint(2, 4)), ("assistant", rng.randint(5, longest))):
                words = [f"w{FIRST_WORD + (word + j) % 40}" for j in range(length)]
                messages.append({"role": role, "content": " ".join(words)})
                word += length
        lines.append(json.dumps({"messages": messages}) + "\n")
    path = scratch() / f"{name}.jsonl"
    path.write_text("".join(lines))
    return path


def train(out: Path, **given: object) -> Path:
    """main() in this process, as `python train_dflash.py train NAME=VALUE ...` -> OUT."""
    words = []
    for name, value in dict(given, OUT=out).items():
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        words.append(f"{name}={text}")
    with settings.changed(trainer):  # puts the constants back
        assert trainer.main(["train", *words]) == 0
    names = [thread.name for thread in threading.enumerate()]
    left = [name for name in names if name.startswith(("target-", "drafter-"))]
    assert not left, f"threads left behind: {left}"
    return out


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def log_lines(out: Path) -> list[dict]:
    return [line for line in metrics(out) if "eval_loss" not in line]


def eval_lines(out: Path) -> list[dict]:
    return [line for line in metrics(out) if "eval_loss" in line]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in log_lines(out)]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every file: the published weights, fp32 masters, moments."""
    found = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            found[f"{path.name}:{name}"] = tensor
    return found


def masters(checkpoint: Path) -> torch.Tensor:
    """The fp32 weights, end to end."""
    return flat({name: tensor for name, tensor in tensors(checkpoint).items() if ":master." in name})


def flat(named: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in named.values()])


# ----------------------------------------------------------------------------------------- the real main()

TWENTY_STEPS = dict(
    SEQ_LEN=64, NUM_ANCHORS=8, BLOCK_SIZE=4, DRAFT_LAYERS=5, LAYER_TYPES=[SLIDING] * 4 + [FULL],
    SLIDING_WINDOW=16, TARGET_LAYER_IDS=[0, 2], STEPS=20, ROWS_PER_STEP=4, LR=0.003, LOG_EVERY=1,
    EVAL_EVERY=10, SAVE_EVERY=10, KEEP=3, STALL_S=600,
    TARGET_DEVICES=["cpu", "cpu"], DRAFTER_DEVICES=["cpu", "cpu"])
TIMED = {"tokens_per_s", "step_ms", "wait_ms", "target_wait_ms", "reduce_ms", "queue", "mem_gib"}


@functools.cache
def twenty_steps() -> tuple[Path, dict]:
    """A run on chats, two target and two drafter threads -> (OUT, its settings)."""
    given = dict(TWENTY_STEPS, TARGET=tiny_target(), DATA=chats("train", 40, 30, seed=0),
                 EVAL_DATA=chats("eval", 6, 30, seed=1))
    return train(scratch() / "twenty", **given), given


def test_main_trains_with_two_target_and_two_drafter_threads():
    """Loss near ln V at first, then falling; evaluated at 0, 10, 20; nothing skipped."""
    out, _ = twenty_steps()
    assert [line["step"] for line in log_lines(out)] == list(range(1, 21))
    assert [line["step"] for line in eval_lines(out)] == [0, 10, 20]
    assert close(losses(out)[0], math.log(VOCAB), 0.1)
    assert np.mean(losses(out)[-3:]) < losses(out)[0] - 0.2
    assert eval_lines(out)[-1]["eval_loss"] < eval_lines(out)[0]["eval_loss"] - 0.2
    assert log_lines(out)[-1]["skipped"] == 0


CONFIG_KEYS = """architectures model_type block_size dflash_config num_target_layers layer_types
    sliding_window use_sliding_window max_window_layers hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps attention_bias attention_dropout
    initializer_range max_position_embeddings tie_word_embeddings vocab_size dtype torch_dtype bos_token_id
    eos_token_id pad_token_id rope_theta rope_parameters rope_scaling"""
LAYER_TENSORS = """self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj self_attn.q_norm
    self_attn.k_norm mlp.gate_proj mlp.up_proj mlp.down_proj input_layernorm post_attention_layernorm"""


def test_the_checkpoint_holds_what_servers_read():
    """58 bf16 tensors for 5 layers, every key of config.json and none that harms; `latest` points at it."""
    out, given = twenty_steps()
    state = load_file(out / "latest" / "model.safetensors")
    wanted = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    wanted |= {f"layers.{i}.{name}.weight" for i in range(5) for name in LAYER_TENSORS.split()}
    assert state.keys() == wanted and len(state) == 58
    assert all(tensor.dtype == torch.bfloat16 for tensor in state.values())
    assert state["fc.weight"].shape == (32, 64)
    config = json.loads((out / "latest" / "config.json").read_text())
    assert config.keys() >= set(CONFIG_KEYS.split())
    assert not config.keys() & {"causal", "is_causal", "partial_rotary_factor", "mrope_section"}
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [0, 2], "block_size": 4}
    assert config["block_size"] == 4 and config["num_target_layers"] == 4
    assert config["layer_types"] == given["LAYER_TYPES"] and config["sliding_window"] == 16
    assert set(config["rope_parameters"]) == {"rope_type", "rope_theta"} and config["rope_theta"] == 10000.0
    assert (out / "latest").is_symlink() and str((out / "latest").readlink()) == "step_00000020"


def test_ten_steps_and_ten_more_give_the_same_bits():
    """Stopped at 10 and resumed: weights, moments, losses and learning rates of 20 steps in one go."""
    base, given = twenty_steps()
    out = train(scratch() / "resumed", **given, STOP_AT=10)
    train(out, **given)
    ours, theirs = tensors(out / "latest"), tensors(base / "latest")
    assert ours.keys() == theirs.keys() and len(ours) > 3 * 58
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{len(different)} of {len(ours)} tensors differ: {different[:4]}"
    for line, other in zip(metrics(out), metrics(base), strict=True):
        assert line.keys() == other.keys()
        assert all(line[name] == other[name] for name in line.keys() - TIMED)


# ------------------------------------------------------------------------------------------------- on a GPU

GPU = "cuda:0"  # tests/test_smoke_case.py puts the CPU here, for what needs no kernel


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise unittest.SkipTest("needs a GPU")


@functools.cache
def gpu_case() -> SimpleNamespace:
    """A row of two packed conversations, 40 anchors and 8 padding blocks; weights large enough to matter."""
    torch.manual_seed(0)
    config = md.DrafterConfig(256, 512, 2, 4, 2, 128, 512, 16, 511, (0, 1), 4, (SLIDING, FULL), 100)
    s, n = 384, 48
    turn, conversation = np.zeros(s, np.int32), np.full(s, -1, np.int32)
    position, start = np.zeros(s, np.int64), np.zeros(s, np.int64)
    for number, (first, length) in enumerate(((0, 200), (200, 150))):
        place = slice(first, first + length)
        position[place] = np.arange(length)
        start[place] = first
        conversation[place] = number
        turn[first + 8:first + length] = 1
    run_length = rows.run_length(turn, conversation)
    ids = np.random.default_rng(0).integers(0, 500, s)
    target_hidden = torch.randn(1, s, 512).bfloat16().to(GPU)

    def batch(seed: int) -> md.Batch:
        valid = np.flatnonzero(run_length >= 1)
        anchors = np.sort(np.random.default_rng(seed).choice(valid, 40, replace=False))
        blocks = md.block_arrays(start, run_length, anchors, n, 16, 128)
        tensors = [torch.from_numpy(array).to(GPU) for array in (ids, position, *blocks)]
        return md.Batch(target_hidden, *tensors)

    drafter = md.Drafter(config, None)
    drafter.init_weights(1)
    weights = {}
    for name, weight in drafter.state_dict().items():
        weights[name] = (weight * 2.5 if weight.dim() == 2 else weight).bfloat16()
    return SimpleNamespace(
        config=config, weights=weights, batch=batch,
        embed=torch.randn(512, 256).bfloat16().to(GPU),
        head=(torch.randn(512, 256) * 0.05).bfloat16().to(GPU))


def gpu_drafter(dtype: torch.dtype, attend: Callable, owner: str | None = None) -> md.Drafter:
    case = gpu_case()
    drafter = md.Drafter(case.config, attend)
    drafter.load_state_dict(case.weights)
    drafter = drafter.to(GPU, dtype)
    for layer in drafter.layers if owner else ():
        layer.forward = flex_utils.compiled(layer.forward, owner)
    return drafter


def gpu_row(drafter: md.Drafter, make_mask: Callable, batch: md.Batch, owner: str | None = None):
    """-> (hidden states of the slots that count, loss, gradients by name) of one row, fp32 on the host."""
    case = gpu_case()
    dtype = next(drafter.parameters()).dtype
    embed = torch.nn.Embedding.from_pretrained(case.embed.to(dtype))
    head = md.Head(torch.nn.Linear(256, 512, bias=False, device=GPU, dtype=dtype))
    head.linear.weight = torch.nn.Parameter(case.head.to(dtype), requires_grad=False)
    caught = []

    def keep(module, args, output):
        caught.append(output.detach()[0])

    handle = drafter.norm.register_forward_hook(keep)
    drafter.zero_grad(set_to_none=True)
    cross_entropy = md.CrossEntropy()
    if owner:
        cross_entropy = md.CrossEntropy(lambda function: flex_utils.compiled(function, owner))
    spec = md.LossSpec("decay", 7.0, "fused", 128, cross_entropy)
    batch = batch._replace(target_hidden=batch.target_hidden.to(dtype))
    result = md.row_loss(drafter, embed, head, batch, 0, make_mask, spec)
    result.loss.backward()
    handle.remove()
    counted = batch.slots[batch.slots < batch.anchors.numel() * case.config.block_size]  # without the padding
    gradients = {name: p.grad.float().cpu() for name, p in drafter.named_parameters()}
    return caught[0][counted].float().cpu(), result.loss.item(), gradients


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2 distance."""
    return float((a - b).norm() / b.norm())


def compiled_row(attend: Callable, gate: flex_utils.Gate, owner: str):
    """Two rows through compiled flex_attention under the gate; the second must not compile anything."""
    case = gpu_case()
    drafter = gpu_drafter(torch.bfloat16, attend, owner)
    with gate.first_step(), gate.work("train", owner):
        first = gpu_row(drafter, flex_utils.block_mask, case.batch(1), owner)
    with gate.work("train", owner) as alone:
        assert not alone
        gpu_row(drafter, flex_utils.block_mask, case.batch(2), owner)
    return first


def dense_rows() -> dict[str, tuple]:
    """The row through dense attention: in fp32, which is the truth, and in bf16."""
    found = {}
    for name, dtype in (("truth", torch.float32), ("dense", torch.bfloat16)):
        drafter = gpu_drafter(dtype, flex_utils.attend_dense)
        found[name] = gpu_row(drafter, flex_utils.dense_mask, gpu_case().batch(1))
    return found


@functools.cache
def gpu_rows() -> dict[str, tuple]:
    """The same row four ways: fp32 dense (the truth), bf16 dense, bf16 flex, bf16 flex with small tiles."""
    flex_utils.worker_compile_settings(1)
    gate = flex_utils.Gate(threading.Lock())
    found = dense_rows()
    allow_compiles = gate.forbid_compiles_outside()
    try:
        attend, make_mask = flex_utils.make_attention(torch.device(GPU), True)
        assert make_mask is flex_utils.block_mask
        found["flex"] = compiled_row(attend, gate, "flex")
        small = flex_utils.attend_flex(flex_utils.small_kernel_options())
        found["small"] = compiled_row(small, gate, "small")
    finally:
        allow_compiles()
    return found


def test_gpu_compiled_attention_agrees_with_dense_fp32():
    """Hidden states, loss and every gradient: hardly further from fp32 dense than bf16 dense is."""
    need_gpu()
    hidden32, loss32, grads32 = gpu_rows()["truth"]
    hidden16, _, grads16 = gpu_rows()["dense"]
    for kernel in ("flex", "small"):
        hidden, loss, grads = gpu_rows()[kernel]
        assert gap(hidden, hidden32) < min(0.05, 2 * gap(hidden16, hidden32) + 0.002)
        assert abs(loss - loss32) < 0.01 * abs(loss32)
        assert gap(flat(grads), flat(grads32)) < 0.05
        for name, truth in grads32.items():
            assert truth.norm() > 0
            assert gap(grads[name], truth) < 2 * gap(grads16[name], truth) + 0.02, (kernel, name)


def test_gpu_small_tiles_give_the_same_numbers():
    """Kernel options for 99 KB of shared memory against the default tiles."""
    need_gpu()
    hidden, loss, grads = gpu_rows()["flex"]
    hidden_small, loss_small, grads_small = gpu_rows()["small"]
    assert gap(hidden_small, hidden) < 0.01
    assert abs(loss_small - loss) < 0.005 * abs(loss)
    assert gap(flat(grads_small), flat(grads)) < 0.02


def test_gpu_target_as_a_graph_gives_the_same_features():
    """Each shape's CUDA graph against transformers' own forward, other ids every time."""
    need_gpu()
    path = tiny_target(hidden=128, heads=2)
    decoder = target_files.load_model(str(path), GPU, torch.bfloat16, 0).get_decoder()
    forward = features.TappedForward(decoder, (0, 2))
    with torch.no_grad():
        for shape in [(4, 64), (1, 256), (4, 64), (1, 256), (4, 64)]:
            ids = torch.randint(FIRST_WORD, VOCAB - 1, shape, device=GPU)
            assert gap(forward(ids).float(), forward.eager(ids).float()) < 0.01
    assert len(forward.graphs) == 2 and not forward.refused


def test_gpu_main_trains_compiled_and_resumes():
    """20 steps of 2 + 2 threads on cuda:0 from empty compile caches; the last ten once more by 1 + 1."""
    need_gpu()
    given = dict(
        TWENTY_STEPS, TARGET=tiny_target(hidden=128, heads=2), DATA=chats("gpu_train", 60, 110, seed=2),
        EVAL_DATA=chats("gpu_eval", 4, 110, seed=3), SEQ_LEN=256, NUM_ANCHORS=32, BLOCK_SIZE=16,
        DRAFT_LAYERS=2, LAYER_TYPES=[SLIDING, FULL], SLIDING_WINDOW=64, STALL_S=600)
    one, two = [GPU], [GPU, GPU]
    base = train(scratch() / "gpu", **dict(given, TARGET_DEVICES=two, DRAFTER_DEVICES=two))
    for folder in map(os.environ.get, ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")):
        assert folder is None or any(Path(folder).rglob("*")), folder
    assert [line["step"] for line in log_lines(base)] == list(range(1, 21))
    assert [line["step"] for line in eval_lines(base)] == [0, 10, 20]
    assert all(math.isfinite(loss) for loss in losses(base))
    assert np.mean(losses(base)[-3:]) < losses(base)[0] - 0.2
    halfway = base / "step_00000010"
    out = train(scratch() / "gpu_resumed", RESUME=halfway,
                **dict(given, TARGET_DEVICES=one, DRAFTER_DEVICES=one, EVAL_EVERY=0))
    assert [line["step"] for line in log_lines(out)] == list(range(11, 21))
    assert np.allclose(losses(out), losses(base)[10:], rtol=0, atol=0.05)
    end = masters(base / "latest")
    moved = gap(masters(halfway), end)
    apart = gap(masters(out / "latest"), end)
    assert apart < 0.5 * moved, (apart, moved)  # sums on a GPU come in any order: not the same bits


# ----------------------------------------------------------------------------------------------------- main

def run_check(check: Callable[[], None]) -> tuple[str, str]:
    """-> ("passed" | "failed" | "skipped", why). What the check prints is kept for a failure."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            check()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "failed", f"{printed.getvalue()[-6000:]}\n{traceback.format_exc()}"
    return "passed", ""


def main(words: list[str]) -> int:
    transformers.utils.logging.disable_progress_bar()
    # compiled for real, not found in the cache of an earlier call
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch() / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(scratch() / "triton")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    print(f"test_smoke.py on {where}, torch {torch.__version__}, transformers {transformers.__version__}")
    checks = {name: check for name, check in globals().items() if name.startswith("test_")}
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for name, check in checks.items():
        if words and not any(word in name for word in words):
            continue
        title = name.removeprefix("test_").replace("_", " ")
        print(f"{title:<62} ", end="", flush=True)
        began = time.perf_counter()
        outcome, why = run_check(check)
        counts[outcome] += 1
        note = f"({why})" if outcome == "skipped" else f"{time.perf_counter() - began:5.1f} s"
        print(f"{outcome}  {note}", flush=True)
        if outcome == "failed":
            print(why, flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["failed"] or not counts["passed"] else 0


torch.set_num_threads(1)  # tiny tensors are slower on more

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The shortest set of checks: `python test_smoke.py`, or pytest on it. On a GPU it also compiles for real."""
import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent / "tests"))

import numpy as np  # noqa: E402
import torch  # noqa: E402

try:
    import pytest
except ImportError:
    sys.exit("test_smoke.py needs pytest: pip install pytest, or bash run.sh test")

import common  # noqa: E402
import flex_utils  # noqa: E402
import model_drafter as md  # noqa: E402
from common import assert_same, eval_lines, log_lines, losses, message_file  # noqa: E402
from common import random_target, train_ok, threads  # noqa: E402
from dflash_trainer import rows as rows_module  # noqa: E402
from dflash_trainer import target as target_files  # noqa: E402
from dflash_trainer.features import TappedForward  # noqa: E402

SLIDING, FULL, CPU = "sliding_attention", "full_attention", torch.device("cpu")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# -------------------------------------------------------------------------------- the worked example, by hand

TURN = np.array([0, 0, 0, 1, 1, 1, 0, 0, 2, 2, 2, 2], dtype=np.int32)  # 5, 11 end a turn; 6, 7: the user
TOKENS, MASK = np.arange(20, 32), 63


def example_slots(anchors):
    length = rows_module.run_length(TURN, np.zeros(12, np.int32))
    return md.slots_of(TOKENS, np.arange(12), np.zeros(12, np.int64), np.array(anchors), length, len(anchors),
                       4, 128)


def what_the_drafter_gets(slots):
    """row_loss with a drafter that notes its input -> (token ids per block, positions per block, mask)."""
    seen = {}

    def drafter(hidden, embeds, context_pos, block_pos, masks):
        seen.update(ids=embeds[0, :, 0].long().view(-1, 4), pos=block_pos.view(-1, 4), mask=masks[FULL])
        return torch.zeros(1, embeds.shape[1], 8, requires_grad=True)
    drafter.config = SimpleNamespace(block_size=4, mask_token_id=MASK, layer_types=(FULL,),
                                     window=lambda layer: None)
    head = md.Head(torch.nn.Linear(8, 64))
    md.row_loss(drafter, lambda ids: ids[..., None].float(), head, torch.zeros(1, 12, 16), slots,
                flex_utils.dense_mask, md.LossSpec("decay", md.default_gamma(4), "checkpoint", 128))
    return seen["ids"].tolist(), seen["pos"].tolist(), seen["mask"]


def test_the_worked_example_of_anchors_slots_and_walk():
    """Twelve tokens, two answers, K 4: valid anchors, inputs, visibility, slots that count, weights, walk."""
    length = rows_module.run_length(TURN, np.zeros(12, np.int32))
    assert np.flatnonzero(length >= 1).tolist() == [3, 4, 8, 9, 10]
    slots = example_slots([3, 4, 8, 9, 10])
    assert slots.counted.tolist() == [2, 1, 3, 2, 1]
    ids, pos, mask = what_the_drafter_gets(slots)
    assert ids[1] == [24, MASK, MASK, MASK] and pos[1] == [4, 5, 6, 7]
    for block, anchor in enumerate([3, 4, 8, 9, 10]):
        own = [12 + 4 * block + k for k in range(4)]
        for row in mask[4 * block:4 * block + 4]:
            assert row.nonzero()[:, 0].tolist() == list(range(anchor)) + own
    counts = (torch.arange(4) >= 1) & (torch.arange(4) <= slots.counted[:, None])
    weights = md.slot_weights(torch.zeros(5, 4), counts, "decay", md.default_gamma(4))
    assert weights[3].tolist() == pytest.approx([0, 1, math.exp(-1 / 2), 0])
    assert weights[1].tolist() == [0, 1, 0, 0]
    produced = md.walk([1, 0, 1, 0], 4)  # matches at tokens 8, 9, 10, 11
    assert produced == [2, 1] and sum(produced) / len(produced) == 1.5


# ------------------------------------------------------------------------------------------- mask and loss


def looped_mask(starts, anchors, s, k, window):
    """The definition, pair by pair."""
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


@pytest.mark.parametrize("window", [None, 6])
def test_the_mask_equals_a_triple_loop(window):
    """Three packed conversations, full and sliding layers; the block-sparse form agrees tile by tile."""
    starts, anchors, s, k = [0, 0, 50, 50, 130, 130], [9, 10, 51, 129, 131, 149], 150, 10
    wanted = looped_mask(starts, anchors, s, k, window)
    args = torch.tensor(starts), torch.tensor(anchors), s, k, window
    assert torch.equal(flex_utils.dense_mask(*args), wanted)
    states = flex_utils.tile_states(*args)
    for i in range(states.shape[0]):
        for j in range(states.shape[1]):
            tile = wanted[i * 128:i * 128 + 128, j * 128:j * 128 + 128]
            assert states[i, j] == (0 if not tile.any() else 2 if states[i, j] == 2 and tile.all() else 1)


@pytest.mark.parametrize("form", ["checkpoint", "fused"])
def test_the_chunked_loss_equals_a_plain_one_in_fp64(form):
    """Cross-entropy and its gradient through a frozen head, by chunks, against log-softmax of the whole."""
    torch.manual_seed(0)
    head = md.Head(torch.nn.Linear(8, 31, bias=False, dtype=torch.float64).requires_grad_(False))
    hidden, labels = torch.randn(24, 8, dtype=torch.float64), torch.randint(0, 31, (24,))
    w = torch.rand(24, dtype=torch.float64)
    ours, plain = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    ce, right = md.chunked_ce(ours, head, labels, 8, form)
    wanted = -torch.log_softmax(plain @ head.linear.weight.T, -1)[range(24), labels]
    (ce * w).sum().backward()
    (wanted * w).sum().backward()
    assert torch.allclose(ce.double(), wanted, rtol=0, atol=1e-5)
    assert torch.allclose(ours.grad, plain.grad, rtol=0, atol=1e-6)
    assert torch.equal(right, (hidden @ head.linear.weight.T).argmax(-1) == labels)


# ----------------------------------------------------------------------------------------- the real main()

KEYS = set("""architectures model_type block_size dflash_config num_target_layers layer_types sliding_window
    use_sliding_window max_window_layers hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act rms_norm_eps attention_bias attention_dropout initializer_range
    max_position_embeddings tie_word_embeddings vocab_size dtype torch_dtype bos_token_id eos_token_id
    pad_token_id rope_theta rope_parameters rope_scaling""".split())
CHATS = dict(STEPS=20, ROWS_PER_STEP=4, DRAFT_LAYERS=5, LAYER_TYPES=[SLIDING] * 4 + [FULL], SLIDING_WINDOW=16,
             SAVE_EVERY=10, EVAL_EVERY=10, KEEP=3)


@pytest.fixture(scope="module")
def run_of_twenty():
    """20 steps on chats, two target and two drafter threads."""
    chats, held_out = message_file(), message_file("held_out", 6, seed=1)
    settings = dict(CHATS, DATA=chats, EVAL_DATA=held_out, **threads(2, 2))
    return train_ok(common.scratch() / "twenty", **settings), settings


def test_main_trains_with_two_target_and_two_drafter_threads(run_of_twenty):
    """Loss near ln V at first, then falling; evaluated at 0, 10, 20; nothing skipped."""
    out, _ = run_of_twenty
    assert [m["step"] for m in log_lines(out)] == list(range(1, 21))
    assert [m["step"] for m in eval_lines(out)] == [0, 10, 20]
    assert losses(out)[0] == pytest.approx(math.log(common.VOCAB), abs=0.1)
    assert np.mean(losses(out)[-3:]) < losses(out)[0] - 0.2
    assert eval_lines(out)[-1]["eval_loss"] < eval_lines(out)[0]["eval_loss"] - 0.2
    assert log_lines(out)[-1]["skipped"] == 0 and list(log_lines(out)[0]) == common.FIELDS


def drafter_tensors(layers):
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
             "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
             "input_layernorm", "post_attention_layernorm"]
    own = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    return own | {f"layers.{i}.{n}.weight" for i in range(layers) for n in names}


def test_the_checkpoint_holds_what_servers_read(run_of_twenty):
    """58 bf16 tensors for 5 layers, every key of config.json and none that harms."""
    out, _ = run_of_twenty
    state = common.published(out / "latest")
    assert state.keys() == drafter_tensors(5) and len(state) == 58
    assert all(t.dtype == torch.bfloat16 for t in state.values()) and state["fc.weight"].shape == (32, 64)
    config = common.config_of(out / "latest")
    assert config.keys() >= KEYS
    assert not config.keys() & {"causal", "is_causal", "partial_rotary_factor", "mrope_section"}
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [0, 2], "block_size": 4}
    assert config["block_size"] == 4
    assert config["layer_types"] == CHATS["LAYER_TYPES"] and config["sliding_window"] == 16
    assert config["num_target_layers"] == 4
    assert set(config["rope_parameters"]) == {"rope_type", "rope_theta"} and config["rope_theta"] == 10000.0
    assert (out / "latest").is_symlink() and (out / "latest").readlink() == Path("step_00000020")


def test_stop_at_ten_and_resume_give_the_same_bits(run_of_twenty):
    """Weights, moments, losses and learning rates of 20 steps in one go."""
    base, settings = run_of_twenty
    out = train_ok(common.scratch() / "resumed", **settings, STOP_AT=10)
    train_ok(out, **settings)
    assert_same(out / "latest", base / "latest")
    assert common.untimed(out) == common.untimed(base)


# ------------------------------------------------------------------------------------------------- on a GPU


def gpu_case():
    """A row of two packed conversations, 40 anchors and 8 padding blocks; weights large enough to matter."""
    torch.manual_seed(0)
    config = md.DrafterConfig(256, 512, 2, 4, 2, 128, 512, 16, 511, (0, 1), 4, (SLIDING, FULL), 100)
    s, n, rng = 384, 48, np.random.default_rng(0)
    lengths, turn, doc = [200, 150], np.zeros(s, np.int32), np.full(s, -1, np.int32)
    pos, start, used = np.zeros(s, np.int64), np.zeros(s, np.int64), 0
    for d, length in enumerate(lengths):
        place = slice(used, used + length)
        pos[place], start[place], doc[place], turn[used + 8:used + length] = np.arange(length), used, d, 1
        used += length
    run = rows_module.run_length(turn, doc)

    def slots(seed):
        anchors = np.sort(np.random.default_rng(seed).choice(np.flatnonzero(run >= 1), 40, replace=False))
        return md.slots_of(ids, pos, start, anchors, run, n, 16, 128).to("cuda")
    ids = rng.integers(0, 500, s)
    drafter = md.Drafter(config, None)
    drafter.init_weights(1)
    weights = {k: (v * 2.5 if v.dim() == 2 else v).bfloat16() for k, v in drafter.state_dict().items()}
    parts = dict(embed=torch.randn(512, 256).bfloat16(), head=(torch.randn(512, 256) * 0.05).bfloat16(),
                 hidden=torch.randn(1, s, 512).bfloat16())
    return config, weights, {k: v.cuda() for k, v in parts.items()}, slots


def gpu_drafter(case, dtype, attend, owner=None):
    config, weights, _, _ = case
    drafter = md.Drafter(config, attend)
    drafter.load_state_dict(weights)
    drafter = drafter.to("cuda", dtype)
    for layer in drafter.layers if owner else ():
        layer.forward = flex_utils.compiled(layer.forward, owner)
    return drafter


def gpu_row(case, drafter, make_mask, slots, owner=None):
    """-> (hidden states of the slots that count, loss, gradients by name) of one row, fp32 on the host."""
    _, _, parts, _ = case
    dtype, caught = next(drafter.parameters()).dtype, {}
    embed = torch.nn.Embedding.from_pretrained(parts["embed"].to(dtype))
    head = md.Head(torch.nn.Linear(256, 512, bias=False, device="cuda", dtype=dtype))
    head.linear.weight = torch.nn.Parameter(parts["head"].to(dtype), requires_grad=False)

    def catch(module, args, output):
        caught["hidden"] = output.detach()[0]
    handle = drafter.norm.register_forward_hook(catch)
    drafter.zero_grad(set_to_none=True)
    ce_and_grad = flex_utils.compiled(md.ce_and_grad, owner) if owner else md.ce_and_grad
    spec = md.LossSpec("decay", 7.0, "fused", 128, ce_and_grad)
    result = md.row_loss(drafter, embed, head, parts["hidden"].to(dtype), slots, make_mask, spec)
    result.loss.backward()
    handle.remove()
    counted = torch.unique(slots.index[slots.index > 0])
    gradients = {n: p.grad.float().cpu() for n, p in drafter.named_parameters()}
    return caught["hidden"][counted].float().cpu(), result.loss.item(), gradients


def gap(a, b):
    """Relative L2 distance of tensors, or of lists of them as one."""
    a, b = (torch.cat([t.flatten() for t in x]) if isinstance(x, list) else x.flatten() for x in (a, b))
    return float((a - b).norm() / b.norm())


def compiled_row(case, attend, gate, name):
    """Two rows through compiled flex_attention under the gate; the second must not compile anything."""
    drafter = gpu_drafter(case, torch.bfloat16, attend, name)
    with gate.first_step(), gate.work("train", name):
        first = gpu_row(case, drafter, flex_utils.block_mask, case[3](1), name)
    with gate.work("train", name) as alone:
        assert not alone
        gpu_row(case, drafter, flex_utils.block_mask, case[3](2), name)
    return first


@pytest.fixture(scope="module")
def gpu_rows():
    """The same row four ways: fp32 dense (the truth), bf16 dense, bf16 flex, bf16 flex with small tiles."""
    case, gate = gpu_case(), flex_utils.Gate(threading.Lock())
    flex_utils.worker_compile_settings(1)
    flex_utils.worker_memory_settings()
    rows = {}
    for name, dtype in (("truth", torch.float32), ("dense", torch.bfloat16)):
        drafter = gpu_drafter(case, dtype, flex_utils.attend_dense)
        rows[name] = gpu_row(case, drafter, flex_utils.dense_mask, case[3](1))
    allow = gate.forbid_compiles_outside()
    try:
        attend, make_mask = flex_utils.make_attention(torch.device("cuda", 0), True)
        assert make_mask is flex_utils.block_mask
        rows["flex"] = compiled_row(case, attend, gate, "flex")
        small = flex_utils.attend_flex(flex_utils.small_kernel_options())
        rows["small"] = compiled_row(case, small, gate, "small")
    finally:
        allow()
    return rows


@gpu
@pytest.mark.parametrize("kernel", ["flex", "small"])
def test_gpu_compiled_attention_agrees_with_dense_fp32(gpu_rows, kernel):
    """Hidden states, loss and every gradient: hardly further from fp32 dense than bf16 dense is."""
    hidden, loss, grads = gpu_rows[kernel]
    (hidden32, loss32, grads32), (hidden16, _, grads16) = gpu_rows["truth"], gpu_rows["dense"]
    assert gap(hidden, hidden32) < min(0.05, 2 * gap(hidden16, hidden32) + 0.002)
    assert abs(loss - loss32) < 0.01 * abs(loss32)
    assert gap(list(grads.values()), list(grads32.values())) < 0.05
    for name in grads32:
        assert grads32[name].norm() > 0
        assert gap(grads[name], grads32[name]) < 2 * gap(grads16[name], grads32[name]) + 0.02, name


@gpu
def test_gpu_small_tiles_give_the_same_numbers(gpu_rows):
    """kernel options for 99 KB of shared memory against the default tiles."""
    (hidden, loss, grads), (hidden_small, loss_small, grads_small) = gpu_rows["flex"], gpu_rows["small"]
    assert gap(hidden_small, hidden) < 0.01 and abs(loss_small - loss) < 0.005 * abs(loss)
    assert gap(list(grads_small.values()), list(grads.values())) < 0.02


@gpu
def test_gpu_target_as_a_graph_gives_the_same_features():
    """each shape's CUDA graph against transformers' own forward, other ids every time."""
    path = random_target(hidden=128, heads=2, kv_heads=1)
    decoder = target_files.load_model(str(path), "cuda:0", torch.bfloat16, 0).get_decoder()
    forward = TappedForward(decoder, (0, 2))
    with torch.no_grad():
        for shape in [(4, 64), (1, 256), (4, 64), (1, 256), (4, 64)]:
            ids = torch.randint(5, common.VOCAB, shape, device="cuda")
            assert gap(forward(ids).float(), forward.eager(ids).float()) < 0.01
    assert len(forward.graphs) == 2 and not forward.refused


@gpu
def test_gpu_main_trains_compiled_and_resumes(tmp_path):
    """2 + 2 threads on cuda:0 from empty compile caches, 20 steps; then 10, and 10 more."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
              "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    settings = dict(
        TARGET=random_target(hidden=128, heads=2, kv_heads=1), TARGET_DEVICES="cuda:0,cuda:0",
        DRAFTER_DEVICES="cuda:0,cuda:0", DATA=common.data_file("gpu", 60, 100, 250),
        EVAL_DATA=common.data_file("gpu_eval", 4, 100, 250, seed=1), SEQ_LEN=256, NUM_ANCHORS=32,
        BLOCK_SIZE=16, LAYER_TYPES=[SLIDING, FULL], SLIDING_WINDOW=64, STEPS=20, ROWS_PER_STEP=4,
        EVAL_EVERY=10,
        SAVE_EVERY=10, COMPILE=True, STALL_S=400)

    def go(name, **more):
        done = common.command(tmp_path / name, caches, **settings, **more)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return tmp_path / name
    base = go("base")
    assert any((tmp_path / "inductor").rglob("*")) and any((tmp_path / "triton").rglob("*"))
    assert [m["step"] for m in log_lines(base)] == list(range(1, 21))
    assert np.mean(losses(base)[-3:]) < losses(base)[0] - 0.2 and all(map(math.isfinite, losses(base)))
    go("halves", STOP_AT=10)
    out = go("halves")
    assert [m["step"] for m in log_lines(out)] == list(range(1, 21))
    assert [m["step"] for m in eval_lines(out)] == [0, 10, 20]
    assert np.allclose(losses(out), losses(base), rtol=0, atol=0.05)
    apart, moved = (common.distance(p, base / "latest") for p in (out / "latest", base / "step_00000010"))
    assert apart < 0.5 * moved, (apart, moved)  # atomics on a GPU: not the same bits


def main():
    """Says what is checked, then lets pytest do it."""
    there = torch.cuda.is_available()
    print("test_smoke.py on " + (torch.cuda.get_device_name() if there
                                 else "the CPU; the GPU's part is skipped"))
    for name, check in globals().items():
        if name.startswith("test_"):
            words = name.removeprefix("test_").removeprefix("gpu_").replace("_", " ")
            print(f"  {'GPU: ' if 'gpu' in name else ''}{words}. {' '.join(check.__doc__.split())}")
    return pytest.main([__file__, "-q", "-p", "no:cacheprovider", "--disable-warnings", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())

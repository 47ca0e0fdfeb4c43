"""What dev/bench.py measures with, and the trainer's own step on random rows.

    Meter       times, peaks, host waits and kernels of work(i) on a device
    Rig         a named drafter shape: frozen embedding and head, td.Item, td.Replica, all random
    Steps       td.Run fed from lists: its step(w, i) is td.train_step, its row(w, i) td.micro_step
    specforge_steps()   the same two for specforge 0.2.0
"""
import functools
import gc
import importlib.util
import math
import os
import re
import sys
import tempfile
import time
import types
import typing
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import model_drafter as md  # noqa: E402
import train_dflash as td  # noqa: E402
from dflash_trainer import checkpoints, settings  # noqa: E402
from dflash_trainer.devices import replica_of  # noqa: E402

CONVERSATIONS = (0.3, 0.22, 0.18, 0.14, 0.1, 0.06)  # shares of a packed row
PROMPT = 0.1                                        # share of a conversation that is not supervised
SHAPES = {  # sizes of the drafter; constants of the trainer
    "qwen3.6-27b": (dict(hidden_size=5120, intermediate_size=17408, num_layers=5, num_heads=32,
                         num_kv_heads=8, head_dim=128, vocab_size=248320, num_target_layers=64,
                         target_layer_ids=(1, 16, 31, 46, 61)),
                    dict(SEQ_LEN=4096, NUM_ANCHORS=512, BLOCK_SIZE=16, SLIDING_WINDOW=2048)),
    "tiny": (dict(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
                  head_dim=16, vocab_size=512, target_layer_ids=(1, 3), num_target_layers=6),
             dict(SEQ_LEN=256, NUM_ANCHORS=32, BLOCK_SIZE=8, SLIDING_WINDOW=32, LOSS_CHUNK=128)),
}
GROUPS = (("flex backward", "triton_tem.*backward"), ("flex forward", "triton_tem.*flex"),
          ("copy, fill", "(?i)memcpy|memset"), ("gemm", "gemm|nvjet|cutlass|xmma|cublas|triton_tem|splitK"),
          ("elementwise", "(?i)triton|elementwise|reduce|index|scatter|gather|sort|multi_tensor|Cat|scan"),
          ("other", ""))


def table(head, rows):
    def cell(x):
        return "-" if x is None else x if isinstance(x, str) else f"{x:.3g}" if abs(x) < 10 else f"{x:.1f}"
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in (head, ["---"] * len(head), *rows))


def free():
    """Replicas hang in reference cycles (a run and its saver): without this the next peak counts them."""
    gc.collect()
    torch.cuda.empty_cache()


class Meter:
    """Medians of `repeats` calls after `warm_up`; work(i) gets i = 0, 1, ...; events: the first device."""

    def __init__(self, devices, repeats=1, warm_up=0):
        self.devices, self.repeats, self.warm_up = devices, repeats, warm_up
        self.cuda = devices[0].type == "cuda"

    def wait(self):
        if self.cuda:
            for device in self.devices:
                torch.cuda.synchronize(device)

    def times(self, work):
        """-> (device ms, the host ahead; from an idle device: ms until work returns, ms until it is done)."""
        n = self.repeats if self.cuda else 0
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
        for i in range(self.warm_up):
            work(i)
        self.wait()
        for i, (begin, end) in enumerate(events):
            begin.record()
            work(i)
            end.record()
        returned, done = [], []
        for i in range(-(-self.repeats // 2) if self.cuda else self.repeats):
            self.wait()
            began = time.perf_counter()
            work(i)
            returned.append((time.perf_counter() - began) * 1e3)
            self.wait()
            done.append((time.perf_counter() - began) * 1e3)
        ahead = [a.elapsed_time(b) for a, b in events] or done
        return tuple(float(np.median(x)) for x in (ahead, returned, done))

    def once(self, work):
        """Seconds of one call."""
        self.wait()
        began = time.perf_counter()
        work(0)
        self.wait()
        return time.perf_counter() - began

    def peak_gib(self, work, not_counted):
        """Largest allocation during work(0), less so many bytes; None on a CPU."""
        if not self.cuda:
            return None
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.devices[0])
        work(0)
        self.wait()
        return (torch.cuda.max_memory_allocated(self.devices[0]) - not_counted) / 2**30

    def host_waits(self, work):
        """Source lines at which the host waited for the device in work(0), by torch's sync debug mode."""
        if not self.cuda:
            return []
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work(0)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sorted({f"{Path(w.filename).name}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)})

    def kernels(self, work, top=25):
        """What one work(1) runs: coarse split, span with idle time in it, longest kernels. -> text."""
        self.wait()
        with profile(activities=[ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU]) as p:
            work(1)
            self.wait()
        names, groups, ran = {}, {}, []
        for e in p.events():
            on_cpu = e.device_type == torch.autograd.DeviceType.CPU
            if on_cpu == self.cuda or getattr(e, "is_user_annotation", False):
                continue
            begin, end = e.time_range.start / 1e3, e.time_range.end / 1e3
            ran.append((begin, end))
            group = next(g for g, pattern in GROUPS if re.search(pattern, e.name))
            names.setdefault((group, e.name), []).append(end - begin)
            groups[group] = groups.get(group, 0.0) + end - begin
        split = ", ".join(f"{g} {t:.1f}" for g, t in sorted(groups.items(), key=lambda x: -x[1]))
        span = max(end for _, end in ran) - min(begin for begin, _ in ran)
        longest = sorted(names.items(), key=lambda x: -sum(x[1]))[:top]
        rows = [(sum(t), str(len(t)), g, n[:120].replace("|", "/")) for (g, n), t in longest]
        return (f"{len(ran)} kernels, {sum(groups.values()):.1f} ms of {span:.1f}: {split}\n"
                + table(["ms", "calls", "group", "kernel"], rows))


def make_item(c, device, seed, one):
    """Batch of a row of conversations, a prompt and an answer each; its `row` is the supervised mask."""
    rng, s = np.random.default_rng(seed), td.SEQ_LEN
    ends = np.cumsum([1.0] if one else rng.permutation(CONVERSATIONS)) * s
    start, run, supervised = np.zeros(s, np.int64), np.zeros(s, np.int64), np.zeros(s, bool)
    for a, b in zip([0, *ends.round().astype(int)], ends.round().astype(int)):
        answer = a + max(1, round(PROMPT * (b - a)))
        start[a:b], run[answer:b], supervised[answer:b] = a, np.arange(b - answer - 1, -1, -1), True
    valid = np.flatnonzero(run >= 1)
    anchors = np.sort(rng.choice(valid, min(td.NUM_ANCHORS, len(valid)), replace=False))
    blocks = md.block_arrays(start, run, anchors, td.NUM_ANCHORS, c.block_size, td.loss_chunk(c.n_drafts))
    arrays = (rng.integers(0, c.vocab_size, s), np.arange(s) - start, *blocks)
    tensors = [torch.from_numpy(array).to(device) for array in arrays]
    hidden = torch.randn(1, s, len(c.target_layer_ids) * c.hidden_size, dtype=td.compute_dtype(device),
                         device=device, generator=torch.Generator(device).manual_seed(seed))
    return md.Batch(hidden, *tensors, row=supervised)


class Rig:
    """A shape on a device. Sets the trainer's constants; `words` (NAME=VALUE) override them."""

    def __init__(self, shape, device, words):
        self.device, (self.sizes, constants) = device, SHAPES[shape]
        vars(td).update(constants, ROWS_PER_STEP=1, LR=1e-4)
        settings.override(td, words)
        c, like = self.config(), dict(device=device, dtype=td.compute_dtype(device))
        self.embed = torch.nn.Embedding(c.vocab_size, c.hidden_size, **like).requires_grad_(False)
        linear = torch.nn.Linear(c.hidden_size, c.vocab_size, bias=False, **like)
        self.head, self.kept = md.Head(linear).requires_grad_(False), {}
        self.embed.weight.normal_(0, 0.02)
        linear.weight.normal_(0, 0.5 / math.sqrt(c.hidden_size))  # logits of deviation 1/2: loss near ln V

    def config(self, layers="full"):
        n = self.sizes["num_layers"]
        kinds = ["full_attention" if layers == "full" else "sliding_attention"] * (n - 1) + ["full_attention"]
        return md.DrafterConfig(
            **self.sizes, block_size=td.BLOCK_SIZE, mask_token_id=self.sizes["vocab_size"] - 250,
            layer_types=tuple(kinds), sliding_window=td.SLIDING_WINDOW, rope_theta=1e7)

    def items(self, one=False, device=None):
        """Three input sets."""
        return [make_item(self.config(), device or self.device, seed, one) for seed in range(3)]

    def replica(self, layers="full", compiled="layers", index=0, device=None):
        """td.Replica; compiled "flex": flex_attention alone instead of whole layers."""
        c, device = self.config(layers), device or self.device
        with torch.device("meta"):
            shapes = {n: p.shape for n, p in md.Drafter(c, None).named_parameters()}
        weights = {n: torch.randn(s, device=device) * 0.02 if len(s) > 1 else torch.ones(s, device=device)
                   for n, s in shapes.items()}
        frozen = replica_of(self.embed, device), replica_of(self.head, device)
        w = td.Replica(index, c, device, *frozen, weights)
        if compiled == "flex" and device.type == "cuda":
            for layer in w.drafter.layers:
                del layer.forward
            w.drafter.attend = torch.compile(w.drafter.attend, dynamic=False)
        return w

    def kept_replica(self, *kind):
        """Variants that differ in the loss alone share one; another kind's is freed first."""
        if kind not in self.kept:
            self.kept.clear()
            free()
            self.kept[kind] = self.replica(*kind)
        return self.kept[kind]


@functools.cache
def cycles_per_ms():
    """Of torch.cuda._sleep, measured."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(10**8)
    end.record()
    end.synchronize()
    return 10**8 / begin.elapsed_time(end)


class Steps(td.Run):
    """The trainer's run with rows from lists instead of the targets' queues.

    direct: sum over replicas by NCCL; link_ms: what a slower link would add, the device sleeps as long.
    """

    def __init__(self, replicas, items, direct=False, link_ms=0.0):
        td.DRAFTER_DEVICES = [str(w.device) for w in replicas]
        super().__init__(Path("out/bench"))
        self.replicas, self.items, self.direct, self.link_ms = replicas, items, direct, link_ms
        self.last, self.horizon, self.bad_pairs = 10**6, 10**6, frozenset()

    def log(self, text):
        """The bench prints its own lines."""

    def average(self, step):
        super().average(step)
        for w in self.replicas if self.link_ms else ():
            with torch.cuda.device(w.device):
                torch.cuda._sleep(int(self.link_ms * cycles_per_ms()))

    def take(self, w, kind, indices):
        n = len(self.replicas)
        return [self.items[w.index][i // n % 3]._replace(index=i) for i in indices if i % n == w.index]

    def step(self, w, i):
        n = td.ROWS_PER_STEP
        td.train_step(self, w, td.Plan(i, False, range(i * n, (i + 1) * n)))

    def row(self, w, i):
        w.drafter.zero_grad(set_to_none=True)
        td.micro_step(self, w, self.items[w.index][i % 3])


def import_specforge():
    """Only the files of three classes: its packages' own __init__ import every algorithm, and servers."""
    root = importlib.util.find_spec("specforge").submodule_search_locations[0]
    for name in ("modeling", "modeling.draft", "algorithms", "algorithms.common"):
        sys.modules[f"specforge.{name}"] = package = types.ModuleType(f"specforge.{name}")
        package.__path__ = [os.path.join(root, *name.split("."))]
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.optimizer import BF16Optimizer
    return OnlineDFlashModel, DFlashDraftModel, BF16Optimizer


def specforge_steps(rig, items):
    """-> row(i), step(i) at its defaults: flex_attention, loss checkpointed 128 blocks at a time, AdamW on
    fp32 masters, clip 0.5. On a CPU sdpa, since flex_attention has no backward there."""
    from transformers import Qwen3Config
    (online, draft, adam), c, device = import_specforge(), rig.config(), rig.device
    config = Qwen3Config(**checkpoints.config_json(c))
    backend = "flex_attention" if device.type == "cuda" else "sdpa"
    config._attn_implementation = backend
    with device:
        model = online(draft(config), rig.head.linear, rig.embed, c.mask_token_id, c.block_size, backend,
                       td.NUM_ANCHORS)
    model = model.to(device, td.compute_dtype(device)).train()
    optimizer = adam(model.draft_model, lr=td.LR)
    masks = [torch.from_numpy(i.row).to(device).float()[None] for i in items]

    def row(i):
        model.draft_model.zero_grad(set_to_none=True)
        model(items[i % 3].slots[0].ids[None], items[i % 3].hidden, masks[i % 3])[0].backward()

    def step(i):
        row(i)
        optimizer.step()
    return row, step


def random_conversations(n):
    """What rows_module.RowStream reads: n conversations of 5 to 75 % of a row, the first quarter a prompt."""
    rng = np.random.default_rng(0)
    one = typing.NamedTuple("Given", [("ids", np.ndarray), ("turn", np.ndarray), ("source", str)])
    many = [one(rng.integers(0, 500, m), (np.arange(m) >= m // 4).astype(np.int32), "")
            for m in rng.integers(td.SEQ_LEN // 20, td.SEQ_LEN * 3 // 4, n)]
    stream = type("Conversations", (list,), {"lengths": np.array([len(c.ids) for c in many]),
                                             "stats": {"bad": 0}, "fingerprint": ""})
    return stream(many)


def loop_ms(rows, steps=200):
    """CPU ms a step of all 5 + 3 threads of the 8-GPU job when no device has anything to do: features and
    gradients are there, row_loss and AdamW cost nothing. The process's CPU time, so a busy machine doesn't
    count, on one core: one interpreter serves all threads, and cores that pass it around cost CPU, not time."""
    kept, features = dict(vars(td)), torch.zeros(1, td.SEQ_LEN, 8)
    try:
        with tempfile.TemporaryDirectory() as out:
            vars(td).update(
                TARGET_DEVICES=["cpu"] * 5, DRAFTER_DEVICES=["cpu"] * 3, ROWS_PER_STEP=rows, EVAL_EVERY=0,
                SAVE_EVERY=10**9, LOG_EVERY=10, STEPS=steps, target_features=lambda *a: features,
                md=types.SimpleNamespace(**{**vars(md), "row_loss": no_loss}))
            run = loop_run(Path(out), steps)
            cores = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {max(cores)})
            try:
                td.run_threads(run)
            finally:
                os.sched_setaffinity(0, cores)
            if run.error:
                raise RuntimeError(run.error)
            first = 2 * td.LOG_EVERY  # the first steps' imports left out
            return (run.cpu_at[steps] - run.cpu_at[first]) / (steps - first) * 1e3
    finally:
        vars(td).update(kept)


def no_loss(drafter, embed, head, hidden, slots, make_mask, spec):
    for p, grad in drafter.zeros:
        p.grad = grad
    loss = drafter.norm.weight[0] * 0.0
    zeros = torch.zeros(len(slots.anchor), drafter.config.block_size)
    return md.RowResult(loss, torch.ones(()), zeros, zeros[:, 0].long(), zeros > 0)


class TimedRun(td.Run):
    """Notes the process's CPU time at every log line: cpu_at, step -> seconds."""

    def __init__(self, out):
        self.cpu_at = {}
        super().__init__(out)

    def enter_thread(self, device):
        super().enter_thread(device)
        torch.set_num_threads(1)  # as where devices do the work

    def restart_window(self, step):
        super().restart_window(step)
        self.cpu_at[step] = time.process_time()


def loop_run(out, steps):
    """td.Run as td.build leaves it, without a target."""
    sizes, device = SHAPES["tiny"][0], torch.device("cpu")
    c = md.DrafterConfig(**sizes, block_size=td.BLOCK_SIZE, mask_token_id=511,
                         layer_types=("full_attention",) * sizes["num_layers"])
    drafter = md.Drafter(c, None)
    drafter.init_weights(0)
    run = TimedRun(out)
    run.train_rows = td.RowStream(random_conversations(2000), td.SEQ_LEN, td.NUM_ANCHORS, td.SEED)
    run.config, run.calls, run.bad_pairs, run.direct = c, [], frozenset(), False
    run.first, run.last, run.horizon = 0, steps, steps
    run.decoders = [types.SimpleNamespace(layers=[torch.nn.Identity() for _ in range(6)]) for _ in range(5)]
    run.replicas = [td.Replica(i, c, device, None, None, drafter.state_dict()) for i in range(3)]
    for w in run.replicas:
        w.adamw = lambda *args: None
        w.drafter.zeros = [(p, torch.zeros_like(p)) for p in w.params.values()]
    run.train_rows.row(0)  # the epoch is packed
    run.saver.start = lambda *args: None
    run.restart_window(0)
    return run

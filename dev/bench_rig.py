"""What dev/bench.py measures with, and the trainer's own step on random rows.

    Meter               times, peaks and host waits of work(i) on a device
    Rig                 a named drafter shape: frozen embedding and head, batches, replicas, all random
    Steps               the trainer's step fed from lists: step(replica, i), row(replica, i)
    longest_kernels()   of work(i), a table
    specforge_steps()   the same two for specforge 0.2.0
"""
import functools
import gc
import importlib.util
import math
import os
import sys
import time
import types
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

import flex_utils
import model_drafter as md
import train_dflash as td
from dflash_trainer import checkpoints
from dflash_trainer.devices import Stopwatch, replica_of, wait_for
from dflash_trainer.machines import SingleMachine
from dflash_trainer.start import Links, with_head
from dflash_trainer.workers import Workers

INPUT_SETS = 3                                      # used in turn: training never sees the same rows twice
CONVERSATIONS = (0.3, 0.22, 0.18, 0.14, 0.1, 0.06)  # shares of a packed row
PROMPT = 0.1                                        # share of a conversation that is not supervised


class Shape(NamedTuple):
    drafter: dict     # sizes of its config
    constants: dict   # of the trainer


SHAPES = {
    "qwen3.6-27b": Shape(
        dict(hidden_size=5120, intermediate_size=17408, num_layers=5, num_heads=32, num_kv_heads=8,
             head_dim=128, vocab_size=248320, num_target_layers=64, target_layer_ids=(1, 16, 31, 46, 61)),
        dict(SEQ_LEN=4096, NUM_ANCHORS=512, BLOCK_SIZE=16, SLIDING_WINDOW=2048)),
    "smollm2-135m": Shape(
        dict(hidden_size=576, intermediate_size=1536, num_layers=5, num_heads=9, num_kv_heads=3,
             head_dim=64, vocab_size=49152, num_target_layers=30, target_layer_ids=(1, 8, 14, 20, 27)),
        dict(SEQ_LEN=8192, NUM_ANCHORS=2048, BLOCK_SIZE=8, SLIDING_WINDOW=2048, LOSS_CHUNK=4096)),
    "tiny": Shape(
        dict(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
             vocab_size=512, num_target_layers=6, target_layer_ids=(1, 3)),
        dict(SEQ_LEN=256, NUM_ANCHORS=32, BLOCK_SIZE=8, SLIDING_WINDOW=32, LOSS_CHUNK=128)),
}


def free():
    """Replicas hang in reference cycles: without this the next peak counts them."""
    gc.collect()
    torch.cuda.empty_cache()


class Times(NamedTuple):
    ahead: float      # ms on the device, the host ahead of it as in training
    returned: float   # ms until work returns, the device idle before
    done: float       # ms until the device is done, idle before


class Meter:
    """Medians of `repeats` calls after `warm_up`; work(i) gets i = 0, 1, ...; events on the first device."""

    def __init__(self, devices, repeats=1, warm_up=0):
        self.devices = devices
        self.repeats = repeats
        self.warm_up = warm_up
        self.cuda = devices[0].type == "cuda"

    def wait(self):
        wait_for(self.devices)

    def times(self, work) -> Times:
        for i in range(self.warm_up):
            work(i)
        self.wait()
        events = []
        for i in range(self.repeats if self.cuda else 0):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work(i)
            end.record()
            events.append((begin, end))
        returned = []
        done = []
        for i in range(-(-self.repeats // 2) if self.cuda else self.repeats):
            self.wait()
            began = time.perf_counter()
            work(i)
            returned.append((time.perf_counter() - began) * 1e3)
            self.wait()
            done.append((time.perf_counter() - began) * 1e3)
        ahead = [begin.elapsed_time(end) for begin, end in events] or done
        return Times(*(float(np.median(x)) for x in (ahead, returned, done)))

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
        waits = [warning for warning in seen if "synchroniz" in str(warning.message)]
        return sorted({f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits})


def longest_kernels(device, work, n_kernels):
    """A table of the longest kernels of one work(0) on a GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        work(0)
        torch.cuda.synchronize(device)
    return profiled.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=n_kernels, max_name_column_width=90)


class Rig:
    """A shape on a device, by the trainer's constants. `row` of its batches masks the supervised tokens."""

    def __init__(self, sizes, device):
        self.sizes = sizes
        self.device = device
        c = self.config()
        like = dict(device=device, dtype=td.compute_dtype(device))
        self.embed = torch.nn.Embedding(c.vocab_size, c.hidden_size, **like).requires_grad_(False)
        linear = torch.nn.Linear(c.hidden_size, c.vocab_size, bias=False, **like)
        self.head = md.Head(linear).requires_grad_(False)
        self.embed.weight.normal_(0, 0.02)
        linear.weight.normal_(0, 0.5 / math.sqrt(c.hidden_size))  # logits of deviation 1/2: loss near ln V

    def config(self, layers="full"):
        n = self.sizes["num_layers"]
        first = "full_attention" if layers == "full" else "sliding_attention"
        config = md.DrafterConfig(
            **self.sizes, block_size=td.BLOCK_SIZE, mask_token_id=self.sizes["vocab_size"] - 250,
            layer_types=(first,) * (n - 1) + ("full_attention",), sliding_window=td.SLIDING_WINDOW,
            rope_theta=1e7)
        return with_head(td, config)

    def batches(self, one_conversation=False, device=None):
        return [self.batch(seed, one_conversation, device or self.device) for seed in range(INPUT_SETS)]

    def batch(self, seed, one_conversation, device):
        """A row of conversations, a prompt and an answer each."""
        c = self.config()
        rng = np.random.default_rng(seed)
        shares = [1.0] if one_conversation else rng.permutation(CONVERSATIONS)
        ends = (np.cumsum(shares) * td.SEQ_LEN).round().astype(int)
        start = np.zeros(td.SEQ_LEN, np.int64)
        run_length = np.zeros(td.SEQ_LEN, np.int64)
        supervised = np.zeros(td.SEQ_LEN, bool)
        for begin, end in zip([0, *ends[:-1]], ends):
            answer = begin + max(1, round(PROMPT * (end - begin)))
            start[begin:end] = begin
            run_length[answer:end] = np.arange(end - answer - 1, -1, -1)
            supervised[answer:end] = True
        valid = np.flatnonzero(run_length >= 1)
        anchors = np.sort(rng.choice(valid, min(td.NUM_ANCHORS, len(valid)), replace=False))
        ids = rng.integers(0, c.vocab_size, td.SEQ_LEN)
        row = types.SimpleNamespace(
            ids=ids, positions=np.arange(td.SEQ_LEN) - start, conversation_start=start, run_length=run_length)
        tensors = [tensor.to(device) for tensor in td.host_tensors(row, anchors, c)]
        n_states = len(c.target_layer_ids) + td.needs_last(c)
        target_hidden = torch.randn(
            1, td.SEQ_LEN, n_states * c.hidden_size, dtype=td.compute_dtype(device), device=device,
            generator=torch.Generator(device).manual_seed(seed))
        return md.Batch(target_hidden, *tensors, row=supervised)

    def replica(self, layers="full", index=0, device=None, rows_per_step=1):
        """-> (td.Replica, its td.Optimizer)"""
        device = device or self.device
        config = self.config(layers)
        with torch.device("meta"):
            shapes = {name: p.shape for name, p in md.Drafter(config, None).named_parameters()}
        weights = {}
        for name, shape in shapes.items():
            is_norm = len(shape) == 1
            weights[name] = torch.ones(shape) if is_norm else torch.randn(shape, device=device) * 0.02
        embed = replica_of(self.embed, device)
        head = replica_of(self.head, device)
        replica = td.Replica(index, config, device, embed, head, weights, precision=td.DRAFTER_PRECISION)
        return replica, td.Optimizer(replica, weights, rows_per_step)


@functools.cache
def cycles_per_ms():
    """Of torch.cuda._sleep, measured."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(10**8)
    end.record()
    end.synchronize()
    return 10**8 / begin.elapsed_time(end)


class SlowLink(SingleMachine):
    """What a slower link would add to the sum of gradients: every device sleeps as long."""

    def __init__(self, ms, devices):
        super().__init__()
        self.ms = ms
        self.devices = devices

    def sum(self, tensors):
        for device in self.devices if self.ms else ():
            with torch.cuda.device(device):
                torch.cuda._sleep(int(self.ms * cycles_per_ms()))


class FixedQueues:
    """Batches from lists, one per drafter, instead of the targets' queues."""

    def __init__(self, batches):
        self.batches = batches

    def take(self, job, device):
        of_drafter = self.batches[job.drafter]
        return of_drafter[job.index // len(self.batches) % INPUT_SETS]._replace(index=job.index)


class Steps:
    """The trainer's step with everything but the drafters' part left out.

    replicas: [(td.Replica, td.Optimizer)]. direct: gradients are summed by NCCL; link_ms: see SlowLink.
    """

    def __init__(self, replicas, batches, rows_per_step=1, direct=False, link_ms=0.0):
        self.rows_per_step = rows_per_step
        self.optimizers = [optimizer for _, optimizer in replicas]
        devices = [replica.device for replica, _ in replicas]
        unused = dict.fromkeys(("schedule", "saver", "target_batches"))
        silent = types.SimpleNamespace(
            clock=types.SimpleNamespace(elapsed=float), write=lambda *args, **options: None
        )
        self.run = td.Run(
            workers=Workers(len(replicas)), machines=SlowLink(link_ms, devices),
            gate=flex_utils.Gate(td.FIRST_STEP_LOCK), config=replicas[0][0].drafter.config,
            data=types.SimpleNamespace(horizon=10**6), queues=FixedQueues(batches), log=silent,
            links=Links(frozenset(), direct), decoders=[], replicas=[replica for replica, _ in replicas],
            optimizers=self.optimizers, reduce_watch=Stopwatch(devices[0]), start_clock=None, **unused)

    def step(self, replica, i):
        n_drafters = len(self.run.replicas)
        rows = range(i * self.rows_per_step, (i + 1) * self.rows_per_step)
        jobs = [td.Job("train", row, 0, row % n_drafters) for row in rows]
        td.train_step(self.run, replica, self.optimizers[replica.index], td.StepPlan(i, False, [], jobs))

    def row(self, replica, i):
        replica.drafter.zero_grad(set_to_none=True)
        batch = self.run.queues.batches[replica.index][i % INPUT_SETS]
        td.micro_step(self.run, replica, self.optimizers[replica.index], batch)


def import_specforge():
    """Only the files of three classes: its packages' own __init__ import every algorithm, and servers."""
    root = importlib.util.find_spec("specforge").submodule_search_locations[0]
    for name in ("modeling", "modeling.draft", "algorithms", "algorithms.common"):
        package = types.ModuleType(f"specforge.{name}")
        package.__path__ = [os.path.join(root, *name.split("."))]
        sys.modules[f"specforge.{name}"] = package
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.optimizer import BF16Optimizer
    return OnlineDFlashModel, DFlashDraftModel, BF16Optimizer


def specforge_steps(rig, batches):
    """-> row(i), step(i) at its defaults: flex_attention, loss checkpointed 128 blocks at a time, AdamW on
    fp32 masters, clip 0.5. On a CPU sdpa, since flex_attention has no backward there."""
    from transformers import Qwen3Config
    online_model, draft_model, bf16_optimizer = import_specforge()
    c = rig.config()
    config = Qwen3Config(**checkpoints.config_json(c))
    backend = "flex_attention" if rig.device.type == "cuda" else "sdpa"
    config._attn_implementation = backend
    with rig.device:
        model = online_model(draft_model(config), rig.head.linear, rig.embed, c.mask_token_id, c.block_size,
                             backend, td.NUM_ANCHORS)
    model = model.to(rig.device, td.compute_dtype(rig.device)).train()
    optimizer = bf16_optimizer(model.draft_model, lr=td.LR)
    masks = [torch.from_numpy(batch.row).to(rig.device).float()[None] for batch in batches]

    def row(i):
        model.draft_model.zero_grad(set_to_none=True)
        batch = batches[i % INPUT_SETS]
        loss = model(batch.ids[None], batch.target_hidden, masks[i % INPUT_SETS])[0]
        loss.backward()

    def step(i):
        row(i)
        optimizer.step()
    return row, step

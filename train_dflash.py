"""Train a DFlash block-diffusion drafter for a causal LM: one process, threads, plain PyTorch.

    bash run.sh                                   the job below on its GPUs, or the demo without them
    python train_dflash.py NAME=VALUE ...         train with constants overridden
    python train_dflash.py inspect|eval|generate  look at the data, measure a checkpoint, decode a prompt

The path of the data, in order, with the names of the functions:

    JSONL files  --load_data-------->  token ids and turns of conversations, memory-mapped
    target_worker, one per target      in the order of Schedule's jobs:
                 --Data.row--------->  a packed row and its anchors, a pure function of (SEED, epoch, index)
                 --target_features-->  frozen forward: hidden states of the tapped layers
                 --send_batch------->  a Batch in queue[target][drafter], bounded; row i goes to drafter
                                       i mod len(DRAFTER_DEVICES)
    drafter_worker, one per drafter    for each StepPlan:
                 --evaluate--------->  where due: tau on held-out text
                 --save_if_due------>  where due: a checkpoint that is servable as it is
                 --micro_step------->  mask, forward, loss, backward of one row, again and again
                 --sum_gradients---->  gradients and the loss denominator, over drafters and machines
                 --Optimizer.update->  clip, Adam on fp32 masters; a bad update is skipped on the device

Words: an ANCHOR is a token of an answer. Its BLOCK has K SLOTS: slot 0 holds the anchor, the others hold
mask tokens. A DRAFT is the token that a slot predicts, from the block and from the target's hidden states of
the tokens before the anchor, at some of its layers (the TAPS). A block has J = K-1 drafts (HEAD=dspark: K). A
ROW is SEQ_LEN packed context tokens with NUM_ANCHORS anchors. A MICRO-STEP is forward and backward of one row
on one drafter; a STEP is one optimiser step over ROWS_PER_STEP rows, whichever drafters had them. Under
torchrun each of several machines does this with its own ROWS_PER_STEP rows, and gradients are summed over
machines too.
Shapes: S = SEQ_LEN, N = NUM_ANCHORS, K = BLOCK_SIZE, J drafts, D hidden size, L tapped layers.

Beside this file: model_drafter.py (drafter, batch, loss, acceptance), flex_utils.py (mask, attention, what
keeps compilation safe under threads), dflash_trainer/ (the library: what prevents, reports or stores).
"""
import json
import math
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import flex_utils
import model_drafter as md
from dflash_trainer import checkpoints, decoding, fp8, settings, start, target
from dflash_trainer.compiled_target import CompiledParts
from dflash_trainer.devices import (
    HandOff,
    Stopwatch,
    compute_dtype,
    receive,
    replica_of,
    to_device,
    transfer,
    wait_for,
)
from dflash_trainer.errors import require, user_error_on
from dflash_trainer.features import TappedForward, choose_target_batches
from dflash_trainer.rows import EvalRows, Row, RowStream, inspect_data
from dflash_trainer.run_log import LogFiles, RowStats, RunLog, StepStats
from dflash_trainer.start_clock import StartClock, process_age
from dflash_trainer.target_config import drafter_config, end_tokens, load_config, load_tokenizer
from dflash_trainer.token_cache import Settings, build_conversations
from dflash_trainer.workers import Workers, start_thread

# ------------------------------------------------------------------ constants: they ARE the 8-GPU job
# Annotated UPPERCASE names are settings, NAME=VALUE on the command line; other names are not.
# target and devices
TARGET: str = "Qwen/Qwen3.6-27B"                      # causal LM: hub id, directory, random:DIR (no weights)
TARGET_DEVICES: list[str] = [f"cuda:{i}" for i in range(5)]      # one frozen replica and thread each
DRAFTER_DEVICES: list[str] = [f"cuda:{i}" for i in range(5, 8)]  # one drafter and thread each; may repeat
# data
DATA: str = "data/train.jsonl"                        # file, directory, glob or a,b of chat files
EVAL_DATA: str = "data/eval.jsonl"                    # held-out answers, the target's own and greedy
CHAT_TEMPLATE_KWARGS: dict = {}                       # of the chat template, e.g. {"enable_thinking": False}
MAX_BAD_SHARE: float = 0.01                           # malformed lines tolerated, from 1,000 lines on
SEQ_LEN: int = 4096                                   # S, tokens
NUM_ANCHORS: int = 512                                # N, at most, per row
# drafter
BLOCK_SIZE: int = 16                                  # K, slots: the anchor and K-1 masks
DRAFT_LAYERS: int = 5
LAYER_TYPES: list[str] | None = None                  # None: full; for Qwen3.5/3.6 sliding x (n-1) + full
SLIDING_WINDOW: int = 2048                            # W, tokens, of "sliding_attention" layers
TARGET_LAYER_IDS: list[int] | None = None             # tapped layers; None: 5 spread evenly
MASK_TOKEN_ID: int | None = None                      # None: the family's known id, else an unused one
INIT: str = "normal"                                  # "normal" | "target": from its first layers and norms
INIT_STD: float = 0.02                                # of fresh weights, normal
INIT_FROM: str | None = None                          # a drafter checkpoint to start from
# the drafter's head
HEAD: str = "dflash"                                  # "dflash": none | "dflash2" | "dspark"
IN_BLOCK: str | None = None                           # what a sliding layer's slots see of their block:
                                                      # "by_type", the slots before | "bidirectional", all;
                                                      # None: all for dflash2, else the slots before
CONV_TAPS: int = 2                                    # dflash2: slots that a convolution reads
CONV_GROUP: int = 16                                  # dflash2: channels that share a kernel
SELECTOR_RANK: int = 256                              # dflash2
SELECTOR_TOP_K: int = 16                              # dflash2: candidates per slot
SELECTOR_TERMS: dict = {"ce": 1.0}                    # dflash2: the selector's loss, "ce" and "tv"
SELECTOR_WARMUP: float = 0.0005                       # dflash2: share of the horizon without that loss
SELECTOR_RAMP: float = 0.0005                         # dflash2: share of the horizon in which it grows to 1
SELECTOR_DETACH: bool = False                         # dflash2: its gradient ends at the backbone
MARKOV_RANK: int = 256                                # dspark
CONFIDENCE: float = 1.0                               # dspark: coefficient of its loss; 0: no confidence head
# optimisation
OUT: str = "out/dflash"                               # checkpoints, logs
SEED: int = 0
EPOCHS: int = 6                                       # horizon of the schedule when STEPS is None
STEPS: int | None = None                              # horizon, optimiser steps
STOP_AT: int | None = None                            # end early at this step; the schedule keeps its horizon
ROWS_PER_STEP: int = 12                               # R, over the drafters of a machine
LR: float = 6e-4
WARMUP: float = 0.04                                  # share of the horizon, linear; cosine to 0 after it
CLIP: float = 1.0                                     # global gradient norm
LOSS: str = "dpace"                                   # weights of the slots: "dpace" | "decay", DFlash's own
GAMMA: float | None = None                            # decay; None: 7, 5, 4 for J = 15, 9, 7, else (J+1)/2
LOSS_TERMS: dict | None = None                        # "ce" on the target's token; on its distribution "tv",
                                                      # "kl", "nla", "lk"; None: ce; dspark: .1 ce + 1.8 tv
LOSS_FORM: str = "fused"                              # "fused": gradient in forward | "checkpoint"
LOSS_CHUNK: int = 768                                 # slots whose logits are in memory at once; best n * 128
# running
TARGET_PRECISION: str = "bf16"                        # "bf16" | "fp8": its layers; half the memory
DRAFTER_PRECISION: str = "bf16"                       # "bf16" | "fp8_head" | "fp8": layers too | "fp8_wgrad":
                                                      # and their weights' gradients; masters stay fp32
COMPILE: bool = True                                  # False: dense attention, nothing compiled (CUDA only)
SMALL_KERNELS: bool | None = None                     # small attention tiles; None: what the device holds
QUEUE_DEPTH: int = 2                                  # rows waiting per (target, drafter)
LOG_EVERY: int = 10                                   # steps
EVAL_EVERY: int = 500                                 # steps; 0: never
SAVE_EVERY: int = 500                                 # steps
KEEP: int = 2                                         # newest checkpoints kept, beside the best
RESUME: str = "auto"                                  # "auto" | "no" | a checkpoint directory
STALL_S: int = 900                                    # seconds without a move: print all stacks, end
K_BAD: int = 10                                       # non-finite steps in a row that end the run; counted
                                                      # when it logs or saves: no host sync in between
# eval and generate
CKPT: str = ""                                        # checkpoint directory
PROMPT: str = "Why is the sky blue?"
MAX_NEW_TOKENS: int = 256
TEMPERATURE: float = 0.0

DEMO = dict(  # `bash run.sh demo`: SmolLM2-135M-Instruct's own answers to questions about Python, 2 CPU cores
    TARGET_DEVICES=["cpu", "cpu"], DRAFTER_DEVICES=["cpu", "cpu"], DATA="data/demo_train.jsonl",
    EVAL_DATA="data/demo_eval.jsonl", OUT="out/demo", SEQ_LEN=320, NUM_ANCHORS=32, BLOCK_SIZE=4,
    DRAFT_LAYERS=1, TARGET_LAYER_IDS=[7], INIT="target", STEPS=360, ROWS_PER_STEP=2, LR=3e-3, WARMUP=0.1,
    LOG_EVERY=20, EVAL_EVERY=180, SAVE_EVERY=60, MAX_NEW_TOKENS=64)  # results/demo_search.md: why these

THIS_MODULE = sys.modules[__name__]
AS_WRITTEN = settings.values(THIS_MODULE)  # before the command line changes any
# Held by every worker thread around its whole first step (pytorch#136196): a target's first row, a drafter's
# first micro-step. Other work that is new to a thread (evaluation, update) runs alone in the gate.
FIRST_STEP_LOCK = threading.Lock()

# ------------------------------------------------------------------------------------------ the data


def read_conversations(name, spec, tokenizer, vocab_size, out=None, tick=lambda: None):
    """The files of DATA or EVAL_DATA (`name`) -> Conversations, from the token cache after the first time."""
    ends = end_tokens(TARGET, tokenizer)
    reader = Settings(tokenizer, SEQ_LEN, CHAT_TEMPLATE_KWARGS, vocab_size, ends)
    return build_conversations(spec, reader, MAX_BAD_SHARE, name, out, tick)


class Data(NamedTuple):
    train: RowStream
    held_out: EvalRows | None  # None where EVAL_EVERY is 0
    horizon: int               # optimiser steps of the whole schedule

    def row(self, kind, index) -> tuple[Row, np.ndarray]:
        """A training ("train") or held-out ("eval") row and its anchors, on the host."""
        return (self.train if kind == "train" else self.held_out).row(index)


def load_data(tokenizer, vocab_size, out, tick, n_machines) -> Data:
    """Rows to train on and rows to evaluate on, before any GPU work."""
    conversations = read_conversations("DATA", DATA, tokenizer, vocab_size, out, tick)
    train = RowStream(conversations, SEQ_LEN, NUM_ANCHORS, SEED)
    held_out = None
    if EVAL_EVERY:
        held_out_conversations = read_conversations("EVAL_DATA", EVAL_DATA, tokenizer, vocab_size, out, tick)
        held_out = EvalRows(held_out_conversations, SEQ_LEN)
        start.warn_of_overlap(settings.snapshot(THIS_MODULE), conversations, held_out_conversations)
    if STEPS:
        return Data(train, held_out, STEPS)
    n_rows = train.total(EPOCHS)  # packs them all
    horizon = n_rows // (ROWS_PER_STEP * n_machines)
    on_all = f" on each of {n_machines} machines" if n_machines > 1 else ""
    require(horizon, f"DATA = {DATA}: {n_rows} rows in EPOCHS = {EPOCHS}, fewer than one step takes with "
            f"ROWS_PER_STEP = {ROWS_PER_STEP}{on_all}: lower it or SEQ_LEN = {SEQ_LEN}, or set STEPS")
    return Data(train, held_out, horizon)


# ------------------------------------------------------------------------------------- the order of work


class Job(NamedTuple):
    """One row on its way: which target makes its features, which drafter trains on it or evaluates it."""
    kind: str     # "train" | "eval"
    index: int    # row number in the stream of training rows, or held-out row
    target: int
    drafter: int


class StepPlan(NamedTuple):
    step: int               # updates done before it
    evaluate: bool          # held-out rows first
    eval_jobs: list[Job]
    train_jobs: list[Job]   # this machine's rows of the step; none at the very end


class Schedule:
    """The order of work, the same in every thread: a pure function of the arguments and the settings."""

    def __init__(self, start_step, end_step, last_eval_step, n_held_out, rank=0, n_machines=1):
        """last_eval_step: the evaluation that a resumed run need not repeat; n_held_out: held-out rows."""
        self.start = start_step
        self.end = end_step
        self.last_eval_step = last_eval_step
        self.rank = rank
        self.n_machines = n_machines
        self.rows_per_step = ROWS_PER_STEP * n_machines
        # neighbours, so that every drafter has some: they are dealt by row number
        self.eval_rows = range(n_held_out * rank // n_machines, n_held_out * (rank + 1) // n_machines)

    def plans(self) -> Iterator[StepPlan]:
        """Each step's plan, then a last one without training rows. Jobs are dealt to the targets in turn."""
        n_jobs = 0
        for step in range(self.start, self.end + 1):
            due = EVAL_EVERY > 0 and (step == self.end or step % EVAL_EVERY == 0)
            evaluate = due and step != self.last_eval_step
            first_row = step * self.rows_per_step + self.rank * ROWS_PER_STEP
            eval_rows = self.eval_rows if evaluate else range(0)
            train_rows = range(first_row, first_row + ROWS_PER_STEP) if step < self.end else range(0)
            eval_jobs = self.jobs("eval", eval_rows, n_jobs)
            train_jobs = self.jobs("train", train_rows, n_jobs + len(eval_jobs))
            n_jobs += len(eval_jobs) + len(train_jobs)
            yield StepPlan(step, evaluate, eval_jobs, train_jobs)

    def jobs(self, kind, rows, first_job) -> list[Job]:
        n_targets = len(TARGET_DEVICES)
        n_drafters = len(DRAFTER_DEVICES)
        return [Job(kind, row, job % n_targets, row % n_drafters) for job, row in enumerate(rows, first_job)]

    def jobs_of_target(self, t) -> Iterator[Job]:
        for plan in self.plans():
            for job in (*plan.eval_jobs, *plan.train_jobs):
                if job.target == t:
                    yield job


class Queues:
    """One bounded queue per (target, drafter): batches are taken in the schedule's order, whoever is fast."""

    def __init__(self, workers):
        self.workers = workers
        self.queues = [[queue.Queue(QUEUE_DEPTH) for _ in DRAFTER_DEVICES] for _ in TARGET_DEVICES]
        # training rows alone: evaluation is no part of a step's time
        self.target_watches = [Stopwatch(torch.device(device)) for device in TARGET_DEVICES]
        self.drafter_watches = [Stopwatch(torch.device(device)) for device in DRAFTER_DEVICES]

    def put(self, job, batch):
        """Wait for room. No lock is held here."""
        place = self.queues[job.target][job.drafter]
        with self.target_watches[job.target] if job.kind == "train" else nullcontext():
            self.workers.wait_for(lambda: place.put(batch, timeout=0.5), queue.Full)

    def take(self, job, device) -> md.Batch:
        """The job's batch, once its target has made it. No lock is held here."""
        place = self.queues[job.target][job.drafter]
        with self.drafter_watches[job.drafter] if job.kind == "train" else nullcontext():
            batch = self.workers.wait_for(lambda: place.get(timeout=0.5), queue.Empty)
            receive(batch.tensors(), batch.ready, device)
        found = (batch.kind, batch.index)
        assert found == (job.kind, job.index), f"expected {job.kind} row {job.index}, got {found}"
        return batch

    def n_waiting(self) -> int:
        return sum(place.qsize() for row in self.queues for place in row)

    def describe(self) -> str:
        fills = [[place.qsize() for place in row] for row in self.queues]
        return f"queues [target][drafter] {fills}"


class Run(NamedTuple):
    """What the worker threads share; build() makes it whole before any of them starts."""
    workers: Workers
    machines: object             # SingleMachine or Cluster
    gate: flex_utils.Gate
    config: md.DrafterConfig
    data: Data
    schedule: Schedule
    queues: Queues
    log: RunLog
    saver: checkpoints.Saver
    links: start.Links           # between this machine's devices
    target_batches: object       # features.TargetBatches: the fixed (batch, length) shapes of a target
    decoders: list               # one frozen target per target thread, without the layers that nobody reads
    replicas: list               # one Replica per drafter thread
    optimizers: list             # and its Optimizer
    reduce_watch: Stopwatch      # sum of gradients, waiting for the others included
    start_clock: StartClock

    def describe(self) -> str:
        """For the watchdog."""
        missing = self.machines.missing_ranks()
        silent = f"; machines not heard of {missing}" if self.machines.size > 1 else ""
        return f"{self.queues.describe()}; {self.gate.holder()}{silent}"


def enter_thread(device):
    """First thing in every worker: device, intra-op threads, compile settings (they are the thread's own)."""
    n_threads = (os.cpu_count() or 1) // (len(TARGET_DEVICES) + len(DRAFTER_DEVICES))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        n_threads = 1  # the host makes small tensors only: more threads would wait for each other
    torch.set_num_threads(max(1, n_threads))
    flex_utils.worker_compile_settings(len(set(TARGET_DEVICES + DRAFTER_DEVICES)))
    flex_utils.worker_memory_settings()


# ------------------------------------------------------------------------------------------ the target


def compiles_on(device):
    return COMPILE and torch.device(device).type == "cuda"


def load_target(device, tick=lambda: None):
    return target.load_model(TARGET, device, compute_dtype(device), SEED, tick, TARGET_PRECISION)


def choose_batches(decoder, rows, *held_out):
    """Choose the (batch, length) shapes for the target: cheapest for the training rows, long enough for the
    held-out ones."""
    longest = max(int(each.conversations.lengths.max()) for each in (rows, *held_out) if each)
    overhead = target.overhead_in_tokens(decoder)
    return choose_target_batches(rows.conversations.lengths, longest, SEQ_LEN, overhead)


def target_features(forward, row, batches, gate, device):
    """Hidden states of the tapped layers for one packed row -> (1, S, L*D) on `device`, zeros where padded;
    (1, S, (L+1)*D) where the loss reads the target's last hidden state (needs_last, below).

    Conversations run as batch rows padded on the RIGHT to a few fixed shapes: left padding would enter the
    state of linear layers, and one packed sequence is silently wrong without special kernels.
    """
    starts = np.concatenate([[0], np.cumsum(row.lengths)])
    target_hidden = None
    for batch, length, members in batches.split(row.lengths):
        in_row = np.concatenate([np.arange(starts[m], starts[m + 1]) for m in members])
        in_batch = np.concatenate([i * length + np.arange(row.lengths[m]) for i, m in enumerate(members)])
        ids = np.zeros(batch * length, dtype=np.int64)
        ids[in_batch] = row.ids[in_row]
        ids, in_row, in_batch = (to_device(torch.from_numpy(a), device) for a in (ids, in_row, in_batch))
        with gate.work("target", str(device), batch, length):
            hidden = forward(ids.view(batch, length))  # (batch, length, L*D)
        if target_hidden is None:
            target_hidden = hidden.new_zeros(len(row.ids), hidden.shape[-1])
        target_hidden[in_row] = hidden.flatten(0, 1)[in_batch]
    return target_hidden[None]


def target_worker(run, t):
    """Target thread t: run every n_targets-th job, from job t on, and queue each batch for its drafter."""
    device = torch.device(TARGET_DEVICES[t])
    enter_thread(device)
    parts = None
    if compiles_on(device):
        parts = CompiledParts(run.decoders[t], f"target-{t}", run.log.write)
    forward = TappedForward(run.decoders[t], run.config.target_layer_ids, run.log.write, parts,
                            needs_last(run.config))
    hand_off = HandOff(device, run.links.bad_pairs)
    copies_done = deque()  # events of copies that may still be running, oldest first
    for job in run.schedule.jobs_of_target(t):
        run.workers.check()
        row, anchors = run.data.row(job.kind, job.index)
        with torch.no_grad(), run.gate.first_step():  # FIRST_STEP_LOCK: this thread's whole first row
            target_hidden = target_features(forward, row, run.target_batches, run.gate, device)
        drafter_device = run.replicas[job.drafter].device
        batch = send_batch(job, row, anchors, target_hidden, run.config, hand_off, drafter_device)
        run.workers.tick()
        run.queues.put(job, batch)
        copies_done.append(batch.ready)
        if len(copies_done) > QUEUE_DEPTH:  # bound the copies in flight: each holds S x L*D features
            oldest = copies_done.popleft()
            if oldest:
                oldest.synchronize()


# ---------------------------------------------------------------------------------------------- the hand-off


def host_tensors(row, anchors, config):
    """A row and its anchors -> the tensors of a Batch but target_hidden, on the host."""
    blocks = md.block_arrays(
        row.conversation_start, row.run_length, anchors, NUM_ANCHORS, config.block_size,
        loss_chunk(config.n_drafts), config.first_slot, whole_blocks=config.head == "dspark")
    return [torch.from_numpy(array) for array in (row.ids, row.positions, *blocks)]


def send_batch(job, row, anchors, target_hidden, config, hand_off, device) -> md.Batch:
    """Start the copy of a row to its drafter's device. That device waits for it, the drafter's host never."""
    moved, rest, ready = hand_off.send(target_hidden, host_tensors(row, anchors, config), device)
    return md.Batch(moved, *rest, kind=job.kind, index=job.index, row=row, ready=ready)


# -------------------------------------------------------------------------------------- the drafter's thread


def drafter_worker(run, d):
    """Drafter thread d: evaluate, save and train as each step's plan says. Decisions for all threads are made
    at a barrier."""
    replica = run.replicas[d]
    optimizer = run.optimizers[d]
    leads = d == 0
    enter_thread(replica.device)
    for plan in run.schedule.plans():
        is_new_best = False
        if plan.evaluate and not run.workers.ending:
            is_new_best = evaluate(run, replica, plan)
        if leads:
            save_if_due(run, optimizer, plan, is_new_best)
        if run.workers.ending or not plan.train_jobs:
            return
        train_step(run, replica, optimizer, plan)
        if leads and plan.step == run.schedule.start:
            run.log.write_start(run.start_clock, run.gate.seconds_alone)
        if leads:
            lr = learning_rate(plan.step, run.data.horizon)
            run.log.log_if_due(optimizer, plan.step + 1, lr, run.queues, run.reduce_watch, run.workers.ending)


def save_if_due(run, optimizer, plan, is_new_best):
    """Every SAVE_EVERY steps, at the end, whenever tau is the best so far; not at the first step."""
    saver = run.saver
    at_start = plan.step == run.schedule.start
    at_end = run.workers.ending or not plan.train_jobs
    if is_new_best and at_start and run.machines.rank == 0:  # a resumed run's: it is on the disk already
        checkpoints.point_best(saver.out, plan.step)
    if at_start or not (is_new_best or at_end or plan.step % SAVE_EVERY == 0):
        return
    run.log.read_statistics(optimizer, plan.step)
    if run.machines.rank:
        return  # machine 0 writes for all; the others follow what it would write, to decide alike
    info = {
        "step": plan.step,
        "horizon": run.data.horizon,
        "data": run.data.train.conversations.fingerprint,
        **asdict(run.log.progress),
        "constants": start.saved_constants(settings.snapshot(THIS_MODULE), run.machines.size),
    }
    saver.start(plan.step, optimizer.state, info, run.log.progress, is_new_best)
    run.workers.tick()


def train_step(run, replica, optimizer, plan):
    """One optimiser step on one drafter: its rows, the sum over drafters and machines, the update."""
    optimizer.row_stats.zero_()
    replica.selector_ramp.fill_(selector_ramp(plan.step, run.data.horizon))
    for job in plan.train_jobs:
        if job.drafter == replica.index:
            batch = run.queues.take(job, replica.device)
            micro_step(run, replica, optimizer, batch)
            wait_for_first_steps(run, replica)
    with run.reduce_watch if replica.index == 0 else nullcontext():
        run.workers.at_barrier(replica.index == 0, lambda: sum_gradients(run))
    optimizer.update(learning_rate(plan.step, run.data.horizon), plan.step, run.gate)


def micro_step(run, replica, optimizer, batch):
    """Mask, forward, loss and backward of one row, inside the gate and, the first time, under the lock."""
    with run.gate.first_step(), run.gate.work("train", *replica.signature(batch)):
        result = replica.row_loss(batch)
        result.loss.backward()
    loss = result.loss.detach()
    valid = batch.counted[0] > 0
    zero = torch.zeros_like(loss)
    stats = RowStats(loss=loss, weight=result.weight, matches=(result.matches * valid).sum().float(),
                     anchors=valid.sum().float(), bad=(~torch.isfinite(loss)).float(),
                     tv=zero if result.tv is None else result.tv, kl=zero if result.kl is None else result.kl)
    optimizer.row_stats[batch.index % len(optimizer.row_stats)] = torch.stack(stats)
    run.workers.tick()


def wait_for_first_steps(run, replica):
    """After the first micro-step. Drafters only: a target here would leave the others' queues empty."""
    if replica.started:
        return
    run.workers.start_barrier.wait()
    replica.started = True
    if replica.index == 0:
        seconds = run.log.clock.elapsed()
        run.log.write(f"first rows of all {len(run.replicas)} drafters after {seconds:.1f} s: targets, "
                      "compilation and the first evaluation included",
                      screen=f"first rows of all {len(run.replicas)} drafters after {seconds:.1f} s")


def learning_rate(step, horizon):
    """Linear warm-up over WARMUP of the horizon, then cosine to 0. step counts from 0."""
    warm = max(1, round(WARMUP * horizon))
    if step < warm:
        return LR * (step + 1) / warm
    return LR * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, horizon - warm)))


def selector_ramp(step, horizon):
    """Share of the selector's loss: 0, then growing over SELECTOR_RAMP of the horizon to 1."""
    silent = round(SELECTOR_WARMUP * horizon)
    growing = max(1, round(SELECTOR_RAMP * horizon))
    return min(1.0, max(0.0, (step - silent + 1) / growing))


# ----------------------------------------------------------------------------------------- the drafter


def loss_chunk(n_drafts):
    """LOSS_CHUNK, or less where a whole row has fewer slots."""
    return min(LOSS_CHUNK, -(-NUM_ANCHORS * n_drafts // 128) * 128)


def loss_spec(config):
    """The loss of the settings for a drafter's head, which for a checkpoint need not be HEAD."""
    default_terms = {"ce": 0.1, "tv": 1.8} if config.head == "dspark" else {"ce": 1.0}
    return md.LossSpec(
        kind=LOSS,
        gamma=GAMMA or md.default_gamma(config.n_drafts),
        form=LOSS_FORM,
        chunk=loss_chunk(config.n_drafts),
        terms=md.LossTerms(**{"ce": 0.0, **(LOSS_TERMS or default_terms)}),
        selector_terms=md.LossTerms(**{"ce": 0.0, **SELECTOR_TERMS}),
        selector_detach=SELECTOR_DETACH,
        confidence=CONFIDENCE if config.confidence else 0.0)


def needs_last(config):
    """Does the loss read the target's last hidden state, to make its distribution from?"""
    return loss_spec(config).needs_last(config.head)


class Replica:
    """One drafter in the compute dtype, with the target's embedding and head. One thread uses it."""

    def __init__(self, index, config, device, embed, head, weights, compile=None, precision="bf16"):
        """weights: by published name, any dtype. compile: None for what COMPILE and the device say.
        precision: of its products, see DRAFTER_PRECISION."""
        self.index = index
        self.device = device
        self.embed = embed
        self.head = head
        self.compiles = compiles_on(device) if compile is None else compile
        self.started = False   # its first micro-step is behind it
        self.eval_sums = None  # of the evaluation under way
        attend, self.make_mask = flex_utils.make_attention(device, self.compiles, SMALL_KERNELS)
        with torch.device("meta"):
            drafter = md.Drafter(config, attend)
        self.drafter = drafter.to_empty(device=device).to(compute_dtype(device)).train()
        self.params = dict(self.drafter.named_parameters())
        self.set_weights(weights)

        cross_entropy = md.CrossEntropy
        if precision != "bf16":
            setting = f"DRAFTER_PRECISION = {precision}"
            form = fp8.find_form(device, setting)
            self.head = fp8.Fp8Head(head, form, setting, self.compile_for_thread)
            cross_entropy = fp8.CrossEntropy
            if precision != "fp8_head":
                for layer in self.drafter.layers:  # what a head adds stays bf16: small, or no product at all
                    for part in (layer.self_attn, layer.mlp):
                        fp8.train_in_fp8(part, form, setting, precision == "fp8_wgrad")
        self.loss_spec = loss_spec(config)._replace(
            cross_entropy=cross_entropy(self.compile_for_thread),
            terms_and_grad=self.compile_for_thread(md.terms_and_grad),
            biased_terms_and_grad=self.compile_for_thread(md.biased_terms_and_grad),
            likeliest=self.compile_for_thread(md.likeliest),
            candidate_terms=self.compile_for_thread(md.candidate_terms))
        self.selector_ramp = torch.ones((), device=device)  # share of the selector's loss
        if self.compiles:
            for module in (*self.drafter.layers, self.drafter.hidden_norm, self.drafter.norm):
                module.forward = self.compile_for_thread(module.forward)  # layers of a type share a graph

    def compile_for_thread(self, function):
        """Compiled for this replica's thread alone, where anything is."""
        return flex_utils.compiled(function, self.index) if self.compiles else function

    @torch.no_grad()
    def set_weights(self, weights):
        for name, param in self.params.items():
            param.copy_(weights[name])

    def row_loss(self, batch, group=0) -> md.RowResult:
        ramp = self.selector_ramp if torch.is_grad_enabled() else 1.0
        return md.row_loss(
            self.drafter, self.embed, self.head, batch, group, self.make_mask, self.loss_spec, ramp)

    def signature(self, batch):
        """What makes a new graph, for the gate."""
        return str(self.device), tuple(batch.target_hidden.shape), batch.target_hidden.dtype


# ------------------------------------------------------------------------------------- one optimiser step

MOMENTS = "exp_avg", "exp_avg_sq"  # AdamW's
BETAS = 0.9, 0.999
EPS = 1e-8


def adamw(masters, weights, grads, first, second, lr, count, scale, skip):
    """Adam (arXiv 1412.6980; AdamW without weight decay is the same), in place; lists of a layer's tensors.

    lr, count (updates, this one included), scale (gradients are divided by it), skip (bool): 0-dim tensors,
    so that nothing waits for the device. Compiled it is one pass over 28 bytes a weight; torch's fused AdamW
    needs 44 with the copies from and to the compute dtype.
    """
    bias1 = 1 - BETAS[0] ** count
    bias2 = (1 - BETAS[1] ** count).sqrt()
    for p, w, g, m, v in zip(masters, weights, grads, first, second, strict=True):
        g = g.float() / scale
        new_m = torch.lerp(m, g, 1 - BETAS[0])
        new_v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        new_p = p - lr / bias1 * new_m / (new_v.sqrt() / bias2 + EPS)
        for old, new in ((p, new_p), (m, new_m), (v, new_v)):
            old.copy_(torch.where(skip, old, new))
        w.copy_(p)


def loss_denominator(row_stats):
    """(rows, columns of RowStats) of a step -> what its sum of w*loss is divided by: the weights' sum; for
    D-PACE, whose weights are numbers of tokens, the valid blocks. The log's losses are divided by the
    weights' sum either way."""
    column = "anchors" if LOSS == "dpace" else "weight"
    return row_stats[:, RowStats._fields.index(column)].sum()


class Optimizer:
    """AdamW on fp32 masters of one replica's weights, and statistics of the latest steps, on its device."""

    def __init__(self, replica, masters, n_rows):
        """masters: fp32 weights by published name. n_rows: rows of a step, over all machines."""
        device = replica.device
        self.device = device
        self.names = list(replica.params)
        self.params = replica.params
        self.weights = {name: param.detach() for name, param in self.params.items()}
        self.masters = {name: masters[name].to(device, torch.float32, copy=True) for name in self.names}
        self.moments = {k: {name: torch.zeros_like(m) for name, m in self.masters.items()} for k in MOMENTS}
        self.count = torch.zeros((), device=device)  # updates that were not skipped
        self.adamw = replica.compile_for_thread(adamw)
        self.layers = {}  # number, or "" -> names of its weights: one compiled update each
        for name in self.names:
            layer = name.split(".")[1] if name.startswith("layers.") else ""
            self.layers.setdefault(layer, []).append(name)

        def table(*shape):
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.row_stats = table(n_rows, len(RowStats._fields))  # of the present step
        self.row_ring = table(LOG_EVERY, n_rows, len(RowStats._fields))
        self.step_ring = table(LOG_EVERY, len(StepStats._fields))

    @torch.no_grad()
    def update(self, lr, step, gate):
        """Clip, AdamW, weights back to the compute dtype, without a host sync. The gradients are those of the
        step's sum of w*loss: their division by the denominator and the clip are one scale."""
        norms = torch._foreach_norm([param.grad for param in self.params.values()], 2, dtype=torch.float32)
        norms = torch.stack(norms)
        raw_norm = torch.linalg.vector_norm(norms)
        denominator = loss_denominator(self.row_stats).float()
        loss_sum = self.row_stats[:, RowStats._fields.index("loss")].sum()
        bad = ~(torch.isfinite(raw_norm) & torch.isfinite(loss_sum))
        skip = bad | (denominator == 0)
        norm = raw_norm / denominator.clamp(min=1e-30)
        scale = denominator * (norm / CLIP).clamp(min=1.0)
        self.count += ~skip
        lr = torch.full((), lr, device=self.device)
        for names in self.layers.values():
            self.update_layer(names, lr, scale, skip, gate)

        first_bad = (~torch.isfinite(norms)).float().argmax()
        stats = StepStats(norm, skip, bad, first_bad, denominator)
        self.row_ring[step % LOG_EVERY] = self.row_stats
        self.step_ring[step % LOG_EVERY] = torch.stack([value.float() for value in stats])

    def update_layer(self, names, lr, scale, skip, gate):
        masters = [self.masters[name] for name in names]
        weights = [self.weights[name] for name in names]
        first, second = ([self.moments[k][name] for name in names] for k in MOMENTS)
        grads = [self.params[name].grad for name in names]
        with gate.work("update", str(self.device), *(grad.shape for grad in grads)):
            self.adamw(masters, weights, grads, first, second, lr, self.count, scale, skip)
        for name in names:
            self.params[name].grad = None

    def tensors(self):
        """fp32 masters and moments, in one flat dict (names as in the published file)."""
        tables = {"master": self.masters, **self.moments}
        flat = {f"{kind}.{name}": tensor for kind, table in tables.items() for name, tensor in table.items()}
        flat["adam_step"] = self.count
        return flat

    def state(self):
        """The same, copied to the host."""
        return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in self.tensors().items()}

    @torch.no_grad()
    def load_state(self, state):
        for kind, table in {"master": self.masters, **self.moments}.items():
            for name, tensor in table.items():
                tensor.copy_(state[f"{kind}.{name}"])
        self.count.copy_(state["adam_step"])
        for name, weight in self.weights.items():
            weight.copy_(self.masters[name])


def sum_gradients(run):
    """At the barrier, by the first drafter: gradients and row statistics summed over drafters and machines,
    and the decision to end, one for all."""
    lists = []
    for replica, optimizer in zip(run.replicas, run.optimizers, strict=True):
        for param in replica.params.values():
            if param.grad is None:  # no usable anchor in any of its rows
                param.grad = torch.zeros_like(param)
        grads = [param.grad for param in replica.params.values()]
        lists.append([*grads, optimizer.row_stats])
    # on the hosts: no device is waited for, and NCCL starts nothing that a dead machine would hang
    run.workers.end_if_signalled(run.machines)
    sum_over_replicas(lists, run.links.direct, run.machines, run.links.bad_pairs)


def sum_over_replicas(lists, direct, machines, bad_pairs=frozenset()):
    """Sum tensor lists (one per drafter, in order) into every one of them: the same bits on every replica.

    direct: distinct CUDA devices, summed in place by NCCL from this one thread.
    machines: what they sum is added before it goes back to this machine's replicas.
    """
    for tensors in zip(*lists, strict=True):
        if direct:
            torch.cuda.nccl.all_reduce(tensors)
        else:
            for other in tensors[1:]:
                tensors[0].add_(transfer(other, tensors[0].device, bad_pairs))
    machines.sum(lists[0])
    for tensors in zip(*lists, strict=True):
        if not direct:
            for other in tensors[1:]:
                other.copy_(transfer(tensors[0], other.device, bad_pairs))
        elif machines.size > 1:
            torch.cuda.nccl.broadcast(tensors)


# ------------------------------------------------------------------------------------------ evaluation


class EvalSums:
    """Sums over held-out rows, one drafter's share; added up over drafters and machines on the host."""

    def __init__(self, config):
        self.config = config
        self.loss = 0.0
        self.weight = 0.0
        self.correct = np.zeros(config.n_drafts)  # by draft 1..J
        self.counts = np.zeros(config.n_drafts)
        self.passes = {}     # source -> tokens produced by each pass of the head's decoding
        self.answer_taus = []  # of each answer: mean tokens a pass
        self.other_taus = {}  # "tau_backbone", "tau_oracle" -> tokens produced by each pass
        self.others = {}     # other sums by name

    def add(self, other):
        self.loss += other.loss
        self.weight += other.weight
        self.correct += other.correct
        self.counts += other.counts
        self.answer_taus.extend(other.answer_taus)
        for ours, theirs in ((self.passes, other.passes), (self.other_taus, other.other_taus)):
            for name, produced in theirs.items():
                ours.setdefault(name, []).extend(produced)
        for name, value in other.others.items():
            self.add_sum(name, value)

    def add_sum(self, name, value):
        self.others[name] = self.others.get(name, 0.0) + float(value)

    def add_row(self, row, anchors, results):
        """results: RowResult of each group of the row's valid anchors."""
        first_slot = self.config.first_slot
        draft = np.arange(1, self.config.n_drafts + 1)
        self.counts += (draft <= row.run_length[anchors, None]).sum(0)
        self.correct += sum(result.correct[:, first_slot:].sum(0).cpu().numpy() for result in results)
        self.loss += sum(result.loss.item() for result in results)
        self.weight += sum(result.weight.item() for result in results)

        def leading(grids):  # drafts accepted at each anchor
            runs = [grid[:, first_slot:].cumprod(1).sum(1) for grid in grids]
            return torch.cat(runs)[:len(anchors)].cpu().numpy()

        for source, produced in walks(row, anchors, leading([result.correct for result in results])):
            self.passes.setdefault(source, []).extend(produced)
            self.answer_taus.append(sum(produced) / len(produced))
        for name, field in (("tau_backbone", "backbone_correct"), ("tau_oracle", "covered")):
            grids = [getattr(result, field) for result in results]
            if grids[0] is not None:
                for _, produced in walks(row, anchors, leading(grids)):
                    self.other_taus.setdefault(name, []).extend(produced)
        for name in ("tv", "kl", "covered", "confidence_error", "expected_len"):
            tensors = [getattr(result, name) for result in results]
            if tensors[0] is not None:
                if name == "expected_len":  # without the blocks that fill up the last group
                    tensors = [torch.cat(tensors)[:len(anchors)]]
                self.add_sum(name, sum(tensor.sum().item() for tensor in tensors))
        self.add_sum("anchors", len(anchors))

    def metrics(self):
        """tau is the mean over all passes of the head's own decoding, tau_answers the mean over answers of
        each one's mean: servers report either. acc_k: share of the counting drafts 1..J that are right."""
        every = [tokens for produced in self.passes.values() for tokens in produced]
        shares = self.correct / np.maximum(self.counts, 1)
        metrics = {
            "eval_loss": self.loss / max(self.weight, 1e-9),
            "tau": float(np.mean(every)) if every else 1.0,
            "acc_k": [round(float(share), 4) for share in shares],
            # fsum: the same number whatever the order in which drafters' answers are added up
            "tau_answers": math.fsum(self.answer_taus) / len(self.answer_taus) if self.answer_taus else 1.0,
        }
        if len(self.passes) > 1:
            metrics["tau_by_source"] = {
                source or "none": float(np.mean(produced))
                for source, produced in sorted(self.passes.items()) if produced}
        for name, produced in self.other_taus.items():
            metrics[name] = float(np.mean(produced)) if produced else 1.0
        n_slots = max(1, self.counts.sum())
        divisors = {"tv": self.weight, "kl": self.weight, "covered": n_slots, "confidence_error": n_slots,
                    "expected_len": max(1, self.others.get("anchors", 0))}
        names = {"covered": "recall", "confidence_error": "conf_mae"}
        for name, divisor in divisors.items():
            if name in self.others:
                metrics[names.get(name, name)] = self.others[name] / max(divisor, 1e-9)
        return metrics


def walks(row, anchors, matches):
    """(source, tokens produced by each pass) of each answer of a row. matches: accepted at each anchor."""
    at_place = np.zeros(len(row.run_length), dtype=np.int64)
    at_place[anchors] = matches
    goes_on = row.run_length[anchors - 1] == row.run_length[anchors] + 1
    for first in anchors[(anchors == 0) | ~goes_on]:  # the first token of each answer
        n_tokens = int(row.run_length[first]) + 1
        yield row.sources[row.conversation[first]], md.walk(at_place[first:first + n_tokens], n_tokens)


@torch.no_grad()
def evaluate_row(replica, batch, sums, gate):
    """All valid anchors of a held-out row at the training shape, then each answer's walk on the host."""
    with gate.work("eval", *replica.signature(batch)):
        results = [replica.row_loss(batch, group) for group in range(len(batch.anchors))]
    anchors = np.flatnonzero(batch.row.run_length >= 1)
    sums.add_row(batch.row, anchors, results)


def evaluate(run, replica, plan):
    """This drafter's held-out rows; the leader adds up and logs. Returns whether it is the best so far
    (leader only)."""
    leads = replica.index == 0
    replica.eval_sums = EvalSums(run.config)
    is_first = plan.step == run.schedule.start
    with run.log.evaluating(len(plan.eval_jobs), is_first) if leads else nullcontext():
        for job in plan.eval_jobs:
            if job.drafter != replica.index:
                continue
            batch = run.queues.take(job, replica.device)
            if run.workers.signal is not None:  # the resumed run evaluates this step again
                break
            evaluate_row(replica, batch, replica.eval_sums, run.gate)
            run.log.count_evaluated_row()
            run.workers.tick()
        return run.workers.at_barrier(leads, lambda: merge_evaluation(run, plan.step))


def merge_evaluation(run, step):
    run.workers.end_if_signalled(run.machines)
    if run.workers.ending:  # some drafters may have left their rows
        return False
    total = EvalSums(run.config)
    for machine in run.machines.gather([replica.eval_sums for replica in run.replicas]):
        for sums in machine:
            total.add(sums)
    return run.log.log_evaluation(step, total.metrics())


# -------------------------------------------------------------------------------------------- start-up


class Models(NamedTuple):
    config: md.DrafterConfig
    target_batches: object
    decoders: list
    replicas: list
    optimizers: list


def load_models(config, data, state, tokenizer, links, n_machines, workers, clock) -> Models:
    """The target and its replicas, then the drafters. In the main thread, before any worker thread exists:
    concurrent from_pretrained calls leave meta tensors and a wrong default dtype behind in silence.

    The target is read once. Its copies leave its own GPU one after the other, over the one link that limits
    them, and without the host, which makes the drafters meanwhile: threads would have nothing to shorten.
    """
    target_devices = [torch.device(name) for name in TARGET_DEVICES]
    drafter_devices = [torch.device(name) for name in DRAFTER_DEVICES]
    with workers.slow(), clock.part("loading the target"):  # it may have to be downloaded
        model = load_target(target_devices[0], workers.tick)
    embed = model.get_input_embeddings()
    head = target.make_head(model)
    decoder = model.get_decoder()
    masters = checkpoints.master_weights(state)
    if INIT == "target" and INIT_FROM is None and "adam_step" not in state:
        masters = start.masters_from_target(config, masters, decoder)
    config = replace(config, input_embedding_scale=target.embedding_scale(embed))
    start.check_target_of_head(config, head.scale)
    target.report_kernels(decoder)
    # the first forward imports the kernels of quantised layers
    with user_error_on(f"TARGET = {TARGET}: can't run", ImportError), clock.part("proof"):
        target.verify_target(TARGET, model, config, data.train.conversations, tokenizer)

    both = torch.nn.ModuleList([embed, head])  # one copy where they are tied
    with clock.part("copies to devices"):
        for_drafters = {d: replica_of(both, d, links.bad_pairs) for d in set(drafter_devices)}
    if not needs_last(config):
        decoder.layers = decoder.layers[:config.target_layer_ids[-1] + 1]  # the rest feeds nothing
    del model, head, both  # the head and the last layers leave the target's GPU here
    with clock.part("the target's batch shapes"):
        batches = choose_batches(decoder, data.train, data.held_out)
    decoders = [decoder]
    with clock.part("copies to devices"):
        for device in target_devices[1:]:
            decoders.append(replica_of(decoder, device, links.bad_pairs))

    replicas = []
    optimizers = []
    resumed = "adam_step" in state
    for index, device in enumerate(drafter_devices):
        its_state = state
        its_masters = masters
        if index > 0 and (drafter_devices[0], device) not in links.bad_pairs:
            its_state = optimizers[0].tensors()  # the same numbers: GPUs copy faster than the host
            its_masters = checkpoints.master_weights(its_state)
        with clock.part("drafters"):
            replica = Replica(index, config, device, *for_drafters[device], its_masters,
                              precision=DRAFTER_PRECISION)
            optimizer = Optimizer(replica, its_masters, ROWS_PER_STEP * n_machines)
            if resumed:
                optimizer.load_state(its_state)
        replicas.append(replica)
        optimizers.append(optimizer)
    with clock.part("copies to devices"):
        wait_for(target_devices + drafter_devices)
    return Models(config, batches, decoders, replicas, optimizers)


def build(workers, machines, out, clock) -> Run:
    """Everything before the threads, in stages: data, where to start, target and drafters."""
    frozen = settings.snapshot(THIS_MODULE)
    files = LogFiles(out)
    layer_types = LAYER_TYPES
    if HEAD == "dspark":  # servers run all its layers so
        layer_types = ["full_attention"] * DRAFT_LAYERS
    with clock.part("configuration"):  # imports transformers, and the target's kernels
        target_config = load_config(TARGET)
        tokenizer = load_tokenizer(TARGET)
        config = drafter_config(
            TARGET, target_config, tokenizer, BLOCK_SIZE, DRAFT_LAYERS, layer_types, SLIDING_WINDOW,
            TARGET_LAYER_IDS, MASK_TOKEN_ID, INIT_STD)
        config = start.with_head(frozen, config)
        start.preflight(frozen, config, out, machines.rank)

    vocab_size = target_config.get_text_config().vocab_size
    with clock.part("data"):
        data = load_data(tokenizer, vocab_size, out, workers.tick, machines.size)
    end_step = min(data.horizon, STOP_AT or data.horizon)
    workers.tick()
    start.check_machines(frozen, machines, config, data, end_step)

    with workers.slow(), clock.part("weights to begin with"):
        begin, state = machines.broadcast_from_rank0(
            lambda: start.find_start(frozen, config, data, out, machines.size, files))
    n_held_out = len(data.held_out.rows) if data.held_out else 0
    schedule = Schedule(begin.step, end_step, begin.progress.last_eval_step, n_held_out, machines.rank,
                        machines.size)

    with clock.part("checking devices"):
        links = start.check_devices([torch.device(name) for name in TARGET_DEVICES],
                                    [torch.device(name) for name in DRAFTER_DEVICES])
    models = load_models(config, data, state, tokenizer, links, machines.size, workers, clock)
    workers.tick()

    def tokens_of_steps(first, last):
        rows = range(first * schedule.rows_per_step, last * schedule.rows_per_step)
        lengths = data.train.conversations.lengths
        return sum(int(lengths[data.train.locate(row)[1]].sum()) for row in rows)

    n_bad_lines = data.train.conversations.stats["bad"]
    return Run(
        workers=workers,
        machines=machines,
        gate=flex_utils.Gate(FIRST_STEP_LOCK),
        config=models.config,
        data=data,
        schedule=schedule,
        queues=Queues(workers),
        log=RunLog(frozen, files, begin.progress, schedule, tokens_of_steps, n_bad_lines),
        saver=checkpoints.Saver(workers, files, out, models.config, KEEP),
        links=links,
        target_batches=models.target_batches,
        decoders=models.decoders,
        replicas=models.replicas,
        optimizers=models.optimizers,
        reduce_watch=Stopwatch(torch.device(DRAFTER_DEVICES[0])),
        start_clock=clock,
    )


# ------------------------------------------------------------------------------------------------ main


def train(clear=False):
    """The whole job -> exit code. clear: what an earlier run left in OUT goes."""
    start.require_devices("TARGET_DEVICES", TARGET_DEVICES)
    start.require_devices("DRAFTER_DEVICES", DRAFTER_DEVICES)
    clock = StartClock(process_age())
    machines = start.join_machines(STALL_S)
    workers = Workers(len(DRAFTER_DEVICES))
    run = None
    with start.output_folder(Path(OUT), machines.rank, clear) as out:
        with ExitStack() as stack:
            stack.enter_context(workers.watched(STALL_S, lambda: run.describe() if run else "starting"))
            run = build(workers, machines, out, clock)
            stack.enter_context(run.log.files.tensorboard())
            describe(run)
            stack.callback(run.gate.forbid_compiles_outside())
            stack.enter_context(workers.signals())
            first, last = run.schedule.start, run.schedule.end
            stack.enter_context(run.log.files.progress_bar(first, last, shown=sys.stderr.isatty()))
            run.log.clock.restart(first)
            run_threads(run)
        code = finish(run)
    machines.shutdown(failed=workers.error is not None)
    return code


def describe(run):
    n_trainable = sum(master.numel() for master in run.optimizers[0].masters.values())
    start.describe_run(settings.snapshot(THIS_MODULE), run.config, run.data, run.schedule, run.machines,
                       n_trainable, run.saver.out, run.log.files)


def run_threads(run):
    """Start all workers, wait for the drafters, end the rest. Leaves no thread behind."""
    workers = run.workers
    threads = []
    for t in range(len(TARGET_DEVICES)):
        threads.append(start_thread(f"target-{t}", workers.run_guarded, target_worker, run, t))
    drafters = []
    for d in range(len(DRAFTER_DEVICES)):
        drafters.append(start_thread(f"drafter-{d}", workers.run_guarded, drafter_worker, run, d))
    for thread in drafters:
        while thread.is_alive() and not workers.stop.is_set():
            thread.join(0.2)  # short, so that this thread sees signals
    run.saver.wait()
    workers.stop.set()
    for thread in (*threads, *drafters):
        thread.join(10)
        if thread.is_alive():
            run.log.write(f"thread {thread.name} does not end; leaving without it")
            code = finish(run)  # says what ended the run
            sys.stdout.flush()
            os._exit(code or settings.EXIT_ERROR)


def finish(run):
    """The last line -> exit code."""
    workers = run.workers
    best = run.log.progress.best
    code = 0
    text = f"done: {Path(OUT) / 'latest'}"
    if best and (run.saver.out / "best").exists():  # not that of another folder's run
        text += f"; best tau {best['tau']:.3f} at step {best['step']}"
    if workers.error:
        code = settings.EXIT_ERROR
        text = f"ERROR in {workers.error}"
    elif run.saver.failed:
        code = settings.EXIT_ERROR
        text = f"ERROR: the last save failed: {run.saver.failed}"
    elif error := run.log.files.lines.append("metrics.jsonl"):
        code = settings.EXIT_ERROR
        text = f"ERROR: the last lines of metrics.jsonl could not be written: {error}"
    elif workers.signal:
        code = 128 + workers.signal
        text = f"ended by signal {workers.signal}; `latest` is the last complete step"
    run.log.write(text)
    return code


def demo():
    """The job with the constants of DEMO; its own folder is cleared first. -> exit code."""
    return train(clear=DEMO["OUT"] == OUT)


def open_checkpoint():
    """CKPT and its target on TARGET_DEVICES[0], for `eval` and `generate`. -> (model, tokenizer, Replica)."""
    require(CKPT, "CKPT is empty: name a checkpoint directory")
    start.require_devices("TARGET_DEVICES", TARGET_DEVICES[:1])
    config, weights = start.load_drafter("CKPT", CKPT)
    load_config(TARGET)  # report a missing TARGET before its missing tokenizer
    tokenizer = load_tokenizer(TARGET)
    model = load_target(TARGET_DEVICES[0])
    here = (model.config.get_text_config().hidden_size, len(model.get_decoder().layers))
    there = (config.hidden_size, config.num_target_layers)
    require(here == there,
            f"CKPT = {CKPT} is for hidden size and layers {there}, TARGET = {TARGET} has {here}")
    replica = Replica(0, config, model.device, model.get_input_embeddings(), target.make_head(model), weights,
                      compile=False)
    replica.drafter.eval()
    return model, tokenizer, replica


def evaluate_checkpoint():
    """`eval CKPT=...`: tau, held-out loss and acceptance by slot on EVAL_DATA. -> exit code."""
    model, tokenizer, replica = open_checkpoint()
    config = replica.drafter.config
    require(config.output_multiplier == 1,
            f"CKPT = {CKPT}: eval can't apply its output_multiplier of {config.output_multiplier}; generate "
            "can")
    rows = EvalRows(read_conversations("EVAL_DATA", EVAL_DATA, tokenizer, config.vocab_size), SEQ_LEN)
    batches = choose_batches(model.get_decoder(), rows)
    forward = TappedForward(model.get_decoder(), config.target_layer_ids, with_last=needs_last(config))
    gate = flex_utils.Gate(FIRST_STEP_LOCK)
    sums = EvalSums(config)
    for i in tqdm(range(len(rows.rows)), unit="row", disable=not sys.stderr.isatty()):
        row, anchors = rows.row(i)
        with torch.no_grad():
            target_hidden = target_features(forward, row, batches, gate, model.device)
        tensors = [tensor.to(replica.device) for tensor in host_tensors(row, anchors, config)]
        batch = md.Batch(target_hidden, *tensors, kind="eval", index=i, row=row)
        evaluate_row(replica, batch, sums, gate)
    print(json.dumps(sums.metrics()))
    return 0


def generate():
    """`generate CKPT=... PROMPT=...`: one prompt, plain greedy beside speculative. -> exit code."""
    require(PROMPT.strip(), "PROMPT is empty: give the user's words")
    model, tokenizer, replica = open_checkpoint()
    ids = decoding.prompt_ids(TARGET, tokenizer, PROMPT, model.device, CHAT_TEMPLATE_KWARGS)
    stop = decoding.prepare_decoding(model, tokenizer)
    plain, answer, produced, seconds = decoding.decode_both_ways(
        model, replica, ids, stop, MAX_NEW_TOKENS, TEMPERATURE, SEED)
    plain_rate = len(plain) / seconds[0]
    rate = len(answer) / seconds[1]
    tokens_per_pass = sum(produced) / max(1, len(produced))
    equal = f"not compared, TEMPERATURE = {TEMPERATURE}"
    if TEMPERATURE == 0:
        equal = torch.equal(plain, answer) or decoding.explain_mismatch(model, ids, plain, answer)
    print(f"prompt: {PROMPT}")
    print(f"plain greedy ({plain_rate:.1f} tokens/s): {tokenizer.decode(plain)}")
    print(f"speculative ({rate:.1f} tokens/s, {tokens_per_pass:.2f} tokens a pass): "
          f"{tokenizer.decode(answer)}")
    print(f"equal: {equal}")
    return 0


def inspect(*words):
    """`inspect DATA=... [N]`: what the reader makes of the files, and N conversations. -> exit code."""
    require(len(words) <= 1 and all(word.isdecimal() for word in words),
            f"inspect {' '.join(words)}: beside NAME=VALUE it takes one number, of conversations to show")
    vocab_size = load_config(TARGET).get_text_config().vocab_size
    tokenizer = load_tokenizer(TARGET)
    conversations = read_conversations("DATA", DATA, tokenizer, vocab_size)
    inspect_data(conversations, tokenizer, SEQ_LEN, int(words[0] if words else 3))
    return 0


def devices():
    """`devices`: exit 0 when the devices of the constants exist, 3 (and why) when they don't."""
    present = start.device_names()
    missing = [device for device in TARGET_DEVICES + DRAFTER_DEVICES if device not in present]
    if missing:
        print(f"TARGET_DEVICES and DRAFTER_DEVICES name {missing[0]}{' and others' if missing[1:] else ''}; "
              f"this machine has {', '.join(present)}")
    return 3 if missing else 0


def train_if_possible():
    """`if-possible`: `train` where the devices of the constants exist, else exit code 3, and why. One process
    instead of `devices` and then `train`: importing costs seconds, on some hosts fifteen."""
    return devices() or train()


MODES = {"train": train, "demo": demo, "eval": evaluate_checkpoint, "generate": generate, "inspect": inspect,
         "devices": devices, "if-possible": train_if_possible}


def main(argv):
    """[mode] NAME=VALUE ... -> exit code."""
    mode = "train"
    if argv and "=" not in argv[0]:
        mode, *argv = argv
    if {"-h", "--help"} & {mode, *argv}:
        print(__doc__)
        return 0

    def run_mode():
        settings.require_one_of("mode", mode, MODES)
        if mode == "demo":
            for name, value in DEMO.items():
                settings.require_one_of("a name in DEMO", name, settings.declared(THIS_MODULE))
                setattr(THIS_MODULE, name, value)
        words = [word for word in argv if mode == "inspect" and "=" not in word]
        # not announced: the log has every setting, the screen is for what a run does
        settings.override(THIS_MODULE, [word for word in argv if word not in words], announce=None)
        start.check_settings(THIS_MODULE)
        start.quiet_bars()
        return MODES[mode](*words)

    return settings.user_errors_as_lines(run_mode)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

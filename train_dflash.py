"""Train a DFlash block-diffusion drafter for a causal LM: one process, threads, plain PyTorch.

    bash run.sh                                   the job below on its GPUs, or the demo without them
    python train_dflash.py NAME=VALUE ...         train with constants overridden
    python train_dflash.py inspect|eval|generate  look at the data, measure a checkpoint, decode a prompt

The data path, in order (names of functions):

    JSONL files  --build_conversations-->  token ids + turns, memory-mapped
                 --pack / make_row------>  rows of SEQ_LEN tokens, a pure function of (SEED, epoch, index)
    target_worker   x len(TARGET_DEVICES)  target_features: frozen forward, hidden states of the tapped layers
                 --HandOff.send--------->  queue[target][drafter], bounded; row i -> drafter i mod D
    drafter_worker  x len(DRAFTER_DEVICES) micro_step: mask, forward, loss, backward of one row
                 --average-------------->  sum of gradients over drafters and of the loss denominator
                 --Replica.update------->  clip, AdamW on fp32 masters; a bad update is skipped on the device
                 --evaluate / save------>  tau on held-out text; checkpoints that are servable as they are

Words: an ANCHOR is a token of an answer whose BLOCK, itself and K-1 masks (SLOTS), the drafter fills in from
the target's hidden states (at the TAPS, some of its layers) of the tokens before it; a ROW is SEQ_LEN packed
context tokens with NUM_ANCHORS anchors; a MICRO-STEP is forward and backward of one row; a STEP is one
optimiser step over ROWS_PER_STEP rows, whichever drafters had them. Under torchrun each of M machines does
this with its own share of M*R rows, and `average` adds up over machines too.
Shapes: S = SEQ_LEN, N = NUM_ANCHORS, K = BLOCK_SIZE, D hidden size, L tapped layers, R = ROWS_PER_STEP.

What it imports:
    model_drafter.py        the drafter, its loss, acceptance
    flex_utils.py           mask, attention, what keeps compilation safe under threads
    dflash_trainer/         the library: what prevents, reports or stores
"""
import itertools
import json
import math
import os
import queue
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
from collections import deque
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors
import torch
import transformers
from tqdm import tqdm

import flex_utils
import model_drafter as md
from dflash_trainer import checkpoints, decoding, settings, workers
from dflash_trainer import target as target_files
from dflash_trainer.devices import (
    HandOff, Stopwatch, check_pairs, memory_gib, receive, replica_of, sum_over_replicas, to_device)
from dflash_trainer.errors import require, user_error_on
from dflash_trainer.features import TappedForward, target_calls
from dflash_trainer.machines import SingleMachine, Cluster
from dflash_trainer.rows import EvalRows, Row, RowStream, inspect_data
from dflash_trainer.token_cache import Settings, build_conversations, overlap, resolve_files
from dflash_trainer.workers import start_thread

# ------------------------------------------------------------------ constants: they ARE the 8-GPU job
# target and devices
TARGET: str = "Qwen/Qwen3.6-27B"                      # causal LM: hub id, directory, random:DIR (no weights)
TARGET_DEVICES: list[str] = [f"cuda:{i}" for i in range(5)]      # one frozen replica and thread each
DRAFTER_DEVICES: list[str] = [f"cuda:{i}" for i in range(5, 8)]  # one drafter and thread each; may repeat
# data
DATA: str = "data/train.jsonl"                        # file, directory, glob or a,b of .jsonl / .jsonl.gz
EVAL_DATA: str = "data/eval.jsonl"                    # held-out answers, the target's own and greedy
CHAT_TEMPLATE_KWARGS: dict = {}                       # of the chat template, e.g. {"enable_thinking": False}
MAX_BAD_SHARE: float = 0.01                           # malformed lines tolerated, from 1,000 lines on
SEQ_LEN: int = 4096                                   # S, tokens
NUM_ANCHORS: int = 512                                # N, a row
# drafter
BLOCK_SIZE: int = 16                                  # K, slots: the anchor and K-1 drafted tokens
DRAFT_LAYERS: int = 5
LAYER_TYPES: list[str] | None = None                  # None: full; for Qwen3.5/3.6 sliding x (n-1) + full
SLIDING_WINDOW: int = 2048                            # W, tokens, of "sliding_attention" layers
TARGET_LAYER_IDS: list[int] | None = None             # tapped layers; None: 5 spread evenly
MASK_TOKEN_ID: int | None = None                      # None: the family's known id, else an unused one
INIT_STD: float = 0.02                                # of fresh weights, normal
INIT_FROM: str | None = None                          # a drafter checkpoint to start from
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
GAMMA: float | None = None                            # decay, slots; None: 7, 5, 4 for K 16, 10, 8, else K/2
LOSS_FORM: str = "fused"                              # "fused": gradient in forward | "checkpoint"
LOSS_CHUNK: int = 1280                                # rows of logits alive at a time; best a multiple of 128
# running
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

DEMO = dict(  # `bash run.sh demo`: SmolLM2-135M-Instruct and its own greedy answers, two CPU cores, minutes
    TARGET_DEVICES=["cpu", "cpu"], DRAFTER_DEVICES=["cpu", "cpu"], DATA="data/demo_train.jsonl",
    EVAL_DATA="data/demo_eval.jsonl", OUT="out/demo", SEQ_LEN=512, NUM_ANCHORS=64, BLOCK_SIZE=4,
    DRAFT_LAYERS=1, TARGET_LAYER_IDS=[1, 7, 13], STEPS=80, ROWS_PER_STEP=2, LR=3e-3, LOSS_CHUNK=192,
    LOG_EVERY=10, EVAL_EVERY=80, SAVE_EVERY=20, MAX_NEW_TOKENS=64)

THIS_MODULE = sys.modules[__name__]
FIRST_STEP_LOCK = threading.Lock()  # held by every worker thread around its whole first step (pytorch#136196)
GATE = flex_utils.Gate(FIRST_STEP_LOCK)


def constants():
    return settings.values(THIS_MODULE)


def check_settings():
    """Everything that can be said before a file or a device is touched."""
    settings.check_types(THIS_MODULE)  # they may have been edited
    settings.require_positive(
        THIS_MODULE, "SEQ_LEN", "NUM_ANCHORS", "DRAFT_LAYERS", "SLIDING_WINDOW", "INIT_STD", "EPOCHS", "STEPS",
        "STOP_AT", "ROWS_PER_STEP", "LR", "CLIP", "GAMMA", "LOSS_CHUNK", "QUEUE_DEPTH", "LOG_EVERY", "SAVE_EVERY",
        "KEEP", "STALL_S", "K_BAD", "MAX_NEW_TOKENS")
    for name, ok, wanted in (
            ("BLOCK_SIZE", BLOCK_SIZE >= 2, "must be 2 or more, the anchor and at least one drafted token"),
            ("OUT", OUT, "name a directory"),
            ("EVAL_EVERY", EVAL_EVERY >= 0, "0 (never) or above"),
            ("SEED", 0 <= SEED < 2**63, "0 or above, below 2**63"),
            ("TEMPERATURE", TEMPERATURE >= 0, "0 (greedy) or above"),
            ("WARMUP", 0 <= WARMUP < 1, "a share of the horizon, 0 <= WARMUP < 1"),
            ("MAX_BAD_SHARE", 0 <= MAX_BAD_SHARE <= 1, "a share, 0 to 1"),
            ("LAYER_TYPES", LAYER_TYPES is None or len(LAYER_TYPES) == DRAFT_LAYERS,
             f"{len(LAYER_TYPES or ())} entries, DRAFT_LAYERS = {DRAFT_LAYERS}"),
            ("ROWS_PER_STEP", ROWS_PER_STEP >= len(DRAFTER_DEVICES),
             f"too few for {len(DRAFTER_DEVICES)} drafters, DRAFTER_DEVICES = {DRAFTER_DEVICES}")):
        require(ok, f"{name} = {globals()[name]!r}: {wanted}")
    settings.require_one_of("LOSS", LOSS, ("decay", "dpace"))
    settings.require_one_of("LOSS_FORM", LOSS_FORM, ("fused", "checkpoint"))
    for kind in LAYER_TYPES or ():
        settings.require_one_of("an entry of LAYER_TYPES", kind, ("full_attention", "sliding_attention"))


def device_names():
    return ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def require_devices(name, devices):
    require(devices, f"{name} is empty")
    for device in devices:
        require(device in device_names(), f"{name} has {device!r}, this machine has {', '.join(device_names())}")


# ------------------------------------------------------------------------------------------ the data

def read_conversations(spec, tokenizer, what, vocab, out=None, tick=lambda: None):
    """DATA or EVAL_DATA -> Conversations (tools/conversations.py), from the cache after the first time."""
    reader = Settings(tokenizer, SEQ_LEN, CHAT_TEMPLATE_KWARGS, vocab)
    return build_conversations(spec, reader, MAX_BAD_SHARE, what, out, tick)


# ------------------------------------------------------------------------------------------ the target

def compute_dtype(device):
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def compiles_on(device):
    return COMPILE and torch.device(device).type == "cuda"


def load_target(device, tick=lambda: None):
    return target_files.load_model(TARGET, device, compute_dtype(device), SEED, tick)


def calls_for(decoder, rows, *held_out):
    """How a target runs them: chosen for `rows`; the others must fit."""
    longest = max(int(s.conversations.lengths.max()) for s in (rows, *held_out) if s)
    return target_calls(rows.conversations.lengths, longest, SEQ_LEN, target_files.call_tokens(decoder))


def target_features(forward, row, calls, gate, device):
    """Hidden states of the tapped layers for one packed row -> (1, S, L*D) on `device`, zeros where padded.

    Conversations run as batch rows padded on the RIGHT to a few fixed shapes: left padding would enter the
    state of linear layers, and one packed sequence is silently wrong without special kernels.
    """
    starts, out = np.concatenate([[0], np.cumsum(row.lengths)]), None
    for batch, length, members in calls.plan(row.lengths):
        in_row = np.concatenate([np.arange(starts[m], starts[m + 1]) for m in members])
        in_call = np.concatenate([b * length + np.arange(row.lengths[m]) for b, m in enumerate(members)])
        ids = np.zeros(batch * length, dtype=np.int64)
        ids[in_call] = row.ids[in_row]
        ids, in_row, in_call = (to_device(torch.from_numpy(a), device) for a in (ids, in_row, in_call))
        with gate.work("target", str(device), batch, length):
            hidden = forward(ids.view(batch, length))                   # (batch, length, L*D)
        if out is None:
            out = hidden.new_zeros(len(row.ids), hidden.shape[-1])
        out[in_row] = hidden.flatten(0, 1)[in_call]
    return out[None]


# ---------------------------------------------------------------------------------------- the hand-off

class Item(NamedTuple):
    """One row for one drafter."""
    kind: str                # "train" | "eval"
    index: int               # row number in the stream, or eval row
    row: Row                 # host arrays
    hidden: torch.Tensor     # (1, S, L*D) on the drafter's device
    slots: list              # [md.Slots]; several for an eval row with more than N anchors
    ready: object            # CUDA event after which hidden and slots may be read, or None


def target_worker(run, t):
    """Thread t: rows of the jobs t, t+T, ... through its replica, in order, to each one's drafter."""
    device = torch.device(TARGET_DEVICES[t])
    run.enter_thread(device)
    forward = TappedForward(run.decoders[t], run.config.target_layer_ids, run.log)
    hand_off, sent = HandOff(device, run.bad_pairs), deque()
    for kind, index in itertools.islice(run.jobs(), t, None, len(TARGET_DEVICES)):
        run.check()
        row, anchors = (run.train_rows if kind == "train" else run.eval_rows).row(index)
        with torch.no_grad(), GATE.first_step():
            hidden = target_features(forward, row, run.calls, GATE, device)
        d = index % len(DRAFTER_DEVICES)
        to = run.replicas[d].device
        moved, slots, ready = hand_off.send(hidden, to, lambda: make_slots(row, anchors, to))
        run.tick()
        with run.target_watches[t] if kind == "train" else nullcontext():
            run.put(t, d, Item(kind, index, row, moved, slots, ready))
        sent.append(ready)
        if len(sent) > QUEUE_DEPTH and (ready := sent.popleft()):
            ready.synchronize()  # no further ahead of the device than that: features are large


def make_slots(row, anchors, device):
    """All anchors of a row in groups of NUM_ANCHORS, at the one shape that is compiled."""
    groups = [anchors[i:i + NUM_ANCHORS] for i in range(0, max(1, len(anchors)), NUM_ANCHORS)]
    on_host = [md.slots_of(row.ids, row.pos, row.conversation_start, group, row.run_length, NUM_ANCHORS, BLOCK_SIZE,
                           loss_chunk()) for group in groups]
    return [md.Slots(*(to_device(t, device) for t in slots)) for slots in on_host]


def loss_chunk():
    """LOSS_CHUNK, or less where a whole row has fewer slots."""
    return min(LOSS_CHUNK, -(-NUM_ANCHORS * (BLOCK_SIZE - 1) // 128) * 128)


def loss_spec(ce_and_grad=md.ce_and_grad):
    return md.LossSpec(LOSS, GAMMA or md.default_gamma(BLOCK_SIZE), LOSS_FORM, loss_chunk(), ce_and_grad)


# ----------------------------------------------------------------------------------------- the drafter
# columns of the per-row statistics, summed over drafters with the gradients
LOSS_SUM, WEIGHT, MATCHES, ANCHORS, BAD = range(5)
MOMENTS = "exp_avg", "exp_avg_sq"  # AdamW's
BETAS, EPS = (0.9, 0.999), 1e-8


def adamw(masters, weights, grads, first, second, lr, count, scale, skip):
    """AdamW without weight decay (arXiv 1711.05101, as torch.optim's), in place; lists of a layer's tensors.

    lr, count (updates, this one included), scale (gradients are divided by it), skip (bool): 0-dim tensors,
    so that nothing waits for the device. Compiled it is one pass over 28 bytes a weight; torch's fused AdamW
    needs 44 with the copies from and to the compute dtype.
    """
    bias1, bias2 = 1 - BETAS[0] ** count, (1 - BETAS[1] ** count).sqrt()
    for p, w, g, m, v in zip(masters, weights, grads, first, second):
        g = g.float() / scale
        new_m, new_v = torch.lerp(m, g, 1 - BETAS[0]), BETAS[1] * v + (1 - BETAS[1]) * g * g
        new_p = p - lr / bias1 * new_m / (new_v.sqrt() / bias2 + EPS)
        for old, new in ((p, new_p), (m, new_m), (v, new_v)):
            old.copy_(torch.where(skip, old, new))
        w.copy_(p)


class Replica:
    """One drafter: compute-dtype weights, fp32 masters, AdamW; the target's embedding and head beside."""

    def __init__(self, index, config, device, embed, head, weights, machines=1, trains=True):
        self.index, self.device, self.embed, self.head = index, device, embed, head
        attend, self.make_mask = flex_utils.make_attention(device, COMPILE, SMALL_KERNELS)
        with torch.device("meta"):
            drafter = md.Drafter(config, attend)
        self.drafter = drafter.to_empty(device=device).to(compute_dtype(device)).train()
        self.params = dict(self.drafter.named_parameters())
        self.weights = {n: p.detach() for n, p in self.params.items()}
        self.set_weights(weights)
        self.adamw, self.spec = self.own(adamw), loss_spec(self.own(md.ce_and_grad))
        parts = (*self.drafter.layers, self.drafter.hidden_norm, self.drafter.norm)
        for module in parts if compiles_on(device) else ():  # layers of a type share a graph
            module.forward = self.own(module.forward)
        self.jobs_seen, self.started, self.sums = 0, False, None
        if trains:
            self.prepare_training(weights, ROWS_PER_STEP * machines)

    def prepare_training(self, weights, rows):
        """What only training needs: 12 bytes a weight, and statistics of a step's rows."""
        device = self.device
        self.masters = {n: weights[n].to(device, torch.float32, copy=True) for n in self.params}
        self.moments = {k: {n: torch.zeros_like(m) for n, m in self.masters.items()} for k in MOMENTS}
        self.count = torch.zeros((), device=device)  # updates that were not skipped
        self.stats = torch.zeros(rows, 5, dtype=torch.float64, device=device)
        self.ring = torch.zeros(LOG_EVERY, rows + 1, 5, dtype=torch.float64, device=device)
        self.layers = {}  # number, or "" -> names of its weights: one compiled update each
        for n in self.params:
            self.layers.setdefault(n.split(".")[1] if n.startswith("layers.") else "", []).append(n)

    def own(self, function):
        """Compiled for this replica's thread alone, where anything is."""
        return flex_utils.compiled(function, self.index) if compiles_on(self.device) else function

    @torch.no_grad()
    def set_weights(self, weights):
        for n, weight in self.weights.items():
            weight.copy_(weights[n])

    @torch.no_grad()
    def update(self, lr, slot):
        """Clip, AdamW, weights back to the compute dtype, without a host sync. The gradients are sums of w*ce
        over the step: their division by the denominator and the clip are one scale."""
        grads = [p.grad for p in self.params.values()]
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
        raw, denominator = torch.linalg.vector_norm(norms), loss_denominator(self.stats).float()
        bad = ~(torch.isfinite(raw) & torch.isfinite(self.stats[:, LOSS_SUM].sum()))
        skip = bad | (denominator == 0)
        norm = raw / denominator.clamp(min=1e-30)
        scale = denominator * (norm / CLIP).clamp(min=1.0)
        self.count += ~skip
        lr = torch.full((), lr, device=self.device)
        for names in self.layers.values():
            of_layer = [[d[n] for n in names] for d in (self.masters, self.weights, *self.moments.values())]
            grads = [self.params[n].grad for n in names]
            with GATE.work("update", str(self.device), *(g.shape for g in grads)):
                self.adamw(*of_layer[:2], grads, *of_layer[2:], lr, self.count, scale, skip)
            for n in names:
                self.params[n].grad = None
        self.ring[slot, :-1] = self.stats
        first_bad = (~torch.isfinite(norms)).float().argmax()
        self.ring[slot, -1] = torch.stack([x.float() for x in (norm, skip, bad, first_bad, denominator)])

    def state(self):
        """fp32 masters and moments on the host, in one flat dict (names as in the published file)."""
        tables = {"master": self.masters, **self.moments}
        out = {f"{k}.{n}": tensor for k, table in tables.items() for n, tensor in table.items()}
        return {k: v.to("cpu", copy=True).contiguous() for k, v in {**out, "adam_step": self.count}.items()}

    @torch.no_grad()
    def load_state(self, state):
        for k, table in {"master": self.masters, **self.moments}.items():
            for n, tensor in table.items():
                tensor.copy_(state[f"{k}.{n}"])
        self.count.copy_(state["adam_step"])
        self.set_weights(self.masters)


def micro_step(run, w, item):
    """Mask, forward, loss and backward of one row; all of it under the lock (first time) and gate."""
    with GATE.first_step(), GATE.work("train", str(w.device), tuple(item.hidden.shape), item.hidden.dtype):
        result = md.row_loss(w.drafter, w.embed, w.head, item.hidden, item.slots[0], w.make_mask, w.spec)
        result.loss.backward()
    valid = item.slots[0].counted > 0
    w.stats[item.index % len(w.stats)] = torch.stack([
        result.loss.detach(), result.weight, (result.matches * valid).sum().float(), valid.sum().float(),
        (~torch.isfinite(result.loss.detach())).float()])
    run.tick()


def train_step(run, w, plan):
    """One optimiser step on one drafter: its rows, the average over drafters, the update."""
    w.stats.zero_()
    for item in run.take(w, "train", plan.rows):
        micro_step(run, w, item)
        if not w.started:
            run.start_barrier.wait()  # drafters only: a target here would leave the others' queues empty
            w.started = True
            if w.index == 0:
                run.log(f"first rows of all {len(run.replicas)} drafters after {run.since_start():.1f} s: "
                        "targets, compilation and the first evaluation included")
    with run.reduce_watch if w.index == 0 else nullcontext():
        run.at_barrier(w.index == 0, lambda: run.average(plan.step))
    w.update(learning_rate(plan.step, run.horizon), plan.step % LOG_EVERY)


def loss_denominator(stats):
    """(rows, 5) of a step -> what its sum of w*ce is divided by: the weights' sum, for D-PACE, whose weights
    are numbers of tokens, the valid blocks. The log's losses are divided by the weights' sum either way."""
    return stats[:, ANCHORS if LOSS == "dpace" else WEIGHT].sum()


def learning_rate(step, horizon):
    """Linear warm-up over WARMUP of the horizon, then cosine to 0. step counts from 0."""
    warm = max(1, round(WARMUP * horizon))
    if step < warm:
        return LR * (step + 1) / warm
    return LR * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, horizon - warm)))


# ------------------------------------------------------------------------------------------ evaluation

class EvalSums:
    """Sums of one drafter's share of the held-out rows; added up over drafters on the host."""

    def __init__(self):
        self.loss = self.weight = 0.0
        self.right, self.counts = np.zeros(BLOCK_SIZE), np.zeros(BLOCK_SIZE)
        self.passes = {}  # source -> tokens produced by each pass

    def add(self, other):
        self.loss, self.weight = self.loss + other.loss, self.weight + other.weight
        self.right, self.counts = self.right + other.right, self.counts + other.counts
        for source, produced in other.passes.items():
            self.passes.setdefault(source, []).extend(produced)

    def metrics(self):
        every = [p for produced in self.passes.values() for p in produced]
        out = {"eval_loss": self.loss / max(self.weight, 1e-9),
               "tau": float(np.mean(every)) if every else 1.0,
               "acc_k": [round(float(r / max(c, 1)), 4) for r, c in zip(self.right[1:], self.counts[1:])]}
        if len(self.passes) > 1:
            out["tau_by_source"] = {
                source or "none": float(np.mean(p)) for source, p in sorted(self.passes.items()) if p}
        return out


@torch.no_grad()
def evaluate_row(w, item, sums):
    """All valid anchors of a held-out row at the training shape, then each answer's walk on the host."""
    with GATE.work("eval", str(w.device), tuple(item.hidden.shape), item.hidden.dtype):
        results = [md.row_loss(w.drafter, w.embed, w.head, item.hidden, slots, w.make_mask, w.spec)
                   for slots in item.slots]
    length = item.row.run_length
    anchors, slot = np.flatnonzero(length >= 1), np.arange(BLOCK_SIZE)
    matches = np.zeros(len(length), dtype=np.int64)
    matches[anchors] = torch.cat([r.matches for r in results])[:len(anchors)].cpu().numpy()
    sums.counts += ((slot >= 1) & (slot <= length[anchors, None])).sum(0)
    sums.right += sum(r.correct.sum(0).cpu().numpy() for r in results)
    sums.loss += sum(r.loss.item() for r in results)
    sums.weight += sum(r.weight.item() for r in results)
    for a in anchors[(anchors == 0) | (length[anchors - 1] != length[anchors] + 1)]:  # an answer's first
        n_tokens = int(length[a]) + 1
        produced = md.walk(matches[a:a + n_tokens], n_tokens)
        sums.passes.setdefault(item.row.sources[item.row.doc[a]], []).extend(produced)


def evaluate(run, w, plan):
    """This drafter's eval rows; the leader adds up, logs, and finds out whether this is the best so far."""
    began = time.perf_counter()
    w.sums = EvalSums()
    for item in run.take(w, "eval", run.eval_share()):
        if run.signal is not None:  # the resumed run evaluates here anew
            break
        evaluate_row(w, item, w.sums)
        run.tick()
    run.at_barrier(w.index == 0, lambda: run.merge_evaluation(plan.step))
    if w.index == 0:
        run.eval_s += time.perf_counter() - began


def drafter_worker(run, d):
    """Thread d: one plan after the other. What all threads must agree on is decided in `run.meet`."""
    w = run.replicas[d]
    run.enter_thread(w.device)
    for plan in run.plans():
        if plan.evaluate and not run.ending:
            evaluate(run, w, plan)
        if d == 0:
            run.save_if_due(w, plan)
        if run.ending or not plan.rows:
            return
        train_step(run, w, plan)
        if d == 0:
            run.log_if_due(w, plan.step + 1)


# --------------------------------------------------------------------------------------------- the run

class Plan(NamedTuple):
    step: int        # updates done before it
    evaluate: bool   # held-out rows first
    rows: range      # this machine's row numbers of the step; empty at the very end


class Run(workers.Workers):
    """What the threads share: the order of work, the queues, what is logged and kept.

    build() and what it calls set the rest before any thread exists: train_rows, eval_rows, calls; horizon,
    last; config, decoders[target], replicas[drafter]; bad_pairs, direct (between devices).
    """

    def __init__(self, out, machines=SingleMachine()):
        super().__init__(len(DRAFTER_DEVICES))
        self.machines, self.step_rows = machines, ROWS_PER_STEP * machines.size
        self.out, self.first, self.evaluated_before = out, 0, None  # of the checkpoint that was resumed
        # what a checkpoint brings back; window: [step, rows of its ring] since the last log line
        self.kept = {"best": None, "low_loss": None, "turned": False, "skipped": 0, "bad_run": 0,
                     "evaluated": None, "window": [], "eval_data": None}
        self.ending, self.signal, self.fresh_best = False, None, False
        self.lines, self.saver = checkpoints.Lines(out), checkpoints.Saver(self, KEEP)
        self.bar, self.board = None, None
        self.target_watches, self.drafter_watches = (
            [Stopwatch(torch.device(d)) for d in devices] for devices in (TARGET_DEVICES, DRAFTER_DEVICES))
        self.reduce_watch = Stopwatch(torch.device(DRAFTER_DEVICES[0]))
        self.queues = [[queue.Queue(QUEUE_DEPTH) for _ in DRAFTER_DEVICES] for _ in TARGET_DEVICES]
        self.restart_window(0)

    # ---- the order of work
    def plans(self):
        """The same sequence in every thread."""
        for step in range(self.first, self.last + 1):
            due = EVAL_EVERY > 0 and (step == self.last or step % EVAL_EVERY == 0)
            first = (step * self.machines.size + self.machines.rank) * ROWS_PER_STEP
            rows = range(first, first + ROWS_PER_STEP) if step < self.last else range(0)
            yield Plan(step, due and step != self.evaluated_before, rows)

    def eval_share(self):
        """This machine's held-out rows: neighbours, so that every drafter has some (row e is e mod D's)."""
        n, m = len(self.eval_rows.rows), self.machines
        return range(n * m.rank // m.size, n * (m.rank + 1) // m.size)

    def constants(self):
        """As checkpoints keep them: the rows of a step are those of all machines."""
        return {**constants(), "ROWS_PER_STEP": self.step_rows}

    def jobs(self):
        """(kind, index) of every row in the order in which it is used; job j is target j mod T's."""
        for plan in self.plans():
            if plan.evaluate:
                yield from (("eval", e) for e in self.eval_share())
            yield from (("train", r) for r in plan.rows)

    def take(self, w, kind, indices):
        """This drafter's items among `indices`, in order; holds nothing while it waits. Every drafter counts
        every job, so all know whose job each is."""
        for index in indices:
            t = w.jobs_seen % len(TARGET_DEVICES)
            w.jobs_seen += 1
            if index % len(DRAFTER_DEVICES) != w.index:
                continue
            with self.drafter_watches[w.index] if kind == "train" else nullcontext():
                item = self.wait_for(lambda: self.queues[t][w.index].get(timeout=0.5), queue.Empty)
                receive((item.hidden, *(t for s in item.slots for t in s)), item.ready, w.device)
            assert item[:2] == (kind, index), f"expected {kind} row {index}, got {item.kind} {item.index}"
            yield item

    def put(self, t, d, item):
        self.wait_for(lambda: self.queues[t][d].put(item, timeout=0.5), queue.Full)

    def state(self):
        fills = [[q.qsize() for q in row] for row in self.queues]
        silent_text = f"; machines not heard of {self.machines.missing_ranks()}" if self.machines.size > 1 else ""
        return f"queues [target][drafter] {fills}; {GATE.holder()}{silent_text}"

    # ---- threads and signals
    def enter_thread(self, device):
        """First thing in every worker: device, intra-op threads, compile settings (the thread's own)."""
        n_threads = (os.cpu_count() or 1) // (len(TARGET_DEVICES) + len(DRAFTER_DEVICES))
        if device.type == "cuda":
            torch.cuda.set_device(device)
            n_threads = 1  # the host makes small tensors only: more threads would wait for each other
        torch.set_num_threads(max(1, n_threads))
        flex_utils.worker_compile_settings(len(set(TARGET_DEVICES + DRAFTER_DEVICES)))
        flex_utils.worker_memory_settings()

    def on_signal(self, number, frame):
        if self.signal is not None and number != signal.SIGHUP:  # of which a closed terminal sends several
            os._exit(128 + number)
        self.signal = self.signal or number
        with suppress(OSError):  # the terminal may be gone
            print(f"\nsignal {number}: finishing the step and saving, then ending (again: at once)", flush=True)

    # ---- once a step
    def average(self, step):
        """Gradients and statistics summed over drafters and machines; the decision to stop, one for all."""
        lists = []
        for w in self.replicas:
            for p in w.params.values():
                if p.grad is None:  # no usable anchor in any of its rows
                    p.grad = torch.zeros_like(p)
            lists.append([*(p.grad for p in w.params.values()), w.stats])
        # on the hosts: no device is waited for, and NCCL starts nothing that a dead machine would hang
        self.end_if_signalled()
        sum_over_replicas(lists, self.direct, self.machines, self.bad_pairs)

    def end_if_signalled(self):
        signalled = max(self.machines.gather(self.signal or 0))
        self.signal, self.ending = self.signal or signalled or None, bool(signalled)

    def merge_evaluation(self, step):
        self.end_if_signalled()
        if self.ending:  # some drafters may have left their rows
            return
        total, kept, low = EvalSums(), self.kept, self.kept["low_loss"]
        for sums in itertools.chain(*self.machines.gather([w.sums for w in self.replicas])):
            total.add(sums)
        metrics = total.metrics()
        loss, tau = metrics["eval_loss"], metrics["tau"]
        finite = math.isfinite(loss)
        self.record({"step": step, **metrics, "eval_loss": loss if finite else None})  # JSON has no NaN
        self.log(f"eval step {step} | eval_loss {loss:.4f} | tau {tau:.3f} | acc_k "
                 + " ".join(f"{a:.3f}" for a in metrics["acc_k"]))
        kept["evaluated"] = step
        self.fresh_best = step > 0 and (kept["best"] is None or tau > kept["best"]["tau"])
        if self.fresh_best:
            kept["best"] = {"step": step, "tau": tau}
        # more than rounding
        if finite and low is not None and loss > 1.001 * low["eval_loss"] and not kept["turned"]:
            kept["turned"] = True
            self.log(f"held-out loss turned: {low['eval_loss']:.4f} at step {low['step']}, now {loss:.4f}; "
                     f"the best by tau is kept as {Path(OUT) / 'best'}")
        if finite and (low is None or loss < low["eval_loss"]):
            kept["low_loss"] = {"step": step, "eval_loss": loss}

    def save_if_due(self, w, plan):
        best, self.fresh_best = self.fresh_best and plan.evaluate, False
        last = self.ending or not plan.rows
        if best and plan.step == self.first and not self.machines.rank:  # on the disk since before the resume
            self.saver.point_best(plan.step)
        if plan.step > self.first and (best or last or plan.step % SAVE_EVERY == 0):
            self.read_ring(w, plan.step)
            if self.machines.rank:
                return  # machine 0 writes for all; the others follow what it would write, to decide alike
            info = {"step": plan.step, "horizon": self.horizon,
                    "data": self.train_rows.conversations.fingerprint, **self.kept,
                    "constants": self.constants()}
            self.saver.start(plan.step, w.state, info, best)
            self.tick()

    def read_ring(self, w, step):
        """Statistics of the steps since the last reading -> host rows (the one device sync of a window)."""
        ring, kept = w.ring.tolist(), self.kept
        fresh, self.read = [[s, ring[s % LOG_EVERY]] for s in range(self.read, step)], step
        for s, rows in fresh:
            _, skip, bad, first_bad, _ = rows[-1]
            kept["skipped"] += int(skip)
            kept["bad_run"] = kept["bad_run"] + 1 if bad else 0
            if bad:
                self.report_bad(s, rows[:-1], list(w.params)[int(first_bad)])
        kept["window"] = kept["window"] + fresh  # a new list: the saver's thread may be writing the old one

    def report_bad(self, step, rows, name):
        guilty = [step * self.step_rows + i for i, row in enumerate(rows) if row[BAD]]
        guilty = guilty or list(range(step * self.step_rows, (step + 1) * self.step_rows))
        bad = {"step": step + 1, "rows": guilty, "first_bad_tensor": name}
        self.lines.append("bad_steps.jsonl", json.dumps(bad))
        where, n = f"rows {guilty}; first bad gradient {name}", self.kept["bad_run"]
        self.log(f"WARNING: step {step + 1} was not finite and was skipped; {where}")
        require(n < K_BAD, f"{n} steps in a row were not finite (K_BAD = {K_BAD}); {where}")

    def log_if_due(self, w, step):
        if self.bar:
            self.bar.update(1)
        if step % LOG_EVERY and step != self.last and not self.ending:
            return
        self.read_ring(w, step)
        n, wall = step - self.logged, self.since_start() - self.eval_s
        steps, self.kept["window"] = [rows for _, rows in self.kept["window"]], []
        sums = np.stack([np.sum(rows[:-1], 0) for rows in steps])       # (steps, 5)
        good = sums[np.isfinite(sums[:, LOSS_SUM])]
        losses = [r[LOSS_SUM] / r[WEIGHT] for r in good if r[WEIGHT] > 0]
        norms = [rows[-1][0] for rows in steps if np.isfinite(rows[-1][0])]
        waits, target_waits = ([watch.take() for watch in watches]
                               for watches in (self.drafter_watches, self.target_watches))
        wait, target_wait, reduce = np.mean(waits), np.mean(target_waits), self.reduce_watch.take()
        step_ms, wait_ms, target_wait_ms, reduce_ms = (  # an evaluation is in the targets' waits alone
            round(1e3 * float(s) / n, 2) for s in (wall, wait, max(0, target_wait - self.eval_s), reduce))
        values = {
            "step": step, "loss": float(np.mean(losses)) if losses else None,
            "accept_len": float(1 + good[:, MATCHES].sum() / max(1, good[:, ANCHORS].sum())),
            "lr": learning_rate(step - 1, self.horizon), "grad_norm": norms[-1] if norms else None,
            "tokens_per_s": round(self.tokens_between(self.logged, step) / wall, 1),
            "step_ms": step_ms, "wait_ms": wait_ms, "target_wait_ms": target_wait_ms, "reduce_ms": reduce_ms,
            "queue": sum(q.qsize() for row in self.queues for q in row), "mem_gib": memory_gib(),
            "skipped": self.kept["skipped"], "bad_rows": self.train_rows.conversations.stats["bad"]}
        self.record(values)
        texts = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in values.items()}
        self.log(" | ".join(f"{k} {text}" for k, text in texts.items()))
        if step % LOG_EVERY == 0 and step // LOG_EVERY == self.first // LOG_EVERY + 2:  # the first compiled
            self.log_split(max(0, wall + self.eval_s - target_wait) / n, (wall - waits[0] - reduce) / n)
            self.log(f"{(self.last - step) * wall / n / 3600:.2f} hours to step {self.last} at this pace, "
                     "evaluation left out")
        self.restart_window(step)

    def log_split(self, target_s, drafter_s):
        """Which split of the devices would keep both sides busy, from each side's busy seconds of a step."""
        t, d, gpus = len(TARGET_DEVICES), len(DRAFTER_DEVICES), TARGET_DEVICES + DRAFTER_DEVICES
        if len(set(gpus)) < len(gpus) and "cpu" not in gpus:
            return  # on a GPU that two threads share, each one's clock counts the other's work
        target_ms, drafter_ms = (1e3 * s * n / ROWS_PER_STEP for s, n in ((target_s, t), (drafter_s, d)))
        best = min(range(1, t + d), key=lambda n: max(target_ms / n, drafter_ms / (t + d - n)))
        self.log(f"a row takes a target {target_ms:.0f} ms and a drafter {drafter_ms:.0f} ms: of {t + d} "
                 f"devices {best} for targets and {t + d - best} for drafters balance best, now {t} and {d}")

    def tokens_between(self, first, last):
        lengths = self.train_rows.conversations.lengths
        return sum(int(lengths[self.train_rows.locate(i)[1]].sum())
                   for i in range(first * self.step_rows, last * self.step_rows))

    def since_start(self):
        """Seconds since the threads started, or since the last log line."""
        return time.perf_counter() - self.window_start

    def restart_window(self, step):
        """Timing starts anew at `step`, up to which the ring has been read."""
        self.read = self.logged = step
        self.window_start, self.eval_s = time.perf_counter(), 0.0

    def record(self, values):
        """One JSON object a line in metrics.jsonl; tensorboard too, where it is installed."""
        self.lines.append("metrics.jsonl", json.dumps(values))
        for name, value in values.items() if self.board else ():
            if isinstance(value, (int, float)):
                self.board.add_scalar(name, value, values["step"])

    def log(self, text):
        with self.lines.lock:
            self.lines.append("train.log", text)
            with suppress(OSError):  # the run outlives what reads it
                tqdm.write(text) if self.bar else print(text, flush=True)


# -------------------------------------------------------------------------------------------- start-up
# what a resumed run must share with the one that wrote the checkpoint; the rest may change and is printed
MUST_MATCH_CHECKPOINT = ("SEED", "SEQ_LEN", "NUM_ANCHORS", "ROWS_PER_STEP", "LOSS", "CHAT_TEMPLATE_KWARGS")
# what machines must share beside it, for every one decides by itself what happens after a step
MUST_MATCH_ACROSS_MACHINES = "LR", "WARMUP", "CLIP", "GAMMA", "LOG_EVERY", "EVAL_EVERY", "SAVE_EVERY", "K_BAD"


def preflight(run):
    """What would fail late is said before anything slow: compiler, disk, host memory, files."""
    for name in ("DATA", "EVAL_DATA") if EVAL_EVERY else ("DATA",):
        resolve_files(globals()[name], name)
    for part in run.out.glob(".part_step_*"):
        print(f"{part} is a save that was cut off: removed, the complete one before it counts")
        shutil.rmtree(part)
    if COMPILE and any(d.startswith("cuda") for d in DRAFTER_DEVICES):
        compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
        header = Path(sysconfig.get_paths()["include"], "Python.h")
        require(run.config.head_dim >= 16,  # Triton's matrix products start there
             f"COMPILE = True: flex_attention needs a head_dim of 16 or more, this is {run.config.head_dim}")
        require(compiler, "COMPILE = True: Triton needs a C compiler on the PATH: install gcc, or set CC")
        require(header.exists(), f"COMPILE = True: Triton needs {header}: install python3-dev")
    if run.machines.rank:
        return  # machine 0 saves
    with torch.device("meta"):
        n = sum(p.numel() for p in md.Drafter(run.config, None).parameters()) / 2**30
    size = n * 14  # bf16, fp32, moments
    free, memory = shutil.disk_usage(run.out).free / 2**30, checkpoints.free_memory()
    there = len(checkpoints.step_directories(run.out))  # a run to resume has some already
    wanted = size * max(1, KEEP + 2 - there)
    print(f"a checkpoint is {size:.2f} GiB, {KEEP} newest and the best are kept (KEEP), "
          f"{free:.2f} GiB free at OUT = {run.out}")
    require(free >= wanted, f"OUT = {run.out}: {free:.2f} GiB free, KEEP = {KEEP}, the best "
         f"and one being written need {wanted:.2f}")
    if memory < n * 12:
        print(f"WARNING: {memory:.1f} GiB of host memory is free, a save copies {n * 12:.1f} GiB there")


def read_data(run, tokenizer, vocab):
    """Rows to train on and rows to evaluate on, before any GPU work."""
    run.train_rows = RowStream(
        read_conversations(DATA, tokenizer, "DATA", vocab, run.out, run.tick), SEQ_LEN, NUM_ANCHORS, SEED)
    run.eval_rows = None
    if EVAL_EVERY:
        run.eval_rows = EvalRows(
            read_conversations(EVAL_DATA, tokenizer, "EVAL_DATA", vocab, run.out, run.tick), SEQ_LEN)
        run.kept["eval_data"] = run.eval_rows.conversations.fingerprint
        n, of = overlap(run.train_rows.conversations, run.eval_rows.conversations)
        if n:
            print(f"WARNING: {n} of {of} different conversations of EVAL_DATA = {EVAL_DATA} are in "
                  f"DATA = {DATA} too: tau will flatter")
    rows = None if STEPS else run.train_rows.total(EPOCHS)  # packs them all
    run.horizon = STEPS or rows // run.step_rows
    require(run.horizon, f"DATA = {DATA}: EPOCHS = {EPOCHS} give {rows} rows, fewer than "
         f"ROWS_PER_STEP = {ROWS_PER_STEP}: lower it or SEQ_LEN = {SEQ_LEN}, or set STEPS")
    run.last = min(run.horizon, STOP_AT or run.horizon)


def check_machines(run):
    """All machines train the same thing on the same rows; UserError naming both values."""
    files = {"DATA": run.train_rows, "EVAL_DATA": run.eval_rows}
    mine = {n: rows and rows.conversations.fingerprint for n, rows in files.items()}
    mine |= {n: constants()[n] for n in MUST_MATCH_CHECKPOINT + MUST_MATCH_ACROSS_MACHINES} | vars(run.config)
    mine |= {"the last step": run.last, "the horizon": run.horizon}
    for rank, theirs in enumerate(run.machines.gather(mine)):
        for n in mine:
            require(mine[n] == theirs[n], f"{n} = {mine[n]!r}, but machine (rank {rank}) has {theirs[n]!r}")


def drafter_in(name):
    """The drafter checkpoint that the constant `name` says -> (config, weights)."""
    with user_error_on(f"{name} = {globals()[name]}: not a drafter checkpoint", OSError, ValueError,
                  safetensors.SafetensorError):
        return checkpoints.load_drafter(globals()[name])


def check_resume(path, info, run):
    """Refuse what can't continue, naming both values; print what merely changed."""
    theirs, ours, data = info["constants"], run.constants(), run.train_rows.conversations.fingerprint
    way = "set that, or start another run: OUT=..., with INIT_FROM for its weights"
    for name in MUST_MATCH_CHECKPOINT:
        note = f", summed over machines, here {run.machines.size}" if name == "ROWS_PER_STEP" else ""
        require(theirs[name] == ours[name],
             f"{name} = {ours[name]!r}, but {path} has {theirs[name]!r}{note}: {way}")
    require(info["horizon"] == run.horizon, f"the schedule's horizon is {run.horizon} steps, but {path} has "
         f"{info['horizon']}: set STEPS={info['horizon']} (STOP_AT ends early without changing it)")
    require(info["data"] == data, f"DATA = {DATA} holds other conversations than {path} was trained on, DATA = "
         f"{theirs['DATA']} (fingerprints {data} and {info['data']}): {way}")
    changed = checkpoints.differences(run.config, checkpoints.read_config(path))
    require(not changed, f"{path} is another drafter: {'; '.join(changed)}")
    for name in sorted(set(theirs) & set(ours) - {"RESUME", "CKPT", "PROMPT"}):
        if theirs[name] != ours[name]:
            run.log(f"resume: {name} was {theirs[name]!r}, now {ours[name]!r}")


def starting_point(run):
    """-> ((first step, last evaluated one, what is kept), state): a checkpoint's whole state; or the masters
    alone, of INIT_FROM or fresh ones from SEED."""
    found = checkpoints.find_checkpoint(run.out, RESUME)
    if found:
        path, info, state = found
        check_resume(path, info, run)
        require(info["step"] < run.last or path.resolve().parent == run.out.resolve(),
             f"RESUME = {RESUME} is at step {info['step']} of {run.last}: nothing is left to do in OUT = {OUT}")
        checkpoints.truncate_lines(run.out, info["step"], info["evaluated"])
        run.log(f"resuming from {path}, step {info['step']}")
        if info["best"] and info["best"]["step"] == info["step"]:  # a kill can come before its link
            run.saver.point_best(info["step"])
        kept, ours = {name: info.get(name) for name in run.kept}, run.kept["eval_data"]
        if ours and kept["eval_data"] not in (None, ours):
            run.log(f"resume: EVAL_DATA = {EVAL_DATA} holds other conversations: the best is sought anew")
            kept.update(best=None, low_loss=None, turned=False, evaluated=None)
        return (info["step"], kept["evaluated"], {**kept, "eval_data": ours or kept["eval_data"]}), state
    if (run.out / "metrics.jsonl").exists():
        run.log(f"OUT = {OUT}: no checkpoint to resume (RESUME = {RESUME}), this run starts at step 0")
    checkpoints.truncate_lines(run.out, -1)  # of a run that was killed before its first save
    if INIT_FROM:
        theirs, weights = drafter_in("INIT_FROM")
        wrong = checkpoints.differences(run.config, theirs)
        require(not wrong, f"INIT_FROM = {INIT_FROM} doesn't fit: {'; '.join(wrong)}")
    else:
        drafter = md.Drafter(run.config, None)
        drafter.init_weights(SEED)
        weights = drafter.state_dict()
    return (0, None, run.kept), {f"master.{name}": weight for name, weight in weights.items()}


def check_devices(run, targets, drafters):
    """Every pair of devices that copies will cross, before any weight does."""
    pairs = itertools.product(targets[:1], targets), itertools.product(targets + drafters, drafters)
    run.bad_pairs = check_pairs(itertools.chain(*pairs))
    for a, b in sorted(run.bad_pairs, key=str):
        print(f"direct copies {a} -> {b} arrive damaged on this machine: they go through host memory")
        os.environ["NCCL_P2P_DISABLE"] = "1"
    run.direct = 1 < len(drafters) == len(set(drafters)) and all(d.type == "cuda" for d in drafters)


def build(run):
    """Everything before the threads, in the main thread: data, target and its replicas, drafters."""
    config, tokenizer = target_files.load_config(TARGET), target_files.load_tokenizer(TARGET)
    run.config = target_files.drafter_config(
        TARGET, config, tokenizer, BLOCK_SIZE, DRAFT_LAYERS, LAYER_TYPES, SLIDING_WINDOW, TARGET_LAYER_IDS,
        MASK_TOKEN_ID, INIT_STD)
    preflight(run)
    read_data(run, tokenizer, config.get_text_config().vocab_size)
    run.tick()
    check_machines(run)
    with run.slow():
        begin, state = run.machines.broadcast_from_rank0(lambda: starting_point(run))
    run.first, run.evaluated_before, run.kept = begin
    weights = checkpoints.masters_of(state)
    targets, drafters = [torch.device(d) for d in TARGET_DEVICES], [torch.device(d) for d in DRAFTER_DEVICES]
    check_devices(run, targets, drafters)
    with run.slow():  # TARGET may have to be downloaded
        model = load_target(targets[0], run.tick)
    embed, head, decoder = model.get_input_embeddings(), target_files.head_of(model), model.get_decoder()
    run.config = replace(run.config, input_embedding_scale=target_files.embedding_scale(embed))
    target_files.report_kernels(decoder)
    with user_error_on(f"TARGET = {TARGET}: can't run", ImportError):  # FP8 layers look for their kernels now
        target_files.verify_target(TARGET, model, run.config, run.train_rows.conversations, tokenizer)
    both = torch.nn.ModuleList([embed, head])  # one copy where they are tied
    shared = {d: replica_of(both, d, run.bad_pairs) for d in set(drafters)}
    decoder.layers = decoder.layers[:run.config.target_layer_ids[-1] + 1]  # the rest feeds nothing
    del model, head, both  # the head and the last layers leave the target's GPU here
    run.calls = calls_for(decoder, run.train_rows, run.eval_rows)
    run.decoders = [decoder] + [replica_of(decoder, d, run.bad_pairs) for d in targets[1:]]
    run.replicas = [Replica(i, run.config, d, *shared[d], weights, run.machines.size)
                    for i, d in enumerate(drafters)]
    for w in run.replicas if "adam_step" in state else ():
        w.load_state(state)
    run.tick()


# ------------------------------------------------------------------------------------------------ main

def describe_run(run):
    """Head of the log and OUT/run.json."""
    stats, n_rows = run.train_rows.conversations.stats, run.train_rows.total(1)
    facts = {"torch": torch.__version__, "transformers": transformers.__version__,
             "safetensors": safetensors.__version__, "python": sys.version.split()[0],
             "commit": checkpoints.commit(),
             "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
             "machines": run.machines.size,
             "trainable_parameters": sum(m.numel() for m in run.replicas[0].masters.values()),
             "horizon": run.horizon, "mask_token_id": run.config.mask_token_id}
    for name, value in facts.items():
        run.log(f"{name}: {value}")
    facts.update(data=stats, drafter=checkpoints.config_json(run.config), constants=constants())
    (run.out / "run.json").write_text(json.dumps(facts, indent=1, default=str))
    run.log("constants: " + ", ".join(f"{n}={v!r}" for n, v in constants().items()))
    lengths, most = run.train_rows.conversations.lengths, run.config.max_position_embeddings
    if lengths.max() > most:
        run.log(f"WARNING: DATA has conversations of {lengths.max()} tokens, max_position_embeddings of TARGET "
                f"is {most}: what it says beyond that is no guide; SEQ_LEN = {SEQ_LEN} cuts them")
    run.log(f"{stats['rows']} conversations, {(lengths >= SEQ_LEN).sum()} of them cut at SEQ_LEN or just as "
            f"long, {stats['tokens']} tokens, "
            f"supervised {stats['supervised'] / stats['tokens']:.3f}; {n_rows} rows of {SEQ_LEN} an epoch, "
            f"about {min(NUM_ANCHORS, stats['supervised'] / n_rows):.0f} anchors a row; "
            f"steps {run.first} to {run.last} of {run.horizon}; "
            f"ROWS_PER_STEP = {ROWS_PER_STEP} over {len(DRAFTER_DEVICES)} drafters "
            f"({ROWS_PER_STEP / len(DRAFTER_DEVICES):.3g} each) on each of {run.machines.size} machines; "
            f"targets on {TARGET_DEVICES}, drafters on {DRAFTER_DEVICES}")


def run_threads(run):
    """Start all workers, wait for the drafters, end the rest. Leaves no thread behind."""
    targets = [start_thread(f"target-{t}", run.run_guarded, target_worker, run, t)
               for t in range(len(TARGET_DEVICES))]
    drafters = [start_thread(f"drafter-{d}", run.run_guarded, drafter_worker, run, d)
                for d in range(len(DRAFTER_DEVICES))]
    for thread in drafters:
        while thread.is_alive() and not run.stop.is_set():
            thread.join(0.2)  # short, so that this thread sees signals
    run.saver.wait()
    run.stop.set()
    for thread in (*targets, *drafters):
        thread.join(10)
        if thread.is_alive():
            run.log(f"thread {thread.name} does not end; leaving without it")
            code = finish(run)  # says what ended the run
            sys.stdout.flush()
            os._exit(code or settings.EXIT_ERROR)


@contextmanager
def signals_of(run):
    """SIGTERM, Ctrl-C and a closed terminal finish the step and save. Python handles signals in the main thread
    alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    every = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    old = {s: signal.signal(s, run.on_signal) for s in every if signal.getsignal(s) != signal.SIG_IGN}  # nohup
    try:
        yield
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)


def demo():
    """The job with the constants of DEMO; its own folder starts anew. -> exit code."""
    return train(clear=OUT == DEMO["OUT"])


def train(clear=False):
    """The whole job. -> exit code."""
    require_devices("TARGET_DEVICES", TARGET_DEVICES)
    require_devices("DRAFTER_DEVICES", DRAFTER_DEVICES)
    alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
    machines = SingleMachine() if alone else Cluster(STALL_S)
    # OUT is machine 0's alone: it may be shared, or missing elsewhere. What others write there goes with them
    with tempfile.TemporaryDirectory() if machines.rank else checkpoints.only_run_in(Path(OUT), clear) as out:
        run = Run(Path(out), machines)
        watchdog = start_thread("watchdog", run.watchdog, STALL_S, run.state)
        try:
            build(run)
            run.board = checkpoints.tensorboard(run.out)
            describe_run(run)
            allow_compiles = GATE.forbid_compiles_outside()
            hidden = not sys.stderr.isatty()
            with signals_of(run), tqdm(total=run.last, initial=run.first, unit="step", disable=hidden) as bar:
                run.bar = None if bar.disable else bar
                run.restart_window(run.first)
                try:
                    run_threads(run)
                finally:
                    allow_compiles()
                    run.bar = None
        finally:
            run.stop.set()
            watchdog.join()
            if run.board:
                run.board.close()
        code = finish(run)
    machines.shutdown(failed=run.error is not None)
    return code


def finish(run):
    best, code, text = run.kept["best"], 0, f"done: {Path(OUT) / 'latest'}"
    if best and (run.out / "best").exists():  # not that of another folder's run
        text += f"; best tau {best['tau']:.3f} at step {best['step']}"
    if run.error:
        code, text = settings.EXIT_ERROR, f"ERROR in {run.error}"
    elif run.saver.failed:
        code, text = settings.EXIT_ERROR, f"ERROR: the last save failed: {run.saver.failed}"
    elif error := run.lines.append("metrics.jsonl"):
        code, text = settings.EXIT_ERROR, f"ERROR: the last lines of metrics.jsonl could not be written: {error}"
    elif run.signal:
        code, text = 128 + run.signal, f"ended by signal {run.signal}; `latest` is the last complete step"
    run.log(text)
    return code


def open_checkpoint():
    """CKPT and its target on TARGET_DEVICES[0], for `eval` and `generate`. -> (model, tokenizer, Replica)."""
    require(CKPT, "CKPT is empty: name a checkpoint directory")
    require_devices("TARGET_DEVICES", TARGET_DEVICES[:1])
    config, weights = drafter_in("CKPT")
    target_files.load_config(TARGET)  # a TARGET that isn't there is said before its tokenizer is missed
    globals().update(BLOCK_SIZE=config.block_size, COMPILE=False)
    tokenizer, model = target_files.load_tokenizer(TARGET), load_target(TARGET_DEVICES[0])
    here = model.config.get_text_config().hidden_size, len(model.get_decoder().layers)
    there = config.hidden_size, config.num_target_layers
    require(here == there, f"CKPT = {CKPT} is for hidden size and layers {there}, TARGET = {TARGET} has {here}")
    w = Replica(0, config, model.device, model.get_input_embeddings(), target_files.head_of(model), weights,
                trains=False)
    w.drafter.eval()
    return model, tokenizer, w


def evaluate_checkpoint():
    """`eval CKPT=...`: tau, held-out loss and acceptance by slot on EVAL_DATA. -> exit code."""
    model, tokenizer, w = open_checkpoint()
    config, decoder, sums = w.drafter.config, model.get_decoder(), EvalSums()
    rows = EvalRows(read_conversations(EVAL_DATA, tokenizer, "EVAL_DATA", config.vocab_size), SEQ_LEN)
    calls = calls_for(decoder, rows)
    forward = TappedForward(decoder, config.target_layer_ids)
    for i in tqdm(range(len(rows.rows)), unit="row", disable=not sys.stderr.isatty()):
        row, anchors = rows.row(i)
        with torch.no_grad():
            hidden = target_features(forward, row, calls, GATE, model.device)
        evaluate_row(w, Item("eval", i, row, hidden, make_slots(row, anchors, w.device), None), sums)
    print(json.dumps(sums.metrics()))
    return 0


def generate():
    """`generate CKPT=... PROMPT=...`: one prompt, plain greedy beside speculative. -> exit code."""
    require(PROMPT.strip(), "PROMPT is empty: give the user's words")
    model, tokenizer, w = open_checkpoint()
    ids = decoding.prompt_ids(TARGET, tokenizer, PROMPT, model.device, CHAT_TEMPLATE_KWARGS)
    stop = decoding.prepare_decoding(model, tokenizer)
    plain, answer, produced, seconds = decoding.decode_both_ways(
        model, w, ids, stop, MAX_NEW_TOKENS, TEMPERATURE, SEED)
    plain_rate, rate = (len(x) / s for x, s in zip((plain, answer), seconds))
    equal = f"not compared, TEMPERATURE = {TEMPERATURE}"
    if TEMPERATURE == 0:
        equal = torch.equal(plain, answer) or decoding.explain_mismatch(model, ids, plain, answer)
    print(f"prompt: {PROMPT}\nplain greedy ({plain_rate:.1f} tokens/s): {tokenizer.decode(plain)}\n"
          f"speculative ({rate:.1f} tokens/s, {sum(produced) / max(1, len(produced)):.2f} tokens a pass): "
          f"{tokenizer.decode(answer)}\nequal: {equal}")
    return 0


def inspect(*words):
    """`inspect DATA=... [N]`: what the data chapter makes of the files, and N conversations. -> exit code."""
    require(len(words) <= 1 and all(w.isdecimal() for w in words),
         f"inspect {' '.join(words)}: beside NAME=VALUE it takes one number, of conversations to show")
    vocab = target_files.load_config(TARGET).get_text_config().vocab_size
    tokenizer = target_files.load_tokenizer(TARGET)
    inspect_data(read_conversations(DATA, tokenizer, "DATA", vocab), tokenizer, SEQ_LEN,
                 int(words[0] if words else 3))
    return 0


def devices():
    """`devices`: exit 0 when the devices of the constants exist, 3 (and why) when they don't."""
    missing = [d for d in TARGET_DEVICES + DRAFTER_DEVICES if d not in device_names()]
    if missing:
        print(f"devices {', '.join(missing)} of TARGET_DEVICES and DRAFTER_DEVICES don't exist here; "
              f"this machine has {', '.join(device_names())}")
    return 3 if missing else 0


MODES = {"train": train, "demo": demo, "eval": evaluate_checkpoint, "generate": generate, "inspect": inspect,
         "devices": devices}


def main(argv):
    """[mode] NAME=VALUE ... -> exit code."""
    mode, rest = (argv[0], argv[1:]) if argv and "=" not in argv[0] else ("train", argv)
    if {"-h", "--help"} & set(argv):
        return print(__doc__) or 0

    def start():
        settings.require_one_of("mode", mode, MODES)
        if mode == "demo":
            for name, value in DEMO.items():
                settings.require_one_of("a name in DEMO", name, settings.declared(THIS_MODULE))
                globals()[name] = value
        words = [word for word in rest if mode == "inspect" and "=" not in word]
        settings.override(THIS_MODULE, [word for word in rest if word not in words])
        check_settings()
        return MODES[mode](*words)

    return settings.user_errors_as_lines(start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

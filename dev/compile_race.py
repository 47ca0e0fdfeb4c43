"""Which ways of compiling in several threads survive? A table of fixes, and a storm of compiles.

    python dev/compile_race.py [NAME=VALUE ...]         e.g. DEVICES=cuda:0,cuda:1 TARGETS=4 FIXES=none,gate
    python dev/compile_race.py storm [NAME=VALUE ...]   e.g. DEVICES=cuda:0,cuda:0,cuda:0 COMPILES=200

table()              every (fix, with or without a new row length later, seed); exit code 1 iff `gate`, the
                     project's own way, failed
storm()              `gate`, then nothing at all as a control: every thread meets new shapes again and again
                     while the others run warm; exit code 1 iff `gate` failed, made fewer compiles than
                     COMPILES, or the control did not fail
  cold_run()         a fresh process with empty compile caches: a warm cache hides the race
    child()          Race: a thread per device, started at random moments, until all are done or one failed
      DrafterWorker  the project's own Drafter and row_loss on random rows
      TargetWorker   a small Qwen3.5-type model with random weights, its parts compiled as the trainer does

flex_attention has no backward on the CPU. There this tool alone drops flex's device check, compiles with the
backend aot_eager, and gives each drafter its own number of heads: one cache entry per thread, as GPUs have.
"""
import contextlib
import faulthandler
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import torch
from torch.utils.checkpoint import checkpoint

import flex_utils
import model_drafter as md
from dflash_trainer import settings
from dflash_trainer.checkpoints import commit
from dflash_trainer.compiled_target import CompiledParts
from dflash_trainer.errors import require
from dflash_trainer.features import TappedForward

MEANING = {  # of each fix
    "none": "nothing",
    "mainwarm": "one device's first step made in the main thread, before the threads start",
    "lockattn1": "a lock around each thread's first compiled call (a layer with its attention)",
    "reent": "checkpoint(use_reentrant=True) around the compiled calls: the contrast to noreent",
    "noreent": "checkpoint(use_reentrant=False) around the compiled calls",
    "lockfwd1": "a lock around each thread's first forward",
    "lockstep1": "a lock around each thread's first whole step",
    "lockstep1+barrier": "the same, and nobody goes on before all have made it",
    "gateonly": "flex_utils.Gate, but all threads call one code object, so share dynamo's list of its graphs",
    "gate": "flex_utils.Gate, and a code object for each thread: this project's way",
}

# -------------------------------------------------------------------------------------------------- settings

DEVICES: list[str] = ["cpu", "cpu", "cpu"]  # one drafter thread each; may repeat; all cpu or all cuda
FIXES: list[str] = list(MEANING)  # of the table
SEEDS: int = 3                 # runs of each (fix, new length or not): seeds 0, 1, ...
FIRST_SEED: int = 0            # where the seeds begin
GATE_SEEDS: int = 3            # `gate` with a new length: "never fails" takes more runs
STEPS: int = 16                # each thread makes at least so many and runs on until all have
NEW_LENGTH_AT: int = 8         # the first thread meets a row of twice the length at this step; 0: never
TARGETS: int = 0               # target threads beside the drafters, dealt over DEVICES
TIMEOUT_S: float = 60.0        # a run that takes longer hangs
# the storm
COMPILES: int = 1000           # over all processes
PROCESSES: int = 1             # at a time, each with all threads and caches of its own
STORM_TARGETS: int = 5         # target threads
STORM_S: float = 540.0         # ends earlier than COMPILES after so many seconds; it hangs 60 s later
NEW_SHAPE_SHARE: float = 0.25  # of a thread's steps; the rest repeats shapes that it knows
CONTROLS: int = 4              # control runs at most, until one fails; 0: the gate alone
# both
JITTER_S: float = 0.5          # thread i starts after a random 0 .. i * JITTER_S seconds
SWITCH_S: float = 1e-5         # Python's switch interval: at the usual 5 ms compiles starve warm threads
SEQ_LEN: int = 256             # context tokens of a row
NUM_ANCHORS: int = 8
LOSS_FORM: str = "checkpoint"  # or "fused", which is compiled on CUDA
OUT: str = ""                  # file for the log, besides stdout

THIS_MODULE = sys.modules[__name__]
TAPS = (0, 2)                  # of the targets' four layers
STORM_STRIDE = 16              # tokens between the lengths of two shapes


def check_settings():
    settings.require_positive(
        THIS_MODULE, "SEEDS", "GATE_SEEDS", "STEPS", "TIMEOUT_S", "COMPILES", "PROCESSES", "STORM_S",
        "NEW_SHAPE_SHARE", "SWITCH_S", "SEQ_LEN", "NUM_ANCHORS")
    gpus = {f"cuda:{i}" for i in range(torch.cuda.device_count())}
    is_cpu = set(DEVICES) == {"cpu"}
    require(DEVICES and (is_cpu or set(DEVICES) <= gpus),
            f"DEVICES = {DEVICES}: all cpu, or of the GPUs here: {', '.join(sorted(gpus)) or 'none'}")
    for fix in FIXES:
        settings.require_one_of("an entry of FIXES", fix, MEANING)
    require(0 <= NEW_LENGTH_AT < STEPS,
            f"NEW_LENGTH_AT = {NEW_LENGTH_AT}: 0 (never) or less than STEPS = {STEPS}")
    settings.require_one_of("LOSS_FORM", LOSS_FORM, ("checkpoint", "fused"))


def log(text):
    print(text, flush=True)
    if OUT:
        with open(OUT, "a") as file:
            file.write(text + "\n")


# --------------------------------------------------------------------------------------- child: one cold run

class Race:
    """What the threads share: the attention call, the fix, and how threads failed."""

    def __init__(self, mode, fix, new_length_at, began):
        self.is_storm = mode == "storm"
        self.fix = fix
        self.new_length_at = new_length_at
        self.began = began
        self.workers = []
        self.failures = {}                # name of a thread -> kind of its failure
        self.devices = [torch.device(name) for name in DEVICES]
        self.cuda = self.devices[0].type == "cuda"
        self.backend = "inductor" if self.cuda else "aot_eager"
        self.lock = threading.Lock()
        self.local = threading.local()
        self.barrier = threading.Barrier(len(DEVICES))
        self.gated = fix.startswith("gate")
        self.gate = flex_utils.Gate(threading.Lock())
        if self.gated:
            self.gate.forbid_compiles_outside()
        if self.cuda:
            self.attend, self.make_mask = flex_utils.make_attention(self.devices[0], True)
        else:
            self.attend = flex_utils.attend_flex()
            self.make_mask = flex_utils.block_mask
            self.allow_cpu()

    def allow_cpu(self):
        """Torch refuses on a CPU what the race needs: see the top of this file."""
        torch.set_num_threads(1)
        sys.modules["torch.nn.attention.flex_attention"]._validate_device = lambda *args, **kwargs: None
        if torch.version.cuda and not torch.cuda.is_available():
            # without a GPU CUDA builds swap the device guard in FakeTensorMode, unlocked, and segfault
            torch._C._ensureCUDADeviceGuardSet = lambda: None

    def compiled(self, function, owner):
        """torch.compile as the fix has it: with `gate` each thread owns its code objects."""
        return flex_utils.compiled(function, owner if self.fix == "gate" else "all", self.backend)

    def around_compiled(self, call):
        """A layer's compiled call, with the fixes that sit around it."""
        if self.fix in ("reent", "noreent"):
            return lambda *args: checkpoint(call, *args, use_reentrant=self.fix == "reent")
        if self.fix != "lockattn1":
            return call

        def locked_once(*args):
            is_warm = getattr(self.local, "warm", False)
            with nullcontext() if is_warm else self.lock:
                y = call(*args)
            self.local.warm = True
            return y
        return locked_once

    @contextlib.contextmanager
    def around_step(self, kind, is_first, *signature):
        if self.gated:
            with self.gate.first_step(), self.gate.work(kind, *signature):
                yield
        elif kind == "train" and is_first and "lockstep1" in self.fix:
            with self.lock:
                yield
        else:
            yield

    def goes_on(self):
        """Warm threads run on until all are done: they are the ones that die."""
        if self.failures:
            return False
        if self.is_storm:
            return compiles_so_far() < COMPILES / PROCESSES and time.time() - self.began < STORM_S
        return any(worker.done < STEPS for worker in self.workers)


def compiles_so_far():
    """Graphs that dynamo has handed to the backend in this process."""
    return torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)


class Worker:
    """A thread that makes steps; step(shape) runs a row of the shape-th size."""

    def __init__(self, race, index, name, device, seed):
        self.race = race
        self.index = index
        self.name = name
        self.device = device
        self.dtype = torch.bfloat16 if race.cuda else torch.float32
        self.generator = torch.Generator().manual_seed(1000 * seed + index)
        self.draws = random.Random(1000 * seed + index)
        self.delay = JITTER_S * index * self.draws.random()
        self.done = 0            # steps
        self.shapes = 0          # different ones so far
        self.first_s = None      # from the run's start to the end of the first step
        race.workers.append(self)

    def next_shape(self):
        if self.done == 0 or self.draws.random() < NEW_SHAPE_SHARE:
            return self.shapes
        return self.draws.randrange(self.shapes)

    def loop(self):
        race = self.race
        try:
            if race.cuda:
                torch.cuda.set_device(self.device)
            # the thread's own from torch 2.12 on; in a storm the limit must hold all of a thread's shapes
            flex_utils.worker_compile_settings(COMPILES if race.is_storm else len(race.workers))
            flex_utils.worker_memory_settings()
            time.sleep(self.delay)
            while race.goes_on():
                shape = self.next_shape()
                self.step(shape)
                self.shapes = max(self.shapes, shape + 1)
                self.done += 1
                if self.first_s is None:
                    self.first_s = round(time.time() - race.began)
            if race.cuda:
                torch.cuda.synchronize(self.device)
        except threading.BrokenBarrierError:
            pass  # another thread failed
        except BaseException as error:
            traceback.print_exc()
            race.failures[self.name] = kind_of(error)
            race.barrier.abort()


class DrafterWorker(Worker):
    def __init__(self, race, index, device, seed):
        super().__init__(race, index, f"drafter{index}", device, seed)
        heads = 2 if race.cuda else index + 1
        self.config = md.DrafterConfig(
            hidden_size=64, intermediate_size=128, num_layers=2, num_heads=2 * heads, num_kv_heads=heads,
            head_dim=16, vocab_size=256, block_size=4, mask_token_id=255, target_layer_ids=(0, 1),
            num_target_layers=4, layer_types=("sliding_attention", "full_attention"),
            sliding_window=SEQ_LEN // 4)
        self.drafter = md.Drafter(self.config, race.attend)
        self.drafter.init_weights(seed)
        self.drafter.to(device, self.dtype)
        for layer in self.drafter.layers:  # whole layers, as the trainer compiles them
            layer.forward = race.around_compiled(race.compiled(layer.forward, self.name))
        self.optimizer = torch.optim.AdamW(self.drafter.parameters())
        self.embed = torch.nn.Embedding(self.config.vocab_size, self.config.hidden_size)
        self.head = md.Head(torch.nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False))
        for frozen in (self.embed, self.head):
            frozen.requires_grad_(False).to(device, self.dtype)
        loss = md.CrossEntropy()
        if race.cuda:
            loss = md.CrossEntropy(lambda function: race.compiled(function, self.name))
        self.spec = md.LossSpec("decay", 4.0, LOSS_FORM, 16, loss)

    def next_shape(self):
        if self.race.is_storm:
            return super().next_shape()
        return int(self.index == 0 and 0 < self.done == self.race.new_length_at)

    def row(self, length):
        """A random Batch: two conversations, every token supervised."""
        c = self.config
        half = length // 2
        at = torch.arange(length)
        ids = torch.randint(c.vocab_size, (length,), generator=self.generator)
        anchors = torch.randperm(length, generator=self.generator)[:NUM_ANCHORS].sort().values
        width = len(c.target_layer_ids) * c.hidden_size
        target_hidden = torch.randn(1, length, width, generator=self.generator).to(self.dtype)
        start = at // half * half
        run_length = half - 1 - at % half
        blocks = md.block_arrays(start, run_length, anchors, NUM_ANCHORS, c.block_size, self.spec.chunk)
        tensors = [target_hidden, ids, at % half, *map(torch.from_numpy, blocks)]
        return md.Batch(*(tensor.to(self.device) for tensor in tensors))

    def step(self, shape):
        race = self.race
        is_first = self.done == 0
        length = SEQ_LEN + shape * (STORM_STRIDE if race.is_storm else SEQ_LEN)
        batch = self.row(length)
        with race.around_step("train", is_first, self.device, length):
            with race.lock if is_first and race.fix == "lockfwd1" else nullcontext():
                result = md.row_loss(
                    self.drafter, self.embed, self.head, batch, 0, race.make_mask, self.spec)
            result.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if is_first and race.fix == "lockstep1+barrier":
            race.barrier.wait()


class TargetWorker(Worker):
    """Must be made in the main thread: concurrent construction corrupts the process."""

    def __init__(self, race, index, device, seed):
        super().__init__(race, len(DEVICES) + index, f"target{index}", device, seed)
        from transformers import Qwen3_5TextConfig, Qwen3_5TextModel
        config = Qwen3_5TextConfig(
            vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, head_dim=64,
            num_attention_heads=4, num_key_value_heads=2, linear_num_key_heads=4, linear_num_value_heads=4,
            linear_key_head_dim=64, linear_value_head_dim=64)
        decoder = Qwen3_5TextModel(config).eval().requires_grad_(False).to(device, self.dtype)
        owner = self.name if race.fix == "gate" else "all"
        kernel = None if race.cuda else delta_rule_on_cpu
        # dynamic=False, unlike the trainer's: every new shape is to be compiled
        self.parts = CompiledParts(decoder, owner, print, race.backend, dynamic=False, kernel=kernel)
        self.n_kinds = len(self.parts.parts)
        # its checks and captures run alone in the gate; without one they would fail by themselves
        self.forward = TappedForward(decoder, TAPS, print, self.parts) if race.gated else decoder

    def size(self, shape):
        """-> (batch, length)"""
        if self.race.is_storm:
            return 1 + shape % 3, 64 + STORM_STRIDE * shape
        return ((2, 128), (1, 256), (3, 64))[shape % 3]

    def next_shape(self):
        return super().next_shape() if self.race.is_storm else self.done % 3

    @torch.no_grad()
    def step(self, shape):
        size = self.size(shape)
        ids = torch.randint(256, size, generator=self.generator).to(self.device)
        with self.race.around_step("target", self.done == 0, self.device, size):
            self.forward(ids)
        if len(self.parts.parts) < self.n_kinds:  # a crash while compiling would be one reason
            raise RuntimeError(f"only {', '.join(self.parts.parts) or 'no parts'} remain compiled")


def delta_rule_on_cpu(query, key, value, **how):
    """Stands in for flash-linear-attention's kernel, which needs a GPU."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule
    return torch_chunk_gated_delta_rule(query, key, value, **how)


def kind_of(error):
    text = "".join(traceback.format_exception(error))  # with its causes
    if "using FX to symbolically trace" in text:
        return "FX crash"
    if "ran uncompiled (dense)" in text:
        return "dense fallback"
    first_line = (str(error).strip() or "-").splitlines()[0]
    return f"other: {type(error).__name__}: {first_line[:80]}"


def child(mode, fix, new_length_at, seed, began):
    """One run in this process, started at time() `began`; the last line says how every thread ended."""
    seed = int(seed)
    began = float(began)
    sys.setswitchinterval(SWITCH_S)
    faulthandler.enable()
    # where it hangs, before cold_run() kills it; imports alone may take many seconds
    faulthandler.dump_traceback_later(max(1.0, 0.95 * time_limit(mode) - (time.time() - began)))
    torch.manual_seed(seed)
    race = Race(mode, fix, int(new_length_at), began)
    for i, device in enumerate(race.devices):
        DrafterWorker(race, i, device, seed)
    for i in range(STORM_TARGETS if race.is_storm else TARGETS):
        TargetWorker(race, i, race.devices[i % len(DEVICES)], seed)
    if fix == "mainwarm":
        flex_utils.worker_compile_settings(len(race.workers))
        flex_utils.worker_memory_settings()
        race.workers[0].step(0)
    threads = [threading.Thread(target=worker.loop, name=worker.name) for worker in race.workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result = {
        "failures": race.failures,
        "steps": [worker.done for worker in race.workers],
        "shapes": [worker.shapes for worker in race.workers],
        "first_s": [worker.first_s for worker in race.workers],
        "compiles": compiles_so_far(),
        "seconds": round(time.time() - began, 1),
        "fla": "fla" in sys.modules,
        "cards": [torch.cuda.get_device_name(device) if race.cuda else "CPU" for device in race.devices],
    }
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)  # a crash can leave behind what an orderly end would wait for


# ------------------------------------------------------------------------------------------------ the parent

def time_limit(mode):
    return STORM_S + 60 if mode == "storm" else TIMEOUT_S


def cold_run(mode, fix, new_length_at, seed):
    """One run in a fresh process with empty caches -> child's result, with `fix`, `later` (was there to be a
    new length?) and `text` (all that it printed)."""
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        output = stack.enter_context(open(f"{cache}/log", "w+", errors="replace"))
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
        words = [mode, fix, new_length_at, seed, time.time()]
        command = [sys.executable, __file__, "child", *map(str, words), *settings.as_words(THIS_MODULE)]
        process = subprocess.Popen(command, env={**os.environ, **caches}, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        with suppress(subprocess.TimeoutExpired):
            process.wait(time_limit(mode))
        hangs = process.poll() is None
        with suppress(ProcessLookupError, PermissionError):  # a hanging child; inductor's workers
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        text = output.read()
    run = {"failures": {"process": "hang" if hangs else f"other: ended with status {process.returncode}"}}
    for line in text.splitlines():
        if line.startswith("RESULT "):
            run = json.loads(line.removeprefix("RESULT "))
    return {**run, "fix": fix, "later": new_length_at > 0, "text": text}


def log_surprise(run):
    """The end of what a run printed, unless it ended well or in the crash that is expected."""
    if set(run["failures"].values()) - {"FX crash"}:
        print(run["text"][-3000:], file=sys.stderr)


def environment(runs, n_targets):
    """What it was measured with."""
    first = next((run for run in runs if "cards" in run), {"cards": DEVICES, "fla": False})
    counts = Counter(zip(DEVICES, first["cards"]))
    where = ", ".join(f"{count} on {device} ({card})" for (device, card), count in counts.items())
    fla = f" with{'' if first['fla'] else 'out'} flash-linear-attention" if n_targets else ""
    return (f"torch {torch.__version__.split('+')[0]}; drafter threads: {where}; target threads: "
            f"{n_targets}{fla}; commit {commit() or 'none'}")


def table_of(runs):
    """Markdown: failed runs / runs of each fix."""
    lines = ["| fix | crashes/runs, no new length | crashes/runs, new length later | how the runs ended |",
             "|---|---|---|---|"]
    for fix in FIXES:
        of_fix = [run for run in runs if run["fix"] == fix]
        cells = []
        for later in (False, True):
            failed = [bool(run["failures"]) for run in of_fix if run["later"] == later]
            cells.append(f"{sum(failed)}/{len(failed)}")
        ends = Counter()
        for run in of_fix:
            ends.update(set(run["failures"].values()) or {"ok"})  # each kind once per run
        how = ", ".join(f"{kind.replace('|', '/')} x{n}" for kind, n in ends.most_common())
        lines.append(f"| `{fix}`: {MEANING[fix]} | {cells[0]} | {cells[1]} | {how} |")
    return "\n".join(lines)


def table():
    runs = []
    for fix, new_length_at in itertools.product(FIXES, dict.fromkeys((0, NEW_LENGTH_AT))):
        seeds = GATE_SEEDS if fix == "gate" and new_length_at else SEEDS
        for seed in range(FIRST_SEED, FIRST_SEED + seeds):
            began = time.monotonic()
            run = cold_run("race", fix, new_length_at, seed)
            runs.append(run)
            when = f"new length at step {new_length_at}" if new_length_at else "no new length"
            log(f"{fix}, {when}, seed {seed}: {run['failures'] or 'ok'}, steps {run.get('steps')}, "
                f"first steps ended after {run.get('first_s')} s, all {time.monotonic() - began:.1f} s")
            log_surprise(run)
    log(f"\n{environment(runs, TARGETS)}\n\n{table_of(runs)}")
    return int(any(run["fix"] == "gate" and run["failures"] for run in runs))


def log_storm(fix, seed, run):
    log(f"{fix}, seed {seed}: {run['failures'] or 'ok'}, {run.get('compiles')} compiles in "
        f"{run.get('seconds')} s; by thread, shapes {run.get('shapes')}, steps {run.get('steps')}")
    log_surprise(run)


def storm():
    seeds = range(FIRST_SEED, FIRST_SEED + PROCESSES)
    with ThreadPoolExecutor(PROCESSES) as pool:
        runs = list(pool.map(lambda seed: cold_run("storm", "gate", 0, seed), seeds))
    for seed, run in zip(seeds, runs):
        log_storm("gate", seed, run)
    failed = sum(bool(run["failures"]) for run in runs)
    compiles = sum(run.get("compiles", 0) for run in runs)
    controls = []
    while len(controls) < CONTROLS and not any(run["failures"] for run in controls):
        controls.append(cold_run("storm", "none", 0, FIRST_SEED + len(controls)))
        log_storm("none", FIRST_SEED + len(controls) - 1, controls[-1])
    log(f"\n{environment(runs, STORM_TARGETS)}\n"
        f"gate: {compiles} compiles in {PROCESSES} processes, {failed} failed")
    if CONTROLS:
        n_failed = sum(bool(run["failures"]) for run in controls)
        log(f"without it: {n_failed} of {len(controls)} runs failed")
    is_proof = not CONTROLS or any(run["failures"] for run in controls)
    return int(failed > 0 or compiles < COMPILES or not is_proof)


def start(mode="table", *words):
    if mode == "child":
        child(*words)
    require(not words, f"{' '.join(words)}: settings are given as NAME=VALUE")
    settings.require_one_of("mode", mode, ("table", "storm"))
    check_settings()
    log(" ".join(settings.as_words(THIS_MODULE)))
    return storm() if mode == "storm" else table()


def main(argv):
    return settings.run_program(THIS_MODULE, start, argv, positional=6)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Which ways of compiling flex_attention in several threads of one process survive? Prints the README's table.

    python tools/compile_race.py [NAME=VALUE ...]                  three threads on the CPU
    python tools/compile_race.py DEVICES=cuda:0,cuda:1 OUT=race.txt
    python tools/compile_race.py DEVICES=cuda:0,cuda:0,cuda:0 TARGETS=4 FIXES=none,gate

main()                 every (fix, with or without a new row length later, seed)
  one_run()            a fresh process with empty compile caches (a warm cache hides the race), killed at TIMEOUT_S
    child()            Race: one thread a device, started at random moments, until all made STEPS steps or one failed
      DrafterWorker    the project's own Drafter and row_loss on random rows
      TargetWorker     a small Qwen3.5-type model with random weights (TARGETS of them)
table()                failed runs / runs; the exit status is 1 iff `gate`, the project's own way, failed

flex_attention has no backward on the CPU. There this tool alone drops flex's device check, compiles with the
backend aot_eager, and gives each thread its own number of heads: one cache entry a thread, as GPUs have.
"""
import ast
import copy
import faulthandler
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from flex_utils import Gate, attend_flex, block_mask, make_attention, worker_compile_settings  # noqa: E402
from model_drafter import Drafter, DrafterConfig, Head, LossSpec, row_loss, slots_of  # noqa: E402

MEANING = {  # fix: what it does
    "none": "nothing",
    "mainwarm": "one device's first step made in the main thread, before the threads start",
    "lockattn1": "a lock around each thread's first attention call",
    "reent": "checkpoint(use_reentrant=True) around the compiled call: the contrast to noreent",
    "noreent": "checkpoint(use_reentrant=False) around the compiled call",
    "lockfwd1": "a lock around each thread's first forward",
    "lockstep1": "a lock around each thread's first whole step",
    "lockstep1+barrier": "the same, and nobody goes on before all have made it",
    "gate": "flex_utils.Gate, this project's way",
}
_not_settings = set(globals())

# -------------------------------------------------------------------------------------------------- settings

DEVICES = ["cpu", "cpu", "cpu"]  # one drafter thread each; a device may repeat; all cpu or all cuda
FIXES = list(MEANING)
SEEDS = 3                 # runs of each (fix, new length or not): seeds 0, 1, ...
GATE_SEEDS = 3            # the same for `gate` with a new length: "never fails" takes more runs than "fails"
STEPS = 16                # each thread makes at least so many and runs on until all have
NEW_LENGTH_AT = 8         # the first thread meets a row of twice the length at this step; 0 = never
TARGETS = 0               # target threads beside the drafters, dealt over DEVICES
TIMEOUT_S = 60.0          # a run that takes longer hangs
JITTER_S = 0.5            # thread i starts after a random 0 .. i * JITTER_S seconds
SWITCH_S = 1e-5           # Python's switch interval: at the usual 5 ms a compile starves the warm threads
SEQ_LEN = 256             # context tokens of a row
NUM_ANCHORS = 8
BLOCK_SIZE = 4
LOSS_FORM = "checkpoint"  # or "fused", which is compiled on CUDA
OUT = ""                  # file for the log, besides stdout

SETTINGS = sorted(name for name in set(globals()) - _not_settings if name.isupper())


def override(words):
    """NAME=VALUE: strings are raw text, lists `a,b` or a Python literal, the rest Python literals."""
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in SETTINGS:
            raise SystemExit(f"compile_race: {word}: no such setting; there are {', '.join(SETTINGS)}")
        kind = type(globals()[name])
        if kind is str or (kind is list and not text.startswith("[")):
            value = text if kind is str else text.split(",")
        else:
            try:
                value = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                value = None
            value = float(value) if kind is float and type(value) is int else value
        if type(value) is not kind:
            raise SystemExit(f"compile_race: {word}: must be of type {kind.__name__}")
        globals()[name] = value


def check_settings():
    kinds = {name.partition(":")[0] if re.fullmatch(r"cpu|cuda(:\d+)?", str(name)) else name for name in DEVICES}
    gpus = {int(name.partition(":")[2] or 0) for name in DEVICES} if kinds == {"cuda"} else set()
    for wrong, name, rule in (
            (kinds not in ({"cpu"}, {"cuda"}), "DEVICES", "all cpu or all cuda"),
            (gpus - set(range(torch.cuda.device_count())), "DEVICES", "GPUs that this machine has"),
            (not FIXES or set(FIXES) - set(MEANING), "FIXES", f"some of {', '.join(MEANING)}"),
            (not 0 <= NEW_LENGTH_AT < STEPS, "NEW_LENGTH_AT", f"0 (never) or 1..{STEPS - 1}, before STEPS"),
            (LOSS_FORM not in ("checkpoint", "fused"), "LOSS_FORM", "checkpoint or fused")):
        if wrong:
            raise SystemExit(f"compile_race: {name}={globals()[name]}: must be {rule}")


# -------------------------------------------------------------------------------------------- child: the fixes


class Race:
    """What the threads share: the compiled attention call, the fix, and whether one failed."""

    def __init__(self, fix, new_length_at):
        self.fix, self.new_length_at = fix, new_length_at
        self.devices = [torch.device(name) for name in DEVICES]
        self.cuda = self.devices[0].type == "cuda"
        self.lock, self.local = threading.Lock(), threading.local()
        self.barrier, self.gate = threading.Barrier(len(DEVICES)), Gate(threading.Lock())
        if fix == "gate":
            self.gate.forbid_compiles_outside()
        attend, self.make_mask = attend_flex(), block_mask
        if self.cuda:
            attend, self.make_mask = make_attention(self.devices[0], True)
        self.compiled = torch.compile(attend, backend="inductor" if self.cuda else "aot_eager", dynamic=False)
        self.failed, self.workers = threading.Event(), []

    def attend(self, q, k, v, mask):
        """The drafter's attention call, with the fixes that sit around it."""
        if self.fix in ("reent", "noreent"):
            return checkpoint(self.compiled, q, k, v, mask, use_reentrant=self.fix == "reent")
        if self.fix != "lockattn1" or getattr(self.local, "warm", False):
            return self.compiled(q, k, v, mask)
        with self.lock:
            y = self.compiled(q, k, v, mask)
        self.local.warm = True
        return y

    @contextmanager
    def around_step(self, kind, first, *signature):
        """Only the gate knows of targets: the other fixes are the usual advice for training threads."""
        if self.fix == "gate":
            with self.gate.first_step(), self.gate.work(kind, *signature):
                yield
        else:
            with self.lock if kind == "train" and first and "lockstep1" in self.fix else nullcontext():
                yield

    def over(self):
        return self.failed.is_set() or all(worker.done >= STEPS for worker in self.workers)


def cpu_stand_ins():
    """Torch refuses on a CPU what the race needs: see the top of this file."""
    torch.set_num_threads(1)
    sys.modules["torch.nn.attention.flex_attention"]._validate_device = lambda *args, **kwargs: None
    if torch.version.cuda and not torch.cuda.is_available():
        # a CUDA build without a GPU swaps the device guard in FakeTensorMode.__enter__, unlocked, and segfaults
        # beside other threads: the missing GPU's doing, not the race's
        torch._C._ensureCUDADeviceGuardSet = lambda: None


# ------------------------------------------------------------------------------------------ child: the threads


class Worker:
    def __init__(self, race, index, name, device, seed):
        self.race, self.index, self.name, self.device = race, index, name, device
        self.dtype = torch.bfloat16 if race.cuda else torch.float32
        self.generator = torch.Generator().manual_seed(1000 * seed + index)
        self.delay = random.Random(f"{seed} {name}").uniform(0, JITTER_S * index)
        self.done, self.error = 0, None
        race.workers.append(self)

    def loop(self):
        race = self.race
        try:
            if race.cuda:
                torch.cuda.set_device(self.device)
            worker_compile_settings(len(race.workers))  # in the thread: from torch 2.12 on they are the thread's
            time.sleep(self.delay)
            while not race.over():  # whoever is done runs on: warm threads are what a compile elsewhere kills
                self.step(self.done)
                self.done += 1
            if race.cuda:
                torch.cuda.synchronize(self.device)
        except threading.BrokenBarrierError:
            pass  # another thread failed
        except BaseException as error:
            self.error = error
            race.failed.set()
            race.barrier.abort()


class DrafterWorker(Worker):
    def __init__(self, race, index, device, seed):
        super().__init__(race, index, f"drafter{index}", device, seed)
        heads = 2 if race.cuda else index + 1
        c = self.config = DrafterConfig(64, 128, 2, 2 * heads, heads, 16, 256, BLOCK_SIZE, 255, (0, 1), 4,
                                        ("sliding_attention", "full_attention"), SEQ_LEN // 4)
        self.drafter = Drafter(c, race.attend)
        self.drafter.init_weights(seed)
        self.drafter.to(device, self.dtype)
        self.optimizer = torch.optim.AdamW(self.drafter.parameters())
        self.embed = torch.nn.Embedding(c.vocab_size, c.hidden_size)
        self.head = Head(torch.nn.Linear(c.hidden_size, c.vocab_size, bias=False))
        for frozen in (self.embed, self.head):
            frozen.requires_grad_(False).to(device, self.dtype)
        self.spec = LossSpec("decay", 4.0, LOSS_FORM, 16, race.cuda)

    def row(self, length):
        """Random target_hidden (1, S, L*D) and Slots: two conversations, every token supervised."""
        c, half, at = self.config, length // 2, torch.arange(length)
        ids = torch.randint(c.vocab_size, (length,), generator=self.generator)
        anchors = torch.randperm(length, generator=self.generator)[:NUM_ANCHORS].sort().values
        hidden = torch.randn(1, length, len(c.target_layer_ids) * c.hidden_size, generator=self.generator)
        return hidden.to(self.device, self.dtype), slots_of(
            ids, at % half, at // half * half, anchors, half - 1 - at % half, NUM_ANCHORS, c.block_size,
            self.spec.chunk, self.device)

    def step(self, n):
        race, first = self.race, n == 0
        length = 2 * SEQ_LEN if self.index == 0 and 0 < n == race.new_length_at else SEQ_LEN
        hidden, slots = self.row(length)
        with race.around_step("train", first, self.device, length):
            with race.lock if first and race.fix == "lockfwd1" else nullcontext():
                result = row_loss(self.drafter, self.embed, self.head, hidden, slots, race.make_mask, self.spec)
            result.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if first and race.fix == "lockstep1+barrier":
            race.barrier.wait()


class TargetWorker(Worker):
    SHAPES = (2, 128), (1, 256), (3, 64)  # (batch, length), in turn

    def __init__(self, race, index, model, device, seed):
        super().__init__(race, len(DEVICES) + index, f"target{index}", device, seed)
        self.model = model.to(device, self.dtype)

    @torch.no_grad()
    def step(self, n):
        shape = self.SHAPES[n % len(self.SHAPES)]
        ids = torch.randint(256, shape, generator=self.generator).to(self.device)
        with self.race.around_step("target", n == 0, self.device, shape):
            self.model(ids, use_cache=False)


def make_targets():
    """Replicas of one small hybrid target, made in the main thread: concurrent loading corrupts the process."""
    if not TARGETS:
        return []
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    target = Qwen3_5ForCausalLM(Qwen3_5TextConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=64, linear_value_head_dim=64)).eval()
    return [copy.deepcopy(target) for _ in range(TARGETS)]


def kind_of(error):
    text = "".join(traceback.format_exception(error))  # with its causes
    if "using FX to symbolically trace" in text:
        return "FX crash"
    if "ran uncompiled (dense)" in text:
        return "dense fallback"
    return f"other: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:80]}"


def child(fix, new_length_at, seed):
    """One run in this process; the last line says how every thread ended."""
    sys.setswitchinterval(SWITCH_S)
    faulthandler.enable()
    faulthandler.dump_traceback_later(0.9 * TIMEOUT_S)  # where it hangs, before one_run() kills it
    torch.manual_seed(seed)
    race = Race(fix, new_length_at)
    if not race.cuda:
        cpu_stand_ins()
    for i, device in enumerate(race.devices):
        DrafterWorker(race, i, device, seed)
    for i, model in enumerate(make_targets()):
        TargetWorker(race, i, model, race.devices[i % len(DEVICES)], seed)
    if fix == "mainwarm":
        worker_compile_settings(len(race.workers))
        race.workers[0].step(0)
    threads = [threading.Thread(target=worker.loop, name=worker.name) for worker in race.workers]
    for act in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            act(thread)
    failed = {worker.name: worker.error for worker in race.workers if worker.error}
    for error in failed.values():
        traceback.print_exception(error)
    print("RESULT " + json.dumps({
        "kinds": {name: kind_of(error) for name, error in failed.items()},
        "steps": [worker.done for worker in race.workers],
        "devices": [torch.cuda.get_device_name(d) if race.cuda else "CPU" for d in race.devices]}), flush=True)
    os._exit(0)  # a crash can leave behind what an orderly end would wait for


# -------------------------------------------------------------------------------------------- parent: the runs


class Run(NamedTuple):
    fix: str
    new_length: bool
    kinds: dict      # thread: how it failed; empty = ok
    result: dict     # what the child said; empty when it said nothing
    seconds: float
    stderr: str


def one_run(fix, new_length_at, seed):
    """One cold run in a fresh process -> Run."""
    what = json.dumps([{name: globals()[name] for name in SETTINGS}, fix, new_length_at, seed])
    begin, kinds, result = time.monotonic(), {}, {}
    with tempfile.TemporaryDirectory(prefix="compile_race_", ignore_cleanup_errors=True) as cache:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
        process = subprocess.Popen([sys.executable, __file__, "child", what], env=env, text=True, errors="replace",
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            kinds = {"process": "hang"}
        try:  # the child when it hangs, and inductor's compile workers when they outlived it
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        if kinds:
            out, err = process.communicate()
    lines = [line[7:] for line in out.splitlines() if line.startswith("RESULT ")]
    if not kinds:
        result = json.loads(lines[-1]) if lines else {}
        kinds = result.get("kinds", {"process": f"other: ended with status {process.returncode}"})
    return Run(fix, new_length_at > 0, kinds, result, time.monotonic() - begin, err)


def head(runs):
    """What the table was measured with."""
    names = next((run.result["devices"] for run in runs if run.result), DEVICES)
    where = ", ".join(f"{n} on {device} ({name})" for (device, name), n in Counter(zip(DEVICES, names)).items())
    fla = "with" if importlib.util.find_spec("fla") else "without"
    git = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return (f"torch {torch.__version__.split('+')[0]}; drafter threads: {where}; target threads: {TARGETS}"
            f"{f' ({fla} flash-linear-attention)' if TARGETS else ''}; commit {git.stdout.strip() or 'none'}")


def table(runs):
    def cell(fix, new_length):
        these = [run for run in runs if (run.fix, run.new_length) == (fix, new_length)]
        return f"{sum(bool(run.kinds) for run in these)}/{len(these)}"

    def kinds(fix):  # each kind once a run
        count = Counter(kind for run in runs if run.fix == fix for kind in set(run.kinds.values()) or {"ok"})
        return ", ".join(f"{kind.replace('|', '/')} x{n}" for kind, n in count.most_common())
    lines = ["| fix | crashes/runs, no new length | crashes/runs, new length later | how runs ended |",
             "|---|---|---|---|"]
    return "\n".join(lines + [f"| `{fix}`: {MEANING[fix]} | {cell(fix, False)} | {cell(fix, True)} | {kinds(fix)} |"
                              for fix in FIXES])


def main(words):
    override(words)
    check_settings()
    runs, log = [], open(OUT, "w", buffering=1) if OUT else None

    def say(text):
        print(text, file=log) if log else None
        print(text, flush=True)
    say(" ".join(f"{name}={globals()[name]}" for name in SETTINGS if name != "OUT"))
    for fix in FIXES:
        for at in dict.fromkeys((0, NEW_LENGTH_AT)):
            for seed in range(GATE_SEEDS if fix == "gate" and at else SEEDS):
                run = one_run(fix, at, seed)
                runs.append(run)
                say(f"{fix}, {f'new length at step {at}' if at else 'no new length'}, seed {seed}: "
                    f"{run.kinds or 'ok'}, steps {run.result.get('steps')}, {run.seconds:.1f} s")
                if any(kind != "FX crash" for kind in run.kinds.values()):
                    print(run.stderr[-4000:], file=sys.stderr)
    say(f"\n{head(runs)}\n\n{table(runs)}")
    sys.exit(int(any(run.fix == "gate" and run.kinds for run in runs)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        settings, *what = json.loads(sys.argv[2])
        globals().update(settings)
        child(*what)
    else:
        main(sys.argv[1:])

"""Which ways of compiling flex_attention in several threads survive? Prints the README's table.

    python dev/compile_race.py [NAME=VALUE ...]      e.g. DEVICES=cuda:0,cuda:1 TARGETS=4 FIXES=none,gate

main()               every (fix, with or without a new row length later, seed)
  one_run()          a fresh process with empty compile caches: a warm cache hides the race
    child()          Race: a thread a device, started at random moments, until all made STEPS or one failed
      DrafterWorker  the project's own Drafter and row_loss on random rows
      TargetWorker   a small Qwen3.5-type model with random weights (TARGETS of them)
report()             failed runs / runs; the exit status is 1 iff `gate`, the project's own way, failed

flex_attention has no backward on the CPU. There this tool alone drops flex's device check, compiles with the
backend aot_eager, and gives each thread its own number of heads: one cache entry a thread, as GPUs have.
"""
import ast
import faulthandler
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch.utils.checkpoint import checkpoint

_here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(_here))
from flex_utils import (  # noqa: E402
    Gate, attend_flex, block_mask, compiled, make_attention, worker_compile_settings, worker_memory_settings)
from model_drafter import (  # noqa: E402
    Drafter, DrafterConfig, Head, LossSpec, ce_and_grad, row_loss, Batch, block_arrays)

meaning = {  # of each fix
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

DEVICES = ["cpu", "cpu", "cpu"]  # one drafter thread each; a device may repeat; all cpu or all cuda
FIXES = list(meaning)
SEEDS = 3                 # runs of each (fix, new length or not): seeds 0, 1, ...
FIRST_SEED = 0            # where the seeds begin
GATE_SEEDS = 3            # the same for `gate` with a new length: "never fails" takes more runs than "fails"
STEPS = 16                # each thread makes at least so many and runs on until all have
NEW_LENGTH_AT = 8         # the first thread meets a row of twice the length at this step; 0 = never
TARGETS = 0               # target threads beside the drafters, dealt over DEVICES
TIMEOUT_S = 60.0          # a run that takes longer hangs
JITTER_S = 0.5            # thread i starts after a random 0 .. i * JITTER_S seconds
SWITCH_S = 1e-5           # Python's switch interval: at the usual 5 ms a compile starves the warm threads
SEQ_LEN = 256             # context tokens of a row
NUM_ANCHORS = 8
LOSS_FORM = "checkpoint"  # or "fused", which is compiled on CUDA
OUT = ""                  # file for the log, besides stdout

SETTINGS = [name for name in globals() if name.isupper()]


def value_of(text, kind):
    """Strings are raw text, lists `a,b` or a literal, the rest literals; None = not of that type."""
    if kind is str or (kind is list and not text.startswith("[")):
        return text if kind is str else text.split(",")
    with suppress(ValueError, SyntaxError):
        value = ast.literal_eval(text)
        return float(value) if (kind, type(value)) == (float, int) else value if type(value) is kind else None


def override(words):
    def require(ok, text):
        if not ok:
            raise SystemExit(f"compile_race: {text}")
    for name, equals, text in (word.partition("=") for word in words):
        require(equals and name in SETTINGS, f"unknown setting {name!r}; there are {', '.join(SETTINGS)}")
        kind = type(globals()[name])
        globals()[name] = value_of(text, kind)
        require(globals()[name] is not None, f"{name}={text}: expected {kind.__name__}")
    gpus = {f"cuda:{i}" for i in range(torch.cuda.device_count())}
    require(DEVICES and set(DEVICES) in ({"cpu"}, gpus & set(DEVICES)), f"DEVICES={DEVICES}: cpu, or of {gpus}")
    require(FIXES and set(FIXES) <= set(meaning), f"FIXES={FIXES}: some of {', '.join(meaning)}")
    require(0 <= NEW_LENGTH_AT < STEPS, f"NEW_LENGTH_AT={NEW_LENGTH_AT}: 0 (never) or less than STEPS={STEPS}")
    require(LOSS_FORM in ("checkpoint", "fused"), f"LOSS_FORM={LOSS_FORM}: checkpoint or fused")


# --------------------------------------------------------------------------------------- child: one cold run


class Race:
    """What the threads share: the attention call, the fix, and how threads failed."""

    def __init__(self, fix, new_length_at, began):
        self.fix, self.new_length_at, self.began, self.workers = fix, new_length_at, began, []
        self.devices = [torch.device(name) for name in DEVICES]
        self.cuda = self.devices[0].type == "cuda"
        self.lock, self.local, self.kinds = threading.Lock(), threading.local(), {}  # thread: how it failed
        self.barrier, self.gate = threading.Barrier(len(DEVICES)), Gate(threading.Lock())
        self.gated = fix.startswith("gate")
        if self.gated:
            self.gate.forbid_compiles_outside()
        self.attend, self.make_mask = attend_flex(), block_mask
        if self.cuda:
            self.attend, self.make_mask = make_attention(self.devices[0], True)
        else:  # torch refuses on a CPU what the race needs: see the top of this file
            torch.set_num_threads(1)
            sys.modules["torch.nn.attention.flex_attention"]._validate_device = lambda *args, **kwargs: None
        if torch.version.cuda and not torch.cuda.is_available():
            # without a GPU CUDA builds swap the device guard in FakeTensorMode, unlocked, and segfault
            torch._C._ensureCUDADeviceGuardSet = lambda: None

    def fixed(self, compiled):
        """A layer's compiled call, with the fixes that sit around it."""
        if self.fix in ("reent", "noreent"):
            return lambda *args: checkpoint(compiled, *args, use_reentrant=self.fix == "reent")

        def locked_once(*args):
            with nullcontext() if getattr(self.local, "warm", False) else self.lock:
                y = compiled(*args)
            self.local.warm = True
            return y
        return locked_once if self.fix == "lockattn1" else compiled

    @contextmanager
    def around_step(self, kind, first, *signature):
        locked = kind == "train" and first and "lockstep1" in self.fix
        with self.gate.first_step() if self.gated else self.lock if locked else nullcontext():
            with self.gate.work(kind, *signature) if self.gated else nullcontext():
                yield


class Worker:
    def __init__(self, race, index, name, device, seed):
        self.race, self.index, self.name, self.device = race, index, name, device
        self.dtype = torch.bfloat16 if race.cuda else torch.float32
        self.generator = torch.Generator().manual_seed(1000 * seed + index)
        self.delay = JITTER_S * index * float(torch.rand((), generator=self.generator))
        self.done, self.first_s = 0, None  # seconds from the run's start to the end of the first step
        race.workers.append(self)

    def loop(self):
        race = self.race
        try:
            if race.cuda:
                torch.cuda.set_device(self.device)
            worker_compile_settings(len(race.workers))  # the thread's own from torch 2.12 on
            worker_memory_settings()
            time.sleep(self.delay)
            while not race.kinds and any(w.done < STEPS for w in race.workers):  # the warm run on: they die
                self.step(self.done)
                self.done += 1
                self.first_s = self.first_s or round(time.time() - race.began)
            if race.cuda:
                torch.cuda.synchronize(self.device)
        except threading.BrokenBarrierError:
            pass  # another thread failed
        except BaseException as error:
            traceback.print_exc()
            race.kinds[self.name] = kind_of(error)
            race.barrier.abort()


class DrafterWorker(Worker):
    def __init__(self, race, index, device, seed):
        super().__init__(race, index, f"drafter{index}", device, seed)
        heads = 2 if race.cuda else index + 1
        c = self.config = DrafterConfig(64, 128, 2, 2 * heads, heads, 16, 256, 4, 255, (0, 1), 4,
                                        ("sliding_attention", "full_attention"), SEQ_LEN // 4)
        self.drafter = Drafter(c, race.attend)
        self.drafter.init_weights(seed)
        self.drafter.to(device, self.dtype)
        owner, backend = self.name if race.fix == "gate" else "all", "inductor" if race.cuda else "aot_eager"
        for layer in self.drafter.layers:  # whole layers, as the trainer compiles them
            layer.forward = race.fixed(compiled(layer.forward, owner, backend))
        self.optimizer = torch.optim.AdamW(self.drafter.parameters())
        self.embed = torch.nn.Embedding(c.vocab_size, c.hidden_size)
        self.head = Head(torch.nn.Linear(c.hidden_size, c.vocab_size, bias=False))
        for frozen in (self.embed, self.head):
            frozen.requires_grad_(False).to(device, self.dtype)
        loss = compiled(ce_and_grad, owner) if race.cuda else ce_and_grad
        self.spec = LossSpec("decay", 4.0, LOSS_FORM, 16, loss)

    def row(self, length):
        """A random Batch: two conversations, every token supervised."""
        c, half, at = self.config, length // 2, torch.arange(length)
        ids = torch.randint(c.vocab_size, (length,), generator=self.generator)
        anchors = torch.randperm(length, generator=self.generator)[:NUM_ANCHORS].sort().values
        hidden = torch.randn(1, length, len(c.target_layer_ids) * c.hidden_size, generator=self.generator)
        blocks = block_arrays(at // half * half, half - 1 - at % half, anchors, NUM_ANCHORS, c.block_size,
                              self.spec.chunk)
        tensors = [ids, at % half, *map(torch.from_numpy, blocks)]
        return Batch(hidden.to(self.device, self.dtype), *(tensor.to(self.device) for tensor in tensors))

    def step(self, n):
        race, first = self.race, n == 0
        length = 2 * SEQ_LEN if self.index == 0 and 0 < n == race.new_length_at else SEQ_LEN
        batch = self.row(length)
        with race.around_step("train", first, self.device, length):
            with race.lock if first and race.fix == "lockfwd1" else nullcontext():
                row = row_loss(self.drafter, self.embed, self.head, batch, 0, race.make_mask, self.spec)
            row.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if first and race.fix == "lockstep1+barrier":
            race.barrier.wait()


class TargetWorker(Worker):
    SHAPES = (2, 128), (1, 256), (3, 64)  # (batch, length), in turn

    def __init__(self, race, index, device, seed):
        """A small hybrid model. Runs in the main thread: concurrent construction corrupts the process."""
        super().__init__(race, len(DEVICES) + index, f"target{index}", device, seed)
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
        config = Qwen3_5TextConfig(
            vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, head_dim=64,
            num_attention_heads=4, num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=64, linear_value_head_dim=64)
        self.model = Qwen3_5ForCausalLM(config).eval().to(device, self.dtype)

    @torch.no_grad()
    def step(self, n):
        shape = self.SHAPES[n % len(self.SHAPES)]
        ids = torch.randint(256, shape, generator=self.generator).to(self.device)
        with self.race.around_step("target", n == 0, self.device, shape):
            self.model(ids, use_cache=False)


def kind_of(error):
    text = "".join(traceback.format_exception(error))  # with its causes
    if "using FX to symbolically trace" in text:
        return "FX crash"
    if "ran uncompiled (dense)" in text:
        return "dense fallback"
    return f"other: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:80]}"


def child(settings, fix, new_length_at, seed, began):
    """One run in this process, started at time() `began`; the last line says how every thread ended."""
    globals().update(settings)
    sys.setswitchinterval(SWITCH_S)
    faulthandler.enable()
    # where it hangs, before one_run() kills it; imports alone may take many seconds
    faulthandler.dump_traceback_later(max(1.0, 0.9 * TIMEOUT_S - (time.time() - began)))
    torch.manual_seed(seed)
    race = Race(fix, new_length_at, began)
    for i, device in enumerate(race.devices):
        DrafterWorker(race, i, device, seed)
    for i in range(TARGETS):
        TargetWorker(race, i, race.devices[i % len(DEVICES)], seed)
    if fix == "mainwarm":
        worker_compile_settings(len(race.workers))
        worker_memory_settings()
        race.workers[0].step(0)
    threads = [threading.Thread(target=worker.loop, name=worker.name) for worker in race.workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("RESULT " + json.dumps({
        "kinds": race.kinds, "steps": [worker.done for worker in race.workers], "fla": "fla" in sys.modules,
        "first_s": [worker.first_s for worker in race.workers],
        "names": [torch.cuda.get_device_name(d) if race.cuda else "CPU" for d in race.devices]}), flush=True)
    os._exit(0)  # a crash can leave behind what an orderly end would wait for


def one_run(fix, new_length_at, seed):
    """One cold run in a fresh process -> {fix, later, text, kinds {thread: failure}, steps, names, fla}."""
    what = json.dumps([{name: globals()[name] for name in SETTINGS}, fix, new_length_at, seed, time.time()])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache, \
            open(f"{cache}/log", "w+", errors="replace") as log:
        env = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
        process = subprocess.Popen([sys.executable, __file__, "child", what], env={**os.environ, **env},
                                   stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        with suppress(subprocess.TimeoutExpired):
            process.wait(TIMEOUT_S)
        ended = "hang" if process.poll() is None else f"other: ended with status {process.returncode}"
        with suppress(ProcessLookupError, PermissionError):  # a hanging child; inductor's workers
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0)
        text = log.read()
    said = next((json.loads(line[7:]) for line in text.splitlines() if line.startswith("RESULT ")), {})
    return {"kinds": {"process": ended}, **said, "fix": fix, "later": new_length_at > 0, "text": text}


def report(runs):
    """What it was measured with, and the table."""
    def cell(fix, later):
        these = [bool(run["kinds"]) for run in runs if (run["fix"], run["later"]) == (fix, later)]
        return f"{sum(these)}/{len(these)}"

    def kinds(fix):  # each kind once a run
        count = Counter(k for run in runs if run["fix"] == fix for k in set(run["kinds"].values()) or {"ok"})
        return ", ".join(f"{kind.replace('|', '/')} x{n}" for kind, n in count.most_common())
    first = next((run for run in runs if "names" in run), {"names": DEVICES, "fla": False})
    where = ", ".join(f"{n} on {d} ({k})" for (d, k), n in Counter(zip(DEVICES, first["names"])).items())
    git = subprocess.run("git describe --always --dirty".split(), cwd=_here, capture_output=True, text=True)
    fla = f" with{'' if first['fla'] else 'out'} flash-linear-attention" if TARGETS else ""
    return "\n".join([
        f"torch {torch.__version__.split('+')[0]}; drafter threads: {where}; target threads: {TARGETS}{fla}; "
        f"commit {git.stdout.strip() or 'none'}", "",
        "| fix | crashes/runs, no new length | crashes/runs, new length later | how the runs ended |",
        "|---|---|---|---|",
        *(f"| `{f}`: {meaning[f]} | {cell(f, False)} | {cell(f, True)} | {kinds(f)} |" for f in FIXES)])


def main(words):
    override(words)
    runs, log = [], open(OUT or os.devnull, "w")

    def say(text):
        for file in (sys.stdout, log):
            print(text, file=file, flush=True)
    say(" ".join(f"{name}={globals()[name]}" for name in SETTINGS if name != "OUT"))
    for fix, at in itertools.product(FIXES, dict.fromkeys((0, NEW_LENGTH_AT))):
        seeds = GATE_SEEDS if fix == "gate" and at else SEEDS
        for seed in range(FIRST_SEED, FIRST_SEED + seeds):
            begin, run = time.monotonic(), one_run(fix, at, seed)
            runs.append(run)
            say(f"{fix}, {f'new length at step {at}' if at else 'no new length'}, seed {seed}: "
                f"{run['kinds'] or 'ok'}, steps {run.get('steps')}, the first ended after "
                f"{run.get('first_s')} s, all {time.monotonic() - begin:.1f} s")
            if set(run["kinds"].values()) - {"FX crash"}:
                print(run["text"][-3000:], file=sys.stderr)
    say(f"\n{report(runs)}")
    sys.exit(int(any(run["fix"] == "gate" and run["kinds"] for run in runs)))


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    child(*json.loads(sys.argv[2])) if sys.argv[1:2] == ["child"] else main(sys.argv[1:])

"""How fast is the drafter's step, what does it hold in memory, and how near is it to the card's limit?

    python dev/bench.py [NAME=VALUE ...]          settings below, or constants of train_dflash.py
    python dev/bench.py SHAPE=tiny                runs through on a CPU in seconds
    python dev/bench.py PARTS=ceiling,steps VARIANTS=fused

bench()            every part of PARTS by itself: one that fails prints a line and the rest goes on
  ceiling()        a square matmul on random data, before and after all the rest
  steps()          td.micro_step and td.train_step (sum, clip, AdamW, copy) of every variant
  specforge()      OnlineDFlashModel and BF16Optimizer of specforge 0.2.0 on the same tensors, if importable
  two_drafters()   two threads on two GPUs (on a CPU: for the code's sake), and the sum of gradients alone
  report()         the table, last

All inputs are random, since zeros would be faster. Times are medians of REPEATS after WARM_UP, three input
sets in turn, the host ahead as in training; `host` is the time until the call returns if the device was idle.
Peaks leave out what training would not hold: the other input sets, the bf16 head beside one in fp8.
"""
import importlib.util
import math
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

import flex_utils
import train_dflash as td
from bench_rig import SHAPES, Meter, Rig, Steps, free, longest_kernels, specforge_steps
from dflash_trainer import settings
from dflash_trainer.checkpoints import commit
from dflash_trainer.devices import check_pairs

SHAPE: str = "qwen3.6-27b"         # a key of bench_rig.SHAPES
PARTS: list[str] = ["ceiling", "steps", "specforge", "two_drafters"]
VARIANTS: list[str] = ["fused", "one", "checkpoint", "sliding"]  # keys of KINDS
DEVICE: str = ""                   # "": cuda:0 where there is one, else cpu
REPEATS: int = 12
WARM_UP: int = 4
SLOW_LINK_GBS: float = 25.0        # two_drafters: GB/s of an emulated link (PCIe); 0: none
PROFILE: bool = False              # the longest kernels of a step of each variant
OUT: str = ""                      # file for all that is printed, and tracebacks

THIS_MODULE = sys.modules[__name__]


class Kind(NamedTuple):
    text: str
    layers: str = "full"            # "full" | "sliding"
    one_conversation: bool = False  # a row, as SpecForge sees every row
    constants: dict = {}            # of the trainer


SOFT = {"ce": 0.1, "tv": 1.8}
KINDS = {
    "fused": Kind("fused loss, full layers"),
    "one": Kind("fused loss, full layers, one conversation a row", one_conversation=True),
    "checkpoint": Kind("checkpoint loss, full layers", constants={"LOSS_FORM": "checkpoint"}),
    "sliding": Kind("fused loss, sliding layers", layers="sliding"),
    "fp8_head": Kind("head in fp8", constants={"DRAFTER_PRECISION": "fp8_head"}),
    "fp8": Kind("head and layers in fp8", constants={"DRAFTER_PRECISION": "fp8"}),
    "fp8_wgrad": Kind("all in fp8, gradients of weights too", constants={"DRAFTER_PRECISION": "fp8_wgrad"}),
    "soft": Kind("dflash, 0.1 ce + 1.8 tv", constants={"LOSS_TERMS": SOFT}),
    "dflash2": Kind("dflash2, ce", constants={"HEAD": "dflash2"}),
    "dflash2_detach": Kind("dflash2, ce, selector detached",
                           constants={"HEAD": "dflash2", "SELECTOR_DETACH": True}),
    "dflash2_soft": Kind("dflash2, ce; selector 0.1 ce + 0.9 tv",
                         constants={"HEAD": "dflash2", "SELECTOR_TERMS": {"ce": 0.1, "tv": 0.9}}),
    "dspark_tokens": Kind("dspark, ce, no confidence head",
                          constants={"HEAD": "dspark", "LOSS_TERMS": {"ce": 1.0}, "CONFIDENCE": 0.0}),
    "dspark_ce": Kind("dspark, ce and confidence", constants={"HEAD": "dspark", "LOSS_TERMS": {"ce": 1.0}}),
    "dspark": Kind("dspark, 0.1 ce + 1.8 tv and confidence",
                   constants={"HEAD": "dspark", "LOSS_TERMS": SOFT}),
}


class Result(NamedTuple):
    text: str
    row: float           # ms, forward and backward
    step: float          # ms, the update included
    row_host: float      # ms until the call returns
    step_host: float
    peak: float | None   # GiB
    first: float         # s of the first step, compilation included


def flops(c, seq_len, n_anchors, head_rows=None):
    """FLOP of one row's forward and backward, by term; attention and recompute left out, 2 a multiply-add.

    layers: q, o and mlp over N*K slots, k and v over S + N*K tokens, forward and both gradients: 3 x.
    fc: S tokens of L*D -> D, its input needs no gradient: 2 x. head: frozen, forward and hidden gradient:
    2 x, over all N*K slots (how others run it: this count is for comparing) or over head_rows.
    """
    slots = n_anchors * c.block_size
    d = c.hidden_size
    per_slot = 2 * d * c.num_heads * c.head_dim + 3 * d * c.intermediate_size
    per_key = 2 * d * c.num_kv_heads * c.head_dim
    return {
        "layers": 3 * 2 * c.num_layers * (slots * per_slot + (seq_len + slots) * per_key),
        "fc": 2 * 2 * seq_len * len(c.target_layer_ids) * d * d,
        "head": 2 * 2 * (head_rows or slots) * d * c.vocab_size,
    }


def to_file(text):
    if OUT:
        with open(OUT, "a") as file:
            file.write(text + "\n")


def log(text):
    print(text, flush=True)
    to_file(text)


def cell(value):
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def attempt(what, work, *args):
    """work(*args), or one line about why not."""
    try:
        work(*args)
    except Exception as e:
        place = traceback.extract_tb(e.__traceback__)[-1]
        why = (str(e).splitlines() or [""])[0][:300]
        log(f"FAILED {what}: {type(e).__name__}: {why} ({Path(place.filename).name}:{place.lineno})")
        to_file(traceback.format_exc())
    finally:
        free()


class Bench:
    """What the parts share."""

    def __init__(self):
        self.device = torch.device(DEVICE or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        self.cuda = self.device.type == "cuda"
        if self.cuda:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
        self.rig = Rig(SHAPES[SHAPE].drafter, self.device)
        self.meter = Meter([self.device], REPEATS, WARM_UP)
        self.ceiling = 0.0   # TFLOP/s of the better matmul
        self.results = {}    # variant -> Result
        self.notes = []      # lines of the report

    def note(self, text):
        """A line of the report, on the screen at once."""
        print(text, flush=True)
        self.notes.append(text)

    def measure(self, name, text, row, step, batches):
        """row(i) and step(i) of one trainer. The first step compiles what is not compiled yet."""
        first = self.meter.once(step)
        row_times = self.meter.times(row)
        step_times = self.meter.times(step)
        not_held = sum(batch.target_hidden.nbytes for batch in batches[1:])
        if td.DRAFTER_PRECISION != "bf16":
            not_held += self.rig.head.linear.weight.nbytes  # the trainer frees it once it has one in fp8
        peak = self.meter.peak_gib(step, not_held)
        self.results[name] = Result(text, row_times.ahead, step_times.ahead, row_times.returned,
                                    step_times.returned, peak, first)
        log(f"{name}: forward+backward {row_times.ahead:.1f} ms, step {step_times.ahead:.1f} ms")
        log(f"  host waits: {self.meter.host_waits(step) or 'none'}")


# ------------------------------------------------------------------------------------------------------ parts

def ceiling(bench):
    n = 8192 if bench.cuda else 256
    dtype = torch.bfloat16 if bench.cuda else torch.float32
    a, b = (torch.randn(3, n, n, device=bench.device, dtype=dtype) for _ in range(2))

    def ten_products(i):
        for j in range(10):
            torch.mm(a[(i + j) % 3], b[(i + j) % 3])
    ms = bench.meter.times(ten_products).ahead
    rate = 10 * 2 * n**3 / ms / 1e9
    bench.ceiling = max(bench.ceiling, rate)
    bench.note(f"matmul {n}^3 {dtype}, random data: {rate:.4g} TFLOP/s")


def steps(bench):
    for name in VARIANTS:
        attempt(f"variant {name}", variant, bench, name)


def variant(bench, name):
    kind = KINDS[name]
    constants = dict(kind.constants)
    if constants.get("HEAD") == "dspark":  # its anchor slot drafts as well: one slot fewer, as many drafts
        constants["BLOCK_SIZE"] = td.BLOCK_SIZE - 1
    with settings.changed(td, **constants):
        measure_variant(bench, name, kind)


def measure_variant(bench, name, kind):
    replica, optimizer = bench.rig.replica(kind.layers)
    batches = bench.rig.batches(kind.one_conversation)
    trainer = Steps([(replica, optimizer)], [batches])
    first_losses = []

    def row(i):
        trainer.row(replica, i)

    def step(i):
        trainer.step(replica, i)
        if not first_losses:
            loss, weight, *_ = optimizer.row_stats.sum(0).tolist()
            first_losses.append(loss / weight)
    bench.measure(name, kind.text, row, step, batches)
    if PROFILE and bench.cuda:
        log(longest_kernels(bench.device, step, 60))
    log(f"  first loss {first_losses[0]:.3f}, ln V {math.log(len(replica.embed.weight)):.3f}; "
        f"rows through the head {[batch.slots.numel() for batch in batches]}")


def specforge(bench):
    if importlib.util.find_spec("specforge") is None:
        bench.note("specforge is not importable here: not compared")
        return
    batches = bench.rig.batches()
    row, step = specforge_steps(bench.rig, batches)
    bench.measure("specforge", "SpecForge 0.2.0's OnlineDFlashModel, its defaults", row, step, batches)


def two_drafters(bench):
    """1 row per drafter and step: the sum is as dear as it gets; 4 rows: as in the 8-GPU job."""
    devices = [bench.device, bench.device]
    if bench.cuda:
        if torch.cuda.device_count() < 2:
            bench.note("two drafters: there is no second GPU")
            return
        devices[1] = torch.device("cuda", (bench.device.index + 1) % torch.cuda.device_count())
    direct = bench.cuda and not check_pairs([tuple(devices), tuple(devices[::-1])])
    replicas = [bench.rig.replica(index=i, device=device, rows_per_step=8)
                for i, device in enumerate(devices)]
    batches = [bench.rig.batches(device=device) for device in devices]
    size = sum(p.nbytes for p in replicas[0][0].params.values())
    for replica, _ in replicas:
        for p in replica.params.values():
            p.grad = torch.randn_like(p)
    trainer = Steps(replicas, batches, direct=direct)
    alone = Meter(devices, REPEATS, WARM_UP).times(lambda i: td.sum_gradients(trainer.run)).done
    how = "" if direct else ", not direct"
    bench.note(f"sum of two drafters' gradients, {size / 1e9:.2f} GB each, alone: {alone:.1f} ms{how}")
    fused = bench.results.get("fused")
    for rows in (1, 4):
        for gbs in (0, SLOW_LINK_GBS) if SLOW_LINK_GBS and direct else (0,):
            # a ring sends 2 (n - 1) / n times the size over each link
            link_ms = size / gbs / 1e6 if gbs else 0.0
            trainer = Steps(replicas, batches, 2 * rows, direct, link_ms)
            step, exposed = in_threads(trainer)
            one = (rows - 1) * fused.row + fused.step if fused else math.nan  # a drafter alone, as many rows
            link = f", a link of {gbs:g} GB/s emulated" if gbs else ""
            bench.note(f"two drafters, {rows} rows each a step{link}: step {step:.1f} ms, "
                       f"{2 * one / step:.2f} x the tokens/s of one, sum {exposed:.1f} ms of it exposed")


def in_threads(trainer):
    """Each replica's steps in a thread of its own -> (ms per step, ms of it in the sum, waits included)."""
    run = trainer.run
    marks = []  # (time, seconds in the sum) where measuring begins and ends, of each thread

    def drafter(replica):
        td.enter_thread(replica.device)
        for i in range(WARM_UP + REPEATS + 1):
            if i in (WARM_UP, WARM_UP + REPEATS):
                Meter([replica.device]).wait()
                seconds = run.reduce_watch.read_and_reset() if replica.index == 0 else 0.0
                marks.append((time.perf_counter(), seconds))
            trainer.step(replica, i)
    threads = [threading.Thread(target=run.workers.run_guarded, args=(drafter, replica))
               for replica in run.replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if run.workers.error:
        raise RuntimeError(run.workers.error)
    times = [when for when, _ in marks]
    in_sum = marks[-1][1] or marks[-2][1]  # the first drafter's, which alone is timed
    return (max(times) - min(times)) / REPEATS * 1e3, in_sum / REPEATS * 1e3


# ------------------------------------------------------------------------------------------------------- main

def report(bench):
    c = bench.rig.config()
    terms = {name: count / 1e12 for name, count in flops(c, td.SEQ_LEN, td.NUM_ANCHORS).items()}
    count = sum(terms.values())
    without_anchors = flops(c, td.SEQ_LEN, td.NUM_ANCHORS, td.NUM_ANCHORS * (c.block_size - 1))
    issued = sum(without_anchors.values()) / 1e12
    top = bench.ceiling or math.nan
    print()
    log("\n".join(bench.notes))
    parts = ", ".join(f"{name} {tflop:.4g}" for name, tflop in terms.items())
    log(f"\nFLOP counted: {count:.4g} T a row ({parts}); attention and recompute left out; head over all "
        f"{td.NUM_ANCHORS * c.block_size} slots ({issued:.4g} T without slot 0, which this trainer leaves "
        f"out). Share: of {top:.4g} TFLOP/s, the better matmul.\n")
    rows = []
    for r in bench.results.values():
        share = f"{count / r.row * 1e5 / top:.1f} %"
        rows.append([r.text, r.row, r.step, count / r.row * 1e3, share, count / r.step * 1e3, r.peak, r.first,
                     r.row_host, r.step_host])
    log(table(["variant", "forward+backward ms", "step ms", "TFLOP/s f+b", "share f+b", "TFLOP/s step",
               "peak GiB", "first step s", "host ms f+b", "host ms step"], rows))
    plain = bench.results.get("fused")
    for name, r in bench.results.items():
        if plain and name != "fused":
            peaks = f", peak {r.peak / plain.peak:.3f}" if r.peak else ""
            log(f"{r.text}: step {r.step / plain.step:.3f} of plain DFlash's{peaks}")
    theirs = bench.results.get("specforge")
    for name in ("fused", "one"):
        ours = bench.results.get(name)
        if ours and theirs:
            log(f"\n{name} / SpecForge: forward+backward {ours.row / theirs.row:.3f}, "
                f"step {ours.step / theirs.step:.3f}")


def bench(trainer_words):
    settings.require_one_of("SHAPE", SHAPE, SHAPES)
    parts = {part.__name__: part for part in (ceiling, steps, specforge, two_drafters)}
    for name in PARTS:
        settings.require_one_of("an entry of PARTS", name, parts)
    for name in VARIANTS:
        settings.require_one_of("an entry of VARIANTS", name, KINDS)
    settings.require_positive(THIS_MODULE, "REPEATS", "WARM_UP")
    with settings.changed(td, LR=1e-4, **SHAPES[SHAPE].constants):
        settings.override(td, trainer_words)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())  # empty: first steps are cold
        flex_utils.worker_compile_settings(2)
        flex_utils.worker_memory_settings()
        shared = Bench()
        card = torch.cuda.get_device_name(shared.device) if shared.cuda else "CPU"
        log(f"{card}, torch {torch.__version__}, commit {commit()}; "
            + " ".join(settings.as_words(THIS_MODULE) + trainer_words))
        for name in PARTS:
            began = time.perf_counter()
            attempt(name, parts[name], shared)
            log(f"part {name}: {time.perf_counter() - began:.1f} s")
        if "ceiling" in PARTS:
            attempt("ceiling", ceiling, shared)
        report(shared)


def main(argv):
    own, trainer_words = settings.split_words(THIS_MODULE, argv)
    return settings.run_program(THIS_MODULE, lambda: bench(trainer_words), own)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

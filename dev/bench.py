"""How fast is the drafter's step, what does it hold in memory, and how near is it to the card's limit?

    python dev/bench.py [NAME=VALUE ...]          settings below, or constants of train_dflash.py
    python dev/bench.py SHAPE=tiny                runs through on a CPU in seconds
    python dev/bench.py PARTS=ceiling,steps VARIANTS=fused PROFILE=True

main()             every part of PARTS in its own try: one that fails prints a line and the rest goes on
  ceiling()        a square matmul on random data, before and after all the rest
  loss_alone()     md.chunked_ce in both forms at two row counts, and unchunked where it fits
  small_parts()    masks, the gate, HandOff.send to the same device and to a second GPU
  steps()          td.micro_step and td.train_step (average, clip, AdamW, copy) of every variant
  specforge()      OnlineDFlashModel and BF16Optimizer of specforge 0.2.0 on the same tensors, if importable
  two_drafters()   two threads on two GPUs (on a CPU: for the code's sake), and the gradient average alone
  loop()           the interpreter's share: all threads of the 8-GPU job on devices that do nothing
  report()         the table, last

All inputs are random, since zeros would be faster. Times are medians of REPEATS after WARM_UP, three input
sets in turn, the host ahead as in training; `host` is the time until the call returns if the device was idle.
Peaks leave out the input sets that training would not hold.
"""
import importlib.util
import itertools
import math
import os
import sys
import tempfile
import threading
import time
import traceback
import typing
from pathlib import Path

import torch
from bench_rig import (  # puts the trainer on the path
    SHAPES, Meter, Rig, Steps, free, loop_ms, specforge_steps, table)

from dflash_trainer import errors, settings  # noqa: E402
import flex_utils
import model_drafter as md
import train_dflash as td
from dflash_trainer.devices import HandOff, check_pairs

SHAPE: str = "qwen3.6-27b"         # a key of bench_rig.SHAPES
PARTS: list[str] = ["ceiling", "loss_alone", "small_parts", "steps", "specforge", "two_drafters", "loop"]
VARIANTS: list[str] = ["fused", "one", "checkpoint", "flex", "flex_checkpoint", "sliding"]  # keys of KINDS
DEVICE: str = ""                   # "": cuda:0 where there is one, else cpu
REPEATS: int = 12
WARM_UP: int = 4
PROFILE: bool = False              # kernels of one micro-step and one step of the first variant
SLOW_LINK_GBS: float = 25.0        # two_drafters: GB/s of an emulated link (PCIe); 0: none
OUT: str = ""                      # file for all that is printed, and tracebacks
SETTINGS = {n: t for n, t in typing.get_type_hints(sys.modules[__name__]).items() if n.isupper()}

KINDS = {  # layers, LOSS_FORM, what is compiled, one conversation a row (as SpecForge sees every row)
    "fused": ("full", "fused", "layers", False),
    "one": ("full", "fused", "layers", True),
    "checkpoint": ("full", "checkpoint", "layers", False),
    "flex": ("full", "fused", "flex", False),
    "flex_checkpoint": ("full", "checkpoint", "flex", False),
    "sliding": ("sliding", "fused", "layers", False),
}


class Result(typing.NamedTuple):
    row: float           # ms, forward and backward
    step: float          # ms, the update included
    row_host: float      # ms until the call returns
    step_host: float
    peak: float | None   # GiB
    first: float         # s of the first step, compilation included
    text: str


def flops(c, seq_len, n_anchors, head_rows=None):
    """FLOP of one row's forward and backward, by term; attention and recompute left out, 2 a multiply-add.

    layers: q, o and mlp over N*K slots, k and v over S + N*K tokens, forward and both gradients: 3 x.
    fc: S tokens of L*D -> D, its input needs no gradient: 2 x. head: frozen, forward and hidden gradient:
    2 x, over all N*K slots (how others run it: this count is for comparing) or over head_rows.
    """
    slots, d, hd = n_anchors * c.block_size, c.hidden_size, c.head_dim
    per_slot, per_key = 2 * d * c.num_heads * hd + 3 * d * c.intermediate_size, 2 * d * c.num_kv_heads * hd
    return {"layers": 3 * 2 * c.num_layers * (slots * per_slot + (seq_len + slots) * per_key),
            "fc": 2 * 2 * seq_len * len(c.target_layer_ids) * d * d,
            "head": 2 * 2 * (head_rows or slots) * d * c.vocab_size}


def say(text):
    print(text, flush=True)
    log(text)


def log(text):
    if OUT:
        with open(OUT, "a") as f:
            f.write(text + "\n")


def attempt(what, work, *args):
    """work(*args), or one line about why not and None."""
    try:
        return work(*args)
    except Exception as e:
        at = traceback.extract_tb(e.__traceback__)[-1]
        why = (str(e).splitlines() or [""])[0][:300]
        say(f"FAILED {what}: {type(e).__name__}: {why} ({Path(at.filename).name}:{at.lineno})")
        log(traceback.format_exc())
    finally:
        free()


class Bench:
    """What the parts share."""

    def __init__(self, words):
        self.device = torch.device(DEVICE or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
        self.rig, self.meter = Rig(SHAPE, self.device, words), Meter([self.device], REPEATS, WARM_UP)
        self.ceiling, self.results, self.notes = 0.0, {}, []
        gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        self.second = [d for d in gpus if d != self.device][:1]

    def note(self, text):
        """A line of the report, on the screen at once."""
        print(text, flush=True)
        self.notes.append(text)

    def measure(self, name, text, row, step, items):
        """row(i) and step(i) of one trainer. The first step compiles what is not compiled yet."""
        first = self.meter.once(step)
        (row_ms, row_host, _), (step_ms, step_host, _) = self.meter.times(row), self.meter.times(step)
        peak = self.meter.peak_gib(step, sum(i.hidden.nbytes for i in items[1:]))
        self.results[name] = Result(row_ms, step_ms, row_host, step_host, peak, first, text)
        say(f"{name}: forward+backward {row_ms:.1f} ms, step {step_ms:.1f} ms")


# ------------------------------------------------------------------------------------------------------ parts


def ceiling(bench):
    n, kind = (8192, torch.bfloat16) if bench.device.type == "cuda" else (256, torch.float32)
    a, b = (torch.randn(3, n, n, device=bench.device, dtype=kind) for _ in range(2))
    ms = bench.meter.times(lambda i: [torch.mm(a[(i + j) % 3], b[(i + j) % 3]) for j in range(10)])[0]
    bench.ceiling = max(bench.ceiling, 10 * 2 * n**3 / ms / 1e9)
    bench.note(f"matmul {n}^3 {kind}, random data: {10 * 2 * n**3 / ms / 1e9:.4g} TFLOP/s")


def loss_alone(bench):
    """Forward and backward; extra memory: all beyond hidden states and head, (M, D) gradients included."""
    c, rig, rows = bench.rig.config(), bench.rig, []
    on = td.compiles_on(bench.device)
    spec = td.loss_spec(flex_utils.compiled(md.ce_and_grad, "bench") if on else md.ce_and_grad)
    m = spec.chunk * 2 * max(1, td.NUM_ANCHORS * (c.block_size - 1) // spec.chunk // 2)
    losses = {form: lambda h, y, form=form: md.chunked_ce(h, rig.head, y, spec.chunk, form, spec.ce_and_grad)
              for form in ("checkpoint", "fused")}
    losses["unchunked"] = lambda h, y: md.ce_of_chunk(h, rig.head, y)
    for name, loss in losses.items():
        cells = [attempt(f"loss {name}, {n} rows", one_loss, bench, loss, n, c) for n in (m, m // 2)]
        rows.append([name, *(x for pair in cells for x in pair or ("fails", "fails"))])
    head = [f"{what}, {n} rows" for n in (m, m // 2) for what in ("ms", "extra GiB")]
    bench.note(f"\nloss alone, chunks of {spec.chunk}; an (M, D) gradient of {m} rows is "
               f"{m * c.hidden_size * 2 / 2**30:.3f} GiB:\n\n{table(['loss', *head], rows)}\n")


def one_loss(bench, loss, n, c):
    """-> (ms, extra GiB) at n rows."""
    like = dict(device=bench.device, dtype=bench.rig.embed.weight.dtype, requires_grad=True)
    hidden = [torch.randn(n, c.hidden_size, **like) for _ in range(3)]
    labels = torch.randint(c.vocab_size, (n,), device=bench.device)

    def work(i):
        hidden[i % 3].grad = None
        loss(hidden[i % 3], labels)[0].sum().backward()
    ms = bench.meter.times(work)[0]
    hidden[0].grad = None
    return ms, bench.meter.peak_gib(work, torch.cuda.memory_allocated() if bench.meter.cuda else 0)


def small_parts(bench):
    item, device = bench.rig.items()[0], bench.device
    signature = str(device), tuple(item.hidden.shape), item.hidden.dtype
    make_mask, s = flex_utils.make_attention(device, td.COMPILE)[1], item.slots[0]
    for name, window in (("full", None), ("sliding", td.SLIDING_WINDOW)):
        shape = td.SEQ_LEN, td.BLOCK_SIZE, window
        ms, host, _ = bench.meter.times(lambda i: make_mask(s.start, s.anchor, *shape))
        bench.note(f"mask, {name}: {ms:.2f} ms, host {host:.2f} ms")
    began = time.perf_counter()
    for _ in range(10000):
        with td.GATE.first_step(), td.GATE.work("train", *signature):
            pass
    us = (time.perf_counter() - began) * 100
    bench.note(f"first-step lock and gate, one thread: {us:.1f} us a micro-step")
    for other in (device, *(bench.second if bench.meter.cuda else ())):
        bad, size = check_pairs([(device, other)]), item.hidden.nbytes
        sender, meter = HandOff(device, bad), Meter([device, other], REPEATS, WARM_UP)
        _, host, ms = meter.times(lambda i: sender.send(item.hidden, other, lambda: None))
        rate = "the same storage, no copy" if device == other else f"{size / ms / 1e6:.1f} GB/s"
        way = " through the host" if bad else ""
        bench.note(f"hand-off {device} -> {other}{way}, {size / 2**20:.1f} MiB: {rate}, {ms:.2f} ms, "
                   f"host {host:.2f} ms")


def steps(bench):
    for number, name in enumerate(VARIANTS):
        attempt(f"variant {name}", variant, bench, name, PROFILE and number == 0)
    bench.rig.kept.clear()


def variant(bench, name, profiled):
    layers, form, compiled, one = KINDS[name]
    w, items = bench.rig.kept_replica(layers, compiled), bench.rig.items(one)
    w.spec, run, losses = w.spec._replace(form=form), Steps([w], [items]), []

    def step(i):
        run.step(w, i)
        if not losses:
            losses.append((w.stats[:, td.LOSS_SUM].sum() / w.stats[:, td.WEIGHT].sum()).item())
    text = f"{form} loss, {layers} layers, {compiled} compiled" + ", one conversation a row" * one
    bench.measure(name, text, lambda i: run.row(w, i), step, items)
    say(f"  first loss {losses[0]:.3f}, ln V {math.log(len(w.embed.weight)):.3f}; rows through the head "
        f"{[i.slots[0].index.numel() for i in items]}; host waits: {bench.meter.host_waits(step) or 'none'}")
    if profiled:
        say(f"\none micro-step: {bench.meter.kernels(lambda i: run.row(w, i))}")
        say(f"\none step: {bench.meter.kernels(step)}\n")


def specforge(bench):
    if importlib.util.find_spec("specforge") is None:
        return bench.note("specforge is not importable here: not compared")
    items = bench.rig.items()
    row, step = specforge_steps(bench.rig, items)
    bench.measure("specforge", "SpecForge 0.2.0's OnlineDFlashModel, its defaults", row, step, items)
    say(f"  host waits: {bench.meter.host_waits(step) or 'none'}")


def two_drafters(bench):
    """1 row a drafter and step: the average is as dear as it gets; 4 rows: as in the 8-GPU job."""
    devices = [bench.device, *(bench.second if bench.meter.cuda else [bench.device])]
    if len(devices) < 2:
        return bench.note("two drafters: there is no second GPU")
    direct = bench.meter.cuda and not check_pairs([tuple(devices), tuple(devices[::-1])])
    td.ROWS_PER_STEP = 8  # replicas are built for it
    workers = [bench.rig.replica(index=i, device=d) for i, d in enumerate(devices)]
    items = [bench.rig.items(device=d) for d in devices]
    size = sum(p.nbytes for p in workers[0].params.values())
    for p in (p for w in workers for p in w.params.values()):
        p.grad = torch.randn_like(p)
    run = Steps(workers, items, direct)
    alone = Meter(devices, REPEATS, WARM_UP).times(lambda i: run.average(0))[2]
    bench.note(f"average of two drafters' gradients, {size / 1e9:.2f} GB each, alone: {alone:.1f} ms"
               + ("" if direct else ", not direct"))
    for rows, gbs in itertools.product((1, 4), (0, SLOW_LINK_GBS) if SLOW_LINK_GBS and direct else (0,)):
        # a ring sends 2 (n - 1) / n times the size over each link
        link_ms, td.ROWS_PER_STEP = size / gbs / 1e6 if gbs else 0.0, 2 * rows
        run = Steps(workers, items, direct, link_ms)
        step, reduce = in_threads(run, workers)
        fused = bench.results.get("fused")  # one drafter alone with as many rows a step
        one = (rows - 1) * fused.row + fused.step if fused else math.nan
        link = f", a link of {gbs:g} GB/s emulated" if gbs else ""
        bench.note(f"two drafters, {rows} rows each a step{link}: "
                   f"step {step:.1f} ms, {2 * one / step:.2f} x the tokens/s of one, "
                   f"average {reduce:.1f} ms of it exposed")
    td.ROWS_PER_STEP = 1


def in_threads(run, workers):
    """Each worker's steps in a thread of its own -> (ms a step, ms of it in the average, waits included)."""
    marks = []

    def drafter(w):
        run.enter_thread(w.device)
        for i in range(WARM_UP + REPEATS + 1):
            if i in (WARM_UP, WARM_UP + REPEATS):
                Meter([w.device]).wait()
                marks.append((time.perf_counter(), run.reduce_watch.take() if w.index == 0 else 0.0))
            run.step(w, i)
    threads = [threading.Thread(target=run.run_guarded, args=(drafter, w)) for w in workers]
    for do in (threading.Thread.start, threading.Thread.join):
        [do(t) for t in threads]
    if run.error:
        raise RuntimeError(run.error)
    times, spent = zip(*marks)
    return (max(times) - min(times)) / REPEATS * 1e3, sorted(spent)[-1] / REPEATS * 1e3


def loop(bench):
    """What the loop itself costs the one interpreter: 5 target and 3 drafter threads on devices that do
    nothing, real rows, slots, queues, hand-offs, barriers, statistics and log."""
    for rows in (3, 12):
        ms = loop_ms(rows)
        bench.note(f"loop, 5 + 3 threads on one core, devices that do nothing, {rows} rows of {td.SEQ_LEN} "
                   f"tokens a step: {ms:.2f} ms of CPU a step")


# ------------------------------------------------------------------------------------------------------- main


def report(bench):
    c, s, n = bench.rig.config(), td.SEQ_LEN, td.NUM_ANCHORS
    terms, top = {k: v / 1e12 for k, v in flops(c, s, n).items()}, bench.ceiling or math.nan
    count, issued = sum(terms.values()), sum(flops(c, s, n, n * (c.block_size - 1)).values()) / 1e12
    print()
    say("\n".join(bench.notes))
    say(f"\nFLOP counted: {count:.4g} T a row ({', '.join(f'{k} {v:.4g}' for k, v in terms.items())}); "
        f"attention and recompute left out; head over all {n * c.block_size} slots ({issued:.4g} T without "
        f"slot 0, which this trainer leaves out). Share: of {top:.4g} TFLOP/s, the better matmul.\n")
    rows = [[r.text, r.row, r.step, count / r.row * 1e3, f"{count / r.row * 1e5 / top:.1f} %",
             count / r.step * 1e3, r.peak, r.first, r.row_host, r.step_host] for r in bench.results.values()]
    say(table(["variant", "forward+backward ms", "step ms", "TFLOP/s f+b", "share f+b", "TFLOP/s step",
               "peak GiB", "first step s", "host ms f+b", "host ms step"], rows))
    theirs = bench.results.get("specforge")
    for name in [x for x in ("fused", "one") if theirs and x in bench.results]:
        ours = bench.results[name]
        say(f"\n{name} / SpecForge: forward+backward {ours.row / theirs.row:.3f}, "
            f"step {ours.step / theirs.step:.3f}")


def main(words):
    rest, parts = [], PARTS
    for word in words:
        name, _, text = word.partition("=")
        if name not in SETTINGS:
            rest.append(word)
            continue
        try:
            globals()[name] = settings.convert(text, SETTINGS[name])
        except (ValueError, SyntaxError):
            raise errors.UserError(f"{word}: expected {SETTINGS[name]}") from None
    choices = ("SHAPE", [SHAPE], SHAPES), ("VARIANTS", VARIANTS, KINDS), ("PARTS", PARTS, parts)
    for name, chosen, legal in choices:
        if not set(chosen) <= set(legal):
            raise errors.UserError(f"{name} = {','.join(chosen)}; there are {', '.join(legal)}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())  # an empty one: first steps are cold
    flex_utils.worker_compile_settings(2)
    flex_utils.worker_memory_settings()
    bench = Bench(rest)
    card = torch.cuda.get_device_name(bench.device) if bench.meter.cuda else "CPU"
    say(f"{card}, torch {torch.__version__}, commit {td.checkpoints.commit()}; LOSS_CHUNK={td.loss_chunk()} "
        f"COMPILE={td.COMPILE} " + " ".join(f"{n}={globals()[n]}" for n in SETTINGS))
    for name in PARTS:
        began = time.perf_counter()
        attempt(name, globals()[name], bench)
        say(f"part {name}: {time.perf_counter() - began:.1f} s")
    if "ceiling" in PARTS:
        attempt("ceiling", ceiling, bench)
    report(bench)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    try:
        main(sys.argv[1:])
    except errors.UserError as e:
        sys.exit(f"bench: {e}")

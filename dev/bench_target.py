"""What fp8 and a compiled target save: the target's call, the drafter's step, long rows; how far they stray.

    python dev/bench_target.py [NAME=VALUE ...]
    python dev/bench_target.py SMALL=True                       runs through on a CPU
    python dev/bench_target.py PARTS=drafter,long_rows          some parts
    python dev/bench_target.py TARGET=<directory of SmolLM2>    real weights for `features`

    probe       which form of fp8 products the device multiplies rightly, and how fast they are
    target      a row of 4,096 tokens through the 27B target up to the last tap: as before, compiled, fp8
    features    real weights: features per tap and argmax against eager bf16 and fp32
    drafter     forward, backward and step at 27B shape, bf16 and fp8; gradients against bf16
    long_rows   by SEQ_LEN: target call, hand-off, packing, drafter step, evaluation, memory

Each part stands alone: what fails is one line, its traceback on stderr and in OUT.errors; the rest goes on.
What BUDGET_S leaves no time for is named as skipped. Times are medians; weights are random but in `features`.
"""
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections import namedtuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch

import flex_utils
import model_drafter as md
import train_dflash as td
from bench_rig import SHAPES, Meter, Rig, free, import_specforge, longest_kernels, specforge_steps
from dflash_trainer import checkpoints, compiled_target, fp8, settings
from dflash_trainer import target as targets
from dflash_trainer.devices import HandOff, check_pairs, replica_of
from dflash_trainer.features import TappedForward

PARTS: list[str] = ["probe", "target", "features", "drafter", "long_rows"]
DEVICE: str = ""               # "": cuda:0 where there is one, else cpu
SMALL: bool = False            # tiny shapes, for a CPU
LAYERS: int = 62               # of the random 27B target; times are scaled to 62
TARGET: str = ""               # a directory with real weights, for `features`
TARGETS: list[str] = ["eager", "dynamic", "static", "fp8"]          # of `target`, in this order
PRECISIONS: list[str] = ["bf16", "fp8_head", "fp8", "fp8_wgrad"]    # of `drafter`
SEQ_LENS: list[int] = [4096, 8192, 16384, 32768]                    # of `long_rows`
REPEATS: int = 8
WARM_UP: int = 3
BUDGET_S: float = 1e9          # seconds after which nothing new begins
PROFILE: bool = False          # kernels of the last target and drafter variant
OUT: str = ""                  # file for all that is printed, and tracebacks

ROW = 4096
TAPS = (1, 16, 31, 46, 61)
BEGAN = time.perf_counter()


def say(text):
    print(text, flush=True)
    if OUT:
        with open(OUT, "a") as file:
            file.write(text + "\n")


def attempt(what, work, *args):
    """work(*args), or one line about why not and None."""
    elapsed = time.perf_counter() - BEGAN
    if elapsed > BUDGET_S:
        return say(f"SKIPPED {what}: {elapsed:.0f} s have passed, BUDGET_S = {BUDGET_S:g}")
    try:
        return work(*args)
    except Exception as e:
        text = traceback.format_exc()
        where = traceback.extract_tb(e.__traceback__)[-1]
        say(f"FAILED {what}: {type(e).__name__}: {(str(e).splitlines() or [''])[0][:300]} "
            f"({Path(where.filename).name}:{where.lineno})")
        print(text, file=sys.stderr, flush=True)
        if OUT:
            with open(OUT + ".errors", "a") as file:
                file.write(text)
        return None
    finally:
        free()


def table(head, rows):
    def cell(x):
        if isinstance(x, float):
            return f"{x:.3g}" if abs(x) < 10 else f"{x:.1f}"
        return "-" if x is None else str(x)
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in (head, ["---"] * len(head), *rows))


def device_in_use():
    return torch.device(DEVICE or ("cuda:0" if torch.cuda.is_available() else "cpu"))


def gib(device, peak=False):
    if device.type != "cuda":
        return None
    return (torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)) / 2**30


# ----------------------------------------------------------------------------------------------- parts

def probe(device):
    for form in fp8.FORMS:
        try:
            say(f"fp8 products, {form}: relative error {fp8.error_of_form(form, device):.4f}")
        except Exception as e:
            say(f"fp8 products, {form}: {str(e).splitlines()[0][:200]}")
    say(f"taken: {fp8.find_form(device, 'probe')}")
    m, k, n = (64, 64, 128) if SMALL else (8192, 5120, 17408)
    dtype = td.compute_dtype(device)
    a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
    rows = fp8.quantize_rows(a), fp8.quantize_weight(b)
    meter = Meter([device], REPEATS, WARM_UP)
    flop = 2 * m * k * n / 1e9
    ms = meter.times(lambda i: torch.mm(a, b.t()))[0]
    say(f"{m} x {k} x {n}: bf16 {flop / ms:.0f} TFLOP/s")
    for form in fp8.FORMS:
        ms = attempt(form, lambda form=form: meter.times(
            lambda i: fp8.multiply(*rows[0], *rows[1], form, dtype))[0])
        if ms:
            say(f"  fp8 {form}: {flop / ms:.0f} TFLOP/s")


def random_decoder(device, layers):
    """-> (decoder, taps): the 27B target's first layers, without its head."""
    folder = tempfile.mkdtemp()
    wide = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "linear_value_head_dim": 32}
    size = ["small", f"CONFIG={wide}"] if SMALL else [f"LAYERS={layers}"]
    program = Path(__file__).resolve().parents[1] / "tools/random_target.py"
    subprocess.run([sys.executable, str(program), folder, *size, "CONVERSATIONS=0"], check=True)
    model = targets.load_model(f"random:{folder}", device, td.compute_dtype(device), 0)
    taps = (0, 2, 5) if SMALL else tuple(tap for tap in TAPS if tap < layers)
    decoder = model.get_decoder()
    decoder.layers = decoder.layers[:max(taps) + 1]
    return decoder, taps


def relative_per_tap(found, wanted, n_taps):
    found, wanted = found.flatten(0, 1).float(), wanted.flatten(0, 1).float()
    parts = zip(found.chunk(n_taps, -1), wanted.chunk(n_taps, -1), strict=True)
    return [round(((a - b).norm() / b.norm()).item(), 4) for a, b in parts]


class Variant:
    """A way to run a decoder: its TappedForward, taken away again afterwards."""

    def __init__(self, decoder, taps, device, name, kernel=None):
        self.parts = None
        compiles = name != "eager" and not name.endswith("uncompiled")
        if compiles:
            self.parts = compiled_target.CompiledParts(
                decoder, f"bench-{name}", say, "inductor" if device.type == "cuda" else "eager",
                dynamic=name != "static")
        self.forward = TappedForward(decoder, taps, say, self.parts)

    def close(self):
        self.forward.taps.remove()
        if self.parts:
            self.parts.remove()


def make_fp8(decoder, device):
    before = gib(device)
    form = fp8.find_form(device, "bench")
    count = fp8.quantize_layers(decoder.layers, form, "bench", "layers")
    free()
    if before:
        say(f"{count} linear layers in fp8 ({form}): {before:.1f} -> {gib(device):.1f} GiB allocated")


@torch.no_grad()
def target(device):
    decoder, taps = random_decoder(device, LAYERS)
    row = 64 if SMALL else ROW
    vocab = decoder.get_input_embeddings().num_embeddings
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(0, vocab, (1, row), device=device, generator=generator)
    other = torch.randint(0, vocab, (2, row // 2), device=device, generator=generator)
    n_layers = len(decoder.layers)
    rows, kept = [], {}
    for name in TARGETS:
        result = attempt(f"target {name}", one_target, device, decoder, taps, name, ids, other, kept)
        if result:
            rows.append([name, *result])
    scale = 62 / n_layers
    base = next((r[1] for r in rows if r[0] == "eager"), None)
    for r in rows:
        r[2:2] = [r[1] * scale, f"{r[1] / base:.3f}" if base else "-"]
    say(f"\ntarget, {n_layers} layers, {row} tokens:\n" + table(
        ["variant", "ms", "ms at 62 layers", "of eager", "first call s", "second shape's first s", "its ms",
         "GiB allocated", "peak GiB", "relative difference from eager, per tap"], rows) + "\n")


def one_target(device, decoder, taps, name, ids, other, kept):
    if name.startswith("fp8"):
        make_fp8(decoder, device)
    variant = Variant(decoder, taps, device, name)
    try:
        meter = Meter([device], REPEATS, WARM_UP)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        first = meter.once(lambda i: variant.forward(ids))
        ms = meter.times(lambda i: variant.forward(ids))[0]
        features = variant.forward(ids).clone()
        kept.setdefault("eager", features) if name == "eager" else None
        differs = relative_per_tap(features, kept["eager"], len(taps)) if name != "eager" and kept else "-"
        say(f"target {name}: {ms:.1f} ms, first call {first:.1f} s, per tap {differs}")
        second = meter.once(lambda i: variant.forward(other))
        second_ms = meter.times(lambda i: variant.forward(other))[0]
        if variant.forward.refused:
            say(f"target {name}: NO CUDA GRAPH")
        if PROFILE and device.type == "cuda" and name == TARGETS[-1]:
            say(longest_kernels(device, lambda i: variant.forward(ids), 25))
        return [ms, first, second, second_ms, gib(device), gib(device, True), str(differs)]
    finally:
        variant.close()


@torch.no_grad()
def features(device):
    """A few conversations' text through real weights, every variant against eager bf16; fp32 for scale."""
    if not TARGET:
        return say("features: no TARGET given")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    lines = (Path(__file__).parents[1] / "data/demo_eval.jsonl").read_text().splitlines()
    text = "\n".join(m["content"] for line in lines for m in json.loads(line)["messages"])
    length = 64 if SMALL else 1024
    ids = torch.tensor(tokenizer(text)["input_ids"][:4 * length], device=device).view(-1, length)
    exact = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).to(device).eval()
    n_layers = len(exact.get_decoder().layers)
    taps = tuple(round(1 + i * (n_layers - 4) / 4) for i in range(5))
    every = (*taps, n_layers - 1)

    def outputs(model, name):
        decoder = model.get_decoder()
        variant = Variant(decoder, every, device, name)
        hidden = variant.forward(ids).clone()
        variant.close()
        last = decoder.norm(hidden[..., -hidden.shape[-1] // len(every):])
        return hidden, model.get_output_embeddings()(last).argmax(-1)

    wanted, best = outputs(exact, "eager")
    del exact  # a module's own .to(bfloat16) would round its rotary frequencies
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=td.compute_dtype(device)).to(device).eval()
    rows, eager = [], None
    for name in ("eager", "dynamic", "fp8 uncompiled", "fp8"):
        if name == "fp8 uncompiled":
            make_fp8(model.get_decoder(), device)
        result = attempt(f"features {name}", outputs, model, name)
        if not result:
            continue
        eager = eager or result
        rows.append(
            [
                name,
                str(relative_per_tap(result[0], eager[0], len(every))),
                str(relative_per_tap(result[0], wanted, len(every))),
                f"{(result[1] == eager[1]).float().mean():.4f}",
                f"{(result[1] == best).float().mean():.4f}",
            ]
        )
    say(
        f"\nfeatures of {TARGET.rstrip('/').split('/')[-1]}, {ids.numel()} tokens, taps {list(every)}:\n"
        + table(
            [
                "variant",
                "relative difference from eager, per tap",
                "from fp32",
                "argmax as eager",
                "argmax as fp32",
            ],
            rows,
        )
        + "\n"
    )


def make_rig(device, **constants):
    """Sets the trainer's constants, too."""
    shape = SHAPES["tiny" if SMALL else "qwen3.6-27b"]
    for name, value in {**shape.constants, "LR": 1e-4, **constants}.items():
        setattr(td, name, value)
    return Rig(shape.drafter, device)


def make_replica(rig, precision, layers="full"):
    """-> (replica, optimizer) as the trainer builds them, random weights of a seed."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    config, device = rig.config(layers), rig.device
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in md.Drafter(config, None).named_parameters()}
    weights = {}
    for name, shape in shapes.items():
        is_norm = len(shape) == 1
        weights[name] = (
            torch.ones(shape, device=device) if is_norm else torch.randn(shape, device=device) * 0.02
        )
    replica = td.Replica(
        0,
        config,
        device,
        replica_of(rig.embed, device),
        replica_of(rig.head, device),
        weights,
        precision=precision,
    )
    return replica, td.Optimizer(replica, weights, 1)


class Stepper:
    """td.micro_step and the update, on batches in turn."""

    def __init__(self, replica, optimizer, batches):
        self.replica, self.optimizer, self.batches = replica, optimizer, batches
        self.gate = flex_utils.Gate(td.FIRST_STEP_LOCK)
        self.loss = None

    def row(self, i):
        self.replica.drafter.zero_grad(set_to_none=True)
        result = self.replica.row_loss(self.batches[i % len(self.batches)])
        result.loss.backward()
        self.loss = result

    def step(self, i):
        self.row(i)
        stats = self.optimizer.row_stats
        valid = (self.batches[i % len(self.batches)].counted[0] > 0).sum()
        stats.zero_()
        values = dict(loss=self.loss.loss.detach(), weight=self.loss.weight, matches=valid, anchors=valid)
        for name, value in values.items():
            stats[0, td.RowStats._fields.index(name)] = value
        self.optimizer.update(1e-4, i, self.gate)

    @torch.no_grad()
    def evaluate(self, i):
        self.replica.row_loss(self.batches[i % len(self.batches)])


def measure_steps(device, replica, optimizer, batches):
    """-> (steps, [forward + backward ms, step ms, peak GiB, first s, loss])."""
    steps, meter = Stepper(replica, optimizer, batches), Meter([device], REPEATS, WARM_UP)
    first = meter.once(steps.row)
    loss = (steps.loss.loss.detach() / steps.loss.weight).item()
    grads = {name: p.grad.clone() for name, p in replica.params.items()}
    host_grads = {name: grad.cpu() for name, grad in grads.items()} if device.type == "cuda" else grads
    del grads
    row_ms, step_ms = meter.times(steps.row)[0], meter.times(steps.step)[0]
    peak = meter.peak_gib(steps.step, sum(b.target_hidden.nbytes for b in batches[1:]))
    return steps, host_grads, [row_ms, step_ms, peak, first, loss]


def drafter(device):
    rig = make_rig(device)
    batches = rig.batches()
    rows, kept = [], {}
    for precision in PRECISIONS:
        result = attempt(f"drafter {precision}", one_drafter, device, rig, batches, precision, kept)
        if result:
            rows.append([precision, *result])
    theirs = attempt("specforge", their_step, device, rig, batches)
    for row in rows:
        row.append(f"{row[2] / theirs:.3f}" if theirs else "-")
    say(
        "\ndrafter, all-full layers:\n"
        + table(
            [
                "precision",
                "forward+backward ms",
                "step ms",
                "peak GiB",
                "first s",
                "loss",
                "gradients against bf16",
                "of SpecForge's step",
            ],
            rows,
        )
        + (f"\nSpecForge 0.2.0: step {theirs:.1f} ms" if theirs else "")
        + "\n"
    )


def one_drafter(device, rig, batches, precision, kept):
    replica, optimizer = make_replica(rig, precision)
    steps, grads, numbers = measure_steps(device, replica, optimizer, batches)
    against = "-"
    if precision == "bf16":
        kept.update(grads)
    elif kept:
        cosines = {}
        for name, grad in grads.items():
            a, b = grad.to(device).float().flatten(), kept[name].to(device).float().flatten()
            cosines[name] = torch.nn.functional.cosine_similarity(a, b, 0).item()
        lowest = min(cosines, key=cosines.get)
        middle = sorted(cosines.values())[len(cosines) // 2]
        against = f"cosine {cosines[lowest]:.4f} ({lowest}) .. median {middle:.4f}"
    say(f"drafter {precision}: forward+backward {numbers[0]:.1f} ms, step {numbers[1]:.1f} ms; {against}")
    if PROFILE and device.type == "cuda" and precision == PRECISIONS[-1]:
        say(longest_kernels(device, steps.row, 25))
    return [*numbers, against]


def their_step(device, rig, batches):
    try:
        import_specforge()
    except (ImportError, AttributeError):
        return say("specforge is not importable here: not compared")
    torch._dynamo.reset()
    _, step = specforge_steps(rig, batches)
    Meter([device]).once(step)
    return Meter([device], REPEATS, WARM_UP).times(step)[0]


def long_rows(device):
    layers = 4 if SMALL else 16
    decoder, taps = random_decoder(device, layers)
    rows = []
    for seq_len in SEQ_LENS:
        seq_len = seq_len // 32 if SMALL else seq_len
        result = attempt(f"SEQ_LEN {seq_len}", one_length, device, decoder, taps, seq_len)
        if result:
            rows.append([str(seq_len), *result])
    say(
        f"\nlong rows, one conversation a row for the target (its first {len(decoder.layers)} layers, "
        "scaled to 62), drafter with sliding layers + 1 full:\n"
        + table(
            [
                "SEQ_LEN",
                "target call ms",
                "peak GiB",
                "hand-off ms",
                "packing ms a row",
                "drafter f+b ms",
                "step ms",
                "peak GiB",
                "evaluation of a group ms",
                "features GiB",
            ],
            rows,
        )
        + "\n"
    )


def some_conversations(n, seq_len):
    """What rows are packed from: n conversations of 5 to 75 % of a row, the first quarter a prompt."""
    rng = np.random.default_rng(0)
    one = namedtuple("Given", ["ids", "turn", "source"])
    given = []
    for length in rng.integers(seq_len // 20, seq_len * 3 // 4, n):
        turn = (np.arange(length) >= length // 4).astype(np.int32)
        given.append(one(rng.integers(0, 500, length), turn, ""))
    lengths = np.array([len(c.ids) for c in given])
    kind = type("Conversations", (list,), {"lengths": lengths, "stats": {"bad": 0}, "fingerprint": ""})
    return kind(given)


def one_length(device, decoder, taps, seq_len):
    meter = Meter([device], max(2, REPEATS // 2), 2)
    with torch.no_grad():
        vocab = decoder.get_input_embeddings().num_embeddings
        ids = torch.randint(0, vocab, (1, seq_len), device=device)
        variant = Variant(decoder, taps, device, "dynamic")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        target_ms = meter.times(lambda i: variant.forward(ids))[0] * 62 / len(decoder.layers)
        target_peak = gib(device, True)
        variant.close()
    variant = None
    free()
    rig = make_rig(device, SEQ_LEN=seq_len)
    batches = rig.batches()[:2]
    stream = td.RowStream(some_conversations(64, seq_len), seq_len, td.NUM_ANCHORS, 0)
    stream.row(0)
    began = time.perf_counter()
    for i in range(4):
        stream.row(i)
    packing_ms = (time.perf_counter() - began) / 4 * 1e3
    hidden = batches[0].target_hidden
    others = [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if i != device.index]
    hand_off_ms = None
    if device.type == "cuda" and others:
        sender = HandOff(device, check_pairs([(device, others[0])]))
        hand_off_ms = Meter([device, others[0]], 4, 2).times(lambda i: sender.send(hidden, others[0]))[2]
    replica, optimizer = make_replica(rig, "bf16", "sliding")
    steps, _, numbers = measure_steps(device, replica, optimizer, batches)
    evaluate_ms = meter.times(steps.evaluate)[0]
    say(f"SEQ_LEN {seq_len}: target {target_ms:.0f} ms, drafter step {numbers[1]:.0f} ms")
    return [target_ms, target_peak, hand_off_ms, packing_ms, *numbers[:3], evaluate_ms, hidden.nbytes / 2**30]


def measure():
    device = device_in_use()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        flex_utils.worker_compile_settings(2)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    import transformers
    say(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, commit "
        f"{checkpoints.commit()}")
    for part in PARTS:
        settings.require_one_of(
            "an entry of PARTS", part, ("probe", "target", "features", "drafter", "long_rows")
        )
    for part in PARTS:
        began = time.perf_counter()
        attempt(part, globals()[part], device)
        say(f"part {part}: {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(settings.run_program(sys.modules[__name__], measure, sys.argv[1:]))

"""One factor at a time: the same data and steps, several runs side by side, one table.

    python dev/ablation.py TARGET=<dir> DATA=... EVAL_DATA=... STEPS=500 [NAME=VALUE ...]
                             [RUNS=base,decay] [PARALLEL=6]

RUNS picks from VARIANTS, PARALLEL runs at a time; everything else goes to train_dflash.py, which does the
training: each run is a process with an OUT of its own. The table (Markdown) is the last thing printed.
"""
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TRAINER = Path(__file__).resolve().parents[1] / "train_dflash.py"
sys.path.insert(0, str(TRAINER.parent))
import train_dflash as td  # noqa: E402

RUNS, PARALLEL, OUT = "", "6", "out/ablation"
VARIANTS = {  # name -> what differs from the settings on the command line
    "base": [], "base seed 1": ["SEED=1"],
    "LR / 2": ["LR=0.5x"], "LR x 2": ["LR=2x"], "LR x 4": ["LR=4x"],
    "decay": ["LOSS=decay"], "decay seed 1": ["LOSS=decay", "SEED=1"],
    "decay gamma 2": ["LOSS=decay", "GAMMA=2.0"], "decay gamma 8": ["LOSS=decay", "GAMMA=8.0"],
    "3 taps": ["TARGET_LAYER_IDS=1,14,27"], "3 taps seed 1": ["TARGET_LAYER_IDS=1,14,27", "SEED=1"],
    "1 layer": ["DRAFT_LAYERS=1"], "3 layers": ["DRAFT_LAYERS=3"],
    "3 layers seed 1": ["DRAFT_LAYERS=3", "SEED=1"],
    "sliding x 4 + full W 64": ["SLIDING_WINDOW=64",
                                "LAYER_TYPES=" + "sliding_attention," * 4 + "full_attention"],
    "K 16": ["BLOCK_SIZE=16"], "K 16 seed 1": ["BLOCK_SIZE=16", "SEED=1"],
    "K 16 decay": ["BLOCK_SIZE=16", "LOSS=decay"],
    "4 x the anchors": ["NUM_ANCHORS=4x"], "init 0.04": ["INIT_STD=0.04"], "init 0.01": ["INIT_STD=0.01"],
}


def scaled(setting, base):
    """NAME=2x -> NAME=<twice what the command line says, or the trainer's own constant>."""
    name, value = setting.split("=", 1)
    if not value.endswith("x"):
        return setting
    was = base.get(name, str(getattr(td, name)))
    number = float(value[:-1]) * float(was)
    return f"{name}={int(number) if was.isdigit() else number}"


def run(name, settings):
    """-> the row of the table."""
    base = dict(s.split("=", 1) for s in settings)
    out = Path(OUT) / name.replace(" ", "_").replace("/", "div")
    out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    differs = [scaled(s, base) for s in VARIANTS[name]]
    command = [sys.executable, str(TRAINER), *settings, *differs, f"OUT={out}"]
    with open(out / "stdout.txt", "w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    metrics = out / "metrics.jsonl"
    lines = [json.loads(x) for x in metrics.read_text().splitlines()] if metrics.exists() else []
    evals, steps = [x for x in lines if "tau" in x], [x for x in lines if "loss" in x]
    if code or not evals or not steps:
        return f"| {name} | failed, exit {code}: {out}/stdout.txt | | | | | {time.time() - began:.0f} |"
    best = max(evals, key=lambda x: x["tau"])
    last = evals[-1]
    return (f"| {name} | {last['tau']:.3f} | {best['tau']:.3f} ({best['step']}) | {last['eval_loss']:.4f} | "
            f"{steps[-1]['loss']:.4f} | {steps[-1]['step_ms']:.0f} | {time.time() - began:.0f} |")


def main(argv):
    mine = {"RUNS": RUNS, "PARALLEL": PARALLEL, "OUT": OUT}
    settings = [a for a in argv if a.split("=", 1)[0] not in mine]
    mine.update(a.split("=", 1) for a in argv if a not in settings)
    globals()["OUT"] = mine["OUT"]
    names = mine["RUNS"].split(",") if mine["RUNS"] else list(VARIANTS)
    unknown = [n for n in names if n not in VARIANTS]
    if unknown:
        print(f"error: RUNS has {unknown}; there are {', '.join(VARIANTS)}", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(int(mine["PARALLEL"])) as pool:
        rows = list(pool.map(lambda n: run(n, settings), names))
    print(f"settings: {' '.join(settings)}; {mine['PARALLEL']} runs side by side")
    print("| run | tau at the end | best tau (step) | held-out loss | training loss | step ms | s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    sys.exit(main(sys.argv[1:]))

"""One factor at a time: the same data and steps, several runs side by side, one table.

    python dev/ablation.py TARGET=<dir> DATA=... EVAL_DATA=... STEPS=500 [NAME=VALUE ...]
                           [RUNS=base,decay] [PARALLEL=6] [OUT=out/ablation]

RUNS picks from VARIANTS; every other NAME=VALUE goes to train_dflash.py, which does the training: each run is
a process with an OUT of its own. The table (Markdown) is the last thing printed.
"""
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TRAINER = Path(__file__).resolve().parents[1] / "train_dflash.py"
sys.path.insert(0, str(TRAINER.parent))
import train_dflash as td
from dflash_trainer import settings

RUNS: list[str] = []          # names of VARIANTS; empty: all of them
PARALLEL: int = 6             # runs at a time
OUT: str = "out/ablation"     # one folder per run in it

VARIANTS = {  # name -> what differs from the settings on the command line
    "base": [],
    "base seed 1": ["SEED=1"],
    "LR / 2": ["LR=0.5x"],
    "LR x 2": ["LR=2x"],
    "LR x 4": ["LR=4x"],
    "decay": ["LOSS=decay"],
    "decay seed 1": ["LOSS=decay", "SEED=1"],
    "decay gamma 2": ["LOSS=decay", "GAMMA=2.0"],
    "decay gamma 8": ["LOSS=decay", "GAMMA=8.0"],
    "3 taps": ["TARGET_LAYER_IDS=1,14,27"],
    "3 taps seed 1": ["TARGET_LAYER_IDS=1,14,27", "SEED=1"],
    "1 layer": ["DRAFT_LAYERS=1"],
    "3 layers": ["DRAFT_LAYERS=3"],
    "3 layers seed 1": ["DRAFT_LAYERS=3", "SEED=1"],
    "sliding x 4 + full W 64": [
        "SLIDING_WINDOW=64", "LAYER_TYPES=" + "sliding_attention," * 4 + "full_attention"],
    "K 16": ["BLOCK_SIZE=16"],
    "K 16 seed 1": ["BLOCK_SIZE=16", "SEED=1"],
    "K 16 decay": ["BLOCK_SIZE=16", "LOSS=decay"],
    "4 x the anchors": ["NUM_ANCHORS=4x"],
    "init 0.04": ["INIT_STD=0.04"],
    "init 0.01": ["INIT_STD=0.01"],
}


def scaled(word):
    """NAME=2x -> NAME=<twice the trainer's setting>; other words as they are."""
    name, _, text = word.partition("=")
    if not text.endswith("x"):
        return word
    base = getattr(td, name)
    number = float(text[:-1]) * base
    return f"{name}={type(base)(number)}"


def train(name, words):
    """One run -> its row of the table."""
    out = Path(OUT) / name.replace(" ", "_").replace("/", "div")
    out.mkdir(parents=True, exist_ok=True)
    variant = [scaled(word) for word in VARIANTS[name]]
    command = [sys.executable, str(TRAINER), *words, *variant, f"OUT={out}"]
    began = time.time()
    with open(out / "stdout.txt", "w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    seconds = time.time() - began
    metrics = out / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    evals = [line for line in lines if "tau" in line]
    steps = [line for line in lines if "loss" in line]
    if code or not evals or not steps:
        return f"| {name} | failed, exit {code}: {out}/stdout.txt | | | | | {seconds:.0f} |"
    best = max(evals, key=lambda line: line["tau"])
    last = evals[-1]
    return (f"| {name} | {last['tau']:.3f} | {best['tau']:.3f} ({best['step']}) | {last['eval_loss']:.4f} | "
            f"{steps[-1]['loss']:.4f} | {steps[-1]['step_ms']:.0f} | {seconds:.0f} |")


def compare(words):
    for name in RUNS:
        settings.require_one_of("an entry of RUNS", name, VARIANTS)
    settings.require_positive(sys.modules[__name__], "PARALLEL")
    with settings.changed(td):
        settings.override(td, words)  # a mistake is found here, and scaled() looks at the trainer's constants
        with ThreadPoolExecutor(PARALLEL) as pool:
            rows = list(pool.map(lambda name: train(name, words), RUNS or VARIANTS))
    print(f"settings: {' '.join(words)}; {PARALLEL} runs side by side")
    print("| run | tau at the end | best tau (step) | held-out loss | training loss | step ms | s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(rows))


def main(argv):
    own, for_trainer = settings.split_words(sys.modules[__name__], argv)
    return settings.run_program(sys.modules[__name__], lambda: compare(for_trainer), own)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

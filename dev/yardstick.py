"""Six tiny training jobs on the CPU and a hash of all that each one learned: did a change move a number?

    python dev/yardstick.py                                     the tree that this script lies in
    python dev/yardstick.py ROOT=/path/to/another/tree          another checkout
    python dev/yardstick.py AGAINST=results/yardstick_cpu.txt   exit 1 where a hash is not that of the file
    python dev/yardstick.py JOBS=a,e                            some of them

Prints one line per job: hashes of the fp32 masters, of Adam's moments and step count, of the published
weights, and of what metrics.jsonl says about learning. Each job is `train_dflash.py train NAME=VALUE ...`
in a process of its own, two at a time. The hashes are the same on every run; another processor, or other
versions of torch and its libraries, may round differently, so compare two trees on one machine.
"""
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

import tiny_jobs

TIMEOUT_S = 110
LEARNING = (
    "step", "loss", "eval_loss", "tau", "acc_k", "accept_len", "lr", "grad_norm", "skipped", "bad_rows")
ENVIRONMENT = dict(
    OMP_NUM_THREADS="1", OMP_THREAD_LIMIT="1", MKL_NUM_THREADS="1", MKL_CBWR="COMPATIBLE",
    ATEN_CPU_CAPABILITY="default", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TQDM_DISABLE="1",
    TOKENIZERS_PARALLELISM="false")
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Job(NamedTuple):
    letter: str
    about: str
    settings: dict            # beside tiny_jobs.SETTINGS
    resumed_with: dict = {}   # settings of a second run in the same OUT, if any
    last_step: int = 6
    skips: bool = False       # some steps are not finite, and skipped
    bad_rows: int = 0         # malformed lines


class Failed(Exception):
    """A job did not end as it should; the text says how."""


def make_jobs(folder: Path) -> list[Job]:
    """Write targets and data into `folder`."""
    target = tiny_jobs.make_target(folder / "target")
    bad_target = tiny_jobs.make_target(folder / "bad_target", tiny_jobs.BAD_TOKEN)
    ids = tiny_jobs.id_file(folder)
    held_out_ids = tiny_jobs.id_file(folder, "held_out_ids.jsonl", n=12, seed=1)
    chats = tiny_jobs.chat_file(folder)
    held_out_chats = tiny_jobs.chat_file(folder, "held_out_chats.jsonl", n=12, seed=1)
    bad_ids = tiny_jobs.bad_token_file(folder)
    of_ids = dict(TARGET=target, DATA=ids, EVAL_DATA=held_out_ids)
    return [
        Job("a", "1 target, 1 drafter, token ids, full attention, LOSS=decay", dict(of_ids, LOSS="decay")),
        Job("b", "2 targets, 3 drafters, LOSS=dpace, evaluation",
            dict(of_ids, TARGET_DEVICES="cpu,cpu", DRAFTER_DEVICES="cpu,cpu,cpu", LOSS="dpace",
                 ROWS_PER_STEP=5, EVAL_EVERY=3, LOG_EVERY=2)),
        Job("c", "packed chats, several a row, evaluation",
            dict(TARGET=target, DATA=chats, EVAL_DATA=held_out_chats, SEQ_LEN=96, NUM_ANCHORS=12,
                 EVAL_EVERY=2, SAVE_EVERY=2), bad_rows=1),
        Job("d", "sliding and full attention, LOSS_FORM=checkpoint",
            dict(of_ids, LAYER_TYPES="sliding_attention,full_attention", SLIDING_WINDOW=12,
                 LOSS_FORM="checkpoint")),
        Job("e", "hidden states of one conversation are NaN",
            dict(of_ids, TARGET=bad_target, DATA=bad_ids, DRAFTER_DEVICES="cpu,cpu", STEPS=14),
            last_step=14, skips=True),
        # another LR after it: a run that starts anew instead of resuming gives other numbers
        Job("f", "stopped at step 3, resumed",
            dict(of_ids, STOP_AT=3, EVAL_EVERY=2, LOG_EVERY=2, DRAFTER_DEVICES="cpu,cpu"),
            resumed_with=dict(STOP_AT=None, LR=0.001)),
    ]


def train(root: Path, settings: dict, cache: Path) -> None:
    """`train` of the checkout at `root`; Failed with the end of its output."""
    command = [sys.executable, "train_dflash.py", "train", *tiny_jobs.arguments(settings)]
    environment = {**os.environ, **ENVIRONMENT, "XDG_CACHE_HOME": str(cache)}
    for name in OF_TORCHRUN:
        environment.pop(name, None)
    try:
        done = subprocess.run(command, cwd=root, env=environment, text=True, timeout=TIMEOUT_S,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        raise Failed(f"still ran after {TIMEOUT_S} s") from None
    if done.returncode:
        raise Failed(f"exit code {done.returncode}\n{done.stdout[-3000:]}")


def hash_of(tensors: dict[str, torch.Tensor]) -> str:
    """Of names, types, shapes and bytes, whatever their order."""
    if not tensors:
        raise Failed("a checkpoint lacks tensors that are hashed")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def learning_of(metrics: Path) -> list[dict]:
    """The lines of metrics.jsonl without what a clock or a queue decides."""
    lines = [json.loads(text) for text in metrics.read_text().splitlines()]
    return [{name: line[name] for name in LEARNING if name in line} for line in lines]


def check(job: Job, lines: list[dict]) -> None:
    """The job did what it is there for; else its hashes would say nothing."""
    logged = [line for line in lines if "loss" in line]
    if not logged or logged[-1]["step"] != job.last_step:
        raise Failed(f"its log does not end at step {job.last_step}")
    last = logged[-1]
    if (last["skipped"] > 0) != job.skips or last["skipped"] >= job.last_step:
        raise Failed(f"{last['skipped']} steps were skipped")
    if last["bad_rows"] != job.bad_rows:
        raise Failed(f"{last['bad_rows']} bad lines, {job.bad_rows} expected")
    wants_evaluation = job.settings.get("EVAL_EVERY", 0) > 0
    if any("tau" in line for line in lines) != wants_evaluation:
        raise Failed("evaluations are missing" if wants_evaluation else "there are evaluations")


def run_job(job: Job, root: Path, folder: Path) -> str:
    """-> its line."""
    out = folder / f"out_{job.letter}"
    settings = {**tiny_jobs.SETTINGS, **job.settings, "OUT": out}
    started = time.monotonic()
    try:
        train(root, settings, folder / f"cache_{job.letter}")
        if job.resumed_with:
            train(root, {**settings, **job.resumed_with}, folder / f"cache_{job.letter}")
        lines = learning_of(out / "metrics.jsonl")
        check(job, lines)
        state = load_file(out / "latest" / "trainer.safetensors")
        masters = {name: state[name] for name in state if name.startswith("master.")}
        moments = {name: state[name] for name in state if name.startswith(("exp_avg", "adam_step"))}
        hashes = {
            "masters": hash_of(masters), "moments": hash_of(moments),
            "model": hash_of(load_file(out / "latest" / "model.safetensors")),
            "metrics": hashlib.sha256(json.dumps(lines, sort_keys=True).encode()).hexdigest()[:16]}
        text = " ".join(f"{name} {value}" for name, value in hashes.items())
    except (Failed, OSError, ValueError, KeyError) as error:
        text = f"FAILED: {type(error).__name__}: {error}"
    print(f"job {job.letter}: {time.monotonic() - started:.1f} s", file=sys.stderr)
    return f"{job.letter} {text} | {job.about}" if "FAILED" not in text else f"{job.letter} {text}"


def hashes_in(line: str) -> str:
    """A job's line without what the job is about."""
    return line.partition(" | ")[0]


def main(argv: list[str]) -> int:
    """-> exit code: 1 where a job fails or differs from AGAINST."""
    given = {"ROOT": str(Path(__file__).resolve().parents[1]), "AGAINST": "", "JOBS": ""}
    for argument in argv:
        name, equals, value = argument.partition("=")
        if not equals or name not in given:
            print(f"error: {argument}: it takes {', '.join(given)} as NAME=VALUE", file=sys.stderr)
            return 2
        given[name] = value
    root = Path(given["ROOT"]).resolve()
    if not (root / "train_dflash.py").exists():
        print(f"error: ROOT = {given['ROOT']}: has no train_dflash.py", file=sys.stderr)
        return 2
    known = None
    if given["AGAINST"]:
        known = {hashes_in(line) for line in Path(given["AGAINST"]).read_text().splitlines()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wanted = given["JOBS"].split(",") if given["JOBS"] else list("abcdef")
        jobs = [job for job in make_jobs(folder) if job.letter in wanted]
        failed = len(jobs) < len(wanted)
        with ThreadPoolExecutor(2) as pool:
            for line in pool.map(lambda job: run_job(job, root, folder), jobs):
                print(line, flush=True)
                failed |= "FAILED" in line
                if known is not None and hashes_in(line) not in known:
                    print(f"  that differs from {given['AGAINST']}")
                    failed = True
    return int(failed)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    sys.exit(main(sys.argv[1:]))

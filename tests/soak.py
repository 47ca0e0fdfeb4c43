"""Is anything ever lost? Trains a tiny job again and again, kills it, and compares with undisturbed runs.

    nice python tests/soak.py [NAME=VALUE ...]      settings below; on two cores minutes for each part

main()          the parts of PARTS, then a table; the exit code is 1 iff anything was lost
  kills()       jobs killed with -9 at random instants (while starting, stepping, saving), started again until
                they reach their end: KILLS in all, in turn through KINDS
  memory()      one long job: memory, threads and open files from after its warm-up to its end

Everything is done from outside: a child process forked from a server that has imported the trainer (it has no
threads, so it starts in milliseconds), whose functions are wrapped there (tests/common.py). After every kill
`latest` is read and its checksums compared. At the end of every job: the same bits in all tensors, the same
metrics.jsonl and bad_steps.jsonl (no gap, nothing twice), no temporary file; a child that ends by itself
leaves no thread and no open file. Single faults (an error in a thread, a full disk, a signal) are in
tests/test_faults.py.
"""
import gc
import json
import os
import random
import shutil
import signal
import statistics
import sys
import threading
import time
import types
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import torch

import common
import train_dflash as trainer
from dflash_trainer import checkpoints, settings
from dflash_trainer.errors import require

PARTS: list[str] = ["kills", "memory"]
KILLS: int = 200             # kill -9
STEPS: int = 40              # of a job; each step saves
MEMORY_STEPS: int = 10000
FLAT: float = 0.02           # growth of the resident memory that still counts as flat
SEED: int = 0                # of the instants; the outcome must not depend on it
OUT: str = ""                # file for the log, besides stdout

BAD_ROWS = (11, 40, 41)      # whose hidden states hold a NaN, in the runs that have some
KINDS = [(), ("NaN rows",), ("slow disk",), ("slow target",)]
PATCH = types.SimpleNamespace(setattr=setattr)
CHECKS = Counter()


def log(text):
    print(text, flush=True)
    if OUT:
        with open(OUT, "a") as file:
            file.write(text + "\n")


# ------------------------------------------------------------------------------------------ inside a child

def nan_rows(seed):
    common.put_nan(PATCH, BAD_ROWS)


def slow_target(seed):
    common.delay_calls(PATCH, trainer.target_features, seed)


def slow_disk(seed):
    for function in (checkpoints.save_drafter, checkpoints.checksum, checkpoints.sync_path):
        common.delay_calls(PATCH, function, seed)


HINDRANCES = {"NaN rows": nan_rows, "slow target": slow_target, "slow disk": slow_disk}


def open_files():
    """Paths that this process has open -> how often, without the directory that is read here."""
    found = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return found


def prepare(report, hindrances, seed):
    """Called first in a child: applies the hindrances, and has main() write down what it leaves behind."""
    inner = trainer.main

    def main(argv):
        threads = set(threading.enumerate())
        files = open_files()
        code = inner(argv)
        gc.collect()  # a run is full of cycles; its memory-mapped rows go with it
        new = [thread.name for thread in threading.enumerate() if thread not in threads]
        left = [name for name in new if name != "tqdm_monitor"]
        left += sorted(open_files() - files)
        Path(report).write_text(json.dumps(left))
        return code

    trainer.main = main
    for name in hindrances:
        HINDRANCES[name](seed)


# ------------------------------------------------------------------------------------------------------ a job

class Job:
    """One OUT, trained by one child after the other until it is done."""

    def __init__(self, name, hindrances, seed, **changes):
        self.hindrances = hindrances
        self.seed = seed
        self.out = common.scratch() / name
        self.report = common.scratch() / f"{name}.left"
        self.child = None
        self.settings = dict(STEPS=STEPS, SAVE_EVERY=1, EVAL_EVERY=7, LOG_EVERY=4, KEEP=2)
        self.settings.update(common.threads(2, 2))
        self.settings.update(changes)

    def start(self):
        self.report.unlink(missing_ok=True)
        setup = (str(self.report), self.hindrances, self.seed)
        self.child = common.start(self.out, prepare, setup, **self.settings)

    def end(self, code=0):
        """Waits for the child, which ends by itself with this exit code."""
        found = self.child.code()
        left = []
        if self.report.exists():
            left = json.loads(self.report.read_text())
            CHECKS["ends without a thread or an open file left"] += 1
        assert found == code, f"exit code {found}, expected {code}"
        assert not left, f"left behind: {left}"

    def finish(self):
        self.start()
        self.end()

    def progress(self):
        return len(common.metrics_text(self.out))

    def save_in_progress(self):
        """(directory being written, when something was last added), or None."""
        try:
            for path in self.out.glob(".part_*"):
                return path.name, path.stat().st_mtime_ns
        except FileNotFoundError:
            pass  # it has just got its final name
        return None

    def until(self, condition):
        """-> did it become true before the child ended?"""
        while self.child.process.exitcode is None:
            if condition():
                return True
            time.sleep(0.0005)
        return False

    def bad_steps(self):
        path = self.out / "bad_steps.jsonl"
        return path.read_text() if path.exists() else ""

    def compare(self, base):
        common.assert_same(self.out / "latest", base.out / "latest")
        ours = common.untimed(self.out)
        keys = [(line["step"], "tau" in line) for line in ours]
        assert len(set(keys)) == len(keys), f"a line is there twice: {keys}"
        assert ours == common.untimed(base.out), "metrics.jsonl differs"
        assert self.bad_steps() == base.bad_steps(), "bad_steps.jsonl differs"
        common.no_leftovers(self.out)
        CHECKS["ends equal to the undisturbed run"] += 1


def undisturbed():
    """hindrances -> the run to compare with: the job without and with bad rows. Each one is run twice, for it
    must be deterministic."""
    bases = {}
    for hindrances in ((), ("NaN rows",)):
        for n in (1, 2):
            job = Job(f"base_{len(hindrances)}_{n}", hindrances, 0)
            job.finish()
            job.compare(bases.setdefault(hindrances, job))
    skipped = [common.log_lines(base.out)[-1]["skipped"] for base in bases.values()]
    assert skipped == [0, 2], skipped
    return bases


@contextmanager
def attempt(what, job, failures):
    """A failure is logged with the child's last words; its files stay."""
    try:
        yield
    except Exception as e:
        last_words = job.child.log.read_text()[-3000:] if job.out.exists() else ""
        failures.append(what)
        log(f"LOST: {what}, {job.out}: {type(e).__name__}: {e}\n{last_words}")
        shutil.copytree(job.out, f"/tmp/soak_failed_{os.getpid()}_{len(failures)}", symlinks=True)
    else:
        shutil.rmtree(job.out)


# ------------------------------------------------------------------------------------------------------ parts

def wait_for_instant(job, rng):
    """Waits for a random instant -> (what was aimed at, is the child still there?)."""
    aim = rng.choices(("starting", "stepping", "saving"), (1, 2, 3))[0]
    if aim == "starting":
        time.sleep(rng.uniform(0, 0.6))
    elif aim == "stepping":
        seen = job.progress()
        job.until(lambda: job.progress() > seen)
        time.sleep(rng.uniform(0, 0.2))
    else:
        for _ in range(rng.randint(1, 6)):
            before = job.save_in_progress()

            def another_save_began(before=before):
                now = job.save_in_progress()
                return now is not None and (before is None or now[0] != before[0])
            job.until(another_save_began)
        time.sleep(rng.uniform(0, 0.012))
    return aim, job.child.process.exitcode is None


def kill_once(job, rng, counts):
    """Starts the job and kills it -> was it killed before it had ended?"""
    left_before = job.save_in_progress()
    job.start()
    aim, alive = wait_for_instant(job, rng)
    if alive:
        os.kill(job.child.pid, signal.SIGKILL)
    if job.child.code() != -signal.SIGKILL:
        job.end()
        return False
    counts["kills"] += 1
    counts[f"aimed at {aim}"] += 1
    counts["in the middle of a save"] += job.save_in_progress() not in (None, left_before)
    counts["before the first checkpoint"] += not (job.out / "latest").exists()
    common.complete(job.out)
    return True


def kills(bases, failures):
    """-> rows of a table: kind of job, how often it was killed and when."""
    rng = random.Random(SEED)
    rows = {}
    n_kills = 0
    n_jobs = 0
    while n_kills < KILLS:
        hindrances = KINDS[n_jobs % len(KINDS)]
        kind = " ".join(hindrances) or "nothing else"
        job = Job(f"killed_{n_jobs}", hindrances, n_jobs)
        n_jobs += 1
        counts = Counter()
        with attempt(f"kill -9 and {kind}, job {n_jobs}", job, failures):
            while n_kills + counts["kills"] < KILLS and kill_once(job, rng, counts):
                pass
            job.finish()
            slow_ones_like = hindrances if hindrances == ("NaN rows",) else ()
            job.compare(bases[slow_ones_like])
            counts["jobs"] += 1
        n_kills += counts["kills"]
        rows[kind] = rows.get(kind, Counter()) + counts
    rows["all"] = sum(rows.values(), Counter())
    columns = ["jobs", "kills", "aimed at starting", "aimed at stepping", "aimed at saving",
               "in the middle of a save", "before the first checkpoint"]
    table = [["kill -9 and", *columns]]
    for kind, counts in rows.items():
        table.append([kind, *(counts[name] for name in columns)])
    return table


def process_state(pid):
    """-> (resident MiB, threads, open files) of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    resident = int(status["VmRSS"].split()[0]) / 1024
    return resident, int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd"))


def memory(bases, failures):
    """The medians of the second tenth of a long job against those of its last."""
    job = Job("long", (), 0, STEPS=MEMORY_STEPS, LOG_EVERY=MEMORY_STEPS // 100, EVAL_EVERY=500,
              SAVE_EVERY=100)
    seen = {}  # tenth of the job -> states
    medians = {}
    with attempt("memory", job, failures):
        job.start()
        while job.child.process.exitcode is None:
            time.sleep(0.2)
            lines = common.log_lines(job.out)
            tenth = min(9, lines[-1]["step"] * 10 // MEMORY_STEPS) if lines else 0
            try:
                seen.setdefault(tenth, []).append(process_state(job.child.pid))
            except (OSError, KeyError):
                break  # it has just ended
        job.end()
        for tenth, states in sorted(seen.items()):
            medians[tenth] = [statistics.median_low(column) for column in zip(*states)]
        early = medians[1]
        late = medians[9]
        growth = late[0] / early[0] - 1
        log(f"\n{MEMORY_STEPS} steps: resident memory {growth:+.2%} from the second tenth to the last")
        assert abs(growth) <= FLAT, f"resident memory {growth:+.2%}, FLAT = {FLAT}"
        assert late[1:] == early[1:], f"threads and files {early[1:]}, later {late[1:]}"
        CHECKS["memory, threads and open files flat"] += 1
    table = [["tenth of the job", "resident MiB", "threads", "open files"]]
    for tenth, (resident, n_threads, n_files) in medians.items():
        table.append([tenth + 1, f"{resident:.1f}", n_threads, n_files])
    return table


# ------------------------------------------------------------------------------------------------------- main

def check_settings():
    this = sys.modules[__name__]
    for part in PARTS:
        settings.require_one_of("an entry of PARTS", part, ("kills", "memory"))
    settings.require_positive(this, "KILLS", "STEPS", "MEMORY_STEPS", "FLAT")
    require(STEPS >= 25, f"STEPS = {STEPS}: 25 or more, for the bad rows to be among its rows")
    require(MEMORY_STEPS >= 100, f"MEMORY_STEPS = {MEMORY_STEPS}: 100 or more")


def soak():
    check_settings()
    os.environ["XDG_CACHE_HOME"] = str(common.scratch() / "cache")
    failures = []
    began = time.monotonic()
    log(f"torch {torch.__version__.split('+')[0]}, {os.cpu_count()} CPU cores, commit {checkpoints.commit()}")
    log("python tests/soak.py " + " ".join(settings.as_words(sys.modules[__name__])))
    bases = undisturbed()
    for part in PARTS:
        part_began = time.monotonic()
        table = {"kills": kills, "memory": memory}[part](bases, failures)
        log(f"\n{part}: {time.monotonic() - part_began:.0f} s")
        table.insert(1, ["---"] * len(table[0]))
        for row in table:
            log("| " + " | ".join(map(str, row)) + " |")
    checks = ", ".join(f"{count} {name}" for name, count in CHECKS.items())
    log(f"\n{time.monotonic() - began:.0f} s in all; {checks}")
    log(f"LOST: {'; '.join(failures)}" if failures else "nothing lost")
    return 1 if failures else 0


def main(argv):
    return settings.run_program(sys.modules[__name__], soak, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

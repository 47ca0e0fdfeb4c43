"""Is anything ever lost? Trains a tiny job again and again, hurts it, and compares with undisturbed runs.

    nice python tests/soak.py [NAME=VALUE ...]      settings below; on two cores minutes for each part

main()          the parts of PARTS, then a table; the exit status is 1 iff anything was lost
  kills()       jobs killed with -9 at random instants (while starting, stepping, saving), started again until
                they reach their end: KILLS in all, in turn through KINDS
  faults()      each of FAULTS REPEATS times: the run says what it has to, and the next one ends as it should
  memory()      one long job: memory, threads and open files from after its warm-up to its end

Everything is done from outside: a child process forked from a server that has imported the trainer (it has no
threads, so it starts in milliseconds), whose functions are wrapped there (tests/common.py). After every kill
`latest` is read and its checksums compared. At the end of every job: the same bits in all tensors, the same
metrics.jsonl and bad_steps.jsonl (no gap, no double), no temporary file; a child that ends by itself leaves
no thread and no open file.
"""
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import typing
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import torch  # noqa: E402

import common  # noqa: E402
import train_dflash as trainer  # noqa: E402
from dflash_trainer import checkpoints, settings  # noqa: E402

PARTS: list[str] = ["kills", "faults", "memory"]
KILLS: int = 200           # kill -9
STEPS: int = 40            # of a job; each step saves
REPEATS: int = 5           # of each fault
MEMORY_STEPS: int = 10000
FLAT: float = 0.02         # growth of the resident memory that is still called flat
SEED: int = 0              # of the instants; what comes out must not depend on it
OUT: str = ""              # file for the log, besides stdout
SETTINGS = {n: t for n, t in typing.get_type_hints(sys.modules[__name__]).items() if n.isupper()}

BAD_ROWS = 11, 40, 41      # whose hidden states hold a NaN, in the runs that have some
PATCH = types.SimpleNamespace(setattr=setattr)
CHECKS = Counter()


def say(text):
    print(text, flush=True)
    if OUT:
        with open(OUT, "a") as f:
            f.write(text + "\n")


# -------------------------------------------------------------------------------- what is done inside a child


def nan_rows(seed):
    common.put_nan(PATCH, BAD_ROWS)


def slow_target(seed):
    common.delay_calls(PATCH, "target_features", seed)


def slow_disk(seed):
    for name in ("save_file", "checksum", "sync_path"):
        common.delay_calls(PATCH, name, seed, checkpoints)


def raise_in(where, name):
    return lambda seed: common.fail_at(PATCH, where, name, 1 + seed % 20)


WRAPPED = {
    "NaN rows": nan_rows, "slow target": slow_target, "slow disk": slow_disk,
    "raise in reader": raise_in(trainer.RowStream, "row"),
    "raise in target": raise_in(trainer, "target_features"),
    "raise in drafter": raise_in(trainer, "micro_step"),
    "raise in average": raise_in(trainer.Run, "average"),
    "raise in saver": raise_in(checkpoints, "write_checkpoint")}


def open_files():
    """What this process has open, without the directory that is read here."""
    found = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
        except FileNotFoundError:
            pass
    return found


def prepare(report, faults, seed):
    """First thing in a child: the faults, and a main() that writes down what it leaves behind."""
    inner = trainer.main

    def main(argv):
        threads, files = set(threading.enumerate()), open_files()
        code = inner(argv)
        gc.collect()  # a run is full of cycles; its memory-mapped rows go with it
        left = [t.name for t in threading.enumerate() if t not in threads and t.name != "tqdm_monitor"]
        Path(report).write_text(json.dumps(left + sorted(open_files() - files)))
        return code
    trainer.main = main
    for name in faults:
        WRAPPED[name](seed)


# ------------------------------------------------------------------------------------------------------ a job


class Job:
    """One OUT, trained by one child after the other until it is done."""

    def __init__(self, name, faults, seed, **settings):
        self.faults, self.seed = faults, seed
        self.out, self.report = common.scratch() / name, common.scratch() / f"{name}.left"
        self.settings = {**dict(STEPS=STEPS, SAVE_EVERY=1, EVAL_EVERY=7, LOG_EVERY=4, KEEP=2, STALL_S=60),
                         **common.threads(2, 2), **settings}

    def start(self, *more):
        self.report.unlink(missing_ok=True)
        self.child = common.start(self.out, prepare, (str(self.report), (*self.faults, *more), self.seed),
                                  **self.settings)
        return self.child

    def end(self, *codes):
        """The child ends by itself, with one of these exit codes."""
        code, left = self.child.code(120), []
        if self.report.exists():
            left = json.loads(self.report.read_text())
            CHECKS["ends without a thread or an open file left"] += 1
        assert code in codes, f"exit {code}, expected {codes}"
        assert not left, f"left behind: {left}"

    def finish(self):
        self.start()
        self.end(0)

    def progress(self):
        return len(common.metrics_text(self.out))

    def saving(self):
        """(directory being written, when something was last added) or None."""
        try:
            return next(((p.name, p.stat().st_mtime_ns) for p in self.out.glob(".part_*")), None)
        except FileNotFoundError:
            return None  # it has just got its final name

    def until(self, condition):
        """-> did it become true before the child ended?"""
        while self.child.process.exitcode is None:
            if condition():
                return True
            time.sleep(0.0005)
        return False

    def compare(self, base, windows=True):
        """windows: log lines are means over the same steps. A signal adds a line, which cuts one."""
        common.assert_same(self.out / "latest", base.out / "latest")
        ours, theirs = common.untimed(self.out), common.untimed(base.out)
        keys = [(m["step"], "tau" in m) for m in ours]
        assert len(set(keys)) == len(keys), f"a line is there twice: {keys}"
        if not windows:
            means, by_key = ("loss", "accept_len", "grad_norm"), dict(zip(keys, ours))
            ours = [by_key.get((m["step"], "tau" in m), {}) for m in theirs]
            ours, theirs = ([{k: v for k, v in m.items() if k not in means} for m in lines]
                            for lines in (ours, theirs))
        assert ours == theirs, "metrics.jsonl differs"
        ours, theirs = (bad_steps(job.out) for job in (self, base))
        assert ours == theirs, "bad_steps.jsonl differs"
        common.no_leftovers(self.out)
        CHECKS["ends equal to the undisturbed run"] += 1


def bad_steps(out):
    path = out / "bad_steps.jsonl"
    return path.read_text() if path.exists() else ""


def undisturbed():
    """-> the runs to compare with: the job without and with bad rows. Each one twice, for it must be
    deterministic."""
    bases = {}
    for faults in ((), ("NaN rows",)):
        for n in (1, 2):
            job = Job(f"base_{len(faults)}_{n}", faults, 0)
            job.finish()
            job.compare(bases.setdefault(faults, job))
    skipped = [common.log_lines(b.out)[-1]["skipped"] for b in bases.values()]
    assert skipped == [0, 2], skipped
    return bases


@contextmanager
def attempt(what, job, failures):
    """A failure is said with the child's last words; its files stay."""
    try:
        yield
        for path in job.out.iterdir():  # the folder itself may be a mount
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except Exception as e:
        log = job.child.log.read_text()[-3000:] if job.out.exists() else ""
        failures.append(what)
        say(f"LOST: {what}, {job.out}: {type(e).__name__}: {e}\n{log}")
        shutil.copytree(job.out, f"/tmp/soak_failed_{os.getpid()}_{len(failures)}", symlinks=True)


# ------------------------------------------------------------------------------------------------------ parts

KINDS = (), ("NaN rows",), ("slow disk",), ("slow target",)


def wait_for_instant(job, rng):
    """Until a random instant -> (how it was aimed, is the child still there?)."""
    aim = rng.choices(("starting", "stepping", "saving"), (1, 2, 3))[0]
    if aim == "starting":
        time.sleep(rng.uniform(0, 0.6))
    elif aim == "stepping":
        seen = job.progress()
        job.until(lambda: job.progress() > seen)
        time.sleep(rng.uniform(0, 0.2))
    else:
        for _ in range(rng.randint(1, 6)):
            last = (job.saving() or [None])[0]
            job.until(lambda: (job.saving() or [last])[0] != last)
        time.sleep(rng.uniform(0, 0.012))
    return aim, job.child.process.exitcode is None


def kill_once(job, rng, counts):
    """-> was the job killed before it had ended?"""
    left = job.saving()
    job.start()
    aim, alive = wait_for_instant(job, rng)
    if alive:
        os.kill(job.child.pid, signal.SIGKILL)
    if job.child.code(60) != -signal.SIGKILL:
        job.end(0)
        return False
    counts["kills"] += 1
    counts[f"aimed at {aim}"] += 1
    counts["in the middle of a save"] += job.saving() not in (None, left)
    counts["before the first checkpoint"] += not (job.out / "latest").exists()
    common.complete(job.out)
    return True


def kills(bases, failures):
    rng, total, rows, n = random.Random(SEED), Counter(), {}, 0
    while total["kills"] < KILLS:
        faults = KINDS[n % len(KINDS)]
        job, beside = Job(f"killed_{n}", faults, n), " ".join(faults) or "nothing else"
        counts = rows.setdefault(beside, Counter())
        n, before = n + 1, counts["kills"]
        with attempt(f"kill -9 and {beside}, job {n}", job, failures):
            while total["kills"] + counts["kills"] - before < KILLS and kill_once(job, rng, counts):
                pass
            job.finish()
            job.compare(bases[faults if faults == ("NaN rows",) else ()])
            counts["jobs"] += 1
        total["kills"] += counts["kills"] - before
    names = ("jobs", "kills", "aimed at starting", "aimed at stepping", "aimed at saving",
             "in the middle of a save", "before the first checkpoint")
    rows["all"] = sum(rows.values(), Counter())
    return [["kill -9 and", *names], *([k, *(c[name] for name in names)] for k, c in rows.items())]


def raised(kind):
    def fault(job, rng):
        job.start(kind)
        job.end(1)
        text = job.child.text()
        said = [x in text for x in ("boom in", "Traceback", "ERROR in thread ")]
        assert all(said), f"error, traceback, name: {said}"
        return f"exit 1, {text.split('ERROR in thread ')[1].split(':')[0].rstrip('-01')} named"
    return fault


def plain(kind):
    def fault(job, rng):
        job.start(kind)
        job.end(0)
        return "exit 0"
    return fault


def terminated(job, rng):
    job.start()
    job.until(lambda: job.progress())
    time.sleep(rng.uniform(0, 0.3))
    began = time.monotonic()
    os.kill(job.child.pid, signal.SIGTERM)
    job.end(143, 0)  # 0: it came after the last step
    took = time.monotonic() - began
    assert took < 10, f"{took:.1f} s from the signal to the end"
    return "exit 143"


def filled(job, rng):
    """OUT is a small file system; something else fills it, and later makes room again."""
    job.start("slow target")
    assert job.until(lambda: job.progress())
    time.sleep(rng.uniform(0, 0.3))
    ballast = job.out / "ballast"
    with open(ballast, "wb", buffering=0) as f:
        for size in (1 << 16, 1 << 12):
            while job.child.process.exitcode is None and write_block(f, size):
                pass
    saves = rng.randint(1, 12)  # that find no room
    assert job.until(lambda: job.child.text().count("could not be written") >= saves), "the disk did not fill"
    ballast.unlink()
    job.end(0)
    return "exit 0, said at once" + " (log lines waited too)" * ("wait in memory" in job.child.text())


def write_block(f, size):
    try:
        return f.write(bytes(size)) == size
    except OSError:
        return False


@contextmanager
def small_disk(folder, mib=4):
    """A tmpfs on the folder. -> could it be mounted?"""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "soak", folder], capture_output=True)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", folder], check=True)


FAULTS = {**{k: raised(k) for k in WRAPPED if k.startswith("raise")},
          **{k: plain(k) for k in ("slow target", "slow disk")}, "SIGTERM": terminated, "full disk": filled}


def faults(bases, failures):
    """Half of the jobs have bad rows too."""
    rng, rows = random.Random(SEED), [["fault", "runs", "what the run did", "equal in the end"]]
    for kind, fault in FAULTS.items():
        said, equal = Counter(), 0
        for n in range(REPEATS):
            job = Job(f"{kind}_{n}".replace(" ", "_"), ("NaN rows",) * (n % 2), rng.randrange(1000))
            with small_disk(job.out) if kind == "full disk" else nothing() as possible, \
                    attempt(f"{kind}, run {n + 1}", job, failures):
                if not possible:
                    said["skipped: a tmpfs can't be mounted here"] += 1
                    continue
                said[fault(job, rng)] += 1
                job.finish()
                job.compare(bases[job.faults], windows=kind != "SIGTERM")
                equal += 1
        rows.append([kind, REPEATS, ", ".join(f"{k} x{v}" for k, v in said.items()), equal])
    return rows


@contextmanager
def nothing():
    yield True


def state_of(pid):
    """-> (resident MiB, threads, open files) of a process."""
    status = dict(x.split(":", 1) for x in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd"))


def memory(bases, failures):
    """The median of the second tenth of the job against that of its last."""
    job, seen = Job("long", (), 0, STEPS=MEMORY_STEPS, LOG_EVERY=MEMORY_STEPS // 100, EVAL_EVERY=500,
                           SAVE_EVERY=100), {}
    with attempt("memory", job, failures):
        job.start()
        while job.child.process.exitcode is None:
            time.sleep(0.2)
            steps = common.log_lines(job.out)
            try:
                seen.setdefault(min(9, steps[-1]["step"] * 10 // MEMORY_STEPS) if steps else 0, []).append(
                    state_of(job.child.pid))
            except (OSError, KeyError):
                break  # it has just ended
        job.end(0)
        middle = {tenth: [sorted(x)[len(x) // 2] for x in zip(*states)] for tenth, states in seen.items()}
        growth = middle[9][0] / middle[1][0] - 1
        say(f"\n{MEMORY_STEPS} steps: resident memory {growth:+.2%} from the second tenth to the last")
        assert abs(growth) <= FLAT, f"resident memory {growth:+.2%}, FLAT = {FLAT}"
        assert middle[9][1:] == middle[1][1:], f"threads and files {middle[1][1:]}, later {middle[9][1:]}"
        CHECKS["memory, threads and open files flat"] += 1
    return [["tenth of the job", "resident MiB", "threads", "open files"],
            *([t + 1, f"{m[0]:.1f}", *m[1:]] for t, m in sorted(middle.items()))]


# ------------------------------------------------------------------------------------------------------- main


def override(words):
    for word in words:
        name, _, text = word.partition("=")
        if name not in SETTINGS:
            raise SystemExit(f"soak: unknown setting {name!r}; there are {', '.join(SETTINGS)}")
        try:
            globals()[name] = settings.convert(text, SETTINGS[name])
        except (ValueError, SyntaxError):
            raise SystemExit(f"soak: {word}: expected {SETTINGS[name]}") from None
    wrong = [p for p in PARTS if p not in ("kills", "faults", "memory")]
    if wrong or min(KILLS, STEPS, REPEATS, MEMORY_STEPS) < 1 or STEPS < 25:
        numbers = f"KILLS={KILLS}, REPEATS={REPEATS}, MEMORY_STEPS={MEMORY_STEPS} (1 or more)"
        raise SystemExit(f"soak: PARTS={','.join(PARTS)} (kills, faults, memory), STEPS={STEPS} (25 or more), "
                         + numbers)


def main(words):
    override(words)
    os.environ["XDG_CACHE_HOME"] = str(common.scratch() / "cache")
    failures, begin = [], time.monotonic()
    say(f"torch {torch.__version__.split('+')[0]}, {os.cpu_count()} CPU cores, "
        f"commit {trainer.checkpoints.commit()}")
    say(f"python tests/soak.py {' '.join(words)}")
    say(" ".join(f"{n}={globals()[n]}" for n in SETTINGS if n != "OUT"))
    bases = undisturbed()
    for part in PARTS:
        began = time.monotonic()
        table = globals()[part](bases, failures)
        say(f"\n{part}: {time.monotonic() - began:.0f} s")
        for i, row in enumerate(table):
            say("| " + " | ".join(map(str, row)) + " |" + ("\n|" + "---|" * len(row)) * (i == 0))
    say(f"\n{time.monotonic() - begin:.0f} s in all; " + ", ".join(f"{v} {k}" for k, v in CHECKS.items()))
    say(f"LOST: {'; '.join(failures)}" if failures else "nothing lost")
    return int(bool(failures))


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    sys.exit(main(sys.argv[1:]))

"""What a run says of itself: statistics of its steps -> log line, metrics.jsonl, warnings.

    LogFiles     the screen, train.log, metrics.jsonl and bad_steps.jsonl of a run's folder
    RunLog       reads the drafters' statistics at log and save steps, once for the whole window
    Progress     what a resumed run must know of the steps before it

Units: seconds on the host's and the devices' clocks, milliseconds in the log.
"""
import dataclasses
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from dflash_trainer import checkpoints
from dflash_trainer.devices import memory_gib
from dflash_trainer.errors import require
from dflash_trainer.learning import why_not_learning
from dflash_trainer.start_clock import StartClock, table


class RowStats(NamedTuple):
    """One row's micro-step: columns of a tensor, summed over drafters and machines with the gradients."""
    loss: float      # sum of w * loss of a slot, the terms of LOSS_TERMS mixed
    weight: float    # sum of w
    matches: float   # leading drafts that are right, summed over the valid anchors
    anchors: float   # valid anchors
    bad: float       # 1 where the loss was not finite
    tv: float = 0.0  # sum of w * tv, where the loss needs the target's distribution
    kl: float = 0.0  # sum of w * kl


class StepStats(NamedTuple):
    """One optimiser step: columns of a tensor on the first drafter's device."""
    grad_norm: float    # after the division by the loss denominator
    skipped: float      # 1: no update, the step was bad or had no slot that counts
    bad: float          # 1: loss or gradients were not finite
    first_bad: float    # number of the first gradient that was not finite
    denominator: float  # what the step's sum of w * loss was divided by


class StepRecord(NamedTuple):
    """What the host knows of a step once its window has been read."""
    step: int
    rows: list   # [RowStats]
    stats: StepStats


@dataclasses.dataclass
class Progress:
    """Kept in every checkpoint, so that a resumed run goes on as if it had not stopped."""
    best: dict | None = None            # {"step", "tau"} of the best evaluation
    best_eval_loss: dict | None = None  # {"step", "eval_loss"}
    eval_loss_rose: bool = False        # overfitting has been reported
    skipped: int = 0                    # steps without an update
    bad_steps_in_a_row: int = 0
    last_eval_step: int | None = None
    window: list = dataclasses.field(default_factory=list)  # [StepRecord] since the last log line
    eval_data: str | None = None        # fingerprint of EVAL_DATA

    @classmethod
    def from_info(cls, info: dict) -> "Progress":
        """trainer.json of a checkpoint -> Progress; what an older file lacks starts afresh."""
        known = {field.name: info[field.name] for field in dataclasses.fields(cls) if field.name in info}
        progress = cls(**known)
        progress.window = [
            StepRecord(step, [RowStats(*row) for row in rows], StepStats(*stats))
            for step, rows, stats in progress.window]
        return progress


class LogFiles:
    """The screen and the text files of a run's folder. Any thread may write."""

    def __init__(self, out: Path):
        self.out = out
        self.lines = checkpoints.Lines(out)
        self.board = None  # tensorboard's writer
        self.bar = None    # the progress bar, while it is shown

    def write(self, text: str, screen: str | None = None) -> None:
        """One line in train.log, and on the screen: there `screen`, where a shorter one says enough."""
        shown = text if screen is None else screen
        with self.lines.lock:
            self.lines.append("train.log", text)
            with suppress(OSError):  # the run outlives what reads its screen
                if self.bar:
                    tqdm.write(shown)
                else:
                    print(shown, flush=True)

    def note(self, text: str) -> None:
        """One line in train.log alone: settings, versions, all that nobody watches a screen for."""
        with self.lines.lock:
            self.lines.append("train.log", text)

    def record(self, values: dict) -> None:
        """One JSON object per line in metrics.jsonl; numbers go to tensorboard too, where it is installed."""
        self.lines.append("metrics.jsonl", json.dumps(values))
        if self.board:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self.board.add_scalar(name, value, values["step"])

    @contextmanager
    def progress_bar(self, first: int, last: int, shown: bool) -> Iterator[None]:
        with tqdm(total=last, initial=first, unit="step", disable=not shown) as bar:
            self.bar = None if bar.disable else bar
            try:
                yield
            finally:
                self.bar = None

    @contextmanager
    def evaluation_bar(self, n_rows: int) -> Iterator[tqdm]:
        """A second bar, below that of the steps and only where there is one; it goes when it is full."""
        with tqdm(total=n_rows, desc="evaluating", unit="row", leave=False, disable=self.bar is None) as bar:
            yield bar

    @contextmanager
    def tensorboard(self) -> Iterator[None]:
        self.board = checkpoints.tensorboard(self.out)
        try:
            yield
        finally:
            if self.board:
                self.board.close()


class RunLog:
    """Statistics of steps, read from the first drafter's device at log and save steps: one sync a window."""

    def __init__(self, settings, files: LogFiles, progress: Progress, schedule, tokens_of_steps,
                 n_bad_lines: int):
        """tokens_of_steps(first, last): tokens in the rows of these steps, over all machines."""
        self.settings = settings
        self.files = files
        self.progress = progress
        self.schedule = schedule
        self.tokens_of_steps = tokens_of_steps
        self.n_bad_lines = n_bad_lines
        self.clock = WindowClock(schedule.start)
        self.losses = []      # of every finite step since this process started
        self.grad_norms = []
        self.warned = False   # that the drafter does not learn
        self.evaluation_lock = threading.Lock()
        self.evaluation_bar = None  # while an evaluation is under way
        self.n_evaluated = 0        # held-out rows of it that are done

    def write(self, text: str, screen: str | None = None) -> None:
        self.files.write(text, screen)

    def write_start(self, clock: StartClock, seconds_alone: dict) -> None:
        """After the first step: where the start's time went. seconds_alone: the gate's."""
        parts = dict(clock.seconds)
        if self.clock.evaluation:
            parts["first evaluation"] = self.clock.evaluation
        parts["first step"] = self.clock.elapsed() - self.clock.evaluation
        for line in table(parts, clock.total(), seconds_alone):
            self.write(line)

    # ---- statistics of steps

    def read_statistics(self, optimizer, end: int) -> None:
        """Read the steps before `end` that have not been read yet, and report those that were not finite."""
        row_ring = optimizer.row_ring.tolist()
        step_ring = optimizer.step_ring.tolist()
        fresh = []
        for step in range(self.clock.read_to, end):
            place = step % len(step_ring)
            rows = [RowStats(*row) for row in row_ring[place]]
            fresh.append(StepRecord(step, rows, StepStats(*step_ring[place])))
        self.clock.read_to = end
        for record in fresh:
            self.progress.skipped += int(record.stats.skipped)
            if record.stats.bad:
                self.progress.bad_steps_in_a_row += 1
                self.report_bad_step(record, optimizer.names[int(record.stats.first_bad)])
            else:
                self.progress.bad_steps_in_a_row = 0
        # a new list: the saver's thread may be writing the old one
        self.progress.window = self.progress.window + fresh

    def report_bad_step(self, record: StepRecord, tensor_name: str) -> None:
        """UserError once K_BAD steps in a row were not finite."""
        n_rows = self.schedule.rows_per_step
        first_row = record.step * n_rows
        rows = [first_row + i for i, row in enumerate(record.rows) if row.bad]
        rows = rows or list(range(first_row, first_row + n_rows))
        bad = {"step": record.step + 1, "rows": rows, "first_bad_tensor": tensor_name}
        self.files.lines.append("bad_steps.jsonl", json.dumps(bad))
        where = f"rows {rows}; first bad gradient {tensor_name}"
        self.write(f"WARNING: step {record.step + 1} was not finite and was skipped; {where}")
        n_bad = self.progress.bad_steps_in_a_row
        limit = self.settings.K_BAD
        require(n_bad < limit, f"{n_bad} steps in a row were not finite (K_BAD = {limit}); {where}")

    # ---- the log line

    def log_if_due(self, optimizer, step: int, learning_rate: float, queues, reduce_watch,
                   ending: bool) -> None:
        """After `step` updates: move the bar, and write the line of the window that ends here."""
        if self.files.bar:
            self.files.bar.update(1)
        if step % self.settings.LOG_EVERY and step != self.schedule.end and not ending:
            return
        self.read_statistics(optimizer, step)
        n_steps = step - self.clock.logged_to
        times = self.clock.window_times(queues, reduce_watch)
        losses, grad_norms = finite_values(self.progress.window)
        self.losses += losses
        self.grad_norms += grad_norms
        values = {
            "step": step,
            **window_means(self.progress.window),
            "lr": learning_rate,
            "tokens_per_s": round(self.tokens_of_steps(self.clock.logged_to, step) / times.wall, 1),
            "step_ms": per_step_ms(times.wall, n_steps),
            "wait_ms": per_step_ms(times.drafters_waited, n_steps),
            "target_wait_ms": per_step_ms(times.targets_waited_in_training, n_steps),
            "reduce_ms": per_step_ms(times.reduce, n_steps),
            "queue": queues.n_waiting(),
            "mem_gib": memory_gib(),
            "skipped": self.progress.skipped,
            "bad_rows": self.n_bad_lines,
        }
        values = {name: values[name] for name in METRICS if name in values}
        self.progress.window = []
        self.files.record(values)
        seconds_left = (self.schedule.end - step) * times.wall / n_steps
        self.write(format_log_line(values), format_screen_line(values, self.schedule.end, seconds_left))
        self.warn_once_of_no_learning(values["accept_len"])
        # compilation is in the first window: the second is the first to tell what a step takes
        windows_since_start = step // self.settings.LOG_EVERY - self.schedule.start // self.settings.LOG_EVERY
        if step % self.settings.LOG_EVERY == 0 and windows_since_start == 2:
            self.advise_split(times, n_steps)
            hours = seconds_left / 3600
            end = self.schedule.end
            self.files.note(f"{hours:.2f} hours to step {end} at this pace, evaluation left out")
        self.clock.restart(step)

    def advise_split(self, times: "WindowTimes", n_steps: int) -> None:
        """Which split of the devices would keep both sides busy, from each side's busy time per step."""
        targets = self.settings.TARGET_DEVICES
        drafters = self.settings.DRAFTER_DEVICES
        devices = targets + drafters
        if len(set(devices)) < len(devices) and "cpu" not in devices:
            return  # on a GPU that two threads share, each one's clock counts the other's work
        busy_target = max(0, times.wall + times.evaluation - times.targets_waited) / n_steps
        busy_drafter = (times.wall - times.first_drafter_waited - times.reduce) / n_steps
        row_on_target = 1e3 * busy_target * len(targets) / self.settings.ROWS_PER_STEP
        row_on_drafter = 1e3 * busy_drafter * len(drafters) / self.settings.ROWS_PER_STEP
        n = len(devices)
        best = min(range(1, n), key=lambda t: max(row_on_target / t, row_on_drafter / (n - t)))
        self.write(f"one row costs a target {row_on_target:.0f} ms and a drafter {row_on_drafter:.0f} ms; "
                   f"balanced: {best} targets + {n - best} drafters (now {len(targets)} + {len(drafters)})")

    def warn_once_of_no_learning(self, accept_len: float) -> None:
        reason = None if self.warned else why_not_learning(self.losses, self.grad_norms, accept_len)
        if reason:
            self.warned = True
            self.write(f"WARNING: {reason}")

    # ---- evaluation

    @contextmanager
    def evaluating(self, n_rows: int, is_first: bool) -> Iterator[None]:
        """Around an evaluation, in the first drafter's thread. n_rows: held-out rows of this machine.
        is_first: at the start of the run, where it takes longest and no step has been shown yet."""
        if is_first:
            self.write(f"first evaluation: {n_rows} held-out rows")
        with self.clock.evaluating(), self.files.evaluation_bar(n_rows) as bar:
            with self.evaluation_lock:  # the other drafters may be ahead
                bar.update(self.n_evaluated)
                self.evaluation_bar = bar
            try:
                yield
            finally:
                with self.evaluation_lock:
                    self.evaluation_bar = None
                    self.n_evaluated = 0

    def count_evaluated_row(self) -> None:
        """By any drafter's thread, after each held-out row."""
        with self.evaluation_lock:
            self.n_evaluated += 1
            if self.evaluation_bar is not None:
                self.evaluation_bar.update(1)

    def log_evaluation(self, step: int, metrics: dict) -> bool:
        """Record an evaluation. -> is it the best so far by tau?"""
        progress = self.progress
        loss = metrics["eval_loss"]
        tau = metrics["tau"]
        finite = math.isfinite(loss)
        self.files.record({"step": step, **metrics, "eval_loss": loss if finite else None})  # JSON has no NaN
        acceptance = " ".join(f"{share:.3f}" for share in metrics["acc_k"])
        others = "".join(f" | {name} {value:.3f}" for name, value in metrics.items()
                         if name not in ("eval_loss", "tau") and isinstance(value, float))
        text = f"eval step {step} | eval_loss {loss:.4f} | tau {tau:.3f}"
        self.write(f"{text} | acc_k {acceptance}{others}", text)

        progress.last_eval_step = step
        is_new_best = step > 0 and (progress.best is None or tau > progress.best["tau"])
        if is_new_best:
            progress.best = {"step": step, "tau": tau}
        lowest = progress.best_eval_loss
        if finite and lowest is not None and not progress.eval_loss_rose:
            if loss > 1.001 * lowest["eval_loss"]:  # by more than rounding
                progress.eval_loss_rose = True
                self.write(
                    f"held-out loss is rising (best {lowest['eval_loss']:.4f} at step {lowest['step']}, "
                    f"now {loss:.4f}): the drafter overfits; {Path(self.settings.OUT) / 'best'} keeps the "
                    "best checkpoint by tau")
        if finite and (lowest is None or loss < lowest["eval_loss"]):
            progress.best_eval_loss = {"step": step, "eval_loss": loss}
        return is_new_best


METRICS = ("step", "loss", "accept_len", "lr", "grad_norm", "tokens_per_s", "step_ms", "wait_ms",
           "target_wait_ms", "reduce_ms", "queue", "mem_gib", "skipped", "bad_rows",
           "tv", "kl")  # the last two where the loss needs the target's distribution


def finite_values(window: list) -> tuple[list, list]:
    """[StepRecord] -> losses and gradient norms of the steps in which they are finite."""
    losses = []
    grad_norms = []
    for record in window:
        sums = RowStats(*np.sum(record.rows, 0))
        if np.isfinite(sums.loss) and sums.weight > 0:
            losses.append(float(sums.loss / sums.weight))
        if np.isfinite(record.stats.grad_norm):
            grad_norms.append(record.stats.grad_norm)
    return losses, grad_norms


def window_means(window: list) -> dict:
    """[StepRecord] -> loss, accept_len and grad_norm of the steps that were finite; None where none was."""
    losses, grad_norms = finite_values(window)
    matches = 0.0
    anchors = 0.0
    weight = 0.0
    tv = 0.0
    kl = 0.0
    for record in window:
        sums = RowStats(*np.sum(record.rows, 0))
        if np.isfinite(sums.loss):
            matches += sums.matches
            anchors += sums.anchors
            weight += sums.weight
            tv += sums.tv
            kl += sums.kl
    means = {
        "loss": float(np.mean(losses)) if losses else None,
        "accept_len": float(1 + matches / max(1, anchors)),
        "grad_norm": grad_norms[-1] if grad_norms else None,
    }
    if tv or kl:
        means["tv"] = float(tv / weight)
        means["kl"] = float(kl / weight)
    return means


def per_step_ms(seconds: float, n_steps: int) -> float:
    return round(1e3 * float(seconds) / n_steps, 2)


def format_log_line(values: dict) -> str:
    words = []
    for name, value in values.items():
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        words.append(f"{name} {text}")
    return " | ".join(words)


def format_screen_line(values: dict, last_step: int, seconds_left: float) -> str:
    """What one watches, in 80 columns; the rest is in train.log and metrics.jsonl."""
    loss = "-" if values["loss"] is None else f"{values['loss']:.4g}"
    return (f"step {values['step']} of {last_step} | loss {loss} | accepted {values['accept_len']:.2f} | "
            f"{values['tokens_per_s']:,.0f} tokens/s | {format_duration(seconds_left)} left")


def format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 10:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


class WindowTimes(NamedTuple):
    """Seconds of the window since the last log line."""
    wall: float                 # evaluation left out
    evaluation: float
    drafters_waited: float      # for targets, mean over the drafters
    first_drafter_waited: float
    targets_waited: float       # for room in the queues, mean over the targets; an evaluation is in it
    reduce: float               # sum of gradients, other drafters and machines waited for

    @property
    def targets_waited_in_training(self) -> float:
        return max(0, self.targets_waited - self.evaluation)


class WindowClock:
    """Where the present window began, in steps and in time."""

    def __init__(self, step: int):
        self.restart(step)

    def restart(self, step: int) -> None:
        """The window begins at `step`, up to which the statistics have been read."""
        self.read_to = step
        self.logged_to = step
        self.began = time.perf_counter()
        self.evaluation = 0.0

    def elapsed(self) -> float:
        """Seconds since the threads started, or since the last log line."""
        return time.perf_counter() - self.began

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.evaluation += time.perf_counter() - began

    def window_times(self, queues, reduce_watch) -> WindowTimes:
        wall = self.elapsed() - self.evaluation
        drafter_waits = [watch.read_and_reset() for watch in queues.drafter_watches]
        target_waits = [watch.read_and_reset() for watch in queues.target_watches]
        return WindowTimes(wall, self.evaluation, float(np.mean(drafter_waits)), drafter_waits[0],
                           float(np.mean(target_waits)), reduce_watch.read_and_reset())

"""Worker threads that end together: the first failure is the run's, and ends every wait of the others.

    Workers          failure, barriers, signals and the watchdog of a run's threads
    start_thread     a named thread
"""
import faulthandler
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dflash_trainer.errors import UserError, out_of_memory
from flex_utils import too_large_for_device

SLOW = 8  # times STALL_S: how long loading or saving may take


class Stopped(Exception):
    """Raised inside a worker that has to end because the run does."""


def start_thread(name: str, work: Callable, *args, daemon: bool = True) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, name=name, daemon=daemon)
    thread.start()
    return thread


class Workers:
    """The threads of one run. Whatever a worker raises ends all of them within seconds."""

    def __init__(self, n_drafters: int):
        self.stop = threading.Event()
        self.error = None                 # text of the first failure
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(n_drafters)        # waited at twice in each at_barrier()
        self.start_barrier = threading.Barrier(n_drafters)  # after each drafter's first micro-step
        self.last_move = time.monotonic()
        self.n_slow = 0                   # loads and saves under way
        self.signal = None                # number of the first signal that came, here or on another machine
        self.ending = False               # decided at the barrier, for all threads: end after this step

    # ---- signs of life

    def tick(self) -> None:
        """Something moved: the watchdog starts counting again."""
        self.last_move = time.monotonic()

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Use around long loads and saves, which report no progress: the watchdog waits SLOW x as long."""
        with self.lock:
            self.n_slow += 1
        try:
            yield
        finally:
            self.tick()
            with self.lock:
                self.n_slow -= 1

    @contextmanager
    def watched(self, stall_s: float, describe: Callable[[], str]) -> Iterator[None]:
        """The watchdog runs inside the `with` block; leaving it stops all workers."""
        thread = start_thread("watchdog", self.watchdog, stall_s, describe)
        try:
            yield
        finally:
            self.stop.set()
            thread.join()

    def watchdog(self, stall_s: float, describe: Callable[[], str]) -> None:
        """Nothing moved for stall_s seconds: print describe() and all stacks, end the process."""
        while not self.stop.wait(min(1.0, stall_s / 4)):
            limit = SLOW * stall_s if self.n_slow else stall_s
            times = f"{SLOW} x " if self.n_slow else ""
            if time.monotonic() - self.last_move > limit:
                print(f"STALLED: nothing moved for {limit} s ({times}STALL_S); {describe()}", flush=True)
                faulthandler.dump_traceback(all_threads=True)
                os._exit(1)

    # ---- waiting

    def check(self) -> None:
        if self.stop.is_set():
            raise Stopped

    def wait_for(self, attempt: Callable, not_yet: type[Exception]):
        """attempt() until it doesn't raise not_yet (queue.Empty, queue.Full), or the run ends."""
        while True:
            self.check()
            with suppress(not_yet):
                return attempt()

    def at_barrier(self, leads: bool, action: Callable[[], object]) -> object:
        """All drafters arrive; the leader runs `action`; all go on. -> its result, None to the others."""
        self.barrier.wait()
        result = action() if leads else None
        self.barrier.wait()
        return result

    # ---- failure

    def run_guarded(self, work: Callable, *args) -> None:
        """A worker's outermost call: whatever it raises becomes the run's failure, with its traceback."""
        try:
            work(*args)
        except (Stopped, threading.BrokenBarrierError):
            if not self.stop.is_set():
                self.fail(traceback.format_exc())
        except UserError as e:
            self.fail(str(e))
        except BaseException as e:
            self.fail(out_of_memory(e) or too_large_for_device(e) or traceback.format_exc())

    def fail(self, text: str) -> None:
        with self.lock:
            if self.error is None:
                self.error = f"thread {threading.current_thread().name}: {text}"
        self.stop.set()
        self.barrier.abort()
        self.start_barrier.abort()

    # ---- signals

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM, Ctrl-C and a closed terminal finish the step and save. Python handles signals in the main
        thread alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        old = {}
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                old[number] = signal.signal(number, self.on_signal)
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def on_signal(self, number: int, frame) -> None:
        if self.signal is not None and number != signal.SIGHUP:  # of which a closed terminal sends several
            os._exit(128 + number)
        self.signal = self.signal or number
        with suppress(OSError):  # the terminal may be gone
            print(f"\nsignal {number}: finishing the step and saving, then ending (again: at once)",
                  flush=True)

    def end_if_signalled(self, machines) -> None:
        """At the barrier: a signal on any machine ends all of them after this step."""
        signalled = max(machines.gather(self.signal or 0))
        self.signal = self.signal or signalled or None
        self.ending = bool(signalled)

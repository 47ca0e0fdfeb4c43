"""Worker threads that end together: the first failure is the run's; barrier, watchdog.
"""
import faulthandler
import os
import threading
import time
import traceback
from contextlib import contextmanager

from dflash_trainer.errors import UserError, out_of_memory
from flex_utils import too_large_for_device



def start_thread(name, work, *args, daemon=True):
    thread = threading.Thread(target=work, args=args, name=name, daemon=daemon)
    thread.start()
    return thread


class Stopped(Exception):
    """Raised inside a worker that has to end because the run does."""


SLOW = 8  # times STALL_S: how long loading or saving may take


class Workers:
    """Worker threads that end together: the first failure is the run's, and ends every wait of the others."""

    def __init__(self, n_meeting):
        self.stop, self.error, self.error_lock = threading.Event(), None, threading.Lock()
        self.barrier, self.start_barrier = threading.Barrier(n_meeting), threading.Barrier(n_meeting)
        self.moved, self.slow_work = time.monotonic(), 0

    def tick(self):
        """Something moved: the watchdog starts counting anew."""
        self.moved = time.monotonic()

    @contextmanager
    def slow(self):
        """Around the loading and saving of large files, which show no sign of life while they go well: the
        watchdog waits SLOW times as long."""
        with self.error_lock:
            self.slow_work += 1
        try:
            yield
        finally:
            self.tick()
            with self.error_lock:
                self.slow_work -= 1

    def check(self):
        if self.stop.is_set():
            raise Stopped

    def wait_for(self, attempt, not_yet):
        """attempt() until it doesn't raise not_yet (queue.Empty, queue.Full), or the run ends."""
        while True:
            self.check()
            try:
                return attempt()
            except not_yet:
                pass

    def at_barrier(self, leads, action):
        """All meeting threads arrive; the one that leads does `action`; all go on."""
        self.barrier.wait()
        if leads:
            action()
        self.barrier.wait()

    def run_guarded(self, work, *args):
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

    def fail(self, text):
        with self.error_lock:
            if self.error is None:
                self.error = f"thread {threading.current_thread().name}: {text}"
        self.stop.set()
        self.barrier.abort()
        self.start_barrier.abort()

    def watchdog(self, stall_s, state):
        """Nothing moved for stall_s seconds: state() (queue fills, gate's holder), all stacks, and out."""
        while not self.stop.wait(min(1.0, stall_s / 4)):
            limit, times = (SLOW * stall_s, f"{SLOW} x ") if self.slow_work else (stall_s, "")
            if time.monotonic() - self.moved > limit:
                print(f"STALLED: nothing moved for {limit} s ({times}STALL_S); {state()}", flush=True)
                faulthandler.dump_traceback(all_threads=True)
                os._exit(1)

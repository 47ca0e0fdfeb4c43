"""Where a run's start goes: seconds of each part, from the process's first moment to the first step's end.

    with clock.part("data"): ...     parts add up under their names, in the order in which they begin
    table(clock.seconds, ...)        the lines that the log and the screen get
"""
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def process_age() -> float | None:
    """Seconds since this process began; None where the system does not say."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # after boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, ValueError, IndexError, AttributeError):
        return None


class StartClock:
    """One thread's; made when the imports are done."""

    def __init__(self, age: float | None = None):
        """age: of the process, in seconds: what the imports took, with the interpreter's own start."""
        self.made = time.perf_counter()
        self.age = age or 0.0
        self.seconds = {"imports": self.age}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def total(self) -> float:
        return self.age + time.perf_counter() - self.made


def table(parts: Mapping[str, float], total: float, alone: Mapping[str, float]) -> list[str]:
    """parts: seconds by name, none within another; total: of the whole start; alone: seconds within the parts
    of each kind of work that ran alone because it was new to its thread: when things are compiled."""
    lines = [f"start-up took {total:.1f} s"]
    rest = total - sum(parts.values())
    for name, seconds in {**parts, "the rest": rest}.items():
        lines.append(f"  {name:<30} {seconds:7.1f}")
    kinds = ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in alone.items())
    lines.append(f"  {'in these: first calls, compiling':<30} {sum(alone.values()):7.1f}  ({kinds})")
    return lines

"""What crosses from one device to another.

    compute_dtype          of all models on a device
    to_device / transfer   host to device without a wait; device to device
    replica_of             a frozen module on another device
    wait_for               the end of such copies
    check_pairs            GPU-to-GPU copies, checked before any weight crosses
    HandOff / receive      target_hidden to a drafter: streams wait, no host does
    Stopwatch              seconds of all this, on the device's own clock
    memory_gib             the largest peak
"""
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy

import torch

Pair = tuple[torch.device, torch.device]  # source, destination


def compute_dtype(device: torch.device | str) -> torch.dtype:
    """bf16 on a GPU, fp32 on a CPU: of target and drafter alike."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small host tensor on `device`: pinned, so the host doesn't wait for what the device is doing."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def transfer(tensor: torch.Tensor, device: torch.device,
             bad_pairs: frozenset[Pair] = frozenset()) -> torch.Tensor:
    """`tensor` on `device`; through pinned host memory where the pair's direct copies are wrong."""
    if tensor.device != device and (tensor.device, device) in bad_pairs:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        host.copy_(tensor)
        return host.to(device, non_blocking=True)
    return tensor.to(device, non_blocking=True)


def replica_of(module: torch.nn.Module, device: torch.device,
               bad_pairs: frozenset[Pair] = frozenset()) -> torch.nn.Module:
    """A copy of a frozen module on `device` with hooks of its own; on the same device it shares weights.
    Between GPUs it is only begun: both run it before whatever is asked of them later, see wait_for."""
    memo = {}
    for tensor in (*module.parameters(), *module.buffers()):
        moved = transfer(tensor.data, device, bad_pairs)
        if isinstance(tensor, torch.nn.Parameter):
            moved = torch.nn.Parameter(moved, requires_grad=False)
        memo[id(tensor)] = moved
    return deepcopy(module, memo)


def wait_for(devices: Iterable[torch.device]) -> None:
    """The host waits until the GPUs among them have done all that was asked of them."""
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def memory_gib() -> float:
    """Largest peak over the GPUs; the process's own peak where there is none."""
    peaks = [torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())]
    peak = max(peaks, default=0) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    return round(peak / 2**30, 2)


def check_pairs(pairs: Iterable[Pair], copy: Callable = transfer, n: int = 1 << 20) -> frozenset[Pair]:
    """The ordered pairs of devices whose copies come out wrong.

    On some workstation boards (IOMMU/ACS) GPU-to-GPU copies arrive as zeros or garbage without any error.
    """
    bad = set()
    for source, destination in dict.fromkeys(pairs):
        if source == destination or "cpu" in (source.type, destination.type):
            continue
        generator = torch.Generator().manual_seed(n)
        host = torch.randint(-2**31, 2**31 - 1, (n,), dtype=torch.int32, generator=generator)
        arrived = copy(host.to(source), destination)
        if not torch.equal(arrived.cpu(), host):
            bad.add((source, destination))
    return frozenset(bad)


class HandOff:
    """Moves one target's hidden states to drafters' devices on side streams: no host waits for a copy."""

    def __init__(self, source: torch.device, bad_pairs: frozenset[Pair] = frozenset()):
        self.source = source
        self.bad_pairs = bad_pairs
        self.streams = {}  # device -> its stream for copies

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        return self.streams[device]

    def send(self, target_hidden: torch.Tensor, host_tensors: Sequence[torch.Tensor],
             device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor], torch.cuda.Event | None]:
        """-> target_hidden and the host tensors on `device`, and the event to wait for before reading any of
        them (None on a CPU)."""
        if device.type != "cuda":
            return target_hidden.to(device), list(host_tensors), None
        to_stream = self.stream(device)
        if self.source.type != "cuda":
            with torch.cuda.stream(to_stream):
                moved = target_hidden.to(device)
                rest = [to_device(tensor, device) for tensor in host_tensors]
                return moved, rest, to_stream.record_event()
        from_stream = self.stream(self.source)
        computed = torch.cuda.current_stream(self.source).record_event()
        # a copy uses the current streams of both devices
        with torch.cuda.stream(from_stream), torch.cuda.stream(to_stream):
            from_stream.wait_event(computed)
            to_stream.wait_event(computed)
            moved = transfer(target_hidden, device, self.bad_pairs)
            target_hidden.record_stream(from_stream)
            rest = [to_device(tensor, device) for tensor in host_tensors]
            return moved, rest, to_stream.record_event()


def receive(tensors: Iterable[torch.Tensor], ready: torch.cuda.Event | None, device: torch.device) -> None:
    """The compute stream of `device`, not the host, waits until what HandOff.send made may be read."""
    if ready is None:
        return
    stream = torch.cuda.current_stream(device)
    stream.wait_event(ready)
    for tensor in tensors:
        tensor.record_stream(stream)


class Stopwatch:
    """Seconds of one thread's `with` blocks, on the device's own clock where it has one: the time in which it
    did nothing else, whether the host waited or ran ahead. No host waits for it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.spans = deque()  # (began, ended): seconds, or events of the device
        self.began = None     # of the block that is open

    def __enter__(self) -> None:
        self.began = self.now()

    def __exit__(self, error, *_) -> None:
        if error is None:
            self.spans.append((self.began, self.now()))

    def now(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def read_and_reset(self) -> float:
        """Seconds of the spans that ended since the last call; a span the device is still in comes later."""
        seconds = 0.0
        while self.spans:
            began, ended = self.spans[0]
            if self.device.type != "cuda":
                seconds += ended - began
            elif ended.query():
                seconds += began.elapsed_time(ended) / 1e3
            else:
                break
            self.spans.popleft()
        return seconds

"""What crosses from one device to another.

    to_device / transfer         host to device without a wait; device to device
    replica_of                   a frozen module on another device
    check_pairs                  GPU-to-GPU copies, checked before any weight crosses
    HandOff / receive            features to a drafter: streams wait, no host does
    Stopwatch                    seconds of all this, on the device's own clock
    memory_gib                   the largest peak
"""
import resource
import time
from collections import deque
from copy import deepcopy

import torch



def to_device(tensor, device):
    """A small host tensor on `device`: pinned, so the host doesn't wait for what the device is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def transfer(tensor, device, bad_pairs=frozenset()):
    """`tensor` on `device`; through pinned host memory where direct copies of the pair are corrupted."""
    if tensor.device != device and (tensor.device, device) in bad_pairs:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return host.copy_(tensor).to(device, non_blocking=True)
    return tensor.to(device, non_blocking=True)


def replica_of(module, device, bad_pairs=frozenset()):
    """A copy of a frozen module on `device` with hooks of its own; on the same device it shares weights."""
    memo = {}
    for tensor in (*module.parameters(), *module.buffers()):
        moved = transfer(tensor.data, device, bad_pairs)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(moved, requires_grad=False) if is_parameter else moved
    return deepcopy(module, memo)


def memory_gib():
    """Largest peak over the GPUs; the process's own peak where there is none."""
    used = [torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())]
    peak = max(used, default=0) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    return round(peak / 2**30, 2)


def check_pairs(pairs, copy=transfer, n=1 << 20):
    """Copies that come out wrong. pairs: ordered (source, destination) devices -> frozenset of the bad ones.

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
    """Moves one target's features to drafters' devices on side streams: no host waits for a copy."""

    def __init__(self, source, bad_pairs=frozenset()):
        self.source, self.bad_pairs, self.streams = source, bad_pairs, {}

    def stream(self, device):
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        return self.streams[device]

    def send(self, target_hidden, host_tensors, device):
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


def receive(tensors, ready, device):
    """The compute stream of `device`, not the host, waits until what HandOff.send made may be read."""
    if ready is not None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(ready)
        for tensor in tensors:
            tensor.record_stream(stream)


class Stopwatch:
    """Seconds of one thread's `with` blocks, on the device's own clock where it has one: the time in which it
    did nothing else, whether the host waited or ran ahead. No host waits for it."""

    def __init__(self, device):
        self.device, self.spans = device, deque()

    def __enter__(self):
        self.began = self.now()

    def __exit__(self, error, *_):
        if error is None:
            self.spans.append((self.began, self.now()))

    def now(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def take(self):
        """Seconds of the spans that ended since the last call; a span the device is still in comes later."""
        seconds, cuda = 0.0, self.device.type == "cuda"
        while self.spans and (not cuda or self.spans[0][1].query()):
            began, ended = self.spans.popleft()
            seconds += began.elapsed_time(ended) / 1e3 if cuda else ended - began
        return seconds

"""One machine or several: gradients, decisions and a checkpoint, by torch.distributed.

    SingleMachine   nobody to talk to
    Cluster         the processes that torchrun started, one a machine; they notice when one is gone
"""
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dflash_trainer.errors import UserError, first_line

HEARTBEAT_S = 1
MISSING_AFTER_S = 3
NAMED_WITHIN_S = 30  # after a failure: a host so busy that its heartbeat is late needs longer than the above


class SingleMachine:
    """One machine: what Cluster does, with nobody to do it with."""
    rank = 0
    size = 1

    def gather(self, value: Any) -> list:
        return [value]

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def broadcast_from_rank0(self, make: Callable[[], tuple[Any, dict]]) -> tuple[Any, dict]:
        return make()

    def missing_ranks(self) -> list[int]:
        return []

    def shutdown(self, failed: bool) -> None:
        pass


class Cluster(SingleMachine):
    """The processes of one run, one a machine, as torchrun starts them (RANK, WORLD_SIZE, MASTER_ADDR, ...).

    Its calls are collectives: one thread at a time, in the same order on every machine. Host values go over
    gloo, CUDA tensors over NCCL. A call that fails raises UserError, naming the ranks that are gone.
    """

    def __init__(self, timeout_s: float):
        # no device_id: that would start NCCL now, before check_pairs may have set NCCL_P2P_DISABLE
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        timeout = timedelta(seconds=timeout_s)
        try:
            dist.init_process_group(backend, timeout=timeout)
            # a connection of its own: in torch's, a request that waits would block the heartbeat
            host = os.environ["MASTER_ADDR"]
            port = int(os.environ["MASTER_PORT"])
            self.store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
        except (RuntimeError, ValueError, KeyError) as e:
            raise UserError("cannot reach the other machines: check RANK, WORLD_SIZE, MASTER_ADDR, "
                            f"MASTER_PORT: {first_line(e)}") from None
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.last_heard = [time.monotonic()] * self.size
        threading.Thread(target=self.heartbeat, name="heartbeat", daemon=True).start()

    def heartbeat(self) -> None:
        """Every second: add one to this rank's counter in the store, and look at the others' counters."""
        counts = [0] * self.size
        with suppress(RuntimeError):  # the store went with machine 0
            while True:
                for rank in range(self.size):
                    count = self.store.add(f"beat{rank}", int(rank == self.rank))  # adding 0 reads it
                    if count != counts[rank]:
                        counts[rank] = count
                        self.last_heard[rank] = time.monotonic()
                time.sleep(HEARTBEAT_S)

    def missing_ranks(self) -> list[int]:
        """Ranks whose counter stands still; machine 0 where its store doesn't answer at all."""
        looked = self.last_heard[self.rank]  # its own counter moves whenever it looks at the others'
        if self.rank != 0 and time.monotonic() - looked > MISSING_AFTER_S:
            return [0]
        return [rank for rank, heard in enumerate(self.last_heard) if looked - heard > MISSING_AFTER_S]

    @contextmanager
    def naming_the_missing(self) -> Iterator[None]:
        """A failed collective becomes a UserError that says which machine left."""
        try:
            yield
        except RuntimeError as e:
            until = time.monotonic() + NAMED_WITHIN_S
            while not self.missing_ranks() and time.monotonic() < until:  # the dead miss their next beats
                time.sleep(0.2)
            missing = [f"machine (rank {rank})" for rank in self.missing_ranks()]
            who = ", ".join(missing) or "an unidentified machine (all heartbeats are fresh)"
            raise UserError(f"{who} left the run: {first_line(e)}") from None

    def gather(self, value: Any) -> list:
        """One small picklable value a machine -> all of them, by rank."""
        values = [None] * self.size
        with self.naming_the_missing():
            dist.all_gather_object(values, value)
        return values

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors of the same shapes on every machine, summed in place: the same bits on all."""
        with self.naming_the_missing():
            under_way = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for work in under_way:
                work.wait()  # NCCL: the stream waits, not the host

    def broadcast_from_rank0(self, make: Callable[[], tuple[Any, dict]]) -> tuple[Any, dict]:
        """make() of machine 0 on every machine: (what pickles, {name: host tensor})."""
        value, tensors = make() if self.rank == 0 else (None, {})
        forms = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        value, forms = self.gather((value, forms))[0]
        if self.rank != 0:
            tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in forms.items()}
        with self.naming_the_missing():
            for tensor in tensors.values():
                dist.broadcast(tensor, 0)
        return value, tensors

    def shutdown(self, failed: bool) -> None:
        """All together; after a failure at once, for NCCL may wait for the dead for ever."""
        if failed:
            sys.stdout.flush()
            os._exit(1)
        self.gather(None)
        dist.destroy_process_group()

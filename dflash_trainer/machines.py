"""One machine or several: gradients, decisions and a checkpoint, by torch.distributed.
"""
import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from dflash_trainer.errors import UserError



class SingleMachine:
    """One machine: what Machines does, with nobody to do it with."""
    rank, size = 0, 1

    def gather(self, value):
        return [value]

    def sum(self, tensors):
        pass

    def broadcast_from_rank0(self, make):
        return make()

    def missing_ranks(self):
        return []

    def shutdown(self, failed):
        pass


class Cluster(SingleMachine):
    """The processes of one run, one a machine, as torchrun starts them (RANK, WORLD_SIZE, MASTER_ADDR, ...).

    Its calls are collectives: one thread at a time, in the same order on every machine. Host values go over
    gloo, CUDA tensors over NCCL. UserError naming the ranks that are gone when one fails.
    """

    def __init__(self, timeout_s):
        # no device_id: that would start NCCL now, before check_pairs may have set NCCL_P2P_DISABLE
        backend, wait = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timedelta(0, timeout_s)
        try:
            dist.init_process_group(backend, timeout=wait)
            # a connection of its own: a request that waits in torch's would block the beat
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self.store = dist.TCPStore(host, port, is_master=False, timeout=wait)
        except (RuntimeError, ValueError, KeyError) as e:
            raise UserError(f"the machines didn't meet, see RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: "
                            f"{str(e).splitlines()[0]}") from None
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.heard = [time.monotonic()] * self.size
        threading.Thread(target=self.heartbeat, name="beat", daemon=True).start()

    def heartbeat(self):
        """Every second: one more on this rank's count in the store, and a look at the others' counts."""
        counts = [0] * self.size
        with suppress(RuntimeError):  # the store went with machine 0
            while True:
                for r in range(self.size):
                    count = self.store.add(f"beat{r}", int(r == self.rank))
                    if count != counts[r]:
                        counts[r], self.heard[r] = count, time.monotonic()
                time.sleep(1)

    def missing_ranks(self):
        """Ranks whose count stands still; machine 0 where its store doesn't answer at all."""
        late = [r for r, heard in enumerate(self.heard) if time.monotonic() - heard > 3]
        return [0] if self.rank in late else late

    @contextmanager
    def naming(self):
        try:
            yield
        except RuntimeError as e:
            time.sleep(4)  # by then the dead have missed a beat
            who = ", ".join(f"machine (rank {r})" for r in self.missing_ranks()) or "a machine, all are heard of,"
            raise UserError(f"{who} left the run: {str(e).splitlines()[0]}") from None

    def gather(self, value):
        """One small picklable value a machine -> all of them, by rank."""
        values = [None] * self.size
        with self.naming():
            dist.all_gather_object(values, value)
        return values

    def sum(self, tensors):
        """Tensors of the same shapes on every machine, summed in place: the same bits on all."""
        with self.naming():
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()  # NCCL: the stream waits, not the host

    def broadcast_from_rank0(self, make):
        """make() of machine 0 on every machine: (what pickles, {name: host tensor})."""
        value, tensors = make() if self.rank == 0 else (None, {})
        value, forms = self.gather((value, {n: (t.shape, t.dtype) for n, t in tensors.items()}))[0]
        tensors = tensors or {n: torch.empty(shape, dtype=dtype) for n, (shape, dtype) in forms.items()}
        with self.naming():
            for tensor in tensors.values():
                dist.broadcast(tensor, 0)
        return value, tensors

    def shutdown(self, failed):
        """All together; after a failure at once, for NCCL may wait for the dead for ever."""
        if failed:
            sys.stdout.flush()
            os._exit(1)
        self.gather(None)
        dist.destroy_process_group()

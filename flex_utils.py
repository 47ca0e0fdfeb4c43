"""The attention mask, the attention call, and everything that keeps torch.compile safe under threads.

    visible()                    the ONE mask definition (slots x keys -> bool)
      |- dense_mask()            materialised whole: CPU, tests, COMPILE=False
      `- block_mask()            materialised as flex_attention's BlockMask, straight from the sorted anchors
    attend_dense / attend_flex   attend(q, k, v, mask): what the drafter is given
    compiled()                   torch.compile for one thread: no two may share a code object
    Gate                         new shapes run alone, known ones side by side; first steps one at a time

Shapes: S context tokens in a row, N blocks (one anchor each), K slots in a block, Q = N*K queries,
KV = S + N*K keys: [context 0..S-1 | block 0 | block 1 | ...]. W: sliding window, None = full attention.
This module imports nothing of the trainer (under `__main__` that would make a second lock).
"""
import functools
import re
import threading
import time
import types
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
import torch._functorch.config
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

TILE = 128  # edge of a BlockMask tile, flex_attention's default

# ----------------------------------------------------------------------------------------- the mask

def visible(q: torch.Tensor, kv: torch.Tensor, start: torch.Tensor, anchor: torch.Tensor, seq_len: int,
            block_size: int, window: int | None, bidirectional: bool = False) -> torch.Tensor:
    """May query slot `q` (0..Q-1) see key `kv` (0..KV-1)? Index tensors of any broadcastable shapes -> bool.

    start, anchor: (N,) row indices of the first token of the block's conversation and of the anchor. A
    padding block has anchor <= start and sees itself only. Source: DFlash, arXiv 2602.06036; sliding layers
    as z-lab's client, vLLM and SGLang run them: causal inside the block, window counted from the slot.
    bidirectional: sliding layers are not causal in the block (is_causal false, as DFlash 2 is published).
    """
    block = q // block_size
    slot = q % block_size
    own_slot = (kv - seq_len) % block_size
    context = (kv < anchor[block]) & (kv >= start[block])  # strictly before the anchor: the label can't leak
    own = (kv >= seq_len) & ((kv - seq_len) // block_size == block)
    if window is not None:
        context = context & (kv > anchor[block] + slot - window)
        last_seen = slot + window - 1 if bidirectional else slot
        own = own & (own_slot <= last_seen) & (own_slot > slot - window)
    return context | own


def dense_mask(start: torch.Tensor, anchor: torch.Tensor, seq_len: int, block_size: int,
               window: int | None, bidirectional: bool = False) -> torch.Tensor:
    """(Q, KV) bool, True = visible; arguments as in visible()."""
    n_queries = anchor.numel() * block_size
    q = torch.arange(n_queries, device=anchor.device)[:, None]
    kv = torch.arange(seq_len + n_queries, device=anchor.device)[None, :]
    return visible(q, kv, start, anchor, seq_len, block_size, window, bidirectional)


EMPTY, PARTIAL, FULL = range(3)  # of a tile: no pair of it is visible, some are, all are


def overlaps(first: torch.Tensor, end: torch.Tensor, other_first: torch.Tensor,
             other_end: torch.Tensor) -> torch.Tensor:
    """Do the half-open intervals [first, end) and [other_first, other_end) share an index?"""
    return first.maximum(other_first) < end.minimum(other_end)


def covers(first: torch.Tensor, end: torch.Tensor, other_first: torch.Tensor,
           other_end: torch.Tensor) -> torch.Tensor:
    """Does [first, end) hold all of [other_first, other_end)?"""
    return (first <= other_first) & (end >= other_end)


def tile_states(start: torch.Tensor, anchor: torch.Tensor, seq_len: int, block_size: int,
                window: int | None, bidirectional: bool = False) -> torch.Tensor:
    """State of every (query tile, key tile) pair, (QT, KT) int32: EMPTY, PARTIAL or FULL.

    The kernels skip EMPTY tiles and, in FULL ones, the mask function: a wrong FULL leaks labels. Only context
    tiles can be FULL. EMPTY is exact (tested against dense_mask). Costs O(tiles * blocks per tile).

    Example with tiles of 4 instead of 128: 12 context tokens of one conversation, blocks of 4 slots with
    anchors 4 and 9, no window. Keys 0-11 are the context, 12-15 the first block's own, 16-19 the second's.

        keys                0 1 2 3 | 4 5 6 7 | 8 9 . . | 12 - 15 | 16 - 19
        block of anchor 4   x x x x |         |         | x x x x |            sees 0-3
        block of anchor 9   x x x x | x x x x | x       |         | x x x x    sees 0-8

        states              FULL      EMPTY     EMPTY     PARTIAL   EMPTY
                            FULL      FULL      PARTIAL   EMPTY     PARTIAL
    """
    n_queries = anchor.numel() * block_size
    n_keys = seq_len + n_queries
    key_first = torch.arange(0, n_keys, TILE, device=anchor.device)  # (KT,)
    key_end = (key_first + TILE).clamp(max=n_keys)
    block, slot_first, slot_last = blocks_of_query_tiles(n_queries, block_size, anchor.device)  # (QT, P, 1)

    # A slot sees the context from some key up to its anchor. A window moves that first key on from slot to
    # slot: of a block's slots in the tile the first one sees the most, the last one the least.
    context_end = anchor[block]
    most_first = first_context_key(start[block], context_end, slot_first, window)
    least_first = first_context_key(start[block], context_end, slot_last, window)
    context_partial = overlaps(most_first, context_end, key_first, key_end).any(1)  # (QT, P, KT) -> (QT, KT)
    context_full = covers(least_first, context_end, key_first, key_end).all(1)

    own_partial = sees_own_block(block, slot_first, slot_last, key_first - seq_len, key_end - seq_len,
                                 block_size, window, bidirectional).any(1)
    return torch.where(context_full, FULL, (context_partial | own_partial).int())


def blocks_of_query_tiles(n_queries: int, block_size: int,
                          device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The P blocks that each query tile touches, and the first and last slot of each in it, (QT, P, 1).

    Every tile gets the same P, the most that any can touch; where it touches fewer, its last block repeats.
    """
    query_first = torch.arange(0, n_queries, TILE, device=device)[:, None]  # (QT, 1)
    query_end = (query_first + TILE).clamp(max=n_queries)
    most = (TILE - 1) // block_size + 2
    block = query_first // block_size + torch.arange(most, device=device)
    block = block.minimum((query_end - 1) // block_size)[..., None]
    block_first = block * block_size
    slot_first = (query_first[..., None] - block_first).clamp(min=0)
    slot_last = (query_end[..., None] - block_first).clamp(max=block_size) - 1
    return block, slot_first, slot_last


def first_context_key(start: torch.Tensor, anchor: torch.Tensor, slot: torch.Tensor,
                      window: int | None) -> torch.Tensor:
    """The first context token that a slot sees; the last one is anchor - 1."""
    if window is None:
        return start
    return start.maximum(anchor + slot - window + 1)


def sees_own_block(block: torch.Tensor, slot_first: torch.Tensor, slot_last: torch.Tensor,
                   key_first: torch.Tensor, key_end: torch.Tensor, block_size: int,
                   window: int | None, bidirectional: bool) -> torch.Tensor:
    """Does a slot of `block` from slot_first to slot_last see a slot of its block in [key_first, key_end)?

    Keys count from the first block's first slot here; context tiles have negative ones.
    """
    block_first = block * block_size
    own_first = (key_first.clamp(min=0) - block_first).clamp(min=0)  # the block's slots in the key tile
    own_last = (key_end - block_first).clamp(max=block_size) - 1
    sees = own_first <= own_last
    if window is None:
        return sees
    # seen: least <= query slot - key slot < window. The differences in this pair of tiles are all from
    # slot_first - own_last to slot_last - own_first
    least = 1 - window if bidirectional else 0
    return sees & (slot_last - own_first >= least) & (slot_first - own_last < window)


def block_mask(start: torch.Tensor, anchor: torch.Tensor, seq_len: int, block_size: int,
               window: int | None, bidirectional: bool = False) -> BlockMask:
    """BlockMask of (Q, KV) from the anchors: no Q*KV pairs evaluated, no tracing, no host sync."""
    state = tile_states(start, anchor, seq_len, block_size, window, bidirectional)

    def listed(hit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(tiles, tiles) bool -> how many are hit in each row, and the row's indices with those first."""
        order = hit.int().argsort(dim=-1, descending=True, stable=True).int()
        # the kernels read a row's indices side by side: argsort keeps the strides of a transposed table
        return hit.sum(-1, dtype=torch.int32)[None, None], order.contiguous()[None, None]

    def mask_mod(b, h, q, kv):
        return visible(q, kv, start, anchor, seq_len, block_size, window, bidirectional)

    n_queries = anchor.numel() * block_size
    mask = BlockMask.from_kv_blocks(
        *listed(state == PARTIAL), *listed(state == FULL), BLOCK_SIZE=TILE, mask_mod=mask_mod,
        seq_lengths=(n_queries, seq_len + n_queries), compute_q_blocks=False)
    # the transposed lists that backward reads: torch 2.13's own way writes to fx's process-wide metadata
    # without a lock, and two threads in it raise KeyError: 'custom'
    mask.q_num_blocks, mask.q_indices = listed(state.T == PARTIAL)
    mask.full_q_num_blocks, mask.full_q_indices = listed(state.T == FULL)
    return mask


# ------------------------------------------------------------------------------- the attention call

def attend_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """q (1, Hq, Q, hd), k and v (1, Hkv, KV, hd), mask (Q, KV) bool -> (1, Hq, Q, hd)."""
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def attend_flex(options: dict | None = None) -> Callable:
    """attend_dense's call for a BlockMask; `options`: kernel_options of flex_attention.

    The call raises RuntimeError outside a compiled function: there flex_attention materialises Q*KV scores in
    silence and traces without a lock, which crashes the other threads (pytorch#136196). Dynamo does the same
    at its recompile limit.
    """
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        if not torch.compiler.is_dynamo_compiling():  # constant True while dynamo traces; eager code: False
            raise RuntimeError(f"flex_attention ran uncompiled (dense) in thread "
                               f"{threading.current_thread().name}: q {tuple(q.shape)}, k {tuple(k.shape)}, "
                               f"{q.device}; recompile_limit {torch._dynamo.config.recompile_limit}")
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)
    return attend


def small_kernel_options() -> dict:
    """Tiles for about 99 KB of shared memory a block (compute capability 8.6, 8.9, 12.0), head_dim 128."""
    return {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_M1": 32, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 32,
            "fwd_num_stages": 2, "bwd_num_stages": 1}


def make_attention(device: torch.device, compiled: bool,
                   small: bool | None = None) -> tuple[Callable, Callable]:
    """(attend, make_mask) for a device: flex_attention under torch.compile on CUDA, dense elsewhere.

    small: use the tiles for little shared memory; None: where the device has less than the large tiles need.
    """
    if not (compiled and device.type == "cuda"):
        return attend_dense, dense_mask
    if small is None:
        shared_memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        small = shared_memory < 160 * 1024
    return attend_flex(small_kernel_options() if small else None), block_mask


def too_large_for_device(error: BaseException) -> str | None:
    """One line with what to set when a kernel needs more shared memory than the device has, else None.

    Triton raises that error as it is or inside inductor's: from compiling, autotuning or backward.
    """
    found = re.search(r"out of resource: .*", str(error))
    if found is None:
        return None
    return f"{found[0]} Set SMALL_KERNELS = True, or COMPILE = False where it is True already"


# ----------------------------------------------------------------------------- compile-safe threads

def worker_compile_settings(n_devices: int) -> None:
    """Call INSIDE each worker thread: from torch 2.12 on dynamo's configuration belongs to the thread.

    One entry per layer type, train/eval and loss part must fit, for each device where threads share code; at
    the default of 8 flex_attention would turn dense, so reaching the limit is an error as well.
    """
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = 16 * max(4, n_devices)
    dynamo.accumulated_recompile_limit = 64 * max(4, n_devices)
    dynamo.fail_on_recompile_limit_hit = True


def worker_memory_settings() -> None:
    """Call INSIDE each worker thread, as worker_compile_settings. Memory depends on it, no result does."""
    # pointwise values (norms, silu * up) are made again in backward: 2 GiB less at the 27B shape
    torch._functorch.config.activation_memory_budget = 0.9


@functools.cache
def clone_code(function: types.FunctionType, owner: Hashable) -> types.FunctionType:
    """The function with a code object that is the owner's alone."""
    name = f"{function.__name__}_{owner}"
    copy = types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name,
                              function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def compiled(function: Callable, owner: Hashable, backend: str | Callable = "inductor") -> Callable:
    """torch.compile of an owner's own copy of a function or method, for the one thread that calls it. Copies
    are kept; a module whose `forward` this replaces must not be deep-copied.

    Dynamo keeps the graphs of a code object in one list, in which the graph just used moves to the front, and
    lets other threads run between its looks at two of them: threads that share the code object miss graphs
    that are there and compile again, at any time (torch 2.11-2.13; pytorch#193697 for a later one). Not
    fullgraph: it fails now and then in threads on torch 2.12-2.14.
    """
    plain = getattr(function, "__func__", function)
    own = clone_code(plain, owner)
    if plain is not function:
        own = types.MethodType(own, function.__self__)
    return torch.compile(own, backend=backend, dynamic=False)


class Gate:
    """Who may run beside whom. Dynamo, FX and Triton's autotuner keep process-wide state: while one thread
    traces, any other thread inside a compiled call crashes, warm or not (torch 2.11, 2.12). So work whose
    signature a thread has not run yet runs ALONE; known work runs side by side.

        with gate.first_step():                  # FIRST_STEP_LOCK, until this thread's first step succeeded
            with gate.work("train", signature):  # lock before gate, never the reverse
                ...                              # mask, forward, loss, backward; nothing that waits

    Never wait for another thread inside either. A recompute inside backward runs on autograd's device thread,
    which holds nothing of this: code there must not take the gate.
    """

    def __init__(self, first_step_lock: threading.Lock):
        self._first_step_lock = first_step_lock
        self._first_step_done = set()     # threads; the objects, for idents are used again
        self._condition = threading.Condition()
        self._seen = set()                # (thread, kind, grad mode, signature) that have run
        self._thread_names = set()        # of all that ever entered
        self._side_by_side = 0            # threads inside with known work
        self._alone = None                # (thread name, kind, grad mode, signature, since) of new work
        self._waiting_to_run_alone = 0
        self.seconds_alone = {}           # by kind: in first calls, which is when things are compiled
        self.violations = []              # compiles outside the gate, in words

    @contextmanager
    def first_step(self) -> Iterator[bool]:
        """Hold FIRST_STEP_LOCK around a thread's first step, until one succeeds; after that do nothing.

        Yields whether this is the first.
        """
        me = threading.current_thread()
        if me in self._first_step_done:
            yield False
            return
        with self._first_step_lock:
            yield True
            self._first_step_done.add(me)  # not reached when the step raises

    @contextmanager
    def work(self, kind: str, *signature: Hashable) -> Iterator[bool]:
        """Run alone when this thread has not run this before, else beside others. Yields whether alone.

        kind: 'train', 'eval', 'target', 'update'; signature: what makes a new graph (device, shapes, dtypes).
        Raises RuntimeError on leaving when a compile was started outside the gate.
        """
        me = threading.current_thread()
        key = (me, kind, torch.is_grad_enabled(), signature)
        alone = key not in self._seen
        self._thread_names.add(me.name)
        if alone:
            self._enter_alone(key)
        else:
            self._enter_beside_others()
        try:
            yield alone
            if self.violations:
                raise RuntimeError(self.violations[0])
            if alone:
                self._seen.add(key)
        finally:
            self._leave(alone)

    def _enter_beside_others(self) -> None:
        with self._condition:
            while self._alone or self._waiting_to_run_alone:  # who waits to run alone goes first: no starving
                self._condition.wait()
            self._side_by_side += 1

    def _enter_alone(self, key: tuple) -> None:
        with self._condition:
            self._waiting_to_run_alone += 1
            try:
                while self._alone or self._side_by_side:
                    self._condition.wait()
                self._alone = (threading.current_thread().name, *key[1:], time.monotonic())
            finally:
                self._waiting_to_run_alone -= 1
                if not self._alone:
                    self._condition.notify_all()

    def _leave(self, alone: bool) -> None:
        with self._condition:
            if alone:
                _, kind, _, _, since = self._alone
                self.seconds_alone[kind] = self.seconds_alone.get(kind, 0.0) + time.monotonic() - since
                self._alone = None
            else:
                self._side_by_side -= 1
            if alone or not self._side_by_side:
                self._condition.notify_all()

    def holder(self) -> str:
        """One line for the watchdog: who runs alone and for how long, who else is inside."""
        text = "nobody alone"
        alone = self._alone  # read once: other threads change it
        if alone:
            name, *key, since = alone
            text = f"{name} alone for {time.monotonic() - since:.0f} s in {tuple(key)}"
        return (f"gate: {text}, {self._side_by_side} side by side, "
                f"{self._waiting_to_run_alone} waiting to run alone")

    def forbid_compiles_outside(self) -> Callable[[], None]:
        """From now on, compiling in a thread that is not alone in the gate raises (when it leaves the gate).
        Returns a function that lifts the ban. The callback runs in the compiling thread, or in autograd's."""
        def on_start(args):
            me = threading.current_thread().name
            alone = self._alone
            # autograd's device threads never enter the gate: they compile for whoever runs alone
            if alone is None or (me in self._thread_names and me != alone[0]):
                self.violations.append(f"compile {args.compile_id} started outside the gate in thread {me}; "
                                       f"side by side: {self._side_by_side}")

        handler = torch._dynamo.callback.callback_handler
        handler.register_start_callback(on_start)
        return lambda: handler.remove_start_callback(on_start)

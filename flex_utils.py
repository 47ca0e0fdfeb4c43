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
from contextlib import contextmanager

import torch
import torch._functorch.config
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

TILE = 128  # edge of a BlockMask tile, flex_attention's default

# ----------------------------------------------------------------------------------------- the mask

def visible(q, kv, start, anchor, seq_len, block_size, window):
    """May query slot `q` (0..Q-1) see key `kv` (0..KV-1)? Index tensors of any broadcastable shapes -> bool.

    start, anchor: (N,) row indices of the first token of the block's conversation and of the anchor. A
    padding block has anchor <= start and sees itself only. Source: DFlash, arXiv 2602.06036; sliding layers
    as z-lab's client, vLLM and SGLang run them: causal inside the block, window counted from the slot.
    """
    block, slot = q // block_size, q % block_size
    own_slot = (kv - seq_len) % block_size
    context = (kv < anchor[block]) & (kv >= start[block])  # strictly before the anchor: the label can't leak
    own = (kv >= seq_len) & ((kv - seq_len) // block_size == block)
    if window is not None:
        context = context & (kv > anchor[block] + slot - window)
        own = own & (own_slot <= slot) & (own_slot > slot - window)
    return context | own


def dense_mask(start, anchor, seq_len, block_size, window):
    """(Q, KV) bool, True = visible."""
    n_queries = anchor.numel() * block_size
    q = torch.arange(n_queries, device=anchor.device)[:, None]
    kv = torch.arange(seq_len + n_queries, device=anchor.device)[None, :]
    return visible(q, kv, start, anchor, seq_len, block_size, window)


def tile_states(start, anchor, seq_len, block_size, window):
    """Per (query tile, key tile): 0 = no pair visible, 1 = some, 2 = all: the mask function may be skipped.

    Only context tiles can be 2. Exact for 0 (tested against dense_mask); costs O(tiles * blocks per tile).
    """
    device, n_queries = anchor.device, anchor.numel() * block_size
    n_keys, reach = seq_len + n_queries, window if window is not None else seq_len + block_size
    q0 = torch.arange(0, n_queries, TILE, device=device)[:, None]  # (QT, 1) first query of each tile
    k0 = torch.arange(0, n_keys, TILE, device=device)  # (KT,) first key
    q1, k1 = (q0 + TILE).clamp(max=n_queries), (k0 + TILE).clamp(max=n_keys)
    per_tile = (TILE - 1) // block_size + 2  # blocks that a tile can touch; the last ones may repeat
    block = q0 // block_size + torch.arange(per_tile, device=device)
    block = block.minimum((q1 - 1) // block_size)[..., None]  # (QT, P, 1)
    a, s, first_slot = anchor[block], start[block], block * block_size
    low = (q0[..., None] - first_slot).clamp(min=0)  # first and last slot of the block in this tile
    high = (q1[..., None] - first_slot).clamp(max=block_size) - 1

    def first_key(slot):  # of the context that the slot sees; its last is a - 1
        return s.maximum(a + slot - reach + 1)

    some = (first_key(low).maximum(k0) < a.minimum(k1.clamp(max=seq_len))).any(1)  # (QT, P, KT) -> (QT, KT)
    full = ((first_key(high) <= k0) & (a >= k1)).all(1)

    own_low = ((k0 - seq_len).clamp(min=0) - first_slot).clamp(min=0)  # the block's slots in the key tile
    own_high = (k1 - seq_len - first_slot).clamp(max=block_size) - 1
    own = own_low <= own_high
    if window is not None:  # some q - k in 0..W-1; q - k is all of low - own_high .. high - own_low
        own = own & (high >= own_low) & (low - own_high < window)
    return torch.where(full, 2, (some | own.any(1)).int())


def block_mask(start, anchor, seq_len, block_size, window):
    """BlockMask of (Q, KV) from the anchors: no Q*KV pairs evaluated, no tracing, no host sync."""
    state = tile_states(start, anchor, seq_len, block_size, window)

    def listed(hit):  # dense (tiles, tiles) -> how many in each row, and their indices first
        order = hit.int().argsort(dim=-1, descending=True, stable=True).int()
        # the kernels read a row's indices side by side: argsort keeps the strides of a transposed table
        return hit.sum(-1, dtype=torch.int32)[None, None], order.contiguous()[None, None]

    def mask_mod(b, h, q, kv):
        return visible(q, kv, start, anchor, seq_len, block_size, window)

    n_queries = anchor.numel() * block_size
    mask = BlockMask.from_kv_blocks(*listed(state == 1), *listed(state == 2), BLOCK_SIZE=TILE,
                                    mask_mod=mask_mod, seq_lengths=(n_queries, seq_len + n_queries),
                                    compute_q_blocks=False)
    # the transposed lists that backward reads: torch 2.13's own way writes to fx's process-wide metadata
    # without a lock, and two threads in it raise KeyError: 'custom'
    mask.q_num_blocks, mask.q_indices = listed(state.T == 1)
    mask.full_q_num_blocks, mask.full_q_indices = listed(state.T == 2)
    return mask


# ------------------------------------------------------------------------------- the attention call

def attend_dense(q, k, v, mask):
    """q (1, Hq, Q, hd), k and v (1, Hkv, KV, hd), mask (Q, KV) bool -> (1, Hq, Q, hd)."""
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def attend_flex(options=None):
    """The same call for a BlockMask; `options`: kernel_options of flex_attention. Raises outside a compiled
    function: there flex_attention materialises Q*KV scores in silence and traces without a lock, which
    crashes the other threads (pytorch#136196). That is also what dynamo does at its recompile limit."""
    def attend(q, k, v, mask):
        if not torch.compiler.is_dynamo_compiling():  # constant True while dynamo traces; eager code: False
            raise RuntimeError(f"flex_attention ran uncompiled (dense) in thread "
                               f"{threading.current_thread().name}: q {tuple(q.shape)}, k {tuple(k.shape)}, "
                               f"{q.device}; recompile_limit {torch._dynamo.config.recompile_limit}")
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)
    return attend


def small_kernel_options():
    """Tiles for about 99 KB of shared memory a block (compute capability 8.6, 8.9, 12.0), head_dim 128."""
    return {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_M1": 32, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 32,
            "fwd_num_stages": 2, "bwd_num_stages": 1}


def make_attention(device, compiled, small=None):
    """-> (attend, make_mask) for a device: flex_attention under torch.compile on CUDA, dense elsewhere.
    small: tiles for little shared memory; None: where the device has less than its large tiles need."""
    if not (compiled and device.type == "cuda"):
        return attend_dense, dense_mask
    if small is None:
        small = torch.cuda.get_device_properties(device).shared_memory_per_block_optin < 160 * 1024
    return attend_flex(small_kernel_options() if small else None), block_mask


def too_large_for_device(error):
    """A kernel that needs more shared memory than the device has, as one line with what to set, else None.
    Triton's error comes as it is or within inductor's, from compiling, autotuning or backward."""
    found = re.search(r"out of resource: .*", str(error))
    return found and f"{found[0]} Set SMALL_KERNELS = True, or COMPILE = False where it is True already"


# ----------------------------------------------------------------------------- compile-safe threads

def worker_compile_settings(n_devices):
    """Call INSIDE each worker thread: from torch 2.12 on dynamo's configuration belongs to the thread.

    One entry per layer type, train/eval and loss part must fit, for each device where threads share code; at
    the default of 8 flex_attention would turn dense, so reaching the limit is an error as well.
    """
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = 16 * max(4, n_devices)
    dynamo.accumulated_recompile_limit = 64 * max(4, n_devices)
    dynamo.fail_on_recompile_limit_hit = True
    # pointwise values (norms, silu * up) are made again in backward: 2 GiB less at the 27B shape
    torch._functorch.config.activation_memory_budget = 0.9


@functools.cache
def clone_code(function, owner):
    """The function with a code object that is the owner's alone."""
    name = f"{function.__name__}_{owner}"
    copy = types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name,
                              function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def compiled(function, owner, backend="inductor"):
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

    def __init__(self, first_step_lock):
        self._lock, self._cond = first_step_lock, threading.Condition()
        self._seen, self._first_done = set(), set()
        self._readers, self._writer, self._writers_waiting = 0, None, 0
        self.violations, self._names = [], set()

    @contextmanager
    def first_step(self):
        me = threading.current_thread()  # the object: idents are used again
        if me in self._first_done:
            yield False
            return
        with self._lock:
            yield True
            self._first_done.add(me)  # not reached when the step raises

    @contextmanager
    def work(self, kind, *signature):
        """kind: 'train', 'eval', 'target', 'update'; signature: what makes a new graph (device, shapes, ...)."""
        key = (threading.current_thread(), kind, torch.is_grad_enabled(), signature)
        alone = key not in self._seen
        self._names.add(key[0].name)
        self._enter_alone(key) if alone else self._enter()
        try:
            yield alone
            if self.violations:
                raise RuntimeError(self.violations[0])
            if alone:
                self._seen.add(key)
        finally:
            with self._cond:
                if alone:
                    self._writer = None
                else:
                    self._readers -= 1
                if alone or not self._readers:
                    self._cond.notify_all()

    def _enter(self):
        with self._cond:
            while self._writer or self._writers_waiting:  # a waiting writer goes first: it can't starve
                self._cond.wait()
            self._readers += 1

    def _enter_alone(self, key):
        with self._cond:
            self._writers_waiting += 1
            try:
                while self._writer or self._readers:
                    self._cond.wait()
                self._writer = (threading.current_thread().name, *key[1:], time.monotonic())
            finally:
                self._writers_waiting -= 1
                if not self._writer:
                    self._cond.notify_all()

    def holder(self):
        """One line for the watchdog: who runs alone, for how long, who else is inside."""
        alone, writer = "nobody alone", self._writer
        if writer:
            name, *key, since = writer
            alone = f"{name} alone for {time.monotonic() - since:.0f} s in {tuple(key)}"
        return f"gate: {alone}, {self._readers} side by side, {self._writers_waiting} waiting to run alone"

    def forbid_compiles_outside(self):
        """A compile by a thread that doesn't run alone is an error from now on (raised on leaving the gate).
        Returns a function that ends this. The callback runs in the compiling thread, or in autograd's."""
        def on_start(args):
            me, writer = threading.current_thread().name, self._writer
            # autograd's device threads never enter the gate: they compile for whoever runs alone
            if writer is None or (me in self._names and me != writer[0]):
                self.violations.append(f"compile {args.compile_id} started outside the gate in thread {me}; "
                                       f"side by side: {self._readers}")

        handler = torch._dynamo.callback.callback_handler
        handler.register_start_callback(on_start)
        return lambda: handler.remove_start_callback(on_start)

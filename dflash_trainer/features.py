"""A frozen target on training rows: few fixed batch shapes, hooks on the tapped layers, CUDA graphs.

    Taps                   outputs of chosen decoder layers, by hooks
    TappedForward          ids -> target_hidden up to the last tap
    choose_target_batches  the few fixed (batch, length) shapes in which a target runs conversations
    TargetBatches.split    a row's conversations in those shapes

Shapes: B conversations in a batch, T tokens each, D hidden size, L tapped layers.
"""
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from dflash_trainer.rows import pack

# --------------------------------------------------------------------------------------- tapped layers


class Taps:
    """Outputs of chosen decoder layers, one hook each. Install on a model that one thread uses alone.

    `output_hidden_states=[ids]` means other layers in transformers 5.15, 5.17 and 5.24; a hook doesn't.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], ids: Sequence[int]):
        self.ids = ids
        self.caught = {}  # layer -> (B, T, D)
        self.handles = [layers[i].register_forward_hook(self._hook(i)) for i in ids]

    def _hook(self, i: int) -> Callable:
        def hook(module, args, output):
            self.caught[i] = output[0] if isinstance(output, tuple) else output
        return hook

    def collect(self) -> torch.Tensor:
        """-> (B, T, L*D) of the last forward."""
        return torch.cat([self.caught.pop(i) for i in self.ids], -1)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class CapturedForward(NamedTuple):
    """A CUDA graph of one shape and the tensors that it reads and writes."""
    graph: torch.cuda.CUDAGraph
    ids: torch.Tensor            # (B, T): filled in before a replay
    target_hidden: torch.Tensor  # (B, T, L*D): the next replay overwrites it
    kept_alive: tuple            # what the graph's kernels read beside these


class TappedForward:
    """A frozen decoder up to its last tap, one thread's: ids (B, T) -> (B, T, L*D), good until the next call.

    with_last: the whole decoder, and its last hidden state after the final norm behind the taps: (L+1)*D.
    On CUDA every shape's first call makes a CUDA graph, which the host launches at once: a layer is some
    twenty kernels, and threads that launch them one by one wait for each other's turn in the interpreter.
    transformers' forward can't be captured (it reads position ids back), so the graph is the embedding and
    the layers with the arguments that transformers gave them: masks and rotary tables, made from the shape.
    A decoder with more to it, or one that waits for its device, runs eagerly and says so.
    """

    def __init__(self, decoder: torch.nn.Module, ids: Sequence[int], log: Callable[[str], object] = print,
                 parts: object = None, with_last: bool = False):
        self.decoder = decoder
        self.parts = parts     # compiled_target.CompiledParts of the decoder, or None
        self.taps = Taps(decoder.layers, ids)
        self.with_last = with_last
        self.layers = decoder.layers if with_last else decoder.layers[:max(ids) + 1]
        self.log = log
        self.graphs = {}       # shape of the ids -> CapturedForward
        self.refused = False   # a capture failed: the shapes that are still to come run eagerly
        self.stream = None     # on which captures run
        self.pool = None       # memory that all graphs of this decoder share
        if with_last and not hasattr(decoder, "norm"):
            self.refused = True
            log(f"target: CUDA graphs are off: {type(decoder).__name__} has no final norm called `norm`")

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.shape in self.graphs:
            return self.replay(ids)
        if self.parts and ids.shape not in self.parts.checked:
            self.parts.check(ids.shape, lambda: self.eager(ids))
        if ids.is_cuda and not self.refused:
            return self.capture_and_check(ids)
        return self.eager(ids)

    def replay(self, ids: torch.Tensor) -> torch.Tensor:
        captured = self.graphs[ids.shape]
        captured.ids.copy_(ids)
        captured.graph.replay()
        return captured.target_hidden

    def eager(self, ids: torch.Tensor) -> torch.Tensor:
        output = self.decoder(input_ids=ids, use_cache=False)
        target_hidden = self.taps.collect()
        if self.with_last:
            target_hidden = torch.cat([target_hidden, output.last_hidden_state], -1)
        return target_hidden

    def layer_arguments(self, ids: torch.Tensor) -> list[tuple]:
        """What transformers gives each layer beside the hidden states: [(positional, keyword)]."""
        seen = []

        def note(module, args, kwargs):
            seen.append((args[1:], kwargs))

        handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in self.layers]
        try:
            self.eager(ids)
        finally:
            for handle in handles:
                handle.remove()
        return seen

    def layers_alone(self, ids: torch.Tensor, arguments: list[tuple]) -> torch.Tensor:
        """What eager() gives from the embedding, the layers and the norm, without transformers' code."""
        hidden = self.decoder.get_input_embeddings()(ids)
        for layer, (args, kwargs) in zip(self.layers, arguments, strict=True):
            output = layer(hidden, *args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
        target_hidden = self.taps.collect()
        if self.with_last:
            target_hidden = torch.cat([target_hidden, self.decoder.norm(hidden)], -1)
        return target_hidden

    def capture_and_check(self, ids: torch.Tensor) -> torch.Tensor:
        """A shape's first call, alone in the gate: kernels are tuned, captured, and compared."""
        expected = self.eager(ids)
        try:
            self.graphs[ids.shape] = self.capture(ids)
            replayed = self.replay(ids)
            size = expected.shape[-1] // (len(self.taps.ids) + self.with_last)
            n_taps = len(self.taps.ids) * size
            reason = self.difference(replayed[..., :n_taps], expected[..., :n_taps])
            if reason is None and self.with_last:
                reason = self.difference(replayed[..., n_taps:], expected[..., n_taps:])
        except Exception as e:  # whatever stands in its way, the forward without a graph works
            e = e.__context__ or e  # the fault inside a capture, not that the capture can't be ended after it
            reason = (str(e) or repr(e)).splitlines()[0]
        if reason is not None:
            self.refused = True
            self.graphs.pop(ids.shape, None)
            self.taps.caught.clear()
            self.log(f"target on {ids.device}: CUDA graphs are off from shape {tuple(ids.shape)} on, "
                     f"kernels are launched one by one: {reason}")
        return expected

    @staticmethod
    def difference(replayed: torch.Tensor, expected: torch.Tensor) -> str | None:
        """None where the two agree but for rounding. An argument that the graph lacks is far above that."""
        error = (replayed - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
        largest = error.max()
        if largest <= 0.1:
            return None
        return f"a token differs from transformers' forward by {largest:.2g}"

    def capture(self, ids: torch.Tensor) -> CapturedForward:
        """Not by torch.cuda.graph, which first frees unused memory on all devices: that waits for them, and
        may not happen while another thread launches NCCL's kernels."""
        graph_ids = ids.clone()
        other_ids = ids.flip(-1)  # shows arguments that depend on more than the shape
        with torch.cuda.device(ids.device):
            now = torch.cuda.current_stream()
            self.stream = self.stream or torch.cuda.Stream()
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            self.stream.wait_stream(now)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self.stream):
                # this makes the libraries' workspaces on this stream, too
                arguments = self.layer_arguments(other_ids)
                graph.capture_begin(self.pool, capture_error_mode="thread_local")
                try:
                    target_hidden = self.layers_alone(graph_ids, arguments)
                finally:
                    self.end_capture(graph, ids.device)
            now.wait_stream(self.stream)
        return CapturedForward(graph, graph_ids, target_hidden, (arguments, other_ids))

    def end_capture(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):  # torch 2.11, 2.12 leave the allocator capturing: pytorch#180395
                torch._C._cuda_endAllocateToPool(device.index, self.pool)
            raise


# ------------------------------------------------------------------------------------- fixed batch shapes
#
# A target runs the conversations of a row as batches: conversations of similar length, padded on the right.
# What a batch costs is the tokens that it computes, padding included, and an overhead that doesn't depend on
# them. The shapes are few and fixed, since every new one compiles, tunes or captures something while all
# threads wait.
#
# Two questions, one recurrence. Order a row's conversations by length, longest first. A batch of shape (B, T)
# that starts at conversation i holds conversations i .. i+B-1, if T is at least the length of i, the longest
# of them:
#
#     cost[i] = min over shapes (B, T) with T >= length[i] of  overhead + B * T + cost[i + B]
#     cost[n] = 0                                              (and beyond n: the batch isn't full)
#
# Which batches for this row? Walk from 0 and take the shape that attains the minimum (TargetBatches.split).
# Which shapes for the run? Those for which the sum of cost[0] over sample rows is least
# (choose_target_batches); a search over one shape at a time, the others held, as trying all sets of six would
# take days. A fixed ladder (S, S/2, S/4, ..., a row's tokens each) computes 1.9 to 3.2 tokens for each real
# one, the shapes chosen here 1.1 to 1.9: results/target_shapes.txt.


def least_costs(rows: np.ndarray, shapes: np.ndarray, overhead_in_tokens: float) -> np.ndarray:
    """The recurrence above, for R rows and C sets of M shapes at once.

    rows: (R, n) lengths, longest first, 0 where a row has fewer conversations.
    shapes: (C, M, 2) of (batch, length).
    -> (C, R, n + 1): entry i is the least cost of conversations i, i+1, ... of the row; inf where no shape of
    the set holds them.
    """
    n_sets = len(shapes)
    n = rows.shape[1]
    batch = shapes[..., 0]
    length = shapes[..., 1]
    batch_cost = (overhead_in_tokens + batch * length)[..., None]      # (C, M, 1)
    every_set = np.arange(n_sets)[:, None]
    costs = np.zeros((n_sets, len(rows), n + 1))
    for i in reversed(range(n)):
        rest = costs[every_set, :, np.minimum(i + batch, n)]          # (C, M, R)
        fits = length[..., None] >= rows[:, i]
        least = np.where(fits, batch_cost + rest, np.inf).min(axis=1)  # (C, R)
        costs[..., i] = np.where(rows[:, i] > 0, least, 0)
    return costs


class TargetBatches(NamedTuple):
    """How a target runs the conversations of a row: in few shapes, since a new one must run alone."""
    shapes: list                # (batch, length), by length; the last holds the longest conversation
    overhead_in_tokens: float   # fixed cost of a batch, as the number of tokens that take as long

    def split(self, row_lengths: Sequence[int]) -> list[tuple[int, int, list[int]]]:
        """-> [(batch, length, [positions in the row])], longest first: the batches that cost least."""
        order = sorted(range(len(row_lengths)), key=lambda m: -row_lengths[m])
        lengths = np.array([[row_lengths[m] for m in order]])
        n = len(order)
        costs = least_costs(lengths, np.array([self.shapes]), self.overhead_in_tokens)[0, 0].tolist()

        def cost_from(i, shape):
            batch, length = shape
            return self.overhead_in_tokens + batch * length + costs[min(i + batch, n)], shape

        batches = []
        i = 0
        while i < n:
            holding = [shape for shape in self.shapes if shape[1] >= row_lengths[order[i]]]
            batch, length = min(holding, key=lambda shape: cost_from(i, shape))
            batches.append((batch, length, order[i:i + batch]))
            i += batch
        return batches


BATCH_SIZES = np.unique(np.geomspace(1, 512, 48).round().astype(int)).tolist()  # to choose from


def choose_target_batches(lengths: np.ndarray, longest: int, seq_len: int, overhead_in_tokens: float,
                          most: int = 6) -> TargetBatches:
    """At most `most` shapes that are cheap for rows of such conversations and hold others of `longest`
    tokens.

    lengths: of the training conversations. longest: of all that will be run, held-out ones included. Each
    shape in turn is the one that makes sample rows cheapest beside those chosen before it, the first of them
    among those that hold the longest; then each is chosen once more beside all the others.
    """
    sample = np.random.default_rng(0).permutation(lengths)[:16384]
    sample = np.sort(sample)[::-1]
    # lengths to choose from: as many tokens lie between two of them as between any others
    tokens = np.cumsum(sample)
    quantiles = sample[np.searchsorted(tokens, tokens[-1] * np.arange(24) / 24)]
    candidate_lengths = set()
    for n in (*quantiles, longest):
        multiple_of_8 = -(-int(n) // 8) * 8
        candidate_lengths.add(min(seq_len, multiple_of_8))
    candidates = []
    for length in sorted(candidate_lengths):
        for batch in BATCH_SIZES:
            if batch == 1 or batch * length <= 2 * seq_len:
                candidates.append((batch, length))
    hold_the_longest = [(batch, length) for batch, length in candidates if length == max(candidate_lengths)]

    rows = sample_rows(sample, seq_len)

    def cheapest_beside(others, candidates):
        sets = np.array([[*others, candidate] for candidate in candidates])
        totals = least_costs(rows, sets, overhead_in_tokens)[..., 0].sum(axis=1)
        return candidates[int(np.argmin(totals))]

    shapes = []
    for i in range(most):
        shapes.append(cheapest_beside(shapes, candidates if i else hold_the_longest))
    for i in range(most):
        others = shapes[:i] + shapes[i + 1:]
        shapes[i] = cheapest_beside(others, candidates if i else hold_the_longest)
    by_length = sorted(set(shapes), key=lambda shape: shape[::-1])
    return TargetBatches(by_length, overhead_in_tokens)


def sample_rows(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Lengths of packed rows (R, n), longest first, 0 where a row has fewer: the rows to choose shapes by.

    The rows with the shortest and the longest first conversation are among them. Both sizes are bounded, so
    that the choice takes seconds: every k-th conversation of a row with more than 512, and 8 to 72 rows.
    """
    rows = []
    for members in pack(lengths, 0, 0, seq_len):
        row = sorted(lengths[members].tolist(), reverse=True)
        rows.append(row)
    rows.sort()
    thinned = []
    for row in rows:
        every = -(-len(row) // 512)
        thinned.append(row[::every])
    width = max(map(len, thinned))
    n_rows = min(len(rows), 72, max(8, 8192 // width))
    table = np.zeros((n_rows, width), np.int64)
    for i, place in enumerate(np.linspace(0, len(rows) - 1, n_rows).astype(int)):
        table[i, :len(thinned[place])] = thinned[place]
    return table

"""A frozen target on training rows: few fixed shapes, tapped layers, CUDA graphs.

    Taps            outputs of chosen decoder layers, by hooks
    TappedForward   ids -> target_hidden up to the last tap
    target_calls    the few fixed (batch, length) shapes in which a target runs conversations
    Calls.plan      a row's conversations in those shapes

Shapes: B conversations, T tokens each, D hidden size, L tapped layers.
"""
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from dflash_trainer.rows import pack



class Taps:
    """Outputs of chosen decoder layers, one hook each. Install on a model that one thread uses alone.

    `output_hidden_states=[ids]` means other layers in transformers 5.15, 5.17 and 5.24; a hook doesn't.
    """

    def __init__(self, layers, ids):
        self.ids, self.caught = ids, {}
        self.handles = [layers[i].register_forward_hook(self._hook(i)) for i in ids]

    def _hook(self, i):
        def hook(module, args, output):
            self.caught[i] = output[0] if isinstance(output, tuple) else output
        return hook

    def collect(self):
        """-> (B, T, L*D) of the last forward."""
        return torch.cat([self.caught.pop(i) for i in self.ids], -1)

    def remove(self):
        for handle in self.handles:
            handle.remove()


class TappedForward:
    """A frozen decoder up to its last tap, one thread's: ids (B, T) -> (B, T, L*D), good until the next call.

    On CUDA every shape's first call makes a CUDA graph, which the host launches at once: a layer is some
    twenty kernels, and threads that launch them one by one wait for each other's turn in the interpreter.
    transformers' forward can't be captured (it reads position ids back), so the graph is the embedding and
    the layers with the arguments that transformers gave them: masks and rotary tables, made from the shape.
    A decoder with more to it, or one that waits for its device, runs eagerly and says so.
    """

    def __init__(self, decoder, ids, log=print):
        self.decoder, self.taps, self.log = decoder, Taps(decoder.layers, ids), log
        self.layers = decoder.layers[:max(ids) + 1]
        self.graphs, self.refused = {}, False  # shape -> what capture() returns; no more of them
        self.stream = self.pool = None  # of the captures

    def __call__(self, ids):
        if ids.shape in self.graphs:
            return self.replay(ids)
        return self.first(ids) if ids.is_cuda and not self.refused else self.eager(ids)

    def replay(self, ids):
        graph, given, hidden, _ = self.graphs[ids.shape]
        given.copy_(ids)
        graph.replay()
        return hidden

    def eager(self, ids):
        self.decoder(input_ids=ids, use_cache=False)
        return self.taps.collect()

    def arguments(self, ids):
        """What transformers gives each layer beside the hidden states: [(positional, keyword)]."""
        seen = []
        handles = [layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args[1:], kwargs)),
                                                   with_kwargs=True) for layer in self.layers]
        try:
            self.eager(ids)
        finally:
            for handle in handles:
                handle.remove()
        return seen

    def layers_alone(self, ids, arguments):
        hidden = self.decoder.get_input_embeddings()(ids)
        for layer, (args, kwargs) in zip(self.layers, arguments):
            out = layer(hidden, *args, **kwargs)
            hidden = out[0] if isinstance(out, tuple) else out
        return self.taps.collect()

    def first(self, ids):
        """A shape's first call, alone in the gate: kernels are tuned, captured, and compared."""
        expected = self.eager(ids)
        try:
            self.graphs[ids.shape] = self.capture(ids)
            error = ((self.replay(ids) - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)).max()
            # rounding stays far below that, a forgotten argument doesn't
            reason = None if error <= 0.1 else f"a token differs from transformers' forward by {error:.2g}"
        except Exception as e:  # whatever stands in its way
            e = e.__context__ or e  # what went wrong in a capture, not that it can't be ended then
            reason = (str(e) or repr(e)).splitlines()[0]
        if reason:
            self.refused = True
            self.graphs.pop(ids.shape, None)
            self.taps.caught.clear()
            self.log(f"target on {ids.device}: no CUDA graph of {tuple(ids.shape)} tokens or of a shape to "
                     f"come, their kernels are launched one by one: {reason}")
        return expected

    def capture(self, ids):
        """-> graph, its input, its output, and what must live as long.

        Not by torch.cuda.graph, which first frees unused memory on all devices: that waits for them, and may
        not happen while another thread launches NCCL's kernels.
        """
        given, other = ids.clone(), ids.flip(-1)  # other ids: arguments that depend on them show
        with torch.cuda.device(ids.device):
            now, self.stream = torch.cuda.current_stream(), self.stream or torch.cuda.Stream()
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            self.stream.wait_stream(now)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self.stream):
                arguments = self.arguments(other)  # makes the libraries' workspaces on this stream, too
                graph.capture_begin(self.pool, capture_error_mode="thread_local")
                try:
                    hidden = self.layers_alone(given, arguments)
                finally:
                    self.end(graph, ids.device)
            now.wait_stream(self.stream)
        return graph, given, hidden, (arguments, other)

    def end(self, graph, device):
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):  # torch 2.11, 2.12 leave the allocator capturing: pytorch#180395
                torch._C._cuda_endAllocateToPool(device.index, self.pool)
            raise


BATCHES = np.unique(np.geomspace(1, 512, 48).round().astype(int))  # conversations a call, to choose from


def target_calls(lengths, longest, seq_len, call_tokens, most=6):
    """Calls of at most `most` shapes for rows of such conversations, and for others of at most `longest`.

    Each shape in turn is the one that makes sample rows cheapest, the first of those that hold the longest;
    then each is chosen once more beside the others. Lengths to choose from are quantiles of the tokens.
    """
    sample = np.sort(np.random.default_rng(0).permutation(lengths)[:16384])[::-1]
    tokens = np.cumsum(sample)
    quantiles = sample[np.searchsorted(tokens, tokens[-1] * np.arange(24) / 24)]
    choices = [(b, n) for n in sorted({min(seq_len, -(-int(n) // 8) * 8) for n in (*quantiles, longest)})
               for b in BATCHES.tolist() if b == 1 or b * n <= 2 * seq_len]
    hold_all, shapes = [c for c in choices if c[1] == choices[-1][1]], []
    table = sample_rows(sample, seq_len)
    for i in [*range(most), *range(most)]:
        others, some = shapes[:i] + shapes[i + 1:], choices if i else hold_all
        shapes[i:i + 1] = [some[int(np.argmin(row_costs(table, others, some, call_tokens)))]]
    return Calls(sorted(set(shapes), key=lambda s: s[::-1]), call_tokens)


def sample_rows(lengths, seq_len):
    """Lengths -> (R, n): lengths of packed rows, falling, 0 where a row has fewer; the extreme rows are among
    them. Every k-th conversation of rows with very many."""
    rows = sorted(sorted(lengths[members].tolist())[::-1] for members in pack(lengths, 0, 0, seq_len))
    rows = [row[::-(-len(row) // 512)] for row in rows]
    width = max(map(len, rows))
    table = np.zeros((min(len(rows), 72, max(8, 8192 // width)), width), np.int64)  # seconds of choosing
    for r, i in enumerate(np.linspace(0, len(rows) - 1, len(table)).astype(int)):
        table[r, :len(rows[i])] = rows[i]
    return table


def row_costs(table, shapes, choices, call_tokens):
    """(C,): what the rows of `table` (R, n), lengths falling, cost with `shapes` and each of C choices."""
    batch, length = np.array(choices).T
    which, best = np.arange(len(choices)), np.zeros((len(choices), len(table), table.shape[1] + 1))
    for i in reversed(range(table.shape[1])):  # best[..., i]: of conversations i, i+1, ...
        after = best[which, :, np.minimum(i + batch, table.shape[1])]
        cost = (call_tokens + batch * length)[:, None] + after
        cost = np.where(length[:, None] >= table[:, i], cost, np.inf)
        for b, n in shapes:
            after = best[:, :, min(i + b, table.shape[1])]
            cost = np.minimum(cost, np.where(n >= table[:, i], call_tokens + b * n + after, np.inf))
        best[..., i] = np.where(table[:, i] > 0, cost, 0)
    return best[..., 0].sum(1)


class Calls(NamedTuple):
    """How a target runs a row's conversations: in few shapes, since what is new to a thread runs alone."""
    shapes: list         # (batch, length), by length; the last holds the longest conversation
    call_tokens: float   # what a call costs by itself, in tokens computed

    def plan(self, row_lengths):
        """-> [(batch, length, [positions in the row])], longest first: the calls in which it runs soonest.

        A call costs call_tokens and its tokens, padding included; neighbours by length share one.
        """
        order = sorted(range(len(row_lengths)), key=lambda m: -row_lengths[m])
        n = len(order)
        best, shapes = [0] * (n + 1), [None] * n  # cost of, first shape in: conversations i, i+1, ...
        for i in reversed(range(n)):
            best[i], shapes[i] = min((self.call_tokens + b * length + best[min(i + b, n)], (b, length))
                                     for b, length in self.shapes if length >= row_lengths[order[i]])
        calls, i = [], 0
        while i < n:
            batch, length = shapes[i]
            calls.append((batch, length, order[i:i + batch]))
            i += batch
        return calls

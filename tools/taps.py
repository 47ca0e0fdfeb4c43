"""What is read from a target: on training rows (Taps, TappedForward), while it decodes (LiveTarget).

Shapes: B conversations, T tokens each, D hidden size, L tapped layers, V vocabulary.
"""
import inspect
from contextlib import suppress

import torch


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

    def __init__(self, decoder, ids, say=print):
        self.decoder, self.taps, self.say = decoder, Taps(decoder.layers, ids), say
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
            self.say(f"target on {ids.device}: no CUDA graph of {tuple(ids.shape)} tokens or of a shape to "
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


class LiveTarget:
    """A target in the middle of an answer: takes new tokens, forgets the rejected ones of the last call."""

    def __init__(self, target, layers, tap_ids):
        from transformers import DynamicCache
        text = target.config.get_text_config()
        self.target, self.taps, self.cache = target, Taps(layers, tap_ids), DynamicCache(config=text)
        if hasattr(self.cache, "activate_past_recording"):
            self.cache.activate_past_recording()
        elif "linear_attention" in (getattr(text, "layer_types", None) or ()):
            raise RuntimeError("this transformers can't roll back linear-attention caches; 5.15 or newer can")
        known = inspect.signature(target.forward).parameters
        self.keyword = "cache" if "cache" in known else "past_key_values"  # renamed in transformers 5.24

    def forward(self, ids):
        """ids (1, T) -> logits (T, V), tapped hidden states (1, T, L*D)."""
        states = [s for layer in self.cache.layers for s in getattr(layer, "recurrent_states", {}).values()]
        self.block, self.before = ids, [(s, s.clone()) for s in states if s is not None]
        logits = self.target(ids, **{self.keyword: self.cache}, use_cache=True).logits[0]
        return logits, self.taps.collect()

    def keep(self, n):
        """Forget all but the first n tokens of the last forward. Recurrent states can't be cropped: they are
        put back to where they were, and the kept tokens go through again."""
        rejected = self.block.shape[1] - n
        if not self.before or not rejected:
            self.cache.crop(-rejected)  # also at 0: transformers 5.17 shrinks sliding layers only here
            return
        self.cache.crop(-self.block.shape[1])
        for state, kept in self.before:
            state.copy_(kept)
        self.forward(self.block[:, :n])
        self.cache.crop(0)

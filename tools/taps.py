"""What is read from a target that runs, on training rows (Taps) and while it decodes an answer (LiveTarget).

Shapes: B conversations, T tokens each, D hidden size, L tapped layers, V vocabulary.
"""
import inspect

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

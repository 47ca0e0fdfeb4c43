"""Decoding with a live target: plain greedy beside speculative, lossless.

    speculative_generate    one prompt; greedy or sampled, the target's own answer or distribution
    decode_both_ways        beside transformers' own generate()

Shapes: T tokens, K slots in a block, L*D tapped features, V vocabulary.
"""
import inspect
import time

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig

from dflash_trainer.errors import require
from dflash_trainer.features import Taps
from flex_utils import dense_mask
from model_drafter import layer_masks



class DraftCache:
    """Keys and values of the accepted context, per attention module."""

    def __init__(self):
        self.kept = {}

    def append(self, module, k, v):
        if module in self.kept:
            k, v = (torch.cat(pair, 2) for pair in zip(self.kept[module], (k, v)))
        self.kept[module] = (k, v)
        return k, v


def draft_block(drafter, embed, head, target_hidden, token, past, cache):
    """Logits (K-1, V) for the tokens after `token` (1,), which stands at position past + new.

    target_hidden (1, new, L*D): of the tokens just accepted, after the `past` ones that cache holds.
    """
    c, device = drafter.config, target_hidden.device
    total = past + target_hidden.shape[1]
    inputs = torch.cat([token, token.new_full((c.block_size - 1,), c.mask_token_id)])[None]
    start, anchor = (torch.tensor([i], device=device) for i in (0, total))
    hidden = drafter(target_hidden, embed(inputs), torch.arange(past, total, device=device),
                     torch.arange(total, total + c.block_size, device=device),
                     layer_masks(c, dense_mask, start, anchor, total), cache)
    return head(hidden[0, 1:])


def _probabilities(logits, temperature):
    return torch.softmax(logits.float() / temperature, -1)


def accept_greedy(draft, target_logits):
    """draft (J,), target_logits (J+1, V) -> (number accepted, the target's own next token (1,))."""
    best = target_logits.argmax(-1)
    n = int((draft == best[:-1]).int().cumprod(0).sum())
    return n, best[n:n + 1]


def accept_sampled(draft, draft_probs, target_probs, generator):
    """Rejection sampling (Leviathan et al. 2023): accepted tokens and the next follow target_probs exactly.

    draft (J,), draft_probs (J, V) it was drawn from, target_probs (J+1, V) -> as accept_greedy.
    """
    rows = torch.arange(draft.numel(), device=draft.device)
    ratio = target_probs[rows, draft] / draft_probs[rows, draft]
    uniform = torch.rand(draft.shape, generator=generator, device=draft.device)
    n = int((uniform < ratio).int().cumprod(0).sum())
    residual = target_probs[n]
    if n < draft.numel():
        residual = (residual - draft_probs[n]).clamp(min=0)
    if residual.sum() <= 0:  # p == q up to rounding: any draw from p is right
        residual = target_probs[n]
    return n, torch.multinomial(residual, 1, generator=generator)


class LiveTarget:
    """A target in the middle of an answer: takes new tokens, forgets the rejected ones of the last call."""

    def __init__(self, target, layers, tap_ids):
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


@torch.no_grad()
def speculative_generate(drafter, embed, head, target, layers, input_ids, max_new_tokens, stop_ids,
                         temperature=0.0, generator=None):
    """Decode one prompt, input_ids (1, T) -> answer ids (n,), tokens produced per pass.

    Greedy (temperature 0) gives the target's own greedy answer; else the target's distribution is kept.
    target: whole causal LM; layers: its decoder layers; drafter, embed, head on the target's device.
    """
    live, draft_cache = LiveTarget(target, layers, drafter.config.target_layer_ids), DraftCache()

    def pick(logits):
        if temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(_probabilities(logits, temperature), 1, generator=generator)[:, 0]

    try:
        logits, context = live.forward(input_ids)
        live.keep(input_ids.shape[1])
        answer, produced, length, past = [int(pick(logits[-1:]))], [], input_ids.shape[1], 0
        while answer[-1] not in stop_ids and len(answer) < max_new_tokens:
            token = input_ids.new_tensor(answer[-1:])
            draft_logits = draft_block(drafter, embed, head, context, token, past, draft_cache)
            draft, past = pick(draft_logits), length
            logits, context = live.forward(torch.cat([token, draft])[None])
            if temperature == 0:
                n, bonus = accept_greedy(draft, logits)
            else:
                n, bonus = accept_sampled(draft, _probabilities(draft_logits, temperature),
                                          _probabilities(logits, temperature), generator)
            new = torch.cat([draft[:n], bonus]).tolist()[:max_new_tokens - len(answer)]
            stop = next((i + 1 for i, t in enumerate(new) if t in stop_ids), len(new))
            live.keep(stop)
            answer, length, context = answer + new[:stop], length + stop, context[:, :stop]
            produced.append(stop)
        return torch.tensor(answer), produced
    finally:
        live.taps.remove()


def prompt_ids(target, tokenizer, text, device, template_kwargs):
    """-> (1, T) token ids of a user's turn, up to where the answer begins."""
    require(getattr(tokenizer, "chat_template", None),
         f"TARGET = {target} has no tokenizer with a chat template")
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt",
        return_dict=True, **template_kwargs)["input_ids"].to(device)


def prepare_decoding(model, tokenizer):
    """Drops the target's own settings, which may carry penalties. -> ids that end an answer."""
    own = model.generation_config
    eos = tokenizer.eos_token_id if own.eos_token_id is None else own.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN plans anew for every length of an answer
    return set(eos if isinstance(eos, list) else [eos]) - {None}


@torch.no_grad()
def decode_both_ways(model, w, ids, stop, max_new_tokens, temperature, seed):
    """-> plain greedy answer, by transformers' own generate(), the answer of w's drafter, tokens produced by
    each pass, [seconds of either]."""
    times = [time.perf_counter()]
    plain = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stop) or None)[0, ids.shape[1]:].cpu()
    times.append(time.perf_counter())
    generator = torch.Generator(model.device).manual_seed(seed)
    answer, produced = speculative_generate(
        w.drafter, w.embed, w.head, model, model.get_decoder().layers, ids, max_new_tokens, stop, temperature,
        generator)
    times.append(time.perf_counter())
    return plain, answer, produced, np.diff(times)


@torch.no_grad()
def explain_mismatch(model, ids, plain, answer):
    """Two greedy answers that differ: blocks and single tokens run other kernels, which round differently."""
    n = next((i for i, (a, b) in enumerate(zip(plain, answer)) if a != b), min(len(plain), len(answer)))
    if n == min(len(plain), len(answer)):
        return f"False: one ends at token {n}, the other goes on"
    logits = model(torch.cat([ids, plain[None, :n].to(ids.device)], 1)).logits[0, -1].float()
    apart = abs(logits[plain[n]] - logits[answer[n]]).item()
    return (f"False, from token {n} on: there the target's logits of the two tokens are {apart:.3g} apart, "
            f"in {model.dtype}")

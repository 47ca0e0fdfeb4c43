"""Decoding with a live target: plain greedy beside speculative, lossless.

    speculative_generate    one prompt; greedy or sampled, the target's own answer or distribution
      |- LiveTarget           the target in the middle of an answer
      |- block_hidden         the drafter's forward of one block
      |- draft_tokens         its tokens: all at once, or the head's walk
      `- accept_*             how many of them the target agrees with
    decode_both_ways        beside transformers' own generate()

Shapes: T tokens, K slots in a block, J drafted tokens, L*D tapped features, V vocabulary.
"""
from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerBase

from dflash_trainer.answer_mask import ChatTemplate
from dflash_trainer.chat_lines import BadLine
from dflash_trainer.errors import require, user_error_on
from dflash_trainer.features import Taps
from flex_utils import dense_mask
from model_drafter import CandidateSelector, Drafter, Head, MarkovHead, cap, layer_masks

if TYPE_CHECKING:  # imported for real where a model is loaded: with it comes all that loads models, 1.5 s
    from transformers import PreTrainedModel

# ------------------------------------------------------------------------------------- the target

class LiveTarget:
    """A target in the middle of an answer: takes new tokens, forgets the rejected ones of the last call.

    RuntimeError where this transformers can't roll back the target's layers.
    """

    def __init__(self, target: PreTrainedModel, layers: Sequence[nn.Module], tap_ids: Sequence[int]):
        text = target.config.get_text_config()
        self.target = target
        self.taps = Taps(layers, tap_ids)
        self.cache = DynamicCache(config=text)
        if hasattr(self.cache, "activate_past_recording"):
            self.cache.activate_past_recording()
        elif "linear_attention" in (getattr(text, "layer_types", None) or ()):
            raise RuntimeError("this transformers can't roll back linear-attention caches; 5.15 or newer can")
        known = inspect.signature(target.forward).parameters
        self.keyword = "cache" if "cache" in known else "past_key_values"  # renamed in transformers 5.24
        self.last_ids = None      # of the last forward
        self.states_before = []   # (recurrent state, copy of it before the last forward)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids (1, T) -> logits (T, V), tapped hidden states (1, T, L*D)."""
        self.last_ids = ids
        self.states_before = []
        for layer in self.cache.layers:
            for state in getattr(layer, "recurrent_states", {}).values():
                if state is not None:
                    self.states_before.append((state, state.clone()))
        logits = self.target(ids, **{self.keyword: self.cache}, use_cache=True).logits[0]
        return logits, self.taps.collect()

    def keep(self, n: int) -> None:
        """Forget all but the first n tokens of the last forward. Recurrent states can't be cropped: they are
        put back to where they were, and the kept tokens go through again."""
        n_last = self.last_ids.shape[1]
        rejected = n_last - n
        if not self.states_before or not rejected:
            self.cache.crop(-rejected)  # also at 0: transformers 5.17 shrinks sliding layers only here
            return
        self.cache.crop(-n_last)
        for state, before in self.states_before:
            state.copy_(before)
        self.forward(self.last_ids[:, :n])
        self.cache.crop(0)

    def close(self) -> None:
        self.taps.remove()


# ------------------------------------------------------------------------------------ the drafter

class DraftCache:
    """Keys and values of the accepted context, per attention module."""

    def __init__(self):
        self.kept = {}

    def append(self, module: nn.Module, k: torch.Tensor,
               v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add k, v (1, H, new, hd) of newly accepted tokens -> those of all tokens."""
        if module in self.kept:
            past_k, past_v = self.kept[module]
            k = torch.cat([past_k, k], 2)
            v = torch.cat([past_v, v], 2)
        self.kept[module] = (k, v)
        return k, v


def probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.softmax(logits.float() / temperature, -1)


def pick(logits: torch.Tensor, temperature: float, generator: torch.Generator | None) -> torch.Tensor:
    """logits (T, V) -> one token a row (T,): the likeliest at temperature 0, else drawn."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial(probabilities(logits, temperature), 1, generator=generator)[:, 0]


def block_hidden(drafter: Drafter, embed: nn.Module, target_hidden: torch.Tensor, token: torch.Tensor,
                 past: int, cache: DraftCache) -> torch.Tensor:
    """Hidden states (J, D) of the slots that draft after `token` (1,), which stands at position past + new.

    target_hidden (1, new, L*D): of the tokens just accepted, after the `past` ones that cache holds.
    """
    c = drafter.config
    device = target_hidden.device
    position = past + target_hidden.shape[1]
    masks_of_block = token.new_full((c.block_size - 1,), c.mask_token_id)
    inputs = torch.cat([token, masks_of_block])[None]
    start = torch.tensor([0], device=device)
    anchor = torch.tensor([position], device=device)
    context_pos = torch.arange(past, position, device=device)
    block_pos = torch.arange(position, position + c.block_size, device=device)
    masks = layer_masks(c, dense_mask, start, anchor, position)
    hidden = drafter(target_hidden, embed(inputs), context_pos, block_pos, masks, cache)
    return hidden[0, c.first_slot:]


def draft_tokens(drafter: Drafter, head: Head, hidden: torch.Tensor, token: torch.Tensor, temperature: float,
                 generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """hidden (J, D) of a block whose anchor is `token` (1,) -> drafted tokens (J,), the distributions (J, V)
    that they were drawn from (None at temperature 0).

    A plain drafter picks all at once. The heads walk: each token is picked knowing the one before it.
    """
    config = drafter.config
    if config.head == "dflash2":
        selector = drafter.candidate_selector
        return walk_selector(selector, head, config.output_multiplier, hidden, token, temperature, generator)
    if config.head == "dspark":
        return walk_markov(drafter.markov_head, head, hidden, token, temperature, generator)
    logits = head(hidden)
    tokens = pick(logits, temperature, generator)
    return tokens, None if temperature == 0 else probabilities(logits, temperature)


def walk_selector(selector: CandidateSelector, head: Head, multiplier: float, hidden: torch.Tensor,
                  token: torch.Tensor, temperature: float,
                  generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """DFlash 2: of each slot's candidates the best scored one, given the token before. Otherwise as
    draft_tokens; no other token than a candidate has a probability."""
    logits = cap(head.logits(hidden) * multiplier, head.softcap)
    unary, candidates = logits.topk(selector.top_k, dim=-1)
    tokens = []
    proposal = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    for j in range(len(hidden)):
        scores = selector(hidden[j:j + 1], token, candidates[j:j + 1], unary[j:j + 1])  # (1, k_top)
        chosen = pick(scores, temperature, generator)
        token = candidates[j, chosen]
        tokens.append(token)
        if temperature:
            proposal[j, candidates[j]] = probabilities(scores[0], temperature)
    return torch.cat(tokens), proposal if temperature else None


def walk_markov(markov: MarkovHead, head: Head, hidden: torch.Tensor, token: torch.Tensor, temperature: float,
                generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """DSpark: all logits, biased by the token before. Otherwise as draft_tokens."""
    base = head(hidden)
    tokens = []
    proposal = []
    for j in range(len(hidden)):
        logits = base[j:j + 1] + markov.bias(token)  # (1, V)
        token = pick(logits, temperature, generator)
        tokens.append(token)
        if temperature:
            proposal.append(probabilities(logits, temperature))
    return torch.cat(tokens), torch.cat(proposal) if temperature else None


# ------------------------------------------------------------------------------------- acceptance

def accept_greedy(draft: torch.Tensor, target_logits: torch.Tensor) -> tuple[int, torch.Tensor]:
    """draft (J,), target_logits (J+1, V) -> (number accepted, the target's own next token (1,))."""
    best = target_logits.argmax(-1)
    n = int((draft == best[:-1]).int().cumprod(0).sum())
    return n, best[n:n + 1]


def accept_sampled(draft: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor,
                   generator: torch.Generator | None) -> tuple[int, torch.Tensor]:
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


# --------------------------------------------------------------------------------------- decoding

@torch.no_grad()
def speculative_generate(drafter: Drafter, embed: nn.Module, head: Head, target: PreTrainedModel,
                         layers: Sequence[nn.Module], input_ids: torch.Tensor, max_new_tokens: int,
                         stop_ids: set[int], temperature: float = 0.0,
                         generator: torch.Generator | None = None) -> tuple[torch.Tensor, list[int]]:
    """Decode one prompt, input_ids (1, T) -> answer ids (n,), tokens produced by each pass.

    Greedy (temperature 0) gives the target's own greedy answer; else the target's distribution is kept.
    target: whole causal LM; layers: its decoder layers; drafter, embed, head on the target's device.
    """
    live = LiveTarget(target, layers, drafter.config.target_layer_ids)
    draft_cache = DraftCache()
    try:
        logits, context = live.forward(input_ids)
        length = input_ids.shape[1]  # tokens that the target's cache holds: all but the answer's last
        live.keep(length)
        answer = [int(pick(logits[-1:], temperature, generator))]
        produced = []
        past = 0                     # tokens that the drafter's cache holds
        while answer[-1] not in stop_ids and len(answer) < max_new_tokens:
            token = input_ids.new_tensor(answer[-1:])
            hidden = block_hidden(drafter, embed, context, token, past, draft_cache)
            draft, proposal = draft_tokens(drafter, head, hidden, token, temperature, generator)
            past = length
            logits, context = live.forward(torch.cat([token, draft])[None])
            if temperature == 0:
                n, bonus = accept_greedy(draft, logits)
            else:
                n, bonus = accept_sampled(draft, proposal, probabilities(logits, temperature), generator)
            new = torch.cat([draft[:n], bonus]).tolist()
            new = until_stop(new[:max_new_tokens - len(answer)], stop_ids)
            live.keep(len(new))
            context = context[:, :len(new)]
            answer += new
            length += len(new)
            produced.append(len(new))
        return torch.tensor(answer), produced
    finally:
        live.close()


def until_stop(tokens: list[int], stop_ids: set[int]) -> list[int]:
    """Up to the first stop token, which stays."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[:i + 1]
    return tokens


# ---------------------------------------------------------------------------------- both ways

def prompt_ids(target: str, tokenizer: PreTrainedTokenizerBase | None, text: str, device: torch.device,
               template_kwargs: dict) -> torch.Tensor:
    """(1, T) token ids of a user's turn, up to where the answer begins. UserError without a chat template."""
    require(getattr(tokenizer, "chat_template", None),
            f"TARGET = {target} has no tokenizer with a chat template")
    template = ChatTemplate(tokenizer, template_kwargs)
    with user_error_on(f"TARGET = {target}", BadLine):
        prompt = template.render([{"role": "user", "content": text}], None, prompt=True)
    encoded = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    return encoded["input_ids"].to(device)


def prepare_decoding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Make the target decode plainly: its own generation settings go, which may carry penalties, and cuDNN's
    attention is off in this process. Returns the ids that end an answer."""
    own = model.generation_config
    eos = tokenizer.eos_token_id if own.eos_token_id is None else own.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN makes a new plan for every length of an answer
    stop_ids = eos if isinstance(eos, list) else [eos]
    return set(stop_ids) - {None}


@torch.no_grad()
def decode_both_ways(model: PreTrainedModel, replica: object, ids: torch.Tensor, stop: set[int],
                     max_new_tokens: int, temperature: float,
                     seed: int) -> tuple[torch.Tensor, torch.Tensor, list[int], np.ndarray]:
    """Decode ids (1, T) plainly (greedy, transformers' own generate()) and with a replica's drafter.

    Returns the plain answer, the speculative one, tokens produced by each pass, [seconds of either].
    """
    times = [time.perf_counter()]
    plain = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stop) or None)[0, ids.shape[1]:].cpu()
    times.append(time.perf_counter())
    generator = torch.Generator(model.device).manual_seed(seed)
    answer, produced = speculative_generate(
        replica.drafter, replica.embed, replica.head, model, model.get_decoder().layers, ids, max_new_tokens,
        stop, temperature, generator)
    times.append(time.perf_counter())
    return plain, answer, produced, np.diff(times)


@torch.no_grad()
def explain_mismatch(model: PreTrainedModel, ids: torch.Tensor, plain: torch.Tensor,
                     answer: torch.Tensor) -> str:
    """Where two different greedy answers part, in words, with the target's own margin there.

    They may: blocks and single tokens run other kernels, which round differently.
    """
    shorter = min(len(plain), len(answer))
    n = next((i for i in range(shorter) if plain[i] != answer[i]), shorter)
    if n == shorter:
        return f"False: one ends at token {n}, the other goes on"
    logits = model(torch.cat([ids, plain[None, :n].to(ids.device)], 1)).logits[0, -1].float()
    apart = abs(logits[plain[n]] - logits[answer[n]]).item()
    return (f"False, from token {n} on: there the target's logits of the two tokens are {apart:.3g} apart, "
            f"in {model.dtype}")

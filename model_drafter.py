"""The DFlash drafter: model, slots, loss, acceptance.

    Drafter(config, attend)          target's hidden states + blocks [anchor, mask, ...] -> block hiddens
    Batch, block_arrays()            a packed row with its anchors, and which slots count
    row_loss()                       mask, forward, chunked_ce() and weights of one row
    walk()                           acceptance as a server counts it

Shapes: S context tokens in a row, N anchors in a row, K slots in a block, D hidden size, L tapped target
layers, V vocabulary, M slots that count. Batch is 1 everywhere: a row is packed.
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# ---------------------------------------------------------------------------------------- the model

@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a drafter and what it was made for: everything config.json says."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # tap id i = output of the target's decoder layer i
    num_target_layers: int
    layer_types: tuple[str, ...]       # per layer: "full_attention" | "sliding_attention"
    sliding_window: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | list | None = None
    pad_token_id: int | None = None
    input_embedding_scale: float = 1.0           # targets whose embedding module scales (Gemma)
    final_logit_softcapping: float | None = None  # targets whose head caps its logits

    def window(self, layer_type: str) -> int | None:
        """How many tokens back layers of this type see, the slot's own included; None: all."""
        return self.sliding_window if layer_type == "sliding_attention" else None


class RMSNorm(nn.Module):
    """Normalised in fp32, scaled in the compute dtype: bit-compatible with the Qwen3 layers that serve it."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (x32 * scale).to(x.dtype)


Rope = tuple[torch.Tensor, torch.Tensor]  # cos, sin (T, hd)


def rope_table(positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """positions (T,) -> cos, sin (T, head_dim). fp32, and no buffer that `.to(bfloat16)` could round.

    The frequencies are divided out as transformers does it: `theta ** -x` is an ulp off in a third of them,
    and at position 262,144 that moves cos and sin by 0.016.
    """
    even = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / theta ** (even / head_dim)
    angles = positions.float()[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Turn x (1, H, T, hd) by rope, halves convention."""
    cos, sin = rope
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    """Queries from the block, keys and values from context and block."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # (1, T, H, hd)

    def query(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """x (1, T, D) -> (1, Hq, T, hd)."""
        return rotate(self.q_norm(self.heads(self.q_proj(x))).transpose(1, 2), rope)

    def key_value(self, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """x (1, T, D) -> k, v (1, Hkv, T, hd). One k_norm and RoPE for context and block alike."""
        k = rotate(self.k_norm(self.heads(self.k_proj(x))).transpose(1, 2), rope)
        v = self.heads(self.v_proj(x)).transpose(1, 2)
        return k, v

    def forward(self, x: torch.Tensor, context: torch.Tensor, rope: Rope, context_rope: Rope, mask: object,
                attend: Callable, past: object | None = None) -> torch.Tensor:
        """x (1, N*K, D), context (1, S, D) -> (1, N*K, D)."""
        q = self.query(x, rope)
        k, v = self.key_value(x, rope)
        k_context, v_context = self.key_value(context, context_rope)
        if past is not None:  # decoding: the accepted context's keys are kept, the block's never
            k_context, v_context = past.append(self, k_context, v_context)
        y = attend(q, torch.cat([k_context, k], 2), torch.cat([v_context, v], 2), mask)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: torch.Tensor, context: torch.Tensor, rope: Rope, context_rope: Rope, mask: object,
                attend: Callable, past: object | None = None) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rope, context_rope, mask, attend, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """DFlash block-diffusion drafter (arXiv 2602.06036; z-lab/dflash): layers, no embedding and no head.

    attend(q, k, v, mask) is the attention call; masks hold whatever it takes, one per layer type.
    """

    def __init__(self, config: DrafterConfig, attend: Callable | None):
        super().__init__()
        self.config = config
        self.attend = attend
        size = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(size, config.rms_norm_eps)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Normal(0, initializer_range), drawn in fp32 from its own generator; norms stay at 1."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                fresh = torch.empty(module.weight.shape, dtype=torch.float32)
                fresh.normal_(0.0, self.config.initializer_range, generator=generator)
                module.weight.copy_(fresh)

    def forward(self, target_hidden: torch.Tensor, block_embeds: torch.Tensor, context_pos: torch.Tensor,
                block_pos: torch.Tensor, masks: dict[str, object],
                past: object | None = None) -> torch.Tensor:
        """target_hidden (1, S, L*D), block_embeds (1, N*K, D), positions (S,), (N*K,) -> (1, N*K, D)."""
        c = self.config
        context = self.hidden_norm(self.fc(target_hidden))  # (1, S, D)
        rope = rope_table(block_pos, c.head_dim, c.rope_theta, context.dtype)
        context_rope = rope_table(context_pos, c.head_dim, c.rope_theta, context.dtype)
        x = block_embeds
        for layer, layer_type in zip(self.layers, c.layer_types, strict=True):
            x = layer(x, context, rope, context_rope, masks[layer_type], self.attend, past)
        return self.norm(x)


# -------------------------------------------------------------------------------------------- batch

class Batch(NamedTuple):
    """One packed row on a drafter's device: all that its forward and loss read. Batch size is 1.

    Its anchors come in G groups of N, the one shape that is compiled: training has one group, evaluation as
    many as the row has valid anchors. Padding blocks: anchor 0, start 0, counted 0.
    """
    target_hidden: torch.Tensor  # (1, S, L*D) the target's hidden states at its tapped layers
    ids: torch.Tensor            # (S,) token ids
    positions: torch.Tensor      # (S,) position of each token in its own conversation
    anchors: torch.Tensor        # (G, N) row index of each anchor, ascending; padding at the end
    starts: torch.Tensor         # (G, N) row index where the anchor's conversation starts
    counted: torch.Tensor        # (G, N) slots 1..counted have a label: supervised and in the anchor's turn
    slots: torch.Tensor          # (G, M) block*K + slot of the slots that count, padded with 0 to whole chunks
    # of no interest to the model: where the batch comes from, and how its copy is waited for
    kind: str = "train"          # "train" | "eval"
    index: int = 0               # row number in the stream of training rows, or held-out row
    row: object = None           # the row's host arrays, which evaluation reads
    ready: object = None         # CUDA event after which the tensors may be read, or None

    def tensors(self):
        return self[:7]


def block_arrays(start, run_length, anchors, n_anchors, block_size, chunk):
    """Sorted anchors of a row -> anchors, starts, counted (G, N) and slots (G, M), the fields of Batch.

    Host numpy arrays: start (S,) where each token's conversation starts, run_length (S,) how many supervised
    tokens follow in the turn. M is the largest group's number of counting slots, in whole chunks, at least one.
    """
    # numpy: torch lets other threads in at every operation, which costs more than these small ones
    start = np.asarray(start)
    run_length = np.asarray(run_length)
    anchors = np.asarray(anchors, np.int64)
    n_groups = max(1, -(-len(anchors) // n_anchors))
    blocks = np.zeros((3, n_groups * n_anchors), np.int64)
    blocks[0, :len(anchors)] = anchors
    blocks[1, :len(anchors)] = start[anchors]
    blocks[2, :len(anchors)] = np.minimum(run_length[anchors], block_size - 1)
    blocks = blocks.reshape(3, n_groups, n_anchors)

    slot = np.arange(block_size)
    counts = (slot >= 1) & (slot <= blocks[2, ..., None])  # (G, N, K)
    counting = [np.flatnonzero(group) for group in counts]
    n_chunks = max(1, *(-(-len(group) // chunk) for group in counting))
    slots = np.zeros((n_groups, n_chunks * chunk), np.int64)
    for row, group in zip(slots, counting, strict=True):
        row[:len(group)] = group
    return *blocks, slots


def default_gamma(block_size: int) -> float:
    """Decay length of the slot weights: the published values, else K/2."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2)


def slot_weights(ce: torch.Tensor, counts: torch.Tensor, kind: str, gamma: float,
                 alpha: float = 0.5) -> torch.Tensor:
    """Detached weights (N, K) of the per-slot loss. ce (N, K) with anything where a slot does not count.

    "decay": exp(-(k-1)/gamma). "dpace": the expected number of tokens a slot's success still unlocks, sum
    over m >= j of C_m, with C_j = product over i <= j of (1-alpha)q_i + alpha and q = exp(-ce).
    """
    if kind == "decay":
        slot = torch.arange(ce.shape[1], device=ce.device, dtype=torch.float32)
        return torch.exp(-(slot - 1) / gamma) * counts
    success = torch.where(counts, (1 - alpha) * torch.exp(-ce.detach().float()) + alpha, 1.0)
    reach = success.cumprod(1) * counts  # C_j, 0 where a slot doesn't count
    return reach.flip(1).cumsum(1).flip(1) * counts


# --------------------------------------------------------------------------------------------- loss

def cap(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Soft cap of some targets: |logits| stays below it."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


class Head(nn.Module):
    """The target's frozen output layer, with its soft cap if any. hidden (M, D) -> logits (M, V).

    A fused loss needs the two products of it that another class may compute in another precision: logits()
    and grad_hidden(), which gets the gradient as the loss wrote it.
    """

    def __init__(self, linear: nn.Linear, softcap: float | None = None):
        super().__init__()
        self.linear = linear
        self.softcap = softcap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return cap(self.logits(hidden), self.softcap)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Before the soft cap."""
        return self.linear(hidden)

    def grad_hidden(self, grad_logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """d loss / d logits() (M, V) -> d loss / d hidden (M, D)."""
        return torch.mm(grad_logits, self.linear.weight).to(dtype)


def ce_of_chunk(hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden (chunk, D), labels (chunk,) -> ce (chunk,), argmax == label (chunk,)."""
    logits = head(hidden)
    ce = F.cross_entropy(logits.float(), labels, reduction="none")
    return ce, logits.argmax(-1) == labels


def ce_with_grad(logits: torch.Tensor, labels: torch.Tensor,
                 softcap: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """raw logits (M, V) -> ce (M,), argmax == label (M,), d ce / d logits (M, V) in fp32."""
    capped = cap(logits.float(), softcap)
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    lse = capped.logsumexp(-1)
    correct = capped.argmax(-1) == labels
    ce = lse - torch.where(is_label, capped, 0.0).sum(-1)
    grad = torch.exp(capped - lse[:, None]) - is_label.float()
    if softcap is not None:
        grad = grad * (1 - (capped / softcap).square())
    return ce, correct, grad


def ce_and_grad(logits: torch.Tensor, labels: torch.Tensor,
                softcap: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ce_with_grad whose gradient takes the place of the logits, in their dtype."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and softcap is None:
        return ce_and_grad_in_place(logits, labels)
    ce, correct, grad = ce_with_grad(logits, labels, softcap)
    return ce, correct, logits.copy_(grad)


def ce_and_grad_in_place(logits: torch.Tensor,
                         labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ce_with_grad of fp32 logits without a cap, the same bits. Uncompiled, that one makes eight tables of the
    logits' size, which on a CPU costs more than either product of the head."""
    lse = logits.logsumexp(-1)
    correct = logits.argmax(-1) == labels
    label_column = labels[:, None]
    ce = lse - logits.gather(1, label_column)[:, 0]
    logits.sub_(lse[:, None]).exp_()
    minus_one = logits.new_full(label_column.shape, -1.0)
    return ce, correct, logits.scatter_add_(1, label_column, minus_one)


class FusedCE(torch.autograd.Function):
    """Cross-entropy whose hidden gradient is made in forward: the head is frozen, so no logits are kept or
    recomputed. Per-row weights come later, as the incoming gradient (M,)."""

    @staticmethod
    def forward(ctx, hidden, head, labels, chunk, ce_and_grad):
        ce = labels.new_empty(labels.shape, dtype=torch.float32)
        correct = torch.empty_like(labels, dtype=torch.bool)
        grad = torch.empty_like(hidden)
        for first in range(0, labels.numel(), chunk):
            rows = slice(first, first + chunk)
            logits = head.logits(hidden[rows])
            ce[rows], correct[rows], grad_logits = ce_and_grad(logits, labels[rows], head.softcap)
            grad[rows] = head.grad_hidden(grad_logits, hidden.dtype)
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(correct)
        return ce, correct

    @staticmethod
    def backward(ctx, grad_ce, _):
        (grad,) = ctx.saved_tensors
        nothing_for_the_rest = (None,) * 4
        return grad * grad_ce[:, None].to(grad.dtype), *nothing_for_the_rest


def chunked_ce(hidden: torch.Tensor, head: Head, labels: torch.Tensor, chunk: int, form: str = "checkpoint",
               ce_and_grad: Callable = ce_and_grad) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden (M, D), labels (M,), M a multiple of chunk -> ce (M,) fp32 with gradient, argmax == label (M,).

    "checkpoint" is the readable reference: each chunk's logits are made again in backward. "fused" makes the
    hidden gradient in forward. Either way no more than one chunk's logits are in memory.
    """
    if form == "fused" and torch.is_grad_enabled() and hidden.requires_grad:
        return FusedCE.apply(hidden, head, labels, chunk, ce_and_grad)
    ce = []
    correct = []
    for rows, row_labels in zip(hidden.split(chunk), labels.split(chunk), strict=True):
        chunk_ce, chunk_correct = checkpoint(ce_of_chunk, rows, head, row_labels, use_reentrant=False,
                                             preserve_rng_state=False)
        ce.append(chunk_ce)
        correct.append(chunk_correct)
    return torch.cat(ce), torch.cat(correct)


class RowResult(NamedTuple):
    loss: torch.Tensor     # () sum of w*ce, with gradient; see train_dflash.divisor
    weight: torch.Tensor   # () sum of w
    ce: torch.Tensor       # (N, K) detached, 0 where a slot doesn't count
    matches: torch.Tensor  # (N,) leading slots 1.. whose argmax equals the label
    correct: torch.Tensor  # (N, K) bool


class LossSpec(NamedTuple):
    """How a row's loss is made; every field is a constant of the trainer."""
    kind: str            # "decay" | "dpace"
    gamma: float
    form: str            # "checkpoint" | "fused"
    chunk: int           # rows of logits at a time
    ce_and_grad: Callable = ce_and_grad  # of "fused"; may be compiled


def layer_masks(c, make_mask, start, anchor, seq_len):
    """One mask per layer type of config c."""
    masks = {}
    for layer_type in dict.fromkeys(c.layer_types):
        masks[layer_type] = make_mask(start, anchor, seq_len, c.block_size, c.window(layer_type))
    return masks


def row_loss(drafter, embed, head, batch, group, make_mask, spec):
    """Forward and loss of a row's anchors in one group -> RowResult. embed, head: the target's, frozen."""
    config = drafter.config
    seq_len = batch.ids.numel()
    anchors = batch.anchors[group]
    slots = batch.slots[group]
    n_blocks = anchors.numel()
    slot = torch.arange(config.block_size, device=anchors.device)
    masks = layer_masks(config, make_mask, batch.starts[group], anchors, seq_len)

    inputs = torch.where(slot == 0, batch.ids[anchors][:, None], config.mask_token_id)
    # asking for a gradient nobody reads gives the first layer the graph of the others
    embeds = embed(inputs.view(1, -1)).requires_grad_(torch.is_grad_enabled())
    block_positions = (batch.positions[anchors][:, None] + slot).flatten()
    hidden = drafter(batch.target_hidden, embeds, batch.positions, block_positions, masks)[0]  # (N*K, D)

    place = anchors[:, None] + slot  # (N, K) row index of each slot's token
    labels = batch.ids[place.clamp(max=seq_len - 1)].flatten()[slots]
    ce_of_slots, correct_slots = chunked_ce(hidden.index_select(0, slots), head, labels, spec.chunk, spec.form,
                                            spec.ce_and_grad)
    counts = (slot >= 1) & (slot <= batch.counted[group][:, None])  # (N, K)

    def in_blocks(values):  # (M,) -> (N, K); the padding of `slots` lands on slot 0 of block 0: it never counts
        flat = values.new_zeros(n_blocks * config.block_size)
        return flat.index_put((slots,), values).view(n_blocks, config.block_size)

    ce = torch.where(counts, in_blocks(ce_of_slots), 0.0)
    correct = in_blocks(correct_slots) & counts
    weights = slot_weights(ce, counts, spec.kind, spec.gamma)
    matches = correct[:, 1:].cumprod(1).sum(1)
    return RowResult((weights * ce).sum(), weights.sum(), ce.detach(), matches, correct)


# --------------------------------------------------------------------------------------- acceptance

def walk(matches: Sequence[int], n_tokens: int) -> list[int]:
    """Tokens that each pass of a speculative decoder produces, as z-lab's client counts; tau is their mean.

    matches[p]: slots accepted when the anchor is answer token p. The answer has n_tokens, end-of-turn
    included; its first comes from the prefill.
    """
    produced = []
    p = 0
    while p < n_tokens - 1:
        n = min(1 + int(matches[p]), n_tokens - 1 - p)
        produced.append(n)
        p += n
    return produced

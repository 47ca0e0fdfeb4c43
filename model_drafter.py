"""The DFlash drafter: model, slots, loss, acceptance.

    Drafter(config, attend)          target's hidden states + blocks [anchor, mask, ...] -> block hiddens
    Batch, block_arrays()            a packed row with its anchors, and which slots count
    row_loss()                       mask, forward and the loss of the drafter's head, of one row
    walk()                           acceptance as a server counts it

Shapes: S context tokens in a row, N anchors in a row, K slots in a block, D hidden size, L tapped target
layers, V vocabulary, M slots that count. Batch is 1 everywhere: a row is packed.
"""
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# ---------------------------------------------------------------------------------------- the model

HEADS = "dflash", "dflash2", "dspark"


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
    head: str = "dflash"                         # one of HEADS
    in_block: str = "by_type"                    # "bidirectional": sliding layers, too, see their whole block
    conv_taps: int = 0                           # dflash2: slots that a convolution reads, its own included
    conv_group: int = 0                          # channels that share a kernel made from the block
    selector_rank: int = 0
    selector_top_k: int = 0                      # candidates per slot
    output_multiplier: float = 1.0               # of published dflash2 drafters; ours have 1
    markov_rank: int = 0                         # dspark
    confidence: bool = False                     # dspark: has a confidence head
    num_anchors: int = 0                         # dspark's config.json names it; nothing depends on it

    @property
    def first_slot(self) -> int:
        """The slot of the first draft: dspark's anchor slot predicts as well."""
        return 0 if self.head == "dspark" else 1

    @property
    def shift(self) -> int:
        """Slot k of anchor a predicts token a + k + shift; draft j = 1.. is slot j - shift."""
        return 1 - self.first_slot

    @property
    def n_drafts(self) -> int:
        """J, tokens drafted by a block."""
        return self.block_size - self.first_slot

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


class BlockConv(nn.Module):
    """DFlash 2: a short causal convolution over the slots of each block, with kernels made from the block.

    It stands on both sides of a sublayer: what goes in (side 0) and what comes out (side 1) are convolved,
    with kernels that both come from the input norm's output. At the start it is the identity.
    """

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.block_size = c.block_size
        self.taps = c.conv_taps
        self.group = c.conv_group
        n_groups = c.hidden_size // c.conv_group
        self.base_kernel = nn.Parameter(torch.empty(2, c.conv_taps, c.hidden_size))
        self.kernel_projection = nn.Linear(c.hidden_size, 2 * c.conv_taps * n_groups, bias=False)

    def kernels(self, x: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """x (1, N*K, D) -> each side's kernel: made from the block (N, K, taps, G), base (taps, G, D/G)."""
        made = self.kernel_projection(x).view(-1, self.block_size, 2, self.taps, x.shape[-1] // self.group)
        base = self.base_kernel.unflatten(-1, (-1, self.group))
        return (made[:, :, 0], base[0]), (made[:, :, 1], base[1])

    def convolve(self, kernel: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """x (1, N*K, D) -> the same shape; kernel: of one side."""
        return ConvolveBlocks.apply(*kernel, x)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x.to(dtype). Where that does nothing, gradients of a compiled autograd.Function are 0 in silence (torch
    2.11)."""
    return x if x.dtype == dtype else x.to(dtype)


def kernel_of_taps(made: torch.Tensor, base: torch.Tensor) -> list[torch.Tensor]:
    """See ConvolveBlocks -> of each tap within a block (N, K, G, D/G), fp32."""
    return [made[:, :, tau, :, None].float() + base[tau].float() for tau in range(min(made.shape[1:3]))]


class ConvolveBlocks(torch.autograd.Function):
    """made (N, K, taps, G), base (taps, G, D/G), x (1, N*K, D) -> (1, N*K, D); with x as blocks of K slots:
    out[k] = sum over tau of (made[k, tau] + base[tau]) * x[k - tau], with zeros before each block.

    Summed in fp32 and rounded once, as vLLM's kernel does. The backward is written out for the compiler:
    autograd multiplies gradient and input once, for the sum over a group and for the sum over all slots, and
    Inductor then stores these products in fp32.
    """

    @staticmethod
    def forward(ctx, made, base, x):
        ctx.save_for_backward(made, base, x)
        blocks = x.view(*made.shape[:2], *base.shape[1:])  # (N, K, G, D/G)
        kernels = kernel_of_taps(made, base)
        out = kernels[0] * blocks.float()
        for tau, kernel in enumerate(kernels[1:], 1):
            # products are shifted, not blocks: shifted blocks would be kept for the backward
            out = out + F.pad(kernel[:, tau:] * blocks[:, :-tau].float(), (0, 0, 0, 0, tau, 0))
        return rounded(out.view(x.shape), x.dtype)

    @staticmethod
    def backward(ctx, grad):
        made, base, x = ctx.saved_tensors
        blocks = x.view(*made.shape[:2], *base.shape[1:])
        grad = grad.reshape(blocks.shape)
        kernels = kernel_of_taps(made, base)
        grad_blocks = kernels[0] * grad.float()
        grad_made = torch.zeros_like(made)
        grad_base = torch.zeros_like(base)
        flat = -1, base[0].numel()  # (N*K, D)
        for tau, kernel in enumerate(kernels):
            earlier = blocks
            if tau:
                earlier = F.pad(blocks[:, :-tau], (0, 0, 0, 0, tau, 0))
                to_earlier = kernel[:, tau:] * grad[:, tau:].float()
                grad_blocks = grad_blocks + F.pad(to_earlier, (0, 0, 0, 0, 0, tau))
            grad_made[:, :, tau] = (grad.float() * earlier.float()).sum(-1)
            # of another shape, and so to the compiler another product
            product = grad.reshape(flat).float() * earlier.reshape(flat).float()
            grad_base[tau] = product.sum(0).view(base[tau].shape)
        return grad_made, grad_base, rounded(grad_blocks.view(x.shape), x.dtype)


class DrafterLayer(nn.Module):
    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.has_conv = c.head == "dflash2"
        if self.has_conv:
            self.attention_conv = BlockConv(c)
            self.mlp_conv = BlockConv(c)

    def forward(self, x: torch.Tensor, context: torch.Tensor, rope: Rope, context_rope: Rope, mask: object,
                attend: Callable, past: object | None = None) -> torch.Tensor:
        if not self.has_conv:
            x = x + self.self_attn(self.input_layernorm(x), context, rope, context_rope, mask, attend, past)
            return x + self.mlp(self.post_attention_layernorm(x))

        normed = self.input_layernorm(x)
        before, after = self.attention_conv.kernels(normed)
        attended = self.self_attn(self.attention_conv.convolve(before, normed), context, rope, context_rope,
                                  mask, attend, past)
        x = x + self.attention_conv.convolve(after, attended)

        normed = self.post_attention_layernorm(x)
        before, after = self.mlp_conv.kernels(normed)
        return x + self.mlp_conv.convolve(after, self.mlp(self.mlp_conv.convolve(before, normed)))


class CandidateSelector(nn.Module):
    """DFlash 2: scores the likeliest tokens of a slot again, knowing the token before it."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.top_k = c.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(c.vocab_size, c.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(c.vocab_size, c.selector_rank))
        self.hidden_projection = nn.Linear(c.hidden_size, c.selector_rank, bias=False)

    def forward(self, hidden: torch.Tensor, predecessors: torch.Tensor, candidates: torch.Tensor,
                unary: torch.Tensor) -> torch.Tensor:
        """hidden (M, D), predecessors (M,), candidates and their logits `unary` (M, k_top) -> scores."""
        return edge_scores(*self.factors(hidden, predecessors, candidates), unary)

    def factors(self, hidden: torch.Tensor, predecessors: torch.Tensor,
                candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> P[predecessor] (M, r), Wh h (M, r), S[candidate] (M, k_top, r)."""
        predecessor = F.embedding(predecessors, self.predecessor_codebook)
        successor = F.embedding(candidates, self.successor_codebook)
        return predecessor, self.hidden_projection(hidden), successor


def edge_scores(predecessor: torch.Tensor, projected: torch.Tensor, successor: torch.Tensor,
                unary: torch.Tensor) -> torch.Tensor:
    """Three factors (see CandidateSelector.factors) and the candidates' logits `unary` (M, k_top) -> scores
    (M, k_top), fp32: unary of b + sum over r of P[predecessor] * (Wh h) * S[b]."""
    edge = predecessor.float() * projected.float()
    return unary.float() + (successor.float() * edge[:, None]).sum(-1)


class MarkovHead(nn.Module):
    """DSpark: a bias on all logits of a slot from the token before it, W2 E[predecessor]."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(c.vocab_size, c.markov_rank)             # E
        self.markov_w2 = nn.Linear(c.markov_rank, c.vocab_size, bias=False)  # W2

    def bias(self, predecessors: torch.Tensor) -> torch.Tensor:
        """(M,) -> (M, V)."""
        return self.markov_w2(self.markov_w1(predecessors))


class ConfidenceHead(nn.Module):
    """DSpark: will the target accept the slot's token? [hidden; E[predecessor]] -> a logit."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.proj = nn.Linear(c.hidden_size + c.markov_rank, 1)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """hidden (M, D), embedded predecessors (M, r) -> (M,)."""
        return self.proj(torch.cat([hidden, embedded], -1))[:, 0]


# of a head: what keeps it without effect until it is trained
ZERO_AT_FIRST = ("kernel_projection.weight", "successor_codebook", "markov_w2.weight",
                 "confidence_head.proj.weight", "confidence_head.proj.bias")


def weight_as_used(module: nn.Module | None) -> torch.Tensor | None:
    """The weight that a target's Linear or norm multiplies with; None where there is none or it is quantised.
    Some families' norms multiply with 1 + weight: what a norm makes of ones tells."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    return weight if weight.dim() == 2 else module(torch.ones_like(weight))


def copy_part(own: nn.Module, theirs: nn.Module | None) -> bool:
    """Weights of a target's attention or MLP into the drafter's, if each Linear has one of its shape."""
    modules = {} if theirs is None else dict(theirs.named_modules())
    weights = {}
    for name, module in own.named_modules():
        if isinstance(module, (nn.Linear, RMSNorm)):
            weight = weight_as_used(modules.get(name))
            if weight is not None and weight.shape == module.weight.shape:
                weights[module] = weight
            elif isinstance(module, nn.Linear):
                return False
    for module, weight in weights.items():
        module.weight.copy_(weight)
    return True


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
        if config.head == "dflash2":
            self.candidate_selector = CandidateSelector(config)
        if config.head == "dspark":
            self.markov_head = MarkovHead(config)
        if config.confidence:
            self.confidence_head = ConfidenceHead(config)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Normal(0, initializer_range), drawn in fp32 from its own generator; norms are 1.

        What a head adds to the backbone is drawn last and has no effect at first: convolutions pass on what
        they get, scores are the logits, the bias is 0.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if name.endswith("norm.weight"):
                param.fill_(1.0)
            elif name.endswith("base_kernel"):
                param.zero_()
                param[:, 0] = 1.0
            elif name.endswith(ZERO_AT_FIRST):
                param.zero_()
            else:
                fresh = torch.empty(param.shape, dtype=torch.float32)
                fresh.normal_(0.0, self.config.initializer_range, generator=generator)
                param.copy_(fresh)

    @torch.no_grad()
    def init_from_target(self, layers: Sequence[nn.Module], final_norm: nn.Module | None) -> list[str]:
        """After init_weights(): what the target has in the same shape replaces fresh weights. -> their names.

        Layer i becomes the target's layer i: its first ones read embeddings, as a block's slots do. Attention
        and MLP are copied whole or not at all. fc passes the deepest tap on, hidden_norm is the first layer's
        input norm, norm half the target's final one: flatter logits at first.
        """
        copied = ["fc"]
        size = self.config.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, -size:] = torch.eye(size)
        norms = {"norm": (self.norm, final_norm, 0.5)}
        norms["hidden_norm"] = (self.hidden_norm, getattr(layers[0], "input_layernorm", None), 1.0)
        for i, (own, theirs) in enumerate(zip(self.layers, layers, strict=False)):
            for part in ("self_attn", "mlp"):
                if copy_part(getattr(own, part), getattr(theirs, part, None)):
                    copied.append(f"layers.{i}.{part}")
            for name in ("input_layernorm", "post_attention_layernorm"):
                norms[f"layers.{i}.{name}"] = (getattr(own, name), getattr(theirs, name, None), 1.0)
        for name, (own, theirs, factor) in norms.items():
            weight = weight_as_used(theirs)
            if weight is not None:
                own.weight.copy_(weight * factor)
                copied.append(name)
        return copied

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
    target_hidden: torch.Tensor  # (1, S, L*D) tapped hidden states; (L+1)*D with the last one behind them
    ids: torch.Tensor            # (S,) token ids
    positions: torch.Tensor      # (S,) position of each token in its own conversation
    anchors: torch.Tensor        # (G, N) row index of each anchor, ascending; padding at the end
    starts: torch.Tensor         # (G, N) row index where the anchor's conversation starts
    counted: torch.Tensor        # (G, N) drafts 1..counted have a label: supervised and in the anchor's turn
    slots: torch.Tensor          # (G, M) block*K + slot of slots that count, padded with N*K to whole chunks
    # of no interest to the model: where the batch comes from, and how its copy is waited for
    kind: str = "train"          # "train" | "eval"
    index: int = 0               # row number in the stream of training rows, or held-out row
    row: object = None           # the row's host arrays, which evaluation reads
    ready: object = None         # CUDA event after which the tensors may be read, or None

    def tensors(self):
        return self[:7]


def block_arrays(start: np.ndarray, run_length: np.ndarray, anchors: np.ndarray, n_anchors: int,
                 block_size: int, chunk: int, first_slot: int = 1,
                 whole_blocks: bool = False) -> tuple[np.ndarray, ...]:
    """Sorted anchors of a row -> anchors, starts, counted (G, N) and slots (G, M), the fields of Batch.

    Host numpy arrays: start (S,) where each token's conversation starts, run_length (S,) how many supervised
    tokens follow in the turn. M is the largest group's number of counting slots, in whole chunks, at least
    one. first_slot: the slot of the first draft. whole_blocks: no block's slots are in two chunks.
    """
    # numpy: torch lets other threads in at every operation, which costs more than these small ones
    start = np.asarray(start)
    run_length = np.asarray(run_length)
    anchors = np.asarray(anchors, np.int64)
    n_groups = max(1, -(-len(anchors) // n_anchors))
    blocks = np.zeros((3, n_groups * n_anchors), np.int64)
    blocks[0, :len(anchors)] = anchors
    blocks[1, :len(anchors)] = start[anchors]
    blocks[2, :len(anchors)] = np.minimum(run_length[anchors], block_size - first_slot)
    blocks = blocks.reshape(3, n_groups, n_anchors)

    draft = np.arange(block_size) - first_slot + 1  # of each slot
    counts = (draft >= 1) & (draft <= blocks[2, ..., None])  # (G, N, K)
    padding = n_anchors * block_size
    groups = []
    for group in counts:
        counting = np.flatnonzero(group)
        groups.append(keep_blocks_whole(counting, block_size, chunk, padding) if whole_blocks else counting)
    n_chunks = max(1, *(-(-len(group) // chunk) for group in groups))
    slots = np.full((n_groups, n_chunks * chunk), padding, np.int64)
    for row, group in zip(slots, groups, strict=True):
        row[:len(group)] = group
    return *blocks, slots


def keep_blocks_whole(slots: np.ndarray, block_size: int, chunk: int, padding: int) -> np.ndarray:
    """Put padding where a block's slots would go on into the next chunk of `chunk` entries (K or more)."""
    chunks = []
    while len(slots) > chunk:
        block = slots // block_size
        end = int(np.searchsorted(block, block[chunk]))  # where the block of the first slot too many begins
        chunks.append(np.append(slots[:end], np.full(chunk - end, padding)))
        slots = slots[end:]
    return np.concatenate([*chunks, slots])


# --------------------------------------------------------------------------------------------- loss

def default_gamma(n_drafts: int) -> float:
    """Decay length of the slot weights: the published values, else (J + 1) / 2."""
    return {15: 7.0, 9: 5.0, 7: 4.0}.get(n_drafts, (n_drafts + 1) / 2)


def slot_weights(ce: torch.Tensor, counts: torch.Tensor, kind: str, gamma: float, alpha: float = 0.5,
                 first_slot: int = 1) -> torch.Tensor:
    """Detached weights (N, K) of the per-slot loss. ce (N, K) with anything where a slot does not count.

    "decay": exp(-(j-1)/gamma) for draft j. "dpace": the expected number of tokens a slot's success still
    unlocks, sum over m >= j of C_m, with C_j = product over i <= j of (1-alpha)q_i + alpha and q = exp(-ce).
    """
    if kind == "decay":
        slot = torch.arange(ce.shape[1], device=ce.device, dtype=torch.float32)
        return torch.exp(-(slot - first_slot) / gamma) * counts
    success = torch.where(counts, (1 - alpha) * torch.exp(-ce.detach().float()) + alpha, 1.0)
    reach = success.cumprod(1) * counts  # C_j, 0 where a slot doesn't count
    return reach.flip(1).cumsum(1).flip(1) * counts


# --------------------------------------------------------------------------------------------- loss
# Which functions make a row's loss, by LossSpec.form:
#
#                                          "checkpoint"         "fused": gradient made in forward
#   plain_loss, tokens alone               ce_of_chunk          FusedCE (CrossEntropy)
#   plain_loss, the target's distribution  terms_of_chunk       FusedTerms (fused_terms)
#   selector_loss (dflash2): its backbone  terms_of_chunk       FusedTerms (fused_terms)
#                            its selector  selector_terms       the same, its logits' gradient in FusedTerms
#   markov_loss (dspark)                   terms_of_chunk       FusedMarkov; as on the left where logits are
#                                                               capped
#
# What writes a gradient over the logits never gathers from them in the same compiled function: torch 2.11's
# Inductor may put such a read behind the write.

def cap(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Soft cap of some targets: |logits| stays below it."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def grad_before_cap(grad: torch.Tensor, capped: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """d loss / d capped logits -> d loss / d the logits before cap()."""
    return grad if softcap is None else grad * (1 - (capped / softcap).square())


VOCAB_GROUP = 64  # neighbours in the vocabulary that are reduced at once: Inductor loops over longer ones


def in_groups(logits: torch.Tensor) -> torch.Tensor:
    """(M, V) -> (M, V/64, 64), or (M, 1, V) where that leaves a rest.

    Compiled, a reduction of all of V runs through a row again and again, and there are few rows: group by
    group the card is full and each logit is read once.
    """
    n_rows, vocab_size = logits.shape
    group = vocab_size if vocab_size % VOCAB_GROUP else VOCAB_GROUP
    return logits.view(n_rows, vocab_size // group, group)


def exp(x: torch.Tensor) -> torch.Tensor:
    """As exp2, which a GPU has an instruction for: compiled losses wait for arithmetic, not for memory."""
    return torch.exp2(x * math.log2(math.e))


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """(M, V) -> (M,)."""
    grouped = in_groups(logits)
    largest = grouped.amax(-1).clamp(min=torch.finfo(logits.dtype).min)  # finite: -inf less itself is NaN
    sums = exp(grouped - largest[..., None]).sum(-1)
    return (largest + sums.log()).logsumexp(-1)


def argmax(logits: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """(M, V) -> (M,), the first of equals; of logits + bias in fp32 where there is one."""
    grouped = in_groups(logits if bias is None else with_bias(logits, bias))
    group = grouped.amax(-1).argmax(-1)
    best = grouped.gather(1, group[:, None, None].expand(-1, -1, grouped.shape[-1]))[:, 0]  # (M, 64)
    return group * grouped.shape[-1] + best.argmax(-1)


def total(values: torch.Tensor) -> torch.Tensor:
    """Sum over the vocabulary, (M, V) -> (M,)."""
    return in_groups(values).sum(-1).sum(-1)


def likeliest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.topk of (M, V) -> values, indices (M, k), exactly, with one plain pass over V.

    The k largest logits stand in the k groups of neighbours with the largest maxima, since each of those has
    an entry as large. torch.topk alone makes several passes over all of V.
    """
    grouped = in_groups(logits)
    n_rows, n_groups, size = grouped.shape
    if n_groups < 2 * k:
        return logits.topk(k, dim=-1)
    groups = grouped.amax(-1).topk(k, dim=-1).indices                         # (M, k)
    entries = grouped.gather(1, groups[..., None].expand(-1, -1, size))     # (M, k, 64)
    values, places = entries.flatten(1).topk(k, dim=-1)
    group_of_value = groups.gather(1, places // size)
    return values, group_of_value * size + places % size


class Head(nn.Module):
    """The target's frozen output layer, with the factor on its logits and its soft cap if it has these.
    hidden (M, D) -> logits (M, V).

    A fused loss needs the products of it that another class may compute in another precision: logits() and
    grad_hidden(), which gets the gradient as the loss wrote it.
    """

    def __init__(self, linear: nn.Linear, softcap: float | None = None, scale: float = 1.0):
        super().__init__()
        self.linear = linear
        self.softcap = softcap
        self.scale = scale

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return cap(self.logits(hidden), self.softcap)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Before the soft cap."""
        logits = self.linear(hidden)
        return logits if self.scale == 1 else logits * self.scale

    def grad_hidden(self, grad_logits: torch.Tensor, dtype: torch.dtype, tokens: torch.Tensor | None = None,
                    grad_of_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """d loss / d logits() (M, V), which may be overwritten, -> d loss / d hidden (M, D).

        grad_of_tokens (M, k): what comes on top at a few different tokens (M, k) of each row.
        """
        if tokens is not None:
            grad_logits = grad_logits.scatter_add_(1, tokens, grad_of_tokens.to(grad_logits.dtype))
        grad = torch.mm(grad_logits, self.linear.weight)
        return (grad if self.scale == 1 else grad * self.scale).to(dtype)


def ce_of_chunk(hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden (chunk, D), labels (chunk,) -> ce (chunk,), argmax == label (chunk,)."""
    logits = head(hidden)
    ce = F.cross_entropy(logits.float(), labels, reduction="none")
    return ce, logits.argmax(-1) == labels


def with_bias(logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """logits (M, V) in fp32, with the bias (M, V) where there is one."""
    return logits.float() if bias is None else logits.float() + bias.float()


def lse_of(logits: torch.Tensor, bias: torch.Tensor | None, softcap: float | None) -> torch.Tensor:
    """raw logits (M, V) -> logsumexp of cap(logits + bias) (M,), fp32."""
    return logsumexp(cap(with_bias(logits, bias), softcap))


def probs_of(logits: torch.Tensor, bias: torch.Tensor | None, lse: torch.Tensor,
             softcap: float | None) -> torch.Tensor:
    """d lse / d logits (M, V), fp32: the softmax, times the cap's slope."""
    capped = cap(with_bias(logits, bias), softcap)
    return grad_before_cap(exp(capped - lse[:, None]), capped, softcap)


def write_probs(logits: torch.Tensor, bias: torch.Tensor | None, lse: torch.Tensor,
                softcap: float | None) -> torch.Tensor:
    """probs_of in the place of the logits, in their dtype."""
    return logits.copy_(probs_of(logits, bias, lse, softcap))


def ce_and_grad_in_place(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """CrossEntropy of fp32 logits on a CPU, where what is not compiled makes a table of the logits' size for
    each operation, and costs more than either product of the head."""
    label_column = labels[:, None]
    lse = logits.logsumexp(-1)
    ce = lse - logits.gather(1, label_column)[:, 0]
    logits.sub_(lse[:, None]).exp_()
    minus_one = logits.new_full(label_column.shape, -1.0)
    return ce, logits.scatter_add_(1, label_column, minus_one)


class CrossEntropy:
    """Cross-entropy of a chunk of logits, whose gradient takes their place; and their argmax.

    Each part is compiled by itself. Only the label's entry of the gradient is not its probability: it is set
    afterwards, so the pass over all entries has nothing to compare.
    """

    def __init__(self, compiled: Callable = lambda function: function):
        self.argmax = compiled(argmax)
        self.lse_of = compiled(lse_of)
        self.write_probs = compiled(write_probs)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, softcap: float | None = None,
                 bias: torch.Tensor | None = None) -> tuple[torch.Tensor, object]:
        """raw logits, bias (M, V), labels (M,) -> ce (M,) of cap(logits + bias), d ce / d logits (M, V)."""
        if logits.device.type == "cpu" and logits.dtype == torch.float32 and softcap is None and bias is None:
            return ce_and_grad_in_place(logits, labels)
        return self.ce_and_grad(logits, labels, softcap, bias)

    def ce_and_grad(self, logits: torch.Tensor, labels: torch.Tensor, softcap: float | None,
                    bias: torch.Tensor | None) -> tuple[torch.Tensor, object]:
        label_column = labels[:, None]
        of_label = logits.gather(1, label_column).float()
        if bias is not None:
            of_label = of_label + bias.gather(1, label_column).float()
        of_label = cap(of_label, softcap)
        lse = self.lse_of(logits, bias, softcap)
        ce = lse - of_label[:, 0]
        grad_of_label = grad_before_cap(torch.expm1(-ce)[:, None], of_label, softcap)  # p - 1
        return ce, self.gradient(logits, bias, lse, softcap, label_column, grad_of_label)

    def gradient(self, logits: torch.Tensor, bias: torch.Tensor | None, lse: torch.Tensor,
                 softcap: float | None, label_column: torch.Tensor, grad_of_label: torch.Tensor) -> object:
        """label_column, grad_of_label (M, 1) -> what Head.grad_hidden takes."""
        grad = self.write_probs(logits, bias, lse, softcap)
        return grad.scatter_(1, label_column, grad_of_label.to(grad.dtype))


class FusedCE(torch.autograd.Function):
    """Cross-entropy whose hidden gradient is made in forward: the head is frozen, so no logits are kept or
    recomputed. Per-row weights come later, as the incoming gradient (M,)."""

    @staticmethod
    def forward(ctx, hidden, head, labels, chunk, cross_entropy):
        ce = labels.new_empty(labels.shape, dtype=torch.float32)
        correct = torch.empty_like(labels, dtype=torch.bool)
        grad = torch.empty_like(hidden)
        for first in range(0, labels.numel(), chunk):
            rows = slice(first, first + chunk)
            logits = head.logits(hidden[rows])
            correct[rows] = cross_entropy.argmax(logits) == labels[rows]  # before the gradient is there
            ce[rows], grad_logits = cross_entropy(logits, labels[rows], head.softcap)
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
               cross_entropy: CrossEntropy | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden (M, D), labels (M,), M a multiple of chunk -> ce (M,) fp32 with gradient, argmax == label (M,).

    "checkpoint" is the readable reference: each chunk's logits are made again in backward. "fused" makes the
    hidden gradient in forward; where none is asked for, as in evaluation, the reference runs.
    Either way no more than one chunk's logits are in memory.
    """
    if form == "fused" and torch.is_grad_enabled() and hidden.requires_grad:
        return FusedCE.apply(hidden, head, labels, chunk, cross_entropy or CrossEntropy())
    ce = []
    correct = []
    for rows, row_labels in zip(hidden.split(chunk), labels.split(chunk), strict=True):
        chunk_ce, chunk_correct = checkpoint(ce_of_chunk, rows, head, row_labels, use_reentrant=False,
                                             preserve_rng_state=False)
        ce.append(chunk_ce)
        correct.append(chunk_correct)
    return torch.cat(ce), torch.cat(correct)


# ------------------------------------------------------------------------------ the target's distribution

class LossTerms(NamedTuple):
    """Coefficients of a slot's loss. p is the drafter's distribution, q the target's, both at temperature 1;
    alpha = sum of min(p, q) is the probability that a sampled draft is accepted."""
    ce: float = 1.0    # -log p[label]
    tv: float = 0.0    # total variation: 1/2 sum |p - q| = 1 - alpha
    kl: float = 0.0    # sum of q (log q - log p)
    nla: float = 0.0   # -log alpha (LK-alpha)
    lk: float = 0.0    # share * kl + (1 - share) * tv with share = exp(-3 alpha), detached (LK-hybrid)

    @property
    def soft(self) -> bool:
        """Do they need q?"""
        return any(self[1:])


SMALLEST_ALPHA = 1e-5  # where nla stops


class SlotTerms(NamedTuple):
    """Of M slots, (M,) unless another shape is given; None where a head or the terms have no such thing."""
    loss: torch.Tensor             # mixture of the terms, with gradient
    ce: torch.Tensor
    correct: torch.Tensor          # bool: argmax == label
    tv: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    alpha: torch.Tensor | None = None
    backbone_correct: torch.Tensor | None = None  # without the head's bias
    candidates: torch.Tensor | None = None        # (M, k_top) likeliest tokens first
    candidate_probs: torch.Tensor | None = None   # (M, k_top) the target's probabilities of them
    unary: torch.Tensor | None = None             # (M, k_top) their logits, with gradient if not fused


def mix_terms(terms: LossTerms, ce, tv, kl, alpha):
    """-> the mixture, the coefficients that d tv and d kl have in its gradient."""
    share = torch.exp(-3 * alpha.detach())
    nla = -alpha.clamp(min=SMALLEST_ALPHA).log()
    lk = share * kl + (1 - share) * tv
    loss = terms.ce * ce + terms.tv * tv + terms.kl * kl + terms.nla * nla + terms.lk * lk
    d_nla = torch.where(alpha > SMALLEST_ALPHA, 1 / alpha, 0.0)
    return loss, terms.tv + terms.nla * d_nla + terms.lk * (1 - share), terms.kl + terms.lk * share


def terms_of_logits(logits: torch.Tensor, target_logits: torch.Tensor | None, labels: torch.Tensor,
                    terms: LossTerms) -> SlotTerms:
    """The readable reference, by autograd: final logits (M, V) of the drafter, of the target (or None)."""
    logits = logits.float()
    ce = F.cross_entropy(logits, labels, reduction="none")
    correct = logits.argmax(-1) == labels
    if target_logits is None:
        return SlotTerms(terms.ce * ce, ce, correct)
    log_p = logits.log_softmax(-1)
    log_q = target_logits.float().log_softmax(-1)
    p = log_p.exp()
    q = log_q.exp()
    tv = 0.5 * (p - q).abs().sum(-1)
    kl = (q * (log_q - log_p)).sum(-1)
    alpha = torch.minimum(p, q).sum(-1)
    loss, _, _ = mix_terms(terms, ce, tv, kl, alpha)
    return SlotTerms(loss, ce, correct, tv, kl, alpha)


def terms_with_grad(logits: torch.Tensor, target_logits: torch.Tensor, labels: torch.Tensor,
                    terms: LossTerms) -> tuple[torch.Tensor, ...]:
    """terms_of_logits of fp32 logits (M, V) with the gradient written out.

    -> loss, ce, tv, kl, alpha, logsumexp of the target's logits (M,), d loss / d logits (M, V).
    """
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    target_lse = logsumexp(target_logits)
    log_p = logits - logsumexp(logits)[:, None]
    log_q = target_logits - target_lse[:, None]
    p = exp(log_p)
    q = exp(log_q)
    ce = -total(torch.where(is_label, log_p, 0.0))
    tv = 0.5 * total((p - q).abs())
    kl = total(q * (log_q - log_p))
    alpha = total(torch.minimum(p, q))
    loss, tv_share, kl_share = mix_terms(terms, ce, tv, kl, alpha)

    # by where p is below q: where alpha is small their sum is as well, and 1 minus nearly 1 never occurs
    below = 0.5 - 0.5 * (p - q).sign()
    grad_tv = p * (total(p * below)[:, None] - below)
    grad = terms.ce * (p - is_label.float()) + kl_share[:, None] * (p - q) + tv_share[:, None] * grad_tv
    return loss, ce, tv, kl, alpha, target_lse, grad


def terms_and_grad(logits: torch.Tensor, target_logits: torch.Tensor, labels: torch.Tensor,
                   softcap: float | None, terms: LossTerms) -> tuple[torch.Tensor, ...]:
    """terms_with_grad of raw logits (M, V), whose place the gradient takes."""
    capped = cap(logits.float(), softcap)
    *values, grad = terms_with_grad(capped, cap(target_logits.float(), softcap), labels, terms)
    return *values, logits.copy_(grad_before_cap(grad, capped, softcap))


def biased_terms_and_grad(logits: torch.Tensor, bias: torch.Tensor, target_logits: torch.Tensor,
                          labels: torch.Tensor, terms: LossTerms) -> tuple[torch.Tensor, ...]:
    """terms_with_grad of logits + bias (M, V); the gradient takes the place of the logits."""
    *values, grad = terms_with_grad(with_bias(logits, bias), target_logits.float(), labels, terms)
    return *values, logits.copy_(grad)


def candidate_probs_of(target_logits: torch.Tensor, target_lse: torch.Tensor, candidates: torch.Tensor,
                       softcap: float | None) -> torch.Tensor:
    """The target's probabilities (M, k_top) of the candidates. target_logits (M, V) are before the cap."""
    return torch.exp(cap(target_logits.gather(1, candidates).float(), softcap) - target_lse[:, None])


def in_pieces(function: Callable, tables: Sequence[torch.Tensor], *rest: object) -> list[torch.Tensor]:
    """function(*tables, *rest) a few rows at a time -> all of its results but the last, the gradient, which
    has taken the place of tables[0]. The arithmetic on two distributions makes fp32 tables of (rows, V), and
    these should be small beside a chunk's logits."""
    n_rows = len(tables[0])
    n_pieces = next((n for n in (4, 5, 6, 7) if n_rows % n == 0), 1)
    pieces = zip(*(table.chunk(n_pieces) for table in tables), strict=True)
    results = [function(*piece, *rest)[:-1] for piece in pieces]
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


def fused_terms(inputs: "SlotInputs", head: Head, spec: "LossSpec", selector: CandidateSelector | None,
                ramp: torch.Tensor | float, grad: torch.Tensor | None) -> SlotTerms:
    """Terms of all M slots, and d loss / d hidden into `grad` (M, D) where it is given: of the backbone's
    loss, and what `ramp` of a selector's loss sends through the candidates' logits.

    No more than one chunk's logits, of drafter and target each, are in memory.
    """
    labels = inputs.labels
    n_slots = labels.numel()
    top_k = 0 if selector is None else selector.top_k
    loss, ce, tv, kl, alpha = torch.zeros(5, n_slots, dtype=torch.float32, device=labels.device)
    correct = torch.empty_like(labels, dtype=torch.bool)
    candidates = labels.new_empty(n_slots, top_k)
    unary, candidate_probs = torch.empty(2, n_slots, top_k, dtype=torch.float32, device=labels.device)
    for first in range(0, n_slots, spec.chunk):
        rows = slice(first, first + spec.chunk)
        logits = head.logits(inputs.hidden[rows])
        # what is read off the logits, before their gradient takes their place
        if top_k:
            values, candidates[rows] = spec.likeliest(logits, top_k)
            unary[rows] = cap(values.float(), head.softcap)
            best = candidates[rows, 0]
        else:
            best = spec.cross_entropy.argmax(logits)
        correct[rows] = best == labels[rows]
        if inputs.target_last is None:
            ce[rows], grad_logits = spec.cross_entropy(logits, labels[rows], head.softcap)
            scale = spec.terms.ce
        else:
            target_logits = head.logits(inputs.target_last[rows])
            (loss[rows], ce[rows], tv[rows], kl[rows], alpha[rows], target_lse) = in_pieces(
                spec.terms_and_grad, (logits, target_logits, labels[rows]), head.softcap, spec.terms)
            grad_logits = logits
            scale = 1.0
            if top_k:
                candidate_probs[rows] = candidate_probs_of(target_logits, target_lse, candidates[rows],
                                                           head.softcap)
        if grad is None:
            continue
        of_selector = ()
        if top_k and not spec.selector_detach:
            probs = None if inputs.target_last is None else candidate_probs[rows]
            grad_unary = unary_grad(selector, inputs.rows(rows), unary[rows], candidates[rows], probs, spec)
            grad_unary = grad_before_cap(grad_unary, unary[rows], head.softcap)
            of_selector = candidates[rows], ramp / scale * grad_unary
        grad[rows] = scale * head.grad_hidden(grad_logits, grad.dtype, *of_selector)
    if inputs.target_last is None:
        slots = SlotTerms(spec.terms.ce * ce, ce, correct)
    else:
        slots = SlotTerms(loss, ce, correct, tv, kl, alpha)
    if top_k:
        slots = slots._replace(candidates=candidates, unary=unary)
        if inputs.target_last is not None:
            slots = slots._replace(candidate_probs=candidate_probs)
    return slots


def unary_grad(selector: CandidateSelector, inputs: "SlotInputs", unary: torch.Tensor,
               candidates: torch.Tensor, probs: torch.Tensor | None, spec: "LossSpec") -> torch.Tensor:
    """d selector's loss / d logits of the candidates, `unary` (M, k_top), and of nothing else."""
    factors = selector.factors(inputs.hidden, inputs.predecessors, candidates)
    with torch.enable_grad():
        unary = unary.detach().requires_grad_()
        loss, _, _ = spec.candidate_terms(
            *factors, unary, candidates, inputs.labels, probs, spec.selector_terms)
        (grad,) = torch.autograd.grad(loss.sum(), unary)
    return grad


class FusedTerms(torch.autograd.Function):
    """fused_terms as FusedCE: the hidden states' gradient is made in forward, and belongs to the loss of the
    first field. A selector's loss has the same weights, so its share of that gradient is right as well."""

    @staticmethod
    def forward(ctx, hidden, inputs, head, spec, selector, ramp):
        grad = torch.empty_like(hidden)
        slots = fused_terms(inputs, head, spec, selector, ramp, grad)
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(*(field for field in slots[1:] if field is not None))
        return tuple(slots)

    @staticmethod
    def backward(ctx, grad_loss, *_):
        (grad,) = ctx.saved_tensors
        nothing_for_the_rest = (None,) * 5
        return grad * grad_loss[:, None].to(grad.dtype), *nothing_for_the_rest


class MarkovGrads(NamedTuple):
    """Gradients of sum w * loss, made while a chunk's logits are there."""
    hidden: torch.Tensor    # (M, D)
    embedded: torch.Tensor  # (M, r) of the predecessors
    w2: torch.Tensor        # (V, r) fp32


def fused_markov_terms(hidden: torch.Tensor, embedded: torch.Tensor, w2: torch.Tensor, head: Head,
                       labels: torch.Tensor, target_last: torch.Tensor | None, blocks: "Blocks",
                       spec: "LossSpec", grads: MarkovGrads | None) -> tuple[torch.Tensor, SlotTerms]:
    """DSpark: sum of w * loss, and the terms of hidden (M, D) with a bias from embedded predecessors (M, r).

    w2's gradient needs each slot's weight while the gradient of the chunk's logits is there: so chunks hold
    whole blocks and their weights are made on the way.
    """
    n_slots = labels.numel()
    loss, ce, tv, kl, alpha, weights = torch.zeros(6, n_slots, dtype=torch.float32, device=labels.device)
    correct = torch.empty_like(labels, dtype=torch.bool)
    backbone_correct = torch.empty_like(correct)
    for first in range(0, n_slots, spec.chunk):
        rows = slice(first, first + spec.chunk)
        logits = head.logits(hidden[rows])
        bias = F.linear(embedded[rows], w2)
        backbone_correct[rows] = spec.cross_entropy.argmax(logits) == labels[rows]
        correct[rows] = spec.cross_entropy.argmax(logits, bias) == labels[rows]
        if target_last is None:
            ce[rows], grad_logits = spec.cross_entropy(logits, labels[rows], bias=bias)
            loss[rows] = spec.terms.ce * ce[rows]
            scale = spec.terms.ce
        else:
            target_logits = head.logits(target_last[rows])
            loss[rows], ce[rows], tv[rows], kl[rows], alpha[rows], _ = in_pieces(
                spec.biased_terms_and_grad, (logits, bias, target_logits, labels[rows]), spec.terms)
            grad_logits = logits
            scale = 1.0
            del target_logits
        del bias  # each of these is as large as the logits, and the products below need room
        weights[rows] = blocks.weights_of_chunk(ce[rows], blocks.slots[rows])
        if grads is not None:
            weight = (scale * weights[rows, None]).to(hidden.dtype)
            grads.hidden[rows] = weight * head.grad_hidden(grad_logits, hidden.dtype)
            grads.embedded[rows] = weight * (grad_logits @ w2)
            grads.w2.add_(grad_logits.T @ (weight * embedded[rows]))
    slots = SlotTerms(loss, ce, correct, backbone_correct=backbone_correct)
    if target_last is not None:
        slots = slots._replace(tv=tv, kl=kl, alpha=alpha)
    return (weights * loss).sum(), slots


class FusedMarkov(torch.autograd.Function):
    """fused_markov_terms with all gradients made in forward. The sum alone has one."""

    @staticmethod
    def forward(ctx, hidden, embedded, w2, head, labels, target_last, blocks, spec):
        grads = MarkovGrads(torch.empty_like(hidden), torch.empty_like(embedded),
                            torch.zeros_like(w2, dtype=torch.float32))
        total, slots = fused_markov_terms(
            hidden, embedded, w2, head, labels, target_last, blocks, spec, grads)
        ctx.save_for_backward(grads.hidden, grads.embedded, grads.w2.to(w2.dtype))
        ctx.mark_non_differentiable(*(field for field in slots if field is not None))
        return total, *slots

    @staticmethod
    def backward(ctx, grad_total, *_):
        nothing_for_the_rest = (None,) * 5
        return *(grad * grad_total.to(grad.dtype) for grad in ctx.saved_tensors), *nothing_for_the_rest


def terms_of_chunk(hidden: torch.Tensor, labels: torch.Tensor, target_last: torch.Tensor | None,
                   embedded: torch.Tensor | None, head: Head, markov_w2: nn.Module | None, top_k: int,
                   terms: LossTerms) -> SlotTerms:
    """The reference for one chunk of slots: embedded predecessors and markov_w2 where there is a bias."""
    base = head(hidden)
    logits = base if markov_w2 is None else base + markov_w2(embedded)
    target_logits = None
    if target_last is not None:
        with torch.no_grad():
            target_logits = head(target_last)
    slots = terms_of_logits(logits, target_logits, labels, terms)
    if markov_w2 is not None:
        slots = slots._replace(backbone_correct=base.argmax(-1) == labels)
    if top_k:
        unary, candidates = likeliest(logits, top_k)
        slots = slots._replace(unary=unary, candidates=candidates)
        if target_logits is not None:
            target_lse = target_logits.float().logsumexp(-1)
            probs = candidate_probs_of(target_logits, target_lse, candidates, softcap=None)
            slots = slots._replace(candidate_probs=probs)
    return slots


def chunks_of(rows: Sequence[torch.Tensor | None], chunk: int) -> Iterator[tuple[torch.Tensor | None, ...]]:
    """The first `chunk` entries of each, the next ones and so on; None stays None."""
    n_rows = next(len(each) for each in rows if each is not None)
    nothing = (None,) * -(-n_rows // chunk)
    return zip(*(nothing if each is None else each.split(chunk) for each in rows), strict=True)


def in_chunks(function: Callable, chunk: int, rows: Sequence[torch.Tensor | None], *rest: object) -> list:
    """function(*chunk of each of `rows`, *rest) -> its fields over all rows; made again in backward."""
    parts = [checkpoint(function, *part, *rest, use_reentrant=False, preserve_rng_state=False)
             for part in chunks_of(rows, chunk)]
    return [None if fields[0] is None else torch.cat(fields) for fields in zip(*parts, strict=True)]


def chunked_terms(inputs: "SlotInputs", head: Head, spec: "LossSpec",
                  selector: CandidateSelector | None = None, ramp: torch.Tensor | float = 1.0) -> SlotTerms:
    """Terms of logits without a bias, in spec.form as in chunked_ce; M is a multiple of spec.chunk.

    selector: its candidates are returned too; selector_terms() makes its loss, of which `ramp` counts.
    """
    if spec.form == "fused":
        arguments = (inputs, head, spec, selector, ramp)
        if torch.is_grad_enabled() and inputs.hidden.requires_grad:
            return SlotTerms(*FusedTerms.apply(inputs.hidden, *arguments))
        with torch.no_grad():
            return fused_terms(*arguments, grad=None)
    top_k = 0 if selector is None else selector.top_k
    rows = (inputs.hidden, inputs.labels, inputs.target_last, None)
    return SlotTerms(*in_chunks(terms_of_chunk, spec.chunk, rows, head, None, top_k, spec.terms))


def candidate_terms(predecessor: torch.Tensor, projected: torch.Tensor, successor: torch.Tensor,
                    unary: torch.Tensor, candidates: torch.Tensor, labels: torch.Tensor,
                    candidate_probs: torch.Tensor | None, terms: LossTerms
                    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A selector's loss, whether its pick is the label, whether the label is a candidate: (M,) each.

    predecessor, projected, successor: CandidateSelector.factors(). candidate_probs (M, k_top): the target's,
    for tv. Strictly the top k: a slot whose label is no candidate has no cross-entropy.
    """
    scores = edge_scores(predecessor, projected, successor, unary)
    is_label = candidates == labels[:, None]
    covered = is_label.any(-1)
    ce = scores.logsumexp(-1) - torch.where(is_label, scores, 0.0).sum(-1)
    loss = terms.ce * torch.where(covered, ce, 0.0)
    if terms.tv:  # candidates that are left out have probability 0 in the selector
        kept = torch.minimum(scores.softmax(-1), candidate_probs).sum(-1)
        loss = loss + terms.tv * (1 - kept)
    picked = candidates.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
    return loss, picked == labels, covered


def selector_terms(selector: CandidateSelector, inputs: "SlotInputs", slots: SlotTerms, spec: "LossSpec"
                   ) -> list[torch.Tensor]:
    """candidate_terms of all M slots, chunk by chunk: rows have any number of chunks, but these one shape."""
    hidden = inputs.hidden
    unary = slots.unary
    if spec.selector_detach:
        hidden = hidden.detach()
        unary = unary.detach()
    factors = selector.factors(hidden, inputs.predecessors, slots.candidates)
    rows = (*factors, unary, slots.candidates, inputs.labels, slots.candidate_probs)
    parts = [spec.candidate_terms(*part, spec.selector_terms) for part in chunks_of(rows, spec.chunk)]
    return [torch.cat(fields) for fields in zip(*parts, strict=True)]


# ---------------------------------------------------------------------------------------- one row

class LossSpec(NamedTuple):
    """How a row's loss is made: train_dflash.loss_spec() fills it from settings and drafter config."""
    kind: str            # "decay" | "dpace"
    gamma: float
    form: str            # "checkpoint" | "fused"
    chunk: int           # slots whose logits are in memory at once
    cross_entropy: CrossEntropy = CrossEntropy()  # of "fused"
    terms_and_grad: Callable = terms_and_grad     # may be compiled, as the functions below
    biased_terms_and_grad: Callable = biased_terms_and_grad
    likeliest: Callable = likeliest               # of dflash2, as the next one
    candidate_terms: Callable = candidate_terms
    terms: LossTerms = LossTerms()
    selector_terms: LossTerms = LossTerms()  # dflash2: ce and tv
    selector_detach: bool = False            # the selector's gradient ends at the backbone
    confidence: float = 0.0                  # dspark: coefficient of the confidence head's cross-entropy

    def needs_last(self, head: str) -> bool:
        """Does the loss read the target's last hidden state, for its distribution?"""
        selector = head == "dflash2" and self.selector_terms.soft
        return self.terms.soft or selector or self.confidence > 0


class RowResult(NamedTuple):
    """Sums and slots of one row's blocks. `correct` and `matches` are what the head's own decoding accepts:
    along an unbroken run the true tokens are the decoded ones, so no walk is needed."""
    loss: torch.Tensor     # () sum of w*loss, with gradient; see train_dflash.loss_denominator
    weight: torch.Tensor   # () sum of w
    ce: torch.Tensor       # (N, K) detached, 0 where a slot doesn't count
    matches: torch.Tensor  # (N,) leading drafts that equal the label
    correct: torch.Tensor  # (N, K) bool
    backbone_correct: torch.Tensor | None = None  # (N, K) of the logits' argmax, without the head's part
    covered: torch.Tensor | None = None           # (N, K) dflash2: the label is a candidate
    tv: torch.Tensor | None = None                # () sum of w*tv
    kl: torch.Tensor | None = None                # () sum of w*kl
    expected_len: torch.Tensor | None = None      # (N,) tokens of a pass with sampled drafts
    confidence_error: torch.Tensor | None = None  # (N, K) |sigmoid(confidence) - alpha|


def layer_masks(c: DrafterConfig, make_mask: Callable, start: torch.Tensor, anchor: torch.Tensor,
                seq_len: int) -> dict[str, object]:
    """One mask per layer type of config c."""
    bidirectional = c.in_block == "bidirectional"
    masks = {}
    for layer_type in dict.fromkeys(c.layer_types):
        window = c.window(layer_type)
        masks[layer_type] = make_mask(start, anchor, seq_len, c.block_size, window, bidirectional)
    return masks


class Blocks:
    """Where the M counting slots of a row stand in its N blocks, and their weights."""

    def __init__(self, slots: torch.Tensor, counted: torch.Tensor, config: DrafterConfig, spec: LossSpec):
        """slots (M,), counted (N,): of one group of a Batch."""
        self.spec = spec
        self.first_slot = config.first_slot
        self.n_slots = counted.numel() * config.block_size
        self.slots = slots
        self.draft = torch.arange(config.block_size, device=slots.device) + config.shift  # j = 1.. of slot k
        self.counts = (self.draft >= 1) & (self.draft <= counted[:, None])                # (N, K)

    def grid(self, values: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """(M,) -> (N, K), 0 where a slot doesn't count. slots: of the values, where they are not all."""
        slots = self.slots if slots is None else slots
        flat = values.new_zeros(self.n_slots + 1).index_put((slots,), values)  # padding goes to the last one
        return torch.where(self.counts, flat[:-1].view(self.counts.shape), 0)

    def weights(self, ce: torch.Tensor) -> torch.Tensor:
        """ce (M,) -> (N, K)."""
        return slot_weights(self.grid(ce), self.counts, self.spec.kind, self.spec.gamma,
                            first_slot=self.first_slot)

    def weights_of_chunk(self, ce: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Of slots (m,) that make whole blocks -> (m,), 0 for padding."""
        weights = slot_weights(self.grid(ce, slots), self.counts, self.spec.kind, self.spec.gamma,
                               first_slot=self.first_slot)
        return F.pad(weights.flatten(), (0, 1))[slots]

    def leading(self, correct: torch.Tensor) -> torch.Tensor:
        """(N, K) bool -> (N,) how many drafts are right before the first wrong one."""
        return correct[:, self.first_slot:].cumprod(1).sum(1)


class SlotInputs(NamedTuple):
    """What the loss of the M counting slots is made from."""
    hidden: torch.Tensor              # (M, D) the drafter's
    labels: torch.Tensor              # (M,)
    predecessors: torch.Tensor        # (M,) the token before each label
    target_last: torch.Tensor | None  # (M, D) the target's last hidden state, which makes the label

    def rows(self, which: slice) -> "SlotInputs":
        return SlotInputs(*(None if field is None else field[which] for field in self))


def row_loss(drafter: Drafter, embed: nn.Module, head: Head, batch: Batch, group: int, make_mask: Callable,
             spec: LossSpec, ramp: torch.Tensor | float = 1.0) -> RowResult:
    """Forward and loss of a row's anchors in one group. embed, head: the target's, frozen.

    ramp: dflash2's share of the selector's loss, a 0-dim tensor where it changes.
    """
    config = drafter.config
    seq_len = batch.ids.numel()
    anchors = batch.anchors[group]
    blocks = Blocks(batch.slots[group], batch.counted[group], config, spec)
    target_hidden = batch.target_hidden
    last = None
    if spec.needs_last(config.head):
        n_features = len(config.target_layer_ids) * config.hidden_size
        last = target_hidden[0, :, n_features:]  # (S, D)
        target_hidden = target_hidden[..., :n_features]

    slot = torch.arange(config.block_size, device=anchors.device)
    masks = layer_masks(config, make_mask, batch.starts[group], anchors, seq_len)
    inputs = torch.where(slot == 0, batch.ids[anchors][:, None], config.mask_token_id)
    # asking for a gradient nobody reads gives the first layer the graph of the others
    embeds = embed(inputs.view(1, -1)).requires_grad_(torch.is_grad_enabled())
    block_positions = (batch.positions[anchors][:, None] + slot).flatten()
    hidden = drafter(target_hidden, embeds, batch.positions, block_positions, masks)[0]  # (N*K, D)

    real = blocks.slots.clamp(max=blocks.n_slots - 1)  # padding reads the last slot, and is left out later
    label_at = (anchors[:, None] + blocks.draft).flatten()[real]  # row index of each slot's label
    before = (label_at - 1).clamp(min=0, max=seq_len - 1)
    inputs_of_loss = SlotInputs(
        hidden.index_select(0, real), batch.ids[label_at.clamp(max=seq_len - 1)], batch.ids[before],
        None if last is None else last[before])
    loss_of_head = {"dflash": plain_loss, "dflash2": selector_loss, "dspark": markov_loss}[config.head]
    return loss_of_head(drafter, head, inputs_of_loss, blocks, spec, ramp)


def plain_loss(drafter: Drafter, head: Head, inputs: SlotInputs, blocks: Blocks, spec: LossSpec,
               _: object) -> RowResult:
    """DFlash: every slot by itself."""
    if inputs.target_last is None:
        ce, correct = chunked_ce(inputs.hidden, head, inputs.labels, spec.chunk, spec.form,
                                 spec.cross_entropy)
        slots = SlotTerms(spec.terms.ce * ce, ce, correct)
    else:
        slots = chunked_terms(inputs, head, spec)
    weights = blocks.weights(slots.ce)
    loss = (weights * blocks.grid(slots.loss)).sum()
    return row_result(loss, weights, slots, slots.correct, blocks)


def selector_loss(drafter: Drafter, head: Head, inputs: SlotInputs, blocks: Blocks, spec: LossSpec,
                  ramp: torch.Tensor | float) -> RowResult:
    """DFlash 2: the backbone's loss and `ramp` of the selector's, under the same weights."""
    selector = drafter.candidate_selector
    slots = chunked_terms(inputs, head, spec, selector, ramp)
    picked_loss, picked, covered = selector_terms(selector, inputs, slots, spec)
    weights = blocks.weights(slots.ce)
    loss = (weights * (blocks.grid(slots.loss) + ramp * blocks.grid(picked_loss))).sum()
    result = row_result(loss, weights, slots, picked, blocks)
    return result._replace(backbone_correct=blocks.grid(slots.correct), covered=blocks.grid(covered))


def markov_loss(drafter: Drafter, head: Head, inputs: SlotInputs, blocks: Blocks, spec: LossSpec,
                _: object) -> RowResult:
    """DSpark: biased logits, and how sure the confidence head is of each draft."""
    markov = drafter.markov_head
    embedded = markov.markov_w1(inputs.predecessors)  # (M, r)
    if spec.form == "fused" and head.softcap is None:
        w2 = markov.markov_w2.weight
        arguments = (inputs.hidden, embedded, w2, head, inputs.labels, inputs.target_last, blocks, spec)
        if torch.is_grad_enabled() and inputs.hidden.requires_grad:
            loss, *fields = FusedMarkov.apply(*arguments)
            slots = SlotTerms(*fields)
        else:
            with torch.no_grad():
                loss, slots = fused_markov_terms(*arguments, grads=None)
        weights = blocks.weights(slots.ce)
    else:
        rows = (inputs.hidden, inputs.labels, inputs.target_last, embedded)
        slots = SlotTerms(*in_chunks(terms_of_chunk, spec.chunk, rows, head, markov.markov_w2, 0, spec.terms))
        weights = blocks.weights(slots.ce)
        loss = (weights * blocks.grid(slots.loss)).sum()
    result = row_result(loss, weights, slots, slots.correct, blocks)
    result = result._replace(backbone_correct=blocks.grid(slots.backbone_correct))
    if spec.confidence:
        confidence = drafter.confidence_head(inputs.hidden, embedded).float()
        accepted = slots.alpha.detach()
        bce = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
        error = (torch.sigmoid(confidence.detach()) - accepted).abs()
        result = result._replace(loss=loss + spec.confidence * (weights * blocks.grid(bce)).sum(),
                                 confidence_error=blocks.grid(error))
    return result


def row_result(loss: torch.Tensor, weights: torch.Tensor, slots: SlotTerms, correct: torch.Tensor,
               blocks: Blocks) -> RowResult:
    """correct (M,): of what the head's own decoding picks."""
    correct = blocks.grid(correct)
    result = RowResult(loss, weights.sum(), blocks.grid(slots.ce).detach(), blocks.leading(correct), correct)
    if slots.alpha is None:
        return result
    alpha = blocks.grid(slots.alpha).detach()  # 0 where slots don't count: there the product ends
    return result._replace(
        tv=(weights * blocks.grid(slots.tv)).sum().detach(),
        kl=(weights * blocks.grid(slots.kl)).sum().detach(),
        expected_len=1 + alpha[:, blocks.first_slot:].cumprod(1).sum(1))


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

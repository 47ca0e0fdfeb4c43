"""A target compiled around its kernels: what lies between its matrix products becomes few kernels.

    CompiledParts    torch.compile of a decoder's norms, MLPs, attention and gated delta nets, one thread's
    GatedDeltaNet    before and after the delta rule; flash-linear-attention runs in between, uncompiled

transformers' modules stay what they are: an instance's `forward` is replaced. Whole layers can't be compiled:
under dynamo transformers takes its own delta rule in plain PyTorch, thousands of small products. Each kind of
part proves itself at each shape's first call: both ways, from the same input. A kind that fails, or differs,
runs as before and says so.

Shapes: B conversations, T tokens each, D hidden size.
"""
import types
from collections.abc import Callable
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

import flex_utils
from dflash_trainer.errors import first_line
from dflash_trainer.fp8 import FrozenLinear

PART_TOLERANCE = 0.05   # relative difference of a part's output that rounding in another order explains
TOKEN_TOLERANCE = 0.25  # of the worst token's, which may be a small difference of large numbers
SMALL_TOKEN = 0.01      # of the mean token's norm: a token with less counts as that large


# --------------------------------------------------------------------------------- gated delta nets

def delta_rule_kernel() -> Callable | None:
    """flash-linear-attention's chunked gated delta rule, or None where the package is missing."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    return chunk_gated_delta_rule


def before_delta_rule(net: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Projections, the short convolution as one product a tap, gates. hidden (B, T, D) -> query and key
    (B, T, Hk, dk), value (B, T, Hv, dv), decay and beta (B, T, Hv), output gate (B, T, Hv, dv).

    Same formulas as transformers' Qwen3_5GatedDeltaNet.forward.
    """
    batch, length, _ = hidden.shape
    mixed = net.in_proj_qkv(hidden)                                   # (B, T, C)
    gate = net.in_proj_z(hidden).reshape(batch, length, -1, net.head_v_dim)
    taps = net.conv1d.weight.squeeze(1).float()                       # (C, taps)
    n_taps = taps.shape[1]
    padded = F.pad(mixed, (0, 0, n_taps - 1, 0)).float()
    convolved = sum(padded[:, i:i + length] * taps[:, i] for i in range(n_taps))
    if net.conv1d.bias is not None:
        convolved = convolved + net.conv1d.bias.float()
    mixed = F.silu(convolved).to(hidden.dtype)
    query, key, value = torch.split(mixed, [net.key_dim, net.key_dim, net.value_dim], -1)
    query = query.reshape(batch, length, -1, net.head_k_dim)
    key = key.reshape(batch, length, -1, net.head_k_dim)
    value = value.reshape(batch, length, -1, net.head_v_dim)
    beta = net.in_proj_b(hidden).sigmoid()
    decay = -net.A_log.float().exp() * F.softplus(net.in_proj_a(hidden).float() + net.dt_bias)
    return query.contiguous(), key.contiguous(), value.contiguous(), decay, beta, gate.contiguous()


def after_delta_rule(net: nn.Module, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Gated norm and output projection: out, gate (B, T, Hv, dv) -> (B, T, D)."""
    batch, length = out.shape[:2]
    out = net.norm(out.reshape(-1, net.head_v_dim), gate.reshape(-1, net.head_v_dim))
    return net.out_proj(out.reshape(batch, length, -1))


class GatedDeltaNet:
    """`forward` of a gated delta net: compiled, kernel, compiled. With a cache, padding or packed sequences
    it is the net's own."""
    NEEDS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "A_log", "dt_bias", "norm",
             "out_proj", "head_k_dim", "head_v_dim", "key_dim", "value_dim")
    OTHER_WORK = ("cache", "cache_params", "past_key_values", "attention_mask", "cu_seq_lens_q", "seq_idx")

    def __init__(self, net: nn.Module, kernel: Callable, compiled: Callable):
        self.net, self.plain, self.kernel = net, net.forward, kernel
        self.before, self.after = compiled(before_delta_rule), compiled(after_delta_rule)

    def __call__(self, hidden_states, *args, **kwargs):
        other_work = [*args, *(kwargs.get(name) for name in self.OTHER_WORK)]
        if any(x is not None for x in other_work):
            return self.plain(hidden_states, *args, **kwargs)
        query, key, value, decay, beta, gate = self.before(self.net, hidden_states)
        # fewer heads of query and key than of value: the kernel takes them as they are
        out, _ = self.kernel(query, key, value, g=decay, beta=beta, initial_state=None,
                             output_final_state=False, use_qk_l2norm_in_kernel=True)
        return self.after(self.net, out, gate)


# ---------------------------------------------------------------------------------- parts of a decoder

def kind_of(module: nn.Module) -> str | None:
    """How a module is compiled, or None: its parts are looked at."""
    name = type(module).__name__
    if name.endswith("GatedDeltaNet"):
        return "gated delta net"
    if name.endswith("Attention"):
        return "attention"
    if name.endswith("MLP") and has_only_linear_weights(module):  # routers and experts depend on the data
        return "MLP"
    if "Norm" in name and not list(module.children()):
        return "norm"
    return None


def has_only_linear_weights(module: nn.Module) -> bool:
    owners = [m for m in module.modules() if list(m.parameters(recurse=False))]
    return all(isinstance(m, (nn.Linear, FrozenLinear)) for m in owners)


class CompiledParts:
    """The parts of a decoder's layers that are compiled, for the one thread that runs it.

    owner: makes the code objects this thread's own, see flex_utils.compiled. dynamic: one graph for all
    shapes. kernel: of gated delta nets.
    """

    def __init__(self, decoder: nn.Module, owner: str, log: Callable = print, backend: str = "inductor",
                 dynamic: bool = True, kernel: Callable | None = None):
        self.log, self.owner, self.backend, self.dynamic = log, owner, backend, dynamic
        self.kernel = kernel or delta_rule_kernel()
        self.parts = {}    # kind -> [(module, its own forward, the compiled one)]
        self.checked = set()
        self.left = set()  # class names that stay as they are
        for layer in decoder.layers:
            self._find(layer)
        self.install()

    def _compile(self, function: Callable) -> Callable:
        plain = getattr(function, "__func__", function)
        own = flex_utils.clone_code(plain, self.owner)
        if plain is not function:
            own = types.MethodType(own, function.__self__)
        return torch.compile(own, backend=self.backend, dynamic=self.dynamic)

    def _find(self, module: nn.Module) -> None:
        for child in module.children():
            kind = kind_of(child)
            if kind is None:
                if not list(child.children()) and list(child.parameters(recurse=False)):
                    self.left.add(type(child).__name__)
                self._find(child)
            elif kind == "gated delta net":
                knows_it = all(hasattr(child, name) for name in GatedDeltaNet.NEEDS)
                if knows_it and self.kernel is not None and not child.training:
                    self._add(kind, child, GatedDeltaNet(child, self.kernel, self._compile))
                else:
                    self.left.add(type(child).__name__)
                    self._find(child)
            else:
                self._add(kind, child, self._compile(child.forward))

    def _add(self, kind: str, module: nn.Module, forward: Callable) -> None:
        self.parts.setdefault(kind, []).append((module, module.forward, forward))

    def install(self) -> None:
        for entries in self.parts.values():
            for module, _, compiled in entries:
                module.forward = compiled

    def remove(self, *kinds: str) -> None:
        """These kinds, or all, run as transformers wrote them again."""
        for kind in kinds or tuple(self.parts):
            for module, _, _ in self.parts.pop(kind):
                del module.forward

    def describe(self) -> str:
        counts = ", ".join(f"{len(entries)} of kind {kind}" for kind, entries in self.parts.items())
        left = f"; as they are: {', '.join(sorted(self.left))}" if self.left else ""
        return f"compiled parts: {counts or 'none'}{left}"

    def check(self, shape: tuple, forward: Callable) -> None:
        """forward() with every part run both ways from the same input; kinds that fail or differ go."""
        first = not self.checked
        self.checked.add(shape)
        while self.parts:
            differences, failed = {}, None
            with self._both_ways(differences):
                try:
                    forward()
                except _PartFailed as e:
                    failed = e
            if failed:
                self._drop(failed.kind, shape, first_line(failed.__cause__))
                continue
            wrong = {kind: worst for kind, each in differences.items() if (worst := self._worst(each))}
            for kind, reason in wrong.items():
                self._drop(kind, shape, reason)
            break
        if first:
            self.log(f"target ({self.owner}): {self.describe()}")

    def _drop(self, kind: str, shape: tuple, reason: str) -> None:
        self.remove(kind)
        self.log(f"target ({self.owner}): parts of kind {kind} are not compiled, from {tuple(shape)} tokens "
                 f"on: {reason}")

    @staticmethod
    def _worst(each: list[torch.Tensor]) -> str | None:
        """[(whole, token)] of a kind -> what is wrong with it."""
        whole, token = torch.stack(each).max(0).values.tolist()
        if whole <= PART_TOLERANCE and token <= TOKEN_TOLERANCE:  # a NaN is no such number
            return None
        return f"the output differs from the uncompiled by {whole:.2g}, that of a token by {token:.2g}"

    @contextmanager
    def _both_ways(self, differences: dict):
        def both(kind, plain, compiled):
            def forward(*args, **kwargs):
                wanted = plain(*args, **kwargs)
                try:
                    found = compiled(*args, **kwargs)
                except Exception as e:  # whatever the compiler makes of it
                    raise _PartFailed(kind) from e
                differences.setdefault(kind, []).append(difference(first_of(wanted), first_of(found)))
                return wanted
            return forward
        entries = [(kind, *entry) for kind, of_kind in self.parts.items() for entry in of_kind]
        for kind, module, plain, compiled in entries:
            module.forward = both(kind, plain, compiled)
        try:
            yield
        finally:
            for _, module, _, compiled in entries:
                module.forward = compiled


class _PartFailed(Exception):
    def __init__(self, kind: str):
        super().__init__(kind)
        self.kind = kind


def first_of(output):
    return output[0] if isinstance(output, tuple) else output


def difference(wanted: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """-> (2,): relative difference of the whole, and of the worst vector along the last axis."""
    wanted, found = wanted.float().flatten(0, -2), found.float().flatten(0, -2)
    size, off = wanted.norm(dim=-1), (wanted - found).norm(dim=-1)
    least = SMALL_TOKEN * size.mean() + 1e-30
    whole = off.norm() / size.norm().clamp(min=1e-30)
    return torch.stack([whole, (off / size.clamp(min=least)).max()])

"""Matrix products in fp8 with plain torch: torch._scaled_mm, e4m3 values and one scale per row.

    find_form          which form of torch._scaled_mm a device multiplies rightly; a UserError where none is
    quantize_rows      (M, K) -> e4m3 values and scales (M, 1)
    multiply           the product of two such matrices
    FrozenLinear       a linear layer whose weight lives in fp8 alone: a target's
    quantize_layers    puts them where a module has linear layers
    train_in_fp8       a drafter's linear layers: weights stay bf16, their products are fp8
    Fp8Head            the target's frozen head beside the drafter: logits, and their gradient in fp8
    CrossEntropy       the loss of a chunk of logits with its gradient written as fp8
    BlockScales        checkpoints with a scale per block of a weight (`weight_scale_inv`)

Shapes: a matrix is (M, K), a weight (N, K). K and N are multiples of 16 everywhere, M is free.
"""
import re
import types
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch
from torch import nn

import model_drafter as md
from dflash_trainer.errors import UserError, first_line, require

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
MULTIPLE = 16                    # of both edges of a weight, says torch._scaled_mm
SMALLEST_LAYER = 128             # outputs; routers and gates have fewer: nothing to gain, much to spoil
SCALE_NAME = "_scale_inv"        # what published checkpoints add to a weight's name
FORMS = ("row-wise", "per tensor")

# -------------------------------------------------------------------------------------- the product

def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., K) -> e4m3 values of its shape, fp32 scales (..., 1): x is about values * scales. A row with a
    value that isn't finite becomes NaN."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = largest.clamp(min=1e-12) / LARGEST
    return (x.float() / scale).to(E4M3), scale


def quantize_weight(weight: torch.Tensor, step: int = 8192,
                    minus: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_rows of a large matrix (N, K) that may be a transposed view: without a copy of all of it.
    minus (N,): what is taken off each row before."""
    values = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    scales = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
    for i in range(0, len(weight), step):
        rows = slice(i, i + step)
        part = weight[rows] if minus is None else weight[rows].float() - minus[rows, None]
        values[rows], scales[rows] = quantize_rows(part)
    return values, scales


def multiply(a: torch.Tensor, scale_a: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, form: str,
             dtype: torch.dtype) -> torch.Tensor:
    """a (M, K), b (N, K) in e4m3 with scales (M, 1), (N, 1) -> (M, N): a times b transposed.

    "row-wise": the product applies the scales. "per tensor": it knows one scale a matrix, so the rows' scales
    are applied to the result, one rounding more.
    """
    if form == "row-wise":
        return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=dtype,
                                use_fast_accum=True)
    one = torch.ones((), device=a.device)
    product = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=True)
    return md.rounded(product.float() * (scale_a * scale_b.t()), dtype)


def error_of_form(form: str, device: torch.device) -> float:
    """Relative error of a small product against fp64 of the same fp8 matrices. Raises what torch raises."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(40, 128, generator=generator) * torch.logspace(-3, 3, 40)[:, None]
    b = torch.randn(96, 128, generator=generator) * torch.logspace(2, -2, 96)[:, None]
    (a, scale_a), (b, scale_b) = quantize_rows(a), quantize_rows(b)
    wanted = (a.double() * scale_a.double()) @ (b.double() * scale_b.double()).t()
    on_device = [tensor.to(device) for tensor in (a, scale_a, b, scale_b)]
    found = multiply(*on_device, form, torch.bfloat16).double().cpu()
    size = scale_a.double() * scale_b.double().t()  # rows and columns count alike, however small
    return float(((found - wanted) / size).norm() / (wanted / size).norm())


def find_form(device: torch.device, setting: str) -> str:
    """The first form that is right on `device`. UserError with `setting` (NAME = value) where none is."""
    reasons = []
    for form in FORMS:
        try:
            error = error_of_form(form, device)
        except (RuntimeError, ValueError, NotImplementedError) as e:
            reasons.append(f"{form}: {first_line(e)}")
            continue
        if error < 0.02:
            return form
        reasons.append(f"{form}: a product is off by {error:.2g}")
    raise UserError(f"{setting}: {device} can't multiply fp8 matrices (GPUs from compute capability 8.9 on "
                    f"can): {'; '.join(reasons)}")


def require_shape(name: str, weight: torch.Tensor, setting: str) -> None:
    """UserError where torch._scaled_mm can't take a weight of this shape."""
    fits = all(size % MULTIPLE == 0 for size in weight.shape)
    shape = " x ".join(map(str, weight.shape))
    require(fits, f"{setting}: {name} is {shape}, fp8 products take multiples of {MULTIPLE}")


# --------------------------------------------------------------------------------- a target's layers

class FrozenLinear(nn.Module):
    """y = x W^T + bias with W in fp8, a scale per output; x is quantised per token when it comes."""

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, form: str):
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.weight = nn.Parameter(values, requires_grad=False)  # (N, K) e4m3
        self.scale = nn.Parameter(scale, requires_grad=False)    # (N, 1)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, scale = quantize_rows(x.reshape(-1, self.in_features))
        y = multiply(values, scale, self.weight, self.scale, self.form, x.dtype)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.form}"


def quantize_layers(module: nn.Module, form: str, setting: str, prefix: str = "") -> int:
    """Replace the linear layers below `module` by FrozenLinear, weight by weight. -> how many.

    A layer of fewer than SMALLEST_LAYER outputs stays as it is. UserError where a shape doesn't fit.
    """
    count = 0
    for parent_name, parent in list(module.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.out_features < SMALLEST_LAYER:
                continue
            full_name = ".".join(part for part in (prefix, parent_name, name) if part)
            require_shape(full_name, child.weight, setting)
            bias = None if child.bias is None else child.bias.data
            setattr(parent, name, FrozenLinear(*quantize_weight(child.weight.data), bias, form))
            count += 1
    return count


# -------------------------------------------------------------------------------- a drafter's layers

class _Product(torch.autograd.Function):
    """x (M, K), weight (N, K) -> x W^T (M, N); every product in fp8, or all but the weight's gradient."""

    @staticmethod
    def forward(ctx, x, weight, form, fp8_weight_grad):
        ctx.save_for_backward(x, weight)
        ctx.form = form
        ctx.fp8_weight_grad = fp8_weight_grad
        return multiply(*quantize_rows(x), *quantize_rows(weight), form, x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            by_input = quantize_rows(weight.t().contiguous())
            grad_x = multiply(*quantize_rows(grad), *by_input, ctx.form, x.dtype)
        if ctx.needs_input_grad[1]:
            if ctx.fp8_weight_grad and len(x) % MULTIPLE == 0:
                by_output = quantize_rows(grad.t().contiguous())
                by_input = quantize_rows(x.t().contiguous())
                grad_weight = multiply(*by_output, *by_input, ctx.form, weight.dtype)
            else:
                grad_weight = grad.t() @ x
        return grad_x, grad_weight, None, None


def train_in_fp8(module: nn.Module, form: str, setting: str, fp8_weight_grad: bool = False) -> None:
    """The linear layers below `module` multiply in fp8 from now on; their weights stay what they are."""
    def forward(self, x):
        y = _Product.apply(x.reshape(-1, x.shape[-1]), self.weight, form, fp8_weight_grad)
        return y.view(*x.shape[:-1], -1)

    for name, child in module.named_modules():
        if type(child) is nn.Linear:
            require_shape(name, child.weight, setting)
            require(child.bias is None, f"{setting}: {name} has a bias")
            child.forward = types.MethodType(forward, child)


# ---------------------------------------------------------------------------------------- the head

class Fp8Head(nn.Module):
    """md.Head with its weight in fp8 alone: once by token for the logits, once by hidden entry for the
    hidden states' gradient (fp8 products read both matrices along the sum). It offers what md.Head does."""

    def __init__(self, head: "md.Head", form: str, setting: str,
                 compiled: Callable = lambda function: function):
        super().__init__()
        weight = head.linear.weight.data
        require_shape("the head", weight, setting)
        self.softcap = head.softcap
        self.bias = None if head.linear.bias is None else head.linear.bias * head.scale
        self.form = form
        self.by_token, self.token_scale = quantize_weight(weight)            # (V, D), (V, 1)
        # A softmax's gradient adds up to 0 over the tokens, so what all rows of the head have in common drops
        # out of its product, but not out of fp8's errors: thousands of small entries are written as 0.
        common = None if head.softcap else weight.mean(0, dtype=torch.float32)
        self.by_entry, self.entry_scale = quantize_weight(weight.t(), 512, common)  # (D, V), (D, 1)
        if head.scale != 1:  # the factor on the logits, in both products
            self.token_scale *= head.scale
            self.entry_scale *= head.scale
        self.quantize_rows = compiled(quantize_rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (M, D) -> (M, V), before the soft cap."""
        values, scale = self.quantize_rows(hidden)
        logits = multiply(values, scale, self.by_token, self.token_scale, self.form, hidden.dtype)
        return logits if self.bias is None else logits + self.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = self.logits(hidden.reshape(-1, hidden.shape[-1]))
        return md.cap(flat, self.softcap).view(*hidden.shape[:-1], -1)

    def grad_hidden(self, grad: torch.Tensor | tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype,
                    tokens: torch.Tensor | None = None,
                    grad_of_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Gradient of the logits (M, V), whose rows add up to 0 -> of the hidden states (M, D), in `dtype`.
        grad: e4m3 values and their scales (M, 1), as CrossEntropy below makes them, or another dtype.
        grad_of_tokens: see md.Head; a product of its own, for the others' scale may be too small for it."""
        values, scale = grad if isinstance(grad, tuple) else self.quantize_rows(grad)
        grad_hidden = multiply(values, scale, self.by_entry, self.entry_scale, self.form, dtype)
        if tokens is None:
            return grad_hidden
        weight = (self.by_token[tokens].float() * self.token_scale[tokens]).to(dtype)  # (M, k, D)
        return grad_hidden + (grad_of_tokens[:, None].to(dtype) @ weight)[:, 0]


SMALLEST_SCALED = 1e-6  # a row's gradient below it is lost in fp32's rounding of the loss


def scaled_probs(logits: torch.Tensor, bias: torch.Tensor | None, lse: torch.Tensor, scale: torch.Tensor,
                 softcap: float | None) -> torch.Tensor:
    """md.probs_of over `scale` (M, 1), in e4m3."""
    return (md.probs_of(logits, bias, lse, softcap) / scale).clamp(max=LARGEST).to(E4M3)


class CrossEntropy(md.CrossEntropy):
    """Its gradient is e4m3 values and scales (M, 1). The largest entry of a row is its label's, 1 - p[label],
    for all others add up to it: so no pass over the logits looks for it."""

    def __init__(self, compiled: Callable = lambda function: function):
        super().__init__(compiled)
        self.scaled_probs = compiled(scaled_probs)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, softcap: float | None = None,
                 bias: torch.Tensor | None = None) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        return self.ce_and_grad(logits, labels, softcap, bias)

    def gradient(self, logits: torch.Tensor, bias: torch.Tensor | None, lse: torch.Tensor,
                 softcap: float | None, label_column: torch.Tensor, grad_of_label: torch.Tensor,
                 ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = grad_of_label.abs().clamp(min=SMALLEST_SCALED) / LARGEST
        values = self.scaled_probs(logits, bias, lse, scale, softcap)
        of_label = (grad_of_label / scale).clamp(-LARGEST, LARGEST).to(E4M3)
        values.view(torch.uint8).scatter_(1, label_column, of_label.view(torch.uint8))
        return values, scale


# ------------------------------------------------------------------------------ published checkpoints

class BlockScales:
    """Scales of an FP8 checkpoint as published for Qwen: beside each weight (N, K) in e4m3 lies
    `..weight_scale_inv` (N/128, K/128) that its blocks are multiplied by.

    transformers gives the fp8 values as they are in another dtype, which is exact; scale() does the rest.
    """
    def __init__(self, files: dict[str, Path], block: list[int] | None):
        """files: name of every tensor -> the safetensors file that holds it. block: None for one scale a
        weight."""
        self.block = block
        self.where = {}  # name of the weight from "layers.3." on -> (file, name of its scale)
        for name, path in files.items():
            if name.endswith(SCALE_NAME):
                self.where[self.short(name.removesuffix(SCALE_NAME))] = (path, name)

    @staticmethod
    def short(name: str) -> str:
        """Wrappers of a language model put more before it: `model.language_model.layers.3...`."""
        found = re.search(r"(?:^|\.)(layers\.\d+\..*)$", name)
        return found[1] if found else name

    def scale(self, module: nn.Module, prefix: str) -> int:
        """Multiply the weights below `module`, named with `prefix`, by their scales. -> how many had one."""
        count = 0
        for name, weight in module.named_parameters(prefix):
            if (entry := self.where.pop(self.short(name), None)) is None:
                continue
            path, scale_name = entry
            with safetensors.safe_open(path, "pt") as file:
                scale = file.get_tensor(scale_name)
            weight.data.copy_(scale_blocks(weight.data, scale.to(weight.device), self.block))
            count += 1
        return count

    def require_all_used(self, what: str) -> None:
        left = sorted(name for _, name in self.where.values())
        require(not left, f"{what}: {len(left)} scales belong to no weight of the model (experts that "
                          f"transformers joins into one weight can't be scaled: take the bf16 checkpoint): "
                          f"{', '.join(left[:5])}")


def scale_blocks(values: torch.Tensor, scale: torch.Tensor, block: list[int] | None) -> torch.Tensor:
    """values (N, K), scale (ceil(N/bn), ceil(K/bk)) or one number -> fp32 products. The last blocks may be
    smaller."""
    if block is None or scale.numel() == 1:
        return values.float() * scale.float()
    n_rows, n_columns = values.shape
    wide = scale.float().repeat_interleave(block[0], 0)[:n_rows]
    wide = wide.repeat_interleave(block[1], 1)[:, :n_columns]
    return values.float() * wide

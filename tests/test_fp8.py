"""fp8 products against fp64 of plain numbers, the loss's fp8 gradient, published block scales, refusals."""
import json
import math

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import model_drafter as md
from dflash_trainer import fp8
from dflash_trainer import target as targets
from dflash_trainer.errors import UserError
from test_families import SHAPE, qwen3_5

CPU = torch.device("cpu")
FORM = fp8.find_form(CPU, "X = fp8")  # torch 2.11 multiplies per tensor alone on a CPU


def e4m3_by_hand(x: float) -> float:
    """Nearest number with 3 bits of mantissa, exponents -6..8, and steps of 2^-9 below; ties to even."""
    if x == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(x))), -6)
    step = 2.0 ** (exponent - 3)
    return max(-448.0, min(448.0, round(x / step) * step))


def quantized_by_hand(matrix):
    """(values, scales) of a matrix as lists, in Python's own double precision."""
    values, scales = [], []
    for row in matrix.double().tolist():
        scale = max(abs(x) for x in row) / 448
        scales.append(scale)
        values.append([e4m3_by_hand(x / scale) for x in row])
    return torch.tensor(values, dtype=torch.float64), torch.tensor(scales, dtype=torch.float64)[:, None]


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), 0).item()


def relative(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def test_quantized_rows_are_e4m3_of_each_row_over_its_largest():
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 6)[:, None]
    values, scale = fp8.quantize_rows(x)
    wanted, wanted_scale = quantized_by_hand(x)
    assert torch.allclose(scale.double(), wanted_scale, rtol=1e-6)
    # an entry within an fp32 rounding of the middle between two numbers may go either way
    assert (values.double() == wanted).double().mean() > 0.98
    assert relative(values.double() * scale, x) < 0.04
    assert values.float().abs().max() == 448


def test_rows_of_zeros_stay_zeros_and_what_is_not_finite_shows():
    x = torch.zeros(3, 16)
    x[1, 2] = math.inf
    x[2, 5] = math.nan
    values, scale = fp8.quantize_rows(x)
    back = values.float() * scale
    assert (back[0] == 0).all() and not torch.isfinite(back[1:]).all(1).any()


def test_a_transposed_view_is_quantized_in_slices():
    weight = torch.randn(48, 80)
    values, scale = fp8.quantize_weight(weight.t(), 7)
    wanted, wanted_scale = fp8.quantize_rows(weight.t().contiguous())
    assert torch.equal(values.float(), wanted.float()) and torch.equal(scale, wanted_scale)


@pytest.mark.parametrize("form", fp8.FORMS[fp8.FORMS.index(FORM):])
def test_a_product_is_that_of_its_dequantized_matrices(form):
    a, b = torch.randn(37, 64), torch.randn(48, 64)
    (a8, scale_a), (b8, scale_b) = fp8.quantize_rows(a), fp8.quantize_rows(b)
    found = fp8.multiply(a8, scale_a, b8, scale_b, form, torch.float32)
    wanted = (a8.double() * scale_a) @ (b8.double() * scale_b).t()
    assert relative(found, wanted) < 1e-5
    assert relative(found, a.double() @ b.double().t()) < 0.06


def test_the_probe_takes_the_first_form_that_is_right(monkeypatch):
    assert FORM in fp8.FORMS
    real = fp8.multiply

    def wrong_rows(a, scale_a, b, scale_b, form, dtype):
        return real(a, scale_a.mean() if form == "row-wise" else scale_a, b, scale_b, "per tensor", dtype)
    monkeypatch.setattr(fp8, "multiply", wrong_rows)
    assert fp8.find_form(CPU, "X = fp8") == "per tensor"

    def raises(*_):
        raise RuntimeError("torch._scaled_mm is only supported on newer devices\nx")
    monkeypatch.setattr(fp8, "multiply", raises)
    with pytest.raises(UserError, match="^X = fp8: cpu can't multiply.*8.9.*row-wise: torch._scaled_mm is"):
        fp8.find_form(CPU, "X = fp8")


@pytest.mark.parametrize("bias", [False, True])
def test_a_frozen_linear_layer(bias):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=bias), torch.nn.Linear(128, 32, bias=bias))
    x = torch.randn(2, 5, 64)
    wanted = layers[0].double()(x.double()).detach()
    layers.float().requires_grad_(False)
    assert fp8.quantize_layers(layers, FORM, "X = fp8") == 1  # the other is small
    assert isinstance(layers[0], fp8.FrozenLinear) and type(layers[1]) is torch.nn.Linear
    found = layers[0](x)
    assert found.shape == wanted.shape and relative(found, wanted) < 0.06
    assert layers[0].weight.element_size() == 1
    assert not any(p.requires_grad for p in layers.parameters())


def test_a_shape_that_does_not_fit_is_named():
    layers = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"up_proj": torch.nn.Linear(40, 136)})})
    with pytest.raises(UserError, match="^X = fp8: layers.0.mlp.up_proj is 136 x 40, .* of 16$"):
        fp8.quantize_layers(layers, FORM, "X = fp8", "layers.0")


@pytest.mark.parametrize("fp8_weight_grad", [False, True])
@pytest.mark.parametrize("tokens", [48, 37])  # 37: no multiple of 16, the weight's gradient sums over tokens
def test_gradients_of_a_trained_layer(fp8_weight_grad, tokens):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 80, bias=False), torch.randn(1, tokens, 64)
    grad = torch.randn(1, tokens, 80)
    wanted_grad_x = grad.double() @ layer.weight.double()
    wanted_grad_weight = grad[0].double().t() @ x[0].double()
    wanted = x.double() @ layer.weight.double().t()
    fp8.train_in_fp8(torch.nn.Sequential(layer), FORM, "X = fp8", fp8_weight_grad)
    x.requires_grad_()
    found = layer(x)
    found.backward(grad)
    assert relative(found.detach(), wanted) < 0.06 and relative(x.grad, wanted_grad_x) < 0.06
    in_fp8 = fp8_weight_grad and tokens % 16 == 0
    error = relative(layer.weight.grad, wanted_grad_weight)
    assert 0.01 < error < 0.06 if in_fp8 else error < 1e-5


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_loss_with_an_fp8_head(softcap):
    """ce, argmax and the hidden gradient of chunks against fp64 autograd with the plain head."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 96, bias=False).requires_grad_(False)
    linear.weight.mul_(4)
    hidden, labels = torch.randn(48, 64), torch.randint(0, 96, (48,))
    weights = torch.rand(48)
    exact = hidden.double().requires_grad_()
    logits = md.cap(exact @ linear.weight.double().t(), softcap)
    wanted = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    (wanted * weights).sum().backward()
    head = fp8.Fp8Head(md.Head(linear, softcap), FORM, "X = fp8")
    hidden.requires_grad_()
    ce, correct = md.chunked_ce(hidden, head, labels, 16, "fused", fp8.CrossEntropy())
    (ce * weights).sum().backward()
    assert relative(ce.detach(), wanted.detach()) < 0.03
    assert (correct == (logits.argmax(-1) == labels)).double().mean() > 0.9
    assert cosine(hidden.grad, exact.grad) > 0.995
    assert relative(hidden.grad, exact.grad) < 0.1
    tokens = torch.randint(0, 96, (48, 3))
    grad = torch.randn(48, 3)
    wanted_grad = (grad[..., None].double() * linear.weight[tokens].double()).sum(1)
    none = torch.zeros(48, 96)
    assert relative(head.grad_hidden(none, torch.float32, tokens, grad), wanted_grad) < 0.06
    with torch.no_grad():  # evaluation
        again, _ = md.chunked_ce(hidden, head, labels, 16, "fused", fp8.CrossEntropy())
    assert torch.allclose(again, ce)


def test_a_factor_on_the_logits_counts_once():
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 96).requires_grad_(False)
    plain = md.Head(linear, scale=0.25)
    head = fp8.Fp8Head(plain, FORM, "X = fp8")
    hidden, grad = torch.randn(48, 64), softmax_grad(48, 96)
    none = torch.zeros_like(grad)
    tokens = torch.arange(96).expand(48, 96)
    wanted_grad = 0.25 * grad @ linear.weight
    assert relative(head(hidden), 0.25 * linear(hidden)) < 0.05
    assert relative(head.grad_hidden(grad, torch.float32), wanted_grad) < 0.08
    assert relative(head.grad_hidden(none, torch.float32, tokens, grad), wanted_grad) < 0.06
    assert relative(plain.grad_hidden(none, torch.float32, tokens, grad), wanted_grad) < 1e-5


def test_other_gradients_of_logits_take_the_largest_entry_of_their_row():
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 96, bias=False).requires_grad_(False)
    head = fp8.Fp8Head(md.Head(linear), FORM, "X = fp8")
    grad = softmax_grad(16, 96) * torch.logspace(-6, 2, 16)[:, None]
    wanted = grad.double() @ linear.weight.double()
    for given in (grad, fp8.quantize_rows(grad)):
        found = head.grad_hidden(given, torch.float32)
        errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert errors.max() < 0.08


def softmax_grad(n_rows, vocab_size):
    """d ce / d logits of random logits: rows that add up to 0, as every loss here makes them."""
    logits = torch.randn(n_rows, vocab_size)
    grad = logits.softmax(-1)
    grad[torch.arange(n_rows), torch.randint(0, vocab_size, (n_rows,))] -= 1
    return grad


def test_many_small_entries_of_a_gradient_count():
    """Confident slots of a large vocabulary whose rows have much in common: the sum of the slots' gradients,
    in which rounding averages out and what is written as 0 does not."""
    torch.manual_seed(0)
    vocab_size, n_slots = 8192, 256
    linear = torch.nn.Linear(64, vocab_size, bias=False).requires_grad_(False)
    linear.weight.copy_(torch.randn(64) + 0.2 * torch.randn(vocab_size, 64))
    logits = torch.randn(n_slots, vocab_size)
    labels = torch.randint(0, vocab_size, (n_slots,))
    sure_of_label = torch.linspace(9, 16, n_slots)  # p[label] from 0.4 to 0.999
    logits[torch.arange(n_slots), labels] = sure_of_label
    exact = logits.double().softmax(-1)
    exact[torch.arange(n_slots), labels] -= 1
    wanted = (exact @ linear.weight.double()).sum(0)
    head = fp8.Fp8Head(md.Head(linear), FORM, "X = fp8")
    _, grad = fp8.CrossEntropy()(logits, labels)
    found = head.grad_hidden(grad, torch.float32)
    assert relative(found.sum(0), wanted) < 0.05


def test_slots_that_are_sure_of_their_label_give_no_nan():
    """1 - p[label] from 1e-3 down to 0, where the loss rounds to 0 or to less than the gradient."""
    logits = torch.zeros(64, 128)
    logits[:, 5] = torch.linspace(10, 100, 64)
    ce, (values, scale) = fp8.CrossEntropy()(logits, torch.full((64,), 5))
    grad = values.float() * scale
    wanted = logits.double().softmax(-1)
    wanted[:, 5] -= 1
    assert torch.isfinite(ce).all() and torch.isfinite(grad).all()
    assert (grad - wanted).abs().max() < 1e-4

def test_a_head_whose_vocabulary_does_not_fit_is_refused():
    with pytest.raises(UserError, match="X = fp8: the head is 100 x 64"):
        fp8.Fp8Head(md.Head(torch.nn.Linear(64, 100)), FORM, "X = fp8")


# ------------------------------------------------------------------------------ published checkpoints

BLOCK = 16


def scaled_by_hand(values, scale):
    out = torch.empty(values.shape, dtype=torch.float64)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            out[i, j] = float(values[i, j]) * float(scale[i // BLOCK, j // BLOCK])
    return out


def publish(folder, model, method="fp8"):
    """The model's files as FP8 checkpoints are published: a scale for every block of a projection's weight.
    -> {name: the weight that the file means, fp64}."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    meant = {}
    for name, weight in list(weights.items()):
        if not name.endswith("proj.weight") or "visual" in name:
            continue
        rows, columns = weight.shape
        scale = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK), generator=generator) + 0.5
        weights[name] = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        weights[name + "_scale_inv"] = scale
        meant[name] = scaled_by_hand(weights[name].float(), scale)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "weight_block_size": [BLOCK, BLOCK],
                                     "fmt": "e4m3", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


WIDE = {**SHAPE, "hidden_size": 48, "intermediate_size": 144, "head_dim": 16}  # whole blocks
ODD = {**SHAPE, "hidden_size": 40, "intermediate_size": 72, "head_dim": 8}     # blocks that are cut


@pytest.mark.parametrize("shape", [WIDE, ODD])
def test_an_fp8_checkpoint_loads_without_another_package(tmp_path, shape, capsys):
    meant = publish(tmp_path, transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)))
    model = targets.load_model(str(tmp_path), CPU, torch.float32, 0)
    loaded = dict(model.named_parameters())
    assert len(meant) == 4 * 7
    for name, weight in meant.items():
        assert torch.allclose(loaded[name].double(), weight, rtol=1e-6), name
    assert "scale" in capsys.readouterr().out


def test_the_fp8_checkpoint_of_a_wrapper(tmp_path):
    torch.manual_seed(0)
    meant = publish(tmp_path, qwen3_5(text_only=False))
    model = targets.load_model(str(tmp_path), CPU, torch.float32, 0)
    loaded = dict(model.named_parameters())
    assert meant
    for name, weight in meant.items():
        assert torch.allclose(loaded[name.replace("language_model.", "")].double(), weight, rtol=1e-6), name


def test_an_fp8_checkpoint_as_an_fp8_target(tmp_path):
    meant = publish(tmp_path, transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**WIDE)))
    model = targets.load_model(str(tmp_path), CPU, torch.float32, 0, precision="fp8")
    up = model.get_decoder().layers[1].mlp.up_proj
    assert isinstance(up, fp8.FrozenLinear)
    assert relative(up.weight.double() * up.scale, meant["model.layers.1.mlp.up_proj.weight"]) < 0.04
    assert type(model.get_output_embeddings()) is torch.nn.Linear  # goes to the drafters


def test_a_scale_that_is_missing_or_left_over_is_named(tmp_path):
    publish(tmp_path, transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**WIDE)))
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight_scale_inv"
    scale = weights.pop(name)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="no scale.*layers.2.mlp.up_proj.weight"):
        targets.load_model(str(tmp_path), CPU, torch.float32, 0)
    weights.update({name: scale, "model.layers.2.mlp.extra.weight_scale_inv": scale.clone()})
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="layers.2.mlp.extra.weight_scale_inv"):
        targets.load_model(str(tmp_path), CPU, torch.float32, 0)


@pytest.mark.parametrize("method, needs", [("gptq", "gptqmodel"), ("awq", "gptqmodel"),
                                           ("modelopt", "NVFP4")])
def test_other_quantised_checkpoints_say_what_they_need(tmp_path, method, needs):
    publish(tmp_path, transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**WIDE)), method)
    with pytest.raises(UserError, match=rf"quantised: {method}.*{needs}"):
        targets.load_model(str(tmp_path), CPU, torch.float32, 0)


def test_an_fp8_target_on_random_weights(tmp_path):
    transformers.Qwen3Config(**WIDE, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    model = targets.load_model(f"random:{tmp_path}", CPU, torch.float32, 0, precision="fp8")
    kinds = {type(m).__name__ for m in model.get_decoder().layers.modules()}
    assert "FrozenLinear" in kinds
    assert model(input_ids=torch.arange(5, 20)[None]).logits.isfinite().all()

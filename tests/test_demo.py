"""What the demo on two CPU cores stands on."""
import pytest
import torch
import transformers

import common
import model_drafter as md


@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_the_loss_in_place_is_cross_entropy(spread):
    """And its gradient of a chunk, for flat logits and for steep ones, against fp64."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 501, generator=generator) * spread
    labels = torch.randint(0, 501, (24,), generator=generator)
    labels[:6] = logits[:6].argmax(-1)
    exact = logits.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    wanted.sum().backward()
    ce, grad = md.ce_and_grad_in_place(logits, labels)
    torch.testing.assert_close(ce.double(), wanted.detach(), rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(grad.double(), exact.grad, rtol=2e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------- INIT = "target"

def drafter_of(**changes):
    config = common.tiny_config(vocab_size=common.VOCAB, **changes)
    drafter = md.Drafter(config, None)
    drafter.init_weights(0)
    return drafter


def target_of(family, **changes):
    """A tiny decoder of a family with sizes that fit tiny_config()."""
    sizes = dict(vocab_size=common.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=6,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128)
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}Model")(config).requires_grad_(False)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.weight.copy_(torch.rand(module.weight.shape) + 0.5)
    return model


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_drafter_starts_as_the_targets_first_layers(family):
    """Layers 0..2 tensor by tensor, the deepest of two taps through fc, half the final norm."""
    drafter, target = drafter_of(), target_of(family)
    names = drafter.init_from_target(target.layers, target.norm)
    assert len(names) == 3 + 3 * 4
    theirs = target.state_dict()
    for name, weight in drafter.state_dict().items():
        if name.startswith("layers.") and name in theirs:
            assert torch.allclose(weight, theirs[name], atol=1e-5), name
    hidden = torch.randn(1, 5, 64)
    assert torch.equal(drafter.fc(hidden), hidden[..., 32:])
    assert torch.allclose(drafter.norm.weight * 2, theirs["norm.weight"], atol=1e-5)
    assert torch.allclose(drafter.hidden_norm.weight, theirs["layers.0.input_layernorm.weight"], atol=1e-5)


def test_norms_that_multiply_with_one_plus_weight():
    """Gemma's: the drafter's norm has to make of any x what half the target's makes."""
    drafter, target = drafter_of(), target_of("Gemma")
    drafter.init_from_target(target.layers, target.norm)
    x = torch.randn(3, 32)
    assert torch.allclose(drafter.norm(x) * 2, target.norm(x), atol=1e-4)


def test_parts_of_another_shape_stay_fresh():
    """An MLP of another width is left alone, whole; attention is copied."""
    drafter, target = drafter_of(), target_of("Llama", intermediate_size=40)
    before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    names = drafter.init_from_target(target.layers, target.norm)
    assert not [name for name in names if name.endswith("mlp")]
    for name, weight in drafter.state_dict().items():
        stays = ".mlp." in name or name.endswith(("q_norm.weight", "k_norm.weight"))
        assert torch.equal(weight, before[name]) == stays, name


def test_the_trainer_starts_from_the_target_and_resumes_from_its_own(tmp_path):
    """INIT=target: the first checkpoint is near the target's layer, and a resume doesn't start anew."""
    target = common.llama()
    given = dict(INIT="target", LR=1e-9, STEPS=4, SAVE_EVERY=2, KEEP=3)
    out = common.train_ok(tmp_path / "o", **given, STOP_AT=2)
    start = common.weights(out / "latest")
    theirs = target.model.state_dict()
    for name in ("layers.1.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight"):
        assert torch.allclose(start[name], theirs[name], atol=1e-6), name
    other = common.train_ok(tmp_path / "o", **dict(given, INIT="normal"))
    assert common.distance(other / "latest", out / "step_00000002") < 1e-5
    assert common.train(tmp_path / "p", INIT="mean") == 2

"""What the demo on two CPU cores stands on."""
import pytest
import torch

import model_drafter as md


@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_the_loss_in_place_has_the_bits_of_the_plain_one(spread):
    """Cross-entropy, hits and gradient of a chunk, for flat logits and for steep ones."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 501, generator=generator) * spread
    labels = torch.randint(0, 501, (24,), generator=generator)
    labels[:6] = logits[:6].argmax(-1)
    wanted = md.ce_with_grad(logits, labels, None)
    found = md.ce_and_grad_in_place(logits.clone(), labels)
    for ours, plain in zip(found, wanted, strict=True):
        assert torch.equal(ours, plain)
    assert found[1][:6].all()

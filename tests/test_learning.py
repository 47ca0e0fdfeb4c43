"""When a run is said not to learn, and when not."""
import math
import random

from dflash_trainer.learning import ZERO_STEPS, why_not_learning


def falling(steps, start=10.8, end=6.0, noise=0.3, seed=0):
    """Losses as real runs have them: fast at first, noisy."""
    rng = random.Random(seed)
    return [end + (start - end) * math.exp(-i / 50) + rng.uniform(-noise, noise) for i in range(steps)]


def flat(steps, level=10.8, noise=0.3, seed=0):
    rng = random.Random(seed)
    return [level + rng.uniform(-noise, noise) for _ in range(steps)]


def test_a_run_that_learns_is_left_alone():
    for steps in (1, 19, 20, 199, 200, 2000):
        assert why_not_learning(falling(steps), [1.0] * steps, 1.0) is None


def test_a_flat_loss_is_told_from_200_steps_on():
    assert why_not_learning(flat(199), [1.0] * 199, 1.0) is None
    text = why_not_learning(flat(200), [1.0] * 200, 1.0)
    assert "10.8" in text and "200 steps" in text
    assert why_not_learning(falling(300, start=10.8, end=12.0), [1.0] * 300, 1.0)  # rising


def test_a_trained_drafter_may_rest_at_its_first_loss():
    assert why_not_learning(flat(500, level=1.2), [0.1] * 500, 2.4) is None


def test_gradients_of_zero_are_told_after_twenty_in_a_row():
    losses = falling(100)
    assert why_not_learning(losses, [1.0] * 81 + [0.0] * 19, 1.5) is None
    text = why_not_learning(losses, [1.0] * 80 + [0.0] * ZERO_STEPS, 1.5)
    assert "gradient is 0" in text
    assert why_not_learning(losses, [0.0] * 99 + [1e-9], 1.5) is None


def test_nothing_is_said_of_no_steps():
    assert why_not_learning([], [], 1.0) is None

"""The fixed batch shapes of a target: what they hold and what they cost."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_trainer import features
from dflash_trainer import rows as rows_module


@given(st.lists(st.integers(1, 512), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_batches_hold_every_conversation_once(lengths):
    batches = features.choose_target_batches(lengths, max(lengths), 512, 10)
    assert len(batches.shapes) <= 6 and max(lengths) <= batches.shapes[-1][1] <= 512
    assert all(b == 1 or b * n <= 1024 for b, n in batches.shapes) and all(
        n % 8 == 0 for _, n in batches.shapes
    )
    plan = batches.split(lengths)
    assert sorted(m for _, _, members in plan for m in members) == list(range(len(lengths)))
    for batch, length, members in plan:
        assert (batch, length) in batches.shapes and 1 <= len(members) <= batch
        assert max(lengths[m] for m in members) <= length


@pytest.mark.parametrize(
    "lengths, seq_len, overhead, most",
    [
        (np.append(np.tile([40, 500], 20_000), 4096), 4096, 40, 1.1),  # two sources in turn
        (
            np.append(np.random.default_rng(0).integers(40, 80, 60_000), 32_768),
            32_768,
            474,
            1.3,
        ),  # one outlier
        (np.full(100_000, 3), 131_072, 474, 3),
        (np.append(np.random.default_rng(0).integers(200, 345, 9_000), [352] * 200), 16_384, 14_128, 1.5),
        (np.full(1, 77), 4096, 474, 1.1),
        (np.full(500, 13), 13, 40, 1.3),
    ],
)
def test_the_padding_of_odd_data(lengths, seq_len, overhead, most):
    """Tokens computed over tokens. The fourth: rows of the rare longest must not run one by one."""
    batches = features.choose_target_batches(lengths, int(lengths.max()), seq_len, overhead)
    rows = [lengths[row].tolist() for row in rows_module.pack(lengths, 1, 0, seq_len)[:400]]
    plans = [batches.split(row) for row in rows]
    computed = sum(batch * n for plan in plans for batch, n, _ in plan)
    assert computed / sum(map(sum, rows)) < most
    if overhead == 14_128:
        assert max(len(plan) for plan in plans) <= 4


def test_longer_held_out_conversations_change_the_last_shape_alone():
    lengths = np.random.default_rng(0).integers(20, 500, 3000)
    one, two = (
        features.choose_target_batches(lengths, longest, 4096, 474).shapes
        for longest in (int(lengths.max()), 4000)
    )
    assert two[-1][1] == 4000 and max(n for _, n in one) == 504 == max(n for _, n in two[:-1])
    assert features.choose_target_batches(lengths, 300, 4096, 474).split([int(lengths.max())])


SHAPES = (1, 64), (2, 64), (4, 32), (3, 16), (1, 16)


def cheapest(order, overhead, shapes):
    """Least cost of running these lengths, falling, by trying every shape at every place."""
    if not order:
        return 0
    return min(overhead + b * n + cheapest(order[b:], overhead, shapes) for b, n in shapes if n >= order[0])


@pytest.mark.parametrize("overhead", [1, 40, 1000])
def test_the_split_costs_least(overhead):
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, 65, 7).tolist()
        want = cheapest(sorted(lengths, reverse=True), overhead, SHAPES)
        plan = features.TargetBatches(SHAPES, overhead).split(lengths)
        assert sum(overhead + batch * length for batch, length, _ in plan) == want


@pytest.mark.parametrize("overhead", [1, 40, 1000])
def test_what_the_choice_of_shapes_goes_by(overhead):
    rows = [
        sorted(np.random.default_rng(seed).integers(1, 65, n).tolist(), reverse=True)
        for seed, n in enumerate((7, 4, 6))
    ]
    table = np.array([row + [0] * (7 - len(row)) for row in rows])
    sets = np.array([[*SHAPES[:2], choice] for choice in SHAPES[2:]])
    got = features.least_costs(table, sets, overhead)[..., 0].sum(axis=1)
    assert got.tolist() == [
        sum(cheapest(row, overhead, (*SHAPES[:2], c)) for row in rows) for c in SHAPES[2:]
    ]


@pytest.mark.parametrize("overhead, most_calls, most_padding", [(1, 99, 0.2), (30_000, 1.3, 0.6)])
def test_an_expensive_call_is_made_rarely(overhead, most_calls, most_padding):
    """Cheap calls: little padding. Expensive ones (small targets on a GPU): a row in one call or two."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 500, 3000)
    batches = features.choose_target_batches(lengths, 500, 16384, overhead)
    plans = [batches.split(lengths[row].tolist()) for row in rows_module.pack(lengths, 1, 0, 16384)]
    computed = sum(batch * length for plan in plans for batch, length, _ in plan)
    assert np.mean([len(plan) for plan in plans]) < most_calls
    assert computed / lengths.sum() < 1 + most_padding

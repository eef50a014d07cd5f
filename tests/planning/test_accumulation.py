"""The accumulation sweep against enumeration of all choices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.planning import sweep_accumulation


def brute_force(
    times: list[float], sizes: list[int], world: int, gmin: int, gmax: int, overhead: float
) -> float:
    budget = gmax * max(times) * (1 + 1e-9)
    best = 0.0
    for steps in itertools.product(*(range(1, int(budget / t) + 1) for t in times)):
        if max(steps) < gmin:
            continue
        makespan = max(g * t for g, t in zip(steps, times, strict=True))
        useful = sum(p * g * t for p, g, t in zip(sizes, steps, times, strict=True))
        best = max(best, useful / (world * (makespan + overhead)))
    return best


@settings(deadline=None, max_examples=60)
@given(
    groups=st.lists(
        st.tuples(st.floats(0.5, 2.0), st.sampled_from([1, 2, 4])), min_size=1, max_size=4
    ),
    gmax=st.integers(1, 3),
    overhead=st.sampled_from([0.0, 0.3]),
    idle_ranks=st.integers(0, 2),
    data=st.data(),
)
def test_as_good_as_all_choices(groups, gmax, overhead, idle_ranks, data) -> None:  # type: ignore[no-untyped-def]
    gmin = data.draw(st.integers(1, gmax))
    times, sizes = [t for t, _ in groups], [p for _, p in groups]
    world = sum(sizes) + idle_ranks
    choice = sweep_accumulation(
        times,
        sizes,
        world_size=world,
        min_steps=gmin,
        max_steps=gmax,
        step_overhead_s=overhead,
    )
    best = brute_force(times, sizes, world, gmin, gmax, overhead)
    assert choice.score >= best * (1 - 1e-9)
    assert choice.score <= best * (1 + 1e-6)
    assert choice.steps.min() >= 1 and choice.steps.max() >= gmin
    busy = choice.steps * times
    assert choice.makespan_s == pytest.approx(busy.max())
    assert busy.max() <= gmax * max(times) * (1 + 1e-6)
    idle = 1 - float((busy * sizes).sum()) / (world * busy.max())
    assert choice.idle_share == pytest.approx(idle, abs=1e-9)


def test_many_groups_are_balanced() -> None:
    rng = np.random.default_rng(0)
    idle = [
        sweep_accumulation(
            rng.lognormal(0, 0.8, 32), [1] * 32, world_size=32, max_steps=5
        ).idle_share
        for _ in range(30)
    ]
    assert np.mean(idle) < 0.06


def test_what_is_available_limits_the_steps() -> None:
    choice = sweep_accumulation([1.0, 4.0], [1, 1], world_size=2, available=[2, 1], max_steps=4)
    assert choice.steps.tolist() == [2, 1]


def test_tokens_are_aimed_at_among_efficient_choices() -> None:
    kwargs = {"world_size": 2, "max_steps": 8, "tokens": [10.0, 10.0]}
    for target in (20, 40, 60, 140):
        choice = sweep_accumulation(
            [1.0, 1.0], [1, 1], target_tokens=target, max_tokens=2 * target, **kwargs
        )
        assert choice.steps.sum() * 10 == target
    few = sweep_accumulation([1.0, 1.0], [1, 1], target_tokens=500, max_tokens=900, **kwargs)
    assert few.steps.tolist() == [8, 8], "Gmax limits what can be reached"
    much = sweep_accumulation([1.0, 1.0], [1, 1], target_tokens=5, max_tokens=9, **kwargs)
    assert much.steps.tolist() == [1, 1]

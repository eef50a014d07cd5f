"""Any lengths, ranks and costs: plans are valid and never slower than a static one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_dcp.planning import CostModel, EpochPlanner, PlanningOptions, best_static
from lightning_dcp.planning.cost_grid import CostGrid
from lightning_dcp.planning.makespan import StepScheduler
from lightning_dcp.planning.windows import lead_samples
from tests.planning.costs import cost_model, log_normal
from tests.planning.laws import cost_models, needed_bytes
from tests.planning.optimum import least_makespan

SEARCHED = ("dcp-intra", "dcp-inter", "global-batch")


@st.composite
def any_lengths(draw: st.DrawFn, most: int) -> list[int]:
    """Equal, spread over three orders of magnitude, or a few long ones among short ones."""
    n = draw(st.integers(1, most))
    seed = draw(st.integers(0, 10_000))
    rng = np.random.default_rng(seed)
    shape = draw(st.sampled_from(["equal", "log-normal", "few long", "any"]))
    lengths = {
        "equal": np.full(n, draw(st.integers(1, 5000))),
        "log-normal": np.clip(rng.lognormal(5, 1.3, n), 1, 9000),
        "few long": np.where(rng.random(n) < 0.1, rng.integers(3000, 9000, n), rng.integers(1, 60)),
        "any": rng.integers(1, 9000, n),
    }[shape]
    return [int(length) for length in lengths]


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=any_lengths(120),
    world_size=st.integers(1, 64),
    model=cost_models(),
    policy=st.sampled_from(SEARCHED),
    batch_size=st.integers(1, 6),
    fits_at=st.sampled_from([1, 2, 4, 64]),
    epoch=st.integers(0, 2),
)
def test_valid_and_never_slower_than_the_best_static_plan(  # type: ignore[no-untyped-def]
    lengths, world_size, model, policy, batch_size, fits_at, epoch
) -> None:
    largest = 2 ** (world_size.bit_length() - 1)
    limit = needed_bytes(model, max(lengths), min(fits_at, largest))
    planner = EpochPlanner(
        lengths=lengths,
        cost_model=model,
        world_size=world_size,
        memory_limit_bytes=limit,
        options=PlanningOptions(policy=policy),
        batch_size=batch_size,
    )
    plans = planner.epoch(epoch)
    assert len(plans) == planner.num_iterations
    seen: list[int] = []
    for plan in plans:  # Plan and MicroBatch check themselves
        assert max(m.est_bytes for m in plan.micro_batches) <= limit
        seen.extend(i for m in plan.micro_batches for i in m.sample_ids)
    assert sorted(seen) == list(range(len(lengths)))
    static = best_static(planner).epoch(epoch)
    assert len(static) == len(plans)
    assert plans.predicted_time_s <= static.predicted_time_s * (1 + 1e-9)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=any_lengths(5),
    world_size=st.sampled_from([1, 2, 4]),
    model=cost_models(sp_sizes=(1, 2, 4)),
    data=st.data(),
)
def test_small_steps_are_within_5_percent_of_the_optimum(  # type: ignore[no-untyped-def]
    lengths, world_size, model, data
) -> None:
    if world_size == 4:
        lengths = lengths[:4]  # five on four ranks take the oracle minutes
    fits_at = data.draw(st.sampled_from([p for p in (1, 2, 4) if p <= world_size]))
    found, optimum = against_optimum(lengths, world_size, model, fits_at)
    assert found <= 1.05 * optimum


def against_optimum(
    lengths: list[int], world_size: int, model: CostModel, fits_at: int
) -> tuple[float, float]:
    """Seconds found and least possible, by the same tabulated costs."""
    grid = CostGrid(
        model,
        np.unique(lengths),
        sp_sizes=[p for p in (1, 2, 4) if p <= world_size],
        pad_multiple=1,
        limit_bytes=needed_bytes(model, max(lengths), fits_at),
        largest_batch=len(lengths),
        recompute=None,
    )
    found = StepScheduler(grid, world_size=world_size).schedule(grid.index_of(np.array(lengths)))

    def seconds(b: int, s: int, p: int) -> float:
        return float(grid.times[p][int(grid.index_of(np.array([s]))[0]), b - 1])

    best = least_makespan(lengths, world_size, grid.sp_sizes, seconds, below=found.end_s)
    return found.end_s, best


def test_the_oracle_finds_a_known_optimum() -> None:
    """Five jobs of 3, 3, 2, 2, 2 on two ranks: 6; greedy in this order ends at 7."""

    def seconds(b: int, s: int, p: int) -> float:
        return float(s) if b == p == 1 else math.inf

    assert least_makespan([3, 3, 2, 2, 2], 2, (1,), seconds) == 6
    assert least_makespan([8, 1], 2, (1, 2), lambda b, s, p: b * s / p) == pytest.approx(4.5)


@pytest.mark.parametrize(("n", "length", "world_size"), [(143, 5, 8), (100, 50, 8), (69, 2, 4)])
def test_tiny_samples_share_micro_batches_where_fixed_costs_rule(
    n: int, length: int, world_size: int
) -> None:
    model = cost_model((1, 2, 4, 8))
    planner = EpochPlanner(
        lengths=[length] * n,
        cost_model=model,
        world_size=world_size,
        memory_limit_bytes=10**12,
        options=PlanningOptions(tokens_per_step=10**9),
    )
    shared = float(model.time_s(math.ceil(n / world_size), length, 1))
    assert planner.epoch(0)[0].makespan_s <= 1.05 * shared


def test_large_tasks_leave_whole_blocks_to_narrower_long_ones() -> None:
    """Filling every block evenly with p = 8 would leave no room for long samples at p = 4."""
    model = cost_model((1, 2, 4, 8))
    lengths = np.r_[np.full(40, 9000), np.full(12, 16000), log_normal(800, 3)]
    planner = EpochPlanner(
        lengths=lengths,
        cost_model=model,
        world_size=64,
        memory_limit_bytes=needed_bytes_for(model, 16000, 8),
        options=PlanningOptions(tokens_per_step=10**9),
    )
    assert planner.epoch(0)[0].idle_share < 0.05


def needed_bytes_for(model: CostModel, length: int, sp_size: int) -> int:
    used = int(model.memory_bytes(1, length, sp_size, model.num_blocks))
    spare = used - model.fixed_bytes
    return math.ceil(model.fixed_bytes + (1 + model.memory_error) * spare) + 1


@pytest.mark.parametrize("policy", ["dcp-intra", "dcp-inter"])
@pytest.mark.parametrize(("world_size", "batch_size"), [(4, 2), (32, 1), (32, 8)])
def test_no_sample_comes_early_by_more_than_the_lead(
    policy: str, world_size: int, batch_size: int
) -> None:
    lengths = log_normal(6000, 8)
    planner = EpochPlanner(
        lengths=lengths,
        cost_model=cost_model((1, 2, 4, 8, 16, 32)),
        world_size=world_size,
        memory_limit_bytes=10**12,
        options=PlanningOptions(policy=policy),
        batch_size=batch_size,
    )
    place = np.empty(6000, dtype=np.int64)
    place[np.random.default_rng([0, 0]).permutation(6000)] = np.arange(6000)
    waiting = np.ones(6000, dtype=bool)
    for plan in planner.epoch(0):
        taken = place[[i for m in plan.micro_batches for i in m.sample_ids]]
        first = int(np.argmax(waiting))
        waiting[taken] = False
        assert first in taken, "the earliest that waits is never put off"
        assert taken.max() <= first + len(taken) + 2 * lead_samples(6000)


def windows_of_ddp(n: int, world_size: int, batch_size: int, order: Any) -> list[set[int]]:
    """Samples of each step by the rule of ``DistributedSampler``, written down plainly."""
    per_rank = math.ceil(n / world_size)
    padded = [order[i % n] for i in range(per_rank * world_size)]
    ranks = [padded[rank::world_size] for rank in range(world_size)]
    return [
        {i for own in ranks for i in own[start : start + batch_size]}
        for start in range(0, per_rank, batch_size)
    ]


@settings(deadline=None, max_examples=60)
@given(
    lengths=any_lengths(90),
    world_size=st.sampled_from([1, 2, 3, 4, 7, 16]),
    batch_size=st.integers(1, 5),
    shuffle=st.booleans(),
)
def test_global_batch_takes_what_each_step_of_ddp_takes(  # type: ignore[no-untyped-def]
    lengths, world_size, batch_size, shuffle
) -> None:
    planner = EpochPlanner(
        lengths=lengths,
        cost_model=cost_model((1, 2, 4, 8, 16)),
        world_size=world_size,
        memory_limit_bytes=10**12,
        options=PlanningOptions(policy="global-batch"),
        batch_size=batch_size,
        shuffle=shuffle,
        seed=3,
    )
    n = len(lengths)
    for epoch in (0, 1):
        order = np.arange(n)
        if shuffle:
            order = np.random.default_rng([3, epoch]).permutation(n)
        seen: set[int] = set()
        for plan, expected in zip(
            planner.epoch(epoch),
            windows_of_ddp(n, world_size, batch_size, order.tolist()),
            strict=True,
        ):
            own = {i for m in plan.micro_batches for i in m.sample_ids}
            assert own == expected - seen, "less the repeats that fill up the last step"
            seen |= own

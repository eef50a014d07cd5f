"""Plans that take the place of one that ran out of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_dcp.planning import EpochPlanner, Plan
from lightning_dcp.planning.careful import (
    MoreCareful,
    NothingLeft,
    bucket_index,
    more_careful,
    more_recomputed,
)
from lightning_dcp.planning.options import PlanningOptions
from tests.planning.costs import FIXED_BYTES, NUM_BLOCKS, cost_model, log_normal


def planner(limit_bytes: int = 40_000_000, **options: Any) -> EpochPlanner:
    return EpochPlanner(
        lengths=log_normal(40, longest=8000),
        cost_model=cost_model(),
        world_size=4,
        memory_limit_bytes=limit_bytes,
        options=PlanningOptions(seed=3, max_buckets=3, **options),
        batch_size=4,
    )


def ids(plan: Plan) -> list[int]:
    return sorted(i for m in plan.micro_batches for i in m.sample_ids)


def largest(plan: Plan) -> int:
    return int(np.argmax([m.est_bytes for m in plan.micro_batches]))


@pytest.mark.parametrize("options", [{}, {"policy": "global-batch"}, {"packing": True}])
def test_the_same_samples_with_less_and_less_memory(options: dict[str, Any]) -> None:
    """Until nothing takes less, in few attempts, each unlike those that failed."""
    first = planner(**options)
    now = MoreCareful(planner=first, plan=first.epoch(2)[1])
    samples, shapes = ids(now.plan), set()
    while True:
        index = largest(now.plan)
        m = now.plan.micro_batches[index]
        shape = (m.batch_size, m.num_tokens, m.sp_size, m.recompute_blocks)
        assert shape not in shapes, "what failed is not tried again"
        shapes.add(shape)
        before = now.planner.corrections.memory_factors
        try:
            now = more_careful(now, {index})
        except NothingLeft:
            assert shape[0] == 1 and shape[2:] == (4, NUM_BLOCKS)
            break
        factors = now.planner.corrections.memory_factors
        assert all(new >= old for new, old in zip(factors, before, strict=True))
        assert ids(now.plan) == samples
        assert (now.plan.epoch, now.plan.iteration) == (2, 1)
    assert 3 < len(shapes) < 25


def test_a_pure_function_of_plan_and_failure() -> None:
    first = planner()
    plan = first.epoch(0)[0]
    one, other = (
        more_careful(MoreCareful(planner=p, plan=plan), {0, 1}) for p in (first, planner())
    )
    assert one.plan == other.plan
    assert one.planner.fingerprint == other.planner.fingerprint != first.fingerprint


def test_what_failed_does_not_fit_any_more() -> None:
    first = planner()
    plan = first.epoch(0)[0]
    index = largest(plan)
    m = plan.micro_batches[index]
    again = more_careful(MoreCareful(planner=first, plan=plan), {index}).planner
    shape = (m.batch_size, m.seq_len, m.sp_size, m.recompute_blocks)
    assert again.cost_model.memory_bytes(*shape) > again.usable_bytes
    factors = again.corrections.memory_factors
    assert factors[bucket_index(first, m)] >= 1.25
    assert sorted(factors)[0] == 1.0, "of other lengths nothing is known"
    assert again.usable_bytes > FIXED_BYTES


def test_samples_that_cannot_be_read_again_are_recomputed() -> None:
    plan = planner().epoch(0)[0]
    again = more_recomputed(plan, {0}, NUM_BLOCKS)
    assert again.micro_batches[0].recompute_blocks == NUM_BLOCKS
    assert again.micro_batches[1:] == plan.micro_batches[1:]
    with pytest.raises(NothingLeft, match="recomputed already"):
        more_recomputed(again, {0}, NUM_BLOCKS)

"""The static baseline to compare a plan with (policies ``bucket`` and ``packed``)."""

from __future__ import annotations

import dataclasses

from lightning_dcp.planning.options import STATIC_POLICIES
from lightning_dcp.planning.planner import EpochPlanner

__all__ = ["best_static"]


def best_static(planner: EpochPlanner) -> EpochPlanner:
    """Planner of the best static plan for the same samples, costs and number of steps.

    One SP size for all, whichever is best by the same cost model; policy ``"bucket"`` (micro-batch
    sizes per bucket lowered until they take no longer than the longest bucket) or ``"packed"``
    (micro-batches filled to a number of tokens). Like the planner given, it recomputes all blocks
    (``dcp-inter``, as the paper's baseline does) or the fewest with which the longest sample fits.

    Raises:
        ValueError: No single SP size fits all samples.
    """
    planners = [_static(planner, policy) for policy in STATIC_POLICIES]
    return min(planners, key=lambda static: static.epoch(0).predicted_time_s)


def _static(planner: EpochPlanner, policy: str) -> EpochPlanner:
    return EpochPlanner(
        lengths=planner.lengths,
        cost_model=planner.cost_model,
        world_size=planner.world_size,
        memory_limit_bytes=planner.memory_limit_bytes,
        options=dataclasses.replace(
            planner.options, policy=policy, tokens_per_step=planner.tokens_per_step
        ),
        batch_size=planner.batch_size,
        seed=planner.seed,
        shuffle=planner.shuffle,
        sp_size_exclusions=planner.sp_size_exclusions,
        dataset_name=planner.dataset_name,
        static_recompute="full" if planner.options.policy == "dcp-inter" else "smallest",
        sample_order=planner.sample_order,
        same_steps_as=planner,
        layout=planner.layout,
    )

"""The static baseline to compare an elastic plan with (DESIGN.md section 5, policy ``bucket``)."""

from __future__ import annotations

import dataclasses

from lightning_dcp.planning.planner import EpochPlanner

__all__ = ["best_static"]


def best_static(planner: EpochPlanner) -> EpochPlanner:
    """Planner of the best static plan for the same samples, costs and step size.

    One SP size for all, micro-batch sizes per bucket lowered until they take no longer than the
    longest bucket, equal accumulation in all groups; the best SP size by the same cost model. Like
    the planner given, it recomputes all blocks (``dcp-inter``, as the paper's baseline does) or the
    fewest with which the longest sample fits.

    Raises:
        ValueError: No single SP size fits all samples.
    """
    return EpochPlanner(
        lengths=planner.lengths,
        cost_model=planner.cost_model,
        world_size=planner.world_size,
        memory_limit_bytes=planner.memory_limit_bytes,
        options=dataclasses.replace(
            planner.options, policy="bucket", tokens_per_step=planner.tokens_per_step
        ),
        batch_size=planner.batch_size,
        seed=planner.seed,
        shuffle=planner.shuffle,
        sp_size_exclusions=planner.sp_size_exclusions,
        dataset_name=planner.dataset_name,
        static_recompute="full" if planner.options.policy == "dcp-inter" else "smallest",
    )

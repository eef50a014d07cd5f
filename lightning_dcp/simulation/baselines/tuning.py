"""Settings at which a baseline is at its best for given steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.simulation.baselines.packing import sp_sizes_within
from lightning_dcp.simulation.steps import SimulatedStep

__all__ = [
    "PlanStep",
    "Steps",
    "best_settings",
    "longest_of",
    "recompute_candidates",
    "tune_recompute",
]

PlanStep = Callable[..., SimulatedStep]
"""``plan_step(lengths, costs, world_size, limit_bytes, **settings)``."""

Steps = Sequence[Sequence[int] | IntArray]
"""The lengths of each of some optimizer steps."""


def best_settings(
    plan_step: PlanStep,
    steps: Steps,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    candidates: Iterable[dict[str, Any]],
) -> dict[str, Any]:
    """The settings with the least predicted seconds over all steps; the first of several.

    Raises:
        ValueError: No candidate can run all steps.
    """
    best: dict[str, Any] | None = None
    best_s = math.inf
    refused: ValueError | None = None
    for settings in candidates:
        total = 0.0
        try:
            for lengths in steps:
                total += plan_step(lengths, costs, world_size, limit_bytes, **settings).makespan_s
                if total >= best_s:
                    break
        except ValueError as error:
            refused = error
            continue
        if total < best_s:
            best, best_s = settings, total
    if best is None:
        raise ValueError(f"No setting can run all steps. The last one failed: {refused}")
    return best


def recompute_candidates(
    costs: Costs,
    longest: int,
    world_size: int,
    limit_bytes: int,
    sp_sizes: Sequence[int] | None = None,
) -> list[int]:
    """Static r worth trying: the fewest blocks with which the longest sample fits, and more.

    Fewer recomputed blocks take less time each but leave less memory, so that micro-batches are
    smaller or groups larger. The fewest at each SP size, all quarters of L above, and L.

    Args:
        costs: Predicts bytes.
        longest: Longest sample of the data set.
        world_size: Ranks W.
        limit_bytes: Memory limit per rank.
        sp_sizes: SP sizes to look at; None: all.

    Raises:
        ValueError: The sample fits nowhere.
    """
    sizes = sp_sizes_within(costs, world_size) if sp_sizes is None else tuple(sp_sizes)
    fewest = np.atleast_1d(costs.min_recompute(1, longest, np.array(sizes), limit_bytes))
    fewest = fewest[fewest >= 0]
    if not fewest.size:
        raise ValueError(
            f"A sample of {longest} tokens fits at none of the SP sizes {list(sizes)}, even with "
            "all blocks recomputed. Raise the memory limit or use more ranks."
        )
    blocks = costs.num_blocks
    quarters = {math.ceil(blocks * k / 4) for k in (1, 2, 3, 4)}
    candidates = set(fewest.tolist()) | {r for r in quarters if r >= fewest.min()}
    return sorted(int(r) for r in candidates)


def tune_recompute(
    plan_step: PlanStep,
    steps: Steps,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    *,
    longest: int | None = None,
    **settings: Any,
) -> int:
    """The static r at which a baseline is quickest over the steps.

    Args:
        plan_step: The baseline; takes ``recompute_blocks``.
        steps: Lengths of each step to try.
        costs: Predicts seconds and bytes.
        world_size: Ranks W.
        limit_bytes: Memory limit per rank.
        longest: Longest sample that must fit; None: that of the steps.
        **settings: Further settings of the baseline.

    Raises:
        ValueError: A sample fits nowhere.
    """
    most = longest_of(steps) if longest is None else longest
    candidates = recompute_candidates(costs, most, world_size, limit_bytes)
    best = best_settings(
        plan_step,
        steps,
        costs,
        world_size,
        limit_bytes,
        [{**settings, "recompute_blocks": r} for r in candidates],
    )
    return int(best["recompute_blocks"])


def longest_of(steps: Steps) -> int:
    """Longest sample of all steps."""
    return max(int(np.max(lengths)) for lengths in steps)

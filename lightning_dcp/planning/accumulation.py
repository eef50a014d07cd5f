"""How many micro-batches each group accumulates (DESIGN.md section 5, accumulation search).

The product of all choices cannot be enumerated, but it need not be: in a best choice the makespan
is ``k T_i`` for some group and some k, and for a given makespan the most useful work is done when
each group takes as many steps as fit. So all distinct ``k T_i`` are swept, all at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_dcp.planning.fitting import FloatArray
from lightning_dcp.planning.lengths import IntArray

__all__ = ["Accumulation", "sweep_accumulation"]

_MAX_TARGETS = 128
_AS_GOOD = 0.99  # scores at least this share of the best count as equally efficient


@dataclass(frozen=True, eq=False)
class Accumulation:
    """Result of the sweep.

    Attributes:
        steps: (n,) micro-batches per group, each at least 1.
        makespan_s: The longest group.
        idle_share: ``sum_i p_i (makespan - g_i T_i) / (W makespan)``; ranks without a group idle.
        score: Useful rank-seconds per rank-second, the step's overhead included.
    """

    steps: IntArray
    makespan_s: float
    idle_share: float
    score: float


def sweep_accumulation(
    time_s: FloatArray | list[float],
    sp_size: npt.NDArray[np.int64] | list[int],
    *,
    world_size: int,
    min_steps: int = 1,
    max_steps: int = 8,
    available: IntArray | list[int] | None = None,
    step_overhead_s: float = 0.0,
    tokens: FloatArray | list[float] | None = None,
    target_tokens: float | None = None,
    max_tokens: float | None = None,
) -> Accumulation:
    """Choose the accumulation steps of n groups that run at the same time.

    Without a target the best score wins. With one, the efficient choices among those that have at
    least ``target_tokens`` and at most ``max_tokens`` compete, and the closest to the target wins;
    where no choice is in between, the one that misses by least.

    Args:
        time_s: (n,) seconds of one micro-batch of each group.
        sp_size: (n,) SP sizes; their sum is at most ``world_size``.
        world_size: Ranks W.
        min_steps: Gmin: the largest g must reach it if it can.
        max_steps: Gmax: the makespan is at most ``max_steps * max(time_s)``.
        available: (n,) micro-batches each group can have; None: no limit.
        step_overhead_s: Seconds per iteration besides the micro-batches.
        tokens: (n,) tokens of one micro-batch of each group.
        target_tokens: Wanted tokens of the iteration.
        max_tokens: Most tokens of the iteration.
    """
    times = np.asarray(time_s, dtype=np.float64)
    ranks = np.asarray(sp_size, dtype=np.float64)
    longest = float(times.max())
    counts = np.floor(max_steps * longest / times * (1 + 1e-9))
    targets = _targets(times, counts)
    steps = np.maximum(np.floor(targets[:, None] / times * (1 + 1e-9)), 1.0)
    if available is not None:
        steps = np.minimum(steps, np.maximum(available, 1))
    makespan = (steps * times).max(axis=1)
    useful = steps @ (times * ranks)
    score = useful / (world_size * (makespan + step_overhead_s))
    enough = steps.max(axis=1)
    wanted = enough >= min(min_steps, float(enough.max()))
    score_or_out = np.where(wanted, score, -np.inf)
    if tokens is None or target_tokens is None:
        best = int(np.argmax(score_or_out))
    else:
        total = steps @ np.asarray(tokens, dtype=np.float64)
        best = _nearest(score_or_out, total, target_tokens, max_tokens)
    return Accumulation(
        steps=steps[best].astype(np.int64),
        makespan_s=float(makespan[best]),
        idle_share=float(1.0 - useful[best] / (world_size * makespan[best])),
        score=float(score[best]),
    )


def _targets(times: FloatArray, counts: FloatArray) -> FloatArray:
    multiples = np.repeat(times, counts.astype(np.int64))
    starts = np.cumsum(counts) - counts
    multiples *= np.arange(1, multiples.size + 1) - np.repeat(starts, counts.astype(np.int64))
    multiples.sort()
    if multiples.size > _MAX_TARGETS:  # dense enough: neighbours differ by little
        keep = np.linspace(0, multiples.size - 1, _MAX_TARGETS).astype(np.int64)
        multiples = multiples[keep]
    return multiples


def _nearest(score: FloatArray, total: FloatArray, target: float, most: float | None) -> int:
    limit = np.inf if most is None else most
    valid = np.isfinite(score)
    inside = valid & (total >= target) & (total <= limit)
    if inside.any():
        efficient = inside & (score >= _AS_GOOD * score[inside].max())
        return int(np.argmin(np.where(efficient, total, np.inf)))
    below = valid & (total < target)
    if below.any():
        return int(np.argmax(np.where(below, total, -np.inf)))
    return int(np.argmin(np.where(valid, total, np.inf)))

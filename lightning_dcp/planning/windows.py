"""Which samples an iteration takes.

Elastic policies walk a seeded permutation: an iteration takes the next samples, up to the wanted
number of tokens, and may fill gaps with samples that would come soon. Nothing is dropped, repeated
or put off; no sample comes more than ``lead`` places early, so that every part of an epoch has the
length mix of the whole.

NOTE (step size): Lightning needs the number of iterations before the first one, so the size of the
steps has to follow: each takes the mean of what is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.makespan import StepScheduler
from lightning_dcp.planning.micro_batches import MicroBatches

__all__ = ["Schedule", "lead_samples", "schedule_elastic", "schedule_windows", "token_windows"]

_LEAD = 1.5  # times sqrt(samples): what two-sample tests on tenths of an epoch do not notice
_OPTIONAL_PER_RANK = 6
_LARGEST_STEP = 3.0  # times the mean, where one sample takes longer than a step


@dataclass(eq=False)
class Schedule:
    """Micro-batches of an epoch, in columns; iteration i has rows ``offsets[i]:offsets[i + 1]``.

    ``samples`` holds places in the order of the epoch, one micro-batch after the other.
    """

    samples: list[IntArray] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    sp_size: list[int] = field(default_factory=list)
    first_rank: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])

    def add(self, step: MicroBatches, places: IntArray) -> None:
        """Add an iteration; ``places`` says where its samples are in the order of the epoch."""
        self.samples.append(places[np.concatenate(step.samples)])
        self.count.extend(step.count)
        self.sp_size.extend(step.sp_size)
        self.first_rank.extend(step.first_rank)
        self.offsets.append(len(self.count))


def lead_samples(num_samples: int) -> int:
    """How many places a sample may come early."""
    return max(1, int(_LEAD * math.sqrt(num_samples)))


def token_windows(lengths: IntArray, num_windows: int) -> list[tuple[int, int]]:
    """Cut the epoch's order into windows of about equal tokens, each with a sample at least.

    Args:
        lengths: (n,) lengths in the order of the epoch.
        num_windows: At most n.

    Returns:
        ``(start, stop)`` of each.
    """
    before = np.concatenate([[0], np.cumsum(lengths)])
    start, windows = 0, []
    for left in range(num_windows, 0, -1):
        stop = _next_stop(before, start, left, 1.0)
        windows.append((start, stop))
        start = stop
    return windows


def _next_stop(before: IntArray, start: int, left: int, share: float) -> int:
    """Where a window from ``start`` ends that takes its share of the tokens that are left."""
    n = len(before) - 1
    if left == 1:
        return n
    target = before[start] + share * (before[n] - before[start]) / left
    stop = int(np.searchsorted(before, target))
    if stop > 0 and target - before[stop - 1] < before[min(stop, n)] - target:
        stop -= 1
    return min(max(stop, start + 1), n - (left - 1))


def schedule_windows(
    windows: Sequence[tuple[int, int]], g: IntArray, scheduler: StepScheduler
) -> Schedule:
    """Each window is an iteration, as it is."""
    out = Schedule()
    for start, stop in windows:
        out.add(scheduler.schedule(g[start:stop]), np.arange(start, stop))
    return out


def _enough_beside_the_longest(
    scheduler: StepScheduler,
    g: IntArray,
    tokens_before: IntArray,
    num: int,
    target: float,
    budget: int,
) -> int:
    """How many samples to take so that no rank is idle beside one that takes longer than a step.

    The steps that follow are smaller in turn.
    """
    grid = scheduler.grid
    longest_s = float(grid.quickest_s[g[:num]].max())
    rank_s = grid.choice(longest_s).rank_s
    wanted = longest_s * scheduler.capacity
    if float(rank_s[g[:num]].sum()) >= wanted:
        return num
    enough = int(np.searchsorted(np.cumsum(rank_s[g]), wanted)) + 1
    most = int(np.searchsorted(tokens_before, _LARGEST_STEP * target))
    return max(num, min(enough, most, budget, len(g)))


def schedule_elastic(
    lengths: IntArray,
    g: IntArray,
    scheduler: StepScheduler,
    *,
    num_iterations: int,
    lead: int,
) -> Schedule:
    """Iterations that take the next samples and fill their gaps with some that come soon.

    Args:
        lengths: (n,) lengths in the order of the epoch.
        g: (n,) their places in the cost grid.
        scheduler: Makes the micro-batches.
        num_iterations: N, at most n.
        lead: How many places a sample may come early.
    """
    out = Schedule()
    n = len(lengths)
    most_optional = min(lead, _OPTIONAL_PER_RANK * scheduler.world_size)
    pool = np.empty(0, dtype=np.int64)  # places that were passed over, then the next ones
    front = 0
    tokens_left, samples_left = int(lengths.sum()), n
    for left in range(num_iterations, 0, -1):
        target = tokens_left / left
        budget = samples_left - (left - 1)  # one is kept for each iteration to come
        while True:
            before = np.cumsum(lengths[pool])
            num = int(np.searchsorted(before, target)) + 1 if left > 1 else samples_left
            if front == n or num + most_optional <= len(pool):
                break
            more = max(num + most_optional - len(pool), len(pool) // 2, 16)
            pool = np.concatenate([pool, np.arange(front, min(front + more, n))])
            front = min(front + more, n)
        num = min(num, len(pool), budget)
        if num > 1 and left > 1 and before[num - 1] - target > target - before[num - 2]:
            num -= 1
        num = _enough_beside_the_longest(scheduler, g[pool], before, num, target, budget)
        while True:
            optional = pool[num : num + min(most_optional, budget - num)]
            step = scheduler.schedule(g[pool[:num]], g[optional])
            if scheduler.min_steps == 1 or num >= min(len(pool), budget):
                break
            if step.most_steps >= scheduler.min_steps:
                break
            num = min(num + scheduler.min_steps, len(pool), budget)
        out.add(step, pool)
        taken = np.concatenate(step.samples)
        keep = np.ones(len(pool), dtype=bool)
        keep[taken] = False
        tokens_left -= int(lengths[pool[taken]].sum())
        samples_left -= len(taken)
        pool = pool[keep]
    return out

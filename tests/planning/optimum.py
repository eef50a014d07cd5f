"""The optimum of small steps, by trying everything: an oracle for the scheduler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to put items into groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for groups in partitions(rest):
        yield [[first], *groups]
        for i, group in enumerate(groups):
            yield [*groups[:i], [first, *group], *groups[i + 1 :]]


def least_makespan(
    lengths: Sequence[int],
    world_size: int,
    sp_sizes: Sequence[int],
    seconds: Callable[[int, int, int], float],
    *,
    below: float = math.inf,
) -> float:
    """Least seconds in which the samples can be run, if less than ``below``, else ``below``.

    Args:
        lengths: Tokens of each sample.
        world_size: Ranks W.
        sp_sizes: SP sizes that may be used.
        seconds: ``(b, s, p)`` to the seconds of a micro-batch; infinite where it does not fit.
        below: Only better schedules are looked for.
    """
    best = below
    sizes = [p for p in sp_sizes if p <= world_size]
    for groups in partitions(range(len(lengths))):
        jobs = [(len(group), max(lengths[i] for i in group)) for group in groups]
        choices = [[(p, seconds(b, s, p)) for p in sizes] for b, s in jobs]
        # No schedule of these groups is shorter than their least rank-seconds, spread evenly.
        least = [min(p * t for p, t in options) for options in choices]
        if sum(least) / world_size >= best:
            continue
        for chosen in itertools.product(*choices):
            area = sum(p * t for p, t in chosen) / world_size
            if max(area, max(t for _, t in chosen)) < best:
                best = _schedule(tuple(sorted(chosen)), (0.0,) * world_size, best)
    return best


def _schedule(jobs: tuple[tuple[int, float], ...], free: tuple[float, ...], best: float) -> float:
    """Least end over all orders and blocks; a group starts when all its ranks are free."""
    if not jobs:
        return max(free)
    for i, (p, t) in enumerate(jobs):
        if i and jobs[i - 1] == jobs[i]:
            continue
        tried = set()
        for first in range(0, len(free) - p + 1, p):
            block = free[first : first + p]
            if block in tried:  # ranks alike so far
                continue
            tried.add(block)
            end = max(block) + t
            if end < best:
                after = free[:first] + (end,) * p + free[first + p :]
                best = min(best, _schedule(jobs[:i] + jobs[i + 1 :], after, best))
    return best

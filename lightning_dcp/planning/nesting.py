"""Large samples on nested blocks of ranks: wide groups first, narrow ones into what they leave."""

from __future__ import annotations

import math
from bisect import bisect_right, insort

from lightning_dcp.planning.cost_grid import CostGrid

__all__ = ["ON_TIME", "Placed", "Task", "place", "place_large"]

ON_TIME = 1.01  # of the bound: ends that count as level
_MOST_WIDENINGS = 12
_MOST_PLACINGS = 600  # of single tasks
_EPS = 1e-9

# -sp_size, -seconds, start (in the sorted samples), count, grid index: sorted as they are placed
Task = tuple[int, float, int, int, int]
# blocks as (free from, first rank), sorted; their size; the first rank of each task
Placed = tuple[list[tuple[float, int]], int, list[int]]


def place_large(
    tasks: list[Task], fluid: float, grid: CostGrid, world_size: int
) -> tuple[list[Task], Placed]:
    """Place, and widen the last to end while that helps."""
    w = world_size
    tasks.sort()
    if not tasks:
        return tasks, place(tasks, 0.0, world_size)
    area = fluid + sum(task[0] * task[1] for task in tasks)
    full = ON_TIME * area / w  # blocks are filled up to here; 0: always the one free first
    best = place(tasks, full, world_size)
    last = best[0][-1][0]
    if last > full:
        other = place(tasks, 0.0, world_size)
        if other[0][-1][0] < last:
            best, full = other, 0.0
            last = best[0][-1][0]
    best_end = max(last, area / w)
    # Among very many tasks one more or less does not matter.
    for _ in range(min(_MOST_WIDENINGS, 1 + _MOST_PLACINGS // len(tasks))):
        if last <= ON_TIME * area / w:
            break
        found = _wider(tasks, best, grid, world_size)
        if found is None:
            break
        index, wide = found
        changed = tasks[:index] + tasks[index + 1 :]
        insort(changed, wide)
        placed = place(changed, full, world_size)
        more = area - tasks[index][0] * tasks[index][1] + wide[0] * wide[1]
        last = placed[0][-1][0]
        end = max(last, more / w)
        if end > best_end:
            break
        tasks, best, best_end, area = changed, placed, end, more
    return tasks, best


def _wider(
    tasks: list[Task], placed: Placed, grid: CostGrid, world_size: int
) -> tuple[int, Task] | None:
    """A task of the block that ends last, by its index, and the same on twice the ranks."""
    level, _, first_ranks = placed
    _, last = level[-1]
    for index in range(len(tasks) - 1, -1, -1):
        first = first_ranks[index]
        if first <= last < first - tasks[index][0]:
            minus_p, _, start, count, g = tasks[index]
            row = grid.rows.get(-2 * minus_p)
            if row is None or -2 * minus_p > world_size:
                continue
            seconds = grid.seconds(row[g], count)
            if seconds < math.inf:
                return index, (2 * minus_p, -seconds, start, count, g)
    return None


def place(tasks: list[Task], full_s: float, world_size: int) -> Placed:
    """Each task, wide to narrow and long to short, onto a block.

    The one that is free last among those where it ends before ``full_s``, so that whole blocks
    stay free for long tasks of fewer ranks; where there is none, the one that is free first.
    """
    w = world_size
    p = -tasks[0][0] if tasks else 1
    level = [(0.0, first) for first in range(0, w - p + 1, p)]
    tail = w - w % p  # ranks that fill no block of this size
    first_ranks: list[int] = []
    for minus_p, minus_seconds, *_ in tasks:
        if -minus_p != p:
            level, tail = _halved(level, p, -minus_p, tail, w)
            p = -minus_p
        at = bisect_right(level, (full_s + minus_seconds, w)) - 1 if full_s else 0
        free, first_rank = level.pop(max(at, 0))
        insort(level, (free - minus_seconds, first_rank))
        first_ranks.append(first_rank)
    if tail < w:
        level, _ = _halved(level, p, 1, tail, w)
        p = 1
    return level, p, first_ranks


def _halved(
    level: list[tuple[float, int]], size: int, wanted: int, tail: int, world_size: int
) -> tuple[list[tuple[float, int]], int]:
    """Blocks of ``size`` as smaller ones, with those that the ranks from ``tail`` on can make."""
    blocks = [(free, first + i) for free, first in level for i in range(0, size, wanted)]
    blocks += [(0.0, first) for first in range(tail, world_size - wanted + 1, wanted)]
    blocks.sort()
    return blocks, world_size - world_size % wanted

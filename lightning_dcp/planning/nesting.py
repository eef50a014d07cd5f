"""Large samples on nested blocks of ranks: wide groups first, narrow ones into what they leave."""

from __future__ import annotations

import math
from bisect import bisect_right, insort

import numpy as np

from lightning_dcp.planning.cost_grid import CostGrid
from lightning_dcp.planning.fitting import FloatArray
from lightning_dcp.planning.layout import Layout

__all__ = ["ON_TIME", "Placed", "Task", "place", "place_large"]

ON_TIME = 1.01  # of the bound: ends that count as level
_MOST_WIDENINGS = 12
_MOST_PLACINGS = 600  # of single tasks
_EPS = 1e-9
_FEW_PLACES = 64

# -sp_size, -seconds, start (in the sorted samples), count, grid index: sorted as they are placed
Task = tuple[int, float, int, int, int]
# blocks as (free from, first rank), sorted; their size; the first rank of each task
Placed = tuple[list[tuple[float, int]], int, list[int]]


def place_large(
    tasks: list[Task],
    fluid: float,
    grid: CostGrid,
    layout: Layout,
    speed: FloatArray | None = None,
) -> tuple[list[Task], Placed]:
    """Place, and widen the last to end while that helps.

    Args:
        tasks: Sorted when this returns.
        fluid: Rank-seconds that are to come besides.
        grid: Costs.
        layout: The blocks of ranks.
        speed: (W,) seconds at each place relative to the typical one; None: all alike.
    """
    w: float = layout.world_size if speed is None else float((1 / speed).sum())
    tasks.sort()
    if not tasks:
        return tasks, place(tasks, 0.0, layout, speed)
    area = fluid + sum(task[0] * task[1] for task in tasks)
    full = ON_TIME * area / w  # blocks are filled up to here; 0: always the one free first
    best = place(tasks, full, layout, speed)
    last = best[0][-1][0]
    if last > full:
        other = place(tasks, 0.0, layout, speed)
        if other[0][-1][0] < last:
            best, full = other, 0.0
            last = best[0][-1][0]
    best_end = max(last, area / w)
    # Among very many tasks one more or less does not matter.
    for _ in range(min(_MOST_WIDENINGS, 1 + _MOST_PLACINGS // len(tasks))):
        if last <= ON_TIME * area / w:
            break
        found = _wider(tasks, best, grid, layout.world_size)
        if found is None:
            break
        index, wide = found
        changed = tasks[:index] + tasks[index + 1 :]
        insort(changed, wide)
        placed = place(changed, full, layout, speed)
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


def place(
    tasks: list[Task], full_s: float, layout: Layout, speed: FloatArray | None = None
) -> Placed:
    """Each task, wide to narrow and long to short, onto a block.

    The one that is free last among those where it ends before ``full_s``, so that whole blocks
    stay free for long tasks of fewer ranks; where there is none, the one that is free first. With
    ranks of unlike ``speed`` (see ``place_large``), the one where it ends last or first.
    """
    w = layout.world_size
    p = -tasks[0][0] if tasks else 1
    blocks = layout.blocks(p)
    level = [(0.0, first) for first in blocks]
    rest: list[_Region] = [(0.0, len(blocks) * p, w)]
    first_ranks: list[int] = []
    for minus_p, minus_seconds, *_ in tasks:
        if -minus_p != p:
            level, rest = _halved(level, p, -minus_p, rest, layout)
            p = -minus_p
        if speed is None:
            at = bisect_right(level, (full_s + minus_seconds, w)) - 1 if full_s else 0
        else:
            at, minus_seconds = _where_it_ends(level, p, -minus_seconds, full_s, speed)
        free, first_rank = level.pop(max(at, 0))
        insort(level, (free - minus_seconds, first_rank))
        first_ranks.append(first_rank)
    if any(start < stop for _, start, stop in rest):
        level, _ = _halved(level, p, 1, rest, layout)
        p = 1
    return level, p, first_ranks


def _where_it_ends(
    level: list[tuple[float, int]], p: int, seconds: float, full_s: float, speed: FloatArray
) -> tuple[int, float]:
    """Index of the block for a task, and minus the seconds that it takes there."""
    if len(level) * p <= _FEW_PLACES:  # quicker than arrays
        best: tuple[bool, float] = (False, math.inf)
        at, took_s = 0, 0.0
        factors = speed.tolist()
        for i, (free, first) in enumerate(level):
            took_there = seconds * max(factors[first : first + p])
            end = free + took_there
            value = (end <= full_s, -end if end > full_s else end)
            if i == 0 or value > best:
                best, at, took_s = value, i, took_there
        return at, -took_s
    firsts = np.array([first for _, first in level])
    took = seconds * speed[firsts[:, None] + np.arange(p)].max(axis=1)
    ends = np.array([free for free, _ in level]) + took
    in_time = np.where(ends <= full_s, ends, -np.inf)
    at = int(np.argmax(in_time))
    if in_time[at] < 0:
        at = int(np.argmin(ends))
    return at, -float(took[at])


# (free from, first place, end) of ranks that are in no block of a size
_Region = tuple[float, int, int]


def _halved(
    level: list[tuple[float, int]], size: int, wanted: int, rest: list[_Region], layout: Layout
) -> tuple[list[tuple[float, int]], list[_Region]]:
    """Blocks of ``size`` as smaller ones, with those that the rest can make; and what is left.

    Where nodes are no powers of two, not every half of a block may be used; see ``layout.py``.
    """
    limit = layout.stop(wanted)
    blocks: list[tuple[float, int]] = []
    left: list[_Region] = []
    for free, start, stop in [*((free, first, first + size) for free, first in level), *rest]:
        starts = range(start, min(stop, limit) - wanted + 1, wanted)
        blocks += [(free, first) for first in starts]
        end = start + len(starts) * wanted
        if end < stop:
            left.append((free, end, stop))
    blocks.sort()
    return blocks, left

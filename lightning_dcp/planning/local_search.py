"""Steps of few samples: small changes as long as one helps.

With few samples it matters which of them share a micro-batch and how wide each is; there is no
crowd of short ones to level the ends. All neighbours of a schedule are tried: twice or half the
ranks for one micro-batch, one sample moved to another or alone, two samples exchanged, two
micro-batches joined.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_dcp.planning.cost_grid import CostGrid
from lightning_dcp.planning.fitting import FloatArray
from lightning_dcp.planning.layout import Layout
from lightning_dcp.planning.nesting import Task, place

__all__ = ["Group", "improve"]

_MOST_TRIES = 400


@dataclass(frozen=True)
class Group:
    """A micro-batch without a place: which samples, on how many ranks."""

    samples: tuple[int, ...]
    sp_size: int

    def task(self, index: int, g: Sequence[int], grid: CostGrid) -> Task:
        """As it is placed; ``index`` names it. Infinite seconds where it does not fit."""
        longest = max(g[i] for i in self.samples)
        count = len(self.samples)
        seconds = math.inf
        if count <= grid.batches[-1]:
            seconds = grid.seconds(grid.rows[self.sp_size][longest], count)
        return (-self.sp_size, -seconds, index, count, longest)


def improve(
    groups: Sequence[Group],
    g: Sequence[int],
    grid: CostGrid,
    layout: Layout,
    speed: FloatArray | None = None,
) -> tuple[list[Group], float]:
    """The best schedule found from several starts, and when it ends.

    Args:
        groups: A schedule.
        g: Grid index of each sample.
        grid: Costs.
        layout: The blocks of ranks.
        speed: (W,) seconds at each place relative to the typical one; None: all alike.
    """
    sizes = [p for p in grid.sp_sizes if layout.blocks(p)]
    starts = [list(groups)]
    for p in sizes:
        starts.append([Group((i,), p) for i in range(len(g))])
    by_length = sorted(range(len(g)), key=lambda i: -g[i])
    for p in sizes:
        num = min(len(layout.blocks(p)), len(g))
        starts.append([Group(tuple(by_length[i::num]), p) for i in range(num)])
    best, best_value = list(groups), (math.inf, math.inf)
    tries = [_MOST_TRIES]
    for start in starts:
        found, value = _descend(start, g, grid, layout, speed, sizes, tries)
        if value < best_value:
            best, best_value = found, value
    return best, best_value[0]


# end of the step, then rank-seconds: of equal ends the cheaper leaves more room
_Value = tuple[float, float]


def _value(
    groups: list[Group],
    g: Sequence[int],
    grid: CostGrid,
    layout: Layout,
    speed: FloatArray | None,
) -> _Value:
    tasks = sorted(group.task(i, g, grid) for i, group in enumerate(groups))
    area = sum(task[0] * task[1] for task in tasks)
    if math.isinf(area):
        return math.inf, math.inf
    return place(tasks, 0.0, layout, speed)[0][-1][0], area


def _descend(
    groups: list[Group],
    g: Sequence[int],
    grid: CostGrid,
    layout: Layout,
    speed: FloatArray | None,
    sizes: Sequence[int],
    tries: list[int],
) -> tuple[list[Group], _Value]:
    value = _value(groups, g, grid, layout, speed)
    while tries[0] > 0:
        best, best_value = groups, value
        for other in _neighbours(groups, sizes):
            tries[0] -= 1
            other_value = _value(other, g, grid, layout, speed)
            if other_value < best_value:
                best, best_value = other, other_value
        if best_value >= value:
            break
        groups, value = best, best_value
    return groups, value


def _neighbours(groups: list[Group], sizes: Sequence[int]) -> Iterator[list[Group]]:
    for i, group in enumerate(groups):
        rest = groups[:i] + groups[i + 1 :]
        for p in sizes:
            if p != group.sp_size:
                yield [*rest, Group(group.samples, p)]
        for j in range(i + 1, len(groups)):
            others = groups[:i] + groups[i + 1 : j] + groups[j + 1 :]
            for p in {group.sp_size, groups[j].sp_size}:
                yield [*others, Group(group.samples + groups[j].samples, p)]
        if len(group.samples) > 1:
            for sample in group.samples:
                left = Group(tuple(s for s in group.samples if s != sample), group.sp_size)
                yield [*rest, left, Group((sample,), group.sp_size)]
                for j, other in enumerate(groups):
                    if j != i:
                        among = [x for k, x in enumerate(groups) if k not in (i, j)]
                        more = Group((*other.samples, sample), other.sp_size)
                        yield [*among, left, more]
    for (i, a), (j, b) in itertools.combinations(enumerate(groups), 2):
        rest = [x for k, x in enumerate(groups) if k not in (i, j)]
        for one, two in itertools.product(a.samples, b.samples):
            swapped_a = Group(tuple(two if s == one else s for s in a.samples), a.sp_size)
            swapped_b = Group(tuple(one if s == two else s for s in b.samples), b.sp_size)
            yield [*rest, swapped_a, swapped_b]

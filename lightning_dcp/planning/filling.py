"""Short samples: cut into micro-batches to the measure of what is free on each rank."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from lightning_dcp.planning.cost_grid import CostGrid
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.micro_batches import MicroBatches

__all__ = ["AMORTISED", "Filler", "level_of"]

_LEAST_GAP = 0.004  # of the step: smaller gaps are not worth a micro-batch
AMORTISED = 4.0  # micro-batches that take less than this many times their fixed costs are small
_TIGHT = 8.0  # micro-batches of less than this: what a further one costs matters
_LEVEL_ERROR = 0.01
_EPS = 1e-9


class Filler:
    """Fills the ranks with micro-batches of one rank each.

    Args:
        grid: Costs.
        world_size: Ranks W.
        max_steps: Gmax; None: no limit.
    """

    def __init__(self, grid: CostGrid, world_size: int, max_steps: int | None) -> None:
        self.grid = grid
        self.world_size = world_size
        self.max_steps = max_steps
        self._inflation = 1.0  # rank-seconds as placed / cheapest rank-seconds, lately

    def fill_all(
        self,
        gs: list[int],
        start: int,
        order: IntArray,
        free: list[float],
        fluid: float,
        cap_s: float,
        out: MicroBatches,
    ) -> None:
        """All samples from ``start`` onto the ranks, so that they end together."""
        level = max(level_of(free, fluid * self._inflation), max(free))
        waiting = list(range(start, len(gs)))
        row = self.grid.rows[1][gs[-1]]
        fixed_s = row[0] - self.grid.per_sample[1][gs[-1]]
        if cap_s < _TIGHT * fixed_s:
            cap_s = math.inf
            level = self._tight_level(gs, waiting, order, free, level)
        busy_before = sum(free)
        left = self._fill(gs, waiting, order, free, level, cap_s, out)
        if left:
            self._level_rest(gs, left, order, free, out)
        placed = sum(free) - busy_before
        if fluid > 0:
            self._inflation += 0.2 * (min(max(placed / fluid, 1.0), 1.5) - self._inflation)

    def _tight_level(
        self, gs: list[int], waiting: list[int], order: IntArray, free: list[float], low: float
    ) -> float:
        """Least time by which all can end, where fixed costs rule.

        The sum of cheapest rank-seconds says little then: it thinks of micro-batches that are as
        large as can be.
        """

        def fits(level: float) -> bool:
            return not self._fill(gs, waiting, order, list(free), level, math.inf, MicroBatches())

        base = min(free)
        step = max(low - base, self.grid.rows[1][gs[waiting[0]]][0]) * (1 + _EPS)
        low, high = base, base + step
        while not fits(high):
            low, high = high, base + 2 * (high - base)
        while high - low > _LEVEL_ERROR * (high - base):
            middle = 0.5 * (low + high)
            if fits(middle):
                high = middle
            else:
                low = middle
        return high

    def _fill(
        self,
        gs: list[int],
        waiting: list[int],
        order: IntArray,
        free: list[float],
        level: float,
        cap_s: float,
        out: MicroBatches,
    ) -> list[int]:
        """Cut micro-batches to the measure of what is free before ``level``; returns the rest.

        The rank with most time left takes the next: a whole share of it, so that its last
        micro-batch ends at the level. ``waiting`` is sorted, long to short.
        """
        rows, batches = self.grid.rows[1], self.grid.batches
        each = self.grid.per_sample[1]
        work = [0.0, *itertools.accumulate(each[gs[i]] for i in waiting)]
        heap = [(busy - level, rank) for rank, busy in enumerate(free) if busy < level]
        heapq.heapify(heap)
        late: list[int] = []
        samples, counts, ranks = out.samples, out.count, out.first_rank
        i, end = 0, len(waiting)
        most_steps, useful = self.max_steps, self.grid.useful[1]
        while i < end and heap:
            minus_gap, rank = heap[0]
            gap = -minus_gap
            row = rows[gs[waiting[i]]]
            steps = max(math.ceil(gap / cap_s - 0.05), 1)
            if most_steps is not None and steps > most_steps:
                steps = most_steps
            j = bisect_right(row, gap / steps * (1 + _EPS)) if steps > 1 else 0
            if j == 0:
                j = bisect_right(row, gap * (1 + _EPS))
                if j == 0:
                    late.append(waiting[i])
                    i += 1
                    continue
                if steps > 1:
                    j = 1
            if most_steps is None and j > useful[gs[waiting[i]]]:
                j = useful[gs[waiting[i]]]
            count = min(batches[j - 1], end - i)
            if count > 1:  # NOTE (padding)
                own = each[gs[waiting[i]]]
                spare = row[0] - own
                while count > 1 and own * count - (work[i + count] - work[i]) > spare:
                    count -= 1 + count // 8
            seconds = row[count - 1] if count <= 16 else row[bisect_right(batches, count - 1)]
            first, last = waiting[i], waiting[i + count - 1]
            in_one_piece = last - first == count - 1
            samples.append(
                order[first : last + 1] if in_one_piece else order[waiting[i : i + count]]
            )
            counts.append(count)
            ranks.append(rank)
            free[rank] += seconds
            i += count
            heapq.heapreplace(heap, (minus_gap + seconds, rank))
        out.sp_size.extend([1] * (len(counts) - len(out.sp_size)))
        return late + waiting[i:]

    def _level_rest(
        self, gs: list[int], left: list[int], order: IntArray, free: list[float], out: MicroBatches
    ) -> None:
        """The few samples that did not fit, in small micro-batches, each to the next free rank."""
        rows, batches = self.grid.rows[1], self.grid.batches
        rank_s = self.grid.choice().rank_s
        each = sum(rank_s[gs[i]] for i in left) / self.world_size * (1 + _EPS)
        heap = [(busy, rank) for rank, busy in enumerate(free)]
        heapq.heapify(heap)
        i, end = 0, len(left)
        while i < end:
            busy, rank = heap[0]
            row = rows[gs[left[i]]]
            count = min(batches[max(bisect_right(row, each), 1) - 1], end - i)
            free[rank] = busy + self.grid.seconds(row, count)
            out.samples.append(order[left[i : i + count]])
            out.count.append(count)
            out.sp_size.append(1)
            out.first_rank.append(rank)
            heapq.heapreplace(heap, (free[rank], rank))
            i += count

    def fill_gaps(
        self, optional: IntArray, offset: int, free: list[float], end: float, out: MicroBatches
    ) -> None:
        """Into what is free before ``end``: the longest of the optional samples that fit."""
        if 1 not in self.grid.times:
            return
        rows, batches = self.grid.rows[1], self.grid.batches
        least = _LEAST_GAP * end
        gaps = sorted(((end - busy, rank) for rank, busy in enumerate(free)), reverse=True)
        order = np.argsort(-optional, kind="stable")
        gs = optional[order].tolist()
        i, stop = 0, len(gs)
        for gap, rank in gaps:
            if gap < least:
                break
            while gap >= least:
                while i < stop and rows[gs[i]][0] > gap:
                    i += 1
                if i >= stop:
                    return
                row = rows[gs[i]]
                count = min(batches[bisect_right(row, gap) - 1], stop - i)
                out.samples.append(order[i : i + count] + offset)
                out.count.append(count)
                out.sp_size.append(1)
                out.first_rank.append(rank)
                seconds = self.grid.seconds(row, count)
                free[rank] += seconds
                gap -= seconds
                i += count


def level_of(free: Sequence[float], area: float) -> float:
    """Time at which all ranks end if ``area`` rank-seconds flow to where it is lowest."""
    height = np.sort(np.asarray(free))
    n = np.arange(1, len(height) + 1)
    # With the n lowest ranks filled up to level, area = n level - sum of them.
    levels = (np.cumsum(height) + area) / n
    above = np.append(height[1:], np.inf)
    return float(levels[np.argmax(levels <= above)])

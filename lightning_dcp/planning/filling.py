"""Short samples: cut into micro-batches to the measure of what is free on each rank."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from lightning_dcp.planning.cost_grid import CostGrid
from lightning_dcp.planning.fitting import FloatArray
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.micro_batches import MicroBatches

__all__ = ["AMORTISED", "Filler", "level_of"]

_LEAST_GAP = 0.004  # of the step: smaller gaps are not worth a micro-batch
AMORTISED = 4.0  # micro-batches that take less than this many times their fixed costs are small
_TIGHT = 16.0  # steps of less than this: what a further micro-batch costs matters
_LEVEL_ERROR = 0.01
_EPS = 1e-9


class Filler:
    """Fills the ranks with micro-batches of one rank each.

    Args:
        grid: Costs.
        world_size: Ranks W.
        max_steps: Gmax; None: no limit.
        speed: (W,) seconds at each place relative to the typical one; None: all alike.
    """

    def __init__(
        self,
        grid: CostGrid,
        world_size: int,
        max_steps: int | None,
        speed: FloatArray | None = None,
    ) -> None:
        self.grid = grid
        self.world_size = world_size
        self.max_steps = max_steps
        self._speed = speed
        self._factor: list[float] = [1.0] * world_size if speed is None else speed.tolist()
        self._inflation = 1.0  # rank-seconds as placed / cheapest rank-seconds, lately

    def fill_all(
        self,
        g: IntArray,
        places: IntArray,
        free: list[float],
        fluid: float,
        cap_s: float,
        out: MicroBatches,
    ) -> None:
        """Put all samples onto the ranks, so that they end together.

        Args:
            g: (n,) their grid indices, falling.
            places: (n,) what the result calls them.
            free: (W,) when each rank is free; brought up to date.
            fluid: Their cheapest rank-seconds.
            cap_s: Seconds of a micro-batch at most, where that leaves fixed costs small.
            out: Where the micro-batches go.
        """
        level = max(level_of(free, fluid * self._inflation, self._speed), max(free))
        gs = g.tolist()
        each = self.grid.per_sample[1]
        work = np.concatenate([[0.0], np.cumsum(self.grid.per_sample_s[1][g])]).tolist()
        fixed_s = self.grid.rows[1][gs[-1]][0] - each[gs[-1]]
        cap_s = max(cap_s, AMORTISED * fixed_s)
        if level < _TIGHT * fixed_s:
            cap_s = math.inf
            level = self._tight_level(gs, work, free, level)
        busy_before = self._work(free)
        starts, counts, ranks, left = self._fill(gs, work, free, level, cap_s)
        out.samples.extend([places[i : i + n] for i, n in zip(starts, counts, strict=True)])
        out.count.extend(counts)
        out.first_rank.extend(ranks)
        out.sp_size.extend([1] * len(counts))
        if left:
            self._level_rest([gs[i] for i in left], places[left], free, out)
        placed = self._work(free) - busy_before
        if fluid > 0:
            self._inflation += 0.2 * (min(max(placed / fluid, 1.0), 1.5) - self._inflation)

    def _work(self, free: list[float]) -> float:
        """Rank-seconds of typical ranks until each is free."""
        if self._speed is None:
            return sum(free)
        return sum(busy / factor for busy, factor in zip(free, self._factor, strict=True))

    def _tight_level(
        self, gs: list[int], work: list[float], free: list[float], low: float
    ) -> float:
        """Least time by which all can end, where fixed costs rule.

        The sum of cheapest rank-seconds says little then: it thinks of micro-batches that are as
        large as can be.
        """

        def fits(level: float) -> bool:
            return not self._fill(gs, work, list(free), level, math.inf)[-1]

        base = min(free)
        step = max(low - base, self.grid.rows[1][gs[0]][0]) * (1 + _EPS)
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
        self, gs: list[int], work: list[float], free: list[float], level: float, cap_s: float
    ) -> tuple[list[int], list[int], list[int], list[int]]:
        """Cut micro-batches to the measure of what is free before ``level``.

        The rank with most time left takes the next: a whole share of it, so that its last
        micro-batch ends at the level.

        Args:
            gs: Grid indices, falling.
            work: Running sum of their seconds at p = 1, with a leading 0.
            free: When each rank is free; brought up to date.
            level: When all shall end.
            cap_s: Seconds of a micro-batch at most.

        Returns:
            Start, count and rank of each micro-batch, and the samples that did not fit.
        """
        rows, batches = self.grid.rows[1], self.grid.batches
        each, useful, most_steps = self.grid.per_sample[1], self.grid.useful[1], self.max_steps
        factor = self._factor  # gaps are in the seconds of a typical rank
        heap = [
            ((busy - level) / factor[rank], rank) for rank, busy in enumerate(free) if busy < level
        ]
        heapq.heapify(heap)
        replace, more = heapq.heapreplace, 1 + _EPS
        starts: list[int] = []
        counts: list[int] = []
        ranks: list[int] = []
        late: list[int] = []
        i, end = 0, len(gs)
        while i < end and heap:
            minus_gap, rank = heap[0]
            gap = -minus_gap * more
            g = gs[i]
            row = rows[g]
            steps = math.ceil(gap / cap_s - 0.05)
            if most_steps is not None and steps > most_steps:
                steps = most_steps
            j = bisect_right(row, gap / steps) if steps > 1 else bisect_right(row, gap)
            if j == 0:
                if row[0] > gap:
                    late.append(i)
                    i += 1
                    continue
                j = 1
            if most_steps is None and j > useful[g]:
                j = useful[g]
            count = batches[j - 1]
            if count > end - i:
                count = end - i
            if count > 1 and most_steps is None:  # see NOTE (padding) in makespan.py
                own = each[g]
                spare = row[0] - own - work[i]
                while count > 1 and own * count - work[i + count] > spare:
                    count -= 1 + count // 8
            seconds = row[count - 1] if count <= 16 else row[bisect_right(batches, count - 1)]
            starts.append(i)
            counts.append(count)
            ranks.append(rank)
            free[rank] += seconds * factor[rank]
            i += count
            replace(heap, (minus_gap + seconds, rank))
        late.extend(range(i, end))
        return starts, counts, ranks, late

    def _level_rest(
        self, gs: list[int], places: IntArray, free: list[float], out: MicroBatches
    ) -> None:
        """The few samples that did not fit, in small micro-batches, each to the next free rank."""
        rows, batches = self.grid.rows[1], self.grid.batches
        rank_s = self.grid.choice().rank_s
        each = sum(rank_s[gs].tolist()) / self.world_size * (1 + _EPS)
        # By when it would have run another one, if ranks are not alike.
        late = [(factor - 1.0) * each for factor in self._factor]
        heap = [(busy + late[rank], rank) for rank, busy in enumerate(free)]
        heapq.heapify(heap)
        i, end = 0, len(gs)
        while i < end:
            _, rank = heap[0]
            row = rows[gs[i]]
            count = min(batches[max(bisect_right(row, each), 1) - 1], end - i)
            free[rank] += self.grid.seconds(row, count) * self._factor[rank]
            out.add(places[i : i + count], 1, rank)
            heapq.heapreplace(heap, (free[rank] + late[rank], rank))
            i += count

    def fill_gaps(
        self, optional: IntArray, offset: int, free: list[float], end: float, out: MicroBatches
    ) -> None:
        """Into what is free before ``end``: the longest of the optional samples that fit."""
        if 1 not in self.grid.times:
            return
        rows, batches = self.grid.rows[1], self.grid.batches
        least = _LEAST_GAP * end
        factor = self._factor
        gaps = sorted(
            (((end - busy) / factor[rank], rank) for rank, busy in enumerate(free)), reverse=True
        )
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
                out.add(order[i : i + count] + offset, 1, rank)
                seconds = self.grid.seconds(row, count)
                free[rank] += seconds * factor[rank]
                gap -= seconds
                i += count


def level_of(free: Sequence[float], area: float, speed: FloatArray | None = None) -> float:
    """Time at which all ranks end if ``area`` rank-seconds flow to where it is lowest.

    Args:
        free: (W,) when each is free.
        area: Seconds of typical ranks.
        speed: (W,) seconds of each relative to a typical one; None: all alike.
    """
    height = np.sort(np.asarray(free))
    if speed is not None:
        order = np.argsort(np.asarray(free), kind="stable")
        share = 1 / speed[order]
        levels = (np.cumsum(height * share) + area) / np.cumsum(share)
        return float(levels[np.argmax(levels <= np.append(height[1:], np.inf))])
    n = np.arange(1, len(height) + 1)
    # With the n lowest ranks filled up to level, area = n level - sum of them.
    levels = (np.cumsum(height) + area) / n
    above = np.append(height[1:], np.inf)
    return float(levels[np.argmax(levels <= above)])

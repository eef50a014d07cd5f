"""Given samples, W ranks and costs: micro-batches that end as early as possible.

Three phases::

    large    samples that take a good part of the step, and all that is cheapest on several ranks;
             wide groups first, so that blocks nest, each onto the block that is free first. As
             long as one ends late while others idle, the last to end gets twice the ranks.
    fill     the many short samples, longest first, cut into micro-batches to the measure of what is
             still free on each rank; the shortest come last and level the ends.
    gaps     what is free even so may take samples that are due soon (elastic policies).

NOTE (padding): samples share a micro-batch, padded to the longest, since a micro-batch has fixed
costs, ``T(1) - min_b T(b) / b``. When padding has wasted as much, the next sample opens another:
for lengths that are spread evenly this is the optimum, where fixed costs and padding are equal.

Scheduling jobs that may run at several widths is NP-hard; the bound to compare with is
``sum of the cheapest rank-seconds / W``.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_dcp.planning.cost_grid import CostGrid
from lightning_dcp.planning.lengths import IntArray

__all__ = ["MicroBatches", "StepScheduler"]

_LARGE = 0.25  # of the step: single samples above it are placed one by one
_ON_TIME = 1.01  # of the bound: ends that count as level
_LEAST_GAP = 0.004  # of the step: smaller gaps are not worth a micro-batch
_MOST_WIDENINGS = 12
_LEVEL_ENOUGH = 1.02  # of the bound: no other limits are tried
_FACTORS = (1.3, 0.75, 1.7, 2.2)
_MEMORY = 0.9  # of how often each factor has won
_EPS = 1e-9


@dataclass(eq=False)
class MicroBatches:
    """Micro-batches of one iteration in global order, in columns.

    ``samples`` holds places in the arrays that were scheduled, one micro-batch after the other.
    """

    samples: list[IntArray] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    sp_size: list[int] = field(default_factory=list)
    first_rank: list[int] = field(default_factory=list)
    end_s: float = 0.0

    @property
    def most_steps(self) -> int:
        """Micro-batches of the rank that has most."""
        steps = Counter[int]()
        for first, p in zip(self.first_rank, self.sp_size, strict=True):
            steps.update(range(first, first + p))
        return max(steps.values())


# -sp_size, -seconds, start (in the sorted samples), count, grid index: sorted as they are placed
_Task = tuple[int, float, int, int, int]
# blocks as (free from, first rank), sorted; their size; the first rank of each task
_Placed = tuple[list[tuple[float, int]], int, list[int]]


@dataclass(frozen=True, eq=False)
class _Attempt:
    """Large samples placed; the others are thought of as a fluid."""

    order: IntArray  # (n,) the samples sorted, large ones first
    gs: list[int]  # (n,) their grid indices
    num_large: int
    tasks: list[_Task]
    first_ranks: list[int]
    free: list[float]  # (W,) when each rank has ended its large samples
    fluid: float  # rank-seconds of the short samples
    bound_s: float
    end_s: float


class StepScheduler:
    """Schedules iterations, one after the other.

    Args:
        grid: Costs.
        world_size: Ranks W.
        share: Micro-batches of short samples take about this share of the step.
        min_steps: Gmin.
        max_steps: Gmax; None: no limit.
    """

    def __init__(
        self,
        grid: CostGrid,
        *,
        world_size: int,
        share: float = 0.2,
        min_steps: int = 1,
        max_steps: int | None = None,
    ) -> None:
        self.grid = grid
        self.world_size = world_size
        self.share = min(share, 1.0 / min_steps)
        self.min_steps = min_steps
        self.max_steps = max_steps
        self._wins = dict.fromkeys(_FACTORS, 0.0)
        self._turn = 0
        self._inflation = 1.0  # rank-seconds as placed / cheapest rank-seconds, lately

    def bound_s(self, g: IntArray) -> float:
        """Seconds of a step of these samples if nothing idled and all ran at their cheapest."""
        return float(self.grid.choice().rank_s[g].sum()) / self.world_size

    def schedule(self, g: IntArray, optional: IntArray | None = None) -> MicroBatches:
        """Schedule one iteration.

        Args:
            g: (n,) grid indices of the samples that must run.
            optional: (m,) grid indices of samples that may fill gaps. In the result they have the
                places n, n + 1, ...
        """
        bound = self.bound_s(g)
        # Samples that must be wide to end in time make the step longer, which others then can use.
        for _ in range(3):
            longer = float(self.grid.choice(bound).rank_s[g].sum()) / self.world_size
            if longer <= _ON_TIME * bound:
                break
            bound = longer
        best = self._attempt(g, bound)
        if best.end_s > _LEVEL_ENOUGH * best.bound_s:
            best = self._other_limits(g, bound, best)
        order, gs, free, fluid = best.order, best.gs, best.free, best.fluid
        num_large, cap = best.num_large, self.share * best.bound_s
        out = MicroBatches()
        for minus_p, _, start, count, _ in best.tasks:
            out.samples.append(order[start : start + count])
            out.count.append(count)
            out.sp_size.append(-minus_p)
        out.first_rank.extend(best.first_ranks)
        if num_large < len(gs):
            self._fill_all(gs, num_large, order, free, fluid, cap, out)
        end = max(free)
        if optional is not None and len(optional):
            self._fill_gaps(optional, len(g), free, end, out)
        if self.min_steps > 1:
            self._split_to_minimum(out)
        out.end_s = end
        return out

    # Large samples ---------------------------------------------------------------------------

    def _other_limits(self, g: IntArray, bound: float, best: _Attempt) -> _Attempt:
        """Two other limits than the step itself: the one that won most lately, and each in turn."""
        wins = self._wins
        favourite = max(_FACTORS, key=wins.__getitem__)
        others = [factor for factor in _FACTORS if factor != favourite]
        self._turn += 1
        for factor in (favourite, others[self._turn % len(others)]):
            other = self._attempt(g, factor * bound)
            won = other.end_s < best.end_s * (1 - 1e-6)
            wins[factor] = _MEMORY * wins[factor] + won
            if won:
                best = other
        return best

    def _attempt(self, g: IntArray, limit_s: float) -> _Attempt:
        """Place the large samples, if each sample alone may take ``limit_s``."""
        grid = self.grid
        choice = grid.choice(limit_s)
        rank_s = choice.rank_s[g]
        area = float(rank_s.sum())
        bound = max(area / self.world_size, 1e-12)
        sp_index = choice.sp_index[g]
        large = (sp_index > 0) | (choice.single_s[g] > _LARGE * bound)
        if grid.sp_sizes[0] > 1:
            large[:] = True
        # Large ones first, wide to narrow, long to short.
        key = (large * len(grid.sp_sizes) + np.where(large, sp_index, 0)) * len(grid.lengths) + g
        order = np.argsort(-key, kind="stable")
        num_large = int(np.count_nonzero(large))
        gs = g[order].tolist()
        tasks = self._tasks(gs, sp_index[order[:num_large]].tolist(), self.share * bound)
        fluid = area - float(rank_s[large].sum())
        tasks, (level, p, first_ranks) = self._place_large(tasks, fluid)
        free = [0.0] * self.world_size
        for end, first in level:
            free[first : first + p] = [end] * p
        end = max(max(free), _level(free, fluid)) if fluid > 0 else max(free)
        return _Attempt(order, gs, num_large, tasks, first_ranks, free, fluid, bound, end)

    def _tasks(self, gs: list[int], sp_index: list[int], cap_s: float) -> list[_Task]:
        """Cut the large samples, sorted, into micro-batches of one SP size each."""
        grid = self.grid
        tasks: list[_Task] = []
        i, end = 0, len(sp_index)
        while i < end:
            k, g = sp_index[i], gs[i]
            p = grid.sp_sizes[k]
            row = grid.rows[p][g]
            j = bisect_right(row, max(cap_s * (1 + _EPS), row[0])) - 1
            if self.max_steps is None:
                j = min(j, grid.useful[p][g] - 1)
            most = min(end, i + grid.batches[j])
            each = grid.per_sample[p]
            same = i + 1
            waste, spare = 0.0, row[0] - each[g]  # see NOTE (padding)
            while same < most and sp_index[same] == k:
                waste += each[g] - each[gs[same]]
                if waste > spare:
                    break
                same += 1
            count = same - i
            tasks.append((-p, -self._seconds(row, count), i, count, g))
            i = same
        return tasks

    def _seconds(self, row: list[float], count: int) -> float:
        batches = self.grid.batches
        return row[count - 1] if count <= 16 else row[bisect_right(batches, count - 1)]

    def _place_large(self, tasks: list[_Task], fluid: float) -> tuple[list[_Task], _Placed]:
        """Place, and widen the last to end while that helps."""
        w = self.world_size
        tasks.sort()
        if not tasks:
            return tasks, self._place(tasks, 0.0)
        area = fluid + sum(task[0] * task[1] for task in tasks)
        full = _ON_TIME * area / w  # blocks are filled up to here; 0: always the one free first
        best = self._place(tasks, full)
        last = best[0][-1][0]
        if last > full:
            other = self._place(tasks, 0.0)
            if other[0][-1][0] < last:
                best, full = other, 0.0
                last = best[0][-1][0]
        best_end = max(last, area / w)
        for _ in range(_MOST_WIDENINGS):
            if last <= _ON_TIME * area / w:
                break
            found = self._wider(tasks, best)
            if found is None:
                break
            index, wide = found
            changed = tasks[:index] + tasks[index + 1 :]
            insort(changed, wide)
            placed = self._place(changed, full)
            more = area - tasks[index][0] * tasks[index][1] + wide[0] * wide[1]
            last = placed[0][-1][0]
            end = max(last, more / w)
            if end > best_end:
                break
            tasks, best, best_end, area = changed, placed, end, more
        return tasks, best

    def _wider(self, tasks: list[_Task], placed: _Placed) -> tuple[int, _Task] | None:
        """A task of the block that ends last, by its index, and the same on twice the ranks."""
        level, _, first_ranks = placed
        _, last = level[-1]
        for index in range(len(tasks) - 1, -1, -1):
            first = first_ranks[index]
            if first <= last < first - tasks[index][0]:
                minus_p, _, start, count, g = tasks[index]
                row = self.grid.rows.get(-2 * minus_p)
                if row is None or -2 * minus_p > self.world_size:
                    continue
                seconds = self._seconds(row[g], count)
                if seconds < math.inf:
                    return index, (2 * minus_p, -seconds, start, count, g)
        return None

    def _place(self, tasks: list[_Task], full_s: float) -> _Placed:
        """Each task, wide to narrow and long to short, onto a block.

        The one that is free last among those where it ends before ``full_s``, so that whole blocks
        stay free for long tasks of fewer ranks; where there is none, the one that is free first.
        """
        w = self.world_size
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

    # Short samples ---------------------------------------------------------------------------

    def _fill_all(
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
        level = max(_level(free, fluid * self._inflation), max(free))
        waiting = list(range(start, len(gs)))
        busy_before = sum(free)
        left = self._fill(gs, waiting, order, free, level, cap_s, out)
        if left:
            self._level_rest(gs, left, order, free, out)
        placed = sum(free) - busy_before
        if fluid > 0:
            self._inflation += 0.2 * (min(max(placed / fluid, 1.0), 1.5) - self._inflation)

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
            steps = math.ceil(gap / cap_s - 0.05)
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
            free[rank] = busy + self._seconds(row, count)
            out.samples.append(order[left[i : i + count]])
            out.count.append(count)
            out.sp_size.append(1)
            out.first_rank.append(rank)
            heapq.heapreplace(heap, (free[rank], rank))
            i += count

    def _fill_gaps(
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
                seconds = self._seconds(row, count)
                free[rank] += seconds
                gap -= seconds
                i += count

    def _split_to_minimum(self, out: MicroBatches) -> None:
        """Halve micro-batches of one rank until it has accumulated Gmin, if none has."""
        steps = [0] * self.world_size
        samples = [0] * self.world_size
        for first, p, count in zip(out.first_rank, out.sp_size, out.count, strict=True):
            for rank in range(first, first + p):
                steps[rank] += 1
                samples[rank] += count
        keeper = max(range(self.world_size), key=samples.__getitem__)
        missing = 0 if max(steps) >= self.min_steps else self.min_steps - steps[keeper]
        while missing > 0:
            own = [
                i
                for i, (first, p) in enumerate(zip(out.first_rank, out.sp_size, strict=True))
                if first <= keeper < first + p and out.count[i] > 1
            ]
            if not own:
                return
            i = max(own, key=out.count.__getitem__)
            half = out.count[i] // 2
            whole = out.samples[i]
            out.samples[i : i + 1] = [whole[:half], whole[half:]]
            out.count[i : i + 1] = [half, len(whole) - half]
            out.sp_size.insert(i, out.sp_size[i])
            out.first_rank.insert(i, out.first_rank[i])
            missing -= 1


def _halved(
    level: list[tuple[float, int]], size: int, wanted: int, tail: int, world_size: int
) -> tuple[list[tuple[float, int]], int]:
    """Blocks of ``size`` as smaller ones, with those that the ranks from ``tail`` on can make."""
    blocks = [(free, first + i) for free, first in level for i in range(0, size, wanted)]
    blocks += [(0.0, first) for first in range(tail, world_size - wanted + 1, wanted)]
    blocks.sort()
    return blocks, world_size - world_size % wanted


def _level(free: Sequence[float], area: float) -> float:
    """Time at which all ranks end if ``area`` rank-seconds flow to where it is lowest."""
    height = np.sort(np.asarray(free))
    n = np.arange(1, len(height) + 1)
    # With the n lowest ranks filled up to level, area = n level - sum of them.
    levels = (np.cumsum(height) + area) / n
    above = np.append(height[1:], np.inf)
    return float(levels[np.argmax(levels <= above)])

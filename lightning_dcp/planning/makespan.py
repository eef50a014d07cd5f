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

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from lightning_dcp.planning.cost_grid import CostGrid
from lightning_dcp.planning.filling import AMORTISED, Filler, level_of
from lightning_dcp.planning.fitting import FloatArray
from lightning_dcp.planning.layout import Layout
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.local_search import Group, improve
from lightning_dcp.planning.micro_batches import MicroBatches
from lightning_dcp.planning.nesting import ON_TIME, Task, place, place_large

__all__ = ["StepScheduler"]

_LARGE = 0.25  # of the step: samples above it are placed one by one
_LEVEL_ENOUGH = 1.02  # of the bound: nothing else is tried
_FACTORS = (1.3, 0.75, 1.7, 2.2)
_MEMORY = 0.9  # of how often each factor has won
_FEW = 6  # samples for which a local search is quick
_MOST_SEARCHES = 1500  # in one epoch: a few seconds of planning
_MANY = 200  # large samples, for which trying takes its time
_EPS = 1e-9


@dataclass(frozen=True, eq=False)
class _Attempt:
    """Large samples placed; the others are thought of as a fluid."""

    order: IntArray  # (n,) the samples sorted, large ones first
    num_large: int
    tasks: list[Task]
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
        layout: The blocks of ranks; default: all aligned ones.
        speed: (W,) seconds at each place relative to the typical one; None: all alike.
    """

    def __init__(
        self,
        grid: CostGrid,
        *,
        world_size: int,
        share: float = 0.2,
        min_steps: int = 1,
        max_steps: int | None = None,
        layout: Layout | None = None,
        speed: FloatArray | None = None,
    ) -> None:
        self.grid = grid
        self.world_size = world_size
        self.layout = Layout.plain(world_size) if layout is None else layout
        self.speed = speed
        #: How many typical ranks all ranks are worth.
        self.capacity: float = world_size if speed is None else float((1 / speed).sum())
        least = 0.0 if max_steps is None else 1.0 / max_steps
        self.share = min(max(share, least), 1.0 / min_steps)
        self.min_steps = min_steps
        self.max_steps = max_steps
        self._filler = Filler(grid, world_size, max_steps, speed)
        self._wins = dict.fromkeys(_FACTORS, 0.0)
        self._turn = 0
        self._searches = 0

    def bound_s(self, g: IntArray) -> float:
        """Seconds of a step of these samples if nothing idled and all ran at their cheapest."""
        return float(self.grid.choice().rank_s[g].sum()) / self.capacity

    def schedule(self, g: IntArray, optional: IntArray | None = None) -> MicroBatches:
        """Schedule one iteration.

        Args:
            g: (n,) grid indices of the samples that must run.
            optional: (m,) grid indices of samples that may fill gaps. In the result they have the
                places n, n + 1, ...
        """
        longest = float(self.grid.quickest_s[g].max())
        bound = max(self.bound_s(g), longest)
        # Samples that must be wide to end in time make the step longer, which others then can use.
        for _ in range(3):
            longer = float(self.grid.choice(bound).rank_s[g].sum()) / self.capacity
            if longer <= ON_TIME * bound:
                break
            bound = longer
        best = self._attempt(g, bound, longest)
        if best.end_s > _LEVEL_ENOUGH * best.bound_s:
            best = self._other_limits(g, bound, longest, best)
        order, free = best.order, best.free
        out = MicroBatches()
        for (minus_p, _, start, count, _), first_rank in zip(
            best.tasks, best.first_ranks, strict=True
        ):
            out.add(order[start : start + count], -minus_p, first_rank)
        if best.num_large < len(g):
            cap = self.share * best.bound_s
            short = order[best.num_large :]
            self._filler.fill_all(g[short], short, free, best.fluid, cap, out)
        out.end_s = max(free)
        few = len(g) <= _FEW and self._searches < _MOST_SEARCHES
        if few and out.end_s > _LEVEL_ENOUGH * max(self.bound_s(g), longest):
            out, free = self._search(g, out, free)
        if optional is not None and len(optional):
            self._filler.fill_gaps(optional, len(g), free, out.end_s, out)
        if self.min_steps > 1:
            out.split_to_minimum(self.min_steps, self.world_size)
        return out

    def _search(
        self, g: IntArray, found: MicroBatches, free: list[float]
    ) -> tuple[MicroBatches, list[float]]:
        """Few samples: a local search from what was found."""
        self._searches += 1
        groups = [
            Group(tuple(samples.tolist()), p)
            for samples, p in zip(found.samples, found.sp_size, strict=True)
        ]
        groups, end = improve(groups, g.tolist(), self.grid, self.layout, self.speed)
        if end >= found.end_s * (1 - 1e-6):
            return found, free
        out = MicroBatches(end_s=end)
        tasks = sorted(group.task(i, g.tolist(), self.grid) for i, group in enumerate(groups))
        level, size, first_ranks = place(tasks, 0.0, self.layout, self.speed)
        for task, first_rank in zip(tasks, first_ranks, strict=True):
            group = groups[task[2]]
            out.add(np.array(group.samples), group.sp_size, first_rank)
        free = [0.0] * self.world_size
        for busy, first in level:
            free[first : first + size] = [busy] * size
        return out, free

    def _other_limits(self, g: IntArray, bound: float, longest: float, best: _Attempt) -> _Attempt:
        """Two other limits than the step itself: the one that won most lately, and each in turn."""
        wins = self._wins
        favourite = max(_FACTORS, key=wins.__getitem__)
        others = [factor for factor in _FACTORS if factor != favourite]
        self._turn += 1
        few = len(best.tasks) <= _MANY
        for factor in (favourite, others[self._turn % len(others)])[: 2 if few else 1]:
            other = self._attempt(g, factor * bound, longest)
            won = other.end_s < best.end_s * (1 - 1e-6)
            wins[factor] = _MEMORY * wins[factor] + won
            if won:
                best = other
        return best

    def _attempt(self, g: IntArray, limit_s: float, longest: float) -> _Attempt:
        """Place the large samples, if each sample alone may take ``limit_s``."""
        grid = self.grid
        choice = grid.choice(limit_s)
        rank_s = choice.rank_s[g]
        area = float(rank_s.sum())
        bound = max(area / self.capacity, longest)
        sp_index = choice.sp_index[g]
        # Not by a sample's time alone, which is mostly fixed costs where samples are tiny.
        large = (sp_index > 0) | (rank_s > _LARGE * bound)
        if grid.sp_sizes[0] > 1:
            large[:] = True
        # Large ones first, wide to narrow, long to short.
        key = (large * len(grid.sp_sizes) + np.where(large, sp_index, 0)) * len(grid.lengths) + g
        order = np.argsort(-key, kind="stable")
        num_large = int(np.count_nonzero(large))
        gs = g[order[:num_large]].tolist()
        target = max(bound, limit_s)
        tasks = self._tasks(gs, sp_index[order[:num_large]].tolist(), target)
        fluid = area - float(rank_s[large].sum())
        tasks, (level, p, first_ranks) = place_large(tasks, fluid, grid, self.layout, self.speed)
        free = [0.0] * self.world_size
        for end, first in level:
            free[first : first + p] = [end] * p
        level_s = level_of(free, fluid, self.speed) if fluid > 0 else 0.0
        end = max(max(free), level_s)
        return _Attempt(order, num_large, tasks, first_ranks, free, fluid, bound, end)

    def _tasks(self, gs: list[int], sp_index: list[int], target_s: float) -> list[Task]:
        """Cut the large samples, sorted, into micro-batches of one SP size each."""
        grid = self.grid
        tasks: list[Task] = []
        i, end = 0, len(sp_index)
        while i < end:
            k, g = sp_index[i], gs[i]
            p = grid.sp_sizes[k]
            row = grid.rows[p][g]
            each = grid.per_sample[p]
            spare = row[0] - each[g]  # fixed costs
            most_s = min(max(self.share * target_s, AMORTISED * spare), target_s)
            j = bisect_right(row, max(most_s * (1 + _EPS), row[0])) - 1
            if self.max_steps is None:
                j = min(j, grid.useful[p][g] - 1)
            most = min(end, i + grid.batches[j])
            same = i + 1
            waste = 0.0  # see NOTE (padding)
            while same < most and sp_index[same] == k:
                waste += each[g] - each[gs[same]]
                if waste > spare and self.max_steps is None:
                    break
                same += 1
            count = same - i
            tasks.append((-p, -grid.seconds(row, count), i, count, g))
            i = same
        return tasks

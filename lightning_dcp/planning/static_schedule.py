"""Static plans: one SP size for all samples, as launch scripts set it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dcp.planning.cost_grid import CostGrid
from lightning_dcp.planning.layout import Layout
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.micro_batches import MicroBatches
from lightning_dcp.planning.windows import Schedule

__all__ = ["StaticRule", "schedule_static"]


@dataclass(frozen=True)
class StaticRule:
    """How samples share a micro-batch.

    Attributes:
        sp_size: SP size p of all groups.
        batch_sizes: Per bucket, samples of a micro-batch; () for packing.
        token_budget: Padded tokens of a micro-batch at most, for packing; 0 for buckets.
    """

    sp_size: int
    batch_sizes: tuple[int, ...] = ()
    token_budget: int = 0

    def cut(
        self, lengths: IntArray, bucket: IntArray, most: IntArray
    ) -> tuple[IntArray, list[int]]:
        """Order the samples of an iteration and cut them into micro-batches of ``counts``.

        Args:
            lengths: (n,) their lengths, in the order of the epoch.
            bucket: (n,) their buckets.
            most: (n,) samples in a micro-batch at most where this is the longest.
        """
        if not self.token_budget:
            order = np.argsort(bucket, kind="stable")
            counts: list[int] = []
            for k, num in enumerate(np.bincount(bucket, minlength=len(self.batch_sizes)).tolist()):
                size = self.batch_sizes[k]
                counts += [size] * (num // size) + ([num % size] if num % size else [])
            return order, counts
        order = np.argsort(-lengths, kind="stable")
        sizes = np.minimum(np.maximum(self.token_budget // lengths, 1), most)[order].tolist()
        counts, start = [], 0
        while start < len(sizes):
            count = min(sizes[start], len(sizes) - start)
            counts.append(count)
            start += count
        return order, counts


def schedule_static(
    windows: Sequence[tuple[int, int]],
    lengths: IntArray,
    bucket: IntArray,
    g: IntArray,
    grid: CostGrid,
    rule: StaticRule,
    layout: Layout,
) -> Schedule:
    """Each window is an iteration; its micro-batches go, the slowest first, to the next free group.

    Args:
        windows: ``(start, stop)`` in the order of the epoch.
        lengths: (n,) lengths in the order of the epoch.
        bucket: (n,) their buckets.
        g: (n,) their places in the grid.
        grid: Costs; of ``rule.sp_size`` at least.
        rule: The static plan.
        layout: The blocks of ranks.
    """
    out = Schedule()
    p = rule.sp_size
    rows, batches = grid.times[p], grid.batch_sizes
    most = batches[np.maximum(np.isfinite(rows).sum(axis=1) - 1, 0)]
    for start, stop in windows:
        order, counts = rule.cut(lengths[start:stop], bucket[start:stop], most[g[start:stop]])
        starts = np.concatenate([[0], np.cumsum(counts)])
        longest = np.maximum.reduceat(g[start:stop][order], starts[:-1])
        seconds = rows[longest, np.searchsorted(batches, counts)]
        groups = [(0.0, first) for first in layout.blocks(p)]
        step = MicroBatches()
        for i in np.argsort(-seconds, kind="stable").tolist():
            free, first = groups[0]
            heapq.heapreplace(groups, (free + float(seconds[i]), first))
            step.add(order[starts[i] : starts[i + 1]], p, first)
        out.add(step, np.arange(start, stop))
    return out

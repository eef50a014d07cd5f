"""Costs tabulated over lengths, batch sizes and SP sizes, for quick decisions.

A plan is decided on these tables and then predicted by the cost model itself, micro-batch by
micro-batch (``epoch.py``).

Shapes: G = lengths of the grid, B = batch sizes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_dcp.planning.buckets import representative
from lightning_dcp.planning.candidates import batch_grid, pad_to
from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.fitting import FloatArray
from lightning_dcp.planning.lengths import IntArray

__all__ = ["Choice", "CostGrid", "length_grid"]

_MAX_LENGTHS = 512
_AS_GOOD = 1.001  # of the least seconds per sample
_CAP_STEP = 1.04  # limits are rounded down to powers of this, so that choices can be kept


def length_grid(lengths: IntArray) -> IntArray:
    """At most 512 lengths, the longest among them, to round the others up to.

    Even in the number of samples, in tokens and in the logarithm, so that neither the bulk nor the
    long tail is coarse.
    """
    sizes, counts = np.unique(lengths, return_counts=True)
    if len(sizes) <= _MAX_LENGTHS:
        return sizes
    return representative(sizes, counts, by_mass=_MAX_LENGTHS // 4, by_logarithm=_MAX_LENGTHS // 2)


@dataclass(frozen=True, eq=False)
class Choice:
    """The cheapest way to run samples of each length within a time limit.

    Attributes:
        sp_index: (G,) place in ``sp_sizes`` of the cheapest SP size.
        rank_s: (G,) rank-seconds per sample, ``p T / b``.
    """

    sp_index: IntArray
    rank_s: FloatArray


class CostGrid:
    """Seconds of micro-batches, tabulated.

    Args:
        costs: Predicts seconds and bytes.
        lengths: (G,) increasing; the last is the longest of all samples.
        sp_sizes: SP sizes p, increasing; at one of them at least every length must fit.
        pad_multiple: Further multiple to pad to.
        limit_bytes: Memory limit per rank.
        largest_batch: Largest batch size.
        recompute: Fixed number of recomputed blocks; None: the smallest that fits.

    Attributes:
        batch_sizes: (B,) increasing.
        times: SP size -> (G, B) seconds, not falling along either axis; infinite where it does not
            fit.
    """

    def __init__(
        self,
        costs: Costs,
        lengths: IntArray,
        *,
        sp_sizes: Sequence[int],
        pad_multiple: int,
        limit_bytes: int,
        largest_batch: int,
        recompute: int | None,
    ) -> None:
        self.lengths = lengths
        self.sp_sizes = tuple(sp_sizes)
        self.batch_sizes = batch_grid(largest_batch)
        self.times: dict[int, FloatArray] = {}
        b = self.batch_sizes[None, :]
        for p in self.sp_sizes:
            s = pad_to(lengths, p, pad_multiple)[:, None]
            if recompute is None:
                r = costs.min_recompute(b, s, p, limit_bytes)
                fits = r >= 0
            else:
                r = np.full((len(lengths), len(self.batch_sizes)), recompute)
                fits = costs.memory_bytes(b, s, p, r) <= limit_bytes
            times = np.where(fits, costs.time_s(b, s, p, np.maximum(r, 0)), np.inf)
            # A noisy profile may predict less time for more work; the search relies on the order.
            times = np.maximum.accumulate(np.maximum.accumulate(times, axis=0), axis=1)
            self.times[p] = np.asarray(times, dtype=np.float64)
        self._choices: dict[int, Choice] = {}

    def index_of(self, lengths: IntArray) -> IntArray:
        """Place in the grid of each length, rounded up."""
        return np.searchsorted(self.lengths, lengths).astype(np.int64)

    @cached_property
    def rows(self) -> dict[int, list[list[float]]]:
        """SP size -> seconds as lists, for loops in Python."""
        return {p: times.tolist() for p, times in self.times.items()}

    @cached_property
    def batches(self) -> list[int]:
        """Batch sizes, as a list."""
        return [int(b) for b in self.batch_sizes]

    def seconds(self, row: list[float], count: int) -> float:
        """Seconds of ``count`` samples by a row of ``rows``; rounded up to the next batch size."""
        return row[count - 1] if count <= 16 else row[bisect_right(self.batches, count - 1)]

    @cached_property
    def per_sample_s(self) -> dict[int, FloatArray]:
        """SP size -> (G,) least seconds per sample, ``min_b T / b``."""
        return {p: (times / self.batch_sizes).min(axis=1) for p, times in self.times.items()}

    @cached_property
    def per_sample(self) -> dict[int, list[float]]:
        """``per_sample_s`` as lists."""
        return {p: seconds.tolist() for p, seconds in self.per_sample_s.items()}

    @cached_property
    def useful(self) -> dict[int, list[int]]:
        """SP size -> how many of ``batch_sizes`` are of use at each length.

        Beyond that throughput falls, since more blocks have to be recomputed, or memory ends.
        """
        found = {}
        for p, times in self.times.items():
            each = times / self.batch_sizes
            good = np.isfinite(each) & (each <= _AS_GOOD * each.min(axis=1, keepdims=True))
            last = each.shape[1] - np.argmax(good[:, ::-1], axis=1)
            found[p] = np.where(good.any(axis=1), last, 0).tolist()
        return found

    @cached_property
    def quickest_s(self) -> FloatArray:
        """(G,) seconds of one sample at the SP size where it is quickest."""
        return np.asarray(np.stack([times[:, 0] for times in self.times.values()]).min(axis=0))

    def choice(self, limit_s: float = math.inf) -> Choice:
        """The cheapest SP size of each length among those whose single sample is in the limit.

        Where none is, the quickest. Batch sizes are limited alike. The limit is rounded down a
        little, so that few different choices are made.
        """
        if math.isinf(limit_s):
            key, limit = 1 << 30, math.inf
        else:
            key = math.floor(math.log(max(limit_s, 1e-12)) / math.log(_CAP_STEP))
            limit = _CAP_STEP**key
        if key not in self._choices:
            self._choices[key] = self._choose(limit)
        return self._choices[key]

    def _choose(self, limit_s: float) -> Choice:
        rank_s, single = [], []
        for p, times in self.times.items():
            each = times / self.batch_sizes
            usable = times <= limit_s
            usable[:, 0] = np.isfinite(times[:, 0])
            each = np.where(usable, each, np.inf)
            rank_s.append(p * each.min(axis=1))
            single.append(times[:, 0])
        ranks, singles = np.stack(rank_s), np.stack(single)
        within = singles <= limit_s
        sp_index = np.where(
            within.any(axis=0),
            np.argmin(np.where(within, ranks, np.inf), axis=0),
            np.argmin(singles, axis=0),
        )
        rank_s_of_best = ranks[sp_index, np.arange(len(self.lengths))]
        return Choice(sp_index=sp_index.astype(np.int64), rank_s=rank_s_of_best)

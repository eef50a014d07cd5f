"""How much slower than predicted buckets and ranks are, from what micro-batches took.

A micro-batch takes ``predicted * bucket factor * factor of the slowest rank of its group``: in a
group everybody waits for the slowest. In logarithms that is a sum, which is fitted by medians, so
that a garbage collection, a checkpoint or another process on the machine moves nothing::

    log(measured / predicted) = bucket[k] + max(rank[i] for i of the group)

Ranks and buckets are told apart by fitting them together, as long as no rank gets all of a bucket
and nothing else; where they hardly are, their errors say so.

What a rank does alone says the most about it. One that is never alone is as slow as the quickest
of its groups. Of a bucket with few micro-batches those beside it speak too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_dcp.planning.fitting import FloatArray
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.plan import MicroBatch, Plan

__all__ = ["Observed", "Slowness", "slowest_member", "slowness_of", "weighted_median"]

_ROUNDS = 6
_ROUNDS_JOINT = 8
_LEAST_OBSERVED = 4
_TINY_S = 1e-9
_LEAST_ERROR = 0.005  # of a log factor
_MAD = 1.4826  # standard deviations of a normal distribution / its median absolute deviations
_OF_MEDIAN = 1.2533  # standard error of a median / that of a mean


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Micro-batches that have run, (M,) each.

    Attributes:
        first_rank: First rank of the group, as plans count.
        sp_size: Ranks of the group.
        bucket: Bucket of its length.
        predicted_s: Seconds by the plan.
        measured_s: Seconds of the rank of the group that came last and waited for nobody.
    """

    first_rank: IntArray
    sp_size: IntArray
    bucket: IntArray
    predicted_s: FloatArray
    measured_s: FloatArray

    @classmethod
    def of(
        cls,
        plans: Sequence[Plan],
        laps: Sequence[Sequence[Sequence[float]]],
        bucket_of: Callable[[MicroBatch], int],
    ) -> Observed:
        """Put together what ranks measured.

        Args:
            plans: Iterations.
            laps: Of each iteration, of each rank as plans count them, seconds of its micro-batches
                in their order; what follows them is left out.
            bucket_of: Bucket of a micro-batch.
        """
        columns: list[tuple[int, int, int, float, float]] = []
        for plan, of_ranks in zip(plans, laps, strict=True):
            done = [0] * plan.world_size
            for m in plan.micro_batches:
                measured = math.inf
                for rank in m.ranks:
                    measured = min(measured, of_ranks[rank][done[rank]])
                    done[rank] += 1
                columns.append((m.first_rank, m.sp_size, bucket_of(m), m.est_time_s, measured))
        first, size, bucket, predicted, measured_s = zip(*columns, strict=True)
        return cls(
            first_rank=np.array(first, dtype=np.int64),
            sp_size=np.array(size, dtype=np.int64),
            bucket=np.array(bucket, dtype=np.int64),
            predicted_s=np.array(predicted, dtype=np.float64),
            measured_s=np.array(measured_s, dtype=np.float64),
        )


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """Measured / predicted by bucket and by rank; NaN where too little was observed.

    Attributes:
        bucket_edges: Bucket k holds lengths in ``[edges[k], edges[k + 1])``.
        buckets: (K,) of the typical rank.
        ranks: (W,) relative to the typical rank, which is 1.
        work: (K,) share of the predicted seconds that were in each bucket.
        bucket_errors: (K,) standard errors of the logarithms of ``buckets``.
        rank_errors: (W,) those of ``ranks``.
    """

    bucket_edges: tuple[int, ...]
    buckets: tuple[float, ...]
    ranks: tuple[float, ...]
    work: tuple[float, ...]
    bucket_errors: tuple[float, ...]
    rank_errors: tuple[float, ...]

    @property
    def slowest_rank(self) -> int:
        """The rank with the largest factor."""
        return int(np.argmax(np.nan_to_num(self.ranks, nan=0.0)))

    @property
    def slowest_rank_factor(self) -> float:
        """Its factor; 1 where no rank was observed enough."""
        factor = self.ranks[self.slowest_rank]
        return 1.0 if math.isnan(factor) else factor


def slowness_of(
    observed: Observed,
    bucket_edges: Sequence[int],
    world_size: int,
    rank_of_place: Sequence[int] | None = None,
) -> Slowness:
    """Fit the factors. A pure function: alike on all ranks that have the same observations.

    Args:
        observed: At least one micro-batch.
        bucket_edges: K + 1 edges.
        world_size: Ranks W.
        rank_of_place: The rank that stands where plans count one; None: the same.
    """
    num_buckets = len(bucket_edges) - 1
    ratio = np.log(
        np.maximum(observed.measured_s, _TINY_S) / np.maximum(observed.predicted_s, _TINY_S)
    )
    weight = np.maximum(observed.predicted_s, _TINY_S)
    first, size = observed.first_rank, observed.sp_size
    alone = size == 1
    by_bucket = [_rows_near(observed.bucket, k) for k in range(num_buckets)]
    seen = observed.bucket.size >= _LEAST_OBSERVED
    buckets = np.zeros(num_buckets)
    # Medians in turn would not find out of these where a rank gets most of what is long.
    ranks = _joint_fit(
        ratio[alone], weight[alone], observed.bucket[alone], first[alone], num_buckets, world_size
    )
    known = np.zeros(world_size, dtype=bool)
    own_rows = _rows_by(first[alone], np.flatnonzero(alone))
    groups: dict[int, dict[int, IntArray]] = {}
    for p in np.unique(size[~alone]).tolist():
        rows = np.flatnonzero(size == p)
        groups[p] = _rows_by(first[rows], rows)
    for _ in range(_ROUNDS):
        slowest = ranks[slowest_member(ranks, first, size)]
        for k, rows in enumerate(by_bucket):
            buckets[k] = weighted_median((ratio - slowest)[rows], weight[rows])
        left = ratio - buckets[observed.bucket]
        ranks, known = _fit_ranks(left, weight, own_rows, groups, world_size)
        if known.any():
            # The lower median: with half of the ranks slow, the others are the normal ones.
            typical = np.sort(ranks[known])[(int(known.sum()) - 1) // 2]
            ranks = np.where(known, ranks - typical, 0.0)
    slowest = ranks[slowest_member(ranks, first, size)]
    for k, rows in enumerate(by_bucket):
        buckets[k] = weighted_median((ratio - slowest)[rows], weight[rows])
    work = np.bincount(observed.bucket, weights=weight, minlength=num_buckets)
    left = np.abs(ratio - buckets[observed.bucket] - slowest)
    spread = weighted_median(left, weight)
    slow = slowest_member(ranks, first, size)
    told_apart = _joint_errors(weight, observed.bucket, slow, num_buckets, world_size)
    apart = _OF_MEDIAN * _MAD * spread * told_apart
    bucket_errors = [
        max(_error(left, weight, rows, spread), apart[k] if (observed.bucket == k).any() else 0.0)
        for k, rows in enumerate(by_bucket)
    ]
    rank_rows = _rows_of_ranks(own_rows, groups, world_size)
    # Relative to a typical rank, which is not known better.
    errors = np.maximum(
        [math.sqrt(2.0) * _error(left, weight, rows, spread) for rows in rank_rows],
        apart[num_buckets:],
    )
    rank_errors = np.where(known, errors, np.nan)
    factors = np.where(known, np.exp(ranks), np.nan)
    if rank_of_place is not None:
        places = np.argsort(np.asarray(rank_of_place))
        factors, rank_errors = factors[places], rank_errors[places]
    return Slowness(
        bucket_edges=tuple(bucket_edges),
        buckets=tuple(np.exp(buckets).tolist() if seen else [math.nan] * num_buckets),
        ranks=tuple(factors.tolist()),
        work=tuple((work / work.sum()).tolist()),
        bucket_errors=tuple(bucket_errors if seen else [math.nan] * num_buckets),
        rank_errors=tuple(rank_errors.tolist()),
    )


def _joint_fit(
    ratio: FloatArray,
    weight: FloatArray,
    bucket: IntArray,
    rank: IntArray,
    num_buckets: int,
    world_size: int,
) -> FloatArray:
    """(W,) terms of ranks, 0 on average: least absolute residuals of ``bucket[k] + rank[i]``."""
    num = num_buckets + world_size
    if not ratio.size:
        return np.zeros(world_size)
    weight = weight / weight.mean()
    column = num_buckets + rank
    terms: FloatArray = np.zeros(num)
    w = weight
    for _ in range(_ROUNDS_JOINT):
        right = np.bincount(bucket, weights=w * ratio, minlength=num)
        right += np.bincount(column, weights=w * ratio, minlength=num)
        gram = _gram(w, bucket, column, num_buckets, num)
        terms = np.asarray(np.linalg.solve(gram, right), dtype=np.float64)
        residuals = np.abs(ratio - terms[bucket] - terms[column])
        least = 1e-3 + 0.1 * float(np.median(residuals))
        w = np.asarray(weight / np.maximum(residuals, least), dtype=np.float64)
    return terms[num_buckets:]


def _joint_errors(
    weight: FloatArray, bucket: IntArray, rank: IntArray, num_buckets: int, world_size: int
) -> FloatArray:
    """(K + W,) standard errors of all terms of that fit, where residuals have one of 1.

    Large where a rank and a bucket hardly occur without each other.
    """
    num = num_buckets + world_size
    weight = weight / weight.mean()
    column = num_buckets + rank
    inverse = np.linalg.inv(_gram(weight, bucket, column, num_buckets, num))
    spread = inverse @ _gram(weight**2, bucket, column, num_buckets, num) @ inverse
    return np.asarray(np.sqrt(np.maximum(np.diag(spread), 0.0)))


def _gram(
    w: FloatArray, bucket: IntArray, column: IntArray, num_buckets: int, num: int
) -> FloatArray:
    found = np.zeros((num, num))
    np.add.at(found, (bucket, bucket), w)
    np.add.at(found, (column, column), w)
    np.add.at(found, (bucket, column), w)
    np.add.at(found, (column, bucket), w)
    found[num_buckets:, num_buckets:] += w.mean()  # 0 on average
    found[np.diag_indices(num)] += 1e-6 * w.mean()  # of what does not occur
    return found


def _fit_ranks(
    left: FloatArray,
    weight: FloatArray,
    own_rows: dict[int, IntArray],
    groups: dict[int, dict[int, IntArray]],
    world_size: int,
) -> tuple[FloatArray, Any]:
    """Each rank's term, and whether it is known."""
    ranks = np.full(world_size, np.inf)
    for start, rows in own_rows.items():
        if rows.size >= _LEAST_OBSERVED:
            ranks[start] = weighted_median(left[rows], weight[rows])
    alone_known = np.isfinite(ranks)
    for size, by_start in groups.items():
        for start, rows in by_start.items():
            members = slice(start, start + size)
            if rows.size >= _LEAST_OBSERVED and not alone_known[members].all():
                term = weighted_median(left[rows], weight[rows])
                bounded = np.minimum(ranks[members], term)
                ranks[members] = np.where(alone_known[members], ranks[members], bounded)
    known = np.isfinite(ranks)
    return np.where(known, ranks, 0.0), known


def _rows_of_ranks(
    own_rows: dict[int, IntArray], groups: dict[int, dict[int, IntArray]], world_size: int
) -> list[IntArray]:
    """What each rank's term was taken from: alone, or else in the groups that had enough."""
    found = []
    for rank in range(world_size):
        rows = own_rows.get(rank, np.empty(0, dtype=np.int64))
        if rows.size < _LEAST_OBSERVED:
            of_groups = [
                by_start[start]
                for size, by_start in groups.items()
                for start in by_start
                if start <= rank < start + size and by_start[start].size >= _LEAST_OBSERVED
            ]
            # The quickest of them counted; it may be the one with the fewest.
            rows = min(of_groups, key=len, default=rows)
        found.append(rows)
    return found


def _error(left: FloatArray, weight: FloatArray, rows: IntArray, spread: float) -> float:
    """Standard error of the weighted median of some rows.

    Args:
        left: (M,) absolute residuals.
        weight: (M,) weights.
        rows: Which.
        spread: Median of ``left``: a few rows may lie close together by chance.
    """
    if not rows.size:
        return math.inf
    w = weight[rows]
    num = w.sum() ** 2 / (w**2).sum()
    scale = _MAD * max(spread, weighted_median(left[rows], w))
    return max(_LEAST_ERROR, _OF_MEDIAN * scale / math.sqrt(num))


def _rows_near(bucket: IntArray, k: int) -> IntArray:
    """Rows of a bucket; where they are few, with those of the buckets beside it."""
    away = np.abs(bucket - k)
    farthest = np.sort(away)[min(_LEAST_OBSERVED, away.size) - 1]
    return np.flatnonzero(away <= farthest)


def _rows_by(keys: IntArray, rows: IntArray) -> dict[int, IntArray]:
    if not keys.size:
        return {}
    order = np.argsort(keys, kind="stable")
    values, starts = np.unique(keys[order], return_index=True)
    pieces = np.split(rows[order], starts[1:])
    return dict(zip(values.tolist(), pieces, strict=True))


def slowest_member(ranks: FloatArray, first: IntArray, size: IntArray) -> IntArray:
    """The slowest rank of each group."""
    found = first.copy()
    for p in np.unique(size).tolist():
        rows = np.flatnonzero(size == p)
        for offset in range(1, p):
            other = first[rows] + offset
            found[rows] = np.where(ranks[other] > ranks[found[rows]], other, found[rows])
    return found


def weighted_median(values: FloatArray, weights: FloatArray) -> float:
    """The lower weighted median."""
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order])
    return float(values[order][int(np.searchsorted(below, 0.5 * below[-1]))])

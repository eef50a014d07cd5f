"""What packed micro-batches cost, and which of a rank's to join.

NOTE (cost of packing): terms that are linear in tokens see ``sum l``, attention sees ``sum l**2``.
So samples of lengths l cost like b' samples of s' tokens each, ``s' = sum l**2 / sum l`` and ``b' =
(sum l)**2 / sum l**2``: as many tokens, as many pairs. b' is at most their number and s' at most
the longest, so that nothing costs more packed than padded. Bytes are taken as at least those of
the longest sample alone.

The search looks for samples of similar lengths to share a micro-batch, since it counts each as the
longest. Packed, lengths may mix: micro-batches of one group are joined as long as that saves time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.fitting import FloatArray
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.windows import Schedule

__all__ = ["PackedCosts", "PackedSums", "join_micro_batches", "packed_length"]

_MOST_ROUNDS = 40


@dataclass(frozen=True, eq=False)
class PackedSums:
    """What the cost of micro-batches depends on, (M,) each.

    Attributes:
        count: Samples.
        tokens: Sum of their lengths.
        squares: Sum of the squares of them, in float64.
        longest: The longest.
        sp_size: SP size p.
    """

    count: IntArray
    tokens: IntArray
    squares: FloatArray
    longest: IntArray
    sp_size: IntArray

    @classmethod
    def of(cls, lengths: IntArray, count: IntArray, sp_size: IntArray) -> PackedSums:
        """Of samples that come micro-batch after micro-batch."""
        starts = np.concatenate([[0], np.cumsum(count)[:-1]])
        return cls(
            count,
            np.add.reduceat(lengths, starts),
            np.add.reduceat(lengths.astype(np.float64) ** 2, starts),
            np.maximum.reduceat(lengths, starts),
            sp_size,
        )

    def __getitem__(self, rows: IntArray) -> PackedSums:
        return PackedSums(
            self.count[rows],
            self.tokens[rows],
            self.squares[rows],
            self.longest[rows],
            self.sp_size[rows],
        )

    def joined(self, other: PackedSums) -> PackedSums:
        """Row by row one micro-batch of both."""
        return PackedSums(
            self.count + other.count,
            self.tokens + other.tokens,
            self.squares + other.squares,
            np.maximum(self.longest, other.longest),
            self.sp_size,
        )

    @property
    def _columns(self) -> tuple[IntArray, IntArray, FloatArray, IntArray, IntArray]:
        return self.count, self.tokens, self.squares, self.longest, self.sp_size


@dataclass(frozen=True)
class PackedCosts:
    """Predictions for packed micro-batches.

    Attributes:
        costs: Predicts those of equal lengths.
        limit_bytes: Memory limit per rank.
        recompute: Fixed number of recomputed blocks; None: the fewest that fit.
    """

    costs: Costs
    limit_bytes: int
    recompute: int | None

    def predict(self, sums: PackedSums) -> tuple[IntArray, FloatArray, IntArray]:
        """Recomputed blocks (-1 where nothing fits), seconds and bytes, (M,) each."""
        p = sums.sp_size
        costs, limit = self.costs, self.limit_bytes
        b, s = _equal_samples(sums)
        alone = _round_up(sums.longest, p)
        if self.recompute is None:
            r = costs.min_recompute(b, s, p, limit)
            r_alone = costs.min_recompute(1, alone, p, limit)
            r = np.where(np.minimum(r, r_alone) < 0, -1, np.maximum(r, r_alone))
        else:
            r = np.full(sums.count.size, self.recompute, dtype=np.int64)
        at = np.maximum(r, 0)
        num_bytes = np.maximum(costs.memory_bytes(b, s, p, at), costs.memory_bytes(1, alone, p, at))
        if self.recompute is not None:
            r = np.where(num_bytes <= limit, r, -1)
        return r, np.asarray(costs.time_s(b, s, p, at), dtype=np.float64), num_bytes

    def seconds(self, sums: PackedSums, recompute_blocks: IntArray) -> FloatArray:
        """(M,) seconds with so many recomputed blocks."""
        seconds = self.costs.time_s(*_equal_samples(sums), sums.sp_size, recompute_blocks)
        return np.asarray(seconds, dtype=np.float64)


def _equal_samples(sums: PackedSums) -> tuple[FloatArray, IntArray]:
    """Equal samples, b' of s' tokens, that cost as much: NOTE (cost of packing)."""
    b: FloatArray = sums.tokens.astype(np.float64) ** 2 / sums.squares
    return b, _round_up(np.ceil(sums.squares / sums.tokens).astype(np.int64), sums.sp_size)


def packed_length(lengths: IntArray) -> int:
    """s', the length of equal samples that cost as much; see NOTE (cost of packing)."""
    tokens = int(lengths.sum())
    return int(np.ceil(float((lengths.astype(np.float64) ** 2).sum()) / tokens))


def _round_up(lengths: IntArray, multiple: IntArray) -> IntArray:
    return -(-lengths // multiple) * multiple


def join_micro_batches(
    schedule: Schedule,
    lengths: IntArray,
    costs: PackedCosts,
    *,
    most_samples: int | None = None,
    most_tokens: int | None = None,
) -> Schedule:
    """Join micro-batches of the same ranks in the same iteration wherever that saves time.

    Args:
        schedule: Micro-batches of an epoch.
        lengths: (n,) lengths in the order of the epoch.
        costs: What a joined one takes.
        most_samples: In one micro-batch at most.
        most_tokens: In a joined one at most.
    """
    count = np.array(schedule.count, dtype=np.int64)
    sp_size = np.array(schedule.sp_size, dtype=np.int64)
    first_rank = np.array(schedule.first_rank, dtype=np.int64)
    iteration = np.repeat(np.arange(len(schedule.offsets) - 1), np.diff(schedule.offsets))
    places = np.concatenate(schedule.samples)
    sums = PackedSums.of(lengths[places], count.copy(), sp_size)
    seconds = costs.predict(sums)[1]
    # Rows of one group in one iteration next to each other, in their order.
    rows = np.lexsort((np.arange(count.size), sp_size, first_rank, iteration))
    into = np.arange(count.size)  # the row that a row has been joined to
    idle = 0
    for parity in range(_MOST_ROUNDS):
        left, right = _pairs(rows, parity % 2, (iteration, first_rank, sp_size))
        both = sums[left].joined(sums[right])
        r, joined_s, _ = costs.predict(both) if left.size else (left, seconds[:0], left)
        good = (r >= 0) & (joined_s < seconds[left] + seconds[right])
        if most_samples is not None:
            good &= both.count <= most_samples
        if most_tokens is not None:
            good &= both.tokens <= most_tokens
        idle = 0 if good.any() else idle + 1
        if idle == 2:
            break
        left, right, both = left[good], right[good], both[np.flatnonzero(good)]
        seconds[left] = joined_s[good]
        for column, new in zip(sums._columns, both._columns, strict=True):
            column[left] = new
        into[right] = left
        rows = rows[~np.isin(rows, right)]
    return _rebuilt(schedule, places, count, iteration, into)


def _pairs(rows: IntArray, start: int, keys: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """Every second pair of neighbours among ``rows`` that are alike in all keys."""
    left, right = rows[start:-1:2], rows[start + 1 :: 2]
    alike = np.ones(left.size, dtype=bool)
    for key in keys:
        alike &= key[left] == key[right]
    return left[alike], right[alike]


def _rebuilt(
    schedule: Schedule, places: IntArray, count: IntArray, iteration: IntArray, into: IntArray
) -> Schedule:
    """The schedule with each row's samples in the row that it has been joined to."""
    while (into != into[into]).any():
        into = into[into]
    kept = np.flatnonzero(into == np.arange(into.size))
    of_place = np.repeat(into, count)
    order = np.argsort(of_place, kind="stable")  # rows are in the order of iterations
    new_count = np.bincount(of_place, minlength=into.size)[kept]
    out = Schedule()
    out.samples = [places[order]]
    out.count = new_count.tolist()
    out.sp_size = [schedule.sp_size[i] for i in kept.tolist()]
    out.first_rank = [schedule.first_rank[i] for i in kept.tolist()]
    out.offsets = np.searchsorted(
        iteration[kept], np.arange(len(schedule.offsets)), side="left"
    ).tolist()
    return out

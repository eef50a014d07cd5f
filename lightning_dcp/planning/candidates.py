"""Candidates (b, p, r) per bucket, what each costs, and why others are left out."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from lightning_dcp.planning.cost_model import CostModel
from lightning_dcp.planning.lengths import IntArray

__all__ = ["Candidate", "CostTable", "Exclusion", "batch_grid", "build_table", "pad_to"]

_LENGTH_STEPS = 8  # a bucket's lengths are tabulated at this many + 1 points


@dataclass(frozen=True)
class Candidate:
    """A configuration for a bucket's longest samples."""

    batch_size: int
    seq_len: int
    sp_size: int
    recompute_blocks: int
    time_s: float
    memory_bytes: int

    @property
    def throughput(self) -> float:
        """Padded tokens per second and rank, ``b s / (p T)``."""
        return self.batch_size * self.seq_len / (self.sp_size * self.time_s)


@dataclass(frozen=True)
class Exclusion:
    """An SP size that is not used, for all lengths or for one bucket ``[lo, hi)``."""

    sp_size: int
    reason: str
    lo: int | None = None
    hi: int | None = None

    def __str__(self) -> str:
        where = "" if self.lo is None else f" for lengths [{self.lo}, {self.hi})"
        return f"p={self.sp_size}{where}: {self.reason}"


@dataclass(frozen=True, eq=False)
class CostTable:
    """Costs of one bucket at one SP size, for quick look-up of single micro-batches.

    Attributes:
        sp_size: SP size p.
        batch_sizes: Increasing micro-batch sizes that fit in memory at the longest length.
        candidates: One for each batch size, at the longest length.
        first_len: Shortest tabulated length.
        per_len: Table columns per token of length.
        time_rows: Seconds, ``time_rows[i][j]`` for batch size i and length j; grows in both.
    """

    sp_size: int
    batch_sizes: list[int]
    candidates: list[Candidate]
    first_len: int
    per_len: float
    time_rows: list[list[float]]

    def time_s(self, batch_size: int, seq_len: int) -> float:
        """Seconds of a micro-batch (a batch size between two of the table counts as the larger)."""
        index = bisect_left(self.batch_sizes, batch_size)
        row = self.time_rows[min(index, len(self.time_rows) - 1)]
        x = (seq_len - self.first_len) * self.per_len
        column = int(x)
        if column >= _LENGTH_STEPS:
            return row[-1]
        return row[column] + (x - column) * (row[column + 1] - row[column])

    def largest_within(self, limit_s: float, most: int) -> int:
        """Largest batch size up to ``most`` that takes at most ``limit_s`` at any length, or 0."""
        low, high = 0, bisect_right(self.batch_sizes, most)
        while low < high:
            middle = (low + high) // 2
            if self.time_rows[middle][-1] <= limit_s:
                low = middle + 1
            else:
                high = middle
        return self.batch_sizes[low - 1] if low else 0

    def best(self, limit_s: float = math.inf) -> Candidate:
        """Best throughput among those that take at most ``limit_s``; else the quickest."""
        within = [c for c in self.candidates if c.time_s <= limit_s]
        if within:
            return max(within, key=lambda c: (c.throughput, c.batch_size))
        return min(self.candidates, key=lambda c: c.time_s)


def batch_grid(largest: int) -> IntArray:
    """Micro-batch sizes to try: all up to 16, then four per factor of two, and ``largest``."""
    small = np.arange(1, min(16, largest) + 1)
    if largest <= 16:
        return small.astype(np.int64)
    powers = np.floor(2 ** (np.arange(16, 4 * math.log2(largest) + 1) / 4))
    return np.unique(np.concatenate([small, powers[powers <= largest], [largest]])).astype(np.int64)


def pad_to(seq_len: int, sp_size: int, pad_multiple: int) -> int:
    """Length rounded up to a multiple of ``sp_size`` and of ``pad_multiple``."""
    multiple = math.lcm(sp_size, pad_multiple)
    return -(-seq_len // multiple) * multiple


def build_table(
    cost_model: CostModel,
    *,
    shortest: int,
    longest: int,
    sp_size: int,
    pad_multiple: int,
    limit_bytes: int,
    max_batch_size: int,
    recompute: int | None,
) -> CostTable | int:
    """Tabulate a bucket at one SP size.

    Args:
        cost_model: Predicts seconds and bytes.
        shortest: Shortest sample of the bucket.
        longest: Longest sample of the bucket.
        sp_size: SP size p.
        pad_multiple: Further multiple to pad to.
        limit_bytes: Memory limit per rank.
        max_batch_size: Largest micro-batch to consider.
        recompute: Fixed number of recomputed blocks; None: the smallest that fits.

    Returns:
        The table, or, where not even one sample fits, the bytes that are missing.
    """
    lo = pad_to(shortest, sp_size, pad_multiple)
    hi = pad_to(longest, sp_size, pad_multiple)
    b = batch_grid(max_batch_size)
    s = np.linspace(lo, hi, _LENGTH_STEPS + 1)
    if recompute is None:
        r = cost_model.min_recompute(b[:, None], s[None, :], sp_size, limit_bytes)
        most = cost_model.num_blocks
    else:
        r = np.full((b.size, s.size), recompute, dtype=np.int64)
        most = recompute
        too_much = cost_model.memory_bytes(b[:, None], s[None, :], sp_size, r) > limit_bytes
        r[too_much] = -1
    fits = np.minimum.accumulate((r >= 0).all(axis=1))
    if not fits[0]:
        return int(cost_model.memory_bytes(1, hi, sp_size, most)) - limit_bytes
    b, r = b[fits], r[fits]
    times = cost_model.time_s(b[:, None], s[None, :], sp_size, r)
    memory = cost_model.memory_bytes(b, hi, sp_size, r[:, -1])
    candidates = [
        Candidate(int(b[i]), hi, sp_size, int(r[i, -1]), float(times[i, -1]), int(memory[i]))
        for i in range(b.size)
    ]
    # A noisy profile may predict less time for more work; the search relies on the order.
    times = np.maximum.accumulate(np.maximum.accumulate(times, axis=0), axis=1)
    return CostTable(
        sp_size=sp_size,
        batch_sizes=b.tolist(),
        candidates=candidates,
        first_len=lo,
        per_len=_LENGTH_STEPS / (hi - lo) if hi > lo else 0.0,
        time_rows=times.tolist(),
    )

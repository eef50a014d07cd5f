"""Candidates (b, p, r): what a configuration costs, and why others are left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.lengths import IntArray

__all__ = ["Candidate", "Exclusion", "batch_grid", "make_candidate", "pad_to"]


@dataclass(frozen=True)
class Candidate:
    """A configuration for samples of one length."""

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


def batch_grid(largest: int) -> IntArray:
    """Micro-batch sizes to try: all up to 16, then four per factor of two, and ``largest``."""
    small = np.arange(1, min(16, largest) + 1)
    if largest <= 16:
        return small.astype(np.int64)
    powers = np.floor(2 ** (np.arange(16, 4 * math.log2(largest) + 1) / 4))
    return np.unique(np.concatenate([small, powers[powers <= largest], [largest]])).astype(np.int64)


def pad_to(seq_len: Any, sp_size: int, pad_multiple: int) -> Any:
    """Length (or array of lengths) rounded up to a multiple of ``sp_size`` and ``pad_multiple``."""
    multiple = math.lcm(sp_size, pad_multiple)
    return -(-seq_len // multiple) * multiple


def make_candidate(
    costs: Costs,
    *,
    batch_size: int,
    seq_len: int,
    sp_size: int,
    recompute: int | None,
    limit_bytes: int,
) -> Candidate:
    """What ``batch_size`` samples of ``seq_len`` padded tokens cost.

    Args:
        costs: Predicts seconds and bytes.
        batch_size: Samples b.
        seq_len: Padded tokens s.
        sp_size: SP size p.
        recompute: Recomputed blocks; None: the fewest that fit, which must exist.
        limit_bytes: Memory limit per rank.
    """
    key = (batch_size, seq_len, sp_size)
    r = int(costs.min_recompute(*key, limit_bytes)) if recompute is None else recompute
    return Candidate(*key, r, float(costs.time_s(*key, r)), int(costs.memory_bytes(*key, r)))

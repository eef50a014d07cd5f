"""Synthetic sample lengths: the paper's three mixes, and log-normal ones."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.lengths import IntArray, as_lengths

__all__ = ["MIXES", "Workload", "cheapest_rank_seconds", "log_normal", "paper_mix"]

MIXES: Mapping[str, float] = {"short": 0.75, "balanced": 1.0, "long": 1.6}
"""Mix -> share of compute of an octave of lengths over that of the octave below.

The paper shows its mixes in pictures and defines dominance by compute (Appendix A); numbers are not
given. Over ten octaves the shortest has 13 times the compute of the longest in "short"; in "long"
the longest has 69 times that of the shortest.
"""

_POINTS_PER_OCTAVE = 16


@dataclass(frozen=True, eq=False)
class Workload:
    """Sample lengths with a name.

    Attributes:
        name: Name, for reports.
        lengths: Tokens of each sample, read-only int64.
    """

    name: str
    lengths: IntArray

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty.")
        object.__setattr__(self, "lengths", as_lengths(self.lengths, name=self.name))

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.lengths.size

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.lengths.sum())


def cheapest_rank_seconds(costs: Costs, lengths: Any, limit_bytes: int) -> npt.NDArray[np.float64]:
    """Least GPU-seconds a sample of each length can take: min over p, b of ``p T / b``.

    Each (b, p) with the fewest recomputed blocks that fit; micro-batches are powers of two.

    Args:
        costs: Seconds and bytes.
        lengths: Tokens of each sample, any shape.
        limit_bytes: Bytes one rank may use.

    Raises:
        ValueError: A length that does not fit at any SP size.
    """
    wanted = np.asarray(lengths, dtype=np.float64)
    if wanted.size == 0:
        return wanted
    shortest, longest = float(wanted.min()), float(wanted.max())
    grid = np.unique(wanted)
    if grid.size > 1024:  # interpolated between points of a grid
        num_points = 2 + int(_POINTS_PER_OCTAVE * np.log2(longest / shortest))
        grid = np.geomspace(shortest, longest, num_points)
        grid[-1] = longest
    best = np.full(grid.size, np.inf)
    for p in costs.sp_sizes:
        rows = np.arange(grid.size)  # lengths that still fit at this b
        b = 1
        while rows.size:
            r = costs.min_recompute(b, grid[rows], p, limit_bytes)
            rows, r = rows[r >= 0], r[r >= 0]
            if rows.size:
                seconds = p * costs.time_s(b, grid[rows], p, r) / b
                # Larger micro-batches of a length stop paying long before memory ends.
                better = seconds < best[rows] * (1 + 1e-3)
                best[rows] = np.minimum(best[rows], seconds)
                rows = rows[better | (b == 1)]
            b *= 2
    if np.isinf(best).any():
        length, p = int(longest), costs.sp_sizes[-1]
        missing = int(costs.memory_bytes(1, longest, p, costs.num_blocks)) - limit_bytes
        raise ValueError(
            f"A sample of {length} tokens does not fit at any SP size: at p={p} with all blocks "
            f"recomputed {missing / 2**30:.1f} GiB are missing. Use shorter samples, more ranks "
            "or more memory."
        )
    seconds = np.exp(np.interp(np.log(wanted), np.log(grid), np.log(best)))
    return np.asarray(seconds, dtype=np.float64)


def paper_mix(
    kind: str,
    costs: Costs,
    *,
    num_samples: int,
    shortest: int,
    longest: int,
    limit_bytes: int,
    seed: int = 0,
) -> Workload:
    """A mix defined by share of compute, as in the paper's Appendix A (see :data:`MIXES`).

    Each octave of lengths from ``shortest`` on (the last one may be cut) gets as many samples as
    its share of compute allows, at least one; inside an octave lengths are log-uniform. One sample
    is ``longest``. With few samples these least counts give the long octaves more than their share.

    Args:
        kind: ``"short"``, ``"balanced"`` or ``"long"``.
        costs: What a sample costs.
        num_samples: Number of samples, at least one per octave.
        shortest: Least length in tokens.
        longest: Largest length in tokens.
        limit_bytes: Bytes one rank may use.
        seed: Seed of lengths and order.

    Raises:
        ValueError: An unknown mix, an empty range, too few samples, a length that does not fit.
    """
    if kind not in MIXES:
        raise ValueError(f"Unknown mix {kind!r}. Known mixes: {', '.join(MIXES)}.")
    _check_range(num_samples, shortest, longest)
    edges = [float(shortest)]
    while edges[-1] * 2 < longest:
        edges.append(edges[-1] * 2)
    edges.append(float(longest))
    octaves = list(itertools.pairwise(edges))
    if num_samples < len(octaves):
        raise ValueError(
            f"num_samples must be at least {len(octaves)}, one for each factor of two between "
            f"{shortest} and {longest}; got {num_samples}."
        )
    points = np.array([np.geomspace(lo, hi, _POINTS_PER_OCTAVE + 1) for lo, hi in octaves])
    mean_s = cheapest_rank_seconds(costs, points, limit_bytes).mean(axis=1)
    # An octave that is cut has the part of a whole one's share that it covers.
    width = np.array([np.log2(hi / lo) if hi > lo else 1.0 for lo, hi in octaves])
    counts = _counts(MIXES[kind] ** np.arange(len(octaves)) * width / mean_s, num_samples)
    rng = np.random.default_rng([seed, *kind.encode()])
    drawn = [
        np.minimum(np.rint(lo * (hi / lo) ** _strata(n, rng)), hi)
        for n, (lo, hi) in zip(counts.tolist(), octaves, strict=True)
    ]
    drawn[-1][-1] = longest
    lengths = rng.permutation(np.concatenate(drawn).astype(np.int64))
    return Workload(kind, lengths)


def log_normal(
    *, median: float, sigma: float, num_samples: int, shortest: int, longest: int, seed: int = 0
) -> Workload:
    """Log-normal lengths, conditioned on lying between ``shortest`` and ``longest``.

    Args:
        median: Median in tokens of the distribution before it is conditioned.
        sigma: Standard deviation of the logarithm, above 0.
        num_samples: Number of samples.
        shortest: Least length in tokens.
        longest: Largest length in tokens.
        seed: Seed of the lengths.

    Raises:
        ValueError: A value out of range, or a range that the distribution practically never meets.
    """
    _check_range(num_samples, shortest, longest)
    if not (np.isfinite(median) and median > 0 and np.isfinite(sigma) and sigma > 0):
        raise ValueError(
            f"median and sigma must be finite and above 0; got {median!r} and {sigma!r}."
        )
    low, high = ndtr((np.log([shortest - 0.5, longest + 0.5]) - np.log(median)) / sigma)
    if not high - low > 1e-9:
        raise ValueError(
            f"Lengths with median {median} and sigma {sigma} practically never lie between "
            f"{shortest} and {longest}. Move the median into that range or raise sigma."
        )
    rng = np.random.default_rng(seed)
    normal = ndtri(low + (high - low) * rng.random(num_samples))
    lengths = np.rint(median * np.exp(sigma * normal)).clip(shortest, longest)
    return Workload("log-normal", lengths.astype(np.int64))


def _strata(count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    # One draw in each of `count` equal parts of [0, 1): the mix's shares hardly depend on the seed.
    return (np.arange(count) + rng.random(count)) / count


def _counts(weights: npt.NDArray[np.float64], total: int) -> IntArray:
    """Integers of sum ``total`` proportional to ``weights`` by largest remainder, each at least 1.

    One is set aside for each where the proportional count is below it.
    """
    counts = np.zeros(weights.size, dtype=np.int64)
    free = np.ones(weights.size, dtype=bool)
    while True:
        rest = total - int(counts.sum())
        exact = np.where(free, weights, 0.0) / weights[free].sum() * rest
        small = free & (exact < 1)
        if not small.any():
            break
        counts[small], free[small] = 1, False
        if not free.any():
            return counts
    counts[free] = np.floor(exact[free]).astype(np.int64)
    remainder = np.where(free, exact - np.floor(exact), -1.0)
    largest = np.argsort(-remainder, kind="stable")[: total - int(counts.sum())]
    counts[largest] += 1
    return counts


def _check_range(num_samples: int, shortest: int, longest: int) -> None:
    for name, value in (
        ("num_samples", num_samples),
        ("shortest", shortest),
        ("longest", longest),
    ):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} must be an int; got {value!r} ({type(value).__name__}).")
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}.")
    if shortest > longest:
        raise ValueError(f"shortest ({shortest}) must not be larger than longest ({longest}).")

"""Buckets: half-open length intervals whose samples share one configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_dcp.planning.lengths import IntArray

__all__ = ["Buckets", "choose_edges", "representative"]

_MAX_BOUNDARIES = 256
_LEAST_GAIN = 0.005
"""A further bucket must save at least this share of all tokens in padding."""


@dataclass(frozen=True)
class Buckets:
    """Bucket ``i`` holds lengths in ``[edges[i], edges[i + 1])``."""

    edges: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.edges) < 2 or any(lo >= hi for lo, hi in pairwise(self.edges)):
            raise ValueError(
                f"Bucket edges must be at least two increasing integers; got {list(self.edges)}."
            )

    def __len__(self) -> int:
        return len(self.edges) - 1

    def bounds(self, index: int) -> tuple[int, int]:
        """``(lo, hi)`` of a bucket."""
        return self.edges[index], self.edges[index + 1]

    def index_of(self, lengths: Sequence[int] | IntArray) -> IntArray:
        """Bucket of each length.

        Raises:
            ValueError: A length outside all buckets (with its index).
        """
        array = np.asarray(lengths, dtype=np.int64)
        outside = np.flatnonzero((array < self.edges[0]) | (array >= self.edges[-1]))
        if outside.size:
            first = int(outside[0])
            raise ValueError(
                f"Sample {first} of length {int(array[first])} is in no bucket: the edges "
                f"{list(self.edges)} cover lengths from {self.edges[0]} to {self.edges[-1] - 1} "
                f"({outside.size} samples are outside). Widen bucket_edges, or leave them out to "
                "have them chosen from the lengths."
            )
        return np.searchsorted(self.edges, array, side="right").astype(np.int64) - 1


def choose_edges(
    lengths: Sequence[int] | IntArray, max_buckets: int = 16, pad_multiple: int = 1
) -> tuple[int, ...]:
    """Edges that trade padding against the number of buckets.

    For each number of buckets a dynamic program finds the edges with the fewest padding tokens if
    every sample were padded to its bucket's longest (FlexSP's bucketing). The number grows while
    one more bucket still saves 0.5% of all tokens. More buckets mean fewer samples that can share a
    micro-batch, so the last percent of padding is not worth it.

    Args:
        lengths: Sample lengths, each at least 1.
        max_buckets: Upper limit for the number of buckets.
        pad_multiple: Lengths are padded to multiples of this anyway.

    Returns:
        Increasing edges, from the shortest length to the longest + 1 (rounded to padding).
    """
    array = np.asarray(lengths, dtype=np.int64)
    padded = -(-array // pad_multiple) * pad_multiple
    sizes, counts = np.unique(padded, return_counts=True)
    tops = _boundaries(sizes, counts)
    # Samples and tokens with length at or below each possible top; (m + 1,) with a leading 0.
    below = np.searchsorted(sizes, tops, side="right")
    num = np.concatenate([[0], np.cumsum(counts)[below - 1]]).astype(np.float64)
    tokens = np.concatenate([[0], np.cumsum(counts * sizes)[below - 1]]).astype(np.float64)
    # waste[i, j]: padding of one bucket that holds the lengths in (tops[i - 1], tops[j]].
    waste = tops[None, :] * (num[None, 1:] - num[:-1, None]) - (
        tokens[None, 1:] - tokens[:-1, None]
    )
    waste[np.tril_indices(len(tops), -1)] = np.inf
    best = waste[0].copy()
    choices: list[IntArray] = []
    for _ in range(1, min(max_buckets, len(tops))):
        total = best[:-1, None] + waste[1:, :]  # last bucket starts after top i, ends at top j
        choice = np.argmin(total, axis=0)
        better = total[choice, np.arange(len(tops))]
        if best[-1] - better[-1] < _LEAST_GAIN * tokens[-1]:
            break
        choices.append(choice)
        best = better
    edges = [int(tops[-1]) + 1]
    end = len(tops) - 1
    for choice in reversed(choices):
        end = int(choice[end])
        edges.append(int(tops[end]) + 1)
    edges.append(int(array.min()))
    return tuple(reversed(edges))


def _boundaries(sizes: IntArray, counts: IntArray) -> IntArray:
    # At most _MAX_BOUNDARIES possible tops.
    if len(sizes) <= _MAX_BOUNDARIES:
        return sizes
    third = _MAX_BOUNDARIES // 3
    return representative(sizes, counts, by_mass=third, by_logarithm=third)


def representative(
    sizes: IntArray, counts: IntArray, *, by_mass: int, by_logarithm: int
) -> IntArray:
    """Few of many lengths, the longest among them.

    Even in the number of samples, in tokens and in the logarithm, so that neither the bulk nor the
    long tail is coarse.

    Args:
        sizes: (m,) distinct lengths, increasing.
        counts: (m,) samples of each.
        by_mass: How many by samples, and again by tokens.
        by_logarithm: How many by the logarithm.
    """
    steps = np.linspace(0, 1, by_mass + 1)[1:]
    picks = [len(sizes) - 1]
    for weight in (counts, counts * sizes):
        mass = np.cumsum(weight)
        picks.extend(np.searchsorted(mass, steps * mass[-1]).tolist())
    points = np.geomspace(sizes[0], sizes[-1], by_logarithm)
    picks.extend(np.searchsorted(sizes, points).tolist())
    return np.asarray(sizes[np.unique(np.minimum(picks, len(sizes) - 1))])

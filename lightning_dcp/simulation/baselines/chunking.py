"""Which samples go into the same micro-batch, and which count as equally long (FlexSP)."""

from __future__ import annotations

import numpy as np

from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.simulation.baselines.karmarkar_karp import partition

__all__ = ["blast", "bucket_tops", "mix"]


def blast(lengths: IntArray, num_parts: int) -> list[IntArray]:
    """Cut the sorted samples into consecutive parts with the least largest number of tokens.

    Among those cuts, one with the least sum of squared token numbers: a dynamic program.

    Args:
        lengths: (n,).
        num_parts: Number of parts M, at most n.

    Returns:
        Positions of the samples of each part, none empty, longest samples first.
    """
    order = np.argsort(-lengths, kind="stable")
    before = np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.float64)
    tokens = before[None, :] - before[:, None]  # (n + 1, n + 1): of a part from row to column
    tokens[np.tril_indices(len(before))] = np.inf
    largest = np.full(len(before), np.inf)
    largest[0] = 0.0
    for _ in range(num_parts):
        largest = np.maximum(largest[:, None], tokens).min(axis=0)
    squares = np.where(tokens <= largest[-1], np.square(tokens), np.inf)
    total = np.full(len(before), np.inf)
    total[0] = 0.0
    choices = []
    for _ in range(num_parts):
        sums = total[:, None] + squares
        choices.append(sums.argmin(axis=0))
        total = sums.min(axis=0)
    parts = []
    end = len(lengths)
    for choice in reversed(choices):
        start = int(choice[end])
        parts.append(order[start:end])
        end = start
    return parts[::-1]


def bucket_tops(lengths: IntArray, num_buckets: int) -> IntArray:
    """Longest length of each bucket, with the least sum of (top - length): a dynamic program.

    Returns:
        Increasing; at most ``num_buckets``, the last one the longest length.
    """
    sizes, counts = np.unique(lengths, return_counts=True)
    if sizes.size <= num_buckets:
        return sizes
    num = np.concatenate([[0], np.cumsum(counts)]).astype(np.float64)
    tokens = np.concatenate([[0], np.cumsum(counts * sizes)]).astype(np.float64)
    # waste[i, j]: of a bucket with the distinct lengths i .. j - 1, whose top is sizes[j - 1].
    top = np.concatenate([[0], sizes])
    waste = top * (num[None, :] - num[:, None]) - (tokens[None, :] - tokens[:, None])
    waste[np.tril_indices(len(top))] = np.inf
    total = waste[0]
    choices = []
    for _ in range(num_buckets - 1):
        sums = total[:, None] + waste
        choices.append(sums.argmin(axis=0))
        total = sums.min(axis=0)
    tops = [sizes.size]
    for choice in reversed(choices):
        tops.append(int(choice[tops[-1]]))
    chosen: IntArray = sizes[np.array(tops[::-1]) - 1]
    return chosen


def mix(lengths: IntArray, num_parts: int) -> list[IntArray]:
    """Spread the samples over parts with nearly the same tokens and the same mix of lengths.

    Returns:
        Positions of the samples of each part, none empty.
    """
    return [np.array(part, dtype=np.int64) for part in partition(lengths.tolist(), num_parts)]

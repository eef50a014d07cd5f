"""Padded micro-batches of a static configuration: which samples share one, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_dcp.planning.buckets import Buckets
from lightning_dcp.planning.candidates import pad_to
from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.simulation.steps import Unplaced

__all__ = ["padded_micro_batches"]


def padded_micro_batches(
    lengths: IntArray,
    costs: Costs,
    sp_size: int,
    recompute_blocks: int,
    limit_bytes: int,
    *,
    longest: int,
    edges: Sequence[int] | None,
    pad_multiple: int,
    balanced: bool,
    max_tokens: int | None,
) -> list[Unplaced]:
    """Padded micro-batches of all samples.

    Args:
        lengths: (n,).
        costs: Predicts seconds and bytes.
        sp_size: SP size p.
        recompute_blocks: Blocks recomputed r.
        limit_bytes: Memory limit per rank.
        longest: Longest sample of the data set.
        edges: Bucket edges, or None to sort by length.
        pad_multiple: Further multiple to pad to.
        balanced: Whether no micro-batch may take longer than one longest sample.
        max_tokens: Most padded tokens of a micro-batch of several samples.

    Raises:
        ValueError: A sample does not fit, or is in no bucket.
    """

    def cost(b: Any, s: Any) -> tuple[Any, Any]:
        seconds = costs.time_s(b, s, sp_size, recompute_blocks)
        return seconds, costs.memory_bytes(b, s, sp_size, recompute_blocks)

    def largest_batches(s: IntArray) -> IntArray:
        """Most samples per micro-batch at each padded length, by bisection."""
        if (cost(1, s)[1] > limit_bytes).any():
            raise ValueError(
                f"A sample of {int(s.max())} tokens does not fit on {sp_size} ranks with "
                f"{recompute_blocks} blocks recomputed."
            )
        low, high = np.ones_like(s), np.full_like(s, lengths.size + 1)
        while (high - low > 1).any():
            middle = np.maximum((low + high) // 2, 1)
            seconds, num_bytes = cost(middle, s)
            fits = num_bytes <= limit_bytes
            if balanced:
                fits &= seconds <= limit_s * (1 + 1e-9)
            if max_tokens is not None:
                fits &= middle * s <= max_tokens
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return low

    limit_s = float(cost(1, pad_to(longest, sp_size, pad_multiple))[0])
    groups: list[npt.NDArray[Any]] = []
    if edges is None:
        order = np.argsort(-lengths, kind="stable")
        most = largest_batches(_pad(lengths[order], sp_size, pad_multiple)).tolist()
        start = 0
        while start < order.size:
            groups.append(order[start : start + most[start]])
            start += most[start]
    else:
        buckets = Buckets(tuple(edges))
        bucket = buckets.index_of(lengths)
        used = np.unique(bucket)
        tops = np.minimum(np.array(buckets.edges)[used + 1] - 1, longest)
        for k, size in zip(used, largest_batches(_pad(tops, sp_size, pad_multiple)), strict=True):
            members = np.flatnonzero(bucket == k)
            groups.extend(np.split(members, range(int(size), members.size, int(size))))
    counts = np.array([group.size for group in groups])
    tokens = _pad(np.array([lengths[group].max() for group in groups]), sp_size, pad_multiple)
    seconds, num_bytes = cost(counts, tokens)
    return [
        Unplaced(tuple(group.tolist()), sp_size, recompute_blocks, time_s, int(bytes_))
        for group, time_s, bytes_ in zip(groups, seconds.tolist(), num_bytes.tolist(), strict=True)
    ]


def _pad(lengths: IntArray, sp_size: int, pad_multiple: int) -> IntArray:
    multiple = np.lcm(sp_size, pad_multiple)
    padded: IntArray = -(-lengths // multiple) * multiple
    return padded

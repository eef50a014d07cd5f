"""Static SP size with samples balanced over the groups by the largest differencing method.

Karmarkar and Karp, "The differencing method of set partitioning" (1982), in the form that training
frameworks use: one static SP size, samples spread over the W/p groups so that each has the same
work, and each group's share split into micro-batches that memory allows (``balance_batch`` and
dynamic batch sizes of verl). Weights are predicted seconds rather than tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.lengths import IntArray, as_lengths
from lightning_dcp.simulation.baselines.packing import PackedCosts
from lightning_dcp.simulation.baselines.static import static_settings
from lightning_dcp.simulation.baselines.tuning import Steps, best_settings, longest_of
from lightning_dcp.simulation.steps import SimulatedStep, place_in_order

__all__ = ["karmarkar_karp_step", "partition", "tune_karmarkar_karp"]


def karmarkar_karp_step(
    lengths: Sequence[int] | IntArray,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    *,
    sp_size: int | None = None,
    recompute_blocks: int | None = None,
    micro_batches: int = 1,
    longest: int | None = None,
) -> SimulatedStep:
    """Balance the step's samples over W/p groups, then pack each group's share.

    Args:
        lengths: The step's lengths.
        costs: Predicts seconds and bytes.
        world_size: Ranks W.
        limit_bytes: Memory limit per rank.
        sp_size: SP size; None: all settings are tuned for this very step.
        recompute_blocks: Blocks recomputed; None: the fewest with which the longest sample fits.
        micro_batches: Least number of micro-batches of each group; memory may ask for more.
        longest: Longest sample of the data set; None: of the step.

    Raises:
        ValueError: The longest sample does not fit.
    """
    array = as_lengths(lengths, name="the step")
    if sp_size is None:
        best = tune_karmarkar_karp([array], costs, world_size, limit_bytes, longest=longest)
        return karmarkar_karp_step(array, costs, world_size, limit_bytes, **best)
    if recompute_blocks is None:
        most = max(int(array.max()), longest or 0)
        recompute_blocks = max(0, int(costs.min_recompute(1, most, sp_size, limit_bytes)))
    prices = PackedCosts(costs, array, world_size, limit_bytes, recompute_blocks)
    if int(prices.min_sp_size.max()) > sp_size:
        raise ValueError(f"A sample does not fit at the static SP size {sp_size}.")
    budget = prices.budgets[sp_size]
    num_groups = world_size // sp_size
    fair = int(array.sum()) // (num_groups * micro_batches)
    seconds, fixed_s = prices.linear_s(sp_size, min(budget, fair))
    # A micro-batch's own seconds belong to the samples that make it necessary.
    weights = seconds + fixed_s * array / budget
    bins: list[list[int]] = []
    first_ranks = []
    for group, share in enumerate(partition(weights.tolist(), num_groups)):
        packs = _pack(array, share, budget, micro_batches)
        bins.extend(packs)
        first_ranks.extend([group * sp_size] * len(packs))
    priced = prices.price(bins, [sp_size] * len(bins))
    return place_in_order(world_size, list(zip(priced, first_ranks, strict=True)))


def tune_karmarkar_karp(
    steps: Steps,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    *,
    longest: int | None = None,
) -> dict[str, Any]:
    """Best SP size, r and number of micro-batches of :func:`karmarkar_karp_step`.

    Raises:
        ValueError: The longest sample fits at no SP size.
    """
    most = longest or longest_of(steps)
    candidates = [
        {"sp_size": p, "recompute_blocks": r, "micro_batches": micro_batches, "longest": most}
        for p, blocks in static_settings(costs, most, world_size, limit_bytes)
        for r in blocks
        for micro_batches in (1, 2, 4)
    ]
    return best_settings(karmarkar_karp_step, steps, costs, world_size, limit_bytes, candidates)


def partition(weights: Sequence[float], num_bins: int) -> list[list[int]]:
    """Spread items over bins with sums as equal as the differencing method makes them.

    Each item starts as a partial solution of ``num_bins`` bins, all but one empty. The two partial
    solutions with the largest spread are merged again and again, the heaviest bin of one with the
    lightest of the other.

    Args:
        weights: Weight of each item, not negative.
        num_bins: Number of bins, at least 1.

    Returns:
        Positions of the items of each bin, heaviest bin first; a bin is empty only where there are
        fewer items than bins.
    """
    empty: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] * (num_bins - 1)
    # Spread, then a running number so that ties never compare the bins.
    heap = [(-float(w), i, [(float(w), (i,)), *empty]) for i, w in enumerate(weights)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda bin_: (-bin_[0], bin_[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    bins = [sorted(items) for _, items in heap[0][2]]
    # Items that weigh nothing may have gone together.
    while not all(bins) and max(map(len, bins)) > 1:
        max(bins, key=len).sort(key=lambda i: weights[i], reverse=True)
        bins[bins.index([])].append(max(bins, key=len).pop())
    return bins


def _pack(lengths: IntArray, samples: Sequence[int], budget: int, least: int) -> list[list[int]]:
    """Balance a group's samples over as few micro-batches as keep to the token budget.

    A bin over the budget means one bin more and the whole again, as in verl.
    """
    if not samples:
        return []
    tokens = lengths[np.asarray(samples)]
    num_bins = min(len(samples), max(least, -(-int(tokens.sum()) // budget)))
    while True:
        bins = [b for b in partition(tokens.tolist(), num_bins) if b]
        if all(int(tokens[b].sum()) <= budget for b in bins) or num_bins == len(samples):
            return [[samples[i] for i in b] for b in bins]
        num_bins += 1

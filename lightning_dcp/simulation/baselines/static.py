"""Static parallelism: one SP size and one recomputation for all samples of all steps.

- :func:`naive_step`: bucket parallel as the paper's baseline runs it (section 4.1, after Esser et
  al., 2024): micro-batches of short buckets made smaller until none takes longer than one longest
  sample, all blocks recomputed, groups take turns.
- :func:`tuned_step`: the same kind of parallelism with every choice made by cost.
- :func:`packed_step`: micro-batches packed to a token budget instead of padded (Dehghani et al.,
  2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_dcp.planning.candidates import pad_to
from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.lengths import IntArray, as_lengths
from lightning_dcp.simulation.baselines.packing import (
    PackedCosts,
    first_fit_decreasing,
    sp_sizes_within,
)
from lightning_dcp.simulation.baselines.padding import padded_micro_batches
from lightning_dcp.simulation.baselines.tuning import (
    Steps,
    best_settings,
    longest_of,
    recompute_candidates,
)
from lightning_dcp.simulation.steps import (
    SimulatedStep,
    place_in_order,
    place_longest_first,
)

__all__ = [
    "naive_step",
    "packed_step",
    "static_settings",
    "tune_naive",
    "tune_packed",
    "tune_tuned",
    "tuned_step",
]

_MICRO_BATCHES = (None, 1, 2, 3, 4, 6, 8, 12, 16, 24)


def naive_step(
    lengths: Sequence[int] | IntArray,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    *,
    longest: int | None = None,
    edges: Sequence[int] | None = None,
    pad_multiple: int = 1,
) -> SimulatedStep:
    """Bucket parallel: smallest SP size for the longest sample, all blocks recomputed.

    Args:
        lengths: The step's lengths.
        costs: Predicts seconds and bytes.
        world_size: Ranks W.
        limit_bytes: Memory limit per rank.
        longest: Longest sample of the data set; None: of the step.
        edges: Bucket edges of the data set; micro-batches take a bucket's samples in their order.
            None: samples sorted by length, cut into micro-batches one after another.
        pad_multiple: Further multiple to pad to.

    Raises:
        ValueError: The longest sample fits at no SP size.
    """
    array = as_lengths(lengths, name="the step")
    most = max(int(array.max()), longest or 0)
    sp_size = static_settings(costs, most, world_size, limit_bytes, pad_multiple)[0][0]
    work = padded_micro_batches(
        array,
        costs,
        sp_size,
        costs.num_blocks,
        limit_bytes,
        longest=most,
        edges=edges,
        pad_multiple=pad_multiple,
        balanced=True,
        max_tokens=None,
    )
    work.sort(key=lambda micro_batch: min(micro_batch.samples))
    num_groups = world_size // sp_size
    return place_in_order(
        world_size,
        [(micro_batch, i % num_groups * sp_size) for i, micro_batch in enumerate(work)],
    )


def tuned_step(
    lengths: Sequence[int] | IntArray,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    *,
    sp_size: int | None = None,
    recompute_blocks: int | None = None,
    balanced: bool = False,
    micro_batches: int | None = None,
    longest: int | None = None,
    edges: Sequence[int] | None = None,
    pad_multiple: int = 1,
) -> SimulatedStep:
    """Bucket parallel at its best; the group that is free first takes the next micro-batch.

    Args:
        lengths: The step's lengths.
        costs: Predicts seconds and bytes.
        world_size: Ranks W.
        limit_bytes: Memory limit per rank.
        sp_size: SP size; None: all settings are tuned for this very step.
        recompute_blocks: Blocks recomputed; None: the fewest with which the longest sample fits.
        balanced: Whether a micro-batch may take no longer than one longest sample. False: as many
            samples as fit in memory.
        micro_batches: At most the tokens that give each group so many micro-batches; None: no such
            limit.
        longest: Longest sample of the data set; None: of the step.
        edges: As for :func:`naive_step`.
        pad_multiple: Further multiple to pad to.

    Raises:
        ValueError: The longest sample does not fit.
    """
    array = as_lengths(lengths, name="the step")
    if sp_size is None:
        best = tune_tuned(
            [array],
            costs,
            world_size,
            limit_bytes,
            longest=longest,
            edges=edges,
            pad_multiple=pad_multiple,
        )
        return tuned_step(array, costs, world_size, limit_bytes, **best)
    most = max(int(array.max()), longest or 0)
    if recompute_blocks is None:
        padded = pad_to(most, sp_size, pad_multiple)
        fewest = int(costs.min_recompute(1, padded, sp_size, limit_bytes))
        recompute_blocks = fewest if fewest >= 0 else costs.num_blocks
    work = padded_micro_batches(
        array,
        costs,
        sp_size,
        recompute_blocks,
        limit_bytes,
        longest=most,
        edges=edges,
        pad_multiple=pad_multiple,
        balanced=balanced,
        max_tokens=_fair_tokens(array, world_size, sp_size, micro_batches),
    )
    return place_longest_first(world_size, work)


def packed_step(
    lengths: Sequence[int] | IntArray,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    *,
    sp_size: int | None = None,
    recompute_blocks: int | None = None,
    micro_batches: int | None = None,
    longest: int | None = None,
) -> SimulatedStep:
    """Static SP size, first-fit-decreasing packing to a token budget, longest packs first.

    Args:
        lengths: The step's lengths.
        costs: Predicts seconds and bytes.
        world_size: Ranks W.
        limit_bytes: Memory limit per rank.
        sp_size: SP size; None: all settings are tuned for this very step.
        recompute_blocks: Blocks recomputed; None: the fewest with which the longest sample fits.
        micro_batches: Budget that gives each group so many micro-batches; None: what memory allows.
        longest: Longest sample of the data set; None: of the step.

    Raises:
        ValueError: The longest sample does not fit.
    """
    array = as_lengths(lengths, name="the step")
    if sp_size is None:
        best = tune_packed([array], costs, world_size, limit_bytes, longest=longest)
        return packed_step(array, costs, world_size, limit_bytes, **best)
    if recompute_blocks is None:
        most = max(int(array.max()), longest or 0)
        recompute_blocks = max(0, int(costs.min_recompute(1, most, sp_size, limit_bytes)))
    prices = PackedCosts(costs, array, world_size, limit_bytes, recompute_blocks)
    if int(prices.min_sp_size.max()) > sp_size:
        raise ValueError(f"A sample does not fit at the static SP size {sp_size}.")
    budget = prices.budgets[sp_size]
    fair = _fair_tokens(array, world_size, sp_size, micro_batches)
    packs = first_fit_decreasing(
        array, range(array.size), budget if fair is None else min(budget, fair)
    )
    return place_longest_first(world_size, prices.price(packs, [sp_size] * len(packs)))


def static_settings(
    costs: Costs, longest: int, world_size: int, limit_bytes: int, pad_multiple: int = 1
) -> list[tuple[int, list[int]]]:
    """SP sizes at which the longest sample fits, each with the r worth trying.

    Raises:
        ValueError: It fits nowhere.
    """
    found = []
    for p in sp_sizes_within(costs, world_size):
        padded = pad_to(longest, p, pad_multiple)
        if int(costs.min_recompute(1, padded, p, limit_bytes)) >= 0:
            found.append((p, recompute_candidates(costs, padded, world_size, limit_bytes, (p,))))
    if not found:
        raise ValueError(
            f"A sample of {longest} tokens fits at no single SP size, even with all blocks "
            "recomputed. Raise the memory limit or use more ranks."
        )
    return found


def tune_naive(
    steps: Steps,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    **settings: Any,
) -> dict[str, Any]:
    """Nothing is tuned; the longest sample is that of all steps if none is given."""
    return {**settings, "longest": settings.get("longest") or longest_of(steps)}


def tune_tuned(
    steps: Steps,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    *,
    longest: int | None = None,
    edges: Sequence[int] | None = None,
    pad_multiple: int = 1,
) -> dict[str, Any]:
    """Best SP size, r, batch rule and token limit of :func:`tuned_step`, also without ``edges``.

    Raises:
        ValueError: The longest sample fits at no SP size.
    """
    most = longest or longest_of(steps)
    candidates = [
        {
            "sp_size": p,
            "recompute_blocks": r,
            "balanced": balanced,
            "micro_batches": micro_batches,
            "longest": most,
            "edges": own_edges,
            "pad_multiple": pad_multiple,
        }
        for own_edges in ([None] if edges is None else [None, edges])
        for p, blocks in static_settings(costs, most, world_size, limit_bytes, pad_multiple)
        for r in blocks
        for balanced in (False, True)
        for micro_batches in _MICRO_BATCHES
    ]
    return best_settings(tuned_step, steps, costs, world_size, limit_bytes, candidates)


def tune_packed(
    steps: Steps,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    *,
    longest: int | None = None,
) -> dict[str, Any]:
    """Best SP size, r and token budget of :func:`packed_step`.

    Raises:
        ValueError: The longest sample fits at no SP size.
    """
    most = longest or longest_of(steps)
    candidates = [
        {"sp_size": p, "recompute_blocks": r, "micro_batches": micro_batches, "longest": most}
        for p, blocks in static_settings(costs, most, world_size, limit_bytes)
        for r in blocks
        for micro_batches in _MICRO_BATCHES
    ]
    return best_settings(packed_step, steps, costs, world_size, limit_bytes, candidates)


def _fair_tokens(
    lengths: IntArray, world_size: int, sp_size: int, micro_batches: int | None
) -> int | None:
    """Tokens of a micro-batch when each group has so many."""
    if micro_batches is None:
        return None
    return -(-int(lengths.sum()) // (world_size // sp_size * micro_batches))

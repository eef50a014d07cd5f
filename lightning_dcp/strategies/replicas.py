"""Do the ranks of an SP group compute the same loss from the micro-batch that they share?

Outside of the blocks each of them computes everything. Where one of them draws other noise, or got
other data from a data set that augments samples at random, hidden states of different sequences
would be mixed, and nothing would fail. Losses travel with the figures that ranks exchange once an
iteration anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_dcp.planning.plan import Plan

#: Relative differences between replicas that do the same. Bits are equal but where kernels are not
#: deterministic, or chosen anew by each process.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 1e-3


def tolerance_of(compute_dtype: torch.dtype) -> float:
    """What two ranks' losses of one micro-batch may differ by, relative."""
    return _TOLERANCES.get(compute_dtype, _COARSE)


def num_shared(plan: Plan) -> int:
    """The largest number of micro-batches that one rank shares with others."""
    return max(sum(m.sp_size > 1 for m in plan.for_rank(rank)) for rank in range(plan.world_size))


def refuse_unequal_losses(
    plan: Plan, losses: Tensor, tolerance: float, rank_at: Sequence[int] | None = None
) -> None:
    """Compare the losses of all micro-batches that several ranks ran together.

    Args:
        plan: of the iteration.
        losses: (W, K) of each rank's micro-batches with p > 1, in the order of the plan.
        tolerance: relative.
        rank_at: (W,) the rank at each place of the plan; None: places are ranks.

    Raises:
        RuntimeError: where they differ; all ranks see the same numbers and raise alike.
    """
    rows: Sequence[Sequence[float]] = losses.tolist()
    used = [0] * plan.world_size
    for index, micro_batch in enumerate(plan.micro_batches):
        if micro_batch.sp_size == 1:
            continue
        places = micro_batch.ranks
        ranks = places if rank_at is None else rank_at[places.start : places.stop]
        found = []
        for rank in ranks:
            found.append(rows[rank][used[rank]])
            used[rank] += 1
        first = found[0]
        for rank, loss in zip(ranks, found, strict=True):
            if not _same(first, loss, tolerance):
                ids = ", ".join(str(i) for i in micro_batch.sample_ids[:8])
                raise RuntimeError(
                    f"Ranks {ranks[0]} and {rank} computed different losses, {first:.8g} and"
                    f" {loss:.8g}, from one micro-batch (number {index} of iteration"
                    f" {plan.iteration} in epoch {plan.epoch}, samples {ids}), whose sequences they"
                    " share. Outside of the blocks all ranks of a group must see the same data and"
                    " noise. In `training_step` draw from torch's, numpy's or Python's global"
                    " random numbers, or from a generator that is an attribute of the module: these"
                    " are seeded alike. Let a data set draw what it adds to a sample from a"
                    " generator seeded by the sample's index. Or train without SP:"
                    " planning.sp_sizes=[1]."
                )


def _same(first: float, other: float, tolerance: float) -> bool:
    if math.isnan(first) or math.isnan(other):
        return math.isnan(first) and math.isnan(other)
    if math.isinf(first) or math.isinf(other):  # infinity is within any part of itself
        return first == other
    return abs(first - other) <= tolerance * max(abs(first), abs(other))

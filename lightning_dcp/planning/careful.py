"""Planning again after a micro-batch has run out of memory, though it was predicted to fit.

Its bucket's memory counts so much more from then on that what failed would not be planned again.
Where that leaves no plan at all, its samples run one by one, each on as many ranks as can share it,
with all blocks recomputed: nothing takes less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_dcp.planning.candidates import pad_to
from lightning_dcp.planning.drift import Corrections, uncorrected
from lightning_dcp.planning.feasible import usable_sp_sizes
from lightning_dcp.planning.packed import packed_length
from lightning_dcp.planning.plan import MicroBatch, Plan
from lightning_dcp.planning.planner import EpochPlanner

__all__ = [
    "MoreCareful",
    "NothingLeft",
    "bucket_index",
    "more_careful",
    "more_careful_later",
    "more_recomputed",
]

#: A failed configuration counts as so much more than what fits,
_ABOVE_LIMIT = 1.05
#: and a factor grows at least by this, more with each attempt, so that few are needed.
_LEAST_GROWTH = (1.25, 1.5, 2.0)
_HALVINGS = 5


class NothingLeft(ValueError):
    """What has failed cannot be run with less memory."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


@dataclass(frozen=True, kw_only=True)
class MoreCareful:
    """What is run in place of a plan that ran out of memory.

    Attributes:
        planner: Of all iterations to come.
        plan: Of the same samples.
        attempts: How often the iteration was planned again.
        apart: Buckets whose samples run one by one.
    """

    planner: EpochPlanner
    plan: Plan
    attempts: int = 0
    apart: frozenset[int] = frozenset()


def bucket_index(planner: EpochPlanner, micro_batch: MicroBatch) -> int:
    """The bucket of the planner's corrections that a micro-batch belongs to."""
    if planner.of_stream:  # whose samples it does not know; rounded up to what is run
        return int(planner.corrections.bucket_of(micro_batch.seq_len))
    lengths = planner.lengths[list(micro_batch.sample_ids)]
    length = packed_length(lengths) if micro_batch.packed else int(lengths.max())
    return int(planner.corrections.bucket_of(length))


def more_careful(now: MoreCareful, failed: Collection[int]) -> MoreCareful:
    """Plan the samples of an iteration again, those that failed with less memory.

    A pure function, alike on all ranks.

    Args:
        now: What ran out of memory, and its planner.
        failed: Indices of the micro-batches that did, at least one.

    Raises:
        NothingLeft: One of them was a single sample on as many ranks as possible with all blocks
            recomputed.
    """
    planner, plan = now.planner, now.plan
    largest = _largest_sp_size(planner)
    for index in sorted(failed):
        m = plan.micro_batches[index]
        if (m.batch_size, m.sp_size, m.recompute_blocks) == (
            1,
            largest,
            planner.cost_model.num_blocks,
        ):
            raise NothingLeft(
                index,
                f"it was one sample on {largest} {'ranks' if largest > 1 else 'rank'} with all"
                " blocks recomputed, and nothing takes less memory. Raise memory_limit_bytes if the"
                " device has more, use more ranks, or cut or leave out samples that are this long.",
            )
    buckets = {bucket_index(planner, plan.micro_batches[index]) for index in failed}
    corrected, all_fit = _with_less_memory(now, failed)
    apart = now.apart if all_fit else now.apart | buckets
    again = _same_samples(corrected, plan)
    if again is None or _runs_again(again, plan, failed):
        again, apart = again or plan, apart | buckets
    if apart:
        again = _one_by_one(corrected, again, apart, largest)
    return MoreCareful(
        planner=corrected, plan=again, attempts=now.attempts + 1, apart=frozenset(apart)
    )


def more_careful_later(now: MoreCareful, failed: Collection[int]) -> MoreCareful:
    """The same of a stream, whose samples are not read again: they keep their micro-batches.

    Raises:
        NothingLeft: One of them had all blocks recomputed.
    """
    plan = more_recomputed(now.plan, failed, now.planner.cost_model.num_blocks)
    corrected, _ = _with_less_memory(now, failed)
    return MoreCareful(planner=corrected, plan=plan, attempts=now.attempts + 1)


def more_recomputed(plan: Plan, failed: Collection[int], num_blocks: int) -> Plan:
    """The same micro-batches, those that failed with all blocks recomputed.

    Raises:
        NothingLeft: One of them had.
    """
    micro_batches = list(plan.micro_batches)
    for index in sorted(failed):
        if micro_batches[index].recompute_blocks >= num_blocks:
            raise NothingLeft(
                index,
                "all of its blocks were recomputed already, and its samples cannot be read again to"
                " split it. Lower memory_limit_bytes and start again from the last checkpoint.",
            )
        micro_batches[index] = replace(micro_batches[index], recompute_blocks=num_blocks)
    return replace(plan, micro_batches=tuple(micro_batches))


def _with_less_memory(now: MoreCareful, failed: Collection[int]) -> tuple[EpochPlanner, bool]:
    """A planner that would not plan again what failed, and whether all samples have a place."""
    growth = _LEAST_GROWTH[min(now.attempts, len(_LEAST_GROWTH) - 1)]
    wanted = _larger_factors(now.planner, now.plan, failed, growth)
    try:
        return now.planner.corrected(wanted), True
    except ValueError:  # some sample fits nowhere
        return _as_far_as_possible(now.planner, wanted), False


def _larger_factors(
    planner: EpochPlanner, plan: Plan, failed: Collection[int], growth: float
) -> Corrections:
    corrections, costs = planner.corrections, uncorrected(planner.cost_model)
    spare = planner.usable_bytes - costs.fixed_bytes
    for index in sorted(failed):
        m = plan.micro_batches[index]
        bucket = bucket_index(planner, m)
        before = planner.corrections.memory_factors[bucket]
        if m.packed:
            added = (m.est_bytes - costs.fixed_bytes) / before
        else:
            shape = (m.batch_size, m.seq_len, m.sp_size, m.recompute_blocks)
            added = float(costs.memory_bytes(*shape)) - costs.fixed_bytes
        needed = _ABOVE_LIMIT * spare / max(added, 1.0)
        # Costs are those of the padded length, which may be in the next bucket.
        padded = bucket if m.packed else int(corrections.bucket_of(m.seq_len))
        for k in {bucket, padded}:
            factor = max(corrections.memory_factors[k], growth * before, needed)
            corrections = corrections.with_memory_factor(k, factor)
    return corrections


def _as_far_as_possible(planner: EpochPlanner, wanted: Corrections) -> EpochPlanner:
    """With factors as near to those wanted as leaves every sample a place."""
    best, least, most = planner, 0.0, 1.0
    now = planner.corrections.memory_factors
    for _ in range(_HALVINGS):
        share = (least + most) / 2
        factors = tuple(
            old * math.pow(new / old, share)
            for old, new in zip(now, wanted.memory_factors, strict=True)
        )
        try:
            best = planner.corrected(replace(wanted, memory_factors=factors))
        except ValueError:
            most = share
        else:
            least = share
    return best


def _same_samples(planner: EpochPlanner, plan: Plan) -> Plan | None:
    """A plan of the same samples; None where the planner makes none of just them."""
    ids = _sample_ids(plan.micro_batches)
    consumed = np.ones(planner.lengths.size, dtype=bool)
    consumed[ids] = False
    try:
        plans = planner.rest(plan.epoch, consumed, first_iteration=plan.iteration, num_iterations=1)
    except ValueError:
        return None
    again = plans[0]
    return again if sorted(_sample_ids(again.micro_batches)) == sorted(ids) else None


def _runs_again(again: Plan, plan: Plan, failed: Collection[int]) -> bool:
    """Whether a plan has a micro-batch like one that failed."""

    def shape(m: MicroBatch) -> tuple[int, ...]:
        return (m.batch_size, m.seq_len, m.num_tokens, m.sp_size, m.recompute_blocks)

    out_of_memory = {shape(plan.micro_batches[index]) for index in failed}
    return any(shape(m) in out_of_memory for m in again.micro_batches)


def _one_by_one(planner: EpochPlanner, plan: Plan, buckets: Collection[int], sp_size: int) -> Plan:
    """The plan with all micro-batches of some buckets taken apart."""
    micro_batches: list[MicroBatch] = []
    for m in plan.micro_batches:
        if bucket_index(planner, m) in buckets:
            micro_batches += _apart(planner, m, sp_size)
        else:
            micro_batches.append(m)
    return replace(plan, micro_batches=tuple(micro_batches))


def _apart(planner: EpochPlanner, m: MicroBatch, sp_size: int) -> list[MicroBatch]:
    costs = planner.cost_model
    first_rank = planner.layout.block_of(m.first_rank, sp_size) or 0
    found = []
    for sample_id in m.sample_ids:
        length = int(planner.lengths[sample_id])
        multiple = 1 if m.packed else planner.options.pad_multiple
        seq_len = int(pad_to(length, sp_size, multiple))
        shape = (1, seq_len, sp_size, costs.num_blocks)
        found.append(
            replace(
                m,
                sample_ids=(sample_id,),
                seq_len=seq_len,
                num_tokens=length,
                first_rank=first_rank,
                sp_size=sp_size,
                recompute_blocks=costs.num_blocks,
                est_time_s=float(costs.time_s(*shape)),
                est_bytes=int(costs.memory_bytes(*shape)),
            )
        )
    return found


def _largest_sp_size(planner: EpochPlanner) -> int:
    sizes, _ = usable_sp_sizes(
        planner.cost_model, planner.world_size, planner.options, planner.sp_size_exclusions
    )
    return max(sizes)


def _sample_ids(micro_batches: Sequence[MicroBatch]) -> list[int]:
    return [i for m in micro_batches for i in m.sample_ids]

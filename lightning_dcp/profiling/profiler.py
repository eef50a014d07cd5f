"""Dual-layer cost profile of the user's own training step (paper §3.5).

1. The trials without which no fit exists run: three lengths, one and two samples, one rank each.
   They also show what the blocks' arguments mean and how many heads the attention has.
2. SP sizes that the model cannot be split by are excluded, by its heads and by comparing the model
   run whole with the model run sharded. The same few trials follow on those that are left.
3. Upward in length with one sample on every SP size, while the next trial's forecast fits the
   budget and the memory.
4. More samples per micro-batch, in what is left of the budget.

Every rank walks the same trials: what is decided follows from numbers that all ranks exchanged,
time among them, which is rank 0's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lightning_dcp.parallel.runtime import BlockRuntime
from lightning_dcp.parallel.topology import Topology
from lightning_dcp.planning.stack_terms import recompute_order
from lightning_dcp.profiling.cost_profile import CostProfile, ProfiledStack
from lightning_dcp.profiling.grid import choose_lengths
from lightning_dcp.profiling.meter import Meter, metered
from lightning_dcp.profiling.options import MIN_BATCH_SIZES, MIN_LENGTHS, ProfilingOptions
from lightning_dcp.profiling.preserve import preserve
from lightning_dcp.profiling.progress import progress_bar
from lightning_dcp.profiling.search import Search
from lightning_dcp.profiling.sharding_check import check_sharding, length_to_check
from lightning_dcp.profiling.stack_check import check_stacks, unfit_stacks
from lightning_dcp.profiling.trial import NUM_ACTIVE_BLOCKS, Gather, Step

_log = logging.getLogger(__name__)


def recheck_sharding(
    profile: CostProfile,
    *,
    step: Callable[[Any], torch.Tensor],
    module: nn.Module,
    runtime: BlockRuntime,
    make_batch: Callable[[int, int], Any],
    lengths: Sequence[int] | np.ndarray,
    topology: Topology,
    device: torch.device,
    compute_dtype: torch.dtype,
    gather: Gather,
) -> CostProfile:
    """Compare sharded with whole once more, before a profile from the cache is used.

    Seconds and bytes may come from an earlier run; that ``p > 1`` computes the same must be seen
    on the model as it is now, since not everything that decides it is in the cache's key.

    Args:
        profile: From the cache; its signature has been given to the runtime.
        step: As for `profile_costs`, and so are those that follow.
        module: The whole model.
        runtime: Attached to its blocks.
        make_batch: Makes a batch on the device.
        lengths: Length of every sample.
        topology: SP groups.
        device: Where the model is.
        compute_dtype: Type that blocks compute in.
        gather: Objects of all ranks in rank order, on every rank.

    Returns:
        The profile, without SP sizes that do not run; the same on all ranks.

    Raises:
        ShardingMismatch: If the model computes something else when it is sharded.
    """
    sizes = sorted({m.sp_size for m in profile.measurements if m.sp_size > 1})
    if not sizes:
        return profile
    checked = Step(
        step=step,
        make_batch=make_batch,
        module=module,
        runtime=runtime,
        topology=topology,
        device=device,
    )
    known = np.unique(np.asarray(lengths, dtype=np.int64))
    short = length_to_check(known, sizes)
    ran = [m for m in profile.measurements if m.batch_size == 1 and m.seq_len in known]
    whole = {m.seq_len for m in ran if m.sp_size == 1}
    longest = max((m.seq_len for m in ran if m.sp_size > 1 and m.seq_len in whole), default=0)
    found: dict[int, str] = {}
    for batch_size, seq_len, blocks in (
        (min(2, len(lengths)), short, None),
        (1, longest, NUM_ACTIVE_BLOCKS),
    ):
        tried = {m.sp_size for m in ran if m.seq_len == seq_len} if blocks else set(sizes)
        chosen = [p for p in sizes if p in tried and p not in found]
        if not chosen or (blocks and seq_len <= short):
            continue
        check = partial(
            check_sharding,
            checked,
            sp_sizes=chosen,
            batch_size=batch_size,
            seq_len=seq_len,
            compute_dtype=compute_dtype,
            gather=gather,
            active_blocks=blocks,
        )
        found |= check_stacks(check, checked, chosen)
    if not found:
        return profile
    return replace(
        profile,
        measurements=tuple(m for m in profile.measurements if m.sp_size not in found),
        sp_size_exclusions={**profile.sp_size_exclusions, **found},
    )


def profile_costs(
    *,
    step: Callable[[Any], torch.Tensor],
    module: nn.Module,
    runtime: BlockRuntime,
    make_batch: Callable[[int, int], Any],
    lengths: Sequence[int] | np.ndarray,
    topology: Topology,
    options: ProfilingOptions,
    device: torch.device,
    fixed_bytes: int,
    memory_limit_bytes: int | None = None,
    sp_sizes: Iterable[int] = (1,),
    gather: Gather | None = None,
    step_overhead_s: float = 0.0,
    fingerprint: str = "",
    progress: bool = True,
    self_check: bool = True,
) -> CostProfile:
    """Measure what a micro-batch costs; called by all ranks alike.

    The module, its gradients and all random states are bit-identical afterwards, also when
    profiling raises.

    Args:
        step: Runs the user's training step on a batch that is already on the device and returns the
            loss; precision contexts and silence of logging are its own business.
        module: The whole model, in the mode in which it trains.
        runtime: Of the model's blocks; attached afterwards.
        make_batch: ``(batch_size, seq_len)`` to a batch on the device, of real samples of about
            that length. With the same random states it gives the same batch on every rank. Its
            true size is read off the blocks' input.
        lengths: Length of every sample of the data set, in tokens.
        topology: Makes the SP groups as trials need them, on all ranks alike.
        options: Budget and the like.
        device: Where the model is.
        fixed_bytes: ``M_C``, with gradients and this rank's part of the optimizer state; the
            largest of all ranks counts.
        memory_limit_bytes: Trials that are expected to need more are left out; the least of all
            ranks counts.
        sp_sizes: SP sizes that may be used; those that this world has no group for are ignored.
        gather: Objects of all ranks in rank order, on every rank. Default: over torch's default
            process group, or this process alone where there is none.
        step_overhead_s: Known seconds per iteration outside micro-batches.
        fingerprint: Key under which the result may be cached.
        progress: Whether rank 0 shows a progress bar, if its standard error is a terminal.
        self_check: Whether sharded is compared with whole before any ``p > 1`` is used.

    Returns:
        The profile, identical on all ranks.

    Raises:
        ValueError: If there are no lengths, or even the smallest trial does not fit the memory.
        RuntimeError: If the step does not run through the blocks, or failed on another rank.
        ShardingMismatch: If the model computes something else when it is sharded.
    """
    all_lengths = np.asarray(lengths, dtype=np.int64)
    if all_lengths.size == 0:
        raise ValueError("The data set has no samples: there is nothing to measure costs on.")
    gather = gather or _default_gather(topology)
    sizes = sorted({1, *(p for p in sp_sizes if p in topology.sp_sizes)})
    limits = [limit for limit in gather(memory_limit_bytes) if limit is not None]
    user_step = Step(
        step=step,
        make_batch=make_batch,
        module=module,
        runtime=runtime,
        topology=topology,
        device=device,
    )
    if any(stack.stack.optional for stack in runtime.stacks):
        with preserve(module):
            _drop_unfit(user_step, all_lengths, options, gather)
    with (
        preserve(module),
        _metered_below(runtime) as meters,
        progress_bar(options.budget_s, progress and topology.rank == 0) as report,
    ):
        search = Search(
            user_step,
            meters=meters,
            lengths=all_lengths,
            options=options,
            fixed_bytes=max(gather(int(fixed_bytes))),
            memory_limit_bytes=min(limits, default=None),
            gather=gather,
            report=report,
            self_check=self_check,
        )
        search.run(sizes)
        signature = runtime.signature
        measurements = search.measurements()
        profile = CostProfile(
            measurements=measurements,
            num_blocks=runtime.num_blocks,
            fixed_bytes=search.fixed_bytes,
            step_overhead_s=step_overhead_s,
            signature=None if signature is None else signature.to_json(),
            attention_heads=() if signature is None else tuple(sorted(signature.attention_heads)),
            sp_size_exclusions=search.exclusions,
            fingerprint=fingerprint,
            skipped=tuple(search.skipped),
            duration_s=search.runner.elapsed_s(),
            stacks=tuple(
                ProfiledStack(
                    path=stack.path,
                    num_blocks=len(stack),
                    signature=None if stack.signature is None else stack.signature.to_json(),
                    whole_at=stack.whole_at,
                )
                for stack in runtime.stacks
            ),
            recompute_order=recompute_order(measurements),
        )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # blocks cut for the trials' shapes are of no use to training's
    # Equal by construction, save for what only one rank could know better, such as a version of
    # Python that rounds otherwise: rank 0's is everybody's.
    return CostProfile.from_json(gather(profile.to_json())[0])


def _drop_unfit(step: Step, lengths: np.ndarray, options: ProfilingOptions, gather: Gather) -> None:
    """Leave found stacks to the model that turn out not to be any."""
    shapes = [
        (batch_size, length)
        for length in choose_lengths(lengths, options)[:MIN_LENGTHS]
        for batch_size in range(min(MIN_BATCH_SIZES, len(lengths)), 0, -1)
    ]
    unfit = unfit_stacks(step, shapes, gather)
    for path, reason in unfit.items():
        _log.info("The modules at %s are not treated as repeated blocks: %s.", path, reason)
    step.runtime.keep_stacks(s.path for s in step.runtime.stacks if s.path not in unfit)


@contextmanager
def _metered_below(runtime: BlockRuntime) -> Iterator[list[tuple[Meter, ...]]]:
    """Meters on each stack's first blocks, below the wrappers; attached inside and after."""
    runtime.detach()
    try:
        with ExitStack() as stack:
            meters = [
                stack.enter_context(
                    metered(blocks.stack.blocks[: blocks.num_active(NUM_ACTIVE_BLOCKS)])
                )
                for blocks in runtime.stacks
            ]
            runtime.attach()
            try:
                yield meters
            finally:
                runtime.detach()
    finally:
        runtime.attach()


def _default_gather(topology: Topology) -> Gather:
    if topology.world_size == 1:
        return lambda value: [value]

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * topology.world_size
        dist.all_gather_object(values, value)
        return values

    return gather

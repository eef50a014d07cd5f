"""One trial of the grid: the same point on every SP group at once, one result for all ranks.

All groups of one size measure at the same time, so that they contend for memory bandwidth and
links as they do in training. Seconds are medians over the passes of a rank, each part of the step
for itself, as an interruption hits one part only. A group is as slow as its slowest rank; of
several groups the median counts. Bytes are the largest of any rank.

NOTE (failures): a rank that runs out of memory inside a collective leaves its peers waiting, which
nothing here can mend. Hence trials are forecast, and those that would not fit are left out before
they run. A failure outside collectives reaches all ranks through the exchange that ends a trial.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn

from lightning_dcp.parallel import rng
from lightning_dcp.parallel.runtime import BlockRuntime
from lightning_dcp.parallel.topology import SPGroup, Topology
from lightning_dcp.profiling.grid import Trial
from lightning_dcp.profiling.meter import Meter
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.profiling.probe import StepCosts, StepProbe

Gather = Callable[[Any], list[Any]]

NUM_ACTIVE_BLOCKS = 2
# Repeats of one trial take at most this share of the budget; a dear trial is measured once.
_SHARE_OF_REPEATS = 0.025
# First number of every key of random numbers that are drawn while profiling.
RNG_KEY = 0x50524F46


@dataclass(frozen=True)
class TrialResult:
    """What all ranks know after a trial.

    Attributes:
        costs: The result, or ``None`` if it failed.
        failure: Why it failed, naming the rank.
        unusable: Whether it failed for another reason than memory, sharded: the model runs with
            ``p = 1`` only, or it would have failed before.
        wall_s: Seconds of one pass with everything around it, by rank 0's clock.
        elapsed_s: Seconds since profiling began, by rank 0's clock.
    """

    costs: StepCosts | None
    failure: str | None
    unusable: bool
    wall_s: float
    elapsed_s: float


@dataclass(frozen=True)
class _Outcome:
    """What one rank reports."""

    first_rank: int | None  # of its group; None: in no group of this size
    passes: tuple[StepCosts, ...]
    error: str | None
    out_of_memory: bool
    wall_s: float
    elapsed_s: float


class TrialFailed(RuntimeError):
    """Another rank's training step raised while profiling."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """How one micro-batch is run: the user's side of a trial.

    Attributes:
        step: Runs the training step on a device batch and returns the loss.
        make_batch: ``(batch_size, seq_len)`` to device batch, the same on all ranks that call it
            with the same random state.
        module: The model.
        runtime: Shards and short-circuits its blocks.
        topology: The SP groups.
        device: Where it runs.
    """

    step: Callable[[Any], torch.Tensor]
    make_batch: Callable[[int, int], Any]
    module: nn.Module
    runtime: BlockRuntime
    topology: Topology
    device: torch.device

    def batch(self, batch_size: int, seq_len: int) -> Any:
        """A batch whose random parts (crops, noise) are the same on all ranks."""
        rng.seed(self.device, (RNG_KEY, batch_size, seq_len))
        return self.make_batch(batch_size, seq_len)

    def group(self, sp_size: int) -> SPGroup | None:
        """This rank's group of that size; ``None`` if the last ranks are too few for one."""
        return self.topology.own_group(sp_size)


class TrialRunner:
    """Runs trials; every rank calls it with the same ones in the same order.

    Args:
        step: The user's side.
        meters: On the blocks of each stack that run, the main stack first, below the runtime's own
            wrappers.
        options: Repeats and budget.
        gather: Objects of all ranks in rank order, on every rank.
    """

    def __init__(
        self,
        step: Step,
        *,
        meters: Sequence[Sequence[Meter]],
        options: ProfilingOptions,
        gather: Gather,
    ) -> None:
        self._step = step
        self._options = options
        self._gather = gather
        self._started_s = time.perf_counter()
        self._meters = tuple(tuple(of_stack) for of_stack in meters)

    @property
    def num_active_blocks(self) -> tuple[int, ...]:
        """Blocks of each stack that run in a trial: two, or the only one that there is."""
        return tuple(len(of_stack) for of_stack in self._meters)

    def elapsed_s(self) -> float:
        """Seconds since profiling began, rank 0's on every rank."""
        return float(self._gather(time.perf_counter() - self._started_s)[0])

    def num_timed_passes(self, pass_s: float) -> int:
        """How often a trial is repeated if one pass takes ``pass_s``; 0: its first pass counts."""
        slot_s = _SHARE_OF_REPEATS * self._options.budget_s
        return min(self._options.repeats, int(slot_s / max(pass_s, 1e-9)))

    def warm_up(self, trial: Trial) -> None:
        """Run ``trial`` once for nothing, so that gradients and work spaces are there."""
        self._passes(trial, 1, count_bytes=False)

    def run(self, trial: Trial) -> TrialResult:
        """Measure ``trial`` on every SP group of its size.

        Raises:
            TrialFailed: If the training step of another rank raised anything but out of memory
                with ``p = 1``; the rank itself raises what was raised.
        """
        counted = timed = self._passes(trial, 1, count_bytes=True)
        num_timed = self.num_timed_passes(counted[0].wall_s)
        if num_timed and _failed(counted) is None:
            timed = self._passes(trial, num_timed, count_bytes=False)
        failed = _failed(timed)
        return TrialResult(
            costs=_combine(counted, timed) if failed is None else None,
            failure=None if failed is None else failed.error,
            unusable=failed is not None and not failed.out_of_memory,
            wall_s=timed[0].wall_s,
            elapsed_s=timed[0].elapsed_s,
        )

    def _passes(self, trial: Trial, num_passes: int, *, count_bytes: bool) -> list[_Outcome]:
        """Run some passes here, then exchange outcomes with all ranks."""
        group = self._step.group(trial.sp_size)
        passes: list[StepCosts] = []
        raised: Exception | None = None
        error: str | None = None
        out_of_memory = False
        started_s = time.perf_counter()
        try:
            if group is not None:
                for _ in range(num_passes):
                    passes.append(self._one_pass(trial, group, count_bytes=count_bytes))
        except Exception as exception:  # noqa: BLE001 (raised again below, after all ranks know)
            out_of_memory = is_out_of_memory(exception)
            what = "out of memory" if out_of_memory else f"{type(exception).__name__}: {exception}"
            error = f"{what} on rank {self._step.topology.rank}"
            # A traceback keeps the frames, and with them the tensors, that took the memory.
            raised = None if out_of_memory or trial.sp_size > 1 else exception
        if out_of_memory and self._step.device.type == "cuda":
            torch.cuda.empty_cache()
        ended_s = time.perf_counter()
        outcomes: list[_Outcome] = self._gather(
            _Outcome(
                first_rank=None if group is None else group.first_rank,
                passes=tuple(passes),
                error=error,
                out_of_memory=out_of_memory,
                wall_s=(ended_s - started_s) / num_passes,
                elapsed_s=ended_s - self._started_s,
            )
        )
        if raised is not None:
            raise raised
        failed = _failed(outcomes)
        if failed is not None and not failed.out_of_memory and trial.sp_size == 1:
            raise TrialFailed(
                f"the training step failed while costs were measured ({trial}): {failed.error}"
            )
        return outcomes

    def _one_pass(self, trial: Trial, group: SPGroup, *, count_bytes: bool) -> StepCosts:
        step = self._step
        batch = step.batch(trial.batch_size, trial.seq_len)
        context = step.runtime.micro_batch(
            group=group,
            active_blocks=NUM_ACTIVE_BLOCKS,
            rng_key=(RNG_KEY, trial.batch_size, trial.seq_len, group.first_rank),
            # What an argument's dimensions mean is learned from whole inputs.
            observe=count_bytes and trial.sp_size == 1,
        )
        probe = StepProbe(
            self._meters[0],
            others=self._meters[1:],
            module=step.module,
            device=step.device,
            count_bytes=count_bytes,
        )
        with context, probe:
            step.step(batch).backward()  # type: ignore[no-untyped-call]
        return probe.costs()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whatever device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "not enough memory" in text
        or "out of memory" in text
        or "can't allocate memory" in text
        or "_status_alloc_failed" in text
    )


def _failed(outcomes: Sequence[_Outcome]) -> _Outcome | None:
    """The outcome of the first rank that failed, one that is not about memory if there is one."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    return min(failed, key=lambda outcome: outcome.out_of_memory, default=None)


def _combine(counted: Sequence[_Outcome], timed: Sequence[_Outcome]) -> StepCosts:
    """One result from those of all ranks; see the module's docstring for the rule."""
    groups: dict[int, list[StepCosts]] = {}
    for outcome in timed:
        if outcome.first_rank is not None:
            groups.setdefault(outcome.first_rank, []).append(_typical(outcome.passes))
    seconds = _typical([max(members, key=_counted_s) for members in groups.values()])
    bytes_of = [costs for outcome in counted for costs in outcome.passes]
    return replace(
        seconds,
        saved_bytes=max(costs.saved_bytes or 0.0 for costs in bytes_of),
        input_bytes=max(costs.input_bytes or 0.0 for costs in bytes_of),
        rest_bytes=max(costs.rest_bytes or 0.0 for costs in bytes_of),
        others=tuple(
            replace(
                other,
                saved_bytes=max(costs.others[i].saved_bytes or 0.0 for costs in bytes_of),
                input_bytes=max(costs.others[i].input_bytes or 0.0 for costs in bytes_of),
            )
            for i, other in enumerate(seconds.others)
        ),
    )


def _typical(costs: Sequence[StepCosts]) -> StepCosts:
    """Costs with the median of each of the seconds."""
    return replace(
        costs[0],
        total_s=median(c.total_s for c in costs),
        forward_s=median(c.forward_s for c in costs),
        backward_s=median(c.backward_s for c in costs),
        rest_s=median(c.rest_s for c in costs),
        others=tuple(
            replace(
                of_passes[0],
                forward_s=median(c.forward_s for c in of_passes),
                backward_s=median(c.backward_s for c in of_passes),
            )
            for of_passes in zip(*(c.others for c in costs), strict=True)
        ),
    )


def _counted_s(costs: StepCosts) -> float:
    """Seconds without the blocks that warm up, in which the faster ranks wait for the slowest."""
    return costs.rest_s + sum(stack.forward_s + stack.backward_s for stack in costs.stacks)

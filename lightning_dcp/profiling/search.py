"""The walk over the grid: what to measure next, while time and memory last.

Decisions follow from numbers that all ranks exchanged, so that every rank walks the same trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from lightning_dcp.planning.measurement import BlockCosts, Measurement
from lightning_dcp.profiling.cost_profile import SkippedTrial
from lightning_dcp.profiling.grid import (
    Forecast,
    Trial,
    between,
    choose_lengths,
    climb,
    mandatory_trials,
    packed_sizes,
    seen_lengths,
    true_sizes,
    widen,
)
from lightning_dcp.profiling.meter import Meter
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.profiling.probe import StepCosts
from lightning_dcp.profiling.sharding_check import check_sharding, length_to_check
from lightning_dcp.profiling.stack_check import check_stacks, leave_optional_whole
from lightning_dcp.profiling.trial import NUM_ACTIVE_BLOCKS, Gather, Step, TrialRunner

# The climb in length leaves the rest of the budget to larger micro-batches.
_SHARE_OF_CLIMB = 0.6


class Search:
    """Walks the grid; holds what was measured and what follows from it."""

    def __init__(
        self,
        step: Step,
        *,
        meters: Sequence[Sequence[Meter]],
        lengths: np.ndarray,
        options: ProfilingOptions,
        fixed_bytes: int,
        memory_limit_bytes: int | None,
        gather: Gather,
        report: Callable[[str, float], None],
        self_check: bool = True,
    ) -> None:
        self.fixed_bytes = fixed_bytes
        self.exclusions: dict[int, str] = {}
        self.skipped: list[SkippedTrial] = []
        self.runner = TrialRunner(step, meters=meters, options=options, gather=gather)
        self._step = step
        self._lengths = lengths
        self._options = options
        self._memory_limit_bytes = memory_limit_bytes
        self._gather = gather
        self._report = report
        self._self_check = self_check
        self._elapsed_s = 0.0
        self._check_s = 0.0  # of the self-check, which takes nothing from the budget
        self._tried: set[Trial] = set()
        self._succeeded: dict[Trial, StepCosts] = {}
        self._pass_s = Forecast()
        self._bytes = Forecast()
        self._compute_dtype = torch.float32

    def run(self, sp_sizes: Sequence[int]) -> None:
        """All four stages; see :mod:`.profiler`."""
        grid = choose_lengths(self._lengths, self._options)
        num_samples = len(self._lengths)
        first = mandatory_trials(grid, (1,), num_samples)
        if self._refusal(first[0], None) is None:
            self.runner.warm_up(first[0])
        for trial in first:
            self._try(trial, time_share=None)
        if not self._succeeded:
            reason = self.skipped[0].reason
            raise ValueError(
                f"Not even the smallest micro-batch ({first[0]}) could be measured: {reason}. "
                "Raise the memory limit or use a smaller model."
            )
        self._exclude([p for p in sp_sizes if p > 1], grid)
        allowed = [p for p in sp_sizes if p not in self.exclusions]
        for trial in mandatory_trials(grid, allowed, num_samples):
            self._try(trial, time_share=None)
        for trial in climb(grid, allowed):
            self._try(trial, time_share=_SHARE_OF_CLIMB)
        self._climb_between(grid, allowed)
        measured = sorted({trial.seq_len for trial in self._succeeded if trial.batch_size == 1})
        for trial in widen(measured, allowed, num_samples):
            self._try(trial, time_share=1.0)
        self._check_longest(sp_sizes, grid)
        self._check_named()

    def measurements(self) -> tuple[Measurement, ...]:
        """The measured points of all SP sizes that are not excluded, in their order."""
        found: dict[tuple[int, int, int], Measurement] = {}
        sizes = self._true_sizes()
        for (trial, costs), (batch_size, seq_len) in zip(
            self._succeeded.items(), sizes, strict=True
        ):
            key = (batch_size, seq_len, trial.sp_size)
            # The user's collate may make one length of two; the first point is as good.
            if trial.sp_size not in self.exclusions and key not in found:
                found[key] = Measurement(
                    batch_size=batch_size,
                    seq_len=seq_len,
                    sp_size=trial.sp_size,
                    forward_s=costs.forward_s,
                    backward_s=costs.backward_s,
                    rest_s=costs.rest_s,
                    saved_bytes=costs.saved_bytes or 0.0,
                    input_bytes=costs.input_bytes or 0.0,
                    rest_bytes=costs.rest_bytes or 0.0,
                    others=tuple(
                        BlockCosts(
                            other.forward_s,
                            other.backward_s,
                            other.saved_bytes or 0.0,
                            other.input_bytes or 0.0,
                        )
                        for other in costs.others
                    ),
                )
        return tuple(found.values())

    def _true_sizes(self) -> list[tuple[int, int]]:
        """Of all trials, by the first stack whose tokens are the data set's, else the main one."""
        if self._step.runtime.packing:  # b samples of one length each, in one sequence
            stack = self._step.runtime.stacks[0]
            dim = None if stack.signature is None else stack.signature.sequence_dim
            return packed_sizes(
                [(trial, costs.input_shape) for trial, costs in self._succeeded.items()], dim
            )
        chosen = None
        for i, stack in enumerate(self._step.runtime.stacks):
            seen = [
                (trial, costs.stacks[i].input_shape) for trial, costs in self._succeeded.items()
            ]
            signature = stack.signature
            if signature is None or not all(shape for _, shape in seen):
                continue
            if seen_lengths(seen, signature.sequence_dim) is not None:
                return true_sizes(seen, signature.sequence_dim, signature.batch_dim)
            chosen = chosen or true_sizes(seen, signature.sequence_dim, signature.batch_dim)
        return chosen or [(trial.batch_size, trial.seq_len) for trial in self._succeeded]

    def _check_named(self) -> None:
        """An error for a stack that the user named and no trial called."""
        for i, stack in enumerate(self._step.runtime.stacks):
            called = any(costs.stacks[i].input_shape for costs in self._succeeded.values())
            if not called and not stack.stack.optional:
                raise RuntimeError(
                    f"The training step did not call the blocks of {stack.path!r} in any "
                    f"micro-batch that was measured, so that their cost is not known. Leave them "
                    f"out of `blocks`."
                )

    def _climb_between(self, grid: Sequence[int], sp_sizes: Sequence[int]) -> None:
        """Where the next length of the grid was too dear, try one not so far up."""
        for sp_size in sp_sizes:
            reached = [t.seq_len for t in self._succeeded if t.sp_size == sp_size]
            top = max(reached, default=0)
            beyond = [length for length in grid if length > top]
            if not reached or not beyond:
                continue
            for length in reversed(between(self._lengths, top, beyond[0])):
                trial = Trial(1, length, sp_size)
                if self._refusal(trial, _SHARE_OF_CLIMB) is None:
                    self._try(trial, time_share=_SHARE_OF_CLIMB)
                    break

    def _try(self, trial: Trial, *, time_share: float | None) -> None:
        """Measure ``trial`` unless it was tried before or does not fit memory or time."""
        if trial in self._tried or self._is_excluded(trial.sp_size):
            return
        refusal = self._refusal(trial, time_share)
        if refusal is not None:
            self._skip(trial, refusal)
            return
        self._tried.add(trial)
        self._report(f"b={trial.batch_size} s={trial.seq_len} p={trial.sp_size}", self._elapsed_s)
        result = self.runner.run(trial)
        self._elapsed_s = result.elapsed_s
        self._report("", self._elapsed_s)
        if result.unusable and leave_optional_whole(
            self._step.runtime.stacks, trial.sp_size, result.failure or "failed"
        ):
            result = self.runner.run(trial)
            self._elapsed_s = result.elapsed_s
        if result.costs is None:
            reason = result.failure or "failed"
            self._skip(trial, reason)
            if result.unusable:
                self.exclusions[trial.sp_size] = (
                    f"the model does not run with its blocks sharded over {trial.sp_size} ranks: "
                    f"{reason}"
                )
            return
        self._succeeded[trial] = result.costs
        self._compute_dtype = getattr(torch, result.costs.dtype)
        self._pass_s.add(trial, result.wall_s)
        self._bytes.add(trial, _bytes_of_step(result.costs, self.runner.num_active_blocks))

    def _check_longest(self, sp_sizes: Sequence[int], grid: Sequence[int]) -> None:
        """Compare sharded with whole once more, where models do what they do in long ones only.

        Scores scaled by the logarithm of the length, for one. Of the measured lengths, with the
        few blocks that trials run.
        """
        if not self._self_check:
            return
        ran = [trial for trial in self._succeeded if trial.batch_size == 1]
        candidates = [p for p in sp_sizes if p > 1 and not self._is_excluded(p)]
        whole = {trial.seq_len for trial in ran if trial.sp_size == 1}
        longest = max(
            (t.seq_len for t in ran if t.sp_size in candidates and t.seq_len in whole), default=0
        )
        sizes = [p for p in candidates if Trial(1, longest, p) in self._succeeded]
        if not sizes or longest <= length_to_check(grid, candidates):
            return
        self._compare(sizes, 1, longest, active_blocks=NUM_ACTIVE_BLOCKS)

    def _is_excluded(self, sp_size: int) -> bool:
        """Asked before every trial: windowed attention, for one, shows in longer sequences only."""
        if sp_size > 1 and sp_size not in self.exclusions:
            self.exclusions |= self._step.runtime.sp_size_exclusions([sp_size])
        return sp_size in self.exclusions

    def _skip(self, trial: Trial, reason: str) -> None:
        self.skipped = [s for s in self.skipped if _trial_of(s) != trial]
        self.skipped.append(
            SkippedTrial(
                batch_size=trial.batch_size,
                seq_len=trial.seq_len,
                sp_size=trial.sp_size,
                reason=reason,
            )
        )

    def _refusal(self, trial: Trial, time_share: float | None) -> str | None:
        """Why ``trial`` must not run now, or ``None``."""
        if self._memory_limit_bytes is not None:
            needed = self.fixed_bytes + (self._bytes.predict(trial) or 0.0)
            if needed > self._memory_limit_bytes:
                return f"would need {needed:.3g} of {self._memory_limit_bytes:.3g} bytes"
        if time_share is not None:
            pass_s = self._pass_s.predict(trial) or 0.0
            trial_s = pass_s * (1 + self.runner.num_timed_passes(pass_s))
            spent_s = self._elapsed_s - self._check_s
            left_s = time_share * self._options.budget_s - spent_s
            if trial_s > left_s:
                return f"would take {trial_s:.2g} s of {max(0.0, left_s):.2g} s left for it"
        return None

    def _exclude(self, sp_sizes: Sequence[int], grid: Sequence[int]) -> None:
        """Fill ``exclusions`` for sizes above 1: by their blocks, then by the self-check."""
        if not sp_sizes:
            return
        candidates = [p for p in sp_sizes if not self._is_excluded(p)]
        if not candidates or not self._self_check:
            return
        self._report("comparing sharded with whole", self._elapsed_s)
        before_s = self.runner.elapsed_s()
        self._compare(candidates, min(2, len(self._lengths)), length_to_check(grid, candidates))
        self._elapsed_s = self.runner.elapsed_s()
        self._check_s = self._elapsed_s - before_s

    def _compare(
        self,
        sp_sizes: Sequence[int],
        batch_size: int,
        seq_len: int,
        *,
        active_blocks: int | None = None,
    ) -> None:
        """The self-check at one shape; sizes that cannot be used go to ``exclusions``."""
        check = partial(
            check_sharding,
            self._step,
            sp_sizes=sp_sizes,
            batch_size=batch_size,
            seq_len=seq_len,
            compute_dtype=self._compute_dtype,
            gather=self._gather,
            active_blocks=active_blocks,
        )
        # It wakes parameters and changes modes; trials go on with what was there before.
        self.exclusions |= check_stacks(check, self._step, sp_sizes)


def _bytes_of_step(costs: StepCosts, num_blocks: Sequence[int]) -> float:
    blocks = sum(
        n * ((stack.saved_bytes or 0.0) + (stack.input_bytes or 0.0))
        for n, stack in zip(num_blocks, costs.stacks, strict=True)
    )
    return blocks + (costs.rest_bytes or 0.0)


def _trial_of(skipped: SkippedTrial) -> Trial:
    return Trial(skipped.batch_size, skipped.seq_len, skipped.sp_size)

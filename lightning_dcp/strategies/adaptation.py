"""Plans that follow what micro-batches and ranks really take.

::

    every iteration    each rank keeps the seconds of its micro-batches
    every 8th          one small exchange of them -> all ranks fit the same factors
                       (planning/slowness.py) and decide alike (planning/adapting.py)
    if worth it        the rest of the epoch is planned again with corrected costs

The first iterations, and one after each change of plans, are left out: what is done once there says
nothing of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_dcp.planning.adapting import DriftMonitor, Gain
from lightning_dcp.planning.careful import bucket_index
from lightning_dcp.planning.drift import Corrections
from lightning_dcp.planning.epoch import EpochPlan
from lightning_dcp.planning.planner import EpochPlanner
from lightning_dcp.planning.slowness import Observed, Slowness, slowness_of
from lightning_dcp.strategies.agreement import collectively, gather_rows
from lightning_dcp.strategies.checkpointing.resuming import rest_of

if TYPE_CHECKING:
    import lightning as L

    from lightning_dcp.planning.plan import MicroBatch, Plan
    from lightning_dcp.strategies.iteration_state import IterationState
    from lightning_dcp.strategies.preparation import Preparation
    from lightning_dcp.strategies.reliability import ReliabilityOptions
    from lightning_dcp.strategies.replanning import Replanner

__all__ = ["Adaptation"]

WINDOW = 8
"""Iterations between exchanges."""

_WARM_UP = 3
_MOST_MICRO_BATCHES = 20_000  # looked at in one window: with more ranks fewer iterations are enough
_LEAST_LEFT = 4  # iterations of an epoch for which it is compared; else the next epoch is
_MOST_WON = 0.5  # of the time that is left


class AdaptingStrategy(Protocol):
    """What adapting needs of the strategy."""

    _preparation: Preparation | None
    _replanner: Replanner | None


class Adaptation:
    """Follows the iterations of one `fit`, and replans where it pays.

    Args:
        strategy: whose plans they are.
        trainer: of the `fit`.
        options: whether to adapt, and to what.
        rank_at: (W,) the rank at each place of the plans.
        rank: of this process.
        device: what ranks exchange lies there.
    """

    def __init__(
        self,
        strategy: AdaptingStrategy,
        trainer: L.Trainer,
        options: ReliabilityOptions,
        *,
        rank_at: Sequence[int],
        rank: int,
        device: torch.device,
    ) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._options = options
        self._rank_at = list(rank_at)
        self._place = self._rank_at.index(rank)
        self._device = device
        self._monitor = DriftMonitor(
            adapt_buckets=options.adapt_to_drift, adapt_ranks=options.adapt_to_rank_speed
        )
        self._window: list[tuple[Plan, list[float]]] = []
        self._left_out = _WARM_UP
        self._planner: Any = None
        self._epoch = -1
        self._wanted: Corrections | None = None
        self._planning_s = 0.0
        self._warned = False

    @property
    def slowness(self) -> Slowness | None:
        """What was found last; the same on all ranks."""
        return self._monitor.shown

    def end_iteration(self, state: IterationState) -> None:
        """Take up an iteration that has run, in its backward pass. A collective now and then."""
        preparation = self._strategy._preparation
        assert preparation is not None
        plan = state.plan
        if plan.epoch != self._epoch:
            self._epoch = plan.epoch
            self._monitor.begin_epoch()
        if preparation.planner is not self._planner:
            self._follow(preparation.planner)
        if self._left_out:
            self._left_out -= 1
            return
        if not state.attempt:  # else it is not as other iterations are
            self._window.append((plan, [lap.seconds() for lap in state.laps]))
        if len(self._window) >= WINDOW:
            self._end_window()
        if self._wanted is not None:
            self._try(self._wanted, plan)

    def _follow(self, planner: Any) -> None:
        """Begin anew with other plans."""
        first, self._planner = self._planner is None, planner
        if not first:
            self._left_out = max(self._left_out, 1)
            self._monitor.forget()
        self._window = []
        self._wanted = None

    def _end_window(self) -> None:
        observed, self._planning_s = self._exchange()
        corrections = self._corrections
        slowness = slowness_of(
            observed, corrections.bucket_edges, len(self._rank_at), self._rank_at
        )
        self._monitor.observe(slowness, corrections)
        self._warn_of_slow_rank()
        if self._can_replan:
            self._wanted = self._of_first_rank(self._monitor.proposal(corrections), corrections)

    def _of_first_rank(self, wanted: Corrections | None, now: Corrections) -> Corrections | None:
        """What one rank has found, on all: processors differ in the last digit. A collective."""
        num, world_size = len(now.time_factors), len(self._rank_at)
        row = torch.zeros(1 + num + world_size, dtype=torch.float64)
        if wanted is not None:
            speed = wanted.rank_speed or (0.0,) * world_size
            row[:] = torch.tensor([1.0, *wanted.time_factors, *speed], dtype=torch.float64)
        found = gather_rows(row.to(self._device)).cpu()[0].tolist()
        if not found[0]:
            return None
        speed = tuple(found[1 + num :])
        return replace(
            now,
            time_factors=tuple(found[1 : 1 + num]),
            rank_speed=speed if all(speed) else (),
        )

    def _worth(self, gain: Gain, planning_s: float) -> bool:
        """Whether the first rank thinks so. A collective."""
        row = torch.tensor([gain.is_worth(planning_s)], dtype=torch.float64, device=self._device)
        return bool(gather_rows(row)[0, 0])

    @property
    def _can_replan(self) -> bool:
        return isinstance(self._planner, EpochPlanner) and self._strategy._replanner is not None

    @property
    def _corrections(self) -> Corrections:
        if isinstance(self._planner, EpochPlanner):
            return self._planner.corrections
        return Corrections.none((1, 1 << 31))  # a stream: of all lengths together

    def _bucket_of(self, micro_batch: MicroBatch) -> int:
        if isinstance(self._planner, EpochPlanner):
            return bucket_index(self._planner, micro_batch)
        return 0

    def _exchange(self) -> tuple[Observed, float]:
        """What all ranks took, and the seconds that planning takes on the slowest. A collective."""
        window, self._window = self._window, []
        largest = max(len(plan.micro_batches) for plan, _ in window)
        window = window[-max(2, _MOST_MICRO_BATCHES // largest) :]
        widths = [max(plan.accumulation) for plan, _ in window]
        row = torch.zeros(1 + sum(widths), dtype=torch.float64)
        row[0] = getattr(self._planner, "planning_s", 0.0)
        start = 1
        starts = []
        for (_, seconds), width in zip(window, widths, strict=True):
            row[start : start + len(seconds)] = torch.tensor(seconds, dtype=torch.float64)
            starts.append(start)
            start += width
        rows = gather_rows(row.to(self._device)).cpu()[self._rank_at]
        laps = [
            rows[:, first : first + width].tolist()
            for first, width in zip(starts, widths, strict=True)
        ]
        plans = [plan for plan, _ in window]
        return Observed.of(plans, laps, self._bucket_of), float(rows[:, 0].max())

    # ---- planning again --------------------------------------------------------------------------

    def _try(self, corrections: Corrections, running: Plan) -> None:
        """Plan the rest of the epoch with other costs, and follow it if it is quicker.

        A collective, unless nothing is left of the epoch.
        """
        preparation, replanner = self._strategy._preparation, self._strategy._replanner
        assert preparation is not None and replanner is not None
        if preparation.stream is not None:
            self._try_in_stream(preparation.planner, corrections, running)
            return
        planner, sampler = preparation.planner, preparation.sampler
        epoch, done = running.epoch, running.iteration + 1
        rest = sampler.rest
        of_rest = rest is not None and rest.epoch == epoch
        plans = rest.plans if rest is not None and of_rest else sampler.plans(epoch)
        first = done - (rest.first_iteration if rest is not None and of_rest else 0)
        num_left = len(plans) - first
        most = self._trainer.max_epochs
        # Epochs to come win at least as much as what is left of this one.
        more_epochs = 1 if most is None or most < 0 else max(0, most - epoch - 1)
        planning_s = self._planning_s / (1 + more_epochs)
        if not num_left or not isinstance(plans, EpochPlan):
            return  # there is the next epoch
        if num_left < _LEAST_LEFT:
            if not more_epochs:
                return
            plans, first = sampler.plans(epoch + 1), 0  # kept, if nothing is changed
            assert isinstance(plans, EpochPlan)
        left_s = float(plans.makespan_s[first:].sum())
        if planning_s > _MOST_WON * left_s:
            self._wanted = None
            self._monitor.tried(taken=False)
            return

        def plan() -> tuple[EpochPlanner, Gain]:
            assert isinstance(plans, EpochPlan)
            new = planner.corrected(corrections)
            if num_left < _LEAST_LEFT:
                return new, Gain.of(new, plans, new.epoch(epoch + 1))
            progress = sampler.progress(done, int(planner.lengths.size))
            left = rest_of(new, epoch, done, progress.consumed, num_left).plans
            assert isinstance(left, EpochPlan)
            return new, Gain.of(new, plans, left, first)

        new, gain = collectively("Planning with corrected costs", plan)
        self._wanted = None
        worth = self._worth(gain, planning_s)
        self._monitor.tried(taken=worth)
        if not worth:
            return
        rank_zero_info(_what_changes(planner, corrections, epoch, done, gain))
        replanner.replace(new, next_iteration=done)
        self._follow(new)

    def _try_in_stream(
        self, planner: EpochPlanner, corrections: Corrections, running: Plan
    ) -> None:
        """As `_try`, judged by the samples that the planner was made of: others are not known."""
        replanner = self._strategy._replanner
        assert replanner is not None

        def plan() -> tuple[EpochPlanner, Gain] | None:
            try:
                new = planner.corrected(corrections)
            except ValueError:  # a sample that fitted does not fit any more
                return None
            return new, Gain.of(new, planner.epoch(0), new.epoch(0))

        found = collectively("Planning with corrected costs", plan)
        self._wanted = None
        worth = found is not None and self._worth(found[1], self._planning_s)
        self._monitor.tried(taken=worth)
        if found is None or not worth:
            return
        new, gain = found
        done = running.iteration + 1
        rank_zero_info(_what_changes(planner, corrections, running.epoch, done, gain))
        replanner.replace(new, next_iteration=done)
        self._follow(new)

    def _warn_of_slow_rank(self) -> None:
        found = self._monitor.slow_rank
        if found is None or self._warned:
            return
        self._warned = True
        rank, factor = found
        text = (
            f"DCP: rank {rank} takes {factor:.1f} times as long as the typical rank for the same"
            " work, and the others wait for it in every iteration. Look for another process, a"
            " lower clock or a slower data path there."
        )
        if not self._options.adapt_to_rank_speed:
            text += (
                " ReliabilityOptions(adapt_to_rank_speed=True) gives it less work for as long as"
                " it is so slow."
            )
        rank_zero_warn(text)


def _what_changes(
    planner: EpochPlanner, corrections: Corrections, epoch: int, done: int, gain: Gain
) -> str:
    parts = []
    edges, before = corrections.bucket_edges, planner.corrections.time_factors
    shown_s = {row.lo: row.time_s for row in planner.bucket_table()}
    for k, (old, new) in enumerate(zip(before, corrections.time_factors, strict=True)):
        if abs(new / old - 1) >= 0.02:
            text = f"those of {edges[k]:,}-{edges[k + 1] - 1:,} tokens {new / old:.2f} times"
            if edges[k] in shown_s:
                seconds = shown_s[edges[k]]
                text += f", {seconds * 1e3:.3g} -> {seconds * new / old * 1e3:.3g} ms"
            parts.append(text)
    parts += [
        f"rank {rank} {factor:.2f} times that of others"
        for rank, factor in enumerate(corrections.rank_speed)
        if abs(factor - 1) >= 0.02
    ]
    shown = "; ".join(parts[:8]) + (f", and {len(parts) - 8} more" if len(parts) > 8 else "")
    return (
        f"DCP: micro-batches take another time than predicted ({shown}). Epoch {epoch} is planned"
        f" again from iteration {done} on: predicted to be {gain.speedup:.2f} times as fast as with"
        " the plans so far."
    )

"""Other plans for the running epoch, from an agreed iteration on.

::

    iteration k-1   all ranks call `replace(planner, next_iteration=k)`, inside its backward pass
                    -> what is left of the epoch is planned by the new planner, compared over ranks
                    -> the loader begins anew at k: what workers have fetched by the old plans is
                       dropped; len(loader), limits, validation and progress bars follow
    iteration k ..  by the new plans
    later epochs    by the new planner
"""

from __future__ import annotations

from dataclasses import replace as with_changes
from typing import TYPE_CHECKING, Protocol

import numpy as np

from lightning_dcp.planning.drift import CorrectedCosts, Corrections, uncorrected
from lightning_dcp.planning.planner import EpochPlanner
from lightning_dcp.strategies._lightning_compat import resuming as compat
from lightning_dcp.strategies.agreement import check_same_on_all_ranks, collectively
from lightning_dcp.strategies.checkpointing.resuming import digest_of, rest_of

if TYPE_CHECKING:
    import lightning as L

    from lightning_dcp.data.sampler import Rest
    from lightning_dcp.data.streams import StreamPlans
    from lightning_dcp.strategies.checkpointing.plan_state import PlanState
    from lightning_dcp.strategies.preparation import Preparation

__all__ = ["Replanner", "corrections_of"]


def corrections_of(planner: object) -> Corrections | None:
    """How a planner's costs differ from the cost profile; None where they do not."""
    found = planner.corrections if isinstance(planner, EpochPlanner) else None
    return None if found is None or found.changes_nothing else found


class PreparedStrategy(Protocol):
    """What replanning needs of the strategy."""

    _preparation: Preparation | None


class Replanner:
    """Changes the planner of a running `fit`, on all ranks at once.

    Args:
        strategy: whose preparation holds the planner and the loader's sampler.
        trainer: of the `fit`.
    """

    def __init__(self, strategy: PreparedStrategy, trainer: L.Trainer) -> None:
        self._strategy = strategy
        self._trainer = trainer

    @property
    def preparation(self) -> Preparation:
        """What is trained from now."""
        found = self._strategy._preparation
        assert found is not None
        return found

    def replace(self, planner: EpochPlanner, *, next_iteration: int) -> None:
        """Let the running epoch go on by another planner's plans. A collective.

        To be called on all ranks alike while iteration ``next_iteration - 1`` runs: at the end of
        `Strategy.backward`, before the optimizer's step. The number of iterations stays unless
        there are fewer samples than iterations, or policy ``"global-batch"`` says otherwise.

        Args:
            planner: for the same samples, cut at the same length.
            next_iteration: the first iteration of the running epoch with new plans.

        Raises:
            ValueError: the planner cuts samples otherwise: workers hold what the first one said; or
                a sample fits nowhere.
            RuntimeError: planning failed on another rank.
            MisconfigurationException: ranks have made different plans.
        """
        if self.preparation.stream is not None:
            self._replace_in_stream(self.preparation.stream, planner, next_iteration)
            return
        sampler = self.preparation.sampler
        epoch, num_left = sampler.epoch, len(sampler) - next_iteration

        def plan() -> Rest:
            self._refuse_other_lengths(planner)
            progress = sampler.progress(next_iteration, int(planner.lengths.size))
            return rest_of(planner, epoch, next_iteration, progress.consumed, num_left)

        rest = collectively("Planning the rest of the epoch again", plan)
        check_same_on_all_ranks(
            "the rest of the epoch",
            {
                **planner.inputs,
                "epoch": str(epoch),
                "next iteration": str(next_iteration),
                "plans": digest_of(rest),
            },
            "Start every rank with the same code, data, options and libraries.",
        )
        self.use(planner)

        def go_on() -> None:
            sampler.replace(planner, rest, self.end_rest)
            compat.set_epoch_length(self._trainer, len(sampler), next_iteration)
            compat.go_on_with_train_loader(self._trainer, next_iteration)

        # New workers may fail to start on one rank, where memory is short.
        collectively("Restarting the train loader", go_on)
        compat.show_epoch_length(self._trainer)

    def _replace_in_stream(
        self, stream: StreamPlans, planner: EpochPlanner, next_iteration: int
    ) -> None:
        """What waits, and what was fetched of iterations to come, is planned by the new planner."""
        check_same_on_all_ranks(
            "the rest of the stream",
            {**planner.inputs, "next iteration": str(next_iteration)},
            "Start every rank with the same code, data, options and libraries.",
        )
        self.use(planner)
        stream.replan(planner, next_iteration)
        compat.go_on_with_stream(self._trainer, next_iteration)

    def use(self, planner: EpochPlanner) -> None:
        """Make a planner that of the epochs to come; the running one stays as it is."""
        self._strategy._preparation = with_changes(self.preparation, planner=planner)

    def end_rest(self) -> None:
        """Give an epoch after one with a rest the ordinary number of iterations."""
        compat.set_epoch_length(self._trainer, self.preparation.planner.num_iterations)

    def carried_over(self, preparation: Preparation) -> Preparation:
        """What is made anew when Lightning reloads the train loader, with what was learnt since.

        A collective where anything was.
        """
        corrections = corrections_of(self.preparation.planner)
        if corrections is None:
            return preparation
        if preparation.stream is not None:
            return preparation  # its steps are measured anew
        planner = collectively("Planning", lambda: preparation.planner.corrected(corrections))
        preparation.sampler.use(planner)
        return with_changes(preparation, planner=planner)

    def restore(self, saved: PlanState) -> bool:
        """Take up the corrections that a checkpoint was saved with. A collective where it has any.

        They are relative to a cost profile, and left out where this run has another one.

        Returns:
            Whether plans have changed, so that the train loader has to begin anew.
        """
        corrections, planner = saved.corrections, self.preparation.planner
        if corrections is None:
            return False
        costs = CorrectedCosts(uncorrected(planner.cost_model), corrections)
        if saved.inputs.get("cost profile") != costs.fingerprint()[:16]:
            return False
        if len(corrections.rank_speed) != planner.world_size:
            corrections = with_changes(corrections, rank_speed=())
        planner = collectively(
            "Planning with the checkpoint's corrections", lambda: planner.corrected(corrections)
        )
        self.use(planner)
        self.preparation.sampler.use(planner)
        return True

    def _refuse_other_lengths(self, planner: EpochPlanner) -> None:
        if not np.array_equal(planner.lengths, self.preparation.planner.lengths):
            raise ValueError(
                "The epoch cannot go on with plans for samples of other lengths, or cut at another"
                " length: workers load them as the first planner said."
            )

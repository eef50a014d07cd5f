"""Checkpoints of a planned run: going on where it was interrupted, sample by sample."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_dcp.strategies import _lightning_compat as compat
from lightning_dcp.strategies.checks import warn_of_other_plans
from lightning_dcp.strategies.collectives import GuardedCollectives

if TYPE_CHECKING:
    from lightning_dcp.data.sampler import PlanSampler
    from lightning_dcp.planning.planner import EpochPlanner

_KEY = "lightning_dcp"


class PlannedCheckpoints(GuardedCollectives):
    """Saves what plans were made from, and continues an epoch at the iteration it had reached."""

    #: What the plans of a restored checkpoint were made from; empty where none was restored.
    _saved_inputs: Mapping[str, str] = MappingProxyType({})

    @property
    def planner(self) -> EpochPlanner | None:
        """Makes the plans of every epoch; None outside of `fit`."""
        raise NotImplementedError

    @property
    def train_sampler(self) -> PlanSampler | None:
        """Carries the plans into the train loader; None outside of `fit`."""
        raise NotImplementedError

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        if self.planner is not None:
            checkpoint[_KEY] = {"plan_inputs": dict(self.planner.inputs)}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        self._saved_inputs = checkpoint.get(_KEY, {}).get("plan_inputs", {})
        return checkpoint

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        epoch, iteration = trainer.current_epoch, compat.iterations_done(trainer)
        sampler, planner = self.train_sampler, self.planner
        if sampler is not None and planner is not None and (iteration or sampler.epoch != epoch):
            # A checkpoint was restored after the loader had been made, and its workers have begun
            # with the first plan.
            if iteration:
                warn_of_other_plans(self._saved_inputs, planner.inputs)
            sampler.resume(epoch, iteration)
            compat.restart_train_loader(trainer)

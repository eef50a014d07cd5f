"""Checkpoints of a planned run: going on where it was interrupted, sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_dcp.planning.rest import flags
from lightning_dcp.strategies._lightning_compat import resuming as compat
from lightning_dcp.strategies.agreement import check_same_on_all_ranks
from lightning_dcp.strategies.checkpointing.files import (
    kind_of,
    read_torch_folder,
    read_zero_folder,
)
from lightning_dcp.strategies.checkpointing.plan_state import KEY, PlanState
from lightning_dcp.strategies.checkpointing.resuming import resume
from lightning_dcp.strategies.collectives import GuardedCollectives

if TYPE_CHECKING:
    import lightning as L

    from lightning_dcp.data.sampler import PlanSampler
    from lightning_dcp.planning.planner import EpochPlanner


class PlannedCheckpoints(GuardedCollectives):
    """Saves which samples of the epoch were consumed, and continues the epoch with the others."""

    #: What a restored checkpoint says of its plans; None where none was restored.
    _saved_plan: PlanState | None = None

    @property
    def planner(self) -> EpochPlanner | None:
        """Makes the plans of every epoch; None outside of `fit`."""
        raise NotImplementedError

    @property
    def train_sampler(self) -> PlanSampler | None:
        """Carries the plans into the train loader; None outside of `fit`."""
        raise NotImplementedError

    # ---- saving ----------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        # `_plan_state` is for us what Lightning keeps of a loader that can resume; a run with
        # another loader would refuse Lightning's entry.
        compat.leave_loader_state_out(checkpoint)
        state = self._plan_state()
        if state is not None:
            checkpoint[KEY] = state.to_plain()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _plan_state(self) -> PlanState | None:
        planner, sampler = self.planner, self.train_sampler
        if planner is None or sampler is None:
            return None
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        iteration = compat.iterations_to_save(trainer)
        num_samples, rest = int(planner.lengths.size), sampler.rest
        before = np.zeros(num_samples, dtype=bool) if rest is None else rest.consumed
        begun_at = 0 if rest is None else rest.first_iteration
        consumed = before
        if iteration > begun_at:
            ran = sampler.consumed_ids(sampler.epoch, iteration)
            consumed = before | flags(ran, num_samples)
        return PlanState(
            inputs=planner.inputs,
            epoch=sampler.epoch,
            iteration=iteration,
            num_iterations=int(trainer.num_training_batches),
            consumed=consumed,
            begun_at=min(begun_at, iteration),
            consumed_before=before,
        )

    # ---- loading ---------------------------------------------------------------------------------

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = self._read_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING and KEY in checkpoint:
            self._saved_plan = PlanState.from_plain(checkpoint[KEY])
            if self._saved_plan.unfinished:
                compat.reopen_saved_epoch(checkpoint, self._saved_plan.epoch)
        return checkpoint

    def _read_checkpoint(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        """A checkpoint of any kind that `files` knows, as a file's content."""
        kind = kind_of(path)
        if kind == "zero":
            return read_zero_folder(Path(path), weights_only)
        if kind == "torch":
            return read_torch_folder(Path(path), weights_only)
        checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only)
        if "state_dict" not in checkpoint:
            raise MisconfigurationException(
                f"{str(path)!r} is not a Lightning checkpoint: it has no entry 'state_dict'. To"
                " train from weights alone load them into the model, and call `fit` without"
                " ckpt_path."
            )
        return checkpoint

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        sampler, planner, saved = self.train_sampler, self.planner, self._saved_plan
        self._saved_plan = None
        if sampler is None or planner is None:
            return
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        unfinished = saved.epoch if saved is not None and saved.unfinished else None
        point = compat.resume_point(trainer, unfinished)
        found = resume(saved, point, planner)
        if not point.iterations and sampler.epoch == point.epoch:
            return
        # A checkpoint was restored after the loader had been made, and its workers have begun with
        # the first plan.
        check_same_on_all_ranks(
            "the rest of the epoch",
            {
                "epoch": str(point.epoch),
                "iterations run": str(point.iterations),
                "plans": found.digest,
            },
            "Give every rank the same checkpoint.",
        )
        sampler.resume(point.epoch, point.iterations, found.rest, lambda: self._end_rest(trainer))
        if found.rest is not None:
            compat.set_epoch_length(trainer, len(sampler), point.iterations)
        compat.restart_train_loader(trainer)
        compat.show_epoch(trainer)
        if found.told:
            (rank_zero_info if found.exact else rank_zero_warn)(found.told)

    def _end_rest(self, trainer: L.Trainer) -> None:
        assert self.planner is not None
        compat.set_epoch_length(trainer, self.planner.num_iterations)

    @override
    def teardown(self) -> None:
        self._saved_plan = None
        super().teardown()

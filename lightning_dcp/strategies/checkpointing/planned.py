"""Checkpoints of a planned run: going on where it was interrupted, sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_dcp.strategies._lightning_compat import resuming as compat
from lightning_dcp.strategies.agreement import check_same_on_all_ranks, collectively
from lightning_dcp.strategies.checkpointing.completeness import whole_checkpoint
from lightning_dcp.strategies.checkpointing.files import (
    kind_of,
    read_torch_folder,
    read_zero_folder,
)
from lightning_dcp.strategies.checkpointing.plan_state import KEY, PlanState
from lightning_dcp.strategies.checkpointing.resuming import resume
from lightning_dcp.strategies.checkpointing.writing import WholeCheckpoints
from lightning_dcp.strategies.replanning import Replanner, corrections_of
from lightning_dcp.strategies.streams import load_place, resume_stream, save_place

if TYPE_CHECKING:
    from lightning_dcp.data.sampler import PlanSampler
    from lightning_dcp.data.streams import StreamPlans, StreamState
    from lightning_dcp.planning.planner import EpochPlanner


class PlannedCheckpoints(WholeCheckpoints):
    """Saves which samples of the epoch were consumed, and continues the epoch with the others."""

    #: What a restored checkpoint says of its plans; None where none was restored.
    _saved_plan: PlanState | None = None
    #: Changes plans while training; None outside of `fit`.
    _replanner: Replanner | None = None

    @property
    def planner(self) -> EpochPlanner | None:
        """Makes the plans of every epoch; None outside of `fit`."""
        raise NotImplementedError

    #: What a restored checkpoint says of a stream; None: nothing.
    _saved_place: StreamState | None = None

    @property
    def train_stream(self) -> StreamPlans | None:
        """Takes the sampler's place where the data set is iterable-style; None otherwise."""
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
        if self.train_stream is not None:
            assert self.lightning_module is not None
            save_place(checkpoint, self.lightning_module.trainer, self.train_stream)
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
        progress = sampler.progress(iteration, int(planner.lengths.size))
        return PlanState(
            inputs=planner.inputs,
            epoch=sampler.epoch,
            iteration=iteration,
            num_iterations=int(trainer.num_training_batches),
            consumed=progress.consumed,
            begun_at=progress.begun_at,
            consumed_before=progress.consumed_before,
            num_planned=len(sampler),
            corrections=corrections_of(planner),
        )

    # ---- loading ---------------------------------------------------------------------------------

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = collectively("Looking at the checkpoint", lambda: whole_checkpoint(checkpoint_path))
        checkpoint = self._read_checkpoint(path, weights_only)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING and KEY in checkpoint:
            self._saved_plan = PlanState.from_plain(checkpoint[KEY])
            if self._saved_plan.unfinished:
                compat.reopen_saved_epoch(checkpoint, self._saved_plan.epoch)
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._saved_place = load_place(checkpoint)
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
        if self.train_stream is not None:
            assert self.lightning_module is not None
            place, self._saved_place = self._saved_place, None
            resume_stream(self.lightning_module.trainer, self.train_stream, place)
            if self._replanner is not None:  # what drifts from now on is relative to its costs
                self._replanner.use(self.train_stream.planner_in_use)
            return
        sampler, replanner, saved = self.train_sampler, self._replanner, self._saved_plan
        self._saved_plan = None
        if sampler is None or replanner is None:
            return
        is_corrected = saved is not None and replanner.restore(saved)
        planner = self.planner
        assert self.lightning_module is not None and planner is not None
        trainer = self.lightning_module.trainer
        unfinished = saved.epoch if saved is not None and saved.unfinished else None
        point = compat.resume_point(trainer, unfinished)
        found = resume(saved, point, planner)
        if not point.iterations and sampler.epoch == point.epoch and not is_corrected:
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
        sampler.resume(point.epoch, point.iterations, found.rest, replanner.end_rest)
        if found.rest is not None:
            compat.set_epoch_length(trainer, len(sampler), point.iterations)
        compat.restart_train_loader(trainer)
        compat.show_epoch(trainer)
        if found.told:
            (rank_zero_info if found.exact else rank_zero_warn)(found.told)

    @override
    def teardown(self) -> None:
        self._saved_plan = self._replanner = self._saved_place = None
        super().teardown()

"""Private names of Lightning that going on from a checkpoint needs, each with the reason.

Written against Lightning 2.6.6.

========================================  =====================================================
private name                              why
========================================  =====================================================
``fit_loop.epoch_loop.batch_progress``    how many iterations of the epoch were run
``fit_loop.epoch_progress``               which epoch they belong to; ``current.processed`` is what
                                          Lightning hands to ``set_epoch``
``restarting``, ``restarted_on_*``,       whether, and where in the loop, a restored checkpoint had
``_restart_stage``                        been saved
``fit_loop.max_batches``,                 an epoch that goes on with other plans has a number of
``_combined_loader.limits``,              iterations of its own, which Lightning reads only when
``trainer.val_check_batch``               loaders are made
``_load_distributed_checkpoint``          reads a folder of torch.distributed.checkpoint without a
                                          model that is sharded alike
``_load_raw_module_state``                loads whole weights into a sharded model
``Trainer._run``                          has ``weights_only`` of `fit`, which Lightning does not
                                          pass on where a strategy restores after its setup
``_parse_num_batches``                    what ``limit_train_batches`` makes of that number
``fit_loop._data_fetcher``                to restart loading after a checkpoint was restored, or
                                          when plans were replaced: what was fetched is dropped
``_combined_loader._iterator``            lets go of the workers of the loader that is restarted
``batch_progress.is_last_batch``          whether the iteration that runs is the epoch's last, which
                                          Lightning decides when its batch is fetched
``TQDMProgressBar._train_progress_bar``   to show another number of iterations while the bar runs
``checkpoint["loops"]["fit_loop"]``       from which the state of our loader is left out: a run
                                          with another loader would refuse it; and whose counters
                                          say that the last epoch is over where it was ended early
========================================  =====================================================
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning import Trainer
from lightning.fabric.strategies.model_parallel import _load_raw_module_state
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loops.fit_loop import RestartStage
from lightning.pytorch.loops.training_epoch_loop import RestartStage as EpochRestartStage
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from pathlib import Path

    import lightning as L
    from torch.nn import Module


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on.

    Attributes:
        epoch: The epoch that the sampler will be set to.
        iterations: How many iterations of it were run.
        num_before: Iterations of each epoch before it, by the counters of the checkpoint; None
            where they do not tell.
        epoch_is_over: The last of them ended the epoch, except for what follows it.
    """

    epoch: int
    iterations: int
    num_before: int | None = None
    epoch_is_over: bool = False


def iterations_to_save(trainer: L.Trainer) -> int:
    """Iterations of the running epoch that a checkpoint which is saved now has behind it."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if epochs.started < epochs.ready:  # in `on_train_epoch_start`: the counters are the former's
        return 0
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    # Between the optimizer's step and the end of `on_train_batch_end` a batch is processed, but not
    # completed. One that failed before is done again.
    ended = progress.ready == progress.started == progress.processed == progress.completed + 1
    return int(progress.processed if ended else progress.completed)


def resume_point(trainer: L.Trainer, unfinished_epoch: int | None) -> ResumePoint:
    """Where the run that begins now goes on, when `on_train_start` is called.

    Lightning's counters are put right where they do not say what a run without interruption would
    do next: they may count the iterations of one epoch for the next one, pass over an epoch whose
    checkpoint was saved in `on_train_epoch_start`, or count an epoch that `max_steps`, `max_time`
    or a callback has ended early as a whole one.

    Args:
        trainer: whose state was restored, or not.
        unfinished_epoch: an epoch of which the checkpoint says that iterations are left.
    """
    fit_loop = trainer.fit_loop
    loop = fit_loop.epoch_loop
    # Lightning types its counters by the fewest that any of them has.
    epochs: Any = fit_loop.epoch_progress.current
    batches: Any = loop.batch_progress
    # A checkpoint that was saved in `on_train_batch_end` does not count that batch yet.
    late = int(loop.restarted_on_train_batch_end)
    # A batch that failed stays in Lightning's totals, from which it would see at the next resume
    # that a checkpoint was not saved in `on_train_batch_end`: a batch would be run again.
    total = batches.total
    total.ready = total.started = total.processed = total.completed + late
    if epochs.ready == epochs.processed or fit_loop.restarted_on_epoch_start:
        if not fit_loop.is_resuming:
            return ResumePoint(int(epochs.processed), 0)
        if unfinished_epoch is None or unfinished_epoch + 1 != epochs.processed or late:
            _begin_epoch(trainer)
            return ResumePoint(int(epochs.processed), 0)
        _reopen_epoch(trainer)
    elif not loop.restarting:
        return ResumePoint(int(epochs.processed), 0)
    done = int(batches.current.completed) + late
    before = int(batches.total.completed) + late - done
    epoch = int(epochs.processed)
    return ResumePoint(
        epoch,
        done,
        num_before=before // epoch if epoch and before % epoch == 0 else None,
        epoch_is_over=bool(batches.is_last_batch)
        and batches.current.processed == batches.current.ready,
    )


def _begin_epoch(trainer: L.Trainer) -> None:
    """Make the loops begin an epoch, whatever they have counted of the former one."""
    fit_loop = trainer.fit_loop
    loop, progress = fit_loop.epoch_loop, fit_loop.epoch_progress
    if loop.restarting and loop.restarted_on_train_batch_end:
        loop.batch_progress.increment_completed()
        loop._batches_that_stepped += 1
    if fit_loop.restarted_on_epoch_end:
        progress.increment_completed()
    if fit_loop.restarted_on_epoch_start:  # counted already, and taken back by Lightning in part
        progress.current.ready += 1
    else:
        fit_loop.reset_restart_stage()
    loop.reset_restart_stage()
    for each in (fit_loop, loop, loop.val_loop):
        each._restarting = False  # the property of the fit loop would not have it with `max_steps`


def _reopen_epoch(trainer: L.Trainer) -> None:
    """Make the loops go on with an epoch that they have counted as a whole one."""
    fit_loop = trainer.fit_loop
    loop = fit_loop.epoch_loop
    counters: Any
    for counters in (fit_loop.epoch_progress.current, fit_loop.epoch_progress.total):
        counters.processed -= 1
        counters.completed = counters.processed
    fit_loop._restart_stage = RestartStage.RESTARTED_MID_EPOCH
    loop._restart_stage = EpochRestartStage.RESTARTED_ON_LAST
    fit_loop._restarting = loop._restarting = True


def reopen_saved_epoch(checkpoint: MutableMapping[str, Any], epoch: int) -> None:
    """Take back that a checkpoint counts an epoch of which iterations are left as a whole one.

    As `_reopen_epoch`, but before Lightning compares the number of epochs with `max_epochs`: else
    it would end the run where that epoch is the last one.
    """
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    progress = fit_loop.get("epoch_progress")
    batches = fit_loop.get("epoch_loop.batch_progress", {}).get("current")
    if not progress or not batches or batches["completed"] != batches["processed"]:
        return
    current = progress["current"]
    if current["ready"] == current["processed"] == epoch + 1:
        for counters in (current, progress["total"]):
            counters["processed"] -= 1
            counters["completed"] = counters["processed"]


def set_epoch_length(trainer: L.Trainer, num_iterations: int, done: int = 0) -> None:
    """Give the running epoch another number of iterations.

    Args:
        trainer: in whose `fit` an epoch begins, or goes on.
        num_iterations: before `limit_train_batches`.
        done: how many of them were run, of which the limit can take none back.
    """
    fit_loop = trainer.fit_loop
    limit: int | float = trainer.limit_train_batches
    num = max(done, _parse_num_batches(RunningStage.TRAINING, num_iterations, limit))
    assert fit_loop._combined_loader is not None
    fit_loop._combined_loader.limits = [num]
    fit_loop.max_batches = num
    interval: Any = trainer.val_check_interval
    if isinstance(interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(num * interval))


def show_epoch_length(trainer: L.Trainer) -> None:
    """Give the bar of the running epoch its number of iterations, which has changed."""
    bar, num = trainer.progress_bar_callback, trainer.num_training_batches
    if isinstance(bar, TQDMProgressBar) and bar._train_progress_bar is not None:
        bar.train_progress_bar.total = num
        bar.train_progress_bar.refresh()
    elif isinstance(bar, RichProgressBar):
        task = bar.train_progress_bar_id
        if bar.progress is not None and task is not None:
            bar.progress.update(task, total=num)


def show_epoch(trainer: L.Trainer) -> None:
    """Give the bar of an epoch that goes on its length; Lightning does it where an epoch begins."""
    bar = trainer.progress_bar_callback
    if trainer.fit_loop.restarted_mid_epoch and isinstance(bar, (RichProgressBar, TQDMProgressBar)):
        bar.on_train_epoch_start(trainer, trainer.lightning_module)


def read_distributed_folder(folder: Path) -> dict[str, Any]:
    """All of a folder of torch.distributed.checkpoint, and what Lightning keeps beside it."""
    return _load_distributed_checkpoint(folder)


def load_whole_weights(weights: dict[str, Any], model: Module, strict: bool) -> None:
    """Load a state dict of whole tensors into a model whose parameters are sharded."""
    _load_raw_module_state(weights, model, strict=strict)


def weights_only_of_run() -> bool | None:
    """`weights_only` as the user gave it to `fit`, `validate`, ...; None where it was left out."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is Trainer._run.__code__:
            given: bool | None = frame.f_locals.get("weights_only")
            return given
        frame = frame.f_back
    return None


def restart_train_loader(trainer: L.Trainer) -> None:
    """Begin the train loader's epoch anew: what workers have fetched is dropped."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    if fetcher.combined_loader._iterator is not None:
        # Else new workers start while those that they replace are still there.
        fetcher.combined_loader._iterator.reset()
    iter(fetcher)


def go_on_with_train_loader(trainer: L.Trainer, done: int) -> None:
    """Let the next batch of the running epoch be the one that the loader's sampler begins with.

    Args:
        trainer: in whose epoch an iteration runs.
        done: iterations of the epoch, with that one.
    """
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    left = trainer.num_training_batches - done
    if left:  # else nothing more is fetched in this epoch
        restart_train_loader(trainer)
    fetcher.fetched, fetcher.length = done, int(trainer.num_training_batches)
    fetcher.done = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = not left


def go_on_with_stream(trainer: L.Trainer, done: int) -> None:
    """Fetch the next batch of a loader without a length again, while an iteration runs.

    Args:
        trainer: in whose epoch it runs.
        done: iterations of the epoch, with that one.
    """
    restart_train_loader(trainer)
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    if fetcher.length is not None:  # that of `limit_train_batches`
        fetcher.fetched, fetcher.done = done, done >= fetcher.length
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = fetcher.done


def leave_loader_state_out(checkpoint: MutableMapping[str, Any]) -> None:
    """Take what Lightning saved of the train loader out of a checkpoint."""
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    fit_loop.get("state_dict", {}).pop("combined_loader", None)

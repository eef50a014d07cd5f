"""Checkpoints written so that a whole one is there whenever the run is killed.

One file is written by rank 0 (`LocalCheckpointIO`), a folder by all ranks (`write_folder`). Both
are on disk before they take the place of what had their name; see `replacing`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_dcp.strategies._lightning_compat import saving as compat
from lightning_dcp.strategies.agreement import gather_objects
from lightning_dcp.strategies.checkpointing.completeness import (
    local_path,
    not_found,
    write_manifest,
)
from lightning_dcp.strategies.checkpointing.failures import num_bytes_in, together
from lightning_dcp.strategies.checkpointing.names import SavedNames
from lightning_dcp.strategies.checkpointing.replacing import Replacement, remove
from lightning_dcp.strategies.collectives import GuardedCollectives

if TYPE_CHECKING:
    import lightning as L
    from torch.optim import Optimizer

    from lightning_dcp.strategies.watch.watch import Watch

__all__ = [
    "LocalCheckpointIO",
    "WholeCheckpoints",
    "busy_saving",
    "noting_errors",
    "write_folder",
    "write_state",
]


class _Noted:
    """A file that remembers why the system refused to write: `torch.save` does not pass it on."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return int(self._file.write(data))
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def noting_errors(file: Any) -> Iterator[Any]:
    """The file to write to, so that what the system refuses comes out as the OSError it was."""
    noted = _Noted(file)
    try:
        yield noted
    except Exception:
        if noted.error is not None:
            raise noted.error from None
        raise


def write_state(state: Any, file: IO[bytes], **options: Any) -> None:
    """`torch.save` to an open file, on disk when this returns.

    Raises:
        OSError: as the system gave it.
    """
    with noting_errors(file) as noted:
        torch.save(state, noted, **options)
    file.flush()
    os.fsync(file.fileno())


def busy_saving(strategy: Strategy) -> AbstractContextManager[Any]:
    """Around what should be finished once begun, and waits for no other rank."""
    watch: Watch | None = getattr(strategy, "watch", None)
    # Of the thread that trains: `AsyncCheckpointIO` writes in another.
    if watch is None or threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return watch.busy("saving a checkpoint")


class LocalCheckpointIO(TorchCheckpointIO):
    """Lightning's files, which take the place of former ones when they are on disk.

    Lightning writes to the folder for temporary files and moves the result, which is copying where
    that is another disk: a run that is killed meanwhile has neither the old nor the new one. Other
    places than local folders are left to Lightning.

    Args:
        around: entered while a file is written.
    """

    def __init__(self, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        super().__init__()
        self._around = around

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        target = local_path(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with self._around(), Replacement(target, folder=False) as new:
            with open(new.path, "wb") as file:
                write_state(checkpoint, file)
            new.commit()

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        source = local_path(path)
        if source is not None and not source.exists():
            raise not_found(source)
        return super().load_checkpoint(path, *args, **kwargs)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        target = local_path(path)
        if target is None:
            super().remove_checkpoint(path)
        else:
            remove(target)


class WholeCheckpoints(GuardedCollectives):
    """Saves with `LocalCheckpointIO` where the user gives no other; all ranks fail, or none."""

    #: Whether a checkpoint is made of what all ranks have; else rank 0 can save one alone.
    saves_shards: bool = True
    #: Whether the run has come to its first iteration, with all that a checkpoint has restored.
    _has_begun: bool = False

    @cached_property
    def _saved_names(self) -> SavedNames:
        return SavedNames()

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = compat.with_default_io(
            self._checkpoint_io, partial(LocalCheckpointIO, partial(busy_saving, self))
        )
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        needed = num_bytes_in(checkpoint) if self.is_global_zero else None

        def save() -> None:
            super(WholeCheckpoints, self).save_checkpoint(checkpoint, filepath, storage_options)

        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.status == TrainerStatus.INTERRUPTED and not self._has_begun:
            # `OnExceptionCheckpoint` would replace the checkpoint that was to be resumed.
            rank_zero_warn(
                f"The checkpoint {str(filepath)!r} is not saved: the run has ended before its first"
                " step, and before all of its state was restored."
            )
            return
        with self._saved_names.saving(trainer, filepath):
            if not self.ends_alone:
                together(filepath, save, needed)
            elif self.saves_shards:
                rank_zero_warn(
                    f"The checkpoint {str(filepath)!r} is not saved: that takes all ranks, and an"
                    " exception has not ended the run of all of them at the same place."
                )
            else:
                save()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return (
            {} if self.saves_shards and self.ends_alone else super().lightning_module_state_dict()
        )

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {} if self.saves_shards and self.ends_alone else super().optimizer_state(optimizer)

    @override
    def connect(self, model: L.LightningModule) -> None:
        self._has_begun = False
        super().connect(model)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._has_begun = True
        assert self.lightning_module is not None
        self._saved_names.keep(self.lightning_module.trainer)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        try:
            super().remove_checkpoint(filepath)
        except OSError as error:  # of rank 0 alone: the others are on their way to the next step
            rank_zero_warn(f"The old checkpoint {str(filepath)!r} could not be removed: {error}.")


def write_folder(
    path: Path,
    write: Callable[[Path], None],
    *,
    is_global_zero: bool,
    is_local_zero: bool,
    around_end: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Let all ranks write their shards into a new folder, which takes the place of `path`.

    Args:
        path: of the checkpoint, the same on all ranks.
        write: given the folder to write to; every rank must go through the same collectives, also
            where it cannot write.
        is_global_zero: on rank 0 alone.
        is_local_zero: on one rank of each machine: where the folder that rank 0 has made cannot be
            seen, it makes one there.
        around_end: entered while the folder is put in place.

    Raises:
        OSError: on all ranks, if one cannot write; what was at `path` is still there.
    """
    new: list[Replacement] = []

    def begin() -> str | None:
        if is_global_zero:
            new.append(Replacement(path, folder=True))
            return new[0].path.name
        return None

    def begin_elsewhere() -> None:
        if is_local_zero and not is_global_zero and not path.with_name(name).is_dir():
            with contextlib.suppress(FileExistsError):  # it could not be seen yet
                new.append(Replacement(path, folder=True, name=name))

    def finish() -> None:
        with around_end():
            for each in new:
                write_manifest(each.path)
                each.commit()

    try:
        name = _of_rank_0(together(path, begin))
        together(path, begin_elsewhere)
        together(path, lambda: write(path.with_name(name)))
        together(path, finish)
    finally:
        for each in new:
            each.__exit__(None, None, None)


def _of_rank_0(name: str | None) -> str:
    first = gather_objects(name)[0]
    assert first is not None
    return first

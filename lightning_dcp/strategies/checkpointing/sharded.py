"""Lightning's ModelParallelStrategy with checkpoints of one plain file, as `ddp` writes them.

Lightning numbers the parameters in the order of the model, torch's optimizers in that of their
groups: with several groups a file of the one would give a parameter the state of another in the
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies.model_parallel import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dcp.strategies._lightning_compat import resuming as compat
from lightning_dcp.strategies._lightning_compat.saving import NAME_OF_REST
from lightning_dcp.strategies.checkpointing.files import number_parameters
from lightning_dcp.strategies.checkpointing.writing import (
    busy_saving,
    noting_errors,
    write_folder,
    write_state,
)

__all__ = ["PlainShardedCheckpoints"]


class _NotingFiles(FileSystem):
    """Local files, of which errors are those that the system gave."""

    @override
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream, noting_errors(stream) as noted:
            yield noted


class PlainShardedCheckpoints(ModelParallelStrategy):
    """FSDP2 whose file has whole tensors by plain names, and the optimizer's state as torch's."""

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As torch's own optimizer would give it, whole on rank 0 only."""
        if self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        assert self.model is not None
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(self.model, optimizer, options=options)
        return number_parameters(state) if self.is_global_zero else {}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        if not self._save_distributed_checkpoint:
            # Not through Lightning's, which makes a `Path` of a URL, and so a local folder `s3:`.
            Strategy.save_checkpoint(self, checkpoint, self.broadcast(filepath), storage_options)
            return
        if storage_options is not None:
            super().save_checkpoint(checkpoint, filepath, storage_options)  # raises
        write_folder(
            Path(self.broadcast(filepath)),
            partial(self._write_shards, checkpoint),
            is_global_zero=self.is_global_zero,
            is_local_zero=self.local_rank == 0,
            around_end=partial(busy_saving, self),
        )

    def _write_shards(self, checkpoint: Mapping[str, Any], folder: Path) -> None:
        """The format of Lightning's strategy; all ranks fail in `save`, or none."""
        rest = dict(checkpoint)
        sharded = {"state_dict": rest.pop("state_dict")}
        states = rest.pop("optimizer_states", [])
        sharded.update({f"optimizer_{i}": state for i, state in enumerate(states)})
        writer = FileSystemWriter(folder)
        writer.fs = _NotingFiles()
        try:
            save(sharded, storage_writer=writer)
        except CheckpointException as error:
            # A BaseException that each rank gets, with what went wrong on which.
            failure = error.failures.get(self.global_rank)
            if failure is not None:
                raise failure[0] from None
        if self.is_global_zero:
            with open(folder / NAME_OF_REST, "wb") as file:
                write_state(rest, file)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if weights_only is None:
            weights_only = compat.weights_only_of_run()
        path = self.broadcast(checkpoint_path)
        if Path(path).is_dir():
            return super().load_checkpoint(path, weights_only)
        checkpoint: dict[str, Any] = (
            self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            if _is_url(path)
            else torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        )
        if "state_dict" not in checkpoint:
            raise MisconfigurationException(
                f"{str(path)!r} is not a Lightning checkpoint: it has no entry 'state_dict'."
            )
        assert self.model is not None and self.lightning_module is not None
        strict = self.lightning_module.strict_loading
        compat.load_whole_weights(checkpoint.pop("state_dict"), self.model, strict)
        if self.optimizers and "optimizer_states" not in checkpoint:
            raise KeyError(
                "Trying to restore optimizer state but checkpoint contains only the model. This is"
                " probably due to `ModelCheckpoint.save_weights_only` being set to `True`."
            )
        options = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True, strict=strict)
        for optimizer, state in zip(
            self.optimizers, checkpoint.get("optimizer_states", []), strict=False
        ):
            if state["state"]:
                named = self._name_parameters(state, optimizer)
                set_optimizer_state_dict(
                    self.model, optimizer, optim_state_dict=named, options=options
                )
        return checkpoint

    def _name_parameters(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Names in place of the optimizer's numbers."""
        assert self.lightning_module is not None
        names = {p: name for name, p in self.lightning_module.named_parameters()}
        ours = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        theirs = [group["params"] for group in state["param_groups"]]
        if [len(group) for group in ours] != [len(group) for group in theirs]:
            raise ValueError(
                f"The checkpoint's optimizer has groups of {[len(g) for g in theirs]} parameters,"
                f" this run's of {[len(g) for g in ours]}. Resume with the model and optimizer that"
                " were saved."
            )
        name_of = {
            number: name
            for numbers, group in zip(theirs, ours, strict=True)
            for number, name in zip(numbers, group, strict=True)
        }
        return {
            "state": {name_of[number]: dict(each) for number, each in state["state"].items()},
            "param_groups": [
                {**group, "params": [name_of[number] for number in group["params"]]}
                for group in state["param_groups"]
            ],
        }


def _is_url(path: Any) -> bool:
    return "://" in str(path)

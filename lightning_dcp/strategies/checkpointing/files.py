"""Checkpoints as they lie on disk: what a path holds, and folders of shards read as one whole.

======================  ============================================================================
kind                    what it is
======================  ============================================================================
a file                  one Lightning checkpoint, as every strategy here writes by default
a DeepSpeed folder      ZeRO-1 or 2, of `save_distributed_checkpoint=True` or DeepSpeedStrategy
a torch folder          `torch.distributed.checkpoint`, of ModelParallelStrategy or FSDPStrategy
======================  ============================================================================

Folders are read by each rank as a whole, into the format of the file: so they load with any
strategy and any number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_dcp.strategies._lightning_compat.resuming import read_distributed_folder

__all__ = [
    "kind_of",
    "number_parameters",
    "read_torch_folder",
    "read_zero_folder",
    "with_frozen_parameters",
]

Kind = Literal["file", "zero", "torch"]

#: What DeepSpeed puts beside Lightning's entries.
# fmt: off
_DEEPSPEED_KEYS = frozenset((
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes",
    "shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd",
    "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples",
    "dp_world_size", "mp_world_size", "ds_config", "ds_version", "autotp_metadata",
    "universal_checkpoint_info",
))
# fmt: on


def kind_of(path: Any) -> Kind:
    """What a checkpoint path holds; anything that is no local folder counts as a file.

    Raises:
        MisconfigurationException: a folder of neither kind.
    """
    folder = Path(path)
    if not folder.is_dir():
        return "file"
    if (folder / ".metadata").is_file():
        return "torch"
    if _zero_files(folder, "model_states"):
        return "zero"
    raise MisconfigurationException(
        f"The checkpoint path {str(path)!r} is a folder, but neither one that DeepSpeed wrote"
        " (`latest` and a folder with `*_model_states.pt`) nor one of torch.distributed.checkpoint"
        " (`.metadata`). Pass a `.ckpt` file or the folder that ModelCheckpoint wrote."
    )


def _zero_files(folder: Path, what: str) -> list[Path]:
    latest = folder / "latest"
    tag = latest.read_text().strip() if latest.is_file() else "checkpoint"
    return sorted((folder / tag).glob(f"*mp_rank_*_{what}.pt")) if tag else []


def read_zero_folder(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    """A folder of DeepSpeed's ZeRO stage 1 (or 2) as one Lightning checkpoint.

    Args:
        folder: what `Trainer.save_checkpoint` was given.
        weights_only: as `torch.load` takes it; only if False pickled code may run.

    Raises:
        MisconfigurationException: stage 3, several model-parallel ranks, or shards are missing.
    """
    models = _zero_files(folder, "model_states")
    if len(models) != 1 or models[0].name.startswith("zero_"):
        raise MisconfigurationException(
            f"The DeepSpeed checkpoint {str(folder)!r} holds the model in {len(models)} pieces"
            " (ZeRO stage 3, or model parallelism). Make one file of it with DeepSpeed's"
            " zero_to_fp32.py in that folder, and load its weights."
        )
    main = _load(models[0], weights_only)
    checkpoint = {k: v for k, v in main.items() if k not in _DEEPSPEED_KEYS}
    state_dict = dict(main["module"])
    checkpoint["state_dict"] = state_dict
    shards = _zero_files(folder, "optim_states")
    if not shards:
        return checkpoint
    if len(shards) != main["dp_world_size"]:
        raise MisconfigurationException(
            f"The DeepSpeed checkpoint {str(folder)!r} was saved by {main['dp_world_size']} ranks,"
            f" but has the optimizer state of {len(shards)}. Copy the files of all nodes into one"
            " folder."
        )
    shards.sort(key=_rank_of)
    pieces = [_load(path, weights_only)["optimizer_state_dict"] for path in shards]
    masters, optimizer = _join(pieces, main["param_shapes"])
    # Where the model is in half precision the float32 weights are the more exact ones.
    state_dict.update({k: v for k, v in masters.items() if state_dict[k].dtype != v.dtype})
    checkpoint["optimizer_states"] = [optimizer]
    return checkpoint


def _rank_of(path: Path) -> int:
    found = re.search(r"_pp_rank_(\d+)_", path.name)
    return int(found.group(1)) if found else 0


def _load(path: Path, weights_only: bool | None) -> Any:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals(
        [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    ):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)


def _join(
    pieces: list[Any], shapes: list[Mapping[str, torch.Size]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Float32 weights by name, and the optimizer's state as torch has it.

    Each rank has one piece of each group's vector, and says where in it which parameter lies; a
    parameter may go on in the next rank's.
    """
    masters: dict[str, Tensor] = {}
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(shapes):
        first = groups[-1]["params"][-1] + 1 if groups else 0
        base = [piece["base_optimizer_state"] for piece in pieces]
        options = base[0]["param_groups"][number]
        ids = list(range(first, first + len(group)))
        groups.append({**{k: v for k, v in options.items() if k != "params"}, "params": ids})
        flat = [piece["single_partition_of_fp32_groups"][number] for piece in pieces]
        moments = [each["state"].get(number, {}) for each in base]
        for index, (name, shape) in zip(ids, group.items(), strict=True):
            where = [piece["param_slice_mappings"][number].get(name) for piece in pieces]
            masters[name] = _whole(flat, where).view(shape)
            if moments[0]:
                state[index] = {
                    key: _whole([each[key] for each in moments], where).view(shape)
                    if isinstance(value, Tensor) and value.dim() > 0
                    else value
                    for key, value in moments[0].items()
                }
    return masters, {"state": state, "param_groups": groups}


def _whole(vectors: list[Tensor], where: list[Any]) -> Tensor:
    """A parameter's elements, of each rank's vector those that are its."""
    return torch.cat(
        [
            vector.detach()[at.start : at.start + at.numel]
            for vector, at in zip(vectors, where, strict=True)
            if at is not None
        ]
    )


def read_torch_folder(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    """A folder of `torch.distributed.checkpoint`, as Lightning writes it, as one checkpoint.

    Raises:
        MisconfigurationException: with `weights_only=True`, since the format itself is pickled.
    """
    if weights_only:
        raise MisconfigurationException(
            f"The checkpoint {str(folder)!r} is a folder of torch.distributed.checkpoint, whose"
            " format is pickled: it cannot be read with weights_only=True. Convert it where you"
            " trust it (`python -m lightning.pytorch.utilities.consolidate_checkpoint`)."
        )
    found = read_distributed_folder(folder)
    checkpoint = {k: v for k, v in found.items() if not re.fullmatch(r"optimizer_\d+", k)}
    if "model" in checkpoint:  # FSDPStrategy's name
        checkpoint["state_dict"] = checkpoint.pop("model")
    optimizers = [found[f"optimizer_{i}"] for i in range(len(found)) if f"optimizer_{i}" in found]
    if optimizers:
        checkpoint["optimizer_states"] = [number_parameters(each) for each in optimizers]
    return checkpoint


def number_parameters(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with numbers, in the order of its groups, in place of names."""
    number: dict[str, int] = {}
    groups = []
    for group in optimizer["param_groups"]:
        for name in group["params"]:
            number.setdefault(name, len(number))
        groups.append({**group, "params": [number[name] for name in group["params"]]})
    state = {number[name]: dict(each) for name, each in optimizer["state"].items()}
    return {"state": state, "param_groups": groups}


def with_frozen_parameters(
    states: Sequence[Mapping[str, Any]], optimizers: Sequence[Optimizer]
) -> list[dict[str, Any]]:
    """Optimizer states of a DeepSpeed folder, which has no frozen parameters, numbered with them.

    States that have a number for each parameter are returned as they are.
    """
    found = []
    for state, optimizer in zip(states, optimizers, strict=False):
        ours = [group["params"] for group in optimizer.param_groups]
        theirs = [group["params"] for group in state["param_groups"]]
        trainable = [[p for p in group if p.requires_grad] for group in ours]
        if list(map(len, ours)) == list(map(len, theirs)) or (
            list(map(len, trainable)) != list(map(len, theirs))
        ):
            found.append(dict(state))
            continue
        place = {p: i for i, p in enumerate(p for group in ours for p in group)}
        number = {
            old: place[p]
            for group, olds in zip(trainable, theirs, strict=True)
            for p, old in zip(group, olds, strict=True)
        }
        groups = [
            {**group, "params": [place[p] for p in members]}
            for group, members in zip(state["param_groups"], ours, strict=True)
        ]
        moved = {number[old]: each for old, each in state["state"].items()}
        found.append({"state": moved, "param_groups": groups})
    return found

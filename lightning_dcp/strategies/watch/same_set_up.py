"""What must be the same on all ranks before anything is computed, compared and named.

A rank with another library, option or model does not fail by itself: it waits in another collective
than the others do, or trains something else. What plans are made from is compared where it is read
(`preparation.what_is_planned`, `EpochPlanner.inputs`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_dcp.strategies.agreement import check_same_on_all_ranks, gather_objects

if TYPE_CHECKING:
    import lightning as L
    from torch.optim import Optimizer

    from lightning_dcp.strategies.settings import DCPSettings

__all__ = ["check_same_optimizers", "check_same_set_up"]

_ALWAYS = ("lightning-dcp", "torch", "lightning", "torchmetrics", "numpy", "scipy")
#: Compared where they are in use.
_IF_IMPORTED = ("deepspeed", "transformers", "peft", "flash_attn")
#: Of the Trainer: what decides how often ranks meet, and what they compute then.
_TRAINER = (
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "limit_train_batches",
    "limit_val_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "precision",
)
#: Of `ProfilingOptions`: each machine may keep its cache where it likes.
_MAY_DIFFER = {"cache_dir"}
#: How many parameters are named that differ.
_SHOWN = 3


def check_same_set_up(
    settings: DCPSettings, trainer: L.Trainer, pl_module: L.LightningModule
) -> None:
    """Compare versions, options and the shapes of the model's tensors. A collective.

    Raises:
        MisconfigurationException: on all ranks, naming what differs and where.
    """
    check_same_on_all_ranks(
        "training",
        {**_versions(), **_options(settings), **_of_trainer(trainer)},
        "Start every rank with the same libraries, options and Trainer.",
    )
    _check_same_tensors(pl_module)


def check_same_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Compare kinds and options of optimizers. A collective.

    Raises:
        MisconfigurationException: on all ranks, naming what differs and where.
    """
    found = {}
    for i, optimizer in enumerate(optimizers):
        found[f"optimizer {i}"] = type(optimizer).__name__
        for g, group in enumerate(optimizer.param_groups):
            found[f"optimizer {i}, group {g}: parameters"] = str(len(group["params"]))
            for name, value in group.items():
                if name != "params" and _is_plain(value):
                    found[f"optimizer {i}, group {g}: {name}"] = repr(value)
    check_same_on_all_ranks(
        "the optimizer step",
        found,
        "`configure_optimizers` must return the same on every rank, or parameters drift apart.",
    )


def _versions() -> dict[str, str]:
    """Of all libraries that some rank uses. A collective."""
    imported = gather_objects([name for name in _IF_IMPORTED if name in sys.modules])
    in_use = {name for theirs in imported for name in theirs}
    wanted = [*_ALWAYS, *(name for name in _IF_IMPORTED if name in in_use)]
    # Two releases of one minor version compute the same.
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in wanted:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # vendored, or run from a checkout
            versions[name] = str(getattr(sys.modules.get(name), "__version__", "unknown"))
    return {f"version of {name}": version for name, version in versions.items()}


def _options(settings: DCPSettings) -> dict[str, str]:
    options: dict[str, str] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            for inner in dataclasses.fields(value):
                if inner.name not in _MAY_DIFFER:
                    options[f"{field.name}.{inner.name}"] = repr(getattr(value, inner.name))
        else:
            options[field.name] = repr(dict(value) if isinstance(value, Mapping) else value)
    return options


def _of_trainer(trainer: L.Trainer) -> dict[str, str]:
    return {f"Trainer({name}=...)": repr(getattr(trainer, name, None)) for name in _TRAINER}


def _check_same_tensors(pl_module: L.LightningModule) -> None:
    """Ranks whose parameters have other shapes would send each other other numbers of bytes."""
    own = dict(_tensors(pl_module))
    digest = hashlib.sha256(repr(list(own.items())).encode()).hexdigest()
    if len(set(gather_objects(digest))) == 1:
        return
    everyone = gather_objects(own)
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
    differing = [n for n in names if len({theirs.get(n) for theirs in everyone}) > 1][:_SHOWN]
    shown = {name: own.get(name, "missing") for name in differing}
    if not shown:
        shown = {"order of parameters": digest[:12]}
    check_same_on_all_ranks(
        "the model",
        shown,
        "Every rank must build the same model, trainable in the same parts.",
    )


def _tensors(pl_module: L.LightningModule) -> Iterable[tuple[str, str]]:
    for name, parameter in pl_module.named_parameters():
        trainable = "trainable" if parameter.requires_grad else "frozen"
        yield f"parameter {name}", f"{tuple(parameter.shape)} {parameter.dtype} {trainable}"
    for name, buffer in pl_module.named_buffers():
        yield f"buffer {name}", f"{tuple(buffer.shape)} {buffer.dtype}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(inner) for inner in value)
    return value is None or isinstance(value, int | float | str)

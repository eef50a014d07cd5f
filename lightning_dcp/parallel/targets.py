"""How many elements of a micro-batch bear loss: what its mean loss weighs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["count_targets", "label_entries"]

_LABEL_NAMES = ("labels", "label", "targets", "target")


def count_targets(batch: Any, ignore_index: int = -100, *, shifted: bool = False) -> int | None:
    """Loss-bearing elements of a batch, from its labels.

    Args:
        batch: a mapping, or an object with attributes, whose ``labels`` (or ``label``, ``targets``,
            ``target``) is used; or a pair of input and target, as torch's data sets give them.
        ignore_index: integer labels with this value do not count. Labels of another dtype
            (regression) all count.
        shifted: the model shifts labels inside (B, S) by itself, so that the first one of each
            sequence bears no loss; unless the batch has ``shift_labels``, which are used instead.

    Returns:
        The count, or None where no labels are found.
    """
    labels = _labels(batch)
    if shifted:
        done = batch.get("shift_labels") if isinstance(batch, Mapping) else None
        if isinstance(done, Tensor):
            labels = done
        elif labels is not None and labels.dim() >= 2:
            labels = labels[..., 1:]
    if labels is None:
        return None
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return labels.numel()
    return int((labels != ignore_index).sum())


def _labels(batch: Any) -> Tensor | None:
    for name in _LABEL_NAMES:
        value = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(batch, list | tuple) and len(batch) == 2:
        target = batch[1]
        # A second tensor of truth values is a mask, not a target.
        if isinstance(target, Tensor) and target.dtype != torch.bool:
            return target
    return None


def label_entries(entries: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Names of the labels that ``count_targets`` uses; entries of a pair are called 0 and 1."""
    for name in _LABEL_NAMES:
        if isinstance(entries.get(name), Tensor):
            return (name,)
    if set(entries) == {0, 1} and isinstance(entries[1], Tensor):
        return (1,) if entries[1].dtype != torch.bool else ()
    return ()

"""Gradient weights: every loss-bearing element counts once, however the work was spread over ranks.

With N the number of loss-bearing elements of the iteration, a micro-batch whose mean loss is over n
of them is scaled by ``n / N``, by ``1/p`` more where p ranks compute the same loss, and gradients
are *summed* over all ranks (``W`` more where the backend averages over them). No other factor
anywhere: elements carry weight, not ranks or micro-batches (weighting by ``p / W`` gave 41%
gradient error).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["apply_loss_scale", "count_targets", "loss_scale"]

_LABEL_NAMES = ("labels", "label", "targets", "target")


def loss_scale(
    num_targets: float,
    total_targets: float,
    sp_size: int = 1,
    world_size_if_backend_averages: int = 1,
) -> float:
    """Factor for a micro-batch's mean loss before its backward.

    Args:
        num_targets: loss-bearing elements of this micro-batch (n), the whole one also where p ranks
            share it.
        total_targets: those of the whole iteration, all ranks and micro-batches, each counted once
            (N).
        sp_size: number of ranks that compute this same loss (p); 1 where each computes its own
            part.
        world_size_if_backend_averages: W where the gradient reduction averages over ranks, 1 where
            it sums.

    Returns:
        ``n / N / p * W``; 0.0 where nothing in the iteration bears loss.

    Raises:
        ValueError: for a negative count, or more elements in the micro-batch than in the iteration.
    """
    if not 0 <= num_targets <= total_targets:
        raise ValueError(
            f"a micro-batch must have between 0 and all of the iteration's {total_targets} "
            f"targets, got {num_targets}"
        )
    if sp_size < 1 or world_size_if_backend_averages < 1:
        raise ValueError(
            f"sizes must be positive, got {sp_size} and {world_size_if_backend_averages}"
        )
    if total_targets == 0:
        return 0.0
    return num_targets / total_targets / sp_size * world_size_if_backend_averages


def apply_loss_scale(loss: Tensor, scale: float) -> Tensor:
    """``loss * scale``, but an exact zero with zero gradients for a scale of 0.

    The mean loss of a micro-batch whose labels are all masked is 0/0: its NaN must not reach the
    gradients.
    """
    return loss * scale if scale else torch.nan_to_num(loss, 0.0, 0.0, 0.0) * 0.0


def count_targets(batch: Any, ignore_index: int = -100, *, shift: bool = False) -> int | None:
    """Loss-bearing elements of a batch, from its labels.

    Args:
        batch: a mapping, or an object with attributes; its ``labels`` (or ``label``, ``targets``,
            ``target``) is used.
        ignore_index: integer labels with this value do not count. Labels of another dtype
            (regression) all count.
        shift: count ``labels[..., 1:]``, for models that shift the labels inside (Hugging Face's
            causal language models), whose mean is over those.

    Returns:
        The count, or None where no labels are found.
    """
    labels = None
    for name in _LABEL_NAMES:
        value = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
        if isinstance(value, Tensor):
            labels = value
            break
    if labels is None:
        return None
    if shift:
        labels = labels[..., 1:]
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return labels.numel()
    return int((labels != ignore_index).sum())

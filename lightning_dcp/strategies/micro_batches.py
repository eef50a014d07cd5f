"""One micro-batch of this rank: what is known of its loss before and after its training step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_dcp.parallel.inputs import NO_TARGETS, OwnInputs
from lightning_dcp.parallel.targets import count_targets

if TYPE_CHECKING:
    from lightning_dcp.parallel.huggingface_loss import OwnLosses
    from lightning_dcp.planning.plan import MicroBatch

__all__ = ["LossAverage", "Pending", "TargetCounter", "fraction_of", "loss_and_targets"]

LossAverage = Literal["auto", "tokens", "samples"]


@dataclass(frozen=True)
class Pending:
    """A micro-batch of this rank that has not run yet."""

    index: int
    micro_batch: MicroBatch
    data: Any
    #: None where neither plan nor labels say.
    expected_targets: float | None
    #: Lengths of the samples, where they are packed.
    segments: tuple[int, ...] | None = None


class TargetCounter:
    """Says how many elements bear loss before `training_step` has run.

    Args:
        loss_average: what the loss returned by `training_step` is a mean over.
        ignore_index: label that bears no loss.
        own_losses: watches the losses of Hugging Face models.
    """

    def __init__(
        self, loss_average: LossAverage, ignore_index: int, own_losses: OwnLosses | None
    ) -> None:
        self._loss_average = loss_average
        self._ignore_index = ignore_index
        self._own_losses = own_losses
        self._told_of_tokens = False

    def expected(self, micro_batch: MicroBatch, data: Any, *, is_final: bool = True) -> float:
        """Loss-bearing elements as labels and plan say.

        Args:
            micro_batch: the plan's.
            data: as collated, or as moved.
            is_final: whether `data` is what `training_step` gets.
        """
        if self._loss_average == "samples":
            return float(micro_batch.batch_size)
        shifted = self._own_losses is not None and self._own_losses.shifts_in(data)
        counted = count_targets(data, ignore_index=self._ignore_index, shifted=shifted)
        if counted is not None:
            return float(counted)
        if is_final and self._loss_average == "auto" and not self._told_of_tokens:
            self._told_of_tokens = True
            rank_zero_warn(
                f"DCP: no labels were found in the batch (a {type(data).__name__}), so losses are"
                " weighted as means over tokens. If yours is a mean over samples, set"
                " loss_average='samples'; if over tokens, loss_average='tokens'; if over anything"
                " else, return {'loss': loss, 'num_targets': n} from `training_step`."
            )
        return float(micro_batch.num_tokens)


def fraction_of(own: OwnInputs, sp_size: int) -> float:
    """What part of the whole a rank's slice is, by elements that bear loss where they are known."""
    if own.num_targets is None or not own.whole_targets:
        return 1.0 / sp_size
    return own.num_targets / own.whole_targets


def loss_and_targets(output: Any, pending: Pending) -> tuple[Tensor, float]:
    """The loss and the loss-bearing elements out of what `training_step` returned."""
    expected, micro_batch = pending.expected_targets, pending.micro_batch
    if isinstance(output, Mapping):
        loss, num_targets = output.get("loss"), output.get("num_targets", expected)
    else:
        loss, num_targets = output, expected
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise TypeError(
            "`training_step` must return the mean loss of its batch, a tensor with one element, or"
            f" a dict with it under 'loss'; got {given} for a micro-batch of"
            f" {micro_batch.batch_size} samples. To leave a batch out, return its loss with"
            " 'num_targets': 0 in the dict."
        )
    if num_targets is None:
        raise ValueError(NO_TARGETS)
    num_targets = float(num_targets)
    if not 0 <= num_targets < math.inf:
        raise ValueError(
            f"`training_step` returned num_targets={num_targets}; it must be a count, 0 or more."
        )
    return loss.reshape(()), num_targets

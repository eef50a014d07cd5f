"""What `self.log` is given while a batch is evaluated, reduced over ranks once per Trainer batch.

Each micro-batch counts once, on the first rank of its SP group; other ranks of the group, and ranks
that repeat a micro-batch for company, add nothing. A mean is weighted by loss-bearing elements (or
by the `batch_size=` of the call), so that Lightning's mean over the epoch is the one that a single
process would find. torchmetrics objects are left to Lightning: they reduce themselves when they are
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_dcp.strategies.logged import (
    Contribution,
    LogExchange,
    LogKey,
    combine,
    key_of,
    reduction_of,
)

#: What a rank that has not logged a key adds to it.
_NOTHING = {
    "mean": Contribution(0.0, 0.0, 0.0),
    "sum": Contribution(0.0, 0.0, 0.0),
    "max": Contribution(float("-inf"), 0.0, 0.0),
    "min": Contribution(float("inf"), 0.0, 0.0),
}


class EvaluationLogs:
    """Collects one rank's values of a Trainer batch and reduces them with those of the others.

    Args:
        file_value: called as `file_value(key, value, weight)` with each reduced value and the
            total weight of the batch.
        exchange: gathers a float64 vector from all ranks: (K,) -> (W, K).
        gather_objects: gathers a picklable object from all ranks.
        device: where `exchange` wants its vector.
    """

    def __init__(
        self,
        *,
        file_value: Callable[[LogKey, Tensor, float], None],
        exchange: Callable[[Tensor], Tensor],
        gather_objects: Callable[[Any], Sequence[Any]],
        device: torch.device,
    ) -> None:
        self._file_value = file_value
        self._ranks = LogExchange(exchange, gather_objects, device)
        #: The flag says that a value was logged in float64.
        self._values: dict[LogKey, Contribution] = {}
        self._open = False
        self._weight = 1.0
        self._counts = True

    def start(self, *, weight: float, counts: bool) -> None:
        """Take up a Trainer batch.

        Args:
            weight: of this rank's micro-batch, for what is logged without a `batch_size`.
            counts: whether what this rank logs counts.
        """
        self._values.clear()
        self._open, self._weight, self._counts = True, weight, counts

    def set_weight(self, weight: float) -> None:
        """Weight what is logged from now on in this batch without a `batch_size`."""
        self._weight = weight

    def take(self, fx: str, name: str, value: Tensor | Metric, meta: dict[str, Any]) -> bool:
        """Take what `self.log` was given; the arguments are those of Lightning's collection.

        Returns:
            False where the call is Lightning's own business.
        """
        if not self._open or not isinstance(value, Tensor):
            return False
        if self._counts:
            reduce = reduction_of(name, meta, "ranks")
            add_dataloader_idx = meta.get("add_dataloader_idx", True)
            key = key_of(fx, name, meta, reduce, add_dataloader_idx=add_dataloader_idx)
            self._add(key, value, meta.get("batch_size"))
        return True

    def _add(self, key: LogKey, value: Tensor, batch_size: float | None) -> None:
        weight = 1.0
        if key.reduce == "mean":
            weight = self._weight if batch_size is None else float(batch_size)
        if weight <= 0.0:  # the mean over nothing, which may be NaN
            return
        number = self._ranks.as_number(value)
        if key.reduce == "mean":
            number = number * weight
        flag = float(value.dtype is torch.float64)
        before = self._values.get(key)
        if before is not None:
            number = combine(
                key.reduce, torch.stack([torch.as_tensor(before.value).to(number), number])
            )
            weight, flag = weight + before.weight, max(flag, before.flag)
        self._values[key] = Contribution(number, weight, flag)

    def reduce_and_file(self) -> None:
        """Exchange with all ranks, file the reduced values, and forget them. A collective."""
        if not self._open:
            return
        _, logged = self._ranks.gather(
            self._values, lambda key: self._values.get(key, _NOTHING[key.reduce])
        )
        self.discard()
        for key, values, weights, wide in logged:
            total = float(weights.sum())
            if total <= 0.0:  # nobody logged it in this batch
                continue
            value = combine(key.reduce, values)
            if key.reduce == "mean":
                value = value / total
            if not bool((wide > 0).any()):
                value = value.to(torch.get_default_dtype())
            self._file_value(key, value, total)

    def discard(self) -> None:
        """Forget what was collected, and leave further values to Lightning."""
        self._values.clear()
        self._open = False

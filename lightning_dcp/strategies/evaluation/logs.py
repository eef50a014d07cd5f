"""What `self.log` is given while a batch is evaluated, reduced over ranks once per Trainer batch.

Each micro-batch counts once, on the first rank of its SP group; other ranks of the group, and ranks
that repeat a micro-batch for company, add nothing. A mean is weighted by loss-bearing elements (or
by the `batch_size=` of the call), so that Lightning's mean over the epoch is the one that a single
process would find. torchmetrics objects are left to Lightning: they reduce themselves when they are
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

_REDUCTIONS = ("mean", "sum", "max", "min")
#: What Lightning takes as `reduce_fx` besides these names.
_REDUCTION_OF_FUNCTION: dict[Any, str] = {
    torch.mean: "mean",
    torch.sum: "sum",
    sum: "sum",
    torch.max: "max",
    max: "max",
    torch.min: "min",
    min: "min",
}
_NOTHING = {"mean": 0.0, "sum": 0.0, "max": float("-inf"), "min": float("inf")}


@dataclass(frozen=True)
class EvaluationKey:
    """One `self.log` name with all that Lightning needs to file it; picklable."""

    fx: str
    name: str
    reduce: str  # one of _REDUCTIONS
    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    add_dataloader_idx: bool


@dataclass
class _Entry:
    """One key's values on this rank: weighted sum, sum, largest or smallest."""

    value: Tensor  # () float64
    weight: float
    wide: bool  # whether one was float64


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
        file_value: Callable[[EvaluationKey, Tensor, float], None],
        exchange: Callable[[Tensor], Tensor],
        gather_objects: Callable[[Any], Sequence[Any]],
        device: torch.device,
    ) -> None:
        self._file_value = file_value
        self._exchange = exchange
        self._gather_objects = gather_objects
        self._device = device
        #: Keys in the order agreed by all ranks; only grows.
        self._agreed: list[EvaluationKey] = []
        self._values: dict[EvaluationKey, _Entry] = {}
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
            self._add(_key(fx, name, meta), value, meta.get("batch_size"))
        return True

    def _add(self, key: EvaluationKey, value: Tensor, batch_size: float | None) -> None:
        weight = 1.0
        if key.reduce == "mean":
            weight = self._weight if batch_size is None else float(batch_size)
        if weight <= 0.0:  # the mean over nothing, which may be NaN
            return
        number = value.detach().to(device=self._device, dtype=torch.float64).mean()
        if key.reduce == "mean":
            number = number * weight
        wide = value.dtype is torch.float64
        before = self._values.get(key)
        if before is not None:
            number = _join(key.reduce, torch.stack([before.value, number]))
            weight, wide = weight + before.weight, wide or before.wide
        self._values[key] = _Entry(number, weight, wide)

    def reduce_and_file(self) -> None:
        """Exchange with all ranks, file the reduced values, and forget them. A collective."""
        if not self._open:
            return
        rows = self._exchange(self._message())
        if bool((rows[:, 0] > 0).any()):
            new = {key for theirs in self._gather_objects(self._unknown()) for key in theirs}
            self._agreed += sorted(new, key=repr)  # any order, if it is the same on all ranks
            rows = self._exchange(self._message())
        logged = rows[:, 1:].reshape(len(rows), 3, len(self._agreed))
        self.discard()
        # By hook: Lightning forgets the former epoch's values where the hook changes.
        for i, key in sorted(enumerate(self._agreed), key=lambda item: item[1].fx):
            values, weights, wide = logged[:, :, i].unbind(1)
            total = float(weights.sum())
            if total <= 0.0:  # nobody logged it in this batch
                continue
            value = _join(key.reduce, values)
            if key.reduce == "mean":
                value = value / total
            if not bool((wide > 0).any()):
                value = value.to(torch.get_default_dtype())
            self._file_value(key, value, total)

    def discard(self) -> None:
        """Forget what was collected, and leave further values to Lightning."""
        self._values.clear()
        self._open = False

    def _unknown(self) -> list[EvaluationKey]:
        known = set(self._agreed)
        return [key for key in self._values if key not in known]

    def _message(self) -> Tensor:
        """(1 + 3 K,): are there keys unknown to others; values, weights, was it in float64."""
        numbers = torch.zeros(1 + 3 * len(self._agreed), dtype=torch.float64, device=self._device)
        numbers[0] = float(bool(self._unknown()))
        values, weights, wide = numbers[1:].reshape(3, len(self._agreed))
        for i, key in enumerate(self._agreed):
            entry = self._values.get(key)
            values[i] = _NOTHING[key.reduce] if entry is None else entry.value
            if entry is not None:
                weights[i], wide[i] = entry.weight, float(entry.wide)
        return numbers


def _key(fx: str, name: str, meta: dict[str, Any]) -> EvaluationKey:
    given = meta.get("reduce_fx", "mean")
    if isinstance(given, str):
        reduce = {"avg": "mean"}.get(given.lower(), given.lower())
    else:
        # By identity, as Lightning does: another library's `mean` is another function.
        reduce = next((name for fn, name in _REDUCTION_OF_FUNCTION.items() if fn is given), "")
    if reduce not in _REDUCTIONS:
        raise MisconfigurationException(
            f"self.log({name!r}, reduce_fx={given!r}): only {', '.join(_REDUCTIONS)} can be"
            " reduced over ranks. For another reduction log a torchmetrics.Metric."
        )
    return EvaluationKey(
        fx=fx,
        name=name,
        reduce=reduce,
        prog_bar=meta.get("prog_bar", False),
        logger=meta.get("logger", True),
        on_step=meta.get("on_step", False),
        on_epoch=meta.get("on_epoch", True),
        add_dataloader_idx=meta.get("add_dataloader_idx", True),
    )


def _join(reduce: str, values: Tensor) -> Tensor:
    """() of (n,) values; means are sums here, weighted before and divided afterwards."""
    if reduce in ("mean", "sum"):
        return values.sum()
    return values.max() if reduce == "max" else values.min()

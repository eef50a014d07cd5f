"""What of `self.log` is reduced over ranks: keys, and one gather for the values of all of them.

Training (`iteration_logs.py`) and evaluation (`evaluation/logs.py`) differ in what a rank
contributes to a key; how ranks agree on keys and gather them is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

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


@dataclass(frozen=True)
class LogKey:
    """One `self.log` name with all that Lightning needs to file it; picklable."""

    fx: str
    name: str
    reduce: str  # one of _REDUCTIONS, or "metric" for a torchmetrics object
    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    #: Of a torchmetrics object.
    metric_attribute: str | None = None
    #: Of evaluation.
    add_dataloader_idx: bool = True


def reduction_of(name: str, meta: dict[str, Any], over: str) -> str:
    """One of mean, sum, max and min.

    Args:
        name: that is logged.
        meta: further arguments of Lightning's result collection.
        over: what is reduced over, for the message.

    Raises:
        MisconfigurationException: for another `reduce_fx`.
    """
    given = meta.get("reduce_fx", "mean")
    if isinstance(given, str):
        reduce = {"avg": "mean"}.get(given.lower(), given.lower())
    else:
        # By identity, as Lightning does: another library's `mean` is another function.
        reduce = next((name for fn, name in _REDUCTION_OF_FUNCTION.items() if fn is given), "")
    if reduce not in _REDUCTIONS:
        raise MisconfigurationException(
            f"self.log({name!r}, reduce_fx={given!r}): only {', '.join(_REDUCTIONS)} can be"
            f" reduced over {over}. For another reduction log a torchmetrics.Metric."
        )
    return reduce


def key_of(fx: str, name: str, meta: dict[str, Any], reduce: str, **more: Any) -> LogKey:
    """The key of a call of `self.log`; the arguments are those of Lightning's result collection."""
    return LogKey(
        fx=fx,
        name=name,
        reduce=reduce,
        prog_bar=meta.get("prog_bar", False),
        logger=meta.get("logger", True),
        on_step=meta.get("on_step", False),
        on_epoch=meta.get("on_epoch", True),
        **more,
    )


@dataclass(frozen=True)
class Contribution:
    """What one rank adds to a key.

    Attributes:
        value: () float64: a weighted sum, a sum, the largest or the smallest.
        weight: 0 where the rank has logged nothing.
        flag: 0 or 1, with a meaning of its own in training and evaluation.
    """

    value: Tensor | float
    weight: float
    flag: float


class LogExchange:
    """Gathers the contributions of all ranks, which need not know of the same keys.

    Args:
        exchange: gathers a float64 vector from all ranks: (K,) -> (W, K).
        gather_objects: gathers a picklable object from all ranks.
        device: where `exchange` wants its vector.
    """

    def __init__(
        self,
        exchange: Callable[[Tensor], Tensor],
        gather_objects: Callable[[Any], Sequence[Any]],
        device: torch.device,
    ) -> None:
        self._exchange = exchange
        self._gather_objects = gather_objects
        self._device = device
        #: Keys in the order agreed by all ranks; only grows.
        self._agreed: list[LogKey] = []

    def as_number(self, value: Tensor) -> Tensor:
        """() float64 where the exchange wants it."""
        return value.detach().to(device=self._device, dtype=torch.float64).mean()

    def gather(
        self,
        present: Iterable[LogKey],
        own: Callable[[LogKey], Contribution],
        extra: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[LogKey, Tensor, Tensor, Tensor]]]:
        """A collective of all ranks.

        Args:
            present: keys that this rank has logged.
            own: what this rank adds to any key.
            extra: (E,) float64 values of this rank that travel along.

        Returns:
            (W, E) `extra` of every rank; and of each key that some rank has ever logged the (W,)
            values, weights and flags, by hook: Lightning forgets the former epoch's values where
            the hook changes.
        """
        extra = torch.zeros(0) if extra is None else extra
        known = set(self._agreed)
        unknown = [key for key in present if key not in known]
        rows = self._exchange(self._message(unknown, own, extra))
        if bool((rows[:, 0] > 0).any()):
            new = {key for theirs in self._gather_objects(unknown) for key in theirs}
            self._agreed += sorted(new, key=repr)  # any order, if it is the same on all ranks
            rows = self._exchange(self._message([], own, extra))
        start = 1 + extra.numel()
        logged = rows[:, start:].reshape(len(rows), 3, len(self._agreed))
        by_hook = sorted(enumerate(self._agreed), key=lambda item: item[1].fx)
        return rows[:, 1:start], [
            (key, logged[:, 0, i], logged[:, 1, i], logged[:, 2, i]) for i, key in by_hook
        ]

    def _message(
        self, unknown: Sequence[LogKey], own: Callable[[LogKey], Contribution], extra: Tensor
    ) -> Tensor:
        """(1 + E + 3 K,): are there keys unknown to others; extra; values, weights, flags."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        found = [own(key) for key in self._agreed]
        values = [zero + each.value for each in found]
        return torch.cat(
            [
                zero.new_tensor([float(bool(unknown))]),
                extra.to(zero),
                torch.stack(values) if values else zero.new_empty(0),
                zero.new_tensor([each.weight for each in found] + [each.flag for each in found]),
            ]
        )


def combine(reduce: str, values: Tensor) -> Tensor:
    """() of (n,) values; means are sums here, weighted before and divided afterwards."""
    if reduce in ("mean", "metric", "sum"):
        return values.sum()
    return values.max() if reduce == "max" else values.min()

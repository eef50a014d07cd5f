"""What `self.log` is given inside micro-batches, reduced over them and all ranks once an iteration.

NOTE [One reduction per iteration]
    `self.log(on_step=True, sync_dist=True)` is one collective per call in Lightning. Ranks that run
    different numbers of micro-batches would make different numbers of calls, and hang. Values are
    therefore collected while micro-batches run, and exchanged once after the last of them, in one
    gather in which every rank takes part, an idle one too. A mean is weighted by loss-bearing
    elements (or by the `batch_size=` of the call), each micro-batch counted once, also where p
    ranks ran it together. Lightning then gets one value per key and iteration, the same on every
    rank, and the iteration's weight as batch size: its epoch mean is the weighted mean over the
    epoch.
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
    metric_attribute: str | None = None


@dataclass
class _Entry:
    value: Tensor  # () float64
    share: float  # 1/p
    weight: float | None  # of a mean: elements (or batch_size) of the micro-batch, times share


class IterationLogs:
    """Collects one rank's logged values of an iteration and reduces them with those of the others.

    Args:
        file_value: called as `file_value(key, value, weight)` with each reduced value and the
            iteration's total weight.
        file_metric: called as `file_metric(key)` for each metric object that some rank has logged.
        exchange: gathers a float64 vector from all ranks: (K,) -> (W, K).
        gather_objects: gathers a picklable object from all ranks.
        device: where `exchange` wants its vector.
    """

    def __init__(
        self,
        *,
        file_value: Callable[[LogKey, Tensor, float], None],
        file_metric: Callable[[LogKey], None],
        exchange: Callable[[Tensor], Tensor],
        gather_objects: Callable[[Any], Sequence[Any]],
        device: torch.device,
    ) -> None:
        self._file_value = file_value
        self._file_metric = file_metric
        self._exchange = exchange
        self._gather_objects = gather_objects
        self._device = device
        #: Keys in the order agreed by all ranks; only grows.
        self._agreed: list[LogKey] = []
        self._values: dict[LogKey, list[_Entry]] = {}
        self._metrics: set[LogKey] = set()
        self._share = 1.0
        #: Logged in the running micro-batch, whose elements are not counted yet.
        self._unsettled: list[_Entry] = []

    def start_micro_batch(self, *, share: float) -> None:
        """Take up a micro-batch.

        Args:
            share: 1/p: this rank's part of a micro-batch that p ranks run together.
        """
        self._share = share

    def finish_micro_batch(self, *, weight: float) -> None:
        """Weight what was logged in the micro-batch without a `batch_size`.

        Args:
            weight: loss-bearing elements of the micro-batch, known once its step has returned.
        """
        for entry in self._unsettled:
            entry.weight = weight * entry.share
        self._unsettled.clear()

    def add(self, fx: str, name: str, value: Tensor, meta: dict[str, Any]) -> None:
        """Take one logged value; the arguments are those of Lightning's result collection."""
        batch_size = meta.get("batch_size")
        entry = _Entry(
            value=value.detach().to(device=self._device, dtype=torch.float64).mean(),
            share=self._share,
            weight=None if batch_size is None else float(batch_size) * self._share,
        )
        if entry.weight is None:
            self._unsettled.append(entry)
        self._values.setdefault(_key(fx, name, meta), []).append(entry)

    def add_metric(self, fx: str, name: str, metric: Metric, meta: dict[str, Any]) -> None:
        """Remember that a metric is logged: at the epoch's end idle ranks must compute it too."""
        self._metrics.add(_key(fx, name, meta, is_metric=True))

    def reduce_and_file(self, extra: Tensor) -> Tensor:
        """Exchange with all ranks, file the reduced values, and forget them. A collective.

        Args:
            extra: (E,) float64 values of this rank that travel along.

        Returns:
            (W, E): `extra` of every rank.
        """
        rows = self._exchange(self._message(extra))
        if bool((rows[:, 0] > 0).any()):
            new = {key for theirs in self._gather_objects(self._unknown()) for key in theirs}
            self._agreed += sorted(new, key=repr)  # any order, if it is the same on all ranks
            rows = self._exchange(self._message(extra))
        logged = rows[:, 1 + extra.numel() :].reshape(len(rows), len(self._agreed), 2)
        for i, key in enumerate(self._agreed):
            values, weights = logged[:, i, 0], logged[:, i, 1]
            if key.reduce == "metric":
                self._file_metric(key)
            elif float(weights.sum()) > 0.0:  # else nobody logged it in this iteration
                self._file_value(key, _combine(key.reduce, values, weights), float(weights.sum()))
        self.discard()
        return rows[:, 1 : 1 + extra.numel()]

    def discard(self) -> None:
        """Forget what was collected."""
        self._values.clear()
        self._metrics.clear()
        self._unsettled.clear()

    def _unknown(self) -> list[LogKey]:
        known = set(self._agreed)
        return [key for key in [*self._values, *self._metrics] if key not in known]

    def _message(self, extra: Tensor) -> Tensor:
        """(1 + E + 2 K,): are there keys unknown to others; extra; value and weight of each key."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        parts = [zero + float(bool(self._unknown())), *extra.to(zero)]
        for key in self._agreed:
            entries = self._values.get(key, [])
            parts.append(zero + _local(key.reduce, entries))
            parts.append(
                zero + sum(_weight(e) if key.reduce == "mean" else e.share for e in entries)
            )
        return torch.stack(parts)


def _key(fx: str, name: str, meta: dict[str, Any], *, is_metric: bool = False) -> LogKey:
    reduce = meta.get("reduce_fx", "mean")
    reduce = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", repr(reduce))
    reduce = {"avg": "mean"}.get(reduce.lower(), reduce.lower())
    if not is_metric and reduce not in _REDUCTIONS:
        raise MisconfigurationException(
            f"self.log({name!r}, reduce_fx={meta['reduce_fx']!r}): only {', '.join(_REDUCTIONS)}"
            " can be reduced over micro-batches and ranks. For another reduction log a"
            " torchmetrics.Metric."
        )
    return LogKey(
        fx=fx,
        name=name,
        reduce="metric" if is_metric else reduce,
        prog_bar=meta.get("prog_bar", False),
        logger=meta.get("logger", True),
        on_step=meta.get("on_step", False),
        on_epoch=meta.get("on_epoch", True),
        metric_attribute=meta.get("metric_attribute"),
    )


def _weight(entry: _Entry) -> float:
    assert entry.weight is not None, "a micro-batch was not finished"
    return entry.weight


def _local(reduce: str, entries: Sequence[_Entry]) -> Tensor | float:
    """This rank's contribution of one key."""
    if reduce == "mean":
        # Weight zero must not let a NaN through: 0 * NaN is NaN.
        return sum((e.value * _weight(e) for e in entries if _weight(e) > 0.0), torch.tensor(0.0))
    if reduce == "sum":
        return sum((e.value * e.share for e in entries), torch.tensor(0.0))
    if not entries:
        return float("-inf") if reduce == "max" else float("inf")
    stacked = torch.stack([e.value for e in entries])
    return stacked.max() if reduce == "max" else stacked.min()


def _combine(reduce: str, values: Tensor, weights: Tensor) -> Tensor:
    """() from the (W,) contributions of all ranks."""
    if reduce == "mean":
        return values.sum() / weights.sum()
    if reduce == "sum":
        return values.sum()
    return values.max() if reduce == "max" else values.min()

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

    The same holds for hooks around a backward pass, which run once per micro-batch, and for those
    around `zero_grad`: they run once an iteration, but while other ranks may still be in their
    first micro-batch and wait for this one in an SP group, so that a collective could hang there.

NOTE [Metric objects]
    A torchmetrics object keeps its own state and is reduced by Lightning when it is computed, one
    collective after another in the order in which Lightning got to know the objects. Ranks log them
    in different orders, or not at all. So they too are only noted, and given to Lightning at the
    end of the iteration, by all ranks in one order. The value of a step (`on_step=True`) is the
    mean of the micro-batches' own values, weighted as other means are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
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

#: Reductions that divide by the weight; of a metric object, the value of a step.
_MEANS = ("mean", "metric")
#: Hooks that each rank runs once an iteration, between its first forward and its first backward.
_BETWEEN_FORWARD_AND_BACKWARD = frozenset({"on_before_zero_grad", "optimizer_zero_grad"})


@dataclass
class _Entry:
    value: Tensor  # () float64
    share: float  # 1/p
    weight: float | None  # of a mean: elements (or batch_size) of the micro-batch, times share
    wide: bool  # whether it was logged in float64
    of_nothing: bool = False  # whether no element of the micro-batch bears loss

    @property
    def counts(self) -> bool:
        """Not so the mean over nothing, NaN, whatever weight was given with it."""
        return not (self.of_nothing and bool(self.value.isnan()))


class IterationLogs:
    """Collects one rank's logged values of an iteration and reduces them with those of the others.

    Args:
        file_value: called as `file_value(key, value, weight)` with each reduced value and the
            iteration's total weight.
        file_metric: called as `file_metric(key, step_value)` for each metric object that some rank
            has logged; None where no micro-batch has a value of its own.
        find_metric: the metric object of the module under a dotted path; raises AttributeError.
        exchange: gathers a float64 vector from all ranks: (K,) -> (W, K).
        gather_objects: gathers a picklable object from all ranks.
        device: where `exchange` wants its vector.
    """

    def __init__(
        self,
        *,
        file_value: Callable[[LogKey, Tensor, float], None],
        file_metric: Callable[[LogKey, Tensor | None], None],
        find_metric: Callable[[str], Any],
        exchange: Callable[[Tensor], Tensor],
        gather_objects: Callable[[Any], Sequence[Any]],
        device: torch.device,
    ) -> None:
        self._file_value = file_value
        self._file_metric = file_metric
        self._find_metric = find_metric
        self._ranks = LogExchange(exchange, gather_objects, device)
        self._values: dict[LogKey, list[_Entry]] = {}
        self._metrics: set[LogKey] = set()
        self._inside = False
        #: 1/p of the running micro-batch.
        self.share = 1.0
        #: Elements of the running micro-batch; None while they are not counted yet.
        self._weight: float | None = None
        #: Logged in the running micro-batch before its elements were counted.
        self._unsettled: list[_Entry] = []
        #: All that was logged in the running micro-batch.
        self._running: list[_Entry] = []
        self._rank_weight = 1.0
        #: What part of the running micro-batch a `batch_size` given with a value stands for.
        self._fraction = 1.0

    def start_iteration(self, *, rank_weight: float) -> None:
        """Take up an iteration.

        Args:
            rank_weight: of what each rank logs once an iteration: samples of the iteration per
                rank.
        """
        self.discard()
        self._rank_weight = rank_weight

    def start_micro_batch(self, *, share: float) -> None:
        """Take up a micro-batch.

        Args:
            share: 1/p: this rank's part of a micro-batch that p ranks run together.
        """
        self._inside, self.share, self._weight = True, share, None
        self._fraction = share
        self._running.clear()

    def start_slice(self, *, fraction: float) -> None:
        """Say that this rank's part of the micro-batch that was taken up is a slice of its own.

        What it logs is of its own elements, and weighs as much as they are.

        Args:
            fraction: of the whole micro-batch.
        """
        self.share, self._fraction = 1.0, fraction

    def finish_forward(self, *, weight: float) -> None:
        """Weight what is logged in the micro-batch without a `batch_size`.

        Args:
            weight: loss-bearing elements of the micro-batch, known once its step has returned.
        """
        self._weight = weight
        for entry in self._unsettled:
            entry.weight = weight * entry.share
        self._unsettled.clear()
        for entry in self._running:
            entry.of_nothing = weight == 0

    def finish_micro_batch(self) -> None:
        """Leave the micro-batch, after its backward pass."""
        self._inside = False

    def take(self, fx: str, name: str, value: Tensor | Metric, meta: dict[str, Any]) -> bool:
        """Take what `self.log` was given, if ranks give different numbers of them here.

        Args:
            fx: hook that logs.
            name: of the value.
            value: () or a metric object.
            meta: further arguments of Lightning's result collection.

        Returns:
            False where the call is Lightning's own business.
        """
        if not self._inside and fx not in _BETWEEN_FORWARD_AND_BACKWARD:
            return False
        if isinstance(value, Metric):
            self.add_metric(fx, name, value, meta)
        else:
            self.add(fx, name, value, meta)
        return True

    def add(self, fx: str, name: str, value: Tensor, meta: dict[str, Any]) -> None:
        """Collect one value; the arguments are those of `take`."""
        reduce = reduction_of(name, meta, "micro-batches and ranks")
        self._add(key_of(fx, name, meta, reduce), value, meta.get("batch_size"))

    def add_metric(self, fx: str, name: str, metric: Metric, meta: dict[str, Any]) -> None:
        """Note that a metric object is logged; the arguments are those of `take`.

        Raises:
            MisconfigurationException: The metric is not a part of the module.
        """
        attribute = meta.get("metric_attribute")
        key = key_of(fx, name, meta, "metric", metric_attribute=attribute)
        try:
            found = self._find_metric(key.metric_attribute or "")
        except AttributeError:
            found = None
        if found is not metric:
            raise MisconfigurationException(
                f"self.log({name!r}, ...): the {type(metric).__name__} is not found in the"
                f" LightningModule under metric_attribute={key.metric_attribute!r}. Ranks that run"
                " a micro-batch together count it once, and ranks that run none compute the"
                " metric as well, for which it must be a part of the module: keep it as an"
                " attribute, or in a torch.nn.ModuleList or ModuleDict."
            )
        self._metrics.add(key)
        own = metric._forward_cache
        if key.on_step and isinstance(own, Tensor) and own.numel() == 1:
            self._add(key, own, meta.get("batch_size"))

    def _add(self, key: LogKey, value: Tensor, batch_size: float | None) -> None:
        in_micro_batch = key.fx not in _BETWEEN_FORWARD_AND_BACKWARD
        share = self.share if in_micro_batch else 1.0
        weight = self._weight if in_micro_batch else self._rank_weight
        if batch_size is not None:
            weight = float(batch_size) * (self._fraction if in_micro_batch else 1.0)
        elif weight is not None:
            weight *= share
        entry = _Entry(
            value=self._ranks.as_number(value),
            share=share,
            weight=weight,
            wide=value.dtype is torch.float64,
        )
        if entry.weight is None:
            self._unsettled.append(entry)
        if in_micro_batch:
            self._running.append(entry)
        self._values.setdefault(key, []).append(entry)

    def reduce_and_file(
        self, extra: Tensor, is_lost: Callable[[Tensor], bool] = lambda _: False
    ) -> Tensor:
        """Exchange with all ranks, file the reduced values, and forget them. A collective.

        Args:
            extra: (E,) float64 values of this rank that travel along.
            is_lost: whether an iteration with these (W, E) values counts for nothing; then no value
                is filed.

        Returns:
            (W, E): `extra` of every rank, on the host: the device is waited for once.
        """
        extras, logged = self._ranks.gather(
            [*self._values, *self._metrics], self._contribution, extra
        )
        extras = extras.cpu()
        if is_lost(extras):
            self.take_again(self.of_hooks())
            return extras
        for key, values, weights, flags in logged:
            total, flagged = float(weights.sum()), bool((flags > 0).any())
            value = None
            if total > 0.0:  # else nobody logged it in this iteration
                value = combine(key.reduce, values)
                if key.reduce in _MEANS:
                    value = value / weights.sum()
                if key.reduce == "metric" or not flagged:
                    value = value.to(torch.get_default_dtype())
            if key.reduce != "metric":
                if value is not None:
                    self._file_value(key, value, total)
            elif flagged:
                self._file_metric(key, value)
        self.discard()
        return extras

    def of_hooks(self) -> tuple[dict[LogKey, list[_Entry]], set[LogKey]]:
        """What hooks have logged that run once an iteration, however often that is repeated."""
        return (
            {k: v for k, v in self._values.items() if k.fx in _BETWEEN_FORWARD_AND_BACKWARD},
            {k for k in self._metrics if k.fx in _BETWEEN_FORWARD_AND_BACKWARD},
        )

    def take_again(self, logged: tuple[dict[LogKey, list[_Entry]], set[LogKey]]) -> None:
        """Forget what micro-batches have logged, all but the result of `of_hooks`."""
        self.discard()
        self._values, self._metrics = logged

    def discard(self) -> None:
        """Forget what was collected."""
        self._values.clear()
        self._metrics.clear()
        self._unsettled.clear()
        self._running.clear()
        self._inside = False

    def _contribution(self, key: LogKey) -> Contribution:
        """This rank's.

        The flag of a value says that it was logged in float64, that of a metric object that it was
        logged at all.
        """
        entries = [entry for entry in self._values.get(key, []) if entry.counts]
        mean, is_metric = key.reduce in _MEANS, key.reduce == "metric"
        return Contribution(
            value=_local(key.reduce, entries),
            weight=float(sum(_weight(e) if mean else e.share for e in entries)),
            flag=float(key in self._metrics if is_metric else any(e.wide for e in entries)),
        )


def _weight(entry: _Entry) -> float:
    assert entry.weight is not None, "a micro-batch was not finished"
    return entry.weight


def _local(reduce: str, entries: Sequence[_Entry]) -> Tensor | float:
    """This rank's contribution of one key."""
    if reduce in _MEANS:
        # Weight zero must not let a NaN through: 0 * NaN is NaN.
        return sum((e.value * _weight(e) for e in entries if _weight(e) > 0.0), torch.tensor(0.0))
    if reduce == "sum":
        return sum((e.value * e.share for e in entries), torch.tensor(0.0))
    if not entries:
        return float("-inf") if reduce == "max" else float("inf")
    stacked = torch.stack([e.value for e in entries])
    return stacked.max() if reduce == "max" else stacked.min()

"""torchmetrics objects while micro-batches run: counted once, and not reduced over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torchmetrics import Metric


@contextmanager
def counted_by_another_rank(metrics: Iterable[Metric]) -> Iterator[None]:
    """Metric objects updated in here are as before afterwards.

    p ranks run the same micro-batch; the first rank of the group counts it. A value that was
    computed before is forgotten as on that rank: else it would reduce alone the next time.
    """
    before = [(metric, metric._copy_state_dict(), metric._update_count) for metric in metrics]
    try:
        yield
    finally:
        for metric, state, update_count in before:
            for name, value in state.items():
                setattr(metric, name, _nothing_like(metric, name) if value == [] else value)
            metric._update_count = update_count


def _nothing_like(metric: Metric, name: str) -> list[Any]:
    """An empty list state as one tensor without entries, of the type and shape that others have.

    A rank that counts nothing takes part when states are gathered. What torchmetrics makes up for
    an empty list has one dimension and the metric's default type: gathered with another rank's
    integers or matrices it would be garbage.
    """
    now = getattr(metric, name)
    if not now or not isinstance(now[0], Tensor):
        return []
    first = now[0].detach()
    return [(first if first.ndim else first.unsqueeze(0))[:0].clone()]


@contextmanager
def not_reduced_over_ranks(metrics: Iterable[Metric]) -> Iterator[None]:
    """`compute` in here is refused where it would start a collective.

    Ranks run different numbers of micro-batches; without this they would wait for each other for
    ever, without a word.
    """
    before = [(metric, metric.dist_sync_fn) for metric in metrics]
    try:
        for metric, _ in before:
            metric.dist_sync_fn = _refuse
        yield
    finally:
        for metric, function in before:
            metric.dist_sync_fn = function


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "`compute` of a torchmetrics object was called inside `training_step`. It reduces over all"
        " ranks, which run different numbers of micro-batches per optimizer step, so training would"
        " hang. Log the object itself, self.log(name, metric), or compute it in"
        " `on_train_batch_end`."
    )

"""torchmetrics objects while micro-batches run: counted once, and not reduced over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors


def metrics_of(module: nn.Module) -> list[Metric]:
    """The metric objects inside a module."""
    return [each for each in module.modules() if isinstance(each, Metric)]


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


@contextmanager
def unequal_lists_gathered() -> Iterator[None]:
    """Metric objects with list states are reduced, however many entries each rank has.

    torchmetrics gathers entry by entry where entries are not joined to one (`dist_reduce_fx=None`),
    and takes a rank without any for one with float32 vectors. Under a plan ranks update different
    numbers of times, some never: the one waits for ever, the other mixes up types and shapes.
    """
    sync = Metric._sync_dist

    def sync_dist(
        self: Metric, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None
    ) -> None:
        # Inside a micro-batch `_refuse` has to come first.
        if dist_sync_fn is not _refuse:
            _fill_lists(self, process_group or self.process_group)
        sync(self, dist_sync_fn, process_group=process_group)
        for name, reduce in self._reductions.items():
            state = getattr(self, name)
            if reduce is None and isinstance(self._defaults[name], list):
                setattr(self, name, [s for s in state if not isinstance(s, Tensor) or s.numel()])

    Metric._sync_dist = sync_dist  # type: ignore[method-assign]
    try:
        yield
    finally:
        Metric._sync_dist = sync  # type: ignore[method-assign]


def _fill_lists(metric: Metric, group: Any) -> None:
    """Give list states as many entries as those of any rank, without values. A collective."""
    names = [name for name, default in metric._defaults.items() if isinstance(default, list)]
    if not names:
        return
    for name in names:
        state = getattr(metric, name)
        if isinstance(state, Tensor):
            state = [state]
        if metric._reductions[name] == dim_zero_cat and state:
            state = [dim_zero_cat(state)]
        setattr(metric, name, state)
    own = {
        name: [(e.dtype, tuple(e.shape)) for e in getattr(metric, name) if isinstance(e, Tensor)]
        for name in names
    }
    everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, own, group=group)
    for name in names:
        longest = max((theirs[name] for theirs in everyone), key=len)
        filled = [
            next((e for e in row if e is not None and 0 not in e[1]), longest[i])
            for i, row in enumerate(zip_longest(*(theirs[name] for theirs in everyone)))
        ]
        state = list(getattr(metric, name))
        for dtype, shape in filled[len(own[name]) :]:
            state.append(torch.empty((0, *shape[1:]), dtype=dtype, device=metric.device))
        setattr(metric, name, state)


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "`compute` of a torchmetrics object was called inside `training_step`. It reduces over all"
        " ranks, which run different numbers of micro-batches per optimizer step, so training would"
        " hang. Log the object itself, self.log(name, metric), or compute it in"
        " `on_train_batch_end`."
    )

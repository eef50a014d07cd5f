"""Lightning's `ThroughputMonitor` under a plan: each sample counted once.

Written against Lightning 2.6.6; the names are covered by `tests/strategies/test_logging.py`.

========================================  =====================================================
private name                              why
========================================  =====================================================
``ThroughputMonitor._throughputs``        it takes rank 0's batch times the number of ranks for the
                                          whole; here ranks run different numbers of samples, some
                                          of them together, some none
========================================  =====================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import ThroughputMonitor
from typing_extensions import override

from lightning_dcp.data.batch import IterationBatch

if TYPE_CHECKING:
    import lightning as L

_COUNTS = ("samples", "lengths", "samples_per_sec", "items_per_sec")


class WholeThroughput(Throughput):
    """Is given what all ranks have run together, and reports the mean of a rank as a device's."""

    @override
    def compute(self) -> dict[str, int | float]:
        metrics = super().compute()
        for name in _COUNTS:
            for key in (name, f"device{self.separator}{name}"):
                if key in metrics:
                    metrics[key] = metrics[key] / self.world_size
        return metrics


class IterationThroughput:
    """Feeds the Trainer's ThroughputMonitors with counts of all ranks, for one run of the Trainer.

    The user's `batch_size_fn` and `length_fn` are called with each micro-batch, as the ordinary
    batch they were written for. In training each rank counts 1/p of what p ranks run together; the
    sums over ranks are those of the iteration. A batch of validation, testing or prediction stands
    for those of the other ranks, as it does under DDP, by its share of their samples.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._monitors = [c for c in callbacks if isinstance(c, ThroughputMonitor)]
        self._functions: list[Callable[[Any], int]] = []
        self._restore: list[tuple[ThroughputMonitor, str, Any]] = []
        for monitor in self._monitors:
            for name in ("batch_size_fn", "length_fn"):
                function = getattr(monitor, name)
                if function is not None:
                    self._restore.append((monitor, name, function))
                    setattr(monitor, name, self._whole(len(self._functions), function))
                    self._functions.append(function)
            for stage in monitor._throughputs:
                monitor._throughputs[stage] = WholeThroughput(
                    available_flops=monitor.available_flops,
                    world_size=trainer.world_size,
                    **monitor.kwargs,
                )
        #: Samples of all ranks over this rank's own, in the running batch of evaluation.
        self.whole_over_own: Callable[[], float] = lambda: trainer.world_size
        #: This rank's counts of the running iteration, one for each function of each monitor.
        self.counts = [0.0] * len(self._functions)
        self._totals = [0] * len(self._functions)

    def _whole(self, index: int, function: Callable[[Any], int]) -> Callable[[Any], int]:
        def whole(batch: Any) -> int:
            if isinstance(batch, IterationBatch):
                return self._totals[index]
            return round(function(batch) * self.whole_over_own())

        return whole

    @torch.no_grad()
    def count(self, batch: Any, share: float) -> None:
        """Count one micro-batch of this rank, which 1/`share` ranks run together."""
        for index, function in enumerate(self._functions):
            self.counts[index] += share * float(function(batch))

    def finish_iteration(self, totals: Sequence[float]) -> None:
        """Take the counts of all ranks and begin anew."""
        self._totals = [round(total) for total in totals]
        self.counts = [0.0] * len(self._functions)

    def remove(self) -> None:
        """Give the monitors their own functions back. Safe to call twice."""
        for monitor, name, function in self._restore:
            setattr(monitor, name, function)
        self._restore.clear()

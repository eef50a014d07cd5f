"""What one rank has run of an iteration so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_dcp.planning.plan import Plan

__all__ = ["IterationState", "Lap"]


@dataclass
class IterationState:
    """What this rank has run of the current iteration."""

    plan: Plan
    #: N as plan and labels say, before the first backward pass; tokens where that is nothing.
    reference_targets: float
    started_s: float
    #: How often the iteration has run before, out of memory.
    attempt: int = 0
    #: Place in the plan of the micro-batch that was begun last.
    index: int = 0
    #: Sum over this rank's micro-batches of n/p.
    targets: float = 0.0
    #: Sum over this rank's micro-batches of loss * n/p; () float64.
    loss_sum: Tensor | float = 0.0
    laps: list[Lap] = field(default_factory=list)
    #: () float64 each: losses of the micro-batches that this rank shares with others.
    shared_losses: list[Tensor] = field(default_factory=list)

    def busy_s(self) -> float:
        """Seconds this rank spent on its micro-batches; waits for an accelerator."""
        return sum(lap.seconds() for lap in self.laps)


class Lap:
    """One stretch of time on a device, measured without waiting for it before it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._start = self._mark()
        self._stop: Any = None

    def stop(self) -> None:
        """End the stretch."""
        self._stop = self._mark()

    def seconds(self) -> float:
        """Its length."""
        if self._cuda:
            self._stop.synchronize()
            return float(self._start.elapsed_time(self._stop)) / 1e3
        return float(self._stop - self._start)

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

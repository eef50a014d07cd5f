"""Seconds between moments, as the device passes them."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments now, tells the seconds between them later."""

    def mark(self) -> Any:
        """This moment, in the clock's own unit."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds from one moment to a later one."""


class HostClock:
    """For devices that compute while they are called."""

    def mark(self) -> float:
        """This moment, in seconds."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Seconds from ``start`` to ``end``, never negative."""
        return max(0.0, end - start)


class CudaClock:
    """CUDA events, which the device itself passes; only reading them waits for it."""

    def mark(self) -> torch.cuda.Event:
        """An event behind all work that was submitted so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds from ``start`` to ``end``, never negative; waits for ``end``."""
        end.synchronize()
        return max(0.0, float(start.elapsed_time(end)) / 1e3)


def clock_of(device: torch.device) -> Clock:
    """The clock that tells the truth for this device."""
    return CudaClock() if device.type == "cuda" else HostClock()

"""Holding a rank to its memory limit while it trains: more is an out-of-memory error.

On CUDA the allocator is told. A CPU hands out memory until the machine swaps or the kernel ends a
process; there every operation of a micro-batch is watched, forward and backward (both run in one
thread), and the storages that it makes are counted on top of what stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_dcp.profiling.live_bytes import LiveStorages

__all__ = ["ByteLimit"]


class ByteLimit:
    """The memory limit of one rank, held from now on until `remove`.

    Args:
        device: of this rank.
        limit_bytes: what the rank may use.
        fixed_bytes: parameters, gradients, optimizer state and buffers, which are there before a
            micro-batch begins; not used on CUDA, where the allocator knows.
    """

    def __init__(self, device: torch.device, limit_bytes: int, fixed_bytes: int) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._fixed_bytes = fixed_bytes
        self._share_before: float | None = None
        #: Most that was in use or asked for in the last micro-batch; 0 on CUDA.
        self.used_bytes = 0
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            # Older versions of torch cannot say what was set before.
            share_of = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
            self._share_before = float(share_of(device))
            share = min(self._share_before, limit_bytes / total)
            torch.cuda.set_per_process_memory_fraction(share, device)

    @contextmanager
    def held(self, missing_bytes: int = 0) -> Iterator[LiveStorages | None]:
        """Around forward and backward of a micro-batch.

        Args:
            missing_bytes: of `fixed_bytes`, what the micro-batch has yet to make: gradients that do
                not exist.

        Yields:
            What counts; None on CUDA.

        Raises:
            torch.OutOfMemoryError: More than the limit is used, on a CPU by the storage that an
                operation in here has just made.
        """
        if self._device.type == "cuda":
            yield None
            return
        live = _Limited(self._limit_bytes, self._fixed_bytes - missing_bytes)
        try:
            with live:
                yield live
        finally:
            self.used_bytes = self._fixed_bytes - missing_bytes + live.peak

    def remove(self) -> None:
        """Let the process use what it could before. Safe to call twice."""
        if self._share_before is not None:
            torch.cuda.set_per_process_memory_fraction(self._share_before, self._device)
            self._share_before = None


class _Limited(LiveStorages):  # type: ignore[no-untyped-call]
    """Counts on top of `fixed_bytes`, and raises where a limit is passed."""

    def __init__(self, limit_bytes: int, fixed_bytes: int) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes
        self._fixed_bytes = fixed_bytes

    def check(self, size: int) -> None:
        used = self._fixed_bytes + self.now
        if used + size > self._limit_bytes:
            self.peak = max(self.peak, self.now + size)
            raise torch.OutOfMemoryError(
                f"CPU out of memory. Tried to allocate {size:,} bytes. The memory limit of"
                f" {self._limit_bytes:,} bytes leaves {max(0, self._limit_bytes - used):,} free:"
                f" {self._fixed_bytes:,} bytes of parameters, gradients and optimizer state, and"
                f" {self.now:,} bytes of the running micro-batch are in use."
            )

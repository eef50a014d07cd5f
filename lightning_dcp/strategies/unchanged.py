"""What micro-batches change beside gradients, put back where their iteration is lost.

Metric objects and buffers. Both are looked at once an iteration, so that it has to be cheap.

NOTE [Which buffers are copied]
    Small ones always; large ones if the first micro-batches have changed them, for which they are
    copied to the host once and compared. Counters of writes alone would not do: neither
    `batch_norm` nor code that writes to `buffer.data` moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dcp.strategies.out_of_memory import RanOutOfMemory

__all__ = ["StateBefore"]

#: A copy of so much takes no time to speak of.
_SMALL_BYTES = 256 * 1024
_OF_METRICS = ("_update_count", "_computed", "_forward_cache")


class StateBefore:
    """Buffers and metric objects of a module as they were when an iteration began.

    Args:
        module: the LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        #: Names of large buffers that are written to; None before anything ran.
        self._written: set[str] | None = None
        self._kept: list[_Kept] = []
        self._undo: list[Callable[[], None]] = []

    def keep(self, metrics: Iterable[Metric]) -> None:
        """Take note of the state that holds now.

        Args:
            metrics: the metric objects inside the module.
        """
        self._kept = [
            _Kept(owner, name, at, buffer, copied=self._is_copied(name, buffer))
            for prefix, owner in self._module.named_modules()
            for at, buffer in owner._buffers.items()
            if buffer is not None
            for name in (f"{prefix}.{at}".removeprefix("."),)
        ]
        self._undo = [_metric(metric) for metric in metrics]

    def learn(self) -> None:
        """See which buffers the first micro-batches have changed, after they have run."""
        if self._written is None:
            self._written = {kept.name for kept in self._kept if kept.is_changed}

    def put_back(self) -> None:
        """Put everything back that has changed since.

        Raises:
            torch.OutOfMemoryError: A large buffer was written to for the first time.
        """
        for kept in self._kept:
            kept.put_back()
        for undo in self._undo:
            undo()

    def _is_copied(self, name: str, buffer: Tensor) -> bool:
        known = self._written
        return known is None or name in known or buffer.nbytes <= _SMALL_BYTES


class _Kept:
    """A buffer of a module, with a copy if it is expected to be written to."""

    def __init__(
        self, owner: nn.Module, name: str, at: str, buffer: Tensor, *, copied: bool
    ) -> None:
        self.name = name
        self._owner = owner
        self._at = at
        self._buffer = buffer
        self._version = _version(buffer)
        self._copy: Tensor | None = None
        if copied or self._version is None:
            small = buffer.nbytes <= _SMALL_BYTES
            self._copy = buffer.detach().clone() if small else buffer.detach().to("cpu", copy=True)

    @property
    def is_changed(self) -> bool:
        if self._copy is None:
            return _version(self._buffer) != self._version
        return not torch.equal(self._buffer.to(self._copy.device), self._copy)

    def put_back(self) -> None:
        if self._at in self._owner._buffers:
            self._owner._buffers[self._at] = self._buffer
        if self._copy is not None:
            with torch.inference_mode() if self._buffer.is_inference() else torch.no_grad():
                self._buffer.copy_(self._copy)
        elif self.is_changed:
            raise RanOutOfMemory(
                f"An iteration ran out of memory and cannot be repeated: it has written to the"
                f" buffer {self.name}, which the first one had not. Lower memory_limit_bytes, and"
                " start again from the last checkpoint."
            )


def _version(tensor: Tensor) -> int | None:
    """Changes whenever a tensor is written to; None where nobody counts."""
    return None if tensor.is_inference() else tensor._version


def _metric(metric: Metric) -> Callable[[], None]:
    """Copies of tensor states, which are added to in place; lists only get longer."""
    states: dict[str, Any] = {}
    for name in metric._defaults:
        state = getattr(metric, name)
        states[name] = state.detach().clone() if isinstance(state, Tensor) else list(state)
    others = {name: getattr(metric, name) for name in _OF_METRICS if hasattr(metric, name)}

    def undo() -> None:
        # Copies again: an iteration may be lost more than once.
        for name, value in states.items():
            setattr(metric, name, value.clone() if isinstance(value, Tensor) else list(value))
        for name, value in others.items():
            setattr(metric, name, value)

    return undo

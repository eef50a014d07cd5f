"""Peak bytes of what runs without a backward pass, above what was there before.

On CUDA the allocator knows. On a CPU nobody counts: every operation is watched, and storages that
it makes count from then on until they are freed.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

__all__ = ["LiveStorages", "peak_bytes"]

_COLLECTIVES = frozenset({"c10d", "_c10d_functional"})
_LONGEST_WAIT_S = 5e-3


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[Callable[[], int]]:
    """Measure what runs inside; call what is given, inside or after, for the peak so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
        return
    collects = gc.isenabled()
    gc.disable()  # it would free garbage in cycles at one time or another
    try:
        with LiveStorages() as live:
            yield lambda: live.peak
    finally:
        if collects:
            gc.enable()


class LiveStorages(TorchDispatchMode):
    """Adds up the storages that operations make, and takes off those that are freed.

    NOTE [Buffers of collectives]
        The thread that ran a collective lets go of what it sent a moment after the call has
        returned, sooner or later as the machine is busy. What runs next waits for that, so that a
        step takes the same bytes each time; not for long, since a caller may keep what it sent.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        #: What the last collective has sent.
        self._sent: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._await_collective()
        given = _storages((args, kwargs))
        if func.namespace in _COLLECTIVES:
            self._sent = [weakref.ref(storage) for storage in given[1:]]  # the first receives
        known = {id(storage) for storage in given}
        output = func(*args, **(kwargs or {}))
        for storage in _storages(output):
            # A view, or what was written in place, has the storage of an argument.
            if id(storage) not in known:
                known.add(id(storage))
                self._add(storage)
        return output

    def _await_collective(self) -> None:
        """See NOTE [Buffers of collectives]."""
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while any(storage() is not None for storage in self._sent):
            if time.monotonic() > deadline:
                break
            time.sleep(1e-4)
        self._sent = []

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.check(size)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def check(self, size: int) -> None:
        """Told of a storage of `size` bytes before it counts; a limit raises here."""

    def _freed(self, size: int) -> None:
        self.now -= size


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Storages of all ordinary tensors; Python keeps one object for each as long as it lives."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [tensor.untyped_storage() for tensor in tensors if _has_storage(tensor)]


def _has_storage(tensor: Any) -> bool:
    return tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)

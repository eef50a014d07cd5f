"""Peak bytes of what runs without a backward pass, above what was there before.

On CUDA the allocator knows. On a CPU nobody counts: every operation is watched, and storages that
it makes count from then on until they are freed.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

__all__ = ["peak_bytes"]


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
        with _LiveStorages() as live:
            yield lambda: live.peak
    finally:
        if collects:
            gc.enable()


class _LiveStorages(TorchDispatchMode):
    """Adds up the storages that operations make, and takes off those that are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {id(storage) for storage in _storages((args, kwargs))}
        output = func(*args, **(kwargs or {}))
        for storage in _storages(output):
            # A view, or what was written in place, has the storage of an argument.
            if id(storage) not in known:
                known.add(id(storage))
                self._add(storage)
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Storages of all ordinary tensors; Python keeps one object for each as long as it lives."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [tensor.untyped_storage() for tensor in tensors if _has_storage(tensor)]


def _has_storage(tensor: Any) -> bool:
    return tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)

"""How many bytes a micro-batch of training holds, measured beside the prediction.

On CUDA the allocator knows. On a CPU there is no such count: the bytes of distinct storages that
are saved for backward are added up, once per shape of micro-batch, since hooks on saved tensors
cost time and bytes depend on nothing else.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class MemoryMeter:
    """Peak bytes of micro-batches on one rank.

    Args:
        module: the model; its parameters and buffers do not count as saved.
        blocks: the repeated blocks, whose inputs are kept where they are recomputed.
        device: of this rank.
        fixed_bytes: parameters, gradients, optimizer state and buffers, added on a CPU.
    """

    def __init__(
        self, module: nn.Module, blocks: Sequence[nn.Module], device: torch.device, fixed_bytes: int
    ) -> None:
        self._module = module
        self._blocks = blocks
        self._device = device
        self._fixed_bytes = fixed_bytes
        self._known: dict[Hashable, int] = {}
        self._peak = 0

    def start_iteration(self) -> None:
        """Forget the peak of the former iteration."""
        self._peak = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes held since `start_iteration`; 0 where nothing ran."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return self._peak

    @contextmanager
    def forward(self, shape: Hashable, recompute_blocks: int, sp_size: int = 1) -> Iterator[None]:
        """Around the forward pass of one micro-batch.

        Args:
            shape: all that the bytes depend on; a shape that was seen before is not measured again.
            recompute_blocks: number of blocks of which only the input is kept.
            sp_size: ranks that share the sequence, of which the first block takes its part.
        """
        if self._device.type == "cuda":
            yield
            return
        if shape not in self._known:
            saved: dict[int, int] = {}
            with _collect(saved, self._blocks[:recompute_blocks], sp_size):
                yield
            constant = _storages([*self._module.parameters(), *self._module.buffers()])
            self._known[shape] = sum(n for at, n in saved.items() if at not in constant)
        else:
            yield
        self._peak = max(self._peak, self._fixed_bytes + self._known[shape])


@contextmanager
def _collect(
    saved: dict[int, int], recomputed: Sequence[nn.Module], sp_size: int
) -> Iterator[None]:
    """Collect address and size of every storage that is kept for the backward pass."""
    given: list[weakref.ref[torch.UntypedStorage]] = []
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.update(_storages([tensor]))
        # Not the tensor itself: an operation that saves its own output would hold it in a cycle.
        return tensor.detach()

    def keep_input(_: nn.Module, args: object, kwargs: object) -> None:
        # A checkpoint holds its arguments in a closure, out of sight of the hooks on saved tensors:
        # the hidden states, and what all blocks share, such as a mask.
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if sp_size == 1:
            saved.update(_storages(tensors))
            return
        # Where they are whole, it holds this rank's part of them, and they themselves may be gone.
        for storage in (t.untyped_storage() for t in tensors if t.layout == torch.strided):
            given.append(weakref.ref(storage))
            sizes.append(storage.nbytes())

    handles = [b.register_forward_pre_hook(keep_input, with_kwargs=True) for b in recomputed]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        parts: dict[int, int] = {}
        for reference, size in zip(given, sizes, strict=True):
            storage = reference()
            if storage is None:
                parts[id(reference)] = -(-size // sp_size)
            elif size > 0:
                saved[storage.data_ptr()] = size
        # Of each only once, under keys that are no addresses.
        saved.update({-1 - place: size for place, size in enumerate(parts.values())})
    finally:
        for handle in handles:
            handle.remove()


def _storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    storages = (t.untyped_storage() for t in tensors if t.layout == torch.strided)
    return {s.data_ptr(): s.nbytes() for s in storages if s.nbytes() > 0}

"""Which module is the first to compute something else when the sequence is sharded?

Two forward passes are compared call by call: one of the whole sequence, whose inputs and outputs of
every module are kept on the host, and one of a rank's share, compared as it runs. A module's input
counts as well: where it differs, though all modules before agreed, the code between them is to
blame, which is the caller's.

A tensor of the sharded pass is either whole, as outside of the blocks, or a rank's share: then it
is compared with the rows that the share's tokens have in the whole one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_dcp.parallel.region import ShardedPass, active

__all__ = ["Difference", "first_difference", "relative_difference"]

#: Host memory for the tensors of the whole pass; modules that run later are not looked at.
_MAX_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference between two passes.

    Attributes:
        order: Place of the call in the whole pass; the smallest of all ranks' is the first.
        module: Dotted path of the module to blame; empty for the outermost.
        type_name: Its class.
        what: What of it differs, for a message.
        error: Largest difference, relative to the largest value; infinite where shapes tell.
    """

    order: int
    module: str
    type_name: str
    what: str
    error: float


@dataclass(frozen=True)
class _Call:
    """One input or output of one call of a module."""

    key: tuple[str, str, int]
    caller: str


@dataclass
class _Recorder:
    """Tensors of the whole pass, in the order in which they came about."""

    calls: dict[tuple[str, str, int], tuple[int, list[Tensor]]] = field(default_factory=dict)
    num_bytes: int = 0

    def __call__(self, call: _Call, tensors: list[Tensor]) -> None:
        self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        if self.num_bytes <= _MAX_BYTES:
            kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
            self.calls[call.key] = (len(self.calls), kept)


@dataclass
class _Comparer:
    """Compares the sharded pass with what was recorded, until something differs."""

    module: nn.Module
    recorded: _Recorder
    tolerance: float
    shard: ShardedPass | None = None
    found: Difference | None = None

    def __call__(self, call: _Call, tensors: list[Tensor]) -> None:
        region = active()
        if region is not None and region.open is not None:
            self.shard = region.open
        if self.found is not None or call.key not in self.recorded.calls:
            return
        order, expected = self.recorded.calls[call.key]
        if len(expected) != len(tensors):
            return
        for tensor, whole in zip(tensors, expected, strict=True):
            error = _share_difference(tensor, whole, self.shard)
            if error is not None and not error <= self.tolerance:
                self.found = self._difference(call, order, error, tensor, whole)
                return

    def _difference(
        self, call: _Call, order: int, error: float, tensor: Tensor, whole: Tensor
    ) -> Difference:
        path, kind, _ = call.key
        blamed = path if kind == "output" else call.caller
        what = "its output" if kind == "output" else f"what it gives to `{path}`"
        if error == float("inf"):
            what += f", of shape {tuple(tensor.shape)} instead of {tuple(whole.shape)},"
        return Difference(
            order=order,
            module=blamed,
            type_name=type(self.module.get_submodule(blamed)).__name__,
            what=what,
            error=error,
        )


def first_difference(
    module: nn.Module,
    run_whole: Callable[[], None],
    run_sharded: Callable[[], None],
    tolerance: float,
) -> Difference | None:
    """Run both passes; the first difference of this rank's, or ``None`` if none was found.

    Args:
        module: The whole model.
        run_whole: Its forward pass on the whole sequence.
        run_sharded: The same with the blocks sharded; holds collectives of the SP group.
        tolerance: What rounding explains, relative.
    """
    recorder = _Recorder()
    with _watched(module, recorder):
        run_whole()
    comparer = _Comparer(module, recorder, tolerance)
    with _watched(module, comparer):
        run_sharded()
    return comparer.found


@contextmanager
def _watched(module: nn.Module, take: Callable[[_Call, list[Tensor]], None]) -> Iterator[None]:
    """Hand inputs and outputs of every module's calls to ``take``."""
    open_calls: list[str] = []
    counts: Counter[tuple[str, str]] = Counter()

    def watch(path: str, kind: str, value: object) -> None:
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        occurrence = counts[path, kind]
        counts[path, kind] += 1
        caller = open_calls[-1] if open_calls else ""
        take(_Call((path, kind, occurrence), caller), tensors)

    def before(path: str, args: Any, kwargs: Any) -> None:
        watch(path, "input", (args, kwargs))
        open_calls.append(path)

    def after(path: str, output: Any) -> None:
        if open_calls and open_calls[-1] == path:
            open_calls.pop()
        watch(path, "output", output)

    with ExitStack() as stack:
        for path, part in module.named_modules():
            handles = (
                part.register_forward_pre_hook(
                    lambda _, args, kwargs, path=path: before(path, args, kwargs),
                    with_kwargs=True,
                ),
                part.register_forward_hook(lambda _, __, output, path=path: after(path, output)),
            )
            for handle in handles:
                stack.callback(handle.remove)
        yield


def _share_difference(tensor: Tensor, whole: Tensor, shard: ShardedPass | None) -> float | None:
    """Relative difference from the rows of ``whole`` that ``tensor`` stands for.

    ``None`` where it cannot be told which these are, infinity where it has none: both a tensor's
    dimensions are of a share, so that tokens of other ranks have no part in it.
    """
    found = tensor.detach().to("cpu")
    if found.shape == whole.shape:
        return relative_difference(found, whole)
    if shard is None or found.dim() != whole.dim():
        return None
    unequal = [d for d in range(whole.dim()) if found.shape[d] != whole.shape[d]]
    axes = [
        (d, length, local)
        for d in unequal
        for length, local in shard.axes.items()
        if whole.shape[d] % length == 0
        and found.shape[d] % local == 0
        and whole.shape[d] // length == found.shape[d] // local
    ]
    if len(unequal) == 2 and {d for d, _, _ in axes} == set(unequal):
        return float("inf")
    if len(unequal) != 1 or not axes:
        return None
    dim, length, local = axes[0]
    along = replace(shard, length=length, local_length=local)
    positions = along.positions(torch.device("cpu"))
    inside = positions < length
    many = whole.shape[dim] // length
    if many == length:
        return None
    errors = []
    # Tokens of several samples in one dimension: of one after the other, or of all for each place.
    for order in ((many, length), (length, many)):
        at = dim + order.index(length)
        local_order = (many, local) if order[1] == length else (local, many)
        rows = _unflattened(found, dim, local_order).index_select(at, inside.nonzero().flatten())
        expected = _unflattened(whole, dim, order).index_select(at, positions[inside])
        errors.append(relative_difference(rows, expected))
        if many == 1:
            break
    return min(errors)


def _unflattened(tensor: Tensor, dim: int, sizes: tuple[int, int]) -> Tensor:
    return tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value; 0 of empty tensors."""
    if expected.numel() == 0:
        return 0.0
    wanted, got = _finite(expected), _finite(found)
    scale = float(wanted.abs().max())
    difference = float((got - wanted).abs().max())
    return difference / scale if scale else difference


def _finite(tensor: Tensor) -> Tensor:
    """In float64; padded positions may well be NaN, and masks are infinite."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return torch.nan_to_num(tensor.double(), nan=0.0, posinf=0.0, neginf=0.0)

"""Logits that are made only if somebody looks at them.

Returned by an output layer in place of logits, they turn ``F.cross_entropy`` into one that computes
the logits tile by tile from hidden states and weight. Functions of single logits (soft-capping,
scaling, a wider type) and other shapes of the tokens are kept for later; anything else makes the
logits after all, so that a result is never wrong.

Shape legend:
    D  width    V  words
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_dcp.parallel.loss import Transform, layer_dtype, tiled_cross_entropy

__all__ = ["DeferredLogits", "deferring"]

_FACTS: tuple[Any, ...] = (
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
)
_TANH: tuple[Any, ...] = (torch.tanh, Tensor.tanh)
_FLOAT: tuple[Any, ...] = (Tensor.float,)
_DIV: tuple[Any, ...] = (torch.div, Tensor.div, Tensor.__truediv__)
_MUL: tuple[Any, ...] = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)


class DeferredLogits(Tensor):
    """``F.linear(hidden, weight, bias)`` with some functions of single values to follow.

    Attributes:
        hidden: (..., D).
        weight: (V, D).
        bias: (V,) or None.
        transforms: what follows.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    transforms: tuple[Transform, ...]

    @staticmethod
    def make(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transforms: tuple[Transform, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> DeferredLogits:
        """Deferred logits of a linear layer."""
        new: DeferredLogits = Tensor._make_wrapper_subclass(
            DeferredLogits,
            (*hidden.shape[:-1], weight.shape[0]),
            dtype=layer_dtype(hidden) if dtype is None else dtype,
            device=hidden.device,
        )
        with torch._C.DisableTorchFunctionSubclass():
            new.hidden, new.weight, new.bias, new.transforms = hidden, weight, bias, transforms
        return new

    def materialized(self) -> Tensor:
        """The logits, with their graph."""
        with torch._C.DisableTorchFunctionSubclass():
            logits = F.linear(self.hidden, self.weight, self.bias)
            for transform in self.transforms:
                logits = transform(logits)
        return logits

    def _then(self, transform: Transform, dtype: torch.dtype) -> DeferredLogits:
        return DeferredLogits.make(
            self.hidden, self.weight, self.bias, (*self.transforms, transform), dtype
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FACTS:
                return func(*args, **(kwargs or {}))
            if args and isinstance(args[0], DeferredLogits) and not kwargs:
                deferred = _deferred(func, args[0], args[1:])
                deferred = _reshaped(func, *args) if deferred is None else deferred
                if deferred is not None:
                    return deferred
            if func is F.cross_entropy:
                loss = _cross_entropy(*args, **(kwargs or {}))
                if loss is not None:
                    return loss
        made_args, made_kwargs = tree_map(_made, (args, dict(kwargs or {})))
        return func(*made_args, **made_kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Past autograd, where gradients would be lost without a word.
        raise RuntimeError(
            f"{func} was called on logits that are made tile by tile, around torch's functions. Set"
            " tiled_loss=False"
        )


def deferring(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A forward for an output layer that puts its logits off."""

    def forward(hidden: Tensor) -> Tensor:
        return DeferredLogits.make(hidden, layer.weight, layer.bias)

    return forward


def _made(value: Any) -> Any:
    return value.materialized() if isinstance(value, DeferredLogits) else value


def _deferred(func: Any, logits: DeferredLogits, rest: tuple[Any, ...]) -> DeferredLogits | None:
    dtype = logits.dtype
    if func in _TANH and not rest:
        return logits._then(torch.tanh, dtype)
    if func in _FLOAT and not rest:
        return logits._then(lambda x: x.float(), torch.float32)
    if len(rest) == 1 and isinstance(rest[0], int | float):
        number = rest[0]
        if func in _DIV:
            return logits._then(lambda x: x / number, dtype)
        if func in _MUL:
            return logits._then(lambda x: x * number, dtype)
    return None


def _reshaped(func: Any, logits: DeferredLogits, *rest: Any) -> DeferredLogits | None:
    """The same with tokens chosen or arranged anew, and words where they are; None: not that."""
    hidden, num_words = logits.hidden, logits.weight.shape[0]
    if func is Tensor.contiguous and not rest:
        return logits
    if func in (Tensor.view, Tensor.reshape, torch.reshape):
        shape = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple | list) else rest
        if not all(isinstance(size, int) for size in shape) or shape[-1:] != type(shape)(
            [num_words]
        ):
            return None
        hidden = hidden.reshape(*shape[:-1], hidden.shape[-1])
    elif func is Tensor.flatten and rest == (0, hidden.dim() - 2):
        hidden = hidden.flatten(0, -2)
    elif func is Tensor.__getitem__ and isinstance(rest[0], tuple):
        index = rest[0]
        if len(index) not in (2, hidden.dim()) or index[-1] != slice(None):
            return None
        if not all(isinstance(i, slice) or i is Ellipsis for i in index):
            return None
        if Ellipsis not in index and len(index) < hidden.dim():
            return None
        hidden = hidden[index]
    else:
        return None
    return DeferredLogits.make(hidden, logits.weight, logits.bias, logits.transforms, logits.dtype)


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """``F.cross_entropy`` of (T, V) deferred logits and (T,) labels; None: of something else."""
    if not isinstance(input, DeferredLogits) or isinstance(target, DeferredLogits):
        return None
    usual = weight is None and size_average is None and reduce is None
    if not usual or input.hidden.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return None
    return tiled_cross_entropy(
        input.hidden,
        input.weight,
        target,
        bias=input.bias,
        transforms=input.transforms,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )

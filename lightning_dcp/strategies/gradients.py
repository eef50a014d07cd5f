"""What is done to the gradients of all parameters at once: reach every one, scale every one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class _Zero(torch.autograd.Function):
    """() zero whose gradient is zeros for every input, also where one is infinite or NaN."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.parameters = [(p.shape, p.dtype, p.device) for p in parameters]
        return torch.zeros((), dtype=torch.float32, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device)
            for shape, dtype, device in ctx.parameters
        )


def zero_for(parameters: Iterable[Tensor]) -> Tensor:
    """() 0, with a graph that gives each of `parameters` (at least one) a gradient of zeros.

    Its backward pass reaches each of them without changing anything.
    """
    zero: Tensor = _Zero.apply(*parameters)  # type: ignore[no-untyped-call]
    return zero


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Calls of `module` run `forward` in here, inside the hooks and wrappers around it."""
    attributes = vars(module)
    shadowed = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if shadowed is None:
            del attributes["forward"]
        else:
            attributes["forward"] = shadowed


def scale(gradients: Iterable[Tensor | None], factor: float) -> None:
    """Multiply those of `gradients` that exist by `factor`, in place."""
    existing = [g for g in gradients if g is not None]
    if existing:
        torch._foreach_mul_(existing, factor)

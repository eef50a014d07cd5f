"""What is done to the gradients of all parameters at once: reach every one, scale every one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
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
def forward_replaced(
    module: nn.Module, forward: Callable[..., Any], hooks: Container[int] | None = ()
) -> Iterator[None]:
    """Calls of `module` run `forward` in here, inside the wrappers around it.

    Args:
        module: on which the user may have put hooks, that expect what the user's forward is given.
        forward: runs in place of the module's own.
        hooks: ids of those forward hooks that run all the same; None for all.
    """
    attributes = vars(module)
    shadowed = attributes.get("forward")
    attributes["forward"] = forward
    names = ("_forward_pre_hooks", "_forward_hooks")
    before = {} if hooks is None else {name: attributes[name] for name in names}
    for name, all_hooks in before.items():
        kept = ((id_, hook) for id_, hook in all_hooks.items() if hooks and id_ in hooks)
        attributes[name] = OrderedDict(kept)
    try:
        yield
    finally:
        attributes.update(before)
        if shadowed is None:
            del attributes["forward"]
        else:
            attributes["forward"] = shadowed


def used_nowhere(without_gradient: Sequence[bool], device: torch.device) -> list[int]:
    """Indices of parameters that have a gradient on no rank; a collective.

    Args:
        without_gradient: of each parameter on this rank.
        device: of the process group's tensors.
    """
    unused = torch.tensor(list(without_gradient), dtype=torch.int32, device=device)
    if dist.is_initialized():
        dist.all_reduce(unused, dist.ReduceOp.MIN)
    return [int(index) for index in unused.nonzero().flatten()]


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all elements; of a sharded tensor those of the whole."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def scale(gradients: Iterable[Tensor | None], factor: float) -> None:
    """Multiply those of `gradients` that exist by `factor`, in place."""
    existing = [g for g in gradients if g is not None]
    if existing:
        torch._foreach_mul_(existing, factor)

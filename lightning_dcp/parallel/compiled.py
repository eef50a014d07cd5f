"""Blocks that the user compiled in place, by ``block.compile()``.

The compiled call is that of the whole module and would have our wrapper of ``forward`` in it, which
must not be traced while it shards or recomputes. So the wrapper is left out of the compilation, and
what it calls is compiled by itself, with the same options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["compiled_forward", "is_compiled"]


def is_compiled(block: nn.Module) -> bool:
    """Whether ``block.compile()`` was called; ``torch.compile(block)`` makes another module."""
    return block._compiled_call_impl is not None


def compiled_forward(block: nn.Module) -> Callable[..., Any]:
    """The block's ``forward``, compiled as the block is; as it is where torch does not tell how."""
    call: Any = block._compiled_call_impl
    names = getattr(getattr(call, "__code__", None), "co_freevars", ())
    # What `torch.compile(...)` makes: it compiles any function with the options it was given.
    cells = dict(zip(names, getattr(call, "__closure__", None) or (), strict=False))
    context = cells["self"].cell_contents if "self" in cells else None
    forward: Callable[..., Any] = block.forward
    if not callable(context):
        return forward
    compiled: Callable[..., Any] = context(forward)
    return compiled

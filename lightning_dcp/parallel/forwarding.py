"""Standing in for a block's ``forward``, and running it again in the backward."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lightning_dcp.parallel import rng
from lightning_dcp.parallel.interception import AttentionMode
from lightning_dcp.parallel.region import Region, ShardedPass, active

__all__ = ["BlockForward", "Replay", "ShardedReplay", "WholeReplay", "checkpointed"]


class Replay(AbstractContextManager[None]):
    """Context of a recomputation: ``random`` and numpy as when this was made, then back.

    torch's checkpoint replays torch's own random numbers only.
    """

    def __init__(self) -> None:
        self._state = rng.host_state()
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.callback(rng.restore_host, rng.host_state())
        rng.restore_host(self._state)
        state = active()
        if state is not None and state.segments is not None:
            self._stack.enter_context(AttentionMode())

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()


class ShardedReplay(Replay):
    """The same inside the pass that is repeated, with an attention mode for autograd's thread."""

    def __init__(self, region: Region, shard: ShardedPass) -> None:
        super().__init__()
        self._region, self._shard = region, shard

    def __enter__(self) -> None:
        super().__enter__()
        self._stack.enter_context(self._region.inside(self._shard))
        self._stack.enter_context(AttentionMode())


class WholeReplay(Replay):
    """The same on whole sequences in a micro-batch that shards other stacks."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region

    def __enter__(self) -> None:
        super().__enter__()
        self._stack.enter_context(self._region.whole())


def checkpointed(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], replay: Replay
) -> Any:
    """``forward(*args, **kwargs)``, keeping only its arguments for the backward.

    Tensors are passed one by one, so that checkpoint saves them like any operation does (version
    checks, and hooks that count or offload saved tensors).
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def again(*leaves: Any) -> Any:
        new_args, new_kwargs = pytree.tree_unflatten(list(leaves), spec)
        return forward(*new_args, **new_kwargs)

    return checkpoint(
        again, *leaves, use_reentrant=False, context_fn=lambda: (nullcontext(), replay)
    )


class _Runner(Protocol):
    def run_block(
        self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do what block ``index`` is to do now; ``forward`` is its own."""


class BlockForward:
    """An attribute of a block that hides its ``forward`` and hands calls to ``runner``.

    A deep copy of the module (an average of weights, say) gets the plain method back.
    """

    def __init__(self, runner: _Runner, index: int, block: nn.Module) -> None:
        self._runner, self._index, self._block = runner, index, block
        self._had_own = "forward" in vars(block)
        self._original: Callable[..., Any] = block.forward
        self.__wrapped__ = self._original  # where inspect.signature looks
        block.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called as the block's ``forward``."""
        return self._runner.run_block(self._index, self._original, args, kwargs)

    def remove(self) -> None:
        """Give the block its own ``forward`` back."""
        if self._had_own:
            self._block.forward = self._original
        else:
            del self._block.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._block))
        if self._had_own or copied is None:
            return copy.deepcopy(self._original, memo)
        return types.MethodType(type(self._block).forward, copied)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self._block).__name__} is attached to a BlockRuntime and cannot be pickled: "
            f"detach() it first, or save its state_dict"
        )

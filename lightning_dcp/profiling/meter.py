"""Being told of every call of a block, innermost.

NOTE (meters lie innermost): the runtime's wrapper of ``forward`` slices the first block's input and
gathers the last block's output. Both belong to the rest of the step. So a meter wraps ``forward``
*below* that wrapper, and sees what the block itself gets and gives; what attention exchanges inside
is the block's own. Module hooks would lie outside of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn


class Listener(Protocol):
    """Who is told; see :class:`.StepProbe`."""

    def before(self, index: int, arguments: object) -> Any:
        """A block begins; what is returned here is handed to ``after``."""

    def after(self, call: Any, output: object) -> None:
        """The block ends."""


class Meter:
    """Stands in for a block's ``forward``; without a listener it only passes calls on."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._listener: Listener | None = None
        self._index = 0
        self._had_own = "forward" in vars(block)
        self._forward: Callable[..., Any] = block.forward
        self.__wrapped__ = self._forward  # inspect.signature looks here
        block.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward."""
        if self._listener is None:
            return self._forward(*args, **kwargs)
        call = self._listener.before(self._index, (args, kwargs))
        output = self._forward(*args, **kwargs)
        self._listener.after(call, output)
        return output

    @contextmanager
    def reporting_to(self, listener: Listener, index: int) -> Iterator[None]:
        """Tell ``listener`` of all calls, as those of block ``index``."""
        self._listener, self._index = listener, index
        try:
            yield
        finally:
            self._listener = None

    def remove(self) -> None:
        """Give the block its ``forward`` back."""
        if self._had_own:
            self.block.forward = self._forward
        else:
            del self.block.forward


@contextmanager
def metered(blocks: Iterable[nn.Module]) -> Iterator[tuple[Meter, ...]]:
    """Put meters on blocks that no runtime is attached to yet; it is to be attached inside."""
    meters: list[Meter] = []
    try:
        for block in blocks:
            meters.append(Meter(block))
        yield tuple(meters)
    finally:
        for meter in reversed(meters):
            meter.remove()

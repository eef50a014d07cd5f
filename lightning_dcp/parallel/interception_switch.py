"""Whether attention calls of this thread are intercepted: not where they are our own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["is_intercepting", "no_interception"]

_thread = threading.local()


@contextmanager
def no_interception() -> Iterator[None]:
    """Attention calls of this thread go straight to the kernel."""
    outer = is_intercepting()
    _thread.off = True
    try:
        yield
    finally:
        _thread.off = not outer


def is_intercepting() -> bool:
    """Whether this thread is outside ``no_interception``."""
    return not getattr(_thread, "off", False)

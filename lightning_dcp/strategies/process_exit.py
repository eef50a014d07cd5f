"""Ending the process groups before the interpreter ends, and a process that has failed for sure.

gloo runs collectives in threads of its own. A thread that needs Python's lock (to let go of a
tensor of the last collective, say) while the interpreter ends is ended inside C++, and the process
aborts after a training that went well: "terminate called without an active exception". Seen once in
some hundred runs on a loaded machine. Lightning destroys NCCL's groups at exit and leaves gloo's.
"""

from __future__ import annotations

import atexit
import functools
import signal
import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from lightning_dcp.strategies.watch.ending import end_children
from lightning_dcp.strategies.watch.peers import Peer

__all__ = ["after_a_failure", "destroy_groups_at_exit"]

#: After an error other ranks may never join what is pending here: the process ends all the same.
_PATIENCE_S = 3.0
#: Seconds from the begin of the exit to the end of a process that has failed.
_LAST_S = 30


@functools.cache
def destroy_groups_at_exit() -> None:
    """Destroy whatever process groups exist when the process exits. Twice is once."""
    atexit.register(_destroy)


def _destroy() -> None:
    if dist.is_available() and dist.is_initialized():
        thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)


class _Failed:
    """The failure of the last run, as far as it concerns the exit of this process."""

    #: Ranks that this process started; None where the last run has not failed.
    children: tuple[Peer, ...] | None = None

    @classmethod
    @functools.cache
    def register(cls) -> None:
        atexit.register(cls.end)
        show = sys.excepthook

        def show_and_end(*exception: Any) -> None:
            show(*exception)
            if cls.children is not None:
                # Exit handlers run only when all threads have ended.
                cls.limit_time()

        sys.excepthook = show_and_end

    @classmethod
    def end(cls) -> None:
        if cls.children is not None:
            cls.limit_time()
            end_children(cls.children)

    @staticmethod
    def limit_time() -> None:
        """Destructors of groups wait for ranks that are gone, where Python no longer runs."""
        if hasattr(signal, "alarm"):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_LAST_S)


def after_a_failure(children: Iterable[Peer] | None) -> None:
    """When the process exits, see to it that it does end, and the ranks it started, too.

    Args:
        children: ranks that this process started; None once a new run has begun.
    """
    _Failed.register()
    _Failed.children = None if children is None else tuple(children)

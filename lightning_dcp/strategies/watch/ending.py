"""Ending this process where its main thread cannot end it any more."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable

from lightning_dcp.strategies.watch.peers import Peer

__all__ = ["end_children", "end_process", "tell"]

#: Ranks that this process started end by themselves within their own grace; after this, by force.
_CHILDREN_S = 12.0


def tell(rank: int, text: str) -> None:
    """Write to stderr, on every rank, whatever the logging is set to."""
    try:
        sys.stderr.write(f"[rank {rank}] DCP: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # closed, or nobody reads it any more
        return


def end_process(rank: int, reason: str, children: Iterable[Peer]) -> None:
    """End the process from another thread: exit code 1, no destructors, no exit handlers.

    Destructors of process groups may wait for a rank that is gone.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else "unknown\n"
    tell(rank, f"{reason} Python stack of its main thread:\n{stack.rstrip()}")
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    for worker in multiprocessing.active_children():  # of data loaders
        worker.kill()
    end_children(children)
    os._exit(1)


def end_children(children: Iterable[Peer]) -> None:
    """Wait for the processes of ranks that this one started, and kill those that do not end."""
    deadline_s = time.monotonic() + _CHILDREN_S
    for child in children:
        while not child.has_ended() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if not child.has_ended():
            child.kill()

"""Short notes from rank to rank that need nobody else's help: no collective, no waiting.

They go through the store by which `torch.distributed` found its ranks, over a connection of their
own: the main thread may wait for hours on the usual one, in the middle of a collective. The store
lives in one process (rank 0, or torchrun's agent). If that process is stopped, a call on it does
not return; if it has ended, a call raises. Neither may happen to who asks here, so that calls run
in a thread, and are given up after a while.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["Board"]

T = TypeVar("T")
#: Where stores are; its stubs leave out most of what is used here.
c10d: Any = dist.distributed_c10d


def _own_connection() -> Any:
    """Another client of the store behind the default process group.

    Private names of torch, all of them here. There is no public way to reach that store, and a
    store made anew would need an address that all ranks know and may listen on. Any user of the
    same client waits while it waits for a key, hence another client.
    """
    store = c10d._get_default_store()
    if hasattr(store, "clone"):
        return store.clone()
    while hasattr(store, "underlying_store"):  # torch < 2.7
        store = store.underlying_store
    if isinstance(store, c10d.TCPStore):
        return c10d.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    return store


class Board:
    """Keys and values that all ranks see; every call returns within `timeout_s`, and none raises.

    With one rank, or without process groups, it is this process's alone.

    Args:
        prefix: of all keys; the same on all ranks, and another one for each use.
        timeout_s: Seconds after which a call that the store does not answer is given up.
    """

    def __init__(self, prefix: str, *, timeout_s: float = 5.0) -> None:
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._store: Any | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        #: When the call that is being run began; None while nothing is.
        self._since_s: float | None = None
        self._closed = False
        #: Why the store cannot be reached any more, for good; None while nothing is wrong.
        self.broken: str | None = None

    @property
    def silent_s(self) -> float:
        """For how many seconds the store has not answered; 0 where nothing was asked of it."""
        since_s = self._since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    @property
    def trouble(self) -> str | None:
        """What is wrong with the store, in words; None while it answers."""
        if self.broken is None and self.silent_s > self._timeout_s:
            return f"the store of torch.distributed has not answered for {self.silent_s:.0f} s"
        return self.broken

    def post(self, key: str, value: str) -> bool:
        """Write a value over whatever was there; False where the store does not answer."""
        return self._ask(lambda store: (store.set(key, value), True)[1], False)

    def post_once(self, key: str, value: str) -> str | None:
        """Write a value unless there is one; what stands there now, None without an answer."""
        return self._ask(lambda store: str(store.compare_set(key, "", value), "utf-8"), None)

    def add(self, key: str, amount: int) -> int | None:
        """Add to a number that begins at 0; the sum, None without an answer."""
        return self._ask(lambda store: int(store.add(key, amount)), None)

    def read(self, key: str) -> str | None:
        """The value of `key`; None where there is none yet, or the store does not answer."""

        def read(store: Any) -> str | None:
            # `get` waits for a key that is not there.
            return store.get(key).decode() if store.check([key]) else None

        return self._ask(read, None)

    def read_all(self, keys: list[str]) -> list[str] | None:
        """The values of keys in one round trip; None unless all of them are there."""

        def read(store: Any) -> list[str] | None:
            return [v.decode() for v in store.multi_get(keys)] if store.check(keys) else None

        return self._ask(read, None)

    def give_up(self, reason: str) -> None:
        """Ask the store nothing any more."""
        self.broken = self.broken or reason

    def close(self) -> None:
        """End the thread and the connection; further calls find nothing. Safe to call twice."""
        self._closed = True
        self._calls.put(None)

    def _ask(self, call: Callable[[Any], T], otherwise: T) -> T:
        if self._closed or self.trouble is not None:
            return otherwise
        answers: list[T] = []
        answered = threading.Event()

        def run() -> None:
            try:
                if self._store is None:
                    self._store = self._connect()
                answers.append(call(self._store))
            except Exception as error:  # noqa: BLE001 - a lost connection has no type of its own
                first_line = str(error).partition("\n")[0]
                self.broken = f"the store of torch.distributed is gone ({first_line})"
            finally:
                answered.set()

        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, daemon=True, name="lightning-dcp-board"
                )
                self._thread.start()
        self._calls.put(run)
        answered.wait(self._timeout_s)
        return answers[0] if answers else otherwise

    def _connect(self) -> Any:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return c10d.HashStore()
        return c10d.PrefixStore(f"lightning_dcp/{self._prefix}", _own_connection())

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            if self.broken is not None:
                continue
            self._since_s = time.monotonic()
            call()
            self._since_s = None
        self._store = None

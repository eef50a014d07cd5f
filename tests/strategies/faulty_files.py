"""Operations on files, counted, so that a test can have each of them be the last one, or fail."""

from __future__ import annotations

import io
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

#: Of `os`, by what the package and the libraries it saves with call.
_NAMES = ("open", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "close")
_WRITING = ("open", "fsync", "replace", "rename", "mkdir", "write")


class Operations:
    """Counts operations, and calls `act` before one, or in the middle of it where it is a write."""

    def __init__(self, at: int | None, act: Callable[[], None], only: tuple[str, ...] = ()) -> None:
        self.at, self.act, self.only = at, act, only
        self.names: list[str] = []

    def count(self, name: str) -> bool:
        """Whether this is the one."""
        if self.only and name not in self.only:
            return False
        self.names.append(name)
        return len(self.names) - 1 == self.at

    def __call__(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.count(name):
                self.act()
            return work(*args, **kwargs)

        return call


class _File:
    """A file that is open for writing."""

    def __init__(self, file: Any, operations: Operations) -> None:
        self._file, self._operations = file, operations

    def write(self, data: Any) -> int:
        if self._operations.count("write"):
            part = data if isinstance(data, str) else memoryview(data).cast("B")
            self._file.write(part[: len(part) // 2])
            self._file.flush()
            self._operations.act()
        written: int = self._file.write(data)
        return written

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def watched(operations: Operations) -> Iterator[None]:
    """In here every operation on files is counted."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _NAMES:
            patch.setattr(os, name, operations(name, getattr(os, name)))
        opened = operations("open", io.open)

        def open_(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if "w" not in mode:
                return io_open(path, mode, *args, **kwargs)
            return _File(opened(path, mode, *args, **kwargs), operations)

        io_open = io.open
        patch.setattr(io, "open", open_)
        patch.setattr("builtins.open", open_)
        yield


def killed_at_each(
    work: Callable[[], Any], prepare: Callable[[], None], num_writes: int = 8
) -> Iterator[str]:
    """Do `work` in processes of their own, each killed in another of its operations.

    Args:
        work: what is killed.
        prepare: called before each, here.
        num_writes: of operations that only write, so many; all of the others.

    Yields:
        After each death the name of the operation that it died in.
    """
    for at, name in _operations_of(work, prepare, num_writes):
        prepare()
        child = os.fork()
        if child == 0:
            try:
                with watched(Operations(at, lambda: os.kill(os.getpid(), signal.SIGKILL))):
                    work()
            except BaseException:  # noqa: BLE001 - the child of a test must not go on with others
                traceback.print_exc()
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        yield name


def failing_at_each(
    work: Callable[[], Any], prepare: Callable[[], None], number: int, num_writes: int = 8
) -> Iterator[OSError | None]:
    """Do `work` again and again, each time with an error in another of its operations.

    Yields:
        The error that came out of it; None where it was overcome.
    """

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    for at, _ in _operations_of(work, prepare, num_writes, _WRITING):
        prepare()
        error: OSError | None = None
        with watched(Operations(at, fail, _WRITING)):
            try:
                work()
            except OSError as raised:
                error = raised
        yield error


def _operations_of(
    work: Callable[[], Any],
    prepare: Callable[[], None],
    num_writes: int,
    only: tuple[str, ...] = (),
) -> list[tuple[int, str]]:
    """(number, name) of each operation; of those that only write, `num_writes` from all over."""
    prepare()
    with watched(every := Operations(None, lambda: None, only)):
        work()
    writes = [at for at, name in enumerate(every.names) if name == "write"]
    kept = {writes[i * len(writes) // num_writes] for i in range(num_writes)} if writes else set()
    return [(at, n) for at, n in enumerate(every.names) if n != "write" or at in kept]

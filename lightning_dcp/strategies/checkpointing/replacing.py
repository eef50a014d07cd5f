"""How a checkpoint takes the place of another: there is always a whole one, whenever we are killed.

What is being written lies beside the place that it will take, under a name that nothing looks for,
and is moved there when it is complete and on disk.

=============================  ====================================================================
name beside `last.ckpt`        what it is
=============================  ====================================================================
``.last.ckpt.abcdef            being written, or left by a process that was killed then; the next
.incomplete``                  save into the same folder removes it
``last.replaced-abcdef.ckpt``  the former `last.ckpt` while a folder is replaced, which no file
                               system does in one step. `ckpt_path="last"` finds it, and so does
                               whoever asks for `last.ckpt` (`existing`)
=============================  ====================================================================

Names have no digits of their own and no `ckpt_`: Lightning takes the digits behind that for the
number of a job that was queued again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import string
import time
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]

__all__ = ["Replacement", "existing", "is_left_over", "remove", "remove_leftovers"]

_SUFFIX = ".incomplete"
_REPLACED = re.compile(r"(?P<stem>.+)\.replaced-[a-z]{6}(?P<suffix>(?:\.[^.]*)?)")
_MAX_NAME = 200
#: Where a file system has no locks, what is older than this is nobody's.
_ABANDONED_S = 24 * 3600.0
#: What a folder may hold that a checkpoint replaces.
_MARKS = ("latest", ".metadata", "meta.pt")


class Replacement:
    """A new file or folder at `path`, which takes the place of `target` when it is complete.

    Without `commit` the target stays as it is, and what was written is removed.

    Args:
        target: file or folder; its parent is made.
        folder: which of both the new one is.
        name: of the new one, where several machines without a common disk write parts of a folder.

    Raises:
        OSError: as when writing; IsADirectoryError if the target is a folder of something else.
    """

    def __init__(self, target: Path, *, folder: bool, name: str | None = None) -> None:
        self.target = target
        _refuse_other_folders(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        _move_back(target)
        remove_leftovers(target.parent)
        self.path, self._descriptor = _create(target, folder, name)

    def commit(self) -> None:
        """Put it in place: all that was written must be on disk. `target` is the new one then."""
        aside: Path | None = None
        # A file takes the place of a file in one step, nothing that of a folder.
        if self.target.is_dir() or (self.path.is_dir() and os.path.lexists(self.target)):
            aside = self.target.with_name(
                f"{self.target.stem}.replaced-{_token()}{self.target.suffix}"
            )
            os.rename(self.target, aside)
        try:
            os.replace(self.path, self.target)
        except BaseException:
            if aside is not None:
                os.rename(aside, self.target)
            raise
        sync_folder(self.target.parent)
        if aside is not None:
            with contextlib.suppress(OSError):  # the new one is in place: the next save removes it
                _delete(aside)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            _erase(self.path)
        finally:
            os.close(self._descriptor)


def existing(target: Path) -> Path:
    """`target`, or what a process that was killed while it replaced a folder has made of it."""
    if os.path.lexists(target):
        return target
    return max(_replaced(target), key=lambda path: path.stat().st_mtime, default=target)


def remove(target: Path) -> None:
    """Remove a checkpoint, so that what is left if we are killed meanwhile is never taken for one.

    Raises:
        OSError: it cannot be removed.
    """
    for path in (target, *_replaced(target)):
        if os.path.lexists(path):
            _delete(path)


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed while they saved have left in a folder."""
    for path in list(folder.iterdir()):
        if is_left_over(path):
            if _abandoned(path):
                _erase(path)
        elif (found := _REPLACED.fullmatch(path.name)) is not None:
            target = path.with_name(found["stem"] + found["suffix"])
            if os.path.lexists(target):
                with contextlib.suppress(OSError):
                    _delete(path)


def is_left_over(path: Path) -> bool:
    """Whether the name is that of something incomplete."""
    return path.name.startswith(".") and path.name.endswith(_SUFFIX)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk, where the system can do so."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# --------------------------------------------------------------------------------------------------


def _incomplete(target: Path) -> Path:
    name = target.name.replace("_", "-")[:_MAX_NAME]
    return target.with_name(f".{name}.{_token()}{_SUFFIX}")


def _token() -> str:
    # Not of the user's generator, which would go on differently then.
    return "".join(random.SystemRandom().choices(string.ascii_lowercase, k=6))


def _create(target: Path, folder: bool, name: str | None) -> tuple[Path, int]:
    """A new path beside the target, and a descriptor that says that its process is alive."""
    while True:
        path = _incomplete(target) if name is None else target.with_name(name)
        if folder:
            path.mkdir()
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except BaseException:
                _erase(path)
                raise
        else:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        if fcntl is not None:
            with contextlib.suppress(OSError):  # no locks on this file system
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Another process may have cleared up between both.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return path, descriptor
        os.close(descriptor)


def _abandoned(path: Path) -> bool:
    """Whether the process that wrote it has ended: the system has taken its lock away then."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except OSError:
        pass
    finally:
        age_s = time.time() - os.fstat(descriptor).st_mtime
        os.close(descriptor)
    return age_s > _ABANDONED_S


def _replaced(target: Path) -> list[Path]:
    """Former versions of a folder, whose replacement was not finished."""
    if not target.parent.is_dir():
        return []
    return [
        path
        for path in target.parent.iterdir()
        if (found := _REPLACED.fullmatch(path.name)) is not None
        and found["stem"] + found["suffix"] == target.name
    ]


def _move_back(target: Path) -> None:
    found = existing(target)
    if found != target:
        os.rename(found, target)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # A folder that is half deleted must not have the name of a checkpoint.
        doomed = _incomplete(path)
        os.rename(path, doomed)
        _erase(doomed)
    else:
        os.unlink(path)


def _erase(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _refuse_other_folders(target: Path) -> None:
    if not target.is_dir() or any((target / mark).exists() for mark in _MARKS):
        return
    if any(target.iterdir()):
        raise IsADirectoryError(
            errno.EISDIR,
            f"The checkpoint path {str(target)!r} is a folder with other files. Give it a name of"
            " its own, such as `last.ckpt`.",
        )

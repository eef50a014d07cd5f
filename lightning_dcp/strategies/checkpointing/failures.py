"""What ranks say when a checkpoint cannot be written: all the same, so that all go on or none."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from lightning_dcp.strategies.agreement import gather_objects
from lightning_dcp.strategies.checkpointing.completeness import local_path

__all__ = ["num_bytes_in", "together"]

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def together(path: Any, work: Callable[[], T], needed_bytes: int | None = None) -> T:
    """Do a part of a save on every rank, and if it fails on one fail on all, with the same error.

    Args:
        path: of the checkpoint, for the error.
        work: may contain collectives if every rank goes through all of them whatever fails.
        needed_bytes: about how many are written, where known.

    Raises:
        OSError: where writing failed, with its `errno`, on every rank.
        Exception: whatever else `work` raised, on its rank; RuntimeError on the others.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as e:  # noqa: BLE001 - whatever it is, the other ranks must hear of it first
        error = e
    cause = None if error is None else _system_error(error)
    told: tuple[int | None, str] | None = None
    if error is not None:
        if cause is None:
            told = (None, f"{type(error).__name__}: {error}")
        else:
            told = (cause.errno or errno.EIO, _explained(cause, path, needed_bytes))
    everyone = gather_objects(told)
    failed = [(rank, each) for rank, each in enumerate(everyone) if each is not None]
    if not failed:
        return result  # type: ignore[return-value]
    if error is not None and cause is None:
        raise error
    # The same on all ranks: the first that the system has refused, else the first of all.
    rank, (number, text) = next((f for f in failed if f[1][0] is not None), failed[0])
    on = "" if len(everyone) == 1 else f" (on rank {rank})"
    if number is None:
        raise RuntimeError(f"The checkpoint {str(path)!r} could not be saved{on}: {text}")
    if "could not be saved (on rank " not in text:
        text = text.replace("could not be saved", f"could not be saved{on}", 1)
    raise OSError(number, text) from error


def num_bytes_in(state: Any) -> int:
    """Of all tensors in nested containers."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, Mapping):
        return sum(map(num_bytes_in, state.values()))
    if isinstance(state, Sequence) and not isinstance(state, (str, bytes)):
        return sum(map(num_bytes_in, state))
    return 0


def _system_error(error: BaseException) -> OSError | None:
    """What the system said, wherever libraries have wrapped it."""
    if isinstance(error, OSError):
        return error
    following = error.__cause__ or error.__context__
    return None if following is None else _system_error(following)


def _explained(error: OSError, path: Any, needed_bytes: int | None) -> str:
    reason = error.strerror or str(error)
    # Says it all: of `Replacement`, or of `together` within the work.
    if error.filename is None and reason.startswith("The checkpoint "):
        return reason
    begin = f"The checkpoint {str(path)!r} could not be saved: {reason}"
    if error.errno in _FULL:
        needed = "" if needed_bytes is None else f", it takes about {_shown(needed_bytes)}"
        free = _free_bytes(path)
        left = "" if free is None else f" and {_shown(free)} are free"
        advice = f"{needed}{left}. Free some space"
    elif error.errno in _FORBIDDEN:
        where = "" if error.filename is None else f" ({str(error.filename)!r})"
        advice = f"{where}. Give the user who runs this the right to write there"
    elif error.errno == errno.EFBIG:
        needed = "" if needed_bytes is None else f", it takes about {_shown(needed_bytes)}"
        advice = f"{needed}. Raise the limit of `ulimit -f`"
    else:
        where = "" if error.filename is None else f" ({str(error.filename)!r})"
        advice = f"{where}. Mend that"
    return (
        f"{begin}{advice}, or save elsewhere (`dirpath` of ModelCheckpoint). What was saved under"
        " this name before is untouched, and so is what is being trained."
    )


def _free_bytes(path: Any) -> int | None:
    folder = local_path(path)
    while folder is not None and not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        return None if folder is None else shutil.disk_usage(folder).free
    except OSError:
        return None


def _shown(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"

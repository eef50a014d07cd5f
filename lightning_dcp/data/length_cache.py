"""Counted lengths kept in the user's cache directory, so that one counted pass is enough.

A file is used only if nothing that the lengths can be seen to depend on has changed
(`fingerprint`), if it is undamaged, and if the lengths of a few samples, read anew, are those in
it. Otherwise lengths are counted again. Two processes that need the same lengths count once: the
second waits for the first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_log = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int64]

_FORMAT = 1
_NUM_PROBES = 32
#: For another process to count, which may take long.
_LOCK_TIMEOUT_S = 600.0


def default_cache_dir() -> Path:
    """Where lengths are kept unless the user says otherwise."""
    from platformdirs import user_cache_path

    return user_cache_path("lightning_dcp", appauthor=False) / "lengths"


def probe_ids(num_samples: int) -> list[int]:
    """Samples read again before cached lengths are believed: both ends and some between."""
    ends = {*range(min(4, num_samples)), *range(max(0, num_samples - 4), num_samples)}
    between = np.random.default_rng(num_samples).integers(0, num_samples, _NUM_PROBES - 8)
    return sorted(ends | {int(i) for i in between})


class LengthCache:
    """Files of lengths, one per fingerprint.

    Args:
        directory: Made when something is stored.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = default_cache_dir() if directory is None else Path(directory)

    def path(self, fingerprint: str) -> Path:
        """The file for a fingerprint."""
        return self.directory / f"{fingerprint[:32]}.lengths"

    @contextmanager
    def locked(self, fingerprint: str) -> Iterator[None]:
        """Keep other processes from counting the same lengths at the same time.

        Where no lock can be had, in a read-only directory for one, there is none: the work is then
        done twice, with the same result. Nor is a process waited for that has stopped: the system
        lets go only of the locks of those that have ended.
        """
        from filelock import FileLock

        lock = FileLock(self.path(fingerprint).with_suffix(".lock"))
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=_LOCK_TIMEOUT_S)
        except (OSError, NotImplementedError) as error:  # too late; no locks on this file system
            _log.warning("Lengths cannot be cached in %s: %s.", self.directory, error)
        try:
            yield
        finally:
            lock.release()

    def load(
        self, fingerprint: str, num_samples: int, length_of: Callable[[int], int]
    ) -> IntArray | None:
        """The stored lengths, or None where there are none that can be trusted.

        Args:
            fingerprint: Of the data set as it is now.
            num_samples: Of the data set as it is now.
            length_of: Reads one sample and returns its length.
        """
        path = self.path(fingerprint)
        try:
            data = path.read_bytes()
        except OSError:
            return None  # none yet, or not readable
        try:
            lengths = _decode(data, fingerprint, num_samples)
        except ValueError as error:
            _log.warning("Cached lengths in %s cannot be used (%s); counting again.", path, error)
            return None
        for sample_id in probe_ids(num_samples):
            length = length_of(sample_id)
            if length != lengths[sample_id]:
                _log.warning(
                    "Cached lengths in %s are out of date: sample %d has %d tokens, not %d. "
                    "Counting again.",
                    path,
                    sample_id,
                    length,
                    lengths[sample_id],
                )
                return None
        return lengths

    def save(self, fingerprint: str, lengths: IntArray) -> None:
        """Store lengths; a reader sees the old file or the whole new one.

        A directory that cannot be written to is only worth a warning: training goes on without.
        """
        path = self.path(fingerprint)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for left in path.parent.glob(f"{path.stem}*.tmp"):  # of processes that were killed
                left.unlink(missing_ok=True)
            _replace(path, _encode(fingerprint, lengths))
        except OSError as error:
            _log.warning("Lengths could not be stored in %s: %s.", path, error)


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _encode(fingerprint: str, lengths: IntArray) -> bytes:
    payload = np.ascontiguousarray(lengths, dtype="<i8").tobytes()
    header: dict[str, Any] = {
        "format": _FORMAT,
        "fingerprint": fingerprint,
        "num_samples": len(lengths),
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    return json.dumps(header, sort_keys=True).encode() + b"\n" + payload


def _decode(data: bytes, fingerprint: str, num_samples: int) -> IntArray:
    head, _, payload = data.partition(b"\n")
    try:
        header = json.loads(head)
        expected = {"format": _FORMAT, "fingerprint": fingerprint, "num_samples": num_samples}
        found = {name: header[name] for name in expected}
        checksum = header["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("its header is damaged") from error
    if found != expected:
        raise ValueError("it belongs to other data")
    if hashlib.sha256(payload).hexdigest() != checksum or len(payload) != 8 * num_samples:
        raise ValueError("its checksum is wrong")
    lengths = np.frombuffer(payload, dtype="<i8").astype(np.int64)
    if np.any(lengths < 0):
        raise ValueError("it has negative lengths")
    return lengths

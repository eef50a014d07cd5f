"""Cost profiles on disk: one file per fingerprint.

A file is trusted only if its checksum, format and fingerprint are right. Anything else is reported
by name and measured again: a wrong profile would cost far more than the seconds it saves.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from lightning_dcp.profiling.cost_profile import CostProfile

ENVIRONMENT_VARIABLE = "LIGHTNING_DCP_CACHE"
FORMAT_VERSION = 2
_LOCK_TIMEOUT_S = 10.0


class CacheWarning(UserWarning):
    """A cached profile could not be used or written; training goes on without it."""


def default_cache_dir() -> Path:
    """``$LIGHTNING_DCP_CACHE`` if set, else the user's cache directory for this library."""
    configured = os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(configured) if configured else Path(platformdirs.user_cache_dir("lightning_dcp"))


class ProfileCache:
    """Cost profiles in a directory, keyed by fingerprint.

    Args:
        directory: Where the files are; ``None`` takes :func:`default_cache_dir`. It is created
            when the first profile is saved.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = default_cache_dir() if directory is None else Path(directory)

    def path(self, fingerprint: str) -> Path:
        """The file that holds the profile of this fingerprint."""
        # Hashed so that any text is a valid and short file name.
        name = hashlib.sha256(fingerprint.encode()).hexdigest()[:32]
        return self.directory / f"cost-profile-{name}.json"

    def load(self, fingerprint: str) -> CostProfile | None:
        """The cached profile, or ``None`` if there is none that can be trusted.

        Warns:
            CacheWarning: If there is a file, but it is damaged, of another format version or for
                another fingerprint.
        """
        path = self.path(fingerprint)
        # Files are replaced as a whole, so that reading needs no lock.
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            _warn(f"{path} cannot be read ({error}); the costs are measured again.")
            return None
        try:
            return _decode(text, fingerprint)
        except ValueError as error:
            _warn(f"{path} is not used ({error}); the costs are measured again.")
            return None

    def save(self, profile: CostProfile) -> Path | None:
        """Write ``profile`` under its own fingerprint, replacing a former file as a whole.

        Returns:
            The file, or ``None`` if it could not be written.

        Warns:
            CacheWarning: If the directory or file cannot be written.
        """
        path = self.path(profile.fingerprint)
        try:
            text = _encode(profile)
            self.directory.mkdir(parents=True, exist_ok=True)
            # The system lets go of the lock of a process that has died; not of one that is stopped.
            with filelock.FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_S):
                # Of processes that were killed: we hold the lock.
                for left in _temporary_files(path):
                    left.unlink(missing_ok=True)
                _replace(path, text)
        except NotImplementedError:  # a file system without locks; files are replaced as a whole
            return self._save_unlocked(path, text)
        except (OSError, ValueError, filelock.Timeout) as error:
            _warn(f"{path} cannot be written ({error}); the next run measures again.")
            return None
        return path

    def _save_unlocked(self, path: Path, text: str) -> Path | None:
        try:
            _replace(path, text)
        except OSError as error:
            _warn(f"{path} cannot be written ({error}); the next run measures again.")
            return None
        return path


def read_profile(path: str | os.PathLike[str]) -> CostProfile:
    """Read one file of the cache, whatever model and machine it was measured for.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no cost profile, damaged, or of another format version.
    """
    try:
        return _decode(Path(path).read_text(encoding="utf-8"), None)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} is no cost profile: {error}.") from None


def load_or_measure(
    measure: Callable[[], CostProfile],
    *,
    fingerprint: str,
    cache: ProfileCache | None,
    gather: Callable[[Any], list[Any]],
    is_writer: bool,
    check: Callable[[CostProfile], None] = lambda profile: None,
) -> tuple[CostProfile, bool]:
    """The cached profile or a new one, the same on all ranks.

    Args:
        measure: Measures on all ranks at once, called on all or on none.
        fingerprint: Of this run; rank 0's counts.
        cache: ``None`` to neither read nor write.
        gather: Objects of all ranks in rank order, on every rank.
        is_writer: True on rank 0 alone. Only it touches the cache: what ranks see in their file
            systems, and when, may differ.
        check: Called with a profile from the cache; a ValueError says why it cannot be this run's,
            although its fingerprint is: somebody has edited it.

    Returns:
        The profile, and whether it came from the cache.
    """
    if cache is None:
        return measure(), False
    found = cache.load(fingerprint) if is_writer else None
    if found is not None:
        try:
            check(found)
        except ValueError as error:
            _warn(f"{cache.path(fingerprint)} is not used ({error}); the costs are measured again.")
            found = None
    text = gather(found.to_json() if found is not None else None)[0]
    if text is not None:
        return CostProfile.from_json(text), True
    profile = measure()
    if is_writer:
        cache.save(profile)
    return profile, False


def _encode(profile: CostProfile) -> str:
    content = {"format": FORMAT_VERSION, "profile": json.loads(profile.to_json())}
    return json.dumps(content | {"checksum": _checksum(content)}, indent=1, sort_keys=True) + "\n"


def _decode(text: str, fingerprint: str | None) -> CostProfile:
    """The profile in a file's text; ValueError, with the reason, if it is not to be trusted.

    Without a fingerprint, that of any model and machine.
    """
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"damaged or truncated: {error}") from error
    if not isinstance(content, dict) or "checksum" not in content:
        raise ValueError("damaged: it has no checksum")
    checksum = content.pop("checksum")
    if content.get("format") != FORMAT_VERSION:
        raise ValueError(
            f"written in format {content.get('format')!r}, this version reads {FORMAT_VERSION}"
        )
    if checksum != _checksum(content):
        raise ValueError("damaged or edited: its checksum is wrong")
    profile = CostProfile.from_json(json.dumps(content.get("profile")))
    if fingerprint is not None and profile.fingerprint != fingerprint:
        raise ValueError("it belongs to another model or machine")
    return profile


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _temporary_files(path: Path) -> list[Path]:
    return [p for p in path.parent.iterdir() if p.name.startswith(f".{path.name}-")]


def _replace(path: Path, text: str) -> None:
    """Write a file so that others see all of it or nothing, also if this process dies."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _warn(message: str) -> None:
    warnings.warn(f"Cost profile cache: {message}", CacheWarning, stacklevel=3)

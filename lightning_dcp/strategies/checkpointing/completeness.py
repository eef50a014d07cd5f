"""Whether a checkpoint on disk is whole, and which of its neighbours are.

A folder of shards is written with a list of its files. A file of `torch.save` is an archive whose
list of contents is its end: one that was cut off has none.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_dcp.strategies.checkpointing.replacing import existing, is_left_over

__all__ = ["local_path", "not_found", "what_is_missing", "whole_checkpoint", "write_manifest"]

#: The files of a folder, with their sizes.
MANIFEST = "lightning_dcp_manifest.json"

_ARCHIVE = b"PK\x03\x04"
_MAX_SHOWN = 3


def local_path(path: Any) -> Path | None:
    """Of a path or `file://` URL; None for what lies elsewhere."""
    text = os.fspath(path)
    for protocol in ("file://", "file:", "local://", "local:"):
        if text.startswith(protocol):
            return Path(text[len(protocol) :])
    return None if "://" in text or "::" in text else Path(text)


def write_manifest(folder: Path) -> None:
    """List the files of a folder in it, all of them on disk when this returns."""
    files: dict[str, int] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = path.stat().st_size
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({"format": 1, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def what_is_missing(path: Path) -> str | None:
    """What a checkpoint lacks, as far as can be seen without reading all of it; None: nothing."""
    try:
        return _missing_in_folder(path) if path.is_dir() else _missing_in_file(path)
    except OSError as error:
        return f"it cannot be read ({error})"


def whole_checkpoint(path: Any) -> Any:
    """The path to read, with an error where that cannot be a whole checkpoint.

    Returns:
        `path`; or the former version of a folder that a process was killed in replacing.

    Raises:
        MisconfigurationException: something is missing; it names what, and whole ones beside it.
    """
    given = local_path(path)
    if given is None:
        return path
    found = existing(given)
    if not found.exists():
        return path
    missing = what_is_missing(found)
    if missing is not None:
        raise MisconfigurationException(
            f"The checkpoint {str(found)!r} is incomplete: {missing}. {_advice(found)}"
        )
    return path if found == given else str(found)


def not_found(path: Path) -> FileNotFoundError:
    """For a path where nothing is."""
    return FileNotFoundError(f"Checkpoint file not found: {path}. {_advice(path)}")


def _missing_in_file(path: Path) -> str | None:
    size = path.stat().st_size
    with open(path, "rb") as file:
        begin = file.read(len(_ARCHIVE))
    if not begin:
        return "the file is empty"
    if begin != _ARCHIVE[: len(begin)] or (len(begin) == len(_ARCHIVE) and _is_whole_archive(path)):
        return None  # of another format, or whole
    return f"the end of the file is missing ({size:,} bytes are there)"


def _is_whole_archive(path: Path) -> bool:
    """Whether an archive has its list of contents, at the end, and room for all of them."""
    try:
        with zipfile.ZipFile(path):
            return True
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return False


def _missing_in_folder(folder: Path) -> str | None:
    manifest = folder / MANIFEST
    if not manifest.is_file():
        if any(folder.glob("*.distcp")) and not (folder / ".metadata").is_file():
            return "the list of its shards, `.metadata`, is missing"
        return None  # of another program, or of an earlier release
    try:
        files: dict[str, int] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        sizes = {str(name): int(size) for name, size in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"`{MANIFEST}` is damaged"
    wrong = []
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"`{name}` is missing")
        elif path.stat().st_size != size:
            wrong.append(f"`{name}` has {path.stat().st_size:,} of {size:,} bytes")
    if not wrong:
        return None
    more = f", and {len(wrong) - _MAX_SHOWN} more" if len(wrong) > _MAX_SHOWN else ""
    return ", ".join(wrong[:_MAX_SHOWN]) + more


def _advice(path: Path) -> str:
    whole = _whole_beside(path)
    if not whole:
        return "There is no complete checkpoint beside it."
    shown = ", ".join(repr(str(each)) for each in whole[:_MAX_SHOWN])
    return f"Complete ones beside it, the newest first: {shown}."


def _whole_beside(path: Path) -> list[Path]:
    try:
        others = [
            each
            for each in path.parent.iterdir()
            if each.suffix == path.suffix
            and each != path
            and not is_left_over(each)
            and _is_checkpoint(each)
        ]
        others.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    except OSError:
        return []
    return [each for each in others if what_is_missing(each) is None]


def _is_checkpoint(path: Path) -> bool:
    if path.is_dir():
        return any((path / name).exists() for name in (MANIFEST, ".metadata", "latest"))
    return path.is_file()

"""A hash of everything a data set's lengths can be seen to depend on.

Lengths that are cached and no longer true would be wrong without a word, so that the hash covers as
much as can be reached, and gives up where it cannot:

- the data set's whole state, as it would be pickled for a worker process;
- the content of every module (and the code of every function) whose class or function occurs in it;
- size and modification time of every file, and of everything below every directory, whose path
  occurs in it.

What it cannot see: data behind a URL or a database handle, files found without their path
being kept, and code of other modules that is only called. Lengths of a few samples are compared as
well when they are loaded (`length_cache`).
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

_FORMAT = "1"
_MAX_STATE_BYTES = 8 << 30
_MAX_FILES = 100_000
_MAX_PATH_CHARS = 1024


class CannotFingerprint(Exception):
    """The data set's state cannot be hashed; the message says why."""


def fingerprint_dataset(dataset: Any) -> str:
    """Hash of a data set's state, code and files (SHA-256, hex).

    Args:
        dataset: Any data set; it is pickled into the hash, nothing is stored or changed.

    Returns:
        Equal for equal state, code and files. Unequal hashes may also come from states that mean
        the same (a temporary path, for example): then lengths are counted again.

    Raises:
        CannotFingerprint: The state does not pickle, or is too large to be hashed.
    """
    sink = _HashSink()
    hasher = _StateHasher(sink)
    try:
        hasher.dump(dataset)
    except CannotFingerprint:
        raise
    # Pickling runs code of the data set's author and of its members: any error may come out.
    except Exception as error:
        raise CannotFingerprint(f"it does not pickle ({type(error).__name__}: {error})") from error
    digest = hashlib.sha256(f"{_FORMAT}:{len(dataset)}:{sink.hexdigest()}".encode())
    for line in _file_states(hasher.paths):
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


class _HashSink:
    """A file that keeps only the hash of what is written to it."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._num_bytes += view.nbytes
        if self._num_bytes > _MAX_STATE_BYTES:
            raise CannotFingerprint(f"its state is larger than {_MAX_STATE_BYTES >> 30} GiB")
        self._hash.update(view)
        return view.nbytes

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class _StateHasher(pickle.Pickler):
    """Pickles into a hash; nothing of it is ever unpickled.

    Ordinary pickles hold functions and classes by name only, sets in an order and tensors with
    addresses that differ between processes, and memory maps as a copy of the file. Here: by code,
    sorted, by value, and by file state.
    """

    def __init__(self, sink: _HashSink) -> None:
        super().__init__(sink, protocol=5)
        self.paths: set[str] = set()

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is str:
            if 0 < len(obj) <= _MAX_PATH_CHARS and "\n" not in obj and "\0" not in obj:
                self.paths.add(obj)
        elif kind in (set, frozenset):
            return ("set", sorted(map(repr, obj)))
        elif isinstance(obj, os.PathLike):
            self.paths.add(os.fspath(obj))
        return None

    def reducer_override(self, obj: Any) -> Any:
        if obj is _stands_for:
            return NotImplemented
        if isinstance(obj, types.FunctionType):
            closure = tuple(cell.cell_contents for cell in obj.__closure__ or ())
            code = _code_digest(obj.__code__)
            name = (obj.__module__, obj.__qualname__, _module_digest(obj.__module__), code)
            return _stands_for, (name, obj.__defaults__, obj.__kwdefaults__, closure)
        if isinstance(obj, type) and obj.__module__ != "builtins":
            return _stands_for, (_class_name(obj), obj.__bases__)
        if isinstance(obj, np.memmap) and obj.filename is not None:
            where = (os.fspath(obj.filename), obj.offset, obj.shape, obj.strides, str(obj.dtype))
            return _stands_for, (where,)
        if isinstance(obj, torch.Tensor) and obj.layout == torch.strided and not obj.is_quantized:
            values = obj.detach().cpu().reshape(-1).view(torch.uint8).numpy()
            return _stands_for, (type(obj), str(obj.dtype), tuple(obj.shape), values)
        return NotImplemented


def _stands_for(*parts: Any) -> None:
    """Stands in the pickle for what is described by `parts`."""


def _class_name(cls: type) -> tuple[str, ...]:
    module = _module_digest(cls.__module__)
    names: tuple[str, ...] = (cls.__module__, cls.__qualname__, module)
    if not module:  # no file: made in a console or notebook, so its methods are all there is
        methods = (getattr(value, "fget", value) for value in vars(cls).values())
        names += tuple(
            _code_digest(method.__code__)
            for method in methods
            if isinstance(method, types.FunctionType)
        )
    return names


@cache
def _module_digest(name: str) -> str:
    """Hash of a module's file, empty where there is none."""
    path = getattr(sys.modules.get(name), "__file__", None)
    if not path:
        return ""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _code_digest(code: types.CodeType) -> str:
    """Hash of a function's code, without line numbers and addresses."""
    digest = hashlib.sha256(code.co_code)
    for names in (code.co_names, code.co_varnames, code.co_freevars):
        digest.update(repr(names).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            text = _code_digest(constant)
        elif isinstance(constant, frozenset):  # its order differs between processes
            text = repr(sorted(map(repr, constant)))
        else:
            text = repr(constant)
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _file_states(paths: set[str]) -> Iterator[str]:
    """One line per existing file: path, size, modification time. Relative paths as they are."""
    num_files = 0
    for path in sorted(paths):
        for found, state in _walk(path):
            num_files += 1
            if num_files > _MAX_FILES:
                raise CannotFingerprint(f"it refers to more than {_MAX_FILES:,} files")
            yield f"{found}\0{state.st_size}\0{state.st_mtime_ns}\n"


def _walk(path: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return  # most strings are no paths
    yield path, state
    if not os.path.isdir(path):
        return
    for folder, folders, files in os.walk(path):
        folders.sort()
        for name in sorted(files):
            entry = os.path.join(folder, name)
            try:
                yield entry, os.stat(entry)
            except OSError:
                yield entry, state  # vanished or a broken link: its name alone counts

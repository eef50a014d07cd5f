"""How long is each sample? Asked in the order of what it costs and how sure the answer is.

1. `DCPDataModuleMixin.sequence_lengths(dataset)`, the user's own word;
2. `dataset.sequence_lengths`, attribute or method;
3. a length column of a Hugging Face data set, or the list sizes of its `input_ids` column;
4. for `Subset` and `ConcatDataset`, the same questions for what is inside;
5. one counted pass over all samples, cached.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from lightning_dcp.data.fingerprint import CannotFingerprint, fingerprint_dataset
from lightning_dcp.data.length_cache import LengthCache, probe_ids
from lightning_dcp.data.samples import LENGTHS_HOOK, sample_length
from lightning_dcp.planning.lengths import as_lengths
from lightning_dcp.profiling.preserve import preserve

_log = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int64]

LENGTH_COLUMNS = ("length", "seq_len", "num_tokens")
"""Columns of a Hugging Face data set that are taken as lengths, in order of preference."""

_CHUNK = 4096


class Lengths(NamedTuple):
    """Lengths and where they came from.

    Attributes:
        values: Tokens per sample, shape (num_samples,), read-only.
        source: A few words for logs and messages, such as "the column 'length' of Dataset".
    """

    values: IntArray
    source: str


def resolve_lengths(
    dataset: Any,
    *,
    datamodule: Any = None,
    length_column: str | None = None,
    cache: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
    show_progress: bool = True,
    source_hint: str = "",
) -> IntArray:
    """Length in tokens of every sample of a data set. See the module for the order of sources.

    Args:
        dataset: The train loader's data set; map-style.
        datamodule: Asked first, if it has a `sequence_lengths` method.
        length_column: Column of a Hugging Face data set that holds the lengths.
        cache: Keep the result of a counted pass and use one that was kept. It is used only while
            the data set's state, code and files are unchanged (`fingerprint`); switch it
            off where lengths depend on something else, such as a remote file.
        cache_dir: Where to keep it; the user's cache directory by default.
        show_progress: Show a progress bar on stderr during a counted pass.
        source_hint: Where the data set comes from, for error messages.

    Returns:
        Lengths, shape (num_samples,), int64, read-only.

    Raises:
        TypeError: The data set is iterable-style or has no length, lengths are no integers, or the
            length of a sample cannot be told from its form.
        ValueError: The data set is empty, there are not as many lengths as samples, or one is
            not positive.
    """
    return find_lengths(
        dataset,
        datamodule=datamodule,
        length_column=length_column,
        cache=cache,
        cache_dir=cache_dir,
        show_progress=show_progress,
        source_hint=source_hint,
    ).values


def find_lengths(
    dataset: Any,
    *,
    datamodule: Any = None,
    length_column: str | None = None,
    cache: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
    show_progress: bool = True,
    source_hint: str = "",
) -> Lengths:
    """Like `resolve_lengths`, and says which source the lengths came from."""
    hint = f" (from {source_hint})" if source_hint else ""
    num_samples = _num_samples(dataset, hint)
    counter = _Counter(LengthCache(cache_dir) if cache else None, show_progress)
    search = _Search(datamodule, length_column, hint)
    found = search.without_reading(dataset)
    if found is None:
        found = search.reading(dataset, counter)
    # One more check of the whole: parts were checked one by one.
    values = as_lengths(found.values, num_samples, name=f"{type(dataset).__name__}{hint}")
    _log.info("Lengths of %d samples taken from %s.", num_samples, found.source)
    return Lengths(values, found.source)


def _num_samples(dataset: Any, hint: str) -> int:
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{name}{hint} is an IterableDataset. DCP plans which samples run together, so that it "
            "needs a map-style data set: `dataset[i]` and `len(dataset)`, with known lengths."
        )
    if isinstance(getattr(dataset, "column_names", None), dict):
        splits = ", ".join(map(repr, dataset))
        raise TypeError(f"{name}{hint} is a dict of splits. Pass one of them: {splits}.")
    try:
        num_samples = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(
            f"{name}{hint} has no length. DCP needs a map-style data set with `__len__`: it plans "
            "a whole epoch before it starts."
        ) from error
    if num_samples == 0:
        raise ValueError(f"{name}{hint} is empty: there is nothing to plan an epoch of.")
    return num_samples


class _Search:
    """Looks for lengths without reading samples; counts where there are none."""

    def __init__(self, datamodule: Any, length_column: str | None, hint: str) -> None:
        self._hook = getattr(datamodule, "sequence_lengths", None)
        self._hook_name = f"`{type(datamodule).__name__}.sequence_lengths(dataset)`"
        self._column = length_column
        self._hint = hint
        self._column_seen = False

    def without_reading(self, dataset: Any) -> Lengths | None:
        found = (
            self._from_hook(dataset) or self._from_attribute(dataset) or self._column_of(dataset)
        )
        if found is not None:
            return found
        if isinstance(dataset, Subset):
            inner = self.without_reading(dataset.dataset)
            if inner is not None:
                indices = np.asarray(dataset.indices, dtype=np.int64)
                return Lengths(inner.values[indices], inner.source)
        if isinstance(dataset, ConcatDataset):
            parts = [self.without_reading(part) for part in dataset.datasets]
            known = [part for part in parts if part is not None]
            if len(known) == len(parts):
                return _joined(known)
        return None

    def reading(self, dataset: Any, counter: _Counter) -> Lengths:
        if self._column is not None and not self._column_seen:
            raise ValueError(
                f"`length_column={self._column!r}` was given, but {type(dataset).__name__}"
                f"{self._hint} has no columns. {LENGTHS_HOOK}."
            )
        if isinstance(dataset, ConcatDataset):
            # Only what does not know its lengths is read.
            return _joined(
                [self.without_reading(p) or self.reading(p, counter) for p in dataset.datasets]
            )
        return counter.count(dataset)

    def _from_hook(self, dataset: Any) -> Lengths | None:
        if not callable(self._hook):
            return None
        try:
            values = self._hook(dataset)
        except (AttributeError, TypeError) as error:
            if not isinstance(dataset, Subset | ConcatDataset):
                raise
            name = type(dataset).__name__
            raise TypeError(
                f"{self._hook_name} failed on a {name}: {error}. It is given the train loader's "
                f"data set as it is. Return NotImplemented for a {name} to be asked for the data "
                "set inside instead."
            ) from error
        return self._checked(values, dataset, self._hook_name)

    def _from_attribute(self, dataset: Any) -> Lengths | None:
        values = getattr(dataset, "sequence_lengths", None)
        name = f"`{type(dataset).__name__}.sequence_lengths`"
        return self._checked(values() if callable(values) else values, dataset, name)

    def _column_of(self, dataset: Any) -> Lengths | None:
        columns = getattr(dataset, "column_names", None)
        if not isinstance(columns, list | tuple):
            return None
        name = type(dataset).__name__
        if self._column is not None and self._column not in columns:
            raise ValueError(
                f"`length_column={self._column!r}` is no column of {name}{self._hint}. It has "
                f"{', '.join(map(repr, columns))}."
            )
        self._column_seen = True
        wanted = LENGTH_COLUMNS if self._column is None else (self._column,)
        column = next((column for column in wanted if column in columns), None)
        if column is not None:
            values = _column_values(dataset, column, _numbers)
            return self._checked(values, dataset, f"the column {column!r} of {name}")
        # A transform may cut or build the tokens: then only the samples themselves tell.
        layout = getattr(dataset, "format", None)
        transformed = isinstance(layout, dict) and layout.get("type") == "custom"
        if "input_ids" in columns and not transformed:
            values = _column_values(dataset, "input_ids", _sizes)
            return self._checked(values, dataset, f"the column 'input_ids' of {name}")
        return None

    def _checked(self, values: Any, dataset: Any, source: str) -> Lengths | None:
        if values is None or values is NotImplemented:
            return None
        if isinstance(values, torch.Tensor):
            values = values.cpu().numpy()
        name = f"{type(dataset).__name__}{self._hint}, from {source}"
        return Lengths(as_lengths(values, len(dataset), name=name), source)


def _joined(parts: list[Lengths]) -> Lengths:
    sources = list(dict.fromkeys(part.source for part in parts))
    return Lengths(np.concatenate([part.values for part in parts]), ", ".join(sources))


def _column_values(dataset: Any, column: str, convert: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """Read one column piece by piece, without decoding the others."""
    if callable(getattr(dataset, "select_columns", None)):
        dataset = dataset.select_columns([column])
    if callable(getattr(dataset, "with_format", None)):
        # Arrow's own buffers give list sizes without making a Python object per token.
        dataset = dataset.with_format("arrow")
    values: list[Any] = []
    for start in range(0, len(dataset), _CHUNK):
        values.extend(convert(dataset[start : min(start + _CHUNK, len(dataset))][column]))
    return values


def _numbers(cells: Any) -> Iterable[Any]:
    numbers: Iterable[Any] = cells.to_pylist() if hasattr(cells, "to_pylist") else cells
    return numbers


def _sizes(cells: Any) -> Iterable[int]:
    if callable(getattr(cells, "to_pylist", None)):
        from pyarrow import compute  # type: ignore[import-not-found,unused-ignore]

        sizes: list[int] = compute.list_value_length(cells).to_pylist()
        return sizes
    return (len(cell) for cell in cells)


class _Counter:
    """Reads every sample once, or takes the result of an earlier time."""

    def __init__(self, cache: LengthCache | None, show_progress: bool) -> None:
        self._cache = cache
        self._show_progress = show_progress

    def count(self, dataset: Any) -> Lengths:
        name = type(dataset).__name__
        # Reading a sample may draw random numbers: a run with cached lengths and one without have
        # to go on with the same ones.
        with preserve(torch.nn.Module()):
            if self._cache is None:
                return Lengths(self._pass_over(dataset), f"a pass over {name}")
            try:
                fingerprint = fingerprint_dataset(dataset)
            except CannotFingerprint as error:
                _log.info("Lengths of %s are counted, not cached: %s.", name, error)
                return Lengths(self._pass_over(dataset), f"a pass over {name}")
            with self._cache.locked(fingerprint):
                return self._cached(dataset, fingerprint, self._cache)

    def _cached(self, dataset: Any, fingerprint: str, cache: LengthCache) -> Lengths:
        name = type(dataset).__name__
        cached = cache.load(fingerprint, len(dataset), lambda i: sample_length(dataset[i]))
        if cached is not None:
            return Lengths(cached, f"an earlier pass over {name}")
        counted = self._pass_over(dataset)
        # A wrong length is an error later on, and no reason to keep it.
        cache.save(fingerprint, as_lengths(counted, len(dataset), name=name))
        return Lengths(counted, f"a pass over {name}")

    def _pass_over(self, dataset: Any) -> IntArray:
        from rich.console import Console
        from rich.progress import track

        num_samples = len(dataset)
        lengths = np.empty(num_samples, dtype=np.int64)
        console = Console(stderr=True)
        for i in track(
            range(num_samples),
            description=f"Counting lengths of {type(dataset).__name__}",
            console=console,
            transient=True,
            disable=not (self._show_progress and console.is_terminal),
        ):
            lengths[i] = sample_length(dataset[i])
        for i in probe_ids(num_samples):
            again = sample_length(dataset[i])
            if again != lengths[i]:
                raise ValueError(
                    f"Sample {i} of {type(dataset).__name__} had {lengths[i]} tokens and has "
                    f"{again} when it is read again. DCP plans with lengths that stay. "
                    f"{LENGTHS_HOOK}: the largest one it can have."
                )
        return lengths

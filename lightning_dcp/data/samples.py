"""What is known about one sample: how to fetch it, how long it is, how to cut it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch

TOKEN_KEYS = ("input_ids", "tokens", "token_ids", "inputs")
"""Keys (or attributes) of a sample that hold one entry per token, in order of preference."""

LENGTHS_HOOK = (
    "Override `sequence_lengths(self, dataset)` of lightning_dcp.DCPDataModuleMixin in your "
    "LightningDataModule, or give the data set a `sequence_lengths` attribute or method, with one "
    "int per sample"
)


class UnknownForm(TypeError):
    """A sample whose length cannot be told from its form."""


def fetch_samples(dataset: Any, sample_ids: Sequence[int]) -> list[Any]:
    """Read samples as torch's own fetcher does: all at once where the data set offers it.

    Args:
        dataset: A map-style data set.
        sample_ids: Indices into it.

    Returns:
        One sample per id, in the same order.

    Raises:
        ValueError: `dataset.__getitems__` gave another number of samples than it was asked for.
    """
    # Same test as torch/utils/data/_utils/fetch.py: the attribute may be there and be None.
    get_many = getattr(dataset, "__getitems__", None)
    if not get_many:
        return [dataset[sample_id] for sample_id in sample_ids]
    samples = list(get_many(list(sample_ids)))
    if len(samples) != len(sample_ids):
        raise ValueError(
            f"`{type(dataset).__name__}.__getitems__` was asked for {len(sample_ids)} samples and "
            f"gave {len(samples)}. It has to return one sample per index, in order."
        )
    return samples


def sample_length(sample: Any) -> int:
    """Number of tokens of one sample, where its form leaves no doubt.

    The rules, in this order:

    - a 1-D tensor or array, or a list of numbers or strings: its number of entries;
    - a mapping, or an object with attributes: the same for the first of `input_ids`, `tokens`,
      `token_ids`, `inputs` that it has;
    - a tuple (also a named tuple without such a field): the same for its first element.

    Args:
        sample: What `dataset[i]` returned.

    Returns:
        The length in tokens.

    Raises:
        UnknownForm: The form is another one, or leaves doubt which dimension is the sequence; the
            message says what was found and which hook to override.
    """
    length = _length_or_none(sample)
    if length is None:
        raise UnknownForm(
            f"The length of a sample cannot be told from its form: {describe(sample)}. Known forms "
            "are a 1-D tensor, array or list; a mapping or object with one of "
            f"{', '.join(TOKEN_KEYS)}; a tuple that starts with one of these. {LENGTHS_HOOK}."
        )
    return length


def _length_or_none(sample: Any) -> int | None:
    if isinstance(sample, torch.Tensor | np.ndarray):
        return int(sample.shape[0]) if sample.ndim == 1 else None
    if isinstance(sample, list):
        # A list of tensors or of lists may be a batch, layers, sentences: anything but tokens.
        return len(sample) if all(isinstance(x, Number | str) for x in sample[:1]) else None
    name = token_key(sample)
    if name is not None:
        return _length_or_none(_get(sample, name))
    if isinstance(sample, tuple) and sample:
        return _length_or_none(sample[0])
    return None


def token_key(sample: Any) -> str | None:
    """The first of `TOKEN_KEYS` that a mapping or object has, or None."""
    if isinstance(sample, Mapping):
        return next((key for key in TOKEN_KEYS if key in sample), None)
    return next((key for key in TOKEN_KEYS if getattr(sample, key, None) is not None), None)


def _get(sample: Any, name: str) -> Any:
    return sample[name] if isinstance(sample, Mapping) else getattr(sample, name)


def truncate_sample(sample: Any, max_length: int) -> Any:
    """Cut a sample to its first `max_length` tokens, where its form leaves no doubt.

    A 1-D tensor, array or list is cut. In a mapping, list, or tuple everything whose first
    dimension is as long as the sample (tokens, labels, masks) is cut along it; the rest is kept.

    Args:
        sample: What `dataset[i]` returned.
        max_length: Number of tokens to keep, at least 1.

    Returns:
        A cut sample of the same form; the given one if it has just `max_length` tokens. The given
        one is not changed.

    Raises:
        TypeError: The form is not known; override `truncate_sample` then.
        ValueError: By its form the sample is shorter than `max_length`, so that its length and the
            one used for planning are counted in different units.
    """
    try:
        length = sample_length(sample)
    except TypeError:
        length = None
    if length is None or not isinstance(sample, torch.Tensor | np.ndarray | list | tuple | Mapping):
        raise TypeError(
            f"`on_too_long='truncate'` does not know how to cut {describe(sample)} to {max_length} "
            "tokens. Override `truncate_sample(self, sample, max_length)` of "
            "lightning_dcp.DCPDataModuleMixin in your LightningDataModule."
        )
    if length == max_length:
        return sample
    if length < max_length:
        raise ValueError(
            f"A sample is to be cut to {max_length} tokens, but {describe(sample)} has {length}: "
            "the lengths given for planning count something else. Override "
            "`truncate_sample(self, sample, max_length)` of lightning_dcp.DCPDataModuleMixin."
        )
    return _cut(sample, length, max_length)


def _cut(value: Any, length: int, max_length: int) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value[:max_length] if value.ndim >= 1 and value.shape[0] == length else value
    if isinstance(value, list):
        return value[:max_length] if len(value) == length else value
    if isinstance(value, Mapping):
        cut = {key: _cut(entry, length, max_length) for key, entry in value.items()}
        return cut if type(value) is dict else type(value)(cut)  # type: ignore[call-arg]
    if isinstance(value, tuple):
        entries = (_cut(entry, length, max_length) for entry in value)
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return value


def describe(sample: Any) -> str:
    """One short line about a value's form, for error messages."""
    if isinstance(sample, torch.Tensor | np.ndarray):
        return f"a {type(sample).__name__} of shape {tuple(sample.shape)}"
    if isinstance(sample, Mapping):
        entries = [f"{key!r}: {describe(value)}" for key, value in list(sample.items())[:6]]
        return f"a {type(sample).__name__} with {{{', '.join(entries)}}}"
    if isinstance(sample, list | tuple):
        first = f", the first {describe(sample[0])}" if sample else ""
        return f"a {type(sample).__name__} of {len(sample)} elements{first}"
    return f"a {type(sample).__name__}"

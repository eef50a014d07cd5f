"""Sample lengths: one positive integer per dataset item."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["IntArray", "as_lengths"]

IntArray = npt.NDArray[np.int64]

_HINT = "A length is the sample's number of tokens, an integer of at least 1."


def as_lengths(
    values: Iterable[Any], num_samples: int | None = None, *, name: str = "the dataset"
) -> IntArray:
    """Check lengths and make a read-only int64 array of them.

    Args:
        values: One length per sample: a sequence, an array, or anything iterable. Floats are
            accepted where they are whole numbers. Or a pair of each, (frames, patches of a frame)
            say, whose product is the number of tokens: an array (n, 2) or a list of tuples.
        num_samples: Number of samples in the dataset; None skips the comparison.
        name: What the lengths belong to, for messages.

    Raises:
        TypeError: A value that is no number, or ``values`` is no sequence.
        ValueError: No lengths, another count than the dataset has, a zero, negative or broken
            length.
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(
            f"The lengths of {name} must be a sequence of integers; got "
            f"{type(values).__name__} {values!r:.40}. {_HINT}"
        )
    raw = values if isinstance(values, (np.ndarray, list, tuple)) else list(_plain(values))
    raw = _products(raw)
    array = _as_array(raw, name)
    if array.size == 0:
        raise ValueError(
            f"There are no lengths: {name} is empty. Pass a dataset with at least one sample."
        )
    if num_samples is not None and array.size != num_samples:
        raise ValueError(
            f"{array.size} lengths were given for {name}, which has {num_samples} samples. Give "
            "exactly one length per sample, in the order of the dataset."
        )
    wrong = np.flatnonzero(array < 1)
    if wrong.size:
        index = int(wrong[0])
        raise ValueError(
            f"Sample {index} of {name} has length {int(array[index])}"
            + (f" ({wrong.size} samples are below 1)" if wrong.size > 1 else "")
            + f". {_HINT} Leave empty samples out of the dataset."
        )
    result = np.array(array, dtype=np.int64)
    result.setflags(write=False)
    return result


def _products(raw: Any) -> Any:
    """Numbers of tokens of samples with two axes: (n, 2) -> (n,); anything else as it is."""
    if isinstance(raw, np.ndarray):
        is_pairs = raw.ndim == 2 and raw.shape[1] == 2
    else:
        is_pairs = len(raw) > 0 and all(isinstance(v, (tuple, list)) and len(v) == 2 for v in raw)
    if not is_pairs:
        return raw
    pairs = np.asarray(raw)
    # Two negative numbers would make a positive one.
    return np.where((pairs < 1).any(axis=1), pairs.min(axis=1), pairs[:, 0] * pairs[:, 1])


def _plain(values: Iterable[Any]) -> Iterable[Any]:
    # Tensors and columns iterate over wrapped scalars; tolist gives Python numbers.
    tolist = getattr(values, "tolist", None)
    return tolist() if callable(tolist) else values


def _as_array(raw: Any, name: str) -> npt.NDArray[Any]:
    if isinstance(raw, np.ndarray):
        if raw.ndim != 1:
            raise ValueError(
                f"The lengths of {name} must be one-dimensional; got shape {raw.shape}. {_HINT}"
            )
        if raw.dtype.kind in "iu":
            return raw
        if raw.dtype.kind == "f":
            return _whole(raw, name)
        raw = raw.tolist()
    try:
        array = np.asarray(raw)
    except ValueError:  # ragged
        array = np.empty(0, dtype=object)
    # bool is a subclass of int and numpy promotes [True, 5] to integers, so types are looked at;
    # for a list of builtin ints one fast pass is enough.
    if array.ndim == 1 and array.dtype.kind in "iu" and set(map(type, raw)) == {int}:
        return array
    numbers = []
    for index, value in enumerate(raw):
        number = _number(value)
        if number is None:
            raise TypeError(
                f"Sample {index} of {name} has length {value!r:.60} "
                f"({type(value).__name__}). {_HINT}"
            )
        numbers.append(number)
    if all(isinstance(number, int) for number in numbers):
        return np.asarray(numbers, dtype=np.int64)
    return _whole(np.asarray(numbers, dtype=np.float64), name)


def _number(value: Any) -> int | float | None:
    # Zero-dimensional arrays and tensors hold a number too (torch is not imported for that).
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _whole(array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    broken = np.flatnonzero(~np.isfinite(array) | (array != np.floor(array)) | (array > 2**53))
    if broken.size:
        index = int(broken[0])
        raise ValueError(f"Sample {index} of {name} has length {array[index]}. {_HINT}")
    return array.astype(np.int64)

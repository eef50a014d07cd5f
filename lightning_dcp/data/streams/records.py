"""One sample of a stream on its way from the process that reads it to the ranks that run it."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from lightning_dcp.data.lengths import LENGTH_COLUMNS
from lightning_dcp.data.samples import UnknownForm, describe, sample_length

SampleLength = Callable[[Any], Any]

LENGTH_HOOK = (
    "Override `sample_length(self, sample)` of lightning_dcp.DCPDataModuleMixin in your "
    "LightningDataModule, or give samples an entry 'length' with the number of tokens"
)


class Record(NamedTuple):
    """A sample as it was read.

    Attributes:
        worker: Worker that read it; 0 where the main process reads.
        place: Which sample of this worker and rank it is, from 0.
        length: Its tokens; 0 where it is passed over.
        data: Itself, as bytes; None where it is passed over: another rank reads it, or it was
            trained on before.
        snapshot: (index of the next sample, state of the data set) behind it, if the data set
            offers that; not every sample has one.
    """

    worker: int
    place: int
    length: int
    data: bytes | None
    snapshot: tuple[int, Any] | None = None


class _Pickler(pickle.Pickler):
    """Tensors as arrays: less to write than torch's own way, which counts for small ones."""

    @override
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.requires_grad or obj.layout != torch.strided:
            return NotImplemented
        if obj.device.type != "cpu" or obj.is_conj() or obj.is_neg() or obj.is_quantized:
            return NotImplemented
        if obj.dtype == torch.bfloat16:
            return _bfloat16, (obj.contiguous().view(torch.int16).numpy(),)
        try:
            return torch.from_numpy, (obj.contiguous().numpy(),)
        except TypeError:  # a type that numpy has not
            return NotImplemented


def _bfloat16(array: Any) -> torch.Tensor:
    return torch.from_numpy(array).view(torch.bfloat16)


def pack(sample: Any) -> bytes:
    """A sample as bytes.

    As bytes it takes the memory it needs and no more, waits in the buffer without the file handle
    that each tensor from a worker keeps open, and goes to other ranks as it is.

    Raises:
        TypeError: It cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(sample)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{describe(sample)} cannot be pickled: {error}. Samples of a stream go to the ranks"
            " that run them. Let the data set give tensors, arrays, numbers, texts, and mappings or"
            " lists of these."
        ) from error
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Inverse of `pack`; each call gives a sample of its own."""
    return pickle.loads(data)


def digest(data: bytes) -> bytes:
    """Short hash of a packed sample: equal samples have equal ones on all ranks."""
    return hashlib.blake2b(data, digest_size=8).digest()


def stream_length(sample: Any, hook: SampleLength | None) -> int:
    """Tokens of a sample: by the user's hook, by its metadata, or by its form.

    Args:
        sample: What the data set gave.
        hook: `DCPDataModuleMixin.sample_length`.

    Raises:
        TypeError: Its length cannot be told.
        ValueError: It has no tokens.
    """
    length = NotImplemented if hook is None else hook(sample)
    if length is NotImplemented and isinstance(sample, Mapping):
        found = (sample[name] for name in LENGTH_COLUMNS if name in sample)
        length = next((n for n in map(_integer, found) if n is not None), NotImplemented)
    if length is NotImplemented:
        try:
            length = sample_length(sample)
        except UnknownForm as error:
            form = str(error).partition(" Known forms")[0]
            raise UnknownForm(f"{form} {LENGTH_HOOK}.") from error
    number = _integer(length)
    if number is None:
        raise TypeError(f"The length of a sample must be an integer, got {length!r}.")
    if number < 1:
        raise ValueError(
            f"{describe(sample)} has length {number}. Leave samples without tokens out of the"
            " stream."
        )
    return number


def _integer(value: Any) -> int | None:
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)

"""Packing: samples of a micro-batch one after the other in one sequence, without padding.

Takes the place of the user's padding `collate_fn` in training. What runs along a sample's tokens is
concatenated to (1, tokens of all samples, ...), everything else is collated as torch does it by
default. Which entries run along the tokens is found out once, from samples of different lengths: in
a single micro-batch a vector of 16 features cannot be told from 16 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from lightning_dcp.data.samples import describe
from lightning_dcp.parallel.targets import label_entries

PackSamples = Callable[[list[Any]], Any]

POSITIONS = "position_ids"
"""Entry of a packed batch that says where in its sample each token is."""

HOOK = (
    "Override `pack_samples(self, samples)` of lightning_dcp.DCPDataModuleMixin in your "
    "LightningDataModule to pack them yourself, or train with packing=False"
)

_WHOLE = "sample"  # what the only entry of a sample that is a tensor itself is called


class PackedBatch(NamedTuple):
    """A packed micro-batch on its way through the loader.

    Attributes:
        batch: What `training_step` gets.
        lengths: Tokens of each sample in it, in order.
    """

    batch: Any
    lengths: tuple[int, ...]


def unpacked(data: Any) -> tuple[Any, tuple[int, ...] | None]:
    """A micro-batch as `training_step` gets it, and its samples' lengths if it is packed."""
    return (data.batch, data.lengths) if isinstance(data, PackedBatch) else (data, None)


@dataclass(frozen=True)
class Layout:
    """How samples of a data set are packed.

    Attributes:
        per_token: Names of the entries that have one element (or row) per token; of a tuple the
            places, of a sample that is a tensor itself "sample".
    """

    per_token: tuple[Any, ...]


@dataclass(frozen=True)
class PackingCollate:
    """Makes a `PackedBatch` of samples, in the worker.

    Attributes:
        layout: Of the data set's samples; None where `pack_samples` makes all batches.
        pack_samples: `DCPDataModuleMixin.pack_samples`, asked first.
        mark_borders: Whether the first label of each sample is ignored, as the model itself shifts
            labels by one: the last token of a sample must not predict the first of the next.
        ignore_index: Label that bears no loss.
    """

    layout: Layout | None
    pack_samples: PackSamples | None = None
    mark_borders: bool = False
    ignore_index: int = -100

    def __call__(self, samples: list[Any]) -> PackedBatch:
        """Pack them in the given order.

        Raises:
            ValueError: An entry that cannot be packed, by name, or a wrong `pack_samples`.
        """
        if self.pack_samples is not None:
            packed = self.pack_samples(samples)
            if packed is not NotImplemented:
                return _checked(packed, len(samples))
        assert self.layout is not None, "there is a layout where the hook does not pack"
        return self._pack(samples, self.layout)

    def _pack(self, samples: list[Any], layout: Layout) -> PackedBatch:
        entries = [_entries(sample) for sample in samples]
        lengths = tuple(_length(sample, layout) for sample in entries)
        batch: dict[Any, Any] = {}
        for name in entries[0]:
            values = [sample[name] for sample in entries]
            batch[name] = (
                _concatenate(name, values) if name in layout.per_token else _stack(name, values)
            )
        if self.mark_borders:
            for name in label_entries(batch):
                if name in layout.per_token and not batch[name].is_floating_point():
                    batch[name][0, _starts(lengths)] = self.ignore_index
        first = samples[0]
        if isinstance(first, Mapping):
            batch.setdefault(POSITIONS, torch.cat([torch.arange(n) for n in lengths])[None])
            return PackedBatch(batch, lengths)
        if isinstance(first, tuple):
            values = list(batch.values())
            named = hasattr(first, "_fields")
            return PackedBatch(type(first)(*values) if named else tuple(values), lengths)
        return PackedBatch(batch[_WHOLE], lengths)


def find_layout(samples: Sequence[Any], lengths: Sequence[int]) -> Layout:
    """Which entries of samples run along their tokens.

    Args:
        samples: Some, of different lengths where the data set has any.
        lengths: Theirs, as planned.

    Raises:
        TypeError: Samples of a form that has no entries.
        ValueError: No entry runs along the tokens, or one that does so twice.
    """
    entries = [_entries(sample) for sample in samples]
    found = []
    for name in entries[0]:
        shapes = [_shape(sample.get(name)) for sample in entries]
        if not all(
            shape and shape[0] == length for shape, length in zip(shapes, lengths, strict=True)
        ):
            continue
        along = [
            all(shape[dim] == length for shape, length in zip(shapes, lengths, strict=True))
            for dim in range(1, min(map(len, shapes)))
        ]
        if any(along) and len(set(lengths)) > 1:
            raise ValueError(
                f"Packing: {_called(name)} has tokens of the sample along several of its "
                f"dimensions ({describe(entries[0][name])}), so that it cannot be put one after "
                f"the other. {HOOK}."
            )
        found.append(name)
    if not found:
        raise ValueError(
            f"Packing: no entry of a sample has as many elements as the sample has tokens "
            f"({lengths[0]}): {describe(samples[0])}. {HOOK}."
        )
    return Layout(tuple(found))


def _entries(sample: Any) -> dict[Any, Any]:
    if isinstance(sample, Mapping):
        return dict(sample)
    if isinstance(sample, tuple):
        return dict(enumerate(sample))
    if _shape(sample):
        return {_WHOLE: sample}
    raise TypeError(f"Packing: what to concatenate is not known for {describe(sample)}. {HOOK}.")


def _shape(value: Any) -> tuple[int, ...]:
    """Of a tensor or array, or of a list of numbers; empty for anything else."""
    if isinstance(value, Tensor | np.ndarray):
        return tuple(value.shape)
    if isinstance(value, list) and value and isinstance(value[0], Number):
        return (len(value),)
    return ()


def _length(sample: dict[Any, Any], layout: Layout) -> int:
    lengths = {}
    for name in layout.per_token:
        shape = _shape(sample.get(name))
        if not shape:
            raise ValueError(
                f"Packing: {_called(name)} runs along the tokens of other samples, but is "
                f"{describe(sample.get(name))} here. {HOOK}."
            )
        lengths[name] = shape[0]
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"Packing: a sample's entries must have one element per token each, but have "
            f"{lengths}. {HOOK}."
        )
    return lengths[layout.per_token[0]]


def _concatenate(name: Any, values: list[Any]) -> Tensor:
    tensors = [torch.as_tensor(value) for value in values]
    if len({(tensor.shape[1:], tensor.dtype) for tensor in tensors}) > 1:
        kinds = sorted({f"{tuple(t.shape)} of {t.dtype}" for t in tensors})
        raise ValueError(
            f"Packing: {_called(name)} cannot be put one after the other, its tensors differ in "
            f"more than their number of tokens: {', '.join(kinds[:4])}. {HOOK}."
        )
    return torch.cat(tensors)[None]


def _stack(name: Any, values: list[Any]) -> Any:
    try:
        return default_collate(values)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"Packing: {_called(name)} neither has one element per token nor can it be stacked: "
            f"{describe(values[0])}. {HOOK}."
        ) from error


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)[:-1].tolist()])


def _called(name: Any) -> str:
    return "a sample" if name == _WHOLE else f"entry {name!r} of a sample"


def _checked(packed: Any, num_samples: int) -> PackedBatch:
    if isinstance(packed, tuple) and len(packed) == 2:
        batch, given = packed
        lengths = tuple(int(n) for n in given) if isinstance(given, Sequence | Tensor) else ()
        if len(lengths) == num_samples and min(lengths) > 0:
            return PackedBatch(batch, lengths)
    raise ValueError(
        f"`pack_samples` must return (batch, lengths), with the number of tokens of each of the "
        f"{num_samples} samples, or NotImplemented; got {describe(packed)}."
    )

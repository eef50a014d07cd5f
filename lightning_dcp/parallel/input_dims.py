"""Which dimension of a batch's entries runs along the sequence?

Shape legend:
    B  samples    S  padded length of the micro-batch
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["InputDims", "entries_of", "with_entries"]

#: Entries that every language model's batch has one of; their dimension 1 is S.
_TOKENS = ("input_ids", "inputs_embeds", "ids", "tokens", "inputs", "input", "x")
#: Entries that are (B, S, ...) wherever they come with tokens.
_ALONG = (
    *_TOKENS,
    *("labels", "targets", "target", "label", "y", "shift_labels"),
    *("token_type_ids", "segment_ids", "loss_mask", "label_mask", "special_tokens_mask"),
)
#: Entries whose last dimension is S: (S,), (B, S), or (3, B, S) in some models.
_POSITIONS = ("position_ids", "positions")


class InputDims:
    """Tells the sequence dimension of each entry of a batch, or asks the user.

    Without declaration only the usual names are sliced. An entry of another name that has a
    dimension as long as the sequence is not guessed at, unless it was seen before without one.

    Args:
        declared: entry (key, attribute or index) to dimension; None: the entry stays whole.
    """

    def __init__(self, declared: Mapping[Any, int | None] | None = None) -> None:
        self._declared = dict(declared or {})
        self._whole: set[Any] = set()

    def of(self, entries: Mapping[Any, Any]) -> tuple[int, dict[Any, int]]:
        """S, and the sequence dimension of each entry that has one.

        Args:
            entries: as ``entries_of`` gives them.

        Raises:
            ValueError: where no entry tells the length, a declared one does not fit, or an entry
                leaves it open whether it runs along the sequence.
        """
        tensors = {name: e for name, e in entries.items() if isinstance(e, Tensor)}
        length = self._length(tensors)
        dims: dict[Any, int] = {}
        for name, tensor in tensors.items():
            dim = self._dim(name, tensor, length, tensors)
            if dim is not None:
                dims[name] = dim
        return length, dims

    def _length(self, tensors: Mapping[Any, Tensor]) -> int:
        for name, dim in self._declared.items():
            if dim is not None and name in tensors:
                tensor = tensors[name]
                if not -tensor.dim() <= dim < tensor.dim():
                    raise ValueError(
                        f"input_dims names dimension {dim} of the batch's entry {name!r}, which has"
                        f" shape {tuple(tensor.shape)}"
                    )
                return tensor.shape[dim]
        for name in _TOKENS:
            if name in tensors and tensors[name].dim() >= 2:
                return tensors[name].shape[1]
        if set(tensors) == {0, 1} and all(t.dim() >= 2 for t in tensors.values()):  # (ids, labels)
            return tensors[0].shape[1]
        unknown = [name for name in self._declared if name not in tensors]
        raise ValueError(
            f"shard='inputs': none of the batch's entries {list(tensors)} is known to run along the"
            " sequence. Name their sequence dimensions in the strategy's option input_dims, such as"
            " input_dims={'tokens': 1}"
            + (f"; it names {unknown}, which the batch does not have" if unknown else "")
        )

    def _dim(
        self, name: Any, tensor: Tensor, length: int, tensors: Mapping[Any, Tensor]
    ) -> int | None:
        shape = tuple(tensor.shape)
        if name in self._declared:
            dim = self._declared[name]
            if dim is not None and (
                not -len(shape) <= dim < len(shape) or shape[dim] not in (1, length)
            ):
                raise ValueError(
                    f"input_dims names dimension {dim} of the batch's entry {name!r}, but its shape"
                    f" {shape} does not have the {length} tokens of the sequence there"
                )
            return None if dim is None or shape[dim] != length else dim
        if name in _ALONG or (isinstance(name, int) and set(tensors) == {0, 1}):
            if len(shape) >= 2 and shape[1] == length:
                return 1
        elif name in _POSITIONS and shape[-1:] == (length,):
            return len(shape) - 1
        if length not in shape[1:] and (shape[:1] != (length,) or _is_batch(tensor, tensors)):
            self._whole.add(name)
        if name not in self._whole:
            raise ValueError(
                f"shard='inputs': the batch's entry {name!r} of shape {shape} has a dimension as"
                f" long as the sequence ({length}); whether it runs along it cannot be told. Say so"
                f" in the strategy's option input_dims: {{{name!r}: {_first(shape, length)}}}, or"
                f" {{{name!r}: None}} for an entry that stays whole on each rank, as an attention"
                " mask must"
            )
        return None


def _is_batch(tensor: Tensor, tensors: Mapping[Any, Tensor]) -> bool:
    """Whether dimension 0 may be the samples'."""
    others = [t for t in tensors.values() if t.dim() >= 2]
    return any(t.shape[0] == tensor.shape[0] for t in others)


def _first(shape: tuple[int, ...], length: int) -> int:
    return shape.index(length, 1) if length in shape[1:] else 0


def entries_of(batch: Any) -> dict[Any, Any]:
    """Key (or index, or name of the attribute) to entry.

    Raises:
        TypeError: for a batch of another kind.
    """
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return dict(zip(batch._fields, batch, strict=True))
    if isinstance(batch, list | tuple):
        return dict(enumerate(batch))
    if isinstance(batch, Tensor):
        return {0: batch}
    if hasattr(batch, "__dict__"):
        return dict(vars(batch))
    raise TypeError(
        f"shard='inputs' slices batches that are mappings, tuples or objects with attributes, not a"
        f" {type(batch).__name__}"
    )


def with_entries(batch: Any, changed: Mapping[Any, Any]) -> Any:
    """A copy of the batch, of the same kind, with some entries replaced."""
    if not changed:
        return batch
    if isinstance(batch, Tensor):
        return changed[0]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        named: Any = batch
        return named._replace(**changed)
    if isinstance(batch, list | tuple):
        return type(batch)(changed.get(i, entry) for i, entry in enumerate(batch))
    new = copy.copy(batch)
    for name, entry in changed.items():
        if isinstance(batch, Mapping):
            new[name] = entry
        else:
            setattr(new, name, entry)
    return new

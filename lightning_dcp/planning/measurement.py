"""One measured point of a model's costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_dcp.planning.options import is_power_of_two

__all__ = ["BlockCosts", "Measurement"]

_BLOCK_COSTS = ("forward_s", "backward_s", "saved_bytes", "input_bytes")


@dataclass(frozen=True)
class BlockCosts:
    """One block of one stack.

    Attributes:
        forward_s: Seconds of its forward.
        backward_s: Seconds of its backward; 0 where none reaches it.
        saved_bytes: Bytes it saves for backward on each rank, without its input.
        input_bytes: Bytes of its input on each rank.
    """

    forward_s: float
    backward_s: float
    saved_bytes: float
    input_bytes: float

    def __post_init__(self) -> None:
        _check_costs(self, _BLOCK_COSTS)


@dataclass(frozen=True)
class Measurement:
    """One measured point.

    Attributes:
        batch_size: Samples b.
        seq_len: Padded tokens per sample s, whole (not divided by p).
        sp_size: SP size p.
        forward_s: Seconds of one block's forward.
        backward_s: Seconds of one block's backward.
        rest_s: Seconds of all that is outside the blocks, forward and backward.
        saved_bytes: Bytes one block saves for backward on each rank, without its input.
        input_bytes: Bytes of one block's input on each rank.
        rest_bytes: Bytes saved outside the blocks on each rank.
        others: Blocks of the model's other stacks; "one block" above is the main stack's.
    """

    batch_size: int
    seq_len: int
    sp_size: int
    forward_s: float
    backward_s: float
    rest_s: float
    saved_bytes: float
    input_bytes: float
    rest_bytes: float
    others: tuple[BlockCosts, ...] = ()

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.seq_len < 1 or not is_power_of_two(self.sp_size):
            raise ValueError(
                "A measurement needs batch_size >= 1, seq_len >= 1 and a power of two as sp_size; "
                f"got {self.batch_size}, {self.seq_len}, {self.sp_size}."
            )
        _check_costs(self, (*_BLOCK_COSTS, "rest_s", "rest_bytes"))

    @property
    def stacks(self) -> tuple[BlockCosts, ...]:
        """One block of each stack, the main one first."""
        main = BlockCosts(**{name: getattr(self, name) for name in _BLOCK_COSTS})
        return (main, *self.others)

    def seconds(self) -> tuple[float, ...]:
        """Forward, backward, rest; then forward and backward of each other stack."""
        others = (value for s in self.others for value in (s.forward_s, s.backward_s))
        return (self.forward_s, self.backward_s, self.rest_s, *others)

    def num_bytes(self) -> tuple[float, ...]:
        """Saved, input, rest; then saved and input of each other stack."""
        others = (value for s in self.others for value in (s.saved_bytes, s.input_bytes))
        return (self.saved_bytes, self.input_bytes, self.rest_bytes, *others)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = dataclasses.asdict(self)
        if not self.others:
            del values["others"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measurement:
        """Inverse of :meth:`to_dict`.

        Raises:
            TypeError: For unknown or missing values.
        """
        others = tuple(BlockCosts(**other) for other in values.get("others", ()))
        return cls(**{**values, "others": others})


def _check_costs(costs: object, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(costs, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and not negative; got {value}.")

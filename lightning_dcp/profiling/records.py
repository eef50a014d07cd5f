"""What a probe notes of the blocks of one stack, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_dcp.profiling.clock import Clock


@dataclass(frozen=True)
class StackCosts:
    """What one rank measured of one stack in one pass over one micro-batch; all 0: not called.

    Attributes:
        forward_s: Forward of the measured block.
        backward_s: Its backward; 0 where none reaches it (frozen, and before all that is trained).
        saved_bytes: Saved for backward by it, without its input; ``None`` where not counted.
        input_bytes: Its input.
        input_shape: Shape of the stack's whole, not yet sliced input; empty where it was not
            called.
    """

    forward_s: float
    backward_s: float
    saved_bytes: float | None
    input_bytes: float | None
    input_shape: tuple[int, ...]


@dataclass
class Call:
    """One call of a block: its moments, in a clock's own unit, and its bytes."""

    forward_start: Any = None
    forward_end: Any = None
    backward_start: Any = None
    backward_end: Any = None
    input_storages: dict[int, int] = field(default_factory=dict)
    output_storages: dict[int, int] = field(default_factory=dict)
    allocated_bytes: int = 0
    # Inputs and outputs, while bytes are counted on a CPU: the address of a freed one may come back
    # as another's.
    kept: list[torch.Tensor] = field(default_factory=list)


@dataclass
class BlockRecord:
    """All calls of a block in one step; most steps call each block once."""

    calls: list[Call] = field(default_factory=list)
    last_parameter: Any = None

    @property
    def input_storages(self) -> dict[int, int]:
        """Of all calls."""
        return {key: size for call in self.calls for key, size in call.input_storages.items()}

    @property
    def forward_calls(self) -> list[Call]:
        """Those whose forward went through."""
        return [call for call in self.calls if call.forward_end is not None]

    @property
    def backward_calls(self) -> list[Call]:
        """Those that the backward came to."""
        return [call for call in self.calls if call.backward_start is not None]

    @property
    def output_storages(self) -> dict[int, int]:
        """Of all calls."""
        return {key: size for call in self.calls for key, size in call.output_storages.items()}


@dataclass
class StackRecord:
    """The blocks of a stack that ran: the last is measured, those before it warm up."""

    records: tuple[BlockRecord, ...]
    first_index: int  # of its first block among those of all stacks
    input_shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64

    @property
    def measured(self) -> BlockRecord:
        """That of the block that counts."""
        return self.records[-1]

    @property
    def measured_index(self) -> int:
        """Of the block that counts among those of all stacks."""
        return self.first_index + len(self.records) - 1

    def forward_s(self, clock: Clock) -> list[float]:
        """Of each block."""
        return [
            sum(clock.seconds(call.forward_start, call.forward_end) for call in r.forward_calls)
            for r in self.records
        ]

    def backward_s(self, clock: Clock) -> list[float]:
        """Of each block."""
        return [_backward_s(record, clock) for record in self.records]


def _backward_s(record: BlockRecord, clock: Clock) -> float:
    spans = (
        (call.backward_start, call.backward_end or record.last_parameter or call.backward_start)
        for call in record.backward_calls
    )
    return sum(clock.seconds(start, end) for start, end in spans)


def check_ran(stacks: Sequence[StackRecord]) -> None:
    """An error where no stack was called whole, or the backward came to none.

    Raises:
        RuntimeError: Says what to do.
    """
    called = [s for s in stacks if all(record.forward_calls for record in s.records)]
    if not called:
        raise RuntimeError(
            "A repeated block was not called by the training step, so that its cost cannot be "
            "measured. Name the blocks that the step uses (`blocks`)."
        )
    # Not to all of a stack's: those before the measured block may be frozen.
    if not any(s.measured.backward_calls for s in called):
        raise RuntimeError(
            "The loss does not depend on the output of a repeated block, so that its backward "
            "cannot be measured. Name the blocks that the loss depends on (`blocks`)."
        )

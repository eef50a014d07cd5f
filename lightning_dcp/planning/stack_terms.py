"""How costs of single blocks add up over stacks of blocks, some of them recomputed.

Columns of seconds: forward, backward, rest; then forward and backward of each further stack. Of
bytes likewise: saved, input, rest; saved and input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_dcp.planning.fitting import FloatArray
from lightning_dcp.planning.measurement import Measurement

__all__ = ["block_bytes", "block_seconds", "recompute_order", "recomputed"]

_TINY_S = 1e-12


def recompute_order(measurements: Sequence[Measurement]) -> tuple[int, ...]:
    """Stacks by the bytes that a second of recomputation saves, the best first."""

    def worth(stack: int) -> float:
        saved = sum(m.stacks[stack].saved_bytes for m in measurements)
        return saved / max(sum(m.stacks[stack].forward_s for m in measurements), _TINY_S)

    return tuple(sorted(range(len(measurements[0].stacks)), key=lambda i: (-worth(i), i)))


def recomputed(
    stack_blocks: Sequence[int], order: Sequence[int], r: Any
) -> list[npt.NDArray[np.int64]]:
    """How many blocks of each stack are among the first r of all."""
    left = np.asarray(r)
    counts = [left] * len(stack_blocks)
    for i in order:
        counts[i] = np.minimum(left, stack_blocks[i])
        left = left - counts[i]
    return counts


def block_seconds(
    times: FloatArray, stack_blocks: Sequence[int], again: Sequence[npt.NDArray[Any]]
) -> FloatArray:
    """Seconds of all blocks, of which ``again`` of each stack run forward twice."""
    total = np.zeros(())
    for i, num_blocks in enumerate(stack_blocks):
        forward, backward = _columns(times, i)
        total = total + num_blocks * (forward + backward) + again[i] * forward
    return total


def block_bytes(
    bytes_: FloatArray, stack_blocks: Sequence[int], again: Sequence[npt.NDArray[Any]]
) -> FloatArray:
    """Most bytes that all blocks hold, of which ``again`` of each stack keep their input only."""
    total, live = np.zeros(()), np.zeros(())
    for i, num_blocks in enumerate(stack_blocks):
        saved, inputs = _columns(bytes_, i)
        total = total + ((num_blocks - again[i]) * saved + num_blocks * inputs)
        # NOTE (live blocks) of cost_model.py.
        live = np.maximum(live, np.where(again[i] == num_blocks, saved, 0.0))
    return np.asarray(live + total)


def _columns(values: FloatArray, stack: int) -> tuple[FloatArray, FloatArray]:
    first = 0 if stack == 0 else 1 + 2 * stack
    return values[..., first], values[..., first + 1]

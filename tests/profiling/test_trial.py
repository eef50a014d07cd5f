"""One result for all ranks, and which errors mean that memory ran out."""

from __future__ import annotations

import pytest
import torch

from lightning_dcp.profiling.probe import StepCosts
from lightning_dcp.profiling.trial import _combine, _Outcome, is_out_of_memory


def costs(forward_s: float, rest_s: float = 1.0, saved_bytes: float | None = None) -> StepCosts:
    return StepCosts(
        total_s=forward_s + 2.0 + rest_s,
        forward_s=forward_s,
        backward_s=2.0,
        rest_s=rest_s,
        saved_bytes=saved_bytes,
        input_bytes=saved_bytes,
        rest_bytes=saved_bytes,
        input_shape=(1, 8, 4),
        dtype="float32",
    )


def outcome(first_rank: int | None, *passes: StepCosts) -> _Outcome:
    return _Outcome(
        first_rank=first_rank,
        passes=passes,
        error=None,
        out_of_memory=False,
        wall_s=1.0,
        elapsed_s=1.0,
    )


def test_median_of_passes_slowest_of_a_group_median_of_groups() -> None:
    timed = [
        outcome(0, costs(1.0), costs(2.0), costs(90.0)),  # an interruption does not count
        outcome(0, costs(4.0), costs(4.0), costs(4.0)),  # the slowest of its group: 4
        outcome(2, costs(8.0), costs(8.0), costs(8.0)),  # 8
        outcome(2, costs(1.0), costs(1.0), costs(1.0)),
        outcome(4, costs(5.0), costs(5.0), costs(5.0)),  # 5, the median group
        outcome(4, costs(5.0), costs(5.0), costs(5.0)),
        outcome(None),  # in no group
    ]
    counted = [outcome(0, costs(1.0, saved_bytes=float(rank))) for rank in range(6)]
    result = _combine(counted, timed)
    assert result.forward_s == 5.0
    assert (result.saved_bytes, result.input_bytes, result.rest_bytes) == (5.0, 5.0, 5.0)


def test_an_interruption_hits_one_part_of_a_pass_only() -> None:
    passes = (costs(1.0, rest_s=50.0), costs(60.0, rest_s=1.0), costs(1.0, rest_s=1.0))
    result = _combine([outcome(0, costs(1.0, saved_bytes=1.0))], [outcome(0, *passes)])
    assert (result.forward_s, result.rest_s) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ..."), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("out of memory"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected

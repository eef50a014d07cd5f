"""Peak bytes of storages that operations make, on a CPU."""

from __future__ import annotations

import gc

import pytest
import torch

from lightning_dcp.planning.lengths import as_lengths
from lightning_dcp.profiling.evaluation_probe import trial_lengths
from lightning_dcp.profiling.live_bytes import peak_bytes

CPU = torch.device("cpu")
N = 4000  # bytes of what `x` is


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_peak_is_what_lives_at_once(context: type[torch.no_grad]) -> None:
    x = torch.randn(1000)
    with context(), peak_bytes(CPU) as peak:
        y = x + 1  # 1 alive
        z = y.view(10, 100).t().contiguous()  # 2: a copy; the views are none
        del y
        z.mul_(2)  # in place
        w = z * 2  # 2
        del z
        assert peak() == 2 * N
        v = w + w
        u = v + w  # 3
        del u, v, w
    assert peak() == 3 * N


def test_what_was_there_before_does_not_count() -> None:
    x = torch.randn(1000)
    with torch.no_grad(), peak_bytes(CPU) as peak:
        x.add_(1)
        x.view(-1)[:10].zero_()
    assert peak() == 0
    assert gc.isenabled()


def test_trial_lengths_occur_and_are_apart() -> None:
    lengths = as_lengths([5, 7, 300, 900, 1000, 40_000, 64, 260])
    assert trial_lengths(lengths) == (64, 260, 1000)
    assert trial_lengths(as_lengths([9, 9])) == (9,)
    assert trial_lengths(as_lengths([5000, 6000])) == (5000,)

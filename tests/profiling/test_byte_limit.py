"""A memory limit that is held on a CPU, where nobody else holds one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dcp.profiling.byte_limit import ByteLimit

CPU = torch.device("cpu")
N, WIDTH, DEPTH = 1000, 100, 4
ACTIVATION = N * WIDTH * 4
GRADIENTS = DEPTH * WIDTH * WIDTH * 4


@pytest.fixture
def layers() -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))


def forward(layers: nn.ModuleList, *, recompute: bool, amp: bool = False) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
        x = torch.ones(N, WIDTH)
        for layer in layers:

            def step(x: Tensor, layer: nn.Module = layer) -> Tensor:
                return torch.tanh(torch.tanh(layer(x)))

            x = checkpoint(step, x, use_reentrant=False) if recompute else step(x)
        return x.float().sum()


def needed(layers: nn.ModuleList, **how: bool) -> int:
    for parameter in layers.parameters():
        parameter.grad = None
    limit = ByteLimit(CPU, 2**40, fixed_bytes=500)
    with limit.held():
        forward(layers, **how).backward()
    return limit.used_bytes - 500


def test_forward_and_backward_count(layers: nn.ModuleList) -> None:
    # The input, three of each layer without the last one's first, and what an operation makes.
    plain = needed(layers, recompute=False)
    assert 2 * DEPTH * ACTIVATION < plain <= (2 * DEPTH + 3) * ACTIVATION + GRADIENTS + 100
    # Recomputed: an input of each layer, and one layer that runs again in the backward pass.
    again = needed(layers, recompute=True)
    assert (DEPTH + 2) * ACTIVATION < again < (DEPTH + 5) * ACTIVATION + GRADIENTS
    assert again < plain
    assert needed(layers, recompute=False, amp=True) < 0.7 * plain


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_a_byte_less_is_too_little(layers: nn.ModuleList, recompute: bool, amp: bool) -> None:
    most = needed(layers, recompute=recompute, amp=amp)
    for parameter in layers.parameters():
        parameter.grad = None
    with ByteLimit(CPU, most + 500, fixed_bytes=500).held():
        forward(layers, recompute=recompute, amp=amp).backward()
    for parameter in layers.parameters():
        parameter.grad = None
    limit = ByteLimit(CPU, most + 499, fixed_bytes=500)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"), limit.held():
        forward(layers, recompute=recompute, amp=amp).backward()
    assert limit.used_bytes > most + 499


def test_gradients_that_are_to_come_count_once(layers: nn.ModuleList) -> None:
    most = needed(layers, recompute=False) + GRADIENTS  # fixed bytes hold them, too
    for parameter in layers.parameters():
        parameter.grad = None
    limit = ByteLimit(CPU, most - GRADIENTS, fixed_bytes=GRADIENTS)
    with limit.held(missing_bytes=GRADIENTS):
        forward(layers, recompute=False).backward()


def test_nothing_is_left_behind(layers: nn.ModuleList) -> None:
    limit = ByteLimit(CPU, 1000, fixed_bytes=0)
    with pytest.raises(torch.OutOfMemoryError), limit.held():
        forward(layers, recompute=False)
    limit.remove()
    limit.remove()
    forward(layers, recompute=True).backward()

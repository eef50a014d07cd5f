"""Profiling must leave the user's model, and all randomness, bit-identical."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from lightning_dcp.profiling.preserve import preserve


class Restless(nn.Module):
    """Everything that a training step may change: statistics, metrics, counters, generators."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(4, 2).requires_grad_(False)
        self.register_buffer("ema", torch.zeros(4), persistent=False)
        self.mean_loss = torchmetrics.MeanMetric()
        self.seen = torchmetrics.CatMetric()
        self.num_steps = 3
        self.history: list[float] = [1.0]
        self.by_name = {"a": 1}
        self.scratch = torch.ones(3)
        self.generator = torch.Generator().manual_seed(7)
        self.np_generator = np.random.default_rng(3)
        self.py_generator = random.Random(5)

    def training_step(self) -> torch.Tensor:
        x = torch.randn(8, 4) + random.random() + float(np.random.rand())  # noqa: NPY002
        x = x + torch.rand(8, 4, generator=self.generator) * self.np_generator.random()
        x = x + self.py_generator.random()
        loss = self.frozen(self.drop(self.norm(self.first(x)))).square().mean()
        self.ema.lerp_(self.first.weight.detach().mean(0), 0.5)
        self.mean_loss(loss)
        self.seen.update(loss)
        self.num_steps += 1
        self.history.append(loss.item())
        self.by_name["b"] = 2
        self.scratch *= 2
        return loss

    def mistreat(self) -> None:
        """Changes that a step should not make, and that must not survive profiling either."""
        with torch.no_grad():
            self.first.weight.add_(1.0)
        self.first.bias.data = torch.full((4,), 9.0)
        self.frozen.weight = nn.Parameter(torch.zeros(2, 4))
        self.frozen.bias.requires_grad_(True)
        self.ema = torch.full((4,), 5.0)
        self.norm.eval()


def fingerprint(module: Restless) -> dict[str, object]:
    """Bits of all state, so that two of them can be compared with ``==``."""

    def bits(tensor: torch.Tensor | None) -> bytes | None:
        return None if tensor is None else tensor.detach().numpy().tobytes()

    state: dict[str, object] = {}
    for name, parameter in module.named_parameters():
        state[name] = (bits(parameter), bits(parameter.grad), parameter.requires_grad)
        state[f"{name} objects"] = (id(parameter), id(parameter.grad), parameter.data_ptr())
    for name, buffer in module.named_buffers():
        state[name] = (bits(buffer), id(buffer))
    state["modes"] = [m.training for m in module.modules()]
    state["metrics"] = (
        bits(module.mean_loss.mean_value),
        bits(module.mean_loss.weight),
        module.mean_loss._update_count,
        [bits(value) for value in module.seen.value],
        module.seen._computed,
    )
    state["plain"] = (module.num_steps, list(module.history), dict(module.by_name))
    state["scratch"] = bits(module.scratch)
    state["own generators"] = (
        bits(module.generator.get_state()),
        repr(module.np_generator.bit_generator.state),
        module.py_generator.getstate(),
    )
    state["rng"] = (
        bits(torch.get_rng_state()),
        random.getstate(),
        repr(np.random.get_state(legacy=False)),  # noqa: NPY002
    )
    return state


@pytest.fixture
def module() -> Restless:
    torch.manual_seed(0)
    module = Restless()
    module.training_step().backward()  # gradients, statistics and metrics that are not fresh
    module.first.bias.grad = None  # ... and one gradient that is absent
    module.drop.eval()
    return module


def test_state_is_bit_identical(module: Restless) -> None:
    before = fingerprint(module)
    with preserve(module):
        module.train()
        for _ in range(2):
            module.training_step().backward()
        assert fingerprint(module) != before
    assert fingerprint(module) == before


def test_state_is_bit_identical_when_the_body_raises(module: Restless) -> None:
    before = fingerprint(module)

    def fail() -> None:
        with preserve(module):
            module.training_step().backward()
            module.mistreat()
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert fingerprint(module) == before


def test_replaced_objects_and_storages_come_back(module: Restless) -> None:
    before = fingerprint(module)
    with preserve(module):
        module.mistreat()
        module.zero_grad(set_to_none=True)
    assert fingerprint(module) == before


def test_metric_continues_as_if_nothing_had_happened(module: Restless) -> None:
    module.seen.reset()
    with preserve(module):
        module.seen.update(torch.tensor(5.0))
        assert module.seen.compute() == 5.0
    module.seen.update(torch.tensor(1.0))
    assert module.seen.compute() == 1.0


def test_tensors_made_in_inference_mode(module: Restless) -> None:
    with torch.inference_mode():
        module.scratch = torch.ones(3)
    with preserve(module), torch.inference_mode():
        module.scratch.zero_()
    assert module.scratch.tolist() == [1.0, 1.0, 1.0]


def test_random_draws_continue_where_they_were(module: Restless) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with preserve(module):
        torch.rand(100)
        torch.manual_seed(5)
    assert torch.equal(torch.rand(3), expected)


def test_lazy_parameters_are_left_alone() -> None:
    module = nn.Sequential(nn.LazyLinear(2))
    with preserve(module):
        module(torch.zeros(1, 3))
    assert module[0].weight.shape == (2, 3)

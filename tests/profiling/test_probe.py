"""What belongs to the measured block, what to the rest of the step."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_dcp.profiling.meter import metered
from lightning_dcp.profiling.probe import StepCosts, StepProbe

CPU = torch.device("cpu")
B, S, D = 3, 5, 8
HIDDEN_BYTES = B * S * D * 4


class _SlowIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad, None, None


class SleepyBlock(nn.Module):
    """Takes a known time in forward and backward."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seconds = (forward_s, backward_s)

    def forward(self, x):
        return _SlowIdentity.apply(x * self.weight, *self.seconds)


class Block(nn.Module):
    """Saves the output of its linear layer, for GELU, beside its input and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        return nn.functional.gelu(self.linear(x))


class Model(nn.Module):
    """Embedding, blocks, head: what is outside the blocks takes and saves something as well."""

    def __init__(self, blocks, *, train_embedding: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(2, D).requires_grad_(train_embedding)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(D, 1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def measure(model: nn.Module, step=None, *, num_blocks: int = 2, count_bytes: bool) -> StepCosts:
    inputs = torch.randn(B, S, 2)
    with metered(list(model.blocks)[:num_blocks]) as meters:
        probe = StepProbe(meters, module=model, device=CPU, count_bytes=count_bytes)
        with probe:
            loss = step(inputs) if step is not None else model(inputs)
            loss.backward()
    return probe.costs()


def test_seconds_of_the_measured_block_and_of_the_rest():
    # The first block is three times as slow: only the second one must count.
    model = Model([SleepyBlock(0.06, 0.12), SleepyBlock(0.02, 0.06)])
    rest = SleepyBlock(0.03, 0.05)

    def step(inputs):
        return rest(model(inputs))

    # A busy machine wakes sleepers late; the least of several is near the truth.
    several = [measure(model, step, count_bytes=False) for _ in range(5)]
    assert 0.9 < min(costs.forward_s for costs in several) / 0.02 < 2.0
    assert 0.9 < min(costs.backward_s for costs in several) / 0.06 < 1.7
    assert 0.9 < min(costs.rest_s for costs in several) / 0.08 < 2.0
    assert all(costs.total_s >= 0.34 for costs in several)
    assert all(costs.saved_bytes is None for costs in several)


def test_backward_ends_with_the_parameters_where_the_input_needs_no_gradient():
    model = Model([SleepyBlock(0.0, 0.04)], train_embedding=False)
    several = [measure(model, num_blocks=1, count_bytes=False) for _ in range(3)]
    assert 0.9 < min(costs.backward_s for costs in several) / 0.04 < 2.0


def test_a_block_called_twice_counts_twice():
    model = Model([SleepyBlock(0.0, 0.0), SleepyBlock(0.02, 0.03)])
    several = [
        measure(model, lambda x: model(x) + model(2 * x), count_bytes=True) for _ in range(3)
    ]
    assert 0.9 < min(costs.forward_s for costs in several) / 0.04 < 1.8
    assert 0.9 < min(costs.backward_s for costs in several) / 0.06 < 1.8
    assert several[0].input_bytes == 2 * HIDDEN_BYTES


def test_bytes_of_linear_and_gelu_are_exact():
    costs = measure(Model([Block(), Block(), Block()]), count_bytes=True)
    assert costs.saved_bytes == HIDDEN_BYTES  # what GELU saves; input and weight do not count
    assert costs.input_bytes == HIDDEN_BYTES
    # Embedding: its input. Third block here runs outside the two: its GELU's input, its own input
    # and its output, saved by the head. The square: the head's output.
    inputs, square = B * S * 2 * 4, B * S * 4
    assert costs.rest_bytes == inputs + square + 3 * HIDDEN_BYTES
    assert costs.input_shape == (B, S, D)
    assert costs.dtype == "float32"


class MaskedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.register_buffer("table", torch.ones(D))

    def forward(self, x, mask):
        return (x * self.scale * self.table).sin() * mask


class MaskedModel(Model):
    def forward(self, x):
        mask = torch.ones(S, 1)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(x).square().mean()


def test_what_blocks_share_is_in_the_rest_once():
    costs = measure(MaskedModel([MaskedBlock(), MaskedBlock()]), count_bytes=True)
    # Own: the sine's input alone. Nothing else of the block needs a gradient but its input and its
    # scale; the table is the block's own buffer, the mask is everybody's.
    assert costs.saved_bytes == HIDDEN_BYTES
    inputs, square, mask = B * S * 2 * 4, B * S * 4, S * 4
    assert costs.rest_bytes == inputs + square + mask + HIDDEN_BYTES


def test_expanded_and_viewed_tensors_count_by_storage():
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, 2 * D)

        def forward(self, x):
            a, b = self.linear(x).chunk(2, dim=-1)
            return a * b + x

    costs = measure(Model([Split(), Split()]), count_bytes=True)
    assert costs.saved_bytes == 2 * HIDDEN_BYTES  # two views of one storage


def test_a_checkpointed_block_saves_nothing_but_its_input():
    class Checkpointed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    costs = measure(Model([Checkpointed(), Checkpointed()]), count_bytes=True)
    assert costs.saved_bytes == 0
    assert costs.input_bytes == HIDDEN_BYTES


def test_autocast_counts_as_the_computation_type():
    model = Model([Block(), Block()])

    def step(inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(inputs)

    costs = measure(model, step, count_bytes=True)
    assert costs.dtype == "bfloat16"
    # GELU's input in half the bytes, and the weight's copy in bfloat16, which lives until backward.
    assert costs.saved_bytes == HIDDEN_BYTES / 2 + D * D * 2


def test_all_hooks_are_gone_afterwards():
    model = Model([Block(), Block()])
    measure(model, count_bytes=True)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks


def test_blocks_that_do_not_run_or_do_not_matter_are_errors():
    model = Model([Block(), Block()])
    with pytest.raises(RuntimeError, match="was not called by the training step"):
        measure(model, lambda x: model.embed(x).sum(), count_bytes=False)

    def ignore_blocks(inputs):
        model(inputs)
        return model.embed(inputs).sum()

    with pytest.raises(RuntimeError, match="does not depend on the output"):
        measure(model, ignore_blocks, count_bytes=False)

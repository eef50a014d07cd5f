"""Attention that is easily missed or made wrong: torch's fused layers, by hand, with dropout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_dcp.parallel import BlockRuntime, Topology, find_blocks
from lightning_dcp.profiling.sharding_check import ShardingMismatch, check_sharding
from lightning_dcp.profiling.trial import Step
from tests.parallel.models import build, make_batch, mean_loss, observed_runtime
from tests.worlds import World

WIDTH, HEADS = 16, 4


@pytest.fixture(scope="module")
def world():
    with World(4) as world:
        yield world


# ---------------------------------------------------------------------- torch's fused layers


def evaluated(rank: int, spec: dict[str, Any], nested: bool, sp_size: int) -> tuple[float, bool]:
    """Relative difference of a loss in evaluation, and whether the fused layers are on after."""
    topology = Topology(4, rank)
    topology.create_groups()
    model: Any = build(spec)
    if nested:  # padded samples become nested tensors before the first layer
        model.encoder.enable_nested_tensor = model.encoder.use_nested_tensor = True
    runtime = observed_runtime(model, topology)
    model.eval()
    batch = make_batch(13, 3, torch.float64)
    group = topology.group(rank - rank % sp_size, sp_size)
    with torch.no_grad():
        runtime.detach()
        whole = mean_loss(model, batch)
        runtime.attach()
        with runtime.micro_batch(group=group):
            sharded = mean_loss(model, batch)
    return float((sharded / whole - 1).abs()), torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(
    ("spec", "nested"),
    [
        ({}, False),
        ({"mask": "padding"}, False),
        ({"mask": "padding"}, True),
        ({"mask": "both"}, False),
        ({"own": "no_weights"}, False),
        ({"own": "weights"}, False),
    ],
)
def test_evaluation_of_torchs_layers(world, spec, nested):
    for error, fused_layers_are_on in world.run(evaluated, spec, nested, 2):
        assert error <= 1e-12
        assert fused_layers_are_on


# ---------------------------------------------------------------------- attention by hand


class HalfSeenBlock(nn.Module):
    """One attention through torch's function, then one that is a matrix product and a softmax."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.gate = nn.Parameter(torch.zeros(()))  # hides the second at the start of training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.by_hand:
            weights = (k @ q.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
            x = x + self.gate * (weights @ v).transpose(1, 2).flatten(2)
        return x


def checked(rank: int, by_hand: bool) -> str:
    topology = Topology(4, rank)
    topology.create_groups()
    torch.manual_seed(1)
    model = nn.Sequential(*(HalfSeenBlock(by_hand) for _ in range(2))).double()
    runtime = BlockRuntime(find_blocks(model), topology)
    runtime.attach()

    def make_batch(batch_size: int, length: int) -> torch.Tensor:
        return torch.randn(batch_size, length, WIDTH, dtype=torch.float64)

    for length in (8, 11):
        with runtime.micro_batch(group=topology.group(rank, 1), observe=True):
            model(make_batch(2, length))
    assert runtime.sp_size_exclusions([2, 4]) == {}  # nothing to be seen in shapes
    step = Step(
        step=lambda batch: model(batch).square().mean(),
        make_batch=make_batch,
        module=model,
        runtime=runtime,
        topology=topology,
        device=torch.device("cpu"),
    )

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * 4
        dist.all_gather_object(values, value)
        return values

    try:
        excluded = check_sharding(
            step,
            sp_sizes=[2, 4],
            batch_size=2,
            seq_len=13,
            compute_dtype=torch.float64,
            gather=gather,
        )
    except ShardingMismatch as mismatch:
        return str(mismatch)
    assert excluded == {}
    return ""


def test_attention_by_hand_beside_a_seen_one_is_found_out(world):
    assert world.run(checked, False) == [""] * 4
    for message in world.run(checked, True):
        assert message != ""


# ---------------------------------------------------------------------- dropout in attention


class DroppingBlock(nn.Module):
    """Sums values with weights that dropout has hit: uniform, so that the output counts them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q = torch.zeros_like(v)
        return F.scaled_dot_product_attention(q, q, v, dropout_p=0.25).transpose(1, 2).flatten(2)


def dropped(rank: int, sp_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(draws, B, S, H) shares of weights kept, and the group's heads of one draw, as rank sees."""
    topology = Topology(4, rank)
    topology.create_groups()
    model = nn.Sequential(DroppingBlock()).double()
    runtime = BlockRuntime(find_blocks(model, "0"), topology)
    runtime.attach()
    x = torch.ones(2, 22, WIDTH, dtype=torch.float64)
    for length in (8, 22):
        with runtime.micro_batch(group=topology.group(rank, 1), observe=True):
            model(x[:, :length])
    group = topology.group(rank - rank % sp_size, sp_size)
    draws = []
    for index in range(12):
        with runtime.micro_batch(group=group, rng_key=(1, index, group.first_rank)):
            draws.append(model(x).unflatten(-1, (HEADS, -1))[..., 0])
    return torch.stack(draws), draws[0]


@pytest.mark.parametrize("sp_size", [2, 4])
def test_dropout_in_attention(world, sp_size):
    """Independent in all heads, samples and groups, the same on the ranks of a group; unbiased."""
    results = world.run(dropped, sp_size)
    for rank, (_, first) in enumerate(results):
        leader = results[rank - rank % sp_size][1]
        assert torch.equal(first, leader)
    if sp_size == 2:
        assert not torch.equal(results[0][1], results[2][1])
    draws = results[0][0]
    heads = [draws[0, b, :, h] for b in range(2) for h in range(HEADS)]
    assert all(not torch.equal(a, b) for i, a in enumerate(heads) for b in heads[:i])
    # each of n outputs is a mean of 22 weights of mean 1 and variance p / (1 - p)
    spread = math.sqrt(0.25 / 0.75 / 22 / draws.numel())
    assert abs(float(draws.mean()) - 1) < 4 * spread
    assert float(draws.var()) == pytest.approx(0.25 / 0.75 / 22, rel=0.15)

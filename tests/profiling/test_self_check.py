"""The self-check names what is to blame: the module, or the parameter whose gradient is wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_dcp.parallel.blocks import find_blocks
from lightning_dcp.parallel.runtime import BlockRuntime
from lightning_dcp.parallel.topology import Topology
from lightning_dcp.profiling.gradient_sketch import sketch_gradients, wrong_gradients
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.profiling.profiler import profile_costs
from lightning_dcp.profiling.sharding_check import ShardingMismatch, check_sharding
from lightning_dcp.profiling.trial import Step
from tests.worlds import World

WIDTH, HEADS, LENGTH = 16, 4, 37


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def heads(self, x):
        b, s, _ = x.shape
        return (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))

    def forward(self, x):
        a = F.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return self.out(a.transpose(1, 2).flatten(2))


class HandWritten(Attention):
    """Attends by hand beside the call that is exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        a = self.drop(scores) @ v
        return super().forward(x) + self.out(a.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class MeanMLP(MLP):
    def forward(self, x):
        return super().forward(x - x.mean(1, keepdim=True))


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(1, keepdim=True)  # of this rank's tokens


class WrongBackwardMLP(MLP):
    def forward(self, x):
        return self.down(_WrongBackward.apply(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, attention=Attention, mlp=MLP) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention, self.mlp = attention(), mlp()
        self.drop = nn.Dropout(0.2)
        self.gate = nn.Parameter(torch.zeros(()))  # as in a layer scale: hides what is behind it

    def forward(self, x):
        x = x + self.gate * self.drop(self.attention(self.norms[0](x)))
        return x + self.gate * self.mlp(self.norms[1](x))


class CausalConvBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x):
        return super().forward(x + self.conv(F.pad(x.mT, (2, 0))).mT)


class PositionBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(64, WIDTH)

    def forward(self, x):
        return super().forward(x + self.positions(torch.arange(x.shape[1])))


class Model(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)
        self.layers = nn.ModuleList([Block(), make(), make()])
        self.head = nn.Linear(WIDTH, 30)

    def step(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


MODELS = {
    "right": Block,
    "convolution": CausalConvBlock,
    "mean in the MLP": lambda: Block(mlp=MeanMLP),
    "local positions": PositionBlock,
    "attention by hand": lambda: Block(attention=HandWritten),
    "wrong backward": lambda: Block(mlp=WrongBackwardMLP),
}


def gather(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def self_check(rank: int, name: str, dtype: torch.dtype, autocast: bool = False) -> str:
    topology = Topology(2, rank)
    topology.create_groups()
    torch.manual_seed(1)
    model = Model(MODELS[name]).to(dtype)
    runtime = BlockRuntime(find_blocks(model), topology)
    runtime.attach()

    def run(tokens):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model.step(tokens)

    step = Step(
        step=run,
        make_batch=lambda b, s: torch.randint(30, (b, s)),
        module=model,
        runtime=runtime,
        topology=topology,
        device=torch.device("cpu"),
    )
    for length in (12, 17, 40):
        with runtime.micro_batch(group=topology.group(rank, 1), observe=True):
            run(step.batch(2, length))
    try:
        found = check_sharding(
            step,
            sp_sizes=[2],
            batch_size=2,
            seq_len=LENGTH,
            compute_dtype=torch.bfloat16 if autocast else dtype,
            gather=gather,
        )
    except ShardingMismatch as error:
        return str(error)
    finally:
        runtime.detach()
    return str(found)


@pytest.fixture(scope="module")
def world():
    with World(2) as world:
        yield world


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_right_model_passes(world, dtype) -> None:
    """With a bias of the keys, whose gradient is nothing but rounding."""
    assert world.run(self_check, "right", dtype) == ["{}"] * 2
    if dtype is torch.float32:
        assert world.run(self_check, "right", dtype, True) == ["{}"] * 2


@pytest.mark.parametrize(
    ("name", "blamed"),
    [
        ("convolution", "`layers.1.conv` (Conv1d) in block `layers.1`: its output differs"),
        ("mean in the MLP", "`layers.1.mlp` (MeanMLP) in block `layers.1`: what it gives to"),
        ("local positions", "`layers.1` (PositionBlock): what it gives to"),
        (
            "attention by hand",
            "`layers.1.attention` (HandWritten) in block `layers.1`: what it gives to"
            " `layers.1.attention.drop`, of shape (2, 4, 19, 19) instead of (2, 4, 37, 37),",
        ),
        ("wrong backward", "is `layers.2.mlp.up."),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_to_blame_is_named(world, name, blamed, dtype) -> None:
    own, other = world.run(self_check, name, dtype)
    assert own == other
    assert blamed in own and "planning.sp_sizes=[1]" in own, own
    assert ("same loss, but other gradients" in own) is (name == "wrong backward")


def test_sketches_tell_gradients_apart() -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(40, 50)), nn.Parameter(torch.zeros(7))]
    gradients = [torch.randn_like(p) for p in parameters]

    def sketch(changes=(0.0, 0.0)):
        for parameter, gradient, change in zip(parameters, gradients, changes, strict=True):
            parameter.grad = gradient + change * torch.randn_like(gradient)
        return sketch_gradients(parameters)

    whole, moved = sketch(), sketch((1e-7, 1e-7))
    assert wrong_gradients(sketch((1e-7, 1e-7)), whole, moved, 1e-4) == {}
    assert list(wrong_gradients(sketch((0.0, 1e-2)), whole, moved, 1e-4)) == [1]
    assert list(wrong_gradients(sketch((1e-2, 0.0)), whole, moved, 1e-4)) == [0]
    assert list(wrong_gradients(sketch((float("nan"), 0.0)), whole, moved, 1e-4)) == [0]


class RunningInstanceNorm(MLP):
    """Mixes positions in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)

    def forward(self, x):
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2))


class LogLength(Attention):
    """Scores grow with the logarithm of the length, beyond 64 tokens."""

    def heads(self, x):
        q, k, v = super().heads(x)
        return q * max(1.0, math.log(x.shape[1], 64)), k, v


MODELS["instance norm"] = lambda: Block(mlp=RunningInstanceNorm)
MODELS["logarithm of the length"] = lambda: Block(attention=LogLength)


def test_a_norm_that_mixes_positions_in_training_only(world) -> None:
    for text in world.run(self_check, "instance norm", torch.float32):
        assert "`layers.1.mlp.norm` (InstanceNorm1d) in block `layers.1`: its output" in text


def profile_of(rank: int, name: str) -> str:
    topology = Topology(2, rank)
    topology.create_groups()
    torch.manual_seed(1)
    model = Model(MODELS[name])
    runtime = BlockRuntime(find_blocks(model), topology)
    runtime.attach()
    try:
        profile = profile_costs(
            step=model.step,
            module=model,
            runtime=runtime,
            make_batch=lambda b, s: torch.randint(30, (b, s)),
            lengths=np.arange(10, 250),
            topology=topology,
            options=ProfilingOptions(lengths=(10, 20, 40, 80, 160), repeats=1),
            device=torch.device("cpu"),
            fixed_bytes=0,
            sp_sizes=topology.sp_sizes,
            gather=gather,
        )
    except ShardingMismatch as error:
        return str(error)
    finally:
        runtime.detach()
    return str(profile.sp_size_exclusions)


def test_what_differs_in_long_sequences_only(world) -> None:
    assert world.run(self_check, "logarithm of the length", torch.float32) == ["{}"] * 2
    for text in world.run(profile_of, "logarithm of the length"):
        assert "computes something else" in text
    assert world.run(profile_of, "right") == ["{}"] * 2

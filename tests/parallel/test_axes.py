"""Models with two axes of tokens, sharded along one of them, against one process."""

from __future__ import annotations

import copy
import re
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dcp import attention_axis, gather_axis, switch_axis
from lightning_dcp.parallel import BlockRuntime, Topology, find_blocks
from tests.parallel.axes_models import PairModel, STDiT
from tests.parallel.models import worst_error
from tests.worlds import World

MODELS: dict[str, Any] = {"clips": STDiT, "pairs": PairModel}
# not divisible; T < p; S == T; T and S with the same share for p = 4; S as long as a share
SHAPES: dict[str, list[Any]] = {
    "clips": [(2, 7, 5), (1, 3, 4), (2, 6, 6), (1, 13, 14), (2, 8, 2)],
    "pairs": [(2, 7), (1, 3), (1, 8)],
}
OBSERVED: dict[str, list[Any]] = {"clips": [(2, 6, 5), (3, 9, 4)], "pairs": [(2, 6), (3, 9)]}


def prepared(
    kind: str, way: str, rank: int, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Any, BlockRuntime, Topology]:
    """A model whose blocks have been observed on whole samples."""
    topology = Topology(dist.get_world_size(), rank)
    topology.create_groups()
    torch.manual_seed(7)
    model = MODELS[kind](way, **options).to(dtype).train()
    # Pairs are square: shapes alone cannot tell which of their dimensions is sharded.
    named = {"x": 1} if kind == "clips" and way in ("switch", "checkpoint") else {}
    named = {"z": 1} if kind == "pairs" else named
    runtime = BlockRuntime(find_blocks(model, "blocks"), topology, sequence_dims=named)
    runtime.attach()
    for shape in OBSERVED[kind]:
        with runtime.micro_batch(group=topology.group(rank, 1), observe=True):
            model.loss(model.batch(shape, dtype))
    return model, runtime, topology


def gradient_error(
    rank: int,
    kind: str,
    way: str,
    sp_sizes: list[int],
    shapes: list[Any],
    dtype: torch.dtype = torch.float64,
    recompute_blocks: int = 0,
    in_thread: bool = False,
) -> tuple[float, str]:
    model, runtime, topology = prepared(kind, way, rank, dtype)
    assert runtime.sp_size_exclusions(sp_sizes) == {}
    worst = (0.0, "")
    for shape in shapes:
        batch = model.batch(shape, dtype)
        runtime.detach()
        plain = copy.deepcopy(model)
        runtime.attach()
        plain.zero_grad()
        plain.loss(batch).backward()
        reference = {name: parameter.grad for name, parameter in plain.named_parameters()}
        for parameter_name in [name for name, gradient in reference.items() if gradient is None]:
            reference[parameter_name] = torch.zeros_like(plain.get_parameter(parameter_name))
        for sp_size in sp_sizes:
            group = topology.group(rank - rank % sp_size, sp_size)
            model.zero_grad()
            with runtime.micro_batch(group=group, recompute_blocks=recompute_blocks):
                loss = model.loss(batch) / sp_size
                if in_thread:  # as autograd's own threads do on CUDA
                    thread = threading.Thread(target=loss.backward)
                    thread.start()
                    thread.join()
                else:
                    loss.backward()
            error, name = worst_error(model, reference, group)
            worst = max(worst, (error, f"{name} at p={sp_size}, {shape}"))
    return worst


@pytest.fixture(scope="module")
def world():
    with World(4) as world:
        yield world


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("clips", "ulysses"),
        ("clips", "mha"),
        ("clips", "switch"),
        ("clips", "checkpoint"),
        ("pairs", "ulysses"),
        ("pairs", "switch"),
    ],
)
def test_gradients(world, kind, way):
    for error, where in world.run(gradient_error, kind, way, [2, 4], SHAPES[kind]):
        assert error <= 1e-12, where


@pytest.mark.parametrize(("kind", "way"), [("clips", "checkpoint"), ("pairs", "switch")])
def test_gradients_float32(world, kind, way):
    for error, where in world.run(gradient_error, kind, way, [4], SHAPES[kind][:1], torch.float32):
        assert error <= 2e-6, where


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize(
    ("kind", "way"), [("clips", "ulysses"), ("clips", "switch"), ("pairs", "switch")]
)
def test_recomputed(world, kind, way, in_thread):
    arguments = (kind, way, [4], SHAPES[kind][:1], torch.float64, 1, in_thread)
    for error, where in world.run(gradient_error, *arguments):
        assert error <= 1e-12, where


def test_checkpoint_of_the_block_in_another_thread(world):
    arguments = ("clips", "checkpoint", [4], SHAPES["clips"][:1], torch.float64, 0, True)
    for error, where in world.run(gradient_error, *arguments):
        assert error <= 1e-12, where


def recomputation_is_equal(rank: int, kind: str, way: str) -> bool:
    model, runtime, topology = prepared(kind, way, rank, num_blocks=3, dropout=0.3)
    batch = model.batch(SHAPES[kind][0], torch.float64)
    results = []
    for recompute_blocks in (0, 1, 3):
        model.zero_grad()
        group = topology.group(0, 4)
        with runtime.micro_batch(group=group, recompute_blocks=recompute_blocks, rng_key=(3,)):
            loss = model.loss(batch)
            loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append([loss.detach(), *gradients])
    return all(
        torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True)
    )


@pytest.mark.parametrize(("kind", "way"), [("clips", "ulysses"), ("pairs", "switch")])
def test_recomputation_replays_dropout(world, kind, way):
    assert world.run(recomputation_is_equal, kind, way) == [True] * 4


# ---------------------------------------------------------------------- what is wrong is said


def exclusions(rank: int, way: str) -> dict[int, str]:
    return prepared("clips", way, rank)[1].sp_size_exclusions([2, 4])


def test_blocks_without_marks_are_told_how_to_mark(world):
    for reasons in world.run(exclusions, "unmarked"):
        assert sorted(reasons) == [2, 4]
        assert 'with lightning_dcp.attention_axis("sharded")' in reasons[2]
        assert "(2, 6, 5, 16)" in reasons[2]


def mistake(rank: int, which: str) -> str:
    model, runtime, topology = prepared("clips", "ulysses", rank)
    block = model.blocks[0]
    spatial, temporal = block.spatial, block.temporal
    if which == "unmarked":  # a call that no observation had
        block.axis = lambda name: nullcontext()
    elif which == "sharded":
        block.axis = lambda name: attention_axis("sharded")
    elif which == "switch":
        block.spatial = lambda h, mask: spatial(switch_axis(h, 2, 1), mask)
    elif which == "gather":
        block.temporal = lambda h, mask: temporal(gather_axis(h, 2), mask)
    try:
        with runtime.micro_batch(group=topology.group(0, 4)):
            model.loss(model.batch((2, 7, 5), torch.float64))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("unmarked", "5 queries to 5 keys without a mark"),
        ("sharded", "marked as along the sharded axis, of which each of the 4 ranks has 2 of 7"),
        ("switch", "switch_axis of dimension 2 of a tensor of shape .*each of the 4 ranks has 2"),
        ("gather", "gather_axis of dimension 2 of a tensor of shape"),
    ],
)
def test_mistakes(world, which, message):
    for text in world.run(mistake, which):
        assert re.search(message, text), text


def test_nothing_happens_outside_sharded_blocks():
    x = torch.randn(2, 3, 4)
    assert switch_axis(x, 0, 1) is x
    assert gather_axis(x, 1) is x
    with pytest.raises(ValueError, match="from dimension 1 to itself"):
        switch_axis(x, 1, -2)
    with pytest.raises(ValueError, match='"sharded" or "whole", got \'frames\''):
        attention_axis("frames").__enter__()

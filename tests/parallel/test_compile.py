"""Blocks under ``torch.compile`` in micro-batches of 30 lengths, sharded and recomputed."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

from lightning_dcp.parallel import BlockRuntime, Topology, find_blocks
from lightning_dcp.parallel.compiled import compiled_forward
from tests.parallel.models import relative_error
from tests.strategies.toys import Sequences, ToyLM, pad
from tests.worlds import World

LENGTHS = range(9, 39)


def compiled(
    rank: int, way: str, sp_size: int, recompute_blocks: int
) -> tuple[float, list[int], int]:
    """Largest gradient error, graphs compiled by then after each length, calls of them."""
    torch._dynamo.reset()
    topology = Topology(2, rank)
    topology.create_groups()
    model = ToyLM(num_blocks=2, double=True)
    plain = copy.deepcopy(model)
    counter = CompileCounter()
    for i, block in enumerate(model.blocks):
        if way == "block.compile()":
            block.compile(backend=counter)
        else:
            dynamic = True if way == "dynamic" else None
            model.blocks[i] = torch.compile(block, backend=counter, dynamic=dynamic)
    runtime = BlockRuntime(find_blocks(model), topology)
    runtime.attach()
    alone = topology.group(rank, 1)
    for length in (4, 6):
        with runtime.micro_batch(group=alone, observe=True):
            model(torch.ones(1, length, dtype=torch.long)).sum().backward()
    seen, counter.frame_count = counter.frame_count, 0
    group = topology.group(rank // sp_size * sp_size, sp_size)
    worst, counts = 0.0, []
    for length in LENGTHS:
        dataset = Sequences([length, length - 3])
        batch = pad([dataset[0], dataset[1]])
        for one in (plain, model):
            one.zero_grad()
        plain.losses(batch).mean().backward()
        with runtime.micro_batch(group=group, recompute_blocks=recompute_blocks):
            (model.losses(batch).mean() / sp_size).backward()
        for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            if group.process_group is not None:
                dist.all_reduce(got.grad, group=group.process_group)
            worst = max(worst, relative_error(got.grad, wanted.grad))
        counts.append(counter.frame_count)
    runtime.detach()
    return worst, counts, seen


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2, timeout_s=150) as world:
        yield world


@pytest.mark.parametrize(
    ("way", "sp_size", "recompute_blocks"),
    [
        pytest.param("block.compile()", 1, 2, marks=pytest.mark.slow),
        ("block.compile()", 2, 1),
        pytest.param("torch.compile(block)", 2, 1, marks=pytest.mark.slow),
        pytest.param("dynamic", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_lengths_do_not_compile_blocks_anew(
    world: World, way: str, sp_size: int, recompute_blocks: int
) -> None:
    for worst, counts, seen in world.run(compiled, way, sp_size, recompute_blocks):
        assert worst <= 1e-12
        assert counts[-1] + seen > 0, "nothing was compiled at all"
        # A length is a number at first, and a symbol from the second one on.
        assert counts[-1] == counts[5]
        assert counts[-1] <= 24


def test_a_forward_is_compiled_by_the_options_of_its_block() -> None:
    block, counter = torch.nn.Linear(3, 3), CompileCounter()
    block.compile(backend=counter)
    forward = compiled_forward(block)
    x = torch.ones(2, 3)
    assert torch.equal(forward(x), torch.nn.functional.linear(x, block.weight, block.bias))
    assert counter.frame_count == 1

"""Which groups exist, and that they work after being made twice."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_dcp.parallel import SPGroup, Topology
from lightning_dcp.planning.layout import Layout
from tests.worlds import World


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [(1, (1,)), (3, (1, 2)), (4, (1, 2, 4)), (7, (1, 2, 4)), (8, (1, 2, 4, 8))],
)
def test_sizes_are_powers_of_two(world_size, sizes):
    assert Topology(world_size, 0).sp_sizes == sizes


def test_one_rank_needs_no_torch_distributed():
    topology = Topology(1, 0)
    topology.create_groups()
    group = topology.group(0, 1)
    assert group == SPGroup(0, 1, 0, None)
    assert list(group.ranks) == [0]


@pytest.mark.parametrize(
    ("first", "size", "message"),
    [
        (1, 2, "no aligned block of 2 ranks starts at rank 1"),
        (4, 4, "no aligned block of 4 ranks starts at rank 4 in a world of 7"),
        (0, 3, r"one of \[1, 2, 4\]"),
        (0, 8, r"one of \[1, 2, 4\]"),
        (0, 4, "rank 5 is not in the group of ranks 0..3"),
        (4, 2, "need torch.distributed initialised"),
    ],
)
def test_wrong_group(first, size, message):
    error = RuntimeError if "torch.distributed" in message else ValueError
    with pytest.raises(error, match=message):
        Topology(7, 5).group(first, size)


def test_wrong_world():
    with pytest.raises(ValueError, match="got 4 of 4"):
        Topology(4, 4)
    with pytest.raises(RuntimeError, match=r"need torch.distributed"):
        Topology(2, 0).create_groups()


def sums_over_groups(rank: int) -> dict[tuple[int, int], float]:
    """Over each group of this rank, with groups made, destroyed and made again."""
    world_size = dist.get_world_size()
    with pytest.raises(RuntimeError, match="a world of 99"):
        Topology(99, rank).create_groups()
    for _ in range(2):
        topology = Topology(world_size, rank)
        topology.create_groups([1, 2])
        topology.create_groups()
        sums = {}
        for size in topology.sp_sizes:
            first = rank - rank % size
            if first + size > world_size:
                continue
            group = topology.group(first, size)
            value = torch.tensor([float(rank)])
            if group.process_group is not None:
                dist.all_reduce(value, group=group.process_group)
            assert group.rank_in_group == rank - first
            sums[first, size] = value.item()
        topology.destroy()
        assert topology.group(rank, 1).size == 1
    return sums


@pytest.mark.parametrize("world_size", [3, 7])
def test_groups_work_and_can_be_made_twice(world_size):
    with World(world_size) as world:
        for rank, sums in enumerate(world.run(sums_over_groups)):
            expected = {
                (first, size): float(sum(range(first, first + size)))
                for size in (1, 2, 4)
                for first in [rank - rank % size]
                if first + size <= world_size
            }
            assert sums == expected


def sums_in_groups_made_one_by_one(rank: int) -> list[float]:
    layout = Layout(((0, 1), (2,), (3,), (4,)))
    topology = Topology(5, rank, layout=layout)
    sums = []
    for size in (2, 4):  # as a profile asks for them; ranks are in unlike numbers of groups
        group = topology.own_group(size)
        value = torch.tensor([float(rank)])
        if group is not None:
            dist.all_reduce(value, group=group.process_group)
        sums.append(value.item())
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=topology.host_group())
    return [*sums, value.item()]


def test_groups_of_nodes_that_do_not_nest_are_made_in_one_order():
    with World(5, timeout_s=60) as world:
        sums = world.run(sums_in_groups_made_one_by_one)
    assert [s[2] for s in sums] == [10.0] * 5
    assert [s[0] for s in sums] == [1.0, 1.0, 2.0, 3.0, 4.0]
    assert sorted(s[1] for s in sums) == [4.0, 6.0, 6.0, 6.0, 6.0]

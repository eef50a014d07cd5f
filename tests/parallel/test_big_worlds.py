"""Worlds of 64 and 1,024 ranks: what each rank sends meets what its peers await, in one order.

Plans are real ones, with SP sizes from 1 to W nested in one iteration and idle ranks; the part of
each rank runs through the real runtime, forward and backward with recomputation, on torch's fake
process groups (see fake_worlds.py).
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dcp.parallel import BlockRuntime, Topology, find_blocks
from lightning_dcp.parallel.topology import communicator_bytes
from lightning_dcp.planning import EpochPlanner, Measurement, PlanningOptions, fit_cost_model
from lightning_dcp.planning.layout import Layout
from lightning_dcp.planning.plan import MicroBatch, Plan
from lightning_dcp.strategies.agreement import gather_rows
from lightning_dcp.strategies.replicas import num_shared
from tests.parallel.fake_worlds import Call, fake_world, mismatches, stuck_ranks
from tests.planning.laws import needed_bytes

NUM_BLOCKS, VOCABULARY = 2, 5


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(heads, 3 * heads, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, 1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(
            2
        )


class Model(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, heads)
        self.blocks = nn.ModuleList(Block(heads) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(heads, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Ranks:
    """Runs the parts of ranks; micro-batches alike are run once for each place in their group."""

    def __init__(self, world_size: int, heads: int, layout: Layout | None = None) -> None:
        torch.manual_seed(0)
        self.world_size = world_size
        self.layout = Layout.plain(world_size) if layout is None else layout
        self.model = Model(heads)
        self.runtime = BlockRuntime(find_blocks(self.model), Topology(1, 0))
        self.runtime.attach()
        for length in (6, 9):
            with self.runtime.micro_batch(group=Topology(1, 0).group(0, 1), observe=True):
                self.model(torch.zeros(1, length, dtype=torch.long))
        self._known: dict[tuple[int, ...], list[Call]] = {}
        #: Process groups that each rank was in.
        self.num_groups: list[int] = []

    def run(self, plans: list[Plan]) -> list[list[Call]]:
        """Calls of each rank, by global rank."""
        calls = []
        for rank in range(self.world_size):
            with fake_world(self.world_size, rank) as recorder:
                topology = Topology(self.world_size, rank, device_type="fake", layout=self.layout)
                self.runtime.topology = topology
                for plan in plans:
                    self._iteration(plan, topology, recorder.calls)
                self.num_groups.append(len(topology.costs.sizes))
                calls.append(list(recorder.calls))
        return calls

    def _iteration(self, plan: Plan, topology: Topology, calls: list[Call]) -> None:
        """As the strategies do: N, the micro-batches, one exchange of figures, the gradients."""
        dist.all_reduce(torch.ones(1, dtype=torch.float64))
        for micro_batch in plan.for_rank(topology.rank):
            self._micro_batch(micro_batch, topology, calls)
        gather_rows(torch.zeros(num_shared(plan) + 10, dtype=torch.float64))
        for parameter in self.model.parameters():  # where none ran: as zeros
            dist.all_reduce(torch.zeros_like(parameter))

    def _micro_batch(self, m: MicroBatch, topology: Topology, calls: list[Call]) -> None:
        group = topology.group(m.first_rank, m.sp_size)
        key = (m.sp_size, m.batch_size, m.seq_len, m.recompute_blocks, group.rank_in_group)
        if m.sp_size == 1:
            key = (1, 0, 0, 0, 0)  # runs alone, whatever it is
        if key not in self._known:
            before = len(calls)
            with self.runtime.micro_batch(group=group, recompute_blocks=m.recompute_blocks):
                tokens = torch.zeros(m.batch_size, m.seq_len, dtype=torch.long)
                self.model(tokens).sum().backward()
            self._known[key] = calls[before:]
            return
        calls.extend(call.moved(tuple(group.ranks)) for call in self._known[key])


def plans_of(
    world_size: int, lengths: list[int], layout: Layout | None = None, policy: str = "dcp-intra"
) -> list[Plan]:
    """Plans in which a length needs as many ranks as memory says: one for each 4 tokens."""
    sp_sizes = tuple(1 << k for k in range(world_size.bit_length()))

    def point(b: int, s: int, p: int) -> Measurement:
        tokens = b * s / p
        forward = 1e-4 + tokens * 1e-6 + 3e-4 * math.log2(p)  # wider is never quicker
        return Measurement(
            batch_size=b,
            seq_len=s,
            sp_size=p,
            forward_s=forward,
            backward_s=2 * forward,
            rest_s=1e-5,
            saved_bytes=4000.0 * tokens,
            input_bytes=2000.0 * tokens,
            rest_bytes=b * s,
        )

    points = [point(b, s, p) for p in sp_sizes for b in (1, 8) for s in (32, 512, 8192)]
    costs = fit_cost_model(
        points, num_blocks=NUM_BLOCKS, fixed_bytes=1_000_000, step_overhead_s=1e-3
    )
    limit = needed_bytes(costs, 4 * sp_sizes[-1], sp_sizes[-1])
    planner = EpochPlanner(
        lengths=lengths,
        cost_model=costs,
        world_size=world_size,
        memory_limit_bytes=limit,
        options=PlanningOptions(
            policy=policy, on_too_long="truncate", tokens_per_step=sum(lengths) // 2
        ),
        layout=layout,
    )
    return list(planner.epoch(0))


def spread_lengths(world_size: int, num_short: int) -> list[int]:
    """Some that need each number of ranks, and short ones that fill what is left."""
    rng = np.random.default_rng(0)
    sizes = [1 << k for k in range(1, world_size.bit_length())]
    wide = [4 * p - int(rng.integers(0, p)) for p in sizes for _ in range(2 if p < 32 else 1)]
    return [*wide, *(int(n) for n in rng.integers(1, 5, num_short))]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def world_64() -> tuple[list[Plan], list[list[Call]], Ranks]:
    plans = plans_of(64, spread_lengths(64, 40))
    ranks = Ranks(64, heads=16)
    return plans, ranks.run(plans), ranks


class TestSixtyFourRanks:
    def test_plans_have_what_is_to_be_shown(self, world_64: Any) -> None:
        plans, _, _ = world_64
        used = {m.sp_size for plan in plans for m in plan.micro_batches}
        assert used == {1, 2, 4, 8, 16, 32, 64}
        nested = [
            len({m.sp_size for m in plan.for_rank(rank)}) for plan in plans for rank in range(64)
        ]
        assert max(nested) >= 3
        assert any(not plan.for_rank(rank) for plan in plans for rank in range(64))
        assert any(m.recompute_blocks for plan in plans for m in plan.micro_batches)

    def test_members_of_each_group_call_the_same(self, world_64: Any) -> None:
        _, calls, _ = world_64
        assert mismatches(calls) == []
        unequal = [c for own in calls for c in own if c.sent]
        assert {len(c.ranks) for c in unequal} >= {32, 64}  # rings: 16 heads do not suffice

    def test_no_rank_waits_for_ever(self, world_64: Any) -> None:
        _, calls, _ = world_64
        assert stuck_ranks(calls) == {}

    def test_a_rank_is_in_one_group_of_each_size_at_most(self, world_64: Any) -> None:
        _, _, ranks = world_64
        assert max(ranks.num_groups) <= 6

    def test_orders_that_differ_are_found(self, world_64: Any) -> None:
        """One rank runs two micro-batches of different groups the other way round."""
        _, calls, _ = world_64
        rank, at = next(
            (rank, i)
            for rank, own in enumerate(calls)
            for i in range(len(own) - 1)
            if len(own[i].ranks) < 64 > len(own[i + 1].ranks) and own[i].ranks != own[i + 1].ranks
        )
        swapped = [list(own) for own in calls]
        swapped[rank][at : at + 2] = swapped[rank][at : at + 2][::-1]
        assert rank in stuck_ranks(swapped)
        assert mismatches(swapped) == []  # group by group nothing is wrong: only together

    def test_calls_and_sizes_that_differ_are_found(self, world_64: Any) -> None:
        _, calls, _ = world_64
        missing = [list(own) for own in calls]
        del missing[5][0]
        assert mismatches(missing) != [] and stuck_ranks(missing) != {}
        at = next(i for i, c in enumerate(calls[7]) if c.sent)
        wrong = [list(own) for own in calls]
        (place, size), *rest = wrong[7][at].sent
        wrong[7][at] = dataclasses.replace(wrong[7][at], sent=((place, size + 1), *rest))
        assert any("sent and awaited" in text for text in mismatches(wrong))

    @pytest.mark.parametrize("size", [6, 12])
    def test_nodes_of_no_power_of_two(self, size: int) -> None:
        layout = Layout.of_equal_nodes(60, size)
        plans = plans_of(60, spread_lengths(32, 20), layout)
        ranks = Ranks(60, heads=32, layout=layout)
        calls = ranks.run(plans)
        assert mismatches(calls) == [] and stuck_ranks(calls) == {}
        for own in calls:
            for call in own:
                if len(call.ranks) <= size:
                    assert len({rank // size for rank in call.ranks}) == 1


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return plans_of(1024, spread_lengths(1024, 300))


class TestThousandRanks:
    """Micro-batches of up to 16 ranks run at all places; wider ones at some, the others alike."""

    def test_no_rank_waits_for_ever(self, plans: list[Plan]) -> None:
        assert {m.sp_size for plan in plans for m in plan.micro_batches} >= {1, 2, 16, 64, 1024}
        calls = [
            [
                Call(tuple(m.ranks), "run", (m.sample_ids,))
                for plan in plans
                for m in [*plan.for_rank(rank), WHOLE]
                if m.sp_size > 1
            ]
            for rank in range(1024)
        ]
        assert mismatches(calls) == [] and stuck_ranks(calls) == {}
        random.Random(0).shuffle(calls[3])
        assert stuck_ranks(calls) != {}

    @pytest.mark.parametrize("sp_size", [2, 16, 64, 1024])
    def test_all_places_of_a_group_call_the_same(self, plans: list[Plan], sp_size: int) -> None:
        m = next(m for plan in plans for m in plan.micro_batches if m.sp_size == sp_size)
        ranks = Ranks(1024, heads=256)
        places = range(sp_size) if sp_size <= 16 else [0, 1, sp_size // 2, sp_size - 1]
        calls = [self.calls_at(ranks, m, m.first_rank + place) for place in places]
        assert calls[0]
        assert all(c.ranks == tuple(m.ranks) for own in calls for c in own)
        assert all([c.common for c in own] == [c.common for c in calls[0]] for own in calls)

    @staticmethod
    def calls_at(ranks: Ranks, micro_batch: MicroBatch, rank: int) -> list[Call]:
        with fake_world(1024, rank) as recorder:
            topology = Topology(1024, rank, device_type="fake")
            ranks.runtime.topology = topology
            ranks._micro_batch(micro_batch, topology, recorder.calls)
            return list(recorder.calls)

    def test_groups_are_made_when_used_and_few(self) -> None:
        with fake_world(1024, 700):
            topology = Topology(1024, 700, device_type="fake")
            assert topology.costs.sizes == ()
            topology.create_groups([8, 64])
            assert topology.costs.sizes == (8, 64)
            topology.group(0, 1024)  # by the micro-batch that runs on it
            assert topology.costs.sizes == (8, 64, 1024)
            topology.create_groups()
            costs = topology.costs
            assert len(costs.sizes) == costs.most == 10
            assert costs.seconds < 5 and costs.estimated_bytes == 0


WHOLE = MicroBatch((10**6,), 1024, 1024, 0, 1024, 0, 0.0, 0)  # the collectives of all ranks


class TestGroups:
    def test_a_group_is_made_once_however_many_fits(self) -> None:
        from lightning_dcp.parallel.topology import _PROCESS_GROUPS

        with fake_world(1024, 5):
            for layout in (None, None, Layout.of_equal_nodes(1024, 12)) * 3:
                topology = Topology(1024, 5, device_type="fake", layout=layout)
                topology.create_groups()
                topology.destroy()
            assert len(_PROCESS_GROUPS) <= 2 * 10

    def test_the_device_of_the_default_group_is_hidden_while_a_group_is_made(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else torch splits that of all ranks, which those in no such group do not join."""
        seen = []
        make = dist.new_group
        with fake_world(6, 1):
            dist.group.WORLD.bound_device_id = torch.device("cuda:0")

            def noted(*args: Any, **kwargs: Any) -> Any:
                seen.append(dist.group.WORLD.bound_device_id)
                return make(*args, **kwargs)

            monkeypatch.setattr(dist, "new_group", noted)
            Topology(6, 1, device_type="fake").create_groups()
            assert seen == [None, None]
            assert dist.group.WORLD.bound_device_id == torch.device("cuda:0")
            dist.group.WORLD.bound_device_id = None

    def test_estimated_bytes_grow_with_the_group(self) -> None:
        sizes = [communicator_bytes(p, 8) for p in (2, 4, 8, 16)]
        assert sizes == sorted(sizes) and sizes[0] > 100 * 2**20 and sizes[-1] < 400 * 2**20

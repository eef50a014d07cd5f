"""SP groups stay inside nodes of any size; plans are valid and complete all the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_dcp.planning import EpochPlanner, PlanningOptions, best_static
from lightning_dcp.planning.evaluation import EvaluationPlanner
from lightning_dcp.planning.evaluation_memory import EvaluationMemory
from lightning_dcp.planning.layout import Layout
from lightning_dcp.planning.nesting import place
from tests.planning.costs import cost_model, log_normal
from tests.planning.laws import cost_models, needed_bytes

SEARCHED = ("dcp-intra", "dcp-inter", "global-batch", "bucket", "packed")


@st.composite
def layouts(draw: st.DrawFn, most: int = 40) -> Layout:
    """Equal nodes, unequal ones, and ranks dealt out to nodes in any order."""
    kind = draw(st.sampled_from(["equal", "unequal", "dealt out"]))
    if kind == "equal":
        size = draw(st.integers(1, 12))
        return Layout.of_equal_nodes(draw(st.integers(1, most)), size)
    if kind == "unequal":
        sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
        return Layout.of_nodes(node for node, size in enumerate(sizes) for _ in range(size))
    return Layout.of_nodes(draw(st.lists(st.integers(0, 4), min_size=1, max_size=most)))


def node_of(layout: Layout) -> dict[int, int]:
    return {rank: i for i, node in enumerate(layout.nodes) for rank in node}


def check_group(layout: Layout, first: int, sp_size: int) -> None:
    """A block in use, and inside a node if it can be."""
    assert first in layout.blocks(sp_size)
    if sp_size <= layout.largest_node:
        nodes = node_of(layout)
        assert len({nodes[rank] for rank in layout.ranks_of(first, sp_size)}) == 1


@settings(deadline=None, max_examples=150)
@given(layout=layouts(200))
def test_blocks_that_fit_into_a_node_stay_inside(layout: Layout) -> None:
    w = layout.world_size
    assert sorted(layout.ranks) == list(range(w))
    assert [layout.ranks[place] for place in layout.places] == list(range(w))
    for p in layout.sp_sizes:
        assert layout.blocks(p)
        for first in layout.blocks(p):
            check_group(layout, first, p)
        if p <= layout.largest_node:  # as many as nodes hold, each by itself
            assert len(layout.blocks(p)) == sum(len(node) // p for node in layout.nodes)
        else:
            assert len(layout.blocks(p)) == w // p
        members = [layout.block_of(place, p) for place in range(w)]
        assert sum(first is not None for first in members) == p * len(layout.blocks(p))


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("world_size", [1, 6, 8, 16, 24, 64])
def test_nodes_of_a_power_of_two_change_nothing(size: int, world_size: int) -> None:
    layout = Layout.of_equal_nodes(world_size, size)
    if world_size % size == 0 or world_size < size:
        assert layout.is_plain
        assert str(layout) == "aligned" == str(Layout.plain(world_size))
    assert Layout.plain(world_size).ranks == tuple(range(world_size))
    lengths = log_normal(60)
    common: dict[str, Any] = {
        "lengths": lengths,
        "cost_model": cost_model((1, 2, 4, 8, 16)),
        "world_size": world_size,
        "memory_limit_bytes": 12_000_000,
        "options": PlanningOptions(on_too_long="truncate"),
    }
    if (world_size, size) in ((8, 2), (24, 8), (6, 16)):
        a, b = EpochPlanner(**common), EpochPlanner(**common, layout=layout)
        assert a.epoch(0).digest() == b.epoch(0).digest()
        assert a.fingerprint == b.fingerprint


def test_two_nodes_of_six() -> None:
    layout = Layout.of_equal_nodes(12, 6)
    assert layout.ranks == (0, 1, 2, 3, 6, 7, 8, 9, 4, 5, 10, 11)
    assert [list(layout.blocks(p)) for p in (1, 2, 4, 8, 16)] == [
        list(range(12)),
        [0, 2, 4, 6, 8, 10],
        [0, 4],
        [0],
        [],
    ]
    assert layout.block_of(9, 4) is None and layout.block_of(5, 4) == 4
    assert str(layout).startswith("2 x 6 (")
    assert str(layout) != str(Layout.of_nodes([0, 1] * 6))


@pytest.mark.parametrize("nodes", [(), ((),), ((0, 1), (1, 2)), ((1, 2),), ((0,), ())])
def test_nodes_without_each_rank_once_are_refused(nodes: Any) -> None:
    with pytest.raises(ValueError, match="each of the ranks"):
        Layout(nodes)


def test_a_layout_of_another_world_is_refused() -> None:
    with pytest.raises(ValueError, match="layout is of 6 ranks, the world of 4"):
        EpochPlanner(
            lengths=[10],
            cost_model=cost_model(),
            world_size=4,
            memory_limit_bytes=10**9,
            layout=Layout.of_equal_nodes(6, 3),
        )


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    layout=layouts(),
    model=cost_models(),
    policy=st.sampled_from(SEARCHED),
    seed=st.integers(0, 10_000),
    n=st.integers(1, 50),
    longest=st.sampled_from([50, 9000]),
    fits_at=st.sampled_from([1, 2, 4, 8, 64]),
    batch_size=st.integers(1, 4),
)
def test_plans_are_valid_inside_nodes_and_never_slower_than_static_ones(  # type: ignore[no-untyped-def]
    layout, model, policy, seed, n, longest, fits_at, batch_size
) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.random(n) < 0.2, rng.integers(1, longest, n), rng.integers(1, 60, n))
    limit = needed_bytes(model, int(lengths.max()), min(fits_at, max(layout.sp_sizes)))
    planner = EpochPlanner(
        lengths=lengths,
        cost_model=model,
        world_size=layout.world_size,
        memory_limit_bytes=limit,
        options=PlanningOptions(policy=policy),
        batch_size=batch_size,
        layout=layout,
    )
    plans = planner.epoch(0)
    seen: list[int] = []
    for plan in plans:
        for m in plan.micro_batches:
            check_group(layout, m.first_rank, m.sp_size)
            assert m.est_bytes <= limit
            seen.extend(m.sample_ids)
    assert sorted(seen) == list(range(n))
    # What the epoch is predicted to take is when the last rank of each plan ends.
    assert plans.makespan_s == pytest.approx([plan.makespan_s for plan in plans])
    if policy not in ("bucket", "packed"):
        static = best_static(planner).epoch(0)
        assert plans.predicted_time_s <= static.predicted_time_s * (1 + 1e-9)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    layout=layouts(24),
    seed=st.integers(0, 10_000),
    n=st.integers(1, 80),
    batch_size=st.integers(1, 3),
    in_order=st.booleans(),
)
def test_evaluation_stays_inside_nodes(layout, seed, n, batch_size, in_order) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.random(n) < 0.2, rng.integers(1, 100 * layout.largest_node, n), 20)
    lengths[0] = 20  # runs on one rank, so that every rank finds something
    memory = EvaluationMemory(0, {p: (0.0, 0.0, 1.0 / p, 0.0) for p in layout.sp_sizes})
    planner = EvaluationPlanner(
        lengths=lengths,
        batch_size=batch_size,
        world_size=layout.world_size,
        memory=memory,
        limit_bytes=120,
        in_order=in_order,
        on_too_long="truncate",
        layout=layout,
    )
    seen: list[int] = []
    for index in range(planner.num_batches):
        batch = planner.batch(index)
        for m in batch.plan.micro_batches:
            check_group(layout, m.first_rank, m.sp_size)
            seen.extend(m.sample_ids)
        counted = [batch.for_rank(place) for place in range(layout.world_size)]
        assert sum(share.counts for share in counted) == len(batch.plan.micro_batches)
    assert sorted(seen) == list(range(n))


def test_halves_of_wide_blocks_that_are_of_several_nodes_wait_until_they_are_narrow() -> None:
    """Three nodes of six: places 12-17 are the pairs that are left of each."""
    layout = Layout.of_equal_nodes(18, 6)
    tasks = [(-p, -1.0, i, 1, 0) for i, p in enumerate([8, 8, *[4] * 4, *[2] * 9, *[1] * 3])]
    level, size, first_places = place(tasks, 0.0, layout)
    assert first_places[:2] == [0, 8]
    assert sorted(first_places[2:6]) == [0, 0, 4, 8]  # never 12: ranks of two nodes
    assert {12, 14, 16} <= set(first_places[6:15])
    for (minus_p, *_), first in zip(tasks, first_places, strict=True):
        check_group(layout, first, -minus_p)
    assert size == 1 and sorted(first for _, first in level) == list(range(18))

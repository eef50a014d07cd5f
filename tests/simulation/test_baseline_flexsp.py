"""FlexSP: chunking, buckets, and its program against exhaustive search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.simulation.baselines.chunking import blast, bucket_tops, mix
from lightning_dcp.simulation.baselines.flexsp import flexsp_step, solve_micro_batch
from lightning_dcp.simulation.baselines.packing import PackedCosts
from lightning_dcp.simulation.baselines.warm_start import divisions
from tests.planning.costs import cost_model, log_normal

LIMIT = 20_000_000
short_lists = st.lists(st.integers(1, 60), min_size=1, max_size=8)


@settings(deadline=None)
@given(short_lists, st.integers(1, 8))
def test_blast_minimises_the_largest_part(values: list[int], num_parts: int) -> None:
    lengths = np.array(values)
    num_parts = min(num_parts, lengths.size)
    parts = blast(lengths, num_parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(lengths.size))
    assert all(part.size for part in parts)
    in_order = lengths[np.concatenate(parts)]
    assert (np.diff(in_order) <= 0).all()
    best = min(
        max(piece.sum() for piece in np.split(in_order, cuts))
        for cuts in itertools.combinations(range(1, lengths.size), num_parts - 1)
    )
    assert max(lengths[part].sum() for part in parts) == best


@settings(deadline=None)
@given(short_lists, st.integers(1, 5))
def test_bucket_tops_waste_least(values: list[int], num_buckets: int) -> None:
    lengths = np.array(values)

    def waste(tops: np.ndarray) -> int:
        return int((tops[np.searchsorted(tops, lengths)] - lengths).sum())

    tops = bucket_tops(lengths, num_buckets)
    distinct = np.unique(lengths)
    assert tops.size <= num_buckets
    assert tops[-1] == distinct[-1]
    count = min(num_buckets, distinct.size)
    best = min(
        waste(np.array([*chosen, distinct[-1]]))
        for chosen in itertools.combinations(distinct[:-1].tolist(), count - 1)
    )
    assert waste(tops) == best


def test_mix_gives_parts_alike() -> None:
    lengths = log_normal(200, 0)
    parts = mix(lengths, 4)
    assert sorted(np.concatenate(parts).tolist()) == list(range(200))
    tokens = [lengths[part].sum() for part in parts]
    assert max(tokens) < 1.01 * min(tokens)


def test_divisions() -> None:
    assert divisions(4, (1, 2, 4)).tolist() == [[0, 0, 1], [0, 2, 0], [4, 0, 0], [2, 1, 0]]
    assert divisions(5, (2, 4)).tolist() == [[0, 1], [2, 0]]
    assert len(divisions(32, (1, 2, 4, 8, 16, 32))) == 202  # binary partitions of 32
    assert len(divisions(96, (1, 2, 4, 8, 16, 32, 64))) == 2048  # thinned


def exhaustive(prices: PackedCosts) -> float:
    """Least seconds of the slowest group over all divisions and assignments."""
    best = float("inf")
    n = prices.lengths.size
    cost: dict[tuple[int, tuple[int, ...]], float] = {}
    for k in range(1, n + 1):
        for group in itertools.combinations(range(n), k):
            tokens = int(prices.lengths[list(group)].sum())
            for p, budget in prices.budgets.items():
                if tokens <= budget:
                    cost[p, group] = prices.price([group], [p])[0].time_s
    for counts in divisions(prices.world_size, prices.sp_sizes):
        sizes = np.repeat(prices.sp_sizes, counts).tolist()
        for chosen in itertools.product(range(len(sizes)), repeat=n):
            slowest = 0.0
            for g, p in enumerate(sizes):
                group = tuple(i for i in range(n) if chosen[i] == g)
                if group:
                    slowest = max(slowest, cost.get((p, group), float("inf")))
            best = min(best, slowest)
    return best


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limit", [LIMIT, 1 << 40])
def test_program_finds_the_optimum_of_tiny_cases(seed: int, limit: int) -> None:
    lengths = log_normal(5, seed, sigma=1.5)
    prices = PackedCosts(cost_model(), lengths, 4, limit)
    groups = solve_micro_batch(prices, np.arange(5), time_limit_s=20.0)
    assert groups is not None
    assert sum(group.sp_size for group in groups) <= 4
    found = max(group.time_s for group in groups)
    best = exhaustive(prices)
    assert best * (1 - 1e-9) <= found <= best * 1.005


def test_solver_is_at_least_as_good_as_greedy() -> None:
    lengths = log_normal(48, 2)
    prices = PackedCosts(cost_model((1, 2, 4, 8)), lengths, 8, 1 << 40)
    samples = np.arange(48)
    start = solve_micro_batch(prices, samples, time_limit_s=0.0)
    solved = solve_micro_batch(prices, samples, time_limit_s=1.0, num_buckets=8)
    assert start is not None and solved is not None
    busiest = [max(group.time_s for group in groups) for groups in (start, solved)]
    assert busiest[1] <= busiest[0]
    # No plan of one micro-batch can do with fewer GPU-seconds than the most efficient sizes.
    seconds = np.stack([p * prices.linear_s(p, 1000)[0] for p in prices.sp_sizes])
    assert busiest[1] < 1.1 * seconds.min(axis=0).sum() / 8


def test_more_micro_batches_where_memory_is_short() -> None:
    lengths = log_normal(40, 1)
    roomy = flexsp_step(lengths, cost_model(), 4, 1 << 40, time_limit_s=0.0, num_trials=1)
    assert len(roomy.tasks) <= 4  # one round of groups
    tight = flexsp_step(lengths, cost_model(), 4, 8_000_000, time_limit_s=0.2)
    tight.check(40, 8_000_000)
    assert len(tight.tasks) > 4
    for sort in (True, False):
        flexsp_step(lengths, cost_model(), 4, 8_000_000, time_limit_s=0.0, sort=sort).check(40)

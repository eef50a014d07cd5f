"""Baselines: each sample once, memory, and what each of them is known for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.planning.candidates import pad_to
from lightning_dcp.planning.costs import Costs
from lightning_dcp.simulation.baselines import BASELINES, tune_recompute
from lightning_dcp.simulation.baselines.karmarkar_karp import karmarkar_karp_step, partition
from lightning_dcp.simulation.baselines.megatron import megatron_measured_step, megatron_step
from lightning_dcp.simulation.baselines.packing import PackedCosts, first_fit_decreasing
from lightning_dcp.simulation.baselines.static import naive_step, packed_step, tuned_step
from lightning_dcp.simulation.baselines.tuning import recompute_candidates
from lightning_dcp.simulation.cluster import cluster_named
from lightning_dcp.simulation.models import model_named
from lightning_dcp.simulation.roofline import RooflineCosts
from tests.planning.costs import NUM_BLOCKS, cost_model, log_normal

LIMIT = 20_000_000  # a sample of 16384 tokens needs p=2 and some recomputation, or p=4
QUICK = {"flexsp": {"time_limit_s": 0.0}}


@functools.lru_cache
def roofline() -> tuple[Costs, int]:
    """A law that is not linear in the tokens."""
    costs = RooflineCosts(
        model=model_named("transformer-2d-1.2b"), cluster=cluster_named("h200"), world_size=8
    )
    return costs, 40_000_000_000


lengths_lists = st.lists(
    st.one_of(st.integers(16, 600), st.integers(16, 16384)), min_size=1, max_size=24
)


#: Each example of these tries many settings.
SEARCHING = ("tuned", "packed")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in SEARCHING else n for n in BASELINES],
)
@settings(max_examples=10, deadline=None)
@given(
    lengths=lengths_lists,
    world_size=st.sampled_from([4, 5, 6, 8, 13]),
    limit=st.sampled_from([LIMIT, 2 * LIMIT, 1 << 40]),
)
def test_each_sample_once_within_memory(
    name: str, lengths: list[int], world_size: int, limit: int
) -> None:
    costs = cost_model()
    step = BASELINES[name](lengths, costs, world_size, limit, **QUICK.get(name, {}))
    step.check(len(lengths), limit)  # overlaps and alignment are checked by the step itself
    assert step.world_size == world_size
    blocks = {task.recompute_blocks for task in step.tasks}
    assert len(blocks) == 1  # static


@pytest.mark.parametrize("name", BASELINES)
def test_tuned_for_steps_of_a_law_that_is_not_linear(name: str) -> None:
    costs, limit = roofline()
    baseline = BASELINES[name]
    steps = [log_normal(40, seed, longest=100_000) * 50 for seed in range(2)]
    steps = [np.minimum(lengths, 100_000) for lengths in steps]
    chosen = baseline.tune(steps, costs, 8, limit, longest=100_000)
    quick = QUICK.get(name, {})
    for lengths in steps:
        step = baseline(lengths, costs, 8, limit, **chosen, **quick)
        step.check(lengths.size, limit)
        assert step == baseline(lengths, costs, 8, limit, **chosen, **quick)  # deterministic


@pytest.mark.parametrize("name", BASELINES)
def test_special_cases(name: str) -> None:
    plan = functools.partial(BASELINES[name], **QUICK.get(name, {}))
    plan([100], cost_model((1,)), 1, LIMIT).check(1, LIMIT)
    plan([100], cost_model(), 4, LIMIT).check(1, LIMIT)
    equal = plan([512] * 16, cost_model(), 4, LIMIT)
    equal.check(16, LIMIT)
    assert equal.idle_share < 0.01
    plan([16384] * 3, cost_model(), 4, LIMIT).check(3, LIMIT)
    with pytest.raises(ValueError, match="1048576 tokens fit"):
        plan([50, 1 << 20], cost_model(), 4, LIMIT)
    with pytest.raises(ValueError, match="no lengths"):
        plan([], cost_model(), 4, LIMIT)
    with pytest.raises(ValueError, match="world of 1 ranks"):
        plan([50], cost_model((2, 4)), 1, LIMIT)


def test_registry() -> None:
    assert list(BASELINES) == [
        "naive",
        "tuned",
        "packed",
        "karmarkar-karp",
        "megatron",
        "megatron-measured",
        "flexsp",
    ]
    assert all("\n" not in baseline.description for baseline in BASELINES.values())


# ------------------------------------------------------------------------------ packed costs


def test_packed_cost_is_exact_for_a_linear_law() -> None:
    costs = cost_model()
    lengths = [100, 300, 300, 2000]
    prices = PackedCosts(costs, lengths, 4, LIMIT, 3)
    for p in prices.sp_sizes:
        (packed,) = prices.price([[0, 1, 2, 3]], [p])
        constant = 2 * costs.time_s(1, 1000, p, 3) - costs.time_s(2, 1000, p, 3)
        apart = sum(float(costs.time_s(1, s, p, 3)) - constant for s in lengths)
        assert packed.time_s == pytest.approx(apart + constant, rel=1e-6)
        seconds, fixed_s = prices.linear_s(p, 500)
        assert seconds.sum() + fixed_s == pytest.approx(packed.time_s, rel=1e-6)
        assert packed.memory_bytes == pytest.approx(int(costs.memory_bytes(9, 300, p, 3)), rel=1e-6)
    (one,) = prices.price([[3]], [2])
    assert one.time_s == float(costs.time_s(1, 2000, 2, 3))
    assert one.memory_bytes == int(costs.memory_bytes(1, 2000, 2, 3))
    assert prices.price([], []) == []


def test_budgets_are_what_memory_allows() -> None:
    costs = cost_model()
    lengths = log_normal(30, 1)
    prices = PackedCosts(costs, lengths, 4, LIMIT, NUM_BLOCKS)
    shortest = int(lengths.min())
    for p, tokens in prices.budgets.items():
        bytes_ = costs.memory_bytes(np.array([tokens, tokens * 1.01]) / shortest, shortest, p, 8)
        assert bytes_[0] <= LIMIT
        assert bytes_[1] > LIMIT or tokens == lengths.sum()
    assert (np.diff(prices.min_sp_size[np.argsort(lengths)]) >= 0).all()


def test_first_fit_decreasing() -> None:
    lengths = np.array([6, 5, 4, 3, 2, 12])
    assert first_fit_decreasing(lengths, range(6), 10) == [[5], [0, 2], [1, 3, 4]]


# ------------------------------------------------------------------------------ static


def test_naive_is_the_papers_baseline() -> None:
    costs = cost_model()
    lengths = [200, 8000, 300, 250, 220, 9000, 280, 210]
    edges = (1, 512, 16385)
    tight = 10_000_000  # 16384 tokens need 2 ranks even with all blocks recomputed
    assert costs.min_recompute(1, 16384, 1, tight) < 0 <= costs.min_recompute(1, 16384, 2, tight)
    step = naive_step(lengths, costs, 8, tight, longest=16384, edges=edges)
    assert {(t.sp_size, t.recompute_blocks) for t in step.tasks} == {(2, NUM_BLOCKS)}
    assert [t.samples for t in step.tasks] == [(0, 2, 3, 4, 6, 7), (1,), (5,)]
    assert [t.first_rank for t in step.tasks] == [0, 2, 4]  # groups take turns
    slowest = float(costs.time_s(1, 16384, 2, NUM_BLOCKS))
    assert all(t.time_s <= slowest * (1 + 1e-9) for t in step.tasks)
    with pytest.raises(ValueError, match="in no bucket"):
        naive_step(lengths, costs, 8, LIMIT, edges=(1, 512))


def test_naive_batches_are_cut_to_the_time_of_a_longest_sample() -> None:
    costs = cost_model()
    step = naive_step([64] * 20_000, costs, 1, 1 << 40, longest=4096)
    slowest = float(costs.time_s(1, 4096, 1, NUM_BLOCKS))
    sizes = {len(t.samples) for t in step.tasks[:-1]}
    assert len(sizes) == 1
    size = sizes.pop()
    assert float(costs.time_s(size, 64, 1, NUM_BLOCKS)) <= slowest * (1 + 1e-9)
    assert float(costs.time_s(size + 1, 64, 1, NUM_BLOCKS)) > slowest


def test_padding_is_paid_for() -> None:
    costs = cost_model()
    step = tuned_step([100, 50], costs, 1, LIMIT, sp_size=1, recompute_blocks=0, pad_multiple=64)
    (only,) = step.tasks
    assert only.time_s == float(costs.time_s(2, pad_to(100, 1, 64), 1, 0))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_each_is_better_than_what_it_improves_on(seed: int) -> None:
    costs = cost_model((1, 2, 4, 8))
    steps = [log_normal(64, 10 * seed + i) for i in range(2)]
    total = {}
    for name in ("naive", "tuned", "packed", "karmarkar-karp"):
        chosen = BASELINES[name].tune(steps, costs, 8, LIMIT, longest=16384)
        total[name] = sum(
            BASELINES[name](lengths, costs, 8, LIMIT, **chosen).makespan_s for lengths in steps
        )
    assert total["tuned"] < total["naive"]
    assert total["packed"] < 1.05 * total["tuned"]
    assert total["karmarkar-karp"] < 1.05 * total["packed"]


def test_tuning_tries_with_and_without_the_buckets_of_the_data_set() -> None:
    steps = [log_normal(64, seed) for seed in range(2)]
    edges = (1, 256, 1024, 4096, 16385)
    totals = {}
    for given_edges in (None, edges):
        chosen = BASELINES["tuned"].tune(steps, cost_model(), 4, LIMIT, edges=given_edges)
        assert chosen["edges"] in (None, edges)
        totals[given_edges] = sum(
            tuned_step(lengths, cost_model(), 4, LIMIT, **chosen).makespan_s for lengths in steps
        )
        chosen["edges"] = edges
        for lengths in steps:
            tuned_step(lengths, cost_model(), 4, LIMIT, **chosen).check(64, LIMIT)
    assert totals[edges] <= totals[None]


def test_static_sizes_that_do_not_fit_are_refused() -> None:
    for plan in (tuned_step, packed_step, karmarkar_karp_step):
        with pytest.raises(ValueError, match="fit"):
            plan([16384, 10], cost_model(), 4, 10_000_000, sp_size=1)


def test_recompute_is_tuned() -> None:
    costs = cost_model()
    candidates = recompute_candidates(costs, 16384, 4, LIMIT)
    assert candidates[-1] == NUM_BLOCKS
    assert candidates[0] == int(costs.min_recompute(1, 16384, 4, LIMIT))
    steps = [log_normal(32, 3), log_normal(32, 4)]
    best = tune_recompute(megatron_step, steps, costs, 4, LIMIT, longest=16384)

    def total(r: int) -> float:
        return sum(megatron_step(s, costs, 4, LIMIT, recompute_blocks=r).makespan_s for s in steps)

    assert total(best) == min(total(r) for r in candidates)
    with pytest.raises(ValueError, match="fits at none"):
        recompute_candidates(costs, 1 << 20, 4, LIMIT)


# ------------------------------------------------------------------------------ Megatron


def by_start(step: Any) -> list[tuple[float, int, tuple[int, ...]]]:
    return sorted((t.start_s, t.sp_size, t.samples) for t in step.tasks)


def test_megatron_keeps_work_within_the_longest() -> None:
    lengths = [1000, *[250] * 24, *[50] * 30]
    num_tasks = []
    for full_pack in (True, False):
        step = megatron_step(
            lengths,
            cost_model(),
            4,
            LIMIT,
            max_tokens_per_rank=1000,
            full_pack=full_pack,
            fill=False,
        )
        step.check(len(lengths), LIMIT)
        assert all(t.sp_size == 1 for t in step.tasks)
        assert max(sum(lengths[i] for i in t.samples) for t in step.tasks) <= 1000
        work = [sum(lengths[i] ** 2 for i in t.samples) for t in step.tasks]
        assert max(work) <= 1.05 * 1000**2
        assert {0} in [set(t.samples) for t in step.tasks]  # no rank has as much as the longest
        num_tasks.append(len(step.tasks))
    # After the first round a full pack is 4 x 250 tokens, one sample 250.
    assert num_tasks[0] < num_tasks[1]


def test_megatron_gives_idle_ranks_to_small_groups() -> None:
    step = megatron_step([1000, 900], cost_model(), 8, 1 << 40, max_tokens_per_rank=1000)
    assert [t.sp_size for t in step.tasks] == [4, 4]
    step = megatron_step([1000], cost_model(), 8, 1 << 40, max_tokens_per_rank=500, fill=False)
    assert [t.sp_size for t in step.tasks] == [2]
    with pytest.raises(ValueError, match="max_tokens_per_rank=100"):
        megatron_step([1000], cost_model(), 8, 1 << 40, max_tokens_per_rank=100)


def test_measured_work_limits_seconds() -> None:
    # s^2 has no linear term: a full rank of short samples counts as little, but takes as long.
    lengths = [2000, *[100] * 200]
    costs = cost_model()
    cap = 1.05 * float(costs.time_s(1, 2000, 1, 0))
    steps = [
        plan(lengths, costs, 4, LIMIT, recompute_blocks=0, full_pack=False, fill=False)
        for plan in (megatron_step, megatron_measured_step)
    ]
    longest = [max(t.time_s for t in step.tasks) for step in steps]
    assert longest[1] <= cap < longest[0]


# ------------------------------------------------------------------------------ Karmarkar-Karp


def optimum(weights: Sequence[float], num_bins: int) -> float:
    best = float("inf")
    for bins in itertools.product(range(num_bins), repeat=len(weights)):
        best = min(best, np.bincount(bins, weights, num_bins).max())
    return best


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=7), st.integers(1, 3))
def test_partition_is_near_the_optimum(weights: list[int], num_bins: int) -> None:
    bins = partition(weights, num_bins)
    assert sorted(i for items in bins for i in items) == list(range(len(weights)))
    assert len(bins) == num_bins
    assert all(bins) or len(weights) < num_bins
    largest = max(sum(weights[i] for i in items) for items in bins)
    # The method's worst case is 7/6 of the optimum for two bins and below 4/3 for more.
    assert largest <= 4 / 3 * optimum(weights, num_bins) + 1e-9


def test_partition_balances_many_items_almost_exactly() -> None:
    weights = np.random.default_rng(0).lognormal(0, 1, 256).tolist()
    sums = [sum(weights[i] for i in items) for items in partition(weights, 8)]
    assert max(sums) - min(sums) < 1e-3 * max(sums)


def test_partition_leaves_no_bin_empty() -> None:
    assert all(partition([0.0, 0.0, 0.0, 5.0], 3))
    assert partition([1.0], 3) == [[0], [], []]


def test_karmarkar_karp_balances_seconds() -> None:
    lengths = log_normal(256, 5)
    step = karmarkar_karp_step(lengths, cost_model(), 8, 1 << 40, sp_size=2)
    assert len(step.tasks) == 4
    assert step.idle_share < 0.01
    tight = karmarkar_karp_step(lengths, cost_model(), 8, 10_000_000, sp_size=2)
    tight.check(256, 10_000_000)
    assert len(tight.tasks) > 4

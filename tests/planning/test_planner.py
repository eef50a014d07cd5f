"""Whole epochs: the sampling contract, limits, balance, step size, baselines, wrong input."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from lightning_dcp.planning import (
    POLICIES,
    CostModel,
    EpochPlan,
    EpochPlanner,
    PlanningOptions,
    best_static,
)
from lightning_dcp.planning.feasible import less_margin
from tests.planning.costs import FIXED_BYTES, NUM_BLOCKS, cost_model, log_normal

SP_SIZES = (1, 2, 4, 8, 16, 32)
AMPLE = 10**12


def planner_for(lengths: Any, world_size: int, **kwargs: Any) -> EpochPlanner:
    names = ("policy", "tokens_per_step", "min_accumulation", "max_accumulation", "bucket_edges")
    names += ("pad_multiple", "sp_sizes", "max_batch_size", "on_too_long", "max_buckets")
    options = PlanningOptions(**{k: kwargs.pop(k) for k in names if k in kwargs})
    kwargs.setdefault("memory_limit_bytes", AMPLE)
    kwargs.setdefault("cost_model", cost_model(SP_SIZES))
    return EpochPlanner(lengths=lengths, world_size=world_size, options=options, **kwargs)


def check_epoch(planner: EpochPlanner, epoch: EpochPlan, sample_ids: set[int]) -> None:
    """All invariants that hold for every epoch of every policy."""
    model, options = planner.cost_model, planner.options
    assert len(epoch) == planner.num_iterations
    seen: list[int] = []
    predicted_s = 0.0
    for iteration, plan in enumerate(epoch):
        assert plan.iteration == iteration and plan.epoch == epoch.epoch
        assert plan.world_size == planner.world_size
        predicted_s += plan.makespan_s + model.step_overhead_s
        assert plan.makespan_s == pytest.approx(float(epoch.makespan_s[iteration]))
        assert plan.num_tokens == epoch.tokens_per_step[iteration]
        for m in plan.micro_batches:
            seen.extend(m.sample_ids)
            lengths = planner.lengths[list(m.sample_ids)]
            longest = int(lengths.max())
            multiple = np.lcm(m.sp_size, options.pad_multiple)
            assert m.seq_len >= longest and m.seq_len % multiple == 0
            assert m.seq_len - longest < multiple
            assert m.num_tokens == lengths.sum()
            assert m.first_rank % m.sp_size == 0
            key = (m.batch_size, m.seq_len, m.sp_size)
            assert m.est_bytes == model.memory_bytes(*key, m.recompute_blocks)
            assert m.est_bytes <= planner.memory_limit_bytes
            assert m.est_time_s == pytest.approx(float(model.time_s(*key, m.recompute_blocks)))
            if options.policy == "dcp-inter":
                assert m.recompute_blocks == NUM_BLOCKS
            elif options.policy == "dcp-intra" and planner.elastic:
                limit = planner.memory_limit_bytes
                assert m.recompute_blocks == model.min_recompute(*key, limit)
            assert m.sp_size not in planner.sp_size_exclusions
            assert options.sp_sizes is None or m.sp_size in options.sp_sizes
            assert options.max_batch_size is None or m.batch_size <= options.max_batch_size
    assert len(seen) == len(sample_ids) and set(seen) == sample_ids
    assert epoch.predicted_time_s == pytest.approx(predicted_s)


@settings(deadline=None, max_examples=100)
@given(
    world_size=st.sampled_from([1, 2, 3, 4, 7, 32]),
    n=st.integers(1, 150),
    seed=st.integers(0, 1000),
    shape=st.sampled_from(["log-normal", "equal", "two clusters", "one long"]),
    policy=st.sampled_from(POLICIES),
    batch_size=st.integers(1, 8),
    limit=st.sampled_from([AMPLE, FIXED_BYTES + 60_000_000]),
    more=st.fixed_dictionaries(
        {},
        optional={
            "pad_multiple": st.sampled_from([3, 8]),
            "tokens_per_step": st.sampled_from([1, 50, 10_000, 10**9]),
            "max_batch_size": st.integers(1, 3),
            "min_accumulation": st.sampled_from([2, 3]),
            "max_accumulation": st.sampled_from([3, 16]),
            "max_buckets": st.integers(1, 4),
            "sp_sizes": st.sampled_from([(1,), (1, 2, 4)]),
        },
    ),
    excluded=st.sampled_from([{}, {2: "6 heads"}, {4: "6 heads", 8: "6 heads"}]),
    shuffle=st.booleans(),
)
def test_every_sample_exactly_once(  # type: ignore[no-untyped-def]
    world_size, n, seed, shape, policy, batch_size, limit, more, excluded, shuffle
) -> None:
    rng = np.random.default_rng(seed)
    lengths = {
        "log-normal": log_normal(n, seed),
        "equal": np.full(n, 77),
        "two clusters": rng.choice([20, 6000], n, p=[0.9, 0.1]),
        "one long": np.where(np.arange(n) == n // 2, 16384, rng.integers(5, 60, n)),
    }[shape]
    if policy == "global-batch":
        more.pop("tokens_per_step", None)
    planner = planner_for(
        lengths,
        world_size,
        policy=policy,
        batch_size=batch_size,
        memory_limit_bytes=limit,
        sp_size_exclusions=excluded,
        shuffle=shuffle,
        seed=seed,
        on_too_long="truncate",
        **more,
    )
    for epoch in (0, 1):
        check_epoch(planner, planner.epoch(epoch), set(range(n)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 32])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_sample_exactly_once_in_long_epochs(world_size: int, policy: str) -> None:
    n = 1013  # a prime: nothing divides evenly
    planner = planner_for(log_normal(n), world_size, policy=policy, batch_size=3)
    check_epoch(planner, planner.epoch(0), set(range(n)))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_fewer_samples_than_ranks(n: int) -> None:
    planner = planner_for(np.arange(100, 100 + n), 7)
    epoch = planner.epoch(0)
    assert planner.num_iterations == len(epoch) == 1
    check_epoch(planner, epoch, set(range(n)))
    plan = epoch[0]
    assert len({r for m in plan.micro_batches for r in m.ranks}) >= n, "spread over the ranks"


def test_two_epochs_differ_and_the_same_seed_gives_the_same_bytes() -> None:
    lengths = log_normal(500)
    first, again = (planner_for(lengths, 4, batch_size=2, seed=5) for _ in range(2))
    other = planner_for(lengths, 4, batch_size=2, seed=6)
    texts = [[p.to_json() for p in planner.epoch(1)] for planner in (first, again)]
    assert texts[0] == texts[1]
    assert first.epoch(1).digest() == again.epoch(1).digest()
    assert first.fingerprint == again.fingerprint != other.fingerprint
    for different in (first.epoch(0), other.epoch(1)):
        assert [p.to_json() for p in different][:5] != texts[0][:5]
        assert (
            different[0].micro_batches[0].sample_ids
            != first.epoch(1)[0].micro_batches[0].sample_ids
        )
        assert len(different) == len(texts[0]) == first.num_iterations
    assert first.epoch(0).digest() != first.epoch(1).digest()


def test_options_seed_goes_first_and_unshuffled_epochs_start_at_the_start() -> None:
    lengths = log_normal(60)
    options = PlanningOptions(seed=9)
    common: dict[str, Any] = {
        "lengths": lengths,
        "cost_model": cost_model(),
        "world_size": 2,
        "memory_limit_bytes": AMPLE,
    }
    a = EpochPlanner(**common, options=options, seed=1)
    b = EpochPlanner(**common, seed=9)
    assert a.epoch(0).digest() == b.epoch(0).digest()
    plain = EpochPlanner(**common, shuffle=False)
    assert (
        plain.epoch(0)[0].to_dict()["micro_batches"] == plain.epoch(5)[0].to_dict()["micro_batches"]
    )
    assert any(0 in m.sample_ids for m in plain.epoch(0)[0].micro_batches)


def test_a_planner_that_is_no_longer_used_is_freed() -> None:
    planner = planner_for(log_normal(300), 4)
    planner.epoch(0)
    planner.bucket_table()
    gone = weakref.ref(planner._problem)
    del planner
    gc.collect()
    assert gone() is None, "its tables and lengths would stay for as long as the process"


def test_inputs_name_what_differs() -> None:
    lengths = log_normal(100)
    base = planner_for(lengths, 4)
    changed = {
        "lengths": planner_for(np.r_[lengths[:-1], lengths[-1] + 1], 4),
        "seed": planner_for(lengths, 4, seed=1),
        "cost profile": planner_for(lengths, 4, cost_model=cost_model(SP_SIZES, 2e-3)),
        "world size": planner_for(lengths, 2),
        "planning options": planner_for(lengths, 4, max_buckets=3),
        "excluded SP sizes": planner_for(lengths, 4, sp_size_exclusions={4: "heads"}),
        "memory limit": planner_for(lengths, 4, memory_limit_bytes=AMPLE - 1),
    }
    for name, planner in changed.items():
        differing = {k for k in base.inputs if base.inputs[k] != planner.inputs[k]}
        assert differing == {name}
        assert planner.fingerprint != base.fingerprint


# Length mix --------------------------------------------------------------------------------------


@functools.lru_cache
def lengths_of(shape: str, n: int) -> np.ndarray:
    rng = np.random.default_rng(11)
    return {
        "log-normal": log_normal(n, 11, sigma=1.2, longest=50_000),
        "uniform": rng.integers(10, 3000, n),
        "two clusters": np.where(
            rng.random(n) < 0.9, rng.integers(50, 100, n), rng.integers(4000, 8000, n)
        ),
        "exponential": 1 + rng.exponential(400, n).astype(np.int64),
    }[shape]


@pytest.mark.parametrize("shape", ["log-normal", "uniform", "two clusters", "exponential"])
@pytest.mark.parametrize("policy", ["dcp-inter", "dcp-intra"])
@pytest.mark.parametrize(
    ("world_size", "batch_size"),
    # Steps of few samples are planned by a local search, which takes its time.
    [pytest.param(4, 1, marks=pytest.mark.slow), (4, 4), (32, 1)],
)
def test_each_tenth_of_an_epoch_has_the_length_mix_of_the_whole(
    shape: str, policy: str, world_size: int, batch_size: int
) -> None:
    lengths = lengths_of(shape, 20_000)
    planner = planner_for(lengths, world_size, policy=policy, batch_size=batch_size, seed=2)
    assert planner.elastic
    epoch = planner.epoch(0)
    bounds = [round(len(epoch) * i / 10) for i in range(11)]
    for start, stop in pairwise(bounds):
        ids = [i for plan in epoch[start:stop] for m in plan.micro_batches for i in m.sample_ids]
        test = ks_2samp(lengths[ids], lengths)
        # Ten tenths in each of 24 epochs: chance alone goes below 0.005 about once.
        assert test.pvalue > 0.005, (start, test)
        assert test.statistic < 0.06


# Step size ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("world_size", "batch_size"), [(4, 4), (7, 4), (32, 4)])
def test_steps_have_about_the_tokens_aimed_at(
    policy: str, world_size: int, batch_size: int
) -> None:
    lengths = log_normal(8000, 4)
    planner = planner_for(lengths, world_size, policy=policy, batch_size=batch_size)
    target = batch_size * world_size * lengths.mean()
    assert planner.tokens_per_step == round(target)
    assert planner.num_iterations == pytest.approx(lengths.sum() / target, abs=1)
    tokens = planner.epoch(0).tokens_per_step
    assert tokens.mean() == pytest.approx(target, rel=0.03)
    middle = tokens[: len(tokens) * 9 // 10]
    assert middle.mean() == pytest.approx(target, rel=0.1), "not made up for at the end"
    assert tokens.std() < 0.45 * tokens.mean()
    assert tokens[-1] < 2.5 * target and np.median(tokens) > 0.6 * target


def test_tokens_per_step_is_followed() -> None:
    lengths = log_normal(3000)
    for target in (5_000, 40_000, 10**9):
        planner = planner_for(lengths, 4, tokens_per_step=target)
        assert planner.num_iterations == max(1, round(lengths.sum() / target))


def test_gmax_limits_the_makespan_and_lengthens_the_epoch() -> None:
    lengths = np.full(4000, 50)
    for gmax in (1, 2, 4):
        planner = planner_for(
            lengths, 4, max_batch_size=5, max_accumulation=gmax, tokens_per_step=50 * 5 * 4 * 8
        )
        epoch = planner.epoch(0)
        assert planner.num_iterations == 4000 / (5 * 4 * gmax)
        for plan in epoch:
            longest = max(m.est_time_s for m in plan.micro_batches)
            assert plan.makespan_s <= gmax * longest * (1 + 1e-6)
            assert max(plan.accumulation) <= gmax


def test_gmin_makes_groups_accumulate() -> None:
    lengths = log_normal(4000)
    planner = planner_for(lengths, 4, batch_size=8, min_accumulation=6)
    accumulated = [max(plan.accumulation) for plan in planner.epoch(0)[:-1]]
    assert min(accumulated) >= 6
    plain = planner_for(lengths, 4, batch_size=8)
    assert min(max(plan.accumulation) for plan in plain.epoch(0)[:-1]) < 6


# Balance and baselines ---------------------------------------------------------------------------


def test_intra_beats_inter_beats_static() -> None:
    lengths = log_normal(12_000, sigma=1.2)
    times = {}
    for policy in ("dcp-inter", "dcp-intra"):
        planner = planner_for(lengths, 8, policy=policy, batch_size=4)
        times[policy] = planner.epoch(0).predicted_time_s
        static = best_static(planner)
        assert not static.elastic and static.options.policy == "bucket"
        assert len({row.sp_size for row in static.bucket_table()}) == 1
        assert static.num_iterations == planner.num_iterations
        assert times[policy] < 0.97 * static.epoch(0).predicted_time_s
    # Where memory is spare nothing is recomputed: a forward of about three is saved.
    assert times["dcp-intra"] < 0.85 * times["dcp-inter"]


def test_never_much_worse_than_static_even_where_nothing_is_to_be_gained() -> None:
    for lengths in (np.full(3000, 300), log_normal(3000, sigma=0.2)):
        for world_size in (1, 3, 8):
            planner = planner_for(lengths, world_size, batch_size=4)
            static = best_static(planner).epoch(0).predicted_time_s
            assert planner.epoch(0).predicted_time_s <= 1.02 * static


@pytest.mark.parametrize(("world_size", "most"), [(4, 0.03), (8, 0.05), (32, 0.08)])
def test_idle_share_is_low(world_size: int, most: float) -> None:
    lengths = log_normal(100_000, sigma=1.1)
    epoch = planner_for(lengths, world_size, batch_size=8).epoch(0)
    assert epoch.predicted_idle_share < most
    assert epoch.padding_share < 0.10


@pytest.mark.parametrize(("world_size", "batch_size"), [(4, 8), (8, 8), (4, 32)])
def test_samples_share_a_micro_batch_only_while_padding_is_cheap(
    world_size: int, batch_size: int
) -> None:
    """Micro-batches as large as fit into a rank's time would be 3.2 to 3.6% padding."""
    planner = planner_for(
        log_normal(4000, 4), world_size, batch_size=batch_size, policy="global-batch"
    )
    assert planner.epoch(0).padding_share < 0.025


def test_long_samples_get_larger_groups() -> None:
    table = planner_for(log_normal(20_000), 8, batch_size=1).bucket_table()
    assert table[0].sp_size < table[-1].sp_size
    assert all(row.hi == after.lo for row, after in pairwise(table))
    assert sum(row.num_samples for row in table) == 20_000
    for row in table:
        assert [c.sp_size for c in row.alternatives] == [1, 2, 4, 8]
        expected = row.batch_size * (row.hi - 1) / (row.sp_size * row.time_s)
        assert row.tokens_per_s_per_rank == pytest.approx(expected, rel=0.05)


def limit_for(model: CostModel, usable: int) -> int:
    """The least memory limit of which so much is usable, after the margin for errors."""
    return math.ceil(usable + model.memory_error * (usable - FIXED_BYTES)) + 1


def test_recomputes_only_where_memory_needs_it() -> None:
    lengths = np.r_[np.full(200, 100), np.full(20, 8000)]
    model = cost_model()
    wanted = int(model.memory_bytes(1, 8000, 4, 3))
    limit = limit_for(model, wanted)
    planner = planner_for(lengths, 4, cost_model=model, memory_limit_bytes=limit)
    assert wanted <= planner.usable_bytes <= limit
    micro_batches = [m for plan in planner.epoch(0) for m in plan.micro_batches]
    long = [m for m in micro_batches if m.seq_len == 8000]
    assert {(m.sp_size, m.batch_size) for m in long} == {(4, 1)}
    assert {m.recompute_blocks for m in long} == {3}
    assert {m.recompute_blocks for m in micro_batches if m.seq_len < 200} == {0}


def test_margin_for_the_error_of_the_memory_prediction() -> None:
    model = cost_model()
    held_out = dataclasses.replace(model.held_out, p95_memory=0.25)
    unsure = dataclasses.replace(model, held_out=held_out)
    limit = FIXED_BYTES + 5_000_000
    assert planner_for([10] * 8, 1, cost_model=model, memory_limit_bytes=limit).usable_bytes > (
        FIXED_BYTES + 4_900_000
    )
    planner = planner_for([10] * 8, 1, cost_model=unsure, memory_limit_bytes=limit)
    assert planner.usable_bytes == FIXED_BYTES + 4_000_000
    for plan in planner.epoch(0):
        assert all(m.est_bytes <= planner.usable_bytes for m in plan.micro_batches)


def test_user_edges_and_empty_buckets() -> None:
    planner = planner_for([5, 6, 50, 60], 2, bucket_edges=[1, 10, 20, 40, 100])
    assert [(row.lo, row.hi) for row in planner.bucket_table()] == [(1, 40), (40, 100)]
    with pytest.raises(ValueError, match="in no bucket"):
        planner_for([5, 500], 2, bucket_edges=[1, 10])


# Exclusions and wrong input ----------------------------------------------------------------------


def test_exclusions_have_printable_reasons() -> None:
    reason = "4 does not divide the 6 attention heads of model.blocks"
    model = cost_model((1, 2, 4))
    limit = limit_for(model, int(model.memory_bytes(1, 5000, 2, NUM_BLOCKS)))
    planner = planner_for(
        [100] * 50 + [5000] * 3,
        8,
        cost_model=model,
        memory_limit_bytes=limit,
        sp_size_exclusions={4: reason},
    )
    texts = [str(e) for e in planner.exclusions]
    assert f"p=4: {reason}" in texts
    assert any("p=8: not measured" in t for t in texts)
    lacking = [t for t in texts if t.startswith("p=1 for lengths [")]
    assert len(lacking) == 1 and "5000 tokens lacks" in lacking[0] and "of memory" in lacking[0]
    used = {m.sp_size for plan in planner.epoch(0) for m in plan.micro_batches}
    assert used <= {1, 2} and 2 in used
    allowed = planner_for([100] * 50, 4, cost_model=model, sp_sizes=(1, 2))
    assert any("p=4: not among the allowed" in str(e) for e in allowed.exclusions)
    small = planner_for([100] * 50, 2, cost_model=model)
    assert any("p=4: larger than the world of 2 ranks" in str(e) for e in small.exclusions)


def too_long(on_too_long: str, **kwargs: Any) -> EpochPlanner:
    model = cost_model((1, 2))
    limit = limit_for(model, int(model.memory_bytes(1, 1000, 2, NUM_BLOCKS)))
    return planner_for(
        [100, 3000, 200, 999, 2500] * 10,
        2,
        cost_model=model,
        memory_limit_bytes=limit,
        on_too_long=on_too_long,
        dataset_name="texts",
        **kwargs,
    )


def test_a_sample_that_fits_nowhere_is_an_error() -> None:
    with pytest.raises(ValueError) as caught:
        too_long("error")
    message = str(caught.value)
    model = cost_model((1, 2))
    usable = less_margin(limit_for(model, int(model.memory_bytes(1, 1000, 2, NUM_BLOCKS))), model)
    missing = model.memory_bytes(1, 3000, 2, NUM_BLOCKS) - usable
    for part in ("Sample 1 of texts has length 3000", f"({missing} bytes)", "20 sample(s)", "skip"):
        assert part in message


@pytest.mark.parametrize("policy", POLICIES)
def test_too_long_samples_can_be_skipped_or_cut(policy: str) -> None:
    skipped = too_long("skip", policy=policy)
    assert skipped.skipped_ids == tuple(i for i in range(50) if i % 5 in (1, 4))
    check_epoch(skipped, skipped.epoch(0), {i for i in range(50) if i % 5 not in (1, 4)})
    cut = too_long("truncate", policy=policy)
    assert cut.truncate_to == 1000 and cut.lengths.max() == 1000 and cut.skipped_ids == ()
    check_epoch(cut, cut.epoch(0), set(range(50)))
    fits = planner_for([10, 20], 1, on_too_long="truncate")
    assert fits.truncate_to is None


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match=r"below the model's own size.*Raise memory_limit_bytes"):
        planner_for([10], 1, memory_limit_bytes=FIXED_BYTES)
    with pytest.raises(ValueError, match="empty"):
        planner_for([], 1)
    with pytest.raises(ValueError, match="Sample 1 of the dataset has length 0"):
        planner_for([5, 0], 1)
    with pytest.raises(ValueError, match=r"No SP size can be used. .*p=1: broken"):
        planner_for([5], 1, sp_size_exclusions={1: "broken"})
    with pytest.raises(ValueError, match="world_size"):
        planner_for([5], 0)
    model = cost_model((1,))
    with pytest.raises(ValueError, match="All samples would be skipped"):
        planner_for(
            [4000],
            1,
            cost_model=model,
            memory_limit_bytes=int(model.memory_bytes(1, 3000, 1, NUM_BLOCKS)),
            on_too_long="skip",
        )
    planner = planner_for([5, 6], 1)
    with pytest.raises(ValueError, match="epoch must not be negative"):
        planner.epoch(-1)
    with pytest.raises(IndexError, match="Iteration 7"):
        planner.epoch(0)[7]

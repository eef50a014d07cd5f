"""Corrected costs, what they are corrected by, and that plans follow what really takes time."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from lightning_dcp.planning import CorrectedCosts, Corrections, EpochPlanner, PlanningOptions
from lightning_dcp.planning.adapting import DriftMonitor, Gain
from lightning_dcp.planning.slowness import Observed, Slowness, slowness_of
from tests.planning.costs import FIXED_BYTES, cost_model, log_normal
from tests.planning.simulated_drift import BusyMachine, Law, Run, makespan, train, true_seconds

SP_SIZES = (1, 2, 4, 8)
LIMIT = FIXED_BYTES + 200_000_000
EDGES = (1, 100, 300, 1000, 3000, 16385)


def planner_for(n: int, world_size: int, *, lengths: Any = None, **options: Any) -> EpochPlanner:
    shuffle = options.pop("shuffle", True)
    return EpochPlanner(
        lengths=log_normal(n, 1) if lengths is None else lengths,
        cost_model=cost_model(SP_SIZES),
        world_size=world_size,
        memory_limit_bytes=LIMIT,
        batch_size=8,
        shuffle=shuffle,
        options=PlanningOptions(**options),
    )


def corrections(planner: EpochPlanner, **factors: Any) -> Corrections:
    return dataclasses.replace(Corrections.none(planner.bucket_edges), **factors)


# ---- costs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_corrected_costs_keep_their_order(seed: int) -> None:
    """Whatever the factors: costs do not fall with the length, and the fewest blocks are found."""
    rng = np.random.default_rng(seed)
    model = cost_model(SP_SIZES)
    given = Corrections(
        bucket_edges=EDGES,
        time_factors=tuple(np.exp(rng.normal(0, 0.7, 5)).tolist()),
        memory_factors=tuple((1 + rng.exponential(0.7, 5)).tolist()),
    )
    costs = CorrectedCosts(model, given)
    s = np.arange(8, 20_000, 8)
    factors = np.array(given.memory_factors)[given.bucket_of(s)]
    for p in (1, 2, 8):
        for b in (1, 3):
            for r in (0, 2):
                assert (np.diff(costs.time_s(b, s, p, r)) >= 0).all()
                assert (np.diff(costs.memory_bytes(b, s, p, r)) >= 0).all()
                added = model.memory_bytes(b, s, p, r) - FIXED_BYTES
                assert (costs.memory_bytes(b, s, p, r) >= FIXED_BYTES + added * factors - 1).all()
        for limit in (FIXED_BYTES + 3_000_000, FIXED_BYTES + 60_000_000):
            found = costs.min_recompute(3, s, p, limit)
            tried = np.full(s.size, -1)
            for r in range(costs.num_blocks, -1, -1):
                tried = np.where(costs.memory_bytes(3, s, p, r) <= limit, r, tried)
            assert (found == tried).all()
    assert float(costs.time_s(2, 50, 1)) == float(model.time_s(2, 50, 1)) * given.time_factors[0]
    assert costs.memory_bytes(1, 64, 1) == costs.memory_bytes(1, np.array([64]), 1)[0]


def test_corrections_survive_a_checkpoint_and_name_what_is_wrong() -> None:
    given = Corrections(
        bucket_edges=EDGES,
        time_factors=(1.1, 1.2, 0.3, 1.0, 1.5),
        memory_factors=(1.0, 1.25, 1.0, 1.0, 2.0),
        rank_speed=(1.0, 1.7),
    )
    again = Corrections.from_plain(json.loads(json.dumps(given.to_plain())))
    assert again == given and again.fingerprint == given.fingerprint
    assert given.with_memory_factor(0, 1.5).memory_factors == (1.5, 1.25, 1.0, 1.0, 2.0)
    assert not given.changes_nothing and Corrections.none(EDGES).changes_nothing
    for change, text in (
        ({"memory_factors": (0.9,) * 5}, "memory_factors must be finite and at least 1; got 0.9"),
        ({"time_factors": (1.0,)}, "one factor for each of 5 buckets; got 1"),
        ({"time_factors": (float("nan"),) * 5}, "time_factors must be finite"),
        ({"bucket_edges": (5, 5)}, "increasing"),
    ):
        with pytest.raises(ValueError, match=text):
            dataclasses.replace(given, **change)


def test_a_corrected_planner_keeps_samples_and_steps() -> None:
    planner = planner_for(400, 4)
    none = corrections(planner)
    assert planner.corrections == none and planner.corrected(none).inputs == planner.inputs
    num = len(none.time_factors)
    steep = corrections(planner, time_factors=tuple(np.linspace(1, 3, num).tolist()))
    other = planner.corrected(steep)
    assert other.num_iterations == planner.num_iterations
    assert other.tokens_per_step == planner.tokens_per_step
    assert other.corrections == steep
    assert {k for k in planner.inputs if planner.inputs[k] != other.inputs[k]} == {"cost profile"}
    # Replaced, not multiplied.
    assert other.corrected(steep).fingerprint == other.fingerprint
    assert other.corrected(none).epoch(0).digest() == planner.epoch(0).digest()
    ids = other.epoch(0).sample_ids(len(other.epoch(0)))
    assert sorted(ids.tolist()) == list(range(400))
    with pytest.raises(ValueError, match="for each of 4 ranks; got 2"):
        planner.corrected(corrections(planner, rank_speed=(1.0, 2.0)))
    with pytest.raises(ValueError, match="fits no configuration"):
        planner.corrected(corrections(planner, memory_factors=(1.0,) * (num - 1) + (5000.0,)))
    skipping = planner_for(400, 4, on_too_long="skip")
    with pytest.raises(ValueError, match="cannot change in the middle of a run"):
        skipping.corrected(corrections(planner, memory_factors=(1.0,) * (num - 1) + (5000.0,)))


# ---- ranks of unlike speed -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "slow"),
    [
        (2, {0: 2.0}),
        pytest.param(4, {1: 2.0}, marks=pytest.mark.slow),
        (6, {3: 2.0}),
        pytest.param(8, {5: 2.0}, marks=pytest.mark.slow),
        (4, {3: 0.5}),
    ],
)
@pytest.mark.parametrize("options", [{}, {"packing": True}, {"policy": "global-batch"}], ids=str)
def test_slow_ranks_get_less_work(
    world_size: int, slow: dict[int, float], options: dict[str, Any]
) -> None:
    # No sample takes a whole step: what is best is then what all ranks together can do.
    lengths = log_normal(80 * world_size, 1, longest=3000)
    planner = planner_for(lengths.size, world_size, lengths=lengths, **options)
    speed = tuple(slow.get(rank, 1.0) for rank in range(world_size))
    given = corrections(planner, rank_speed=speed)
    aware = planner.corrected(given)
    plans = aware.epoch(0)
    assert plans.digest() == planner.corrected(given).epoch(0).digest()
    assert sorted(plans.sample_ids(len(plans)).tolist()) == list(range(80 * world_size))
    assert (plans.memory_bytes <= aware.usable_bytes).all()
    even_s = float(planner.epoch(0).makespan_s.sum())
    best_s = even_s * world_size / sum(1 / factor for factor in speed)
    assert float(plans.makespan_s.sum()) <= best_s / 0.9
    blind_s = float(planner.epoch(0).makespan_by(aware.cost_model, aware.place_speed).sum())
    assert Gain.of(aware, planner.epoch(0), plans).speedup == pytest.approx(
        blind_s / float(plans.makespan_s.sum()), rel=0.02
    )
    # Predictions are those of the slowest of each group.
    for plan in plans[:3]:
        for m in plan.micro_batches:
            if not m.packed:
                key = (m.batch_size, m.seq_len, m.sp_size, m.recompute_blocks)
                slowest = max(speed[rank] for rank in m.ranks)
                expected = float(planner.cost_model.time_s(*key)) * slowest
                assert m.est_time_s == pytest.approx(expected)


# ---- what is found out ---------------------------------------------------------------------------


def observed(
    buckets: Sequence[float], ranks: Sequence[float], sp_sizes: Sequence[int], seed: int = 0
) -> Observed:
    """Micro-batches on all blocks of some sizes, with noise and pauses."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(8):
        for p in sp_sizes:
            for first in range(0, len(ranks), p):
                for k, factor in enumerate(buckets):
                    predicted = float(np.exp(rng.normal(0, 0.5)))
                    slowest = max(ranks[first : first + p])
                    noise = 1 + abs(rng.normal(0, 0.03)) + 20 * (rng.random() < 0.05)
                    rows.append((first, p, k, predicted, predicted * factor * slowest * noise))
    first_, size, bucket, predicted_, measured = (np.array(c) for c in zip(*rows, strict=True))
    return Observed(
        first_rank=first_,
        sp_size=size,
        bucket=bucket,
        predicted_s=predicted_,
        measured_s=measured,
    )


@pytest.mark.parametrize("sp_sizes", [(1,), (1, 4), (2, 4), (1, 2, 8)])
@pytest.mark.parametrize("slow", [1.0, 2.0])
def test_a_ranks_slowness_is_told_from_a_buckets(sp_sizes: Sequence[int], slow: float) -> None:
    buckets, ranks = (1.0, 1.0, 1.9), [1.0] * 8
    ranks[5] = slow
    found = slowness_of(observed(buckets, ranks, sp_sizes), (1, 10, 100, 1000), 8)
    assert found.buckets == pytest.approx(buckets, rel=0.06)
    # In groups everybody waits: those that are never apart cannot be told apart.
    expected = [slow if rank // min(sp_sizes) == 5 // min(sp_sizes) else 1.0 for rank in range(8)]
    assert found.ranks == pytest.approx(expected, rel=0.06)
    assert found == slowness_of(observed(buckets, ranks, sp_sizes), (1, 10, 100, 1000), 8)
    # Where plans count ranks otherwise, it is still the rank that is named.
    layout = [7, 6, 5, 4, 3, 2, 1, 0]
    turned = slowness_of(observed(buckets, ranks, sp_sizes), (1, 10, 100, 1000), 8, layout)
    assert turned.ranks == pytest.approx(expected[::-1], rel=0.06)


def test_nothing_is_planned_again_for_noise_or_what_is_slower_everywhere() -> None:
    none = Corrections.none((1, 10, 100))

    def seen(*buckets: float, ranks: Sequence[float] = (1.0, 1.0), error: float = 0.01) -> Slowness:
        return Slowness(
            bucket_edges=(1, 10, 100),
            buckets=buckets,
            ranks=tuple(ranks),
            work=(0.5, 0.5),
            bucket_errors=(error, error),
            rank_errors=(error, error),
        )

    def proposed(*windows: Slowness, **options: bool) -> Corrections | None:
        monitor = DriftMonitor(**options)
        for window in windows:
            monitor.observe(window, none)
        return monitor.proposal(none)

    drifted = seen(1.0, 2.0)
    assert proposed(drifted, drifted) is None, "two windows are not enough"
    assert proposed(*[seen(1.3, 1.3)] * 6) is None
    assert proposed(*[seen(1.0, 1.05)] * 6) is None
    assert proposed(drifted, seen(1.0, 1.0), drifted) is None, "not all of the time"
    assert proposed(seen(1.0, 1.2), seen(1.0, 2.8), seen(1.0, 1.3)) is None, "not alike"
    assert proposed(*[seen(1.0, 1.5, error=0.2)] * 6) is None, "within the errors"
    assert proposed(*[drifted] * 3, adapt_buckets=False) is None
    slow = seen(1.0, 1.0, ranks=(1.0, 1.8))
    assert proposed(*[slow] * 6) is None, "by default a slow rank is shown, and no more"
    found = proposed(*[drifted] * 3)
    assert found is not None and found.time_factors == pytest.approx((1.0, 2.0), rel=0.02)
    found = proposed(*[slow] * 3, adapt_ranks=True)
    assert found is not None and found.rank_speed == pytest.approx((1.0, 1.8), rel=0.02)
    # What may be noise is left out of what is corrected.
    found = proposed(*[seen(1.0, 2.0, error=0.15)] * 3)
    assert found is not None and found.time_factors[1] == pytest.approx(2.0 * 0.841, rel=0.01)
    monitor = DriftMonitor()
    for _ in range(2):
        monitor.observe(slow, none)
        assert monitor.slow_rank is None
    monitor.observe(slow, none)
    assert monitor.slow_rank == (1, pytest.approx(1.8)) and monitor.proposal(none) is None
    monitor = DriftMonitor()
    # Not again and again.
    for _ in range(20):
        for _ in range(3):
            monitor.observe(drifted, none)
        if monitor.proposal(none) is None:
            break
        monitor.tried(taken=False)
    else:
        pytest.fail("no end of tries")
    assert not Gain(old_s=1.0, new_s=0.98).is_worth(0.0), "less than a few percent"
    assert Gain(old_s=1.0, new_s=0.9).is_worth(0.01)
    assert not Gain(old_s=1.0, new_s=0.9).is_worth(0.2), "planning takes longer"


# ---- a training run with a law that nobody knows -------------------------------------------------


def long_ones_slow(now: int, length: int, p: int) -> float:
    return 3.0 if now >= 20 and length >= 1500 else 1.0


def longer_slower(now: int, length: int, p: int) -> float:
    return 1 + length / 1000 if now >= 20 else 1.0


def as_predicted(now: int, length: int, p: int) -> float:
    return 1.0


def slower_alike(now: int, length: int, p: int) -> float:
    return 1.3


def true_s(planner: EpochPlanner, run: Run, first: int, law: Law, speed: Sequence[float]) -> float:
    """True seconds if the planner's plans had been followed from some iteration on."""
    consumed = np.zeros(planner.lengths.size, dtype=bool)
    consumed[run.samples[0][: sum(run.counts[:first])]] = True
    num = len(run.makespans) - first
    rest = planner.rest(0, consumed, first_iteration=first, num_iterations=num)
    return sum(
        makespan(plan, true_seconds(planner, plan, first + i, law, speed))
        for i, plan in enumerate(rest)
    )


def knowing(planner: EpochPlanner, law: Law, speed: Sequence[float]) -> EpochPlanner:
    """The planner that is told the law."""
    factors = [law(10**6, (lo + hi) // 2, 1) for lo, hi in pairwise(planner.bucket_edges)]
    uneven = tuple(speed) if len(set(speed)) > 1 else ()
    return planner.corrected(corrections(planner, time_factors=tuple(factors), rank_speed=uneven))


@pytest.mark.parametrize(
    ("law", "slow", "world_size", "options", "replans"),
    [
        (long_ones_slow, {}, 4, {}, True),
        pytest.param(longer_slower, {}, 4, {}, True, marks=pytest.mark.slow),
        (longer_slower, {}, 4, {"shuffle": False, "sorted": True}, None),
        pytest.param(as_predicted, {1: 2.0}, 4, {}, True, marks=pytest.mark.slow),
        (as_predicted, {1: 2.0}, 2, {}, True),
        pytest.param(long_ones_slow, {3: 2.0}, 4, {}, True, marks=pytest.mark.slow),
        pytest.param(as_predicted, {}, 4, {}, False, marks=pytest.mark.slow),
        (slower_alike, {}, 4, {}, False),
    ],
    ids=[
        "long ones",
        "the longer the slower",
        "lengths drift too",
        "a slow rank",
        "one of two slow",
        "long ones and a slow rank",
        "as predicted",
        "all alike",
    ],
)
def test_throughput_recovers(
    law: Law, slow: dict[int, float], world_size: int, options: dict[str, Any], replans: bool | None
) -> None:
    """>= 90% of what a planner reaches that knows the truth; measurements have noise and pauses."""
    n = 640 * world_size
    options = dict(options)
    lengths = np.sort(log_normal(n, 1)) if options.pop("sorted", False) else None
    planner = planner_for(n, world_size, lengths=lengths, **options)
    speed = [slow.get(rank, 1.0) for rank in range(world_size)]
    follow = functools.partial(train, planner, law, speed=speed, adapt_ranks=True, noise=3)
    run = follow()
    assert sorted(run.samples[0]) == list(range(n)), "each sample once"
    assert len(run.makespans) == planner.num_iterations
    settled = max([40, *(at for at, _ in run.replans)])
    assert settled <= planner.num_iterations - 10
    got = sum(run.makespans[settled:])
    assert got <= true_s(knowing(planner, law, speed), run, settled, law, speed) / 0.9
    blind = true_s(planner, run, settled, law, speed)
    if replans is not None:
        assert bool(run.replans) == replans
        assert (got < 0.95 * blind) == replans
    if replans and slow:
        assert run.planner.corrections.rank_speed
        assert run.monitor.shown.slowest_rank == next(iter(slow))
        again = follow()
        assert again.digests == run.digests and again.makespans == run.makespans


@pytest.mark.parametrize(
    ("seeds", "world_size"),
    [
        (range(4), 2),
        pytest.param(range(100), 2, marks=pytest.mark.slow),
        pytest.param(range(100), 4, marks=pytest.mark.slow),
    ],
    ids=["few", "two ranks", "four ranks"],
)
def test_a_busy_machine_changes_no_plans(seeds: range, world_size: int) -> None:
    """In 200 iterations, where nothing is slower than anything else for longer than it takes."""
    planner = planner_for(1600 * world_size, world_size)
    assert planner.num_iterations >= 200
    for seed in seeds:
        run = train(planner, as_predicted, adapt_ranks=True, noise=BusyMachine(seed))
        assert not run.replans, seed
        assert run.monitor.slow_rank is None, seed

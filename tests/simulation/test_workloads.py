"""Synthetic lengths have the shares of compute they claim."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lightning_dcp.simulation import CLUSTERS, MODELS, RooflineCosts
from lightning_dcp.simulation.workloads import (
    MIXES,
    Workload,
    _counts,
    cheapest_rank_seconds,
    log_normal,
    paper_mix,
)

LIMIT = 80_000_000_000
COSTS = RooflineCosts(
    model=MODELS["transformer-1d-5b"],
    cluster=dataclasses.replace(CLUSTERS["h200"], usable_memory_bytes=LIMIT),
    world_size=32,
)


def mix(kind: str, num_samples: int = 100_000, **changes: int) -> Workload:
    values = {"shortest": 1024, "longest": 1 << 18, "limit_bytes": LIMIT, "seed": 0, **changes}
    return paper_mix(kind, COSTS, num_samples=num_samples, **values)


def shares(workload: Workload, num_octaves: int, shortest: int = 1024) -> np.ndarray:
    seconds = cheapest_rank_seconds(COSTS, workload.lengths, LIMIT)
    octaves = np.floor(np.log2(workload.lengths / shortest)).astype(int)
    octaves = np.minimum(octaves, num_octaves - 1)
    return np.bincount(octaves, seconds, num_octaves) / seconds.sum()


@pytest.mark.parametrize("kind", sorted(MIXES))
def test_octaves_have_their_share_of_compute(kind: str) -> None:
    wanted = MIXES[kind] ** np.arange(8)
    np.testing.assert_allclose(shares(mix(kind), 8), wanted / wanted.sum(), rtol=0.05)


def test_the_mixes_differ_in_the_way_their_names_say() -> None:
    mean = {kind: mix(kind).lengths.mean() for kind in MIXES}
    assert mean["short"] < mean["balanced"] < mean["long"]
    long = shares(mix("long"), 8)
    assert long[-1] > 20 * long[0]
    assert np.median(mix("long").lengths) < 16_384  # still: most samples are short


def test_a_cut_octave_has_the_part_it_covers() -> None:
    part = shares(mix("balanced", longest=int(2**17 * 2**0.5)), 8)
    assert part[7] == pytest.approx(part[0] / 2, rel=0.05)


def test_the_same_seed_gives_the_same_lengths() -> None:
    one = mix("short")
    assert np.array_equal(one.lengths, mix("short").lengths)
    assert not np.array_equal(one.lengths, mix("short", seed=1).lengths)
    np.testing.assert_allclose(shares(mix("short", seed=1), 8), shares(one, 8), rtol=0.02)


@pytest.mark.parametrize("num_samples", [8, 9, 50, 1000])
def test_every_octave_and_the_longest_length_are_there(num_samples: int) -> None:
    for kind in MIXES:
        lengths = mix(kind, num_samples).lengths
        assert lengths.size == num_samples
        assert lengths.max() == 1 << 18
        assert lengths.min() >= 1024
        octaves = np.minimum(np.log2(lengths / 1024).astype(int), 7)
        assert set(octaves.tolist()) == set(range(8))


def test_one_length_only() -> None:
    assert mix("short", 3, shortest=4096, longest=4096).lengths.tolist() == [4096] * 3


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("medium", {}, "'medium'. Known mixes: short, balanced, long"),
        ("short", {"num_samples": 7}, "at least 8, one for each factor of two"),
        ("short", {"num_samples": 0}, "num_samples must be at least 1"),
        ("short", {"shortest": 0}, "shortest must be at least 1"),
        ("short", {"shortest": 2.5}, "shortest must be an int"),
        ("short", {"shortest": 1 << 20}, "must not be larger than longest"),
        ("short", {"longest": 1 << 23}, r"8388608 tokens does not fit.*p=32.*GiB are missing"),
    ],
)
def test_what_is_wrong_is_said(kind, changes, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        mix(kind, **changes)


def test_the_cheapest_way_is_the_cheapest_of_all() -> None:
    for s in (1024, 30_000, 1 << 18):
        best = np.inf
        for p in COSTS.sp_sizes:
            for b in 2 ** np.arange(12):
                r = COSTS.min_recompute(b, s, p, LIMIT)
                if r >= 0:
                    best = min(best, float(p * COSTS.time_s(b, s, p, r) / b))
        assert cheapest_rank_seconds(COSTS, [s], LIMIT)[0] == pytest.approx(best, rel=0.005)


def test_interpolation_is_close_and_keeps_the_shape() -> None:
    lengths = np.random.default_rng(0).integers(1000, 1 << 18, (60, 50))
    many = cheapest_rank_seconds(COSTS, lengths, LIMIT)
    assert many.shape == lengths.shape
    few = cheapest_rank_seconds(COSTS, lengths[0], LIMIT)
    np.testing.assert_allclose(many[0], few, rtol=0.03)
    assert cheapest_rank_seconds(COSTS, [], LIMIT).size == 0


def test_counts_add_up_and_leave_nobody_out() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        weights = np.exp(rng.normal(0, 3, rng.integers(1, 12)))
        total = int(rng.integers(weights.size, 500))
        counts = _counts(weights, total)
        assert counts.sum() == total
        assert counts.min() >= 1
        order = np.argsort(weights)
        assert (np.diff(counts[order]) >= 0).all()


def test_log_normal_has_its_median_and_keeps_its_limits() -> None:
    workload = log_normal(
        median=2000, sigma=1.0, num_samples=50_000, shortest=64, longest=65_536, seed=3
    )
    assert np.median(workload.lengths) == pytest.approx(2000, rel=0.03)
    assert np.log(workload.lengths).std() == pytest.approx(1.0, rel=0.03)
    tight = log_normal(median=2000, sigma=1.0, num_samples=20_000, shortest=1500, longest=2500)
    assert tight.lengths.min() >= 1500 and tight.lengths.max() <= 2500
    # Conditioned, not clipped: the limits are no more frequent than what lies beside them.
    assert (tight.lengths == 1500).sum() < 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sigma": 0.0}, "above 0; got 2000 and 0.0"),
        ({"median": float("nan")}, "finite"),
        ({"median": 1e12, "sigma": 0.1}, "practically never"),
        ({"num_samples": 0}, "num_samples"),
    ],
)
def test_log_normal_refuses(changes, message) -> None:
    values = {"median": 2000, "sigma": 1.0, "num_samples": 10, "shortest": 1, "longest": 10_000}
    with pytest.raises(ValueError, match=message):
        log_normal(**{**values, **changes})


def test_a_workload_checks_its_lengths() -> None:
    workload = Workload("mine", np.array([3, 4]))
    assert (workload.num_samples, workload.num_tokens) == (2, 7)
    with pytest.raises(ValueError, match="read-only"):
        workload.lengths[0] = 1
    with pytest.raises(ValueError, match="Sample 1 of mine has length 0"):
        Workload("mine", np.array([3, 0]))
    with pytest.raises(ValueError, match="name must not be empty"):
        Workload("", np.array([3]))

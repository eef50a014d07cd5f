"""Options, lengths, buckets, plans, reports: values and wrong input."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_dcp.planning as planning
from lightning_dcp.planning import (
    Buckets,
    IterationReport,
    MicroBatch,
    Plan,
    PlanningOptions,
    as_lengths,
    choose_edges,
)
from tests.planning.costs import log_normal


def micro_batch(
    *ids: int, first_rank: int = 0, sp_size: int = 1, time_s: float = 1.0
) -> MicroBatch:
    return MicroBatch(ids, 8, 8 * len(ids) - 1, first_rank, sp_size, 0, time_s, 100)


NESTED = Plan(
    epoch=0,
    iteration=3,
    world_size=4,
    micro_batches=(
        micro_batch(1, sp_size=2, time_s=2.0),
        micro_batch(2, first_rank=0, time_s=1.0),
        micro_batch(3, 4, first_rank=2, time_s=2.5),
    ),
)


def test_import_needs_no_torch() -> None:
    # The parent package registers strategies, which does need torch; so it is left out here.
    parent = Path(planning.__file__).parents[1]
    code = (
        "import sys, types; parent = types.ModuleType('lightning_dcp');"
        f"parent.__path__ = [{str(parent)!r}]; sys.modules['lightning_dcp'] = parent;"
        "import lightning_dcp.planning;"
        "print([m for m in ('torch', 'lightning', 'scipy', 'deepspeed') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_rank_views_and_times() -> None:
    assert [m.sample_ids for m in NESTED.for_rank(0)] == [(1,), (2,)]
    assert NESTED.indices_for_rank(1) == (0,)
    assert NESTED.for_rank(3) == ()
    assert NESTED.makespan_s == 3.0
    assert NESTED.start_s == (0.0, 2.0, 0.0)
    assert NESTED.busy_s == (3.0, 2.0, 2.5, 0.0)
    assert NESTED.idle_share == pytest.approx(1 - 7.5 / 12)
    assert NESTED.accumulation == (2, 1, 1, 0)
    assert NESTED.num_samples == 4
    assert NESTED.padding_share == pytest.approx(3 / 32)


def test_a_group_waits_for_all_its_ranks() -> None:
    plan = Plan(0, 0, 2, (micro_batch(1, time_s=3.0), micro_batch(2, sp_size=2, time_s=1.0)))
    assert plan.start_s == (0.0, 3.0) and plan.makespan_s == 4.0
    assert plan.busy_s == (4.0, 1.0)


def test_plan_round_trip_hash_and_digest() -> None:
    again = Plan.from_json(NESTED.to_json())
    assert again == NESTED and hash(again) == hash(NESTED)
    assert again.to_json() == NESTED.to_json() and again.digest() == NESTED.digest()
    assert dataclasses.replace(NESTED, iteration=4).digest() != NESTED.digest()
    keys = json.loads(NESTED.to_json())
    assert list(keys) == sorted(keys)
    with pytest.raises(ValueError, match="Not the JSON of a plan"):
        Plan.from_json('{"micro_batches": [{"sample_ids": [1]}]}')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sp_size": 3, "seq_len": 9}, "power of two"),
        ({"sp_size": 2, "first_rank": 1}, "multiple of sp_size=2"),
        ({"first_rank": -1}, "multiple of sp_size"),
        ({"sample_ids": ()}, "at least one sample"),
        ({"sample_ids": (1, 1)}, "distinct"),
        ({"sample_ids": (-1,)}, "not negative"),
        ({"sp_size": 16}, "seq_len must be a positive multiple"),
        ({"num_tokens": 9}, "num_tokens"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"recompute_blocks": -1}, "recompute_blocks"),
        ({"est_time_s": float("nan")}, "est_time_s"),
    ],
)
def test_an_invalid_micro_batch_cannot_exist(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(micro_batch(1), **change)


def test_an_invalid_plan_cannot_exist() -> None:
    with pytest.raises(ValueError, match="no micro-batch"):
        Plan(0, 0, 1, ())
    with pytest.raises(ValueError, match="twice"):
        Plan(0, 0, 2, (micro_batch(5), micro_batch(5, first_rank=1)))
    with pytest.raises(ValueError, match="the world has 2"):
        Plan(0, 0, 2, (micro_batch(5, first_rank=2),))
    with pytest.raises(ValueError, match="rank must be in"):
        NESTED.for_rank(4)


def test_report() -> None:
    report = IterationReport(NESTED, (3.0, 2.0, 3.0, 0.0), 4.0, (1, 2, 3, 4), 0.5, 29.0)
    assert report.idle_share == pytest.approx(1 - 8 / 12)
    assert report.tokens_per_s == pytest.approx(29 / 4)
    assert report.predicted_makespan_s == 3.0 and report.makespan_s == 3.0
    assert report.measured_peak_bytes == 4 and report.predicted_peak_bytes == 100
    assert report.sp_size_counts == {1: 2, 2: 1}
    assert report.batch_size_counts == {1: 2, 2: 1}
    assert report.accumulation_counts == {0: 1, 1: 2, 2: 1}
    assert report.recompute_counts == {0: 3}
    with pytest.raises(ValueError, match="one value per rank"):
        dataclasses.replace(report, busy_s=(1.0,))


# Options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"policy": "dpc"},
            r"Unknown policy 'dpc'.*'dcp-intra', 'global-batch', 'bucket', 'packed'",
        ),
        ({"tokens_per_step": 0}, "tokens_per_step must be at least 1; got 0"),
        ({"min_accumulation": 4, "max_accumulation": 2}, "must not be larger"),
        ({"bucket_edges": [5]}, "at least two increasing"),
        ({"bucket_edges": [5, 5]}, "at least two increasing"),
        ({"sp_sizes": [1, 3]}, "powers of two"),
        ({"sp_sizes": []}, "powers of two"),
        ({"on_too_long": "drop"}, "'error', 'skip', 'truncate'"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_wrong_options(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanningOptions(**values)  # type: ignore[arg-type]


def test_options_types_and_fingerprint() -> None:
    with pytest.raises(TypeError, match="max_buckets must be an int; got True"):
        PlanningOptions(max_buckets=True)
    with pytest.raises(TypeError, match=r"tokens_per_step must be an int; got 1\.5"):
        PlanningOptions(tokens_per_step=1.5)  # type: ignore[arg-type]
    options = PlanningOptions(bucket_edges=[1, 8], sp_sizes=[4, 1])
    assert options.bucket_edges == (1, 8) and options.sp_sizes == (1, 4)
    assert options == PlanningOptions(bucket_edges=(1, 8), sp_sizes=(1, 4))
    assert options.fingerprint() != PlanningOptions().fingerprint()


# Lengths -----------------------------------------------------------------------------------------


def test_lengths_of_many_kinds() -> None:
    for values in ([3, 1], (3, 1), np.array([3, 1], dtype=np.int32), iter([3, 1]), [3.0, 1]):
        lengths = as_lengths(values, 2)
        assert lengths.dtype == np.int64 and lengths.tolist() == [3, 1]
        assert not lengths.flags.writeable
    assert as_lengths([np.int16(3), np.array(1)]).tolist() == [3, 1]
    torch = pytest.importorskip("torch")
    assert as_lengths(torch.tensor([3, 1])).tolist() == [3, 1]
    assert as_lengths([torch.tensor(3), torch.tensor(1)]).tolist() == [3, 1]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([], ValueError, "empty"),
        ([1, 2], ValueError, "2 lengths were given for texts, which has 3 samples"),
        ([1, 0, 2], ValueError, "Sample 1 of texts has length 0.*at least 1"),
        ([1, 2, -7], ValueError, "Sample 2 of texts has length -7"),
        ([1, 2.5, 3], ValueError, "Sample 1 of texts has length 2.5"),
        ([1, float("nan"), 3], ValueError, "Sample 1 of texts has length nan"),
        ([1, True, 3], TypeError, r"Sample 1 of texts has length True \(bool\)"),
        (np.array([True, True, True]), TypeError, "Sample 0 of texts has length True"),
        ([1, "2", 3], TypeError, r"Sample 1 of texts has length '2' \(str\)"),
        ([1, None, 3], TypeError, "Sample 1 of texts has length None"),
        ([1, [2], 3], TypeError, r"Sample 1 of texts has length \[2\]"),
        ("123", TypeError, "must be a sequence of integers"),
        (5, TypeError, "must be a sequence of integers"),
        (np.ones((3, 1), dtype=int), ValueError, "one-dimensional"),
    ],
)
def test_wrong_lengths(values: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_lengths(values, 3, name="texts")  # type: ignore[arg-type]


# Buckets -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=200),
    max_buckets=st.integers(1, 20),
    pad_multiple=st.sampled_from([1, 8, 64]),
)
def test_edges_cover_the_lengths(lengths: list[int], max_buckets: int, pad_multiple: int) -> None:
    edges = choose_edges(lengths, max_buckets, pad_multiple)
    buckets = Buckets(edges)
    assert 1 <= len(buckets) <= max_buckets
    index = buckets.index_of(lengths)
    for length, k in zip(lengths, index.tolist(), strict=True):
        lo, hi = buckets.bounds(k)
        assert lo <= length < hi
    assert set(index.tolist()) == set(range(len(buckets))), "no bucket is empty"


def test_edges_trade_padding_against_their_number() -> None:
    lengths = log_normal(20000)

    def padding(edges: tuple[int, ...]) -> float:
        tops = np.array(edges[1:])[Buckets(edges).index_of(lengths)] - 1
        return float(1 - lengths.sum() / tops.sum())

    edges = choose_edges(lengths, 16)
    assert padding(edges) < 0.15
    assert padding(edges) < 0.7 * padding(choose_edges(lengths, 8))
    even = (*np.linspace(lengths.min(), lengths.max() + 1, len(edges)).astype(int).tolist(),)
    assert padding(edges) < 0.5 * padding(even)
    # Two clusters of equal lengths need two buckets, not sixteen.
    assert choose_edges([10] * 100 + [500] * 3, 16) == (10, 11, 501)
    assert choose_edges([7] * 5, 16) == (7, 8)


def test_edges_are_the_best_of_their_number() -> None:
    from itertools import combinations

    lengths = np.random.default_rng(3).integers(1, 40, 25)
    sizes = sorted(set(lengths.tolist()))
    edges = choose_edges(lengths, 3)
    assert len(edges) == 4

    def waste(tops: tuple[int, ...]) -> int:
        return sum(min(t for t in tops if t >= length) - length for length in lengths.tolist())

    best = min(waste((*tops, sizes[-1])) for tops in combinations(sizes[:-1], 2))
    assert waste(tuple(e - 1 for e in edges[1:])) == best


def test_length_outside_the_edges() -> None:
    with pytest.raises(ValueError, match=r"Sample 1 of length 9 is in no bucket.*from 1 to 7"):
        Buckets((1, 8)).index_of([7, 9])


def test_pairs_of_lengths_are_counted_as_tokens() -> None:
    """Samples with two axes: frames and patches of a frame, say."""
    pairs = [(2, 3), (4, 5)]
    assert lengths_of(pairs) == lengths_of(np.array(pairs)) == [6, 20]
    with pytest.raises(ValueError, match="Sample 1 of the dataset has length -5"):
        lengths_of([(2, 3), (-4, -5)])
    with pytest.raises(TypeError, match=r"Sample 0 of the dataset has length \(1, 2, 3\)"):
        lengths_of([(1, 2, 3)])


def lengths_of(values: object) -> list[int]:
    return as_lengths(values).tolist()

"""Plans of packed micro-batches: real tokens count, the guarantees are those of padded plans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_dcp.planning import EpochPlanner, MicroBatch, Plan, PlanningOptions, best_static
from lightning_dcp.planning.packed import PackedCosts, PackedSums
from tests.planning.costs import cost_model, log_normal
from tests.planning.laws import cost_models, needed_bytes
from tests.planning.test_properties import SEARCHED, any_lengths


def planner_of(lengths, model, world_size, limit, *, packing=True, batch_size=4, **options):
    return EpochPlanner(
        lengths=lengths,
        cost_model=model,
        world_size=world_size,
        memory_limit_bytes=limit,
        options=PlanningOptions(packing=packing, **options),
        batch_size=batch_size,
    )


def sums_of(*micro_batches, p=1):
    lengths = np.concatenate([np.array(m, dtype=np.int64) for m in micro_batches])
    count = np.array([len(m) for m in micro_batches])
    return PackedSums.of(lengths, count, np.full(count.size, p))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=any_lengths(80),
    world_size=st.integers(1, 16),
    model=cost_models(),
    policy=st.sampled_from([*SEARCHED, "bucket", "packed"]),
    batch_size=st.integers(1, 6),
    fits_at=st.sampled_from([1, 2, 4]),
    epoch=st.integers(0, 2),
    max_batch_size=st.sampled_from([None, 1, 5]),
)
def test_valid_and_never_slower_than_the_best_static_plan(
    lengths, world_size, model, policy, batch_size, fits_at, epoch, max_batch_size
):
    largest = 2 ** (world_size.bit_length() - 1)
    static_policy = policy not in SEARCHED
    limit = needed_bytes(model, max(lengths), 1 if static_policy else min(fits_at, largest))
    planner = planner_of(
        lengths,
        model,
        world_size,
        limit,
        policy=policy,
        batch_size=batch_size,
        max_batch_size=max_batch_size,
    )
    plans = planner.epoch(epoch)
    assert len(plans) == planner.num_iterations
    seen = []
    for plan in plans:
        for m in plan.micro_batches:
            own = np.array([lengths[i] for i in m.sample_ids])
            assert m.packed and m.num_tokens == m.padded_tokens == own.sum()
            assert m.seq_len == -(-own.sum() // m.sp_size) * m.sp_size
            assert m.batch_size <= (max_batch_size or len(lengths))
            alone = -(-own.max() // m.sp_size) * m.sp_size
            least = int(model.memory_bytes(1, alone, m.sp_size, m.recompute_blocks))
            assert least <= m.est_bytes <= limit
            seen.extend(m.sample_ids)
    assert plans.padding_share == 0.0
    assert sorted(seen) == list(range(len(lengths)))
    if not static_policy:
        static = best_static(planner).epoch(epoch)
        assert plans.predicted_time_s <= static.predicted_time_s * (1 + 1e-9)


def test_samples_of_one_length_cost_what_the_model_says():
    model = cost_model()
    r, seconds, num_bytes = PackedCosts(model, 10**12, None).predict(sums_of([512] * 7, p=2))
    assert r[0] == 0
    assert seconds[0] == pytest.approx(float(model.time_s(7, 512, 2)), rel=1e-12)
    assert num_bytes[0] == int(model.memory_bytes(7, 512, 2))


def test_the_law_sees_tokens_and_pairs():
    """Time is fixed costs, a term in tokens and one in pairs: mixed lengths add up in both."""
    model = cost_model()

    def seconds(*lengths):
        return float(PackedCosts(model, 10**12, 0).predict(sums_of(lengths))[1][0])

    fixed = seconds(64) * 2 - seconds(64, 64)
    mixed = seconds(4096, 64, 64, 64)
    apart = seconds(4096) + 3 * seconds(64) - 3 * fixed
    assert mixed == pytest.approx(apart, rel=0.03)
    padded = float(model.time_s(4, 4096, 1))
    assert mixed < 0.4 * padded


def test_packed_is_never_dearer_than_padded():
    model = cost_model()
    rng = np.random.default_rng(0)
    for p in (1, 2, 4):
        for _ in range(50):
            own = rng.integers(1, 9000, rng.integers(1, 9))
            r, seconds, num_bytes = PackedCosts(model, 10**12, 2).predict(sums_of(own, p=p))
            padded = len(own), -(-own.max() // p) * p, p
            assert seconds[0] <= float(model.time_s(*padded, 2)) * (1 + 1e-9)
            assert num_bytes[0] <= int(model.memory_bytes(*padded, 2))
            assert r[0] == 2


def test_skewed_lengths_gain_by_packing():
    lengths, model = log_normal(400), cost_model()
    limit = needed_bytes(model, int(lengths.max()), 2)
    packed = planner_of(lengths, model, 4, limit).epoch(0)
    padded = planner_of(lengths, model, 4, limit, packing=False).epoch(0)
    assert packed.predicted_time_s < 0.97 * padded.predicted_time_s
    assert packed.digest() != padded.digest()
    # lengths mix: some micro-batch has one eight times as long as another
    spread = [
        max(lengths[list(m.sample_ids)]) / min(lengths[list(m.sample_ids)])
        for plan in packed
        for m in plan.micro_batches
    ]
    assert max(spread) > 8


def test_what_is_left_of_an_epoch_is_planned_alike():
    lengths, model = log_normal(100), cost_model()
    planner = planner_of(lengths, model, 4, 10**12)
    consumed = np.arange(100) < 50
    rest = planner.rest(0, consumed, first_iteration=3)
    assert sorted(i for plan in rest for m in plan.micro_batches for i in m.sample_ids) == list(
        range(50, 100)
    )
    assert all(m.packed for plan in rest for m in plan.micro_batches)


def test_json_round_trip_and_checks():
    plan = planner_of([3, 5, 900], cost_model(), 2, 10**12).epoch(0)[0]
    assert Plan.from_json(plan.to_json()) == plan
    assert '"packed":true' in plan.to_json()
    whole = {"first_rank": 0, "recompute_blocks": 0, "est_time_s": 1.0, "est_bytes": 1}
    padded = MicroBatch(sample_ids=(1, 2), seq_len=8, num_tokens=9, sp_size=2, **whole)
    assert "packed" not in padded.to_dict()
    assert (
        MicroBatch(
            sample_ids=(1, 2), seq_len=10, num_tokens=9, sp_size=2, packed=True, **whole
        ).padded_tokens
        == 9
    )
    for seq_len in (8, 12):
        with pytest.raises(ValueError, match="seq_len of a packed"):
            MicroBatch(
                sample_ids=(1, 2), seq_len=seq_len, num_tokens=9, sp_size=2, packed=True, **whole
            )

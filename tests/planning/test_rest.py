"""What is left of an interrupted epoch, whoever consumed the other samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_dcp.planning import EpochPlanner, PlanningOptions, best_static
from lightning_dcp.planning.plan import Plan
from lightning_dcp.planning.rest import pack_samples, unpack_samples
from tests.planning.costs import cost_model, log_normal
from tests.planning.laws import cost_models, needed_bytes
from tests.planning.test_properties import any_lengths

POLICIES = ("dcp-intra", "dcp-inter", "global-batch", "bucket", "packed")


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=any_lengths(80),
    world_size=st.integers(1, 33),
    model=cost_models(),
    policy=st.sampled_from(POLICIES),
    batch_size=st.integers(1, 6),
    fits_at=st.sampled_from([1, 2, 4, 64]),
    epoch=st.integers(0, 2),
    data=st.data(),
)
def test_each_sample_that_is_left_once_and_never_slower_than_static(  # type: ignore[no-untyped-def]
    lengths, world_size, model, policy, batch_size, fits_at, epoch, data
) -> None:
    n = len(lengths)
    consumed = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    largest = 2 ** (world_size.bit_length() - 1)
    limit = needed_bytes(model, max(lengths), min(fits_at, largest))
    planner = EpochPlanner(
        lengths=lengths,
        cost_model=model,
        world_size=world_size,
        memory_limit_bytes=limit,
        options=PlanningOptions(policy=policy),
        batch_size=batch_size,
    )
    if consumed.all():
        with pytest.raises(ValueError, match="Nothing is left"):
            planner.rest(epoch, consumed)
        return
    plans = planner.rest(epoch, consumed, first_iteration=7)
    seen = [i for plan in plans for m in plan.micro_batches for i in m.sample_ids]
    assert sorted(seen) == np.flatnonzero(~consumed).tolist()
    assert [plan.iteration for plan in plans] == list(range(7, 7 + len(plans)))
    assert max(m.est_bytes for plan in plans for m in plan.micro_batches) <= limit
    if policy not in ("bucket", "packed"):
        static = best_static(planner).rest(epoch, consumed, num_iterations=len(plans))
        assert len(static) == len(plans)
        assert plans.predicted_time_s <= static.predicted_time_s * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 70), data=st.data())
def test_packed_samples_round_trip(n: int, data: st.DataObject) -> None:
    consumed = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    packed = pack_samples(consumed)
    assert packed.nbytes == -(-n // 8)
    assert unpack_samples(packed, n).tolist() == consumed.tolist()


def test_what_are_not_the_bits_of_these_samples_is_refused() -> None:
    packed = pack_samples(np.ones(12, dtype=bool))
    with pytest.raises(ValueError, match="17 samples take 3 bytes of type uint8; got shape"):
        unpack_samples(packed, 17)
    with pytest.raises(ValueError, match="behind the last of 9 samples"):
        unpack_samples(packed, 9)


def planner(world_size: int, **options: object) -> EpochPlanner:
    return EpochPlanner(
        lengths=log_normal(600, 5),
        cost_model=cost_model(),
        world_size=world_size,
        memory_limit_bytes=10**10,
        options=PlanningOptions(**options),  # type: ignore[arg-type]
        batch_size=4,
    )


def samples_of(plan: Plan) -> set[int]:
    return {i for m in plan.micro_batches for i in m.sample_ids}


def test_steps_keep_the_size_aimed_at() -> None:
    """After a third of the epoch on 4 ranks, the rest on 2: in twice as many steps."""
    before, after = planner(4), planner(2)
    third = before.num_iterations // 3
    consumed = np.zeros(600, dtype=bool)
    consumed[before.epoch(1).sample_ids(third)] = True
    rest = after.rest(1, consumed)
    tokens = int(after.lengths[~consumed].sum())
    assert len(rest) == round(tokens / after.tokens_per_step)
    assert np.median(rest.tokens_per_step) == pytest.approx(after.tokens_per_step, rel=0.1)
    assert rest.tokens_per_step.mean() == pytest.approx(after.tokens_per_step, rel=0.02)


def test_global_batch_takes_windows_of_the_order_that_remains() -> None:
    both = planner(4, policy="global-batch")
    whole = both.epoch(0)
    consumed = np.zeros(600, dtype=bool)
    consumed[whole.sample_ids(5)] = True
    rest = both.rest(0, consumed, first_iteration=5)
    assert [samples_of(plan) for plan in rest] == [samples_of(plan) for plan in whole][5:]


def test_the_rest_of_nothing_consumed_is_the_epoch() -> None:
    whole = planner(4)
    assert whole.rest(3, np.zeros(600, dtype=bool)).digest() == whole.epoch(3).digest()


def test_flags_of_another_dataset_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one flag for each of 600 samples; got shape \(599,\)"):
        planner(2).rest(0, np.zeros(599, dtype=bool))

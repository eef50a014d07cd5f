"""Simulated steps: what they check, how micro-batches are placed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dcp.planning.plan import MicroBatch, Plan
from lightning_dcp.simulation.steps import (
    SimulatedStep,
    Task,
    Unplaced,
    from_plan,
    place_in_order,
    place_in_parts,
    place_longest_first,
)


def task(samples: tuple[int, ...], first_rank: int, sp_size: int, **values: Any) -> Task:
    given_ = {"recompute_blocks": 0, "time_s": 1.0, "memory_bytes": 10, "start_s": 0.0, **values}
    return Task(samples=samples, first_rank=first_rank, sp_size=sp_size, **given_)


def work(sample: int, sp_size: int, time_s: float) -> Unplaced:
    return Unplaced((sample,), sp_size, 0, time_s, 10)


def test_busy_and_idle_are_weighted_by_gpu() -> None:
    step = SimulatedStep(4, (task((0,), 0, 2), task((1, 2), 2, 1, time_s=2.0)), 2.0)
    assert step.busy_s == (1.0, 1.0, 2.0, 0.0)
    assert step.idle_share == pytest.approx(0.5)
    assert (step.num_samples, step.memory_bytes) == (3, 10)
    step.check(3, 10)
    assert SimulatedStep(1, (task((0,), 0, 1, time_s=0.0),), 0.0).idle_share == 0.0


@pytest.mark.parametrize(
    ("first_rank", "values", "message"),
    [
        (1, {}, "multiple of sp_size"),
        (-2, {}, "multiple of sp_size"),
        (0, {"recompute_blocks": -1}, "recompute_blocks"),
        (0, {"memory_bytes": -1}, "memory_bytes"),
        (0, {"time_s": float("nan")}, "finite"),
        (0, {"start_s": -1.0}, "finite"),
    ],
)
def test_tasks_that_cannot_be(first_rank: int, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task((0,), first_rank, 2, **values)


def test_a_task_has_samples() -> None:
    with pytest.raises(ValueError, match="at least one"):
        task((), 0, 1)


@pytest.mark.parametrize(
    ("tasks", "makespan", "message"),
    [
        ((), 1.0, "at least one task"),
        ((task((0,), 4, 2),), 1.0, "world has 4"),
        ((task((0,), 0, 1), task((0,), 1, 1)), 1.0, r"Samples \[0\] are twice"),
        ((task((0,), 0, 1),), 0.5, "makespan is 0.5"),
        ((task((0,), 0, 2), task((1,), 1, 1, start_s=0.5)), 2.0, "busy"),
    ],
)
def test_steps_that_cannot_be(tasks: tuple[Task, ...], makespan: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulatedStep(4, tasks, makespan)


def test_check_names_what_is_wrong() -> None:
    step = place_in_order(2, [(work(0, 1, 1.0), None), (work(3, 1, 1.0), None)])
    with pytest.raises(ValueError, match=r"missing \[1\], unknown \[3\]"):
        step.check(2)
    with pytest.raises(ValueError, match="the limit is 9"):
        place_in_order(2, [(work(0, 1, 1.0), None)]).check(1, 9)


def test_a_plan_is_simulated_as_it_predicts() -> None:
    def micro_batch(ids: tuple[int, ...], first_rank: int, sp_size: int, time_s: float) -> Any:
        return MicroBatch(
            sample_ids=ids,
            seq_len=8,
            num_tokens=8 * len(ids),
            first_rank=first_rank,
            sp_size=sp_size,
            recompute_blocks=1,
            est_time_s=time_s,
            est_bytes=5,
        )

    plan = Plan(
        epoch=0,
        iteration=0,
        world_size=4,
        micro_batches=(
            micro_batch((7, 9), 0, 1, 2.0),
            micro_batch((8,), 0, 4, 1.0),
            micro_batch((3,), 3, 1, 0.5),
        ),
    )
    step = from_plan(plan, [3, 7, 8, 9])
    step.check(4, 5)
    assert [t.samples for t in step.tasks] == [(1, 3), (2,), (0,)]
    assert [t.start_s for t in step.tasks] == [0.0, 2.0, 3.0]
    assert step.makespan_s == plan.makespan_s
    assert step.busy_s == plan.busy_s
    assert step.idle_share == plan.idle_share
    assert [t.samples for t in from_plan(plan).tasks] == [(7, 9), (8,), (3,)]
    with pytest.raises(ValueError, match=r"\[9\]"):
        from_plan(plan, [3, 7, 8])


def test_order_is_kept_and_the_first_free_block_taken() -> None:
    step = place_in_order(
        4, [(work(0, 1, 3.0), 0), (work(1, 2, 1.0), None), (work(2, 1, 1.0), None)]
    )
    assert [t.first_rank for t in step.tasks] == [0, 2, 1]
    assert step.makespan_s == 3.0
    # Both halves are free at 3.0 and 1.0 at the earliest: the second waits less.
    after = place_in_order(4, [(work(0, 1, 3.0), 0), (work(1, 2, 1.0), 2), (work(2, 2, 1.0), None)])
    assert after.tasks[2].first_rank == 2
    with pytest.raises(ValueError, match="does not fit"):
        place_in_order(2, [(work(0, 4, 1.0), None)])


@given(
    st.sampled_from([1, 2, 3, 6, 8, 12]),
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.floats(0.1, 5.0)), min_size=1),
)
def test_parts_never_take_longer_than_one_after_another(
    world_size: int, drawn: list[tuple[int, float]]
) -> None:
    parts: list[list[Unplaced]] = [[]]
    for i, (p, time_s) in enumerate(drawn):
        p = min(p, 1 << (world_size.bit_length() - 1))
        if sum(m.sp_size for m in parts[-1]) + p > world_size:
            parts.append([])
        parts[-1].append(work(i, p, time_s))
    step = place_in_parts(world_size, parts)
    step.check(len(drawn))
    one_after_another = sum(max(m.time_s for m in part) for part in parts)
    assert step.makespan_s <= one_after_another * (1 + 1e-9)
    place_longest_first(world_size, [m for part in parts for m in part]).check(len(drawn))


def test_parts_that_do_not_fit_side_by_side() -> None:
    with pytest.raises(ValueError, match="left in this part"):
        place_in_parts(2, [[work(0, 2, 1.0), work(1, 1, 1.0)]])

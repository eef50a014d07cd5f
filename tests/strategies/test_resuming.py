"""How an epoch goes on: the decision alone, without processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import pytest

from lightning_dcp.planning import EpochPlanner, PlanningOptions
from lightning_dcp.planning.rest import flags
from lightning_dcp.strategies._lightning_compat.resuming import ResumePoint, weights_only_of_run
from lightning_dcp.strategies.checkpointing.plan_state import PlanState
from lightning_dcp.strategies.checkpointing.resuming import resume
from tests.planning.costs import cost_model, log_normal
from tests.strategies.toys import ToyLM, loader

NUM_SAMPLES = 90


def planner(world_size: int = 4, lengths: Any = None, **options: Any) -> EpochPlanner:
    return EpochPlanner(
        lengths=log_normal(NUM_SAMPLES, 5) if lengths is None else lengths,
        cost_model=cost_model(),
        world_size=world_size,
        memory_limit_bytes=10**10,
        options=PlanningOptions(**options),
        batch_size=2,
    )


def state(of: EpochPlanner, iteration: int, num_iterations: int | None = None) -> PlanState:
    """Epoch 1 after some iterations, as a checkpoint has it."""
    return PlanState(
        inputs=of.inputs,
        epoch=1,
        iteration=iteration,
        num_iterations=of.num_iterations if num_iterations is None else num_iterations,
        consumed=flags(of.epoch(1).sample_ids(iteration), NUM_SAMPLES),
        begun_at=0,
        consumed_before=np.zeros(NUM_SAMPLES, dtype=bool),
    )


def ids(plans: Any) -> list[int]:
    return sorted(i for plan in plans for m in plan.micro_batches for i in m.sample_ids)


def test_the_same_plans_go_on() -> None:
    same = planner()
    found = resume(state(same, 3), ResumePoint(1, 3), same)
    assert found.rest is None and not found.told
    assert found.digest == "the epoch's own plans"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"world_size": 2}, "world size: 4 -> 2"),
        ({"policy": "global-batch"}, "planning options"),
        ({"tokens_per_step": 1000}, "planning options"),
        ({"memory_limit_bytes": 10**9}, "memory limit: 10000000000 -> 1000000000"),
        ({"seed": 4}, "seed: 0 -> 4"),
    ],
)
def test_what_is_left_is_planned_anew(changed: dict[str, Any], named: str) -> None:
    before, now = planner(), planner(**changed)
    saved = state(before, 3)
    found = resume(saved, ResumePoint(1, 3), now)
    assert found.rest is not None and found.exact
    assert ids(found.rest.plans) == np.flatnonzero(~saved.consumed).tolist()
    assert found.rest.plans[0].iteration == found.rest.first_iteration == 3
    left = int((~saved.consumed).sum())
    assert named in found.told and f"its {left} samples that are left" in found.told
    assert f"in {len(found.rest.plans)} iterations after the 3 that were run" in found.told


@pytest.mark.parametrize(
    "changed", [{"memory_limit_bytes": 10**9}, {"seed": 4}, {"policy": "bucket"}]
)
def test_as_many_steps_are_left_where_they_are_of_the_same_size(changed: dict[str, Any]) -> None:
    """Learning rates may be scheduled for them; early steps took more than the mean of tokens."""
    lengths = [4000] * 4 + [20] * (NUM_SAMPLES - 4)
    before, now = planner(lengths=lengths), planner(lengths=lengths, **changed)
    saved = replace(state(before, 4), num_planned=before.num_iterations)
    found = resume(saved, ResumePoint(1, 4), now).rest
    assert found is not None
    assert len(found.plans) == before.num_iterations - 4
    assert ids(found.plans) == np.flatnonzero(~saved.consumed).tolist()


def test_a_rest_that_is_interrupted_goes_on_with_its_own_plans() -> None:
    before, now = planner(), planner(2)
    rest = resume(state(before, 3), ResumePoint(1, 3), now).rest
    assert rest is not None
    took = flags(rest.plans.sample_ids(2), NUM_SAMPLES)  # type: ignore[attr-defined]
    again = PlanState(
        inputs=now.inputs,
        epoch=1,
        iteration=5,
        num_iterations=3 + len(rest.plans),
        consumed=rest.consumed | took,
        begun_at=3,
        consumed_before=rest.consumed,
    )
    found = resume(again, ResumePoint(1, 5), now)
    assert not found.told and found.rest is not None
    assert list(found.rest.plans) == list(rest.plans)
    third = resume(again, ResumePoint(1, 5), before).rest
    assert third is not None and third.first_iteration == 5
    assert ids(third.plans) == np.flatnonzero(~again.consumed).tolist()


def test_a_rest_has_the_number_of_iterations_that_it_was_made_with() -> None:
    """Where plans were replaced while training, it is not the one that the step size asks for."""
    now = planner()
    consumed = state(now, 3).consumed
    by_default = now.rest(1, consumed, first_iteration=3)
    plans = now.rest(1, consumed, first_iteration=3, num_iterations=len(by_default) + 2)
    saved = PlanState(
        inputs=now.inputs,
        epoch=1,
        iteration=5,
        num_iterations=4,  # of `limit_train_batches`
        consumed=consumed | flags(plans.sample_ids(2), NUM_SAMPLES),
        begun_at=3,
        consumed_before=consumed,
        num_planned=3 + len(plans),
    )
    found = resume(saved, ResumePoint(1, 5), now)
    assert found.rest is not None and list(found.rest.plans) == list(plans)
    over = resume(replace(saved, num_planned=3), ResumePoint(1, 5), now)
    assert over.rest is not None and len(over.rest.plans) == 0


def test_nothing_is_left_of_an_epoch_that_has_ended() -> None:
    """Also where `limit_train_batches` ended it; what follows its iterations is still to come."""
    found = resume(state(planner(), 4, num_iterations=4), ResumePoint(1, 4), planner(2))
    assert found.rest is not None and not found.told
    assert len(found.rest.plans) == 0 and found.rest.first_iteration == 4


def test_samples_that_are_now_skipped_are_not_waited_for() -> None:
    lengths = np.r_[log_normal(NUM_SAMPLES - 1, 5), 16384]
    before = planner(lengths=lengths)
    now = EpochPlanner(
        lengths=lengths,
        cost_model=cost_model(),
        world_size=1,
        memory_limit_bytes=4_000_000,
        options=PlanningOptions(on_too_long="skip"),
    )
    assert NUM_SAMPLES - 1 in now.skipped_ids
    consumed = np.ones(NUM_SAMPLES, dtype=bool)
    consumed[list(now.skipped_ids)] = False
    saved = PlanState(
        inputs=before.inputs,
        epoch=0,
        iteration=9,
        num_iterations=12,
        consumed=consumed,
        begun_at=0,
        consumed_before=np.zeros(NUM_SAMPLES, dtype=bool),
    )
    found = resume(saved, ResumePoint(0, 9), now)
    assert found.rest is not None and len(found.rest.plans) == 0


def test_another_data_set_takes_the_same_share_of_its_epoch() -> None:
    before = planner()
    now = planner(lengths=log_normal(200, 6))
    half = before.num_iterations // 2
    found = resume(state(before, half), ResumePoint(1, half), now)
    assert found.rest is not None and not found.exact
    passed = round(half * now.num_iterations / before.num_iterations)
    assert len(found.rest.plans) == now.num_iterations - passed
    assert "another data set (90 samples then, 200 now" in found.told
    assert ids(found.rest.plans) == np.flatnonzero(~found.rest.consumed).tolist()


class TestWithoutOurEntry:
    def test_global_batch_goes_on_with_the_steps_that_are_left(self) -> None:
        now = planner(policy="global-batch")
        for before in (None, now.num_iterations):
            found = resume(None, ResumePoint(1, 3, num_before=before), now)
            assert found.rest is None and not found.told

    @pytest.mark.parametrize(("policy", "num_before"), [("dcp-intra", 12), ("global-batch", 24)])
    def test_else_the_same_share_with_a_warning(self, policy: str, num_before: int) -> None:
        now = planner(policy=policy)
        found = resume(None, ResumePoint(1, num_before // 2, num_before=num_before), now)
        assert found.rest is not None and not found.exact
        assert len(found.rest.plans) == now.num_iterations - round(now.num_iterations / 2)
        assert found.rest.first_iteration == num_before // 2
        assert "by another strategy, does not say which samples" in found.told
        assert "may be repeated or left out" in found.told

    def test_an_epoch_that_has_ended_is_not_repeated(self) -> None:
        found = resume(None, ResumePoint(0, 5, epoch_is_over=True), planner())
        assert found.rest is not None and len(found.rest.plans) == 0 and not found.told

    def test_more_iterations_than_the_epoch_has_leave_one(self) -> None:
        found = resume(None, ResumePoint(0, 40), planner())
        assert found.rest is not None and len(found.rest.plans) == 1


def test_what_the_user_said_of_weights_only_is_found() -> None:
    """Lightning 2.6.6 does not pass it on to strategies that restore after their setup."""

    class Asks(ToyLM):
        found: Any = "not called"

        def setup(self, stage: str) -> None:
            self.found = weights_only_of_run()

    for given in (None, True, False):
        model = Asks()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            limit_test_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.validate(model, loader([3]), verbose=False, weights_only=given)
        assert model.found is given
    assert weights_only_of_run() is None

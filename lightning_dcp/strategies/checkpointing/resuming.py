"""How a run goes on in the middle of an epoch, whatever it is resumed with.

=========================================  =========================================================
the checkpoint was saved with              the rest of the epoch
=========================================  =========================================================
the same plans                             goes on with them, bit for bit
other ranks, limits, costs, options, seed  the samples that are left, planned anew, exactly once
another data set (number or lengths)       the share of the new epoch that was left of the old one
another strategy (no entry of ours)        policy "global-batch": the steps that are left; other
                                           policies: the share of the epoch that is left
=========================================  =========================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightning_dcp.data.sampler import Rest
from lightning_dcp.planning.epoch import EpochPlan
from lightning_dcp.planning.rest import BoolArray, flags
from lightning_dcp.strategies.checkpointing.plan_state import PlanState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_dcp.planning.plan import Plan
    from lightning_dcp.planning.planner import EpochPlanner
    from lightning_dcp.strategies._lightning_compat.resuming import ResumePoint

__all__ = ["Resumption", "digest_of", "rest_of", "resume"]


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """How an epoch goes on.

    Attributes:
        rest: What takes the place of the epoch's plans; None: they go on.
        told: What the user is told once; "" where all is as if nothing had happened.
        exact: Whether each sample of the epoch is taken exactly once.
    """

    rest: Rest | None = None
    told: str = ""
    exact: bool = True

    @property
    def digest(self) -> str:
        """Equal on ranks that go on alike."""
        return "the epoch's own plans" if self.rest is None else digest_of(self.rest)


def digest_of(rest: Rest) -> str:
    """Equal on ranks that have the same plans of what is left."""
    return rest.plans.digest() if isinstance(rest.plans, EpochPlan) else "nothing is left"


def resume(saved: PlanState | None, point: ResumePoint, planner: EpochPlanner) -> Resumption:
    """Decide how the epoch goes on. A pure function, alike on all ranks.

    Args:
        saved: what the checkpoint says; None where no strategy of ours has saved it.
        point: where Lightning goes on.
        planner: of this run.
    """
    if point.iterations == 0:
        return Resumption()
    if saved is not None and (saved.epoch, saved.iteration) == (point.epoch, point.iterations):
        return _resume_ours(saved, point, planner)
    if point.epoch_is_over:
        return Resumption(rest=_nothing(point, np.ones(_size(planner), dtype=bool)))
    num = point.num_before or planner.num_iterations
    if (
        planner.options.policy == "global-batch"
        and num == planner.num_iterations
        and point.iterations < num
    ):
        return Resumption()
    return _same_share(
        point,
        planner,
        num,
        "This checkpoint, saved in the middle of an epoch by another strategy, does not say which"
        " samples were consumed",
    )


def _resume_ours(saved: PlanState, point: ResumePoint, planner: EpochPlanner) -> Resumption:
    now = planner.inputs
    differing = [name for name in now if saved.inputs.get(name) != now[name]]
    if not differing:
        if not saved.begun_at:
            return Resumption()
        return Resumption(
            rest=rest_of(
                planner,
                saved.epoch,
                saved.begun_at,
                saved.consumed_before,
                None if saved.num_planned is None else saved.num_planned - saved.begun_at,
            )
        )
    if not saved.unfinished:
        consumed = saved.consumed
        if consumed.size != _size(planner):
            consumed = np.ones(_size(planner), dtype=bool)
        return Resumption(rest=_nothing(point, consumed))
    if "lengths" in differing:
        return _same_share(
            point,
            planner,
            saved.num_iterations,
            "This checkpoint was saved in the middle of an epoch of another data set"
            f" ({saved.consumed.size} samples then, {_size(planner)} now, or other lengths)",
        )
    num_left = None
    if saved.num_planned == planner.num_iterations:
        # In steps of the same size: learning rates may be scheduled for their number.
        num_left = saved.num_planned - saved.iteration
    rest = rest_of(planner, saved.epoch, saved.iteration, saved.consumed, num_left)
    shown = "; ".join(
        f"{name}: {saved.inputs.get(name, 'unknown')} -> {now[name]}" for name in differing
    )
    left = sum(plan.num_samples for plan in rest.plans)
    return Resumption(
        rest=rest,
        told=f"DCP: epoch {saved.epoch} goes on with other plans than it began with ({shown}): its"
        f" {left} samples that are left are planned anew, each once, in {len(rest.plans)}"
        f" iterations after the {saved.iteration} that were run.",
    )


def rest_of(
    planner: EpochPlanner,
    epoch: int,
    first_iteration: int,
    consumed: BoolArray,
    num_iterations: int | None = None,
) -> Rest:
    """Plan what is left of an epoch. A pure function, alike on all ranks.

    Args:
        planner: makes the plans.
        epoch: from 0.
        first_iteration: how many iterations were run.
        consumed: (n,) which samples they trained on.
        num_iterations: how many are to come, if there are samples for as many; None lets the
            planner's step size decide. With policy "global-batch" it always does.
    """
    left = ~consumed
    left[list(planner.skipped_ids)] = False
    plans: Sequence[Plan] = ()
    if left.any() and num_iterations != 0:
        plans = planner.rest(
            epoch, consumed, first_iteration=first_iteration, num_iterations=num_iterations
        )
    return Rest(epoch=epoch, first_iteration=first_iteration, plans=plans, consumed=consumed)


def _nothing(point: ResumePoint, consumed: BoolArray) -> Rest:
    return Rest(epoch=point.epoch, first_iteration=point.iterations, plans=(), consumed=consumed)


def _same_share(
    point: ResumePoint, planner: EpochPlanner, num_iterations: int, why: str
) -> Resumption:
    """Go on at the share of the epoch's new plans at which the old ones were interrupted."""
    num = planner.num_iterations
    passed = min(round(point.iterations * num / num_iterations), num - 1)
    plans = planner.epoch(point.epoch)
    consumed = flags(plans.sample_ids(passed), _size(planner))
    rest = Rest(
        epoch=point.epoch,
        first_iteration=point.iterations,
        plans=planner.rest(
            point.epoch,
            consumed,
            first_iteration=point.iterations,
            num_iterations=num - passed,
        ),
        consumed=consumed,
    )
    return Resumption(
        rest=rest,
        told=f"DCP: {why}, so epoch {point.epoch} goes on with the last {len(rest.plans)} of its"
        f" {num} iterations by the new plan: in this epoch samples may be repeated or left out.",
        exact=False,
    )


def _size(planner: EpochPlanner) -> int:
    return int(planner.lengths.size)

"""Baselines from the literature, each planning one optimizer step of given samples.

All have the signature ``plan_step(lengths, costs, world_size, limit_bytes, **settings)`` and give
a :class:`~lightning_dcp.simulation.steps.SimulatedStep`, on the same costs and within the same
memory limit as the planner of this package. Each has a ``tune`` that finds its best settings for
given steps: a baseline is compared at its best. None of them chooses recomputation per micro-batch;
that, like the SP size where it is static, is one setting for all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.simulation.baselines.flexsp import flexsp_step, tune_flexsp
from lightning_dcp.simulation.baselines.karmarkar_karp import (
    karmarkar_karp_step,
    tune_karmarkar_karp,
)
from lightning_dcp.simulation.baselines.megatron import (
    megatron_measured_step,
    megatron_step,
    tune_megatron,
    tune_megatron_measured,
)
from lightning_dcp.simulation.baselines.static import (
    naive_step,
    packed_step,
    tune_naive,
    tune_packed,
    tune_tuned,
    tuned_step,
)
from lightning_dcp.simulation.baselines.tuning import PlanStep, tune_recompute
from lightning_dcp.simulation.steps import SimulatedStep

__all__ = [
    "BASELINES",
    "Baseline",
    "tune_recompute",
]


@dataclass(frozen=True)
class Baseline:
    """A baseline by name.

    Attributes:
        description: One line.
        plan_step: Plans one step.
        tune: ``tune(steps, costs, world_size, limit_bytes, longest=None)`` gives the settings of
            ``plan_step`` with the least predicted seconds over the steps.
    """

    description: str
    plan_step: PlanStep
    tune: Callable[..., dict[str, Any]]

    def __call__(
        self,
        lengths: Sequence[int] | IntArray,
        costs: Costs,
        world_size: int,
        limit_bytes: int,
        **settings: Any,
    ) -> SimulatedStep:
        """Plan one step."""
        return self.plan_step(lengths, costs, world_size, limit_bytes, **settings)


BASELINES: dict[str, Baseline] = {
    "naive": Baseline(
        "Bucket parallel: smallest static SP size, full recomputation, groups take turns.",
        naive_step,
        tune_naive,
    ),
    "tuned": Baseline(
        "Bucket parallel with SP size, recomputation and batch sizes tuned; free group next.",
        tuned_step,
        tune_tuned,
    ),
    "packed": Baseline(
        "Packed parallel: static SP size, first-fit-decreasing packing to a token budget.",
        packed_step,
        tune_packed,
    ),
    "karmarkar-karp": Baseline(
        "Static SP size, samples balanced over the groups by the differencing method, packed.",
        karmarkar_karp_step,
        tune_karmarkar_karp,
    ),
    "megatron": Baseline(
        "Megatron's dynamic context parallelism: greedy rounds with packing, work s^2 / p.",
        megatron_step,
        tune_megatron,
    ),
    "megatron-measured": Baseline(
        "The same with predicted seconds as its measure of work.",
        megatron_measured_step,
        tune_megatron_measured,
    ),
    "flexsp": Baseline(
        "FlexSP: heterogeneous SP groups with packing by mixed-integer programming.",
        flexsp_step,
        tune_flexsp,
    ),
}
"""Baselines by name, simplest first."""

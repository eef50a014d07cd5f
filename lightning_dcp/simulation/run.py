"""Run an epoch of each policy on a modelled cluster and compare.

All policies have the same samples, costs, memory and number of steps. Static policies and baselines
from the literature, which plan a step at a time, get the windows of the epoch's order that a plain
data-parallel run takes, ``batch_size * W`` samples each; so does ``global-batch``. The elastic
policies take as many steps over the same order.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.epoch import EpochPlan
from lightning_dcp.planning.fitting import FloatArray
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.options import POLICIES, PlanningOptions
from lightning_dcp.planning.planner import EpochPlanner
from lightning_dcp.simulation.baselines import BASELINES
from lightning_dcp.simulation.steps import SimulatedStep
from lightning_dcp.simulation.workloads import cheapest_rank_seconds

__all__ = ["LIBRARY", "PolicyResult", "Scenario", "known_policies", "simulate"]

LIBRARY: tuple[str, ...] = tuple(policy for policy in POLICIES if policy not in BASELINES)
"""Policies of this package that are run by its own planner."""

_TUNING_STEPS = 6
_PADDED = ("naive", "tuned")  # the other baselines pack


def known_policies() -> tuple[str, ...]:
    """All names that :func:`simulate` takes: this package's policies and the baselines."""
    return (*LIBRARY, *(name for name in BASELINES if name not in LIBRARY))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated.

    Attributes:
        lengths: (n,) tokens of each sample.
        costs: Predicts seconds and bytes.
        world_size: Ranks W.
        limit_bytes: Memory a rank may use.
        batch_size: Samples per rank and step.
        seed: Seed of the order.
        sp_size_exclusions: SP size -> why the model cannot use it.
        max_steps: Simulate the first steps of the epoch only; None: all.
    """

    lengths: IntArray
    costs: Costs
    world_size: int
    limit_bytes: int
    batch_size: int
    seed: int = 0
    sp_size_exclusions: Mapping[int, str] = field(default_factory=dict)
    max_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("world_size", "batch_size", "max_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}.")

    @property
    def bound_s(self) -> float:
        """Seconds per epoch if every sample ran at its cheapest and no rank ever idled.

        The steps' overhead is not in it.
        """
        seconds = cheapest_rank_seconds(self.costs, self.lengths, self.limit_bytes)
        return float(seconds.sum()) / self.world_size

    def windows(self) -> list[IntArray]:
        """Samples of each step of a plain data-parallel run."""
        order = np.random.default_rng([self.seed, 0]).permutation(self.lengths.size)
        size = self.batch_size * self.world_size
        cuts = [order[start : start + size] for start in range(0, order.size, size)]
        return cuts[: self.max_steps]


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """How one policy did.

    Attributes:
        policy: Its name.
        step_s: (N,) seconds of each step, gradient reduction and optimizer included.
        idle_share: Share of rank-seconds without work, weighted by GPU; the steps' overhead is left
            out.
        padding_share: Share of the padded tokens that is padding; 0 for packing.
        num_tokens: Real tokens.
        world_size: Ranks W.
        bound_s: Least seconds that these samples can take, the steps' overhead included.
        planning_s: Seconds of planning per step on this machine, set-up left out.
        sp_sizes: SP size -> share of rank-seconds.
        recompute_share: Recomputed blocks / all blocks, weighted by rank-seconds.
        setting: What a static policy or baseline was tuned to, for a table.
        epoch: The plans, where this package's planner made them.
        first_step: The first step, where a baseline made it.
    """

    policy: str
    step_s: FloatArray
    idle_share: float
    padding_share: float
    num_tokens: int
    world_size: int
    bound_s: float
    planning_s: float
    sp_sizes: Mapping[int, float]
    recompute_share: float
    setting: str = ""
    epoch: EpochPlan | None = None
    first_step: SimulatedStep | None = None

    @property
    def total_s(self) -> float:
        """Seconds of all steps."""
        return float(self.step_s.sum())

    @property
    def tokens_per_s_per_rank(self) -> float:
        """Real tokens per second and rank."""
        return self.num_tokens / (self.total_s * self.world_size)

    @property
    def efficiency(self) -> float:
        """``bound_s / total_s``."""
        return self.bound_s / self.total_s


def simulate(
    scenario: Scenario,
    policies: Sequence[str],
    *,
    options: PlanningOptions | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, PolicyResult]:
    """Run the policies, in the order given.

    Args:
        scenario: What is simulated.
        policies: Names out of :func:`known_policies`.
        options: For this package's planner; ``policy`` and ``tokens_per_step`` are replaced.
        progress: Called with a policy's name before it is run.

    Raises:
        ValueError: An unknown policy, or samples that fit nowhere.
    """
    unknown = [name for name in policies if name not in known_policies()]
    if unknown:
        raise ValueError(
            f"Unknown policy {unknown[0]!r}. Known policies: {', '.join(known_policies())}."
        )
    results = {}
    for name in policies:
        if progress is not None:
            progress(name)
        if name in LIBRARY:
            results[name] = _run_planner(scenario, name, options or PlanningOptions())
        else:
            results[name] = _run_baseline(scenario, name)
    return results


def _run_planner(scenario: Scenario, policy: str, options: PlanningOptions) -> PolicyResult:
    values = {**options.to_dict(), "policy": policy}
    windows = scenario.windows()
    order = np.concatenate(windows)
    kept = np.sort(order)
    lengths = scenario.lengths[kept]
    places = np.searchsorted(kept, order)  # the same windows also where steps are left out
    total = int(lengths.sum())
    if policy != "global-batch":
        values["tokens_per_step"] = max(1, round(total / len(windows)))
    planner = EpochPlanner(
        lengths=lengths,
        cost_model=scenario.costs,
        world_size=scenario.world_size,
        memory_limit_bytes=scenario.limit_bytes,
        options=PlanningOptions(**values),
        batch_size=scenario.batch_size,
        seed=scenario.seed,
        sp_size_exclusions=scenario.sp_size_exclusions,
        sample_order=lambda _epoch, _n: places,
    )
    start = time.perf_counter()
    epoch = planner.epoch(0)
    planning_s = (time.perf_counter() - start) / len(epoch)
    work = epoch.sp_sizes * epoch.time_s
    seconds = cheapest_rank_seconds(scenario.costs, lengths, scenario.limit_bytes)
    overhead = scenario.costs.step_overhead_s
    return PolicyResult(
        policy=policy,
        step_s=epoch.makespan_s + overhead,
        idle_share=epoch.predicted_idle_share,
        padding_share=epoch.padding_share,
        num_tokens=epoch.num_tokens,
        world_size=scenario.world_size,
        bound_s=float(seconds.sum()) / scenario.world_size + len(epoch) * overhead,
        planning_s=planning_s,
        sp_sizes={
            int(p): float(work[epoch.sp_sizes == p].sum() / work.sum())
            for p in np.unique(epoch.sp_sizes)
        },
        recompute_share=float(
            (work * epoch.recompute_blocks).sum() / work.sum() / scenario.costs.num_blocks
        ),
        epoch=epoch,
    )


def _run_baseline(scenario: Scenario, name: str) -> PolicyResult:
    baseline = BASELINES[name]
    windows = [scenario.lengths[window] for window in scenario.windows()]
    common = (scenario.costs, scenario.world_size, scenario.limit_bytes)
    longest = int(scenario.lengths.max())
    tuned = np.linspace(0, len(windows) - 1, min(_TUNING_STEPS, len(windows))).astype(int)
    settings = baseline.tune([windows[i] for i in tuned], *common, longest=longest)
    steps, planning_s = [], 0.0
    for window in windows:
        start = time.perf_counter()
        steps.append(baseline(window, *common, **settings))
        planning_s += time.perf_counter() - start
    lengths = np.concatenate(windows)
    overhead = scenario.costs.step_overhead_s
    makespan = np.array([step.makespan_s for step in steps])
    busy, sizes, recomputed = 0.0, Counter[int](), 0.0
    for step in steps:
        for task in step.tasks:
            work = task.sp_size * task.time_s
            busy += work
            sizes[task.sp_size] += work  # type: ignore[assignment]
            recomputed += work * task.recompute_blocks
    seconds = cheapest_rank_seconds(scenario.costs, lengths, scenario.limit_bytes)
    return PolicyResult(
        policy=name,
        step_s=makespan + overhead,
        idle_share=max(0.0, 1.0 - busy / (scenario.world_size * float(makespan.sum()))),
        padding_share=_padding_share(windows, steps) if name in _PADDED else 0.0,
        num_tokens=int(lengths.sum()),
        world_size=scenario.world_size,
        bound_s=float(seconds.sum()) / scenario.world_size + len(windows) * overhead,
        planning_s=planning_s / len(windows),
        sp_sizes={p: seconds / busy for p, seconds in sorted(sizes.items())},
        recompute_share=recomputed / busy / scenario.costs.num_blocks,
        setting=_describe(settings),
        first_step=steps[0],
    )


def _padding_share(windows: Sequence[IntArray], steps: Sequence[SimulatedStep]) -> float:
    padded = 0
    for lengths, step in zip(windows, steps, strict=True):
        for task in step.tasks:
            longest = int(lengths[list(task.samples)].max())
            padded += len(task.samples) * -(-longest // task.sp_size) * task.sp_size
    return 1.0 - sum(int(lengths.sum()) for lengths in windows) / padded


def _describe(settings: Mapping[str, object]) -> str:
    short = {"sp_size": "p", "recompute": "r", "recompute_blocks": "r"}
    return ", ".join(
        f"{short.get(k, k)}={v}" for k, v in settings.items() if isinstance(v, (int, str))
    )

"""Policies on the same samples: this package's by ``simulate``, baselines tuned as asked.

``naive-bucketed`` is the naive baseline with its samples in intervals of length, as many per octave
as suit it best. Without these its micro-batches mix all lengths and most of its work is padding.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from cases import SHORTEST

from lightning_dcp.planning.costs import Costs
from lightning_dcp.simulation import cheapest_rank_seconds
from lightning_dcp.simulation.baselines import BASELINES
from lightning_dcp.simulation.run import LIBRARY, PolicyResult, Scenario, simulate

_BUCKETED = "naive-bucketed"
_BUCKETS_PER_OCTAVE = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Policies on the same samples."""

    scenario: Scenario
    results: Mapping[str, PolicyResult]
    settings: Mapping[str, Mapping[str, Any]]

    def speed(self, policy: str, over: str) -> float:
        """How many times as quick as another policy."""
        return self.results[over].total_s / self.results[policy].total_s

    @property
    def num_steps(self) -> int:
        """Steps simulated."""
        return len(self.scenario.windows())

    @property
    def samples_per_step(self) -> int:
        """Samples per step over all ranks."""
        return self.scenario.batch_size * self.scenario.world_size


def compare(
    scenario: Scenario,
    policies: tuple[str, ...],
    *,
    tuning_steps: int,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    extra: Mapping[str, Mapping[str, Any]] | None = None,
) -> Comparison:
    """Run policies on one scenario.

    Args:
        scenario: Samples and costs.
        policies: Names.
        tuning_steps: Steps that baselines are tuned on, spread evenly.
        settings: Settings of baselines that are not tuned again.
        extra: Settings of baselines besides the tuned ones.
    """
    results, used = {}, {}
    for name in policies:
        if name in LIBRARY:
            result = simulate(scenario, [name])[name]
            # The plans of a large epoch are large.
            results[name] = dataclasses.replace(result, epoch=None)
            continue
        own = dict((settings or {}).get(name) or tune(scenario, name, tuning_steps))
        used[name] = own
        results[name] = run_baseline(scenario, name, {**own, **(extra or {}).get(name, {})})
    return Comparison(scenario=scenario, results=results, settings=used)


def tune(scenario: Scenario, name: str, num_steps: int) -> dict[str, Any]:
    """A baseline's best settings on ``num_steps`` of the steps."""
    windows = scenario.windows()
    chosen = np.linspace(0, len(windows) - 1, min(num_steps, len(windows))).astype(int)
    steps = [scenario.lengths[windows[i]] for i in chosen]
    longest = int(scenario.lengths.max())
    common = (scenario.costs, scenario.world_size, scenario.limit_bytes)
    if name == _BUCKETED:
        candidates = [{"longest": longest, "edges": edges} for edges in _edges(longest)]
        return min(
            candidates,
            key=lambda own: sum(_plan(name, step, *common, **own).makespan_s for step in steps),
        )
    return BASELINES[name].tune(steps, *common, longest=longest)


def _edges(longest: int) -> list[tuple[int, ...]]:
    octaves = np.log2(longest / SHORTEST)
    found = []
    for per_octave in _BUCKETS_PER_OCTAVE:
        steps = np.arange(int(np.ceil(octaves * per_octave))) / per_octave
        edges = np.unique(np.rint(SHORTEST * 2.0**steps).astype(int)).tolist()
        found.append((*edges, longest + 1))
    return found


def _plan(name: str, *arguments: Any, **settings: Any) -> Any:
    return BASELINES["naive" if name == _BUCKETED else name](*arguments, **settings)


def run_baseline(scenario: Scenario, name: str, settings: Mapping[str, Any]) -> PolicyResult:
    """A baseline with given settings: what ``simulate`` does after it has tuned."""
    windows = [scenario.lengths[window] for window in scenario.windows()]
    start = time.perf_counter()
    steps = [
        _plan(
            name,
            window,
            scenario.costs,
            scenario.world_size,
            scenario.limit_bytes,
            **settings,
        )
        for window in windows
    ]
    planning_s = (time.perf_counter() - start) / len(windows)
    makespan = np.array([step.makespan_s for step in steps])
    sizes: Counter[int] = Counter()
    recomputed = 0.0
    for step in steps:
        for task in step.tasks:
            work = task.sp_size * task.time_s
            sizes[task.sp_size] += work  # type: ignore[assignment]
            recomputed += work * task.recompute_blocks
    busy = float(sum(sizes.values()))
    lengths = np.concatenate(windows)
    overhead = scenario.costs.step_overhead_s
    seconds = cheapest_rank_seconds(scenario.costs, lengths, scenario.limit_bytes)
    return PolicyResult(
        policy=name,
        step_s=makespan + overhead,
        idle_share=max(0.0, 1.0 - busy / (scenario.world_size * float(makespan.sum()))),
        padding_share=0.0,
        num_tokens=int(lengths.sum()),
        world_size=scenario.world_size,
        bound_s=float(seconds.sum()) / scenario.world_size + len(windows) * overhead,
        planning_s=planning_s,
        sp_sizes={p: work / busy for p, work in sorted(sizes.items())},
        recompute_share=recomputed / busy / scenario.costs.num_blocks,
    )


class FixedRecompute:
    """Costs with one number of recomputed blocks for all micro-batches, as static plans have."""

    def __init__(self, costs: Costs, blocks: int) -> None:
        self._costs = costs
        self._blocks = blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._costs, name)

    def min_recompute(self, b: Any, s: Any, p: Any, limit_bytes: int) -> Any:
        fits = self._costs.memory_bytes(b, s, p, self._blocks) <= limit_bytes
        return np.where(fits, self._blocks, -1)[()]

    def fingerprint(self) -> str:
        return f"{self._costs.fingerprint()}/{self._blocks}"

"""Training without a model: a hidden law says what micro-batches take, ranks find it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_dcp.planning import EpochPlanner, Plan
from lightning_dcp.planning.adapting import DriftMonitor, Gain
from lightning_dcp.planning.careful import bucket_index
from lightning_dcp.planning.drift import uncorrected
from lightning_dcp.planning.packed import packed_length
from lightning_dcp.planning.slowness import Observed, slowness_of

WINDOW = 8

# global iteration, length, SP size -> how many times the cost model's seconds a micro-batch takes
Law = Callable[[int, int, int], float]


@dataclass
class Run:
    """What a simulated run did.

    Attributes:
        makespans: True seconds of each iteration.
        tokens: Of each iteration.
        counts: Samples of each iteration.
        samples: Of each epoch, in the order trained on.
        replans: (global iteration, predicted speedup) of each change of plans.
        digests: Of the plans that were followed.
        planner: The last one.
        monitor: As it was at the end.
    """

    makespans: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    replans: list[tuple[int, float]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    planner: Any = None
    monitor: Any = None

    def throughput(self, first: int = 0, stop: int | None = None) -> float:
        """Tokens per second."""
        return sum(self.tokens[first:stop]) / sum(self.makespans[first:stop])


def true_seconds(
    planner: EpochPlanner, plan: Plan, now: int, law: Law, speed: Sequence[float]
) -> list[float]:
    """Of each micro-batch, by the cost model without corrections, the law and the slowest rank."""
    base = uncorrected(planner.cost_model)
    found = []
    for m in plan.micro_batches:
        b, s = float(m.batch_size), m.seq_len
        if m.packed:
            lengths = planner.lengths[list(m.sample_ids)]
            s = packed_length(lengths)
            b = float(lengths.sum()) / s
        slowest = max(speed[rank] for rank in m.ranks)
        seconds = float(base.time_s(b, s, m.sp_size, m.recompute_blocks))
        found.append(seconds * law(now, s, m.sp_size) * slowest)
    return found


def makespan(plan: Plan, seconds: Sequence[float]) -> float:
    """When the last rank has ended."""
    free = [0.0] * plan.world_size
    for m, s in zip(plan.micro_batches, seconds, strict=True):
        end = max(free[rank] for rank in m.ranks) + s
        for rank in m.ranks:
            free[rank] = end
    return max(free)


class BusyMachine:
    """What a machine does to measurements that runs other things, too.

    Each micro-batch takes another time by a log-normal factor with sigma 0.5, one in fifty ten
    times as long; and now and then everything takes three times as long for some 25 iterations.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._load, self._left = 1.0, 0

    def __call__(self, plan: Plan, seconds: Sequence[float]) -> list[list[float]]:
        """Seconds of each rank's micro-batches in an iteration."""
        if not self._left:
            self._load, self._left = 4.0 - self._load, int(self._rng.geometric(1 / 25))
        self._left -= 1
        factors = self._load * np.exp(self._rng.normal(0, 0.5, len(seconds)))
        factors[self._rng.random(len(seconds)) < 0.02] *= 10
        laps: list[list[float]] = [[] for _ in range(plan.world_size)]
        for m, s, factor in zip(plan.micro_batches, seconds, factors.tolist(), strict=True):
            for rank in m.ranks:
                laps[rank].append(s * factor)
        return laps


Noise = np.random.Generator | BusyMachine | None


def laps_of(plan: Plan, seconds: Sequence[float], noise: Noise) -> list[list[float]]:
    """What each rank measures: noise, sometimes a pause."""
    if isinstance(noise, BusyMachine):
        return noise(plan, seconds)
    laps: list[list[float]] = [[] for _ in range(plan.world_size)]
    for m, s in zip(plan.micro_batches, seconds, strict=True):
        for rank in m.ranks:
            more = 0.0
            if noise is not None:
                more = abs(float(noise.normal(0, 0.05)))
                more += 10.0 if noise.random() < 0.02 else 0.0
            laps[rank].append(s * (1 + more))
    return laps


def train(
    planner: EpochPlanner,
    law: Law,
    *,
    speed: Sequence[float] | None = None,
    epochs: int = 1,
    adapt_ranks: bool = False,
    adapts: bool = True,
    noise: int | BusyMachine | None = None,
) -> Run:
    """Train some epochs, planning again where that pays.

    Args:
        planner: Of the beginning.
        law: Of micro-batches.
        speed: Of ranks.
        epochs: How many.
        adapt_ranks: Whether slow ranks get less work.
        adapts: False follows the planner whatever happens.
        noise: Of what is measured, or the seed of a little; None: exact.
    """
    speed = [1.0] * planner.world_size if speed is None else speed
    rng = np.random.default_rng(noise) if isinstance(noise, int) else noise
    monitor = DriftMonitor(adapt_ranks=adapt_ranks)
    run, now = Run(monitor=monitor), 0
    window: list[tuple[Plan, list[list[float]]]] = []
    for epoch in range(epochs):
        monitor.begin_epoch()
        plans, done, samples = planner.epoch(epoch), 0, []
        while done < len(plans):
            plan = plans[done]
            done += 1
            seconds = true_seconds(planner, plan, now, law, speed)
            run.makespans.append(makespan(plan, seconds))
            run.tokens.append(plan.num_tokens)
            run.counts.append(plan.num_samples)
            samples += [i for m in plan.micro_batches for i in m.sample_ids]
            now += 1
            window.append((plan, laps_of(plan, seconds, rng)))
            if len(window) < WINDOW or not adapts:
                continue
            current = planner
            observed = Observed.of(
                [p for p, _ in window],
                [laps for _, laps in window],
                lambda m, current=current: bucket_index(current, m),
            )
            window = []
            corrections = planner.corrections
            monitor.observe(
                slowness_of(observed, corrections.bucket_edges, planner.world_size), corrections
            )
            wanted = monitor.proposal(corrections)
            if wanted is None or len(plans) - done < 4:
                continue
            new = planner.corrected(wanted)
            consumed = np.zeros(planner.lengths.size, dtype=bool)
            consumed[samples] = True
            rest = new.rest(
                epoch,
                consumed,
                first_iteration=plan.iteration + 1,
                num_iterations=len(plans) - done,
            )
            gain = Gain.of(new, plans, rest, done)
            monitor.tried(taken=gain.is_worth(0.0))
            if gain.is_worth(0.0):
                planner, plans, done = new, rest, 0
                monitor.forget()
                run.replans.append((now, gain.speedup))
                run.digests.append(rest.digest())
        run.samples.append(samples)
    run.planner = planner
    return run

"""The simulations behind each figure and table."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cases import (
    LONGEST,
    MIXES,
    MODELS,
    SCALING,
    SCALING_LONGEST,
    SCALING_TOKENS,
    STEP_SIZES,
    TOKENS,
    WORLD_SIZE,
    Case,
    costs_of,
)
from comparing import Comparison, FixedRecompute, compare

from lightning_dcp.planning import PlanningOptions
from lightning_dcp.simulation import cheapest_rank_seconds
from lightning_dcp.simulation.run import Scenario, simulate

STATIC = ("naive", "naive-bucketed", "tuned", "packed", "karmarkar-karp")
OURS = ("dcp-inter", "dcp-intra", "global-batch")
SAME_R = "global-batch at their r"
PEERS = ("megatron", "megatron-measured", "flexsp")

Key = tuple[str, str]
"""Model and mix."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is simulated.

    Attributes:
        steps: Steps of Figure 8.
        tuning_steps: Steps that static baselines are tuned on.
        mixes: Mixes of Figure 8.
        peer_steps: Steps that FlexSP and Megatron plan; they are tuned on the first.
        peer_keys: Models and mixes they are run on.
        peers: Which of them.
        solver_s: Seconds of FlexSP's solver per micro-batch.
        scaling: Numbers of GPUs of Figure 9.
        scaling_rank_steps: Ranks x steps of Figure 9.
        scaling_steps: Least number of steps of Figure 9.
        scaling_mixes: Mixes of Figure 9.
        tuned_up_to: Most GPUs that the tuned baseline is tuned for; more get these settings.
        step_sizes: Tokens per GPU and step of the sensitivity table, by model.
    """

    steps: int = 24
    tuning_steps: int = 6
    mixes: tuple[str, ...] = MIXES
    peer_steps: int = 3
    peer_keys: tuple[Key, ...] = tuple((model, mix) for model in MODELS for mix in MIXES)
    peers: tuple[str, ...] = PEERS
    solver_s: float = 2.0
    scaling: tuple[int, ...] = SCALING
    scaling_rank_steps: int = 1536
    scaling_steps: int = 6
    scaling_mixes: tuple[str, ...] = MIXES
    tuned_up_to: int = 128
    step_sizes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: STEP_SIZES)


QUICK = Effort(
    steps=3,
    tuning_steps=1,
    mixes=("balanced", "long"),
    peer_steps=1,
    peer_keys=(("1D", "long"),),
    peers=("megatron", "megatron-measured"),
    scaling=(8, 32),
    scaling_rank_steps=64,
    scaling_steps=2,
    scaling_mixes=("balanced",),
    step_sizes={"1D": (131_072,), "2D": (65_536, 524_288)},
)


@dataclass(frozen=True, kw_only=True)
class LengthPoint:
    """The best of all (b, p) for one length, with the fewest recomputed blocks and with all."""

    length: int
    intra_s: float
    inter_s: float
    intra: tuple[int, int, int]
    inter: tuple[int, int, int]

    @property
    def gain(self) -> float:
        """Speed with the fewest over speed with all, less 1."""
        return self.inter_s / self.intra_s - 1.0


@dataclass(frozen=True, kw_only=True)
class StepSizePoint:
    """Efficiency at a step size, and the longest sample against a step.

    Attributes:
        model: Key of ``MODELS``.
        tokens_per_rank: Tokens per GPU and step aimed at.
        samples_per_step: Samples per step over all ranks.
        efficiency: By policy.
        bound_s: Lower bound of a step, mean.
        longest_s: Seconds of the longest sample at its quickest SP size.
        ceiling: Efficiency that no plan of these very steps can be above, since a step takes at
            least as long as its longest sample.
    """

    model: str
    tokens_per_rank: int
    samples_per_step: int
    efficiency: Mapping[str, float]
    bound_s: float
    longest_s: float
    ceiling: float


@dataclass(kw_only=True)
class Results:
    """Everything that document and figures need."""

    effort: Effort
    figure_8: dict[Key, Comparison] = field(default_factory=dict)
    peers: dict[Key, Comparison] = field(default_factory=dict)
    ablation: dict[Key, dict[str, float]] = field(default_factory=dict)
    scaling: dict[Key, dict[int, Comparison]] = field(default_factory=dict)
    by_length: list[LengthPoint] = field(default_factory=list)
    step_sizes: list[StepSizePoint] = field(default_factory=list)
    seconds: float = 0.0


def run_all(effort: Effort, say: Callable[[str], None]) -> Results:
    """All simulations, one after the other."""
    start = time.perf_counter()
    results = Results(effort=effort)
    results.by_length = by_length()
    for model in MODELS:
        for mix in effort.mixes:
            say(f"figure 8: {model} {mix}")
            case = Case(
                model=model,
                mix=mix,
                steps=effort.steps,
                longest=LONGEST[model],
                tokens_per_rank=TOKENS[model],
            )
            found = compare(case.scenario(), (*STATIC, *OURS), tuning_steps=effort.tuning_steps)
            results.figure_8[model, mix] = found
            results.ablation[model, mix] = ablation(found)
        for mix in effort.scaling_mixes:
            results.scaling[model, mix] = scaling(model, mix, effort, say)
    for model, sizes in effort.step_sizes.items():
        for tokens in sizes:
            say(f"step size: {model} {tokens}")
            results.step_sizes.append(step_size(model, tokens, effort.steps))
    for model, mix in effort.peer_keys:
        case = Case(
            model=model,
            mix=mix,
            steps=max(24, effort.peer_steps),
            longest=LONGEST[model],
            tokens_per_rank=TOKENS[model],
        )
        say(f"planners: {model} {mix}")
        results.peers[model, mix] = peers(case, effort)
    results.seconds = time.perf_counter() - start
    return results


def peers(case: Case, effort: Effort) -> Comparison:
    """FlexSP and Megatron on the first steps; also ours at the one r that suits them best."""
    found = compare(
        case.scenario(max_steps=effort.peer_steps),
        (*OURS, *effort.peers),
        tuning_steps=1,
        extra={"flexsp": {"time_limit_s": effort.solver_s}},
    )
    best = min(effort.peers, key=lambda name: found.results[name].total_s)
    blocks = found.settings[best]["recompute_blocks"]
    fixed = simulate(_with_recompute(found.scenario, blocks), ["global-batch"])["global-batch"]
    return dataclasses.replace(
        found, results={**found.results, SAME_R: dataclasses.replace(fixed, epoch=None)}
    )


def _with_recompute(scenario: Scenario, blocks: int) -> Scenario:
    costs: Any = FixedRecompute(scenario.costs, blocks)
    return dataclasses.replace(scenario, costs=costs)


def ablation(found: Comparison) -> dict[str, float]:
    """Speed over the tuned baseline of our planner with parts of its freedom taken away.

    Keys: "scheduling" (SP size and recomputation of the tuned baseline), "SP size" and
    "recomputation" (that alone is free besides), "both", and "full" (SP size free, all blocks
    recomputed: ``dcp-inter``).
    """
    static = found.settings["tuned"]
    fixed = _with_recompute(found.scenario, static["recompute_blocks"])
    one_size = PlanningOptions(sp_sizes=(static["sp_size"],))
    variants = {
        "scheduling": (fixed, one_size),
        "SP size": (fixed, None),
        "recomputation": (found.scenario, one_size),
    }
    tuned_s = found.results["tuned"].total_s
    speeds = {
        name: tuned_s / simulate(scenario, ["dcp-intra"], options=options)["dcp-intra"].total_s
        for name, (scenario, options) in variants.items()
    }
    speeds["both"] = found.speed("dcp-intra", "tuned")
    speeds["full"] = found.speed("dcp-inter", "tuned")
    return speeds


def scaling(
    model: str, mix: str, effort: Effort, say: Callable[[str], None]
) -> dict[int, Comparison]:
    """Weak scaling: equal samples per GPU and step, the same lengths at all sizes."""
    found: dict[int, Comparison] = {}
    settings: dict[str, Mapping[str, Any]] = {}
    for world_size in effort.scaling:
        say(f"figure 9: {model} {mix} {world_size}")
        case = Case(
            model=model,
            mix=mix,
            steps=max(effort.scaling_steps, effort.scaling_rank_steps // world_size),
            longest=SCALING_LONGEST[model],
            tokens_per_rank=SCALING_TOKENS[model],
            world_size=world_size,
            mix_world_size=min(effort.scaling),
        )
        whole = mix == "balanced"
        found[world_size] = compare(
            case.scenario(),
            ("naive", "naive-bucketed", "tuned", *OURS) if whole else ("dcp-intra", "global-batch"),
            tuning_steps=1,
            settings=settings if world_size > effort.tuned_up_to else None,
        )
        if "tuned" in found[world_size].settings:
            settings = {"tuned": found[world_size].settings["tuned"]}
    return found


def by_length(model: str = "1D") -> list[LengthPoint]:
    """Best throughput by length with the fewest recomputed blocks, and with all."""
    costs = costs_of(model, WORLD_SIZE)
    limit, blocks = costs.memory_limit_bytes, costs.num_blocks
    octaves = range(10, LONGEST[model].bit_length() - 1)
    lengths = [*(s for k in octaves for s in (2**k, 3 * 2 ** (k - 1))), LONGEST[model]]
    b = np.array([*range(1, 65), 96, 128, 192, 256, 384, 512])[:, None]
    p = np.array(costs.sp_sizes)[None, :]
    points = []
    for s in lengths:
        fewest = costs.min_recompute(b, s, p, limit)
        seconds = np.where(
            fewest >= 0, p * costs.time_s(b, s, p, np.maximum(fewest, 0)) / b, np.inf
        )
        fits = costs.memory_bytes(b, s, p, blocks) <= limit
        full = np.where(fits, p * costs.time_s(b, s, p, blocks) / b, np.inf)
        i, j = np.unravel_index(np.argmin(seconds), seconds.shape)
        k, m = np.unravel_index(np.argmin(full), full.shape)
        points.append(
            LengthPoint(
                length=s,
                intra_s=float(seconds[i, j]),
                inter_s=float(full[k, m]),
                intra=(int(b[i, 0]), int(p[0, j]), int(fewest[i, j])),
                inter=(int(b[k, 0]), int(p[0, m]), blocks),
            )
        )
    return points


def step_size(model: str, tokens: int, steps: int) -> StepSizePoint:
    """The balanced mix at another number of tokens per GPU and step."""
    case = Case(
        model=model,
        mix="balanced",
        steps=steps,
        longest=LONGEST[model],
        tokens_per_rank=tokens,
    )
    scenario = case.scenario()
    results = simulate(scenario, ["dcp-intra", "global-batch"])
    costs, limit = scenario.costs, scenario.limit_bytes
    p = np.array(costs.sp_sizes)[:, None]
    longest = np.array([scenario.lengths[window].max() for window in scenario.windows()])
    r = costs.min_recompute(1, longest, p, limit)
    quickest = np.where(r >= 0, costs.time_s(1, longest, p, np.maximum(r, 0)), np.inf).min(axis=0)
    work = [
        cheapest_rank_seconds(costs, scenario.lengths[window], limit).sum() / scenario.world_size
        for window in scenario.windows()
    ]
    least = np.maximum(work, quickest) + costs.step_overhead_s
    bound_s = results["global-batch"].bound_s
    return StepSizePoint(
        model=model,
        tokens_per_rank=tokens,
        samples_per_step=scenario.batch_size * scenario.world_size,
        efficiency={name: result.efficiency for name, result in results.items()},
        bound_s=bound_s / len(work),
        longest_s=float(quickest.max()),
        ceiling=min(1.0, bound_s / float(least.sum())),  # costs of samples are interpolated
    )

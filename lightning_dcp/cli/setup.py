"""What is asked about: lengths, costs, memory and batch size, out of the options."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dcp.cli.checks import planning_values
from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.feasible import Feasible, less_margin, usable_sp_sizes
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.planning.planner import EpochPlanner
from lightning_dcp.profiling.cache import read_profile
from lightning_dcp.simulation.cluster import CLUSTERS, Cluster, load_cluster
from lightning_dcp.simulation.length_files import read_lengths
from lightning_dcp.simulation.models import MODELS, TransformerSpec, load_model
from lightning_dcp.simulation.roofline import RooflineCosts
from lightning_dcp.simulation.workloads import Workload, log_normal, paper_mix

__all__ = [
    "ANY_LENGTH",
    "Prices",
    "Setup",
    "check_fits",
    "duration_text",
    "longest_fitting",
    "prices_for",
    "set_up",
    "share_text",
    "sp_shares",
]

ANY_LENGTH = 1 << 62

_TOKENS_PER_GPU = 131_072
_SEARCHED = 1 << 34  # tokens


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What micro-batches cost on so many GPUs.

    Attributes:
        costs: Predicts seconds and bytes.
        limit_bytes: Memory a rank may use.
        exclusions: SP size -> why the model cannot use it.
        source: Where the costs come from, for people.
    """

    costs: Costs
    limit_bytes: int
    exclusions: Mapping[int, str]
    source: str


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All that both subcommands need.

    Attributes:
        workload: Lengths and their name.
        planned: Lengths that are planned, where samples are skipped or cut.
        prices: What they cost.
        world_size: Ranks W.
        batch_size: Samples per rank and step.
        seed: Seed of the order.
        planning: Options of the planner, without policy.
    """

    workload: Workload
    planned: IntArray
    prices: Prices
    world_size: int
    batch_size: int
    seed: int
    planning: Mapping[str, Any]

    @property
    def lengths(self) -> IntArray:
        """(n,) tokens of each sample."""
        return self.workload.lengths

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a plain data-parallel epoch."""
        return -(-self.planned.size // (self.batch_size * self.world_size))

    def planner(self, policy: str) -> EpochPlanner:
        """The planner that training would use."""
        return EpochPlanner(
            lengths=self.lengths,
            cost_model=self.prices.costs,
            world_size=self.world_size,
            memory_limit_bytes=self.prices.limit_bytes,
            options=PlanningOptions(policy=policy, **self.planning),
            batch_size=self.batch_size,
            seed=self.seed,
            sp_size_exclusions=self.prices.exclusions,
            dataset_name=self.workload.name,
        )

    def describe(self) -> str:
        """One line for each of lengths, costs and step."""
        tokens = self.lengths
        per_gpu = self.batch_size * float(self.planned.mean())
        return (
            f"Lengths: {self.workload.name}; {tokens.size:,} samples, {tokens.sum():,} tokens, "
            f"length {tokens.min():,} to {tokens.max():,}, mean {tokens.mean():,.0f}\n"
            f"Costs:   {self.prices.source}; {self.world_size} GPUs\n"
            f"Step:    {self.batch_size} samples ({per_gpu:,.0f} tokens) per GPU, "
            f"{self.steps_per_epoch:,} steps per epoch"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        tokens = self.lengths
        return {
            "lengths": self.workload.name,
            "num_samples": tokens.size,
            "num_tokens": int(tokens.sum()),
            "shortest": int(tokens.min()),
            "longest": int(tokens.max()),
            "costs": self.prices.source,
            "world_size": self.world_size,
            "memory_limit_bytes": self.prices.limit_bytes,
            "model_bytes": self.prices.costs.fixed_bytes,
            "batch_size": self.batch_size,
            "steps_per_epoch": self.steps_per_epoch,
            "seed": self.seed,
        }


def set_up(args: Any) -> Setup:
    """Read what the options name.

    Args:
        args: Parsed options of a subcommand.

    Raises:
        OSError: A file that cannot be read.
        ValueError: Options that contradict each other, an unknown preset, a file that makes no
            sense, a model that does not fit.
    """
    planning = planning_values(args)
    prices = prices_for(args, args.num_gpus)
    workload = _workload(args, prices)
    planned = workload.lengths
    if planning.get("on_too_long", "error") != "error":
        planned = _planned(workload, prices, args.num_gpus, PlanningOptions(**planning))
    batch_size = args.batch_size
    if batch_size is None:
        per_gpu = round(_TOKENS_PER_GPU / float(planned.mean()))
        batch_size = max(1, min(per_gpu, planned.size // args.num_gpus))
    return Setup(
        workload=workload,
        planned=planned,
        prices=prices,
        world_size=args.num_gpus,
        batch_size=batch_size,
        seed=args.seed,
        planning=planning,
    )


def _planned(
    workload: Workload, prices: Prices, world_size: int, options: PlanningOptions
) -> IntArray:
    """Lengths as the planner takes them: a sample that it skips must not decide the step."""
    usable, _ = usable_sp_sizes(prices.costs, world_size, options, prices.exclusions)
    limit = prices.limit_bytes
    feasible = Feasible(
        prices.costs, limit, less_margin(limit, prices.costs), usable, options, workload.name
    )
    lengths, kept, _ = feasible.fit_lengths(workload.lengths)
    return lengths[kept]


def prices_for(args: Any, world_size: int) -> Prices:
    """Costs on so many GPUs, of a measured profile or of model and cluster.

    Raises:
        OSError: A file that cannot be read.
        ValueError: An unknown preset, a wrong file, a model that does not fit.
    """
    if args.cost_profile is not None:
        return _measured(args)
    cluster = _cluster(args.cluster)
    if args.memory is not None:
        try:
            cluster = dataclasses.replace(cluster, usable_memory_bytes=args.memory)
        except ValueError as error:
            raise ValueError(f"--memory: {error}") from None
    costs = RooflineCosts(model=_model(args.model), cluster=cluster, world_size=world_size)
    return Prices(
        costs=costs,
        limit_bytes=costs.memory_limit_bytes,
        exclusions=costs.sp_size_exclusions,
        source=f"modelled, {costs.model.name} ({costs.model.parameters / 1e9:.1f}B parameters) "
        f"on {cluster.gpu.name}",
    )


def _measured(args: Any) -> Prices:
    if not Path(args.cost_profile).is_file():
        raise ValueError(f"--cost-profile: there is no file {args.cost_profile}. Check the path.")
    if args.memory is None:
        raise ValueError(
            "--cost-profile needs --memory, such as --memory 72GiB: a profile does not say how "
            "much a rank may use. Training takes 90% of the device."
        )
    profile = read_profile(args.cost_profile)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # training has warned when it was measured
        costs = profile.cost_model()
    return Prices(
        costs=costs,
        limit_bytes=args.memory,
        exclusions=profile.sp_size_exclusions,
        source=f"measured, {args.cost_profile} ({len(profile.measurements)} points, p in "
        f"{list(costs.sp_sizes)})",
    )


def _cluster(name: str) -> Cluster:
    if name in CLUSTERS:
        return CLUSTERS[name]
    return load_cluster(_file(name, "cluster", CLUSTERS))


def _model(name: str) -> TransformerSpec:
    if name in MODELS:
        return MODELS[name]
    return load_model(_file(name, "model", MODELS))


def _file(name: str, what: str, presets: Mapping[str, Any]) -> Path:
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"Unknown {what} {name!r}, and there is no such file. Presets: {', '.join(presets)}. "
            f"Or give a YAML or JSON file with the {what}'s fields."
        )
    return path


def _workload(args: Any, prices: Prices) -> Workload:
    given = [
        option
        for option, value in (
            ("--lengths", args.lengths),
            ("--mix", args.mix),
            ("--log-normal", args.log_normal),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} contradict each other: give one of them.")
    if args.column is not None and args.lengths is None:
        raise ValueError("--column names a column of --lengths, which is not given.")
    if args.lengths is not None:
        return Workload(args.lengths, read_lengths(args.lengths, args.column))
    drawn = {
        "num_samples": args.num_samples,
        "shortest": args.shortest,
        "longest": args.longest,
        "seed": args.seed,
    }
    if args.log_normal is not None:
        median, sigma = args.log_normal
        lengths = log_normal(median=median, sigma=sigma, **drawn).lengths
        return Workload(f"log-normal, median {median:g}, sigma {sigma:g}", lengths)
    kind = args.mix or "balanced"
    check_fits(args.longest, prices, advice="lower --longest")
    mix = paper_mix(kind, prices.costs, limit_bytes=prices.limit_bytes, **drawn)
    return Workload(f"mix {kind}", mix.lengths)


def check_fits(length: int, prices: Prices, advice: str = "shorter samples") -> None:
    """Check that a sample fits at some SP size.

    Args:
        length: Tokens.
        prices: Bytes and their limit.
        advice: What else to do than to use more GPUs or memory.

    Raises:
        ValueError: It does not; the text says how much memory is missing and what would fit.
    """
    longest = longest_fitting(prices)
    if length <= max(longest.values()):
        return
    costs = prices.costs
    p = max(longest, key=lambda size: (longest[size], size))
    need = int(costs.memory_bytes(1, length, p, costs.num_blocks))
    raise ValueError(
        f"A sample of {length:,} tokens fits nowhere: at p={p} with all {costs.num_blocks} blocks "
        f"recomputed it lacks {(need - prices.limit_bytes) / 2**30:.1f} GiB of the "
        f"{prices.limit_bytes / 2**30:.1f} GiB a rank may use. The longest that fits has "
        f"{longest[p]:,} tokens. Use more GPUs or more memory, or {advice}."
    )


def longest_fitting(prices: Prices, recompute_blocks: int | None = None) -> dict[int, int]:
    """SP size -> longest sample in tokens that fits, by default with all blocks recomputed.

    0: none fits; :data:`ANY_LENGTH`: memory is no limit, as far as was searched.
    """
    costs = prices.costs
    r = costs.num_blocks if recompute_blocks is None else recompute_blocks
    found = {}
    for p in costs.sp_sizes:
        low, high = 0, _SEARCHED  # memory grows with the length
        while high - low > 1:
            middle = (low + high) // 2
            fits = int(costs.memory_bytes(1, middle, p, r)) <= prices.limit_bytes
            low, high = (middle, high) if fits else (low, middle)
        found[p] = ANY_LENGTH if high == _SEARCHED else low
    return found


def duration_text(seconds: float) -> str:
    """Three digits, in seconds, minutes or hours."""
    for unit, scale in (("s", 1), ("min", 60)):
        if seconds < 100 * scale:
            return f"{seconds / scale:.3g} {unit}"
    hours = seconds / 3600
    return f"{hours:,.0f} h" if hours >= 1000 else f"{hours:.3g} h"


def share_text(shares: Mapping[int, float], most: int = 4) -> str:
    """The largest shares, such as ``1 (62%), 8 (38%)``, by key."""
    largest = sorted(shares, key=lambda key: -shares[key])[:most]
    parts = [f"{key} ({shares[key]:.0%})" for key in sorted(largest) if shares[key] >= 0.005]
    return ", ".join(parts) or "-"


def sp_shares(sp_sizes: IntArray, time_s: Any) -> dict[int, float]:
    """SP size -> share of rank-seconds."""
    work = sp_sizes * time_s
    return {
        int(p): float(work[sp_sizes == p].sum() / work.sum()) for p in np.unique(sp_sizes).tolist()
    }

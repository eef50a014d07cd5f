"""The options of the command."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from jsonargparse import ActionConfigFile, ArgumentParser  # type: ignore[attr-defined]

from lightning_dcp.cli.values import BYTES, ITERATIONS, NAMES, WORLD_SIZES
from lightning_dcp.planning.options import POLICIES, PlanningOptions
from lightning_dcp.simulation.cluster import CLUSTERS
from lightning_dcp.simulation.models import MODELS
from lightning_dcp.simulation.run import known_policies

__all__ = ["build_parser"]

DEFAULT_POLICIES = ("naive", "tuned", "packed", "dcp-inter", "dcp-intra", "global-batch")
"""Without those whose tuning or planning takes minutes."""

_TRAINING = {
    "fit": "Train a LightningModule of yours on data of yours, as a YAML file says.",
    "validate": "Run its validation loop once.",
    "test": "Run its test loop once.",
    "predict": "Run its prediction loop once.",
}
"""Those of ``command_process.TRAINING_COMMANDS``, in a line each."""


def build_parser() -> ArgumentParser:
    """The parser of ``lightning-dcp``; mistakes are raised, not printed."""
    parser = ArgumentParser(
        prog="lightning-dcp",
        description="Data-Centric Parallel: what would it give on my lengths and my cluster, "
        "predicted from lengths alone, without a GPU; and training with it, by LightningCLI.",
        version=_version(),
        exit_on_error=False,
    )
    commands = parser.add_subcommands(required=True, dest="command")
    commands.add_subcommand(
        "simulate", _simulate_parser(), help="Compare policies: throughput, idle share, hours."
    )
    commands.add_subcommand(
        "plan", _plan_parser(), help="Show what one policy plans: buckets and iterations."
    )
    for name, text in _TRAINING.items():
        # For `--help` only: their options are LightningCLI's, which imports torch.
        commands.add_subcommand(name, ArgumentParser(exit_on_error=False), help=text)
    return parser


def _version() -> str:
    try:
        return version("lightning_dcp")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


def _simulate_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Run an epoch of several policies on a modelled cluster and compare them.",
        exit_on_error=False,
    )
    _add_common(parser)
    group = parser.add_argument_group("Comparison")
    group.add_argument(
        "--policies",
        type=NAMES,
        default=list(DEFAULT_POLICIES),
        metavar="A,B",
        help=f"Policies to compare, out of {', '.join(known_policies())}.",
    )
    group.add_argument(
        "--max-steps",
        type=int | None,
        metavar="N",
        help="Simulate the first N optimizer steps only; default: as many as take about half a "
        "minute.",
    )
    group.add_argument(
        "--scaling",
        type=WORLD_SIZES,
        metavar="W,W",
        help="Compare on these numbers of GPUs too, with as many samples per GPU and step.",
    )
    # All policies run the same samples: none can skip or cut some.
    _add_planning(
        parser, {"policy", "seed", "memory_limit_bytes", "tokens_per_step", "on_too_long"}
    )
    return parser


def _plan_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Show what a policy plans: the configuration of each bucket, and iterations.",
        exit_on_error=False,
    )
    _add_common(parser)
    group = parser.add_argument_group("Plan")
    group.add_argument(
        "--policy",
        type=Literal[POLICIES],
        default="dcp-intra",
        help="The policy.",
    )
    group.add_argument("--epoch", type=int, default=0, help="Epoch, from 0.")
    group.add_argument(
        "--iteration", type=int | None, metavar="N", help="Show this iteration's micro-batches."
    )
    group.add_argument(
        "--iterations",
        type=ITERATIONS,
        metavar="A:B",
        help="Show iterations A to B - 1; with --json one plan per line. Quoted in a config file.",
    )
    _add_planning(parser, {"policy", "seed", "memory_limit_bytes"})
    return parser


def _add_common(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--config", action=ActionConfigFile, help="YAML or JSON file with any of these options."
    )
    group = parser.add_argument_group("Sample lengths (one of --lengths, --mix, --log-normal)")
    group.add_argument(
        "--lengths",
        type=str | None,
        metavar="FILE",
        help="Tokens of each sample: text with one integer per line, CSV, TSV, Parquet, or a "
        "Hugging Face data set on disk.",
    )
    group.add_argument("--column", type=str | None, help="Column of --lengths.")
    group.add_argument(
        "--mix",
        type=Literal["short", "balanced", "long"] | None,
        help="A mix of the paper; default: balanced.",
    )
    group.add_argument(
        "--log-normal",
        type=float,
        nargs=2,
        metavar=("MEDIAN", "SIGMA"),
        help="Log-normal lengths: median in tokens, standard deviation of the logarithm.",
    )
    group.add_argument("--num-samples", type=int, default=20_000, help="Samples to draw.")
    group.add_argument("--shortest", type=int, default=256, help="Least length to draw.")
    group.add_argument("--longest", type=int, default=131_072, help="Largest length to draw.")

    group = parser.add_argument_group("Model and cluster")
    group.add_argument(
        "--model",
        type=str,
        default="transformer-1d-5b",
        metavar="PRESET|FILE",
        help=f"{', '.join(MODELS)}, or a YAML or JSON file.",
    )
    group.add_argument(
        "--cluster",
        type=str,
        default="h200",
        metavar="PRESET|FILE",
        help=f"{', '.join(CLUSTERS)}, or a YAML or JSON file.",
    )
    group.add_argument(
        "--num-gpus", "--world-size", type=int, default=32, metavar="W", help="GPUs, one rank each."
    )
    group.add_argument(
        "--memory",
        type=BYTES,
        metavar="GIB",
        help="Memory a rank may use; default: 94%% of the GPU's.",
    )
    group.add_argument(
        "--cost-profile",
        type=str | None,
        metavar="FILE",
        help="A cost profile measured by training, in place of --model and --cluster; needs "
        "--memory.",
    )
    group.add_argument(
        "--batch-size",
        type=int | None,
        metavar="N",
        help="Samples per GPU and step; default: about 128k tokens per GPU and step.",
    )
    group.add_argument("--seed", type=int, default=0, help="Seed of lengths and order.")

    group = parser.add_argument_group("Output")
    group.add_argument("--plots", type=str | None, metavar="DIR", help="Folder to draw into.")
    group.add_argument("--format", type=Literal["png", "svg"], default="png", help="Of the plots.")
    group.add_argument(
        "--json", action="store_true", help="JSON on stdout; all else goes to stderr."
    )
    group.add_argument("--quiet", action="store_true", help="The result only: no progress, notes.")
    group.add_argument("--debug", action="store_true", help="A traceback for errors.")


def _add_planning(parser: ArgumentParser, skip: set[str]) -> None:
    parser.add_class_arguments(PlanningOptions, "planning", skip=skip)

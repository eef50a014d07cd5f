"""Values that are checked before any work, whichever way they were given."""

from __future__ import annotations

from typing import Any

from lightning_dcp.planning.options import PlanningOptions

__all__ = ["check_values", "planning_values"]

_MOST_GPUS = 100_000
_MOST_SAMPLES = 100_000_000
_MAY_BE_LEFT_OUT = frozenset(
    {"lengths", "column", "mix", "log_normal", "memory", "cost_profile", "batch_size", "plots"}
    | {"max_steps", "scaling", "iteration", "iterations", "config", "planning"}
)


def check_values(args: Any) -> None:
    """Check the options that both subcommands have.

    Args:
        args: Parsed options of a subcommand.

    Raises:
        ValueError: A value that is missing or out of range.
    """
    for name, value in vars(args).items():
        if value is None and name not in _MAY_BE_LEFT_OUT:
            raise ValueError(f"{_option(name)} is null, but needs a value. Leave the line out.")
    for name in ("num_gpus", "num_samples", "shortest", "longest", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{_option(name)} must be at least 1; got {value}.")
    sizes = {"num_gpus": args.num_gpus, "scaling": max(getattr(args, "scaling", None) or [1])}
    for name, value in sizes.items():
        if value > _MOST_GPUS:
            raise ValueError(f"{_option(name)}: at most {_MOST_GPUS:,} GPUs; got {value:,}.")
    if args.num_samples > _MOST_SAMPLES:
        raise ValueError(
            f"--num-samples: at most {_MOST_SAMPLES:,} samples can be drawn; got "
            f"{args.num_samples:,}. Throughput needs no more than some thousands."
        )
    if args.seed < 0:
        raise ValueError(f"--seed must not be negative; got {args.seed}.")
    PlanningOptions(**planning_values(args))


def planning_values(args: Any) -> dict[str, Any]:
    """Options of the planner that have a value.

    Raises:
        ValueError: Under ``planning`` of a configuration file stands something else.
    """
    if args.planning is None:
        return {}
    try:
        items = vars(args.planning).items()
    except TypeError:
        raise ValueError(
            "planning must hold options of the planner by name, such as planning: "
            f"{{max_batch_size: 8}}; got {args.planning!r}."
        ) from None
    return {name: value for name, value in items if value is not None}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"

"""``lightning-dcp simulate``: an epoch of several policies on a modelled cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_dcp.cli.checks import check_values
from lightning_dcp.cli.findings import (
    ELASTIC,
    best_static,
    conclusion,
    memory_lines,
    setting_text,
    unbound_line,
    why_lines,
)
from lightning_dcp.cli.output import Output, plots_folder
from lightning_dcp.cli.setup import (
    Setup,
    check_fits,
    duration_text,
    prices_for,
    set_up,
    share_text,
)
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.simulation.run import PolicyResult, Scenario, known_policies, simulate
from lightning_dcp.tables import format_count, format_seconds

__all__ = ["run_simulate"]

_SAMPLES = 8_000  # so many are simulated by default: about half a minute for the default policies
_TOO_LONG = (
    "remove or cut the samples that are longer (`lightning-dcp plan` can skip them by "
    "--planning.on_too_long skip)"
)
_LEAST_STEPS, _MOST_STEPS = 2, 50

Results = Mapping[str, PolicyResult]


def run_simulate(args: Any) -> None:
    """Compare, print, draw.

    Args:
        args: Parsed options.

    Raises:
        ValueError, OSError, ImportError: A mistake of the user, for one line on stderr.
    """
    out = Output(as_json=args.json, quiet=args.quiet)
    check_values(args)
    folder = plots_folder(args.plots)
    unknown = [name for name in args.policies if name not in known_policies()]
    if unknown:
        raise ValueError(
            f"--policies: unknown policy {unknown[0]!r}. Known policies: "
            f"{', '.join(known_policies())}."
        )
    if args.max_steps is not None and args.max_steps < 1:
        raise ValueError(f"--max-steps must be at least 1; got {args.max_steps}.")
    setup = set_up(args)
    check_fits(int(setup.lengths.max()), setup.prices, _TOO_LONG)
    out.note(setup.describe())
    started = time.perf_counter()
    results = _compare(setup, args, setup.world_size, out)
    scaling, missing = _scaling(setup, args, results, out)

    planner = setup.planner(next((name for name in results if name in ELASTIC), "dcp-intra"))
    num_steps = len(next(iter(results.values())).step_s)
    notes = [
        f"Simulated {num_steps:,} of {setup.steps_per_epoch:,} steps; times of an epoch are "
        f"those of all {setup.lengths.sum():,} tokens at the same speed.",
        *memory_lines(setup.prices, int(setup.lengths.max())),
        *why_lines(planner.exclusions),
        *unbound_line(setup.planning, args.policies),
        *missing,
    ]
    out.show(comparison_table(setup, results), settings_table(results))
    if scaling:
        out.show(scaling_table(scaling))
    text = conclusion(results)
    if text:
        out.show(text)
    for note in notes:
        out.note(note)
    if folder is not None:
        _draw(folder, args.format, setup, results, scaling, out)
    out.note(f"Took {time.perf_counter() - started:.0f} s.")
    out.json(
        {
            "setup": setup.to_dict(),
            "simulated_steps": num_steps,
            "policies": {name: _values(setup, results, result) for name, result in results.items()},
            "scaling": [
                {
                    "world_size": size,
                    "policies": {name: _short_values(result) for name, result in found.items()},
                }
                for size, found in scaling.items()
            ],
            "conclusion": text,
            "notes": notes,
        }
    )


def _compare(setup: Setup, args: Any, world_size: int, out: Output) -> dict[str, PolicyResult]:
    prices = setup.prices if world_size == setup.world_size else prices_for(args, world_size)
    check_fits(int(setup.lengths.max()), prices, _TOO_LONG)
    per_step = setup.batch_size * world_size
    max_steps = args.max_steps
    if max_steps is None:
        max_steps = min(_MOST_STEPS, max(_LEAST_STEPS, _SAMPLES // per_step))
    scenario = Scenario(
        lengths=setup.lengths,
        costs=prices.costs,
        world_size=world_size,
        limit_bytes=prices.limit_bytes,
        batch_size=setup.batch_size,
        seed=setup.seed,
        sp_size_exclusions=prices.exclusions,
        max_steps=max_steps if max_steps * per_step < setup.lengths.size else None,
    )
    return simulate(
        scenario,
        args.policies,
        options=PlanningOptions(**setup.planning),
        progress=_progress(out, len(args.policies), world_size),
    )


def _progress(out: Output, count: int, world_size: int) -> Callable[[str], None]:
    done = 0

    def report(policy: str) -> None:
        nonlocal done
        done += 1
        out.note(f"[{done}/{count}] {policy} on {world_size} GPUs")

    return report


def _scaling(
    setup: Setup, args: Any, results: Results, out: Output
) -> tuple[dict[int, Results], list[str]]:
    """Results by world size, and why some are missing."""
    found: dict[int, Results] = {}
    missing = []
    for size in sorted({*args.scaling, setup.world_size}) if args.scaling else ():
        try:
            same = size == setup.world_size
            found[size] = results if same else _compare(setup, args, size, out)
        except ValueError as error:
            missing.append(f"W={size} is left out: {error}")
    return found, missing


# ---------------------------------------------------------------------- tables


def comparison_table(setup: Setup, results: Results) -> Table:
    """Policies by what they cost."""
    table = Table(
        title=f"Predicted for {setup.workload.name} on {setup.world_size} GPUs",
        title_justify="left",
        caption="idle: of all GPU time; efficiency: if every sample ran at its cheapest and no GPU "
        "ever\nwaited, the epoch would take this share of its time",
        caption_justify="left",
    )
    table.add_column("policy", no_wrap=True)
    versus = [name for name in ("naive", "tuned") if name in results]
    for heading in (
        "tokens/s/GPU",
        *(f"vs {name}" for name in versus),
        "idle",
        "padding",
        "efficiency",
        "epoch",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    best = max(results.values(), key=lambda result: result.tokens_per_s_per_rank)
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.tokens_per_s_per_rank:,.0f}",
            *(f"{_ratio(result, results[other]):.2f}x" for other in versus),
            f"{result.idle_share:.1%}",
            f"{result.padding_share:.1%}",
            f"{result.efficiency:.0%}",
            duration_text(3600 * hours_per_epoch(setup, result)),
            style="bold" if result is best else None,
        )
    return table


def settings_table(results: Results) -> Table:
    """Policies by what they chose."""
    table = Table()
    table.add_column("policy", no_wrap=True)
    table.add_column("p (share of GPU time)")
    table.add_column("recomputed", justify="right", no_wrap=True)
    table.add_column("planning/step", justify="right", no_wrap=True)
    table.add_column("setting")
    for name, result in results.items():
        table.add_row(
            name,
            share_text(result.sp_sizes),
            f"{result.recompute_share:.0%}",
            format_seconds(result.planning_s),
            setting_text(result),
        )
    return table


def scaling_table(scaling: Mapping[int, Results]) -> Table:
    """Tokens/s/GPU of each policy by number of GPUs."""
    table = Table(title="tokens/s/GPU by number of GPUs", title_justify="left")
    table.add_column("policy", no_wrap=True)
    for size in scaling:
        table.add_column(f"W={size}", justify="right", no_wrap=True)
    for name in next(iter(scaling.values())):
        table.add_row(
            name, *(format_count(r[name].tokens_per_s_per_rank) for r in scaling.values())
        )
    return table


def hours_per_epoch(setup: Setup, result: PolicyResult) -> float:
    """Hours of a whole epoch at the simulated steps' throughput."""
    speed = result.tokens_per_s_per_rank * setup.world_size
    return float(setup.lengths.sum()) / speed / 3600


def _ratio(result: PolicyResult, other: PolicyResult) -> float:
    return result.tokens_per_s_per_rank / other.tokens_per_s_per_rank


# ---------------------------------------------------------------------- JSON and plots


def _short_values(result: PolicyResult) -> dict[str, Any]:
    return {
        "tokens_per_s_per_gpu": result.tokens_per_s_per_rank,
        "idle_share": result.idle_share,
        "efficiency": result.efficiency,
    }


def _values(setup: Setup, results: Results, result: PolicyResult) -> dict[str, Any]:
    static = best_static(results)
    ratios = {
        f"speedup_over_{name.replace('-', '_')}": _ratio(result, results[name])
        for name in ("naive", "tuned")
        if name in results
    }
    if static is not None:
        ratios["speedup_over_best_static"] = _ratio(result, static)
    return {
        **_short_values(result),
        **ratios,
        "padding_share": result.padding_share,
        "hours_per_epoch": hours_per_epoch(setup, result),
        "step_s": result.step_s.tolist(),
        "sp_sizes": {str(p): share for p, share in result.sp_sizes.items()},
        "recompute_share": result.recompute_share,
        "planning_s_per_step": result.planning_s,
        "setting": setting_text(result),
    }


def _draw(
    folder: Path,
    suffix: str,
    setup: Setup,
    results: Results,
    scaling: Mapping[int, Results],
    out: Output,
) -> None:
    from lightning_dcp.simulation.plots import draw_choices, draw_policies, draw_scaling
    from lightning_dcp.timeline import draw_timeline

    where = f"{setup.workload.name}, {setup.world_size} GPUs, {setup.prices.source}"
    drawn = [folder / f"policies.{suffix}"]
    draw_policies(results, drawn[-1], subtitle=where)
    if len(scaling) > 1:
        drawn.append(folder / f"scaling.{suffix}")
        draw_scaling(scaling, drawn[-1], subtitle=f"{setup.workload.name}, {setup.prices.source}")
    elastic = next((n for n in ("dcp-intra", *ELASTIC) if n in results), None)
    epoch = results[elastic].epoch if elastic is not None else None
    if elastic is not None and epoch is not None:
        drawn.append(folder / f"choices-{elastic}.{suffix}")
        draw_choices(
            epoch,
            drawn[-1],
            num_blocks=setup.prices.costs.num_blocks,
            title=f"What {elastic} chooses by length",
            subtitle=where,
        )
        drawn.append(folder / f"timeline-{elastic}.{suffix}")
        draw_timeline(epoch[0], drawn[-1], title=f"{elastic}: one optimizer step")
    for path in drawn:
        out.note(f"Drew {path}")

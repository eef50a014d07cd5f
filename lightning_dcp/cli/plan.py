"""``lightning-dcp plan``: what one policy plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_dcp.cli.checks import check_values
from lightning_dcp.cli.output import Output, plots_folder
from lightning_dcp.cli.setup import Setup, duration_text, set_up, share_text, sp_shares
from lightning_dcp.planning.epoch import EpochPlan
from lightning_dcp.planning.plan import Plan
from lightning_dcp.planning.planner import EpochPlanner
from lightning_dcp.tables import format_bytes, format_seconds, plan_tables, static_lines

__all__ = ["run_plan"]

_MOST_ROWS = 64


def run_plan(args: Any) -> None:
    """Plan, print, draw.

    Args:
        args: Parsed options.

    Raises:
        ValueError, OSError, ImportError: A mistake of the user, for one line on stderr.
    """
    out = Output(as_json=args.json, quiet=args.quiet)
    check_values(args)
    folder = plots_folder(args.plots)
    if args.epoch < 0:
        raise ValueError(f"--epoch must not be negative; got {args.epoch}.")
    if args.iteration is not None and args.iterations is not None:
        raise ValueError("--iteration and --iterations contradict each other: give one of them.")
    setup = set_up(args)
    out.note(setup.describe())
    planner = setup.planner(args.policy)
    epoch = planner.epoch(args.epoch)
    wanted = _wanted(epoch, args)

    out.show(*plan_tables(planner), *_epoch_lines(planner, epoch, args.policy))
    if args.policy not in ("bucket", "packed") and not args.quiet:
        for line in static_lines(planner):
            out.note(line)
    if args.iteration is not None:
        out.show(micro_batch_table(epoch[args.iteration]))
    elif wanted:
        out.show(iteration_table(epoch, wanted))
    for index in wanted:
        out.line(epoch[index].to_json())
    if not wanted:
        out.json(_values(setup, planner, epoch, args.policy))
    if folder is not None:
        _draw(folder, args, setup, epoch, out)


def _wanted(epoch: EpochPlan, args: Any) -> Sequence[int]:
    """Iterations that were asked for."""
    last = len(epoch) - 1
    if args.iteration is not None:
        if not 0 <= args.iteration <= last:
            raise ValueError(
                f"--iteration {args.iteration} does not exist: the epoch has {len(epoch):,} "
                f"iterations, 0 to {last}."
            )
        return [args.iteration]
    if args.iterations is None:
        return []
    first, end = args.iterations
    found = range(*slice(first, end).indices(len(epoch)))
    if not found:
        raise ValueError(
            f"--iterations {'' if first is None else first}:{'' if end is None else end} holds no "
            f"iteration: the epoch has {len(epoch):,}, 0 to {last}."
        )
    return found


def _epoch_lines(planner: EpochPlanner, epoch: EpochPlan, policy: str) -> list[str]:
    longest = int(epoch.memory_bytes.max())
    lines = [
        f"Epoch {epoch.epoch}: {len(epoch):,} iterations of about {planner.tokens_per_step:,} "
        f"tokens, predicted {duration_text(epoch.predicted_time_s)} "
        f"({epoch.num_tokens / epoch.predicted_time_s / epoch.world_size:,.0f} tokens/s/GPU), "
        f"idle {epoch.predicted_idle_share:.1%}, padding {epoch.padding_share:.1%}.",
        f"p (share of GPU time): {share_text(sp_shares(epoch.sp_sizes, epoch.time_s))}. Memory: "
        f"{format_bytes(longest)} at most, of {format_bytes(planner.usable_bytes)}.",
    ]
    if policy not in ("bucket", "packed") and not planner.elastic:
        lines.append("No plan that adapts is quicker here: a static plan is used.")
    if planner.skipped_ids:
        lines.append(f"{len(planner.skipped_ids):,} samples that are too long are skipped.")
    if planner.truncate_to is not None:
        lines.append(f"Samples longer than {planner.truncate_to:,} tokens are cut to that length.")
    return lines


def micro_batch_table(plan: Plan) -> Table:
    """One iteration's micro-batches in their global order."""
    table = Table(
        title=f"Iteration {plan.iteration}: {plan.num_samples:,} samples in "
        f"{len(plan.micro_batches):,} micro-batches, {plan.num_tokens:,} tokens, "
        f"{format_seconds(plan.makespan_s)}, idle {plan.idle_share:.1%}",
        title_justify="left",
    )
    for heading in ("#", "ranks", "p", "b", "length", "padding", "r", "start", "time", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = list(zip(plan.micro_batches, plan.start_s, strict=True))
    for index, (m, start_s) in enumerate(rows[:_MOST_ROWS]):
        table.add_row(
            str(index),
            str(m.first_rank) if m.sp_size == 1 else f"{m.first_rank}-{m.ranks.stop - 1}",
            str(m.sp_size),
            str(m.batch_size),
            f"{m.seq_len:,}",
            f"{1 - m.num_tokens / m.padded_tokens:.1%}",
            str(m.recompute_blocks),
            format_seconds(start_s) if start_s else "0 s",
            format_seconds(m.est_time_s),
            format_bytes(m.est_bytes),
        )
    if len(rows) > _MOST_ROWS:
        table.caption = f"and {len(rows) - _MOST_ROWS:,} more; --json has all"
        table.caption_justify = "left"
    return table


def iteration_table(epoch: EpochPlan, wanted: Sequence[int]) -> Table:
    """One row for each of some iterations."""
    table = Table()
    for heading in (
        "iteration",
        "samples",
        "micro-batches",
        "tokens",
        "longest",
        "makespan",
        "idle",
        "padding",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for index in wanted[:_MOST_ROWS]:
        plan = epoch[index]
        table.add_row(
            str(index),
            f"{plan.num_samples:,}",
            f"{len(plan.micro_batches):,}",
            f"{plan.num_tokens:,}",
            f"{max(m.seq_len for m in plan.micro_batches):,}",
            format_seconds(plan.makespan_s),
            f"{plan.idle_share:.1%}",
            f"{plan.padding_share:.1%}",
        )
    if len(wanted) > _MOST_ROWS:
        table.caption = f"and {len(wanted) - _MOST_ROWS:,} more; --json has all"
        table.caption_justify = "left"
    return table


def _values(setup: Setup, planner: EpochPlanner, epoch: EpochPlan, policy: str) -> dict[str, Any]:
    return {
        "setup": setup.to_dict(),
        "policy": policy,
        "elastic": planner.elastic,
        "epoch": epoch.epoch,
        "num_iterations": len(epoch),
        "tokens_per_step": planner.tokens_per_step,
        "predicted_epoch_s": epoch.predicted_time_s,
        "tokens_per_s_per_gpu": epoch.num_tokens / epoch.predicted_time_s / epoch.world_size,
        "idle_share": epoch.predicted_idle_share,
        "padding_share": epoch.padding_share,
        "usable_bytes": planner.usable_bytes,
        "buckets": [
            {
                "lo": choice.lo,
                "hi": choice.hi,
                "num_samples": choice.num_samples,
                "batch_size": choice.batch_size,
                "sp_size": choice.sp_size,
                "recompute_blocks": choice.recompute_blocks,
                "time_s": float(choice.time_s),
                "memory_bytes": int(choice.memory_bytes),
            }
            for choice in planner.bucket_table()
        ],
        "exclusions": [str(exclusion) for exclusion in planner.exclusions],
        "skipped_ids": list(planner.skipped_ids),
        "truncate_to": planner.truncate_to,
    }


def _draw(folder: Path, args: Any, setup: Setup, epoch: EpochPlan, out: Output) -> None:
    from lightning_dcp.simulation.plots import draw_choices
    from lightning_dcp.timeline import draw_timeline

    drawn = [folder / f"choices-{args.policy}.{args.format}"]
    draw_choices(
        epoch,
        drawn[-1],
        num_blocks=setup.prices.costs.num_blocks,
        title=f"What {args.policy} chooses by length",
        subtitle=f"{setup.workload.name}, {setup.world_size} GPUs, {setup.prices.source}",
    )
    if args.iteration is not None:
        drawn.append(folder / f"timeline-{args.policy}-{args.iteration}.{args.format}")
        draw_timeline(epoch[args.iteration], drawn[-1])
    for path in drawn:
        out.note(f"Drew {path}")

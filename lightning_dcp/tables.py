"""Tables of what was planned and how it went, for `DCPCallback`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lightning_dcp.planning.candidates import Exclusion
    from lightning_dcp.planning.planner import EpochPlanner

_MAX_COMPARED_SAMPLES = 50_000
_SLOW = 1.1


def plan_tables(planner: EpochPlanner) -> list[RenderableType]:
    """The start of fit: buckets with their configuration, exclusions, held-out errors.

    Args:
        planner: The strategy's.
    """
    from rich.table import Table
    from rich.text import Text

    from lightning_dcp.planning.cost_model import CostModel
    from lightning_dcp.planning.drift import uncorrected
    from lightning_dcp.profiling.report import held_out_text

    choices, costs = planner.bucket_table(), uncorrected(planner.cost_model)
    num_samples = sum(choice.num_samples for choice in choices)
    title = f"DCP: {num_samples:,} samples in {len(choices)} buckets, "
    if planner.of_stream:
        title += "the first of a stream"
    else:
        title += f"{planner.num_iterations:,} iterations per epoch"
    table = Table(
        title=title,
        title_justify="left",
        caption=(f"Cost model: {held_out_text(costs)}" if isinstance(costs, CostModel) else None),
        caption_justify="left",
    )
    table.add_column("length", justify="right")
    for heading in ("samples", "p", "b", "r", "time", "memory", "tokens/s/rank"):
        table.add_column(heading, justify="right", no_wrap=True)
    for choice in choices:
        table.add_row(
            f"{choice.lo:,} - {choice.hi - 1:,}",
            f"{choice.num_samples:,}",
            str(choice.sp_size),
            str(choice.batch_size),
            str(choice.recompute_blocks),
            format_seconds(choice.time_s),
            format_bytes(choice.memory_bytes),
            format_count(choice.tokens_per_s_per_rank),
        )
    legend = (
        "p: ranks that share a sequence; b: samples, r: recomputed blocks of a micro-batch. Time\n"
        "and memory are predicted for the bucket's longest samples."
    )
    parts: list[RenderableType] = [table, legend]
    rows = exclusion_rows(planner.exclusions)
    if rows:
        grid = Table.grid(padding=(0, 2))
        for which, reason in rows:
            grid.add_row(f"  {which}", Text(reason))  # not str: "[1, 2]" would be markup
        parts.extend(["Left out:", grid])
    return parts


def exclusion_rows(exclusions: Sequence[Exclusion]) -> list[tuple[str, str]]:
    """Why candidates were left out, one row per SP size and kind of reason.

    Reasons that differ in their numbers only, in several buckets, are put together.

    Args:
        exclusions: From the planner; each for one bucket or for all.

    Returns:
        Which SP size (and lengths), and the reason.
    """
    groups: dict[tuple[int, str], list[Exclusion]] = {}
    for exclusion in exclusions:
        kind = re.sub(r"\d[\d,.]*( [KMGT]?i?B)?", "#", exclusion.reason)
        groups.setdefault((exclusion.sp_size, kind), []).append(exclusion)
    rows = []
    for (sp_size, _), group in sorted(groups.items(), key=lambda item: item[0][0]):
        which = f"p={sp_size}"
        ranges = _ranges((e.lo, e.hi) for e in group if e.lo is not None and e.hi is not None)
        if ranges:
            which += " at " + ", ".join(f"{lo:,} - {hi - 1:,}" for lo, hi in ranges)
        same = len({e.reason for e in group}) == 1
        rows.append((which, group[0].reason if same else f"for example, {group[0].reason}"))
    return rows


def _ranges(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join intervals [lo, hi) that touch."""
    joined: list[tuple[int, int]] = []
    for lo, hi in sorted(intervals):
        if joined and lo <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(hi, joined[-1][1]))
        else:
            joined.append((lo, hi))
    return joined


def summary_table(values: dict[str, Any], num_iterations: int) -> RenderableType:
    """The end of fit: prediction beside measurement, and what was chosen.

    Args:
        values: `dcp_metrics().compute()`.
        num_iterations: How many were run.
    """
    from rich.table import Table

    table = Table(
        title=f"DCP: predicted and measured over {num_iterations:,} iterations",
        title_justify="left",
        caption="ratio: median over iterations of measured / predicted",
        caption_justify="left",
    )
    for heading in ("", "predicted", "measured", "ratio"):
        table.add_column(heading, justify="left" if not heading else "right")

    def number(name: str) -> float:
        return float(values[f"dcp/{name}"])

    def ratio(name: str) -> str:
        value = number(name)
        return "" if math.isnan(value) else f"{value:.2f}"

    measured_bytes = number("peak_bytes")
    table.add_row(
        "makespan of an iteration, mean",
        format_seconds(number("predicted_makespan_s")),
        format_seconds(number("makespan_s")),
        ratio("time_ratio"),
    )
    table.add_row(
        "largest peak memory of a rank",
        format_bytes(number("predicted_peak_bytes")),
        format_bytes(measured_bytes) if measured_bytes > 0 else "not measurable",
        ratio("memory_ratio"),
    )
    table.add_row("tokens/s", "", format_count(number("tokens_per_s")), "")
    table.add_row("idle share", "", f"{number('idle_share'):.1%}", "")
    table.add_row("padding share", "", f"{number('padding_share'):.1%}", "")
    if float(values.get("dcp/slowest_rank_factor", 1.0)) >= _SLOW:
        table.add_row(
            f"seconds of rank {number('slowest_rank'):.0f}, of a typical rank's",
            "",
            f"{number('slowest_rank_factor'):.2f}",
            "",
        )
    for choice, label in (
        ("p", "SP size p"),
        ("b", "samples of a micro-batch b"),
        ("g", "micro-batches of a rank g"),
        ("r", "recomputed blocks r"),
    ):
        table.add_row(label, "", _chosen(values, choice), "")
    return table


def _chosen(values: dict[str, Any], choice: str, most: int = 3) -> str:
    """The most frequent choices, such as `1 (84%), 2 (16%)`."""
    prefix = f"dcp/{choice}="
    counts = {int(k[len(prefix) :]): float(v) for k, v in values.items() if k.startswith(prefix)}
    total = sum(counts.values())
    frequent = sorted(counts, key=lambda value: (-counts[value], value))[:most]
    parts = [f"{value} ({counts[value] / total:.0%})" for value in sorted(frequent)]
    return ", ".join(parts) + (", ..." if len(counts) > most else "")


def static_lines(planner: EpochPlanner) -> list[str]:
    """The first epoch beside that of the best static plan, by the same cost model.

    Args:
        planner: Its data set is planned twice more; where that would take long, nothing is said.
    """
    from lightning_dcp.planning.static import best_static

    if planner.lengths.size > _MAX_COMPARED_SAMPLES:
        return []
    try:
        static = best_static(planner)
    except ValueError:
        return ["There is no static plan to compare with: no single SP size fits all samples."]
    lines, speeds = [], []
    for name, chosen in (
        ("DCP", planner),
        (f"best static plan (p={static.bucket_table()[0].sp_size} for all)", static),
    ):
        epoch = chosen.epoch(0)
        speeds.append(epoch.num_tokens / epoch.predicted_time_s)
        lines.append(
            f"Predicted by the cost model, {name}: {format_count(speeds[-1])} tokens/s, idle share "
            f"{epoch.predicted_idle_share:.1%}"
        )
    lines[-1] += f"; by it DCP is {speeds[0] / speeds[1]:.2f} times as fast"
    return lines


def format_seconds(seconds: float) -> str:
    """Three digits, in s, ms or us."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def format_bytes(num_bytes: float) -> str:
    """Three digits, in binary units."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{_three_digits(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} TiB"


def format_count(count: float) -> str:
    """Three digits and k, M or G."""
    value = float(count)
    for unit in ("", "k", "M"):
        if value < 1000:
            return f"{_three_digits(value)}{unit}"
        value /= 1000
    return f"{_three_digits(value)}G"


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"

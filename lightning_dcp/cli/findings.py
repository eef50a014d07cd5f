"""What a comparison means, in sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_dcp.cli.setup import ANY_LENGTH, Prices, longest_fitting
from lightning_dcp.planning.candidates import Exclusion
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.simulation.run import LIBRARY, PolicyResult
from lightning_dcp.tables import exclusion_rows, format_bytes

__all__ = ["best_static", "conclusion", "memory_lines", "setting_text", "unbound_line", "why_lines"]

ELASTIC = ("dcp-inter", "dcp-intra", "global-batch")
STATIC = ("bucket", "karmarkar-karp", "naive", "packed", "tuned")
_LITTLE = 0.01  # a smaller share would be printed as 0%
_NOTHING = 1.02  # a smaller difference is below what the model can tell

_HIDDEN = re.compile(r"(longest|pad_multiple)=.*|balanced=False|.*=None")


def setting_text(result: PolicyResult) -> str:
    """What a static policy was tuned to, without what is the same for all of them."""
    if result.epoch is not None:
        return "chosen by length"
    parts = [part for part in result.setting.split(", ") if part and not _HIDDEN.fullmatch(part)]
    if not any(part.startswith("p=") for part in parts) and len(result.sp_sizes) == 1:
        parts.insert(0, f"p={next(iter(result.sp_sizes))}")
        if result.recompute_share > 1 - 1e-9:
            parts.insert(1, "all blocks recomputed")
    text = ", ".join(parts).replace("balanced=True", "balanced")
    return re.sub(r"micro_batches=(\d+)", r"up to \1 micro-batches a group", text)


def best_static(results: Mapping[str, PolicyResult]) -> PolicyResult | None:
    """The quickest of the policies with one SP size; None where none was run."""
    return _quickest(results, STATIC)


def _quickest(results: Mapping[str, PolicyResult], names: tuple[str, ...]) -> PolicyResult | None:
    found = [result for name, result in results.items() if name in names]
    return max(found, key=lambda result: result.tokens_per_s_per_rank, default=None)


def conclusion(results: Mapping[str, PolicyResult]) -> str:
    """One sentence: what changes with DCP, or that nothing does."""
    ours, static = _quickest(results, ELASTIC), best_static(results)
    if ours is None or static is None:
        return ""
    naive = results.get("naive")
    ratio = ours.tokens_per_s_per_rank / static.tokens_per_s_per_rank
    beside = f"the best static plan ({static.policy}: {setting_text(static)})"
    if ratio < _NOTHING:
        text = f"No gain to expect: {ours.policy} is predicted {ratio:.2f}x as fast as {beside}"
    else:
        text = f"{ours.policy} is predicted {ratio:.2f}x as fast as {beside}"
    if naive is not None and naive is not static:
        gain = ours.tokens_per_s_per_rank / naive.tokens_per_s_per_rank
        text += f" and {gain:.2f}x as fast as the naive one ({setting_text(naive)})"
    left = 1 - ours.efficiency
    if left < _LITTLE:
        return f"{text}."
    return (
        f"{text}. If every sample ran at its cheapest and no GPU ever waited, it would take "
        f"{left:.0%} less."
    )


def memory_lines(prices: Prices, longest: int) -> list[str]:
    """What memory limits: the model's share, and the longest sample at each SP size."""
    costs = prices.costs
    whole, recomputed = longest_fitting(prices, 0), longest_fitting(prices)
    # Up to the SP size at which nothing has to be recomputed any more.
    enough = next((p for p in costs.sp_sizes if whole[p] >= longest), costs.sp_sizes[-1])
    rooms = [
        f"p={p} {_tokens(whole[p])} / {_tokens(recomputed[p])}"
        for p in costs.sp_sizes
        if p <= enough
    ]
    least = next((p for p in costs.sp_sizes if recomputed[p] >= longest), None)
    lines = [
        f"Memory: {format_bytes(prices.limit_bytes)} a rank, of which the model takes "
        f"{format_bytes(costs.fixed_bytes)} before any sample.",
        "Longest sample in tokens, without / with all blocks recomputed: " + "; ".join(rooms) + ".",
    ]
    if least is not None and least > 1:
        lines.append(
            f"The longest sample ({longest:,} tokens) needs p >= {least}; one SP size for all "
            "samples has to be that large for the short ones too."
        )
    return lines


def _tokens(length: int) -> str:
    return "any" if length == ANY_LENGTH else f"{length:,}"


def unbound_line(planning: Mapping[str, Any], policies: Sequence[str]) -> list[str]:
    """Which options of the planner were given that some policies take no notice of."""
    baselines = [name for name in policies if name not in LIBRARY]
    usual = PlanningOptions().to_dict()
    given = PlanningOptions(**planning).to_dict()
    changed = [f"--planning.{name}" for name in given if given[name] != usual[name]]
    if not changed or not baselines:
        return []
    return [
        f"Options of the planner ({', '.join(changed)}) do not bind the baselines: "
        f"{', '.join(baselines)}."
    ]


def why_lines(exclusions: tuple[Exclusion, ...]) -> list[str]:
    """What was left out and why."""
    return [f"Left out: {which}: {reason}." for which, reason in exclusion_rows(exclusions)]

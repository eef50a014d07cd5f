"""Pictures of the results, in colours that stay apart for colour-blind eyes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cases import MODELS
from comparing import Comparison
from experiments import OURS, STATIC, Key, LengthPoint
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, FAINT, GRID = "#1b2733", "#5d6b79", "#dfe3e8"
# From light to dark, so that the groups differ in grey too.
COLOURS = {
    **dict.fromkeys(STATIC, "#b4bcc4"),
    "megatron": "#e0b25c",
    "flexsp": "#c9861a",
    **dict.fromkeys(OURS, "#1d6fa5"),
}
# Okabe and Ito's.
LINES = {
    "naive": ("#7a7a7a", "s", "--"),
    "naive-bucketed": ("#e69f00", "P", "--"),
    "tuned": ("#d55e00", "D", "--"),
    "dcp-inter": ("#009e73", "^", "-"),
    "dcp-intra": ("#0072b2", "o", "-"),
    "global-batch": ("#cc79a7", "v", ":"),
}


def start_figure(width: float, height: float, title: str, subtitle: str) -> Figure:
    """An empty figure with its heading."""
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.2 / width, 1 - 0.34 / height, title, size=13, weight="bold", color=INK)
    figure.text(0.2 / width, 1 - 0.6 / height, subtitle, size=9.5, color=FAINT)
    return figure


def plain(axes: Any, grid: str) -> None:
    """No frame, a faint grid."""
    axes.tick_params(length=0, labelcolor=FAINT, labelsize=9)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def bars(axes: Any, values: Mapping[str, float], text: str, *, names: bool, room: float) -> None:
    """One horizontal bar per policy, its number behind it."""
    most = max(values.values()) or 1.0
    axes.barh(
        range(len(values)),
        list(values.values()),
        color=[COLOURS[name] for name in values],
        height=0.68,
    )
    for row, value in enumerate(values.values()):
        label = text.format(value)
        axes.text(value + 0.02 * most, row, label, va="center", size=8.5, color=INK)
    axes.set_xlim(0, room * most)
    axes.set_ylim(len(values) - 0.45, -0.55)
    axes.set_yticks(range(len(values)), list(values) if names else [""] * len(values))
    plain(axes, "x")
    axes.tick_params(axis="y", labelcolor=INK, labelsize=9.5)
    axes.locator_params(axis="x", nbins=3)


def draw_policies(found: Mapping[Key, Comparison], model: str, path: Path) -> None:
    """Figure 8: throughput and idle share of one model, mixes side by side."""
    mixes = [mix for own, mix in found if own == model]
    world_size = found[model, mixes[0]].scenario.world_size
    width, height = 10.0, 6.6
    figure = start_figure(
        width,
        height,
        f"Throughput and imbalance, Transformer-{model}, {world_size} GPUs (simulated)",
        "blue: this package; grey: one SP size and one recomputation setting for all samples",
    )
    left, gap = 0.125, 0.02
    share = (0.985 - left) / len(mixes) - gap
    rows = (
        (0.515, "tokens/s/GPU", "{:,.0f}", lambda r: r.tokens_per_s_per_rank),
        (0.055, "idle share of GPU time (%)", "{:.1f}", lambda r: 100 * r.idle_share),
    )
    for column, mix in enumerate(mixes):
        results = found[model, mix].results
        for bottom, label, text, value in rows:
            axes = figure.add_axes((left + column * (share + gap), bottom, share, 0.34))
            values = {name: value(result) for name, result in results.items()}
            bars(axes, values, text, names=column == 0, room=1.22)
            axes.xaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
            axes.set_title(f"{mix}: {label}", loc="left", size=10, color=INK)
    figure.savefig(path)


def draw_planners(found: Mapping[Key, Comparison], path: Path) -> None:
    """Speed of planners that also choose an SP size per sample, relative to global-batch."""
    width, height = 10.0, 2.0 + 1.75 * len({model for model, _ in found})
    figure = start_figure(
        width,
        height,
        "Planners with SP sizes by sample, on the same steps (simulated)",
        "speed relative to global-batch, which takes exactly these samples in each step; the "
        "better of Megatron's two measures of work",
    )
    models = [model for model in MODELS if any(own == model for own, _ in found)]
    left, gap = 0.125, 0.02
    most = max(sum(own == model for own, _ in found) for model in models)
    share = (0.985 - left) / most - gap
    tall = (height - 1.1) / height / len(models)
    for row, model in enumerate(models):
        for column, mix in enumerate(mix for own, mix in found if own == model):
            own = found[model, mix]
            bottom = 1 - 0.75 / height - (row + 1) * tall + 0.3 / height
            axes = figure.add_axes(
                (left + column * (share + gap), bottom, share, tall - 0.62 / height)
            )
            names = dict.fromkeys((*better_peers(own).values(), "dcp-inter", "global-batch"))
            values = {
                "megatron" if name.startswith("megatron") else name: own.speed(name, "global-batch")
                for name in names
            }
            bars(axes, values, "{:.2f}", names=column == 0, room=1.25)
            axes.set_title(f"{model}, {mix}", loc="left", size=10, color=INK)
    figure.savefig(path)


def better_peers(found: Comparison) -> dict[str, str]:
    """Name for the table -> policy: the quicker Megatron, and FlexSP where it was run."""
    megatron = [name for name in found.results if name.startswith("megatron")]
    peers = {"Megatron": min(megatron, key=lambda name: found.results[name].total_s)}
    if "flexsp" in found.results:
        peers["FlexSP"] = "flexsp"
    return peers


def draw_scaling(found: Mapping[Key, Mapping[int, Comparison]], path: Path) -> None:
    """Figure 9: throughput of a GPU by number of GPUs, balanced mix."""
    width, height = 10.0, 4.9
    figure = start_figure(
        width,
        height,
        "Weak scaling, balanced mix (simulated)",
        "equal samples per GPU and step; at the right end the share of what a GPU did in the "
        "smallest cluster",
    )
    for column, model in enumerate(MODELS):
        sizes = found[model, "balanced"]
        axes = figure.add_axes((0.08 + 0.49 * column, 0.2, 0.37, 0.58))
        first, last = min(sizes), max(sizes)
        ends: list[tuple[float, str, str]] = []
        for name, (colour, marker, style) in LINES.items():
            speeds = [c.results[name].tokens_per_s_per_rank for c in sizes.values()]
            axes.plot(
                list(sizes),
                speeds,
                color=colour,
                marker=marker,
                linestyle=style,
                linewidth=2,
                markersize=6,
                label=name,
                zorder=2.5 if name == "global-batch" else 2,
            )
            ends.append((speeds[-1], f"{100 * speeds[-1] / speeds[0]:.0f}%", colour))
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(sizes), [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        top = 1.12 * max(axes.get_ylim())
        axes.set_ylim(0, top)
        axes.set_xlim(first / 1.25, last * 1.25)
        place = float("inf")
        for value, text, colour in sorted(ends, reverse=True):
            place = min(value, place - 0.055 * top)  # apart from each other
            axes.annotate(
                text, (last * 1.35, place), annotation_clip=False, va="center", size=9, color=colour
            )
        axes.yaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
        axes.set_xlabel("GPUs", color=FAINT)
        axes.set_title(f"Transformer-{model}: tokens/s/GPU", loc="left", size=10.5, color=INK)
        plain(axes, "y")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="lower center",
        ncols=len(labels),
        frameon=False,
        fontsize=9.5,
        labelcolor=INK,
    )
    figure.savefig(path)


def draw_by_length(points: list[LengthPoint], path: Path) -> None:
    """Figure 10: gain of dcp-intra over dcp-inter by length."""
    width, height = 8.0, 4.4
    figure = start_figure(
        width,
        height,
        "Gain by choosing recomputation, Transformer-1D (simulated)",
        "best throughput of all (b, p) with the fewest recomputed blocks, over the best with all",
    )
    axes = figure.add_axes((0.09, 0.14, 0.88, 0.64))
    axes.axhspan(20, 25, color="#e69f00", alpha=0.25, linewidth=0)
    axes.text(1024, 25.3, "the paper: 20-25% below 200k", size=9, color="#7a5200", va="bottom")
    axes.axvline(200_000, color=FAINT, linewidth=1, linestyle=":")
    axes.plot(
        [point.length for point in points],
        [100 * point.gain for point in points],
        color=LINES["dcp-intra"][0],
        marker="o",
        markersize=5,
        linewidth=2,
    )
    axes.set_xscale("log", base=2)
    ticks = [point.length for point in points if point.length & (point.length - 1) == 0]
    axes.set_xticks(ticks, [f"{t // 1024}k" if t < 2**20 else f"{t >> 20}M" for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 1.12 * max(100 * point.gain for point in points))
    axes.set_xlabel("length (tokens)", color=FAINT)
    axes.set_title("more throughput (%)", loc="left", size=10.5, color=INK)
    plain(axes, "both")
    figure.savefig(path)

"""Pictures of a comparison: policies, number of GPUs, and choices by length. Needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_dcp.planning.epoch import EpochPlan
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.simulation.run import LIBRARY, PolicyResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_choices", "draw_policies", "draw_scaling"]

_INK, _FAINT, _GRID = "#1b2733", "#5d6b79", "#dfe3e8"
_OURS, _BASELINE = "#1d73ab", "#aab3bc"
# Okabe and Ito's colours, which stay apart for colour-blind eyes; yellow is too pale for lines.
_LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = "osD^vPX"
_BINS_PER_OCTAVE = 4

Path = str | os.PathLike[str]


def _figure(width: float, height: float, title: str, subtitle: str) -> Figure:
    """An empty figure with its heading; axes go below ``0.85`` inches from the top."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Plots need matplotlib, which is not installed. Install it with: "
            "pip install 'lightning_dcp[plot]'"
        ) from error
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    left = 0.2 / width
    figure.text(left, 1 - 0.34 / height, title, size=13, weight="bold", color=_INK)
    figure.text(left, 1 - 0.6 / height, subtitle, size=9.5, color=_FAINT)
    return figure


def _plain(axes: Axes, *, grid: str) -> None:
    axes.tick_params(length=0, labelcolor=_FAINT, labelsize=9.5)
    axes.grid(axis=grid, color=_GRID, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw_policies(
    results: Mapping[str, PolicyResult], path: Path, *, title: str = "", subtitle: str = ""
) -> None:
    """Throughput and idle share of each policy, policies downwards.

    Args:
        results: From :func:`~lightning_dcp.simulation.run.simulate`.
        path: File to write; its suffix is the format.
        title: Above the picture; default: what it shows.
        subtitle: Below the title.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    names = list(results)
    width, height = 9.5, 1.55 + 0.42 * len(names)
    figure = _figure(width, height, title or "Predicted throughput and idle share", subtitle)
    bottom, top = 0.55 / height, 1 - 0.95 / height
    colours = [_OURS if name in LIBRARY else _BASELINE for name in names]

    def panel(left: float, share: float, values: list[float], text: Callable[[float], str]) -> Axes:
        axes = figure.add_axes((left, bottom, share, top - bottom))
        axes.barh(range(len(names)), values, color=colours, height=0.66)
        most = max(values) or 1.0
        axes.set_xlim(0, 1.2 * most)  # room for the numbers
        axes.set_ylim(len(names) - 0.45, -0.55)
        for row, value in enumerate(values):
            axes.text(value + 0.015 * most, row, text(value), va="center", size=9.5, color=_INK)
        _plain(axes, grid="x")
        axes.locator_params(axis="x", nbins=5)
        return axes

    speeds = [results[name].tokens_per_s_per_rank for name in names]
    throughput = panel(1.45 / width, 0.45, speeds, lambda value: f"{value:,.0f}")
    throughput.set_yticks(range(len(names)), names)
    throughput.tick_params(axis="y", labelcolor=_INK, labelsize=10.5)
    throughput.set_xlabel("tokens/s/GPU", color=_FAINT)
    throughput.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    idle = [100 * results[name].idle_share for name in names]
    share = panel(1.45 / width + 0.5, 0.32, idle, lambda value: f"{value:.1f}%")
    share.set_yticks([])
    share.set_xlim(0, 1.2 * max(5.0, *idle))
    share.set_xlabel("idle share of GPU time (%)", color=_FAINT)
    figure.savefig(path)


def draw_scaling(
    results: Mapping[int, Mapping[str, PolicyResult]],
    path: Path,
    *,
    title: str = "",
    subtitle: str = "",
) -> None:
    """Throughput of a GPU and idle share by number of GPUs.

    Args:
        results: Number of GPUs -> results; a policy may be missing in some.
        path: File to write; its suffix is the format.
        title: Above the picture; default: what it shows.
        subtitle: Below the title.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    sizes = sorted(results)
    names = list(dict.fromkeys(name for found in results.values() for name in found))
    width, height = 9.5, 4.9
    figure = _figure(width, height, title or "Scaling with the number of GPUs", subtitle)
    panels: tuple[tuple[str, Callable[[PolicyResult], float]], ...] = (
        ("tokens/s/GPU", lambda result: result.tokens_per_s_per_rank),
        ("idle share of GPU time (%)", lambda result: 100 * result.idle_share),
    )
    for column, (label, value) in enumerate(panels):
        axes = figure.add_axes((0.09 + 0.485 * column, 0.2, 0.41, 0.58))
        for index, name in enumerate(names):
            points = [(size, value(results[size][name])) for size in sizes if name in results[size]]
            axes.plot(
                [size for size, _ in points],
                [number for _, number in points],
                color=_LINES[index % len(_LINES)],
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=6,
                linewidth=1.8 if name in LIBRARY else 1.2,
                linestyle="-" if name in LIBRARY else "--",
                label=name,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
        axes.set_xlabel("GPUs", color=_FAINT)
        axes.set_title(label, loc="left", size=10.5, color=_INK)
        _plain(axes, grid="y")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="lower center",
        ncols=min(len(names), 7),
        frameon=False,
        fontsize=9.5,
        labelcolor=_INK,
    )
    figure.savefig(path)


def draw_choices(
    epoch: EpochPlan, path: Path, *, num_blocks: int, title: str = "", subtitle: str = ""
) -> None:
    """SP size, micro-batch size and recomputed blocks over length, as an epoch runs them.

    A line is the median over samples of a quarter octave of padded lengths, the band around it
    reaches from the 10th to the 90th percentile.

    Args:
        epoch: The plans.
        path: File to write; its suffix is the format.
        num_blocks: L, the most blocks that can be recomputed.
        title: Above the picture; default: what it shows.
        subtitle: Below the title.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    width, height = 9.5, 5.9
    figure = _figure(width, height, title or "What is chosen by length", subtitle)
    bins = np.floor(_BINS_PER_OCTAVE * np.log2(epoch.seq_lens)).astype(np.int64)
    panels = (
        ("SP size p", epoch.sp_sizes, True),
        ("micro-batch size b", epoch.batch_sizes, True),
        (f"recomputed blocks r of {num_blocks}", epoch.recompute_blocks, False),
    )
    for row, (label, values, doubling) in enumerate(panels):
        axes = figure.add_axes((0.075, 0.665 - 0.265 * row, 0.9, 0.165))
        for start, group in _runs(np.unique(bins)):
            found = [_quantiles(values[bins == k], epoch.batch_sizes[bins == k]) for k in group]
            # A step ends where the next begins: the last value holds to the end of its bin.
            low, middle, high = np.array([*found, found[-1]]).T
            edges = 2.0 ** ((start + np.arange(len(group) + 1)) / _BINS_PER_OCTAVE)
            axes.fill_between(edges, low, high, step="post", color=_OURS, alpha=0.22, linewidth=0)
            axes.step(edges, middle, where="post", color=_OURS, linewidth=2.2)
        axes.set_xscale("log", base=2)
        first, last = int(bins.min()), int(bins.max()) + 1
        axes.set_xlim(2.0 ** (first / _BINS_PER_OCTAVE), 2.0 ** (last / _BINS_PER_OCTAVE))
        if doubling:
            most = max(2, int(values.max()))
            powers = [1 << i for i in range(most.bit_length())]
            axes.set_yscale("log", base=2)
            axes.set_ylim(0.8, 1.25 * most)
            axes.set_yticks(powers[:: -(-len(powers) // 5)])
            axes.yaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
        else:
            axes.set_ylim(-0.05 * num_blocks, 1.08 * num_blocks)
            axes.set_yticks([0, num_blocks // 2, num_blocks])
        axes.xaxis.set_major_formatter(_length_text)
        axes.minorticks_off()
        _plain(axes, grid="both")
        axes.set_title(label, loc="left", size=10.5, color=_INK)
    figure.axes[-1].set_xlabel(
        "length (tokens); line: median over samples, band: 10th to 90th percentile", color=_FAINT
    )
    figure.savefig(path)


def _runs(bins: IntArray) -> Iterator[tuple[int, list[int]]]:
    """Consecutive bins, each run with its first one: nothing is drawn where no sample is."""
    for group in np.split(bins, np.flatnonzero(np.diff(bins) > 1) + 1):
        yield int(group[0]), group.tolist()


def _quantiles(values: IntArray, weights: IntArray) -> list[int]:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    return [int(values[order][np.searchsorted(reached, q)]) for q in (0.1, 0.5, 0.9)]


def _length_text(value: float, _: Any) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:,.0f}"

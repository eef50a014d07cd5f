"""The picture of one iteration: which rank works on what, and who waits for whom."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.patches import Rectangle

    from lightning_dcp.planning.plan import MicroBatch, Plan

__all__ = ["draw_timeline"]

# SP size 1, 2, 4, ... from light to dark: the wider a group, the heavier its colour. Text on them
# is dark on the first three and white on the others (contrast at least 4.5).
_COLOURS = ("#cfe8f3", "#8ec9e3", "#4ba6d1", "#1d73ab", "#0f4c81", "#0a2f52", "#061b30")
_DARK_FROM = 3
_INK = "#1b2733"
_FAINT = "#5d6b79"
_IDLE = "#b9c1c9"
_MOST_RANKS = 64  # more rows than that cannot be told apart
_LEAST_WIDTH = 12.0  # pixels: no label fits into less


def draw_timeline(plan: Plan, path: str | os.PathLike[str], *, title: str | None = None) -> None:
    """Draw a plan: ranks downwards, predicted time to the right, idle time hatched.

    One box is one micro-batch on the ranks of its SP group, coloured by its SP size ``p`` and
    labelled, where there is room, with ``p``, ``b × s`` (samples and their padded length) and ``r``
    (recomputed blocks, where there are any). A group starts when all its ranks are free. Of more
    than 64 ranks the first 64 are drawn, and the line below the title says so.

    Args:
        plan: Any plan with a predicted makespan above zero.
        path: File to write; its suffix (``.png``, ``.svg``, ``.pdf``) is the format.
        title: Above the picture, in place of epoch and iteration.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: The plan predicts no time at all, or matplotlib does not know the suffix.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "draw_timeline needs matplotlib, which is not installed. Install it with: "
            "pip install 'lightning_dcp[plot]'"
        ) from error

    if plan.makespan_s <= 0:
        raise ValueError(
            f"The plan of iteration {plan.iteration} predicts {plan.makespan_s} s: there is no "
            "time to draw. Use a plan made with a measured cost model."
        )
    scale, unit = (1.0, "s") if plan.makespan_s >= 1 else (1e3, "ms")
    num_ranks = min(plan.world_size, _MOST_RANKS)
    row = min(0.5, 12.0 / num_ranks)  # inches
    height = max(row * num_ranks, 1.0)  # of few ranks: room for the axis' label
    figure = Figure(figsize=(12.0, height + 1.75), dpi=150, facecolor="white")
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]  # measures text
    axes = figure.add_axes(
        (0.06, 0.78 / (height + 1.75), 0.92, height / (height + 1.75))  # inches to shares
    )
    axes.set_xlim(0.0, plan.makespan_s * scale)
    axes.set_ylim(num_ranks - 0.5, -0.5)

    for rank, start_s, length_s in _idle_spans(plan):
        if rank >= num_ranks:
            continue
        _box(axes, rank, start_s * scale, 1, length_s * scale, facecolor="white", hatch="/////")
    for micro_batch, start_s in zip(plan.micro_batches, plan.start_s, strict=True):
        if micro_batch.first_rank >= num_ranks:
            continue
        level = micro_batch.sp_size.bit_length() - 1
        box = _box(
            axes,
            micro_batch.first_rank,
            start_s * scale,
            min(micro_batch.sp_size, num_ranks),
            micro_batch.est_time_s * scale,
            facecolor=_COLOURS[min(level, len(_COLOURS) - 1)],
        )
        _label(axes, renderer, box, micro_batch, "white" if level >= _DARK_FROM else _INK)

    axes.set_yticks(range(num_ranks))
    axes.set_ylabel("rank", color=_FAINT)
    axes.set_xlabel(f"predicted time ({unit})", color=_FAINT)
    axes.tick_params(length=0, labelcolor=_FAINT, labelsize=min(9.0, row * 60))
    for spine in axes.spines.values():
        spine.set_visible(False)

    top = 1.0 - 0.3 / (height + 1.75)
    figure.text(0.06, top, title or _default_title(plan), size=13, weight="bold", color=_INK)
    figure.text(0.06, top - 0.27 / (height + 1.75), _figures(plan), size=9.5, color=_FAINT)
    sizes = sorted({m.sp_size for m in plan.micro_batches if m.first_rank < num_ranks})
    handles = [
        Patch(
            facecolor=_COLOURS[min(p.bit_length() - 1, len(_COLOURS) - 1)],
            label=f"p = {p}",
        )
        for p in sizes
    ]
    handles.append(Patch(facecolor="white", edgecolor=_IDLE, hatch="/////", label="idle"))
    figure.legend(
        handles=handles,
        loc="upper right",
        bbox_to_anchor=(0.985, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=9.5,
        labelcolor=_INK,
        handlelength=1.3,
        columnspacing=1.2,
    )
    figure.savefig(path)


def _default_title(plan: Plan) -> str:
    return f"Epoch {plan.epoch}, iteration {plan.iteration}: one optimizer step"


def _figures(plan: Plan) -> str:
    shown = f"first {_MOST_RANKS} of {plan.world_size} ranks,  "
    return (
        f"{shown if plan.world_size > _MOST_RANKS else ''}"
        f"{plan.num_samples:,} samples in {len(plan.micro_batches):,} micro-batches,  "
        f"{plan.num_tokens:,} tokens,  padding {plan.padding_share:.1%},  "
        f"idle {plan.idle_share:.1%}        box:  p,  samples × length,  r recomputed blocks"
    )


def _idle_spans(plan: Plan) -> Iterator[tuple[int, float, float]]:
    """Rank, start and length in seconds of each gap before the makespan."""
    free = [0.0] * plan.world_size
    for micro_batch, start_s in zip(plan.micro_batches, plan.start_s, strict=True):
        for rank in micro_batch.ranks:
            if start_s > free[rank]:
                yield rank, free[rank], start_s - free[rank]
            free[rank] = start_s + micro_batch.est_time_s
    for rank, end_s in enumerate(free):
        if end_s < plan.makespan_s:
            yield rank, end_s, plan.makespan_s - end_s


def _box(
    axes: Axes,
    first_rank: int,
    start: float,
    num_ranks: int,
    length: float,
    *,
    facecolor: str,
    hatch: str | None = None,
) -> Rectangle:
    from matplotlib.patches import Rectangle

    margin = 0.04  # of a row, so that ranks stay apart
    box = Rectangle(
        (start, first_rank - 0.5 + margin),
        length,
        num_ranks - 2 * margin,
        facecolor=facecolor,
        edgecolor=_IDLE if hatch else "white",
        linewidth=0.0 if hatch else 1.2,
        hatch=hatch,
        zorder=1 if hatch else 2,
    )
    axes.add_patch(box)
    return box


def _label(
    axes: Axes, renderer: RendererAgg, box: Rectangle, micro_batch: MicroBatch, colour: str
) -> None:
    """Write the fullest text that fits into the box, in the largest type; nothing if none does."""
    space = box.get_window_extent(renderer)
    if space.width < _LEAST_WIDTH:
        return
    text = axes.text(
        box.get_x() + box.get_width() / 2,
        box.get_y() + box.get_height() / 2,
        "",
        ha="center",
        va="center",
        color=colour,
        zorder=3,
    )
    for contents in _label_texts(micro_batch):
        for size, content in product((9.0, 8.0, 7.0, 6.0), contents):
            text.set_text(content)
            text.set_fontsize(size)
            extent = text.get_window_extent(renderer)
            if extent.width <= 0.94 * space.width and extent.height <= 0.94 * space.height:
                return
    text.remove()


def _label_texts(micro_batch: MicroBatch) -> Iterator[tuple[str, ...]]:
    """Layouts of the same content, from the fullest content to the shortest."""
    size = f"p={micro_batch.sp_size}"
    shape = f"{micro_batch.batch_size} × {micro_batch.seq_len:,}"
    recompute = f"r={micro_batch.recompute_blocks}" if micro_batch.recompute_blocks else ""
    parts = [part for part in (size, shape, recompute) if part]
    stacked, line = "\n".join(parts), "   ".join(parts)
    two_lines = f"{size}   {recompute}".rstrip() + f"\n{shape}"
    yield (stacked, line, two_lines) if micro_batch.sp_size > 1 else (line, two_lines, stacked)
    yield (shape,)
    yield (f"{micro_batch.batch_size}×{micro_batch.seq_len}",)

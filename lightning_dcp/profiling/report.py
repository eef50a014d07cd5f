"""The cost profile for people: what was measured and how well the fit predicts it."""

from __future__ import annotations

from rich.table import Table

from lightning_dcp.planning.cost_model import CostModel
from lightning_dcp.profiling.cost_profile import CostProfile


def profile_table(profile: CostProfile, model: CostModel | None = None) -> Table:
    """One row for each measured point (and stack of blocks); the held-out errors stand below.

    Args:
        profile: What was measured.
        model: Its fit, if the caller has it already.
    """
    model = model or profile.cost_model()
    table = Table(
        title=f"Cost profile: {len(profile.measurements)} points in {profile.duration_s:.1f} s",
        caption=_caption(profile, model),
    )
    for name in ("b", "s", "p"):
        table.add_column(name, justify="right")
    several = len(profile.stacks) > 1
    if several:
        table.add_column("blocks")
    for name in ("forward", "backward", "rest", "saved", "input", "rest"):
        table.add_column(name, justify="right")
    points = sorted(profile.measurements, key=lambda m: (m.sp_size, m.seq_len, m.batch_size))
    last_sp_size = None
    for point in points:
        if last_sp_size not in (None, point.sp_size):
            table.add_section()
        last_sp_size = point.sp_size
        for i, block in enumerate(point.stacks):
            shape = (point.batch_size, point.seq_len, point.sp_size) if i == 0 else ("", "", "")
            table.add_row(
                *map(str, shape),
                *([profile.stacks[i].path] if several else []),
                *map(_milliseconds, (block.forward_s, block.backward_s)),
                _milliseconds(point.rest_s) if i == 0 else "",
                *map(_mebibytes, (block.saved_bytes, block.input_bytes)),
                _mebibytes(point.rest_bytes) if i == 0 else "",
            )
    return table


def held_out_text(model: CostModel) -> str:
    """The errors at points that the fit did not see, in one line."""
    errors = model.held_out
    if errors.median_time is None or errors.median_memory is None:
        return "held-out error: too few points"
    return (
        f"held-out error at {errors.num_points} points: "
        f"time median {errors.median_time:.0%}, 95th percentile {errors.p95_time or 0:.0%}; "
        f"memory median {errors.median_memory:.0%}, 95th percentile {errors.p95_memory or 0:.0%}"
    )


def _caption(profile: CostProfile, model: CostModel) -> str:
    stacks = [f"{stack.num_blocks} of {stack.path}" for stack in profile.stacks]
    lines = [
        f"forward, backward, saved and input: of one of {profile.num_blocks} blocks"
        + (f" ({', '.join(stacks)})" if len(stacks) > 1 else ""),
        f"fixed {_mebibytes(profile.fixed_bytes)} per rank",
        held_out_text(model),
    ]
    lines += [
        f"p={sp_size} is not used: {reason}"
        for sp_size, reason in sorted(profile.sp_size_exclusions.items())
    ]
    lines += [
        f"p={sp_size}: each rank runs all of {stack.path}: {reason}"
        for stack in profile.stacks
        for sp_size, reason in sorted(stack.whole_at.items())
    ]
    if profile.skipped:
        lines.append(f"{len(profile.skipped)} points did not fit the time or the memory")
    return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"

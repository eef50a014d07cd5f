"""The timeline: what it draws is what the plan says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_dcp import timeline
from lightning_dcp.planning.plan import MicroBatch, Plan


def micro_batch(first_rank: int, sp_size: int, seconds: float, sample: int) -> MicroBatch:
    return MicroBatch(
        sample_ids=(sample,),
        seq_len=1024,
        num_tokens=1000,
        first_rank=first_rank,
        sp_size=sp_size,
        recompute_blocks=sp_size - 1,
        est_time_s=seconds,
        est_bytes=1,
    )


@pytest.fixture
def plan() -> Plan:
    """Rank 3 waits for 0.5 s, and all but rank 0 at the end."""
    batches = (
        micro_batch(0, 2, 1.0, 0),
        micro_batch(2, 1, 1.5, 1),
        micro_batch(3, 1, 1.0, 2),
        micro_batch(2, 2, 0.5, 3),
        micro_batch(0, 1, 1.5, 4),
    )
    return Plan(epoch=0, iteration=3, world_size=4, micro_batches=batches)


def test_idle_spans_fill_what_is_not_busy(plan: Plan) -> None:
    spans = sorted(timeline._idle_spans(plan))
    assert spans == [(1, 1.0, 1.5), (2, 2.0, 0.5), (3, 1.0, 0.5), (3, 2.0, 0.5)]
    idle_s = sum(length for _, _, length in spans)
    assert idle_s / (plan.world_size * plan.makespan_s) == pytest.approx(plan.idle_share)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_draws(plan: Plan, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"timeline.{suffix}"
    timeline.draw_timeline(plan, path, title="A title")
    beginning = path.read_bytes()[:200]
    assert beginning.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in path.read_bytes()


def test_svg_has_a_box_for_each_micro_batch(plan: Plan, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        timeline.draw_timeline(plan, path)
    text = path.read_text()
    for sp_size, count in ((1, 3), (2, 2)):
        colour = timeline._COLOURS[sp_size.bit_length() - 1]
        # One more in the legend.
        assert text.count(f"fill: {colour}") == count + 1
    assert text.count("1 × 1,024") == 5
    assert "epoch 0, iteration 3" in text.lower()
    assert "idle 30.0%" in text


def test_many_ranks_and_crowded_boxes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    batches = tuple(micro_batch(i % 64, 1, 1e-3 * (1 + i % 7), i) for i in range(640))
    crowded = Plan(epoch=0, iteration=0, world_size=64, micro_batches=batches)
    timeline.draw_timeline(crowded, tmp_path / "timeline.png")


def test_no_time_to_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    nothing = Plan(epoch=0, iteration=0, world_size=1, micro_batches=(micro_batch(0, 1, 0.0, 0),))
    with pytest.raises(ValueError, match="no time to draw"):
        timeline.draw_timeline(nothing, tmp_path / "timeline.png")


def test_without_matplotlib_the_extra_is_named(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning_dcp\[plot\]"):
        timeline.draw_timeline(plan, tmp_path / "timeline.png")

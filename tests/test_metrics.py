"""Metrics against sums made by hand, and that ranks do not multiply them."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchmetrics import Metric

from lightning_dcp.metrics import (
    ChoiceCounts,
    IdleShare,
    MedianRatio,
    PaddingShare,
    TokensPerSecond,
    dcp_metrics,
)
from lightning_dcp.planning.plan import MicroBatch, Plan
from lightning_dcp.planning.report import IterationReport
from tests.worlds import World

# Two iterations on two ranks. The first: 2 samples at p=2, then one at p=1 on rank 0.
FIRST = Plan(
    0,
    0,
    2,
    (
        MicroBatch((0, 1), 8, 12, 0, 2, 3, 2.0, 1000),
        MicroBatch((2,), 4, 4, 0, 1, 0, 1.0, 400),
    ),
)
SECOND = Plan(0, 1, 2, (MicroBatch((3,), 10, 10, 1, 1, 0, 0.5, 700),))


def report(plan: Plan, busy_s: tuple[float, float], wall_s: float, peak: int) -> IterationReport:
    return IterationReport(plan, busy_s, wall_s, (peak, peak // 2), 1.0, 5.0)


REPORTS = [report(FIRST, (4.0, 2.0), 5.0, 2000), report(SECOND, (0.0, 1.0), 1.0, 350)]


def fed(metric: Any) -> Any:
    for one in REPORTS:
        metric.update(one)
    return metric.compute()


def test_ratios_weigh_iterations_by_what_they_are_a_share_of() -> None:
    # Idle rank-seconds: 2 of 8 and 1 of 2.
    assert fed(IdleShare()).item() == pytest.approx(3 / 10)
    assert fed(TokensPerSecond()).item() == pytest.approx(26 / 6)
    assert fed(PaddingShare()).item() == pytest.approx(4 / 30)


def test_the_whole_collection() -> None:
    values = {name: float(value) for name, value in fed(dcp_metrics()).items()}
    assert values == pytest.approx(
        {
            "dcp/idle_share": 0.3,
            "dcp/tokens_per_s": 26 / 6,
            "dcp/padding_share": 4 / 30,
            "dcp/makespan_s": 2.5,
            "dcp/predicted_makespan_s": 1.75,
            "dcp/peak_bytes": 2000,
            "dcp/predicted_peak_bytes": 1000,
            "dcp/time_ratio": statistics.median([4 / 3, 2.0]),
            "dcp/memory_ratio": statistics.median([2.0, 0.5]),
            "dcp/p=1": 2,
            "dcp/p=2": 1,
            "dcp/b=1": 2,
            "dcp/b=2": 1,
            "dcp/g=0": 1,
            "dcp/g=1": 2,
            "dcp/g=2": 1,
            "dcp/r=0": 2,
            "dcp/r=3": 1,
        }
    )


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_before_anything_was_measured() -> None:
    values = dcp_metrics().compute()
    assert values["dcp/idle_share"] == 0
    assert values["dcp/tokens_per_s"] == 0
    assert math.isnan(values["dcp/time_ratio"])
    assert not [name for name in values if "=" in name]


def test_memory_that_cannot_be_measured_has_no_ratio() -> None:
    metric = MedianRatio("memory")
    metric.update(report(FIRST, (1.0, 1.0), 1.0, 0))
    assert math.isnan(metric.compute())


def test_the_median_over_many_iterations() -> None:
    metric = MedianRatio("time")
    for i in range(301):
        metric.update(report(FIRST, (3.0 * (i + 1), 1.0), 1.0, 1))
    assert metric.compute().item() == pytest.approx(151.0)
    assert torch.isfinite(metric.ratios[:301]).all()


def test_reset_forgets() -> None:
    metrics = dcp_metrics()
    fed(metrics)
    metrics.reset()
    assert {k: v for k, v in fed(metrics).items() if "=" in k} == {
        k: v for k, v in fed(dcp_metrics()).items() if "=" in k
    }


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="'time' or 'memory', got 'speed'"):
        MedianRatio("speed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'p', 'b', 'g', 'r', got 'x'"):
        ChoiceCounts("x")  # type: ignore[arg-type]


def values_on_rank(rank: int, forced: bool) -> dict[str, float]:
    metrics = dcp_metrics()
    for one in REPORTS:
        metrics.update(one)
    if forced:
        for metric in metrics.values():
            assert isinstance(metric, Metric)
            metric.sync_on_compute = True
        return {name: float(value) for name, value in metrics.compute().items()}

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective was started")

    originals = {name: getattr(dist, name) for name in ("all_gather", "all_reduce", "barrier")}
    for name in originals:
        setattr(dist, name, refuse)
    try:
        return {name: float(value) for name, value in metrics.compute().items()}
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@pytest.fixture(scope="module")
def world() -> Any:
    with World(2) as world:
        yield world


@pytest.mark.parametrize("forced", [False, True])
def test_ranks_do_not_multiply(world: World, forced: bool) -> None:
    expected = {name: float(value) for name, value in fed(dcp_metrics()).items()}
    for values in world.run(values_on_rank, forced):
        assert values == pytest.approx(expected)

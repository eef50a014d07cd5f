"""How well plans work out, as torchmetrics fed with one `IterationReport` per iteration.

NOTE (no synchronisation): a report holds all ranks' figures and is the same on every rank, so that
each rank computes the value for the whole job by itself. No metric here starts a collective, in
`update` or in `compute`. Should something force one, states are averaged over ranks, which changes
nothing; a sum would multiply tokens and seconds by the world size.

`DCPCallback` makes and feeds these; use them by hand as in::

    metrics = dcp_metrics()
    metrics.update(trainer.strategy.last_report)
    metrics.compute()["dcp/idle_share"]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

if TYPE_CHECKING:
    from lightning_dcp.planning.report import IterationReport

Choice = Literal["p", "b", "g", "r"]


class ReportMetric(Metric):
    """Base of the metrics here: fed with reports; see NOTE (no synchronisation).

    Args:
        **kwargs: Passed to `torchmetrics.Metric`.
    """

    full_state_update = False
    is_differentiable = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"sync_on_compute": False, **kwargs})

    def _add_state(self, name: str, value: float | Tensor) -> None:
        default = torch.as_tensor(value, dtype=torch.float64)
        self.add_state(name, default=default, dist_reduce_fx="mean")


class _Ratio(ReportMetric):
    """A sum over iterations, divided by another."""

    numerator: Tensor
    denominator: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._add_state("numerator", 0.0)
        self._add_state("denominator", 0.0)

    def _add(self, numerator: float, denominator: float) -> None:
        self.numerator += numerator
        self.denominator += denominator

    @override
    def compute(self) -> Tensor:
        """The quotient, () float64; 0 before there is anything to divide by."""
        if self.denominator == 0:
            return torch.zeros_like(self.numerator)
        return self.numerator / self.denominator


class IdleShare(_Ratio):
    """Share of all rank-seconds in which a rank waited for the longest one.

    `sum(makespan - busy) / (W * makespan)`, iterations weighted by their measured makespan
    (unlike Eq. 2 and 3 of the paper, every GPU counts alike).
    """

    higher_is_better = False

    @override
    def update(self, report: IterationReport) -> None:
        """Add one iteration."""
        self._add(report.idle_share * report.makespan_s, report.makespan_s)


class TokensPerSecond(_Ratio):
    """Real tokens of all ranks per second of wall time, padding not counted."""

    higher_is_better = True

    @override
    def update(self, report: IterationReport) -> None:
        """Add one iteration."""
        self._add(report.plan.num_tokens, report.wall_s)


class PaddingShare(_Ratio):
    """Share of the tokens that were computed which is padding."""

    higher_is_better = False

    @override
    def update(self, report: IterationReport) -> None:
        """Add one iteration."""
        padded = sum(mb.padded_tokens for mb in report.plan.micro_batches)
        self._add(padded - report.plan.num_tokens, padded)


class MakespanSeconds(ReportMetric):
    """Mean seconds until the last rank has run its micro-batches, predicted and measured."""

    measured: Tensor
    predicted: Tensor
    num_iterations: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("measured", "predicted", "num_iterations"):
            self._add_state(name, 0.0)

    @override
    def update(self, report: IterationReport) -> None:
        """Add one iteration."""
        self.measured += report.makespan_s
        self.predicted += report.predicted_makespan_s
        self.num_iterations += 1

    @override
    def compute(self) -> dict[str, Tensor]:
        """`makespan_s` and `predicted_makespan_s`, each () float64, in seconds."""
        num = self.num_iterations.clamp(min=1)
        return {
            "makespan_s": self.measured / num,
            "predicted_makespan_s": self.predicted / num,
        }


class PeakBytes(ReportMetric):
    """Largest peak memory of any rank in any iteration, predicted and measured.

    Measured is 0 where memory cannot be measured.
    """

    measured: Tensor
    predicted: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("measured", "predicted"):
            self._add_state(name, 0.0)

    @override
    def update(self, report: IterationReport) -> None:
        """Add one iteration."""
        self.measured = self.measured.clamp(min=report.measured_peak_bytes)
        self.predicted = self.predicted.clamp(min=report.predicted_peak_bytes)

    @override
    def compute(self) -> dict[str, Tensor]:
        """`peak_bytes` and `predicted_peak_bytes`, each () float64, in bytes."""
        return {"peak_bytes": self.measured, "predicted_peak_bytes": self.predicted}


class MedianRatio(ReportMetric):
    """Median over iterations of measured / predicted; above 1: the prediction was too low.

    Args:
        quantity: `"time"` (makespan) or `"memory"` (largest peak).
        **kwargs: Passed to `torchmetrics.Metric`.
    """

    ratios: Tensor
    num_ratios: Tensor

    def __init__(self, quantity: Literal["time", "memory"], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if quantity not in ("time", "memory"):
            raise ValueError(f"`quantity` must be 'time' or 'memory', got {quantity!r}.")
        self.quantity = quantity
        self._add_state("ratios", torch.full((64,), torch.nan))
        self._add_state("num_ratios", 0.0)

    @override
    def update(self, report: IterationReport) -> None:
        """Add one iteration. One without a measured or predicted value is left out."""
        measured, predicted = (
            (report.makespan_s, report.predicted_makespan_s)
            if self.quantity == "time"
            else (report.measured_peak_bytes, report.predicted_peak_bytes)
        )
        if measured <= 0 or predicted <= 0:
            return
        index = int(self.num_ratios)
        if index == len(self.ratios):  # doubled when full: appending would copy it each time
            self.ratios = torch.cat([self.ratios, torch.full_like(self.ratios, torch.nan)])
        self.ratios[index] = measured / predicted
        self.num_ratios += 1

    @override
    def compute(self) -> Tensor:
        """The median, () float64; NaN before there is a measurement."""
        num = int(self.num_ratios)
        if num == 0:
            return torch.full_like(self.num_ratios, torch.nan)
        return self.ratios[:num].quantile(0.5)


class SlowestRank(ReportMetric):
    """The rank that takes longest for the same work, and how much, as found out last."""

    rank: Tensor
    factor: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("rank", "factor"):
            self._add_state(name, torch.nan)

    @override
    def update(self, report: IterationReport) -> None:
        """Add one iteration."""
        if report.slowest_rank is not None and report.slowest_rank_factor is not None:
            self.rank.fill_(report.slowest_rank)
            self.factor.fill_(report.slowest_rank_factor)

    @override
    def compute(self) -> dict[str, Tensor]:
        """`slowest_rank` and `slowest_rank_factor`, each () float64; nothing before it is known."""
        if self.rank.isnan():
            return {}
        return {"slowest_rank": self.rank.clone(), "slowest_rank_factor": self.factor.clone()}


class ChoiceCounts(ReportMetric):
    """How often each value of p, b, g or r was chosen.

    Args:
        choice: `"p"` (SP size), `"b"` (micro-batch size) and `"r"` (recomputed blocks) count
            micro-batches; `"g"` (accumulation) counts ranks, one per rank and iteration.
        **kwargs: Passed to `torchmetrics.Metric`.
    """

    counts: Tensor

    def __init__(self, choice: Choice, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if choice not in ("p", "b", "g", "r"):
            raise ValueError(f"`choice` must be one of 'p', 'b', 'g', 'r', got {choice!r}.")
        self.choice = choice
        self._add_state("counts", torch.zeros(1))

    @override
    def update(self, report: IterationReport) -> None:
        """Add one iteration."""
        for value, count in choice_counts(report, self.choice).items():
            missing = value + 1 - len(self.counts)
            if missing > 0:
                self.counts = torch.nn.functional.pad(self.counts, (0, missing))
            self.counts[value] += count

    @override
    def compute(self) -> dict[str, Tensor]:
        """Counts of the values that occurred, such as `{"p=1": 40, "p=2": 7}`."""
        return {
            f"{self.choice}={int(value)}": self.counts[value]
            for value in self.counts.nonzero().flatten()
        }


def choice_counts(report: IterationReport, choice: Choice) -> Mapping[int, int]:
    """How often each value of p, b, g or r occurs in one iteration."""
    return {
        "p": report.sp_size_counts,
        "b": report.batch_size_counts,
        "g": report.accumulation_counts,
        "r": report.recompute_counts,
    }[choice]


def dcp_metrics(prefix: str = "dcp/") -> MetricCollection:
    """All metrics, to be updated with one report per iteration.

    Args:
        prefix: Stands before every name in what `compute` returns.

    Returns:
        A collection whose `compute` gives `idle_share`, `tokens_per_s`, `padding_share`,
        `makespan_s`, `predicted_makespan_s`, `peak_bytes`, `predicted_peak_bytes`, `time_ratio`,
        `memory_ratio` (measured / predicted), `slowest_rank`, `slowest_rank_factor` and counts such
        as `p=2`, `b=16`, `g=3`, `r=0`.
    """
    metrics: dict[str, Metric] = {
        "idle_share": IdleShare(),
        "tokens_per_s": TokensPerSecond(),
        "padding_share": PaddingShare(),
        "makespan": MakespanSeconds(),
        "peak": PeakBytes(),
        "time_ratio": MedianRatio("time"),
        "memory_ratio": MedianRatio("memory"),
        "slowest_rank": SlowestRank(),
        **{f"{choice}_counts": ChoiceCounts(cast(Choice, choice)) for choice in "pbgr"},
    }
    # Compute groups would merge metrics whose states happen to be equal after the first update.
    return MetricCollection(cast(Any, metrics), prefix=prefix, compute_groups=False)

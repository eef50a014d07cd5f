"""How one iteration went: prediction beside measurement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from lightning_dcp.planning.plan import Plan
from lightning_dcp.planning.slowness import Slowness

__all__ = ["IterationReport"]


@dataclass(frozen=True)
class IterationReport:
    """One iteration, as planned and as measured.

    Attributes:
        plan: The plan that was run.
        busy_s: Measured seconds each rank spent on its micro-batches.
        wall_s: Measured seconds of the whole iteration, reduction and optimizer step included.
        peak_bytes: Measured peak bytes per rank (0 where it could not be measured).
        loss: Weighted mean loss of the iteration.
        num_targets: Loss-bearing elements of the iteration.
        slowness: How much slower than predicted buckets and ranks were lately; None before that was
            found out.
    """

    plan: Plan
    busy_s: tuple[float, ...]
    wall_s: float
    peak_bytes: tuple[int, ...]
    loss: float
    num_targets: float
    slowness: Slowness | None = field(default=None, compare=False)  # NaN where nothing is known

    def __post_init__(self) -> None:
        for name in ("busy_s", "peak_bytes"):
            if len(getattr(self, name)) != self.plan.world_size:
                raise ValueError(
                    f"{name} needs one value per rank ({self.plan.world_size}); got "
                    f"{len(getattr(self, name))}."
                )

    @property
    def makespan_s(self) -> float:
        """Measured: the longest time a rank was busy."""
        return max(self.busy_s)

    @property
    def predicted_makespan_s(self) -> float:
        """Predicted seconds of the micro-batches."""
        return self.plan.makespan_s

    @property
    def idle_share(self) -> float:
        """Measured share of rank-seconds without work: ``sum(max - busy) / (W * max)``.

        A rank that waits inside a collective of its SP group counts as busy.
        """
        longest = max(self.busy_s)
        if longest <= 0:
            return 0.0
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * longest)

    @property
    def bucket_time_ratios(self) -> Mapping[tuple[int, int], float]:
        """Measured / predicted seconds of micro-batches with lengths in ``[lo, hi)``, lately.

        Buckets of which too little was seen are left out.
        """
        if self.slowness is None:
            return {}
        edges = self.slowness.bucket_edges
        pairs = zip(pairwise(edges), self.slowness.buckets, strict=True)
        return {bounds: ratio for bounds, ratio in pairs if not math.isnan(ratio)}

    @property
    def slowest_rank(self) -> int | None:
        """The rank that lately took longest for the same work; None where that is not known."""
        return None if self.slowness is None else self.slowness.slowest_rank

    @property
    def slowest_rank_factor(self) -> float | None:
        """How many times as long as the typical rank it took."""
        return None if self.slowness is None else self.slowness.slowest_rank_factor

    @property
    def predicted_idle_share(self) -> float:
        """Idle share of the plan."""
        return self.plan.idle_share

    @property
    def tokens_per_s(self) -> float:
        """Real tokens of all ranks per second of wall time."""
        return self.plan.num_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def padding_share(self) -> float:
        """Share of the padded tokens that is padding."""
        return self.plan.padding_share

    @property
    def measured_peak_bytes(self) -> int:
        """Largest measured peak of all ranks."""
        return max(self.peak_bytes)

    @property
    def predicted_peak_bytes(self) -> int:
        """Largest predicted peak of all micro-batches."""
        return max(m.est_bytes for m in self.plan.micro_batches)

    @property
    def sp_size_counts(self) -> Mapping[int, int]:
        """SP size -> number of micro-batches."""
        return _counts(m.sp_size for m in self.plan.micro_batches)

    @property
    def batch_size_counts(self) -> Mapping[int, int]:
        """Micro-batch size -> number of micro-batches."""
        return _counts(m.batch_size for m in self.plan.micro_batches)

    @property
    def recompute_counts(self) -> Mapping[int, int]:
        """Recomputed blocks -> number of micro-batches."""
        return _counts(m.recompute_blocks for m in self.plan.micro_batches)

    @property
    def accumulation_counts(self) -> Mapping[int, int]:
        """Micro-batches of a rank -> number of such ranks."""
        return _counts(self.plan.accumulation)


def _counts(values: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(values).items()))

"""What ranks tell each other at the end of an iteration, in one exchange with the logged values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AllFigures", "RankFigures"]

_NAMES = (
    "targets",
    "loss_sum",
    "busy_s",
    "peak_bytes",
    "wall_s",
    "overhead_s",
    "has_written",
    "lacks_gradients",
    "ran_out_of_memory",
)


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """Of one rank.

    Attributes:
        targets: sum over its micro-batches of n/p, elements that bear loss.
        loss_sum: () sum over its micro-batches of loss * n/p.
        busy_s: seconds it spent on them.
        peak_bytes: what they held at most.
        wall_s: seconds since the iteration began.
        overhead_s: seconds between the last exchange and the iteration's beginning.
        has_written: whether `training_step` wrote to parameters.
        lacks_gradients: whether some trainable parameter has no gradient.
        ran_out_of_memory: whether a micro-batch did, so that the iteration is lost.
        counts: what Lightning's throughput monitor counts.
        shared_losses: () each, of the micro-batches that it shared with others, in plan order.
    """

    targets: float
    loss_sum: Tensor | float
    busy_s: float
    peak_bytes: int
    wall_s: float
    overhead_s: float
    has_written: bool
    lacks_gradients: bool
    ran_out_of_memory: bool
    counts: Sequence[float]
    shared_losses: Sequence[Tensor]

    def packed(self, num_shared: int, device: torch.device) -> Tensor:
        """(K,) float64 with room for so many shared losses."""
        first = len(_NAMES) + len(self.counts)
        row = torch.zeros(first + num_shared, dtype=torch.float64, device=device)
        for place, name in enumerate(_NAMES):
            row[place] = getattr(self, name)
        row[len(_NAMES) : first] = row.new_tensor(self.counts)
        if self.shared_losses:
            row[first : first + len(self.shared_losses)] = torch.stack(list(self.shared_losses))
        return row


@dataclass(frozen=True)
class AllFigures:
    """Of all ranks.

    Attributes:
        rows: (W, K) as ``RankFigures.packed`` made them.
        num_counts: how many counts they hold.
    """

    rows: Tensor
    num_counts: int

    def of(self, name: str) -> Tensor:
        """(W,) one figure of each rank."""
        return self.rows[:, _NAMES.index(name)]

    @property
    def counts(self) -> list[float]:
        """Sums over ranks."""
        first = len(_NAMES)
        sums: list[float] = self.rows[:, first : first + self.num_counts].sum(0).tolist()
        return sums

    @property
    def shared_losses(self) -> Tensor:
        """(W, num_shared)."""
        return self.rows[:, len(_NAMES) + self.num_counts :]

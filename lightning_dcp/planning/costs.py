"""What planning asks of a cost model, whether it was measured or is an analytic law."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Costs"]


class Costs(Protocol):
    """Seconds and bytes of a micro-batch of b samples padded to s tokens on p ranks.

    Predictions take numbers or arrays that broadcast and return arrays (numpy scalars for numbers).
    Seconds and bytes must not fall when b or s grow, and seconds grow, bytes fall with r.

    :class:`~lightning_dcp.planning.cost_model.CostModel` is fitted to measured points;
    :class:`~lightning_dcp.simulation.roofline.RooflineCosts` is a law of model and cluster.
    """

    @property
    def num_blocks(self) -> int:
        """L, the blocks that may be recomputed."""

    @property
    def fixed_bytes(self) -> int:
        """M_C: what is there whatever the micro-batch."""

    @property
    def step_overhead_s(self) -> float:
        """Seconds per iteration outside micro-batches: reduction and optimizer."""

    @property
    def sp_sizes(self) -> tuple[int, ...]:
        """SP sizes that can be predicted, increasing."""

    @property
    def memory_error(self) -> float:
        """Relative error to keep a margin for: 95th percentile of what a micro-batch adds."""

    def time_s(self, b: Any, s: Any, p: Any, r: Any = 0) -> Any:
        """Seconds."""

    def memory_bytes(self, b: Any, s: Any, p: Any, r: Any = 0) -> Any:
        """Peak bytes on each rank of the group, int64."""

    def min_recompute(self, b: Any, s: Any, p: Any, limit_bytes: int) -> Any:
        """Smallest r whose memory is within the limit, -1 where none is (int64)."""

    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything a prediction depends on."""

"""Where in its run a rank is, as others are told when something goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_dcp.planning.plan import Plan

__all__ = ["BETWEEN_ITERATIONS", "SET_UP", "Place"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a rank is doing. Made often, put into words seldom.

    Attributes:
        what: In words, such as "forward pass".
        plan: Of the running iteration; None outside of one.
        index: Of the running micro-batch in the plan; None outside of one.
    """

    what: str
    plan: Plan | None = None
    index: int | None = None

    @property
    def in_iteration(self) -> bool:
        """Whether other ranks are waited for sooner or later."""
        return self.plan is not None

    @property
    def sp_size(self) -> int:
        """Ranks that run the micro-batch together; 1 outside of one."""
        if self.plan is None or self.index is None:
            return 1
        return self.plan.micro_batches[self.index].sp_size

    def __str__(self) -> str:
        if self.plan is None:
            return self.what
        where = f"epoch {self.plan.epoch}, iteration {self.plan.iteration}"
        if self.index is None:
            return f"{where}, {self.what}"
        micro_batch = self.plan.micro_batches[self.index]
        return (
            f"{where}, {self.what} of micro-batch {self.index} (p={micro_batch.sp_size},"
            f" b={micro_batch.batch_size}, r={micro_batch.recompute_blocks}, sequence length"
            f" {micro_batch.seq_len})"
        )


SET_UP = Place(what="set-up")
BETWEEN_ITERATIONS = Place(what="between iterations (data loading, callbacks)")

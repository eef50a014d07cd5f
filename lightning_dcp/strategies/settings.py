"""What a user may set on a DCP strategy, in one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import get_args

from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.iteration import LossAverage


@dataclasses.dataclass(frozen=True, kw_only=True)
class DCPSettings:
    """What a user may set on a DCP strategy; see `DCPStrategy` for the meaning."""

    planning: PlanningOptions
    profiling: ProfilingOptions
    blocks: str | None
    sequence_dims: Mapping[str, int | None] | None
    loss_average: LossAverage
    ignore_index: int

    def __post_init__(self) -> None:
        if self.loss_average not in get_args(LossAverage):
            raise ValueError(
                f"loss_average={self.loss_average!r}: say whether the loss that `training_step`"
                " returns is a mean over 'tokens' or over 'samples', or leave it 'auto'."
            )

    @classmethod
    def make(
        cls,
        *,
        policy: str | None,
        planning: PlanningOptions,
        profiling: ProfilingOptions,
        blocks: str | None,
        sequence_dims: Mapping[str, int | None] | None,
        loss_average: LossAverage,
        ignore_index: int,
    ) -> DCPSettings:
        """`policy` is a short way to set `planning.policy`."""
        if policy is not None:
            planning = dataclasses.replace(planning, policy=policy)
        return cls(
            planning=planning,
            profiling=profiling,
            blocks=blocks,
            sequence_dims=sequence_dims,
            loss_average=loss_average,
            ignore_index=ignore_index,
        )

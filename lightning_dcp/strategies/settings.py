"""What a user may set on a DCP strategy, in one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.iteration import LossAverage

Shard = Literal["blocks", "inputs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DCPSettings:
    """What a user may set on a DCP strategy; see `DCPStrategy` for the meaning."""

    planning: PlanningOptions
    profiling: ProfilingOptions
    blocks: str | Sequence[str] | None
    sequence_dims: Mapping[str, int | None] | None
    loss_average: LossAverage
    ignore_index: int
    self_check: bool = True
    shard: Shard = "blocks"
    input_dims: Mapping[str | int, int | None] | None = None
    tiled_loss: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.shard not in get_args(Shard):
            raise ValueError(
                f"shard={self.shard!r}: 'blocks' shares the tokens among ranks inside the repeated"
                " blocks, 'inputs' from the batch to the loss."
            )
        if self.tiled_loss not in (True, False, "auto"):
            raise ValueError(f"tiled_loss={self.tiled_loss!r}: True, False or 'auto' is possible.")
        if self.shard == "inputs" and self.loss_average == "samples":
            raise ValueError(
                "shard='inputs' together with loss_average='samples': a rank has a slice of each"
                " sample, so it cannot average over samples. Use a mean over tokens, or"
                " shard='blocks'."
            )
        if self.shard == "inputs" and self.planning.packing:
            raise ValueError(
                "shard='inputs' together with packing=True: slices of a packed sequence are not"
                " supported. Leave one of the two out."
            )
        if self.input_dims and self.shard != "inputs":
            raise ValueError("input_dims is for shard='inputs': with 'blocks' inputs stay whole.")
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
        blocks: str | Sequence[str] | None,
        sequence_dims: Mapping[str, int | None] | None,
        loss_average: LossAverage,
        ignore_index: int,
        self_check: bool,
        packing: bool = False,
        shard: Shard = "blocks",
        input_dims: Mapping[str | int, int | None] | None = None,
        tiled_loss: bool | Literal["auto"] = "auto",
    ) -> DCPSettings:
        """`policy` and `packing` are short ways to set those of `planning`."""
        if policy is not None:
            planning = dataclasses.replace(planning, policy=policy)
        if packing:
            planning = dataclasses.replace(planning, packing=True)
        return cls(
            planning=planning,
            profiling=profiling,
            blocks=blocks,
            sequence_dims=sequence_dims,
            loss_average=loss_average,
            ignore_index=ignore_index,
            self_check=self_check,
            shard=shard,
            input_dims=input_dims,
            tiled_loss=tiled_loss,
        )

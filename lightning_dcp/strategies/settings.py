"""What a user may set on a DCP strategy, in one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.iteration import LossAverage
from lightning_dcp.strategies.reliability import ReliabilityOptions

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
    reliability: ReliabilityOptions = ReliabilityOptions()

    def __post_init__(self) -> None:
        _check_types(vars(self))
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
        reliability: ReliabilityOptions = ReliabilityOptions(),
    ) -> DCPSettings:
        """`policy` and `packing` are short ways to set those of `planning`."""
        _check_kind("packing", packing, bool)
        _check_kind("planning", planning, PlanningOptions)
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
            reliability=reliability,
        )


def _check_types(values: Mapping[str, object]) -> None:
    """Wrong values are refused here, where the script that gave them is in the traceback."""
    _check_kind("profiling", values["profiling"], ProfilingOptions)
    _check_kind("reliability", values["reliability"], ReliabilityOptions)
    _check_kind("self_check", values["self_check"], bool)
    _check_kind("ignore_index", values["ignore_index"], int)
    ignored = values["ignore_index"]
    if not (isinstance(ignored, int) and -(2**63) <= ignored < 2**63):
        raise ValueError(f"ignore_index={ignored!r}: labels are 64-bit integers.")
    blocks = values["blocks"]
    paths = blocks if isinstance(blocks, list | tuple) else [blocks]
    if blocks is not None and not (paths and all(isinstance(path, str) for path in paths)):
        raise TypeError(
            "blocks must be the dotted path of a ModuleList or Sequential, such as"
            f" 'model.layers', or a list of them; got {blocks!r}."
        )
    for name in ("sequence_dims", "input_dims"):
        dims = values[name]
        if dims is not None and not (
            isinstance(dims, Mapping) and all(d is None or type(d) is int for d in dims.values())
        ):
            raise TypeError(
                f"{name} must be a dict of dimensions, None for what stays whole, such as"
                f" {{'x': 1, 'mask': None}}; got {dims!r}."
            )


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        wanted = "True or False" if kind is bool else f"of type {kind.__name__}"
        raise TypeError(f"{name} must be {wanted}; got {value!r}.")

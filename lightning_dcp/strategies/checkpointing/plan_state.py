"""What a checkpoint says of the plans it was trained by, in plain types.

Everything is `str`, a number or a `uint8` tensor, so that it can be read with `weights_only=True`;
a million samples take 125 kB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from lightning_dcp.planning.drift import Corrections
from lightning_dcp.planning.rest import BoolArray, pack_samples, unpack_samples

__all__ = ["KEY", "PlanState"]

#: Under which a checkpoint holds everything of ours.
KEY = "lightning_dcp"

_VERSION = 2
_NUMBERS = ("epoch", "iteration", "num_iterations", "num_samples", "begun_at")
#: What files of version 1 do not have.
_SINCE_2: Mapping[str, Any] = {"num_planned": None, "corrections": None}
_BITS = ("consumed", "consumed_before")


@dataclass(frozen=True, kw_only=True)
class PlanState:
    """Where a run was saved in an epoch of plans.

    Attributes:
        inputs: What the plans were made from (`EpochPlanner.inputs`).
        epoch: The epoch.
        iteration: How many iterations of it were run.
        num_iterations: How many it has, `limit_train_batches` considered.
        consumed: (n,) which samples of the data set they trained on.
        begun_at: The iteration from which the epoch's plans are those of what was left of it then;
            0 where the epoch was planned as a whole.
        consumed_before: (n,) which samples had been trained on before `begun_at`.
        num_planned: How many iterations the epoch's plans have, `limit_train_batches` not
            considered; None in files of version 1, whose plans have the number that the planner
            gives by default.
        corrections: With which the planner was made (`EpochPlanner.corrected`); None where its
            costs are the profile's.
    """

    inputs: Mapping[str, str]
    epoch: int
    iteration: int
    num_iterations: int
    consumed: BoolArray
    begun_at: int
    consumed_before: BoolArray
    num_planned: int | None = None
    corrections: Corrections | None = None

    @property
    def unfinished(self) -> bool:
        """Whether iterations of the epoch are left."""
        return self.iteration < self.num_iterations

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "version": _VERSION,
            "plan_inputs": dict(self.inputs),
            "epoch": self.epoch,
            "iteration": self.iteration,
            "num_iterations": self.num_iterations,
            "num_samples": int(self.consumed.size),
            "begun_at": self.begun_at,
            "num_planned": self.num_planned,
            "corrections": None if self.corrections is None else self.corrections.to_plain(),
            "consumed": torch.from_numpy(pack_samples(self.consumed)),
            "consumed_before": torch.from_numpy(pack_samples(self.consumed_before)),
        }

    @classmethod
    def from_plain(cls, values: object) -> Self:
        """Inverse of `to_plain`.

        Raises:
            ValueError: For anything else, naming what is missing, unknown or of a wrong type.
        """
        if not isinstance(values, Mapping):
            raise _damaged(f"it is of type {type(values).__name__}")
        version = values.get("version")
        if version not in (1, _VERSION):
            raise _damaged(
                f"its version is {version!r}, and this release reads versions 1 to {_VERSION}"
            )
        values = {**_SINCE_2, **values}
        known = {"version", "plan_inputs", *_NUMBERS, *_BITS, *_SINCE_2}
        missing, unknown = sorted(known - values.keys()), sorted(values.keys() - known, key=str)
        if missing or unknown:
            raise _damaged(f"missing: {missing}, unknown: {unknown}")
        inputs = values["plan_inputs"]
        if not isinstance(inputs, Mapping) or not all(
            isinstance(text, str) for pair in inputs.items() for text in pair
        ):
            raise _damaged("`plan_inputs` does not map texts to texts")
        for name in _NUMBERS:
            if type(values[name]) is not int or values[name] < 0:
                raise _damaged(f"`{name}` is {values[name]!r}")
        if values["begun_at"] > values["iteration"]:
            raise _damaged("`begun_at` is behind `iteration`")
        planned = values["num_planned"]
        if planned is not None and (type(planned) is not int or planned < values["begun_at"]):
            raise _damaged(f"`num_planned` is {planned!r}")
        corrections = values["corrections"]
        if corrections is not None:
            try:
                corrections = Corrections.from_plain(corrections)
            except (KeyError, TypeError, ValueError) as error:
                raise _damaged(f"`corrections`: {error!r}") from error
        flags: dict[str, BoolArray] = {}
        for name in _BITS:
            bits = values[name]
            if not isinstance(bits, Tensor) or bits.dtype != torch.uint8:
                raise _damaged(f"`{name}` is no tensor of bytes")
            try:
                flags[name] = unpack_samples(bits.cpu().numpy(), values["num_samples"])
            except ValueError as error:
                raise _damaged(f"`{name}`: {error}") from error
        if np.any(flags["consumed_before"] & ~flags["consumed"]):
            raise _damaged("`consumed_before` has samples that `consumed` has not")
        return cls(
            inputs=dict(inputs),
            epoch=values["epoch"],
            iteration=values["iteration"],
            num_iterations=values["num_iterations"],
            consumed=flags["consumed"],
            begun_at=values["begun_at"],
            consumed_before=flags["consumed_before"],
            num_planned=planned,
            corrections=corrections,
        )


def _damaged(why: str) -> ValueError:
    return ValueError(
        f"The checkpoint's entry {KEY!r} was not written by this release of lightning_dcp, or is"
        f" damaged: {why}. Without that entry the checkpoint loads as one of strategy='ddp'"
        f" does: `del checkpoint[{KEY!r}]`."
    )

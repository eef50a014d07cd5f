"""What a checkpoint says of the plans it was trained by, in plain types.

Everything is `str`, `int` or a `uint8` tensor, so that it can be read with `weights_only=True`; a
million samples take 125 kB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from lightning_dcp.planning.rest import BoolArray, pack_samples, unpack_samples

__all__ = ["KEY", "PlanState"]

#: Under which a checkpoint holds everything of ours.
KEY = "lightning_dcp"

_VERSION = 1
_NUMBERS = ("epoch", "iteration", "num_iterations", "num_samples", "begun_at")
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
    """

    inputs: Mapping[str, str]
    epoch: int
    iteration: int
    num_iterations: int
    consumed: BoolArray
    begun_at: int
    consumed_before: BoolArray

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
        if values.get("version") != _VERSION:
            raise _damaged(
                f"its version is {values.get('version')!r}, and this release reads version"
                f" {_VERSION}"
            )
        known = {"version", "plan_inputs", *_NUMBERS, *_BITS}
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
        )


def _damaged(why: str) -> ValueError:
    return ValueError(
        f"The checkpoint's entry {KEY!r} was not written by this release of lightning_dcp, or is"
        f" damaged: {why}. Without that entry the checkpoint loads as one of strategy='ddp'"
        f" does: `del checkpoint[{KEY!r}]`."
    )

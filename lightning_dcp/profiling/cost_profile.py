"""The cost profile: what was measured, as plain numbers.

It holds no torch object, so that it can be cached, sent to other ranks and compared. The step from
points to predictions is :func:`lightning_dcp.planning.cost_model.fit_cost_model`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_dcp.planning.cost_model import CostModel, Measurement, fit_cost_model


@dataclass(frozen=True, kw_only=True)
class SkippedTrial:
    """A point of the grid that was not measured, and why.

    Attributes:
        batch_size: Samples per micro-batch.
        seq_len: Length that was asked for, in tokens.
        sp_size: SP size.
        reason: Why: memory, time, or a failure.
    """

    batch_size: int
    seq_len: int
    sp_size: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class CostProfile:
    """Measured seconds and bytes of one model on one machine, identical on all ranks.

    Attributes:
        measurements: Measured points; several may share ``(batch_size, seq_len, sp_size)``.
        num_blocks: Number of repeated blocks ``L`` of the whole model.
        fixed_bytes: ``M_C`` of the paper's Eq. 6, per rank: parameters, gradients, optimizer
            shard and buffers.
        step_overhead_s: Seconds per iteration that no micro-batch accounts for.
        signature: JSON of the learned block signature (which argument is split along which
            dimension), or ``None`` where nothing was split.
        attention_heads: Pairs (query heads, key and value heads) seen inside the blocks.
        sp_size_exclusions: SP sizes that must not be used, each with a reason for the user.
        fingerprint: Of everything the numbers depend on; see :mod:`.fingerprint`.
        skipped: Trials that were left out, each with its reason.
        duration_s: Seconds that profiling took.
    """

    measurements: tuple[Measurement, ...]
    num_blocks: int
    fixed_bytes: int
    step_overhead_s: float = 0.0
    signature: str | None = None
    attention_heads: tuple[tuple[int, int], ...] = ()
    sp_size_exclusions: Mapping[int, str] = field(default_factory=dict)
    fingerprint: str = ""
    skipped: tuple[SkippedTrial, ...] = ()
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.measurements:
            raise ValueError("A cost profile needs at least one measured point.")
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks={self.num_blocks}: a model has at least one block.")
        if self.fixed_bytes < 0:
            raise ValueError(f"fixed_bytes={self.fixed_bytes}: must not be negative.")
        excluded_but_measured = self.sp_size_exclusions.keys() & {
            measurement.sp_size for measurement in self.measurements
        }
        if excluded_but_measured:
            raise ValueError(
                f"SP sizes {sorted(excluded_but_measured)} are excluded and measured at once."
            )

    def cost_model(self) -> CostModel:
        """Fit the cost model to the measured points, with its held-out error."""
        return fit_cost_model(
            self.measurements,
            num_blocks=self.num_blocks,
            fixed_bytes=self.fixed_bytes,
            step_overhead_s=self.step_overhead_s,
        )

    def to_json(self) -> str:
        """Canonical JSON text: equal profiles give equal texts."""
        content = dataclasses.asdict(self)
        content["sp_size_exclusions"] = {
            str(sp_size): reason for sp_size, reason in sorted(self.sp_size_exclusions.items())
        }
        return json.dumps(content, sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> CostProfile:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: If the text is no JSON, lacks a field, has an unknown one or holds a value
                that no profile can have.
        """
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"A cost profile is a JSON object, not {type(content).__name__}.")
        expected = {item.name for item in dataclasses.fields(cls)}
        if content.keys() != expected:
            raise ValueError(
                "The fields of the cost profile differ from those known here: "
                f"{sorted(content.keys() ^ expected)}."
            )
        try:
            return cls(**_typed(content))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"This is no cost profile: {error}") from error


def _typed(content: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists and string keys as the types of the fields."""
    return content | {
        "measurements": tuple(Measurement(**entry) for entry in content["measurements"]),
        "attention_heads": tuple((int(q), int(kv)) for q, kv in content["attention_heads"]),
        "sp_size_exclusions": {
            int(sp_size): str(reason) for sp_size, reason in content["sp_size_exclusions"].items()
        },
        "skipped": tuple(SkippedTrial(**entry) for entry in content["skipped"]),
    }

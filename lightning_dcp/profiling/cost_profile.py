"""The cost profile: what was measured, as plain numbers.

It holds no torch object, so that it can be cached, sent to other ranks and compared. The step from
points to predictions is :func:`lightning_dcp.planning.cost_model.fit_cost_model`.
"""

from __future__ import annotations

import dataclasses
import json
import math
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
class ProfiledStack:
    """What is known of one of the model's stacks of blocks.

    Attributes:
        path: Dotted name of the container of its blocks.
        num_blocks: How many blocks it has.
        signature: JSON of its block signature, or ``None`` where nothing of it is split.
        whole_at: SP size to the reason why each rank runs the stack whole there, although its
            signature would let it be split.
    """

    path: str
    num_blocks: int
    signature: str | None = None
    whole_at: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CostProfile:
    """Measured seconds and bytes of one model on one machine, identical on all ranks.

    Attributes:
        measurements: Measured points; several may share ``(batch_size, seq_len, sp_size)``.
        num_blocks: Number of repeated blocks ``L`` of the whole model, of all its stacks.
        fixed_bytes: ``M_C`` of the paper's Eq. 6, per rank: parameters, gradients, optimizer
            shard and buffers.
        step_overhead_s: Seconds per iteration that no micro-batch accounts for.
        signature: JSON of the main stack's block signature (which argument is split along which
            dimension), or ``None`` where nothing was split.
        attention_heads: Pairs (query heads, key and value heads) seen inside the blocks.
        sp_size_exclusions: SP sizes that must not be used, each with a reason for the user.
        fingerprint: Of everything the numbers depend on; see :mod:`.fingerprint`.
        skipped: Trials that were left out, each with its reason.
        duration_s: Seconds that profiling took.
        stacks: Each stack of blocks, the main one first, in the order in which measurements have
            them. May be left out where there is only one.
        recompute_order: Stacks in the order in which their blocks are recomputed as r grows.
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
    stacks: tuple[ProfiledStack, ...] = ()
    recompute_order: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not self.measurements:
            raise ValueError("A cost profile needs at least one measured point.")
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks={self.num_blocks}: a model has at least one block.")
        if self.stacks and sum(stack.num_blocks for stack in self.stacks) != self.num_blocks:
            raise ValueError(f"num_blocks={self.num_blocks} is not the sum over all stacks.")
        if self.fixed_bytes < 0:
            raise ValueError(f"fixed_bytes={self.fixed_bytes}: must not be negative.")
        for name in ("step_overhead_s", "duration_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{name}={seconds}: must be finite and not negative.")
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
            num_blocks=[stack.num_blocks for stack in self.stacks] or self.num_blocks,
            fixed_bytes=self.fixed_bytes,
            step_overhead_s=self.step_overhead_s,
            order=self.recompute_order,
        )

    def to_json(self) -> str:
        """Canonical JSON text: equal profiles give equal texts."""
        content = dataclasses.asdict(self)
        content["measurements"] = [measurement.to_dict() for measurement in self.measurements]
        content["sp_size_exclusions"] = _with_text_keys(self.sp_size_exclusions)
        for stack in content["stacks"]:
            stack["whole_at"] = _with_text_keys(stack["whole_at"])
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
            _check_types(content)
            return cls(**_typed(content))
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"This is no cost profile: {error}") from error


def _check_types(content: Mapping[str, Any]) -> None:
    """JSON that somebody has written has any type anywhere, and Python takes much of it."""
    whole = [content["num_blocks"], content["fixed_bytes"], *content["recompute_order"]]
    texts = [content["fingerprint"], content["signature"] or ""]
    for entry in (*content["measurements"], *content["skipped"]):
        whole += [entry["batch_size"], entry["seq_len"], entry["sp_size"]]
    for stack in content["stacks"]:
        whole.append(stack["num_blocks"])
        texts += [stack["path"], stack["signature"] or ""]
    wrong = [v for v in whole if type(v) is not int] + [v for v in texts if type(v) is not str]
    if wrong:
        raise TypeError(f"{wrong[0]!r} is of type {type(wrong[0]).__name__}")
    if sorted(content["recompute_order"]) != list(range(max(1, len(content["stacks"])))):
        raise TypeError(f"recompute_order={content['recompute_order']} does not name each stack")


def _with_text_keys(reasons: Mapping[int, str]) -> dict[str, str]:
    return {str(sp_size): reason for sp_size, reason in sorted(reasons.items())}


def _reasons(content: Mapping[str, str]) -> dict[int, str]:
    return {int(sp_size): str(reason) for sp_size, reason in content.items()}


def _typed(content: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists and string keys as the types of the fields."""
    return content | {
        "measurements": tuple(Measurement.from_dict(m) for m in content["measurements"]),
        "attention_heads": tuple((int(q), int(kv)) for q, kv in content["attention_heads"]),
        "sp_size_exclusions": _reasons(content["sp_size_exclusions"]),
        "skipped": tuple(SkippedTrial(**entry) for entry in content["skipped"]),
        "stacks": tuple(
            ProfiledStack(**(entry | {"whole_at": _reasons(entry["whole_at"])}))
            for entry in content["stacks"]
        ),
        "recompute_order": tuple(int(i) for i in content["recompute_order"]),
    }

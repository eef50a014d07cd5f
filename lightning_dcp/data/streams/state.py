"""What a checkpoint says of a stream, in plain types, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dcp.data.streams.buffer import SampleIds
from lightning_dcp.data.streams.passed import Passed
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.plan import Plan

__all__ = ["StreamState"]

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """Where a run was saved in an epoch of a stream.

    Attributes:
        epoch: The epoch.
        iteration: How many iterations of it were run.
        unfinished: Whether more are left.
        world_size, num_workers, chunk: What the order of samples depends on.
        how: Who sharded the stream (`sharding.Shard.how`).
        read, finished: (W, workers) how far each had read.
        ids, lengths: (n,) samples that were read and not trained on.
        plans: Of the iterations that follow, as far as they were planned.
        passed: What was trained on before, by runs of another number of ranks.
        reference: Lengths that the planner was made of.
        tokens_per_step: Tokens that a step aims at.
        snapshots: (rank, worker, index of the next sample, state of the data set) of each.
        corrections: With which the planner's costs were made; None where they are the profile's.
        inputs: What the planner that made `plans` was made of (`EpochPlanner.inputs`).
    """

    epoch: int
    iteration: int
    unfinished: bool
    world_size: int
    num_workers: int
    chunk: int
    how: str
    read: IntArray
    finished: IntArray
    ids: IntArray
    lengths: IntArray
    plans: Sequence[Plan]
    passed: Sequence[Passed]
    reference: IntArray
    tokens_per_step: int
    inputs: Mapping[str, str]
    snapshots: Sequence[tuple[int, int, int, Any]] = ()
    corrections: Mapping[str, Any] | None = None

    def as_passed(self, rank: int | None = None) -> Passed:
        """What was trained on, for a reader.

        Args:
            rank: Only of this rank's part, where data sets shard themselves; None where samples
                are dealt out by index.
        """
        waiting = []
        names = SampleIds(self.world_size, self.num_workers)
        for sample_id in self.ids.tolist():
            source, worker, place = names.where(sample_id)
            if rank is None or source == rank:
                waiting.append((0 if rank is not None else source, worker, place))
        rows = slice(None) if rank is None else slice(rank, rank + 1)
        return Passed(
            world_size=self.world_size if rank is None else 1,
            read=self.read[rows].tolist(),
            finished=self.finished[rows].astype(bool).tolist(),
            waiting=frozenset(waiting),
        )

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        values: dict[str, Any] = {"version": _VERSION}
        for name, value in vars(self).items():
            values[name] = torch.tensor(value) if isinstance(value, np.ndarray) else value
        values["plans"] = [plan.to_json() for plan in self.plans]
        values["passed"] = [
            {**vars(p), "waiting": [list(key) for key in sorted(p.waiting)]} for p in self.passed
        ]
        values["snapshots"] = [list(entry) for entry in self.snapshots]
        return values

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> StreamState:
        """Inverse of `to_plain`.

        Raises:
            ValueError: Of another release, or damaged.
        """
        try:
            found = dict(values)
            if found.pop("version") != _VERSION:
                raise ValueError("it is of another version")
            for name, value in found.items():
                if isinstance(value, Tensor):
                    found[name] = value.numpy()
            found["plans"] = tuple(map(Plan.from_json, found["plans"]))
            found["passed"] = tuple(
                Passed(**{**p, "waiting": frozenset(map(tuple, p["waiting"]))})
                for p in found["passed"]
            )
            found["snapshots"] = tuple(tuple(entry) for entry in found["snapshots"])
            return cls(**found)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ValueError(
                "The checkpoint's entry of the stream was not written by this release of"
                f" lightning_dcp, or is damaged: {error}."
            ) from error

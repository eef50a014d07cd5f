"""What of an epoch was read before, and where reading begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Passed", "Start"]


@dataclass(frozen=True, kw_only=True)
class Passed:
    """What was read of an epoch before, by ranks that dealt it out by index.

    Attributes:
        world_size: W, number of ranks; 1 for a part that a data set has made itself.
        read: (W, workers) how many samples of its own each had read.
        finished: (W, workers) whether these were all.
        waiting: (rank, worker, place) of those that were read, but not trained on.
    """

    world_size: int
    read: Sequence[Sequence[int]]
    finished: Sequence[Sequence[bool]]
    waiting: frozenset[tuple[int, int, int]]

    def has(self, worker: int, index: int) -> bool:
        """Whether a sample of a worker was trained on; `index` counts all that it gives."""
        place, rank = divmod(index, self.world_size)
        return place < self.read[rank][worker] and (rank, worker, place) not in self.waiting

    def first_missing(self, worker: int) -> int | None:
        """No sample of a worker before this index is missing; None: none is missing at all."""
        left = [place * self.world_size + r for r, w, place in self.waiting if w == worker]
        ends = [
            read[worker] * self.world_size + r
            for r, (read, finished) in enumerate(zip(self.read, self.finished, strict=True))
            if not finished[worker]
        ]
        return min([*left, *ends], default=None)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where reading begins, other than at the start of the epoch.

    Attributes:
        passed: What is passed over: what any of them has.
        snapshots: Worker -> (index of the next sample, state of the data set), in rising order.
    """

    passed: Sequence[Passed]
    snapshots: Mapping[int, Sequence[tuple[int, Any]]] = field(default_factory=dict)

    def first_index(self, num_workers: int) -> int:
        """No sample of any worker before this index is missing."""
        found = []
        for worker in range(num_workers):
            missing = [passed.first_missing(worker) for passed in self.passed]
            known = [index for index in missing if index is not None]
            if len(known) == len(missing):
                found.append(max(known, default=0))
        return min(found, default=0)

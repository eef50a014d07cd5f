"""The micro-batches of one iteration while they are being decided."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lightning_dcp.planning.lengths import IntArray

__all__ = ["MicroBatches"]


@dataclass(eq=False)
class MicroBatches:
    """Micro-batches of one iteration in global order, in columns.

    ``samples`` holds places in the arrays that were scheduled, one micro-batch after the other.
    """

    samples: list[IntArray] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    sp_size: list[int] = field(default_factory=list)
    first_rank: list[int] = field(default_factory=list)
    end_s: float = 0.0

    def add(self, samples: IntArray, sp_size: int, first_rank: int) -> None:
        """Add one at the end."""
        self.samples.append(samples)
        self.count.append(len(samples))
        self.sp_size.append(sp_size)
        self.first_rank.append(first_rank)

    @property
    def most_steps(self) -> int:
        """Micro-batches of the rank that has most."""
        steps = Counter[int]()
        for first, p in zip(self.first_rank, self.sp_size, strict=True):
            steps.update(range(first, first + p))
        return max(steps.values())

    def split_to_minimum(self, min_steps: int, world_size: int) -> None:
        """Halve micro-batches of one rank until it has accumulated Gmin, if none has."""
        steps = [0] * world_size
        samples = [0] * world_size
        for first, p, count in zip(self.first_rank, self.sp_size, self.count, strict=True):
            for rank in range(first, first + p):
                steps[rank] += 1
                samples[rank] += count
        keeper = max(range(world_size), key=samples.__getitem__)
        missing = 0 if max(steps) >= min_steps else min_steps - steps[keeper]
        while missing > 0:
            own = [
                i
                for i, (first, p) in enumerate(zip(self.first_rank, self.sp_size, strict=True))
                if first <= keeper < first + p and self.count[i] > 1
            ]
            if not own:
                return
            i = max(own, key=self.count.__getitem__)
            half = self.count[i] // 2
            whole = self.samples[i]
            self.samples[i : i + 1] = [whole[:half], whole[half:]]
            self.count[i : i + 1] = [half, len(whole) - half]
            self.sp_size.insert(i, self.sp_size[i])
            self.first_rank.insert(i, self.first_rank[i])
            missing -= 1

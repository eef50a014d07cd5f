"""The samples that wait, and what is taken from them.

Sampling contract (DESIGN.md section 4): samples wait in one queue per bucket, in the order of the
epoch's permutation. The earliest sample that waits decides the next bucket; a micro-batch takes the
next b samples of that queue. Nothing is dropped or repeated. No queue runs ahead of the earliest
waiting sample by more than ``lead`` places, so that every part of an epoch has the length mix of
the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_dcp.planning.candidates import CostTable
from lightning_dcp.planning.lengths import IntArray

__all__ = ["NONE_LEFT", "BucketConfig", "Queues", "Schedule", "Taken", "Waiting", "lead_samples"]

NONE_LEFT = 1 << 62
"""Place of the next sample of an empty queue."""

_LEAD = 1.5  # times sqrt(samples): what two-sample tests on tenths of an epoch do not notice


@dataclass(frozen=True, eq=False)
class BucketConfig:
    """What a bucket's micro-batches look like.

    Attributes:
        tables: SP size -> costs; all SP sizes at which the bucket fits.
        sp_size: SP size used.
        batch_sizes: SP size -> micro-batch size at most.
    """

    tables: dict[int, CostTable]
    sp_size: int
    batch_sizes: dict[int, int]


@dataclass(frozen=True, eq=False)
class Queues:
    """Per bucket: samples in the epoch's order.

    Attributes:
        ids: Dataset indices.
        lengths: Their lengths.
        positions: Their places in the epoch's permutation.
        tokens_before: (n + 1,) running sum of the lengths.
    """

    ids: list[IntArray]
    lengths: list[IntArray]
    positions: list[IntArray]
    tokens_before: list[IntArray]

    @classmethod
    def build(cls, order: IntArray, lengths: IntArray, bucket: IntArray, num: int) -> Queues:
        """Sort the permutation ``order`` of samples into the queues of ``num`` buckets."""
        places = np.argsort(bucket[order], kind="stable")
        ends = np.cumsum(np.bincount(bucket[order], minlength=num))
        positions = [part.astype(np.int64) for part in np.split(places, ends[:-1])]
        ids = [order[part] for part in positions]
        sizes = [lengths[part] for part in ids]
        return cls(
            ids=ids,
            lengths=sizes,
            positions=positions,
            tokens_before=[np.concatenate([[0], np.cumsum(part)]) for part in sizes],
        )


@dataclass(eq=False)
class Schedule:
    """Micro-batches of an epoch, in columns; iteration i has rows ``offsets[i]:offsets[i + 1]``.

    A micro-batch is ``count`` samples of queue ``bucket`` from ``start``.
    """

    bucket: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    sp_size: list[int] = field(default_factory=list)
    first_rank: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])


def lead_samples(num_samples: int) -> int:
    """How many places a bucket may be ahead of the earliest waiting sample."""
    return max(1, int(_LEAD * math.sqrt(num_samples)))


# bucket, start, count, sp_size, seconds, tokens
Taken = tuple[int, int, int, int, float, int]


class Waiting:
    """Samples that wait, what each queue costs, and the micro-batches made so far."""

    def __init__(
        self,
        queues: Queues,
        configs: Sequence[BucketConfig],
        world_size: int,
        pad_multiple: int,
    ) -> None:
        self.queues = queues
        self.configs = configs
        self.world_size = world_size
        self.out = Schedule()
        self.sizes = [len(ids) for ids in queues.ids]
        self.next = [0] * len(self.sizes)
        self.heads = [int(p[0]) if len(p) else NONE_LEFT for p in queues.positions]
        self.samples_left = sum(self.sizes)
        self.tokens_left = sum(int(t[-1]) for t in queues.tokens_before)
        self.multiple = {p: math.lcm(p, pad_multiple) for config in configs for p in config.tables}
        self.longest = [int(part.max()) if len(part) else 1 for part in queues.lengths]
        self.budget = 0  # samples this iteration may still take

    def seconds(self, k: int, p: int, count: int) -> float:
        """Predicted seconds of the next ``count`` samples of queue k on p ranks."""
        start = self.next[k]
        lengths = self.queues.lengths[k]
        longest = lengths.item(start) if count == 1 else int(lengths[start : start + count].max())
        multiple = self.multiple[p]
        return self.configs[k].tables[p].time_s(count, -(-longest // multiple) * multiple)

    def take(self, k: int, p: int, count: int, seconds: float) -> Taken:
        """Remove the next ``count`` samples of queue k."""
        start = self.next[k]
        end = start + count
        before = self.queues.tokens_before[k]
        tokens = before.item(end) - before.item(start)
        self.next[k] = end
        self.heads[k] = self.queues.positions[k].item(end) if end < self.sizes[k] else NONE_LEFT
        self.samples_left -= count
        self.tokens_left -= tokens
        self.budget -= count
        return k, start, count, p, seconds, tokens

    def emit(self, taken: Taken, first_rank: int) -> None:
        """Add a micro-batch to the schedule."""
        out = self.out
        out.bucket.append(taken[0])
        out.start.append(taken[1])
        out.count.append(taken[2])
        out.sp_size.append(taken[3])
        out.first_rank.append(first_rank)

"""The plans of one epoch: compact columns, :class:`Plan` objects on access."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np

from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.fitting import FloatArray
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.packed import PackedCosts, PackedSums
from lightning_dcp.planning.plan import MicroBatch, Plan
from lightning_dcp.planning.slowness import slowest_member
from lightning_dcp.planning.windows import Schedule

__all__ = ["EpochPlan"]


class EpochPlan(Sequence[Plan]):
    """All plans of an epoch; ``len()`` is the number of iterations. Made by ``EpochPlanner.epoch``.

    Or the plans of what is left of an epoch (``EpochPlanner.rest``): place i then holds the plan of
    iteration ``first_iteration + i``.

    Attributes:
        epoch: Epoch, from 0.
        first_iteration: Iteration of the first plan.
        world_size: Number of ranks.
        packing: Whether micro-batches are packed.
        offsets: (N + 1,) iteration i has micro-batches ``offsets[i]:offsets[i + 1]``.
        batch_sizes, seq_lens, num_tokens_of, sp_sizes, first_ranks, recompute_blocks, time_s,
            memory_bytes: (M,) columns, one row per micro-batch, in global order.
    """

    def __init__(
        self,
        *,
        epoch: int,
        world_size: int,
        ids: IntArray,
        lengths: IntArray,
        schedule: Schedule,
        cost_model: Costs,
        pad_multiple: int,
        limit_bytes: int,
        recompute: int | None,
        first_iteration: int = 0,
        packing: bool = False,
        place_speed: FloatArray | None = None,
    ) -> None:
        self.epoch = epoch
        self.first_iteration = first_iteration
        self.world_size = world_size
        self.packing = packing
        self.offsets: IntArray = np.array(schedule.offsets, dtype=np.int64)
        self.batch_sizes: IntArray = np.array(schedule.count, dtype=np.int64)
        self.sp_sizes: IntArray = np.array(schedule.sp_size, dtype=np.int64)
        self.first_ranks: IntArray = np.array(schedule.first_rank, dtype=np.int64)
        self._step_overhead_s = cost_model.step_overhead_s
        places = np.concatenate(schedule.samples)
        sample_offsets = np.concatenate([[0], np.cumsum(self.batch_sizes)])
        self._sample_offsets = sample_offsets
        self._ids = ids[places]
        lengths = lengths[places]
        multiple = np.lcm(self.sp_sizes, pad_multiple)
        sums = PackedSums.of(lengths, self.batch_sizes, self.sp_sizes)
        self._sums = sums if packing else None
        self.num_tokens_of: IntArray = sums.tokens
        tokens = sums.tokens if packing else sums.longest
        self.seq_lens: IntArray = -(-tokens // multiple) * multiple
        key = (self.batch_sizes, self.seq_lens, self.sp_sizes)
        if packing:
            r, seconds, num_bytes = PackedCosts(cost_model, limit_bytes, recompute).predict(sums)
        else:
            if recompute is None:
                r = cost_model.min_recompute(*key, limit_bytes)
            else:
                r = np.full(self.batch_sizes.size, recompute, dtype=np.int64)
            seconds, num_bytes = cost_model.time_s(*key, r), cost_model.memory_bytes(*key, r)
        assert (r >= 0).all(), "a micro-batch was planned that does not fit"
        self.recompute_blocks: IntArray = r
        self.time_s: FloatArray = seconds
        slowest = self._slowest_of_groups(place_speed)
        if slowest is not None:
            self.time_s = seconds * slowest
        self.memory_bytes: IntArray = num_bytes
        assert (self.memory_bytes <= limit_bytes).all(), "a micro-batch is over the memory limit"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> list[Plan]: ...
    def __getitem__(self, index: int | slice) -> Plan | list[Plan]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        iteration = index + len(self) if index < 0 else index
        if not 0 <= iteration < len(self):
            raise IndexError(f"Iteration {index} of an epoch of {len(self)} iterations.")
        lo, hi = int(self.offsets[iteration]), int(self.offsets[iteration + 1])
        ends = self._sample_offsets[lo : hi + 1].tolist()
        ids = self._ids[ends[0] : ends[-1]].tolist()
        columns = [
            column[lo:hi].tolist()
            for column in (
                self.seq_lens,
                self.num_tokens_of,
                self.first_ranks,
                self.sp_sizes,
                self.recompute_blocks,
                self.time_s,
                self.memory_bytes,
            )
        ]
        columns.append([self.packing] * (hi - lo))
        return Plan(
            epoch=self.epoch,
            iteration=self.first_iteration + iteration,
            world_size=self.world_size,
            micro_batches=tuple(
                MicroBatch(tuple(ids[ends[i] - ends[0] : ends[i + 1] - ends[0]]), *values)
                for i, values in enumerate(zip(*columns, strict=True))
            ),
        )

    def __iter__(self) -> Iterator[Plan]:
        return (self[i] for i in range(len(self)))

    def sample_ids(self, stop: int) -> IntArray:
        """Dataset indices of the samples of the first ``stop`` plans."""
        return self._ids[: int(self._sample_offsets[self.offsets[stop]])]

    def _slowest_of_groups(self, place_speed: FloatArray | None) -> FloatArray | None:
        """(M,) factor of the slowest member; None where all ranks are alike."""
        if place_speed is None:
            return None
        return place_speed[slowest_member(place_speed, self.first_ranks, self.sp_sizes)]

    def makespan_by(self, costs: Costs, place_speed: FloatArray | None = None) -> FloatArray:
        """(N,) seconds per iteration that other costs predict for these plans as they are.

        Args:
            costs: Predict seconds.
            place_speed: (W,) seconds at each place relative to the typical one; None: all alike.
        """
        r = self.recompute_blocks
        if self._sums is not None:
            time_s = PackedCosts(costs, 0, None).seconds(self._sums, r)
        else:
            time_s = costs.time_s(self.batch_sizes, self.seq_lens, self.sp_sizes, r)
        slowest = self._slowest_of_groups(place_speed)
        if slowest is not None:
            time_s = time_s * slowest
        return np.asarray(self._busy(time_s).max(axis=1))

    @cached_property
    def busy_s(self) -> FloatArray:
        """(N, W) predicted seconds of work per iteration and rank."""
        return self._busy(self.time_s)

    def _busy(self, time_s: FloatArray) -> FloatArray:
        busy = np.zeros((len(self), self.world_size))
        iteration = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        for p in np.unique(self.sp_sizes).tolist():
            rows = np.flatnonzero(self.sp_sizes == p)
            for offset in range(p):
                np.add.at(busy, (iteration[rows], self.first_ranks[rows] + offset), time_s[rows])
        return busy

    @cached_property
    def makespan_s(self) -> FloatArray:
        """(N,) predicted seconds per iteration, without the step's overhead."""
        # Groups of one iteration are disjoint or nested with the larger first, so that no rank
        # waits inside an iteration; only the last may mix them.
        makespan = self.busy_s.max(axis=1)
        makespan[-1] = self[-1].makespan_s
        return np.asarray(makespan)

    @property
    def num_tokens(self) -> int:
        """Real tokens of the epoch."""
        return int(self.num_tokens_of.sum())

    @property
    def tokens_per_step(self) -> IntArray:
        """(N,) real tokens per iteration."""
        return np.add.reduceat(self.num_tokens_of, self.offsets[:-1])

    @property
    def predicted_time_s(self) -> float:
        """Predicted seconds of the epoch, the steps' overhead included."""
        return math.fsum(self.makespan_s) + len(self) * self._step_overhead_s

    @property
    def predicted_idle_share(self) -> float:
        """Idle share over the epoch, weighted by GPU and time (the steps' overhead left out)."""
        total = self.world_size * math.fsum(self.makespan_s)
        return max(0.0, 1.0 - math.fsum(self.busy_s.ravel()) / total) if total > 0 else 0.0

    @property
    def padding_share(self) -> float:
        """Share of the padded tokens that is padding."""
        if self.packing:
            return 0.0
        return 1.0 - self.num_tokens / int((self.batch_sizes * self.seq_lens).sum())

    def digest(self) -> str:
        """SHA-256 (hex) of all plans of the epoch."""
        name = f"{self.epoch}/{self.world_size}"
        if self.first_iteration:
            name += f"/{self.first_iteration}"
        if self.packing:
            name += "/packed"
        digest = hashlib.sha256(name.encode())
        for column in (
            self.offsets,
            self._ids,
            self.batch_sizes,
            self.seq_lens,
            self.sp_sizes,
            self.first_ranks,
            self.recompute_blocks,
            self.time_s,
            self.memory_bytes,
        ):
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()

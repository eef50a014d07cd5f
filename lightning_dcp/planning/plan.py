"""The plan: the only thing that passes from planning to execution.

Plans are values: comparable, hashable, with a JSON round trip, and checked when they are made::

    rank 0  |== p=4, b=1 ==|= p=1 =|= p=1 =|
    rank 1  |== p=4, b=1 ==|== p=2 ==|          one iteration; every rank follows the same
    rank 2  |== p=4, b=1 ==|== p=1 ====|        global order and runs the micro-batches whose
    rank 3  |== p=4, b=1 ==|= p=1 =|            block of ranks holds it
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_dcp.planning.options import is_power_of_two

__all__ = ["MicroBatch", "Plan", "busy_per_rank", "idle_share"]


def busy_per_rank(
    world_size: int, work: Iterable[tuple[Iterable[int], float]]
) -> tuple[float, ...]:
    """Seconds of work per rank, from (ranks, seconds) of each micro-batch."""
    busy = [0.0] * world_size
    for ranks, seconds in work:
        for rank in ranks:
            busy[rank] += seconds
    return tuple(busy)


def idle_share(busy_s: Sequence[float], makespan_s: float) -> float:
    """``sum_ranks(makespan - busy) / (W * makespan)``: weighted by GPU."""
    if makespan_s <= 0:
        return 0.0
    return max(0.0, 1.0 - sum(busy_s) / (len(busy_s) * makespan_s))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """``b`` samples run forward and backward once by one SP group.

    Attributes:
        sample_ids: Dataset indices of the samples.
        seq_len: Tokens each sample is padded to; of a packed micro-batch the tokens of its one
            sequence. A multiple of ``sp_size``.
        num_tokens: Sum of the real lengths, without padding.
        first_rank: First rank of the group; a multiple of ``sp_size``.
        sp_size: Number of ranks that share the sequence (a power of two).
        recompute_blocks: How many of the model's blocks are recomputed, the first ones.
        est_time_s: Predicted seconds.
        est_bytes: Predicted peak bytes on each rank of the group.
        packed: Whether the samples are put one after the other, without padding.
    """

    sample_ids: tuple[int, ...]
    seq_len: int
    num_tokens: int
    first_rank: int
    sp_size: int
    recompute_blocks: int
    est_time_s: float
    est_bytes: int
    packed: bool = False

    def __post_init__(self) -> None:
        if not is_power_of_two(self.sp_size):
            raise ValueError(f"sp_size must be a power of two; got {self.sp_size}.")
        if self.first_rank < 0 or self.first_rank % self.sp_size:
            raise ValueError(
                f"first_rank must be a multiple of sp_size={self.sp_size}; got {self.first_rank}."
            )
        if not self.sample_ids:
            raise ValueError("A micro-batch needs at least one sample; got none.")
        if min(self.sample_ids) < 0 or len(set(self.sample_ids)) != len(self.sample_ids):
            raise ValueError(
                f"sample_ids must be distinct and not negative; got {self.sample_ids}."
            )
        if self.seq_len < 1 or self.seq_len % self.sp_size:
            raise ValueError(
                f"seq_len must be a positive multiple of sp_size={self.sp_size}; "
                f"got {self.seq_len}."
            )
        if not len(self.sample_ids) <= self.num_tokens <= self.padded_tokens:
            raise ValueError(
                f"num_tokens must lie between the {len(self.sample_ids)} samples and the "
                f"{self.padded_tokens} padded tokens; got {self.num_tokens}."
            )
        if self.packed and not 0 <= self.seq_len - self.num_tokens < self.sp_size:
            raise ValueError(
                f"seq_len of a packed micro-batch must be its {self.num_tokens} tokens, rounded up "
                f"to a multiple of {self.sp_size}; got {self.seq_len}."
            )
        if self.recompute_blocks < 0 or self.est_bytes < 0:
            raise ValueError(
                "recompute_blocks and est_bytes must not be negative; got "
                f"{self.recompute_blocks} and {self.est_bytes}."
            )
        if not (math.isfinite(self.est_time_s) and self.est_time_s >= 0):
            raise ValueError(f"est_time_s must be finite and not negative; got {self.est_time_s}.")

    @property
    def ranks(self) -> range:
        """The ranks of the group."""
        return range(self.first_rank, self.first_rank + self.sp_size)

    @property
    def batch_size(self) -> int:
        """Number of samples b."""
        return len(self.sample_ids)

    @property
    def padded_tokens(self) -> int:
        """Tokens with padding, ``b * seq_len``; packed there is none."""
        if self.packed:
            return self.num_tokens
        return len(self.sample_ids) * self.seq_len

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        packed = {"packed": True} if self.packed else {}
        return {
            "sample_ids": list(self.sample_ids),
            "seq_len": self.seq_len,
            "num_tokens": self.num_tokens,
            "first_rank": self.first_rank,
            "sp_size": self.sp_size,
            "recompute_blocks": self.recompute_blocks,
            "est_time_s": self.est_time_s,
            "est_bytes": self.est_bytes,
            **packed,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MicroBatch:
        """Inverse of :meth:`to_dict`."""
        return cls(**{**values, "sample_ids": tuple(values["sample_ids"])})


@dataclass(frozen=True)
class Plan:
    """What every rank runs between two optimizer steps; identical on all ranks.

    Attributes:
        epoch: Epoch, from 0.
        iteration: Iteration in the epoch, from 0.
        world_size: Number of ranks.
        micro_batches: All micro-batches in one global order. A rank runs, in that order, those
            whose block holds it; with one total order no two ranks can wait for each other.
    """

    epoch: int
    iteration: int
    world_size: int
    micro_batches: tuple[MicroBatch, ...]

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.iteration < 0 or self.world_size < 1:
            raise ValueError(
                "epoch and iteration must not be negative and world_size at least 1; got "
                f"{self.epoch}, {self.iteration}, {self.world_size}."
            )
        if not self.micro_batches:
            raise ValueError(f"The plan of iteration {self.iteration} has no micro-batch.")
        seen: set[int] = set()
        for index, micro_batch in enumerate(self.micro_batches):
            if micro_batch.ranks.stop > self.world_size:
                raise ValueError(
                    f"Micro-batch {index} uses ranks up to {micro_batch.ranks.stop - 1}; the "
                    f"world has {self.world_size}."
                )
            twice = seen.intersection(micro_batch.sample_ids)
            if twice:
                raise ValueError(f"Samples {sorted(twice)} are twice in the plan.")
            seen.update(micro_batch.sample_ids)

    def indices_for_rank(self, rank: int) -> tuple[int, ...]:
        """Places in the global order of what ``rank`` runs (they key random numbers)."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}); got {rank}.")
        return self._indices[rank]

    def for_rank(self, rank: int) -> tuple[MicroBatch, ...]:
        """What ``rank`` runs, in order; may be empty (the rank still joins the reduction)."""
        return tuple(self.micro_batches[i] for i in self.indices_for_rank(rank))

    @cached_property
    def _indices(self) -> tuple[tuple[int, ...], ...]:
        # Of all ranks in one pass: each is asked for, and its own several times a micro-batch.
        found: list[list[int]] = [[] for _ in range(self.world_size)]
        for i, m in enumerate(self.micro_batches):
            for rank in m.ranks:
                found[rank].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def start_s(self) -> tuple[float, ...]:
        """Predicted start of each micro-batch: when all ranks of its group are free."""
        return self._timeline[0]

    @cached_property
    def makespan_s(self) -> float:
        """Predicted seconds until the last rank has finished its micro-batches."""
        return self._timeline[1]

    @cached_property
    def _timeline(self) -> tuple[tuple[float, ...], float]:
        free = [0.0] * self.world_size
        starts = []
        for m in self.micro_batches:
            start = max(free[m.first_rank : m.ranks.stop])
            starts.append(start)
            free[m.first_rank : m.ranks.stop] = [start + m.est_time_s] * m.sp_size
        return tuple(starts), max(free)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Predicted seconds of work per rank."""
        return busy_per_rank(self.world_size, ((m.ranks, m.est_time_s) for m in self.micro_batches))

    @property
    def idle_share(self) -> float:
        """``sum_ranks(makespan - busy) / (W * makespan)``: weighted by GPU."""
        return idle_share(self.busy_s, self.makespan_s)

    @property
    def num_samples(self) -> int:
        """Samples in the iteration."""
        return sum(m.batch_size for m in self.micro_batches)

    @property
    def num_tokens(self) -> int:
        """Real tokens in the iteration."""
        return sum(m.num_tokens for m in self.micro_batches)

    @property
    def padding_share(self) -> float:
        """Share of the padded tokens that is padding."""
        return 1.0 - self.num_tokens / sum(m.padded_tokens for m in self.micro_batches)

    @property
    def accumulation(self) -> tuple[int, ...]:
        """Number of micro-batches per rank."""
        counts = [0] * self.world_size
        for m in self.micro_batches:
            for rank in m.ranks:
                counts[rank] += 1
        return tuple(counts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "epoch": self.epoch,
            "iteration": self.iteration,
            "world_size": self.world_size,
            "micro_batches": [m.to_dict() for m in self.micro_batches],
        }

    def to_json(self) -> str:
        """Canonical JSON: equal plans give equal bytes."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of :meth:`to_json`; checks all invariants.

        Raises:
            ValueError: The text is no plan, or an invalid one.
        """
        values = json.loads(text)
        try:
            micro_batches = tuple(MicroBatch.from_dict(m) for m in values.pop("micro_batches"))
            return cls(**values, micro_batches=micro_batches)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"Not the JSON of a plan: {error}.") from error

    def digest(self) -> str:
        """SHA-256 of the canonical JSON (hex); ranks compare it before they train on the plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

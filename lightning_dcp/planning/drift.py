"""Costs as they turned out: predictions times what micro-batches really took.

Each bucket has a factor for seconds and one for bytes; each rank may have one for how much slower
than the others it is.

NOTE (order): planning relies on costs that do not fall with the length. A bucket that is corrected
upwards by more than the next one could break that, so that longer samples count as at least what
the longest of such a bucket does::

    seconds          ____/            bucket 1: twice as slow as predicted
         |      ____|   <- held       bucket 2: as predicted, but no less than bucket 1's longest
         |     /
         |____/
         +-----|---------|--> length
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.fitting import FloatArray
from lightning_dcp.planning.lengths import IntArray

__all__ = ["CorrectedCosts", "Corrections", "uncorrected"]

_MOST_BYTES = 2.0**62
_ROUNDING = 1.0 - 1e-12


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """What measured costs are, relative to those of the cost profile.

    Attributes:
        bucket_edges: Increasing; factor k is for lengths in ``[edges[k], edges[k + 1])``, the first
            and the last for all that are shorter or longer.
        time_factors: Seconds, measured / predicted; 1.0: as predicted.
        memory_factors: The same for the bytes that a micro-batch adds to the model's own; at least
            1.0.
        rank_speed: Seconds each rank takes relative to the typical rank: 2.0 is twice as slow.
            Empty: all ranks are alike.

    Raises:
        ValueError: Edges that do not increase, not one factor per bucket, or a factor out of range.
    """

    bucket_edges: tuple[int, ...]
    time_factors: tuple[float, ...]
    memory_factors: tuple[float, ...]
    rank_speed: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        edges = self.bucket_edges
        if len(edges) < 2 or any(lo >= hi for lo, hi in pairwise(edges)):
            raise ValueError(
                f"Bucket edges must be at least two increasing integers; got {list(edges)}."
            )
        for name, least in (("time_factors", 0.0), ("memory_factors", 1.0), ("rank_speed", 0.0)):
            factors = getattr(self, name)
            if name != "rank_speed" and len(factors) != len(edges) - 1:
                raise ValueError(
                    f"{name} needs one factor for each of {len(edges) - 1} buckets; got "
                    f"{len(factors)}."
                )
            wrong = [f for f in factors if not (math.isfinite(f) and f > 0 and f >= least)]
            if wrong:
                raise ValueError(
                    f"{name} must be finite and {'at least 1' if least else 'above 0'}; got "
                    f"{wrong[0]!r}."
                )

    @classmethod
    def none(cls, bucket_edges: Sequence[int]) -> Corrections:
        """All factors 1: as predicted."""
        ones = (1.0,) * (len(bucket_edges) - 1)
        edges = tuple(int(edge) for edge in bucket_edges)
        return cls(bucket_edges=edges, time_factors=ones, memory_factors=ones)

    @property
    def changes_nothing(self) -> bool:
        """Whether all is as predicted."""
        return {*self.time_factors, *self.memory_factors, *self.rank_speed} <= {1.0}

    def bucket_of(self, lengths: Any) -> IntArray:
        """Bucket of each length; the first or last where it lies outside of all.

        Args:
            lengths: Numbers or an array: ``seq_len`` of micro-batches, for packed ones
                :func:`~lightning_dcp.planning.packed.packed_length` of their samples.
        """
        inner = np.asarray(self.bucket_edges[1:-1])
        return np.searchsorted(inner, np.asarray(lengths), side="right").astype(np.int64)

    def with_memory_factor(self, bucket: int, factor: float) -> Corrections:
        """The same with another memory factor of one bucket."""
        factors = list(self.memory_factors)
        factors[bucket] = float(factor)
        return replace(self, memory_factors=tuple(factors))

    def to_plain(self) -> dict[str, Any]:
        """Lists of numbers, for checkpoints and JSON."""
        return {
            "bucket_edges": list(self.bucket_edges),
            "time_factors": list(self.time_factors),
            "memory_factors": list(self.memory_factors),
            "rank_speed": list(self.rank_speed),
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Corrections:
        """Inverse of :meth:`to_plain`."""
        return cls(
            bucket_edges=tuple(int(edge) for edge in values["bucket_edges"]),
            time_factors=tuple(float(f) for f in values["time_factors"]),
            memory_factors=tuple(float(f) for f in values["memory_factors"]),
            rank_speed=tuple(float(f) for f in values["rank_speed"]),
        )

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all factors."""
        text = json.dumps(self.to_plain(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


class CorrectedCosts:
    """Predictions of a cost model, corrected by bucket. These are ``Costs`` like any other.

    Args:
        costs: What is corrected; corrections that it has already are replaced.
        corrections: By how much.

    Attributes:
        costs: Without any correction.
        corrections: As given.
    """

    def __init__(self, costs: Costs, corrections: Corrections) -> None:
        self.costs = uncorrected(costs)
        self.corrections = corrections
        self._time = _Steps(corrections, corrections.time_factors)
        self._memory = _Steps(corrections, corrections.memory_factors)

    @property
    def num_blocks(self) -> int:
        """L, the blocks that may be recomputed."""
        return self.costs.num_blocks

    @property
    def fixed_bytes(self) -> int:
        """M_C, as it is: corrections are of what a micro-batch adds."""
        return self.costs.fixed_bytes

    @property
    def step_overhead_s(self) -> float:
        """Seconds per iteration outside micro-batches, as they are."""
        return self.costs.step_overhead_s

    @property
    def sp_sizes(self) -> tuple[int, ...]:
        """SP sizes that can be predicted, increasing."""
        return self.costs.sp_sizes

    @property
    def memory_error(self) -> float:
        """Relative error of memory, as it is."""
        return self.costs.memory_error

    def time_s(self, b: Any, s: Any, p: Any, r: Any = 0) -> Any:
        """Seconds."""

        def seconds(b: Any, s: Any, p: Any, r: Any, factor: Any) -> FloatArray:
            return np.asarray(self.costs.time_s(b, s, p, r) * factor, dtype=np.float64)

        return self._time.largest(seconds, b, s, p, r)

    def memory_bytes(self, b: Any, s: Any, p: Any, r: Any = 0) -> Any:
        """Peak bytes on each rank of the group, int64."""
        if self._memory.uniform == 1.0:
            return self.costs.memory_bytes(b, s, p, r)
        fixed = self.fixed_bytes

        def num_bytes(b: Any, s: Any, p: Any, r: Any, factor: Any) -> FloatArray:
            added = self.costs.memory_bytes(b, s, p, r) - fixed
            return np.asarray(added * factor, dtype=np.float64)

        added = np.ceil(self._memory.largest(num_bytes, b, s, p, r))
        return np.minimum(added + fixed, _MOST_BYTES).astype(np.int64)

    def min_recompute(self, b: Any, s: Any, p: Any, limit_bytes: int) -> Any:
        """Smallest r whose memory is within the limit, -1 where none is (int64)."""
        if self._memory.uniform == 1.0:
            return self.costs.min_recompute(b, s, p, limit_bytes)
        fixed, most = self.fixed_bytes, self.num_blocks

        def recompute(b: Any, s: Any, p: Any, _: Any, factor: Any) -> FloatArray:
            b, s, p, factor = np.broadcast_arrays(b, s, p, factor)
            found = np.empty(b.shape)
            for f in np.unique(factor).tolist():
                rows = factor == f
                # (bytes - fixed) f <= limit - fixed
                limit = fixed + math.floor((limit_bytes - fixed) / f * _ROUNDING)
                found[rows] = self.costs.min_recompute(b[rows], s[rows], p[rows], limit)
            return np.where(found < 0, most + 1, found)

        # Memory does not rise with r: what is enough for each bound is enough for the largest.
        r = self._memory.largest(recompute, b, s, p, 0)
        return np.where(r > most, -1, r).astype(np.int64)[()]

    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything a prediction depends on, and of the speed of ranks."""
        text = f"{self.costs.fingerprint()} {self.corrections.fingerprint}"
        return hashlib.sha256(text.encode()).hexdigest()


# b, s, p, r and the factor that goes with s -> corrected values
_Law = Callable[[Any, Any, Any, Any, Any], FloatArray]


class _Steps:
    """One factor per bucket, kept from letting values fall; see NOTE (order)."""

    def __init__(self, corrections: Corrections, factors: Sequence[float]) -> None:
        self._bucket_of = corrections.bucket_of
        self._factors = np.asarray(factors)
        #: The factor where all buckets have the same; else None.
        self.uniform = factors[0] if len(set(factors)) == 1 else None
        # (bucket, its longest length, the later buckets that it holds up): those behind it up to
        # the first that has as large a factor and therefore is above it in any case.
        self._held: list[tuple[int, int, IntArray]] = []
        for j, factor in enumerate(factors):
            stop = j + 1
            while stop < len(factors) and factors[stop] < factor:
                stop += 1
            if stop > j + 1:
                longest = corrections.bucket_edges[j + 1] - 1
                self._held.append((j, longest, np.arange(j + 1, stop)))

    def largest(self, law: _Law, b: Any, s: Any, p: Any, r: Any) -> Any:
        """The law at s and at the longest lengths of buckets that hold it up, whichever is most."""
        if self.uniform is not None:
            return law(b, s, p, r, self.uniform)[()]
        bucket = self._bucket_of(s)
        found = law(b, s, p, r, self._factors[bucket])
        if not self._held:
            return found[()]
        b, bucket, p, r, _ = np.broadcast_arrays(b, bucket, p, r, found)
        found = np.array(found)
        for j, longest, later in self._held:
            rows = np.isin(bucket, later)
            if rows.any():
                at_longest = law(b[rows], longest, p[rows], r[rows], self._factors[j])
                found[rows] = np.maximum(found[rows], at_longest)
        return found[()]


def uncorrected(costs: Costs) -> Costs:
    """The cost model itself, without corrections."""
    return costs.costs if isinstance(costs, CorrectedCosts) else costs

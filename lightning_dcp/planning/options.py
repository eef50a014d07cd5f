"""What the user may decide about planning; all else is derived from the data and the costs."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

__all__ = ["POLICIES", "STATIC_POLICIES", "OnTooLong", "PlanningOptions", "is_power_of_two"]

POLICIES: tuple[str, ...] = ("dcp-inter", "dcp-intra", "global-batch", "bucket", "packed")
"""Known policies."""

STATIC_POLICIES: tuple[str, ...] = ("bucket", "packed")
"""Those with one SP size for all samples: what others are compared with."""

OnTooLong = Literal["error", "skip", "truncate"]


def is_power_of_two(value: int) -> bool:
    """Whether ``value`` is 1, 2, 4, 8, ..."""
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """Options of the planner. An object that exists is valid.

    Attributes:
        policy: ``"dcp-intra"`` (default: SP size, micro-batch size, accumulation and recomputation
            follow the lengths), ``"dcp-inter"`` (the same with every block recomputed),
            ``"global-batch"`` (like ``"dcp-intra"``, but each step takes exactly the samples that
            it takes under ``strategy="ddp"``), or the baselines with one static SP size,
            ``"bucket"`` (micro-batches of similar lengths that take as long as the longest sample)
            and ``"packed"`` (micro-batches filled to a number of tokens).
        tokens_per_step: Tokens one optimizer step aims at over all ranks; default is the
            DataLoader's ``batch_size`` x world size x mean length.
        min_accumulation: Gmin, the least number of micro-batches the busiest group accumulates,
            where the samples of a step allow it.
        max_accumulation: Gmax; an iteration aims at no more than this many times its longest
            micro-batch, by larger micro-batches and, where memory allows none, by more steps.
            Samples of very unequal lengths may still need more. Default: no limit; the size of
            steps is set by ``tokens_per_step`` anyway.
        bucket_edges: Increasing edges ``e0 < e1 < ...``; bucket ``i`` holds lengths in
            ``[e_i, e_{i+1})``. Default: chosen from the lengths.
        max_buckets: Upper limit for the number of buckets chosen from the lengths.
        pad_multiple: Micro-batches are padded to a multiple of this many tokens.
        sp_sizes: SP sizes that may be used (powers of two). Default: all that were measured.
        max_batch_size: Upper limit for the samples in one micro-batch.
        memory_limit_bytes: Bytes one rank may use; default is what the device has.
        on_too_long: What to do with a sample that fits no candidate.
        packing: Micro-batches are packed: one sequence of all samples, without padding.
        seed: Seed of the sample order; default is the one Lightning was seeded with.
        lookahead_steps: Of a stream (an iterable-style data set), how many steps' worth of tokens
            all ranks together read ahead to plan; each keeps its share of these samples in memory.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: A value out of range, or an unknown policy.
    """

    policy: str = "dcp-intra"
    tokens_per_step: int | None = None
    min_accumulation: int = 1
    max_accumulation: int | None = None
    bucket_edges: Sequence[int] | None = None
    max_buckets: int = 16
    pad_multiple: int = 1
    sp_sizes: Sequence[int] | None = None
    max_batch_size: int | None = None
    memory_limit_bytes: int | None = None
    on_too_long: OnTooLong = "error"
    packing: bool = False
    seed: int | None = None
    lookahead_steps: int = 16

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            known = ", ".join(repr(name) for name in POLICIES)
            raise ValueError(f"Unknown policy {self.policy!r}. Known policies: {known}.")
        for name in ("min_accumulation", "max_buckets", "pad_multiple", "lookahead_steps"):
            _check_int(name, getattr(self, name), least=1)
        optional = ("tokens_per_step", "max_accumulation", "max_batch_size", "memory_limit_bytes")
        for name in optional:
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), least=1)
        if self.seed is not None:
            _check_int("seed", self.seed, least=0)
        if not isinstance(self.packing, bool):
            raise TypeError(f"packing must be True or False; got {self.packing!r}.")
        if self.max_accumulation is not None and self.min_accumulation > self.max_accumulation:
            raise ValueError(
                f"min_accumulation ({self.min_accumulation}) must not be larger than "
                f"max_accumulation ({self.max_accumulation})."
            )
        if self.policy == "global-batch" and self.tokens_per_step is not None:
            raise ValueError(
                'tokens_per_step has no effect with policy "global-batch", whose steps take what '
                "they take under DDP: batch_size samples per rank. Leave it out, or use "
                '"dcp-intra".'
            )
        if self.packing and self.pad_multiple > 1:
            raise ValueError(
                f"pad_multiple={self.pad_multiple} has no meaning with packing=True, which does "
                "without padding. Leave one of them out."
            )
        if self.on_too_long not in get_args(OnTooLong):
            raise ValueError(
                f"on_too_long must be one of {', '.join(map(repr, get_args(OnTooLong)))}; "
                f"got {self.on_too_long!r}."
            )
        if self.bucket_edges is not None:
            edges = _int_tuple("bucket_edges", self.bucket_edges)
            if len(edges) < 2 or any(a >= b for a, b in itertools.pairwise(edges)):
                raise ValueError(
                    "bucket_edges must be at least two increasing integers, such as "
                    f"[1, 256, 4096]; got {list(edges)}."
                )
            object.__setattr__(self, "bucket_edges", edges)
        if self.sp_sizes is not None:
            sizes = _int_tuple("sp_sizes", self.sp_sizes)
            wrong = [p for p in sizes if not is_power_of_two(p)]
            if wrong or not sizes:
                raise ValueError(
                    "sp_sizes must be powers of two (1, 2, 4, ...), at least one; got "
                    f"{list(sizes)}."
                )
            object.__setattr__(self, "sp_sizes", tuple(sorted(set(sizes))))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def fingerprint(self) -> str:
        """Hash of all options; equal options have equal hashes on every rank."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _check_int(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int; got {value!r} ({type(value).__name__}).")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}.")


def _int_tuple(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of ints; got {values!r}.")
    result = tuple(values)
    for value in result:
        _check_int(f"each value of {name}", value, least=1 if name == "sp_sizes" else 0)
    return result

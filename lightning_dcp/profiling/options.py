"""What a user may choose about the cost profile."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

# A quadratic in the sequence length needs three lengths; two batch sizes tell "per sample" from
# "per micro-batch". These trials run whatever the budget says: with fewer, no fit exists.
MIN_LENGTHS = 3
MIN_BATCH_SIZES = 2


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions:
    """Options of the dual-layer cost profile (paper §3.5).

    Args:
        budget_s: Seconds that the whole profile may take, self-check included. The
            few short trials without which no fit exists run in any case.
        cache: Whether to read and write the profile in the cache directory.
        cache_dir: Where profiles are cached; ``None`` takes the environment variable
            ``LIGHTNING_DCP_CACHE`` or else the user's cache directory.
        lengths: Sequence lengths to measure at, in tokens, instead of those chosen from the
            data set. They are measured in ascending order while the budget lasts.
        repeats: Timed passes of each cheap trial; their median counts. Trials that take a
            noticeable part of the budget run once.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: If a value is out of its range; the message says which and what is allowed.
    """

    budget_s: float = 20.0
    cache: bool = True
    cache_dir: str | None = None
    lengths: tuple[int, ...] | None = None
    repeats: int = 5

    def __post_init__(self) -> None:
        self._check_types()
        if not (math.isfinite(self.budget_s) and self.budget_s > 0):
            raise ValueError(
                f"budget_s={self.budget_s!r}: the time for profiling must be a positive number of "
                "seconds."
            )
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats!r}: each trial needs at least 1 timed pass.")
        if self.lengths is not None:
            object.__setattr__(self, "lengths", _checked_lengths(self.lengths))

    def _check_types(self) -> None:
        if isinstance(self.budget_s, bool) or not isinstance(self.budget_s, int | float):
            raise TypeError(f"budget_s must be a number of seconds; got {self.budget_s!r}.")
        if isinstance(self.repeats, bool) or not isinstance(self.repeats, int):
            raise TypeError(f"repeats must be an int; got {self.repeats!r}.")
        if not isinstance(self.cache, bool):
            raise TypeError(f"cache must be True or False; got {self.cache!r}.")
        if not isinstance(self.cache_dir, str | os.PathLike | None):
            raise TypeError(f"cache_dir must be a path or None; got {self.cache_dir!r}.")


def _checked_lengths(lengths: object) -> tuple[int, ...]:
    """Sorted distinct lengths, or an error that names the one that is wrong."""
    if not isinstance(lengths, Iterable):
        raise TypeError(f"lengths must be a sequence of ints; got {lengths!r}.")
    given, checked = tuple(lengths), []
    for length in given:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(
                f"lengths={given!r}: {length!r} is no sequence length; give positive integers "
                "(tokens)."
            )
        checked.append(length)
    distinct = tuple(sorted(set(checked)))
    if len(distinct) < MIN_LENGTHS:
        raise ValueError(
            f"lengths={given!r}: at least {MIN_LENGTHS} different lengths are needed, since the "
            "time of a block has a constant, a linear and a quadratic part. Leave it None to "
            "have them chosen from the data set."
        )
    return distinct

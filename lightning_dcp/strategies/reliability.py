"""What a user may choose about faults, drift and slow ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["ReliabilityOptions"]


@dataclass(frozen=True, kw_only=True)
class ReliabilityOptions:
    """What happens when something goes wrong, or other than predicted, during training.

    Args:
        rank_timeout_s: Seconds after which a rank that shows no sign of life counts as lost; the
            others then end with its number and what it was doing. ``None`` watches no rank.
        recover_from_oom: Whether an iteration in which a rank runs out of memory is repeated with
            more careful plans; False ends training with the error.
        enforce_memory_limit: Whether `memory_limit_bytes` is held while training: more is an
            out-of-memory error, on CPUs too, where every operation is then counted, which is slow.
        adapt_to_drift: Whether the rest of an epoch is planned again where micro-batches keep
            taking another time than predicted.
        adapt_to_rank_speed: Whether ranks that are slower than the others get less work.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: A value out of its range; the message says which and what is allowed.
    """

    rank_timeout_s: float | None = 60.0
    recover_from_oom: bool = True
    enforce_memory_limit: bool = False
    adapt_to_drift: bool = True
    adapt_to_rank_speed: bool = False

    def __post_init__(self) -> None:
        for name in (
            "recover_from_oom",
            "enforce_memory_limit",
            "adapt_to_drift",
            "adapt_to_rank_speed",
        ):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False; got {value!r}.")
        timeout = self.rank_timeout_s
        if timeout is None:
            return
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"rank_timeout_s must be a number of seconds or None; got {timeout!r}.")
        if not (math.isfinite(timeout) and timeout >= 1.0):
            raise ValueError(
                f"rank_timeout_s={timeout!r}: ranks show a sign of life about every half second, so"
                " that it must be at least 1; None watches no rank."
            )

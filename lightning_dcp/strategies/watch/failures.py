"""What has gone wrong on which rank: as ranks tell each other, and as users read it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

__all__ = ["Failure", "LostRankError", "in_words", "is_lost_connection"]

#: What gloo, NCCL and torch's store say of a rank that is gone. Their errors are plain
#: `RuntimeError`s in torch 2.6, and partly still in 2.13.
_LOST_CONNECTION = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "connection was likely closed",
    "processgroup",
)
#: Characters of another rank's exception that are passed on.
_MAX_TEXT = 2000


class LostRankError(RuntimeError):
    """Another rank has died, stopped or raised, and this one cannot train on without it."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first thing that went wrong in a run; all else follows from it.

    Attributes:
        rank: Where; None where no rank is to blame.
        what: What the rank did, as the rest of a sentence ("raised ValueError: ...").
        place: Where in its run the rank was seen last.
        raised: Whether the rank itself told of it, by an exception or by its end: it is alive, and
            not to be killed.
    """

    rank: int | None
    what: str
    place: str | None = None
    raised: bool = False

    def to_json(self) -> str:
        """For other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """Inverse of `to_json`."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        who = "" if self.rank is None else f"rank {self.rank} "
        place = "" if self.place is None else f" Last seen in: {self.place}."
        return f"{who}{self.what}.{place}"


def in_words(error: BaseException) -> str:
    """What a rank did that an exception ends, as the rest of a sentence."""
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted (KeyboardInterrupt)"
    if isinstance(error, SIGTERMException):
        return "received SIGTERM"
    name, text = type(error).__name__, str(error).strip().rstrip(".")
    if len(text) > _MAX_TEXT:
        text = text[:_MAX_TEXT] + "..."
    return f"raised {name}: {text}" if text else f"raised {name}"


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed: another rank may be the reason, and knows more."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, getattr(dist, "DistError", ())):
            return True
        text = str(current).lower()
        if isinstance(current, RuntimeError) and any(sign in text for sign in _LOST_CONNECTION):
            return True
        current = current.__cause__ or current.__context__
    return False

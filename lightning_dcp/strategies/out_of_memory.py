"""Running out of memory in a micro-batch: noted where nobody waits for this rank, else the end.

NOTE [Who can be freed]
    A micro-batch of one rank is left and noted; the rank goes on with those that it shares with
    others, since they wait for it in collectives, and at the end of the iteration all ranks learn
    of it (`repeating.py`). Ranks that run a micro-batch together call the same collectives. One
    that runs out of memory leaves the others inside the next of them, from where nobody can call
    them back, unless they run out of memory as well, before that. So each one says on the board
    that it has left the micro-batch, and after how many collectives. If all say so in time, and
    the same number, none is inside of one and none is ahead of another: it is as with one rank.
    Else the rank raises, and the others are ended by whoever watches over lost ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal, NoReturn

import torch

from lightning_dcp.profiling.trial import is_out_of_memory
from lightning_dcp.strategies.agreement import num_collectives
from lightning_dcp.strategies.watch.board import Board

if TYPE_CHECKING:
    from lightning_dcp.parallel.topology import SPGroup
    from lightning_dcp.planning.plan import MicroBatch, Plan
    from lightning_dcp.strategies.iteration_state import IterationState

__all__ = ["Place", "Shortage", "Shortages", "describe", "saying_where"]

Place = Literal["forward", "backward"]

#: How long ranks that share a micro-batch wait for each other to run out of memory, too.
GRACE_S = 10.0
_POLL_S = 0.05
#: The store outlives a `fit`, and what was said in a former one: each has notes of its own.
_num_boards = count()


class RanOutOfMemory(torch.OutOfMemoryError):
    """Out of memory, with the place in training."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """One micro-batch that ran out of memory on one rank.

    Attributes:
        index: of the micro-batch in the plan.
        rank: on which it ran out.
        place: in which pass.
        used_bytes: what the rank was seen to use; 0 where nothing was measured.
    """

    index: int
    rank: int
    place: Place
    used_bytes: int


class Shortages:
    """The micro-batches of the running iteration that ran out of memory on this rank.

    Args:
        rank: of this process.
        recovers: whether they are noted; False raises at once.
        bucket_of: the bucket `[lo, hi)` of a micro-batch; None where there is none.
    """

    def __init__(
        self,
        rank: int,
        *,
        recovers: bool,
        bucket_of: Callable[[MicroBatch], tuple[int, int] | None],
    ) -> None:
        self._rank = rank
        self._recovers = recovers
        self._bucket_of = bucket_of
        self._board = Board(f"memory-{next(_num_boards)}")
        self.found: list[Shortage] = []

    def concerns(self, error: BaseException) -> bool:
        """Whether an error that a micro-batch has raised says that memory ran out."""
        return _ran_out(error)

    def note(
        self,
        error: BaseException,
        state: IterationState,
        index: int,
        group: SPGroup,
        place: Place,
        used_bytes: int,
    ) -> None:
        """Note that a micro-batch, which was left, ran out of memory.

        Raises:
            torch.OutOfMemoryError: Recovery is off, or others of the group are inside a collective.
        """
        shortage = Shortage(index=index, rank=self._rank, place=place, used_bytes=used_bytes)
        where = describe(shortage, state.plan, self._bucket_of)
        if not self._recovers:
            _end(
                f"Out of memory in {where}. recover_from_oom=True would repeat the iteration with"
                " more careful plans; or lower memory_limit_bytes.",
                error,
            )
        if group.size > 1 and not self._all_left(state, index, group):
            others = ", ".join(str(r) for r in group.ranks if r != self._rank)
            _end(
                f"Out of memory in {where}. The other ranks of its group ({others}) are inside a"
                " collective, from where they cannot be called back, so that the iteration cannot"
                " be repeated. Lower memory_limit_bytes, and start again from the last checkpoint.",
                error,
            )
        self.found.append(shortage)

    def clear(self) -> None:
        """Forget them: the iteration begins anew."""
        self.found = []

    def close(self) -> None:
        """End the connection to the other ranks."""
        self._board.close()

    def _all_left(self, state: IterationState, index: int, group: SPGroup) -> bool:
        """Whether all ranks of a group leave a micro-batch at the same collective."""
        plan = state.plan
        key = f"{plan.epoch}.{plan.iteration}.{state.attempt}.{index}"
        self._board.post(f"{key}.{self._rank}", str(num_collectives(group.process_group)))
        keys = [f"{key}.{rank}" for rank in group.ranks]
        deadline = time.monotonic() + GRACE_S
        while (left_after := self._board.read_all(keys)) is None:
            if time.monotonic() > deadline or self._board.trouble is not None:
                return False
            time.sleep(_POLL_S)
        return len(set(left_after)) == 1 and left_after[0] != str(None)


def describe(
    shortage: Shortage, plan: Plan, bucket_of: Callable[[MicroBatch], tuple[int, int] | None]
) -> str:
    """Where memory ran out, in words."""
    m = plan.micro_batches[shortage.index]
    bucket = bucket_of(m)
    lengths = f"length {m.seq_len}" if bucket is None else f"bucket [{bucket[0]}, {bucket[1]})"
    used = f"{shortage.used_bytes:,} used" if shortage.used_bytes else "use not measured"
    return (
        f"iteration {plan.iteration} of epoch {plan.epoch}, on rank {shortage.rank}, in the"
        f" {shortage.place} pass of micro-batch {shortage.index}: {lengths}, p={m.sp_size},"
        f" b={m.batch_size}, r={m.recompute_blocks}, {m.est_bytes:,} bytes predicted, {used}"
    )


@contextmanager
def saying_where(where: Callable[[], str]) -> Iterator[None]:
    """An out-of-memory error raised in here says where it happened, if it does not yet.

    Args:
        where: in words, after "Out of memory ".
    """
    try:
        yield
    except Exception as error:
        if not _ran_out(error):
            raise
        _end(
            f"Out of memory {where()}. Only micro-batches of training are repeated; lower"
            " memory_limit_bytes, which leaves more to everything else.",
            error,
        )


def _ran_out(error: BaseException) -> bool:
    """Whether memory ran out just now; not where an error tells of another, or another rank's."""
    told = type(error).__module__.startswith("lightning_dcp") or RanOutOfMemory.__name__ in str(
        error
    )
    return not told and is_out_of_memory(error)


def _end(message: str, error: BaseException) -> NoReturn:
    raise RanOutOfMemory(f"{message} ({str(error).strip()})") from error

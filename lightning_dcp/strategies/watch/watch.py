"""Each rank tells the others that it is alive, and ends when one of them no longer is.

NOTE [How ranks watch each other]
    A thread of each rank writes a beat to the board (`board.py`) about twice a second, with the
    place its main thread is at, and reads the beat of the next rank: a ring, so that the store
    answers three calls per rank and beat however many ranks there are. Ranks of one machine also
    look at each other's processes, which shows a death at once. Whoever sees a failure first posts
    it under one key that all read. Then the main thread gets a few seconds to end by itself: in
    most cases its collective fails, or it comes by `Watch.at`, and the exception says what
    happened. A main thread that waits in a collective for ever is ended with the process.

NOTE [Clocks]
    A time-out counts only time in which this rank's own thread ran. If a laptop sleeps, or all
    ranks are stopped and continued together, or a C extension holds Python's lock, nobody is held
    to be lost for what this rank could not see.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dcp.strategies.agreement import gather_objects, num_collectives
from lightning_dcp.strategies.process_exit import after_a_failure
from lightning_dcp.strategies.watch.board import Board
from lightning_dcp.strategies.watch.ending import end_process, tell
from lightning_dcp.strategies.watch.failures import (
    Failure,
    LostRankError,
    in_words,
    is_lost_connection,
)
from lightning_dcp.strategies.watch.peers import Peer
from lightning_dcp.strategies.watch.places import SET_UP, Place

if TYPE_CHECKING:
    from lightning_dcp.planning.plan import Plan

__all__ = ["Watch"]

#: Seconds between two beats; with many ranks more, for the sake of the one store.
_INTERVAL_S = 0.5
_BEATS_PER_S = 512.0
#: Seconds for a call to the board.
_ANSWER_S = 1.0
#: Seconds in which a main thread may end by itself once another rank is lost.
_GRACE_S = 5.0
#: The same while it writes a checkpoint.
_BUSY_S = 120.0
#: The same once it has an exception: callbacks run, loggers are closed, groups destroyed.
_ENDING_S = 30.0
#: Seconds in which the cause of a lost connection is waited for.
_CAUSE_S = 5.0
#: An exception that all ranks raise need not be told to any of them.
_ALIKE_S = 1.0
#: Seconds in which others raise one that end at the same collective.
_TOGETHER_S = 5.0
_DONE = "done"
_NOWHERE = "nowhere"


class Watch:
    """Watches over the other ranks during one `fit`, `validate`, `test` or `predict`.

    Args:
        rank: Of this process.
        world_size: Number of ranks.
        timeout_s: Seconds without a sign of life after which a rank is lost; None: no thread is
            started, and nobody is told of anything.
    """

    def __init__(
        self, *, rank: int = 0, world_size: int = 1, timeout_s: float | None = None
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.timeout_s = timeout_s
        #: Where the main thread is; the runner of iterations writes it.
        self.place = SET_UP
        #: What has gone wrong first; None as long as nothing has.
        self.failure: Failure | None = None
        #: Notes between ranks that are unique to this run; process-local before `start`.
        self.board = Board("", timeout_s=_ANSWER_S)
        interval_s = max(_INTERVAL_S, world_size / _BEATS_PER_S)
        self._interval_s = interval_s if timeout_s is None else min(interval_s, timeout_s / 3)
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._known = threading.Event()
        self._ending = False
        #: Whether an exception has ended the run on this rank,
        self.has_raised = False
        #: and others are elsewhere then; None: not known yet.
        self._alone: bool | None = False
        self._busy: str | None = None
        self._peers: list[Peer] = []
        self._awake_s = 0.0
        self._silent_s = 0.0
        #: Ranks that have left in good order.
        self._done: set[int] = set()
        self._left_s: float | None = None
        self._seen: tuple[int, str | None, float] = (rank, None, 0.0)
        self._suspected: set[int] = set()
        self._at: tuple[Place, float] = (SET_UP, 0.0)
        self._beats = 0
        self._first_beat: str | None = None

    # ---- the main thread -------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch. A collective."""
        if self.world_size == 1:
            return
        everyone = gather_objects((Peer.of_this_process(self.rank), uuid.uuid4().hex))
        self.board.close()
        self.board = Board(everyone[0][1], timeout_s=_ANSWER_S)
        if self.timeout_s is None:
            return
        own = everyone[self.rank][0]
        self._peers = [p for p, _ in everyone if p.host == own.host and p.rank != self.rank]
        after_a_failure(None)
        self._thread = threading.Thread(target=self._run, daemon=True, name="lightning-dcp-watch")
        self._thread.start()

    def at(self, what: str, plan: Plan | None = None, index: int | None = None) -> None:
        """Note where the main thread is: outside of iterations, in one, or in a micro-batch.

        Args:
            what: in words.
            plan: of the running iteration.
            index: of the running micro-batch in the plan.

        Raises:
            LostRankError: another rank is lost, so that the next collective would wait for ever.
        """
        self.place = Place(what=what, plan=plan, index=index)
        failure = self.failure
        if failure is not None and failure.rank != self.rank and not self._ending:
            raise LostRankError(self._sentence(failure))

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """In here the rank is not ended because of another, for a bounded time.

        For what should be finished once begun, such as the files of a checkpoint, and what waits
        for no other rank.
        """
        before, busy = self.place, self._busy
        self.place, self._busy = Place(what=what, plan=before.plan), what
        try:
            yield
        finally:
            self.place, self._busy = before, busy

    def raised(self, error: BaseException) -> BaseException:
        """Tell the other ranks of an exception that ends the run on this one.

        Returns:
            What to raise: the same, or where a collective failed because another rank is lost, a
            `LostRankError` that names it.
        """
        self._leave_iterations(error)
        if self._thread is None or self._ending:
            return error
        if isinstance(error, LostRankError):
            self._ending = True
            return error
        lost_connection = is_lost_connection(error)
        if lost_connection:
            self._known.wait(_CAUSE_S)
            if self.failure is None:
                self._post(self._who_is_silent(error))
        self._ending = True
        if self.failure is None:
            place = str(self.place)
            self._post(Failure(rank=self.rank, what=in_words(error), place=place, raised=True))
        failure = self.failure
        if lost_connection and failure is not None and failure.rank != self.rank:
            return LostRankError(self._sentence(failure))
        return error

    @property
    def ends_alone(self) -> bool:
        """Whether an exception ends the run here while other ranks are, or may be, elsewhere.

        Then no collective may begin: it would meet another one, at which gloo ends the process and
        NCCL waits. Waits for the others for a few seconds where that is not known yet.
        """
        if self._alone is None and self.failure is not None and not self.failure.raised:
            self._alone = True  # it is gone
        if self._alone is None:
            keys = [f"left/{rank}" for rank in range(self.world_size)]
            until_s = time.monotonic() + _TOGETHER_S
            while (left := self.board.read_all(keys)) is None and time.monotonic() < until_s:
                time.sleep(0.05)
            alike = left is not None and len(set(left)) == 1 and _NOWHERE not in left
            # What one has found stands for all: each waits until another time.
            stands = self.board.post_once("together", "yes" if alike else "no")
            self._alone = stands != "yes"
        return self._alone

    def _leave_iterations(self, error: BaseException) -> None:
        """Say after how many collectives this rank has ended, for `ends_alone`."""
        agreed = isinstance(error, SIGTERMException)  # all have left before the same iteration
        if self.world_size == 1 or self.has_raised or agreed:
            self.has_raised = True
            return
        self.has_raised, self._alone = True, None
        sharded = self.place.sp_size > 1  # some may be inside a collective of their group
        count = None if sharded or is_lost_connection(error) else num_collectives()
        self.board.post(f"left/{self.rank}", _NOWHERE if count is None else str(count))

    def stop(self) -> None:
        """End the watch; where nothing has gone wrong, others learn that this rank is done."""
        if self._thread is not None and not self._stopped.is_set():
            self._stopped.set()
            self._thread.join(2 * _ANSWER_S)
            self._leave()
        self._alone = False
        self.board.close()

    def _leave(self) -> None:
        if self.failure is None:
            self.board.post(_beat(self.rank), _DONE)
        self.board.add(_DONE, 1)
        if self.rank:
            return
        # The store often lives in this process. Others that find it gone think that the rank has
        # died: they must have heard of its end, or of the failure, before the process ends.
        until_s = time.monotonic() + 2.5 * self._interval_s
        self.board.post("over", _DONE)
        while time.monotonic() < until_s and (self.board.add(_DONE, 0) or 0) < self.world_size:
            time.sleep(0.01)

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        before_s = time.monotonic()
        while not self._stopped.wait(self._interval_s):
            now_s = time.monotonic()
            passed_s = min(now_s - before_s, self._interval_s + _ANSWER_S)
            before_s = now_s
            self._awake_s += passed_s
            self._silent_s = self._silent_s + passed_s if self.board.silent_s > 0.1 else 0.0
            failure = self._look()
            if self._stopped.is_set():
                return
            if failure is not None:
                self._post(failure)
            if self.failure is not None:
                self._end()
                return

    def _look(self) -> Failure | None:
        """One round: own beat out, others' in."""
        self._give_up_a_store_that_is_gone()
        place = self.place
        self._beats += 1
        beat = {"n": self._beats, "place": str(place)}
        self.board.post(_beat(self.rank), json.dumps(beat))
        told = self.board.read("failure")
        if told:
            return Failure.from_json(told)
        if place is not self._at[0]:
            self._at = (place, self._awake_s)
        return self._store() or self._processes() or self._next_rank() or self._left_alone()

    def _give_up_a_store_that_is_gone(self) -> None:
        """Torch logs long C++ stacks when it asks a store whose process has ended."""
        first = self._peer(0)
        if first is None or _store_is_at_agent():
            return
        if first.has_ended():
            self.board.give_up("the store of torch.distributed has ended with rank 0")
        else:  # later it cannot be read any more
            self._first_beat = self.board.read(_beat(0)) or self._first_beat

    def _store(self) -> Failure | None:
        assert self.timeout_s is not None
        if 0 in self._done or (self.board.broken is None and self.board.read("over") is not None):
            self._done.add(0)  # then the store may go with rank 0
            return None
        by_agent = _store_is_at_agent()
        rank = None if by_agent else 0
        where = "torchrun, which holds the store of torch.distributed," if by_agent else ""
        if self.board.broken is not None:
            first = self._peer(0)
            if not by_agent and first is not None:
                if not first.has_ended():
                    return Failure(rank=None, what=self.board.broken)
                return None  # its death is seen by `_processes`
            return Failure(rank=rank, what=f"{where} died: the connection to it is lost".strip())
        if self._silent_s >= self.timeout_s:
            return Failure(
                rank=rank,
                what=f"{where} has not answered for {self._silent_s:.1f} s".strip(),
                place=None if by_agent else _place_in(self._first_beat),
            )
        return None

    def _processes(self) -> Failure | None:
        """Ranks of this machine whose process has ended; the first one looks at all of them."""
        first = all(p.rank > self.rank for p in self._peers)
        following = next((p for p in self._peers if p.rank > self.rank), None)
        leader = self._peers[0] if self._peers and not first else None
        for peer in self._peers:
            if not first and peer not in (following, leader):
                continue
            if peer.rank in self._done or not peer.has_ended():
                continue
            beat = self.board.read(_beat(peer.rank)) or (None if peer.rank else self._first_beat)
            if beat == _DONE:
                self._done.add(peer.rank)
            elif first or peer is leader or peer.rank in self._suspected:
                return Failure(rank=peer.rank, what=peer.how_it_ended(), place=_place_in(beat))
            else:
                # The first rank may be its parent and knows what ended it: let it speak.
                self._suspected.add(peer.rank)
        return None

    def _next_rank(self) -> Failure | None:
        assert self.timeout_s is not None
        around = ((self.rank + step) % self.world_size for step in range(1, self.world_size))
        following = next((rank for rank in around if rank not in self._done), None)
        if following is None:
            return None
        beat = self.board.read(_beat(following))
        if beat == _DONE:
            self._done.add(following)
            self._left_s = self._awake_s if self._left_s is None else self._left_s
            return None
        if following != self._seen[0] or beat not in (None, self._seen[1]):
            self._seen = (following, beat, self._awake_s)
            return None
        silent_s = self._awake_s - self._seen[2]
        if silent_s < self.timeout_s or self.board.trouble is not None:
            return None
        peer = self._peer(following)
        stopped = " (its process is stopped)" if peer is not None and peer.is_stopped() else ""
        return Failure(
            rank=following,
            what=f"has not answered for {silent_s:.1f} s{stopped}",
            place=_place_in(beat if beat is not None else self._seen[1]),
        )

    def _left_alone(self) -> Failure | None:
        """Another rank has ended its run, and this one waits in an iteration."""
        assert self.timeout_s is not None
        place, since_s = self._at
        if self._left_s is None or not place.in_iteration:
            return None
        if self._awake_s - max(since_s, self._left_s) < self.timeout_s:
            return None
        what = f"has ended its run while rank {self.rank} is in: {place}"
        return Failure(rank=min(self._done), what=what, raised=True)

    def _post(self, failure: Failure) -> None:
        """Make a failure known; what another rank has posted before counts."""
        stands = self.board.post_once("failure", failure.to_json())
        self.failure = failure if not stands else Failure.from_json(stands)
        after_a_failure([peer for peer in self._peers if peer.is_child()])
        self._known.set()

    def _who_is_silent(self, error: BaseException) -> Failure:
        """After a lost connection that nobody has explained: whose beats have stopped?"""
        own = Failure(
            rank=self.rank,
            what=f"lost its connection to another rank ({in_words(error)})",
            place=str(self.place),
            raised=True,
        )
        if self.board.post_once("asking", str(self.rank)) != str(self.rank):
            # Another rank asks already: one in a thousand is enough.
            self._known.wait(3 * self._interval_s)
            return own
        keys = [_beat(rank) for rank in range(self.world_size)]
        before = self.board.read_all(keys)
        time.sleep(2.5 * self._interval_s)
        now = self.board.read_all(keys)
        if before is None or now is None:
            return own
        for rank, (old, new) in enumerate(zip(before, now, strict=True)):
            if old == new != _DONE and rank != self.rank:
                return Failure(
                    rank=rank, what="shows no sign of life any more", place=_place_in(new)
                )
        return own

    def _peer(self, rank: int | None) -> Peer | None:
        return next((peer for peer in self._peers if peer.rank == rank), None)

    def _sentence(self, failure: Failure) -> str:
        return f"{failure} Training cannot go on without it; start again from the last checkpoint."

    def _end(self) -> None:
        """See to it that this process ends, by itself if it can."""
        failure = self.failure
        assert failure is not None
        if failure.raised and not self._ending:
            self._stopped.wait(_ALIKE_S)
        if self._stopped.is_set():
            return
        if failure.rank == self.rank and not self._ending:
            tell(self.rank, f"the other ranks have given this one up: {failure}")
        elif not self._ending:
            tell(self.rank, self._sentence(failure) + f" This rank is in: {self.place}.")
        lost = self._peer(failure.rank)
        if lost is not None and not failure.raised:
            lost.kill()  # a stopped process would stay for ever, with all its memory
        waited_s = 0.0
        while not self._stopped.wait(0.1):
            waited_s += 0.1
            limit_s = _ENDING_S if self._ending else _GRACE_S
            if waited_s >= (max(limit_s, _BUSY_S) if self._busy else limit_s):
                end_process(
                    self.rank,
                    f"{failure} This rank still is in: {self.place}; it is ended.",
                    [peer for peer in self._peers if peer.is_child()],
                )


def _store_is_at_agent() -> bool:
    """Whether torchrun keeps the store, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _beat(rank: int) -> str:
    return f"beat/{rank}"


def _place_in(beat: str | None) -> str | None:
    return None if not beat or beat == _DONE else str(json.loads(beat)["place"])

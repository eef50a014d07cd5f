"""Where the strategy finds the plans of a stream, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lightning_dcp.data.batch import IterationBatch
from lightning_dcp.data.streams.buffer import Buffer
from lightning_dcp.data.streams.checking import Findings, check_reading
from lightning_dcp.data.streams.exchange import Exchange
from lightning_dcp.data.streams.passed import Passed, Start
from lightning_dcp.data.streams.reading import StreamReader
from lightning_dcp.data.streams.records import unpack
from lightning_dcp.data.streams.session import Session
from lightning_dcp.data.streams.sharding import Shard
from lightning_dcp.data.streams.state import StreamState
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.plan import Plan
from lightning_dcp.planning.planner import EpochPlanner
from lightning_dcp.planning.stream import StreamPlanner, reference_lengths

__all__ = ["Continuation", "Examples", "StreamPlans"]

_NUM_EXAMPLES = 64


@dataclass(frozen=True)
class Continuation:
    """How an epoch that was interrupted goes on.

    Attributes:
        told: What the user is to be told; "" where all is as if nothing had happened.
        exact: Whether each sample is trained on exactly once.
    """

    told: str = ""
    exact: bool = True


@dataclass(frozen=True)
class Examples:
    """Some of the first samples, on all ranks, to be read by their place.

    Attributes:
        lengths: (n,) of each.
        content: (n,) packed.
    """

    lengths: IntArray
    content: list[bytes]

    def __len__(self) -> int:
        return len(self.content)

    def __getitem__(self, place: int) -> Any:
        return unpack(self.content[place])


@dataclass
class StreamPlans:
    """The plans of a stream: made while it is read, the same on all ranks.

    Stands where a `PlanSampler` stands for a map-style data set: Lightning calls `set_epoch`, the
    strategy asks for `plan`.

    Args:
        reader: Of this rank.
        exchange: Between ranks.
        shard: This rank's part.
        chunk: Samples that a worker hands over at once.
        lookahead_steps: Steps' worth of tokens that wait, at most.
        epoch: The epoch of iterators that are made before `set_epoch` is called.
        tell: Shows a warning to the user.
    """

    reader: StreamReader
    exchange: Exchange
    shard: Shard
    chunk: int
    lookahead_steps: int
    epoch: int = 0
    tell: Callable[[str], None] = field(default=lambda text: None)

    def __post_init__(self) -> None:
        self.planner: StreamPlanner | None = None
        #: The epoch that is read now.
        self.session: Session | None = None
        self._first: Buffer | None = None
        self._first_epoch = self.epoch
        self._saved: StreamState | None = None
        self._begin_at: tuple[int, int] | None = None
        self._told: set[str] = set()
        self._replanned = False
        #: Number of the iterator in use; earlier ones are not to be used any more.
        self.iterator = 0

    # ---- before there is a planner ---------------------------------------------------------------

    def look_ahead(self, *, tokens: int = 0, samples: int = 0) -> IntArray:
        """Read the first samples; a collective.

        Args:
            tokens: Of each rank.
            samples: Of each rank.

        Returns:
            The lengths of those of all ranks.
        """
        self.reader.begin(self.epoch)
        self._first, self._first_epoch = Buffer(self.reader, self.exchange), self.epoch
        self._first.fill(tokens=tokens, samples=samples)
        return self._first.lengths

    def check(self, name: str) -> Findings:
        """Whether each sample comes from one rank; a collective."""
        everyone = self.exchange.gather_objects(self.reader.checks)
        by_rank = [everyone[place] for place in np.argsort(self.exchange.ranks)]
        return check_reading(by_rank, by_index=self.shard.by_index, name=name)

    def examples(self) -> Examples:
        """Some of the first samples, of all lengths; a collective."""
        assert self._first is not None
        lengths = self._first.lengths
        by_length = np.argsort(lengths, kind="stable")
        num = min(_NUM_EXAMPLES, lengths.size)
        places = by_length[np.linspace(0, lengths.size - 1, num).round().astype(np.int64)]
        chosen = np.unique(places)
        ids = self._first.ids[chosen].tolist()
        content = self._first.bring([ids] * self.exchange.world_size)
        return Examples(lengths[chosen], [content[i] for i in ids])

    def reference(self) -> IntArray:
        """Lengths for the first planner."""
        assert self._first is not None
        return reference_lengths(self._first.lengths)

    # ---- as a sampler ----------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iterator belongs to."""
        self.epoch = epoch

    def plan(self, epoch: int, iteration: int) -> Plan:
        """The plan of an iteration that was fetched lately.

        Raises:
            IndexError: It was not.
        """
        session = self.session
        if session is not None and session.epoch == epoch:
            for plan in session.plans:
                if plan.iteration == iteration:
                    return plan
        raise IndexError(f"Iteration {iteration} of epoch {epoch} is not among those fetched last.")

    def plan_of(self, batch: IterationBatch) -> Plan:
        """The plan by which a batch was made; see `plan`."""
        return self.plan(batch.epoch, batch.iteration)

    def begin(self) -> Session:
        """A new iterator: of the epoch, or of what is left of it; a collective."""
        assert self.planner is not None
        self.iterator += 1
        again, self._replanned = self._replanned, False
        if again and self.session is not None and self.session.epoch == self.epoch:
            return self.session
        saved, self._saved = self._saved, None
        begin_at, self._begin_at = self._begin_at, None
        first, self._first = self._first, None
        iteration = 0
        if begin_at is not None and begin_at[0] == self.epoch:
            iteration = begin_at[1]
        if saved is not None and saved.epoch == self.epoch and saved.iteration:
            self.session = self._resumed(saved)
            return self.session
        if first is None or self._first_epoch != self.epoch:
            self.reader.begin(self.epoch)
            first = Buffer(self.reader, self.exchange)
        self.session = self._make_session(first, iteration, ())
        return self.session

    def replan(self, planner: EpochPlanner, iteration: int) -> None:
        """Plan by another planner, from an iteration on that is running or was fetched.

        The next iterator goes on with that iteration. Alike on all ranks.

        Args:
            planner: Takes the place of the one in use.
            iteration: The first to be planned again. One that has just ended is not among them.
        """
        assert self.planner is not None and self.session is not None
        self.planner.set_planner(planner)
        self.session.replan(self.planner, iteration)
        self._replanned = True

    @property
    def planner_in_use(self) -> EpochPlanner:
        """Makes the plans now: with the corrections of a checkpoint that was resumed."""
        assert self.planner is not None
        return self.planner.planner

    def close(self) -> None:
        """End the workers."""
        self.reader.close()

    # ---- checkpoints -----------------------------------------------------------------------------

    def state(self, epoch: int, iteration: int, limit: float) -> StreamState | None:
        """For a checkpoint; the same on all ranks.

        Args:
            epoch: The running epoch.
            iteration: How many iterations of it were run.
            limit: How many it has at most.
        """
        session = self.session
        if session is not None and session.epoch == epoch:
            return session.state(iteration, how=self.shard.how, limit=limit)
        assert self.planner is not None
        shape = (self.exchange.world_size, self.reader.num_workers)
        nothing = np.empty(0, dtype=np.int64)
        return StreamState(
            epoch=epoch,
            iteration=0,
            unfinished=True,
            world_size=shape[0],
            num_workers=shape[1],
            chunk=self.chunk,
            how=self.shard.how,
            read=np.zeros(shape, dtype=np.int64),
            finished=np.zeros(shape, dtype=np.int64),
            ids=nothing,
            lengths=nothing,
            plans=(),
            passed=(),
            reference=self.planner.reference,
            tokens_per_step=self.planner.tokens_per_step,
            corrections=self.planner.corrections,
            inputs=self.planner.planner.inputs,
        )

    def resume(self, saved: StreamState | None, epoch: int, iteration: int) -> Continuation:
        """Let the next iterator go on where a run was interrupted. Alike on all ranks.

        Args:
            saved: What the checkpoint says of the stream; None: nothing.
            epoch: Where Lightning goes on.
            iteration: How many iterations of it were run.
        """
        assert self.planner is not None
        self.epoch = epoch
        self._saved, self._begin_at = None, (epoch, iteration)
        if saved is not None and saved.world_size == self.exchange.world_size:
            if saved.corrections is not None:
                self.planner.set_corrections(saved.corrections, saved.inputs["cost profile"])
            self.planner.set_reference(saved.reference)
        if not iteration:
            return Continuation()
        if saved is None or (saved.epoch, saved.iteration) != (epoch, iteration):
            return Continuation(
                f"DCP: the checkpoint does not say which samples of the stream epoch {epoch} has"
                " consumed. The stream is read from its start again: samples are repeated.",
                exact=False,
            )
        why = self._cannot_go_on(saved)
        if why:
            return Continuation(
                f"DCP: {why} Epoch {epoch} reads the stream from its start again: samples are"
                " repeated.",
                exact=False,
            )
        if saved.inputs != self.planner.planner.inputs:
            # Other options, limits or costs: what was planned may not fit any more.
            saved = replace(saved, plans=())
        self._saved = saved
        num = int(saved.read.sum() - saved.ids.size)
        if saved.world_size != self.exchange.world_size:
            return Continuation(
                f"DCP: the stream was read by {saved.world_size} ranks before and is read by"
                f" {self.exchange.world_size} now. Samples that epoch {epoch} has not consumed are"
                " planned anew, each once."
            )
        if saved.snapshots:
            return Continuation()
        return Continuation(
            f"DCP: passing over {num} samples of the stream that epoch {epoch} has consumed. They"
            " are read again, unless the data set has `state_dict` and `load_state_dict`."
        )

    def _cannot_go_on(self, saved: StreamState) -> str:
        if saved.how != self.shard.how:
            return f"the stream was sharded by {saved.how} before and is by {self.shard.how} now."
        if saved.num_workers != self.reader.num_workers:
            return (
                f"the stream was read by {saved.num_workers} worker(s) per rank before and is by"
                f" {self.reader.num_workers} now, which read it in another order."
            )
        if saved.world_size != self.exchange.world_size and not self.shard.by_index:
            return (
                f"the stream, which shards itself ({self.shard.how}), was read by"
                f" {saved.world_size} ranks before and is by {self.exchange.world_size} now."
            )
        return ""

    def _resumed(self, saved: StreamState) -> Session:
        rank, by_index = self.exchange.rank, self.shard.by_index
        same = saved.world_size == self.exchange.world_size
        passed = (*saved.passed, saved.as_passed(None if by_index else rank))
        snapshots: dict[int, list[tuple[int, Any]]] = {}
        for source, worker, index, state in saved.snapshots:
            if source == rank and same:
                snapshots.setdefault(worker, []).append((index, state))
        self.reader.begin(saved.epoch, Start(passed=passed, snapshots=snapshots))
        buffer = Buffer(self.reader, self.exchange)
        if not same:
            return self._make_session(buffer, saved.iteration, passed)
        session = self._make_session(buffer, saved.iteration, saved.passed)
        session.resume(saved)
        return session

    def _make_session(self, buffer: Buffer, iteration: int, passed: Sequence[Passed]) -> Session:
        assert self.planner is not None
        return Session(
            buffer,
            self.planner,
            self.exchange,
            self.epoch,
            self.lookahead_steps,
            iteration=iteration,
            chunk=self.chunk,
            stride=self.shard.stride,
            passed=passed,
            tell=self._tell_once,
        )

    def _tell_once(self, text: str) -> None:
        kind = text[:40]
        if kind not in self._told:
            self._told.add(kind)
            self.tell(text)

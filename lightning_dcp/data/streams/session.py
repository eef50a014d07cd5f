"""One epoch of a stream: filled, planned and handed out window by window.

::

    fill     each rank reads its part, until together about `lookahead_steps` steps wait
    share    ranks tell each other the lengths
    plan     all ranks make the same plans of what waits; the first half of them is run
    bring    iteration by iteration, samples move to the ranks that run them

Samples of the second half stay in the buffer and are planned again with those that follow, oldest
first: so the end of a window makes no small steps, and no sample waits for longer than a window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_dcp.data.streams.buffer import Buffer, ReadState
from lightning_dcp.data.streams.exchange import Exchange
from lightning_dcp.data.streams.passed import Passed
from lightning_dcp.data.streams.records import unpack
from lightning_dcp.data.streams.state import StreamState
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.plan import Plan
from lightning_dcp.planning.stream import StreamPlanner, TooLong

__all__ = ["Fetched", "Session"]

#: Windows and iterations that are remembered: Lightning fetches one iteration ahead.
_REMEMBERED = 3


@dataclass(frozen=True)
class Fetched:
    """One iteration of this rank.

    Attributes:
        plan: Of all ranks.
        samples: For each micro-batch of this rank, its samples.
        cut_to: For each of them, the length that each sample is to be cut to; 0: it is not cut.
    """

    plan: Plan
    samples: list[list[Any]]
    cut_to: list[list[int]]


@dataclass(frozen=True)
class _Window:
    """What was known when plans were made."""

    first_iteration: int
    plans: tuple[Plan, ...]
    ids: IntArray
    lengths: IntArray
    state: ReadState
    reference: IntArray
    corrections: Mapping[str, Any] | None
    inputs: Mapping[str, str]


@dataclass
class Session:
    """One epoch, on one rank.

    Args:
        buffer: What waits.
        planner: Plans windows.
        exchange: Between ranks.
        epoch: The epoch.
        lookahead_steps: Steps' worth of tokens that wait, at most.
        iteration: Number of the first iteration.
        chunk: Samples that a worker hands over at once.
        stride: Every how many-th sample that a rank reads is its own.
        passed: What was trained on by runs of another number of ranks.
        tell: Shows a warning to the user, once per text.
    """

    buffer: Buffer
    planner: StreamPlanner
    exchange: Exchange
    epoch: int
    lookahead_steps: int
    iteration: int = 0
    chunk: int = 1
    stride: int = 1
    passed: Sequence[Passed] = ()
    tell: Callable[[str], None] = field(default=lambda text: None)

    def __post_init__(self) -> None:
        self._queue: deque[Plan] = deque()
        self._fetched: deque[Plan] = deque()
        self._windows: deque[_Window] = deque(maxlen=_REMEMBERED)
        #: Iteration -> the samples of this rank, of what was fetched lately.
        self._content: dict[int, dict[int, bytes]] = {}
        #: Ids of samples -> their lengths, of what was fetched lately.
        self._lengths: dict[int, int] = {}
        self._note_window(())  # whatever is saved before the first one is as far as an epoch was

    @property
    def plans(self) -> Sequence[Plan]:
        """Of the iterations that were fetched last."""
        return tuple(self._fetched)

    def next(self) -> Fetched | None:
        """The next iteration; None where all ranks have none. A collective."""
        if not self._queue:
            self._plan_window()
        if not self._queue:
            return None
        plan = self._queue.popleft()
        self.iteration = plan.iteration + 1
        return self._fetch(plan)

    def again(self, plan: Plan) -> Fetched:
        """An iteration that was fetched lately, the same samples on the same ranks."""
        return self._unpacked(plan, self._content[plan.iteration])

    def over_after(self, iteration: int) -> bool:
        """Whether an iteration, which was fetched lately, is known to be the last."""
        last = self._windows[-1] if self._windows else None
        if last is None or not last.state.ended.all():
            return False
        return iteration >= last.first_iteration + len(last.plans) and not len(
            np.setdiff1d(last.ids, _ids_of(last.plans))
        )

    def replan(self, planner: StreamPlanner, iteration: int) -> None:
        """Plan again from an iteration on that is running or was fetched; alike on all ranks.

        Args:
            planner: Makes the plans from now on.
            iteration: The first to be planned again; its samples and those of the ones behind it
                wait again.
        """
        self.planner = planner
        again = [plan for plan in self._fetched if plan.iteration >= iteration]
        self._fetched = deque(plan for plan in self._fetched if plan.iteration < iteration)
        ids = _ids_of([*again, *self._queue])
        self._queue.clear()
        self.buffer.put_back(ids, np.array([self._lengths[i] for i in ids.tolist()], np.int64))
        self.iteration = iteration
        # Those before it are kept: the iteration that runs may fail, and is then saved by them.
        while self._windows and self._windows[-1].first_iteration >= iteration:
            self._windows.pop()
        self._note_window(())  # whatever is saved before the next one is what waits now

    def resume(self, state: StreamState) -> None:
        """Go on where an interrupted run was, sample by sample; a collective.

        Raises:
            RuntimeError: The stream gives other samples than it did.
        """
        for rank, worker, index, snapshot in state.snapshots:
            self.buffer.snapshots.setdefault((rank, worker), []).append((index, snapshot))
        self.buffer.restore(state.ids.tolist())
        if not np.array_equal(self.buffer.lengths, state.lengths):
            place = int(np.flatnonzero(self.buffer.lengths != state.lengths)[0])
            raise RuntimeError(
                f"{self.buffer.names.name(int(state.ids[place]))} had"
                f" {int(state.lengths[place])} tokens when the checkpoint was saved and has"
                f" {int(self.buffer.lengths[place])} now. To go on, a stream must give the same"
                " samples in the same order again: shuffle by a seed, not by time or by process."
            )
        # What a rank has read beyond that is where it was in the interrupted run.
        self.buffer.state = ReadState(state.read, state.finished)
        self._open_window(tuple(state.plans))

    def state(self, iteration: int, *, how: str, limit: float) -> StreamState | None:
        """For a checkpoint: everything after an iteration, the last that was run or before it.

        Args:
            iteration: How many iterations were run.
            how: `Shard.how`.
            limit: Iterations that the epoch has at most.

        Returns:
            None where the iteration is too long ago.
        """
        window = next((w for w in reversed(self._windows) if w.first_iteration <= iteration), None)
        if window is None:
            return None
        ran = iteration - window.first_iteration
        if ran > len(window.plans):
            return None
        keep = ~np.isin(window.ids, _ids_of(window.plans[:ran]))
        names = self.buffer.names
        return StreamState(
            epoch=self.epoch,
            iteration=iteration,
            unfinished=iteration < limit and not self.over_after(iteration),
            world_size=names.world_size,
            num_workers=names.num_workers,
            chunk=self.chunk,
            how=how,
            read=window.state.read,
            finished=window.state.finished,
            ids=window.ids[keep],
            lengths=window.lengths[keep],
            plans=window.plans[ran:],
            passed=tuple(self.passed),
            reference=window.reference,
            tokens_per_step=self.planner.tokens_per_step,
            corrections=window.corrections,
            inputs=window.inputs,
            snapshots=tuple(
                (rank, worker, *snapshot)
                for (rank, worker), found in sorted(self.buffer.snapshots.items())
                for snapshot in found
            ),
        )

    # ---- one window ------------------------------------------------------------------------------

    def _plan_window(self) -> None:
        """Fill the buffer, and plan what can be run of it; a collective."""
        steps_of = self.lookahead_steps
        while True:
            active = int((~self.buffer.state.ended).sum())
            samples = self.planner.samples_per_step
            if active and samples is not None:
                self.buffer.fill(samples=-(-steps_of * samples // active))
            elif active:
                self.buffer.fill(tokens=-(-steps_of * self.planner.tokens_per_step // active))
            planned = self._fit()
            rest = bool(self.buffer.state.ended.all())
            if not planned.size and rest:
                self._open_window(())
                return
            steps = self.planner.num_steps(planned, rest=rest) if planned.size else 0
            if steps or rest:
                break
            steps_of *= 2  # samples were left out, or are too few for a step
        plans = self.planner.plan(
            planned,
            self.buffer.ids,
            epoch=self.epoch,
            first_iteration=self.iteration,
            num_steps=steps,
            rest=rest,
        )
        num = len(plans) if rest else -(-len(plans) // 2)
        self._open_window(tuple(plans[i] for i in range(num)))

    def _fit(self) -> IntArray:
        """(n,) lengths of what waits, as planned; what is left out does not wait any more."""
        buffer = self.buffer
        if not buffer.ids.size:
            return buffer.lengths
        try:
            planned = self.planner.fit(buffer.lengths)
        except TooLong as error:
            name = buffer.names.name(int(buffer.ids[error.place]))
            raise ValueError(
                f"{name[0].upper()}{name[1:]} has {int(buffer.lengths[error.place])} tokens and"
                f" fits no configuration; the longest that fits has {error.most}. Set"
                ' on_too_long="skip" or "truncate", raise memory_limit_bytes, or use more ranks,'
                " so that larger SP sizes are possible."
            ) from error
        out = planned == 0
        if out.any():
            ids = buffer.ids[out].tolist()
            self.tell(
                f"DCP: on_too_long='skip' leaves out {buffer.names.name(ids[0])} with"
                f" {int(buffer.lengths[out][0])} tokens, which does not fit into memory, and all"
                f" that are longer than {self.planner.planner.truncate_to} tokens."
            )
            buffer.take(ids)
            buffer.forget(ids)
            for i in ids:
                self._lengths.pop(i, None)
        elif not np.array_equal(planned, buffer.lengths):
            self.tell(
                "DCP: on_too_long='truncate' cuts samples to"
                f" {self.planner.planner.truncate_to} tokens, the longest that fit into memory."
            )
        return np.asarray(planned[~out])

    def _open_window(self, plans: tuple[Plan, ...]) -> None:
        buffer = self.buffer
        self._note_window(plans)
        buffer.forget_snapshots(min(self._oldest(w) for w in self._windows))
        ids = _ids_of(plans)
        self._lengths.update(zip(buffer.ids.tolist(), buffer.lengths.tolist(), strict=True))
        buffer.take(ids.tolist())
        self._queue.extend(plans)

    def _note_window(self, plans: tuple[Plan, ...]) -> None:
        self._windows.append(
            _Window(
                plans[0].iteration if plans else self.iteration,
                plans,
                self.buffer.ids,
                self.buffer.lengths,
                self.buffer.state,
                self.planner.reference,
                self.planner.corrections,
                self.planner.planner.inputs,
            )
        )

    def _oldest(self, window: _Window) -> int:
        """Index in the data set from which on samples may be read again for a window."""
        places = window.ids // (self.exchange.world_size * self.buffer.names.num_workers)
        reading = window.state.read[window.state.finished == 0]
        place = min([*places[:1].tolist(), *reading.tolist()], default=0)
        return int(place) // self.chunk * self.chunk * self.stride

    def _fetch(self, plan: Plan) -> Fetched:
        """Bring the samples of an iteration to this rank; a collective."""
        self._fetched.append(plan)
        while len(self._fetched) > _REMEMBERED:
            gone = self._fetched.popleft()
            self._content.pop(gone.iteration, None)
            old = _ids_of([gone]).tolist()
            self.buffer.forget(old)
            for i in old:
                self._lengths.pop(i, None)
        wanted: list[list[int]] = [[] for _ in range(self.exchange.world_size)]
        for micro_batch in plan.micro_batches:
            for rank in micro_batch.ranks:
                wanted[rank].extend(micro_batch.sample_ids)
        content = self._content[plan.iteration] = self.buffer.bring(wanted)
        return self._unpacked(plan, content)

    def _unpacked(self, plan: Plan, content: Mapping[int, bytes]) -> Fetched:
        most = self.planner.planner.truncate_to
        own = plan.for_rank(self.exchange.rank)
        return Fetched(
            plan,
            [[unpack(content[i]) for i in m.sample_ids] for m in own],
            [[self._cut(i, most) for i in m.sample_ids] for m in own],
        )

    def _cut(self, sample_id: int, most: int | None) -> int:
        length = self._lengths[sample_id]
        return most if most is not None and length > most else 0


def _ids_of(plans: Sequence[Plan]) -> IntArray:
    return np.array(
        [i for plan in plans for m in plan.micro_batches for i in m.sample_ids], dtype=np.int64
    )

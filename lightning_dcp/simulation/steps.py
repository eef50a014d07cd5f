"""One optimizer step on a modelled cluster: what runs where and when, whoever decided it.

A planner of this package and a baseline from the literature both give a :class:`SimulatedStep`, so
that they are compared by the same rules: each sample once, aligned blocks of ranks, no rank that
does two things at once, and memory within the limit.

``W`` ranks. Seconds of the gradient reduction and the optimizer are the same for all and left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_dcp.planning.plan import Plan, busy_per_rank, idle_share

__all__ = [
    "SimulatedStep",
    "Task",
    "Unplaced",
    "from_plan",
    "place_in_order",
    "place_in_parts",
    "place_longest_first",
]

_TOLERANCE = 1e-9  # relative, for sums of seconds in another order


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A micro-batch that has its size and cost, but no ranks yet.

    Attributes:
        samples: Positions in the step's lengths.
        sp_size: Number of ranks that share it.
        recompute_blocks: How many blocks are recomputed.
        time_s: Predicted seconds.
        memory_bytes: Predicted peak bytes on each rank.
    """

    samples: tuple[int, ...]
    sp_size: int
    recompute_blocks: int
    time_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Task:
    """A micro-batch at its place: an aligned block of ranks from a point in time.

    Attributes:
        samples: Positions in the step's lengths.
        first_rank: First rank of the group; a multiple of ``sp_size``.
        sp_size: Number of ranks of the group.
        recompute_blocks: How many blocks are recomputed.
        time_s: Predicted seconds.
        memory_bytes: Predicted peak bytes on each rank of the group.
        start_s: When it starts, from the start of the step.
    """

    samples: tuple[int, ...]
    first_rank: int
    sp_size: int
    recompute_blocks: int
    time_s: float
    memory_bytes: int
    start_s: float

    def __post_init__(self) -> None:
        if not self.samples or min(self.samples) < 0:
            raise ValueError(
                f"samples must be at least one position, not negative; got {self.samples}."
            )
        if self.sp_size < 1 or self.first_rank < 0 or self.first_rank % self.sp_size:
            raise ValueError(
                f"first_rank must be a multiple of sp_size >= 1; got {self.first_rank} and "
                f"{self.sp_size}."
            )
        if self.recompute_blocks < 0 or self.memory_bytes < 0:
            raise ValueError(
                "recompute_blocks and memory_bytes must not be negative; got "
                f"{self.recompute_blocks} and {self.memory_bytes}."
            )
        if not (0 <= self.time_s < math.inf and 0 <= self.start_s < math.inf):
            raise ValueError(
                "time_s and start_s must be finite and not negative; got "
                f"{self.time_s} and {self.start_s}."
            )

    @property
    def ranks(self) -> range:
        """The ranks of the group."""
        return range(self.first_rank, self.first_rank + self.sp_size)

    @property
    def end_s(self) -> float:
        """When it ends."""
        return self.start_s + self.time_s


@dataclass(frozen=True)
class SimulatedStep:
    """All tasks of one optimizer step.

    Attributes:
        world_size: Number of ranks W.
        tasks: The tasks, in any order.
        makespan_s: Seconds until the last rank has finished.

    Raises:
        ValueError: No task, a sample or a rank's time is used twice, a rank outside the world, or a
            makespan that ends before the last task.
    """

    world_size: int
    tasks: tuple[Task, ...]
    makespan_s: float

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("A step needs at least one task; got none.")
        last = max(task.ranks.stop for task in self.tasks)
        if last > self.world_size:
            raise ValueError(f"A task uses rank {last - 1}; the world has {self.world_size}.")
        samples = [i for task in self.tasks for i in task.samples]
        if len(set(samples)) != len(samples):
            twice = sorted({i for i in samples if samples.count(i) > 1})
            raise ValueError(f"Samples {twice} are twice in the step.")
        end = max(task.end_s for task in self.tasks)
        if not end * (1 - _TOLERANCE) <= self.makespan_s < math.inf:
            raise ValueError(f"The last task ends at {end}; the makespan is {self.makespan_s}.")
        free = [0.0] * self.world_size
        for task in sorted(self.tasks, key=lambda task: task.start_s):
            if max(free[task.first_rank : task.ranks.stop]) > task.start_s + _TOLERANCE * end:
                raise ValueError(f"A rank of {task.ranks} is busy when {task} starts.")
            free[task.first_rank : task.ranks.stop] = [task.end_s] * task.sp_size

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of work per rank."""
        return busy_per_rank(self.world_size, ((task.ranks, task.time_s) for task in self.tasks))

    @property
    def idle_share(self) -> float:
        """``sum_ranks(makespan - busy) / (W * makespan)``: weighted by GPU."""
        return idle_share(self.busy_s, self.makespan_s)

    @property
    def num_samples(self) -> int:
        """Samples in the step."""
        return sum(len(task.samples) for task in self.tasks)

    @property
    def memory_bytes(self) -> int:
        """Largest predicted peak of any rank."""
        return max(task.memory_bytes for task in self.tasks)

    def check(self, num_samples: int, limit_bytes: int | None = None) -> None:
        """Check against what the step was made from.

        Raises:
            ValueError: Not exactly the samples ``0 .. num_samples - 1``, or memory over the limit.
        """
        samples = {i for task in self.tasks for i in task.samples}
        missing = sorted(set(range(num_samples)) - samples)
        extra = sorted(samples - set(range(num_samples)))
        if missing or extra:
            raise ValueError(
                f"The step should have each of {num_samples} samples once; missing {missing}, "
                f"unknown {extra}."
            )
        if limit_bytes is not None and self.memory_bytes > limit_bytes:
            raise ValueError(f"A task needs {self.memory_bytes} bytes; the limit is {limit_bytes}.")


def from_plan(plan: Plan, sample_ids: Sequence[int] | None = None) -> SimulatedStep:
    """The same step as a plan predicts it.

    Args:
        plan: One iteration.
        sample_ids: Dataset indices of the step's samples; a task then names a sample by its
            position in this sequence. Without it, by its dataset index.

    Raises:
        ValueError: The plan has a sample that ``sample_ids`` has not.
    """
    position = None
    if sample_ids is not None:
        position = {int(index): place for place, index in enumerate(sample_ids)}
        unknown = [i for m in plan.micro_batches for i in m.sample_ids if i not in position]
        if unknown:
            raise ValueError(f"Samples {sorted(unknown)} of the plan are not in sample_ids.")
    tasks = tuple(
        Task(
            samples=m.sample_ids if position is None else tuple(position[i] for i in m.sample_ids),
            first_rank=m.first_rank,
            sp_size=m.sp_size,
            recompute_blocks=m.recompute_blocks,
            time_s=m.est_time_s,
            memory_bytes=m.est_bytes,
            start_s=start,
        )
        for m, start in zip(plan.micro_batches, plan.start_s, strict=True)
    )
    return SimulatedStep(plan.world_size, tasks, plan.makespan_s)


def place_in_order(world_size: int, work: Iterable[tuple[Unplaced, int | None]]) -> SimulatedStep:
    """Run micro-batches in the order given, each as soon as all its ranks are free.

    Args:
        world_size: Ranks W.
        work: Each micro-batch with the first rank of its block; None takes the block that is free
            first (of several, the one whose ranks have waited least).
    """
    free = np.zeros(world_size)
    tasks = [_start(free, micro_batch, first_rank, None) for micro_batch, first_rank in work]
    return SimulatedStep(world_size, tuple(tasks), float(free.max()))


def place_longest_first(world_size: int, work: Iterable[Unplaced]) -> SimulatedStep:
    """List scheduling: largest groups first, the longest of each size first."""
    ordered = sorted(work, key=_largest_first)
    return place_in_order(world_size, [(micro_batch, None) for micro_batch in ordered])


def place_in_parts(world_size: int, parts: Sequence[Sequence[Unplaced]]) -> SimulatedStep:
    """Place methods that plan one round of groups after another (FlexSP, Megatron).

    Such a method finds, for each part, groups that run side by side on disjoint ranks. Where
    all ranks wait for each other after each part, a step takes the sum of the parts' makespans.
    Nothing in gradient accumulation asks for that, so here a group starts as soon as its own ranks
    are free, and the best of four placements is taken: parts in order or reversed on disjoint
    blocks (never slower than that sum), the same order on any block, and all groups longest first.

    Args:
        world_size: Ranks W.
        parts: Groups of each part; their sizes must sum to W at most.
    """
    sorted_parts = [sorted(part, key=_largest_first) for part in parts]
    flat = [(micro_batch, None) for part in sorted_parts for micro_batch in part]
    found = [
        _disjoint(world_size, sorted_parts),
        _disjoint(world_size, sorted_parts[::-1]),
        place_in_order(world_size, flat),
        place_longest_first(world_size, [micro_batch for micro_batch, _ in flat]),
    ]
    return min(found, key=lambda step: step.makespan_s)


def _largest_first(work: Unplaced) -> tuple[float, ...]:
    return -work.sp_size, -work.time_s, *work.samples


def _disjoint(world_size: int, parts: Sequence[Sequence[Unplaced]]) -> SimulatedStep:
    free = np.zeros(world_size)
    tasks: list[Task] = []
    for part in parts:
        # Larger groups first: whatever blocks they take, the rest stays whole for smaller ones.
        unused = np.ones(world_size, dtype=np.bool_)
        tasks.extend(_start(free, micro_batch, None, unused) for micro_batch in part)
    return SimulatedStep(world_size, tuple(tasks), float(free.max()))


def _start(
    free: npt.NDArray[np.float64],
    work: Unplaced,
    first_rank: int | None,
    unused: npt.NDArray[np.bool_] | None,
) -> Task:
    """Start a micro-batch; updates when ranks are ``free`` and which are ``unused``."""
    p = work.sp_size
    if first_rank is None:
        num_blocks = len(free) // p
        if num_blocks == 0:
            raise ValueError(f"A group of {p} ranks does not fit in a world of {len(free)}.")
        blocks = free[: num_blocks * p].reshape(num_blocks, p)
        ready = blocks.max(axis=1)
        if unused is not None:
            ready = np.where(unused[: num_blocks * p].reshape(num_blocks, p).all(1), ready, np.inf)
            if ready.min() == np.inf:
                raise ValueError(f"No block of {p} of the {len(free)} ranks is left in this part.")
        first = np.flatnonzero(ready <= ready.min())
        first_rank = int(first[np.argmax(blocks[first].sum(axis=1))]) * p
    block = slice(first_rank, first_rank + p)
    task = Task(
        samples=work.samples,
        first_rank=first_rank,
        sp_size=p,
        recompute_blocks=work.recompute_blocks,
        time_s=work.time_s,
        memory_bytes=work.memory_bytes,
        start_s=float(free[block].max(initial=0.0)),
    )
    free[block] = task.end_s
    if unused is not None:
        unused[block] = False
    return task

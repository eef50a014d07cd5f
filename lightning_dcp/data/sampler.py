"""Which samples this rank reads, iteration by iteration: the plan seen by one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_dcp.data.batch import IterationBatch, PlanKey
from lightning_dcp.planning.epoch import EpochPlan
from lightning_dcp.planning.rest import BoolArray, flags

if TYPE_CHECKING:
    from lightning_dcp.planning.plan import Plan


class Planner(Protocol):
    """What the data layer needs of a planner; `planning.planner.EpochPlanner` is one."""

    @property
    def num_iterations(self) -> int:
        """Iterations per epoch, the same for every epoch and rank."""

    def epoch(self, epoch: int) -> Sequence[Plan]:
        """The `num_iterations` plans of one epoch."""


@dataclass(frozen=True, kw_only=True)
class Rest:
    """Plans of what is left of an epoch, in place of its own: interrupted, or planned again.

    Attributes:
        epoch: The epoch.
        first_iteration: Iteration of the first plan.
        plans: None left is possible.
        consumed: (n,) which samples of the data set were trained on before the first plan.
    """

    epoch: int
    first_iteration: int
    plans: Sequence[Plan]
    consumed: BoolArray


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the running epoch is, sample by sample.

    Attributes:
        begun_at: The iteration from which the epoch's plans are those of what was left of it then;
            0 where it was planned as a whole.
        consumed_before: (n,) which samples had been trained on before `begun_at`.
        consumed: (n,) which samples have been trained on.
    """

    begun_at: int
    consumed_before: BoolArray
    consumed: BoolArray


def distributed_order(seed: int) -> Callable[[int, int], npt.NDArray[np.int64]]:
    """`(epoch, n)` to the shuffled order that `DistributedSampler(seed=seed)` deals out to ranks.

    Step i of a plain data-parallel run with `batch_size` samples per rank takes the places
    `i * batch_size * W` to `(i + 1) * batch_size * W` of it.
    """

    def order(epoch: int, num_samples: int) -> npt.NDArray[np.int64]:
        everything: Any = range(num_samples)
        sampler = DistributedSampler[Any](everything, num_replicas=1, rank=0, seed=seed)
        sampler.set_epoch(epoch)
        return np.fromiter(sampler, dtype=np.int64, count=num_samples)

    return order


class PlanSampler(DistributedSampler[Any]):
    """Yields, per iteration, the sample ids of each micro-batch that this rank runs.

    It is a `DistributedSampler` because that is the one kind of sampler that Lightning neither
    shards again nor replaces, and whose `set_epoch` it calls before each epoch. It needs no
    `torch.distributed`: rank and world size are given.

    The only state is `epoch`, and after `resume` or `replace` the iteration to go on with and what
    replaces the plans of that epoch: plans are a pure function of the epoch, so that a sampler made
    anew goes over the same keys. Each iterator belongs to one epoch and its keys say which.
    NOTE (early iterators): Lightning makes the first iterator, whose workers fetch at once, before
    it calls `set_epoch`; in a resumed run that would be the plan of epoch 0. Hence the `epoch`
    argument. For all later epochs Lightning calls `set_epoch` first.

    Args:
        planner: Gives the plans.
        rank: Global rank whose share is yielded.
        world_size: Number of ranks.
        epoch: The epoch of iterators made before `set_epoch` is called.

    Raises:
        ValueError: Rank or epoch out of range, or a planner without iterations.
    """

    def __init__(self, planner: Planner, *, rank: int, world_size: int, epoch: int = 0) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"`rank` must be in [0, {world_size}), got {rank}.")
        if epoch < 0:
            raise ValueError(f"`epoch` must not be negative, got {epoch}.")
        if planner.num_iterations < 1:
            raise ValueError(f"The planner gives {planner.num_iterations} iterations per epoch.")
        # The base class wants something sized to cut into equal parts: here, one part per rank of
        # all ranks' iterations.
        everything: Any = range(planner.num_iterations * world_size)
        super().__init__(everything, num_replicas=world_size, rank=rank, shuffle=False)
        self.planner = planner
        self.epoch = epoch
        self._planned: dict[int, Sequence[Plan]] = {}
        self._first_iteration = 0
        self._rest: Rest | None = None
        self._when_over: Callable[[], None] | None = None
        self._running: Plan | None = None
        #: How often plans were replaced: keys and batches say by which plans they were made.
        self.version = 0

    def resume(
        self,
        epoch: int,
        iteration: int,
        rest: Rest | None = None,
        when_over: Callable[[], None] | None = None,
    ) -> None:
        """Let iterators of an epoch begin in the middle of it; those of later epochs begin at 0.

        Args:
            epoch: The epoch that was interrupted.
            iteration: The first iteration that has not been run.
            rest: Takes the place of the epoch's plans from its first iteration on.
            when_over: Called when the epoch after one with a `rest` begins, whose number of
                iterations is the ordinary one again.
        """
        self._rest = None
        self.set_epoch(epoch)
        self._first_iteration = iteration
        self._rest = rest
        self._when_over = when_over
        self._running = None
        self.version += 1

    def replace(
        self, planner: Planner, rest: Rest, when_over: Callable[[], None] | None = None
    ) -> None:
        """Let the running epoch go on with a rest, and later epochs with another planner.

        Iterators that were made before end with an error: they have handed out keys of plans that
        are not followed any more.

        Args:
            planner: Gives the plans of the epochs to come.
            rest: Of the running epoch. The iteration before its first is the one that runs now,
                whose plan stays to be had.
            when_over: As in `resume`.
        """
        iteration = rest.first_iteration
        running = self.plan(self.epoch, iteration - 1) if iteration else None
        self.use(planner)
        self.resume(rest.epoch, iteration, rest, when_over)
        self._running = running

    def use(self, planner: Planner) -> None:
        """Take plans from another planner, except those of a rest; for iterators yet to be made."""
        self.planner = planner
        self._planned = {}

    @override
    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._first_iteration = 0  # nothing may have been left of the epoch resumed
        super().set_epoch(epoch)
        if self._rest is not None and epoch != self._rest.epoch:
            self._rest = self._running = None
            if self._when_over is not None:
                self._when_over()

    @property
    def rest(self) -> Rest | None:
        """What replaces the plans of the running epoch from some iteration on; mostly None."""
        return self._rest

    @override
    def __len__(self) -> int:
        """Iterations of the epoch, the same for every rank, and for every epoch without a rest."""
        if self._rest is not None:
            return self._rest.first_iteration + len(self._rest.plans)
        return self.planner.num_iterations

    def plan(self, epoch: int, iteration: int) -> Plan:
        """The plan of one iteration."""
        rest = self._rest
        if rest is None or epoch != rest.epoch:
            return self.plans(epoch)[iteration]
        if iteration >= rest.first_iteration:
            return rest.plans[iteration - rest.first_iteration]
        if self._running is not None and iteration == self._running.iteration:
            return self._running
        raise IndexError(
            f"The plan of iteration {iteration} of epoch {epoch} is gone: the epoch goes on with"
            f" other plans from iteration {rest.first_iteration} on."
        )

    def plan_of(self, batch: IterationBatch) -> Plan:
        """The plan by which a batch was made.

        Raises:
            RuntimeError: The plans were replaced since.
        """
        if batch.version != self.version:
            raise RuntimeError(
                f"The train loader delivered a batch of iteration {batch.iteration} of epoch"
                f" {batch.epoch} made by plans that were replaced since. Take batches from"
                " an iterator that was made after that: `iter(loader)`."
            )
        return self.plan(batch.epoch, batch.iteration)

    def progress(self, iteration: int, num_samples: int) -> Progress:
        """What the running epoch has consumed before an iteration, and by which plans.

        Args:
            iteration: From the one on that ran when plans were replaced last.
            num_samples: Of the data set.
        """
        rest = self._rest
        if rest is None:
            before, begun_at = np.zeros(num_samples, dtype=bool), 0
        else:
            before, begun_at = rest.consumed, rest.first_iteration
        if iteration < begun_at and self._running is not None:
            # The iteration that ran when plans were replaced has failed since, or is not over: it
            # is still to come, and with the others that are left it is planned again.
            running = self.plan(self.epoch, iteration)
            before = before & ~flags(_sample_ids([running]), num_samples)
        begun_at = min(begun_at, iteration)
        consumed = before
        if iteration > begun_at:
            plans = self.plans(self.epoch) if rest is None else rest.plans
            stop = iteration - begun_at
            ran = (
                plans.sample_ids(stop)
                if isinstance(plans, EpochPlan)
                else _sample_ids(plans[:stop])
            )
            consumed = before | flags(ran, num_samples)
        return Progress(begun_at=begun_at, consumed_before=before, consumed=consumed)

    def plans(self, epoch: int) -> Sequence[Plan]:
        """The plans of a whole epoch, made once: iterators and whoever runs them share them.

        Raises:
            RuntimeError: The planner made another number of plans than it promised.
        """
        if epoch not in self._planned:
            plans = self.planner.epoch(epoch)
            if len(plans) != self.planner.num_iterations:
                raise RuntimeError(
                    f"The planner made {len(plans)} plans for epoch {epoch}, but promised "
                    f"{self.planner.num_iterations} for every epoch."
                )
            # Two epochs meet where workers already fetch the next one.
            newest = sorted(self._planned)[-1:]
            self._planned = {**{e: self._planned[e] for e in newest}, epoch: plans}
        return self._planned[epoch]

    @override
    def __iter__(self) -> Iterator[PlanKey]:
        # Being a generator, it reads `epoch` at the first key, not when it is made: see NOTE (early
        # iterators).
        epoch, num_iterations, version = self.epoch, len(self), self.version
        seed = int(getattr(self.planner, "seed", 0))
        # The same for all of an epoch: a callback may look at a batch before training asks for one.
        for iteration in range(self._first_iteration, num_iterations):
            if version != self.version:
                raise RuntimeError(
                    "The plans of the epoch were replaced while an iterator of the train loader"
                    " was in use. Make a new one: `iter(loader)`."
                )
            plan = self.plan(epoch, iteration)
            yield PlanKey(
                epoch,
                iteration,
                tuple(mb.sample_ids for mb in plan.for_rank(self.rank)),
                tuple(
                    (seed, epoch, iteration, index) for index in plan.indices_for_rank(self.rank)
                ),
                version,
            )


def _sample_ids(plans: Sequence[Plan]) -> npt.NDArray[np.int64]:
    ids = [i for plan in plans for m in plan.micro_batches for i in m.sample_ids]
    return np.array(ids, dtype=np.int64)

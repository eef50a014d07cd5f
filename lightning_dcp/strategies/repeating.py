"""An iteration that ran out of memory somewhere, repeated on the same samples by another plan.

::

    drain               a rank runs out of memory, notes it, goes on with what others wait for
    end of iteration    all ranks learn of it with the figures that they exchange anyway
    here                state as before -> plan again, more careful -> read -> run
                        again from "drain", as often as it takes
    afterwards          what is left of the epoch is planned again

Neither the parameters nor the optimizer have been touched until then, and random numbers inside of
micro-batches are keyed, so that nothing of the lost attempt stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dcp.data.batch import IterationBatch, PlanKey
from lightning_dcp.data.loader import PlanDataset, remake_loader
from lightning_dcp.parallel import rng
from lightning_dcp.planning.careful import (
    MoreCareful,
    NothingLeft,
    bucket_index,
    more_careful,
    more_careful_later,
    more_recomputed,
)
from lightning_dcp.planning.planner import EpochPlanner
from lightning_dcp.strategies._lightning_compat import training as compat
from lightning_dcp.strategies.agreement import (
    check_same_on_all_ranks,
    collectively,
    gather_objects,
)
from lightning_dcp.strategies.metric_objects import metrics_of
from lightning_dcp.strategies.out_of_memory import RanOutOfMemory, Shortage, Shortages, describe
from lightning_dcp.strategies.unchanged import StateBefore

if TYPE_CHECKING:
    import lightning as L
    from torch.utils.data import DataLoader

    from lightning_dcp.planning.plan import MicroBatch, Plan
    from lightning_dcp.strategies.iteration import IterationRunner
    from lightning_dcp.strategies.preparation import Preparation
    from lightning_dcp.strategies.replanning import Replanner

__all__ = ["Repeater"]


class RepeatingStrategy(Protocol):
    """What repeating an iteration needs of the strategy."""

    _runner: IterationRunner | None
    _preparation: Preparation | None
    _replanner: Replanner | None

    @property
    def global_rank(self) -> int:
        """Of this process."""
        ...

    @property
    def place(self) -> int:
        """Of this process in plans."""
        ...

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """First forward pass of the iteration."""
        ...

    def keep_gradients(self) -> None:
        """Take note of gradients that are there before the first backward pass."""
        ...

    def discard_gradients(self) -> None:
        """Make gradients as they were then."""
        ...


class Repeater:
    """Repeats iterations of one `fit`.

    Args:
        strategy: whose iterations they are.
        pl_module: the user's.
        num_blocks: L.
        recovers: whether iterations are repeated; False ends training where memory runs out.
    """

    def __init__(
        self,
        strategy: RepeatingStrategy,
        pl_module: L.LightningModule,
        *,
        num_blocks: int,
        recovers: bool,
    ) -> None:
        self._strategy = strategy
        self._pl_module = pl_module
        self._num_blocks = num_blocks
        self._recovers = recovers
        self._before = StateBefore(pl_module)
        self._has_hooks = recovers and compat.has_zero_grad_hooks(pl_module)
        self._is_repeating = False
        #: What the iteration runs by, where it is repeated.
        self._careful: MoreCareful | None = None
        self.shortages = Shortages(
            strategy.global_rank, recovers=recovers, bucket_of=self._bucket_of
        )

    def begin_iteration(self) -> None:
        """Take note of the state that an iteration begins with."""
        self.shortages.clear()
        self._careful = None
        self._is_repeating = False
        if self._recovers:
            self._before.keep(metrics_of(self._pl_module))

    def end_first_forward(self) -> None:
        """Take note of the state that hooks around `zero_grad` find, which do not run again."""
        if self._has_hooks and not self._is_repeating:
            self._before.keep_around_hooks()

    def begin_backward(self) -> None:
        """The state that they leave; of gradients, too, which Lightning clears there."""
        if self._has_hooks:
            self._before.keep_around_hooks()
        if self._recovers:
            self._strategy.keep_gradients()

    def repeat(self) -> None:
        """Run the iteration that is lost on some rank again, up to its last backward pass.

        A collective.

        Raises:
            torch.OutOfMemoryError: On all ranks: nothing takes less memory than what has failed.
        """
        runner = self._strategy._runner
        assert runner is not None and runner.state is not None
        lost = runner.state.plan
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        found = [s for theirs in gather_objects(self.shortages.found) for s in theirs]
        found.sort(key=lambda shortage: (shortage.index, shortage.rank))
        self.shortages.clear()
        plan = collectively(
            f"Planning iteration {lost.iteration} of epoch {lost.epoch} again",
            lambda: self._put_back_and_plan(lost, found),
        )
        check_same_on_all_ranks(
            "the repeated iteration",
            {"plan": plan.digest()},
            "This is a fault of lightning_dcp, or libraries differ between ranks: please report.",
        )
        rank_zero_warn(self._what_changes(lost, plan, found))
        batch = collectively("Reading the samples of an iteration again", lambda: self._read(plan))
        self._is_repeating = True
        runner.repeat(plan, batch)
        self._strategy.training_step(batch, *runner.step_arguments)
        runner.drain()

    def end_iteration(self) -> None:
        """Leave an iteration; plan what is left of the epoch again where it was repeated.

        A collective there.
        """
        runner, replanner = self._strategy._runner, self._strategy._replanner
        assert runner is not None and runner.state is not None
        if self._recovers and runner.state.laps:
            self._before.learn()
        careful, self._careful = self._careful, None
        if careful is None:
            return
        assert replanner is not None
        replanner.replace(careful.planner, next_iteration=runner.state.plan.iteration + 1)

    def close(self) -> None:
        """End the connection to the other ranks."""
        self.shortages.close()

    # ---- before it runs --------------------------------------------------------------------------

    @property
    def _loader(self) -> DataLoader[Any]:
        assert self._strategy._preparation is not None
        return self._strategy._preparation.loader

    @property
    def _now(self) -> Any:
        """The planner of the iterations to come."""
        assert self._strategy._preparation is not None
        if self._careful is not None:
            return self._careful.planner
        return self._strategy._preparation.planner

    @property
    def _is_indexed(self) -> bool:
        """Whether samples can be read again by any rank."""
        return isinstance(getattr(self._loader, "dataset", None), PlanDataset)

    def _put_back_and_plan(self, lost: Plan, found: Sequence[Shortage]) -> Plan:
        self._before.put_back()
        self._strategy.discard_gradients()
        failed = {shortage.index for shortage in found}
        try:
            if not isinstance(self._now, EpochPlanner):
                return more_recomputed(lost, failed, self._num_blocks)
            now = self._careful or MoreCareful(planner=self._now, plan=lost)
            again = more_careful if self._is_indexed else more_careful_later
            self._careful = again(now, failed)
        except NothingLeft as error:
            last = next(s for s in found if s.index == error.index)
            raise RanOutOfMemory(
                f"Out of memory in {describe(last, lost, self._bucket_of)}; {error}"
            ) from None
        return self._careful.plan

    def _read(self, plan: Plan) -> IterationBatch:
        loader: Any = self._loader
        if not self._is_indexed:  # a stream, which keeps what was fetched lately
            again: IterationBatch = loader.again(plan)
            return again
        rank, seed = self._strategy.place, getattr(self._now, "seed", 0)
        indices = plan.indices_for_rank(rank)
        key = PlanKey(
            plan.epoch,
            plan.iteration,
            tuple(m.sample_ids for m in plan.for_rank(rank)),
            tuple((seed, plan.epoch, plan.iteration, index) for index in indices),
        )
        with rng.preserved(torch.device("cpu")):
            if not loader.num_workers or loader.worker_init_fn is None:
                batch: IterationBatch = loader.collate_fn(loader.dataset[key])
                return batch
            # The data set may need what the user's function sets up in a worker.
            keys: Any = [key]
            generator = loader.generator
            state = None if generator is None else generator.get_state()
            (batch,) = remake_loader(loader, loader.dataset, keys, loader.collate_fn)
            if generator is not None:
                generator.set_state(state)
        return batch

    # ---- words -----------------------------------------------------------------------------------

    def _bucket_of(self, micro_batch: MicroBatch) -> tuple[int, int] | None:
        planner = self._now
        if not isinstance(planner, EpochPlanner):
            return None
        edges, bucket = planner.corrections.bucket_edges, bucket_index(planner, micro_batch)
        return edges[bucket], edges[bucket + 1]

    def _what_changes(self, lost: Plan, plan: Plan, found: Sequence[Shortage]) -> str:
        first, others = found[0], len({shortage.index for shortage in found}) - 1
        more = f" (and in {others} more)" if others else ""
        text = f"DCP: out of memory in {describe(first, lost, self._bucket_of)}{more}."
        text += (
            f" The iteration is repeated on the same samples, in {len(plan.micro_batches)}"
            f" micro-batches instead of {len(lost.micro_batches)}"
            f" {_recomputed(lost)} -> {_recomputed(plan)}."
        )
        if self._careful is not None:
            corrections = self._careful.planner.corrections
            edges = corrections.bucket_edges
            counts = ", ".join(
                f"{factor:.2f} times for lengths [{edges[k]}, {edges[k + 1]})"
                for k, factor in enumerate(corrections.memory_factors)
                if factor > 1.0
            )
            text += (
                f" What is left of the epoch is planned again; memory beyond the model's own now"
                f" counts {counts or 'as before'}. A lower memory_limit_bytes avoids this."
            )
        return text


def _recomputed(plan: Plan) -> str:
    p = sorted({m.sp_size for m in plan.micro_batches})
    r = sorted({m.recompute_blocks for m in plan.micro_batches})
    return f"(p in {p}, r in {r})"

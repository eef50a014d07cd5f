"""What the strategy does in Lightning's hooks of a training batch, which is an iteration of a plan.

`on_train_batch_start` takes the plan up, `training_step` runs the first forward pass, `backward`
all the rest: further micro-batches, one exchange of logs and figures, one reduction of gradients.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from typing_extensions import override

from lightning_dcp.data.batch import IterationBatch
from lightning_dcp.planning.report import IterationReport
from lightning_dcp.strategies._lightning_compat import training as compat
from lightning_dcp.strategies.checks import refuse_written_parameters
from lightning_dcp.strategies.engine import Engine
from lightning_dcp.strategies.figures import AllFigures, RankFigures
from lightning_dcp.strategies.gradients import scale, used_nowhere
from lightning_dcp.strategies.replicas import num_shared, refuse_unequal_losses
from lightning_dcp.strategies.watch.plan_hash import sum_if_same_plan
from lightning_dcp.strategies.watch.strategy import WatchedStrategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.optim import Optimizer

    from lightning_dcp.parallel.topology import Topology
    from lightning_dcp.planning.plan import Plan
    from lightning_dcp.planning.planner import EpochPlanner
    from lightning_dcp.strategies._lightning_compat.throughput import IterationThroughput
    from lightning_dcp.strategies.adaptation import Adaptation
    from lightning_dcp.strategies.iteration import IterationRunner
    from lightning_dcp.strategies.iteration_logs import IterationLogs
    from lightning_dcp.strategies.preparation import Preparation
    from lightning_dcp.strategies.repeating import Repeater
    from lightning_dcp.strategies.settings import DCPSettings

__all__ = ["BatchHooks"]


class BatchHooks(Engine, WatchedStrategy):
    """Runs the iterations that `DCPStrategyMixin` has prepared; without a runner, plain batches."""

    settings: DCPSettings
    _preparation: Preparation | None = None
    _topology: Topology | None = None
    _patches: compat.TrainerPatches | None = None
    _runner: IterationRunner | None = None
    _logs: IterationLogs | None = None
    _repeater: Repeater | None = None
    _throughput: IterationThroughput | None = None
    _adaptation: Adaptation | None = None
    _iteration_loss: Tensor | None = None
    _loss_tolerance: float = 0.0
    _overhead_s: float = 0.0
    _exchanged_s: float | None = None
    #: Whether `training_step` has written to parameters in the running iteration.
    _written: bool = False
    #: Figures of the last iteration, the same on all ranks; None before the first.
    last_report: IterationReport | None = None

    @property
    @override
    def planner(self) -> EpochPlanner | None:
        """Makes the plans of every epoch; None before `setup` and outside of `fit`."""
        return None if self._preparation is None else self._preparation.planner

    @property
    @override
    def inside_micro_batch(self) -> bool:
        return self._runner is not None and self._runner.inside_micro_batch

    @property
    @override
    def ends_alone(self) -> bool:
        pl_module = self.lightning_module
        if pl_module is None or pl_module.trainer.state.status != TrainerStatus.INTERRUPTED:
            return False
        # In set-up callbacks hear of an exception before the strategy, and others of none.
        return not self.watch.has_raised or self.watch.ends_alone

    @property
    def seed(self) -> int:
        """Seed of sample order and of the random numbers inside micro-batches."""
        if self.settings.planning.seed is not None:
            return self.settings.planning.seed
        return int(os.environ.get("PL_GLOBAL_SEED", "0"))

    @property
    def place(self) -> int:
        """This rank's place in the plans."""
        assert self._topology is not None
        return self._topology.rank

    @property
    def _rank_at(self) -> Sequence[int]:
        """The rank at each place of the plans."""
        assert self._topology is not None
        return self._topology.layout.ranks

    # ---- one iteration ---------------------------------------------------------------------------

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if isinstance(batch, IterationBatch):
            # Micro-batches go to the device one at a time, when they run.
            assert self._patches is not None
            self._patches.results.iteration_batch_size = self._plan_of(batch).num_samples
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._exchanged_s is not None:
            self._overhead_s = time.perf_counter() - self._exchanged_s
        if self._runner is not None:
            epoch = self.lightning_module.trainer.current_epoch  # type: ignore[union-attr]
            if batch.epoch != epoch:
                raise RuntimeError(
                    f"The train loader delivered a batch planned for epoch {batch.epoch} in epoch"
                    f" {epoch}. Call `set_epoch` of its sampler, or leave the sampler to Lightning."
                )
            plan = self._plan_of(batch)
            self.watch.at("start", plan)
            self._runner.start(plan, batch)
            assert self._repeater is not None
            self._repeater.begin_iteration()

    def _plan_of(self, batch: IterationBatch) -> Plan:
        assert self._preparation is not None
        return self._preparation.plan_of(batch)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._runner is None:
            return super().training_step(*args, **kwargs)
        loss = self._runner.first_forward(*args[1:])
        assert self._repeater is not None
        self._repeater.end_first_forward()
        return loss

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self._runner is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None and self._repeater is not None
        self._optimizer_in_backward = optimizer
        with compat.logging_as_training_step(self.lightning_module):
            self._repeater.begin_backward()
            self._runner.drain()
            while not self._finish_iteration():
                self._repeater.repeat()
            self._gradients_before = ()  # copies are of no use any more
            self._repeater.end_iteration()
            if self._adaptation is not None and self._runner.state is not None:
                self._adaptation.end_iteration(self._runner.state)
        return closure_loss

    def _finish_iteration(self) -> bool:
        """Exchange what was logged and measured, rescale where N changed, reduce the gradients.

        Returns:
            Whether the iteration counts; False on all ranks where one has run out of memory.
        """
        assert self._runner is not None and self._logs is not None
        assert self.lightning_module is not None and self._throughput is not None
        assert self._repeater is not None
        state = self._runner.state
        assert state is not None
        trainable = [p for p in self.lightning_module.parameters() if p.requires_grad]
        without_gradient = self._without_gradient(trainable)
        counts = self._throughput.counts
        self.watch.at("exchange of logs and figures, reduction of gradients", state.plan)
        own = RankFigures(
            targets=state.targets,
            loss_sum=state.loss_sum,
            busy_s=state.busy_s(),
            peak_bytes=self._runner.memory.peak_bytes,
            wall_s=time.perf_counter() - state.started_s,
            overhead_s=self._overhead_s,
            has_written=self._written,
            lacks_gradients=any(without_gradient),
            ran_out_of_memory=bool(self._repeater.shortages.found),
            counts=counts,
            shared_losses=state.shared_losses,
        )

        def is_lost(rows: Tensor) -> bool:
            return bool(AllFigures(rows, len(counts)).of("ran_out_of_memory").any())

        rows = self._logs.reduce_and_file(
            own.packed(num_shared(state.plan), self.root_device), is_lost
        )
        figures = AllFigures(rows, num_counts=len(counts))
        self._throughput.finish_iteration(figures.counts)
        self._written = False
        refuse_written_parameters(figures.of("has_written").tolist(), self.strategy_name)
        if is_lost(rows):
            return False
        if self.settings.shard == "blocks":  # else each rank's loss is that of its slice
            refuse_unequal_losses(
                state.plan, figures.shared_losses, self._loss_tolerance, self._rank_at
            )
        # Where one rank has used every parameter, none is left to ask for.
        all_lack = bool(figures.of("lacks_gradients").all())
        unused = used_nowhere(without_gradient, self.root_device) if all_lack else []
        self._exchanged_s = time.perf_counter()
        targets = float(figures.of("targets").sum())
        loss = figures.of("loss_sum").sum() / (targets or 1.0)
        self._iteration_loss = loss.to(self.root_device)
        if targets > 0 and targets != state.reference_targets:
            factor = state.reference_targets / targets
            scale([self._gradient(p) for p in self.lightning_module.parameters()], factor)
        self._reduce_gradients()
        self._forget_gradients(unused)
        self.watch.at("optimizer step", state.plan)
        self.last_report = IterationReport(
            plan=state.plan,
            busy_s=self._by_place(figures.of("busy_s")),
            wall_s=float(figures.of("wall_s").max() + figures.of("overhead_s").max()),
            peak_bytes=tuple(int(b) for b in self._by_place(figures.of("peak_bytes"))),
            loss=float(loss),
            num_targets=targets,
            slowness=None if self._adaptation is None else self._adaptation.slowness,
        )
        return True

    def _by_place(self, of_ranks: Tensor) -> tuple[float, ...]:
        """One figure of each rank, in the order of the plans."""
        values = of_ranks.tolist()
        return tuple(values[rank] for rank in self._rank_at)

    def _forget_gradients(self, indices: Sequence[int]) -> None:
        """Take the zeros away that unused parameters were reduced with.

        An optimizer passes over a parameter without a gradient, but decays one that has zeros.
        """
        assert self.lightning_module is not None
        trainable = [p for p in self.lightning_module.parameters() if p.requires_grad]
        if len(indices) == len(trainable):  # no loss at all: a gradient scaler needs something
            return
        for index in indices:
            trainable[index].grad = None

    # ---- what the runner asks for (`StepHost`) ---------------------------------------------------

    def forward_micro_batch(self, batch: Any, *rest: Any) -> Any:
        """Run the user's `training_step` on one micro-batch."""
        assert self._runner is not None and self._throughput is not None
        self._at_micro_batch("forward pass")
        self._throughput.count(self._runner.whole_batch, self._runner.whole_share)
        before = self._versions()
        with self._profiled("[DCP]micro_batch_forward"):
            output = self._forward_training_step(batch, *rest)
        self._written = self._written or self._versions() != before
        return output

    @override
    def backward_micro_batch(self, loss: Tensor) -> None:
        self._at_micro_batch("backward pass")
        super().backward_micro_batch(loss)

    def _at_micro_batch(self, what: str) -> None:
        state = None if self._runner is None else self._runner.state
        if state is not None:
            self.watch.at(what, state.plan, state.index)

    def sum_if_same_plan(self, value: float, plan: Plan) -> float:
        """Sum over all ranks of one number, if all of them are about to run the same plan."""
        planner = self.planner
        return sum_if_same_plan(
            value,
            plan,
            seed=self.seed,
            world_size=self.world_size,
            sum_over_ranks=self.sums_over_ranks,
            inputs=lambda: {} if planner is None else planner.inputs,
        )

    def _versions(self) -> int:
        """Changes whenever a parameter is written to."""
        assert self.lightning_module is not None
        if self.world_size == 1:  # there is nobody to differ from
            return 0
        return sum(parameter._version for parameter in self.lightning_module.parameters())

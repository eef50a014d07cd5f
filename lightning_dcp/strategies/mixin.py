"""The DCP behaviour of all strategies; what engines differ in is in `ddp.py` and `deepspeed.py`.

Order of a `fit` (forced by Lightning: `configure_optimizers` may ask for
`trainer.estimated_stepping_batches`, which needs the loader, which needs the plan)::

    setup_environment   refuse what cannot work
    setup               model on device -> blocks found, hooks on -> train loader read, lengths
                        -> cost profile -> planner -> optimizers -> engine
    on_train_batch_start   the plan of the iteration is taken up; N is known
    training_step          forward of the first micro-batch
    backward               everything else, then one exchange of logs and figures, one reduction
    teardown            hooks off, groups destroyed
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_dcp.data.batch import IterationBatch
from lightning_dcp.parallel.blocks import find_stacks
from lightning_dcp.parallel.huggingface import PreparedModels, prepare_models
from lightning_dcp.parallel.rng import generators_of
from lightning_dcp.parallel.runtime import BlockRuntime
from lightning_dcp.parallel.topology import GroupCosts, Topology
from lightning_dcp.planning.report import IterationReport
from lightning_dcp.profiling.byte_limit import ByteLimit
from lightning_dcp.profiling.memory_meter import MemoryMeter
from lightning_dcp.strategies._lightning_compat import training as compat
from lightning_dcp.strategies._lightning_compat.decisions import AgreedDecisions, AgreedEnd
from lightning_dcp.strategies._lightning_compat.throughput import IterationThroughput
from lightning_dcp.strategies.adaptation import Adaptation
from lightning_dcp.strategies.agreement import (
    collectively,
    gather_objects,
    gather_rows,
    same_tensors_on_all_ranks,
)
from lightning_dcp.strategies.checks import (
    check_callbacks,
    check_layer_sync,
    check_module,
    check_optimizers,
    check_parameters,
    check_train_loader,
    check_trainer,
    one_optimizer,
    refuse_written_parameters,
)
from lightning_dcp.strategies.engine import Engine
from lightning_dcp.strategies.evaluation.run import (
    Evaluation,
    evaluation_runtime,
    fixed_evaluation_bytes,
)
from lightning_dcp.strategies.figures import AllFigures, RankFigures
from lightning_dcp.strategies.gradients import scale, used_nowhere
from lightning_dcp.strategies.iteration import IterationRunner
from lightning_dcp.strategies.iteration_logs import IterationLogs
from lightning_dcp.strategies.measuring import compute_dtype
from lightning_dcp.strategies.metric_objects import metrics_of, unequal_lists_gathered
from lightning_dcp.strategies.node_layout import create_groups, gathered_layout
from lightning_dcp.strategies.own_inputs import step_inputs
from lightning_dcp.strategies.preparation import Preparation, TrainPreparer, memory_limit
from lightning_dcp.strategies.process_exit import destroy_groups_at_exit
from lightning_dcp.strategies.repeating import Repeater
from lightning_dcp.strategies.replanning import Replanner
from lightning_dcp.strategies.replicas import (
    num_shared,
    refuse_unequal_losses,
    tolerance_of,
)
from lightning_dcp.strategies.watch.plan_hash import sum_if_same_plan
from lightning_dcp.strategies.watch.same_set_up import check_same_optimizers, check_same_set_up
from lightning_dcp.strategies.watch.strategy import WatchedStrategy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    import lightning as L
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from lightning_dcp.data.sampler import PlanSampler
    from lightning_dcp.data.streams import StreamPlans
    from lightning_dcp.planning.plan import Plan
    from lightning_dcp.planning.planner import EpochPlanner
    from lightning_dcp.profiling.cost_profile import CostProfile
    from lightning_dcp.strategies.settings import DCPSettings


class DCPStrategyMixin(Engine, WatchedStrategy):
    """Plan-driven training, mixed into one of Lightning's strategies (before it)."""

    settings: DCPSettings
    #: Of collectives; Lightning's strategies set it.
    _timeout: timedelta | None
    _preparer: TrainPreparer | None = None
    _preparation: Preparation | None = None
    _runtime: BlockRuntime | None = None
    _topology: Topology | None = None
    _patches: compat.TrainerPatches | None = None
    _runner: IterationRunner | None = None
    _logs: IterationLogs | None = None
    _repeater: Repeater | None = None
    _limit: ByteLimit | None = None
    _throughput: IterationThroughput | None = None
    _decisions: AgreedEnd | None = None
    _adaptation: Adaptation | None = None
    _metrics_patch: ExitStack | None = None
    _prepared_models: PreparedModels | None = None
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
    def cost_profile(self) -> CostProfile | None:
        """What was measured on the user's model; None before `setup`."""
        return None if self._preparation is None else self._preparation.cost_profile

    @property
    @override
    def train_sampler(self) -> PlanSampler | None:
        preparation = self._preparation
        return None if preparation is None or preparation.stream else preparation.sampler

    @property
    @override
    def train_stream(self) -> StreamPlans | None:
        return None if self._preparation is None else self._preparation.stream

    @property
    @override
    def inside_micro_batch(self) -> bool:
        return self._runner is not None and self._runner.inside_micro_batch

    # ---- setup -----------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        self._refuse_misuse()
        destroy_groups_at_exit()
        super().setup_environment()
        self.start_watch()

    def _refuse_misuse(self) -> None:
        """Refuse what cannot work, before processes are connected and anything is loaded."""
        pl_module = self.lightning_module
        if pl_module is None or pl_module.trainer.state.fn != TrainerFn.FITTING:
            return
        check_trainer(pl_module.trainer, self.strategy_name)
        check_module(pl_module, self.strategy_name)
        check_parameters(pl_module, self.strategy_name)
        check_callbacks(pl_module.trainer, pl_module, self.strategy_name)
        check_layer_sync(self._layer_sync, self.strategy_name)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        pl_module = self.lightning_module
        assert pl_module is not None
        if trainer.state.fn == TrainerFn.FITTING and compat.has_train_loader(trainer):
            assert self.accelerator is not None
            self.accelerator.setup(trainer)
            self.model = self.precision_plugin.convert_module(pl_module)
            pl_module.to(self.root_device)
            self._prepare_models(pl_module)
            self._setup_dcp(trainer, pl_module)
        if self.world_size > 1:
            self._metrics_patch = ExitStack()
            self._metrics_patch.enter_context(unequal_lists_gathered())
        super().setup(trainer)
        if self._preparer is not None and self._preparer.check_fixed_bytes(self._allocated_bytes()):
            compat.reload_train_loader(trainer)
        self._setup_evaluation(trainer, pl_module)

    def _prepare_models(self, pl_module: L.LightningModule) -> None:
        """Give Hugging Face models what sharding and recomputation need."""
        sp_sizes = self.settings.planning.sp_sizes
        self._prepared_models = prepared = collectively(
            "Preparing the Hugging Face models",
            lambda: prepare_models(
                pl_module,
                sharded=self.world_size > 1 and (sp_sizes is None or max(sp_sizes) > 1),
                ignore_index=self.settings.ignore_index,
            ),
        )
        if prepared is not None:
            for notice in prepared.notices:
                rank_zero_info(f"DCP: {notice}.")
            for warning in prepared.warnings:
                rank_zero_warn(f"DCP: {warning}.")

    def shifts_labels(self, batch: Any) -> bool:
        """Whether the first label of each of the batch's sequences bears no loss."""
        prepared = self._prepared_models
        return prepared is not None and prepared.losses.shifts_in(batch)

    def learn_from_losses(self) -> None:
        """Take note of the losses of Hugging Face models in a training step that just ran."""
        if self._prepared_models is not None:
            self._prepared_models.losses.take()

    def _setup_evaluation(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let batches of validation, testing and prediction follow plans too."""
        if self._topology is None:  # no training in this run
            self._prepare_models(pl_module)
            self._topology = self._make_topology()
            self._runtime = evaluation_runtime(
                pl_module, self.settings, self._topology, self.root_device
            )
        fixed = None if self._preparer is None else self._preparer.fixed_bytes
        self._evaluation = evaluation = Evaluation(
            self,
            trainer,
            pl_module,
            self._runtime,
            self._topology,
            fixed_evaluation_bytes(pl_module, self._allocated_bytes()) if fixed is None else fixed,
        )
        if trainer.state.fn != TrainerFn.FITTING:
            self._decisions = AgreedEnd(trainer, self.sum_over_ranks)
            evaluation.before_batch = self._decisions.before_batch
        self._throughput = IterationThroughput(trainer)
        self._throughput.whole_over_own = lambda: evaluation.whole_over_own

    def _make_topology(self) -> Topology:
        return Topology(
            self.world_size,
            self.global_rank,
            device_type=self.root_device.type,
            timeout=self._timeout,
            layout=gathered_layout(self.node_rank),
        )

    def _same_on_all_ranks(self, pl_module: L.LightningModule) -> None:
        """As DDP would do later: profiling compares losses between ranks. A collective."""
        same_tensors_on_all_ranks([*pl_module.parameters(), *pl_module.buffers()])

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        with one_optimizer(self.strategy_name):
            super().setup_optimizers(trainer)
        check_optimizers(self.optimizers, self.strategy_name)
        check_same_optimizers(self.optimizers)

    def _setup_dcp(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Blocks, groups, train loader, profile, planner: in the order they need each other."""
        check_same_set_up(self.settings, trainer, pl_module)
        stacks = collectively(
            "Finding the model's blocks", lambda: find_stacks(pl_module, self.settings.blocks)
        )
        self._topology = topology = self._make_topology()
        self._runtime = BlockRuntime(
            stacks,
            self._topology,
            sequence_dims=self.settings.sequence_dims,
            device=self.root_device,
        )
        self._runtime.inputs = step_inputs(pl_module, self.settings)
        self._runtime.packing = self.settings.planning.packing
        self._runtime.attach()
        self._same_on_all_ranks(pl_module)
        preparer = TrainPreparer(self, trainer, pl_module, self._runtime, self._topology)
        self._preparer = preparer

        def prepare_train_loader(dataloader: DataLoader[Any]) -> DataLoader[Any]:
            preparation = preparer.prepare(dataloader)
            create_groups(topology, preparation.planner.sp_sizes)
            if self._replanner is not None:
                preparation = self._replanner.carried_over(preparation)
            self._preparation = preparation
            return preparation.loader

        self._patches = compat.TrainerPatches(
            trainer,
            pl_module,
            check_train_loader=partial(check_train_loader, strategy_name=self.strategy_name),
            prepare_train_loader=prepare_train_loader,
            iteration_loss=lambda: self._iteration_loss,
            abort=lambda: None if self._runner is None else self._runner.abort(),
        )
        trainer.fit_loop.setup_data()
        if self._preparation is None:  # limit_train_batches=0, or no training_step
            return
        self._replanner = Replanner(self, trainer)
        results = self._patches.results
        self._logs = IterationLogs(
            file_value=partial(compat.file_reduced_value, trainer, results),
            file_metric=partial(compat.file_metric, pl_module, results),
            find_metric=pl_module.get_submodule,
            exchange=gather_rows,
            gather_objects=gather_objects,
            device=self.root_device,
        )
        results.collector = self._logs.take
        self._loss_tolerance = tolerance_of(compute_dtype(self, pl_module))
        self._decisions = AgreedDecisions(trainer, self.sum_over_ranks)
        fixed = preparer.fixed_bytes
        reliability = self.settings.reliability
        self._repeater = Repeater(
            self,
            pl_module,
            num_blocks=self._runtime.num_blocks,
            recovers=reliability.recover_from_oom,
        )
        self._adaptation = Adaptation(
            self,
            trainer,
            reliability,
            rank_at=self._rank_at,
            rank=self.global_rank,
            device=self.root_device,
        )
        if reliability.enforce_memory_limit:
            self._limit = ByteLimit(self.root_device, memory_limit(self), fixed)
        self._runner = IterationRunner(
            self,
            memory=MemoryMeter(pl_module, self._runtime.blocks, self.root_device, fixed),
            runtime=self._runtime,
            topology=self._topology,
            logs=self._logs,
            find_metrics=partial(metrics_of, pl_module),
            find_generators=partial(generators_of, pl_module),
            loss_average=self.settings.loss_average,
            ignore_index=self.settings.ignore_index,
            backend_averages=self.world_size,
            seed=self.seed,
            rank=self._topology.rank,
            device=self.root_device,
            hooks_change_batches=compat.has_transfer_hooks(trainer, pl_module),
            own_losses=None if self._prepared_models is None else self._prepared_models.losses,
            shortages=self._repeater.shortages,
            limit=self._limit,
        )

    @property
    def seed(self) -> int:
        """Seed of sample order and of the random numbers inside micro-batches."""
        if self.settings.planning.seed is not None:
            return self.settings.planning.seed
        return int(os.environ.get("PL_GLOBAL_SEED", "0"))

    @override
    def teardown(self) -> None:
        if self._runner is not None:
            self._runner.abort()
        self._end_evaluation()  # before those of training, over which its patches lie
        if self._patches is not None:
            self._patches.remove()
        if self._throughput is not None:
            self._throughput.remove()
        if self._decisions is not None:
            self._decisions.remove()
        if self._repeater is not None:
            self._repeater.close()
        if self._limit is not None:
            self._limit.remove()
        if self._runtime is not None:
            self._runtime.detach()
        if self._prepared_models is not None:
            self._prepared_models.undo()
            self._prepared_models = None
        if self._topology is not None:
            self._topology.destroy()
        if self._metrics_patch is not None:
            self._metrics_patch.close()
            self._metrics_patch = None
        self._runner = self._logs = self._patches = self._runtime = self._topology = None
        self._throughput = self._decisions = None
        self._repeater = self._limit = self._adaptation = None
        self._preparer = None
        self._exchanged_s = None
        self._written = False
        super().teardown()

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
            self._repeater.begin_iteration(batch)

    def _plan_of(self, batch: IterationBatch) -> Plan:
        assert self._preparation is not None
        return self._preparation.plan_of(batch)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._runner is None:
            return super().training_step(*args, **kwargs)
        return self._runner.first_forward(*args[1:])

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
        self._iteration_loss = figures.of("loss_sum").sum() / (targets or 1.0)
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
            loss=float(self._iteration_loss),
            num_targets=targets,
            slowness=None if self._adaptation is None else self._adaptation.slowness,
        )
        return True

    @property
    def group_costs(self) -> GroupCosts | None:
        """What this rank's SP groups took to make, and take on GPUs; None before `setup`."""
        return None if self._topology is None else self._topology.costs

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

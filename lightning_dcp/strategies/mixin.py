"""The DCP behaviour of all strategies: what a `fit` is prepared with, and how it is left.

What engines differ in is in `ddp.py`, `deepspeed.py` and `fsdp.py`, an iteration in
`batch_hooks.py`.

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

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_dcp.parallel.blocks import find_stacks
from lightning_dcp.parallel.huggingface import PreparedModels, prepare_models
from lightning_dcp.parallel.rng import generators_of
from lightning_dcp.parallel.runtime import BlockRuntime
from lightning_dcp.parallel.topology import GroupCosts, Topology
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
from lightning_dcp.strategies.batch_hooks import BatchHooks
from lightning_dcp.strategies.checks import (
    check_callbacks,
    check_layer_sync,
    check_module,
    check_optimizers,
    check_parameters,
    check_train_loader,
    check_trainer,
    one_optimizer,
)
from lightning_dcp.strategies.evaluation.run import (
    Evaluation,
    evaluation_runtime,
    fixed_evaluation_bytes,
)
from lightning_dcp.strategies.iteration import IterationRunner
from lightning_dcp.strategies.iteration_logs import IterationLogs
from lightning_dcp.strategies.measuring import compute_dtype
from lightning_dcp.strategies.metric_objects import metrics_of, unequal_lists_gathered
from lightning_dcp.strategies.node_layout import create_groups, gathered_layout
from lightning_dcp.strategies.own_inputs import step_inputs
from lightning_dcp.strategies.preparation import TrainPreparer, memory_limit
from lightning_dcp.strategies.process_exit import destroy_groups_at_exit
from lightning_dcp.strategies.repeating import Repeater
from lightning_dcp.strategies.replanning import Replanner
from lightning_dcp.strategies.replicas import tolerance_of
from lightning_dcp.strategies.watch.same_set_up import check_same_optimizers, check_same_set_up

if TYPE_CHECKING:
    from datetime import timedelta

    import lightning as L
    from torch.utils.data import DataLoader

    from lightning_dcp.data.sampler import PlanSampler
    from lightning_dcp.data.streams import StreamPlans
    from lightning_dcp.profiling.cost_profile import CostProfile


class DCPStrategyMixin(BatchHooks):
    """Plan-driven training, mixed into one of Lightning's strategies (before it)."""

    #: Of collectives; Lightning's strategies set it.
    _timeout: timedelta | None
    _preparer: TrainPreparer | None = None
    _runtime: BlockRuntime | None = None
    _limit: ByteLimit | None = None
    _decisions: AgreedEnd | None = None
    _metrics_patch: ExitStack | None = None
    _prepared_models: PreparedModels | None = None

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
    def group_costs(self) -> GroupCosts | None:
        """What this rank's SP groups took to make, and take on GPUs; None before `setup`."""
        return None if self._topology is None else self._topology.costs

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

"""DCP with DeepSpeed's ZeRO-1: the optimizer state sharded over all ranks."""

from __future__ import annotations

import argparse
import copy
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.ddp import DDPStrategy
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.checkpointing.zero import PlainZeroCheckpoints
from lightning_dcp.strategies.checks import (
    check_has_optimizer,
    check_optimizers,
    check_shards,
    one_optimizer,
)
from lightning_dcp.strategies.extension_lock import wait_for_build_lock
from lightning_dcp.strategies.gradients import num_bytes, zero_for
from lightning_dcp.strategies.iteration import LossAverage
from lightning_dcp.strategies.mixin import DCPStrategyMixin
from lightning_dcp.strategies.process_exit import destroy_groups_at_exit
from lightning_dcp.strategies.reliability import ReliabilityOptions
from lightning_dcp.strategies.settings import DCPSettings, Shard

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import lightning as L
    from torch.nn import Module
    from torch.optim import Optimizer

_STAGE_REFUSED = {
    2: "it reduces gradients at every backward pass, and ranks run different numbers of them:"
    " training would hang",
    3: "it gathers parameters at every forward and backward pass, and ranks run different numbers"
    " of them: training would hang",
}


class DCPStrategy(DCPStrategyMixin, PlainZeroCheckpoints):
    """Data-Centric Parallel on DeepSpeed's ZeRO stage 1 (`strategy="dcp"`).

    Backward passes accumulate locally (`managed_gradient_accumulation: false`); the engine's `step`
    reduces once per iteration, clips by the global norm, and updates this rank's shard.

    Args:
        policy: how plans are made: `dcp-intra` (default), `dcp-inter`, `global-batch`, or the
            baselines `bucket` and `packed`. Short for `planning.policy`.
        planning: step size, accumulation limits, buckets, SP sizes, memory limit, seed.
        profiling: time budget and cache of the cost profile.
        reliability: lost ranks, running out of memory, drift, slow ranks.
        blocks: dotted path of the `ModuleList` or `Sequential` that holds the repeated blocks, such
            as `model.layers`, or a list of paths where there are several stacks of them (encoder
            and decoder); by default the longest run of same-class modules, and up to three others
            of importance.
        sequence_dims: for arguments of a block (by name or position) the dimension that runs along
            the sequence, or null for arguments that stay whole; by default learned while profiling.
        loss_average: what the loss that `training_step` returns is a mean over: `tokens`,
            `samples`, or `auto`: the labels that bear loss, as found in the batch (`labels`,
            `label`, `targets` or `target`, or the second of two tensors), else tokens, with a
            warning.
        ignore_index: label that bears no loss.
        self_check: whether one short forward and backward pass with the blocks sharded is compared
            with the unsharded one before training, which takes seconds. A model that computes
            something else is refused, with the module that is to blame.
        packing: whether the samples of a micro-batch are put one after the other in one sequence
            instead of being padded and collated by the loader's `collate_fn`. Positions restart in
            each sample and attention stays inside it; that the model computes the same as from
            padded samples is checked before training. Validation and testing stay padded.
        shard: what ranks of an SP group share: `blocks`, the tokens inside the repeated blocks,
            while all else runs whole on each rank; or `inputs`, the tokens from the batch to the
            loss, so that embedding, output layer and loss shrink with the SP size too. For language
            models: `labels[t]` must be what position t predicts (Hugging Face models, which shift
            labels themselves, are taken care of), and positions must come from the batch's
            `position_ids`. Evaluation shards blocks either way.
        input_dims: with `shard="inputs"`, the sequence dimension of each entry of the batch that
            has one, null for an entry that stays whole, such as `{"tokens": 1, "mask": null}`; by
            default known from the usual names.
        tiled_loss: whether the loss of a Hugging Face causal language model computes logits tile by
            tile, which takes their memory away and one more matrix product; `auto`: if logits of
            the longest sample would take a tenth of the memory. Own models call
            `lightning_dcp.linear_cross_entropy`.
        config: a DeepSpeed config (path or dict) to use instead of the default one. It must ask for
            ZeRO stage 1, or leave the stage out.
        stage: ZeRO stage; only 1 is exact here, others are refused with the reason.
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: how processes find each other; by default found out.
        precision_plugin: set by the Trainer.
        process_group_backend: `nccl` on CUDA and `gloo` on CPU by default.
        timeout: of collectives.
        exclude_frozen_parameters: leave frozen parameters out of checkpoints.
        save_distributed_checkpoint: write a folder in DeepSpeed's format, each rank its shard,
            instead of one file that every strategy loads.
    """

    strategy_name = "dcp"

    def __init__(
        self,
        policy: str | None = None,
        planning: PlanningOptions = PlanningOptions(),
        profiling: ProfilingOptions = ProfilingOptions(),
        reliability: ReliabilityOptions = ReliabilityOptions(),
        blocks: str | list[str] | None = None,
        sequence_dims: dict[str, int | None] | None = None,
        loss_average: LossAverage = "auto",
        ignore_index: int = -100,
        self_check: bool = True,
        packing: bool = False,
        shard: Shard = "blocks",
        input_dims: dict[str | int, int | None] | None = None,
        tiled_loss: bool | Literal["auto"] = "auto",
        config: str | Path | dict[str, Any] | None = None,
        stage: int = 1,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        exclude_frozen_parameters: bool = False,
        save_distributed_checkpoint: bool = False,
    ) -> None:
        super().__init__(
            stage=stage,
            # A copy: Lightning and `_check_config` write into it.
            config=copy.deepcopy(config),
            overlap_comm=False,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        self.settings = DCPSettings.make(
            policy=policy,
            planning=planning,
            profiling=profiling,
            reliability=reliability,
            blocks=blocks,
            sequence_dims=sequence_dims,
            loss_average=loss_average,
            ignore_index=ignore_index,
            self_check=self_check,
            packing=packing,
            shard=shard,
            input_dims=input_dims,
            tiled_loss=tiled_loss,
        )
        self.save_distributed_checkpoint = save_distributed_checkpoint
        assert isinstance(self.config, dict)
        _check_config(self.config)
        self.config["managed_gradient_accumulation"] = False

    # ---- Lightning's DeepSpeedStrategy insists on CUDA; the engine itself runs on gloo as well ---

    @override
    def setup_environment(self) -> None:
        if self.root_device.type == "cuda":
            super().setup_environment()
        else:
            self._refuse_misuse()
            destroy_groups_at_exit()
            DDPStrategy.setup_environment(self)
            self.start_watch()

    @override
    def setup_distributed(self) -> None:
        if self.root_device.type == "cuda":
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        wait_for_build_lock()
        self._init_deepspeed_distributed()

    @override
    def _auto_select_batch_size(self) -> int:
        # Only for DeepSpeed's own throughput log; Lightning would ask for the train loader again.
        return 1

    @override
    def _setup_model_and_optimizer(
        self, model: Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Any]:
        import deepspeed

        assert isinstance(self.config, dict)
        zero = self.config["zero_optimization"]
        num_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        # DeepSpeed allocates the whole bucket, by default hundreds of megabytes, for any model.
        bucket_size = int(zero.get("reduce_bucket_size", 200_000_000))
        zero["reduce_bucket_size"] = max(1, min(bucket_size, num_parameters))
        groups = [] if optimizer is None else [list(g["params"]) for g in optimizer.param_groups]
        index: Any = self.root_device.index  # None on a CPU, where torch's stub says int
        engine, engine_optimizer, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self.local_rank if index is None else index),
            config=self.config,
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        if optimizer is not None:
            _keep_optimizer(engine_optimizer, optimizer)
        self.keep_zero_state(engine_optimizer, groups, model)
        return engine, engine_optimizer

    @override
    def _init_optimizers(self) -> tuple[Any, Any]:
        with one_optimizer(self.strategy_name):
            optimizer, scheduler = super()._init_optimizers()
        check_has_optimizer(optimizer, self.strategy_name)
        check_shards(optimizer, self.strategy_name)
        check_optimizers([optimizer], self.strategy_name)
        return optimizer, scheduler

    @override
    def _initialize_deepspeed_inference(self, model: Module) -> None:
        if self.root_device.type == "cuda":
            super()._initialize_deepspeed_inference(model)
        else:
            self.model_to_device()

    # ---- the engine's part of an iteration -------------------------------------------------------

    @override
    def _forward_training_step(self, *args: Any) -> Any:
        # Through the engine's forward, which sets up its backward hooks and autocast.
        return DDPStrategy.training_step(self, *args)

    @override
    def profile_context(self) -> AbstractContextManager[Any]:
        # The engine casts the model when it is made, after profiling; autocast stands in for that.
        dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(
            str(self.precision_plugin.precision)
        )
        return (
            nullcontext() if dtype is None else torch.autocast(self.root_device.type, dtype=dtype)
        )

    @override
    def _backward_kwargs(self) -> dict[str, Any]:
        return {"scale_wrt_gas": False}

    @override
    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        # Where the type of accumulated gradients is not the parameters' own, DeepSpeed moves each
        # gradient away after every backward pass.
        optimizer: Any = self.deepspeed_engine.optimizer
        if getattr(optimizer, "use_grad_accum_attribute", False):
            return getattr(parameter, "grad_accum", None)
        return parameter.grad

    @override
    def _without_gradient(self, parameters: Sequence[torch.nn.Parameter]) -> list[bool]:
        # The optimizer steps on one flat tensor of all parameters.
        return [False] * len(parameters)

    @override
    def abandon_pass(self) -> None:
        # The engine counts passes that it is in, and would take the next one for a nested one.
        optimizer: Any = self.deepspeed_engine.optimizer
        while optimizer._backward_active_depth > 0:
            optimizer.exit_backward()
        for timer in self.deepspeed_engine.timers.get_timers().values():
            if timer.started_:
                timer.stop(record=False)

    @override
    def discard_gradients(self) -> None:
        optimizer: Any = self.deepspeed_engine.optimizer
        optimizer.zero_grad(set_to_none=True)  # with those of another type, `grad_accum`
        self.deepspeed_engine._unmanaged_backward_count = 0  # of samples that were trained on
        super().discard_gradients()

    @override
    def _reduce_gradients(self) -> None:
        """Give every parameter a gradient; the engine's `step` reduces them.

        Stage 1 sets its buckets up during backward, so a rank that ran none fails in `step`; and it
        reduces only parameters that have a gradient, so ranks with different ones would not match.
        """
        assert self.lightning_module is not None
        missing = [
            p
            for p in self.lightning_module.parameters()
            if p.requires_grad and self._gradient(p) is None
        ]
        if missing:
            self.deepspeed_engine.backward(zero_for(missing), scale_wrt_gas=False)

    @override
    def fixed_bytes(self, pl_module: L.LightningModule) -> int:
        parameters = list(pl_module.parameters())
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        stored = num_bytes(parameters)
        gradients = num_bytes(p for p in parameters if p.requires_grad)
        buffers = num_bytes(pl_module.buffers())
        # This rank's shard: float32 master weights and two moments as Adam keeps them.
        shard = 3 * 4 * trainable // self.world_size
        return stored + 2 * gradients + shard + buffers


def _keep_optimizer(engine_optimizer: Any, optimizer: Optimizer) -> None:
    """Have the engine step the user's optimizer, where it has made another one in its place.

    DeepSpeed 0.19.8 does so with Adagrad: one group for all parameters, with the defaults of the
    class. Schedulers would go on with the user's, and options of groups be lost.
    """
    theirs = engine_optimizer.optimizer
    if theirs is not optimizer:
        optimizer.state.clear()
        optimizer.state.update(theirs.state)
        engine_optimizer.optimizer = optimizer
        engine_optimizer._link_all_hp_params()  # of the first group only, until now


def _check_config(config: dict[str, Any]) -> None:
    """Refuse DeepSpeed configs that are not exact here, or would hang."""
    zero = config.setdefault("zero_optimization", {})
    stage = zero.setdefault("stage", 1)
    if stage != 1:
        reason = _STAGE_REFUSED.get(
            stage, "the strategy is built on stage 1, which shards the optimizer state"
        )
        raise MisconfigurationException(
            f"strategy='dcp' needs DeepSpeed's ZeRO stage 1, but stage {stage} was given: {reason}."
            " Leave `stage` out, or set zero_optimization.stage to 1 in the config."
        )
    if zero.get("overlap_comm"):
        raise MisconfigurationException(
            "zero_optimization.overlap_comm=true cannot be combined with strategy='dcp': at stage 1"
            " it reduces during backward passes, of which ranks run different numbers. Set it to"
            " false."
        )
    zero["overlap_comm"] = False
    if config.get("managed_gradient_accumulation"):
        raise MisconfigurationException(
            "managed_gradient_accumulation=true makes DeepSpeed count backward passes itself; under"
            " strategy='dcp' the plan does. Remove the entry."
        )

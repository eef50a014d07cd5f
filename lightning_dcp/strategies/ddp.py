"""DCP on Lightning's DDP: parameters and optimizer state replicated, one reduction an iteration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.ddp import DDPStrategy
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.checkpointing.files import with_frozen_parameters
from lightning_dcp.strategies.gradients import forward_replaced, num_bytes, zero_for
from lightning_dcp.strategies.iteration import LossAverage
from lightning_dcp.strategies.mixin import DCPStrategyMixin
from lightning_dcp.strategies.reliability import ReliabilityOptions
from lightning_dcp.strategies.settings import DCPSettings, Shard

if TYPE_CHECKING:
    import lightning as L


class DCPDDPStrategy(DCPStrategyMixin, DDPStrategy):
    """Data-Centric Parallel with the model replicated on each rank (`strategy="dcp_ddp"`).

    NOTE [Closing pass]
        DDP reduces while a backward pass runs, and every rank must run that pass over the same
        parameters. Here ranks run different numbers of micro-batches, some none, some over other
        branches of the model. So all micro-batches run without DDP's wrapper, which accumulates
        gradients locally, and each iteration ends with one backward pass through the wrapper of a
        zero that depends on every parameter: it adds nothing, and DDP reduces what has accumulated,
        in its buckets, with its comm hook. A parameter without a gradient takes part as zeros.

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
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: how processes find each other; by default found out.
        checkpoint_io: how checkpoints are written and read.
        precision_plugin: set by the Trainer.
        ddp_comm_state: what `ddp_comm_hook` is given.
        ddp_comm_hook: how gradients are reduced, in place of an all-reduce; one that compresses is
            not exact.
        ddp_comm_wrapper: wrapped around `ddp_comm_hook`.
        model_averaging_period: refused: it lets ranks' parameters differ.
        process_group_backend: `nccl` on CUDA and `gloo` on CPU by default.
        timeout: of collectives.
        start_method: how ranks are started: `popen`, or a start method of `multiprocessing`.
        kwargs: further arguments of PyTorch's `DistributedDataParallel`.
    """

    strategy_name = "dcp_ddp"
    saves_shards = False
    #: The parameters that DDP reduces, with their names.
    _reduced: dict[Parameter, str] | None = None

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
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        if model_averaging_period is not None:
            raise MisconfigurationException(
                "model_averaging_period lets ranks' parameters differ, which strategy='dcp_ddp'"
                " does not support."
            )
        if unknown := kwargs.keys() - inspect.signature(DistributedDataParallel).parameters:
            # Else torch refuses it, when ranks have started and read their data.
            raise TypeError(
                f"DCPDDPStrategy has no option {', '.join(sorted(unknown))}, nor has PyTorch's"
                " DistributedDataParallel, which is given all others."
            )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **kwargs,
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

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        if self._runner is None:
            return
        assert self.lightning_module is not None
        # DDP lays its buckets out anew after the first reduction, and another layout rounds sums
        # differently: a resumed run would not be, bit for bit, the one that was interrupted. Two
        # reductions of zeros settle the layout before the first iteration.
        self._reduced = self._trainable()
        for _ in range(2):
            self._reduce_gradients()
        self.lightning_module.zero_grad(set_to_none=True)

    def _trainable(self) -> dict[Parameter, str]:
        assert self.lightning_module is not None
        named = self.lightning_module.named_parameters()
        return {p: name for name, p in named if p.requires_grad}

    @override
    def _forward_training_step(self, *args: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args)

    @override
    def _reduce_gradients(self) -> None:
        assert isinstance(self.model, DistributedDataParallel) and self.lightning_module is not None
        pl_module = self.lightning_module
        # By identity: pruning, for one, renames parameters.
        before, now = self._reduced or {}, self._trainable()
        if now.keys() != before.keys():
            changed = ", ".join(sorted({**before, **now}[p] for p in now.keys() ^ before.keys()))
            raise RuntimeError(
                f"`requires_grad` of {changed} was changed during training. DDP reduces the"
                " parameters that were trainable when `fit` began: ranks would drift apart. Set"
                " `requires_grad` before `fit`, and call `fit` again to change it."
            )

        def closing(*_: Any, **__: Any) -> Tensor:
            return zero_for(p for p in pl_module.parameters() if p.requires_grad)

        # Armed here alone: a forward pass through DDP with gradients on (evaluation is measured by
        # one) would let it reduce in the next backward pass, which other ranks may not have.
        self.model.require_backward_grad_sync = True
        try:
            with forward_replaced(pl_module, closing):
                zero = self.model()
            zero.backward()
        finally:
            self.model.require_backward_grad_sync = False

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = with_frozen_parameters(checkpoint["optimizer_states"], self.optimizers)
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    @override
    def fixed_bytes(self, pl_module: L.LightningModule) -> int:
        trainable = num_bytes(p for p in pl_module.parameters() if p.requires_grad)
        frozen = num_bytes(p for p in pl_module.parameters() if not p.requires_grad)
        buffers = num_bytes(pl_module.buffers())
        # Parameters, gradients, DDP's buckets, and two moments as Adam keeps them.
        return 5 * trainable + frozen + buffers

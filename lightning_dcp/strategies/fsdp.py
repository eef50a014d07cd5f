"""DCP with FSDP2: parameters, gradients and optimizer state sharded between iterations."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies.model_parallel import ModelParallelStrategy
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_dcp.parallel.blocks import find_stacks
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies._lightning_compat import model_parallel as compat
from lightning_dcp.strategies.checkpointing.files import kind_of
from lightning_dcp.strategies.checkpointing.sharded import PlainShardedCheckpoints
from lightning_dcp.strategies.gradients import num_bytes
from lightning_dcp.strategies.iteration import LossAverage
from lightning_dcp.strategies.mixin import DCPStrategyMixin
from lightning_dcp.strategies.reliability import ReliabilityOptions
from lightning_dcp.strategies.settings import DCPSettings, Shard
from lightning_dcp.strategies.sharded_module import ShardedModule, refuse_fsdp1

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import lightning as L
    import torch
    from torch.optim import Optimizer


class DCPFSDPStrategy(DCPStrategyMixin, PlainShardedCheckpoints):
    """Data-Centric Parallel on FSDP2 (`strategy="dcp_fsdp"`), torch's `fully_shard`.

    Each parameter is sharded over all ranks. During an iteration, from its first forward to its
    last backward pass, parameters and gradients are whole on every rank, since ranks run different
    numbers of micro-batches; then gradients are reduced to shards, and clipping and the optimizer
    work on those. What is saved against `dcp_ddp` is the optimizer state, and between iterations
    the parameters.

    The model needs no `configure_model`: each repeated block is sharded by itself, the rest with
    the LightningModule. A `configure_model` that calls `fully_shard` with
    `mesh=self.device_mesh["data_parallel"]` is left as it is. After `fit` parameters are sharded
    (`torch.distributed.tensor.DTensor`).

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
        tensor_parallel_size: only 1: all ranks are data-parallel.
        save_distributed_checkpoint: write a folder with one file per rank instead of one file.
        process_group_backend: `nccl` on CUDA and `gloo` on CPU by default.
        timeout: of collectives.

    Raises:
        MisconfigurationException: for another `tensor_parallel_size`.
    """

    strategy_name = "dcp_fsdp"
    _sharded: ShardedModule | None = None

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
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        if tensor_parallel_size != 1:
            raise MisconfigurationException(
                f"tensor_parallel_size={tensor_parallel_size} was given to"
                f" strategy='{self.strategy_name}', which needs 1: ranks run different"
                " micro-batches, so none can hold a part of a layer for another. Long samples are"
                " spread over ranks by sequence parallelism instead."
            )
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
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

    # ---- setup -----------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @override
    def setup(self, trainer: L.Trainer) -> None:
        pl_module = self.lightning_module
        assert pl_module is not None
        refuse_fsdp1(pl_module, self.strategy_name)
        compat.materialize(pl_module, self.root_device)
        self.precision_plugin.convert_module(pl_module)
        pl_module.to(self.root_device)
        self._sharded = ShardedModule(
            pl_module,
            self.device_mesh["data_parallel"],
            self._blocks_of(pl_module),
            self.strategy_name,
        )
        with compat.configure_model_not_needed(pl_module):
            super().setup(trainer)

    def _blocks_of(self, pl_module: L.LightningModule) -> tuple[torch.nn.Module, ...]:
        try:
            main, *others = find_stacks(pl_module, self.settings.blocks)
        except ValueError:  # `fit` says what is wrong; an evaluation needs no blocks
            return ()
        # Of stacks that nobody named, those of the main one's kind: others might use a module's
        # parameters without calling it.
        kind = type(main.blocks[0])
        named = [s for s in others if not s.optional or type(s.blocks[0]) is kind]
        return tuple(block for stack in (main, *named) for block in stack.blocks)

    @override
    def _same_on_all_ranks(self, pl_module: L.LightningModule) -> None:
        pass  # shards were cut from rank 0's parameters, and buffers sent with them

    @override
    def _setup_dcp(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # SP groups measure different things at once: nothing may have to be gathered there.
        with self.whole_parameters():
            super()._setup_dcp(trainer, pl_module)

    @override
    def _allocated_bytes(self) -> int | None:
        allocated = super()._allocated_bytes()
        if allocated is None:
            return None
        assert self.lightning_module is not None
        return allocated + num_bytes(self.lightning_module.parameters())

    @override
    def teardown(self) -> None:
        if self._sharded is not None:
            self._sharded.reset()
            self._sharded = None
        super().teardown()

    @override
    def whole_parameters(self) -> AbstractContextManager[None]:
        return nullcontext() if self._sharded is None else self._sharded.whole()

    @override
    def _read_checkpoint(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        if kind_of(path) == "zero":
            raise MisconfigurationException(
                f"{str(path)!r} is a folder that DeepSpeed wrote, which"
                f" strategy='{self.strategy_name}' cannot read. Load it with strategy='dcp' and"
                " save it again (save_distributed_checkpoint=False): every strategy reads that."
            )
        # Straight into the shards, so that no rank needs all of it.
        return PlainShardedCheckpoints.load_checkpoint(self, path, weights_only)

    # ---- the engine's part of an iteration -------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._sharded is not None
        self._sharded.begin_iteration()  # until `_reduce_gradients`
        return super().training_step(*args, **kwargs)

    @override
    def _forward_training_step(self, *args: Any) -> Any:
        return ModelParallelStrategy.training_step(self, *args)

    @override
    def _gradient(self, parameter: torch.nn.Parameter) -> Tensor | None:
        assert self._sharded is not None
        return self._sharded.gradient(parameter)

    @override
    def _without_gradient(self, parameters: Sequence[torch.nn.Parameter]) -> list[bool]:
        assert self._sharded is not None
        return [gradient is None for gradient in self._sharded.gradients(parameters)]

    @override
    def abandon_pass(self) -> None:
        assert self._sharded is not None
        self._sharded.abandon_pass()

    @override
    def keep_gradients(self) -> None:
        pass  # whole parameters have none before the first backward pass

    @override
    def discard_gradients(self) -> None:
        pass  # the next iteration, or the same again, begins without

    @override
    def _reduce_gradients(self) -> None:
        assert self._sharded is not None
        stepped = (p for o in self.optimizers for group in o.param_groups for p in group["params"])
        if any(parameter.grad is not None for parameter in stepped):
            raise RuntimeError(
                "The gradients of the former step are still there when those of this one are"
                " reduced, and would be added. `optimizer_zero_grad` has to clear what the"
                " optimizer steps on, which is sharded: call `optimizer.zero_grad()` in it, not"
                " that of the module, whose parameters are whole at that time."
            )
        self._sharded.reduce()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        # A forward pass between reduction and step, in `on_before_optimizer_step` for one, has
        # gathered values that are old now.
        assert self._sharded is not None
        self._sharded.reshard()
        return output

    @override
    def fixed_bytes(self, pl_module: L.LightningModule) -> int:
        parameters = list(pl_module.parameters())
        stored = num_bytes(parameters)
        gradients = num_bytes(p for p in parameters if p.requires_grad)
        buffers = num_bytes(pl_module.buffers())
        # Of both this rank's shard beside what is whole, and two moments as Adam keeps them.
        shard = -(-(stored + 3 * gradients) // self.world_size)
        return stored + gradients + shard + buffers

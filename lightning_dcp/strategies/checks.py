"""Refuses, before training, what a plan-driven strategy cannot do for a Trainer, model or data set.

Each refusal says what was given, why it cannot work here, and what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import LBFGS
from torchmetrics import Metric

from lightning_dcp.strategies._lightning_compat import training as compat

if TYPE_CHECKING:
    from collections.abc import Sequence

    import lightning as L
    from torch.optim import Optimizer


def check_trainer(trainer: L.Trainer, strategy_name: str) -> None:
    """Refuse Trainer arguments and callbacks that contradict a plan.

    Raises:
        MisconfigurationException: as Lightning does for arguments that cannot be combined.
    """
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) cannot be"
            f" combined with strategy='{strategy_name}': the plan chooses each rank's accumulation"
            " steps itself, and one Trainer batch already is one optimizer step. Remove the"
            " argument; to change the size of a step set `planning.tokens_per_step` (or the"
            " DataLoader's batch_size, from which its default is derived)."
        )
    # Lightning's connectors set these two; the Trainer class does not declare them.
    overfit_batches: int | float = trainer.overfit_batches  # type: ignore[attr-defined]
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if overfit_batches:
        raise MisconfigurationException(
            f"Trainer(overfit_batches={overfit_batches}) replaces the sampler that carries the"
            f" plan, so it cannot be combined with strategy='{strategy_name}'. Use"
            " limit_train_batches, or pass a torch.utils.data.Subset of your data set."
        )
    for callback in callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            raise MisconfigurationException(
                "GradientAccumulationScheduler cannot be combined with"
                f" strategy='{strategy_name}': the plan chooses each rank's accumulation steps."
                " Remove the callback; `planning.tokens_per_step` sets the step size."
            )
        if isinstance(callback, BatchSizeFinder):
            raise MisconfigurationException(
                f"BatchSizeFinder cannot be combined with strategy='{strategy_name}': micro-batch"
                " sizes come from the cost profile and the memory limit. Remove the callback."
            )


def check_callbacks(trainer: L.Trainer, pl_module: L.LightningModule, strategy_name: str) -> None:
    """Refuse callbacks that change parameters behind the engine's back, where that goes wrong.

    Raises:
        MisconfigurationException: finetuning callbacks; weight averaging, pruning and learning rate
            finder where the engine shards what they touch; averaging that ends in a pass for
            BatchNorm.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, BaseFinetuning):
            raise MisconfigurationException(
                f"{name} unfreezes parameters during training, but strategy='{strategy_name}'"
                " reduces, and plans memory for, the parameters that are trainable when `fit`"
                " begins. Remove the callback: freeze by requires_grad_(False) and `fit`, then"
                " unfreeze and `fit` again."
            )
        if isinstance(callback, LearningRateFinder) and strategy_name != "dcp_ddp":
            raise MisconfigurationException(
                f"{name} puts a scheduler on an optimizer that is a plain torch one and winds"
                f" training back, which the engine of strategy='{strategy_name}' does not allow."
                " Search with strategy='dcp_ddp', then remove the callback."
            )
        if isinstance(callback, StochasticWeightAveraging):
            if strategy_name != "dcp_ddp":
                raise MisconfigurationException(
                    f"{name} does not support engines that shard the model or its optimizer, as"
                    f" that of strategy='{strategy_name}' does. Use strategy='dcp_ddp', or"
                    " WeightAveraging with strategy='dcp'."
                )
            if any(isinstance(module, _BatchNorm) for module in pl_module.modules()):
                raise MisconfigurationException(
                    f"{name} ends with a pass without backward that recomputes BatchNorm"
                    f" statistics, which strategy='{strategy_name}' cannot run from a plan. Use a"
                    " normalisation without batch statistics (LayerNorm, RMSNorm, GroupNorm), or"
                    " remove the callback."
                )
        if isinstance(callback, ModelPruning) and strategy_name != "dcp_ddp":
            raise MisconfigurationException(
                f"{name} replaces parameters during training, but the engine of"
                f" strategy='{strategy_name}' keeps (and shards) those that it began with. Use"
                " strategy='dcp_ddp'."
            )
        if isinstance(callback, WeightAveraging) and strategy_name == "dcp_fsdp":
            raise MisconfigurationException(
                f"{name} averages parameters that each rank holds whole, but"
                f" strategy='{strategy_name}' shards them. Use strategy='dcp_ddp' or 'dcp'."
            )


def check_train_loader(loaders: object, strategy_name: str) -> None:
    """Refuse anything but one train loader, as the user gave it or `train_dataloader` returned it.

    Raises:
        MisconfigurationException: several loaders, or one in a collection.
    """
    given = type(loaders).__name__
    if not isinstance(loaders, CombinedLoader):
        if not isinstance(loaders, (list, tuple, dict)):
            return
        loaders = CombinedLoader(loaders)
    if len(loaders.flattened) == 1:
        raise MisconfigurationException(
            f"The train loader was given inside a {given}, so `training_step` would expect its"
            f" batches inside one too; strategy='{strategy_name}' hands over micro-batches as your"
            " `collate_fn` makes them. Give the DataLoader itself."
        )
    raise MisconfigurationException(
        f"Several train loaders were given; strategy='{strategy_name}' plans one, since a plan puts"
        " samples together by length and not by where they come from. Join the data sets with"
        " torch.utils.data.ConcatDataset and return one DataLoader."
    )


def check_layer_sync(layer_sync: object, strategy_name: str) -> None:
    """Refuse BatchNorm that is synchronised over ranks.

    Args:
        layer_sync: Lightning's plugin that does so; None where there is none.
        strategy_name: for the message.

    Raises:
        MisconfigurationException: if there is one.
    """
    if layer_sync is not None:
        raise MisconfigurationException(
            "BatchNorm that is synchronised, by Trainer(sync_batchnorm=True) or a LayerSync"
            " plugin, starts a collective in every forward pass; under"
            f" strategy='{strategy_name}' ranks run different numbers of them, so training"
            " would hang. Use a normalisation without batch statistics (LayerNorm, RMSNorm,"
            " GroupNorm)."
        )


def check_module(pl_module: L.LightningModule, strategy_name: str) -> None:
    """Refuse LightningModules whose training step cannot be repeated for several micro-batches.

    Raises:
        MisconfigurationException: manual optimization, a `dataloader_iter` step, or metrics that
            would start a collective inside a micro-batch.
    """
    name = type(pl_module).__name__
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(
            f"{name} uses manual optimization (automatic_optimization=False), which"
            f" strategy='{strategy_name}' does not support: the strategy runs several micro-batches"
            " per optimizer step and weights their losses. Return the loss from `training_step` and"
            " let Lightning step the optimizer."
        )
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            f"{name}.training_step takes `dataloader_iter`; strategy='{strategy_name}' calls it"
            " once per micro-batch with an ordinary batch. Use the signature"
            " training_step(self, batch, batch_idx)."
        )
    if compat.is_compiled(pl_module):
        raise MisconfigurationException(
            f"{name} was compiled as a whole by torch.compile, which would trace past the hooks by"
            f" which strategy='{strategy_name}' shares and recomputes blocks. Compile inside"
            " `configure_model`: `for block in self.blocks: block.compile()`."
        )
    for path, module in pl_module.named_modules():
        if getattr(module, "sparse", False) is True:
            raise MisconfigurationException(
                f"{name}.{path} has sparse gradients (sparse=True), which cannot be accumulated and"
                f" reduced under strategy='{strategy_name}'. Use sparse=False."
            )
    for path, metric in pl_module.named_modules():
        if isinstance(metric, Metric) and metric.dist_sync_on_step:
            raise MisconfigurationException(
                f"The metric {name}.{path} has dist_sync_on_step=True: it would start a collective"
                " in every micro-batch, and ranks run different numbers of them, so training would"
                " hang. Remove the argument; the metric is reduced over ranks when it is computed."
            )


def check_parameters(pl_module: L.LightningModule, strategy_name: str) -> None:
    """Refuse parameters that the engine cannot take, and say what it does with own clipping.

    Raises:
        MisconfigurationException: sharded parameters for an engine that needs whole ones;
            parameters without dimensions for one that shards.
    """
    module = type(pl_module).__name__
    for name, parameter in pl_module.named_parameters():
        if isinstance(parameter, DTensor) and strategy_name != "dcp_fsdp":
            raise MisconfigurationException(
                f"{module}.{name} is sharded (a DTensor), as a `fit` under strategy='dcp_fsdp'"
                f" leaves it, but strategy='{strategy_name}' needs whole parameters. Save a"
                " checkpoint and load it into a new module with `load_from_checkpoint`."
            )
        if parameter.ndim == 0 and strategy_name != "dcp_ddp":
            raise MisconfigurationException(
                f"{module}.{name} has no dimension, which the engine of"
                f" strategy='{strategy_name}' cannot take. Make it a tensor with one element,"
                " torch.nn.Parameter(torch.ones(1)), or use strategy='dcp_ddp'."
            )
    if strategy_name == "dcp" and is_overridden("configure_gradient_clipping", pl_module):
        rank_zero_warn(
            f"{module} overrides `configure_gradient_clipping`, but under strategy='dcp' DeepSpeed"
            " reduces gradients after it, in its step: there are only parts of them to clip, and"
            " `clip_gradients` does nothing. Use Trainer(gradient_clip_val=...), which DeepSpeed"
            " applies to the whole, or strategy='dcp_ddp'."
        )


def refuse_written_parameters(written: Sequence[float], strategy_name: str) -> None:
    """Refuse a `training_step` that writes to parameters; to be called by all ranks.

    Args:
        written: by rank, whether it did.
        strategy_name: for the message.

    Raises:
        RuntimeError: if any did.
    """
    ranks = [rank for rank, value in enumerate(written) if value]
    if ranks:
        raise RuntimeError(
            f"`training_step` wrote to parameters of the module (on ranks {ranks}). Under"
            f" strategy='{strategy_name}' ranks run it different numbers of times per optimizer"
            " step, some not at all, so their parameters would drift apart. Write to parameters in"
            " `on_train_batch_start` or `on_train_batch_end`, which each rank runs once a step."
        )


@contextmanager
def one_optimizer(strategy_name: str) -> Iterator[None]:
    """Around `configure_optimizers`: Lightning's advice on several optimizers is refused here."""
    try:
        yield
    except MisconfigurationException as error:
        if "single optional scheduler" not in str(error):
            raise
        raise MisconfigurationException(
            "`configure_optimizers` returned several learning rate schedulers, but the engine of"
            f" strategy='{strategy_name}' takes one. Join them in a ChainedScheduler or"
            " SequentialLR of torch.optim.lr_scheduler, or use strategy='dcp_ddp'."
        ) from error
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise MisconfigurationException(
            f"`configure_optimizers` returned several optimizers; strategy='{strategy_name}'"
            " supports one. Put the parameters into groups of one optimizer, or use strategy='ddp'"
            " with manual optimization."
        ) from error


def check_optimizers(optimizers: Sequence[Optimizer], strategy_name: str) -> None:
    """Refuse anything but a first-order optimizer.

    Raises:
        MisconfigurationException: LBFGS, which calls its closure repeatedly.
    """
    if optimizers and isinstance(optimizers[0], LBFGS):
        raise MisconfigurationException(
            f"LBFGS evaluates its closure several times per step, which strategy='{strategy_name}'"
            " does not support: each evaluation would be another iteration of the plan. Use a"
            " first-order optimizer."
        )


def check_has_optimizer(optimizer: Optimizer, strategy_name: str) -> None:
    """Refuse a module without an optimizer, for an engine that shards one.

    Raises:
        MisconfigurationException: `configure_optimizers` returned None.
    """
    if not any(group["params"] for group in optimizer.param_groups):
        raise MisconfigurationException(
            "`configure_optimizers` returned no optimizer, but the engine of"
            f" strategy='{strategy_name}' shards one over the ranks. Return one, or use"
            " strategy='dcp_ddp'."
        )


def check_shards(optimizer: Optimizer, strategy_name: str) -> None:
    """Refuse what an engine cannot shard that lays each parameter group out as one vector.

    DeepSpeed leaves an empty group out, so that schedulers would set another group's learning rate,
    and cannot make a shard of one that is frozen.

    Raises:
        MisconfigurationException: optimizers that look at the rows and columns of a parameter; a
            group in which nothing trains.
    """
    name = type(optimizer).__name__
    if name in ("Adafactor", "Muon"):
        raise MisconfigurationException(
            f"{name} looks at the rows and columns of each parameter, but the engine of"
            f" strategy='{strategy_name}' gives it a piece of a vector of all parameters: it would"
            " train otherwise than on one device, and on each number of ranks. Use an optimizer"
            " that works element by element, or strategy='dcp_ddp'."
        )
    for number, group in enumerate(optimizer.param_groups):
        if not any(parameter.requires_grad for parameter in group["params"]):
            raise MisconfigurationException(
                f"Parameter group {number} of the optimizer has no parameter that requires a"
                f" gradient, but the engine of strategy='{strategy_name}' shards each group. Leave"
                " the group out in `configure_optimizers`, or use strategy='dcp_ddp'."
            )


def check_memory_limit(limit_bytes: int, fixed_bytes: int) -> None:
    """Refuse a memory limit that the model alone does not fit into.

    Raises:
        MisconfigurationException: with both figures.
    """
    if fixed_bytes >= limit_bytes:
        raise MisconfigurationException(
            f"The memory limit is {limit_bytes:,} bytes per rank, but parameters, gradients,"
            f" optimizer state and buffers alone take {fixed_bytes:,}: no sample could run. Raise"
            " memory_limit_bytes above that, use more ranks (the optimizer state is sharded under"
            " strategy='dcp'), or use a smaller model."
        )

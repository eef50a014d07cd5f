"""Refuses, before training, what a plan-driven strategy cannot do for a Trainer, model or data set.

Each refusal says what was given, why it cannot work here, and what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import LBFGS
from torchmetrics import Metric

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


@contextmanager
def one_optimizer(strategy_name: str) -> Iterator[None]:
    """Around `configure_optimizers`: Lightning's advice on several optimizers is refused here."""
    try:
        yield
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


def check_memory_limit(limit_bytes: int, fixed_bytes: int) -> None:
    """Refuse a memory limit that the model alone does not fit into.

    Raises:
        MisconfigurationException: with both figures.
    """
    if fixed_bytes >= limit_bytes:
        raise MisconfigurationException(
            f"The memory limit is {limit_bytes:,} bytes per rank, but parameters, gradients,"
            f" optimizer state and buffers alone take {fixed_bytes:,}: no sample could run. Raise"
            " the limit above that, use more ranks (the optimizer state is sharded under"
            " strategy='dcp'), or use a smaller model."
        )


def warn_of_other_plans(saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Say so if a run goes on in the middle of an epoch with other plans than it began with.

    Args:
        saved: what the plans of the checkpoint were made from (`EpochPlanner.inputs`).
        current: the same of this run.
    """
    differing = [name for name in current if saved.get(name) != current[name]]
    if differing:
        shown = "; ".join(
            f"{name}: {saved.get(name, 'unknown')} -> {current[name]}" for name in differing
        )
        rank_zero_warn(
            "DCP: this checkpoint was saved in the middle of an epoch whose plans were made from"
            f" something else ({shown}). Until this epoch ends, samples may be repeated or left"
            " out; later epochs take each sample exactly once again."
        )

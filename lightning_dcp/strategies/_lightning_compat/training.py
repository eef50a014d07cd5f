"""Every private name of Lightning that this package touches, each with the reason.

Lightning has no public place for what a plan-driven strategy needs: a training batch made of
several micro-batches, an iteration-wide loss, and logging that is reduced once per iteration. What
is touched is kept here so that a new Lightning release is checked in one file. Written against
Lightning 2.6.6; the names are covered by `tests/strategies/test_lightning_compat.py`.

========================================  =====================================================
private name                              why
========================================  =====================================================
``_data_connector._prepare_dataloader``   the only place that is given the user's own train loader
                                          together with its stage, before a DistributedSampler is
                                          put in
``fit_loop.epoch_loop._results``          where `self.log` files values; ours collects those of an
                                          iteration and reduces them once
``fit_loop.epoch_loop.
automatic_optimization``                  returns the loss that callbacks see; ours puts the
                                          iteration's mean there
``LightningModule.
_on_before_batch_transfer``               would hand the user's hook a list of micro-batches
``LightningModule._compiler_ctx``         to refuse a module that was compiled as a whole
``LightningModule._current_fx_name``      is "backward" while micro-batches 1.. run, which would
                                          file their logs under another key
``_ResultCollection._extract_batch_size`` guesses the batch size of what callbacks log from the
                                          batch; that of an iteration is not to be guessed
``_ResultMetric._forward_cache``          the value of a step of a metric object
``trainer._loggers``                      replaced by a DummyLogger while the cost profile is made
``fit_loop._data_source``                 to know whether a train loader exists at all, and to see
                                          what the user gave before Lightning takes it apart
``fit_loop._combined_loader``             to have the loader made again
``_logger_connector``                     to reset values of the former epoch on a rank that has
                                          not logged yet, as `self.log` does elsewhere
========================================  =====================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Metric
from typing_extensions import override

from lightning_dcp.data.batch import IterationBatch

if TYPE_CHECKING:
    from collections import OrderedDict

    import lightning as L
    from torch.optim import Optimizer

    from lightning_dcp.strategies.logged import LogKey

LogCall = Callable[..., None]


class IterationResults(_ResultCollection):
    """Lightning's store of logged values, with a hook for values logged inside a micro-batch.

    What `collector` takes is reduced once, at the end of the iteration; everything else is
    Lightning's.
    """

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self.collector: Callable[[str, str, Tensor | Metric, dict[str, Any]], bool] | None = None
        #: Samples of the running iteration over all ranks: the batch size of what callbacks log.
        self.iteration_batch_size = 1

    @override
    def _extract_batch_size(self, value: Any, batch_size: int | None, meta: Any) -> int:
        if batch_size is None and isinstance(self.batch, IterationBatch):
            return self.iteration_batch_size
        return super()._extract_batch_size(value, batch_size, meta)

    @override
    def log(self, fx: str, name: str, value: Any, **kwargs: Any) -> None:
        if self.collector is None or not self.collector(fx, name, value, kwargs):
            self.file(fx, name, value, **kwargs)

    def file(self, fx: str, name: str, value: Any, **kwargs: Any) -> None:
        """Store a value as Lightning does."""
        super().log(fx, name, value, **kwargs)


class IterationOptimization(_AutomaticOptimization):
    """Automatic optimization whose output carries the iteration's mean loss.

    Lightning copies the loss that `training_step` returns before `backward` runs; that is the first
    micro-batch's, already weighted for the backward pass.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        iteration_loss: Callable[[], Tensor | None],
        abort: Callable[[], None],
    ) -> None:
        super().__init__(trainer)
        self._iteration_loss = iteration_loss
        self._abort = abort

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> Any:
        try:
            outputs = super().run(optimizer, batch_idx, kwargs)
        except BaseException:
            # A hook between forward and backward may have raised; what handles it, such as a
            # checkpoint on exceptions, is outside of the micro-batch.
            self._abort()
            raise
        loss = self._iteration_loss()
        if loss is not None and "loss" in outputs:
            outputs["loss"] = loss
        return outputs


class TrainerPatches:
    """Puts our pieces into one Trainer for the duration of one `fit`, and takes them out again."""

    def __init__(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        *,
        check_train_loader: Callable[[object], None],
        prepare_train_loader: Callable[[DataLoader[Any]], DataLoader[Any]],
        iteration_loss: Callable[[], Tensor | None],
        abort: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        epoch_loop = trainer.fit_loop.epoch_loop

        self._old_results = epoch_loop._results
        self.results = IterationResults(training=True)
        epoch_loop._results = self.results

        self._old_optimization = epoch_loop.automatic_optimization
        optimization = IterationOptimization(trainer, iteration_loss, abort)
        # Progress is state that checkpoints restore: the new loop counts on from the old one's.
        optimization.optim_progress = self._old_optimization.optim_progress
        epoch_loop.automatic_optimization = optimization

        connector = trainer._data_connector
        prepare = connector._prepare_dataloader

        def prepare_dataloader(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
            if mode == RunningStage.TRAINING:
                return prepare_train_loader(dataloader)  # type: ignore[arg-type]
            return prepare(dataloader, shuffle=shuffle, mode=mode)

        connector._prepare_dataloader = prepare_dataloader  # type: ignore[method-assign]

        self._source = trainer.fit_loop._data_source
        request = self._source.dataloader

        def dataloader() -> Any:
            loaders = request()
            check_train_loader(loaders)
            return loaders

        self._source.__dict__["dataloader"] = dataloader

        before_transfer = pl_module._on_before_batch_transfer

        def on_before_batch_transfer(batch: Any, dataloader_idx: int = 0) -> Any:
            # The user's hook runs once per micro-batch, in `move_micro_batch`.
            if isinstance(batch, IterationBatch):
                return batch
            return before_transfer(batch, dataloader_idx=dataloader_idx)

        pl_module.__dict__["_on_before_batch_transfer"] = on_before_batch_transfer

    def remove(self) -> None:
        """Undo everything. Safe to call twice."""
        self._trainer._data_connector.__dict__.pop("_prepare_dataloader", None)
        self._source.__dict__.pop("dataloader", None)
        self._pl_module.__dict__.pop("_on_before_batch_transfer", None)
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if epoch_loop._results is self.results:
            epoch_loop._results = self._old_results
        if isinstance(epoch_loop.automatic_optimization, IterationOptimization):
            self._old_optimization.optim_progress = epoch_loop.automatic_optimization.optim_progress
            epoch_loop.automatic_optimization = self._old_optimization


@contextmanager
def logging_as_training_step(pl_module: L.LightningModule) -> Iterator[None]:
    """File what is logged under `training_step`, also while Lightning is in its backward hook."""
    before = pl_module._current_fx_name
    pl_module._current_fx_name = "training_step"
    try:
        yield
    finally:
        pl_module._current_fx_name = before


@contextmanager
def silent_logging(trainer: L.Trainer, pl_module: L.LightningModule) -> Iterator[None]:
    """`self.log*` does nothing and loggers are dummies: for steps that are not training."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    loggers = trainer._loggers
    trainer._loggers = [DummyLogger() for _ in loggers]
    shadowed: dict[str, Any] = {
        name: pl_module.__dict__[name] for name in ("log", "log_dict") if name in pl_module.__dict__
    }
    pl_module.__dict__["log"] = pl_module.__dict__["log_dict"] = nothing
    try:
        yield
    finally:
        trainer._loggers = loggers
        for name in ("log", "log_dict"):
            pl_module.__dict__.pop(name, None)
        pl_module.__dict__.update(shadowed)


def move_micro_batch(
    strategy_batch_to_device: Callable[..., Any],
    pl_module: L.LightningModule,
    batch: Any,
    device: torch.device,
    dataloader_idx: int = 0,
) -> Any:
    """One micro-batch through the user's `on_before_batch_transfer`, transfer and after hooks."""
    cls, convert = type(pl_module), pl_module.trainer.precision_plugin.convert_input
    batch = cls._on_before_batch_transfer(pl_module, convert(batch), dataloader_idx=dataloader_idx)
    return strategy_batch_to_device(batch, device=device, dataloader_idx=dataloader_idx)


def has_transfer_hooks(trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
    """Whether the user overrides a hook around the transfer, which may change batches."""
    sources = (pl_module, getattr(trainer, "datamodule", None))
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    return any(s is not None and is_overridden(hook, s) for s in sources for hook in hooks)


def has_zero_grad_hooks(pl_module: L.LightningModule) -> bool:
    """Whether the user, or a callback, does something where gradients are cleared."""
    callbacks: list[Any] = pl_module.trainer.callbacks  # type: ignore[attr-defined]
    return is_overridden("optimizer_zero_grad", pl_module) or any(
        is_overridden("on_before_zero_grad", each) for each in (pl_module, *callbacks)
    )


def step_arguments(
    pl_module: L.LightningModule, name: str, batch: Any, dataloader_idx: int | None = None
) -> tuple[Any, ...]:
    """Arguments for a step, which may leave `batch_idx` out, as Lightning's loops build them.

    Args:
        pl_module: whose step it is.
        name: of the step.
        batch: on the device.
        dataloader_idx: None where there is one loader.
    """
    takes_index = is_param_in_hook_signature(getattr(pl_module, name), "batch_idx", min_args=2)
    last = () if dataloader_idx is None else (dataloader_idx,)
    return (batch, 0, *last) if takes_index else (batch, *last)


def is_compiled(pl_module: L.LightningModule) -> bool:
    """Whether the module as a whole went through `torch.compile`."""
    return pl_module._compiler_ctx is not None


def has_train_loader(trainer: L.Trainer) -> bool:
    """Whether `fit` was given a train loader (or a module or datamodule that makes one)."""
    return bool(trainer.fit_loop._data_source.is_defined())


def file_reduced_value(
    trainer: L.Trainer, results: IterationResults, key: LogKey, value: Tensor, weight: float
) -> None:
    """Give Lightning one value that is already reduced over ranks and micro-batches."""
    connector = trainer._logger_connector
    if connector.should_reset_tensors(key.fx):
        # Lightning resets in `self.log`, which an idle rank has not called in this epoch.
        results.reset(metrics=False, fx=key.fx)
    connector._current_fx = key.fx
    results.file(
        key.fx,
        key.name,
        value,
        prog_bar=key.prog_bar,
        logger=key.logger,
        on_step=key.on_step,
        on_epoch=key.on_epoch,
        reduce_fx=key.reduce,
        add_dataloader_idx=key.add_dataloader_idx,
        # "Synchronised" by the identity: no collective, and no warning that it should be.
        sync_dist=True,
        sync_dist_fn=_identity,
        # Lightning adds integers up exactly.
        batch_size=int(weight) if weight == int(weight) else weight,
    )


def file_metric(
    pl_module: L.LightningModule,
    results: IterationResults,
    key: LogKey,
    step_value: Tensor | None,
) -> None:
    """Give Lightning a metric object that some rank has logged: all ranks must compute it.

    Its value of the step is the iteration's, not that of this rank's last micro-batch.
    """
    assert key.metric_attribute is not None
    results.file(
        key.fx,
        key.name,
        pl_module.get_submodule(key.metric_attribute),
        prog_bar=key.prog_bar,
        logger=key.logger,
        on_step=key.on_step,
        on_epoch=key.on_epoch,
        metric_attribute=key.metric_attribute,
    )
    results[f"{key.fx}.{key.name}"]._forward_cache = step_value


def _identity(value: Any, *_: Any, **__: Any) -> Any:
    return value


def reload_train_loader(trainer: L.Trainer) -> None:
    """Ask the user's hook for the train loader again, and prepare it again."""
    trainer.fit_loop._combined_loader = None
    trainer.fit_loop.setup_data()


def shuffles_under_ddp(trainer: L.Trainer) -> bool:
    """Whether Lightning would give a train loader without `DistributedSampler` one that shuffles.

    It does so for more than one rank, also where the loader says `shuffle=False`, unless the
    trainer has `use_distributed_sampler=False`.
    """
    return trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler

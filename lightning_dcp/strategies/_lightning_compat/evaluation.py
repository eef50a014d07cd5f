"""Every private name of Lightning that planned evaluation touches, each with the reason.

For validation, testing and prediction. Written against Lightning 2.6.6; the
names are covered by `tests/strategies/test_evaluation.py`.

========================================  =====================================================
private name                              why
========================================  =====================================================
``_data_connector._prepare_dataloader``   the only place that is given the user's own loader
                                          together with its stage, before a DistributedSampler is
                                          put in
``loop._data_source.dataloader``          to see that a new set of loaders begins, and how they
                                          are combined
``loop._evaluation_step``,
``loop._predict_step``                    transfer, hooks and step of one Trainer batch: what our
                                          context has to be around
``loop._results``                         where `self.log` files values; ours collects those of a
                                          Trainer batch and reduces them once
``_logger_connector.on_batch_end``        called after the last hook of a batch and before what
                                          was logged in it is read
``predict_loop._get_batch_indices``       finds indices in a batch sampler only; a planned loader
                                          has none
``predict_loop._predictions``,
``epoch_batch_indices``                   a rank that repeats a micro-batch must not return it
``predict_loop._on_predict_epoch_end``    returns the predictions: those of all ranks, in order
``trainer._accelerator_connector.
use_distributed_sampler``                 whether the user has taken the division of data over
                                          ranks into their own hands
========================================  =====================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dcp.data.evaluation_loader import original_loader
from lightning_dcp.strategies._lightning_compat.training import (
    IterationResults,
    file_reduced_value,
)

if TYPE_CHECKING:
    import lightning as L

    from lightning_dcp.strategies.logged import LogKey

_MISSING = object()
_STEP_NAMES = {
    TrainerFn.FITTING: "validation_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


def step_name(trainer: L.Trainer) -> str:
    """The hook that evaluates a batch in what the Trainer is running."""
    assert trainer.state.fn is not None
    return _STEP_NAMES[trainer.state.fn]


def is_prediction(trainer: L.Trainer) -> bool:
    """Whether the Trainer is in `predict`."""
    return trainer.state.fn == TrainerFn.PREDICTING


def divides_data(trainer: L.Trainer) -> bool:
    """Whether Lightning, and not the user, divides data over ranks."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


class EvaluationPatches:
    """Puts our pieces into the loop that evaluates, for one run, and takes them out again.

    Args:
        trainer: inside `fit`, `validate`, `test` or `predict`.
        requested: given the user's loaders, as they are, whenever they are asked for.
        prepare: given each of them in turn; makes one that follows a plan, or None to leave it to
            Lightning.
        around_batch: context around all that happens to one batch, by (batch, batch_idx,
            dataloader_idx).
        before_batch_end: called once the last hook of a batch has run.
        collector: takes what `self.log` is given, or leaves it to Lightning by returning False.
        batch_indices: samples of each Trainer batch of a loader, or None.
        merge_predictions: `(dataloader_idx, this rank's predictions)` to those of all ranks.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        *,
        requested: Callable[[object], None],
        prepare: Callable[[DataLoader[Any]], DataLoader[Any] | None],
        around_batch: Callable[[Any, int, int], AbstractContextManager[None]],
        before_batch_end: Callable[[], None],
        collector: Callable[..., bool],
        batch_indices: Callable[[object], Sequence[Sequence[int]] | None],
        merge_predictions: Callable[[int, list[Any]], list[Any]],
    ) -> None:
        self._trainer = trainer
        self._undo: list[Callable[[], None]] = []
        assert trainer.state.fn is not None
        loop: Any = {
            TrainerFn.FITTING: trainer.fit_loop.epoch_loop.val_loop,
            TrainerFn.VALIDATING: trainer.validate_loop,
            TrainerFn.TESTING: trainer.test_loop,
            TrainerFn.PREDICTING: trainer.predict_loop,
        }[trainer.state.fn]
        self._loop = loop
        connector = trainer._data_connector
        before = connector._prepare_dataloader

        def prepare_dataloader(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
            if mode != RunningStage.TRAINING:
                dataloader = original_loader(dataloader)
                planned = prepare(dataloader)  # type: ignore[arg-type]
                if planned is not None:
                    return planned
            return before(dataloader, shuffle=shuffle, mode=mode)

        self._shadow(connector, "_prepare_dataloader", prepare_dataloader)
        request = loop._data_source.dataloader

        def dataloader() -> Any:
            loaders = request()
            requested(loaders)
            return loaders

        self._shadow(loop._data_source, "dataloader", dataloader)
        if is_prediction(trainer):
            self._patch_prediction(around_batch, batch_indices, merge_predictions)
            return
        step = loop._evaluation_step

        def evaluation_step(batch: Any, batch_idx: int, dataloader_idx: int, *rest: Any) -> None:
            with around_batch(batch, batch_idx, dataloader_idx):
                step(batch, batch_idx, dataloader_idx, *rest)

        self._shadow(loop, "_evaluation_step", evaluation_step)
        self.results = IterationResults(training=False)
        self.results.collector = collector
        self._shadow(loop, "_results", self.results)
        on_batch_end = trainer._logger_connector.on_batch_end

        def on_batch_end_of_logger() -> None:
            before_batch_end()
            on_batch_end()

        self._shadow(trainer._logger_connector, "on_batch_end", on_batch_end_of_logger)

    def _patch_prediction(
        self,
        around_batch: Callable[[Any, int, int], AbstractContextManager[None]],
        batch_indices: Callable[[object], Sequence[Sequence[int]] | None],
        merge_predictions: Callable[[int, list[Any]], list[Any]],
    ) -> None:
        loop = self._loop
        step, get_indices, epoch_end = (
            loop._predict_step,
            loop._get_batch_indices,
            loop._on_predict_epoch_end,
        )

        def predict_step(batch: Any, batch_idx: int, dataloader_idx: int, *rest: Any) -> None:
            with around_batch(batch, batch_idx, dataloader_idx):
                step(batch, batch_idx, dataloader_idx, *rest)

        def get_batch_indices(dataloader: object) -> Sequence[Sequence[int]]:
            known = batch_indices(dataloader)
            return get_indices(dataloader) if known is None else known

        def on_predict_epoch_end() -> Any:
            returned = epoch_end()
            if not loop.return_predictions:
                return returned
            loop._predictions = [
                merge_predictions(i, predictions) for i, predictions in enumerate(loop._predictions)
            ]
            return loop.predictions

        self._shadow(loop, "_predict_step", predict_step)
        self._shadow(loop, "_get_batch_indices", get_batch_indices)
        self._shadow(loop, "_on_predict_epoch_end", on_predict_epoch_end)

    @contextmanager
    def prediction_not_kept(self, dataloader_idx: int) -> Iterator[None]:
        """What is predicted in here is neither returned nor written."""
        loop = self._loop
        lists = (loop._predictions[dataloader_idx], loop.epoch_batch_indices[dataloader_idx])
        lengths = [len(values) for values in lists]
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        writers = [c for c in callbacks if isinstance(c, BasePredictionWriter)]
        undo = [_shadowed(writer, "on_predict_batch_end", _nothing) for writer in writers]
        try:
            yield
        finally:
            for one in undo:
                one()
            for values, length in zip(lists, lengths, strict=True):
                del values[length:]

    def file_value(self, key: LogKey, value: Tensor, weight: float) -> None:
        """Give Lightning one value that is already reduced over ranks."""
        file_reduced_value(self._trainer, self.results, key, value, weight)

    def remove(self) -> None:
        """Undo everything. Safe to call twice."""
        while self._undo:
            self._undo.pop()()

    def _shadow(self, target: Any, name: str, value: Any) -> None:
        self._undo.append(_shadowed(target, name, value))


def _shadowed(target: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of an instance; what is returned puts back what was there."""
    attributes = vars(target)
    before = attributes.get(name, _MISSING)
    attributes[name] = value

    def undo() -> None:
        if before is _MISSING:
            attributes.pop(name, None)
        else:
            attributes[name] = before

    return undo


def _nothing(*_: Any, **__: Any) -> None:
    return None


def combined_otherwise(loaders: object) -> str | None:
    """The mode of a CombinedLoader whose batches are made of several loaders' batches."""
    mode = getattr(loaders, "_mode", "sequential")
    return None if mode == "sequential" else str(mode)


def takes_iterator(pl_module: L.LightningModule, name: str) -> bool:
    """Whether a step fetches its batches itself."""
    return is_param_in_hook_signature(getattr(pl_module, name), "dataloader_iter", explicit=True)

"""The private names of Lightning that are touched exist, and take what we give them."""

from __future__ import annotations

import inspect

import lightning as L
import pytest
import torch
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dcp.data.batch import IterationBatch
from lightning_dcp.strategies._lightning_compat import training as compat
from lightning_dcp.strategies._lightning_compat.decisions import AgreedDecisions
from lightning_dcp.strategies.logged import LogKey
from tests.strategies.toys import ToyLM


def parameters_of(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_signatures() -> None:
    assert parameters_of(_DataConnector._prepare_dataloader) == [
        "self",
        "dataloader",
        "shuffle",
        "mode",
    ]
    assert parameters_of(_AutomaticOptimization.run) == ["self", "optimizer", "batch_idx", "kwargs"]
    assert parameters_of(_ResultCollection.log)[:4] == ["self", "fx", "name", "value"]
    assert parameters_of(_ResultCollection._extract_batch_size) == [
        "self",
        "value",
        "batch_size",
        "meta",
    ]
    assert parameters_of(L.LightningModule._on_before_batch_transfer) == [
        "self",
        "batch",
        "dataloader_idx",
    ]


@pytest.fixture
def trainer() -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )


def test_attributes(trainer: L.Trainer) -> None:
    loop = trainer.fit_loop
    assert isinstance(loop.epoch_loop._results, _ResultCollection)
    assert isinstance(loop.epoch_loop.automatic_optimization, _AutomaticOptimization)
    for name in ("_data_source", "_combined_loader", "_data_fetcher"):
        assert hasattr(loop, name)
    assert hasattr(trainer._logger_connector, "should_reset_tensors")
    assert hasattr(trainer._logger_connector, "_current_fx")
    assert hasattr(ToyLM(), "_current_fx_name")
    assert not compat.is_compiled(ToyLM())
    assert callable(trainer._signal_connector._sigterm_notifier_fn)
    assert callable(loop.epoch_loop._broadcast_sigterm_tensor)
    assert callable(loop.epoch_loop._should_check_val_fx)
    assert hasattr(trainer, "_val_check_time_interval")


def test_ranks_agree_on_the_end_and_on_validation(
    trainer: L.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = trainer.fit_loop.epoch_loop
    AgreedDecisions(trainer, float).remove()  # one rank: nothing is touched
    assert "_broadcast_sigterm_tensor" not in vars(loop)
    monkeypatch.setattr(L.Trainer, "world_size", 2)
    trainer._val_check_time_interval = 1e6
    monkeypatch.setattr(type(loop), "_should_check_val_fx", lambda self, fetcher: False)
    others = [0.0]
    decisions = AgreedDecisions(trainer, lambda own: own + others[0])
    assert not loop._should_check_val_fx(None)
    loop._broadcast_sigterm_tensor()
    others[0] = 1.0
    assert loop._should_check_val_fx(None)
    with pytest.raises(SIGTERMException):
        loop._broadcast_sigterm_tensor()
    assert trainer.received_sigterm
    decisions.remove()
    assert not {"_broadcast_sigterm_tensor", "_should_check_val_fx"} & set(vars(loop))


def test_ranks_that_part_are_told(trainer: L.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone has set `trainer.should_stop`, and validates, while the other goes on."""
    loop = trainer.fit_loop.epoch_loop
    monkeypatch.setattr(L.Trainer, "world_size", 2)
    monkeypatch.setattr(type(loop), "_should_check_val_fx", lambda self, fetcher: True)
    others = [0.0]
    decisions = AgreedDecisions(trainer, lambda own: own + others[0])
    loop._broadcast_sigterm_tensor()
    with pytest.raises(RuntimeError, match=r"Ranks have parted .* validation on rank 0"):
        loop._should_check_val_fx(None)
    others[0] = 2.0**36
    assert loop._should_check_val_fx(None)
    with pytest.raises(RuntimeError, match=r"Ranks have parted .* an iteration on rank 0"):
        loop._broadcast_sigterm_tensor()
    decisions.remove()


def test_ranks_agree_on_when_a_job_is_queued_again(
    trainer: L.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM's signal saves in its handler, in the midst of whatever the rank is doing."""
    monkeypatch.setattr(L.Trainer, "world_size", 2)
    saved: list[int] = []
    connector = trainer._signal_connector
    monkeypatch.setattr(
        type(connector),
        "_slurm_sigusr_handler_fn",
        lambda self, signum, frame: saved.append(signum),
    )
    others = [0.0]
    decisions = AgreedDecisions(trainer, lambda own: own + others[0])
    agree = trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor
    connector._slurm_sigusr_handler_fn(12, None)
    assert not saved
    agree()
    agree()
    assert saved == [12]
    others[0] = 2.0**20  # another rank has got it
    agree()
    assert len(saved) == 2
    others[0] += 1  # and SIGTERM at the same time
    with pytest.raises(SIGTERMException):
        agree()
    assert len(saved) == 3
    decisions.remove()
    assert "_slurm_sigusr_handler_fn" not in vars(connector)


def test_patches_are_taken_out_again(trainer: L.Trainer) -> None:
    model = ToyLM()
    loop = trainer.fit_loop.epoch_loop
    results, optimization = loop._results, loop.automatic_optimization
    prepare = trainer._data_connector._prepare_dataloader
    patches = compat.TrainerPatches(
        trainer,
        model,
        check_train_loader=lambda loaders: None,
        prepare_train_loader=lambda loader: loader,
        iteration_loss=lambda: None,
        abort=lambda: None,
    )
    assert loop._results is patches.results
    assert "_on_before_batch_transfer" in vars(model)
    patches.remove()
    patches.remove()
    assert loop._results is results
    assert loop.automatic_optimization is optimization
    assert trainer._data_connector._prepare_dataloader == prepare
    assert "_on_before_batch_transfer" not in vars(model)


def test_progress_goes_on_counting_over_patches(trainer: L.Trainer) -> None:
    loop = trainer.fit_loop.epoch_loop
    before = loop.automatic_optimization.optim_progress
    patches = compat.TrainerPatches(
        trainer,
        ToyLM(),
        check_train_loader=lambda loaders: None,
        prepare_train_loader=lambda loader: loader,
        iteration_loss=lambda: None,
        abort=lambda: None,
    )
    assert loop.automatic_optimization.optim_progress is before
    patches.remove()
    assert loop.automatic_optimization.optim_progress is before


def test_micro_batches_go_through_the_users_hook_one_by_one(trainer: L.Trainer) -> None:
    model = ToyLM()
    seen = []
    model._on_before_batch_transfer = lambda batch, dataloader_idx=0: seen.append(batch)  # type: ignore[method-assign, assignment]
    compat.TrainerPatches(
        trainer,
        model,
        check_train_loader=lambda loaders: None,
        prepare_train_loader=lambda loader: loader,
        iteration_loss=lambda: None,
        abort=lambda: None,
    )
    batch = IterationBatch(0, 0, [1, 2])
    assert model._on_before_batch_transfer(batch) is batch
    assert seen == []


def test_values_are_filed_as_lightning_would(trainer: L.Trainer) -> None:
    results = compat.IterationResults(training=True)
    key = LogKey("training_step", "x", "mean", False, True, on_step=True, on_epoch=True)
    for value, weight in ((1.0, 3.0), (5.0, 1.0)):
        compat.file_reduced_value(trainer, results, key, torch.tensor(value), weight)
    assert results.metrics(on_step=True)["log"]["x_step"] == 5.0
    assert results.metrics(on_step=False)["log"]["x_epoch"] == 2.0


def test_what_callbacks_log_is_weighted_by_the_samples_of_the_iteration() -> None:
    results = compat.IterationResults(training=True)
    results.batch, results.iteration_batch_size = IterationBatch(0, 0, []), 7
    results.log("on_train_batch_end", "x", torch.tensor(1.0), on_step=False, on_epoch=True)
    assert results["on_train_batch_end.x"].cumulated_batch_size == 7

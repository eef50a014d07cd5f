"""Fits on one device, under one of ours and under Lightning's own strategy, to be compared.

With `policy="global-batch"` and a loss that is a mean over samples both train on the same samples
in the same steps, so that whatever a Trainer flag or a callback does must come out alike.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from tests.strategies.toys import Sequences, ToyLM, pad

LENGTHS = [9, 30, 5, 12, 7, 3, 11, 2]
STEPS = 4  # of an epoch: two samples each
PROFILING = ProfilingOptions(budget_s=1.0, repeats=1)


class CompatLM(ToyLM):
    """Mean over samples; keeps the loss of each step that Lightning shows, and its parameters."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(mean_over="samples", **kwargs)
        self.losses_seen: list[float] = []
        self.weights_seen: list[dict[str, Tensor]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.losses(batch).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.losses(batch).mean(), batch_size=len(batch["ids"]))

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.losses(batch).mean(), batch_size=len(batch["ids"]))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch["ids"])[:, 0]

    def configure_optimizers(self) -> Any:
        # Adam would make steps of rounding errors, where a gradient is zero but for them.
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses_seen.append(float(outputs["loss"]))
        self.weights_seen.append(weights(self))


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same_weights(ours: dict[str, Tensor], theirs: dict[str, Tensor], rtol: float = 1e-4) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=rtol, atol=1e-6)


def data(lengths: Sequence[int] = LENGTHS, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(Sequences(lengths), batch_size=batch_size, collate_fn=pad)


def strategy(**options: Any) -> DCPDDPStrategy:
    return DCPDDPStrategy(
        policy=options.pop("policy", "global-batch"),
        loss_average="samples",
        profiling=PROFILING,
        **options,
    )


def make_trainer(folder: Path, ours: bool = True, **options: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        "default_root_dir": folder,
        "strategy": strategy() if ours else "auto",
        "accelerator": "cpu",
        "devices": 1,
    }
    return L.Trainer(**{**quiet, **options})


def fit(
    folder: Path,
    model: Any = None,
    train: Any = None,
    val: Any = None,
    *,
    ours: bool = True,
    ckpt_path: str | None = None,
    **options: Any,
) -> L.Trainer:
    trainer = make_trainer(folder, ours, **options)
    trainer.fit(
        CompatLM() if model is None else model,
        data() if train is None else train,
        data(LENGTHS[:4]) if val is None else val,
        ckpt_path=ckpt_path,
    )
    return trainer


def both(
    folder: Path,
    model: Callable[[], CompatLM] = CompatLM,
    callbacks: Callable[[], list[L.Callback]] = list,
    **options: Any,
) -> tuple[L.Trainer, L.Trainer]:
    """Two fits that must come out alike: losses of all steps and final weights are compared here.

    Returns:
        The trainer under `dcp_ddp` and the one under Lightning's strategy for one device.
    """
    trainers = []
    for ours in (True, False):
        own = folder / ("ours" if ours else "theirs")
        trainers.append(fit(own, model(), ours=ours, callbacks=callbacks(), **options))
    ours_, theirs = trainers
    assert ours_.global_step == theirs.global_step
    assert ours_.current_epoch == theirs.current_epoch
    module, reference = ours_.lightning_module, theirs.lightning_module
    torch.testing.assert_close(
        torch.tensor(module.losses_seen), torch.tensor(reference.losses_seen), rtol=1e-4, atol=0
    )
    same_weights(weights(module), weights(reference))
    return ours_, theirs


def csv_logger(folder: Path) -> CSVLogger:
    return CSVLogger(folder, name="", version="")


def rows(folder: Path) -> list[dict[str, float]]:
    """What a `CSVLogger` has written, without empty cells."""
    with open(folder / "metrics.csv") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]

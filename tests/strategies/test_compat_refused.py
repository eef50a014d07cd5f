"""What is refused, before training, in the words of docs/lightning-compatibility.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor
from torch.optim.lr_scheduler import StepLR
from torchmetrics import MeanMetric

from lightning_dcp.strategies.deepspeed import DCPStrategy
from lightning_dcp.strategies.fsdp import DCPFSDPStrategy
from tests.compatibility_table import compatibility_rows
from tests.strategies.compat_tools import PROFILING, CompatLM, data, fit, make_trainer
from tests.worlds import World


def dcp() -> Any:
    return DCPStrategy(profiling=PROFILING)


def fsdp() -> Any:
    return DCPFSDPStrategy(profiling=PROFILING)


class Manual(CompatLM):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(CompatLM):
    def configure_optimizers(self) -> Any:
        return [SGD(self.embed.parameters(), 0.1), SGD(self.head.parameters(), 0.1)]


class TwoSchedulers(CompatLM):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), 0.1)
        return [optimizer], [StepLR(optimizer, 1), StepLR(optimizer, 2)]


class NoOptimizer(CompatLM):
    def configure_optimizers(self) -> Any:
        return None


class EmptyGroup(CompatLM):
    def configure_optimizers(self) -> Any:
        return SGD([{"params": list(self.parameters())}, {"params": []}], 0.1)


class Factored(CompatLM):
    def configure_optimizers(self) -> Any:
        return Adafactor(self.parameters())


class SecondOrder(CompatLM):
    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters())


class TwiceClosed(CompatLM):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        optimizer.step(closure=closure)


class IteratorStep(CompatLM):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


class SyncedMetric(CompatLM):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MeanMetric(dist_sync_on_step=True)


class Gathering(CompatLM):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.strategy.inside_micro_batch:
            self.all_gather(loss.detach())
        return loss


class WithBatchNorm(CompatLM):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(16)


class WithBackbone(CompatLM):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.embed


def averaging() -> StochasticWeightAveraging:
    return StochasticWeightAveraging(0.05, swa_epoch_start=1)


#: Row of the table -> what brings its message about, in an empty folder.
REFUSED: dict[str, Callable[[Path], Any]] = {
    "`accumulate_grad_batches` above 1": lambda p: fit(p, accumulate_grad_batches=2),
    "`overfit_batches`": lambda p: fit(p, overfit_batches=1),
    "`sync_batchnorm=True`": lambda p: fit(p, sync_batchnorm=True),
    "`TorchSyncBatchNorm`": lambda p: fit(p, plugins=[TorchSyncBatchNorm()]),
    '`gradient_clip_algorithm="value"` (`dcp`)': lambda p: fit(
        p, strategy=dcp(), gradient_clip_val=0.1, gradient_clip_algorithm="value"
    ),
    "`BackboneFinetuning`": lambda p: fit(p, WithBackbone(), callbacks=[BackboneFinetuning()]),
    "`BaseFinetuning`": lambda p: fit(p, callbacks=[BaseFinetuning()]),
    "`BatchSizeFinder`": lambda p: fit(p, callbacks=[BatchSizeFinder()]),
    "`GradientAccumulationScheduler`": lambda p: fit(
        p, callbacks=[GradientAccumulationScheduler({0: 2})]
    ),
    "`LearningRateFinder` (`dcp`, `dcp_fsdp`)": lambda p: fit(
        p, strategy=dcp(), callbacks=[LearningRateFinder()]
    ),
    "`ModelPruning` (`dcp`, `dcp_fsdp`)": lambda p: fit(
        p, strategy=dcp(), callbacks=[ModelPruning("l1_unstructured")]
    ),
    "`StochasticWeightAveraging` (`dcp`, `dcp_fsdp`)": lambda p: fit(
        p, strategy=dcp(), callbacks=[averaging()]
    ),
    "`StochasticWeightAveraging` with BatchNorm": lambda p: fit(
        p, WithBatchNorm(), callbacks=[averaging()]
    ),
    "`WeightAveraging` (`dcp_fsdp`)": lambda p: fit(
        p, strategy=fsdp(), callbacks=[WeightAveraging()]
    ),
    "`EMAWeightAveraging` (`dcp_fsdp`)": lambda p: fit(
        p, strategy=fsdp(), callbacks=[EMAWeightAveraging()]
    ),
    "`Tuner.scale_batch_size`": lambda p: Tuner(make_trainer(p)).scale_batch_size(
        CompatLM(), data()
    ),
    "several train loaders": lambda p: fit(p, train=[data(), data()]),
    "several train loaders in a `CombinedLoader`": lambda p: fit(
        p, train=CombinedLoader({"a": data(), "b": data()})
    ),
    "one train loader in a list or dict": lambda p: fit(p, train={"a": data()}),
    "`automatic_optimization=False`, `manual_backward`": lambda p: fit(p, Manual()),
    "several optimizers": lambda p: fit(p, TwoOptimizers()),
    "several schedulers (`dcp`)": lambda p: fit(p, TwoSchedulers(), strategy=dcp()),
    "no optimizer (`dcp`)": lambda p: fit(p, NoOptimizer(), strategy=dcp()),
    "a parameter group in which nothing trains (`dcp`)": lambda p: fit(
        p, EmptyGroup(), strategy=dcp()
    ),
    "`Adafactor`, `Muon` (`dcp`)": lambda p: fit(p, Factored(), strategy=dcp()),
    "`LBFGS`": lambda p: fit(p, SecondOrder()),
    "a closure that is called twice": lambda p: fit(p, TwiceClosed()),
    "`training_step(dataloader_iter)`": lambda p: fit(p, IteratorStep()),
    "a metric with `dist_sync_on_step`": lambda p: fit(p, SyncedMetric()),
    "`all_gather` in `training_step`": lambda p: fit(p, Gathering()),
    "`torch.compile(module)` (`dcp_ddp`)": lambda p: fit(
        p, torch.compile(CompatLM(), backend="eager")
    ),
    "`torch.compile(module)` (`dcp`, `dcp_fsdp`)": lambda p: fit(
        p, torch.compile(CompatLM(), backend="eager"), strategy=dcp()
    ),
}


def attempt(rank: int, case: str, folder: str) -> str:
    try:
        REFUSED[case](Path(folder))
    except Exception as error:  # noqa: BLE001 - the test judges whatever was said
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(1, timeout_s=60) as world:
        yield world


@pytest.mark.parametrize("case", list(REFUSED))
def test_message(world: World, case: str, tmp_path: Path) -> None:
    wanted = {row.name: row.note for row in compatibility_rows() if row.status == "refused"}
    (message,) = world.run(attempt, case, str(tmp_path))
    assert message == wanted.get(case), message


def test_every_refused_row_is_shown() -> None:
    assert {row.name for row in compatibility_rows() if row.status == "refused"} == set(REFUSED)

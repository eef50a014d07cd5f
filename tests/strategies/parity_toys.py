"""One training run that logs in every way, for `ddp` and for a plan-driven strategy alike.

The loss is a mean over samples and does not depend on padding; then `ddp`, which averages ranks of
equal batch size, and the mean over all samples of a step are the same.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

from lightning_dcp.data.sampler import distributed_order
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.planning.plan import Plan
from lightning_dcp.profiling.options import ProfilingOptions
from tests.strategies.hand_planned import STRATEGIES, DoublePrecision, hand_planned
from tests.strategies.toys import IGNORE, VOCAB, HandPlanner, Sequences, ToyLM, micro_batch, pad

WORLD_SIZE, BATCH_SIZE, NUM_STEPS = 4, 2, 6
NUM_SAMPLES = WORLD_SIZE * BATCH_SIZE * NUM_STEPS
LENGTHS = [
    int(x)
    for x in 2 + 60 * torch.rand(NUM_SAMPLES, generator=torch.Generator().manual_seed(1)) ** 3
]
VAL_LENGTHS = (LENGTHS[:16], LENGTHS[16:24])


class Samples(Metric):
    """Sum or mean over samples, in the type of the model: torchmetrics' own fall back to float32.

    Args:
        mean: the mean; else the sum.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, *, mean: bool) -> None:
        super().__init__()
        self.mean = mean
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        self.total += values.sum()
        self.count += len(values)

    def compute(self) -> Tensor:
        return self.total / self.count if self.mean else self.total


def metrics_of(prefix: str) -> torch.nn.ModuleDict:
    """Metric objects: single, of the aggregating kind, and a collection that shares states."""
    arguments: dict[str, Any] = {"num_classes": VOCAB, "average": "macro"}
    return torch.nn.ModuleDict(
        {
            "accuracy": MulticlassAccuracy(num_classes=VOCAB, average="micro"),
            "mean": Samples(mean=True),
            "collection": MetricCollection(
                {
                    "precision": MulticlassPrecision(**arguments),
                    "recall": MulticlassRecall(**arguments),
                    "f1": MulticlassF1Score(**arguments),
                },
                prefix=f"{prefix}_",
            ),
        }
    )


class ParityLM(ToyLM):
    """Logs with `sync_dist=True` in every way that means the same under all strategies."""

    def __init__(self, *, double: bool = False, plateau: bool = False) -> None:
        super().__init__(double=double, mean_over="samples")
        self.plateau = plateau
        self.train_metrics, self.val_metrics = metrics_of("train"), metrics_of("val")
        self.own_sum, self.val_sum = Samples(mean=False), Samples(mean=False)

    def number(self, value: float) -> Tensor:
        """() a number as precise as the model; `self.log` makes float32 of Python's."""
        return torch.tensor(value, dtype=self.embed.weight.dtype)

    def evaluate(self, batch: dict[str, Tensor], metrics: torch.nn.ModuleDict) -> Tensor:
        """(B,) mean loss of each sample."""
        logits, labels = self(batch["ids"]), batch["labels"]
        keep = labels != IGNORE
        each = F.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none"
        )
        losses = each.sum(1) / keep.sum(1)
        guesses, wanted = logits.argmax(-1)[keep], labels[keep]
        metrics["accuracy"].update(guesses, wanted)
        metrics["mean"](losses.detach())
        metrics["collection"].update(guesses, wanted)
        return losses

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        losses = self.evaluate(batch, self.train_metrics)
        loss = losses.mean()
        both: dict[str, Any] = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("step_only", loss, on_step=True, on_epoch=False, sync_dist=True)
        self.log("epoch_only", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("default", loss, sync_dist=True)
        self.log("both", loss, prog_bar=True, **both)
        self.log("batch_size_given", loss, batch_size=len(losses), **both)
        self.log("mean", loss, reduce_fx=torch.mean, **both)
        self.log("sum", losses.sum(), reduce_fx="sum", **both)
        self.log("sum_of_numbers", float(len(losses)), reduce_fx=sum, **both)
        self.log("max", losses.max(), reduce_fx=torch.max, **both)
        self.log("min", losses.min(), reduce_fx="min", **both)
        self.log("one_element", loss.reshape(1), **both)
        self.log("not_for_loggers", loss, logger=False, prog_bar=True, **both)
        self.log_dict({"dict/a": 2 * loss, "dict/b": losses.square().mean()}, **both)
        for name in ("accuracy", "mean"):
            metric = self.train_metrics[name]
            self.log(f"train_{name}", metric, on_step=False, on_epoch=True)
        self.log_dict(self.train_metrics["collection"], on_step=False, on_epoch=True)
        self.own_sum.update(losses.detach())
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log(
            "zero_grad", self.number(self.global_step), on_step=True, on_epoch=True, sync_dist=True
        )

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log(
            "optimizer", self.number(self.global_step), on_step=True, on_epoch=True, sync_dist=True
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("outputs", outputs["loss"], on_step=True, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_end", self.own_sum.compute())
        self.own_sum.reset()
        self.log("epoch_end_metric", self.train_metrics["mean"].compute(), sync_dist=True)

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        losses = self.evaluate(batch, self.val_metrics)
        self.log("val_loss", losses.mean(), sync_dist=True)
        self.log("val_given", losses.mean(), sync_dist=True, batch_size=len(losses), prog_bar=True)
        self.log("val_sum", losses.sum(), reduce_fx="sum", sync_dist=True)
        self.log("val_max", losses.max(), reduce_fx="max", sync_dist=True)
        self.log(
            f"val_own_name_{dataloader_idx}",
            losses.mean(),
            add_dataloader_idx=False,
            sync_dist=True,
        )
        self.val_sum.update(losses)
        if dataloader_idx == 1:
            self.log("val_mean", self.val_metrics["mean"], add_dataloader_idx=False)
            self.log_dict(self.val_metrics["collection"], add_dataloader_idx=False)

    def on_validation_epoch_end(self) -> None:
        self.log("val_epoch_end", self.val_sum.compute(), sync_dist=True)
        self.val_sum.reset()
        self.val_metrics["accuracy"].reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        if self.plateau:
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, threshold=0.5, factor=0.3
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": scheduler,
                    "monitor": "val_loss/dataloader_idx_0",
                    "interval": "epoch",
                },
            }
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 - i / (2 * steps))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class LoggingCallback(L.Callback):
    """Logs from a callback's hooks, and keeps what other callbacks would see."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.step_metrics: list[dict[str, float]] = []
        self.progress_bar: list[dict[str, float]] = []
        self.plans: list[Any] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.log("cb_train_start", 1.0, sync_dist=True)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.log("cb_epoch_start", float(trainer.current_epoch), sync_dist=True)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.log(
            "cb_start", pl_module.number(batch_idx), on_step=True, on_epoch=True, sync_dist=True
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        options: dict[str, Any] = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("cb_end", outputs["loss"] * (1 + batch_idx), **options)
        self.log("cb_end_sum", outputs["loss"], reduce_fx="sum", **options)
        self.log("cb_end_given", pl_module.number(batch_idx), batch_size=1 + batch_idx, **options)
        self.losses.append(outputs["loss"])
        self.step_metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        self.plans.append(getattr(trainer.strategy, "last_report", None))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.log("cb_epoch_end", torch.stack(self.losses).mean(), sync_dist=True)
        self.losses.clear()
        self.progress_bar.append(dict(trainer.progress_bar_metrics))

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.log("cb_val_end", pl_module.number(2 + dataloader_idx), sync_dist=True)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.log("cb_val_epoch_end", float(trainer.global_step), sync_dist=True)


class DoubleEngine(L.Callback):
    """Makes what DeepSpeed keeps and sends in float32, whatever the model's type, float64."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        optimizer: Any = trainer.strategy.deepspeed_engine.optimizer  # type: ignore[attr-defined]
        optimizer.communication_data_type = torch.float64
        optimizer.ipg_buckets = {torch.float64: optimizer.ipg_buckets.pop(torch.float32)}
        optimizer.gradient_accumulation_dtype = torch.float64
        for master in optimizer.single_partition_of_fp32_groups:
            master.data = master.data.double()
            for name, value in optimizer.optimizer.state.get(master, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1:
                    optimizer.optimizer.state[master][name] = value.double()

        def norm(gradients: list[Tensor], *_: Any) -> Tensor:
            squares = sum(
                (g.square().sum() for g in gradients), torch.zeros((), dtype=torch.float64)
            )
            torch.distributed.all_reduce(squares)
            return squares.sqrt()

        optimizer.get_grad_norm_direct = norm


class GlobalBatches(HandPlanner):
    """The samples of `ddp` in every step, shared out as unequally as they can be.

    Policy `global-batch` takes the same samples, but how it shares them out depends on measured
    times.
    """

    def __init__(self) -> None:
        super().__init__(plans=[])

    @property
    def num_iterations(self) -> int:
        return NUM_STEPS

    def epoch(self, epoch: int) -> list[Plan]:
        dataset, size = Sequences(LENGTHS), WORLD_SIZE * BATCH_SIZE
        order = distributed_order(0)(epoch, NUM_SAMPLES).tolist()
        plans = []
        for step in range(NUM_STEPS):
            i = order[step * size : (step + 1) * size]
            if step % 2:  # ranks 2 and 3 have nothing
                shares = [
                    micro_batch(dataset, i[:4], 0, 2, recompute_blocks=2),
                    micro_batch(dataset, i[4:], 1),
                ]
            else:  # 3, 3, 2 and 2 micro-batches in nested groups
                shares = [
                    micro_batch(dataset, i[:1], 0, 4, recompute_blocks=1),
                    micro_batch(dataset, i[1:2], 0, 2),
                    micro_batch(dataset, i[2:4], 2, 2, recompute_blocks=3),
                    micro_batch(dataset, i[4:7], 0),
                    micro_batch(dataset, i[7:], 1),
                ]
            plans.append(
                Plan(
                    epoch=epoch,
                    iteration=step,
                    world_size=WORLD_SIZE,
                    micro_batches=tuple(shares),
                )
            )
        return plans


def strategy_of(name: str, cache_dir: str) -> Any:
    """`ddp`, or a strategy that takes the samples of `ddp` in every step."""
    if name == "ddp":
        return "ddp"
    return STRATEGIES[name](
        planning=PlanningOptions(policy="global-batch"),
        profiling=ProfilingOptions(budget_s=0.4, repeats=1, cache_dir=cache_dir),
        loss_average="samples",
    )


def full_parameters(module: L.LightningModule) -> dict[str, Tensor]:
    """Whole parameters, also where they are sharded."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()  # type: ignore[operator]
        for name, p in module.named_parameters()
    }


def loaders() -> tuple[DataLoader[Any], list[DataLoader[Any]]]:
    """A train loader and two validation loaders of different sizes."""
    train = DataLoader(Sequences(LENGTHS), batch_size=BATCH_SIZE, collate_fn=pad, shuffle=True)
    valid = [
        DataLoader(Sequences(lengths), batch_size=BATCH_SIZE, collate_fn=pad)
        for lengths in VAL_LENGTHS
    ]
    return train, valid


def fit(
    rank: int, name: str, double: bool, folder: str, callbacks: Sequence[L.Callback] = ()
) -> dict[str, Any]:
    """Two epochs with validation; LR by step in float32, by plateau in float64.

    In float32 the strategy plans, in float64 plans are dictated.
    """
    model = ParityLM(double=double, plateau=double)
    recorder = LoggingCallback()
    strategy = strategy_of(name, folder)
    by_hand = double and name != "ddp"
    engine = double and name == "dcp"
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=WORLD_SIZE,
        max_epochs=2,
        val_check_interval=3,
        gradient_clip_val=0.5,
        callbacks=[
            recorder,
            LearningRateMonitor(),
            *callbacks,
            *([DoubleEngine()] if engine else []),
        ],
        plugins=[DoublePrecision()] if engine else None,
        logger=CSVLogger(folder, name=name, version=f"{double}-{len(callbacks)}"),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    )
    train, valid = loaders()
    with hand_planned(strategy, GlobalBatches()) if by_hand else nullcontext():
        trainer.fit(model, train, valid)
    assert trainer.logger is not None
    return {
        "csv": str(Path(trainer.logger.log_dir or "") / "metrics.csv"),
        "step_metrics": recorder.step_metrics,
        "callback_metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "progress_bar": recorder.progress_bar,
        "parameters": full_parameters(model),
        "plans": [report.plan for report in recorder.plans if report is not None],
    }


def read_csv(path: str) -> list[dict[str, float]]:
    """Rows of a metrics.csv: of each the columns that have a value."""
    with open(path) as file:
        return [{k: float(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]

"""The whole path under Lightning's Trainer: profile, plan, train; and what users see of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dcp.callback import DCPCallback
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from lightning_dcp.strategies.deepspeed import DCPStrategy
from tests.strategies.toys import Sequences, ToyLM, pad
from tests.worlds import World

LENGTHS = [int(x) for x in 1 + 60 * torch.rand(61, generator=torch.Generator().manual_seed(1)) ** 3]
FAST = ProfilingOptions(budget_s=1.5, repeats=1)


class LoggingLM(ToyLM):
    """Logs in every way that `self.log` knows, and remembers which samples it saw."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: list[list[int]] = []
        self.fx_names: list[str] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.losses(batch).mean()
        self.seen.append(batch["id"].tolist())
        self.log("one", 1.0, on_step=True, on_epoch=True, sync_dist=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log("local", loss, on_step=False, on_epoch=True)
        self.log(
            "longest", float(batch["ids"].shape[1]), reduce_fx="max", on_step=True, on_epoch=True
        )
        self.log_dict({"a": 2.0, "b": loss * 2}, on_step=True, sync_dist=True)
        self.log(
            "samples",
            float(len(batch["ids"])),
            reduce_fx="sum",
            on_epoch=True,
            on_step=True,
            sync_dist=True,
        )
        self.fx_names.append(str(self._current_fx_name))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        self.estimated = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 - step / (2 * self.estimated)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Recorder(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.reports: list[Any] = []
        self.epoch_values: list[dict[str, float]] = []
        self.val_steps: list[int] = []
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.reports.append(trainer.strategy.last_report)
        self.log("from_callback", 3.0, on_epoch=True, on_step=True)
        self.steps.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.epoch_values.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    def on_validation_start(self, trainer: L.Trainer, module: Any) -> None:
        self.val_steps.append(trainer.global_step)


def fit(
    rank: int, name: str, folder: str, lengths: list[int] = LENGTHS, **options: Any
) -> dict[str, Any]:
    world_size = torch.distributed.get_world_size()
    cls = {"dcp": DCPStrategy, "dcp_ddp": DCPDDPStrategy}[name]
    planning = options.pop("planning", {})
    trainer_options = options.pop("trainer", {})
    batch_size = options.pop("batch_size", 2)
    strategy = cls(planning=PlanningOptions(**planning), profiling=FAST, **options)
    model = LoggingLM()
    recorder = Recorder()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        max_epochs=2,
        callbacks=[recorder, LearningRateMonitor("step"), DCPCallback(print_table=False)],
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
        **trainer_options,
    )
    train = DataLoader(Sequences(lengths), batch_size=batch_size, collate_fn=pad, shuffle=True)
    valid = DataLoader(Sequences(LENGTHS[:16]), batch_size=2, collate_fn=pad)
    trainer.fit(model, train, valid)
    return {
        "seen": model.seen,
        "fx_names": set(model.fx_names),
        "losses": recorder.losses,
        "reports": recorder.reports,
        "epoch_values": recorder.epoch_values,
        "steps": recorder.steps,
        "val_steps": recorder.val_steps,
        "global_step": trainer.global_step,
        "len": len(trainer.train_dataloader),
        "num_training_batches": trainer.num_training_batches,
        "estimated": model.estimated,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "log_dir": trainer.logger.log_dir if trainer.logger else None,
    }


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=110) as world:
        yield world


@pytest.mark.parametrize("name", ["dcp_ddp", "dcp"])
class TestTwoEpochs:
    def test_everything_a_user_sees(self, world: World, name: str, tmp_path: Path) -> None:
        results = world.run(fit, name, str(tmp_path), trainer={"val_check_interval": 3})
        first = results[0]
        steps = first["len"]
        assert steps == 8  # 61 samples, 2 a rank, 4 ranks
        for r in results:
            assert r["len"] == r["num_training_batches"] == steps
            assert r["estimated"] == r["global_step"] == 2 * steps
            assert r["lr"] == pytest.approx(1e-2 / 2)
            assert r["val_steps"] == [0, 3, 6, 11, 14]
            assert r["fx_names"] == {"training_step"}
            assert r["losses"] == first["losses"]
            assert r["reports"] == first["reports"]
            assert r["epoch_values"] == first["epoch_values"]

        plans = [report.plan for report in first["reports"]]
        for epoch in (plans[:steps], plans[steps:]):
            assert sorted(i for p in epoch for m in p.micro_batches for i in m.sample_ids) == list(
                range(61)
            )
        assert [m.sample_ids for p in plans[:steps] for m in p.micro_batches] != [
            m.sample_ids for p in plans[steps:] for m in p.micro_batches
        ]
        for rank, r in enumerate(results):
            wanted = [list(m.sample_ids) for p in plans for m in p.for_rank(rank)]
            assert r["seen"] == wanted
        counts = {len(p.for_rank(rank)) for p in plans for rank in range(4)}
        assert len(counts) > 1, (
            "ranks ran the same number of micro-batches: the test shows too little"
        )

    def test_logged_values(self, world: World, name: str, tmp_path: Path) -> None:
        results = world.run(fit, name, str(tmp_path))
        dataset = Sequences(LENGTHS)
        num_targets = [int((dataset[i]["labels"] != -100).sum()) for i in range(len(dataset))]
        first = results[0]
        for epoch in range(2):
            values = first["epoch_values"][epoch]
            steps = first["steps"][8 * epoch : 8 * epoch + 8]
            plans = [report.plan for report in first["reports"][8 * epoch : 8 * epoch + 8]]
            weights = [
                sum(num_targets[i] for m in p.micro_batches for i in m.sample_ids) for p in plans
            ]
            losses = first["losses"][8 * epoch : 8 * epoch + 8]
            assert [
                report.num_targets for report in first["reports"][8 * epoch : 8 * epoch + 8]
            ] == weights
            mean = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
            assert values["one_epoch"] == values["one_step"] == 1.0
            assert values["loss_epoch"] == pytest.approx(mean, rel=1e-5)
            assert values["local"] == pytest.approx(mean, rel=1e-5)
            assert [s["loss_step"] for s in steps] == pytest.approx(losses, rel=1e-6)
            assert [s["b"] for s in steps] == pytest.approx([2 * x for x in losses], rel=1e-6)
            assert [s["samples_step"] for s in steps] == [p.num_samples for p in plans]
            assert values["samples_epoch"] == 61
            assert values["longest_epoch"] == max(LENGTHS)
            assert values["from_callback_epoch"] == 3.0

    def test_csv_has_one_row_an_iteration(self, world: World, name: str, tmp_path: Path) -> None:
        results = world.run(fit, name, str(tmp_path))
        rows = (Path(results[0]["log_dir"]) / "metrics.csv").read_text().splitlines()
        header = rows[0].split(",")
        for wanted in ("dcp/idle_share", "dcp/tokens_per_s", "loss_step", "loss_epoch", "lr-AdamW"):
            assert wanted in header
        column = header.index("loss_step")
        assert len([r for r in rows[1:] if r.split(",")[column]]) == 16


_ = itertools

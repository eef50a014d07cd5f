"""The whole path under Lightning's Trainer: profile, plan, train; and what users see of it."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_dcp.callback import DCPCallback
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from lightning_dcp.strategies.deepspeed import DCPStrategy
from lightning_dcp.strategies.fsdp import DCPFSDPStrategy
from tests.strategies.test_wrong_input import fit as fit_quietly
from tests.strategies.toys import Block, Sequences, ToyLM, pad, whole
from tests.worlds import World

LENGTHS = [int(x) for x in 1 + 60 * torch.rand(61, generator=torch.Generator().manual_seed(1)) ** 3]
FAST = ProfilingOptions(budget_s=1.5, repeats=1)
STRATEGIES: dict[str, Any] = {
    "dcp": DCPStrategy,
    "dcp_ddp": DCPDDPStrategy,
    "dcp_fsdp": DCPFSDPStrategy,
}


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
    cls = STRATEGIES[name]
    planning = options.pop("planning", {})
    trainer_options = options.pop("trainer", {})
    batch_size = options.pop("batch_size", 2)
    options.setdefault("profiling", FAST)
    strategy = cls(planning=PlanningOptions(**planning), **options)
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


@pytest.mark.parametrize("name", ["dcp_ddp", "dcp", "dcp_fsdp"])
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
            # a rank may have nothing to run: a larger micro-batch of so few tokens costs no more
            assert r["fx_names"] == ({"training_step"} if r["seen"] else set())
            assert r["losses"] == first["losses"]
            assert r["reports"] == first["reports"]
            slowness = [[repr(report.slowness) for report in x["reports"]] for x in (r, first)]
            assert slowness[0] == slowness[1]
            assert r["epoch_values"] == first["epoch_values"]
        assert any(r["seen"] for r in results)

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


# ---- any number of ranks -------------------------------------------------------------------------


def bytes_of_two_ranks(rank: int, cache: str) -> int:
    """A limit under which the longest sample fits two ranks and not one, as it was measured."""
    strategy = DCPDDPStrategy(profiling=dataclasses.replace(FAST, cache_dir=cache))
    train = DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=pad)
    fit_quietly(rank, LoggingLM(), train, strategy=strategy, max_steps=1)
    assert strategy.planner is not None
    costs = strategy.planner.cost_model
    one, two = (costs.memory_bytes(1, max(LENGTHS), p, costs.num_blocks) for p in (1, 2))
    spare = (one + two) / 2 - costs.fixed_bytes
    return int(costs.fixed_bytes + spare * (1 + costs.memory_error))


def test_a_world_that_is_no_power_of_two(tmp_path: Path) -> None:
    """Blocks of powers of two, the rest with p = 1; every rank takes part in every step."""
    cache = str(tmp_path / "cache")
    with World(3, timeout_s=100) as three:
        memory, *_ = three.run(bytes_of_two_ranks, cache)
        results = three.run(
            fit,
            "dcp_ddp",
            str(tmp_path),
            planning={"memory_limit_bytes": memory},
            profiling=dataclasses.replace(FAST, cache_dir=cache),
        )
    plans = [report.plan for report in results[0]["reports"]]
    assert {m.sp_size for p in plans for m in p.micro_batches} == {1, 2}
    epoch = plans[: results[0]["len"]]
    assert sorted(i for p in epoch for m in p.micro_batches for i in m.sample_ids) == list(
        range(61)
    )
    for rank, r in enumerate(results):
        assert r["losses"] == results[0]["losses"]
        assert r["seen"] == [list(m.sample_ids) for p in plans for m in p.for_rank(rank)]


# ---- profiling leaves no trace ------------------------------------------------------------------


class Counting(LoggingLM):
    """Has all that a step can change: buffers, metrics, attributes, random states."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.batch_norm = torch.nn.BatchNorm1d(16)
        self.mean = MeanMetric()
        self.num_calls = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.num_calls += 1
        random.random()
        np.random.rand()  # noqa: NPY002 - the global state is what a user's step may draw from
        loss = super().training_step(batch, batch_idx)
        self.batch_norm(self.embed(batch["ids"]).flatten(0, 1).repeat(2, 1))
        self.mean.update(loss.detach())
        self.logger.log_metrics({"direct": 1.0})  # type: ignore[union-attr]
        return loss


class Snapshot(L.Callback):
    """The state after `Strategy.setup`, before training."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        self.state = {
            "state_dict": {k: whole(v) for k, v in module.state_dict().items()},
            "gradients": [p.grad for p in module.parameters()],
            "num_calls": module.num_calls,
            "mean": (module.mean.mean_value.clone(), module.mean.update_called),
            "training": [m.training for m in module.modules()],
            "random": (
                random.getstate(),
                np.random.get_state()[1].tolist(),  # noqa: NPY002
                torch.get_rng_state(),
            ),
            "metrics": list(vars(trainer.logger.experiment).get("metrics", [])),
            "callback_metrics": dict(trainer.callback_metrics),
        }


def fit_counting(rank: int, name: str, folder: str, cache: str) -> dict[str, Any]:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    strategy = STRATEGIES[name](profiling=dataclasses.replace(FAST, cache_dir=cache))
    snapshot, recorder, model = Snapshot(), Recorder(), Counting()
    initial = {k: v.clone() for k, v in model.state_dict().items()}
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=4,
        max_steps=3,
        logger=CSVLogger(folder),
        callbacks=[snapshot, recorder],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=pad, shuffle=True))
    cached = strategy._preparation.profile_was_cached  # type: ignore[union-attr]
    return {**snapshot.state, "initial": initial, "cached": cached, "losses": recorder.losses}


@pytest.mark.parametrize("name", ["dcp_ddp", "dcp_fsdp"])
def test_profiling_leaves_everything_bit_identical(world: World, name: str, tmp_path: Path) -> None:
    """The state before training is the same with a measured profile and with a cached one."""
    arguments = (name, str(tmp_path), str(tmp_path / "cache"))
    measured, cached = world.run(fit_counting, *arguments), world.run(fit_counting, *arguments)
    for after, without in zip(measured, cached, strict=True):
        assert not after["cached"] and without["cached"]
        assert after["num_calls"] == without["num_calls"] == 0
        assert after["gradients"] == [None] * len(after["gradients"])
        assert after["metrics"] == [] and after["callback_metrics"] == {}
        assert all(after["training"])
        assert after["mean"][0] == 0 and not after["mean"][1]
        for name, value in after["state_dict"].items():
            assert torch.equal(value, after["initial"][name]), name
        assert after["random"][:2] == without["random"][:2]
        assert torch.equal(after["random"][2], without["random"][2])
        assert after["losses"] == without["losses"], "the same profile gives the same training"


class Mixing(Block):
    """Mixes positions outside attention, if a flag says so that no key of a cache can see."""

    mix = False

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, positions, mask)
        return y - y.mean(1, keepdim=True) if Mixing.mix else y


def fit_mixing(rank: int, mix: bool, cache: str, self_check: bool = True) -> tuple[Any, Any]:
    Mixing.mix = mix
    model = LoggingLM()
    model.blocks = torch.nn.ModuleList(Mixing(16, 4) for _ in range(3))
    strategy = DCPDDPStrategy(
        profiling=dataclasses.replace(FAST, cache_dir=cache), self_check=self_check
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=4,
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    try:
        trainer.fit(model, DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=pad))
    except MisconfigurationException as error:
        return trainer.global_step, str(error)
    assert strategy.cost_profile is not None
    cached = strategy._preparation.profile_was_cached  # type: ignore[union-attr]
    return cached, sorted(strategy.cost_profile.sp_size_exclusions)


def test_a_cached_profile_does_not_stand_for_the_self_check(world: World, tmp_path: Path) -> None:
    """A model that is not the same when sharded is refused on all ranks, naming the module."""
    assert world.run(fit_mixing, False, str(tmp_path)) == [(False, [])] * 4
    assert world.run(fit_mixing, False, str(tmp_path)) == [(True, [])] * 4
    refusals = world.run(fit_mixing, True, str(tmp_path))
    assert len(set(refusals)) == 1
    steps, text = refusals[0]
    assert steps == 0
    assert "The first module that differs is `blocks.0` (Mixing): its output differs" in text
    assert "planning.sp_sizes=[1]" in text
    assert world.run(fit_mixing, True, str(tmp_path), False) == [(True, [])] * 4


# ---- the engine takes more memory than was assumed ----------------------------------------------


def fit_with_a_heavy_engine(rank: int) -> dict[str, Any]:
    class Heavy(DCPDDPStrategy):
        def _allocated_bytes(self) -> int:
            return 30_000 if self.global_rank == 1 else 0

    planning = PlanningOptions(memory_limit_bytes=200_000)
    strategy, model = Heavy(planning=planning, profiling=FAST), LoggingLM(width=8, num_blocks=2)
    assumed = strategy.fixed_bytes(model)
    gradients = sum(4 * p.numel() for p in model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=4,
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        data = DataLoader(Sequences([5] * 20 + [40] * 4), batch_size=2, collate_fn=pad)
        trainer.fit(model, data)
    assert strategy.planner is not None
    return {
        "assumed": assumed,
        "gradients": gradients,
        "fixed": strategy.planner.cost_model.fixed_bytes,
        "warned": [str(w.message) for w in caught if "planned again" in str(w.message)],
        "seen": model.seen,
    }


def test_plans_again_when_the_engine_takes_more(world: World) -> None:
    results = world.run(fit_with_a_heavy_engine)
    for r in results:
        assert r["assumed"] < 30_000 + r["gradients"] == r["fixed"]
    assert len(results[0]["warned"]) == 1
    seen = [i for r in results for micro_batch in r["seen"] for i in micro_batch]
    assert set(seen) == set(range(24))

"""Callbacks and flags on two real ranks, where what one rank decides must be what all do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_dcp.strategies.ddp import DCPDDPStrategy
from lightning_dcp.strategies.deepspeed import DCPStrategy
from lightning_dcp.strategies.fsdp import DCPFSDPStrategy
from tests.strategies.compat_tools import (
    PROFILING,
    CompatLM,
    csv_logger,
    fit,
    rows,
    same_weights,
)
from tests.worlds import World

ROOT = Path(__file__).resolve().parents[2]
STEPS = 2  # of an epoch: two samples on each of two ranks


def strategy_of(name: str) -> Any:
    if name == "ddp":
        return "ddp"
    cls: Any = {"dcp": DCPStrategy, "dcp_ddp": DCPDDPStrategy, "dcp_fsdp": DCPFSDPStrategy}[name]
    return cls(policy="global-batch", loss_average="samples", profiling=PROFILING)


class RanksLM(CompatLM):
    """Leaves parameters alone while it trains: under FSDP they are in parts."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses_seen.append(float(outputs["loss"]))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.losses(batch).mean()
        self.log("val_loss", loss, batch_size=len(batch["ids"]), sync_dist=True)


def train(folder: str, name: str, callbacks: list[L.Callback], **flags: Any) -> L.Trainer:
    return fit(
        Path(folder),
        RanksLM(),
        strategy=strategy_of(name),
        devices=2,
        callbacks=callbacks,
        **flags,
    )


def outcome(trainer: L.Trainer) -> dict[str, Any]:
    state = trainer.lightning_module.state_dict()
    whole = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items()}
    return {
        "losses": trainer.lightning_module.losses_seen,
        "step": trainer.global_step,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "weights": whole,
    }


def with_monitors(rank: int, name: str, folder: str) -> dict[str, Any]:
    """Everything at once that only watches, stops or saves."""
    early = EarlyStopping("val_loss", patience=0, min_delta=0.3)
    saved = ModelCheckpoint(folder, monitor="val_loss")
    bar = TQDMProgressBar()
    trainer = train(
        folder,
        name,
        [
            early,
            saved,
            bar,
            DeviceStatsMonitor(cpu_stats=True),
            LearningRateMonitor(),
            ModelSummary(),
            OnExceptionCheckpoint(folder),
            SpikeDetection(),
            Timer(timedelta(hours=1)),
        ],
        enable_checkpointing=True,
        enable_progress_bar=True,
        enable_model_summary=True,
        logger=csv_logger(Path(folder)),
        log_every_n_steps=1,
        profiler="simple",
        max_epochs=9,
    )
    return {
        **outcome(trainer),
        "stopped_epoch": early.stopped_epoch,
        "best": Path(saved.best_model_path).name,
        "score": float(saved.best_model_score),  # type: ignore[arg-type]
        "total": bar.total_train_batches,
    }


def with_averaging(rank: int, name: str, kind: str, folder: str) -> dict[str, Any]:
    callback: Any = {
        "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=2),
        "ema": lambda: EMAWeightAveraging(decay=0.5),
        "pruning": lambda: ModelPruning(
            "l1_unstructured", amount=0.5, parameter_names=["weight"], use_global_unstructured=False
        ),
    }[kind]()
    result = outcome(train(folder, name, [callback], max_epochs=3))
    result["weights"] = {
        n: v * result["weights"][n.replace("_orig", "_mask")] if n.endswith("_orig") else v
        for n, v in result["weights"].items()
        if not n.endswith("_mask")
    }
    return result


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2, timeout_s=100) as world:
        yield world


@pytest.fixture(scope="module")
def monitored(world: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("ddp"))
    return folder, world.run(with_monitors, "ddp", folder)


def agree(results: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    """All ranks came to the same, which is what `ddp` comes to."""
    for result in results:
        assert result["step"] == reference["step"]
        assert result["losses"] == results[0]["losses"]
        assert result["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-4)
        same_weights(result["weights"], reference["weights"])


@pytest.mark.parametrize("name", ["dcp_ddp", "dcp", "dcp_fsdp"])
def test_monitors_and_early_stopping(
    world: World, monitored: Any, name: str, tmp_path: Path
) -> None:
    theirs_folder, theirs = monitored
    results = world.run(with_monitors, name, str(tmp_path))
    agree(results, theirs[0])
    assert STEPS < results[0]["step"] < 9 * STEPS
    for key in ("stopped_epoch", "total"):
        assert results[0][key] == results[1][key] == theirs[0][key]
    assert results[0]["total"] == STEPS and results[0]["stopped_epoch"] > 0
    assert results[0]["best"] == theirs[0]["best"]
    assert results[0]["score"] == pytest.approx(theirs[0]["score"], rel=1e-4)
    own, reference = rows(tmp_path), rows(Path(theirs_folder))
    for column in ("val_loss", "train_loss_step", "train_loss_epoch", "lr-SGD"):
        values = [r[column] for r in own if column in r]
        if column.startswith("train"):  # `ddp` logs what rank 0 saw, ours what all ranks did
            assert len(values) == len([r for r in reference if column in r])
        else:
            assert values == pytest.approx([r[column] for r in reference if column in r], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dcp_ddp", "swa"),
        ("dcp_ddp", "ema"),
        ("dcp", "ema"),
        ("dcp_ddp", "pruning"),
    ],
)
def test_averaging_and_pruning(world: World, name: str, kind: str, tmp_path: Path) -> None:
    (reference, _) = world.run(with_averaging, "ddp", kind, str(tmp_path))
    results = world.run(with_averaging, name, kind, str(tmp_path))
    agree(results, reference)
    if kind == "pruning":
        share = float((results[0]["weights"]["blocks.1.up.weight"] == 0).float().mean())
        assert share > 0.8


def resumed_average(rank: int, folder: str) -> list[dict[str, Any]]:
    """Weights and validation of a whole run under `dcp`, and of one that was resumed."""

    def run(**flags: Any) -> dict[str, Any]:
        saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        callbacks = [EMAWeightAveraging(decay=0.5), saving]
        return outcome(
            train(folder, "dcp", callbacks, enable_checkpointing=True, max_epochs=2, **flags)
        )

    return [run(), run(ckpt_path=f"{folder}/epoch=0.ckpt")]


def test_an_average_is_resumed_under_deepspeed(world: World, tmp_path: Path) -> None:
    for whole, resumed in world.run(resumed_average, str(tmp_path)):
        assert resumed["losses"] == whole["losses"][STEPS:]
        assert resumed["val_loss"] == whole["val_loss"]
        same_weights(resumed["weights"], whole["weights"], rtol=0)


# ---- decisions of one rank -----------------------------------------------------------------------


class OneRank(L.Callback):
    """Something happens to the last rank only, after its third step."""

    def __init__(self, event: str) -> None:
        self.event = event
        self.validated_at: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step != 3 or trainer.global_rank == 0:
            return
        if self.event == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        else:  # its clock is an hour ahead
            trainer._last_val_time -= 3600  # type: ignore[attr-defined]

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.validated_at.append(trainer.global_step)


def terminated(rank: int, name: str, folder: str) -> Any:
    model = RanksLM()
    trainer: list[L.Trainer] = []

    class Look(L.Callback):
        def on_fit_start(self, t: L.Trainer, *_: Any) -> None:
            trainer.append(t)

    handler = signal.getsignal(signal.SIGTERM)
    try:
        fit(
            Path(folder),
            model,
            strategy=strategy_of(name),
            devices=2,
            callbacks=[OneRank("SIGTERM"), Look(), OnExceptionCheckpoint(folder)],
            enable_checkpointing=True,
            max_epochs=50,
        )
    except SIGTERMException:
        assert signal.getsignal(signal.SIGTERM) is handler
        return trainer[0].global_step
    return "it was not ended"


@pytest.mark.parametrize("name", ["dcp_ddp", "dcp", "dcp_fsdp"])
def test_sigterm_on_one_rank_ends_all_at_the_same_step(
    world: World, name: str, tmp_path: Path
) -> None:
    assert world.run(terminated, name, str(tmp_path)) == [3, 3]
    assert (tmp_path / "on_exception.ckpt").exists()


def timed_validation(rank: int, folder: str) -> Any:
    event = OneRank("clock")
    train(
        folder,
        "dcp_ddp",
        [event],
        val_check_interval=timedelta(hours=1),
        check_val_every_n_epoch=None,
        max_epochs=3,
    )
    return event.validated_at


def test_ranks_whose_clocks_differ_validate_together(world: World, tmp_path: Path) -> None:
    assert world.run(timed_validation, str(tmp_path)) == [[3], [3]]


def timed_out(rank: int, folder: str) -> int:
    return train(
        folder, "dcp_ddp", [], max_time=timedelta(milliseconds=300), max_epochs=-1
    ).global_step


def test_max_time_stops_all_ranks_at_the_same_step(world: World, tmp_path: Path) -> None:
    first, second = world.run(timed_out, str(tmp_path))
    assert first == second > 0


def on_two_nodes(rank: int, folder: str) -> tuple[int, int, list[float]]:
    before = dict(os.environ)
    os.environ.update(NODE_RANK=str(rank), LOCAL_RANK="0")
    try:
        trainer = fit(
            Path(folder), RanksLM(), strategy=strategy_of("dcp_ddp"), devices=1, num_nodes=2
        )
        return trainer.world_size, trainer.node_rank, trainer.lightning_module.losses_seen
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_num_nodes(world: World, tmp_path: Path) -> None:
    first, second = world.run(on_two_nodes, str(tmp_path))
    assert first[:2] == (2, 0) and second[:2] == (2, 1)
    assert first[2] == second[2] and len(first[2]) == STEPS


# ---- a script that is ended, or fails on one rank ------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from tests.strategies.test_compat_ranks import RanksLM, strategy_of
from tests.strategies.compat_tools import fit

class Model(RanksLM):
    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        if self.global_step == 3:
            Path(f"ready{self.global_rank}").touch()
            if "fails" in sys.argv and self.global_rank == 1:
                raise ValueError("only on rank 1")

if __name__ == "__main__":
    callbacks = [ModelCheckpoint(".", every_n_train_steps=2)]
    if "fails" not in sys.argv:  # a checkpoint needs all ranks, and one of them would be gone
        callbacks.append(OnExceptionCheckpoint("."))
    fit(
        Path("."), Model(), strategy=strategy_of("dcp_ddp"), devices=2, max_epochs=100_000,
        enable_checkpointing=True, limit_val_batches=0, callbacks=callbacks,
    )
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SCRIPT)
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")
    env = {k: v for k, v in os.environ.items() if k not in drop}
    env.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    return subprocess.Popen(
        [sys.executable, "train.py", *arguments],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        out, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out


@pytest.mark.slow
def test_a_script_that_gets_a_sigterm(tmp_path: Path) -> None:
    """Ends at once with Lightning's exit code, both kinds of checkpoint saved."""
    process = start(tmp_path)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < deadline:
        assert process.poll() is None, finish(process)[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert code == 0, out  # SIGTERMException is a SystemExit
    assert (tmp_path / "on_exception.ckpt").exists()
    assert list(tmp_path.glob("epoch=*.ckpt"))


@pytest.mark.slow
def test_a_script_that_fails_on_one_rank(tmp_path: Path) -> None:
    code, out = finish(start(tmp_path, "fails"))
    assert code != 0 and "only on rank 1" in out

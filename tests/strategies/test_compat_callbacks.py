"""Every callback that Lightning ships, on one device: its effect is what it is without DCP."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from tests.strategies.compat_tools import (
    LENGTHS,
    STEPS,
    CompatLM,
    both,
    csv_logger,
    data,
    fit,
    make_trainer,
    rows,
    same_weights,
    weights,
)


def callback(trainer: L.Trainer, cls: type) -> Any:
    return next(c for c in trainer.callbacks if isinstance(c, cls))  # type: ignore[attr-defined]


def both_csv(
    folder: Path, model: Callable[[], Any], callbacks: Callable[[], list[L.Callback]], **flags: Any
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """What both write to `metrics.csv`."""
    for name, ours in (("ours", True), ("theirs", False)):
        fit(
            folder,
            model(),
            ours=ours,
            callbacks=callbacks(),
            logger=csv_logger(folder / name),
            log_every_n_steps=1,
            **flags,
        )
    return rows(folder / "ours"), rows(folder / "theirs")


# ---- stopping ------------------------------------------------------------------------------------


def test_early_stopping(tmp_path: Path) -> None:
    ours, theirs = both(
        tmp_path,
        callbacks=lambda: [EarlyStopping("val_loss", patience=1, min_delta=0.2)],
        max_epochs=20,
    )
    assert 1 < ours.current_epoch < 20
    stopped = callback(ours, EarlyStopping)
    assert stopped.stopped_epoch == callback(theirs, EarlyStopping).stopped_epoch > 0


def test_timer(tmp_path: Path) -> None:
    timer = Timer(timedelta(milliseconds=200))
    trainer = fit(tmp_path, callbacks=[timer], max_epochs=-1)
    assert trainer.global_step > 0
    assert 0.2 <= timer.time_elapsed("train") < 5 and timer.time_remaining() <= 0


class Spiky(CompatLM):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 100 if self.global_step == 2 else loss


def test_spike_detection(tmp_path: Path) -> None:
    for ours in (True, False):
        folder = tmp_path / str(ours)
        with pytest.raises(TrainingSpikeException, match="batch 2"):
            fit(folder, Spiky(), ours=ours, callbacks=[SpikeDetection()])
        assert json.loads((folder / "skip_batches.json").read_text()) == [1, 2]


# ---- what is saved -------------------------------------------------------------------------------


def test_model_checkpoint(tmp_path: Path) -> None:
    ours, theirs = both(
        tmp_path,
        callbacks=lambda: [
            ModelCheckpoint(
                monitor="train_loss", every_n_train_steps=1, save_top_k=2, save_last=True
            )
        ],
        enable_checkpointing=True,
    )
    found = []
    for trainer in (ours, theirs):
        checkpoint = callback(trainer, Checkpoint)
        found.append(
            (
                sorted(Path(p).name for p in checkpoint.best_k_models),
                Path(checkpoint.best_model_path).name,
                Path(checkpoint.last_model_path).name,
            )
        )
        assert Path(checkpoint.best_model_path).exists()
    assert found[0] == found[1] and len(found[0][0]) == 2


class Fails(CompatLM):
    #: Where it fails. Of the class: cost profiles are kept by an object's own values.
    fails_in: str = ""

    def fail(self, hook: str) -> None:
        if self.trainer.global_step == 2 and hook == self.fails_in:
            raise ValueError("the user's own error")

    def training_step(self, *args: Any) -> Tensor:
        self.fail("training_step")
        return super().training_step(*args)

    def on_before_zero_grad(self, *args: Any) -> None:
        self.fail("on_before_zero_grad")

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.fail("on_train_batch_end")


@pytest.mark.parametrize("hook", ["training_step", "on_before_zero_grad", "on_train_batch_end"])
def test_on_exception_checkpoint(
    tmp_path: Path, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Fails()
    monkeypatch.setattr(Fails, "fails_in", hook)
    with pytest.raises(ValueError, match="the user's own error"):
        fit(
            tmp_path,
            model,
            callbacks=[OnExceptionCheckpoint(tmp_path)],
            enable_checkpointing=True,
        )
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    torch.testing.assert_close(dict(saved["state_dict"]), dict(model.state_dict()))
    # Goes on from there, now without the error, with nothing lost.
    monkeypatch.setattr(Fails, "fails_in", "")
    resumed = fit(tmp_path, Fails(), ckpt_path=str(tmp_path / "on_exception.ckpt"))
    whole = fit(tmp_path, Fails())
    assert resumed.global_step == STEPS
    assert resumed.lightning_module.losses_seen[-1] == whole.lightning_module.losses_seen[-1]


# ---- what is shown -------------------------------------------------------------------------------


def test_learning_rate_monitor(tmp_path: Path) -> None:
    def model() -> CompatLM:
        return Scheduled(lambda o: {"scheduler": StepLR(o, 2, 0.5), "interval": "step"})

    ours, theirs = both_csv(
        tmp_path, model, lambda: [LearningRateMonitor("step", log_momentum=True)]
    )
    assert [r["lr-SGD"] for r in ours if "lr-SGD" in r] == [0.1, 0.1, 0.05, 0.05]
    for got, wanted in zip(ours, theirs, strict=True):
        assert got == pytest.approx(wanted, rel=1e-4)


def test_throughput_monitor(tmp_path: Path) -> None:
    ours, theirs = both_csv(
        tmp_path,
        CompatLM,
        lambda: [
            ThroughputMonitor(
                lambda batch: len(batch["ids"]),
                lambda batch: int((batch["labels"] != -100).sum()),
                window_size=2,
            )
        ],
    )
    for count in ("train/samples", "train/lengths", "train/batches", "validate/samples"):
        values = [r[count] for r in ours if count in r]
        assert values == [r[count] for r in theirs if count in r] and values
    assert all(r["train/device/samples_per_sec"] > 0 for r in ours if r.get("train/batches", 0) > 1)


def test_device_stats_monitor(tmp_path: Path) -> None:
    ours, theirs = both_csv(tmp_path, CompatLM, lambda: [DeviceStatsMonitor(cpu_stats=True)])
    names = [{k for r in written for k in r} for written in (ours, theirs)]
    assert {n.replace("DCPDDPStrategy", "") for n in names[0]} == names[1]
    assert any("cpu_percent" in name for name in names[0])


def test_model_summary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = []
    for ours in (True, False):
        model = CompatLM()
        model.example_input_array = torch.ones(1, 5, dtype=torch.long)
        caplog.clear()
        with caplog.at_level("INFO", "lightning.pytorch.callbacks.model_summary"):
            fit(tmp_path, model, ours=ours, callbacks=[ModelSummary(2)], enable_model_summary=True)
        texts.append("".join(r.message for r in caplog.records if "Params" in r.message))
    assert texts[0] == texts[1]
    assert re.search(r"blocks\.2 +\| Block +\|.*\[\[1, 5, 16\], \[5, 16\]\]", texts[0])


def test_rich_model_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, callbacks=[RichModelSummary(2)], enable_model_summary=True)
    out = capsys.readouterr().out
    assert re.search(r"blocks\.2 +│ Block", out) and "Total params" in out


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars(
    tmp_path: Path, bar: type[L.pytorch.callbacks.ProgressBar], capfd: pytest.CaptureFixture[str]
) -> None:
    """Iterations, not micro-batches, and as many as there are; the logged loss beside them."""
    totals = []
    for ours in (True, False):
        trainer = fit(
            tmp_path, ours=ours, callbacks=[bar()], enable_progress_bar=True, limit_val_batches=1
        )
        shown = callback(trainer, bar)
        totals.append((shown.total_train_batches, shown.total_val_batches))
        texts = capfd.readouterr()
        out = texts.out + texts.err
        assert "4/4" in out and "train_loss_step" in out
        assert re.search(r"\d+\.\d+it/s", out)
    assert totals[0] == totals[1] == (STEPS, 1)


def test_eta_counts_iterations(tmp_path: Path) -> None:
    """tqdm's remaining time is (total - n) / rate: both of iterations."""
    bar = TQDMProgressBar()
    seen: list[tuple[int, int]] = []

    class Look(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append((bar.train_progress_bar.n, bar.train_progress_bar.total))

    fit(tmp_path, callbacks=[bar, Look()], enable_progress_bar=True)
    assert seen == [(n, STEPS) for n in range(1, STEPS + 1)]


def test_lambda_callback(tmp_path: Path) -> None:
    counts: list[dict[str, int]] = []

    def make() -> list[L.Callback]:
        mine: dict[str, int] = {}
        counts.append(mine)

        def count(name: str) -> Callable[..., None]:
            return lambda *_: mine.update({name: mine.get(name, 0) + 1})

        names = ("on_fit_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end")
        return [LambdaCallback(**{name: count(name) for name in names})]

    both(tmp_path, callbacks=make, max_epochs=2)
    assert counts[0] == counts[1]
    assert counts[0]["on_train_batch_end"] == 2 * STEPS


# ---- learning rates ------------------------------------------------------------------------------


class Scheduled(CompatLM):
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        made = self.make(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": made} if isinstance(made, dict) else made

    def on_train_batch_start(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


SCHEDULES: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "epoch": (lambda o: {"scheduler": StepLR(o, 1, 0.5)}, [0.1] * 4 + [0.05] * 4),
    "step": (
        lambda o: {"scheduler": StepLR(o, 2, 0.5), "interval": "step"},
        [0.1, 0.1, 0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125],
    ),
    "frequency": (
        lambda o: {"scheduler": StepLR(o, 1, 0.5), "interval": "step", "frequency": 3},
        [0.1] * 3 + [0.05] * 4 + [0.025],
    ),
    "plateau": (
        lambda o: {
            "scheduler": ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.9),
            "monitor": "val_loss",
        },
        [0.1] * 8 + [0.05] * 4,
    ),
    "plateau on steps": (
        lambda o: {
            "scheduler": ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10, mode="max"),
            "monitor": "train_loss",
            "interval": "step",
            "frequency": 2,
        },
        [],
    ),
    "several": (lambda o: ([o], [StepLR(o, 1, 0.5), StepLR(o, 1, 0.1)]), [0.1] * 4 + [0.005] * 4),
}


@pytest.mark.parametrize("case", list(SCHEDULES))
def test_schedulers(tmp_path: Path, case: str) -> None:
    make, rates = SCHEDULES[case]
    ours, theirs = both(tmp_path, lambda: Scheduled(make), max_epochs=3 if case == "plateau" else 2)
    assert ours.lightning_module.rates == pytest.approx(theirs.lightning_module.rates)
    assert not rates or ours.lightning_module.rates == pytest.approx(rates)
    assert len(set(ours.lightning_module.rates)) > 1


class OneCycle(Scheduled):
    def __init__(self) -> None:
        super().__init__(lambda o: None)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        total = int(self.trainer.estimated_stepping_batches)
        assert total == 2 * STEPS
        scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=total)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def test_one_cycle_over_estimated_stepping_batches(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, OneCycle, max_epochs=2)
    assert ours.lightning_module.rates == pytest.approx(theirs.lightning_module.rates)
    assert max(ours.lightning_module.rates) > 0.19 and ours.lightning_module.rates[-1] < 0.02


class Tunable(CompatLM):
    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=self.lr)


def test_learning_rate_finder(tmp_path: Path) -> None:
    """The search sees the losses of whole iterations, and leaves no trace but the rate it found."""

    def make() -> list[L.Callback]:
        return [LearningRateFinder(num_training_steps=20, early_stop_threshold=None)]

    ours, theirs = both(tmp_path, Tunable, make, max_epochs=6)
    found = [callback(t, LearningRateFinder).optimal_lr for t in (ours, theirs)]
    assert found[0].results["lr"] == pytest.approx(found[1].results["lr"])
    assert found[0].results["loss"] == pytest.approx(found[1].results["loss"], rel=1e-4)
    assert ours.lightning_module.lr == found[0].suggestion() == pytest.approx(found[1].suggestion())
    assert ours.optimizers[0].param_groups[0]["lr"] == ours.lightning_module.lr


def test_tuner(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_epochs=6)
    model = Tunable()
    before = weights(model)
    found = Tuner(trainer).lr_find(
        model, data(), num_training=20, early_stop_threshold=None, update_attr=False
    )
    assert found is not None and len(found.results["loss"]) == 20
    same_weights(weights(model), before, rtol=0)
    with pytest.raises(ValueError, match="not supported with distributed strategies"):
        Tuner(trainer).scale_batch_size(model, data())


# ---- averaging and pruning -----------------------------------------------------------------------


def test_stochastic_weight_averaging(tmp_path: Path) -> None:
    """The weights with which epochs 1 to 3 began, averaged."""
    ours, _ = both(
        tmp_path,
        callbacks=lambda: [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)],
        max_epochs=4,
    )
    module = ours.lightning_module
    begins = [module.weights_seen[STEPS * epoch - 1] for epoch in (1, 2, 3)]
    same_weights(weights(module), {n: sum(w[n] for w in begins) / 3 for n in begins[0]})
    assert ours.optimizers[0].param_groups[0]["lr"] < 0.1


def ema(seen: list[dict[str, Tensor]], decay: float) -> dict[str, Tensor]:
    average = dict(seen[0])
    for step in seen[1:]:
        average = {n: decay * average[n] + (1 - decay) * step[n] for n in step}
    return average


def test_ema_weight_averaging(tmp_path: Path) -> None:
    ours, _ = both(tmp_path, callbacks=lambda: [EMAWeightAveraging(decay=0.5)], max_epochs=2)
    module = ours.lightning_module
    same_weights(weights(module), ema(module.weights_seen, 0.5))


def test_weight_averaging_is_resumed(tmp_path: Path) -> None:
    """Validation runs on the average, training goes on from where it was."""

    def make() -> list[L.Callback]:
        return [WeightAveraging(), ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)]

    def run(**flags: Any) -> L.Trainer:
        return fit(tmp_path, callbacks=make(), enable_checkpointing=True, max_epochs=2, **flags)

    whole = run()
    path = str(tmp_path / "epoch=0.ckpt")
    averaged = torch.load(path, weights_only=True)["state_dict"]
    seen = whole.lightning_module.weights_seen
    same_weights(averaged, {n: sum(w[n] for w in seen[:STEPS]) / STEPS for n in averaged})
    resumed = run(ckpt_path=path)
    assert resumed.lightning_module.losses_seen == whole.lightning_module.losses_seen[STEPS:]
    same_weights(weights(resumed.lightning_module), weights(whole.lightning_module))
    assert resumed.callback_metrics["val_loss"] == pytest.approx(
        float(whole.callback_metrics["val_loss"])
    )


def test_model_pruning(tmp_path: Path) -> None:
    """Half of the weights go after each epoch and stay away while training goes on."""

    def make() -> list[L.Callback]:
        return [
            ModelPruning(
                "l1_unstructured",
                amount=0.5,
                parameter_names=["weight"],
                use_global_unstructured=False,
                make_pruning_permanent=False,
            )
        ]

    ours, _ = both(tmp_path, callbacks=make, max_epochs=3)
    linear = ours.lightning_module.blocks[1].up
    assert float((linear.weight == 0).float().mean()) > 0.8
    assert torch.equal(linear.weight == 0, linear.weight_mask == 0)


# ---- prediction ----------------------------------------------------------------------------------


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: dict[int, Tensor] = {}
        self.epoch: dict[int, Tensor] = {}

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any
    ) -> None:
        assert len(indices) == len(prediction)
        self.batches.update(zip(indices, prediction, strict=True))

    def write_on_epoch_end(
        self, trainer: Any, module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        for indices, prediction in zip(batch_indices[0], predictions, strict=True):
            self.epoch.update(zip(indices, prediction, strict=True))


def test_base_prediction_writer(tmp_path: Path) -> None:
    written = []
    for ours in (True, False):
        writer = Writer()
        make_trainer(tmp_path, ours, callbacks=[writer]).predict(CompatLM(), data())
        written.append(writer)
    for mine, reference in (
        (written[0].batches, written[1].batches),
        (written[0].epoch, written[1].epoch),
    ):
        assert set(mine) == set(reference) == set(range(len(LENGTHS)))
        for index, value in mine.items():
            torch.testing.assert_close(value, reference[index])

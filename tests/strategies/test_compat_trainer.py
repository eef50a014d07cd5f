"""Every flag of Lightning's Trainer, on one device: the same as without DCP, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins import (
    AsyncCheckpointIO,
    BitsandbytesPrecision,
    MixedPrecision,
    TorchCheckpointIO,
    TransformerEnginePrecision,
    XLACheckpointIO,
    XLAPrecision,
)
from lightning.pytorch.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    PyTorchProfiler,
    SimpleProfiler,
    XLAProfiler,
)

from lightning_dcp.strategies.ddp import DCPDDPStrategy
from lightning_dcp.strategies.deepspeed import DCPStrategy
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
    strategy,
)

_SEEN = {"validated_at", "sanity_batches", "evaluated", "grad_enabled", "inference"}


class Recorder(L.Callback):
    """At which optimizer step things happen."""

    def __init__(self) -> None:
        self.validated_at: list[int] = []
        self.sanity_batches = 0
        self.evaluated = 0
        self.grad_enabled: list[bool] = []
        self.inference: list[bool] = []

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.validated_at.append(trainer.global_step)

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.sanity_batches += trainer.sanity_checking
        self.evaluated += not trainer.sanity_checking
        self.grad_enabled.append(torch.is_grad_enabled())
        self.inference.append(torch.is_inference_mode_enabled())


def recorders(trainers: tuple[L.Trainer, L.Trainer]) -> tuple[Recorder, Recorder]:
    ours, theirs = (
        next(c for c in t.callbacks if isinstance(c, Recorder))  # type: ignore[attr-defined]
        for t in trainers
    )
    seen = [{k: v for k, v in vars(r).items() if k in _SEEN} for r in (ours, theirs)]
    assert seen[0] == seen[1]
    return ours, theirs


# ---- where it runs -------------------------------------------------------------------------------


@pytest.mark.parametrize(("accelerator", "devices"), [("cpu", 1), (CPUAccelerator(), "1")])
def test_accelerator_and_devices(tmp_path: Path, accelerator: Any, devices: Any) -> None:
    trainer = fit(tmp_path, accelerator=accelerator, devices=devices)
    assert trainer.strategy.root_device == torch.device("cpu") and trainer.world_size == 1
    assert trainer.global_step == STEPS


@pytest.mark.parametrize(
    ("given", "cls"),
    [
        ("dcp", DCPStrategy),
        ("dcp_ddp", DCPDDPStrategy),
        (DCPDDPStrategy(policy="dcp-inter"), DCPDDPStrategy),
    ],
)
def test_strategy(tmp_path: Path, given: Any, cls: type) -> None:
    trainer = make_trainer(tmp_path, strategy=given)
    assert type(trainer.strategy) is cls


# ---- how long ------------------------------------------------------------------------------------


def test_max_epochs(tmp_path: Path) -> None:
    ours, _ = both(tmp_path, max_epochs=3)
    assert (ours.current_epoch, ours.global_step) == (3, 3 * STEPS)


def test_max_steps(tmp_path: Path) -> None:
    ours, _ = both(tmp_path, max_epochs=-1, max_steps=STEPS + 2)
    assert ours.global_step == STEPS + 2


class StopAtOnce(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = True


@pytest.mark.parametrize(
    ("flags", "steps"), [({}, 1), ({"min_steps": 3}, STEPS), ({"min_epochs": 2}, 2 * STEPS)]
)
def test_min_steps_and_min_epochs(tmp_path: Path, flags: dict[str, int], steps: int) -> None:
    ours, _ = both(tmp_path, callbacks=lambda: [StopAtOnce()], max_epochs=5, **flags)
    assert ours.global_step == steps


def test_max_time(tmp_path: Path) -> None:
    trainer = fit(tmp_path, max_epochs=-1, max_time=timedelta(milliseconds=200))
    assert trainer.global_step > 0 and trainer.should_stop


@pytest.mark.parametrize("value", [True, 3])
def test_fast_dev_run(tmp_path: Path, value: bool | int) -> None:
    ours, theirs = both(
        tmp_path, callbacks=lambda: [Recorder()], fast_dev_run=value, max_epochs=7, logger=True
    )
    assert ours.global_step == int(value) and ours.max_epochs == 1
    recorders((ours, theirs))


# ---- how much of the data ------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "steps"), [(3, 3), (0.5, 2), (1.0, STEPS), (99, STEPS), (0, 0)])
def test_limit_train_batches(tmp_path: Path, limit: float, steps: int) -> None:
    ours, theirs = both(tmp_path, limit_train_batches=limit, max_epochs=2)
    assert ours.global_step == 2 * steps
    assert ours.num_training_batches == theirs.num_training_batches


@pytest.mark.parametrize(("limit", "batches"), [(1, 1), (0.5, 1), (1.0, 2), (0, 0)])
def test_limit_val_batches(tmp_path: Path, limit: float, batches: int) -> None:
    ours, theirs = both(tmp_path, callbacks=lambda: [Recorder()], limit_val_batches=limit)
    assert recorders((ours, theirs))[0].evaluated == batches


def test_limit_test_and_predict_batches(tmp_path: Path) -> None:
    results = []
    for ours in (True, False):
        trainer = make_trainer(
            tmp_path, ours, limit_test_batches=0.5, limit_predict_batches=3, max_epochs=1
        )
        model = CompatLM()
        tested = trainer.test(model, data(), verbose=False)
        predicted = trainer.predict(model, data())
        results.append((tested, torch.cat(predicted)))  # type: ignore[arg-type]
    assert results[0][0][0] == pytest.approx(results[1][0][0], rel=1e-6)
    assert len(results[0][1]) == 6
    torch.testing.assert_close(results[0][1], results[1][1])


def test_overfit_batches(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"overfit_batches=1\) replaces"):
        fit(tmp_path, overfit_batches=1)


# ---- when it validates ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "at"),
    [
        ({}, [4, 8]),
        ({"val_check_interval": 3}, [3, 7]),
        ({"val_check_interval": 0.5}, [2, 4, 6, 8]),
        ({"check_val_every_n_epoch": 2}, [8]),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, [5]),
        (
            {"val_check_interval": timedelta(0), "check_val_every_n_epoch": None},
            list(range(1, 9)),
        ),
    ],
)
def test_val_check_interval(tmp_path: Path, flags: dict[str, Any], at: list[int]) -> None:
    trainers = both(tmp_path, callbacks=lambda: [Recorder()], max_epochs=2, **flags)
    assert recorders(trainers)[0].validated_at == at


@pytest.mark.parametrize(("steps", "batches"), [(None, 2), (1, 1), (0, 0), (-1, 2)])
def test_num_sanity_val_steps(tmp_path: Path, steps: int | None, batches: int) -> None:
    trainers = both(tmp_path, callbacks=lambda: [Recorder()], num_sanity_val_steps=steps)
    assert recorders(trainers)[0].sanity_batches == batches


@pytest.mark.parametrize("value", [True, False])
def test_inference_mode(tmp_path: Path, value: bool) -> None:
    trainers = both(tmp_path, callbacks=lambda: [Recorder()], inference_mode=value)
    seen = recorders(trainers)[0]
    # Lightning takes `no_grad` for both where gloo is the backend.
    assert set(seen.inference) == {value and dist.get_backend() != "gloo"}
    assert set(seen.grad_enabled) == {False}


# ---- what it writes ------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
def test_log_every_n_steps(tmp_path: Path, every: int) -> None:
    written = []
    for name, ours in (("ours", True), ("theirs", False)):
        fit(
            tmp_path,
            ours=ours,
            logger=csv_logger(tmp_path / name),
            log_every_n_steps=every,
            max_epochs=2,
        )
        written.append(rows(tmp_path / name))
    assert [r["step"] for r in written[0] if "train_loss_step" in r] == list(
        range(every - 1, 2 * STEPS, every)
    )
    assert len(written[0]) == len(written[1])
    for got, wanted in zip(*written, strict=True):
        assert got == pytest.approx(wanted, rel=1e-4)


def test_no_logger(tmp_path: Path) -> None:
    ours, _ = both(tmp_path, logger=False)
    assert ours.loggers == [] and ours.logged_metrics["train_loss_epoch"] > 0


def events(folder: Path) -> dict[tuple[str, int], float]:
    """The scalars in a TensorBoard event file: (tag, step) -> value."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    (path,) = folder.rglob("events.out.tfevents*")
    content = path.read_bytes()
    at = 0
    while at < len(content):  # length (8 bytes), its checksum (4), the event, its checksum (4)
        length = int.from_bytes(content[at : at + 8], "little")
        event = Event.FromString(content[at + 12 : at + 12 + length])
        at += 12 + length + 4
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found[value.tag, event.step] = value.simple_value
    return found


def test_several_loggers(tmp_path: Path) -> None:
    """TensorBoard's event file, read back, holds what the CSV file holds."""
    fit(
        tmp_path,
        logger=[TensorBoardLogger(tmp_path / "tb"), csv_logger(tmp_path / "csv")],
        log_every_n_steps=1,
    )
    scalars = events(tmp_path / "tb")
    csv_rows = rows(tmp_path / "csv")
    steps = [r for r in csv_rows if "train_loss_step" in r]
    assert len(steps) == STEPS
    for row in csv_rows:
        for name in row.keys() - {"step"}:
            assert scalars[name, int(row["step"])] == pytest.approx(row[name], rel=1e-6)


class OwnLogger(Logger):
    name = version = "mine"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.status = ""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def finalize(self, status: str) -> None:
        self.status = status


def test_own_logger(tmp_path: Path) -> None:
    loggers = []
    for ours in (True, False):
        loggers.append(OwnLogger())
        fit(tmp_path, ours=ours, logger=loggers[-1], log_every_n_steps=2, max_epochs=2)
        assert loggers[-1].status == "success"
    assert len(loggers[0].rows) == len(loggers[1].rows) > 0
    for (step, got), (wanted_step, wanted) in zip(loggers[0].rows, loggers[1].rows, strict=True):
        assert step == wanted_step and got == pytest.approx(wanted, rel=1e-4)


def test_default_root_dir_and_enable_checkpointing(tmp_path: Path) -> None:
    for name, on in (("on", True), ("off", False)):
        fit(tmp_path / name, logger=CSVLogger(tmp_path / name), enable_checkpointing=on)
        assert bool(list((tmp_path / name).rglob("*.ckpt"))) == on


class WithHparams(CompatLM):
    def __init__(self, flavour: str = "plain") -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.parametrize("on", [True, False])
def test_enable_autolog_hparams(tmp_path: Path, on: bool) -> None:
    fit(tmp_path, WithHparams("salty"), logger=csv_logger(tmp_path), enable_autolog_hparams=on)
    file = tmp_path / "hparams.yaml"
    assert ("salty" in file.read_text() if file.exists() else False) == on


def test_enable_progress_bar_and_model_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path)
    assert capsys.readouterr().out == ""
    fit(tmp_path, enable_progress_bar=True, enable_model_summary=True)
    out = capsys.readouterr().out
    assert "4/4" in out and "Total params" in out


def test_barebones(tmp_path: Path) -> None:
    trainer = L.Trainer(
        strategy=strategy(), accelerator="cpu", devices=1, barebones=True, max_epochs=1
    )
    model = CompatLM()
    trainer.fit(model, data())
    reference = fit(tmp_path, ours=False, val=[]).lightning_module
    assert model.losses_seen == pytest.approx(reference.losses_seen, rel=1e-4)
    assert trainer.logged_metrics == {} and trainer.callback_metrics == {}


# ---- how it computes -----------------------------------------------------------------------------


def test_accumulate_grad_batches(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="accumulate_grad_batches=2"):
        fit(tmp_path, accumulate_grad_batches=2)


@pytest.mark.parametrize(("algorithm", "value"), [("norm", 0.05), ("value", 0.01)])
def test_gradient_clip_val(tmp_path: Path, algorithm: str, value: float) -> None:
    class Plain(CompatLM):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1.0)

    ours, _ = both(tmp_path, Plain, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
    first, second = ours.lightning_module.weights_seen[:2]
    step = torch.cat([(second[n] - first[n]).flatten() for n in first])
    size = step.norm() if algorithm == "norm" else step.abs().max()
    assert float(size) == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("value", [True, "warn"])
def test_deterministic(tmp_path: Path, value: bool | str) -> None:
    class Seen(CompatLM):
        def training_step(self, *args: Any) -> Any:
            assert torch.are_deterministic_algorithms_enabled()
            return super().training_step(*args)

    try:
        first, second = (fit(tmp_path, Seen(), deterministic=value) for _ in range(2))
        assert first.lightning_module.losses_seen == second.lightning_module.losses_seen
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("value", [True, False])
def test_benchmark(tmp_path: Path, value: bool) -> None:
    before = torch.backends.cudnn.benchmark
    try:
        fit(tmp_path, benchmark=value)
        assert torch.backends.cudnn.benchmark == value
    finally:
        torch.backends.cudnn.benchmark = before


def test_detect_anomaly(tmp_path: Path) -> None:
    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * float("nan")

    class Broken(CompatLM):
        def training_step(self, *args: Any) -> Any:
            loss = super().training_step(*args)
            return Root.apply(loss) if self.global_step == 2 else loss

    both(tmp_path, detect_anomaly=True)
    with pytest.raises(RuntimeError, match=r"RootBackward.*returned nan"):
        fit(tmp_path, Broken(), detect_anomaly=True)
    fit(tmp_path, Broken())


def test_use_distributed_sampler(tmp_path: Path) -> None:
    for value in (True, False):
        both(tmp_path / str(value), use_distributed_sampler=value, max_epochs=2)


def test_reload_dataloaders_every_n_epochs(tmp_path: Path) -> None:
    """A data set that grows: each reload is read, planned and counted anew."""
    seen: list[tuple[int, list[int]]] = []

    class Growing(CompatLM):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.strategy.inside_micro_batch:  # not while the cost profile is measured
                seen.append((self.current_epoch, batch["id"].tolist()))
            return super().training_step(batch, batch_idx)

        def train_dataloader(self) -> Any:
            return data(LENGTHS[: 2 + 2 * self.trainer.current_epoch])

    trainer = make_trainer(tmp_path, max_epochs=4, reload_dataloaders_every_n_epochs=2)
    trainer.fit(Growing())
    for epoch, count in enumerate((2, 2, 6, 6)):
        assert sorted(i for e, ids in seen for i in ids if e == epoch) == list(range(count))
    assert trainer.global_step == 1 + 1 + 3 + 3


# ---- profiler ------------------------------------------------------------------------------------


def spans(profiler: Any) -> set[str]:
    if isinstance(profiler, SimpleProfiler):
        return set(profiler.recorded_durations)
    return set(re.findall(r"\[DCP\]\w+", profiler.summary()))


@pytest.mark.parametrize(
    "make", ["simple", "advanced", lambda p: SimpleProfiler(p, "s"), lambda p: AdvancedProfiler(p)]
)
def test_profiler(tmp_path: Path, make: str | Callable[[Path], Any]) -> None:
    trainer = make_trainer(
        tmp_path, profiler=make if isinstance(make, str) else make(tmp_path), max_epochs=1
    )
    found: list[set[str]] = []

    class Look(L.Callback):
        def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
            found.append(spans(trainer.profiler))  # type: ignore[attr-defined]

    trainer.callbacks.append(Look())  # type: ignore[attr-defined]
    trainer.fit(CompatLM(), data())
    assert {"[DCP]micro_batch_forward", "[DCP]micro_batch_backward"} <= found[0]


def test_pass_through_and_pytorch_profiler(tmp_path: Path) -> None:
    both(tmp_path, profiler=PassThroughProfiler())
    profiler = PyTorchProfiler(tmp_path, "torch", export_to_chrome=False)
    trainer = fit(tmp_path, profiler=profiler)
    assert trainer.global_step == STEPS
    assert any("micro_batch" in e.key for e in profiler.function_events.key_averages())


# ---- plugins -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [TorchCheckpointIO, AsyncCheckpointIO])
def test_checkpoint_io_plugin(tmp_path: Path, make: Callable[[], Any]) -> None:
    trainer = fit(
        tmp_path,
        plugins=[make()],
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(tmp_path, filename="last")],
    )
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    torch.testing.assert_close(dict(saved), dict(trainer.lightning_module.state_dict()))


def test_precision_plugin(tmp_path: Path) -> None:
    class Seen(CompatLM):
        def training_step(self, *args: Any) -> Any:
            assert torch.is_autocast_enabled("cpu")
            return super().training_step(*args)

    plugin = MixedPrecision("bf16-mixed", "cpu")
    trainer = fit(tmp_path, Seen(), plugins=[plugin])
    assert trainer.precision_plugin is plugin and trainer.global_step == STEPS


@pytest.mark.parametrize(
    "make",
    [
        XLAProfiler,
        XLACheckpointIO,
        XLAPrecision,
        lambda: BitsandbytesPrecision("nf4"),
        lambda: TransformerEnginePrecision(weights_dtype=torch.bfloat16),
    ],
)
def test_what_is_for_other_hardware(make: Callable[[], Any]) -> None:
    """Nothing here needs or installs what they ask for."""
    with pytest.raises(ModuleNotFoundError):
        make()


def test_sync_batchnorm(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"sync_batchnorm=True\).*would hang"):
        fit(tmp_path, sync_batchnorm=True)


def test_model_registry(tmp_path: Path) -> None:
    """Only a name, for a callback of the package litmodels; that one is a ModelCheckpoint."""
    assert fit(tmp_path, model_registry="mine")._model_registry == "mine"


# ---- several runs of one Trainer -----------------------------------------------------------------


def test_fit_twice_then_validate_and_test(tmp_path: Path) -> None:
    results = []
    for ours in (True, False):
        trainer = make_trainer(tmp_path, ours, max_epochs=1)
        model = CompatLM()
        trainer.fit(model, data(), data(LENGTHS[:4]))
        assert "_prepare_dataloader" not in vars(trainer._data_connector)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, data(), data(LENGTHS[:4]))
        scores = trainer.validate(model, data(), verbose=False)[0]
        scores = {**scores, **trainer.test(model, data(), verbose=False)[0]}
        results.append((trainer.global_step, model.losses_seen, scores))
    (steps, losses, scores), (steps0, losses0, scores0) = results
    assert steps == steps0 == 2 * STEPS
    assert losses == pytest.approx(losses0, rel=1e-4)
    assert scores == pytest.approx(scores0, rel=1e-4)

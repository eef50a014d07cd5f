"""What a LightningModule or LightningDataModule may define or override, on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from lightning_dcp.data.datamodule import DCPDataModuleMixin
from tests.strategies.compat_tools import (
    LENGTHS,
    STEPS,
    CompatLM,
    both,
    data,
    fit,
    make_trainer,
    same_weights,
    weights,
)

# ---- optimization --------------------------------------------------------------------------------


class Form(CompatLM):
    """One of the forms in which `configure_optimizers` may answer."""

    form = ""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        scheduler = StepLR(optimizer, 1, 0.5)
        config = {"scheduler": scheduler, "interval": "step"}
        return {
            "optimizer": optimizer,
            "list": [optimizer],
            "lists": ([optimizer], [scheduler]),
            "lists with a dict": ([optimizer], [config]),
            "dict": {"optimizer": optimizer},
            "dict with a scheduler": {"optimizer": optimizer, "lr_scheduler": scheduler},
            "tuple of dicts": ({"optimizer": optimizer, "lr_scheduler": config},),
            "nothing": None,
        }[self.form]


@pytest.mark.parametrize(
    "form",
    [
        "optimizer",
        "list",
        "lists",
        "lists with a dict",
        "dict",
        "dict with a scheduler",
        "tuple of dicts",
        "nothing",
    ],
)
def test_configure_optimizers(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Form, "form", form)
    ours, theirs = both(tmp_path, Form, max_epochs=2)
    assert len(ours.lr_scheduler_configs) == len(theirs.lr_scheduler_configs)


class OwnSteps(CompatLM):
    """Overrides everything of a step that Lightning lets one override."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1), "interval": "step"}]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.trainer.global_step)  # a warm-up of one's own
        optimizer.step(closure=closure)
        self.calls.append("optimizer_step")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        self.calls.append("optimizer_zero_grad")

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        assert float(torch.stack(norms).norm()) < 0.0501
        self.calls.append("configure_gradient_clipping")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.calls.append("lr_scheduler_step")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert all(p.grad is not None for p in self.parameters())
        self.calls.append("on_before_optimizer_step")


def test_an_overridden_step(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, OwnSteps)
    calls = ours.lightning_module.calls
    assert calls == theirs.lightning_module.calls and len(calls) == 5 * STEPS


def test_a_closure_that_is_called_first(tmp_path: Path) -> None:
    class First(CompatLM):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            closure()
            optimizer.step()

    both(tmp_path, First)


def test_a_closure_that_is_called_twice(tmp_path: Path) -> None:
    class Twice(CompatLM):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            closure()
            optimizer.step(closure=closure)

    with pytest.raises(RuntimeError, match="closure of the optimizer step was called a second"):
        fit(tmp_path, Twice())


def test_toggled_optimizer(tmp_path: Path) -> None:
    class Toggling(CompatLM):
        def on_train_batch_start(self, *_: Any) -> None:
            with self.toggled_optimizer(self.optimizers()):
                assert all(p.requires_grad for p in self.parameters())

    both(tmp_path, Toggling)


def test_backward(tmp_path: Path) -> None:
    """Sees each micro-batch's weighted loss: they add up to the mean of the step."""

    class OwnBackward(CompatLM):
        def __init__(self) -> None:
            super().__init__()
            self.sums = [0.0] * STEPS

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self.sums[self.global_step] += float(loss)
            super().backward(loss, *args, **kwargs)

    ours, _ = both(tmp_path, OwnBackward)
    module = ours.lightning_module
    assert module.sums == pytest.approx(module.losses_seen, rel=1e-5)


# ---- the model -----------------------------------------------------------------------------------


class BuiltLate(CompatLM):
    def __init__(self) -> None:
        super().__init__()
        self.kept = self.blocks
        del self.blocks
        self.built = 0

    def configure_model(self) -> None:
        if not self.built:
            self.blocks = self.kept
            del self.kept
        self.built += 1


class BuiltByTheFormerName(BuiltLate):
    configure_model = L.LightningModule.configure_model  # type: ignore[assignment]

    def configure_sharded_model(self) -> None:
        BuiltLate.configure_model(self)


@pytest.mark.parametrize("model", [BuiltLate, BuiltByTheFormerName])
def test_configure_model(tmp_path: Path, model: type[BuiltLate]) -> None:
    ours, _ = both(tmp_path, model)
    assert ours.lightning_module.built == 1


class Compiled(CompatLM):
    def configure_model(self) -> None:
        for block in self.blocks:
            block.compile(backend="eager")


@pytest.mark.slow
def test_compiled_blocks(tmp_path: Path) -> None:
    compiled = fit(tmp_path, Compiled())
    plain = fit(tmp_path, ours=False)
    assert compiled.lightning_module.losses_seen == pytest.approx(
        plain.lightning_module.losses_seen, rel=1e-4
    )
    same_weights(weights(compiled.lightning_module), weights(plain.lightning_module))
    assert list(compiled.lightning_module.state_dict()) == list(plain.lightning_module.state_dict())


def test_configure_callbacks(tmp_path: Path) -> None:
    seen: list[int] = []

    class WithCallbacks(CompatLM):
        def configure_callbacks(self) -> Any:
            return LambdaCallback(on_train_batch_end=lambda t, *_: seen.append(t.global_step))

    fit(tmp_path, WithCallbacks())
    assert seen == [1, 2, 3, 4]


class Remembering(CompatLM):
    """State of the user's own in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.steps_taken = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.steps_taken += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.steps_taken

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.steps_taken = checkpoint["mine"]


class RememberingCallback(L.Callback):
    def __init__(self) -> None:
        self.value = 0
        self.saved = self.loaded = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.value += 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.saved += 1

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.loaded += 1


class Data(DCPDataModuleMixin, L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.epochs_read = 0

    def sequence_lengths(self, dataset: Any) -> list[int]:
        return [len(item["ids"]) for item in dataset.items]

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {str.__str__(stage)}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {str.__str__(stage)}")

    def on_exception(self, exception: BaseException) -> None:
        self.calls.append(f"on_exception {exception}")

    def train_dataloader(self) -> Any:
        self.epochs_read += 1
        return data()

    def val_dataloader(self) -> Any:
        return data(LENGTHS[:4])

    def test_dataloader(self) -> Any:
        return data()

    def predict_dataloader(self) -> Any:
        return data()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "before": True}

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        assert batch.pop("before")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "after": True}

    def state_dict(self) -> dict[str, Any]:
        return {"epochs_read": self.epochs_read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs_read = 10 * state_dict["epochs_read"]


class Expecting(Remembering):
    def losses(self, batch: Any) -> Tensor:
        assert batch["after"] and "before" not in batch
        return super().losses(batch)


def test_data_module(tmp_path: Path) -> None:
    """Its hooks, on each micro-batch, and its state, as that of module and callbacks, resumed."""
    module, source, callback = Expecting(), Data(), RememberingCallback()
    checkpoint = ModelCheckpoint(tmp_path, filename="last")
    trainer = make_trainer(
        tmp_path, callbacks=[callback, checkpoint], enable_checkpointing=True, max_epochs=1
    )
    trainer.fit(module, datamodule=source)
    trainer.test(module, datamodule=source, verbose=False)
    assert source.calls == [
        "prepare_data",
        "setup fit",
        "teardown fit",
        "prepare_data",
        "setup test",
        "teardown test",
    ]
    assert module.steps_taken == callback.value == STEPS and callback.saved == 1

    module2, source2, callback2 = Expecting(), Data(), RememberingCallback()
    trainer = make_trainer(tmp_path, callbacks=[callback2], max_epochs=2)
    trainer.fit(module2, datamodule=source2, ckpt_path=str(tmp_path / "last.ckpt"))
    assert module2.steps_taken == callback2.value == 2 * STEPS and callback2.loaded == 1
    # Under Lightning a data module's state is loaded before its train loader is asked for.
    assert source2.epochs_read == 10 * source.epochs_read + 1
    assert len(module2.losses_seen) == STEPS


def test_an_exception_reaches_callbacks_and_data_module(tmp_path: Path) -> None:
    class Failing(Expecting):
        def training_step(self, *args: Any) -> Any:
            raise ValueError("mine")

    caught: list[str] = []
    source = Data()
    callback = LambdaCallback(on_exception=lambda t, m, e: caught.append(str(e)))
    trainer = make_trainer(tmp_path, callbacks=[callback])
    model = Failing()
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(model, datamodule=source)
    assert caught == ["mine"] and "on_exception mine" in source.calls
    # Nothing of ours stays on the model.
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_keyboard_interrupt_ends_the_run(tmp_path: Path) -> None:
    class Interrupted(CompatLM):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 2:
                raise KeyboardInterrupt

    import signal

    handler = signal.getsignal(signal.SIGINT)
    codes = []
    try:
        for ours in (True, False):
            with pytest.raises(SystemExit) as caught:
                fit(tmp_path, Interrupted(), ours=ours)
            codes.append(caught.value.code)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert codes == [1, 1]


def test_the_module_after_training(tmp_path: Path) -> None:
    """Exported, frozen, reloaded from a checkpoint: as if DCP had never been there."""
    trainer = fit(
        tmp_path,
        callbacks=[ModelCheckpoint(tmp_path, filename="last")],
        enable_checkpointing=True,
    )
    model = trainer.lightning_module
    ids = torch.ones(1, 5, dtype=torch.long)
    reloaded = CompatLM.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    wanted = model(ids)
    torch.testing.assert_close(reloaded(ids), wanted)
    model.freeze()
    assert not model(ids).requires_grad
    model.unfreeze()
    traced = torch.jit.trace(model.eval(), ids)
    torch.testing.assert_close(traced(ids), wanted)


# ---- loaders -------------------------------------------------------------------------------------


def test_loaders_of_the_module(tmp_path: Path) -> None:
    class Complete(CompatLM):
        def train_dataloader(self) -> Any:
            return data()

        def val_dataloader(self) -> Any:
            return [data(LENGTHS[:4]), data(LENGTHS[4:])]

        def validation_step(  # type: ignore[override]
            self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            self.log("v", self.losses(batch).mean(), batch_size=len(batch["ids"]))

    found = []
    for ours in (True, False):
        trainer = make_trainer(tmp_path, ours, max_epochs=2)
        trainer.fit(Complete())
        found.append({k: float(v) for k, v in trainer.callback_metrics.items()})
    assert "v/dataloader_idx_1" in found[0] and found[0] == pytest.approx(found[1], rel=1e-4)

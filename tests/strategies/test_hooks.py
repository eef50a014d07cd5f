"""Every hook of module and callbacks: called as often as under `ddp`, in the same order.

Only hooks of a single batch's way through `training_step` and backward run once per micro-batch.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch.utils.data import DataLoader

from tests.strategies.hand_planned import LENGTHS, STRATEGIES, hand_planned, make_plans
from tests.strategies.toys import Sequences, ToyLM, pad
from tests.worlds import World

WORLD_SIZE = 4
#: 20 samples, 2 a rank: 3 steps an epoch under `ddp`, as in the dictated plans.
EPOCHS, STEPS = 2, 3

#: Run once per micro-batch in training; the documented difference.
PER_MICRO_BATCH = {
    "module.on_before_batch_transfer",
    "module.transfer_batch_to_device",
    "module.on_after_batch_transfer",
    "module.training_step",
    "module.forward",
    "module.on_before_backward",
    "callback.on_before_backward",
    "module.backward",
    "module.on_after_backward",
    "callback.on_after_backward",
}


def hooks_of(*classes: type) -> set[str]:
    """Public methods that these classes define themselves."""
    return {
        name
        for cls in classes
        for name, member in vars(cls).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


#: LightningModule has many methods that are no hooks; of its own these are.
MODULE_HOOKS = hooks_of(ModelHooks, DataHooks, CheckpointHooks) | {
    "backward",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_optimizers",
    "forward",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "predict_step",
    "test_step",
    "training_step",
    "validation_step",
}
NO_HOOKS = {
    "configure_sharded_model",  # refused by Lightning beside `configure_model`
    "load_from_checkpoint",
}
CALLBACK_HOOKS = hooks_of(L.Callback)


def recording(cls: Any, prefix: str, names: set[str]) -> Any:
    """A subclass whose methods note their calls in `calls`, with the stage."""

    def recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(f"{prefix}.{name}")
            return method(self, *args, **kwargs)

        return call

    body = {name: recorded(name, getattr(cls, name)) for name in sorted(names)}
    return type(f"Recording{cls.__name__}", (cls,), body)


class HookedLM(ToyLM):
    """Has all loaders and steps."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(width=8, mean_over="samples")
        self.calls = calls

    def _loader(self, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=pad, shuffle=shuffle)

    def train_dataloader(self) -> Any:
        return self._loader(shuffle=True)

    def val_dataloader(self) -> Any:
        return self._loader()

    test_dataloader = predict_dataloader = val_dataloader

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.losses(batch).mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["ids"]).argmax(-1)

    def configure_callbacks(self) -> Any:
        return []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class PlanCallback(L.Callback):
    """Notes calls; and how many micro-batches each rank had."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_micro_batches: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        report = getattr(trainer.strategy, "last_report", None)
        if report is not None:
            mine = report.plan.for_rank(trainer.global_rank)
            self.num_micro_batches.append(len(mine))


RecordingLM = recording(HookedLM, "module", MODULE_HOOKS - NO_HOOKS)
RecordingCallback = recording(PlanCallback, "callback", CALLBACK_HOOKS)


def run(rank: int, name: str) -> dict[str, Any]:
    strategy = "ddp" if name == "ddp" else STRATEGIES[name](loss_average="samples")
    callback = RecordingCallback()
    model = RecordingLM(callback.calls)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=WORLD_SIZE,
        max_epochs=EPOCHS,
        gradient_clip_val=1.0,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    calls: dict[str, list[str]] = {}
    for stage in ("fit", "validate", "test", "predict"):
        callback.calls.clear()
        with nullcontext() if name == "ddp" else hand_planned(strategy, make_plans(STEPS)):
            getattr(trainer, stage)(model)
        calls[stage] = list(callback.calls)
    # The stand-in for the cost profile calls the model; a profile would leave no trace.
    start = calls["fit"].index("module.configure_optimizers")
    calls["fit"][:start] = [c for c in calls["fit"][:start] if c != "module.forward"]
    return {"calls": calls, "num_micro_batches": callback.num_micro_batches}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(WORLD_SIZE, timeout_s=100) as world:
        yield world


@pytest.fixture(scope="module")
def results(world: World) -> Callable[[str], list[dict[str, Any]]]:
    return functools.cache(lambda name: world.run(run, name))


def training_steps(calls: list[str]) -> list[list[str]]:
    """What was called in each training step, from its first hook to its last."""
    steps, inside = [], False
    for call in calls:
        if call == "callback.on_train_batch_start":
            steps.append([])
            inside = True
        if inside:
            steps[-1].append(call)
        if call == "module.on_train_batch_end":
            inside = False
    return steps


def test_the_recorder_knows_all_hooks() -> None:
    """Hooks by name: what is not called at all could not be compared."""
    assert {"on_train_batch_start", "on_save_checkpoint", "setup"} <= MODULE_HOOKS & CALLBACK_HOOKS
    own = {name for name in hooks_of(L.LightningModule) if name.startswith(("on_", "configure_"))}
    assert own <= MODULE_HOOKS


@pytest.mark.parametrize("name", ["dcp_ddp", "dcp", "dcp_fsdp"])
class TestHooks:
    def test_fit(self, results: Any, name: str) -> None:
        for theirs, own in zip(results("ddp"), results(name), strict=True):
            wanted, got = theirs["calls"]["fit"], own["calls"]["fit"]
            assert len(training_steps(got)) == len(training_steps(wanted)) == EPOCHS * STEPS
            # The plan is made of the train loader, and the optimizer may ask for its length.
            loader = "module.train_dataloader"
            assert got.count(loader) == wanted.count(loader) == 1
            assert got.index("module.configure_optimizers") == 1 + got.index(loader)
            different = PER_MICRO_BATCH | {loader}
            assert [c for c in got if c not in different] == [
                c for c in wanted if c not in different
            ]

    def test_one_training_step(self, results: Any, name: str) -> None:
        """All calls of a step in their order, on a rank with any number of micro-batches."""
        seen: set[int] = set()
        for own in results(name):
            steps = training_steps(own["calls"]["fit"])
            for step, count in zip(steps, own["num_micro_batches"], strict=True):
                seen.add(count)
                forward = [
                    "module.on_before_batch_transfer",
                    "module.transfer_batch_to_device",
                    "module.on_after_batch_transfer",
                    "module.training_step",
                    "module.forward",
                ]
                backward = [
                    "callback.on_before_backward",
                    "module.on_before_backward",
                    # Lightning leaves backward passes to DeepSpeed, and warns of it.
                    *(["module.backward"] if name != "dcp" else []),
                    "callback.on_after_backward",
                    "module.on_after_backward",
                ]
                assert step == [
                    "callback.on_train_batch_start",
                    "module.on_train_batch_start",
                    "module.optimizer_step",
                    *(forward if count else []),
                    "callback.on_before_zero_grad",
                    "module.on_before_zero_grad",
                    "module.optimizer_zero_grad",
                    *(backward if count else []),
                    *((count - 1) * (forward + backward)),
                    "callback.on_before_optimizer_step",
                    "module.on_before_optimizer_step",
                    "module.configure_gradient_clipping",
                    "module.lr_scheduler_step",
                    "callback.on_train_batch_end",
                    "module.on_train_batch_end",
                ]
        assert {0, 1, 5} < seen

    def test_counts(self, results: Any, name: str) -> None:
        for own in results(name):
            counts = Counter(own["calls"]["fit"])
            micro_batches = sum(own["num_micro_batches"])
            for call in ("module.training_step", "callback.on_after_backward"):
                assert counts[call] == micro_batches
            assert counts["module.backward"] == (0 if name == "dcp" else micro_batches)
            # Two batches of the sanity check, three in each epoch's validation.
            assert counts["module.validation_step"] == 2 + EPOCHS * STEPS
            assert counts["module.forward"] == micro_batches + 2 + EPOCHS * STEPS
            assert counts["callback.on_before_optimizer_step"] == EPOCHS * STEPS

    @pytest.mark.parametrize("stage", ["validate", "test", "predict"])
    def test_evaluation(self, results: Any, name: str, stage: str) -> None:
        for theirs, own in zip(results("ddp"), results(name), strict=True):
            assert own["calls"][stage] == theirs["calls"][stage]

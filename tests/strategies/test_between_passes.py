"""What a user's hooks do to batches, parameters and metric objects while ranks run unequal work."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_dcp.strategies.checks import check_parameters
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from tests.strategies.hand_planned import (
    LENGTHS,
    NUM_BLOCKS,
    STRATEGIES,
    Watch,
    hand_planned,
    make_plans,
    train,
    wanted_of,
)
from tests.strategies.toys import (
    IGNORE,
    Sequences,
    ToyLM,
    idle_plan,
    largest_relative_error,
    pad,
)
from tests.worlds import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=100) as world:
        yield world


def data(**options: Any) -> DataLoader[Any]:
    return DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=pad, **options)


def make_trainer(strategy: Any, **options: Any) -> L.Trainer:
    return L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=4,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def as_in_one_process(results: list[dict[str, Any]], num_steps: int, model: Any = ToyLM) -> None:
    wanted = wanted_of(num_steps, model_class=model, double=True)
    for result in results:
        for ours, theirs in zip(result["gradients"], wanted.gradients, strict=True):
            assert largest_relative_error(ours, theirs) <= 1e-12
        assert largest_relative_error(result["parameters"], wanted.parameters) <= 1e-12


# ---- batches -------------------------------------------------------------------------------------


class Masks(ToyLM):
    """Ignores more labels, in the hook after the transfer."""

    def mask(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "labels": batch["labels"].masked_fill(batch["ids"] % 3 == 0, IGNORE)}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.mask(batch)

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        return super().losses(self.mask(batch))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        # Where all labels are ignored the mean is NaN, and bears no loss.
        return self.losses(batch).mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.losses(batch).mean())


def test_labels_are_counted_as_hooks_leave_them(world: World) -> None:
    results = world.run(train, "dcp_ddp", 2, model_class=Masks, double=True)
    as_in_one_process(results, 2, Masks)


def validate(rank: int) -> float:
    trainer = make_trainer(DCPDDPStrategy())
    (metrics,) = trainer.validate(Masks(double=True), data(), verbose=False)
    return float(metrics["val_loss"])


def test_labels_are_counted_as_hooks_leave_them_in_evaluation(world: World) -> None:
    model, dataset = Masks(double=True), Sequences(LENGTHS)
    with torch.no_grad():
        each = torch.cat([model.losses(pad([dataset[i]])) for i in range(len(dataset))])
    assert world.run(validate) == pytest.approx([float(each.mean())] * 4, rel=1e-12)


# ---- parameters ----------------------------------------------------------------------------------


class Looks(Watch):
    """Calls the model before the optimizer's step, and looks at parameters between passes."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        pl_module(torch.ones(1, 5, dtype=torch.long))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        with trainer.strategy.whole_parameters():
            assert pl_module.head.weight.shape == (13, 16)


def test_a_forward_pass_before_the_step_leaves_no_old_parameters(world: World) -> None:
    as_in_one_process(world.run(train, "dcp_fsdp", 2, watch_class=Looks, double=True), 2)


class HookedRoot(ToyLM):
    """Its hooks see the batch of each micro-batch, never the closing pass."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_forward_pre_hook(self.look)
        self.register_forward_hook(self.look)

    @staticmethod
    def look(module: Any, args: Any, *output: Any) -> None:
        assert len(args) > 0


@pytest.mark.parametrize("name", ["dcp_ddp", "dcp_fsdp"])
def test_hooks_on_the_module_are_not_called_to_reduce(world: World, name: str) -> None:
    as_in_one_process(world.run(train, name, 1, model_class=HookedRoot, double=True), 1)


class WritesInStep(ToyLM):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        with torch.no_grad():
            self.head.weight.copy_(F.normalize(self.head.weight))
        return super().training_step(batch, batch_idx)


class WritesBetween(ToyLM):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.head.weight.mul_(0.5)


class SavesBetween(ToyLM):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.state_dict()


def fit_refused(rank: int, name: str, model: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        train(rank, name, 3, model_class=model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("dcp_ddp", WritesInStep, "`training_step` wrote to parameters"),
        ("dcp_fsdp", WritesBetween, "head.weight changed in place"),
        ("dcp_fsdp", SavesBetween, "`state_dict` was called"),
    ],
)
def test_what_would_be_lost_or_drift_apart_is_refused(
    world: World, name: str, model: Any, message: str
) -> None:
    for text in world.run(fit_refused, name, model):
        assert message in text and "on_train_batch_end" in text


def check_sharded(rank: int) -> str:
    model = ToyLM()
    mesh = init_device_mesh("cpu", (4,))
    model.head.weight = torch.nn.Parameter(distribute_tensor(model.head.weight.data, mesh))
    check_parameters(model, "dcp_fsdp")
    with pytest.raises(MisconfigurationException) as caught:
        check_parameters(model, "dcp_ddp")
    return str(caught.value)


def test_parameters_that_another_strategy_has_sharded(world: World) -> None:
    for text in world.run(check_sharded):
        assert "head.weight is sharded" in text and "load_from_checkpoint" in text


def test_parameters_without_dimension() -> None:
    model = ToyLM()
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    check_parameters(model, "dcp_ddp")
    for name in ("dcp", "dcp_fsdp"):
        with pytest.raises(MisconfigurationException, match=r"ToyLM\.scale has no dimension"):
            check_parameters(model, name)


def test_own_clipping_under_deepspeed() -> None:
    class Clips(ToyLM):
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            super().configure_gradient_clipping(*args, **kwargs)

    with pytest.warns(UserWarning, match="overrides `configure_gradient_clipping`"):
        check_parameters(Clips(), "dcp")


# ---- metric objects ------------------------------------------------------------------------------


class Rows(Metric):
    """A list state that is not joined."""

    full_state_update = False
    rows: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx=None)

    def update(self, rows: Tensor) -> None:
        self.rows.append(rows)

    def compute(self) -> Tensor:
        assert all(len(row) for row in self.rows)
        return torch.cat(self.rows).sum()


class Matrices(Rows):
    """One that is joined, of integer matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx="cat")

    def compute(self) -> Tensor:
        rows: Tensor = dim_zero_cat(self.rows)
        assert rows.dtype is torch.long and rows.ndim == 2
        return rows.sum().float()


class Lists(ToyLM):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rows, self.matrices, self.numbers = Rows(), Matrices(), CatMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.rows.update(batch["id"])
        self.matrices.update(batch["id"][:, None])
        self.numbers.update(torch.tensor(1.0))
        self.log("matrices", self.matrices, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("rows", self.rows.compute().float())
        self.log("numbers", self.numbers.compute().sum())


def fit_lists(rank: int) -> list[dict[str, float]]:
    found = []
    idle = [idle_plan(Sequences(LENGTHS), 0, [0, 1, 2])]
    for plans in (make_plans(2), idle):
        strategy = DCPDDPStrategy(loss_average="tokens")
        with hand_planned(strategy, plans):
            trainer = make_trainer(strategy)
            trainer.fit(Lists(num_blocks=NUM_BLOCKS), data())
        found.append({k: float(v) for k, v in trainer.callback_metrics.items()})
    return found


def test_list_states_of_unequal_length(world: World) -> None:
    """On ranks that update more often than others, and on ranks that never do."""
    sync = Metric._sync_dist
    ids = [i for p in make_plans(2) for m in p.micro_batches for i in m.sample_ids]
    num_micro_batches = sum(len(p.micro_batches) for p in make_plans(2))
    for unequal, idle in world.run(fit_lists):
        assert unequal == {
            "rows": sum(ids), "matrices": sum(ids), "numbers": num_micro_batches
        }  # fmt: skip
        assert idle == {"rows": 3, "matrices": 3, "numbers": 2}
    assert Metric._sync_dist is sync


# ---- a signal after the last iteration -----------------------------------------------------------


class Late(L.Callback):
    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def terminated_late(rank: int) -> int:
    strategy = STRATEGIES["dcp_ddp"](loss_average="tokens")
    trainer = make_trainer(strategy, callbacks=[Late()], num_sanity_val_steps=0)
    with hand_planned(strategy, make_plans(1)), pytest.raises(SIGTERMException):
        trainer.fit(ToyLM(num_blocks=NUM_BLOCKS), data(), data())
    assert "on_advance_end" not in vars(trainer.fit_loop)
    return trainer.global_step


def test_a_sigterm_in_the_last_validation_ends_the_run(world: World) -> None:
    assert world.run(terminated_late) == [1] * 4

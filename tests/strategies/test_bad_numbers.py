"""Numbers that go bad: NaN and infinite losses, micro-batches without labels, huge losses.

4 ranks with unequal plans. What one process does with the same samples is what all ranks do alike:
a NaN spreads to all parameters, a scaler of gradients skips the step, nothing bears no loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dcp.planning.plan import Plan
from lightning_dcp.strategies.deepspeed import DCPStrategy
from lightning_dcp.strategies.replicas import refuse_unequal_losses
from tests.models.harness import trainer_of
from tests.strategies import hand_planned
from tests.strategies.hand_planned import (
    LENGTHS,
    STRATEGIES,
    Watch,
    loss_scale,
    make_plans,
    steps_of,
    train,
)
from tests.strategies.test_precision import SCALED, WithSGD
from tests.strategies.toys import (
    IGNORE,
    Sequences,
    ToyLM,
    largest_relative_error,
    micro_batch,
    pad,
    reference,
)
from tests.worlds import World, WorldFailure

ALL = ["dcp", "dcp_ddp", "dcp_fsdp"]
PLANS = make_plans(3)
#: In step 1: one that runs alone on rank 2, one that all ranks share, one that two do.
ALONE = PLANS[1].micro_batches[-1].sample_ids[0]
SHARED = PLANS[1].micro_batches[0].sample_ids[0]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=100) as world:
        yield world


# ---- losses that are not finite ------------------------------------------------------------------


class Breaking(WithSGD):
    """The loss of one sample is no number in step 1."""

    sample, factor = ALONE, math.nan

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        if batch_idx == 1 and self.sample in batch["id"].tolist():
            return self.broken(loss * self.factor)
        return loss

    def broken(self, loss: Tensor) -> Any:
        self.log("broken", loss, on_step=True)
        return loss


class BreakingShared(Breaking):
    sample = SHARED


class Infinite(Breaking):
    factor = math.inf


class WatchSteps(Watch):
    """Parameters after each step, as numbers."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *rest)
        values = torch.cat([hand_planned.whole(p).flatten() for p in pl_module.parameters()])
        logged = float(trainer.callback_metrics["loss_step"])
        self.seen.append((bool(values.isfinite().all()), bool(values.isnan().any()), logged))


def assert_bits_alike(results: list[dict[str, Any]]) -> None:
    """On all ranks, NaN as NaN."""
    for result in results:
        assert str(result["losses"]) == str(results[0]["losses"])
        assert str(result["seen"]) == str(results[0]["seen"])
        for name, parameter in results[0]["parameters"].items():
            assert torch.equal(result["parameters"][name].nan_to_num(), parameter.nan_to_num())


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("dcp_ddp", BreakingShared),
        pytest.param("dcp_ddp", Infinite, marks=pytest.mark.slow),
        ("dcp_fsdp", Breaking),
    ],
)
def test_all_ranks_get_what_one_process_gets(world: World, name: str, model: Any) -> None:
    results = world.run(train, name, 3, model_class=model, watch_class=WatchSteps)
    assert_bits_alike(results)
    first, second, third = results[0]["losses"]
    assert math.isfinite(first) and math.isnan(third)
    assert str(second) == str(model.factor)
    finite, nan, logged = zip(*results[0]["seen"], strict=True)
    assert finite == (True, False, False) and nan == (False, True, True)
    assert math.isfinite(logged[0]) and math.isnan(logged[2])
    for result in results:
        assert result["global_step"] == 3
        # As the sum over all of a step's elements: all parameters that any of them reaches.
        reached = [p for name, p in result["parameters"].items() if "embed" not in name]
        assert all(bool(p.isnan().all()) for p in reached)


def test_deepspeed_skips_the_step_on_all_ranks(world: World) -> None:
    """In whatever precision: its optimizer looks at the norm of all gradients."""
    results = world.run(train, "dcp", 3, model_class=Breaking, watch_class=WatchSteps)
    assert_bits_alike(results)
    first, second, third = results[0]["losses"]
    assert math.isfinite(first) and math.isnan(second) and math.isfinite(third)
    assert all(finite for finite, *_ in results[0]["seen"])


class SkipsBroken(Watch):
    """As users do in plain Lightning: a step whose gradients are not finite is none."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        gradients = [p.grad for p in pl_module.parameters()]
        if not all(bool(g.isfinite().all()) for g in gradients):
            self.seen.append(trainer.global_step)
            for gradient in gradients:
                gradient.zero_()


def test_a_callback_skips_the_step_on_all_ranks(world: World) -> None:
    steps = [steps_of(PLANS)[k] for k in (0, 2)]
    wanted = reference(WithSGD(num_blocks=3, double=True), Sequences(LENGTHS), steps)
    for result in world.run(
        train, "dcp_ddp", 3, double=True, model_class=BreakingShared, watch_class=SkipsBroken
    ):
        assert result["seen"] == [1]
        assert largest_relative_error(result["parameters"], wanted.parameters) <= 1e-12


class LeavesOut(BreakingShared):
    """A loss that is no number is said to bear none."""

    def broken(self, loss: Tensor) -> Any:
        return {"loss": loss, "num_targets": 0}


@pytest.mark.parametrize("name", ALL)
def test_a_step_leaves_a_broken_micro_batch_out(world: World, name: str) -> None:
    steps = steps_of(PLANS)
    broken = PLANS[1].micro_batches[0].sample_ids
    steps[1] = [i for i in steps[1] if i not in broken]
    model = WithSGD(num_blocks=3, double=True)
    if name == "dcp":
        model.float().double()  # from float32 master weights
    wanted = reference(model, Sequences(LENGTHS), steps)
    for result in world.run(
        train, name, 3, double=True, model_class=LeavesOut, watch_class=WatchSteps
    ):
        limit = 2e-6 if name == "dcp" else 1e-12
        assert largest_relative_error(result["parameters"], wanted.parameters) <= limit
        assert result["losses"] == pytest.approx(wanted.losses, rel=limit)
        assert [logged for *_, logged in result["seen"]] == pytest.approx(
            result["losses"], rel=1e-6
        )


@pytest.mark.parametrize("name", ALL)
def test_a_scaler_skips_the_step_on_all_ranks(world: World, name: str) -> None:
    """float16: one rank's NaN lowers the scale of all, which is what a checkpoint keeps."""
    results = world.run(
        train, name, 3, precision=SCALED, model_class=Breaking, watch_class=WatchScaler
    )
    assert_same_parameters(results)
    for result in results:
        assert result["seen"] == results[0]["seen"]
        scales = [scale for scale, _ in result["seen"]]
        assert scales == [2.0**10, 2.0**9, 2.0**9]
        assert all(state.get("scale", scale) == scale for scale, state in result["seen"])


def assert_same_parameters(results: list[dict[str, Any]]) -> None:
    for result in results:
        for name, parameter in results[0]["parameters"].items():
            assert bool(parameter.isfinite().all()), name
            assert torch.equal(result["parameters"][name], parameter), name


class WatchScaler(Watch):
    """(scale, what is saved of the scaler) after each step."""

    def watch_engine(self, *_: Any) -> None:
        return None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *rest)
        strategy: Any = trainer.strategy
        saved = strategy.precision_plugin.state_dict()
        self.seen.append((loss_scale(strategy), {} if isinstance(strategy, DCPStrategy) else saved))


def test_nan_is_no_difference_between_ranks_that_share_a_micro_batch() -> None:
    dataset = Sequences(LENGTHS)
    plan = Plan(
        epoch=0, iteration=0, world_size=2, micro_batches=(micro_batch(dataset, [0], 0, 2),)
    )

    def compare(first: float, second: float) -> None:
        refuse_unequal_losses(plan, torch.tensor([[first], [second]], dtype=torch.float64), 1e-9)

    for value in (math.nan, math.inf, -math.inf, 1.0):
        compare(value, value)
    for first, second in ((math.nan, 1.0), (1.0, math.nan), (math.inf, -math.inf), (1.0, math.inf)):
        with pytest.raises(RuntimeError, match="Ranks 0 and 1 computed different losses"):
            compare(first, second)


# ---- what Lightning does about them --------------------------------------------------------------


def fit(rank: int, model: Any, plans: list[Plan], *, name: str = "dcp_ddp", **options: Any) -> Any:
    strategy = STRATEGIES[name](loss_average="tokens", **options.pop("strategy", {}))
    collate = options.pop("collate", pad)
    trainer = trainer_of(strategy, **options)
    with hand_planned.hand_planned(strategy, plans):
        trainer.fit(model, DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=collate))
    return trainer


def stop_early(rank: int) -> tuple[int, bool]:
    stopping = EarlyStopping("loss_epoch", check_finite=True, patience=100)
    trainer = fit(rank, Breaking(num_blocks=3), make_plans(3), max_epochs=3, callbacks=[stopping])
    return trainer.global_step, "not finite" in str(stopping.stopping_reason_message)


def test_early_stopping_stops_all_ranks(world: World) -> None:
    assert world.run(stop_early) == [(3, True)] * 4


def detect(rank: int, model: type[ToyLM]) -> int:
    trainer = fit(rank, model(num_blocks=3), make_plans(3), detect_anomaly=True)
    return trainer.global_step


def test_anomalies_are_detected_where_they_are() -> None:
    """The rank whose gradient is NaN raises torch's own error; the others do not train on."""
    with World(4, timeout_s=40) as own_world, pytest.raises(WorldFailure) as caught:
        own_world.run(detect, Breaking)
    parts = str(caught.value).split("--- rank ")[1:]
    assert "returned nan values in its 0th output" in parts[2]
    assert not any("finished" in part for part in parts)


class Twisting(Breaking):
    """Nothing bears loss where another would be broken: no gradient is NaN."""

    def broken(self, loss: Tensor) -> Any:
        return {"loss": loss, "num_targets": 0}


def test_what_bears_no_loss_is_no_anomaly(world: World) -> None:
    assert world.run(detect, Twisting) == [3] * 4


# ---- nothing that bears loss ---------------------------------------------------------------------

#: The shared one and a single one of step 0; all of step 2.
UNLABELLED = {
    *PLANS[0].micro_batches[0].sample_ids,
    *PLANS[0].micro_batches[-1].sample_ids,
    *(i for m in PLANS[2].micro_batches for i in m.sample_ids),
}


def pad_unlabelled(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = pad(samples)
    empty = torch.tensor([s["id"] in UNLABELLED for s in samples])
    return {**batch, "labels": batch["labels"].masked_fill(empty[:, None], IGNORE)}


class LogsNothing(ToyLM):
    """Logs in every way a loss that is NaN where nothing bears it; AdamW decays."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.losses(batch).mean()
        options: dict[str, Any] = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("loss", loss, **options)
        self.log("sized", loss, batch_size=len(batch["ids"]), **options)
        for reduction in ("min", "max", "sum"):
            self.log(reduction, loss, reduce_fx=reduction, **options)
        return loss


class Reporting(LogsNothing):
    """The number is returned; labels have a name that nobody would look for."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "num_targets": (batch["y"] != IGNORE).sum()}


def pad_unlabelled_hidden(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = pad_unlabelled(samples)
    return {"ids": batch["ids"], "y": batch["labels"], "id": batch["id"]}


class WatchLogs(Watch):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *rest)
        self.seen.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def without_labels(name: str) -> dict[str, Any]:
    """One process, whose gradients are zero where nothing bears loss: AdamW goes on and decays."""
    model, dataset = ToyLM(num_blocks=3, double=True), Sequences(LENGTHS)
    if name == "dcp":
        model.float().double()
    optimizer = model.configure_optimizers()
    losses = []
    for ids in steps_of(PLANS):
        each = [model.losses(pad([dataset[i]])) for i in ids if i not in UNLABELLED]
        optimizer.zero_grad()
        loss: Any = torch.cat(each).mean() if each else sum(0 * p.sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "parameters": {n: p.detach() for n, p in model.named_parameters()}}


@pytest.mark.parametrize(
    ("name", "model", "collate"),
    [
        ("dcp", LogsNothing, pad_unlabelled),
        pytest.param("dcp_ddp", LogsNothing, pad_unlabelled, marks=pytest.mark.slow),
        ("dcp_ddp", Reporting, pad_unlabelled_hidden),
        pytest.param("dcp_fsdp", LogsNothing, pad_unlabelled, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_and_steps_without_labels(
    world: World, name: str, model: Any, collate: Any
) -> None:
    assert not set(steps_of(PLANS)[2]) - UNLABELLED
    assert set(steps_of(PLANS)[0]) - UNLABELLED
    wanted = without_labels(name)
    results = world.run(
        train, name, 3, double=True, model_class=model, collate=collate, watch_class=WatchLogs
    )
    limit = 2e-6 if name == "dcp" else 1e-12
    for result in results:
        assert largest_relative_error(result["parameters"], wanted["parameters"]) <= limit
        assert result["losses"] == pytest.approx(wanted["losses"], rel=limit)
        assert result["losses"][2] == 0.0
        for logged in result["seen"]:
            assert all(math.isfinite(value) for value in logged.values()), logged
        assert result["seen"][0]["loss_step"] == pytest.approx(wanted["losses"][0], rel=1e-6)
        assert result["seen"][2] == result["seen"][1], "what was logged before is still there"
        assert result["seen"] == results[0]["seen"]


@pytest.mark.parametrize("name", ALL)
def test_a_step_without_labels_under_a_scaler(world: World, name: str) -> None:
    """A scaler needs to have seen gradients, and DeepSpeed to have run a backward pass."""
    results = world.run(
        train,
        name,
        3,
        precision=SCALED,
        model_class=LogsNothing,
        collate=pad_unlabelled,
        watch_class=WatchScaler,
    )
    assert_same_parameters(results)
    for result in results:
        assert [scale for scale, _ in result["seen"]] == [2.0**10] * 3
        assert result["global_step"] == 3


# ---- float16 -------------------------------------------------------------------------------------

#: float16 ends at 65504; a micro-batch of many elements is weighted by more than two.
HUGE = 30_000.0


class HugeLoss(WithSGD):
    """A loss that float16 can just hold, with the gradient of the usual one."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.losses(batch).mean()
        return loss + (HUGE - loss).detach()

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        return super().losses(batch)


class WatchWeighted(Watch):
    """Largest weighted loss that hooks see."""

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Tensor) -> None:
        self.seen.append(float(loss))


def test_the_weight_of_a_micro_batch_does_not_overflow(world: World) -> None:
    wanted = reference(WithSGD(num_blocks=3), Sequences(LENGTHS), steps_of(PLANS)[2:])
    results = world.run(
        train_last, "dcp_ddp", precision="16-true", model_class=HugeLoss, watch_class=WatchWeighted
    )
    weighted = [abs(loss) for result in results for loss in result["seen"]]
    assert 65504 < max(weighted) < math.inf
    for result in results:
        error = largest_relative_error(
            {n: g.float() for n, g in result["gradients"][0].items()}, wanted.gradients[0]
        )
        assert error < 1e-2  # 11 bits of mantissa
        assert result["losses"] == pytest.approx([HUGE], rel=1e-3)


def train_last(rank: int, name: str, **options: Any) -> dict[str, Any]:
    """`train` by the iteration that leaves two ranks idle: few micro-batches of much weight."""
    make = hand_planned.make_plans
    hand_planned.make_plans = lambda num_steps: make(3)[2:]
    try:
        return train(rank, name, 1, **options)
    finally:
        hand_planned.make_plans = make


# ---- on a GPU ------------------------------------------------------------------------------------


def fit_on_a_gpu(rank: int, name: str) -> dict[str, Any]:
    """float16 as Lightning does it on CUDA: a micro-batch of step 1 is NaN, step 2 has no label."""
    from lightning_dcp.planning.options import PlanningOptions
    from lightning_dcp.profiling.options import ProfilingOptions

    strategy = STRATEGIES[name](
        planning=PlanningOptions(max_batch_size=2, seed=0),
        profiling=ProfilingOptions(budget_s=1.0, repeats=1, cache=False),
    )
    model, watch = OnGPU(), WatchScaler()
    trainer = L.Trainer(
        strategy=name if name == "dcp_fsdp" else strategy,
        accelerator="gpu",
        devices=1,
        max_steps=3,
        precision="16-mixed",
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(Sequences(LENGTHS), batch_size=4, collate_fn=pad))
    return {
        "scales": [scale for scale, _ in watch.seen],
        "losses": watch.losses,
        "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
    }


class OnGPU(WithSGD):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.losses(batch).mean()
        if self.trainer.training and self.global_step + batch_idx and batch_idx == 1:
            loss = loss * math.nan
        return {"loss": loss, "num_targets": 0} if batch_idx == 2 else loss

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        angles = torch.arange(ids.shape[1], device=ids.device, dtype=x.dtype)[:, None]
        steps = torch.arange(1, x.shape[-1] + 1, device=ids.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, torch.sin(angles / steps))
        return self.head(self.norm(x))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_float16_on_a_gpu(name: str) -> None:
    with World(1, timeout_s=100, init_process_group=False) as own_world:
        (result,) = own_world.run(fit_on_a_gpu, name)
    assert result["finite"]
    first, second, third = result["scales"][-3:]
    assert second < first and third == second
    assert math.isnan(result["losses"][1]) and result["losses"][2] == 0.0

"""What `self.log` gives where `ddp` would give something else: unequal, shared and missing work.

4 real ranks and dictated plans: sample counts, SP sizes and micro-batches differ by rank, groups
are nested, in the third step two ranks have nothing. The learning rate is zero, so that one process
can say what each value must be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassF1Score,
    MulticlassPrecision,
)

from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from tests.strategies.hand_planned import LENGTHS, NUM_BLOCKS, hand_planned, make_plans, steps_of
from tests.strategies.parity_toys import read_csv
from tests.strategies.test_evaluation import LENGTHS as EVALUATED
from tests.strategies.test_evaluation import QUIET, TIGHT, EvalLM, loader, strategy_of
from tests.strategies.toys import IGNORE, VOCAB, Sequences, ToyLM, pad
from tests.worlds import World

NUM_STEPS = 3


class LogsAll(ToyLM):
    """Logs in every way that has a meaning of its own under a plan."""

    def __init__(self) -> None:
        super().__init__(num_blocks=NUM_BLOCKS, lr=0.0)
        self.mean, self.sum, self.unlogged = MeanMetric(), SumMetric(), SumMetric()
        self.in_list = torch.nn.ModuleList([MaxMetric()])
        self.rare, self.never = MeanMetric(), MeanMetric()
        arguments: dict[str, Any] = {"num_classes": VOCAB, "average": "macro"}
        self.collection = MetricCollection(
            {
                "f1": MulticlassF1Score(**arguments),
                "precision": MulticlassPrecision(**arguments),
                "accuracy": MulticlassAccuracy(num_classes=VOCAB, average="micro"),
            },
            postfix="_of_tokens",
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, labels = self(batch["ids"]), batch["labels"]
        keep = labels != IGNORE
        losses = torch.nn.functional.cross_entropy(logits[keep], labels[keep], reduction="none")
        loss = losses.mean()
        both = {"on_step": True, "on_epoch": True}
        self.log("loss", loss, **both)
        self.log("graph", loss, enable_graph=True, **both)
        self.log("by_sample", float(len(labels)), batch_size=len(labels), **both)
        self.log("rank_zero", float(self.global_rank), rank_zero_only=True, **both)
        if self.global_rank == 0:
            self.log("only_rank_zero", loss, rank_zero_only=True, **both)
        self.log("integer", len(labels), reduce_fx="sum", **both)
        self.log("bad", loss if batch_idx != 1 else float("nan") * loss, **both)
        if self.logger is not None:
            self.logger.log_metrics({"direct": float(batch["id"][0])})

        self.mean(losses.detach())
        self.log("mean", self.mean, **both)
        self.sum.update(losses.detach())
        self.log("sum", self.sum, on_step=False, on_epoch=True)
        self.unlogged.update(torch.ones(len(labels)))
        self.in_list[0].update(losses.detach())
        self.log("largest", self.in_list[0], metric_attribute="in_list.0", **both)
        if len(labels) == 4:  # one micro-batch of rank 1, in two of the steps
            self.rare.update(losses.detach())
            self.log("rare", self.rare, on_step=False, on_epoch=True)
        self.collection.update(logits.argmax(-1)[keep], labels[keep])
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        return loss

    def on_after_backward(self) -> None:
        self.log("after_backward", 1.0, reduce_fx="sum", on_step=True, sync_dist=True)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("zero_grad", float(self.global_rank), on_step=True, on_epoch=True, sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        rank = float(self.global_rank)
        self.log("optimizer_step", rank, on_step=True, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("unlogged", self.unlogged.compute())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class LogsBackward(L.Callback):
    """A callback logs in the hook before each backward pass and after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.graphs: list[bool] = []

    def on_before_backward(self, trainer: L.Trainer, module: Any, loss: Tensor) -> None:
        self.log("before_backward", 1.0, reduce_fx="sum", on_step=True, on_epoch=True)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        self.log("batch_end", float(module.global_rank), on_epoch=True, sync_dist=True)
        self.steps.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        self.graphs.append(trainer.callback_metrics["graph"].requires_grad)


def fit_by_hand(rank: int, folder: str) -> dict[str, Any]:
    strategy = DCPDDPStrategy(loss_average="tokens")
    model, callback = LogsAll(), LogsBackward()
    throughput = ThroughputMonitor(
        batch_size_fn=lambda batch: len(batch["ids"]),
        length_fn=lambda batch: batch["labels"].numel(),
        window_size=2,
    )
    functions = throughput.batch_size_fn, throughput.length_fn
    with hand_planned(strategy, make_plans(NUM_STEPS)):
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=4,
            max_epochs=1,
            callbacks=[callback, throughput],
            logger=CSVLogger(folder),
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=pad))
    assert trainer.logger is not None
    return {
        "steps": callback.steps,
        "graphs": callback.graphs,
        "end": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "csv": f"{trainer.logger.log_dir}/metrics.csv",
        "restored": functions == (throughput.batch_size_fn, throughput.length_fn),
    }


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=100) as world:
        yield world


@pytest.fixture(scope="module")
def results(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return world.run(fit_by_hand, str(tmp_path_factory.mktemp("logs")))


class Wanted:
    """One process's values of the same samples."""

    def __init__(self) -> None:
        model, data = LogsAll(), Sequences(LENGTHS)
        self.plans = make_plans(NUM_STEPS)
        self.losses: list[Tensor] = []
        guesses, labels = [], []
        with torch.no_grad():
            for ids in steps_of(self.plans):
                batches = [pad([data[i]]) for i in ids]
                self.losses.append(torch.cat([model.losses(batch) for batch in batches]))
                for batch in batches:
                    keep = batch["labels"] != IGNORE
                    guesses.append(model(batch["ids"]).argmax(-1)[keep])
                    labels.append(batch["labels"][keep])
            self.collection = {
                name: float(value)
                for name, value in model.collection(torch.cat(guesses), torch.cat(labels)).items()
            }
            fours = [m.sample_ids for p in self.plans for m in p.micro_batches if m.batch_size == 4]
            self.rare = torch.cat([model.losses(pad([data[i]])) for ids in fours for i in ids])
        self.all_losses = torch.cat(self.losses)
        self.num_micro_batches = [len(p.micro_batches) for p in self.plans]


@pytest.fixture(scope="module")
def wanted() -> Wanted:
    return Wanted()


def test_all_ranks_have_the_same(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert str(result["steps"]) == str(results[0]["steps"])  # NaN is not equal to itself
        assert str(result["end"]) == str(results[0]["end"])
        assert result["restored"] and not any(result["graphs"])


def test_values(results: list[dict[str, Any]], wanted: Wanted) -> None:
    steps, end = results[0]["steps"], results[0]["end"]
    means = [float(losses.mean()) for losses in wanted.losses]
    assert [step["loss_step"] for step in steps] == pytest.approx(means, rel=1e-6)
    assert end["loss_epoch"] == pytest.approx(float(wanted.all_losses.mean()), rel=1e-6)
    assert [step["graph_step"] for step in steps] == pytest.approx(means, rel=1e-6)
    assert str(steps[1]["bad_step"]) == str(end["bad_epoch"]) == "nan"
    assert steps[2]["bad_step"] == pytest.approx(means[2], rel=1e-6)
    sizes = [[m.batch_size for m in plan.micro_batches] for plan in wanted.plans]
    assert [s["by_sample_step"] for s in steps] == pytest.approx(
        [sum(b * b for b in step) / sum(step) for step in sizes]
    )
    assert [s["integer_step"] for s in steps] == [sum(step) for step in sizes] == [17, 17, 3]
    assert end["integer_epoch"] == 37
    assert 0 < steps[0]["rank_zero_step"] < 3
    assert steps[0]["only_rank_zero_step"] != steps[0]["loss_step"]


def test_hooks(results: list[dict[str, Any]], wanted: Wanted) -> None:
    steps, end = results[0]["steps"], results[0]["end"]
    for name in ("before_backward_step", "after_backward"):
        assert [step[name] for step in steps] == wanted.num_micro_batches
    assert end["before_backward_epoch"] == sum(wanted.num_micro_batches)
    for name in ("zero_grad", "optimizer_step"):
        assert [step[f"{name}_step"] for step in steps] == [1.5] * 3
        assert end[f"{name}_epoch"] == 1.5
    assert end["batch_end"] == 1.5


def test_metric_objects_count_each_sample_once(
    results: list[dict[str, Any]], wanted: Wanted
) -> None:
    steps, end = results[0]["steps"], results[0]["end"]
    means = [float(losses.mean()) for losses in wanted.losses]
    assert [step["mean_step"] for step in steps] == pytest.approx(means, rel=1e-6)
    assert end["mean_epoch"] == pytest.approx(float(wanted.all_losses.mean()), rel=1e-6)
    assert end["sum"] == pytest.approx(float(wanted.all_losses.sum()), rel=1e-6)
    assert end["unlogged"] == 37
    assert end["largest"] == pytest.approx(float(wanted.all_losses.max()), rel=1e-6)
    assert end["rare"] == pytest.approx(float(wanted.rare.mean()), rel=1e-6)
    for name, value in wanted.collection.items():
        assert end[name] == pytest.approx(value, rel=1e-6), name


def test_direct_logging_is_rank_zeros(results: list[dict[str, Any]], wanted: Wanted) -> None:
    values = [row["direct"] for row in read_csv(results[0]["csv"]) if "direct" in row]
    assert values == [m.sample_ids[0] for p in wanted.plans for m in p.for_rank(0)]


def test_throughput_counts_each_sample_once(results: list[dict[str, Any]], wanted: Wanted) -> None:
    """Lightning reports per device and multiplies by the number of ranks."""
    rows = [row for row in read_csv(results[0]["csv"]) if "train/samples" in row]
    assert [4 * row["train/samples"] for row in rows] == [17, 34, 37]
    padded = [
        sum(m.batch_size * max(LENGTHS[i] for i in m.sample_ids) for m in p.micro_batches)
        for p in wanted.plans
    ]
    assert [4 * row["train/lengths"] for row in rows] == [sum(padded[: i + 1]) for i in range(3)]
    seconds = rows[2]["train/time"] - rows[1]["train/time"]
    assert rows[2]["train/samples_per_sec"] == pytest.approx(3 / seconds)
    assert rows[2]["train/device/samples_per_sec"] == pytest.approx(0.75 / seconds)
    assert rows[2]["train/items_per_sec"] == pytest.approx(padded[2] / seconds)


def validate(rank: int, folder: str) -> dict[str, Any]:
    model = EvalLM()
    trainer = L.Trainer(
        strategy=strategy_of("dcp_ddp", TIGHT),
        devices=4,
        callbacks=[ThroughputMonitor(lambda batch: len(batch["ids"]), window_size=2)],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        **QUIET,
    )
    trainer.validate(model, loader())
    assert trainer.logger is not None
    return {
        "csv": f"{trainer.logger.log_dir}/metrics.csv",
        "own": sum(len(ids) for ids, *_ in model.ran),
    }


def test_throughput_of_evaluation(world: World, tmp_path: Path) -> None:
    """A batch that several ranks evaluate together counts once there too."""
    results = world.run(validate, str(tmp_path))
    samples = [
        4 * row["validate/samples"]
        for row in read_csv(results[0]["csv"])
        if "validate/samples" in row
    ]
    assert samples[-1] == len(EVALUATED) != 4 * results[0]["own"]


# ---- what is refused -----------------------------------------------------------------------------


class Computes(ToyLM):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.losses(batch).mean()
        self.log("running", self.mean(loss.detach()) + self.mean.compute())
        return loss


class Hides(ToyLM):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.seen = [MeanMetric()], MeanMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.losses(batch).mean()
        self.hidden[0].update(loss.detach())
        self.log("hidden", self.hidden[0], metric_attribute="hidden.0")
        return loss


def fit_refused(rank: int, by_hand: bool, cls: type[ToyLM]) -> str:
    strategy = DCPDDPStrategy(profiling=ProfilingOptions(budget_s=0.2, repeats=1, cache=False))
    by_plan = hand_planned(strategy, make_plans(1)) if by_hand else nullcontext()
    try:
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=4,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with by_plan:
            trainer.fit(cls(), DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=pad))
    except Exception as error:  # noqa: BLE001 - each rank tells what it was
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("by_hand", [True, False])
def test_computing_a_metric_in_the_step_does_not_hang(world: World, by_hand: bool) -> None:
    """In training, and while the cost profile is made."""
    for error in world.run(fit_refused, by_hand, Computes):
        assert "`compute` of a torchmetrics object was called inside `training_step`" in error


def test_a_hidden_metric_is_refused(world: World) -> None:
    for error in world.run(fit_refused, True, Hides):
        assert error.startswith("MisconfigurationException: self.log('hidden', ...)")

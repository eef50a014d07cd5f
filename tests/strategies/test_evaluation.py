"""Validation, testing and prediction under plans: the same as in one process, in real worlds."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
)
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, SumMetric

from lightning_dcp.data.evaluation_loader import why_not_planned
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from lightning_dcp.strategies.deepspeed import DCPStrategy
from lightning_dcp.strategies.fsdp import DCPFSDPStrategy
from tests.strategies.toys import Sequences, ToyLM, pad
from tests.worlds import World

# The last window is not full; 58 and 50 are far longer than the rest.
LENGTHS = [27, 12, 1, 58, 6, 31, 2, 26, 12, 6, 16, 9, 20, 5, 3, 50, 17, 8, 44, 4, 22]
B = 2
STRATEGIES = {"dcp_ddp": DCPDDPStrategy, "dcp": DCPStrategy, "dcp_fsdp": DCPFSDPStrategy}
#: DeepSpeed computes in float32 whatever the module is in, the others in float64.
REL = {"dcp_ddp": 1e-12, "dcp": 1e-6, "dcp_fsdp": 1e-12}
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class EvalLM(ToyLM):
    """Logs in every way, has every kind of metric object, and remembers what it ran."""

    def __init__(self, convolution: bool = False, **kwargs: Any) -> None:
        super().__init__(double=True, **kwargs)
        self.mean = nn.ModuleList(MeanMetric().set_dtype(torch.float64) for _ in range(2))
        self.collection = nn.ModuleList(
            MetricCollection({"sum": SumMetric(), "max": MaxMetric()}) for _ in range(2)
        )
        self.ids = CatMetric()
        #: (ids, padded length, tokens that the second block saw here, whether it counts)
        self.ran: list[tuple[list[int], int, int, bool]] = []
        self.num_steps = 0
        self.blocks[1].register_forward_pre_hook(self._remember_tokens)
        self.tokens = 0
        if convolution:
            self.blocks[0].mix = nn.Conv1d(16, 16, 3, padding=1).double()
            self.blocks[0].register_forward_hook(
                lambda block, _, x: x + block.mix(x.transpose(1, 2)).transpose(1, 2)
            )

    def _remember_tokens(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.tokens = args[0].shape[1]

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        each = self.losses(batch)
        self.num_steps += 1
        counts = getattr(self.trainer.strategy, "counts_batch", True)
        self.ran.append((batch["id"].tolist(), batch["ids"].shape[1], self.tokens, counts))
        num = len(batch["ids"])
        ids = batch["id"].double()
        self.log("loss", each.mean(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("local", each.mean())
        self.log("id", ids.mean(), batch_size=num)
        self.log_dict({"largest": ids.max(), "num": float(num)}, reduce_fx="max")
        self.log("smallest", ids.min(), reduce_fx="min", on_step=True, on_epoch=True)
        self.log("samples", float(num), reduce_fx="sum", on_step=True, on_epoch=True)
        self.mean[dataloader_idx].update(ids)
        self.collection[dataloader_idx].update(ids)
        self.ids.update(batch["id"])
        self.log("mean", self.mean[dataloader_idx])
        self.log_dict(self.collection[dataloader_idx])
        # A collective, which would hang if ranks ran different numbers of batches.
        self.all_gather(each.mean())
        return each.mean()

    test_step = validation_step

    def truncate_sample(self, sample: Any, max_length: int) -> Any:
        return {k: v if k == "id" else v[:max_length] for k, v in sample.items()}

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.all_ids = self.ids.compute().tolist()
        self.ids.reset()

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> tuple[Tensor, list[int]]:
        self.num_steps += 1
        each = self.losses(batch)
        return each.sum().reshape(1), batch["id"].tolist()


def expected(lengths: list[int] = LENGTHS, model: EvalLM | None = None) -> dict[str, float]:
    """What one process finds, a sample at a time."""
    model = model or EvalLM()
    data = Sequences(lengths)
    with torch.no_grad():
        each = torch.cat([model.losses(pad([data[i]])) for i in range(len(data))])
    last = len(lengths) - 1
    return {
        "loss_epoch": float(each.mean()),
        "local": float(each.mean()),
        "id": last / 2,
        "largest": float(last),
        "smallest_epoch": 0.0,
        "samples_epoch": float(len(lengths)),
        "mean": last / 2,
        "sum": float(sum(range(len(lengths)))),
        "max": float(last),
    }


def strategy_of(name: str, spare: int | None = None, **options: Any) -> Any:
    """A strategy whose ranks may use `spare` bytes beside the model itself."""
    planning: dict[str, Any] = options.pop("planning", {})
    if spare is not None:
        model = EvalLM()
        tensors = [*model.parameters(), *model.buffers()]
        fixed = sum(t.numel() * t.element_size() for t in tensors)
        limit = fixed + spare
        planning["memory_limit_bytes"] = limit // 2 if name == "dcp" else limit  # float32
    return STRATEGIES[name](planning=PlanningOptions(**planning), **options)


#: Spare bytes with which the longest samples need 4 ranks and the next ones 2.
TIGHT = 65_000


def loader(lengths: list[int] = LENGTHS, **options: Any) -> DataLoader[Any]:
    return DataLoader(Sequences(lengths), batch_size=B, collate_fn=pad, **options)


class Lines(logging.Handler):
    """What rank 0 is told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("DCP:"):
            self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        self.logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
        self.logger.addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self)


def evaluate(
    rank: int,
    name: str,
    function: str,
    spare: int | None = None,
    lengths: list[int] = LENGTHS,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    torch.set_default_dtype(torch.float32)
    strategy = strategy_of(name, spare, **options)
    model = EvalLM()
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    runner = L.Trainer(
        strategy=strategy, devices=size, **{**QUIET, "logger": False, **(trainer or {})}
    )
    state = torch.get_rng_state()
    before = {key: id(value) for key, value in vars(getattr(runner, f"{function}_loop")).items()}
    with Lines() as lines:
        if function == "predict":
            returned = runner.predict(model, loader(lengths))
        else:
            returned = getattr(runner, function)(model, loader(lengths), verbose=False)
    after = vars(getattr(runner, f"{function}_loop"))
    after_run = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.empty((), dtype=torch.int64).random_()  # as the DataLoader draws its workers' seed
    assert torch.equal(after_run, torch.get_rng_state()), "measuring has drawn random numbers"
    return {
        "returned": returned,
        "ran": model.ran,
        "num_steps": model.num_steps,
        "all_ids": getattr(model, "all_ids", None),
        "lines": lines,
        "left": [key for key in ("_evaluation_step", "_predict_step") if key in after]
        + [key for key in ("_results",) if id(after[key]) != before[key]]
        + [key for key in ("forward",) if key in vars(model.blocks[0])],
    }


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=110) as world:
        yield world


@pytest.fixture(scope="module")
def three() -> Iterator[World]:
    with World(3, timeout_s=110) as world:
        yield world


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    with World(1, timeout_s=110) as world:
        yield world


def check_metrics(
    results: list[dict[str, Any]], lengths: list[int] = LENGTHS, rel: float = 1e-12
) -> None:
    wanted = expected(lengths)
    for r in results:
        (values,) = r["returned"]
        got = {key: float(values[key]) for key in wanted}
        assert got == pytest.approx(wanted, rel=rel)
        assert r["returned"] == results[0]["returned"]
        assert sorted(r["all_ids"]) == list(range(len(lengths)))
        assert r["num_steps"] == results[0]["num_steps"] == len(r["ran"])
        assert not r["left"]
    counted = sorted(i for r in results for ids, _, _, counts in r["ran"] if counts for i in ids)
    assert counted == list(range(len(lengths)))


@pytest.mark.parametrize(
    "name",
    [
        "dcp_ddp",
        pytest.param("dcp", marks=pytest.mark.slow),
        pytest.param("dcp_fsdp", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("spare", [None, TIGHT])
def test_metrics_are_those_of_one_process(world: World, name: str, spare: int | None) -> None:
    function = "test" if name == "dcp" else "validate"
    results = world.run(evaluate, name, function, spare)
    check_metrics(results, rel=REL[name])
    shares = {
        (tuple(ids), rank): padded / tokens
        for rank, r in enumerate(results)
        for ids, padded, tokens, _ in r["ran"]
    }
    if spare is None:
        assert set(shares.values()) == {1.0}
        assert results[0]["num_steps"] == 3  # as many batches as under DDP
        return
    # Each rank has a quarter of the tokens of the longest sample, rounded up by padding.
    assert [round(shares[(3,), rank]) for rank in range(4)] == [4] * 4
    assert {round(share) for share in shares.values()} == {1, 2, 4}
    assert all(shares[(i,), 0] == pytest.approx(4, rel=0.1) for i in (3, 15))


@pytest.mark.parametrize("spare", [None, TIGHT])
def test_predictions_come_in_order_and_once(world: World, spare: int | None) -> None:
    results = world.run(evaluate, "dcp_ddp", "predict", spare)
    data, model = Sequences(LENGTHS), EvalLM()
    for r in results:
        ids = [ids for _, ids in r["returned"]]
        assert [i for batch in ids for i in batch] == list(range(len(LENGTHS)))
        if spare is None:
            assert ids == [list(range(i, min(i + B, 21))) for i in range(0, 21, B)]
        with torch.no_grad():
            wanted = [float(model.losses(pad([data[i] for i in batch])).sum()) for batch in ids]
        assert [float(value) for value, _ in r["returned"]] == pytest.approx(wanted, rel=1e-12)
        assert r["num_steps"] == results[0]["num_steps"]
    if spare is not None:
        assert [3] in ids and [2] in ids  # a long sample is alone, its neighbour without it


def test_fewer_samples_than_ranks(world: World) -> None:
    check_metrics(world.run(evaluate, "dcp_ddp", "validate", lengths=[7, 5]), [7, 5])
    results = world.run(evaluate, "dcp_ddp", "predict", lengths=[7, 5, 9])
    assert [[ids for _, ids in r["returned"]] for r in results] == [[[0, 1], [2]]] * 4


def test_three_ranks_and_one(three: World, one: World) -> None:
    check_metrics(three.run(evaluate, "dcp_ddp", "validate"))
    results = three.run(evaluate, "dcp_ddp", "validate", 85_000)
    check_metrics(results)
    assert {round(padded / tokens) for r in results for _, padded, tokens, _ in r["ran"]} == {1, 2}
    for name in ("dcp_ddp", "dcp"):
        check_metrics(one.run(evaluate, name, "validate"), rel=REL[name])
    (result,) = one.run(evaluate, "dcp_ddp", "predict")
    assert [i for _, ids in result["returned"] for i in ids] == list(range(21))


class Lazy(EvalLM):
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return (i for i in batch["id"].tolist())


def unsent(rank: int) -> Any:
    trainer = L.Trainer(strategy=strategy_of("dcp_ddp"), devices=4, logger=False, **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        returned = trainer.predict(Lazy(), loader([7, 5, 9]))
    lines = [str(w.message) for w in caught if str(w.message).startswith("DCP:")]
    return lines, [list(ids) for ids in returned]


def test_predictions_that_cannot_be_sent_stay_where_they_are(world: World) -> None:
    """As under ddp; also where ranks have none, which would wait for the others."""
    results = world.run(unsent)
    assert [ids for _, ids in results] == [[[0, 1]], [[2]], [], []]
    (line,) = results[0][0]
    assert "own predictions only" in line and "cannot pickle 'generator' object" in line


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[list[int], list[int]]] = []
        self.epoch: list[tuple[list[int], list[int]]] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *_: Any
    ) -> None:
        self.batches.append((prediction[1], list(batch_indices)))

    def write_on_epoch_end(
        self, trainer: Any, module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        (indices,) = batch_indices
        self.epoch = [(p[1], list(i)) for p, i in zip(predictions, indices, strict=True)]


def write(rank: int, spare: int | None) -> Any:
    writer = Writer()
    trainer = L.Trainer(
        strategy=strategy_of("dcp_ddp", spare), devices=4, callbacks=[writer], logger=False, **QUIET
    )
    returned = trainer.predict(EvalLM(), loader(), return_predictions=False)
    assert "on_predict_batch_end" not in vars(writer)
    return returned, writer.batches, writer.epoch


@pytest.mark.parametrize("spare", [None, TIGHT])
def test_prediction_writers_get_each_sample_once(world: World, spare: int | None) -> None:
    results = world.run(write, spare)
    assert all(returned is None for returned, _, _ in results)
    for written in (1, 2):
        entries = [entry for result in results for entry in result[written]]
        assert all(ids == indices for ids, indices in entries)
        assert sorted(i for ids, _ in entries for i in ids) == list(range(21))


SHORT = LENGTHS[:3]


class Fitted(EvalLM):
    """Trains without changing anything, so that all validations find the same."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.values: list[dict[str, float]] = []

    def on_validation_end(self) -> None:
        self.values.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})


def fit(rank: int, name: str, cache: str, folder: str) -> Any:
    # A limit that training fits into, and by which long validation samples need several ranks.
    model = Fitted()
    fixed = sum(p.numel() * p.element_size() for p in model.parameters())
    limit = fixed * 5 + (90_000 if name == "dcp_ddp" else 10**9)
    strategy = STRATEGIES[name](
        planning=PlanningOptions(memory_limit_bytes=limit),
        profiling=ProfilingOptions(budget_s=1.5, repeats=1, cache_dir=cache),
    )
    logger = CSVLogger(folder, name=name)
    trainer = L.Trainer(
        strategy=strategy,
        devices=4,
        logger=logger,
        max_epochs=1,
        val_check_interval=0.5,
        log_every_n_steps=1,
        **QUIET,
    )
    train = DataLoader(
        Sequences([8, 12, 16, 20, 24, 9, 13, 17] * 2), batch_size=2, collate_fn=pad, shuffle=True
    )
    trainer.fit(model, train, [loader(), loader(SHORT)])
    values = list(model.values)
    again = trainer.validate(model, loader(), verbose=False)
    return {
        "values": values,
        "ran": model.ran,
        "again": again,
        "log": Path(logger.log_dir, "metrics.csv").read_text() if rank == 0 else "",
    }


@pytest.mark.parametrize("name", ["dcp_ddp", pytest.param("dcp", marks=pytest.mark.slow)])
def test_validation_inside_fit(world: World, name: str, tmp_path: Path) -> None:
    results = world.run(fit, name, str(tmp_path / "cache"), str(tmp_path))
    for r in results:
        assert len(r["values"]) == 3  # sanity check, and twice an epoch
        assert r["values"] == results[0]["values"]
        for values in r["values"][1:]:
            for index, lengths in enumerate((LENGTHS, SHORT)):
                wanted = expected(lengths)
                got = {key: values[f"{key}/dataloader_idx_{index}"] for key in wanted}
                assert got == pytest.approx(wanted, rel=REL[name])
        check = {key: float(r["again"][0][key]) for key in expected()}
        assert check == pytest.approx(expected(), rel=REL[name])
    sizes = {round(padded / tokens) for r in results for _, padded, tokens, _ in r["ran"]}
    assert sizes > {1} if name == "dcp_ddp" else sizes == {1}
    # on_step: one row per Trainer batch, and the sum over them is that over the epoch.
    header, *rows = [line.split(",") for line in results[0]["log"].splitlines()]
    column = header.index("samples_step/dataloader_idx_0")
    steps = [float(row[column]) for row in rows if row[column]]
    assert sum(steps) == 2 * 21  # nothing of the sanity check


_WITH_GRADIENTS: list[bool] = []  # not of the module, whose attributes are put back


class Asked(Fitted):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        _WITH_GRADIENTS.append(torch.is_grad_enabled())
        super().validation_step(batch, batch_idx, dataloader_idx)


def measured_in_fit(rank: int, cache: str) -> list[bool]:
    _WITH_GRADIENTS.clear()
    trainer = L.Trainer(
        strategy=STRATEGIES["dcp_ddp"](
            profiling=ProfilingOptions(budget_s=1.0, repeats=1, cache_dir=cache)
        ),
        devices=4,
        logger=False,
        max_steps=1,
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(Asked(), loader(), [loader(), loader(SHORT)])
    return _WITH_GRADIENTS


def test_measured_as_it_runs(world: World, tmp_path: Path) -> None:
    """Without a sanity check, loaders of validation are prepared where training begins."""
    for asked in world.run(measured_in_fit, str(tmp_path)):
        assert asked and not any(asked)


def limited(rank: int, loaders: Any, **options: Any) -> list[tuple[float, float]]:
    model = EvalLM()
    trainer = L.Trainer(
        strategy=strategy_of("dcp_ddp"), devices=4, logger=False, **options, **QUIET
    )
    found = []
    for _ in range(2):  # a CombinedLoader comes back with what was put into it
        (values,) = trainer.validate(model, loaders, verbose=False)
        found.append((float(values["samples_epoch"]), float(values["largest"])))
    return found


def test_limits_take_what_ddp_takes(world: World) -> None:
    assert world.run(limited, loader(), limit_val_batches=1) == [[(8.0, 7.0)] * 2] * 4
    assert world.run(limited, loader(), limit_val_batches=0.7) == [[(16.0, 15.0)] * 2] * 4
    batches = BatchSampler(SequentialSampler(range(21)), B, drop_last=False)
    given = DataLoader(Sequences(LENGTHS), batch_sampler=batches, collate_fn=pad)
    assert world.run(limited, given, limit_val_batches=1) == [[(8.0, 7.0)] * 2] * 4
    part = BatchSampler(SubsetRandomSampler(range(8)), B, drop_last=False)
    assert why_not_planned(DataLoader(Sequences(LENGTHS), batch_sampler=part), 4) == (
        "it has its own sampler, SubsetRandomSampler"
    )
    part = BatchSampler(SequentialSampler(range(8)), B, drop_last=False)
    assert why_not_planned(DataLoader(Sequences(LENGTHS), batch_sampler=part), 4) == (
        "it has its own sampler, SequentialSampler"
    )
    combined = CombinedLoader([loader(shuffle=True)], "sequential")
    assert world.run(limited, combined, fast_dev_run=True) == [[(8.0, 7.0)] * 2] * 4


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([Sequences(SHORT)[i] for i in range(2)])


class Strange(Sequences):
    """Samples whose length nobody can tell."""

    sequence_lengths = None  # type: ignore[assignment]

    def __init__(self, lengths: list[int]) -> None:
        self.inner = Sequences(lengths)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return [self.inner[index]]


def pad_strange(samples: list[list[Any]]) -> Any:
    return pad([sample for (sample,) in samples])


def leave(rank: int, kind: str) -> Any:
    loaders: dict[str, Any] = {
        "iterable": lambda: DataLoader(Stream(), batch_size=1, collate_fn=pad),
        "own sampler": lambda: DataLoader(
            Sequences(LENGTHS),
            sampler=SubsetRandomSampler(range(8)),
            batch_size=1,
            collate_fn=pad,
        ),
        "no batches": lambda: DataLoader(
            Sequences([5] * 8), batch_size=None, collate_fn=lambda sample: pad([sample])
        ),
        "combined": lambda: CombinedLoader([loader(), loader()], "max_size_cycle"),
        "unknown": lambda: DataLoader(Strange(LENGTHS), batch_size=2, collate_fn=pad_strange),
    }
    model: Any = EvalLM()
    if kind == "combined":
        model.validation_step = lambda batch, batch_idx: model.log("x", float(len(batch)))
    trainer = L.Trainer(strategy=strategy_of("dcp_ddp"), devices=4, logger=False, **QUIET)
    with Lines() as lines:
        (values,) = trainer.validate(model, loaders[kind](), verbose=False)
    return lines, {key: float(value) for key, value in values.items()}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("iterable", "its data set, Stream, is iterable-style"),
        ("own sampler", "it has its own sampler, SubsetRandomSampler"),
        ("no batches", "it has batch_size=None"),
        ("combined", "a CombinedLoader combines it with others, mode='max_size_cycle'"),
        ("unknown", "lengths of what is evaluated are not known"),
    ],
)
def test_what_cannot_be_planned_runs_as_under_ddp(world: World, kind: str, reason: str) -> None:
    results = world.run(leave, kind)
    lines, values = results[0]
    assert len(lines) == 1 and reason in lines[0]
    if kind == "unknown":  # planned without memory, so still exact
        wanted = expected()
        assert {key: values[key] for key in wanted} == pytest.approx(wanted, rel=1e-12)
    assert values["x" if kind == "combined" else "samples_epoch"] > 0


def mistake(rank: int, kind: str) -> str:
    model = EvalLM(convolution=kind == "convolution")
    spare, planning = 30_000, {}
    lengths = list(LENGTHS)
    if kind == "convolution":
        spare = TIGHT
    elif kind in ("skip", "truncate"):
        planning = {"on_too_long": kind}
    elif kind == "ranks disagree":
        lengths[0] += rank
    if kind == "no blocks":
        model.blocks = nn.ModuleList([*model.blocks[:1], nn.Identity()])
        model.forward = lambda ids: model.head(model.embed(ids))
    trainer = L.Trainer(
        strategy=strategy_of("dcp_ddp", spare, planning=planning), devices=4, logger=False, **QUIET
    )
    try:
        (values,) = trainer.validate(model, loader(lengths), verbose=False)
    except Exception as error:  # noqa: BLE001 - its text is what is tested
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.strategy.teardown()
    return f"evaluated {values['samples_epoch']}"


def test_too_long_and_other_mistakes(world: World) -> None:
    for text in world.run(mistake, "too long"):
        assert text.startswith("ValueError: Sample 3 of Sequences has length 58 and cannot be")
        assert "with p in [1, 2, 4] it lacks" in text and 'on_too_long="skip"' in text
    for text in world.run(mistake, "convolution"):
        # Sharding would compute something else: only one rank is left, and that is too few.
        assert text.startswith("ValueError: Sample 3") and "with p in [1] it lacks" in text
    for text in world.run(mistake, "ranks disagree"):
        assert "Ranks disagree on what the evaluation plan is made from" in text
        assert "sequence lengths" in text
    skipped = world.run(mistake, "skip")
    assert skipped == [skipped[0]] * 4
    assert 15 < float(skipped[0].removeprefix("evaluated ")) < 21
    assert world.run(mistake, "truncate") == ["evaluated 21.0"] * 4


class SetsUpInHook(EvalLM):
    """Its step needs what a hook of the run makes: it cannot be tried before."""

    def on_validation_epoch_start(self) -> None:
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.outputs.append(super().validation_step(batch, batch_idx))
        return self.outputs[-1]


def unmeasured(rank: int) -> Any:
    trainer = L.Trainer(strategy=strategy_of("dcp_ddp", TIGHT), devices=4, logger=False, **QUIET)
    model = SetsUpInHook()
    with Lines() as lines:
        (values,) = trainer.validate(model, loader(), verbose=False)
    return lines, float(values["loss_epoch"]), len(model.outputs)


def test_a_step_that_cannot_be_measured_runs_on_one_rank(world: World) -> None:
    results = world.run(unmeasured)
    assert "could not be measured, so that every sample runs on one rank" in results[0][0][0]
    assert "has no attribute 'outputs'" in results[0][0][0]
    for _, loss, num_outputs in results:
        assert loss == pytest.approx(expected()["loss_epoch"], rel=1e-12)
        assert num_outputs == 3

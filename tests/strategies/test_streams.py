"""Streams through a whole `fit` of four ranks."""

from __future__ import annotations

import multiprocessing
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_dcp.data.datamodule import DCPDataModuleMixin
from lightning_dcp.planning.drift import Corrections
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from tests.strategies.test_packing import PackableLM
from tests.strategies.toys import Sequences, ToyLM, largest_relative_error, pad, reference
from tests.worlds import World

LENGTHS = [int(x) for x in 2 + 50 * torch.rand(97, generator=torch.Generator().manual_seed(1)) ** 3]
#: Of four ranks with streams of their own; one of them is empty.
SHARDS = [range(60), range(60, 61), range(61, 61), range(61, 97)]


class Stream(IterableDataset[Any]):
    """The samples of `Sequences`, one after the other, shared out among workers."""

    def __init__(
        self,
        ids: Sequence[int] | None = None,
        *,
        endless: bool = False,
        breaks_at: int | None = None,
    ) -> None:
        self.items = Sequences(LENGTHS)
        self.ids = list(range(len(LENGTHS)) if ids is None else ids)
        self.endless, self.breaks_at = endless, breaks_at

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        while True:
            for i in self.ids[start::step]:
                if i == self.breaks_at:
                    raise OSError("the disk is gone")
                yield self.items[i]
            if not self.endless:
                return


class ShortOfMemory(L.Callback):
    """More than 40 tokens do not fit unless blocks are recomputed."""

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        strategy: Any = trainer.strategy
        step, self.num_raised = module.training_step, 0

        def training_step(batch: dict[str, Tensor], batch_idx: int) -> Any:
            state = strategy._runner.state
            m = state.plan.micro_batches[state.index]
            if batch["ids"].numel() > 40 and not m.recompute_blocks:
                self.num_raised += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return step(batch, batch_idx)

        module.training_step = training_step


class Data(DCPDataModuleMixin, L.LightningDataModule):
    """Each rank has a stream of its own."""

    def __init__(self, loader: DataLoader[Any], held_out: Any) -> None:
        super().__init__()
        self.loader, self.held_out = loader, held_out

    def shard_stream(self, dataset: Any, num_shards: int, index: int) -> Any:
        return dataset

    def sample_length(self, sample: Any) -> int:
        return len(sample["ids"])

    def train_dataloader(self) -> Any:
        return self.loader

    def val_dataloader(self) -> Any:
        return self.held_out or []


class SeenLM(DCPDataModuleMixin, PackableLM):
    def __init__(self, dropout: float, double: bool) -> None:
        super().__init__(num_blocks=2, dropout=dropout, double=double)
        self.seen: list[tuple[int, int, tuple[int, ...]]] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.validated: list[int] = []

    def sample_length(self, sample: Any) -> int:
        return len(sample["ids"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.seen.append(
            (self.trainer.current_epoch, self.trainer.global_step, tuple(batch["id"].tolist()))
        )
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(
            {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}
        )

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.trainer.global_step)


class Save(L.Callback):
    def __init__(self, at: int, path: str) -> None:
        self.at, self.path = at, path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)


class Watch(L.Callback):
    def __init__(self) -> None:
        self.last: list[int] = []
        self.factors: set[float] = set()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        self.factors.update(strategy.planner.corrections.time_factors)
        if trainer.is_last_batch:
            self.last.append(trainer.global_step)


class Replan(L.Callback):
    """Another planner from an iteration on, as strategies do it."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        strategy: Any = trainer.strategy
        backward = strategy.backward

        def backward_and_replace(*args: Any, **kwargs: Any) -> Any:
            loss = backward(*args, **kwargs)
            if trainer.global_step == self.at:
                planner = strategy.planner
                edges = planner.bucket_edges
                slower = Corrections(
                    bucket_edges=edges,
                    time_factors=(2.0,) * (len(edges) - 1),
                    memory_factors=(1.0,) * (len(edges) - 1),
                    rank_speed=(1.0, 3.0, 1.0, 1.0)[: planner.world_size],
                )
                following = strategy.last_report.plan.iteration + 1
                strategy._replanner.replace(planner.corrected(slower), next_iteration=following)
            return loss

        strategy.backward = backward_and_replace


def train(
    rank: int,
    cache: str,
    *,
    shards: bool = False,
    ids: Sequence[int] | None = None,
    stream: Mapping[str, Any] | None = None,
    num_workers: int = 0,
    double: bool = False,
    dropout: float = 0.0,
    validate: bool = False,
    save_at: int = 0,
    path: str = "",
    ckpt_path: str | None = None,
    planning: Mapping[str, Any] | None = None,
    same_samples: bool = False,
    fails: bool = False,
    replan_at: int | None = None,
    callbacks: Sequence[L.Callback] = (),
    **trainer: Any,
) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, watch = SeenLM(dropout, double), Watch()
    run = L.Trainer(
        strategy=DCPDDPStrategy(
            planning=PlanningOptions(lookahead_steps=4, **(planning or {})),
            profiling=ProfilingOptions(budget_s=1.5, repeats=1, cache_dir=cache),
            self_check=False,
        ),
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        callbacks=[
            watch,
            *callbacks,
            *([Save(save_at, path)] if save_at else []),
            *([Replan(replan_at)] if replan_at is not None else []),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        **trainer,
    )
    own = (range(10) if same_samples else SHARDS[rank]) if shards else ids
    loader = DataLoader(
        Stream(own, **(stream or {})), batch_size=2, collate_fn=pad, num_workers=num_workers
    )
    held_out = DataLoader(Sequences([5, 9, 3]), batch_size=1, collate_fn=pad) if validate else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data: dict[str, Any] = {"train_dataloaders": loader, "val_dataloaders": held_out}
        if shards:
            data = {"datamodule": Data(loader, held_out)}
        try:
            run.fit(model, **data, ckpt_path=ckpt_path)
        except Exception as error:
            if not fails:
                raise
            return {"error": f"{type(error).__name__}: {error}"}
    return {
        "seen": model.seen,
        "gradients": model.gradients,
        "validated": model.validated,
        "steps": run.global_step,
        "last": watch.last,
        "factors": watch.factors,
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "children": len(multiprocessing.active_children()),
        "warnings": [str(w.message) for w in caught if "DCP" in str(w.message)],
    }


def steps_of(results: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], list[int]]:
    """(epoch, step) -> what was trained on; a micro-batch of p ranks counts once."""
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for r in results:
        for epoch, step, ids in r["seen"]:
            found.setdefault((epoch, step), set()).add(ids)
    return {key: sorted(i for ids in sets for i in ids) for key, sets in sorted(found.items())}


def counts(results: Sequence[Mapping[str, Any]], epoch: int) -> Counter[int]:
    return Counter(i for (e, _), ids in steps_of(results).items() if e == epoch for i in ids)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=110) as world:
        yield world


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_uneven_shards(world: World, cache: str, num_workers: int) -> None:
    """Shards of 60, 1, 0 and 36 samples, two epochs, validation in between: each sample once."""
    results = world.run(
        train,
        cache,
        shards=True,
        num_workers=num_workers,
        double=True,
        max_epochs=2,
        validate=True,
        val_check_interval=5,
    )
    for epoch in range(2):
        assert counts(results, epoch) == Counter(range(97))
    steps = steps_of(results)
    # How many steps there are depends on what was measured.
    first, second = (sum(key[0] == epoch for key in steps) for epoch in range(2))
    due = [*range(5, first + 1, 5), *range(first + 5, first + second + 1, 5)]
    assert len(due) >= 2 and results[0]["validated"] == due
    wanted = reference(
        ToyLM(num_blocks=2, double=True), Sequences(LENGTHS), [steps[key] for key in steps]
    )
    for r in results:
        assert r["steps"] == len(steps) and r["children"] == 0 and not r["warnings"]
        for got, expected in zip(r["gradients"], wanted.gradients, strict=True):
            assert largest_relative_error(got, expected) <= 1e-12


@pytest.mark.slow
def test_other_plans_from_an_iteration_on(world: World, cache: str, tmp_path: Path) -> None:
    """What was fetched by the old plans is planned again; a checkpoint knows the new costs."""
    path = str(tmp_path / "stream.ckpt")
    common: dict[str, Any] = {"max_epochs": 1, "dropout": 0.2}
    whole = world.run(train, cache, replan_at=3, save_at=6, path=path, **common)
    assert counts(whole, 0) == Counter(range(97))
    again = world.run(train, cache, ckpt_path=path, **common)
    for before, after in zip(whole, again, strict=True):
        assert [seen for seen in before["seen"] if seen[1] >= 6] == after["seen"]
        for name, weights in before["weights"].items():
            assert torch.equal(weights, after["weights"][name]), name


def test_other_plans_of_a_limited_epoch_that_is_resumed(cache: str, tmp_path: Path) -> None:
    """The last iteration is known to be; what was learnt of costs is known after a resume."""
    path = str(tmp_path / "stream.ckpt")
    common: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 4}
    whole = train(0, cache, replan_at=1, save_at=3, path=path, **common)
    assert whole["last"] == [4, 8]
    again = train(0, cache, ckpt_path=path, **common)
    assert again["last"] == [4, 8] and again["factors"] == {2.0}
    assert again["seen"] == [seen for seen in whole["seen"] if seen[1] >= 3]


def test_out_of_memory(cache: str) -> None:
    """The iteration is repeated, and the next ones are planned with less memory."""
    short = ShortOfMemory()
    result = train(0, cache, max_epochs=1, double=True, callbacks=[short])
    assert counts([result], 0) == Counter(range(97))
    assert 1 <= short.num_raised <= 8 < result["steps"] / 2


@pytest.mark.slow
def test_packed(world: World, cache: str) -> None:
    results = world.run(train, cache, double=True, max_epochs=1, planning={"packing": True})
    steps = steps_of(results)
    assert counts(results, 0) == Counter(range(97))
    wanted = reference(
        PackableLM(num_blocks=2, double=True), Sequences(LENGTHS), [steps[key] for key in steps]
    )
    for r in results:
        for got, expected in zip(r["gradients"], wanted.gradients, strict=True):
            assert largest_relative_error(got, expected) <= 1e-12


def test_resume_bit_for_bit(world: World, cache: str, tmp_path: Path) -> None:
    """Saved in the middle of a window, after other windows; with dropout."""
    path = str(tmp_path / "stream.ckpt")
    common: dict[str, Any] = {"max_epochs": 2, "dropout": 0.2}
    whole = world.run(train, cache, save_at=6, path=path, **common)
    again = world.run(train, cache, ckpt_path=path, **common)
    steps, resumed = steps_of(whole), steps_of(again)
    assert counts(whole, 0) == counts(whole, 1) == Counter(range(97))
    assert resumed == {key: ids for key, ids in steps.items() if key[1] >= 6}
    for before, after in zip(whole, again, strict=True):
        assert [seen for seen in before["seen"] if seen[1] >= 6] == after["seen"]
        for name, weights in before["weights"].items():
            assert torch.equal(weights, after["weights"][name]), name


def test_endless(world: World, cache: str) -> None:
    results = world.run(
        train,
        cache,
        stream={"endless": True},
        max_steps=13,
        max_epochs=-1,
        validate=True,
        val_check_interval=5,
        check_val_every_n_epoch=None,
    )
    for r in results:
        assert r["steps"] == 13 and r["validated"] == [5, 10] and not r["warnings"]
    assert sum(counts(results, 0).values()) >= 13 * 4


@pytest.mark.slow
def test_limited(world: World, cache: str) -> None:
    results = world.run(train, cache, max_epochs=2, limit_train_batches=3)
    assert list(steps_of(results)) == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]


@pytest.mark.parametrize("at", [3, 80])
def test_broken_reader(world: World, cache: str, at: int) -> None:
    """One rank cannot read, before training or in it: all end, and say where."""
    broken = 0 if at == 3 else 3
    results = world.run(
        train, cache, shards=True, stream={"breaks_at": at}, max_epochs=1, fails=True
    )
    for rank, r in enumerate(results):
        assert "OSError: the disk is gone" in r["error"]
        assert (f"Reading the stream failed on rank {broken}" in r["error"]) == (rank != broken)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": []}, "Stream gave no sample on any rank"),
        ({"shards": True, "same_samples": True}, "Ranks 0 and 1 read the same samples of Stream"),
    ],
)
def test_refused(world: World, cache: str, options: dict[str, Any], message: str) -> None:
    for r in world.run(train, cache, max_epochs=1, fails=True, **options):
        assert message in r["error"]

"""The user's loader made again: what it yields, what it keeps, what it refuses."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods
from lightning.fabric.utilities.types import _Stateful
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_dcp.data import IterationBatch, build_plan_loader, read_loader
from lightning_dcp.data.loader import PlanDataset
from lightning_dcp.data.sampler import Rest
from lightning_dcp.planning.plan import MicroBatch, Plan
from tests.data.toys import (
    BatchedTokens,
    RoundRobinPlanner,
    TokenDataset,
    ids_in,
    make_planner,
    pad_with_minus_one,
    some_lengths,
)

LENGTHS = some_lengths(60)
DATASET = TokenDataset(LENGTHS)


def user_loader(dataset: Any = DATASET, **arguments: Any) -> DataLoader:
    options = {"batch_size": 4, "shuffle": True, "collate_fn": pad_with_minus_one, **arguments}
    return DataLoader(dataset, **options)


def plan_loader(loader: DataLoader | None = None, **arguments: Any) -> DataLoader:
    options = {"planner": RoundRobinPlanner(LENGTHS, 2), "rank": 0, "world_size": 2, **arguments}
    return build_plan_loader(user_loader() if loader is None else loader, **options)


def mark_worker(worker_id: int) -> None:
    """Reads and sets attributes of the user's data set through the worker's."""
    dataset = get_worker_info().dataset
    assert dataset.lengths == LENGTHS.tolist()
    dataset.opened_by = worker_id


class Marked(TokenDataset):
    opened_by: int | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.opened_by == get_worker_info().id
        return super().__getitem__(index)


# ---- what it yields -----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_sample_once_per_epoch_over_all_ranks(world_size: int) -> None:
    planner = make_planner(LENGTHS, world_size)
    loaders = [
        build_plan_loader(user_loader(), planner, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    orders = []
    for epoch in range(2):
        plans = planner.epoch(epoch)
        order: list[int] = []
        per_rank = []
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
            per_rank.append(list(loader))
            assert len(per_rank[-1]) == len(loader) == planner.num_iterations
        for iteration, plan in enumerate(plans):
            for rank, batches in enumerate(per_rank):
                batch = batches[iteration]
                assert isinstance(batch, IterationBatch)
                assert (batch.epoch, batch.iteration) == (epoch, iteration)
                own = plan.for_rank(rank)
                assert [ids_in(mb) for mb in batch.micro_batches] == [mb.sample_ids for mb in own]
                for micro_batch, planned in zip(batch.micro_batches, own, strict=True):
                    assert micro_batch["tokens"].shape[1] <= planned.seq_len
                    if planned.first_rank == rank:  # each group's samples counted once
                        order.extend(ids_in(micro_batch))
        assert sorted(order) == list(range(len(LENGTHS)))
        orders.append(order)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_collate_is_the_users_once_per_micro_batch_in_the_worker(num_workers: int) -> None:
    planner = RoundRobinPlanner(LENGTHS, 2)
    loader = plan_loader(user_loader(num_workers=num_workers), planner=planner)
    batches = list(loader)
    processes = set()
    for batch, plan in zip(batches, planner.epoch(0), strict=True):
        own = plan.for_rank(0)
        assert [mb["num_samples"] for mb in batch.micro_batches] == [m.batch_size for m in own]
        processes |= {mb["process"] for mb in batch.micro_batches}
    if num_workers == 0:
        assert processes == {os.getpid()}
    else:
        assert os.getpid() not in processes
        assert len(processes) == 2


def test_default_collate_and_a_rank_with_nothing_to_do() -> None:
    dataset = TokenDataset([4] * 12)
    planner = RoundRobinPlanner([4] * 12, 2)
    loader = DataLoader(dataset, batch_size=3)
    batches = list(build_plan_loader(loader, planner, rank=1, world_size=2))
    assert batches[0] == IterationBatch(0, 0, [])
    first = next(iter(build_plan_loader(loader, planner, rank=0, world_size=2)))
    assert first.micro_batches[0].shape == (3, 4)


def test_getitems_is_used_once_per_micro_batch() -> None:
    (batch, *_) = plan_loader(user_loader(BatchedTokens(LENGTHS)))
    assert [ids_in(mb) for mb in batch.micro_batches] == [
        mb.sample_ids for mb in RoundRobinPlanner(LENGTHS, 2).epoch(0)[0].for_rank(0)
    ]


def test_two_epochs_with_persistent_workers() -> None:
    loader = plan_loader(
        user_loader(
            Marked(LENGTHS), num_workers=2, persistent_workers=True, worker_init_fn=mark_worker
        )
    )
    processes = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        batches = list(loader)
        assert {batch.epoch for batch in batches} == {epoch}
        assert [batch.iteration for batch in batches] == [0, 1, 2, 3]
        processes.append({mb["process"] for batch in batches for mb in batch.micro_batches})
    assert processes[0] == processes[1]
    assert os.getpid() not in processes[0]


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_plans_are_replaced_in_the_middle_of_an_epoch(num_workers: int, persistent: bool) -> None:
    """What workers have fetched is dropped, and read again by the plans that take its place."""
    first, second = make_planner(LENGTHS, 1), make_planner(LENGTHS, 1, batch_size=1)
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": persistent}
    if num_workers:
        options |= {"worker_init_fn": mark_worker, "prefetch_factor": 4}
    loader = build_plan_loader(
        user_loader(Marked(LENGTHS) if num_workers else DATASET, **options),
        first,
        rank=0,
        world_size=1,
    )
    sampler = loader.sampler
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(3)]
    consumed = sampler.progress(3, len(LENGTHS)).consumed
    plans = second.rest(0, consumed, first_iteration=3, num_iterations=len(sampler) - 3)
    sampler.replace(second, Rest(epoch=0, first_iteration=3, plans=plans, consumed=consumed))
    del iterator
    batches += list(loader)
    assert [batch.iteration for batch in batches] == list(range(first.num_iterations))
    assert [batch.version for batch in batches] == [0] * 3 + [1] * len(plans)
    wanted = [*first.epoch(0)[:3], *plans]
    for batch, plan in zip(batches, wanted, strict=True):
        assert [ids_in(mb) for mb in batch.micro_batches] == [
            mb.sample_ids for mb in plan.micro_batches
        ]
    assert sorted(i for b in batches for mb in b.micro_batches for i in ids_in(mb)) == list(
        range(len(LENGTHS))
    )
    before, after = (
        {mb["process"] for b in part for mb in b.micro_batches}
        for part in (batches[:3], batches[3:])
    )
    assert (before == after) is (persistent or not num_workers)


def test_workers_that_fetch_before_the_epoch_is_set_get_the_epoch_given() -> None:
    loader = plan_loader(user_loader(num_workers=1), epoch=5)
    early = iter(loader)  # fetches at once
    loader.sampler.set_epoch(5)
    assert {batch.epoch for batch in early} == {5}


def test_samples_too_long_are_cut() -> None:
    lengths = [10, 3000, 20, 800, 64, 31]
    planner = make_planner(
        lengths, 1, on_too_long="truncate", memory_limit_bytes=2_000_000, batch_size=1
    )
    limit = planner.truncate_to
    assert limit is not None
    assert 20 < limit < 3000
    calls = []

    def cut(sample: torch.Tensor, max_length: int) -> torch.Tensor:
        calls.append((len(sample), max_length))
        return sample[-max_length:]

    def lengths_loaded(**options: Any) -> dict[int, int]:
        loader = user_loader(TokenDataset(lengths))
        batches = build_plan_loader(loader, planner, rank=0, world_size=1, **options)
        rows = [r for b in batches for mb in b.micro_batches for r in mb["tokens"]]
        return {int(row[0]): int((row >= 0).sum()) for row in rows}

    expected = {i: min(n, limit) for i, n in enumerate(lengths)}
    assert lengths_loaded() == expected
    assert lengths_loaded(truncate=cut) == expected
    assert calls.pop(0) == (3000, limit)  # tried when the loader is made
    assert sorted(calls) == sorted((n, limit) for n in lengths if n >= limit)
    assert lengths_loaded(truncate=lambda sample, max_length: NotImplemented) == expected


def test_a_sample_that_cannot_be_cut_is_an_error_at_once() -> None:
    """Not when a worker of one rank comes to it, while the others wait for that rank."""
    lengths = [10, 3000, 20, 800]
    planner = make_planner(
        lengths, 1, on_too_long="truncate", memory_limit_bytes=2_000_000, batch_size=1
    )
    loader = user_loader([{"words": torch.zeros(n), "more": 1} for n in lengths])
    state = torch.get_rng_state()
    with pytest.raises(TypeError, match=r"does not know how to cut a dict with .'words'"):
        build_plan_loader(loader, planner, rank=0, world_size=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_pinning_walks_into_iteration_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    (batch, *_) = plan_loader()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1000)
    pinned = pin_memory(batch)
    assert type(pinned) is IterationBatch
    assert (pinned.epoch, pinned.iteration) == (batch.epoch, batch.iteration)
    assert torch.equal(pinned.micro_batches[0]["tokens"], batch.micro_batches[0]["tokens"] + 1000)


def test_spawned_workers(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            from torch.utils.data import DataLoader
            from lightning_dcp.data import build_plan_loader
            from tests.data.toys import *

            if __name__ == "__main__":
                lengths = some_lengths(12)
                loader = DataLoader(TokenDataset(lengths), 2, collate_fn=pad_with_minus_one,
                                    num_workers=1, multiprocessing_context="spawn")
                planner = RoundRobinPlanner(lengths, 1, num_iterations=2)
                ids = [i for batch in build_plan_loader(loader, planner, rank=0, world_size=1)
                       for mb in batch.micro_batches for i in ids_in(mb)]
                assert sorted(ids) == list(range(12)), ids
                print("all there")
            """
        )
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.stdout.strip() == "all there", done.stderr


# ---- what it keeps ------------------------------------------------------------------------------


def test_everything_else_is_kept() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = user_loader(
        num_workers=2,
        pin_memory=True,
        timeout=30,
        worker_init_fn=mark_worker,
        multiprocessing_context="fork",
        generator=generator,
        prefetch_factor=3,
        persistent_workers=True,
    )
    rebuilt = plan_loader(loader)
    assert type(rebuilt) is DataLoader
    assert rebuilt.num_workers == 2
    assert rebuilt.pin_memory is True
    assert rebuilt.timeout == 30
    assert rebuilt.worker_init_fn is mark_worker
    assert rebuilt.multiprocessing_context.get_start_method() == "fork"
    assert rebuilt.generator is generator
    assert rebuilt.prefetch_factor == 3
    assert rebuilt.persistent_workers is True
    assert rebuilt.batch_size is None
    assert rebuilt.collate_fn.collate is pad_with_minus_one
    assert len(rebuilt.dataset) == len(DATASET)


def test_the_generator_seeds_the_workers() -> None:
    def seeds(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        loader = plan_loader(user_loader(num_workers=1, generator=generator, collate_fn=_seeds))
        return [mb for batch in loader for mb in batch.micro_batches]

    assert seeds(1) == seeds(1)
    assert seeds(1) != seeds(2)


def _seeds(samples: list[Any]) -> int:
    return get_worker_info().seed


def test_the_users_dataset_shines_through() -> None:
    dataset = TokenDataset(LENGTHS)
    wrapped = plan_loader(user_loader(dataset)).dataset
    assert wrapped.lengths is dataset.lengths
    wrapped.handle = "open"
    assert dataset.handle == "open"
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = wrapped.no_such_thing
    copy = pickle.loads(pickle.dumps(wrapped))
    assert isinstance(copy, PlanDataset)
    assert copy.handle == "open"
    assert not hasattr(wrapped, "__getitems__")
    for own, users in zip(wrapped, dataset, strict=True):  # as a callback might look at samples
        assert torch.equal(torch.as_tensor(own), torch.as_tensor(users))


def test_without_effect_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        rebuilt = plan_loader(user_loader(drop_last=True))
    assert not rebuilt.drop_last
    assert caplog.text.count("`drop_last=True` has no effect") == 1
    with pytest.warns(UserWarning, match="`in_order=False` of the train loader has no effect"):
        rebuilt = plan_loader(user_loader(in_order=False))
    assert rebuilt.in_order is True


# ---- what it reads off --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "shuffle"),
    [
        ({"shuffle": False}, False),
        ({"shuffle": True}, True),
        ({"shuffle": None, "sampler": SequentialSampler(DATASET)}, False),
        ({"shuffle": None, "sampler": RandomSampler(DATASET)}, True),
        ({"shuffle": None, "sampler": DistributedSampler(DATASET, 2, 0, shuffle=True)}, True),
        ({"shuffle": None, "sampler": DistributedSampler(DATASET, 2, 0, shuffle=False)}, False),
    ],
)
def test_read_loader(arguments: dict[str, Any], shuffle: bool) -> None:
    spec = read_loader(user_loader(drop_last=True, **arguments))
    assert spec.shuffle is shuffle
    assert spec.batch_size == 4
    assert spec.drop_last is True
    assert spec.dataset is DATASET
    assert spec.collate_fn is pad_with_minus_one


def test_the_sampler_of_a_batch_sampler_is_the_one_that_counts() -> None:
    """`DataLoader(batch_sampler=...)` has no batch size, and a default for a sampler."""

    def given(sampler: Any) -> DataLoader:
        return DataLoader(DATASET, batch_sampler=BatchSampler(sampler, 4, drop_last=True))

    spec = read_loader(given(RandomSampler(DATASET)))
    assert (spec.shuffle, spec.batch_size, spec.drop_last) == (True, 4, True)
    with pytest.raises(TypeError, match="its own sampler, WeightedRandomSampler"):
        read_loader(given(WeightedRandomSampler([1.0] * len(DATASET), 3)))


# ---- what it refuses ----------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from range(3)


class ByLength(BatchSampler):
    pass


class EveryOther(SequentialSampler):
    def __iter__(self) -> Any:
        return iter(range(0, len(DATASET), 2))


@pytest.mark.parametrize(
    ("loader", "kind", "message"),
    [
        ([user_loader()], TypeError, r"one `torch.utils.data.DataLoader`.*several.*ConcatDataset"),
        ({"a": user_loader()}, TypeError, "several of them"),
        (range(3), TypeError, "got a range"),
        (DataLoader(Stream(), batch_size=2), TypeError, "Stream is an IterableDataset"),
        (DataLoader(DATASET, batch_size=None), ValueError, "`batch_size=None`.*single samples"),
        (
            DataLoader(DATASET, batch_sampler=ByLength(SequentialSampler(DATASET), 2, False)),
            TypeError,
            "its own batch sampler, ByLength. DCP itself decides",
        ),
        (
            DataLoader(DATASET, 4, sampler=WeightedRandomSampler([1.0] * 60, 60)),
            TypeError,
            "its own sampler, WeightedRandomSampler.*weights.*would be lost",
        ),
        (
            DataLoader(DATASET, 4, sampler=SubsetRandomSampler([0, 1])),
            TypeError,
            r"SubsetRandomSampler.*torch\.utils\.data\.Subset",
        ),
        (DataLoader(DATASET, 4, sampler=EveryOther(DATASET)), TypeError, "EveryOther"),
        (
            DataLoader(DATASET, 4, sampler=SequentialSampler(range(7))),
            TypeError,
            "its own sampler, SequentialSampler.*a part of the data",
        ),
        (
            DataLoader(DATASET, 4, sampler=DistributedSampler(range(7), 2, 0)),  # type: ignore[arg-type]
            TypeError,
            "its own sampler, DistributedSampler",
        ),
        (DataLoader(DATASET, 4, sampler=[3, 1, 2]), TypeError, "its own sampler, list"),
        (
            DataLoader(DATASET, 4, sampler=RandomSampler(DATASET, replacement=True)),
            ValueError,
            "draws 60 of 60 samples with replacement",
        ),
        (
            DataLoader(DATASET, 4, sampler=RandomSampler(DATASET, num_samples=7)),
            ValueError,
            "draws 7 of 60 samples without replacement.*limit_train_batches",
        ),
    ],
)
def test_refused_with_the_reason(loader: Any, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        read_loader(loader)


def test_a_sampler_that_lightning_wrapped_is_named() -> None:
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    sampler = WeightedRandomSampler([1.0] * 60, 60)
    wrapped = DistributedSamplerWrapper(sampler, num_replicas=2, rank=0)
    with pytest.raises(TypeError, match="its own sampler, WeightedRandomSampler"):
        read_loader(DataLoader(DATASET, 4, sampler=wrapped))


def test_a_loader_that_follows_a_plan_is_not_planned_again() -> None:
    with pytest.raises(TypeError, match="already follows a plan"):
        read_loader(plan_loader())


# ---- subclasses ---------------------------------------------------------------------------------


class Named(DataLoader):
    def __init__(self, dataset: Any, name: str = "none", **arguments: Any) -> None:
        super().__init__(dataset, **arguments)
        self.name = name


class OwnCollate(DataLoader):
    """Signature without `collate_fn`, positional arguments of its own."""

    def __init__(
        self,
        tag: str,
        dataset: Any,
        batch_size: int | None = 2,
        sampler: Any = None,
        shuffle: bool = False,
        batch_sampler: Any = None,
    ) -> None:
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, collate_fn=pad_with_minus_one
        )
        self.tag = tag


class OwnData(DataLoader):
    def __init__(self, path: str, **arguments: Any) -> None:
        super().__init__(**{**arguments, "dataset": TokenDataset(LENGTHS)})
        self.path = path


class OwnIteration(DataLoader):
    def __iter__(self) -> Any:
        yield from super().__iter__()


class Hidden(DataLoader):
    def __init__(self, secret: str, dataset: Any, **arguments: Any) -> None:
        super().__init__(dataset, **arguments)


def test_subclasses_are_made_again() -> None:
    loader = Named(DATASET, "mine", batch_size=4, shuffle=True, collate_fn=pad_with_minus_one)
    rebuilt = plan_loader(loader)
    assert type(rebuilt) is Named
    assert rebuilt.name == "mine"
    reference = [[ids_in(mb) for mb in b.micro_batches] for b in plan_loader()]
    assert [[ids_in(mb) for mb in b.micro_batches] for b in rebuilt] == reference


@pytest.mark.parametrize("cls", [DataLoader, Named])
def test_lightning_takes_it_for_one_that_can_resume(cls: type[DataLoader]) -> None:
    loader = plan_loader(cls(DATASET, batch_size=4, collate_fn=pad_with_minus_one))
    assert isinstance(loader, _Stateful)
    loader.load_state_dict({"of another": "loader"})
    assert loader.state_dict() == {}


def test_subclasses_made_inside_a_hook_are_made_again_from_their_arguments() -> None:
    with _replace_dunder_methods(DataLoader, "dataset"), _replace_dunder_methods(BatchSampler):
        loader = OwnCollate("t", DATASET, 4, shuffle=True)
        hidden = Hidden("s", DATASET, batch_size=4, num_workers=2, collate_fn=pad_with_minus_one)
    reference = [[ids_in(mb) for mb in b.micro_batches] for b in plan_loader()]
    for original in (loader, hidden):
        rebuilt = plan_loader(original)
        assert type(rebuilt) is type(original)
        assert rebuilt.num_workers == original.num_workers
        assert [[ids_in(mb) for mb in b.micro_batches] for b in rebuilt] == reference


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (OwnIteration(DATASET, 4), "OwnIteration overrides `__iter__`.*plain"),
        (
            Hidden("s", DATASET, batch_size=4),
            "Hidden could not be made again.*missing attributes are .'secret'.*plain",
        ),
        (
            OwnData("p", batch_size=4),
            "OwnData could not be made again.*does not pass `dataset` on.*plain",
        ),
    ],
)
def test_subclasses_that_cannot_be(loader: DataLoader, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        plan_loader(loader)


class Augmented(TokenDataset):
    """Draws from every global stream when a sample is read."""

    def __getitem__(self, index: int) -> Any:
        numpys = float(np.random.rand())  # noqa: NPY002 - the global stream, as users' code may
        drawn = (random.random(), numpys, float(torch.rand(())))
        return (index, drawn)


def masking_collate(samples: list[Any]) -> list[Any]:
    """As for masked language models: what is masked is drawn while collating."""
    return [(index, *drawn, float(torch.rand(()))) for index, drawn in samples]


class Sharing:
    """A planner whose samples run on four ranks, on two, and on one, in turn."""

    num_iterations = 3
    truncate_to = None
    seed = 5

    def __init__(self) -> None:
        self.lengths = np.array(LENGTHS)

    def epoch(self, epoch: int) -> list[Plan]:
        return [
            Plan(
                epoch,
                i,
                4,
                (
                    MicroBatch((6 * i,), 400, 1, 0, 4, 0, 1.0, 1),
                    MicroBatch((6 * i + 1, 6 * i + 2), 400, 2, 0, 2, 0, 1.0, 1),
                    MicroBatch((6 * i + 3,), 400, 1, 2, 2, 0, 1.0, 1),
                    MicroBatch((6 * i + 4,), 400, 1, 1, 1, 0, 1.0, 1),
                ),
            )
            for i in range(3)
        ]


def global_streams() -> tuple[Any, ...]:
    numpys = np.random.get_state()[1].tolist()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), numpys


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_that_share_a_sample_draw_the_same_for_it(num_workers: int) -> None:
    """Whatever else each rank has loaded before, and wherever its workers stand."""
    dataset = Augmented(LENGTHS)
    planner = Sharing()
    drawn: list[dict[int, Any]] = []
    for rank in range(4):
        torch.manual_seed(100 + rank)
        random.seed(100 + rank)
        loader = build_plan_loader(
            DataLoader(dataset, batch_size=2, collate_fn=masking_collate, num_workers=num_workers),
            planner,
            rank=rank,
            world_size=4,
        )
        batches = list(loader)
        samples = [v for batch in batches for mb in batch.micro_batches for v in mb]
        values = {index: numbers for index, *numbers in samples}
        drawn.append(values)
    shared = 0
    for one, other in itertools.combinations(drawn, 2):
        for index in one.keys() & other.keys():
            shared += 1
            assert one[index] == other[index]
    assert shared == 3 * (6 + 2 + 1)
    everything = {tuple(v) for values in drawn for v in values.values()}
    assert len(everything) == 3 * 5, "each sample draws numbers of its own"


def test_loading_leaves_the_global_streams_alone() -> None:
    loader = plan_loader(DataLoader(Augmented(LENGTHS), batch_size=2, collate_fn=masking_collate))
    iterator = iter(loader)
    before = global_streams()
    next(iterator)
    assert global_streams() == before

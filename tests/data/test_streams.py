"""Streams: reading, sharding, buffering and planning, with ranks that are threads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_dcp.data.streams.buffer import SampleIds
from lightning_dcp.data.streams.checking import check_reading
from lightning_dcp.data.streams.exchange import Alone
from lightning_dcp.data.streams.loader import StreamLoader
from lightning_dcp.data.streams.plans import StreamPlans
from lightning_dcp.data.streams.reading import StreamReader
from lightning_dcp.data.streams.records import pack, stream_length, unpack
from lightning_dcp.data.streams.sharding import find_shard
from lightning_dcp.data.streams.state import StreamState
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.planning.planner import EpochPlanner
from lightning_dcp.planning.stream import StreamPlanner
from tests.planning.costs import cost_model


class Numbers(IterableDataset[Any]):
    """Sample i is a tensor of `lengths[i]` times i."""

    def __init__(self, lengths: Sequence[int], ids: Sequence[int] | None = None) -> None:
        self.lengths = list(lengths)
        self.ids = list(range(len(self.lengths))) if ids is None else list(ids)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        step, start = (1, 0) if info is None else (info.num_workers, info.id)
        for i in self.ids[start::step]:
            yield {"tokens": torch.full((self.lengths[i],), i), "text": str(i)}


class Broken(Numbers):
    def __init__(self, lengths: Sequence[int], at: int, rank: int) -> None:
        super().__init__(lengths)
        self.at, self.rank = at, rank

    def __iter__(self) -> Iterator[Any]:
        for n, sample in enumerate(super().__iter__()):
            if n == self.at and threading.current_thread().name == f"rank {self.rank}":
                raise OSError("the disk is gone")
            yield sample


class Threads:
    """Ranks that are threads; each has an exchange."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size, timeout=30)
        self._values: list[Any] = [None] * world_size
        self.moved = 0

    def together(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def run(self, function: Callable[[ThreadExchange], Any]) -> list[Any]:
        results: list[Any] = [None] * self.world_size

        def of(rank: int) -> None:
            try:
                results[rank] = function(ThreadExchange(self, rank))
            except BaseException as error:  # noqa: BLE001 - handed to the test
                results[rank] = error
                if isinstance(error, AssertionError | threading.BrokenBarrierError):
                    self._barrier.abort()

        threads = [
            threading.Thread(target=of, args=(rank,), name=f"rank {rank}")
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        return results

    def run_well(self, function: Callable[[ThreadExchange], Any]) -> list[Any]:
        results = self.run(function)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


class ThreadExchange:
    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads = threads
        self.rank, self.world_size = rank, threads.world_size
        self.ranks = range(threads.world_size)

    def gather(self, values: Any) -> list[Any]:
        return self._threads.together(self.rank, values)

    def gather_objects(self, value: Any) -> list[Any]:
        return self._threads.together(self.rank, value)

    def swap(self, sent: Sequence[bytes], sizes: Sequence[int]) -> list[bytes]:
        everything = self._threads.together(self.rank, list(sent))
        received = [theirs[self.rank] for theirs in everything]
        assert [len(data) for data in received] == list(sizes)
        self._threads.moved += sum(map(len, received))
        return received


def open_plans(
    exchange: Any,
    dataset: Any,
    *,
    batch_size: int = 2,
    lookahead_steps: int = 4,
    num_workers: int = 0,
    persistent_workers: bool = False,
    datamodule: Any = None,
    limit: int = 10**9,
    on_too_long: str = "error",
    told: list[str] | None = None,
    **options: Any,
) -> tuple[StreamPlans, StreamLoader]:
    """As `strategies.preparation` does it."""
    loader: Any = DataLoader(
        dataset,
        batch_size=batch_size,
        collate_fn=list,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
    )
    shard = find_shard(dataset, datamodule, exchange.world_size, exchange.rank)
    reader = StreamReader(
        loader, shard, rank=exchange.rank, chunk=batch_size, length_hook=None, seed=1
    )
    plans = StreamPlans(
        reader,
        exchange,
        shard,
        chunk=batch_size,
        lookahead_steps=lookahead_steps,
        tell=(told if told is not None else []).append,
    )
    lengths = plans.look_ahead(samples=lookahead_steps * batch_size)
    tokens = max(1, round(batch_size * exchange.world_size * float(lengths.mean())))
    changed: dict[str, Any] = {"on_too_long": "truncate", **options}
    if options.get("policy") != "global-batch":
        changed["tokens_per_step"] = tokens
    with _PLANNING:
        planner = _planner(
            plans.reference().tobytes(),
            exchange.world_size,
            limit,
            PlanningOptions(**changed),
            batch_size,
        )
    plans.planner = StreamPlanner(
        planner,
        on_too_long=on_too_long,  # type: ignore[arg-type]
        tokens_per_step=tokens,
    )
    return plans, StreamLoader(loader, plans, list)


_PLANNING = threading.Lock()


@functools.lru_cache
def _planner(
    lengths: bytes, world_size: int, limit: int, options: PlanningOptions, batch_size: int
) -> EpochPlanner:
    """Shared by the threads, which saves three times its time."""
    return EpochPlanner(
        lengths=np.frombuffer(lengths, dtype=np.int64),
        cost_model=cost_model((1, 2, 4)),
        world_size=world_size,
        memory_limit_bytes=limit,
        options=options,
        batch_size=batch_size,
        shuffle=False,
    )


def ids_of(batch: Any) -> list[int]:
    return [
        int(sample["tokens"][0]) for micro_batch in batch.micro_batches for sample in micro_batch
    ]


def read_epoch(plans: StreamPlans, loader: StreamLoader, epoch: int, most: int = 10**9) -> Any:
    """(ids, plan) of each iteration."""
    plans.set_epoch(epoch)
    seen = []
    for batch in loader:
        assert batch.epoch == epoch
        plan = plans.plan_of(batch)
        own = plan.for_rank(plans.exchange.rank)
        assert [len(m) for m in batch.micro_batches] == [m.batch_size for m in own]
        for samples, m in zip(batch.micro_batches, own, strict=True):
            assert max(len(s["tokens"]) for s in samples) <= m.seq_len
            assert sum(len(s["tokens"]) for s in samples) == m.num_tokens
        seen.append((ids_of(batch), plan))
        if len(seen) == most:
            break
    return seen


def lengths_of(n: int, seed: int = 0) -> list[int]:
    values = np.random.default_rng(seed).lognormal(4.0, 1.0, n)
    return np.clip(values, 4, 4000).astype(int).tolist()


def trained(results: Sequence[Any]) -> Counter[int]:
    """How often each sample was run; one of a group of p ranks counts once."""
    found: Counter[int] = Counter()
    for step in zip(*results, strict=True):
        assert len({plan.digest() for _, plan in step}) == 1
        found.update(i for m in step[0][1].micro_batches for i in m.sample_ids)
        for rank, (ids, plan) in enumerate(step):
            assert ids == [i for m in plan.for_rank(rank) for i in m.sample_ids]
    return found


@pytest.mark.parametrize("policy", ["dcp-intra", "bucket", "packed", "global-batch"])
def test_each_sample_once(policy: str) -> None:
    lengths = lengths_of(107)
    threads = Threads(4)

    def run(exchange: Any) -> Any:
        plans, loader = open_plans(exchange, Numbers(lengths), policy=policy)
        return [read_epoch(plans, loader, epoch) for epoch in range(2)]

    results = threads.run_well(run)
    for epoch in range(2):
        steps = [r[epoch] for r in results]
        # With one reader and samples dealt out by index, ids are numbers in the stream.
        assert trained(steps) == Counter(range(107))
        if policy == "global-batch":
            assert [
                sorted(i for m in p.micro_batches for i in m.sample_ids) for _, p in steps[0]
            ] == [list(range(k, min(k + 8, 107))) for k in range(0, 107, 8)]
    assert threads.moved > 0


@pytest.mark.parametrize("persistent", [False, True])
def test_workers(persistent: bool) -> None:
    """Each sample once, in the same order in every epoch, whoever is quicker."""
    lengths = lengths_of(61)
    plans, loader = open_plans(
        Alone(), Numbers(lengths), num_workers=2, persistent_workers=persistent
    )
    seen = [[ids for ids, _ in read_epoch(plans, loader, epoch)] for epoch in range(2)]
    loader._iterator = None
    assert seen[0] == seen[1]
    assert sorted(i for ids in seen[0] for i in ids) == list(range(61))


def test_each_sample_once_over_uneven_shards() -> None:
    """One rank has most, one a single sample, one nothing."""
    lengths = lengths_of(100)
    parts = [range(60), range(60, 61), range(61, 61), range(61, 100)]
    threads = Threads(4)

    def run(exchange: Any) -> Any:
        own = Numbers(lengths, parts[exchange.rank])
        plans, loader = open_plans(exchange, own, datamodule=Own())
        return [read_epoch(plans, loader, epoch) for epoch in range(2)]

    results = threads.run_well(run)
    for epoch in range(2):
        steps = list(zip(*[r[epoch] for r in results], strict=True))
        seen: Counter[int] = Counter()
        for step in steps:
            for rank, (ids, plan) in enumerate(step):
                own = plan.for_rank(rank)
                for m in own:
                    if m.first_rank == rank:  # else another rank of the group counts it
                        start = sum(k.batch_size for k in own[: own.index(m)])
                        seen.update(ids[start : start + m.batch_size])
        assert seen == Counter(range(100))
        # No step is small but the last one: what is left of a window waits for the next.
        tokens = [step[0][1].num_tokens for step in steps]
        assert min(tokens[:-1]) > 0.5 * float(np.mean(tokens[:-1]))


class Own:
    """A module whose data set has this rank's part only."""

    def shard_stream(self, dataset: Any, num_shards: int, index: int) -> Any:
        return dataset


class Resumable(Numbers):
    """Goes on where its state says; counts what it reads."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.place, self.num_read = 0, 0

    def __iter__(self) -> Iterator[Any]:
        start, self.place = self.place, 0
        for i in range(start, len(self.lengths)):
            self.num_read += 1
            self._now = i + 1
            yield {"tokens": torch.full((self.lengths[i],), i)}

    def state_dict(self) -> dict[str, int]:
        return {"place": self._now}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize(
    ("kind", "done"), [(Numbers, 1), (Numbers, 7), (Numbers, 14), (Resumable, 20)]
)
def test_resume_bit_for_bit(kind: type[Numbers], done: int) -> None:
    lengths = lengths_of(900) if kind is Resumable else lengths_of(180)
    size = 8 if kind is Resumable else 2
    threads = Threads(4)

    def whole(exchange: Any) -> Any:
        plans, loader = open_plans(exchange, kind(lengths), batch_size=size)
        plans.set_epoch(1)
        seen, state = [], None
        for batch in loader:
            seen.append((ids_of(batch), plans.plan_of(batch)))
            # Lightning has fetched one more iteration than were run.
            if len(seen) == done + 1:
                state = plans.state(1, done, float("inf"))
        assert state is not None
        return seen, state.to_plain()

    def resumed(exchange: Any) -> Any:
        dataset = kind(lengths)
        plans, loader = open_plans(exchange, dataset, batch_size=size)
        dataset.num_read = 0
        found = plans.resume(StreamState.from_plain(state), 1, done)
        assert found.exact and ("passing over" in found.told) == (kind is Numbers)
        seen = read_epoch(plans, loader, 1)
        if kind is Resumable:
            return seen, dataset.num_read
        return seen, None

    first = threads.run_well(whole)
    state = first[0][1]
    second = threads.run_well(resumed)
    for (before, same), (after, num_read) in zip(first, second, strict=True):
        assert str(same) == str(state)
        assert [(ids, plan.to_json()) for ids, plan in before[done:]] == [
            (ids, plan.to_json()) for ids, plan in after
        ]
        if kind is Resumable:
            assert num_read < 500


@pytest.mark.parametrize(
    "changed", [{}, {"policy": "bucket"}, {"limit": 1_500_000}, {"batch_size": 3}]
)
def test_resume_with_other_options(changed: dict[str, Any]) -> None:
    """What was planned is run only where it would be planned so again; each sample once."""
    lengths, threads = [min(n, 400) for n in lengths_of(180)], Threads(4)

    def whole(exchange: Any) -> Any:
        plans, loader = open_plans(exchange, Numbers(lengths), lookahead_steps=8)
        steps = read_epoch(plans, loader, 0, 6)
        return steps[:5], plans.state(0, 5, 10**9)

    def resumed(exchange: Any) -> Any:
        options = {"lookahead_steps": 8, **changed}
        plans, loader = open_plans(exchange, Numbers(lengths), **options)
        assert plans.resume(state, 0, 5).exact
        return read_epoch(plans, loader, 0)

    first = threads.run_well(whole)
    state = first[0][1]
    assert len(state.plans) >= 3
    second = threads.run_well(resumed)
    assert trained([a + b for (a, _), b in zip(first, second, strict=True)]) == Counter(range(180))
    plans = [plan for _, plan in second[0]]
    assert (plans[: len(state.plans)] == list(state.plans)) == (not changed)
    most = changed.get("limit", 10**9)
    assert all(m.est_bytes <= most for plan in plans for m in plan.micro_batches)
    if "limit" in changed:  # else nothing is tested
        assert any(m.est_bytes > most for plan in state.plans for m in plan.micro_batches)


def test_resumed_twice_with_workers() -> None:
    """The second run ends before it has read again all that the first one had consumed."""
    lengths, state = lengths_of(120), None
    seen: Counter[int] = Counter()
    for most, lookahead_steps in ((3, 2), (1, 1), (10**9, 1)):
        plans, loader = open_plans(
            Alone(),
            Numbers(lengths),
            batch_size=8,
            lookahead_steps=lookahead_steps,
            num_workers=4,
        )
        begun = 0
        if state is not None:
            begun = state.iteration
            assert plans.resume(state, 0, begun).exact
        steps = read_epoch(plans, loader, 0, most)
        seen.update(i for ids, _ in steps for i in ids)
        state = plans.state(0, begun + len(steps), 10**9)
        plans.close()
    assert seen == Counter(range(120))


def test_resumed_twice_goes_on_by_the_states_of_the_data_set() -> None:
    """Also where the second run has read too little to have taken one that helps."""
    lengths, threads = lengths_of(900), Threads(4)
    state: Any = None

    def run(exchange: Any, most: int) -> Any:
        dataset = Resumable(lengths)
        plans, loader = open_plans(exchange, dataset, batch_size=8)
        dataset.num_read, begun = 0, 0
        if state is not None:
            begun = state.iteration
            assert plans.resume(state, 0, begun).told == ""
        steps = read_epoch(plans, loader, 0, most)
        return steps, plans.state(0, begun + len(steps), 10**9), dataset.num_read

    runs = []
    for most in (20, 1, 10**9):
        results = threads.run_well(functools.partial(run, most=most))
        runs.append(results)
        state = results[0][1]
    steps = [[step for r in runs for step in r[rank][0]] for rank in range(4)]
    assert trained(steps) == Counter(range(900))
    for _, _, num_read in runs[2]:
        assert num_read < 500


@pytest.mark.parametrize(("before", "after"), [(4, 2), (1, 3)])
def test_other_number_of_ranks(before: int, after: int) -> None:
    """Twice interrupted, twice with another number of ranks: each sample once."""
    lengths = lengths_of(120)
    seen: Counter[int] = Counter()
    state: Any = None

    for world_size, num in ((before, 4), (after, 5), (before, 10**9)):
        threads, saved = Threads(world_size), state

        def run(exchange: Any, num: int = num, saved: Any = saved) -> Any:
            plans, loader = open_plans(exchange, Numbers(lengths))
            begun = 0
            if saved is not None:
                begun = saved.iteration
                assert plans.resume(saved, 0, begun).exact
            steps = read_epoch(plans, loader, 0, num)
            return [ids for ids, _ in steps], plans.state(0, begun + len(steps), 10**9)

        results = threads.run_well(run)
        for step in zip(*[r[0] for r in results], strict=True):
            seen.update({i for ids in step for i in ids})
        state = results[0][1]
    assert seen == Counter(range(120)) and not state.unfinished


def test_what_cannot_be_resumed_is_told() -> None:
    lengths = lengths_of(60)
    plans, loader = open_plans(Alone(), Numbers(lengths), num_workers=0)
    read_epoch(plans, loader, 0, 3)
    state = plans.state(0, 2, 10**9)
    assert state is not None and state.unfinished
    for changes, text in (
        ({"how": "shard"}, "sharded by shard before"),
        ({"num_workers": 3}, "3 worker"),
        ({"iteration": 1}, "does not say"),
    ):
        found = plans.resume(dataclasses.replace(state, **changes), 0, 2)
        assert not found.exact and text in found.told and "repeated" in found.told
        again = read_epoch(plans, loader, 0)
        assert sorted(i for ids, _ in again for i in ids) == list(range(60))
        assert again[0][1].iteration == 2


def test_changed_stream_is_refused() -> None:
    lengths = lengths_of(60)
    plans, loader = open_plans(Alone(), Numbers(lengths))
    read_epoch(plans, loader, 0, 3)
    state = plans.state(0, 2, 10**9)
    for other, text in (([n + 1 for n in lengths], "had"), (lengths[:5], "not in the stream")):
        plans, loader = open_plans(Alone(), Numbers(other))
        plans.resume(state, 0, 2)
        with pytest.raises(RuntimeError, match=text):
            next(iter(loader))


def test_planned_again() -> None:
    """Another planner while iteration 5 runs and iteration 6 was fetched: nothing lost."""
    lengths = lengths_of(100)
    threads = Threads(4)

    def run(exchange: Any) -> Any:
        plans, loader = open_plans(exchange, Numbers(lengths))
        seen = read_epoch(plans, loader, 0, 7)[:6]
        other, _ = open_plans(exchange, Numbers(lengths), policy="bucket")
        assert plans.planner is not None and other.planner is not None
        plans.replan(other.planner.planner, 6)
        assert plans.plan(0, 5) == seen[5][1]
        state = plans.state(0, 6, 10**9)
        assert state is not None and state.ids.size
        return seen + read_epoch(plans, loader, 0)

    results = threads.run_well(run)
    assert trained(results) == Counter(range(100))
    assert [plan.iteration for _, plan in results[0]] == list(range(len(results[0])))


def test_an_iteration_that_fails_after_the_change_is_still_to_come() -> None:
    """Each window has one iteration; the next one was fetched, and is planned again."""
    lengths = lengths_of(60)
    plans, loader = open_plans(Alone(), Numbers(lengths), lookahead_steps=1)
    seen = read_epoch(plans, loader, 0, 6)[:5]
    assert plans.planner is not None
    for _ in range(2):
        plans.replan(plans.planner.planner, 5)
        next(iter(loader))
    for done in (4, 5):  # the iteration before has failed, or not
        state = plans.state(0, done, 10**9)
        assert state is not None
        again, other = open_plans(Alone(), Numbers(lengths), lookahead_steps=1)
        assert again.resume(state, 0, done).exact
        rest = read_epoch(again, other, 0)
        assert sorted(i for ids, _ in seen[:done] + rest for i in ids) == list(range(60))


def test_saved_again_before_anything_is_read() -> None:
    """A run that has gone on is interrupted before it has fetched an iteration."""
    lengths, state = lengths_of(60), None
    seen: Counter[int] = Counter()
    for world_size, most in ((2, 4), (3, 0), (2, 10**9)):
        threads, saved = Threads(world_size), state

        def run(exchange: Any, most: int = most, saved: Any = saved) -> Any:
            plans, loader = open_plans(exchange, Numbers(lengths))
            begun = 0 if saved is None else saved.iteration
            if saved is not None:
                assert plans.resume(saved, 0, begun).exact
            iterations = iter(loader)
            steps = [ids_of(batch) for batch in itertools.islice(iterations, most)]
            return steps, plans.state(0, begun + len(steps), 10**9)

        results = threads.run_well(run)
        for step in zip(*[r[0] for r in results], strict=True):
            seen.update({i for ids in step for i in ids})
        state = results[0][1]
    assert seen == Counter(range(60))


def test_an_iteration_again_after_its_batch_was_written_to() -> None:
    """By a transfer hook, or on a CPU by the training step, before memory ran out."""
    threads = Threads(2)

    def run(exchange: Any) -> Any:
        plans, loader = open_plans(exchange, Numbers(lengths_of(40)))
        plans.set_epoch(0)
        batches = iter(loader)
        first, following = next(batches), next(batches)  # Lightning fetches one ahead
        wanted = (ids_of(first), ids_of(following))
        for micro_batch in first.micro_batches:
            for sample in micro_batch:
                sample.pop("text")
                sample["tokens"].fill_(-1)
        plan = plans.plan_of(first)
        recomputed = [replace(m, recompute_blocks=3) for m in plan.micro_batches]
        again = loader.again(replace(plan, micro_batches=tuple(recomputed)))
        assert (ids_of(again), ids_of(following)) == wanted
        assert (again.epoch, again.iteration) == (0, 0)
        for micro_batch in again.micro_batches:
            assert all(set(sample) == {"tokens", "text"} for sample in micro_batch)
        return len(ids_of(next(batches)))

    assert sum(threads.run_well(run)) > 0


# ---- what is refused or told ---------------------------------------------------------------------


def test_reader_that_raises() -> None:
    threads = Threads(4)

    def run(exchange: Any) -> Any:
        plans, loader = open_plans(
            exchange, Broken(lengths_of(120), at=90, rank=2), datamodule=None
        )
        return read_epoch(plans, loader, 0)

    results = threads.run(run)
    assert isinstance(results[2], OSError)
    for rank in (0, 1, 3):
        assert "failed on rank 2: OSError: the disk is gone" in str(results[rank])


def test_ranks_have_the_names_that_users_know() -> None:
    """On nodes of three, plans count ranks otherwise."""
    threads = Threads(4)

    def run(exchange: Any) -> Any:
        exchange.ranks = (0, 1, 3, 2)
        return open_plans(exchange, Broken(lengths_of(120), at=20, rank=2))

    results = threads.run(run)
    assert isinstance(results[2], OSError)
    assert "failed on rank 3: OSError: the disk is gone" in str(results[0])
    assert SampleIds(4, 1, (0, 1, 3, 2)).name(10) == "sample 2 of the stream of rank 3"


@pytest.mark.parametrize("policy", ["error", "skip", "truncate"])
def test_too_long(policy: str) -> None:
    lengths = [60] * 100
    lengths[70] = 100_000
    threads, told = Threads(4), [[] for _ in range(4)]
    limit = 2_000_000  # fits 60 tokens

    def run(exchange: Any) -> Any:
        plans, loader = open_plans(
            exchange,
            Numbers(lengths),
            limit=limit,
            on_too_long=policy,
            told=told[exchange.rank],
        )
        plans.set_epoch(0)
        return [
            [(int(s["tokens"][0]), len(s["tokens"])) for m in batch.micro_batches for s in m]
            for batch in loader
        ]

    results = threads.run(run)
    if policy == "error":
        for error in results:
            assert isinstance(error, ValueError)
            assert "Sample 17 of the stream of rank 2 has 100000 tokens" in str(error)
        return
    found = {pair for seen in results for step in seen for pair in step}
    ids = {i for i, _ in found}
    assert ids == set(range(100)) - ({70} if policy == "skip" else set())
    assert len(told[0]) == 1 and policy in told[0][0]
    if policy == "truncate":
        cut = dict(found)[70]
        assert 60 <= cut < 100_000
        assert f"to {cut} tokens" in told[0][0]


def test_longer_samples_later() -> None:
    """Longer than all that were seen when the planner was made."""
    lengths = [20 + i for i in range(60)]
    plans, loader = open_plans(Alone(), Numbers(lengths))
    assert trained([read_epoch(plans, loader, 0)]) == Counter(range(60))
    assert plans.planner is not None and plans.planner.reference.max() >= 79


def test_read_once() -> None:
    class Once(IterableDataset[Any]):
        def __init__(self) -> None:
            self.samples = iter([{"tokens": torch.ones(5)}, {"tokens": torch.ones(6)}])

        def __iter__(self) -> Iterator[Any]:
            return self.samples

    plans, loader = open_plans(Alone(), Once())
    assert len(read_epoch(plans, loader, 0)) > 0
    with pytest.raises(RuntimeError, match="Once gave no sample in epoch 1"):
        read_epoch(plans, loader, 1)


# ---- parts ---------------------------------------------------------------------------------------


def test_packed_samples() -> None:
    sample = {
        "ids": torch.arange(6).view(2, 3).t(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "array": np.arange(3, dtype=np.int32),
        "scalar": torch.tensor(2.5),
        "rest": ("text", [1, None], torch.zeros(0)),
    }
    again = unpack(pack(sample))
    assert torch.equal(again["ids"], sample["ids"]) and torch.equal(again["half"], sample["half"])
    assert again["half"].dtype == torch.bfloat16 and again["scalar"].shape == ()
    assert np.array_equal(again["array"], sample["array"])
    assert again["rest"][:2] == sample["rest"][:2] and again["rest"][2].shape == (0,)
    again["ids"][0, 0] = 7  # nobody else's
    assert int(sample["ids"][0, 0]) == 0
    with pytest.raises(TypeError, match="cannot be pickled"):
        pack({"f": lambda: 0})


def test_lengths_of_samples() -> None:
    assert stream_length({"length": 7, "input_ids": [1, 2]}, None) == 7
    assert stream_length({"length": torch.tensor(7)}, None) == 7
    assert stream_length({"input_ids": [1, 2]}, None) == 2
    assert stream_length((torch.ones(3), 1), None) == 3
    assert stream_length({"length": 7}, lambda sample: 9) == 9
    assert stream_length({"length": 7}, lambda sample: NotImplemented) == 7
    with pytest.raises(TypeError, match=r"Override `sample_length\(self, sample\)`"):
        stream_length({"pixels": torch.ones(2, 2)}, None)
    with pytest.raises(ValueError, match="has length 0"):
        stream_length(torch.ones(0), None)
    with pytest.raises(TypeError, match=r"must be an integer, got 2\.5"):
        stream_length({}, lambda sample: 2.5)


def test_who_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Numbers([1, 2])
    assert find_shard(plain, None, 4, 1) == (plain, 4, "every W-th sample")
    assert find_shard(plain, Own(), 4, 1) == (plain, 1, "shard_stream")

    # Hugging Face's interface: the module's function, and what it leaves on the data set.
    class Streaming(Numbers):
        _distributed: Any = None

    Streaming.__module__ = "datasets.iterable_dataset"
    parent, distributed = types.ModuleType("datasets"), types.ModuleType("datasets.distributed")

    def split_dataset_by_node(dataset: Any, rank: int, world_size: int) -> Any:
        part = Streaming(dataset.lengths, dataset.ids[rank::world_size])
        part._distributed = (rank, world_size)
        return part

    distributed.split_dataset_by_node = split_dataset_by_node  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", parent)
    monkeypatch.setitem(sys.modules, "datasets.distributed", distributed)
    whole = Streaming(list(range(1, 9)))
    part = find_shard(whole, None, 4, 1)
    assert part.stride == 1 and part.dataset.ids == [1, 5]
    assert find_shard(part.dataset, None, 4, 1).dataset is part.dataset  # split already

    # WebDataset's: stages of a pipeline.
    class Pipeline(Numbers):
        def __init__(self, stage: str) -> None:
            super().__init__([1])
            self.pipeline = [types.FunctionType((lambda: 0).__code__, {}, stage)]

    assert find_shard(Pipeline("split_by_node"), None, 4, 1).how == "split_by_node"
    assert find_shard(Pipeline("split_by_worker"), None, 4, 1).by_index

    class Sharding(Numbers):
        num_shards = 4

        def shard(self, num_shards: int, index: int) -> Any:
            return (num_shards, index)

    assert find_shard(Sharding([1]), None, 4, 1) == ((4, 1), 1, "shard")
    assert find_shard(Sharding([1]), None, 8, 1).by_index  # too few shards


def digests(*texts: str) -> dict[int, dict[int, bytes]]:
    return {w: {i: c.encode() for i, c in enumerate(text)} for w, text in enumerate(texts)}


def test_double_reading_is_found() -> None:
    def look(checks: Sequence[Any], by_index: bool = False) -> tuple[str, str]:
        found = check_reading(checks, by_index=by_index, name="Mine")
        return found.error[:60], found.warning[:60]

    assert look([digests("abcd"), digests("efgh")]) == ("", "")
    assert look([digests("abcd"), digests("ab")])[0].startswith("Ranks 0 and 1 read the same")
    assert look([digests("aaaa"), digests("aaaa")]) == ("", "")  # says nothing
    assert (
        "are read by rank"
        in check_reading(
            [digests("abcdef"), digests("fedcba")], by_index=False, name="Mine"
        ).warning
    )
    assert look([digests("abcd")] * 2, by_index=True) == ("", "")
    assert look([digests("abcd"), digests("abXd")], by_index=True)[0].startswith(
        "Rank 1 reads another sample 2 of Mine"
    )
    assert "workers 0 and 1" in look([digests("abcd", "abcd")] * 2, by_index=True)[1]
    assert look([digests("abcd", "efgh")] * 2, by_index=True) == ("", "")

"""The plan seen by one rank, epoch by epoch."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from lightning.fabric.utilities.data import _set_sampler_epoch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dcp.data import IterationBatch, PlanKey, PlanSampler
from lightning_dcp.data.sampler import Rest
from lightning_dcp.planning.plan import Plan
from lightning_dcp.planning.planner import EpochPlanner
from tests.data.toys import RoundRobinPlanner, TokenDataset, make_planner, some_lengths

LENGTHS = some_lengths(40)


def test_keys_are_this_ranks_micro_batches_in_order() -> None:
    planner = make_planner(LENGTHS, 3)
    plans = planner.epoch(2)
    for rank in range(3):
        sampler = PlanSampler(planner, rank=rank, world_size=3, epoch=2)
        keys = list(sampler)
        assert len(sampler) == len(keys) == planner.num_iterations
        for iteration, (key, plan) in enumerate(zip(keys, plans, strict=True)):
            expected = tuple(mb.sample_ids for mb in plan.micro_batches if rank in mb.ranks)
            places = plan.indices_for_rank(rank)
            rng_keys = tuple((planner.seed, 2, iteration, place) for place in places)
            assert key == PlanKey(2, iteration, expected, rng_keys)
            assert pickle.loads(pickle.dumps(key)) == key


def test_lightning_leaves_it_alone_and_sets_the_epoch() -> None:
    sampler = PlanSampler(make_planner(LENGTHS, 2), rank=1, world_size=2)
    assert isinstance(sampler, DistributedSampler)
    loader = DataLoader(TokenDataset(LENGTHS), batch_size=None, sampler=sampler)
    first = [key.epoch for key in sampler]
    _set_sampler_epoch(loader, 1)
    assert set(first) == {0}
    assert {key.epoch for key in sampler} == {1}


def test_an_iterator_belongs_to_the_epoch_of_its_first_key() -> None:
    sampler = PlanSampler(make_planner(LENGTHS, 2), rank=0, world_size=2)
    early = iter(sampler)
    sampler.set_epoch(3)  # as Lightning does: after the iterator was made
    assert next(early).epoch == 3
    sampler.set_epoch(4)
    assert {key.epoch for key in early} == {3}
    assert next(iter(sampler)).epoch == 4


def test_an_epoch_is_planned_once() -> None:
    calls: list[int] = []

    class Recording(RoundRobinPlanner):
        def epoch(self, epoch: int) -> list:
            calls.append(epoch)
            return super().epoch(epoch)

    sampler = PlanSampler(Recording(LENGTHS, 2), rank=0, world_size=2)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        keys = list(sampler)
        assert sampler.plans(epoch)[0].for_rank(0)[0].sample_ids == keys[0].sample_ids[0]
    sampler.plans(0)  # an iterator of the next epoch does not push the current one out
    assert calls == [0, 1]


def test_a_rest_takes_the_place_of_the_plans_of_its_epoch_only() -> None:
    planner = make_planner(LENGTHS, 2)
    whole = planner.epoch(1)
    rest = Rest(
        epoch=1, first_iteration=2, plans=whole[5:8], consumed=np.zeros(len(LENGTHS), dtype=bool)
    )
    over: list[int] = []
    sampler = PlanSampler(planner, rank=0, world_size=2)
    sampler.resume(1, 3, rest, lambda: over.append(sampler.epoch))
    sampler.set_epoch(1)  # as Lightning does when the epoch goes on
    assert len(sampler) == 5 and sampler.rest is rest
    keys = list(sampler)
    assert [key.iteration for key in keys] == [3, 4]
    assert keys[0].sample_ids == tuple(mb.sample_ids for mb in whole[6].for_rank(0))
    assert sampler.plan(1, 2) == whole[5] and sampler.plan(0, 0) == planner.epoch(0)[0]
    expected = [i for plan in whole[5:7] for mb in plan.micro_batches for i in mb.sample_ids]
    progress = sampler.progress(4, len(LENGTHS))
    assert progress.begun_at == 2 and not progress.consumed_before.any()
    assert np.flatnonzero(progress.consumed).tolist() == sorted(expected)
    assert over == []
    sampler.set_epoch(2)
    assert over == [2] and sampler.rest is None
    assert len(sampler) == len(list(sampler)) == planner.num_iterations


def ids_of(plans: Sequence[Plan]) -> list[int]:
    return sorted(i for plan in plans for mb in plan.micro_batches for i in mb.sample_ids)


def replaced(sampler: PlanSampler, num_run: int, planner: EpochPlanner) -> Rest:
    """The rest of the running epoch by another planner, taken up after some iterations."""
    consumed = sampler.progress(num_run, len(LENGTHS)).consumed
    plans = planner.rest(
        sampler.epoch, consumed, first_iteration=num_run, num_iterations=len(sampler) - num_run
    )
    rest = Rest(epoch=sampler.epoch, first_iteration=num_run, plans=plans, consumed=consumed)
    sampler.replace(planner, rest)
    return rest


def test_plans_are_replaced_while_an_epoch_runs_twice() -> None:
    first, second, third = (make_planner(LENGTHS, 2, batch_size=b) for b in (2, 1, 3))
    sampler = PlanSampler(first, rank=1, world_size=2)
    sampler.set_epoch(1)
    before = iter(sampler)
    keys = [next(before) for _ in range(3)]
    running = sampler.plan(1, 2)
    rest = replaced(sampler, 3, second)
    with pytest.raises(RuntimeError, match="replaced while an iterator"):
        next(before)
    assert len(sampler) == first.num_iterations
    assert sampler.plan(1, 2) == running and sampler.plan(1, 3) == rest.plans[0]
    with pytest.raises(IndexError, match="iteration 1 of epoch 1 is gone"):
        sampler.plan(1, 1)
    sampler.set_epoch(1)  # of no consequence in the running epoch
    after = iter(sampler)
    keys += [next(after) for _ in range(2)]
    last = replaced(sampler, 5, third)
    again = replaced(sampler, 5, third)  # twice in one iteration: as once
    assert list(again.plans) == list(last.plans)
    keys += list(sampler)
    assert [key.iteration for key in keys] == list(range(first.num_iterations))
    assert [key.version for key in keys[::2]] == [0, 0, 1, *[3] * len(keys[6::2])]
    everything = [*first.epoch(1)[:3], *rest.plans[:2], *last.plans]
    assert ids_of(everything) == list(range(len(LENGTHS)))
    for key, plan in zip(keys, everything, strict=True):
        assert key.sample_ids == tuple(mb.sample_ids for mb in plan.for_rank(1))
    # The next epoch is the last planner's, and nothing is left of the former one.
    sampler.set_epoch(2)
    assert sampler.rest is None and len(sampler) == third.num_iterations
    assert [key.iteration for key in sampler] == list(range(third.num_iterations))
    assert sampler.plan(2, 0) == third.epoch(2)[0]


def test_another_planner_gives_the_plans_from_the_next_iterator_on() -> None:
    first, second = make_planner(LENGTHS, 2), make_planner(LENGTHS, 2, batch_size=1)
    sampler = PlanSampler(first, rank=0, world_size=2)
    assert sampler.plan(0, 1) == first.epoch(0)[1]
    sampler.use(second)
    assert sampler.plan(0, 1) == second.epoch(0)[1] != first.epoch(0)[1]


def test_what_was_consumed_where_the_running_iteration_fails_or_not() -> None:
    first, second = make_planner(LENGTHS, 2), make_planner(LENGTHS, 2, batch_size=1)
    sampler = PlanSampler(first, rank=0, world_size=2)
    rest = replaced(sampler, 3, second)
    for iteration, begun_at, plans in (
        (2, 2, first.epoch(0)[:2]),
        (3, 3, first.epoch(0)[:3]),
        (4, 3, [*first.epoch(0)[:3], rest.plans[0]]),
    ):
        progress = sampler.progress(iteration, len(LENGTHS))
        assert progress.begun_at == begun_at
        assert np.flatnonzero(progress.consumed).tolist() == ids_of(plans)
        before = ids_of(plans[:begun_at])
        assert np.flatnonzero(progress.consumed_before).tolist() == before


def test_a_batch_of_plans_that_were_replaced_is_refused() -> None:
    sampler = PlanSampler(make_planner(LENGTHS, 2), rank=0, world_size=2)
    stale = IterationBatch(0, 3, [], sampler.version)
    assert sampler.plan_of(stale) == sampler.plan(0, 3)
    replaced(sampler, 2, make_planner(LENGTHS, 2, batch_size=1))
    with pytest.raises(RuntimeError, match="iteration 3 of epoch 0 made by plans that were"):
        sampler.plan_of(stale)


def test_nothing_left_of_an_epoch_takes_nothing_from_the_next() -> None:
    """An iterator that is never asked for a key does not take up where to begin."""
    planner = make_planner(LENGTHS, 2)
    sampler = PlanSampler(planner, rank=0, world_size=2)
    sampler.resume(1, planner.num_iterations)
    iter(sampler)
    sampler.set_epoch(2)
    assert [key.iteration for key in sampler] == list(range(planner.num_iterations))


@pytest.mark.parametrize("replaces", [False, True])
def test_a_look_at_a_batch_takes_nothing_from_training(replaces: bool) -> None:
    """A callback may make an iterator of its own before training has asked its own for a key."""
    sampler = PlanSampler(make_planner(LENGTHS, 2), rank=0, world_size=2)
    if replaces:
        replaced(sampler, 3, make_planner(LENGTHS, 2, batch_size=1))
    else:
        sampler.resume(0, 3)
    training = iter(sampler)
    for _ in range(2):
        assert next(iter(sampler)).iteration == 3
    assert [key.iteration for key in training] == list(range(3, len(sampler)))


def test_wrong_arguments_and_broken_promises() -> None:
    planner = RoundRobinPlanner(LENGTHS, 2)
    with pytest.raises(ValueError, match=r"`rank` must be in \[0, 2\), got 2"):
        PlanSampler(planner, rank=2, world_size=2)
    with pytest.raises(ValueError, match="`epoch` must not be negative, got -1"):
        PlanSampler(planner, rank=0, world_size=2, epoch=-1)
    with pytest.raises(ValueError, match="gives 0 iterations"):
        PlanSampler(RoundRobinPlanner(LENGTHS, 2, num_iterations=0), rank=0, world_size=2)
    sampler = PlanSampler(planner, rank=0, world_size=2)
    planner.num_iterations = 5
    planner.epoch = lambda epoch: RoundRobinPlanner(LENGTHS, 2).epoch(epoch)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="made 4 plans for epoch 0, but promised 5"):
        next(iter(sampler))

"""The harness itself: results in rank order, failures with every rank's text, no hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.worlds import World, WorldFailure


def sum_of_ranks(rank: int, factor: int) -> tuple[int, float]:
    value = torch.tensor([float(rank * factor)])
    dist.all_reduce(value)
    return rank, value.item()


def fail_on(rank: int, failing: int) -> None:
    if rank == failing:
        raise KeyError("the reason")
    dist.barrier()


def sleep_on(rank: int, sleeping: int) -> None:
    if rank == sleeping:
        time.sleep(60)


def die_on(rank: int, dying: int) -> None:
    if rank == dying:
        os._exit(7)


@pytest.fixture(scope="module")
def world():
    with World(3) as world:
        yield world


class TestWorld:
    def test_results_in_rank_order(self, world):
        assert world.run(sum_of_ranks, 10) == [(0, 30.0), (1, 30.0), (2, 30.0)]

    def test_failure_names_the_rank_and_the_waiting_ones(self, world):
        with pytest.raises(WorldFailure) as failure:
            world.run(fail_on, 1)
        text = str(failure.value)
        assert "the reason" in text
        assert "rank 0: no answer 3 s after" in text
        assert "fail_on" in text.split("rank 2:")[1]
        assert world.run(sum_of_ranks, 1)[0] == (0, 3.0)  # a fresh world

    def test_timeout_shows_the_stack(self, world):
        with pytest.raises(WorldFailure, match="sleep_on"):
            world.run(sleep_on, 2, timeout_s=1.0)

    def test_a_dead_rank_is_told(self, world):
        with pytest.raises(WorldFailure, match=r"rank 1: the process died \(exit code 7\)"):
            world.run(die_on, 1)

    def test_only_top_level_functions(self, world):
        with pytest.raises(TypeError, match="top level"):
            world.run(lambda rank: rank)

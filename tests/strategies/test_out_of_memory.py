"""Memory that runs out in the middle of training: nothing is lost, or all ranks end with the place.

4 real ranks under Lightning's Trainer; micro-batches raise what CUDA would, or a limit is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from lightning_dcp.parallel import SPGroup
from lightning_dcp.planning.plan import Plan
from lightning_dcp.strategies.iteration_state import IterationState
from lightning_dcp.strategies.out_of_memory import RanOutOfMemory, Shortages
from tests.strategies.hand_planned import LENGTHS, NUM_BLOCKS, steps_of
from tests.strategies.short_of_memory import (
    FIXED_BYTES,
    Hungry,
    make_planner,
    mean_of_steps,
    train_short,
)
from tests.strategies.toys import (
    Reference,
    Sequences,
    ToyLM,
    largest_relative_error,
    reference,
)
from tests.worlds import World, WorldFailure


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=100) as world:
        yield world


def single(iteration: int, ids: Sequence[int], p: int, rank: int) -> bool:
    return iteration == 0 and p == 1


def shared(iteration: int, ids: Sequence[int], p: int, rank: int) -> bool:
    return iteration == 0 and p == 2 and 1 in ids


def shared_later(iteration: int, ids: Sequence[int], p: int, rank: int) -> bool:
    return iteration == 1 and p > 1


def one_of_two(iteration: int, ids: Sequence[int], p: int, rank: int) -> bool:
    return iteration == 1 and p == 2 and rank % 2 == 1


def wanted_of(plans: list[Plan], name: str) -> Reference:
    model = ToyLM(num_blocks=NUM_BLOCKS, double=True)
    if name == "dcp":
        model.float().double()  # as its master weights
    return reference(model, Sequences(LENGTHS), steps_of(plans))


def check_nothing_is_lost(results: list[dict[str, Any]], name: str, num_epochs: int = 1) -> None:
    """Steps, samples, gradients, logs and metrics are those of one process on the same samples."""
    plans = results[0]["plans"]
    wanted = wanted_of(plans, name)
    trained = sorted(i for step in steps_of(plans) for i in step)
    assert trained == sorted(list(range(len(LENGTHS))) * num_epochs)
    for rank, result in enumerate(results):
        assert result["plans"] == plans
        assert result["steps"] == list(range(1, len(plans) + 1))
        assert len(result["gradients"]) == len(plans)
        for step, gradients in enumerate(result["gradients"]):
            if name != "dcp" or step == 0:  # the master weights of ZeRO-1 are float32
                assert largest_relative_error(gradients, wanted.gradients[step]) <= 1e-12
        tolerance = 1e-5 if name == "dcp" else 1e-12
        assert largest_relative_error(result["parameters"], wanted.parameters) <= tolerance
        assert result["losses"] == pytest.approx(wanted.losses, rel=max(tolerance, 1e-12))
        assert result["samples"] == len(LENGTHS), "of the last epoch, each once"
        per_epoch = len(plans) // num_epochs
        mean = mean_of_steps(wanted.losses[-per_epoch:], plans[-per_epoch:])
        assert result["logged"] == pytest.approx(mean, rel=1e-5)
        whose = 0 if name == "dcp_ddp" else rank  # DDP sends rank 0's buffers around
        ran = sum(m.batch_size for plan in plans for m in plan.for_rank(whose))
        assert result["num_seen"] == ran, "buffers are those of what counts"
        assert result["forwards"] == []


@pytest.mark.parametrize(
    ("name", "where", "place", "times"),
    [
        pytest.param("dcp_ddp", single, "forward", 2, marks=pytest.mark.slow),
        ("dcp_ddp", shared, "backward", 1),
        pytest.param("dcp", single, "backward", 1, marks=pytest.mark.slow),
        ("dcp", shared, "embedding", 2),
        ("dcp_fsdp", single, "embedding", 1),
        pytest.param("dcp_fsdp", shared, "forward", 2, marks=pytest.mark.slow),
    ],
)
def test_an_iteration_is_repeated(
    world: World, name: str, where: Any, place: str, times: int
) -> None:
    planner = make_planner()
    results = world.run(train_short, name, planner, where=where, place=place, times=times)
    assert sum(r["num_raised"] for r in results) >= 2
    check_nothing_is_lost(results, name)
    (first, *_) = planner.epoch(0)
    again = results[0]["plans"][0]
    assert sorted(steps_of([first])[0]) == sorted(steps_of([again])[0]), "the same samples"
    assert again != first
    told = results[0]["warnings"]
    assert all(not result["warnings"] for result in results[1:])
    assert 1 <= len(told) <= 4 * times
    for word in ("iteration 0", "bucket [", "p=", "b=", "r=", "predicted", "planned again"):
        assert word in told[0]


def test_a_limit_that_is_held(world: World) -> None:
    """Long sequences really take more than their profile says, in every iteration."""
    limit_bytes = FIXED_BYTES + 150_000
    planner = make_planner(limit_bytes=limit_bytes, scale=2.0)
    results = world.run(
        train_short,
        "dcp_ddp",
        planner,
        model_class=Hungry,
        reliability={"enforce_memory_limit": True},
        planning={"memory_limit_bytes": limit_bytes},
        max_epochs=2,
    )
    check_nothing_is_lost(results, "dcp_ddp", num_epochs=2)
    told = results[0]["warnings"]
    assert told and " used" in told[0]
    assert len(told) <= 6, "the rest of the epoch, and the next, are planned with what was learnt"


def always(iteration: int, ids: Sequence[int], p: int, rank: int) -> bool:
    return iteration == 1 and 15 in ids


def test_the_end_where_nothing_takes_less(world: World) -> None:
    with pytest.raises(WorldFailure) as caught:
        world.run(train_short, "dcp_ddp", make_planner(), where=always, times=100)
    text = str(caught.value)
    for rank in range(4):
        own = text[text.index(f"--- rank {rank}") :]
        assert "one sample on 4 ranks with all blocks recomputed" in own.split("--- rank")[1]
    for word in ("iteration 1 of epoch 0", "p=4, b=1, r=3", "bytes predicted", "bucket [8, 16)"):
        assert word in text


def test_recovery_can_be_off() -> None:
    (plan, *_) = make_planner().epoch(0)
    shortages = Shortages(0, recovers=False, bucket_of=lambda _: (1, 8))
    state = IterationState(plan, reference_targets=1.0, started_s=0.0)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert shortages.concerns(error)
    with pytest.raises(RanOutOfMemory, match="recover_from_oom=True would repeat") as caught:
        shortages.note(error, state, 0, SPGroup(0, 1, 0, None), "forward", 1234)
    for word in ("iteration 0 of epoch 0", "rank 0", "bucket [1, 8)", "1,234 used", "2.00 GiB"):
        assert word in str(caught.value)
    assert not shortages.found


def test_one_of_a_group_alone(world: World) -> None:
    """The other is inside a collective: all end, soon, with the place."""
    with pytest.raises(WorldFailure) as caught:
        world.run(
            train_short_of_grace,
            "dcp_ddp",
            make_planner(),
            where=one_of_two,
            place="backward",
            times=1,
        )
    text = str(caught.value)
    for word in (
        "iteration 1 of epoch 0",
        "in the backward pass of micro-batch",
        "p=2, b=1",
        "are inside a collective",
        "bytes predicted",
    ):
        assert word in text


def train_short_of_grace(rank: int, *args: Any, **kwargs: Any) -> Any:
    from lightning_dcp.strategies import out_of_memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(out_of_memory, "GRACE_S", 0.5)
        return train_short(rank, *args, **kwargs)

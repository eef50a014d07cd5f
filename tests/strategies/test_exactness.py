"""The optimizer step equals that of a single process on the same samples.

4 real ranks under Lightning's Trainer, against plain PyTorch in one process; everything unequal: p,
b, number of micro-batches and recomputation differ by rank and iteration, groups are nested, ranks
idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch

from tests.strategies.hand_planned import NUM_BLOCKS, Watch, make_plans, train, wanted_of
from tests.strategies.toys import Sequences, largest_relative_error, pad, pad_hidden_labels
from tests.worlds import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=100) as world:
        yield world


def test_the_plans_are_as_unequal_as_they_should_be() -> None:
    first, second, third = make_plans(3)
    for plan in (first, second):
        assert {m.sp_size for m in plan.micro_batches} == {1, 2, 4}
        assert {m.recompute_blocks for m in plan.micro_batches} == {0, 1, 2, NUM_BLOCKS}
        assert [len(plan.for_rank(r)) for r in range(4)] == [3, 4, 5, 2]
        assert any(m.batch_size > 1 and m.num_tokens < m.padded_tokens for m in plan.micro_batches)
    assert [len(third.for_rank(r)) for r in range(4)] == [1, 2, 0, 0]


@pytest.mark.parametrize("name", ["dcp_ddp", "dcp", "dcp_fsdp"])
class TestExactness:
    def test_float64(self, world: World, name: str) -> None:
        wanted = wanted_of(3, name=name, double=True)
        for result in world.run(train, name, 3, double=True):
            assert largest_relative_error(result["gradients"][0], wanted.gradients[0]) <= 1e-12
            if name != "dcp":  # the master weights of ZeRO-1 are float32
                for step in (1, 2):
                    assert (
                        largest_relative_error(result["gradients"][step], wanted.gradients[step])
                        <= 1e-12
                    )
                assert largest_relative_error(result["parameters"], wanted.parameters) <= 1e-12
            assert result["losses"][0] == pytest.approx(wanted.losses[0], rel=1e-12)

    def test_targets_known_only_from_the_training_step(self, world: World, name: str) -> None:
        wanted = wanted_of(3, name=name, double=True)
        for result in world.run(
            train, name, 3, double=True, collate=pad_hidden_labels, report_targets=True
        ):
            assert largest_relative_error(result["gradients"][0], wanted.gradients[0]) <= 1e-12
            assert result["losses"][0] == pytest.approx(wanted.losses[0], rel=1e-12)
            assert result["logged"] == pytest.approx(result["losses"], rel=1e-6)

    def test_loss_averaged_over_samples(self, world: World, name: str) -> None:
        wanted = wanted_of(3, name=name, double=True, mean_over="samples")
        results = world.run(
            train, name, 3, double=True, loss_average="samples", mean_over="samples"
        )
        for result in results:
            assert largest_relative_error(result["gradients"][0], wanted.gradients[0]) <= 1e-12

    def test_a_wrong_weight_is_seen(self, world: World, name: str) -> None:
        """The comparison can fail: a token mean trained as if it were a sample mean is far off."""
        wanted = wanted_of(1, name=name, double=True)
        results = world.run(train, name, 1, double=True, loss_average="samples")
        assert largest_relative_error(results[0]["gradients"][0], wanted.gradients[0]) > 1e-2


@pytest.mark.parametrize(
    "name",
    [
        "dcp",
        pytest.param("dcp_ddp", marks=pytest.mark.slow),
        pytest.param("dcp_fsdp", marks=pytest.mark.slow),
    ],
)
def test_float32(world: World, name: str) -> None:
    wanted = wanted_of(20)
    results = world.run(train, name, 20)
    for result in results:
        assert result["global_step"] == 20
        for step in range(3):  # later ones differ by what the steps before have rounded
            assert (
                largest_relative_error(result["gradients"][step], wanted.gradients[step])
                <= 2e-6 * 4**step
            )
        assert largest_relative_error(result["parameters"], wanted.parameters) <= 1e-5
        assert result["losses"] == pytest.approx(wanted.losses, rel=1e-5)
        assert result["left_behind"] == []
        assert result["losses"] == results[0]["losses"], "the same on all ranks, idle ones too"


@pytest.mark.parametrize(
    "name", ["dcp", "dcp_fsdp", pytest.param("dcp_ddp", marks=pytest.mark.slow)]
)
def test_clipping_by_the_norm_one_process_sees(world: World, name: str) -> None:
    norms = [
        float(torch.stack([g.norm() for g in step.values()]).norm())
        for step in wanted_of(20).gradients
    ]
    clip = 0.5 * min(norms)
    wanted = wanted_of(20, clip)
    for result in world.run(train, name, 20, clip=clip):
        assert largest_relative_error(result["parameters"], wanted.parameters) <= 1e-5


def test_more_ranks_than_heads(world: World) -> None:
    """One head on 1, 2 and 4 ranks: attention goes in a ring."""
    wanted = wanted_of(3, double=True, num_heads=1)
    for result in world.run(train, "dcp_ddp", 3, double=True, num_heads=1):
        for step in range(3):
            assert (
                largest_relative_error(result["gradients"][step], wanted.gradients[step]) <= 1e-12
            )
        assert largest_relative_error(result["parameters"], wanted.parameters) <= 1e-12
        assert result["losses"] == pytest.approx(wanted.losses, rel=1e-12)


class WrapperCalled(Watch):
    """Calls the module through DDP with gradients on, as evaluation does while it is measured."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        strategy = trainer.strategy
        batch = pad([Sequences([5])[0]])
        batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        strategy._forward_redirection(strategy.model, pl_module, "losses", batch)


def test_a_forward_through_ddp_reduces_nothing(world: World) -> None:
    """Else ranks reduce within their first backward pass, which those without work do not have."""
    wanted = wanted_of(3, name="dcp_ddp", double=True)
    results = world.run(train, "dcp_ddp", 3, double=True, watch_class=WrapperCalled)
    for result in results:
        for step in range(3):
            assert (
                largest_relative_error(result["gradients"][step], wanted.gradients[step]) <= 1e-12
            )

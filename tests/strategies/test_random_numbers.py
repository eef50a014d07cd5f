"""Random numbers that a training step draws: alike where ranks compute the same, else unrelated."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_dcp.parallel import BlockRuntime, Topology, find_blocks, rng
from lightning_dcp.planning.options import PlanningOptions
from tests.strategies.hand_planned import LENGTHS, make_plans, train
from tests.strategies.toys import IGNORE, Sequences, ToyLM, largest_relative_error, pad
from tests.worlds import World

SEED = 5
CPU = torch.device("cpu")


class Diffusion(ToyLM):
    """Predicts the noise on embedded tokens; draws from all streams that there are."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.drop = nn.Dropout(0.2)  # outside of the blocks
        self.generators = nn.Module()
        self.generators.torch = torch.Generator().manual_seed(1)
        self.generators.numpy = np.random.default_rng(1)
        self.generators.python = random.Random(1)

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        x0 = self.embed(batch["ids"])
        noise = torch.randn_like(x0)
        t = torch.randint(1, 10, (len(x0), 1, 1)) / 10
        own = torch.rand(1, generator=self.generators.torch, dtype=x0.dtype)
        scale = 1 + np.random.rand() + random.random() + own  # noqa: NPY002
        scale = scale + self.generators.numpy.random() + self.generators.python.random()
        x = self.drop((1 - t) * x0 + t * scale * noise)
        positions = torch.zeros(x.shape[1], x.shape[2], dtype=x.dtype)
        for block in self.blocks:
            x = block(x, positions)
        error = (self.norm(x) - noise).square().mean(-1)
        return error[batch["labels"] != IGNORE]


class Outside(Diffusion):
    """Draws from a generator of which nobody can know."""

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        return super().losses(batch) * (1 + 0.1 * torch.rand(1, generator=_HIDDEN))


_HIDDEN = torch.Generator().manual_seed(0)


def one_process(num_steps: int) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Gradients and losses of the same steps, each micro-batch whole and with its own key."""
    model, dataset = Diffusion(num_blocks=3, double=True), Sequences(LENGTHS)
    optimizer = model.configure_optimizers()
    gradients, losses = [], []
    for plan in make_plans(num_steps):
        optimizer.zero_grad()
        total, count = torch.zeros((), dtype=torch.float64), 0
        for index, micro_batch in enumerate(plan.micro_batches):
            with rng.including(rng.generators_of(model)):
                rng.seed(CPU, (SEED, plan.epoch, plan.iteration, index))
                each = model.losses(pad([dataset[i] for i in micro_batch.sample_ids]))
            total, count = total + each.sum(), count + len(each)
        (total / count).backward()
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
        optimizer.step()
        losses.append(float(total / count))
    return gradients, losses


def attempt(rank: int, name: str) -> str:
    for _ in range(rank):  # as where ranks have run different numbers of micro-batches
        torch.rand(1, generator=_HIDDEN)
    try:
        train(rank, name, 1, double=True, model_class=Outside)
    except RuntimeError as error:
        return str(error)
    return "trained"


def draws(rank: int, num_draws: int) -> list[tuple[float, float]]:
    """Losses of one batch under many keys, dropout in the blocks too: over 4 ranks and over one."""
    topology = Topology(4, rank)
    topology.create_groups()
    model = Diffusion(num_blocks=2, dropout=0.2)
    runtime = BlockRuntime(find_blocks(model), topology)
    runtime.attach()
    dataset = Sequences([13, 9])
    batch = pad([dataset[0], dataset[1]])
    alone = topology.group(rank, 1)
    for length in (4, 6):
        with runtime.micro_batch(group=alone, observe=True):
            model.losses({"ids": torch.ones(1, length).long(), "labels": torch.ones(1, length)})
    found = []
    with torch.no_grad(), rng.including(rng.generators_of(model)):
        for key in range(num_draws):
            with runtime.micro_batch(group=topology.group(0, 4), rng_key=(1, key)):
                shared = float(model.losses(batch).mean())
            with runtime.micro_batch(group=alone, rng_key=(2, key)):
                found.append((shared, float(model.losses(batch).mean())))
    runtime.detach()
    return found


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=100) as world:
        yield world


@pytest.mark.parametrize("name", ["dcp_ddp", "dcp_fsdp"])
def test_a_diffusion_step_is_that_of_one_process(world: World, name: str) -> None:
    """With the same draws; recomputed blocks and unequal groups among them."""
    gradients, losses = one_process(3)
    options = {"planning": PlanningOptions(seed=SEED)}
    results = world.run(
        train, name, 3, double=True, model_class=Diffusion, strategy_options=options
    )
    for result in results:
        for got, wanted in zip(result["gradients"], gradients, strict=True):
            assert largest_relative_error(got, wanted) <= 1e-12
        assert result["losses"] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("name", ["dcp_ddp", "dcp"])
def test_ranks_that_draw_unlike_are_found_out(world: World, name: str) -> None:
    texts = world.run(attempt, name)
    assert len(set(texts)) == 1
    assert "Ranks 0 and 1 computed different losses" in texts[0]
    assert "number 0 of iteration 0 in epoch 0, samples" in texts[0]


def test_losses_are_equal_in_expectation(world: World) -> None:
    """A z-test of two means of 250 draws; the draws are fixed, so that it cannot fail by chance."""
    results = world.run(draws, 250)
    assert all([a for a, _ in r] == [a for a, _ in results[0]] for r in results)
    shared, alone = (np.array(column) for column in zip(*results[0], strict=True))
    assert len(set(shared)) == len(set(alone)) == 250
    z = (shared.mean() - alone.mean()) / math.sqrt((shared.var() + alone.var()) / 250)
    assert abs(z) < 2.6  # 1% of correct implementations have more
    assert 0.7 < shared.std() / alone.std() < 1.4

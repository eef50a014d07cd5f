"""Several stacks of blocks in one micro-batch: exact, each sharded and recomputed by itself."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dcp.parallel import BlockRuntime, SPGroup, Topology, find_stacks
from tests.parallel.models import worst_error
from tests.parallel.two_stacks import EncoderBlock, EncoderDecoder, VisionLanguage
from tests.worlds import World

ALONE = SPGroup(0, 1, 0, None)
MODELS = {
    "encoder-decoder": EncoderDecoder,
    "vision": VisionLanguage,
    "frozen vision": lambda: VisionLanguage(frozen=True),
    # The tower runs whole on each rank while the other stack is sharded.
    "whole vision": VisionLanguage,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[name]().double().train()


def observed(model: nn.Module, topology: Topology, lengths=(6, 9)) -> BlockRuntime:
    runtime = BlockRuntime(find_stacks(model), topology)
    runtime.attach()
    for length in lengths:
        with runtime.micro_batch(group=topology.group(topology.rank, 1), observe=True):
            model.loss(model.batch(3, length))
    return runtime


def gradients(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain.loss(batch).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def errors(rank: int, name: str) -> tuple[float, str]:
    """Worst of several p and r, orders of recomputation, and batches without images."""
    topology = Topology(dist.get_world_size(), rank)
    topology.create_groups()
    model = build(name)
    runtime = observed(model, topology)
    if name == "whole vision":
        runtime.stacks[1].whole_at = {2: "told so", 4: "told so"}
    worst = (0.0, "")
    # 7 tokens beside 7 patches: two ranks have as many tokens each as the tower has.
    cases = [(2, 13, True), (1, 4, True), (2, 8, False), (1, 7, True)]
    for case, (batch_size, length, images) in enumerate(cases):
        keywords = {} if name == "encoder-decoder" else {"images": images}
        batch = model.batch(batch_size, length, **keywords)
        runtime.detach()
        reference = gradients(model, batch)
        runtime.attach()
        runtime.recompute_order = (0, 1) if case % 2 else (1, 0)
        for p, r in [(1, 4), (2, 0), (2, 5), (4, 3)]:
            group = topology.group(rank - rank % p, p)
            model.zero_grad()
            with runtime.micro_batch(group=group, recompute_blocks=r):
                (model.loss(batch) / p).backward()
            # Parameters without a gradient in one process have none, or zeros, here.
            known = {
                n: torch.zeros_like(q) if reference[n] is None else reference[n]
                for n, q in model.named_parameters()
            }
            error, parameter = worst_error(model, known, group)
            worst = max(worst, (error, f"{parameter} at {p=} {r=} {length=} {images=}"))
    return worst


@pytest.fixture(scope="module")
def world():
    with World(4) as world:
        yield world


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_process(world, name):
    for error, where in world.run(errors, name):
        assert error <= 1e-12, where


class Interleaved(nn.Module):
    """One block of each kind in turns, as spatial and temporal ones are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.first = nn.ModuleList(EncoderBlock() for _ in range(3))
        self.second = nn.ModuleList(EncoderBlock() for _ in range(3))

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        x = self.embedding(batch["tokens"])
        for one, other in zip(self.first, self.second, strict=True):
            x = other(one(x))
        return x.square().mean()


def interleaved(rank: int) -> tuple[str, tuple[float, str]]:
    topology = Topology(4, rank)
    topology.create_groups()
    torch.manual_seed(3)
    model = Interleaved().double()
    runtime = BlockRuntime(find_stacks(model, ["first", "second"]), topology)
    runtime.attach()
    batches = [{"tokens": torch.arange(2 * n).view(2, n) % 11} for n in (8, 12)]
    for batch in batches:
        with runtime.micro_batch(group=topology.group(rank, 1), observe=True):
            model.loss(batch)
    group = topology.group(0, 4)
    with pytest.raises(RuntimeError) as error, runtime.micro_batch(group=group):
        model.loss(batches[0])
    # The tokens between the blocks of the first are shares, and so they are in its recomputation.
    runtime.stacks[1].whole_at = {4: "told so"}
    runtime.detach()
    reference = gradients(model, batches[0])
    runtime.attach()
    with runtime.micro_batch(group=group, recompute_blocks=5):
        (model.loss(batches[0]) / 4).backward()
    return str(error.value), worst_error(model, reference, group)


def test_stacks_that_run_in_turns(world):
    for text, (error, where) in world.run(interleaved):
        assert "first block of second ran between the blocks of another stack" in text
        assert "Name only one" in text
        assert error <= 1e-12, where


class TestSeveralStacks:
    @pytest.fixture
    def runtime(self) -> BlockRuntime:
        runtime = BlockRuntime(find_stacks(VisionLanguage((2, 3))), Topology(4, 0))
        runtime.attach()
        return runtime

    def test_r_goes_over_all_stacks_in_their_order(self, runtime):
        assert runtime.num_blocks == 5
        assert [runtime.recomputed_blocks(r) for r in (0, 2, 4, 5)] == [
            (0, 0), (2, 0), (3, 1), (3, 2),
        ]  # fmt: skip
        runtime.recompute_order = (1, 0)
        assert [runtime.recomputed_blocks(r) for r in (1, 3, 5)] == [(0, 1), (1, 2), (3, 2)]
        vision = runtime.stacks[1].stack.blocks
        assert runtime.blocks == (*vision, *runtime.stack.blocks)
        with pytest.raises(ValueError, match="is no order of 2 stacks"):
            runtime.recompute_order = (0,)
        with (
            pytest.raises(ValueError, match=r"layers and vision\.layers has 5 blocks"),
            runtime.micro_batch(group=ALONE, recompute_blocks=6),
        ):
            pass

    def test_each_stack_is_shortened(self, runtime):
        model = VisionLanguage((3, 4)).train()
        runtime.detach()
        runtime = BlockRuntime(find_stacks(model), Topology(1, 0))
        runtime.attach()
        with runtime.micro_batch(group=ALONE, active_blocks=2):
            model.loss(model.batch(2, 6)).backward()
        for stack in runtime.stacks:
            ran = [block.back.weight.grad is not None for block in stack.stack.blocks]
            assert ran == [True, True] + [False] * (len(stack) - 2)

    def test_left_out_stacks_are_the_models_again(self, runtime):
        vision = runtime.stacks[1].stack.blocks[0]
        assert "forward" in vars(vision)
        with pytest.raises(ValueError, match=r"stacks of blocks are layers and vision\.layers"):
            runtime.keep_stacks(["vision.layers"])  # the main one is never left out
        runtime.keep_stacks(["layers"])
        assert runtime.name == "layers"
        assert runtime.recompute_order == (0,)
        assert "forward" not in vars(vision)

    def test_sizes_that_one_stack_cannot_be_shared_by(self):
        runtime = observed(build("vision"), Topology(4, 0))
        runtime.stacks[1].whole_at = {2: "cannot be shared"}
        assert runtime.sp_size_exclusions([2, 4]) == {}
        assert runtime.whole_stacks(2) == {"vision.layers": "cannot be shared"}
        assert runtime.whole_stacks(4) == {}
        runtime.stacks[0].whole_at = {2: "not this one either"}
        assert runtime.sp_size_exclusions([2, 4]) == {2: "not this one either"}
        assert runtime.whole_stacks(2) == {}


class LayerDrop(Interleaved):
    """Inner blocks are skipped at random, by numbers that are drawn between the blocks."""

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        x = self.embedding(batch["tokens"])
        self.ran = []
        for index, block in enumerate([*self.first, *self.second]):
            inner = index % 3 == 1
            if not (inner and self.training and torch.rand(()) + random.random() < 1):
                x = block(x)
                self.ran.append(index)
        return x.square().mean()


def skipped_blocks(rank: int) -> tuple[list[list[int]], list[float]]:
    topology = Topology(2, rank)
    topology.create_groups()
    torch.manual_seed(3)
    model = LayerDrop().double()
    runtime = BlockRuntime(find_stacks(model, ["first", "second"]), topology)
    runtime.attach()
    batch = {"tokens": torch.arange(18).view(2, 9) % 11}
    with runtime.micro_batch(group=topology.group(rank, 1), observe=True):
        model.eval().loss(batch)
    model.train()
    ran, errors = [], []
    for key in range(6):
        losses = []
        for p in (1, 2):
            group = topology.group(rank - rank % p, p)
            with runtime.micro_batch(group=group, recompute_blocks=2, rng_key=(key,)):
                loss = model.loss(batch)
                loss.backward()
            ran.append(model.ran)
            losses.append(loss.item())
        errors.append(abs(losses[0] - losses[1]))
    return ran, errors


def test_ranks_skip_the_same_blocks():
    with World(2) as world:
        (ran, errors), (other, _) = world.run(skipped_blocks)
    assert ran == other
    assert len({tuple(blocks) for blocks in ran}) > 1
    assert all(error <= 1e-12 for error in errors)

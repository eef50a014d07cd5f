"""Profiles of models with several stacks of blocks; found stacks that turn out to be none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from lightning_dcp.parallel import BlockRuntime, Topology, find_stacks
from lightning_dcp.profiling.cost_profile import CostProfile
from lightning_dcp.profiling.memory_meter import MemoryMeter
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.profiling.profiler import profile_costs, recheck_sharding
from lightning_dcp.profiling.report import profile_table
from tests.parallel.two_stacks import (
    VISION_WIDTH,
    EncoderBlock,
    EncoderDecoder,
    VisionLanguage,
)
from tests.worlds import World

CPU = torch.device("cpu")
LENGTHS = np.arange(10, 120)
FAST = ProfilingOptions(budget_s=0.3, repeats=1)


def profile(
    model: nn.Module, topology: Topology | None = None, paths=None, **changes
) -> tuple[CostProfile, BlockRuntime]:
    topology = topology or Topology(1, 0)
    runtime = BlockRuntime(find_stacks(model, paths), topology)
    runtime.attach()
    arguments = {
        "step": model.loss,
        "module": model,
        "runtime": runtime,
        "make_batch": model.batch,
        "lengths": LENGTHS,
        "topology": topology,
        "options": FAST,
        "device": CPU,
        "fixed_bytes": 0,
        "sp_sizes": topology.sp_sizes,
    }
    return profile_costs(**(arguments | changes)), runtime


def held_bytes(model: nn.Module, runtime: BlockRuntime, b: int, s: int, r: int) -> int:
    """What all blocks really keep for the backward pass."""
    meter = MemoryMeter(model, runtime.blocks, CPU, 0)
    meter.start_iteration()
    group = runtime.topology.group(0, 1)
    with runtime.micro_batch(group=group, recompute_blocks=r), meter.forward((), r):
        model.loss(model.batch(b, s))
    return meter.peak_bytes


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(1)
    return EncoderDecoder((5, 3)).train()


@pytest.fixture(scope="module")
def result(model: nn.Module) -> tuple[CostProfile, BlockRuntime]:
    # The grid is finite and small: all of it is measured, on a busy machine too.
    options = ProfilingOptions(budget_s=30.0, repeats=1, lengths=(20, 50, 80))
    found, runtime = profile(model, options=options)
    # By bytes per second, which are near each other here.
    return dataclasses.replace(found, recompute_order=(0, 1)), runtime


class TestTwoStacks:
    def test_each_stack_is_measured(self, result) -> None:
        found, _ = result
        assert [(s.path, s.num_blocks) for s in found.stacks] == [
            ("encoder.block", 5),
            ("decoder.block", 3),
        ]
        assert found.num_blocks == 8
        assert all(stack.signature for stack in found.stacks)
        for m in found.measurements:
            encoder, decoder = m.stacks
            assert encoder.input_bytes == m.batch_size * m.seq_len * 16 * 4
            assert decoder.input_bytes == m.batch_size * (2 * m.seq_len // 3) * 16 * 4
            assert min(encoder.forward_s, decoder.forward_s) > 0
            assert min(encoder.backward_s, decoder.backward_s) > 0
            assert min(encoder.saved_bytes, decoder.saved_bytes) > 0

    def test_time_is_the_sum_over_stacks(self, result) -> None:
        found, _ = result
        costs, (m, *_) = found.cost_model(), found.measurements
        first, second = m.stacks
        at = (m.batch_size, m.seq_len, 1)
        whole = m.rest_s + sum(
            n * (stack.forward_s + stack.backward_s) for n, stack in ((5, first), (3, second))
        )
        assert float(costs.time_s(*at)) == pytest.approx(whole, rel=1e-6)
        again = 5 * first.forward_s + 3 * second.forward_s
        assert float(costs.time_s(*at, 8)) == pytest.approx(whole + again, rel=1e-6)

    @pytest.mark.parametrize("r", [0, 2, 6])
    def test_memory_is_what_the_whole_model_keeps(self, model, result, r: int) -> None:
        found, runtime = result
        costs = found.cost_model()
        runtime.load_observations(found)
        predicted = int(costs.memory_bytes(2, 50, 1, r))
        # One block of a stack that is recomputed as a whole is live while it runs again, which is
        # not yet so after the forward pass.
        full = [n for n, of in zip(runtime.recomputed_blocks(r), (5, 3), strict=True) if n == of]
        live = int(costs.saved_bytes(2, 50, 1)) if full else 0
        assert predicted - live == pytest.approx(held_bytes(model, runtime, 2, 50, r), rel=0.05)

    def test_through_json_and_in_the_report(self, result) -> None:
        found, _ = result
        again = CostProfile.from_json(found.to_json())
        assert again == found
        assert again.cost_model().to_json() == found.cost_model().to_json()
        table = profile_table(found)
        assert table.row_count == 2 * len(found.measurements)
        assert "5 of encoder.block, 3 of decoder.block" in str(table.caption)

    def test_a_cached_profile_sets_the_runtime_up(self, model, result) -> None:
        found, runtime = result
        runtime.detach()
        other = BlockRuntime(find_stacks(model), runtime.topology)
        other.load_observations(found)
        assert [s.signature for s in other.stacks] == [s.signature for s in runtime.stacks]
        assert other.recompute_order == found.recompute_order
        runtime.attach()


def test_a_frozen_tower_costs_its_forward_only() -> None:
    model = VisionLanguage((3, 4), frozen=True).train()
    found, _ = profile(model)
    assert [s.path for s in found.stacks] == ["layers", "vision.layers"]
    for m in found.measurements:
        (tower,) = m.others
        assert (tower.backward_s, tower.saved_bytes) == (0.0, 0.0)
        assert tower.forward_s > 0
        assert tower.input_bytes == m.batch_size * 7 * VISION_WIDTH * 4
        # Seven patches besides the text of each sample are not what is asked for.
        assert m.seq_len in LENGTHS
    assert found.recompute_order == (0, 1)
    costs = found.cost_model()
    # Recomputing it takes no time and frees nothing.
    assert costs.time_s(2, 50, 1, 7) == costs.time_s(2, 50, 1, 4)
    assert costs.memory_bytes(2, 50, 1, 7) == costs.memory_bytes(2, 50, 1, 4)


def test_a_stack_that_some_micro_batches_do_not_call() -> None:
    model = VisionLanguage((2, 3)).train()
    found, _ = profile(model, make_batch=lambda b, s: model.batch(b, s, images=b < 2))
    without = [m for m in found.measurements if m.batch_size > 1]
    assert without
    assert all(m.others[0].forward_s == 0 for m in without)
    assert all(m.others[0].forward_s > 0 for m in found.measurements if m.batch_size == 1)
    assert 0 < found.cost_model().time_s(2, 50, 1) < float("inf")


def test_named_stacks_that_are_never_called_are_an_error() -> None:
    model = VisionLanguage((1, 3)).train()
    arguments = {"paths": ["layers", "vision.layers"]}
    found, runtime = profile(model, **arguments)  # a named stack may have one block
    runtime.detach()
    assert [s.num_blocks for s in found.stacks] == [3, 1]
    with pytest.raises(RuntimeError, match=r"did not call the blocks of 'vision.layers' in any"):
        profile(model, make_batch=lambda b, s: model.batch(b, s, images=False), **arguments)


class Mixed(EncoderDecoder):
    """Runs that look like stacks and are none; the encoder is the only one that is."""

    def __init__(self, kind: str) -> None:
        super().__init__((4, 2))
        self.kind = kind
        self.extra = nn.ModuleList(
            {
                "heads": lambda: nn.Sequential(nn.Linear(16, 20), nn.GELU(), nn.Linear(20, 3)),
                "no attention": lambda: nn.Sequential(nn.Linear(16, 20), nn.Linear(20, 16)),
                "interleaved": EncoderBlock,
                "not called": EncoderBlock,
                "no hidden states": lambda: nn.ParameterList([nn.Parameter(torch.ones(64, 64))]),
            }[kind]()
            for _ in range(3)
        )
        del self.decoder

    def loss(self, batch):
        x = self.embedding(batch["tokens"])
        outputs = x.sum() * 0
        for i, block in enumerate(self.encoder.block):
            x = block(x)
            if i < 3 and self.kind == "interleaved":
                x = self.extra[i](x)
        for module in self.extra:
            if self.kind == "heads":
                outputs = outputs + module(x).unflatten(-1, (3, 1)).sum()
            elif self.kind == "no attention":
                x = module(x)
        return outputs + self.head(x).square().mean()


@pytest.mark.parametrize(
    "kind", ["heads", "no attention", "interleaved", "not called", "no hidden states"]
)
def test_found_stacks_that_are_none_are_left_to_the_model(kind: str) -> None:
    model = Mixed(kind).train()
    found, runtime = profile(model)
    assert [s.path for s in found.stacks] == ["encoder.block"]
    assert [s.path for s in runtime.stacks] == ["encoder.block"]
    assert all("forward" not in vars(module) for module in model.extra)
    if kind != "no hidden states":
        assert "extra" in [stack.path for stack in find_stacks(model)]
    # The next run finds the profile in the cache.
    runtime.detach()
    again = BlockRuntime(find_stacks(model), runtime.topology)
    again.load_observations(found)
    assert [s.path for s in again.stacks] == ["encoder.block"]


class Convolving(EncoderBlock):
    """Mixes neighbouring patches outside attention: sharded it computes something else."""

    def __init__(self) -> None:
        super().__init__(VISION_WIDTH, 2)
        self.convolution = nn.Conv1d(VISION_WIDTH, VISION_WIDTH, 3, padding=1)

    def forward(self, hidden_states):
        mixed = self.convolution(hidden_states.transpose(1, 2)).transpose(1, 2)
        return super().forward(hidden_states + mixed)


def profile_of_two_ranks(rank: int) -> tuple[CostProfile, CostProfile, dict[str, str]]:
    topology = Topology(2, rank)
    topology.create_groups()
    torch.manual_seed(1)
    model = VisionLanguage((2, 3), num_patches=8).train()
    model.vision.layers = nn.ModuleList(Convolving() for _ in range(2))
    found, runtime = profile(model, topology)
    again = recheck_sharding(
        found, step=model.loss, module=model, runtime=runtime, make_batch=model.batch,
        lengths=LENGTHS, topology=topology, device=CPU, compute_dtype=torch.float32,
        gather=lambda value: gathered(value),
    )  # fmt: skip
    return found, again, runtime.whole_stacks(2)


def gathered(value):
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def test_a_found_stack_that_cannot_be_shared_runs_whole() -> None:
    with World(2) as world:
        results = world.run(profile_of_two_ranks)
    for found, again, whole in results:
        assert found == results[0][0]
        assert {m.sp_size for m in found.measurements} == {1, 2}
        assert found.sp_size_exclusions == {}
        language, tower = found.stacks
        assert language.whole_at == {}
        assert "the model computes something else" in tower.whole_at[2]
        assert again == found
        assert list(whole) == ["vision.layers"]
        # All tokens of the tower on each rank, half of the others'.
        for m in found.measurements:
            assert m.others[0].input_bytes == m.batch_size * 8 * VISION_WIDTH * 4
            share = -(-(m.seq_len + 8) // m.sp_size)
            assert m.input_bytes == m.batch_size * share * 16 * 4

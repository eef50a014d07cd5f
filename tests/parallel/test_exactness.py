"""Gradients of sharded and recomputed micro-batches against one process, in real worlds."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_dcp.parallel import Topology
from tests.parallel.models import (
    Kind,
    build,
    make_batch,
    mean_loss,
    observed_runtime,
    reference_gradients,
    relative_error,
    worst_error,
)
from tests.worlds import World

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def gradient_error(
    rank: int,
    spec: Kind | dict[str, Any],
    sp_sizes: list[int],
    shapes: list[tuple[int, int]],
    dtype: torch.dtype = torch.float64,
    recompute_blocks: int = 0,
    in_thread: bool = False,
) -> tuple[float, str]:
    """Worst error over several SP sizes and (batch size, length)."""
    topology = Topology(dist.get_world_size(), rank)
    topology.create_groups()
    model = build(spec, dtype, num_blocks=3 if recompute_blocks else 2)
    runtime = observed_runtime(model, topology)
    worst = (0.0, "")
    for batch_size, length in shapes:
        batch = make_batch(length, batch_size, dtype)
        runtime.detach()
        reference = reference_gradients(model, batch)
        runtime.attach()
        for sp_size in sp_sizes:
            group = topology.group(rank - rank % sp_size, sp_size)
            model.zero_grad()
            with runtime.micro_batch(group=group, recompute_blocks=recompute_blocks):
                loss = mean_loss(model, batch) / sp_size
                if in_thread:  # as autograd's own threads do on CUDA
                    thread = threading.Thread(target=loss.backward)
                    thread.start()
                    thread.join()
                else:
                    loss.backward()
            error, name = worst_error(model, reference, group)
            worst = max(worst, (error, f"{name} at p={sp_size}, b={batch_size}, S={length}"))
    return worst


# S not divisible by p, S < p, b > 1, all lengths that the blocks have not been observed at
SHAPES = [(3, 13), (2, 3)]
KINDS = {
    "causal": Kind(),
    "bidirectional": Kind(causal=False),
    "padding mask": Kind(padding=True),
    "padding mask, bidirectional": Kind(padding=True, causal=False),
    "bias with heads": Kind(bias="heads"),
    "bias without heads": Kind(bias="plain"),
    "bias per sample": Kind(bias="batch"),
    "grouped queries": Kind(kv_heads=2),
    "one key head": Kind(kv_heads=1),
    "one key head, broadcast": Kind(kv_heads=1, gqa_flag=False, causal=False),
    "early import": Kind(call="early"),
    "explicit function": Kind(call="explicit"),
    "samples merged with heads": Kind(call="merged"),
    "checkpoint inside": Kind(own_checkpoint="inside"),
    "reentrant checkpoint inside": Kind(own_checkpoint="reentrant"),
    "checkpoint around": Kind(own_checkpoint="around"),
    "cross-attention": Kind(cross="mask"),
    "cross-attention, causal": Kind(cross="causal"),
    "cross-attention by torch's module": Kind(cross="mha"),
    "keywords and tuples": Kind(keywords=True),
    "sequence first": Kind(seq_first=True),
}
ENCODERS = {
    "encoder": {},
    "encoder, sequence first": {"batch_first": False},
    "encoder, causal": {"mask": "causal"},
    "encoder, padding": {"mask": "padding"},
    "encoder, both masks, sequence first": {"mask": "both", "batch_first": False},
    "attention weights asked for": {"own": "weights"},
    "no attention weights": {"own": "no_weights"},
}


@pytest.fixture(scope="module")
def world():
    with World(4) as world:
        yield world


class TestFourRanks:
    @pytest.mark.parametrize("name", [*KINDS, *ENCODERS])
    def test_gradients(self, world, name):
        spec = {**KINDS, **ENCODERS}[name]
        self.check(world.run(gradient_error, spec, [2, 4], SHAPES))

    def test_one_token_and_no_padding(self, world):
        self.check(world.run(gradient_error, Kind(), [2, 4], [(2, 1), (1, 16)]))

    @pytest.mark.parametrize("spec", [Kind(), Kind(kv_heads=2, padding=True), {"mask": "both"}])
    def test_gradients_float32(self, world, spec):
        self.check(world.run(gradient_error, spec, [4], SHAPES, torch.float32), torch.float32)

    @pytest.mark.parametrize("recompute_blocks", [1, 3])
    @pytest.mark.parametrize(
        "name",
        ["early import", "checkpoint inside", "checkpoint around", "cross-attention"],
    )
    def test_recomputed(self, world, name, recompute_blocks):
        self.check(
            world.run(
                gradient_error, KINDS[name], [2], SHAPES[:1], recompute_blocks=recompute_blocks
            )
        )

    @pytest.mark.parametrize(
        ("name", "recompute_blocks"),
        [("early import", 2), ("checkpoint inside", 0), ("checkpoint around", 0)],
    )
    def test_backward_in_another_thread(self, world, name, recompute_blocks):
        self.check(
            world.run(
                gradient_error,
                KINDS[name],
                [4],
                SHAPES[:1],
                recompute_blocks=recompute_blocks,
                in_thread=True,
            )
        )

    @staticmethod
    def check(errors: list[tuple[float, str]], dtype: torch.dtype = torch.float64) -> None:
        for error, where in errors:
            assert error <= TOLERANCE[dtype], where

    def test_unequal_micro_batches_and_nested_groups(self, world):
        """One iteration: p=4, then p=2 beside two p=1, with unequal counts and an idle rank."""
        self.check(world.run(iteration_error, 4, ITERATION))

    @pytest.mark.parametrize("sp_size", [1, 2, 4])
    def test_recomputation_is_bit_for_bit_equal(self, world, sp_size):
        """Also with dropout in blocks and attention, and numbers from random and numpy."""
        for equal in world.run(recomputation_is_equal, sp_size):
            assert equal


class TestThreeRanks:
    def test_world_of_no_power_of_two(self):
        with World(3) as world:
            plan = [(0, 2, 1, 9, 0), (2, 1, 2, 6, 1), (0, 1, 1, 5, 3), (1, 1, 3, 4, 0)]
            TestFourRanks.check(world.run(iteration_error, 3, plan))


# (first rank, p, b, S, r); rank 3 runs p=4 only, rank 0 all sizes
ITERATION = [
    (0, 4, 1, 30, 2),
    (0, 2, 2, 13, 0),
    (2, 1, 3, 7, 3),
    (0, 1, 1, 5, 0),
    (1, 1, 2, 6, 1),
    (0, 2, 1, 3, 3),
    (2, 1, 4, 2, 0),
]


def iteration_error(rank: int, world_size: int, micro_batches: list[Any]) -> tuple[float, str]:
    topology = Topology(world_size, rank)
    topology.create_groups()
    model = build(Kind(padding=True), num_blocks=3)
    runtime = observed_runtime(model, topology)
    batches = [make_batch(length, b, torch.float64) for _, _, b, length, _ in micro_batches]
    counts = [int((batch["labels"] != -100).sum()) for batch in batches]
    runtime.detach()
    reference: dict[str, torch.Tensor] = {}
    for batch, count in zip(batches, counts, strict=True):
        for name, gradient in reference_gradients(model, batch).items():
            reference[name] = reference.get(name, 0) + gradient * count / sum(counts)
    runtime.attach()
    for index, (first, p, _, _, r) in enumerate(micro_batches):
        if first <= rank < first + p:
            with runtime.micro_batch(
                group=topology.group(first, p), recompute_blocks=r, rng_key=(0, index)
            ):
                scale = counts[index] / sum(counts) / p
                (mean_loss(model, batches[index]) * scale).backward()
    worst = (0.0, "")
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        worst = max(worst, (relative_error(parameter.grad, reference[name]), name))
    return worst


def recomputation_is_equal(rank: int, sp_size: int) -> bool:
    topology = Topology(4, rank)
    topology.create_groups()
    group = topology.group(rank - rank % sp_size, sp_size)
    model = build(Kind(dropout=0.3), num_blocks=3)
    for block in model.blocks:
        block.register_forward_pre_hook(_jump)
        block.mlp.register_forward_pre_hook(_jump)
    runtime = observed_runtime(model, topology)
    batch = make_batch(13, 2, torch.float64)
    results = []
    for recompute_blocks in (0, 1, 3):
        model.zero_grad()
        with runtime.micro_batch(group=group, recompute_blocks=recompute_blocks, rng_key=(3,)):
            loss = mean_loss(model, batch)
            loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert len({r[0].item() for r in results}) == 1
    return all(
        torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True)
    )


def _jump(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
    """Scale the input by numbers from Python's and numpy's streams, as layer drop and such do."""
    return (args[0] * (1 + random.random() + np.random.random()), *args[1:])  # noqa: NPY002

"""Inside sharded regions: random numbers, refusals instead of wrong results, clean ends."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dcp.parallel import BlockRuntime, Topology, attention, find_blocks, region
from lightning_dcp.parallel.region import choose_local_length
from tests.parallel.models import (
    HEADS,
    WIDTH,
    Block,
    Kind,
    build,
    make_batch,
    mean_loss,
    observed_runtime,
    reference_gradients,
    worst_error,
)
from tests.worlds import World


@pytest.fixture(scope="module")
def world():
    with World(4) as world:
        yield world


def world_topology(rank: int) -> Topology:
    topology = Topology(dist.get_world_size(), rank)
    topology.create_groups()
    return topology


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), np.random.random()]  # noqa: NPY002


class Drawing(nn.Module):
    """Draws in every block and keeps what it drew, recomputations too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drawn: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(draw())
        q = self.linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        return x + self.linear(out)


def random_numbers(rank: int, sp_size: int) -> dict[str, Any]:
    topology = world_topology(rank)
    torch.manual_seed(rank)  # the outer streams differ
    model = nn.Sequential(*(Drawing() for _ in range(3)))
    runtime = BlockRuntime(find_blocks(model), topology, sequence_dims={"x": 1})
    runtime.attach()
    outer = torch.get_rng_state()
    x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(0))
    group = topology.group(rank - rank % sp_size, sp_size)
    with runtime.micro_batch(group=group, recompute_blocks=2, rng_key=(5, group.first_rank)):
        before = draw()
        y = model(x)
        after = draw()
        y.sum().backward()
        late = draw()
    assert torch.equal(torch.get_rng_state(), outer)
    return {
        "before": before,
        "blocks": [block.drawn[0] for block in model],
        "again": [block.drawn[1:] for block in model],
        "after": after,
        "late": late,
    }


def all_differ(*draws: list[float]) -> bool:
    return all(len(set(numbers)) == len(draws) for numbers in zip(*draws, strict=True))


class TestRandomNumbers:
    def test_replicated_and_sharded_streams(self, world):
        ranks = world.run(random_numbers, 2)
        for one, other in [ranks[:2], ranks[2:]]:
            for name in ("before", "after", "late"):
                assert one[name] == other[name]
            assert all_differ(*one["blocks"], *other["blocks"])
        assert all_differ(ranks[0]["before"], ranks[2]["before"])  # groups have their own keys
        assert all_differ(*(rank["blocks"][0] for rank in ranks))

    def test_replay(self, world):
        for rank in world.run(random_numbers, 4):
            assert rank["again"][:2] == [[rank["blocks"][0]], [rank["blocks"][1]]]
            assert rank["again"][2] == []

    def test_replicated_stream_goes_on_as_if_blocks_drew_nothing(self, world):
        sharded = world.run(random_numbers, 4)[0]
        assert all_differ(sharded["before"], sharded["after"], sharded["late"])
        plain = world.run(replicated_stream)[0]
        assert [sharded["before"], sharded["after"], sharded["late"]] == plain

    def test_one_rank_has_one_stream(self, world):
        rank = world.run(random_numbers, 1)[0]
        assert [rank["before"], *rank["blocks"], rank["after"]] == world.run(stream_of_one)[0]


def replicated_stream(rank: int) -> list[list[float]]:
    runtime = observed_runtime(build(Kind()), world_topology(rank))
    with runtime.micro_batch(group=runtime.topology.group(0, 4), rng_key=(5, 0)):
        return [draw() for _ in range(3)]


def stream_of_one(rank: int) -> list[list[float]]:
    runtime = observed_runtime(build(Kind()), world_topology(rank))
    with runtime.micro_batch(group=runtime.topology.group(rank, 1), rng_key=(5, rank)):
        return [draw() for _ in range(5)]


# ------------------------------------------------------------------ refusals


class Odd(nn.Module):
    """A block that attends in a way which cannot be sharded (or is wrong), by name."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Parameter(torch.randn(1, HEADS, 3, WIDTH // HEADS))
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=True)
        self.weights = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.way == "bias_kv":
            return x + self.attn(x, x, x, need_weights=False)[0]
        if self.way == "uses weights":
            return x + self.weights(x, x, x)[1].sum()
        q = self.linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, causal = q, False
        gqa: dict[str, bool] = {}
        if self.way == "added keys":
            k = torch.cat([self.extra.expand(len(x), -1, -1, -1), k], 2)
        elif self.way == "windows":
            q = k = q.unflatten(2, (-1, 2)).transpose(1, 2).flatten(0, 1)
        elif self.way == "latents":
            q = self.extra.expand(len(x), -1, -1, -1)
        elif self.way == "own mask":
            mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        elif self.way == "no heads":
            q = k = x[0]
        elif self.way == "three heads of keys":
            k, gqa = q[:, :3], {"enable_gqa": True}
        out = F.scaled_dot_product_attention(q, k, k, mask, is_causal=causal, **gqa)
        if out.shape != x.unflatten(-1, (HEADS, -1)).transpose(1, 2).shape:
            return x
        return x + out.transpose(1, 2).flatten(2)


def refusal(rank: int, way: str, length: int, **block_arguments: Tensor) -> None:
    topology = world_topology(rank)
    model = nn.ModuleList([Odd(way), Odd(way)])
    runtime = BlockRuntime(find_blocks(model, ""), topology, sequence_dims={"x": 1})
    runtime.attach()
    x = torch.randn(2, length, WIDTH)
    before = torch.get_rng_state()
    try:
        with runtime.micro_batch(group=topology.group(rank - rank % 2, 2)):
            for block in model:
                x = block(x, **block_arguments)
    finally:
        assert torch.equal(torch.get_rng_state(), before)


REFUSALS = {
    "added keys": "4 queries to 7 keys inside sharded blocks: each of the 2 ranks has 4 of 8",
    "windows": "2 queries to 2 keys",
    "latents": "3 queries to 4 keys",
    "own mask": r"mask of shape \(4, 4\).*must be those of the whole sequence, \(..., 8 or 1, 8\)",
    "no heads": "needs a dimension of heads",
    "three heads of keys": r"attention of 4 heads cannot share keys and values of 3 and 3",
    "bias_kv": "with bias_k inside sharded blocks",
    "uses weights": "attention weights that nn.MultiheadAttention returns are not available",
}


def expect_refusal(rank: int, way: str, message: str) -> None:
    functions = F.scaled_dot_product_attention, F.multi_head_attention_forward
    with pytest.raises((ValueError, RuntimeError), match=message):
        refusal(rank, way, 8)
    assert (F.scaled_dot_product_attention, F.multi_head_attention_forward) == functions
    assert region.active() is None
    assert torch.overrides._get_current_function_mode_stack() == []


def masks(rank: int, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refusal(rank, "plain", 8, mask=torch.ones(shape, dtype=torch.bool))


class TestRefusals:
    @pytest.mark.parametrize("way", REFUSALS)
    def test_rather_an_error_than_a_wrong_result(self, world, way):
        world.run(expect_refusal, way, REFUSALS[way])

    def test_wrong_masks(self, world):
        world.run(masks, (9, 8), r"mask of shape \(9, 8\)")
        world.run(masks, (3, 8, 8), "3 in its dimension of heads, the query has 4")

    def test_wrong_sequence_dimension(self, world):
        world.run(wrong_dimension)

    def test_skipped_blocks(self, world):
        world.run(skipped_blocks)

    def test_an_error_in_a_block_leaves_all_clean(self, world):
        world.run(error_in_a_block)


def wrong_dimension(rank: int) -> None:
    topology = world_topology(rank)
    model = build(Kind())
    runtime = BlockRuntime(find_blocks(model), topology, sequence_dims={"hidden_states": 0})
    runtime.attach()
    with (
        pytest.raises(ValueError, match=r"8 queries to 8 keys .* name it in `sequence_dims`"),
        runtime.micro_batch(group=topology.group(0, 4)),
    ):
        mean_loss(model, make_batch(8, 5, torch.float64))


def skipped_blocks(rank: int) -> None:
    topology = world_topology(rank)
    model = build(Kind())
    runtime = observed_runtime(model, topology)
    group = topology.group(0, 4)
    first, last = model.blocks
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    rotary = torch.ones(8, 2), torch.zeros(8, 2)
    rotary = tuple(t.double() for t in rotary)
    with (
        pytest.raises(RuntimeError, match="the last one did not: the hidden states were never"),
        runtime.micro_batch(group=group),
    ):
        first(x, rotary)
    with (
        pytest.raises(RuntimeError, match="ran again before the last one had run"),
        runtime.micro_batch(group=group),
    ):
        first(first(x, rotary), rotary)
    with (
        pytest.raises(
            RuntimeError, match="block 1 of blocks got 8 tokens, but the first block has"
        ),
        runtime.micro_batch(group=group),
    ):
        last(x, rotary)
    with (
        pytest.raises(
            RuntimeError, match="block 1 of blocks got 1 tokens, but each rank has 2 of 8"
        ),
        runtime.micro_batch(group=group),
    ):
        last(first(x, rotary)[:, :1], rotary)
    # An error that is being handled is not hidden by a pass that is still open.
    open_contexts = contextlib.ExitStack()
    open_contexts.enter_context(runtime.micro_batch(group=group))
    try:
        first(x, rotary)
        raise KeyError
    except KeyError:
        open_contexts.close()
    assert region.active() is None


def error_in_a_block(rank: int) -> None:
    """In the forward and in a recomputation; then the same runtime works as ever."""
    topology = world_topology(rank)
    model = build(Kind(), num_blocks=3)
    runtime = observed_runtime(model, topology)
    batch = make_batch(9, 2, torch.float64)
    group = topology.group(0, 4)
    calls = 0

    def fail(at: int) -> Any:
        def hook(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise KeyError("in the block")

        return model.blocks[1].mlp.register_forward_pre_hook(hook)

    before = torch.get_rng_state(), F.scaled_dot_product_attention
    for at in (1, 2):
        calls = 0
        handle = fail(at)
        with (
            pytest.raises(KeyError, match="in the block"),
            runtime.micro_batch(group=group, recompute_blocks=2),
        ):
            mean_loss(model, batch).backward()
        assert calls == at
        handle.remove()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert F.scaled_dot_product_attention is before[1]
        assert region.active() is None
        assert torch.overrides._get_current_function_mode_stack() == []
    runtime.detach()
    reference = reference_gradients(model, batch)
    runtime.attach()
    model.zero_grad()
    calls = 0
    handle = fail(1)
    with runtime.micro_batch(group=group):
        replicated = torch.get_rng_state()
        with pytest.raises(KeyError):
            mean_loss(model, batch)
        assert torch.equal(torch.get_rng_state(), replicated)
        (mean_loss(model, batch) / 4).backward()  # tried again in the same micro-batch
    handle.remove()
    assert worst_error(model, reference, group)[0] < 1e-12


# ------------------------------------------------------------------ lengths


@pytest.mark.parametrize(
    ("length", "sp_size", "taken", "expected"),
    [(16, 4, set(), 4), (13, 4, set(), 4), (3, 4, set(), 2), (1, 2, set(), 2), (16, 4, {4, 5}, 6)],
)
def test_local_length_tells_what_a_tensor_is(length, sp_size, taken, expected):
    local = choose_local_length(length, sp_size, taken)
    assert local == expected
    assert local * sp_size >= length


def condition_as_long_as(rank: int, length: int) -> tuple[float, str]:
    """A condition of 5 tokens beside S tokens: S/p == 5, and S == 5."""
    topology = world_topology(rank)
    model = build(Kind(cross="mask"))
    runtime = observed_runtime(model, topology)
    batch = make_batch(length, 2, torch.float64)
    runtime.detach()
    reference = reference_gradients(model, batch)
    runtime.attach()
    model.zero_grad()
    group = topology.group(0, 4)
    with runtime.micro_batch(group=group):
        (mean_loss(model, batch) / 4).backward()
    return worst_error(model, reference, group)


@pytest.mark.parametrize("length", [20, 5, 4])
def test_condition_of_the_same_length(world, length):
    for error, parameter in world.run(condition_as_long_as, length):
        assert error <= 1e-12, parameter


def two_passes(rank: int, kind: Kind, lengths: tuple[int, int], r: int) -> tuple[float, str]:
    """The model runs twice in one micro-batch."""
    topology = world_topology(rank)
    model = build(kind)
    runtime = observed_runtime(model, topology)
    batches = [make_batch(length, 2, torch.float64) for length in lengths]
    runtime.detach()
    reference = reference_gradients(model, batches[0])
    for name, gradient in reference_gradients(model, batches[1]).items():
        reference[name] = reference[name] + gradient
    runtime.attach()
    model.zero_grad()
    group = topology.group(rank - rank % 2, 2)
    with runtime.micro_batch(group=group, recompute_blocks=r):
        sum(mean_loss(model, batch) / 2 for batch in batches).backward()
    return worst_error(model, reference, group)


@pytest.mark.parametrize(
    ("kind", "lengths", "recompute_blocks"),
    [
        (Kind(own_checkpoint="around"), (13, 9), 0),
        (Kind(causal=False), (13, 14), 2),  # both have 7 tokens per rank
    ],
)
def test_two_passes_in_one_micro_batch(world, kind, lengths, recompute_blocks):
    for error, parameter in world.run(two_passes, kind, lengths, recompute_blocks):
        assert error <= 1e-12, parameter


def no_own_checkpoint_ambiguity(rank: int) -> None:
    """Passes of 13 and 14 tokens have 7 tokens per rank each: a repetition cannot be told apart."""
    topology = world_topology(rank)
    model = build(Kind(own_checkpoint="inside"))
    runtime = observed_runtime(model, topology)
    with (
        pytest.raises(RuntimeError, match=r"as have passes of \[13, 14\] tokens"),
        runtime.micro_batch(group=topology.group(rank - rank % 2, 2)),
    ):
        sum(mean_loss(model, make_batch(n, 2, torch.float64)) for n in (13, 14)).backward()


def test_passes_that_cannot_be_told_apart(world):
    world.run(no_own_checkpoint_ambiguity)


class Around(nn.Module):
    """Attention outside the blocks stays whole, whatever its length."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block(Kind()) for _ in range(2))
        self.outside = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, weights = self.outside(x, x, x)
        for block in self.inner:
            x = block(x, rotary)
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return attention(q, q, q, is_causal=True), weights


def attention_outside(rank: int) -> bool:
    topology = world_topology(rank)
    torch.manual_seed(0)
    model = Around().double()
    runtime = BlockRuntime(find_blocks(model), topology, sequence_dims={0: 1, "rotary": 0})
    runtime.attach()
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    rotary = (torch.rand(8, 2, dtype=torch.float64), torch.rand(8, 2, dtype=torch.float64))
    plain, weights = model(x, rotary)
    with runtime.micro_batch(group=topology.group(0, 4)):
        sharded, sharded_weights = model(x, rotary)
    torch.testing.assert_close(sharded, plain, rtol=1e-12, atol=1e-12)
    return torch.equal(weights, sharded_weights)


def test_attention_outside_the_blocks(world):
    assert all(world.run(attention_outside))


def shortened(rank: int) -> None:
    """Blocks that are passed over under sharding: the profile's runs."""
    topology = world_topology(rank)
    model = build(Kind(), num_blocks=4)
    short = copy.deepcopy(model)
    del short.blocks[2:]
    runtime = observed_runtime(model, topology)
    batch = make_batch(9, 2, torch.float64)
    reference = reference_gradients(short, batch)
    group = topology.group(0, 4)
    with runtime.micro_batch(group=group, active_blocks=2, recompute_blocks=1):
        (mean_loss(model, batch) / 4).backward()
    assert all(p.grad is None for p in model.blocks[2:].parameters())
    del model.blocks[2:]
    assert worst_error(model, reference, group)[0] < 1e-12


def test_shortened_stack(world):
    world.run(shortened)


def autocast(rank: int) -> tuple[float, str]:
    topology = world_topology(rank)
    model = build(Kind(kv_heads=2), torch.float32)
    runtime = observed_runtime(model, topology)
    batch = make_batch(13, 2, torch.float32)
    group = topology.group(0, 4)
    runtime.detach()
    with torch.autocast("cpu", torch.bfloat16):
        reference = reference_gradients(model, batch)
    runtime.attach()
    model.zero_grad()
    with runtime.micro_batch(group=group, recompute_blocks=1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean_loss(model, batch) / 4
        loss.backward()
    return worst_error(model, reference, group)


def test_mixed_precision(world):
    """As close as the coarse type lets it be; keys and queries may come in different types."""
    for error, parameter in world.run(autocast):
        assert error <= 0.05, parameter


def compiled(rank: int) -> tuple[float, str]:
    topology = world_topology(rank)
    model = build(Kind())
    batch = make_batch(13, 2, torch.float64)
    reference = reference_gradients(model, batch)
    for block in model.blocks:
        block.compile(backend="eager")
    runtime = observed_runtime(model, topology)
    group = topology.group(rank - rank % 2, 2)
    with runtime.micro_batch(group=group, recompute_blocks=1):
        (mean_loss(model, batch) / 2).backward()
    return worst_error(model, reference, group)


@pytest.mark.slow
def test_compiled_blocks(world):
    for error, parameter in world.run(compiled):
        assert error <= 1e-12, parameter

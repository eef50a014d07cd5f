"""Attention of more ranks than heads, in real worlds, against one process."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dcp.parallel import Topology, ring
from lightning_dcp.parallel.attention_spec import AttentionSpec
from lightning_dcp.parallel.collectives import gather_sequence, slice_sequence
from lightning_dcp.parallel.heads import HeadSplit, share_heads, split_heads
from lightning_dcp.parallel.kernels import dot_product_attention
from lightning_dcp.parallel.region import ShardedPass, choose_local_length
from lightning_dcp.parallel.ring_layout import ring_layout
from lightning_dcp.parallel.topology import SPGroup
from lightning_dcp.parallel.ulysses import attend_over_ranks
from tests.parallel.models import (
    VOCABULARY,
    make_batch,
    mean_loss,
    observed_runtime,
    reference_gradients,
    relative_error,
    worst_error,
)
from tests.worlds import World, WorldFailure

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
HEADS = [(1, 1), (2, 1), (2, 2), (3, 3), (6, 3), (6, 2), (4, 4)]


@pytest.fixture(scope="module")
def world():
    with World(4) as world:
        yield world


# ---------------------------------------------------------------------- single calls


@dataclasses.dataclass(frozen=True)
class Case:
    heads: tuple[int, int]
    length: int = 13
    causal: bool = False
    mask: str | None = None  # padding | dead rows | bias of a head | bias | bias of keys
    softcap: float | None = None
    scale: float | None = None
    segments: tuple[int, ...] | None = None
    dims: int = 4
    value_size: int = 4


def whole_inputs(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], AttentionSpec]:
    generator = torch.Generator().manual_seed(3)
    (heads, kv_heads), length, batch = case.heads, case.length, 2
    shapes = [
        (batch, heads, length, 4),
        (batch, kv_heads, length, 4),
        (batch, kv_heads, length, case.value_size),
    ]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    if case.dims == 3:
        tensors = [tensor.flatten(0, 1) for tensor in tensors]
    mask = None
    if case.mask == "padding":
        lengths = torch.tensor([length, max(1, length - 3)])
        mask = (torch.arange(length) < lengths[:, None])[:, None, None, :]
    elif case.mask == "dead rows":
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mask[length // 2] = False
    elif case.mask is not None:
        shape = {"bias of a head": (heads, length, length), "bias": (length, length)}.get(
            case.mask, (batch, 1, 1, length)
        )
        mask = torch.randn(shape, generator=generator, dtype=torch.float64)
    leaves = [t.to(dtype).requires_grad_() for t in tensors]
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype).requires_grad_()
        leaves.append(mask)
    return leaves, AttentionSpec(
        attn_mask=mask,
        is_causal=case.causal,
        scale=case.scale,
        enable_gqa=heads != kv_heads,
        softcap=case.softcap,
        segments=case.segments,
    )


def sharded_call(tensors: list[Tensor], spec: AttentionSpec, group: SPGroup, length: int) -> Tensor:
    local = choose_local_length(length, group.size, set())
    shard = ShardedPass(group, length, local)
    own = [slice_sequence(t, t.dim() - 2, group, local) for t in tensors[:3]]
    out = attend_over_ranks(shard, *own, spec)
    return gather_sequence(out, out.dim() - 2, group, length)


def call_error(
    rank: int, cases: list[Case], sp_sizes: list[int], dtype: torch.dtype = torch.float64
) -> tuple[float, str]:
    """Worst error of output and gradients."""
    topology = Topology(4, rank)
    topology.create_groups()
    worst = (0.0, "")
    for case, p in itertools.product(cases, sp_sizes):
        group = topology.group(rank - rank % p, p)
        tensors, spec = whole_inputs(case, dtype)
        expected = dot_product_attention(*tensors[:3], spec)
        weights = torch.linspace(-1, 1, expected.numel(), dtype=dtype).view_as(expected)
        wanted = torch.autograd.grad((expected * weights).sum(), tensors)
        out = sharded_call(tensors, spec, group, case.length)
        found = torch.autograd.grad((out * weights).sum() / p, tensors)
        worst = max(worst, (relative_error(out, expected), f"output of {case}, p={p}"))
        for gradient, reference in zip(found, wanted, strict=True):
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=group.process_group)
            worst = max(worst, (relative_error(gradient, reference), f"gradient {case}, p={p}"))
    return worst


def check(errors: list[tuple[float, str]], dtype: torch.dtype = torch.float64) -> None:
    for error, where in errors:
        assert error <= TOLERANCE[dtype], where


class TestCalls:
    @pytest.mark.parametrize("causal", [True, False])
    def test_heads(self, world, causal):
        cases = [Case(heads, causal=causal) for heads in HEADS]
        check(world.run(call_error, cases, [2, 4]))

    @pytest.mark.parametrize(
        "mask", ["padding", "dead rows", "bias of a head", "bias", "bias of keys"]
    )
    def test_masks(self, world, mask):
        check(world.run(call_error, [Case(h, mask=mask) for h in [(1, 1), (6, 2)]], [2, 4]))

    @pytest.mark.parametrize("length", [1, 2, 3, 5, 16])
    def test_lengths(self, world, length):
        cases = [
            Case((heads, heads), length, causal) for heads in (1, 2) for causal in (True, False)
        ]
        check(world.run(call_error, cases, [2, 4]))

    def test_packed_samples(self, world):
        cases = [
            Case(heads, causal=causal, segments=segments)
            for heads in [(1, 1), (2, 1)]
            for causal in (True, False)
            for segments in [(5, 1, 7), (13,), (2,) * 6 + (1,)]
        ]
        check(world.run(call_error, cases, [4]))

    def test_caps_scales_and_shapes(self, world):
        cases = [
            Case((1, 1), causal=True, softcap=0.7),
            Case((2, 2), softcap=0.7, scale=0.9, mask="bias"),
            Case((3, 3), causal=True, scale=0.3),
            Case((2, 2), value_size=3, causal=True),
            Case((3, 3), dims=3, causal=True),
        ]
        check(world.run(call_error, cases, [4]))

    def test_float32(self, world):
        cases = [Case((2, 1), causal=True), Case((3, 3)), Case((1, 1), mask="bias")]
        check(world.run(call_error, cases, [4], torch.float32), torch.float32)


# ---------------------------------------------------------------------- dropout, disturbances


def dropped(rank: int) -> tuple[float, float, bool]:
    """Error of the mean over seeds, its expected size, and whether a replay is bitwise equal."""
    topology = Topology(4, rank)
    topology.create_groups()
    group = topology.group(0, 4)
    tensors, spec = whole_inputs(Case((2, 1), causal=True), torch.float64)
    expected = dot_product_attention(*tensors[:3], spec)
    spec = dataclasses.replace(spec, dropout_p=0.2)
    outs = []
    with torch.no_grad():
        for seed in range(60):
            torch.manual_seed(1000 * seed + rank)
            outs.append(sharded_call(tensors, spec, group, 13))
    found = torch.stack(outs)
    noise = found.std(0) / len(outs) ** 0.5
    error = ((found.mean(0) - expected).abs() / noise.clamp(min=1e-9)).square().mean().sqrt()
    gradients = []
    for recomputed in (False, True):
        torch.manual_seed(7 + rank)

        def run() -> Tensor:
            return sharded_call(tensors, spec, group, 13)

        out = checkpoint(run, use_reentrant=False) if recomputed else run()
        gradients.append(torch.autograd.grad(out.square().sum(), tensors))
    equal = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    # The gradient is that of the very masks of the forward: along a direction by differences.
    step = 1e-6
    values = []
    for sign in (1, -1):
        torch.manual_seed(7 + rank)
        moved = [t.detach() + sign * step * torch.ones_like(t) * (t > 0) for t in tensors]
        values.append(float(sharded_call(moved, spec, group, 13).square().sum()))
    slope = (values[0] - values[1]) / (2 * step)
    claimed = torch.stack(
        [(g * (t > 0)).sum() for g, t in zip(gradients[0], tensors, strict=True)]
    ).sum()
    dist.all_reduce(claimed)
    return float(error), abs(float(claimed) / 4 / slope - 1), equal


def disturbed(rank: int) -> tuple[float, str]:
    """Members arrive at different times; groups one within the other, one after another."""
    worst = (0.0, "")
    for round_ in range(3):
        time.sleep(0.15 * ((rank + round_) % 3))
        cases = [Case((1, 1), causal=True), Case((2, 1))]
        worst = max(worst, call_error(rank, cases, [2, 4, 2]))
    return worst


def failing(rank: int) -> None:
    topology = Topology(4, rank)
    topology.create_groups()
    tensors, spec = whole_inputs(Case((1, 1), causal=True), torch.float64)
    if rank == 2:

        def broken(*args: Any) -> Any:
            raise ArithmeticError("a kernel failed")

        ring.attend_chunk = broken
    sharded_call(tensors, spec, topology.group(0, 4), 13)
    raise AssertionError(f"rank {rank} has a value")


class TestDropoutAndDisturbances:
    def test_dropout(self, world):
        for error, gradient_error, equal in world.run(dropped):
            assert 0.6 < error < 1.5  # in standard errors of the mean
            assert gradient_error < 1e-6
            assert equal

    def test_unequal_arrival_and_nested_groups(self, world):
        check(world.run(disturbed))

    def test_a_failing_member_gives_no_values(self):
        with World(4, timeout_s=15) as world, pytest.raises(WorldFailure) as failure:
            world.run(failing)
        assert "a kernel failed" in str(failure.value)
        assert "has a value" not in str(failure.value)


# ---------------------------------------------------------------------- whole models


class Layer(nn.Module):
    def __init__(self, heads: int, kv_heads: int, way: str) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.way = heads, kv_heads, way
        self.norm = nn.LayerNorm(12)
        self.qkv = nn.Linear(12, (heads + 2 * kv_heads) * 4)
        self.out = nn.Linear(heads * 4, 12)
        self.cross = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        h = self.norm(x)
        if self.way == "mha":
            return x + self.cross(h, h, h, need_weights=False)[0]
        if self.way == "checkpoint":
            x = x + checkpoint(self.attend, h, use_reentrant=False)
        else:
            x = x + self.attend(h)
        if self.way == "cross":
            x = x + self.cross(x, context, context, need_weights=False)[0]
        return x

    def attend(self, h: Tensor) -> Tensor:
        sizes = [self.heads * 4, self.kv_heads * 4, self.kv_heads * 4]
        q, k, v = (
            part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(h).split(sizes, -1)
        )
        dropout = 0.3 if self.way == "dropout" else 0.0
        gqa = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=gqa
        )
        return self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, heads: tuple[int, int], way: str = "plain") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.context = nn.Linear(3, 12)
        self.blocks = nn.ModuleList(Layer(*heads, way) for _ in range(2))
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor, lengths: Tensor, condition: Tensor) -> Tensor:
        x, context = self.embedding(tokens), self.context(condition)
        for block in self.blocks:
            x = block(x, context)
        return self.head(x)


MODELS = {
    "one head": ((1, 1), "plain", 0),
    "one head, recomputed": ((1, 1), "plain", 2),
    "hybrid, recomputed": ((2, 1), "plain", 1),
    "own checkpoint": ((2, 1), "checkpoint", 0),
    "cross-attention": ((1, 1), "cross", 0),
    "torch's module of three heads": ((3, 3), "mha", 0),
}


def model_error(rank: int, heads: tuple[int, int], way: str, r: int) -> tuple[float, str]:
    topology = Topology(4, rank)
    topology.create_groups()
    torch.manual_seed(7)
    model = Model(heads, way).double()
    runtime = observed_runtime(model, topology)
    assert runtime.sp_size_exclusions([1, 2, 4]) == {}
    batch = make_batch(13, 2, torch.float64)
    runtime.detach()
    plain = reference_gradients(model, batch)
    names = [name for name, gradient in plain.items() if gradient is not None]
    runtime.attach()
    worst = (0.0, "")
    for p in (2, 4):
        group = topology.group(rank - rank % p, p)
        model.zero_grad()
        with runtime.micro_batch(group=group, recompute_blocks=r):
            (mean_loss(model, batch) / p).backward()
        reference = {name: plain[name] for name in names}
        for name, parameter in model.named_parameters():
            if name not in reference:
                assert parameter.grad is None
                reference[name] = torch.zeros_like(parameter)
        worst = max(worst, worst_error(model, reference, group))
    return worst


def recomputed_alike(rank: int) -> bool:
    topology = Topology(4, rank)
    topology.create_groups()
    torch.manual_seed(7)
    model = Model((2, 1), "dropout").double()
    runtime = observed_runtime(model, topology)
    batch = make_batch(13, 2, torch.float64)
    gradients = []
    for r in (0, 2):
        model.zero_grad()
        with runtime.micro_batch(group=topology.group(0, 4), recompute_blocks=r, rng_key=(5,)):
            mean_loss(model, batch).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def kept_bytes(rank: int) -> tuple[int, int]:
    """Bytes that attention keeps for the backward: of one rank alone, of one of four."""
    topology = Topology(4, rank)
    topology.create_groups()
    found = []
    for p in (1, 4):
        group = topology.group(rank - rank % p, p)
        tensors, spec = whole_inputs(Case((1, 1), length=512, causal=True), torch.float32)
        kept: dict[int, int] = {}

        def pack(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        if p == 1:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                out = dot_product_attention(*tensors, spec)
        else:
            shard = ShardedPass(group, 512, 128)
            own = [slice_sequence(t, 2, group, 128) for t in tensors]
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                out = attend_over_ranks(shard, *own, spec)
        out.sum().backward()
        found.append(sum(kept.values()))
    return found[0], found[1]


class TestModels:
    @pytest.mark.parametrize("name", MODELS)
    def test_gradients(self, world, name):
        check(world.run(model_error, *MODELS[name]))

    def test_recomputation_replays_dropout(self, world):
        assert world.run(recomputed_alike) == [True] * 4

    def test_memory_falls_with_the_ranks(self, world):
        for alone, shared in world.run(kept_bytes):
            assert shared <= 0.3 * alone


# ---------------------------------------------------------------------- one process


def scores(split: HeadSplit, length: int, zigzag: bool) -> list[int]:
    """Scores that each ring member computes; a diagonal chunk counts half, as kernels do."""
    layout = ring_layout(length, -(-length // (split.ulysses * split.ring)), split, zigzag=zigzag)
    counts = []
    for member in range(split.ring):
        group = SPGroup(0, split.ring * split.ulysses, member * split.ulysses, None)
        own = ring._Ring(layout, group, AttentionSpec(is_causal=True), 0)
        counts.append(
            sum(
                len(chunk.queries) * (len(chunk.keys) + 1) // 2
                if chunk.is_cut
                else len(chunk.queries) * len(chunk.keys)
                for source in range(split.ring)
                for chunk, _, _ in own.chunks(source, 1.0)
            )
        )
    return counts


class TestLayout:
    @pytest.mark.parametrize("split", [HeadSplit(ulysses=1, ring=4), HeadSplit(ulysses=2, ring=8)])
    def test_causal_work_is_balanced(self, split):
        zigzag, contiguous = (scores(split, 1024, z) for z in (True, False))
        assert sum(zigzag) == sum(contiguous) == 1024 * 1025 // 2
        assert max(zigzag) / (sum(zigzag) / split.ring) <= 1.1
        assert max(contiguous) / (sum(contiguous) / split.ring) > 1.7

    @pytest.mark.parametrize(
        ("heads", "p", "expected"),
        [
            ((8, 8), 4, "Ulysses 4"),
            ((8, 2), 8, "Ulysses 8"),
            ((1, 1), 4, "ring 4"),
            ((2, 1), 4, "Ulysses 2 x ring 2"),
            ((12, 3), 8, "ring 8"),
            ((12, 4), 8, "Ulysses 4 x ring 2"),
        ],
    )
    def test_split(self, heads, p, expected):
        split = split_heads(*heads, p)
        assert str(split) == expected
        assert split.ulysses * split.ring == p
        assert share_heads(*heads, split.ulysses)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_cuda_kernels_give_a_chunk_and_its_gradients(causal):
    from lightning_dcp.parallel.ring_chunks import Chunk, attend_chunk, chunk_gradients
    from lightning_dcp.parallel.ring_layout import Span

    q = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 2, 64, 32, device="cuda", dtype=torch.bfloat16)
    span = Span(0, 64)
    chunk = Chunk(
        queries=span,
        keys=span,
        is_causal=causal,
        scale=0.2,
        softcap=None,
        dropout_p=0.0,
        seed=0,
    )
    found, wanted = [], []
    for tensors, to in (((q, k, v), found), ((q.float(), k.float(), v.float()), wanted)):
        out, lse = attend_chunk(*tensors, None, chunk)
        grad = torch.ones_like(out).to(tensors[0].dtype)
        out = out.to(tensors[0].dtype)
        to += [out, lse, *chunk_gradients(grad, *tensors, None, out, lse, chunk)[:3]]
    for a, b in zip(found, wanted, strict=True):
        assert relative_error(a.float(), b.float()) < 2e-2


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_of_no_key_are_zero_with_a_cap_too(kind):
    """As torch's are without one, and those of a ring."""
    query = torch.randn(1, 2, 4, 3, requires_grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[2] = False
    if kind == "float":
        mask = torch.zeros(4, 4).masked_fill(~mask, float("-inf"))
    out = dot_product_attention(query, query, query, AttentionSpec(attn_mask=mask, softcap=3.0))
    assert out[:, :, 2].eq(0).all()
    assert out[:, :, [0, 1, 3]].ne(0).all()
    (gradient,) = torch.autograd.grad(out.sum(), query)
    assert gradient.isfinite().all()

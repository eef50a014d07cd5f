"""The whole profile: real runtime, real transformer, worlds of real processes."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_dcp.parallel.blocks import find_blocks
from lightning_dcp.parallel.runtime import BlockRuntime
from lightning_dcp.parallel.signature import BlockSignature
from lightning_dcp.parallel.topology import Topology
from lightning_dcp.profiling.cost_profile import CostProfile
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.profiling.profiler import profile_costs
from lightning_dcp.profiling.report import profile_table
from lightning_dcp.profiling.sharding_check import ShardingMismatch
from tests.worlds import World, WorldFailure

WIDTH, VOCABULARY = 32, 50
LENGTHS = np.unique(np.geomspace(24, 1500, 300).astype(int))
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(0.1)

    def mix(self, x):
        return x

    def forward(self, x, positions):
        b, s, _ = x.shape
        h = self.mix(self.norm(x) + positions)
        q, k, v = (
            part.view(b, s, self.num_heads, -1).transpose(1, 2)
            for part in self.qkv(h).chunk(3, dim=-1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(a.transpose(1, 2).reshape(b, s, -1)))
        return x + self.mlp(x)


class ConvolutionBlock(Block):
    """Mixes neighbouring positions outside attention; hidden by a gate that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.gate = nn.Parameter(torch.zeros(()))

    def mix(self, x):
        return x + self.gate * self.convolution(x.transpose(1, 2)).transpose(1, 2)


class MeanBlock(Block):
    def mix(self, x):
        return x + x.mean(dim=1, keepdim=True)


class BatchNormBlock(Block):
    """Normalises over all positions while it trains, and by fixed numbers otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def mix(self, x):
        return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)


class HalvesBlock(Block):
    """Attends within halves, but only in long sequences."""

    def forward(self, x, positions):
        if x.shape[1] <= 200:
            return super().forward(x, positions)
        half = x.shape[1] // 2
        parts = ((x[:, :half], positions[:, :half]), (x[:, half:], positions[:, half:]))
        return torch.cat([super(HalvesBlock, self).forward(*part) for part in parts], dim=1)


class FailingBlock(Block):
    """Cannot run with a part of the sequence."""

    def mix(self, x):
        if x.shape[1] < 24:
            raise ValueError("needs the whole sequence")
        return x


class Transformer(nn.Module):
    def __init__(self, num_blocks: int = 3, block: type[nn.Module] = Block, **kwargs) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block(**kwargs) for _ in range(num_blocks))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
        self.num_steps = 0

    def training_step(self, tokens):
        self.num_steps += 1
        positions = (
            torch.arange(tokens.shape[1], device=tokens.device)
            .div(1000.0)[None, :, None]
            .expand(1, -1, WIDTH)
        )
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions=positions)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tokens(batch_size: int, seq_len: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch_size, seq_len))


def profile(
    rank: int = 0,
    world_size: int = 1,
    *,
    model: nn.Module | None = None,
    make_batch=tokens,
    step=None,
    lengths=LENGTHS,
    path: str | None = None,
    **changes,
) -> CostProfile:
    model = Transformer() if model is None else model
    topology = Topology(world_size, rank)
    if world_size > 1:
        topology.create_groups()
    runtime = BlockRuntime(find_blocks(model, path), topology)
    runtime.attach()
    arguments = {
        "step": model.training_step if step is None else step,
        "module": model,
        "runtime": runtime,
        "make_batch": make_batch,
        "lengths": lengths,
        "topology": topology,
        "options": ProfilingOptions(budget_s=3.0),
        "device": CPU,
        "fixed_bytes": 1000 + rank,
        "sp_sizes": topology.sp_sizes,
        "fingerprint": "key",
    }
    try:
        return profile_costs(**(arguments | changes))
    finally:
        runtime.detach()
        topology.destroy()


def points(result: CostProfile, sp_size: int) -> set[tuple[int, int]]:
    return {(m.batch_size, m.seq_len) for m in result.measurements if m.sp_size == sp_size}


# The grid is finite: a large budget is not used up where the machine is free, and makes sure of
# the grid's end where it is not.
AMPLE = ProfilingOptions(budget_s=25.0)


@pytest.fixture(scope="module")
def result() -> CostProfile:
    return profile(options=AMPLE)


class TestOneProcess:
    def test_grid_and_budget(self, result: CostProfile) -> None:
        assert result.num_blocks == 3
        assert result.duration_s < 26.0
        measured = points(result, 1)
        assert len({s for _, s in measured}) >= 5
        shortest = sorted({s for _, s in measured})[:3]
        assert {(b, s) for b in (1, 2) for s in shortest} <= measured
        assert max(b for b, _ in measured) >= 8
        assert (1, int(LENGTHS[-1])) in measured
        assert result.attention_heads == ((4, 4),)
        assert result.sp_size_exclusions == {}
        assert result.fingerprint == "key"

    def test_bytes_are_exact(self, result: CostProfile) -> None:
        for m in result.measurements:
            hidden = m.batch_size * m.seq_len * WIDTH * 4
            assert m.input_bytes == hidden
            assert 10 * hidden < m.saved_bytes < 40 * hidden
        per_token = {
            round(m.saved_bytes / (m.batch_size * m.seq_len), 3) for m in result.measurements
        }
        assert max(per_token) - min(per_token) < 2  # linear: attention saves no square

    def test_fit_and_held_out_error(self, result: CostProfile) -> None:
        model = result.cost_model()
        assert model.held_out.median_time is not None
        assert model.held_out.p95_time is not None
        assert model.held_out.median_memory < 0.05
        assert model.time_s(1, 1500, 1) > model.time_s(1, 100, 1)

    def test_report(self, result: CostProfile) -> None:
        table = profile_table(result)
        assert table.row_count == len(result.measurements)
        assert "held-out error" in str(table.caption)

    def test_signature_is_in_the_profile(self, result: CostProfile) -> None:
        assert result.signature is not None
        signature = BlockSignature.from_json(result.signature)
        assert (signature.batch_dim, signature.sequence_dim) == (0, 1)
        assert signature.sequence_dims == {"positions": 1}


def test_the_model_and_randomness_are_bit_identical() -> None:
    torch.manual_seed(3)
    model = Transformer()
    model.training_step(tokens(2, 30)).backward()
    model.head.zero_grad(set_to_none=True)
    before = {
        n: (p.clone(), None if p.grad is None else p.grad.clone(), p)
        for n, p in model.named_parameters()
    }
    state = torch.get_rng_state()
    model.blocks[0].eval()
    profile(model=model, options=ProfilingOptions(budget_s=0.3))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.num_steps == 1
    assert not model.blocks[0].training
    assert model.blocks[1].training
    for name, parameter in model.named_parameters():
        value, grad, same = before[name]
        assert parameter is same
        assert torch.equal(parameter, value)
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(parameter.grad, grad)
    assert all("forward" not in vars(block) for block in model.blocks)


class AnalyticBlock(nn.Module):
    """Takes a known time: a constant, a linear and a quadratic part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    @staticmethod
    def forward_s(b: int, s: int) -> float:
        return 1e-2 + 1e-4 * b * s + 2e-6 * b * s**2

    def forward(self, x, positions):
        return _Slow.apply(x * self.weight, self.forward_s(*x.shape[:2]))


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = 2 * seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


def test_a_known_time_is_found_again() -> None:
    lengths = np.arange(8, 130)
    result = profile(
        model=Transformer(12, AnalyticBlock),
        lengths=lengths,
        options=ProfilingOptions(budget_s=12.0, repeats=3),
    )
    model = result.cost_model()
    for b, s in [(1, 20), (3, 40), (2, 100), (8, 16), (4, 128)]:
        known = AnalyticBlock.forward_s(b, s)
        assert 0.8 < float(model.forward_s(b, s, 1)) / known < 2.0
        assert 0.8 < float(model.backward_s(b, s, 1)) / (2 * known) < 2.0
        assert 0.8 < float(model.time_s(b, s, 1, 12)) / (12 * 4 * known) < 2.0
    assert model.held_out.median_time is not None
    assert model.held_out.median_time < 0.35


def test_one_block_is_measured_itself() -> None:
    model = Transformer(1)
    result = profile(model=model, path="blocks", options=ProfilingOptions(budget_s=0.5))
    assert result.num_blocks == 1
    assert all(m.forward_s > 0 and m.backward_s > 0 for m in result.measurements)


def test_a_small_budget_still_gives_a_fit() -> None:
    result = profile(options=ProfilingOptions(budget_s=1e-3))
    assert len(points(result, 1)) == 8
    assert result.cost_model().sp_sizes == (1,)
    assert "would take" in result.skipped[-1].reason


def test_true_lengths_count() -> None:
    """A collate that pads to multiples of 16, of samples that are only about as long."""
    result = profile(
        make_batch=lambda b, s: tokens(b, -(-s // 16) * 16), options=ProfilingOptions(budget_s=0.5)
    )
    assert all(m.seq_len % 16 == 0 for m in result.measurements)


def test_lengths_in_other_units_stay_in_the_data_sets() -> None:
    """A model that shortens its input by 8 before the blocks."""
    result = profile(
        make_batch=lambda b, s: tokens(b, s // 8),
        lengths=LENGTHS * 8,
        options=ProfilingOptions(budget_s=0.5),
    )
    assert {m.seq_len for m in result.measurements} <= set((LENGTHS * 8).tolist())


@pytest.mark.parametrize("lengths", [[64], [64] * 10, [30, 60], [5, 6, 7, 8]])
def test_few_lengths(lengths: list[int]) -> None:
    result = profile(lengths=lengths, options=ProfilingOptions(budget_s=0.5))
    assert {m.seq_len for m in result.measurements} == set(lengths)
    result.cost_model()


def test_memory_limit_is_kept_by_forecast() -> None:
    free = profile(options=ProfilingOptions(budget_s=2.0))
    needed = {
        (m.batch_size, m.seq_len): 2 * (m.saved_bytes + m.input_bytes) + m.rest_bytes
        for m in free.measurements
    }
    limit = 1000 + sorted(needed.values())[len(needed) // 2]
    result = profile(options=ProfilingOptions(budget_s=2.0), memory_limit_bytes=int(limit))
    assert points(result, 1)
    for m in result.measurements:
        assert 1000 + 2 * (m.saved_bytes + m.input_bytes) + m.rest_bytes <= limit
    assert any("bytes" in skipped.reason for skipped in result.skipped)


def test_out_of_memory_drops_the_point() -> None:
    model = Transformer()

    def step(batch):
        if batch.numel() > 400:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return model.training_step(batch)

    result = profile(model=model, step=step, options=ProfilingOptions(budget_s=1.0))
    assert all(b * s <= 400 for b, s in points(result, 1))
    assert any("out of memory on rank 0" in skipped.reason for skipped in result.skipped)


def test_nothing_fits() -> None:
    with pytest.raises(ValueError, match=r"Not even the smallest .* Raise the memory limit"):
        profile(memory_limit_bytes=10)
    with pytest.raises(ValueError, match="no samples"):
        profile(lengths=[])


def test_errors_of_the_step_come_through() -> None:
    def step(batch):
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        profile(step=step)


# ---------------------------------------------------------------------- worlds


def _profile(rank: int, world_size: int, **changes) -> str:
    torch.manual_seed(0)
    changes.setdefault("options", ProfilingOptions(budget_s=4.0))
    block = changes.pop("block", Block)
    model = Transformer(block=block, **changes.pop("model_kwargs", {}))
    return profile(rank, world_size, model=model, **changes).to_json()


def _profile_with_slow_rank(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model = Transformer()

    def step(batch):
        time.sleep(0.02 * rank)
        return model.training_step(batch)

    return profile(
        rank, world_size, model=model, step=step, options=ProfilingOptions(budget_s=2.0)
    ).to_json()


def _profile_with_memory_short_on(rank: int, world_size: int, short: int) -> str:
    torch.manual_seed(0)
    model = Transformer()

    def step(batch):
        if rank == short and batch.shape[0] == 1 and batch.numel() > 300:
            raise torch.OutOfMemoryError("out of memory")
        return model.training_step(batch)

    return profile(
        rank,
        world_size,
        model=model,
        step=step,
        options=AMPLE,
        sp_sizes=(1,),
    ).to_json()


def _profile_with_bug_on(rank: int, world_size: int, wrong: int) -> str:
    model = Transformer()

    def step(batch):
        if rank == wrong:
            raise KeyError("labels")
        return model.training_step(batch)

    try:
        profile(rank, world_size, model=model, step=step)
    except Exception as error:  # noqa: BLE001 (the text is what is tested)
        return f"{type(error).__name__}: {error}"
    return "no error"


def _profile_with_other_batches(rank: int, world_size: int) -> str:
    generator = torch.Generator().manual_seed(rank)  # of the user's own, that no seed reaches

    def make_batch(batch_size, seq_len):
        return torch.randint(VOCABULARY, (batch_size, seq_len), generator=generator)

    return _profile(rank, world_size, make_batch=make_batch)


def _profile_autocast(rank: int, world_size: int, block: type[nn.Module]) -> str:
    torch.manual_seed(0)
    model = Transformer(8, block)

    def step(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.training_step(batch)

    return profile(
        rank, world_size, model=model, step=step, options=ProfilingOptions(budget_s=1.0)
    ).to_json()


def _refused(rank: int, run, world_size: int, *args, **kwargs) -> str:
    try:
        return run(rank, world_size, *args, **kwargs)
    except ShardingMismatch as error:
        return str(error)


def same(texts: list[str]) -> CostProfile:
    assert len(set(texts)) == 1
    return CostProfile.from_json(texts[0])


@pytest.fixture(scope="class")
def world(request):
    with World(request.cls.size, timeout_s=100) as world:
        yield world


class TestTwoRanks:
    size = 2

    @pytest.mark.parametrize("block", [ConvolutionBlock, MeanBlock, BatchNormBlock])
    def test_blocks_that_mix_positions_are_refused(self, world, block) -> None:
        options = ProfilingOptions(budget_s=1.0)
        texts = world.run(_refused, _profile, 2, block=block, options=options)
        assert len(set(texts)) == 1
        assert "computes something else: loss" in texts[0] and "instead of" in texts[0]

    def test_rounding_of_coarse_types_is_no_mixing(self, world) -> None:
        result = same(world.run(_profile_autocast, 2, Block))
        assert result.cost_model().sp_sizes == (1, 2)
        text = world.run(_refused, _profile_autocast, 2, ConvolutionBlock)[0]
        assert "`blocks.0.convolution` (Conv1d)" in text

    def test_attention_that_shows_late_what_it_is(self, world) -> None:
        result = same(
            world.run(_profile, 2, block=HalvesBlock, lengths=np.arange(24, 300), options=AMPLE)
        )
        assert "the one attention runs over" in result.sp_size_exclusions[2]
        assert {m.sp_size for m in result.measurements} == {1}

    def test_the_check_can_be_left_out(self, world) -> None:
        options = ProfilingOptions(budget_s=1.0)
        result = same(world.run(_profile, 2, block=MeanBlock, options=options, self_check=False))
        assert result.sp_size_exclusions == {}

    def test_blocks_that_cannot_run_sharded_are_not(self, world) -> None:
        result = same(world.run(_profile, 2, block=FailingBlock))
        assert "needs the whole sequence" in result.sp_size_exclusions[2]

    def test_more_ranks_than_heads(self, world) -> None:
        result = same(world.run(_profile, 2, model_kwargs={"num_heads": 1}))
        assert result.sp_size_exclusions == {}

    def test_batches_that_differ_between_ranks(self, world) -> None:
        result = same(world.run(_profile_with_other_batches, 2))
        assert "different losses" in result.sp_size_exclusions[2]

    def test_memory_short_on_one_rank_drops_the_point_on_both(self, world) -> None:
        result = same(world.run(_profile_with_memory_short_on, 2, 1))
        assert all(s <= 300 for b, s in points(result, 1) if b == 1)
        assert any("out of memory on rank 1" in skipped.reason for skipped in result.skipped)

    def test_a_bug_on_one_rank_is_told_on_both(self, world) -> None:
        own, other = world.run(_profile_with_bug_on, 2, 0)
        assert own == "KeyError: 'labels'"
        assert other.startswith("TrialFailed: the training step failed")
        assert "KeyError: 'labels' on rank 0" in other


class TestFourRanks:
    size = 4

    def test_all_sp_sizes_on_the_same_points(self, world) -> None:
        result = same(world.run(_profile, 4))
        assert result.sp_size_exclusions == {}
        assert result.fixed_bytes == 1003
        assert result.duration_s < 15.0  # 4 s asked for; more on a machine that is busy otherwise
        model = result.cost_model()
        assert model.sp_sizes == (1, 2, 4)
        assert model.held_out.median_time is not None
        common = points(result, 1) & points(result, 2) & points(result, 4)
        assert len({s for _, s in common}) >= 3
        by_point = {(m.batch_size, m.seq_len, m.sp_size): m for m in result.measurements}
        for b, s in common:
            whole, shared = by_point[b, s, 1], by_point[b, s, 4]
            # A rank holds ceil(S / 4) tokens of each sample.
            assert shared.input_bytes == b * -(-s // 4) * WIDTH * 4
            assert shared.saved_bytes < 0.6 * whole.saved_bytes
            # What is outside the blocks stays whole.
            assert shared.rest_bytes >= 0.9 * whole.rest_bytes

    def test_a_slow_rank_slows_all_and_hangs_none(self, world) -> None:
        result = same(world.run(_profile_with_slow_rank, 4))
        assert points(result, 1)
        for m in result.measurements:
            # The median rank, the median group and the slowest of the only group, respectively.
            assert m.rest_s > {1: 0.02, 2: 0.02, 4: 0.06}[m.sp_size]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_count_on_a_cpu() -> None:
    on_cpu = profile(options=ProfilingOptions(budget_s=2.0))
    device = torch.device("cuda")
    on_cuda = profile(
        model=Transformer().to(device),
        make_batch=lambda b, s: tokens(b, s).to(device),
        device=device,
        options=ProfilingOptions(budget_s=5.0),
    )
    counted = {(m.batch_size, m.seq_len): m for m in on_cpu.measurements}
    compared = [
        (m, counted[m.batch_size, m.seq_len])
        for m in on_cuda.measurements
        if (m.batch_size, m.seq_len) in counted and m.seq_len > 300
    ]
    assert compared
    for m, known in compared:
        assert m.input_bytes == known.input_bytes
        assert 0.7 < m.saved_bytes / known.saved_bytes < 1.6
        assert m.forward_s > 0
        assert m.backward_s > 0


class TestThreeRanks:
    def test_ranks_without_a_group_keep_step(self) -> None:
        with World(3, timeout_s=100) as world:
            result = same(world.run(_profile, 3, options=ProfilingOptions(budget_s=2.0)))
        assert result.cost_model().sp_sizes == (1, 2)


def test_world_failures_are_assertions() -> None:
    assert issubclass(WorldFailure, AssertionError)

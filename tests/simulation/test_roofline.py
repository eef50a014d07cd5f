"""The law of costs: order, known values, memory, and what the planner relies on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.planning.costs import Costs
from lightning_dcp.simulation import CLUSTERS, MODELS, RooflineCosts
from lightning_dcp.simulation.roofline import gemm_s

LIMIT = 80_000_000_000
H200 = dataclasses.replace(CLUSTERS["h200"], usable_memory_bytes=LIMIT)
COSTS = {name: RooflineCosts(model=m, cluster=H200, world_size=32) for name, m in MODELS.items()}
FIVE_B = COSTS["transformer-1d-5b"]

names = st.sampled_from(sorted(COSTS))
sp_sizes = st.sampled_from([1, 2, 4, 8, 16])
batch_sizes = st.one_of(st.integers(1, 4096), st.floats(1e-3, 4096))
lengths = st.integers(1, 1 << 21)


def test_the_planner_can_take_it() -> None:
    costs: Costs = FIVE_B
    assert costs.num_blocks == 24
    assert costs.memory_error == 0.0
    assert costs.sp_sizes == (1, 2, 4, 8, 16, 32)
    assert FIVE_B.memory_limit_bytes == LIMIT


@settings(deadline=None, max_examples=200)
@given(names, sp_sizes, batch_sizes, batch_sizes, lengths, lengths, st.integers(0, 24))
def test_more_work_never_costs_less(name, p, b1, b2, s1, s2, r) -> None:
    costs = COSTS[name]
    (b1, b2), (s1, s2) = sorted((b1, b2)), sorted((s1, s2))
    for predict in (costs.time_s, costs.memory_bytes):
        small, more_b, more_s = predict(b1, s1, p, r), predict(b2, s1, p, r), predict(b1, s2, p, r)
        assert small <= more_b <= predict(b2, s2, p, r) * (1 + 1e-12)
        assert small <= more_s
        assert small > 0 and np.isfinite(small)


@pytest.mark.parametrize("name", sorted(COSTS))
def test_time_rises_along_a_dense_line(name: str) -> None:
    costs = COSTS[name]
    s = np.arange(1, 60_000)
    for p in (1, 8):
        assert (np.diff(costs.time_s(1, s, p)) >= 0).all()
        assert (np.diff(costs.time_s(s, 100, p)) >= 0).all()


def test_the_table_of_matrix_products_ends_without_a_step() -> None:
    s = (1 << 20) + np.arange(-200, 200)
    times = FIVE_B.time_s(1, s, 1)
    assert (np.diff(times) >= 0).all()
    assert times[-1] / times[0] < 1.01
    # Whether a value comes from the table must not depend on its neighbours in the array.
    assert FIVE_B.time_s(1, int(s[0]), 1) == times[0]


@settings(deadline=None, max_examples=200)
@given(names, sp_sizes, batch_sizes, lengths, st.integers(0, 27))
def test_recomputing_takes_seconds_and_frees_bytes(name, p, b, s, r) -> None:
    costs = COSTS[name]
    r = min(r, costs.num_blocks - 1)
    assert costs.time_s(b, s, p, r + 1) > costs.time_s(b, s, p, r)
    assert costs.memory_bytes(b, s, p, r + 1) <= costs.memory_bytes(b, s, p, r)
    extra = costs.time_s(b, s, p, r + 1) - costs.time_s(b, s, p, r)
    assert extra == pytest.approx(costs.forward_s(b, s, p), rel=1e-6)


@settings(deadline=None, max_examples=200)
@given(names, sp_sizes, batch_sizes, lengths, st.integers(10**9, 2 * 10**11))
def test_min_recompute_is_the_least_that_fits(name, p, b, s, limit) -> None:
    costs = COSTS[name]
    r = int(costs.min_recompute(b, s, p, limit))
    memory = costs.memory_bytes(b, s, p, np.arange(costs.num_blocks + 1))
    fitting = np.flatnonzero(memory <= limit)
    assert r == (fitting[0] if fitting.size else -1)


def test_arrays_broadcast_and_numbers_give_numpy_scalars() -> None:
    b, s = np.arange(1, 61)[:, None], np.linspace(100, 50_000, 512)
    r = FIVE_B.min_recompute(b, s, 4, LIMIT)
    times = FIVE_B.time_s(b, s, 4, np.maximum(r, 0))
    memory = FIVE_B.memory_bytes(b, s, 4, np.maximum(r, 0))
    assert times.shape == memory.shape == r.shape == (60, 512)
    assert memory.dtype == r.dtype == np.int64
    assert times[3, 7] == FIVE_B.time_s(4, s[7], 4, max(r[3, 7], 0))
    by_p = FIVE_B.time_s(1, 4096, np.array([1, 2, 4]))
    assert by_p.tolist() == [FIVE_B.time_s(1, 4096, p) for p in (1, 2, 4)]
    for value, kind in (
        (FIVE_B.time_s(1, 1000, 1), np.float64),
        (FIVE_B.memory_bytes(1, 1000, 1), np.int64),
        (FIVE_B.min_recompute(1, 1000, 1, LIMIT), np.int64),
    ):
        assert isinstance(value, kind)


def test_a_fraction_of_a_sample_counts_by_its_tokens() -> None:
    # What a pack of 1000 tokens cut into samples of 4000 saves is what 1000 tokens save.
    assert FIVE_B.memory_bytes(0.25, 4000, 1) == FIVE_B.memory_bytes(1, 1000, 1)
    assert FIVE_B.time_s(1, 1000, 1) < FIVE_B.time_s(0.25, 4000, 1) < FIVE_B.time_s(1, 4000, 1)
    half = FIVE_B.time_s(7.5, 4000, 1)
    assert FIVE_B.time_s(7, 4000, 1) < half < FIVE_B.time_s(8, 4000, 1)


# ---------------------------------------------------------------------- known values


def mfu(cluster: str, s: int) -> float:
    # Of the GPU's speed only; memory is put aside.
    node = CLUSTERS[cluster]
    node = dataclasses.replace(
        node, gpu=dataclasses.replace(node.gpu, memory_bytes=141_000_000_000)
    )
    model = MODELS["llama-3-8b"]
    costs = RooflineCosts(model=model, cluster=node, world_size=32)
    matrices = model.num_blocks * model.block_parameters + model.vocab_size * model.width
    flops = 6 * matrices * s + 6 * model.num_blocks * s * s * model.width
    return float(flops / costs.time_s(1, s, 1) / node.gpu.peak_flops)


def test_utilisation_is_what_is_published() -> None:
    assert 0.35 < mfu("h100", 8192) < 0.60
    assert 0.45 < mfu("a100", 8192) < 0.70
    assert mfu("h100", 256) < 0.8 * mfu("h100", 8192)


def test_a_large_matrix_product_reaches_its_efficiency_and_a_small_one_does_not() -> None:
    gpu = H200.gpu
    large = 2 * 16384 * 8192 * 16384 / gemm_s(gpu, 16384, 8192, 16384) / gpu.peak_flops
    assert 0.93 * gpu.gemm_efficiency < large <= gpu.gemm_efficiency
    small = 2 * 16 * 8192 * 8192 / gemm_s(gpu, 16, 8192, 8192) / gpu.peak_flops
    assert small < 0.2 * gpu.gemm_efficiency
    # 16 rows read the weight: memory binds.
    assert gemm_s(gpu, 16, 8192, 8192) >= 2 * 8192**2 / gpu.memory_bandwidth


def test_attention_grows_with_the_square_of_one_axis_and_less_with_two() -> None:
    one = FIVE_B.forward_s(1, np.array([1 << 19, 1 << 20]), 8)
    assert 3.8 < one[1] / one[0] < 4.0
    two = COSTS["transformer-2d-1.2b"].forward_s(1, np.array([1 << 18, 1 << 20]), 1)
    assert 4.0 < two[1] / two[0] < 8.0


def test_communication_takes_a_share_that_grows_with_the_ranks() -> None:
    p = np.array([1, 2, 4, 8, 16, 32])
    rank_seconds = p * FIVE_B.time_s(p, 8192, p)  # the same tokens on each rank
    per_sample = rank_seconds / p
    assert (np.diff(per_sample) > 0).all()
    assert per_sample[3] < 1.2 * per_sample[0]  # NVLink
    assert per_sample[4] - per_sample[3] > 2 * (per_sample[3] - per_sample[0])  # InfiniBand


def test_repeated_heads_are_sent_too() -> None:
    llama = RooflineCosts(model=MODELS["llama-3-8b"], cluster=H200, world_size=32)
    whole = dataclasses.replace(llama.model, num_kv_heads=32)
    assert llama.model.kv_width_on(8) == 1024
    assert llama.model.kv_width_on(32) == 4096 == whole.kv_width_on(32)


def test_tiny_micro_batches_pay_for_launches_and_gradients() -> None:
    # 24 blocks of 12 + 20 kernels, and 40 GB of accumulated gradients to read and write.
    floor = 24 * 32 * H200.gpu.kernel_latency_s + 8 * 24 * 12 * 4096**2 / 4.8e12
    assert floor < FIVE_B.time_s(1, 1, 1) < 3 * floor


def test_fixed_bytes_and_step_overhead() -> None:
    parameters = FIVE_B.model.parameters
    assert FIVE_B.fixed_bytes == 6 * parameters + -(-12 * parameters // 32) + 2 * 2**30
    links = 2 * H200.reduce_scatter_s(2 * parameters, 32)
    assert links < FIVE_B.step_overhead_s < 2 * links
    alone = RooflineCosts(model=MODELS["transformer-2d-1.2b"], cluster=H200, world_size=1)
    assert alone.fixed_bytes == 18 * alone.model.parameters + 2 * 2**30
    assert alone.sp_sizes == (1,)


def test_memory_of_a_micro_batch() -> None:
    w, words, tokens = 4096, 32_000, 4 * 2048
    expected = tokens * (24 * (30 * w + 128) + 24 * 2 * w + 6 * words)
    assert FIVE_B.memory_bytes(4, 2048, 1) == FIVE_B.fixed_bytes + expected
    all_recomputed = tokens * (30 * w + 128 + 24 * 2 * w + 6 * words)
    assert FIVE_B.memory_bytes(4, 2048, 1, 24) == FIVE_B.fixed_bytes + all_recomputed


# ---------------------------------------------------------------------- what is refused


def test_sp_sizes_that_do_not_split_the_heads_are_excluded_with_the_reason() -> None:
    costs = COSTS["transformer-2d-1.2b"]
    assert costs.sp_sizes == (1, 2, 4, 8, 16)
    assert costs.sp_size_exclusions == {32: "32 does not divide the 16 attention heads"}
    with pytest.raises(ValueError, match=r"SP size 32 .*16 attention heads.*\[1, 2, 4, 8, 16\]"):
        costs.time_s(1, 1024, 32)
    with pytest.raises(ValueError, match=r"SP size 3 .*power of two"):
        costs.memory_bytes(1, 1024, np.array([1, 3]))
    six = RooflineCosts(model=MODELS["llama-3-8b"], cluster=H200, world_size=24)
    assert six.sp_sizes == (1, 2, 4, 8, 16)


def test_a_model_too_large_for_the_gpu_says_how_much_is_missing() -> None:
    with pytest.raises(ValueError, match=r"llama-3-8b does not fit.*GiB more than.*more ranks"):
        RooflineCosts(model=MODELS["llama-3-8b"], cluster=CLUSTERS["h100"], world_size=1)


@pytest.mark.parametrize("world_size", [0, -8, 1.5, True])
def test_a_world_size_out_of_range(world_size) -> None:
    with pytest.raises((ValueError, TypeError), match="world_size must be"):
        RooflineCosts(model=MODELS["llama-3-8b"], cluster=H200, world_size=world_size)


def test_the_fingerprint_tells_laws_apart() -> None:
    same = RooflineCosts(
        model=MODELS["transformer-1d-5b"],
        cluster=dataclasses.replace(CLUSTERS["h200"], usable_memory_bytes=LIMIT),
        world_size=32,
    )
    assert same == FIVE_B
    assert same.fingerprint() == FIVE_B.fingerprint()
    others = [
        dataclasses.replace(FIVE_B, world_size=16),
        dataclasses.replace(FIVE_B, cluster=CLUSTERS["h200"]),
        dataclasses.replace(FIVE_B, model=dataclasses.replace(FIVE_B.model, causal=False)),
    ]
    assert len({costs.fingerprint() for costs in [FIVE_B, *others]}) == 4

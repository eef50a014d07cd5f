"""Presets, files, and how long collectives take."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from lightning_dcp.simulation import CLUSTERS, MODELS, Cluster, Gpu, TransformerSpec
from lightning_dcp.simulation.cluster import cluster_named, load_cluster
from lightning_dcp.simulation.models import model_named

H200 = CLUSTERS["h200"]


@pytest.mark.parametrize("name", ["h200", "h100", "a100"])
def test_presets_by_name(name: str) -> None:
    cluster = cluster_named(name)
    assert cluster.gpu.name.lower() == name
    assert 0.9 * cluster.gpu.memory_bytes < cluster.memory_limit_bytes < cluster.gpu.memory_bytes


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'b200'.*h200, h100, a100"):
        cluster_named("b200")
    with pytest.raises(ValueError, match=r"'gpt'.*transformer-1d-5b.*llama-3-8b"):
        model_named("gpt")


def test_alone_nothing_is_sent() -> None:
    assert H200.all_to_all_s(1e9, 1) == 0.0
    assert H200.reduce_scatter_s(1e9, 1) == H200.all_gather_s(1e9, 1) == 0.0


def test_an_all_to_all_inside_a_node_sends_all_but_its_own_part() -> None:
    seconds = H200.all_to_all_s(1e9, 8)
    assert seconds == pytest.approx(7 / 8 * 1e9 / (450e9 * 0.8) + 3 * 8e-6)


def test_an_all_to_all_across_nodes_waits_for_infiniband() -> None:
    seconds = H200.all_to_all_s(1e9, 16)
    assert seconds == pytest.approx(8 / 16 * 1e9 / (50e9 * 0.8) + 3 * 8e-6 + 15e-6)
    assert seconds > 4 * H200.all_to_all_s(1e9, 8)


def test_small_all_to_alls_pay_for_each_doubling() -> None:
    latencies = H200.all_to_all_s(0.0, np.array([1, 2, 4, 8, 16, 32]))
    steps = np.diff(latencies)
    assert latencies[0] == 0
    np.testing.assert_allclose(steps, [8e-6] * 3 + [15e-6] * 2)


def test_all_to_all_takes_arrays() -> None:
    sizes, ranks = np.array([[1e6], [1e9]]), np.array([1, 2, 16])
    table = H200.all_to_all_s(sizes, ranks)
    assert table.shape == (2, 3)
    assert table[1, 2] == H200.all_to_all_s(1e9, 16)


def test_reductions_use_all_nics_of_a_node() -> None:
    inside, across = H200.reduce_scatter_s(1e10, 8), H200.reduce_scatter_s(1e10, 32)
    assert inside == pytest.approx(7 / 8 * 1e10 / (450e9 * 0.8), rel=0.01)
    assert across == pytest.approx(31 / 32 * 1e10 / (8 * 50e9 * 0.8), rel=0.01)
    slow = dataclasses.replace(H200, inter_node_bytes_per_s=5e9)
    assert slow.all_gather_s(1e10, 32) > 9 * H200.all_gather_s(1e10, 32)
    assert slow.all_gather_s(1e10, 8) == H200.all_gather_s(1e10, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus_per_node": 6}, "power of two; got 6"),
        ({"gpus_per_node": 8.5}, "whole number; got 8.5"),
        ({"link_efficiency": 1.2}, "at most 1; got 1.2"),
        ({"inter_node_bytes_per_s": 0}, "above 0; got 0"),
        ({"inter_node_latency_s": -1e-6}, "not negative; got -1e-06"),
        ({"intra_node_bytes_per_s": float("nan")}, "finite"),
        ({"intra_node_bytes_per_s": "fast"}, "must be a number; got 'fast'"),
        ({"usable_memory_bytes": 200_000_000_000}, "more than the 141000000000 bytes of a H200"),
        ({"gpu": "h200"}, "gpu must be a Gpu"),
    ],
)
def test_a_cluster_out_of_range_cannot_exist(changes: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        dataclasses.replace(H200, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "name must be a text"),
        ({"peak_flops": -1.0}, "peak_flops must be finite and above 0"),
        ({"gemm_efficiency": 70}, "gemm_efficiency is a share"),
        ({"num_sms": True}, "num_sms must be a number"),
    ],
)
def test_a_gpu_out_of_range_cannot_exist(changes: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        dataclasses.replace(H200.gpu, **changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- files


YAML = """
base: h200
usable_memory_bytes: 80e9   # YAML 1.1 takes this for text
inter_node_bytes_per_s: 25000000000
gpu:
  gemm_efficiency: 0.6
  name: H200, power limited
"""


def test_a_file_changes_a_preset(tmp_path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(YAML)
    cluster = load_cluster(path)
    gpu = dataclasses.replace(H200.gpu, gemm_efficiency=0.6, name="H200, power limited")
    assert cluster == dataclasses.replace(
        H200, gpu=gpu, usable_memory_bytes=80_000_000_000, inter_node_bytes_per_s=25e9
    )
    assert cluster.memory_limit_bytes == 80_000_000_000


def test_a_file_may_give_everything(tmp_path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(dataclasses.asdict(H200)))
    assert load_cluster(path) == H200


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "base: h200\nnvlink: 3\n", "unknown field nvlink. Known fields: gpu, gpus_per"),
        ("c.yaml", "base: h200\ngpu: {sms: 3}\n", r"unknown field gpu\.sms.*gpu\.num_sms"),
        ("c.yaml", "base: b200\n", "base: Unknown cluster 'b200'"),
        ("c.yaml", "gpus_per_node: 8\n", r"missing field gpu\.name.*base: h200"),
        ("c.yaml", "base: h200\ngpu: a100\n", "gpu must be a mapping"),
        ("c.yaml", "base: h200\ngpus_per_node: 7\n", "power of two; got 7"),
        ("c.yaml", "base: h200\nlink_efficiency: fast\n", "link_efficiency must be a number"),
        ("c.yaml", "base: [h200\n", "neither JSON"),
        ("c.yaml", "h200\n", "must hold fields of a cluster.*'h200'"),
        ("c.yaml", "", "must hold fields"),
        ("c.json", "{base: h200}", "neither JSON"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_cluster(path)
    assert str(path) in str(caught.value)


def test_a_missing_file(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        load_cluster(tmp_path / "none.yaml")


# ---------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("transformer-1d-5b", 5.09),
        ("transformer-2d-1.2b", 1.21),
        ("llama-3-8b", 8.03),
        ("open-sora-1.1b", 1.19),
    ],
)
def test_models_have_the_parameters_in_their_name(name: str, billions: float) -> None:
    assert model_named(name).parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert set(MODELS) >= {name}


def test_which_sp_sizes_split_the_heads() -> None:
    llama = MODELS["llama-3-8b"]
    assert [llama.sp_size_reason(p) for p in (1, 8, 32)] == [None] * 3  # 8 kv heads are repeated
    assert llama.sp_size_reason(64) == "64 does not divide the 32 attention heads"
    odd = dataclasses.replace(llama, width=4080, num_heads=24, num_kv_heads=6)
    assert odd.sp_size_reason(4) == "4 ranks cannot share the 6 key/value heads"


def test_a_block_saves_what_korthikanti_et_al_count() -> None:
    model = MODELS["transformer-1d-5b"]
    assert model.saved_bytes_per_token(1) == 30 * 4096 + 4 * 32
    assert model.saved_bytes_per_token(4) == 32 * 4096 + 4 * 32
    llama = MODELS["llama-3-8b"]
    # Of the 8 kv heads, k and v take a quarter; both norms, q, output; four MLP activations.
    assert llama.saved_bytes_per_token(1) == 11 * 4096 + 4 * 32 + 8 * 14_336
    assert llama.saved_bytes_per_token(32) > llama.saved_bytes_per_token(8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1; got 0"),
        ({"width": 100.0}, "width must be an int"),
        ({"num_heads": 24}, "width must be a multiple of num_heads"),
        ({"num_kv_heads": 5}, "num_heads must be a multiple of num_kv_heads"),
        ({"attention_axes": 3}, "attention_axes must be 1 or 2"),
        ({"attention_axes": 2}, "cannot be causal"),
        ({"cross_attentions": 1}, "both 0 or both above 0"),
        ({"name": ""}, "name must not be empty"),
    ],
)
def test_a_model_out_of_range_cannot_exist(changes: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        dataclasses.replace(MODELS["llama-3-8b"], **changes)  # type: ignore[arg-type]


def test_the_classes_are_what_presets_are_made_of() -> None:
    assert isinstance(H200, Cluster)
    assert isinstance(H200.gpu, Gpu)
    assert isinstance(MODELS["llama-3-8b"], TransformerSpec)

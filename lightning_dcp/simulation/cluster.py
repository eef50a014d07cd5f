"""What GPUs and links can do, and how long collectives between them take.

Numbers are those of data sheets; each efficiency says which share of them training code reaches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dcp.planning.options import is_power_of_two
from lightning_dcp.simulation.spec_files import build, read_fields

__all__ = ["CLUSTERS", "Cluster", "Gpu", "cluster_named", "load_cluster"]

_WHOLE = ("memory_bytes", "num_sms", "gpus_per_node", "usable_memory_bytes")
_USABLE_SHARE = 0.94  # the driver, other libraries and fragmentation take the rest


def _check_name(owner: Any) -> None:
    if not isinstance(owner.name, str) or not owner.name:
        raise ValueError(f"name must be a text that is not empty; got {owner.name!r}.")


def _check_positive(owner: Any, *names: str, zero: bool = False) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number; got {value!r} ({type(value).__name__}).")
        if name in _WHOLE and not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number; got {value!r}.")
        if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
            least = "not negative" if zero else "above 0"
            raise ValueError(f"{name} must be finite and {least}; got {value!r}.")


def _check_share(owner: Any, *names: str) -> None:
    _check_positive(owner, *names)
    for name in names:
        value = getattr(owner, name)
        if value > 1:
            raise ValueError(f"{name} is a share and must be above 0 and at most 1; got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
        name: Name, for reports.
        peak_flops: Dense bf16 floating-point operations per second (not those of sparse inputs).
        memory_bytes: Bytes of memory.
        memory_bandwidth: Bytes per second between memory and chip.
        num_sms: Streaming multiprocessors; a matrix product runs in waves of so many tiles.
        gemm_efficiency: Share of ``peak_flops`` that large matrix products reach.
        attention_efficiency_forward: Share of ``peak_flops`` that flash attention reaches forward.
        attention_efficiency_backward: The same backward.
        kernel_latency_s: Seconds each kernel costs, however small.
        memory_efficiency: Share of ``memory_bandwidth`` that elementwise kernels reach.
    """

    name: str
    peak_flops: float
    memory_bytes: int
    memory_bandwidth: float
    num_sms: int
    gemm_efficiency: float
    attention_efficiency_forward: float
    attention_efficiency_backward: float
    kernel_latency_s: float = 4e-6
    memory_efficiency: float = 0.75

    def __post_init__(self) -> None:
        _check_name(self)
        _check_positive(self, "peak_flops", "memory_bytes", "memory_bandwidth", "num_sms")
        _check_share(
            self,
            "gemm_efficiency",
            "attention_efficiency_forward",
            "attention_efficiency_backward",
            "memory_efficiency",
        )
        _check_positive(self, "kernel_latency_s", zero=True)

    @property
    def stream_bytes_per_s(self) -> float:
        """Bytes per second that elementwise kernels move."""
        return self.memory_bandwidth * self.memory_efficiency


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs. How many nodes there are, the world size says.

    Attributes:
        gpu: The GPU.
        gpus_per_node: GPUs that NVLink joins; a power of two, as SP groups are aligned blocks.
        intra_node_bytes_per_s: NVLink, per GPU and direction.
        inter_node_bytes_per_s: InfiniBand, per GPU and direction.
        link_efficiency: Share of these that large collectives reach.
        intra_node_latency_s: Seconds per doubling of a group inside a node.
        inter_node_latency_s: Seconds per doubling of a group across nodes.
        usable_memory_bytes: Bytes one rank may use; None: 94% of the GPU's.
    """

    gpu: Gpu
    gpus_per_node: int
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    link_efficiency: float = 0.8
    intra_node_latency_s: float = 8e-6
    inter_node_latency_s: float = 15e-6
    usable_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.gpu, Gpu):
            raise TypeError(f"gpu must be a Gpu; got {self.gpu!r} ({type(self.gpu).__name__}).")
        _check_positive(self, "gpus_per_node", "intra_node_bytes_per_s", "inter_node_bytes_per_s")
        _check_positive(self, "intra_node_latency_s", "inter_node_latency_s", zero=True)
        _check_share(self, "link_efficiency")
        if not is_power_of_two(self.gpus_per_node):
            raise ValueError(
                f"gpus_per_node must be a power of two; got {self.gpus_per_node}. SP groups are "
                "aligned blocks of ranks: give the largest power of two that one node holds."
            )
        if self.usable_memory_bytes is not None:
            _check_positive(self, "usable_memory_bytes")
            if self.usable_memory_bytes > self.gpu.memory_bytes:
                raise ValueError(
                    f"usable_memory_bytes ({self.usable_memory_bytes}) is more than the "
                    f"{self.gpu.memory_bytes} bytes of a {self.gpu.name}. Lower it, or leave it "
                    "out for nearly all of the GPU's memory."
                )

    @property
    def memory_limit_bytes(self) -> int:
        """Bytes one rank may use."""
        if self.usable_memory_bytes is not None:
            return self.usable_memory_bytes
        return int(_USABLE_SHARE * self.gpu.memory_bytes)

    def _latency_s(self, num_ranks: Any) -> Any:
        doublings = np.log2(num_ranks)
        inside = np.minimum(doublings, math.log2(self.gpus_per_node))
        outside = doublings - inside
        return self.intra_node_latency_s * inside + self.inter_node_latency_s * outside

    def all_to_all_s(self, bytes_per_rank: Any, p: Any) -> Any:
        """Seconds of an all-to-all in an SP group.

        Each rank keeps 1/p of its bytes and sends 1/p to each other rank: over NVLink inside the
        node and, at the same time, over InfiniBand to the other nodes.

        Args:
            bytes_per_rank: Bytes each rank holds; number or array.
            p: Ranks of the aligned group; number or array that broadcasts.
        """
        ranks = np.asarray(p, dtype=np.float64)
        near = np.minimum(ranks, self.gpus_per_node)
        inside_s = (near - 1) / ranks / (self.intra_node_bytes_per_s * self.link_efficiency)
        outside_s = (ranks - near) / ranks / (self.inter_node_bytes_per_s * self.link_efficiency)
        per_byte = np.maximum(inside_s, outside_s)
        return np.asarray(bytes_per_rank) * per_byte + self._latency_s(ranks)

    def reduce_scatter_s(self, total_bytes: float, world_size: int) -> float:
        """Seconds to sum ``total_bytes`` that each rank holds and leave each rank its shard.

        Hierarchical: inside nodes over NVLink, between nodes over all NICs of a node together.
        """
        if world_size == 1:
            return 0.0
        slowest = self.intra_node_bytes_per_s
        if world_size > self.gpus_per_node:
            slowest = min(slowest, self.gpus_per_node * self.inter_node_bytes_per_s)
        share = (world_size - 1) / world_size
        return float(
            share * total_bytes / (slowest * self.link_efficiency) + self._latency_s(world_size)
        )

    def all_gather_s(self, total_bytes: float, world_size: int) -> float:
        """Seconds until each rank has all ``total_bytes``, of which each had its shard."""
        return self.reduce_scatter_s(total_bytes, world_size)


# Efficiencies are what published measurements of the kind named beside them find; they are
# typical for head sizes of 64 to 128 and matrices of a transformer of some billion parameters.
_A100 = Gpu(
    name="A100",
    peak_flops=312e12,
    memory_bytes=80_000_000_000,
    memory_bandwidth=2.0e12,
    num_sms=108,
    gemm_efficiency=0.77,  # GEMM benchmarks: 230-260 TFLOP/s
    attention_efficiency_forward=0.60,  # FlashAttention-2 paper: up to 0.72, causal less
    attention_efficiency_backward=0.50,  # FlashAttention-2 paper: up to 0.63, causal less
)
_H100 = Gpu(
    name="H100",
    peak_flops=989e12,
    memory_bytes=80_000_000_000,
    memory_bandwidth=3.35e12,
    num_sms=132,
    gemm_efficiency=0.67,  # GEMM benchmarks: 600-750 TFLOP/s, the power limit is what binds
    attention_efficiency_forward=0.50,  # between FlashAttention-2 (0.35) and -3 (0.75) papers
    attention_efficiency_backward=0.42,  # between FlashAttention-2 (0.33) and -3 (0.57) papers
)
_H200 = dataclasses.replace(
    _H100, name="H200", memory_bytes=141_000_000_000, memory_bandwidth=4.8e12
)

CLUSTERS: Mapping[str, Cluster] = {
    "h200": Cluster(
        gpu=_H200, gpus_per_node=8, intra_node_bytes_per_s=450e9, inter_node_bytes_per_s=50e9
    ),
    "h100": Cluster(
        gpu=_H100, gpus_per_node=8, intra_node_bytes_per_s=450e9, inter_node_bytes_per_s=50e9
    ),
    "a100": Cluster(
        gpu=_A100, gpus_per_node=8, intra_node_bytes_per_s=300e9, inter_node_bytes_per_s=25e9
    ),
}
"""Nodes of eight GPUs with one InfiniBand port for each GPU (400 Gb/s; 200 Gb/s for A100)."""


def cluster_named(name: str) -> Cluster:
    """Preset of :data:`CLUSTERS`.

    Raises:
        ValueError: Unknown name.
    """
    if name not in CLUSTERS:
        raise ValueError(
            f"Unknown cluster {name!r}. Known clusters: {', '.join(CLUSTERS)}. For another one "
            "write a file that starts from one of these and read it with load_cluster."
        )
    return CLUSTERS[name]


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a JSON or YAML file.

    ``base`` names the preset to start from, any other field replaces the preset's::

        base: h200
        usable_memory_bytes: 80e9
        inter_node_bytes_per_s: 25e9
        gpu:
          name: H200, power limited
          gemm_efficiency: 0.6

    Without ``base`` every field that has no default must be there.

    Raises:
        FileNotFoundError: No such file.
        ValueError: No JSON or YAML, an unknown or missing field, a value out of range.
    """
    path = Path(path)
    values = read_fields(path, what="cluster", example="base: h200")
    base_name = values.pop("base", None)
    base: Cluster | None = None
    if base_name is not None:
        try:
            base = cluster_named(str(base_name))
        except ValueError as error:
            raise ValueError(f"{path}: base: {error}") from None
    gpu_values = values.pop("gpu", {})
    if not isinstance(gpu_values, dict):
        raise ValueError(
            f"{path}: gpu must be a mapping of fields, such as {{memory_bytes: 80e9}}; got "
            f"{gpu_values!r}. To start from a preset, name it under base."
        )
    try:
        base_gpu = None if base is None else base.gpu
        gpu = build(Gpu, base_gpu, gpu_values, presets=CLUSTERS, prefix="gpu.")
        cluster: Cluster = build(Cluster, base, {**values, "gpu": gpu}, presets=CLUSTERS)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return cluster

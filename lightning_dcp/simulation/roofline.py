"""Seconds and bytes of a micro-batch as a law of model and cluster: a roofline per kernel.

Shape legend::

    b samples, s tokens each    p ranks of the SP group    m = b s / p tokens on each rank

Each kernel takes the longer of computing and moving its bytes, plus a latency. Matrix products run
in tiles of 64 to 256 and in waves of one tile per multiprocessor; attention pads to its tiles. All
terms are non-decreasing in b and s, hence so is their sum. ``b`` may be a fraction: a pack of t
tokens cut into samples of s is b = t / s.

A law, not a measurement: what it is for is comparing plans, not predicting a machine's seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_dcp.simulation.cluster import Cluster, Gpu
from lightning_dcp.simulation.models import TransformerSpec

__all__ = ["RooflineCosts", "gemm_s"]

_GIB = 2**30
_CONTEXT_BYTES = 2 * _GIB  # CUDA context, NCCL buffers, cuBLAS work space
_ROWS = 64  # matrix products are tabulated per this many tokens
_TABLE = 1 << 14  # rows of the table: up to a million tokens on a rank
_QUERY_TILE = 128  # flash attention pads queries and keys to this many tokens
# (rows, columns, share of gemm_efficiency): libraries take smaller tiles where large ones would
# leave multiprocessors idle.
_TILES = ((128, 256, 1.0), (128, 128, 0.85), (64, 64, 0.6))
# Kernels per (self-attention, cross-attention, MLP), each of which costs a latency.
_KERNELS_FORWARD, _KERNELS_BACKWARD, _KERNELS_REST = (6, 7, 6), (10, 12, 10), 30


def gemm_s(gpu: Gpu, m: Any, k: Any, n: Any, *, extra_bytes: float = 0.0) -> Any:
    """Seconds of an (m, k) x (k, n) product in bf16, without launch latency.

    Args:
        gpu: Where it runs.
        m: Rows; number or array.
        k: Columns summed over.
        n: Columns of the result.
        extra_bytes: Bytes moved besides operands and result.
    """
    flops_per_sm = gpu.peak_flops * gpu.gemm_efficiency / gpu.num_sms
    compute_s: Any = np.inf
    for rows, columns, share in _TILES:
        waves = np.ceil(np.ceil(m / rows) * np.ceil(n / columns) / gpu.num_sms)
        compute_s = np.minimum(compute_s, waves * (2 * rows * columns * k / flops_per_sm / share))
    moved = 2.0 * (m * k + k * n + m * n) + extra_bytes
    return np.maximum(compute_s, moved / gpu.memory_bandwidth)


@dataclass(frozen=True, kw_only=True)
class RooflineCosts:
    """:class:`~lightning_dcp.planning.costs.Costs` of a model on a cluster, bf16 and ZeRO-1.

    Attributes:
        model: What is trained.
        cluster: Where.
        world_size: Ranks W, one per GPU.

    Raises:
        ValueError: World size below 1, or parameters and optimizer state leave no memory.
    """

    model: TransformerSpec
    cluster: Cluster
    world_size: int

    def __post_init__(self) -> None:
        if isinstance(self.world_size, bool) or not isinstance(self.world_size, int):
            raise TypeError(f"world_size must be an int; got {self.world_size!r}.")
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1; got {self.world_size}.")
        missing = self.fixed_bytes - self.memory_limit_bytes
        if missing >= 0:
            raise ValueError(
                f"{self.model.name} does not fit: parameters, gradients, optimizer shard and "
                f"context take {self.fixed_bytes / _GIB:.1f} GiB on each of {self.world_size} "
                f"ranks, {missing / _GIB:.1f} GiB more than the "
                f"{self.memory_limit_bytes / _GIB:.1f} GiB a rank may use, and samples need "
                "memory too. Take more ranks (they share the optimizer state only), a GPU with "
                "more memory, a higher usable_memory_bytes, or a smaller model."
            )

    # ------------------------------------------------------------------ what the planner asks

    @property
    def num_blocks(self) -> int:
        """L, the blocks that may be recomputed."""
        return self.model.num_blocks

    @property
    def memory_limit_bytes(self) -> int:
        """Bytes one rank may use on this cluster."""
        return self.cluster.memory_limit_bytes

    @property
    def fixed_bytes(self) -> int:
        """M_C: bf16 parameters, fp32 accumulated gradients, optimizer shard, context.

        The shard is ZeRO-1's: fp32 parameters and Adam's two moments, 12 bytes per parameter / W.
        """
        parameters = self.model.parameters
        return 6 * parameters + -(-12 * parameters // self.world_size) + _CONTEXT_BYTES

    @cached_property
    def step_overhead_s(self) -> float:
        """Seconds per iteration: bf16 gradients reduced, Adam on the shard, parameters gathered."""
        parameters, gpu = self.model.parameters, self.cluster.gpu
        # Cast fp32 gradients to bf16 (read 4, write 2) and zero them (4). On the shard: gradient
        # norm (2), gradient, master and moments read (14), master, moments and bf16 written (14).
        moved = 10 * parameters + 30 * parameters / self.world_size
        links_s = self.cluster.reduce_scatter_s(2 * parameters, self.world_size)
        links_s += self.cluster.all_gather_s(2 * parameters, self.world_size)
        kernels = 4 * self.num_blocks
        return links_s + moved / gpu.stream_bytes_per_s + kernels * gpu.kernel_latency_s

    @cached_property
    def sp_sizes(self) -> tuple[int, ...]:
        """Powers of two up to the world size that split the heads, increasing."""
        return tuple(p for p in self._powers if self.model.sp_size_reason(p) is None)

    @cached_property
    def sp_size_exclusions(self) -> Mapping[int, str]:
        """Powers of two up to the world size that do not split the heads -> why."""
        reasons = {p: self.model.sp_size_reason(p) for p in self._powers}
        return {p: reason for p, reason in reasons.items() if reason is not None}

    @property
    def memory_error(self) -> float:
        """0: memory follows the law exactly, so no margin has to be kept."""
        return 0.0

    def time_s(self, b: Any, s: Any, p: Any, r: Any = 0) -> Any:
        """Seconds of a micro-batch: ``L (t_f + t_b) + r t_f + T_C`` (paper, Eq. 4-5).

        A recomputed block's forward repeats its all-to-alls too.
        """
        b, s, p = self._arguments(b, s, p)
        forward = self._block_s(b, s, p, backward=False)
        backward = self._block_s(b, s, p, backward=True)
        blocks = self.num_blocks * (forward + backward) + np.asarray(r) * forward
        return (blocks + self.rest_s(b, s, p))[()]

    def memory_bytes(self, b: Any, s: Any, p: Any, r: Any = 0) -> Any:
        """Peak bytes on each rank, int64 (paper, Eq. 6; NOTE live blocks in ``cost_model``)."""
        return self._memory(*self._bytes(b, s, p), np.asarray(r))[()]

    def min_recompute(self, b: Any, s: Any, p: Any, limit_bytes: int) -> Any:
        """Smallest r whose memory is within the limit, -1 where none is (int64)."""
        saved, always = self._bytes(b, s, p)
        most = self.num_blocks
        whole = self._memory(saved, always, np.zeros((), dtype=np.int64))
        r = np.ceil(np.maximum(whole - limit_bytes, 0) / np.maximum(saved, 1e-9))
        r = np.minimum(r, most).astype(np.int64)
        # Rounding may put r one off in either direction.
        r = np.where((r > 0) & (self._memory(saved, always, r - 1) <= limit_bytes), r - 1, r)
        r = np.where(self._memory(saved, always, r) > limit_bytes, r + 1, r)
        fits = (r <= most) & (self._memory(saved, always, r) <= limit_bytes)
        return np.where(fits, r, -1)[()]

    def fingerprint(self) -> str:
        """SHA-256 (hex) of model, cluster and world size."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    # ------------------------------------------------------------------ seconds

    def forward_s(self, b: Any, s: Any, p: Any) -> Any:
        """Seconds of one block's forward, its all-to-alls included."""
        return self._block_s(*self._arguments(b, s, p), backward=False)

    def backward_s(self, b: Any, s: Any, p: Any) -> Any:
        """Seconds of one block's backward, its all-to-alls included."""
        return self._block_s(*self._arguments(b, s, p), backward=True)

    def _block_s(self, b: Any, s: Any, p: Any, *, backward: bool) -> Any:
        tokens = b * s / p
        own = self._gemms(tokens, int(backward)) + self._attention_s(b, s, p, backward=backward)
        own = own + tokens * self._elementwise[backward] + self._launches[backward]
        return own + self._ulysses_s(tokens, p)

    def rest_s(self, b: Any, s: Any, p: Any) -> Any:
        """Seconds outside the blocks (T_C): embedding, head and loss, sharded over the sequence."""
        b, s, p = self._arguments(b, s, p)
        tokens = b * s / p
        model, gpu = self.model, self.cluster.gpu
        # Per token: embedding and last norm, forward and backward (20 per channel); logits in
        # bf16, in fp32 and their gradient (20 per word). Per pass: the embedding's dense gradient
        # is accumulated in fp32.
        moved = tokens * 20.0 * (model.width + model.vocab_size)
        moved = moved + 8.0 * model.vocab_size * model.width
        memory_s = moved / gpu.stream_bytes_per_s
        return self._gemms(tokens, 2) + memory_s + _KERNELS_REST * gpu.kernel_latency_s

    def _gemms(self, tokens: Any, column: int) -> Any:
        """Matrix products of a block's forward (0), backward (1), of the head (2), seconds."""
        rows = np.ceil(tokens / _ROWS)
        if rows.size and rows.max() < _TABLE:
            return self._gemm_table[column][rows.astype(np.int64)]
        return self._gemm_seconds(rows)[column]

    @cached_property
    def _gemm_table(self) -> list[npt.NDArray[np.float64]]:
        return self._gemm_seconds(np.arange(_TABLE, dtype=np.float64))

    def _gemm_seconds(self, rows: npt.NDArray[np.float64]) -> list[npt.NDArray[np.float64]]:
        model, gpu = self.model, self.cluster.gpu
        m, w = rows * _ROWS, model.width
        attention = [(w, w + 2 * model.kv_width), (w, w)] * model.attention_axes
        # Keys and values of the context are few and left out.
        cross = [(w, w), (w, w)] * model.cross_attentions
        up = (model.mlp_matrices - 1) * model.mlp_width
        mlp = [(w, up), (model.mlp_width, w)] * model.mlps
        head = [(w, model.vocab_size)] if model.vocab_size else []

        def forward(shapes: list[tuple[int, int]]) -> Any:
            return sum((gemm_s(gpu, m, k, n) for k, n in shapes), np.zeros_like(m))

        def backward(shapes: list[tuple[int, int]]) -> Any:
            # Gradients of input and weight; the latter is added to an fp32 sum (read and written,
            # instead of written in bf16), which is what makes small micro-batches dear.
            to_input = (gemm_s(gpu, m, n, k) for k, n in shapes)
            to_weight = (gemm_s(gpu, k, m, n, extra_bytes=6.0 * k * n) for k, n in shapes)
            return sum(to_input, np.zeros_like(m)) + sum(to_weight, np.zeros_like(m))

        block = attention + cross + mlp
        return [forward(block), backward(block), forward(head) + backward(head)]

    def _attention_s(self, b: Any, s: Any, p: Any, *, backward: bool) -> Any:
        """Flash attention of a block; forward 4 operations per pair and channel, backward 2.5 x."""
        model, gpu = self.model, self.cluster.gpu
        flops_per_s = gpu.peak_flops * gpu.attention_efficiency_forward
        if backward:
            flops_per_s = gpu.peak_flops * gpu.attention_efficiency_backward / 2.5
        axis = s if model.attention_axes == 1 else np.sqrt(s)
        padded = np.ceil(axis / _QUERY_TILE) * _QUERY_TILE
        # Causal: half of the tiles and the diagonal's.
        keys = (padded + _QUERY_TILE) / 2 if model.causal else padded
        compute_s = 4.0 * b * s * keys * (model.width / p) / flops_per_s
        # A tile of queries passes over its keys on one multiprocessor: few heads, little speed.
        chain = 4.0 * _QUERY_TILE * model.head_width * gpu.num_sms / flops_per_s
        moved = b * s / p * 4.0 * (model.width + model.kv_width_on(p)) * (1 + backward)
        total = model.attention_axes * np.maximum(
            np.maximum(compute_s, padded * chain), moved / gpu.memory_bandwidth
        )
        if model.cross_attentions:
            cross = 4.0 * b * s * model.context_tokens * (model.width / p) / flops_per_s
            total = total + model.cross_attentions * cross
        return total

    def _ulysses_s(self, tokens: Any, p: Any) -> Any:
        """The all-to-alls of q, k, v and output around each self-attention, and their copies.

        Both attentions of a model with two axes count, as the paper runs Ulysses around every
        attention. Cross-attention needs none: its queries stay where they are.
        """
        gpu = self.cluster.gpu
        total: Any = 0.0
        for width in (self.model.width, self.model.kv_width_on(p)):
            bytes_ = tokens * 2.0 * width
            # Before and after, the bytes are brought into order: read and written twice.
            copies_s = 4.0 * bytes_ / gpu.stream_bytes_per_s + 2 * gpu.kernel_latency_s
            total = total + 2 * (self.cluster.all_to_all_s(bytes_, p) + copies_s)
        return np.where(p > 1, self.model.attention_axes * total, 0.0)

    @cached_property
    def _launches(self) -> tuple[float, float]:
        model = self.model
        parts = (model.attention_axes, model.cross_attentions, model.mlps)
        forward, backward = (
            sum(a * n for a, n in zip(parts, kernels, strict=True))
            for kernels in (_KERNELS_FORWARD, _KERNELS_BACKWARD)
        )
        latency_s = self.cluster.gpu.kernel_latency_s
        return forward * latency_s, backward * latency_s

    @cached_property
    def _elementwise(self) -> tuple[float, float]:
        """Seconds per token of norms, residuals, rotary embedding and activation."""
        model, gpu = self.model, self.cluster.gpu
        w, hidden, matrices = model.width, model.mlp_width, model.mlp_matrices
        rotary = 4 * (w + model.kv_width) * model.attention_axes
        parts = model.attention_axes + model.cross_attentions + model.mlps
        # Norm: read, write. Residual: read two, write one. Backward of a norm reads one more.
        forward = 10 * w * parts + rotary + model.mlps * 2 * hidden * matrices
        backward = 12 * w * parts + rotary + model.mlps * 2 * hidden * (2 * matrices - 1)
        bandwidth = gpu.stream_bytes_per_s
        return forward / bandwidth, backward / bandwidth

    # ------------------------------------------------------------------ bytes

    def saved_bytes(self, b: Any, s: Any, p: Any) -> Any:
        """Bytes one block saves for backward on each rank (m), without its input."""
        b, s, p = self._arguments(b, s, p)
        context = self.model.context_bytes
        return b * s / p * self.model.saved_bytes_per_token(p) + b * context

    def input_bytes(self, b: Any, s: Any, p: Any) -> Any:
        """Bytes of one block's input on each rank (m_inp)."""
        b, s, p = self._arguments(b, s, p)
        return b * s / p * (2 * self.model.width)

    def rest_bytes(self, b: Any, s: Any, p: Any) -> Any:
        """Bytes on each rank besides the blocks': logits, or gradients of activations."""
        b, s, p = self._arguments(b, s, p)
        return b * s / p * self.model.rest_bytes_per_token

    def _bytes(self, b: Any, s: Any, p: Any) -> tuple[Any, Any]:
        # What a block adds unless it is recomputed, and what is there whatever r is.
        always = self.num_blocks * self.input_bytes(b, s, p) + self.rest_bytes(b, s, p)
        return self.saved_bytes(b, s, p), always + self.fixed_bytes

    def _memory(self, saved: Any, always: Any, r: Any) -> Any:
        live = np.maximum(self.num_blocks - r, 1)
        # Clipped: absurd lengths must not wrap around.
        return np.ceil(np.minimum(live * saved + always, 2.0**62)).astype(np.int64)

    # ------------------------------------------------------------------ arguments

    @property
    def _powers(self) -> tuple[int, ...]:
        return tuple(1 << i for i in range(self.world_size.bit_length()))

    def _arguments(self, b: Any, s: Any, p: Any) -> tuple[Any, Any, Any]:
        p = np.asarray(p, dtype=np.float64)
        for size in np.unique(p).tolist():
            if size not in self.sp_sizes:
                reason = self.sp_size_exclusions.get(int(size), "not a power of two up to W")
                raise ValueError(
                    f"SP size {size:g} cannot be used by {self.model.name} on {self.world_size} "
                    f"ranks: {reason}; possible: {list(self.sp_sizes)}."
                )
        return np.asarray(b, dtype=np.float64), np.asarray(s, dtype=np.float64), p

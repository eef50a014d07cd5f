"""One function for the attention kernel, and one place that decides which it is.

Shape legend: B samples (any leading dimensions), H heads of queries, K heads of keys and values,
S queries, C keys, D size of a head; tensors are (..., H, S, D).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import logging
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dcp.parallel.attention_spec import AttentionSpec

__all__ = ["KernelChoice", "choose_kernel", "dot_product_attention", "kernel_name"]

_log = logging.getLogger(__name__)

FLASH, FLASH_VARLEN = "flash-attn", "flash-attn varlen"
TORCH, TORCH_VARLEN = "torch", "torch varlen"
MATH = "math"
PER_SAMPLE = " per sample"

_HALF = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """The kernel for a call, and why it is that one.

    Attributes:
        name: "flash-attn", "torch" (``scaled_dot_product_attention``) or "math" (scores, cap, mask,
            softmax, as written down); for packed samples "flash-attn varlen", "torch varlen", or
            "torch per sample" and "math per sample", which call a kernel once for each.
        reason: half a sentence.
    """

    name: str
    reason: str


def choose_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    *,
    device_type: str,
    installed: Collection[str],
) -> KernelChoice:
    """Which kernel computes a call; looks at shapes and types only, whatever the machine.

    Args:
        query: (..., H, S, D).
        key: (..., K, C, D).
        value: (..., K, C, D).
        spec: what the call asks for.
        device_type: "cpu", "cuda", ...
        installed: what can be used of "flash-attn", "flash-attn varlen" and "torch varlen".
    """
    packed = spec.segments is not None
    plain = MATH if spec.softcap is not None else TORCH
    if packed:
        plain += PER_SAMPLE
    if device_type != "cuda":
        return KernelChoice(plain, f"on {device_type}")
    reason = _not_fused(query, key, value, spec)
    if reason is not None:
        return KernelChoice(plain, reason)
    flash = FLASH_VARLEN if packed else FLASH
    if flash in installed:
        return KernelChoice(flash, "installed, and fits the call")
    if packed and TORCH_VARLEN in installed:
        reason = _not_torch_varlen(query, spec)
        if reason is None:
            return KernelChoice(TORCH_VARLEN, "flash-attn is not installed")
        return KernelChoice(plain, f"flash-attn is not installed, and {reason}")
    return KernelChoice(plain, "flash-attn is not installed")


def _not_fused(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> str | None:
    """Why no flash kernel can take a call, or None where one can."""
    if spec.attn_mask is not None:
        return "the call has a mask"
    if query.dtype not in _HALF or not key.dtype == value.dtype == query.dtype:
        return f"flash kernels take half precision, not {str(query.dtype).removeprefix('torch.')}"
    if query.dim() != 4 or key.shape[:-3] != query.shape[:-3] or key.shape != value.shape:
        return "flash kernels take 4 dimensions, with as many samples of keys as of queries"
    if query.shape[-1] != key.shape[-1] or query.shape[-1] > 256:
        return "flash kernels take heads of one size, up to 256"
    if key.shape[-3] != query.shape[-3] and not spec.enable_gqa:
        return "heads are broadcast"
    if spec.is_causal and query.shape[-2] != key.shape[-2]:
        # torch aligns the causal mask at the top left, flash-attn at the bottom right
        return "the causal mask of unequal lengths is aligned otherwise"
    if spec.softcap is not None and spec.dropout_p:
        return "flash-attn has no softcap together with dropout"
    return None


def _not_torch_varlen(query: Tensor, spec: AttentionSpec) -> str | None:
    if spec.softcap is not None:
        return "torch's varlen_attn has no softcap"
    if spec.dropout_p:
        return "torch's varlen_attn has no dropout"
    if query.shape[-1] % 8:
        return "torch's varlen_attn needs heads of a multiple of 8"
    return None


def kernel_name(device: torch.device | str) -> str:
    """Name of the kernel for plain attention on ``device``, for logs and the fingerprint."""
    device = torch.device(device)
    return FLASH if device.type == "cuda" and FLASH in _installed(device) else TORCH


def dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec | None = None
) -> Tensor:
    """Attention over whole sequences, by the kernel that ``choose_kernel`` names.

    Args:
        query: (..., H, S, D).
        key: (..., K, C, D).
        value: (..., K, C, D).
        spec: default: no mask, no dropout. With ``segments`` S = C is their sum; a mask is then the
            whole (..., S, C), of which the part inside each sample counts.

    Returns:
        (..., H, S, D).

    Raises:
        ValueError: for segments that are not the queries and keys.
    """
    spec = spec or AttentionSpec()
    if spec.segments is not None:
        _check_segments(spec.segments, query, key)
        if len(spec.segments) == 1:
            spec = dataclasses.replace(spec, segments=None)
    device = query.device
    installed = _installed(device) if device.type == "cuda" else frozenset()
    choice = choose_kernel(query, key, value, spec, device_type=device.type, installed=installed)
    _log_once(choice)
    if spec.segments is not None:
        if choice.name.endswith(PER_SAMPLE):
            return _per_sample(query, key, value, spec, spec.segments)
        return _varlen(choice.name, query, key, value, spec, spec.segments)
    if choice.name == FLASH:
        out: Tensor = _flash_attn("flash_attn_func")(  # takes (B, S, H, D)
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            dropout_p=spec.dropout_p,
            softmax_scale=spec.scale,
            causal=spec.is_causal,
            softcap=spec.softcap or 0.0,
        )
        return out.transpose(1, 2)
    if choice.name == MATH:
        return _math(query, key, value, spec)
    options: dict[str, Any] = {"enable_gqa": True} if spec.enable_gqa else {}
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        spec.attn_mask,
        spec.dropout_p,
        spec.is_causal,
        scale=spec.scale,
        **options,
    )


# ---------------------------------------------------------------------- the kernels


def _math(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention written down: scores, cap, mask, softmax (in float32 at least), dropout."""
    if spec.enable_gqa and key.shape[-3] != query.shape[-3]:
        num_each = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(num_each, -3) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    scores = query @ key.transpose(-2, -1) * scale  # (..., H, S, C)
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if spec.is_causal:
        if spec.attn_mask is not None:
            raise ValueError("attention with both an attn_mask and is_causal: give one of them")
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    elif spec.attn_mask is not None and spec.attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~spec.attn_mask, float("-inf"))
    elif spec.attn_mask is not None:
        scores = scores + spec.attn_mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    dead = None
    if spec.attn_mask is not None:
        # A row that attends to nothing (padding after a sliding window) would be NaN, in its
        # gradient too; it is zero, as torch's own and that of a ring.
        dead = scores.detach().amax(-1, keepdim=True).isneginf()
        scores = scores.masked_fill(dead, 0.0)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    weights = weights if dead is None else weights.masked_fill(dead, 0.0)
    return F.dropout(weights, spec.dropout_p) @ value if spec.dropout_p else weights @ value


def _per_sample(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, segments: tuple[int, ...]
) -> Tensor:
    """A call for each packed sample: no score between two of them is ever computed."""
    sizes = list(segments)
    parts = zip(
        torch.split(query, sizes, -2),
        torch.split(key, sizes, -2),
        torch.split(value, sizes, -2),
        _masks(spec.attn_mask, segments),
        strict=True,
    )
    return torch.cat(
        [
            dot_product_attention(q, k, v, dataclasses.replace(spec, attn_mask=mask, segments=None))
            for q, k, v, mask in parts
        ],
        -2,
    )


def _masks(mask: Tensor | None, segments: tuple[int, ...]) -> list[Tensor | None]:
    """The part of a mask of the whole that is inside of each sample."""
    if mask is None:
        return [None] * len(segments)
    parts: list[Tensor | None] = []
    for length, stop in zip(segments, itertools.accumulate(segments), strict=True):
        own = mask
        for dim in (-1, -2)[: mask.dim()]:
            if own.shape[dim] != 1:
                own = own.narrow(dim, stop - length, length)
        parts.append(own)
    return parts


def _varlen(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    segments: tuple[int, ...],
) -> Tensor:
    """All packed samples in one call of a kernel for (tokens, heads, D) and borders."""
    batch_size = query.shape[0]
    borders = _borders(segments * batch_size, query.device)
    longest = max(segments)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    if name == FLASH_VARLEN:
        out: Tensor = _flash_attn("flash_attn_varlen_func")(
            *flat,
            borders,
            borders,
            longest,
            longest,
            dropout_p=spec.dropout_p,
            softmax_scale=spec.scale,
            causal=spec.is_causal,
            softcap=spec.softcap or 0.0,
        )
    else:
        out = _torch_varlen()(
            *flat,
            borders,
            borders,
            longest,
            longest,
            scale=spec.scale,
            window_size=(-1, 0) if spec.is_causal else (-1, -1),
            enable_gqa=spec.enable_gqa,
        )
    return out.reshape(batch_size, -1, *out.shape[1:]).transpose(1, 2)


@functools.lru_cache(maxsize=8)  # every block of a micro-batch asks for the same
def _borders(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    stops = [0, *itertools.accumulate(lengths)]
    return torch.tensor(stops, dtype=torch.int32, device=device)


def _check_segments(segments: tuple[int, ...], query: Tensor, key: Tensor) -> None:
    total = sum(segments)
    if query.shape[-2] != total or key.shape[-2] != total:
        raise ValueError(
            f"attention of {query.shape[-2]} queries to {key.shape[-2]} keys for packed samples of "
            f"{total} tokens in all: both must be the packed sequence"
        )


# ---------------------------------------------------------------------- what is installed


@functools.cache
def _installed(device: torch.device) -> frozenset[str]:
    """The fused kernels that can be used on a CUDA device. Looked up when first needed."""
    if torch.cuda.get_device_capability(device) < (8, 0):  # none of them runs on older ones
        return frozenset()
    found = set()
    for name, function in ((FLASH, "flash_attn_func"), (FLASH_VARLEN, "flash_attn_varlen_func")):
        try:
            _flash_attn(function)
        except (ImportError, AttributeError):
            continue
        found.add(name)
    try:
        # Earlier versions of it knew neither grouped heads nor a scale.
        if {"scale", "window_size", "enable_gqa"} <= set(
            inspect.signature(_torch_varlen()).parameters
        ):
            found.add(TORCH_VARLEN)
    except (ImportError, AttributeError):
        pass
    return frozenset(found)


@functools.cache
def _flash_attn(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module("flash_attn"), name)
    return function


@functools.cache
def _torch_varlen() -> Callable[..., Any]:
    module = importlib.import_module("torch.nn.attention.varlen")
    function: Callable[..., Any] = module.varlen_attn
    return function


@functools.cache
def _log_once(choice: KernelChoice) -> None:
    _log.info("attention kernel: %s (%s)", choice.name, choice.reason)

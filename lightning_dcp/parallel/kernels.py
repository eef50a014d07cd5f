"""One function for the attention kernel: flash-attn where it can be used, torch's own otherwise.

Shape legend: B samples, H heads, S tokens, D size of a head; tensors are (..., H, S, D).
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dcp.parallel.attention_spec import AttentionSpec

__all__ = ["dot_product_attention", "kernel_name"]

_log = logging.getLogger(__name__)


@functools.cache
def _flash_attention() -> Callable[..., Tensor] | None:
    """flash-attn's function, or None where it is not installed. Looked up when first needed."""
    try:
        function: Callable[..., Tensor] = importlib.import_module("flash_attn").flash_attn_func
    except (ImportError, AttributeError):
        return None
    return function


def kernel_name(device: torch.device | str) -> str:
    """Name of the kernel for attention on ``device``, for logs and the profile's fingerprint."""
    if torch.device(device).type == "cuda" and _flash_attention() is not None:
        return "flash-attn"
    return "torch"


@functools.cache
def _log_once(name: str) -> None:
    _log.info("attention kernel: %s", name)


def dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec | None = None
) -> Tensor:
    """Attention over whole sequences: by flash-attn for unmasked half precision on CUDA, or torch.

    Args:
        query: (..., H, S, D).
        key: (..., K, C, D).
        value: (..., K, C, D).
        spec: default: no mask, no dropout.

    Returns:
        (..., H, S, D).
    """
    spec = spec or AttentionSpec()
    if query.is_cuda and _fits_flash(query, key, value, spec):
        flash = _flash_attention()
        if flash is not None:
            _log_once("flash-attn")
            out = flash(  # takes (B, S, H, D); heads of keys may be fewer
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                dropout_p=spec.dropout_p,
                softmax_scale=spec.scale,
                causal=spec.is_causal,
                softcap=spec.softcap or 0.0,
            )
            return out.transpose(1, 2)
    if spec.softcap is not None or spec.segments is not None:
        raise NotImplementedError("softcap and packed samples")
    _log_once("torch's scaled_dot_product_attention")
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


def _fits_flash(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> bool:
    return (
        spec.attn_mask is None
        and spec.segments is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and key.dtype == value.dtype == query.dtype
        and query.dim() == 4
        and key.shape[:-3] == query.shape[:-3]
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
        # for unequal lengths torch aligns the causal mask at the top left, flash-attn at the bottom
        # right
        and (not spec.is_causal or query.shape[-2] == key.shape[-2])
    )

"""Attention of one span of queries to one span of keys, and its gradient, given the whole's lse.

Shape legend: ... leading dimensions, H heads of queries, K of keys, Q queries, C keys, D size of a
head. Everything is computed in float32 at least.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.parallel.ring_layout import Span

__all__ = ["Chunk", "attend_chunk", "chunk_gradients"]

_aten: Any = torch.ops.aten


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """What a pair of spans needs to know.

    Attributes:
        queries: their place in the sequence.
        keys: theirs.
        is_causal: of the call.
        scale: of the scores.
        softcap: of the call.
        dropout_p: of the call.
        seed: of the dropout of the whole call.
    """

    queries: Span
    keys: Span
    is_causal: bool
    scale: float
    softcap: float | None
    dropout_p: float
    seed: int

    @property
    def is_cut(self) -> bool:
        """Whether the causal mask hides a part."""
        return self.is_causal and self.keys.stop - 1 > self.queries.start


def attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, chunk: Chunk
) -> tuple[Tensor, Tensor]:
    """Output (..., H, Q, D) normalised over these keys alone, and its log-sum-exp (..., H, Q)."""
    if _is_fused(q, v, mask, chunk):
        k, v = (_repeated(x, q) for x in (k, v))
        out, lse = _fused(q, k, v, chunk)[:2]
        return out.to(_wide(q)), lse.to(_wide(q))
    q, k, v = (x.to(_wide(q)) for x in (q, k, v))
    scores, _ = _scores(q, _repeated(k, q), mask, chunk)
    lse = scores.logsumexp(-1)
    weights = _weights(scores, lse)
    if (keep := _kept(weights, chunk)) is not None:
        weights = weights * keep
    return weights @ _repeated(v, q), lse


def chunk_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    chunk: Chunk,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of queries, keys, values and scores (as the mask is added), for this pair.

    Args:
        grad: of the output over all keys.
        q: (..., H, Q, D).
        k: (..., K, C, D).
        v: (..., K, C, D).
        mask: broadcastable to (..., H, Q, C).
        out: over all keys.
        lse: over all keys.
        chunk: the pair.
    """
    num_kv_heads = k.shape[-3]
    if _is_fused(q, v, mask, chunk):
        k, v = (_repeated(x, q) for x in (k, v))
        dq, dk, dv = _fused_gradients(grad, q, k, v, out, lse, chunk)
        wide = _wide(q)
        dk, dv = (_summed(x.to(wide), num_kv_heads) for x in (dk, dv))
        return dq.to(wide), dk, dv, None
    grad, q, k, v, out = (x.to(_wide(q)) for x in (grad, q, k, v, out))
    k, v = _repeated(k, q), _repeated(v, q)
    scores, slope = _scores(q, k, mask, chunk)
    weights = _weights(scores, lse)
    keep = _kept(weights, chunk)
    d_weights = grad @ v.transpose(-2, -1)
    dv = (weights if keep is None else weights * keep).transpose(-2, -1) @ grad
    if keep is not None:
        d_weights = d_weights * keep
    d_scores = weights * (d_weights - (grad * out).sum(-1, keepdim=True))
    d_raw = d_scores if slope is None else d_scores * slope
    dq = d_raw @ k * chunk.scale
    dk = d_raw.transpose(-2, -1) @ q * chunk.scale
    return dq, _summed(dk, num_kv_heads), _summed(dv, num_kv_heads), d_scores


# ---------------------------------------------------------------------- written down


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of as many heads as the queries."""
    num_each = q.shape[-3] // x.shape[-3]
    return x if num_each == 1 else x.repeat_interleave(num_each, -3)


def _summed(x: Tensor, num_heads: int) -> Tensor:
    """The transpose of ``_repeated``."""
    return (
        x
        if x.shape[-3] == num_heads
        else x.reshape(*x.shape[:-3], num_heads, -1, *x.shape[-2:]).sum(-3)
    )


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, chunk: Chunk
) -> tuple[Tensor, Tensor | None]:
    """Masked scores (..., H, Q, C), and the slope of the cap, if there is one."""
    scores = q @ k.transpose(-2, -1) * chunk.scale
    slope = None
    if chunk.softcap is not None:
        squashed = torch.tanh(scores / chunk.softcap)
        scores, slope = squashed * chunk.softcap, 1 - squashed**2
    if chunk.is_cut:
        rows = torch.arange(chunk.queries.start, chunk.queries.stop, device=q.device)
        columns = torch.arange(chunk.keys.start, chunk.keys.stop, device=q.device)
        scores = scores.masked_fill(columns > rows[:, None], float("-inf"))
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    return scores, slope


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Zero in rows that see no key, as torch's are."""
    return (scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()


def _kept(weights: Tensor, chunk: Chunk) -> Tensor | None:
    """0 for dropped weights, else 1 / (1 - p); the same whenever asked for this pair."""
    if chunk.dropout_p == 0:
        return None
    if chunk.dropout_p == 1:
        return torch.zeros_like(weights)
    generator = torch.Generator(weights.device)
    place = chunk.queries.start * 1_000_003 + chunk.keys.start
    generator.manual_seed((chunk.seed + place) % 2**63)
    drawn = torch.rand(weights.shape, generator=generator, device=weights.device)
    return (drawn >= chunk.dropout_p).to(weights.dtype) / (1 - chunk.dropout_p)


# ---------------------------------------------------------------------- torch's fused kernels


def _is_fused(q: Tensor, v: Tensor, mask: Tensor | None, chunk: Chunk) -> bool:
    """Whether a kernel that keeps no scores can take the pair."""
    if mask is not None or chunk.softcap is not None or chunk.dropout_p or q.dim() != 4:
        return False
    if chunk.is_cut and (chunk.queries != chunk.keys):
        return False
    if q.shape[-1] != v.shape[-1]:
        return False
    if q.device.type == "cpu":
        return q.numel() > 0
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _fused(q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> Any:
    """(out, lse, ...) of the flash kernel."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, chunk.is_cut, scale=chunk.scale
        )
    return _aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, chunk.is_cut, False, scale=chunk.scale
    )


def _fused_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, chunk: Chunk
) -> Any:
    """(dq, dk, dv); with the output and lse over all keys the kernel gives this pair's part."""
    if q.device.type == "cpu":
        # A row of no key at all does not occur here: the diagonal has one for each query.
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, chunk.is_cut, scale=chunk.scale
        )
    empty = torch.empty(0, dtype=torch.uint64, device=q.device)  # of dropout, which there is not
    return _aten._scaled_dot_product_flash_attention_backward(
        grad.contiguous(),
        q,
        k,
        v,
        out.contiguous(),
        lse.contiguous(),
        None,
        None,
        q.shape[-2],
        k.shape[-2],
        0.0,
        chunk.is_cut,
        empty,
        empty,
        scale=chunk.scale,
    )

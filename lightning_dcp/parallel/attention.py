"""Attention over a sequence whose tokens are spread over the ranks of an SP group (Ulysses).

Shape legend:
    B  samples (any leading dimensions)    H  heads (of queries)    K  heads of keys and values
    D  size of a head    S  true length    C  length of an unsharded condition
    p  ranks    n  tokens per rank, p * n >= S

Each rank comes with (B, H, n, D), exchanges tokens for heads, has (B, H/p, p * n, D), cuts the
padding off, attends over the S true tokens of its heads, and exchanges back. Padding never reaches
the kernel, so the result is exact without any mask. With 3 dimensions, (B * H, S, D), samples times
heads are split like heads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_dcp.parallel import region
from lightning_dcp.parallel.collectives import heads_to_sequence, pad_sequence, sequence_to_heads
from lightning_dcp.parallel.kernels import dot_product_attention
from lightning_dcp.parallel.region import AttentionCall, ShardedPass

__all__ = ["attention", "heads_reason"]

_thread = threading.local()


@contextmanager
def no_interception() -> Iterator[None]:
    """Attention calls of this thread go straight to the kernel."""
    outer = is_intercepting()
    _thread.off = True
    try:
        yield
    finally:
        _thread.off = not outer


def is_intercepting() -> bool:
    """Whether this thread is outside ``no_interception``."""
    return not getattr(_thread, "off", False)


def heads_reason(num_heads: int, num_kv_heads: int, sp_size: int) -> str | None:
    """Why ``sp_size`` ranks cannot split these heads, or None where they can.

    Keys and values with fewer heads than ranks are repeated, where their number divides that of the
    ranks.
    """
    if num_heads % sp_size:
        return f"{sp_size} does not divide the {num_heads} attention heads"
    if num_kv_heads % sp_size and sp_size % num_kv_heads:
        return f"{sp_size} ranks cannot share the {num_kv_heads} key/value heads"
    return None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention that is right inside and outside a sharded region.

    A model's blocks may call it instead of ``F.scaled_dot_product_attention`` (whose signature it
    has); calls to that one are intercepted, so this is needed only where a block would call another
    kernel.

    Args:
        query: (B, H, S, D), inside a sharded region (B, H, n, D); 3 dimensions: (B * H, S, D).
        key: (B, K, S, D) likewise, or (B, K, C, D) of a condition that is whole on every rank.
        value: as ``key``.
        attn_mask: as in torch, for the *whole* sequence: broadcastable to (B, H, S, S); (B, H, S,
            C) for a condition.
        dropout_p: probability of dropping an attention weight.
        is_causal: mask keys after the query; not together with ``attn_mask``.
        scale: of the scores, default 1/sqrt(D).
        enable_gqa: whether K may be less than H.

    Returns:
        Shaped as ``query`` (last dimension as that of ``value``).

    Raises:
        ValueError: inside a sharded region, if lengths, heads or mask do not tell a sharded
            sequence.
    """
    observe(query, key)
    shard = region.current_pass(query.shape[-2])
    if shard is None:
        with no_interception():
            return dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
    if check_lengths(shard, query.shape[-2], key.shape[-2]) == "self":
        return _over_ranks(
            shard, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    if is_causal:
        attn_mask, is_causal = _causal_rows(shard, query, key), False
    else:
        attn_mask = query_rows(shard, attn_mask)
    with no_interception():
        return dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )


def observe(query: Tensor, key: Tensor) -> None:
    """Record the call, where the blocks are being observed."""
    state = region.active()
    if state is None or state.calls is None or region.in_backward():
        return
    state.calls.append(
        AttentionCall(
            num_heads=query.shape[-3] if query.dim() > 2 else 1,
            num_kv_heads=key.shape[-3] if key.dim() > 2 else 1,
            query_length=query.shape[-2],
            key_length=key.shape[-2],
            batch_size=query.shape[0] if query.dim() > 3 else None,
        )
    )


def check_lengths(shard: ShardedPass, query_length: int, key_length: int) -> str:
    """What a call attends to: "self" (the sharded sequence) or "cross" (a whole condition).

    Raises:
        ValueError: where the lengths leave it open: better than a silently wrong result.
    """
    local, conditions = shard.local_length, shard.condition_lengths
    if query_length == local and key_length == local:
        return "self"
    if query_length == local and key_length in conditions:
        return "cross"
    raise ValueError(
        f"attention of {query_length} queries to {key_length} keys inside sharded blocks: each of "
        f"the {shard.group.size} ranks has {local} of {shard.length} tokens, and the lengths of "
        f"the blocks' whole arguments are {sorted(conditions)}. Windows, tokens added to the keys "
        f"and lengths kept in the module cannot be sharded (a wrong sequence dimension also ends "
        f"here: name it in `sequence_dims`). Otherwise limit the SP sizes to 1"
    )


def query_rows(shard: ShardedPass, mask: Tensor | None) -> Tensor | None:
    """The rows of this rank's queries of a whole mask (..., S, C); one that has no rows stays."""
    if mask is None or mask.dim() < 2 or mask.shape[-2] in (1, shard.local_length):
        return mask
    if mask.shape[-2] != shard.length:
        raise ValueError(
            f"an attention mask of shape {tuple(mask.shape)} has {mask.shape[-2]} rows, but there "
            f"are {shard.length} queries in the whole sequence"
        )
    rows = torch.arange(shard.start, shard.start + shard.local_length, device=mask.device)
    return mask.index_select(-2, rows.clamp(max=shard.length - 1))


def _causal_rows(shard: ShardedPass, query: Tensor, key: Tensor) -> Tensor:
    rows = shard.start + torch.arange(query.shape[-2], device=query.device)
    return torch.arange(key.shape[-2], device=query.device) <= rows[:, None]


def _over_ranks(
    shard: ShardedPass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    group = shard.group
    if query.dim() < 3:
        raise ValueError(
            f"attention inside sharded blocks needs a dimension of heads, got a query of shape "
            f"{tuple(query.shape)}"
        )
    num_heads = query.shape[-3]
    key = _spread_heads(key, query, group.size, enable_gqa)
    value = _spread_heads(value, query, group.size, enable_gqa)
    reason = heads_reason(num_heads, key.shape[-3], group.size)
    if reason is not None:
        raise ValueError(f"{reason} (query {tuple(query.shape)}, key {tuple(key.shape)})")
    mask = _own_heads(shard, attn_mask, num_heads)

    whole = heads_to_sequence([query, key, value], group)
    query, key, value = (tensor.narrow(-2, 0, shard.length) for tensor in whole)
    with no_interception():
        out = dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale, enable_gqa
        )
    padded_length = group.size * shard.local_length
    if padded_length > shard.length:
        out = pad_sequence(out, out, out.dim() - 2, padded_length)
    return sequence_to_heads(out, group)


def _spread_heads(tensor: Tensor, query: Tensor, sp_size: int, enable_gqa: bool) -> Tensor:
    """Keys or values with the heads that ranks need: broadcast and repeated as far as that."""
    num_heads, num_kv_heads = query.shape[-3], tensor.shape[-3]
    if not enable_gqa:
        lead = torch.broadcast_shapes(query.shape[:-2], tensor.shape[:-2])  # type: ignore[no-untyped-call]
        return tensor.expand(*lead, *tensor.shape[-2:])
    if num_kv_heads % sp_size and sp_size % num_kv_heads == 0 and num_heads % sp_size == 0:
        # Rank i has the query heads from i * H/p on, which all belong to the key head i * K // p.
        return tensor.repeat_interleave(sp_size // num_kv_heads, -3)
    return tensor


def _own_heads(shard: ShardedPass, mask: Tensor | None, num_heads: int) -> Tensor | None:
    """The part of a whole mask that belongs to this rank's heads."""
    if mask is None:
        return None
    length = shard.length
    if mask.dim() < 2 or mask.shape[-1] not in (1, length) or mask.shape[-2] not in (1, length):
        raise ValueError(
            f"an attention mask of shape {tuple(mask.shape)} inside sharded blocks: masks must be "
            f"those of the whole sequence, (..., {length} or 1, {length}). One that a block builds "
            f"from its own {shard.local_length} tokens is not: build it outside the blocks, or use "
            f"is_causal"
        )
    if mask.dim() < 3 or mask.shape[-3] == 1:
        return mask
    if mask.shape[-3] != num_heads:
        raise ValueError(
            f"an attention mask of shape {tuple(mask.shape)} has {mask.shape[-3]} in its dimension "
            f"of heads, the query has {num_heads}"
        )
    num_own = num_heads // shard.group.size
    return mask.narrow(-3, shard.group.rank_in_group * num_own, num_own)

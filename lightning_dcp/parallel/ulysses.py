"""Attention over a sequence whose tokens are spread over the ranks of a group (Ulysses).

Shape legend:
    B  samples (any leading dimensions)    H  heads (of queries)    K  heads of keys and values
    D  size of a head    S  true length    p  ranks    n  tokens per rank, p * n >= S

Each rank comes with (B, H, n, D), exchanges tokens for heads, has (B, H/p, p * n, D), cuts the
padding off, attends over the S true tokens of its heads, and exchanges back. Padding never reaches
the kernel, so the result is exact without any mask. With 3 dimensions, (B * H, S, D), samples times
heads are split like heads.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from lightning_dcp.parallel.attention_spec import AttentionSpec
from lightning_dcp.parallel.collectives import heads_to_sequence, pad_sequence, sequence_to_heads
from lightning_dcp.parallel.interception_switch import no_interception
from lightning_dcp.parallel.kernels import dot_product_attention
from lightning_dcp.parallel.region import ShardedPass

__all__ = ["attend_over_ranks", "heads_reason"]


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


def attend_over_ranks(
    shard: ShardedPass, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
) -> Tensor:
    """Self-attention of the whole sequence, of which each tensor is this rank's share.

    Args:
        shard: the pass that the tensors belong to.
        query: (B, H, n, D) or (B * H, n, D).
        key: (B, K, n, D) likewise.
        value: as ``key``.
        spec: with the mask of the whole sequence.

    Returns:
        This rank's share, (B, H, n, D).

    Raises:
        ValueError: for heads that the ranks cannot share, or a mask that is not of the whole.
    """
    group = shard.group
    if query.dim() < 3:
        raise ValueError(
            f"attention inside sharded blocks needs a dimension of heads, got a query of shape "
            f"{tuple(query.shape)}"
        )
    num_heads = query.shape[-3]
    key = _spread_heads(key, query, group.size, spec.enable_gqa)
    value = _spread_heads(value, query, group.size, spec.enable_gqa)
    reason = heads_reason(num_heads, key.shape[-3], group.size)
    if reason is not None:
        raise ValueError(f"{reason} (query {tuple(query.shape)}, key {tuple(key.shape)})")
    own = dataclasses.replace(spec, attn_mask=_own_heads(shard, spec.attn_mask, num_heads))

    whole = heads_to_sequence([query, key, value], group)
    query, key, value = (tensor.narrow(-2, 0, shard.length) for tensor in whole)
    with no_interception():
        out = dot_product_attention(query, key, value, own)
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

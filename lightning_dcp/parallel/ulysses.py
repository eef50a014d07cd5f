"""Attention over a sequence whose tokens are spread over the ranks of a group.

Shape legend:
    B  samples (any leading dimensions)    H  heads (of queries)    K  heads of keys and values
    D  size of a head    S  true length    p  ranks    n  tokens per rank, p * n >= S

Each rank comes with (B, H, n, D), exchanges tokens for heads, has (B, H/p, p * n, D), cuts the
padding off, attends over the S true tokens of its heads, and exchanges back. Padding never reaches
the kernel, so the result is exact without any mask (Ulysses). Where the heads do not suffice for p
ranks, ``heads.split_heads`` has fewer of them share heads, and the rest is a ring. With 3
dimensions, (B * H, S, D), samples times heads are split like heads.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from lightning_dcp.parallel.attention_spec import AttentionSpec
from lightning_dcp.parallel.collectives import heads_to_sequence, pad_sequence, sequence_to_heads
from lightning_dcp.parallel.heads import HeadSplit, split_heads
from lightning_dcp.parallel.interception_switch import no_interception
from lightning_dcp.parallel.kernels import dot_product_attention
from lightning_dcp.parallel.region import ShardedPass
from lightning_dcp.parallel.ring import ring_attention
from lightning_dcp.parallel.ring_layout import from_ring, ring_layout, to_ring

__all__ = ["attend_over_ranks", "repeat_heads", "tokens_of_own"]


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
        ValueError: for keys whose heads do not fit the queries', or a mask not of the whole.
    """
    group = shard.group
    if query.dim() < 3:
        raise ValueError(
            f"attention inside sharded blocks needs a dimension of heads, got a query of shape "
            f"{tuple(query.shape)}"
        )
    num_heads = query.shape[-3]
    key, value = (_broadcast(tensor, query, spec.enable_gqa) for tensor in (key, value))
    if num_heads % key.shape[-3] or key.shape[-3] != value.shape[-3]:
        raise ValueError(
            f"attention of {num_heads} heads cannot share keys and values of {key.shape[-3]} and "
            f"{value.shape[-3]} (query {tuple(query.shape)}, key {tuple(key.shape)}, value "
            f"{tuple(value.shape)})"
        )
    split = split_heads(num_heads, key.shape[-3], group.size)
    key, value = (repeat_heads(tensor, split.ulysses) for tensor in (key, value))
    own = dataclasses.replace(spec, attn_mask=_own_heads(shard, spec.attn_mask, num_heads, split))
    if split.ring > 1:
        return _attend_in_ring(shard, query, key, value, own, split)

    whole = heads_to_sequence([query, key, value], group)
    query, key, value = (tensor.narrow(-2, 0, shard.length) for tensor in whole)
    with no_interception():
        out = dot_product_attention(query, key, value, own)
    return tokens_of_own(shard, out)


def tokens_of_own(shard: ShardedPass, whole: Tensor) -> Tensor:
    """All tokens of a share of the heads -> this rank's share of the tokens of all heads.

    Args:
        shard: the pass.
        whole: (..., H/p, S, D).

    Returns:
        (..., H, n, D).
    """
    padded_length = shard.group.size * shard.local_length
    return sequence_to_heads(
        pad_sequence(whole, whole, whole.dim() - 2, padded_length), shard.group
    )


def _attend_in_ring(
    shard: ShardedPass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: AttentionSpec,
    split: HeadSplit,
) -> Tensor:
    if own.is_causal and own.attn_mask is not None:
        raise ValueError("attention with both an attn_mask and is_causal: give one of them")
    tensors = [query, key, value]
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):  # as for torch's kernels, before anything is sent
        low = torch.get_autocast_dtype(device_type)
        tensors = [t if t.dtype == torch.float64 else t.to(low) for t in tensors]
    # A mask with rows is usually causal in part.
    rows = own.attn_mask is not None and own.attn_mask.dim() > 1 and own.attn_mask.shape[-2] > 1
    layout = ring_layout(
        shard.length,
        shard.local_length,
        split,
        zigzag=own.is_causal or rows,
        segments=own.segments,
    )
    query, key, value = to_ring(tensors, layout, shard.group)
    out = ring_attention(query, key, value, own, layout, shard.group)
    return from_ring(out, layout, shard.group)


def _broadcast(tensor: Tensor, query: Tensor, enable_gqa: bool) -> Tensor:
    """Keys or values as torch would broadcast them to the queries."""
    if enable_gqa:
        return tensor
    lead = torch.broadcast_shapes(query.shape[:-2], tensor.shape[:-2])  # type: ignore[no-untyped-call]
    return tensor.expand(*lead, *tensor.shape[-2:])


def repeat_heads(tensor: Tensor, degree: int) -> Tensor:
    """Keys or values with the heads that the ranks which share heads need."""
    num_kv_heads = tensor.shape[-3]
    if num_kv_heads % degree == 0:
        return tensor
    # Rank i has the query heads from i * H/u on, which all belong to the key head i * K // u.
    return tensor.repeat_interleave(degree // num_kv_heads, -3)


def _own_heads(
    shard: ShardedPass, mask: Tensor | None, num_heads: int, split: HeadSplit
) -> Tensor | None:
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
    num_own = num_heads // split.ulysses
    first = shard.group.rank_in_group % split.ulysses * num_own
    return mask.narrow(-3, first, num_own)

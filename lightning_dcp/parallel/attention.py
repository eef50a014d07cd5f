"""The one attention function: what a call's tensors are, and how it is computed then.

Shape legend:
    B  samples (any leading dimensions)    H  heads (of queries)    K  heads of keys and values
    D  size of a head    S  true length    C  length of an unsharded condition
    p  ranks    n  tokens per rank, p * n >= S
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from lightning_dcp.parallel import region
from lightning_dcp.parallel.attention_spec import AttentionSpec
from lightning_dcp.parallel.axes import Axis, attention_axis, current_axis
from lightning_dcp.parallel.interception_switch import no_interception
from lightning_dcp.parallel.kernels import dot_product_attention
from lightning_dcp.parallel.region import AttentionCall, ShardedPass
from lightning_dcp.parallel.segments import packed_lengths
from lightning_dcp.parallel.ulysses import attend_over_ranks

__all__ = ["attend", "attention"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    axis: Axis | None = None,
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
        softcap: scores become ``softcap * tanh(scores / softcap)``, as in Gemma 2.
        axis: what the call attends along, as ``attention_axis`` around it would say.

    Returns:
        Shaped as ``query`` (last dimension as that of ``value``).

    Raises:
        ValueError: inside a sharded region, if lengths, heads or mask do not tell a sharded
            sequence.
    """
    spec = AttentionSpec(
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        softcap=softcap,
    )
    if axis is None:
        return attend(query, key, value, spec)
    with attention_axis(axis):
        return attend(query, key, value, spec)


def attend(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """``attention`` with its options in one value."""
    observe(query, key)
    shard = sharded_along(query.shape[-2], key.shape[-2])
    if shard is not None:
        if check_lengths(shard, query.shape[-2], key.shape[-2]) == "self":
            spec = dataclasses.replace(spec, segments=packed_lengths(shard.length, shard.length))
            return region.kept(attend_over_ranks(shard, query, key, value, spec))
        packed_lengths(shard.length, key.shape[-2])
        if spec.is_causal:
            rows: Tensor | None = _causal_rows(shard, query, key)
        else:
            rows = query_rows(shard, spec.attn_mask)
        spec = dataclasses.replace(spec, attn_mask=rows, is_causal=False)
    elif current_axis() != "whole":
        segments = packed_lengths(query.shape[-2], key.shape[-2])
        spec = dataclasses.replace(spec, segments=segments)
    with no_interception():
        return dot_product_attention(query, key, value, spec)


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
            axis=current_axis(),
        )
    )


def sharded_along(query_length: int, key_length: int) -> ShardedPass | None:
    """The pass along the axis that a call attends along; None where each rank has all of that.

    Raises:
        ValueError: for a call whose mark, or lack of one, is wrong.
    """
    axis = current_axis()
    if axis == "whole":
        state = region.active()
        if state is not None and state.open is not None:
            state.open.marked = True
        return None
    shard = region.current_pass(query_length)
    if shard is None:
        return None
    if axis is None:
        if shard.marked:
            raise ValueError(
                f"attention of {query_length} queries to {key_length} keys without a mark, in "
                f"sharded blocks that have several axes of tokens or mark other calls: put `with "
                f'lightning_dcp.attention_axis("sharded")` (or "whole") around it, inside of what '
                f"recomputes it"
            )
        return shard
    shard.marked = True
    along = shard.along(query_length)
    if along is None or key_length != query_length:
        shares = " or ".join(f"{local} of {length}" for length, local in shard.axes.items())
        raise ValueError(
            f"attention of {query_length} queries to {key_length} keys is marked as along the "
            f"sharded axis, of which each of the {shard.group.size} ranks has {shares} tokens: "
            f'mark it as "whole", or switch_axis its tensors'
        )
    return along


def check_lengths(shard: ShardedPass, query_length: int, key_length: int) -> str:
    """What a call attends to: "self" (the sharded sequence) or "cross" (a whole condition).

    A marked call is along the sharded axis, whatever its length.

    Raises:
        ValueError: where the lengths leave it open: better than a silently wrong result.
    """
    if current_axis() is not None:
        return "self"
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
    rows = shard.positions(mask.device).clamp(max=shard.length - 1)
    return mask.index_select(-2, rows)


def _causal_rows(shard: ShardedPass, query: Tensor, key: Tensor) -> Tensor:
    rows = shard.start + torch.arange(query.shape[-2], device=query.device)
    return torch.arange(key.shape[-2], device=query.device) <= rows[:, None]

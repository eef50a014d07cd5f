"""Exact attention in a ring: keys and values travel, queries stay (arXiv 2310.01889).

Shape legend: ... leading dimensions, H heads of queries, K of keys, m tokens of this ring member
(any number of them), S true length, D size of a head.

Each of R steps attends to the keys of one member; outputs are merged by their log-sum-exp. The
backward sends keys and values round again, and their gradients with them. Only queries, own keys
and values, output and log-sum-exp are kept: 1/R of what one rank would keep.

Every step is one ``all_to_all_single`` of the SP group, to the next member alone. It uses the
group's own communicator in one order on all ranks, so that it can neither overtake nor wait for
another exchange, as sends and receives on communicators of their own could; a step in flight
overlaps with the computation before it.

Torch's context parallel (``torch.distributed.tensor.experimental``) does not serve: it takes equal
shares only, hence padding in attention, no masks but the causal one, no dropout, bias or packed
samples, and its load balance is a global switch. The kernels underneath are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dcp.parallel.attention_spec import AttentionSpec
from lightning_dcp.parallel.ring_chunks import Chunk, attend_chunk, chunk_gradients
from lightning_dcp.parallel.ring_layout import RingLayout
from lightning_dcp.parallel.topology import SPGroup

__all__ = ["ring_attention"]


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    layout: RingLayout,
    group: SPGroup,
) -> Tensor:
    """Attention of this ring member's queries to the keys of all members. A collective.

    Args:
        query: (..., H, m, D).
        key: (..., K, m, D), K divides H.
        value: likewise.
        spec: with the whole mask, broadcastable to (..., H, S, S), of these heads.
        layout: which tokens each member has.
        group: the SP group.

    Returns:
        (..., H, m, D). Rows that see no key are zero.
    """
    seed = 0
    if spec.dropout_p:  # of this rank's stream, which a recomputation finds where it was
        seed = int(torch.randint(2**62, (), device="cpu"))
    mask = spec.attn_mask
    ring = _Ring(layout, group, dataclasses.replace(spec, attn_mask=None), seed)
    out: Tensor = _RingAttention.apply(query, key, value, mask, ring)  # type: ignore[no-untyped-call]
    return out


class _Ring:
    """The steps of one call's ring."""

    def __init__(self, layout: RingLayout, group: SPGroup, spec: AttentionSpec, seed: int) -> None:
        self.layout, self.group, self.spec, self.seed = layout, group, spec, seed
        self.member, self.team_rank = divmod(group.rank_in_group, layout.split.ulysses)

    def source(self, step: int) -> int:
        """The member whose keys are here in a step."""
        return (self.member - step) % self.layout.split.ring

    def send(self, flat: Tensor, num_elements: int) -> tuple[Tensor, Any]:
        """Start sending to the next member; so many elements come from the one before."""
        u, p = self.layout.split.ulysses, self.group.size
        sent, received = [0] * p, [0] * p
        sent[(self.group.rank_in_group + u) % p] = flat.numel()
        received[(self.group.rank_in_group - u) % p] = num_elements
        out = flat.new_empty(num_elements)
        work = dist.all_to_all_single(
            out, flat, received, sent, group=self.group.process_group, async_op=True
        )
        return out, work

    def travel(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(member, its keys, its values), own first."""
        ring = self.layout.split.ring
        flat = torch.cat([key.reshape(-1), value.reshape(-1)])
        for step in range(ring):
            coming: tuple[Tensor, Any] | None = None
            if step + 1 < ring:
                shapes = [self.shape_of(x, self.source(step + 1)) for x in (key, value)]
                coming = self.send(flat, sum(shape.numel() for shape in shapes))
            yield self.source(step), key, value
            if coming is not None:
                flat, work = coming
                work.wait()
                parts = torch.split(flat, [shape.numel() for shape in shapes])
                key, value = (x.view(s) for x, s in zip(parts, shapes, strict=True))

    def shape_of(self, like: Tensor, member: int) -> torch.Size:
        """Of a member's share of ``like``."""
        tokens = self.layout.num_tokens(member)
        return torch.Size((*like.shape[:-2], tokens, like.shape[-1]))

    def chunks(self, member: int, scale: float) -> Iterator[tuple[Chunk, slice, slice]]:
        """Pairs of spans in which a query sees a key, and where they are among the tokens."""
        spec, row = self.spec, 0
        for queries in self.layout.spans[self.member]:
            column = 0
            for keys in self.layout.spans[member]:
                if queries.sees(keys, is_causal=spec.is_causal):
                    chunk = Chunk(
                        queries=queries,
                        keys=keys,
                        is_causal=spec.is_causal,
                        scale=scale,
                        softcap=spec.softcap,
                        dropout_p=spec.dropout_p,
                        seed=self.seed,
                    )
                    yield chunk, slice(row, row + len(queries)), slice(column, column + len(keys))
                column += len(keys)
            row += len(queries)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: _Ring
    ) -> Tensor:
        scale = query.shape[-1] ** -0.5 if ring.spec.scale is None else ring.spec.scale
        wide = torch.promote_types(query.dtype, torch.float32)
        key, value = key.contiguous(), value.contiguous()
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
        lse = query.new_full(query.shape[:-1], float("-inf"), dtype=wide)
        with torch.autocast(query.device.type, enabled=False):
            for member, k, v in ring.travel(key, value):
                for chunk, rows, columns in ring.chunks(member, scale):
                    part, part_lse = attend_chunk(
                        query[..., rows, :],
                        k[..., columns, :],
                        v[..., columns, :],
                        _mask_of(mask, chunk),
                        chunk,
                    )
                    _merge(out[..., rows, :], lse[..., rows], part, part_lse)
        ctx.ring, ctx.scale = ring, scale
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        wide = lse.dtype
        d_query = torch.zeros_like(query, dtype=wide)
        d_mask = None
        if mask is not None and ctx.needs_input_grad[3]:
            d_mask = torch.zeros_like(mask, dtype=torch.promote_types(mask.dtype, torch.float32))
        d_key = d_value = None
        coming: tuple[Tensor, Any] | None = None
        with torch.autocast(query.device.type, enabled=False):
            for member, k, v in ring.travel(key, value):
                own_k, own_v = (torch.zeros_like(x, dtype=wide) for x in (k, v))
                for chunk, rows, columns in ring.chunks(member, ctx.scale):
                    dq, dk, dv, d_scores = chunk_gradients(
                        grads[0][..., rows, :],
                        query[..., rows, :],
                        k[..., columns, :],
                        v[..., columns, :],
                        _mask_of(mask, chunk),
                        out[..., rows, :],
                        lse[..., rows],
                        chunk,
                    )
                    d_query[..., rows, :] += dq
                    own_k[..., columns, :] += dk
                    own_v[..., columns, :] += dv
                    if d_mask is not None and d_scores is not None:
                        place = _mask_of(d_mask, chunk)
                        assert place is not None
                        place += d_scores.sum_to_size(place.shape)
                # The sums of the members before arrive when this member's are ready.
                d_key, d_value = _added(own_k, own_v, coming)
                flat = torch.cat([d_key.reshape(-1), d_value.reshape(-1)])
                following = (member - 1) % ring.layout.split.ring
                numel = sum(ring.shape_of(x, following).numel() for x in (key, value))
                coming = ring.send(flat, numel)
            # Those that have been round, back at home.
            d_key, d_value = _added(
                torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide), coming
            )
        return (
            d_query.to(query.dtype),
            d_key.to(key.dtype),
            d_value.to(value.dtype),
            None if d_mask is None else d_mask.to(mask.dtype),
            None,
        )


def _added(
    d_key: Tensor, d_value: Tensor, coming: tuple[Tensor, Any] | None
) -> tuple[Tensor, Tensor]:
    if coming is None:
        return d_key, d_value
    received, work = coming
    work.wait()
    keys, values = torch.split(received, [d_key.numel(), d_value.numel()])
    return d_key + keys.view_as(d_key), d_value + values.view_as(d_value)


def _mask_of(mask: Tensor | None, chunk: Chunk) -> Tensor | None:
    """The view of a whole mask that belongs to a pair of spans."""
    if mask is None:
        return None
    for dim, span in ((-2, chunk.queries), (-1, chunk.keys)):
        if mask.dim() >= -dim and mask.shape[dim] != 1:
            mask = mask.narrow(dim, span.start, len(span))
    return mask


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take the attention to further keys into ``out`` and ``lse``, in place."""
    both = torch.logaddexp(lse, part_lse)
    finite = both.masked_fill(both.isneginf(), 0.0)
    out.mul_((lse - finite).exp()[..., None]).add_(part * (part_lse - finite).exp()[..., None])
    lse.copy_(both)

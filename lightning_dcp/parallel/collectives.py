"""Differentiable exchanges between the ranks of an SP group.

Shape legend:
    p  ranks in the group          n  tokens per rank (the same on all ranks), p * n = padded length
    S  true length, S <= p * n     H  heads    D  size of a head    ...  any leading dimensions

Written on ``torch.distributed`` rather than on its functional collectives: those with autograd
changed names between torch 2.5 and 2.13, and the fused exchange below needs only one all-to-all,
which is its own transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dcp.parallel.topology import SPGroup

__all__ = [
    "gather_sequence",
    "heads_to_sequence",
    "pad_sequence",
    "sequence_to_heads",
    "slice_sequence",
]

# torch 2.13 renamed these and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _AllToAll(torch.autograd.Function):
    """(p, chunk) -> (p, chunk): row i goes to rank i, row j comes from rank j. Self-transposed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: SPGroup) -> Tensor:
        ctx.group = group
        rows = rows.contiguous()
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=group.process_group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


class _AllGather(torch.autograd.Function):
    """(n, ...) -> (p * n, ...) in rank order; the backward sums over ranks, takes the own rows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: SPGroup) -> Tensor:
        ctx.group = group
        own = own.contiguous()
        whole = own.new_empty((group.size * own.shape[0], *own.shape[1:]))
        _all_gather(whole, own, group=group.process_group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        group: SPGroup = ctx.group
        whole = grads[0].contiguous()
        own = whole.new_empty((whole.shape[0] // group.size, *whole.shape[1:]))
        _reduce_scatter(own, whole, group=group.process_group)
        return own, None


def heads_to_sequence(tensors: Sequence[Tensor], group: SPGroup) -> list[Tensor]:
    """All tokens of a share of the heads, from a share of the tokens of all heads.

    Args:
        tensors: each (..., H, n, D) with its own H (a multiple of p) and D; sent in one exchange.
        group: the SP group.

    Returns:
        (..., H/p, p * n, D) each; rank i gets the heads from i * H/p on.
    """
    p = group.size
    rows, shapes = [], []
    for tensor in tensors:
        *lead, heads, tokens, size = tensor.shape
        parts = tensor.reshape(*lead, p, heads // p, tokens, size).movedim(-4, 0)
        shapes.append(parts.shape)
        rows.append(parts.reshape(p, -1))
    received = []
    for part, shape in zip(_exchange(rows, group), shapes, strict=True):
        # (p, ..., H/p, n, D) -> (..., H/p, p, n, D) -> (..., H/p, p * n, D)
        received.append(part.reshape(shape).movedim(0, -3).flatten(-3, -2))
    return received


def sequence_to_heads(tensor: Tensor, group: SPGroup) -> Tensor:
    """The reverse: (..., H/p, p * n, D) -> (..., H, n, D)."""
    p = group.size
    *lead, heads, tokens, size = tensor.shape
    parts = tensor.reshape(*lead, heads, p, tokens // p, size).movedim(-3, 0)
    (received,) = _exchange([parts.reshape(p, -1)], group)
    return received.reshape(parts.shape).movedim(0, -4).flatten(-4, -3)


def gather_sequence(own: Tensor, dim: int, group: SPGroup, length: int) -> Tensor:
    """The whole sequence on every rank, padding removed; the backward *sums* over the group.

    Where all ranks go on with the same computation, the caller scales the loss by 1/p: then
    parameters before, inside and after the sharded region all get the right gradient from a sum
    over ranks.

    Args:
        own: (..., n, ...) with the tokens in dimension ``dim``.
        dim: sequence dimension.
        group: the SP group.
        length: S.

    Returns:
        (..., S, ...).
    """
    whole: Tensor = _AllGather.apply(own.movedim(dim, 0), group)  # type: ignore[no-untyped-call]
    # contiguous, as the output of a block on one process is: models call view() on it
    return whole.narrow(0, 0, length).movedim(0, dim).contiguous()


def slice_sequence(whole: Tensor, dim: int, group: SPGroup, local_length: int) -> Tensor:
    """This rank's n tokens; the backward puts the own share of the gradient into zeros.

    Ranks at the end get padding where p * n > S: copies of the last token rather than zeros, as a
    norm without epsilon makes NaN of zeros, and an index must stay valid. No gradient passes to
    them.

    Args:
        whole: (..., S, ...), the same on all ranks of the group.
        dim: sequence dimension.
        group: the SP group.
        local_length: n, with p * n >= S.

    Returns:
        (..., n, ...), contiguous, so that the whole sequence is not kept alive by its share.
    """
    length = whole.shape[dim]
    start = min(group.rank_in_group * local_length, length)
    num_own = min(local_length, length - start)
    own = whole.narrow(dim, start, num_own)
    if num_own == local_length:
        return own.clone(memory_format=torch.contiguous_format)
    return pad_sequence(own, whole, dim, local_length)


def pad_sequence(own: Tensor, source: Tensor, dim: int, to_length: int) -> Tensor:
    """``own`` continued to ``to_length`` tokens by copies of ``source``'s last, gradient-free.

    ``own`` itself where nothing is missing.
    """
    if own.shape[dim] == to_length:
        return own
    last = source.detach().narrow(dim, source.shape[dim] - 1, 1)
    shape = list(own.shape)
    shape[dim] = to_length - own.shape[dim]
    return torch.cat([own, last.expand(shape)], dim)


def _exchange(rows: list[Tensor], group: SPGroup) -> list[Tensor]:
    """All-to-all of several (p, chunk) at once, where they have one dtype."""
    if len({row.dtype for row in rows}) > 1:
        return [_all_to_all(row, group) for row in rows]
    fused = _all_to_all(torch.cat(rows, 1), group)
    return list(torch.split(fused, [row.shape[1] for row in rows], 1))


def _all_to_all(rows: Tensor, group: SPGroup) -> Tensor:
    received: Tensor = _AllToAll.apply(rows, group)  # type: ignore[no-untyped-call]
    return received

"""Which tokens each member of a ring attends with, and the exchange that brings them there.

Shape legend:
    p = u * R ranks, R members of a ring, u ranks that share heads    S  true length
    n  tokens per rank outside of attention, contiguous    m  tokens of a ring member
    H  heads    D  size of a head    ...  any leading dimensions

Outside of attention tokens are contiguous, whatever the attention: rotary tables, targets, masks
and cross-attention need not know. Inside a ring a causal call uses the zigzag layout: member r has
chunks r and 2R - 1 - r of 2R, so that all members have the same number of scores. The exchange that
swaps tokens for heads goes there in the same step. Padding is never sent.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dcp.parallel.heads import HeadSplit
from lightning_dcp.parallel.topology import SPGroup

__all__ = ["RingLayout", "Span", "from_ring", "ring_layout", "to_ring"]


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens ``start`` to ``stop`` of the sequence, all of packed sample ``segment``."""

    start: int
    stop: int
    segment: int = 0

    def __len__(self) -> int:
        return self.stop - self.start

    def sees(self, keys: Span, *, is_causal: bool) -> bool:
        """Whether any query of this span sees any of ``keys``."""
        return self.segment == keys.segment and not (is_causal and keys.start >= self.stop)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingLayout:
    """Where tokens are.

    Attributes:
        length: S.
        local_length: n.
        split: u and R.
        spans: of each ring member, ascending, none empty.
        is_contiguous: whether each rank of a pure ring has the tokens that it has outside, too.
    """

    length: int
    local_length: int
    split: HeadSplit
    spans: tuple[tuple[Span, ...], ...]
    is_contiguous: bool

    def num_tokens(self, member: int) -> int:
        """Tokens of a ring member (m)."""
        return sum(len(span) for span in self.spans[member])

    def outside(self, rank_in_group: int) -> tuple[int, int]:
        """First and last-plus-one true token that a rank has outside of attention."""
        start = min(rank_in_group * self.local_length, self.length)
        return start, min(start + self.local_length, self.length)

    def common(self, member: int, rank_in_group: int) -> list[tuple[int, int]]:
        """Tokens of a ring member that a rank has outside."""
        first, last = self.outside(rank_in_group)
        pieces = [(max(s.start, first), min(s.stop, last)) for s in self.spans[member]]
        return [(start, stop) for start, stop in pieces if start < stop]


@functools.lru_cache(maxsize=64)  # every block of a micro-batch asks for the same
def ring_layout(
    length: int,
    local_length: int,
    split: HeadSplit,
    *,
    zigzag: bool,
    segments: tuple[int, ...] | None = None,
) -> RingLayout:
    """The layout for a call.

    Args:
        length: S.
        local_length: n.
        split: u and R.
        zigzag: balance scores of queries that see earlier keys only.
        segments: lengths of packed samples; spans are cut at their borders.
    """
    if zigzag:
        size = -(-length // (2 * split.ring))
        chunks: list[tuple[int, ...]] = [(r, 2 * split.ring - 1 - r) for r in range(split.ring)]
    else:
        size = split.ulysses * local_length
        chunks = [(r,) for r in range(split.ring)]
    samples, start = [], 0
    for segment, sample_length in enumerate(segments or (length,)):
        samples.append(Span(start, start + sample_length, segment))
        start += sample_length
    spans = tuple(
        tuple(
            Span(first, last, sample.segment)
            for chunk in member
            for sample in samples
            if (first := max(chunk * size, sample.start))
            < (last := min((chunk + 1) * size, sample.stop))
        )
        for member in chunks
    )
    return RingLayout(
        length=length,
        local_length=local_length,
        split=split,
        spans=spans,
        is_contiguous=split.ulysses == 1 and not zigzag,
    )


def to_ring(tensors: Sequence[Tensor], layout: RingLayout, group: SPGroup) -> list[Tensor]:
    """From a rank's contiguous tokens of all heads to a ring member's tokens of a share of them.

    Args:
        tensors: (..., H, n, D) each, with its own H (a multiple of u); of one type.
        layout: of the call.
        group: the SP group.

    Returns:
        (..., H/u, m, D) each, tokens ascending.
    """
    u, rank = layout.split.ulysses, group.rank_in_group
    first, last = layout.outside(rank)
    if layout.is_contiguous:
        return [tensor.narrow(-2, 0, last - first) for tensor in tensors]
    sent: list[Tensor] = []
    send_sizes = []
    for member in range(layout.split.ring):
        pieces = layout.common(member, rank)
        own = [_take(tensor, pieces, first) for tensor in tensors]
        parts = [tensor.chunk(u, -3) for tensor in own]
        for j in range(u):
            sent += [part[j].reshape(-1) for part in parts]
            send_sizes.append(sum(part[j].numel() for part in parts))
    # what each rank outside has of this member's tokens
    counts = [
        sum(stop - start for start, stop in layout.common(rank // u, source))
        for source in range(group.size)
    ]
    shapes = [
        [(*t.shape[:-3], t.shape[-3] // u, count, t.shape[-1]) for t in tensors] for count in counts
    ]
    received = _exchange(torch.cat(sent), send_sizes, shapes, group)
    return [torch.cat([parts[k] for parts in received], -2) for k in range(len(tensors))]


def from_ring(tensor: Tensor, layout: RingLayout, group: SPGroup) -> Tensor:
    """The reverse, with padding at the end: (..., H/u, m, D) -> (..., H, n, D)."""
    u, rank = layout.split.ulysses, group.rank_in_group
    if layout.is_contiguous:
        return _padded(tensor, layout.local_length)
    sent, send_sizes, offset = [], [], 0
    for target in range(group.size):
        count = sum(stop - start for start, stop in layout.common(rank // u, target))
        sent.append(tensor.narrow(-2, offset, count).reshape(-1))
        send_sizes.append(sent[-1].numel())
        offset += count
    pieces = [layout.common(member, rank) for member in range(layout.split.ring)]
    counts = [sum(stop - start for start, stop in own) for own in pieces for _ in range(u)]
    shapes = [[(*tensor.shape[:-2], count, tensor.shape[-1])] for count in counts]
    received = [parts[0] for parts in _exchange(torch.cat(sent), send_sizes, shapes, group)]
    members = [torch.cat(received[r * u : (r + 1) * u], -3) for r in range(layout.split.ring)]
    places = {}
    for member, own in enumerate(pieces):
        offset = 0
        for start, stop in own:
            places[start] = members[member].narrow(-2, offset, stop - start)
            offset += stop - start
    ordered = [places[start] for start in sorted(places)] or members[:1]
    return _padded(torch.cat(ordered, -2), layout.local_length)


def _take(tensor: Tensor, pieces: Sequence[tuple[int, int]], first: int) -> Tensor:
    parts = [tensor.narrow(-2, start - first, stop - start) for start, stop in pieces]
    return torch.cat(parts, -2) if parts else tensor.narrow(-2, 0, 0)


def _padded(tensor: Tensor, to_length: int) -> Tensor:
    """Continued to ``to_length`` tokens by ones that no norm makes NaN of, zeros included."""
    missing = to_length - tensor.shape[-2]
    if missing == 0:
        return tensor
    ramp = torch.linspace(0.5, 1.5, tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
    return torch.cat([tensor, ramp.expand(*tensor.shape[:-2], missing, -1)], -2)


class _Exchange(torch.autograd.Function):
    """All-to-all of a flat tensor in uneven parts; its own transpose with the sizes swapped."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, sent: list[int], received: list[int], group: SPGroup
    ) -> Tensor:
        ctx.sizes, ctx.group = (received, sent), group
        out = flat.new_empty(sum(received))
        dist.all_to_all_single(out, flat, received, sent, group=group.process_group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        out = grads[0].new_empty(sum(received))
        dist.all_to_all_single(
            out, grads[0].contiguous(), received, sent, group=ctx.group.process_group
        )
        return out, None, None, None


def _exchange(
    flat: Tensor,
    send_sizes: list[int],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    group: SPGroup,
) -> list[list[Tensor]]:
    """Send so many elements to each rank; from each come tensors of the given shapes."""
    sizes = [[torch.Size(shape).numel() for shape in of_rank] for of_rank in shapes]
    totals = [sum(of_rank) for of_rank in sizes]
    received: Tensor = _Exchange.apply(flat, send_sizes, totals, group)  # type: ignore[no-untyped-call]
    return [
        [part.reshape(shape) for part, shape in zip(torch.split(whole, s), of_rank, strict=True)]
        for whole, s, of_rank in zip(torch.split(received, totals), sizes, shapes, strict=True)
    ]

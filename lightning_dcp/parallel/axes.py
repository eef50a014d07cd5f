"""Hidden states with two axes of tokens, one of which is sharded: video, images, pairs.

Shape legend:
    B  samples    T, N  an axis of tokens    S, M  the other one    C  features
    H  heads      D  size of a head          p  ranks               n, m  tokens per rank

Hidden states (B, T, S, C) are sharded along one axis, (B, n, S, C). Attention along the other one,
(B * n, H, S, D), is a matter of each rank; attention along the sharded one, (B * S, H, n, D), needs
all ranks. Shapes alone cannot tell the two apart (T may be S, or n), so the blocks say it::

    with lightning_dcp.attention_axis("whole"):
        x = x + self.spatial(x)
    with lightning_dcp.attention_axis("sharded"):
        x = x + self.temporal(x)

Or tensors change the axis that they are sharded along ("dynamic sequence parallelism", arXiv
2403.10266), and then attend along the one that has become whole. That works for any number of
heads, and for operations that are no attention::

    y = lightning_dcp.switch_axis(x, 1, 2)     # (B, n, S, C) -> (B, T, m, C)
    with lightning_dcp.attention_axis("whole"):
        y = y + self.temporal(y)
    x = lightning_dcp.switch_axis(y, 2, 1)

Outside sharded blocks all this changes nothing, so that the model runs anywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from lightning_dcp.parallel import region
from lightning_dcp.parallel.collectives import gather_sequence, heads_to_sequence, pad_sequence
from lightning_dcp.parallel.region import ShardedPass, choose_local_length

__all__ = ["Axis", "attention_axis", "current_axis", "gather_axis", "pass_along", "switch_axis"]

Axis = Literal["sharded", "whole"]

_thread = threading.local()


@contextmanager
def attention_axis(axis: Axis) -> Iterator[None]:
    """Say what the attention calls inside attend along, where hidden states have two token axes.

    Once one call of a block is marked, or its hidden states have four or more dimensions, all its
    attention calls must be. Enter it inside of what recomputes (``torch.utils.checkpoint``), so
    that the recomputation enters it too.

    Args:
        axis: "sharded": along the dimension that is split over the ranks, or the one that a tensor
            was switched to: queries and keys are (..., H, n, D), heads are exchanged for tokens,
            masks are those of the whole sequence. "whole": along anything that each rank has whole
            (the other axis, an unsharded condition such as a text): computed as it is, the mask is
            that of the call's own queries.

    Raises:
        ValueError: for another word.
    """
    if axis not in ("sharded", "whole"):
        raise ValueError(f'attention_axis is "sharded" or "whole", got {axis!r}')
    outer = current_axis()
    _thread.axis = axis
    try:
        yield
    finally:
        _thread.axis = outer


def current_axis() -> Axis | None:
    """The mark of the innermost ``attention_axis`` of this thread."""
    axis: Axis | None = getattr(_thread, "axis", None)
    return axis


def switch_axis(x: Tensor, from_dim: int, to_dim: int) -> Tensor:
    """Sharded along another dimension than before, by one all-to-all; differentiable.

    Exact for any sizes: padding is cut off the dimension that becomes whole, and the one that
    becomes sharded is padded to a multiple of p. The way back knows the true length.

    Args:
        x: this rank's share, (..., n, ..., S, ...): n of T tokens in ``from_dim``, all S in
            ``to_dim``.
        from_dim: the dimension that is sharded.
        to_dim: the dimension that is to be.

    Returns:
        (..., T, ..., m, ...), m tokens of S per rank. Outside sharded blocks ``x`` itself.

    Raises:
        ValueError: if the dimensions are one, or ``from_dim`` has not the size of a rank's share.
    """
    from_dim, to_dim = from_dim % x.dim(), to_dim % x.dim()
    if from_dim == to_dim:
        raise ValueError(f"switch_axis from dimension {from_dim} to itself")
    shard = pass_along(x.shape[from_dim], f"switch_axis of dimension {from_dim}", x)
    if shard is None:
        return x
    local_length = _local_length(shard, x.shape[to_dim])
    padded = pad_sequence(x, x, to_dim, shard.group.size * local_length)
    # Exchanged like heads for tokens: (to, from, rest) -> a share of `to`, all of `from`.
    rows = padded.movedim((to_dim, from_dim), (0, 1))
    rest = rows.shape[2:]
    (received,) = heads_to_sequence([rows.reshape(*rows.shape[:2], -1)], shard.group)
    received = received.narrow(1, 0, shard.length)
    out = received.reshape(*received.shape[:2], *rest)
    return out.movedim((0, 1), (to_dim, from_dim)).contiguous()


def gather_axis(x: Tensor, dim: int) -> Tensor:
    """All tokens of a sharded dimension on every rank; the backward sums over the ranks.

    For an operand that every token needs whole: the bias that a pair representation gives to
    attention, the second factor of a triangle multiplication.

    Args:
        x: this rank's share, (..., n, ...).
        dim: the dimension that is sharded.

    Returns:
        (..., T, ...), without padding. Outside sharded blocks ``x`` itself.

    Raises:
        ValueError: if ``dim`` has not the size of a rank's share.
    """
    dim %= x.dim()
    shard = pass_along(x.shape[dim], f"gather_axis of dimension {dim}", x)
    return x if shard is None else gather_sequence(x, dim, shard.group, shard.length)


def pass_along(local_length: int, what: str, tensor: Tensor) -> ShardedPass | None:
    """The pass along the axis of which each rank has so many tokens; None outside sharded blocks.

    Args:
        local_length: size of the dimension that should be sharded.
        what: the call, for messages.
        tensor: its tensor, likewise.

    Raises:
        ValueError: inside, where no axis has such a share.
    """
    shard = region.current_pass(local_length)
    if shard is None:
        return None
    along = shard.along(local_length)
    if along is None:
        axes = ", ".join(f"{local} of {length}" for length, local in shard.axes.items())
        raise ValueError(
            f"{what} of a tensor of shape {tuple(tensor.shape)}: it is not sharded there, each of "
            f"the {shard.group.size} ranks has {axes} tokens. Name the dimension that is sharded "
            f"now (see also `sequence_dims`)"
        )
    return along


def _local_length(shard: ShardedPass, length: int) -> int:
    """Tokens per rank of an axis of ``length``, chosen once for a pass; unlike any other axis's."""
    if length not in shard.axes:
        taken = {size for axis in shard.axes.items() for size in axis}
        shard.axes[length] = choose_local_length(length, shard.group.size, taken)
        along = shard.along(shard.axes[length])
        active = region.active()
        assert along is not None
        assert active is not None
        active.remember(along)
    return shard.axes[length]

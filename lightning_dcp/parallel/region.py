"""What the attention call needs to know: is this tensor a share of a sequence, and of which?

The state is one per process, not per thread or context: on CUDA the backward, and with it every
recomputation, runs in autograd's own threads.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_dcp.parallel.topology import SPGroup

__all__ = ["AttentionCall", "Region", "ShardedPass", "active", "current_pass", "in_backward"]


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """Shapes of one attention call. ``num_heads`` of a 3-dim call is (heads * samples).

    ``axis`` is the mark of ``attention_axis``: "sharded", "whole", or None where there is none.
    """

    num_heads: int
    num_kv_heads: int
    query_length: int
    key_length: int
    batch_size: int | None
    axis: str | None = None


@dataclasses.dataclass
class ShardedPass:
    """One run of a sequence through the blocks on the ranks of a group.

    Attributes:
        group: the SP group.
        length: S, true length of the sequence.
        local_length: n, tokens per rank; never S itself, nor, unless ``marked``, the length of
            another argument, so that a tensor's length tells what it is.
        condition_lengths: lengths of arguments that are whole on every rank (context of
            cross-attention).
        axes: true length -> tokens per rank of each axis that tensors of this pass have been
            sharded along; more than one after ``switch_axis``.
        marked: attention calls tell by ``attention_axis`` what they attend along.
    """

    group: SPGroup
    length: int
    local_length: int
    condition_lengths: set[int] = dataclasses.field(default_factory=set)
    axes: dict[int, int] = dataclasses.field(default_factory=dict)
    marked: bool = False

    def __post_init__(self) -> None:
        self.axes.setdefault(self.length, self.local_length)

    def along(self, local_length: int) -> ShardedPass | None:
        """The pass along the axis of which each rank has so many tokens; None: there is none."""
        if local_length == self.local_length:
            return self
        for length, local in self.axes.items():
            if local == local_length:
                return dataclasses.replace(self, length=length, local_length=local)
        return None

    @property
    def start(self) -> int:
        """Index in the sequence of this rank's first token; S or more: it has only padding."""
        return self.group.rank_in_group * self.local_length

    def positions(self, device: torch.device) -> Tensor:
        """(n,) places in the sequence of this rank's tokens; S or more: padding."""
        return torch.arange(self.start, self.start + self.local_length, device=device)


def choose_local_length(length: int, sp_size: int, taken: set[int]) -> int:
    """The smallest n >= 2 with p * n >= S that is not S and not in ``taken``."""
    # At least two: attention over one query is taken for a step of generation by models that then
    # leave the causal mask out (Hugging Face's `sdpa`).
    local = max(2, -(-length // sp_size))
    while local == length or local in taken:
        local += 1
    return local


class Region:
    """Attention-related state of the running micro-batch.

    Attributes:
        group: the SP group.
        open: the pass that is between its first and last block, or is being recomputed.
        calls: attention calls of the block that is being observed; None where none is.
        outputs: what the rest of a step whose inputs are sharded goes on with: the last block's
            output and those of later attention; None where they are not kept.
        segments: lengths of the samples that the micro-batch's one sequence is packed of; None:
            it is not packed.
    """

    def __init__(self, group: SPGroup) -> None:
        self.group = group
        self.open: ShardedPass | None = None
        self.calls: list[AttentionCall] | None = None
        self.outputs: list[Tensor] | None = None
        self.segments: tuple[int, ...] | None = None
        self._thread = threading.get_ident()
        self._passes: dict[int, list[ShardedPass]] = {}
        self._whole_lengths: set[int] = set()
        self._is_whole = False

    def remember(self, shard: ShardedPass) -> None:
        """Keep a pass for recomputations that come without our contexts."""
        self._passes.setdefault(shard.local_length, []).append(shard)

    @contextmanager
    def inside(self, shard: ShardedPass) -> Iterator[None]:
        """Make ``shard`` the open pass for a while."""
        outer, self.open = self.open, shard
        try:
            yield
        finally:
            self.open = outer

    def refuse_open(self, path: str) -> None:
        """An error if a stack of blocks begins between the blocks of another one.

        Raises:
            RuntimeError: names the stack at ``path``.
        """
        if self.open is not None:
            raise RuntimeError(
                f"the first block of {path} ran between the blocks of another stack, whose tokens "
                f"are shared among ranks. Name only one of these stacks in `blocks`"
            )

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What runs meanwhile has whole sequences, whatever their lengths."""
        outer, self._is_whole = self._is_whole, True
        try:
            yield
        finally:
            self._is_whole = outer

    def pass_of(self, local_length: int) -> ShardedPass | None:
        """The pass of this micro-batch whose shares have ``local_length`` tokens.

        Raises:
            RuntimeError: if several could be meant.
        """
        passes = self._passes.get(local_length, [])
        if len({shard.length for shard in passes}) > 1:
            raise RuntimeError(
                f"a recomputation in the backward has {local_length} tokens per rank, as have "
                f"passes of {sorted({shard.length for shard in passes})} tokens through the blocks "
                f"in this micro-batch. Let the strategy recompute blocks instead of the model's "
                f"own checkpoint"
            )
        return passes[-1] if passes else None

    def of_attention(self, query_length: int) -> ShardedPass | None:
        """The pass an attention call belongs to, or None where its tensors are whole."""
        if self._is_whole:
            return None
        backward = in_backward()
        if self.open is not None and (backward or threading.get_ident() == self._thread):
            return self.open
        if not backward:
            self._whole_lengths.add(query_length)
            return None
        # The model's own checkpoint inside a block: it knows nothing of us, the length tells.
        shard = self.pass_of(query_length)
        if shard is not None and query_length in self._whole_lengths:
            raise RuntimeError(
                f"attention over {query_length} tokens is recomputed in the backward, and it "
                f"cannot be told whether these are a rank's share of {shard.length} tokens or a "
                f"whole sequence, as both occur. Let the strategy recompute blocks instead of the "
                f"model's own checkpoint"
            )
        return shard


_active: Region | None = None


def active() -> Region | None:
    """The running micro-batch's region, None outside."""
    return _active


@contextmanager
def activate(region: Region) -> Iterator[None]:
    """Make ``region`` the process's region.

    Raises:
        RuntimeError: if there is one already.
    """
    global _active
    if _active is not None:
        raise RuntimeError(
            "a micro-batch is already running in this process: they cannot be nested"
        )
    _active = region
    try:
        yield
    finally:
        _active = None


def kept(output: Tensor) -> Tensor:
    """``output`` of an exchange, kept where the micro-batch's region keeps them."""
    if _active is not None and _active.outputs is not None and not in_backward():
        _active.outputs.append(output)
    return output


def current_pass(query_length: int) -> ShardedPass | None:
    """The pass that attention of these queries belongs to; None outside a sharded region."""
    return None if _active is None else _active.of_attention(query_length)


def in_backward() -> bool:
    """Whether autograd is running this very call: then it is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)

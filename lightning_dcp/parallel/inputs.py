"""Sharding the whole training step: each rank of a group gets its slice of the batch.

With ``shard="inputs"`` embedding, blocks, output layer and loss all run on n of the S tokens. The
micro-batch is one sharded pass from its first operation to the last of its backward; blocks neither
slice nor gather, only attention exchanges anything. Each rank's loss is the mean over its own
elements, which the caller weights.

Shape legend:
    B  samples    S  true length    p  ranks    n  tokens per rank, p * n >= S
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dcp.parallel import rng
from lightning_dcp.parallel.arguments import hidden_of
from lightning_dcp.parallel.collectives import gather_sequence
from lightning_dcp.parallel.input_dims import InputDims, entries_of, with_entries
from lightning_dcp.parallel.pretrained import PretrainedModels
from lightning_dcp.parallel.region import Region, ShardedPass, choose_local_length, in_backward
from lightning_dcp.parallel.targets import count_targets, label_entries

__all__ = ["NO_TARGETS", "InputSharder", "OwnInputs", "StepInputs"]

NO_TARGETS = (
    "shard='inputs': how many elements bear loss in a rank's slice of the batch is not known:"
    " it has no labels (`labels`, `label`, `targets` or `target`). Return {'loss': loss,"
    " 'num_targets': n} from `training_step`, with the n elements that the loss is a mean over, or"
    " use shard='blocks'."
)

#: Entries that are zero where there is no token; others are copies of the last token there.
_ZERO_IN_PADDING = ("loss_mask", "label_mask", "attention_mask")


@dataclass(frozen=True)
class OwnInputs:
    """What one rank runs the training step on.

    Attributes:
        batch: its slice.
        num_targets: loss-bearing elements of the slice; None where the batch has no labels, or is
            whole.
        whole_targets: of the whole batch.
    """

    batch: Any
    num_targets: int | None
    whole_targets: int | None = None


class InputSharder:
    """Stands in for a ``TokenSharder`` where the tokens are shared before the model runs.

    Args:
        region: of the micro-batch.
        shard: the one pass of the micro-batch.
        sequence_dim: of hidden states.
        path: name of the stack, for messages.
    """

    forward_pass: ShardedPass | None = None  # nothing is left to gather

    def __init__(self, region: Region, shard: ShardedPass, sequence_dim: int, path: str) -> None:
        self._region = region
        self._shard = shard
        self._sequence_dim = sequence_dim
        self._path = path

    def share(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ShardedPass, tuple[Any, ...], dict[str, Any]]:
        """The pass; arguments as they are."""
        if index == 0 and not in_backward():
            self._region.outputs = None  # those inside blocks come before the last block's
        return self._shard, args, kwargs

    def gather(self, shard: ShardedPass, output: Any) -> Any:
        """The last block's output as it is; its length is checked."""
        hidden = hidden_of(output)
        found = hidden.shape[self._sequence_dim % hidden.dim()]
        if found != shard.local_length:
            raise ValueError(
                f"shard='inputs': the blocks of {self._path} have {found} tokens, but a rank's"
                f" slice of the batch has {shard.local_length} of {shard.length}. Models that add,"
                " drop or merge tokens need shard='blocks'"
            )
        if not in_backward():
            self._region.outputs = [hidden]
        return output

    def own_random(self, index: int) -> AbstractContextManager[None]:
        """All of the step draws this rank's random numbers already."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to put back: the micro-batch's end does."""


class StepInputs:
    """Slices batches by sequence, and prepares the models that have to know of it.

    Args:
        module: that runs the training step.
        slices: whether batches are sliced (``shard="inputs"``); if not, only tiled losses are
            installed.
        input_dims: sequence dimension of batch entries, None for one that stays whole; by default
            known from the usual names.
        ignore_index: label that bears no loss.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        slices: bool = True,
        input_dims: Mapping[Any, int | None] | None = None,
        ignore_index: int = -100,
    ) -> None:
        self.slices = slices
        self.models = PretrainedModels(module, ignore_index)
        self._dims = InputDims(input_dims)
        self._declared = frozenset(input_dims or {})
        self._ignore_index = ignore_index

    @contextmanager
    def step(self, region: Region, batch: Any, device: torch.device) -> Iterator[OwnInputs]:
        """The training step and its backward, on this rank's slice of the batch.

        Args:
            region: of the micro-batch, with no pass open.
            batch: whole, on the device.
            device: whose random numbers become this rank's own.

        Raises:
            ValueError: for a batch that cannot be sliced.
        """
        if region.group.size == 1 or not self.slices:
            if self.slices:  # as on more ranks, to compute the same
                batch = self._without_mask(batch)
            with self.models.whole():
                yield OwnInputs(batch, None)
            return
        entries = entries_of(batch)
        prepared = self.models.prepare(entries, self._declared)
        found = {k: v for k, v in prepared.items() if k not in self.models.own}
        length, dims = self._dims.of(found)
        whole = (v for k, v in prepared.items() if k not in dims)
        conditions = _lengths(whole)
        shard = ShardedPass(
            region.group,
            length,
            choose_local_length(length, region.group.size, conditions),
            conditions,
        )
        positions = shard.positions(device)
        own = self._slice(prepared, dims, positions, shard)
        own.update(self.models.mask_of(prepared, positions))
        num_targets, whole_targets = self._count(prepared, own)
        region.remember(shard)
        region.open, region.outputs = shard, []
        rng.seed_sharded(device, region.group.rank_in_group)
        try:
            with self.models.sharded(positions.clamp(max=length - 1), length):
                yield OwnInputs(with_entries(batch, own), num_targets, whole_targets)
        finally:
            region.open = region.outputs = None

    def _without_mask(self, batch: Any) -> Any:
        """The whole batch with a mask of ones, where a slice would have one."""
        if not self.models.models:
            return batch
        entries = entries_of(batch)
        try:
            prepared = self.models.prepare(entries, self._declared)
        except ValueError:
            return batch
        return with_entries(batch, self.models.mask_of(prepared, None))

    def _slice(
        self,
        entries: Mapping[Any, Any],
        dims: Mapping[Any, int],
        positions: Tensor,
        shard: ShardedPass,
    ) -> dict[Any, Tensor]:
        length = shard.length
        index = positions.clamp(max=length - 1)
        is_padding = positions >= length
        has_padding = shard.start + shard.local_length > length
        labels = (*label_entries(entries), "y", "shift_labels")
        own: dict[Any, Tensor] = {}
        for name, dim in dims.items():
            part = entries[name].index_select(dim, index.to(entries[name].device))
            if has_padding and (name in labels or name in _ZERO_IN_PADDING):
                shape = [1] * part.dim()
                shape[dim] = -1
                if name in _ZERO_IN_PADDING:
                    fill = 0
                elif part.dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
                    fill = self._ignore_index
                else:
                    raise ValueError(
                        f"shard='inputs': {length} tokens are not a multiple of the ranks that"
                        f" share them, and labels {name!r} of type {part.dtype} cannot say which"
                        " positions bear no loss. Pad to multiples in your collate function, or use"
                        " shard='blocks'"
                    )
                part = part.masked_fill(is_padding.view(shape).to(part.device), fill)
            own[name] = part
        return own

    def _count(
        self, whole: Mapping[Any, Any], own: Mapping[Any, Tensor]
    ) -> tuple[int | None, int | None]:
        """Elements that bear loss, of the slice and of the whole."""
        done = ("shift_labels",) if isinstance(whole.get("shift_labels"), Tensor) else ()
        for name in (*done, *label_entries(whole)):
            if name not in own:
                raise ValueError(
                    f"shard='inputs': the labels {name!r} of shape {tuple(whole[name].shape)} do"
                    " not run along the sequence, so that ranks cannot divide the loss among"
                    " themselves. Use shard='blocks'"
                )
            counts = (
                count_targets({"labels": labels}, self._ignore_index)
                for labels in (own[name], whole[name])
            )
            return next(counts), next(counts)
        return None, None


def whole_sequence(own: Tensor, dim: int, shard: ShardedPass) -> Tensor:
    """(..., S, ...) of all ranks' (..., n, ...), without gradient. A collective of the group."""
    return gather_sequence(own.detach(), dim % own.dim(), shard.group, shard.length)


def mean_over_group(loss: Tensor, num_targets: float, region: Region, shard: ShardedPass) -> Tensor:
    """The whole micro-batch's mean loss, from those of the ranks. A collective of the group.

    As with blocks that are sharded, gradients of 1/p of it, summed over the ranks, are those of the
    whole loss.

    Args:
        loss: () mean over ``num_targets`` of this rank.
        num_targets: may be 0; the loss may be anything then.
        region: of the micro-batch.
        shard: its pass.
    """
    own = loss.detach().double() * num_targets if num_targets > 0 else loss.new_zeros(()).double()
    sums = torch.stack([own, own.new_tensor(float(num_targets))])
    dist.all_reduce(sums, group=shard.group.process_group)
    mean = (sums[0] / sums[1]).to(loss.dtype)
    share = loss * (num_targets * shard.group.size / float(sums[1])) if num_targets > 0 else None
    if share is None:
        share = zero_loss(region, loss)
    return share + (mean - share.detach())


def zero_loss(region: Region, loss: Tensor) -> Tensor:
    """() zero whose backward runs the exchanges of attention, with gradients of zero.

    For a rank whose slice bears no loss: its own mean, over nothing, is NaN, and so would be its
    gradients; but the other ranks of the group wait for it in the backward.
    """
    outputs = [o for o in region.outputs or () if o.requires_grad]
    total = loss.new_zeros(())
    for output in outputs:
        total = total + (output * 0).sum().to(total.dtype)
    return total


def _lengths(entries: Iterable[Any]) -> set[int]:
    """Lengths that whole entries may bring into the blocks."""
    sizes: set[int] = set()
    for entry in entries:
        if isinstance(entry, Tensor) and entry.dim() >= 2:
            sizes.update(entry.shape[1:])
    return sizes

"""Sharding the tokens of one micro-batch: into the first block, through all, out of the last.

Shape legend: S true length, p ranks, n tokens per rank (p * n >= S).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.parallel import rng
from lightning_dcp.parallel.arguments import BlockArguments, hidden_of, with_hidden
from lightning_dcp.parallel.collectives import gather_sequence, slice_sequence
from lightning_dcp.parallel.region import Region, ShardedPass, choose_local_length, in_backward
from lightning_dcp.parallel.signature import BlockSignature, TensorShape, condition_sizes

__all__ = ["TokenSharder"]


class TokenSharder:
    """Takes a rank's share of the arguments of each block, and gathers the last one's output.

    Args:
        region: of the micro-batch; told which pass is open.
        arguments: how to read the blocks' arguments.
        signature: which of their dimensions is the sequence.
        device: whose random numbers are switched inside each block.
        path: name of the stack, for messages.
    """

    def __init__(
        self,
        region: Region,
        arguments: BlockArguments,
        signature: BlockSignature,
        device: torch.device,
        path: str,
    ) -> None:
        self._region = region
        self._group = region.group
        self._arguments = arguments
        self._signature = signature
        self._device = device
        self._path = path
        self.forward_pass: ShardedPass | None = None

    def share(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ShardedPass, tuple[Any, ...], dict[str, Any]]:
        """The pass that this call of block ``index`` belongs to, and its arguments for this rank.

        The first block opens a pass; its hidden states are whole, those of later blocks a share.
        """
        tensors = self._arguments.tensors(args, kwargs)
        hidden_name = self._arguments.hidden_name(args, kwargs)
        hidden = tensors.pop(hidden_name)
        dim = self._signature.sequence_dim % hidden.dim()
        if index == 0:
            shard = self._open(hidden, dim, tensors)
            parts = {hidden_name: slice_sequence(hidden, dim, self._group, shard.local_length)}
        else:
            shard = self._pass_of(index, hidden.shape[dim])
            parts = {hidden_name: hidden}
        whole_shape = (*hidden.shape[:dim], shard.length, *hidden.shape[dim + 1 :])
        for name, tensor in tensors.items():
            parts[name] = self._share(shard, TensorShape.of(name, tensor), tensor, whole_shape)
        return shard, *self._arguments.map(args, kwargs, lambda name, _: parts[name])

    def gather(self, shard: ShardedPass, output: Any) -> Any:
        """The last block's output with the whole hidden states; what else is in it stays local."""
        own = hidden_of(output)
        dim = self._signature.sequence_dim % own.dim()
        return with_hidden(output, gather_sequence(own, dim, self._group, shard.length))

    @contextmanager
    def own_random(self, index: int) -> Iterator[None]:
        """Block ``index`` draws this rank's random numbers; what follows draws everyone's again.

        So it does between blocks too, where a model may draw which ones it skips.
        """
        with rng.preserved(self._device):
            rng.seed_sharded(self._device, self._group.rank_in_group, index)
            yield

    def close(self) -> None:
        """End the forward's pass."""
        self.forward_pass = self._region.open = None

    def _open(self, hidden: Tensor, dim: int, others: Mapping[str, Tensor]) -> ShardedPass:
        length = hidden.shape[dim]
        conditions = set(self._signature.condition_lengths)
        for name, tensor in others.items():
            shape = TensorShape.of(name, tensor)
            arg_dim = self._signature.dim_of(shape, length, tuple(hidden.shape))
            if arg_dim is None or tensor.shape[arg_dim] != length:
                conditions.update(condition_sizes(shape, self._signature.batch_dim))
        # Calls that say what they attend along need no length that tells it.
        marked = self._signature.marked or hidden.dim() >= 4
        taken = set() if marked else conditions
        local_length = choose_local_length(length, self._group.size, taken)
        shard = ShardedPass(self._group, length, local_length, conditions, marked=marked)
        if in_backward():  # NOTE user-checkpoint of runtime.py
            return shard
        if self.forward_pass is not None:
            self.close()
            raise RuntimeError(
                f"the first block of {self._path} ran again before the last one had run: the "
                f"hidden states were not gathered. Models that skip or repeat blocks need SP size 1"
            )
        self._region.refuse_open(self._path)
        self._region.remember(shard)
        self.forward_pass = self._region.open = shard
        return shard

    def _pass_of(self, index: int, local_length: int) -> ShardedPass:
        shard = self._region.pass_of(local_length) if in_backward() else self.forward_pass
        if shard is None or shard.local_length != local_length:
            self.close()
            known = "the first block has not run"
            if shard is not None:
                known = f"each rank has {shard.local_length} of {shard.length}"
            raise RuntimeError(
                f"block {index} of {self._path} got {local_length} tokens, but {known}. Models "
                f"that skip blocks or change the sequence between blocks need SP size 1"
            )
        return shard

    def _share(
        self, shard: ShardedPass, shape: TensorShape, tensor: Tensor, hidden_shape: tuple[int, ...]
    ) -> Tensor:
        """This rank's part of an argument other than the hidden states, or the whole of it."""
        dim = self._signature.dim_of(shape, shard.length, hidden_shape)
        local_length = shard.local_length
        if dim is not None:
            size = tensor.shape[dim]
            if size == shard.length:
                return slice_sequence(tensor, dim % tensor.dim(), shard.group, local_length)
            if size in (1, local_length):  # broadcast; made of hidden states that are shares
                return tensor
        sizes = set(condition_sizes(shape, self._signature.batch_dim))
        if local_length in sizes and not shard.marked:
            # The first block's arguments were avoided when n was chosen; this is a later one's.
            raise ValueError(
                f"argument {shape.name!r} of {self._path}, of shape {shape.shape}, is not the "
                f"first block's and has the length of a rank's share ({local_length} of "
                f"{shard.length} tokens): whole or not cannot be told. Limit the SP sizes to 1"
            )
        shard.condition_lengths |= sizes
        return tensor

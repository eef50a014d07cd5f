"""Running a stack of blocks as a micro-batch asks for: sharded, partly recomputed, shortened.

``attach`` wraps the ``forward`` of each block (an instance attribute: parameters and state-dict
keys stay, hooks and wrappers of others on ``__call__`` run around it); ``micro_batch`` says what
the wrappers do until it ends.

One pass through the blocks on p ranks, S tokens, n per rank::

    first block   take n of the S tokens of the hidden states, open the region (random numbers)
    every block   take n tokens of other whole-length arguments; attention swaps tokens for heads
    last block    gather S tokens (backward: sum over the group), close the region

NOTE user-checkpoint: a model's own ``torch.utils.checkpoint`` may run a block, or a part of one,
again in the backward, in autograd's thread on CUDA, and leave it by an exception once it has all it
needs. So nothing opened in the backward outlives the call that opened it, and the length of the
tokens tells which pass is being repeated.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from lightning_dcp.parallel import rng
from lightning_dcp.parallel.arguments import BlockArguments, with_hidden
from lightning_dcp.parallel.blocks import BlockStack
from lightning_dcp.parallel.forwarding import BlockForward, Replay, ShardedReplay, checkpointed
from lightning_dcp.parallel.interception import AttentionMode, installed
from lightning_dcp.parallel.region import AttentionCall, Region, activate, in_backward
from lightning_dcp.parallel.sharding import TokenSharder
from lightning_dcp.parallel.signature import (
    BlockObservation,
    BlockSignature,
    TensorShape,
    learn_signature,
)
from lightning_dcp.parallel.topology import SPGroup, Topology
from lightning_dcp.parallel.ulysses import heads_reason

__all__ = ["BlockRuntime"]


@dataclasses.dataclass
class _Run:
    """The running micro-batch. ``sharder`` is None on a group of one."""

    region: Region
    sharder: TokenSharder | None
    recompute_blocks: int
    active_blocks: int
    observe: bool
    first_output: Any = None


class _HasSignature(Protocol):
    @property
    def signature(self) -> str | None: ...


class BlockRuntime:
    """Shards, recomputes and observes the blocks of one stack, micro-batch by micro-batch.

    Args:
        stack: the blocks.
        topology: whose groups the micro-batches run on.
        sequence_dims: sequence dimension of arguments by name or position, where the shapes leave
            it open; None for one that stays whole.
        hidden_states: name or position of the argument with the hidden states; None: the first
            positional tensor, or the keyword ``hidden_states`` or ``x``.
        device: of the blocks; its random numbers are managed.
    """

    def __init__(
        self,
        stack: BlockStack,
        topology: Topology,
        *,
        sequence_dims: Mapping[Any, int | None] | None = None,
        hidden_states: str | int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.stack = stack
        self.topology = topology
        self.device = torch.device(device)
        self._arguments = BlockArguments(stack.blocks[0].forward, hidden_states)
        self._overrides = {
            self._arguments.name_of(name): dim for name, dim in (sequence_dims or {}).items()
        }
        self._observations: dict[BlockObservation, None] = {}
        self._signature: BlockSignature | None = None
        self._signature_error: str | None = None
        self._wrappers: list[BlockForward] = []
        self._run: _Run | None = None
        self._is_plain = True  # nothing to do for the wrappers
        self._run_in_micro_batch: Callable[..., Any] = self._run_block_now

    # ------------------------------------------------------------------ attaching

    def attach(self) -> None:
        """Wrap the blocks' ``forward``; nothing changes outside ``micro_batch``. Twice is once.

        Raises:
            RuntimeError: if the blocks are attached to another runtime.
        """
        if self._wrappers:
            return
        for block in self.stack.blocks:
            if isinstance(vars(block).get("forward"), BlockForward):
                raise RuntimeError(
                    f"the blocks of {self.stack.path!r} are already attached to another runtime: "
                    f"detach that one first"
                )
        # A block compiled as a module has our wrapper inside its compiled call. Where there is
        # nothing for us to do it is compiled through; the rest must not be traced.
        if any(block._compiled_call_impl is not None for block in self.stack.blocks):
            disable: Callable[..., Any] = torch.compiler.disable
            self._run_in_micro_batch = disable(self._run_block_now)
        self._wrappers = [BlockForward(self, i, b) for i, b in enumerate(self.stack.blocks)]

    def detach(self) -> None:
        """Give the blocks their own ``forward`` back."""
        for wrapper in self._wrappers:
            wrapper.remove()
        self._wrappers = []

    # ------------------------------------------------------------------ what the blocks are like

    @property
    def observations(self) -> tuple[BlockObservation, ...]:
        """Distinct runs of single blocks recorded under ``observe=True``."""
        return tuple(self._observations)

    @property
    def signature(self) -> BlockSignature | None:
        """What is known of the blocks; None where that does not suffice for p > 1. Can be set."""
        try:
            return self._learned()
        except ValueError:
            return None

    @signature.setter
    def signature(self, signature: BlockSignature) -> None:
        self._signature, self._signature_error = signature, None

    def load_observations(self, profile: _HasSignature) -> None:
        """Take over what a (cached) cost profile knows of the blocks, where it knows anything."""
        if profile.signature is not None:
            self.signature = BlockSignature.from_json(profile.signature)

    def _learned(self) -> BlockSignature:
        """The signature, or ValueError with what is missing."""
        if self._signature is None and self._signature_error is None:
            try:
                self._signature = learn_signature(
                    self.observations, self._overrides, self._arguments.default_hidden
                )
            except ValueError as error:
                self._signature_error = str(error)
        if self._signature is None:
            raise ValueError(self._signature_error)
        return self._signature

    @property
    def attention_heads(self) -> frozenset[tuple[int, int]]:
        """(query heads, key/value heads) of the blocks' self-attention; empty where unknown."""
        signature = self.signature
        return frozenset() if signature is None else signature.attention_heads

    def sp_size_exclusions(self, sizes: Iterable[int]) -> dict[int, str]:
        """Those of ``sizes`` that the blocks cannot be sharded by, each with the reason."""
        reasons = {p: reason for p in sizes if (reason := self._exclusion(p)) is not None}
        return dict(sorted(reasons.items()))

    def _exclusion(self, sp_size: int) -> str | None:
        if sp_size == 1:
            return None
        if sp_size not in self.topology.sp_sizes:
            return f"no aligned block of {sp_size} ranks in a world of {self.topology.world_size}"
        no_attention = (
            f"no attention call was seen in {self.stack.path}: call "
            f"F.scaled_dot_product_attention, or lightning_dcp.attention in its place"
        )
        try:
            signature = self._learned()
        except ValueError as error:
            seen = [o for o in self.observations if o.calls]
            return str(error) if seen or not self.observations else no_attention
        if signature.obstacles:
            return signature.obstacles[0]
        if not signature.attention_heads:
            return no_attention
        for num_heads, num_kv_heads in sorted(signature.attention_heads):
            reason = heads_reason(num_heads, num_kv_heads, sp_size)
            if reason is not None:
                return f"{reason} of {self.stack.path}"
        return None

    # ------------------------------------------------------------------ micro-batches

    @contextmanager
    def micro_batch(
        self,
        *,
        group: SPGroup,
        recompute_blocks: int = 0,
        rng_key: tuple[int, ...] = (0,),
        active_blocks: int | None = None,
        observe: bool = False,
    ) -> Iterator[None]:
        """What runs inside is one micro-batch: its forward *and* its backward.

        On a group of p > 1 the model's inputs and outputs are whole and the same on all ranks of
        it; the caller scales the loss by 1/p and sums gradients over ranks.

        Args:
            group: the ranks that run it.
            recompute_blocks: r, how many blocks (the first ones) are recomputed in the backward.
            rng_key: seeds all random numbers; must be the same on the ranks of the group and differ
                between micro-batches. Afterwards random states are as before.
            active_blocks: run only so many blocks (at most all), the others return their input
                (profiling).
            observe: record the blocks' shapes and attention calls (on a group of one).

        Raises:
            RuntimeError: if not attached, if a micro-batch is running already, or if the last block
                did not run in a sharded forward, so that nothing was gathered.
            ValueError: for numbers of blocks that the stack does not have, or p > 1 without a
                signature.
        """
        num_blocks = len(self.stack)
        active_blocks = num_blocks if active_blocks is None else min(active_blocks, num_blocks)
        if not 0 <= recompute_blocks <= num_blocks or active_blocks < 1:
            raise ValueError(
                f"{self.stack.path} has {num_blocks} blocks: cannot recompute {recompute_blocks} "
                f"and run {active_blocks} of them"
            )
        if not self._wrappers:
            raise RuntimeError("the runtime is not attached to its blocks: call attach() first")
        region, sharder = Region(group), None
        if group.size > 1:  # an unknown signature is an error now, before any collective
            sharder = TokenSharder(
                region, self._arguments, self._learned(), self.device, self.stack.path
            )
        run = _Run(region, sharder, recompute_blocks, active_blocks, observe and sharder is None)
        with ExitStack() as stack:
            stack.enter_context(activate(region))
            stack.enter_context(rng.preserved(self.device))
            if sharder is not None or run.observe:
                stack.enter_context(installed())
            stack.callback(self._end)
            self._run = run
            self._is_plain = (
                sharder is None
                and not run.observe
                and recompute_blocks == 0
                and active_blocks == num_blocks
            )
            rng.seed(self.device, rng_key)
            yield
            # Not where an error is being handled already: it would hide that one.
            if sharder is not None and sharder.forward_pass and sys.exc_info()[0] is None:
                raise RuntimeError(
                    f"the first block of {self.stack.path} ran on {group.size} ranks, the last one "
                    f"did not: the hidden states were never gathered. Models that skip or leave "
                    f"out blocks need SP size 1"
                )

    def _end(self) -> None:
        self._run, self._is_plain = None, True

    def run_block(
        self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the wrapper of block ``index`` does when it is called."""
        if self._is_plain:
            return forward(*args, **kwargs)
        return self._run_in_micro_batch(index, forward, args, kwargs)

    def _run_block_now(
        self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        run = self._run
        assert run is not None
        if run.sharder is not None:
            return self._run_sharded(run, run.sharder, index, forward, args, kwargs)
        if run.observe and index < run.active_blocks and not in_backward():
            return self._run_observed(run, index, forward, args, kwargs)
        return self._run_plain(run, index, forward, args, kwargs, Replay)

    def _run_plain(
        self,
        run: _Run,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        replay: Callable[[], Replay],
    ) -> Any:
        """One block: passed over, under checkpoint, or as it is."""
        if index >= run.active_blocks:
            name = self._arguments.hidden_name(args, kwargs)
            return with_hidden(run.first_output, self._arguments.tensors(args, kwargs)[name])
        if index < run.recompute_blocks and torch.is_grad_enabled():
            output = checkpointed(forward, args, kwargs, replay())
        else:
            output = forward(*args, **kwargs)
        if index == 0 and run.active_blocks < len(self.stack):
            run.first_output = with_hidden(output, None)  # the structure only
        return output

    def _run_sharded(
        self,
        run: _Run,
        sharder: TokenSharder,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        backward = in_backward()
        is_last = index == len(self.stack) - 1
        try:
            shard, args, kwargs = sharder.share(index, args, kwargs)
            with run.region.inside(shard), AttentionMode():
                output = self._run_plain(
                    run, index, forward, args, kwargs, lambda: ShardedReplay(run.region, shard)
                )
            if is_last:
                output = sharder.gather(shard, output)
        except BaseException:
            if not backward:
                sharder.close()
            raise
        if is_last and not backward:
            sharder.close()
        return output

    def _run_observed(
        self,
        run: _Run,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        calls: list[AttentionCall] = []
        run.region.calls = calls
        try:
            with AttentionMode():
                output = self._run_plain(run, index, forward, args, kwargs, Replay)
        finally:
            run.region.calls = None
        tensors = self._arguments.tensors(args, kwargs)
        observation = BlockObservation(
            self._arguments.hidden_name(args, kwargs),
            tuple(TensorShape.of(name, tensor) for name, tensor in tensors.items()),
            tuple(calls),
        )
        if observation not in self._observations:
            self._observations[observation] = None
            self._signature = self._signature_error = None
        return output

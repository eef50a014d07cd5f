"""One stack of blocks in a micro-batch: its arguments, its signature, what its wrappers do.

Every stack opens and closes passes of its own; they share the micro-batch's region. A stack that
the ranks of a group cannot share runs whole on each of them, as all that is outside the blocks
does: the gather of another stack sums over the group, so that gradients are right either way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_dcp.parallel.arguments import BlockArguments, hidden_of, with_hidden
from lightning_dcp.parallel.blocks import BlockStack
from lightning_dcp.parallel.compiled import compiled_forward, is_compiled
from lightning_dcp.parallel.forwarding import (
    BlockForward,
    Replay,
    ShardedReplay,
    WholeReplay,
    checkpointed,
)
from lightning_dcp.parallel.inputs import InputSharder
from lightning_dcp.parallel.interception import AttentionMode
from lightning_dcp.parallel.region import AttentionCall, Region, ShardedPass, in_backward
from lightning_dcp.parallel.sharding import TokenSharder
from lightning_dcp.parallel.signature import (
    BlockObservation,
    BlockSignature,
    TensorShape,
    learn_signature,
)

__all__ = ["BlockCall", "StackRun", "StackRuntime"]


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """One run of one block on whole sequences, in the order in which they come.

    Attributes:
        path: of its stack.
        index: of the block.
        input_shape: of the hidden states; None where none were found.
        output_shape: of those it returned; None where it returned something else.
        attends: whether it called attention.
    """

    path: str
    index: int
    input_shape: tuple[int, ...] | None
    output_shape: tuple[int, ...] | None
    attends: bool


@dataclasses.dataclass
class StackRun:
    """What the running micro-batch asks of a stack.

    Attributes:
        region: of the micro-batch.
        sharder: None where each rank runs the stack on whole sequences.
        recompute_blocks: how many blocks (the first ones) are recomputed.
        active_blocks: how many blocks run.
        trace: where runs of blocks are recorded; None: they are not.
    """

    region: Region
    sharder: TokenSharder | InputSharder | None
    recompute_blocks: int
    active_blocks: int
    trace: list[BlockCall] | None = None
    first_output: Any = None


class StackRuntime:
    """Shards, recomputes and observes the blocks of one stack; see ``BlockRuntime``."""

    def __init__(
        self,
        stack: BlockStack,
        *,
        sequence_dims: Mapping[Any, int | None] | None,
        hidden_states: str | int | None,
        device: torch.device,
    ) -> None:
        self.stack = stack
        self.device = device
        #: SP size -> why the stack is not sharded by it, though its signature allows it.
        self.whole_at: dict[int, str] = {}
        self._arguments = BlockArguments(stack.blocks[0].forward, hidden_states)
        self._overrides = {
            self._arguments.name_of(name): dim for name, dim in (sequence_dims or {}).items()
        }
        self._observations: dict[BlockObservation, None] = {}
        self._signature: BlockSignature | None = None
        self._signature_error: str | None = None
        self._wrappers: list[BlockForward] = []
        self._compiled: dict[int, Callable[..., Any]] = {}
        self._run: StackRun | None = None
        self._is_plain = True  # nothing to do for the wrappers
        self._run_in_micro_batch: Callable[..., Any] = self._run_block_now

    def __len__(self) -> int:
        return len(self.stack)

    @property
    def path(self) -> str:
        """Dotted name of the stack."""
        return self.stack.path

    def num_active(self, wanted: int) -> int:
        """How many blocks run where ``wanted`` are to: so many that one of them trains, if any.

        Costs are measured on the last of them. Where the first blocks are frozen, and all before
        them, a backward pass ends at the first that trains.
        """
        for index, block in enumerate(self.stack.blocks):
            if any(parameter.requires_grad for parameter in block.parameters()):
                return min(max(wanted, index + 1), len(self.stack))
        return min(wanted, len(self.stack))

    # ------------------------------------------------------------------ attaching

    @property
    def is_attached(self) -> bool:
        """Whether the blocks' ``forward`` is wrapped."""
        return bool(self._wrappers)

    def attach(self) -> None:
        """Wrap the blocks' ``forward``. Twice is once.

        Raises:
            RuntimeError: if the blocks are attached to another runtime.
        """
        if self._wrappers:
            return
        for block in self.stack.blocks:
            if isinstance(vars(block).get("forward"), BlockForward):
                raise RuntimeError(
                    f"the blocks of {self.path!r} are already attached to another runtime: "
                    f"detach that one first"
                )
        # A block compiled as a module has our wrapper inside its compiled call. Where there is
        # nothing for us to do it is compiled through; the rest must not be traced.
        self._compiled = {
            i: compiled_forward(b) for i, b in enumerate(self.stack.blocks) if is_compiled(b)
        }
        if self._compiled:
            disable: Callable[..., Any] = torch.compiler.disable
            self._run_in_micro_batch = disable(self._run_compiled_block)
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
            return self.learned()
        except ValueError:
            return None

    @signature.setter
    def signature(self, signature: BlockSignature) -> None:
        self._signature, self._signature_error = signature, None

    def learned(self) -> BlockSignature:
        """The signature.

        Raises:
            ValueError: with what is missing.
        """
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

    def exclusion(self, sp_size: int) -> str | None:
        """Why the blocks cannot be sharded by ``sp_size``; None: they can."""
        if sp_size in self.whole_at:
            return self.whole_at[sp_size]
        no_attention = (
            f"no attention call was seen in {self.path}: call "
            f"F.scaled_dot_product_attention, or lightning_dcp.attention in its place"
        )
        try:
            signature = self.learned()
        except ValueError as error:
            seen = [o for o in self.observations if o.calls]
            return str(error) if seen or not self.observations else no_attention
        if signature.obstacles:
            return signature.obstacles[0]
        if not signature.attention_heads and not signature.marked:
            return no_attention
        return None

    # ------------------------------------------------------------------ micro-batches

    def sharder(self, region: Region) -> TokenSharder:
        """Shards this stack in a micro-batch.

        Raises:
            ValueError: if the signature is not known, before any collective.
        """
        return TokenSharder(region, self._arguments, self.learned(), self.device, self.path)

    def begin(self, run: StackRun) -> None:
        """Let the wrappers do what ``run`` says until ``end``."""
        self._run = run
        self._is_plain = (
            run.sharder is None
            and run.trace is None
            and run.recompute_blocks == 0
            and run.active_blocks == len(self.stack)
        )

    def share_inputs(self, shard: ShardedPass) -> None:
        """Run the rest of the micro-batch on inputs that are shares already.

        Raises:
            ValueError: for blocks that the ranks cannot share.
        """
        assert self._run is not None
        if self._run.sharder is None:
            raise ValueError(
                f"shard='inputs' needs all blocks to be sharded: "
                f"{self.exclusion(shard.group.size)}. Use shard='blocks'"
            )
        self._run.sharder = InputSharder(
            self._run.region, shard, self.learned().sequence_dim, self.path
        )

    def end(self) -> None:
        """The micro-batch is over."""
        self._run, self._is_plain = None, True

    def run_block(
        self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the wrapper of block ``index`` does when it is called."""
        if self._is_plain:
            return forward(*args, **kwargs)
        return self._run_in_micro_batch(index, forward, args, kwargs)

    def _run_compiled_block(
        self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        assert self._run is not None
        if self._run.trace is None:  # what is observed is the block as it is
            forward = self._compiled.get(index, forward)
        return self._run_block_now(index, forward, args, kwargs)

    def _run_block_now(
        self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        run = self._run
        assert run is not None
        if run.sharder is not None:
            return self._run_sharded(run, run.sharder, index, forward, args, kwargs)
        if run.trace is not None and index < run.active_blocks and not in_backward():
            return self._run_observed(run, run.trace, index, forward, args, kwargs)
        return self._run_plain(run, index, forward, args, kwargs, lambda: _whole_replay(run))

    def _run_plain(
        self,
        run: StackRun,
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
        run: StackRun,
        sharder: TokenSharder | InputSharder,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        backward = in_backward()
        is_last = index == len(self.stack) - 1
        try:
            shard, args, kwargs = sharder.share(index, args, kwargs)
            with run.region.inside(shard), sharder.own_random(index), AttentionMode():
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
        run: StackRun,
        trace: list[BlockCall],
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
        output_shape = _shape_of_hidden(output)
        try:
            hidden_name = self._arguments.hidden_name(args, kwargs)
        except TypeError:
            if not self.stack.optional:
                raise
            trace.append(BlockCall(self.path, index, None, output_shape, bool(calls)))
            return output
        input_shape = tuple(tensors[hidden_name].shape)
        trace.append(BlockCall(self.path, index, input_shape, output_shape, bool(calls)))
        observation = BlockObservation(
            hidden_name,
            tuple(TensorShape.of(name, tensor) for name, tensor in tensors.items()),
            tuple(calls),
        )
        if observation not in self._observations:
            self._observations[observation] = None
            self._signature = self._signature_error = None
        return output


def _whole_replay(run: StackRun) -> Replay:
    """Of a block that runs whole on each rank, or between the blocks of a stack that is shared."""
    if run.region.group.size == 1:
        return Replay()
    if run.region.open is not None:
        return ShardedReplay(run.region, run.region.open)
    return WholeReplay(run.region)


def _shape_of_hidden(output: Any) -> tuple[int, ...] | None:
    try:
        return tuple(hidden_of(output).shape)
    except TypeError:
        return None

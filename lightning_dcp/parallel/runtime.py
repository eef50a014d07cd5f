"""Running stacks of blocks as a micro-batch asks for: sharded, partly recomputed, shortened.

``attach`` wraps the ``forward`` of each block (an instance attribute: parameters and state-dict
keys stay, hooks and wrappers of others on ``__call__`` run around it); ``micro_batch`` says what
the wrappers do until it ends.

One pass through a stack's blocks on p ranks, S tokens, n per rank::

    first block   take n of the S tokens of the hidden states, open the region
    every block   take n tokens of other whole-length arguments; random numbers of the rank's own;
                  attention swaps tokens for heads
    last block    gather S tokens (backward: sum over the group), close the region

Several stacks (encoder and decoder, vision tower and language model) run one after the other, each
with passes of its own, and each as often as the model wants, or not at all.

NOTE user-checkpoint: a model's own ``torch.utils.checkpoint`` may run a block, or a part of one,
again in the backward, in autograd's thread on CUDA, and leave it by an exception once it has all it
needs. So nothing opened in the backward outlives the call that opened it, and the length of the
tokens tells which pass is being repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_dcp.parallel import rng
from lightning_dcp.parallel.blocks import BlockStack
from lightning_dcp.parallel.inputs import (
    NO_TARGETS,
    OwnInputs,
    StepInputs,
    mean_over_group,
    whole_sequence,
    zero_loss,
)
from lightning_dcp.parallel.interception import AttentionMode, installed
from lightning_dcp.parallel.region import Region, activate
from lightning_dcp.parallel.signature import BlockObservation, BlockSignature
from lightning_dcp.parallel.stack_runtime import BlockCall, StackRun, StackRuntime
from lightning_dcp.parallel.topology import SPGroup, Topology

__all__ = ["BlockRuntime"]


class _StackFacts(Protocol):
    """What a cost profile knows of one stack."""

    @property
    def path(self) -> str: ...

    @property
    def signature(self) -> str | None: ...

    @property
    def whole_at(self) -> Mapping[int, str]: ...


class _HasSignature(Protocol):
    """A cost profile: of its only stack, or of each of several in ``stacks``."""

    @property
    def signature(self) -> str | None: ...


class BlockRuntime:
    """Shards, recomputes and observes the blocks of a model, micro-batch by micro-batch.

    Args:
        stacks: the blocks: one stack, or several that run one after the other; the first is the
            main one.
        topology: whose groups the micro-batches run on.
        sequence_dims: sequence dimension of arguments by name or position, where the shapes leave
            it open; None for one that stays whole. Of all stacks that have such an argument.
        hidden_states: name or position of the argument with the hidden states; None: the first
            positional tensor, or the keyword ``hidden_states`` or ``x``.
        device: of the blocks; its random numbers are managed.
    """

    def __init__(
        self,
        stacks: BlockStack | Sequence[BlockStack],
        topology: Topology,
        *,
        sequence_dims: Mapping[Any, int | None] | None = None,
        hidden_states: str | int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.topology = topology
        self.device = torch.device(device)
        given = (stacks,) if isinstance(stacks, BlockStack) else tuple(stacks)
        if not given:
            raise ValueError("a runtime needs at least one stack of blocks")
        self._stacks = tuple(
            StackRuntime(
                stack, sequence_dims=sequence_dims, hidden_states=hidden_states, device=self.device
            )
            for stack in given
        )
        self._recompute_order = tuple(range(len(given)))
        #: Whether micro-batches may be packed (``segments.pack``): attention calls are then
        #: intercepted on a single rank too.
        self.packing = False
        #: Slices the batches of training steps (``shard="inputs"``); None: blocks are sharded.
        self.inputs: StepInputs | None = None
        self._running: tuple[Region, ExitStack] | None = None
        #: Runs of blocks in the last micro-batch with ``observe=True``, in their order.
        self.trace: tuple[BlockCall, ...] = ()

    # ------------------------------------------------------------------ the stacks

    @property
    def stacks(self) -> tuple[StackRuntime, ...]:
        """All stacks, the main one first."""
        return self._stacks

    @property
    def stack(self) -> BlockStack:
        """The main stack."""
        return self._stacks[0].stack

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The blocks of all stacks in the order in which they are recomputed."""
        return tuple(block for i in self._recompute_order for block in self._stacks[i].stack.blocks)

    @property
    def num_blocks(self) -> int:
        """L, blocks of all stacks."""
        return sum(len(stack) for stack in self._stacks)

    @property
    def name(self) -> str:
        """The stacks' paths, for messages."""
        return " and ".join(stack.path for stack in self._stacks)

    @property
    def recompute_order(self) -> tuple[int, ...]:
        """Stacks in the order in which their blocks are recomputed as r grows. Can be set."""
        return self._recompute_order

    @recompute_order.setter
    def recompute_order(self, order: Sequence[int]) -> None:
        if sorted(order) != list(range(len(self._stacks))):
            raise ValueError(f"{tuple(order)} is no order of {len(self._stacks)} stacks")
        self._recompute_order = tuple(order)

    def keep_stacks(self, paths: Iterable[str]) -> None:
        """Leave out the optional stacks that ``paths`` does not name; they are the model's again.

        Raises:
            ValueError: if a path is unknown, or a stack that was named by the user is missing.
        """
        kept = set(paths)
        unknown = kept - {stack.path for stack in self._stacks}
        missing = [s.path for s in self._stacks if s.path not in kept and not s.stack.optional]
        if unknown or missing:
            raise ValueError(
                f"the stacks of blocks are {self.name}; got {sorted(kept)}, without {missing}"
            )
        order = [self._stacks[i].path for i in self._recompute_order]
        for stack in self._stacks:
            if stack.path not in kept:
                stack.detach()
        self._stacks = tuple(stack for stack in self._stacks if stack.path in kept)
        places = {stack.path: i for i, stack in enumerate(self._stacks)}
        self._recompute_order = tuple(places[path] for path in order if path in kept)

    # ------------------------------------------------------------------ attaching

    def attach(self) -> None:
        """Wrap the blocks' ``forward``; nothing changes outside ``micro_batch``. Twice is once.

        Raises:
            RuntimeError: if the blocks are attached to another runtime.
        """
        for stack in self._stacks:
            stack.attach()

    def detach(self) -> None:
        """Give the blocks their own ``forward`` back."""
        for stack in self._stacks:
            stack.detach()

    # ------------------------------------------------------------------ what the blocks are like

    @property
    def observations(self) -> tuple[BlockObservation, ...]:
        """Distinct runs of single blocks of the main stack recorded under ``observe=True``."""
        return self._stacks[0].observations

    @property
    def signature(self) -> BlockSignature | None:
        """What is known of the main stack; None where that does not suffice for p > 1. Settable."""
        return self._stacks[0].signature

    @signature.setter
    def signature(self, signature: BlockSignature) -> None:
        self._stacks[0].signature = signature

    def load_observations(self, profile: _HasSignature) -> None:
        """Take over what a (cached) cost profile knows of the blocks, where it knows anything."""
        facts: Sequence[_StackFacts] = getattr(profile, "stacks", ())
        if facts:
            self.keep_stacks(stack.path for stack in facts)
            known = {stack.path: stack for stack in facts}
            for stack in self._stacks:
                text = known[stack.path].signature
                if text is not None:
                    stack.signature = BlockSignature.from_json(text)
                stack.whole_at = dict(known[stack.path].whole_at)
            places = {stack.path: i for i, stack in enumerate(self._stacks)}
            order: Sequence[int] = getattr(profile, "recompute_order", range(len(facts)))
            self.recompute_order = [places[facts[i].path] for i in order]
        elif profile.signature is not None:
            self.signature = BlockSignature.from_json(profile.signature)

    @property
    def attention_heads(self) -> frozenset[tuple[int, int]]:
        """(query heads, key/value heads) of the blocks' self-attention; empty where unknown."""
        signatures = [stack.signature for stack in self._stacks]
        return frozenset().union(*(s.attention_heads for s in signatures if s is not None))

    def sp_size_exclusions(self, sizes: Iterable[int]) -> dict[int, str]:
        """Those of ``sizes`` that no stack can be sharded by, each with the main one's reason."""
        reasons = {p: reason for p in sizes if (reason := self._exclusion(p)) is not None}
        return dict(sorted(reasons.items()))

    def _exclusion(self, sp_size: int) -> str | None:
        if sp_size == 1:
            return None
        if sp_size not in self.topology.sp_sizes:
            return f"no aligned block of {sp_size} ranks in a world of {self.topology.world_size}"
        reasons = [stack.exclusion(sp_size) for stack in self._stacks]
        return None if None in reasons else reasons[0]

    def whole_stacks(self, sp_size: int) -> dict[str, str]:
        """Stacks that each of ``sp_size`` ranks runs whole while others are sharded, with why."""
        if sp_size == 1 or self._exclusion(sp_size) is not None:
            return {}
        reasons = {stack.path: stack.exclusion(sp_size) for stack in self._stacks}
        return {path: reason for path, reason in reasons.items() if reason is not None}

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
            recompute_blocks: r, how many blocks are recomputed in the backward: the first ones of
                each stack, stack after stack in ``recompute_order``.
            rng_key: seeds all random numbers; must be the same on the ranks of the group and differ
                between micro-batches. Afterwards random states are as before.
            active_blocks: run only so many blocks of each stack (at most all; more where the
                first ones are frozen), the others return their input (profiling).
            observe: record the blocks' shapes and attention calls (on a group of one).

        Raises:
            RuntimeError: if not attached, if a micro-batch is running already, or if the last block
                of a stack did not run in a sharded forward, so that nothing was gathered.
            ValueError: for numbers of blocks that the stacks do not have, or p > 1 without a
                signature.
        """
        active = self.num_blocks if active_blocks is None else active_blocks
        if not 0 <= recompute_blocks <= self.num_blocks or active < 1:
            raise ValueError(
                f"{self.name} has {self.num_blocks} blocks: cannot recompute {recompute_blocks} "
                f"and run {active} of them"
            )
        if not all(stack.is_attached for stack in self._stacks):
            raise RuntimeError("the runtime is not attached to its blocks: call attach() first")
        region = Region(group)
        trace: list[BlockCall] | None = [] if observe and group.size == 1 else None
        runs = self._runs(region, recompute_blocks, active, trace)
        sharders = [run.sharder for run in runs if run.sharder is not None]
        with ExitStack() as stack:
            stack.enter_context(activate(region))
            stack.enter_context(rng.preserved(self.device))
            if sharders or trace is not None or self.packing:
                stack.enter_context(installed())
            if self.packing:  # also outside the blocks, and for functions imported early
                stack.enter_context(AttentionMode())
            stack.callback(self._end, trace)
            self._running = region, stack
            for stack_runtime, run in zip(self._stacks, runs, strict=True):
                stack_runtime.begin(run)
            rng.seed(self.device, rng_key)
            yield
            # Not where an error is being handled already: it would hide that one.
            if sys.exc_info()[0] is None:
                self._check_gathered(runs)

    def shares_inputs(self, group: SPGroup) -> bool:
        """Whether each rank of ``group`` runs training steps on a slice of the batch."""
        return group.size > 1 and self.inputs is not None and self.inputs.slices

    def zero_loss(self, loss: Tensor) -> Tensor:
        """() zero in place of the loss of a rank whose slice bears none; see ``zero_loss``."""
        assert self._running is not None
        return zero_loss(self._running[0], loss)

    def own_inputs(self, batch: Any) -> OwnInputs:
        """What this rank runs the training step of the running micro-batch on.

        Where ``inputs`` slices batches, all that follows in the micro-batch is sharded: the caller
        weights each rank's loss by its own elements, without 1/p.

        Raises:
            ValueError: for a batch or blocks that cannot be shared so.
        """
        if self.inputs is None:
            return OwnInputs(batch, None)
        assert self._running is not None
        region, stack = self._running
        own = stack.enter_context(self.inputs.step(region, batch, self.device))
        if region.open is not None:
            for each in self._stacks:
                each.share_inputs(region.open)
        return own

    def whole_loss(self, loss: Tensor, num_targets: float | None) -> Tensor:
        """The running micro-batch's mean loss, where each rank has that of its own inputs.

        A collective of the group. Elsewhere ``loss`` as it is.
        """
        if self._running is None or (shard := self._running[0].open) is None:
            return loss
        if num_targets is None:
            raise ValueError(NO_TARGETS)
        return mean_over_group(loss, num_targets, self._running[0], shard)

    def whole_hidden(self, own: Tensor) -> Tensor:
        """Hidden states of the main stack in whole, detached, where each rank has its own.

        A collective of the group. Elsewhere ``own`` as it is.
        """
        if self._running is None or (shard := self._running[0].open) is None:
            return own
        return whole_sequence(own, self._stacks[0].learned().sequence_dim, shard)

    def _runs(
        self, region: Region, recompute_blocks: int, active_blocks: int, trace: Any
    ) -> list[StackRun]:
        """What each stack does; an unknown signature is an error now, before any collective."""
        recomputed = self.recomputed_blocks(recompute_blocks)
        sharded = [False] * len(self._stacks)
        if region.group.size > 1:
            sharded = [stack.exclusion(region.group.size) is None for stack in self._stacks]
            # What cannot be shared at all is for the caller to exclude; the main one tells why.
            sharded[0] = sharded[0] or not any(sharded)
        return [
            StackRun(
                region,
                stack.sharder(region) if is_sharded else None,
                r,
                stack.num_active(active_blocks),
                trace,
            )
            for stack, is_sharded, r in zip(self._stacks, sharded, recomputed, strict=True)
        ]

    def recomputed_blocks(self, recompute_blocks: int) -> tuple[int, ...]:
        """How many blocks of each stack are among the first r of all."""
        counts = [0] * len(self._stacks)
        for i in self._recompute_order:
            counts[i] = min(recompute_blocks, len(self._stacks[i]))
            recompute_blocks -= counts[i]
        return tuple(counts)

    def _check_gathered(self, runs: Sequence[StackRun]) -> None:
        for stack, run in zip(self._stacks, runs, strict=True):
            if run.sharder is not None and run.sharder.forward_pass:
                raise RuntimeError(
                    f"the first block of {stack.path} ran on {run.region.group.size} ranks, the "
                    f"last one did not: the hidden states were never gathered. Models that skip or "
                    f"leave out blocks need SP size 1"
                )

    def _end(self, trace: list[BlockCall] | None) -> None:
        self._running = None
        for stack in self._stacks:
            stack.end()
        if trace is not None:
            self.trace = tuple(trace)

"""Runs one rank's part of a plan: its micro-batches, each forward and backward once.

NOTE [Order trap]
    Lightning's closure calls `training_step`, then `zero_grad`, then `backward`. Backward passes
    inside `training_step` would be erased by `zero_grad`, all but the last micro-batch silently.
    Hence the split: the first micro-batch's forward pass runs in `Strategy.training_step`
    (`IterationRunner.first_forward`), everything else in `Strategy.backward`
    (`IterationRunner.drain`).

NOTE [Gradient weights]
    With N = loss-bearing elements of the whole iteration, every micro-batch's mean loss is scaled
    by `n / (N p)`: its own elements over all, and 1/p because p ranks compute the same loss.
    Gradients are summed over ranks (where the backend averages, times W). There is no other factor
    of p or of the number of micro-batches. N is known before the first backward pass, from one
    small all-reduce of what plan and labels say. Where `training_step` then returns another
    `num_targets`, or the user's transfer hooks wrote other labels, gradients are rescaled by
    N_before / N once, before they are reduced: the same number, one rounding more.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_dcp.data.packing import unpacked
from lightning_dcp.parallel import rng
from lightning_dcp.parallel.segments import pack
from lightning_dcp.strategies.iteration_state import IterationState, Lap
from lightning_dcp.strategies.metric_objects import counted_by_another_rank, not_reduced_over_ranks
from lightning_dcp.strategies.micro_batches import (
    LossAverage,
    Pending,
    TargetCounter,
    fraction_of,
    loss_and_targets,
)

if TYPE_CHECKING:
    from lightning_dcp.data.batch import IterationBatch
    from lightning_dcp.parallel.huggingface_loss import OwnLosses
    from lightning_dcp.parallel.runtime import BlockRuntime
    from lightning_dcp.parallel.topology import Topology
    from lightning_dcp.planning.plan import Plan
    from lightning_dcp.profiling.byte_limit import ByteLimit
    from lightning_dcp.profiling.memory_meter import MemoryMeter
    from lightning_dcp.strategies.iteration_logs import IterationLogs
    from lightning_dcp.strategies.out_of_memory import Place, Shortages

__all__ = ["IterationRunner", "LossAverage", "StepHost"]


class StepHost(Protocol):
    """What the runner needs from the strategy that owns it."""

    def forward_micro_batch(self, batch: Any, *rest: Any) -> Any:
        """Run the user's `training_step` under the precision plugin."""
        ...

    def backward_micro_batch(self, loss: Tensor) -> None:
        """Backward pass of one weighted loss, through the precision plugin."""
        ...

    def move_micro_batch(self, batch: Any) -> Any:
        """Move a batch to the device with the user's transfer hooks."""
        ...

    def sum_if_same_plan(self, value: float, plan: Plan) -> float:
        """All-reduce one number, if all ranks are about to run the same plan."""
        ...

    def abandon_pass(self) -> None:
        """Get the engine ready for further passes after one that raised."""
        ...

    def missing_gradient_bytes(self) -> int:
        """Bytes of gradients that do not exist yet."""
        ...


class IterationRunner:
    """Runs the micro-batches of one iteration after another on this rank.

    Args:
        host: the strategy.
        runtime: shards and recomputes the blocks of the model.
        topology: owner of the SP groups.
        logs: told how each micro-batch counts.
        memory: measures what micro-batches hold.
        find_metrics: returns the torchmetrics objects inside the module.
        find_generators: returns the random generators inside the module.
        loss_average: what the loss returned by `training_step` is a mean over.
        ignore_index: label that bears no loss.
        backend_averages: W where gradients are averaged over ranks, 1 where they are summed.
        seed: random numbers are keyed by (seed, epoch, iteration, micro-batch).
        rank: of this process among all.
        device: of this rank.
        hooks_change_batches: the user has transfer hooks, which may write other labels: elements
            are counted again after them.
        own_losses: watches the losses of Hugging Face models.
        shortages: told of micro-batches that ran out of memory.
        limit: holds micro-batches to the memory limit.
    """

    def __init__(
        self,
        host: StepHost,
        *,
        runtime: BlockRuntime,
        topology: Topology,
        logs: IterationLogs,
        memory: MemoryMeter,
        find_metrics: Callable[[], list[Metric]],
        find_generators: Callable[[], Sequence[Any]],
        loss_average: LossAverage,
        ignore_index: int,
        backend_averages: int,
        seed: int,
        rank: int,
        device: torch.device,
        hooks_change_batches: bool = False,
        own_losses: OwnLosses | None = None,
        shortages: Shortages | None = None,
        limit: ByteLimit | None = None,
    ) -> None:
        self._host = host
        self._runtime = runtime
        self._topology = topology
        self._logs = logs
        self.memory = memory
        self._find_metrics = find_metrics
        self._metrics: list[Metric] = []
        self._find_generators = find_generators
        self._generators: Sequence[Any] = ()
        self._loss_average = loss_average
        self._targets = TargetCounter(loss_average, ignore_index, own_losses)
        self._backend_averages = backend_averages
        self._seed = seed
        self._rank = rank
        self._device = device
        self._hooks_change_batches = hooks_change_batches
        self._own_losses = own_losses
        self._shortages = shortages
        self._limit = limit
        self._open = ExitStack()
        self._queue: Iterator[Pending] = iter(())
        #: The one that is open, and its weighted loss.
        self._running: Pending | None = None
        self._loss: Tensor | None = None
        self._rest: tuple[Any, ...] = ()
        self._bears_loss = False
        self._drained = False
        self.state: IterationState | None = None
        #: The running micro-batch's batch before ranks took slices of it, and 1/p.
        self.whole_batch: Any = None
        self.whole_share = 1.0
        #: Whether a micro-batch is running: no collective over all ranks may start then.
        self.inside_micro_batch = False

    def start(self, plan: Plan, batch: IterationBatch) -> None:
        """Take up an iteration. A collective: all ranks learn N."""
        self.abort()
        mine = plan.for_rank(self._rank)
        if len(mine) != len(batch.micro_batches):
            raise RuntimeError(
                f"The loader delivered {len(batch.micro_batches)} micro-batches for iteration"
                f" {plan.iteration} of epoch {plan.epoch}, the plan has {len(mine)} for rank"
                f" {self._rank}."
            )
        started_s = time.perf_counter()
        pending = [
            Pending(
                index,
                micro_batch,
                data,
                self._targets.expected(micro_batch, data, is_final=not self._hooks_change_batches),
                segments,
            )
            for index, micro_batch, (data, segments) in zip(
                plan.indices_for_rank(self._rank),
                mine,
                map(unpacked, batch.micro_batches),
                strict=True,
            )
        ]
        local = sum((p.expected_targets or 0.0) / p.micro_batch.sp_size for p in pending)
        expected = self._host.sum_if_same_plan(local, plan)
        self._queue = iter(pending)
        self._drained = False
        self._metrics = self._find_metrics()
        self._generators = self._find_generators()
        self._logs.start_iteration(rank_weight=plan.num_samples / plan.world_size)
        self.memory.start_iteration()
        # Where labels say nothing, the step may say something: of the size of the tokens.
        expected = expected or float(sum(m.num_tokens for m in plan.micro_batches))
        self.state = IterationState(plan, reference_targets=expected, started_s=started_s)

    def first_forward(self, *rest: Any) -> Tensor:
        """Forward pass of this rank's first micro-batch.

        Args:
            rest: further arguments of `training_step`, such as `batch_idx`.

        Returns:
            () its weighted loss; a zero that depends on nothing where the rank has no micro-batch.
            Whatever else the step returned is left out: it would be of one micro-batch, and
            missing on ranks that have none.
        """
        if self._drained:
            raise RuntimeError(
                "The closure of the optimizer step was called a second time in one step, but each"
                " batch of a plan is run once and its gradients have been reduced. Call it once in"
                " `optimizer_step`, and use an optimizer that evaluates the loss once per step."
            )
        self._rest = rest
        self._next_forward()
        if self._loss is None:
            return torch.zeros((), device=self._device, requires_grad=True)
        # Whoever keeps what is returned shall not keep the graph, and the memory, with it.
        return self._loss.detach().requires_grad_()

    def drain(self) -> None:
        """Backward pass of the first micro-batch, then forward and backward of all others."""
        while self.inside_micro_batch:
            self._finish()
            self._next_forward()
        self._drained = True

    def repeat(self, plan: Plan, batch: IterationBatch) -> None:
        """Take up the iteration that ran last again, by another plan. A collective."""
        assert self.state is not None
        attempt, logged = self.state.attempt + 1, self._logs.of_hooks()
        self.start(plan, batch)
        self._logs.take_again(logged)
        self.state.attempt = attempt

    @property
    def step_arguments(self) -> tuple[Any, ...]:
        """Further arguments that `training_step` was called with."""
        return self._rest

    def abort(self) -> None:
        """Leave a micro-batch that raised: model and random states become as they are outside."""
        self._leave()
        self._queue = iter(())
        self._logs.discard()

    def _leave(self) -> None:
        self._open.close()
        self.inside_micro_batch = False
        self._running = self._loss = self.whole_batch = None

    def _next_forward(self) -> None:
        """Forward pass of the next micro-batch, which is open afterwards if there was one."""
        for pending in self._queue:
            if not self._is_needed(pending):
                continue
            try:
                self._forward(pending)
            except BaseException as error:
                if not self._gives_way(error, pending, "forward"):
                    raise
            else:
                return
            gc.collect()  # what the error has left in cycles: others may wait for the next one

    def _is_needed(self, pending: Pending) -> bool:
        """Whether it has to run, although the iteration may be lost."""
        lost = self._shortages is not None and self._shortages.found
        return not lost or pending.micro_batch.sp_size > 1

    def _gives_way(self, error: BaseException, pending: Pending, place: Place) -> bool:
        """Leave a micro-batch that raised; False where the error is to be raised.

        Where memory ran out it is noted, and training goes on with what others wait for.
        """
        if self._shortages is None or not self._shortages.concerns(error):
            self.abort()
            return False
        assert self.state is not None
        self._leave()
        used_bytes = self.memory.peak_bytes
        if self._limit is not None:
            used_bytes = max(used_bytes, self._limit.used_bytes)
        self._logs.take_again(self._logs.of_hooks())
        self.state.laps[-1].stop()
        group = self._topology.group(pending.micro_batch.first_rank, pending.micro_batch.sp_size)
        self._shortages.note(error, self.state, pending.index, group, place, used_bytes)
        self._host.abandon_pass()
        return True

    def _forward(self, pending: Pending) -> None:
        """Forward pass of a micro-batch, which is left open."""
        assert self.state is not None
        plan, micro_batch = self.state.plan, pending.micro_batch
        share = 1.0 / micro_batch.sp_size
        group = self._topology.group(micro_batch.first_rank, micro_batch.sp_size)
        self.state.index = pending.index
        self.state.laps.append(Lap(self._device))
        self._logs.start_micro_batch(share=share)
        self._open.enter_context(rng.including(self._generators))
        self._open.enter_context(
            self._runtime.micro_batch(
                group=group,
                recompute_blocks=micro_batch.recompute_blocks,
                rng_key=(self._seed, plan.epoch, plan.iteration, pending.index),
            )
        )
        if self._limit is not None:
            # CUDA's allocator knows.
            on_cuda = self._device.type == "cuda"
            missing = 0 if on_cuda else self._host.missing_gradient_bytes()
            self._open.enter_context(self._limit.held(missing))
        pack(pending.segments)
        self._open.enter_context(not_reduced_over_ranks(self._metrics))
        shares_inputs = self._runtime.shares_inputs(group)
        if group.rank_in_group and not shares_inputs:
            self._open.enter_context(counted_by_another_rank(self._metrics))
        self.inside_micro_batch = True
        # In here, so that what the user's transfer hooks draw is alike in the group.
        data = self._host.move_micro_batch(pending.data)
        if self._hooks_change_batches:
            expected = self._targets.expected(micro_batch, data)
            pending = replace(pending, expected_targets=expected)
        self.whole_batch, self.whole_share = data, share
        own = self._runtime.own_inputs(data)
        if shares_inputs:
            share = 1.0
            pending = replace(pending, expected_targets=own.num_targets)
            self._logs.start_slice(fraction=fraction_of(own, group.size))
            if own.num_targets == 0:  # a loss that is NaN must not reach them
                self._open.enter_context(counted_by_another_rank(self._metrics))
        shape = (
            micro_batch.batch_size,
            micro_batch.seq_len,
            group.size,
            micro_batch.recompute_blocks,
            # Models make a mask of a batch with padding, and none of one without.
            micro_batch.num_tokens < micro_batch.padded_tokens,
        )
        with self.memory.forward(shape, micro_batch.recompute_blocks, group.size):
            if self._own_losses is not None:
                self._own_losses.forget()
            output = self._host.forward_micro_batch(own.batch, *self._rest)
        self.whole_batch = None
        if self._own_losses is not None and self._loss_average != "samples":
            counted = self._own_losses.take()
            if counted is None and self._own_losses.watching and not shares_inputs:
                # What was expected may rest on another guess of whether labels are shifted.
                counted = self._targets.expected(micro_batch, data)
            if counted is not None and (not shares_inputs or own.num_targets is None):
                pending = replace(pending, expected_targets=counted)
        loss, num_targets = loss_and_targets(output, pending)
        self._logs.finish_forward(weight=num_targets)
        # The mean over nothing is NaN: it bears no loss and must not reach the gradients. All ranks
        # of the group see the same count, so all of them leave the backward pass out. Not so where
        # each has its own slice of the batch: the others wait for this one in their backward.
        self._bears_loss = num_targets > 0
        if shares_inputs:
            self.state.shared_losses.append(torch.zeros_like(loss.detach(), dtype=torch.float64))
            if not self._bears_loss:
                loss = self._runtime.zero_loss(loss)
                self._bears_loss = loss.requires_grad
        elif group.size > 1:
            self.state.shared_losses.append(loss.detach().double())
        if num_targets > 0:
            self.state.targets += num_targets * share
            self.state.loss_sum = self.state.loss_sum + loss.detach().double() * (
                num_targets * share
            )
        if num_targets > 0 or not shares_inputs:
            weight = num_targets * share / self.state.reference_targets
            # Not in float16, where a loss that is large, but finite, may overflow by the factor.
            loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
            loss = loss * (weight * self._backend_averages)
        self._running, self._loss = pending, loss

    def _finish(self) -> None:
        """Backward pass of the micro-batch that is open, and leave it."""
        pending = self._running
        assert self.state is not None and pending is not None and self._loss is not None
        try:
            if self._bears_loss:
                self._host.backward_micro_batch(self._loss)
        except BaseException as error:
            if not self._gives_way(error, pending, "backward"):
                raise
        else:
            self._leave()
            self._logs.finish_micro_batch()
            self.state.laps[-1].stop()
            return
        gc.collect()  # what the error has left in cycles: others may wait for the next one

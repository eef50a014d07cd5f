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

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_dcp.data.packing import unpacked
from lightning_dcp.parallel import rng
from lightning_dcp.parallel.inputs import NO_TARGETS, OwnInputs
from lightning_dcp.parallel.segments import pack
from lightning_dcp.parallel.targets import count_targets
from lightning_dcp.strategies.metric_objects import counted_by_another_rank, not_reduced_over_ranks

if TYPE_CHECKING:
    from lightning_dcp.data.batch import IterationBatch
    from lightning_dcp.parallel.huggingface_loss import OwnLosses
    from lightning_dcp.parallel.runtime import BlockRuntime
    from lightning_dcp.parallel.topology import Topology
    from lightning_dcp.planning.plan import MicroBatch, Plan
    from lightning_dcp.profiling.memory_meter import MemoryMeter
    from lightning_dcp.strategies.iteration_logs import IterationLogs

LossAverage = Literal["auto", "tokens", "samples"]


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

    def sum_over_ranks(self, value: float) -> float:
        """All-reduce one number."""
        ...


@dataclass
class IterationState:
    """What this rank has run of the current iteration."""

    plan: Plan
    #: N as plan and labels say, before the first backward pass; 1 where that is nothing.
    reference_targets: float
    started_s: float
    #: Sum over this rank's micro-batches of n/p.
    targets: float = 0.0
    #: Sum over this rank's micro-batches of loss * n/p; () float64.
    loss_sum: Tensor | float = 0.0
    laps: list[Lap] = field(default_factory=list)
    #: () float64 each: losses of the micro-batches that this rank shares with others.
    shared_losses: list[Tensor] = field(default_factory=list)

    def busy_s(self) -> float:
        """Seconds this rank spent on its micro-batches; waits for an accelerator."""
        return sum(lap.seconds() for lap in self.laps)


class Lap:
    """One stretch of time on a device, measured without waiting for it before it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._start = self._mark()
        self._stop: Any = None

    def stop(self) -> None:
        """End the stretch."""
        self._stop = self._mark()

    def seconds(self) -> float:
        """Its length."""
        if self._cuda:
            self._stop.synchronize()
            return float(self._start.elapsed_time(self._stop)) / 1e3
        return float(self._stop - self._start)

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass(frozen=True)
class _Pending:
    """A micro-batch of this rank that has not run yet."""

    index: int
    micro_batch: MicroBatch
    data: Any
    #: None where neither plan nor labels say.
    expected_targets: float | None
    #: Lengths of the samples, where they are packed.
    segments: tuple[int, ...] | None = None


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
        self._ignore_index = ignore_index
        self._backend_averages = backend_averages
        self._seed = seed
        self._rank = rank
        self._device = device
        self._hooks_change_batches = hooks_change_batches
        self._own_losses = own_losses
        self._open = ExitStack()
        self._queue: Iterator[_Pending] = iter(())
        self._rest: tuple[Any, ...] = ()
        self._bears_loss = False
        self._drained = False
        self._told_of_tokens = False
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
            _Pending(
                index,
                micro_batch,
                data,
                self._expected_targets(micro_batch, data, is_final=not self._hooks_change_batches),
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
        expected = self._host.sum_over_ranks(local)
        self._queue = iter(pending)
        self._drained = False
        self._metrics = self._find_metrics()
        self._generators = self._find_generators()
        self._logs.start_iteration(rank_weight=plan.num_samples / plan.world_size)
        self.memory.start_iteration()
        self.state = IterationState(plan, reference_targets=expected or 1.0, started_s=started_s)

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
        loss = self._next_forward()
        return torch.zeros((), device=self._device, requires_grad=True) if loss is None else loss

    def drain(self, first_loss: Tensor) -> None:
        """Backward pass of the first micro-batch, then forward and backward of all others."""
        loss: Tensor | None = first_loss if self.inside_micro_batch else None
        while loss is not None:
            self._finish(loss)
            loss = self._next_forward()
        self._drained = True

    def abort(self) -> None:
        """Leave a micro-batch that raised: model and random states become as they are outside."""
        self._open.close()
        self.inside_micro_batch = False
        self._queue = iter(())
        self._logs.discard()

    def _expected_targets(
        self, micro_batch: MicroBatch, data: Any, *, is_final: bool = True
    ) -> float:
        """Loss-bearing elements as labels and plan say.

        Args:
            micro_batch: the plan's.
            data: as collated, or as moved.
            is_final: whether `data` is what `training_step` gets.
        """
        if self._loss_average == "samples":
            return float(micro_batch.batch_size)
        shifted = self._own_losses is not None and self._own_losses.shifts_in(data)
        counted = count_targets(data, ignore_index=self._ignore_index, shifted=shifted)
        if counted is not None:
            return float(counted)
        if is_final and self._loss_average == "auto" and not self._told_of_tokens:
            self._told_of_tokens = True
            rank_zero_warn(
                f"DCP: no labels were found in the batch (a {type(data).__name__}), so losses are"
                " weighted as means over tokens. If yours is a mean over samples, set"
                " loss_average='samples'; if over tokens, loss_average='tokens'; if over anything"
                " else, return {'loss': loss, 'num_targets': n} from `training_step`."
            )
        return float(micro_batch.num_tokens)

    def _next_forward(self) -> Tensor | None:
        """Forward pass of the next micro-batch; its weighted loss, or None if none is left."""
        pending = next(self._queue, None)
        if pending is None:
            return None
        assert self.state is not None
        plan, micro_batch = self.state.plan, pending.micro_batch
        share = 1.0 / micro_batch.sp_size
        group = self._topology.group(micro_batch.first_rank, micro_batch.sp_size)
        try:
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
            pack(pending.segments)
            self._open.enter_context(not_reduced_over_ranks(self._metrics))
            shares_inputs = self._runtime.shares_inputs(group)
            if group.rank_in_group and not shares_inputs:
                self._open.enter_context(counted_by_another_rank(self._metrics))
            self.inside_micro_batch = True
            # In here, so that what the user's transfer hooks draw is alike in the group.
            data = self._host.move_micro_batch(pending.data)
            if self._hooks_change_batches:
                expected = self._expected_targets(micro_batch, data)
                pending = replace(pending, expected_targets=expected)
            self.whole_batch, self.whole_share = data, share
            own = self._runtime.own_inputs(data)
            if shares_inputs:
                share = 1.0
                pending = replace(pending, expected_targets=own.num_targets)
                self._logs.start_slice(fraction=_fraction(own, group.size))
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
            with self.memory.forward(shape, micro_batch.recompute_blocks):
                if self._own_losses is not None:
                    self._own_losses.forget()
                output = self._host.forward_micro_batch(own.batch, *self._rest)
            self.whole_batch = None
            if self._own_losses is not None and self._loss_average != "samples":
                counted = self._own_losses.take()
                if counted is None and self._own_losses.watching and not shares_inputs:
                    # What was expected may rest on another guess of whether labels are shifted.
                    counted = self._expected_targets(micro_batch, data)
                if counted is not None and (not shares_inputs or own.num_targets is None):
                    pending = replace(pending, expected_targets=counted)
            loss, num_targets = _loss_and_targets(output, pending)
            self._logs.finish_forward(weight=num_targets)
        except BaseException:
            self.abort()
            raise
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
        if num_targets == 0 and shares_inputs:
            return loss
        weight = num_targets * share / self.state.reference_targets
        return loss * (weight * self._backend_averages)

    def _finish(self, loss: Tensor) -> None:
        """Backward pass of the micro-batch that is open, and leave it."""
        assert self.state is not None
        try:
            if self._bears_loss:
                self._host.backward_micro_batch(loss)
        except BaseException:
            self.abort()
            raise
        self._open.close()
        self.inside_micro_batch = False
        self._logs.finish_micro_batch()
        self.state.laps[-1].stop()


def _fraction(own: OwnInputs, sp_size: int) -> float:
    """What part of the whole a rank's slice is, by elements that bear loss where they are known."""
    if own.num_targets is None or not own.whole_targets:
        return 1.0 / sp_size
    return own.num_targets / own.whole_targets


def _loss_and_targets(output: Any, pending: _Pending) -> tuple[Tensor, float]:
    """The loss and the loss-bearing elements out of what `training_step` returned."""
    expected, micro_batch = pending.expected_targets, pending.micro_batch
    if isinstance(output, Mapping):
        loss, num_targets = output.get("loss"), output.get("num_targets", expected)
    else:
        loss, num_targets = output, expected
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise TypeError(
            "`training_step` must return the mean loss of its batch, a tensor with one element, or"
            f" a dict with it under 'loss'; got {given} for a micro-batch of"
            f" {micro_batch.batch_size} samples. To leave a batch out, return its loss with"
            " 'num_targets': 0 in the dict."
        )
    if num_targets is None:
        raise ValueError(NO_TARGETS)
    num_targets = float(num_targets)
    if not num_targets >= 0:
        raise ValueError(
            f"`training_step` returned num_targets={num_targets}; it must be a count, 0 or more."
        )
    return loss.reshape(()), num_targets

"""Validation, testing and prediction by plan, for the duration of one run of the Trainer.

One Trainer batch is one ordinary batch on each rank, as under DDP; hooks, callbacks and steps see
nothing else. What differs: the batch may be shared with the other ranks of an SP group, or be a
repeat of another rank's, run so that all ranks run the same number of batches. Each sample counts
on one rank: there alone do logged values, metric objects and predictions stay.

NOTE [Sharded until the step ends]
    Blocks are sharded, and random numbers alike in the group, from the batch's transfer to the end
    of the user's step. `on_*_batch_end` hooks run as usual: a callback that calls the model there
    on rank 0 only, to draw a picture, would otherwise wait for the rest of the group.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, overload

from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from typing_extensions import override

from lightning_dcp.data.evaluation_loader import EvaluationSampler
from lightning_dcp.parallel.blocks import find_stacks
from lightning_dcp.parallel.runtime import BlockRuntime
from lightning_dcp.parallel.targets import count_targets
from lightning_dcp.planning.evaluation import EvaluationPlanner, Share
from lightning_dcp.strategies._lightning_compat import evaluation as compat
from lightning_dcp.strategies._lightning_compat.training import has_transfer_hooks
from lightning_dcp.strategies.agreement import gather_objects, gather_rows
from lightning_dcp.strategies.evaluation.logs import EvaluationLogs
from lightning_dcp.strategies.evaluation.measuring import EvaluatingStrategy
from lightning_dcp.strategies.evaluation.preparation import EvaluationPreparer
from lightning_dcp.strategies.gradients import num_bytes
from lightning_dcp.strategies.metric_objects import counted_by_another_rank, metrics_of

if TYPE_CHECKING:
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    from lightning_dcp.parallel.topology import Topology
    from lightning_dcp.strategies.settings import DCPSettings


def evaluation_runtime(
    pl_module: L.LightningModule, settings: DCPSettings, topology: Topology, device: torch.device
) -> BlockRuntime | None:
    """For a run without training: the runtime of the model's blocks, attached; None without any."""
    try:
        stacks = find_stacks(pl_module, settings.blocks)
    except ValueError:
        return None
    runtime = BlockRuntime(stacks, topology, sequence_dims=settings.sequence_dims, device=device)
    runtime.attach()
    return runtime


def fixed_evaluation_bytes(pl_module: L.LightningModule, allocated_bytes: int | None) -> int:
    """For a run without training: what stays on a rank, the most of all; a collective."""
    stored = num_bytes([*pl_module.parameters(), *pl_module.buffers()])
    return max(gather_objects(max(stored, allocated_bytes or 0)))


class Evaluation:
    """Evaluates by plan from when it is made until `remove`.

    Args:
        strategy: whose ranks evaluate.
        trainer: inside `fit`, `validate`, `test` or `predict`.
        pl_module: the model, on its device.
        runtime: shards the model's blocks; None where it has none.
        topology: owner of the SP groups.
        fixed_bytes: what stays on each rank.
    """

    def __init__(
        self,
        strategy: EvaluatingStrategy,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        runtime: BlockRuntime | None,
        topology: Topology,
        fixed_bytes: int,
    ) -> None:
        self._strategy = strategy
        self._pl_module = pl_module
        self._runtime = runtime
        self._topology = topology
        self._preparer = EvaluationPreparer(
            strategy, trainer, pl_module, runtime, topology, fixed_bytes
        )
        self._predicts = compat.is_prediction(trainer)
        self._hooks_change_batches = has_transfer_hooks(trainer, pl_module)
        self._mode: str | None = None
        self._num_loaders = 1
        #: Per loader in the order in which Lightning asks for them; None: not planned.
        self._samplers: list[EvaluationSampler | None] = []
        #: Per loader the first samples of the batches that this rank predicts and counts.
        self._predicted: dict[int, list[int]] = {}
        self._until_step_ends = ExitStack()
        self._share: Share | None = None
        #: Called with whether the batch is planned.
        self.before_batch: Callable[[bool], None] = lambda planned: None
        #: Samples of all ranks in the running batch, each once, over this rank's own.
        self.whole_over_own: float = topology.world_size
        self._patches = compat.EvaluationPatches(
            trainer,
            requested=self._requested,
            prepare=self._prepare,
            around_batch=self._batch,
            before_batch_end=self._before_batch_end,
            collector=self._collect,
            batch_indices=self._batch_indices,
            merge_predictions=self._merge_predictions,
        )
        self._logs = EvaluationLogs(
            file_value=self._patches.file_value,
            exchange=gather_rows,
            gather_objects=gather_objects,
            device=strategy.root_device,
        )

    @property
    def counts(self) -> bool:
        """Whether what this rank evaluates now counts; True outside of planned batches."""
        return self._share is None or self._share.counts

    def moved(self, batch: Any) -> None:
        """Count elements again, as the user's transfer hooks left the batch."""
        if self._share is not None and self._hooks_change_batches:
            self._logs.set_weight(self._weight(self._share, batch))

    def step_done(self) -> None:
        """The user's step has returned; see NOTE [Sharded until the step ends]."""
        self._until_step_ends.close()

    def remove(self) -> None:
        """Leave the Trainer as it was. Safe to call twice."""
        self._until_step_ends.close()
        self._patches.remove()

    # ---- loaders ---------------------------------------------------------------------------------

    def _requested(self, loaders: object) -> None:
        """Lightning has asked the user for loaders and will now prepare one after the other."""
        self._mode = compat.combined_otherwise(loaders)
        combined = (
            loaders
            if isinstance(loaders, CombinedLoader)
            else CombinedLoader(loaders, "sequential")
        )
        self._num_loaders = len(combined.flattened)
        self._samplers = []

    def _prepare(self, dataloader: DataLoader[Any]) -> DataLoader[Any] | None:
        index = len(self._samplers)
        loader = self._preparer.prepare(dataloader, index, self._num_loaders, self._mode)
        if loader is None:
            self._samplers.append(None)
            return None
        assert isinstance(loader.sampler, EvaluationSampler)
        self._samplers.append(loader.sampler)
        self._predicted[index] = []
        return loader

    def _batch_indices(self, dataloader: object) -> Sequence[Sequence[int]] | None:
        sampler = getattr(dataloader, "sampler", None)
        if not isinstance(sampler, EvaluationSampler):
            return None
        return _BatchIndices(sampler.planner, self._topology.rank)

    # ---- one Trainer batch -----------------------------------------------------------------------

    @contextmanager
    def _batch(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Iterator[None]:
        """Around transfer, hooks and step of one Trainer batch."""
        sampler = self._samplers[dataloader_idx] if self._samplers else None
        self.before_batch(sampler is not None)
        if sampler is None:
            yield
            return
        everyone = sampler.planner.batch(batch_idx)
        share = everyone.for_rank(self._topology.rank)
        if batch_idx == 0:
            self._predicted[dataloader_idx] = []
        with ExitStack() as stack:
            stack.callback(self._leave_batch)
            self._share = share
            self.whole_over_own = everyone.plan.num_samples / share.micro_batch.batch_size
            self._logs.start(weight=self._weight(share, batch), counts=share.counts)
            if not share.counts:
                stack.enter_context(counted_by_another_rank(metrics_of(self._pl_module)))
                if self._predicts:
                    stack.enter_context(self._patches.prediction_not_kept(dataloader_idx))
            elif self._predicts:
                self._predicted[dataloader_idx].append(share.micro_batch.sample_ids[0])
            micro_batch = share.micro_batch
            if micro_batch.sp_size > 1:
                assert self._runtime is not None
                self._until_step_ends.enter_context(
                    self._runtime.micro_batch(
                        group=self._topology.group(micro_batch.first_rank, micro_batch.sp_size),
                        rng_key=sampler.rng_key(batch_idx, share.index),
                    )
                )
            # Left before what the callback above does, and on an error with that error in hand.
            stack.push(self._until_step_ends.__exit__)
            yield

    def _leave_batch(self) -> None:
        self._share = None
        self.whole_over_own = self._topology.world_size
        self._logs.discard()

    def _before_batch_end(self) -> None:
        self._logs.reduce_and_file()

    def _collect(self, *args: Any) -> bool:
        return self._logs.take(*args)

    def _weight(self, share: Share, batch: Any) -> float:
        """Loss-bearing elements of this rank's batch, or its samples where it has no labels."""
        settings = self._strategy.settings
        micro_batch = share.micro_batch
        if settings.loss_average != "samples":
            counted = count_targets(
                batch,
                ignore_index=settings.ignore_index,
                shifted=self._strategy.shifts_labels(batch),
            )
            if counted is not None:
                return float(counted)
            if settings.loss_average == "tokens":
                return float(micro_batch.num_tokens)
        return float(micro_batch.batch_size)

    # ---- predictions -----------------------------------------------------------------------------

    def _merge_predictions(self, dataloader_idx: int, predictions: list[Any]) -> list[Any]:
        """All ranks' predictions in the order of the data set; a collective."""
        if not self._samplers or self._samplers[dataloader_idx] is None:
            return predictions
        own = list(zip(self._predicted[dataloader_idx], predictions, strict=True))
        if self._topology.world_size == 1:
            return predictions
        packed, error = b"", None
        try:
            packed = pickle.dumps(own)
        except Exception as raised:  # noqa: BLE001 - whatever a class of the user's raises
            error = f"{type(raised).__name__}: {raised}"
        gathered = gather_objects((packed, error))
        errors = [text for _, text in gathered if text is not None]
        if errors:
            rank_zero_warn(
                "DCP: each rank returns its own predictions only, as under 'ddp': they cannot be"
                f" sent to the other ranks ({errors[0]})."
            )
            return predictions
        everyone = [entry for theirs, _ in gathered for entry in pickle.loads(theirs)]
        return [prediction for _, prediction in sorted(everyone, key=lambda entry: entry[0])]


class _BatchIndices(Sequence[Sequence[int]]):
    """The data set indices of each Trainer batch of one rank."""

    def __init__(self, planner: EvaluationPlanner, rank: int) -> None:
        self._planner = planner
        self._rank = rank

    @override
    def __len__(self) -> int:
        return self._planner.num_batches

    @overload
    def __getitem__(self, index: int) -> list[int]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...

    @override
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return list(self._planner.batch(index).for_rank(self._rank).micro_batch.sample_ids)

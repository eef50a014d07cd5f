"""The user's loader for validation, testing or prediction, made again to follow a plan.

Unlike in training it yields ordinary batches, as the user's collate function makes them: one per
Trainer batch and rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from typing_extensions import override

from lightning_dcp.data.batch import IterationSamples, PlanKey
from lightning_dcp.data.loader import (
    Collate,
    PlanDataset,
    Truncate,
    drawing_alike,
    remake_loader,
    samples_to_cut,
)
from lightning_dcp.planning.evaluation import EvaluationPlanner


def why_not_planned(dataloader: Any, world_size: int) -> str | None:
    """Why a loader is left as it is, in a few words; None where its batches can be planned.

    Args:
        dataloader: What the user's hook returned.
        world_size: Number of ranks.
    """
    if not isinstance(dataloader, DataLoader):
        return f"it is a {type(dataloader).__name__}, no torch.utils.data.DataLoader"
    if isinstance(dataloader.dataset, IterableDataset):
        return f"its data set, {type(dataloader.dataset).__name__}, is iterable-style"
    batch_sampler = dataloader.batch_sampler
    if batch_sampler is None:
        return "it has batch_size=None"
    if type(batch_sampler) is not BatchSampler:
        return f"it has its own batch sampler, {type(batch_sampler).__name__}"
    try:
        num_samples = len(dataloader.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return f"its data set, {type(dataloader.dataset).__name__}, has no length"
    if num_samples == 0:
        return "its data set is empty"
    own_way = [
        m
        for m in ("__iter__", "__len__", "_get_iterator")
        if getattr(type(dataloader), m) is not getattr(DataLoader, m)
    ]
    if own_way:
        return f"{type(dataloader).__name__} overrides `{own_way[0]}`"
    # Where a batch sampler was given, `dataloader.sampler` is a default.
    return _why_sampler_is_kept(batch_sampler.sampler, num_samples, world_size)


def _why_sampler_is_kept(sampler: Any, num_samples: int, world_size: int) -> str | None:
    kind = type(sampler)  # not isinstance: a subclass may choose samples in its own way
    if kind is SequentialSampler and len(sampler) == num_samples:
        return None
    if kind is RandomSampler and not sampler.replacement and sampler.num_samples == num_samples:
        return "it is shuffled, and one process keeps its order" if world_size == 1 else None
    if (
        kind is DistributedSampler
        and len(sampler.dataset) == num_samples
        and not sampler.shuffle
        and not sampler.drop_last
        and sampler.num_replicas == world_size
    ):
        return None
    return f"it has its own sampler, {kind.__name__}"


def original_loader(dataloader: Any) -> Any:
    """The user's loader, where a planned one comes back: Lightning keeps it in a CombinedLoader."""
    sampler = getattr(dataloader, "sampler", None)
    return sampler.original if isinstance(sampler, EvaluationSampler) else dataloader


class EvaluationSampler(DistributedSampler[Any]):
    """Yields, per Trainer batch, the samples of this rank's micro-batch.

    A `DistributedSampler` is the one kind that Lightning neither shards again nor replaces.

    Args:
        planner: Of the loader.
        original: The user's loader, which this one takes the place of.
        rank: Global rank whose samples are yielded.
        seed: Keys random numbers together with `stage` and the place in the plan.
        stage: Numbers that tell loaders apart.
    """

    def __init__(
        self,
        planner: EvaluationPlanner,
        original: DataLoader[Any],
        *,
        rank: int,
        seed: int,
        stage: tuple[int, ...],
    ) -> None:
        everything: Any = range(planner.num_batches * planner.world_size)
        super().__init__(everything, num_replicas=planner.world_size, rank=rank, shuffle=False)
        self.planner = planner
        self.original = original
        self.seed = seed
        self._stage = stage

    @override
    def __len__(self) -> int:
        """Trainer batches, the same for all ranks."""
        return self.planner.num_batches

    def rng_key(self, batch_idx: int, index: int) -> tuple[int, ...]:
        """What random numbers are keyed by in a micro-batch that several ranks run together."""
        return (self.seed, *self._stage, batch_idx, index)

    @override
    def __iter__(self) -> Iterator[PlanKey]:
        for batch_idx in range(len(self)):
            share = self.planner.batch(batch_idx).for_rank(self.rank)
            # On a rank of its own a micro-batch draws as it would under DDP.
            together = share.micro_batch.sp_size > 1
            keys = (self.rng_key(batch_idx, share.index),) if together else ()
            yield PlanKey(0, batch_idx, (share.micro_batch.sample_ids,), keys)


@dataclass(frozen=True)
class SingleCollate:
    """Applies the user's collate function to the one micro-batch of a rank, in the worker.

    Attributes:
        collate: The user's.
    """

    collate: Collate

    def __call__(self, samples: IterationSamples) -> Any:
        """The batch that the user's hooks and step see."""
        with drawing_alike(samples.rng_keys, 0, 1):
            return self.collate(samples.samples[0])


def build_evaluation_loader(
    dataloader: DataLoader[Any],
    planner: EvaluationPlanner,
    *,
    rank: int,
    seed: int,
    stage: tuple[int, ...],
    truncate: Truncate | None = None,
) -> DataLoader[Any]:
    """The user's loader, made again to yield this rank's batch of each Trainer batch.

    Args:
        dataloader: One for which `why_not_planned` knows no reason.
        planner: Of this loader.
        rank: Global rank.
        seed: See `EvaluationSampler`.
        stage: See `EvaluationSampler`.
        truncate: `DCPDataModuleMixin.truncate_sample`, for samples that are too long.

    Raises:
        TypeError: A subclass of `DataLoader` that cannot be made again.
    """
    cut = samples_to_cut(planner, planner.truncate_to)
    if planner.truncate_to is None:
        truncate = None  # a method of the user's module, which need not go to workers
    dataset = PlanDataset(dataloader.dataset, truncate, planner.truncate_to, cut)
    sampler = EvaluationSampler(planner, dataloader, rank=rank, seed=seed, stage=stage)
    return remake_loader(dataloader, dataset, sampler, SingleCollate(dataloader.collate_fn))

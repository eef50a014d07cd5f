"""The user's ordinary train loader, made again so that it yields whole iterations of one rank.

::

    PlanSampler ── PlanKey ──> PlanDataset ── IterationSamples ──> PlanCollate ── IterationBatch ──>
    main process               worker process                      worker process      (pinning)

Everything that is not about which samples make a batch stays the user's: data set, collate
function, workers and their start, pinning, prefetching, generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from typing_extensions import override

from lightning_dcp.data._lightning_compat import remake_subclass
from lightning_dcp.data.attributes import AttributesOfDataset
from lightning_dcp.data.batch import IterationBatch, IterationSamples, PlanKey
from lightning_dcp.data.packing import PackingCollate
from lightning_dcp.data.sampler import Planner, PlanSampler
from lightning_dcp.data.samples import fetch_samples, truncate_sample
from lightning_dcp.data.workers import obey_own_rank_only
from lightning_dcp.parallel import rng
from lightning_dcp.profiling.preserve import preserve

Collate = Callable[[list[Any]], Any]
Truncate = Callable[[Any, int], Any]

_DCP_DECIDES = (
    "DCP itself decides which samples make a micro-batch, and takes each sample of the data set "
    "exactly once per epoch"
)


@dataclass(frozen=True, kw_only=True)
class LoaderSpec:
    """What the planner needs to know of the user's loader.

    Attributes:
        dataset: The map-style data set.
        collate_fn: Makes a batch of a list of samples.
        batch_size: Samples per rank and step that the user asked for; sets the step size.
        shuffle: Whether the order of the samples is random.
        drop_last: What the user asked for. Without effect: DCP never drops a sample.
        sampler_seed: Seed of the `DistributedSampler` that the loader has; None where it has none.
    """

    dataset: Any
    collate_fn: Collate
    batch_size: int
    shuffle: bool
    drop_last: bool
    sampler_seed: int | None = None


def read_loader(dataloader: Any) -> LoaderSpec:
    """Read off what the user asked for, and refuse what DCP could not honour.

    Args:
        dataloader: What `train_dataloader` returned or `fit` was given, as it is or with the
            `DistributedSampler` that Lightning puts in.

    Raises:
        TypeError: No `DataLoader`, an iterable-style data set, or a sampler or batch sampler
            of the user's own.
        ValueError: `batch_size=None`, or a sampler with replacement or for a part of the data.
    """
    if not isinstance(dataloader, DataLoader):
        several = isinstance(dataloader, list | tuple | Mapping) or hasattr(dataloader, "flattened")
        raise TypeError(
            "DCP needs one `torch.utils.data.DataLoader` for training, got "
            + ("several of them. " if several else f"a {type(dataloader).__name__}. ")
            + "Join data sets with `torch.utils.data.ConcatDataset`."
        )
    if isinstance(dataloader.dataset, IterableDataset):
        raise TypeError(
            f"{type(dataloader.dataset).__name__} is an IterableDataset. DCP plans which samples "
            "run together, so that it needs a map-style data set: `dataset[i]` and `len(dataset)`."
        )
    if isinstance(dataloader.sampler, PlanSampler):
        raise TypeError("This loader already follows a plan. Pass the user's own loader.")
    batch_sampler = dataloader.batch_sampler
    if batch_sampler is None:
        raise ValueError(
            "The train loader has `batch_size=None`. DCP puts samples together itself and calls "
            "`collate_fn` with lists of samples: let the data set return single samples and set "
            "`batch_size` to what a step of one rank should hold on average."
        )
    if type(batch_sampler) is not BatchSampler:
        raise TypeError(
            f"The train loader has its own batch sampler, {type(batch_sampler).__name__}. "
            f"{_DCP_DECIDES}, so that it cannot be kept. Use `DataLoader(dataset, batch_size=..., "
            "shuffle=...)` instead."
        )
    # The sampler of the batch sampler: where that was given, `dataloader.sampler` is a default.
    return LoaderSpec(
        dataset=dataloader.dataset,
        collate_fn=dataloader.collate_fn,
        batch_size=batch_sampler.batch_size,
        shuffle=_is_shuffled(batch_sampler.sampler, len(dataloader.dataset)),  # type: ignore[arg-type]
        drop_last=batch_sampler.drop_last,
        sampler_seed=getattr(batch_sampler.sampler, "seed", None),
    )


def _is_shuffled(sampler: Any, num_samples: int) -> bool:
    kind = type(sampler)  # not isinstance: a subclass may choose samples in its own way
    if kind is SequentialSampler and len(sampler) == num_samples:
        return False
    if kind is DistributedSampler and len(sampler.dataset) == num_samples:
        return bool(sampler.shuffle)
    if kind is RandomSampler:
        if sampler.replacement or sampler.num_samples != num_samples:
            raise ValueError(
                f"The train loader's RandomSampler draws {sampler.num_samples} of {num_samples} "
                f"samples {'with' if sampler.replacement else 'without'} replacement. "
                f"{_DCP_DECIDES}. Use `shuffle=True`; pass a `torch.utils.data.Subset` to train on "
                "a part, or `Trainer(limit_train_batches=...)` for a shorter epoch."
            )
        return True
    # Lightning wraps a user's sampler in one of its own; name the user's.
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
    raise TypeError(
        f"The train loader has its own sampler, {type(inner).__name__}. {_DCP_DECIDES}, so that "
        "what the sampler chooses (an order, weights, a part of the data) would be lost. Use "
        "`shuffle=True` or `shuffle=False` instead; pass a `torch.utils.data.Subset` to train on a "
        "part, or repeat samples in the data set to give them more weight."
    )


class PlanDataset(AttributesOfDataset, Dataset[IterationSamples]):
    """The user's data set, asked for one iteration at a time.

    Args:
        dataset: The user's map-style data set.
        truncate: Cuts a sample to a number of tokens.
        max_length: What it cuts to; None cuts nothing.
        to_cut: Ids of the samples that it is applied to: those planned with `max_length` tokens.
    """

    _OWN = frozenset({"_dataset", "_truncate", "_max_length", "_to_cut"})

    def __init__(
        self,
        dataset: Any,
        truncate: Truncate | None = None,
        max_length: int | None = None,
        to_cut: frozenset[int] = frozenset(),
    ) -> None:
        self._dataset = dataset
        self._truncate = truncate
        self._max_length = max_length
        self._to_cut = to_cut

    def __len__(self) -> int:
        return len(self._dataset)

    @override
    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, PlanKey):  # code of the user's, which looks at `loader.dataset`
            return self._dataset[key]
        obey_own_rank_only()
        samples = []
        for index, ids in enumerate(key.sample_ids):
            with drawing_alike(key.rng_keys, index, 0):
                read = zip(ids, self._read(ids), strict=True)
                samples.append([self._cut(i, sample) for i, sample in read])
        return IterationSamples(key.epoch, key.iteration, samples, key.rng_keys, key.version)

    def check_cut(self) -> None:
        """Cut one of the samples that have to be, for nothing but the error where that fails.

        In training it would be raised when a worker of one rank comes to such a sample.
        """
        if self._to_cut:
            first = min(self._to_cut)
            with preserve(torch.nn.Module()):  # reading may draw random numbers
                self._cut(first, self._read((first,))[0])

    def _read(self, sample_ids: tuple[int, ...]) -> list[Any]:
        return fetch_samples(self._dataset, sample_ids)

    def _cut(self, sample_id: int, sample: Any) -> Any:
        limit = self._max_length
        if limit is None or sample_id not in self._to_cut:
            return sample
        cut = NotImplemented if self._truncate is None else self._truncate(sample, limit)
        return truncate_sample(sample, limit) if cut is NotImplemented else cut


@contextmanager
def drawing_alike(rng_keys: tuple[tuple[int, ...], ...], index: int, stage: int) -> Iterator[None]:
    """Seed torch, `random` and numpy for one micro-batch, and put them back.

    The ranks of an SP group load the same micro-batch, each in a worker of its own: augmentation
    and masking must come out the same, or they would compute on different inputs.
    """
    if not rng_keys:
        yield
        return
    cpu = torch.device("cpu")
    with rng.preserved(cpu):
        rng.seed(cpu, (*rng_keys[index], stage))
        yield


@dataclass(frozen=True)
class PlanCollate:
    """Applies a collate function to each micro-batch, in the worker.

    Attributes:
        collate: The user's, or one that packs samples.
    """

    collate: Collate

    def __call__(self, samples: IterationSamples) -> IterationBatch:
        """Collate one iteration."""
        micro_batches = []
        for index, micro_batch in enumerate(samples.samples):
            with drawing_alike(samples.rng_keys, index, 1):
                micro_batches.append(self.collate(micro_batch))
        return IterationBatch(samples.epoch, samples.iteration, micro_batches, samples.version)


def build_plan_loader(
    dataloader: DataLoader[Any],
    planner: Planner,
    *,
    rank: int,
    world_size: int,
    truncate: Truncate | None = None,
    epoch: int = 0,
    packing: PackingCollate | None = None,
) -> DataLoader[Any]:
    """The user's loader, made again to yield one `IterationBatch` per iteration.

    Args:
        dataloader: The user's loader; `read_loader` says what is accepted.
        planner: Gives the plans; with `truncate_to` and `lengths` if samples are to be cut.
        rank: Global rank whose micro-batches are loaded.
        world_size: Number of ranks.
        truncate: `DCPDataModuleMixin.truncate_sample`, for samples that are too long.
        epoch: The epoch that the first iterator belongs to; see `PlanSampler`.
        packing: Packs samples, in place of the user's collate function.

    Returns:
        A loader of the same class, data set, collate function, workers, pinning, prefetching and
        generator. Its length is the planner's number of iterations. `drop_last` is off, since
        nothing is dropped, and `in_order` on, since ranks have to run iterations in the same order.

    Raises:
        TypeError, ValueError: From `read_loader`, or a `DataLoader` subclass that iterates in its
            own way or cannot be made again.
    """
    spec = read_loader(dataloader)
    if spec.drop_last:
        rank_zero_info(
            "DCP: `drop_last=True` has no effect. An epoch takes each sample exactly once; its "
            "last micro-batches are smaller."
        )
    if not getattr(dataloader, "in_order", True):
        rank_zero_warn(
            "DCP: `in_order=False` of the train loader has no effect. All ranks have to run the "
            "iterations of a plan in the same order."
        )
    max_length: int | None = getattr(planner, "truncate_to", None)
    to_cut = samples_to_cut(planner, max_length)
    if max_length is None:
        truncate = None  # a method of the user's module, which need not go to workers
    dataset = PlanDataset(spec.dataset, truncate, max_length, to_cut)
    dataset.check_cut()
    sampler = PlanSampler(planner, rank=rank, world_size=world_size, epoch=epoch)
    loader = remake_loader(dataloader, dataset, sampler, PlanCollate(packing or spec.collate_fn))
    # Methods of a loader that can resume, as Lightning looks for them, else it warns. They do
    # nothing: the strategy itself saves where the plans are, and goes on there.
    loader.state_dict = _no_state
    loader.load_state_dict = _ignore_state
    return loader


def _no_state() -> dict[str, Any]:
    return {}


def _ignore_state(state_dict: dict[str, Any]) -> None:
    """What another loader has saved says nothing of plans."""


def remake_loader(
    dataloader: DataLoader[Any],
    dataset: PlanDataset,
    sampler: Sampler[PlanKey],
    collate: Callable[[IterationSamples], Any],
) -> DataLoader[Any]:
    """The user's loader with another data set, sampler and collate function; all else is kept.

    Raises:
        TypeError: A `DataLoader` subclass that iterates in its own way or cannot be made again.
    """
    if type(dataloader) is not DataLoader:
        return _subclass_loader(dataloader, dataset, sampler, collate)
    more = {}
    if dataloader.num_workers > 0:
        more["prefetch_factor"] = dataloader.prefetch_factor
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        collate_fn=collate,  # type: ignore[arg-type]  # torch says list; it is what the dataset gave
        num_workers=dataloader.num_workers,
        pin_memory=dataloader.pin_memory,
        timeout=dataloader.timeout,
        worker_init_fn=dataloader.worker_init_fn,
        multiprocessing_context=dataloader.multiprocessing_context,
        generator=dataloader.generator,
        persistent_workers=dataloader.persistent_workers,
        pin_memory_device=dataloader.pin_memory_device,
        **more,  # type: ignore[arg-type]
    )


def samples_to_cut(planner: Any, max_length: int | None) -> frozenset[int]:
    """Samples planned with just the length that is cut to: cut ones, and any as long by nature."""
    if max_length is None:
        return frozenset()
    return frozenset(np.flatnonzero(planner.lengths == max_length).tolist())


def _subclass_loader(
    dataloader: DataLoader[Any],
    dataset: PlanDataset,
    sampler: Sampler[PlanKey],
    collate: Callable[[IterationSamples], Any],
) -> DataLoader[Any]:
    name = type(dataloader).__name__
    way_out = f"Return a plain `torch.utils.data.DataLoader` instead of {name}."
    own_way = [m for m in ("__iter__", "__len__", "_get_iterator") if _overrides(dataloader, m)]
    if own_way:
        raise TypeError(
            f"{name} overrides `{own_way[0]}`, which would be met with all micro-batches of an "
            f"iteration at once instead of one batch. {way_out}"
        )
    try:
        result = remake_subclass(dataloader, dataset=dataset, sampler=sampler)
        # Settable after construction, unlike the others: so a subclass that builds its own works.
        result.collate_fn = collate
        result.in_order = True
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise TypeError(
            f"{name} could not be made again to follow a plan: {error} {way_out}"
        ) from error
    wrong = [
        argument
        for argument, kept in (
            ("dataset", result.dataset is dataset),
            ("sampler", result.sampler is sampler),
            ("batch_size", result.batch_sampler is None),
        )
        if not kept
    ]
    if wrong:
        raise TypeError(
            f"{name} could not be made again to follow a plan: its `__init__` does not pass "
            f"`{wrong[0]}` on to `DataLoader.__init__`. {way_out}"
        )
    return result


def _overrides(dataloader: DataLoader[Any], method: str) -> bool:
    return getattr(type(dataloader), method) is not getattr(DataLoader, method)

"""The user's train loader over a stream, made again to yield whole iterations of one rank.

::

    workers       the user's data set -> packed samples
    main process  lengths to all ranks -> plans -> samples to the ranks that run them
                  -> the user's collate function -> IterationBatch

Collating is left to the main process: a sample's micro-batch is known only when it has been read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_dcp.data.batch import IterationBatch
from lightning_dcp.data.loader import LoaderSpec, drawing_alike
from lightning_dcp.data.samples import truncate_sample
from lightning_dcp.data.streams.plans import Examples, StreamPlans
from lightning_dcp.data.streams.session import Fetched, Session
from lightning_dcp.planning.plan import Plan

__all__ = ["StreamLoader", "is_stream", "read_stream_loader"]

Collate = Callable[[list[Any]], Any]
Truncate = Callable[[Any, int], Any]

#: Loaders that add only what the data set can do by itself (torchdata).
_KNOWN = ("StatefulDataLoader",)


def is_stream(dataloader: Any) -> bool:
    """Whether a loader reads an iterable-style data set."""
    return isinstance(dataloader, DataLoader) and isinstance(dataloader.dataset, IterableDataset)


def read_stream_loader(dataloader: DataLoader[Any]) -> LoaderSpec:
    """Read off what the user asked for, and refuse what could not be honoured.

    Returns:
        As for a map-style data set, without samples to be read by their number.

    Raises:
        TypeError: A `DataLoader` subclass that iterates in its own way.
        ValueError: `batch_size=None`.
    """
    name = type(dataloader).__name__
    own_way = [
        method
        for method in ("__iter__", "_get_iterator")
        if getattr(type(dataloader), method) is not getattr(DataLoader, method)
    ]
    if own_way and name not in _KNOWN:
        raise TypeError(
            f"{name} overrides `{own_way[0]}`. The samples of a stream are read one by one and put"
            f" together by DCP: return a plain `torch.utils.data.DataLoader` instead of {name}."
        )
    batch_sampler = dataloader.batch_sampler
    if type(batch_sampler) is not BatchSampler:
        raise ValueError(
            "The train loader has `batch_size=None`. DCP puts samples together itself and calls "
            "`collate_fn` with lists of samples: let the data set return single samples and set "
            "`batch_size` to what a step of one rank should hold on average."
        )
    if batch_sampler.drop_last:
        rank_zero_info(
            "DCP: `drop_last=True` has no effect. An epoch takes each sample exactly once; its "
            "last micro-batches are smaller."
        )
    return LoaderSpec(
        dataset=dataloader.dataset,
        collate_fn=dataloader.collate_fn,
        batch_size=batch_sampler.batch_size,
        shuffle=False,
        drop_last=batch_sampler.drop_last,
    )


def with_examples(spec: LoaderSpec, examples: Examples) -> LoaderSpec:
    """A loader whose data set is some of its samples: for the cost profile."""
    return LoaderSpec(
        dataset=examples,
        collate_fn=spec.collate_fn,
        batch_size=spec.batch_size,
        shuffle=spec.shuffle,
        drop_last=spec.drop_last,
    )


class StreamLoader:
    """Yields one `IterationBatch` per iteration; has no length, as the stream has none.

    Args:
        dataloader: The user's.
        plans: Reads and plans; what Lightning knows as the sampler.
        collate: Makes a micro-batch of a list of samples.
        truncate: `DCPDataModuleMixin.truncate_sample`.
        seed: What is drawn while collating is keyed by it.
    """

    def __init__(
        self,
        dataloader: DataLoader[Any],
        plans: StreamPlans,
        collate: Collate,
        *,
        truncate: Truncate | None = None,
        seed: int = 0,
    ) -> None:
        self.dataset = dataloader.dataset
        self.num_workers = dataloader.num_workers
        self.sampler = plans
        self.collate_fn = collate
        self._truncate = truncate
        self._seed = seed
        self._pin = dataloader.pin_memory and torch.cuda.is_available()

    def __iter__(self) -> Iterator[IterationBatch]:
        session = self.sampler.begin()
        return self._iterations(session, self.sampler.iterator)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the strategy saves where the stream is. Without it Lightning would warn."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What another loader has saved says nothing of plans."""

    @property
    def _iterator(self) -> None:
        """What Lightning sets to None where the workers of a loader are to end."""
        return None

    @_iterator.setter
    def _iterator(self, value: None) -> None:
        self.sampler.close()

    def _iterations(self, session: Session, iterator: int) -> Iterator[IterationBatch]:
        anything = session.iteration > 0
        while True:
            if iterator != self.sampler.iterator:
                raise RuntimeError(
                    "An iterator of the train loader was used after a later one was made. A stream"
                    " is read once at a time."
                )
            fetched = session.next()
            if fetched is None:
                break
            anything = True
            yield self._collated(session.epoch, fetched)
        if not anything:
            raise RuntimeError(
                f"{type(self.dataset).__name__} gave no sample in epoch {session.epoch}. An"
                " iterable-style data set has to begin anew at each `iter(dataset)`; one that can"
                " be read only once trains for one epoch: Trainer(max_epochs=1)."
            )

    def again(self, plan: Plan) -> IterationBatch:
        """The batch of an iteration that was fetched lately, as if nobody had written to it.

        Args:
            plan: Of the same samples, on the same ranks.
        """
        session = self.sampler.session
        assert session is not None
        return self._collated(session.epoch, session.again(plan))

    def _collated(self, epoch: int, fetched: Fetched) -> IterationBatch:
        plan, rank = fetched.plan, self.sampler.exchange.rank
        keys = tuple((self._seed, epoch, plan.iteration, i) for i in plan.indices_for_rank(rank))
        micro_batches = []
        for index, (samples, cut_to) in enumerate(
            zip(fetched.samples, fetched.cut_to, strict=True)
        ):
            with drawing_alike(keys, index, 1):
                cut = [
                    self._cut(sample, most) if most else sample
                    for sample, most in zip(samples, cut_to, strict=True)
                ]
                micro_batches.append(self.collate_fn(cut))
        if self._pin:
            micro_batches = pin_memory(micro_batches)  # type: ignore[no-untyped-call]
        return IterationBatch(epoch, plan.iteration, micro_batches)

    def _cut(self, sample: Any, most: int) -> Any:
        cut = NotImplemented if self._truncate is None else self._truncate(sample, most)
        return truncate_sample(sample, most) if cut is NotImplemented else cut

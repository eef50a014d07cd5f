"""Reads a rank's part of a stream: in the user's workers, sample by sample, always in one order.

::

    StreamDataset  in each worker: the user's data set, its samples as records, in chunks
    StreamReader   in the main process: records of all workers, chunk by chunk in turn
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from typing_extensions import override

from lightning_dcp.data.attributes import AttributesOfDataset
from lightning_dcp.data.streams.passed import Passed, Start
from lightning_dcp.data.streams.records import (
    Record,
    SampleLength,
    digest,
    pack,
    stream_length,
    unpack,
)
from lightning_dcp.data.streams.sharding import Shard
from lightning_dcp.data.workers import obey_own_rank_only
from lightning_dcp.parallel import rng

#: Samples at the start of each worker's stream that ranks compare.
CHECKED = 16
#: Every how many samples of a rank the state of a data set is taken, for resuming.
_SNAPSHOT_EVERY = 64

_CPU = torch.device("cpu")


class Chunk(NamedTuple):
    """Records of one worker that come at once.

    Attributes:
        worker: The worker.
        records: In order; at most as many as the size of a chunk.
        checks: (index, hash) of some of the first samples, of other ranks too where they are dealt
            out by index.
        last: Whether the worker has no more.
    """

    worker: int
    records: list[Record]
    checks: list[tuple[int, bytes]]
    last: bool


class StreamDataset(AttributesOfDataset, IterableDataset[Chunk]):
    """The user's data set, read in chunks of records.

    Args:
        shard: This rank's part.
        rank: Of this process.
        chunk: Records that come at once.
        measures: Whether the length of samples is told here.
        seed: All random numbers are seeded by it, the epoch and the worker, alike on all ranks: a
            data set that shuffles by them comes in the same order everywhere.
        start: Where to begin in the first epoch that is read.
    """

    _OWN = frozenset(
        {"_dataset", "_stride", "_rank", "_chunk", "_measures", "_seed", "_start", "_control"}
    )

    def __init__(
        self,
        shard: Shard,
        *,
        rank: int,
        chunk: int,
        measures: bool,
        seed: int,
        start: Start | None = None,
    ) -> None:
        self._dataset = shard.dataset
        self._stride = shard.stride
        self._rank = rank
        self._chunk = chunk
        self._measures = measures
        self._seed = seed
        self._start = start
        # Shared memory: workers that persist see the epochs after their first, too.
        self._control = torch.zeros(2, dtype=torch.int64)
        self._control.share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, epoch: int) -> None:
        """Say which epoch the next iterator belongs to."""
        self._control[0] = epoch
        self._control[1] += 1

    @override
    def __iter__(self) -> Iterator[Chunk]:
        obey_own_rank_only()
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch, times = self._control.tolist()
        rng.seed(_CPU, (self._seed, epoch, worker))
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        start = self._start if times == 1 else None
        first_place, index = 0, 0
        if start is not None:
            # A whole number of chunks, the same on all workers: their order stays as it was.
            chunk = start.first_index(num_workers) // self._stride // self._chunk
            first_place = chunk * self._chunk
            for next_index, state in start.snapshots.get(worker, ()):
                if next_index <= first_place * self._stride:
                    index, newest = next_index, state
            if index:
                self._dataset.load_state_dict(copy.deepcopy(newest))
        passed = () if start is None else tuple(start.passed)
        return self._chunks(worker, index, passed, first_place)

    def _chunks(
        self, worker: int, index: int, passed: Sequence[Passed], first_place: int
    ) -> Iterator[Chunk]:
        dataset: Any = self._dataset
        resumable = all(
            callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")
        )
        offset = self._rank if self._stride > 1 else 0
        records: list[Record] = []
        checks: list[tuple[int, bytes]] = []
        for sample in dataset:
            place, rest = divmod(index, self._stride)
            wanted = rest == offset and not any(p.has(worker, index) for p in passed)
            data = pack(sample) if wanted or index < CHECKED else b""
            if index < CHECKED:
                checks.append((index, digest(data)))
            index += 1
            if rest != offset or place < first_place:
                continue
            snapshot = None
            if resumable and (place + 1) % _SNAPSHOT_EVERY == 0:
                snapshot = (index, copy.deepcopy(dataset.state_dict()))
            length = stream_length(sample, None) if wanted and self._measures else 0
            records.append(Record(worker, place, length, data if wanted else None, snapshot))
            if len(records) == self._chunk:
                yield Chunk(worker, records, checks, False)
                records, checks = [], []
        yield Chunk(worker, records, checks, True)


class StreamReader:
    """Reads one epoch after another of this rank's part, by the user's workers.

    Args:
        dataloader: The user's; its workers and how they start are taken over.
        shard: This rank's part.
        rank: Of this process.
        chunk: Samples that a worker hands over at once.
        length_hook: `DCPDataModuleMixin.sample_length`. It is called here, as the module that it
            belongs to cannot always go to workers.
        seed: Of the random numbers that the data set draws.

    Attributes:
        num_workers: At least 1: the main process counts as one where it reads itself.
        read_of: (workers) samples read so far of each, those that were passed over included.
        finished: (workers) whether each has no more.
        checks: Worker -> index -> hash of the first samples.
    """

    def __init__(
        self,
        dataloader: DataLoader[Any],
        shard: Shard,
        *,
        rank: int,
        chunk: int,
        length_hook: SampleLength | None,
        seed: int,
    ) -> None:
        self._user_loader = dataloader
        self._shard = shard
        self._rank = rank
        self._chunk = chunk
        self._length_hook = length_hook
        self._seed = seed
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] | None = None
        self._dataset: StreamDataset | None = None
        self._started = False
        self.num_workers = max(1, dataloader.num_workers)
        self._reset()

    def _reset(self) -> None:
        self._iterator: Iterator[Chunk] | None = None
        self._random: rng.RNGState | None = None
        self._queues: list[deque[Chunk]] = [deque() for _ in range(self.num_workers)]
        self._turn = 0
        self._current: deque[Record] = deque()
        self._closing: int | None = None
        self.read_of = [0] * self.num_workers
        self.finished = [False] * self.num_workers
        self.checks: dict[int, dict[int, bytes]] = {w: {} for w in range(self.num_workers)}

    def begin(self, epoch: int, start: Start | None = None) -> None:
        """Begin an epoch anew, or where it was left; what was read ahead of another is dropped."""
        if self._loader is None or self._started or start is not None:
            # Workers that persist have the start they were made with.
            self.close()
            self._dataset = StreamDataset(
                self._shard,
                rank=self._rank,
                chunk=self._chunk,
                measures=self._length_hook is None,
                seed=self._seed,
                start=start,
            )
            self._loader = self._make_loader(self._dataset)
        assert self._dataset is not None
        self._started = start is not None
        self._reset()
        self._dataset.begin(epoch)
        self._generator.manual_seed(hash((self._seed, epoch)) % 2**63)

    def read(self) -> Record | None:
        """The next sample that is to be trained on; None at the end."""
        while True:
            while self._current:
                record = self._current.popleft()
                self.read_of[record.worker] = record.place + 1
                if record.data is not None:
                    if self._length_hook is not None:
                        length = stream_length(unpack(record.data), self._length_hook)
                        return record._replace(length=length)
                    return record
            if self._closing is not None:
                self.finished[self._closing] = True
                self._closing = None
            chunk = self._next_chunk()
            if chunk is None:
                return None
            self._current.extend(chunk.records)
            self._closing = chunk.worker if chunk.last else None

    def close(self) -> None:
        """End the workers."""
        iterator: Any = self._iterator
        self._iterator = None
        if self._loader is not None:
            kept, self._loader._iterator = self._loader._iterator, None
            iterator = iterator if kept is None else kept
        self._loader = None
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def _next_chunk(self) -> Chunk | None:
        """Chunks of all workers in turn, in an order that does not depend on who is quicker."""
        while not all(self.finished):
            queue = self._queues[self._turn]
            if queue:
                self._turn = (self._turn + 1) % self.num_workers
                return queue.popleft()
            if self.finished[self._turn]:
                self._turn = (self._turn + 1) % self.num_workers
                continue
            chunk = self._pull()
            self._queues[chunk.worker].append(chunk)
            for index, check in chunk.checks:
                self.checks[chunk.worker][index] = check
        return None

    def _pull(self) -> Chunk:
        if self._user_loader.num_workers > 0:
            return next(self._opened())
        with rng.preserved(_CPU):  # the data set's draws are not training's
            if self._random is not None:
                self._random.restore()
            chunk = next(self._opened())
            self._random = rng.capture(_CPU)
        return chunk

    def _opened(self) -> Iterator[Chunk]:
        if self._iterator is None:
            assert self._loader is not None
            self._iterator = iter(self._loader)
        return self._iterator

    def _make_loader(self, dataset: StreamDataset) -> DataLoader[Any]:
        loader = self._user_loader
        more: dict[str, Any] = {}
        if loader.num_workers > 0:
            more["prefetch_factor"] = loader.prefetch_factor
        return DataLoader(
            dataset,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=loader.num_workers,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=self._generator,
            persistent_workers=loader.persistent_workers,
            **more,
        )


def _as_it_is(value: Any) -> Any:
    return value

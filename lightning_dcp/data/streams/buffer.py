"""The look-ahead buffer: what all ranks know of samples that wait, and the samples of this one.

A sample is called by a number that says where it was read::

    id = (place * workers + worker) * ranks + rank

Where samples are dealt out by index and one worker reads, that is its number in the stream; and the
order of ids is about the order in which samples were read, the oldest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lightning_dcp.data.streams.exchange import Exchange
from lightning_dcp.data.streams.reading import StreamReader
from lightning_dcp.data.streams.records import Record
from lightning_dcp.planning.lengths import IntArray

__all__ = ["Buffer", "ReadState", "SampleIds"]

_COLUMNS = 3  # id, length, bytes


@dataclass(frozen=True)
class SampleIds:
    """Numbers of samples.

    Attributes:
        world_size: Ranks.
        num_workers: Of each.
        ranks: What the user calls each rank (`Exchange.ranks`).
    """

    world_size: int
    num_workers: int
    ranks: Sequence[int] = ()

    def of(self, rank: int, worker: int, place: int) -> int:
        """The number of a sample."""
        return (place * self.num_workers + worker) * self.world_size + rank

    def where(self, sample_id: int) -> tuple[int, int, int]:
        """(rank, worker, place) of a sample."""
        rest, rank = divmod(sample_id, self.world_size)
        place, worker = divmod(rest, self.num_workers)
        return rank, worker, place

    def name(self, sample_id: int) -> str:
        """For messages."""
        rank, worker, place = self.where(sample_id)
        by = f", worker {worker}" if self.num_workers > 1 else ""
        shown = self.ranks[rank] if self.ranks else rank
        return f"sample {place} of the stream of rank {shown}{by}"


class ReadState(NamedTuple):
    """How far all ranks have read.

    Attributes:
        read: (W, workers) samples of each.
        finished: (W, workers) whether these were all.
    """

    read: IntArray
    finished: IntArray

    @property
    def ended(self) -> IntArray:
        """(W,) whether each rank has read everything."""
        return np.asarray(self.finished.all(axis=1))


class Buffer:
    """Samples that were read and not trained on.

    Args:
        reader: Of this rank.
        exchange: Between ranks.

    Attributes:
        ids, lengths: (n,) of all ranks' waiting samples, in the order of ids.
        state: How far ranks have read.
        snapshots: (rank, worker) -> (index of the next sample, state of the data set), rising.
    """

    def __init__(self, reader: StreamReader, exchange: Exchange) -> None:
        self._reader = reader
        self._exchange = exchange
        world_size, workers = exchange.world_size, reader.num_workers
        self.names = SampleIds(world_size, workers, exchange.ranks)
        self.ids = self.lengths = np.empty(0, dtype=np.int64)
        nothing = np.zeros((world_size, workers), dtype=np.int64)
        self.state = ReadState(nothing, nothing)
        self.snapshots: dict[tuple[int, int], list[tuple[int, Any]]] = {}
        self._num_bytes: dict[int, int] = {}
        self._own: dict[int, bytes] = {}
        self._ahead: list[Record] = []

    def fill(self, *, tokens: int = 0, samples: int = 0) -> None:
        """Read until so much of this rank waits, or everything is read; a collective.

        Raises:
            Exception: What reading raised; on the other ranks a RuntimeError that says where.
        """
        new: list[Record] = []
        error: Exception | None = None
        mine = self.ids % self._exchange.world_size == self._exchange.rank
        waiting, own = int(mine.sum()), int(self.lengths[mine].sum())
        try:
            while own < tokens or waiting + len(new) < samples:
                record = self._ahead.pop(0) if self._ahead else self._reader.read()
                if record is None:
                    break
                new.append(record)
                own += record.length
        except Exception as caught:  # noqa: BLE001 - the other ranks must hear of it first
            error = caught
        self._share(new, error)

    def restore(self, waiting: Iterable[int]) -> None:
        """Read samples again that an interrupted run had in its buffer; a collective.

        Args:
            waiting: Their ids, of all ranks.

        Raises:
            RuntimeError: The stream has not all of them any more.
        """
        found: list[Record] = []
        missing = {i for i in waiting if i % self._exchange.world_size == self._exchange.rank}
        num = len(missing)
        error: Exception | None = None
        try:
            while missing:
                record = self._reader.read()
                if record is None:
                    raise RuntimeError(
                        f"{len(missing)} of {num} samples that rank"
                        f" {self._exchange.ranks[self._exchange.rank]} had read ahead when the"
                        " checkpoint was saved are not in the stream any more. To go on, a stream"
                        " must give the same samples in the same order again."
                    )
                sample_id = self.names.of(self._exchange.rank, record.worker, record.place)
                if sample_id in missing:
                    missing.remove(sample_id)
                    found.append(record)
                else:
                    self._ahead.append(record)
        except Exception as caught:  # noqa: BLE001 - the other ranks must hear of it first
            error = caught
        self._share(found, error)

    def take(self, ids: Iterable[int]) -> None:
        """Samples do not wait any more; their content stays until `forget`."""
        keep = ~np.isin(self.ids, np.fromiter(ids, dtype=np.int64))
        self.ids, self.lengths = self.ids[keep], self.lengths[keep]

    def put_back(self, ids: IntArray, lengths: IntArray) -> None:
        """Samples that were taken wait again."""
        ids, lengths = np.concatenate([self.ids, ids]), np.concatenate([self.lengths, lengths])
        order = np.argsort(ids)
        self.ids, self.lengths = ids[order], lengths[order]

    def forget(self, ids: Iterable[int]) -> None:
        """The content of samples that were taken is not needed any more."""
        for sample_id in ids:
            self._own.pop(sample_id, None)
            self._num_bytes.pop(sample_id, None)

    def forget_snapshots(self, index: int) -> None:
        """States of data sets are not needed any more, but the newest up to an index and later."""
        for key, found in self.snapshots.items():
            older = sum(1 for next_index, _ in found if next_index <= index)
            self.snapshots[key] = found[max(0, older - 1) :]

    def bring(self, wanted: list[list[int]]) -> dict[int, bytes]:
        """Samples to where they are run; a collective, if any has to move.

        Args:
            wanted: For each rank, the ids of the samples that it runs, each once.

        Returns:
            The content of those that this rank runs.
        """
        rank, world_size = self._exchange.rank, self._exchange.world_size
        moves = any(i % world_size != r for r, ids in enumerate(wanted) for i in ids)
        found = {i: self._own[i] for i in wanted[rank] if i % world_size == rank}
        if not moves:
            return found
        sent = [
            b"".join(self._own[i] for i in ids if i % world_size == rank) if r != rank else b""
            for r, ids in enumerate(wanted)
        ]
        coming: list[list[int]] = [[] for _ in range(world_size)]
        for i in wanted[rank]:
            if i % world_size != rank:
                coming[i % world_size].append(i)
        sizes = [sum(self._num_bytes[i] for i in ids) for ids in coming]
        for ids, data in zip(coming, self._exchange.swap(sent, sizes), strict=True):
            start = 0
            for i in ids:
                found[i] = data[start : start + self._num_bytes[i]]
                start += self._num_bytes[i]
        return found

    def _share(self, new: list[Record], error: Exception | None) -> None:
        """Tell the other ranks what was read, or that reading failed."""
        rank, workers = self._exchange.rank, self.names.num_workers
        reader = self._reader
        has_snapshots = any(record.snapshot is not None for record in new)
        rows = np.empty((len(new), _COLUMNS), dtype=np.int64)
        for row, record in zip(rows, new, strict=True):
            assert record.data is not None
            sample_id = self.names.of(rank, record.worker, record.place)
            self._own[sample_id] = record.data
            row[:] = sample_id, record.length, len(record.data)
        # What waits in `_ahead` counts as not read.
        read, finished = list(reader.read_of), list(reader.finished)
        for record in self._ahead:
            read[record.worker] = min(read[record.worker], record.place)
            finished[record.worker] = False
        header = [error is not None, has_snapshots, *read, *finished]
        everyone = self._exchange.gather(
            np.concatenate([np.array(header, dtype=np.int64), rows.ravel()])
        )
        start = 2 + 2 * workers
        headers = np.stack([values[:start] for values in everyone])
        if headers[:, 0].any():
            told = self._exchange.gather_objects(
                None if error is None else f"{type(error).__name__}: {error}"
            )
            if error is not None:
                raise error
            failed = next(r for r, text in enumerate(told) if text is not None)
            shown = self._exchange.ranks[failed]
            raise RuntimeError(f"Reading the stream failed on rank {shown}: {told[failed]}")
        # A run that goes on reads anew what it had read: never less than it has known.
        self.state = ReadState(
            np.maximum(self.state.read, headers[:, 2 : 2 + workers]),
            np.maximum(self.state.finished, headers[:, 2 + workers :]),
        )
        all_rows = np.concatenate([values[start:].reshape(-1, _COLUMNS) for values in everyone])
        self.put_back(all_rows[:, 0], all_rows[:, 1])
        self._num_bytes.update(zip(all_rows[:, 0].tolist(), all_rows[:, 2].tolist(), strict=True))
        if headers[:, 1].any():
            own = [(r.worker, r.snapshot) for r in new if r.snapshot is not None]
            for source, found in enumerate(self._exchange.gather_objects(own)):
                for worker, snapshot in found:
                    known = self.snapshots.setdefault((source, worker), [])
                    if not known or snapshot[0] > known[-1][0]:  # else read again after a resume
                        known.append(snapshot)

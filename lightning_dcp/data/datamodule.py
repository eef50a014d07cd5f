"""What a DataModule tells DCP about its data, and how the profiler gets batches of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_dcp.data.samples import fetch_samples

ProfileBatch = Callable[[int, int], Any]


class DCPDataModuleMixin:
    """Tells DCP how long samples are. Mix it into a `LightningDataModule`, before that class.

    Everything else stays an ordinary DataModule, `train_dataloader` an ordinary `DataLoader`::

        class MyData(lightning_dcp.DCPDataModuleMixin, L.LightningDataModule):
            def sequence_lengths(self, dataset):
                return [len(text) for text in dataset.texts]

            def train_dataloader(self):
                return DataLoader(self.train_set, batch_size=8, shuffle=True, collate_fn=pad)

    All methods are optional. Those that are not overridden return `NotImplemented`, which means
    "find out another way"; an override may return it as well, for example for a data set that it
    does not know.
    """

    def sequence_lengths(self, dataset: Any) -> Sequence[int]:
        """Length in tokens of every sample, along the dimension that is sharded.

        Args:
            dataset: The train loader's data set, as it is: a `Subset` if it is one. Return
                `NotImplemented` for a `Subset` or `ConcatDataset` to be asked for its parts.

        Returns:
            One positive int per sample, in the order of `dataset[0]`, `dataset[1]`, ... Samples
            with two axes of tokens: a pair of each, such as (frames, patches of a frame). Plans go
            by the product, so that one micro-batch may get samples of one product and different
            shapes: set `planning.max_batch_size=1` unless the collate function pads both axes and
            the memory allows for the padding.
        """
        del dataset
        return NotImplemented  # type: ignore[no-any-return]

    def shard_stream(self, dataset: Any, num_shards: int, index: int) -> Any:
        """This rank's part of an iterable-style data set.

        By default data sets that offer it shard themselves (Hugging Face streaming, WebDataset with
        `split_by_node`, a `shard(num_shards, index)` method); of others rank `index` takes every
        `num_shards`-th sample, for which each rank reads everything. Override it where the data set
        shards itself by rank in another way, or can read a part without reading the rest::

            def shard_stream(self, dataset, num_shards, index):
                return Files(dataset.files[index::num_shards])

        Args:
            dataset: The train loader's data set.
            num_shards: Number of ranks.
            index: This rank, from 0.

        Returns:
            The data set that this rank reads; `dataset` itself where it has only this rank's
            samples already. Together the ranks must read each sample once.
        """
        del dataset, num_shards, index
        return NotImplemented

    def sample_length(self, sample: Any) -> int:
        """Length in tokens of one sample of an iterable-style data set.

        By default it is the sample's entry "length", "seq_len" or "num_tokens", or told from its
        form. An override runs in the main process, on a copy of the sample.

        Args:
            sample: What the data set gave.

        Returns:
            A positive int; as in `sequence_lengths`.
        """
        del sample
        return NotImplemented  # type: ignore[no-any-return]

    def profile_batch(self, batch_size: int, seq_len: int) -> Any:
        """A batch for the cost profile, instead of one collated from real samples.

        Override it where reading samples of a given length is slow, or where no sample is as long
        as those that training will see::

            def profile_batch(self, batch_size, seq_len):
                tokens = torch.randint(self.vocab_size, (batch_size, seq_len))
                return {"input_ids": tokens, "labels": tokens}

        Args:
            batch_size: Number of samples in the batch.
            seq_len: Length in tokens of the longest of them.

        Returns:
            What the collate function would return, on the CPU.
        """
        del batch_size, seq_len
        return NotImplemented

    def truncate_sample(self, sample: Any, max_length: int) -> Any:
        """Cut a sample that is too long; only called with `on_too_long="truncate"`.

        By default tensors, arrays and lists as long as the sample are cut, also inside a mapping or
        tuple. It runs in the loader's workers.

        Args:
            sample: What `dataset[i]` returned. It may have just `max_length` tokens.
            max_length: Number of tokens that may stay.

        Returns:
            The sample with at most `max_length` tokens.
        """
        del sample, max_length
        return NotImplemented

    def pack_samples(self, samples: list[Any]) -> Any:
        """Pack the samples of a micro-batch into one sequence; only called with `packing=True`.

        By default everything as long as a sample is concatenated to (1, tokens of all samples,
        ...), the rest is collated as torch does it, and `position_ids` that restart at each sample
        are added to mappings that have none. Override it where samples have another form, or where
        your collate function does more than pad. It runs in the loader's workers.

        Args:
            samples: What the data set returned.

        Returns:
            `(batch, lengths)`: what `training_step` gets, and the number of tokens of each sample
            in it, in order.
        """
        del samples
        return NotImplemented


class MicroBatchMaker:
    """Makes CPU batches of about a given size for the cost profile.

    Real samples, read and collated by the user's own code, so that a training step sees what it
    will see later. Deterministic: the same arguments give the same samples on every rank.

    Args:
        dataset: The train loader's data set.
        lengths: Length of every sample in tokens, shape (num_samples,).
        collate: The train loader's `collate_fn`.
        profile_batch: Used instead where given, unless it returns `NotImplemented`
            (`DCPDataModuleMixin.profile_batch`).
        equal_lengths: Repeat one sample, so that a batch that is not padded has the tokens asked
            for too.
    """

    def __init__(
        self,
        dataset: Any,
        lengths: npt.NDArray[np.int64],
        collate: Callable[[list[Any]], Any],
        profile_batch: ProfileBatch | None = None,
        *,
        equal_lengths: bool = False,
    ) -> None:
        if len(lengths) == 0:
            raise ValueError("There are no samples to make a batch of.")
        self._dataset = dataset
        self._collate = collate
        self._profile_batch = profile_batch
        self._equal_lengths = equal_lengths
        self._by_length = np.argsort(lengths, kind="stable")
        self._sorted_lengths = np.asarray(lengths)[self._by_length]

    def __call__(self, batch_size: int, seq_len: int) -> Any:
        """A batch of `batch_size` samples, the longest of about `seq_len` tokens.

        Args:
            batch_size: Number of samples, at least 1.
            seq_len: Wanted length in tokens.

        Returns:
            What the collate function (or `profile_batch`) returned.
        """
        if self._profile_batch is not None:
            batch = self._profile_batch(batch_size, seq_len)
            if batch is not NotImplemented:
                return batch
        return self._collate(fetch_samples(self._dataset, self.sample_ids(batch_size, seq_len)))

    def longest(self, seq_len: int) -> int:
        """Length of the longest sample of a batch asked for `seq_len` tokens, without making it."""
        return int(self._sorted_lengths[self._nearest(seq_len)])

    def sample_ids(self, batch_size: int, seq_len: int) -> tuple[int, ...]:
        """The samples of a batch: the nearest to `seq_len` first, then ever shorter ones.

        None is longer than the nearest, which alone decides the padded size, and none is shorter
        than half of it, so that little is padding. Where there are fewer than `batch_size` of
        these, they are taken again in turn. Where all of them would be of one length, the last is
        the next shorter one: a batch without padding may cost less (without it, models make no
        mask), and those of training are padded.
        """
        if batch_size < 1 or seq_len < 1:
            raise ValueError(
                f"`batch_size` and `seq_len` must be at least 1, got {batch_size} and {seq_len}."
            )
        last = self._nearest(seq_len)
        if self._equal_lengths:
            return (int(self._by_length[last]),) * batch_size
        half = self._sorted_lengths[last] / 2
        first = int(np.searchsorted(self._sorted_lengths[: last + 1], half, side="left"))
        low = max(first, last + 1 - batch_size)
        nearest_first = self._by_length[low : last + 1][::-1].copy()
        longest = self._sorted_lengths[last]
        if batch_size > 1 and self._sorted_lengths[low] == longest:
            shorter = int(np.searchsorted(self._sorted_lengths, longest, side="left")) - 1
            if shorter >= first:
                nearest_first[-1] = self._by_length[shorter]
        return tuple(int(i) for i in np.resize(nearest_first, batch_size))

    def _nearest(self, seq_len: int) -> int:
        """Position in the sorted lengths that is nearest to `seq_len`; the shorter one of two."""
        above = int(np.searchsorted(self._sorted_lengths, seq_len, side="right"))
        if above == 0:
            # All are longer. Several may share the least length: the last has most neighbours.
            shortest = self._sorted_lengths[0]
            return int(np.searchsorted(self._sorted_lengths, shortest, side="right")) - 1
        below = above - 1
        if above == len(self._sorted_lengths):
            return below
        longer = self._sorted_lengths[above]
        if longer - seq_len < seq_len - self._sorted_lengths[below]:
            return int(np.searchsorted(self._sorted_lengths, longer, side="right")) - 1
        return below

"""Which part of a stream each rank reads.

In this order:

1. `DCPDataModuleMixin.shard_stream(dataset, num_shards, index)`, the user's own word;
2. a Hugging Face streaming data set: its `split_dataset_by_node`, unless that was called already;
3. a WebDataset pipeline with `split_by_node` in it: it asks for the rank itself;
4. a `shard(num_shards, index)` method of the data set, if there are shards for all ranks;
5. rank r of W takes samples r, r + W, r + 2W, ... of what it reads: right for every data set that
   is the same on all ranks, for the price that each of them reads everything.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

SHARD_HOOK = (
    "`shard_stream(self, dataset, num_shards, index)` of lightning_dcp.DCPDataModuleMixin in your"
    " LightningDataModule"
)


class Shard(NamedTuple):
    """What one rank reads.

    Attributes:
        dataset: The data set to iterate over.
        stride: Every how many-th sample of it is this rank's: 1 where the data set itself has only
            those.
        how: Who shards, in a few words.
    """

    dataset: Any
    stride: int
    how: str

    @property
    def by_index(self) -> bool:
        """Whether samples are dealt out by their number, so that any number of ranks can go on."""
        return self.how == BY_INDEX


BY_INDEX = "every W-th sample"


def find_shard(dataset: Any, datamodule: Any, num_shards: int, index: int) -> Shard:
    """The part of a data set that a rank reads; see the module for the order.

    Args:
        dataset: The train loader's.
        datamodule: May have a `shard_stream`.
        num_shards: Number of ranks.
        index: This rank.

    Raises:
        TypeError: `shard_stream` returned something that cannot be iterated over.
    """
    hook = getattr(datamodule, "shard_stream", None)
    if callable(hook):
        part = hook(dataset, num_shards, index)
        if part is not NotImplemented:
            if not hasattr(part, "__iter__"):
                raise TypeError(
                    f"`{type(datamodule).__name__}.shard_stream` returned a"
                    f" {type(part).__name__}. It must return the data set that this rank reads, or"
                    " NotImplemented."
                )
            return Shard(part, 1, "shard_stream")
    if num_shards == 1:
        return Shard(dataset, 1, BY_INDEX)
    if type(dataset).__module__.partition(".")[0] == "datasets":
        if getattr(dataset, "_distributed", None) is None:
            from datasets.distributed import (  # type: ignore[import-not-found,unused-ignore]
                split_dataset_by_node,
            )

            dataset = split_dataset_by_node(dataset, rank=index, world_size=num_shards)
        return Shard(dataset, 1, "split_dataset_by_node")
    stages = getattr(dataset, "pipeline", None)
    if isinstance(stages, list | tuple) and any(
        getattr(stage, "__name__", "") == "split_by_node" for stage in stages
    ):
        return Shard(dataset, 1, "split_by_node")
    if _can_shard(dataset, num_shards):
        return Shard(dataset.shard(num_shards=num_shards, index=index), 1, "shard")
    return Shard(dataset, num_shards, BY_INDEX)


def _can_shard(dataset: Any, num_shards: int) -> bool:
    shard = getattr(dataset, "shard", None)
    if not callable(shard):
        return False
    try:
        names = inspect.signature(shard).parameters
    except (TypeError, ValueError):
        return False
    available = getattr(dataset, "num_shards", None)
    enough = not isinstance(available, int) or available >= num_shards
    return {"num_shards", "index"} <= names.keys() and enough

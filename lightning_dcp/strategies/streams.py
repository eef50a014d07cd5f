"""Streams under Lightning: ranks exchange samples, and checkpoints keep the place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_dcp.data.datamodule import DCPDataModuleMixin
from lightning_dcp.data.loader import LoaderSpec
from lightning_dcp.data.streams.exchange import Alone, Exchange
from lightning_dcp.data.streams.plans import StreamPlans
from lightning_dcp.data.streams.reading import StreamReader
from lightning_dcp.data.streams.sharding import find_shard
from lightning_dcp.data.streams.state import StreamState
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.strategies._lightning_compat import resuming as compat
from lightning_dcp.strategies.agreement import check_same_on_all_ranks, collectively

if TYPE_CHECKING:
    import lightning as L
    from torch.utils.data import DataLoader

    from lightning_dcp.parallel.topology import Topology
    from lightning_dcp.planning.layout import Layout
    from lightning_dcp.planning.options import PlanningOptions

__all__ = [
    "STREAM_KEY",
    "load_place",
    "make_exchange",
    "open_stream",
    "resume_stream",
    "save_place",
]

#: Under which a checkpoint says where the stream is.
STREAM_KEY = "lightning_dcp_stream"


class ProcessExchange:
    """Exchange on the CPU, over a group of all ranks that can do so beside an accelerator's.

    Args:
        layout: Which rank stands at which place of the plans. Everything here goes by places:
            what is called a rank is one.
        group: Of all ranks, with gloo; None: the default group.
    """

    def __init__(self, layout: Layout, group: Any = None) -> None:
        self._group = group
        self.ranks = layout.ranks
        self._places = layout.places
        self.rank = layout.places[dist.get_rank()]
        self.world_size = dist.get_world_size()

    def gather(self, values: IntArray) -> list[IntArray]:
        """(n,) of each rank, n differing between them -> every rank's."""
        sizes = self._all_gather(torch.tensor([values.size])).view(-1).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.int64)
        padded[: values.size] = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
        rows = self._all_gather(padded).numpy()
        return [rows[rank, : sizes[rank]] for rank in self.ranks]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return [values[rank] for rank in self.ranks]

    def swap(self, sent: Sequence[bytes], sizes: Sequence[int]) -> list[bytes]:
        """Bytes to each rank, and from each."""
        by_rank = [sent[place] for place in self._places]
        outgoing = torch.frombuffer(bytearray().join(by_rank) or bytearray(1), dtype=torch.uint8)
        incoming = torch.empty(sum(sizes), dtype=torch.uint8)
        coming = [sizes[place] for place in self._places]
        dist.all_to_all_single(
            incoming,
            outgoing[: sum(map(len, by_rank))],
            coming,
            list(map(len, by_rank)),
            group=self._group,
        )
        received = incoming.numpy().data
        ends = np.cumsum([0, *coming]).tolist()
        return [bytes(received[ends[rank] : ends[rank + 1]]) for rank in self.ranks]

    def _all_gather(self, row: Tensor) -> Tensor:
        rows = row.new_empty(self.world_size, row.numel())
        dist.all_gather(list(rows.unbind(0)), row, group=self._group)
        return rows


def make_exchange(topology: Topology) -> Exchange:
    """Between all ranks; a collective where it needs a group of its own."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return Alone()
    if dist.get_backend() == "gloo":
        return ProcessExchange(topology.layout)
    return ProcessExchange(topology.layout, topology.host_group())


def open_stream(
    dataloader: DataLoader[Any],
    spec: LoaderSpec,
    exchange: Exchange,
    *,
    datamodule: Any,
    options: PlanningOptions,
    seed: int,
    epoch: int,
) -> tuple[StreamPlans, IntArray]:
    """Find this rank's part of a stream, and read the first samples of it; a collective.

    Returns:
        What will plan it, and the lengths of the first samples of all ranks.

    Raises:
        MisconfigurationException: Ranks disagree, or read the same samples, or leave some out.
        ValueError: The stream is empty.
    """
    name = type(spec.dataset).__name__
    shard = collectively(
        "Sharding the stream",
        lambda: find_shard(spec.dataset, datamodule, exchange.world_size, exchange.rank),
    )
    check_same_on_all_ranks(
        "the stream",
        {
            "data set": name,
            "sharding": shard.how,
            "num_workers": str(dataloader.num_workers),
            "batch_size": str(spec.batch_size),
            "seed": str(seed),
            "planning options": options.fingerprint()[:12],
        },
        "Build the train loader alike on every rank.",
    )
    reader = StreamReader(
        dataloader,
        shard,
        rank=exchange.rank,
        chunk=spec.batch_size,
        length_hook=_overridden(datamodule, "sample_length"),
        seed=seed,
    )
    plans = StreamPlans(
        reader,
        exchange,
        shard,
        chunk=spec.batch_size,
        lookahead_steps=options.lookahead_steps,
        epoch=epoch,
        tell=rank_zero_warn,
    )
    if options.tokens_per_step is None:
        lengths = plans.look_ahead(samples=options.lookahead_steps * spec.batch_size)
    else:
        wanted = options.lookahead_steps * options.tokens_per_step
        lengths = plans.look_ahead(tokens=-(-wanted // exchange.world_size))
    if not lengths.size:
        plans.close()
        raise ValueError(f"{name} gave no sample on any rank: there is nothing to train on.")
    found = plans.check(name)
    if found.error:
        plans.close()
        raise MisconfigurationException(found.error)
    if found.warning:
        rank_zero_warn(found.warning)
    return plans, lengths


def _overridden(datamodule: Any, name: str) -> Any:
    """A hook of the user's; None where it is the mixin's, which need not go to workers."""
    hook = getattr(type(datamodule), name, None)
    if hook is None or hook is getattr(DCPDataModuleMixin, name):
        return None
    return getattr(datamodule, name)


def save_place(checkpoint: dict[str, Any], trainer: L.Trainer, plans: StreamPlans) -> None:
    """Add to a checkpoint where the stream is; the same on all ranks."""
    iteration, limit = compat.iterations_to_save(trainer), trainer.num_training_batches
    state = plans.state(plans.epoch, iteration, limit)
    if state is not None:
        checkpoint[STREAM_KEY] = state.to_plain()


def load_place(checkpoint: dict[str, Any]) -> StreamState | None:
    """What a checkpoint says of where the stream is; None: nothing.

    Raises:
        ValueError: It is damaged.
    """
    if STREAM_KEY not in checkpoint:
        return None
    saved = StreamState.from_plain(checkpoint[STREAM_KEY])
    if saved.unfinished:
        compat.reopen_saved_epoch(checkpoint, saved.epoch)
    return saved


def resume_stream(trainer: L.Trainer, plans: StreamPlans, saved: StreamState | None) -> None:
    """Let the train loader go on where the checkpoint was saved; a collective."""
    unfinished = saved.epoch if saved is not None and saved.unfinished else None
    point = compat.resume_point(trainer, unfinished)
    if saved is None and not point.iterations and plans.epoch == point.epoch:
        return
    found = plans.resume(saved, point.epoch, point.iterations)
    check_same_on_all_ranks(
        "the rest of the epoch",
        {
            "epoch": str(point.epoch),
            "iterations run": str(point.iterations),
            "going on": found.told,
        },
        "Give every rank the same checkpoint.",
    )
    if found.told:
        (rank_zero_info if found.exact else rank_zero_warn)(found.told)
    compat.restart_train_loader(trainer)
    compat.show_epoch(trainer)

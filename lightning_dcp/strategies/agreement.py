"""Ranks tell each other what they know, so that a difference is an error text and not a hang.

Everything here is a collective: all ranks must call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

T = TypeVar("T")


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def num_collectives(process_group: Any = None) -> int | None:
    """How many collectives of a group (of all ranks) this rank has begun; None: nobody counts."""
    if not _distributed():
        return 0
    group: Any = process_group or dist.distributed_c10d._get_default_group()
    try:
        # Torch has no public name for it.
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # another backend
        return None


def gather_objects(value: T) -> list[T]:
    """Every rank's `value`, in rank order, on every rank."""
    if not _distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_rows(row: Tensor) -> Tensor:
    """(K,) of each rank -> (W, K), on every rank."""
    if not _distributed():
        return row.unsqueeze(0)
    rows = row.new_empty(dist.get_world_size(), row.numel())
    dist.all_gather(list(rows.unbind(0)), row)
    return rows


def same_tensors_on_all_ranks(tensors: Iterable[Tensor]) -> None:
    """Overwrite `tensors` with those of rank 0."""
    if not _distributed():
        return
    with torch.no_grad():
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            # As bytes: not every backend sends every type.
            sent = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(sent.view(-1).view(torch.uint8), src=0)
            tensor.detach().copy_(sent)


def collectively(what: str, work: Callable[[], T]) -> T:
    """Run `work` (which must contain no collective) on every rank; if it fails on one, fail on all.

    Without this, the ranks where it worked would wait in their next collective for the others.

    Args:
        what: names the work in the error of the other ranks.
        work: called once.

    Raises:
        Exception: the rank's own exception where `work` failed; elsewhere a RuntimeError that names
            the failed ranks.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as e:  # noqa: BLE001 - whatever it is, the other ranks must hear of it first
        error = e
    summaries = gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = [(rank, summary) for rank, summary in enumerate(summaries) if summary is not None]
    if failed:
        rank, summary = failed[0]
        others = f" (also on ranks {[r for r, _ in failed[1:]]})" if len(failed) > 1 else ""
        raise RuntimeError(f"{what} failed on rank {rank}{others}: {summary}")
    return result  # type: ignore[return-value]


def check_same_on_all_ranks(what: str, inputs: Mapping[str, str], advice: str) -> None:
    """Compare what each rank would plan from, and name what differs.

    Args:
        what: what depends on the inputs, for the message ("the training plan").
        inputs: short, printable digests or values, by name.
        advice: what to do.

    Raises:
        MisconfigurationException: on all ranks, naming each differing input and its values by rank.
    """
    everyone: Sequence[Mapping[str, str]] = gather_objects(dict(inputs))
    differences = []
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        by_value: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            by_value.setdefault(theirs.get(name, "<missing>"), []).append(rank)
        if len(by_value) > 1:
            shown = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
            differences.append(f"{name}: {shown}")
    if differences:
        raise MisconfigurationException(
            f"Ranks disagree on what {what} is made from. "
            + " | ".join(differences)
            + f". {advice}"
        )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(r) for r in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"

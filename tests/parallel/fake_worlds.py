"""What ranks of large worlds would send: one process runs the part of each rank, one by one.

torch's fake process groups communicate nothing; wrappers around its collectives note each
call. Notes of all ranks are then compared group by group, and played against each other as real
ranks would meet: a collective is over when all members of its group have come to it.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

Splits = tuple[tuple[int, int], ...]

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


@dataclass(frozen=True)
class Call:
    """One collective of one rank.

    Attributes:
        ranks: members of its group.
        op: its name.
        tensors: (shape, type) of its tensors; of unequal all-to-alls the type alone.
        sent, received: elements to and from each member, where they are not all equal.
    """

    ranks: tuple[int, ...]
    op: str
    tensors: tuple[Any, ...]
    sent: Splits = ()
    received: Splits = ()

    @property
    def common(self) -> tuple[Any, ...]:
        """What must be the same on all members."""
        return (self.op, self.tensors, bool(self.sent or self.received))

    def moved(self, ranks: tuple[int, ...]) -> Call:
        """The same in a group of other ranks."""
        return Call(ranks, self.op, self.tensors, self.sent, self.received)


class Recorder:
    """Notes the calls of torch's collectives wherever the library holds them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        originals = {getattr(dist, name): name for name in _COLLECTIVES if hasattr(dist, name)}
        modules = [m for name, m in sys.modules.items() if name.startswith("lightning_dcp")]
        with ExitStack() as stack:
            for module in [dist, *modules]:
                for attribute, value in list(vars(module).items()):
                    if callable(value) and value.__hash__ and value in originals:
                        noted = self._noted(value, originals[value])
                        stack.callback(setattr, module, attribute, value)
                        setattr(module, attribute, noted)
            yield

    def _noted(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def noted(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            self.calls.append(_call(name, given))
            return function(*args, **kwargs)

        return noted


def _call(op: str, given: dict[str, Any]) -> Call:
    group = given.get("group")
    ranks = tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
    tensors = [t for a in given.values() for t in (a if isinstance(a, list) else [a])]
    shapes = tuple((tuple(t.shape), str(t.dtype)) for t in tensors if isinstance(t, torch.Tensor))
    sent, received = given.get("input_split_sizes"), given.get("output_split_sizes")
    if sent or received:
        return Call(ranks, op, (shapes[0][1],), _sparse(sent), _sparse(received))
    return Call(ranks, op, shapes)


def _sparse(sizes: Sequence[int]) -> Splits:
    return tuple((place, size) for place, size in enumerate(sizes) if size)


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[Recorder]:
    """``torch.distributed`` as rank ``rank`` sees it, for as long as the context lasts."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        recorder = Recorder()
        with recorder.recording():
            yield recorder
    finally:
        dist.destroy_process_group()


def mismatches(calls: Sequence[Sequence[Call]]) -> list[str]:
    """Where members of a group would call something else than their peers; by rank."""
    found = []
    by_group: dict[tuple[int, ...], dict[int, list[Call]]] = defaultdict(dict)
    for rank, own in enumerate(calls):
        for call in own:
            assert rank in call.ranks, (rank, call)
            by_group[call.ranks].setdefault(rank, []).append(call)
    for ranks, of_rank in by_group.items():
        first = of_rank.get(ranks[0], [])
        for rank in ranks:
            other = of_rank.get(rank, [])
            if [c.common for c in first] != [c.common for c in other]:
                found.append(f"ranks {ranks[0]} and {rank} of {ranks}: not the same calls")
        if not found:
            found += _unequal_parts(ranks, of_rank)
    return found


def _unequal_parts(ranks: tuple[int, ...], of_rank: dict[int, list[Call]]) -> list[str]:
    """What one member sends to another must be what that one awaits from it."""
    found = []
    for index, call in enumerate(of_rank[ranks[0]]):
        if not call.common[-1]:
            continue
        all_calls = [of_rank[rank][index] for rank in ranks]
        sent = {(i, j, n) for i, c in enumerate(all_calls) for j, n in c.sent}
        awaited = {(j, i, n) for i, c in enumerate(all_calls) for j, n in c.received}
        if sent != awaited:
            found.append(f"call {index} of {ranks}: sent and awaited {sorted(sent ^ awaited)[:4]}")
    return found


def stuck_ranks(calls: Sequence[Sequence[Call]]) -> dict[int, Call]:
    """Ranks that would wait for ever, with what they wait in; empty where all finish."""
    at = [0] * len(calls)
    here: dict[tuple[int, ...], int] = defaultdict(int)

    def arrive(rank: int) -> tuple[int, ...] | None:
        """Go to the next call; its group if that is complete now."""
        if at[rank] == len(calls[rank]):
            return None
        ranks = calls[rank][at[rank]].ranks
        here[ranks] += 1
        return ranks if here[ranks] == len(ranks) else None

    ready = [ranks for rank in range(len(calls)) if (ranks := arrive(rank)) is not None]
    while ready:
        ranks = ready.pop()
        here[ranks] = 0
        for rank in ranks:
            at[rank] += 1
        ready += [other for rank in ranks if (other := arrive(rank)) is not None]
    return {r: own[at[r]] for r, own in enumerate(calls) if at[r] < len(own)}

"""Does each sample come from one rank only? Told from the first samples that each has read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from lightning_dcp.data.streams.sharding import SHARD_HOOK

__all__ = ["Findings", "check_reading"]

Checks = Mapping[int, Mapping[int, bytes]]  # worker -> index -> hash
_FEW = 4
_MANY = 0.5


class Findings(NamedTuple):
    """What is wrong with the way ranks read.

    Attributes:
        error: Samples would be trained on twice, or not at all.
        warning: They may be.
    """

    error: str = ""
    warning: str = ""


def check_reading(checks: Sequence[Checks], *, by_index: bool, name: str) -> Findings:
    """Compare the first samples of all ranks and workers.

    Args:
        checks: Of each rank.
        by_index: Whether each rank takes every W-th sample, so that all have to read the same ones.
        name: Of the data set's class.
    """
    if by_index:
        error = _different(checks, name)
    else:
        error = _same(checks, name)
    if error:
        return Findings(error=error)
    return Findings(warning=_workers_same(checks[0], name) or _overlap(checks, by_index, name))


def _different(checks: Sequence[Checks], name: str) -> str:
    """Ranks that read other samples than rank 0, where all have to read the same."""
    for rank, other in enumerate(checks):
        for worker, found in checks[0].items():
            both = found.keys() & other.get(worker, {}).keys()
            wrong = [i for i in sorted(both) if found[i] != other[worker][i]]
            if wrong:
                return (
                    f"Rank {rank} reads another sample {wrong[0]} of {name} than rank 0. DCP gives"
                    f" each rank one sample in {len(checks)}, which leaves samples out unless all"
                    " ranks read the same ones in the same order. If the data set shards itself by"
                    f" rank, or draws random numbers of its own, say so by {SHARD_HOOK}: return the"
                    " data set that this rank reads, `dataset` itself if it is sharded already."
                )
    return ""


def _same(checks: Sequence[Checks], name: str) -> str:
    """Two ranks that read the same samples, where each has to read its own."""
    for (a, first), (b, second) in combinations(enumerate(checks), 2):
        for worker, found in first.items():
            if _are_same(found, second.get(worker, {})):
                return (
                    f"Ranks {a} and {b} read the same samples of {name}: each would be trained on"
                    " several times. Shard the stream by rank, or leave that to DCP: return"
                    f" NotImplemented from {SHARD_HOOK}."
                )
    return ""


def _workers_same(checks: Checks, name: str) -> str:
    for (a, first), (b, second) in combinations(sorted(checks.items()), 2):
        if _are_same(first, second):
            return (
                f"DCP: workers {a} and {b} of each rank read the same samples of {name}, so that"
                " each sample is trained on once per worker. Split the stream by"
                " `torch.utils.data.get_worker_info()`, or use num_workers=1."
            )
    return ""


def _overlap(checks: Sequence[Checks], by_index: bool, name: str) -> str:
    if by_index:
        return ""
    sets = [{check for found in rank.values() for check in found.values()} for rank in checks]
    for (a, first), (b, second) in combinations(enumerate(sets), 2):
        shared = len(first & second)
        if shared >= _FEW and shared >= _MANY * min(len(first), len(second)):
            return (
                f"DCP: {shared} of the first samples of {name} that rank {a} reads are read by rank"
                f" {b}, too. Unless the stream repeats itself, they are trained on twice: shard it"
                f" by rank, see {SHARD_HOOK}."
            )
    return ""


def _are_same(first: Mapping[int, bytes], second: Mapping[int, bytes]) -> bool:
    """Whether two begin alike; samples that are all equal say nothing."""
    both = first.keys() & second.keys()
    return all(first[i] == second[i] for i in both) and len({first[i] for i in both}) > 1

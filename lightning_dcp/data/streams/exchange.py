"""What ranks tell each other of a stream: lengths of all samples, and the samples that move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from lightning_dcp.planning.lengths import IntArray


class Exchange(Protocol):
    """Collectives between all ranks: each is called by all of them, in the same order."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def ranks(self) -> Sequence[int]:
        """What the user calls each rank: on nodes of unequal pieces they are counted otherwise."""

    def gather(self, values: IntArray) -> list[IntArray]:
        """(n,) of each rank, n differing between them -> every rank's, in rank order."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""

    def swap(self, sent: Sequence[bytes], sizes: Sequence[int]) -> list[bytes]:
        """Send bytes to each rank, and get those that each sends to this one.

        Args:
            sent: For each rank.
            sizes: How many bytes come from each.
        """


class Alone:
    """A world of one rank."""

    rank = 0
    world_size = 1
    ranks = (0,)

    def gather(self, values: IntArray) -> list[IntArray]:
        """Its own."""
        return [values]

    def gather_objects(self, value: Any) -> list[Any]:
        """Its own."""
        return [value]

    def swap(self, sent: Sequence[bytes], sizes: Sequence[int]) -> list[bytes]:
        """Nothing moves."""
        del sizes
        return list(sent)

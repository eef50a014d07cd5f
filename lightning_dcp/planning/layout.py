"""Which ranks stand side by side: nodes of any size, and SP groups that stay inside them.

Plans speak of *places* 0 .. W-1, of which every SP group is an aligned power-of-two block. A layout
says which rank stands at each place. Nodes of six, which hold no whole number of aligned blocks of
four, are cut into powers of two, and equal pieces of all nodes come together, larger ones first::

    node 0: ranks 0-5, node 1: ranks 6-11

    place   0  1  2  3   4  5  6  7   8  9  10 11
    rank    0  1  2  3   6  7  8  9   4  5  10 11
    p=4    |node 0     |node 1      |   not used        p=4 fits into a node: only such blocks
    p=2    |     |     |      |     |     |     |
    p=8    |wider than a node       |                   any aligned block

So the blocks that a size may use are those before some place. With nodes of a power of two, or a
single one, every place is its own rank and all aligned blocks are used.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """Places of plans, and the ranks that stand there.

    Attributes:
        nodes: Ranks of each node; together each of 0 .. W-1 once.

    Raises:
        ValueError: The nodes do not have each rank once.
    """

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = sorted(itertools.chain.from_iterable(self.nodes))
        if not ranks or ranks != list(range(len(ranks))) or not all(self.nodes):
            raise ValueError(
                "The nodes must have each of the ranks 0, 1, ... once, and at least one each; got "
                f"{[list(node) for node in self.nodes]}."
            )

    @classmethod
    def plain(cls, world_size: int) -> Layout:
        """One node of ``world_size`` ranks."""
        return cls((tuple(range(world_size)),))

    @classmethod
    def of_nodes(cls, node_of_rank: Iterable[int]) -> Layout:
        """From the number of the node that each rank is on."""
        nodes: dict[int, list[int]] = {}
        for rank, node in enumerate(node_of_rank):
            nodes.setdefault(node, []).append(rank)
        return cls(tuple(tuple(nodes[node]) for node in sorted(nodes)))

    @classmethod
    def of_equal_nodes(cls, world_size: int, ranks_per_node: int) -> Layout:
        """Nodes of ``ranks_per_node`` consecutive ranks; the last may have fewer.

        Raises:
            ValueError: A size below 1.
        """
        if world_size < 1 or ranks_per_node < 1:
            raise ValueError(
                f"world_size and ranks_per_node must be at least 1; got {world_size} and "
                f"{ranks_per_node}."
            )
        return cls.of_nodes(rank // ranks_per_node for rank in range(world_size))

    @cached_property
    def world_size(self) -> int:
        """Number of ranks W."""
        return sum(len(node) for node in self.nodes)

    @cached_property
    def largest_node(self) -> int:
        """Ranks of the largest node."""
        return max(len(node) for node in self.nodes)

    @cached_property
    def _pieces(self) -> list[tuple[int, ...]]:
        """The nodes cut into powers of two, larger ones first."""
        pieces = [piece for node in self.nodes for piece in _powers_of_two(node)]
        return sorted(pieces, key=lambda piece: -len(piece))  # stable: in the order of the nodes

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """(W,) the rank at each place."""
        return tuple(itertools.chain.from_iterable(self._pieces))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """(W,) the place of each rank."""
        found = [0] * self.world_size
        for place, rank in enumerate(self.ranks):
            found[rank] = place
        return tuple(found)

    @cached_property
    def sp_sizes(self) -> tuple[int, ...]:
        """Sizes of SP groups: powers of two up to W."""
        return tuple(1 << k for k in range(self.world_size.bit_length()))

    @cached_property
    def _stops(self) -> dict[int, int]:
        return {p: self._stop(p) for p in self.sp_sizes}

    def _stop(self, sp_size: int) -> int:
        if sp_size > self.largest_node:
            return self.world_size - self.world_size % sp_size
        return sum(len(piece) for piece in self._pieces if len(piece) >= sp_size)

    def stop(self, sp_size: int) -> int:
        """The place where the blocks of ``sp_size`` end: those before it are used, all of them."""
        return self._stops.get(sp_size, 0)

    def blocks(self, sp_size: int) -> range:
        """First places of the blocks of ``sp_size``; empty where the world has none."""
        return range(0, self.stop(sp_size), sp_size)

    def block_of(self, place: int, sp_size: int) -> int | None:
        """First place of the block of ``sp_size`` that ``place`` is in; None if in no used one."""
        first = place - place % sp_size
        return first if first < self.stop(sp_size) else None

    def ranks_of(self, first_place: int, sp_size: int) -> tuple[int, ...]:
        """Ranks of a block, in the order of their places."""
        return self.ranks[first_place : first_place + sp_size]

    @cached_property
    def is_plain(self) -> bool:
        """Whether every place is its own rank and all aligned blocks are used."""
        in_order = self.ranks == tuple(range(self.world_size))
        return in_order and all(
            self.stop(p) == self.world_size - self.world_size % p for p in self.sp_sizes
        )

    def __str__(self) -> str:
        """Short, and different for different layouts; alike for all plain ones."""
        if self.is_plain:
            return "aligned"
        sizes = [
            f"{len(list(same))} x {size}"
            for size, same in itertools.groupby(len(node) for node in self.nodes)
        ]
        shown = " + ".join(sizes[:4]) + (" + ..." if len(sizes) > 4 else "")
        digest = hashlib.sha256(repr(self.nodes).encode()).hexdigest()[:8]
        return f"{shown} ({digest})"


def _powers_of_two(ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Consecutive pieces, the largest power of two first."""
    pieces, start = [], 0
    while start < len(ranks):
        size = 1 << ((len(ranks) - start).bit_length() - 1)
        pieces.append(tuple(ranks[start : start + size]))
        start += size
    return pieces

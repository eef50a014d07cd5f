"""The SP groups of a world: all aligned power-of-two blocks of ranks.

Eight ranks have these blocks; a rank is in one per line, ``log2(W) + 1`` of all ``2W - 1``::

    p=8   0 1 2 3 4 5 6 7
    p=4   0 1 2 3|4 5 6 7
    p=2   0 1|2 3|4 5|6 7
    p=1   0|1|2|3|4|5|6|7

and seven ranks the same without the blocks that hold rank 7. This is the only module that creates
process groups.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable

import torch.distributed as dist

__all__ = ["SPGroup", "Topology"]


class _ProcessGroups:
    """The process groups made so far, which live as long as the default process group.

    A group of the same ranks made again after its destruction gets the same name, finds the first
    one's addresses in the store and hangs (gloo, torch 2.13). So a second topology in one process
    shares the groups of the first.
    """

    def __init__(self) -> None:
        self._world: object = None
        self._groups: dict[tuple[int, int, str], dist.ProcessGroup] = {}

    def get(
        self, first: int, size: int, device_type: str, timeout: datetime.timedelta | None
    ) -> dist.ProcessGroup:
        if self._world is not dist.group.WORLD:  # torch.distributed was initialised anew
            self._world = dist.group.WORLD
            self._groups = {}
        key = (first, size, device_type)
        if key not in self._groups:
            self._groups[key] = dist.new_group(
                list(range(first, first + size)),
                timeout=timeout,
                backend={"cpu": "gloo", "cuda": "nccl"}.get(device_type),
                use_local_synchronization=True,
                group_desc=f"sp-{first}-{size}",
            )
        return self._groups[key]


_PROCESS_GROUPS = _ProcessGroups()


@dataclasses.dataclass(frozen=True)
class SPGroup:
    """``size`` consecutive ranks that compute one sequence, seen from one of them.

    Attributes:
        first_rank: global rank of the first member, a multiple of ``size``.
        size: number of members, a power of two (``p``).
        rank_in_group: this rank's place in the group.
        process_group: None for a group of one.
    """

    first_rank: int
    size: int
    rank_in_group: int
    process_group: dist.ProcessGroup | None = dataclasses.field(repr=False, compare=False)

    @property
    def ranks(self) -> range:
        """Global ranks of the members."""
        return range(self.first_rank, self.first_rank + self.size)


class Topology:
    """Which SP groups exist, and the process groups of those that this rank is in.

    Args:
        world_size: number of ranks, any positive number.
        rank: this rank.
        device_type: "cpu" makes gloo groups, "cuda" NCCL ones; others use torch's default backend
            for them.
        timeout: of the collectives in the groups; None is torch's default.

    Raises:
        ValueError: if ``rank`` is not in the world.
    """

    def __init__(
        self,
        world_size: int,
        rank: int,
        *,
        device_type: str = "cpu",
        timeout: datetime.timedelta | None = None,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, world_size), got {rank} of {world_size}")
        self.world_size = world_size
        self.rank = rank
        self.device_type = device_type
        self._timeout = timeout
        self._groups: dict[tuple[int, int], SPGroup] = {(rank, 1): SPGroup(rank, 1, 0, None)}

    @property
    def sp_sizes(self) -> tuple[int, ...]:
        """Sizes that some aligned block has: the powers of two up to the world size, ascending."""
        return tuple(1 << k for k in range(self.world_size.bit_length()))

    def create_groups(self, sp_sizes: Iterable[int] | None = None) -> None:
        """Create this rank's groups of the given sizes (default: all); every rank calls it alike.

        Groups are made by their members only, largest first on every rank: one global order, so
        that overlapping groups cannot wait for each other. Existing groups are kept.

        Raises:
            ValueError: for a size that no block of this world has.
            RuntimeError: if ``torch.distributed`` is not initialised, or with another world size.
        """
        sizes = self.sp_sizes if sp_sizes is None else sorted(set(sp_sizes))
        for size in sizes:
            self._check_size(size)
        for size in sorted(sizes, reverse=True):
            first = self.rank - self.rank % size
            if size == 1 or first + size > self.world_size or (first, size) in self._groups:
                continue
            self._check_process_group()
            process_group = _PROCESS_GROUPS.get(first, size, self.device_type, self._timeout)
            self._groups[first, size] = SPGroup(first, size, self.rank - first, process_group)

    def group(self, first_rank: int, sp_size: int) -> SPGroup:
        """The group of ``sp_size`` ranks from ``first_rank`` on, of which this rank is a member.

        Raises:
            ValueError: if the block is not aligned, not in the world or does not hold this rank.
            RuntimeError: if its process group has not been created.
        """
        self._check_size(sp_size)
        if first_rank % sp_size or first_rank < 0 or first_rank + sp_size > self.world_size:
            raise ValueError(
                f"no aligned block of {sp_size} ranks starts at rank {first_rank} in a world of "
                f"{self.world_size}: the first rank must be a multiple of {sp_size}, the last "
                f"below {self.world_size}"
            )
        if not first_rank <= self.rank < first_rank + sp_size:
            raise ValueError(
                f"rank {self.rank} is not in the group of ranks {first_rank}.."
                f"{first_rank + sp_size - 1}; a rank runs only the micro-batches of its own groups"
            )
        try:
            return self._groups[first_rank, sp_size]
        except KeyError:
            raise RuntimeError(
                f"the process group of ranks {first_rank}..{first_rank + sp_size - 1} does not "
                f"exist: call create_groups() on every rank first"
            ) from None

    def destroy(self) -> None:
        """Forget the groups; the process groups stay for a later topology (see above)."""
        self._groups = {(self.rank, 1): self._groups[self.rank, 1]}

    def _check_size(self, size: int) -> None:
        if size not in self.sp_sizes:
            raise ValueError(
                f"an SP size must be one of {list(self.sp_sizes)} in a world of {self.world_size} "
                f"ranks, got {size!r}"
            )

    def _check_process_group(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError("SP groups of more than one rank need torch.distributed initialised")
        if (dist.get_world_size(), dist.get_rank()) != (self.world_size, self.rank):
            raise RuntimeError(
                f"this topology is of rank {self.rank} in a world of {self.world_size}, "
                f"torch.distributed of rank {dist.get_rank()} of {dist.get_world_size()}"
            )

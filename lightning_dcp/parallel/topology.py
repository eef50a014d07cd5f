"""The SP groups of a world: all aligned power-of-two blocks of places.

Eight ranks have these blocks; a rank is in one per line, ``log2(W) + 1`` of all ``2W - 1``::

    p=8   0 1 2 3 4 5 6 7
    p=4   0 1 2 3|4 5 6 7
    p=2   0 1|2 3|4 5|6 7
    p=1   0|1|2|3|4|5|6|7

and seven ranks the same without the blocks that hold rank 7. Places are ranks, but where nodes are
no powers of two (see ``planning.layout``). This is the only module that creates process groups.

NOTE [Lazy groups]
    A group is made by its members alone, at the first of these: ``create_groups`` of its size, or
    the first micro-batch that runs on it. Either comes in one order on all ranks (micro-batches
    follow the plan's global order), so that overlapping groups cannot wait for each other. Its
    communicator, which on GPUs is what takes time and memory, is made by torch at its first
    collective. Not so where the default group is bound to a device, as Lightning and DeepSpeed do
    on GPUs: torch then splits it for each new group, which *all* ranks of the world would have to
    join, and a rank that is in no group of that size hangs the others (torch 2.13,
    ``ncclCommSplit``). So the binding is hidden while a group is made.

NOTE [Names of groups]
    torch names a group that its members make alone by its ranks and the number of groups that the
    calling rank is in: members must be in equally many, or each waits under another name. Where
    places are ranks, blocks of two sizes hold each other or share nobody, and sizes may come in any
    order, each on all ranks at once. Where they are not, only the largest first will do (a larger
    block holds all of a smaller one, or none of it), so that all sizes are made together. A group
    of all ranks is made the ordinary way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Iterable, Iterator, Sequence

import torch.distributed as dist

from lightning_dcp.planning.layout import Layout

__all__ = ["GroupCosts", "SPGroup", "Topology"]

#: Bytes that NCCL keeps for one peer on one channel: its three protocols' buffers as NCCL's
#: src/init.cc sizes them, LL 8 * 512 * 8 * 16, LL128 120 * 640 * 8 * 8, Simple 4 MiB.
_CONNECTION_BYTES = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + (4 << 20)
#: Assumed, not looked up: rings for gathers and reductions between GPUs joined by NVLink.
_RING_CHANNELS = 16
#: Assumed: send and receive between nodes share a pool, 32 channels of 16 chunks of 128 KiB.
_BETWEEN_NODES_BYTES = 32 * 16 * (128 << 10)


@dataclasses.dataclass(frozen=True)
class GroupCosts:
    """What the process groups of one rank took at start.

    Attributes:
        sizes: Of the groups that exist, increasing; groups of one rank need none.
        most: As many groups as a rank can be in, in this world.
        seconds: Time it took to make them, without the communicators of GPUs, which are made when
            they are first used.
        estimated_bytes: GPU memory that NCCL keeps for them on this rank once all were used. An
            estimate from the sizes of its buffers, not measured; 0 where NCCL is not used.
    """

    sizes: tuple[int, ...]
    most: int
    seconds: float
    estimated_bytes: int

    def __str__(self) -> str:
        sizes = ", ".join(str(size) for size in self.sizes)
        text = (
            f"this rank is in {len(self.sizes)} SP groups"
            + (f" (of {sizes} ranks)" if sizes else "")
            + f", {self.most} at most in this world; made in {self.seconds:.3f} s"
        )
        if self.estimated_bytes:
            text += (
                f"; NCCL keeps about {self.estimated_bytes / 2**20:,.0f} MiB of GPU memory for them"
                " once they are used (estimate)"
            )
        return text


def communicator_bytes(size: int, ranks_per_node: int) -> int:
    """GPU memory of one rank for one NCCL communicator of ``size`` ranks: a rough estimate.

    Rings over 16 channels, for gathers and reductions; one channel to each other rank of the node,
    for all-to-alls; a pool for those of other nodes.
    """
    near = min(size, ranks_per_node) - 1
    between = _BETWEEN_NODES_BYTES if size > ranks_per_node else 0
    return (_RING_CHANNELS + near) * _CONNECTION_BYTES + between


@contextlib.contextmanager
def _not_bound_to_a_device() -> Iterator[None]:
    """See NOTE [Lazy groups]."""
    default = dist.group.WORLD
    device = getattr(default, "bound_device_id", None)
    if default is None or device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


class _ProcessGroups:
    """The process groups made so far, which live as long as the default process group.

    A group of the same ranks made again after its destruction gets the same name, finds the first
    one's addresses in the store and hangs (gloo, torch 2.13). So a second topology in one process
    shares the groups of the first, and there are never more than one for each set of ranks.
    """

    def __init__(self) -> None:
        self._world: object = None
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}

    def get(
        self, ranks: Sequence[int], device_type: str, timeout: datetime.timedelta | None
    ) -> dist.ProcessGroup:
        if self._world is not dist.group.WORLD:  # torch.distributed was initialised anew
            self._world = dist.group.WORLD
            self._groups = {}
        key = (tuple(ranks), device_type)
        if key not in self._groups:
            with _not_bound_to_a_device():
                self._groups[key] = dist.new_group(
                    list(ranks),
                    timeout=timeout,
                    backend={"cpu": "gloo", "cuda": "nccl"}.get(device_type),
                    # By the name of such a group ranks must be in equally many before.
                    use_local_synchronization=len(ranks) < dist.get_world_size(),
                    group_desc=f"sp-{ranks[0]}-{len(ranks)}",
                )
        return self._groups[key]

    def __len__(self) -> int:
        return len(self._groups)


_PROCESS_GROUPS = _ProcessGroups()


@dataclasses.dataclass(frozen=True)
class SPGroup:
    """``size`` ranks that compute one sequence, seen from one of them.

    Attributes:
        first_rank: first place of the block, a multiple of ``size``; as in plans.
        size: number of members, a power of two (``p``).
        rank_in_group: this rank's place in the group.
        process_group: None for a group of one.
        members: global ranks, increasing; empty where they are the places.
    """

    first_rank: int
    size: int
    rank_in_group: int
    process_group: dist.ProcessGroup | None = dataclasses.field(repr=False, compare=False)
    members: tuple[int, ...] = ()

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks of the members, in the order of the group."""
        return self.members or range(self.first_rank, self.first_rank + self.size)


class Topology:
    """Which SP groups exist, and the process groups of those that this rank is in.

    Args:
        world_size: number of ranks, any positive number.
        rank: this rank.
        device_type: "cpu" makes gloo groups, "cuda" NCCL ones; others use torch's default backend
            for them.
        timeout: of the collectives in the groups; None is torch's default.
        layout: which rank stands at which place of the plans; default: all ranks on one node.

    Attributes:
        global_rank: this rank.
        rank: this rank's *place*, which is what plans and loaders go by: the same number, but
            where nodes are no powers of two.

    Raises:
        ValueError: if ``rank`` is not in the world, or the layout is of another one.
    """

    def __init__(
        self,
        world_size: int,
        rank: int,
        *,
        device_type: str = "cpu",
        timeout: datetime.timedelta | None = None,
        layout: Layout | None = None,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, world_size), got {rank} of {world_size}")
        self.layout = Layout.plain(world_size) if layout is None else layout
        if self.layout.world_size != world_size:
            raise ValueError(
                f"the layout is of {self.layout.world_size} ranks, the world of {world_size}"
            )
        self.world_size = world_size
        self.global_rank = rank
        self.rank = self.layout.places[rank]
        self.device_type = device_type
        self._timeout = timeout
        self._alone = SPGroup(self.rank, 1, 0, None, self._members(self.rank, 1))
        self._groups: dict[tuple[int, int], SPGroup] = {(self.rank, 1): self._alone}
        self._seconds = 0.0

    @property
    def sp_sizes(self) -> tuple[int, ...]:
        """Sizes that some aligned block has: the powers of two up to the world size, ascending."""
        return self.layout.sp_sizes

    @property
    def costs(self) -> GroupCosts:
        """What the groups that this rank is in have taken so far."""
        sizes = tuple(sorted(size for _, size in self._groups if size > 1))
        estimated = 0
        if self.device_type == "cuda":
            node = self.layout.largest_node
            estimated = sum(communicator_bytes(size, node) for size in sizes)
        return GroupCosts(sizes, len(self.sp_sizes) - 1, self._seconds, estimated)

    def create_groups(self, sp_sizes: Iterable[int] | None = None) -> None:
        """Create this rank's groups of the given sizes (default: all); every rank calls it alike.

        Groups are made by their members only, largest first on every rank: one global order, so
        that overlapping groups cannot wait for each other. Existing groups are kept.

        Raises:
            ValueError: for a size that no block of this world has.
            RuntimeError: if ``torch.distributed`` is not initialised, or with another world size.
        """
        sizes: Sequence[int] = self.sp_sizes if sp_sizes is None else sorted(set(sp_sizes))
        for size in sizes:
            self._check_size(size)
        if not self.layout.is_plain:  # see NOTE [Names of groups]
            sizes = self.sp_sizes
        for size in sorted(sizes, reverse=True):
            first = self.layout.block_of(self.rank, size)
            if first is not None:
                self._create(first, size)

    def own_group(self, sp_size: int) -> SPGroup | None:
        """This rank's group of that size; None if it is in none that is used.

        Raises:
            ValueError: for a size that no block of this world has.
            RuntimeError: as ``group``.
        """
        self._check_size(sp_size)
        if not self.layout.is_plain:  # see NOTE [Names of groups]
            self.create_groups()
        first = self.layout.block_of(self.rank, sp_size)
        return None if first is None else self._create(first, sp_size)

    def group(self, first_rank: int, sp_size: int) -> SPGroup:
        """The group of ``sp_size`` places from ``first_rank`` on, of which this rank is a member.

        Made if it does not exist yet, which all its members must then do: see NOTE [Lazy groups].

        Raises:
            ValueError: if the block is not aligned, not in the world or does not hold this rank.
            RuntimeError: if ``torch.distributed`` is not initialised, or with another world size.
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
        return self._create(first_rank, sp_size)

    def host_group(self) -> dist.ProcessGroup:
        """All ranks, with gloo: for what is on the CPU beside an accelerator. A collective once."""
        return _PROCESS_GROUPS.get(range(self.world_size), "cpu", self._timeout)

    def destroy(self) -> None:
        """Forget the groups; the process groups stay for a later topology (see above)."""
        self._groups = {(self.rank, 1): self._alone}

    def _create(self, first: int, size: int) -> SPGroup:
        """The group, made if need be."""
        if (first, size) not in self._groups:
            self._check_process_group()
            ranks = sorted(self.layout.ranks_of(first, size))
            start = time.perf_counter()
            process_group = _PROCESS_GROUPS.get(ranks, self.device_type, self._timeout)
            self._seconds += time.perf_counter() - start
            self._groups[first, size] = SPGroup(
                first,
                size,
                ranks.index(self.global_rank),
                process_group,
                self._members(first, size),
            )
        return self._groups[first, size]

    def _members(self, first: int, size: int) -> tuple[int, ...]:
        ranks = tuple(sorted(self.layout.ranks_of(first, size)))
        return () if ranks == tuple(range(first, first + size)) else ranks

    def _check_size(self, size: int) -> None:
        if size not in self.sp_sizes:
            raise ValueError(
                f"an SP size must be one of {list(self.sp_sizes)} in a world of {self.world_size} "
                f"ranks, got {size!r}"
            )

    def _check_process_group(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError("SP groups of more than one rank need torch.distributed initialised")
        if (dist.get_world_size(), dist.get_rank()) != (self.world_size, self.global_rank):
            raise RuntimeError(
                f"this topology is of rank {self.global_rank} in a world of {self.world_size}, "
                f"torch.distributed of rank {dist.get_rank()} of {dist.get_world_size()}"
            )

"""Which ranks share a node, and what the groups of ranks cost at start: asked once, told once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_info

from lightning_dcp.planning.layout import Layout
from lightning_dcp.strategies.agreement import gather_objects

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_dcp.parallel.topology import Topology

__all__ = ["create_groups", "gathered_layout"]


def gathered_layout(node_rank: int) -> Layout:
    """The layout of all ranks, from the node that each says it is on; a collective.

    Asked of every rank rather than computed from ``num_nodes``, since ``torchrun`` may start
    unequal numbers of ranks on nodes and a cluster may deal ranks out to nodes in turn.
    """
    return Layout.of_nodes(gather_objects(node_rank))


def create_groups(topology: Topology, sp_sizes: Iterable[int]) -> None:
    """Make the groups that plans can use, on all ranks, and say what they and the layout cost."""
    if topology.world_size == 1:
        return
    before = topology.costs.sizes
    topology.create_groups(sp_sizes)
    costs = topology.costs
    if costs.sizes != before or costs.seconds > 0:
        rank_zero_info(f"DCP: {costs}.")
    if not topology.layout.is_plain:
        rank_zero_info(f"DCP: {describe(topology.layout)}")


def describe(layout: Layout) -> str:
    """What a layout of nodes that are no powers of two means for plans."""
    sizes = [p for p in layout.sp_sizes if 1 < p <= layout.largest_node]
    left = [
        f"{layout.world_size - layout.stop(p)} ranks are in no group of {p}"
        for p in sizes
        if layout.stop(p) < layout.world_size
    ]
    moved = next((i for i, rank in enumerate(layout.ranks) if i != rank), None)
    text = (
        f"nodes of {layout}: SP groups of up to {max([1, *sizes])} ranks stay inside a node"
        + (f" ({', '.join(left)})" if left else "")
        + "."
    )
    if moved is not None:
        text += (
            " Plans and reports number ranks by their places in groups, node by node: from place"
            f" {moved} on these are the ranks"
            f" {', '.join(str(rank) for rank in layout.ranks[moved : moved + 8])}"
            f"{', ...' if layout.world_size > moved + 8 else ''}."
        )
    return text

"""How the ranks of a group share attention heads: by heads, in a ring over tokens, or both.

Ulysses gives each rank all tokens of some heads, a ring all heads of some tokens. Where the heads
do not suffice for all p ranks, u of them share heads and R = p / u such teams form a ring.
"""

from __future__ import annotations

import dataclasses
import functools
import logging

__all__ = ["HeadSplit", "share_heads", "split_heads"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSplit:
    """Degrees of a group's attention; rank i of the group is member i // u of ring i % u.

    Attributes:
        ulysses: u, ranks that share the heads.
        ring: R, parts of the sequence that keys and values travel through; u * R = p.
    """

    ulysses: int
    ring: int

    def __str__(self) -> str:
        if self.ring == 1:
            return f"Ulysses {self.ulysses}"
        return (
            f"ring {self.ring}"
            if self.ulysses == 1
            else f"Ulysses {self.ulysses} x ring {self.ring}"
        )


def share_heads(num_heads: int, num_kv_heads: int, sp_size: int) -> bool:
    """Whether ``sp_size`` ranks can share these heads without a ring.

    Keys and values with fewer heads than ranks are repeated, where their number divides that of the
    ranks.
    """
    return num_heads % sp_size == 0 and (num_kv_heads % sp_size == 0 or sp_size % num_kv_heads == 0)


@functools.cache
def split_heads(num_heads: int, num_kv_heads: int, sp_size: int) -> HeadSplit:
    """The split with the largest u, a power of two: the ring moves more than heads do.

    Args:
        num_heads: H, of queries.
        num_kv_heads: K, of keys and values.
        sp_size: p, a power of two.
    """
    degree = sp_size
    while not share_heads(num_heads, num_kv_heads, degree):
        degree //= 2
    split = HeadSplit(ulysses=degree, ring=sp_size // degree)
    if sp_size > 1:
        _log.info(
            "attention of %d heads (%d of keys) on %d ranks: %s",
            num_heads,
            num_kv_heads,
            sp_size,
            split,
        )
    return split

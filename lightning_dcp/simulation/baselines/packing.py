"""What a packed micro-batch costs: sequences end to end without padding, attention within each.

NOTE (packed cost): a cost model knows micro-batches of b samples of *one* length s. What packed
lengths ``s_1 .. s_k`` with ``S`` tokens in sum cost is the mean, weighted by tokens, of what ``S``
tokens in samples of each of the lengths would::

    T = sum_i (s_i / S) time_s(b=S / s_i, s=s_i)        b may be a fraction

This is exact for every law of the form ``c + sum_i f(s_i) + g(S)``, which all laws in use are:
attention is a sum over samples, everything else depends on the tokens or on their number. Memory is
the same mean of ``memory_bytes``. Unlike padded micro-batches, the sum is not rounded up to a
multiple of p: less than p tokens, in favour of the baselines.

n = samples of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.lengths import IntArray, as_lengths
from lightning_dcp.simulation.steps import Unplaced

__all__ = ["PackedCosts", "first_fit_decreasing", "sp_sizes_within"]

FloatArray = npt.NDArray[np.float64]


def sp_sizes_within(costs: Costs, world_size: int) -> tuple[int, ...]:
    """SP sizes that the costs know and the world has room for, increasing.

    Raises:
        ValueError: There is none.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1; got {world_size}.")
    sizes = tuple(p for p in costs.sp_sizes if p <= world_size)
    if not sizes:
        raise ValueError(
            f"No SP size of {list(costs.sp_sizes)} fits in a world of {world_size} ranks."
        )
    return sizes


class PackedCosts:
    """Costs of packed micro-batches of one step's samples under one static recomputation.

    Args:
        costs: Predicts seconds and bytes.
        lengths: The step's lengths.
        world_size: Ranks W.
        limit_bytes: Memory limit per rank.
        recompute_blocks: Blocks recomputed in every micro-batch; None: the fewest with which the
            longest sample fits at any SP size.

    Attributes:
        lengths: (n,) lengths.
        recompute_blocks: r.
        sp_sizes: SP sizes at which at least one of the samples fits, increasing.
        budgets: SP size -> most tokens that one micro-batch can hold within the memory limit,
            whichever of the samples (those not longer than that) they come from.
        min_sp_size: (n,) smallest SP size at which each sample fits.

    Raises:
        ValueError: A sample fits nowhere.
    """

    def __init__(
        self,
        costs: Costs,
        lengths: Sequence[int] | IntArray,
        world_size: int,
        limit_bytes: int,
        recompute_blocks: int | None = None,
    ) -> None:
        self.costs = costs
        self.lengths = as_lengths(lengths, name="the step")
        self.world_size = world_size
        self.limit_bytes = limit_bytes
        sizes = np.array(sp_sizes_within(costs, world_size))
        longest = int(self.lengths.max())
        if recompute_blocks is None:
            r = costs.min_recompute(1, longest, sizes, limit_bytes)
            fitting = r[r >= 0]
            recompute_blocks = int(fitting.min()) if fitting.size else costs.num_blocks
        self.recompute_blocks = recompute_blocks
        budgets = dict(zip(sizes.tolist(), self._budgets(sizes), strict=True))
        self.budgets = {p: tokens for p, tokens in budgets.items() if tokens}
        self.sp_sizes = tuple(self.budgets)
        if longest > max(self.budgets.values(), default=0):
            missing = costs.memory_bytes(1, longest, sizes, recompute_blocks).min() - limit_bytes
            raise ValueError(
                f"Sample {int(self.lengths.argmax())} of {longest} tokens fits at none of the SP "
                f"sizes {sizes.tolist()} with {recompute_blocks} blocks recomputed: "
                f"{int(missing)} bytes are missing. Recompute more blocks, raise the memory limit "
                "or use more ranks."
            )
        self.min_sp_size = np.zeros(self.lengths.size, dtype=np.int64)
        for p, tokens in reversed(self.budgets.items()):
            self.min_sp_size[self.lengths <= tokens] = p
        self._linear: dict[tuple[int, int], tuple[FloatArray, float]] = {}

    def _budgets(self, sizes: IntArray) -> list[int]:
        """Most tokens for each SP size; 0 where not even the shortest sample fits.

        Bisection: a packed micro-batch within the budget is a mean of micro-batches of one length
        that all fit (NOTE packed cost), so it fits too. In laws whose memory depends on tokens only
        nothing is lost by asking this of each length.
        """
        distinct = np.unique(self.lengths)
        low = np.zeros_like(sizes)
        high = np.full_like(sizes, int(self.lengths.sum()) + 1)
        while (high - low > 1).any():
            tokens = (low + high) // 2
            b = np.maximum(tokens[:, None] / distinct, 1.0)
            needed = self.costs.memory_bytes(
                b, distinct[None, :], sizes[:, None], self.recompute_blocks
            )
            # A length above the budget does not have to fit.
            fits = ((needed <= self.limit_bytes) | (distinct > tokens[:, None])).all(axis=1)
            low, high = np.where(fits, tokens, low), np.where(fits, high, tokens)
        return [int(t) if t >= distinct[0] else 0 for t in low.tolist()]

    def price(self, groups: Sequence[Sequence[int]], sp_sizes: Sequence[int]) -> list[Unplaced]:
        """Exact costs of micro-batches (NOTE packed cost).

        Args:
            groups: Positions of the samples of each micro-batch; none may be empty.
            sp_sizes: Its SP size.
        """
        if not groups:
            return []
        sizes = np.array([len(group) for group in groups])
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        s = self.lengths[np.concatenate([np.asarray(group, dtype=np.int64) for group in groups])]
        tokens = np.repeat(np.add.reduceat(s, starts), sizes)
        p = np.repeat(np.asarray(sp_sizes), sizes)
        b, weight = tokens / s, s / tokens
        times = self.costs.time_s(b, s, p, self.recompute_blocks)
        memory = self.costs.memory_bytes(b, s, p, self.recompute_blocks)
        seconds = np.add.reduceat(weight * times, starts)
        bytes_ = np.rint(np.add.reduceat(weight * memory, starts))
        return [
            Unplaced(tuple(group), int(size), self.recompute_blocks, time_s, int(num_bytes))
            for group, size, time_s, num_bytes in zip(
                groups, sp_sizes, seconds.tolist(), bytes_.tolist(), strict=True
            )
        ]

    def linear_s(self, sp_size: int, tokens: int) -> tuple[FloatArray, float]:
        """Seconds as a sum over samples, for solvers that need one.

        Exact where time is linear in the tokens; else right for micro-batches of about ``tokens``
        tokens and an approximation for others (small micro-batches are less efficient).

        Returns:
            (n,) seconds of each sample on ``sp_size`` ranks, and those of a micro-batch itself.
        """
        key = sp_size, max(1, tokens)
        if key not in self._linear:
            s = self.lengths
            most = np.maximum(s, key[1]).astype(np.float64)
            b = np.stack([most / s, 2 * most / s])
            once, twice = self.costs.time_s(b, s[None, :], sp_size, self.recompute_blocks)
            constants = np.clip(2 * once - twice, 0, once)
            fixed_s = min(float(np.average(constants, weights=s)), 0.99 * float(once.min()))
            self._linear[key] = (s / most * (once - fixed_s), fixed_s)
        return self._linear[key]


def first_fit_decreasing(lengths: IntArray, samples: Iterable[int], budget: int) -> list[list[int]]:
    """Pack samples into few micro-batches of at most ``budget`` tokens, longest first.

    A sample above the budget is alone.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for i in sorted(samples, key=lambda i: (-lengths[i], i)):
        length = int(lengths[i])
        for k, tokens in enumerate(room):
            if length <= tokens:
                packs[k].append(i)
                room[k] -= length
                break
        else:
            packs.append([i])
            room.append(budget - length)
    return packs

"""Megatron's dynamic context parallelism: a deterministic greedy scheduler with packing.

After the description in section E7 of the algorithms (the packing-aware scheduler of Megatron's
core): the longest sample that is left opens a round and sets how much work a group may have; each
further sample joins the round where it raises the largest work least, or waits for the next round.
Its measure of work is ``s^2 / p``; :func:`megatron_step` can use predicted seconds instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.simulation.baselines.packing import PackedCosts
from lightning_dcp.simulation.baselines.tuning import (
    Steps,
    best_settings,
    longest_of,
    recompute_candidates,
)
from lightning_dcp.simulation.steps import SimulatedStep, place_in_parts

__all__ = [
    "megatron_measured_step",
    "megatron_step",
    "tune_megatron",
    "tune_megatron_measured",
]

_SLACK = 1.05


def megatron_step(
    lengths: Sequence[int] | IntArray,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    *,
    recompute_blocks: int | None = None,
    max_tokens_per_rank: int | None = None,
    fill: bool = True,
    spread: bool = True,
    full_pack: bool = True,
    measured: bool = False,
) -> SimulatedStep:
    """Plan one step round by round.

    Args:
        lengths: The step's lengths.
        costs: Predicts seconds and bytes.
        world_size: Ranks W.
        limit_bytes: Memory limit per rank.
        recompute_blocks: Blocks recomputed; None: the fewest with which the longest sample fits.
        max_tokens_per_rank: Most packed tokens per rank, which decides the smallest SP size of a
            sample; None: what memory allows.
        fill: Whether ranks that a round leaves empty go to its smallest groups.
        spread: Whether, of groups of one size that would leave the round's largest work as it is, a
            sample goes to the one with least work (a new one if there are ranks) or with most.
        full_pack: Whether a group may have the work of a full pack of samples as long as the
            round's longest, as described; False: of one such sample. Which is better depends on
            the mix.
        measured: Work in predicted seconds instead of ``s^2 / p``.

    Raises:
        ValueError: A sample fits nowhere.
    """
    prices = PackedCosts(costs, lengths, world_size, limit_bytes, recompute_blocks)
    rounds = _Rounds(prices, max_tokens_per_rank, spread, full_pack, measured)
    left = np.argsort(-prices.lengths, kind="stable").tolist()
    parts = []
    while left:
        groups, left = rounds.next(left)
        if fill:
            rounds.fill(groups)
        parts.append(groups)
    flat = prices.price(
        [group.samples for part in parts for group in part],
        [group.sp_size for part in parts for group in part],
    )
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return place_in_parts(
        world_size, [flat[end - len(part) : end] for part, end in zip(parts, ends, strict=True)]
    )


def megatron_measured_step(
    lengths: Sequence[int] | IntArray,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    **settings: Any,
) -> SimulatedStep:
    """:func:`megatron_step` with predicted seconds as its measure of work."""
    return megatron_step(lengths, costs, world_size, limit_bytes, measured=True, **settings)


class _Group:
    """Ranks that share samples in one round."""

    def __init__(self, sp_size: int, sample: int, tokens: int, work: float) -> None:
        self.sp_size = sp_size
        self.samples = [sample]
        self.tokens = tokens
        self.work = work


class _Rounds:
    def __init__(
        self,
        prices: PackedCosts,
        max_tokens_per_rank: int | None,
        spread: bool,
        full_pack: bool,
        measured: bool,
    ) -> None:
        self.sign = 1 if spread else -1
        self.full_pack = full_pack
        self.lengths = prices.lengths.tolist()
        self.world_size = prices.world_size
        self.sizes = prices.sp_sizes
        self.limits = dict(prices.budgets)
        if max_tokens_per_rank is not None:
            self.limits = {p: min(t, p * max_tokens_per_rank) for p, t in self.limits.items()}
            if max(self.limits.values()) < max(self.lengths):
                raise ValueError(
                    f"A sample of {max(self.lengths)} tokens fits at no SP size with "
                    f"max_tokens_per_rank={max_tokens_per_rank}."
                )
        self.fixed = dict.fromkeys(self.sizes, 0.0)
        square = np.square(prices.lengths.astype(np.float64))
        self.work = {p: (square / p).tolist() for p in self.sizes}
        if measured:
            mean = int(prices.lengths.sum()) // prices.world_size
            for p in self.sizes:
                tokens = min(prices.budgets[p], p * mean)
                seconds, self.fixed[p] = prices.linear_s(p, tokens)
                self.work[p] = seconds.tolist()

    def next(self, left: list[int]) -> tuple[list[_Group], list[int]]:
        """One round from the samples that are left, longest first; and those still left."""
        first, *others = left
        p = next(p for p in self.sizes if self.lengths[first] <= self.limits[p])
        groups = [self._open(p, first)]
        # A full pack of samples as long as this one: s^2 / p (tokens / s) = s (tokens / p).
        samples = self.limits[p] / self.lengths[first] if self.full_pack else 1.0
        cap = _SLACK * (self.fixed[p] + self.work[p][first] * samples)
        free = self.world_size - p
        most = groups[0].work
        waiting = []
        for i in others:
            # Least (largest work of all, SP size, own work), so that ranks are not spent on
            # samples which would not make the round longer anyway.
            best: tuple[float, int, float] = (math.inf, 0, 0.0)
            chosen: _Group | None = None
            for p in self.sizes:
                if self.lengths[i] > self.limits[p]:
                    continue
                options: list[_Group | None] = [
                    g
                    for g in groups
                    if g.sp_size == p and g.tokens + self.lengths[i] <= self.limits[p]
                ]
                if p <= free:
                    options.append(None)
                for group in options:
                    own = self.work[p][i] + (self.fixed[p] if group is None else group.work)
                    key = (max(most, own), p, self.sign * own)
                    if key[0] <= cap and key < best:
                        best, chosen = key, group
            if not best[1]:
                waiting.append(i)
                continue
            most = best[0]
            if chosen is None:
                groups.append(self._open(best[1], i))
                free -= best[1]
            else:
                chosen.samples.append(i)
                chosen.tokens += self.lengths[i]
                chosen.work = self.sign * best[2]
        return groups, waiting

    def fill(self, groups: list[_Group]) -> None:
        """Double the smallest groups until no ranks are left for that."""
        free = self.world_size - sum(group.sp_size for group in groups)
        while True:
            can = [g for g in groups if g.sp_size <= free and 2 * g.sp_size in self.sizes]
            if not can:
                return
            group = min(can, key=lambda g: (g.sp_size, -g.work))
            free -= group.sp_size
            group.sp_size *= 2
            group.work = self.fixed[group.sp_size] + sum(
                self.work[group.sp_size][i] for i in group.samples
            )

    def _open(self, p: int, sample: int) -> _Group:
        work = self.fixed[p] + self.work[p][sample]
        return _Group(p, sample, self.lengths[sample], work)


def tune_megatron(
    steps: Steps,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    *,
    longest: int | None = None,
    measured: bool = False,
) -> dict[str, Any]:
    """Best static r, token limit, filling, spreading and cap of :func:`megatron_step`.

    Raises:
        ValueError: A sample fits nowhere.
    """
    most = longest or longest_of(steps)
    candidates: list[dict[str, Any]] = []
    for r in recompute_candidates(costs, most, world_size, limit_bytes):
        prices = PackedCosts(costs, [most], world_size, limit_bytes, r)
        # The smallest SP size of the longest sample, for each that it can have.
        limits = [None, *(-(-most // p) for p in prices.sp_sizes if p > prices.min_sp_size[0])]
        candidates.extend(
            {
                "recompute_blocks": r,
                "max_tokens_per_rank": limit,
                "fill": fill,
                "spread": spread,
                "full_pack": full_pack,
            }
            for limit in limits
            for fill in (True, False)
            for spread in (True, False)
            for full_pack in (True, False)
        )
    plan_step = megatron_measured_step if measured else megatron_step
    return best_settings(plan_step, steps, costs, world_size, limit_bytes, candidates)


def tune_megatron_measured(
    steps: Steps,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    *,
    longest: int | None = None,
) -> dict[str, Any]:
    """The same for :func:`megatron_measured_step`.

    Raises:
        ValueError: A sample fits nowhere.
    """
    return tune_megatron(steps, costs, world_size, limit_bytes, longest=longest, measured=True)

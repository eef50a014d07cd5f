"""Groups of several sizes for one round of packed micro-batches, by greedy assignment.

FlexSP's solver starts from it, and it is what is left when the time limit ends before the solver
has found anything (section E6 of the algorithms: best homogeneous plan as warm start,
longest-first greedy as fallback).

C = ways to divide the ranks into groups, G = groups at most, P = SP sizes, n = samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lightning_dcp.planning.lengths import IntArray

__all__ = ["Assignment", "divisions", "greedy"]

Assignment = list[tuple[int, list[int]]]
"""Groups as (index of the SP size, positions of the samples); none is empty."""

FloatArray = npt.NDArray[np.float64]

_MAX_DIVISIONS = 2048  # as many as 64 ranks have
_TARGETS = 10  # bisection steps of the second pass
_KEPT = 128  # divisions that the second pass looks at: those that were best in the first


@lru_cache
def divisions(world_size: int, sp_sizes: tuple[int, ...]) -> IntArray:
    """All ways to divide ranks into groups, as many of the smallest as there is room for.

    Returns:
        (C, P) number of groups of each SP size; homogeneous ones first where all fit.
    """
    ways: list[tuple[int, ...]] = []

    def extend(index: int, rest: int, counts: tuple[int, ...]) -> None:
        p = sp_sizes[index]
        if index == 0:
            ways.append((rest // p, *counts))
            return
        for count in range(rest // p, -1, -1):
            extend(index - 1, rest - count * p, (count, *counts))

    extend(len(sp_sizes) - 1, world_size, ())
    ways.sort(key=lambda counts: (sum(c > 0 for c in counts), counts))
    table = np.array(ways, dtype=np.int64)
    if len(ways) > _MAX_DIVISIONS:  # beyond 64 ranks: an even choice
        table = table[np.linspace(0, len(ways) - 1, _MAX_DIVISIONS).astype(int)]
    table.setflags(write=False)
    return table


def greedy(
    lengths: IntArray,
    seconds: FloatArray,
    fixed_s: FloatArray,
    sp_sizes: Sequence[int],
    budgets: Sequence[int],
    world_size: int,
) -> tuple[float, Assignment] | None:
    """The best of greedy assignments over all divisions of the ranks.

    First each sample, the longest first, goes to the group that would be done with it earliest.
    Then, for ever lower targets, to the group that spends least on it of all that stay within the
    target: larger groups are quicker with a sample, but spend more GPU-seconds on it.

    Args:
        lengths: (n,) lengths.
        seconds: (P, n) seconds of each sample in a group of each size.
        fixed_s: (P,) seconds of a micro-batch itself.
        sp_sizes: P sizes, increasing.
        budgets: Tokens that a group of each size can hold.
        world_size: Ranks W.

    Returns:
        Seconds of the slowest group, and the groups; None where nothing was found to fit.
    """
    order = np.argsort(-lengths, kind="stable")
    counts = divisions(world_size, tuple(sp_sizes))
    sizes = np.full((len(counts), int(counts.sum(axis=1).max())), -1)
    for row, own in zip(sizes, counts, strict=True):
        row[: own.sum()] = np.repeat(np.arange(len(sp_sizes)), own)[::-1]
    state = _Problem(lengths, seconds, fixed_s, np.asarray(sp_sizes), np.asarray(budgets), order)
    makespans, best = state.assign(sizes, None)
    if best is None:  # quick groups were filled too early; the second rule packs more tightly
        makespans, best = state.assign(sizes, float(seconds.sum() + fixed_s.sum()))
    if best is None:
        return None
    sizes = sizes[np.argsort(makespans, kind="stable")[:_KEPT]]
    # No division does with fewer GPU-seconds than every sample at its most efficient size.
    busy = float(np.min(seconds * state.sp_sizes[:, None], axis=0).sum())
    low, high = busy / world_size, best[0]
    for _ in range(_TARGETS):
        if high - low <= 1e-3 * high:
            break
        target = (low + high) / 2
        _, found = state.assign(sizes, target)
        if found is None:
            low = target
        else:
            best = min(best, found, key=lambda result: result[0])
            high = min(target, best[0])
    return best


class _Problem:
    def __init__(
        self,
        lengths: IntArray,
        seconds: FloatArray,
        fixed_s: FloatArray,
        sp_sizes: IntArray,
        budgets: IntArray,
        order: IntArray,
    ) -> None:
        self.lengths = lengths
        self.sp_sizes = sp_sizes
        self.order = order
        # One more row for the places of a division that has fewer groups: nothing fits there.
        self.seconds = np.vstack([seconds, np.full(lengths.size, np.inf)])
        self.spent = np.vstack([seconds * sp_sizes[:, None], np.full(lengths.size, np.inf)])
        self.fixed_s = np.append(fixed_s, 0.0)
        self.budgets = np.append(budgets, 0)

    def assign(
        self, sizes: IntArray, target_s: float | None
    ) -> tuple[FloatArray, tuple[float, Assignment] | None]:
        """Greedy assignment in all divisions at once.

        Args:
            sizes: (C, G) index of the SP size of each group, -1 where there is none.
            target_s: No group may take longer; None: any time, and earliest end first.

        Returns:
            (C,) seconds of the slowest group of each division, infinite where the samples do not
            fit; the best of them, if any.
        """
        num_divisions = len(sizes)
        end = self.fixed_s[sizes]
        room = self.budgets[sizes].copy()
        chosen = np.empty((self.order.size, len(sizes)), dtype=np.int64)
        rows = np.arange(len(sizes))
        active = rows
        for step, i in enumerate(self.order.tolist()):
            length = self.lengths[i]
            after = end + self.seconds[sizes, i]
            fits = room >= length
            if target_s is None:
                score = after
            else:
                # Least spent first; among equal groups the fullest that can still take it.
                fits &= after <= target_s
                score = self.spent[sizes, i] * (1 - 1e-6 * np.minimum(after / target_s, 1.0))
            score = np.where(fits, score, np.inf)
            group = np.argmin(score, axis=1)
            local = np.arange(len(sizes))
            possible = score[local, group] < np.inf
            if not possible.all():
                if not possible.any():
                    return np.full(num_divisions, np.inf), None
                sizes, end, room, after = (a[possible] for a in (sizes, end, room, after))
                group, active = group[possible], active[possible]
                local = np.arange(len(sizes))
            end[local, group] = after[local, group]
            room[local, group] -= length
            chosen[step, active] = group
        used = np.zeros(sizes.shape, dtype=np.bool_)
        np.put_along_axis(used, chosen[:, active].T, True, axis=1)
        makespans = np.where(used, end, 0.0).max(axis=1)
        winner = int(np.argmin(makespans))
        groups: dict[int, list[int]] = {}
        for i, group_index in zip(self.order.tolist(), chosen[:, active[winner]], strict=True):
            groups.setdefault(int(group_index), []).append(i)
        assignment = [(int(sizes[winner, g]), members) for g, members in groups.items()]
        of_all = np.full(num_divisions, np.inf)
        of_all[active] = makespans
        return of_all, (float(makespans[winner]), assignment)

"""FlexSP: heterogeneous SP groups by mixed-integer programming (arXiv 2412.01523).

1. Sort the samples and cut them into M consecutive micro-batches with the least largest number of
   tokens (its "sequence blaster"); try several M from the smallest that fits.
2. Sort each micro-batch's samples into a few buckets with the least deviation from their longest.
3. Choose SP groups and how many samples of each bucket each group packs, so that the slowest group
   is done earliest: a mixed-integer linear program.

Recomputation is one static setting, tuned from outside. What is added in favour of FlexSP:
the program starts from the bound of a greedy assignment and falls back on it; micro-batches do not
wait for each other (:func:`~lightning_dcp.simulation.steps.place_in_parts`); costs are measured
rather than its fitted law. The solver's time is not counted. Because of its time limit the result
may differ from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.simulation.baselines.chunking import blast, bucket_tops, mix
from lightning_dcp.simulation.baselines.packing import PackedCosts
from lightning_dcp.simulation.baselines.tuning import (
    Steps,
    best_settings,
    longest_of,
    recompute_candidates,
)
from lightning_dcp.simulation.baselines.warm_start import Assignment, greedy
from lightning_dcp.simulation.steps import SimulatedStep, Unplaced, place_in_parts

__all__ = ["flexsp_step", "solve_micro_batch", "tune_flexsp"]

_GAP = 0.002  # relative; a better bound than this is not worth the solver's time


def flexsp_step(
    lengths: Sequence[int] | IntArray,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    *,
    recompute_blocks: int | None = None,
    time_limit_s: float = 2.0,
    num_buckets: int = 16,
    num_trials: int = 5,
    sort: bool = True,
) -> SimulatedStep:
    """Plan one step as FlexSP does.

    Args:
        lengths: The step's lengths.
        costs: Predicts seconds and bytes.
        world_size: Ranks W.
        limit_bytes: Memory limit per rank.
        recompute_blocks: Blocks recomputed; None: the fewest with which the longest sample fits.
        time_limit_s: Seconds of the solver per micro-batch; 0: the greedy assignment only.
        num_buckets: Buckets per micro-batch.
        num_trials: Numbers of micro-batches M to try, from the smallest that fits. The greedy
            assignment chooses among them, the solver works on the best one.
        sort: Whether micro-batches are cut from the sorted samples, as the paper does. False:
            each has the mix of the whole step, which suits models whose long samples need no more
            ranks than short ones.

    Raises:
        ValueError: A sample fits nowhere.
    """
    prices = PackedCosts(costs, lengths, world_size, limit_bytes, recompute_blocks)
    n = prices.lengths.size
    capacity = max(tokens * (world_size // p) for p, tokens in prices.budgets.items())
    num_parts = min(n, -(-int(prices.lengths.sum()) // capacity))
    best: SimulatedStep | None = None
    best_parts: list[IntArray] = []
    best_rounds: list[list[Unplaced]] = []
    trials = 0
    # With one sample each, micro-batches fit for certain.
    while num_parts <= n and trials < num_trials:
        parts = (blast if sort else mix)(prices.lengths, num_parts)
        rounds = _greedy_rounds(prices, parts)
        if rounds is not None:
            trials += 1
            step = place_in_parts(world_size, rounds)
            if best is None or step.makespan_s < best.makespan_s:
                best, best_parts, best_rounds = step, parts, rounds
        num_parts += 1
    assert best is not None
    if time_limit_s <= 0:
        return best
    solved = list(best_rounds)
    for k, part in enumerate(best_parts):
        groups = solve_micro_batch(prices, part, time_limit_s=time_limit_s, num_buckets=num_buckets)
        if groups is None:
            continue
        solved[k] = groups
        # A quicker round may spend more GPU-seconds, which delays the others.
        with_it = place_in_parts(world_size, [*best_rounds[:k], groups, *best_rounds[k + 1 :]])
        if with_it.makespan_s < best.makespan_s:
            best = with_it
            best_rounds[k] = groups
    return min(best, place_in_parts(world_size, solved), key=lambda step: step.makespan_s)


def tune_flexsp(
    steps: Steps,
    costs: Costs,
    world_size: int,
    limit_bytes: int,
    *,
    longest: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Best static r and sorting of :func:`flexsp_step`, by its greedy assignment.

    Raises:
        ValueError: A sample fits nowhere.
    """
    most = longest or longest_of(steps)
    candidates = [
        {**settings, "time_limit_s": 0.0, "recompute_blocks": r, "sort": sort}
        for r in recompute_candidates(costs, most, world_size, limit_bytes)
        for sort in (True, False)
    ]
    best = best_settings(flexsp_step, steps, costs, world_size, limit_bytes, candidates)
    return {**settings, "recompute_blocks": best["recompute_blocks"], "sort": best["sort"]}


def _greedy_rounds(prices: PackedCosts, parts: Sequence[IntArray]) -> list[list[Unplaced]] | None:
    rounds = []
    for part in parts:
        groups = solve_micro_batch(prices, part, time_limit_s=0.0)
        if groups is None:
            return None
        rounds.append(groups)
    return rounds


def solve_micro_batch(
    prices: PackedCosts, samples: IntArray, *, time_limit_s: float, num_buckets: int = 16
) -> list[Unplaced] | None:
    """Groups for the samples of one micro-batch; None where greedy finds none that fit."""
    lengths = prices.lengths[samples]
    world_size = prices.world_size
    tokens = int(lengths.sum())
    linear = [prices.linear_s(p, tokens * p // world_size) for p in prices.sp_sizes]
    seconds = np.stack([per_sample[samples] for per_sample, _ in linear])
    fixed_s = np.array([fixed for _, fixed in linear])
    budgets = np.array([prices.budgets[p] for p in prices.sp_sizes])
    start = greedy(lengths, seconds, fixed_s, prices.sp_sizes, budgets.tolist(), world_size)
    if start is None:
        return None
    best = _price(prices, samples, start[1])
    if time_limit_s <= 0:
        return best
    solution = _solve(
        lengths,
        seconds,
        fixed_s,
        np.array(prices.sp_sizes),
        budgets,
        world_size,
        num_buckets,
        start[0],
        time_limit_s,
    )
    if solution is not None:
        found = _price(prices, samples, solution)
        best = min(best, found, key=lambda groups: max(group.time_s for group in groups))
    return best


def _price(prices: PackedCosts, samples: IntArray, assignment: Assignment) -> list[Unplaced]:
    groups = [samples[np.array(members)].tolist() for _, members in assignment]
    return prices.price(groups, [prices.sp_sizes[size] for size, _ in assignment])


def _solve(
    lengths: IntArray,
    seconds: npt.NDArray[np.float64],
    fixed_s: npt.NDArray[np.float64],
    sp_sizes: IntArray,
    budgets: IntArray,
    world_size: int,
    num_buckets: int,
    bound_s: float,
    time_limit_s: float,
) -> Assignment | None:
    """The program; K buckets, G candidate groups, columns ``A[k, g]``, ``m[g]``, ``C``.

    Minimise C, the seconds of the slowest group, where group g takes ``A[k, g]`` samples of bucket
    k and exists if ``m[g] = 1``. Memory counts a bucket's longest, time its mean. Equal groups
    are interchangeable, which a solver cannot see: the ones used must be the first of their size
    and in the order of their seconds. ``bound_s``, the greedy result, tightens all rows.
    """
    tops = bucket_tops(lengths, num_buckets)
    bucket = np.searchsorted(tops, lengths)
    num = np.bincount(bucket, minlength=tops.size)
    mean_s = np.stack([np.bincount(bucket, row) / num for row in seconds])  # (P, K)
    copies = np.minimum(world_size // sp_sizes, lengths.size)
    size = np.repeat(np.arange(sp_sizes.size), copies)  # (G,) index of the SP size
    num_groups, num_tops = size.size, tops.size
    num_counts = num_tops * num_groups
    # Seconds in units of the bound, tokens in units of a group's budget: all near 1.
    time = mean_s[size].T / bound_s  # (K, G)
    fixed = fixed_s[size] / bound_s
    share = tops[:, None] / budgets[size][None, :]
    ranks = sp_sizes[size]

    eye = sparse.identity(num_groups, format="csr")
    per_group = [sparse.diags(row, format="csr") for row in time]
    none = sparse.csr_matrix((num_groups, 1))
    time_rows = sparse.hstack([*per_group, sparse.diags(fixed)])  # (G, K G + G) seconds
    rows = [
        # Every sample once.
        (
            sparse.hstack(
                [
                    sparse.kron(sparse.identity(num_tops), np.ones((1, num_groups))),
                    sparse.csr_matrix((num_tops, num_groups + 1)),
                ]
            ),
            num,
            num,
        ),
        # Seconds of a group within C, and within the bound if it exists, else nothing in it.
        (sparse.hstack([time_rows, -np.ones((num_groups, 1))]), -np.inf, 0.0),
        (sparse.hstack([*per_group, sparse.diags(fixed - 1.0), none]), -np.inf, 0.0),
        # Tokens within the budget.
        (sparse.hstack([*(sparse.diags(row) for row in share), -eye, none]), -np.inf, 0.0),
        # Ranks; and their seconds within W C, which no combination of the rows above says.
        (np.concatenate([np.zeros(num_counts), ranks, [0.0]])[None, :], -np.inf, world_size),
        (
            sparse.hstack(
                [sparse.csr_matrix(ranks[None, :]) @ time_rows, np.full((1, 1), -float(world_size))]
            ),
            -np.inf,
            0.0,
        ),
    ]
    follows = np.flatnonzero(size[1:] == size[:-1])
    if follows.size:
        order = sparse.csr_matrix(
            (
                np.tile([1.0, -1.0], follows.size),
                (
                    np.repeat(np.arange(follows.size), 2),
                    np.stack([follows + 1, follows], 1).ravel(),
                ),
            ),
            shape=(follows.size, num_groups),
        )
        rows.append(
            (sparse.hstack([order @ time_rows, sparse.csr_matrix((follows.size, 1))]), -np.inf, 0.0)
        )
    most = np.where(share <= 1, num[:, None], 0)
    upper = np.concatenate([most.ravel(), np.ones(num_groups), [1.0]])
    objective = np.zeros(num_counts + num_groups + 1)
    objective[-1] = 1.0
    integrality = np.ones_like(objective)
    integrality[-1] = 0
    result = milp(
        objective,
        integrality=integrality,
        bounds=Bounds(np.zeros_like(objective), upper),
        constraints=[LinearConstraint(sparse.csr_matrix(a), lo, hi) for a, lo, hi in rows],
        options={"time_limit": time_limit_s, "mip_rel_gap": _GAP},
    )
    if result.x is None:
        return None
    counts = np.rint(result.x[:num_counts]).astype(np.int64).reshape(num_tops, num_groups)
    return _members(lengths, seconds, bucket, counts, size)


def _members(
    lengths: IntArray,
    seconds: npt.NDArray[np.float64],
    bucket: IntArray,
    counts: IntArray,
    size: IntArray,
) -> Assignment:
    """Which samples: a bucket's longer ones go to the groups that are done earlier."""
    groups: list[list[int]] = [[] for _ in size]
    left = counts.copy()
    busy = np.zeros(size.size)
    for i in np.argsort(-lengths, kind="stable").tolist():
        open_ = np.flatnonzero(left[bucket[i]] > 0)
        g = int(open_[np.argmin(busy[open_] + seconds[size[open_], i])])
        groups[g].append(i)
        left[bucket[i], g] -= 1
        busy[g] += seconds[size[g], i]
    return [(int(p), members) for p, members in zip(size, groups, strict=True) if members]

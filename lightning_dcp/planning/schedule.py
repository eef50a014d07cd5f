"""One epoch's micro-batches: who runs which samples in which iteration.

Elastic iterations are in ``elastic.py``; here are those of a static baseline, and the last one of
an epoch, which takes all that is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lightning_dcp.planning.elastic import ElasticEpoch
from lightning_dcp.planning.queues import BucketConfig, Queues, Schedule, Taken, Waiting

__all__ = ["schedule_epoch"]


def schedule_epoch(
    queues: Queues,
    configs: Sequence[BucketConfig],
    *,
    world_size: int,
    num_iterations: int,
    min_steps: int,
    max_steps: int,
    pad_multiple: int,
    step_overhead_s: float,
    elastic: bool,
    lead: int,
) -> Schedule:
    """Schedule all samples of the queues in exactly ``num_iterations`` iterations.

    Args:
        queues: The samples.
        configs: One per bucket.
        world_size: Ranks W.
        num_iterations: N, at most the number of samples.
        min_steps: Gmin.
        max_steps: Gmax (the last iteration takes what is left, whatever it is).
        pad_multiple: Further multiple to pad to.
        step_overhead_s: Seconds per iteration besides the micro-batches.
        elastic: False: a static baseline; groups of one SP size take turns, none waits for a
            better fit, and nothing is chosen by cost.
        lead: How many places a queue may be ahead of the earliest waiting sample.
    """
    if elastic:
        state: Waiting = ElasticEpoch(
            queues,
            configs,
            world_size=world_size,
            pad_multiple=pad_multiple,
            lead=lead,
            min_steps=min_steps,
            max_steps=max_steps,
            step_overhead_s=step_overhead_s,
        )
    else:
        state = Waiting(queues, configs, world_size, pad_multiple)
    for left in range(num_iterations, 1, -1):
        if isinstance(state, ElasticEpoch):
            state.iteration(left)
        else:
            _static_iteration(state, left)
    _last_iteration(state, elastic)
    return state.out


def _static_iteration(state: Waiting, left: int) -> None:
    """Groups of one SP size take turns, in the order of the epoch."""
    target = state.tokens_left / left
    state.budget = state.samples_left - (left - 1)
    p = state.configs[0].sp_size
    tokens = wave = 0
    # Whole waves, so that all groups accumulate equally; the last one if that is nearer.
    while state.budget > 0 and (wave == 0 or tokens + 0.5 * tokens / wave < target):
        wave += 1
        for first_rank in range(0, state.world_size - p + 1, p):
            if state.budget <= 0:
                break
            k = min(range(len(state.heads)), key=state.heads.__getitem__)
            count = min(
                state.configs[k].batch_sizes[p], state.sizes[k] - state.next[k], state.budget
            )
            taken = state.take(k, p, count, 0.0)
            state.emit(taken, first_rank)
            tokens += taken[5]
    state.out.offsets.append(len(state.out.bucket))


def _last_iteration(state: Waiting, elastic: bool) -> None:
    """All that is left, longest first onto the ranks that are free first.

    Smaller micro-batches and larger groups are tried too: what is left may be too little to
    give every rank a micro-batch of the usual size.
    """
    best: list[tuple[Taken, int]] = []
    best_s = math.inf
    for divisor, factor in _variants(state) if elastic else ((1, 1),):
        parts = _split_rest(state, divisor, factor, sorted_by_cost=elastic)
        placed, makespan = _place(state, parts)
        if makespan < best_s * (1 - 1e-6):
            best, best_s = placed, makespan
    for taken, first_rank in best:
        state.emit(taken, first_rank)
    state.out.offsets.append(len(state.out.bucket))


def _variants(state: Waiting) -> list[tuple[int, int]]:
    most = max(
        (min(state.sizes[k] - state.next[k], max(config.batch_sizes.values())))
        for k, config in enumerate(state.configs)
    )
    divisors = [2**i for i in range(max(1, most).bit_length() + 1)]
    factors = [2**i for i in range(state.world_size.bit_length())]
    if state.samples_left > 16 * state.world_size:  # enough for everyone as it is
        divisors, factors = divisors[:3], factors[:1]
    return [(d, f) for f in factors for d in divisors]


def _split_rest(state: Waiting, divisor: int, factor: int, sorted_by_cost: bool) -> list[Taken]:
    parts = []
    before = list(state.next), state.heads, state.samples_left, state.tokens_left
    state.heads = list(state.heads)
    for k, config in enumerate(state.configs):
        fitting = [p for p in config.tables if p <= max(config.sp_size, 1) * factor]
        p = max([q for q in fitting if q >= config.sp_size], default=config.sp_size)
        size = max(1, config.batch_sizes[p] // divisor)
        while state.next[k] < state.sizes[k]:
            count = min(size, state.sizes[k] - state.next[k])
            parts.append(state.take(k, p, count, state.seconds(k, p, count)))
    state.next, state.heads, state.samples_left, state.tokens_left = before
    if sorted_by_cost:
        parts.sort(key=lambda taken: (-taken[3], -taken[4]))
    else:  # a static baseline keeps the order of the epoch
        parts.sort(key=lambda taken: state.queues.positions[taken[0]][taken[1]])
    return parts


def _place(state: Waiting, parts: list[Taken]) -> tuple[list[tuple[Taken, int]], float]:
    free = np.zeros(state.world_size)
    placed = []
    for taken in parts:
        p = taken[3]
        blocks = free[: state.world_size // p * p].reshape(-1, p).max(axis=1)
        block = int(np.argmin(blocks))
        free[block * p : (block + 1) * p] = blocks[block] + taken[4]
        placed.append((taken, block * p))
    return placed, float(free.max())

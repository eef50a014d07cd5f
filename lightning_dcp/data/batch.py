"""What travels through the train loader: keys in, samples in the worker, micro-batches out.

All three are named tuples at module level, so that they pickle under every start method and so that
`DataLoader`'s pinning and Lightning's transfer walk through them without help.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class PlanKey(NamedTuple):
    """What the sampler asks the loader for: one iteration's samples of one rank.

    Attributes:
        epoch: Epoch the plan belongs to.
        iteration: Index of the iteration within the epoch.
        sample_ids: Sample ids of each micro-batch of this rank, in plan order. Empty for a rank
            that has nothing to run in this iteration.
        rng_keys: What random numbers are keyed by while a micro-batch is read and collated; alike
            on all ranks that run it. Empty where they are not managed.
        version: How often the plans were replaced before it was made.
    """

    epoch: int
    iteration: int
    sample_ids: tuple[tuple[int, ...], ...]
    rng_keys: tuple[tuple[int, ...], ...] = ()
    version: int = 0


class IterationSamples(NamedTuple):
    """Raw samples of one iteration, in a worker, before the user's collate function.

    Attributes:
        epoch: Epoch the plan belongs to.
        iteration: Index of the iteration within the epoch.
        samples: One list of samples per micro-batch.
        rng_keys: As in `PlanKey`.
        version: As in `PlanKey`.
    """

    epoch: int
    iteration: int
    samples: list[list[Any]]
    rng_keys: tuple[tuple[int, ...], ...] = ()
    version: int = 0


class IterationBatch(NamedTuple):
    """What the train loader yields: all micro-batches of one rank in one iteration.

    Attributes:
        epoch: Epoch the plan belongs to. Compare it with the epoch in which the batch is used: a
            worker may have fetched it before the epoch was known.
        iteration: Index of the iteration within the epoch; `planner.epoch(epoch)[iteration]` is the
            plan it was made for.
        micro_batches: What the user's collate function made of each micro-batch, in plan order; a
            `PackedBatch` where samples are packed. Empty for a rank that has nothing to run.
        version: As in `PlanKey`: another than the sampler's means plans that are not followed any
            more.
    """

    epoch: int
    iteration: int
    micro_batches: list[Any]
    version: int = 0

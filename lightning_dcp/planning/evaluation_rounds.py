"""Filling the ranks of one Trainer batch of an evaluation; cutting samples into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_dcp.planning.layout import Layout

__all__ = ["Round", "balanced_runs", "greedy_runs"]


class Round:
    """A Trainer batch while it is being filled, from rank 0 on.

    Wide pieces come first, so that every block is aligned: sizes are powers of two, and what is
    taken is a multiple of the size that comes next.
    """

    def __init__(self, layout: Layout) -> None:
        self.free = layout.world_size
        self._layout = layout
        self.placed: list[tuple[list[int], int, int]] = []

    def has_room(self, sp_size: int) -> bool:
        """Whether the next free ranks are a block of this size."""
        return self._layout.world_size - self.free + sp_size <= self._layout.stop(sp_size)

    def place(self, ids: list[int], sp_size: int) -> None:
        """Put a piece onto the next free ranks."""
        self.placed.append((ids, self._layout.world_size - self.free, sp_size))
        self.free -= sp_size


def greedy_runs(
    padded: Sequence[int], most_tokens: int, most_samples: Callable[[int], int]
) -> list[tuple[int, int]]:
    """Cut samples, longest first, into as few runs as limits on tokens and samples allow."""
    runs = []
    first = 0
    while first < len(padded):
        size = min(most_tokens // padded[first], most_samples(padded[first]))
        last = min(len(padded), first + max(1, size))
        runs.append((first, last))
        first = last
    return runs


def balanced_runs(
    padded: Sequence[int], num_runs: int, most_samples: Callable[[int], int]
) -> list[tuple[int, int]]:
    """Cut samples, longest first, into at most ``num_runs`` runs whose largest ``b * s`` is least.

    Exact: runs of sorted samples are best, the fewest runs for a given bound are found by going
    from the longest on, and the bound by bisection. What is left of ``num_runs`` halves the
    largest ones. ``num_runs`` must suffice for ``most_samples``.
    """
    low, high = padded[0] - 1, padded[0] * len(padded)
    while high - low > 1:
        middle = (low + high) // 2
        if len(greedy_runs(padded, middle, most_samples)) <= num_runs:
            high = middle
        else:
            low = middle
    runs = greedy_runs(padded, high, most_samples)
    while len(runs) < min(num_runs, len(padded)):
        at = max(
            (i for i, (first, last) in enumerate(runs) if last - first > 1),
            key=lambda i: (runs[i][1] - runs[i][0]) * padded[runs[i][0]],
        )
        first, last = runs[at]
        middle = (first + last) // 2
        runs[at : at + 1] = [(first, middle), (middle, last)]
    return runs

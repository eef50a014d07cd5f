"""Plans of a stream, whose samples become known window by window.

Buckets, costs and the configuration come from a planner of samples seen so far; each window is then
scheduled by it as a part of an epoch is. Longer samples than were seen so far make a new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_dcp.planning.drift import CorrectedCosts, Corrections, uncorrected
from lightning_dcp.planning.epoch import EpochPlan
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.options import OnTooLong
from lightning_dcp.planning.planner import EpochPlanner

__all__ = ["StreamPlanner", "reference_lengths"]

_MAX_REFERENCE = 4096
_AHEAD = 1.25


def reference_lengths(lengths: IntArray) -> IntArray:
    """Few of many lengths with the same distribution, shortest and longest included."""
    ordered = np.sort(np.asarray(lengths, dtype=np.int64))
    if ordered.size <= _MAX_REFERENCE:
        return ordered
    places = np.linspace(0, ordered.size - 1, _MAX_REFERENCE).round().astype(np.int64)
    return np.asarray(ordered[places])


class StreamPlanner:
    """Plans windows of a stream; alike on all ranks.

    Args:
        planner: Of the first samples; it cuts what is too long, so that any length can be asked.
        on_too_long: What the user wants to become of samples that fit nowhere.
        tokens_per_step: Tokens a step aims at, for the whole run.

    Attributes:
        planner: The one that is used now.
        reference: (n,) the lengths it was made of.
    """

    def __init__(
        self, planner: EpochPlanner, *, on_too_long: OnTooLong, tokens_per_step: int
    ) -> None:
        self.planner = planner
        self.on_too_long = on_too_long
        self.tokens_per_step = tokens_per_step
        self.reference = planner.given_lengths

    @property
    def samples_per_step(self) -> int | None:
        """Samples that each step takes, with policy ``"global-batch"``."""
        if self.planner.options.policy != "global-batch":
            return None
        return self.planner.batch_size * self.planner.world_size

    def set_planner(self, planner: EpochPlanner) -> None:
        """Plan the windows that follow by another planner, with corrected costs for example."""
        self.planner = planner
        self.reference = planner.given_lengths

    @property
    def corrections(self) -> dict[str, Any] | None:
        """For a checkpoint: how costs differ from the profile; None where they do not."""
        corrections = self.planner.corrections
        return None if corrections.changes_nothing else corrections.to_plain()

    def set_corrections(self, plain: Mapping[str, Any], cost_profile: str) -> None:
        """Take up the corrections of a checkpoint, if they belong to this run's cost profile.

        Args:
            plain: What `corrections` gave.
            cost_profile: What the planner's inputs called the corrected costs.
        """
        corrections = Corrections.from_plain(plain)
        costs = CorrectedCosts(uncorrected(self.planner.cost_model), corrections)
        if costs.fingerprint()[:16] == cost_profile:
            try:
                planner = self.planner.corrected(corrections)
            except ValueError:  # with less memory than before a sample would not fit any more
                return
            self.set_planner(planner)

    def set_reference(self, lengths: IntArray) -> None:
        """Plan by the lengths that an interrupted run had seen."""
        if not np.array_equal(lengths, self.reference):
            self.set_planner(self.planner.with_lengths(lengths))

    def fit(self, lengths: IntArray) -> IntArray:
        """Lengths as planned, 0 for samples to be left out.

        Raises:
            TooLong: A sample fits nowhere, and is neither to be left out nor cut.
        """
        unknown = ~self.planner.covers(lengths)
        if unknown.any():
            more = np.unique(lengths[unknown])
            longest = int(more[-1])
            if longest > int(self.reference.max()):
                # The next record is often not far: a planner is not made for each.
                more = np.append(more, int(longest * _AHEAD))
            self.set_planner(self.planner.with_lengths(np.concatenate([self.reference, more])))
        most = self.planner.truncate_to
        if most is None or int(lengths.max()) <= most:
            return lengths
        if self.on_too_long == "error":
            raise TooLong(int(np.argmax(lengths)), most)
        if self.on_too_long == "truncate":
            return np.minimum(lengths, most)
        return np.where(lengths > most, 0, lengths)

    def num_steps(self, lengths: IntArray, *, rest: bool) -> int:
        """Steps that samples are enough for.

        Args:
            lengths: As planned.
            rest: They are the last: none may be left.
        """
        steps = self.planner.window_steps(lengths)
        if rest:
            return steps
        size = self.samples_per_step
        if size is not None:
            return lengths.size // size
        if self._follows_accumulation:
            return steps if int(lengths.sum()) >= self.tokens_per_step else 0
        return min(steps, int(lengths.sum()) // self.tokens_per_step)

    @property
    def _follows_accumulation(self) -> bool:
        """Whether Gmin or Gmax make steps of another size than that aimed at."""
        options = self.planner.options
        return options.min_accumulation > 1 or options.max_accumulation is not None

    def plan(
        self,
        lengths: IntArray,
        ids: IntArray,
        *,
        epoch: int,
        first_iteration: int,
        num_steps: int,
        rest: bool,
    ) -> EpochPlan:
        """Plan a window, in the order given.

        Args:
            lengths: (n,) as planned, all of them positive.
            ids: (n,) what plans call the samples.
            epoch: From 0.
            first_iteration: Number of the first plan.
            num_steps: Number of plans.
            rest: Whether all samples are to be taken; else the last may be left out.
        """
        if not rest:
            size = self.samples_per_step
            last = lengths.size
            if size is not None:
                last = num_steps * size
            elif not self._follows_accumulation:
                wanted = num_steps * self.tokens_per_step
                last = max(num_steps, int(np.searchsorted(np.cumsum(lengths), wanted)) + 1)
            lengths, ids = lengths[:last], ids[:last]
        return self.planner.window(
            lengths,
            ids,
            epoch=epoch,
            first_iteration=first_iteration,
            num_iterations=num_steps,
        )


class TooLong(ValueError):
    """A sample fits nowhere.

    Attributes:
        place: In the lengths that were given.
        most: The longest length that fits.
    """

    def __init__(self, place: int, most: int) -> None:
        super().__init__(f"Sample {place} is longer than {most} tokens, the most that fit.")
        self.place = place
        self.most = most

"""When costs that turned out otherwise are worth another plan.

Every few iterations ranks exchange what micro-batches took (:mod:`.slowness`). What is decided here
depends on nothing but these numbers, so that all ranks decide alike without a word more.

    corrected   where a bucket or a rank is off in several exchanges in a row, by more than noise
                explains, and relative to the others: what makes everything slower by the same
                factor needs no other plan
    tried       not soon after the last time, not often in one epoch, not where planning takes
                longer than could be won
    taken       where the new plans are predicted to be quicker than the old, both by the new costs
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_dcp.planning.drift import Corrections
from lightning_dcp.planning.epoch import EpochPlan
from lightning_dcp.planning.fitting import FloatArray
from lightning_dcp.planning.planner import EpochPlanner
from lightning_dcp.planning.slowness import Slowness, weighted_median

__all__ = ["LEAST_GAIN", "SLOW_RANK", "DriftMonitor", "Gain"]

LEAST_GAIN = 0.05
"""Share of the predicted time that new plans must save."""

SLOW_RANK = 1.3
"""Factor from which a rank that stays so slow is worth a warning."""

_SPANS = (3, 6)  # the latest windows that are looked at together
_CERTAIN = 5.0  # standard errors that a factor must be off by, for any to be corrected,
_UNCERTAIN = 2.0  # and by which each is corrected less than it seems to be off
_BUCKET_OFF = math.log(1.12)
_RANK_OFF = math.log(1.15)
_LEAST_WORK = 0.02  # share of the seconds: buckets with less matter little
_LARGEST = math.log(64.0)  # of one correction
_MOST_TRIES = 6  # per epoch
_COOL_DOWN = 2  # windows; twice as many after each try that was not taken
_PLANNING_SHARE = 0.5  # of what is won, that planning may take


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What is to come, by the plans that are followed and by others, under the same costs.

    Attributes:
        old_s: Predicted seconds by the plans that are followed.
        new_s: By the new ones.
    """

    old_s: float
    new_s: float

    @classmethod
    def of(cls, planner: EpochPlanner, old: EpochPlan, new: EpochPlan, done: int = 0) -> Gain:
        """Compare plans of the same samples by the costs of ``planner``.

        Args:
            planner: Made with the corrections; ``new`` is its.
            old: Followed so far.
            new: Would be followed instead.
            done: How many plans of ``old`` have been run.
        """
        costs, speed = planner.cost_model, planner.place_speed

        def seconds(plans: EpochPlan, first: int) -> float:
            steps_s = plans.makespan_by(costs, speed)[first:]
            return float(steps_s.sum()) + costs.step_overhead_s * steps_s.size

        return cls(old_s=seconds(old, done), new_s=seconds(new, 0))

    @property
    def speedup(self) -> float:
        """Old seconds / new seconds."""
        return self.old_s / self.new_s if self.new_s > 0 else 1.0

    def is_worth(self, planning_s: float) -> bool:
        """Whether it is enough, given what planning takes."""
        won = self.old_s - self.new_s
        return won > LEAST_GAIN * self.old_s and planning_s <= _PLANNING_SHARE * won


class DriftMonitor:
    """Follows how slow buckets and ranks are, and says when to plan again.

    Args:
        adapt_buckets: Whether buckets are corrected.
        adapt_ranks: Whether ranks are.

    Attributes:
        shown: What was found last, ranks relative to each other whatever plans say of them; None
            before anything was.
    """

    def __init__(self, *, adapt_buckets: bool = True, adapt_ranks: bool = False) -> None:
        self.adapt_buckets = adapt_buckets
        self.adapt_ranks = adapt_ranks
        self.shown: Slowness | None = None
        self._speeds: list[tuple[tuple[float, ...], tuple[float, ...]]] = []  # shown lately, errors
        self._recent: list[Slowness] = []  # the last windows under the plans followed now
        self._wait = 0
        self._pause = _COOL_DOWN
        self._tries = 0

    def begin_epoch(self) -> None:
        """A new epoch: a few tries more."""
        self._tries = 0

    def observe(self, slowness: Slowness, corrections: Corrections) -> None:
        """Take up a window of iterations.

        Args:
            slowness: Relative to the plans followed now.
            corrections: Those that these plans were made with.
        """
        self._recent = [*self._recent, slowness][-max(_SPANS) :]
        self._wait = max(0, self._wait - 1)
        self.shown = slowness
        if corrections.rank_speed:
            speed, _ = _level(np.array(slowness.ranks) * np.array(corrections.rank_speed))
            self.shown = replace(slowness, ranks=tuple(speed.tolist()))
        self._speeds = [*self._speeds, (self.shown.ranks, slowness.rank_errors)][-min(_SPANS) :]

    def forget(self) -> None:
        """Other plans are followed now: what was observed was relative to the ones before."""
        self._recent = []

    @property
    def slow_rank(self) -> tuple[int, float] | None:
        """A rank that has been much slower than the others for several windows, and how much."""
        if len(self._speeds) < min(_SPANS):
            return None
        ranks, errors = (np.array(values) for values in zip(*self._speeds, strict=True))
        seen = _Seen.of(np.log(ranks), errors)
        slow = np.where(seen.off(math.log(SLOW_RANK)), seen.mean, 0.0)
        rank = int(np.argmax(slow))
        return (rank, math.exp(slow[rank])) if slow[rank] > 0 else None

    def proposal(self, corrections: Corrections) -> Corrections | None:
        """Corrections that may be worth new plans; None where nothing asks for any.

        Args:
            corrections: Those that the plans followed now were made with.
        """
        if self._wait or self._tries >= _MOST_TRIES:
            return None
        for span in _SPANS:
            if len(self._recent) >= span:
                found = self._found(self._recent[-span:], corrections)
                if found is not None:
                    return found
        return None

    def _found(self, windows: Sequence[Slowness], corrections: Corrections) -> Corrections | None:
        """What some windows say together; None where that is not certain."""
        work = np.mean([window.work for window in windows], axis=0)
        buckets = np.log([window.buckets for window in windows])
        # Relative to what is typical: for all slower alike there is no better plan.
        level = np.array([[_median(row, work)] for row in buckets])
        seen = _Seen.of(buckets - level, np.array([w.bucket_errors for w in windows]))
        ranks = _Seen.of(
            np.log([window.ranks for window in windows]),
            np.array([window.rank_errors for window in windows]),
        )
        off = seen.off(_BUCKET_OFF) & (work >= _LEAST_WORK) & self.adapt_buckets
        if not (off.any() or (self.adapt_ranks and ranks.off(_RANK_OFF).any())):
            return None
        found = corrections
        if self.adapt_buckets:
            terms = float(np.median(level)) + _filled(seen.certain())
            factors = np.array(corrections.time_factors) * np.exp(terms)
            found = replace(found, time_factors=tuple(factors.tolist()))
        if self.adapt_ranks:
            terms = np.nan_to_num(ranks.certain())
            speed = np.array(corrections.rank_speed or (1.0,) * terms.size) * np.exp(terms)
            speed, typical = _level(speed)
            even = bool((speed == 1.0).all())
            found = replace(
                found,
                time_factors=tuple(typical * f for f in found.time_factors),
                rank_speed=() if even else tuple(speed.tolist()),
            )
        return None if found == corrections else found

    def tried(self, *, taken: bool) -> None:
        """New plans were made for the last proposal, and followed or not."""
        self._tries += 1
        self._wait = self._pause
        self._pause = _COOL_DOWN if taken else 2 * self._pause


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """Logarithms of factors over some windows; NaN where one was not seen in all of them.

    Attributes:
        mean: (n,) of the windows.
        error: (n,) standard error of the mean, by what micro-batches of a window or windows differ,
            whichever is more: a load that comes and goes makes windows differ.
        nearest: (n,) the one of the windows that is nearest to 0.
    """

    mean: FloatArray
    error: FloatArray
    nearest: FloatArray

    @classmethod
    def of(cls, terms: FloatArray, errors: FloatArray) -> _Seen:
        """Put (windows, n) together."""
        num = terms.shape[0]
        within = np.sqrt((errors**2).sum(axis=0)) / num
        between = terms.std(axis=0, ddof=1) / math.sqrt(num)
        same_side = (terms > 0).all(axis=0) | (terms < 0).all(axis=0)
        return cls(
            mean=np.clip(terms.mean(axis=0), -_LARGEST, _LARGEST),
            error=np.maximum(within, between),
            nearest=np.where(same_side, np.abs(terms).min(axis=0), 0.0),
        )

    def off(self, least: float) -> npt.NDArray[np.bool_]:
        """(n,) whether it is off for certain, and by more than ``least`` on the whole."""
        far = np.abs(self.mean)
        return np.asarray(
            (far > least) & (far > _CERTAIN * self.error) & (self.nearest > least / 2)
        )

    def certain(self) -> FloatArray:
        """(n,) how far it is off at least: what may be noise is left out."""
        far = np.abs(self.mean) - _UNCERTAIN * self.error
        return np.asarray(np.sign(self.mean) * np.maximum(far, 0.0))


def _filled(terms: FloatArray) -> FloatArray:
    """Buckets that were not seen get what those beside them have."""
    known = np.flatnonzero(~np.isnan(terms))
    return np.interp(np.arange(terms.size), known, terms[known]) if known.size else terms * 0.0


def _median(terms: FloatArray, work: FloatArray) -> float:
    rows = np.flatnonzero(~np.isnan(terms))
    return weighted_median(terms[rows], np.maximum(work[rows], 1e-12)) if rows.size else 0.0


def _level(speed: FloatArray) -> tuple[FloatArray, float]:
    """Relative to the typical rank, and what that has."""
    known = np.sort(speed[~np.isnan(speed)])
    typical = float(known[(known.size - 1) // 2]) if known.size else 1.0
    return speed / typical, typical

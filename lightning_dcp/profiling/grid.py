"""Which points to measure, and which of them can be afforded: pure decisions on numbers.

Every rank takes them by itself, from the same numbers, so that all walk the same trials.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dcp.profiling.options import MIN_BATCH_SIZES, MIN_LENGTHS, ProfilingOptions

NUM_LENGTHS = 8
MAX_BATCH_SIZE = 64
# The smallest lengths of a data set are often a handful of outliers.
_LOWEST_QUANTILE = 0.02
# A forecast from few noisy points; the next trial may turn out this much dearer.
_SAFETY = 1.25
# The blocks' sequence is the data set's if their lengths differ by less than this factor.
_SAME_LENGTH = 1.25


@dataclass(frozen=True)
class Trial:
    """One point of the grid: ``batch_size`` samples of ``seq_len`` tokens on ``sp_size`` ranks."""

    batch_size: int
    seq_len: int
    sp_size: int

    def __str__(self) -> str:
        return f"b={self.batch_size} s={self.seq_len} p={self.sp_size}"


def choose_lengths(
    lengths: np.ndarray, options: ProfilingOptions, num_lengths: int = NUM_LENGTHS
) -> tuple[int, ...]:
    """Lengths to measure at, ascending: spread evenly in log(length) over those of the data set.

    Args:
        lengths: Length of every sample, in tokens.
        options: ``options.lengths`` takes precedence.
        num_lengths: How many, if the data set has as many.

    Returns:
        Lengths that occur in the data set, the longest of all among them.
    """
    if options.lengths is not None:
        return options.lengths
    occurring = np.unique(lengths)
    if len(occurring) <= MIN_LENGTHS:
        return tuple(int(length) for length in occurring)
    low = np.quantile(lengths, _LOWEST_QUANTILE, method="nearest")
    targets = np.geomspace(low, occurring[-1], num_lengths)
    chosen = {int(occurring[np.abs(occurring - target).argmin()]) for target in targets}
    # Many equal lengths leave fewer; the next occurring ones fill up to what a fit needs.
    for length in np.quantile(occurring, np.linspace(0, 1, 2 * num_lengths), method="nearest"):
        if len(chosen) >= MIN_LENGTHS:
            break
        chosen.add(int(length))
    return tuple(sorted(chosen))


def is_shared(length: int, sp_size: int) -> bool:
    """Whether ranks have two tokens each, the least that they are given, without padding."""
    return sp_size == 1 or length >= 2 * sp_size


def mandatory_trials(
    lengths: Sequence[int], sp_sizes: Sequence[int], num_samples: int
) -> tuple[Trial, ...]:
    """Those without which no fit is of use: 1, 2 samples of the shortest lengths and of another.

    The shortest ones differ by noise, and where time allows nothing else, longer samples would seem
    to cost nothing.
    """
    return tuple(
        Trial(batch_size, length, sp_size)
        for sp_size in sp_sizes
        for length in _shortest_and_middle([n for n in lengths if is_shared(n, sp_size)])
        for batch_size in range(1, MIN_BATCH_SIZES + 1)
        if batch_size <= num_samples
    )


def _shortest_and_middle(lengths: Sequence[int]) -> list[int]:
    middle = len(lengths) // 2
    return [*lengths[:MIN_LENGTHS], *([lengths[middle]] if middle >= MIN_LENGTHS else [])]


def climb(lengths: Sequence[int], sp_sizes: Sequence[int]) -> Iterator[Trial]:
    """Upward in length with one sample: long sequences decide about quadratic terms."""
    for length in lengths:
        for sp_size in sp_sizes:
            if is_shared(length, sp_size):
                yield Trial(1, length, sp_size)


def widen(measured: Sequence[int], sp_sizes: Sequence[int], num_samples: int) -> Iterator[Trial]:
    """More samples at lengths measured with one: first 2, then as many as the longest has tokens.

    Between the two lies one more batch size where the gap is wide.
    """
    if not measured:
        return
    rounds: tuple[list[tuple[int, int]], ...] = ([], [], [])
    for length in measured:
        most = min(MAX_BATCH_SIZE, num_samples, max(2, max(measured) // length))
        sizes = dict.fromkeys((2, _power_of_two(most), _power_of_two(int((2 * most) ** 0.5))))
        for turn, batch_size in enumerate(sizes):
            if 2 <= batch_size <= most:
                rounds[turn].append((length, batch_size))
    for turn_pairs in rounds:
        for length, batch_size in turn_pairs:
            for sp_size in sp_sizes:
                if is_shared(length, sp_size):
                    yield Trial(batch_size, length, sp_size)


def between(lengths: np.ndarray, low: int, high: int, num_lengths: int = 8) -> tuple[int, ...]:
    """Occurring lengths above ``low`` and below ``high``, spread evenly in log(length)."""
    inside = np.unique(lengths[(lengths > low) & (lengths < high)])
    if len(inside) == 0:
        return ()
    targets = np.geomspace(low, high, num_lengths + 2)[1:-1]
    return tuple(sorted({int(inside[np.abs(inside - target).argmin()]) for target in targets}))


def true_sizes(
    trials: Sequence[tuple[Trial, tuple[int, ...]]],
    sequence_dim: int | None,
    batch_dim: int | None,
) -> list[tuple[int, int]]:
    """Batch size and length of what really ran, in the data set's own units.

    Batches are of real samples, whose lengths are near those asked for. Where the blocks see about
    as many tokens as were asked for, their count is the truth. Where it is something else
    altogether (a convolution shortens the sequence before the blocks, say), the lengths asked for
    are all that the planner knows.

    Args:
        trials: Each trial with the shape of the blocks' whole input.
        sequence_dim: Dimension of that shape that is the sequence; ``None`` if unknown.
        batch_dim: That which is the batch; ``None`` if unknown.

    Returns:
        ``(batch_size, seq_len)`` of each trial.
    """
    lengths = seen_lengths(trials, sequence_dim) or [trial.seq_len for trial, _ in trials]
    sizes = [trial.batch_size if batch_dim is None else shape[batch_dim] for trial, shape in trials]
    return list(zip(sizes, lengths, strict=True))


def packed_sizes(
    trials: Sequence[tuple[Trial, tuple[int, ...]]], sequence_dim: int | None
) -> list[tuple[int, int]]:
    """The same where b samples of one length are packed into one sequence."""
    asked = [(trial.batch_size, trial.seq_len) for trial, _ in trials]
    if sequence_dim is None:
        return asked
    tokens = [shape[sequence_dim] for _, shape in trials]
    if any(n % trial.batch_size for n, (trial, _) in zip(tokens, trials, strict=True)):
        return asked
    alone = [
        (trial, (n // trial.batch_size,)) for n, (trial, _) in zip(tokens, trials, strict=True)
    ]
    lengths = seen_lengths(alone, 0) or [trial.seq_len for trial, _ in trials]
    return [(trial.batch_size, n) for n, (trial, _) in zip(lengths, trials, strict=True)]


def seen_lengths(
    trials: Sequence[tuple[Trial, tuple[int, ...]]], sequence_dim: int | None
) -> list[int] | None:
    """Tokens that the blocks saw in each trial, if that is about as many as were asked for."""
    if sequence_dim is None:
        return None
    seen = [shape[sequence_dim] for _, shape in trials]
    added = {n - trial.seq_len for n, (trial, _) in zip(seen, trials, strict=True)}
    if len(added) == 1 and len(set(seen)) > 1:
        return None  # tokens that every sample has besides its own, such as those of an image
    ratio = float(np.median([n / t.seq_len for n, (t, _) in zip(seen, trials, strict=True)]))
    return seen if 1 / _SAME_LENGTH <= ratio <= _SAME_LENGTH else None


def _power_of_two(number: int) -> int:
    """The largest power of two that is not above ``number`` (at least 1)."""
    return 1 << (max(1, number).bit_length() - 1)


class Forecast:
    """Predict a quantity of a trial from the trials before it.

    Non-negative least squares on ``1, b*s/p, b*s**2/p`` per SP size, the last once more for b > 1,
    relative errors equally weighted. An SP size that has too few points is taken to gain nothing
    over ``p = 1``: too pessimistic for time and memory alike, which is the safe side.
    """

    def __init__(self) -> None:
        self._points: dict[int, list[tuple[Trial, float]]] = {}

    def add(self, trial: Trial, value: float) -> None:
        """Note that ``trial`` took ``value`` (seconds or bytes)."""
        self._points.setdefault(trial.sp_size, []).append((trial, max(value, 1e-9)))

    def predict(self, trial: Trial) -> float | None:
        """Expected value with a margin, or ``None`` before the first point."""
        for sp_size in (trial.sp_size, 1):
            points = self._points.get(sp_size, [])
            # Fewer lengths cannot tell linear from quadratic.
            if len({point.seq_len for point, _ in points}) >= MIN_LENGTHS:
                as_measured = Trial(trial.batch_size, trial.seq_len, sp_size)
                return _SAFETY * _fit_and_evaluate(points, as_measured)
        points = self._points.get(1, [])
        return _SAFETY * max((_scaled(*point, trial) for point in points), default=0.0) or None


def _scaled(point: Trial, value: float, trial: Trial) -> float:
    """The value of ``point`` if all of it grew with the square of the length."""
    growth = trial.seq_len / point.seq_len
    return value * max(1.0, trial.batch_size / point.batch_size * growth * growth)


def _fit_and_evaluate(points: Sequence[tuple[Trial, float]], trial: Trial) -> float:
    from scipy.optimize import nnls  # late: importing the package stays cheap

    values = np.array([value for _, value in points])
    features = np.stack([_features(point) for point, _ in points])
    # Columns of very different size upset the solver: scale each by its value at the target.
    scale = np.maximum(_features(trial), 1.0)
    coefficients, _ = nnls(features / scale / values[:, None], np.ones(len(values)))
    return float(coefficients @ (_features(trial) / scale))


def _features(trial: Trial) -> np.ndarray:
    tokens = trial.batch_size * trial.seq_len / trial.sp_size
    square = tokens * trial.seq_len
    # The last: NOTE [Masks of padded batches] in planning/fitting.py.
    return np.array([1.0, tokens, square, square if trial.batch_size > 1 else 0.0])

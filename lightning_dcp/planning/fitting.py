"""Numerical helpers of the cost model: features, non-negative fits, interpolation of residuals.

Shapes: n = points asked for, m = measured points.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "FloatArray",
    "dominated_maximum",
    "fit_nonnegative",
    "interpolate_residuals",
    "linear",
    "memory_features",
    "time_features",
]

FloatArray = npt.NDArray[np.float64]

_CHUNK = 1 << 15  # rows at a time, so that (n, m) temporaries stay in cache

_BELOW, _ROUNDS = 8.0, 6  # how much more an error below weighs, and rounds until that is settled

_RANGE_OCTAVES = 2.0
"""Distance from the measured points, in factors of two, at which the fit begins to dominate."""


def time_features(
    batch_size: FloatArray, seq_len: FloatArray, sp_size: FloatArray | float
) -> FloatArray:
    """(n, 4): attention ``b s^2 / p``, all that is linear in the tokens ``b s / p``, 1, ``b / p``.

    The communication of SP is linear in ``b s / p`` too; since a fit is made per SP size, it has
    its own coefficient for each. The last is for stacks of blocks that see as many tokens of every
    sample (patches of an image), and is fitted where there are several stacks.
    """
    seq_len = _shared_length(seq_len, sp_size)
    tokens = batch_size * seq_len / sp_size
    per_sample = batch_size / sp_size + np.zeros_like(tokens)
    return np.stack([tokens * seq_len, tokens, np.ones_like(tokens), per_sample], axis=-1)


def memory_features(
    batch_size: FloatArray, seq_len: FloatArray, sp_size: FloatArray | float
) -> FloatArray:
    """(n, 10): ``1, b, b s``; ``b s / p``; five times ``b s^2``, two of them for b > 1; ``b / p``.

    Of the quadratic ones ``b s^2 / p`` is what each head has. ``b s^2`` at p = 1 only is for
    attention that keeps its weights where the sequence is whole, such as ``nn.MultiheadAttention``
    with ``need_weights=True``, and does without where it is shared. ``b s^2`` at any p is a mask
    (B, 1, S, S), which is whole on every rank.

    NOTE [Masks of padded batches]
        A sample alone is not padded, so that models (those of Hugging Face, for one) make no mask
        and ask for plain causal attention. With a second sample there is padding, hence a mask of
        b s^2 elements, of which torch's kernels keep a copy in every block. It is a step in b that
        no smooth feature follows: a fit over both kinds of points was 3 times too low for two long
        samples, and too high for one. Hence the columns that are 0 for b = 1.
    """
    seq_len = _shared_length(seq_len, sp_size)
    tokens = batch_size * seq_len
    shared = tokens / sp_size
    whole = np.where(np.asarray(sp_size) == 1, tokens * seq_len, 0.0)
    per_sample = batch_size / sp_size + np.zeros_like(tokens)
    several = batch_size > 1
    columns = [
        np.ones_like(tokens),
        batch_size,
        tokens,
        shared,
        shared * seq_len,
        whole,
        tokens * seq_len,
        np.where(several, tokens * seq_len, 0.0),
        np.where(several, shared * seq_len, 0.0),
        per_sample,
    ]
    return np.stack(columns, axis=-1)


def _shared_length(seq_len: FloatArray, sp_size: FloatArray | float) -> FloatArray:
    """Shorter samples cost what two tokens per rank do: those that share one have no fewer."""
    return np.where(np.asarray(sp_size) == 1, seq_len, np.maximum(seq_len, 2 * np.asarray(sp_size)))


def fit_nonnegative(
    features: FloatArray, values: FloatArray, *, from_above: bool = False
) -> FloatArray:
    """Coefficients >= 0 that minimise the *relative* squared error of ``features @ c``.

    Relative, because costs span orders of magnitude and short samples are the most frequent.

    Args:
        features: (n, k).
        values: (n,).
        from_above: An error below a value weighs more than one above it. For bytes: the same shape
            may need less at one time (a batch that happens to have no padding, hence no mask) and
            more at another, and what counts is the more.
    """
    largest = float(np.max(values))
    if largest <= 0:
        return np.zeros(features.shape[1])
    # Values far below the largest would otherwise rule the fit with their noise.
    weights = 1.0 / np.maximum(values, 1e-4 * largest)
    solution = _weighted(features, values, weights)
    for _ in range(_ROUNDS if from_above else 0):
        below = features @ solution < values
        solution = _weighted(features, values, np.where(below, _BELOW * weights, weights))
    return solution


def _weighted(features: FloatArray, values: FloatArray, weights: FloatArray) -> FloatArray:
    from scipy.optimize import nnls  # late: importing the package stays cheap

    rows = features * weights[:, None]
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(rows / scale, values * weights)
    return np.asarray(solution / scale, dtype=np.float64)


def interpolate_residuals(
    batch_size: FloatArray, seq_len: FloatArray, points: FloatArray, residuals: FloatArray
) -> FloatArray:
    """Interpolate residuals over (log2 b, log2 s) by inverse distance.

    Exact at measured points; between them a weighted mean of the near ones; far outside the
    measured range it fades to 0, so that only the fit speaks there. There is no jump at the edge of
    the range, which a plain interpolation inside the hull would have.

    Args:
        batch_size: (n,).
        seq_len: (n,).
        points: (m, 2) measured (b, s).
        residuals: (m, c), c residuals per point.

    Returns:
        (n, c).
    """
    known = np.log2(points)
    result = np.empty((batch_size.size, residuals.shape[1]))
    for start in range(0, batch_size.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        b, s = np.log2(batch_size[part]), np.log2(seq_len[part])
        total = np.full(b.shape, _RANGE_OCTAVES**-4)
        weighted = np.zeros((b.size, residuals.shape[1]))
        for (b_known, s_known), residual in zip(known.tolist(), residuals, strict=True):
            distance = np.square(b - b_known) + np.square(s - s_known)
            weight = 1.0 / (np.square(distance) + 1e-12)
            total += weight
            weighted += weight[:, None] * residual
        result[part] = weighted / total[:, None]
    return result


def linear(features: FloatArray, coefficients: Sequence[Sequence[float]]) -> FloatArray:
    """(n, k) features times (c, k) coefficients, (n, c).

    Not a matrix product: BLAS rounds differently by shape and machine, and a plan must not.
    """
    columns = [
        sum((features[:, i] * c for i, c in enumerate(row)), np.zeros(len(features)))
        for row in coefficients
    ]
    return np.stack(columns, axis=-1)


def dominated_maximum(
    batch_size: FloatArray, seq_len: FloatArray, points: FloatArray, values: FloatArray
) -> FloatArray:
    """(n, c): largest value measured at any point with b and s not above the one asked for.

    A lower bound of a cost that grows with b and s.
    """
    result = np.zeros((batch_size.size, values.shape[1]))
    for start in range(0, batch_size.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        below = (points[None, :, 0] <= batch_size[part, None]) & (
            points[None, :, 1] <= seq_len[part, None]
        )
        for column in range(values.shape[1]):
            result[part, column] = np.max(below * values[None, :, column], axis=1)
    return result

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
    """(n, 7): ``1, b, b s``; shared ``b s / p, b s^2 / p``; ``b s^2`` at p = 1 only; ``b / p``.

    The last but one is for attention that keeps its weights where the sequence is whole, such as
    ``nn.MultiheadAttention`` with ``need_weights=True``, and does without where it is shared.
    """
    seq_len = _shared_length(seq_len, sp_size)
    tokens = batch_size * seq_len
    shared = tokens / sp_size
    whole = np.where(np.asarray(sp_size) == 1, tokens * seq_len, 0.0)
    per_sample = batch_size / sp_size + np.zeros_like(tokens)
    columns = [
        np.ones_like(tokens),
        batch_size,
        tokens,
        shared,
        shared * seq_len,
        whole,
        per_sample,
    ]
    return np.stack(columns, axis=-1)


def _shared_length(seq_len: FloatArray, sp_size: FloatArray | float) -> FloatArray:
    """Shorter samples cost what two tokens per rank do: those that share one have no fewer."""
    return np.where(np.asarray(sp_size) == 1, seq_len, np.maximum(seq_len, 2 * np.asarray(sp_size)))


def fit_nonnegative(features: FloatArray, values: FloatArray) -> FloatArray:
    """Coefficients >= 0 that minimise the *relative* squared error of ``features @ c``.

    Relative, because costs span orders of magnitude and short samples are the most frequent.
    """
    from scipy.optimize import nnls  # late: importing the package stays cheap

    largest = float(np.max(values))
    if largest <= 0:
        return np.zeros(features.shape[1])
    # Values far below the largest would otherwise rule the fit with their noise.
    weights = 1.0 / np.maximum(values, 1e-4 * largest)
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

"""How many bytes a step of evaluation takes, fitted to a few short ones that were measured.

Without a backward pass nothing is saved per block, so that no dual-layer profile is needed: one
polynomial in the sequence length for each SP size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

__all__ = ["EvaluationMemory", "MeasuredBytes", "fit_bytes", "largest_batch", "longest_length"]

#: Bytes of a step are taken to be so much larger than fitted: allocators round and fragment.
_MARGIN = 1.1
#: A line that is off by no more than this at the longer lengths is taken to be straight.
_STRAIGHT = 0.03
_LENGTHS_OF_A_FIT = 3


@dataclass(frozen=True)
class MeasuredBytes:
    """Peak bytes of one step above what was there before it.

    Attributes:
        batch_size: Samples.
        seq_len: Tokens that each was padded to.
        num_bytes: Largest of all ranks.
    """

    batch_size: int
    seq_len: int
    num_bytes: int


@dataclass(frozen=True)
class EvaluationMemory:
    """Bytes of one step: ``constant + b (per_sample + per_token s + per_pair s^2)`` of each p.

    Attributes:
        fixed_bytes: What stays on each rank, whatever runs.
        coefficients: By SP size: constant, per sample, per token, per pair of tokens; none is
            negative.
    """

    fixed_bytes: int
    coefficients: Mapping[int, tuple[float, float, float, float]]

    def num_bytes(self, batch_size: int, seq_len: int, sp_size: int) -> int:
        """Bytes per rank, what stays included, for ``seq_len`` tokens a sample (all ranks')."""
        constant, sample, token, pair = self.coefficients[sp_size]
        per_sample = sample + token * seq_len + pair * float(seq_len) ** 2
        return self.fixed_bytes + math.ceil(_MARGIN * (constant + batch_size * per_sample))


def fit_bytes(measured: Sequence[MeasuredBytes], longest: int) -> tuple[float, float, float, float]:
    """Coefficients of one SP size; no measured step takes more than they say.

    A straight line in the length is preferred where the longer steps lie on one: rounding in short
    ones would else bend it, and be multiplied when it is continued to long samples. From fewer than
    three lengths it is continued as if all grew with the square.

    Args:
        measured: Steps of different lengths, with more than one sample in some.
        longest: Length that will be asked for.

    Raises:
        ValueError: Nothing was measured.
    """
    if not measured:
        raise ValueError("At least one measured step is needed to fit the bytes of evaluation.")
    b = np.array([m.batch_size for m in measured], dtype=np.float64)
    s = np.array([m.seq_len for m in measured], dtype=np.float64)
    wanted = np.maximum(1.0, [m.num_bytes for m in measured])
    if longest > s.max() and len(np.unique(s)) < _LENGTHS_OF_A_FIT:
        per_sample = wanted / b
        return 0.0, float(per_sample.max()), 0.0, float((per_sample / s**2).min())
    columns = np.stack([np.ones_like(b), b, b * s, b * s**2], axis=1)
    weights = 1.0 / np.sqrt(wanted)
    longer = s >= s.max() / 4
    solution = np.zeros(4)
    for degree in (3, 4):
        own = columns[:, :degree] * weights[:, None]
        # Scaled to be alike in size, as their units are not.
        scale = own.max(axis=0)
        solution[:degree] = nnls(own / scale, wanted * weights)[0] / scale
        predicted = columns @ solution
        if float(np.abs(predicted / wanted - 1.0)[longer].max()) <= _STRAIGHT:
            break
    constant, sample, token, pair = solution.tolist()
    return constant + max(0.0, float((wanted - predicted).max())), sample, token, pair


def largest_batch(
    memory: EvaluationMemory, seq_len: int, sp_size: int, limit_bytes: int, at_most: int
) -> int:
    """The most samples of ``seq_len`` tokens, up to ``at_most``, that fit; 0 where none does."""
    low, high = 0, at_most + 1
    if memory.num_bytes(at_most, seq_len, sp_size) <= limit_bytes:
        return at_most
    while high - low > 1:
        middle = (low + high) // 2
        if memory.num_bytes(middle, seq_len, sp_size) <= limit_bytes:
            low = middle
        else:
            high = middle
    return low


def longest_length(
    memory: EvaluationMemory, sp_size: int, multiple: int, limit_bytes: int, at_most: int
) -> int:
    """Tokens of the longest single sample, up to ``at_most``, that fits; 0 where none does.

    Args:
        memory: Of all SP sizes.
        sp_size: Ranks that share it.
        multiple: Samples are padded to multiples of it.
        limit_bytes: Per rank.
        at_most: The longest that is asked for.
    """
    high = -(-at_most // multiple) + 1  # in multiples
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        if memory.num_bytes(1, middle * multiple, sp_size) <= limit_bytes:
            low = middle
        else:
            high = middle
    return min(at_most, low * multiple)

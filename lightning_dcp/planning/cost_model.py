"""What a micro-batch costs: seconds and bytes from few measured points.

``T = L (t_f + t_b) + r t_f + T_C`` and ``M = live m + L m_inp + rest + M_C`` (paper, Eq. 4-6), with
L blocks of which r are recomputed, m the bytes a block saves for backward, m_inp its input.

NOTE (live blocks): Eq. 6 has ``(L - r) m``. While a recomputed block runs backward, its own m
bytes are there again, so with r = L one block is still live: ``live = max(L - r, 1)``. (For r < L
the last, not recomputed blocks have been freed by then.) Hence r = L saves no more than r = L - 1.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_dcp.planning.fitting import (
    FloatArray,
    dominated_maximum,
    fit_nonnegative,
    interpolate_residuals,
    linear,
    memory_features,
    time_features,
)
from lightning_dcp.planning.options import is_power_of_two

__all__ = ["CostModel", "HeldOutError", "Measurement", "fit_cost_model"]

_TIMES = ("forward_s", "backward_s", "rest_s")
_BYTES = ("saved_bytes", "input_bytes", "rest_bytes")
_TINY_S = 1e-12


@dataclass(frozen=True)
class Measurement:
    """One measured point.

    Attributes:
        batch_size: Samples b.
        seq_len: Padded tokens per sample s, whole (not divided by p).
        sp_size: SP size p.
        forward_s: Seconds of one block's forward.
        backward_s: Seconds of one block's backward.
        rest_s: Seconds of all that is outside the blocks, forward and backward.
        saved_bytes: Bytes one block saves for backward on each rank, without its input.
        input_bytes: Bytes of one block's input on each rank.
        rest_bytes: Bytes saved outside the blocks on each rank.
    """

    batch_size: int
    seq_len: int
    sp_size: int
    forward_s: float
    backward_s: float
    rest_s: float
    saved_bytes: float
    input_bytes: float
    rest_bytes: float

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.seq_len < 1 or not is_power_of_two(self.sp_size):
            raise ValueError(
                "A measurement needs batch_size >= 1, seq_len >= 1 and a power of two as sp_size; "
                f"got {self.batch_size}, {self.seq_len}, {self.sp_size}."
            )
        for name in _TIMES + _BYTES:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative; got {value}.")


@dataclass(frozen=True)
class HeldOutError:
    """Relative errors at measured points that the fit did not see; None where there were none.

    Memory means what a micro-batch adds: parameters and optimizer state, which are known, are not
    counted, since they would only flatter the figure.
    """

    num_points: int
    median_time: float | None
    p95_time: float | None
    median_memory: float | None
    p95_memory: float | None


@dataclass(frozen=True)
class CostModel:
    """Predicts seconds and bytes of a micro-batch. Made by :func:`fit_cost_model`.

    All predictions take numbers or arrays that broadcast, and return arrays (numpy scalars for
    numbers). An SP size that was not measured is a ValueError.

    Attributes:
        num_blocks: L, the blocks that may be recomputed.
        fixed_bytes: M_C: parameters, gradients, optimizer shard, buffers.
        step_overhead_s: Seconds per iteration outside micro-batches: reduction and optimizer.
        measurements: The measured points.
        time_coefficients: SP size -> 3 rows (forward, backward, rest) of non-negative coefficients.
        memory_coefficients: 3 rows (saved, input, rest) of non-negative coefficients.
        held_out: Errors at points that were held out of the fit.
    """

    num_blocks: int
    fixed_bytes: int
    step_overhead_s: float
    measurements: tuple[Measurement, ...]
    time_coefficients: tuple[tuple[int, tuple[tuple[float, ...], ...]], ...]
    memory_coefficients: tuple[tuple[float, ...], ...]
    held_out: HeldOutError

    @property
    def sp_sizes(self) -> tuple[int, ...]:
        """SP sizes that can be predicted: those measured."""
        return tuple(p for p, _ in self.time_coefficients)

    @property
    def memory_error(self) -> float:
        """95th percentile of the held-out relative memory error; 0 where none is known."""
        return self.held_out.p95_memory or 0.0

    @cached_property
    def _measured(self) -> dict[int, tuple[FloatArray, FloatArray, FloatArray]]:
        # SP size -> points (m, 2), log(measured / fit) of the times (m, 3), measured bytes (m, 3)
        tables = {}
        for p, coefficients in self.time_coefficients:
            own = [m for m in self.measurements if m.sp_size == p]
            points = np.array([[m.batch_size, m.seq_len] for m in own], dtype=np.float64)
            times = np.array([[getattr(m, name) for name in _TIMES] for m in own])
            bytes_ = np.array([[getattr(m, name) for name in _BYTES] for m in own], dtype=float)
            fit = linear(time_features(points[:, 0], points[:, 1], float(p)), coefficients)
            residuals = np.log(np.maximum(times, _TINY_S) / np.maximum(fit, _TINY_S))
            tables[p] = (points, residuals, bytes_)
        return tables

    def _predict(self, b: Any, s: Any, p: Any, *, memory: bool) -> FloatArray:
        """(..., 3): forward, backward, rest seconds; or saved, input, rest bytes."""
        arrays = np.broadcast_arrays(*(np.asarray(a, dtype=np.float64) for a in (b, s, p)))
        shape = arrays[0].shape
        b_, s_, p_ = (np.ravel(a) for a in arrays)
        result = np.empty((b_.size, 3))
        coefficients = dict(self.time_coefficients)
        for size in np.unique(p_).tolist():
            if size not in coefficients:
                raise ValueError(
                    f"SP size {size:g} was not measured; known: {list(self.sp_sizes)}."
                )
            rows = np.flatnonzero(p_ == size)
            points, residuals, bytes_ = self._measured[int(size)]
            bs, ss = b_[rows], s_[rows]
            if memory:
                fit = linear(memory_features(bs, ss, float(size)), self.memory_coefficients)
                result[rows] = np.maximum(fit, dominated_maximum(bs, ss, points, bytes_))
            else:
                fit = linear(time_features(bs, ss, float(size)), coefficients[int(size)])
                ratio = np.exp(interpolate_residuals(bs, ss, points, residuals))
                result[rows] = np.maximum(fit, _TINY_S) * ratio
        return result.reshape(*shape, 3)

    def forward_s(self, b: Any, s: Any, p: Any) -> Any:
        """Seconds of one block's forward."""
        return self._predict(b, s, p, memory=False)[..., 0]

    def backward_s(self, b: Any, s: Any, p: Any) -> Any:
        """Seconds of one block's backward."""
        return self._predict(b, s, p, memory=False)[..., 1]

    def rest_s(self, b: Any, s: Any, p: Any) -> Any:
        """Seconds outside the blocks (T_C)."""
        return self._predict(b, s, p, memory=False)[..., 2]

    def saved_bytes(self, b: Any, s: Any, p: Any) -> Any:
        """Bytes one block saves for backward (m), never below what was measured."""
        return self._predict(b, s, p, memory=True)[..., 0]

    def input_bytes(self, b: Any, s: Any, p: Any) -> Any:
        """Bytes of one block's input (m_inp)."""
        return self._predict(b, s, p, memory=True)[..., 1]

    def rest_bytes(self, b: Any, s: Any, p: Any) -> Any:
        """Bytes saved outside the blocks."""
        return self._predict(b, s, p, memory=True)[..., 2]

    def time_s(self, b: Any, s: Any, p: Any, r: Any = 0) -> Any:
        """Seconds of a micro-batch: ``L (t_f + t_b) + r t_f + T_C`` (paper, Eq. 4-5)."""
        times = self._predict(b, s, p, memory=False)
        forward, backward, rest = times[..., 0], times[..., 1], times[..., 2]
        return self.num_blocks * (forward + backward) + np.asarray(r) * forward + rest

    def memory_bytes(self, b: Any, s: Any, p: Any, r: Any = 0) -> Any:
        """Peak bytes on each rank of the group (paper, Eq. 6; NOTE live blocks above), int64."""
        return self._memory(self._predict(b, s, p, memory=True), np.asarray(r))

    def _memory(self, bytes_: FloatArray, r: npt.NDArray[Any]) -> Any:
        live = np.maximum(self.num_blocks - r, 1)
        total = live * bytes_[..., 0] + self.num_blocks * bytes_[..., 1] + bytes_[..., 2]
        # Clipped: absurd lengths must not wrap around.
        return np.ceil(np.minimum(total + self.fixed_bytes, 2.0**62)).astype(np.int64)

    def min_recompute(self, b: Any, s: Any, p: Any, limit_bytes: int) -> Any:
        """Smallest r whose memory is within the limit, -1 where none is (int64).

        Algorithm 1 of the paper contradicts its Eq. 6 and is not followed.
        """
        bytes_ = self._predict(b, s, p, memory=True)
        whole = self._memory(bytes_, np.zeros((), dtype=np.int64))
        saved = np.maximum(bytes_[..., 0], 1e-9)
        r = np.ceil(np.maximum(whole - limit_bytes, 0) / saved)
        r = np.minimum(r, self.num_blocks).astype(np.int64)
        # Rounding may put r one off in either direction.
        r = np.where((r > 0) & (self._memory(bytes_, r - 1) <= limit_bytes), r - 1, r)
        r = np.where(self._memory(bytes_, r) > limit_bytes, r + 1, r)
        fits = (r <= self.num_blocks) & (self._memory(bytes_, r) <= limit_bytes)
        return np.where(fits, r, -1)[()]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "num_blocks": self.num_blocks,
            "fixed_bytes": self.fixed_bytes,
            "step_overhead_s": self.step_overhead_s,
            "measurements": [dataclasses.asdict(m) for m in self.measurements],
            "time_coefficients": [
                [p, [list(row) for row in rows]] for p, rows in self.time_coefficients
            ],
            "memory_coefficients": [list(row) for row in self.memory_coefficients],
            "held_out": dataclasses.asdict(self.held_out),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostModel:
        """Inverse of :meth:`to_dict`."""
        return cls(
            num_blocks=values["num_blocks"],
            fixed_bytes=values["fixed_bytes"],
            step_overhead_s=values["step_overhead_s"],
            measurements=tuple(Measurement(**m) for m in values["measurements"]),
            time_coefficients=tuple(
                (p, tuple(tuple(row) for row in rows)) for p, rows in values["time_coefficients"]
            ),
            memory_coefficients=tuple(tuple(row) for row in values["memory_coefficients"]),
            held_out=HeldOutError(**values["held_out"]),
        )

    def to_json(self) -> str:
        """Canonical JSON; floats survive the round trip exactly."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """Inverse of :meth:`to_json`."""
        return cls.from_dict(json.loads(text))

    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything a prediction depends on."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def fit_cost_model(
    measurements: Sequence[Measurement],
    *,
    num_blocks: int,
    fixed_bytes: int,
    step_overhead_s: float = 0.0,
) -> CostModel:
    """Fit a cost model and measure its error on held-out points.

    Args:
        measurements: At least one per SP size that is to be predicted; a few (b, s) each.
        num_blocks: L.
        fixed_bytes: M_C, bytes that are there whatever the micro-batch.
        step_overhead_s: Seconds per iteration outside micro-batches.

    Raises:
        ValueError: No measurements, or a value out of range.
    """
    if not measurements:
        raise ValueError("A cost model needs at least one measurement; got none.")
    if num_blocks < 1 or fixed_bytes < 0 or not step_overhead_s >= 0:
        raise ValueError(
            "num_blocks must be at least 1, fixed_bytes and step_overhead_s not negative; got "
            f"{num_blocks}, {fixed_bytes}, {step_overhead_s}."
        )
    # Sorted: ranks may have gathered the points in any order.
    points = sorted(measurements, key=dataclasses.astuple)
    model = _fit(points, num_blocks, int(fixed_bytes), float(step_overhead_s))
    return dataclasses.replace(model, held_out=_held_out(points, num_blocks))


def _fit(
    points: Sequence[Measurement], num_blocks: int, fixed_bytes: int, step_overhead_s: float
) -> CostModel:
    b, s, p = (
        np.array([getattr(m, name) for m in points], dtype=np.float64)
        for name in ("batch_size", "seq_len", "sp_size")
    )

    def fit(features: FloatArray, name: str, rows: npt.NDArray[np.bool_]) -> tuple[float, ...]:
        values = np.array([getattr(m, name) for m in points], dtype=np.float64)
        return tuple(fit_nonnegative(features[rows], values[rows]).tolist())

    times = time_features(b, s, p)
    return CostModel(
        num_blocks=num_blocks,
        fixed_bytes=fixed_bytes,
        step_overhead_s=step_overhead_s,
        measurements=tuple(points),
        time_coefficients=tuple(
            (int(size), tuple(fit(times, name, p == size) for name in _TIMES))
            for size in np.unique(p)
        ),
        memory_coefficients=tuple(
            fit(memory_features(b, s, p), name, np.ones(len(points), dtype=bool)) for name in _BYTES
        ),
        held_out=HeldOutError(0, None, None, None, None),
    )


def _held_out(points: Sequence[Measurement], num_blocks: int) -> HeldOutError:
    # One by one where points are few, else eight interleaved folds: deterministic on all ranks.
    num_folds = len(points) if len(points) <= 16 else 8
    errors: list[tuple[float, float]] = []
    for fold in range(num_folds):
        train = [m for i, m in enumerate(points) if i % num_folds != fold]
        sizes = {m.sp_size for m in train}
        test = [m for i, m in enumerate(points) if i % num_folds == fold and m.sp_size in sizes]
        if not test:
            continue
        model = _fit(train, num_blocks, 0, 0.0)
        for m in test:
            time_s = num_blocks * (m.forward_s + m.backward_s) + m.rest_s
            bytes_ = num_blocks * (m.saved_bytes + m.input_bytes) + m.rest_bytes
            key = (m.batch_size, m.seq_len, m.sp_size)
            errors.append(
                (
                    abs(float(model.time_s(*key)) - time_s) / max(time_s, _TINY_S),
                    abs(float(model.memory_bytes(*key)) - bytes_) / max(bytes_, 1.0),
                )
            )
    if not errors:
        return HeldOutError(0, None, None, None, None)
    median, p95 = np.median(errors, axis=0), np.quantile(errors, 0.95, axis=0)
    return HeldOutError(
        num_points=len(errors),
        median_time=float(median[0]),
        p95_time=float(p95[0]),
        median_memory=float(median[1]),
        p95_memory=float(p95[1]),
    )

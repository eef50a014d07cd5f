"""What a micro-batch costs: seconds and bytes from few measured points.

``T = L (t_f + t_b) + r t_f + T_C`` and ``M = live m + L m_inp + rest + M_C`` (paper, Eq. 4-6), with
L blocks of which r are recomputed, m the bytes a block saves for backward, m_inp its input. With
several stacks of blocks each adds such terms, and r is spent on one stack after the other.

NOTE (live blocks): Eq. 6 has ``(L - r) m``. While a recomputed block runs backward, its own m
bytes are there again, so with r = L one block is still live: ``live = max(L - r, 1)``. (For r < L
the last, not recomputed blocks have been freed by then.) Hence r = L saves no more than r = L - 1.
With several stacks the largest m of those recomputed as a whole is live beside what others save.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
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
from lightning_dcp.planning.measurement import BlockCosts, Measurement
from lightning_dcp.planning.stack_terms import (
    block_bytes,
    block_seconds,
    recompute_order,
    recomputed,
)

__all__ = ["BlockCosts", "CostModel", "HeldOutError", "Measurement", "fit_cost_model"]

_TINY_S = 1e-12
_LEAST_RESIDUAL = -np.log(4.0)
#: Example models of three blocks, some recomputed, on two ranks, came out at up to 1.010 of it.
_LEAST_MEMORY_ERROR = 0.02


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
        stack_blocks: L of each stack, the main one first.
        fixed_bytes: M_C: parameters, gradients, optimizer shard, buffers.
        step_overhead_s: Seconds per iteration outside micro-batches: reduction and optimizer.
        measurements: The measured points.
        time_coefficients: SP size -> rows of non-negative coefficients: forward, backward, rest;
            then forward and backward of each further stack.
        memory_coefficients: Likewise: saved, input, rest; saved and input of each further stack.
        held_out: Errors at points that were held out of the fit.
        recompute_order: Stacks in the order in which their blocks are recomputed as r grows.
    """

    stack_blocks: tuple[int, ...]
    fixed_bytes: int
    step_overhead_s: float
    measurements: tuple[Measurement, ...]
    time_coefficients: tuple[tuple[int, tuple[tuple[float, ...], ...]], ...]
    memory_coefficients: tuple[tuple[float, ...], ...]
    held_out: HeldOutError
    recompute_order: tuple[int, ...] = (0,)

    @cached_property
    def num_blocks(self) -> int:
        """L, the blocks of all stacks, which may be recomputed."""
        return sum(self.stack_blocks)

    @cached_property
    def _has_backward(self) -> tuple[bool, ...]:
        # A stack that no backward reaches is not run again, checkpoint or not.
        points = [m.stacks for m in self.measurements]
        return tuple(
            i == 0 or any(stacks[i].backward_s > 0 for stacks in points)
            for i in range(len(self.stack_blocks))
        )

    @property
    def sp_sizes(self) -> tuple[int, ...]:
        """SP sizes that can be predicted: those measured."""
        return tuple(p for p, _ in self.time_coefficients)

    @property
    def memory_error(self) -> float:
        """95th percentile of the held-out relative memory error, and at least a little.

        Held-out points say how well the fit interpolates. That the blocks of a whole model take
        just as many times what one takes in a profile is true to within that little.
        """
        return max(self.held_out.p95_memory or 0.0, _LEAST_MEMORY_ERROR)

    @cached_property
    def _measured(self) -> dict[int, tuple[FloatArray, FloatArray, FloatArray]]:
        # SP size -> points (m, 2), log(measured / fit) of the times (m, c), measured bytes (m, c)
        tables = {}
        for p, coefficients in self.time_coefficients:
            own = [m for m in self.measurements if m.sp_size == p]
            points = np.array([[m.batch_size, m.seq_len] for m in own], dtype=np.float64)
            times = np.array([m.seconds() for m in own])
            bytes_ = np.array([m.num_bytes() for m in own], dtype=float)
            fit = linear(time_features(points[:, 0], points[:, 1], float(p)), coefficients)
            residuals = np.log(np.maximum(times, _TINY_S) / np.maximum(fit, _TINY_S))
            # A stack that some micro-batches do not call says nothing of those beside them.
            residuals[:, 3:] = np.maximum(residuals[:, 3:], _LEAST_RESIDUAL)
            tables[p] = (points, residuals, bytes_)
        return tables

    def _predict(self, b: Any, s: Any, p: Any, *, memory: bool) -> FloatArray:
        """(..., c): forward, backward, rest, .. seconds; or saved, input, rest, .. bytes."""
        arrays = np.broadcast_arrays(*(np.asarray(a, dtype=np.float64) for a in (b, s, p)))
        shape = arrays[0].shape
        b_, s_, p_ = (np.ravel(a) for a in arrays)
        result = np.empty((b_.size, 1 + 2 * len(self.stack_blocks)))
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
        return result.reshape(*shape, result.shape[1])

    def forward_s(self, b: Any, s: Any, p: Any) -> Any:
        """Seconds of one block of the main stack's forward."""
        return self._predict(b, s, p, memory=False)[..., 0]

    def backward_s(self, b: Any, s: Any, p: Any) -> Any:
        """Seconds of one block of the main stack's backward."""
        return self._predict(b, s, p, memory=False)[..., 1]

    def rest_s(self, b: Any, s: Any, p: Any) -> Any:
        """Seconds outside the blocks (T_C)."""
        return self._predict(b, s, p, memory=False)[..., 2]

    def saved_bytes(self, b: Any, s: Any, p: Any) -> Any:
        """Bytes one block of the main stack saves for backward (m), at least what was measured."""
        return self._predict(b, s, p, memory=True)[..., 0]

    def input_bytes(self, b: Any, s: Any, p: Any) -> Any:
        """Bytes of the input of one block of the main stack (m_inp)."""
        return self._predict(b, s, p, memory=True)[..., 1]

    def rest_bytes(self, b: Any, s: Any, p: Any) -> Any:
        """Bytes saved outside the blocks."""
        return self._predict(b, s, p, memory=True)[..., 2]

    def time_s(self, b: Any, s: Any, p: Any, r: Any = 0) -> Any:
        """Seconds of a micro-batch: ``L (t_f + t_b) + r t_f + T_C`` (paper, Eq. 4-5)."""
        times = self._predict(b, s, p, memory=False)
        again = recomputed(self.stack_blocks, self.recompute_order, r)
        again = [n * runs for n, runs in zip(again, self._has_backward, strict=True)]
        return block_seconds(times, self.stack_blocks, again) + times[..., 2]

    def memory_bytes(self, b: Any, s: Any, p: Any, r: Any = 0) -> Any:
        """Peak bytes on each rank of the group (paper, Eq. 6; NOTE live blocks above), int64."""
        return self._memory(self._predict(b, s, p, memory=True), np.asarray(r))

    def _memory(self, bytes_: FloatArray, r: npt.NDArray[Any]) -> Any:
        again = recomputed(self.stack_blocks, self.recompute_order, r)
        total = block_bytes(bytes_, self.stack_blocks, again) + bytes_[..., 2]
        # Clipped: absurd lengths must not wrap around.
        return np.ceil(np.minimum(total + self.fixed_bytes, 2.0**62)).astype(np.int64)

    def min_recompute(self, b: Any, s: Any, p: Any, limit_bytes: int) -> Any:
        """Smallest r whose memory is within the limit, -1 where none is (int64).

        Algorithm 1 of the paper contradicts its Eq. 6 and is not followed.
        """
        bytes_ = self._predict(b, s, p, memory=True)
        # Memory never rises with r: bisection over all points at once.
        low = np.zeros(bytes_.shape[:-1], dtype=np.int64)
        high = np.full(bytes_.shape[:-1], self.num_blocks, dtype=np.int64)
        fits = self._memory(bytes_, high) <= limit_bytes
        for _ in range(self.num_blocks.bit_length()):
            middle = (low + high) // 2
            within = self._memory(bytes_, middle) <= limit_bytes
            high = np.where(within, middle, high)
            low = np.where(within, low, np.minimum(middle + 1, high))
        return np.where(fits, high, -1)[()]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "stack_blocks": list(self.stack_blocks),
            "recompute_order": list(self.recompute_order),
            "fixed_bytes": self.fixed_bytes,
            "step_overhead_s": self.step_overhead_s,
            "measurements": [m.to_dict() for m in self.measurements],
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
            stack_blocks=tuple(values["stack_blocks"]),
            recompute_order=tuple(values["recompute_order"]),
            fixed_bytes=values["fixed_bytes"],
            step_overhead_s=values["step_overhead_s"],
            measurements=tuple(Measurement.from_dict(m) for m in values["measurements"]),
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
    num_blocks: int | Sequence[int],
    fixed_bytes: int,
    step_overhead_s: float = 0.0,
    order: Sequence[int] | None = None,
) -> CostModel:
    """Fit a cost model and measure its error on held-out points.

    Args:
        measurements: At least one per SP size that is to be predicted; a few (b, s) each.
        num_blocks: L; of each stack where there are several, the main one first.
        fixed_bytes: M_C, bytes that are there whatever the micro-batch.
        step_overhead_s: Seconds per iteration outside micro-batches.
        order: Stacks in the order in which their blocks are recomputed; None: by saved bytes per
            second recomputed.

    Raises:
        ValueError: No measurements, or a value out of range.
    """
    if not measurements:
        raise ValueError("A cost model needs at least one measurement; got none.")
    stack_blocks = (num_blocks,) if isinstance(num_blocks, int) else tuple(num_blocks)
    if min(stack_blocks, default=0) < 1 or fixed_bytes < 0 or not step_overhead_s >= 0:
        raise ValueError(
            "num_blocks must be at least 1, fixed_bytes and step_overhead_s not negative; got "
            f"{num_blocks}, {fixed_bytes}, {step_overhead_s}."
        )
    if any(len(m.stacks) != len(stack_blocks) for m in measurements):
        raise ValueError(f"Every measurement must be of {len(stack_blocks)} stacks of blocks.")
    if order is not None and sorted(order) != list(range(len(stack_blocks))):
        raise ValueError(f"{tuple(order)} is no order of {len(stack_blocks)} stacks of blocks.")
    # Sorted: ranks may have gathered the points in any order.
    points = sorted(measurements, key=dataclasses.astuple)
    model = _fit(points, stack_blocks, int(fixed_bytes), float(step_overhead_s))
    return dataclasses.replace(
        model,
        held_out=_held_out(points, stack_blocks),
        recompute_order=model.recompute_order if order is None else tuple(order),
    )


def _fit(
    points: Sequence[Measurement],
    stack_blocks: tuple[int, ...],
    fixed_bytes: int,
    step_overhead_s: float,
) -> CostModel:
    b, s, p = (
        np.array([getattr(m, name) for m in points], dtype=np.float64)
        for name in ("batch_size", "seq_len", "sp_size")
    )
    seconds = np.array([m.seconds() for m in points], dtype=np.float64)
    num_bytes = np.array([m.num_bytes() for m in points], dtype=np.float64)
    times, memory = time_features(b, s, p), memory_features(b, s, p)
    if len(stack_blocks) == 1:
        times, memory = times[:, :-1], memory[:, :-1]

    def fit(
        features: FloatArray,
        values: FloatArray,
        rows: npt.NDArray[np.bool_],
        *,
        from_above: bool = False,
    ) -> tuple[tuple[float, ...], ...]:
        columns = (
            fit_nonnegative(features[rows], column[rows], from_above=from_above)
            for column in values.T
        )
        return tuple(tuple(column.tolist()) for column in columns)

    return CostModel(
        stack_blocks=stack_blocks,
        fixed_bytes=fixed_bytes,
        step_overhead_s=step_overhead_s,
        measurements=tuple(points),
        time_coefficients=tuple(
            (int(size), fit(times, seconds, p == size)) for size in np.unique(p)
        ),
        memory_coefficients=fit(
            memory, num_bytes, np.ones(len(points), dtype=bool), from_above=True
        ),
        held_out=HeldOutError(0, None, None, None, None),
        recompute_order=recompute_order(points),
    )


def _held_out(points: Sequence[Measurement], stack_blocks: tuple[int, ...]) -> HeldOutError:
    # One by one where points are few, else eight interleaved folds: deterministic on all ranks.
    num_folds = len(points) if len(points) <= 16 else 8
    errors: list[tuple[float, float]] = []
    for fold in range(num_folds):
        train = [m for i, m in enumerate(points) if i % num_folds != fold]
        sizes = {m.sp_size for m in train}
        test = [m for i, m in enumerate(points) if i % num_folds == fold and m.sp_size in sizes]
        if not test:
            continue
        model = _fit(train, stack_blocks, 0, 0.0)
        for m in test:
            blocks = tuple(zip(stack_blocks, m.stacks, strict=True))
            time_s = sum(n * (c.forward_s + c.backward_s) for n, c in blocks) + m.rest_s
            bytes_ = sum(n * (c.saved_bytes + c.input_bytes) for n, c in blocks) + m.rest_bytes
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

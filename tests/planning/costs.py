"""Analytic costs for the planner's tests."""

from __future__ import annotations

import functools
import math

import numpy as np

from lightning_dcp.planning import CostModel, Measurement, fit_cost_model

NUM_BLOCKS = 8
FIXED_BYTES = 1_000_000


def measure(b: int, s: int, p: int, noise: float = 0.0, seed: int = 0) -> Measurement:
    """A point of a law that the cost model can represent exactly (plus noise)."""
    tokens = b * s / p
    forward = 1e-4 + tokens * 1e-6 + tokens * s * 5e-10
    if p > 1:
        forward += 1e-4 * math.log2(p) + tokens * 2e-7
    rng = np.random.default_rng([seed, b, s, p])
    factor = np.exp(rng.normal(0, noise, 6)) if noise else np.ones(6)
    return Measurement(
        batch_size=b,
        seq_len=s,
        sp_size=p,
        forward_s=forward * factor[0],
        backward_s=2 * forward * factor[1],
        rest_s=(2e-4 + 1e-7 * b * s) * factor[2],
        saved_bytes=400 * tokens * factor[3],
        input_bytes=40 * tokens * factor[4],
        rest_bytes=(50 * b * s) * factor[5],
    )


def grid(sp_sizes: tuple[int, ...] = (1, 2, 4), noise: float = 0.0) -> list[Measurement]:
    """Few points, as a profile has them."""
    return [
        measure(b, s, p, noise) for p in sp_sizes for b in (1, 4) for s in (64, 512, 4096, 16384)
    ]


@functools.lru_cache
def cost_model(sp_sizes: tuple[int, ...] = (1, 2, 4), overhead: float = 1e-3) -> CostModel:
    """The law, fitted."""
    return fit_cost_model(
        grid(sp_sizes), num_blocks=NUM_BLOCKS, fixed_bytes=FIXED_BYTES, step_overhead_s=overhead
    )


def log_normal(n: int, seed: int = 0, *, sigma: float = 1.1, longest: int = 16384) -> np.ndarray:
    """Lengths over about three orders of magnitude."""
    values = np.random.default_rng(seed).lognormal(np.log(300), sigma, n)
    return np.clip(values, 16, longest).astype(np.int64)

"""Cost models of random laws: any prices, for property tests."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from lightning_dcp.planning import CostModel, Measurement, fit_cost_model

NUM_BLOCKS = 4
FIXED_BYTES = 1_000_000


@st.composite
def cost_models(draw: st.DrawFn, sp_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)) -> CostModel:
    """A fixed cost, one per token, one for attention, and what SP adds; noise on top."""
    fixed_s = draw(st.sampled_from([1e-6, 1e-4, 1e-2]))
    token_s = draw(st.sampled_from([1e-8, 1e-6, 1e-5]))
    attention_s = draw(st.sampled_from([0.0, 1e-10, 1e-8]))
    exchange_s = draw(st.sampled_from([0.0, 1e-7, 1e-5]))
    latency_s = draw(st.sampled_from([0.0, 1e-4]))
    noise = draw(st.sampled_from([0.0, 0.3]))
    kept = draw(st.sampled_from([10.0, 4000.0]))
    overhead_s = draw(st.sampled_from([0.0, 1e-2]))

    def point(b: int, s: int, p: int) -> Measurement:
        tokens = b * s / p
        forward = fixed_s + tokens * (token_s + attention_s * s)
        forward += (p > 1) * (latency_s * math.log2(p) + tokens * exchange_s)
        wobble = 1 + noise * math.sin(7 * b + s + 3 * p)
        return Measurement(
            batch_size=b,
            seq_len=s,
            sp_size=p,
            forward_s=forward * wobble,
            backward_s=2 * forward / wobble,
            rest_s=fixed_s + 1e-9 * b * s,
            saved_bytes=kept * tokens,
            input_bytes=kept * tokens / 10,
            rest_bytes=b * s,
        )

    points = [point(b, s, p) for p in sp_sizes for b in (1, 8) for s in (32, 512, 8192)]
    return fit_cost_model(
        points, num_blocks=NUM_BLOCKS, fixed_bytes=FIXED_BYTES, step_overhead_s=overhead_s
    )


def needed_bytes(model: CostModel, length: int, sp_size: int) -> int:
    """Memory limit with which one sample of ``length`` fits at ``sp_size``, margins included."""
    padded: Any = -(-length // sp_size) * sp_size
    used = int(model.memory_bytes(1, padded, sp_size, NUM_BLOCKS))
    return math.ceil(FIXED_BYTES + (1 + model.memory_error) * (used - FIXED_BYTES)) + 1

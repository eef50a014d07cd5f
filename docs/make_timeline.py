"""Draws docs/timeline.png: one real iteration of the example's data on 8 modelled accelerators.

    python docs/make_timeline.py [FILE]

Lengths are those of the standard library's definitions, as in examples/stdlib_lm.py; the plan is
the planner's. Only the costs are modelled: a profile of 8 accelerators needs 8 accelerators.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

from lightning_dcp.planning.cost_model import CostModel, Measurement, fit_cost_model
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.planning.planner import EpochPlanner
from lightning_dcp.timeline import draw_timeline

WORLD_SIZE = 8
MEMORY_LIMIT_BYTES = 14 * 2**30

# A transformer of 1.3 billion parameters in bfloat16, on one node of eight accelerators.
CHANNELS = 2048
NUM_BLOCKS = 24
FIXED_BYTES = 8 * 2**30
FLOPS_PER_S = 300e12  # that matrix products reach
LINK_BYTES_PER_S = 150e9  # of one rank in an all-to-all
LAUNCH_S = 100e-6  # the kernels of one block, however small its input
EXCHANGE_S = 120e-6  # the four all-to-alls of one block, however small


def modelled_costs(batch_size: int, seq_len: int, sp_size: int) -> Measurement:
    """One micro-batch on one rank: matrix products, attention, Ulysses' four all-to-alls."""
    tokens = batch_size * seq_len / sp_size
    flops = tokens * (24 * CHANNELS**2 + 2 * seq_len * CHANNELS)
    forward_s = LAUNCH_S + flops / FLOPS_PER_S
    exchange_s = 0.0
    if sp_size > 1:
        exchanged_bytes = 4 * 2 * CHANNELS * tokens * (sp_size - 1) / sp_size
        exchange_s = EXCHANGE_S + exchanged_bytes / LINK_BYTES_PER_S
    return Measurement(
        batch_size=batch_size,
        seq_len=seq_len,
        sp_size=sp_size,
        forward_s=forward_s + exchange_s,
        backward_s=2 * forward_s + exchange_s,
        rest_s=1e-3 + 4e-8 * batch_size * seq_len,  # embedding, head and loss are not shared
        saved_bytes=34.0 * CHANNELS * tokens,
        input_bytes=2.0 * CHANNELS * tokens,
        rest_bytes=1024.0 * batch_size * seq_len,
    )


def cost_model() -> CostModel:
    """Fitted as a measured profile would be."""
    grid = product((1, 2, 8, 32), (64, 512, 4096, 32768), (1, 2, 4, 8))
    return fit_cost_model(
        [modelled_costs(*point) for point in grid],
        num_blocks=NUM_BLOCKS,
        fixed_bytes=FIXED_BYTES,
        step_overhead_s=0.05,
    )


def planner(world_size: int = WORLD_SIZE) -> EpochPlanner:
    """Plans of the example's training samples for `world_size` accelerators."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    from stdlib_lm import HELD_OUT_FILES, collect, stdlib_files

    files = [path for i, path in enumerate(stdlib_files()) if i % HELD_OUT_FILES]
    texts = collect(files, num_samples=20_000, min_length=16, max_length=65_536)
    return EpochPlanner(
        lengths=[len(text) for text in texts],
        cost_model=cost_model(),
        world_size=world_size,
        memory_limit_bytes=MEMORY_LIMIT_BYTES,
        options=PlanningOptions(),
        batch_size=8,
        seed=0,
        dataset_name="the standard library's definitions",
    )


def main(path: Path) -> None:
    """Draw the first of the iterations that use most SP sizes and most counts of recomputation."""
    epoch = planner().epoch(0)
    variety = [
        (
            len({m.sp_size for m in p.micro_batches}),
            len({m.recompute_blocks for m in p.micro_batches}),
        )
        for p in epoch
    ]
    most = variety.index(max(variety))
    draw_timeline(epoch[most], path)
    print(f"Wrote {path}: iteration {most} of {len(epoch)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("timeline.png"))

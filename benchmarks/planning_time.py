"""How long planning takes on one core: per iteration and for a whole epoch (CPU seconds).

    python benchmarks/planning_time.py                     # 1,000,000 samples, 32 ranks
    python benchmarks/planning_time.py --samples 100000 --world-size 8 --batch-size 4

Lengths are log-normal over about three orders of magnitude; costs follow an analytic law. Aims:
<= 1 ms per iteration, <= 60 s per epoch.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from lightning_dcp.planning import (
    POLICIES,
    CostModel,
    EpochPlanner,
    Measurement,
    PlanningOptions,
    best_static,
    fit_cost_model,
)

NUM_BLOCKS, WIDTH = 24, 1024
LIMIT_BYTES = 40 * 2**30


def analytic_cost_model(sp_sizes: list[int]) -> CostModel:
    """Costs of a transformer of 24 blocks of width 1024 on a GPU of about 100 TFLOP/s."""
    points = []
    for p in sp_sizes:
        for b in (1, 4, 16):
            for s in (64, 1024, 8192, 65536):
                tokens = b * s / p
                flops = tokens * (24 * WIDTH**2 + 2 * s * WIDTH)
                # Four all-to-alls; InfiniBand beyond a node of eight.
                bandwidth = 200e9 if p <= 8 else 40e9
                communication = 4 * (15e-6 * np.log2(p) + 2 * tokens * WIDTH / bandwidth * (p > 1))
                forward = 40e-6 + flops / 100e12 + communication
                points.append(
                    Measurement(
                        batch_size=b,
                        seq_len=s,
                        sp_size=p,
                        forward_s=forward,
                        backward_s=2 * forward,
                        rest_s=1e-3 + 2e-8 * b * s,
                        saved_bytes=34 * tokens * WIDTH,
                        input_bytes=2 * tokens * WIDTH,
                        rest_bytes=8 * b * s * WIDTH,
                    )
                )
    return fit_cost_model(
        points, num_blocks=NUM_BLOCKS, fixed_bytes=6 * 2**30, step_overhead_s=0.02
    )


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--world-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=1, help="of the DataLoader, per rank")
    parser.add_argument("--policy", nargs="+", default=["dcp-intra"], choices=POLICIES)
    parser.add_argument("--sigma", type=float, default=1.2, help="of the logarithm of lengths")
    parser.add_argument("--median", type=int, default=600)
    parser.add_argument("--longest", type=int, default=65536)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--static", action="store_true", help="also plan the best static baseline")
    args = parser.parse_args()

    rng = np.random.default_rng(args.seed)
    lengths = np.exp(rng.normal(np.log(args.median), args.sigma, args.samples)).astype(np.int64)
    lengths = np.clip(lengths, 16, args.longest)
    cost_model = analytic_cost_model([2**i for i in range(args.world_size.bit_length())])
    print(
        f"{args.samples:,} samples of {lengths.min()} to {lengths.max()} tokens, mean "
        f"{lengths.mean():.0f}; W={args.world_size}, batch size {args.batch_size}, "
        f"seed {args.seed}"
    )
    columns = "policy      set-up s  iterations  epoch s  ms/iteration  ms/Plan"
    print(columns + "  predicted s  idle %  pad %  step spread %")

    for policy in args.policy:
        start = time.process_time()
        planner = EpochPlanner(
            lengths=lengths,
            cost_model=cost_model,
            world_size=args.world_size,
            memory_limit_bytes=LIMIT_BYTES,
            batch_size=args.batch_size,
            seed=args.seed,
            options=PlanningOptions(policy=policy),
        )
        report(policy, planner, time.process_time() - start)
        if args.static:
            start = time.process_time()
            static = best_static(planner)
            report(
                f"  static p={static.bucket_table()[0].sp_size}",
                static,
                time.process_time() - start,
            )


def report(name: str, planner: EpochPlanner, setup_s: float) -> None:
    """Plan one epoch and print a row."""
    start = time.process_time()
    epoch = planner.epoch(0)
    epoch_s = time.process_time() - start
    start = time.process_time()
    for i in range(min(100, len(epoch))):
        epoch[i]
    plan_ms = 1e3 * (time.process_time() - start) / min(100, len(epoch))
    steps = epoch.tokens_per_step
    print(
        f"{name:<11} {setup_s:8.2f}  {len(epoch):10d}  {epoch_s:7.2f}  "
        f"{1e3 * epoch_s / len(epoch):12.3f}  {plan_ms:7.3f}  {epoch.predicted_time_s:11.1f}  "
        f"{100 * epoch.predicted_idle_share:6.2f}  {100 * epoch.padding_share:5.2f}  "
        f"{100 * steps.std() / steps.mean():13.1f}"
    )


if __name__ == "__main__":
    main()

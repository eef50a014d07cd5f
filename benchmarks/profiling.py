"""How long the cost profile takes, and how well it predicts what it has not seen.

    python benchmarks/profiling.py                      # 4 CPU ranks, the demo's model and data
    python benchmarks/profiling.py --devices 1 --budget 10

Prints the seconds the profile took, the number of measured points, the held-out errors of the cost
model, and, after a few training iterations, the median ratio of measured to predicted makespan.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import rich
import torch

import lightning_dcp
from lightning_dcp.profiling.report import profile_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from stdlib_lm import StdlibData, StdlibLM


class Ratios(L.Callback):
    """Measured over predicted makespan of every iteration."""

    def __init__(self) -> None:
        self.ratios: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        report = trainer.strategy.last_report
        self.ratios.append(report.makespan_s / report.predicted_makespan_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--budget", type=float, default=20.0, help="budget_s of the profile")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--strategy", choices=["dcp", "dcp_ddp"], default="dcp")
    args = parser.parse_args()

    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    strategy_class = {"dcp": lightning_dcp.DCPStrategy, "dcp_ddp": lightning_dcp.DCPDDPStrategy}
    strategy = strategy_class[args.strategy](
        profiling=lightning_dcp.ProfilingOptions(budget_s=args.budget, cache=False)
    )
    ratios = Ratios()
    start = time.perf_counter()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="gpu" if on_gpu else "cpu",
        devices=args.devices,
        max_steps=args.iterations,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[ratios],
    )
    trainer.fit(StdlibLM(), datamodule=StdlibData())
    if not trainer.is_global_zero:
        return
    profile = strategy.cost_profile
    assert profile is not None
    error = profile.cost_model().held_out
    rich.print(profile_table(profile))
    print(f"profile: {profile.duration_s:.1f} s of a budget of {args.budget:g} s")
    print(f"points: {len(profile.measurements)} measured, {len(profile.skipped)} left out")
    print(f"held out: {error}")
    print(
        f"measured / predicted makespan over {len(ratios.ratios)} iterations: median"
        f" {statistics.median(ratios.ratios):.2f}, quartiles"
        f" {' to '.join(f'{q:.2f}' for q in statistics.quantiles(ratios.ratios, n=4)[::2])}"
    )
    print(f"the whole run took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

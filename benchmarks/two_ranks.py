"""Measured seconds of an epoch on two ranks: each policy beside the static plan ("bucket").

    python benchmarks/two_ranks.py                    # two CPU ranks of one thread, or two GPUs
    python benchmarks/two_ranks.py --policies bucket dcp-intra --repeats 9 --json two_ranks.json

Most samples are short and make up most of the work; a few are long. The memory limit is set such
that the longest fits on two ranks together but not on one, by the library's own cost model: a
static plan has to run everything at p = 2. Everything else is alike for all policies: samples,
optimizer steps, tokens per step, initial weights, and the one cost profile that all plan from.

Every run is a real `Trainer.fit` of one epoch, timed from its start to its end, loading, logging
and optimizer included. Policies take turns, so that a machine whose speed drifts slows all of them;
CPU seconds (of rank 0) hardly depend on what else the machine does.
In the first round, which is not timed, weights stand still (learning rate 0): each policy then must
find the same mean loss, or it did not train on the same samples.

Aim: `dcp-intra` takes the time of `bucket` / 1.3 or less.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import rich
import torch
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

import lightning_dcp
from lightning_dcp.metrics import dcp_metrics
from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.options import POLICIES
from lightning_dcp.planning.planner import EpochPlanner
from lightning_dcp.planning.report import IterationReport

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from stdlib_lm import StdlibLM, collate, stdlib_files

BASELINE = "bucket"
DEFAULT_POLICIES = [BASELINE, "packed", "dcp-inter", "dcp-intra", "global-batch"]
NUM_RANKS = 2
SAMPLES_PER_STEP = 64  # on average; one of them is long
STRATEGIES = {"dcp": lightning_dcp.DCPStrategy, "dcp_ddp": lightning_dcp.DCPDDPStrategy}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and on what."""

    on_gpu: bool
    channels: int
    heads: int
    depth: int
    short: tuple[int, int]  # least and largest length of the many, spread evenly in log(length)
    long: tuple[int, int]  # the same of the few

    def lengths(self, num_steps: int) -> list[int]:
        """Lengths of all samples, in tokens, in the order of the data set."""
        rng = np.random.default_rng(0)

        def draw(bounds: tuple[int, int], num: int) -> list[int]:
            return [int(x) for x in np.exp(rng.uniform(*np.log(bounds), num)).round()]

        short = draw(self.short, num_steps * (SAMPLES_PER_STEP - 1))
        return [*short, *draw(self.long, num_steps - 1), self.long[1]]


CPU = Workload(on_gpu=False, channels=64, heads=4, depth=4, short=(64, 512), long=(1024, 2048))
GPU = Workload(
    on_gpu=True, channels=1024, heads=16, depth=12, short=(512, 4096), long=(16384, 32768)
)


class ShortAndLong(lightning_dcp.DCPDataModuleMixin, L.LightningDataModule):
    """Pieces of the standard library's source, of given lengths in bytes."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        ends = np.cumsum(lengths).tolist()
        text = b"".join(path.read_bytes() for path in stdlib_files()[:256])
        text *= math.ceil(ends[-1] / len(text))
        self.pieces = [text[end - n : end] for n, end in zip(lengths, ends, strict=True)]

    def sequence_lengths(self, dataset: list[bytes]) -> list[int]:
        return [len(text) for text in dataset]

    def train_dataloader(self) -> DataLoader[bytes]:
        size = SAMPLES_PER_STEP // NUM_RANKS
        return DataLoader(self.pieces, batch_size=size, shuffle=True, collate_fn=collate)


class Timed(L.Callback):
    """Seconds of the epoch, those on the CPU, and the report of each iteration."""

    def __init__(self) -> None:
        self.seconds = self.cpu_s = 0.0
        self.reports: list[IterationReport] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.barrier()
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.reports.append(trainer.strategy.last_report)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        trainer.strategy.barrier()
        self.seconds = time.perf_counter() - self._start
        self.cpu_s = time.process_time() - self._cpu_start


@dataclass
class Results:
    """All timed epochs of one policy; every run makes the same plan."""

    planner: EpochPlanner
    still_loss: float
    epochs: list[Timed] = field(default_factory=list)

    def iteration_errors(self) -> list[float]:
        """|predicted / measured - 1| of each iteration's makespan (measured: median of epochs)."""
        errors = []
        for reports in zip(*(timed.reports for timed in self.epochs), strict=True):
            measured = statistics.median(report.makespan_s for report in reports)
            errors.append(abs(reports[0].predicted_makespan_s / measured - 1))
        return errors


class Bench:
    """Runs epochs that differ in their policy only."""

    def __init__(self, args: argparse.Namespace, workload: Workload) -> None:
        self.args, self.workload = args, workload
        self.lengths = workload.lengths(args.steps)
        self.data = ShortAndLong(self.lengths)
        self.memory_limit_bytes: int | None = None

    def fit(self, policy: str, *, learning_rate: float, max_steps: int = -1) -> tuple[Any, Timed]:
        """One epoch (or less); the strategy, which keeps its planner, and what was measured."""
        w, args = self.workload, self.args
        L.seed_everything(0, verbose=False)
        strategy: Any = STRATEGIES[args.strategy](
            policy=policy,
            # Tokens of a step: by default those of `batch_size` samples per rank, as under DDP.
            planning=lightning_dcp.PlanningOptions(memory_limit_bytes=self.memory_limit_bytes),
            profiling=lightning_dcp.ProfilingOptions(budget_s=args.profile_seconds),
        )
        timed = Timed()
        L.Trainer(
            strategy=strategy,
            accelerator="gpu" if w.on_gpu else "cpu",
            devices=NUM_RANKS,
            precision="bf16-mixed" if w.on_gpu else "32-true",
            max_epochs=1,
            max_steps=max_steps,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            callbacks=[timed],
        ).fit(StdlibLM(w.channels, w.heads, w.depth, learning_rate), datamodule=self.data)
        return strategy, timed

    def limit_memory(self, costs: Costs) -> None:
        """Set a limit between what the longest sample needs on one rank and on two."""
        longest, blocks = max(self.lengths), costs.num_blocks
        (alone, alone_all), (shared, shared_all) = [
            [int(costs.memory_bytes(1, longest, p, r)) for r in (0, blocks)] for p in (1, NUM_RANKS)
        ]
        usable = (alone_all + shared_all) // 2
        # The planner takes off a margin for the cost model's error: add it.
        spare = (usable - costs.fixed_bytes) * (1 + costs.memory_error)
        self.memory_limit_bytes = costs.fixed_bytes + math.ceil(spare)
        say(
            f"memory of the longest sample: p=1 {mib(alone)} (all {blocks} blocks recomputed:"
            f" {mib(alone_all)}), p={NUM_RANKS} {mib(shared)} ({mib(shared_all)});"
            f" {mib(costs.fixed_bytes)} of it is there always.\nLimit"
            f" {mib(self.memory_limit_bytes)} per rank, of which {mib(usable)} are planned with"
        )
        if not shared_all < usable < alone_all:
            raise SystemExit("Two ranks save no memory for the longest sample: no limit exists.")

    def describe(self, costs: Costs) -> None:
        """Say what is trained."""
        w, lengths, steps = self.workload, np.array(self.lengths), self.args.steps
        short, seconds = lengths <= w.short[1], costs.time_s(1, lengths, 1, 0)
        say(
            f"{NUM_RANKS} ranks on {'GPUs' if w.on_gpu else 'CPU'}, {self.args.strategy};"
            f" {w.depth} blocks of {w.channels} channels; {len(lengths)} samples, {steps} steps of"
            f" {lengths.sum() / steps:.0f} tokens\nshort ones ({w.short[0]} to {w.short[1]}"
            f" tokens): {short.mean():.1%} of samples, {lengths[short].sum() / lengths.sum():.0%}"
            f" of tokens, {seconds[short].sum() / seconds.sum():.0%} of the work; long ones up to"
            f" {lengths.max()} tokens"
        )


def run(args: argparse.Namespace, workload: Workload) -> dict[str, Results]:
    """Profile once, then all policies in turn, `repeats` times after a round that is not timed."""
    bench = Bench(args, workload)
    strategy, _ = bench.fit("dcp-intra", learning_rate=0.0, max_steps=1)
    bench.describe(strategy.planner.cost_model)
    bench.limit_memory(strategy.planner.cost_model)
    profile = strategy.cost_profile.fingerprint
    results = {}
    for policy in args.policies:
        strategy, timed = bench.fit(policy, learning_rate=0.0)
        assert strategy.cost_profile.fingerprint == profile, "another cost profile was used"
        results[policy] = Results(strategy.planner, mean_loss(timed.reports))
        targets = sum(report.num_targets for report in timed.reports)
        assert targets == sum(bench.lengths), f"{policy}: {targets} of {sum(bench.lengths)} tokens"
    for repeat in range(args.repeats):
        first = repeat % len(args.policies)  # nobody always runs after the same one
        for policy in [*args.policies[first:], *args.policies[:first]]:
            results[policy].epochs.append(bench.fit(policy, learning_rate=4e-3)[1])
    return results


def mean_loss(reports: Sequence[IterationReport]) -> float:
    """Of all tokens."""
    total = math.fsum(report.loss * report.num_targets for report in reports)
    return total / math.fsum(report.num_targets for report in reports)


def report(results: dict[str, Results], args: argparse.Namespace) -> None:
    """Print the tables; write the raw figures where asked to."""
    columns = ["seconds", f"{BASELINE} / it", "CPU s", "predicted", "error", "iterations' (worst)"]
    times = Table("policy", *columns, title=f"one epoch: medians of {args.repeats} (least - most)")
    columns = ["micro-batches", "p", "r", "padding", "idle", "peak MiB (predicted)", "loss"]
    plans = Table("policy", *columns, title="as run")
    raw: dict[str, Any] = {}
    for policy, result in results.items():
        seconds = [timed.seconds for timed in result.epochs]
        base = [timed.seconds for timed in results[BASELINE].epochs]
        median = statistics.median(seconds)
        ratio = statistics.median(base) / median
        rounds = [a / b for a, b in zip(base, seconds, strict=True)]
        errors, epoch = result.iteration_errors(), result.planner.epoch(0)
        times.add_row(
            policy,
            f"{median:.2f} ({min(seconds):.2f} - {max(seconds):.2f})",
            f"{ratio:.2f} ({min(rounds):.2f} - {max(rounds):.2f})",
            f"{statistics.median(timed.cpu_s for timed in result.epochs):.2f}",
            f"{epoch.predicted_time_s:.2f}",
            f"{epoch.predicted_time_s / median - 1:+.1%}",
            f"{statistics.median(errors):.1%} ({max(errors):.1%})",
        )
        reports, metrics = result.epochs[-1].reports, dcp_metrics(prefix="")
        for iteration in reports:
            metrics.update(iteration)
        values = {name: float(value) for name, value in metrics.compute().items()}
        plans.add_row(
            policy,
            str(len(epoch.sp_sizes)),
            shares(epoch.sp_sizes.tolist()),
            shares(epoch.recompute_blocks.tolist()),
            f"{values['padding_share']:.1%}",
            f"{values['idle_share']:.1%}",
            f"{values['peak_bytes'] / 2**20:.1f} ({values['predicted_peak_bytes'] / 2**20:.1f})",
            f"{reports[0].loss:.2f} to {reports[-1].loss:.2f}",
        )
        raw[policy] = {
            "epoch_s": seconds,
            "cpu_s_of_rank_0": [timed.cpu_s for timed in result.epochs],
            "predicted_epoch_s": epoch.predicted_time_s,
            "speedup": ratio,
            "speedup_by_round": rounds,
            "iteration_errors": errors,
            "sp_sizes": sorted(set(epoch.sp_sizes.tolist())),
            "still_loss": result.still_loss,
            "losses": [r.loss for r in reports],
        }
    Console(width=None if rich.get_console().is_terminal else 130).print(times, plans)
    still = [result.still_loss for result in results.values()]
    say(
        f"mean loss of the epoch with weights held still: {still[0]:.5f}; policies differ by"
        f" {(max(still) - min(still)) / still[0]:.1e} of it"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def shares(values: Sequence[int]) -> str:
    """How often each value occurs, such as `0: 90%, 4: 10%`."""
    counts = sorted(Counter(values).items())
    return ", ".join(f"{value}: {count / len(values):.0%}" for value, count in counts)


@rank_zero_only
def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--policies", nargs="+", choices=POLICIES, default=DEFAULT_POLICIES)
    add("--repeats", type=int, default=5, help="timed epochs of each policy")
    add("--steps", type=int, default=5, help="optimizer steps of an epoch")
    add("--strategy", choices=sorted(STRATEGIES), default="dcp_ddp")
    add("--profile-seconds", type=float, default=20.0, help="budget of the cost profile")
    add("--channels", type=int, help="width of the model, in place of the device's own")
    add("--depth", type=int, help="number of blocks, likewise")
    add("--json", type=Path, help="file for all measured figures")
    args = parser.parse_args()
    args.policies = list(dict.fromkeys([BASELINE, *args.policies]))  # others are compared with it
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning|torch|deepspeed")
    logging.disable(logging.WARNING)
    start, num_gpus = time.perf_counter(), torch.cuda.device_count()
    if num_gpus == 1:
        say("One GPU only: two ranks need two, so both run on the CPU.")
    workload = GPU if num_gpus >= NUM_RANKS else CPU
    given = {"channels": args.channels, "depth": args.depth}
    workload = replace(workload, **{name: value for name, value in given.items() if value})
    # A cache of its own: what was measured on another day, with other load, is no use here.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_DCP_CACHE"] = folder
        results = run(args, workload)
    if rank_zero_only.rank == 0:
        report(results, args)
        print(f"the whole run took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

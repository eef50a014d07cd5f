"""What a micro-batch costs under the strategy, beside a bare loop over the same micro-batches.

    python benchmarks/overhead.py                  # 4,096 tokens, one CPU rank
    python benchmarks/overhead.py --length 1024 --iterations 20

After each iteration of a real `Trainer(strategy=...)` the same micro-batches run once more in a
bare loop: forward, backward, nothing else. Both are timed in turn, so that a machine whose speed
drifts slows both; the figure is the median of the ratios. The strategy's share is all between
Lightning's start of a batch and the optimizer step: taking up the plan, random states, hooks,
logging, measuring memory, the exchange with other ranks and the reduction of gradients.

Aim: an overhead of at most 2% at 4,096 tokens on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

import lightning_dcp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from stdlib_lm import Definitions, StdlibLM, collate


class EqualData(lightning_dcp.DCPDataModuleMixin, L.LightningDataModule):
    """Definitions of one length, so that every micro-batch costs the same."""

    def __init__(self, num_samples: int, length: int, batch_size: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        texts = [
            bytes(torch.randint(32, 127, (length,), generator=generator).tolist())
            for _ in range(num_samples)
        ]
        self.texts, self.batch_size = Definitions(texts), batch_size

    def sequence_lengths(self, dataset: Any) -> list[int]:
        return [len(text) for text in dataset.texts]

    def train_dataloader(self) -> DataLoader[bytes]:
        return DataLoader(self.texts, batch_size=self.batch_size, collate_fn=collate)


class Compare(L.Callback):
    """Times each iteration, then the same micro-batches in a bare loop."""

    def __init__(self) -> None:
        self.under_strategy: list[float] = []
        self.bare: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._start = time.perf_counter()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.under_strategy.append(time.perf_counter() - self._start)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The same work without the strategy: not even its wrapper of the blocks.
        runtime = trainer.strategy._runtime
        runtime.detach()
        log, module.__dict__["log"] = module.__dict__.get("log"), lambda *a, **k: None
        start = time.perf_counter()
        for micro_batch in batch.micro_batches:
            module.training_step(micro_batch, batch_idx).backward()
        self.bare.append(time.perf_counter() - start)
        del module.__dict__["log"]
        if log is not None:
            module.__dict__["log"] = log
        module.zero_grad()
        runtime.attach()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=4096, help="tokens per micro-batch")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches per iteration")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--strategy", choices=["dcp", "dcp_ddp"], default="dcp_ddp")
    args = parser.parse_args()

    torch.set_num_threads(1)
    strategy_class = {"dcp": lightning_dcp.DCPStrategy, "dcp_ddp": lightning_dcp.DCPDDPStrategy}
    strategy = strategy_class[args.strategy](
        planning=lightning_dcp.PlanningOptions(max_batch_size=1),
        profiling=lightning_dcp.ProfilingOptions(budget_s=5.0, cache=False),
    )
    compare = Compare()
    warm_up = 2
    num_samples = args.accumulation * (args.iterations + warm_up)
    L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[compare],
    ).fit(
        StdlibLM(channels=args.channels, depth=args.depth),
        datamodule=EqualData(num_samples, args.length, args.accumulation),
    )
    pairs = list(zip(compare.under_strategy, compare.bare, strict=True))[warm_up:]
    ratios = sorted(a / b for a, b in pairs)
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    bare_ms = 1e3 * statistics.median(b for _, b in pairs) / args.accumulation
    median = statistics.median(ratios)
    print(
        f"{args.strategy}, {args.length} tokens per micro-batch, {args.accumulation} per iteration,"
        f" {len(pairs)} iterations: bare loop {bare_ms:.1f} ms per micro-batch;"
        f" strategy / bare = {median:.4f} (10% to 90%: {low:.4f} to {high:.4f}),"
        f" overhead {100 * (median - 1):+.2f}%"
    )


if __name__ == "__main__":
    main()

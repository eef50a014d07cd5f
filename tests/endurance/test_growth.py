"""Thousands of iterations: memory, files, threads and process groups do not grow."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader

from lightning_dcp.callback import DCPCallback
from lightning_dcp.profiling.options import ProfilingOptions
from tests.strategies.hand_planned import STRATEGIES
from tests.strategies.test_fit import LoggingLM
from tests.strategies.toys import Sequences, pad
from tests.worlds import World

LENGTHS = (1 + 60 * torch.rand(400, generator=torch.Generator().manual_seed(2)) ** 3).int().tolist()


class Watched(LoggingLM):
    """Does not remember what it saw: that would be growth of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.clear()
        self.fx_names.clear()
        return super().training_step(batch, batch_idx)


class Usage(L.Callback):
    """Takes stock of this process every so many iterations."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.rows: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % self.every:
            return
        gc.collect()
        _trim_heap()
        process = psutil.Process()
        self.rows.append(
            {
                "step": trainer.global_step,
                "bytes": process.memory_info().rss,
                "objects": len(gc.get_objects()),
                "files": process.num_fds(),
                "threads": threading.active_count(),
                "native_threads": process.num_threads(),
                "groups": len(distributed_c10d._world.pg_map),
                "children": len(process.children(recursive=True)),
            }
        )


def _trim_heap() -> None:
    """Give free memory back: how much of it glibc keeps is not what is asked here."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def train(rank: int, name: str, folder: str, num_steps: int) -> list[dict[str, int]]:
    usage = Usage(num_steps // 10)
    trainer = L.Trainer(
        strategy=STRATEGIES[name](profiling=ProfilingOptions(budget_s=1.5, repeats=1)),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=num_steps,
        max_epochs=-1,
        callbacks=[
            usage,
            DCPCallback(print_table=False),
            ModelCheckpoint(folder, every_n_train_steps=max(10, num_steps // 20)),
        ],
        logger=CSVLogger(folder, flush_logs_every_n_steps=10),
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=pad, shuffle=True)
    valid = DataLoader(Sequences(LENGTHS[:8]), batch_size=2, collate_fn=pad)
    trainer.fit(Watched(num_blocks=2), loader, valid)
    assert trainer.global_step == num_steps
    return usage.rows


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["dcp_ddp", "dcp", "dcp_fsdp"])
def test_nothing_grows_in_5000_iterations(name: str, tmp_path: Path) -> None:
    with World(4, timeout_s=1700) as world:
        for rows in world.run(train, name, str(tmp_path), 5000):
            print(*rows, sep="\n")
            # From the second tenth on: caches of shapes and of Lightning have filled by then. Of
            # three rows each, since a file may just be open.
            first, last = rows[1:4], rows[-3:]
            growth = {
                key: min(r[key] for r in last) - max(r[key] for r in first) for key in rows[0]
            }
            for resource in ("files", "threads", "native_threads", "groups", "children"):
                assert growth[resource] <= 0, (resource, rows)
            # One object in ten iterations, one KiB an iteration: allocators do not hold still.
            assert growth["objects"] <= 300, rows
            assert growth["bytes"] <= 3000 * 1024, rows

"""What the smaller examples share: options of the command line, one training run, its summary."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger

import lightning_dcp


def parser(description: str, name: str, max_steps: int) -> argparse.ArgumentParser:
    """Options of every example; the example adds those of its model and data."""
    gpus = torch.cuda.device_count()
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = made.add_argument
    strategies = ["dcp", "dcp_ddp", "dcp_fsdp"]
    add("--strategy", choices=strategies, default="dcp", help="on DeepSpeed ZeRO-1, DDP or FSDP2")
    add("--policy", default="dcp-intra", help="what plans each step")
    add("--devices", type=int, default=gpus or 4, help="ranks: GPUs where there are some")
    add("--max-steps", type=int, default=max_steps, help="optimizer steps")
    limit = None if gpus else 48.0
    add("--memory-limit-mb", type=float, default=limit, help="for each rank")
    add("--profile-seconds", type=float, default=15.0, help="budget of the cost profile")
    add("--seed", type=int, default=0, help="of weights and plans")
    add("--out", type=Path, default=Path("runs") / name, help="folder for logs")
    return made


def strategy_of(args: argparse.Namespace, **options: Any) -> L.pytorch.strategies.Strategy:
    """The strategy that the options ask for.

    Args:
        args: of `parser`.
        options: more of the strategy's; `planning` is a dict here.
    """
    limit = None if args.memory_limit_mb is None else int(args.memory_limit_mb * 2**20)
    planning = {"memory_limit_bytes": limit, **options.pop("planning", {})}
    made = {
        "dcp": lightning_dcp.DCPStrategy,
        "dcp_ddp": lightning_dcp.DCPDDPStrategy,
        "dcp_fsdp": lightning_dcp.DCPFSDPStrategy,
    }[args.strategy]
    return made(
        policy=args.policy,
        planning=lightning_dcp.PlanningOptions(**planning),
        profiling=lightning_dcp.ProfilingOptions(budget_s=args.profile_seconds),
        **options,
    )


class ValidationHistory(L.Callback):
    """Remembers one logged value of each validation, from the one before the first step on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[float] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.values.append(float(trainer.callback_metrics[self.name]))


def train(
    args: argparse.Namespace,
    model: L.LightningModule,
    data: L.LightningDataModule,
    metric: str,
    **options: Any,
) -> Sequence[float]:
    """Train; print how the validation's `metric` changed and return its values.

    Args:
        args: of `parser`.
        model: the model.
        data: the data.
        metric: name under which `validation_step` logs.
        options: of the strategy, see `strategy_of`.
    """
    # Lightning and DeepSpeed call what newer versions of torch have deprecated, once per rank.
    for deprecated in (".*LeafSpec.*", ".*all_gather_into_tensor.*"):
        warnings.filterwarnings("ignore", message=deprecated)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.devices))
    history = ValidationHistory(metric)
    trainer = L.Trainer(
        strategy=strategy_of(args, **options),
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        max_steps=args.max_steps,
        gradient_clip_val=1.0,
        num_sanity_val_steps=-1,  # a full validation before the first step
        val_check_interval=args.max_steps,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        logger=CSVLogger(args.out.parent, name=args.out.name),
        enable_checkpointing=False,
        callbacks=[history, lightning_dcp.DCPCallback()],
    )
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        before, after = history.values[0], history.values[-1]
        print(
            f"{metric}: {before:.3f} before the first step, {after:.3f} after "
            f"{trainer.global_step} steps"
        )
    return history.values

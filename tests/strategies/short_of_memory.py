"""Training that runs out of memory where a test says so, by plans of a made-up cost profile."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_dcp.planning import CostModel, EpochPlanner, Measurement, fit_cost_model
from lightning_dcp.planning.cost_model import HeldOutError
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.planning.plan import Plan
from lightning_dcp.strategies.reliability import ReliabilityOptions
from tests.strategies.hand_planned import (
    LENGTHS,
    NUM_BLOCKS,
    STRATEGIES,
    DoublePrecision,
    Watch,
    hand_planned,
)
from tests.strategies.toys import Sequences, ToyLM, pad, whole

#: As `dcp_ddp` counts them.
FIXED_BYTES = 5 * 8 * sum(p.numel() for p in ToyLM(num_blocks=NUM_BLOCKS).parameters())
LIMIT_BYTES = FIXED_BYTES + 100_000
#: Of one token in one block, and outside of the blocks.
BLOCK_BYTES, REST_BYTES = 1000, 500


def costs(sp_sizes: tuple[int, ...] = (1, 2, 4), scale: float = 1.0) -> CostModel:
    """Bytes by tokens: 30 tokens with nothing recomputed are the most that fits on one rank."""
    points = [
        Measurement(
            batch_size=b,
            seq_len=s,
            sp_size=p,
            forward_s=1e-3 * (0.2 + b * s / p),
            backward_s=2e-3 * (0.2 + b * s / p),
            rest_s=1e-4 * b * s,
            saved_bytes=scale * BLOCK_BYTES * b * s / p,
            input_bytes=scale * BLOCK_BYTES / 10 * b * s / p,
            rest_bytes=scale * REST_BYTES * b * s,
        )
        for p in sp_sizes
        for b in (1, 4)
        for s in (4, 16, 64)
    ]
    model = fit_cost_model(points, num_blocks=NUM_BLOCKS, fixed_bytes=FIXED_BYTES)
    return replace(model, held_out=HeldOutError(8, 0.05, 0.1, 0.05, 0.1))


def make_planner(
    *,
    world_size: int = 4,
    sp_sizes: tuple[int, ...] = (1, 2, 4),
    limit_bytes: int = LIMIT_BYTES,
    scale: float = 1.0,
    **options: Any,
) -> EpochPlanner:
    options.setdefault("tokens_per_step", 60)
    options.setdefault("bucket_edges", (1, 8, 16, 31))
    return EpochPlanner(
        lengths=LENGTHS,
        cost_model=costs(scale=scale),
        world_size=world_size,
        memory_limit_bytes=limit_bytes,
        options=PlanningOptions(sp_sizes=sp_sizes, seed=1, **options),
    )


class Starved(ToyLM):
    """Runs out of memory `times` times where `where(iteration, micro-batch, rank)` says so.

    Args:
        where: `(iteration, sample ids, p, rank)` to whether it does.
        place: "forward": between forward passes of blocks and loss; "backward": before those of the
            blocks; "embedding": after them.
    """

    def __init__(
        self, *, where: Any = None, place: str = "forward", times: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.where, self.place, self.times = where, place, times
        self.samples = SumMetric()
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
        #: Not a number, which would be put back with the iteration.
        self.raised: list[int] = []

    @property
    def num_raised(self) -> int:
        return len(self.raised)

    def forward(self, ids: Tensor) -> Tensor:
        handles = []
        if self.place == "embedding":
            handles.append(
                self.embed.register_forward_hook(lambda _, __, x: _RaiseBackward.apply(x, self))
            )
        elif self.place == "backward":
            handles.append(
                self.norm.register_forward_hook(lambda _, __, x: _RaiseBackward.apply(x, self))
            )
        else:
            handles.append(self.norm.register_forward_pre_hook(lambda *_: self.raise_maybe()))
        try:
            return super().forward(ids)
        finally:
            for handle in handles:
                handle.remove()

    def raise_maybe(self) -> None:
        strategy: Any = self.trainer.strategy
        if strategy._runner is None:  # blocks are looked at before training
            return
        state = strategy._runner.state
        m = state.plan.micro_batches[state.index]
        given = (state.plan.iteration, m.sample_ids, m.sp_size, strategy.global_rank)
        if self.where is not None and self.where(*given) and self.num_raised < self.times:
            self.raised.append(state.plan.iteration)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.num_seen += len(batch["ids"])
        self.samples.update(len(batch["ids"]))
        self.log("samples", self.samples, on_step=False, on_epoch=True)
        loss = self.losses(batch).mean()
        self.log("logged", loss, on_step=True, on_epoch=True)
        return loss


class _RaiseBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Starved) -> Tensor:
        ctx.model = model
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.model.raise_maybe()
        return grad, None


class Hungry(Starved):
    """Takes much more memory than its profile says for sequences longer than 12."""

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        if ids.shape[1] > 12:
            big = (logits.sum(-1, keepdim=True) * 0).expand(-1, -1, 100) * 1.0
            logits = logits + (big * big).sum(-1, keepdim=True)
        return logits


class WatchPlans(Watch):
    """Keeps the plans that were run, too."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, *args)
        report = trainer.strategy.last_report
        self.seen.append((trainer.global_step, report.plan.to_json(), report.loss))


def train_short(
    rank: int,
    name: str,
    planner: EpochPlanner | list[Plan],
    *,
    model_class: type[Starved] = Starved,
    reliability: dict[str, Any] | None = None,
    planning: dict[str, Any] | None = None,
    max_epochs: int = 1,
    num_workers: int = 0,
    **model_arguments: Any,
) -> dict[str, Any]:
    """`fit`; what came of it."""
    os.environ["PL_GLOBAL_SEED"] = "1"
    plugin: Any = DoublePrecision() if name == "dcp" else None
    strategy: Any = STRATEGIES[name](
        loss_average="tokens",
        reliability=ReliabilityOptions(**(reliability or {})),
        planning=PlanningOptions(**(planning or {})),
        self_check=False,
    )
    model = model_class(num_blocks=NUM_BLOCKS, double=True, **model_arguments)
    watch = WatchPlans()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=4,
        max_epochs=max_epochs,
        callbacks=[watch],
        plugins=None if plugin is None else [plugin],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = DataLoader(
        Sequences(LENGTHS), batch_size=2, collate_fn=pad, shuffle=True, num_workers=num_workers
    )
    with warnings.catch_warnings(record=True) as caught, hand_planned(strategy, planner):  # type: ignore[arg-type]
        warnings.simplefilter("always")
        trainer.fit(model, loader)
    return {
        "gradients": watch.gradients,
        "losses": watch.losses,
        "logged": float(trainer.callback_metrics["logged"]),
        "samples": float(trainer.callback_metrics["samples"]),
        "plans": [Plan.from_json(text) for _, text, _ in watch.seen],
        "steps": [step for step, _, _ in watch.seen],
        "parameters": {n: whole(p.detach()) for n, p in model.named_parameters()},
        "num_seen": int(model.num_seen),
        "num_raised": model.num_raised,
        "warnings": [str(w.message) for w in caught if "out of memory" in str(w.message)],
        "global_step": trainer.global_step,
        "forwards": [k for m in model.blocks for k in vars(m) if k == "forward"],
    }


def mean_of_steps(losses: list[float], plans: list[Plan]) -> float:
    """Weighted by elements that bear loss."""
    dataset = Sequences(LENGTHS)
    weights = [
        sum(
            int((dataset[i]["labels"] != -100).sum()) for m in p.micro_batches for i in m.sample_ids
        )
        for p in plans
    ]
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    return total / sum(weights)

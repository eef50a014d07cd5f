"""Training by plans that a test dictates, in a world of 4 ranks and in one process.

Everything is unequal: p, b, number of micro-batches and recomputation differ by rank and iteration,
groups are nested, ranks idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dcp.data.packing import Layout, PackingCollate
from lightning_dcp.planning.plan import Plan
from lightning_dcp.profiling.preserve import preserve
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from lightning_dcp.strategies.deepspeed import DCPStrategy
from lightning_dcp.strategies.fsdp import DCPFSDPStrategy
from tests.strategies.toys import (
    HandPlanner,
    Reference,
    Sequences,
    ToyLM,
    idle_plan,
    pad,
    reference,
    unequal_plan,
    whole,
)

#: Of `Sequences`, whose labels are shifted already.
PACKING = PackingCollate(Layout(("ids", "labels")))
LENGTHS = [9, 30, 5, 12, 7, 3, 11, 2, 8, 14, 1, 6, 17, 4, 10, 13, 19, 21, 5, 2]
NUM_BLOCKS = 3
STRATEGIES: dict[str, Any] = {
    "dcp": DCPStrategy,
    "dcp_ddp": DCPDDPStrategy,
    "dcp_fsdp": DCPFSDPStrategy,
}


def steps_of(plans: list[Plan]) -> list[list[int]]:
    return [[i for m in p.micro_batches for i in m.sample_ids] for p in plans]


def make_plans(num_steps: int) -> list[Plan]:
    """Iterations with different samples in different places; every third leaves two ranks idle."""
    dataset = Sequences(LENGTHS)
    plans = []
    for step in range(num_steps):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(step)).tolist()
        if step % 3 == 2:
            plans.append(idle_plan(dataset, step, order[:3]))
        else:
            plans.append(unequal_plan(dataset, step, order[:17], NUM_BLOCKS))
    return plans


def loss_scale(strategy: Any) -> float:
    """By which losses in float16 are multiplied now."""
    if isinstance(strategy, DCPStrategy):
        return float(strategy.deepspeed_engine.optimizer.loss_scale)
    return float(strategy.precision_plugin.scaler.get_scale())


def full_gradient(parameter: Any) -> Tensor:
    """A reduced gradient under ZeRO-1, put together from all ranks' parts.

    DeepSpeed's own `safe_get_full_grad` does the same but casts to float32.
    """
    full = torch.zeros_like(parameter).flatten()
    mapping = parameter._hp_mapping
    if mapping is not None:
        address = mapping.lp_fragment_address
        mine = mapping.get_lp_grad_fragment(parameter._index_in_param_group)
        full.narrow(0, address.start, address.numel).copy_(mine.flatten())
    torch.distributed.all_reduce(full)
    return full.view_as(parameter)


class Watch(L.Callback):
    """Keeps the gradients that the optimizer steps on, and the loss that callbacks see."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        self.logged: list[float] = []
        #: For subclasses.
        self.seen: list[Any] = []

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        if isinstance(trainer.strategy, DCPStrategy):
            return  # the engine reduces in its step, see `watch_engine`
        self.gradients.append(
            {n: whole(p.grad) for n, p in pl_module.named_parameters() if p.grad is not None}
        )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(trainer.strategy, DCPStrategy):
            self.watch_engine(trainer.strategy, pl_module)

    def watch_engine(self, strategy: DCPStrategy, pl_module: L.LightningModule) -> None:
        optimizer = strategy.deepspeed_engine.optimizer
        if next(pl_module.parameters()).dtype is torch.float64:
            # DeepSpeed sends and keeps gradients of unknown types in float32; these stay float64.
            optimizer.communication_data_type = torch.float64
            optimizer.ipg_buckets = {torch.float64: optimizer.ipg_buckets.pop(torch.float32)}
            optimizer.gradient_accumulation_dtype = torch.float64
        step = optimizer.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            named = pl_module.named_parameters()
            self.gradients.append({n: full_gradient(p) for n, p in named if p.requires_grad})
            return step(*args, **kwargs)

        optimizer.step = watched

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        if "logged" in trainer.callback_metrics:
            self.logged.append(float(trainer.callback_metrics["logged"]))


@contextmanager
def hand_planned(strategy: Any, plans: list[Plan] | HandPlanner) -> Iterator[None]:
    """Let the strategy follow given plans, without profile or planner."""
    from lightning_dcp.data.loader import build_plan_loader
    from lightning_dcp.strategies import mixin, preparation

    class HandPreparer(preparation.TrainPreparer):
        def prepare(self, dataloader: Any) -> preparation.Preparation:
            # The profile would show the blocks' arguments to the runtime.
            group = self._topology.group(self._topology.rank, 1)
            with preserve(self._pl_module):
                for length in (4, 6):
                    with self._runtime.micro_batch(group=group, observe=True):
                        self._pl_module(torch.ones(1, length, dtype=torch.long)).sum().backward()
            planner: Any = HandPlanner(plans) if isinstance(plans, list) else plans
            packing = PACKING if strategy.settings.planning.packing else None
            plan_loader = build_plan_loader(
                dataloader,
                planner,
                rank=self._topology.rank,
                world_size=strategy.world_size,
                packing=packing,
            )
            return preparation.Preparation(planner, None, plan_loader, False)  # type: ignore[arg-type]

    before = mixin.TrainPreparer
    mixin.TrainPreparer = HandPreparer  # type: ignore[misc]
    try:
        yield
    finally:
        mixin.TrainPreparer = before  # type: ignore[misc]


class DoublePrecision(DeepSpeedPrecision):
    """Float64 for DeepSpeed's engine, which Lightning does not offer."""

    def __init__(self) -> None:
        super().__init__("32-true")
        self._desired_dtype = torch.float64


#: The scale at which float16 starts in DeepSpeed, as that of the scaler in `train`.
FLOAT16 = {
    "fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 1},
    "zero_allow_untested_optimizer": True,
}


@contextmanager
def float16_on_cpu() -> Iterator[None]:
    """DeepSpeed can compute in float16 on a CPU, but only lists those with fast instructions."""
    from deepspeed.accelerator import get_accelerator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
        yield


def train(
    rank: int,
    name: str,
    num_steps: int,
    *,
    clip: float | None = None,
    clip_by: str | None = None,
    precision: Any = None,
    collate: Any = pad,
    loss_average: str = "tokens",
    strategy_options: dict[str, Any] | None = None,
    by_name: bool = False,
    model_class: type[ToyLM] = ToyLM,
    watch_class: type[Watch] = Watch,
    **model_arguments: Any,
) -> dict[str, Any]:
    """`fit` by `make_plans`; what came out of it, parameters and gradients whole.

    Args:
        name: of the strategy.
        num_steps: length of the epoch.
        clip: `gradient_clip_val`.
        clip_by: `gradient_clip_algorithm`.
        precision: of the Trainer; "16-mixed with scaler" is what Lightning does on CUDA only.
        collate: of the loader.
        loss_average: of the strategy.
        strategy_options: further ones.
        by_name: give the Trainer the strategy's name, for which Lightning refuses less.
        model_class: what is trained.
        watch_class: the callback.
        model_arguments: of the model.
    """
    plugin: Any = None
    if name == "dcp" and model_arguments.get("double"):
        plugin = DoublePrecision()
    elif name == "dcp" and precision == "16-mixed with scaler":
        precision, strategy_options = "16-mixed", {"config": FLOAT16}
    elif precision == "16-mixed with scaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        plugin, precision = MixedPrecision("16-mixed", device="cpu", scaler=scaler), None
    strategy: Any = STRATEGIES[name](loss_average=loss_average, **(strategy_options or {}))
    model = model_class(num_blocks=NUM_BLOCKS, **model_arguments)
    watch = watch_class()
    trainer = L.Trainer(
        strategy=name if by_name else strategy,
        accelerator="cpu",
        devices=4,
        max_epochs=1,
        callbacks=[watch],
        gradient_clip_val=clip,
        gradient_clip_algorithm=clip_by,
        precision=precision,
        plugins=[plugin] if plugin is not None else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    float16 = float16_on_cpu() if strategy_options == {"config": FLOAT16} else nullcontext()
    with hand_planned(trainer.strategy, make_plans(num_steps)), float16:
        trainer.fit(
            model, DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=collate, shuffle=True)
        )
    return {
        "gradients": watch.gradients,
        "losses": watch.losses,
        "logged": watch.logged,
        "seen": watch.seen,
        "parameters": {n: whole(p.detach()) for n, p in model.named_parameters()},
        "global_step": trainer.global_step,
        "left_behind": [k for m in model.blocks for k in vars(m) if k == "forward"],
    }


def wanted_of(
    num_steps: int,
    clip: float | None = None,
    name: str = "dcp_ddp",
    clip_value: float | None = None,
    model_class: type[ToyLM] = ToyLM,
    **model_arguments: Any,
) -> Reference:
    """What one process does."""
    model = model_class(num_blocks=NUM_BLOCKS, **model_arguments)
    if name == "dcp" and model_arguments.get("double"):
        # ZeRO-1 keeps master weights in float32, and the parameters are set from them at the start.
        model.float().double()
    return reference(model, Sequences(LENGTHS), steps_of(make_plans(num_steps)), clip, clip_value)

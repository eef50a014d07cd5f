"""The optimizer step equals that of a single process on the same samples (DESIGN.md section 9).

4 real ranks under Lightning's Trainer, against plain PyTorch in one process; everything unequal: p,
b, number of micro-batches and recomputation differ by rank and iteration, groups are nested, ranks
idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dcp.planning.plan import Plan
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from lightning_dcp.strategies.deepspeed import DCPStrategy
from tests.strategies.toys import (
    HandPlanner,
    Reference,
    Sequences,
    ToyLM,
    idle_plan,
    largest_relative_error,
    pad,
    pad_hidden_labels,
    reference,
    unequal_plan,
)
from tests.worlds import World

LENGTHS = [9, 30, 5, 12, 7, 3, 11, 2, 8, 14, 1, 6, 17, 4, 10, 13, 19, 21, 5, 2]
NUM_BLOCKS = 3


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

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        if isinstance(trainer.strategy, DCPStrategy):
            return  # the engine reduces in its step, see `watch_engine`
        self.gradients.append(
            {n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None}
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
            self.gradients.append({n: full_gradient(p) for n, p in pl_module.named_parameters()})
            return step(*args, **kwargs)

        optimizer.step = watched

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        if "logged" in trainer.callback_metrics:
            self.logged.append(float(trainer.callback_metrics["logged"]))


def hand_planned(strategy: Any, plans: list[Plan]) -> None:
    """Let the strategy follow given plans, without profile or planner."""
    from lightning_dcp.data.loader import build_plan_loader
    from lightning_dcp.strategies import mixin, preparation

    class HandPreparer(preparation.TrainPreparer):
        def prepare(self, dataloader: Any) -> preparation.Preparation:
            # The profile would show the blocks' arguments to the runtime.
            group = self._topology.group(strategy.global_rank, 1)
            for length in (4, 6):
                with self._runtime.micro_batch(group=group, observe=True):
                    self._pl_module(torch.ones(1, length, dtype=torch.long)).sum().backward()
            self._pl_module.zero_grad()
            planner: Any = HandPlanner(plans)
            plan_loader = build_plan_loader(
                dataloader, planner, rank=strategy.global_rank, world_size=strategy.world_size
            )
            return preparation.Preparation(planner, None, plan_loader, False)  # type: ignore[arg-type]

    mixin.TrainPreparer = HandPreparer  # type: ignore[misc]


class DoublePrecision(DeepSpeedPrecision):
    """Float64 for DeepSpeed's engine, which Lightning does not offer."""

    def __init__(self) -> None:
        super().__init__("32-true")
        self._desired_dtype = torch.float64


def train(
    rank: int,
    name: str,
    num_steps: int,
    *,
    clip: float | None = None,
    collate: Any = pad,
    loss_average: str = "tokens",
    **model_arguments: Any,
) -> dict[str, Any]:
    plans = make_plans(num_steps)
    cls = {"dcp": DCPStrategy, "dcp_ddp": DCPDDPStrategy}[name]
    strategy = cls(loss_average=loss_average)
    hand_planned(strategy, plans)
    model = ToyLM(num_blocks=NUM_BLOCKS, **model_arguments)
    watch = Watch()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=4,
        max_epochs=1,
        callbacks=[watch],
        gradient_clip_val=clip,
        plugins=[DoublePrecision()] if name == "dcp" and model_arguments.get("double") else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        model, DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=collate, shuffle=True)
    )
    return {
        "gradients": watch.gradients,
        "losses": watch.losses,
        "logged": watch.logged,
        "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
        "global_step": trainer.global_step,
        "left_behind": [k for m in model.blocks for k in vars(m) if k == "forward"],
    }


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=100) as world:
        yield world


def wanted_of(
    num_steps: int, clip: float | None = None, name: str = "dcp_ddp", **model_arguments: Any
) -> Reference:
    model = ToyLM(num_blocks=NUM_BLOCKS, **model_arguments)
    if name == "dcp" and model_arguments.get("double"):
        # ZeRO-1 keeps master weights in float32, and the parameters are set from them at the start.
        model.float().double()
    return reference(model, Sequences(LENGTHS), steps_of(make_plans(num_steps)), clip)


def test_the_plans_are_as_unequal_as_they_should_be() -> None:
    first, second, third = make_plans(3)
    for plan in (first, second):
        assert {m.sp_size for m in plan.micro_batches} == {1, 2, 4}
        assert {m.recompute_blocks for m in plan.micro_batches} == {0, 1, 2, NUM_BLOCKS}
        assert [len(plan.for_rank(r)) for r in range(4)] == [3, 4, 5, 2]
        assert any(m.batch_size > 1 and m.num_tokens < m.padded_tokens for m in plan.micro_batches)
    assert [len(third.for_rank(r)) for r in range(4)] == [1, 2, 0, 0]


@pytest.mark.parametrize("name", ["dcp_ddp", "dcp"])
class TestExactness:
    def test_float32(self, world: World, name: str) -> None:
        wanted = wanted_of(20)
        results = world.run(train, name, 20)
        for result in results:
            assert result["global_step"] == 20
            for step in range(3):  # later ones differ by what the steps before have rounded
                assert (
                    largest_relative_error(result["gradients"][step], wanted.gradients[step])
                    <= 2e-6 * 4**step
                )
            assert largest_relative_error(result["parameters"], wanted.parameters) <= 1e-5
            assert result["losses"] == pytest.approx(wanted.losses, rel=1e-5)
            assert result["left_behind"] == []
            assert result["losses"] == results[0]["losses"], "the same on all ranks, idle ones too"

    def test_float64(self, world: World, name: str) -> None:
        wanted = wanted_of(3, name=name, double=True)
        for result in world.run(train, name, 3, double=True):
            assert largest_relative_error(result["gradients"][0], wanted.gradients[0]) <= 1e-12
            if name == "dcp_ddp":  # the master weights of ZeRO-1 are float32
                for step in (1, 2):
                    assert (
                        largest_relative_error(result["gradients"][step], wanted.gradients[step])
                        <= 1e-12
                    )
                assert largest_relative_error(result["parameters"], wanted.parameters) <= 1e-12
            assert result["losses"][0] == pytest.approx(wanted.losses[0], rel=1e-12)

    def test_clipping_by_the_norm_one_process_sees(self, world: World, name: str) -> None:
        norms = [
            float(torch.stack([g.norm() for g in step.values()]).norm())
            for step in wanted_of(20).gradients
        ]
        clip = 0.5 * min(norms)
        wanted = wanted_of(20, clip)
        for result in world.run(train, name, 20, clip=clip):
            assert largest_relative_error(result["parameters"], wanted.parameters) <= 1e-5

    def test_targets_known_only_from_the_training_step(self, world: World, name: str) -> None:
        wanted = wanted_of(3, name=name, double=True)
        for result in world.run(
            train, name, 3, double=True, collate=pad_hidden_labels, report_targets=True
        ):
            assert largest_relative_error(result["gradients"][0], wanted.gradients[0]) <= 1e-12
            assert result["losses"][0] == pytest.approx(wanted.losses[0], rel=1e-12)
            assert result["logged"] == pytest.approx(result["losses"], rel=1e-6)

    def test_loss_averaged_over_samples(self, world: World, name: str) -> None:
        wanted = wanted_of(3, name=name, double=True, mean_over="samples")
        results = world.run(
            train, name, 3, double=True, loss_average="samples", mean_over="samples"
        )
        for result in results:
            assert largest_relative_error(result["gradients"][0], wanted.gradients[0]) <= 1e-12

    def test_a_wrong_weight_is_seen(self, world: World, name: str) -> None:
        """The comparison can fail: a token mean trained as if it were a sample mean is far off."""
        wanted = wanted_of(1, name=name, double=True)
        results = world.run(train, name, 1, double=True, loss_average="samples")
        assert largest_relative_error(results[0]["gradients"][0], wanted.gradients[0]) > 1e-2

"""Packed training: the gradients of one process that runs sample by sample, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from tests.strategies.hand_planned import LENGTHS, STRATEGIES, train, wanted_of
from tests.strategies.toys import Sequences, ToyLM, largest_relative_error, pad
from tests.worlds import World


class PackableLM(ToyLM):
    """Takes positions from the batch."""

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if positions is None:
            positions = torch.arange(ids.shape[1])[None]
        angles = positions.to(x.dtype)[..., None]
        positions = torch.sin(angles / torch.arange(1, x.shape[-1] + 1, dtype=x.dtype))
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self(batch["ids"], batch.get("position_ids"))
        keep = batch["labels"] != -100
        each = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), batch["labels"], reduction="none"
        )
        return each[keep]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=100) as world:
        yield world


@pytest.mark.parametrize("name", STRATEGIES)
def test_exact_against_one_process_per_sample(world: World, name: str) -> None:
    wanted = wanted_of(3, name=name, double=True, model_class=PackableLM)
    options = {"strategy_options": {"packing": True}, "model_class": PackableLM, "double": True}
    for result in world.run(train, name, 3, **options):
        # the master weights of ZeRO-1 are float32, so that later steps differ
        for step in range(1 if name == "dcp" else 3):
            assert (
                largest_relative_error(result["gradients"][step], wanted.gradients[step]) <= 1e-12
            )
            assert result["losses"][step] == pytest.approx(wanted.losses[step], rel=1e-12)


class Shapes(L.Callback):
    """Shapes of the micro-batches that `training_step` gets."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []
        self.samples: list[int] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        step = pl_module.training_step

        def watched(batch: dict[str, Tensor], batch_idx: int) -> Any:
            self.seen.append(tuple(batch["ids"].shape))
            self.samples.extend(batch["id"].tolist())
            assert int((batch["position_ids"] == 0).sum()) == len(batch["id"])
            return step(batch, batch_idx)

        pl_module.training_step = watched


def fit(
    rank: int, cache: str, model_class: type[ToyLM], packing: bool = True, **options: Any
) -> dict[str, Any]:
    shapes = Shapes()
    trainer = L.Trainer(
        strategy=DCPDDPStrategy(
            packing=packing,
            profiling=ProfilingOptions(budget_s=1.5, repeats=1, cache_dir=cache),
            **options,
        ),
        accelerator="cpu",
        devices=4,
        max_epochs=1,
        callbacks=[shapes] if packing else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    model = model_class()
    loader = DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=pad, shuffle=True)
    try:
        trainer.fit(model, loader, DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=pad))
    except MisconfigurationException as error:
        return {"error": str(error)}
    report = trainer.strategy.last_report
    assert report is not None
    return {
        "shapes": shapes.seen,
        "samples": shapes.samples,
        "padding": report.plan.padding_share,
        "micro_batches": report.plan.micro_batches,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
    }


def test_profile_plan_train_and_validate(world: World, tmp_path: Path) -> None:
    results = world.run(fit, str(tmp_path), PackableLM)
    seen = [i for result in results for i in result["samples"]]
    assert set(seen) == set(range(len(LENGTHS)))
    assert all(shape[0] == 1 for result in results for shape in result["shapes"])
    assert all(result["padding"] == 0 for result in results)
    assert len({result["val_loss"] for result in results}) == 1


def test_a_model_that_counts_positions_itself_is_refused(world: World, tmp_path: Path) -> None:
    for result in world.run(fit, str(tmp_path), ToyLM):
        assert "two packed samples" in result["error"]
        assert "`position_ids`" in result["error"] and "pack_samples" in result["error"]


def test_options() -> None:
    assert DCPDDPStrategy(packing=True).settings.planning.packing
    assert not DCPDDPStrategy().settings.planning.packing
    assert PlanningOptions(packing=True).fingerprint() != PlanningOptions().fingerprint()
    with pytest.raises(ValueError, match="pad_multiple=8 has no meaning with packing=True"):
        PlanningOptions(packing=True, pad_multiple=8)

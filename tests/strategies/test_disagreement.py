"""One rank differs from the others: what differs is named before a micro-batch has run."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.planning.plan import MicroBatch, Plan
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from lightning_dcp.strategies.measuring import CostMeasurer
from lightning_dcp.strategies.reliability import ReliabilityOptions
from lightning_dcp.strategies.watch.plan_hash import are_equal, hash_pieces, to_be_summed
from tests.strategies.faults import SavablePlanner
from tests.strategies.hand_planned import hand_planned
from tests.strategies.toys import Sequences, ToyLM, micro_batch, pad
from tests.worlds import World

LENGTHS = [9, 30, 5, 12, 7, 3, 11, 2]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2, timeout_s=100.0) as world:
        yield world


class CountingLM(ToyLM):
    """Counts its training steps."""

    def __init__(self, **options: Any) -> None:
        super().__init__(num_blocks=2, **options)
        self.steps = 0

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)


def plans(swapped: int | None = None) -> list[Plan]:
    """Three iterations of two micro-batches; in one of them ranks get each other's."""
    dataset = Sequences(LENGTHS)
    return [
        Plan(
            epoch=0,
            iteration=i,
            world_size=2,
            micro_batches=tuple(
                micro_batch(dataset, [2 * i + j], (j + (i == swapped)) % 2) for j in range(2)
            ),
        )
        for i in range(3)
    ]


def fit(kind: str, rank: int, cache: str) -> tuple[str, int]:
    """The error of a `fit` in which rank 1 differs, and how many training steps ran before."""
    differs = rank == 1
    model = CountingLM(lr=0.02 if differs and kind == "learning rate" else 0.01)
    if differs and kind == "shape":
        model.head = nn.Linear(16, 37, bias=False, dtype=model.head.weight.dtype)
    planning = PlanningOptions(seed=5 if differs and kind == "planning.seed" else 4)
    if kind == "PL_GLOBAL_SEED":
        planning = PlanningOptions()
    strategy = DCPDDPStrategy(
        planning=planning,
        profiling=ProfilingOptions(budget_s=1.0, repeats=1, lengths=(2, 9, 30), cache_dir=cache),
        reliability=ReliabilityOptions(
            adapt_to_drift=not (differs and kind == "reliability.adapt_to_drift")
        ),
        self_check=False,
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=2 if differs and kind == "max_epochs" else 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(Sequences(LENGTHS), batch_size=1, collate_fn=pad)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "version" and differs:
            version = importlib.metadata.version
            patch.setattr(
                importlib.metadata, "version", lambda n: "1.2" if n == "numpy" else version(n)
            )
        if kind == "PL_GLOBAL_SEED":
            patch.setenv("PL_GLOBAL_SEED", str(rank))
        if kind == "cost profile" and differs:
            profile = CostMeasurer.profile

            def other_profile(*args: Any) -> Any:
                found, cached = profile(*args)
                return dataclasses.replace(found, step_overhead_s=0.5), cached

            patch.setattr(CostMeasurer, "profile", other_profile)
        dictated = kind not in ("PL_GLOBAL_SEED", "cost profile")
        swapped = 1 if kind == "plan" and differs else None
        planned = hand_planned(strategy, SavablePlanner(plans(swapped)))
        with planned if dictated else nullcontext():  # noqa: SIM117 - only fit may raise
            with pytest.raises(MisconfigurationException) as caught:
                trainer.fit(model, data)
    return str(caught.value), model.steps


def fit_all(rank: int, kinds: list[str], cache: str) -> dict[str, tuple[str, int]]:
    return {kind: fit(kind, rank, cache) for kind in kinds}


AT_SET_UP = {
    "version": "version of numpy: ",
    "PL_GLOBAL_SEED": "seed: 0 on rank 0; 1 on rank 1",
    "planning.seed": "planning.seed: 4 on rank 0; 5 on rank 1",
    "reliability.adapt_to_drift": "reliability.adapt_to_drift: True on rank 0; False on rank 1",
    "max_epochs": "Trainer(max_epochs=...): 1 on rank 0; 2 on rank 1",
    "shape": "parameter head.weight: (",
    "learning rate": "optimizer 0, group 0: lr: 0.01 on rank 0; 0.02 on rank 1",
    "cost profile": "cost profile: ",
}


def test_named_at_set_up(world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    kinds, cache = list(AT_SET_UP), str(tmp_path_factory.mktemp("profiles"))
    for told in world.run(fit_all, kinds, cache):
        for kind, named in AT_SET_UP.items():
            message, steps = told[kind]
            assert message.startswith("Ranks disagree on what "), message
            assert named in message
            # Nothing else differs.
            assert message.count(" on rank 0; ") == (2 if kind == "shape" else 1), message
            if kind != "cost profile":  # which runs training steps to measure them
                assert steps == 0


def test_another_plan_on_one_rank(world: World) -> None:
    """Injected into the second iteration: nothing of that iteration runs."""
    for told in world.run(fit_all, ["plan"], ""):
        message, steps = told["plan"]
        assert message.startswith("Ranks disagree on what the plan of the running iteration is")
        assert re.search(r"made from\. plan: \w{12} on rank 0; \w{12} on rank 1\. ", message)
        assert steps == 1


class TestHash:
    def test_everything_that_is_run_counts(self) -> None:
        plan = plans()[0]
        first, *rest = plan.micro_batches
        pieces = hash_pieces(plan, seed=1)
        for changed in (
            {"sample_ids": (7,)},
            {"seq_len": first.seq_len + 2},
            {"num_tokens": first.num_tokens - 1},
            {"first_rank": 1},
            {"recompute_blocks": 1},
        ):
            other: MicroBatch = dataclasses.replace(first, **changed)
            changed_plan = dataclasses.replace(plan, micro_batches=(other, *rest))
            assert hash_pieces(changed_plan, seed=1) != pieces, changed
        assert hash_pieces(dataclasses.replace(plan, iteration=2), seed=1) != pieces
        assert hash_pieces(dataclasses.replace(plan, epoch=2), seed=1) != pieces
        assert hash_pieces(plan, seed=2) != pieces

    def test_the_same_in_every_process(self) -> None:
        """Processes with other salts for the hashes of texts, this one among them."""
        assert hash_pieces(plans()[0], seed=1) == (985146, 589005)

    @pytest.mark.parametrize("world_size", [2, 3, 1024, 8192])
    def test_one_rank_in_many_is_seen(self, world_size: int) -> None:
        top = (2**20 - 1, 2**20 - 1)
        same = [x * world_size for x in to_be_summed(top)]
        assert are_equal(same, world_size)
        for other in ((2**20 - 2, top[1]), (top[0], 0)):
            sums = [
                x * (world_size - 1) + y
                for x, y in zip(to_be_summed(top), to_be_summed(other), strict=True)
            ]
            assert not are_equal(sums, world_size)

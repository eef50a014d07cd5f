"""Two nodes of three ranks: groups of two stay inside a node, and training stays exact.

Six real ranks, told by the environment that three of them are on another node. Plans speak of
places: 0 1 | 2 3 | 4 5 are the ranks 0 1 | 3 4 | 2 5.
"""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dcp.planning.layout import Layout
from lightning_dcp.planning.plan import Plan
from lightning_dcp.strategies.node_layout import describe
from tests.strategies.hand_planned import NUM_BLOCKS, STRATEGIES, Watch, hand_planned
from tests.strategies.toys import (
    Sequences,
    ToyLM,
    largest_relative_error,
    micro_batch,
    pad,
    reference,
    whole,
)
from tests.worlds import World

LENGTHS = [9, 30, 5, 12, 7, 3, 11, 2, 8, 14, 1, 6]


def plans() -> list[Plan]:
    """Nested groups: four ranks of both nodes, two inside each, the last ones alone or idle."""
    data = Sequences(LENGTHS)
    made = []
    for step in range(2):
        i = torch.randperm(12, generator=torch.Generator().manual_seed(step)).tolist()
        parts = [
            micro_batch(data, i[0:2], 0, 4, recompute_blocks=1),
            micro_batch(data, i[2:3], 2, 2, recompute_blocks=NUM_BLOCKS),
            micro_batch(data, i[3:5], 0, 2),
            micro_batch(data, i[5:6], 0),
            micro_batch(data, i[6:9], 3, recompute_blocks=2),
            micro_batch(data, i[9:10], 4),
            *([micro_batch(data, i[10:12], 5)] if step else []),
        ]
        made.append(Plan(epoch=0, iteration=step, world_size=6, micro_batches=tuple(parts)))
    return made


class WatchGroups(Watch):
    """Keeps the ranks of the groups that this rank was in."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        strategy: Any = trainer.strategy
        self.seen = [
            strategy.global_rank,
            sorted(tuple(group.ranks) for group in strategy._topology._groups.values()),
            [seconds > 0 for seconds in strategy.last_report.busy_s],
        ]


def train(rank: int, name: str) -> dict[str, Any]:
    os.environ.update(NODE_RANK=str(rank // 3), LOCAL_RANK=str(rank % 3))
    model, watch = ToyLM(num_blocks=NUM_BLOCKS, double=True), WatchGroups()
    trainer = L.Trainer(
        strategy=STRATEGIES[name](),
        accelerator="cpu",
        devices=3,
        num_nodes=2,
        max_epochs=1,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with hand_planned(trainer.strategy, plans()):
        trainer.fit(model, DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=pad))
    return {
        "gradients": watch.gradients,
        "losses": watch.losses,
        "seen": watch.seen,
        "parameters": {n: whole(p.detach()) for n, p in model.named_parameters()},
    }


def test_training_over_two_nodes_of_three_is_exact() -> None:
    steps = [[i for m in p.micro_batches for i in m.sample_ids] for p in plans()]
    model = ToyLM(num_blocks=NUM_BLOCKS, double=True)
    wanted = reference(model, Sequences(LENGTHS), steps)
    with World(6, timeout_s=200) as world:
        results = world.run(train, "dcp_ddp")
    for rank, result in enumerate(results):
        for step in range(2):
            error = largest_relative_error(result["gradients"][step], wanted.gradients[step])
            assert error <= 1e-12
        assert largest_relative_error(result["parameters"], wanted.parameters) <= 1e-12
        assert result["losses"] == pytest.approx(wanted.losses, rel=1e-12)
        of_place, groups, busy = result["seen"]
        assert of_place == rank
        assert (
            groups
            == [
                [(0,), (0, 1), (0, 1, 3, 4)],
                [(0, 1), (0, 1, 3, 4), (1,)],
                [(2,)],
                [(0, 1, 3, 4), (3,), (3, 4)],
                [(0, 1, 3, 4), (3, 4), (4,)],
                [(5,)],
            ][rank]
        )
        assert busy == [True] * 6  # by place; the first step left place 5 idle


def test_what_is_told() -> None:
    text = describe(Layout.of_equal_nodes(12, 6))
    assert "SP groups of up to 4 ranks stay inside a node (4 ranks are in no group of 4)." in text
    assert "from place 4 on these are the ranks 6, 7, 8, 9, 4, 5, 10, 11." in text

"""Policy `global-batch` beside `strategy="ddp"`: the same samples in every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dcp.strategies.ddp import DCPDDPStrategy
from tests.strategies.test_fit import FAST, LENGTHS
from tests.strategies.toys import Sequences, ToyLM, pad
from tests.worlds import World

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(WORLD_SIZE) as world:
        yield world


class SeesSamples(ToyLM):
    """Remembers (optimizer step, sample) of all it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.extend((self.trainer.global_step, i) for i in batch["id"].tolist())
        return self.losses(batch).mean()


def train(
    rank: int, policy: str | None, shuffle: bool, sampler_seed: int | None
) -> list[tuple[int, int]]:
    strategy: Any = "ddp"
    if policy is not None:
        strategy = DCPDDPStrategy(policy=policy, profiling=FAST)
    model = SeesSamples()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=WORLD_SIZE,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    data = Sequences(LENGTHS)
    if sampler_seed is None:
        loader = DataLoader(data, batch_size=3, collate_fn=pad, shuffle=shuffle)
    else:
        sampler = DistributedSampler[Any](
            data, num_replicas=WORLD_SIZE, rank=rank, seed=sampler_seed
        )
        loader = DataLoader(data, batch_size=3, collate_fn=pad, sampler=sampler)
    torch.manual_seed(rank)  # what the order must not depend on
    trainer.fit(model, loader)
    return model.seen


def steps(results: list[list[tuple[int, int]]]) -> list[set[int]]:
    """Samples of each optimizer step, over all ranks."""
    pairs = {pair for own in results for pair in own}
    return [{i for s, i in pairs if s == step} for step in range(1 + max(s for s, _ in pairs))]


@pytest.mark.parametrize(("shuffle", "sampler_seed"), [(True, None), (False, None), (True, 7)])
def test_takes_the_samples_of_ddp_step_by_step(
    world: World, shuffle: bool, sampler_seed: int | None
) -> None:
    plain = steps(world.run(train, None, shuffle, sampler_seed))
    ours = steps(world.run(train, "global-batch", shuffle, sampler_seed))
    assert len(plain) == len(ours) == 2 * 11
    for epoch in (0, 11):
        seen: set[int] = set()
        for theirs, own in zip(plain[epoch : epoch + 11], ours[epoch : epoch + 11], strict=True):
            # 61 samples on two ranks: DDP repeats one in its last step.
            assert own == theirs - seen
            seen |= own
        assert seen == set(range(61))
    # Lightning shuffles training data under DDP whatever the loader says.
    assert plain[0] != plain[11]


def test_other_policies_take_others(world: World) -> None:
    plain = steps(world.run(train, None, True, None))
    ours = steps(world.run(train, "dcp-intra", True, None))
    assert plain != ours

"""Packing of samples: what is concatenated, what is stacked, what is refused."""

from __future__ import annotations

import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dcp.data.datamodule import DCPDataModuleMixin, MicroBatchMaker
from lightning_dcp.data.loader import build_plan_loader
from lightning_dcp.data.packing import Layout, PackedBatch, PackingCollate, find_layout
from lightning_dcp.planning.plan import MicroBatch, Plan


def sample(n: int, **more: Any) -> dict[str, Any]:
    return {
        "input_ids": torch.arange(n) + 100 * n,
        "labels": torch.arange(n),
        "features": np.ones((n, 2), dtype=np.float32) * n,
        "mask": [1] * n,
        "sixteen": torch.zeros(16),
        "id": n,
        **more,
    }


def layout() -> Layout:
    return find_layout([sample(5), sample(3)], [5, 3])


def test_what_runs_along_the_tokens_is_concatenated() -> None:
    assert set(layout().per_token) == {"input_ids", "labels", "features", "mask"}
    # 16 features beside 16 tokens: decided once, from other samples
    batch, lengths = PackingCollate(layout())([sample(16), sample(2), sample(16)])
    assert lengths == (16, 2, 16)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["mask"].shape == (1, 34)
    assert batch["features"].shape == (1, 34, 2) and batch["features"].dtype == torch.float32
    assert batch["sixteen"].shape == (3, 16)
    assert batch["id"].tolist() == [16, 2, 16]
    positions = [*range(16), *range(2), *range(16)]
    assert batch["position_ids"].tolist() == batch["labels"].tolist() == [positions]


def test_given_positions_stay() -> None:
    items = [sample(n, position_ids=torch.arange(n) + 7) for n in (2, 3)]
    batch, _ = PackingCollate(find_layout(items, [2, 3]))(items)
    assert batch["position_ids"].tolist() == [[7, 8, 7, 8, 9]]


def test_labels_at_the_borders() -> None:
    items = [sample(2), sample(1), sample(3)]
    batch, _ = PackingCollate(layout(), mark_borders=True, ignore_index=-1)(items)
    assert batch["labels"].tolist() == [[-1, 1, -1, -1, 1, 2]]
    assert items[0]["labels"].tolist() == [0, 1], "the data set's own tensors are not written to"


def test_tuples_and_tensors() -> None:
    pairs = [(torch.arange(n), torch.arange(n) + 1) for n in (2, 3)]
    packed = PackingCollate(find_layout(pairs, [2, 3]), mark_borders=True)(pairs)
    assert type(packed.batch) is tuple
    assert packed.batch[0].tolist() == [[0, 1, 0, 1, 2]]
    assert packed.batch[1].tolist() == [[-100, 2, -100, 2, 3]]
    kind = namedtuple("kind", "x y")
    named = [kind(torch.arange(n), 1.5) for n in (2, 3)]
    batch, _ = PackingCollate(find_layout(named, [2, 3]))(named)
    assert batch.x.shape == (1, 5) and batch.y.tolist() == [1.5, 1.5]
    alone = [torch.arange(n) for n in (2, 3)]
    batch, lengths = PackingCollate(find_layout(alone, [2, 3]))(alone)
    assert batch.tolist() == [[0, 1, 0, 1, 2]] and lengths == (2, 3)


def test_what_cannot_be_packed_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no entry of a sample has as many elements"):
        find_layout([sample(5), sample(3)], [6, 4])
    pairs = [sample(n, pairs=torch.zeros(n, n)) for n in (5, 3)]
    with pytest.raises(ValueError, match=r"entry 'pairs' .* several of its dimensions"):
        find_layout(pairs, [5, 3])
    with pytest.raises(TypeError, match=r"not known for a object.*pack_samples"):
        find_layout([object()], [1])
    pack = PackingCollate(layout())
    with pytest.raises(ValueError, match=r"one element per token each, but have .*'labels': 4"):
        pack([sample(5), sample(3, labels=torch.arange(4))])
    with pytest.raises(ValueError, match=r"entry 'labels' of a sample runs along .* is a str here"):
        pack([sample(5), sample(3, labels="a b c")])
    with pytest.raises(ValueError, match="entry 'features' of a sample cannot be put one after"):
        pack([sample(5), sample(3, features=np.ones((3, 4), dtype=np.float32))])
    with pytest.raises(ValueError, match=r"entry 'sixteen' .* nor can it be stacked"):
        pack([sample(5), sample(3, sixteen=torch.zeros(15))])


class Packs(DCPDataModuleMixin):
    def pack_samples(self, samples: list[Any]) -> Any:
        return torch.cat([s["input_ids"] for s in samples]), [len(s["mask"]) for s in samples]


def test_hook() -> None:
    assert DCPDataModuleMixin().pack_samples([]) is NotImplemented
    packed = PackingCollate(None, Packs().pack_samples)([sample(2), sample(1)])
    assert packed == PackedBatch(packed.batch, (2, 1))
    assert packed.batch.tolist() == [200, 201, 100]
    for wrong in (None, (1, 2, 3), ("batch", [2]), ("batch", [2, 0]), ("batch", 5)):
        with pytest.raises(ValueError, match=r"must return \(batch, lengths\)"):
            PackingCollate(None, lambda _, wrong=wrong: wrong)([sample(2), sample(1)])


class OnePlan:
    num_iterations = 1

    def epoch(self, epoch: int) -> list[Plan]:
        m = MicroBatch((1, 0, 2), 9, 9, 0, 1, 0, 1.0, 1, packed=True)
        return [Plan(epoch=epoch, iteration=0, world_size=1, micro_batches=(m,))]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_through_the_loader(num_workers: int) -> None:
    items = [sample(n) for n in (4, 3, 2)]
    user = DataLoader(items, batch_size=2, num_workers=num_workers)
    loader = build_plan_loader(
        user, OnePlan(), rank=0, world_size=1, packing=PackingCollate(layout())
    )
    (batch,) = list(loader)
    (packed,) = batch.micro_batches
    assert isinstance(packed, PackedBatch) and packed.lengths == (3, 4, 2)
    assert packed.batch["id"].tolist() == [3, 4, 2]
    assert pickle.loads(pickle.dumps(packed)).lengths == (3, 4, 2)


def test_batches_for_the_profile_have_the_tokens_asked_for() -> None:
    items = [sample(n) for n in (4, 3, 8, 5)]
    make = MicroBatchMaker(
        items, np.array([4, 3, 8, 5]), PackingCollate(layout()), equal_lengths=True
    )
    batch, lengths = make(3, 5)
    assert lengths == (5, 5, 5) and batch["input_ids"].shape == (1, 15)

"""Loss weights: elements count once, whatever the number of ranks."""

from __future__ import annotations

import types

import torch

from lightning_dcp.parallel import count_targets


def test_count():
    labels = torch.tensor([[1, -100, 2], [-100, 0, 3]])
    assert count_targets({"labels": labels}) == 4
    assert count_targets({"targets": labels}, ignore_index=0) == 5
    assert count_targets(types.SimpleNamespace(label=labels)) == 4
    assert count_targets({"labels": torch.randn(2, 5)}) == 10
    assert count_targets({"input_ids": labels}) is None


def test_pairs_of_input_and_target():
    x = torch.zeros(3, 5)
    assert count_targets((x, torch.tensor([1, -100, 2]))) == 2
    assert count_targets([x, torch.zeros(3)]) == 3
    assert count_targets((x, torch.ones(3, 5, dtype=torch.bool))) is None
    assert count_targets((x, {"y": x})) is None
    assert count_targets((x, x, x)) is None

"""Loss weights: elements count once, whatever the number of ranks."""

from __future__ import annotations

import types

import pytest
import torch

from lightning_dcp.parallel import apply_loss_scale, count_targets, loss_scale


def test_scale():
    assert loss_scale(3, 12) == 0.25
    assert loss_scale(3, 12, 2) == 0.125
    assert loss_scale(3, 12, 2, 8) == 1.0
    assert loss_scale(0, 12) == 0.0
    assert loss_scale(0, 0) == 0.0


def test_micro_batches_add_up_to_the_mean():
    counts, sizes = [5, 2, 9], [4, 2, 1]
    total = sum(p * loss_scale(n, 16, p) for n, p in zip(counts, sizes, strict=True))
    assert total == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("counts", [(-1, 3), (4, 3)])
def test_impossible_counts(counts):
    with pytest.raises(ValueError, match="between 0 and all"):
        loss_scale(*counts)
    with pytest.raises(ValueError, match="must be positive"):
        loss_scale(1, 1, 0)


def test_nothing_to_learn_gives_zero_gradients_not_nan():
    logits = torch.randn(2, 3, requires_grad=True)
    labels = torch.full((2,), -100)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    assert loss.isnan()
    scaled = apply_loss_scale(loss, loss_scale(0, 5))
    scaled.backward()
    assert scaled.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_scale_is_applied():
    assert apply_loss_scale(torch.tensor(3.0), 0.5).item() == 1.5


def test_count():
    labels = torch.tensor([[1, -100, 2], [-100, 0, 3]])
    assert count_targets({"labels": labels}) == 4
    assert count_targets({"labels": labels}, shift=True) == 3
    assert count_targets({"targets": labels}, ignore_index=0) == 5
    assert count_targets(types.SimpleNamespace(label=labels)) == 4
    assert count_targets({"labels": torch.randn(2, 5)}) == 10
    assert count_targets({"input_ids": labels}) is None
    assert count_targets((labels, labels)) is None

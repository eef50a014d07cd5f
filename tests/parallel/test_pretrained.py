"""What of a Hugging Face model's batch a slice cannot have, and what is done about the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, MistralConfig, MistralForCausalLM

from lightning_dcp.parallel.pretrained import PretrainedModels

SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture(scope="module")
def causal() -> nn.Module:
    return nn.ModuleDict(
        {"m": MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=8))}
    )


@pytest.fixture(scope="module")
def bidirectional() -> nn.Module:
    return nn.ModuleDict({"m": BertForMaskedLM(BertConfig(**SMALL))})


def batch(mask: list[list[int]], labels: Any = None) -> dict[str, Tensor]:
    masks = torch.tensor(mask)
    ids = torch.arange(masks.numel()).view(masks.shape) % 11
    own = ids.masked_fill(masks == 0, -100) if labels is None else torch.tensor(labels)
    return {"input_ids": ids, "labels": own, "attention_mask": masks}


NOTHING: frozenset[Any] = frozenset()


def test_labels_are_shifted_on_the_whole_sequence(causal: nn.Module) -> None:
    given = batch([[1, 1, 1], [1, 1, 0]])
    prepared = PretrainedModels(causal).prepare(given, NOTHING)
    assert prepared["labels"].tolist() == [[1, 2, -100], [4, -100, -100]]
    assert given["labels"].tolist() == [[0, 1, 2], [3, 4, -100]]


def test_padding_on_the_right_needs_no_mask(causal: nn.Module) -> None:
    models = PretrainedModels(causal)
    prepared = models.prepare(batch([[1, 1, 1], [1, 1, 0]]), NOTHING)
    assert models.mask_of(prepared, torch.arange(2))["attention_mask"].tolist() == [[1, 1], [1, 1]]


def test_masks_that_a_slice_cannot_have(causal: nn.Module, bidirectional: nn.Module) -> None:
    models = PretrainedModels(causal)
    with pytest.raises(ValueError, match="Pad on the right"):
        models.prepare(batch([[0, 1, 1]]), NOTHING)
    with pytest.raises(ValueError, match="padding bears loss"):
        models.prepare(batch([[1, 1, 0, 0]], labels=[[1, 2, 3, 4]]), NOTHING)
    with pytest.raises(ValueError, match="bidirectional"):
        PretrainedModels(bidirectional).prepare(batch([[1, 1, 0]]), NOTHING)


def test_labels_of_a_masked_model_stay(bidirectional: nn.Module) -> None:
    prepared = PretrainedModels(bidirectional).prepare(batch([[1, 1, 1]]), NOTHING)
    assert prepared["labels"].tolist() == [[0, 1, 2]]


def test_a_window_within_the_sequence_is_refused(causal: nn.Module) -> None:
    models = PretrainedModels(causal)
    with models.sharded(torch.arange(4), 8):
        pass
    with pytest.raises(ValueError, match="sliding_window=8"), models.sharded(torch.arange(5), 9):
        pass


def test_the_model_is_told_where_its_tokens_lie(causal: nn.Module) -> None:
    model, ids = causal["m"].double(), torch.arange(8)[None]
    whole = model(input_ids=ids, labels=ids)
    with PretrainedModels(causal).sharded(torch.arange(4), 8):
        first = model(input_ids=ids[:, :4], labels=ids[:, 1:5])
    torch.testing.assert_close(first.logits, whole.logits[:, :4])
    assert "_loss_function" not in vars(model)
    assert not model._forward_pre_hooks
    seen: list[Any] = []
    hook = model.model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    with PretrainedModels(causal).sharded(torch.arange(4, 8), 8):
        model(ids[:, 4:])
        model(ids[:, 4:], position_ids=ids[:, :4])
    hook.remove()
    assert [each.tolist() for each in seen] == [[[4, 5, 6, 7]], [[0, 1, 2, 3]]]

"""What is changed in Hugging Face models, what is refused, and how targets are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dcp.parallel.huggingface import attention_names, prepare_models
from lightning_dcp.parallel.huggingface_attention import attention_forward, register_attention
from lightning_dcp.parallel.targets import count_targets
from tests.models.harness import Samples, collate, make_module, state_of
from tests.models.user_code import MODELS

transformers = pytest.importorskip("transformers")


def batch_of(kind: str) -> dict[str, Any]:
    samples = Samples(kind)
    return collate([samples[i] for i in ((6, 7, 8) if kind == "vit" else (0, 3, 11))])


@pytest.mark.parametrize("kind", MODELS)
def test_same_as_the_models_own_attention(kind: str) -> None:
    """On padded batches, against `eager`, which has everything."""
    batch, losses, gradients = batch_of(kind), [], []
    for prepared in (False, True):
        module = make_module(kind, double=True)
        if prepared:
            changed = prepare_models(module, sharded=True)
            assert changed is not None
            assert "lightning_dcp" in attention_names(module)
        else:
            module.model.set_attn_implementation("eager")
        loss = module.training_step(batch, 0)
        module.backward(loss)
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) <= 1e-12


@pytest.mark.parametrize("kind", MODELS)
def test_targets_are_those_of_the_models_loss(kind: str) -> None:
    module, batch = make_module(kind, double=True), batch_of(kind)
    before = state_of(module)
    prepared = prepare_models(module, sharded=True)
    assert prepared is not None
    assert prepared.losses.shifts == (kind not in ("bert", "t5", "vit"))
    counted = count_targets(batch, shifted=prepared.losses.shifts)
    prepared.losses.forget()
    module.training_step(batch, 0)
    assert prepared.losses.take() in ((None,) if not prepared.losses.shifts else (counted,))
    # What one more loss-bearing element would change, found out by the loss itself.
    labels = batch["labels"].clone()
    labels[labels != -100] = 1
    logits = module.model(**{**batch, "labels": labels}).logits
    per_label = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).detach(),
        labels.reshape(-1) if kind in ("bert", "t5", "vit") else _shifted(labels),
        reduction="sum",
    )
    mean = module.training_step({**batch, "labels": labels}, 0).detach()
    assert float(per_label / mean) == pytest.approx(counted, rel=1e-5)
    prepared.undo()
    assert state_of(module) == before


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)


def test_a_loss_of_the_users_own_counts_all_labels() -> None:
    module, batch = make_module("llama", double=True), batch_of("llama")
    prepared = prepare_models(module, sharded=True)
    assert prepared is not None
    prepared.losses.forget()
    module.model(input_ids=batch["input_ids"])
    assert prepared.losses.take() is None
    assert not prepared.losses.shifts
    assert prepared.losses.shifts_in(batch)  # labels are the tokens, so that the loss shifts them
    others = {**batch, "labels": batch["labels"].roll(1, 1)}
    assert not prepared.losses.shifts_in(others)
    assert not prepared.losses.shifts_in(batch), "for good"
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    prepared.losses.forget()
    module.model(**batch, shift_labels=shifted)
    assert prepared.losses.take() == count_targets({**batch, "shift_labels": shifted}, shifted=True)
    assert prepared.losses.shifts


def test_attention_stays_where_tokens_are_not_shared() -> None:
    module = make_module("gemma2", double=False)
    prepared = prepare_models(module, sharded=False)
    assert prepared is not None
    assert module.model.config._attn_implementation == "eager"
    assert not module.model.config.use_cache
    assert prepare_models(torch.nn.Linear(2, 2), sharded=True) is None


def test_by_its_name() -> None:
    register_attention()
    module = make_module("t5", double=True)
    wanted = module.training_step(batch_of("t5"), 0).item()
    module.model.set_attn_implementation("lightning_dcp")
    assert module.training_step(batch_of("t5"), 0).item() == pytest.approx(wanted, rel=1e-12)


def test_a_window_without_a_mask() -> None:
    query, key, value = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64)
    places = torch.arange(9)
    distance = places[:, None] - places
    mask = ((distance >= 0) & (distance < 3))[None, None]
    layer = torch.nn.Identity()
    got, _ = attention_forward(layer, query, key, value, None, sliding_window=3)
    wanted, _ = attention_forward(layer, query, key, value, mask)
    torch.testing.assert_close(got, wanted)


class TestRefused:
    def test_attention_weights(self) -> None:
        module = make_module("bert", double=False)
        module.model.set_attn_implementation("eager")
        module.model.config.output_attentions = True
        with pytest.raises(ValueError, match=r"output_attentions=True .*sp_sizes=\(1,\)"):
            prepare_models(module, sharded=True)
        assert module.model.config._attn_implementation == "eager"

    def test_num_items_in_batch(self) -> None:
        module = make_module("llama", double=False)
        prepare_models(module, sharded=True)
        with pytest.raises(ValueError, match="num_items_in_batch"):
            module.training_step({**batch_of("llama"), "num_items_in_batch": 7}, 0)

    def test_scores_that_would_be_left_out(self) -> None:
        tensors = torch.randn(3, 1, 2, 5, 4)
        for argument in ("s_aux", "output_attentions"):
            with pytest.raises(ValueError, match=argument):
                attention_forward(torch.nn.Identity(), *tensors, None, **{argument: True})
        with pytest.raises(ValueError, match="position_ids"):
            attention_forward(torch.nn.Identity(), *tensors, None, cu_seq_lens_q=torch.ones(2))

"""Cross-entropy by tiles against torch's, and logits that are made only if somebody looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dcp import linear_cross_entropy
from lightning_dcp.parallel.deferred_logits import DeferredLogits, deferring
from tests.parallel.models import relative_error

WORDS = 50


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(WORDS, (3, 70), generator=generator) for _ in range(2))
    labels[0, :30] = -100
    return ids, labels


def parameters() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    make = {"generator": generator, "dtype": torch.float64, "requires_grad": True}
    return torch.randn(WORDS, 8, **make), torch.randn(WORDS, **make)


def difference(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    pairs = zip(got, wanted, strict=True)
    return max(relative_error(a, b) for a, b in pairs)


class TestLinearCrossEntropy:
    @pytest.mark.parametrize("softcap", [None, 3.0])
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("tile_tokens", [None, 1, 32])
    def test_equals_torch_with_tied_weights(
        self, softcap: float | None, reduction: str, tile_tokens: int | None
    ) -> None:
        ids, labels = batch()

        def run(loss_of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
            weight, bias = parameters()
            losses = loss_of(torch.tanh(F.embedding(ids, weight)), weight, bias)
            total = (losses * torch.arange(1, losses.numel() + 1).view(losses.shape)).sum()
            return total.detach(), *torch.autograd.grad(total, [weight, bias])

        def usual(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            logits = F.linear(hidden, weight, bias)
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            return F.cross_entropy(logits.transpose(1, 2), labels, reduction=reduction)

        got = run(
            lambda hidden, weight, bias: linear_cross_entropy(
                hidden,
                weight,
                labels,
                bias=bias,
                softcap=softcap,
                reduction=reduction,
                tile_tokens=tile_tokens,
            )
        )
        assert difference(got, run(usual)) <= 1e-12

    def test_a_frozen_output_layer(self) -> None:
        _, labels = batch()
        weight, bias = (p.detach() for p in parameters())
        hidden = torch.randn(3, 70, 8, dtype=torch.float64, requires_grad=True)
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias, tile_tokens=32)
        logits = F.linear(hidden, weight, bias)
        wanted = F.cross_entropy(logits.transpose(1, 2), labels)
        got, expected = (torch.autograd.grad(x, hidden) for x in (loss, wanted))
        assert difference((loss, *got), (wanted, *expected)) <= 1e-12

    def test_nothing_to_predict_is_zero_with_gradients_of_zero(self) -> None:
        weight, _ = parameters()
        hidden = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
        loss = linear_cross_entropy(hidden, weight, torch.full((4,), -100))
        loss.backward()
        assert loss == 0
        assert hidden.grad is not None and not hidden.grad.any()

    @pytest.mark.parametrize("autocast", [False, True])
    def test_half_precision(self, autocast: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        dtype = torch.float32 if autocast else torch.bfloat16
        hidden = torch.randn(300, 64, generator=generator).to(dtype).requires_grad_()
        weight = torch.randn(1000, 64, generator=generator).mul(0.2).to(dtype).requires_grad_()
        labels = torch.randint(1000, (300,), generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got = linear_cross_entropy(hidden, weight, labels)
            wanted = F.cross_entropy(F.linear(hidden, weight).float(), labels)
        assert float(got.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
        gradients = [torch.autograd.grad(x, [hidden, weight]) for x in (got, wanted)]
        assert difference(*(tuple(g.float() for g in each) for each in gradients)) <= 1e-2

    def test_shapes_that_do_not_go_together(self) -> None:
        weight, _ = parameters()
        hidden = torch.zeros(2, 5, 8, dtype=torch.float64)
        with pytest.raises(ValueError, match="each position needs one label"):
            linear_cross_entropy(hidden, weight, torch.zeros(2, 4, dtype=torch.long))
        with pytest.raises(ValueError, match="do not go together"):
            linear_cross_entropy(hidden[..., :7], weight, torch.zeros(2, 5, dtype=torch.long))


def _flat(logits: Tensor) -> Tensor:
    return logits.view(-1, logits.size(-1))


USES: dict[str, tuple[bool, Callable[[Tensor, Tensor], Tensor]]] = {
    "flattened": (True, lambda z, y: F.cross_entropy(_flat(z), y.view(-1))),
    "shifted": (
        True,
        lambda z, y: F.cross_entropy(_flat(z[..., :-1, :].contiguous()), y[:, 1:].reshape(-1)),
    ),
    "smoothed": (
        True,
        lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    ),
    "soft-capped": (
        True,
        lambda z, y: nn.CrossEntropyLoss()(_flat(torch.tanh(z / 3.0) * 3.0), y.flatten()),
    ),
    "words first": (False, lambda z, y: F.cross_entropy(z.transpose(1, 2), y)),
    "class weights": (
        False,
        lambda z, y: F.cross_entropy(_flat(z), y.view(-1), torch.arange(1.0, WORDS + 1).double()),
    ),
    "looked at": (False, lambda z, y: z.softmax(-1)[..., 3].sum()),
}


@pytest.mark.parametrize("name", USES)
def test_deferred_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same results as logits, which are made only where tiles do not do."""
    is_tiled, use = USES[name]
    made: list[Any] = []
    materialized = DeferredLogits.materialized
    monkeypatch.setattr(
        DeferredLogits, "materialized", lambda self: made.append(1) or materialized(self)
    )
    ids, labels = batch()
    layer = nn.Linear(8, WORDS).double()
    hidden = torch.randn(*ids.shape, 8, dtype=torch.float64, requires_grad=True)

    def run(forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        loss = use(forward(hidden), labels)
        return loss.detach(), *torch.autograd.grad(loss, [hidden, layer.weight, layer.bias])

    assert difference(run(deferring(layer)), run(layer)) <= 1e-12
    assert bool(made) != is_tiled

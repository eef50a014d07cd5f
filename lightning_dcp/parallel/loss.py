"""Cross-entropy of a linear output layer without ever holding all logits.

Shape legend:
    T  tokens (any leading dimensions, flattened)    D  width    V  words    t  tokens of a tile

Logits of a tile are made, used and forgotten, once in the forward and once more in the backward:
what stays in between is (T, D) and (T,), where logits would be (T, V). torch's own
``F.linear_cross_entropy`` (from 2.13 on) knows no soft-capping and keeps a gradient of the size of
the weight from the forward on, which does not shrink with a rank's share of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["linear_cross_entropy", "tiled_cross_entropy"]

#: Makes a tile's final logits of those of the linear layer; (t, V) -> (t, V).
Transform = Callable[[Tensor], Tensor]

_LEAST_TILE = 64  # tokens: fewer make poor matrix products


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    tile_tokens: int | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), labels)``, in tiles of tokens.

    For vocabularies whose logits are larger than everything else: 100k tokens times 128k words are
    51 GB in float32. In place of ::

        loss = F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())

    write ::

        loss = lightning_dcp.linear_cross_entropy(h, self.head.weight, labels)

    The weight may be tied to an embedding.

    Args:
        hidden: (..., D).
        weight: (V, D), as of ``nn.Linear``.
        labels: (...) integers; what each position is to predict, so already shifted.
        bias: (V,).
        ignore_index: label that bears no loss.
        reduction: "mean" over labels that bear loss, "sum", or "none".
        label_smoothing: as in ``F.cross_entropy``.
        softcap: logits become ``softcap * tanh(logits / softcap)``, as in Gemma 2.
        tile_tokens: t, tokens of a tile; by default so many that a tile of logits is as large as
            ``hidden``, and at least 64.

    Returns:
        (), or (...) for "none", in float32 at least. The mean over no label at all is 0, with
        gradients of zero, where ``F.cross_entropy`` gives NaN.

    Raises:
        ValueError: for shapes that do not go together, or another ``reduction``.
    """
    transforms: list[Transform] = []
    if softcap is not None:
        cap = float(softcap)
        transforms.append(lambda logits: cap * torch.tanh(logits / cap))
    return tiled_cross_entropy(
        hidden,
        weight,
        labels,
        bias=bias,
        transforms=transforms,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        tile_tokens=tile_tokens,
    )


def tiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    transforms: Sequence[Transform] = (),
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    tile_tokens: int | None = None,
) -> Tensor:
    """``linear_cross_entropy`` with any functions of single logits between layer and loss."""
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"hidden states of shape {tuple(hidden.shape)} and a weight of shape"
            f" {tuple(weight.shape)} do not go together: (..., D) and (V, D) are needed"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} for hidden states of shape"
            f" {tuple(hidden.shape)}: each position needs one label, so shift by padding the"
            f" labels rather than by cutting the hidden states"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: 'mean', 'sum' or 'none' is possible")
    num_words, width = weight.shape
    flat = labels.reshape(-1)
    if tile_tokens is None:
        tile_tokens = max(_LEAST_TILE, -(-flat.numel() * width // num_words))
    each: Tensor = _TiledLosses.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, width),
        weight,
        bias,
        flat,
        _Tile(tuple(transforms), ignore_index, label_smoothing),
        tile_tokens,
    )
    if reduction == "none":
        return each.view(labels.shape)
    total = each.sum()
    return total if reduction == "sum" else total / (flat != ignore_index).sum().clamp(min=1)


class _Tile:
    """Losses of a tile of logits."""

    def __init__(
        self, transforms: tuple[Transform, ...], ignore_index: int, label_smoothing: float
    ) -> None:
        self._transforms = transforms
        self._ignore_index = ignore_index
        self._label_smoothing = label_smoothing

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(t,) in float32 at least; (t, V) logits as the linear layer gives them."""
        for transform in self._transforms:
            logits = transform(logits)
        return F.cross_entropy(
            logits.to(_wide(logits.dtype)),
            labels,
            ignore_index=self._ignore_index,
            reduction="none",
            label_smoothing=self._label_smoothing,
        )


class _TiledLosses(torch.autograd.Function):
    """(T,) losses; logits are made again in the backward, tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        tile: _Tile,
        tile_tokens: int,
    ) -> Tensor:
        device = hidden.device.type
        ctx.tile, ctx.tile_tokens = tile, tile_tokens
        # Also in the backward, where autocast is off.
        ctx.dtype = layer_dtype(hidden)
        ctx.save_for_backward(hidden, weight, bias, labels)
        each = hidden.new_empty(labels.shape, dtype=_wide(ctx.dtype))
        with torch.autocast(device, enabled=False):
            own_weight = weight.to(ctx.dtype)
            own_bias = None if bias is None else bias.to(ctx.dtype)
            for part in _parts(labels.numel(), tile_tokens):
                logits = F.linear(hidden[part].to(ctx.dtype), own_weight, own_bias)
                each[part] = tile.losses(logits, labels[part])
        return each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Sums over tiles: in float32 at least, or each tile would be rounded on top of the others.
        wide = _wide(weight.dtype)
        grad_weight = weight.new_zeros(weight.shape, dtype=wide) if wants_weight else None
        grad_bias = weight.new_zeros(weight.shape[0], dtype=wide) if wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            own_weight = weight.to(ctx.dtype)
            own_bias = None if bias is None else bias.to(ctx.dtype)
            for part in _parts(labels.numel(), ctx.tile_tokens):
                own = hidden[part].to(ctx.dtype)
                logits = F.linear(own, own_weight, own_bias).requires_grad_()
                with torch.enable_grad():
                    losses = ctx.tile.losses(logits, labels[part])
                (grad,) = torch.autograd.grad(losses, logits, grads[0][part])
                del logits, losses
                if grad_hidden is not None:
                    grad_hidden[part] = (grad @ own_weight).to(hidden.dtype)
                if grad_weight is not None and grad.dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad.T, own)
                elif grad_weight is not None:
                    grad_weight += grad.T @ own
                if grad_bias is not None:
                    grad_bias += grad.sum(0, dtype=grad_bias.dtype)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _parts(num_tokens: int, tile_tokens: int) -> list[slice]:
    return [slice(i, i + tile_tokens) for i in range(0, num_tokens, tile_tokens)]


def layer_dtype(hidden: Tensor) -> torch.dtype:
    """The type that a linear layer computes in: autocast's where that is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for narrower types."""
    return torch.promote_types(dtype, torch.float32)

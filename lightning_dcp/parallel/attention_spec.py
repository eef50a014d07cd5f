"""What an attention call asks for besides its three tensors."""

from __future__ import annotations

import dataclasses

from torch import Tensor

__all__ = ["AttentionSpec"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Options of one call, as of ``F.scaled_dot_product_attention`` and a little more.

    Attributes:
        attn_mask: for the *whole* sequence, as in torch; sharding takes a rank's part of it.
        dropout_p: probability of dropping an attention weight.
        is_causal: mask keys after the query; not together with ``attn_mask``.
        scale: of the scores; None is 1/sqrt(D).
        enable_gqa: whether keys and values may have fewer heads.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before the mask; None: no cap.
        segments: lengths of the packed samples that the whole sequence consists of, in order; no
            query attends to another sample's keys. None: one sequence.
    """

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    softcap: float | None = None
    segments: tuple[int, ...] | None = None

"""Sizes of transformers, as far as seconds and bytes depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dcp.simulation.spec_files import build, read_fields

__all__ = ["MODELS", "TransformerSpec", "load_model", "model_named"]


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """A transformer of equal blocks, in bf16.

    A block is ``attention_axes`` self-attentions, ``cross_attentions`` attentions to a short
    context and ``mlps`` multilayer perceptrons, each with its norm and residual.

    Attributes:
        name: Name, for reports.
        num_blocks: L, the blocks that may be recomputed.
        width: Width of the hidden states.
        num_heads: Heads of queries; each is ``width / num_heads`` wide.
        num_kv_heads: Heads of keys and values.
        mlp_width: Width inside an MLP.
        gated_mlp: Whether the MLP has a third matrix, a gate (SwiGLU).
        vocab_size: Words of embedding and head, which do not share weights; 0: neither is there.
        causal: Whether a token attends to earlier ones only.
        attention_axes: 1: all tokens of a sample attend to each other. 2: a sample of s tokens is a
            grid of sqrt(s) x sqrt(s), attended along one axis after the other: 2 s^1.5 pairs.
        mlps: MLPs per block.
        cross_attentions: Cross-attentions per block.
        context_tokens: Tokens per sample that a cross-attention attends to.
    """

    name: str
    num_blocks: int
    width: int
    num_heads: int
    num_kv_heads: int
    mlp_width: int
    gated_mlp: bool = False
    vocab_size: int = 0
    causal: bool = True
    attention_axes: int = 1
    mlps: int = 1
    cross_attentions: int = 0
    context_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty.")
        least = {"vocab_size": 0, "cross_attentions": 0, "context_tokens": 0}
        for field in (
            "num_blocks",
            "width",
            "num_heads",
            "num_kv_heads",
            "mlp_width",
            "vocab_size",
            "attention_axes",
            "mlps",
            "cross_attentions",
            "context_tokens",
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{field} must be an int; got {value!r} ({type(value).__name__}).")
            if value < least.get(field, 1):
                raise ValueError(f"{field} must be at least {least.get(field, 1)}; got {value}.")
        if self.width % self.num_heads:
            raise ValueError(
                f"width must be a multiple of num_heads; got {self.width} and {self.num_heads}."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "num_heads must be a multiple of num_kv_heads; got "
                f"{self.num_heads} and {self.num_kv_heads}."
            )
        if self.attention_axes > 2:
            raise ValueError(f"attention_axes must be 1 or 2; got {self.attention_axes}.")
        if self.causal and self.attention_axes == 2:
            raise ValueError("A model with attention_axes=2 cannot be causal: set causal=False.")
        if bool(self.cross_attentions) != bool(self.context_tokens):
            raise ValueError(
                "cross_attentions and context_tokens are both 0 or both above 0; got "
                f"{self.cross_attentions} and {self.context_tokens}."
            )

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.num_heads

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.num_kv_heads * self.head_width

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.gated_mlp else 2

    @property
    def block_parameters(self) -> int:
        """Parameters of one block. Norms and biases, below 0.1%, are left out."""
        attention = 2 * self.width * (self.width + self.kv_width)
        cross = 4 * self.width**2
        mlp = self.mlp_matrices * self.width * self.mlp_width
        return self.attention_axes * attention + self.cross_attentions * cross + self.mlps * mlp

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.num_blocks * self.block_parameters + 2 * self.vocab_size * self.width

    @property
    def rest_bytes_per_token(self) -> int:
        """Bytes per token on a rank besides the blocks'.

        Logits in bf16 and their softmax or gradient in fp32 (6 per word), or, once they are gone,
        the gradients alive in a block's backward, whichever is more.
        """
        gradients = 4 * self.width + 2 * self.mlp_matrices * self.mlp_width
        return max(6 * self.vocab_size, gradients)

    @property
    def context_bytes(self) -> int:
        """Bytes per sample one block saves on each rank: keys and values of the context."""
        return 4 * self.width * self.context_tokens * self.cross_attentions

    def kv_width_on(self, sp_size: Any) -> Any:
        """Width of the keys once heads that are fewer than the ranks are repeated."""
        return np.maximum(self.num_kv_heads, sp_size) * self.head_width

    def saved_bytes_per_token(self, sp_size: Any) -> Any:
        """Bytes per token on a rank that one block saves for backward, without its input.

        A part's norm saves its input, 2w (the first one's is the block's) and its output, 2w.
        Attention: q, k, v and output, 2w each (k and v less where they have fewer heads), the
        output once more as tokens where Ulysses splits heads, and an fp32 per head. MLP: what
        enters the activation and what leaves it, and a gate's own value. For w = width and MLP 4w
        that is 30w: the 34w of Korthikanti et al. (2022) with neither attention matrix nor dropout
        masks (2w) nor block input (2w).
        """
        w, statistics = self.width, 4 * self.num_heads
        parts = self.attention_axes + self.cross_attentions + self.mlps
        as_tokens = np.where(np.asarray(sp_size) > 1, 2 * w, 0)
        attention = 6 * w + 4 * self.kv_width_on(sp_size) + statistics + as_tokens
        cross = 6 * w + statistics
        # GELU: its input and output. SwiGLU: both products, the gate's activation and the result.
        mlp = 2 * w + self.mlp_width * (8 if self.gated_mlp else 4)
        return (
            2 * w * (parts - 1)
            + self.attention_axes * attention
            + self.cross_attentions * cross
            + self.mlps * mlp
        )

    def sp_size_reason(self, sp_size: int) -> str | None:
        """Why ``sp_size`` ranks cannot split the heads, or None where they can.

        The rule of the attention that runs: heads of keys and values that are fewer than the ranks
        are repeated.
        """
        if self.num_heads % sp_size:
            return f"{sp_size} does not divide the {self.num_heads} attention heads"
        if self.num_kv_heads % sp_size and sp_size % self.num_kv_heads:
            return f"{sp_size} ranks cannot share the {self.num_kv_heads} key/value heads"
        return None


# The paper tells the sizes of its two models in a picture of a table, which is not at hand. The
# first two have its numbers of parameters (5B and 1.2B) and common proportions.
MODELS: Mapping[str, TransformerSpec] = {
    spec.name: spec
    for spec in (
        TransformerSpec(
            name="transformer-1d-5b",
            num_blocks=24,
            width=4096,
            num_heads=32,
            num_kv_heads=32,
            mlp_width=4 * 4096,
            vocab_size=32_000,
        ),
        TransformerSpec(
            name="transformer-2d-1.2b",
            num_blocks=32,
            width=1536,
            num_heads=16,
            num_kv_heads=16,
            mlp_width=4 * 1536,
            causal=False,
            attention_axes=2,
        ),
        TransformerSpec(
            name="llama-3-8b",
            num_blocks=32,
            width=4096,
            num_heads=32,
            num_kv_heads=8,
            mlp_width=14_336,
            gated_mlp=True,
            vocab_size=128_256,
        ),
        # 28 pairs of a spatial and a temporal block, each with attention, cross-attention to the
        # text's 300 tokens and MLP. A pair counts as one block.
        TransformerSpec(
            name="open-sora-1.1b",
            num_blocks=28,
            width=1152,
            num_heads=16,
            num_kv_heads=16,
            mlp_width=4 * 1152,
            causal=False,
            attention_axes=2,
            mlps=2,
            cross_attentions=2,
            context_tokens=300,
        ),
    )
}
"""Models by name."""


def model_named(name: str) -> TransformerSpec:
    """Preset of :data:`MODELS`.

    Raises:
        ValueError: Unknown name.
    """
    if name not in MODELS:
        raise ValueError(
            f"Unknown model {name!r}. Known models: {', '.join(MODELS)}. For another one make a "
            "TransformerSpec, or write a file and read it with load_model."
        )
    return MODELS[name]


def load_model(path: str | Path) -> TransformerSpec:
    """Read a model from a JSON or YAML file.

    ``base`` names the preset to start from, any other field replaces the preset's; without it
    every field that has no default must be there. A name that is not given is the file's::

        base: llama-3-8b
        num_blocks: 16

    Raises:
        FileNotFoundError: No such file.
        ValueError: No JSON or YAML, an unknown or missing field, a value out of range.
    """
    path = Path(path)
    values = read_fields(path, what="model", example="base: llama-3-8b")
    base_name = values.pop("base", None)
    try:
        base = None if base_name is None else model_named(str(base_name))
    except ValueError as error:
        raise ValueError(f"{path}: base: {error}") from None
    try:
        spec: TransformerSpec = build(
            TransformerSpec, base, {"name": path.stem, **values}, presets=MODELS
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    return spec

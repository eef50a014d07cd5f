"""Models of two stacks of blocks: encoder and decoder, vision tower and language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VISION_WIDTH, HEADS, VOCABULARY, PIXELS = 16, 12, 4, 11, 5


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, is_causal: bool = False) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None):
        parts = (self.q(x), *self.kv(x if context is None else context).chunk(2, -1))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.is_causal)
        return self.out(y.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 20), nn.GELU())
        self.back = nn.Linear(20, width)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        x = hidden_states + self.attention(self.norm(hidden_states), mask=mask)
        return x + self.back(self.mlp(x))


class DecoderBlock(nn.Module):
    """As T5's: causal self-attention, cross-attention to the encoder's output, (x, None) out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(WIDTH, HEADS, is_causal=True)
        self.cross = Attention(WIDTH, HEADS)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU())
        self.back = nn.Linear(24, WIDTH)

    def forward(
        self,
        hidden_states: Tensor,
        positions: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        x = hidden_states if positions is None else hidden_states + positions
        x = x + self.attention(self.norm1(x))
        if encoder_hidden_states is not None:
            x = x + self.cross(self.norm2(x), encoder_hidden_states, encoder_mask)
        return x + self.back(self.mlp(x)), None


class EncoderDecoder(nn.Module):
    """Two stacks of unequal depth; embedding and output layer tied and shared by both."""

    def __init__(self, depth: tuple[int, int] = (3, 2)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(256, WIDTH))
        self.encoder = nn.Module()
        self.encoder.block = nn.ModuleList(EncoderBlock() for _ in range(depth[0]))
        self.decoder = nn.Module()
        self.decoder.block = nn.ModuleList(DecoderBlock() for _ in range(depth[1]))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        tokens, labels = batch["tokens"], batch["labels"]
        real = torch.arange(tokens.shape[1]) < batch["lengths"][:, None]
        mask = real[:, None, None, :]
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.encoder.block:
            x = block(x, mask=mask)
        y = self.embedding(F.pad(labels.clamp_min(0), (1, 0))[:, :-1])
        positions = self.positions[: labels.shape[1]].expand(len(labels), -1, -1)
        for block in self.decoder.block:
            y = block(y, positions, encoder_hidden_states=x, encoder_mask=mask)[0]
        # The encoder's output matters to the head as well, not to the decoder alone.
        mean = (x * real[..., None]).sum(1, keepdim=True) / batch["lengths"][:, None, None]
        logits = self.head(y + mean)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    @staticmethod
    def batch(batch_size: int, length: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(100 * length + batch_size)
        outputs = max(1, 2 * length // 3)
        return {
            "tokens": torch.randint(VOCABULARY, (batch_size, length), generator=generator),
            "labels": torch.randint(VOCABULARY, (batch_size, outputs), generator=generator),
            "lengths": torch.linspace(length, max(1, length // 2), batch_size).long(),
        }


class VisionLanguage(nn.Module):
    """A tower over patches, of other width and heads, before a causal language model.

    Images are optional; a frozen tower gets no gradient at all.
    """

    def __init__(
        self,
        depth: tuple[int, int] = (2, 3),
        *,
        frozen: bool = False,
        vision_heads: int = 2,
        num_patches: int = 7,
    ) -> None:
        super().__init__()
        self.num_patches = num_patches
        self.vision = nn.Module()
        self.vision.patches = nn.Linear(PIXELS, VISION_WIDTH)
        self.vision.layers = nn.ModuleList(
            EncoderBlock(VISION_WIDTH, vision_heads) for _ in range(depth[0])
        )
        self.vision.requires_grad_(not frozen)
        self.projector = nn.Linear(VISION_WIDTH, WIDTH)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(DecoderBlock() for _ in range(depth[1]))
        for block in self.layers:
            del block.cross, block.norm2
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x, num_images = self.embedding(batch["tokens"]), 0
        if "pixels" in batch:
            y = self.vision.patches(batch["pixels"])
            for block in self.vision.layers:
                y = block(y)
            x, num_images = torch.cat([self.projector(y), x], 1), y.shape[1]
        for block in self.layers:
            x = block(x)[0]
        logits = self.head(x[:, num_images:-1])
        return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())

    def batch(self, batch_size: int, length: int, *, images: bool = True) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(100 * length + batch_size)
        dtype = self.head.weight.dtype
        shape = (batch_size, self.num_patches, PIXELS)
        batch = {"tokens": torch.randint(VOCABULARY, (batch_size, length), generator=generator)}
        if images:
            batch["pixels"] = torch.randn(shape, generator=generator, dtype=dtype)
        return batch

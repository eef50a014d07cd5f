"""Small models with two axes of tokens: an STDiT-like one of clips, an Evoformer-like one of pairs.

Shape legend: B samples, T frames, S patches of a frame, N residues, C features, H heads, D = C / H.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dcp import attention, attention_axis, gather_axis, switch_axis

CHANNELS, HEADS, TEXT = 16, 4, 5


def heads(x: Tensor) -> Tensor:
    """(..., S, C) -> (..., H, S, D)."""
    return x.unflatten(-1, (HEADS, -1)).transpose(-2, -3)


def merge(x: Tensor) -> Tensor:
    return x.transpose(-2, -3).flatten(-2)


class STDiTBlock(nn.Module):
    """Spatial, temporal and cross-attention, modulated by the time step.

    ``way`` is how the temporal attention reaches all frames: "ulysses" along the sharded axis,
    "mha" likewise by torch's module, "switch" after changing the axis, "checkpoint" as "switch"
    recomputed by the block itself, "unmarked" as a model that knows nothing of axes.
    """

    def __init__(self, way: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.way, self.dropout = way, dropout
        self.norms = nn.ModuleList(nn.LayerNorm(CHANNELS, elementwise_affine=False) for _ in "abc")
        self.modulation = nn.Linear(CHANNELS, 6 * CHANNELS)
        self.spatial_qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.temporal_qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        if way == "mha":
            self.temporal_mha = nn.MultiheadAttention(CHANNELS, HEADS, batch_first=True)
        self.text_q, self.text_kv = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, 2 * CHANNELS)
        self.outs = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in "abc")
        self.mlp = nn.Sequential(
            nn.Linear(CHANNELS, 24), nn.GELU(), nn.Dropout(dropout), nn.Linear(24, CHANNELS)
        )

    def axis(self, name: str) -> Any:
        return contextlib.nullcontext() if self.way == "unmarked" else attention_axis(name)

    def forward(
        self, x: Tensor, time: Tensor, text: Tensor, mask: dict[str, Tensor], frames: Tensor
    ) -> Tensor:
        shift, scale, gate, *rest = self.modulation(F.silu(time))[:, None, None].chunk(6, -1)
        h = self.norms[0](x) * (1 + scale) + shift
        x = x + gate * self.spatial(h, mask["patches"])
        h = self.norms[1](x) + frames[:, None]  # a position for each frame, sliced like the frames
        if self.way == "checkpoint":
            x = x + checkpoint(self.temporal, h, mask["frames"], use_reentrant=False)
        else:
            x = x + self.temporal(h, mask["frames"])
        x = x + self.cross(x, text, mask["text"])
        shift, scale, gate = rest
        return x + gate * self.mlp(self.norms[2](x) * (1 + scale) + shift)

    def spatial(self, h: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (heads(t) for t in self.spatial_qkv(h).chunk(3, -1))  # (B, T, H, S, D)
        p = self.dropout if self.training else 0.0
        with self.axis("whole"):
            return self.outs[0](merge(F.scaled_dot_product_attention(q, k, v, mask, p)))

    def temporal(self, h: Tensor, mask: Tensor) -> Tensor:
        switches = self.way in ("switch", "checkpoint")
        h = switch_axis(h, 1, 2) if switches else h
        h = h.transpose(1, 2)  # (B, S, T, C)
        p = self.dropout if self.training else 0.0
        with self.axis("whole" if switches else "sharded"):
            if self.way == "mha":
                folded = h.flatten(0, 1)
                padding = ~mask[:, 0, 0, 0].repeat_interleave(h.shape[1], 0)
                out, _ = self.temporal_mha(
                    folded, folded, folded, key_padding_mask=padding, need_weights=False
                )
                out = out.unflatten(0, h.shape[:2])
            else:
                q, k, v = (heads(t) for t in self.temporal_qkv(h).chunk(3, -1))
                out = merge(F.scaled_dot_product_attention(q, k, v, mask, p))
        out = out.transpose(1, 2)
        return self.outs[1](switch_axis(out, -2, -3) if switches else out)

    def cross(self, x: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        q = heads(self.text_q(x.flatten(1, 2)))  # (B, H, T * S, D)
        k, v = (heads(t) for t in self.text_kv(text).chunk(2, -1))
        axis = None if self.way == "unmarked" else "whole"
        return self.outs[2](merge(attention(q, k, v, mask, axis=axis))).unflatten(1, x.shape[1:3])


class STDiT(nn.Module):
    def __init__(self, way: str = "ulysses", num_blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.text = nn.Linear(3, CHANNELS), nn.Linear(3, CHANNELS)
        self.frames = nn.Parameter(torch.randn(64, CHANNELS))
        self.patches = nn.Parameter(torch.randn(64, CHANNELS))
        self.time = nn.Linear(1, CHANNELS)
        self.blocks = nn.ModuleList(STDiTBlock(way, dropout) for _ in range(num_blocks))
        self.head = nn.Linear(CHANNELS, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        clip, real, text_real = batch["clip"], batch["real"], batch["text_real"]
        mask = {
            "patches": real[:, :1, None, None].any(1, keepdim=True),
            "frames": real[:, None, None, None, :, 0],
            "text": text_real[:, None, None],
        }
        x = self.embed(clip) + self.patches[: clip.shape[2]]
        frames = self.frames[: clip.shape[1]]
        time, text = self.time(batch["time"][:, None]), self.text(batch["text"])
        for block in self.blocks:
            x = block(x, time, text, mask, frames)
        return self.head(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(self(batch)[batch["real"]], batch["target"][batch["real"]])

    @staticmethod
    def batch(shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        """The first clip has all (T, S), others are shorter and smaller."""
        size, num_frames, num_patches = shape
        draw = torch.Generator().manual_seed(size * 10_000 + num_frames * 100 + num_patches)
        rows = torch.arange(num_frames) < torch.linspace(num_frames, 1, size).long()[:, None]
        columns = torch.arange(num_patches) < torch.linspace(num_patches, 1, size).long()[:, None]
        text_real = torch.arange(TEXT) < torch.linspace(TEXT, 1, size).long()[:, None]
        return {
            "clip": torch.randn(*shape, 3, generator=draw, dtype=dtype),
            "target": torch.randn(*shape, 3, generator=draw, dtype=dtype),
            "real": rows[:, :, None] & columns[:, None],
            "time": torch.rand(size, generator=draw, dtype=dtype),
            "text": torch.randn(size, TEXT, 3, generator=draw, dtype=dtype),
            "text_real": text_real,
        }


class PairBlock(nn.Module):
    """Triangle multiplications, attention along rows and columns with pair bias, transition."""

    def __init__(self, way: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.way, self.dropout = way, dropout
        self.norms = nn.ModuleList(nn.LayerNorm(CHANNELS) for _ in range(5))
        self.triangles = nn.ModuleList(nn.Linear(CHANNELS, 3 * CHANNELS) for _ in "oi")
        self.qkvs = nn.ModuleList(nn.Linear(CHANNELS, 3 * CHANNELS) for _ in "rc")
        self.biases = nn.ModuleList(nn.Linear(CHANNELS, HEADS, bias=False) for _ in "rc")
        self.outs = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(4))
        self.transition = nn.Sequential(
            nn.Linear(CHANNELS, 24), nn.ReLU(), nn.Dropout(dropout), nn.Linear(24, CHANNELS)
        )

    def forward(self, z: Tensor, real: Tensor) -> Tensor:
        z = z + self.outgoing(self.norms[0](z), real)
        z = z + self.incoming(self.norms[1](z), real)
        z = z + self.rows(self.norms[2](z), real)
        z = z + self.columns(self.norms[3](z), real)
        return z + self.transition(self.norms[4](z))

    def outgoing(self, z: Tensor, real: Tensor) -> Tensor:
        a, b, gate = self.triangles[0](z).chunk(3, -1)
        b = gather_axis(b, 1) * real[:, None, :, None]  # (B, N, N, C)
        return torch.sigmoid(gate) * self.outs[0](torch.einsum("bikc,bjkc->bijc", a, b))

    def incoming(self, z: Tensor, real: Tensor) -> Tensor:
        a, b, gate = self.triangles[1](z).chunk(3, -1)
        b = switch_axis(b, 1, 2)  # (B, N, m, C): all k of this rank's columns j
        a = gather_axis(a, 1) * real[:, :, None, None]
        z = switch_axis(torch.einsum("bkic,bkjc->bijc", a, b), 2, 1)
        return torch.sigmoid(gate) * self.outs[1](z)

    def rows(self, z: Tensor, real: Tensor) -> Tensor:
        q, k, v = (heads(t) for t in self.qkvs[0](z).chunk(3, -1))  # (B, n, H, N, D)
        bias = gather_axis(self.biases[0](z), 1).permute(0, 3, 1, 2)[:, None]  # (B, 1, H, N, N)
        bias = bias.masked_fill(~real[:, None, None, None], -1e9)
        with attention_axis("whole"):
            return self.outs[2](merge(F.scaled_dot_product_attention(q, k, v, bias)))

    def columns(self, z: Tensor, real: Tensor) -> Tensor:
        """Attention of (i, j) to all (k, j), in one of two ways."""
        bias = gather_axis(self.biases[1](z), 1).permute(0, 3, 1, 2)[:, None]
        bias = bias.masked_fill(~real[:, None, None, None], -1e9)
        z = switch_axis(z, 1, 2) if self.way == "switch" else z
        q, k, v = (heads(t) for t in self.qkvs[1](z.transpose(1, 2)).chunk(3, -1))
        p = self.dropout if self.training else 0.0
        with attention_axis("whole" if self.way == "switch" else "sharded"):
            out = merge(F.scaled_dot_product_attention(q, k, v, bias, p)).transpose(1, 2)
        return self.outs[3](switch_axis(out, 2, 1) if self.way == "switch" else out)


class PairModel(nn.Module):
    def __init__(self, way: str = "ulysses", num_blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, CHANNELS), nn.Linear(3, CHANNELS)
        self.blocks = nn.ModuleList(PairBlock(way, dropout) for _ in range(num_blocks))
        self.head = nn.Linear(CHANNELS, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        z = self.left(batch["tokens"])[:, :, None] + self.right(batch["tokens"])[:, None]
        for block in self.blocks:
            z = block(z, batch["real"])
        return self.head(z).squeeze(-1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        both = batch["real"][:, :, None] & batch["real"][:, None]
        return F.binary_cross_entropy_with_logits(self(batch)[both], batch["contacts"][both])

    @staticmethod
    def batch(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        size, length = shape
        draw = torch.Generator().manual_seed(size * 100 + length)
        return {
            "tokens": torch.randn(size, length, 3, generator=draw, dtype=dtype),
            "contacts": torch.rand(size, length, length, generator=draw, dtype=dtype).round(),
            "real": torch.arange(length) < torch.linspace(length, 1, size).long()[:, None],
        }

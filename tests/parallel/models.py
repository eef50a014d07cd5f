"""Small transformers for the exactness tests, and the comparison with one process."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa_imported_early
from torch.utils.checkpoint import checkpoint

from lightning_dcp.parallel import BlockRuntime, SPGroup, Topology, attention, find_blocks

VOCABULARY, WIDTH, HEADS = 11, 16, 4


@dataclasses.dataclass(frozen=True)
class Kind:
    """How the model's blocks attend; every field is one way that users write them."""

    kv_heads: int = HEADS
    call: str = "F"  # F | early | explicit | merged (samples * heads, S, D)
    causal: bool = True
    padding: bool = False  # boolean key padding mask (B, 1, 1, S)
    bias: str | None = None  # additive, with gradient: "heads" (H, S, S) | "plain" (S, S) | "batch"
    gqa_flag: bool = True
    own_checkpoint: str | None = None  # inside | reentrant | around
    cross: str | None = None  # to a condition: mask | causal | mha
    dropout: float = 0.0
    keywords: bool = False
    seq_first: bool = False


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Block(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        size = WIDTH // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * kind.kv_heads) * size, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 24), nn.GELU(), nn.Dropout(kind.dropout), nn.Linear(24, WIDTH)
        )
        if kind.cross == "mha":
            self.cross_attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        elif kind.cross:
            self.cross_q = nn.Linear(WIDTH, WIDTH, bias=False)
            self.cross_kv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Any:
        x = hidden_states.transpose(0, 1) if self.kind.seq_first else hidden_states
        h = self.norm1(x)
        if self.kind.own_checkpoint in ("inside", "reentrant"):
            reentrant = self.kind.own_checkpoint == "reentrant"
            # one by one: a reentrant checkpoint detaches only tensors that are arguments themselves
            x = x + checkpoint(
                lambda h, cos, sin: self.attend(h, (cos, sin), mask),
                h,
                *rotary,
                use_reentrant=reentrant,
            )
        else:
            x = x + self.attend(h, rotary, mask)
        if self.kind.cross == "mha":
            # weights asked for, as is the default; here masks say what is *not* seen
            x = x + self.cross_attention(x, context, context, attn_mask=~context_mask)[0]
        elif self.kind.cross:
            q = self.split(self.cross_q(x), HEADS)
            k, v = (self.split(t, HEADS) for t in self.cross_kv(context).chunk(2, -1))
            causal = self.kind.cross == "causal"
            mask = None if causal else context_mask
            x = x + self.merge(F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal))
        x = x + self.mlp(self.norm2(x))
        x = x.transpose(0, 1) if self.kind.seq_first else x
        return (x, None) if self.kind.keywords else x

    def attend(self, h: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        size, kv = WIDTH // HEADS, self.kind.kv_heads
        q, k, v = self.qkv(h).split([WIDTH, kv * size, kv * size], -1)
        q, k, v = self.split(q, HEADS), self.split(k, kv), self.split(v, kv)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        dropout = self.kind.dropout if self.training else 0.0
        call: dict[str, Callable[..., Tensor]] = {
            "F": F.scaled_dot_product_attention,
            "early": sdpa_imported_early,
            "explicit": attention,
            "merged": F.scaled_dot_product_attention,
        }
        if self.kind.call == "merged":
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        gqa = {"enable_gqa": True} if kv != HEADS and self.kind.gqa_flag else {}
        causal = self.kind.causal and mask is None
        out = call[self.kind.call](
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, **gqa
        )
        if self.kind.call == "merged":
            out = out.unflatten(0, (-1, HEADS))
        return self.proj(self.merge(out))

    @staticmethod
    def split(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    @staticmethod
    def merge(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)


class LanguageModel(nn.Module):
    """Parameters before, in and after the blocks; the output layer is tied to the embedding."""

    def __init__(self, kind: Kind, num_blocks: int = 2) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(64, WIDTH))
        self.angles = nn.Parameter(torch.rand(WIDTH // HEADS // 2))  # rotary tables get gradients
        self.blocks = nn.ModuleList(Block(kind) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        if kind.bias:
            heads = (HEADS,) if kind.bias == "heads" else ()
            self.bias = nn.Parameter(torch.randn(*heads, 64, 64))
        if kind.cross:
            self.context = nn.Linear(3, WIDTH)

    def forward(self, tokens: Tensor, lengths: Tensor, condition: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.positions[:length]
        angles = torch.arange(length, device=x.device)[:, None] * self.angles
        rotary = (angles.cos(), angles.sin())
        real = torch.arange(length, device=x.device) < lengths[:, None]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mask = None
        if self.kind.padding:
            mask = real[:, None, None, :]
            mask = mask & causal if self.kind.causal else mask
        if self.kind.bias:
            mask = self.bias[..., :length, :length]
            if self.kind.bias == "batch":
                mask = mask.masked_fill(~real[:, None, None, :], -1e9)
        extra: dict[str, Any] = {}
        if self.kind.cross:
            extra["context"] = self.context(condition)
            # a row for each query: not all queries see the whole condition
            rows = torch.arange(length, device=x.device)[:, None]
            columns = torch.arange(condition.shape[1], device=x.device)
            extra["context_mask"] = columns <= 1 + rows % condition.shape[1]
        x = x.transpose(0, 1) if self.kind.seq_first else x
        for block in self.blocks:
            if self.kind.own_checkpoint == "around":
                x = checkpoint(block, x, rotary, mask, use_reentrant=False)
            elif self.kind.keywords:
                x = block(hidden_states=x, rotary=rotary, mask=mask, **extra)[0]
            else:
                x = block(x, rotary, mask, **extra)
        x = x.transpose(0, 1) if self.kind.seq_first else x
        return self.head(self.norm(x))


class EncoderModel(nn.Module):
    """torch's own layers; ``own``: blocks around nn.MultiheadAttention, by what they ask of it."""

    def __init__(
        self, batch_first: bool = True, mask: str = "none", own: str | None = None
    ) -> None:
        super().__init__()
        self.batch_first, self.mask = batch_first, mask
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        if own is None:
            layer = nn.TransformerEncoderLayer(
                WIDTH, HEADS, 24, dropout=0.0, batch_first=batch_first, norm_first=True
            )
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        else:
            self.encoder = nn.Sequential(*(MHABlock(own) for _ in range(2)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, lengths: Tensor, condition: Tensor) -> Tensor:
        x = self.embedding(tokens)
        length = tokens.shape[1]
        padding = torch.arange(length, device=x.device) >= lengths[:, None]
        masks: dict[str, Any] = {}
        if self.mask in ("causal", "both"):
            masks["mask"] = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
            masks["is_causal"] = True
            if self.mask == "both":  # of one type with the padding mask
                masks["mask"] = masks["mask"].isinf()
        if self.mask in ("padding", "both"):
            masks["src_key_padding_mask"] = padding
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, **masks)
        x = x if self.batch_first else x.transpose(0, 1)
        return self.head(x)


class MHABlock(nn.Module):
    def __init__(self, own: str) -> None:
        super().__init__()
        self.own = own
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(
            WIDTH, HEADS, batch_first=True, add_bias_kv=own == "bias_kv"
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out, weights = self.attn(h, h, h, need_weights=self.own != "no_weights")
        if self.own == "uses_weights":
            out = out + weights.sum()
        return x + out


def make_batch(length: int, batch_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length * 100 + batch_size)
    lengths = torch.linspace(length, max(1, length // 2), batch_size).long()
    tokens = torch.randint(VOCABULARY, (batch_size, length), generator=generator)
    labels = torch.randint(VOCABULARY, (batch_size, length), generator=generator)
    labels[torch.arange(length) >= lengths[:, None]] = -100
    condition = torch.randn(batch_size, 5, 3, generator=generator, dtype=dtype)
    return {"tokens": tokens, "labels": labels, "lengths": lengths, "condition": condition}


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"], batch["lengths"], batch["condition"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def build(
    spec: Kind | dict[str, Any], dtype: torch.dtype = torch.float64, num_blocks: int = 2
) -> nn.Module:
    torch.manual_seed(7)
    model = LanguageModel(spec, num_blocks) if isinstance(spec, Kind) else EncoderModel(**spec)
    return model.to(dtype).train()


def observed_runtime(
    model: nn.Module, topology: Topology, lengths: tuple[int, ...] = (6, 9), **options: Any
) -> BlockRuntime:
    """A runtime that has seen whole sequences of the given lengths."""
    runtime = BlockRuntime(find_blocks(model), topology, **options)
    runtime.attach()
    dtype = next(model.parameters()).dtype
    for length in lengths:
        with runtime.micro_batch(group=topology.group(topology.rank, 1), observe=True):
            mean_loss(model, make_batch(length, 3, dtype))
    return runtime


def reference_gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a plain copy in this one process."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    mean_loss(plain, batch).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def worst_error(
    model: nn.Module, reference: dict[str, Tensor], group: SPGroup
) -> tuple[float, str]:
    """Largest relative error of a parameter's gradient, summed over the group's ranks."""
    worst = (0.0, "")
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if group.size > 1:
            dist.all_reduce(gradient, group=group.process_group)
        worst = max(worst, (relative_error(gradient, reference[name]), name))
    return worst


def relative_error(gradient: Tensor, reference: Tensor) -> float:
    """In norm; NaN counts as infinite, and nothing but zero is right for zero."""
    error = (gradient - reference).norm().item()
    if error == 0.0:
        return 0.0
    norm = reference.norm().item()
    return error / norm if error == error and norm > 0 else float("inf")

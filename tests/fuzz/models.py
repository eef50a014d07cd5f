"""Small models of many kinds, each with its data, for training runs drawn at random.

Shape legend: B samples, S tokens (padded), D width, V words.

The weight of a batch is the number of elements that its mean loss is over, as one process would
count them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import lightning_dcp
from tests.models.harness import Double
from tests.parallel.axes_models import STDiT
from tests.parallel.two_stacks import VOCABULARY, EncoderDecoder
from tests.strategies.toys import Block

VOCAB, IGNORE = 13, -100
#: Right-padded causal models may share inputs; all of these may be packed.
CAUSAL = ("own", "rotary", "encoder_causal")
ONE_AXIS = (*CAUSAL, "encoder", "mha_pre", "mha_post")
HUGGING_FACE = ("llama", "gpt2", "bert")
KINDS = (*ONE_AXIS, *HUGGING_FACE, "two_axes", "two_stacks")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What is drawn of a model.

    Attributes:
        frozen: "nothing", the "embedding", that and the "first" block, or all blocks but the last
            ("but_last"), or everything "but_adapters".
        labels_masked: share of the labels that bear no loss.
        unlabelled: share of the samples in which none does.
        mean_over: what the loss is a mean over: "tokens", "samples", or "reported": tokens whose
            number is returned.
    """

    kind: str
    width: int
    heads: int
    depth: int
    frozen: str = "nothing"
    labels_masked: float = 0.0
    unlabelled: float = 0.0
    mean_over: str = "tokens"
    optimizer: str = "sgd"
    tiled: bool = False
    seed: int = 0
    lengths: tuple[int, ...] = field(default=())


class Rotary(nn.Module):
    """Grouped heads, rotary tables as arguments of the block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, heads // 2 if heads % 2 == 0 else heads
        self.dim = 2 * max(1, width // heads // 2)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q = nn.Linear(width, heads * self.dim, bias=False)
        self.kv = nn.Linear(width, 2 * self.kv_heads * self.dim, bias=False)
        self.out = nn.Linear(heads * self.dim, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        q = self.q(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2, self.kv_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (self.turn(t, cos[:, None], sin[:, None]) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, value = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attending(nn.Module):
    """`nn.MultiheadAttention`, the norm before or after."""

    def __init__(self, width: int, heads: int, *, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        )

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        if self.norm_first:
            x = x + self.attend(self.norm1(x), padding)
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attend(x, padding))
        return self.norm2(x + self.mlp(x))

    def attend(self, h: Tensor, padding: Tensor | None) -> Tensor:
        return self.attention(h, h, h, key_padding_mask=padding, need_weights=False)[0]


class OneAxis(nn.Module):
    """Embedding, sinusoidal positions, blocks, head."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.kind, self.width = spec.kind, spec.width
        self.embed = nn.Embedding(VOCAB, spec.width)
        self.blocks = nn.ModuleList(self.block(spec) for _ in range(spec.depth))
        self.norm = nn.LayerNorm(spec.width)
        self.head = nn.Linear(spec.width, VOCAB)
        if spec.frozen == "but_adapters":
            self.adapters = nn.ModuleList(
                nn.Sequential(
                    nn.Linear(spec.width, 2, bias=False), nn.Linear(2, spec.width, bias=False)
                )
                for _ in range(spec.depth)
            )

    @staticmethod
    def block(spec: ModelSpec) -> nn.Module:
        width, heads = spec.width, spec.heads
        if spec.kind == "own":
            return Block(width, heads)
        if spec.kind == "rotary":
            return Rotary(width, heads)
        if spec.kind.startswith("encoder"):
            return nn.TransformerEncoderLayer(
                width,
                heads,
                dim_feedforward=width + 3,
                dropout=0.0,
                activation="gelu" if spec.seed % 2 else "relu",
                batch_first=True,
                norm_first=spec.seed % 3 == 0,
                bias=spec.seed % 5 != 0,
            )
        return Attending(width, heads, norm_first=spec.kind == "mha_pre")

    def hidden(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["tokens"]
        x = self.embed(ids)
        places = batch.get("position_ids", torch.arange(ids.shape[1])[None])
        places = places.to(x.dtype).expand(ids.shape)[..., None]
        angles = places / torch.arange(1, self.width + 1, dtype=x.dtype)
        padding = ~batch["real"] if "real" in batch else None
        for i, block in enumerate(self.blocks):
            if self.kind == "own":
                x = block(x, torch.sin(angles))
            elif self.kind == "rotary":
                half = angles[..., : block.dim // 2]
                x = block(x, half.cos(), half.sin())
            elif self.kind == "encoder_causal":
                x = x + 0.1 * torch.sin(angles) if i == 0 else x
                mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
                x = block(x, src_mask=mask, is_causal=True)
            elif self.kind == "encoder":
                x = x + 0.1 * torch.sin(angles) if i == 0 else x
                x = block(x, src_key_padding_mask=padding)
            else:
                x = x + 0.1 * torch.sin(angles) if i == 0 else x
                x = block(x, padding)
            if hasattr(self, "adapters"):
                x = x + self.adapters[i](x)
        return self.norm(x)


class FuzzModule(L.LightningModule):
    """Any of the kinds; `training_step` returns the mean loss of a batch."""

    def __init__(self, spec: ModelSpec, *, double: bool = True) -> None:
        super().__init__()
        self.spec, self.wide = spec, double
        self.seen: list[list[int]] = []
        torch.manual_seed(spec.seed)
        if spec.kind in HUGGING_FACE:
            self.net: Any = hugging_face(spec)
        elif spec.kind == "two_axes":
            self.net = STDiT("switch" if spec.seed % 2 else "ulysses", spec.depth)
        elif spec.kind == "two_stacks":
            self.net = EncoderDecoder((spec.depth, max(1, spec.depth - 1)))
        else:
            self.net = OneAxis(spec)
        freeze(self.net, spec)
        with torch.no_grad():  # nothing is one or zero, as norms and biases are at the start
            for parameter in self.net.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        if double:
            self.double()

    def loss(self, batch: dict[str, Any]) -> Tensor:
        """() mean; NaN where nothing bears loss."""
        batch = {k: v for k, v in batch.items() if k != "id"}
        if self.spec.kind in HUGGING_FACE:
            if not self.wide:
                return self.net(**batch).loss
            with Double():
                return self.net(**batch).loss
        if not isinstance(self.net, OneAxis):
            return self.net.loss(batch)
        labels = batch["labels"]
        keep = labels != IGNORE
        hidden = self.net.hidden(batch)
        if self.spec.tiled:
            head = self.net.head
            return lightning_dcp.linear_cross_entropy(
                hidden, head.weight, labels, bias=head.bias, tile_tokens=3
            )
        each = F.cross_entropy(self.net.head(hidden).transpose(1, 2), labels, reduction="none")
        if self.spec.mean_over == "samples":
            return (each.sum(1) / keep.sum(1)).mean()
        return each[keep].mean()

    def weight(self, batch: dict[str, Any]) -> int:
        """Elements that the mean is over."""
        if self.spec.mean_over == "samples":
            return len(batch["labels"])
        if self.spec.kind == "two_axes":
            return int(batch["real"].sum())
        labels = batch["labels"]
        if self.spec.kind in ("llama", "gpt2"):
            labels = labels[:, 1:]
        return int((labels != IGNORE).sum())

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.seen.append(batch["id"].tolist())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("samples", float(len(batch["id"])), reduce_fx="sum", on_epoch=True)
        if self.spec.mean_over == "reported":
            return {"loss": loss, "num_targets": self.weight(batch)}
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        weight = self.weight(batch)
        self.log("val_loss", self.loss(batch) if weight else 0.0, batch_size=max(weight, 0))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not (self.spec.kind in HUGGING_FACE and self.wide):
            super().backward(loss, *args, **kwargs)
            return
        with Double():
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward(
                (loss,),
                (torch.ones_like(loss),),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.spec.optimizer == "sgd":
            return torch.optim.SGD(trained, lr=0.05)
        if self.spec.optimizer == "momentum":
            return torch.optim.SGD(trained, lr=0.02, momentum=0.9, weight_decay=0.01)
        # Not smaller: Adam steps on the rounding errors of gradients that mathematics makes zero.
        return torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)


def hugging_face(spec: ModelSpec) -> Any:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    import transformers

    sizes: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0}
    if spec.kind == "gpt2":
        config: Any = transformers.GPT2Config(
            **sizes, n_embd=spec.width, n_layer=spec.depth, n_head=spec.heads, n_positions=256,
            bos_token_id=1, eos_token_id=2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
        )  # fmt: skip
        return transformers.AutoModelForCausalLM.from_config(config)
    sizes |= {
        "hidden_size": spec.width,
        "intermediate_size": spec.width + 8,
        "num_hidden_layers": spec.depth,
        "num_attention_heads": spec.heads,
    }
    if spec.kind == "bert":
        config = transformers.BertConfig(
            **sizes, hidden_dropout_prob=0, attention_probs_dropout_prob=0
        )
        return transformers.AutoModelForMaskedLM.from_config(config)
    groups = spec.heads // 2 if spec.heads % 2 == 0 and spec.seed % 2 else spec.heads
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=groups)
    return transformers.AutoModelForCausalLM.from_config(config)


def freeze(net: Any, spec: ModelSpec) -> None:
    """Before `fit`, as users do."""
    if spec.frozen == "nothing" or not isinstance(net, OneAxis):
        return
    if spec.frozen == "embedding":
        net.embed.requires_grad_(False)
    elif spec.frozen == "first":
        net.embed.requires_grad_(False)
        net.blocks[0].requires_grad_(False)
    elif spec.frozen == "but_last":
        net.embed.requires_grad_(False)
        net.blocks[:-1].requires_grad_(False)
    else:
        net.requires_grad_(False)
        net.adapters.requires_grad_(True)


class FuzzData(Dataset[dict[str, Any]]):
    """Random samples of given lengths; of two axes, lengths are products."""

    def __init__(self, spec: ModelSpec, lengths: Sequence[int], *, offset: int = 0) -> None:
        self.spec, self.offset = spec, offset
        if spec.kind == "two_axes":
            self.shapes = [(max(1, n // 3), min(3, n)) for n in lengths]
            self.sequence_lengths: list[int] = [t * s for t, s in self.shapes]
        else:
            self.sequence_lengths = list(lengths)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        n, spec = self.sequence_lengths[index], self.spec
        draw = torch.Generator().manual_seed(1000 * spec.seed + self.offset + index)
        if spec.kind == "two_axes":
            t, s = self.shapes[index]
            dtype = torch.float64
            return {
                "clip": torch.randn(t, s, 3, generator=draw, dtype=dtype),
                "target": torch.randn(t, s, 3, generator=draw, dtype=dtype),
                "time": torch.rand((), generator=draw, dtype=dtype),
                "text": torch.randn(5, 3, generator=draw, dtype=dtype),
                "id": index,
            }
        if spec.kind == "two_stacks":
            tokens = torch.randint(VOCABULARY, (n,), generator=draw)
            labels = torch.randint(VOCABULARY, (max(1, 2 * n // 3),), generator=draw)
            return {"tokens": tokens, "labels": labels, "id": index}
        first = 1 if spec.kind in HUGGING_FACE else 0  # 0 pads
        ids = torch.randint(first, VOCAB, (n + 1,), generator=draw)
        labels = (ids[:-1] if spec.kind in HUGGING_FACE else ids[1:]).clone()
        drop = torch.rand(n, generator=draw) < spec.labels_masked
        drop[0] = drop[0] and spec.kind in HUGGING_FACE
        if float(torch.rand((), generator=draw)) < spec.unlabelled:
            drop[:] = True
        labels[drop] = IGNORE
        name = "input_ids" if spec.kind in HUGGING_FACE else "tokens"
        return {name: ids[:-1], "labels": labels, "id": index}


class Collate:
    """Pads on the right."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        kind = self.spec.kind
        ids = torch.tensor([s["id"] for s in samples])
        if kind == "two_axes":
            batch = {k: torch.stack([s[k] for s in samples]) for k in samples[0] if k != "id"}
            batch["real"] = torch.ones(batch["clip"].shape[:3], dtype=torch.bool)
            batch["text_real"] = torch.ones(len(samples), 5, dtype=torch.bool)
            return {**batch, "id": ids}
        if kind == "two_stacks":
            return {
                "tokens": padded([s["tokens"] for s in samples], 0),
                "labels": padded([s["labels"] for s in samples], IGNORE),
                "lengths": torch.tensor([len(s["tokens"]) for s in samples]),
                "id": ids,
            }
        name = "input_ids" if kind in HUGGING_FACE else "tokens"
        tokens = padded([s[name] for s in samples], 0)
        labels = padded([s["labels"] for s in samples], IGNORE)
        real = padded([torch.ones(len(s[name]), dtype=torch.bool) for s in samples], False)
        batch = {name: tokens, "labels": labels, "id": ids}
        if kind in HUGGING_FACE:
            batch["attention_mask"] = real.long()
        elif kind in CAUSAL:
            batch["position_ids"] = torch.arange(tokens.shape[1])[None].expand(tokens.shape)
        else:
            batch["real"] = real
        return batch


def padded(values: list[Tensor], value: Any) -> Tensor:
    longest = max(map(len, values))
    return torch.stack([F.pad(v, (0, longest - len(v)), value=value) for v in values])

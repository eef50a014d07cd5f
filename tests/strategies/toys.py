"""A tiny causal transformer and helpers that train it, in a world of ranks and in one process.

Shapes: B samples, S tokens (padded), D width, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from lightning_dcp.planning.plan import MicroBatch, Plan

VOCAB = 13
IGNORE = -100


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias: softmax makes the gradient of a key's bias zero, and Adam would step on its
        # rounding errors.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        b, s, d = x.shape
        h = self.norm1(x) + positions
        q, k, v = self.qkv(h).view(b, s, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(b, s, d)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class ToyLM(L.LightningModule):
    """Embedding, blocks, tied-width head; mean next-token loss over labels that are not ignored."""

    def __init__(
        self,
        width: int = 16,
        num_heads: int = 4,
        num_blocks: int = 3,
        dropout: float = 0.0,
        lr: float = 1e-2,
        double: bool = False,
        log: Callable[[ToyLM, Tensor, Any], None] | None = None,
        report_targets: bool = False,
        mean_over: str = "tokens",
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)
        self.lr, self.log_step, self.report_targets = lr, log, report_targets
        self.mean_over = mean_over
        if double:
            self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        angles = torch.arange(ids.shape[1], device=ids.device, dtype=x.dtype)[:, None]
        positions = torch.sin(angles / torch.arange(1, x.shape[-1] + 1, dtype=x.dtype))
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        """What the loss is a mean over: (num_targets,) of labelled elements, or (B,) of samples."""
        logits = self(batch["ids"])
        labels = batch["y"] if "y" in batch else batch["labels"]
        each = F.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none"
        )
        keep = labels != IGNORE
        return each[keep] if self.mean_over == "tokens" else each.sum(1) / keep.sum(1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.losses(batch).mean()
        if self.log_step is not None:
            self.log_step(self, loss, batch)
        if self.report_targets:
            self.log("logged", loss, on_step=True, on_epoch=False)
            return {
                "loss": loss,
                "num_targets": (batch["y"] != IGNORE).sum(),
                "mine": batch_idx,
            }
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log(
            "val_loss", self.losses(batch).mean(), sync_dist=True, batch_size=len(batch["ids"])
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Sequences(Dataset[Tensor]):
    """Random token sequences of given lengths; label i is token i+1, some labels are ignored."""

    def __init__(self, lengths: Sequence[int], masked: float = 0.3) -> None:
        generator = torch.Generator().manual_seed(3)
        self.sequence_lengths = list(lengths)
        self.items = []
        for n in lengths:
            ids = torch.randint(VOCAB, (n + 1,), generator=generator)
            labels = ids[1:].clone()
            drop = torch.rand(n, generator=generator) < masked
            drop[0] = False  # at least one label each
            labels[drop] = IGNORE
            self.items.append({"ids": ids[:-1], "labels": labels})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return {**self.items[index], "id": index}


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(s["ids"]) for s in samples)
    return {
        "ids": torch.stack([F.pad(s["ids"], (0, longest - len(s["ids"]))) for s in samples]),
        "labels": torch.stack(
            [F.pad(s["labels"], (0, longest - len(s["ids"])), value=IGNORE) for s in samples]
        ),
        "id": torch.tensor([s["id"] for s in samples]),
    }


def pad_hidden_labels(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The same with labels under a name that nobody would look for."""
    batch = pad(samples)
    return {"ids": batch["ids"], "y": batch["labels"], "id": batch["id"]}


def loader(lengths: Sequence[int], batch_size: int = 2, **kwargs: Any) -> DataLoader[Any]:
    kwargs.setdefault("shuffle", True)
    return DataLoader(Sequences(lengths), batch_size=batch_size, collate_fn=pad, **kwargs)


def micro_batch(
    dataset: Sequences,
    ids: Sequence[int],
    first_rank: int,
    sp_size: int = 1,
    recompute_blocks: int = 0,
) -> MicroBatch:
    lengths = [dataset.sequence_lengths[i] for i in ids]
    return MicroBatch(
        sample_ids=tuple(ids),
        seq_len=math.ceil(max(lengths) / sp_size) * sp_size,
        num_tokens=sum(lengths),
        first_rank=first_rank,
        sp_size=sp_size,
        recompute_blocks=recompute_blocks,
        est_time_s=0.01 * sum(lengths) / sp_size,
        est_bytes=1000,
    )


@dataclass
class HandPlanner:
    """Stands for an EpochPlanner where a test dictates the plans."""

    plans: list[Plan]
    truncate_to: int | None = None

    @property
    def num_iterations(self) -> int:
        return len(self.plans)

    @property
    def sp_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({m.sp_size for p in self.plans for m in p.micro_batches}))

    def epoch(self, epoch: int) -> list[Plan]:
        return [
            Plan(
                epoch=epoch,
                iteration=p.iteration,
                world_size=p.world_size,
                micro_batches=p.micro_batches,
            )
            for p in self.plans
        ]


def unequal_plan(dataset: Sequences, iteration: int, ids: Sequence[int], num_blocks: int) -> Plan:
    """17 samples on 4 ranks, everything unequal.

    p = 1, 2 and 4, nested; b > 1 with padding; r = 0, some, all; rank 3 idles at p=1.
    """
    i = list(ids)
    assert len(i) == 17
    return Plan(
        epoch=0,
        iteration=iteration,
        world_size=4,
        micro_batches=(
            micro_batch(dataset, i[0:2], 0, 4, recompute_blocks=1),
            micro_batch(dataset, i[2:5], 0, 2, recompute_blocks=num_blocks),
            micro_batch(dataset, i[5:6], 2, 2),
            micro_batch(dataset, i[6:9], 0),
            micro_batch(dataset, i[9:10], 1, recompute_blocks=2),
            micro_batch(dataset, i[10:14], 1),
            micro_batch(dataset, i[14:15], 2, recompute_blocks=num_blocks),
            micro_batch(dataset, i[15:16], 2),
            micro_batch(dataset, i[16:17], 2),
        ),
    )


def idle_plan(dataset: Sequences, iteration: int, ids: Sequence[int]) -> Plan:
    """3 samples on ranks 0 and 1; ranks 2 and 3 have nothing at all."""
    i = list(ids)
    return Plan(
        epoch=0,
        iteration=iteration,
        world_size=4,
        micro_batches=(
            micro_batch(dataset, i[0:1], 0, 2),
            micro_batch(dataset, i[1:3], 1),
        ),
    )


@dataclass
class Reference:
    """What one process does with the same samples."""

    gradients: list[dict[str, Tensor]]
    losses: list[float]
    parameters: dict[str, Tensor]


def reference(
    model: ToyLM,
    dataset: Sequences,
    steps: Sequence[Sequence[int]],
    clip: float | None = None,
    clip_value: float | None = None,
) -> Reference:
    """Plain training: one optimizer step per entry of `steps`, on the mean loss of its elements."""
    model = copy.deepcopy(model)
    optimizer = model.configure_optimizers()
    gradients, losses = [], []
    for ids in steps:
        optimizer.zero_grad()
        each = [model.losses(pad([dataset[i]])) for i in ids]
        loss = torch.cat(each).mean()
        loss.backward()
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()
        losses.append(loss.item())
    return Reference(
        gradients, losses, {n: p.detach().clone() for n, p in model.named_parameters()}
    )


def whole(tensor: Tensor) -> Tensor:
    """A copy; put together from all ranks where it is sharded (a collective)."""
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def largest_relative_error(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest over parameters of |got - wanted| / |wanted|, in norms; NaN where one is."""
    assert got.keys() == wanted.keys()
    errors = [(got[n] - wanted[n]).norm() / wanted[n].norm().clamp_min(1e-30) for n in wanted]
    return float(torch.stack(errors).max())  # Python's max would pass over a NaN

"""A byte-level language model of Python's standard library, trained with Data-Centric Parallel.

Every function and class definition that the machine's own standard library contains is one sample:
thousands of them, from tens to tens of thousands of bytes. A static launch configuration has to
fit the longest; DCP picks SP size, micro-batch size, accumulation and recomputation step by step.

    python examples/stdlib_lm.py                       # 4 CPU ranks, or all GPUs
    python examples/stdlib_lm.py --policy dcp-inter --max-steps 20
    python examples/stdlib_lm.py fit --config examples/configs/dcp.yaml  # by LightningCLI

For other strategies by LightningCLI, and for `lightning-dcp fit`, see examples/configs.

The model and its LightningModule know nothing of DCP. What DCP needs is marked with `DCP:`.
"""

from __future__ import annotations

import argparse
import ast
import gc
import math
import os
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

import lightning_dcp  # DCP: registers the strategies "dcp", "dcp_ddp" and "dcp_fsdp"

BOS = 256  # begins every sample; bytes are 0..255
IGNORE = -100  # label of padding
LN2 = math.log(2.0)

# ------------------------------------------------------------------------------------------ data

SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages"})
HELD_OUT_FILES = 16  # one file in so many is kept for validation


def stdlib_files() -> list[Path]:
    """The standard library's source files, in an order that mixes packages and never changes."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path.relative_to(root)
        for path in root.rglob("*.py")
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    ]
    return [root / path for path in sorted(files, key=lambda p: (zlib.crc32(bytes(p)), p))]


def definitions(source: bytes) -> Iterator[bytes]:
    """Yield the text of each function and class in `source`, nested ones too, with decorators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a file that is broken on purpose
            return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield b"".join(lines[first - 1 : node.end_lineno])


def collect(
    files: Sequence[Path], num_samples: int, min_length: int, max_length: int
) -> list[bytes]:
    """The first `num_samples` different definitions of `min_length` to `max_length` bytes."""
    found: dict[bytes, None] = {}  # a dict keeps the order and drops repeats
    collecting = gc.isenabled()
    gc.disable()  # syntax trees are many small objects, and none of them is garbage yet
    try:
        for path in files:
            for text in definitions(path.read_bytes()):
                if min_length <= len(text) <= max_length:
                    found[text] = None
            if len(found) >= num_samples:
                break
    finally:
        if collecting:
            gc.enable()
    return list(found)[:num_samples]


class Definitions(Dataset[bytes]):
    """Definitions as raw bytes. A sample's length is its number of input tokens: its bytes."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> bytes:
        return self.texts[index]


def collate(texts: Sequence[bytes]) -> dict[str, Tensor]:
    """Pad to the longest: `input_ids` and `labels`, both (B, S). Token i predicts byte i."""
    length = max(len(text) for text in texts)
    labels = torch.full((len(texts), length), IGNORE, dtype=torch.long)
    for row, text in zip(labels, texts, strict=True):
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    input_ids = labels.roll(1, dims=1).clamp(min=0)
    input_ids[:, 0] = BOS
    return {"input_ids": input_ids, "labels": labels}


class StdlibData(lightning_dcp.DCPDataModuleMixin, L.LightningDataModule):
    """Function and class definitions of the standard library.

    Args:
        num_samples: how many training samples to take.
        batch_size: samples per rank and step, on average: DCP keeps this many tokens per step.
        min_length: shorter definitions are left out (bytes).
        max_length: longer definitions are left out (bytes).
        num_val: how many held-out samples to validate on.
        max_val_length: longer definitions are not validated on, to keep validation short (bytes).
    """

    def __init__(
        self,
        num_samples: int = 6000,
        batch_size: int = 2,
        min_length: int = 16,
        max_length: int = 16384,
        num_val: int = 96,
        max_val_length: int = 2048,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        h = self.hparams
        files = stdlib_files()
        held_out = files[::HELD_OUT_FILES]
        training = [path for i, path in enumerate(files) if i % HELD_OUT_FILES]
        self.train = Definitions(collect(training, h.num_samples, h.min_length, h.max_length))
        val = collect(held_out, h.num_val, h.min_length, min(h.max_length, h.max_val_length))
        self.val = Definitions(sorted(val, key=len))  # neighbours of like length: little padding

    # DCP: one length per sample, in the order of the dataset.
    def sequence_lengths(self, dataset: Definitions) -> list[int]:
        return [len(text) for text in dataset.texts]

    def train_dataloader(self) -> DataLoader[bytes]:
        return DataLoader(
            self.train, batch_size=self.hparams.batch_size, shuffle=True, collate_fn=collate
        )

    def val_dataloader(self) -> DataLoader[bytes]:
        return DataLoader(self.val, batch_size=8, collate_fn=collate)


# ----------------------------------------------------------------------------------------- model
# Shapes: B samples, S tokens, C channels, H heads, D = C / H.


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x (B, H, S, D) with tables (S, D / 2)."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention with rotary positions, then an MLP."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.out = nn.Linear(channels, channels, bias=False)
        self.mlp_norm = nn.RMSNorm(channels)
        self.up = nn.Linear(channels, 4 * channels, bias=False)
        self.down = nn.Linear(4 * channels, channels, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, S, D)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    """Bytes (B, S) to logits over the next byte (B, S, 256)."""

    def __init__(self, channels: int, heads: int, depth: int) -> None:
        super().__init__()
        self.rotary_channels = channels // heads
        self.embed = nn.Embedding(BOS + 1, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(channels)
        self.head = nn.Linear(channels, BOS, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
            if name.endswith(("out.weight", "down.weight")):  # residual branches start small
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * depth))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        cos, sin = self.rotary(input_ids.shape[1], input_ids.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def rotary(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tables (S, D / 2) in float32."""
        exponent = torch.arange(0, self.rotary_channels, 2, device=device) / self.rotary_channels
        angles = torch.arange(length, device=device)[:, None] * 10_000.0**-exponent
        return angles.cos(), angles.sin()


class StdlibLM(L.LightningModule):
    """The byte-level language model and its training.

    Args:
        channels: width of the residual stream.
        heads: attention heads.
        depth: number of blocks.
        learning_rate: peak of the warm-up and cosine schedule.
        warmup: share of all steps in which the learning rate rises.
    """

    def __init__(
        self,
        channels: int = 64,
        heads: int = 4,
        depth: int = 4,
        learning_rate: float = 4e-3,
        warmup: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = Transformer(channels, heads, depth)
        self.val_bits = MeanMetric()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        # Weighted by bytes, so that the logged value is the mean over the step's bytes.
        num_bytes = int((batch["labels"] != IGNORE).sum())
        self.log("bits_per_byte", loss.detach() / LN2, prog_bar=True, batch_size=num_bytes)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.val_bits.update(self.loss(batch) / LN2, (batch["labels"] != IGNORE).sum())
        self.log("val_bits_per_byte", self.val_bits, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> dict[str, Any]:
        h = self.hparams
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=h.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        num_steps = int(self.trainer.estimated_stepping_batches)
        num_warmup = max(1, round(h.warmup * num_steps))

        def factor(step: int) -> float:
            if step < num_warmup:
                return (step + 1) / num_warmup
            progress = min(1.0, (step - num_warmup) / max(1, num_steps - num_warmup))
            return 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * progress))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


# ------------------------------------------------------------------------------------------- run


class ValidationHistory(L.Callback):
    """Remembers the bits per byte of each validation, from the one before the first step on."""

    def __init__(self) -> None:
        self.bits_per_byte: list[float] = []

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.bits_per_byte.append(float(pl_module.val_bits.compute()))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add(
        "--strategy",
        choices=["dcp", "dcp_ddp", "dcp_fsdp"],
        default="dcp",
        help="on DeepSpeed ZeRO-1, DDP or FSDP2",
    )
    add("--policy", default="dcp-intra", help="what plans each step")
    add("--devices", type=int, default=gpus or 4, help="ranks: GPUs where there are some")
    add("--max-steps", type=int, default=600 if gpus else 60, help="-1: no limit but the epochs")
    add("--max-epochs", type=int, default=10, help="stop after so many epochs at the latest")
    add("--batch-size", type=int, default=16 if gpus else 2, help="mean samples per rank and step")
    add("--memory-limit-mb", type=float, default=None if gpus else 64.0, help="for each rank")
    add("--profile-seconds", type=float, default=20.0, help="budget of the cost profile")
    add("--num-samples", type=int, default=6000, help="training samples")
    add("--min-length", type=int, default=16, help="bytes; shorter samples are left out")
    add("--max-length", type=int, default=65536 if gpus else 16384, help="bytes; likewise longer")
    add("--channels", type=int, default=512 if gpus else 64, help="width of the model")
    add("--heads", type=int, default=8 if gpus else 4, help="attention heads")
    add("--depth", type=int, default=8 if gpus else 4, help="number of blocks")
    add("--learning-rate", type=float, default=1e-3 if gpus else 4e-3, help="peak")
    add("--precision", default="bf16-mixed" if gpus else "32-true", help="as for L.Trainer")
    add("--seed", type=int, default=0, help="of weights and plans")
    add("--out", type=Path, default=Path("runs/stdlib_lm"), help="folder for logs")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    # Lightning and DeepSpeed call what newer versions of torch have deprecated, once per rank.
    for deprecated in (".*LeafSpec.*", ".*all_gather_into_tensor.*"):
        warnings.filterwarnings("ignore", message=deprecated)
    L.seed_everything(args.seed, verbose=False)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.devices))

    limit = None if args.memory_limit_mb is None else int(args.memory_limit_mb * 2**20)
    strategy_class = {
        "dcp": lightning_dcp.DCPStrategy,
        "dcp_ddp": lightning_dcp.DCPDDPStrategy,
        "dcp_fsdp": lightning_dcp.DCPFSDPStrategy,
    }
    strategy = strategy_class[args.strategy](  # DCP: in place of strategy="ddp"
        policy=args.policy,
        planning=lightning_dcp.PlanningOptions(memory_limit_bytes=limit),
        profiling=lightning_dcp.ProfilingOptions(budget_s=args.profile_seconds),
    )
    history = ValidationHistory()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        precision=args.precision,
        max_steps=args.max_steps,
        max_epochs=args.max_epochs,
        gradient_clip_val=1.0,
        num_sanity_val_steps=-1,  # a full validation before the first step
        val_check_interval=args.max_steps if args.max_steps > 0 else None,
        check_val_every_n_epoch=None if args.max_steps > 0 else 1,
        log_every_n_steps=1,
        logger=CSVLogger(args.out.parent, name=args.out.name),
        enable_checkpointing=False,
        callbacks=[history, lightning_dcp.DCPCallback()],  # DCP: tables and logged figures
    )
    model = StdlibLM(args.channels, args.heads, args.depth, args.learning_rate)
    data = StdlibData(args.num_samples, args.batch_size, args.min_length, args.max_length)
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        before, after = history.bits_per_byte[0], history.bits_per_byte[-1]
        print(
            f"Bits per byte of held-out definitions: {before:.2f} before the first step, "
            f"{after:.2f} after {trainer.global_step} steps"
        )


def cli() -> None:
    """LightningCLI with this file's model and data: `fit --config examples/configs/dcp.yaml`."""
    from lightning.pytorch.cli import LightningCLI

    LightningCLI(StdlibLM, StdlibData, seed_everything_default=0)


if __name__ == "__main__":
    # Ranks other than the first are started by Lightning as this very command: see DDP's launcher.
    if sys.argv[1:2] and not sys.argv[1].startswith("-"):
        cli()
    else:
        main(parse())

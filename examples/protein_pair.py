"""Contacts of protein-like chains from pair representations, with Data-Centric Parallel.

Chains have 12 to 96 residues. A residue's type bends and twists the backbone by its own angles, so
that the chain's geometry, and with it who touches whom, follows from the sequence and can be
learned. The blocks are those of an Evoformer's pair stack: triangle multiplication, attention along
rows with a bias from the pairs, attention along columns, transition, on N x N pairs. The rows of
pairs are sharded over ranks.

    python examples/protein_pair.py                    # 4 CPU ranks, or all GPUs
    python examples/protein_pair.py --max-steps 10 --policy dcp-inter

What DCP needs is marked with `DCP:`.
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_dcp  # DCP: registers the strategies; functions that know the sharded axis

TYPES = 8  # of residues
PADDING = TYPES
IGNORE = -100  # label of pairs that are padding, neighbours, or counted already
REACH = 24  # relative positions beyond it look alike
FAR = 1e9

# ------------------------------------------------------------------------------------------ data


class Chains(Dataset[dict[str, Tensor]]):
    """Backbones whose bends follow from residue types; built when they are read.

    Args:
        num_chains: how many.
        first: number of the first chain, its seed.
        min_length: fewest residues.
        max_length: most residues.
    """

    def __init__(self, num_chains: int, first: int, min_length: int, max_length: int) -> None:
        self.first = first
        draw = torch.Generator().manual_seed(first)
        share = torch.rand(num_chains, generator=draw)
        self.lengths = (min_length * (max_length / min_length) ** share).round().long()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = int(self.lengths[index])
        draw = torch.Generator().manual_seed(self.first + index)
        # Stretches of one type, as in secondary structure.
        stretches = torch.randint(3, 9, (length,), generator=draw)
        kinds = torch.randint(TYPES, (length,), generator=draw)
        types = kinds.repeat_interleave(stretches)[:length]
        distances = torch.cdist(places := backbone(types), places)
        i, j = torch.triu_indices(length, length, offset=3)
        labels = torch.full((length, length), IGNORE)
        labels[i, j] = (distances[i, j] < 2.2).long()
        return {"types": types, "labels": labels}


def backbone(types: Tensor) -> Tensor:
    """Places (N, 3) of residues one step apart; types give the bend and twist from step to step."""
    bends = 0.3 + 1.2 * (types % 4) / 3
    twists = 2.0 * (types.div(4, rounding_mode="floor") - 0.5) * (1.0 + types % 2)
    frame, steps = torch.eye(3), []
    for bend, twist in zip(bends, twists, strict=True):
        steps.append(frame[:, 0])
        (cb, sb), (ct, st) = (torch.stack([a.cos(), a.sin()]).tolist() for a in (bend, twist))
        frame = frame @ torch.tensor([[cb, -sb, 0], [sb, cb, 0], [0, 0, 1]])
        frame = frame @ torch.tensor([[1.0, 0, 0], [0, ct, -st], [0, st, ct]])
    return torch.stack(steps).cumsum(0)


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad to the longest: `types` (B, N) and `labels` (B, N, N)."""
    longest = max(len(sample["types"]) for sample in samples)
    types = torch.full((len(samples), longest), PADDING)
    labels = torch.full((len(samples), longest, longest), IGNORE)
    for row, square, sample in zip(types, labels, samples, strict=True):
        length = len(sample["types"])
        row[:length] = sample["types"]
        square[:length, :length] = sample["labels"]
    return {"types": types, "labels": labels}


class ChainData(lightning_dcp.DCPDataModuleMixin, L.LightningDataModule):  # DCP: the mixin
    """Chains and their contacts.

    Args:
        num_chains: training chains.
        batch_size: chains per rank and step, on average: DCP keeps this many pairs per step.
        max_length: most residues.
        num_val: chains to validate on.
    """

    def __init__(
        self, num_chains: int = 3000, batch_size: int = 2, max_length: int = 96, num_val: int = 32
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        h = self.hparams
        self.train = Chains(h.num_chains, 0, 12, h.max_length)
        self.val = Chains(h.num_val, 10**6, 12, min(48, h.max_length))

    # DCP: pairs per chain, as both axes of the representation are long.
    def sequence_lengths(self, dataset: Chains) -> list[tuple[int, int]]:
        return [(length, length) for length in dataset.lengths.tolist()]

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        size = self.hparams.batch_size
        return DataLoader(self.train, batch_size=size, shuffle=True, collate_fn=collate)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.val, batch_size=2, collate_fn=collate)


# ----------------------------------------------------------------------------------------- model
# Shapes: B chains, N residues, C channels, H heads. Pairs z are (B, N, N, C), real is (B, N).


class TriangleMultiplication(nn.Module):
    """Updates (i, j) from all (i, k) and (j, k)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.norm_out = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.abg, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, z: Tensor, real: Tensor) -> Tensor:
        a, b, gate = self.abg(self.norm(z)).chunk(3, -1)
        b = lightning_dcp.gather_axis(b, 1)  # DCP: all rows j, for this rank's rows i
        b = b * real[:, None, :, None]
        return gate.sigmoid() * self.out(self.norm_out(torch.einsum("bikc,bjkc->bijc", a, b)))


class TriangleAttention(nn.Module):
    """(i, j) attends to all (i, k), with a bias from (j, k): attention along rows."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.bias = nn.Linear(channels, heads, bias=False)

    def forward(self, z: Tensor, bias: Tensor, real: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(2, 3)
            for t in self.qkv(self.norm(z)).chunk(3, -1)
        )  # (B, N, H, N, D)
        bias = bias.permute(0, 3, 1, 2)[:, None].masked_fill(~real[:, None, None, None], -FAR)
        with lightning_dcp.attention_axis("whole"):  # DCP: rows are whole, after a switch columns
            mixed = F.scaled_dot_product_attention(q, k, v, bias)
        return self.out(mixed.transpose(2, 3).flatten(3))


class Block(nn.Module):
    """Triangle multiplication, attention along rows, attention along columns, transition."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.multiplication = TriangleMultiplication(channels)
        self.rows, self.columns = (TriangleAttention(channels, heads) for _ in range(2))
        self.transition = nn.Sequential(
            nn.LayerNorm(channels),
            nn.Linear(channels, 4 * channels),
            nn.ReLU(),
            nn.Linear(4 * channels, channels),
        )

    def forward(self, z: Tensor, real: Tensor) -> Tensor:
        z = z + self.multiplication(z, real)
        biases = torch.cat([self.rows.bias(z), self.columns.bias(z)], -1)
        of_rows, of_columns = lightning_dcp.gather_axis(biases, 1).chunk(2, -1)  # DCP: all pairs
        z = z + self.rows(z, of_rows, real)
        y = lightning_dcp.switch_axis(z, 1, 2).transpose(1, 2)  # DCP: whole columns, some of them
        y = self.columns(y, of_columns, real).transpose(1, 2)
        z = z + lightning_dcp.switch_axis(y, 2, 1)  # DCP: back to some rows
        return z + self.transition(z)


class PairModel(nn.Module):
    """Residue types (B, N) to logits of contacts (B, N, N)."""

    def __init__(self, channels: int, heads: int, depth: int) -> None:
        super().__init__()
        self.left, self.right = (nn.Embedding(TYPES + 1, channels) for _ in range(2))
        self.relative = nn.Embedding(2 * REACH + 1, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(channels), nn.Linear(channels, 1)

    def forward(self, types: Tensor) -> Tensor:
        places = torch.arange(types.shape[1], device=types.device)
        relative = (places[:, None] - places).clamp(-REACH, REACH) + REACH
        z = self.left(types)[:, :, None] + self.right(types)[:, None] + self.relative(relative)
        for block in self.blocks:
            z = block(z, types != PADDING)
        logits = self.head(self.norm(z)).squeeze(-1)
        return logits + logits.transpose(1, 2)


class ContactModel(L.LightningModule):
    """Contact prediction.

    Args:
        channels: width of the pair representation.
        heads: attention heads.
        depth: number of blocks.
        learning_rate: of AdamW.
    """

    def __init__(
        self, channels: int = 24, heads: int = 2, depth: int = 3, learning_rate: float = 4e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = PairModel(channels, heads, depth)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        counted = batch["labels"] != IGNORE
        logits = self.model(batch["types"])[counted]
        return F.binary_cross_entropy_with_logits(logits, batch["labels"][counted].to(logits))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        num_pairs = int((batch["labels"] != IGNORE).sum())
        self.log("loss", loss.detach(), prog_bar=True, batch_size=num_pairs)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        num_pairs = int((batch["labels"] != IGNORE).sum())
        self.log("val_loss", self.loss(batch), batch_size=num_pairs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


# ------------------------------------------------------------------------------------------- run


def main() -> None:
    from running import parser, train

    options = parser(__doc__.split("\n\n")[0], "protein_pair", max_steps=60)
    options.add_argument("--num-chains", type=int, help="training chains", default=3000)
    options.add_argument("--max-length", type=int, help="most residues of a chain", default=96)
    options.add_argument("--channels", type=int, help="width of the model", default=24)
    options.add_argument("--depth", type=int, help="number of blocks", default=3)
    args = options.parse_args()
    L.seed_everything(args.seed, verbose=False)
    model = ContactModel(args.channels, depth=args.depth)
    data = ChainData(args.num_chains, max_length=args.max_length)
    # DCP: the pairs' two axes are equally long; the first one is sharded.
    train(args, model, data, "val_loss", sequence_dims={"z": 1})


if __name__ == "__main__":
    main()

"""A small video diffusion transformer on clips of moving shapes, with Data-Centric Parallel.

Clips have 4 to 32 frames of 16 to 64 patches: from 64 to 2048 tokens. The blocks are spatial-
temporal ones as in Open-Sora's STDiT: attention within a frame, attention over time, attention to a
caption, all modulated by the diffusion time. Frames are sharded over ranks, so that attention over
time is marked as along the sharded axis and all other as local. Training is by rectified flow: the
model learns the velocity from noise to clip; noise and times are drawn in `training_step`.

    python examples/video_stdit.py                     # 4 CPU ranks, or all GPUs
    python examples/video_stdit.py --max-steps 10 --policy dcp-inter

What DCP needs is marked with `DCP:`.
"""

from __future__ import annotations

import math

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_dcp  # DCP: registers the strategies; functions that mark axes

PATCH = 4  # pixels
WORDS = 12  # of captions: 2 shapes, 3 colours, 2 speeds, 4 directions, nothing
CAPTION = 8  # words of two shapes

# ------------------------------------------------------------------------------------------ data


class MovingShapes(Dataset[dict[str, Tensor]]):
    """Scenes of one or two coloured shapes that move and bounce; rendered when they are read.

    Args:
        num_clips: how many.
        first: number of the first scene, its seed; scenes of other numbers are others.
        max_frames: most frames of a clip.
        max_side: most patches of a frame's side.
    """

    def __init__(self, num_clips: int, first: int, max_frames: int, max_side: int) -> None:
        self.first = first
        draw = torch.Generator().manual_seed(first)
        frames = 2 ** torch.randint(2, int(math.log2(max_frames)) + 1, (num_clips,), generator=draw)
        sides = torch.randint(4, max_side + 1, (num_clips, 2), generator=draw)
        self.shapes = torch.cat([frames[:, None], sides], 1)  # frames, rows and columns of patches

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(self.first + index)
        frames, rows, columns = self.shapes[index].tolist()
        y, x = torch.meshgrid(
            torch.arange(rows * PATCH).float(), torch.arange(columns * PATCH).float(), indexing="ij"
        )
        clip = torch.full((frames, 3, *y.shape), -0.5)
        caption = torch.zeros(CAPTION, dtype=torch.long)
        for number in range(int(torch.randint(1, 3, (), generator=draw))):
            kind, colour, speed, way = (
                int(torch.randint(n, (), generator=draw)) for n in (2, 3, 2, 4)
            )
            caption[number * 4 : number * 4 + 4] = torch.tensor(
                [1 + kind, 3 + colour, 6 + speed, 8 + way]
            )
            angle = math.pi / 2 * way + math.pi / 4
            start = torch.rand(2, generator=draw) * torch.tensor(y.shape)
            for t in range(frames):
                step = (1 + speed) * t
                cy = bounce(float(start[0]) + step * math.sin(angle), y.shape[0])
                cx = bounce(float(start[1]) + step * math.cos(angle), y.shape[1])
                dy, dx = (y - cy).abs(), (x - cx).abs()
                inside = (dy**2 + dx**2 < 9) if kind else (torch.maximum(dy, dx) < 3)
                clip[t, colour][inside] = 1.0
        patches = clip.unfold(2, PATCH, PATCH).unfold(
            3, PATCH, PATCH
        )  # (T, 3, rows, columns, 4, 4)
        return {
            "clip": patches.permute(0, 2, 3, 1, 4, 5).reshape(frames, rows * columns, -1),
            "places": torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float(),
            "caption": caption,
        }


def bounce(place: float, size: int) -> float:
    """A point that moves on and on, reflected at 0 and `size`."""
    place %= 2 * size
    return min(place, 2 * size - place)


class ShapesData(lightning_dcp.DCPDataModuleMixin, L.LightningDataModule):  # DCP: the mixin
    """Clips of moving shapes.

    Args:
        num_clips: training clips.
        batch_size: clips per rank and step, on average: DCP keeps this many tokens per step.
        max_frames: most frames of a clip, a power of two.
        max_side: most patches of a frame's side.
        num_val: clips to validate on.
    """

    def __init__(
        self,
        num_clips: int = 2000,
        batch_size: int = 2,
        max_frames: int = 32,
        max_side: int = 8,
        num_val: int = 24,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        h = self.hparams
        self.train = MovingShapes(h.num_clips, 0, h.max_frames, h.max_side)
        self.val = MovingShapes(h.num_val, 10**6, min(h.max_frames, 8), h.max_side)

    # DCP: tokens per clip along both axes, frames and patches of a frame.
    def sequence_lengths(self, dataset: MovingShapes) -> list[tuple[int, int]]:
        return [(frames, rows * columns) for frames, rows, columns in dataset.shapes.tolist()]

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.val, batch_size=1)


# ----------------------------------------------------------------------------------------- model
# Shapes: B clips, T frames, S patches of a frame, C channels, H heads, D = C / H.


class Attention(nn.Module):
    """Queries x (..., S, C) to keys and values in y (..., L, C), over the last axis but one."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv = nn.Linear(channels, channels), nn.Linear(channels, 2 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for t in (self.q(x), *self.kv(y).chunk(2, -1))
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    """Spatial attention, temporal attention, attention to the caption, MLP."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.space, self.time, self.text = (Attention(channels, heads) for _ in range(3))
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )
        self.modulation = nn.Linear(channels, 9 * channels)
        self.channels = channels
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, frames: Tensor, moment: Tensor, caption: Tensor) -> Tensor:
        m = self.modulation(F.silu(moment))[:, None, None].chunk(9, -1)
        with lightning_dcp.attention_axis("whole"):  # DCP: each rank has whole frames
            h = self.modulated(x, m[0], m[1])
            x = x + (1 + m[2]) * self.space(h, h)
        with lightning_dcp.attention_axis("sharded"):  # DCP: ranks have different frames
            h = (self.modulated(x, m[3], m[4]) + frames[:, None]).transpose(1, 2)  # (B, S, T, C)
            x = x + (1 + m[5]) * self.time(h, h).transpose(1, 2)
        with lightning_dcp.attention_axis("whole"):  # DCP: each rank has the whole caption
            x = x + self.text(self.modulated(x, 0, 0), caption[:, None])
        return x + (1 + m[8]) * self.mlp(self.modulated(x, m[6], m[7]))

    def modulated(self, x: Tensor, shift: Tensor | int, scale: Tensor | int) -> Tensor:
        return F.layer_norm(x, (self.channels,)) * (1 + scale) + shift


class STDiT(nn.Module):
    """Noisy clips (B, T, S, 48) to velocities of the same shape."""

    def __init__(self, channels: int, heads: int, depth: int) -> None:
        super().__init__()
        self.channels = channels
        size = 3 * PATCH**2
        self.embed, self.head = nn.Linear(size, channels), nn.Linear(channels, size)
        self.place = nn.Linear(2 * channels, channels)
        self.moment = nn.Sequential(nn.Linear(channels, channels), nn.SiLU())
        self.words = nn.Embedding(WORDS, channels)
        self.word_places = nn.Parameter(torch.randn(CAPTION, channels) * 0.02)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(depth))
        nn.init.zeros_(self.head.weight)

    def forward(self, clip: Tensor, places: Tensor, caption: Tensor, moment: Tensor) -> Tensor:
        x = self.embed(clip) + self.place(waves(places, self.channels).flatten(-2))[:, None]
        frames = waves(torch.arange(clip.shape[1], device=clip.device).to(clip), self.channels)
        condition = self.moment(waves(1000 * moment, self.channels))
        text = self.words(caption) + self.word_places
        for block in self.blocks:
            x = block(x, frames, condition, text)
        return self.head(F.layer_norm(x, (self.channels,)))


def waves(numbers: Tensor, channels: int) -> Tensor:
    """Sines and cosines, (...) -> (..., C)."""
    exponent = torch.arange(0, channels, 2, device=numbers.device) / channels
    angles = numbers[..., None] * 1000.0**-exponent
    return torch.cat([angles.sin(), angles.cos()], -1)


class VideoDiffusion(L.LightningModule):
    """The diffusion transformer and its training by rectified flow.

    Args:
        channels: width.
        heads: attention heads.
        depth: number of blocks.
        learning_rate: of AdamW.
    """

    def __init__(
        self, channels: int = 48, heads: int = 4, depth: int = 3, learning_rate: float = 3e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = STDiT(channels, heads, depth)

    def loss(self, batch: dict[str, Tensor], noise: Tensor, moment: Tensor) -> Tensor:
        clip, share = batch["clip"], moment[:, None, None, None]
        noisy = share * clip + (1 - share) * noise
        velocity = self.model(noisy, batch["places"], batch["caption"], moment)
        return F.mse_loss(velocity, clip - noise)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        clip = batch["clip"]
        loss = self.loss(batch, torch.randn_like(clip), torch.rand_like(clip[:, 0, 0, 0]))
        self.log("loss", loss.detach(), prog_bar=True, batch_size=clip[..., 0].numel())
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Fixed noise and times, so that values can be compared."""
        clip = batch["clip"]
        draw = torch.Generator().manual_seed(int(clip.shape[1] * clip.shape[2]))
        noise = torch.randn(clip.shape, generator=draw).to(clip)
        moment = torch.rand(len(clip), generator=draw).to(clip)
        self.log("val_loss", self.loss(batch, noise, moment), batch_size=clip[..., 0].numel())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


# ------------------------------------------------------------------------------------------- run


def main() -> None:
    from running import parser, train

    options = parser(__doc__.split("\n\n")[0], "video_stdit", max_steps=60)
    options.add_argument("--num-clips", type=int, help="training clips", default=2000)
    help_frames = "most frames of a clip, a power of two"
    options.add_argument("--max-frames", type=int, help=help_frames, default=32)
    options.add_argument("--channels", type=int, help="width of the model", default=48)
    options.add_argument("--depth", type=int, help="number of blocks", default=3)
    args = options.parse_args()
    L.seed_everything(args.seed, verbose=False)
    model = VideoDiffusion(args.channels, depth=args.depth)
    data = ShapesData(args.num_clips, max_frames=args.max_frames)
    planning = {"max_batch_size": 1}  # DCP: clips of unequal shapes do not share a micro-batch
    # DCP: the loss is a mean over tokens, as a batch without labels does not tell.
    train(args, model, data, "val_loss", planning=planning, loss_average="tokens")


if __name__ == "__main__":
    main()

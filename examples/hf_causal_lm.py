"""A small Llama of Hugging Face transformers on real text, trained with Data-Centric Parallel.

The model is made from a config with random weights; nothing is downloaded. Its text is that of
examples/stdlib_lm.py, the functions and classes of the machine's own standard library, byte by
byte: tens to thousands of tokens.

    python examples/hf_causal_lm.py                    # 4 CPU ranks, or all GPUs; about a minute
    lightning-dcp fit --config examples/configs/hf_causal_lm.yaml

The strategy gives the model its own attention, counts the labels that the model shifts, and takes
the place of the library's gradient checkpointing: the LightningModule knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric
from transformers import AutoModelForCausalLM, LlamaConfig

if __package__:  # by LightningCLI, from the folder above
    from examples.stdlib_lm import BOS, HELD_OUT_FILES, IGNORE, LN2, collect, stdlib_files
else:
    from stdlib_lm import BOS, HELD_OUT_FILES, IGNORE, LN2, collect, stdlib_files


class Tokens(Dataset[dict[str, list[int]]]):
    """Dicts with `input_ids`, as tokenized data sets have: a start token, then the bytes."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [BOS, *self.texts[index]]}


def collate(samples: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pad on the right: `input_ids`, `attention_mask` and `labels`, all (B, S); not shifted."""
    length = max(len(sample["input_ids"]) for sample in samples)
    labels = torch.full((len(samples), length), IGNORE)
    for row, sample in zip(labels, samples, strict=True):
        row[: len(sample["input_ids"])] = torch.tensor(sample["input_ids"])
    return {
        "input_ids": labels.clamp(min=0),
        "attention_mask": (labels != IGNORE).long(),
        "labels": labels,
    }


class TextData(L.LightningDataModule):
    """Function and class definitions of the standard library.

    Args:
        num_samples: how many training samples to take.
        batch_size: samples per rank and step, on average.
        max_length: longer definitions are left out (bytes).
        num_val: how many held-out samples to validate on.
    """

    def __init__(
        self,
        num_samples: int = 4000,
        batch_size: int = 2,
        max_length: int = 4096,
        num_val: int = 64,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        h = self.hparams
        files = stdlib_files()
        training = [path for i, path in enumerate(files) if i % HELD_OUT_FILES]
        self.train = Tokens(collect(training, h.num_samples, 16, h.max_length))
        val = collect(files[::HELD_OUT_FILES], h.num_val, 16, min(h.max_length, 1024))
        self.val = Tokens(sorted(val, key=len))

    def train_dataloader(self) -> DataLoader[dict[str, list[int]]]:
        return DataLoader(
            self.train, batch_size=self.hparams.batch_size, shuffle=True, collate_fn=collate
        )

    def val_dataloader(self) -> DataLoader[dict[str, list[int]]]:
        return DataLoader(self.val, batch_size=8, collate_fn=collate)


class CausalLM(L.LightningModule):
    """A Llama with random weights and its training.

    Args:
        hidden_size: width of the residual stream.
        num_heads: attention heads.
        num_kv_heads: heads of keys and values, shared by the others.
        num_layers: number of blocks.
        learning_rate: of AdamW.
    """

    def __init__(
        self,
        hidden_size: int = 64,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        num_layers: int = 4,
        learning_rate: float = 3e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = LlamaConfig(
            vocab_size=BOS + 1,
            bos_token_id=BOS,
            eos_token_id=None,
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
        )
        self.model = AutoModelForCausalLM.from_config(config)
        self.val_bits = MeanMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("bits_per_byte", loss.detach() / LN2, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        num_bytes = (batch["labels"][:, 1:] != IGNORE).sum()
        self.val_bits.update(self.model(**batch).loss / LN2, num_bytes)
        self.log("val_bits_per_byte", self.val_bits, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


def main(argv: Sequence[str] | None = None) -> None:
    from running import parser, train

    options = parser(__doc__.split("\n\n")[0], "hf_causal_lm", max_steps=60)
    options.add_argument("--num-samples", type=int, default=4000, help="training samples")
    options.add_argument(
        "--max-length", type=int, default=4096, help="bytes; longer ones are left out"
    )
    options.add_argument("--hidden-size", type=int, default=64, help="width of the model")
    options.add_argument("--num-layers", type=int, default=4, help="number of blocks")
    args = options.parse_args(argv)
    L.seed_everything(args.seed, verbose=False)
    model = CausalLM(hidden_size=args.hidden_size, num_layers=args.num_layers)
    data = TextData(num_samples=args.num_samples, max_length=args.max_length)
    train(args, model, data, "val_bits_per_byte")


if __name__ == "__main__":
    main()

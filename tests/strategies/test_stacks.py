"""An encoder-decoder trained through the Trainer: profile, planner, both stacks sharded."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from tests.parallel.two_stacks import VOCABULARY, EncoderDecoder
from tests.strategies.toys import largest_relative_error
from tests.worlds import World

LENGTHS = [9, 90, 5, 12, 47, 3, 61, 8, 14, 30, 6, 17, 80, 10, 13, 39, 19, 21, 5, 110]


class Translator(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = EncoderDecoder((3, 2))
        self.double()

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Pairs(torch.utils.data.Dataset[Any]):
    sequence_lengths = LENGTHS

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        shapes = ((LENGTHS[index],), (max(1, 2 * LENGTHS[index] // 3),))
        tokens, labels = (torch.randint(VOCABULARY, n, generator=generator) for n in shapes)
        return tokens, labels


def pad(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    tokens, labels = (list(part) for part in zip(*samples, strict=True))
    longest = max(map(len, tokens)), max(map(len, labels))
    return {
        "tokens": torch.stack([F.pad(t, (0, longest[0] - len(t))) for t in tokens]),
        "labels": torch.stack([F.pad(t, (0, longest[1] - len(t)), value=-100) for t in labels]),
        "lengths": torch.tensor([len(t) for t in tokens]),
    }


class Plans(L.Callback):
    def __init__(self) -> None:
        self.plans: list[Any] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.plans.append(trainer.strategy.last_report.plan)
        self.losses.append(trainer.strategy.last_report.loss)


def fit(rank: int, folder: str) -> dict[str, Any]:
    model, plans = Translator(), Plans()
    limit = DCPDDPStrategy().fixed_bytes(model) + 280_000  # too little for the longest on one rank
    strategy = DCPDDPStrategy(
        planning=PlanningOptions(memory_limit_bytes=limit),
        profiling=ProfilingOptions(budget_s=0.7, repeats=1, cache_dir=folder),
    )
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=4, max_epochs=1, callbacks=[plans],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(Pairs(), batch_size=2, collate_fn=pad))
    profile = strategy.cost_profile
    assert profile is not None
    return {
        "plans": plans.plans,
        "losses": plans.losses,
        "stacks": [(stack.path, stack.num_blocks) for stack in profile.stacks],
        "order": profile.recompute_order,
        "exclusions": dict(profile.sp_size_exclusions),
        "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
    }


def of_one_process(plans: list[Any]) -> tuple[dict[str, Tensor], list[float]]:
    """Each step's samples one by one, the mean over all of their labels."""
    model, dataset, losses = Translator(), Pairs(), []
    optimizer = model.configure_optimizers()
    for plan in plans:
        optimizer.zero_grad()
        batches = [pad([dataset[i]]) for m in plan.micro_batches for i in m.sample_ids]
        counts = [batch["labels"].numel() for batch in batches]
        parts = [model.net.loss(b) * n for b, n in zip(batches, counts, strict=True)]
        loss = torch.stack(parts).sum() / sum(counts)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {n: p.detach() for n, p in model.named_parameters()}, losses


def test_fit_of_an_encoder_decoder(tmp_path: Any) -> None:
    with World(4, timeout_s=110) as world:
        results = world.run(fit, str(tmp_path))
    first = results[0]
    parameters, losses = of_one_process(first["plans"])
    micro_batches = [m for plan in first["plans"] for m in plan.micro_batches]
    assert max(m.sp_size for m in micro_batches) > 1
    assert len({m.sp_size for m in micro_batches}) > 1
    assert max(m.recompute_blocks for m in micro_batches) > 0
    for result in results:
        assert result["stacks"] == [("net.encoder.block", 3), ("net.decoder.block", 2)]
        assert result["order"] == first["order"]
        assert result["exclusions"] == {}
        assert result["losses"] == first["losses"]
        assert largest_relative_error(result["parameters"], parameters) <= 1e-12
    assert max(abs(a - b) for a, b in zip(first["losses"], losses, strict=True)) <= 1e-12

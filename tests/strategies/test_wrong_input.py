"""Wrong input: a clear error at set-up, on every rank, never a hang. Two real ranks each time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from torchmetrics import MeanMetric

from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from lightning_dcp.strategies.deepspeed import DCPStrategy
from tests.strategies.toys import Sequences, ToyLM, loader, pad
from tests.worlds import World

LENGTHS = [9, 30, 5, 12, 7, 3, 11, 2, 8, 14, 1, 6]
FAST = ProfilingOptions(budget_s=1.0, repeats=1, cache=False)


def fit(
    rank: int,
    model: L.LightningModule | None = None,
    data: Any = None,
    *,
    strategy: Any = None,
    **trainer_options: Any,
) -> L.Trainer:
    trainer = L.Trainer(
        strategy=strategy or DCPDDPStrategy(profiling=FAST),
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_options,
    )
    trainer.fit(model or ToyLM(), loader(LENGTHS) if data is None else data)
    return trainer


# ---- models and data sets that are wrong ---------------------------------------------------------


class Manual(ToyLM):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(ToyLM):
    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.embed.parameters(), 0.1),
            torch.optim.SGD(self.head.parameters(), 0.1),
        ]


class LBFGS(ToyLM):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class IteratorStep(ToyLM):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


class SyncedMetric(ToyLM):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MeanMetric(dist_sync_on_step=True)


class SparseEmbedding(ToyLM):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16, sparse=True)


class Unfreezing(ToyLM):
    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        self.head.requires_grad_(True)


class NoBlocks(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class NoLoss(ToyLM):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class CollectiveInStep(ToyLM):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if (
            self.trainer.training
            and self.trainer.train_dataloader is not None
            and self.trainer.global_step >= 0
        ):
            self.all_gather(loss.detach())
        return loss


class Opaque(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return object()


def with_lengths(values: Any) -> DataLoader[Any]:
    dataset = Sequences(LENGTHS)
    dataset.sequence_lengths = values
    return DataLoader(dataset, batch_size=2, collate_fn=pad)


def several_loaders() -> Any:
    return [loader(LENGTHS), loader(LENGTHS)]


def weighted() -> Any:
    return DataLoader(
        Sequences(LENGTHS),
        batch_size=2,
        collate_fn=pad,
        sampler=WeightedRandomSampler([1.0] * 12, 12),
    )


def batch_sampler() -> Any:
    class Own(torch.utils.data.BatchSampler):
        pass

    dataset = Sequences(LENGTHS)
    return DataLoader(
        dataset,
        batch_sampler=Own(torch.utils.data.SequentialSampler(dataset), 2, False),
        collate_fn=pad,
    )


CASES: dict[str, tuple[Callable[[int], Any], str]] = {
    "accumulate_grad_batches": (
        lambda r: fit(r, accumulate_grad_batches=2),
        "accumulate_grad_batches=2.*plan chooses",
    ),
    "overfit_batches": (lambda r: fit(r, overfit_batches=1), "overfit_batches=1.*Subset"),
    "accumulation scheduler": (
        lambda r: fit(r, callbacks=[GradientAccumulationScheduler({0: 2})]),
        "GradientAccumulationScheduler cannot be combined",
    ),
    "batch size finder": (
        lambda r: fit(r, callbacks=[BatchSizeFinder()]),
        "BatchSizeFinder cannot be combined",
    ),
    "sync_batchnorm": (lambda r: fit(r, sync_batchnorm=True), "sync_batchnorm=True.*hang"),
    "manual optimization": (lambda r: fit(r, Manual()), "automatic_optimization=False"),
    "two optimizers": (
        lambda r: fit(r, TwoOptimizers()),
        "several optimizers; strategy='dcp_ddp' supports one",
    ),
    "two optimizers for deepspeed": (
        lambda r: fit(r, TwoOptimizers(), strategy=DCPStrategy(profiling=FAST)),
        "several optimizers; strategy='dcp' supports one",
    ),
    "lbfgs": (lambda r: fit(r, LBFGS()), "LBFGS evaluates its closure"),
    "dataloader_iter": (lambda r: fit(r, IteratorStep()), "dataloader_iter.*ordinary batch"),
    "metric synced on step": (
        lambda r: fit(r, SyncedMetric()),
        "accuracy has dist_sync_on_step=True",
    ),
    "sparse gradients": (
        lambda r: fit(r, SparseEmbedding()),
        r"SparseEmbedding.embed has sparse gradients \(sparse=True\)",
    ),
    "unfrozen during training": (
        lambda r: fit(r, Unfreezing()),
        r"`requires_grad` of head.bias, head.weight was changed during training",
    ),
    "no blocks": (lambda r: fit(r, NoBlocks()), "block"),
    "block path": (
        lambda r: fit(r, strategy=DCPDDPStrategy(blocks="model.layers", profiling=FAST)),
        "model.layers.*blocks",
    ),
    "no loss": (lambda r: fit(r, NoLoss()), "must return the loss"),
    "collective in the step": (
        lambda r: fit(r, CollectiveInStep()),
        "all_gather.*inside `training_step`",
    ),
    "no lengths": (lambda r: fit(r, data=DataLoader(Opaque(), batch_size=2)), "sequence_lengths"),
    "too few lengths": (lambda r: fit(r, data=with_lengths([3, 4])), "2 .*12"),
    "zero length": (lambda r: fit(r, data=with_lengths([0, *LENGTHS[1:]])), "0"),
    "negative length": (lambda r: fit(r, data=with_lengths([-3, *LENGTHS[1:]])), "-3"),
    "fractional length": (lambda r: fit(r, data=with_lengths([1.5, *LENGTHS[1:]])), "1.5"),
    "empty data set": (lambda r: fit(r, data=loader([], shuffle=False)), "no samples|empty"),
    "several loaders": (lambda r: fit(r, data=several_loaders()), "[Ss]everal"),
    "weighted sampler": (lambda r: fit(r, data=weighted()), "WeightedRandomSampler"),
    "own batch sampler": (lambda r: fit(r, data=batch_sampler()), "batch sampler, Own"),
    "unknown policy": (
        lambda r: DCPDDPStrategy(policy="dcp-outer"),
        "dcp-outer.*dcp-inter.*dcp-intra.*bucket",
    ),
    "unknown average": (
        lambda r: DCPDDPStrategy(loss_average="words"),  # type: ignore[arg-type]
        "loss_average='words'.*tokens.*samples",
    ),
    "memory below the model": (
        lambda r: fit(
            r,
            strategy=DCPDDPStrategy(
                planning=PlanningOptions(memory_limit_bytes=1000), profiling=FAST
            ),
        ),
        r"memory limit is 1,000 bytes per rank, but parameters.*alone take [\d,]+",
    ),
    "no SP size left": (
        lambda r: fit(
            r, strategy=DCPDDPStrategy(planning=PlanningOptions(sp_sizes=(8,)), profiling=FAST)
        ),
        r"sp_sizes=\[8\] leaves no SP size for 2 ranks",
    ),
    "stage 3": (lambda r: DCPStrategy(stage=3), "stage 3 was given: it gathers parameters"),
    "stage 2": (
        lambda r: DCPStrategy(stage=2),
        "stage 2 was given: it reduces gradients at every backward",
    ),
    "stage 3 in the config": (
        lambda r: DCPStrategy(config={"zero_optimization": {"stage": 3}}),
        "stage 3 was given",
    ),
    "overlap_comm": (
        lambda r: DCPStrategy(config={"zero_optimization": {"stage": 1, "overlap_comm": True}}),
        "overlap_comm",
    ),
    "model averaging": (
        lambda r: DCPDDPStrategy(model_averaging_period=3),
        "model_averaging_period",
    ),
}


def attempt(rank: int, case: str) -> tuple[str, str]:
    try:
        CASES[case][0](rank)
    except Exception as error:  # noqa: BLE001 - the test judges whatever this rank was told
        return type(error).__name__, str(error)
    return "nothing", "no error"


# ---- ranks that disagree -------------------------------------------------------------------------


def different_lengths(rank: int) -> str:
    try:
        fit(rank, data=loader([n + (rank == 1 and i == 3) for i, n in enumerate(LENGTHS)]))
    except Exception as error:  # noqa: BLE001 - the test judges whatever this rank was told
        return str(error)
    return "no error"


def different_number(rank: int) -> str:
    try:
        fit(rank, data=loader(LENGTHS[: 12 - rank]))
    except Exception as error:  # noqa: BLE001 - the test judges whatever this rank was told
        return str(error)
    return "no error"


def different_options(rank: int) -> str:
    strategy = DCPDDPStrategy(planning=PlanningOptions(tokens_per_step=30 + rank), profiling=FAST)
    try:
        fit(rank, strategy=strategy)
    except Exception as error:  # noqa: BLE001 - the test judges whatever this rank was told
        return str(error)
    return "no error"


def one_rank_fails(rank: int) -> str:
    try:
        fit(rank, data=with_lengths([0, *LENGTHS[1:]]) if rank == 1 else None)
    except Exception as error:  # noqa: BLE001 - the test judges whatever this rank was told
        return str(error)
    return "no error"


def one_rank_has_no_such_blocks(rank: int) -> str:
    try:
        fit(rank, strategy=DCPDDPStrategy(blocks="nowhere" if rank == 1 else None, profiling=FAST))
    except Exception as error:  # noqa: BLE001 - the test judges whatever this rank was told
        return str(error)
    return "no error"


def fits_nowhere(rank: int) -> str:
    """A limit under which the longest sample needs more than two ranks can give."""
    fixed = DCPDDPStrategy().fixed_bytes(ToyLM())
    strategy = DCPDDPStrategy(
        planning=PlanningOptions(memory_limit_bytes=fixed + 30_000), profiling=FAST
    )
    try:
        fit(rank, data=loader([3, 4, 5, 6, 4, 3, 2, 500]), strategy=strategy)
    except Exception as error:  # noqa: BLE001 - the test judges whatever this rank was told
        return str(error)
    return "no error"


def too_long_is_skipped(rank: int) -> tuple[tuple[int, ...], int]:
    fixed = DCPDDPStrategy().fixed_bytes(ToyLM())
    planning = PlanningOptions(memory_limit_bytes=fixed + 30_000, on_too_long="skip")
    strategy = DCPDDPStrategy(planning=planning, profiling=FAST)
    trainer = fit(rank, data=loader([3, 4, 5, 6, 4, 3, 2, 500]), strategy=strategy)
    assert strategy.planner is not None
    return strategy.planner.skipped_ids, trainer.global_step


def odd_heads(rank: int) -> dict[int, str]:
    strategy = DCPDDPStrategy(profiling=FAST)
    fit(rank, ToyLM(width=15, num_heads=3), strategy=strategy)
    assert strategy.cost_profile is not None
    return dict(strategy.cost_profile.sp_size_exclusions)


def one_sample(rank: int) -> int:
    return fit(rank, data=loader([7], batch_size=4)).global_step


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2, timeout_s=60) as world:
        yield world


class TestWrongInput:
    @pytest.mark.parametrize("case", list(CASES))
    def test_clear_error_on_every_rank(self, world: World, case: str) -> None:
        for kind, message in world.run(attempt, case):
            assert kind in (
                "MisconfigurationException",
                "ValueError",
                "TypeError",
                "UnknownForm",
                "RuntimeError",
            ), message
            assert re.search(CASES[case][1], message, re.DOTALL), message

    def test_ranks_that_disagree_on_lengths(self, world: World) -> None:
        for message in world.run(different_lengths):
            assert re.search(
                r"Ranks disagree.*sequence lengths: \w+ on rank 0; \w+ on rank 1", message
            ), message

    def test_ranks_with_different_numbers_of_samples(self, world: World) -> None:
        for message in world.run(different_number):
            assert re.search(r"number of samples: 12 on rank 0; 11 on rank 1", message), message

    def test_ranks_with_different_options(self, world: World) -> None:
        for message in world.run(different_options):
            assert "planning.tokens_per_step: 30 on rank 0; 31 on rank 1" in message

    def test_an_error_on_one_rank_is_told_to_the_other(self, world: World) -> None:
        other, own = world.run(one_rank_fails)
        assert "failed on rank 1" in other and "0" in own
        for message in world.run(one_rank_has_no_such_blocks):
            assert "blocks: None on rank 0; 'nowhere' on rank 1" in message

    def test_a_sample_that_fits_nowhere(self, world: World) -> None:
        for message in world.run(fits_nowhere):
            assert re.search(r"\b7\b.*500", message, re.DOTALL) and "on_too_long" in message, (
                message
            )

    def test_a_sample_that_fits_nowhere_can_be_skipped(self, world: World) -> None:
        assert world.run(too_long_is_skipped) == [((7,), 2), ((7,), 2)]

    def test_heads_that_two_does_not_divide(self, world: World) -> None:
        assert world.run(odd_heads) == [{}, {}]

    def test_fewer_samples_than_ranks(self, world: World) -> None:
        assert world.run(one_sample) == [1, 1]

"""Hugging Face models under the strategies: exact, with a user's module of nine lines.

4 real ranks under Lightning's Trainer against plain PyTorch in one process, in float64; p, b,
number of micro-batches and recomputation all differ by rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.models import harness
from tests.models.harness import largest_error, make_module, reference, train
from tests.models.user_code import FIT, MODELS, module_code
from tests.strategies import hand_planned
from tests.strategies.test_shard_inputs import Llama, pad_as_a_tokenizer
from tests.strategies.toys import IGNORE, largest_relative_error, pad
from tests.worlds import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=110) as world:
        yield world


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_equal_those_of_one_process(world: World, kind: str) -> None:
    wanted = reference(kind)
    for result in world.run(train, "dcp_ddp", kind):
        assert largest_error(result["gradients"], wanted["gradients"]) <= 1e-12
        assert result["loss"] == pytest.approx(wanted["loss"], rel=1e-12)
        assert result["as_before"]
        assert result["warnings"] == []


@pytest.mark.parametrize(("name", "kind"), [("dcp", "llama"), ("dcp", "t5"), ("dcp_fsdp", "qwen3")])
def test_every_engine(world: World, name: str, kind: str) -> None:
    wanted = reference(kind, double=False)
    for result in world.run(train, name, kind, double=False):
        assert largest_error(result["gradients"], wanted["gradients"]) <= 2e-6
        assert result["as_before"]


def test_idle_ranks(world: World) -> None:
    wanted = reference("t5", idle=True)
    for result in world.run(train, "dcp_ddp", "t5", idle=True):
        assert largest_error(result["gradients"], wanted["gradients"]) <= 1e-12


def test_the_models_own_checkpointing_and_attention_are_replaced(world: World) -> None:
    wanted = reference("mistral")
    results = world.run(train, "dcp_ddp", "mistral", change=harness.own_checkpointing)
    assert "own gradient checkpointing is off" in results[0]["warnings"][0]
    eager = world.run(train, "dcp_ddp", "mistral", change=harness.eager)
    for result in (*results, *eager):
        assert largest_error(result["gradients"], wanted["gradients"]) <= 1e-12
        assert result["as_before"]


class OwnLoss(Llama):
    """Shifts logits and labels itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = batch["attention_mask"]
        logits = self.model(batch["input_ids"], attention_mask=mask).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:])


class ShiftedLabels(Llama):
    """Gets labels that are shifted already."""

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        each = F.cross_entropy(
            self(batch["ids"]).transpose(1, 2), batch["labels"], reduction="none"
        )
        return each[batch["labels"] != IGNORE]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.losses({"ids": batch["input_ids"], "labels": batch["labels"]}).mean()


def pad_shifted(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = pad(samples)
    return {"input_ids": batch["ids"], "labels": batch["labels"]}


@pytest.mark.parametrize("model_class", [OwnLoss, ShiftedLabels])
def test_a_loss_of_the_users_own(world: World, model_class: Any) -> None:
    """Labels count as it uses them, on ranks that idled before too."""
    collate = pad_as_a_tokenizer if model_class is OwnLoss else pad_shifted
    wanted = hand_planned.wanted_of(4, double=True, model_class=model_class)
    results = world.run(
        hand_planned.train, "dcp_ddp", 4, double=True, model_class=model_class, collate=collate
    )
    for result in results:
        pairs = zip(result["gradients"], wanted.gradients, strict=True)
        for step, (got, expected) in enumerate(pairs):  # norms are in float32
            assert largest_relative_error(got, expected) <= 2e-6 * 4**step


def test_a_wrong_weight_is_seen(world: World) -> None:
    """The comparison can fail: means over tokens weighted by samples are far off."""
    wanted = reference("llama")
    results = world.run(train, "dcp_ddp", "llama", loss_average="samples")
    assert largest_error(results[0]["gradients"], wanted["gradients"]) > 1e-2


# ---------------------------------------------------------------------- user code


@pytest.mark.parametrize("kind", MODELS)
def test_ten_lines_or_fewer(kind: str) -> None:
    lines = f"import lightning_dcp\n{module_code(kind)}{FIT}".splitlines()
    assert len([line for line in lines if line.strip()]) <= 10
    assert "dcp" not in module_code(kind), "the module knows nothing of us"


def tokenizer() -> Any:
    """Of words w1 to w28, made in memory."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0} | {f"w{i}": i for i in range(1, 29)}
    model = tokenizers.models.WordLevel(words, unk_token="[PAD]")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="[PAD]", unk_token="[PAD]"
    )


def fit_for_real(rank: int, cache: str) -> Any:
    """Profile, plan and train on a list of dicts, collated by the library, by the user's module."""
    import transformers

    from lightning_dcp import DCPDDPStrategy, PlanningOptions, ProfilingOptions

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 60, (48,), generator=generator).tolist()
    dataset = [
        {"input_ids": torch.randint(1, 29, (n,), generator=generator).tolist()} for n in lengths
    ]
    collate = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    loader: Any = DataLoader(dataset, batch_size=2, collate_fn=collate, shuffle=True)  # type: ignore[arg-type]
    strategy = DCPDDPStrategy(
        planning=PlanningOptions(memory_limit_bytes=2**21),
        profiling=ProfilingOptions(budget_s=1.5, repeats=1, cache_dir=cache),
    )
    trainer = harness.trainer_of(strategy, max_steps=2)
    seen: dict[str, Any] = {}

    class See(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            report = strategy.last_report
            assert report is not None
            ids = [i for m in report.plan.micro_batches for i in m.sample_ids]
            seen.setdefault("targets", []).append((report.num_targets, ids))
            seen["sp_sizes"] = sorted({m.sp_size for m in strategy.cost_profile.measurements})

    trainer.callbacks.append(See())  # type: ignore[attr-defined]
    trainer.fit(make_module("llama", double=False), loader)
    return {**seen, "lengths": lengths, "steps": trainer.global_step}


def test_profiled_planned_and_trained(world: World, tmp_path: Path) -> None:
    (result, *_) = world.run(fit_for_real, str(tmp_path))
    assert result["steps"] == 2
    assert result["sp_sizes"] == [1, 2, 4]
    for num_targets, ids in result["targets"]:
        assert num_targets == sum(result["lengths"][i] - 1 for i in ids)

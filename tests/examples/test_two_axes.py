"""The examples with two axes of tokens: their data, how much of them is DCP's, and short runs."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import protein_pair
import pytest
import torch
import video_stdit

from lightning_dcp.cli import main
from tests.worlds import World

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "examples" / "configs"


@pytest.mark.parametrize("name", ["video_stdit", "protein_pair"])
def test_ten_lines_are_dcps(name: str) -> None:
    """Code that a user without DCP would not have; what `train` passes on to the strategy too."""
    text = (ROOT / "examples" / f"{name}.py").read_text().split('"""', 2)[2]
    lines = [line for line in text.splitlines() if not line.strip().startswith("#")]
    words = r"lightning_dcp|sequence_lengths|planning =|train\("
    ours = [line for line in lines if re.search(words, line)]
    body = text.split("def sequence_lengths", 1)[1].split("def ", 1)[0].strip().splitlines()[1:]
    ours += [line for line in body if line.strip()]
    assert 5 <= len(ours) <= 10, ours


def test_clips_are_rendered_as_long_as_said() -> None:
    data = video_stdit.ShapesData(num_clips=20, num_val=2)
    data.setup("fit")
    for sample, lengths in zip(data.train, data.sequence_lengths(data.train), strict=True):
        assert sample["clip"].shape == (*lengths, 48)
        assert len(sample["places"]) == lengths[1]
    clip = data.train[0]["clip"]
    assert torch.equal(clip, data.train[0]["clip"])
    assert bool((clip[0] != clip[-1]).any())  # something moves
    assert len(set(data.sequence_lengths(data.train))) > 10


def test_contacts_follow_from_the_sequence() -> None:
    chains = protein_pair.Chains(40, 0, 12, 48)
    places = protein_pair.backbone(chains[0]["types"])
    steps = (places[1:] - places[:-1]).norm(dim=-1)
    torch.testing.assert_close(steps, torch.ones_like(steps))
    labels = torch.cat([chain["labels"].flatten() for chain in chains])
    assert 0.01 < float(labels[labels >= 0].float().mean()) < 0.2
    batch = protein_pair.collate([chains[0], chains[1]])
    alone = protein_pair.collate([chains[1]])
    model = protein_pair.ContactModel(channels=8, depth=1).double()
    length = len(chains[1]["types"])
    together = model.model(batch["types"])[1, :length, :length]
    torch.testing.assert_close(together, model.model(alone["types"])[0])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    cache = tmp_path_factory.mktemp("cache")
    with World(2, timeout_s=100, env={"LIGHTNING_DCP_CACHE": str(cache)}) as world:
        yield world


def fit(rank: int, words: list[str]) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    assert main(words) == 0


SMALL = (
    "--trainer.devices=2",
    "--trainer.max_steps=5",
    "--trainer.val_check_interval=5",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.strategy.profiling.budget_s=1",
    "--trainer.strategy.profiling.repeats=1",
    "--model.depth=2",
)
SIZES = {
    "video_stdit": ["--model.channels=16", "--data.num_clips=60", "--data.max_frames=8"],
    "protein_pair": ["--model.channels=8", "--data.num_chains=60", "--data.max_length=24"],
}


@pytest.mark.parametrize("name", SIZES)
def test_trains_by_the_command(
    world: World, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["fit", f"--config={CONFIGS / 'dcp_ddp.yaml'}", f"--config={CONFIGS / name}.yaml"]
    sizes = [*SIZES[name], "--data.num_val=4", f"--trainer.logger.save_dir={tmp_path}"]
    world.run(fit, [*words, *SMALL, *sizes])
    with (tmp_path / name / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["loss"]) for row in rows if row["loss"]]
    assert len(losses) == 5
    assert min(losses[1:]) < losses[0]
    assert any(row["val_loss"] for row in rows)

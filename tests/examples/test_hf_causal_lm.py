"""`examples/hf_causal_lm.py`: its data, and a short run by its YAML on two ranks."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import pytest
import torch

from lightning_dcp.cli import main
from tests.worlds import World

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]

SMALL = (
    "--trainer.devices=2",
    "--trainer.max_steps=4",
    "--trainer.val_check_interval=4",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.strategy.profiling.budget_s=1",
    "--trainer.strategy.profiling.repeats=1",
    "--model.hidden_size=16",
    "--model.num_layers=2",
    "--data.num_samples=60",
    "--data.max_length=200",
    "--data.num_val=8",
)


def test_batches_are_what_the_model_shifts() -> None:
    import hf_causal_lm

    data = hf_causal_lm.Tokens([b"abc", b"z"])
    batch = hf_causal_lm.collate([data[0], data[1]])
    assert batch["input_ids"].tolist() == [[256, 97, 98, 99], [256, 122, 0, 0]]
    assert batch["labels"].tolist() == [[256, 97, 98, 99], [256, 122, -100, -100]]
    assert batch["attention_mask"].sum().item() == 6
    assert torch.isfinite(hf_causal_lm.CausalLM(hidden_size=16).model(**batch).loss)


def run(rank: int, words: list[str]) -> None:
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT)]
    assert main(words) == 0


@pytest.mark.timeout(150)
def test_trains_by_its_configuration(tmp_path: Path) -> None:
    config = ROOT / "examples" / "configs" / "hf_causal_lm.yaml"
    into = f"--trainer.logger.save_dir={tmp_path}"
    with World(2, timeout_s=110, env={"LIGHTNING_DCP_CACHE": str(tmp_path / "cache")}) as world:
        world.run(run, ["fit", f"--config={config}", *SMALL, into])
    with (tmp_path / "hf_causal_lm" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    bits = [float(row["val_bits_per_byte"]) for row in rows if row["val_bits_per_byte"]]
    assert 6.5 < bits[-1] < 8.1
    assert any(row["dcp/idle_share"] for row in rows)

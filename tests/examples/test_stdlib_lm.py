"""The example: its data, its model, and whole runs of the script as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import stdlib_lm
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]

SOURCE = b"""import functools

@functools.cache
def outer(x):
    def inner(y):
        return y
    return inner(x)


class Thing:
    async def wait(self):
        "f\xc3\xbcr"
"""


class TestData:
    def test_definitions_come_whole_with_decorators_and_nested_ones(self) -> None:
        found = set(stdlib_lm.definitions(SOURCE))
        assert found == {
            b"@functools.cache\ndef outer(x):\n    def inner(y):\n        return y\n"
            b"    return inner(x)\n",
            b"    def inner(y):\n        return y\n",
            b'class Thing:\n    async def wait(self):\n        "f\xc3\xbcr"\n',
            b'    async def wait(self):\n        "f\xc3\xbcr"\n',
        }

    def test_broken_source_has_no_definitions(self) -> None:
        assert list(stdlib_lm.definitions(b"def f(:\n")) == []

    def test_thousands_of_samples_over_three_orders_of_magnitude(self) -> None:
        files = stdlib_lm.stdlib_files()
        texts = stdlib_lm.collect(files, num_samples=6000, min_length=16, max_length=16384)
        lengths = np.array([len(text) for text in texts])
        assert len(texts) == len(set(texts)) == 6000
        assert 16 <= lengths.min() < 32
        assert 10_000 < lengths.max() <= 16384
        assert texts == stdlib_lm.collect(files, 6000, 16, 16384)
        assert texts[:100] == stdlib_lm.collect(files, 100, 16, 16384)

    def test_no_file_is_trained_on_and_validated_on(self) -> None:
        data = stdlib_lm.StdlibData(num_samples=500, num_val=20)
        data.setup("fit")
        assert len(data.train) == 500
        assert len(data.val) == 20
        assert data.sequence_lengths(data.train) == [len(text) for text in data.train.texts]
        held_out = {
            text
            for path in stdlib_lm.stdlib_files()[:: stdlib_lm.HELD_OUT_FILES]
            for text in stdlib_lm.definitions(path.read_bytes())
        }
        assert held_out.issuperset(data.val.texts)

    def test_collate_predicts_each_byte_from_those_before(self) -> None:
        batch = stdlib_lm.collate([b"abc", b"z"])
        bos, ignore = stdlib_lm.BOS, stdlib_lm.IGNORE
        assert batch["labels"].tolist() == [[97, 98, 99], [122, ignore, ignore]]
        assert batch["input_ids"][0].tolist() == [bos, 97, 98]
        assert batch["input_ids"][1, :2].tolist() == [bos, 122]


class TestModel:
    @pytest.fixture
    def model(self) -> stdlib_lm.StdlibLM:
        return stdlib_lm.StdlibLM(channels=16, heads=2, depth=2).double()

    def test_causal(self, model: stdlib_lm.StdlibLM) -> None:
        tokens = torch.randint(0, 256, (1, 12))
        changed = tokens.clone()
        changed[0, 8] += 1
        difference = (model(tokens) - model(changed)).abs().amax(dim=-1)[0]
        assert difference[:8].max() == 0.0
        assert difference[8:].min() > 0.0

    def test_positions_matter(self, model: stdlib_lm.StdlibLM) -> None:
        # With equal values everywhere but in one place, only positions tell the orders apart.
        first = model(torch.tensor([[1, 2, 2, 3]]))[0, -1]
        second = model(torch.tensor([[2, 1, 2, 3]]))[0, -1]
        assert not torch.allclose(first, second)

    def test_padding_bears_no_loss(self, model: stdlib_lm.StdlibLM) -> None:
        texts = [b"def f():\n", b"x"]
        together = model.loss(stdlib_lm.collate(texts))
        alone = [model.loss(stdlib_lm.collate([text])) for text in texts]
        weights = torch.tensor([len(text) for text in texts], dtype=torch.float64)
        torch.testing.assert_close(together, (torch.stack(alone) * weights).sum() / weights.sum())

    def test_first_loss_is_that_of_a_uniform_guess(self, model: stdlib_lm.StdlibLM) -> None:
        loss = model.loss(stdlib_lm.collate([SOURCE]))
        uniform = F.cross_entropy(torch.zeros(1, 256), torch.zeros(1, dtype=torch.long))
        assert abs(loss.item() - uniform.item()) < 0.1

    def test_learns_in_one_process_with_plain_lightning(self, tmp_path: Path) -> None:
        history = stdlib_lm.ValidationHistory()
        L.seed_everything(0, verbose=False)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=30,
            num_sanity_val_steps=-1,
            val_check_interval=30,
            check_val_every_n_epoch=None,
            callbacks=[history],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        model = stdlib_lm.StdlibLM(channels=32, heads=2, depth=2)
        data = stdlib_lm.StdlibData(num_samples=400, batch_size=8, max_length=400, num_val=16)
        trainer.fit(model, datamodule=data)
        before, after = history.bits_per_byte
        assert 7.5 < before < 8.5
        assert after < before - 1.5
        # Warm-up and cosine: the last rate is close to its floor of 5%.
        assert trainer.optimizers[0].param_groups[0]["lr"] < 0.1 * model.hparams.learning_rate


def run_script(tmp_path: Path, *arguments: str) -> str:
    """Start the example as a user does, on two CPU ranks; its standard output."""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "LIGHTNING_DCP_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "stdlib_lm.py"), *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-8000:]}"
    return result.stdout


SMALL = (
    "--devices=2",
    "--num-samples=300",
    "--max-length=600",
    "--channels=16",
    "--heads=2",
    "--depth=2",
    "--profile-seconds=2",
)


@pytest.mark.timeout(180)
class TestScript:
    def test_trains_and_sums_up(self, tmp_path: Path) -> None:
        output = run_script(tmp_path, "--max-steps=12", *SMALL)
        last = output.strip().splitlines()[-1]
        assert last.startswith("Bits per byte of held-out definitions: "), output
        numbers = [float(word) for word in last.split() if word.replace(".", "").isdigit()]
        before, after, steps = numbers
        assert steps == 12
        assert after < before - 0.3
        # The summary names a static SP size to compare with.
        assert "static" in output
        assert "idle share" in output

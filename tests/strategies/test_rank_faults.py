"""A rank dies, stops, raises, is interrupted or leaves: the others say so, and end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies.faults import WORLD_SIZE, Harm, Outcome, run

#: Seconds from the harm to the end of every process. Quiet machines need a tenth of it; here many
#: processes share two cores.
BOUND_S = 30.0
IN_STEP = r"epoch 0, iteration 2, forward pass of micro-batch \d+ \(p=\d, b=\d+, r=\d"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


def harmed(folder: Path, harm: Harm, **options: Any) -> Outcome:
    own = folder / f"{harm.kind}-{harm.place}-{harm.rank}-{'-'.join(map(str, options.values()))}"
    own.mkdir()
    outcome = run(harm, own, **options)
    told = "\n".join(f"--- rank {rank}:\n{text}" for rank, text in enumerate(outcome.texts))
    assert outcome.unfinished == [], told
    assert (own / "struck").exists(), told
    assert max(outcome.seconds) < BOUND_S + options.get("timeout_s", 0.0), told
    assert 0 not in outcome.codes, told
    checkpoint = torch.load(own / "checkpoints" / "last.ckpt", weights_only=False)
    assert checkpoint["global_step"] == harm.step, told
    assert all(tensor.isfinite().all() for tensor in checkpoint["state_dict"].values())
    return outcome


def others(outcome: Outcome, rank: int) -> list[str]:
    return [text for other, text in enumerate(outcome.texts) if other != rank]


def test_killed(folder: Path) -> None:
    outcome = harmed(folder, Harm("kill", "training_step", rank=1))
    for text in others(outcome, 1):
        assert re.search(rf"rank 1 died: its process .*Last seen in: {IN_STEP}", text)
        assert "LostRankError: rank 1 died" in text


def test_stopped(folder: Path) -> None:
    outcome = harmed(folder, Harm("stop", "training_step", rank=1), timeout_s=4.0)
    assert outcome.codes[1] == -9  # else it would stay for ever
    for text in others(outcome, 1):
        assert re.search(
            rf"rank 1 has not answered for \d+\.\d s \(its process is stopped\)\. .*{IN_STEP}", text
        )


def test_raises(folder: Path) -> None:
    outcome = harmed(folder, Harm("raise", "training_step", rank=1))
    assert outcome.codes == [1] * WORLD_SIZE
    for text in others(outcome, 1):
        assert re.search(
            rf"rank 1 raised ValueError: the sun has set\. Last seen in: {IN_STEP}", text
        )
    assert "ValueError: the sun has set" in outcome.texts[1]
    assert "LostRankError" not in outcome.texts[1]


@pytest.mark.slow
class TestElsewhere:
    @pytest.mark.parametrize("place", ["on_train_batch_end", "validation_step"])
    def test_raises(self, folder: Path, place: str) -> None:
        step = 4 if place == "validation_step" else 2
        outcome = harmed(folder, Harm("raise", place, rank=2, step=step))
        for text in others(outcome, 2):
            assert "rank 2 raised ValueError: the sun has set. Last seen in: " in text
            assert ("in: validation" if place == "validation_step" else "in: between") in text

    @pytest.mark.parametrize("kind", ["kill", "stop"])
    def test_rank_0(self, folder: Path, kind: str) -> None:
        """The store lives in its process."""
        outcome = harmed(folder, Harm(kind, "training_step", rank=0), timeout_s=4.0)
        for text in others(outcome, 0):
            assert re.search(r"rank 0 (died|has not answered for \d)", text)
        assert any(re.search(IN_STEP, text) for text in others(outcome, 0))

    def test_killed_in_validation(self, folder: Path) -> None:
        outcome = harmed(folder, Harm("kill", "validation_step", rank=3, step=4))
        for text in others(outcome, 3):
            assert re.search(r"rank 3 died: its process .*Last seen in: validation", text)

    def test_interrupted(self, folder: Path) -> None:
        outcome = harmed(folder, Harm("interrupt", "on_train_batch_end", rank=2))
        for text in others(outcome, 2):
            assert "rank 2 was interrupted (KeyboardInterrupt)" in text

    def test_leaves(self, folder: Path) -> None:
        """`sys.exit(0)` of one rank: its process ends without an error."""
        outcome = harmed(folder, Harm("leave", "on_train_batch_end", rank=2))
        for text in others(outcome, 2):
            assert "rank 2 raised SystemExit: 0" in text

    def test_fsdp(self, folder: Path) -> None:
        outcome = harmed(folder, Harm("kill", "training_step", rank=1), strategy="dcp_fsdp")
        for text in others(outcome, 1):
            assert re.search(rf"rank 1 died: its process .*Last seen in: {IN_STEP}", text)


@pytest.mark.slow
def test_nobody_is_harmed(folder: Path) -> None:
    """A pause, an early end of one rank's program, and quiet ends."""
    own = folder / "nobody"
    own.mkdir()
    outcome = run(Harm("sleep", "on_train_batch_end", rank=1), own)
    assert outcome.codes == [0] * WORLD_SIZE
    for text in outcome.texts:
        assert "finished after 4 steps" in text
        assert not re.search(r"\[rank \d\] DCP|LostRankError", text)

"""A rank dies, stops, raises, is interrupted or leaves: the others say so, and end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dcp.strategies.checkpointing.completeness import what_is_missing
from tests.strategies.faults import WORLD_SIZE, Harm, Launched, Outcome, launch, run

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
    print(f"{own.name}: all had ended {max(outcome.seconds):.1f} s after the harm")
    check_last_checkpoint(own, harm)
    return outcome


def check_last_checkpoint(own: Path, harm: Harm) -> None:
    """It is whole, and of the step before."""
    last = own / "checkpoints" / "last.ckpt"
    assert what_is_missing(last) is None
    if last.is_dir():  # of DeepSpeed
        last = last / "checkpoint" / "mp_rank_00_model_states.pt"
    checkpoint = torch.load(last, weights_only=False)
    assert checkpoint["global_step"] == harm.step
    tensors = checkpoint.get("state_dict") or checkpoint["module"]
    assert all(tensor.isfinite().all() for tensor in tensors.values())


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

    @pytest.mark.parametrize("strategy", ["dcp", "dcp_ddp", "dcp_fsdp"])
    def test_rank_0_raises(self, folder: Path, strategy: str) -> None:
        """It saves on exceptions, if it can alone, and says what it has raised."""
        outcome = harmed(folder, Harm("raise", "training_step", rank=0), strategy=strategy)
        assert "ValueError: the sun has set" in outcome.texts[0]
        for text in others(outcome, 0):
            assert "rank 0 raised ValueError: the sun has set. Last seen in: " in text

    def test_leaves_the_loop(self, folder: Path) -> None:
        """`trainer.should_stop` of one rank: it validates while the others go on."""
        outcome = harmed(folder, Harm("part", "on_train_batch_end", rank=2))
        for text in outcome.texts:
            assert "validation on rank 2" in text
            assert "an iteration on rank 0, 1, 3" in text

    def test_interrupted(self, folder: Path) -> None:
        outcome = harmed(folder, Harm("interrupt", "on_train_batch_end", rank=2))
        for text in others(outcome, 2):
            assert "rank 2 was interrupted (KeyboardInterrupt)" in text

    def test_leaves(self, folder: Path) -> None:
        """`sys.exit(0)` of one rank: its process ends without an error."""
        outcome = harmed(folder, Harm("leave", "on_train_batch_end", rank=2))
        for text in others(outcome, 2):
            assert "rank 2 raised SystemExit: 0" in text

    @pytest.mark.parametrize("strategy", ["dcp", "dcp_fsdp"])
    @pytest.mark.parametrize("kind", ["kill", "raise"])
    def test_engines(self, folder: Path, strategy: str, kind: str) -> None:
        outcome = harmed(folder, Harm(kind, "training_step", rank=1), strategy=strategy)
        what = "raised ValueError: the sun has set" if kind == "raise" else "died: its process .*"
        for text in others(outcome, 1):
            assert re.search(rf"rank 1 {what}\. Last seen in: {IN_STEP}", text)


@pytest.mark.slow
class TestLaunched:
    """Ranks that torchrun or Lightning's launcher has started, with loader workers."""

    @pytest.mark.parametrize("by", ["torchrun", "lightning"])
    @pytest.mark.parametrize("rank", [0, 2])
    @pytest.mark.parametrize("kind", ["kill", "raise", "stop"])
    def test_all_processes_end(self, folder: Path, by: str, rank: int, kind: str) -> None:
        harm = Harm(kind, "training_step", rank=rank)
        own = folder / f"{by}-{rank}-{kind}"
        own.mkdir()
        outcome = launch(harm, own, by=by, num_workers=1, timeout_s=6.0)
        print(f"{by}, rank {rank}, {kind}: {outcome.seconds:.1f} s, code {outcome.code}")
        assert outcome.left == [], outcome.text
        assert (own / "struck").exists(), outcome.text
        assert outcome.code != 0, outcome.text
        assert outcome.seconds < 2 * BOUND_S, outcome.text
        self.check_named(outcome, harm)
        check_last_checkpoint(own, harm)

    @staticmethod
    def check_named(outcome: Launched, harm: Harm) -> None:
        """Some rank that lives says which one is lost, and where it was."""
        what = {
            "kill": "died",
            "raise": "raised ValueError: the sun has set",
            "stop": "has not answered for",
        }[harm.kind]
        assert re.search(rf"rank {harm.rank} {what}.*Last seen in: {IN_STEP}", outcome.text), (
            outcome.text
        )


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

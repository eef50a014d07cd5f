"""A wrong value of an option is one clear message that names it, in Python and in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.values import VALUES, Attempts, in_python, mutations


def test_in_python() -> None:
    outcomes = [(option, outcome) for option, _, outcome in in_python()]
    assert len(outcomes) > 10 * len(VALUES)
    for option in {option for option, _ in outcomes}:
        assert any(outcome for name, outcome in outcomes if name == option), option
        assert not all(outcome for name, outcome in outcomes if name == option), option


def test_in_files(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path)
    outcomes = [attempts.outcome(seed, run=False) for seed in range(30)]
    assert "taken" in outcomes and any(o.startswith("refused") for o in outcomes)


@pytest.mark.parametrize("value", [[1, 20], 5, "abc"])
def test_no_options_where_a_group_of_them_is_wanted(value: object, tmp_path: Path) -> None:
    """The parser let a list pass, and the class of options was called with it."""
    text = Attempts(tmp_path).given("DCPStrategy", {"planning": value}, run=False)
    assert text.startswith("refused: --trainer.strategy")


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("planning.pad_multiple", 10**30, "All are padded to pad_multiple=1000"),
        ("planning.memory_limit_bytes", 1, "Raise memory_limit_bytes"),
        ("planning.max_batch_size", 10**30, "trained"),
        ("planning.sp_sizes", {1: 2}, "sp_sizes: expected whole numbers"),
        ("ignore_index", 10**30, "labels are 64-bit integers"),
    ],
)
def test_values_found(option: str, value: object, text: str, tmp_path: Path) -> None:
    """Sizes that no file should have; the message names the option, or a step is trained."""
    assert text in Attempts(tmp_path).given("DCPDDPStrategy", {option: value}, run=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_in_files(tmp_path: Path) -> None:
    """What is taken trains a step."""
    attempts = Attempts(tmp_path)
    outcomes = [attempts.outcome(seed, run=True) for seed in range(400)]
    assert outcomes.count("trained") > 10


def test_mutations_are_of_all_options() -> None:
    seen = {name for seed in range(2000) for name in mutations(seed)[1]}
    assert {"policy", "planning.seed", "profiling.budget_s", "reliability.rank_timeout_s"} <= seen
    assert {"blocks", "shard", "ignore_index", "config", "stage"} <= seen

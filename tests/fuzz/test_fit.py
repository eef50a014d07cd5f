"""Training runs drawn at random, against one process; and the runs that were found to go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.configurations import Configuration, configuration
from tests.fuzz.fit import main
from tests.fuzz.models import ModelSpec
from tests.fuzz.run import Difference, Outcome, check, gradient_error, train
from tests.worlds import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=110) as world:
        yield world


def outcome(world: World, config: Configuration, folder: Path) -> Outcome:
    found = check(config, world.run(train, config, str(folder)))
    assert found.refused is None, found.refused
    return found


#: Of each engine (`dcp` is slow), of several kinds of model; all share micro-batches.
@pytest.mark.parametrize(
    "seed", [6, 57, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (134, 328))]
)
def test_as_one_process(world: World, seed: int, tmp_path: Path) -> None:
    assert outcome(world, configuration(seed), tmp_path).shared > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_hundred() -> None:
    assert main(["--num", "500"]) == 0


def test_a_difference_is_seen() -> None:
    import torch

    value = {"a": torch.ones(3, dtype=torch.float64)}
    assert gradient_error("one step", value, value, 1e-11) == 0.0
    for other in ({"a": value["a"] + 1e-9}, {"a": value["a"] * float("nan")}, {}):
        with pytest.raises(Difference):
            gradient_error("one step", other, value, 1e-11)


# ---- found ---------------------------------------------------------------------------------------

LENGTHS = (9, 30, 5, 12, 7, 3, 11, 40, 8, 14, 2, 6)


def config_of(model: dict[str, Any], **options: Any) -> Configuration:
    spec = ModelSpec(**{"width": 16, "heads": 4, "depth": 3, "seed": 3, **model})
    defaults: dict[str, Any] = {
        "seed": 0,
        "lengths": LENGTHS,
        "val_lengths": (),
        "world_size": 4,
        "strategy": "dcp_ddp",
        "planning": {"sp_sizes": [1, 2, 4]},
        "loader": {"batch_size": 2},
        "trainer": {"max_epochs": 1},
        "communication": 0.01,
    }
    return Configuration(model=spec, **(defaults | options))


def test_the_first_blocks_are_frozen(world: World, tmp_path: Path) -> None:
    """No backward pass came to the blocks that were measured, and `fit` was refused."""
    config = config_of(
        {"kind": "own", "depth": 4, "frozen": "but_last"}, planning={"sp_sizes": [2, 4]}
    )
    assert outcome(world, config, tmp_path).shared > 0


@pytest.mark.parametrize("tiled_loss", [True, False])
def test_slices_for_gpt2(world: World, tiled_loss: bool, tmp_path: Path) -> None:
    """The library says of other causal models by `loss_type` that they are, and not of this one.

    Labels were shifted inside of each slice, and its loss could not be tiled.
    """
    config = config_of(
        {"kind": "gpt2"},
        planning={"sp_sizes": [2, 4]},
        options={"shard": "inputs", "tiled_loss": tiled_loss, "self_check": tiled_loss},
    )
    assert outcome(world, config, tmp_path).shared > 0


def test_a_model_that_does_not_run_sharded_under_fsdp(world: World, tmp_path: Path) -> None:
    """Sequences of two tokens look like rotary tables of two: p = 1 is left, and parameters whole.

    The pass that raised had left `fully_shard` in the middle of a forward pass.
    """
    config = config_of(
        {"kind": "rotary", "width": 20, "heads": 5}, strategy="dcp_fsdp", lengths=(2,), planning={}
    )
    assert outcome(world, config, tmp_path).shared == 0


def test_packed_samples_without_labels(world: World, tmp_path: Path) -> None:
    """Of two samples without a label nothing can be compared: others are."""
    config = config_of(
        {"kind": "own", "unlabelled": 0.6}, options={"packing": True}, strategy="dcp_ddp"
    )
    assert outcome(world, config, tmp_path).steps > 0

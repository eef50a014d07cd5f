"""Random wrong values for every option, in Python and in files for `lightning-dcp fit`.

Each ends in one of two ways: the value is taken, or one clear message names the option. What is
taken trains a tiny model for a step, which again works or is refused in the package's own words.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import SaveConfigCallback
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_dcp
from lightning_dcp.cli.fit import Mistake, TrainingCLI, _options_of
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.reliability import ReliabilityOptions
from tests.strategies.toys import Sequences, ToyLM, pad

__all__ = ["STRATEGIES", "Attempts", "in_python", "mutations"]

STRATEGIES = ("DCPStrategy", "DCPDDPStrategy", "DCPFSDPStrategy")
#: Lightning's own, or objects.
NOT_OURS = frozenset(
    (
        "accelerator", "checkpoint_io", "cluster_environment", "data_parallel_size",
        "ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "kwargs", "model_averaging_period",
        "parallel_devices", "precision_plugin", "process_group_backend",
        "save_distributed_checkpoint", "start_method", "tensor_parallel_size", "timeout",
    )
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, -1, 2**40, 10**30, 0.5, -0.5, 1.0, 1e-300, math.nan, math.inf,
    -math.inf, "", "abc", "1", "true", "null", "1e3", "ü☃", "a: b", "dcp-intra", "tokens", "error",
    "inputs", "blocks", [], [1], [1, 2], [2, 1], [3], [-1], [0, 10], ["a"], [None], [[1]], [1.5],
    {}, {"a": 1}, {"a": None}, {"a": "b"}, {"policy": "x"}, {"budget_s": 1}, {1: 2},
    [1, 20, 300], ["blocks"], "blocks.0", "no.such.path", [math.nan], {"labels": 1},
)  # fmt: skip


class TinyLM(ToyLM):
    """Trains in milliseconds."""

    def __init__(self) -> None:
        super().__init__(width=8, num_heads=2, num_blocks=2)


class TinyData(lightning_dcp.DCPDataModuleMixin, L.LightningDataModule):
    """A dozen samples."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(
            Sequences([9, 5, 12, 7, 3, 11, 2, 8]), batch_size=2, collate_fn=pad, shuffle=True
        )


@functools.cache
def options_of(strategy: str) -> list[str]:
    """All options of a strategy that are this package's, those of nested classes with dots."""
    found = _options_of(f"lightning_dcp.{strategy}")
    return [o for o in found if o.partition(".")[0] not in NOT_OURS]


def mutations(seed: int) -> tuple[str, dict[str, Any]]:
    """A strategy and one to three of its options with a value each; mostly wrong ones."""
    draw = random.Random(seed)
    strategy = draw.choice(STRATEGIES)
    names = options_of(strategy)
    chosen = draw.sample(names, draw.choice([1, 1, 1, 2, 3]))
    values = {name: draw.choice(VALUES) for name in chosen}
    if draw.random() < 0.1:
        values = {draw.choice(names) + draw.choice(["x", ".a", "_"]): 1}  # no such option
    if draw.random() < 0.05:
        values["planning"] = draw.choice(VALUES)
    return strategy, values


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        at = tree
        for part in path:
            inner = at.setdefault(part, {})
            if not isinstance(inner, dict):
                inner = at[part] = {}
            at = inner
        at[last] = value
    return tree


class Attempts:
    """One command, whose parser is used again and again.

    Args:
        folder: for files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cli: Any = None

    def outcome(self, seed: int, *, run: bool) -> str:
        """Of the values of a seed; see `given`."""
        return self.given(*mutations(seed), run=run)

    def given(self, strategy: str, values: dict[str, Any], *, run: bool) -> str:
        """`refused: ...`, `taken`, or `trained`.

        Raises:
            AssertionError: A message that does not name an option, or an error from deep inside.
        """
        file = self.folder / "config.yaml"
        init_args = nested(values)
        if run and isinstance(init_args.setdefault("profiling", {}), dict):
            init_args["profiling"].setdefault("budget_s", 0.3)
            init_args["profiling"].setdefault("cache", False)
        trainer = {
            "strategy": {"class_path": f"lightning_dcp.{strategy}", "init_args": init_args},
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(self.folder),
        }
        content = {
            "trainer": trainer,
            "model": f"{__name__}.TinyLM",
            "data": f"{__name__}.TinyData",
            "seed_everything": 1,
        }
        file.write_text(yaml.safe_dump(content, allow_unicode=True))
        names = {part for name in values for part in name.split(".")}
        try:
            cli = self._instantiate(["fit", f"--config={file}"])
        except Mistake as mistake:
            text = str(mistake)
            named = any(name in text for name in names) or "Key must be a string" in text
            assert named, f"{strategy} {values}: {text}"
            assert "\n" not in text, text
            return f"refused: {text}"
        except Exception:  # noqa: BLE001 - none is right here
            raise AssertionError(f"{strategy} {values}:\n{traceback.format_exc()}") from None
        if not run:
            return "taken"
        try:
            cli.trainer.fit(cli.model, cli.datamodule)
        except Exception as error:  # noqa: BLE001 - looked at
            text = f"{type(error).__name__}: {error}"
            ours = isinstance(error, MisconfigurationException | ValueError | TypeError)
            if not ours or not any(name in text for name in names):
                raise AssertionError(
                    f"{strategy} {values}:\n{traceback.format_exc()[-2500:]}"
                ) from None
            return f"refused in fit: {text}"
        assert all(bool(p.isfinite().all()) for p in cli.model.parameters())
        return "trained"

    def _instantiate(self, words: list[str]) -> Any:
        if self._cli is None:
            self._cli = _Reused(words)
        else:
            self._cli.parse_arguments(self._cli.parser, words)
            self._cli.instantiate_classes()
        # One configuration is saved in a folder, and others are refused.
        callbacks = self._cli.trainer.callbacks
        callbacks[:] = [c for c in callbacks if not isinstance(c, SaveConfigCallback)]
        return self._cli


class _Reused(TrainingCLI):
    """Runs nothing by itself."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def in_python() -> Iterator[tuple[str, Any, str]]:
    """All values for all options of the option classes: (option, value, what comes of it).

    What comes of it is empty where the value is taken.

    Raises:
        AssertionError: An error of another type or without the option's name, or from deep inside.
    """
    for cls in (PlanningOptions, ProfilingOptions, ReliabilityOptions):
        for option in dataclasses.fields(cls):  # type: ignore[arg-type]
            for value in VALUES:
                outcome = ""
                try:
                    cls(**{option.name: value})
                except (TypeError, ValueError) as error:
                    outcome = f"{type(error).__name__}: {error}"
                    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
                    module = str(frames[-1].f_globals["__name__"])
                    given = f"{cls.__name__}({option.name}={value!r}): {outcome}"
                    assert module.startswith("lightning_dcp"), given
                    assert option.name in outcome, given
                yield option.name, value, outcome

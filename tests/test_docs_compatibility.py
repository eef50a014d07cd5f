"""docs/lightning-compatibility.md is complete; what it and docs/reliability.md claim has a test."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import lightning as L
import lightning.pytorch.callbacks
import lightning.pytorch.loggers
import lightning.pytorch.plugins
import lightning.pytorch.profilers
import pytest
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from tests.compatibility_table import compatibility_rows

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "docs" / "reliability.md"


def names(section: str) -> set[str]:
    """What stands between the first backticks of each row, or several with commas between them."""
    rows = [row for row in compatibility_rows() if row.section == section]
    return {name.strip("` ") for row in rows for name in row.name.split(",")}


def hooks_of(*classes: type) -> set[str]:
    return {
        name
        for cls in classes
        for name, member in vars(cls).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


#: Of plugins: a base class without behaviour, and one of a strategy that is not built on here.
NO_ROWS = {"LayerSync", "FSDPPrecision"}


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        ("Trainer flags", set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}),
        ("Callbacks", set(lightning.pytorch.callbacks.__all__)),
        ("Hooks of a Callback", hooks_of(L.Callback)),
        (
            "Hooks of a LightningModule",
            hooks_of(ModelHooks, DataHooks, CheckpointHooks)
            | {
                name
                for name in hooks_of(L.LightningModule)
                if name.startswith(("configure_", "optimizer_", "lr_scheduler_"))
            }
            | {"training_step", "validation_step", "test_step", "predict_step", "backward"},
        ),
        (
            "Hooks of a LightningDataModule",
            hooks_of(DataHooks, L.LightningDataModule) - {"from_datasets", "load_from_checkpoint"},
        ),
        ("Loggers", set(lightning.pytorch.loggers.__all__)),
        ("Profilers", set(lightning.pytorch.profilers.__all__)),
        ("Plugins", set(lightning.pytorch.plugins.__all__) - NO_ROWS),
    ],
)
def test_nothing_of_lightning_is_missing(section: str, wanted: set[str]) -> None:
    assert wanted, "an empty list would show nothing"
    assert wanted - names(section) == set()


def test_every_row_has_one_of_three_answers() -> None:
    assert len(compatibility_rows()) > 150
    for row in compatibility_rows():
        assert row.status in ("works", "refused", "not applicable"), row
        assert row.note or row.status == "works", row
    named = [(row.section, row.name) for row in compatibility_rows()]
    assert len(named) == len(set(named))


@cache
def collected_in(path: Path) -> set[str]:
    """Names of test functions, with their class where they have one."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {
            prefix + function.name
            for function in inside
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test")
        }
    return found


def test_every_test_exists() -> None:
    missing = []
    for row in compatibility_rows():
        assert row.tests and all(row.tests), f"{row.name} has no test"
        for test in row.tests:
            path, _, name = test.partition("::")
            if not exists(path, name):
                missing.append((row.name, test))
    assert missing == []


def exists(path: str, name: str) -> bool:
    """Whether there is such a file, with such a function, method or class of tests."""
    if not (ROOT / path).is_file():
        return False
    found = collected_in(ROOT / path)
    return not name or name in found or any(test.startswith(f"{name}::") for test in found)


def test_every_test_of_the_page_on_faults_exists() -> None:
    rows = [row for row in FAULTS.read_text().splitlines() if row.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| fault |")]
    assert len(rows) > 25
    for row in rows:
        tests = re.findall(r"`(tests/[^`]+)`", row.rsplit(" | ", 1)[-1])
        assert tests, f"no test: {row}"
        for test in tests:
            path, _, name = test.partition("::")
            assert exists(path, name), test


@pytest.mark.parametrize("page", ["lightning-compatibility", "reliability", "data"])
def test_the_page_is_linked(page: str) -> None:
    assert f"docs/{page}.md" in (ROOT / "README.md").read_text()

"""The configurations in `examples/configs`, each run both ways by two ranks, and saved again."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.strategies import StrategyRegistry

from lightning_dcp.cli import main
from lightning_dcp.cli.fit import TrainingCLI
from lightning_dcp.strategies.mixin import DCPStrategyMixin
from tests.worlds import World

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "examples" / "configs"
MODEL_AND_DATA = CONFIGS / "stdlib_lm.yaml"
OURS = [
    name
    for name, entry in StrategyRegistry.items()
    if isinstance(entry["strategy"], type) and issubclass(entry["strategy"], DCPStrategyMixin)
]

SMALL = (
    "--trainer.devices=2",
    "--trainer.max_steps=2",
    "--trainer.val_check_interval=2",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.strategy.profiling.budget_s=1",
    "--trainer.strategy.profiling.repeats=1",
    "--model.channels=8",
    "--model.heads=2",
    "--model.depth=2",
    "--data.num_samples=60",
    "--data.max_length=200",
    "--data.num_val=8",
)


class ParsedOnly(TrainingCLI):
    """The parsed configuration, without a Trainer."""

    def instantiate_classes(self) -> None:
        pass

    def _run_subcommand(self, subcommand: str) -> None:
        pass

    def save(self, path: Path) -> None:
        """As Lightning's SaveConfigCallback does."""
        parser = self._parser(self.subcommand)
        parser.save(self.config[self.subcommand], str(path), skip_none=False)


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.syspath_prepend(ROOT)


def words_of(name: str) -> list[str]:
    return ["fit", f"--config={CONFIGS / name}.yaml", f"--config={MODEL_AND_DATA}"]


def test_each_strategy_has_one() -> None:
    of_examples = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} - of_examples == set(OURS)
    for name in OURS:
        config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
        class_path = config["trainer"]["strategy"]["class_path"]
        assert class_path == f"lightning_dcp.{StrategyRegistry[name]['strategy'].__name__}"


@pytest.mark.parametrize("name", OURS)
def test_saved_and_printed_configurations_reload(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *words_of(name),
        "--trainer.strategy.timeout=0:10:00",
        "--trainer.strategy.sequence_dims={mask: null, x: 1}",
        "--trainer.strategy.planning.bucket_edges=[1, 20, 300]",
        "--trainer.strategy.profiling.lengths=[8, 16, 32]",
        "--trainer.callbacks+=Timer",
        "--trainer.callbacks.duration=00:01:00:00",
    ]
    first = ParsedOnly(words)
    first.save(tmp_path / "saved.yaml")
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_status:
        ParsedOnly([*words, "--print_config"])
    assert exit_status.value.code == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    for file in ("saved.yaml", "printed.yaml"):
        again = ParsedOnly(["fit", f"--config={tmp_path / file}"])
        assert without_files(again) == without_files(first)
        strategy = again.parser.instantiate_classes(again.config).fit.trainer.strategy
        assert strategy.strategy_name == name
        assert strategy.settings.planning.bucket_edges == (1, 20, 300)


def without_files(cli: ParsedOnly) -> dict[str, Any]:
    config: dict[str, Any] = cli.config.fit.clone().as_dict()
    del config["config"]
    assert config["trainer"]["max_steps"] == 60
    return config


# ---------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    cache = tmp_path_factory.mktemp("cache")
    with World(2, timeout_s=100, env={"LIGHTNING_DCP_CACHE": str(cache)}) as world:
        yield world


def run(rank: int, way: str, words: list[str]) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    if way == "command":
        assert main(words) == 0
    else:
        import stdlib_lm

        sys.argv = ["examples/stdlib_lm.py", *words]
        stdlib_lm.cli()


def metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


#: All by the same code; the others are started by other tests.
STARTED = [n if n == "dcp" else pytest.param(n, marks=pytest.mark.slow) for n in OURS]


@pytest.mark.parametrize("name", STARTED)
def test_runs_by_the_command_and_by_the_script(world: World, name: str, tmp_path: Path) -> None:
    into = f"--trainer.logger.save_dir={tmp_path}"
    world.run(run, "command", [*words_of(name), *SMALL, into])
    world.run(run, "script", ["fit", f"--config={CONFIGS / name}.yaml", *SMALL, into])
    for version in range(2):
        folder = tmp_path / f"stdlib_lm_{name}" / f"version_{version}"
        rows = metrics(folder)
        assert rows[-1]["step"] == "1"
        assert 7.0 < float([row["val_bits_per_byte"] for row in rows][-1]) < 9.0
        assert any(row["dcp/idle_share"] for row in rows)
        assert (folder / "config.yaml").exists()


def test_validates_by_the_saved_configuration_of_a_fit(world: World, tmp_path: Path) -> None:
    fit = ParsedOnly([*words_of("dcp_ddp"), *SMALL, f"--trainer.logger.save_dir={tmp_path}"])
    fit.save(tmp_path / "saved.yaml")
    world.run(run, "command", ["validate", f"--config={tmp_path / 'saved.yaml'}"])
    (row,) = metrics(tmp_path / "stdlib_lm_dcp_ddp" / "version_0")
    assert 7.0 < float(row["val_bits_per_byte"]) < 9.0

"""`lightning-dcp fit`: options of every strategy by flags and files, help, mistakes, real ranks."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.strategies import StrategyRegistry

import lightning_dcp
from lightning_dcp.cli import main
from lightning_dcp.cli.fit import Mistake, TrainingCLI
from lightning_dcp.command_process import TRAINING_COMMANDS, runs_without_torch
from lightning_dcp.strategies.mixin import DCPStrategyMixin
from tests.cli.test_command import imported

ROOT = Path(__file__).resolve().parents[2]
BORING = "lightning.pytorch.demos.boring_classes.BoringModel"

REGISTERED = {
    name: entry["strategy"]
    for name, entry in StrategyRegistry.items()
    if isinstance(entry["strategy"], type) and issubclass(entry["strategy"], DCPStrategyMixin)
}
PATHS = [f"lightning_dcp.{cls.__name__}" for cls in REGISTERED.values()]


class ParsedOnly(TrainingCLI):
    """The parsed configuration, without a Trainer."""

    def instantiate_classes(self) -> None:
        pass

    def _run_subcommand(self, subcommand: str) -> None:
        pass

    @property
    def trainer_config(self) -> Any:
        return self.config[self.subcommand].trainer

    def strategy(self) -> Any:
        return self.parser.instantiate_classes(self.config)[self.subcommand].trainer.strategy


def parse(*words: str, command: str = "fit") -> ParsedOnly:
    return ParsedOnly([command, f"--model={BORING}", "--seed_everything=1", *words])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_there_are_three_strategies_and_the_package_has_them() -> None:
    assert {"dcp", "dcp_ddp", "dcp_fsdp"} <= set(REGISTERED)
    for path in PATHS:
        assert path.partition(".")[2] in lightning_dcp.__all__


# ---------------------------------------------------------------------- options

OPTIONS: dict[str, Any] = {
    "policy": "bucket",
    "planning": {
        "tokens_per_step": 5000,
        "max_accumulation": 4,
        "bucket_edges": [1, 64, 900],
        "sp_sizes": [1, 2],
        "on_too_long": "skip",
    },
    "profiling": {"budget_s": 2.5, "lengths": [8, 16, 32]},
    "blocks": "model.layers",
    "sequence_dims": {"mask": None, "0": 1},
    "loss_average": "samples",
    "ignore_index": -1,
    "self_check": False,
    "timeout": "0:10:00",
}


def flags(prefix: str, options: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        if name in ("planning", "profiling"):
            words += flags(f"{prefix}.{name}", value)
        else:
            text = value if isinstance(value, str) else yaml.safe_dump(value, width=999)
            text = text.removesuffix("...\n").strip() if not isinstance(value, dict) else str(value)
            words.append(f"{prefix}.{name}={text.replace('None', 'null')}")
    return words


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", ["flags", "short flags", "file", "file and flags"])
def test_every_kind_of_option_reaches_the_strategy(path: str, way: str, folder: Path) -> None:
    config = {"trainer": {"strategy": {"class_path": path, "init_args": OPTIONS}}}
    words = {
        "flags": [
            f"--trainer.strategy={path}",
            *flags("--trainer.strategy.init_args", OPTIONS),
        ],
        "short flags": [f"--trainer.strategy={path}", *flags("--trainer.strategy", OPTIONS)],
        "file": ["--config=c.yaml"],
        "file and flags": ["--config=c.yaml", "--trainer.strategy.init_args.planning.seed=7"],
    }[way]
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    strategy = parse(*words).strategy()
    assert type(strategy) is REGISTERED[strategy.strategy_name]
    settings = strategy.settings
    planning, profiling = settings.planning, settings.profiling
    assert planning == lightning_dcp.PlanningOptions(
        policy="bucket",
        tokens_per_step=5000,
        max_accumulation=4,
        bucket_edges=[1, 64, 900],
        sp_sizes=[1, 2],
        on_too_long="skip",
        seed=7 if way == "file and flags" else None,
    )
    assert profiling == lightning_dcp.ProfilingOptions(budget_s=2.5, lengths=(8, 16, 32))
    assert settings.sequence_dims == {"mask": None, "0": 1}
    assert (settings.blocks, settings.loss_average) == ("model.layers", "samples")
    assert (settings.ignore_index, settings.self_check) == (-1, False)
    assert strategy._timeout == timedelta(minutes=10)


@pytest.mark.parametrize("name", REGISTERED)
def test_short_names(name: str, folder: Path) -> None:
    assert parse(f"--trainer.strategy={name}").trainer_config.strategy == name
    (folder / "c.yaml").write_text("trainer: {strategy: ddp}")
    assert parse("--config=c.yaml").trainer_config.strategy == "ddp"
    both = parse("--config=c.yaml", f"--trainer.strategy={name}")
    assert both.trainer_config.strategy == name
    for class_name in (REGISTERED[name].__name__, f"lightning_dcp.{REGISTERED[name].__name__}"):
        assert type(parse(f"--trainer.strategy={class_name}").strategy()) is REGISTERED[name]


def test_the_strategy_is_dcp_unless_another_is_given() -> None:
    strategy = parse().strategy()
    assert type(strategy) is lightning_dcp.DCPStrategy
    assert strategy.settings.planning == lightning_dcp.PlanningOptions()
    # Its options can be given without naming it.
    assert parse("--trainer.strategy.planning.seed=3").strategy().settings.planning.seed == 3


def callbacks(*words: str, command: str = "fit") -> list[str] | None:
    given = parse(*words, command=command).trainer_config.callbacks
    return None if given is None else [c.class_path.rpartition(".")[2] for c in given]


def test_the_callback_is_added_where_it_has_something_to_show(folder: Path) -> None:
    assert callbacks() == ["DCPCallback"]
    for name in REGISTERED:
        assert callbacks(f"--trainer.strategy={name}") == ["DCPCallback"]
    assert callbacks("--trainer.callbacks+=Timer") == ["Timer", "DCPCallback"]
    assert callbacks("--trainer.callbacks+=DCPCallback") == ["DCPCallback"]
    assert callbacks("--trainer.callbacks=[]") == []
    assert callbacks("--trainer.strategy=ddp") is None
    assert callbacks("--trainer.strategy=DDPStrategy") is None
    assert callbacks(command="validate") is None
    (folder / "own.py").write_text(
        "from lightning_dcp import DCPCallback\nclass Mine(DCPCallback): pass\n"
    )
    sys.path.insert(0, str(folder))
    assert callbacks("--trainer.callbacks+=own.Mine") == ["Mine"]


@pytest.mark.parametrize("command", TRAINING_COMMANDS)
def test_all_subcommands_have_a_model_data_and_trainer(command: str) -> None:
    cli = parse("--trainer.max_steps=3", command=command)
    assert cli.subcommand == command
    assert cli.trainer_config.max_steps == 3
    assert cli.config[command].model.class_path == BORING


# ---------------------------------------------------------------------- help


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_status:
        main(list(words))
    assert exit_status.value.code == 0
    return capsys.readouterr().out


def described(text: str, prefix: str) -> dict[str, str]:
    """Options of a help page with what is said about each, types and defaults left out."""
    entries = re.split(rf"^  --{re.escape(prefix)}(?=[\w.]+)", text, flags=re.MULTILINE)[1:]
    found = {}
    for entry in entries:
        name, _, about = entry.partition(" ")
        about = " ".join(about.split("\n", 1)[-1].split()).split("(type:")[0]
        found[name] = about.strip()
    return found


@pytest.mark.parametrize("path", PATHS)
def test_every_option_has_a_help_text(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = help_of(capsys, "fit", "--trainer.strategy.help", path)
    help_texts = described(text, "trainer.strategy.")
    nested = {
        "planning": lightning_dcp.PlanningOptions,
        "profiling": lightning_dcp.ProfilingOptions,
        "reliability": lightning_dcp.ReliabilityOptions,
    }
    parameters = inspect.signature(getattr(lightning_dcp, path.partition(".")[2])).parameters
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue  # what torch's DDP takes, with torch's help
        fields = dataclasses.fields(nested[name]) if name in nested else None
        names = [f"{name}.{field.name}" for field in fields] if fields else [name]
        for option in names:
            assert len(help_texts[option]) > 5, f"{option}: {help_texts[option]!r}"


def test_help_lists_the_subcommands_and_those_of_lightning_their_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(capsys, "--help")
    for command in ("simulate", "plan", *TRAINING_COMMANDS):
        assert re.search(rf"^    {command} +\w.*[.\w]$", text, re.MULTILINE), text
    text = help_of(capsys, "fit", "--help")
    for option in (
        "--config",
        "--trainer.max_steps",
        "--model",
        "--data",
        "--debug",
        "--optimizer",
    ):
        assert option in text
    assert "lightning_dcp.DCPStrategy" in text and "usage: lightning-dcp [options] fit" in text


# ---------------------------------------------------------------------- mistakes

Fails = Callable[..., str]


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    def call(*words: str, model: str | None = BORING) -> str:
        capsys.readouterr()
        assert main(["fit", *([f"--model={model}"] if model else []), *words]) == 2
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err  # DeepSpeed logs to stdout when it is imported
        line = err.splitlines()[-1]
        assert line.startswith("lightning-dcp: error: ")
        assert not re.search(r"<class|Union|Subtypes|NoneType|NestedArg|Namespace|typing\.", line)
        return line

    return call


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["strategy=dcpp"], "--trainer.strategy: 'dcpp' is no strategy. Did you mean dcp?"),
        (["strategy=lightning_dcp.Nope"], "Ours are dcp, dcp_ddp"),
        (["strategy.policy=best"], "Unknown policy 'best'. Known policies: 'dcp-inter', 'dcp-"),
        (["strategy.planning.max_buckets=0"], "max_buckets must be at least 1; got 0"),
        (["strategy.planning.sp_sizes=[3]"], "sp_sizes must be powers of two"),
        (
            ["strategy.planning.tokens_per_step=many"],
            "--trainer.strategy.planning.tokens_per_step: expected a whole number; got many",
        ),
        (
            ["strategy.planning.tokens_per_stp=9"],
            "tokens_per_stp. Did you mean planning.tokens_per_step? There are planning.policy",
        ),
        (["strategy.planing.seed=1"], "Did you mean planning.seed?"),
        (["strategy.loss_average=words"], "expected one of auto, tokens, samples; got words"),
        (["strategy.profiling.lengths=[3, a]"], "expected whole numbers in brackets"),
        (["strategy.sequence_dims={x: y}"], "--trainer.strategy.sequence_dims: expected a whole"),
        (["strategy.timeout=soon"], "--trainer.strategy.timeout:"),
        (["strategy.stage=3"], "needs DeepSpeed's ZeRO stage 1, but stage 3 was given"),
        (["strategy=dcp", "strategy.policy=bucket"], "dcp is given by its name, which takes no op"),
        (
            ["strategy=DCPDDPStrategy", "strategy.model_averaging_period=2"],
            "lets ranks' parameters",
        ),
        (
            ["max_stepz=3"],
            "--trainer.max_stepz: lightning.Trainer has no option max_stepz. Did you ",
        ),
        (["max_steps=few"], "--trainer.max_steps: expected a whole number; got few"),
        (["devices=0", "logger=false"], "Trainer(devices='0')"),
        (["callbacks=Nope"], "--trainer.callbacks: there is no class Nope"),
        (["callbacks=DCPCallback", "callbacks.print_tabl=1"], "Did you mean print_table?"),
        (["callbacks=ModelCheckpoint", "callbacks.save_top_k=-3"], "Invalid value for save_top_k"),
    ],
)
def test_mistakes_in_options_of_the_trainer(fails: Fails, words: list[str], what: str) -> None:
    assert what in fails(*(f"--trainer.{word}" for word in words))


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ("strategy: {init_args: {planning: {tokens_per_stp: 9}}}", "Did you mean planning.tokens_"),
        (
            "strategy: {init_args: {profiling: {budget_s: long}}}",
            "budget_s: expected a finite",
        ),
        ("strategy: {init_args: {plannin: {seed: 9}}}", "Did you mean planning.seed?"),
        ("strategy: {class_path: lightning_dcp.Nope}", "there is no class lightning_dcp.Nope"),
        ("strategy: {class_path: nowhere.Nope}", "No module named 'nowhere'"),
        ("max_stepz: 3", "Did you mean max_steps?"),
        ("strategy: {", "Problems parsing config"),
    ],
)
def test_mistakes_in_a_file(fails: Fails, folder: Path, config: str, what: str) -> None:
    (folder / "c.yaml").write_text(f"trainer:\n  {config}\n")
    assert what in fails("--config=c.yaml")


def test_mistakes_about_model_and_files(fails: Fails, folder: Path) -> None:
    assert "--model is missing" in fails(model=None)
    assert "--model: there is no class no.Model: No module named 'no'" in fails(model="no.Model")
    assert "Write its module too, such as my_module.Nowhere" in fails(model="Nowhere")
    assert "is no LightningModule" in fails(model="lightning_dcp.DCPStrategy")
    assert "nowhere.yaml" in fails("--config=nowhere.yaml")
    (folder / "latin.yaml").write_bytes("# \xe4\n".encode("latin-1"))
    assert "--config: the file is no text: it is not UTF-8" in fails("--config=latin.yaml")
    assert "--foo: the command has no option foo" in fails("--foo=3")
    with pytest.raises(Mistake, match="--model is missing"):
        main(["fit", "--debug"])


def test_what_a_model_raises_is_the_users_to_see(folder: Path) -> None:
    (folder / "wrong_model.py").write_text(
        f"from {BORING.rpartition('.')[0]} import BoringModel\n"
        "class Model(BoringModel):\n"
        "    def __init__(self, width: int = 1):\n"
        "        raise KeyError('from the model')\n"
    )
    with pytest.raises(KeyError, match="from the model") as raised:  # the current folder's module
        main(["fit", "--model=wrong_model.Model"])
    assert raised.traceback[-1].path == folder / "wrong_model.py"


# ---------------------------------------------------------------------- processes


@pytest.mark.parametrize(
    ("words", "missing", "expected"),
    [
        (["plan"], None, True),
        ([], None, True),
        (["--help"], None, True),
        (["fit"], None, False),
        (["predict", "--config", "c.yaml"], None, False),
        (["fit"], "torch", True),
        (["validate"], "deepspeed", True),
    ],
)
def test_what_needs_torch(
    monkeypatch: pytest.MonkeyPatch, words: list[str], missing: str | None, expected: bool
) -> None:
    monkeypatch.setattr(sys, "argv", ["/venv/bin/lightning-dcp", *words])
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    assert runs_without_torch() is expected
    # Lightning starts further ranks so.
    monkeypatch.setattr(sys, "argv", ["-m", *words])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "lightning_dcp.__main__", *words])
    assert runs_without_torch() is expected


def test_help_does_not_import_torch() -> None:
    result, packages = imported(["-m", "lightning_dcp", "--help"])
    assert result.returncode == 0 and "predict" in result.stdout
    assert "numpy" in packages and not packages & {"torch", "lightning", "deepspeed"}


def start(folder: Path, *command: str) -> tuple[int, str]:
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")
    env = {k: v for k, v in os.environ.items() if k not in ranks}
    env.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", LIGHTNING_DCP_CACHE=str(folder / "cache"))
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


def test_without_torch_it_says_what_is_missing(folder: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['lightning-dcp', 'fit'];"
        "from lightning_dcp.cli import main; sys.exit(main())"
    )
    status, output = start(folder, "-c", code)
    assert status == 2
    assert output.startswith("lightning-dcp: error: `lightning-dcp fit` needs torch, which is not")
    assert output.count("\n") == 1


MODULE = """
import lightning as L
from tests.strategies.toys import ToyLM, loader

class Model(ToyLM):
    def __init__(self, lr: float = 0.01):
        super().__init__(lr=lr)

    def on_fit_end(self):
        trainer = self.trainer
        print(f"rank {trainer.global_rank} of {trainer.world_size}: step {trainer.global_step},"
              f" {trainer.strategy.strategy_name}", flush=True)

class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader([9, 30, 5, 12, 7, 3, 11, 2, 8, 14, 1, 6], 2)
"""

CONFIG = """
seed_everything: 3
model: {class_path: own_lm.Model, init_args: {lr: 0.02}}
data: {class_path: own_lm.Data}
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs, name: x}}
  strategy: {init_args: {profiling: {budget_s: 1.5, repeats: 1}}}
"""


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which two ranks trained, started as a user does, and what they printed."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_lm.py").write_text(MODULE)
    (folder / "c.yaml").write_text(CONFIG)
    bin_folder = folder / "bin"  # as in an environment: not where the user's module is
    bin_folder.mkdir()
    script = bin_folder / "lightning-dcp"
    script.write_text(
        "import sys\nfrom lightning_dcp.cli import main\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n"
    )
    status, output = start(folder, str(script), "fit", "--config", "c.yaml")
    assert status == 0, output
    return folder, output


def saved(folder: Path, version: int) -> str:
    return (folder / f"logs/x/version_{version}/config.yaml").read_text()


def test_the_console_script_trains_on_two_ranks(first_run: tuple[Path, str]) -> None:
    folder, output = first_run
    for rank in range(2):
        assert f"rank {rank} of 2: step 3, dcp" in output
    assert "predicted and measured" in output  # by the callback that nobody named
    config = yaml.safe_load(saved(folder, 0))
    assert config["model"]["init_args"]["lr"] == 0.02
    assert config["trainer"]["callbacks"][0]["class_path"] == "lightning_dcp.DCPCallback"


@pytest.mark.slow
def test_the_module_trains_by_the_saved_configuration(first_run: tuple[Path, str]) -> None:
    folder, _ = first_run
    config = "logs/x/version_0/config.yaml"
    status, output = start(folder, "-m", "lightning_dcp", "fit", "--config", config)
    assert status == 0, output
    for rank in range(2):
        assert f"rank {rank} of 2: step 3, dcp" in output
    assert saved(folder, 1) == saved(folder, 0)

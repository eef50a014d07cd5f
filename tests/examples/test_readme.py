"""What README and docs show is run, and what they name exists."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lightning_dcp
from lightning_dcp.cli import build_parser
from lightning_dcp.cli.fit import TrainingCLI

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def options_in_table(heading: str) -> set[str]:
    """Names in the first column of the table after a heading."""
    blocks = README.split(heading, 1)[1].split("\n\n")
    table = next(block for block in blocks if block.startswith("|"))
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


PREAMBLE = """
import sys
sys.path.insert(0, {examples!r})
import lightning
from stdlib_lm import Definitions, StdlibLM, collate, collect, stdlib_files
from torch.utils.data import DataLoader

class MyData(lightning.LightningDataModule):
    def train_dataloader(self):
        texts = Definitions(collect(stdlib_files(), 100, min_length=16, max_length=300))
        return DataLoader(texts, batch_size=2, shuffle=True, collate_fn=collate)

def MyModel():
    return StdlibLM(channels=16, heads=2, depth=2)
"""


@pytest.mark.timeout(180)
def test_ten_lines_train(tmp_path: Path) -> None:
    integration = snippets(README, "python")[0]
    assert len([line for line in integration.splitlines() if line.strip()]) <= 10
    small = "devices=2, accelerator='cpu', max_steps=2"
    assert integration.count("devices=8") == 1
    script = tmp_path / "train.py"
    script.write_text(
        PREAMBLE.format(examples=str(ROOT / "examples"))
        + integration.replace("devices=8", small)
        + "    print('steps:', trainer.global_step, flush=True)\n"
    )
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "LIGHTNING_DCP_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-8000:]
    assert "steps: 2" in result.stdout


def test_options_snippet_builds_the_strategy() -> None:
    namespace: dict[str, object] = {}
    exec(snippets(README, "python")[1], namespace)
    strategy = namespace["strategy"]
    assert isinstance(strategy, lightning_dcp.DCPStrategy)
    assert strategy.settings.planning.tokens_per_step == 500_000


def test_all_python_snippets_compile() -> None:
    found = [(page, code) for page in PAGES for code in snippets(page.read_text(), "python")]
    assert len(found) >= 3
    for page, code in found:
        compile(code, str(page), "exec")


def test_yaml_snippet_names_what_exists() -> None:
    (text,) = snippets(README, "yaml")
    trainer = yaml.safe_load(text)["trainer"]
    arguments = dict(trainer["strategy"]["init_args"])
    planning = lightning_dcp.PlanningOptions(**arguments.pop("planning"))
    assert trainer["strategy"]["class_path"] == "lightning_dcp.DCPStrategy"
    strategy = lightning_dcp.DCPStrategy(planning=planning, **arguments)
    assert strategy.settings.planning.tokens_per_step == 500_000
    (callback,) = trainer["callbacks"]
    assert callback["class_path"] == "lightning_dcp.DCPCallback"


def test_option_tables_are_complete() -> None:
    for heading, options in (
        ("`PlanningOptions`:", lightning_dcp.PlanningOptions),
        ("`ProfilingOptions`:", lightning_dcp.ProfilingOptions),
        ("`ReliabilityOptions`:", lightning_dcp.ReliabilityOptions),
    ):
        assert options_in_table(heading) == {field.name for field in dataclasses.fields(options)}
    own = options_in_table("## Options")
    in_words = set(re.findall(r"`(\w+)`", README.split("## Options", 1)[1].split("\n\n")[1]))
    for strategy in (
        lightning_dcp.DCPStrategy,
        lightning_dcp.DCPDDPStrategy,
        lightning_dcp.DCPFSDPStrategy,
    ):
        assert own | {"timeout"} <= set(inspect.signature(strategy).parameters)
        lightnings = set(inspect.signature(strategy.__bases__[-1]).parameters)
        assert set(inspect.signature(strategy).parameters) - own - in_words <= lightnings


def test_defaults_in_the_tables_are_true() -> None:
    planning, profiling = lightning_dcp.PlanningOptions(), lightning_dcp.ProfilingOptions()
    reliability = lightning_dcp.ReliabilityOptions()
    for options, names in (
        (planning, ("policy", "max_buckets", "pad_multiple", "on_too_long")),
        (profiling, ("budget_s", "repeats")),
        (reliability, tuple(vars(reliability))),
    ):
        for name in names:
            default = getattr(options, name)
            shown = f'`"{default}"`' if isinstance(default, str) else f"{default}"
            shown = f"`{default}`" if isinstance(default, bool) else shown
            assert re.search(rf"^\| `{name}` \| {re.escape(shown)} \|", README, re.MULTILINE), name


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


class ParsedOnly(TrainingCLI):
    def instantiate_classes(self) -> None:
        pass

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def check_fit(words: list[str]) -> None:
    """Raise unless `lightning-dcp fit` takes the options."""
    if any(word.endswith(".help") for word in words):
        with pytest.raises(SystemExit, match=r"^0$"):
            ParsedOnly(words)
    else:
        ParsedOnly(words)


def test_commands_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    makefile = (ROOT / "Makefile").read_text()
    commands = [
        c
        for page in PAGES
        for block in snippets(page.read_text(), "bash")
        for c in block.splitlines()
    ]
    assert len(commands) >= 6
    for command in commands:
        words = command.split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), command
        elif words[:2] == ["lightning-dcp", "fit"]:
            check_fit(words[1:])
        elif words[0] == "lightning-dcp":
            build_parser().parse_args(words[1:])
        else:
            assert words[0] == "python"
            assert (ROOT / words[1]).exists(), command

"""Mistakes in the input of the command: one line in plain words, exit status 2, no traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_dcp.cli import build_parser, main
from lightning_dcp.cli.findings import conclusion, memory_lines
from lightning_dcp.cli.setup import ANY_LENGTH, Prices, check_fits, longest_fitting

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--num-gpus", "4", "--num-samples", "200", "--longest", "8192", "--model", "small.yaml"]
INTERNALS = re.compile(r"<class|typing\.|collections\.|Subtypes|NoneType|codec|Errno|literal for")

Fails = Callable[..., str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a small model, the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text("base: llama-3-8b\nnum_blocks: 4\nvocab_size: 32e3\n")
    return tmp_path


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    def call(*words: str) -> str:
        assert main(list(words)) == 2
        out, err = capsys.readouterr()
        assert out == ""
        line = err.splitlines()[-1]
        assert line.startswith("lightning-dcp: error: ")
        assert not INTERNALS.search(line)
        return line

    return call


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["plan", "--memory", "1e400"], "--memory: '1e400' is no amount of memory"),
        (["plan", "--memory", "1e400GiB"], "is no amount of memory"),
        (["plan", "--memory", "0.0000000001"], "is no amount of memory"),
        (["plan", "--log-normal", "100", "1", "--num-samples", "100000000000"], "100,000,000 "),
        (["plan", "--num-gpus", "10000000"], "--num-gpus: at most 100,000 GPUs"),
        (["simulate", "--scaling", "4,10000000"], "--scaling: at most 100,000 GPUs"),
        (["simulate", "--scaling", "a"], "--scaling: expected whole numbers of GPUs"),
        (["simulate", "--scaling", ""], "such as 8,16,32; got ''"),
        (
            ["plan", "--planning.sp_sizes", "1,2"],
            '--planning.sp_sizes: expected whole numbers in brackets, such as "[1, 2]"; got 1,2',
        ),
        (["plan", "--planning.bucket_edges", "[1, a]"], "whole numbers in brackets"),
        (["plan", "--planning.max_buckets", "a"], "--planning.max_buckets: expected a whole"),
        (["plan", "--planning.on_too_long", "cut"], "one of error, skip, truncate; got cut"),
        (["plan", "--planning", "5"], "expected the options by name"),
        (["plan", "--mix", "foo"], "--mix: expected one of short, balanced, long; got foo"),
        (["plan", "--format", "gif"], "--format: expected one of png, svg; got gif"),
        (["plan", "--policy", "x"], "--policy: expected one of dcp-inter, dcp-intra"),
        (["plan", "--log-normal", "100", "nan"], "--log-normal, value 2: expected a finite number"),
        (["plan", "--num-samples", "1.5"], "--num-samples: expected a whole number; got 1.5"),
        (["plan", "--cost-profile", "nope.json"], "there is no file nope.json"),
        (["plan", "--cost-profile", "nope.json", "--memory", "3"], "there is no file nope.json"),
        (["simulate", "--planning.on_too_long", "skip"], "remove or cut those that are too long"),
    ],
)
def test_values(fails: Fails, words: list[str], what: str) -> None:
    assert what in fails(*words)


@pytest.mark.parametrize(
    ("command", "text", "what"),
    [
        ("plan", "planning: 5\n", "planning must hold options of the planner"),
        ("plan", "planning: [1]\n", "planning must hold options of the planner"),
        ("plan", "planning: {sp_sizes: foo}\n", '"[1, 2]"; got foo'),
        ("plan", "iterations: 1:10\n", 'write it in quotes, "1:10"'),
        ("plan", "iterations: [0, a]\n", "--iterations: expected first:end"),
        ("plan", "world_size: 4\n", "Its name is num_gpus"),
        ("plan", "model: null\n", "--model is null"),
        ("plan", "num_samples: null\n", "--num-samples"),
        ("plan", "seed: null\n", "--seed"),
        ("simulate", "policies: null\n", "--policies is null"),
        ("simulate", "policies: 5\n", "--policies: expected names"),
        ("simulate", "scaling: [1.5]\n", "--scaling: expected whole numbers of GPUs"),
        ("simulate", "scaling: [true]\n", "--scaling: expected whole numbers of GPUs"),
        ("simulate", "planning: {on_too_long: skip}\n", "remove or cut those"),
    ],
)
def test_configuration_files(
    fails: Fails, folder: Path, command: str, text: str, what: str
) -> None:
    (folder / "c.yaml").write_text(text)
    assert what in fails(command, "--config", "c.yaml")


def test_a_configuration_file_that_works(folder: Path) -> None:
    (folder / "c.yaml").write_text('num_gpus: 4\niterations: "1:10"\n')
    found = build_parser().parse_args(["plan", "--config", "c.yaml"]).plan
    assert found.num_gpus == 4 and found.iterations == [1, 10]
    (folder / "c.yaml").write_text("scaling: [8, 4]\nplanning: null\n")
    assert build_parser().parse_args(["simulate", "--config", "c.yaml"]).simulate.scaling == [4, 8]
    assert build_parser().parse_args(["plan", "--world-size", "2"]).plan.num_gpus == 2


def test_the_configuration_file_shown_in_the_docs(folder: Path) -> None:
    page = (ROOT / "docs" / "simulator.md").read_text()
    text = re.search(r"^```\n(num_gpus:.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert text is not None
    (folder / "c.yaml").write_text(text[1])
    found = build_parser().parse_args(["simulate", "--config", "c.yaml"]).simulate
    assert found.num_gpus == 8 and found.planning.sp_sizes == [1, 2]


def test_files(fails: Fails, folder: Path) -> None:
    (folder / "model.yaml").write_bytes(b"base: \xff\xfe\n")
    assert "model.yaml is no text file" in fails("plan", "--model", "model.yaml")
    assert "--config: the file is no text" in fails("plan", "--config", "model.yaml")
    (folder / "blank.csv").write_text("\nlength\n3\n5\n")
    assert "line 1: blank" in fails("plan", "--lengths", "blank.csv")
    pytest.importorskip("matplotlib")
    assert "is a file, not a folder" in fails("plan", *SMALL, "--plots", "model.yaml")


def test_no_memory_left(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise MemoryError("Unable to allocate 745. GiB")

    monkeypatch.setattr("lightning_dcp.cli.setup.log_normal", no_memory)
    assert "not enough memory" in fails("plan", *SMALL, "--log-normal", "100", "1")


@pytest.mark.parametrize(("closed", "status"), [(">&-", 2), ("2>&-", 0)])
def test_closed_streams(closed: str, status: int) -> None:
    words = [sys.executable, "-m", "lightning_dcp", "plan", *SMALL]
    result = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == status
    if status:
        assert result.stderr == (
            "lightning-dcp: error: stdout is closed: there is nowhere to write the result.\n"
        )
    else:
        assert "buckets" in result.stdout


# ---------------------------------------------------------------------- samples that are too long


def test_a_sample_that_is_skipped_does_not_decide_the_batch_size(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    words = ["plan", "--model", "small.yaml", "--num-gpus", "4", "--json", "--quiet"]
    words += ["--planning.on_too_long", "skip", "--lengths"]
    found = []
    for name, more in (("a.txt", ""), ("b.txt", f"{10**11}\n")):
        (folder / name).write_text("900\n" * 2000 + more)
        assert main([*words, name]) == 0
        found.append(json.loads(capsys.readouterr().out))
    for key in ("num_iterations", "tokens_per_step"):
        assert found[0][key] == found[1][key]
    for key in ("batch_size", "steps_per_epoch"):
        assert found[0]["setup"][key] == found[1]["setup"][key]
    assert found[0]["setup"]["batch_size"] == 146  # 131,072 tokens
    assert found[1]["skipped_ids"] == [2000]


def test_simulate_says_what_to_do_with_samples_that_are_too_long(
    fails: Fails, folder: Path
) -> None:
    (folder / "l.txt").write_text("900\n" * 20 + "900000000\n")
    words = ["--model", "small.yaml", "--num-gpus", "4", "--lengths", "l.txt"]
    error = fails("simulate", *words)
    assert "remove or cut the samples" in error and "`lightning-dcp plan` can skip them" in error
    assert "lower --longest" in fails("plan", *SMALL[:4], "--longest", "900000000")


# ---------------------------------------------------------------------- what is said of results


@pytest.mark.parametrize("policies", ["naive,packed,dcp-intra", "dcp-intra"])
def test_options_of_the_planner_do_not_bind_baselines(
    capsys: pytest.CaptureFixture[str], policies: str
) -> None:
    note = "Options of the planner (--planning.sp_sizes) do not bind the baselines: naive, packed."
    words = ["simulate", *SMALL, "--policies", policies]
    for more, expected in (([], False), (["--planning.sp_sizes", "[2,4]"], "naive" in policies)):
        assert main([*words, *more]) == 0
        assert (note in capsys.readouterr().err) is expected


@pytest.mark.parametrize(
    ("efficiency", "end"),
    [(0.9, "it would take 10% less."), (0.995, "(packed: )."), (1.001, "(packed: ).")],
)
def test_what_is_left_to_gain(efficiency: float, end: str) -> None:
    def result(policy: str, speed: float) -> Any:
        return SimpleNamespace(
            policy=policy,
            tokens_per_s_per_rank=speed,
            efficiency=efficiency,
            epoch=None,
            setting="",
            sp_sizes={1: 0.5, 2: 0.5},
        )

    results = {"packed": result("packed", 1.0), "dcp-intra": result("dcp-intra", 1.2)}
    text = conclusion(results)
    assert text.endswith(end) and "1.20x" in text and "0%" not in text.replace("10%", "")


def test_lengths_that_memory_does_not_limit() -> None:
    costs: Any = SimpleNamespace(
        sp_sizes=(1, 2),
        num_blocks=8,
        fixed_bytes=10**9,
        memory_bytes=lambda b, s, p, r: 10**9 + (b * s * 1000 // p if r < 8 else 0),
    )
    prices = Prices(costs=costs, limit_bytes=2 * 10**9, exclusions={}, source="a test")
    assert longest_fitting(prices) == {1: ANY_LENGTH, 2: ANY_LENGTH}
    check_fits(10**14, prices)
    lines = memory_lines(prices, 1_500_000)
    assert "recomputed: p=1 1,000,000 / any; p=2 2,000,000 / any." in lines[1]

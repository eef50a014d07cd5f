"""The command as a user runs it: results, and one line for each mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_dcp.cli import build_parser, main
from lightning_dcp.planning.cost_model import Measurement
from lightning_dcp.planning.plan import Plan
from lightning_dcp.profiling.cache import ProfileCache
from lightning_dcp.profiling.cost_profile import CostProfile
from lightning_dcp.simulation import load_cluster, load_model

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--world-size", "4", "--num-samples", "200", "--longest", "8192", "--model", "small.yaml"]
QUICK = [*SMALL, "--policies", "naive,packed,dcp-intra"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a small model, the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text("base: llama-3-8b\nnum_blocks: 4\nvocab_size: 32e3\n")
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        status = main(list(words))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def fails(run: Run, *words: str) -> str:
    """The one line of an error."""
    status, out, err = run(*words)
    assert status == 2
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("lightning-dcp: error: ")]
    assert len(lines) == 1 and err.rstrip().endswith(lines[0])
    assert "Traceback" not in err
    return lines[0]


# ---------------------------------------------------------------------- simulate


def test_simulate_prints_policies_and_a_conclusion(run: Run) -> None:
    status, out, err = run("simulate", *QUICK)
    assert status == 0
    for policy in ("naive", "packed", "dcp-intra"):
        assert policy in out
    assert "as fast as" in out and "the best static plan (packed" in " ".join(out.split())
    assert "Simulated" in err and "[1/3] naive" in err and "Memory:" in err


def test_simulate_json_is_all_of_stdout(run: Run) -> None:
    status, out, err = run("simulate", *QUICK, "--json", "--scaling", "2,4", "--seed", "3")
    assert status == 0
    found = json.loads(out)
    assert found["setup"]["world_size"] == 4 and found["setup"]["num_samples"] == 200
    ours = found["policies"]["dcp-intra"]
    assert ours["speedup_over_naive"] > 1
    assert 0 < ours["efficiency"] <= 1 and 0 <= ours["idle_share"] < 1
    assert ours["hours_per_epoch"] > 0
    assert found["policies"]["naive"]["padding_share"] > 0
    assert [entry["world_size"] for entry in found["scaling"]] == [2, 4]
    assert "tokens/s/GPU" in err
    assert run("simulate", *QUICK, "--json", "--quiet")[2] == ""


def test_quiet_leaves_the_result(run: Run) -> None:
    status, out, err = run("simulate", *QUICK, "--quiet")
    assert status == 0 and err == "" and "dcp-intra" in out


def test_max_steps_and_batch_size(run: Run) -> None:
    words = [*QUICK, "--batch-size", "5", "--max-steps", "2", "--json"]
    found = json.loads(run("simulate", *words)[1])
    assert found["setup"]["steps_per_epoch"] == 10
    assert found["simulated_steps"] == 2
    assert {len(values["step_s"]) for values in found["policies"].values()} == {2}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plots(run: Run, folder: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    words = [*QUICK, "--plots", "new/plots", "--format", suffix, "--scaling", "2"]
    assert run("simulate", *words)[0] == 0
    names = {path.name for path in (folder / "new/plots").iterdir()}
    stems = ("policies", "scaling", "choices-dcp-intra", "timeline-dcp-intra")
    assert names == {f"{stem}.{suffix}" for stem in stems}


def test_a_size_that_does_not_fit_is_left_out_of_scaling(run: Run) -> None:
    words = ["--num-samples", "50", "--policies", "dcp-intra", "--cluster", "h100"]
    status, out, err = run("simulate", *words, "--world-size", "16", "--scaling", "1,16", "--json")
    assert status == 0
    assert [entry["world_size"] for entry in json.loads(out)["scaling"]] == [16]
    assert "W=1 is left out" in err


@pytest.mark.parametrize("command", ["simulate", "plan"])
@pytest.mark.parametrize("lengths", [[700], [512] * 40, [1], [3, 8000]])
@pytest.mark.parametrize("world_size", ["1", "3", "4"])
def test_unusual_data(
    run: Run, folder: Path, command: str, lengths: list[int], world_size: str
) -> None:
    (folder / "lengths.txt").write_text("".join(f"{n}\n" for n in lengths))
    words = ["--lengths", "lengths.txt", "--model", "small.yaml", "--world-size", world_size]
    plots = ["--plots", "plots"] if world_size == "3" else []
    status, out, err = run(command, *words, *plots, "--json")
    assert status == 0, err
    assert json.loads(out)["setup"]["num_samples"] == len(lengths)


def test_log_normal_and_mixes(run: Run) -> None:
    words = [*SMALL, "--policies", "dcp-intra", "--json", "--quiet"]
    for option in (["--log-normal", "1000", "1.2"], ["--mix", "long"]):
        found = json.loads(run("simulate", *words, *option)[1])
        assert 256 <= found["setup"]["shortest"] <= found["setup"]["longest"] <= 8192


def test_config_file(run: Run, folder: Path) -> None:
    (folder / "c.yaml").write_text(
        "num_gpus: 2\npolicies: [packed, dcp-intra]\nmemory: 60GiB\nnum_samples: 100\n"
        "longest: 4096\nmodel: small.yaml\nlog_normal: [900, 1.0]\nplanning: {max_batch_size: 3}\n"
    )
    found = json.loads(run("simulate", "--config", "c.yaml", "--json", "--seed", "1")[1])
    assert list(found["policies"]) == ["packed", "dcp-intra"]
    assert found["setup"]["memory_limit_bytes"] == 60 * 2**30
    assert found["setup"]["num_samples"] == 100
    (folder / "c.yaml").write_text("memory: much\n")
    assert "no amount of memory" in fails(run, "plan", "--config", "c.yaml")


# ---------------------------------------------------------------------- plan


def test_plan_prints_buckets(run: Run) -> None:
    status, out, err = run("plan", *SMALL)
    assert status == 0
    assert "buckets" in out and "iterations per epoch" in out and "predicted" in out
    assert "best static plan" in err


def test_iteration_as_table_picture_and_json(run: Run, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    words = [*SMALL, "--batch-size", "8", "--iteration", "2"]
    status, out, _ = run("plan", *words, "--plots", ".")
    assert status == 0 and "Iteration 2:" in out
    assert (folder / "timeline-dcp-intra-2.png").read_bytes().startswith(b"\x89PNG")
    plan = Plan.from_json(run("plan", *words, "--json")[1])
    assert plan.iteration == 2 and plan.world_size == 4


def test_iterations_are_one_plan_a_line(run: Run) -> None:
    words = [*SMALL, "--batch-size", "8", "--policy", "global-batch"]
    lines = run("plan", *words, "--iterations", ":", "--json")[1].splitlines()
    plans = [Plan.from_json(line) for line in lines]
    assert [plan.iteration for plan in plans] == list(range(7))
    samples = [i for plan in plans for m in plan.micro_batches for i in m.sample_ids]
    assert sorted(samples) == list(range(200))
    assert len(run("plan", *words, "--iterations", "2:4", "--json")[1].splitlines()) == 2


def test_too_long_samples_can_be_skipped(run: Run, folder: Path) -> None:
    (folder / "lengths.csv").write_text("name,length\n" + "a,900\n" * 20 + "b,900000000\n")
    words = ["--lengths", "lengths.csv", "--model", "small.yaml", "--num-gpus", "4"]
    assert "fits no configuration" in fails(run, "plan", *words)
    status, out, _ = run("plan", *words, "--planning.on_too_long", "skip")
    assert status == 0 and "1 samples that are too long are skipped" in out


# ---------------------------------------------------------------------- a measured profile


def measured() -> CostProfile:
    points = [
        Measurement(
            batch_size=b,
            seq_len=s,
            sp_size=p,
            forward_s=1e-6 * b * s / p + 1e-10 * b * s**2 / p + 1e-4,
            backward_s=2e-6 * b * s / p + 2e-10 * b * s**2 / p + 2e-4,
            rest_s=1e-6 * b * s / p,
            saved_bytes=4000 * b * s // p,
            input_bytes=200 * b * s // p,
            rest_bytes=3000 * b * s // p,
        )
        for b in (1, 2, 4)
        for s in (256, 1024, 4096, 8192)
        for p in (1, 2, 4)
    ]
    return CostProfile(
        measurements=tuple(points), num_blocks=8, fixed_bytes=10**9, fingerprint="a machine"
    )


def test_a_measured_profile_takes_the_place_of_model_and_cluster(run: Run, folder: Path) -> None:
    path = ProfileCache(folder).save(measured())
    words = ["--cost-profile", str(path), "--world-size", "4", "--num-samples", "100"]
    words += ["--longest", "8192"]
    status, out, _ = run("simulate", *words, "--memory", "2GiB", "--policies", "packed,dcp-intra")
    assert status == 0 and "dcp-intra" in out
    status, out, _ = run("plan", *words, "--memory", "2GiB")
    assert status == 0 and "held-out error" in out
    assert "--cost-profile needs --memory" in fails(run, "simulate", *words)
    assert path is not None
    path.write_text(path.read_text().replace("1000000000", "1000000001"))
    assert "checksum" in fails(run, "simulate", *words, "--memory", "2GiB")


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("length\n12\n", 1, "header"),
        ("12\n\n15\n", 2, "blank"),
        ("12\n0\n", 2, "'0' is no length"),
        ("12\n3\nmany\n", 3, "'many' is no number"),
        ("12\n-4\n", 2, "'-4'"),
    ],
)
def test_a_bad_line_is_named(run: Run, folder: Path, text: str, line: int, what: str) -> None:
    (folder / "lengths.txt").write_text(text)
    error = fails(run, "simulate", "--lengths", "lengths.txt")
    assert f"lengths.txt, line {line}:" in error and what in error


@pytest.mark.parametrize("command", ["simulate", "plan"])
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--lengths", "nowhere.txt"], "no file or directory nowhere.txt"),
        (["--model", "gpt-9"], "Presets: transformer-1d-5b"),
        (["--cluster", "b900"], "Presets: h200, h100, a100"),
        (["--cost-profile", "nowhere.json", "--memory", "2"], "nowhere.json"),
        (["--mix", "odd"], "short"),
        (["--mix", "long", "--log-normal", "5", "1"], "contradict each other"),
        (["--column", "x"], "--column"),
        (["--log-normal", "5", "-1"], "sigma"),
        (["--world-size", "0"], "--num-gpus must be at least 1"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--seed", "-1"], "--seed"),
        (["--memory", "much"], "no amount of memory"),
        (["--memory", "500GiB"], "more than"),
        (["--memory", "10GiB"], "GiB more than"),
        (["--world-size", "1", "--cluster", "a100"], "more than the"),
        (["--longest", "100000000"], "lacks"),
        (["--shortest", "9", "--longest", "8"], "shortest"),
        (["--num-samples", "3"], "num_samples must be at least"),
        (["--planning.max_buckets", "0"], "max_buckets"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--nonsense", "3"], "--nonsense"),
    ],
)
def test_mistakes_are_one_line(run: Run, command: str, words: list[str], what: str) -> None:
    assert what in fails(run, command, *words)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "command"),
        (["guess"], "guess"),
        (["simulate", "--policies", "naive,best"], "unknown policy 'best'. Known policies: dcp"),
        (["simulate", "--max-steps", "0"], "--max-steps"),
        (["simulate", "--scaling", "8,x"], "scaling"),
        (["plan", "--policy", "best"], "policy"),
        (["plan", *SMALL, "--iteration", "99"], "--iteration 99 does not exist"),
        (["plan", *SMALL, "--iterations", "5"], "0:10"),
        (["plan", *SMALL, "--iterations", "90:99"], "holds no iteration"),
        (["plan", *SMALL, "--epoch", "-1"], "--epoch"),
        (["plan", *SMALL, "--iteration", "1", "--iterations", ":"], "contradict"),
    ],
)
def test_mistakes_of_one_subcommand(run: Run, words: list[str], what: str) -> None:
    assert what in fails(run, *words)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("base: gpt-9\n", "Known models"),
        ("base: llama-3-8b\nblocks: 3\n", "unknown field blocks"),
        ("width: 512\n", "missing field num_blocks"),
        ("base: llama-3-8b\nwidth: wide\n", "width must be a number"),
        ("[1, 2\n", "neither JSON"),
        ("- 1\n", "must hold fields of a model"),
    ],
)
def test_model_files(run: Run, folder: Path, text: str, what: str) -> None:
    (folder / "model.yaml").write_text(text)
    error = fails(run, "plan", "--model", "model.yaml")
    assert "model.yaml" in error and what in error


def test_without_matplotlib(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = fails(run, "simulate", *QUICK, "--plots", "plots")
    assert "pip install 'lightning_dcp[plot]'" in error


def test_plots_into_what_cannot_be_written(run: Run, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    (folder / "file").write_text("")
    assert "Cannot write plots into file/x" in fails(run, "plan", *SMALL, "--plots", "file/x")
    assert "Cannot write plots" in fails(run, "plan", *SMALL, "--plots", "/proc/self")


def test_debug_raises() -> None:
    with pytest.raises(ValueError, match="gpt-9"):
        main(["plan", "--model", "gpt-9", "--debug"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("72", 72 * 2**30),
        ("72GiB", 72 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("80GB", 80 * 10**9),
        ("77309411328", 77309411328),
        ("8e10", 8 * 10**10),
        ("512MiB", 2**29),
    ],
)
def test_memory(text: str, expected: int) -> None:
    assert build_parser().parse_args(["plan", "--memory", text]).plan.memory == expected


# ---------------------------------------------------------------------- without torch


def imported(words: list[str]) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run a command with Python's import log; the top-level packages it imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    log = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    return result, {line.rsplit("|", 1)[1].strip().split(".")[0] for line in log}


def test_the_command_does_not_import_torch(folder: Path) -> None:
    # What an installer writes for an entry of [project.scripts].
    script = folder / "lightning-dcp"
    script.write_text(
        "import sys\nfrom lightning_dcp.cli import main\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n"
    )
    words = ["--num-samples", "60", "--longest", "8192", "--world-size", "2", "--json"]
    words += ["--model", "small.yaml"]
    for start in (["-m", "lightning_dcp"], [str(script)]):
        for command in ("plan", "simulate"):
            more = [] if command == "plan" else ["--policies", "dcp-intra", "--plots", "plots"]
            result, packages = imported([*start, command, *words, *more])
            assert result.returncode == 0, result.stderr[-3000:]
            assert json.loads(result.stdout)
            assert "numpy" in packages
            assert not packages & {"torch", "lightning", "deepspeed", "torchmetrics"}


def test_importing_the_package_registers_strategies() -> None:
    code = (
        "import lightning_dcp; from lightning.pytorch.strategies import StrategyRegistry as R;"
        "assert {'dcp', 'dcp_ddp'} <= set(R);"
        "assert all(hasattr(lightning_dcp, name) for name in lightning_dcp.__all__)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("argv", "orig_argv", "expected"),
    [
        (["/venv/bin/lightning-dcp", "plan"], ["python"], True),
        (["C:/venv/Scripts/lightning-dcp.exe"], ["python"], True),
        (["-m", "plan"], ["python", "-m", "lightning_dcp", "plan"], True),
        (["-m"], ["python", "-W", "error", "-mlightning_dcp"], True),
        (["/src/lightning_dcp/__main__.py"], ["python", "-m", "coverage"], True),
        (["-m", "tests"], ["python", "-m", "pytest", "-m", "lightning_dcp"], False),
        (["train.py", "lightning-dcp"], ["python", "train.py"], False),
        (["/venv/bin/pytest"], ["python"], False),
        (["-c"], ["python", "-c", "import lightning_dcp"], False),
        ([""], ["python"], False),
        ([], ["python"], False),
        (["/home/lightning-dcp/train.py"], ["python"], False),
        (["/site/pytest/__main__.py"], ["python", "-m", "pytest"], False),
    ],
)
def test_which_process_is_the_command(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], orig_argv: list[str], expected: bool
) -> None:
    from lightning_dcp.command_process import is_command

    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert is_command() is expected


def test_a_plan_for_more_ranks_than_can_be_drawn(folder: Path, run: Run) -> None:
    pytest.importorskip("matplotlib")
    words = [*SMALL, "--world-size", "128", "--num-samples", "400", "--iteration", "0"]
    assert run("plan", *words, "--plots", ".", "--format", "svg")[0] == 0
    assert (folder / "timeline-dcp-intra-0.svg").exists()


def test_options_reach_the_plan(run: Run) -> None:
    words = [*SMALL, "--planning.sp_sizes", "[2]", "--json"]
    found = json.loads(run("plan", *words)[1])
    assert {bucket["sp_size"] for bucket in found["buckets"]} == {2}
    assert any("not among the allowed" in text for text in found["exclusions"])


def test_files_shown_in_the_docs_are_read(folder: Path) -> None:
    page = (ROOT / "docs" / "simulator.md").read_text()
    model, cluster = re.findall(r"^```yaml\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    (folder / "model.yaml").write_text(model)
    (folder / "cluster.yaml").write_text(cluster)
    assert load_model("model.yaml").num_blocks == 16
    assert load_cluster("cluster.yaml").usable_memory_bytes == 120 * 10**9

"""`benchmarks/paper/reproduce.py --quick` as a user starts it: all files, sane figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ("figure-8-1d", "figure-8-2d", "figure-9", "figure-10", "planners")
MOST = 1.01  # the bound of the efficiency tries fewer micro-batch sizes than plans have


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_the_papers_figures_are_made_again(tmp_path: Path) -> None:
    docs, figures = tmp_path / "docs", tmp_path / "figures.json"
    result = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "paper" / "reproduce.py"),
            *("--quick", f"--docs={docs}", f"--json={figures}"),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=160,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-8000:]}"
    for name in PICTURES:
        assert (docs / "paper" / f"{name}.png").stat().st_size > 10_000
    text = (docs / "paper-reproduction.md").read_text(encoding="utf-8")
    for name in PICTURES:
        assert f"(paper/{name}.png)" in text
    assert "nan" not in text.lower().split() and "inf" not in text.lower().split()

    raw = json.loads(figures.read_text())
    assert {key.split()[0] for key in raw["figure_8"]} == {"1D", "2D"}
    for policies in raw["figure_8"].values():
        seconds = {name: figures_of["total_s"] for name, figures_of in policies.items()}
        for static in ("naive", "naive-bucketed", "tuned", "packed", "karmarkar-karp"):
            assert seconds["dcp-intra"] < seconds[static]
        assert seconds["dcp-intra"] < seconds["dcp-inter"]
        assert seconds["naive-bucketed"] < seconds["naive"]
        for figures_of in policies.values():
            assert 0.0 < figures_of["efficiency"] <= MOST
            assert 0.0 <= figures_of["idle_share"] < 1.0
        for ours in ("dcp-intra", "global-batch"):
            assert policies[ours]["efficiency"] > 0.9
    for policies in raw["planners"].values():
        assert policies["global-batch"]["total_s"] < policies["megatron"]["total_s"]
    for sizes in raw["figure_9"].values():
        speeds = [own["dcp-intra"]["tokens_per_s_per_rank"] for own in sizes.values()]
        assert min(speeds) > 0.9 * speeds[0]
    gains = {int(length): gain for length, gain in raw["figure_10"].items()}
    assert all(-0.001 <= gain < 0.5 for gain in gains.values())
    assert gains[1024] > gains[max(gains)]
    for what, target, _, _ in raw["bars"]:
        assert f"| {what} | {target} |" in text
        assert f"| {what} | {target} |" in result.stdout

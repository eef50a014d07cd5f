"""`benchmarks/two_ranks.py` as a user starts it, but tiny: its seconds say nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
POLICIES = ("bucket", "dcp-intra", "global-batch")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_all_policies_train_on_the_same_samples(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    result = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "two_ranks.py"),
            *("--policies", *POLICIES),
            *("--repeats=1", "--steps=2", "--profile-seconds=1", f"--json={figures}"),
            *("--channels=16", "--depth=2"),
        ],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-8000:]}"
    raw = json.loads(figures.read_text())
    assert tuple(raw) == POLICIES
    for figures_of in raw.values():
        assert figures_of["epoch_s"][0] > 0.0
        assert figures_of["predicted_epoch_s"] > 0.0
        assert len(figures_of["losses"]) == len(figures_of["iteration_errors"]) == 2
    # With the weights held still, the mean loss over all tokens does not depend on the policy.
    still = [figures_of["still_loss"] for figures_of in raw.values()]
    assert still == pytest.approx([still[0]] * len(still), rel=1e-6)
    # The longest sample fits on no rank alone, so static plans share all samples.
    for policy in POLICIES:
        sp_sizes = set(raw[policy]["sp_sizes"])
        assert sp_sizes == {2} if policy == "bucket" else 2 in sp_sizes
    assert "bucket / it" in result.stdout

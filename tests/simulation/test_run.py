"""Policies side by side on a modelled cluster: the bars that this planner is held to."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from lightning_dcp.simulation import RooflineCosts, cluster_named, model_named, paper_mix
from lightning_dcp.simulation.run import PolicyResult, Scenario, known_policies, simulate

SETTINGS = [
    (model, mix)
    for model in ("transformer-1d-5b", "transformer-2d-1.2b")
    for mix in ("short", "balanced", "long")
]
# Longest sample and tokens per GPU and step, as in the reproduction of the paper.
SIZES = {"transformer-1d-5b": (2**20, 131_072), "transformer-2d-1.2b": (2**21, 524_288)}


def scenario(model: str, mix: str, world_size: int, steps: int) -> Scenario:
    cluster = dataclasses.replace(cluster_named("h200"), usable_memory_bytes=80 * 10**9)
    costs = RooflineCosts(model=model_named(model), cluster=cluster, world_size=world_size)
    limit = costs.memory_limit_bytes
    longest, tokens = SIZES[model]
    values = {"shortest": 1024, "longest": longest, "limit_bytes": limit}
    mean = paper_mix(mix, costs, num_samples=20_000, **values).lengths.mean()
    batch_size = max(1, round(tokens / mean))
    num_samples = world_size * batch_size * steps
    return Scenario(
        lengths=paper_mix(mix, costs, num_samples=num_samples, **values).lengths,
        costs=costs,
        world_size=world_size,
        limit_bytes=limit,
        batch_size=batch_size,
        sp_size_exclusions=costs.sp_size_exclusions,
    )


@cache
def results(model: str, mix: str) -> dict[str, PolicyResult]:
    return simulate(scenario(model, mix, 32, 16), ["dcp-intra", "global-batch", "dcp-inter"])


@pytest.mark.parametrize(("model", "mix"), SETTINGS)
@pytest.mark.parametrize("policy", ["dcp-intra", "global-batch"])
def test_close_to_the_bound(model: str, mix: str, policy: str) -> None:
    result = results(model, mix)[policy]
    assert 0.97 <= result.efficiency <= 1.001
    assert result.idle_share <= 0.02
    assert result.padding_share < 0.02


@pytest.mark.parametrize(("model", "mix"), SETTINGS)
def test_recomputation_where_needed_only(model: str, mix: str) -> None:
    intra, inter = results(model, mix)["dcp-intra"], results(model, mix)["dcp-inter"]
    assert inter.recompute_share == pytest.approx(1)
    assert intra.recompute_share < 0.9
    assert intra.total_s < inter.total_s


@pytest.mark.parametrize(
    ("model", "mix", "over_naive", "over_tuned"),
    [
        ("transformer-1d-5b", "short", 2.88, 1.45),
        ("transformer-1d-5b", "balanced", 2.88, 1.45),
        pytest.param("transformer-2d-1.2b", "short", 1.68, 1.45, marks=pytest.mark.slow),
    ],
)
def test_faster_than_static_plans(
    model: str, mix: str, over_naive: float, over_tuned: float
) -> None:
    # Out of a whole epoch: a mix of few samples has too large a share of its longest.
    case = dataclasses.replace(scenario(model, mix, 32, 24), max_steps=5)
    found = simulate(case, ["dcp-intra", "naive", "tuned"])
    assert found["naive"].total_s >= over_naive * found["dcp-intra"].total_s
    assert found["tuned"].total_s >= over_tuned * found["dcp-intra"].total_s


@pytest.mark.slow
def test_all_policies_have_the_same_samples() -> None:
    lengths = np.random.default_rng(0).integers(1000, 40_000, 64)
    cluster = cluster_named("h100")
    costs = RooflineCosts(model=model_named("open-sora-1.1b"), cluster=cluster, world_size=8)
    case = Scenario(
        lengths=lengths,
        costs=costs,
        world_size=8,
        limit_bytes=costs.memory_limit_bytes,
        batch_size=2,
        sp_size_exclusions=costs.sp_size_exclusions,
    )
    names = [name for name in known_policies() if name != "flexsp"]
    found = simulate(case, names)
    assert list(found) == names
    for result in found.values():
        assert result.num_tokens == lengths.sum()
        assert len(result.step_s) == 4
        assert sum(result.sp_sizes.values()) == pytest.approx(1)
        assert result.total_s * 1.001 >= result.bound_s
    part = simulate(dataclasses.replace(case, max_steps=2), ["global-batch", "tuned"])
    assert part["global-batch"].num_tokens == part["tuned"].num_tokens < lengths.sum()
    epoch = part["global-batch"].epoch
    assert epoch is not None
    tokens = [int(lengths[window].sum()) for window in case.windows()]
    assert epoch.tokens_per_step.tolist() == tokens[:2], "step by step"


def test_wrong_input() -> None:
    case = scenario("transformer-1d-5b", "short", 32, 1)
    with pytest.raises(ValueError, match=r"Unknown policy 'fsdp'. Known policies: dcp-inter"):
        simulate(case, ["fsdp"])
    with pytest.raises(ValueError, match="batch_size must be at least 1; got 0"):
        dataclasses.replace(case, batch_size=0)

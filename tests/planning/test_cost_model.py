"""Cost model: formulas, fit, held-out errors, recomputation, round trip."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lightning_dcp.planning import BlockCosts, CostModel, Measurement, fit_cost_model
from lightning_dcp.planning import cost_model as module
from lightning_dcp.planning.stack_terms import recompute_order
from tests.planning.costs import FIXED_BYTES, NUM_BLOCKS, cost_model, grid, measure

UNSEEN = [(2, 1000, 1), (3, 200, 2), (8, 64, 4), (1, 9000, 1), (1, 60000, 4), (64, 32, 2)]


def test_recovers_a_synthetic_law_inside_and_outside_the_measured_range() -> None:
    model = cost_model()
    for b, s, p in UNSEEN:
        true = measure(b, s, p)
        assert model.forward_s(b, s, p) == pytest.approx(true.forward_s, rel=0.02)
        assert model.backward_s(b, s, p) == pytest.approx(true.backward_s, rel=0.02)
        assert model.saved_bytes(b, s, p) == pytest.approx(true.saved_bytes, rel=1e-3)
        assert model.input_bytes(b, s, p) == pytest.approx(true.input_bytes, rel=1e-3)
        assert model.rest_bytes(b, s, p) == pytest.approx(true.rest_bytes, rel=1e-3)


def test_exact_at_measured_points_even_where_the_law_does_not_hold() -> None:
    points = grid(noise=0.3)
    model = fit_cost_model(points, num_blocks=4, fixed_bytes=0)
    for m in points:
        key = (m.batch_size, m.seq_len, m.sp_size)
        assert model.forward_s(*key) == pytest.approx(m.forward_s, rel=1e-6)
        assert model.backward_s(*key) == pytest.approx(m.backward_s, rel=1e-6)
        assert model.rest_s(*key) == pytest.approx(m.rest_s, rel=1e-6)
        assert model.saved_bytes(*key) >= m.saved_bytes
        assert model.input_bytes(*key) >= m.input_bytes
        assert model.rest_bytes(*key) >= m.rest_bytes


def test_time_and_memory_follow_the_formulas() -> None:
    model = cost_model()
    b, s, p = 2, 1000, 2
    forward, backward = model.forward_s(b, s, p), model.backward_s(b, s, p)
    saved, inputs = model.saved_bytes(b, s, p), model.input_bytes(b, s, p)
    for r in (0, 3, NUM_BLOCKS):
        time_s = NUM_BLOCKS * (forward + backward) + r * forward + model.rest_s(b, s, p)
        assert model.time_s(b, s, p, r) == pytest.approx(time_s)
        live = max(NUM_BLOCKS - r, 1)
        memory = live * saved + NUM_BLOCKS * inputs + model.rest_bytes(b, s, p) + FIXED_BYTES
        assert model.memory_bytes(b, s, p, r) == pytest.approx(memory, abs=1.0)


def test_vectorised_equals_one_by_one() -> None:
    model = cost_model()
    b, s, p = (np.array(column) for column in zip(*UNSEEN, strict=True))
    r = np.arange(len(UNSEEN)) % (NUM_BLOCKS + 1)
    times, memory = model.time_s(b, s, p, r), model.memory_bytes(b, s, p, r)
    limits = model.min_recompute(b, s, p, 30_000_000)
    for i, key in enumerate(UNSEEN):
        assert times[i] == pytest.approx(float(model.time_s(*key, r[i])), rel=1e-12)
        assert memory[i] == model.memory_bytes(*key, r[i])
        assert limits[i] == model.min_recompute(*key, 30_000_000)
    assert model.time_s(np.array([[1], [2]]), np.array([64, 128, 256]), 1).shape == (2, 3)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_costs_grow_with_batch_size_and_length(noise: float) -> None:
    model = fit_cost_model(grid(noise=noise), num_blocks=8, fixed_bytes=0)
    b, s = 2 ** np.arange(8), 2 ** np.arange(5, 17)
    for p in model.sp_sizes:
        for costs in (model.time_s(b[:, None], s, p), model.memory_bytes(b[:, None], s, p)):
            assert (np.diff(costs, axis=0) >= 0).all()
            assert (np.diff(costs, axis=1) >= 0).all()


def test_min_recompute_is_the_smallest_that_fits() -> None:
    model = cost_model()
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        b, p = int(rng.integers(1, 40)), int(rng.choice([1, 2, 4]))
        s = int(rng.integers(16, 16384))
        limit = FIXED_BYTES + int(10 ** rng.uniform(5, 9.5))
        fits = [r for r in range(NUM_BLOCKS + 1) if model.memory_bytes(b, s, p, r) <= limit]
        expected = fits[0] if fits else -1
        assert model.min_recompute(b, s, p, limit) == expected
        seen.add(expected)
    assert {0, -1} < seen and len(seen) > 6, "limits should need various r"


def test_recomputation_at_the_very_limit() -> None:
    model = cost_model()
    for r in range(NUM_BLOCKS):
        limit = int(model.memory_bytes(2, 3000, 1, r))
        assert model.min_recompute(2, 3000, 1, limit) == r
        below = model.min_recompute(2, 3000, 1, limit - 1)
        assert below == (r + 1 if r + 1 < NUM_BLOCKS else -1)


def test_held_out_errors_do_not_use_the_points_fitted() -> None:
    clean = fit_cost_model(grid(), num_blocks=8, fixed_bytes=0).held_out
    assert clean.num_points == len(grid())
    assert clean.median_time is not None and clean.median_time < 0.05
    # At points it has seen the model is exact, whatever they are. So points without any law have
    # errors only if they are held out.
    wild = fit_cost_model(grid(noise=1.0), num_blocks=8, fixed_bytes=0)
    assert wild.held_out.median_time is not None and wild.held_out.median_time > 0.1
    for m in wild.measurements:
        total = 8 * (m.forward_s + m.backward_s) + m.rest_s
        assert wild.time_s(m.batch_size, m.seq_len, m.sp_size) == pytest.approx(total, rel=1e-6)


def test_held_out_fits_never_see_their_test_points(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[object, ...]] = []
    real = module._fit

    def spy(points, *args):  # type: ignore[no-untyped-def]
        trained.append(tuple(points))
        return real(points, *args)

    monkeypatch.setattr(module, "_fit", spy)
    points = grid()
    model = fit_cost_model(points, num_blocks=8, fixed_bytes=0)
    whole, *folds = trained
    assert len(whole) == len(points)
    left_out = [set(whole) - set(fold) for fold in folds]
    assert all(left_out)
    assert sum(map(len, left_out)) == len(points) == model.held_out.num_points
    assert set.union(*left_out) == set(points)


def test_outlier_shows_in_the_95th_percentile() -> None:
    points = grid()
    bad = dataclasses.replace(points[5], forward_s=points[5].forward_s * 5)
    model = fit_cost_model([*points[:5], bad, *points[6:]], num_blocks=8, fixed_bytes=0)
    assert model.held_out.p95_time is not None and model.held_out.p95_time > 0.2


def test_json_round_trip_and_fingerprint() -> None:
    model = fit_cost_model(grid(noise=0.1), num_blocks=8, fixed_bytes=123, step_overhead_s=0.1)
    again = CostModel.from_json(model.to_json())
    assert again == model and hash(again) == hash(model)
    assert again.fingerprint() == model.fingerprint()
    assert again.time_s(3, 700, 2, 1) == model.time_s(3, 700, 2, 1)
    assert dataclasses.replace(model, fixed_bytes=124).fingerprint() != model.fingerprint()


def test_order_of_measurements_does_not_matter() -> None:
    points = grid(noise=0.1)
    models = [fit_cost_model(x, num_blocks=8, fixed_bytes=0) for x in (points, points[::-1])]
    assert models[0].fingerprint() == models[1].fingerprint()


def test_one_point_is_enough_to_predict_but_has_no_error() -> None:
    model = fit_cost_model([measure(1, 512, 1)], num_blocks=8, fixed_bytes=0)
    assert model.held_out.num_points == 0 and model.held_out.median_time is None
    assert model.time_s(1, 512, 1) > 0
    assert CostModel.from_json(model.to_json()) == model


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match=r"SP size 8 was not measured; known: \[1, 2, 4\]"):
        cost_model().time_s(1, 64, 8)
    with pytest.raises(ValueError, match="at least one measurement"):
        fit_cost_model([], num_blocks=8, fixed_bytes=0)
    with pytest.raises(ValueError, match="num_blocks must be at least 1"):
        fit_cost_model(grid(), num_blocks=0, fixed_bytes=0)
    with pytest.raises(ValueError, match="forward_s must be finite"):
        dataclasses.replace(measure(1, 64, 1), forward_s=float("nan"))
    with pytest.raises(ValueError, match="power of two"):
        dataclasses.replace(measure(1, 64, 1), sp_size=3)


# ---- several stacks of blocks --------------------------------------------------------------------


def measured_stacks(b: int, s: int, p: int, *, frozen: bool = False) -> Measurement:
    """As `measure`, with a second stack that sees 50 tokens of every sample, not s."""
    tower = BlockCosts(
        forward_s=3e-4 + 2e-5 * b / p,
        backward_s=0.0 if frozen else 5e-4 + 4e-5 * b / p,
        saved_bytes=0.0 if frozen else 90_000.0 * b / p,
        input_bytes=6_000.0 * b / p,
    )
    return dataclasses.replace(measure(b, s, p), others=(tower,))


def stacked(frozen: bool = False, **options) -> CostModel:
    points = [measured_stacks(m.batch_size, m.seq_len, m.sp_size, frozen=frozen) for m in grid()]
    return fit_cost_model(points, num_blocks=(8, 3), fixed_bytes=FIXED_BYTES, **options)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_stacks_are_separate_terms(order):
    model = stacked(order=order)
    assert model.num_blocks == 11
    b, s, p = 3, 700, 2
    point = measured_stacks(b, s, p)
    main, tower = point.stacks
    for r in range(12):
        in_first = min(r, (8, 3)[order[0]])
        recomputed = {order[0]: in_first, order[1]: r - in_first}
        time = point.rest_s
        memory = point.rest_bytes + FIXED_BYTES
        live = 0.0
        for i, (number, block) in enumerate([(8, main), (3, tower)]):
            time += number * (block.forward_s + block.backward_s)
            time += recomputed[i] * block.forward_s
            memory += (number - recomputed[i]) * block.saved_bytes + number * block.input_bytes
            live = max(live, block.saved_bytes if recomputed[i] == number else 0.0)
        assert float(model.time_s(b, s, p, r)) == pytest.approx(time, rel=1e-3)
        assert float(model.memory_bytes(b, s, p, r)) == pytest.approx(memory + live, rel=1e-3)


def test_smallest_recompute_over_stacks():
    rng = np.random.default_rng(4)
    for order in [(0, 1), (1, 0)]:
        model = stacked(order=order)
        for _ in range(40):
            b, s, p = int(rng.integers(1, 9)), int(rng.integers(20, 9000)), int(rng.choice([1, 2]))
            all_r = np.arange(12)
            memory = model.memory_bytes(b, s, p, all_r)
            assert (np.diff(memory) <= 0).all()
            limit = int(rng.integers(int(memory[-1] * 0.9), int(memory[0] * 1.1)))
            fitting = all_r[memory <= limit]
            expected = int(fitting[0]) if len(fitting) else -1
            assert int(model.min_recompute(b, s, p, limit)) == expected


def test_stacks_are_recomputed_by_bytes_per_second():
    points = [measured_stacks(1, s, 1) for s in (64, 512)]
    assert recompute_order(points) == (1, 0)  # 90,000 bytes in 0.3 ms
    assert recompute_order([measured_stacks(1, s, 1, frozen=True) for s in (64, 512)]) == (0, 1)
    model = stacked(frozen=True)
    assert model.recompute_order == (0, 1)
    # No backward comes to a frozen stack, so that nothing of it runs again.
    assert model.time_s(1, 512, 1, 11) == model.time_s(1, 512, 1, 8)
    again = CostModel.from_json(model.to_json())
    assert again == model
    assert again.fingerprint() == model.fingerprint()


def test_wrong_stacks():
    points = [measured_stacks(1, s, 1) for s in (64, 512)]
    with pytest.raises(ValueError, match="must be of 1 stacks"):
        fit_cost_model(points, num_blocks=3, fixed_bytes=0)
    with pytest.raises(ValueError, match=r"\(0, 0\) is no order of 2 stacks"):
        fit_cost_model(points, num_blocks=(3, 2), fixed_bytes=0, order=(0, 0))

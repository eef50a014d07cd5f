"""Which points are measured, and what they are expected to cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dcp.profiling.grid import (
    Forecast,
    Trial,
    between,
    choose_lengths,
    climb,
    mandatory_trials,
    widen,
)
from lightning_dcp.profiling.options import ProfilingOptions

DEFAULTS = ProfilingOptions()


@given(st.lists(st.integers(1, 50_000), min_size=1, max_size=200))
def test_chosen_lengths_occur_and_reach_the_longest(values: list[int]) -> None:
    lengths = np.array(values)
    chosen = choose_lengths(lengths, DEFAULTS)
    assert list(chosen) == sorted(set(chosen))
    assert set(chosen) <= set(values)
    assert chosen[-1] == max(values)
    assert len(chosen) >= min(3, len(set(values)))


def test_lengths_are_spread_in_log() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1.5, size=5000).astype(int) + 1
    chosen = choose_lengths(lengths, DEFAULTS)
    ratios = np.array(chosen[1:]) / np.array(chosen[:-1])
    assert 6 <= len(chosen) <= 8
    assert ratios.max() < 1.6 * ratios.min()


def test_given_lengths_take_precedence() -> None:
    options = ProfilingOptions(lengths=(8, 16, 32))
    assert choose_lengths(np.arange(1, 1000), options) == (8, 16, 32)


def test_order_of_trials() -> None:
    assert mandatory_trials((8, 16, 32, 64), (1,), 100) == (
        Trial(1, 8, 1),
        Trial(2, 8, 1),
        Trial(1, 16, 1),
        Trial(2, 16, 1),
        Trial(1, 32, 1),
        Trial(2, 32, 1),
    )
    assert all(trial.batch_size == 1 for trial in mandatory_trials((8, 16, 32), (1,), 1))
    assert {t.seq_len for t in mandatory_trials((4, 8, 16, 32), (1, 4), 9) if t.sp_size == 4} == {
        8,
        16,
        32,
    }
    lengths = {t.seq_len for t in mandatory_trials(range(10, 18), (1,), 9)}
    assert lengths == {10, 11, 12, 14}, "also one that is not next to the others"
    assert list(climb((2, 64), (1, 2, 4))) == [
        Trial(1, 2, 1),
        Trial(1, 64, 1),
        Trial(1, 64, 2),
        Trial(1, 64, 4),
    ]


def test_short_sequences_get_larger_batches() -> None:
    trials = list(widen((16, 128, 1024), (1,), num_samples=1000))
    sizes = {s: sorted(t.batch_size for t in trials if t.seq_len == s) for s in (16, 128, 1024)}
    assert sizes == {16: [2, 8, 64], 128: [2, 4, 8], 1024: [2]}
    assert [t.batch_size for t in trials[:3]] == [2, 2, 2]  # breadth first
    assert max(t.batch_size for t in widen((16, 128, 1024), (1,), num_samples=5)) <= 5
    assert list(widen((), (1,), 10)) == []
    assert list(widen((16,), (1,), 1)) == []


def test_lengths_between() -> None:
    lengths = np.array([10, 20, 30, 1000, 2000, 5000])
    assert between(lengths, 20, 2000) == (30, 1000)
    assert between(lengths, 30, 1000) == ()


class TestForecast:
    @staticmethod
    def cost(trial: Trial) -> float:
        tokens = trial.batch_size * trial.seq_len / trial.sp_size
        return 1e-3 + 1e-6 * tokens + 1e-9 * tokens * trial.seq_len

    @pytest.fixture
    def forecast(self) -> Forecast:
        forecast = Forecast()
        for length in (100, 400, 1600):
            for batch_size in (1, 2):
                trial = Trial(batch_size, length, 1)
                forecast.add(trial, self.cost(trial))
        return forecast

    @pytest.mark.parametrize("trial", [Trial(1, 6400, 1), Trial(64, 100, 1), Trial(1, 100, 1)])
    def test_predicts_with_a_margin(self, forecast: Forecast, trial: Trial) -> None:
        assert forecast.predict(trial) == pytest.approx(1.25 * self.cost(trial), rel=1e-3)

    def test_a_mask_from_two_samples_on(self) -> None:
        def cost(trial: Trial) -> float:
            mask = 4e-9 * trial.batch_size * trial.seq_len**2
            return self.cost(trial) + (mask if trial.batch_size > 1 else 0.0)

        forecast = Forecast()
        for trial in (Trial(b, s, 1) for s in (100, 400, 1600) for b in (1, 2)):
            forecast.add(trial, cost(trial))
        for trial in (Trial(1, 6400, 1), Trial(3, 6400, 1)):
            assert forecast.predict(trial) == pytest.approx(1.25 * cost(trial), rel=1e-3)

    def test_an_unknown_sp_size_gains_nothing(self, forecast: Forecast) -> None:
        assert forecast.predict(Trial(2, 1000, 4)) == forecast.predict(Trial(2, 1000, 1))

    def test_a_known_sp_size_has_its_own_fit(self, forecast: Forecast) -> None:
        for length in (100, 400, 1600):
            forecast.add(Trial(1, length, 2), 3 * self.cost(Trial(1, length, 2)))
        predicted = forecast.predict(Trial(1, 6400, 2))
        assert predicted == pytest.approx(3.75 * self.cost(Trial(1, 6400, 2)), rel=1e-3)

    def test_few_points_predict_quadratic_growth(self) -> None:
        forecast = Forecast()
        assert forecast.predict(Trial(1, 100, 1)) is None
        forecast.add(Trial(1, 100, 1), 2.0)
        assert forecast.predict(Trial(1, 1000, 1)) == pytest.approx(1.25 * 200.0)
        assert forecast.predict(Trial(2, 1000, 2)) == pytest.approx(1.25 * 400.0)
        assert forecast.predict(Trial(1, 10, 1)) == pytest.approx(1.25 * 2.0)

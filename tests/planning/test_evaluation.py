"""Plans of evaluation: every sample once, within memory, as many batches on all ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dcp.planning.evaluation import EvaluationPlanner
from lightning_dcp.planning.evaluation_memory import (
    EvaluationMemory,
    MeasuredBytes,
    fit_bytes,
    largest_batch,
    longest_length,
)

MEMORY = EvaluationMemory(
    1000, {1: (50.0, 5.0, 20.0, 0.5), 2: (50.0, 5.0, 11.0, 0.25), 4: (50.0, 5.0, 6.0, 0.12)}
)


def bytes_of(length: int, sp_size: int) -> int:
    return MEMORY.num_bytes(1, -(-length // sp_size) * sp_size, sp_size)


def planner(lengths: list[int], limit: int | None = None, **options: object) -> EvaluationPlanner:
    defaults: dict[str, object] = {"batch_size": 2, "world_size": 4}
    if limit is not None:
        defaults |= {"memory": MEMORY, "limit_bytes": limit}
    return EvaluationPlanner(
        lengths=np.array(lengths),
        **{**defaults, **options},  # type: ignore[arg-type]
    )


@st.composite
def problems(draw: st.DrawFn) -> dict[str, object]:
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=40))
    world_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    largest_p = max(p for p in (1, 2, 4) if p <= world_size)
    # From what the longest needs on all ranks to more than it needs on one; the shortest always
    # fits on one rank, so that no rank of 3 or 6 is left over.
    least = max(bytes_of(max(lengths), largest_p), bytes_of(min(lengths), 1))
    limit = draw(st.integers(least, least + 6000))
    return {
        "lengths": np.array(lengths),
        "batch_size": draw(st.integers(1, 5)),
        "world_size": world_size,
        "memory": EvaluationMemory(
            1000, {p: c for p, c in MEMORY.coefficients.items() if p <= largest_p}
        ),
        "limit_bytes": limit,
        "pad_multiple": 1,
        "max_batch_size": draw(st.sampled_from([None, 1, 3])),
        "in_order": draw(st.booleans()),
    }


@given(problems())
@settings(max_examples=150, deadline=None)
def test_every_sample_once_within_memory_and_in_lockstep(problem: dict[str, object]) -> None:
    plan = EvaluationPlanner(**problem)  # type: ignore[arg-type]
    world_size = plan.world_size
    batches = [plan.batch(i) for i in range(plan.num_batches)]
    counted = []
    for batch in batches:
        shares = [batch.for_rank(rank) for rank in range(world_size)]  # nobody is idle
        for rank, share in enumerate(shares):
            micro_batch = share.micro_batch
            assert rank in micro_batch.ranks
            needed = plan._memory.num_bytes(  # type: ignore[union-attr]
                micro_batch.batch_size, micro_batch.seq_len, micro_batch.sp_size
            )
            assert micro_batch.est_bytes == needed <= problem["limit_bytes"]
            assert micro_batch.batch_size <= (problem["max_batch_size"] or 10**9)
            # All ranks of a group run the same thing, under the same random numbers.
            assert all(shares[r].micro_batch == micro_batch for r in micro_batch.ranks)
            assert len({shares[r].index for r in micro_batch.ranks}) == 1
            if share.counts:
                counted.extend(micro_batch.sample_ids)
    assert sorted(counted) == list(range(len(plan.lengths)))
    for index, length in enumerate(plan.lengths.tolist()):
        smallest = next(
            p
            for p in sorted(plan._memory.coefficients)  # type: ignore[union-attr]
            if bytes_of(length, p) <= problem["limit_bytes"]
        )
        sizes = {m.sp_size for b in batches for m in b.plan.micro_batches if index in m.sample_ids}
        assert sizes == {smallest}


@given(problems())
@settings(max_examples=50, deadline=None)
def test_windows_are_those_of_ddp(problem: dict[str, object]) -> None:
    plan = EvaluationPlanner(**problem)  # type: ignore[arg-type]
    per_window = plan.batch_size * plan.world_size
    windows = [
        {i // per_window for m in plan.batch(k).plan.micro_batches for i in m.sample_ids}
        for k in range(plan.num_batches)
    ]
    assert all(len(window) == 1 for window in windows)
    order = [window.pop() for window in windows]
    assert order == sorted(order)


def best_cut(lengths: list[int], slots: int) -> int:
    """Least largest b * s by trying all partitions of the sorted lengths."""
    best = max(lengths) * len(lengths)
    ordered = sorted(lengths)
    for cuts in range(min(slots, len(ordered))):
        for ends in itertools.combinations(range(1, len(ordered)), cuts):
            parts = itertools.pairwise([0, *ends, len(ordered)])
            best = min(best, max((b - a) * ordered[b - 1] for a, b in parts))
    return best


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_the_largest_padded_size_is_least(lengths: list[int]) -> None:
    plan = planner(lengths)
    assert plan.num_batches == 1
    micro_batches = plan.batch(0).plan.micro_batches
    assert max(m.padded_tokens for m in micro_batches) == best_cut(lengths, 4)
    # No rank repeats while another has two samples.
    assert len(micro_batches) == min(4, len(lengths))


def test_without_lengths_it_is_what_ddp_takes() -> None:
    plan = planner([1] * 16)
    assert plan.num_batches == plan.num_windows == 2
    assert [m.batch_size for m in plan.batch(0).plan.micro_batches] == [2] * 4


def test_prediction_keeps_order_and_batches_of_one_process() -> None:
    plan = planner([3, 50, 2, 9, 1, 1, 7, 8, 30, 2, 4], in_order=True)
    assert [m.sample_ids for m in plan.batch(0).plan.micro_batches] == [
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
    ]
    last = plan.batch(1)
    assert [m.sample_ids for m in last.plan.micro_batches] == [(8, 9), (10,)]
    assert [last.for_rank(r).counts for r in range(4)] == [True, True, False, False]
    assert [last.for_rank(r).micro_batch.sample_ids for r in range(4)] == [
        (8, 9),
        (10,),
        (10,),
        (10,),
    ]


def test_a_long_sample_gets_the_ranks_it_needs_and_the_others_fill_up() -> None:
    limit = bytes_of(60, 2)
    assert bytes_of(60, 1) > limit
    plan = planner([60, 5, 6, 7, 5, 6, 7, 8], limit)
    batch = plan.batch(0)
    assert plan.num_batches == 1
    assert [(m.sp_size, m.first_rank) for m in batch.plan.micro_batches] == [(2, 0), (1, 2), (1, 3)]
    assert [batch.for_rank(r).counts for r in range(4)] == [True, False, True, True]
    assert plan.sp_sizes == (1, 2)


def test_where_all_need_several_ranks_a_whole_block_repeats() -> None:
    limit = bytes_of(40, 2)
    plan = planner([40], limit)
    batch = plan.batch(0)
    assert [(i, m.first_rank, m.sp_size) for i, m in batch.repeats] == [(0, 2, 2)]
    assert [batch.for_rank(r).counts for r in range(4)] == [True, False, False, False]
    with pytest.raises(ValueError, match="Use a number of ranks that is a power of two"):
        planner([40], limit, world_size=3)


class TestTooLong:
    LENGTHS = (10, 200, 20, 150)

    def limit(self) -> int:
        return bytes_of(100, 4)

    def test_is_an_error_that_names_the_sample(self) -> None:
        missing = bytes_of(200, 4) - self.limit()
        with pytest.raises(ValueError, match=f"Sample 1 of .* length 200 .* \\({missing} bytes\\)"):
            planner(list(self.LENGTHS), self.limit())

    def test_is_skipped(self) -> None:
        plan = planner(list(self.LENGTHS), self.limit(), on_too_long="skip")
        assert plan.skipped_ids == (1, 3)
        assert sorted(i for m in plan.batch(0).plan.micro_batches for i in m.sample_ids) == [0, 2]

    def test_is_truncated(self) -> None:
        plan = planner(list(self.LENGTHS), self.limit(), on_too_long="truncate")
        assert plan.truncate_to == 100
        assert plan.lengths.tolist() == [10, 100, 20, 100]

    def test_skipping_all_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="All samples would be skipped"):
            planner([200, 300], bytes_of(1, 4), on_too_long="skip")


class TestMemory:
    TRUE = (30.0, 7.0, 12.0, 0.3)

    def test_short_steps_do_not_bend_a_line(self) -> None:
        points = [(1, 4, 4680), (2, 4, 8696), (1, 12, 14880), (1, 36, 44360)]  # as measured once
        fitted = fit_bytes([MeasuredBytes(*point) for point in points], 3600)
        far = EvaluationMemory(0, {1: fitted}).num_bytes(1, 3600, 1)
        assert far == pytest.approx(1.1 * 100 * 44360, rel=0.05)

    def test_few_lengths_are_continued_with_the_square(self) -> None:
        points = [MeasuredBytes(1, 10, 1000), MeasuredBytes(2, 10, 1900)]
        fitted = EvaluationMemory(0, {1: fit_bytes(points, 100)})
        assert fitted.num_bytes(1, 100, 1) >= 1.1 * 950 * 100
        fitted = EvaluationMemory(0, {1: fit_bytes(points, 10)})
        assert fitted.num_bytes(4, 10, 1) == pytest.approx(1.1 * 3700, rel=0.01)

    def measured(self, *points: tuple[int, int]) -> list[MeasuredBytes]:
        memory = EvaluationMemory(0, {1: self.TRUE})
        return [MeasuredBytes(b, s, int(memory.num_bytes(b, s, 1) / 1.1)) for b, s in points]

    def test_fit_finds_the_polynomial(self) -> None:
        fitted = fit_bytes(self.measured((1, 8), (2, 8), (1, 32), (1, 128)), 4000)
        far = EvaluationMemory(0, {1: fitted}).num_bytes(3, 4000, 1)
        assert far == pytest.approx(
            EvaluationMemory(0, {1: self.TRUE}).num_bytes(3, 4000, 1), rel=0.02
        )

    @given(
        st.lists(
            st.tuples(st.integers(1, 4), st.integers(1, 99), st.integers(0, 10**6)), min_size=1
        )
    )
    @settings(max_examples=50, deadline=None)
    def test_no_measured_step_takes_more(self, points: list[tuple[int, int, int]]) -> None:
        measured = [MeasuredBytes(*point) for point in points]
        longest = max(s for _, s, _ in points)
        fitted = EvaluationMemory(0, {1: fit_bytes(measured, longest)})
        assert all(fitted.num_bytes(m.batch_size, m.seq_len, 1) >= m.num_bytes for m in measured)

    @given(st.integers(1, 90), st.integers(1000, 9000), st.sampled_from([1, 2, 4]))
    @settings(max_examples=50, deadline=None)
    def test_largest_batch_and_longest_length_are_the_last_that_fit(
        self, length: int, limit: int, p: int
    ) -> None:
        length *= p
        most = largest_batch(MEMORY, length, p, limit, 20)
        assert most == 0 or MEMORY.num_bytes(most, length, p) <= limit
        assert most == 20 or MEMORY.num_bytes(most + 1, length, p) > limit
        longest = longest_length(MEMORY, p, p, limit, 333)
        assert longest == 0 or bytes_of(longest, p) <= limit
        assert longest == 333 or bytes_of(longest + 1, p) > limit


def test_the_fingerprint_is_of_all_inputs() -> None:
    same = planner([5, 6, 7], 9000).fingerprint()
    assert planner([5, 6, 7], 9000).fingerprint() == same
    others = [
        planner([5, 6, 8], 9000),
        planner([5, 6, 7], 9001),
        planner([5, 6, 7], 9000, batch_size=3),
        planner([5, 6, 7], 9000, in_order=True),
        planner([5, 6, 7]),
    ]
    assert len({same, *(p.fingerprint() for p in others)}) == 6

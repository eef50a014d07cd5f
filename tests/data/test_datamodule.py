"""The DataModule's hooks and the batches that the profiler measures."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dcp.data import DCPDataModuleMixin, MicroBatchMaker
from tests.data.toys import BatchedTokens, TokenDataset, ids_in, pad_with_minus_one


class Plain(DCPDataModuleMixin, L.LightningDataModule):
    pass


def maker(lengths: list[int], **options: Any) -> MicroBatchMaker:
    return MicroBatchMaker(TokenDataset(lengths), np.array(lengths), pad_with_minus_one, **options)


def test_hooks_that_are_not_overridden_pass() -> None:
    data = Plain()
    assert data.sequence_lengths([1]) is NotImplemented
    assert data.profile_batch(1, 2) is NotImplemented
    assert data.truncate_sample([1], 1) is NotImplemented


def test_the_nearest_samples_are_taken_and_none_is_longer() -> None:
    make = maker([10, 80, 95, 100, 130, 7, 99])
    assert make.sample_ids(3, 101) == (3, 6, 2)
    assert make.sample_ids(1, 120) == (4,)
    assert make.longest(101) == 100
    batch = make(3, 101)
    assert batch["tokens"].shape == (3, 100)
    assert ids_in(batch) == (3, 6, 2)


def test_outside_the_range_of_lengths() -> None:
    make = maker([10, 20, 20, 10])
    assert make.longest(1) == 10
    assert sorted(make.sample_ids(2, 1)) == [0, 3]
    assert make.longest(1000) == 20
    assert make.sample_ids(2, 1000) == (2, 3)


def test_batches_have_padding_where_they_can() -> None:
    make = maker([20, 7, 30, 30, 30, 14, 30])
    assert [make(b, 30)["tokens"].shape for b in (1, 3)] == [(1, 30), (3, 30)]
    assert make.sample_ids(3, 30) == (6, 4, 0)
    assert make.sample_ids(1, 30) == (6,)
    assert make.sample_ids(2, 14) == (5, 1)
    assert maker([7, 30, 30]).sample_ids(2, 30) == (2, 1)  # more than half would be padding


def test_too_few_samples_of_about_that_length_are_repeated() -> None:
    make = maker([2, 60, 100])
    assert make.sample_ids(5, 100) == (2, 1, 2, 1, 2)  # the short one would be padding only
    assert make(4, 2)["tokens"].shape == (4, 2)


def test_getitems_is_used() -> None:
    make = MicroBatchMaker(BatchedTokens([3, 5]), np.array([3, 5]), pad_with_minus_one)
    assert ids_in(make(1, 5)) == (1,)


def test_profile_batch_goes_first_and_may_pass() -> None:
    assert maker([4, 5], profile_batch=lambda b, s: (b, s))(7, 9) == (7, 9)
    assert maker([4, 5], profile_batch=Plain().profile_batch)(1, 5)["tokens"].shape == (1, 5)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0 and 5"):
        maker([4]).sample_ids(0, 5)
    with pytest.raises(ValueError, match="no samples"):
        maker([])


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=30),
    batch_size=st.integers(1, 40),
    seq_len=st.integers(1, 250),
)
def test_properties(lengths: list[int], batch_size: int, seq_len: int) -> None:
    make = maker(lengths)
    chosen = [lengths[i] for i in make.sample_ids(batch_size, seq_len)]
    assert len(chosen) == batch_size
    assert max(chosen) == make.longest(seq_len)
    assert abs(max(chosen) - seq_len) == min(abs(n - seq_len) for n in lengths)
    assert min(chosen) * 2 >= max(chosen)
    assert make.sample_ids(batch_size, seq_len) == make.sample_ids(batch_size, seq_len)
    # No sample twice while another of about that length is left.
    usable = [n for n in lengths if max(chosen) / 2 <= n <= max(chosen)]
    assert len(set(make.sample_ids(batch_size, seq_len))) == min(batch_size, len(usable))


def test_samples_are_tensors_of_the_expected_form() -> None:
    assert torch.equal(TokenDataset([2])[0], torch.zeros(2, dtype=torch.long))

"""Length and truncation of single samples, by form."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_dcp.data.samples import fetch_samples, sample_length, truncate_sample
from tests.data.toys import BatchedTokens, TokenDataset

Pair = namedtuple("Pair", "tokens label")
Anonymous = namedtuple("Anonymous", "x y")


@pytest.mark.parametrize(
    "sample",
    [
        torch.zeros(5),
        np.zeros(5),
        [1, 2, 3, 4, 5],
        ["a", "b", "c", "d", "e"],
        {"label": 1, "input_ids": torch.zeros(5)},
        {"inputs": [0] * 5, "tokens": [0] * 9, "input_ids": [0] * 5},
        (torch.zeros(5), torch.zeros(7)),
        ({"tokens": [1] * 5}, 3),
        Pair(torch.zeros(5), 1),
        Anonymous([1] * 5, [1] * 6),
        SimpleNamespace(input_ids=torch.zeros(5)),
    ],
)
def test_length_of_known_forms(sample: object) -> None:
    assert sample_length(sample) == 5


@pytest.mark.parametrize(
    ("sample", "found"),
    [
        (torch.zeros(3, 4), "a Tensor of shape (3, 4)"),
        (torch.tensor(3), "a Tensor of shape ()"),
        ([torch.zeros(3)], "a list of 1 elements, the first a Tensor of shape (3,)"),
        ({"pixels": np.zeros((2, 2))}, "{'pixels': a ndarray of shape (2, 2)}"),
        ({"input_ids": torch.zeros(1, 4)}, "'input_ids': a Tensor of shape (1, 4)"),
        ("some text", "a str"),
        (3, "a int"),
        ((), "a tuple of 0 elements"),
    ],
)
def test_doubtful_forms_are_refused_and_name_the_hook(sample: object, found: str) -> None:
    with pytest.raises(TypeError) as error:
        sample_length(sample)
    assert found in str(error.value)
    assert "sequence_lengths(self, dataset)" in str(error.value)


def test_truncation_cuts_whatever_is_as_long_as_the_sample() -> None:
    sample = {
        "input_ids": torch.arange(6),
        "labels": [0, 1, 2, 3, 4, 5],
        "positions": torch.zeros(6, 2),
        "image": torch.zeros(4),
        "name": "abcdef",
    }
    cut = truncate_sample(sample, 2)
    assert cut["input_ids"].tolist() == [0, 1]
    assert cut["labels"] == [0, 1]
    assert cut["positions"].shape == (2, 2)
    assert cut["image"].shape == (4,)
    assert cut["name"] == "abcdef"
    assert len(sample["input_ids"]) == 6

    pair = truncate_sample(Pair(torch.arange(6), 1), 3)
    assert isinstance(pair, Pair)
    assert pair.tokens.tolist() == [0, 1, 2]
    assert truncate_sample([1, 2, 3], 3) == [1, 2, 3]
    assert truncate_sample(([1, 2, 3], [4, 5, 6]), 1) == ([1], [4])


def test_truncation_of_unknown_forms_names_its_hook() -> None:
    with pytest.raises(TypeError, match=r"truncate_sample\(self, sample, max_length\)"):
        truncate_sample(torch.zeros(8, 3), 4)
    with pytest.raises(TypeError, match="a SimpleNamespace"):
        truncate_sample(SimpleNamespace(input_ids=[1, 2, 3]), 2)
    with pytest.raises(ValueError, match="count something else"):
        truncate_sample([1, 2, 3], 4)


def test_fetch_uses_getitems_where_offered() -> None:
    assert [t[0].item() for t in fetch_samples(BatchedTokens([1, 2, 3]), [2, 0])] == [2, 0]
    assert [t[0].item() for t in fetch_samples(TokenDataset([1, 2, 3]), (1, 2))] == [1, 2]

    class TooFew(TokenDataset):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices[1:]

    with pytest.raises(ValueError, match="asked for 2 samples and gave 1"):
        fetch_samples(TooFew([1, 2, 3]), [0, 1])

"""What of a batch is sliced, and what the user is asked for."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_dcp.parallel.input_dims import InputDims, entries_of, with_entries


def tokens(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.long)


class TestInputDims:
    def test_usual_names(self) -> None:
        batch = {
            "input_ids": tokens(2, 9),
            "labels": tokens(2, 9),
            "position_ids": tokens(3, 2, 9),
            "id": tokens(2),
            "text": ["a", "b"],
        }
        assert InputDims().of(batch) == (9, {"input_ids": 1, "labels": 1, "position_ids": 2})

    def test_a_pair(self) -> None:
        assert InputDims().of(entries_of((tokens(2, 9), tokens(2, 9)))) == (9, {0: 1, 1: 1})

    @pytest.mark.parametrize("shape", [(2, 9), (2, 1, 9, 9), (9,)])
    def test_another_name_is_asked_for(self, shape: tuple[int, ...]) -> None:
        batch = {"ids": tokens(2, 9), "extra": tokens(*shape)}
        with pytest.raises(ValueError, match=r"'extra'.*input_dims"):
            InputDims().of(batch)
        assert InputDims({"ids": 1, "extra": None}).of(batch) == (9, {"ids": 1})
        assert InputDims({"ids": 1, "extra": -1}).of(batch)[1]["extra"] == -1

    def test_a_size_that_once_equals_the_length_is_no_sequence(self) -> None:
        dims = InputDims()
        dims.of({"ids": tokens(2, 9), "features": tokens(2, 4)})
        assert dims.of({"ids": tokens(2, 4), "features": tokens(2, 4)}) == (4, {"ids": 1})

    def test_as_many_samples_as_tokens(self) -> None:
        assert InputDims().of({"ids": tokens(4, 4), "id": tokens(4)}) == (4, {"ids": 1})

    def test_nothing_is_known(self) -> None:
        with pytest.raises(ValueError, match="none of the batch's entries"):
            InputDims().of({"bytes": tokens(2, 9)})

    def test_a_wrong_declaration(self) -> None:
        with pytest.raises(ValueError, match="does not have the 9 tokens"):
            InputDims({"ids": 1, "labels": 0}).of({"ids": tokens(2, 9), "labels": tokens(2, 9)})
        with pytest.raises(ValueError, match="names dimension 2"):
            InputDims({"ids": 2}).of({"ids": tokens(2, 9)})


class Pair(NamedTuple):
    ids: Tensor
    labels: Tensor


class Attributes:
    def __init__(self) -> None:
        self.ids, self.other = tokens(2, 9), 1


@pytest.mark.parametrize(
    "batch",
    [
        {"ids": tokens(2, 9), "other": 1},
        UserDict(ids=tokens(2, 9), other=1),
        Pair(tokens(2, 9), tokens(2, 9)),
        Attributes(),
    ],
)
def test_batches_of_all_kinds_are_copied(batch: Any) -> None:
    new = with_entries(batch, {"ids": tokens(2, 3)})
    assert type(new) is type(batch)
    assert entries_of(new)["ids"].shape == (2, 3)
    assert entries_of(batch)["ids"].shape == (2, 9)

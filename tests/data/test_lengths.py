"""Where lengths come from, in which order, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from lightning_dcp.data import DCPDataModuleMixin, find_lengths, resolve_lengths
from tests.data.toys import RowDataset, TokenDataset

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6]


class SelfDescribing(TokenDataset):
    @property
    def sequence_lengths(self) -> list[int]:
        return self.lengths

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError("a sample was read")


class SelfDescribingMethod(TokenDataset):
    def sequence_lengths(self) -> torch.Tensor:
        return torch.tensor(self.lengths)


class Hooked(DCPDataModuleMixin, L.LightningDataModule):
    def sequence_lengths(self, dataset: Any) -> Any:
        return [n + 100 for n in dataset.lengths]


class Silent(DCPDataModuleMixin, L.LightningDataModule):
    pass


def resolve(dataset: Any, **options: Any) -> list[int]:
    lengths = resolve_lengths(dataset, **{"cache": False, "show_progress": False, **options})
    assert lengths.dtype == np.int64
    assert not lengths.flags.writeable
    return lengths.tolist()


def test_the_datamodule_comes_first_and_may_pass() -> None:
    dataset = SelfDescribing(LENGTHS)
    assert resolve(dataset, datamodule=Hooked()) == [n + 100 for n in LENGTHS]
    assert resolve(dataset, datamodule=Silent()) == LENGTHS
    assert resolve(dataset, datamodule=L.LightningDataModule()) == LENGTHS


def test_attribute_and_method_of_the_dataset() -> None:
    assert resolve(SelfDescribing(LENGTHS)) == LENGTHS
    assert resolve(SelfDescribingMethod(LENGTHS)) == LENGTHS


@pytest.mark.parametrize("name", ["length", "seq_len", "num_tokens"])
def test_length_column(name: str) -> None:
    dataset = RowDataset({"input_ids": "unreadable", name: LENGTHS})
    found = find_lengths(dataset)
    assert found.values.tolist() == LENGTHS
    assert found.source == f"the column {name!r} of RowDataset"


def test_named_length_column_and_one_that_is_not_there() -> None:
    dataset = RowDataset({"length": [1] * 8, "n": LENGTHS})
    assert resolve(dataset, length_column="n") == LENGTHS
    with pytest.raises(ValueError, match=r"`length_column='m'` is no column .* 'length', 'n'"):
        resolve(dataset, length_column="m")
    with pytest.raises(ValueError, match="TokenDataset has no columns"):
        resolve(TokenDataset(LENGTHS), length_column="n")


def test_sizes_of_input_ids_without_reading_the_rest() -> None:
    many = [1 + i % 7 for i in range(5000)]
    dataset = RowDataset({"pixels": "unreadable", "input_ids": [[0] * n for n in many]})
    assert resolve(dataset) == many
    assert {name for name, _ in dataset.log} == {"input_ids"}
    assert len(dataset.log) == 2  # in pieces, not sample by sample


def test_a_transform_is_not_overlooked() -> None:
    class Cropping(RowDataset):
        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return {"input_ids": self.columns["input_ids"][index][:2]}

    dataset = Cropping({"input_ids": [[0] * n for n in LENGTHS]})
    dataset.format = {"type": "custom"}
    assert resolve(dataset) == [min(n, 2) for n in LENGTHS]


def test_subset_and_concat_are_unwrapped() -> None:
    inner = SelfDescribing(LENGTHS)
    subset = Subset(inner, [5, 0, 0])
    assert resolve(subset) == [9, 3, 3]
    assert resolve(ConcatDataset([subset, inner])) == [9, 3, 3, *LENGTHS]
    assert resolve(Subset(ConcatDataset([inner, subset]), [8, 9])) == [9, 3]


def test_only_what_does_not_know_its_lengths_is_read() -> None:
    plain = TokenDataset(LENGTHS)
    joined = ConcatDataset([SelfDescribing([7, 7]), Subset(plain, [1, 4])])
    assert resolve(joined) == [7, 7, 1, 5]
    # The Subset's two samples and the same two again as a check, not all of what is inside.
    assert plain.num_reads == 4


def test_a_hook_that_does_not_know_subsets_is_told_how_to() -> None:
    subset = Subset(TokenDataset(LENGTHS), [0])
    with pytest.raises(TypeError, match=r"failed on a Subset.*Return NotImplemented for a Subset"):
        resolve(subset, datamodule=Hooked())

    class Passing(Hooked):
        def sequence_lengths(self, dataset: Any) -> Any:
            return (
                NotImplemented if isinstance(dataset, Subset) else super().sequence_lengths(dataset)
            )

    assert resolve(subset, datamodule=Passing()) == [103]
    with pytest.raises(AttributeError, match="lengths"):  # the user's own mistake stays as it is
        resolve([1, 2], datamodule=Hooked())


def test_counted_pass_and_what_it_leaves_alone() -> None:
    class Augmenting(TokenDataset):
        def __getitem__(self, index: int) -> torch.Tensor:
            noise = torch.rand(()) + np.random.rand() + random.random()  # noqa: NPY002
            return super().__getitem__(index) + noise

    torch.manual_seed(1)
    before = (torch.rand(3).tolist(), random.random())
    torch.manual_seed(1)
    random.seed(1)
    state = random.getstate()
    assert resolve(Augmenting(LENGTHS)) == LENGTHS
    assert torch.rand(3).tolist() == before[0]
    assert random.getstate() == state


def test_the_counted_pass_shows_its_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(TokenDataset(LENGTHS), show_progress=True)
    assert capsys.readouterr() == ("", "")  # no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    resolve(TokenDataset(LENGTHS), show_progress=True)
    shown = capsys.readouterr()
    assert "Counting lengths of TokenDataset" in shown.err
    assert shown.out == ""
    resolve(TokenDataset(LENGTHS), show_progress=False)
    assert capsys.readouterr().err == ""


def test_lengths_that_change_from_one_reading_to_the_next_are_refused() -> None:
    class Growing(TokenDataset):
        def __getitem__(self, index: int) -> torch.Tensor:
            self.lengths[index] += 1
            return super().__getitem__(index)

    with pytest.raises(ValueError, match=r"Sample 0 of Growing had 4 tokens and has 5"):
        resolve(Growing(LENGTHS))


class Wrong(TokenDataset):
    def __init__(self, given: Any) -> None:
        super().__init__(LENGTHS)
        self.sequence_lengths = given


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ([1, 2, 3], ValueError, "3 lengths were given .* 8 samples"),
        ([3, 1, 0, 1, 5, 9, 2, 6], ValueError, "Sample 2 .* length 0"),
        ([3, 1, 4, 1, 5, -9, 2, 6], ValueError, "Sample 5 .* length -9"),
        ([3, 1.5, 4, 1, 5, 9, 2, 6], ValueError, "Sample 1 .* length 1.5"),
        (["3", 1, 4, 1, 5, 9, 2, 6], TypeError, "Sample 0 .* '3'"),
        (17, TypeError, "sequence of integers; got int"),
        (torch.zeros(8, 3, dtype=torch.int64), ValueError, r"one-dimensional; got shape \(8, 3\)"),
    ],
)
def test_wrong_lengths_say_where_they_came_from(given: Any, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message) as error:
        resolve(Wrong(given), source_hint="train_dataloader of MyData")
    assert "`Wrong.sequence_lengths`" in str(error.value)
    assert "train_dataloader of MyData" in str(error.value)


def test_wrong_lengths_inside_a_subset_are_not_indexed() -> None:
    with pytest.raises(ValueError, match=r"9 lengths were given .* 8 samples"):
        resolve(Subset(Wrong([1] * 9), [0, 1]))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from range(3)


class Endless(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


class Pictures(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("dataset", "kind", "message"),
    [
        (Stream(), TypeError, "Stream is an IterableDataset"),
        (Endless(), TypeError, "Endless has no length"),
        (TokenDataset([]), ValueError, "TokenDataset is empty"),
        (Pictures(), TypeError, r"a Tensor of shape \(3, 4\).*sequence_lengths"),
        (TokenDataset([2, 0]), ValueError, "Sample 1 of TokenDataset has length 0"),
    ],
)
def test_data_that_cannot_be_planned_is_refused(dataset: Any, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        resolve(dataset)


def test_a_dict_of_splits_is_refused() -> None:
    class Splits(dict[str, RowDataset]):
        @property
        def column_names(self) -> dict[str, list[str]]:
            return {name: split.column_names for name, split in self.items()}

    with pytest.raises(TypeError, match=r"dict of splits\. Pass one of them: 'train', 'test'"):
        resolve(Splits(train=RowDataset({"length": [1]}), test=RowDataset({"length": [1]})))


def test_a_pass_that_fails_stores_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="length 0"):
        resolve(TokenDataset([2, 0]), cache=True, cache_dir=tmp_path)
    assert not list(tmp_path.glob("*.lengths"))

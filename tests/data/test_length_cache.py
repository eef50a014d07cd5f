"""Counted lengths are kept, used again, and never served for data that changed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_dcp.data import find_lengths
from lightning_dcp.data.fingerprint import CannotFingerprint, fingerprint_dataset
from lightning_dcp.data.length_cache import LengthCache, probe_ids
from tests.data.toys import TokenDataset, some_lengths

NUM_SAMPLES = 500


class Counting(TokenDataset):
    """Counts reads outside its state, so that reading does not change what it is."""

    num_reads_of_all = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        type(self).num_reads_of_all += 1
        return torch.zeros(self.lengths[index])


class Files(torch.utils.data.Dataset):
    """One sample per file of a directory; knows names only."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.names = sorted(os.listdir(root))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> list[int]:
        return list((Path(self.root) / self.names[index]).read_bytes())


class Mapped(torch.utils.data.Dataset):
    def __init__(self, items: list[int], function: Callable[[int], int]) -> None:
        self.items = items
        self.function = function

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> list[int]:
        return [0] * self.function(self.items[index])


def reads(lengths: np.ndarray, cache_dir: Path) -> int:
    """How many samples it takes to find the lengths, which have to be right."""
    dataset = Counting(lengths)
    before = Counting.num_reads_of_all
    found = find_lengths(dataset, cache_dir=cache_dir, show_progress=False)
    assert found.values.tolist() == dataset.lengths
    return Counting.num_reads_of_all - before


def test_the_second_time_only_a_few_samples_are_read(tmp_path: Path) -> None:
    lengths = some_lengths(NUM_SAMPLES)
    probes = len(probe_ids(NUM_SAMPLES))
    assert probes <= 32
    assert reads(lengths, tmp_path) == NUM_SAMPLES + probes
    assert reads(lengths, tmp_path) == probes


def test_switched_off(tmp_path: Path) -> None:
    dataset = Counting(some_lengths(NUM_SAMPLES))
    for _ in range(2):
        before = Counting.num_reads_of_all
        found = find_lengths(dataset, cache=False, cache_dir=tmp_path, show_progress=False)
        assert Counting.num_reads_of_all - before >= NUM_SAMPLES
        assert found.source == "a pass over Counting"
    assert not list(tmp_path.iterdir())


def test_other_state_is_counted_anew(tmp_path: Path) -> None:
    lengths = some_lengths(NUM_SAMPLES)
    reads(lengths, tmp_path)
    middle = next(i for i in range(NUM_SAMPLES) if i not in probe_ids(NUM_SAMPLES))
    lengths[middle] += 1  # no sample that is read again shows it
    assert reads(lengths, tmp_path) > NUM_SAMPLES


def test_changed_files_are_counted_anew(tmp_path: Path) -> None:
    root, cache = tmp_path / "data", tmp_path / "cache"
    root.mkdir()
    for i in range(200):
        (root / f"{i:03}.bin").write_bytes(b"x" * (1 + i % 9))
    first = find_lengths(Files(root), cache_dir=cache, show_progress=False)
    assert first.source == "a pass over Files"
    again = find_lengths(Files(root), cache_dir=cache, show_progress=False)
    assert again.source == "an earlier pass over Files"
    assert again.values.tolist() == first.values.tolist()

    changed = next(i for i in range(200) if i not in probe_ids(200))
    (root / f"{changed:03}.bin").write_bytes(b"x" * 77)
    third = find_lengths(Files(root), cache_dir=cache, show_progress=False)
    assert third.source == "a pass over Files"
    assert third.values[changed] == 77


def test_functions_count_by_their_code_and_what_they_close_over() -> None:
    def offset(n: int) -> Callable[[int], int]:
        return lambda x: x + n

    items = [1, 2, 3]
    base = fingerprint_dataset(Mapped(items, offset(1)))
    assert base == fingerprint_dataset(Mapped(items, offset(1)))
    assert base != fingerprint_dataset(Mapped(items, offset(2)))
    assert base != fingerprint_dataset(Mapped(items, lambda x: x + 1 + 0 * x))


def test_sets_and_memory_maps(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.int32).tofile(path)
    dataset = TokenDataset([1, 2])
    dataset.extra = {"b", "a", "c"}
    dataset.tokens = np.memmap(path, dtype=np.int32, mode="r")
    before = fingerprint_dataset(dataset)
    dataset.extra = {"c", "b", "a"}
    assert fingerprint_dataset(dataset) == before
    dataset.extra = {"c", "b"}
    assert fingerprint_dataset(dataset) != before
    dataset.extra = {"b", "a", "c"}
    np.arange(1001, dtype=np.int32).tofile(path)
    assert fingerprint_dataset(dataset) != before


def test_the_same_in_another_process_and_other_code_is_noticed(tmp_path: Path) -> None:
    module = tmp_path / "mydata.py"
    source = textwrap.dedent(
        """
        import torch
        def helper(i):
            return i + 1
        class Data(torch.utils.data.Dataset):
            def __init__(self):
                self.weights = torch.arange(10.0)
                self.names = {"x", "y", "z"}
                self.function = lambda x: x in {"p", "q", "r"}
            def __len__(self):
                return 10
            def __getitem__(self, i):
                return [0] * helper(i)
        """
    )
    program = textwrap.dedent(
        """
        import sys, pathlib
        from mydata import Data
        from lightning_dcp.data import fingerprint
        print(fingerprint.fingerprint_dataset(Data()))
        source = pathlib.Path("mydata.py")
        source.write_text(source.read_text().replace("i + 1", "i + 2"))
        fingerprint._module_digest.cache_clear()
        print(fingerprint.fingerprint_dataset(Data()))
        """
    )

    def run(hash_seed: int) -> list[str]:
        module.write_text(source)
        path = os.pathsep.join([str(tmp_path), *sys.path])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(hash_seed)}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first, changed = run(1)
    assert first != changed
    assert run(2) == [first, changed]


def test_what_does_not_pickle_is_counted_every_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Counting(some_lengths(50))
    dataset.lock = threading.Lock()
    with pytest.raises(CannotFingerprint, match="does not pickle"):
        fingerprint_dataset(dataset)
    with caplog.at_level(logging.INFO, logger="lightning_dcp"):
        for _ in range(2):
            found = find_lengths(dataset, cache_dir=tmp_path, show_progress=False)
            assert found.source == "a pass over Counting"
    assert "counted, not cached: it does not pickle" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "flip", "header", "foreign"])
def test_damaged_files_are_reported_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    lengths = some_lengths(NUM_SAMPLES)
    reads(lengths, tmp_path)
    (path,) = tmp_path.glob("*.lengths")
    good = path.read_bytes()
    path.write_bytes(
        {
            "cut": good[:-8],
            "flip": good[:-8] + b"\1" + good[-7:],
            "header": b"{" + good,
            "foreign": good.replace(b'"num_samples": 500', b'"num_samples": 501'),
        }[damage]
    )
    assert reads(lengths, tmp_path) > NUM_SAMPLES
    assert "cannot be used" in caplog.text
    assert path.read_bytes() == good
    assert reads(lengths, tmp_path) <= 32


def test_lengths_that_the_samples_contradict_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = some_lengths(NUM_SAMPLES)
    reads(lengths, tmp_path)
    fingerprint = fingerprint_dataset(Counting(lengths))
    LengthCache(tmp_path).save(fingerprint, np.asarray(lengths) + 1)
    assert reads(lengths, tmp_path) > NUM_SAMPLES
    assert "out of date: sample 0 has" in caplog.text


def test_a_directory_that_cannot_be_written_only_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert reads(some_lengths(20), blocked) >= 20
    assert "cannot be cached" in caplog.text


def test_probes_are_valid_for_any_size() -> None:
    for num_samples in (1, 2, 3, 7, 8, 33, 10**6):
        ids = probe_ids(num_samples)
        assert ids == sorted(set(ids))
        assert ids[0] == 0
        assert ids[-1] == num_samples - 1
        assert len(ids) <= 32

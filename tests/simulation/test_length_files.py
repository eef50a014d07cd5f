"""Lengths from files, and what is said about those that hold something else."""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest

from lightning_dcp.simulation.length_files import read_lengths


def write(tmp_path, name: str, text: str | bytes):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "3\n512\n7\n",
        "3\n512\n7",
        "3\r\n512\r\n7\r\n",
        "3\n512\n7\n\n\n",
        " 3\n512 \n\t7\n",
        "\ufeff3\n512\n7\n",
        "0003\n512\n7\n",
    ],
)
def test_plain_text(tmp_path, text: str) -> None:
    lengths = read_lengths(write(tmp_path, "lengths.txt", text))
    assert lengths.tolist() == [3, 512, 7]
    assert lengths.dtype == np.int64 and not lengths.flags.writeable


@pytest.mark.parametrize(
    ("name", "text", "column", "expected"),
    [
        ("a.csv", "length\n3\n5\n", None, [3, 5]),
        ("a.csv", "3\n5\n", None, [3, 5]),
        ("a.csv", "id,length\na,3\nb,5\n", None, [3, 5]),
        ("a.csv", "id,tokens,n\na,3,1\nb,5,1\n", "n", [1, 1]),
        ("a.csv", "n,num_tokens\n1,3\n1,5\n", None, [3, 5]),
        ("a.csv", 'text,n\n"two\nlines, quoted",3\nx,5\n', None, [3, 5]),
        ("a.csv", "id;n\na;3\nb;5\n\n", None, [3, 5]),
        ("a.csv", "\ufeffid, n\na, 3\nb, 5\n", "n", [3, 5]),
        ("a.tsv", "id\tn\na,a\t3\nb\t5\n", None, [3, 5]),
        ("A.CSV", "id,seq_len\na,3\n", None, [3]),
    ],
)
def test_csv(tmp_path, name, text, column, expected) -> None:
    assert read_lengths(write(tmp_path, name, text), column).tolist() == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.txt", "", "is empty"),
        ("l.txt", " \n\n", "is empty"),
        ("l.txt", "length\n3\n", "line 1: 'length' is no number.*Remove the header line"),
        ("l.txt", "3\n\n5\n", "line 2: blank"),
        ("l.txt", "\n3\n5\n", "line 1: blank"),
        ("l.txt", "3\n0\n5\n", "line 2: '0' is no length.*Leave empty samples out"),
        ("l.txt", "3\n5\n-5\n", "line 3: '-5' is no length"),
        ("l.txt", "3\n5.5\n", r"line 2: '5\.5' is no length.*digits only"),
        ("l.txt", "3\n5.0\n", r"line 2: '5\.0' is no length"),
        ("l.txt", "3\nlong\n", "line 2: 'long' is no number.*Correct or remove"),
        ("l.txt", "3\nnan\n", "line 2: 'nan' is no length"),
        ("l.txt", "3\n4 5\n", "line 2: '4 5' is no number"),
        ("l.txt", "3\n4,5\n", "line 2: '4,5' is no number.*Several values in a line"),
        ("l.txt", "3\n1_000\n", "line 2: '1_000' is no"),
        ("l.txt", "3\n\u0663\n", "line 2"),
        ("l.txt", "3\n99999999999999999999\n", "line 2: '99999.*more than any sample has"),
        ("l.txt", "3\n" + "x" * 500 + "\n", r"line 2: 'x{57}\.\.\.' is"),
        ("l.txt", b"PAR1\xff\xfe\x00", "is no text file"),
        ("l.jsonl", '{"length": 3}\n', "jsonl files cannot be read"),
        ("l.csv", "", "is empty"),
        ("l.csv", "id,n\n", r"header \(id, n\) but no rows"),
        ("l.csv", "\nlength\n3\n", "line 1: blank, where the columns' names should be"),
        ("l.csv", "3,5\n6,7\n", "line 1: 2 numbers where the columns' names"),
        ("l.csv", "a,b\n1,2\n", "which column.*Its columns: a, b"),
        ("l.csv", "a,b\nx,y\n", "which column.*Its columns: a, b"),
        ("l.csv", "id,length\na,3\nb,0\n", "line 3: '0' is no length"),
        ("l.csv", "id,length\na,3\nb,\n", "line 3: blank"),
        ("l.csv", "id,length\na,3\nb\nc,5\n", "line 3: 1 values where 2 are expected"),
        ("l.csv", "id,length\na,3\n\nc,5\n", "line 3: blank"),
        ("l.csv", 'id,length\n"a\nb",3\nc,x\n', "line 4: 'x' is no number"),
        ("l.csv", 'id,length\n"a"b,3\n', "line 2: not CSV"),
        ("l.csv", b"id,length\n\xff,3\n", "is no text file"),
        ("l.csv", "length\nlong\n", "line 2: 'long' is no number"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path, name, text, message) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(ValueError, match=message) as caught:
        read_lengths(path)
    assert str(path) in str(caught.value)


def test_columns_that_are_not_there(tmp_path) -> None:
    table = write(tmp_path, "l.csv", "id,length\na,3\n")
    with pytest.raises(ValueError, match=r"no column 'len'\. Its columns: id, length"):
        read_lengths(table, "len")
    with pytest.raises(ValueError, match="plain text, which has no columns"):
        read_lengths(write(tmp_path, "l.txt", "3\n"), "length")
    with pytest.raises(ValueError, match="one column and no header"):
        read_lengths(write(tmp_path, "m.csv", "3\n5\n"), "length")


def test_a_missing_file(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no file or directory .*none\.txt"):
        read_lengths(tmp_path / "none.txt")


@pytest.mark.parametrize("name", ["l.txt", "l.csv"])
def test_a_million_lines_take_seconds_at_most(tmp_path, name: str) -> None:
    values = np.random.default_rng(0).integers(1, 10**6, 10**6)
    header = "length\n" if name.endswith("csv") else ""
    path = write(tmp_path, name, header + "\n".join(map(str, values.tolist())) + "\n")
    start = time.perf_counter()
    lengths = read_lengths(path)
    assert time.perf_counter() - start < 10  # a second or two, on a machine that is not busy
    assert np.array_equal(lengths, values)


# ---------------------------------------------------------------------- Parquet, data sets


@pytest.mark.parametrize("package", ["pyarrow", "datasets"])
def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    if package == "pyarrow":
        path = write(tmp_path, "l.parquet", b"PAR1")
    else:
        path = tmp_path
        write(path, "state.json", "{}")
    with pytest.raises(ImportError, match=f"pip install {package}"):
        read_lengths(path)


def test_directories_that_are_no_data_set(tmp_path) -> None:
    with pytest.raises(ValueError, match="is no Hugging Face data set"):
        read_lengths(tmp_path)
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        write(tmp_path / split, "state.json", "{}")
    with pytest.raises(ValueError, match=r"several splits \(test, train\): give .*test"):
        read_lengths(tmp_path)


def test_parquet(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "l.parquet"

    def read(column: str | None = None, **columns):
        parquet.write_table(pyarrow.table(columns), path)
        return read_lengths(path, column).tolist()

    assert read(text=["a", "b"], n=[3, 5]) == [3, 5]
    assert read(a=[1, 2], length=[3, 5]) == [3, 5]
    assert read("tokens", tokens=[[1, 2, 3], [4]]) == [3, 1]
    assert read("n", n=[3.0, 5.0]) == [3, 5]
    for message, column, columns in (
        (r"which column.*a, b", None, {"a": [1], "b": [2]}),
        (r"no column 'c'.*a, b", "c", {"a": [1], "b": [2]}),
        (r"Row 1 of column 'n'.*is empty", "n", {"n": [1, None]}),
        (r"Sample 1 of column 'n'.*length 0", "n", {"n": [1, 0]}),
        (r"Sample 0 of column 'n'.*length 1\.5", "n", {"n": [1.5]}),
        (r"column 'n'.*holds string", "n", {"n": ["x"]}),
    ):
        with pytest.raises(ValueError, match=message):
            read(column, **columns)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="is no Parquet file"):
        read_lengths(path)


def test_a_saved_data_set(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "n": [3, 5, 7]})
    data.select([2, 0]).save_to_disk(tmp_path / "picked")
    assert read_lengths(tmp_path / "picked", "n").tolist() == [7, 3]
    data.add_column("input_ids", [[1], [1, 2], [1, 2, 3]]).save_to_disk(tmp_path / "ids")
    assert read_lengths(tmp_path / "ids", "input_ids").tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match=r"no column 'length'\. Its columns: text, n"):
        read_lengths(tmp_path / "picked", "length")
    datasets.DatasetDict({"train": data, "val": data}).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match=r"several splits \(train, val\)"):
        read_lengths(tmp_path / "both", "n")

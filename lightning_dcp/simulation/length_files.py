"""Sample lengths from files: plain text, CSV, Parquet, a Hugging Face data set on disk."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lightning_dcp.planning.lengths import IntArray, as_lengths

__all__ = ["COLUMN_NAMES", "read_lengths"]

COLUMN_NAMES = ("length", "lengths", "num_tokens", "seq_len", "sequence_length", "tokens")
"""Columns taken, in this order, where none is named."""

_DIGITS = re.compile(r"[0-9]+")
_PLAIN = re.compile(rb"(?:[0-9]{1,15}\r?\n)+")
_MOST = 10**15  # far above any sample; below what int64 and float64 hold exactly
_WANTED = "A length is a whole number of tokens, at least 1"


def read_lengths(path: str | Path, column: str | None = None) -> IntArray:
    """Read one length per sample; the name's ending tells the kind of file.

    ======================  ====================================================================
    ``.csv``, ``.tsv``      a column of integers, with a header unless there is one column only
    ``.parquet``            a column of integers, or of lists, which are counted (needs pyarrow)
    a directory             a Hugging Face data set saved with ``save_to_disk`` (needs datasets);
                            columns as for Parquet
    anything else           plain text, one integer per line
    ======================  ====================================================================

    Args:
        path: File or directory.
        column: Column that holds the lengths. None: the only column, else the first of
            :data:`COLUMN_NAMES` there is, else the only column of integers.

    Returns:
        Read-only int64 array.

    Raises:
        FileNotFoundError: No such file.
        ImportError: The kind of file needs a package that is not installed.
        ValueError: What is in the file is no length; the text names file and line (or row).
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no file or directory {path}. Check the path.")
    if path.is_dir():
        return _read_saved_dataset(path, column)
    kind = path.suffix.lower()
    if kind == ".parquet":
        return _read_parquet(path, column)
    if kind in (".csv", ".tsv"):
        return _read_csv(path, column)
    if kind in (".json", ".jsonl", ".arrow", ".npy", ".gz", ".zst", ".xlsx"):
        raise ValueError(
            f"{path}: {kind} files cannot be read. Write the lengths as plain text (one integer "
            "per line), CSV or Parquet."
        )
    if column is not None:
        raise ValueError(
            f"{path} is read as plain text, which has no columns; got column={column!r}. Leave "
            "the column out, or name the file .csv, .tsv or .parquet."
        )
    return _read_text(path)


# ---------------------------------------------------------------------- plain text


def _read_text(path: Path) -> IntArray:
    data = path.read_bytes().rstrip()
    if not data:
        raise ValueError(f"{path} is empty. Write one length per line.")
    if _PLAIN.fullmatch(data + b"\n"):
        values = np.array(data.split()).astype(np.int64)
        if (values > 0).all():
            return as_lengths(values, name=str(path))
    lines = _decode(path, data).splitlines()
    return _whole_numbers(path, [line.strip() for line in lines], range(1, len(lines) + 1))


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no text file: byte {error.start} is not UTF-8. Write one integer per "
            "line, or give CSV or Parquet files their usual ending."
        ) from None


def _whole_numbers(path: Path, texts: Sequence[str], lines: Sequence[int]) -> IntArray:
    """Lengths of texts; ``lines[i]`` is the line of ``texts[i]``."""
    for index, text in enumerate(texts):
        if not _DIGITS.fullmatch(text) or len(text) > 15 or int(text) < 1:
            _refuse(path, lines[index], text, first=index == 0)
    return as_lengths(np.array(texts).astype(np.int64), name=str(path))


def _refuse(path: Path, line: int, text: str, *, first: bool) -> NoReturn:
    where = f"{path}, line {line}:"
    if not text:
        raise ValueError(
            f"{where} blank, a length is missing. Give each sample a line; leave empty samples "
            "out of the data set."
        )
    shown = repr(text) if len(text) <= 60 else repr(text[:57] + "...")
    try:
        number: float | None = float(text)
    except ValueError:
        number = None
    if number is None:
        if first and path.suffix.lower() not in (".csv", ".tsv"):
            hint = "Remove the header line, or name the file .csv if it has columns."
        elif re.search(r"[,;\t]", text):
            hint = "Several values in a line: name the file .csv or .tsv and give the column."
        else:
            hint = "Correct or remove the line."
        raise ValueError(f"{where} {shown} is no number. {_WANTED}. {hint}")
    if number < 1:
        hint = "Leave empty samples out of the data set."
    elif number > _MOST:
        hint = "This is more than any sample has; does the line hold something else?"
    else:
        hint = "Write it with digits only."
    raise ValueError(f"{where} {shown} is no length. {_WANTED}. {hint}")


# ---------------------------------------------------------------------- CSV


def _read_csv(path: Path, column: str | None) -> IntArray:
    with path.open("rb") as file:
        head = file.read(1 << 16)
    if not head.strip():
        raise ValueError(f"{path} is empty. Write a header and one row per sample.")
    delimiter = _delimiter(path, head)
    rows = _rows(path, delimiter)
    header, line = next(rows)
    header = [name.strip() for name in header]
    if header in ([], [""]):
        raise ValueError(
            f"{path}, line {line}: blank, where the columns' names should be. Remove the line."
        )
    second = next(rows, None)
    if len(header) == 1 and _DIGITS.fullmatch(header[0]):
        if column is not None:
            raise ValueError(
                f"{path} has one column and no header; got column={column!r}. Leave the column "
                "out, or write its name into the first line."
            )
        index, texts, lines = 0, [header[0]], [line]
    elif all(_DIGITS.fullmatch(name) for name in header):
        raise ValueError(
            f"{path}, line {line}: {len(header)} numbers where the columns' names should be. "
            "Write a header line, so that the column of lengths can be found."
        )
    elif second is None:
        raise ValueError(f"{path} has a header ({', '.join(header)}) but no rows below it.")
    else:
        whole = [_DIGITS.fullmatch(text.strip()) is not None for text in second[0]]
        whole += [False] * (len(header) - len(whole))
        index = _choose(
            str(path), header, [n for n, w in zip(header, whole, strict=False) if w], column
        )
        texts, lines = [], []
    for row, line in _chain(second, rows):
        if len(row) <= index:
            what = "blank" if not row else f"{len(row)} values where {len(header)} are expected"
            raise ValueError(f"{path}, line {line}: {what}. Correct or remove the line.")
        texts.append(row[index].strip())
        lines.append(line)
    return _whole_numbers(path, texts, lines)


def _delimiter(path: Path, head: bytes) -> str:
    if path.suffix.lower() == ".tsv":
        return "\t"
    first = head.splitlines()[0].decode("utf-8", errors="replace")
    return max(",;\t", key=first.count)  # the comma where none of them is there


def _rows(path: Path, delimiter: str) -> Iterator[tuple[list[str], int]]:
    """Rows and the line each ends in; blank lines at the end of the file are left out."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            blank: list[tuple[list[str], int]] = []
            for row in reader:
                if not row:
                    blank.append((row, reader.line_num))
                    continue
                if blank:
                    yield from blank
                    blank = []
                yield row, reader.line_num
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {reader.line_num}: not CSV ({error}). Correct the line's quotes."
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no text file: {error.reason}. Save it as UTF-8, or give it its own ending."
        ) from None


def _chain(
    first: tuple[list[str], int] | None, rest: Iterator[tuple[list[str], int]]
) -> Iterator[tuple[list[str], int]]:
    if first is not None:
        yield first
    yield from rest


def _choose(where: str, names: Sequence[str], whole: Sequence[str], column: str | None) -> int:
    """Index of the column of lengths. ``whole`` names the columns of integers."""
    listed = ", ".join(names)
    if column is not None:
        if column not in names:
            raise ValueError(f"{where} has no column {column!r}. Its columns: {listed}.")
        return names.index(column)
    if len(names) == 1:
        return 0
    known = [name for name in COLUMN_NAMES if name in names]
    if known:
        return names.index(known[0])
    if len(whole) == 1:
        return names.index(whole[0])
    raise ValueError(
        f"Cannot tell which column of {where} holds the lengths. Its columns: {listed}. Name one "
        "of them as column."
    )


# ---------------------------------------------------------------------- Parquet, data sets


def _read_parquet(path: Path, column: str | None) -> IntArray:
    try:
        import pyarrow  # type: ignore[import-not-found,unused-ignore]
        from pyarrow import parquet
    except ImportError:
        raise ImportError(
            f"Reading {path} needs pyarrow, which is not installed: pip install pyarrow. Or "
            "write the lengths as CSV or plain text."
        ) from None
    try:
        file = parquet.ParquetFile(path)
        schema = file.schema_arrow
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from None
    name = _choose_typed(str(path), schema, column)
    return _from_arrow(str(path), name, file.read(columns=[name]).column(name))


def _read_saved_dataset(path: Path, column: str | None) -> IntArray:
    if not any((path / n).exists() for n in ("state.json", "dataset_info.json")):
        splits = sorted(p.parent.name for p in path.glob("*/state.json"))
        what = (
            f"holds several splits ({', '.join(splits)}): give {path / splits[0]}, for example"
            if splits
            else "is no Hugging Face data set saved with save_to_disk (neither state.json nor "
            "dataset_info.json is there): give a file or such a directory"
        )
        raise ValueError(f"The directory {path} {what}.")
    try:
        import datasets  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ImportError(
            f"Reading the data set {path} needs datasets, which is not installed: pip install "
            "datasets. Or write the lengths as CSV or plain text."
        ) from None
    try:
        dataset = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise ValueError(f"The data set {path} cannot be loaded: {error}") from None
    name = _choose_typed(str(path), dataset.features.arrow_schema, column)
    # As Arrow tables, so that rows selected or shuffled count as the user sees them.
    table = dataset.select_columns([name]).with_format("arrow")[:]
    return _from_arrow(str(path), name, table.column(name))


def _choose_typed(where: str, schema: Any, column: str | None) -> str:
    from pyarrow import types

    whole = [field.name for field in schema if types.is_integer(field.type)]
    return str(schema.names[_choose(where, schema.names, whole, column)])


def _from_arrow(where: str, name: str, values: Any) -> IntArray:
    from pyarrow import compute, types

    named = f"column {name!r} of {where}"
    if values.null_count:
        row = compute.index(compute.is_null(values), True).as_py()
        raise ValueError(
            f"Row {row} of {named} is empty ({values.null_count} such rows). {_WANTED}."
        )
    if types.is_list(values.type) or types.is_large_list(values.type):
        values = compute.list_value_length(values)
    if not (types.is_integer(values.type) or types.is_floating(values.type)):
        raise ValueError(
            f"The {named} holds {values.type}, no numbers. {_WANTED}; a column of lists of tokens "
            "is counted."
        )
    return as_lengths(values.to_numpy(), name=named)

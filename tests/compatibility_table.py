"""Reads the tables of docs/lightning-compatibility.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lightning-compatibility.md"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: of what, whether it works, what there is to say, and the tests that show it."""

    section: str
    name: str
    status: str
    note: str
    tests: tuple[str, ...]


@cache
def compatibility_rows() -> tuple[Row, ...]:
    rows, section = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or len(cells) != 4 or cells[1] == "status":
            continue
        name, status, note, tests = cells
        shown = tuple(test.strip("` ") for test in tests.split(","))
        rows.append(Row(section=section, name=name, status=status, note=note, tests=shown))
    return tuple(rows)

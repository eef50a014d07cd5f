"""Types of options: from words of the command line, or values of a configuration file."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

__all__ = ["BYTES", "ITERATIONS", "NAMES", "WORLD_SIZES"]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MOST_GIB = 4096  # a number without unit up to here is GiB, above it bytes
_MOST_BYTES = 2**60  # far above any memory; below what int64 holds


class _Text:
    """A type of jsonargparse: a function from text (or a config file's value), with a name."""

    def __init__(self, read: Callable[[Any], Any], name: str, option: str) -> None:
        self._read, self._name, self._option = read, name, option

    def __call__(self, value: Any) -> Any:
        try:
            return self._read(value)
        except ValueError as error:
            raise ArgumentTypeError(f"{self._option}: {error}") from None  # argparse shows its text

    def __repr__(self) -> str:
        return self._name


def _names(value: Any) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value
    names = [str(part).strip() for part in parts] if isinstance(parts, (list, tuple)) else []
    if not names or not all(names):
        raise ValueError(
            f"expected names with commas between them, or a list of names; got {value!r}"
        )
    return list(dict.fromkeys(names))


def _world_sizes(value: Any) -> list[int]:
    parts = value.split(",") if isinstance(value, str) else value
    parts = parts if isinstance(parts, (list, tuple)) else [parts]
    sizes = [_whole(part) for part in parts]
    if not sizes or min(sizes) < 1:
        raise ValueError(
            "expected whole numbers of GPUs, at least 1, with commas between them, such as "
            f"8,16,32; got {value!r}"
        )
    return sorted(set(sizes))


def _whole(value: Any) -> int:
    """A number that is not negative; -1 for all else."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value.strip()):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _bytes(value: Any) -> int:
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)(b?)", str(value).strip().lower())
    try:
        number = float(match[1]) if match else -1.0
    except ValueError:
        number = -1.0
    if match is not None:
        if match[2] or match[4]:
            number *= (_BINARY if match[3] else _UNITS)[match[2]]
        elif number <= _MOST_GIB:
            number *= 2**30
    if not 1 <= number < _MOST_BYTES:  # nor is infinity, which 1e400 is read as
        raise ValueError(
            f"{value!r} is no amount of memory. Write GiB (72), a number with its unit (72GiB, "
            "80GB) or bytes (77309411328)"
        )
    return int(number)


def _iterations(value: Any) -> list[int | None]:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        ends = [None if end is None else _whole(end) for end in value]
        if all(end is None or end >= 0 for end in ends):
            return ends
    match = re.fullmatch(r"([0-9]{0,18}):([0-9]{0,18})", str(value).strip())
    if not match:
        text = f"expected first:end, such as 0:10 (the end is left out); got {value!r}"
        if isinstance(value, int):
            text += (
                '. In a configuration file write it in quotes, "1:10": YAML reads 1:10 without '
                "them as one number, of base 60"
            )
        raise ValueError(text)
    return [int(text) if text else None for text in match.groups()]


NAMES = _Text(_names, "names with commas between them", "--policies")
WORLD_SIZES = _Text(_world_sizes, "numbers with commas between them", "--scaling")
BYTES = _Text(_bytes, "GiB, number with unit, or bytes", "--memory")
ITERATIONS = _Text(_iterations, "first:end", "--iterations")

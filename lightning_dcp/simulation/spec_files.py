"""Frozen dataclasses of numbers from JSON and YAML files that may start from a preset."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["build", "read_fields"]


def read_fields(path: Path, *, what: str, example: str) -> dict[Any, Any]:
    """The mapping that a JSON (``.json``) or YAML file (any other name) holds.

    Args:
        path: The file.
        what: What the fields describe, for messages.
        example: A line that such a file might hold, for messages.

    Raises:
        FileNotFoundError: No such file.
        ValueError: No JSON or YAML, or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text file: byte {error.start} is not UTF-8.") from None
    try:
        if path.suffix.lower() == ".json":
            values = json.loads(text)
        else:
            import yaml  # type: ignore[import-untyped,unused-ignore]

            try:
                values = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(str(error)) from None
    except ValueError as error:
        raise ValueError(
            f"{path} is neither JSON (.json) nor YAML (any other name): {error}"
        ) from None
    if not isinstance(values, dict):
        raise ValueError(
            f"{path} must hold fields of a {what}, such as '{example}'; got {values!r:.80}."
        )
    return values


def build(
    kind: Any, base: Any, values: Mapping[Any, Any], *, presets: Iterable[str], prefix: str = ""
) -> Any:
    """A ``kind`` from the fields of a file.

    Args:
        kind: A dataclass.
        base: Where fields that are not given come from; None: from their defaults.
        values: The fields.
        presets: Names that may stand under ``base``, for messages.
        prefix: Of the fields' names, for messages.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: An unknown or missing field, a value out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = [key for key in values if key not in fields]
    if unknown:
        also = "" if prefix else ", base"
        raise ValueError(
            f"unknown field {', '.join(f'{prefix}{key}' for key in unknown)}. Known fields: "
            f"{', '.join(prefix + name for name in fields)}{also}."
        )
    numbers = {name: _number(fields[name], value) for name, value in values.items()}
    if base is not None:
        return dataclasses.replace(base, **numbers)
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
    if missing:
        raise ValueError(
            f"missing field {', '.join(prefix + name for name in missing)}. Give it, or start "
            f"from a preset with base: {', '.join(presets)}."
        )
    return kind(**numbers)


def _number(field: dataclasses.Field[Any], value: Any) -> Any:
    kind = str(field.type)
    # YAML 1.1 reads 80e9 as text: it wants 80.0e+9, which nobody writes.
    if isinstance(value, str) and kind != "str":
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{field.name} must be a number; got {value!r}.") from None
    if kind.startswith("int") and isinstance(value, float) and value.is_integer():
        return int(value)
    return value

"""Naming, finding and replacing the tensors in a block's arguments and outputs."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["BlockArguments", "hidden_of", "with_hidden"]

_HIDDEN_NAMES = ("hidden_states", "x", "src", "hidden", "inputs", "input")

Visit = Callable[[str, Tensor], Tensor]


class BlockArguments:
    """The arguments of a block's ``forward`` under one name each, however a call passes them.

    A parameter's name where ``forward`` has one, else the position; parts of tuples, lists and
    dicts are called ``name.0`` or ``name.key``.

    Args:
        forward: the block's.
        hidden_states: name or position of the hidden states; None: the first positional argument,
            else the first of the usual names.
    """

    def __init__(self, forward: Callable[..., Any], hidden_states: str | int | None = None) -> None:
        self._names: list[str] = []
        try:
            parameters = inspect.signature(forward).parameters.values()
        except (TypeError, ValueError):
            parameters = {}.values()
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                break
            self._names.append(parameter.name)
        self._hidden = None if hidden_states is None else self.name_of(hidden_states)

    @property
    def default_hidden(self) -> str:
        """Name of the hidden states as long as no call has told it."""
        return self.name_of(0) if self._hidden is None else self._hidden

    def name_of(self, argument: str | int) -> str:
        """Name of a position or name; a position counts without ``self``."""
        if isinstance(argument, str) and not argument.isdecimal():
            return argument
        position = int(argument)
        return self._names[position] if position < len(self._names) else str(position)

    def hidden_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Name of the argument that holds the hidden states.

        Raises:
            TypeError: if there is none.
        """
        if self._hidden is not None:
            candidates = [self._hidden]
        else:
            candidates = [self.name_of(i) for i in range(len(args))] + [
                name for name in _HIDDEN_NAMES if name in kwargs
            ]
        given = {self.name_of(i): value for i, value in enumerate(args)} | dict(kwargs)
        for name in candidates:
            if isinstance(given.get(name), Tensor):
                return name
        raise TypeError(
            f"the block's hidden states were not found among its arguments {sorted(given)}: "
            f"expected the first positional tensor or a keyword of {list(_HIDDEN_NAMES)}. Name it "
            f"with `hidden_states`"
        )

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """All tensors by name."""
        found: dict[str, Tensor] = {}

        def visit(name: str, tensor: Tensor) -> Tensor:
            found[name] = tensor
            return tensor

        self.map(args, kwargs, visit)
        return found

    def map(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], visit: Visit
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with each tensor replaced by ``visit(name, tensor)``."""
        new_args = tuple(_map(self.name_of(i), value, visit) for i, value in enumerate(args))
        return new_args, {name: _map(name, value, visit) for name, value in kwargs.items()}


def _map(name: str, value: Any, visit: Visit) -> Any:
    if isinstance(value, Tensor):
        return visit(name, value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value, strict=True)
        return type(value)(*(_map(f"{name}.{field}", part, visit) for field, part in fields))
    if type(value) in (tuple, list):
        return type(value)(_map(f"{name}.{i}", part, visit) for i, part in enumerate(value))
    if type(value) is dict:
        return {key: _map(f"{name}.{key}", part, visit) for key, part in value.items()}
    return value


def hidden_of(output: Any) -> Tensor:
    """The hidden states in a block's output: the tensor itself, or the first part of it.

    Raises:
        TypeError: for anything else.
    """
    first = output if isinstance(output, Tensor) else next(_parts(output), None)
    if not isinstance(first, Tensor):
        raise TypeError(
            f"a block must return its hidden states, alone or first in a tuple, list, dict or "
            f"dataclass; got {type(output).__name__}"
        )
    return first


def with_hidden(output: Any, hidden: Any) -> Any:
    """``output`` with other hidden states in the same structure."""
    if output is None or isinstance(output, Tensor):
        return hidden
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        changed_tuple: Any = output
        return changed_tuple._replace(**{output._fields[0]: hidden})
    if isinstance(output, (tuple, list)):
        return type(output)([hidden, *output[1:]])
    if isinstance(output, Mapping):
        changed: Any = copy.copy(output)
        changed[next(iter(output))] = hidden
        return changed
    return dataclasses.replace(output, **{dataclasses.fields(output)[0].name: hidden})


def _parts(output: Any) -> Iterator[Any]:
    if isinstance(output, (tuple, list)):
        yield from output
    elif isinstance(output, Mapping):
        yield from output.values()
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield getattr(output, field.name)

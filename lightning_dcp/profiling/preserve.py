"""Leave a model exactly as it was found, whatever its training step does to it.

Profiling runs the user's own ``training_step`` with backward before training starts. That fills
gradients, moves BatchNorm statistics, feeds metrics, draws random numbers and runs any line the
user wrote, such as ``self.num_seen += 1``. All of it is put back here, bit for bit.

What is not seen: objects that are no attribute of a (sub)module (a global, a closure), attributes
that the body creates, and tensors nested inside a list or dict (the container gets its members
back, not their former values).
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_dcp.parallel import rng

_PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
# nn.Module's own dictionaries (parameters, hooks, ...): the first are handled one by one, the hooks
# belong to whoever registered them.
_OWNED_BY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_ABSENT = object()

Undo = Callable[[], None]


@contextmanager
def preserve(module: nn.Module, *, parameters: bool = True) -> Iterator[None]:
    """Restore ``module`` and all global random states on exit, also when the body raises.

    Restored bit-identically: parameters, their ``requires_grad`` and gradients (a gradient that
    was ``None`` is ``None`` again), buffers, training flags, plain attributes (numbers, strings,
    tensors, random generators, members of lists, dicts and sets) of every submodule, which
    includes the states of :class:`torchmetrics.Metric`, and the random states of Python, NumPy,
    torch on the CPU and on every CUDA device that is in use.

    Args:
        module: The model; the objects (``Parameter``, buffer and gradient tensors) stay the same
            ones, so that whoever holds a reference, an optimizer for one, is not misled.
        parameters: Whether values and gradients of parameters are restored. Their copies are what
            costs, and a body without a backward pass does not need them.

    Note:
        Copies of accelerator tensors are kept in host memory, so that the memory that the body
        measures is not the copies' own.
    """
    with ExitStack() as stack:
        # Callbacks run in reverse: randomness last, after everything that could draw.
        stack.callback(_random_states())
        for submodule in module.modules():
            stack.callback(_attributes(submodule))
        for submodule in module.modules():
            stack.callback(_registered(submodule))
        with torch.no_grad():
            if parameters:
                for parameter in module.parameters():
                    stack.callback(_parameter(parameter))
            for buffer in module.buffers():
                stack.callback(_tensor(buffer))
        yield


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True) if tensor.is_cuda else tensor.detach().clone()


def _tensor(tensor: torch.Tensor) -> Undo:
    """Put value, shape and storage of ``tensor`` back, in place."""
    if is_lazy(tensor):
        return lambda: None  # has no value yet
    # Shares storage but no version counter, and still has the storage if `.data` is replaced.
    alias = tensor.data
    saved = _host_copy(tensor)

    def undo() -> None:
        # A tensor made in inference mode, such as a metric's state after an evaluation, can be
        # written only there.
        with torch.inference_mode() if alias.is_inference() else torch.no_grad():
            alias.copy_(saved)
            if tensor.data_ptr() != alias.data_ptr() or tensor.shape != alias.shape:
                tensor.data = alias

    return undo


def _parameter(parameter: nn.Parameter) -> Undo:
    restore_value = _tensor(parameter)
    requires_grad = parameter.requires_grad
    grad = parameter.grad
    restore_grad = _tensor(grad) if grad is not None else None

    def undo() -> None:
        restore_value()
        parameter.requires_grad_(requires_grad)
        if restore_grad is not None:
            restore_grad()
        parameter.grad = grad

    return undo


def _registered(module: nn.Module) -> Undo:
    """Put the parameter and buffer *objects* back, if names were bound to other ones."""
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    saved = tuple(dict(table) for table in tables)

    def undo() -> None:
        for table, entries in zip(tables, saved, strict=True):
            table.update(entries)

    return undo


def _attributes(module: nn.Module) -> Undo:
    """Put plain attributes back: what users keep on a module beside parameters and buffers."""
    undos: list[Undo] = []
    for name, value in list(vars(module).items()):
        if name in _OWNED_BY_MODULE:
            continue
        restore_value = _value(value)
        if restore_value is not None:
            undos.append(_attribute(module, name, value, restore_value))

    def undo() -> None:
        for one in undos:
            one()

    return undo


def _attribute(module: nn.Module, name: str, value: object, restore_value: Undo) -> Undo:
    attributes = vars(module)

    def undo() -> None:
        restore_value()
        # Not setattr(): a property or nn.Module.__setattr__ would do more than put it back.
        if attributes.get(name, _ABSENT) is not value:
            attributes[name] = value

    return undo


def _value(value: Any) -> Undo | None:
    """How to put the content of a value back, or ``None`` for values that are left alone."""
    if isinstance(value, _PLAIN):
        return lambda: None
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, (list, deque)):
        return _members(value)
    if isinstance(value, (dict, set)):
        return _entries(value)
    return _generator(value)


def _members(value: list[Any] | deque[Any]) -> Undo:
    members = list(value)

    def undo() -> None:
        # Untouched containers stay untouched: subclasses may do more than store.
        if not _same_objects(value, members):
            value.clear()
            value.extend(members)

    return undo


def _entries(value: dict[Any, Any] | set[Any]) -> Undo:
    entries = copy.copy(value)

    def undo() -> None:
        same = _same_objects(value, entries)
        if same and isinstance(value, dict) and isinstance(entries, dict):
            same = _same_objects(value.values(), entries.values())
        if not same:
            value.clear()
            value.update(entries)

    return undo


def _same_objects(now: Collection[Any], before: Collection[Any]) -> bool:
    """Identity, since ``==`` of tensors is elementwise."""
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _generator(value: Any) -> Undo | None:
    """The state of a random generator that a module keeps for itself."""
    if isinstance(value, torch.Generator):
        return _setter(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return _setter(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return _setter(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return _setter(lambda state: setattr(bits, "state", state), copy.deepcopy(bits.state))
    return None


def _setter(set_state: Callable[[Any], Any], state: Any) -> Undo:
    def undo() -> None:
        set_state(state)

    return undo


def _random_states() -> Undo:
    host = rng.capture(torch.device("cpu"))
    # Reading the state of a device that nobody uses would initialise CUDA for nothing.
    initialised = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda_states = torch.cuda.get_rng_state_all() if initialised else []

    def undo() -> None:
        host.restore()
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)

    return undo

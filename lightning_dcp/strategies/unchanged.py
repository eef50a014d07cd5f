"""What micro-batches change beside gradients, put back where their iteration is lost.

Metric objects, buffers, and plain attributes (numbers, flags, texts): how many tokens were counted,
or up to which length a table of rotary embeddings, which is a buffer, was made. All are looked at
once an iteration, so that it has to be cheap.

NOTE [Which buffers are copied]
    Small ones always; large ones if the first micro-batches have changed them, for which they are
    copied to the host once and compared. Counters of writes alone would not do: neither
    `batch_norm` nor code that writes to `buffer.data` moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_dcp.strategies.out_of_memory import RanOutOfMemory

__all__ = ["StateBefore"]

#: A copy of so much takes no time to speak of.
_SMALL_BYTES = 256 * 1024
_OF_METRICS = ("_update_count", "_computed", "_forward_cache")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: Which hook is running, for one, is Lightning's to know; all modules have most of these.
_OF_LIGHTNING = frozenset(vars(L.LightningModule())) - {"training"}
_ABSENT = object()


class StateBefore:
    """Buffers, attributes and metric objects of a module as they were when an iteration began.

    Args:
        module: the LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        #: Names of large buffers that are written to; None before anything ran.
        self._written: set[str] | None = None
        self._began = _State()
        #: Before and after hooks that run once an iteration, amid the first micro-batch.
        self._hooks: list[_State] = []
        self._undo: list[Callable[[], None]] = []

    def keep(self, metrics: Iterable[Metric]) -> None:
        """Take note of the state that holds now.

        Args:
            metrics: the metric objects inside the module.
        """
        self._began, self._hooks = self._now(), []
        self._undo = [_metric(metric) for metric in metrics]

    def keep_around_hooks(self) -> None:
        """The same, before and after hooks that do not run again where the iteration does."""
        self._hooks.append(self._now())

    def learn(self) -> None:
        """See which buffers the first micro-batches have changed, after they have run."""
        if self._written is None:
            began, *hooks = (state.kept for state in (self._began, *self._hooks))
            latest = hooks[-1] if hooks else began
            self._written = {kept.name for kept in latest.values() if kept.is_changed}
            if hooks:
                self._written |= {
                    now.name
                    for at, now in hooks[0].items()
                    if at in began and now.differs_from(began[at])
                }

    def put_back(self) -> None:
        """Put everything back that has changed since.

        Raises:
            torch.OutOfMemoryError: A large buffer was written to for the first time.
        """
        if self._hooks:
            self._began.take_over(*self._hooks)
            self._hooks = []
        self._began.put_back()
        for undo in self._undo:
            undo()

    def _now(self) -> _State:
        kept = {
            id(buffer): _Kept(name, buffer, copied=self._is_copied(name, buffer))
            for name, buffer in self._module.named_buffers()
        }
        return _State(kept, [_Bindings(owner) for owner in self._module.modules()])

    def _is_copied(self, name: str, buffer: Tensor) -> bool:
        known = self._written
        return known is None or name in known or buffer.nbytes <= _SMALL_BYTES


@dataclass
class _State:
    """Of all modules at one time; buffers by their identity."""

    kept: dict[int, _Kept] = field(default_factory=dict)
    bindings: list[_Bindings] = field(default_factory=list)

    def take_over(self, before: _State, after: _State) -> None:
        """Change what has changed from one state to another."""
        for own, earlier, later in zip(self.bindings, before.bindings, after.bindings, strict=True):
            own.buffers.update(_changed(earlier.buffers, later.buffers))
            own.plain.update(_changed(earlier.plain, later.plain))
        for at, kept in after.kept.items():
            if at not in before.kept or kept.differs_from(before.kept[at]):
                self.kept[at] = kept

    def put_back(self) -> None:
        for bindings in self.bindings:
            bindings.put_back()
        for kept in self.kept.values():
            kept.put_back()


def _changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in after.items() if before.get(name, _ABSENT) is not value}


class _Bindings:
    """What the names of one module stand for: buffers, made or replaced since, and plain values."""

    def __init__(self, owner: nn.Module) -> None:
        self._owner = owner
        self.buffers = dict(owner._buffers)
        self.plain = _plain(owner)

    def put_back(self) -> None:
        self._owner._buffers.clear()
        self._owner._buffers.update(self.buffers)
        attributes = vars(self._owner)
        for name in _plain(self._owner).keys() - self.plain.keys():
            del attributes[name]
        attributes.update(self.plain)


def _plain(module: nn.Module) -> dict[str, Any]:
    """Attributes that are plain values, or a tensor with one, without what they hang on."""
    if isinstance(module, (Metric, MetricCollection)):
        return {}  # they know what of theirs belongs together
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_LIGHTNING and (isinstance(value, _PLAIN) or _is_number(value))
    }


def _is_number(value: Any) -> bool:
    """A tensor with one number; not a loss, which would hold its graph."""
    return isinstance(value, Tensor) and value.dim() == 0 and value.grad_fn is None


class _Kept:
    """A buffer of a module, with a copy if it is expected to be written to."""

    def __init__(self, name: str, buffer: Tensor, *, copied: bool) -> None:
        self.name = name
        self._buffer = buffer
        self._version = _version(buffer)
        self._copy: Tensor | None = None
        if copied or self._version is None:
            small = buffer.nbytes <= _SMALL_BYTES
            self._copy = buffer.detach().clone() if small else buffer.detach().to("cpu", copy=True)

    @property
    def is_changed(self) -> bool:
        if self._copy is None:
            return _version(self._buffer) != self._version
        return not torch.equal(self._buffer.to(self._copy.device), self._copy)

    def differs_from(self, earlier: _Kept) -> bool:
        """Whether the buffer was written to between two times."""
        if self._copy is None or earlier._copy is None:
            return self._version != earlier._version
        return not torch.equal(self._copy, earlier._copy)

    def put_back(self) -> None:
        if not self.is_changed:
            return
        if self._copy is not None:
            with torch.inference_mode() if self._buffer.is_inference() else torch.no_grad():
                self._buffer.copy_(self._copy)
        else:
            raise RanOutOfMemory(
                f"An iteration ran out of memory and cannot be repeated: it has written to the"
                f" buffer {self.name}, which the first one had not. Lower memory_limit_bytes, and"
                " start again from the last checkpoint."
            )


def _version(tensor: Tensor) -> int | None:
    """Changes whenever a tensor is written to; None where nobody counts."""
    return None if tensor.is_inference() else tensor._version


def _metric(metric: Metric) -> Callable[[], None]:
    """Copies of tensor states, which are added to in place; lists only get longer."""
    states: dict[str, Any] = {}
    for name in metric._defaults:
        state = getattr(metric, name)
        states[name] = state.detach().clone() if isinstance(state, Tensor) else list(state)
    others = {name: getattr(metric, name) for name in _OF_METRICS if hasattr(metric, name)}

    def undo() -> None:
        # Copies again: an iteration may be lost more than once.
        for name, value in states.items():
            setattr(metric, name, value.clone() if isinstance(value, Tensor) else list(value))
        for name, value in others.items():
            setattr(metric, name, value)

    return undo

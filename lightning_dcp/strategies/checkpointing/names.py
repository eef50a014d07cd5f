"""What ModelCheckpoint says it has saved, where a save has failed.

Lightning writes down the new names before it saves, since they are part of what is saved. After a
failed save `best_model_path` would name a file that does not exist, and the one that does would
never be removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lightning.pytorch.callbacks import ModelCheckpoint

if TYPE_CHECKING:
    import lightning as L

__all__ = ["SavedNames"]

_NAMES = (
    "best_model_path",
    "best_model_score",
    "last_model_path",
    "kth_best_model_path",
    "kth_value",
    "current_score",
)


class SavedNames:
    """Takes the names of checkpoints back that could not be saved."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[ModelCheckpoint, dict[str, Any]] = WeakKeyDictionary()

    def keep(self, trainer: L.Trainer) -> None:
        """All that callbacks name now exists."""
        for callback in _callbacks(trainer):
            self._known[callback] = _names(callback)

    @contextmanager
    def saving(self, trainer: L.Trainer, path: Any) -> Iterator[None]:
        """Around a save."""
        concerned = [c for c in _callbacks(trainer) if _has(c, str(path))]
        for callback in _callbacks(trainer):
            if callback not in concerned:
                self._known[callback] = _names(callback)
        try:
            yield
        except Exception:
            for callback in concerned:
                if callback in self._known:
                    _set(callback, self._known[callback])
            raise
        self.keep(trainer)


def _callbacks(trainer: L.Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]


def _names(callback: ModelCheckpoint) -> dict[str, Any]:
    names = {name: getattr(callback, name) for name in _NAMES if hasattr(callback, name)}
    return {**names, "best_k_models": dict(callback.best_k_models)}


def _has(callback: ModelCheckpoint, path: str) -> bool:
    names = (callback.best_model_path, callback.last_model_path, *callback.best_k_models)
    return path in map(str, names)


def _set(callback: ModelCheckpoint, names: dict[str, Any]) -> None:
    for name, value in names.items():
        setattr(callback, name, dict(value) if isinstance(value, dict) else value)

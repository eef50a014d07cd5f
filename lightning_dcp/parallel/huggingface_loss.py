"""How many elements the loss inside a Hugging Face model was a mean over.

A causal language model shifts labels inside: the first label of each sequence bears no loss, so
that counting labels gives one too many per sample. Whether it does depends on the model (T5 and
BERT do not) and on the call (no labels, no loss; or labels that are shifted already): its loss
function is watched. A loss that the user computes from such a model's logits has to shift as well,
where labels are the tokens themselves.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_dcp.parallel.targets import label_entries

__all__ = ["OwnLosses", "set_attribute", "shifts_labels"]

_CAUSAL = "ForCausalLMLoss"


class OwnLosses:
    """Watches the loss functions of models that shift labels.

    Args:
        models: of the library; others of it than causal language models are left alone.
        ignore_index: label that bears no loss.
    """

    def __init__(self, models: list[Any], ignore_index: int = -100) -> None:
        self._ignore_index = ignore_index
        self._counts: list[Tensor] = []
        self._restore: list[Callable[[], object]] = []
        for model in models:
            if shifts_labels(model):
                self._watch(model)
        self._shifts = bool(self._restore)
        self._labels_are_tokens = self._shifts

    @property
    def watching(self) -> bool:
        """Whether there is a model that shifts labels."""
        return bool(self._restore)

    @property
    def shifts(self) -> bool:
        """Whether the first label of each sequence is expected to bear no loss."""
        return self._shifts

    def shifts_in(self, batch: Any) -> bool:
        """Whether the first label of each of the batch's sequences is expected to bear no loss.

        Also without a loss of the model's own, if labels are the tokens of ``input_ids``: nobody
        predicts a token from itself, so the user's loss shifts them.
        """
        if self._shifts or not self._labels_are_tokens or not isinstance(batch, Mapping):
            return self._shifts
        tokens, names = batch.get("input_ids"), label_entries(batch)
        if not isinstance(tokens, Tensor) or not names or batch[names[0]].shape != tokens.shape:
            return False
        labels = batch[names[0]]
        # For good: the labels of a short micro-batch may be its tokens by chance.
        self._labels_are_tokens = not bool(
            ((labels != tokens) & (labels != self._ignore_index)).any()
        )
        return self._labels_are_tokens

    def forget(self) -> None:
        """What was seen so far is not part of the step that follows."""
        self._counts = []

    def take(self) -> float | None:
        """Elements of the step's loss since ``forget``; None where there was none, or several."""
        counts, self._counts = self._counts, []
        if self._restore:
            self._shifts = bool(counts)
        return float(counts[0]) if len(counts) == 1 else None

    def close(self) -> None:
        """Give the models their loss functions back."""
        while self._restore:
            self._restore.pop()()
        self._shifts = False

    def _watch(self, model: Any) -> None:
        original = model.loss_function

        def tell(labels: Tensor | None, **kwargs: Any) -> None:
            if kwargs.get("num_items_in_batch") is not None:
                raise ValueError(
                    f"{type(model).__name__} was given num_items_in_batch, by which it divides its "
                    f"loss, but the strategy weights micro-batches by their own elements. Leave it "
                    f"out of the batch"
                )
            targets = kwargs.get("shift_labels")
            if targets is None and labels is not None:
                targets = labels[..., 1:]
            if targets is not None and len(self._counts) < 2:
                ignored = kwargs.get("ignore_index", self._ignore_index)
                self._counts.append((targets != ignored).sum())

        @functools.wraps(original)
        def watched(logits: Tensor, labels: Tensor | None, *args: Any, **kwargs: Any) -> Any:
            tell(labels, **kwargs)
            return original(logits, labels, *args, **kwargs)

        self._restore.append(set_attribute(model, "_loss_function", watched))


_MISSING = object()


def set_attribute(owner: Any, name: str, value: object) -> Callable[[], object]:
    """Set an attribute of the instance; what is returned puts back what was there."""
    before = vars(owner).get(name, _MISSING)
    vars(owner)[name] = value
    if before is _MISSING:
        return functools.partial(vars(owner).pop, name, None)
    return functools.partial(vars(owner).__setitem__, name, before)


def shifts_labels(model: Any) -> bool:
    """Whether a model of the library has a loss of its own that shifts labels.

    By the loss that it calls, not by its ``loss_type``: that is None for models that are named
    otherwise, such as ``GPT2LMHeadModel``, which fall back to the causal loss.
    """
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names:
        return False
    return getattr(model.loss_function, "__name__", "") == _CAUSAL

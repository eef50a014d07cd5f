"""Hugging Face models inside a training step: what they need when tokens are shared, tiled losses.

Such a model counts positions from zero, shifts labels by itself and makes masks as long as its
input. Where it gets a slice of the sequence it is told where the slice lies, and labels are shifted
before they are sliced: at the end of a slice the next token is another rank's.

transformers is not imported: a model of it can only be there if the user did.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dcp.parallel.deferred_logits import deferring
from lightning_dcp.parallel.huggingface import pretrained_models
from lightning_dcp.parallel.huggingface_loss import set_attribute, shifts_labels
from lightning_dcp.parallel.targets import label_entries

__all__ = ["PretrainedModels"]

_MASK = "attention_mask"


class PretrainedModels:
    """The Hugging Face models of a module; those that are parts of others come with these.

    Args:
        module: that runs the training step.
        ignore_index: label that bears no loss.
    """

    def __init__(self, module: nn.Module, ignore_index: int = -100) -> None:
        self._ignore_index = ignore_index
        self.models = _outermost(module)
        #: Output layers whose logits are made tile by tile in the loss.
        self.tiled = False
        #: Whether a model's own loss was called in a step on whole sequences; None: not seen yet.
        self._shifts: bool | None = None
        self._called = False
        self._is_sharded = False

    @property
    def own(self) -> frozenset[str]:
        """Entries of batches that are dealt with here."""
        return frozenset({_MASK}) if self.models else frozenset()

    @property
    def vocabulary(self) -> int:
        """Words of the largest output layer whose logits can be tiled; 0 where there is none."""
        return max((layer.out_features for layer in self._layers()), default=0)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A step on whole sequences."""
        if not self.models:
            yield
            return
        self._called = False
        with self._losses():
            yield
        self._shifts = self._shifts or self._called

    @contextmanager
    def sharded(self, positions: Tensor, length: int) -> Iterator[None]:
        """A step on a slice of the sequence.

        Args:
            positions: (n,) places of its tokens in the sequence, all below S.
            length: S.
        """
        with ExitStack() as stack:
            for model in self.models:
                _check_window(model, length)
                hook = _Placed(model, positions)
                handle = model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
            stack.enter_context(self._losses())
            self._is_sharded = True
            try:
                yield
            finally:
                self._is_sharded = False

    def prepare(self, entries: Mapping[Any, Any], declared: frozenset[Any]) -> dict[Any, Any]:
        """The whole batch as it can be sliced: labels shifted, masks checked.

        Raises:
            ValueError: for a mask that says something that a slice cannot know.
        """
        prepared = dict(entries)
        if not self.models:
            return prepared
        for model in self.models:
            if getattr(model.config, "is_encoder_decoder", False):
                raise ValueError(
                    f"shard='inputs' is not possible for the encoder-decoder model"
                    f" {type(model).__name__}: it has two sequences. Use shard='blocks'"
                )
        is_causal = all(_is_causal_lm(model) for model in self.models)
        if is_causal and self._shifts is not False and "shift_labels" not in entries:
            for name in label_entries(entries):
                labels = entries[name]
                if labels.dim() >= 2:
                    shifted = F.pad(labels, (0, 1), value=self._ignore_index)
                    prepared[name] = shifted[..., 1:]
        mask = entries.get(_MASK)
        if isinstance(mask, Tensor) and _MASK not in declared:
            self._check_mask(mask, prepared, is_causal)
        return prepared

    def mask_of(self, entries: Mapping[Any, Any], positions: Tensor | None) -> dict[str, Tensor]:
        """The slice of a mask that ``prepare`` found dispensable: ones; None: all of it."""
        mask = entries.get(_MASK)
        if not self.models or not isinstance(mask, Tensor) or mask.dim() != 2:
            return {}
        num_tokens = mask.shape[1] if positions is None else positions.numel()
        return {_MASK: mask.new_ones((mask.shape[0], num_tokens))}

    def _check_mask(self, mask: Tensor, entries: Mapping[Any, Any], is_causal: bool) -> None:
        if mask.dim() != 2:
            raise ValueError(
                f"shard='inputs': an attention mask of shape {tuple(mask.shape)} cannot be sliced."
                " Leave masks to the model, or use shard='blocks'"
            )
        kept = mask != 0
        if bool(kept.all()):
            return
        if not is_causal:
            raise ValueError(
                "shard='inputs': padded samples need their attention mask in a bidirectional"
                " model, and a slice cannot have it. Use shard='blocks', or batches of samples of"
                " one length"
            )
        if bool((kept[:, 1:] & ~kept[:, :-1]).any()):
            raise ValueError(
                "shard='inputs': the attention mask masks tokens before others (padding on the"
                " left, or gaps). Pad on the right, where a causal model needs no mask, or use"
                " shard='blocks'"
            )
        for name in label_entries(entries):
            labels = entries[name]
            if labels.shape == mask.shape and bool((labels[~kept] != self._ignore_index).any()):
                raise ValueError(
                    f"shard='inputs': padding bears loss, as labels under the attention mask's"
                    f" zeros are not {self._ignore_index}: it would be computed without the mask."
                    " Set those labels to the ignore index, or use shard='blocks'"
                )

    def _layers(self) -> Iterator[nn.Linear]:
        for model in self.models:
            layer = model.get_output_embeddings()
            # Not a subclass: its forward may be another.
            if type(layer) is nn.Linear and _is_causal_lm(model):
                yield layer

    @contextmanager
    def _losses(self) -> Iterator[None]:
        """Losses know aligned labels and deferred logits meanwhile."""
        with ExitStack() as stack:
            for model in self.models:
                if _is_causal_lm(model):
                    stack.callback(set_attribute(model, "_loss_function", self._loss_of(model)))
            if self.tiled:
                for layer in self._layers():
                    stack.callback(set_attribute(layer, "forward", deferring(layer)))
            yield

    def _loss_of(self, model: Any) -> Callable[..., Any]:
        original = model.loss_function

        @functools.wraps(original)
        def loss(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._called = True
            if self._is_sharded and kwargs.get("shift_labels") is None:
                kwargs["shift_labels"] = labels
            return original(logits, labels, *args, **kwargs)

        return loss


class _Placed:
    """Tells a model where its tokens lie, unless its caller does."""

    def __init__(self, model: nn.Module, positions: Tensor) -> None:
        self._parameters = list(inspect.signature(model.forward).parameters)
        self._positions = positions

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if not isinstance(tokens, Tensor) or tokens.shape[1] != self._positions.numel():
            return None
        added: dict[str, Any] = {}
        if "position_ids" in self._parameters and given.get("position_ids") is None:
            added["position_ids"] = self._positions[None].expand(tokens.shape[0], -1)
        # Without a mask, positions that do not follow each other are taken for packed samples.
        if _MASK in self._parameters and given.get(_MASK) is None:
            added[_MASK] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        passed = self._parameters[: len(args)]
        new_args = tuple(added.pop(name, arg) for name, arg in zip(passed, args, strict=True))
        return new_args, {**kwargs, **added}


def _outermost(module: nn.Module) -> list[Any]:
    known = pretrained_models(module)
    inside = {id(part) for m in known for part in m.modules() if part is not m}
    return [m for m in known if id(m) not in inside]


def _is_causal_lm(model: Any) -> bool:
    return shifts_labels(model) and bool(getattr(model.config, "is_causal", True))


def _check_window(model: Any, length: int) -> None:
    config = model.config.get_text_config()
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        used = getattr(config, "use_sliding_window", True)
        if isinstance(window, int) and used and window < length:
            raise ValueError(
                f"shard='inputs': {type(model).__name__} attends within windows ({name}={window})"
                f" of a sequence of {length} tokens, which it cannot from slices. Use"
                " shard='blocks'"
            )

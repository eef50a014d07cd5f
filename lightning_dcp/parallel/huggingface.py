"""Making the Hugging Face models inside a user's module ready for sharding and recomputation.

What is changed, and put back by ``undo``:

    attention        every model that looks its function up in the library's registry is given ours
    position biases  made for the whole sequence (T5)
    checkpointing    the library's own is off: the strategy recomputes
    caches           of keys and values are off in training: a recomputed block would append twice
    losses           tell how many elements they were a mean over (``OwnLosses``)

transformers is not imported where the user has not: no model of it can be there then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import nn

from lightning_dcp.parallel.huggingface_attention import (
    ATTENTION_NAME,
    makes_position_bias,
    register_attention,
    whole_position_bias,
)
from lightning_dcp.parallel.huggingface_loss import OwnLosses, set_attribute

__all__ = ["PreparedModels", "attention_names", "prepare_models", "pretrained_models"]


class PreparedModels:
    """What was changed in a module's Hugging Face models.

    Attributes:
        losses: watches the models' own losses.
        notices: what a user should know, a sentence each.
        warnings: of these, what overrules something that the user has asked for.
    """

    def __init__(self, losses: OwnLosses) -> None:
        self.losses = losses
        self.notices: list[str] = []
        self.warnings: list[str] = []
        self._changes = ExitStack()
        self._changes.callback(losses.close)

    def undo(self) -> None:
        """Put everything back, once."""
        self._changes.close()

    def _set(self, owner: Any, name: str, value: object) -> None:
        """An attribute of the instance, until ``undo``."""
        self._changes.callback(set_attribute(owner, name, value))

    def _change(self, module: nn.Module, models: list[Any], *, sharded: bool) -> None:
        if sharded:
            self._give_attention(models)
            for part in module.modules():
                if makes_position_bias(part):
                    hook = part.register_forward_pre_hook(whole_position_bias, with_kwargs=True)
                    self._changes.callback(hook.remove)
        cached = [c for c in _configs(models) if getattr(c, "use_cache", False)]
        for config in cached:
            self._set(config, "use_cache", False)
        if cached:
            self.notices.append("use_cache is off while the strategy trains")
        checkpointed = [
            part for part in module.modules() if getattr(part, "gradient_checkpointing", False)
        ]
        for part in checkpointed:
            self._set(part, "gradient_checkpointing", False)
        if checkpointed:
            self.warnings.append(
                "the model's own gradient checkpointing is off while the strategy trains, which "
                "recomputes as many blocks as memory asks for: leave gradient_checkpointing_enable "
                "out"
            )

    def _give_attention(self, models: list[Any]) -> None:
        register_attention()
        replaced: dict[str, None] = {}
        for model in models:
            config = model.config
            for option in ("output_attentions", "output_hidden_states"):
                if getattr(config, option, False):
                    raise ValueError(
                        f"{type(model).__name__} has {option}=True in its config, but under "
                        f"sequence parallelism no rank has the whole of it. Switch it off, or use "
                        f"planning=PlanningOptions(sp_sizes=(1,))"
                    )
            if config._attn_implementation != ATTENTION_NAME and _takes_attention(model):
                replaced[f"{type(model).__name__}'s {config._attn_implementation!r}"] = None
                self._set(config, "_attn_implementation_internal", ATTENTION_NAME)
        if replaced:
            self.notices.append(
                f"attention of Hugging Face models is {ATTENTION_NAME!r} in place of "
                f"{', '.join(replaced)}"
            )


def prepare_models(
    module: nn.Module, *, sharded: bool, ignore_index: int = -100
) -> PreparedModels | None:
    """Change what must be for sharding and recomputation; None where there is no such model.

    Args:
        module: the user's.
        sharded: whether tokens may be shared among ranks: attention stays the model's own if not.
        ignore_index: label that bears no loss.

    Raises:
        ValueError: for what cannot be had of a sharded model, with the option to change.
    """
    models = pretrained_models(module)
    if not models:
        return None
    prepared = PreparedModels(OwnLosses(models, ignore_index))
    try:
        prepared._change(module, models, sharded=sharded)
    except BaseException:
        prepared.undo()
        raise
    return prepared


def pretrained_models(module: nn.Module) -> list[Any]:
    """All of the library's models in ``module``, outer ones first."""
    transformers = sys.modules.get("transformers")
    base = None if transformers is None else getattr(transformers, "PreTrainedModel", None)
    return [] if base is None else [m for m in module.modules() if isinstance(m, base)]


def attention_names(module: nn.Module) -> str:
    """The models' attention and the library's version, for the fingerprint of a cost profile."""
    models = pretrained_models(module)
    if not models:
        return ""
    names = {str(model.config._attn_implementation): None for model in models}
    return f"{', '.join(names)} (transformers {sys.modules['transformers'].__version__})"


def _configs(models: list[Any]) -> Iterator[Any]:
    seen: set[int] = set()
    for model in models:
        for config in (model.config, model.config.get_text_config()):
            if id(config) not in seen:
                seen.add(id(config))
                yield config


def _takes_attention(model: Any) -> bool:
    """Whether the model calls what the registry has, and that can be a function like ours.

    Models that compute attention in their layers show no attention call when they are observed,
    and are not sharded then.
    """
    can_set = getattr(model, "_can_set_attn_implementation", None)
    supports = model._supports_sdpa or getattr(model, "_supports_flex_attn", False)
    return can_set is not None and bool(can_set()) and bool(supports)

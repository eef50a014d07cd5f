"""The attention function that Hugging Face models call under the name ``"lightning_dcp"``.

transformers looks up a model's attention by the name in its config; every model that does so can be
given ours, whatever it came with. It has what the library's ``sdpa`` has (masks, grouped heads,
dropout, relative position biases), the soft-capping that only ``eager`` has, and is right for
sharded tokens.

transformers is imported by ``register_attention`` only.

Shape legend:
    B  samples    H  heads (of queries)    K  heads of keys and values    D  size of a head
    S  true length    n  tokens per rank    C  length of keys
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dcp.parallel import region
from lightning_dcp.parallel.attention import attention, query_rows

__all__ = ["ATTENTION_NAME", "attention_forward", "register_attention", "whole_position_bias"]

#: Of our function in the library's registries: ``attn_implementation="lightning_dcp"``.
ATTENTION_NAME = "lightning_dcp"
# Arguments that change the scores, which neither the library's `sdpa` nor we know of.
_UNKNOWN = ("s_aux", "sinks", "head_mask", "relative_position_bias", "attention_bias")


def register_attention() -> None:
    """Make ``attn_implementation="lightning_dcp"`` known to transformers. Twice is once.

    The strategies do it by themselves, for models of any implementation; a call is needed only to
    name it in ``from_config`` or ``from_pretrained``.

    Raises:
        ImportError: without transformers.
    """
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    masking: Any = importlib.import_module("transformers.masking_utils")
    modeling.AttentionInterface.register(ATTENTION_NAME, attention_forward)
    masking.AttentionMaskInterface.register(ATTENTION_NAME, masking.sdpa_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: the layer that calls; its ``is_causal`` counts where the argument is None.
        query: (B, H, S, D), inside a sharded region (B, H, n, D).
        key: (B, K, S, D) likewise, or (B, K, C, D) of a condition or a cache.
        value: as ``key``.
        attention_mask: of the whole sequence, (B or 1, H or 1, S, C), true or 0 where attended to.
        dropout: probability of dropping an attention weight.
        scaling: of the scores; None: 1/sqrt(D).
        is_causal: mask keys after the query where there is no mask.
        position_bias: added to the scores, (1, H, S, C) of the whole sequence.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        sliding_window: how many keys a query of causal attention sees where there is no mask.
        kwargs: what the library hands through.

    Returns:
        (B, S, H, D), inside a sharded region (B, n, H, D); None for weights, which no rank has.

    Raises:
        ValueError: for what would be ignored otherwise.
    """
    _refuse(module, kwargs, attention_mask)
    length, num_keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and length > 1
    if causal and num_keys > length:  # an empty static cache: what follows is masked
        key, value = key[:, :, :length], value[:, :, :length]
        if position_bias is not None:
            position_bias = position_bias[..., :length]
    shard = region.current_pass(length)
    whole = length if shard is None else shard.length
    if causal and sliding_window is not None and sliding_window < whole:
        attention_mask, causal = _causal(whole, query, sliding_window), False
    # One value for all keys of a query does not change its weights.
    if position_bias is not None and position_bias.shape[-1] > 1:
        if causal:
            attention_mask, causal = _causal(position_bias.shape[-1], query), False
        if shard is not None and position_bias.shape[-2] == shard.local_length:
            attention_mask = query_rows(shard, attention_mask)
        attention_mask = _biased(position_bias, attention_mask)
    out = attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        causal,
        scaling,
        enable_gqa=key.shape[1] != query.shape[1],
        softcap=softcap,
    )
    return out.transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, kwargs: Mapping[str, Any], mask: Tensor | None) -> None:
    name = type(module).__name__
    for argument in _UNKNOWN:
        if kwargs.get(argument) is not None:
            raise ValueError(
                f"{name} passes `{argument}` to its attention function, which the one of "
                f"lightning_dcp does not know. Keep the model's own by "
                f"planning=PlanningOptions(sp_sizes=(1,))"
            )
    if kwargs.get("output_attentions"):
        raise ValueError(
            f"{name} is asked for attention weights, which no rank has under sequence "
            f"parallelism. Leave `output_attentions` out, or use "
            f"planning=PlanningOptions(sp_sizes=(1,))"
        )
    if mask is None and kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError(
            f"{name} gets packed samples by `cu_seq_lens_q` without a mask that tells them apart: "
            f"pass `position_ids` that start again at each sample and no `attention_mask`"
        )


def _causal(length: int, query: Tensor, window: int | None = None) -> Tensor:
    """(S, S), true where a query attends."""
    places = torch.arange(length, device=query.device)
    distance = places[:, None] - places
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def _biased(bias: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
    return bias + mask


def whole_position_bias(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of attention layers that make a bias by distance (T5's).

    The layer would make it for as many tokens as it gets, a rank's share: it is given that of the
    whole sequence, or a single zero where it has none of its own (cross-attention).
    """
    if kwargs.get("position_bias") is not None or kwargs.get("cache") is not None:
        return None
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if len(args) > 1 or not isinstance(hidden, Tensor):
        return None
    layer: Any = module
    if not layer.has_relative_attention_bias:
        bias = hidden.new_zeros((1, 1, 1, 1))
    elif kwargs.get("key_value_states") is None:
        shard = region.current_pass(hidden.shape[1])
        if shard is None:
            return None
        bias = layer.compute_bias(shard.length, shard.length, device=hidden.device)
    else:
        return None
    return args, {**kwargs, "position_bias": bias}


def makes_position_bias(module: nn.Module) -> bool:
    """Whether ``whole_position_bias`` is for this layer."""
    return (
        hasattr(module, "has_relative_attention_bias")
        and callable(getattr(module, "compute_bias", None))
        and "position_bias" in inspect.signature(module.forward).parameters
    )

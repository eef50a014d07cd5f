"""Reaching the attention calls of unmodified models.

NOTE two ways in: neither is enough alone.
    * The functions in ``torch.nn.functional`` are replaced. That reaches
      ``F.scaled_dot_product_attention`` and all composites on top of it (``nn.MultiheadAttention``,
      ``nn.TransformerEncoderLayer``) in every thread, but not names imported earlier with ``from
      torch.nn.functional import ...``.
    * A ``TorchFunctionMode`` around each block reaches those, but a composite arrives as one call
      whose inside then runs with the mode off, and modes are per thread (the runtime enters it
      again for recomputations).

Inside our own handling a thread-local switch keeps a call from being intercepted twice.

Shape legend: N samples, L queries, S keys, E features, H heads.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_dcp.parallel import flex, region
from lightning_dcp.parallel.attention import attention, check_lengths, query_rows, sharded_along
from lightning_dcp.parallel.axes import current_axis
from lightning_dcp.parallel.interception_switch import is_intercepting, no_interception
from lightning_dcp.parallel.region import AttentionCall
from lightning_dcp.parallel.segments import packed_lengths

__all__ = ["AttentionMode", "UnavailableWeights", "installed"]

_SDPA = torch._C._nn.scaled_dot_product_attention  # what an early import got
_MHA: Callable[..., Any] = F.multi_head_attention_forward
_MHA_SIGNATURE = inspect.signature(_MHA)

# What was in torch.nn.functional when we came: usually the above, or another library's replacement.
_replaced: dict[str, Callable[..., Any]] = {}
_thread = threading.local()


class UnavailableWeights:
    """Stands for attention weights that no rank has: to drop it is fine, to use it is an error."""

    def _fail(self) -> NoReturn:
        raise RuntimeError(
            "the attention weights that nn.MultiheadAttention returns are not available under "
            "sequence parallelism, where each rank attends with a part of the heads, nor for "
            "packed samples. Call it with need_weights=False, or limit the SP sizes to 1 and do "
            "not pack"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols are looked for, not used
            raise AttributeError(name)
        self._fail()

    def __getitem__(self, index: object) -> Any:
        self._fail()

    @classmethod
    def __torch_function__(
        cls,
        func: object,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        cls()._fail()


class AttentionMode(TorchFunctionMode):
    """Intercepts attention under names that were imported before the functions were replaced."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _SDPA and is_intercepting():
            return _sdpa(*args, **(kwargs or {}))
        # multi_head_attention_forward arrives as our _mha, which torch finds under its name, even
        # where ours called torch's: the thread's switches tell it what has been done already.
        return func(*args, **(kwargs or {}))


@contextmanager
def installed() -> Iterator[None]:
    """Replace the attention functions in ``torch.nn.functional``, and put them back.

    Torch's fused encoder layer, which it takes in evaluation, is off meanwhile: it calls none of
    them, and its encoder would pack padded samples into nested tensors before the first block.
    """
    ours = {"scaled_dot_product_attention": _sdpa, "multi_head_attention_forward": _mha}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    for name, function in ours.items():
        _replaced[name] = getattr(F, name)
        setattr(F, name, function)
    try:
        with flex.installed():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for name, function in ours.items():
            # Where another library has put its own on top meanwhile, ours stays below it and does
            # nothing.
            if getattr(F, name) is function:
                setattr(F, name, _replaced[name])


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    state = region.active()
    whole = _thread.__dict__.pop("whole_mask", None)
    if whole is not None:  # the call inside our own multi_head_attention_forward
        attn_mask, is_causal = whole
    elif not is_intercepting() or state is None:
        original = _replaced.get("scaled_dot_product_attention", _SDPA)
        options: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
        out: Tensor = original(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options
        )
        return out
    return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _mha(*args: Any, **kwargs: Any) -> Any:
    state = region.active()
    original = _replaced.get("multi_head_attention_forward", _MHA)
    if state is None or not is_intercepting() or getattr(_thread, "in_mha", False):
        return original(*args, **kwargs)
    bound = _MHA_SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    query_length, key_length = call["query"].shape[0], call["key"].shape[0]
    shard = sharded_along(query_length, key_length)
    packed = None
    if shard is not None:
        packed_lengths(shard.length, shard.length if key_length == query_length else key_length)
    elif current_axis() != "whole":
        packed = packed_lengths(query_length, key_length)
    if shard is None and packed is None:
        if state.calls is not None and not region.in_backward():
            # Recorded here, as with need_weights=True there is no inner call.
            heads = call["num_heads"]
            batch_size = call["query"].shape[1] if call["query"].dim() == 3 else None
            axis = current_axis()
            state.calls.append(
                AttentionCall(heads, heads, query_length, key_length, batch_size, axis)
            )
        with no_interception():
            return original(*args, **kwargs)
    for name in ("bias_k", "bias_v", "static_k", "static_v", "add_zero_attn"):
        if call[name] is not None and call[name] is not False:
            what, instead = "sharded", "Limit the SP sizes to 1"
            if shard is None:
                what, instead = "packed", "Train with packing=False"
            raise ValueError(
                f"nn.MultiheadAttention with {name} inside {what} blocks: keys that belong to no "
                f"token cannot be {what}. {instead}"
            )
    if shard is not None and check_lengths(shard, query_length, key_length) == "cross":
        rows = query_rows(shard, call["attn_mask"])
        if rows is not None and rows.shape[-2] == 1:  # of a single query; torch's wants all rows
            rows = rows.expand(*rows.shape[:-2], query_length, -1)
        call["attn_mask"] = rows
        with no_interception():
            return original(**call)
    return _mha_with_own_attention(original, call)


def _mha_with_own_attention(original: Callable[..., Any], call: dict[str, Any]) -> Any:
    """Torch's function around our attention; whole masks go around it to the inner call."""
    need_weights = call["need_weights"]
    if call["is_causal"] and call["attn_mask"] is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as torch says
    if call["is_causal"] and call["key_padding_mask"] is None and not need_weights:
        whole: tuple[Tensor | None, bool] = (None, True)
    else:
        whole = (_merged_mask(call), False)
    call.update(attn_mask=None, key_padding_mask=None, is_causal=False, need_weights=False)
    _thread.whole_mask = whole
    _thread.in_mha = True
    try:
        out, _ = original(**call)
    finally:
        _thread.in_mha = False
        _thread.__dict__.pop("whole_mask", None)
    return out, UnavailableWeights() if need_weights else None


def _merged_mask(call: dict[str, Any]) -> Tensor | None:
    """Both masks, in which True means *masked*, as one that broadcasts to (N, H, L, S)."""
    query = call["query"]
    merged = None
    if (mask := call["attn_mask"]) is not None:
        mask = _additive(mask, query.dtype)
        if mask.dim() == 3:  # (N * H, L, S)
            mask = mask.reshape(-1, call["num_heads"], *mask.shape[1:])
        merged = mask
    if (padding := call["key_padding_mask"]) is not None:
        padding = _additive(padding, query.dtype)
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])  # (N, S) or, unbatched, (S,)
        merged = padding if merged is None else merged + padding
    return merged


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))

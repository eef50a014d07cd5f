"""FlexAttention (``torch.nn.attention.flex_attention``) in sharded blocks.

Shape legend:
    B  samples    H  heads (of queries)    K  heads of keys and values    D  size of a head
    S  true length    p  ranks    n  tokens per rank

Ulysses, as for other attention: each rank has all tokens of its heads, so that ``score_mod``,
``mask_mod`` and the block mask of the whole sequence hold as they are, but for the index of heads,
which counts from the rank's first.

NOTE its code is replaced: a model usually holds ``torch.compile(flex_attention)``, made when it was
imported. No name that we could replace leads there, and a function mode does not see what is
compiled; yet the compiled function runs ``flex_attention.__code__``, whatever that is at the time.
So that is exchanged for a call of ours, which torch's compiler is told to pass over. With
``fullgraph=True`` it complains where it had nothing to compile: it is given next to nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.parallel import region
from lightning_dcp.parallel.attention import check_lengths, observe, sharded_along
from lightning_dcp.parallel.attention_spec import AttentionSpec
from lightning_dcp.parallel.axes import current_axis
from lightning_dcp.parallel.collectives import heads_to_sequence
from lightning_dcp.parallel.heads import share_heads
from lightning_dcp.parallel.interception_switch import is_intercepting, no_interception
from lightning_dcp.parallel.region import ShardedPass
from lightning_dcp.parallel.segments import packed_lengths
from lightning_dcp.parallel.ulysses import attend_over_ranks, repeat_heads, tokens_of_own

__all__ = ["dense_flex_attention", "installed"]

_MODULE = "torch.nn.attention.flex_attention"

Function = Callable[..., Any]


def _code_of_ours(*args: Any, **kwargs: Any) -> Any:
    # Runs as torch's function, among that module's globals: hence the import.
    from lightning_dcp.parallel import flex

    if flex._compiles is not None:
        flex._compiles(flex._NOTHING)
    return flex._entry(*args, **kwargs)


@contextmanager
def installed() -> Iterator[None]:
    """Replace what ``flex_attention`` does, where the process has imported it; put it back."""
    global _entry, _compiles
    function = getattr(sys.modules.get(_MODULE), "flex_attention", None)
    if not isinstance(function, types.FunctionType):  # another library's, or not there
        yield
        return
    code = function.__code__
    own = _copied(code, function)
    _entry = functools.partial(_flex_attention, own)
    if "torch._dynamo" in sys.modules:  # else nothing has been compiled
        importlib.import_module("torch._dynamo.decorators").skip(_code_of_ours)
        _entry = torch.compiler.disable(_entry)  # type: ignore[no-untyped-call]
        _compiles = _compiled(_next_to_nothing, "eager")
    function.__code__ = _code_of_ours.__code__
    try:
        yield
    finally:
        function.__code__ = code


_entry: Function
_compiles: Function | None = None
_NOTHING = torch.zeros(())


def _next_to_nothing(nothing: Tensor) -> Tensor:
    return nothing + nothing


@functools.cache
def _copied(code: types.CodeType, function: types.FunctionType) -> Function:
    """Torch's function under a code of its own."""
    own = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


@functools.cache
def _signature(function: Function) -> inspect.Signature:
    return inspect.signature(function)


def _flex_attention(original: Function, *args: Any, **kwargs: Any) -> Any:
    if region.active() is None or not is_intercepting():
        return original(*args, **kwargs)
    bound = _signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    query, key = call["query"], call["key"]
    observe(query, key)
    shard = sharded_along(query.shape[-2], key.shape[-2])
    length = query.shape[-2] if shard is None else shard.length
    if current_axis() != "whole" and packed_lengths(length, length) is not None:
        raise ValueError(
            "flex_attention in packed micro-batches: its block mask is not that of the samples. "
            "Train with packing=False, or call F.scaled_dot_product_attention"
        )
    if shard is None:
        return _computed(original, call)
    if check_lengths(shard, query.shape[-2], key.shape[-2]) == "cross":
        raise ValueError(
            f"flex_attention of {query.shape[-2]} of {shard.length} sharded queries to "
            f"{key.shape[-2]} keys of a whole condition: call F.scaled_dot_product_attention for "
            f"cross-attention, or limit the SP sizes to 1"
        )
    return _over_ranks(shard, original, call)


def _over_ranks(shard: ShardedPass, original: Function, call: dict[str, Any]) -> Any:
    """Self-attention of the whole sequence, of which each tensor is this rank's share."""
    group = shard.group
    query, key, value = call["query"], call["key"], call["value"]
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    asks_more = call["score_mod"] is not None or call["return_lse"] or call.get("return_aux")
    if not share_heads(num_heads, num_kv_heads, group.size):
        if asks_more:
            raise ValueError(
                f"{group.size} ranks cannot share the {num_heads} heads ({num_kv_heads} of keys) "
                f"of flex_attention, and attention in a ring takes a block mask but neither "
                f"score_mod nor return_lse: use an SP size that divides the heads"
            )
        return attend_over_ranks(shard, query, key, value, _as_spec(shard, call))
    key, value = (repeat_heads(tensor, group.size) for tensor in (key, value))
    whole = heads_to_sequence([query, key, value], group)
    own = [tensor.narrow(2, 0, shard.length) for tensor in whole]
    first = group.rank_in_group * (num_heads // group.size)
    shifted = {
        **call,
        **dict(zip(("query", "key", "value"), own, strict=True)),
        "score_mod": _of_own_heads(call["score_mod"], first, 2),
        "block_mask": _own_block_mask(call["block_mask"], num_heads, first, own[0].shape[1]),
    }
    out = _computed(original, shifted)
    if isinstance(out, Tensor):
        return tokens_of_own(shard, out)
    attended, more = out
    if isinstance(more, Tensor):  # of return_lse
        return tokens_of_own(shard, attended), tokens_of_own(shard, more[..., None])[..., 0]
    sent = {
        name: tokens_of_own(shard, part[..., None])[..., 0]
        for name, part in more._asdict().items()
        if part is not None
    }
    return tokens_of_own(shard, attended), more._replace(**sent)


def _of_own_heads(mod: Function | None, first: int, place: int) -> Function | None:
    """``mod`` with the index of heads, argument ``place``, counted from ``first``."""
    if mod is None or first == 0:
        return mod

    def shifted(*indices: Any) -> Any:
        return mod(*indices[:place], indices[place] + first, *indices[place + 1 :])

    return shifted


def _own_block_mask(mask: Any, num_heads: int, first: int, num_own: int) -> Any:
    """The part of a block mask of all heads that belongs to this rank's."""
    if mask is None:
        return None
    tensors = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    if mask.kv_num_blocks.shape[1] == num_heads:
        tensors = [None if t is None else t[:, first : first + num_own] for t in tensors]
    return type(mask).from_kv_blocks(
        *tensors,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=_of_own_heads(mask.mask_mod, first, 1),
        seq_lengths=mask.seq_lengths,
    )


def _as_spec(shard: ShardedPass, call: dict[str, Any]) -> AttentionSpec:
    """A block mask as a dense one, which attention in a ring takes."""
    query, mask = call["query"], call["block_mask"]
    dense = None
    if mask is not None:
        shape = torch.Size((*query.shape[:2], shard.length, shard.length))
        dense = _dense_mask(mask, shape, query.device)
    return AttentionSpec(attn_mask=dense, scale=call["scale"], enable_gqa=call["enable_gqa"])


def _computed(original: Function, call: dict[str, Any]) -> Any:
    """By torch: compiled where there is a kernel for it, or by ours where torch has no backward."""
    query = call["query"]
    tensors = (query, call["key"], call["value"])
    with no_interception():
        if query.device.type == "cpu" and any(tensor.requires_grad for tensor in tensors):
            return dense_flex_attention(**call)
        if query.is_cuda:  # torch's uncompiled one keeps all scores
            return _compiled(original, "inductor")(**call)
        return original(**call)


@functools.cache
def _compiled(function: Function, backend: str) -> Function:
    compiled: Function = torch.compile(function, backend=backend)
    return compiled


def dense_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Function | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """What ``flex_attention`` computes, by matrix products, with a backward on any device.

    Torch's own has no backward on the CPU. Modifications are called once with indices of shapes
    (B, 1, 1, 1), (1, H, 1, 1), (1, 1, S, 1) and (1, 1, 1, S), not with one number each.

    Args:
        query: (B, H, S, D).
        key: (B, K, S, D).
        value: as ``key``.
        score_mod: as for torch's.
        block_mask: as for torch's.
        scale: of the scores, default 1/sqrt(D).
        enable_gqa: whether K may be less than H.
        return_lse: whether to return the logarithm of the sum of exponentials too, (B, H, S).
        kernel_options: not used.
        return_aux: as for torch's.

    Returns:
        As torch's.
    """
    del kernel_options
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-1, -2) * scale
    if score_mod is not None:
        scores = score_mod(scores, *_indices(scores.shape, scores.device))
    if block_mask is not None:
        scores = scores.masked_fill(
            ~_dense_mask(block_mask, scores.shape, scores.device), -math.inf
        )
    lse = scores.logsumexp(-1)
    finite = lse.masked_fill(lse.isneginf(), 0.0)  # a row with no key gives zeros
    out = (scores - finite[..., None]).exp() @ value
    if return_aux is not None:
        aux = importlib.import_module(_MODULE).AuxOutput
        return out, aux(
            lse=lse if return_aux.lse else None,
            max_scores=scores.amax(-1) if return_aux.max_scores else None,
        )
    return (out, lse) if return_lse else out


def _dense_mask(mask: Any, shape: torch.Size, device: torch.device) -> Tensor:
    """The mask that a block mask's ``mask_mod`` means, of shape (B, H, S, S)."""
    dense: Tensor = mask.mask_mod(*_indices(shape, device))
    return dense.expand(shape)


def _indices(shape: torch.Size, device: torch.device) -> list[Tensor]:
    return [
        torch.arange(size, device=device).reshape([-1 if d == place else 1 for d in range(4)])
        for place, size in enumerate(shape)
    ]

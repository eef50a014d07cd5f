"""Packed samples: which of a micro-batch's attention calls must stay inside each sample.

A packed micro-batch is one sequence, of all its samples one after the other. An attention call over
that sequence is block-diagonal, whatever the model thinks; one over anything else is the model's.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dcp.parallel import region

__all__ = ["pack", "packed_lengths"]


def pack(segments: Sequence[int] | None) -> None:
    """Say which samples the running micro-batch consists of, until it ends.

    Args:
        segments: their lengths in tokens, in order; None: it is not packed.

    Raises:
        RuntimeError: outside of ``BlockRuntime.micro_batch``.
        ValueError: for a length below 1.
    """
    state = region.active()
    if state is None:
        raise RuntimeError("there is no running micro-batch to pack: use it inside micro_batch()")
    lengths = None if segments is None else tuple(int(length) for length in segments)
    if lengths is not None and min(lengths, default=0) < 1:
        raise ValueError(f"packed samples need at least one token each; got lengths {lengths}")
    state.segments = lengths


def packed_lengths(query_length: int, key_length: int) -> tuple[int, ...] | None:
    """Segments for a call over so many tokens in all; None where it is not packed.

    Raises:
        ValueError: where only queries or only keys are the packed sequence.
    """
    state = region.active()
    if state is None or state.segments is None:
        return None
    total = sum(state.segments)
    if query_length == key_length == total:
        return state.segments
    if total in (query_length, key_length):
        raise ValueError(
            f"attention of {query_length} queries to {key_length} keys in a packed micro-batch of "
            f"{len(state.segments)} samples with {total} tokens in all: which keys belong to which "
            f"sample is not known. Cross-attention and keys added to the sequence cannot be "
            f"packed: train with packing=False"
        )
    return None

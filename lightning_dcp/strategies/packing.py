"""What packs the samples of a run, found out and checked on the user's model before training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_dcp.data.datamodule import MicroBatchMaker
from lightning_dcp.data.loader import LoaderSpec
from lightning_dcp.data.packing import PackedBatch, PackingCollate, find_layout
from lightning_dcp.data.samples import fetch_samples
from lightning_dcp.parallel.targets import count_targets
from lightning_dcp.profiling.packing_check import check_packing, samples_to_check
from lightning_dcp.profiling.trial import Step
from lightning_dcp.strategies.agreement import collectively, gather_objects

Move = Callable[[Any], Any]

#: Until two samples have a label between them.
_TRIED_PAIRS = 8


def packing_collate(
    step: Step,
    spec: LoaderSpec,
    lengths: npt.NDArray[np.int64],
    *,
    datamodule: Any,
    move: Move,
    profiling: Callable[[], AbstractContextManager[None]],
    compute_dtype: torch.dtype,
    ignore_index: int,
) -> PackingCollate:
    """What packs samples, in agreement with what the model computes from padded ones; a collective.

    Args:
        step: the user's side.
        spec: the user's train loader.
        lengths: of its samples.
        datamodule: may have a `pack_samples`.
        move: moves a batch to the device.
        profiling: context in which training steps leave no trace.
        compute_dtype: type that blocks compute in.
        ignore_index: label that bears no loss.

    Raises:
        MisconfigurationException: samples that cannot be packed, or a model that computes something
            else from packed samples than from padded ones.
    """
    hook = getattr(datamodule, "pack_samples", None)

    def look() -> tuple[list[Any], PackingCollate]:
        ids, samples = _labelled_pair(spec, lengths, ignore_index)
        if hook is not None and hook(copy.deepcopy(samples)) is not NotImplemented:
            return samples, PackingCollate(None, hook, ignore_index=ignore_index)
        layout = find_layout(samples, [int(lengths[i]) for i in ids])
        return samples, PackingCollate(layout, ignore_index=ignore_index)

    samples, collate = collectively("Packing samples", look)

    def packed(samples: list[Any], mark_borders: bool) -> tuple[Any, tuple[int, ...]]:
        batch, segments = replace(collate, mark_borders=mark_borders)(samples)
        return move(batch), segments

    with profiling():
        mark_borders = check_packing(
            step,
            samples=samples,
            padded=lambda samples: move(spec.collate_fn(samples)),
            packed=packed,
            compute_dtype=compute_dtype,
            gather=gather_objects,
        )
    return replace(collate, mark_borders=mark_borders)


def _labelled_pair(
    spec: LoaderSpec, lengths: npt.NDArray[np.int64], ignore_index: int
) -> tuple[tuple[int, int], list[Any]]:
    """Two samples, by number and as they are; others where no label of theirs bears loss."""
    left = list(range(len(lengths)))
    first: tuple[tuple[int, int], list[Any]] | None = None
    for _ in range(_TRIED_PAIRS):
        pair = tuple(left[i] for i in samples_to_check(lengths[left].tolist()))
        samples = fetch_samples(spec.dataset, pair)
        found = (pair[0], pair[1]), samples
        # Of a loss that is NaN nothing can be compared.
        batch = spec.collate_fn(copy.deepcopy(samples))
        if count_targets(batch, ignore_index=ignore_index) != 0:
            return found
        first = found if first is None else first
        left = [i for i in left if i not in pair]
        if not left:
            break
    assert first is not None
    return first


def packed_batches(
    collate: PackingCollate, spec: LoaderSpec, lengths: npt.NDArray[np.int64], move: Move
) -> Callable[[int, int], PackedBatch]:
    """Makes packed batches of b samples of s tokens each for the cost profile."""
    make = MicroBatchMaker(spec.dataset, lengths, collate, equal_lengths=True)

    def on_device(batch_size: int, seq_len: int) -> PackedBatch:
        batch, segments = make(batch_size, seq_len)
        return PackedBatch(move(batch), segments)

    return on_device

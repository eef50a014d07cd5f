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
from lightning_dcp.profiling.packing_check import check_packing, samples_to_check
from lightning_dcp.profiling.trial import Step
from lightning_dcp.strategies.agreement import collectively, gather_objects

Move = Callable[[Any], Any]


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
    ids = samples_to_check(lengths.tolist())
    hook = getattr(datamodule, "pack_samples", None)

    def look() -> tuple[list[Any], PackingCollate]:
        samples = fetch_samples(spec.dataset, ids)
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


def packed_batches(
    collate: PackingCollate, spec: LoaderSpec, lengths: npt.NDArray[np.int64], move: Move
) -> Callable[[int, int], PackedBatch]:
    """Makes packed batches of b samples of s tokens each for the cost profile."""
    make = MicroBatchMaker(spec.dataset, lengths, collate, equal_lengths=True)

    def on_device(batch_size: int, seq_len: int) -> PackedBatch:
        batch, segments = make(batch_size, seq_len)
        return PackedBatch(move(batch), segments)

    return on_device

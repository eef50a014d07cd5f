"""What an interrupted epoch has consumed, and how many steps what is left takes.

A run may go on with other ranks, memory, costs or options than it began with. The samples that are
left are then planned anew (:meth:`EpochPlanner.rest`); which they are is kept as packed bits, one
per sample of the dataset: 125 kB for a million.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_dcp.planning.lengths import IntArray

__all__ = ["BoolArray", "ByteArray", "cut_windows", "pack_samples", "unpack_samples"]

BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]


def pack_samples(consumed: BoolArray) -> ByteArray:
    """(n,) flags -> (ceil(n / 8),) bytes, the first sample in the highest bit."""
    return np.packbits(consumed)


def unpack_samples(packed: ByteArray, num_samples: int) -> BoolArray:
    """Inverse of :func:`pack_samples`.

    Raises:
        ValueError: Not as many bytes as the samples take, or bits of samples that do not exist.
    """
    if packed.ndim != 1 or packed.dtype != np.uint8 or packed.size != -(-num_samples // 8):
        raise ValueError(
            f"{num_samples} samples take {-(-num_samples // 8)} bytes of type uint8; got shape "
            f"{packed.shape} of type {packed.dtype}."
        )
    bits = np.unpackbits(packed)
    if bits[num_samples:].any():
        raise ValueError(f"Bits are set behind the last of {num_samples} samples.")
    return bits[:num_samples].astype(bool)


def cut_windows(num_samples: int, size: int) -> tuple[tuple[int, int], ...]:
    """``(start, stop)`` of consecutive windows of ``size`` places; the last may be smaller."""
    return tuple((start, min(start + size, num_samples)) for start in range(0, num_samples, size))


def flags(ids: IntArray, num_samples: int) -> BoolArray:
    """(n,) whether each sample is among ``ids``."""
    found = np.zeros(num_samples, dtype=bool)
    found[ids] = True
    return found

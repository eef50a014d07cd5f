"""Random numbers: replicated where ranks do the same, sharded where each has its own tokens.

At the entry of a micro-batch all streams (torch's on CPU and on the device, ``random``, numpy) are
seeded from its key, alike on all ranks of its SP group: noise, time steps and dropout outside the
blocks agree. Between the first and the last block the streams are switched to others that also have
the rank in the group, and afterwards go on where they were.

NOTE sharded-seed: the sharded streams are seeded by a number *drawn* from the replicated torch
stream (the draw is undone when that stream returns) rather than by the key alone. When a user's own
checkpoint around the first block runs it again in the backward, the replicated state it restored
leads to the same sharded streams. The price: two passes through the blocks in one micro-batch with
no draw in between have the same dropout masks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["RNGState", "capture", "host_state", "preserved", "seed", "seed_sharded"]


@dataclasses.dataclass(frozen=True)
class RNGState:
    """States of all streams; ``restore`` puts them back."""

    cpu: Tensor
    device: tuple[torch.device, Tensor] | None
    host: tuple[Any, Any]

    def restore(self) -> None:
        """Put all streams back to this state."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            device, state = self.device
            torch.get_device_module(device).set_rng_state(state, device)
        restore_host(self.host)


def capture(device: torch.device) -> RNGState:
    """The states of torch's CPU stream, that of ``device``, ``random`` and numpy."""
    own = None
    if device.type != "cpu":
        own = (device, torch.get_device_module(device).get_rng_state(device))
    return RNGState(torch.get_rng_state(), own, host_state())


def host_state() -> tuple[Any, Any]:
    """States of ``random`` and numpy, which torch's checkpoint neither keeps nor replays."""
    return random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's code may use it


def restore_host(state: tuple[Any, Any]) -> None:
    """Put ``random`` and numpy back to a ``host_state``."""
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002


def seed(device: torch.device, key: tuple[int, ...]) -> None:
    """Seed all streams from a key of integers; different keys give unrelated streams."""
    digest = hashlib.sha256(",".join(str(int(part)) for part in key).encode()).digest()
    word = int.from_bytes(digest[:8], "little")
    torch.default_generator.manual_seed(word)
    if device.type != "cpu":
        with torch.get_device_module(device).device(device):
            torch.get_device_module(device).manual_seed(word)
    random.seed(digest)
    np.random.seed(np.frombuffer(digest[8:24], dtype=np.uint32))  # noqa: NPY002


def seed_sharded(device: torch.device, rank_in_group: int) -> None:
    """Switch all streams to this rank's own (NOTE sharded-seed)."""
    drawn = torch.randint(2**62, (), device="cpu")
    seed(device, (int(drawn), 1 + rank_in_group))


@contextmanager
def preserved(device: torch.device) -> Iterator[RNGState]:
    """Leave all streams as they were, whatever happens inside."""
    state = capture(device)
    try:
        yield state
    finally:
        state.restore()

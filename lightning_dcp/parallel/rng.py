"""Random numbers: replicated where ranks do the same, sharded where each has its own tokens.

At the entry of a micro-batch all streams (torch's on CPU and on the device, ``random``, numpy) are
seeded from its key, alike on all ranks of its SP group: noise, time steps and dropout outside the
blocks agree. Inside each block the streams are switched to others that also have the rank in the
group, and afterwards go on where they were: between blocks a model may draw which of them it skips.

NOTE sharded-seed: the sharded streams are seeded by a number *drawn* from the replicated torch
stream (the draw is undone when that stream returns) rather than by the key alone. When a user's own
checkpoint around blocks runs them again in the backward, the replicated state it restored leads to
the same sharded streams. The price: two passes through the blocks in one micro-batch with
no draw in between have the same dropout masks.

NOTE own-generators: a generator that the user's module keeps for itself would go its own way on
each rank, as ranks run different numbers of micro-batches. While ``including`` it, it is one of the
streams.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "RNGState",
    "capture",
    "generators_of",
    "host_state",
    "including",
    "preserved",
    "seed",
    "seed_sharded",
]

#: Generators of the user's that are streams as well; of the process, as backward passes run in
#: autograd's own threads.
_own: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class RNGState:
    """States of all streams; ``restore`` puts them back."""

    cpu: Tensor
    device: tuple[torch.device, Tensor] | None
    host: tuple[Any, ...]

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


def host_state() -> tuple[Any, ...]:
    """What torch's checkpoint neither keeps nor replays: ``random``, numpy, generators included."""
    own = tuple((generator, _get(generator)) for generator in _own)
    return random.getstate(), np.random.get_state(), own  # noqa: NPY002 - users may use it


def restore_host(state: tuple[Any, ...]) -> None:
    """Put ``random``, numpy and included generators back to a ``host_state``."""
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002
    for generator, own in state[2]:
        _set(generator, own)


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
    for index, generator in enumerate(_own):
        _reseed(generator, hashlib.sha256(digest + index.to_bytes(4, "little")).digest())


def seed_sharded(device: torch.device, rank_in_group: int, block: int = 0) -> None:
    """Switch all streams to this rank's own in a block (NOTE sharded-seed)."""
    drawn = torch.randint(2**62, (), device="cpu")
    seed(device, (int(drawn), 1 + rank_in_group, block))


@contextmanager
def preserved(device: torch.device) -> Iterator[RNGState]:
    """Leave all streams as they were, whatever happens inside."""
    state = capture(device)
    try:
        yield state
    finally:
        state.restore()


# ---------------------------------------------------------------------- the user's own generators

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def generators_of(module: nn.Module) -> tuple[Any, ...]:
    """Random generators that are attributes of a module or its submodules, each once."""
    found = {
        id(value): value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, _KINDS)
    }
    return tuple(found.values())


@contextmanager
def including(generators: Iterable[Any]) -> Iterator[None]:
    """In here ``generators`` are seeded, kept and restored with all other streams."""
    global _own
    outer, _own = _own, tuple(generators)
    try:
        yield
    finally:
        _own = outer


def _get(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    get: Callable[[], Any] = getattr(generator, "get_state", None) or generator.getstate
    return get()


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _reseed(generator: Any, digest: bytes) -> None:
    word = int.from_bytes(digest[:8], "little")
    if isinstance(generator, torch.Generator):
        generator.manual_seed(word)
    elif isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(word).state
    else:
        generator.seed(word % 2**32)

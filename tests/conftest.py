"""What all tests share: one thread, fixed seeds, a clean environment, `gpu` tests only on a GPU."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

# Before any rank is started: ranks share the cores, and more threads than cores are slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# Lightning and torchrun leave these behind; a later Trainer in the same process would believe that
# it is a rank of the earlier world.
_LAUNCHER_VARIABLES = (
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "RANK",
    "WORLD_SIZE",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Cost profiles and lengths of this run only: neither the user's cache nor an older run's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_DCP_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    """The same random numbers at the start of each test; launchers' variables as before it.

    A Trainer with one rank leaves the default process group behind: it goes as well.
    """
    before = {name: os.environ.get(name) for name in _LAUNCHER_VARIABLES}
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global state is what libraries under test may draw from
    torch.manual_seed(0)
    in_a_group = dist.is_initialized()
    yield
    if dist.is_initialized() and not in_a_group:
        dist.destroy_process_group()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

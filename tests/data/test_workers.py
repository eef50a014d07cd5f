"""SIGTERM to a whole job does not take the ranks' workers away from them."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_dcp.data.workers import obey_own_rank_only


class Slow(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        obey_own_rank_only()
        time.sleep(0.05)
        return index

    def __len__(self) -> int:
        return 12


def signalled_from_outside(pid: int) -> None:
    child = os.fork()
    if child == 0:
        os.kill(pid, signal.SIGTERM)
        os._exit(0)
    os.waitpid(child, 0)


def test_workers_go_on_until_their_rank_ends_them() -> None:
    torch.set_num_threads(1)
    iterator = iter(DataLoader(Slow(), batch_size=None, num_workers=2, persistent_workers=True))
    found = [next(iterator), next(iterator)]  # both have begun
    workers = iterator._workers  # type: ignore[attr-defined]
    for worker in workers:
        signalled_from_outside(worker.pid)
    found += list(iterator)
    assert found == list(range(12))
    for worker in workers:
        worker.terminate()  # SIGTERM from here, as torch sends it to one that hangs
        worker.join(5)
        assert worker.exitcode is not None

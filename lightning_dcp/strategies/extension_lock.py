"""A build lock that a killed process left behind must not hang every later run.

DeepSpeed compiles a small op for communication between CPU ranks when it is first used. While one
process builds, others wait for its lock file to go, without a limit: if the builder was killed,
they wait for ever, in this run and in all later ones.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.cpp_extension import get_default_build_root

_OP_NAME = "deepspeed_shm_comm"
#: A build takes half a minute; what is older than this is taken for abandoned.
STALE_AFTER_S = 300.0


def build_lock() -> Path:
    """The lock file of DeepSpeed's op for CPU ranks, where torch's extension loader puts it."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
        cuda = torch.version.cuda
        root = str(
            Path(get_default_build_root())
            / f"{python}_{'cpu' if cuda is None else 'cu' + cuda.replace('.', '')}"
        )
    return Path(root) / _OP_NAME / "lock"


def wait_for_build_lock(lock: Path | None = None, stale_after_s: float = STALE_AFTER_S) -> None:
    """Return when no other process builds the op; remove a lock that nobody holds any more.

    Args:
        lock: the lock file, by default that of `build_lock`.
        stale_after_s: age, in seconds, from which on a lock is taken for abandoned.

    Warns:
        UserWarning: if an abandoned lock was removed.
    """
    lock = build_lock() if lock is None else lock
    started = time.monotonic()
    told = False
    while True:
        try:
            age_s = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            return
        if age_s > stale_after_s:
            rank_zero_warn(
                f"DCP: removed {lock}, {age_s:.0f} s old: a build of DeepSpeed's op was interrupted"
                " there, and every later run would wait for it without end."
            )
            lock.unlink(missing_ok=True)
            return
        if not told and time.monotonic() - started > 10.0:
            told = True
            rank_zero_info(f"DCP: waiting for another process to build DeepSpeed's op ({lock}).")
        time.sleep(0.2)

"""Worker processes of loaders, when a whole job is told to end.

Schedulers send SIGTERM to all processes of a job. Ranks go on then until they can leave together
(see `strategies/_lightning_compat/decisions.py`), and need their workers until they do; torch's
die at once, and each rank would raise somewhere else.
"""

from __future__ import annotations

import functools
import os
import signal
import threading

from torch.utils.data import get_worker_info

__all__ = ["obey_own_rank_only"]


def obey_own_rank_only() -> None:
    """In a worker process: from now on SIGTERM ends it only if its rank has sent it.

    Called when a worker begins to read; `worker_init_fn` belongs to users and to Lightning, which
    sets it where nobody has.
    """
    if get_worker_info() is not None and hasattr(signal, "sigwaitinfo"):  # not on macOS
        _obey(os.getpid())


@functools.cache
def _obey(pid: int) -> None:  # the process, since what is cached is inherited
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_wait, args=(os.getppid(),), daemon=True).start()


def _wait(rank_pid: int) -> None:
    while True:
        sent_by = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        if sent_by == rank_pid or os.getppid() != rank_pid:
            os._exit(0)

"""Ending the process groups before the interpreter ends.

gloo runs collectives in threads of its own. A thread that needs Python's lock (to let go of a
tensor of the last collective, say) while the interpreter ends is ended inside C++, and the process
aborts after a training that went well: "terminate called without an active exception". Seen once in
some hundred runs on a loaded machine. Lightning destroys NCCL's groups at exit and leaves gloo's.
"""

from __future__ import annotations

import atexit
import functools
import threading

import torch.distributed as dist

__all__ = ["destroy_groups_at_exit"]

#: After an error other ranks may never join what is pending here: the process ends all the same.
_PATIENCE_S = 3.0


@functools.cache
def destroy_groups_at_exit() -> None:
    """Destroy whatever process groups exist when the process exits. Twice is once."""
    atexit.register(_destroy)


def _destroy() -> None:
    if dist.is_available() and dist.is_initialized():
        thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)

"""Private names of Lightning and DeepSpeed that saving a checkpoint needs, each with the reason.

Written against Lightning 2.6.6 and DeepSpeed 0.19.8.

========================================  =====================================================
private name                              why
========================================  =====================================================
``_WrappingCheckpointIO``                 a plugin such as ``AsyncCheckpointIO`` is given what it
                                          wraps by the strategy
``_METADATA_FILENAME``                    what Lightning keeps beside the shards of
                                          torch.distributed.checkpoint, and looks for to know them
``engine.checkpoint_engine``              writes a rank's shard. One that cannot would leave the
                                          other ranks waiting in ``engine.save_checkpoint``
``engine._copy_recovery_script``          the same, on rank 0
========================================  =====================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

#: In a folder of torch.distributed.checkpoint: all but weights and optimizer state.
NAME_OF_REST = _METADATA_FILENAME


def with_default_io(
    given: CheckpointIO | None, default: Callable[[], CheckpointIO]
) -> CheckpointIO:
    """The plugin to save with: the user's, around ours where it only wraps one."""
    if given is None:
        return default()
    if isinstance(given, _WrappingCheckpointIO):
        given.checkpoint_io = default()  # kept only where it has none
    return given


def writes_plain_shards(engine: Any) -> bool:
    """Whether DeepSpeed's engine writes its shards itself, and where it is told to."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    plain = type(engine.checkpoint_engine) is TorchCheckpointEngine
    return plain and not engine.use_node_local_storage()


@contextmanager
def shards_written_by(engine: Any, write: Callable[[Any, str], None]) -> Iterator[list[Exception]]:
    """Have DeepSpeed's engine write with `write(state, path)`, and go on where that fails.

    Yields:
        What `write` and the copying of scripts raised.
    """
    errors: list[Exception] = []
    own, copy = engine.checkpoint_engine, engine._copy_recovery_script

    def noting(work: Callable[..., Any]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            try:
                work(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - raised when the collectives are over
                errors.append(error)

        return call

    class Writer(type(own)):  # type: ignore[misc]
        def __init__(self) -> None:
            self.__dict__.update(own.__dict__)

        save = staticmethod(noting(lambda state_dict, path: write(state_dict, path)))
        makedirs = staticmethod(noting(os.makedirs))

    engine.checkpoint_engine = Writer()
    engine._copy_recovery_script = noting(copy)
    try:
        yield errors
    finally:
        engine.checkpoint_engine = own
        del engine._copy_recovery_script

"""What Lightning's ModelParallelStrategy keeps to itself.

========================================  =====================================================
private name                              why
========================================  =====================================================
``_materialize_distributed_module``       a model built on the meta device gets memory and values
                                          before it is sharded, as in Lightning's own setup
``ModelParallelStrategy.                  Lightning's default is one node's ranks tensor-parallel;
_data_parallel_size``                     ours is only known once the Trainer has set the nodes
``ModelParallelStrategy.setup``           public, but refuses a LightningModule that does not
                                          override `configure_model`; ours is sharded without
========================================  =====================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning.fabric.utilities.init import _materialize_distributed_module as materialize
from lightning.pytorch.utilities.model_helpers import is_overridden

if TYPE_CHECKING:
    import lightning as L

__all__ = ["configure_model_not_needed", "materialize"]


@contextmanager
def configure_model_not_needed(pl_module: L.LightningModule) -> Iterator[None]:
    """In here `configure_model` counts as overridden; it was called before."""
    if is_overridden("configure_model", pl_module):
        yield
        return

    def configure_model() -> None:
        return None

    pl_module.__dict__["configure_model"] = configure_model
    try:
        yield
    finally:
        del pl_module.__dict__["configure_model"]

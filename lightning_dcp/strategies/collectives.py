"""Lightning's collectives, refused where they would hang."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor
from typing_extensions import override


class GuardedCollectives(ParallelStrategy):
    """Collectives over all ranks, which must not start while a rank is inside a micro-batch.

    Mixed in before one of Lightning's strategies, which implements what is abstract here.
    """

    #: Name under which the strategy is registered.
    strategy_name: str

    @property
    def inside_micro_batch(self) -> bool:
        """Whether this rank is running a micro-batch of `fit`."""
        return False

    @property
    def ends_alone(self) -> bool:
        """Whether an exception ends the run here and no collective may begin any more."""
        return False

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if self.ends_alone:
            return tensor
        self._refuse_inside_micro_batch("reduce")
        if (
            isinstance(tensor, Tensor)
            and not tensor.is_floating_point()
            and str(reduce_op).lower() in ("mean", "avg")
        ):
            # Lightning 2.6.6 averages integer batch sizes over ranks and floors: 1.5 becomes 1
            # (Lightning issue 21838).
            tensor = tensor.to(torch.float64 if tensor.device.type != "mps" else torch.float32)
        return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.ends_alone:
            return
        self._refuse_inside_micro_batch("barrier")
        super().barrier(*args, **kwargs)  # type: ignore[safe-super]

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.ends_alone:
            return obj
        self._refuse_inside_micro_batch("broadcast")
        return super().broadcast(obj, src)  # type: ignore[safe-super]

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        self._refuse_inside_micro_batch("all_gather")
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    def _refuse_inside_micro_batch(self, what: str) -> None:
        if self.inside_micro_batch:
            raise RuntimeError(
                f"`{what}` was called inside `training_step` under"
                f" strategy='{self.strategy_name}'. Ranks run different numbers of micro-batches"
                " per optimizer step, so a collective over all ranks would hang. Log values with"
                " `self.log` (they are reduced over ranks once per step), or move the call to"
                " `on_train_batch_end`."
            )

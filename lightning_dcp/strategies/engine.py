"""What the engines behind the strategies differ in, and what the runner of micro-batches needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dcp.strategies._lightning_compat import training as compat
from lightning_dcp.strategies.evaluation.strategy import PlannedEvaluation
from lightning_dcp.strategies.gradients import num_bytes
from lightning_dcp.strategies.out_of_memory import saying_where

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import lightning as L
    from lightning.pytorch.profilers import Profiler
    from torch.optim import Optimizer


class Engine(PlannedEvaluation):
    """One rank's forward and backward passes, by whatever engine the strategy is built on.

    With `DCPStrategyMixin` it is the `StepHost` of the iteration's runner.
    """

    _optimizer_in_backward: Optimizer | None = None
    #: Gradients that were there before the iteration's first backward pass, and their copies.
    _gradients_before: Sequence[tuple[torch.nn.Parameter, Tensor]] = ()

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return 0 if self.parallel_devices is None else len(self.parallel_devices)

    # ---- what the engines differ in --------------------------------------------------------------

    def _forward_training_step(self, *args: Any) -> Any:
        """The user's `training_step` on one micro-batch, under the precision plugin."""
        raise NotImplementedError

    def profile_context(self) -> AbstractContextManager[Any]:
        """Context in which a training step is measured: the precision that is not in the model."""
        return self.precision_plugin.train_step_context()

    def _backward_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the engine's backward pass."""
        return {}

    def _gradient(self, parameter: torch.nn.Parameter) -> Tensor | None:
        """What has accumulated for a parameter and is not reduced yet."""
        return parameter.grad

    def _without_gradient(self, parameters: Sequence[torch.nn.Parameter]) -> list[bool]:
        """For each parameter, whether no micro-batch of this rank has used it.

        All False where the engine steps on every parameter alike, used or not.
        """
        return [self._gradient(parameter) is None for parameter in parameters]

    def abandon_pass(self) -> None:
        """Get ready for further forward and backward passes after one that raised."""

    def keep_gradients(self) -> None:
        """Take note of gradients that are there before an iteration's first backward pass.

        None, unless the user's `optimizer_zero_grad` leaves some, or zeros.
        """
        assert self.lightning_module is not None
        self._gradients_before = [
            (parameter, parameter.grad.detach().clone())
            for parameter in self.lightning_module.parameters()
            if parameter.grad is not None
        ]

    def discard_gradients(self) -> None:
        """Make gradients as they were at `keep_gradients`."""
        assert self.lightning_module is not None
        for parameter in self.lightning_module.parameters():
            parameter.grad = None
        for parameter, gradient in self._gradients_before:
            parameter.grad = gradient.clone()

    def missing_gradient_bytes(self) -> int:
        """Bytes of gradients that do not exist yet."""
        assert self.lightning_module is not None
        parameters = (p for p in self.lightning_module.parameters() if p.requires_grad)
        return num_bytes(p for p in parameters if self._gradient(p) is None)

    def _reduce_gradients(self) -> None:
        """Reduce the accumulated gradients of all ranks, or ready them for the engine's step."""
        raise NotImplementedError

    def fixed_bytes(self, pl_module: L.LightningModule) -> int:
        """Bytes per rank that stay: parameters, gradients, optimizer state, buffers."""
        raise NotImplementedError

    # ---- what the runner asks for (`StepHost`) ---------------------------------------------------

    def backward_micro_batch(self, loss: Tensor) -> None:
        """Backward pass of one weighted loss, with the hooks that Lightning runs around it."""
        with self._profiled("[DCP]micro_batch_backward"):
            super().backward(loss, self._optimizer_in_backward, **self._backward_kwargs())

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with saying_where(self._where_stepped):
            return super().optimizer_step(*args, **kwargs)

    def _where_stepped(self) -> str:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        return (
            "in the optimizer step, the reduction of gradients or a hook around them, at"
            f" global_step={trainer.global_step} of epoch {trainer.current_epoch}"
        )

    def move_micro_batch(self, batch: Any) -> Any:
        """Move one micro-batch to this rank's device."""
        assert self.lightning_module is not None
        return compat.move_micro_batch(
            super().batch_to_device, self.lightning_module, batch, self.root_device
        )

    def sum_over_ranks(self, value: float) -> float:
        """Sum of one number over all ranks; a collective."""
        return self.sums_over_ranks([value])[0]

    def sums_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Sums of numbers over all ranks, each for itself; one collective."""
        totals = torch.tensor(values, dtype=torch.float64, device=self.root_device)
        if dist.is_initialized():
            dist.all_reduce(totals)
        return [float(total) for total in totals.tolist()]

    def _profiled(self, action: str) -> AbstractContextManager[Any]:
        """Lightning's profiler times what runs under this, as `action`."""
        assert self.lightning_module is not None
        # Lightning sets the attribute outside of the class that its stubs describe.
        profiler: Profiler = self.lightning_module.trainer.profiler  # type: ignore[attr-defined]
        return profiler.profile(action)

    def _allocated_bytes(self) -> int | None:
        """Bytes that tensors take on the device; None on a CPU, where nobody counts them."""
        if self.root_device.type != "cuda":
            return None
        return torch.cuda.memory_allocated(self.root_device)

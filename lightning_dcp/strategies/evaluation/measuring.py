"""What a step of evaluation takes in memory, by SP size, and which SP sizes may be used.

The user's validation, test or prediction step runs a few times on short samples, without a trace.
In `fit` the comparison of sharded with whole outputs is the one that training was prepared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dcp.data.datamodule import MicroBatchMaker
from lightning_dcp.planning.evaluation_memory import (
    EvaluationMemory,
    MeasuredBytes,
    fit_bytes,
    longest_length,
)
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.profiling.evaluation_probe import EvaluationProbe, ProbeFailed, trial_lengths
from lightning_dcp.profiling.preserve import preserve
from lightning_dcp.profiling.stack_check import leave_out_unfit
from lightning_dcp.strategies._lightning_compat import evaluation as compat_eval
from lightning_dcp.strategies._lightning_compat import training as compat
from lightning_dcp.strategies.agreement import gather_objects
from lightning_dcp.strategies.measuring import PreparingStrategy, compute_dtype

if TYPE_CHECKING:
    import lightning as L
    from torch.utils.data import DataLoader

    from lightning_dcp.parallel.runtime import BlockRuntime
    from lightning_dcp.parallel.topology import Topology
    from lightning_dcp.profiling.cost_profile import CostProfile


class EvaluatingStrategy(PreparingStrategy, Protocol):
    """What is asked of the strategy while its loaders are prepared and batches evaluated."""

    def shifts_labels(self, batch: Any) -> bool:
        """Whether the first label of each of the batch's sequences bears no loss."""
        ...

    @property
    def cost_profile(self) -> CostProfile | None:
        """What training costs; None where it was not measured."""
        ...

    def whole_parameters(self) -> AbstractContextManager[None]:
        """In here parameters are whole on each rank, and no forward pass gathers any."""
        ...

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move a batch with the user's transfer hooks."""
        ...


class EvaluationMeasurer:
    """Measures the steps of one run of `fit`, `validate`, `test` or `predict`.

    Args:
        strategy: whose ranks evaluate.
        trainer: inside the run.
        pl_module: the model, on its device.
        runtime: of its blocks; None where it has none.
        topology: of the world.
        fixed_bytes: what stays on each rank.
        tell: says something once, on rank 0.
    """

    def __init__(
        self,
        strategy: EvaluatingStrategy,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        runtime: BlockRuntime | None,
        topology: Topology,
        fixed_bytes: int,
        tell: Callable[[str], None],
    ) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._pl_module = pl_module
        self._runtime = runtime
        self._topology = topology
        self._fixed_bytes = fixed_bytes
        self._tell = tell
        self._step_name = compat_eval.step_name(trainer)
        #: Per place among the loaders and of lengths what is known of the step's memory.
        self._measured: dict[tuple[int, tuple[int, ...]], dict[int, Any]] = {}
        self._exclusions: dict[int, str] | None = None

    def memory(
        self,
        dataloader: DataLoader[Any],
        lengths: IntArray,
        limit: int,
        index: int,
        num_loaders: int,
    ) -> EvaluationMemory | None:
        """Bytes by SP size, as far as sizes are needed; None where nothing could be measured."""
        spare = limit - self._fixed_bytes
        alone = self._strategy.settings.planning.max_batch_size == 1
        make = MicroBatchMaker(
            dataloader.dataset, lengths, dataloader.collate_fn, equal_lengths=alone
        )
        batch_to_device, device = self._strategy.batch_to_device, self._strategy.root_device
        step: Callable[..., Any] = getattr(self._strategy, self._step_name)
        place = index if num_loaders > 1 else None

        def arguments(batch: Any) -> tuple[Any, ...]:
            return compat.step_arguments(self._pl_module, self._step_name, batch, place)

        probe = EvaluationProbe(
            step=lambda batch: step(*arguments(batch)),
            plain_step=lambda batch: self._plain_step(*arguments(batch)),
            make_batch=lambda b, s: compat.move_micro_batch(
                batch_to_device, self._pl_module, make(b, s), device, index
            ),
            module=self._pl_module,
            runtime=self._runtime,
            topology=self._topology,
            device=device,
            gather=gather_objects,
        )
        known = self._measured.setdefault(
            (index, (*trial_lengths(lengths), int(lengths.max()))), {}
        )
        try:
            self._measure(probe, lengths, spare, known)
        except ProbeFailed as error:
            return self._from_training(lengths, error)
        return EvaluationMemory(self._fixed_bytes, dict(known))

    def _measure(
        self, probe: EvaluationProbe, lengths: IntArray, spare: int, known: dict[int, Any]
    ) -> None:
        """Fit the bytes of one rank alone, and of 2, 4, .. ranks until the longest sample fits."""
        longest = int(lengths.max())
        if 1 not in known:
            with self._probing():
                known[1] = fit_bytes(probe.measure(1, lengths, spare_bytes=spare), longest)
        if self._fits(known, 1, lengths, spare):
            return
        for p in self._candidates(probe, lengths, spare):
            if p not in known:
                with self._probing():
                    known[p] = fit_bytes(probe.measure(p, lengths, spare_bytes=spare), longest)
            if self._fits(known, p, lengths, spare):
                return

    def _fits(self, known: dict[int, Any], p: int, lengths: IntArray, spare: int) -> bool:
        longest = int(lengths.max())
        multiple = int(np.lcm(p, self._strategy.settings.planning.pad_multiple))
        memory = EvaluationMemory(0, known)
        return longest_length(memory, p, multiple, spare, longest) == longest

    def _candidates(self, probe: EvaluationProbe, lengths: IntArray, spare: int) -> list[int]:
        """SP sizes above 1 that compute the same as one rank alone."""
        allowed = self._strategy.settings.planning.sp_sizes
        sizes = [p for p in self._topology.sp_sizes if p > 1 and (allowed is None or p in allowed)]
        if self._runtime is None or not sizes:
            return []
        profile = self._strategy.cost_profile
        if profile is not None:  # checked when training was prepared
            usable = {m.sp_size for m in profile.measurements} - set(profile.sp_size_exclusions)
            return [p for p in sizes if p in usable]
        if self._exclusions is None:
            self._exclusions = self._find_exclusions(probe, sizes, lengths, spare)
            for p, reason in sorted(self._exclusions.items()):
                rank_zero_warn(f"DCP: SP size {p} is not used in evaluation: {reason}")
        return [p for p in sizes if p not in self._exclusions]

    def _find_exclusions(
        self, probe: EvaluationProbe, sizes: list[int], lengths: IntArray, spare: int
    ) -> dict[int, str]:
        assert self._runtime is not None
        if self._runtime.signature is None:
            with self._probing():
                probe.measure(1, lengths, spare_bytes=spare, observe=True)
            leave_out_unfit(self._runtime, gather_objects)
        found = self._runtime.sp_size_exclusions(sizes)
        left = [p for p in sizes if p not in found]
        if left and self._strategy.settings.self_check:
            dtype = compute_dtype(self._strategy, self._pl_module)
            with self._probing(parameters=True):
                found.update(probe.exclusions(left, lengths, dtype))
        return found

    def _plain_step(self, *args: Any) -> Any:
        """The user's step without the engine, under its precision."""
        plugin = self._strategy.precision_plugin
        context = {
            "validation_step": plugin.val_step_context,
            "test_step": plugin.test_step_context,
            "predict_step": plugin.predict_step_context,
        }[self._step_name]
        with context():
            return getattr(self._pl_module, self._step_name)(*args)

    @contextmanager
    def _probing(self, *, parameters: bool = False) -> Iterator[None]:
        """Steps in here leave no trace."""
        with (
            self._strategy.whole_parameters(),
            preserve(self._pl_module, parameters=parameters),
            compat.silent_logging(self._trainer, self._pl_module),
            torch.no_grad(),  # as in evaluation; `fit` without a sanity check comes with gradients
        ):
            self._pl_module.eval()
            yield
        if self._strategy.root_device.type == "cuda":
            torch.cuda.empty_cache()  # cut for shapes that do not come again

    def _from_training(self, lengths: IntArray, error: ProbeFailed) -> EvaluationMemory | None:
        """What training takes with all blocks recomputed, where evaluation cannot be measured."""
        profile = self._strategy.cost_profile
        known = "every sample runs on one rank" if profile is None else "that of training is used"
        self._tell(
            f"the memory of `{self._step_name}` could not be measured, so that {known}. Tried"
            f" before the hooks of the run, it raised {error}"
        )
        if profile is None:
            return None
        model = profile.cost_model()
        longest = int(lengths.max())
        coefficients = {}
        for p in model.sp_sizes:
            if p in profile.sp_size_exclusions:
                continue
            points = [
                (b, -(-s // p) * p)
                for b, s in (
                    (1, longest),
                    (2, longest),
                    (1, longest // 2 + 1),
                    (1, longest // 4 + 1),
                )
            ]
            taken = [
                (b, s, int(model.memory_bytes(b, s, p, model.num_blocks)) - model.fixed_bytes)
                for b, s in points
            ]
            coefficients[p] = fit_bytes([MeasuredBytes(*point) for point in taken], longest)
        return EvaluationMemory(self._fixed_bytes, coefficients)

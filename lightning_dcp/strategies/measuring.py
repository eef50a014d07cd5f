"""The cost profile of the user's model inside `fit`: found in the cache, or measured.

What the profiler needs from Lightning is put together here: the user's training step under its
precision, batches by the user's loader and hooks, silence of logging.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_dcp.data.datamodule import MicroBatchMaker
from lightning_dcp.data.loader import LoaderSpec
from lightning_dcp.data.packing import PackingCollate, unpacked
from lightning_dcp.parallel.huggingface import attention_names
from lightning_dcp.parallel.kernels import kernel_name
from lightning_dcp.parallel.segments import pack
from lightning_dcp.parallel.signature import BlockSignature
from lightning_dcp.profiling.cache import ProfileCache, load_or_measure
from lightning_dcp.profiling.fingerprint import profile_fingerprint
from lightning_dcp.profiling.packing_check import PackingMismatch
from lightning_dcp.profiling.preserve import preserve
from lightning_dcp.profiling.profiler import profile_costs, recheck_sharding
from lightning_dcp.profiling.sharding_check import ShardingMismatch
from lightning_dcp.profiling.trial import Step
from lightning_dcp.strategies._lightning_compat import training as compat
from lightning_dcp.strategies.agreement import gather_objects
from lightning_dcp.strategies.metric_objects import not_reduced_over_ranks
from lightning_dcp.strategies.own_inputs import tile_large_loss
from lightning_dcp.strategies.packing import packed_batches, packing_collate

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import lightning as L
    from lightning.pytorch.plugins.precision import Precision

    from lightning_dcp.parallel.runtime import BlockRuntime
    from lightning_dcp.parallel.topology import Topology
    from lightning_dcp.profiling.cost_profile import CostProfile
    from lightning_dcp.strategies.settings import DCPSettings


class PreparingStrategy(Protocol):
    """What is asked of the strategy while its train loader is prepared and its costs measured."""

    settings: DCPSettings
    strategy_name: str

    @property
    def seed(self) -> int:
        """Seed of the order of samples."""
        ...

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        ...

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        ...

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's; its name goes into the profile's fingerprint."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def learn_from_losses(self) -> None:
        """A training step has run: does the model shift labels?"""
        ...

    def fixed_bytes(self, pl_module: L.LightningModule) -> int:
        """Bytes per rank that stay: parameters, gradients, optimizer state, buffers."""
        ...

    def move_micro_batch(self, batch: Any) -> Any:
        """Move a batch to the device with the user's transfer hooks."""
        ...

    def profile_context(self) -> AbstractContextManager[Any]:
        """Context in which a training step is measured."""
        ...


def compute_dtype(strategy: PreparingStrategy, pl_module: L.LightningModule) -> torch.dtype:
    """The type that blocks compute in, which autocast makes coarser than their parameters'."""
    precision = str(strategy.precision_plugin.precision)
    parameters = next(pl_module.parameters()).dtype
    low = {"bf16": torch.bfloat16, "16": torch.float16}
    return low.get(precision.partition("-")[0], parameters)


class CostMeasurer:
    """Measures one model; parameters, gradients, random states and logs are left as they were."""

    def __init__(
        self,
        strategy: PreparingStrategy,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        runtime: BlockRuntime,
        topology: Topology,
    ) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._pl_module = pl_module
        self._runtime = runtime
        self._topology = topology
        self._profile_batch: Any = None
        self._packing: PackingCollate | None = None

    def packing_collate(
        self, spec: LoaderSpec, lengths: npt.NDArray[np.int64], datamodule: Any
    ) -> PackingCollate:
        """What packs samples, for the profile as for training; see `packing.packing_collate`."""
        step = Step(
            step=self._step,
            make_batch=self._batch_maker(spec, lengths),
            module=self._pl_module,
            runtime=self._runtime,
            topology=self._topology,
            device=self._strategy.root_device,
        )
        self._packing = packing_collate(
            step,
            spec,
            lengths,
            datamodule=datamodule,
            move=self._strategy.move_micro_batch,
            profiling=self._profiling,
            compute_dtype=compute_dtype(self._strategy, self._pl_module),
            ignore_index=self._strategy.settings.ignore_index,
        )
        return self._packing

    def profile(
        self,
        spec: LoaderSpec,
        lengths: npt.NDArray[np.int64],
        limit: int,
        fixed: int,
        datamodule: Any,
    ) -> tuple[CostProfile, bool]:
        """The cost profile, from the cache or measured; a collective.

        Args:
            spec: the user's train loader.
            lengths: of its samples.
            limit: bytes one rank may use.
            fixed: bytes that stay.
            datamodule: may have a `profile_batch`.

        Returns:
            The profile, and whether it came from the cache.

        Raises:
            MisconfigurationException: the self-check found that the model computes something else
                when it is sharded.
        """
        self._profile_batch = getattr(datamodule, "profile_batch", None)
        options = self._strategy.settings.profiling
        sp_sizes = self._sp_sizes()
        inputs = self._runtime.inputs
        tile_large_loss(inputs, self._strategy.settings, int(lengths.max()), limit)
        fingerprint = profile_fingerprint(
            module=self._pl_module,
            blocks=self._runtime.blocks,
            device=self._strategy.root_device,
            precision=str(self._strategy.precision_plugin.precision),
            world_size=self._topology.world_size,
            ranks_per_node=self._strategy.num_processes,
            sp_sizes=sp_sizes,
            lengths=lengths,
            options=options,
            attention_backend=kernel_name(self._strategy.root_device),
            extra={
                "fixed_bytes": str(fixed),
                "strategy": self._strategy.strategy_name,
                "blocks": self._runtime.name,
                "models": attention_names(self._pl_module),
                "named_blocks": repr(self._strategy.settings.blocks),
                "sequence_dims": repr(dict(self._strategy.settings.sequence_dims or {})),
                "shard": self._strategy.settings.shard,
                "packing": "" if self._packing is None else str(self._packing.layout),
                "tiled_loss": str(inputs is not None and inputs.models.tiled),
            },
        ).digest
        profile, was_cached = load_or_measure(
            partial(self._measure, spec, lengths, sp_sizes, limit, fixed, fingerprint),
            fingerprint=fingerprint,
            cache=ProfileCache(options.cache_dir) if options.cache else None,
            gather=gather_objects,
            is_writer=self._topology.rank == 0,
            check=partial(self._check_is_of_this_run, fixed=fixed),
        )
        self._runtime.load_observations(profile)
        if was_cached:
            rank_zero_info(
                "DCP: the cost profile of this model and machine was found in the cache."
            )
            if self._strategy.settings.self_check:
                profile = self._recheck(profile, spec, lengths)
        if len(profile.sp_size_exclusions) and self._topology.world_size > 1:
            for sp_size, reason in sorted(profile.sp_size_exclusions.items()):
                rank_zero_warn(f"DCP: SP size {sp_size} is not used: {reason}")
        for sp_size in sorted({m.sp_size for m in profile.measurements}):
            for path, reason in self._runtime.whole_stacks(sp_size).items():
                rank_zero_info(f"DCP: at SP size {sp_size} each rank runs all of {path}: {reason}")
        return profile, was_cached

    def _check_is_of_this_run(self, profile: CostProfile, fixed: int) -> None:
        """Of what the fingerprint says already, what plans and memory depend on.

        Raises:
            ValueError: if it cannot have been measured here.
        """
        runtime, world_size = self._runtime, self._topology.world_size
        largest = max(m.sp_size for m in profile.measurements)
        if largest > world_size:
            raise ValueError(f"it has SP size {largest}, but there are {world_size} ranks")
        if profile.num_blocks > runtime.num_blocks or (
            not profile.stacks and profile.num_blocks != runtime.num_blocks
        ):
            raise ValueError(
                f"it is of {profile.num_blocks} blocks, and the model has {runtime.num_blocks}"
            )
        if profile.fixed_bytes < fixed:
            raise ValueError(
                f"it counts {profile.fixed_bytes} bytes of parameters, gradients and optimizer"
                f" state, and there are {fixed}"
            )
        for text in (profile.signature, *(stack.signature for stack in profile.stacks)):
            if text is not None:
                try:
                    BlockSignature.from_json(text)
                except (TypeError, KeyError, AttributeError) as error:
                    raise ValueError(f"its signature is damaged: {error}") from error

    def _measure(
        self,
        spec: LoaderSpec,
        lengths: npt.NDArray[np.int64],
        sp_sizes: tuple[int, ...],
        limit: int,
        fixed: int,
        fingerprint: str,
    ) -> CostProfile:
        with self._profiling():
            return profile_costs(
                step=self._step,
                module=self._pl_module,
                runtime=self._runtime,
                make_batch=self._batch_maker(spec, lengths),
                lengths=lengths,
                topology=self._topology,
                options=self._strategy.settings.profiling,
                device=self._strategy.root_device,
                fixed_bytes=fixed,
                memory_limit_bytes=limit,
                step_overhead_s=self._reduction_s(),
                sp_sizes=sp_sizes,
                gather=gather_objects,
                fingerprint=fingerprint,
                self_check=self._strategy.settings.self_check,
            )

    def _recheck(
        self, profile: CostProfile, spec: LoaderSpec, lengths: npt.NDArray[np.int64]
    ) -> CostProfile:
        with self._profiling():
            return recheck_sharding(
                profile,
                step=self._step,
                module=self._pl_module,
                runtime=self._runtime,
                make_batch=self._batch_maker(spec, lengths),
                lengths=lengths,
                topology=self._topology,
                device=self._strategy.root_device,
                compute_dtype=compute_dtype(self._strategy, self._pl_module),
                gather=gather_objects,
            )

    def _batch_maker(
        self, spec: LoaderSpec, lengths: npt.NDArray[np.int64]
    ) -> Callable[[int, int], Any]:
        if self._packing is not None:
            return packed_batches(self._packing, spec, lengths, self._strategy.move_micro_batch)
        # Where no micro-batch has two samples, their shapes need not fit together.
        alone = self._strategy.settings.planning.max_batch_size == 1
        make = MicroBatchMaker(
            spec.dataset, lengths, spec.collate_fn, self._profile_batch, equal_lengths=alone
        )
        return lambda b, s: self._strategy.move_micro_batch(make(b, s))

    @contextmanager
    def _profiling(self) -> Iterator[None]:
        """Training steps in here are not training: they leave no trace."""
        with (
            preserve(self._pl_module),
            compat.silent_logging(self._trainer, self._pl_module),
            compat.logging_as_training_step(self._pl_module),
            not_reduced_over_ranks(m for m in self._pl_module.modules() if isinstance(m, Metric)),
        ):
            self._pl_module.train()
            try:
                yield
            except (ShardingMismatch, PackingMismatch) as error:  # on all ranks
                # Not from the error itself, whose text would stand there twice.
                raise MisconfigurationException(str(error)) from error.__cause__

    def _step(self, batch: Any) -> Tensor:
        """The user's training step on a batch that is on the device; its loss."""
        batch, segments = unpacked(batch)
        if segments is not None:
            pack(segments)
        own = self._runtime.own_inputs(batch)
        with self._strategy.profile_context():
            arguments = compat.step_arguments(self._pl_module, "training_step", own.batch)
            output = self._pl_module.training_step(*arguments)
        self._strategy.learn_from_losses()
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"`training_step` of {type(self._pl_module).__name__} must return the loss, a"
                f" tensor, or a dict with it under 'loss'; got {type(loss).__name__}."
            )
        reported = output.get("num_targets") if isinstance(output, dict) else None
        num_targets = own.num_targets if reported is None else float(reported)
        return self._runtime.whole_loss(loss, num_targets)

    def _sp_sizes(self) -> tuple[int, ...]:
        allowed = self._strategy.settings.planning.sp_sizes
        sizes = tuple(p for p in self._topology.sp_sizes if allowed is None or p in allowed)
        if not sizes:
            raise MisconfigurationException(
                f"planning.sp_sizes={list(allowed or ())} leaves no SP size for"
                f" {self._topology.world_size} ranks; possible: {list(self._topology.sp_sizes)}."
            )
        return sizes

    def _reduction_s(self) -> float:
        """Seconds that one reduction of all gradients takes, which every iteration costs."""
        if self._topology.world_size == 1:
            return 0.0
        device = self._strategy.root_device
        size = sum(p.numel() for p in self._pl_module.parameters() if p.requires_grad)
        gradients = torch.zeros(max(1, size), device=device)
        seconds = []
        for _ in range(3):
            self._strategy.barrier()
            start = time.perf_counter()
            torch.distributed.all_reduce(gradients)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        return float(np.median(seconds))

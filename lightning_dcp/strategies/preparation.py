"""From the user's train loader to plans: lengths, cost profile, planner, plan-driven loader.

Runs inside `Strategy.setup`, on all ranks at once; every step that can fail on one rank only is
agreed on before the next collective.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import psutil
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_dcp.data.datamodule import MicroBatchMaker
from lightning_dcp.data.lengths import resolve_lengths
from lightning_dcp.data.loader import LoaderSpec, build_plan_loader, read_loader
from lightning_dcp.data.sampler import PlanSampler
from lightning_dcp.parallel.kernels import kernel_name
from lightning_dcp.planning.planner import EpochPlanner
from lightning_dcp.profiling.cache import ProfileCache, load_or_measure
from lightning_dcp.profiling.fingerprint import profile_fingerprint
from lightning_dcp.profiling.preserve import preserve
from lightning_dcp.profiling.profiler import profile_costs, recheck_sharding
from lightning_dcp.strategies import _lightning_compat as compat
from lightning_dcp.strategies.agreement import (
    check_same_on_all_ranks,
    collectively,
    gather_objects,
)
from lightning_dcp.strategies.checks import check_memory_limit

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import lightning as L
    from lightning.pytorch.plugins.precision import Precision
    from torch.utils.data import DataLoader

    from lightning_dcp.parallel.runtime import BlockRuntime
    from lightning_dcp.parallel.topology import Topology
    from lightning_dcp.profiling.cost_profile import CostProfile
    from lightning_dcp.strategies.settings import DCPSettings

#: Share of the device's memory that plans may use where the user sets no limit: the rest is for the
#: allocator's fragmentation, communication buffers and the libraries.
_USABLE_SHARE = 0.9


@dataclass(frozen=True)
class Preparation:
    """What `fit` trains from."""

    planner: EpochPlanner
    cost_profile: CostProfile
    loader: DataLoader[Any]
    #: Whether the cost profile was found in the cache.
    profile_was_cached: bool

    @property
    def sampler(self) -> PlanSampler:
        """Holds the plans of the epochs that are being loaded and run."""
        assert isinstance(self.loader.sampler, PlanSampler)
        return self.loader.sampler


class PreparingStrategy(Protocol):
    """What is asked of the strategy while its train loader is prepared."""

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

    def fixed_bytes(self, pl_module: L.LightningModule) -> int:
        """Bytes per rank that stay: parameters, gradients, optimizer state, buffers."""
        ...

    def move_micro_batch(self, batch: Any) -> Any:
        """Move a batch to the device with the user's transfer hooks."""
        ...

    def profile_context(self) -> AbstractContextManager[Any]:
        """Context in which a training step is measured."""
        ...


class TrainPreparer:
    """Turns the user's train loader into a plan-driven one; the cost profile is made once."""

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
        self._profile: tuple[CostProfile, bool] | None = None
        #: Bytes per rank that stay: parameters, gradients, optimizer state, buffers.
        self.fixed_bytes = max(gather_objects(strategy.fixed_bytes(pl_module)))
        self._seen_combined_loader: object = _NEVER

    def prepare(self, dataloader: DataLoader[Any]) -> Preparation:
        """Read, measure, plan. Called again when Lightning reloads the train loader.

        Raises:
            MisconfigurationException: several train loaders; ranks that disagree; a memory limit
                below the model's own size.
            ValueError, TypeError: what `read_loader`, `resolve_lengths` and the planner refuse.
        """
        self._refuse_a_second_loader()
        planning = self._strategy.settings.planning
        spec, lengths = collectively(
            "Reading the train loader and its lengths", partial(self._read, dataloader)
        )
        check_same_on_all_ranks(
            "the training plan",
            {
                "number of samples": str(len(lengths)),
                "sequence lengths": hashlib.sha256(
                    np.ascontiguousarray(lengths).tobytes()
                ).hexdigest()[:12],
                "batch_size": str(spec.batch_size),
                "shuffle": str(spec.shuffle),
                "seed": str(self._strategy.seed),
                "planning options": planning.fingerprint()[:12],
            },
            "Every rank must build the same data set in the same order, with the same options: look"
            " for shuffling or filtering without a fixed seed, for files only some nodes have, and"
            " for arguments that depend on the rank.",
        )
        limit = self._memory_limit()
        check_memory_limit(limit, self.fixed_bytes)
        if self._profile is None:
            self._profile = self._load_or_measure(spec, lengths, limit, self.fixed_bytes)
        profile, was_cached = self._profile
        profile = replace(profile, fixed_bytes=self.fixed_bytes)
        planner = collectively(
            "Planning",
            lambda: EpochPlanner(
                lengths=lengths,
                cost_model=profile.cost_model(),
                world_size=self._topology.world_size,
                options=planning,
                batch_size=spec.batch_size,
                memory_limit_bytes=limit,
                seed=self._strategy.seed,
                shuffle=spec.shuffle,
                sp_size_exclusions=profile.sp_size_exclusions,
            ),
        )
        check_same_on_all_ranks(
            "the training plan",
            planner.inputs,
            "Start every rank with the same code, data, options and libraries.",
        )
        _tell_of_too_long(planner, lengths)
        loader = collectively(
            "Rebuilding the train loader",
            lambda: build_plan_loader(
                dataloader,
                planner,
                rank=self._topology.rank,
                world_size=self._topology.world_size,
                truncate=getattr(self._datamodule, "truncate_sample", None),
                epoch=self._trainer.current_epoch,
            ),
        )
        return Preparation(
            planner=planner, cost_profile=profile, loader=loader, profile_was_cached=was_cached
        )

    def check_fixed_bytes(self, allocated_bytes: int | None) -> bool:
        """Compare what stays on the device with what was assumed, once the engine exists.

        Args:
            allocated_bytes: what tensors take now: parameters, buffers and whatever the engine has
                made, without gradients; None where it is not known.

        Returns:
            Whether more is taken than was assumed, so that the train loader has to be planned
            again. The same on all ranks.
        """
        gradients = sum(
            p.numel() * p.element_size() for p in self._pl_module.parameters() if p.requires_grad
        )
        measured = 0 if allocated_bytes is None else allocated_bytes + gradients
        largest = max(gather_objects(measured))
        if self._profile is None or largest <= self.fixed_bytes:
            return False
        rank_zero_warn(
            f"DCP: parameters, gradients and optimizer state take {largest:,} bytes per rank, not"
            f" {self.fixed_bytes:,} as assumed. Iterations are planned again with less memory."
        )
        self.fixed_bytes = largest
        self._seen_combined_loader = _NEVER  # the same loader comes again
        return True

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

    @property
    def _datamodule(self) -> Any:
        # A LightningModule that defines `train_dataloader` itself may mix the hooks in as well.
        return getattr(self._trainer, "datamodule", None) or self._pl_module

    def _refuse_a_second_loader(self) -> None:
        combined = compat.combined_train_loader(self._trainer)
        if combined is self._seen_combined_loader:
            raise MisconfigurationException(
                "Several train loaders were given;"
                f" strategy='{self._strategy.strategy_name}' plans one. Join the data sets with"
                " torch.utils.data.ConcatDataset and return one DataLoader."
            )
        self._seen_combined_loader = combined

    def _read(self, dataloader: DataLoader[Any]) -> tuple[LoaderSpec, npt.NDArray[np.int64]]:
        spec = read_loader(dataloader)
        return spec, resolve_lengths(
            spec.dataset, datamodule=self._datamodule, show_progress=self._topology.rank == 0
        )

    def _memory_limit(self) -> int:
        """Bytes a rank may use: the user's limit or what its device has, the least of all ranks."""
        limit = self._strategy.settings.planning.memory_limit_bytes
        if limit is None:
            device = self._strategy.root_device
            if device.type == "cuda":
                total = torch.cuda.get_device_properties(device).total_memory
            else:
                total = psutil.virtual_memory().total // max(1, self._strategy.num_processes)
            limit = int(total * _USABLE_SHARE)
        return min(gather_objects(limit))

    def _load_or_measure(
        self, spec: LoaderSpec, lengths: npt.NDArray[np.int64], limit: int, fixed: int
    ) -> tuple[CostProfile, bool]:
        options = self._strategy.settings.profiling
        sp_sizes = self._sp_sizes()
        fingerprint = profile_fingerprint(
            module=self._pl_module,
            blocks=self._runtime.stack.blocks,
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
                "blocks": self._runtime.stack.path,
                "sequence_dims": repr(dict(self._strategy.settings.sequence_dims or {})),
            },
        ).digest
        profile, was_cached = load_or_measure(
            partial(self._measure, spec, lengths, sp_sizes, limit, fixed, fingerprint),
            fingerprint=fingerprint,
            cache=ProfileCache(options.cache_dir) if options.cache else None,
            gather=gather_objects,
            is_writer=self._topology.rank == 0,
        )
        self._runtime.load_observations(profile)
        if was_cached:
            rank_zero_info(
                "DCP: the cost profile of this model and machine was found in the cache."
            )
            if options.check_sharding:
                profile = self._recheck(profile, spec, lengths)
        if len(profile.sp_size_exclusions) and self._topology.world_size > 1:
            for sp_size, reason in sorted(profile.sp_size_exclusions.items()):
                rank_zero_warn(f"DCP: SP size {sp_size} is not used: {reason}")
        return profile, was_cached

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
            )

    def _recheck(
        self, profile: CostProfile, spec: LoaderSpec, lengths: npt.NDArray[np.int64]
    ) -> CostProfile:
        precision = str(self._strategy.precision_plugin.precision)
        parameters = next(self._pl_module.parameters()).dtype
        low = {"bf16": torch.bfloat16, "16": torch.float16}
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
                compute_dtype=low.get(precision.partition("-")[0], parameters),
                gather=gather_objects,
            )

    def _batch_maker(
        self, spec: LoaderSpec, lengths: npt.NDArray[np.int64]
    ) -> Callable[[int, int], Any]:
        make = MicroBatchMaker(
            spec.dataset, lengths, spec.collate_fn, getattr(self._datamodule, "profile_batch", None)
        )
        return lambda b, s: self._strategy.move_micro_batch(make(b, s))

    @contextmanager
    def _profiling(self) -> Iterator[None]:
        """Training steps in here are not training: they leave no trace."""
        with (
            preserve(self._pl_module),
            compat.silent_logging(self._trainer, self._pl_module),
            compat.logging_as_training_step(self._pl_module),
        ):
            self._pl_module.train()
            yield

    def _step(self, batch: Any) -> Tensor:
        """The user's training step on a batch that is on the device; its loss."""
        with self._strategy.profile_context():
            output = self._pl_module.training_step(*compat.step_arguments(self._pl_module, batch))
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"`training_step` of {type(self._pl_module).__name__} must return the loss, a"
                f" tensor, or a dict with it under 'loss'; got {type(loss).__name__}."
            )
        return loss

    def _sp_sizes(self) -> tuple[int, ...]:
        allowed = self._strategy.settings.planning.sp_sizes
        sizes = tuple(p for p in self._topology.sp_sizes if allowed is None or p in allowed)
        if not sizes:
            raise MisconfigurationException(
                f"planning.sp_sizes={list(allowed or ())} leaves no SP size for"
                f" {self._topology.world_size} ranks; possible: {list(self._topology.sp_sizes)}."
            )
        return sizes


def _tell_of_too_long(planner: EpochPlanner, lengths: npt.NDArray[np.int64]) -> None:
    """Say how many samples `on_too_long` leaves out or cuts."""
    if planner.skipped_ids:
        longest = max(int(lengths[i]) for i in planner.skipped_ids)
        rank_zero_warn(
            f"DCP: on_too_long='skip' leaves out {len(planner.skipped_ids)} of {len(lengths)}"
            f" samples, which do not fit into memory; the longest has length {longest}."
        )
    elif planner.truncate_to is not None:
        cut = int((lengths > planner.truncate_to).sum())
        rank_zero_warn(
            f"DCP: on_too_long='truncate' cuts {cut} of {len(lengths)} samples to"
            f" {planner.truncate_to} tokens, the longest that fit into memory."
        )


_NEVER = object()

"""From the user's train loader to plans: lengths, cost profile, planner, plan-driven loader.

Runs inside `Strategy.setup`, on all ranks at once; every step that can fail on one rank only is
agreed on before the next collective.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dcp.data.lengths import resolve_lengths
from lightning_dcp.data.loader import LoaderSpec, build_plan_loader, read_loader
from lightning_dcp.data.sampler import PlanSampler, distributed_order
from lightning_dcp.data.streams import StreamLoader, StreamPlans, is_stream, read_stream_loader
from lightning_dcp.data.streams.loader import with_examples
from lightning_dcp.planning.planner import EpochPlanner
from lightning_dcp.planning.stream import StreamPlanner
from lightning_dcp.strategies._lightning_compat import training as compat
from lightning_dcp.strategies.agreement import (
    check_same_on_all_ranks,
    collectively,
    gather_objects,
)
from lightning_dcp.strategies.checks import check_memory_limit
from lightning_dcp.strategies.gradients import num_bytes
from lightning_dcp.strategies.measuring import CostMeasurer, PreparingStrategy
from lightning_dcp.strategies.streams import make_exchange, open_stream

if TYPE_CHECKING:
    import lightning as L
    from torch.utils.data import DataLoader

    from lightning_dcp.data.batch import IterationBatch
    from lightning_dcp.data.streams.exchange import Exchange
    from lightning_dcp.parallel.runtime import BlockRuntime
    from lightning_dcp.parallel.topology import Topology
    from lightning_dcp.planning.plan import Plan
    from lightning_dcp.profiling.cost_profile import CostProfile

#: Share of the device's memory that plans may use where the user sets no limit: the rest is for the
#: allocator's fragmentation, communication buffers and the libraries.
_USABLE_SHARE = 0.9
#: What to do where ranks disagree on their data.
SAME_DATA = (
    "Every rank must build the same data set in the same order, with the same options: look for"
    " shuffling or filtering without a fixed seed, for files only some nodes have, and for"
    " arguments that depend on the rank."
)


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

    @property
    def stream(self) -> StreamPlans | None:
        """What stands for the sampler where the data set is iterable-style."""
        plans = self.loader.sampler
        return plans if isinstance(plans, StreamPlans) else None

    def plan_of(self, batch: IterationBatch) -> Plan:
        """The plan by which a batch was made."""
        return (self.stream or self.sampler).plan_of(batch)


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
        self._measurer = CostMeasurer(strategy, trainer, pl_module, runtime, topology)
        self._profile: tuple[CostProfile, bool] | None = None
        self._exchange: Exchange | None = None
        self._stream: StreamPlans | None = None
        #: Bytes per rank that stay: parameters, gradients, optimizer state, buffers.
        self.fixed_bytes = max(gather_objects(strategy.fixed_bytes(pl_module)))

    def prepare(self, dataloader: DataLoader[Any]) -> Preparation:
        """Read, measure, plan. Called again when Lightning reloads the train loader.

        Raises:
            MisconfigurationException: ranks that disagree; a memory limit below the model's own
                size.
            ValueError, TypeError: what `read_loader`, `resolve_lengths` and the planner refuse.
        """
        if is_stream(dataloader):
            return self._prepare_stream(dataloader)
        planning = self._strategy.settings.planning
        spec, lengths = collectively(
            "Reading the train loader and its lengths", partial(self._read, dataloader)
        )
        check_same_on_all_ranks(
            "the training plan",
            {
                **what_is_planned(self._strategy, lengths, spec.batch_size),
                "shuffle": str(spec.shuffle),
            },
            SAME_DATA,
        )
        limit = memory_limit(self._strategy)
        check_memory_limit(limit, self.fixed_bytes)
        packing = None
        if planning.packing:
            packing = self._measurer.packing_collate(spec, lengths, self._datamodule)
        if self._profile is None:
            self._profile = self._measurer.profile(
                spec, lengths, limit, self.fixed_bytes, self._datamodule
            )
        profile, was_cached = self._profile
        profile = replace(profile, fixed_bytes=self.fixed_bytes)
        seed, shuffle = self._strategy.seed, spec.shuffle
        order = None
        if planning.policy == "global-batch":
            if planning.seed is None and spec.sampler_seed is not None:
                seed = spec.sampler_seed
            if spec.sampler_seed is None and compat.shuffles_under_ddp(self._trainer):
                shuffle = True
            order = distributed_order(seed)
        planner = collectively(
            "Planning",
            lambda: EpochPlanner(
                lengths=lengths,
                cost_model=profile.cost_model(),
                world_size=self._topology.world_size,
                options=planning,
                batch_size=spec.batch_size,
                memory_limit_bytes=limit,
                seed=seed,
                shuffle=shuffle,
                sp_size_exclusions=profile.sp_size_exclusions,
                sample_order=order,
                layout=self._topology.layout,
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
                packing=packing,
            ),
        )
        return Preparation(
            planner=planner, cost_profile=profile, loader=loader, profile_was_cached=was_cached
        )

    def _prepare_stream(self, dataloader: DataLoader[Any]) -> Preparation:
        """As `prepare`, from the first samples of an iterable-style data set."""
        options = self._strategy.settings.planning
        spec = collectively("Reading the train loader", lambda: read_stream_loader(dataloader))
        if self._stream is not None:
            self._stream.close()
        if self._exchange is None:
            self._exchange = make_exchange(self._topology)
        self._stream, first = open_stream(
            dataloader,
            spec,
            self._exchange,
            datamodule=self._datamodule,
            options=options,
            seed=self._strategy.seed,
            epoch=self._trainer.current_epoch,
        )
        plans = self._stream
        limit = memory_limit(self._strategy)
        check_memory_limit(limit, self.fixed_bytes)
        examples = plans.examples()
        example_spec = with_examples(spec, examples)
        packing = None
        if options.packing:
            packing = self._measurer.packing_collate(
                example_spec, examples.lengths, self._datamodule
            )
        if self._profile is None:
            self._profile = self._measurer.profile(
                example_spec, examples.lengths, limit, self.fixed_bytes, self._datamodule
            )
        profile, was_cached = self._profile
        profile = replace(profile, fixed_bytes=self.fixed_bytes)
        tokens = options.tokens_per_step
        if tokens is None:
            mean = float(first.mean())
            tokens = max(1, round(spec.batch_size * self._topology.world_size * mean))

        def plan() -> StreamPlanner:
            # What is too long is dealt with sample by sample, as they come.
            changed = replace(options, on_too_long="truncate")
            if options.policy != "global-batch":
                changed = replace(changed, tokens_per_step=tokens)
            planner = EpochPlanner(
                lengths=plans.reference(),
                cost_model=profile.cost_model(),
                world_size=self._topology.world_size,
                options=changed,
                batch_size=spec.batch_size,
                memory_limit_bytes=limit,
                seed=self._strategy.seed,
                shuffle=False,
                sp_size_exclusions=profile.sp_size_exclusions,
                dataset_name=type(spec.dataset).__name__,
                layout=self._topology.layout,
            )
            planner.of_stream = True
            return StreamPlanner(planner, on_too_long=options.on_too_long, tokens_per_step=tokens)

        plans.planner = collectively("Planning", plan)
        planner = plans.planner.planner
        check_same_on_all_ranks(
            "the training plan",
            planner.inputs,
            "Start every rank with the same code, data, options and libraries.",
        )
        loader: Any = StreamLoader(
            dataloader,
            plans,
            packing or spec.collate_fn,
            truncate=getattr(self._datamodule, "truncate_sample", None),
            seed=self._strategy.seed,
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
        gradients = num_bytes(p for p in self._pl_module.parameters() if p.requires_grad)
        measured = 0 if allocated_bytes is None else allocated_bytes + gradients
        largest = max(gather_objects(measured))
        if self._profile is None or largest <= self.fixed_bytes:
            return False
        rank_zero_warn(
            f"DCP: parameters, gradients and optimizer state take {largest:,} bytes per rank, not"
            f" {self.fixed_bytes:,} as assumed. Iterations are planned again with less memory."
        )
        self.fixed_bytes = largest
        return True

    @property
    def _datamodule(self) -> Any:
        # A LightningModule that defines `train_dataloader` itself may mix the hooks in as well.
        return getattr(self._trainer, "datamodule", None) or self._pl_module

    def _read(self, dataloader: DataLoader[Any]) -> tuple[LoaderSpec, npt.NDArray[np.int64]]:
        spec = read_loader(dataloader)
        return spec, resolve_lengths(
            spec.dataset, datamodule=self._datamodule, show_progress=self._topology.rank == 0
        )


def what_is_planned(
    strategy: PreparingStrategy, lengths: npt.NDArray[np.int64], batch_size: int
) -> dict[str, str]:
    """For comparison between ranks, before they plan."""
    return {
        "number of samples": str(len(lengths)),
        "sequence lengths": hashlib.sha256(np.ascontiguousarray(lengths).tobytes()).hexdigest()[
            :12
        ],
        "batch_size": str(batch_size),
        "seed": str(strategy.seed),
        "planning options": strategy.settings.planning.fingerprint()[:12],
    }


def memory_limit(strategy: PreparingStrategy) -> int:
    """Bytes a rank may use: the user's limit or what its device has, the least of all ranks."""
    limit = strategy.settings.planning.memory_limit_bytes
    if limit is None:
        device = strategy.root_device
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
        else:
            total = psutil.virtual_memory().total // max(1, strategy.num_processes)
        limit = int(total * _USABLE_SHARE)
    return min(gather_objects(limit))


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

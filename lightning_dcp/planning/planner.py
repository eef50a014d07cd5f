"""From lengths and costs to the plans of each epoch."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from lightning_dcp.planning.buckets import Buckets, choose_edges
from lightning_dcp.planning.candidates import Candidate, Exclusion
from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.drift import CorrectedCosts, Corrections, uncorrected
from lightning_dcp.planning.epoch import EpochPlan
from lightning_dcp.planning.feasible import Feasible, less_margin, usable_sp_sizes
from lightning_dcp.planning.fitting import FloatArray
from lightning_dcp.planning.layout import Layout
from lightning_dcp.planning.lengths import IntArray, as_lengths
from lightning_dcp.planning.options import STATIC_POLICIES, PlanningOptions
from lightning_dcp.planning.rest import BoolArray, cut_windows
from lightning_dcp.planning.search import Configuration, Problem

__all__ = ["BucketChoice", "EpochPlanner"]

_PLANNER_VERSION = "3"  # raise when the same inputs give other plans


@dataclass(frozen=True)
class BucketChoice:
    """A bucket ``[lo, hi)`` and the configuration chosen for it (costs: of its longest sample).

    ``alternatives`` has the best candidate at each SP size that fits, by size.
    """

    lo: int
    hi: int
    num_samples: int
    batch_size: int
    sp_size: int
    recompute_blocks: int
    time_s: float
    memory_bytes: int
    tokens_per_s_per_rank: float
    alternatives: tuple[Candidate, ...]


class EpochPlanner:
    """Plans epochs: a pure function of its arguments, alike on all ranks.

    Args:
        lengths: One length per sample of the dataset.
        cost_model: Predicts seconds and bytes of a micro-batch.
        world_size: Number of ranks W, any number from 1.
        options: The user's options.
        batch_size: Samples per rank and step of the DataLoader; the default step size is
            ``batch_size * W * mean length`` tokens.
        memory_limit_bytes: Bytes a rank may use; ``options.memory_limit_bytes`` goes before it.
        seed: Seed of the order; ``options.seed`` goes before it.
        shuffle: False: samples in the order of the dataset.
        sp_size_exclusions: SP size -> why the model cannot use it.
        dataset_name: For messages.
        static_recompute: For policy ``"bucket"``: recompute the fewest blocks with which the
            longest sample fits, or all, as the paper's baseline does.
        sample_order: ``(epoch, n) -> permutation of n``, in place of the planner's own; how policy
            ``"global-batch"`` follows the sampler of a DDP run.
        same_steps_as: A planner whose number of steps, and for ``"global-batch"`` samples of each
            step, are taken over.
        layout: Which ranks stand side by side; plans name places of it. Default: a single node,
            so that every place is its own rank.

    Attributes:
        num_iterations: Optimizer steps per epoch, the same for every epoch.
        tokens_per_step: Tokens a step aims at.
        exclusions: SP sizes that are not used and why.
        usable_bytes: The memory limit less a margin: what a micro-batch adds may turn out larger
            than predicted by the cost model's own 95th percentile of held-out errors.
        inputs: A short value or hash of each input, to compare between ranks and name the one
            that differs.
        skipped_ids: Samples left out by ``on_too_long="skip"``.
        truncate_to: Length that ``on_too_long="truncate"`` cuts to; None where nothing is cut.
        lengths: Lengths as planned (cut where truncated).
        planning_s: Seconds that this planner and its last whole epoch took to make, here.

    Raises:
        ValueError: Wrong lengths, a memory limit below the model's own size, no usable SP size, a
            sample that fits nowhere.
    """

    #: Whether plans are of samples that come later (``window``): ids in them are no places in
    #: ``lengths``.
    of_stream = False

    def __init__(
        self,
        *,
        lengths: Iterable[Any],
        cost_model: Costs,
        world_size: int,
        memory_limit_bytes: int,
        options: PlanningOptions | None = None,
        batch_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        sp_size_exclusions: Mapping[int, str] | None = None,
        dataset_name: str = "the dataset",
        static_recompute: Literal["smallest", "full"] = "smallest",
        sample_order: Callable[[int, int], IntArray] | None = None,
        same_steps_as: EpochPlanner | None = None,
        layout: Layout | None = None,
    ) -> None:
        began_s = time.perf_counter()
        self._last_rest: tuple[tuple[int, bytes, int, int], EpochPlan] | None = None
        self.options = options if options is not None else PlanningOptions()
        if world_size < 1 or batch_size < 1 or seed < 0:
            raise ValueError(
                "world_size and batch_size must be at least 1 and seed not negative; got "
                f"{world_size}, {batch_size} and {seed}."
            )
        self.layout = Layout.plain(world_size) if layout is None else layout
        if self.layout.world_size != world_size:
            raise ValueError(
                f"The layout is of {self.layout.world_size} ranks, the world of {world_size}."
            )
        self.cost_model = cost_model
        self.world_size = world_size
        self.batch_size = batch_size
        self.seed = self.options.seed if self.options.seed is not None else seed
        self.shuffle = shuffle
        self.dataset_name = dataset_name
        self.static_recompute = static_recompute
        self.sp_size_exclusions = dict(sp_size_exclusions or {})
        own_limit = self.options.memory_limit_bytes
        self.memory_limit_bytes = int(own_limit if own_limit is not None else memory_limit_bytes)
        self.usable_bytes = less_margin(self.memory_limit_bytes, cost_model)
        given = as_lengths(lengths, name=dataset_name)
        self._given_lengths = given
        sp_sizes, self._exclusions = usable_sp_sizes(
            cost_model, world_size, self.options, self.sp_size_exclusions
        )
        feasible = Feasible(
            cost_model,
            self.memory_limit_bytes,
            self.usable_bytes,
            sp_sizes,
            self.options,
            dataset_name,
        )
        self.lengths, self._ids, self.truncate_to = feasible.fit_lengths(given)
        left_out = np.setdiff1d(np.arange(given.size), self._ids)
        self.skipped_ids: tuple[int, ...] = tuple(left_out.tolist())
        lengths_used = self.lengths[self._ids]
        target = self.options.tokens_per_step
        if target is None:
            target = max(1, round(batch_size * world_size * float(lengths_used.mean())))
        self.tokens_per_step = target
        buckets = self._buckets(lengths_used)
        self.sample_order = sample_order
        self._windows = self._ddp_windows(lengths_used.size)
        if same_steps_as is not None:
            self._windows = same_steps_as._windows
        self._problem = Problem(
            lengths=lengths_used,
            buckets=buckets,
            bucket=buckets.index_of(lengths_used),
            costs=cost_model,
            world_size=world_size,
            options=self.options,
            sp_sizes=sp_sizes,
            limit_bytes=self.usable_bytes,
            tokens_per_step=target,
            windows=self._windows,
            layout=self.layout,
            speed=self.place_speed,
        )
        self._recompute = cost_model.num_blocks if self.options.policy == "dcp-inter" else None
        if same_steps_as is not None:
            self.num_iterations: int = same_steps_as.num_iterations
        elif self._windows is not None:
            self.num_iterations = len(self._windows)
        else:
            self.num_iterations = self._num_steps(np.arange(lengths_used.size))
        self._search()
        self.exclusions: tuple[Exclusion, ...] = tuple(self._exclusions)
        self._made_in_s = self.planning_s = time.perf_counter() - began_s

    def epoch(self, epoch: int) -> EpochPlan:
        """All plans of an epoch (0, 1, ...), ``num_iterations`` of them."""
        began_s = time.perf_counter()
        plans = self._best(self._order(epoch), epoch, self.num_iterations, self._windows)
        self.planning_s = self._made_in_s + time.perf_counter() - began_s
        return plans

    def rest(
        self,
        epoch: int,
        consumed: BoolArray,
        *,
        first_iteration: int = 0,
        num_iterations: int | None = None,
    ) -> EpochPlan:
        """Plan what is left of an epoch that was begun with other plans.

        The samples that are left come in the order of this planner's epoch, each once, in steps of
        the size that this planner aims at.

        Args:
            epoch: Epoch, from 0.
            consumed: (n,) whether a sample of the dataset was trained on already.
            first_iteration: Number of the first plan: how many iterations were run.
            num_iterations: Steps; by default what the step size asks for. Policy
                ``"global-batch"`` always takes its windows.

        Raises:
            ValueError: ``consumed`` has not one flag per sample, or nothing is left.
        """
        if np.shape(consumed) != self._given_lengths.shape:
            raise ValueError(
                f"`consumed` needs one flag for each of {self._given_lengths.size} samples; got "
                f"shape {np.shape(consumed)}."
            )
        order = self._order(epoch)
        order = order[~np.asarray(consumed, dtype=bool)[self._ids[order]]]
        if not order.size:
            raise ValueError(f"Nothing is left of epoch {epoch}: all samples are consumed.")
        windows = None
        if self._windows is not None:
            windows = cut_windows(order.size, self.batch_size * self.world_size)
            num_iterations = len(windows)
        elif num_iterations is None:
            num_iterations = self._num_steps(order)
        # Whether it is worth following is decided on the plans, which are then asked for again.
        key = (epoch, order.tobytes(), first_iteration, num_iterations)
        if self._last_rest is None or self._last_rest[0] != key:
            plans = self._best(
                order,
                epoch,
                min(num_iterations, order.size),
                windows,
                first_iteration=first_iteration,
            )
            self._last_rest = (key, plans)
        return self._last_rest[1]

    def _order(self, epoch: int) -> IntArray:
        """Positions in ``_ids`` in the order of an epoch."""
        if epoch < 0:
            raise ValueError(f"epoch must not be negative; got {epoch}.")
        n = self._ids.size
        if not self.shuffle:
            return np.arange(n, dtype=np.int64)
        if self.sample_order is not None:
            return np.asarray(self.sample_order(epoch, n), dtype=np.int64)
        return np.random.default_rng([self.seed, epoch]).permutation(n).astype(np.int64)

    def _best(
        self,
        order: IntArray,
        epoch: int,
        num_iterations: int,
        windows: tuple[tuple[int, int], ...] | None,
        *,
        first_iteration: int = 0,
    ) -> EpochPlan:
        """Plans of the samples of ``order``, by the configuration that is predicted to be best."""

        def planned(configuration: Configuration) -> EpochPlan:
            return self._problem.plan(
                configuration,
                order,
                epoch=epoch,
                num_iterations=num_iterations,
                windows=windows,
                ids=self._ids,
                first_iteration=first_iteration,
            )

        plan = planned(self._configuration)
        # Never worse: a static plan that is predicted to be quicker takes its place.
        for static in self._static:
            if static == self._configuration:
                continue
            bound = self._problem.static_bound_s(static, num_iterations, order)
            if bound < plan.predicted_time_s:
                other = planned(static)
                if other.predicted_time_s < plan.predicted_time_s:
                    plan = other
        return plan

    def _num_steps(self, order: IntArray) -> int:
        """Steps of the size aimed at that the samples of ``order`` take."""
        static = self.options.policy in STATIC_POLICIES
        return self._problem.num_iterations(
            self._static_recompute() if static else self._recompute,
            self._problem.lengths[order],
        )

    @property
    def sp_sizes(self) -> tuple[int, ...]:
        """SP sizes that plans may use, increasing."""
        return self._problem.sp_sizes

    @property
    def bucket_edges(self) -> tuple[int, ...]:
        """Bucket k holds lengths in ``[bucket_edges[k], bucket_edges[k + 1])``."""
        return self._problem.buckets.edges

    @property
    def place_speed(self) -> FloatArray | None:
        """(W,) seconds at each place of the layout relative to the typical one; None: all alike."""
        if not isinstance(self.cost_model, CorrectedCosts):
            return None
        speed = self.cost_model.corrections.rank_speed
        return np.array(speed)[list(self.layout.ranks)] if speed else None

    @property
    def corrections(self) -> Corrections:
        """How costs differ from the cost profile; of this planner's buckets where they do not."""
        if isinstance(self.cost_model, CorrectedCosts):
            return self.cost_model.corrections
        return Corrections.none(self.bucket_edges)

    def corrected(self, corrections: Corrections) -> EpochPlanner:
        """A planner of the same samples, order and number of steps, with costs as they turned out.

        Args:
            corrections: Relative to the cost profile; those that this planner has are replaced.

        Raises:
            ValueError: Speeds of another number of ranks, or a sample that fits nowhere with these
                corrections.
        """
        speeds = corrections.rank_speed
        if speeds and len(speeds) != self.world_size:
            raise ValueError(
                f"rank_speed needs one factor for each of {self.world_size} ranks; got "
                f"{len(speeds)}."
            )
        costs: Costs = uncorrected(self.cost_model)
        if not corrections.changes_nothing:
            costs = CorrectedCosts(costs, corrections)
        planner = self._made_again(cost_model=costs, same_steps_as=self)
        changed = np.flatnonzero(planner.lengths != self.lengths)
        if planner.skipped_ids != self.skipped_ids:
            more = np.setdiff1d(planner.skipped_ids, self.skipped_ids)
            changed = more if more.size else np.setdiff1d(self.skipped_ids, planner.skipped_ids)
        if changed.size:
            raise ValueError(
                f"With the corrected memory, sample {int(changed[0])} of {self.dataset_name} with "
                f"{int(self._given_lengths[changed[0]])} tokens no longer is used as planned before"
                f" ({changed.size} such samples): on_too_long={self.options.on_too_long!r} cannot "
                "change in the middle of a run. Cut or leave out such samples beforehand, raise "
                "memory_limit_bytes, or use more ranks."
            )
        return planner

    @property
    def given_lengths(self) -> IntArray:
        """(n,) lengths as they were given, in the order of the dataset."""
        return self._given_lengths

    def with_lengths(self, lengths: IntArray) -> EpochPlanner:
        """The same planner for other samples; its steps aim at as many tokens."""
        options = self.options
        if options.policy != "global-batch":
            options = replace(options, tokens_per_step=self.tokens_per_step)
        return self._made_again(lengths=lengths, options=options)

    def _made_again(self, **changes: Any) -> EpochPlanner:
        """A planner made like this one but for ``changes``."""
        given: dict[str, Any] = {
            "lengths": self._given_lengths,
            "cost_model": self.cost_model,
            "world_size": self.world_size,
            "memory_limit_bytes": self.memory_limit_bytes,
            "options": self.options,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "sp_size_exclusions": self.sp_size_exclusions,
            "dataset_name": self.dataset_name,
            "static_recompute": self.static_recompute,
            "sample_order": self.sample_order,
            "layout": self.layout,
        }
        planner = EpochPlanner(**{**given, **changes})
        planner.of_stream = self.of_stream
        return planner

    def covers(self, lengths: IntArray) -> BoolArray:
        """(n,) whether samples of these lengths can be planned, or are known to be too long."""
        edges = np.array(self._problem.buckets.edges)
        bucket = np.clip(np.searchsorted(edges, lengths, side="right") - 1, 0, edges.size - 2)
        known = lengths <= self._problem.longest[bucket]
        if self.truncate_to is not None:
            known |= lengths > self.truncate_to
        return np.asarray(known)

    def window_steps(self, lengths: IntArray) -> int:
        """Steps of the size aimed at that samples of these lengths take."""
        if self.options.policy == "global-batch":
            return -(-lengths.size // (self.batch_size * self.world_size))
        static = self.options.policy in STATIC_POLICIES
        recompute = self._static_recompute() if static else self._recompute
        return self._problem.num_iterations(recompute, lengths)

    def window(
        self,
        lengths: IntArray,
        ids: IntArray,
        *,
        epoch: int,
        first_iteration: int,
        num_iterations: int,
    ) -> EpochPlan:
        """Plan other samples than those of the dataset, in the order given: a part of a stream.

        Args:
            lengths: (n,) their lengths, which this planner ``covers``.
            ids: (n,) what plans call them.
            epoch: Epoch, from 0.
            first_iteration: Number of the first plan.
            num_iterations: Steps; policy ``"global-batch"`` always takes its windows.
        """
        edges = self._problem.buckets.edges
        problem = replace(
            self._problem,
            lengths=lengths,
            bucket=self._problem.buckets.index_of(np.maximum(lengths, edges[0])),
            windows=None,
        )
        windows = self._ddp_windows(lengths.size)
        return problem.plan(
            self._configuration,
            np.arange(lengths.size, dtype=np.int64),
            epoch=epoch,
            num_iterations=num_iterations if windows is None else len(windows),
            windows=windows,
            ids=ids,
            first_iteration=first_iteration,
        )

    def bucket_table(self) -> tuple[BucketChoice, ...]:
        """Buckets and the configuration chosen for each."""
        rows = []
        for k in range(len(self._problem.buckets)):
            lo, hi = self._problem.buckets.bounds(k)
            choice = self._problem.shown_choice(self._configuration, k, self.num_iterations)
            rows.append(
                BucketChoice(
                    lo=lo,
                    hi=hi,
                    num_samples=int((self._problem.bucket == k).sum()),
                    batch_size=choice.batch_size,
                    sp_size=choice.sp_size,
                    recompute_blocks=choice.recompute_blocks,
                    time_s=choice.time_s,
                    memory_bytes=choice.memory_bytes,
                    tokens_per_s_per_rank=choice.throughput,
                    alternatives=self._problem.alternatives(self._configuration, k),
                )
            )
        return tuple(rows)

    @property
    def elastic(self) -> bool:
        """False where a static plan is used: by policy, or since none that adapts is quicker."""
        return self._configuration.static is None

    @cached_property
    def inputs(self) -> dict[str, str]:
        """Name -> short value or hash of everything the plans depend on."""
        return {
            "seed": str(self.seed),
            "lengths": _short_hash(self._given_lengths.tobytes()),
            "cost profile": self.cost_model.fingerprint()[:16],
            "world size": str(self.world_size),
            "node layout": str(self.layout),
            "batch size": str(self.batch_size),
            "memory limit": str(self.memory_limit_bytes),
            "shuffle": str(self.shuffle),
            "planning options": _short_hash(
                f"{self.options.fingerprint()} {self.static_recompute}".encode()
            ),
            "excluded SP sizes": ",".join(map(str, sorted(self.sp_size_exclusions))),
            "versions": f"planner {_PLANNER_VERSION}, numpy {np.__version__}",
        }

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all inputs: equal on all ranks, or plans differ."""
        return hashlib.sha256(json.dumps(self.inputs, sort_keys=True).encode()).hexdigest()

    def _buckets(self, lengths: IntArray) -> Buckets:
        if self.options.bucket_edges is None:
            edges = choose_edges(lengths, self.options.max_buckets, self.options.pad_multiple)
            return Buckets(edges)
        given = Buckets(tuple(self.options.bucket_edges))
        used = np.unique(given.index_of(lengths))
        # Empty buckets are merged into the next one: they need no configuration.
        last = int(used[-1])
        return Buckets((*(given.edges[int(k)] for k in used), given.edges[last + 1]))

    def _ddp_windows(self, n: int) -> tuple[tuple[int, int], ...] | None:
        """What each step of a DDP run takes of the order, without the repeats at its end."""
        if self.options.policy != "global-batch":
            return None
        return cut_windows(n, self.batch_size * self.world_size)

    def _static_recompute(self) -> int | None:
        return self.cost_model.num_blocks if self.static_recompute == "full" else None

    def _search(self) -> None:
        problem, policy = self._problem, self.options.policy
        self._exclusions.extend(problem.exclusions(self._recompute))
        full = self.static_recompute == "full" or policy == "dcp-inter"
        kinds = (policy,) if policy in STATIC_POLICIES else STATIC_POLICIES
        # The best of each kind.
        self._static: list[Configuration] = []
        for kind in kinds:
            found = problem.static(full, (kind,))
            if found:
                self._static.append(problem.quickest(found, self.num_iterations))
        if policy in STATIC_POLICIES:
            if not self._static:
                raise ValueError(
                    f"No single SP size of {list(problem.sp_sizes)} fits all samples; policy "
                    f"{policy!r} needs one. Use an elastic policy or raise memory_limit_bytes."
                )
            self._configuration = self._static.pop()
            return
        self._configuration = problem.quickest(
            [*problem.elastic(self._recompute), *self._static], self.num_iterations
        )


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]

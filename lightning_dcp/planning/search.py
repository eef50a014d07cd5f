"""How an epoch is run: which configurations there are, and the quickest of them by prediction.

What is best depends on the step size and on how lengths mix, so it is tried: each configuration
plans a part of an epoch by the real scheduler. Static plans compete too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from lightning_dcp.planning.buckets import Buckets
from lightning_dcp.planning.candidates import Candidate, Exclusion, make_candidate, pad_to
from lightning_dcp.planning.cost_grid import CostGrid, length_grid
from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.epoch import EpochPlan
from lightning_dcp.planning.feasible import format_bytes
from lightning_dcp.planning.fitting import FloatArray
from lightning_dcp.planning.layout import Layout
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.makespan import StepScheduler
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.planning.packed import PackedCosts, join_micro_batches
from lightning_dcp.planning.static_schedule import StaticRule, schedule_static
from lightning_dcp.planning.windows import (
    Schedule,
    lead_samples,
    schedule_elastic,
    schedule_windows,
    token_windows,
)

__all__ = ["Configuration", "Problem"]

_SHARES = (1 / 2, 1 / 4, 1 / 8, 1 / 16)
_TRIAL_ITERATIONS = 32
_LARGEST_BATCH = 4096
_AS_GOOD = 1.001


@dataclass(frozen=True)
class Configuration:
    """One way to run an epoch.

    Attributes:
        recompute: Fixed number of recomputed blocks; None: the smallest that fits.
        share: Micro-batches of short samples take about this share of a step.
        static: One SP size for all, in place of a search.
    """

    recompute: int | None
    share: float = 0.0
    static: StaticRule | None = None


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything that planning depends on, checked.

    Attributes:
        lengths: (n,) lengths of the samples that take part.
        buckets: Length intervals, each with at least one sample.
        bucket: (n,) bucket of each sample.
        costs: Predicts seconds and bytes.
        world_size: Ranks W.
        options: The user's options.
        sp_sizes: SP sizes allowed, increasing.
        limit_bytes: Memory limit per rank.
        tokens_per_step: Target of an iteration.
        windows: Iterations that are given, as ``(start, stop)`` in the order of the epoch (policy
            ``"global-batch"``); None: by tokens.
        layout: The blocks of ranks.
        speed: (W,) seconds at each place relative to the typical one; None: all alike.
    """

    lengths: IntArray
    buckets: Buckets
    bucket: IntArray
    costs: Costs
    world_size: int
    options: PlanningOptions
    sp_sizes: tuple[int, ...]
    limit_bytes: int
    tokens_per_step: int
    layout: Layout
    windows: tuple[tuple[int, int], ...] | None = None
    speed: FloatArray | None = None
    _grids: dict[tuple[int | None, tuple[int, ...]], CostGrid] = field(default_factory=dict)

    def grid(self, recompute: int | None, static: StaticRule | None = None) -> CostGrid:
        """Costs of all lengths, at all SP sizes or that of a static plan; made once."""
        key = (recompute, self.sp_sizes if static is None else (static.sp_size,))
        if key not in self._grids:
            self._grids[key] = self._make_grid(*key)
        return self._grids[key]

    def _make_grid(self, recompute: int | None, sp_sizes: tuple[int, ...]) -> CostGrid:
        most = self.options.max_batch_size or _LARGEST_BATCH
        per_rank = self.tokens_per_step / self.world_size
        useful = math.ceil(2 * per_rank / int(self.lengths.min()))
        return CostGrid(
            self.costs,
            self.grid_lengths,
            sp_sizes=sp_sizes,
            pad_multiple=self.options.pad_multiple,
            limit_bytes=self.limit_bytes,
            largest_batch=max(1, min(most, useful, self.lengths.size, _LARGEST_BATCH)),
            recompute=recompute,
        )

    @cached_property
    def grid_lengths(self) -> IntArray:
        """(G,) lengths that costs are tabulated for."""
        return np.unique(np.concatenate([length_grid(self.lengths), self.longest]))

    @cached_property
    def longest(self) -> IntArray:
        """(K,) longest sample of each bucket."""
        found = np.zeros(len(self.buckets), dtype=np.int64)
        np.maximum.at(found, self.bucket, self.lengths)
        return found

    def exclusions(self, recompute: int | None) -> list[Exclusion]:
        """Where not even one sample of a bucket's longest fits at an SP size."""
        most = self.costs.num_blocks if recompute is None else recompute
        found = []
        for k in range(len(self.buckets)):
            longest = int(self.longest[k])
            for p in self.sp_sizes:
                padded = pad_to(longest, p, self.options.pad_multiple)
                missing = int(self.costs.memory_bytes(1, padded, p, most)) - self.limit_bytes
                if missing > 0:
                    reason = (
                        f"one sample of {longest} tokens lacks {format_bytes(missing)} of memory "
                        f"({format_bytes(self.limit_bytes)} per rank can be used)"
                    )
                    found.append(Exclusion(p, reason, *self.buckets.bounds(k)))
        return found

    @cached_property
    def _grid_index(self) -> list[int]:
        """Place in the grid of each bucket's longest sample."""
        return [int(g) for g in np.searchsorted(self.grid_lengths, self.longest)]

    @cached_property
    def _samples_by_length(self) -> IntArray:
        """(G,) samples at each length of the grid, rounded up."""
        g = np.searchsorted(self.grid_lengths, self.lengths)
        return np.bincount(g, minlength=len(self.grid_lengths)).astype(np.int64)

    def elastic(self, recompute: int | None) -> list[Configuration]:
        """Configurations that follow the lengths."""
        least = 1 / self.options.max_accumulation if self.options.max_accumulation else 0.0
        most = 1 / self.options.min_accumulation
        shares = sorted({min(max(share, least), most) for share in _SHARES}, reverse=True)
        return [Configuration(recompute, share) for share in shares]

    def static(self, full_recompute: bool, kinds: Sequence[str]) -> list[Configuration]:
        """Static plans at each SP size that fits all samples.

        One p and one r: as many recomputed blocks as the longest sample needs, or all.
        ``"bucket"`` is the paper's baseline: per bucket the largest b that takes no longer than one
        sample of the longest; ``"packed"`` fills micro-batches to the tokens of the longest.
        """
        found = []
        longest = int(self.lengths.max())
        for p in self.sp_sizes:
            padded = pad_to(longest, p, self.options.pad_multiple)
            r = int(self.costs.min_recompute(1, padded, p, self.limit_bytes))
            if r < 0:
                continue
            if full_recompute:
                r = self.costs.num_blocks
            grid = self.grid(r, StaticRule(p))
            times = grid.times[p]
            if not np.isfinite(times[-1, 0]):
                continue
            slowest = times[-1, 0] * (1 + 1e-9)
            sizes, budget = [], padded
            for k in range(len(self.buckets)):
                top = int(self.longest[k])
                row = times[self._grid_index[k]]
                fair = max(1, int(self.tokens_per_step * p / self.world_size / top))
                size = min(int(grid.batch_sizes[np.count_nonzero(row <= slowest) - 1]), fair)
                sizes.append(size)
                fits = int(grid.batch_sizes[np.count_nonzero(np.isfinite(row)) - 1])
                if fits < grid.batch_sizes[-1]:
                    budget = min(budget, (fits + 1) * top - 1)
            if "bucket" in kinds:
                found.append(Configuration(r, static=StaticRule(p, tuple(sizes))))
            if "packed" in kinds:
                budget = min(budget, max(longest, self.tokens_per_step * p // self.world_size))
                found.append(Configuration(r, static=StaticRule(p, token_budget=budget)))
        return found

    def num_iterations(self, recompute: int | None, lengths: IntArray) -> int:
        """Iterations of an epoch of these samples: by tokens, within what Gmin and Gmax allow."""
        n = lengths.size
        wanted = max(1, round(int(lengths.sum()) / self.tokens_per_step))
        grid = self.grid(recompute)
        choice = grid.choice()
        g = grid.index_of(lengths)
        ranks = np.array(grid.sp_sizes)[choice.sp_index[g]] / self.world_size
        if self.options.max_accumulation is None and self.options.min_accumulation == 1:
            return min(wanted, n)
        largest = np.stack([np.isfinite(t).sum(axis=1) for t in grid.times.values()])
        sizes = grid.batch_sizes[np.maximum(largest[choice.sp_index[g], g] - 1, 0)]
        # As many as Gmax micro-batches of the largest size need; at most what Gmin micro-batches
        # of single samples can make.
        if self.options.max_accumulation is not None:
            steps = float((ranks / sizes).sum())
            wanted = max(wanted, math.ceil(steps / self.options.max_accumulation - 1e-9))
        if self.options.min_accumulation > 1:
            most = float(ranks.sum()) / self.options.min_accumulation
            wanted = min(wanted, max(1, math.floor(most + 1e-9)))
        return min(wanted, n)

    def plan(
        self,
        configuration: Configuration,
        order: IntArray,
        *,
        epoch: int,
        num_iterations: int,
        windows: Sequence[tuple[int, int]] | None = None,
        ids: IntArray | None = None,
        first_iteration: int = 0,
    ) -> EpochPlan:
        """Plan the samples of ``order`` (positions in ``lengths``; ``ids`` names them)."""
        lengths = self.lengths[order]
        rule = configuration.static
        grid = self.grid(configuration.recompute, rule)
        g = grid.index_of(lengths)
        if rule is not None:
            cuts = token_windows(lengths, num_iterations) if windows is None else windows
            schedule = schedule_static(
                cuts, lengths, self.bucket[order], g, grid, rule, self.layout
            )
        else:
            scheduler = StepScheduler(
                grid,
                world_size=self.world_size,
                share=configuration.share,
                min_steps=self.options.min_accumulation,
                max_steps=self.options.max_accumulation,
                layout=self.layout,
                speed=self.speed,
            )
            if windows is not None:
                schedule = schedule_windows(windows, g, scheduler)
            else:
                schedule = schedule_elastic(
                    lengths,
                    g,
                    scheduler,
                    num_iterations=num_iterations,
                    lead=lead_samples(self.lengths.size),
                )
        if self.options.packing and self.options.min_accumulation == 1:
            schedule = self._joined(schedule, lengths, configuration)
        return EpochPlan(
            epoch=epoch,
            world_size=self.world_size,
            ids=order if ids is None else ids[order],
            lengths=lengths,
            schedule=schedule,
            cost_model=self.costs,
            pad_multiple=self.options.pad_multiple,
            limit_bytes=self.limit_bytes,
            recompute=configuration.recompute,
            first_iteration=first_iteration,
            packing=self.options.packing,
            place_speed=self.speed,
        )

    def _joined(
        self, schedule: Schedule, lengths: IntArray, configuration: Configuration
    ) -> Schedule:
        """Packed micro-batches may mix lengths, but for the static ones of a bucket."""
        rule = configuration.static
        if rule is not None and not rule.token_budget:
            return schedule
        return join_micro_batches(
            schedule,
            lengths,
            PackedCosts(self.costs, self.limit_bytes, configuration.recompute),
            most_samples=self.options.max_batch_size,
            most_tokens=None if rule is None else rule.token_budget,
        )

    def quickest(
        self, configurations: Sequence[Configuration], num_iterations: int
    ) -> Configuration:
        """The configuration with the least predicted time, by planning a part of an epoch."""
        if len(configurations) == 1:
            return configurations[0]
        n = self.lengths.size
        num = min(num_iterations, _TRIAL_ITERATIONS)
        part = min(n, math.ceil(n * num / num_iterations))
        # The same part for all seeds and epochs: N must not depend on the epoch.
        order = np.random.default_rng(0).permutation(n)[:part].astype(np.int64)
        windows = None
        if self.windows is not None:
            windows = _even_windows(part, num)
        times = [
            self.plan(
                configuration, order, epoch=0, num_iterations=num, windows=windows
            ).predicted_time_s
            for configuration in configurations
        ]
        # The first that is as good as the best: shares are sorted by the number of micro-batches.
        return configurations[int(np.argmax(np.array(times) <= _AS_GOOD * min(times)))]

    def static_bound_s(
        self, configuration: Configuration, num_iterations: int, order: IntArray
    ) -> float:
        """Seconds that no static plan of the samples of ``order`` can be below."""
        assert configuration.static is not None
        if self.options.packing:  # samples share fixed costs with any others
            return 0.0
        grid = self.grid(configuration.recompute, configuration.static)
        shorter = np.maximum(
            np.searchsorted(grid.lengths, self.lengths[order], side="right") - 1, 0
        )
        work = float(grid.choice().rank_s[shorter].sum())
        return work / self.world_size + num_iterations * self.costs.step_overhead_s

    def shown_choice(self, configuration: Configuration, k: int, num_iterations: int) -> Candidate:
        """What a bucket's longest samples get in an ordinary iteration."""
        rule = configuration.static
        grid = self.grid(configuration.recompute, rule)
        top, g = int(self.longest[k]), self._grid_index[k]
        if rule is not None:
            p = rule.sp_size
            fits = int(grid.batch_sizes[np.count_nonzero(np.isfinite(grid.times[p][g])) - 1])
            wanted = rule.token_budget // top if rule.token_budget else rule.batch_sizes[k]
            size = max(1, min(wanted, fits))
        else:
            whole = float(grid.choice().rank_s @ self._samples_by_length)
            step_s = whole / (num_iterations * self.world_size)
            p = grid.sp_sizes[int(grid.choice(step_s).sp_index[g])]
            row = grid.times[p][g]
            within = int(np.count_nonzero(row <= max(configuration.share * step_s, row[0])))
            if self.options.max_accumulation is None:
                within = min(within, grid.useful[p][g])
            size = int(grid.batch_sizes[within - 1])
        return self._candidate(configuration.recompute, size, top, p)

    def alternatives(self, configuration: Configuration, k: int) -> tuple[Candidate, ...]:
        """Best throughput at each SP size that fits a bucket's longest samples."""
        grid = self.grid(configuration.recompute, configuration.static)
        top, g = int(self.longest[k]), self._grid_index[k]
        found = []
        for p, times in grid.times.items():
            row = times[g]
            if np.isfinite(row[0]):
                size = int(grid.batch_sizes[int(np.argmin(row / grid.batch_sizes))])
                found.append(self._candidate(configuration.recompute, size, top, p))
        return tuple(found)

    def _candidate(self, recompute: int | None, size: int, length: int, p: int) -> Candidate:
        return make_candidate(
            self.costs,
            batch_size=size,
            seq_len=pad_to(length, p, self.options.pad_multiple),
            sp_size=p,
            recompute=recompute,
            limit_bytes=self.limit_bytes,
        )


def _even_windows(n: int, num: int) -> list[tuple[int, int]]:
    ends = np.linspace(0, n, num + 1).astype(np.int64).tolist()
    return list(pairwise(ends))

"""Which configuration each bucket gets.

Throughput alone would give long samples one rank for a long time, while all others have to find
as much work in the same step or idle. How much that matters depends on the step size and on how
lengths mix, so it is tried: configurations limited to various micro-batch times are scheduled for
a part of an epoch by the real scheduler, and the quickest by prediction is taken. Static plans
compete too, so that a plan is not worse than the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dcp.planning.buckets import Buckets
from lightning_dcp.planning.candidates import Candidate, CostTable, Exclusion, build_table
from lightning_dcp.planning.cost_model import CostModel
from lightning_dcp.planning.epoch import EpochPlan
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.planning.queues import BucketConfig, Queues, lead_samples
from lightning_dcp.planning.schedule import schedule_epoch

__all__ = ["Configuration", "Problem"]

_TIME_CAPS = (math.inf, 4.0, 2.5, 2.0, 1.6, 1.3, 1.0, 0.8)
_TRIAL_ITERATIONS = 48


@dataclass(frozen=True, eq=False)
class Configuration:
    """One way to run an epoch.

    Attributes:
        buckets: One configuration per bucket.
        elastic: Whether groups are filled and accumulated by cost.
        recompute: Fixed number of recomputed blocks; None: the smallest that fits.
    """

    buckets: tuple[BucketConfig, ...]
    elastic: bool
    recompute: int | None

    def signature(self) -> tuple[object, ...]:
        """Equal for configurations that plan alike."""
        return (
            self.elastic,
            self.recompute,
            tuple((c.sp_size, tuple(sorted(c.batch_sizes.items()))) for c in self.buckets),
        )

    def choice(self, index: int) -> Candidate:
        """The candidate that bucket ``index`` uses."""
        config = self.buckets[index]
        table = config.tables[config.sp_size]
        return table.candidates[table.batch_sizes.index(config.batch_sizes[config.sp_size])]


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything that planning depends on, checked.

    Attributes:
        lengths: (n,) lengths of the samples that take part.
        buckets: Length intervals, each with at least one sample.
        bucket: (n,) bucket of each sample.
        cost_model: Predicts seconds and bytes.
        world_size: Ranks W.
        options: The user's options.
        sp_sizes: SP sizes allowed, increasing.
        limit_bytes: Memory limit per rank.
        tokens_per_step: Target of an iteration.
    """

    lengths: IntArray
    buckets: Buckets
    bucket: IntArray
    cost_model: CostModel
    world_size: int
    options: PlanningOptions
    sp_sizes: tuple[int, ...]
    limit_bytes: int
    tokens_per_step: int

    def tables(
        self, recompute: int | None, sp_sizes: Sequence[int] | None = None
    ) -> tuple[list[dict[int, CostTable]], list[Exclusion]]:
        """Cost tables per bucket and SP size, and where a bucket fits none at that size."""
        tables: list[dict[int, CostTable]] = []
        exclusions: list[Exclusion] = []
        for k in range(len(self.buckets)):
            own = self.lengths[self.bucket == k]
            tables.append({})
            for p in self.sp_sizes if sp_sizes is None else sp_sizes:
                table = build_table(
                    self.cost_model,
                    shortest=int(own.min()),
                    longest=int(own.max()),
                    sp_size=p,
                    pad_multiple=self.options.pad_multiple,
                    limit_bytes=self.limit_bytes,
                    max_batch_size=self._largest_batch(int(own.max()), own.size, p),
                    recompute=recompute,
                )
                if isinstance(table, CostTable):
                    tables[k][p] = table
                else:
                    lo, hi = self.buckets.bounds(k)
                    reason = (
                        f"one sample of {int(own.max())} tokens lacks {_gib(table)} of memory "
                        f"({_gib(self.limit_bytes)} per rank can be used)"
                    )
                    exclusions.append(Exclusion(p, reason, lo, hi))
        return tables, exclusions

    def _largest_batch(self, longest: int, num_samples: int, sp_size: int) -> int:
        # A micro-batch beyond the group's fair share of the step would make steps too large.
        per_rank = self.tokens_per_step / (self.world_size * self.options.min_accumulation)
        fair = int(per_rank * sp_size / longest)
        # One beyond the bucket's share of an iteration would use its samples up early, unless it
        # is too small to be noticed in a tenth of the epoch.
        steps = max(1.0, int(self.lengths.sum()) / self.tokens_per_step)
        share = max(math.ceil(num_samples / steps), lead_samples(self.lengths.size) // 2)
        most = min(fair, num_samples, share)
        if self.options.max_batch_size is not None:
            most = min(most, self.options.max_batch_size)
        return max(1, most)

    def elastic(
        self, tables: Sequence[Mapping[int, CostTable]], recompute: int | None
    ) -> list[Configuration]:
        """Elastic configurations, one for each distinct limit of the micro-batch time."""
        # Seconds of an iteration if all samples ran at their best throughput without idling.
        work = 0.0
        for k, own in enumerate(tables):
            tokens = int(self.lengths[self.bucket == k].sum())
            work += tokens / max(table.best().throughput for table in own.values())
        steps = max(1.0, int(self.lengths.sum()) / self.tokens_per_step)
        ideal_s = work / (steps * self.world_size)
        found: dict[tuple[object, ...], Configuration] = {}
        for cap in _TIME_CAPS:
            buckets = []
            for own in tables:
                best = {p: table.best(cap * ideal_s) for p, table in own.items()}
                within = [c for c in best.values() if c.time_s <= cap * ideal_s]
                if within:
                    chosen = max(within, key=lambda c: (c.throughput, -c.sp_size))
                else:
                    chosen = min(best.values(), key=lambda c: (c.time_s, c.sp_size))
                sizes = {p: candidate.batch_size for p, candidate in best.items()}
                buckets.append(BucketConfig(dict(own), chosen.sp_size, sizes))
            configuration = Configuration(tuple(buckets), True, recompute)
            found.setdefault(configuration.signature(), configuration)
        return list(found.values())

    def static(self, full_recompute: bool) -> list[Configuration]:
        """The paper's baseline at each SP size that fits all samples.

        One p, one r, and per bucket the largest b that takes no longer than one sample of the
        longest bucket.
        """
        found = []
        longest = int(self.lengths.max())
        for p in self.sp_sizes:
            if full_recompute:
                r = self.cost_model.num_blocks
            else:
                multiple = math.lcm(p, self.options.pad_multiple)
                padded = -(-longest // multiple) * multiple
                r = int(self.cost_model.min_recompute(1, padded, p, self.limit_bytes))
            if r < 0:
                continue
            tables, exclusions = self.tables(r, (p,))
            if exclusions:
                continue
            slowest = tables[-1][p].candidates[0].time_s * (1 + 1e-9)
            buckets = []
            for own in tables:
                size = max(
                    (c.batch_size for c in own[p].candidates if c.time_s <= slowest), default=1
                )
                buckets.append(BucketConfig(own, p, {p: size}))
            found.append(Configuration(tuple(buckets), False, r))
        return found

    def num_iterations(self, configuration: Configuration, lengths_sum: int, n: int) -> int:
        """Iterations of an epoch: by tokens, within what Gmin and Gmax allow."""
        wanted = max(1, round(lengths_sum / self.tokens_per_step))
        if configuration.elastic:
            scale = n / self.lengths.size
            per_bucket = np.bincount(self.bucket, minlength=len(self.buckets)) * scale
            ranks = np.array([c.sp_size for c in configuration.buckets]) / self.world_size
            sizes = np.array([c.batch_sizes[c.sp_size] for c in configuration.buckets])
            # As many as Gmax steps of the usual size need; at most what Gmin steps of single
            # samples can make.
            least = math.ceil(
                float((per_bucket * ranks / sizes).sum()) / self.options.max_accumulation - 1e-9
            )
            wanted = max(wanted, least)
            if self.options.min_accumulation > 1:
                most = float((per_bucket * ranks).sum()) / self.options.min_accumulation
                wanted = min(wanted, max(1, math.floor(most + 1e-9)))
        return min(max(wanted, 1), n)

    def plan(
        self,
        configuration: Configuration,
        order: IntArray,
        *,
        epoch: int,
        num_iterations: int,
        ids: IntArray | None = None,
    ) -> EpochPlan:
        """Plan the samples of ``order`` (positions in ``lengths``; ``ids`` names them)."""
        queues = Queues.build(order, self.lengths, self.bucket, len(self.buckets))
        schedule = schedule_epoch(
            queues,
            configuration.buckets,
            world_size=self.world_size,
            num_iterations=num_iterations,
            min_steps=self.options.min_accumulation,
            max_steps=self.options.max_accumulation,
            pad_multiple=self.options.pad_multiple,
            step_overhead_s=self.cost_model.step_overhead_s,
            elastic=configuration.elastic,
            lead=lead_samples(self.lengths.size),
        )
        if ids is not None:
            queues = Queues([ids[q] for q in queues.ids], queues.lengths, [], [])
        return EpochPlan(
            epoch=epoch,
            world_size=self.world_size,
            queues=queues,
            schedule=schedule,
            cost_model=self.cost_model,
            pad_multiple=self.options.pad_multiple,
            limit_bytes=self.limit_bytes,
            recompute=configuration.recompute,
        )

    def quickest(self, configurations: Sequence[Configuration]) -> Configuration:
        """The configuration with the least predicted time, by planning a part of an epoch."""
        if len(configurations) == 1:
            return configurations[0]
        n = self.lengths.size
        steps = max(1.0, int(self.lengths.sum()) / self.tokens_per_step)
        part = min(n, math.ceil(n * _TRIAL_ITERATIONS / steps))
        # The same part for all seeds and epochs: N must not depend on the epoch.
        order = np.random.default_rng(0).permutation(n)[:part].astype(np.int64)
        tokens = int(self.lengths[order].sum())
        times = []
        for configuration in configurations:
            num = self.num_iterations(configuration, tokens, part)
            plan = self.plan(configuration, order, epoch=0, num_iterations=num)
            times.append(plan.predicted_time_s)
        return configurations[int(np.argmin(times))]


def _gib(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"

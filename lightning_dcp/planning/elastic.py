"""Iterations that follow the lengths.

One iteration::

    fill     groups for all W ranks, each with one micro-batch of its bucket
    sweep    choose the makespan and how often each group accumulates (accumulation.py)
    extend   each group takes further micro-batches of its bucket until the makespan
    gaps     what is still free takes short micro-batches of buckets whose turn is near

NOTE (step size): Lightning needs the number of iterations N before the first one, so the size of
the steps has to follow. Iterations with a long sample are larger than the mean, whatever we do;
the others have to be smaller. ``_level`` is the water level: target / mean, lowered while
iterations come out larger than the mean of what is left and raised while they come out smaller.
The mean is taken over what is left, so the last iteration is an ordinary one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_dcp.planning.accumulation import sweep_accumulation
from lightning_dcp.planning.queues import NONE_LEFT, BucketConfig, Queues, Taken, Waiting

__all__ = ["ElasticEpoch"]

_LEVEL_GAIN = 0.1
_LEVEL_RANGE = (0.02, 1.5)
_LEAST_GAP = 0.02  # of the makespan; smaller gaps are not worth a micro-batch
_EPS = 1e-9


class ElasticEpoch(Waiting):
    """Makes elastic iterations, one after the other.

    Args:
        queues: The samples.
        configs: One per bucket.
        world_size: Ranks W.
        pad_multiple: Further multiple to pad to.
        lead: How many places a queue may be ahead of the earliest waiting sample.
        min_steps: Gmin.
        max_steps: Gmax.
        step_overhead_s: Seconds per iteration besides the micro-batches.
    """

    def __init__(
        self,
        queues: Queues,
        configs: Sequence[BucketConfig],
        *,
        world_size: int,
        pad_multiple: int,
        lead: int,
        min_steps: int,
        max_steps: int,
        step_overhead_s: float,
    ) -> None:
        super().__init__(queues, configs, world_size, pad_multiple)
        self.lead = lead
        self.min_steps = min_steps
        self.max_steps = max_steps
        self.step_overhead_s = step_overhead_s
        self.quickest = [  # seconds of any one sample of the bucket, at most
            config.tables[config.sp_size].time_rows[0][-1] for config in configs
        ]
        self.seconds_per_token = self._ideal_seconds_per_token()
        self._level = 1.0
        self._gap_gain = 1.2  # tokens of an iteration / tokens swept: what filling gaps adds

    def _ideal_seconds_per_token(self) -> float:
        """Rank-seconds per token if all samples ran in micro-batches of the usual size."""
        seconds = 0.0
        for k, config in enumerate(self.configs):
            table = config.tables[config.sp_size]
            count = config.batch_sizes[config.sp_size]
            mean = int(self.queues.tokens_before[k][-1] / max(1, self.sizes[k]))
            padded = -(-mean // self.multiple[table.sp_size]) * self.multiple[table.sp_size]
            each = table.time_s(count, max(padded, table.first_len)) / count
            seconds += self.sizes[k] * each * table.sp_size
        return seconds / max(1, self.tokens_left)

    def iteration(self, left: int) -> None:
        """Make one iteration; ``left`` are still to be made, this one included."""
        mean = self.tokens_left / left
        # Towards the end there is no later iteration to make up for a large or a small one.
        freedom = min(1.0, left / 16)
        target = mean * (1.0 + freedom * (self._level - 1.0))
        most = target * (1.0 + freedom)  # where that saves idle time
        # One sample is kept for each iteration to come: no plan is empty.
        self.budget = self.samples_left - (left - 1)
        groups = self._fill(target, most)
        groups.sort(key=lambda taken: -taken[3])  # descending powers of two: aligned blocks
        first_ranks, rank = [], 0
        for taken in groups:
            first_ranks.append(rank)
            self.emit(taken, rank)
            rank += taken[3]
        tokens = sum(taken[5] for taken in groups)
        if self.budget > 0 and (tokens < most or self.min_steps > 1):
            tokens = self._accumulate(groups, first_ranks, tokens, target, most)
        self.out.offsets.append(len(self.out.bucket))
        self._level *= math.exp(_LEVEL_GAIN * max(-4.0, 1.0 - tokens / mean))
        self._level = min(max(self._level, _LEVEL_RANGE[0]), _LEVEL_RANGE[1])

    def _fill(self, target: float, most: float) -> list[Taken]:
        """One micro-batch for each group, until no rank is free."""
        free = self.world_size
        per_rank = target / (self.world_size * self.min_steps)
        patience_s = target * self.seconds_per_token / self.world_size
        groups: list[Taken] = []
        tokens, slowest = 0, 0.0
        while free and self.budget > 0 and tokens < most:
            k, p = self._next_group(free, slowest, patience_s if groups else math.inf)
            if k < 0:
                break
            # Long steps come from accumulation, which balances; not from large micro-batches.
            fair = max(1, int(per_rank * p / self.longest[k]))
            count = min(
                self.configs[k].batch_sizes[p], fair, self.sizes[k] - self.next[k], self.budget
            )
            taken = self.take(k, p, count, self.seconds(k, p, count))
            groups.append(taken)
            tokens += taken[5]
            slowest = max(slowest, taken[4])
            patience_s = max(patience_s, slowest)
            free -= p
        return groups

    def _next_group(self, free: int, slowest: float, patience_s: float) -> tuple[int, int]:
        """Bucket of the earliest sample that fits, with its SP size; (-1, 0): none.

        A sample that needs more ranks than are free, or more time than this iteration is going to
        take anyway, waits: it is the first of the next iteration, which is then made to its
        measure. So slow samples come together, instead of one in every iteration.
        """
        late: list[int] = []
        while True:
            best, chosen = NONE_LEFT, -1
            for k, head in enumerate(self.heads):
                if head < best and self.configs[k].sp_size <= free and k not in late:
                    best, chosen = head, k
            if late and best > min(self.heads) + self.lead:
                chosen = late[0]  # what is due must not wait for longer
                return chosen, self.configs[chosen].sp_size
            if chosen < 0:
                break
            p = self.configs[chosen].sp_size
            if self.quickest[chosen] <= patience_s or self.seconds(chosen, p, 1) <= patience_s:
                return chosen, p
            late.append(chosen)
        # Only larger groups wait: a smaller one for the same samples, unless it would be far the
        # slowest and leave the others idle.
        for _, k in sorted((head, k) for k, head in enumerate(self.heads) if head < NONE_LEFT):
            sizes = [p for p in self.configs[k].tables if p <= free]
            if sizes and self.seconds(k, max(sizes), 1) <= max(2 * slowest, patience_s):
                return k, max(sizes)
        return -1, 0

    def _accumulate(
        self,
        groups: list[Taken],
        first_ranks: list[int],
        tokens: int,
        target: float,
        most: float,
    ) -> int:
        """Further micro-batches for the groups; returns the iteration's tokens."""
        choice = sweep_accumulation(
            [taken[4] for taken in groups],
            [taken[3] for taken in groups],
            world_size=self.world_size,
            min_steps=self.min_steps,
            max_steps=self.max_steps,
            available=[1 + self.sizes[k] - self.next[k] for k, *_ in groups],
            step_overhead_s=self.step_overhead_s,
            tokens=[float(taken[5]) for taken in groups],
            target_tokens=target / self._gap_gain,
            max_tokens=most / self._gap_gain,
        )
        swept = float(choice.steps @ [taken[5] for taken in groups])
        end = choice.makespan_s * (1 + _EPS)
        steps = choice.steps.tolist()
        # Lengths vary within a bucket, so the steps that fit may be fewer than swept; Gmin is kept
        # by the group that has most steps.
        keeper = max(range(len(groups)), key=steps.__getitem__)
        gaps = []
        for i, (k, _, first_count, p, seconds, _) in enumerate(groups):
            busy = seconds
            forced = self.min_steps - 1 if i == keeper else 0
            for step in range(steps[i] - 1):
                count = min(first_count, self.sizes[k] - self.next[k], self.budget)
                if count <= 0 or (tokens >= most and step >= forced):
                    break
                if self.heads[k] > min(self.heads) + self.lead and step >= forced:
                    break
                seconds = self.seconds(k, p, count)
                if busy + seconds > end and step >= forced:
                    break
                taken = self.take(k, p, count, seconds)
                self.emit(taken, first_ranks[i])
                busy += seconds
                tokens += taken[5]
            gaps.append((end - busy, first_ranks[i], p))
        rank = first_ranks[-1] + groups[-1][3]
        gaps.extend((end, r, 1) for r in range(rank, self.world_size))
        tokens = self._fill_gaps(gaps, end, tokens, most)
        if self.min_steps > 1:
            tokens = self._reach_minimum(first_ranks[keeper], groups[keeper][3], tokens)
        self._gap_gain += _LEVEL_GAIN * (min(max(tokens / swept, 1.0), 2.0) - self._gap_gain)
        return tokens

    def _fill_gaps(
        self, gaps: list[tuple[float, int, int]], end: float, tokens: int, most: float
    ) -> int:
        """Short micro-batches into what is free before ``end``.

        Only samples that are due soon (``lead``): short samples fit more often, and taking them
        from anywhere would use them up early in the epoch.
        """
        least = _LEAST_GAP * end
        stack = sorted(gaps)
        while stack and tokens < most and self.budget > 0:
            gap, first_rank, p = stack.pop()
            if gap < least:
                continue
            best, chosen, size = min(self.heads) + self.lead + 1, -1, 0
            for k, head in enumerate(self.heads):
                own = self.configs[k].sp_size
                if head < best and own <= p:
                    count = (
                        self.configs[k]
                        .tables[own]
                        .largest_within(gap, self.configs[k].batch_sizes[own])
                    )
                    if count:
                        best, chosen, size = head, k, count
            if chosen < 0:
                continue
            own = self.configs[chosen].sp_size
            count = min(size, self.sizes[chosen] - self.next[chosen], self.budget)
            seconds = self.seconds(chosen, own, count)
            taken = self.take(chosen, own, count, seconds)
            self.emit(taken, first_rank)
            tokens += taken[5]
            # The rest of the block has the same gap still; the part that was used a smaller one.
            stack.append((gap - seconds, first_rank, own))
            while own < p:
                stack.append((gap, first_rank + own, own))
                own *= 2
        return tokens

    def _reach_minimum(self, first_rank: int, p: int, tokens: int) -> int:
        """Single samples for one group until it has accumulated Gmin micro-batches.

        Needed where its own bucket had no more.
        """
        row = self.out.offsets[-1]
        blocks = zip(self.out.first_rank[row:], self.out.sp_size[row:], strict=True)
        steps = sum(first <= first_rank < first + size for first, size in blocks)
        while steps < self.min_steps and self.budget > 0:
            fitting = [k for k, config in enumerate(self.configs) if p in config.tables]
            k = min(fitting, key=self.heads.__getitem__, default=-1)
            if k < 0 or self.heads[k] == NONE_LEFT:
                break
            taken = self.take(k, p, 1, self.seconds(k, p, 1))
            self.emit(taken, first_rank)
            tokens += taken[5]
            steps += 1
        return tokens

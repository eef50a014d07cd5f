"""Which rank evaluates which samples when: validation, testing and prediction.

Evaluation has no gradients to sum, so that ranks need not wait for each other but at the end. Yet
all ranks run the same number of Trainer batches, one micro-batch in each, as under DDP: users'
hooks may hold collectives. What a plain data-parallel run takes in its batch k over all ranks is
*window* k; a window is one Trainer batch, or several where memory asks for it::

                     window 0              window 1, one sample needs 2 ranks
    Trainer batch    0                     1                 2
    rank 0           |==== p=1 ====|       |=== p=2, b=1 ==| |= p=1 =|
    rank 1           |=== p=1 ===|         |=== p=2, b=1 ==| |= p=1 =|
    rank 2           |==== p=1 ===|        |==== p=1 =====|  |= p=1 =|
    rank 3           |=== p=1 ====|        |=== p=1 ====|    |. again .|   run, but not counted
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from lightning_dcp.planning.candidates import pad_to
from lightning_dcp.planning.evaluation_memory import (
    EvaluationMemory,
    largest_batch,
    longest_length,
)
from lightning_dcp.planning.evaluation_rounds import Round, balanced_runs, greedy_runs
from lightning_dcp.planning.feasible import format_bytes
from lightning_dcp.planning.layout import Layout
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.plan import MicroBatch, Plan

__all__ = ["EvaluationBatch", "EvaluationPlanner", "Share"]

_MANY = 1 << 31
_CACHED_WINDOWS = 256


@dataclass(frozen=True)
class Share:
    """What one rank runs in one Trainer batch.

    Attributes:
        micro_batch: The samples and the SP group.
        index: Of the micro-batch in the plan; keys random numbers.
        counts: Whether this rank's results count. On the other ranks of the group, and on those
            that repeat a micro-batch because nothing is left for them, they do not.
    """

    micro_batch: MicroBatch
    index: int
    counts: bool


@dataclass(frozen=True)
class EvaluationBatch:
    """One Trainer batch of all ranks.

    Attributes:
        plan: Every sample of it once; each rank is in at most one micro-batch.
        repeats: Micro-batches that ranks without one run again, for company: index of the original
            in the plan (or the number of its micro-batches, where it is of another Trainer
            batch), and the micro-batch on the ranks that repeat it.
    """

    plan: Plan
    repeats: tuple[tuple[int, MicroBatch], ...] = ()

    def for_rank(self, rank: int) -> Share:
        """What ``rank`` runs."""
        for index, micro_batch in enumerate(self.plan.micro_batches):
            if rank in micro_batch.ranks:
                return Share(micro_batch, index, rank == micro_batch.first_rank)
        for index, micro_batch in self.repeats:
            if rank in micro_batch.ranks:
                return Share(micro_batch, index, False)
        raise ValueError(f"rank must be in [0, {self.plan.world_size}); got {rank}.")


class EvaluationPlanner:
    """Plans one evaluation loader; a pure function of its arguments.

    Args:
        lengths: Length of every sample in tokens.
        batch_size: The loader's: samples per rank and Trainer batch.
        world_size: Number of ranks W.
        memory: Predicts bytes for the SP sizes that may be used, 1 always among them; None where
            nothing is known: then every sample runs on one rank.
        limit_bytes: Bytes that a rank may use.
        pad_multiple: Samples are padded to multiples of it.
        max_batch_size: Most samples in a micro-batch; None: no limit.
        in_order: Micro-batches of consecutive samples, cut where a single process would cut them
            (prediction). Else samples of a window are put together by length.
        on_too_long: What becomes of a sample that fits nowhere: "error", "skip" or "truncate".
        dataset_name: For messages.
        layout: Which ranks stand side by side; default: a single node.

    Raises:
        ValueError: A sample fits nowhere, or ranks are left over that can run nothing.
    """

    def __init__(
        self,
        *,
        lengths: IntArray,
        batch_size: int,
        world_size: int,
        memory: EvaluationMemory | None = None,
        limit_bytes: int = 0,
        pad_multiple: int = 1,
        max_batch_size: int | None = None,
        in_order: bool = False,
        on_too_long: str = "error",
        dataset_name: str = "the dataset",
        layout: Layout | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.world_size = world_size
        self._layout = Layout.plain(world_size) if layout is None else layout
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._pad_multiple = pad_multiple
        self._max_batch_size = max_batch_size or _MANY
        self._in_order = in_order
        self._dataset_name = dataset_name
        self._sp_sizes = (1,) if memory is None else tuple(sorted(memory.coefficients))
        self.skipped_ids: tuple[int, ...] = ()
        #: What longer samples are cut to; None cuts nothing.
        self.truncate_to: int | None = None
        #: As planned: cut ones are shorter than they were.
        self.lengths = np.array(lengths, dtype=np.int64)
        self._sp_size_of = self._smallest_sp_sizes(on_too_long)
        alone = np.flatnonzero(self._sp_size_of == 1)
        #: The cheapest sample for ranks without work; None where none runs on one rank.
        self._filler = int(alone[np.argmin(self.lengths[alone])]) if alone.size else None
        self._window = lru_cache(maxsize=_CACHED_WINDOWS)(self._make_window)
        #: Trainer batches before each window, and the number of all.
        self._before = np.concatenate([[0], np.cumsum(self._count_rounds())]).astype(np.int64)
        if self._filler is None:  # the one case in which a rank may be left with nothing to run
            for index in range(self.num_batches):
                self.batch(index)

    @property
    def sp_sizes(self) -> tuple[int, ...]:
        """SP sizes that some sample needs."""
        return tuple(int(p) for p in np.unique(self._sp_size_of[self._sp_size_of > 0]))

    @property
    def num_windows(self) -> int:
        """Batches that a plain data-parallel run has."""
        return -(-len(self.lengths) // (self.batch_size * self.world_size))

    @property
    def num_batches(self) -> int:
        """Trainer batches, the same for all ranks."""
        return int(self._before[-1])

    def batch(self, index: int) -> EvaluationBatch:
        """What all ranks run in Trainer batch ``index``."""
        if not 0 <= index < self.num_batches:
            raise ValueError(f"There are {self.num_batches} batches; batch {index} was asked for.")
        window = int(np.searchsorted(self._before, index, side="right")) - 1
        placed = self._window(window)[index - int(self._before[window])]
        return self._complete(index, placed)

    def fingerprint(self) -> str:
        """Hash of all that the plan is made from; ranks compare it."""
        coefficients = {} if self._memory is None else dict(self._memory.coefficients)
        text = json.dumps(
            {
                "lengths": hashlib.sha256(self.lengths.tobytes()).hexdigest(),
                "options": [self.batch_size, self.world_size, self._limit_bytes],
                "layout": str(self._layout),
                "more": [self._pad_multiple, self._max_batch_size, self._in_order],
                "fixed": None if self._memory is None else self._memory.fixed_bytes,
                "coefficients": sorted(coefficients.items()),
            }
        )
        return hashlib.sha256(text.encode()).hexdigest()

    # ---- which SP size ---------------------------------------------------------------------------

    def _smallest_sp_sizes(self, on_too_long: str) -> IntArray:
        """(N,) the smallest p at which each sample fits; 0 for those that are skipped."""
        if self._memory is None:
            return np.ones(len(self.lengths), dtype=np.int64)
        longest = int(self.lengths.max())
        fitting = {p: self._longest_fitting(p, longest) for p in self._sp_sizes}
        if max(fitting.values()) < longest:
            self._handle_too_long(on_too_long, max(fitting.values()))
        sizes = np.zeros(len(self.lengths), dtype=np.int64)
        for p in reversed(self._sp_sizes):
            sizes[self.lengths <= fitting[p]] = p
        return sizes

    def _longest_fitting(self, sp_size: int, longest: int) -> int:
        assert self._memory is not None
        multiple = int(pad_to(1, sp_size, self._pad_multiple))
        return longest_length(self._memory, sp_size, multiple, self._limit_bytes, longest)

    def _handle_too_long(self, on_too_long: str, fitting: int) -> None:
        assert self._memory is not None
        too_long = np.flatnonzero(self.lengths > fitting)
        worst = int(too_long[np.argmax(self.lengths[too_long])])
        length = int(self.lengths[worst])
        needed = min(
            self._memory.num_bytes(1, int(pad_to(length, p, self._pad_multiple)), p)
            for p in self._sp_sizes
        )
        missing = needed - self._limit_bytes
        if on_too_long == "error" or fitting < 1:
            raise ValueError(
                f"Sample {worst} of {self._dataset_name} has length {length} and cannot be"
                f" evaluated: with p in {list(self._sp_sizes)} it lacks {format_bytes(missing)}"
                f" ({missing} bytes) of the {format_bytes(self._limit_bytes)} that a rank may use."
                f" {too_long.size} sample(s) are too long; the longest length that fits is"
                f' {fitting}. Set on_too_long="skip" or "truncate", raise memory_limit_bytes, or'
                " use more ranks, so that larger SP sizes are possible."
            )
        if on_too_long == "truncate":
            self.lengths = np.minimum(self.lengths, fitting)
            self.truncate_to = fitting
        else:
            self.skipped_ids = tuple(int(i) for i in too_long)
            if too_long.size == self.lengths.size:
                raise ValueError(
                    f"All samples would be skipped: the shortest of {self._dataset_name} has length"
                    f" {int(self.lengths.min())}, the longest length that fits is {fitting}. Raise"
                    " memory_limit_bytes, or use more ranks."
                )

    # ---- windows ---------------------------------------------------------------------------------

    def _count_rounds(self) -> list[int]:
        """Trainer batches of each window; most are not planned for that."""
        rounds = []
        per_window = self.batch_size * self.world_size
        for window in range(self.num_windows):
            part = slice(window * per_window, (window + 1) * per_window)
            sizes = self._sp_size_of[part]
            plain = bool((sizes == 1).all())
            if plain:
                longest = self._padded(int(self.lengths[part].max()), 1)
                # The most that a rank has to take at once.
                share = min(self.batch_size, sizes.size)
                if not self._in_order:
                    share = -(-sizes.size // self.world_size)
                plain = self._most(longest, 1) >= share
            rounds.append(1 if plain else len(self._window(window)))
        return rounds

    def _make_window(self, window: int) -> list[Round]:
        per_window = self.batch_size * self.world_size
        last = min(len(self.lengths), (window + 1) * per_window)
        ids = [i for i in range(window * per_window, last) if self._sp_size_of[i]]
        if not ids:
            return []
        pieces = self._consecutive(ids) if self._in_order else self._wide(ids)
        rounds: list[Round] = []
        for piece, p in sorted(pieces, key=lambda item: -item[1]):  # stable: the order is kept
            found = next((r for r in rounds if r.has_room(p)), None)
            if found is None:
                found = Round(self._layout)
                rounds.append(found)
            found.place(piece, p)
        if not self._in_order:
            self._place_narrow(rounds, [i for i in ids if self._sp_size_of[i] == 1])
        return rounds

    def _consecutive(self, ids: Sequence[int]) -> list[tuple[list[int], int]]:
        """Pieces of consecutive samples with one SP size, no longer than a batch, that fit."""
        pieces: list[tuple[list[int], int]] = []
        for i in ids:
            p = int(self._sp_size_of[i])
            if pieces:
                piece, size = pieces[-1]
                same = size == p and piece[-1] // self.batch_size == i // self.batch_size
                longest = self._padded(int(max(self.lengths[[*piece, i]])), p)
                if same and len(piece) < self._most(longest, p):
                    piece.append(i)
                    continue
            pieces.append(([i], p))
        return pieces

    def _wide(self, ids: Sequence[int]) -> list[tuple[list[int], int]]:
        """Micro-batches of samples that need several ranks: as many together as fit."""
        pieces: list[tuple[list[int], int]] = []
        for p in self._sp_sizes:
            own = self._by_length([i for i in ids if p > 1 and self._sp_size_of[i] == p])
            padded = [self._padded(int(self.lengths[i]), p) for i in own]
            for first, last in greedy_runs(padded, _MANY, partial(self._most, sp_size=p)):
                pieces.append((own[first:last], p))
        return pieces

    def _place_narrow(self, rounds: list[Round], ids: list[int]) -> None:
        """Samples of one rank each, on what is free and as many more rounds as memory asks for."""
        if not ids:
            return
        own = self._by_length(ids)
        padded = [self._padded(int(self.lengths[i]), 1) for i in own]
        least = len(greedy_runs(padded, _MANY, partial(self._most, sp_size=1)))
        while sum(r.free for r in rounds) < least:
            rounds.append(Round(self._layout))
        slots = sum(r.free for r in rounds)
        chunks = balanced_runs(padded, slots, partial(self._most, sp_size=1))
        # Dear ones together: a Trainer batch takes as long as its dearest.
        chunks.sort(key=lambda chunk: -(chunk[1] - chunk[0]) * padded[chunk[0]])
        free = [r for r in rounds for _ in range(r.free)]
        for r, (first, last) in zip(free, chunks, strict=False):
            r.place(sorted(own[first:last]), 1)

    def _by_length(self, ids: list[int]) -> list[int]:
        return sorted(ids, key=lambda i: (-int(self.lengths[i]), i))

    def _padded(self, length: int, sp_size: int) -> int:
        return int(pad_to(length, sp_size, self._pad_multiple))

    def _most(self, seq_len: int, sp_size: int) -> int:
        """The most samples in a micro-batch of this length."""
        most = min(self._max_batch_size, self.batch_size * self.world_size)
        if self._memory is None:
            return most
        return largest_batch(self._memory, seq_len, sp_size, self._limit_bytes, most)

    # ---- one Trainer batch -----------------------------------------------------------------------

    def _complete(self, index: int, placed: Round) -> EvaluationBatch:
        """Micro-batches of a round, and company for the ranks that have none."""
        made = [self._micro_batch(ids, first, p) for ids, first, p in placed.placed]
        plan = Plan(epoch=0, iteration=index, world_size=self.world_size, micro_batches=tuple(made))
        alone = [i for i, m in enumerate(made) if m.sp_size == 1]
        cheapest = min(alone, key=lambda i: made[i].padded_tokens, default=None)
        repeats: list[tuple[int, MicroBatch]] = []
        rank = self.world_size - placed.free
        while rank < self.world_size:
            if cheapest is not None:
                original, ids, p = cheapest, made[cheapest].sample_ids, 1
            elif self._filler is not None:
                original, ids, p = len(made), (self._filler,), 1
            else:
                original = min(range(len(made)), key=lambda i: made[i].sp_size)
                ids, p = made[original].sample_ids, made[original].sp_size
            if rank + p > self.world_size:
                raise ValueError(
                    f"Every sample of {self._dataset_name} needs at least {p} ranks, so that rank"
                    f" {rank} of {self.world_size} has nothing that it could run. Use a number of"
                    " ranks that is a power of two, or raise memory_limit_bytes."
                )
            repeats.append((original, self._micro_batch(ids, rank, p)))
            rank += p
        return EvaluationBatch(plan, tuple(repeats))

    def _micro_batch(self, ids: Sequence[int], first_rank: int, sp_size: int) -> MicroBatch:
        lengths = [int(self.lengths[i]) for i in ids]
        seq_len = self._padded(max(lengths), sp_size)
        known = self._memory
        return MicroBatch(
            sample_ids=tuple(ids),
            seq_len=seq_len,
            num_tokens=sum(lengths),
            first_rank=first_rank,
            sp_size=sp_size,
            recompute_blocks=0,
            est_time_s=0.0,
            est_bytes=0 if known is None else known.num_bytes(len(ids), seq_len, sp_size),
        )

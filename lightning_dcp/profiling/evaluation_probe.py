"""Measure what a few short steps of evaluation take in memory, and whether they can be sharded.

The user's own validation, test or prediction step runs on real samples: one sample of up to three
lengths and two of the shortest, each forecast to fit before it runs. All blocks run: without a
backward pass nothing of a block stays but its output, so that blocks tell little by themselves.

Every rank walks the same trials, and what is decided follows from what all ranks exchanged. A rank
that belongs to no SP group of a size runs the trial alone: engines and users' steps may start
collectives over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_dcp.parallel import rng
from lightning_dcp.parallel.runtime import BlockRuntime
from lightning_dcp.parallel.topology import SPGroup, Topology
from lightning_dcp.planning.evaluation_memory import EvaluationMemory, MeasuredBytes, fit_bytes
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.profiling.live_bytes import peak_bytes
from lightning_dcp.profiling.sharding_check import (
    ShardingMismatch,
    check_sharding,
    length_to_check,
)
from lightning_dcp.profiling.stack_check import check_stacks
from lightning_dcp.profiling.trial import RNG_KEY, Gather, Step, is_out_of_memory

__all__ = ["EvaluationProbe", "ProbeFailed", "trial_lengths"]

_LONGEST_TRIAL = 1024
_LENGTH_RANGE = 16  # from the shortest to the longest trial
_NUM_LENGTHS = 3
_REPEATS = 3
_MOST_LENGTHS = 7  # where little memory allows small steps upward only


class ProbeFailed(RuntimeError):
    """The user's step raised while its memory was measured; the text says what and where."""


def trial_lengths(lengths: IntArray) -> tuple[int, ...]:
    """Up to three lengths that occur, short but far enough apart to tell a line from a parabola."""
    known = np.unique(lengths)
    top = int(known[max(0, int(np.searchsorted(known, _LONGEST_TRIAL, side="right")) - 1)])
    wanted = np.geomspace(max(1.0, top / _LENGTH_RANGE), top, _NUM_LENGTHS)
    nearest = {int(known[np.abs(known - w).argmin()]) for w in wanted}
    return tuple(sorted(nearest))


def _forecast(measured: Sequence[MeasuredBytes], seq_len: int) -> float:
    """Bytes of one longer sample, by what is known so far."""
    return EvaluationMemory(0, {1: fit_bytes(measured, seq_len)}).num_bytes(1, seq_len, 1)


def _group_or_alone(topology: Topology, sp_size: int) -> SPGroup:
    return topology.own_group(sp_size) or topology.group(topology.rank, 1)


class _StepOfAllRanks(Step):
    """Every rank runs every step: a user's step may hold a collective over all of them."""

    @override
    def group(self, sp_size: int) -> SPGroup:
        return _group_or_alone(self.topology, sp_size)


@dataclass(frozen=True, kw_only=True)
class EvaluationProbe:
    """Runs one kind of evaluation step for the sake of its figures.

    Call its methods inside :func:`.preserve`, with the module in evaluation mode and without
    gradients.

    Attributes:
        step: Runs the user's step on a device batch, through the engine; what it returns is of no
            interest.
        plain_step: The same without the engine, for the comparison of sharded and whole.
        make_batch: ``(batch_size, seq_len)`` to a device batch of real samples.
        module: The model.
        runtime: Of its blocks; None where it has none.
        topology: SP groups of the sizes that are probed must exist.
        device: Where the model is.
        gather: Objects of all ranks in rank order, on every rank.
    """

    step: Callable[[Any], Any]
    plain_step: Callable[[Any], Any]
    make_batch: Callable[[int, int], Any]
    module: nn.Module
    runtime: BlockRuntime | None
    topology: Topology
    device: torch.device
    gather: Gather

    def measure(
        self,
        sp_size: int,
        lengths: IntArray,
        *,
        spare_bytes: int,
        observe: bool = False,
    ) -> list[MeasuredBytes]:
        """Peak bytes of the trials at one SP size; a collective.

        Args:
            sp_size: Ranks that share each sample.
            lengths: Of all samples.
            spare_bytes: What a rank has for a step; trials that would take more are left out.
            observe: Whether the blocks' shapes and attention calls are recorded (on one rank).

        Raises:
            ProbeFailed: On all ranks, if the step raised on one.
        """
        known, targets = np.unique(lengths), trial_lengths(lengths)
        # What is made at a first run only, such as work spaces, does not count.
        self._trial(1, targets[0], sp_size, observe)
        measured = [
            self._measured(batch_size, targets[0], sp_size, observe)
            for batch_size in ((1, 2) if len(lengths) > 1 else (1,))
        ]
        last = targets[0]
        for _ in range(_MOST_LENGTHS - 1):
            target = next((length for length in targets if length > last), last)
            between = known[(known > last) & (known <= target)].tolist()
            fitting = [s for s in between if _forecast(measured, s) <= spare_bytes]
            if not fitting:
                break
            last = fitting[-1]
            measured.append(self._measured(1, last, sp_size, observe))
        return measured

    def _measured(
        self, batch_size: int, seq_len: int, sp_size: int, observe: bool
    ) -> MeasuredBytes:
        num_bytes = self._trial(batch_size, seq_len, sp_size, observe)
        return MeasuredBytes(batch_size, -(-seq_len // sp_size) * sp_size, num_bytes)

    def exclusions(
        self, sp_sizes: Sequence[int], lengths: IntArray, compute_dtype: torch.dtype
    ) -> Mapping[int, str]:
        """Sizes that give another result than one rank alone, with the reason; a collective.

        The parameters are changed: the caller's :func:`.preserve` puts them back.
        """
        assert self.runtime is not None
        checked = _StepOfAllRanks(
            step=self._scalar,
            make_batch=self.make_batch,
            module=self.module,
            runtime=self.runtime,
            topology=self.topology,
            device=self.device,
        )
        try:
            check = partial(
                check_sharding,
                checked,
                sp_sizes=sp_sizes,
                batch_size=min(2, len(lengths)),
                seq_len=length_to_check(np.unique(lengths), sp_sizes),
                compute_dtype=compute_dtype,
                gather=self.gather,
            )
            return check_stacks(check, checked, sp_sizes)
        except ShardingMismatch as error:
            return dict.fromkeys(sp_sizes, str(error))
        except Exception as error:  # noqa: BLE001 - the unsharded run, which all ranks do alike
            return dict.fromkeys(sp_sizes, f"it could not be checked: {error}")

    def _scalar(self, batch: Any) -> torch.Tensor:
        """One number that depends on everything the step returned."""
        leaves = tree_leaves(self.plain_step(batch))
        floating = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        return sum((torch.nan_to_num(x.double()).abs().mean() for x in floating), total)

    def _trial(self, batch_size: int, seq_len: int, sp_size: int, observe: bool) -> int:
        num_bytes, error = 0, None
        try:
            group = _group_or_alone(self.topology, sp_size)
            # Threads that run collectives may keep buffers for a moment: the least counts.
            repeats = 1 if sp_size == 1 else _REPEATS
            taken = min(self._run(batch_size, seq_len, group, observe) for _ in range(repeats))
            num_bytes = taken if group.size == sp_size else 0  # alone it says nothing of the size
        except Exception as raised:  # noqa: BLE001 - told to all ranks
            what = (
                "out of memory"
                if is_out_of_memory(raised)
                else f"{type(raised).__name__}: {raised}"
            )
            error = f"{what} (rank {self.topology.rank})"
        outcomes = self.gather((num_bytes, error))
        errors = [text for _, text in outcomes if text is not None]
        if errors:
            raise ProbeFailed(errors[0])
        return max(int(size) for size, _ in outcomes)

    def _run(self, batch_size: int, seq_len: int, group: SPGroup, observe: bool) -> int:
        with peak_bytes(self.device) as peak:
            rng.seed(self.device, (RNG_KEY, batch_size, seq_len))
            batch = self.make_batch(batch_size, seq_len)
            if self.runtime is None:
                self.step(batch)
            else:
                key = (RNG_KEY, batch_size, seq_len)
                with self.runtime.micro_batch(group=group, rng_key=key, observe=observe):
                    self.step(batch)
            return peak()

"""Before planning: which SP sizes and samples can take part, and clear errors where none can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_dcp.planning.candidates import Exclusion, pad_to
from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.planning.options import PlanningOptions, is_power_of_two

__all__ = ["Feasible", "format_bytes", "less_margin", "usable_sp_sizes"]


def less_margin(limit_bytes: int, cost_model: Costs) -> int:
    """The limit, so much lower that a prediction that is off as usual still stays below it."""
    error = cost_model.memory_error
    spare = max(0, limit_bytes - cost_model.fixed_bytes)
    return limit_bytes - spare + int(spare / (1.0 + error))


def usable_sp_sizes(
    costs: Costs, world_size: int, options: PlanningOptions, excluded: Mapping[int, str]
) -> tuple[tuple[int, ...], list[Exclusion]]:
    """SP sizes that may be used, and why others are not.

    Raises:
        ValueError: None can be used.
    """
    exclusions = []
    usable = []
    allowed = options.sp_sizes
    names = set(costs.sp_sizes) | set(excluded) | set(allowed or ())
    powers = {2**i for i in range(world_size.bit_length())}
    for p in sorted(names | powers):
        if p in excluded:
            exclusions.append(Exclusion(p, excluded[p]))
        elif allowed is not None and p not in allowed:
            exclusions.append(Exclusion(p, f"not among the allowed sp_sizes {list(allowed)}"))
        elif p > world_size:
            exclusions.append(Exclusion(p, f"larger than the world of {world_size} ranks"))
        elif not is_power_of_two(p) or p not in costs.sp_sizes:
            exclusions.append(Exclusion(p, f"not measured (measured: {list(costs.sp_sizes)})"))
        else:
            usable.append(p)
    if not usable:
        reasons = "; ".join(map(str, exclusions))
        raise ValueError(f"No SP size can be used. {reasons}. Allow at least one of them.")
    return tuple(usable), exclusions


@dataclass(frozen=True)
class Feasible:
    """What fits into memory.

    Attributes:
        costs: Predicts bytes.
        limit_bytes: Memory limit per rank, as given.
        usable_bytes: The same less the margin for the cost model's error.
        sp_sizes: SP sizes that may be used.
        options: The user's options.
        dataset_name: For messages.
    """

    costs: Costs
    limit_bytes: int
    usable_bytes: int
    sp_sizes: tuple[int, ...]
    options: PlanningOptions
    dataset_name: str

    def __post_init__(self) -> None:
        fixed = self.costs.fixed_bytes
        if self.limit_bytes <= fixed:
            raise ValueError(
                f"The memory limit of {format_bytes(self.limit_bytes)} per rank "
                f"({self.limit_bytes} bytes) is below the model's own size: parameters, "
                f"gradients, optimizer state and buffers take {format_bytes(fixed)} ({fixed} "
                "bytes). Raise memory_limit_bytes or use a smaller model."
            )

    def fit_lengths(self, lengths: IntArray) -> tuple[IntArray, IntArray, int | None]:
        """What becomes of samples that are too long, by ``on_too_long``.

        Returns:
            Lengths as planned, the samples that take part, and the length that longer ones are cut
            to; None where nothing is cut.

        Raises:
            ValueError: A sample fits nowhere and is neither to be skipped nor cut, or all are.
        """
        longest_fitting = self._longest_fitting(int(lengths.max()))
        too_long = np.flatnonzero(lengths > longest_fitting)
        everyone = np.arange(lengths.size, dtype=np.int64)
        if not too_long.size:
            return lengths, everyone, None
        worst = int(too_long[np.argmax(lengths[too_long])])
        missing = self._missing_bytes(int(lengths[worst]))
        what = (
            f"Sample {worst} of {self.dataset_name} has length {int(lengths[worst])} and fits no "
            f"configuration: with p in {list(self.sp_sizes)} and all blocks recomputed it still "
            f"lacks {format_bytes(missing)} ({missing} bytes) of the "
            f"{format_bytes(self.usable_bytes)} that a rank may use (the limit less a "
            "margin for the cost model's error). "
            f"{too_long.size} sample(s) are too long; the longest length that fits is "
            f"{longest_fitting}. "
        )
        if self.options.pad_multiple > int(lengths[worst]):
            what += f"All are padded to pad_multiple={self.options.pad_multiple} tokens. "
        if self.options.on_too_long == "error" or longest_fitting < 1:
            raise ValueError(
                what
                + 'Set on_too_long="skip" or "truncate", raise memory_limit_bytes, or use more '
                "ranks, so that larger SP sizes are possible."
            )
        if self.options.on_too_long == "truncate":
            cut = np.minimum(lengths, longest_fitting)
            cut.setflags(write=False)
            return cut, everyone, longest_fitting
        kept = np.flatnonzero(lengths <= longest_fitting).astype(np.int64)
        if not kept.size:
            raise ValueError(what + "All samples would be skipped.")
        return lengths, kept, None

    def _missing_bytes(self, length: int) -> int:
        """Bytes by which one sample of this length is over the limit at the best SP size."""
        needs = [
            int(
                self.costs.memory_bytes(
                    1, pad_to(length, p, self.options.pad_multiple), p, self.costs.num_blocks
                )
            )
            for p in self.sp_sizes
        ]
        return min(needs) - self.usable_bytes

    def _longest_fitting(self, longest: int) -> int:
        """Largest length up to ``longest`` that fits; 0 where none does. Memory grows with it."""
        low, high = 0, longest + 1
        if self._missing_bytes(longest) <= 0:
            return longest
        while high - low > 1:
            middle = (low + high) // 2
            if self._missing_bytes(middle) <= 0:
                low = middle
            else:
                high = middle
        return low


def format_bytes(num_bytes: int) -> str:
    """GiB, MiB, KiB or bytes, for messages."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"

"""Whether all ranks run the same plan, told in the all-reduce that every iteration begins with.

NOTE [Sums of squares]
    The hash of a plan is cut into pieces of 20 bits. Ranks sum each piece h and its square. Over W
    numbers, W * sum(h^2) >= sum(h)^2, with equality where all are the same (Cauchy-Schwarz). For W
    up to 2^13 the sums are whole numbers below 2^53, which float64 holds exactly, in any order.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_dcp.strategies.agreement import check_same_on_all_ranks

if TYPE_CHECKING:
    from lightning_dcp.planning.plan import Plan

__all__ = ["are_equal", "hash_pieces", "sum_if_same_plan", "to_be_summed"]

_PIECES, _BITS = 2, 20


def hash_pieces(plan: Plan, seed: int) -> tuple[int, ...]:
    """Hash of all that decides what an iteration computes; the same in every process.

    Predicted times and bytes are left out: they decide nothing any more.

    Args:
        plan: of the iteration.
        seed: of the random numbers in micro-batches.
    """
    # Python's hash of integers and of tuples of them has no salt: that is for texts alone.
    numbers = array("q", (plan.epoch, plan.iteration, plan.world_size, hash(seed)))
    numbers.extend(
        hash(
            (
                m.sample_ids,
                m.seq_len,
                m.num_tokens,
                m.first_rank,
                m.sp_size,
                m.recompute_blocks,
                m.packed,
            )
        )
        for m in plan.micro_batches
    )
    digest = hashlib.blake2b(numbers, digest_size=8).digest()
    bits = int.from_bytes(digest, "little")
    return tuple((bits >> (_BITS * i)) & ((1 << _BITS) - 1) for i in range(_PIECES))


def to_be_summed(pieces: Sequence[int]) -> list[float]:
    """Numbers to be added up over ranks, from what `hash_pieces` says."""
    return [float(x) for h in pieces for x in (h, h * h)]


def are_equal(sums: Sequence[float], world_size: int) -> bool:
    """Whether all ranks had the same pieces, from the sums over ranks."""
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return all(world_size * int(squares) == int(total) ** 2 for total, squares in pairs)


def sum_if_same_plan(
    value: float,
    plan: Plan,
    *,
    seed: int,
    world_size: int,
    sum_over_ranks: Callable[[list[float]], list[float]],
    inputs: Callable[[], Mapping[str, str]],
) -> float:
    """Sum a number over all ranks, and see that all of them are about to run the same plan.

    Args:
        value: of this rank.
        plan: that this rank is about to run.
        seed: of the random numbers in micro-batches.
        world_size: number of ranks.
        sum_over_ranks: adds numbers up over ranks, each for itself; a collective.
        inputs: what this rank makes plans from, by name; asked where plans differ.

    Raises:
        MisconfigurationException: on all ranks, with what differs on which rank.
    """
    if world_size == 1:
        return sum_over_ranks([value])[0]
    total, *sums = sum_over_ranks([value, *to_be_summed(hash_pieces(plan, seed))])
    if not are_equal(sums, world_size):
        check_same_on_all_ranks(
            "the plan of the running iteration",
            {
                "epoch": str(plan.epoch),
                "iteration": str(plan.iteration),
                **inputs(),
                "seed of random numbers": str(seed),
                "plan": plan.digest()[:12],
            },
            "No micro-batch of it has run. Start every rank with the same code, data, options and"
            " libraries; where only the plan differs, it was changed on one rank while training.",
        )
        raise RuntimeError(
            f"The check that all ranks run the same plan failed in iteration {plan.iteration} of"
            f" epoch {plan.epoch}, but nothing differs: the all-reduce has given a wrong sum."
        )
    return total

"""Which of the found stacks of blocks are what they look like, and can be shared like the main one.

A stack that nobody named must not make a model fail that runs without it. So it is left to the
model where its blocks do not run one after the other, and runs whole where it cannot be shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from lightning_dcp.parallel.runtime import BlockRuntime
from lightning_dcp.parallel.stack_runtime import BlockCall, StackRuntime
from lightning_dcp.profiling.preserve import preserve
from lightning_dcp.profiling.sharding_check import ShardingMismatch
from lightning_dcp.profiling.trial import RNG_KEY, Gather, Step

NOT_CALLED = "the training step did not call it in the first micro-batches"
_NOT_IN_A_ROW = "its blocks do not run one after the other"
_NOT_ALIKE = "its blocks do not return hidden states of their input's shape"
_NO_ATTENTION = "no attention call was seen in it"


def unfit_stacks(step: Step, shapes: Sequence[tuple[int, int]], gather: Gather) -> dict[str, str]:
    """Found stacks that are none, with the reason; a collective; inside :func:`.preserve`.

    All blocks run forward on whole sequences, once for each of ``shapes`` until all stacks have
    been called.

    Args:
        step: The user's side.
        shapes: Batch size and length of some micro-batches.
        gather: Objects of all ranks in rank order, on every rank.
    """
    optional = [stack for stack in step.runtime.stacks if stack.stack.optional]
    group = step.group(1)
    assert group is not None, "every rank is a group of one"
    reasons: dict[str, str] = {}
    if not optional:
        return reasons
    called: set[str] = set()
    for batch_size, seq_len in shapes:
        found: dict[str, str] = {}
        try:
            batch = step.batch(batch_size, seq_len)
            rng_key = (RNG_KEY, batch_size, seq_len)
            with (
                torch.no_grad(),
                step.runtime.micro_batch(group=group, rng_key=rng_key, observe=True),
            ):
                step.step(batch)
        except Exception as error:  # noqa: BLE001 (the main stack's trials tell what is wrong)
            found = {stack.path: f"{type(error).__name__}: {error}" for stack in optional}
        else:
            found = unfit_in_trace(step.runtime.stacks, step.runtime.trace)
        for of_rank in gather(found):
            # A reason of any rank counts; being called on one rank is enough.
            reasons |= {path: why for path, why in of_rank.items() if why != NOT_CALLED}
            called |= {stack.path for stack in optional} - of_rank.keys()
        if len(called | reasons.keys()) == len(optional):
            break
    return {s.path: NOT_CALLED for s in optional if s.path not in called} | reasons


def leave_out_unfit(runtime: BlockRuntime, gather: Gather) -> None:
    """Leave found stacks to the model that were none in the last observed micro-batch."""
    unfit: set[str] = set()
    for of_rank in gather(unfit_in_trace(runtime.stacks, runtime.trace)):
        unfit |= of_rank.keys()
    runtime.keep_stacks(stack.path for stack in runtime.stacks if stack.path not in unfit)


def unfit_in_trace(stacks: Sequence[StackRuntime], trace: Sequence[BlockCall]) -> dict[str, str]:
    """Optional stacks that one micro-batch shows to be none, with the reason."""
    kept = [stack for stack in stacks if not stack.stack.optional]
    found: dict[str, str] = {}
    for stack in stacks:
        if not stack.stack.optional:
            continue
        reason = _unfit([call for call in trace if call.path == stack.path])
        if reason is None and not _in_a_row([*kept, stack], trace):
            reason = _NOT_IN_A_ROW
        if reason is None:
            kept.append(stack)
        else:
            found[stack.path] = reason
    return found


def _unfit(calls: Sequence[BlockCall]) -> str | None:
    if not calls:
        return NOT_CALLED
    if any(call.input_shape is None or call.input_shape != call.output_shape for call in calls):
        return _NOT_ALIKE
    if not any(call.attends for call in calls):
        return _NO_ATTENTION
    return None


def _in_a_row(stacks: Iterable[StackRuntime], trace: Sequence[BlockCall]) -> bool:
    """Whether each stack's blocks run from the first to the last with no other's in between."""
    sizes = {stack.path: len(stack) for stack in stacks}
    calls = [call for call in trace if call.path in sizes]
    at = 0
    while at < len(calls):
        path = calls[at].path
        one_pass = [(call.path, call.index) for call in calls[at : at + sizes[path]]]
        if one_pass != [(path, i) for i in range(sizes[path])]:
            return False
        at += sizes[path]
    return True


def check_stacks(
    check: Callable[[], dict[int, str]], step: Step, sp_sizes: Sequence[int]
) -> dict[int, str]:
    """``check`` the sharding; run those found stacks whole that are to blame for a difference.

    Args:
        check: Compares sharded with whole, a collective; parameters and modes may be left changed.
        step: The user's side.
        sp_sizes: That are checked.

    Returns:
        What ``check`` returned at last.

    Raises:
        ShardingMismatch: If the stacks that must be there differ by themselves.
    """
    suspects = [
        stack
        for stack in step.runtime.stacks
        if stack.stack.optional and any(stack.exclusion(p) is None for p in sp_sizes)
    ]
    others = [stack for stack in step.runtime.stacks if stack not in suspects]
    # Without the suspects there must be something to share.
    is_enough = any(stack.exclusion(p) is None for stack in others for p in sp_sizes)
    if not suspects or not is_enough:
        return _checked(step, check)
    found, error = _outcome(step, check)
    if not found and error is None:
        return found
    reason = str(error) if error is not None else next(iter(found.values()))
    known = {stack.path: dict(stack.whole_at) for stack in suspects}
    for stack in suspects:
        _leave_whole(stack, sp_sizes, reason)
    try:
        found = _checked(step, check)
    except ShardingMismatch:
        for stack in suspects:
            stack.whole_at = known[stack.path]
        raise
    if len(suspects) > 1 and not found:
        for stack in suspects:
            whole_at, stack.whole_at = stack.whole_at, known[stack.path]
            one_found, one_error = _outcome(step, check)
            if one_found or one_error is not None:
                stack.whole_at = whole_at
    return found


def leave_optional_whole(stacks: Iterable[StackRuntime], sp_size: int, reason: str) -> bool:
    """Run all found stacks whole at ``sp_size`` from now on; whether that changes anything."""
    stacks = list(stacks)
    shared = [stack for stack in stacks if stack.exclusion(sp_size) is None]
    changed = [stack for stack in shared if stack.stack.optional]
    if not changed or len(changed) == len(shared):
        return False
    for stack in changed:
        _leave_whole(stack, [sp_size], reason)
    return True


def _leave_whole(stack: StackRuntime, sp_sizes: Iterable[int], reason: str) -> None:
    whole: Mapping[int, str] = {p: reason for p in sp_sizes if stack.exclusion(p) is None}
    stack.whole_at = {**stack.whole_at, **whole}


def _checked(step: Step, check: Callable[[], dict[int, str]]) -> dict[int, str]:
    with preserve(step.module):
        return check()


def _outcome(
    step: Step, check: Callable[[], dict[int, str]]
) -> tuple[dict[int, str], ShardingMismatch | None]:
    try:
        return _checked(step, check), None
    except ShardingMismatch as error:
        return {}, error

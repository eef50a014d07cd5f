"""Does the model compute the same when its blocks are sharded? Asked before any sharding is used.

Sharding by sequence is right for a model whose blocks mix positions in attention alone. A block
with a convolution or a mean over positions runs without any error, and is silently wrong. So the
model runs once whole and once sharded on the same real micro-batch, and hidden states and loss are
compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_dcp.parallel import rng
from lightning_dcp.parallel.topology import SPGroup
from lightning_dcp.profiling.preserve import preserve
from lightning_dcp.profiling.probe import hidden_states
from lightning_dcp.profiling.trial import RNG_KEY, Gather, Step

# Relative differences that rounding explains in any model. How far it carries in this model is
# measured; see _tolerance.
_LEAST_TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
_LARGEST_TOLERANCE = 0.2
_WAKING_NOISE = 0.5
_MIN_LENGTH = 32


@dataclass(frozen=True)
class _Outputs:
    loss: float
    hidden: torch.Tensor


@dataclass(frozen=True)
class _Finding:
    """What one rank found for one SP size."""

    whole_loss: float
    sharded_loss: float
    hidden_error: float
    error: str | None = None

    @property
    def loss_error(self) -> float:
        return _relative(self.sharded_loss, self.whole_loss)


def length_to_check(lengths: Sequence[int] | np.ndarray, sp_sizes: Sequence[int]) -> int:
    """The first of ``lengths`` (ascending) that gives each rank a few tokens, else the last."""
    least = max(_MIN_LENGTH, 2 * max(sp_sizes))
    return next((int(length) for length in lengths if length >= least), int(lengths[-1]))


def check_sharding(
    step: Step,
    *,
    sp_sizes: Sequence[int],
    batch_size: int,
    seq_len: int,
    compute_dtype: torch.dtype,
    gather: Gather,
) -> dict[int, str]:
    """Compare ``p > 1`` with ``p = 1``, dropout off; call it inside :func:`.preserve`.

    All sizes are tried, smallest first, until one is found wrong. The module is left in evaluation
    mode with its parameters changed: constant ones get noise, since a branch that a zero gate or a
    tiny layer scale switches off at the start of training would hide what it mixes.

    Args:
        step: The user's side.
        sp_sizes: Sizes above 1 to check.
        batch_size: Samples of the micro-batch.
        seq_len: Its length; not a multiple of the sizes is best, as padding is checked then too.
        compute_dtype: Type that blocks compute in, which autocast makes coarser than their
            parameters'.
        gather: Objects of all ranks in rank order, on every rank.

    Returns:
        Reasons why sizes are excluded: all of them or none, since a model that mixes positions
        somewhere is wrong for every size.
    """
    _without_chance(step.module)
    _wake(step.module)
    group = step.group(1)
    assert group is not None, "every rank is a group of one"
    whole = _run(step, group, batch_size, seq_len)
    losses = [float(loss) for loss in gather(whole.loss)]
    coarsest = _coarsest(step.module, compute_dtype)
    if max(_relative(loss, losses[0]) for loss in losses) > _LEAST_TOLERANCES[coarsest]:
        reason = (
            "ranks compute different losses from what should be one and the same micro-batch "
            f"({min(losses):.6g} to {max(losses):.6g}), so that they cannot share a sequence. "
            "Is the data read or augmented with randomness that no seed controls?"
        )
        return dict.fromkeys(sp_sizes, reason)
    tolerance = _tolerance(step, coarsest, whole, lambda: _run(step, group, batch_size, seq_len))
    # Ranks that disagree on the tolerance would not agree on the outcome.
    tolerance = float(gather(tolerance)[0])
    for sp_size in sorted(sp_sizes):
        findings: list[_Finding | None] = gather(
            _compare(step, sp_size, batch_size, seq_len, whole)
        )
        for found in findings:
            if found is not None:
                wrong = _reason(found, sp_size, tolerance)
                if wrong is not None:
                    return dict.fromkeys(sp_sizes, wrong)
    return {}


def _compare(
    step: Step, sp_size: int, batch_size: int, seq_len: int, whole: _Outputs
) -> _Finding | None:
    group = step.group(sp_size)
    if group is None:
        return None
    try:
        sharded = _run(step, group, batch_size, seq_len)
    except Exception as error:  # noqa: BLE001 (whatever the model does not stand is a reason)
        return _Finding(whole.loss, math.nan, math.nan, f"{type(error).__name__}: {error}")
    if sharded.hidden.shape != whole.hidden.shape:
        shapes = f"{tuple(sharded.hidden.shape)} instead of {tuple(whole.hidden.shape)}"
        return _Finding(whole.loss, sharded.loss, math.inf, f"hidden states of shape {shapes}")
    return _Finding(whole.loss, sharded.loss, _difference(sharded, whole))


def _reason(found: _Finding, sp_size: int, tolerance: float) -> str | None:
    if found.error is not None:
        return f"the model does not run with its blocks sharded over {sp_size} ranks: {found.error}"
    # `not <=`: a NaN on one side only is a difference too.
    if not (found.hidden_error <= tolerance and found.loss_error <= tolerance):
        return (
            f"sharded over {sp_size} ranks the model computes something else: loss "
            f"{found.sharded_loss:.8g} instead of {found.whole_loss:.8g}, hidden states differ by "
            f"{found.hidden_error:.1e} (rounding: below {tolerance:.0e}). Its blocks probably mix "
            "positions outside attention, e.g. by a convolution or a mean over the sequence"
        )
    return None


def _run(step: Step, group: SPGroup, batch_size: int, seq_len: int) -> _Outputs:
    """Loss and whole hidden states after the last block; all blocks run."""
    batch = step.batch(batch_size, seq_len)
    rng_key = (RNG_KEY, batch_size, seq_len)
    with (
        step.runtime.micro_batch(group=group, rng_key=rng_key),
        _last_output(step.runtime.stack.blocks[-1]) as outputs,
    ):
        loss = step.step(batch)
    if not outputs:
        raise RuntimeError("The training step did not call the last of the repeated blocks.")
    return _Outputs(float(loss.detach()), outputs[-1])


@contextmanager
def _last_output(block: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect the block's outputs as the rest of the model sees them: gathered, without padding."""
    outputs: list[torch.Tensor] = []

    def keep(_: nn.Module, __: Any, output: object) -> None:
        hidden = hidden_states(output)
        if hidden is not None:
            outputs.append(hidden.detach())

    # Registered last, so that it runs after the hook that gathers.
    handle = block.register_forward_hook(keep)
    try:
        yield outputs
    finally:
        handle.remove()


def _without_chance(module: nn.Module) -> None:
    """Evaluation mode, but for batch normalisation: while it trains it mixes all positions."""
    module.eval()
    for part in module.modules():
        # The synchronised kind waits for ranks that may have no part in this.
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.train(not isinstance(part, nn.SyncBatchNorm))


def _wake(module: nn.Module) -> None:
    """Give constant parameters some noise, the same on all ranks."""
    rng.seed(torch.device("cpu"), (RNG_KEY,))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() and parameter.numel():
                flat = parameter.detach().flatten()
                if bool((flat == flat[0]).all()):
                    noise = torch.randn(parameter.shape) * _WAKING_NOISE
                    parameter.add_(noise.to(parameter))


def _tolerance(
    step: Step, coarsest: torch.dtype, whole: _Outputs, run: Callable[[], _Outputs]
) -> float:
    """What rounding can make of the outputs.

    Sharded kernels sum in another order. What that does to the outputs depends on the depth and
    the type. All parameters off by one unit in the last place do more, and show how it grows.
    """
    with preserve(step.module):
        _move(step.module, _epsilon(coarsest))
        moved = run()
    rounding = max(_difference(moved, whole), _relative(moved.loss, whole.loss))
    return min(_LARGEST_TOLERANCE, max(_LEAST_TOLERANCES[coarsest], rounding))


def _coarsest(module: nn.Module, compute_dtype: torch.dtype) -> torch.dtype:
    """The coarsest floating-point type that takes part."""
    dtypes = {compute_dtype, *(parameter.dtype for parameter in module.parameters())}
    return max((d for d in dtypes if d in _LEAST_TOLERANCES), key=_epsilon, default=torch.float32)


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _move(module: nn.Module, relative: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape) * relative
                parameter.mul_(1 + noise.to(parameter))


def _difference(outputs: _Outputs, reference: _Outputs) -> float:
    """Largest difference of hidden states, relative to the largest of them."""
    # Padded positions may well be NaN; both runs agree about them, or the loss shows it.
    expected = torch.nan_to_num(reference.hidden.double())
    scale = float(expected.abs().max())
    difference = float((torch.nan_to_num(outputs.hidden.double()) - expected).abs().max())
    return difference / scale if scale else difference


def _relative(value: float, reference: float) -> float:
    if math.isnan(value) and math.isnan(reference):
        return 0.0
    if value == reference:
        return 0.0
    return abs(value - reference) / max(abs(reference), 1e-12)

"""Does the model compute the same when its blocks are sharded? Asked before any sharding is used.

Sharding by sequence is right for a model whose blocks mix positions in attention alone. A block
with a convolution or a mean over positions runs without any error, and is silently wrong. So the
model runs forward and backward once whole and once sharded on the same real micro-batch; loss,
hidden states and gradients are compared. Only where they differ is it looked for the module to
blame, which costs two more forward passes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_dcp.parallel import rng
from lightning_dcp.parallel.topology import SPGroup
from lightning_dcp.profiling.gradient_sketch import (
    GradientSketch,
    sketch_gradients,
    wrong_gradients,
)
from lightning_dcp.profiling.module_trace import (
    Difference,
    first_difference,
    relative_difference,
)
from lightning_dcp.profiling.preserve import preserve
from lightning_dcp.profiling.probe import hidden_states
from lightning_dcp.profiling.trial import RNG_KEY, Gather, Step

_log = logging.getLogger(__name__)

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
# Keeps small gradients of half precision from being flushed to zero; see GradScaler.
_SCALE_OF_FLOAT16 = 1024.0


class ShardingMismatch(RuntimeError):
    """The model computes something else when it is sharded; the text says where and what to do."""


@dataclass(frozen=True, kw_only=True)
class _Outputs:
    loss: float
    hidden: torch.Tensor
    gradients: GradientSketch | None  # None: nothing to differentiate
    backward_order: tuple[int, ...]  # of the parameters


@dataclass(frozen=True, kw_only=True)
class _Finding:
    """What one rank found for one SP size."""

    whole_loss: float
    sharded_loss: float
    hidden_error: float
    wrong_gradients: tuple[tuple[str, float], ...] = ()  # in order of the backward pass
    error: str | None = None

    @property
    def loss_error(self) -> float:
        return _relative(self.sharded_loss, self.whole_loss)

    def outputs_differ(self, tolerance: float) -> bool:
        # `not <=`: a NaN on one side only is a difference too.
        return not (self.hidden_error <= tolerance and self.loss_error <= tolerance)


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
    active_blocks: int | None = None,
) -> dict[int, str]:
    """Compare ``p > 1`` with ``p = 1``, dropout off; call it inside :func:`.preserve`.

    All sizes are tried, smallest first. The module is left in evaluation mode with its parameters
    changed: constant ones get noise, since a branch that a zero gate or a tiny layer scale switches
    off at the start of training would hide what it mixes. Gradients are compared where the step's
    loss has any.

    Args:
        step: The user's side.
        sp_sizes: Sizes above 1 to check.
        batch_size: Samples of the micro-batch.
        seq_len: Its length; not a multiple of the sizes is best, as padding is checked then too.
        compute_dtype: Type that blocks compute in, which autocast makes coarser than their
            parameters'.
        gather: Objects of all ranks in rank order, on every rank.
        active_blocks: Run only so many blocks of each stack; default all.

    Returns:
        Reasons why sizes cannot be used: all of them or none.

    Raises:
        ShardingMismatch: On all ranks, if the sharded model runs and computes something else.
    """
    started_s = time.perf_counter()
    _without_chance(step.module)
    _wake(step.module)
    group = step.group(1)
    assert group is not None, "every rank is a group of one"
    coarsest = _coarsest(step.module, compute_dtype)
    run = partial(
        _run, step, batch_size, seq_len, scale=_loss_scale(coarsest), active_blocks=active_blocks
    )
    whole = run(group)
    losses = [float(loss) for loss in gather(whole.loss)]
    if max(_relative(loss, losses[0]) for loss in losses) > _LEAST_TOLERANCES[coarsest]:
        reason = (
            "ranks compute different losses from what should be one and the same micro-batch "
            f"({min(losses):.6g} to {max(losses):.6g}), so that they cannot share a sequence. "
            "Is the data read or augmented with randomness that no seed controls?"
        )
        return dict.fromkeys(sp_sizes, reason)
    moved = _moved(step, coarsest, partial(run, group))
    # Ranks that disagree on the tolerance would not agree on the outcome.
    tolerance = float(gather(_tolerance(coarsest, whole, moved))[0])
    for sp_size in sorted(sp_sizes):
        found: list[_Finding | None] = gather(_compare(step, sp_size, run, whole, moved, tolerance))
        findings = [finding for finding in found if finding is not None]
        for finding in findings:
            if finding.error is not None:
                reason = f"the model does not run with its blocks sharded over {sp_size} ranks: "
                return dict.fromkeys(sp_sizes, reason + finding.error)
        for finding in findings:
            if finding.outputs_differ(tolerance):
                forward = partial(_forward, step, batch_size, seq_len, active_blocks)
                first = _locate(step, sp_size, forward, tolerance, gather)
                raise ShardingMismatch(_outputs_text(finding, sp_size, tolerance, first, step))
        for finding in findings:
            if finding.wrong_gradients:
                raise ShardingMismatch(_gradients_text(finding, sp_size, step))
    _log.info(
        "Self-check of SP sizes %s on %d x %d tokens: %.2f s.",
        sorted(sp_sizes),
        batch_size,
        seq_len,
        time.perf_counter() - started_s,
    )
    return {}


def _compare(
    step: Step,
    sp_size: int,
    run: Callable[[SPGroup], _Outputs],
    whole: _Outputs,
    moved: _Outputs,
    tolerance: float,
) -> _Finding | None:
    group = step.group(sp_size)
    if group is None:
        return None
    try:
        sharded = run(group)
    except Exception as error:  # noqa: BLE001 (whatever the model does not stand is a reason)
        return _Finding(
            whole_loss=whole.loss,
            sharded_loss=math.nan,
            hidden_error=math.nan,
            error=f"{type(error).__name__}: {error}",
        )
    wrong: dict[int, float] = {}
    if whole.gradients and moved.gradients and sharded.gradients:
        wrong = wrong_gradients(
            sharded.gradients.summed(group), whole.gradients, moved.gradients, tolerance
        )
    names = [name for name, _ in _trainable(step.module)]
    order = [*whole.backward_order, *range(len(names))]
    return _Finding(
        whole_loss=whole.loss,
        sharded_loss=sharded.loss,
        hidden_error=_difference(sharded, whole),
        wrong_gradients=tuple((names[i], wrong[i]) for i in dict.fromkeys(order) if i in wrong),
    )


def _locate(
    step: Step,
    sp_size: int,
    forward: Callable[[SPGroup], None],
    tolerance: float,
    gather: Gather,
) -> Difference | None:
    """The module to blame: the first of all ranks' in the order of the forward pass."""
    group, alone = step.group(sp_size), step.group(1)
    assert alone is not None
    found = None
    if group is not None:
        with torch.no_grad():
            found = first_difference(
                step.module,
                partial(forward, alone),
                partial(forward, group),
                tolerance,
            )
    differences = [difference for difference in gather(found) if difference is not None]
    return min(differences, key=lambda difference: difference.order, default=None)


_OR_NOT = (
    "train without SP: planning.sp_sizes=[1]. (self_check=False skips this check and trains the "
    "wrong model.)"
)
_HELP = (
    "Inside the blocks each rank has its own tokens of the sequence only. Let attention go through "
    "F.scaled_dot_product_attention or lightning_dcp.attention, give positions to the blocks as an "
    "argument (it is sliced like the hidden states), and do whatever else mixes positions, such as "
    f"a convolution, outside of the blocks; or {_OR_NOT}"
)
_HELP_INPUTS = (
    "With shard='inputs' each rank runs the whole training step on its own tokens of the sequence "
    "only. Take positions from the batch's `position_ids` instead of counting them, shift labels "
    "in the data set or the collate function (`labels[t]` is what position t predicts), and let "
    "nothing but attention mix positions; or use shard='blocks', under which all that holds inside "
    f"the blocks only; or {_OR_NOT}"
)


def _help(step: Step) -> str:
    inputs = step.runtime.inputs
    return _HELP_INPUTS if inputs is not None and inputs.slices else _HELP


def _outputs_text(
    finding: _Finding, sp_size: int, tolerance: float, first: Difference | None, step: Step
) -> str:
    where = "No single module could be found to blame."
    if first is not None:
        name = f"`{first.module}` ({first.type_name})" if first.module else first.type_name
        error = "" if math.isinf(first.error) else f" by {first.error:.1e}"
        where = (
            f"The first module that differs is {name}{_block_text(first.module, step)}: "
            f"{first.what} differs{error}."
        )
    return (
        f"Self-check: sharded over {sp_size} ranks the model computes something else: loss "
        f"{finding.sharded_loss:.8g} instead of {finding.whole_loss:.8g}, hidden states differ by "
        f"{finding.hidden_error:.1e} (rounding: below {tolerance:.0e}). {where} {_help(step)}"
    )


def _block_text(path: str, step: Step) -> str:
    """Of which block the module is a part, if it is not one itself."""
    blocks = {id(block) for block in step.runtime.blocks}
    parts = path.split(".") if path else []
    for end in range(1, len(parts)):
        outer = ".".join(parts[:end])
        if id(step.module.get_submodule(outer)) in blocks:
            return f" in block `{outer}`"
    return ""


def _gradients_text(finding: _Finding, sp_size: int, step: Step) -> str:
    (name, error), *others = finding.wrong_gradients
    more = f", then {len(others)} others" if others else ""
    return (
        f"Self-check: sharded over {sp_size} ranks the model computes the same loss, but other "
        f"gradients. The first parameter that differs in the backward pass is `{name}` (by "
        f"{error:.1e}){more}. Look for a custom autograd function or a gradient hook at or after "
        f"it that mixes positions, or that depends on the number of tokens. {_help(step)}"
    )


def _forward(
    step: Step, batch_size: int, seq_len: int, active_blocks: int | None, group: SPGroup
) -> None:
    batch = step.batch(batch_size, seq_len)
    rng_key = (RNG_KEY, batch_size, seq_len)
    with (
        rng.including(rng.generators_of(step.module)),
        step.runtime.micro_batch(group=group, rng_key=rng_key, active_blocks=active_blocks),
    ):
        step.step(batch)


def _run(
    step: Step,
    batch_size: int,
    seq_len: int,
    group: SPGroup,
    *,
    scale: float,
    active_blocks: int | None,
) -> _Outputs:
    """Loss, whole hidden states after the last block, gradients of this rank."""
    batch = step.batch(batch_size, seq_len)
    rng_key = (RNG_KEY, batch_size, seq_len)
    named = _trainable(step.module)
    _drop_gradients(step.module)
    order: list[int] = []
    with (
        rng.including(rng.generators_of(step.module)),
        step.runtime.micro_batch(group=group, rng_key=rng_key, active_blocks=active_blocks),
        _last_output([stack.stack.blocks[-1] for stack in step.runtime.stacks]) as outputs,
    ):
        loss = step.step(batch)
        if loss.requires_grad:
            with _noting_order([parameter for _, parameter in named], order):
                (loss * (scale / group.size)).backward()  # type: ignore[no-untyped-call]
        if not outputs:
            raise RuntimeError("The training step did not call the last of the repeated blocks.")
        hidden = step.runtime.whole_hidden(outputs[-1])
    sketch = sketch_gradients([parameter for _, parameter in named]) if order else None
    _drop_gradients(step.module)
    return _Outputs(
        loss=float(loss.detach()),
        hidden=hidden,
        gradients=sketch,
        backward_order=tuple(dict.fromkeys(order)),
    )


def _drop_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def _trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


@contextmanager
def _noting_order(parameters: Sequence[nn.Parameter], order: list[int]) -> Iterator[None]:
    """Append the index of each parameter whose gradient is complete, as the backward goes on."""

    def note(index: int, _: torch.Tensor) -> None:
        order.append(index)

    handles = []
    for index, parameter in enumerate(parameters):
        register: Any = parameter.register_post_accumulate_grad_hook
        handles.append(register(partial(note, index)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _last_output(blocks: Sequence[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """Collect the blocks' outputs as the rest of the model sees them: gathered, without padding."""
    outputs: list[torch.Tensor] = []

    def keep(_: nn.Module, __: Any, output: object) -> None:
        hidden = hidden_states(output)
        if hidden is not None:
            outputs.append(hidden.detach())

    # Registered last, so that it runs after the hook that gathers.
    handles = [block.register_forward_hook(keep) for block in blocks]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _without_chance(module: nn.Module) -> None:
    """Evaluation mode, but for normalisations that mix all positions while they train."""
    module.eval()
    for part in module.modules():
        # The synchronised kind waits for ranks that may have no part in this.
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.train(not isinstance(part, nn.SyncBatchNorm))
        # With running statistics it mixes positions while it trains only.
        if isinstance(part, nn.modules.instancenorm._InstanceNorm):
            part.train()
        # cuDNN's have a backward pass in training mode only.
        if isinstance(part, nn.RNNBase):
            part.train()
            part.dropout = 0.0


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


def _moved(step: Step, coarsest: torch.dtype, run: Callable[[], _Outputs]) -> _Outputs:
    """What comes out with all parameters off by one unit in the last place.

    Sharded kernels sum in another order. What that does to the outputs depends on the depth and
    the type. Parameters that are a little off do more, and show how it grows.
    """
    with preserve(step.module):
        _move(step.module, _epsilon(coarsest))
        return run()


def _tolerance(coarsest: torch.dtype, whole: _Outputs, moved: _Outputs) -> float:
    """What rounding can make of the outputs."""
    rounding = max(_difference(moved, whole), _relative(moved.loss, whole.loss))
    return min(_LARGEST_TOLERANCE, max(_LEAST_TOLERANCES[coarsest], rounding))


def _loss_scale(coarsest: torch.dtype) -> float:
    return _SCALE_OF_FLOAT16 if coarsest is torch.float16 else 1.0


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
    if outputs.hidden.shape != reference.hidden.shape:
        return math.inf
    # Padded positions may well be NaN; both runs agree about them, or the loss shows it.
    return relative_difference(outputs.hidden, reference.hidden)


def _relative(value: float, reference: float) -> float:
    if math.isnan(value) and math.isnan(reference):
        return 0.0
    if value == reference:
        return 0.0
    return abs(value - reference) / max(abs(reference), 1e-12)

"""Does the model compute the same from packed samples as from padded ones? Asked before training.

Attention stays inside each sample whatever the model is, but a block may mix positions otherwise,
and a model may count positions itself: packed, it would silently train on something else. So two
real samples of different lengths run forward and backward once padded, as the user collates them,
and once packed; loss and gradients are compared.

It is also found out whether the model shifts labels by one itself. Then the first label of each
sample must not be predicted from the sample before, and is ignored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dcp.parallel.segments import pack
from lightning_dcp.profiling.sharding_check import _drop_gradients, _wake, _without_chance
from lightning_dcp.profiling.trial import RNG_KEY, Gather, Step

__all__ = ["PackingMismatch", "check_packing", "samples_to_check"]

#: Relative differences of loss and gradients that rounding explains. Samples that mix, or positions
#: that go on, make a difference of a tenth and more.
_TOLERANCES = {
    torch.float64: 1e-8,
    torch.float32: 2e-3,
    torch.float16: 5e-2,
    torch.bfloat16: 1e-1,
}
#: A gradient that is zero but for rounding has no scale of its own.
_LEAST_SHARE = 0.01
_SHORT, _RATIO = 16, 1.5

#: (batch, lengths) of samples; what the packing collate makes.
PackedSamples = tuple[Any, Sequence[int]]


class PackingMismatch(RuntimeError):
    """The model computes something else from packed samples; the text says what and what to do."""


@dataclass(frozen=True)
class _Outputs:
    loss: float
    gradients: dict[str, torch.Tensor]


def samples_to_check(lengths: Sequence[int]) -> tuple[int, int]:
    """Two samples of different lengths, if there are any, that are short but not tiny."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    first = next((i for i in order if lengths[i] >= _SHORT), order[len(order) // 2])
    longer = [i for i in order if lengths[i] >= _RATIO * lengths[first]]
    second = longer[0] if longer else order[-1] if order[-1] != first else order[0]
    if lengths[second] == lengths[first] and lengths[order[0]] != lengths[first]:
        second = order[0]
    return first, second


def check_packing(
    step: Step,
    *,
    samples: Sequence[Any],
    padded: Callable[[list[Any]], Any],
    packed: Callable[[list[Any], bool], PackedSamples],
    compute_dtype: torch.dtype,
    gather: Gather,
) -> bool:
    """Compare packed with padded, dropout off; call it inside :func:`.preserve`.

    The module is left in evaluation mode with its parameters changed, as by the check of sharding.

    Args:
        step: The user's side. ``make_batch`` is not used.
        samples: Real ones, the same on all ranks.
        padded: Collates samples as the user does, and moves the batch to the device.
        packed: Packs samples, with the first label of each ignored or not, and moves the batch.
        compute_dtype: Type that blocks compute in.
        gather: Objects of all ranks in rank order, on every rank.

    Returns:
        Whether the first label of each sample has to be ignored.

    Raises:
        PackingMismatch: On all ranks, if neither way computes what padded samples do.
    """
    _without_chance(step.module)
    _wake(step.module)
    dtypes = {compute_dtype, *(p.dtype for p in step.module.parameters())}
    tolerance = max(_TOLERANCES.get(dtype, 0.0) for dtype in dtypes)
    wanted = _run(step, padded(copy.deepcopy(list(samples))), None)
    found = []
    for mark_borders in (False, True):
        try:
            batch, lengths = packed(copy.deepcopy(list(samples)), mark_borders)
            outcome = _compare(_run(step, batch, lengths), wanted, tolerance)
        except Exception as error:  # noqa: BLE001 (whatever the model does not stand is a reason)
            outcome = math.inf, f"the training step fails with {type(error).__name__}: {error}"
        found.append(max(gather(outcome)))  # ranks must agree: the worst of all counts
    # The closer one: in half precision a wrong border label can be within the tolerance.
    (error_of_all, reason), mark_borders = min(
        (outcome, bool(i)) for i, outcome in enumerate(found)
    )
    if not reason and error_of_all <= tolerance:
        return mark_borders
    raise PackingMismatch(
        f"packing=True: the model does not compute the same from two packed samples as from the "
        f"same two padded: {reason}. The usual reasons: positions are counted in the model (take "
        f"them from the batch's `position_ids`, which restart at 0 in each sample); `collate_fn` "
        f"does more than pad (labels must be shifted in the data set, or in the model); something "
        f"else than attention mixes positions, such as a convolution; padding is not masked; the "
        f"loss is not a mean over tokens; the blocks do not get one sequence (1, tokens, ...). "
        f"Change that, pack samples as the model needs them in `pack_samples` of "
        f"lightning_dcp.DCPDataModuleMixin, or train with packing=False."
    )


def _run(step: Step, batch: Any, lengths: Sequence[int] | None) -> _Outputs:
    group = step.group(1)
    assert group is not None, "every rank is a group of one"
    _drop_gradients(step.module)
    with step.runtime.micro_batch(group=group, rng_key=(RNG_KEY, 0)):
        pack(lengths)
        loss = step.step(batch)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    # On the CPU: a second set of gradients may not fit onto the device.
    gradients = {
        name: parameter.grad.detach().to("cpu", torch.float64)
        for name, parameter in step.module.named_parameters()
        if parameter.grad is not None
    }
    _drop_gradients(step.module)
    return _Outputs(float(loss.detach()), gradients)


def _compare(found: _Outputs, wanted: _Outputs, tolerance: float) -> tuple[float, str]:
    """Relative error of all gradients together, and what differs by more than rounding, if any."""
    loss_error = abs(found.loss - wanted.loss) / max(abs(wanted.loss), 1e-12)
    if found.gradients.keys() != wanted.gradients.keys():
        names = sorted(found.gradients.keys() ^ wanted.gradients.keys())
        return math.inf, f"{names[0]} has a gradient in one of the two cases only"
    whole = sum(float(g.square().sum()) for g in wanted.gradients.values())
    off = sum(
        float((g - wanted.gradients[name]).square().sum()) for name, g in found.gradients.items()
    )
    error_of_all = max(loss_error, (off / max(whole, 1e-60)) ** 0.5)
    if math.isnan(wanted.loss):
        return math.inf, "there is nothing to compare, as the loss is NaN (have they labels?)"
    if math.isnan(error_of_all):
        return math.inf, f"the loss is {found.loss:.8g} instead of {wanted.loss:.8g}"
    return error_of_all, _difference(found, wanted, loss_error, tolerance)


def _difference(found: _Outputs, wanted: _Outputs, loss_error: float, tolerance: float) -> str:
    if not loss_error <= tolerance:
        return f"the loss is {found.loss:.8g} instead of {wanted.loss:.8g}"
    norms = {name: float(gradient.norm()) for name, gradient in wanted.gradients.items()}
    least = _LEAST_SHARE * sum(norm**2 for norm in norms.values()) ** 0.5
    for name, gradient in found.gradients.items():
        error = float((gradient - wanted.gradients[name]).norm()) / max(norms[name], least, 1e-30)
        if not error <= tolerance:
            return f"the gradient of {name} differs by {error:.1e} (rounding: {tolerance:.0e})"
    return ""

"""Comparing the gradients of all parameters without keeping them twice.

Of each gradient only its products with two random vectors are kept, which are the same in every run
and on every rank. They are linear: summed over ranks they are the products of the summed gradient.
Two gradients that differ by d differ in such a product by about the norm of d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dcp.parallel.topology import SPGroup

__all__ = ["GradientSketch", "sketch_gradients", "wrong_gradients"]

_NUM_VECTORS = 2
_CHUNK = 1 << 20  # elements that are multiplied at a time
# A gradient that is zero but for rounding (of the keys' bias in attention) has no scale of its own.
_LEAST_SHARE = 0.01
# Rounding of two runs may differ by so much from that of two others.
_SPREAD = 8.0
_LARGEST_ERROR = 0.2


@dataclass(frozen=True, kw_only=True)
class GradientSketch:
    """What is kept of the gradients of P parameters.

    Attributes:
        products: (P, 2) float64.
        norms: (P,) float64, of this rank's gradients.
    """

    products: Tensor
    norms: Tensor

    def summed(self, group: SPGroup) -> GradientSketch:
        """The same of the gradients summed over the group; a collective. Norms stay as they are."""
        if group.process_group is None:
            return self
        products = self.products.clone()
        dist.all_reduce(products, group=group.process_group)
        return replace(self, products=products)


def sketch_gradients(parameters: Sequence[nn.Parameter]) -> GradientSketch:
    """Of what is in ``grad`` now; a gradient that is not there is zero."""
    device = parameters[0].device
    products = torch.zeros(len(parameters), _NUM_VECTORS, dtype=torch.float64, device=device)
    norms = torch.zeros(len(parameters), dtype=torch.float64, device=device)
    generator = torch.Generator(device)
    for index, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is None:
            continue
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        generator.manual_seed(index)  # the same vectors in every run
        flat = gradient.detach().flatten()
        norms[index] = torch.linalg.vector_norm(flat, dtype=torch.float64)
        for chunk in torch.split(flat, _CHUNK):
            vectors = torch.randn(
                _NUM_VECTORS, chunk.numel(), generator=generator, device=device
            ).double()
            products[index] += (vectors * chunk.double()).sum(1)
    return GradientSketch(products=products, norms=norms)


def wrong_gradients(
    sharded: GradientSketch,
    whole: GradientSketch,
    moved: GradientSketch,
    tolerance: float,
) -> dict[int, float]:
    """Parameters whose gradients differ by more than rounding, with their relative errors.

    Args:
        sharded: Summed over the SP group.
        whole: Of one rank alone.
        moved: The same with all parameters off by a rounding error.
        tolerance: What rounding explains, relative.
    """
    scale = torch.maximum(whole.norms, _LEAST_SHARE * torch.linalg.vector_norm(whole.norms))
    difference = (sharded.products - whole.products).abs().amax(1)
    rounding = _SPREAD * (moved.products - whole.products).abs().amax(1)
    allowed = torch.maximum(tolerance * scale, rounding.nan_to_num())
    allowed = torch.minimum(allowed, _LARGEST_ERROR * scale)
    # `not <=`: a NaN on one side only is a difference too. Overflow in both runs tells nothing.
    known = whole.products.isfinite().all(1)
    wrong = known & ~(difference <= allowed)
    errors = (difference / scale.clamp_min(torch.finfo(torch.float64).tiny)).tolist()
    return {int(index): errors[int(index)] for index in wrong.nonzero().flatten()}

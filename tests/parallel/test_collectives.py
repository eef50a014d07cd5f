"""Exchanges and their gradients against what they mean for the whole sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dcp.parallel import SPGroup, Topology
from lightning_dcp.parallel.collectives import (
    gather_sequence,
    heads_to_sequence,
    sequence_to_heads,
    slice_sequence,
)
from tests.worlds import World


@pytest.fixture(scope="module")
def world():
    with World(4) as world:
        yield world


def group_of(rank: int) -> SPGroup:
    topology = Topology(4, rank)
    topology.create_groups()
    return topology.group(0, 4)


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


def exchange(rank: int) -> None:
    """Heads for tokens and back, tensors of different sizes in one exchange."""
    group, n = group_of(rank), 3
    own = slice(rank * n, rank * n + n)
    whole_q, whole_k = tensor(2, 8, 12, 5), tensor(2, 4, 12, 7, seed=1)
    q = whole_q[..., own, :].clone().requires_grad_()
    k = whole_k[..., own, :].clone().requires_grad_()
    out_q, out_k = heads_to_sequence([q, k], group)
    assert torch.equal(out_q, whole_q[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(out_k, whole_k[:, rank : rank + 1])
    # The loss is a sum over all ranks' parts, weighted: its gradient is the weight.
    weight_q, weight_k = tensor(2, 8, 12, 5, seed=2), tensor(2, 4, 12, 7, seed=3)
    loss = (out_q * weight_q[:, 2 * rank : 2 * rank + 2]).sum()
    (loss + (out_k * weight_k[:, rank : rank + 1]).sum()).backward()
    assert torch.equal(q.grad, weight_q[..., own, :])
    assert torch.equal(k.grad, weight_k[..., own, :])

    back = sequence_to_heads(out_q.detach().requires_grad_(), group)
    assert torch.equal(back, q)
    (mixed,) = heads_to_sequence([tensor(8, 3, 5, dtype=torch.bfloat16)], group)
    assert mixed.shape == (2, 12, 5)
    a, b = heads_to_sequence([q, k.to(torch.float32)], group)  # as autocast may leave them
    assert (a.dtype, b.dtype) == (torch.float64, torch.float32)


def second_derivative(rank: int) -> bool:
    group = group_of(rank)
    x = tensor(4, 2, 3, seed=rank).requires_grad_()

    def through(x: Tensor) -> Tensor:
        return sequence_to_heads(heads_to_sequence([x], group)[0] ** 3, group)

    (first,) = torch.autograd.grad(through(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return torch.allclose(second, 6 * x)


def gather(rank: int, length: int) -> None:
    group, n = group_of(rank), 3
    whole = tensor(2, length, 5)
    padded = torch.cat([whole, whole.new_full((2, 12 - length, 5), float("nan"))], 1)
    own = padded[:, rank * n : rank * n + n].clone().requires_grad_()
    gathered = gather_sequence(own, 1, group, length)
    assert torch.equal(gathered, whole)
    assert gathered.is_contiguous()
    (gathered * tensor(2, length, 5, seed=rank)).sum().backward()
    # Every rank's loss depends on this rank's tokens; nothing comes back to padding.
    total = sum(tensor(2, length, 5, seed=r) for r in range(4))
    expected = torch.cat([total, torch.zeros(2, 12 - length, 5)], 1)[:, rank * n : rank * n + n]
    torch.testing.assert_close(own.grad, expected, rtol=1e-15, atol=1e-15)


def take_own(rank: int, length: int, dim: int) -> None:
    group, n = group_of(rank), 3
    whole = tensor(*([length, 2] if dim == 0 else [2, length]), 5).requires_grad_()
    own = slice_sequence(whole, dim, group, n)
    tokens = [min(rank * n + i, length - 1) for i in range(n)]
    assert torch.equal(own, whole.index_select(dim, torch.tensor(tokens)))
    assert own.is_contiguous()
    assert own.requires_grad  # on a rank of padding only too: its collectives must run
    own.sum().backward()
    real = [i for i in range(rank * n, rank * n + n) if i < length]
    expected = torch.zeros_like(whole).index_fill_(dim, torch.tensor(real, dtype=torch.long), 1.0)
    assert torch.equal(whole.grad, expected)


def indices(rank: int) -> list[int]:
    return slice_sequence(torch.arange(5), 0, group_of(rank), 2).tolist()


def test_exchange(world):
    world.run(exchange)


def test_second_derivative(world):
    assert all(world.run(second_derivative))


@pytest.mark.parametrize("length", [12, 10, 2])
def test_gather_sums_in_the_backward(world, length):
    world.run(gather, length)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("length", [12, 10, 2])
def test_slice(world, length, dim):
    world.run(take_own, length, dim)


def test_padding_of_indices_is_valid(world):
    assert world.run(indices) == [[0, 1], [2, 3], [4, 4], [4, 4]]


def half_precision_sum(rank: int) -> bool:
    group = group_of(rank)
    own = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    (gather_sequence(own, 0, group, 8) / 4).sum().backward()
    return torch.equal(own.grad, torch.ones_like(own))


def test_half_precision(world):
    assert all(world.run(half_precision_sum))

"""Packed micro-batches at the runtime's level: each sample computes what it computes alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa_imported_early
from torch.utils.checkpoint import checkpoint

from lightning_dcp.parallel import BlockRuntime, Topology, attention, find_blocks
from lightning_dcp.parallel.segments import pack, packed_lengths
from tests.worlds import World

LENGTHS = [7, 1, 12, 3, 9]
WIDTH, HEADS, KV_HEADS = 16, 4, 2
CALLS = ("F", "early", "ours", "mha", "softcap", "gqa", "mask", "key mask", "checkpoint")


class Block(nn.Module):
    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call
        self.norm = nn.LayerNorm(WIDTH)
        num_kv = KV_HEADS if call == "gqa" else HEADS
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, n * WIDTH // HEADS) for n in (HEADS, num_kv, num_kv)
        )
        self.out = nn.Linear(WIDTH, WIDTH)
        if call == "mha":
            self.mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.norm(x) + positions
        if self.call == "mha":
            assert mask is not None
            return x + self.mha(h, h, h, attn_mask=mask, is_causal=True, need_weights=False)[0]
        if self.call == "checkpoint":
            return x + checkpoint(self.attend, h, mask, use_reentrant=False)
        return x + self.attend(h, mask)

    def attend(self, h: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (f(h).unflatten(-1, (-1, WIDTH // HEADS)).mT for f in (self.q, self.k, self.v))
        q, k, v = (x.permute(0, 3, 1, 2) for x in (q, k, v))
        function: Any = {"early": sdpa_imported_early, "ours": attention, "softcap": attention}.get(
            self.call, F.scaled_dot_product_attention
        )
        options: dict[str, Any] = (
            {"attn_mask": mask} if "mask" in self.call else {"is_causal": True}
        )
        if self.call == "gqa":
            options["enable_gqa"] = True
        if self.call == "softcap":
            options["softcap"] = 0.5
        out = function(q, k, v, **options)
        return self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, call: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call = call
        self.blocks = nn.ModuleList(Block(call) for _ in range(3))
        self.pool = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        n = x.shape[1]
        mask = None
        if self.call == "mha":  # True: masked
            mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        elif self.call == "mask":  # distances as ALiBi has them, of each head, and causal
            steps = torch.arange(n, dtype=x.dtype)
            later = torch.ones(n, n, dtype=torch.bool).triu(1)
            slopes = torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=x.dtype)[:, None, None]
            mask = (slopes * (steps - steps[:, None])).masked_fill(later, float("-inf"))[None]
        elif self.call == "key mask":
            mask = x[..., 0].sigmoid()[:, None, None, :]
        inner = torch.sin(positions)[..., None].expand(*x.shape)
        for block in self.blocks:
            x = block(x, inner) if mask is None else block(x, inner, mask)
        q = self.pool(x)[:, None]
        return x + F.scaled_dot_product_attention(q, q, x[:, None])[:, 0]


def samples() -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(1, n, WIDTH, dtype=torch.double, generator=generator) for n in LENGTHS]
    return xs, [torch.arange(n, dtype=torch.double)[None] for n in LENGTHS]


def loss_of(out: Tensor) -> Tensor:
    return (out**3).mean(-1).sum() / 10


def one_by_one(call: str) -> dict[str, Tensor]:
    model = Model(call)
    for x, positions in zip(*samples(), strict=True):
        loss_of(model(x, positions)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def together(
    rank: int, call: str, sp_size: int, recompute: int, segments: list[int] | None = LENGTHS
) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    model = Model(call)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    topology = Topology(world, rank)
    topology.create_groups()
    runtime = BlockRuntime(find_blocks(model, "blocks"), topology)
    runtime.attach()
    runtime.packing = True
    xs, positions = samples()
    try:
        for n in (4, 6):
            with runtime.micro_batch(group=topology.group(rank, 1), observe=True):
                model(torch.randn(1, n, WIDTH).double(), torch.arange(n)[None].double())
        group = topology.group(rank // sp_size * sp_size, sp_size)
        with runtime.micro_batch(group=group, recompute_blocks=recompute):
            pack(segments)
            out = model(torch.cat(xs, 1), torch.cat(positions, 1))
            (loss_of(out) / sp_size).backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        if sp_size > 1:
            for grad in grads.values():
                torch.distributed.all_reduce(grad, group=group.process_group)
        return grads
    finally:
        runtime.detach()
        topology.destroy()


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    # the gradient of a key's bias is zero but for rounding
    return max(
        float((found[n] - wanted[n]).norm() / wanted[n].norm())
        for n in wanted
        if wanted[n].norm() > 1e-12
    )


@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize("call", CALLS)
def test_one_rank(call: str, recompute: int) -> None:
    assert error(together(0, call, 1, recompute), one_by_one(call)) <= 1e-12


def test_without_segments_samples_mix() -> None:
    assert error(together(0, "F", 1, 0, None), one_by_one("F")) > 1e-3


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=100) as world:
        yield world


@pytest.mark.parametrize("sp_size", [2, 4])
@pytest.mark.parametrize("call", ["F", "early", "mha", "softcap", "mask", "checkpoint"])
def test_shared_by_ranks(world: World, call: str, sp_size: int) -> None:
    wanted = one_by_one(call)
    for found in world.run(together, call, sp_size, 1):
        assert error(found, wanted) <= 1e-12


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no running micro-batch"):
        pack([1, 2])
    assert packed_lengths(3, 3) is None
    topology = Topology(1, 0)
    runtime = BlockRuntime(find_blocks(Model("F"), "blocks"), topology)
    runtime.attach()
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 8, 4)
    with runtime.micro_batch(group=topology.group(0, 1)):
        with pytest.raises(ValueError, match="at least one token"):
            pack([3, 0])
        pack([2, 3])
        with pytest.raises(ValueError, match=r"5 queries to 8 keys in a packed .* packing=False"):
            attention(q, k, k)
        attention(k, k, k)  # a sequence of its own: the model's
    runtime.detach()

"""FlexAttention under sharding: by any name, with score and mask modifications of the whole."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lightning_dcp.parallel import BlockRuntime, Topology, find_blocks
from lightning_dcp.parallel.flex import dense_flex_attention
from tests.parallel.models import worst_error
from tests.worlds import World

WIDTH, HEADS = 16, 4
CODE_OF_TORCH = flex_attention.__code__
# As a model does when it is imported.
compiled = torch.compile(flex_attention)
compiled_whole = torch.compile(flex_attention, fullgraph=True)
FORMS: dict[str, Any] = {
    "early": lambda: flex_attention,
    "module": lambda: flex_module.flex_attention,
    "compiled": lambda: compiled,
    "compiled whole": lambda: compiled_whole,
}


def block_mask(length: int, lengths: Tensor, heads: int | None) -> Any:
    """Causal, without padding; with ``heads`` each head sees one token more of the past."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (q >= k) & (k < lengths[b])
        return seen & (q - k <= h + 2) if heads else seen

    return create_block_mask(mask_mod, len(lengths), heads, length, length, device="cpu")


class FlexBlock(nn.Module):
    def __init__(self, kv_heads: int, form: str, uses: str) -> None:
        super().__init__()
        self.kv_heads, self.form, self.uses = kv_heads, form, uses
        size = WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * kv_heads) * size)
        self.slopes = nn.Parameter(torch.rand(HEADS))  # of each head

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        size, kv = WIDTH // HEADS, self.kv_heads
        q, k, v = (
            t.unflatten(-1, (-1, size)).transpose(1, 2)
            for t in self.qkv(x).split([WIDTH, kv * size, kv * size], -1)
        )

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score - self.slopes[h] * (q - k).abs()

        options: dict[str, Any] = {"enable_gqa": kv != HEADS, "block_mask": mask}
        if self.uses != "mask":
            options["score_mod"] = score_mod
        out = FORMS[self.form]()(q, k, v, return_lse=self.uses == "lse", **options)
        if self.uses == "lse":
            out = out[0] * torch.sigmoid(out[1][..., None])
        return x + out.transpose(1, 2).flatten(2)


class FlexModel(nn.Module):
    def __init__(self, heads: int | None = None, **block: Any) -> None:
        super().__init__()
        self.heads = heads
        self.blocks = nn.ModuleList(FlexBlock(**block) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.linspace(x.shape[1], 1, len(x)).long()
        mask = block_mask(x.shape[1], lengths, self.heads)
        for block in self.blocks:
            x = block(x, mask)
        real = torch.arange(x.shape[1]) < lengths[:, None]
        return self.head(x)[real].square().mean()


def flex_error(
    rank: int, sp_sizes: list[int], recompute_blocks: int, **options: Any
) -> tuple[float, str]:
    warnings.simplefilter("ignore")  # torch's, of what it does not compile
    topology = Topology(4, rank)
    topology.create_groups()
    torch.manual_seed(3)
    model = FlexModel(**options).double()
    runtime = BlockRuntime(find_blocks(model), topology)
    runtime.attach()
    worst = (0.0, "")
    for shape in [(2, 13), (3, 3), (1, 16)]:
        x = torch.randn(*shape, WIDTH, dtype=torch.float64)
        model.zero_grad()
        with runtime.micro_batch(group=topology.group(rank, 1), observe=True):
            model(x).backward()
        reference = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
        }
        for sp_size in sp_sizes:
            group = topology.group(rank - rank % sp_size, sp_size)
            model.zero_grad()
            with runtime.micro_batch(group=group, recompute_blocks=recompute_blocks):
                (model(x) / sp_size).backward()
            error, name = worst_error(model, reference, group)
            worst = max(worst, (error, f"{name} at p={sp_size}, {shape}"))
    assert runtime.attention_heads == {(HEADS, options["kv_heads"])}
    assert flex_attention.__code__ is CODE_OF_TORCH
    return worst


@pytest.fixture(scope="module")
def world():
    with World(4) as world:
        yield world


CASES = {
    "early, score_mod": {"form": "early", "kv_heads": 4, "uses": "score"},
    "module's name, lse": {"form": "module", "kv_heads": 4, "uses": "lse"},
    "compiled, grouped": {"form": "compiled", "kv_heads": 2, "uses": "score"},
    "compiled whole, mask of each head": {
        "form": "compiled whole",
        "kv_heads": 4,
        "uses": "mask",
        "heads": HEADS,
    },
    "one key head, all of it": {"form": "early", "kv_heads": 1, "uses": "lse", "heads": HEADS},
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(world, name):
    for error, where in world.run(flex_error, [2, 4], 0, **CASES[name]):
        assert error <= 1e-12, where


def test_recomputed(world):
    for error, where in world.run(flex_error, [4], 1, **CASES["compiled, grouped"]):
        assert error <= 1e-12, where


@pytest.mark.filterwarnings("ignore:.*flex_attention.*")
@pytest.mark.parametrize("heads", [None, HEADS])
def test_dense_equals_torch(heads):
    q = torch.randn(2, HEADS, 13, 8)
    k, v = torch.randn(2, 2, 2, 13, 8)
    slopes = torch.rand(HEADS)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score - slopes[h] * (q - k).abs()

    mask = block_mask(13, torch.tensor([13, 6]), heads)
    arguments = (q, k, v, score_mod, mask, 0.3, True, True)
    for ours, torchs in zip(
        dense_flex_attention(*arguments), flex_attention(*arguments), strict=True
    ):
        torch.testing.assert_close(ours, torchs)


def test_no_row_is_nan():
    """A query that sees no key gives zeros, and no gradient."""
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    mask = create_block_mask(lambda b, h, q, k: q > k, 1, 1, 4, 4, device="cpu")
    out = dense_flex_attention(q, k, v, block_mask=mask)
    out.sum().backward()
    assert not out[0, 0, 0].any()
    assert not q.grad[0, 0, 0].any()
    assert bool(torch.isfinite(k.grad).all())

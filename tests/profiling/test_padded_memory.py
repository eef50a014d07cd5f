"""Bytes of padded batches, in which models make a mask that a sample alone does not need."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dcp.data.datamodule import MicroBatchMaker
from lightning_dcp.parallel import BlockRuntime, Topology, find_stacks
from lightning_dcp.planning import CostModel
from lightning_dcp.profiling.memory_meter import MemoryMeter
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.profiling.profiler import profile_costs

CPU = torch.device("cpu")
WIDTH, HEADS, NUM_BLOCKS = 16, 2, 5
#: Most batches of nearest lengths are of one length, as with short samples of a large data set.
LENGTHS = np.repeat([16, 20, 26, 30, 45, 50, 64, 78, 90, 120, 200, 380, 400], 6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        qkv = self.qkv(self.norm(hidden_states)).unflatten(-1, (3, HEADS, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        return hidden_states + F.gelu(self.out(mixed.transpose(1, 2).flatten(2)))


class Masking(nn.Module):
    """As transformers do: plain causal attention without padding, a mask (B, 1, S, S) with it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 12)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        real, length = batch["real"], batch["real"].shape[1]
        mask = None
        if not bool(real.all()):
            mask = torch.ones(length, length, dtype=torch.bool).tril() & real[:, None, None]
        x = self.embedding(batch["tokens"])
        for block in self.layers:
            x = block(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["tokens"].flatten())


def collate(samples: list[Tensor]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)
    return {"tokens": tokens.clamp(min=0), "real": tokens >= 0}


@pytest.fixture(scope="module")
def model() -> Masking:
    torch.manual_seed(0)
    return Masking().train()


@pytest.fixture(scope="module")
def runtime(model: Masking) -> BlockRuntime:
    made = BlockRuntime(find_stacks(model), Topology(1, 0))
    made.attach()
    return made


@pytest.fixture(scope="module")
def costs(model: Masking, runtime: BlockRuntime) -> CostModel:
    samples = [torch.ones(int(n), dtype=torch.long) for n in LENGTHS]
    # Never two samples of more than 120 tokens: what they need is known from shorter ones.
    options = ProfilingOptions(budget_s=30.0, repeats=1, lengths=(20, 45, 90, 120))
    profile = profile_costs(
        step=model.loss,
        module=model,
        runtime=runtime,
        make_batch=MicroBatchMaker(samples, LENGTHS, collate),
        lengths=LENGTHS,
        topology=runtime.topology,
        options=options,
        device=CPU,
        fixed_bytes=0,
        progress=False,
    )
    runtime.load_observations(profile)
    return profile.cost_model()


def held_bytes(model: Masking, runtime: BlockRuntime, lengths: list[int], r: int) -> int:
    meter = MemoryMeter(model, runtime.blocks, CPU, 0)
    meter.start_iteration()
    batch = collate([torch.ones(n, dtype=torch.long) for n in lengths])
    group = runtime.topology.group(0, 1)
    with runtime.micro_batch(group=group, recompute_blocks=r), meter.forward((), r):
        model.loss(batch)
    return meter.peak_bytes


@pytest.mark.parametrize("r", [0, 2])
@pytest.mark.parametrize(
    "lengths",
    [[45], [400], [26, 20], [64, 50, 45], [78, 50], [200, 120], [200] * 3 + [120], [400, 380]],
)
def test_no_less_is_predicted_than_is_held(
    model: Masking, runtime: BlockRuntime, costs: CostModel, lengths: list[int], r: int
) -> None:
    predicted = int(costs.memory_bytes(len(lengths), max(lengths), 1, r))
    held = held_bytes(model, runtime, lengths, r)
    assert held <= (1 + costs.memory_error) * predicted
    # Nor much more: a mask is not charged to those that have none.
    assert predicted <= 1.15 * held
    assert costs.memory_error < 0.1

"""Data sets, collate functions and planners for the data tests; top level, so that they pickle."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from lightning_dcp.planning.cost_model import CostModel, Measurement, fit_cost_model
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.planning.plan import MicroBatch, Plan
from lightning_dcp.planning.planner import EpochPlanner


def some_lengths(num_samples: int = 40, seed: int = 0, longest: int = 64) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.maximum(1, (longest ** rng.random(num_samples)).astype(np.int64))


class TokenDataset(Dataset):
    """Sample `i` is `lengths[i]` times the number `i`."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = [int(n) for n in lengths]
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        self.num_reads += 1
        return torch.full((self.lengths[index],), index)


class BatchedTokens(TokenDataset):
    """Offers `__getitems__`, as Hugging Face data sets do; single reads are a mistake."""

    def __getitem__(self, index: int) -> Tensor:
        raise AssertionError("samples were read one by one")

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [torch.full((self.lengths[i],), i) for i in indices]


class RowDataset:
    """Looks like a Hugging Face data set with no library behind it. Records what is read."""

    def __init__(self, columns: dict[str, list[Any]], log: list[Any] | None = None) -> None:
        self.columns = columns
        self.log: list[Any] = [] if log is None else log
        self.format = {"type": None}

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return next(len(cells) for cells in self.columns.values() if cells != "unreadable")

    def select_columns(self, names: list[str]) -> RowDataset:
        return RowDataset({name: self.columns[name] for name in names}, self.log)

    def __getitem__(self, key: Any) -> Any:
        for name, cells in self.columns.items():
            self.log.append((name, key))
            assert cells != "unreadable"
        return {name: cells[key] for name, cells in self.columns.items()}


def pad_with_minus_one(samples: list[Tensor]) -> dict[str, Any]:
    """Remembers which process and worker it ran in, and how many samples it was given."""
    info = get_worker_info()
    return {
        "tokens": torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1),
        "worker": -1 if info is None else info.id,
        "process": os.getpid(),
        "num_samples": len(samples),
    }


def ids_in(batch: dict[str, Any]) -> tuple[int, ...]:
    """Sample ids of a batch of `TokenDataset`."""
    return tuple(batch["tokens"][:, 0].tolist())


class RoundRobinPlanner:
    """Deals shuffled samples to ranks in micro-batches of up to three; the last one idles once."""

    def __init__(self, lengths: Sequence[int], world_size: int, num_iterations: int = 4) -> None:
        self.lengths = np.asarray(lengths)
        self.world_size = world_size
        self.num_iterations = num_iterations

    def epoch(self, epoch: int) -> list[Plan]:
        order = np.random.default_rng([3, epoch]).permutation(len(self.lengths))
        plans = []
        for iteration, ids in enumerate(np.array_split(order, self.num_iterations)):
            ranks = range(max(1, self.world_size - (iteration == 0)))
            micro_batches = []
            for place, start in enumerate(range(0, len(ids), 3)):
                chosen = tuple(int(i) for i in ids[start : start + 3])
                lengths = self.lengths[list(chosen)]
                micro_batches.append(
                    MicroBatch(
                        sample_ids=chosen,
                        seq_len=int(lengths.max()),
                        num_tokens=int(lengths.sum()),
                        first_rank=ranks[place % len(ranks)],
                        sp_size=1,
                        recompute_blocks=0,
                        est_time_s=1.0,
                        est_bytes=1,
                    )
                )
            plans.append(Plan(epoch, iteration, self.world_size, tuple(micro_batches)))
        return plans


def transformer_costs(world_size: int) -> CostModel:
    """Costs of an imagined transformer of 4 blocks, measured at a few points per SP size."""
    measurements = []
    for p in [2**i for i in range(world_size.bit_length()) if 2**i <= world_size]:
        for b, s in [(1, 16), (1, 64), (2, 64), (4, 32), (1, 256), (2, 256), (8, 64), (1, 1024)]:
            work = b * s / p * (1e-6 + 2e-9 * s) + 2e-5 * (p > 1)
            memory = 2000.0 * b * s / p
            measurements.append(
                Measurement(b, s, p, work, 2 * work, work, memory, memory / 10, memory / 5)
            )
    return fit_cost_model(measurements, num_blocks=4, fixed_bytes=10**6, step_overhead_s=1e-4)


def make_planner(
    lengths: Sequence[int],
    world_size: int,
    *,
    batch_size: int = 2,
    memory_limit_bytes: int = 10**8,
    sp_size_exclusions: dict[int, str] | None = None,
    **options: Any,
) -> EpochPlanner:
    """A real planner for `transformer_costs`."""
    return EpochPlanner(
        lengths=np.asarray(lengths),
        cost_model=transformer_costs(world_size),
        world_size=world_size,
        batch_size=batch_size,
        memory_limit_bytes=memory_limit_bytes,
        sp_size_exclusions=sp_size_exclusions,
        options=PlanningOptions(**options),
    )

"""No example model holds more than is predicted, whatever b, s, p and r.

What is held is counted twice: what autograd saves, as profile and `MemoryMeter` do on a CPU, and
every storage alive at any moment of forward and backward, as an allocator would.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.worlds import World

CPU = torch.device("cpu")
#: Losses, moments and other small things, of which there are as many whatever the batch.
SCALARS = 1024
#: Of each example: batch sizes, what its model and its data are made with.
EXAMPLES: dict[str, tuple[tuple[int, ...], dict[str, int], dict[str, int]]] = {
    "stdlib_lm": ((1, 2, 4), {"channels": 16, "depth": 3}, {"num_samples": 60, "max_length": 400}),
    "hf_causal_lm": (
        (1, 2, 4),
        {"hidden_size": 16, "num_layers": 3},
        {"num_samples": 60, "max_length": 400},
    ),
    "video_stdit": ((1, 2), {"channels": 16}, {"num_clips": 40, "max_frames": 8, "max_side": 4}),
    "protein_pair": ((1, 2), {"channels": 8}, {"num_chains": 40, "max_length": 24}),
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2, timeout_s=100) as world:
        yield world


def measured_as_on_cuda(rank: int, name: str) -> dict[str, Any]:
    """The same with a profile that asks an allocator, played by the counter of live storages."""
    from lightning_dcp.profiling.live_bytes import LiveStorages
    from lightning_dcp.profiling.probe import StepProbe
    from lightning_dcp.profiling.trial import TrialRunner

    counters: list[LiveStorages] = []
    make, one_pass = StepProbe.__init__, TrialRunner._one_pass

    def make_probe(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self._count_bytes:
            self._on_cuda, self._counts_on_host = True, False

    def counted_pass(self: Any, *args: Any, count_bytes: bool) -> Any:
        with LiveStorages() as counter:
            counters.append(counter)
            return one_pass(self, *args, count_bytes=count_bytes)

    def reset_peak(_: Any) -> None:
        counters[-1].peak = counters[-1].now

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepProbe, "__init__", make_probe)
        patch.setattr(TrialRunner, "_one_pass", counted_pass)
        patch.setattr(torch.cuda, "synchronize", lambda _: None)
        patch.setattr(torch.cuda, "memory_allocated", lambda _: counters[-1].now)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda _: counters[-1].peak)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", reset_peak)
        return measured(rank, name)


def measured(rank: int, name: str) -> dict[str, Any]:
    """Predicted and measured bytes of every (b, s, p, r) of the grid."""
    import importlib

    from lightning_dcp.data.datamodule import MicroBatchMaker
    from lightning_dcp.data.lengths import resolve_lengths
    from lightning_dcp.parallel import BlockRuntime, Topology, find_stacks
    from lightning_dcp.parallel.huggingface import prepare_models
    from lightning_dcp.profiling.byte_limit import ByteLimit
    from lightning_dcp.profiling.memory_meter import MemoryMeter
    from lightning_dcp.profiling.options import ProfilingOptions
    from lightning_dcp.profiling.profiler import profile_costs
    from lightning_dcp.strategies.agreement import gather_objects

    batch_sizes, of_model, of_data = EXAMPLES[name]
    example = importlib.import_module(f"examples.{name}")
    modules = {
        "stdlib_lm": ("StdlibLM", "StdlibData"),
        "hf_causal_lm": ("CausalLM", "TextData"),
        "video_stdit": ("VideoDiffusion", "ShapesData"),
        "protein_pair": ("ContactModel", "ChainData"),
    }[name]
    torch.manual_seed(0)
    model, data = getattr(example, modules[0])(**of_model), getattr(example, modules[1])(**of_data)
    model.log = lambda *_, **__: None
    model.train()
    data.setup("fit")
    loader = data.train_dataloader()
    lengths = resolve_lengths(loader.dataset, datamodule=data, show_progress=False)
    topology = Topology(2, rank)
    topology.create_groups()
    prepared = prepare_models(model, sharded=True, ignore_index=-100)
    runtime = BlockRuntime(find_stacks(model), topology)
    runtime.attach()
    alone = max(batch_sizes) == 2  # samples of unlike shapes are not batched
    make = MicroBatchMaker(loader.dataset, lengths, loader.collate_fn, equal_lengths=alone)

    def step(batch: Any) -> torch.Tensor:
        output = model.training_step(batch, 0)
        return output["loss"] if isinstance(output, dict) else output

    fixed_bytes = sum(2 * p.numel() * p.element_size() for p in model.parameters())
    profile = profile_costs(
        step=step,
        module=model,
        runtime=runtime,
        make_batch=make,
        lengths=lengths,
        topology=topology,
        options=ProfilingOptions(budget_s=1.5, repeats=1),
        device=CPU,
        fixed_bytes=fixed_bytes,
        sp_sizes=(1, 2),
        gather=gather_objects,
        progress=False,
        self_check=False,
    )
    runtime.load_observations(profile)
    costs = profile.cost_model()
    rows = []
    limit = ByteLimit(CPU, 2**40, fixed_bytes)
    for p in costs.sp_sizes:
        group = topology.group(rank // p * p, p)
        for b in batch_sizes:
            for s in sorted({int(n) for n in (min(lengths), sorted(lengths)[30], max(lengths))}):
                batch = make(b, s)
                for r in sorted({0, 1, costs.num_blocks}):
                    meter = MemoryMeter(model, runtime.blocks, CPU, fixed_bytes)
                    context = runtime.micro_batch(group=group, recompute_blocks=r)
                    with context, limit.held():
                        with meter.forward((), r, p):
                            loss = step(batch)
                        loss.backward()
                        del loss
                    predicted = int(costs.memory_bytes(b, s, p, r))
                    # Gradients are there already, as from the second micro-batch on.
                    rows.append((b, s, p, r, predicted, meter.peak_bytes, limit.used_bytes))
    if prepared is not None:
        prepared.undo()
    runtime.detach()
    return {"rows": rows, "error": costs.memory_error, "fixed": fixed_bytes}


def check(results: list[dict[str, Any]], column: int) -> None:
    assert {row[2] for row in results[0]["rows"]} >= {1}
    for result in results:
        for row in result["rows"]:
            most = (1 + result["error"]) * (row[4] - result["fixed"]) + SCALARS
            assert row[column] - result["fixed"] <= most, row[:4]


#: The others take a minute together.
QUICK = ("protein_pair",)
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in EXAMPLES]


@pytest.mark.parametrize("name", NAMES)
def test_no_less_is_predicted_than_autograd_holds(world: World, name: str) -> None:
    check(world.run(measured, name), 5)


@pytest.mark.parametrize("name", NAMES)
def test_no_less_is_predicted_than_an_allocator_sees(world: World, name: str) -> None:
    """By the path that reads it on CUDA: temporaries, gradients and the backward pass count."""
    check(world.run(measured_as_on_cuda, name), 6)

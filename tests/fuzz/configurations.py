"""From one integer to a training run: model, data, world, strategy, options of all kinds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from tests.fuzz.models import CAUSAL, HUGGING_FACE, ONE_AXIS, ModelSpec

__all__ = ["Configuration", "configuration"]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One run, plain values only.

    Attributes:
        model: what is trained.
        lengths: of the training samples, in tokens (of two axes, before rounding).
        val_lengths: of the samples that are validated on; empty: none are.
        world_size: number of ranks.
        strategy: by name.
        planning: options of the planner.
        options: further ones of the strategy.
        memory_fraction: bytes for activations, as a share of what the longest sample takes on one
            rank with nothing recomputed; None: whatever the machine has.
        loader: arguments of the DataLoader.
        trainer: arguments of the Trainer.
        communication: how dear the modelled communication is; plans hold few shared micro-batches
            where it is large.
    """

    seed: int
    model: ModelSpec
    lengths: tuple[int, ...]
    val_lengths: tuple[int, ...]
    world_size: int
    strategy: str
    planning: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    memory_fraction: float | None = None
    loader: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    communication: float = 0.1

    @property
    def double(self) -> bool:
        """Whether all is computed in float64: not by DeepSpeed under the library's own models."""
        return not (self.strategy == "dcp" and self.model.kind in HUGGING_FACE)


def draw_lengths(draw: random.Random, least: int) -> list[int]:
    """Of one of several shapes."""
    number = draw.choice([draw.randint(1, 4), draw.randint(5, 15), draw.randint(16, 40)])
    longest = draw.choice([12, 30, 60])
    shape = draw.choice(["equal", "ones", "giant", "uniform", "skewed", "skewed", "two"])
    if shape == "equal":
        lengths = [draw.randint(1, longest)] * number
    elif shape == "ones":
        lengths = [1] * number
    elif shape == "giant":
        lengths = [draw.randint(1, 6) for _ in range(number)]
        lengths[draw.randrange(number)] = draw.randint(60, 120)
    elif shape == "uniform":
        lengths = [draw.randint(1, longest) for _ in range(number)]
    elif shape == "two":
        lengths = [draw.choice([2, longest]) for _ in range(number)]
    else:
        lengths = [1 + int(longest * draw.random() ** 3) for _ in range(number)]
    return [max(least, n) for n in lengths]


def draw_model(draw: random.Random, seed: int) -> ModelSpec:
    kind = draw.choice([*ONE_AXIS, *ONE_AXIS, *HUGGING_FACE, "two_axes", "two_stacks"])
    heads = draw.choice([1, 2, 3, 4, 5, 6, 8])
    # Not two or four features: a norm of those is nearly a step, which magnifies rounding.
    width = heads * 2 * draw.randint(-(-6 // (2 * heads)), 6 if heads < 4 else 2)
    depth = draw.randint(1 if draw.random() < 0.1 else 2, 4)
    masked, unlabelled = draw.choice([0.0, 0.3, 0.7]), draw.choice([0.0, 0.0, 0.3])
    if kind in ("two_axes", "two_stacks"):
        masked = unlabelled = 0.0
    mean_over = draw.choice(["tokens", "tokens", "samples", "reported"])
    if kind not in ONE_AXIS:
        mean_over = draw.choice(["tokens", "reported"])
    frozen = draw.choice(["nothing", "nothing", "embedding", "first", "but_adapters"])
    if kind not in ONE_AXIS:
        frozen = "nothing"
    return ModelSpec(
        kind=kind,
        width=width,
        heads=heads,
        depth=depth,
        frozen=frozen,
        labels_masked=masked,
        unlabelled=0.0 if mean_over == "samples" else unlabelled,
        mean_over=mean_over,
        optimizer=draw.choice(["sgd", "momentum", "adamw"]),
        tiled=kind in ONE_AXIS and mean_over != "samples" and draw.random() < 0.2,
        seed=seed,
    )


def draw_planning(draw: random.Random, lengths: list[int], world_size: int) -> dict[str, Any]:
    planning: dict[str, Any] = {
        "policy": draw.choice(
            ["dcp-intra", "dcp-intra", "dcp-inter", "global-batch", "bucket", "packed"]
        )
    }
    total = sum(lengths)
    if planning["policy"] != "global-batch" and draw.random() < 0.3:
        planning["tokens_per_step"] = draw.randint(1, max(1, total))
    if draw.random() < 0.2:
        planning["min_accumulation"] = draw.randint(1, 3)
    if draw.random() < 0.2:
        least = planning.get("min_accumulation", 1)
        planning["max_accumulation"] = draw.randint(least, least + 4)
    if draw.random() < 0.3:
        planning["max_batch_size"] = draw.randint(1, 4)
    if draw.random() < 0.3:
        sizes = [p for p in (1, 2, 4) if p <= world_size]
        planning["sp_sizes"] = sorted(draw.sample(sizes, draw.randint(1, len(sizes))))
    if draw.random() < 0.2:
        longest = max(lengths)
        inner = sorted({draw.randint(1, longest) for _ in range(draw.randint(0, 3))} - {0})
        planning["bucket_edges"] = sorted({0, *inner, longest + 1})
    if draw.random() < 0.2:
        planning["max_buckets"] = draw.randint(1, 4)
    if draw.random() < 0.2:
        planning["pad_multiple"] = draw.choice([2, 3, 8])
    if draw.random() < 0.3:
        planning["seed"] = draw.randint(0, 10)
    return planning


def configuration(seed: int) -> Configuration:
    """The run of a seed; valid by construction, save for what memory cannot hold."""
    draw = random.Random(seed)
    model = draw_model(draw, seed)
    lengths = draw_lengths(draw, 2 if model.kind in ("llama", "gpt2") else 1)
    world_size = draw.choice([1, 2, 3, 4, 4, 4])
    strategy = draw.choice(["dcp", "dcp_ddp", "dcp_ddp", "dcp_fsdp"])
    planning = draw_planning(draw, lengths, world_size)
    options: dict[str, Any] = {}
    if model.kind == "two_axes":
        planning["max_batch_size"] = 1
        options["loss_average"] = "tokens"
    elif model.mean_over == "samples":
        options["loss_average"] = "samples"
    elif draw.random() < 0.3:
        options["loss_average"] = "tokens"
    if model.kind in ONE_AXIS and draw.random() < 0.25:
        options["packing"] = True
        planning.pop("pad_multiple", None)
        if model.mean_over == "samples":
            model = replace(model, mean_over="tokens")
            options.pop("loss_average")
    elif (
        model.kind in (*CAUSAL, "llama", "gpt2")
        and model.mean_over == "tokens"
        and draw.random() < 0.3
    ):
        options["shard"] = "inputs"
        if model.kind in CAUSAL:
            options["input_dims"] = {"tokens": 1, "labels": 1, "position_ids": 1}
    if model.kind in ("llama", "gpt2"):
        options["tiled_loss"] = draw.choice([True, False, "auto"])
    if draw.random() < 0.4:
        options["self_check"] = False
    memory_fraction = None
    if draw.random() < 0.5:
        memory_fraction = draw.choice([0.8, 1.0, 1.5, 3.0])
        kinds = ["error", "error", "skip"]
        if model.kind not in ("two_axes", "two_stacks"):
            kinds.append("truncate")
        planning["on_too_long"] = draw.choice(kinds)
        if planning["on_too_long"] != "error":
            memory_fraction = draw.choice([0.3, 0.5, 0.8, 1.0])
    loader: dict[str, Any] = {
        "batch_size": draw.choice([1, 2, 3, 5]),
        "shuffle": draw.random() < 0.6,
        "num_workers": 2 if draw.random() < 0.08 else 0,
    }
    trainer: dict[str, Any] = {"max_epochs": draw.choice([1, 1, 2])}
    if draw.random() < 0.3:
        trainer["gradient_clip_val"] = draw.choice([0.01, 0.1, 1.0])
    val_lengths: tuple[int, ...] = ()
    if draw.random() < 0.4:
        val_lengths = tuple(draw.choice(lengths) for _ in range(draw.randint(1, 7)))
        if draw.random() < 0.5:
            trainer["num_sanity_val_steps"] = 0
    if planning.get("on_too_long", "error") != "error":
        val_lengths = ()  # of which some would be left out as well
    return Configuration(
        seed=seed,
        model=model,
        lengths=tuple(lengths),
        val_lengths=val_lengths,
        world_size=world_size,
        strategy=strategy,
        planning=planning,
        options=options,
        memory_fraction=memory_fraction,
        loader=loader,
        trainer=trainer,
        communication=draw.choice([0.01, 0.1, 1.0]),
    )

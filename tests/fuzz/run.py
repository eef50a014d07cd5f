"""Runs a configuration on its ranks and in one process, and compares the two.

Seconds of the cost profile are modelled, bytes are measured: plans do not depend on how busy the
machine is, and micro-batches are shared by ranks although the models are tiny.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from tests.fuzz.configurations import Configuration
from tests.fuzz.models import Collate, FuzzData, FuzzModule
from tests.strategies.hand_planned import STRATEGIES, DoublePrecision, Watch
from tests.strategies.toys import whole

__all__ = ["Difference", "Outcome", "check", "train"]

#: Relative, per parameter: one step, and what a run of steps makes of it.
_STEP, _RUN = 1e-11, 1e-9
#: Where ZeRO-1 has float32 master weights, or all is in float32.
_SINGLE = 2e-4


class Difference(AssertionError):
    """The ranks did not do what one process does."""


@dataclasses.dataclass
class Outcome:
    """What came of a configuration: trained and compared, or refused."""

    refused: str | None = None
    steps: int = 0
    shared: int = 0  # micro-batches of several ranks
    recomputed: int = 0
    idle: int = 0  # ranks without a micro-batch, over all steps
    micro_batches: int = 0
    not_trained: int = 0  # samples left out or cut
    worst: float = 0.0


class FuzzWatch(Watch):
    """Also the plans, what is logged at each step, and the sizes of gradients at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[Any] = []
        self.steps: list[float] = []
        self.validated: list[float] = []
        self.samples: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        report = trainer.strategy.last_report
        self.plans.append(report.plan)
        # Not there before the first iteration in which anything bears loss.
        self.steps.append(float(trainer.callback_metrics.get("loss_step", 0.0)))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.samples.append(float(trainer.callback_metrics["samples_epoch"]))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(float(trainer.callback_metrics.get("val_loss", 0.0)))


@contextmanager
def modelled_seconds(communication: float) -> Iterator[None]:
    """The profile's bytes are what was measured; its seconds follow a formula."""
    from lightning_dcp.strategies import measuring

    measured = measuring.profile_costs

    def formula(m: Any) -> dict[str, float]:
        tokens = m.batch_size * m.seq_len / m.sp_size
        send = communication * 1e-4 * (m.sp_size > 1) * (1 + 0.01 * tokens)
        work = 1e-5 * (tokens + tokens * m.seq_len / 30)
        return {"forward_s": 2e-5 + work + send, "backward_s": 4e-5 + 2 * work + 2 * send}

    def modelled(**kwargs: Any) -> Any:
        profile = measured(**kwargs)
        changed = []
        for m in profile.measurements:
            others = tuple(
                dataclasses.replace(other, **(formula(m) if other.forward_s else {}))
                for other in m.others
            )
            rest = 1e-5 * (3 + m.batch_size * m.seq_len)
            changed.append(dataclasses.replace(m, **formula(m), rest_s=rest, others=others))
        return dataclasses.replace(profile, measurements=tuple(changed), step_overhead_s=1e-4)

    measuring.profile_costs = modelled
    try:
        yield
    finally:
        measuring.profile_costs = measured


def activation_bytes(module: FuzzModule, data: FuzzData) -> int:
    """What the longest sample keeps for the backward pass on one rank."""
    longest = max(range(len(data)), key=lambda i: data.sequence_lengths[i])
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = cast(Collate(module.spec)([data[longest]]), module)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = module.loss(batch)
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    del loss
    return sum(size for key, size in held.items() if key not in parameters)


def cast(batch: dict[str, Any], module: FuzzModule) -> dict[str, Any]:
    """Data of two axes are in float64."""
    dtype = next(module.parameters()).dtype
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def is_refusal(error: BaseException) -> bool:
    """Whether this package said in its own words that it cannot be done."""
    if not isinstance(error, MisconfigurationException | ValueError | TypeError):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")).startswith("lightning_dcp")


def train(rank: int, config: Configuration, folder: str) -> dict[str, Any]:
    """`fit` on this rank."""
    module = FuzzModule(config.model, double=config.double)
    data = FuzzData(config.model, config.lengths)
    collate = Collate(config.model)
    planning = dict(config.planning)
    strategy_class = STRATEGIES[config.strategy]
    try:
        if config.memory_fraction is not None:
            fixed = fixed_bytes(config, module)
            room = int(config.memory_fraction * activation_bytes(module, data))
            planning["memory_limit_bytes"] = fixed + room
        strategy = strategy_class(
            planning=PlanningOptions(**planning),
            profiling=ProfilingOptions(budget_s=0.3, repeats=1, cache_dir=folder),
            **config.options,
        )
    except (ValueError, TypeError, MisconfigurationException) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    watch = FuzzWatch()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=config.world_size,
        callbacks=[watch],
        plugins=[DoublePrecision()] if config.strategy == "dcp" and config.double else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **config.trainer,
    )
    loader = DataLoader(data, collate_fn=collate, **config.loader)
    val = None
    if config.val_lengths:
        val = DataLoader(
            FuzzData(config.model, config.val_lengths, offset=500),
            batch_size=1 if config.model.kind == "two_axes" else 2,
            collate_fn=collate,
        )
    try:
        with modelled_seconds(config.communication):
            trainer.fit(module, loader, val)
            planner = strategy.planner
    except Exception as error:
        if is_refusal(error):
            return {"refused": f"{type(error).__name__}: {error}"}
        raise
    return {
        "refused": None,
        "gradients": watch.gradients if rank == 0 else [],
        "losses": watch.losses,
        "steps": watch.steps,
        "samples": watch.samples,
        "validated": watch.validated,
        "plans": watch.plans,
        "seen": module.seen,
        "parameters": {n: whole(p.detach()) for n, p in module.named_parameters()},
        "global_step": trainer.global_step,
        "skipped": planner.skipped_ids,
        "truncate_to": planner.truncate_to,
    }


def fixed_bytes(config: Configuration, module: FuzzModule) -> int:
    """As the strategies count them."""
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    return 5 * size if config.strategy == "dcp_ddp" else 4 * size + 12 * size // 4


# ---- one process ---------------------------------------------------------------------------------


def of_one_process(config: Configuration, result: dict[str, Any]) -> dict[str, Any]:
    """The samples of each step one by one, the mean over all of their elements."""
    module = FuzzModule(config.model, double=config.double).train()
    if config.strategy == "dcp" and config.double:
        module.float().double()  # from float32 master weights
    data, collate = FuzzData(config.model, config.lengths), Collate(config.model)
    optimizer = module.configure_optimizers()
    gradients, losses = [], []
    for plan in result["plans"]:
        optimizer.zero_grad()
        losses.append(step_of(config, module, data, collate, plan, result["truncate_to"]))
        if losses[-1] is None:
            # Nothing bears loss: gradients are zero. DESIGN: momentum and decay go on.
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            losses[-1] = 0.0
        if config.strategy == "dcp":
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        gradients.append(
            {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        )
        clip = config.trainer.get("gradient_clip_val")
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return {
        "gradients": gradients,
        "losses": losses,
        "parameters": {n: p.detach() for n, p in module.named_parameters()},
        "validated": validated(config, module) if config.val_lengths else None,
    }


def step_of(
    config: Configuration, module: Any, data: Any, collate: Any, plan: Any, truncate_to: int | None
) -> float | None:
    """Backward of one step; its loss, None where nothing bears loss."""
    total: Any = None
    count = 0
    for i in (i for m in plan.micro_batches for i in m.sample_ids):
        sample = data[i]
        if truncate_to is not None:
            sample = {k: v[:truncate_to] if isinstance(v, Tensor) else v for k, v in sample.items()}
        batch = cast(collate([sample]), module)
        weight = module.weight(batch)
        if weight:
            part = module.loss(batch) * weight
            total = part if total is None else total + part
            count += weight
    if total is None:
        return None
    loss = total / count
    module.backward(loss)
    return float(loss.detach())


@torch.no_grad()
def validated(config: Configuration, module: Any) -> float:
    data, collate = FuzzData(config.model, config.val_lengths, offset=500), Collate(config.model)
    module.eval()
    total, count = 0.0, 0
    for i in range(len(data)):
        batch = cast(collate([data[i]]), module)
        weight = module.weight(batch)
        if weight:
            total, count = total + float(module.loss(batch)) * weight, count + weight
    return total / count if count else 0.0


# ---- comparison ----------------------------------------------------------------------------------


def check(config: Configuration, results: list[dict[str, Any]]) -> Outcome:
    """Compare all ranks with one process.

    Raises:
        Difference: says in what.
    """
    refused = {r["refused"] for r in results}
    if len(refused) > 1:
        raise Difference(f"ranks were refused in different words: {refused}")
    if results[0]["refused"]:
        return Outcome(refused=results[0]["refused"])
    first = results[0]
    plans = first["plans"]
    for rank, result in enumerate(results):
        for name in ("losses", "steps", "samples", "validated", "plans", "global_step"):
            if result[name] != first[name]:
                raise Difference(f"rank {rank} has other {name}: {result[name]} != {first[name]}")
        for name, value in first["parameters"].items():
            if not torch.equal(result["parameters"][name], value):
                raise Difference(f"rank {rank} has another {name}")
        # The last ones: profile and sanity check have run the step as well.
        wanted = [list(m.sample_ids) for p in plans for m in p.for_rank(rank)]
        if result["seen"] != wanted:
            raise Difference(f"rank {rank} ran {result['seen']}, planned was {wanted}")
    check_samples(config, first)
    wanted = of_one_process(config, first)
    worst = compare(config, first, wanted)
    micro_batches = [m for plan in plans for m in plan.micro_batches]
    cut = first["truncate_to"] or max(config.lengths)
    return Outcome(
        steps=len(plans),
        shared=sum(m.sp_size > 1 for m in micro_batches),
        recomputed=sum(m.recompute_blocks > 0 for m in micro_batches),
        idle=sum(not p.for_rank(r) for p in plans for r in range(config.world_size)),
        micro_batches=len(micro_batches),
        not_trained=len(first["skipped"]) + sum(n > cut for n in config.lengths),
        worst=worst,
    )


def check_samples(config: Configuration, first: dict[str, Any]) -> None:
    """Each sample once in each epoch."""
    epochs = config.trainer["max_epochs"]
    plans = first["plans"]
    wanted = sorted(set(range(len(config.lengths))) - set(first["skipped"]))
    if first["global_step"] != len(plans):
        raise Difference(f"{len(plans)} iterations, but {first['global_step']} steps")
    for epoch in range(epochs):
        ids = sorted(
            i for p in plans if p.epoch == epoch for m in p.micro_batches for i in m.sample_ids
        )
        if ids != wanted:
            raise Difference(f"epoch {epoch} has samples {ids}, not {wanted}")
    # Of slices of a batch each rank logs its own: a sum of what is whole counts it p times.
    whole_batches = config.options.get("shard") != "inputs"
    if whole_batches and first["samples"] != [float(len(wanted))] * epochs:
        raise Difference(f"logged {first['samples']} samples, not {len(wanted)} in each epoch")


def compare(config: Configuration, got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Largest relative error of a gradient at the first step."""
    step, run = (_STEP, _RUN) if config.double else (5e-6, _SINGLE)
    if config.strategy == "dcp":
        run = _SINGLE
    worst = gradient_error("step 0", got["gradients"][0], wanted["gradients"][0], step)
    for k in range(1, len(got["gradients"])):
        gradient_error(f"step {k}", got["gradients"][k], wanted["gradients"][k], 10 * run)
    for name, logged in (("losses", got["losses"]), ("logged losses", got["steps"])):
        for k, (a, b) in enumerate(zip(logged, wanted["losses"], strict=True)):
            limit = run if config.double else 10 * run
            if name == "logged losses" and not config.double:
                limit = max(limit, 1e-5)
            if name == "logged losses" and no_loss(config, got, k):
                continue  # nobody logs where nothing bears loss: the value before stays
            if not abs(a - b) <= limit * abs(b) + 1e-12:
                raise Difference(f"{name} of step {k}: {a!r}, not {b!r}")
    gradient_error("the parameters", got["parameters"], wanted["parameters"], run)
    if wanted["validated"] is not None:
        a, b = got["validated"][-1], wanted["validated"]
        if not abs(a - b) <= max(run, 1e-6) * abs(b) + 1e-12:
            raise Difference(f"validation loss {a!r}, not {b!r}")
    return worst


def no_loss(config: Configuration, got: dict[str, Any], step: int) -> bool:
    """Whether no element of a step bears loss."""
    data, collate = FuzzData(config.model, config.lengths), Collate(config.model)
    plan = got["plans"][step]
    if config.model.kind == "two_axes" or config.model.mean_over == "samples":
        return False
    for i in (i for m in plan.micro_batches for i in m.sample_ids):
        labels = collate([data[i]])["labels"]
        labels = labels[:, : got["truncate_to"]] if got["truncate_to"] else labels
        if config.model.kind in ("llama", "gpt2"):
            labels = labels[:, 1:]
        if bool((labels != -100).any()):
            return False
    return True


def gradient_error(
    what: str, got: dict[str, Tensor], wanted: dict[str, Tensor], limit: float
) -> float:
    """Largest of |got - wanted| / |wanted|, in norms; of rounding only, absolute."""
    if got.keys() != wanted.keys():
        raise Difference(f"{what}: only one has {sorted(got.keys() ^ wanted.keys())}")
    largest = max((float(g.norm()) for g in wanted.values()), default=0.0)
    worst = 0.0
    for name, value in wanted.items():
        norm = float(value.norm())
        error = float((got[name].double() - value.double()).norm())
        relative = error / (norm + 1e-3 * largest + 1e-30)
        if not relative <= limit:
            raise Difference(
                f"{what}: {name} differs by {relative:.3g} (relative; norm {norm:.3g})"
            )
        worst = max(worst, relative)
    return worst

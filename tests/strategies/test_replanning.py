"""Other plans for the running epoch: nothing lost, nothing doubled, everything follows."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.planning.planner import EpochPlanner
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from lightning_dcp.strategies.deepspeed import DCPStrategy
from lightning_dcp.strategies.reliability import ReliabilityOptions
from tests.strategies.toys import Sequences, ToyLM, pad
from tests.worlds import World

LENGTHS = [int(x) for x in 1 + 60 * torch.rand(64, generator=torch.Generator().manual_seed(1)) ** 3]
STRATEGIES: dict[str, Any] = {"dcp": DCPStrategy, "dcp_ddp": DCPDDPStrategy}
BARS: dict[str, Any] = {"tqdm": TQDMProgressBar, "rich": RichProgressBar}


class SeenLM(ToyLM):
    """Knows which samples it was given in which step; validates, too."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.seen: list[tuple[int, tuple[int, ...]]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.seen.append((self.trainer.global_step, tuple(batch["id"].tolist())))
        return super().training_step(batch, batch_idx)


def changed(planner: EpochPlanner, limit: int | None = None, **options: Any) -> EpochPlanner:
    """The same planner with another memory limit or other options."""
    given = {**vars(planner.options), **options}
    return EpochPlanner(
        lengths=planner._given_lengths,
        cost_model=planner.cost_model,
        world_size=planner.world_size,
        memory_limit_bytes=planner.memory_limit_bytes if limit is None else limit,
        options=PlanningOptions(**given),
        batch_size=planner.batch_size,
        seed=planner.seed,
        shuffle=planner.shuffle,
        sample_order=planner.sample_order,
    )


def tight(planner: EpochPlanner, share: float = 0.5) -> EpochPlanner:
    """Less memory: between what the longest sample needs and what micro-batches take now."""
    costs, longest = planner.cost_model, int(planner.lengths.max())
    longest += -longest % planner.world_size
    least = costs.memory_bytes(1, longest, planner.world_size, costs.num_blocks)
    most = max(int(planner.epoch(0).memory_bytes.max()), int(least))
    return changed(planner, limit=int((1 - share) * 1.3 * least + share * most))


def slower(planner: EpochPlanner) -> EpochPlanner:
    """Costs that turned out otherwise, as drift would have it."""
    none = planner.corrections
    factors = tuple(1.0 + 2.0 * k for k in range(len(none.time_factors)))
    memory = (1.5,) * len(none.memory_factors)
    return planner.corrected(
        type(none)(bucket_edges=none.bucket_edges, time_factors=factors, memory_factors=memory)
    )


def few_fit(planner: EpochPlanner, on_too_long: str = "skip") -> EpochPlanner:
    """So little memory that only the shortest of the samples are left, or are not cut."""
    costs = planner.cost_model
    added = costs.memory_bytes(1, 1, 1, costs.num_blocks) - costs.fixed_bytes
    limit = int(costs.fixed_bytes + 1.5 * added)
    return changed(planner, limit=limit, on_too_long=on_too_long)


def none_fits(planner: EpochPlanner) -> EpochPlanner:
    """As if even the shortest were too long; in this epoch only."""
    found = tight(planner)
    found.skipped_ids = tuple(range(found.lengths.size))
    return found


CHANGES: dict[str, Any] = {
    "tight": tight,
    "slower": slower,
    "back": lambda planner: planner.corrected(type(planner.corrections).none(planner.bucket_edges)),
    "global-batch": lambda planner: changed(planner, policy="global-batch", tokens_per_step=None),
    "few fit": lambda planner: few_fit(planner),
    "none fits": lambda planner: none_fits(planner),
    "cut": lambda planner: few_fit(planner, "truncate"),
}


class Replan(L.Callback):
    """Calls `replace` where the strategy does, and watches what Lightning makes of it.

    Args:
        at: step -> name of the change that holds for the iterations after it.
    """

    def __init__(self, at: Mapping[int, str], save_at: Sequence[int], folder: str) -> None:
        self.at, self.save_at, self.folder = at, save_at, folder
        self.lengths: list[tuple[int, int]] = []
        self.totals: list[Any] = []
        self.last: list[int] = []
        self.validated: list[int] = []
        self.losses: list[float] = []
        self.digests: list[str] = []
        self.bounds: list[tuple[int, int]] = []
        self.workers: list[int] = []
        self.corrected: list[bool] = []
        self.others = len(multiprocessing.active_children())

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        strategy: Any = trainer.strategy
        backward = strategy.backward

        def backward_and_replace(*args: Any, **kwargs: Any) -> Any:
            loss = backward(*args, **kwargs)
            change = self.at.get(trainer.global_step)
            if change is not None:
                next_iteration = strategy.last_report.plan.iteration + 1
                planner = CHANGES[change](strategy.planner)
                strategy._replanner.replace(planner, next_iteration=next_iteration)
                assert strategy.planner is planner
                rest = strategy.train_sampler.rest
                self.digests.append(rest.plans.digest() if len(rest.plans) else "nothing")
            return loss

        strategy.backward = backward_and_replace

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        strategy: Any = trainer.strategy
        plan = strategy.last_report.plan
        most = max(m.est_bytes for m in plan.micro_batches)
        self.bounds.append((most, strategy.planner.usable_bytes))
        self.corrected.append(not strategy.planner.corrections.changes_nothing)
        loader: Any = trainer.train_dataloader
        self.lengths.append((len(loader), int(trainer.num_training_batches)))
        if trainer.is_last_batch:
            self.last.append(trainer.global_step)
        bar: Any = trainer.progress_bar_callback
        if bar is not None and trainer.is_global_zero:
            self.totals.append(bar.train_progress_bar.total)
        self.workers.append(len(multiprocessing.active_children()) - self.others)
        if trainer.global_step in self.save_at:
            trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}.ckpt")

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)


def train(
    rank: int,
    name: str,
    cache: str,
    *,
    at: Mapping[int, str],
    folder: str = "",
    save_at: Sequence[int] = (),
    workers: Mapping[str, Any] | None = None,
    planning: Mapping[str, Any] | None = None,
    validate: bool = False,
    bar: str | None = None,
    dropout: float = 0.0,
    batch_size: int = 4,
    max_epochs: int = 1,
    ckpt_path: str | None = None,
    callbacks: Sequence[L.Callback] = (),
    **trainer: Any,
) -> dict[str, Any]:
    """One `fit`, and what this rank saw of it."""
    model, replan = SeenLM(dropout), Replan(at, save_at, folder)
    run = L.Trainer(
        strategy=STRATEGIES[name](
            planning=PlanningOptions(**(planning or {})),
            profiling=ProfilingOptions(budget_s=1.5, repeats=1, cache_dir=cache),
            # Plans change where a test says so, and not where a rank had to wait for a processor.
            reliability=ReliabilityOptions(adapt_to_drift=False),
        ),
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        max_epochs=max_epochs,
        callbacks=[replan, *callbacks, *([] if bar is None else [BARS[bar]()])],
        logger=False,
        enable_progress_bar=bar is not None,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        **trainer,
    )
    data = DataLoader(
        Sequences(LENGTHS), batch_size=batch_size, collate_fn=pad, shuffle=True, **(workers or {})
    )
    held_out = DataLoader(Sequences([5, 9, 3]), batch_size=1, collate_fn=pad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(model, data, held_out if validate else None, ckpt_path=ckpt_path)
    return {
        "seen": model.seen,
        "steps": run.global_step,
        "left": len(multiprocessing.active_children()) - replan.others,
        "weights": {k: v.detach().numpy().copy() for k, v in model.named_parameters()},
        **{k: v for k, v in vars(replan).items() if isinstance(v, list) and k != "save_at"},
    }


def samples(results: Sequence[Mapping[str, Any]], first: int = 0, stop: int = 10**9) -> list[int]:
    """What was trained on between two steps, each as often as it was (SP groups count once)."""
    found = {
        (step, i) for r in results for step, ids in r["seen"] if first <= step < stop for i in ids
    }
    return sorted(i for _, i in found)


EVERYTHING = list(range(len(LENGTHS)))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2, timeout_s=110) as world:
        yield world


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


# ---- with ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "at", "options"),
    [
        pytest.param("dcp_ddp", {2: "tight"}, {"bar": "tqdm"}, marks=pytest.mark.slow),
        (
            "dcp_ddp",
            {1: "slower", 2: "tight", 8: "back", 15: "slower"},
            {"bar": "rich", "workers": {"num_workers": 2, "persistent_workers": True}},
        ),
        pytest.param(
            "dcp",
            {3: "tight"},
            {"workers": {"num_workers": 1}, "validate": True, "val_check_interval": 0.5},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no workers", "persistent workers, several times", "dcp, new workers, validation"],
)
def test_every_sample_once_in_as_many_iterations(
    world: World, cache: str, name: str, at: dict[int, str], options: dict[str, Any]
) -> None:
    """Two epochs of 8 iterations: plans change in the middle, at the start and at the end."""
    ranks = world.run(train, name, cache, at=at, max_epochs=2, **options)
    num_workers = options.get("workers", {}).get("num_workers", 0)
    for r in ranks:
        assert r["steps"] == 16
        assert r["lengths"] == [(8, 8)] * 16
        assert r["last"] == [8, 16]
        assert r["digests"] == ranks[0]["digests"] and len(r["digests"]) == len(at)
        assert r["workers"] == [num_workers] * 16 and r["left"] == 0
        assert r["validated"] == ([4, 8, 12, 16] if options.get("validate") else [])
        for key, weight in r["weights"].items():
            assert np.array_equal(weight, ranks[0]["weights"][key])
    assert ranks[0]["totals"] == ([8] * 16 if "bar" in options else [])
    assert samples(ranks, 0, 8) == EVERYTHING
    assert samples(ranks, 8) == EVERYTHING
    # By the new plans from the very next iteration on, and in the next epoch.
    first = next(step for step, change in at.items() if change == "tight") + 1
    before, after = ranks[0]["bounds"][:first], ranks[0]["bounds"][first : 8 if 8 in at else 16]
    assert all(most <= limit for most, limit in after)
    assert min(limit for _, limit in before[:-1]) > after[0][1], "it was another limit before"


def disagree(rank: int, cache: str, how: str) -> str:
    """What each rank is told where planners differ, or one cannot plan."""

    def different(planner: EpochPlanner) -> EpochPlanner:
        if how == "raises":
            planner.rest = _raise if rank else planner.rest  # type: ignore[method-assign]
            return planner
        return tight(planner) if rank else slower(planner)

    CHANGES["different"] = different
    with pytest.raises((RuntimeError, ValueError, MisconfigurationException)) as caught:
        train(rank, "dcp_ddp", cache, at={2: "different"})
    return f"{caught.type.__name__}: {caught.value}"


def _raise(*_: Any, **__: Any) -> Any:
    raise ValueError("no plan")


def test_ranks_that_disagree_end_together(world: World, cache: str) -> None:
    told = world.run(disagree, cache, "differs")
    assert told[0] == told[1]
    assert "MisconfigurationException" in told[0] and "the rest of the epoch" in told[0]
    assert "cost profile" in told[0] and "memory limit" in told[0] and "plans" in told[0]
    assert world.run(disagree, cache, "raises") == [
        "RuntimeError: Planning the rest of the epoch again failed on rank 1: ValueError: no plan",
        "ValueError: no plan",
    ]


def goes_on_bit_for_bit(run: Any, name: str, cache: str, folder: str, saves: list[int]) -> None:
    """Though the profile comes uncorrected from the cache."""
    common: dict[str, Any] = {"max_epochs": 2, "dropout": 0.2}
    whole = run(train, name, cache, at={2: "slower"}, save_at=saves, folder=folder, **common)
    for step in saves:
        path = f"{folder}/{step}.ckpt"
        rest = run(train, name, cache, at={}, ckpt_path=path, **common)
        for r, w in zip(rest, whole, strict=True):
            assert all(r["corrected"]) and r["steps"] == w["steps"]
            assert r["seen"] == [(s, ids) for s, ids in w["seen"] if s >= step]
            assert r["losses"] == w["losses"][step:]
            assert r["lengths"] == w["lengths"][step:]
            assert r["last"] == [s for s in w["last"] if s > step]
            for key, weight in w["weights"].items():
                assert np.array_equal(r["weights"][key], weight), key


def test_a_checkpoint_goes_on_by_the_same_plans(world: World, cache: str, tmp_path: Path) -> None:
    """Of the epoch whose plans have changed, and of the next one."""
    goes_on_bit_for_bit(world.run, "dcp", cache, str(tmp_path), [3, 11])


# ---- in one process ------------------------------------------------------------------------------


def test_a_checkpoint_of_one_process_goes_on(cache: str, tmp_path: Path) -> None:
    """Saved right after the change, at the end of the epoch, and in the next one."""

    def run(function: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [function(0, *args, **kwargs)]

    goes_on_bit_for_bit(run, "dcp_ddp", cache, str(tmp_path), [3, 16, 20])


def test_another_number_of_iterations(cache: str) -> None:
    """The loader's length, limits, validation and bar follow; the next epoch has its own."""
    r = train(
        0,
        "dcp_ddp",
        cache,
        at={5: "global-batch"},
        planning={"tokens_per_step": 100},
        max_epochs=2,
        bar="tqdm",
        validate=True,
    )
    old, new = r["lengths"][0][0], r["lengths"][6][0]
    done = len([i for step, ids in r["seen"] for i in ids if step < 6])
    assert new == 6 + -(-(64 - done) // 4) != old
    assert r["lengths"] == [(n, n) for n in [old] * 5 + [new] * (new - 5) + [16] * 16]
    assert r["totals"] == [n for n, _ in r["lengths"]]
    assert r["last"] == r["validated"] == [new, new + 16] and r["steps"] == new + 16
    assert samples([r], 0, new) == samples([r], new) == EVERYTHING


@pytest.mark.parametrize("num_workers", [0, 2])
def test_nothing_is_left_in_the_middle_of_an_epoch(cache: str, num_workers: int) -> None:
    """The iteration that runs becomes the last one; what workers have fetched is dropped."""
    r = train(
        0,
        "dcp_ddp",
        cache,
        at={5: "none fits"},
        max_epochs=2,
        bar="rich",
        validate=True,
        workers={"num_workers": num_workers, "persistent_workers": num_workers > 0},
    )
    assert r["lengths"] == [(n, n) for n in [16] * 5 + [6] + [16] * 16]
    assert r["last"] == r["validated"] == [6, 22] and r["totals"] == [n for n, _ in r["lengths"]]
    assert samples([r], 6) == EVERYTHING and r["left"] == 0


def test_fewer_samples_are_left_than_iterations(cache: str) -> None:
    r = train(0, "dcp_ddp", cache, at={5: "few fit"}, bar="tqdm")
    new = r["lengths"][-1][0]
    assert 6 < new < 16 and r["steps"] == new and r["last"] == [new]
    assert r["lengths"] == [(n, n) for n in [16] * 5 + [new] * (new - 5)]
    assert r["totals"] == [n for n, _ in r["lengths"]]
    taken = [i for step, ids in r["seen"] if step >= 6 for i in ids]
    assert len(taken) == new - 6  # one in each: there are as many iterations as samples
    assert len(samples([r])) == len(set(samples([r])))


def test_samples_of_another_length_are_refused(cache: str) -> None:
    with pytest.raises(ValueError, match="cut at another length: workers load them as"):
        train(0, "dcp_ddp", cache, at={2: "cut"})


@pytest.mark.parametrize(("limit", "num"), [(7, 7), (0.5, 8), (3, 3)])
def test_limit_train_batches_is_kept(cache: str, limit: float, num: int) -> None:
    r = train(
        0, "dcp_ddp", cache, at={2: "slower"}, max_epochs=2, limit_train_batches=limit, bar="rich"
    )
    assert r["lengths"] == [(16, num)] * (2 * num) and r["totals"] == [num] * (2 * num)
    assert r["last"] == [num, 2 * num]
    taken = samples([r], 0, num)
    assert len(taken) == len(set(taken))


def test_what_was_learnt_outlives_a_reload_of_the_loader(cache: str) -> None:
    r = train(
        0,
        "dcp_ddp",
        cache,
        at={20: "slower"},
        max_epochs=3,
        reload_dataloaders_every_n_epochs=1,
        workers={"num_workers": 1},
        planning={"memory_limit_bytes": 10**6},
    )
    assert r["corrected"] == [False] * 20 + [True] * 28
    assert r["lengths"] == [(16, 16)] * 48 and r["left"] == 0
    for epoch in range(3):
        assert samples([r], 16 * epoch, 16 * epoch + 16) == EVERYTHING


class FailAfterReplacing(L.Callback):
    """Fails between the change of plans and the end of the iteration, once."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(f"{self.folder}/failed.ckpt")
            raise KeyboardInterrupt


def test_an_iteration_that_fails_after_the_change_is_still_to_come(
    cache: str, tmp_path: Path
) -> None:
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train(0, "dcp_ddp", cache, at={5: "slower"}, callbacks=[FailAfterReplacing(str(tmp_path))])
    r = train(0, "dcp_ddp", cache, at={}, ckpt_path=str(tmp_path / "failed.ckpt"))
    before = train(0, "dcp_ddp", cache, at={})
    assert r["corrected"] == [True] * 11 and r["lengths"] == [(16, 16)] * 11
    assert sorted(samples([before], 0, 5) + samples([r])) == EVERYTHING

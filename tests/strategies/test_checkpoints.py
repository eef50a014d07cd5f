"""Checkpoints: one plain file for every strategy, with everything a resume needs."""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, TQDMProgressBar
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dcp.planning.drift import Corrections
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.checkpointing.files import read_zero_folder
from lightning_dcp.strategies.checkpointing.plan_state import PlanState
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from lightning_dcp.strategies.deepspeed import DCPStrategy
from lightning_dcp.strategies.fsdp import DCPFSDPStrategy
from tests.strategies.toys import Sequences, ToyLM, pad
from tests.worlds import World, WorldFailure

NUM_SAMPLES = 64  # a multiple of all ranks' batches: DDP repeats none
LENGTHS = [
    int(x)
    for x in 1 + 60 * torch.rand(NUM_SAMPLES, generator=torch.Generator().manual_seed(1)) ** 3
]
STRATEGIES = {"dcp": DCPStrategy, "dcp_ddp": DCPDDPStrategy, "dcp_fsdp": DCPFSDPStrategy}


class GroupsLM(ToyLM):
    """Two parameter groups, one with a frozen parameter; a loss that is a mean over samples."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout, mean_over="samples")
        self.save_hyperparameters()
        self.norm.bias.requires_grad_(False)
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.seen.append((self.trainer.global_step, batch["id"].tolist()))
        return self.losses(batch).mean()

    def configure_optimizers(self) -> Any:
        blocks = list(self.blocks.parameters())
        rest = [*self.embed.parameters(), *self.norm.parameters(), *self.head.parameters()]
        optimizer = torch.optim.AdamW(
            [{"params": blocks}, {"params": rest, "weight_decay": 0.0}], lr=self.lr
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class AdagradLM(GroupsLM):
    """An optimizer whose state is there from the start, with options of their own for groups."""

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        groups = [
            {"params": group["params"], "lr": lr}
            for group, lr in zip(configured["optimizer"].param_groups, (0.1, 0.01), strict=True)
        ]
        optimizer = torch.optim.Adagrad(groups, initial_accumulator_value=0.1)
        configured["lr_scheduler"]["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(
            optimizer, 0.5
        )
        return {**configured, "optimizer": optimizer}


class Losses(L.Callback):
    """The loss of each step over all ranks, and the checkpoints that are saved on the way."""

    def __init__(self, folder: str, save_at: Sequence[int]) -> None:
        self.folder, self.save_at = folder, save_at
        self.losses: list[float] = []
        self.lengths: list[float] = []
        self.bar: Any = None

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        loss = outputs["loss"].detach().double().clone()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        self.losses.append(float(loss))
        if trainer.global_step in self.save_at:
            trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.lengths.append(trainer.num_training_batches)
        bar = trainer.progress_bar_callback
        self.bar = bar.train_progress_bar.total if isinstance(bar, TQDMProgressBar) else None


class Lines(logging.Handler):
    """Collects what `rank_zero_info` says."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def strategy_of(name: str, cache: str, planning: dict[str, Any], **kwargs: Any) -> Any:
    if name not in STRATEGIES:
        return name
    return STRATEGIES[name](
        planning=PlanningOptions(**planning),
        profiling=ProfilingOptions(budget_s=1.5, repeats=1, cache_dir=cache),
        loss_average="samples",
        **kwargs,
    )


def train(
    rank: int,
    name: str,
    cache: str,
    folder: str,
    *,
    save_at: Sequence[int] = (),
    max_steps: int = -1,
    max_epochs: int | None = 1,
    planning: dict[str, Any] | None = None,
    batch_size: int = 2,
    num_samples: int = NUM_SAMPLES,
    num_workers: int = 0,
    dropout: float = 0.0,
    callbacks: Sequence[L.Callback] = (),
    model_class: type[GroupsLM] = GroupsLM,
    trainer: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    **fit: Any,
) -> dict[str, Any]:
    """One `fit`; what each rank saw of it."""
    recorder, lines, model = Losses(folder, save_at), Lines(), model_class(dropout)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(lines)
    run = L.Trainer(
        strategy=strategy_of(name, cache, planning or {}, **(strategy or {})),
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        max_epochs=max_epochs,
        max_steps=max_steps,
        callbacks=[recorder, *callbacks],
        logger=False,
        enable_progress_bar=any(isinstance(c, ProgressBar) for c in callbacks),
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        **(trainer or {}),
    )
    data = DataLoader(
        Sequences(LENGTHS[:num_samples]),
        batch_size=batch_size,
        collate_fn=pad,
        shuffle=True,
        num_workers=num_workers,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run.fit(model, data, **fit)
        finally:
            logger.removeHandler(lines)
    return {
        "losses": recorder.losses,
        "lengths": recorder.lengths,
        "bar": recorder.bar,
        "seen": model.seen,
        "steps": run.global_step,
        "epoch": run.current_epoch,
        "told": [line for line in lines.lines if line.startswith("DCP: epoch")],
        "warned": [str(w.message) for w in caught],
    }


def samples(results: Sequence[dict[str, Any]]) -> list[int]:
    """What all ranks saw, each sample as often as it was trained on (SP groups count once)."""
    pairs = {(step, i) for r in results for step, ids in r["seen"] for i in ids}
    return sorted(i for _, i in pairs)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=110) as world:
        yield world


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2, timeout_s=110) as world:
        yield world


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


# ---- one plain file ------------------------------------------------------------------------------

GLOBAL_BATCH = {"policy": "global-batch", "seed": 0}


@pytest.fixture(scope="module")
def ddp(world: World, cache: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A plain run of `ddp`, and its folder with a checkpoint after 3 steps of 8."""
    folder = str(tmp_path_factory.mktemp("ddp"))
    run = world.run(train, "ddp", cache, folder, save_at=[3], max_epochs=2)
    return folder, run[0]["losses"]


@pytest.mark.parametrize(
    "name", ["dcp", "dcp_ddp", pytest.param("dcp_fsdp", marks=pytest.mark.slow)]
)
def test_files_go_from_ddp_to_ours_and_back(
    world: World, cache: str, ddp: Any, name: str, tmp_path: Path
) -> None:
    """ddp saves after step 3, ours goes on and saves after step 8, ddp goes on from there."""
    folder, wanted = ddp
    assert len(wanted) == 16
    ours = world.run(
        train,
        name,
        cache,
        str(tmp_path),
        save_at=[5, 8],
        planning=GLOBAL_BATCH,
        ckpt_path=f"{folder}/3.ckpt",
        weights_only=True,
    )
    for r in ours:
        assert r["losses"] == pytest.approx(wanted[3:8], rel=2e-5)
        assert r["steps"] == 8 and not r["told"]
        assert not [w for w in r["warned"] if "not resumable" in w]
    same_layout(tmp_path / "8.ckpt", Path(folder) / "3.ckpt")
    back = world.run(
        train,
        "ddp",
        cache,
        str(tmp_path),
        max_epochs=2,
        ckpt_path=str(tmp_path / "8.ckpt"),
        weights_only=True,
    )
    assert back[0]["losses"] == pytest.approx(wanted[8:], rel=2e-5)
    one_process_goes_on(tmp_path)


def same_layout(ours: Path, theirs: Path) -> None:
    """The same names, numbers, shapes and types as in a file of `ddp`, all of them plain."""
    ours_, theirs_ = (torch.load(path, weights_only=True) for path in (ours, theirs))
    assert ours_.keys() - theirs_.keys() == {"lightning_dcp"}

    def layout(values: dict[str, Any]) -> dict[str, Any]:
        return {
            k: (v.shape, v.dtype, v.device) if isinstance(v, Tensor) else v
            for k, v in values.items()
        }

    assert layout(ours_["state_dict"]) == layout(theirs_["state_dict"])
    (own,), (plain,) = ours_["optimizer_states"], theirs_["optimizer_states"]
    assert own["param_groups"][0].keys() == plain["param_groups"][0].keys()
    for own_group, group in zip(own["param_groups"], plain["param_groups"], strict=True):
        assert own_group["params"] == group["params"]
    assert own["state"].keys() == plain["state"].keys()
    for number, state in plain["state"].items():
        assert {k: v[:2] for k, v in layout(own["state"][number]).items()} == {
            k: v[:2] for k, v in layout(state).items()
        }


def one_process_goes_on(folder: Path) -> None:
    """A file of 4 ranks in one process without ours, where nothing else of that run exists."""
    alone = folder / "elsewhere"
    alone.mkdir()
    path = (folder / "8.ckpt").rename(alone / "8.ckpt")
    weights = torch.load(path, weights_only=True)["state_dict"]
    loaded = GroupsLM.load_from_checkpoint(path, weights_only=True)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, weights[name])
    more = train(0, "auto", "", str(alone), max_epochs=2, batch_size=8, ckpt_path=str(path))
    assert more["steps"] == 16 and max(more["losses"]) < 2.7


@pytest.mark.parametrize(
    "precision", [pytest.param("bf16-mixed", marks=pytest.mark.slow), "bf16-true"]
)
def test_half_precision_resumes_bit_for_bit(
    pair: World, cache: str, precision: str, tmp_path: Path
) -> None:
    """With mixed precision a file has float32 weights, as ddp's; else those apart."""
    options: dict[str, Any] = {"trainer": {"precision": precision}}
    whole = pair.run(train, "dcp", cache, str(tmp_path), save_at=[2], max_steps=4, **options)
    path = tmp_path / "2.ckpt"
    rest = pair.run(train, "dcp", cache, str(tmp_path), max_steps=4, ckpt_path=str(path), **options)
    assert rest[0]["losses"] == whole[0]["losses"][2:]
    checkpoint = torch.load(path, weights_only=True)
    weight = checkpoint["state_dict"]["head.weight"]
    if precision == "bf16-mixed":
        assert weight.dtype == torch.float32 and not torch.equal(weight, weight.bfloat16().float())
        assert "lightning_dcp_engine" not in checkpoint
    else:
        master = checkpoint["lightning_dcp_engine"]["master_weights"]["head.weight"]
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, master.bfloat16())
        assert not torch.equal(weight.float(), master)


def test_adagrad_in_groups_with_a_scheduler(pair: World, cache: str, tmp_path: Path) -> None:
    """DeepSpeed makes another Adagrad of it: one group, that no scheduler knows of."""
    common: dict[str, Any] = {"max_steps": 4, "model_class": AdagradLM, "planning": GLOBAL_BATCH}
    wanted = pair.run(train, "ddp", cache, str(tmp_path), **common)
    whole = pair.run(train, "dcp", cache, str(tmp_path), save_at=[2], **common)
    assert whole[0]["losses"] == pytest.approx(wanted[0]["losses"], rel=2e-5)
    path = str(tmp_path / "2.ckpt")
    rest = pair.run(train, "dcp", cache, str(tmp_path), ckpt_path=path, **common)
    assert rest[0]["losses"] == whole[0]["losses"][2:]


def saved_after_another_was_loaded(rank: int, cache: str, folder: str) -> bool:
    """`fit`, then `validate` an older checkpoint, then save: whether that is the older one."""
    model = GroupsLM()
    run = L.Trainer(
        strategy=strategy_of("dcp", cache, GLOBAL_BATCH),
        accelerator="cpu",
        devices=2,
        max_steps=2,
        precision="bf16-mixed",
        callbacks=[Losses(folder, [1])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    data = DataLoader(Sequences(LENGTHS[:16]), batch_size=2, collate_fn=pad, shuffle=True)
    run.fit(model, data)
    run.validate(model, data, ckpt_path=f"{folder}/1.ckpt", verbose=False)
    run.save_checkpoint(f"{folder}/again.ckpt", weights_only=True)
    older, again = (
        torch.load(f"{folder}/{name}.ckpt", weights_only=True)["state_dict"]
        for name in ("1", "again")
    )
    return all(torch.equal(older[k].bfloat16(), again[k].bfloat16()) for k in older)


def test_weights_that_were_loaded_after_fit_are_saved(
    pair: World, cache: str, tmp_path: Path
) -> None:
    """And not the float32 ones that the engine has from `fit`."""
    assert all(pair.run(saved_after_another_was_loaded, cache, str(tmp_path)))


def by_url(rank: int, name: str, cache: str, folder: str) -> int:
    class Save(L.Callback):
        def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(f"file://{folder}/a b/1.ckpt")

    os.chdir(folder)
    train(rank, name, cache, folder, max_steps=1, callbacks=[Save()])
    url = f"file://{folder}/a b/1.ckpt"
    steps: int = train(rank, name, cache, folder, max_steps=2, ckpt_path=url)["steps"]
    return steps


def test_a_file_at_a_url(pair: World, cache: str, tmp_path: Path) -> None:
    assert pair.run(by_url, "dcp_fsdp", cache, str(tmp_path)) == [2, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["a b"]


# ---- folders -------------------------------------------------------------------------------------


def folders(rank: int, name: str, cache: str, folder: str) -> Any:
    """A run that saves a folder of shards after each second step and keeps the last one."""
    keep_one = ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=1, monitor=None
    )
    return train(
        rank,
        name,
        cache,
        folder,
        max_steps=5,
        planning=GLOBAL_BATCH,
        callbacks=[keep_one],
        strategy={"save_distributed_checkpoint": True},
    )


@pytest.mark.parametrize("name", ["dcp", pytest.param("dcp_fsdp", marks=pytest.mark.slow)])
def test_folders_of_shards(
    world: World, pair: World, cache: str, name: str, tmp_path: Path
) -> None:
    """Load with the strategy that wrote them, and with others on another number of ranks."""
    wanted = world.run(folders, name, cache, str(tmp_path))[0]["losses"]
    (path,) = tmp_path.iterdir()
    assert path.name == "step=4.ckpt" and path.is_dir()
    common: dict[str, Any] = {"planning": GLOBAL_BATCH, "max_steps": 5, "ckpt_path": str(path)}
    same = world.run(train, name, cache, str(tmp_path / "same"), **common)
    assert same[0]["losses"] == pytest.approx(wanted[4:], rel=1e-6)
    # The first step on 2 ranks takes the first half of what the fifth on 4 takes; two steps as
    # small make another loss, so weights and state are compared by a file.
    other = pair.run(train, "dcp_ddp", cache, str(tmp_path / "other"), **common)
    assert other[0]["steps"] == 5 and "world size: 4 -> 2" in other[0]["told"][0]
    if name == "dcp":
        zero = read_zero_folder(path, None)
        again = world.run(
            train,
            "dcp",
            cache,
            str(tmp_path / "file"),
            save_at=[4],
            **{**common, "max_steps": 5, "ckpt_path": None},
        )
        plain = torch.load(tmp_path / "file" / "4.ckpt", weights_only=True)
        assert again[0]["losses"] == pytest.approx(wanted, rel=1e-6)
        for name_, value in plain["state_dict"].items():
            assert torch.equal(zero["state_dict"][name_], value), name_
        (own,), (theirs,) = zero["optimizer_states"], plain["optimizer_states"]
        frozen = 1  # numbers of a folder of DeepSpeed's leave the frozen parameter out
        assert len(own["state"]) == len(theirs["state"])
        assert sum(len(g["params"]) for g in theirs["param_groups"]) == frozen + sum(
            len(g["params"]) for g in own["param_groups"]
        )
        for ours_, plain_ in zip(own["state"].values(), theirs["state"].values(), strict=True):
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(ours_[key], plain_[key])


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(MisconfigurationException, match="is a folder, but neither one that"):
        DCPDDPStrategy()._read_checkpoint(tmp_path, None)
    torch.save({"weights": torch.zeros(2)}, tmp_path / "weights.pt")
    with pytest.raises(MisconfigurationException, match="no entry 'state_dict'"):
        DCPDDPStrategy()._read_checkpoint(tmp_path / "weights.pt", None)


# ---- what a file may not do ----------------------------------------------------------------------


class Touch:
    """Executed by unpickling: makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("strategy", [DCPStrategy, DCPDDPStrategy])
@pytest.mark.parametrize("weights_only", [None, True])
def test_loading_executes_nothing(strategy: Any, weights_only: Any, tmp_path: Path) -> None:
    """Where `ddp` would not: a file, and a folder that DeepSpeed itself would unpickle."""
    touched = tmp_path / "touched"
    torch.save({"state_dict": {}, "evil": Touch(touched)}, tmp_path / "evil.ckpt")
    shards = tmp_path / "folder" / "checkpoint"
    shards.mkdir(parents=True)
    torch.save({"module": {}, "evil": Touch(touched)}, shards / "mp_rank_00_model_states.pt")
    for path in (tmp_path / "evil.ckpt", tmp_path / "folder"):
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            strategy()._read_checkpoint(path, weights_only)
        assert not touched.exists()
    strategy()._read_checkpoint(tmp_path / "evil.ckpt", False)
    assert touched.exists(), "the test would show nothing if it could not be made"


STATE = PlanState(
    inputs={"seed": "1"},
    epoch=2,
    iteration=5,
    num_iterations=8,
    consumed=np.arange(12) < 7,
    begun_at=3,
    consumed_before=np.arange(12) < 4,
    num_planned=9,
    corrections=Corrections(
        bucket_edges=(1, 8, 32), time_factors=(1.0, 1.5), memory_factors=(1.0, 1.25)
    ),
)


def test_the_state_of_plans_round_trips() -> None:
    again = PlanState.from_plain(STATE.to_plain())
    assert again.to_plain().keys() == STATE.to_plain().keys()
    assert again.consumed.tolist() == STATE.consumed.tolist()
    assert (again.epoch, again.begun_at, again.inputs) == (2, 3, {"seed": "1"})
    assert (again.num_planned, again.corrections) == (9, STATE.corrections)
    buffer = io.BytesIO()
    torch.save(STATE.to_plain(), buffer)
    buffer.seek(0)
    read = torch.load(buffer, weights_only=True)
    assert PlanState.from_plain(read).corrections == STATE.corrections


def test_a_state_of_version_1_is_read() -> None:
    old = {**STATE.to_plain(), "version": 1}
    del old["num_planned"], old["corrections"]
    again = PlanState.from_plain(old)
    assert again.num_planned is None and again.corrections is None
    assert (again.begun_at, again.iteration, again.num_iterations) == (3, 5, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "its version is 9"),
        ({"extra": 1}, r"missing: \[\], unknown: \['extra'\]"),
        ({"epoch": None}, r"missing: \['epoch'\]"),
        ({"iteration": -1}, "`iteration` is -1"),
        ({"iteration": 2}, "`begun_at` is behind"),
        ({"num_planned": 2}, "`num_planned` is 2"),
        ({"corrections": {"bucket_edges": [1, 2]}}, "`corrections`: KeyError"),
        ({"plan_inputs": {"seed": 1}}, "does not map texts"),
        ({"consumed": torch.zeros(2)}, "no tensor of bytes"),
        ({"consumed": torch.zeros(3, dtype=torch.uint8)}, "12 samples take 2 bytes"),
        ({"consumed": torch.zeros(2, dtype=torch.uint8)}, "samples that `consumed` has not"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], message: str) -> None:
    values = {k: v for k, v in {**STATE.to_plain(), **change}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        PlanState.from_plain(values)
    with pytest.raises(ValueError, match="of type list"):
        PlanState.from_plain([])


# ---- going on in the middle of an epoch ----------------------------------------------------------


def test_resumes_bit_for_bit(pair: World, cache: str, tmp_path: Path) -> None:
    """With dropout and worker processes, in the second epoch."""
    common: dict[str, Any] = {"max_epochs": 2, "dropout": 0.2, "num_workers": 1, "batch_size": 4}
    whole = pair.run(train, "dcp_ddp", cache, str(tmp_path), save_at=[11], **common)
    path = str(tmp_path / "11.ckpt")
    rest = pair.run(train, "dcp_ddp", cache, str(tmp_path), ckpt_path=path, **common)
    for r, w in zip(rest, whole, strict=True):
        assert not r["told"] and not [text for text in r["warned"] if "not resumable" in text]
        assert r["losses"] == w["losses"][11:]
        assert r["seen"] == [(s, ids) for s, ids in w["seen"] if s >= 11]


class SaveEverywhere(L.Callback):
    """Saves in the hooks of epoch 1, and fails where it is told to."""

    def __init__(self, folder: str, fail_at: int | None = None) -> None:
        self.folder, self.fail_at = folder, fail_at
        self.steps: dict[str, int] = {}

    def _save(self, trainer: L.Trainer, name: str) -> None:
        if trainer.current_epoch == 1 and not trainer.sanity_checking:
            trainer.save_checkpoint(f"{self.folder}/{name}.ckpt")
            self.steps[name] = trainer.global_step

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "epoch_start")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        name = {1: "batch_end", 5: "last_batch_end"}.get(args[-1])
        if name is not None:
            self._save(trainer, name)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, f"validation_{trainer.global_step}")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "epoch_end")

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.fail_at:
            raise ZeroDivisionError("on purpose")


class EpochOfStep(L.Callback):
    """(epoch, batch index, ids) of each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, list[int]]] = []
        self.ends: list[tuple[int, int]] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        plan = trainer.strategy.last_report.plan
        ids = sorted(i for m in plan.micro_batches for i in m.sample_ids)
        self.steps.append((trainer.current_epoch, batch_idx, ids))

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.ends.append((trainer.current_epoch, trainer.num_training_batches))


def interrupted_everywhere(rank: int, cache: str, folder: str, by_steps: bool) -> dict[str, Any]:
    """A run of 3 epochs of 6 steps that saves wherever it can, and a resume from each of them."""
    limits: dict[str, Any] = {"max_steps": 18} if by_steps else {"max_epochs": 3}

    def run(*callbacks: L.Callback, seed: int = 0, **fit: Any) -> tuple[Any, Any, Any]:
        steps = EpochOfStep()
        data = DataLoader(Sequences(LENGTHS[:24]), batch_size=4, collate_fn=pad)
        result = train(
            rank,
            "dcp_ddp",
            cache,
            folder,
            planning={"seed": seed},
            batch_size=4,
            num_samples=24,
            max_epochs=limits.get("max_epochs"),
            max_steps=limits.get("max_steps", -1),
            callbacks=[steps, *callbacks],
            trainer={"val_check_interval": 0.5},
            val_dataloaders=data,
            **fit,
        )
        return steps.steps, steps.ends, result

    saver = SaveEverywhere(folder)
    whole, ends, result = run(saver)
    found: dict[str, Any] = {"whole": whole, "ends": ends, "at": saver.steps, "resumed": {}}
    found["losses"] = result["losses"]
    failing = ModelCheckpoint(
        dirpath=folder, filename="exception", every_n_train_steps=100, save_on_exception=True
    )
    try:
        run(SaveEverywhere(f"{folder}/unused", fail_at=10), failing)
    except ZeroDivisionError:
        saver.steps["exception"] = 10
    for name in saver.steps:
        for seed in (0,) if by_steps else (0, 5):
            found["resumed"][name, seed] = run(seed=seed, ckpt_path=f"{folder}/{name}.ckpt")
    return found


@pytest.mark.parametrize("by_steps", [False, True])
def test_wherever_it_was_saved(cache: str, by_steps: bool, tmp_path: Path) -> None:
    with World(1, timeout_s=110) as one:
        found = one.run(interrupted_everywhere, cache, str(tmp_path), by_steps)[0]
    whole = found["whole"]
    assert [(e, i) for e, i, _ in whole] == [(e, i) for e in range(3) for i in range(6)]
    assert found["at"].keys() == {
        "epoch_start",
        "batch_end",
        "last_batch_end",
        "validation_9",
        "validation_12",
        "epoch_end",
        "exception",
    }
    for (name, seed), (steps, ends, result) in found["resumed"].items():
        at = found["at"][name]
        told = [line for line in result["told"] if "other plans" in line]
        if seed == 0:
            assert steps == whole[at:], name
            assert result["losses"] == found["losses"][at:], name
            assert not told
        else:
            middle = at % 6 != 0
            assert len(told) == middle, name
            second = [ids for epoch, _, ids in [*whole[:at], *steps] if epoch == 1]
            third = [ids for epoch, _, ids in steps if epoch == 2]
            for ids in (second, third):
                assert sorted(chain.from_iterable(ids)) == list(range(24)), name
            assert [i for e, i, _ in steps if e == 2] == list(range(6)), name
            assert third != [ids for epoch, _, ids in whole if epoch == 2]
        assert result["steps"] == at + len(steps)
        assert ends[-1] == (2, 6)


def stopped_early(rank: int, cache: str, folder: str) -> dict[str, Any]:
    """A run that `max_steps` ends in the middle of an epoch, saved after it, and a longer one."""

    def run(max_steps: int, to: str, **fit: Any) -> tuple[Any, Any]:
        steps = EpochOfStep()
        checkpoints = ModelCheckpoint(dirpath=f"{folder}/{to}", save_last=True)
        result = train(
            rank,
            "dcp_ddp",
            cache,
            folder,
            batch_size=4,
            num_samples=24,
            max_epochs=None,
            max_steps=max_steps,
            callbacks=[steps, checkpoints],
            **fit,
        )
        return steps.steps, result

    whole = run(14, "whole")
    run(3, "short")
    return {"whole": whole, "longer": run(14, "long", ckpt_path=f"{folder}/short/last.ckpt")}


def test_a_longer_max_steps_goes_on_in_the_same_epoch(cache: str, tmp_path: Path) -> None:
    with World(1, timeout_s=110) as one:
        found = one.run(stopped_early, cache, str(tmp_path))[0]
    assert found["longer"][0] == found["whole"][0][3:]
    assert found["longer"][1]["losses"] == found["whole"][1]["losses"][3:]


class FailOnce(L.Callback):
    def __init__(self, at: int, path: str) -> None:
        self.at, self.path = at, path

    def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.at:
            raise ZeroDivisionError("on purpose")

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def interrupted_twice(rank: int, cache: str, folder: str) -> Any:
    """By an error in step 3, and by `should_stop` in the last epoch; each time it goes on."""

    class StopAt(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 5

    common: dict[str, Any] = {"batch_size": 4, "num_samples": 24}
    whole = train(rank, "dcp_ddp", cache, folder, **common)
    path = f"{folder}/failed.ckpt"
    with pytest.raises(ZeroDivisionError):
        train(rank, "dcp_ddp", cache, folder, callbacks=[FailOnce(2, path)], **common)
    # What follows a failed batch is saved in `on_train_batch_end`, and after the run.
    train(rank, "dcp_ddp", cache, folder, save_at=[3], ckpt_path=path, **common)
    saving = ModelCheckpoint(dirpath=f"{folder}/stopped", save_last=True)
    third = f"{folder}/3.ckpt"
    train(rank, "dcp_ddp", cache, folder, callbacks=[StopAt(), saving], ckpt_path=third, **common)
    last = f"{folder}/stopped/last.ckpt"
    return whole, [
        train(rank, "dcp_ddp", cache, folder, ckpt_path=path, **common) for path in (third, last)
    ]


def test_after_an_error_and_in_the_last_epoch(cache: str, tmp_path: Path) -> None:
    with World(1, timeout_s=110) as one:
        whole, resumed = one.run(interrupted_twice, cache, str(tmp_path))[0]
    assert len(whole["losses"]) == 6
    for result, done in zip(resumed, (3, 5), strict=True):
        assert result["losses"] == whole["losses"][done:]
        assert (result["steps"], result["epoch"]) == (6, 1)


def killed(rank: int, cache: str, folder: str, at: int | None) -> dict[str, Any]:
    """Saves `last.ckpt` after each second step; is killed, with what it was doing, if told to."""

    class Kill(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == at:
                os.kill(os.getpid(), signal.SIGKILL)

    saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_last=True)
    path = f"{folder}/last.ckpt"
    return train(
        rank,
        "dcp_ddp",
        cache,
        folder,
        callbacks=[saving, Kill()] if at else [],
        ckpt_path=path if at is None else None,
    )


@pytest.mark.slow
def test_killed_in_the_middle(pair: World, cache: str, tmp_path: Path) -> None:
    whole = pair.run(train, "dcp_ddp", cache, str(tmp_path))
    with pytest.raises(WorldFailure, match="exit code -9"):
        pair.run(killed, cache, str(tmp_path), 5)
    rest = pair.run(killed, cache, str(tmp_path), None)  # in new processes
    for r, w in zip(rest, whole, strict=True):
        assert r["losses"] == w["losses"][4:]
        assert r["seen"] == [(s, ids) for s, ids in w["seen"] if s >= 4]


# ---- other ranks, limits, costs, options ---------------------------------------------------------


def test_another_number_of_ranks_twice_in_an_epoch(
    world: World, pair: World, cache: str, tmp_path: Path
) -> None:
    """4 ranks, then 2 with less memory, then 4 again: each sample of the epoch once."""
    folder = str(tmp_path)
    common = {"cache": cache, "folder": folder}
    first = world.run(
        train, "dcp_ddp", **common, save_at=[3], max_steps=3, planning={"policy": "global-batch"}
    )
    memory = DCPDDPStrategy().fixed_bytes(GroupsLM()) + 120_000
    planning = {"memory_limit_bytes": memory, "tokens_per_step": 40}
    less: dict[str, Any] = {"max_steps": 6, "planning": planning}
    second = pair.run(
        train,
        "dcp_ddp",
        **common,
        **less,
        save_at=[5, 6],
        ckpt_path=f"{folder}/3.ckpt",
        callbacks=[TQDMProgressBar()],
    )
    again = pair.run(train, "dcp_ddp", **common, **less, ckpt_path=f"{folder}/5.ckpt")
    third = world.run(train, "dcp_ddp", **common, max_epochs=2, ckpt_path=f"{folder}/6.ckpt")

    begun, more = samples(first), samples(second)
    assert len(set(begun)) == len(begun) == 24 and not set(begun) & set(more)
    rest = third[0]["lengths"][0] - 6
    seen = [
        samples([{"seen": [(s, i) for s, i in r["seen"] if (s < 6 + rest) == half]} for r in third])
        for half in (True, False)
    ]
    assert sorted(begun + more + seen[0]) == list(range(NUM_SAMPLES))
    assert seen[1] == list(range(NUM_SAMPLES)), "the next epoch is a whole one"
    assert third[0]["lengths"] == [6 + rest, 8] and third[0]["steps"] == 6 + rest + 8
    assert second[0]["bar"] == second[0]["lengths"][0] > 6

    # A rest that is interrupted and goes on with what it was planned from is the same rest.
    for r, w in zip(again, second, strict=True):
        assert not r["told"] and r["losses"] == w["losses"][2:]
        assert r["seen"] == [(s, ids) for s, ids in w["seen"] if s >= 5]

    for results, changed in ((second, "world size: 4 -> 2"), (third, "world size: 2 -> 4")):
        assert len(results[0]["told"]) == 1 and not results[1]["told"]
        assert changed in results[0]["told"][0]
    assert f"its {NUM_SAMPLES - len(begun)} samples that are left" in second[0]["told"][0]
    assert "memory limit: " in second[0]["told"][0]

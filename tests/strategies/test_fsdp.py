"""What is special to `dcp_fsdp`: what is sharded, when it is whole, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.fsdp import DCPFSDPStrategy
from tests.strategies.hand_planned import (
    LENGTHS,
    NUM_BLOCKS,
    Watch,
    hand_planned,
    make_plans,
    train,
    wanted_of,
)
from tests.strategies.toys import (
    Sequences,
    ToyLM,
    largest_relative_error,
    pad,
    pad_hidden_labels,
    whole,
)
from tests.worlds import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=100) as world:
        yield world


def make_trainer(strategy: Any = None, **options: Any) -> L.Trainer:
    return L.Trainer(
        strategy=DCPFSDPStrategy(loss_average="tokens") if strategy is None else strategy,
        accelerator="cpu",
        devices=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )


def data(**options: Any) -> DataLoader[Any]:
    return DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=pad, **options)


# ---- models that are sharded in another way ------------------------------------------------------


class OwnSharding(ToyLM):
    """Shards what it likes, with gradients that accumulate in another type than the parameters'."""

    def configure_model(self) -> None:
        if isinstance(self.head, FSDPModule):
            return
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
        mesh = self.device_mesh["data_parallel"] if self.device_mesh is not None else None
        for part in (*self.blocks, self.head):
            fully_shard(part, mesh=mesh, mp_policy=policy)


class Tied(ToyLM):
    """The head's weight is the embedding's; blocks share a normalisation; a part runs never."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.head.weight = self.embed.weight
        for block in self.blocks[1:]:
            block.norm1 = self.blocks[0].norm1
        self.unused = nn.Linear(3, 2, bias=False)
        nn.init.ones_(self.unused.weight)
        self.unused.to(self.embed.weight.dtype)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.0)


class Frozen(ToyLM):
    """One block is frozen; another one thaws in the second iteration."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for block in self.blocks[:2]:
            block.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.blocks[1].requires_grad_(True)


def test_keeps_how_the_model_shards_itself(world: World) -> None:
    """And gradients that `fully_shard` accumulates in a type of their own are rescaled as well."""
    wanted = wanted_of(3)
    results = world.run(
        train, "dcp_fsdp", 3, model_class=OwnSharding, collate=pad_hidden_labels,
        report_targets=True, watch_class=WatchParts,
    )  # fmt: skip
    parts = {"", "head", *(f"blocks.{i}" for i in range(NUM_BLOCKS))}
    for result in results:
        assert result["seen"] == [parts]
        assert largest_relative_error(result["gradients"][0], wanted.gradients[0]) <= 2e-6
        assert largest_relative_error(result["parameters"], wanted.parameters) <= 1e-5


class WatchParts(Watch):
    """Which modules are sharded by themselves, and that nothing is whole between iterations."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.append({n for n, m in pl_module.named_modules() if isinstance(m, FSDPModule)})

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *rest)
        for parameter in pl_module.parameters():
            assert isinstance(parameter, DTensor)
            assert sum(gather(parameter.to_local().numel())) == parameter.numel()


def gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def test_shares_parameters(world: World) -> None:
    wanted = wanted_of(3, model_class=Tied, double=True)
    results = world.run(train, "dcp_fsdp", 3, model_class=Tied, watch_class=WatchParts, double=True)
    for result in results:
        assert result["seen"] == [{""}], "blocks that share parameters are not sharded apart"
        assert "unused.weight" not in result["gradients"][0], "as in one process"
        assert largest_relative_error(result["gradients"][0], wanted.gradients[0]) <= 1e-12
        assert largest_relative_error(result["parameters"], wanted.parameters) <= 1e-12


def test_frozen_parameters(world: World) -> None:
    results = world.run(train, "dcp_fsdp", 3, model_class=Frozen, double=True)
    start = dict(Frozen(num_blocks=NUM_BLOCKS, double=True).named_parameters())
    trainable = {n for n, p in start.items() if p.requires_grad}
    thawed = trainable | {n for n in start if n.startswith("blocks.1.")}
    wanted = wanted_of(1, model_class=Frozen, double=True)
    for result in results:
        assert [set(g) for g in result["gradients"]] == [trainable, thawed, thawed]
        assert largest_relative_error(result["gradients"][0], wanted.gradients[0]) <= 1e-12
        for name, parameter in result["parameters"].items():
            assert torch.equal(parameter, start[name]) == (name not in thawed), name
            assert torch.equal(parameter, results[0]["parameters"][name]), name


class Drawn(ToyLM):
    """Has other values on each rank, or only shapes so far."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("offset", torch.rand(3))
        torch.manual_seed(dist.get_rank())
        for tensor in [*self.parameters(), *self.buffers()]:
            nn.init.normal_(tensor, std=0.1)


class WatchStart(Watch):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.append({n: whole(t) for n, t in pl_module.state_dict().items()})


def fit_drawn(rank: int, device: str) -> dict[str, Any]:
    with torch.device(device):
        model = Drawn(num_blocks=NUM_BLOCKS)
    own = {n: t.clone() for n, t in model.state_dict().items()} if device == "cpu" else {}
    strategy, watch = DCPFSDPStrategy(loss_average="tokens"), WatchStart()
    with hand_planned(strategy, make_plans(1)):
        make_trainer(strategy, callbacks=[watch]).fit(model, data())
    return {"own": own, "start": watch.seen[0], "losses": watch.losses}


def test_all_ranks_start_with_what_rank_0_has_drawn(world: World) -> None:
    results = world.run(fit_drawn, "cpu")
    own = results[0]["own"]
    assert not torch.equal(results[1]["own"]["offset"], own["offset"])
    for result in results:
        for name, tensor in own.items():
            assert torch.equal(result["start"][name], tensor), name


def test_built_without_memory(world: World) -> None:
    results = world.run(fit_drawn, "meta")
    for result in results:
        assert result["losses"] == results[0]["losses"]
        assert 2.0 < result["losses"][0] < 4.0
        for name in ("embed.weight", "blocks.1.up.weight", "head.weight"):
            assert 0.1 < float(result["start"][name].std()) < 1.5, name


# ---- collectives ---------------------------------------------------------------------------------


class CountCollectives(Watch):
    """What `fully_shard` starts in each iteration, in order."""

    NAMES = (
        "all_gather_single",
        "all_gather_into_tensor",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    )

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.append([])
        self._patch = pytest.MonkeyPatch()
        for name in self.NAMES:  # they depend on torch's version
            if hasattr(dist, name):
                self._patch.setattr(dist, name, self._counting(name))

    def _counting(self, name: str) -> Any:
        before = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen[-1].append("gather" if "gather" in name else "reduce")
            return before(*args, **kwargs)

        return call

    def on_train_batch_end(self, *_: Any) -> None:
        self._patch.undo()


def test_gathers_and_reduces_once_an_iteration_on_every_rank(world: World) -> None:
    """On ranks with 2 micro-batches, with 5, and with none at all."""
    parts = NUM_BLOCKS + 1
    for result in world.run(train, "dcp_fsdp", 3, watch_class=CountCollectives):
        assert result["seen"] == [["gather"] * parts + ["reduce"] * parts] * 3


class ClearingItself(ToyLM):
    def optimizer_zero_grad(self, *_: Any) -> None:
        self.zero_grad()


def fit_clearing_itself(rank: int) -> str:
    with pytest.raises(RuntimeError) as caught:
        train(rank, "dcp_fsdp", 2, model_class=ClearingItself)
    return str(caught.value)


def test_gradients_of_the_former_step_are_not_added(world: World) -> None:
    for message in world.run(fit_clearing_itself):
        assert "call `optimizer.zero_grad()`" in message


class Failing(ToyLM):
    """Its second micro-batch raises, on every rank that has one."""

    fails = True
    num_calls = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.num_calls += 1
        if self.fails and self.num_calls == 2:
            raise RuntimeError("as told")
        return super().training_step(batch, batch_idx)


def fit_after_a_failure(rank: int) -> list[dict[str, Tensor]]:
    model = Failing(num_blocks=NUM_BLOCKS, double=True)
    watch = Watch()
    strategy = DCPFSDPStrategy(loss_average="tokens")
    with hand_planned(strategy, make_plans(1)), pytest.raises(RuntimeError, match="as told"):
        make_trainer(strategy).fit(model, data())
    assert all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())
    Failing.fails = False
    strategy = DCPFSDPStrategy(loss_average="tokens")
    with hand_planned(strategy, make_plans(1)):
        make_trainer(strategy, callbacks=[watch]).fit(model, data())
    return watch.gradients


def test_an_iteration_that_raised_leaves_no_gradients(world: World) -> None:
    wanted = wanted_of(1, double=True)
    for gradients in world.run(fit_after_a_failure):
        assert largest_relative_error(gradients[0], wanted.gradients[0]) <= 1e-12


# ---- checkpoints and evaluation ------------------------------------------------------------------


class Calling(ToyLM):
    """Its steps call parts of itself, not itself."""

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        logits = ToyLM.forward(self, batch["ids"])
        labels = batch["labels"]
        each = nn.functional.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=-100, reduction="none"
        )
        return each[labels != -100]

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.losses(batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


def measured(folder: str) -> DCPFSDPStrategy:
    """Profiles and plans itself; measured once."""
    return DCPFSDPStrategy(
        loss_average="tokens",
        profiling=ProfilingOptions(budget_s=1.5, repeats=1, cache_dir=f"{folder}/cache"),
    )


def evaluate(rank: int, folder: str) -> dict[str, Any]:
    """A `fit` with validation, then each evaluation alone, with the same model and a fresh one."""
    trainer = make_trainer(measured(folder))
    model = Calling(num_blocks=NUM_BLOCKS, double=True)
    trainer.fit(model, data(), data())
    inside = float(trainer.callback_metrics["val_loss"])
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    again = float(trainer.validate(model, data(), verbose=False)[0]["val_loss"])
    fresh = Calling(num_blocks=NUM_BLOCKS, double=True)
    alone = make_trainer()
    loaded = alone.test(fresh, data(), ckpt_path=f"{folder}/last.ckpt", verbose=False)
    outputs = alone.predict(fresh, data())
    assert outputs is not None
    return {
        "inside": inside,
        "again": again,
        "loaded": float(loaded[0]["val_loss"]),
        "outputs": sum(output.numel() for output in outputs),
        "sharded": all(isinstance(p, DTensor) for p in fresh.parameters()),
        "parameters": {n: whole(p.detach()) for n, p in model.named_parameters()},
    }


def test_evaluates_and_exports(world: World, tmp_path: Path) -> None:
    results = world.run(evaluate, str(tmp_path))
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert all(type(t) is Tensor for t in checkpoint["state_dict"].values())
    plain = Calling.load_from_checkpoint(tmp_path / "last.ckpt", num_blocks=NUM_BLOCKS, double=True)
    optimizer = plain.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    moments = optimizer.state[plain.blocks[2].down.weight]
    assert moments["exp_avg"].shape == plain.blocks[2].down.weight.shape
    assert moments["exp_avg"].abs().sum() > 0
    dataset = Sequences(LENGTHS)
    num_labels = sum(int((dataset[i]["labels"] != -100).sum()) for i in range(len(dataset)))
    for result in results:
        assert result["outputs"] == num_labels
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter, result["parameters"][name]), name
        assert result["sharded"]
        assert result["inside"] == pytest.approx(result["again"], rel=1e-12)
        assert result["inside"] == pytest.approx(result["loaded"], rel=1e-12)


def resume(rank: int, folder: str) -> dict[str, Any]:
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(f"{folder}/step.ckpt")
                trainer.should_stop = True

    def run(*callbacks: L.Callback, **kwargs: Any) -> tuple[list[float], dict[str, Tensor]]:
        watch = Watch()
        model = ToyLM(num_blocks=NUM_BLOCKS, dropout=0.2)
        trainer = make_trainer(measured(folder), callbacks=[watch, *callbacks], max_epochs=3)
        trainer.fit(model, data(shuffle=True), **kwargs)
        return watch.losses, {n: whole(p.detach()) for n, p in model.named_parameters()}

    whole_losses, wanted = run()
    begun_losses, _ = run(Stop())
    rest_losses, got = run(ckpt_path=f"{folder}/step.ckpt")
    return {
        "whole": whole_losses,
        "parts": begun_losses + rest_losses,
        "equal": all(torch.equal(got[n], wanted[n]) for n in wanted),
    }


def test_resumes_bit_for_bit(world: World, tmp_path: Path) -> None:
    for result in world.run(resume, str(tmp_path)):
        assert len(result["whole"]) > 5
        assert result["parts"] == result["whole"]
        assert result["equal"]


# ---- refusals ------------------------------------------------------------------------------------


class PartOfTheRanks(ToyLM):
    def configure_model(self) -> None:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        fully_shard(self, mesh=mesh["b"])


class Ignoring(ToyLM):
    def configure_model(self) -> None:
        fully_shard(self, mesh=self.device_mesh["data_parallel"], ignored_params={self.head.bias})


class OldFSDP(ToyLM):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        self.head = FullyShardedDataParallel(self.head, device_id=torch.device("cpu"))


class TensorParallel(ToyLM):
    def configure_model(self) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        parallelize_module(self.head, self.device_mesh["tensor_parallel"], ColwiseParallel())


def fit_refused(rank: int) -> list[str]:
    messages = []
    for model_class in (PartOfTheRanks, Ignoring, OldFSDP, TensorParallel):
        with pytest.raises((MisconfigurationException, TypeError)) as caught:
            make_trainer().fit(model_class(num_blocks=NUM_BLOCKS), data())
        messages.append(str(caught.value))
    return messages


def test_refuses_what_it_cannot_train(world: World) -> None:
    for part, ignoring, old, parallel in world.run(fit_refused):
        assert "sharded over 2 ranks" in part and "data_parallel" in part
        assert "head.bias" in ignoring and "ignored_params" in ignoring
        assert "FullyShardedDataParallel" in old and "fully_shard" in old
        assert "tensor-parallel" in parallel and "parallelize_module" in parallel


def test_refuses_tensor_parallelism() -> None:
    with pytest.raises(MisconfigurationException, match="tensor_parallel_size=2"):
        DCPFSDPStrategy(tensor_parallel_size=2)

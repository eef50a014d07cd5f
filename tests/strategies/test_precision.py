"""Precision and gradient clipping under the three strategies.

4 ranks with unequal plans. What a strategy cannot do is refused by Lightning or the engine, with
the message that is asserted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

import lightning_dcp  # noqa: F401 - registers the strategies' names
from lightning_dcp.strategies.deepspeed import DCPStrategy
from lightning_dcp.strategies.fsdp import DCPFSDPStrategy
from tests.strategies.hand_planned import LENGTHS, Watch, loss_scale, make_plans, train, wanted_of
from tests.strategies.toys import Sequences, ToyLM, largest_relative_error, reference, whole
from tests.worlds import World

ALL = ["dcp", "dcp_ddp", "dcp_fsdp"]
SCALED = "16-mixed with scaler"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=100) as world:
        yield world


class WithSGD(ToyLM):
    """Its steps show the size of gradients, which Adam's do not."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def refusal(rank: int, *args: Any, **kwargs: Any) -> str:
    with pytest.raises((ValueError, MisconfigurationException)) as caught:
        train(rank, *args, **kwargs)
    return str(caught.value)


def norms_of(gradients: list[dict[str, Tensor]]) -> list[float]:
    return [float(torch.stack([g.norm() for g in step.values()]).norm()) for step in gradients]


def assert_same_on_all_ranks(results: list[dict[str, Any]]) -> None:
    for result in results[1:]:
        assert result["losses"] == results[0]["losses"]
        for name, parameter in results[0]["parameters"].items():
            assert torch.equal(result["parameters"][name], parameter), name


# ---- what is computed in -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
class TestPrecision:
    @pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
    def test_bfloat16(self, world: World, name: str, precision: str) -> None:
        wanted = wanted_of(3)
        results = world.run(train, name, 3, precision=precision)
        assert_same_on_all_ranks(results)
        # DeepSpeed has no autocast: its bf16-mixed is bfloat16 beside float32 master weights.
        low = precision == "bf16-true" or name == "dcp"
        for result in results:
            for parameter in result["parameters"].values():
                assert parameter.dtype is (torch.bfloat16 if low else torch.float32)
            # 8 bits of mantissa; a sum over micro-batches in bfloat16 loses another.
            error = largest_relative_error(result["gradients"][0], wanted.gradients[0])
            assert 1e-4 < error < (3e-2 if low else 1.5e-2)
            assert result["losses"] == pytest.approx(wanted.losses, rel=5e-3)

    def test_float64(self, world: World, name: str) -> None:
        if name == "dcp":
            with pytest.raises(ValueError, match=r"precision='64-true'\)` is not supported"):
                L.Trainer(strategy=DCPStrategy(), accelerator="cpu", precision="64-true")
            return
        wanted = wanted_of(3, double=True)
        results = world.run(train, name, 3, precision="64-true", by_name=True)
        assert_same_on_all_ranks(results)
        # The parameters were drawn in float32 and cast.
        assert largest_relative_error(results[0]["gradients"][0], wanted.gradients[0]) <= 1e-12
        assert largest_relative_error(results[0]["parameters"], wanted.parameters) <= 1e-12


@pytest.mark.parametrize("precision", ["64-true", "16-mixed"])
def test_lightning_refuses_for_an_instance_what_it_allows_by_name(precision: Any) -> None:
    with pytest.raises(ValueError, match="The `ModelParallelStrategy` does not support"):
        L.Trainer(strategy=DCPFSDPStrategy(), accelerator="cpu", precision=precision)
    L.Trainer(strategy="dcp_fsdp", accelerator="cpu", precision=precision)


def test_float16_needs_a_device_that_deepspeed_supports(world: World) -> None:
    for message in world.run(refusal, "dcp", 1, precision="16-true"):
        assert message == "Type fp16 is not supported on your device."


# ---- float16: skipped steps ----------------------------------------------------------------------

#: In step 1 it runs alone on rank 2.
OVERFLOWING = make_plans(2)[1].micro_batches[-1].sample_ids[0]


class Overflowing(WithSGD):
    """Has an infinite gradient in one micro-batch of step 1."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and OVERFLOWING in batch["id"].tolist():
            loss.register_hook(lambda gradient: gradient * float("inf"))
            self.overflowed = True
        return loss


class WatchScale(Watch):
    """(scale of the loss, parameters) after each step, and whether this rank overflowed."""

    def watch_engine(self, *_: Any) -> None:
        return None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *rest)
        strategy: Any = trainer.strategy
        if isinstance(strategy, DCPStrategy):
            read: Any = safe_get_full_fp32_param
        else:
            read = lambda parameter: whole(parameter.detach())  # noqa: E731
        parameters = {n: read(p) for n, p in pl_module.named_parameters()}
        overflowed = getattr(pl_module, "overflowed", False)
        self.seen.append((loss_scale(strategy), parameters, overflowed))


@pytest.mark.parametrize("name", ALL)
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(world: World, name: str) -> None:
    clip = 0.5 * min(norms_of(wanted_of(3, model_class=WithSGD).gradients))
    plans = make_plans(3)
    steps = [[i for m in plans[k].micro_batches for i in m.sample_ids] for k in (0, 2)]
    gradients = reference(WithSGD(num_blocks=3), Sequences(LENGTHS), steps, clip).gradients
    # The norm that is clipped is that of unscaled gradients: scaled ones are 500 times larger.
    expected = {n: -clip / norms_of(gradients)[1] * g for n, g in gradients[1].items()}
    results = world.run(
        train,
        name,
        3,
        clip=clip,
        precision=SCALED,
        model_class=Overflowing,
        watch_class=WatchScale,
    )
    assert_same_on_all_ranks(results)
    for rank, result in enumerate(results):
        (first, second, third) = result["seen"]
        assert second[2] == (rank == 2), "it overflowed on one rank only"
        assert [first[0], second[0], third[0]] == [2.0**10, 2.0**9, 2.0**9]
        for n in first[1]:
            assert torch.equal(second[1][n], first[1][n]), "the step was skipped"
        taken = {n: p - second[1][n] for n, p in third[1].items()}
        assert largest_relative_error(taken, expected) <= (2e-2 if name == "dcp" else 5e-3)


# ---- clipping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
class TestClipping:
    @pytest.mark.parametrize("double", [False, True])
    def test_by_the_norm_that_one_process_sees(self, world: World, name: str, double: bool) -> None:
        arguments = {"double": double, "model_class": WithSGD}
        norms = norms_of(wanted_of(3, **arguments).gradients)  # type: ignore[arg-type]
        clip = 0.5 * min(norms)
        wanted = wanted_of(3, clip, name=name, **arguments)  # type: ignore[arg-type]
        results = world.run(train, name, 3, clip=clip, **arguments)
        # ZeRO-1 has float32 master weights.
        limit = 1e-12 if double and name != "dcp" else 2e-6
        for result in results:
            assert largest_relative_error(result["parameters"], wanted.parameters) <= limit

    def test_by_value(self, world: World, name: str) -> None:
        arguments = {"double": True, "model_class": WithSGD}
        if name == "dcp":
            for message in world.run(refusal, name, 1, clip=0.01, clip_by="value", **arguments):
                assert message == "DeepSpeed does not support clipping gradients by value."
            return
        gradients = wanted_of(3, **arguments).gradients  # type: ignore[arg-type]
        clip = float(torch.cat([g.flatten() for g in gradients[0].values()]).abs().median())
        wanted = wanted_of(3, clip_value=clip, **arguments)  # type: ignore[arg-type]
        for result in world.run(train, name, 3, clip=clip, clip_by="value", **arguments):
            assert largest_relative_error(result["parameters"], wanted.parameters) <= 1e-12


def test_a_norm_of_one_rank_would_be_seen() -> None:
    """The comparison can fail: clipped by another norm, steps are far off."""
    norms = norms_of(wanted_of(3, model_class=WithSGD).gradients)
    clip = 0.5 * min(norms)
    wanted = wanted_of(3, clip, model_class=WithSGD)
    other = wanted_of(3, 1.1 * clip, model_class=WithSGD)
    assert largest_relative_error(other.parameters, wanted.parameters) > 1e-3

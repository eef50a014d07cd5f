"""The same module, data and seed under `ddp` and under each strategy: the same metrics file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dcp.callback import DCPCallback
from lightning_dcp.planning.plan import Plan
from lightning_dcp.strategies.deepspeed import DCPStrategy
from lightning_dcp.strategies.fsdp import DCPFSDPStrategy
from tests.strategies import parity_toys
from tests.strategies.hand_planned import STRATEGIES, hand_planned
from tests.strategies.parity_toys import NUM_STEPS, WORLD_SIZE, read_csv
from tests.strategies.toys import Sequences, ToyLM, largest_relative_error, micro_batch, pad
from tests.worlds import World

TOLERANCE = {False: 1e-5, True: 1e-10}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(WORLD_SIZE, timeout_s=110) as world:
        yield world


@pytest.fixture(scope="module")
def run(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], list[dict[str, Any]]]:
    """One `fit` for each strategy and type, from which everything is compared."""
    folder = tmp_path_factory.mktemp("parity")
    done: dict[tuple[str, bool], list[dict[str, Any]]] = {}

    def fit_once(name: str, double: bool) -> list[dict[str, Any]]:
        if (name, double) not in done:
            done[name, double] = world.run(parity_toys.fit, name, double, str(folder))
        return done[name, double]

    return fit_once


def assert_same(
    got: list[dict[str, float]], wanted: list[dict[str, float]], tolerance: float
) -> None:
    assert len(got) == len(wanted)
    for i, (own, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert own.keys() == theirs.keys(), f"row {i}: {sorted(own.keys() ^ theirs.keys())}"
        differing = {
            key: (own[key], theirs[key])
            for key in own
            if own[key] != pytest.approx(theirs[key], rel=tolerance, abs=0)
        }
        assert not differing, f"row {i}"


@pytest.mark.parametrize("double", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "name", ["dcp_ddp", "dcp", pytest.param("dcp_fsdp", marks=pytest.mark.slow)]
)
class TestParity:
    def test_metrics_file(self, run: Any, name: str, double: bool) -> None:
        theirs, ours = run("ddp", double)[0]["csv"], run(name, double)[0]["csv"]
        own, wanted = read_csv(ours), read_csv(theirs)
        assert len(wanted) > 2 * NUM_STEPS
        headers = [sorted(Path(f).read_text().splitlines()[0].split(",")) for f in (ours, theirs)]
        assert headers[0] == headers[1]
        assert_same(own, wanted, TOLERANCE[double])

    def test_what_callbacks_and_the_progress_bar_see(
        self, run: Any, name: str, double: bool
    ) -> None:
        theirs = run("ddp", double)
        for rank, result in enumerate(run(name, double)):
            assert_same(
                [result["callback_metrics"]], [theirs[rank]["callback_metrics"]], TOLERANCE[double]
            )
            assert_same(result["progress_bar"], theirs[rank]["progress_bar"], TOLERANCE[double])
            assert_same(result["step_metrics"], theirs[rank]["step_metrics"], TOLERANCE[double])

    def test_final_parameters(self, run: Any, name: str, double: bool) -> None:
        wanted = run("ddp", double)[0]["parameters"]
        for result in run(name, double):
            assert largest_relative_error(result["parameters"], wanted) <= TOLERANCE[double]

    def test_ranks_did_unequal_things(self, run: Any, name: str, double: bool) -> None:
        """Else the comparison would show little; in float32 it is up to the planner."""
        plans = run(name, double)[0]["plans"]
        assert len(plans) == 2 * NUM_STEPS
        if double:
            assert {m.sp_size for p in plans for m in p.micro_batches} == {1, 2, 4}
            counts = {len(p.for_rank(rank)) for p in plans for rank in range(WORLD_SIZE)}
            assert counts == {0, 1, 2, 3}


def fit_with_callback(rank: int, name: str, folder: str) -> dict[str, Any]:
    return parity_toys.fit(rank, name, False, folder, [DCPCallback(print_table=False)])


@pytest.mark.slow
def test_the_callback_only_adds_its_columns(run: Any, world: World, tmp_path: Path) -> None:
    wanted = read_csv(run("dcp_ddp", False)[0]["csv"])
    got = read_csv(world.run(fit_with_callback, "dcp_ddp", str(tmp_path))[0]["csv"])
    added = {key for row in got for key in row if key.startswith("dcp/")}
    assert added >= {"dcp/idle_share", "dcp/num_p2"}
    assert_same(
        [{k: v for k, v in row.items() if not k.startswith("dcp/")} for row in got],
        wanted,
        1e-5,
    )


# ---- where the loss is a mean over tokens --------------------------------------------------------

TOKEN_LENGTHS = [60, 4, 4, 4]  # one sample for each rank


class TokenMean(ToyLM):
    """Keeps the gradient that the optimizer would step on."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.gradients: dict[str, Tensor] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.losses(batch).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if isinstance(self.trainer.strategy, (DCPStrategy, DCPFSDPStrategy)):
            return  # in parts; tests/strategies/test_exactness.py puts them together
        self.gradients = {n: p.grad.clone() for n, p in self.named_parameters()}  # type: ignore[union-attr]


def fit_token_mean(rank: int, name: str) -> tuple[float, dict[str, Tensor]]:
    data, model = Sequences(TOKEN_LENGTHS), TokenMean()
    strategy = "ddp" if name == "ddp" else STRATEGIES[name](loss_average="tokens")
    shares = (micro_batch(data, [0], 0, 4), micro_batch(data, [1, 2], 0), micro_batch(data, [3], 1))
    plan = Plan(epoch=0, iteration=0, world_size=WORLD_SIZE, micro_batches=shares)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=WORLD_SIZE,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with nullcontext() if name == "ddp" else hand_planned(strategy, [plan]):
        trainer.fit(model, DataLoader(data, batch_size=1, collate_fn=pad))
    return float(trainer.callback_metrics["loss"]), model.gradients


def test_ddp_is_no_mean_over_tokens(world: World) -> None:
    """The figures of docs/how-it-works.md: ranks weigh the same under `ddp`, whatever they hold."""
    data, model = Sequences(TOKEN_LENGTHS), TokenMean()
    each = [model.losses(pad([data[i]])) for i in range(len(data))]
    loss = torch.cat(each).mean()
    loss.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    (theirs, their_gradients), (own, own_gradients) = (
        world.run(fit_token_mean, name)[0] for name in ("ddp", "dcp_ddp")
    )
    for name in ("dcp", "dcp_fsdp"):
        assert world.run(fit_token_mean, name)[0][0] == pytest.approx(own, rel=1e-6)
    assert own == pytest.approx(loss.item(), rel=1e-6)
    assert largest_relative_error(own_gradients, wanted) <= 2e-6
    assert theirs == pytest.approx(sum(x.mean().item() for x in each) / 4, rel=1e-6)

    def norm(gradients: dict[str, Tensor]) -> float:
        return float(torch.stack([g.norm() for g in gradients.values()]).norm())

    error = norm({n: their_gradients[n] - wanted[n] for n in wanted}) / norm(wanted)
    documented = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text()
    shown = f"| `ddp` | {theirs:.3f} | {error:.0%} |", f"| `dcp`, any strategy | {own:.3f} | 0% |"
    labels = [len(x) for x in each]
    assert f"{labels[0]}, {labels[1]}, {labels[2]} and {labels[3]} labelled tokens" in documented
    for line in shown:
        assert line in documented, line

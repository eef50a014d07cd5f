"""Tables and logged values of `DCPCallback`, in real Trainer runs around a stand-in strategy."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from rich.console import Console
from torch.utils.data import DataLoader

from lightning_dcp.callback import DCPCallback, report_scalars
from lightning_dcp.metrics import dcp_metrics
from lightning_dcp.planning.candidates import Exclusion
from lightning_dcp.planning.planner import EpochPlanner
from lightning_dcp.planning.report import IterationReport
from lightning_dcp.tables import (
    exclusion_rows,
    format_bytes,
    format_count,
    format_seconds,
    plan_tables,
    static_lines,
    summary_table,
)
from tests.data.toys import make_planner, some_lengths

LENGTHS = some_lengths(400, longest=20_000)
HEADS = "4 does not divide the 6 attention heads of model.blocks"


@pytest.fixture(scope="module")
def planner() -> EpochPlanner:
    return make_planner(
        LENGTHS, 4, memory_limit_bytes=60_000_000, sp_size_exclusions={4: HEADS}, batch_size=8
    )


def report_of(planner: EpochPlanner, iteration: int, peak: int = 3_000_000) -> IterationReport:
    plan = planner.epoch(0)[iteration]
    busy = tuple(1.5 * s for s in plan.busy_s)
    peaks = (peak,) * plan.world_size
    return IterationReport(plan, busy, 1.2 * max(busy), peaks, 1.0, 10.0)


class StandIn(SingleDeviceStrategy):
    """Has a plan and reports, and refuses to communicate."""

    def __init__(self, planner: EpochPlanner, peak: int = 3_000_000) -> None:
        super().__init__(device="cpu")
        self._planner: EpochPlanner | None = planner
        self.last_report: IterationReport | None = None
        self.peak = peak
        self.silent_steps: set[int] = set()

    @property
    def planner(self) -> EpochPlanner:
        if self._planner is None:
            raise RuntimeError("not set up")
        return self._planner

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        step = self.lightning_module.trainer.global_step
        if step not in self.silent_steps:
            self.last_report = report_of(self.planner, step, self.peak)
        return super().backward(*args, **kwargs)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # Lightning asks for the loader's length; a logged value would come with a float.
        assert not torch.is_floating_point(torch.as_tensor(tensor)), "a logged value was reduced"
        return tensor

    def teardown(self) -> None:
        super().teardown()
        self._planner = None  # a callback's on_fit_end comes after this


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(strategy: Any, callback: DCPCallback, tmp_path: Path, **options: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=3,
        callbacks=[callback],
        logger=CSVLogger(tmp_path, name="", version=""),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(Model(), DataLoader(torch.ones(8, 2), batch_size=2))
    return trainer


def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def text_of(parts: list[Any]) -> str:
    target = console()
    for part in parts:
        target.print(part, markup=False)
    return target.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore")
class TestInTraining:
    def test_every_iteration_is_logged(self, planner: EpochPlanner, tmp_path: Path) -> None:
        callback = DCPCallback(print_table=False)
        trainer = fit(StandIn(planner), callback, tmp_path)
        rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
        assert len(rows) == 3
        for step, row in enumerate(rows):
            report = report_of(planner, step)
            logged = {k: float(v) for k, v in row.items() if k.startswith("dcp/")}
            shown, others = report_scalars(report)
            assert logged == pytest.approx({**shown, **others}, rel=1e-4)
        assert set(trainer.progress_bar_metrics) >= {"dcp/idle_share", "dcp/tokens_per_s"}
        assert "dcp/padding_share" not in trainer.progress_bar_metrics
        totals = callback.metrics.compute()
        reports = [report_of(planner, step) for step in range(3)]
        tokens = sum(r.plan.num_tokens for r in reports) / sum(r.wall_s for r in reports)
        assert float(totals["dcp/tokens_per_s"]) == pytest.approx(tokens)

    def test_tables_at_both_ends(self, planner: EpochPlanner, tmp_path: Path) -> None:
        target = console()
        fit(StandIn(planner), DCPCallback(console=target), tmp_path)
        text = target.file.getvalue()  # type: ignore[attr-defined]
        start, end = text.index("400 samples in"), text.index("over 3 iterations")
        assert start < end
        assert HEADS in text
        assert "held-out error at" in text
        assert "best static plan (p=" in text[end:]
        assert max(map(len, text.splitlines())) <= 100

    def test_prints_to_standard_output(
        self, planner: EpochPlanner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fit(StandIn(planner), DCPCallback(), tmp_path)
        assert "400 samples in" in capsys.readouterr().out

    @pytest.mark.parametrize("how", ["option", "rank"])
    def test_prints_nothing(
        self,
        planner: EpochPlanner,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        how: str,
    ) -> None:
        if how == "rank":
            monkeypatch.setattr(StandIn, "is_global_zero", property(lambda self: False))
        callback = DCPCallback(print_table=how == "rank")
        fit(StandIn(planner), callback, tmp_path)
        assert capsys.readouterr().out == ""
        assert float(callback.metrics.compute()["dcp/tokens_per_s"]) > 0

    def test_an_iteration_counts_once(self, planner: EpochPlanner, tmp_path: Path) -> None:
        strategy = StandIn(planner)
        strategy.silent_steps = {1}  # the report of iteration 0 is still there in iteration 1
        strategy.last_report = report_of(planner, 5)  # left over from an earlier fit
        callback = DCPCallback(print_table=False)
        fit(strategy, callback, tmp_path)
        tokens = sum(report_of(planner, step).plan.num_tokens for step in (0, 2))
        assert callback.metrics["tokens_per_s"].numerator.item() == tokens

    def test_no_report_yet_and_memory_not_measurable(
        self, planner: EpochPlanner, tmp_path: Path
    ) -> None:
        strategy = StandIn(planner, peak=0)
        strategy.silent_steps = {0}
        target = console()
        fit(strategy, DCPCallback(console=target), tmp_path)
        rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
        assert len(rows) == 2
        assert "dcp/peak_bytes" not in rows[0]
        assert "not measurable" in target.file.getvalue()  # type: ignore[attr-defined]

    def test_a_strategy_without_plan_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(
            MisconfigurationException, match=r"SingleDeviceStrategy.*strategy='dcp'"
        ):
            fit("auto", DCPCallback(), tmp_path)

    def test_validation_alone_needs_no_plan(self, tmp_path: Path) -> None:
        class Validated(Model):
            def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
                self.layer(batch)

        trainer = L.Trainer(
            accelerator="cpu",
            callbacks=[DCPCallback()],
            logger=False,
            enable_progress_bar=False,
            default_root_dir=tmp_path,
        )
        trainer.validate(Validated(), DataLoader(torch.ones(4, 2)), verbose=False)


def test_logged_names_depend_on_the_world_size_only(planner: EpochPlanner) -> None:
    names = {frozenset(report_scalars(report_of(planner, i))[1]) for i in range(5)}
    assert len(names) == 1
    assert {"dcp/num_p1", "dcp/num_p2", "dcp/num_p4"} <= next(iter(names))


def test_scalars_by_hand(planner: EpochPlanner) -> None:
    report = report_of(planner, 0)
    shown, others = report_scalars(report)
    plan = report.plan
    assert shown["dcp/idle_share"] == pytest.approx(report.idle_share)
    assert others["dcp/makespan_s"] == max(report.busy_s)
    assert others["dcp/predicted_makespan_s"] == plan.makespan_s
    assert others["dcp/peak_bytes"] == 3_000_000
    sizes = [mb.batch_size for mb in plan.micro_batches]
    assert others["dcp/b_mean"] == pytest.approx(sum(sizes) / len(sizes))
    assert others["dcp/b_max"] == max(sizes)
    assert others["dcp/g_mean"] == pytest.approx(sum(plan.accumulation) / 4)
    by_size = sum(others[f"dcp/num_p{p}"] for p in (1, 2, 4))
    assert by_size == len(plan.micro_batches)


def test_bucket_table_holds_every_choice(planner: EpochPlanner) -> None:
    text = text_of(plan_tables(planner))
    for choice in planner.bucket_table():
        row = next(
            line for line in text.splitlines() if f" {choice.lo:,} - {choice.hi - 1:,} " in line
        )
        cells = [cell.strip() for cell in row.strip("│").split("│")]
        assert cells[1:5] == [
            f"{choice.num_samples:,}",
            str(choice.sp_size),
            str(choice.batch_size),
            str(choice.recompute_blocks),
        ]
    assert f"{planner.num_iterations} iterations per epoch" in text
    assert max(map(len, text.splitlines())) <= 100


def test_exclusions_are_grouped() -> None:
    rows = exclusion_rows(
        [
            Exclusion(2, "one sample of 900 tokens lacks 1.50 MiB of memory", 800, 901),
            Exclusion(4, HEADS),
            Exclusion(2, "one sample of 1500 tokens lacks 2.10 GiB of memory", 901, 1501),
            Exclusion(2, "one sample of 9000 tokens lacks 3.00 GiB of memory", 4000, 9001),
            Exclusion(8, "not measured (measured: [1, 2])"),
        ]
    )
    assert rows == [
        (
            "p=2 at 800 - 1,500, 4,000 - 9,000",
            "for example, one sample of 900 tokens lacks 1.50 MiB of memory",
        ),
        ("p=4", HEADS),
        ("p=8", "not measured (measured: [1, 2])"),
    ]


def test_reasons_are_no_markup() -> None:
    planner = make_planner([5, 9, 30], 2, sp_size_exclusions={2: "measured: [1, 4] [red]x[/red]"})
    assert "measured: [1, 4] [red]x[/red]" in text_of(plan_tables(planner))


def test_summary(planner: EpochPlanner) -> None:
    metrics = dcp_metrics()
    for step in range(4):
        metrics.update(report_of(planner, step))
    text = text_of([summary_table(metrics.compute(), 4)])
    makespan = next(line for line in text.splitlines() if "makespan" in line)
    assert makespan.rstrip(" │").endswith("1.50")
    for label in ("idle share", "padding share", "SP size p", "tokens/s"):
        assert label in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_static_plan_beside_ours(planner: EpochPlanner) -> None:
    ours, theirs = static_lines(planner)
    assert "idle share" in ours
    factor = float(theirs.split("DCP is ")[1].split(" ")[0])
    assert factor >= 1
    nothing = make_planner([5, 9, 30], 1)
    nothing.lengths = torch.ones(60_000, dtype=torch.long).numpy()
    assert static_lines(nothing) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_seconds(3.14159), "3.14 s"),
        (format_seconds(0.0217), "21.7 ms"),
        (format_seconds(4.2e-5), "42.0 us"),
        (format_seconds(0.0), "0.00 us"),
        (format_seconds(1234.0), "1,234 s"),
        (format_bytes(0), "0.00 B"),
        (format_bytes(1536), "1.50 KiB"),
        (format_bytes(150 * 2**20), "150 MiB"),
        (format_bytes(3 * 2**40), "3.00 TiB"),
        (format_count(999), "999"),
        (format_count(12_345), "12.3k"),
        (format_count(2_500_000), "2.50M"),
        (format_count(3e9), "3.00G"),
    ],
)
def test_figures(text: str, expected: str) -> None:
    assert text == expected

"""What DCP decided and how it went: tables at the ends of `fit`, logged values in between."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_dcp.metrics import choice_counts, dcp_metrics
from lightning_dcp.tables import plan_tables, static_lines, summary_table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from lightning_dcp.planning.planner import EpochPlanner
    from lightning_dcp.planning.report import IterationReport

_WIDTH = 100  # where the output is no terminal


class DCPCallback(Callback):
    """Shows why configurations were chosen, and logs each iteration's figures.

    At the start of `fit`, rank 0 prints the buckets with their configuration, why SP sizes were
    left out, and how well the cost model predicts points it was not fitted to; at the end, a
    summary of prediction beside measurement. Every iteration logs, through any Lightning logger and
    as often as `Trainer(log_every_n_steps=...)` says:

    - `dcp/idle_share` and `dcp/tokens_per_s`, which the progress bar shows as well;
    - `dcp/padding_share`, `dcp/predicted_idle_share`;
    - `dcp/makespan_s`, `dcp/predicted_makespan_s`, `dcp/wall_s`;
    - `dcp/peak_bytes` (where it can be measured), `dcp/predicted_peak_bytes`;
    - `dcp/slowest_rank`, `dcp/slowest_rank_factor` (how many times as long as the typical rank it
      takes for the same work) and `dcp/time_ratio_<lo>_<hi>` of each bucket (measured / predicted
      seconds at lengths from lo to hi), from the first exchange of what micro-batches took on;
    - `dcp/num_p1`, `dcp/num_p2`, ...: micro-batches at each SP size; `dcp/b_mean`, `dcp/b_max`,
      `dcp/g_mean`, `dcp/g_max`, `dcp/r_mean`, `dcp/r_max`.

    All ranks log the same values and none of it starts a collective.

    Args:
        print_table: Whether rank 0 prints the tables.
        console: Where to print them; standard output by default.

    Attributes:
        metrics: `lightning_dcp.metrics.dcp_metrics()` over the current or last `fit`.
    """

    def __init__(self, *, print_table: bool = True, console: Console | None = None) -> None:
        super().__init__()
        self.print_table = print_table
        self.metrics = dcp_metrics()
        self._console = console
        self._planner: EpochPlanner | None = None
        self._last: IterationReport | None = None
        self._num_iterations = 0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a Trainer whose strategy has no plan.

        Raises:
            MisconfigurationException: The strategy is none of DCP's.
        """
        if stage == "fit" and not _is_dcp(trainer.strategy):
            raise MisconfigurationException(
                f"DCPCallback needs a DCP strategy, but the Trainer has "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy='dcp'), 'dcp_ddp' or "
                "'dcp_fsdp' (after `import lightning_dcp`), or remove the callback."
            )

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the bucket table; the strategy has made its planner by now."""
        strategy: Any = trainer.strategy
        self._planner = strategy.planner
        # A strategy that fits twice still has the report of the first time.
        self._last = getattr(strategy, "last_report", None)
        self._num_iterations = 0
        self.metrics.reset()
        if self.print_table and trainer.is_global_zero and self._planner is not None:
            self._print(plan_tables(self._planner))

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log the iteration that has just ended."""
        report: IterationReport | None = getattr(trainer.strategy, "last_report", None)
        if report is None or report is self._last:
            return  # nothing new: a strategy that has not finished an iteration
        self._last = report
        self._num_iterations += 1
        self.metrics.update(report)
        shown, others = report_scalars(report)
        # `batch_size` because Lightning would otherwise look for one in a list of micro-batches.
        for values, prog_bar in ((shown, True), (others, False)):
            pl_module.log_dict(
                values, prog_bar=prog_bar, on_step=True, on_epoch=False, batch_size=1
            )

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the summary. The strategy has been torn down; what is needed was kept."""
        if not (self.print_table and trainer.is_global_zero and self._num_iterations):
            return
        self._print([summary_table(self.metrics.compute(), self._num_iterations)])
        if self._planner is not None:
            self._print(static_lines(self._planner))

    def _print(self, parts: Iterable[RenderableType]) -> None:
        if self._console is None:
            from rich.console import Console

            probe = Console()
            self._console = probe if probe.is_terminal else Console(width=_WIDTH)
        for part in parts:
            self._console.print(part, markup=False)


def _is_dcp(strategy: object) -> bool:
    missing = object()
    # Statically: a property would be run, and may not be ready.
    return inspect.getattr_static(strategy, "planner", missing) is not missing


def report_scalars(report: IterationReport) -> tuple[dict[str, float], dict[str, float]]:
    """The values of one iteration that are logged.

    Args:
        report: The iteration.

    Returns:
        Those for the progress bar and logger, and those for the logger only. Which keys there are
        depends on the world size, on whether memory can be measured, and on what is known of
        buckets and ranks; it is the same on all ranks.
    """
    shown = {"dcp/idle_share": report.idle_share, "dcp/tokens_per_s": report.tokens_per_s}
    others = {
        "dcp/padding_share": report.padding_share,
        "dcp/predicted_idle_share": report.predicted_idle_share,
        "dcp/makespan_s": report.makespan_s,
        "dcp/predicted_makespan_s": report.predicted_makespan_s,
        "dcp/wall_s": report.wall_s,
        "dcp/predicted_peak_bytes": float(report.predicted_peak_bytes),
    }
    if report.measured_peak_bytes > 0:
        others["dcp/peak_bytes"] = float(report.measured_peak_bytes)
    if report.slowest_rank is not None and report.slowest_rank_factor is not None:
        others["dcp/slowest_rank"] = float(report.slowest_rank)
        others["dcp/slowest_rank_factor"] = report.slowest_rank_factor
    for (lo, hi), ratio in report.bucket_time_ratios.items():
        others[f"dcp/time_ratio_{lo}_{hi - 1}"] = ratio
    sp_size = 1
    while sp_size <= report.plan.world_size:
        others[f"dcp/num_p{sp_size}"] = float(report.sp_size_counts.get(sp_size, 0))
        sp_size *= 2
    for choice in ("b", "g", "r"):
        counts = choice_counts(report, choice)
        total = sum(counts.values())
        others[f"dcp/{choice}_mean"] = sum(v * n for v, n in counts.items()) / total
        others[f"dcp/{choice}_max"] = float(max(counts))
    return shown, others

"""From the user's loader for validation, testing or prediction to one that follows a plan.

No cost profile is needed: how long a step takes does not matter for which samples fit. What it
takes in memory is measured by a few short steps; SP sizes above 1 are only looked at where the
longest sample does not fit on one rank.

What cannot be planned is not refused, since plain data-parallel evaluation can do it: it is left to
Lightning with one line that says why. Runs on all ranks at once; every step that can fail on one
rank only is agreed on before the next collective.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_dcp.data.evaluation_loader import build_evaluation_loader, why_not_planned
from lightning_dcp.data.lengths import resolve_lengths
from lightning_dcp.data.samples import UnknownForm
from lightning_dcp.planning.evaluation import EvaluationPlanner
from lightning_dcp.planning.lengths import IntArray
from lightning_dcp.strategies._lightning_compat import evaluation as compat_eval
from lightning_dcp.strategies.agreement import (
    check_same_on_all_ranks,
    collectively,
    gather_objects,
)
from lightning_dcp.strategies.evaluation.measuring import EvaluatingStrategy, EvaluationMeasurer
from lightning_dcp.strategies.preparation import SAME_DATA, memory_limit, what_is_planned

if TYPE_CHECKING:
    import lightning as L
    from torch.utils.data import DataLoader

    from lightning_dcp.parallel.runtime import BlockRuntime
    from lightning_dcp.parallel.topology import Topology

#: First number of the keys of random numbers, so that no training step has the same.
_RNG_STAGE = 0x4556414C


class EvaluationPreparer:
    """Plans the loaders of one run of `fit`, `validate`, `test` or `predict`.

    Args:
        strategy: whose ranks evaluate.
        trainer: inside the run.
        pl_module: the model, on its device.
        runtime: of its blocks; None where it has none.
        topology: of the world.
        fixed_bytes: what stays on each rank.
    """

    def __init__(
        self,
        strategy: EvaluatingStrategy,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        runtime: BlockRuntime | None,
        topology: Topology,
        fixed_bytes: int,
    ) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._pl_module = pl_module
        self._topology = topology
        self._measurer = EvaluationMeasurer(
            strategy, trainer, pl_module, runtime, topology, fixed_bytes, self._tell
        )
        self._step_name = compat_eval.step_name(trainer)
        self._told: set[str] = set()

    def prepare(
        self, dataloader: Any, index: int, num_loaders: int, mode: str | None
    ) -> DataLoader[Any] | None:
        """A loader that follows a plan; None to leave it to Lightning.

        Args:
            dataloader: the user's.
            index: its place among the loaders.
            num_loaders: how many there are.
            mode: how a CombinedLoader combines them, if not one after the other.

        Raises:
            MisconfigurationException: ranks that disagree.
            ValueError: wrong lengths, or a sample that fits nowhere.
        """
        reason = self._why_not(dataloader, mode)
        reasons = [text for text in gather_objects(reason) if text is not None]
        if reasons:
            self._leave(reasons[0])
            return None
        lengths, known = collectively(
            "Reading the lengths of what is evaluated", partial(self._lengths, dataloader)
        )
        planning = self._strategy.settings.planning
        # `dataloader.batch_size` is None where a batch sampler was given.
        batch_size: int = dataloader.batch_sampler.batch_size
        check_same_on_all_ranks(
            "the evaluation plan",
            what_is_planned(self._strategy, lengths, batch_size),
            SAME_DATA,
        )
        limit = memory_limit(self._strategy)
        memory = None
        if known:
            memory = self._measurer.memory(dataloader, lengths, limit, index, num_loaders)
        planner = collectively(
            "Planning the evaluation",
            lambda: EvaluationPlanner(
                lengths=lengths,
                batch_size=batch_size,
                world_size=self._topology.world_size,
                memory=memory,
                limit_bytes=limit,
                pad_multiple=planning.pad_multiple if known else 1,
                max_batch_size=planning.max_batch_size,
                in_order=compat_eval.is_prediction(self._trainer),
                on_too_long=planning.on_too_long,
                dataset_name=type(dataloader.dataset).__name__,
                layout=self._topology.layout,
            ),
        )
        check_same_on_all_ranks(
            "the evaluation plan",
            {"plan": planner.fingerprint()[:12]},
            "Start every rank with the same code, data, options and libraries.",
        )
        if memory is not None:
            # Here on all ranks: in a batch only those of one group would, in unlike order.
            self._topology.create_groups(memory.coefficients)
        return self._follow(dataloader, planner, index, lengths)

    def _follow(
        self, dataloader: DataLoader[Any], planner: EvaluationPlanner, index: int, lengths: IntArray
    ) -> DataLoader[Any] | None:
        loader, reason = None, None
        try:
            loader = build_evaluation_loader(
                dataloader,
                planner,
                rank=self._topology.rank,
                seed=self._strategy.seed,
                stage=(_RNG_STAGE, index),
                truncate=getattr(self._datamodule, "truncate_sample", None),
            )
        except TypeError as error:  # a subclass that cannot be made again
            reason = str(error)
        reasons = [text for text in gather_objects(reason) if text is not None]
        if reasons or loader is None:
            self._leave(reasons[0])
            return None
        dataset: Any = loader.dataset
        collectively("Cutting a sample that is too long", dataset.check_cut)
        if getattr(dataloader.batch_sampler, "drop_last", False):
            self._tell("`drop_last=True` has no effect: every sample is evaluated exactly once.")
        _tell_of_too_long(planner, lengths)
        return loader

    # ---- what can be planned ---------------------------------------------------------------------

    def _why_not(self, dataloader: Any, mode: str | None) -> str | None:
        if mode is not None:
            return f"a CombinedLoader combines it with others, mode={mode!r}"
        if compat_eval.takes_iterator(self._pl_module, self._step_name):
            return f"`{self._step_name}` takes `dataloader_iter`"
        if not compat_eval.divides_data(self._trainer):
            return "Trainer(use_distributed_sampler=False) leaves the division over ranks to you"
        return why_not_planned(dataloader, self._topology.world_size)

    def _leave(self, reason: str) -> None:
        self._tell(
            f"the loader for `{self._step_name}` is not planned but evaluated as under 'ddp':"
            f" {reason.rstrip('.')}."
        )

    def _tell(self, what: str) -> None:
        if what not in self._told:  # once, though loaders may be made anew every epoch
            self._told.add(what)
            rank_zero_info(f"DCP: {what}")

    @property
    def _datamodule(self) -> Any:
        return getattr(self._trainer, "datamodule", None) or self._pl_module

    def _lengths(self, dataloader: DataLoader[Any]) -> tuple[IntArray, bool]:
        """Lengths, and whether they are known: else all are taken to be 1."""
        try:
            lengths = resolve_lengths(
                dataloader.dataset,
                datamodule=self._datamodule,
                show_progress=self._topology.rank == 0,
            )
        except UnknownForm as error:
            self._tell(
                "lengths of what is evaluated are not known, so that memory is not planned and"
                f" every sample runs on one rank. {error}"
            )
            return np.ones(len(dataloader.dataset), dtype=np.int64), False  # type: ignore[arg-type]
        return lengths, True


def _tell_of_too_long(planner: EvaluationPlanner, lengths: IntArray) -> None:
    if planner.skipped_ids:
        rank_zero_warn(
            f"DCP: on_too_long='skip' leaves {len(planner.skipped_ids)} of {len(lengths)} samples"
            " out of the evaluation, which do not fit into memory; the longest has length"
            f" {max(int(lengths[i]) for i in planner.skipped_ids)}."
        )
    elif planner.truncate_to is not None:
        cut = int((lengths > planner.truncate_to).sum())
        rank_zero_warn(
            f"DCP: on_too_long='truncate' evaluates {cut} of {len(lengths)} samples cut to"
            f" {planner.truncate_to} tokens, the longest that fit into memory."
        )

"""The part of a strategy that evaluates by plan; everything else of it is in `run.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_dcp.strategies.checkpointing.planned import PlannedCheckpoints
from lightning_dcp.strategies.evaluation.run import Evaluation
from lightning_dcp.strategies.out_of_memory import saying_where

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class PlannedEvaluation(PlannedCheckpoints):
    """Hands the steps of validation, testing and prediction to an `Evaluation`."""

    #: Of the running `fit`, `validate`, `test` or `predict`; None outside.
    _evaluation: Evaluation | None = None

    @property
    def counts_batch(self) -> bool:
        """Whether this rank's results of the running validation, test or predict batch count.

        A sample that several ranks evaluate together counts on one of them. Logged values, metric
        objects and predictions see to it; what you collect yourself has to ask.
        """
        return self._evaluation is None or self._evaluation.counts

    def whole_parameters(self) -> AbstractContextManager[None]:
        """In here parameters are whole on each rank, and no forward pass gathers any."""
        return nullcontext()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._planned_step(*args):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._planned_step(*args):
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._planned_step(*args):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _planned_step(self, batch: Any, *_: Any) -> Iterator[None]:
        """Around a step of the user's; all ranks run as many, so parameters are gathered for it."""
        if self._evaluation is not None:
            self._evaluation.moved(batch)
        with saying_where(self._where_evaluated), self.whole_parameters():
            yield
            if self._evaluation is not None:
                self._evaluation.step_done()

    def _where_evaluated(self) -> str:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        return f"while {trainer.state.stage}, in epoch {trainer.current_epoch}"

    def _end_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.remove()
            self._evaluation = None

    @override
    def teardown(self) -> None:
        self._end_evaluation()
        super().teardown()

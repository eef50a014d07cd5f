"""Seeing an exception before Lightning hands it to callbacks.

========================  =======================================================================
private name              why
========================  =======================================================================
``Trainer._run_stage``    holds the loops of fit, validate, test and predict. `on_exception` of the
                          strategy comes after that of callbacks, one of which may save a checkpoint
                          and wait for ranks that know of nothing; and it cannot say more in the
                          exception that the user sees
``_TunerExitException``   ends a run of the learning rate finder that went well
========================  =======================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import _TunerExitException

if TYPE_CHECKING:
    import lightning as L

__all__ = ["StageGuard", "ends_well"]


def ends_well(error: BaseException) -> bool:
    """Whether an exception is Lightning's way to end a run that went well."""
    return isinstance(error, _TunerExitException)


class StageGuard:
    """Has a say in what the loops of one run of a Trainer raise.

    Args:
        trainer: whose next run it is.
        raised: given what was raised; returns what to raise.
    """

    def __init__(
        self, trainer: L.Trainer, raised: Callable[[BaseException], BaseException]
    ) -> None:
        self._trainer = trainer
        run_stage = trainer._run_stage

        def guarded() -> Any:
            try:
                return run_stage()
            except BaseException as error:
                instead = raised(error)
                if instead is error:
                    raise
                raise instead from error

        trainer.__dict__["_run_stage"] = guarded

    def remove(self) -> None:
        """Undo it. Safe to call twice."""
        self._trainer.__dict__.pop("_run_stage", None)

"""The private names of Lightning by which ranks take decisions alone that all must take alike.

NOTE [Signals on several ranks]
    Lightning 2.6.6 starts a broadcast inside the handler of SIGTERM. The signal arrives at each
    rank somewhere else, so that the broadcast of one meets another collective of the next: the run
    hangs instead of ending, under `ddp` too. And a rank that has noticed the signal leaves at the
    end of its batch, while one that has not goes on. SLURM's signal before a job is queued again is
    worse: its handler saves a checkpoint, in the midst of whatever each rank is doing. Here
    handlers only remember; before each iteration, where Lightning broadcasts a flag anyway, and at
    the end of each epoch, all ranks agree: they save together, and leave together. A validation
    inside `fit` is run to its end: a checkpoint from the midst of it would resume with half of it.
    Where there is nothing to save (`validate`, `test`, `predict`) they leave before a batch.

NOTE [Ranks that part]
    `trainer.should_stop`, set on one rank alone, sends that rank into validation, or to the end of
    the epoch, while the others begin an iteration: each waits in a collective that the others never
    come to, under `ddp` too. So whoever leaves the iterations goes through the same sum as those
    who begin one, and says so in it.

========================================  =====================================================
private name                              why
========================================  =====================================================
``_signal_connector.
_sigterm_notifier_fn``                    the handler with the broadcast, taken up by Lightning
                                          after `Strategy.setup`
``_signal_connector.
_slurm_sigusr_handler_fn``                the handler that saves and queues the job again
``epoch_loop._broadcast_sigterm_tensor``  where all ranks are asked before each iteration
``fit_loop.on_advance_end``                (public) ends each epoch, and there leaves `fit`
``_signal_connector``                     its `received_sigterm` is what loops and callbacks read
``epoch_loop._should_check_val_fx``       sends a rank into validation, by its own clock where
                                          `val_check_interval` is a time
``trainer._val_check_time_interval``      to know whether it is
========================================  =====================================================
"""

from __future__ import annotations

import inspect
import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_dcp.strategies.agreement import gather_objects

if TYPE_CHECKING:
    import lightning as L

#: Above the number of ranks, so that one sum counts both signals,
_QUEUE_AGAIN = 2**20
#: and the ranks that do not go on with an iteration.
_NO_ITERATION = 2**36

_log = logging.getLogger(__name__)


class AgreedEnd:
    """All ranks of a `validate`, `test` or `predict` end before the same batch.

    Once any of them has got a SIGTERM.

    Args:
        trainer: of the run that begins.
        sum_over_ranks: sums one number over all ranks; a collective.
    """

    def __init__(self, trainer: L.Trainer, sum_over_ranks: Callable[[float], float]) -> None:
        self._trainer = trainer
        self._sum_over_ranks = sum_over_ranks
        self._received = False
        if trainer.world_size > 1:  # a single process has nobody to agree with
            trainer._signal_connector.__dict__["_sigterm_notifier_fn"] = self._remember

    def remove(self) -> None:
        """Undo everything. Safe to call twice."""
        self._trainer._signal_connector.__dict__.pop("_sigterm_notifier_fn", None)

    def before_batch(self, equal_numbers: bool) -> None:
        """Before each batch; a collective if `equal_numbers`: all ranks run as many batches."""
        if self._trainer.world_size == 1:
            return
        if equal_numbers:
            self._agree()
        elif self._received:
            self._leave()

    def _remember(self, signum: int, _: Any) -> None:
        _log.info("[rank: %d] Received SIGTERM: %d", self._trainer.global_rank, signum)
        launcher = self._trainer.strategy.launcher
        if not self._received and launcher is not None:
            launcher.kill(signum)
        self._received = True

    def _agree(self) -> None:
        if self._sum_over_ranks(float(self._received)) > 0:
            self._leave()

    def _leave(self) -> None:
        self._trainer._signal_connector.received_sigterm = True
        rank_zero_info(
            "DCP: a rank received SIGTERM: all ranks end here, together. The exit code"
            " is 0, as Lightning has it."
        )
        raise SIGTERMException


class AgreedDecisions(AgreedEnd):
    """All ranks end a `fit` before the same iteration, and validate after the same one.

    Once any of them has got a SIGTERM, or finds that it is time to validate. And they save before
    the same iteration, once any of them has got SLURM's signal that the job is to be queued again.

    Args:
        trainer: of the `fit` that begins.
        sum_over_ranks: sums one number over all ranks; a collective.
    """

    def __init__(self, trainer: L.Trainer, sum_over_ranks: Callable[[float], float]) -> None:
        super().__init__(trainer, sum_over_ranks)
        self._queue_again: int | None = None
        if trainer.world_size == 1:
            return
        signals = trainer._signal_connector
        self._save_and_queue_again = signals._slurm_sigusr_handler_fn
        signals.__dict__["_slurm_sigusr_handler_fn"] = self._remember_to_queue_again
        epoch_loop = trainer.fit_loop.epoch_loop
        epoch_loop.__dict__["_broadcast_sigterm_tensor"] = self._agree
        end_epoch = trainer.fit_loop.on_advance_end

        def on_advance_end() -> None:
            self._meet("the end of the epoch")  # before what is reduced there
            end_epoch()
            self._agree()  # a signal that came after the last iteration, in its validation perhaps

        trainer.fit_loop.__dict__["on_advance_end"] = on_advance_end
        by_clock = getattr(trainer, "_val_check_time_interval", None) is not None
        own_decision = epoch_loop._should_check_val_fx

        def should_check_val(data_fetcher: Any) -> bool:
            due = own_decision(data_fetcher)
            if by_clock:
                return sum_over_ranks(float(due)) > 0
            if due:
                self._meet("validation")
            return due

        epoch_loop.__dict__["_should_check_val_fx"] = should_check_val

    @override
    def remove(self) -> None:
        super().remove()
        self._trainer._signal_connector.__dict__.pop("_slurm_sigusr_handler_fn", None)
        self._trainer.fit_loop.__dict__.pop("on_advance_end", None)
        for name in ("_broadcast_sigterm_tensor", "_should_check_val_fx"):
            self._trainer.fit_loop.epoch_loop.__dict__.pop(name, None)

    def _meet(self, instead: str, own: float = 0.0) -> float:
        """Sum a number over all ranks, if all of them go on with the same.

        Args:
            instead: what this rank goes on with; "": an iteration.
            own: below `_NO_ITERATION` in sum.

        Raises:
            RuntimeError: on all ranks, if they do not.
        """
        together = self._sum_over_ranks(own + _NO_ITERATION * bool(instead))
        if 0 < together // _NO_ITERATION < self._trainer.world_size:
            everyone = gather_objects(instead or "an iteration")
            parted = "; ".join(
                f"{what} on rank {', '.join(str(r) for r, w in enumerate(everyone) if w == what)}"
                for what in dict.fromkeys(everyone)
            )
            raise RuntimeError(
                f"Ranks have parted at global_step={self._trainer.global_step}. What follows is"
                f" {parted}. Code that sets `trainer.should_stop` has to do so on all ranks in the"
                " same step: stop = trainer.strategy.reduce_boolean_decision(stop, all=False),"
                " called on all of them, in `on_train_batch_end` for one, is the same on all."
            )
        return together % _NO_ITERATION

    def _remember_to_queue_again(self, signum: int, _: Any) -> None:
        self._queue_again = signum

    @override
    def _agree(self) -> None:
        own = _QUEUE_AGAIN * (self._queue_again is not None) + self._received
        together = self._meet("", own)
        if together >= _QUEUE_AGAIN:
            signum, frame = self._queue_again or signal.SIGUSR1, inspect.currentframe()
            assert frame is not None
            self._queue_again = None
            self._save_and_queue_again(signum, frame)
        if together % _QUEUE_AGAIN > 0:
            self._leave()

"""What a strategy tells its `Watch`: when a run begins and ends, where it is, what was raised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.parallel import ParallelStrategy
from typing_extensions import override

from lightning_dcp.strategies._lightning_compat.stages import StageGuard, ends_well
from lightning_dcp.strategies.watch.ending import tell
from lightning_dcp.strategies.watch.places import BETWEEN_ITERATIONS
from lightning_dcp.strategies.watch.watch import Watch

if TYPE_CHECKING:
    from lightning_dcp.strategies.settings import DCPSettings

__all__ = ["WatchedStrategy"]


class WatchedStrategy(ParallelStrategy):
    """Ranks watch over each other from `setup_environment` to `teardown`.

    Mixed in before one of Lightning's strategies, which implements what is abstract here.
    """

    settings: DCPSettings
    #: Over the ranks of the running `fit`, `validate`, `test` or `predict`.
    watch: Watch = Watch()
    _stage_guard: StageGuard | None = None

    def start_watch(self) -> None:
        """Begin; a collective, once processes are connected."""
        self.watch = Watch(
            rank=self.global_rank,
            world_size=self.world_size,
            timeout_s=self.settings.reliability.rank_timeout_s,
        )
        self.watch.start()
        if self.lightning_module is not None:
            self._stage_guard = StageGuard(self.lightning_module.trainer, self._raised)

    def _raised(self, error: BaseException) -> BaseException:
        return error if ends_well(error) else self.watch.raised(error)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self.watch.place = BETWEEN_ITERATIONS
        return output

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.watch.at("validation")

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.watch.place = BETWEEN_ITERATIONS

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self.watch.at("testing")

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        self.watch.at("prediction")

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        told = self._raised(exception)  # in set-up; what loops raise is known already
        if told is not exception:
            if hasattr(exception, "add_note"):  # Python 3.11
                exception.add_note(f"DCP: {told}")
            else:
                tell(self.global_rank, str(told))

    @override
    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if self._stage_guard is not None:
                self._stage_guard.remove()
                self._stage_guard = None
            self.watch.stop()

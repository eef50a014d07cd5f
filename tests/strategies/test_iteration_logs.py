"""Logged values of an iteration, reduced over micro-batches and ranks; ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_dcp.strategies.iteration_logs import IterationLogs, LogKey


class ThreadRanks:
    """Ranks as threads that exchange values at a barrier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=10)
        self._slots: list[Any] = [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def run(
        self, work: Callable[[int, IterationLogs, dict[str, float]], Any]
    ) -> list[dict[str, float]]:
        filed: list[dict[str, float]] = [{} for _ in range(self.size)]
        errors: list[BaseException] = []

        def rank_main(rank: int) -> None:
            def file(key: LogKey, value: Tensor, weight: float) -> None:
                filed[rank][key.name] = float(value)
                filed[rank][f"{key.name}:weight"] = weight

            logs = IterationLogs(
                file_value=file,
                file_metric=lambda key: filed[rank].setdefault(key.name, float("nan")),
                exchange=lambda row: torch.stack(self.gather(rank, row)),
                gather_objects=lambda obj: self.gather(rank, obj),
                device=torch.device("cpu"),
            )
            try:
                work(rank, logs, filed[rank])
            except BaseException as e:  # noqa: BLE001 - raised again in the test's own thread
                errors.append(e)
                self._barrier.abort()

        threads = [threading.Thread(target=rank_main, args=(r,)) for r in range(self.size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
        if errors:
            raise errors[0]
        return filed


WEIGHTS: dict[int, float] = {}


def begin(logs: IterationLogs, weight: float, share: float) -> None:
    """Start a micro-batch; `log` finishes it after each value, as if that were the last one."""
    WEIGHTS[id(logs)] = weight
    logs.start_micro_batch(share=share)


def log(logs: IterationLogs, name: str, value: float, **meta: Any) -> None:
    logs.add("training_step", name, torch.tensor(value), meta)
    logs.finish_micro_batch(weight=WEIGHTS.get(id(logs), 1.0))


EXTRA = torch.zeros(1, dtype=torch.float64)


def test_mean_is_weighted_by_elements_and_a_group_counts_once() -> None:
    def work(rank: int, logs: IterationLogs, filed: dict[str, float]) -> None:
        if rank in (0, 1):  # one micro-batch of 10 elements, run by both
            begin(logs, 10, 0.5)
            log(logs, "loss", 2.0)
        if rank == 2:
            for value, weight in ((4.0, 5), (8.0, 1)):
                begin(logs, weight, 1.0)
                log(logs, "loss", value)
        logs.reduce_and_file(EXTRA)  # rank 3 is idle

    for filed in ThreadRanks(4).run(work):
        assert filed["loss"] == pytest.approx((10 * 2.0 + 5 * 4.0 + 1 * 8.0) / 16)
        assert filed["loss:weight"] == 16


@pytest.mark.parametrize(
    ("reduce", "wanted"), [("sum", 2.0 + 4.0 + 8.0), ("max", 8.0), ("min", 2.0), ("avg", 40 / 12)]
)
def test_other_reductions(reduce: str, wanted: float) -> None:
    def work(rank: int, logs: IterationLogs, filed: dict[str, float]) -> None:
        if rank < 2:
            begin(logs, 8, 0.5)
            log(logs, "x", 2.0, reduce_fx=reduce)
        elif rank == 2:
            for value, weight in ((4.0, 2), (8.0, 2)):
                begin(logs, weight, 1.0)
                log(logs, "x", value, reduce_fx=reduce)
        logs.reduce_and_file(EXTRA)

    assert [f["x"] for f in ThreadRanks(4).run(work)] == pytest.approx([wanted] * 4)


def test_batch_size_of_the_call_replaces_the_elements() -> None:
    def work(rank: int, logs: IterationLogs, filed: dict[str, float]) -> None:
        begin(logs, 100, 1.0)
        log(logs, "x", float(rank), batch_size=1 + 2 * rank)
        logs.reduce_and_file(EXTRA)

    for filed in ThreadRanks(2).run(work):
        assert filed["x"] == pytest.approx(3 / 4)
        assert filed["x:weight"] == 4


def test_keys_that_appear_late_and_on_one_rank_only() -> None:
    def work(rank: int, logs: IterationLogs, filed: dict[str, float]) -> None:
        for step in range(3):
            begin(logs, 1, 1.0)
            if rank == 0:
                log(logs, "always", 1.0)
            if rank == 1 and step == 1:
                log(logs, "late", 5.0)
                log(logs, "another", 6.0)
            filed.clear()
            logs.reduce_and_file(EXTRA)
            assert ("late" in filed) == (step == 1)
            assert filed["always"] == 1.0

    ThreadRanks(3).run(work)


def test_nothing_weighs_nothing_even_if_it_is_nan() -> None:
    def work(rank: int, logs: IterationLogs, filed: dict[str, float]) -> None:
        begin(logs, 0 if rank == 0 else 3, 1.0)
        log(logs, "loss", float("nan") if rank == 0 else 2.0)
        logs.reduce_and_file(EXTRA)

    assert [f["loss"] for f in ThreadRanks(2).run(work)] == [2.0, 2.0]


def test_extra_values_travel_along() -> None:
    def work(rank: int, logs: IterationLogs, filed: dict[str, float]) -> None:
        rows = logs.reduce_and_file(torch.tensor([rank, 10 * rank], dtype=torch.float64))
        assert rows.tolist() == [[0, 0], [1, 10], [2, 20]]

    ThreadRanks(3).run(work)


def test_unknown_reduction_is_refused() -> None:
    logs = IterationLogs(
        file_value=lambda *_: None,
        file_metric=lambda *_: None,
        exchange=lambda row: row[None],
        gather_objects=lambda obj: [obj],
        device=torch.device("cpu"),
    )
    with pytest.raises(MisconfigurationException, match="only mean, sum, max, min"):
        log(logs, "x", 1.0, reduce_fx=torch.median)

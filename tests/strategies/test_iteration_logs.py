"""Logged values of an iteration, reduced over micro-batches and ranks; ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from lightning_dcp.strategies.iteration_logs import IterationLogs
from lightning_dcp.strategies.logged import LogKey


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
                file_metric=lambda key, value: filed[rank].update({key.name: float(value)}),
                find_metric=find_metric,
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
METRICS: dict[str, Metric] = {"first": MeanMetric(), "second": MeanMetric()}


def find_metric(path: str) -> Metric:
    if path not in METRICS:
        raise AttributeError(path)
    return METRICS[path]


def begin(logs: IterationLogs, weight: float, share: float) -> None:
    """Start a micro-batch; `log` finishes it after each value, as if that were the last one."""
    WEIGHTS[id(logs)] = weight
    logs.start_micro_batch(share=share)


def log(logs: IterationLogs, name: str, value: float, **meta: Any) -> None:
    logs.add("training_step", name, torch.tensor(value), meta)
    logs.finish_forward(weight=WEIGHTS.get(id(logs), 1.0))


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
    ("reduce", "wanted"),
    [
        ("sum", 2.0 + 4.0 + 8.0),
        (sum, 14.0),
        (torch.sum, 14.0),
        ("max", 8.0),
        (max, 8.0),
        (torch.max, 8.0),
        ("min", 2.0),
        (min, 2.0),
        (torch.min, 2.0),
        ("AVG", 40 / 12),
        (torch.mean, 40 / 12),
    ],
)
def test_other_reductions(reduce: Any, wanted: float) -> None:
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


@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_shown(reduce: str, value: float) -> None:
    def work(rank: int, logs: IterationLogs, filed: dict[str, float]) -> None:
        begin(logs, 3, 1.0)
        log(logs, "loss", value if rank == 0 else 2.0, reduce_fx=reduce)
        logs.reduce_and_file(EXTRA)

    for filed in ThreadRanks(3).run(work):
        assert str(filed["loss"]) == str(value)


def test_weights_need_not_be_whole() -> None:
    def work(rank: int, logs: IterationLogs, filed: dict[str, float]) -> None:
        begin(logs, 0.125 if rank == 0 else 0.375, 1.0)
        log(logs, "loss", float(rank))
        logs.reduce_and_file(EXTRA)

    for filed in ThreadRanks(2).run(work):
        assert (filed["loss"], filed["loss:weight"]) == (0.75, 0.5)


def test_backward_hooks_are_weighted_as_their_micro_batch() -> None:
    """They run after the elements have been counted."""

    def work(rank: int, logs: IterationLogs, filed: dict[str, float]) -> None:
        for weight in (1, 3):
            logs.start_micro_batch(share=1.0)
            logs.finish_forward(weight=weight)
            assert logs.take("on_after_backward", "norm", torch.tensor(float(weight)), {})
            logs.finish_micro_batch()
        assert not logs.take("on_train_batch_end", "norm", torch.tensor(1.0), {})
        logs.reduce_and_file(EXTRA)

    assert ThreadRanks(1).run(work)[0] == {"norm": 2.5, "norm:weight": 4}


def test_hooks_around_zero_grad_count_once_a_rank() -> None:
    """Also on idle ranks, and whatever micro-batch is open."""

    def work(rank: int, logs: IterationLogs, filed: dict[str, float]) -> None:
        logs.start_iteration(rank_weight=2.0)
        if rank == 0:
            begin(logs, 100, 0.5)
        for reduce in ("mean", "sum"):
            meta = {"reduce_fx": reduce}
            assert logs.take("on_before_zero_grad", reduce, torch.tensor(float(rank)), meta)
        logs.reduce_and_file(EXTRA)

    for filed in ThreadRanks(4).run(work):
        assert filed == {"mean": 1.5, "mean:weight": 8, "sum": 6, "sum:weight": 4}


def test_values_keep_their_precision() -> None:
    precise = 1 + 2.0**-40

    def work(rank: int, logs: IterationLogs, filed: dict[str, float]) -> None:
        begin(logs, 1, 1.0)
        for name, dtype in (("single", torch.float32), ("double", torch.float64)):
            if rank == 1:  # rank 0 does not know the type
                logs.add("training_step", name, torch.tensor(precise, dtype=dtype), {})
        logs.finish_forward(weight=1)
        logs.reduce_and_file(EXTRA)

    for filed in ThreadRanks(2).run(work):
        assert (filed["single"], filed["double"]) == (1.0, precise)


def test_filed_hook_by_hook() -> None:
    """Lightning forgets the values of a hook where another hook logs in between."""
    order: list[str] = []

    def work(rank: int, logs: IterationLogs, filed: dict[str, float]) -> None:
        logs._file_value = lambda key, *_: order.append(key.fx)
        for names in (["a"], ["a", "b"]):
            begin(logs, 1, 1.0)
            order.clear()
            for name in names:
                for fx in ("training_step", "on_after_backward"):
                    logs.take(fx, name, torch.tensor(1.0), {})
            logs.finish_forward(weight=1)
            logs.reduce_and_file(EXTRA)

    ThreadRanks(1).run(work)
    assert order == sorted(order) and len(order) == 4


# ---- metric objects ------------------------------------------------------------------------------


def test_metric_objects_are_filed_by_all_ranks_in_one_order() -> None:
    """Lightning computes them in the order of filing, each with collectives."""
    orders: dict[int, list[str]] = {0: [], 1: [], 2: []}

    def work(rank: int, logs: IterationLogs, filed: dict[str, float]) -> None:
        logs._file_metric = lambda key, _: orders[rank].append(key.name)
        for name in {0: ["first", "second"], 1: ["second", "first"], 2: []}[rank]:
            begin(logs, 1, 1.0)
            METRICS[name](torch.tensor([1.0]))
            logs.take("training_step", name, METRICS[name], {"metric_attribute": name})
            logs.finish_forward(weight=1)
        logs.reduce_and_file(EXTRA)
        logs.reduce_and_file(EXTRA)  # nobody logs them: nothing is filed

    ThreadRanks(3).run(work)
    assert orders[0] == orders[1] == orders[2]
    assert sorted(orders[0]) == ["first", "second"]


def test_the_step_value_of_a_metric_object_is_the_mean_of_its_micro_batches() -> None:
    def work(rank: int, logs: IterationLogs, filed: dict[str, float]) -> None:
        if rank == 0:
            metric = MeanMetric()
            logs._find_metric = lambda _: metric
            for value, weight in ((2.0, 1), (6.0, 3)):
                begin(logs, weight, 1.0)
                metric(torch.tensor(value))
                meta = {"metric_attribute": "m", "on_step": True}
                logs.take("training_step", "m", metric, meta)
                logs.finish_forward(weight=weight)
        logs.reduce_and_file(EXTRA)

    assert ThreadRanks(2).run(work) == [{"m": 5.0}, {"m": 5.0}]


@pytest.mark.parametrize("attribute", [None, "first", "nowhere"])
def test_a_metric_object_outside_of_the_module_is_refused(attribute: str | None) -> None:
    logs = lone_logs()
    logs.start_micro_batch(share=1.0)
    with pytest.raises(MisconfigurationException, match="keep it as an attribute"):
        logs.take("training_step", "m", MeanMetric(), {"metric_attribute": attribute})


def test_extra_values_travel_along() -> None:
    def work(rank: int, logs: IterationLogs, filed: dict[str, float]) -> None:
        rows = logs.reduce_and_file(torch.tensor([rank, 10 * rank], dtype=torch.float64))
        assert rows.tolist() == [[0, 0], [1, 10], [2, 20]]

    ThreadRanks(3).run(work)


def lone_logs() -> IterationLogs:
    return IterationLogs(
        file_value=lambda *_: None,
        file_metric=lambda *_: None,
        find_metric=find_metric,
        exchange=lambda row: row[None],
        gather_objects=lambda obj: [obj],
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("reduce", [torch.median, np.mean, "median", lambda x: x])
def test_unknown_reduction_is_refused(reduce: Any) -> None:
    with pytest.raises(MisconfigurationException, match="only mean, sum, max, min"):
        log(lone_logs(), "x", 1.0, reduce_fx=reduce)


def test_hooks_that_do_not_run_again_log_once_in_an_iteration_that_is_repeated() -> None:
    """Those around `zero_grad`, while what lost micro-batches have logged counts for nothing."""

    def work(rank: int, logs: IterationLogs, _: Any) -> None:
        meta = {"on_step": True, "on_epoch": True}
        logs.start_iteration(rank_weight=2.0)
        for attempt in range(2):
            logs.start_micro_batch(share=1.0)
            logs.add("training_step", "loss", torch.tensor(float(attempt)), dict(meta))
            logs.finish_forward(weight=1.0)
            if not attempt:
                logs.add("on_before_zero_grad", "steps", torch.tensor(7.0), dict(meta))
            logs.finish_micro_batch()
            logs.reduce_and_file(torch.zeros(1), lambda _, attempt=attempt: not attempt)
            if not attempt:
                hooks = logs.of_hooks()
                logs.start_iteration(rank_weight=2.0)
                logs.take_again(hooks)

    for filed in ThreadRanks(2).run(work):
        assert filed == {"loss": 1.0, "loss:weight": 2.0, "steps": 7.0, "steps:weight": 4.0}

"""Buffers and metric objects of a lost iteration, and what errors say: in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from lightning_dcp.strategies.metric_objects import metrics_of
from lightning_dcp.strategies.out_of_memory import RanOutOfMemory, _ran_out, saying_where
from lightning_dcp.strategies.unchanged import StateBefore


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(100_000.0))
        self.register_buffer("bound_anew", torch.zeros(()))
        self.register_buffer("codebook", torch.zeros(100_000))
        self.register_buffer("nothing", None)
        self.register_buffer("average", None)
        self.register_buffer("cosines", torch.zeros(0), persistent=False)
        self.num_cosines, self.num_steps = 0, torch.tensor(0)
        self.total, self.all = SumMetric(), CatMetric()
        self.several = MetricCollection(
            {"a": MulticlassAccuracy(3), "p": MulticlassPrecision(3)}, compute_groups=True
        )

    def step(self) -> None:
        self.norm(torch.randn(4, 3))
        self.bound_anew = self.bound_anew + 1
        self.num_steps = self.num_steps + 1
        self.average = torch.ones(()) if self.average is None else self.average * 0.5
        if (
            self.num_cosines < 4 * self.num_steps
        ):  # a table that grows, as that of rotary embeddings
            self.num_cosines = 4 * int(self.num_steps)
            self.register_buffer("cosines", torch.arange(self.num_cosines).cos(), persistent=False)
        self.codebook.data.add_(1)  # which no counter of writes sees
        self.total.update(2.0)
        self.all(torch.tensor([1.0]))  # forward, which keeps the step's own value
        self.several.update(torch.randn(4, 3), torch.tensor([0, 1, 2, 1]))

    def values(self) -> dict[str, object]:
        found: dict[str, object] = {k: v.clone() for k, v in self.named_buffers()}
        found |= {"num_cosines": self.num_cosines, "num_steps": self.num_steps.clone()}
        found |= {"total": self.total.compute().clone(), "updates": self.total._update_count}
        if self.all._update_count:
            found["all"] = self.all.compute().clone()
        if self.total._update_count:
            found |= {k: v.clone() for k, v in self.several.compute().items()}
        return found


def same(a: dict[str, object], b: dict[str, object]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a
    )


def test_everything_is_put_back_as_often_as_it_takes() -> None:
    torch.manual_seed(0)
    model = Stateful()
    before = StateBefore(model)
    for iteration in range(4):
        before.keep(metrics_of(model))
        wanted = model.values()
        before.keep(metrics_of(model))  # `compute` leaves a trace of its own
        for _ in range(iteration):  # lost so many times
            model.step()
            model.step()
            assert not same(model.values(), wanted)
            before.put_back()
            assert same(model.values(), wanted)
        model.step()
        before.learn()
        assert model.total._update_count == iteration + 1
    assert float(model.bound_anew) == 4.0
    assert model.all.compute().numel() == 4


def test_what_is_never_written_to_is_not_copied() -> None:
    model = Stateful()
    before = StateBefore(model)
    for _ in range(3):
        before.keep([])
        model.step()
        before.learn()
    kept = before._began.kept.values()
    assert {each.name for each in kept if each._copy is None} == {"table"}


def test_what_hooks_change_that_do_not_run_again_stays_changed() -> None:
    """As averages of weights that are updated where gradients are cleared."""
    model = Stateful()
    model.register_buffer("shadow", torch.zeros(100_000))
    model.register_buffer("updates", torch.zeros((), dtype=torch.int64))
    model.num_updates = 0
    before = StateBefore(model)
    for iteration in range(3):
        before.keep([])
        wanted = model.values()
        model.step()
        before.keep_around_hooks()
        model.shadow += 1
        model.updates += 1
        model.num_updates += 1
        before.keep_around_hooks()
        model.step()
        if iteration:
            for _ in range(2):
                before.put_back()
                assert float(model.shadow[0]) == model.num_updates == int(model.updates)
                assert model.num_updates == iteration + 1
                assert int(model.num_steps) == wanted["num_steps"]
                assert torch.equal(model.codebook, wanted["codebook"])
                model.step()
        else:
            before.learn()
    assert before._written is not None and not {"shadow", "table"} & before._written


def test_a_buffer_written_to_for_the_first_time() -> None:
    model = Stateful()
    before = StateBefore(model)
    for _ in range(2):
        before.keep([])
        model.step()
        before.learn()
    model.table.add_(1)
    with pytest.raises(torch.OutOfMemoryError, match="buffer table"):
        before.put_back()


def test_an_error_says_where_once() -> None:
    with (
        pytest.raises(RanOutOfMemory, match=r"^Out of memory in the step\. .*2 GiB") as caught,
        saying_where(lambda: "elsewhere"),
        saying_where(lambda: "in the step"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    assert "elsewhere" not in str(caught.value)
    with pytest.raises(KeyError), saying_where(lambda: "in the step"):
        raise KeyError("x")


def test_which_errors_say_that_memory_ran_out_here() -> None:
    assert _ran_out(torch.OutOfMemoryError("CUDA out of memory."))
    assert _ran_out(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas`"))
    assert _ran_out(MemoryError())
    assert not _ran_out(RuntimeError("shapes differ"))
    assert not _ran_out(RanOutOfMemory("Out of memory in iteration 3"))
    told = "Planning failed on rank 1: RanOutOfMemory: Out of memory in iteration 3"
    assert not _ran_out(RuntimeError(told)), "another rank's"

"""Hugging Face models trained by dictated plans on 4 ranks, and by plain PyTorch in one process.

The library computes norms, rotary tables and losses in float32, whatever a model's type: `Double`
makes float64 of it, in which an error of sharding cannot hide.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from lightning_dcp.parallel.huggingface_attention import whole_position_bias
from lightning_dcp.profiling.preserve import preserve
from tests.models.user_code import module_code
from tests.strategies.hand_planned import STRATEGIES, Watch
from tests.strategies.toys import HandPlanner, idle_plan, unequal_plan, whole

LENGTHS = [9, 30, 5, 12, 7, 3, 11, 2, 8, 14, 1, 6, 17, 4, 10, 13, 19, 21, 5, 2]
NUM_BLOCKS = 3
#: Images of three sizes, those of one micro-batch alike; (1 + patches) tokens each.
IMAGES = [(16, 16)] * 2 + [(20, 16)] * 3 + [(24, 12)] + [(16, 16)] * 3 + [(20, 16)]
IMAGES += [(24, 12)] * 4 + [(16, 16), (20, 16), (24, 12)]


class Double(TorchFunctionMode):
    """Whoever asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wider = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        return func(*tree_map(wider, args), **tree_map(wider, kwargs or {}))


class Samples(Dataset[Any]):
    """What a data set of the library gives: dicts of lists, or of tensors for images."""

    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            return torch.randint(1, 29, shape, generator=generator)

        self.items: list[dict[str, Any]] = []
        self.sequence_lengths: list[int] = []
        if kind == "vit":
            for i, (height, width) in enumerate(IMAGES):
                pixels = torch.randn(3, height, width, generator=generator, dtype=torch.float64)
                self.items.append({"pixel_values": pixels, "labels": i % 5})
                self.sequence_lengths.append(1 + height * width // 16)
            return
        for n in LENGTHS:
            ids = draw(n)
            item = {"input_ids": ids, "labels": ids}
            if kind == "bert":
                hidden = torch.rand(n, generator=generator) < 0.4
                hidden[n // 2] = True
                item = {"input_ids": ids.masked_fill(hidden, 28)}
                item["labels"] = ids.masked_fill(~hidden, -100)
            elif kind == "t5":
                item["labels"] = draw(1 + (7 * n) % 13)
            self.items.append(item)
            self.sequence_lengths.append(n)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Padded on the right, as the library's collators do."""
    if "pixel_values" in samples[0]:
        return {
            "pixel_values": torch.stack([s["pixel_values"] for s in samples]),
            "labels": torch.tensor([s["labels"] for s in samples]),
            "interpolate_pos_encoding": True,
        }

    def padded(name: str, value: int) -> Tensor:
        longest = max(len(s[name]) for s in samples)
        return torch.stack(
            [F.pad(s[name], (0, longest - len(s[name])), value=value) for s in samples]
        )

    ids = padded("input_ids", 0)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": padded("labels", -100),
    }


def make_module(kind: str, *, double: bool, change: Any = None) -> Any:
    """The user's module; ``change`` is done to it before training."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    import transformers

    torch.manual_seed(7)
    names: dict[str, Any] = {"L": L, "torch": torch, "transformers": transformers}
    exec(module_code(kind), names)
    if not double:
        module = names["Model"]()
    else:
        names["Double"] = Double
        exec(
            "class Checked(Model):\n"
            "    def training_step(self, batch, batch_idx):\n"
            "        with Double():\n"
            "            return super().training_step(batch, batch_idx)\n"
            "    def backward(self, loss, *args, **kwargs):\n"
            "        with Double():\n"
            "            engine = torch.autograd.Variable._execution_engine\n"
            "            engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (),\n"
            "                allow_unreachable=True, accumulate_grad=True)\n",
            names,
        )
        module = names["Checked"]().double()
    with torch.no_grad():
        for parameter in module.parameters():  # the library starts norms at one, biases at zero
            parameter.add_(0.1 * torch.randn_like(parameter))
    if change is not None:
        change(module)
    return module


def plan_of(dataset: Samples, *, idle: bool) -> Any:
    """One iteration with everything unequal, or one that leaves two ranks idle."""
    order = list(range(len(dataset)))
    if "pixel_values" not in dataset[0]:
        order = torch.randperm(len(order), generator=torch.Generator().manual_seed(1)).tolist()
    toys: Any = dataset  # has the lengths
    if idle:
        return idle_plan(toys, 0, order[:3])
    return unequal_plan(toys, 0, order[:17], NUM_BLOCKS)


@contextmanager
def hand_planned(strategy: Any, dataset: Samples, plan: Any) -> Iterator[None]:
    """Let the strategy follow a given plan; the blocks are observed on two samples."""
    from lightning_dcp.data.loader import build_plan_loader
    from lightning_dcp.strategies import mixin, preparation

    class HandPreparer(preparation.TrainPreparer):
        def prepare(self, dataloader: Any) -> preparation.Preparation:
            group = self._topology.group(strategy.global_rank, 1)
            with preserve(self._pl_module):
                for i in (0, 3):
                    with self._runtime.micro_batch(group=group, observe=True):
                        batch = collate([dataset[i]])
                        self._pl_module.backward(self._pl_module.training_step(batch, 0))
            planner: Any = HandPlanner([plan])
            loader = build_plan_loader(
                dataloader, planner, rank=strategy.global_rank, world_size=strategy.world_size
            )
            return preparation.Preparation(planner, None, loader, False)  # type: ignore[arg-type]

    before = mixin.TrainPreparer
    mixin.TrainPreparer = HandPreparer  # type: ignore[misc]
    try:
        yield
    finally:
        mixin.TrainPreparer = before  # type: ignore[misc]


def trainer_of(strategy: Any, **options: Any) -> L.Trainer:
    return L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )


def own_checkpointing(module: Any) -> None:
    """What a user may have switched on before."""
    module.model.gradient_checkpointing_enable()


def eager(module: Any) -> None:
    """Attention that the model computes itself."""
    module.model.set_attn_implementation("eager")


def train(
    rank: int,
    name: str,
    kind: str,
    *,
    idle: bool = False,
    double: bool = True,
    change: Any = None,
    loss_average: str = "auto",
) -> dict[str, Any]:
    """`fit` for one step; its gradients and loss, warnings, whether all is as before."""
    dataset = Samples(kind)
    module = make_module(kind, double=double, change=change)
    kept = state_of(module)
    watch = Watch()
    trainer = trainer_of(STRATEGIES[name](loss_average=loss_average), callbacks=[watch])
    with (
        hand_planned(trainer.strategy, dataset, plan_of(dataset, idle=idle)),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(dataset, batch_size=2, collate_fn=collate, shuffle=True))
    return {
        "gradients": watch.gradients[0],
        "loss": watch.losses[0],
        "warnings": [str(w.message) for w in caught if "DCP" in str(w.message)],
        "as_before": state_of(module) == kept,
    }


def state_of(module: Any) -> list[Any]:
    """What preparation changes in the library's models."""
    return [
        (
            part.config._attn_implementation,
            part.config.use_cache if hasattr(part.config, "use_cache") else None,
            "_loss_function" in vars(part),
            [getattr(m, "gradient_checkpointing", None) for m in part.modules()],
            any(whole_position_bias in m._forward_pre_hooks.values() for m in part.modules()),
        )
        for part in module.modules()
        if hasattr(part, "config")
    ]


def reference(kind: str, *, idle: bool = False, double: bool = True) -> dict[str, Any]:
    """One process: the mean over all loss-bearing elements, sample by sample."""
    dataset = Samples(kind)
    module = make_module(kind, double=double).train()
    total, count = 0.0, 0
    for i in (i for m in plan_of(dataset, idle=idle).micro_batches for i in m.sample_ids):
        batch = collate([dataset[i]])
        labels = batch["labels"]
        if kind not in ("bert", "t5", "vit"):  # these do not shift
            labels = labels[:, 1:]
        own = int((labels != -100).sum())
        if own:
            total = total + module.training_step(batch, 0) * own
            count += own
    loss: Any = total / count
    if double:
        module.backward(loss)
    else:
        loss.backward()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {"gradients": gradients, "loss": float(loss.detach())}


def largest_error(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest over parameters of |got - wanted| / |wanted|, in norms.

    A gradient that mathematics makes zero (a key's bias) is rounding only: it has to stay that.
    """
    assert got.keys() == wanted.keys()
    largest = max(float(whole(g).norm()) for g in wanted.values())
    worst = 0.0
    for name, gradient in wanted.items():
        norm = float(gradient.norm())
        error = float((got[name] - gradient).norm())
        assert error < float("inf"), f"{name}: {error}"  # nor NaN, which max() would pass over
        worst = max(worst, error / largest if norm < 1e-7 * largest else error / norm)
    return worst

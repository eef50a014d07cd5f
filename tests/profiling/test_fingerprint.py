"""Keys of cost profiles: equal for what costs the same, different for anything else."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from lightning_dcp.profiling.fingerprint import Fingerprint, profile_fingerprint
from lightning_dcp.profiling.options import ProfilingOptions

LENGTHS = np.random.default_rng(0).integers(10, 5000, size=2000)


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)


class OtherBlock(Block):
    """Same parameters, another class."""


def model_of(num_blocks: int = 3, cls=Block, **kwargs) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(5, 8), *(cls(**kwargs) for _ in range(num_blocks)))


def key(model: nn.Sequential | None = None, **changes) -> Fingerprint:
    model = model_of() if model is None else model
    arguments = {
        "module": model,
        "blocks": list(model)[1:],
        "device": torch.device("cpu"),
        "precision": "32-true",
        "world_size": 4,
        "ranks_per_node": 4,
        "sp_sizes": (1, 2, 4),
        "lengths": LENGTHS,
        "options": ProfilingOptions(),
    }
    return profile_fingerprint(**(arguments | changes))


def test_what_does_not_cost_anything_else_keeps_the_key() -> None:
    reference = key()
    assert key() == reference  # other weights
    more = np.concatenate([LENGTHS, LENGTHS[:5]])
    np.random.default_rng(1).shuffle(more)
    unimportant = ProfilingOptions(cache=False, cache_dir="/elsewhere")
    same = key(lengths=more, options=unimportant, sp_sizes=[4, 2, 1, 1])
    assert same.digest == reference.digest
    assert reference.differences(same) == ()


CHANGES = {
    "blocks": lambda: key(model_of(dropout=0.5)),
    "num_blocks": lambda: key(model_of(4)),
    "parameter_dtypes": lambda: key(model_of().double()),
    "num_trainable": lambda: key(model_of().requires_grad_(False)),
    "code": lambda: key(model_of(cls=OtherBlock)),
    "precision": lambda: key(precision="bf16-mixed"),
    "world_size": lambda: key(world_size=8),
    "ranks_per_node": lambda: key(ranks_per_node=2),
    "sp_sizes": lambda: key(sp_sizes=(1, 2)),
    "attention_backend": lambda: key(attention_backend="flash-attn"),
    "lengths": lambda: key(lengths=LENGTHS * 2),
    "options": lambda: key(options=ProfilingOptions(budget_s=5)),
    "extra: optimizer": lambda: key(extra={"optimizer": "Adam"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_costs_something_else_changes_the_key_and_is_named(name: str) -> None:
    changed = CHANGES[name]()
    assert changed.digest != key().digest
    assert name in key().differences(changed)


def test_number_of_threads_counts_on_a_cpu() -> None:
    threads = torch.get_num_threads()
    reference = key()
    try:
        torch.set_num_threads(threads + 1)
        assert key().differences(reference) == ("device",)
    finally:
        torch.set_num_threads(threads)


def test_the_longest_sample_counts_exactly() -> None:
    longer = LENGTHS.copy()
    longer[longer.argmax()] += 1
    assert "lengths" in key().differences(key(lengths=longer))


class TestOptions:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"budget_s": 0}, "budget_s=0"),
            ({"budget_s": float("nan")}, "budget_s=nan"),
            ({"repeats": 0}, "repeats=0"),
            ({"lengths": (1, 2)}, "at least 3 different lengths"),
            ({"lengths": (4, 4, 4)}, "at least 3 different lengths"),
            ({"lengths": (4, 0, 7)}, "0 is no sequence length"),
            ({"lengths": (4, 2.5, 7)}, "2.5 is no sequence length"),
        ],
    )
    def test_wrong_values_are_named(self, wrong, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ProfilingOptions(**wrong)

    def test_lengths_are_sorted_and_may_be_a_list(self) -> None:
        options = ProfilingOptions(lengths=[64, 16, 32, 16])
        assert options.lengths == (16, 32, 64)
        assert replace(options, repeats=1).lengths == (16, 32, 64)


class Flagged(Block):
    """Same parameters; a flag, a setting or a configuration decides what it computes."""

    def __init__(self, mix: bool = False, window: float = 0.5, config: object = None) -> None:
        super().__init__()
        self.mix, self.window, self.config = mix, window, config


class Config:
    def __init__(self, causal: bool) -> None:
        self.causal = causal


@pytest.mark.parametrize(
    "changed", [{"mix": True}, {"window": 0.25}, {"config": Config(causal=False)}]
)
def test_plain_attributes_change_the_key(changed: dict[str, object]) -> None:
    """A cached profile says that sharding was checked: only for the same computation."""
    settings = {"mix": False, "window": 0.5, "config": Config(causal=True)}
    reference = key(model_of(cls=Flagged, **settings))
    assert key(model_of(cls=Flagged, **settings)).digest == reference.digest
    assert key(model_of(cls=Flagged, **(settings | changed))).differences(reference) == (
        "settings",
    )


def test_numbers_of_the_outermost_module_do_not() -> None:
    slow, fast = model_of(), model_of()
    slow.learning_rate, fast.learning_rate = 1e-3, 1e-2
    assert key(slow).digest == key(fast).digest


def test_base_classes_and_helpers_count(tmp_path, monkeypatch) -> None:
    source = "from torch import nn\nclass Base(nn.Linear):\n    scale = {}\n"
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for number, scale in enumerate((1, 1, 2)):
        (tmp_path / f"base{number}.py").write_text(source.format(scale))
        (tmp_path / "blocks_under_test.py").write_text(
            f"from base{number} import Base\nclass Own(Base):\n    pass\n"
        )
        for name in ("blocks_under_test",):
            sys.modules.pop(name, None)
        own = importlib.import_module("blocks_under_test").Own
        model = nn.Sequential(own(2, 2), own(2, 2))
        parts = key(model, blocks=list(model)).parts["code"]
        digests.append(parts)
    assert len(set(digests)) == 3, "other base modules, other keys"

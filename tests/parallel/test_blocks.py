"""Blocks are found or named, and errors list what there is."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_dcp.parallel import BlockStack, find_blocks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))})
        self.decoder = nn.Sequential(
            nn.Embedding(3, 2), *(nn.GRUCell(2, 2) for _ in range(4)), nn.LayerNorm(2)
        )
        self.empty = nn.ModuleList()


def test_longest_run_of_one_class():
    model = Model()
    stack = find_blocks(model)
    assert stack.path == "decoder"
    assert stack.blocks == tuple(model.decoder[1:5])
    assert len(stack) == 4


def test_equal_runs_the_larger_blocks_win():
    model = nn.Module()
    model.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model.large = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
    assert find_blocks(model).path == "large"


def test_named():
    model = Model()
    assert find_blocks(model, "encoder.layers").blocks == tuple(model.encoder["layers"])
    assert find_blocks(model, "decoder").blocks == tuple(model.decoder[1:5])
    assert find_blocks(model, "decoder.1").blocks == (model.decoder[1],)
    one = nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]))
    assert len(find_blocks(one, "0")) == 1


def test_nested_stack_is_found_once():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(2)))
    assert find_blocks(model).path == ""
    assert len(find_blocks(model)) == 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("encoder.blocks", r"no module named 'encoder.blocks'.*'decoder' \(4 x GRUCell\)"),
        ("empty", "'empty' is an empty ModuleList"),
    ],
)
def test_wrong_path(path, message):
    with pytest.raises(ValueError, match=message):
        find_blocks(Model(), path)


def test_nothing_repeated():
    with pytest.raises(ValueError, match=r"no repeated blocks found in Linear.*no ModuleList"):
        find_blocks(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"Found: '' \(1 x Linear\), '' \(1 x ReLU\)"):
        find_blocks(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))


def test_one_module_twice():
    block = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="same module more than once"):
        find_blocks(nn.ModuleList([block, block]), "")
    with pytest.raises(ValueError, match="no repeated blocks"):
        find_blocks(nn.Sequential(nn.ModuleList([block, block])))
    with pytest.raises(ValueError, match="no blocks at"):
        BlockStack("x", ())

"""Blocks are found or named, and errors list what there is."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_dcp.parallel import BlockStack, find_blocks, find_stacks


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


# ---- several stacks -----------------------------------------------------------------------------


class Layer(nn.Module):
    """Looks like a block: of several modules."""

    def __init__(
        self,
        width: int = 4,
        *,
        experts: int = 0,
        mlp_layers: int = 2,
        norm: type[nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(width), nn.Linear(width, 8), nn.Linear(8, width)
        self.mlp = nn.Sequential(*(nn.Linear(width, width) for _ in range(mlp_layers)))
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 30), nn.Linear(30, width)


class OtherLayer(Layer):
    pass


def layers(number: int, kind: type[nn.Module] = Layer, **options) -> nn.ModuleList:
    return nn.ModuleList(kind(**options) for _ in range(number))


def tree(**parts: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


@pytest.mark.parametrize(
    ("model", "paths"),
    [
        # T5: an encoder and a decoder, each in a module of its own
        (tree(encoder=tree(block=layers(3)), decoder=tree(block=layers(3))),
         ["encoder.block", "decoder.block"]),
        # a vision tower of another width and class beside a language model
        (tree(vision=tree(layers=layers(2, OtherLayer, width=6)), model=layers(4),
              head=nn.Linear(4, 9)),
         ["model", "vision.layers"]),
        # experts and MLPs are inside blocks
        (tree(layers=layers(2, experts=6)), ["layers"]),
        (tree(text=layers(3, experts=5), image=layers(2, OtherLayer, experts=9)),
         ["text", "image"]),
        (tree(layers=nn.ModuleList(Layer(mlp_layers=9) for _ in range(4))), ["layers"]),
        # a student and its teacher
        (tree(nets=nn.ModuleList(tree(layers=layers(3)) for _ in range(2))),
         ["nets.0.layers", "nets.1.layers"]),
        # single layers, one block, blocks of unequal shapes, batch normalisation: no stacks
        (tree(layers=layers(3), mlp=nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))), ["layers"]),
        (tree(layers=layers(3), one=layers(1, OtherLayer)), ["layers"]),
        (tree(layers=layers(3), pyramid=nn.ModuleList([Layer(8), Layer(16)])), ["layers"]),
        (tree(layers=layers(3), stem=layers(2, norm=nn.BatchNorm1d)), ["layers"]),
        # of no importance
        (tree(layers=layers(3, width=600), small=layers(2, OtherLayer)), ["layers"]),
        # at most four, the largest
        (tree(a=layers(2), b=layers(2, width=5), c=layers(2, width=6), d=layers(2, width=7),
              main=layers(3), e=layers(2, width=8)),
         ["main", "c", "d", "e"]),
    ],
)  # fmt: skip
def test_stacks_beside_the_main_one(model, paths):
    stacks = find_stacks(model)
    assert [stack.path for stack in stacks] == paths
    assert stacks[0] == find_blocks(model)
    assert [stack.optional for stack in stacks] == [False] + [True] * (len(stacks) - 1)


def test_named_stacks():
    model = tree(vision=layers(2), text=layers(3), adapter=layers(1))
    assert find_stacks(model, "vision") == [find_blocks(model, "vision")]
    stacks = find_stacks(model, ["vision", "adapter", "text"])
    assert [stack.path for stack in stacks] == ["text", "vision", "adapter"]  # the main one first
    assert not any(stack.optional for stack in stacks)
    with pytest.raises(ValueError, match="no stack of blocks is named"):
        find_stacks(model, [])
    with pytest.raises(ValueError, match=r"'text' and 'text.1' have blocks in common"):
        find_stacks(model, ["text", "text.1"])
    with pytest.raises(ValueError, match=r"'text' and 'text.0.mlp' have blocks in common"):
        find_stacks(model, ["text", "text.0.mlp"])
    with pytest.raises(ValueError, match=r"no module named 'vison'.*'vision' \(2 x Layer\)"):
        find_stacks(model, ["text", "vison"])

"""Finding a model's repeated blocks: what is sharded, recomputed and profiled."""

from __future__ import annotations

import dataclasses
from collections import Counter

from torch import nn

__all__ = ["BlockStack", "find_blocks"]

_CONTAINERS = (nn.ModuleList, nn.Sequential)


@dataclasses.dataclass(frozen=True)
class BlockStack:
    """Repeated blocks that run one after the other, each mapping hidden states to hidden states.

    Attributes:
        path: dotted name of the container in the searched module, e.g. ``"model.layers"``.
        blocks: the blocks in the order in which they run.
    """

    path: str
    blocks: tuple[nn.Module, ...]

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError(f"no blocks at {self.path!r}")
        counts = Counter(id(block) for block in self.blocks)
        if max(counts.values()) > 1:
            raise ValueError(
                f"{self.path!r} holds the same module more than once: the first and the last block "
                f"cannot be told apart by the module that runs. Give each block its own module "
                f"(they may share parameters)"
            )

    def __len__(self) -> int:
        return len(self.blocks)


def find_blocks(module: nn.Module, path: str | None = None) -> BlockStack:
    """The longest run of same-class modules in a ``ModuleList`` or ``Sequential``, or ``path``'s.

    Args:
        module: where to search; ``path`` is relative to it.
        path: name of the container (or of one block: a stack of one); None searches. A named stack
            may have a single block, a found one has at least two. Of several runs of equal length
            the one with most parameters is taken, then the first.

    Raises:
        ValueError: if nothing is found, or ``path`` does not exist or holds no blocks; lists what
            there is.
    """
    runs = _runs(module)
    if path is not None:
        return _named(module, path, runs)
    best = max(runs, key=lambda run: (len(run), _num_parameters(run)), default=None)
    if best is None or len(best) < 2:
        raise ValueError(
            f"no repeated blocks found in {type(module).__name__}: a ModuleList or Sequential with "
            f"at least two modules of one class in a row is looked for. {_found(runs)} Name the "
            f"container of the blocks"
        )
    return best


def _named(module: nn.Module, path: str, runs: list[BlockStack]) -> BlockStack:
    try:
        target = module.get_submodule(path)
    except AttributeError:
        raise ValueError(
            f"{type(module).__name__} has no module named {path!r}. {_found(runs)}"
        ) from None
    if not isinstance(target, _CONTAINERS):
        return BlockStack(path, (target,))
    children = tuple(target._modules.values())  # children() would hide a module listed twice
    if not children:
        raise ValueError(f"{path!r} is an empty {type(target).__name__}. {_found(runs)}")
    # A named container whose modules differ in class (an embedding before the blocks in a
    # Sequential): only those of its longest run map hidden states to hidden states.
    own = [run for run in runs if run.path == path]
    return max(own, key=len) if own else BlockStack(path, children)


def _runs(module: nn.Module) -> list[BlockStack]:
    """Maximal runs of one class in every container, in the order of ``named_modules``."""
    runs = []
    for name, container in module.named_modules():
        if not isinstance(container, _CONTAINERS):
            continue
        run: list[nn.Module] = []
        # _modules, not children(): that one drops a module that is listed twice, which is an error
        # here
        for child in [*container._modules.values(), None]:
            if run and type(child) is not type(run[0]):
                if len({id(block) for block in run}) == len(run):
                    runs.append(BlockStack(name, tuple(run)))
                run = []
            if child is not None:
                run.append(child)
    return runs


def _num_parameters(run: BlockStack) -> int:
    return sum(parameter.numel() for block in run.blocks for parameter in block.parameters())


def _found(runs: list[BlockStack]) -> str:
    if not runs:
        return "It has no ModuleList or Sequential."
    named = [f"{run.path!r} ({len(run)} x {type(run.blocks[0]).__name__})" for run in runs[:12]]
    more = ", ..." if len(runs) > 12 else ""
    return f"Found: {', '.join(named)}{more}."

"""Finding a model's repeated blocks: what is sharded, recomputed and profiled."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from torch import nn

__all__ = ["BlockStack", "find_blocks", "find_stacks"]

_CONTAINERS = (nn.ModuleList, nn.Sequential)
# A run beside the main stack is of importance with this share of the main stack's parameters.
_LEAST_SHARE = 1 / 64
_MOST_STACKS = 4
_LEAST_OUTER = 4  # fewer may be whole models side by side, such as a student and its teacher


@dataclasses.dataclass(frozen=True)
class BlockStack:
    """Repeated blocks that run one after the other, each mapping hidden states to hidden states.

    Attributes:
        path: dotted name of the container in the searched module, e.g. ``"model.layers"``.
        blocks: the blocks in the order in which they run.
        optional: found beside the main stack, not named by the user: left out where it turns out
            not to be one.
    """

    path: str
    blocks: tuple[nn.Module, ...]
    optional: bool = False

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
            the one with most parameters is taken, then the first. Experts of a block are no blocks:
            containers of this name, and runs inside the blocks of another of four or more alike.

    Raises:
        ValueError: if nothing is found, or ``path`` does not exist or holds no blocks; lists what
            there is.
    """
    runs = _runs(module)
    if path is not None:
        return _named(module, path, runs)
    best = max(_outermost(runs), key=lambda run: (len(run), _num_parameters(run)), default=None)
    if best is None or len(best) < 2:
        raise ValueError(
            f"no repeated blocks found in {type(module).__name__}: a ModuleList or Sequential with "
            f"at least two modules of one class in a row is looked for. {_found(runs)} Name the "
            f"container of the blocks"
        )
    return best


def find_stacks(module: nn.Module, paths: str | Sequence[str] | None = None) -> list[BlockStack]:
    """All stacks of a model, the main one first: ``paths``'s, or the main one and those beside it.

    The main stack is that of ``find_blocks``; of named ones, that with most blocks, then most
    parameters, then the first. Beside a found main stack up to three more runs are taken, largest
    first, as ``optional`` ones: of at least two blocks with the same parameters' names and shapes,
    each of several modules, none of them a batch normalisation, together with at least 1/64 of the
    main stack's parameters; disjoint, and not inside another stack's blocks (experts of a block).

    Args:
        module: where to search; ``paths`` are relative to it.
        paths: name or names as for ``find_blocks``; None searches.

    Raises:
        ValueError: as for ``find_blocks``, and for no names or names of stacks that overlap.
    """
    if isinstance(paths, str):
        return [find_blocks(module, paths)]
    if paths is not None:
        return _all_named(module, list(paths))
    stacks = [find_blocks(module)]
    least = _LEAST_SHARE * _num_parameters(stacks[0])
    for run in sorted(_outermost(_runs(module)), key=_num_parameters, reverse=True):
        if len(stacks) == _MOST_STACKS or _num_parameters(run) < max(least, 1):
            break
        if _looks_like_blocks(run) and not any(_overlap(run, stack) for stack in stacks):
            stacks.append(dataclasses.replace(run, optional=True))
    order = {id(block): i for i, block in enumerate(module.modules())}
    return [stacks[0], *sorted(stacks[1:], key=lambda stack: order[id(stack.blocks[0])])]


def _all_named(module: nn.Module, paths: list[str]) -> list[BlockStack]:
    if not paths:
        raise ValueError("no stack of blocks is named: give one name or several, or None to search")
    stacks = [find_blocks(module, path) for path in paths]
    for i, stack in enumerate(stacks):
        for other in stacks[:i]:
            if _overlap(stack, other):
                raise ValueError(
                    f"{other.path!r} and {stack.path!r} have blocks in common, or one is inside "
                    f"the other: name only one of them"
                )
    main = max(stacks, key=lambda stack: (len(stack), _num_parameters(stack)))
    return [main, *(stack for stack in stacks if stack is not main)]


def _looks_like_blocks(run: BlockStack) -> bool:
    """Whether a run that nobody named may be a stack beside the main one."""
    return (
        len(run) > 1
        and all(next(block.children(), None) is not None for block in run.blocks)
        and _are_alike(run)
        # Recomputation would count its statistics twice.
        and not any(
            isinstance(part, nn.modules.batchnorm._BatchNorm)
            for block in run.blocks
            for part in block.modules()
        )
    )


def _outermost(runs: list[BlockStack]) -> list[BlockStack]:
    """Without those that are parts of another run's blocks."""
    inside: set[int] = set()
    for run in runs:
        if len(run) >= _LEAST_OUTER and _are_alike(run):
            for block in run.blocks:
                inside.update(id(part) for part in block.modules() if part is not block)
    return [
        run
        for run in runs
        if id(run.blocks[0]) not in inside and run.path.rpartition(".")[2] != "experts"
    ]


def _are_alike(run: BlockStack) -> bool:
    """Whether all blocks have parameters of the same names and shapes."""
    first, *others = ([(n, p.shape) for n, p in b.named_parameters()] for b in run.blocks)
    # The first one may have more: a table of position biases that all use (T5).
    return all(own == others[0] for own in others) and all(own in first for own in others[0])


def _overlap(one: BlockStack, other: BlockStack) -> bool:
    return any(
        {id(block) for block in inner.blocks} & {id(m) for b in outer.blocks for m in b.modules()}
        for inner, outer in ((one, other), (other, one))
    )


def _named(module: nn.Module, path: str, runs: list[BlockStack]) -> BlockStack:
    try:
        target = module.get_submodule(path)
    except AttributeError:
        raise ValueError(
            f"blocks: {type(module).__name__} has no module named {path!r}. {_found(runs)}"
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

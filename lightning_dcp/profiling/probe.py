"""Measure one training step of which two blocks run (paper §3.5).

The step's own code is not touched. Its seconds and bytes are divided into those of the measured
block and of the rest of the step by what happens around the blocks' ``forward``::

    embedding ... slice | block 0  | block 1  | gather ... head, loss      forward
    ................... | warms up | measured | ......................     and backward, reversed

Meters (:mod:`.meter`) tell of each call of a block; tensor hooks on what they saw come and go tell
the same moments of the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_dcp.profiling.clock import clock_of
from lightning_dcp.profiling.meter import Meter
from lightning_dcp.profiling.records import (
    BlockRecord,
    Call,
    StackCosts,
    StackRecord,
    check_ran,
)


@dataclass(frozen=True)
class StepCosts:
    """What one rank measured in one pass over one micro-batch.

    Attributes:
        total_s: Forward and backward of the step with the blocks that ran.
        forward_s: Forward of the measured block.
        backward_s: Backward of the measured block.
        rest_s: What remains of ``total_s`` without all blocks that ran.
        saved_bytes: Saved for backward by the measured block, without its input; ``None`` where
            bytes were not counted in this pass.
        input_bytes: The measured block's input.
        rest_bytes: Saved for backward outside the blocks, and what the blocks share (CPU), or the
            peak above the blocks' (CUDA, where it includes temporary memory).
        input_shape: Shape of the stack's whole, not yet sliced input.
        dtype: The coarsest of the input's type and autocast's.
        others: Those of the model's other stacks; the fields above are the main one's.
    """

    total_s: float
    forward_s: float
    backward_s: float
    rest_s: float
    saved_bytes: float | None
    input_bytes: float | None
    rest_bytes: float | None
    input_shape: tuple[int, ...]
    dtype: str
    others: tuple[StackCosts, ...] = ()

    @property
    def stacks(self) -> tuple[StackCosts, ...]:
        """Those of all stacks, the main one first."""
        main = StackCosts(
            self.forward_s,
            self.backward_s,
            self.saved_bytes,
            self.input_bytes,
            self.input_shape,
        )
        return (main, *self.others)


class StepProbe:
    """Measure one forward and backward pass; use once, as a context manager around both.

    Args:
        meters: Of the main stack's blocks that run: the last is measured, those before it warm up.
        others: Likewise of the model's other stacks. A stack that the step does not call, or that
            the backward does not reach, costs nothing, as long as there is another.
        module: The model. Its parameters and buffers do not count as saved bytes: they are there
            anyway.
        device: Where it runs.
        count_bytes: Whether to count saved bytes. On a CPU it costs some microseconds per saved
            tensor, so that passes that count are not the ones that time.
    """

    def __init__(
        self,
        meters: Sequence[Meter],
        *,
        others: Sequence[Sequence[Meter]] = (),
        module: nn.Module,
        device: torch.device,
        count_bytes: bool,
    ) -> None:
        groups = (tuple(meters), *(tuple(other) for other in others))
        self._meters = tuple(meter for group in groups for meter in group)
        self._module = module
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._clock = clock_of(device)
        self._count_bytes = count_bytes
        self._counts_on_host = count_bytes and not self._on_cuda
        self._records = tuple(BlockRecord() for _ in self._meters)
        starts = [sum(len(group) for group in groups[:i]) for i in range(len(groups))]
        self._stacks = tuple(
            StackRecord(self._records[start : start + len(group)], start)
            for start, group in zip(starts, groups, strict=True)
        )
        self._running: int | None = None  # index of the block whose forward runs
        self._saved: dict[int | None, dict[int, int]] = {}  # by that index: storage -> bytes
        self._arguments: dict[int, int] = {}  # of all blocks
        #: On CUDA: what all blocks are given beside their input, and how much of it was gone again
        #: when the backward pass began. A block that is recomputed would have kept it.
        self._given: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._gone_bytes: float | None = None
        self._allocated_at_start = 0
        self._peak_bytes = 0
        self._exit = ExitStack()
        self._start: Any = None
        self._end: Any = None

    def __enter__(self) -> StepProbe:
        with ExitStack() as stack:
            self._attach(stack)
            if self._count_bytes and self._on_cuda:
                torch.cuda.synchronize(self._device)
                torch.cuda.reset_peak_memory_stats(self._device)
                self._allocated_at_start = torch.cuda.memory_allocated(self._device)
            elif self._count_bytes:
                stack.enter_context(
                    torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)
                )
            self._exit = stack.pop_all()
        self._start = self._clock.mark()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end = self._clock.mark()
        self._exit.close()
        if self._count_bytes and self._on_cuda and exc_info[0] is None:
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            self._peak_bytes = peak - self._allocated_at_start

    def costs(self) -> StepCosts:
        """What was measured, after the context was left.

        Raises:
            RuntimeError: If the blocks did not run, or nothing went backward through them.
        """
        check_ran(self._stacks)
        total = self._clock.seconds(self._start, self._end)
        forward = [stack.forward_s(self._clock) for stack in self._stacks]
        backward = [stack.backward_s(self._clock) for stack in self._stacks]
        counted: list[tuple[float | None, float | None]] = [(None, None)] * len(self._stacks)
        rest = None
        if self._count_bytes:
            counted, rest = self._bytes_on_cuda() if self._on_cuda else self._bytes()
        main, *others = (
            StackCosts(f[-1], b[-1], *bytes_, stack.input_shape)
            for f, b, bytes_, stack in zip(forward, backward, counted, self._stacks, strict=True)
        )
        dtype = max((stack.dtype for stack in self._stacks), key=lambda d: torch.finfo(d).eps)
        return StepCosts(
            total_s=total,
            forward_s=main.forward_s,
            backward_s=main.backward_s,
            rest_s=max(0.0, total - sum(map(sum, forward)) - sum(map(sum, backward))),
            saved_bytes=main.saved_bytes,
            input_bytes=main.input_bytes,
            rest_bytes=rest,
            input_shape=main.input_shape,
            dtype=str(dtype).removeprefix("torch."),
            others=tuple(others),
        )

    def _attach(self, stack: ExitStack) -> None:
        # Around the whole module call, so outside of what the runtime does: the input is whole.
        for record_of_stack in self._stacks:
            first_block = self._meters[record_of_stack.first_index].block
            whole = first_block.register_forward_pre_hook(
                partial(self._whole_input, record_of_stack), prepend=True, with_kwargs=True
            )
            stack.callback(whole.remove)
        for index, (meter, record) in enumerate(zip(self._meters, self._records, strict=True)):
            stack.enter_context(meter.reporting_to(self, index))
            # Where the input needs no gradient, as with frozen embeddings, the block's backward
            # ends with the last of its own parameters.
            done = partial(self._parameter_done, record)
            for parameter in meter.block.parameters():
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(done)  # type: ignore[no-untyped-call]
                    stack.callback(hook.remove)

    @staticmethod
    def _whole_input(
        stack: StackRecord, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        hidden = hidden_states((args, kwargs))
        if hidden is not None:
            stack.input_shape = tuple(hidden.shape)
            stack.dtype = _coarsest(hidden)

    def before(self, index: int, arguments: object) -> Call:
        """A meter's: a block begins."""
        inputs = self._inputs_of(index, arguments)
        call = Call(input_storages=_storages(inputs))
        self._records[index].calls.append(call)

        def complete(_: torch.Tensor) -> None:
            call.backward_end = self._clock.mark()  # the last input to be complete counts

        for tensor in inputs:
            if tensor.requires_grad:
                tensor.register_hook(complete)  # type: ignore[no-untyped-call]
        if self._counts_on_host:
            tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
            self._arguments |= _storages(tensors)
            call.kept.extend(tensors)
        if self._on_cuda:
            if self._count_bytes:
                self._note_given(arguments, call.input_storages)
            call.allocated_bytes = -torch.cuda.memory_allocated(self._device)
        self._running = index
        call.forward_start = self._clock.mark()
        return call

    def after(self, call: Call, output: object) -> None:
        """A meter's: the block that began ``call`` ends."""
        call.forward_end = self._clock.mark()
        self._running = None
        if self._on_cuda:
            call.allocated_bytes += torch.cuda.memory_allocated(self._device)
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        call.output_storages = _storages(outputs)

        def begin(_: torch.Tensor) -> None:
            if call.backward_start is None:  # the first output to be complete counts
                call.backward_start = self._clock.mark()
            if self._gone_bytes is None:
                gone = (size for given, size in self._given.values() if given() is None)
                self._gone_bytes = float(sum(gone))

        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(begin)  # type: ignore[no-untyped-call]
        if self._counts_on_host:
            call.kept.extend(outputs)

    def _note_given(self, arguments: object, inputs: dict[int, int]) -> None:
        handed_on = {at for record in self._records for at in record.output_storages}
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                at = storage.data_ptr()
                if at not in inputs and at not in handed_on and storage.nbytes() > 0:
                    self._given[at] = (weakref.ref(storage), storage.nbytes())

    def _parameter_done(self, record: BlockRecord, _: torch.Tensor) -> None:
        record.last_parameter = self._clock.mark()

    def _inputs_of(self, index: int, arguments: object) -> list[torch.Tensor]:
        """The block's own inputs: what the block before it gave, not what all blocks share."""
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        if all(stack.first_index != index for stack in self._stacks):
            previous = self._records[index - 1].output_storages
            handed_on = [tensor for tensor in tensors if _storages([tensor]).keys() & previous]
            if handed_on:
                return handed_on
        hidden = hidden_states(arguments)
        return [] if hidden is None else [hidden]

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided and tensor.device.type == self._device.type:
            self._saved.setdefault(self._running, {}).update(_storages([tensor]))
        # Not the tensor itself: autograd would hold its own output in a cycle.
        return tensor.detach()

    def _bytes(self) -> tuple[list[tuple[float | None, float | None]], float]:
        """Saved by each measured block, its input; and saved by the rest of the step."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        apart = {pointer for tensor in tensors for pointer in _storages([tensor])}
        inputs: dict[int, int] = {}
        for record in self._records:
            inputs |= record.input_storages
        rest = dict(self._saved.get(None, {}))
        outside = rest.keys() | set()
        handed_on = {at for record in self._records for at in record.output_storages}
        counted: list[tuple[float | None, float | None]] = []
        for stack in self._stacks:
            own, shared = self._saved_by(stack, apart | inputs.keys() | outside)
            counted.append((own, float(sum(stack.measured.input_storages.values()))))
            rest |= shared
        # Blocks that are recomputed hold all their arguments, also those that no operation saves:
        # a mask of booleans, of which each block's attention makes its own copy.
        rest |= {at: n for at, n in self._arguments.items() if at not in handed_on}
        num_bytes = (n for at, n in rest.items() if at not in apart and at not in inputs)
        return counted, float(sum(num_bytes))

    def _saved_by(self, stack: StackRecord, apart: set[int]) -> tuple[float, dict[int, int]]:
        """Bytes of the measured block's own, and what it shares with what is there anyway."""
        outputs = stack.measured.output_storages.keys()
        # The output is the next block's input, which is counted there. What is also saved outside
        # or by the block before, such as a mask that all blocks share, is there once, not L times.
        for index in range(stack.first_index, stack.measured_index):
            apart |= self._saved.get(index, {}).keys()
        saved = self._saved.get(stack.measured_index, {})
        own = sum(n for at, n in saved.items() if at not in apart and at not in outputs)
        return float(own), {at: n for at, n in saved.items() if at in apart - outputs}

    def _bytes_on_cuda(self) -> tuple[list[tuple[float | None, float | None]], float]:
        """As ``_bytes``, from the allocator; the rest is what the peak has above the blocks."""
        counted: list[tuple[float | None, float | None]] = []
        blocks = 0.0
        for stack in self._stacks:
            inputs = float(sum(stack.measured.input_storages.values()))
            own = 0.0
            for record in stack.records:
                own = 0.0
                for call in record.calls:
                    handed_on = call.output_storages.items() - call.input_storages.items()
                    own += max(0.0, call.allocated_bytes - sum(size for _, size in handed_on))
                blocks += own + inputs
            counted.append((own, inputs))
        return counted, max(0.0, self._peak_bytes - blocks) + (self._gone_bytes or 0.0)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address and bytes of each distinct storage: views of one are not counted twice."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes() > 0}


def hidden_states(arguments: object) -> torch.Tensor | None:
    """The hidden states among a block's arguments: its first floating-point tensor."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    return None


def _coarsest(tensor: torch.Tensor) -> torch.dtype:
    dtypes = [tensor.dtype]
    if torch.is_autocast_enabled(tensor.device.type):
        dtypes.append(torch.get_autocast_dtype(tensor.device.type))
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

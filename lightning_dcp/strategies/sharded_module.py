"""A LightningModule sharded by torch's `fully_shard`, whole for as long as ranks run unequal work.

`fully_shard` (FSDP2) gathers and reduces in hooks around every forward and backward pass, and all
ranks must run the same number of them. Here they do not. So parameters are gathered before the
first pass of an iteration and stay, gradients accumulate whole and local, and one closing pass,
which every rank runs, reduces them and lets the whole parameters go.

Names of torch that are private, as nothing public reaches them:

=========================================  ====================================================
private name                               why
=========================================  ====================================================
``FSDPModule._get_fsdp_state``,            the parameters that each `fully_shard` manages
``FSDPState._fsdp_param_groups`` (formerly
``._fsdp_param_group``),
``FSDPParamGroup.fsdp_params``
``FSDPState._pre_forward_hook_handle``,     hooks of the user's on the LightningModule expect the
``._post_forward_hook_handle``              arguments of its forward: only those two are called
``FSDPParamGroup.gradient_divide_factor``  a user's own divisor would undo the weights of losses
``FSDPState._state_ctx``, ``._training_state``, a pass that ran out of memory has left them as they
``._modules_to_run_forward``, ``._comm_ctx``,   are in the middle of one; torch's own
``FSDPParamGroup._training_state``,         ``reset_iter_state`` lets the parameters go as well,
``._post_forward_indices``                  which others do not gather again
``FSDPParam.unsharded_param``,             gradients under a `MixedPrecisionPolicy` with a
``.unsharded_accumulated_grad``,           `reduce_dtype` of its own accumulate apart from `grad`
``.accumulate_unsharded_grad_if_needed``
=========================================  ====================================================
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from lightning_dcp.strategies.agreement import same_tensors_on_all_ranks
from lightning_dcp.strategies.gradients import forward_replaced, zero_for

if TYPE_CHECKING:
    import lightning as L
    from torch.distributed.device_mesh import DeviceMesh


def refuse_fsdp1(pl_module: L.LightningModule, strategy_name: str) -> None:
    """Refuse modules wrapped by the class of the former FSDP, as Lightning does.

    Raises:
        TypeError: if there are any.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in pl_module.modules()):
        raise TypeError(
            "Found modules that are wrapped with"
            " `torch.distributed.fsdp.FullyShardedDataParallel`;"
            f" strategy='{strategy_name}' only supports the FSDP2 API. Leave the wrapping to the"
            " strategy, or call `torch.distributed.fsdp.fully_shard` in `configure_model`."
        )


class ShardedModule:
    """The parameters of one LightningModule, sharded over all ranks; made by all ranks at once.

    Modules that the user has sharded stay as they are; if there are none, each of `blocks` is
    sharded by itself. What is left over is sharded with the LightningModule as its root.

    Args:
        pl_module: on its device, with its final dtype.
        mesh: of all ranks, one dimension.
        blocks: the repeated blocks.
        strategy_name: for messages.

    Raises:
        MisconfigurationException: for trainable parameters that `fully_shard` was told to ignore,
            that are sharded over a part of the ranks, or that are tensor-parallel.
    """

    def __init__(
        self,
        pl_module: L.LightningModule,
        mesh: DeviceMesh,
        blocks: Sequence[nn.Module],
        strategy_name: str,
    ) -> None:
        self._pl_module = pl_module
        self._inside_whole = False
        self._iterating = False
        #: Versions of the whole parameters at the begin of the iteration.
        self._versions: list[int] = []
        # Shards are cut from each rank's own values: those must be equal before.
        tensors: list[Tensor] = [*pl_module.parameters(), *pl_module.buffers()]
        same_tensors_on_all_ranks(t for t in tensors if not isinstance(t, DTensor))
        if not any(isinstance(module, FSDPModule) for module in pl_module.modules()):
            for block in _separable(pl_module, blocks):
                fully_shard(block, mesh=mesh, reshard_after_forward=False)
        if not isinstance(pl_module, FSDPModule):
            fully_shard(pl_module, mesh=mesh, reshard_after_forward=False)
        self._parts = [m for m in pl_module.modules() if isinstance(m, FSDPModule)]
        self._check_sharded(mesh.size(), strategy_name)
        for group in self._groups():
            group.gradient_divide_factor = None  # the mean over ranks
        # Advice on gathering in the backward pass; here nothing has to be gathered there.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        self._root.set_reshard_after_forward(False)
        self._root.set_reshard_after_backward(False)
        self._root.set_requires_gradient_sync(False)
        with torch.no_grad():
            # Whatever runs first becomes the root: that must not be a block.
            self._call(lambda *_, **__: torch.zeros(()))
        self.gather()
        self._check_whole(strategy_name)
        self.reshard()
        register: Any = pl_module.register_state_dict_pre_hook
        self._state_dict_hook = register(self._refuse_state_dict)

    @property
    def _root(self) -> FSDPModule:
        return cast(FSDPModule, self._pl_module)

    def begin_iteration(self) -> None:
        """Make all parameters whole until `reduce`. A collective."""
        self.gather()
        self._iterating = True
        self._versions = [parameter._version for parameter in self._pl_module.parameters()]

    def gather(self) -> None:
        """Make all parameters whole, without gradients, until `reshard` or `reduce`. A collective.

        Nothing happens to those that are whole already.
        """
        # Tensors made in inference mode could never be trained.
        with torch.inference_mode(False), torch.no_grad():
            for part in self._parts:
                part.unshard()
        # An iteration that raised has left some.
        for parameter in self._pl_module.parameters():
            parameter.grad = None
        for managed in self._managed():
            managed.unsharded_accumulated_grad = None

    def reshard(self) -> None:
        """Let go of the whole parameters; changes to them are lost."""
        for part in self._parts:
            part.reshard()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All parameters are whole in here; a collective, save inside of another one."""
        if self._inside_whole or self._iterating:
            yield
            return
        self.gather()
        self._inside_whole = True
        try:
            yield
        finally:
            self._inside_whole = False
            # A measured pass that raised has left its mark, by which `reshard` would do nothing.
            self.abandon_pass()
            self.reshard()

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """What has accumulated for a whole parameter since `gather`."""
        managed = self._by_parameter().get(id(parameter))
        if managed is not None and managed.unsharded_accumulated_grad is not None:
            managed.accumulate_unsharded_grad_if_needed()
            accumulated: Tensor = managed.unsharded_accumulated_grad
            return accumulated
        return parameter.grad

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
        """The same of several, as they are: in the type that they accumulate in."""
        managed = {
            id(m.unsharded_param): m.unsharded_accumulated_grad
            for m in self._managed()
            if m.unsharded_accumulated_grad is not None
        }
        return [managed.get(id(parameter), parameter.grad) for parameter in parameters]

    def reduce(self) -> None:
        """Average what has accumulated over ranks, into the shards, and reshard. A collective.

        Raises:
            RuntimeError: Parameters were written to since `begin_iteration`.
        """
        self._check_not_written()
        self._iterating = False
        trainable = [p for p in self._pl_module.parameters() if p.requires_grad]
        self._root.set_requires_gradient_sync(True)
        self._root.set_reshard_after_backward(True)
        try:
            zero = self._call(lambda *_, **__: zero_for(trainable))
            zero.backward()  # type: ignore[no-untyped-call]
        finally:
            self._root.set_requires_gradient_sync(False)
            self._root.set_reshard_after_backward(False)
        self.reshard()

    def abandon_pass(self) -> None:
        """Become as between passes, parameters whole, after one that raised. No collective."""
        state: Any = self._root._get_fsdp_state()
        state._comm_ctx.post_forward_order.clear()
        for part in self._parts:
            state_of_part: Any = part._get_fsdp_state()
            state_of_part._modules_to_run_forward.clear()
            state_of_part._training_state = TrainingState.IDLE
        for group in self._groups():
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False

    def reset(self) -> None:
        """Become as between iterations, also after a pass that raised."""
        self._iterating = False
        self._state_dict_hook.remove()
        if hasattr(self._root, "reset_iter_state"):  # older versions of torch have none
            self._root.reset_iter_state()
        self.reshard()

    def _check_not_written(self) -> None:
        named = list(self._pl_module.named_parameters())
        if len(named) != len(self._versions):  # frozen ones may be added; torch refuses others
            return
        written = [
            name
            for (name, parameter), version in zip(named, self._versions, strict=True)
            if parameter._version != version
        ]
        if written:
            raise RuntimeError(
                f"{', '.join(written)} changed in place between the first forward pass of an"
                " iteration and the reduction of its gradients. Under strategy='dcp_fsdp'"
                " parameters are whole copies at that time, and changes to them are lost. Write to"
                " parameters in `on_train_batch_start` or `on_train_batch_end`."
            )

    def _refuse_state_dict(self, *_: Any) -> None:
        if self._iterating and not self._pl_module.trainer.interrupted:
            raise RuntimeError(
                "`state_dict` was called, or a checkpoint saved, between the first forward pass of"
                " an iteration and the reduction of its gradients. Under strategy='dcp_fsdp' it"
                " would let go of the whole parameters, which ranks gather together, but run"
                " different numbers of micro-batches. Move the call to `on_train_batch_end`."
            )

    def _call(self, forward: Any) -> Tensor:
        """Call the module, and with it the hooks of `fully_shard`, with another forward."""
        state: Any = self._root._get_fsdp_state()
        own = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
        # A group of several modules has handles of another kind.
        ids = {handle.id for handle in own} if all(hasattr(h, "id") for h in own) else None
        with forward_replaced(self._pl_module, forward, ids):
            output: Tensor = self._pl_module()
        return output

    def _groups(self) -> Iterator[Any]:
        for part in self._parts:
            state: Any = part._get_fsdp_state()
            if hasattr(state, "_fsdp_param_groups"):
                yield from state._fsdp_param_groups
            elif state._fsdp_param_group is not None:
                yield state._fsdp_param_group

    def _managed(self) -> Iterator[Any]:
        for group in self._groups():
            yield from group.fsdp_params

    def _by_parameter(self) -> dict[int, Any]:
        return {id(managed.unsharded_param): managed for managed in self._managed()}

    def _check_sharded(self, world_size: int, strategy_name: str) -> None:
        for name, parameter in self._pl_module.named_parameters():
            if not parameter.requires_grad:
                continue
            if not isinstance(parameter, DTensor):
                raise MisconfigurationException(
                    f"`fully_shard` was told to ignore the trainable parameter {name};"
                    f" strategy='{strategy_name}' would not reduce its gradient. Freeze it, or"
                    " remove it from `ignored_params`."
                )
            if parameter.device_mesh.size() != world_size:
                raise MisconfigurationException(
                    f"{name} is sharded over {parameter.device_mesh.size()} ranks, but"
                    f" strategy='{strategy_name}' trains one replica over all {world_size}. Call"
                    ' `fully_shard` with mesh=self.device_mesh["data_parallel"].'
                )

    def _check_whole(self, strategy_name: str) -> None:
        for name, parameter in self._pl_module.named_parameters():
            if isinstance(parameter, DTensor):
                raise MisconfigurationException(
                    f"{name} is a tensor-parallel parameter, which strategy='{strategy_name}' does"
                    " not support: ranks run different micro-batches, so none can hold a part of a"
                    " layer for another. Leave `parallelize_module` out."
                )


def _separable(pl_module: nn.Module, blocks: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """All of `blocks`, or none where they share parameters with each other or anything else.

    `fully_shard` takes shared parameters only inside one group: then all go to the root.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    rest: Iterable[nn.Module] = (m for m in pl_module.modules() if id(m) not in inside)
    seen = {id(p) for module in rest for p in module.parameters(recurse=False)}
    for block in blocks:
        own = {id(p) for p in block.parameters()}
        if own & seen:
            return ()
        seen |= own
    return blocks

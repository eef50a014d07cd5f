"""The optimizer state of DeepSpeed's ZeRO-1 in the format of torch's own optimizers, and back.

ZeRO-1 lays the parameters of a group out as one vector, and each rank keeps float32 master weights
and optimizer state of one piece of it. A checkpoint of one file has them by parameter, as
`torch.optim.Optimizer.state_dict` does. They are gathered one tensor at a time, so that no rank but
the one that writes holds more than one parameter's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

__all__ = ["ZeroState"]

_HALF = (torch.float16, torch.bfloat16)


class ZeroState:
    """What a ZeRO-1 optimizer keeps of each parameter. Every method is a collective of all ranks.

    Args:
        optimizer: the engine's ZeRO optimizer.
        groups: the parameters of each group of the user's optimizer, as they were before the engine
            took them over.
        device: where ranks communicate.
    """

    def __init__(
        self, optimizer: Any, groups: Sequence[Sequence[nn.Parameter]], device: torch.device
    ) -> None:
        self._zero = optimizer
        self._base: torch.optim.Optimizer = optimizer.optimizer
        self._groups = [[(p, p.requires_grad) for p in group] for group in groups]
        self._device = device

    # ---- weights ---------------------------------------------------------------------------------

    def masters(self, keep: bool) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Float32 weights of the parameters in half precision, on the CPU; nothing if not `keep`.

        Without those of parameters that were set to something else since the engine's last step, as
        by `trainer.test(ckpt_path=...)` after `fit`. All ranks have to go through to the end.
        """
        for parameter in self._trainable():
            if parameter.dtype in _HALF:
                full = self._gather(parameter, None)
                if keep and torch.equal(full.to(parameter), parameter.detach()):
                    yield parameter, full.cpu()

    def load_masters(self, weights: Mapping[nn.Parameter, Tensor]) -> None:
        """Set the float32 weights of parameters in half precision."""
        for parameter in self._trainable():
            if parameter.dtype in _HALF and parameter in weights:
                safe_set_full_fp32_param(parameter, weights[parameter].float())

    # ---- optimizer state -------------------------------------------------------------------------

    def state_dict(self, keep: bool) -> dict[str, Any]:
        """As `torch.optim.Optimizer.state_dict`, on the CPU.

        Args:
            keep: whether this rank wants it; elsewhere "state" is empty.
        """
        self._link()
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        index = 0
        for members, options in zip(self._groups, self._base.param_groups, strict=True):
            flat = options["params"][0]
            pieces = self._base.state.get(flat, {})
            groups.append(
                {
                    **{k: v for k, v in options.items() if k != "params"},
                    "params": list(range(index, index + len(members))),
                }
            )
            for parameter, trainable in members:
                if trainable and pieces:
                    found = self._state_of(parameter, flat, pieces)
                    if keep:
                        state[index] = {
                            k: v.detach().cpu().clone() if isinstance(v, Tensor) else v
                            for k, v in found
                        }
                    else:
                        for _ in found:
                            pass
                index += 1
        return {"state": state, "param_groups": groups}

    def _state_of(
        self, parameter: nn.Parameter, flat: Tensor, pieces: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        for key, value in pieces.items():
            if isinstance(value, Tensor) and value.shape == flat.shape:
                yield key, self._gather(parameter, key)
            else:
                yield key, value

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what `torch.optim.Optimizer.state_dict` gave, of any strategy and world size.

        Raises:
            ValueError: other groups or shapes; state that is not by element, as that of Adafactor.
        """
        given = saved["param_groups"]
        if len(given) != len(self._groups):
            raise ValueError(
                f"The checkpoint's optimizer has {len(given)} parameter groups, this run's has"
                f" {len(self._groups)}. Resume with the optimizer that was saved."
            )
        to_set: list[tuple[nn.Parameter, Tensor, str]] = []
        for number, (members, theirs) in enumerate(zip(self._groups, given, strict=True)):
            ours = self._base.param_groups[number]
            states = self._match(number, members, theirs["params"], saved["state"])
            ours.update({k: v for k, v in theirs.items() if k != "params"})
            flat = ours["params"][0]
            self._base.state.pop(flat, None)
            present = [state for _, state in states if state]
            if not present:
                continue
            pieces: dict[str, Any] = {}
            for key in present[0]:
                values = [(p, state[key]) for p, state in states if key in state]
                if _by_element(key, values):
                    pieces[key] = torch.zeros_like(flat, requires_grad=False)
                    to_set += [(p, value, key) for p, value in values]
                else:
                    pieces[key] = self._common(key, values, ours)
            self._base.state[flat] = pieces
        self._link()
        for parameter, value, key in to_set:
            safe_set_full_optimizer_state(parameter, value, key)

    def _match(
        self,
        number: int,
        members: Sequence[tuple[nn.Parameter, bool]],
        ids: Sequence[int],
        states: Mapping[int, Mapping[str, Any]],
    ) -> list[tuple[nn.Parameter, Mapping[str, Any]]]:
        """(parameter, saved state) of the trainable parameters of a group."""
        # A folder of DeepSpeed's has none of the frozen parameters.
        trainable = [p for p, trains in members if trains]
        if len(ids) == len(members):
            pairs = [(p, i) for (p, trains), i in zip(members, ids, strict=True) if trains]
        elif len(ids) == len(trainable):
            pairs = list(zip(trainable, ids, strict=True))
        else:
            raise ValueError(
                f"Group {number} of the checkpoint's optimizer has {len(ids)} parameters, this"
                f" run's has {len(members)}. Resume with the model and optimizer that were saved."
            )
        return [(p, states.get(i, {})) for p, i in pairs]

    def _common(self, key: str, values: Sequence[tuple[nn.Parameter, Any]], options: Any) -> Any:
        """A value that ZeRO keeps once for a group, as "step"."""
        found = [value for _, value in values]
        if any(isinstance(value, Tensor) and value.numel() > 1 for value in found):
            raise ValueError(
                f"The checkpoint's optimizer keeps {key!r} not by element of each parameter (as"
                " Adafactor does), which ZeRO-1's shards cannot hold. Load the weights only"
                " (`load_from_checkpoint`) and start a new `fit`, or use strategy='dcp_ddp'."
            )
        # A parameter that was without a gradient in some steps has made fewer.
        value = found[0] if found[0] is None else max(found, key=float)
        if isinstance(value, Tensor):
            on_device = bool(options.get("fused") or options.get("capturable"))
            value = value.detach().clone().to(self._device if on_device else "cpu")
        return value

    # ---- loss scale ------------------------------------------------------------------------------

    def loss_scale(self) -> dict[str, int | float]:
        """Numbers of the loss scaler; empty where there is none."""
        scaler = getattr(self._zero, "loss_scaler", None)
        if scaler is None or not getattr(self._zero, "dynamic_loss_scale", False):
            return {}
        return {k: v for k, v in vars(scaler).items() if type(v) in (int, float)}

    def load_loss_scale(self, numbers: Mapping[str, int | float]) -> None:
        """Inverse of `loss_scale`."""
        scaler = getattr(self._zero, "loss_scaler", None)
        for name, value in numbers.items():
            if type(getattr(scaler, name, None)) in (int, float):
                setattr(scaler, name, value)

    # ----------------------------------------------------------------------------------------------

    def _link(self) -> None:
        """Let DeepSpeed find each parameter's part of the optimizer's state.

        DeepSpeed 0.19.8 does so once, after the first step of the first group: for the other groups
        it finds nothing.
        """
        if self._base.state:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _trainable(self) -> Iterator[nn.Parameter]:
        for members in self._groups:
            yield from (p for p, trains in members if trains)

    def _gather(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """The whole float32 weight, or what the optimizer keeps under `key`."""
        data = parameter.data
        # DeepSpeed gathers where the parameter lies: after `fit` on the CPU, where NCCL cannot.
        parameter.data = data.to(self._device)
        try:
            if key is None:
                full = safe_get_full_fp32_param(parameter)
            else:
                full = safe_get_full_optimizer_state(parameter, key)
        finally:
            parameter.data = data
        assert isinstance(full, Tensor)
        return full


def _by_element(key: str, values: Sequence[tuple[nn.Parameter, Any]]) -> bool:
    return key != "step" and all(
        isinstance(value, Tensor) and value.shape == p.shape for p, value in values
    )

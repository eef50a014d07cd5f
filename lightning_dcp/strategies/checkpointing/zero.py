"""Lightning's DeepSpeedStrategy with checkpoints of one plain file, as `ddp` writes them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch import Tensor
from typing_extensions import override

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from lightning_dcp.strategies.checkpointing.zero_state import ZeroState

__all__ = ["PlainZeroCheckpoints"]

#: What a file has of the engine that torch's own optimizers have not: float32 weights where the
#: model's are in half precision (`precision="bf16-true"`), and the loss scale.
_ENGINE_KEY = "lightning_dcp_engine"


class PlainZeroCheckpoints(DeepSpeedStrategy):
    """A ZeRO-1 engine whose checkpoints are files that every strategy reads, and folders as well.

    A file is restored as under `ddp`: weights before the engine is made, optimizer state after it.
    """

    save_distributed_checkpoint: bool = False
    _zero_state: ZeroState | None = None

    def keep_zero_state(
        self, engine_optimizer: Any, groups: list[list[Parameter]], model: Module
    ) -> None:
        """Remember which parameters the engine's vectors hold.

        Args:
            engine_optimizer: what the engine has made of the optimizer.
            groups: the parameters of the user's optimizer before that; [] where the engine itself
                has made one from its config.
            model: with all parameters.
        """
        from lightning_dcp.strategies.checkpointing.zero_state import ZeroState

        if not groups:
            groups = [[p for p in model.parameters() if p.requires_grad]]
        self._zero_state = ZeroState(engine_optimizer, groups, self.root_device)

    # ---- saving ----------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Weights by plain names; with mixed precision the float32 ones, whole on rank 0 only."""
        state = super().lightning_module_state_dict()
        if self.save_distributed_checkpoint:
            return state
        assert self.lightning_module is not None
        named = list(self.lightning_module.named_parameters(remove_duplicate=False))
        if self._zero_state is not None and "mixed" in str(self.precision_plugin.precision):
            masters = dict(self._zero_state.masters(keep=self.is_global_zero))
            for name, parameter in named:
                if name in state and parameter in masters:
                    state[name] = masters[parameter]
        if self.exclude_frozen_parameters:
            for name, parameter in named:
                if not parameter.requires_grad:
                    state.pop(name, None)
        return state

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As torch's own optimizer would give it, whole on rank 0 only."""
        if self.save_distributed_checkpoint or self._zero_state is None:
            return {}
        return self._zero_state.state_dict(keep=self.is_global_zero)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        path = Path(self.broadcast(filepath))
        if self.save_distributed_checkpoint:
            if self.is_global_zero and path.is_file():
                path.unlink()
            self.barrier()
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self._zero_state is not None and "optimizer_states" in checkpoint:
            engine = self._engine_entry(self._zero_state)
            if engine:
                checkpoint[_ENGINE_KEY] = engine
        if self.is_global_zero and (path / "latest").is_file():
            shutil.rmtree(path)  # a DeepSpeed folder of this name, of an earlier run
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def _engine_entry(self, zero: ZeroState) -> dict[str, Any]:
        entry: dict[str, Any] = {}
        assert self.lightning_module is not None
        if "mixed" not in str(self.precision_plugin.precision):
            masters = dict(zero.masters(keep=self.is_global_zero))
            named = self.lightning_module.named_parameters()
            weights = {name: masters[p] for name, p in named if p in masters}
            if weights:
                entry["master_weights"] = weights
        scale = zero.loss_scale()
        if scale:
            entry["loss_scale"] = scale
        return entry

    # ---- loading ---------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        Strategy.load_model_state_dict(self, checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Float32 weights, optimizer state and loss scale, into the engine's shards."""
        assert self.lightning_module is not None and self._zero_state is not None
        engine = checkpoint.get(_ENGINE_KEY, {})
        weights: dict[str, Tensor] = {
            **checkpoint["state_dict"],
            **engine.get("master_weights", {}),
        }
        self._zero_state.load_masters(
            {p: weights[n] for n, p in self.lightning_module.named_parameters() if n in weights}
        )
        states = checkpoint["optimizer_states"]
        if states:
            self._zero_state.load_state_dict(states[0])
        scale = engine.get("loss_scale", {})
        if not scale and "scale" in checkpoint.get("MixedPrecision", {}):  # of `ddp`
            scale = {"cur_scale": float(checkpoint["MixedPrecision"]["scale"])}
        self._zero_state.load_loss_scale(scale)

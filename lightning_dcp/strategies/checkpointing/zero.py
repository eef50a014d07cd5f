"""Lightning's DeepSpeedStrategy with checkpoints of one plain file, as `ddp` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch import Tensor
from typing_extensions import override

from lightning_dcp.strategies._lightning_compat import saving as compat
from lightning_dcp.strategies.checkpointing.writing import (
    busy_saving,
    write_folder,
    write_state,
)

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from lightning_dcp.strategies.checkpointing.zero_state import ZeroState

__all__ = ["PlainZeroCheckpoints"]

#: What a file has of the engine that torch's own optimizers have not: float32 weights where the
#: model's are in half precision (`precision="bf16-true"`), and the loss scale.
_ENGINE_KEY = "lightning_dcp_engine"
#: Of the folder with the shards in a DeepSpeed folder; Lightning's.
_TAG = "checkpoint"


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
        if self.save_distributed_checkpoint:
            if compat.writes_plain_shards(self.deepspeed_engine) and storage_options is None:
                write_folder(
                    Path(self.broadcast(filepath)),
                    partial(self._write_shards, checkpoint),
                    is_global_zero=self.is_global_zero,
                    is_local_zero=self.local_rank == 0,
                    around_end=partial(busy_saving, self),
                )
            else:
                super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self._zero_state is not None and "optimizer_states" in checkpoint:
            engine = self._engine_entry(self._zero_state)
            if engine:
                checkpoint[_ENGINE_KEY] = engine
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def _write_shards(self, checkpoint: Mapping[str, Any], folder: Path) -> None:
        """As Lightning's strategy; but a rank that cannot write does not leave the others alone."""
        engine = self.deepspeed_engine
        zipped = engine.checkpoint_engine.zipfile_serialization

        def write(state: Any, path: str) -> None:
            with open(path, "wb") as file:
                write_state(state, file, _use_new_zipfile_serialization=zipped)

        rest = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
        with compat.shards_written_by(engine, write) as errors:
            engine.save_checkpoint(
                str(folder),
                client_state=rest,
                tag=_TAG,
                save_latest=False,
                exclude_frozen_parameters=self.exclude_frozen_parameters,
            )
        if errors:
            raise errors[0]
        if self.is_global_zero:
            (folder / "latest").write_text(_TAG)

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

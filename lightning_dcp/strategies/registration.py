"""Makes `Trainer(strategy="dcp")` known: without a plugin point, names have to be registered."""

from __future__ import annotations

import sys
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import StrategyRegistry

from lightning_dcp.strategies.ddp import DCPDDPStrategy
from lightning_dcp.strategies.deepspeed import DCPStrategy
from lightning_dcp.strategies.fsdp import DCPFSDPStrategy

_STRATEGIES = {
    DCPStrategy.strategy_name: (DCPStrategy, "Data-Centric Parallel on DeepSpeed ZeRO-1"),
    DCPDDPStrategy.strategy_name: (DCPDDPStrategy, "Data-Centric Parallel on DDP"),
    DCPFSDPStrategy.strategy_name: (DCPFSDPStrategy, "Data-Centric Parallel on FSDP2"),
}


def register_strategies() -> None:
    """Register the strategies with `lightning`; safe to call again."""
    for name, (cls, description) in _STRATEGIES.items():
        StrategyRegistry.register(name, cls, description=description, override=True)
    # The package `pytorch_lightning` is another copy of Lightning: its Trainer would refuse our
    # strategies as "not a Strategy". Say what to do instead, where it is in use.
    foreign = sys.modules.get("pytorch_lightning")
    if foreign is not None:
        for name in _STRATEGIES:
            foreign.strategies.StrategyRegistry.register(
                name, _refuse_pytorch_lightning, description="needs `lightning`", override=True
            )


def _refuse_pytorch_lightning(**_: Any) -> Any:
    raise MisconfigurationException(
        "lightning_dcp works with the `lightning` package, but this Trainer comes from"
        " `pytorch_lightning`, which is a separate copy with its own classes. Replace"
        " `import pytorch_lightning as pl` by `import lightning as L` (Trainer, LightningModule,"
        " LightningDataModule and callbacks)."
    )

"""Data-Centric Parallel for PyTorch Lightning.

Importing this package registers the strategies `dcp` (DeepSpeed ZeRO-1), `dcp_ddp` and `dcp_fsdp`
(FSDP2)::

    import lightning as L
    import lightning_dcp

    L.Trainer(strategy="dcp", devices=8).fit(model, datamodule=data)

"DCP" is Data-Centric Parallel here, not `torch.distributed.checkpoint`.
"""

from lightning_dcp.command_process import runs_without_torch

if not runs_without_torch():  # as `lightning-dcp simulate` and `plan` do
    from lightning_dcp.callback import DCPCallback
    from lightning_dcp.data.datamodule import DCPDataModuleMixin
    from lightning_dcp.parallel.attention import attention
    from lightning_dcp.parallel.axes import attention_axis, gather_axis, switch_axis
    from lightning_dcp.parallel.huggingface_attention import register_attention
    from lightning_dcp.parallel.loss import linear_cross_entropy
    from lightning_dcp.planning.options import PlanningOptions
    from lightning_dcp.profiling.options import ProfilingOptions
    from lightning_dcp.strategies.ddp import DCPDDPStrategy
    from lightning_dcp.strategies.deepspeed import DCPStrategy
    from lightning_dcp.strategies.fsdp import DCPFSDPStrategy
    from lightning_dcp.strategies.registration import register_strategies
    from lightning_dcp.strategies.reliability import ReliabilityOptions

    register_strategies()

__version__ = "0.1.0"

__all__ = [
    "DCPCallback",
    "DCPDDPStrategy",
    "DCPDataModuleMixin",
    "DCPFSDPStrategy",
    "DCPStrategy",
    "PlanningOptions",
    "ProfilingOptions",
    "ReliabilityOptions",
    "attention",
    "attention_axis",
    "gather_axis",
    "linear_cross_entropy",
    "register_attention",
    "switch_axis",
]

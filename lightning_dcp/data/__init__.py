"""Which samples this rank sees: lengths, plan sampler, loader, DataModule mixin."""

from lightning_dcp.data.batch import IterationBatch, IterationSamples, PlanKey
from lightning_dcp.data.datamodule import DCPDataModuleMixin, MicroBatchMaker
from lightning_dcp.data.lengths import Lengths, find_lengths, resolve_lengths
from lightning_dcp.data.loader import LoaderSpec, build_plan_loader, read_loader
from lightning_dcp.data.sampler import Planner, PlanSampler

__all__ = [
    "DCPDataModuleMixin",
    "IterationBatch",
    "IterationSamples",
    "Lengths",
    "LoaderSpec",
    "MicroBatchMaker",
    "PlanKey",
    "PlanSampler",
    "Planner",
    "build_plan_loader",
    "find_lengths",
    "read_loader",
    "resolve_lengths",
]

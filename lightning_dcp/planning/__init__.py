"""What should run: lengths, buckets, cost model, candidates, policies, plan.

The pipeline, each stage a module::

    lengths      checked integers, one per sample
    buckets      length intervals that share a configuration
    cost_model   seconds and bytes of a micro-batch, fitted to measured points
    drift        costs corrected by what micro-batches really took
    candidates   (b, p, r) per bucket within memory, and why others are left out
    search       the configuration of each bucket
    schedule     who runs which samples in which iteration (accumulation: how often)
    epoch, plan  the result: values that every rank follows

numpy and scipy only; nothing here imports torch.
"""

from lightning_dcp.planning.buckets import Buckets, choose_edges
from lightning_dcp.planning.candidates import Candidate, Exclusion
from lightning_dcp.planning.cost_model import (
    BlockCosts,
    CostModel,
    HeldOutError,
    Measurement,
    fit_cost_model,
)
from lightning_dcp.planning.costs import Costs
from lightning_dcp.planning.drift import CorrectedCosts, Corrections
from lightning_dcp.planning.epoch import EpochPlan
from lightning_dcp.planning.lengths import as_lengths
from lightning_dcp.planning.options import POLICIES, PlanningOptions
from lightning_dcp.planning.plan import MicroBatch, Plan
from lightning_dcp.planning.planner import BucketChoice, EpochPlanner
from lightning_dcp.planning.report import IterationReport
from lightning_dcp.planning.static import best_static

__all__ = [
    "POLICIES",
    "BlockCosts",
    "BucketChoice",
    "Buckets",
    "Candidate",
    "CorrectedCosts",
    "Corrections",
    "CostModel",
    "Costs",
    "EpochPlan",
    "EpochPlanner",
    "Exclusion",
    "HeldOutError",
    "IterationReport",
    "Measurement",
    "MicroBatch",
    "Plan",
    "PlanningOptions",
    "as_lengths",
    "best_static",
    "choose_edges",
    "fit_cost_model",
]

"""The same plans on a modelled cluster.

Modules::

    cluster       GPUs, links and collectives
    models        sizes of transformers
    roofline      seconds and bytes of a micro-batch as a law of the two: Costs
    workloads     synthetic sample lengths
    length_files  sample lengths from files
    spec_files    cluster and model from JSON and YAML files
    run           policies compared over an epoch
    plots         pictures of that comparison (matplotlib)

numpy and scipy only; nothing here imports torch.
"""

from lightning_dcp.simulation.cluster import CLUSTERS, Cluster, Gpu, cluster_named, load_cluster
from lightning_dcp.simulation.length_files import read_lengths
from lightning_dcp.simulation.models import MODELS, TransformerSpec, load_model, model_named
from lightning_dcp.simulation.roofline import RooflineCosts
from lightning_dcp.simulation.workloads import (
    MIXES,
    Workload,
    cheapest_rank_seconds,
    log_normal,
    paper_mix,
)

__all__ = [
    "CLUSTERS",
    "MIXES",
    "MODELS",
    "Cluster",
    "Gpu",
    "RooflineCosts",
    "TransformerSpec",
    "Workload",
    "cheapest_rank_seconds",
    "cluster_named",
    "load_cluster",
    "load_model",
    "log_normal",
    "model_named",
    "paper_mix",
    "read_lengths",
]

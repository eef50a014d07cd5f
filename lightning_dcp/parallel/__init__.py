"""How ranks run a plan: SP groups, sharded blocks, recomputation, random numbers, targets."""

from lightning_dcp.parallel.attention import attention
from lightning_dcp.parallel.blocks import BlockStack, find_blocks, find_stacks
from lightning_dcp.parallel.kernels import kernel_name
from lightning_dcp.parallel.runtime import BlockRuntime
from lightning_dcp.parallel.signature import BlockSignature
from lightning_dcp.parallel.targets import count_targets
from lightning_dcp.parallel.topology import SPGroup, Topology

__all__ = [
    "BlockRuntime",
    "BlockSignature",
    "BlockStack",
    "SPGroup",
    "Topology",
    "attention",
    "count_targets",
    "find_blocks",
    "find_stacks",
    "kernel_name",
]

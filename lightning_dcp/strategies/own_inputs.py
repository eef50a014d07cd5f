"""What settings say of training steps: inputs sliced or whole, logits tiled or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_info

from lightning_dcp.parallel.inputs import StepInputs
from lightning_dcp.tables import format_bytes

if TYPE_CHECKING:
    import lightning as L

    from lightning_dcp.strategies.settings import DCPSettings

#: `tiled_loss="auto"`: the share of the memory limit from which on logits of the longest sample (in
#: float32, with the copies that softmax and its gradient need) are too large.
_SHARE_OF_LOGITS = 0.1
_BYTES_PER_LOGIT = 3 * 4


def step_inputs(pl_module: L.LightningModule, settings: DCPSettings) -> StepInputs | None:
    """What prepares the inputs of training steps; None where they stay as they are."""
    if settings.shard == "blocks" and settings.tiled_loss is False:
        return None
    inputs = StepInputs(
        pl_module,
        slices=settings.shard == "inputs",
        input_dims=settings.input_dims,
        ignore_index=settings.ignore_index,
    )
    if settings.tiled_loss is True:
        if not inputs.models.vocabulary:
            raise ValueError(
                "tiled_loss=True: no Hugging Face causal language model with a plain linear output"
                " layer was found. In your own model, compute the loss by"
                " lightning_dcp.linear_cross_entropy(hidden, head.weight, labels)."
            )
        inputs.models.tiled = True
    return inputs if inputs.slices or inputs.models.vocabulary else None


def tile_large_loss(
    inputs: StepInputs | None, settings: DCPSettings, longest: int, memory_limit_bytes: int
) -> None:
    """Decide `tiled_loss="auto"`, the same on all ranks.

    Args:
        inputs: of the training steps.
        settings: of the strategy.
        longest: length of the longest sample.
        memory_limit_bytes: of a rank.
    """
    if inputs is None or settings.tiled_loss != "auto":
        return
    logits = inputs.models.vocabulary * longest * _BYTES_PER_LOGIT
    inputs.models.tiled = logits > _SHARE_OF_LOGITS * memory_limit_bytes
    if inputs.models.tiled:
        rank_zero_info(
            f"DCP: logits of {inputs.models.vocabulary:,} words for {longest:,} tokens would take"
            f" {format_bytes(logits)}: the loss computes them tile by tile (tiled_loss)."
        )

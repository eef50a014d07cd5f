"""What is simulated: the paper's models, mixes and cluster, and the steps' sizes.

The paper shows its length distributions and the sizes of its models in pictures only. Lengths and
step sizes here are ours; cluster, memory limit, number of GPUs and numbers of parameters are the
paper's (sections 4.1 to 4.3).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lightning_dcp.simulation import RooflineCosts, cluster_named, model_named, paper_mix
from lightning_dcp.simulation.run import Scenario

MODELS = {"1D": "transformer-1d-5b", "2D": "transformer-2d-1.2b"}
MIXES = ("short", "balanced", "long")
SHORTEST = 1024
LIMIT_BYTES = 80 * 10**9
WORLD_SIZE = 32  # of Figure 8

LONGEST = {"1D": 2**20, "2D": 2**21}
TOKENS = {"1D": 131_072, "2D": 524_288}  # per GPU and step

SCALING = (8, 32, 128, 256, 1024)
# All samples must fit on 8 GPUs.
SCALING_LONGEST = {"1D": 2**19, "2D": 2**21}
SCALING_TOKENS = {"1D": 262_144, "2D": 1_048_576}
_RANK_STEPS = 1536  # ranks x steps that a mix is drawn for when its mean length is sought

STEP_SIZES = {  # tokens per GPU and step of the sensitivity table
    "1D": (32_768, 65_536, 131_072, 262_144),
    "2D": (65_536, 131_072, 262_144, 524_288),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting.

    Attributes:
        model: Key of ``MODELS``.
        mix: One of ``MIXES``.
        world_size: Ranks.
        steps: Steps per epoch of a plain data-parallel run.
        longest: Longest sample.
        tokens_per_rank: Tokens per rank and step aimed at.
        mix_world_size: Ranks whose costs define the mix, so that all sizes get the same lengths.
    """

    model: str
    mix: str
    steps: int
    longest: int
    tokens_per_rank: int
    world_size: int = WORLD_SIZE
    mix_world_size: int = WORLD_SIZE

    def scenario(self, *, max_steps: int | None = None) -> Scenario:
        """Samples and costs; ``batch_size`` such that steps have about ``tokens_per_rank``."""
        costs = costs_of(self.model, self.world_size)
        batch_size = self._batch_size()
        return Scenario(
            lengths=self._lengths(batch_size * self.world_size * self.steps),
            costs=costs,
            world_size=self.world_size,
            limit_bytes=costs.memory_limit_bytes,
            batch_size=batch_size,
            sp_size_exclusions=costs.sp_size_exclusions,
            max_steps=max_steps,
        )

    def _lengths(self, num_samples: int):
        costs = costs_of(self.model, self.mix_world_size)
        return paper_mix(
            self.mix,
            costs,
            num_samples=num_samples,
            shortest=SHORTEST,
            longest=self.longest,
            limit_bytes=costs.memory_limit_bytes,
        ).lengths

    def _batch_size(self) -> int:
        # The rarest lengths are drawn at least once, so the mean depends on the number of samples.
        num_samples = 20_000
        for _ in range(4):
            mean = float(self._lengths(num_samples).mean())
            batch_size = max(1, round(self.tokens_per_rank / mean))
            num_samples = batch_size * _RANK_STEPS
        return batch_size


def costs_of(model: str, world_size: int) -> RooflineCosts:
    """Costs on H200 nodes of eight GPUs of which 80 GB may be used."""
    cluster = dataclasses.replace(cluster_named("h200"), usable_memory_bytes=LIMIT_BYTES)
    return RooflineCosts(model=model_named(MODELS[model]), cluster=cluster, world_size=world_size)

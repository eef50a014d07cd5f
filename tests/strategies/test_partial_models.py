"""Models of which not everything is trained, or not in every micro-batch, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.strategies.hand_planned import train, wanted_of
from tests.strategies.toys import ToyLM, largest_relative_error
from tests.worlds import World


class FrozenLM(ToyLM):
    """Embedding and first block are frozen: gradients end inside the blocks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embed.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


class BranchLM(ToyLM):
    """A second tower for some samples only, and a head that nothing uses yet."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        width = self.embed.embedding_dim
        self.tower = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.unused = nn.Linear(width, 2)
        self.to(self.embed.weight.dtype)
        self.with_images: Tensor | None = None

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        self.with_images = batch["id"] % 3 == 0
        return super().losses(batch)

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        chosen, self.with_images = self.with_images, None
        if chosen is None or not bool(chosen.any()):
            return logits
        features = self.tower(self.embed(ids[:, :1]))  # the same with any padding
        return logits + chosen[:, None, None] * self.head(features)


class RareLM(BranchLM):
    """The tower is used by no rank in most iterations."""

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        self.with_images = batch["id"] < 0
        return ToyLM.losses(self, batch)


class LoraLM(ToyLM):
    """A Llama of Hugging Face's under low-rank adapters of peft's."""

    def __init__(self, double: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        import peft
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=13,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
        )
        lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "up_proj"])
        torch.manual_seed(3)
        self.model = peft.get_peft_model(LlamaForCausalLM(config), lora)
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:  # zero at first, which would leave nothing to compare
                nn.init.normal_(parameter, std=0.1)
        # The library's norms compute in float32, whatever the model's type.
        norms = [
            (m, n)
            for m in self.model.modules()
            for n, c in m.named_children()
            if "Norm" in type(c).__name__
        ]
        for parent, name in norms:
            setattr(parent, name, nn.RMSNorm(16))
            getattr(parent, name).requires_grad_(False)
        del self.embed, self.blocks, self.norm, self.head
        self.blocks = self.model.base_model.model.model.layers
        if double:
            self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=100) as world:
        yield world


@pytest.mark.parametrize("name", ["dcp_ddp", "dcp", "dcp_fsdp"])
@pytest.mark.parametrize("model_class", [FrozenLM, BranchLM, RareLM, LoraLM])
def test_three_steps_are_those_of_one_process(
    world: World, name: str, model_class: type[ToyLM]
) -> None:
    wanted = wanted_of(3, name=name, double=True, model_class=model_class)
    results = world.run(train, name, 3, double=True, model_class=model_class)
    first = wanted.gradients[0]
    for result in results:
        got = result["gradients"][0]
        if name == "dcp":  # the engine keeps zeros for what was not used
            zeros = {n: g for n, g in got.items() if n not in first}
            assert all(not g.any() for g in zeros.values())
            got = {n: g for n, g in got.items() if n in first}
        assert largest_relative_error(got, first) <= 1e-12
        assert result["losses"][0] == pytest.approx(wanted.losses[0], rel=1e-12)
        if name != "dcp":  # the master weights of ZeRO-1 are float32, and see weight decay
            assert largest_relative_error(result["parameters"], wanted.parameters) <= 1e-11

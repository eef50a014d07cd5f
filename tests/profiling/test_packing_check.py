"""The check of packing: which models pass, and how labels at the borders are treated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dcp.data.packing import PackingCollate, find_layout
from lightning_dcp.parallel import BlockRuntime, Topology, find_blocks
from lightning_dcp.profiling.packing_check import PackingMismatch, check_packing, samples_to_check
from lightning_dcp.profiling.preserve import preserve
from lightning_dcp.profiling.trial import Step

VOCAB, WIDTH, IGNORE = 11, 16, -100


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        if kind == "conv":
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.kind == "conv":
            x = x + self.conv(F.pad(x.mT, (2, 0))).mT
        h = self.norm(x) + positions
        q, k, v = self.qkv(h).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if self.kind == "by hand":
            later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
            out = (q @ k.mT / 2).masked_fill(later, float("-inf")).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.kind != "both ways")
        return x + self.drop(self.out(out.transpose(1, 2).flatten(2)))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["input_ids"])
        positions = torch.arange(x.shape[1])[None]
        if self.kind != "own positions":
            positions = batch.get("position_ids", positions)
        angles = torch.sin(positions[..., None] / torch.arange(1, WIDTH + 1)).to(x.dtype)
        for block in self.blocks:
            x = block(x, angles)
        logits, labels = self.head(x), batch["labels"]
        if self.kind == "shifts":
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        if self.kind == "mean of samples":
            return (loss.sum(1) / (labels != IGNORE).sum(1)).mean()
        return loss.sum() / (labels != IGNORE).sum()


def samples(num: int = 2) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(VOCAB, (17 + 9 * i,), generator=generator) for i in range(num)]
    return [{"input_ids": x, "labels": (x * 3) % VOCAB, "weight": 1.0} for x in ids]


def padded(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    def pad(name: str, value: int) -> Tensor:
        columns = [item[name] for item in items]
        return nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=value)

    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", IGNORE)}


def check(
    model: nn.Module,
    step: Callable[[Any], Tensor],
    dtype: torch.dtype = torch.float32,
    path: str = "blocks",
    pad: Callable[[list[Any]], Any] = padded,
) -> bool:
    topology = Topology(1, 0)
    runtime = BlockRuntime(find_blocks(model, path), topology)
    runtime.packing = True
    runtime.attach()
    items = samples()
    collate = PackingCollate(find_layout(items, [17, 26]))

    def packed(items: list[Any], mark_borders: bool) -> tuple[Any, tuple[int, ...]]:
        return PackingCollate(collate.layout, mark_borders=mark_borders)(items)

    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    try:
        with preserve(model):
            return check_packing(
                Step(
                    step=step,
                    make_batch=lambda b, s: None,
                    module=model,
                    runtime=runtime,
                    topology=topology,
                    device=torch.device("cpu"),
                ),
                samples=items,
                padded=pad,
                packed=packed,
                compute_dtype=dtype,
                gather=lambda value: [value],
            )
    finally:
        runtime.detach()
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(("kind", "mark_borders"), [("plain", False), ("shifts", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_labels_at_the_borders(kind: str, mark_borders: bool, dtype: torch.dtype) -> None:
    model = Model(kind).to(dtype)
    assert check(model, model, dtype) is mark_borders


@pytest.mark.parametrize(
    "kind", ["own positions", "conv", "by hand", "both ways", "mean of samples"]
)
def test_what_packing_would_change_is_refused(kind: str) -> None:
    model = Model(kind)
    with pytest.raises(PackingMismatch, match=r"two packed samples .* packing=False"):
        check(model, model)


def test_a_step_that_fails_is_refused_with_its_error() -> None:
    model = Model("plain")

    def step(batch: dict[str, Tensor]) -> Tensor:
        if "position_ids" in batch:
            raise TypeError("unexpected argument 'position_ids'")
        loss: Tensor = model(batch)
        return loss

    with pytest.raises(PackingMismatch, match="TypeError: unexpected argument"):
        check(model, step)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mistral"])
def test_hugging_face_models_pass(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    if name == "Mistral":
        sizes.update(sliding_window=8)
    if name == "GPT2":
        sizes = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = getattr(transformers, f"{name}Config")(
        **sizes, attn_implementation="sdpa", bos_token_id=0, eos_token_id=1, pad_token_id=0
    )
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, name + suffix)(config)
    model.config.use_cache = False

    def step(batch: dict[str, Tensor]) -> Tensor:
        names = "input_ids", "labels", "position_ids", "attention_mask"
        loss: Tensor = model(**{n: batch[n] for n in names if n in batch}).loss
        return loss

    def with_mask(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = padded(items)
        return {**batch, "attention_mask": (batch["labels"] != IGNORE).long()}

    path = "transformer.h" if name == "GPT2" else "model.layers"
    assert check(model, step, path=path, pad=with_mask) is True


def test_samples_to_check() -> None:
    lengths = [3, 40, 18, 90, 18, 20]
    assert samples_to_check(lengths) == (2, 1)
    assert samples_to_check([5, 5, 5]) == (1, 2)
    assert {lengths[i] for lengths in ([4, 9],) for i in samples_to_check(lengths)} == {4, 9}
    assert {[30, 31][i] for i in samples_to_check([30, 31])} == {30, 31}

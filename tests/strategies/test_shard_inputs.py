"""`shard="inputs"`: embedding, output layer and loss run on each rank's slice of the tokens.

The optimizer step equals that of one process; a slice may hold no label at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_dcp
from lightning_dcp.parallel import BlockRuntime, Topology, find_blocks
from lightning_dcp.parallel.inputs import StepInputs
from lightning_dcp.planning.options import PlanningOptions
from lightning_dcp.profiling.memory_meter import MemoryMeter
from lightning_dcp.profiling.options import ProfilingOptions
from tests.strategies.hand_planned import train, wanted_of
from tests.strategies.toys import IGNORE, VOCAB, Sequences, ToyLM, largest_relative_error, pad
from tests.worlds import World, WorldFailure

INPUTS = {"shard": "inputs", "input_dims": {"ids": 1, "labels": 1, "position_ids": -1}}


class AlignedLM(ToyLM):
    """Positions come with the batch; the output layer is tied to the embedding."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.head.weight = self.embed.weight

    def hidden(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(ids)
        angles = position_ids.to(x.dtype)[:, None]
        positions = torch.sin(angles / torch.arange(1, x.shape[-1] + 1, dtype=x.dtype))
        for block in self.blocks:
            x = block(x, positions)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids, torch.arange(ids.shape[1])))

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        positions = batch.get("position_ids", torch.arange(batch["ids"].shape[1]))
        logits = self.head(self.hidden(batch["ids"], positions))
        labels = batch["labels"]
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return each[labels != IGNORE]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """A mean whose gradients are NaN where a slice has no label."""
        if type(self) is not AlignedLM:
            return self.losses(batch).mean()
        logits = self.head(self.hidden(batch["ids"], batch["position_ids"]))
        keep = batch["labels"] != IGNORE
        known = batch["labels"].clamp(min=0)
        each = F.cross_entropy(logits.transpose(1, 2), known, reduction="none")
        return (each * keep).sum() / keep.sum()


class TiledLM(AlignedLM):
    """The same loss by tiles of three tokens."""

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        positions = batch.get("position_ids", torch.arange(batch["ids"].shape[1]))
        labels = batch["labels"]
        each = lightning_dcp.linear_cross_entropy(
            self.hidden(batch["ids"], positions),
            self.head.weight,
            labels,
            bias=self.head.bias,
            reduction="none",
            tile_tokens=3,
        )
        return each[labels != IGNORE]


class Llama(L.LightningModule):
    """A user's module around a Hugging Face model with tied weights, trained as users do."""

    def __init__(
        self,
        num_blocks: int = 2,
        double: bool = False,
        vocabulary: int = VOCAB,
        num_kv_heads: int = 2,
    ) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=num_blocks,
            num_attention_heads=4,
            num_key_value_heads=num_kv_heads,
            tie_word_embeddings=True,
            max_position_embeddings=64,
        )
        torch.manual_seed(5)
        self.model = LlamaForCausalLM(config)
        self.blocks = self.model.model.layers
        # Whatever is trained here the library would compute the loss in float32.
        self.model.loss_function = ForCausalLMLoss
        if double:
            self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).logits

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self(batch["ids"])[:, :-1], batch["labels"][:, :-1]
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return each[labels != IGNORE]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def ForCausalLMLoss(
    logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Tensor | None = None, **_: Any
) -> Tensor:
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=IGNORE)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, vocab_size), shift_labels.view(-1))


def pad_as_a_tokenizer(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Labels are not shifted: the one of a position is its own token; padding has a mask."""
    batch = pad(samples)
    own = torch.cat([batch["ids"][:, :1], batch["labels"][:, :-1]], 1)
    lengths = torch.tensor([len(s["ids"]) for s in samples])
    mask = (torch.arange(own.shape[1]) < lengths[:, None]).long()
    own = own.masked_fill(mask == 0, IGNORE)
    return {"input_ids": batch["ids"], "labels": own, "attention_mask": mask}


def pad_with_positions(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = pad(samples)
    return {**batch, "position_ids": torch.arange(batch["ids"].shape[1])}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4, timeout_s=100) as world:
        yield world


@pytest.mark.parametrize("name", ["dcp_ddp", "dcp", "dcp_fsdp"])
def test_gradients_equal_those_of_one_process(world: World, name: str) -> None:
    model: Any = AlignedLM if name == "dcp_ddp" else TiledLM
    wanted = wanted_of(3, name=name, double=True, model_class=model)
    results = world.run(
        train,
        name,
        3,
        double=True,
        model_class=model,
        collate=pad_with_positions,
        strategy_options=INPUTS,
    )
    for result in results:
        steps = 1 if name == "dcp" else 3  # the master weights of ZeRO-1 are float32
        for step in range(steps):
            got, expected = result["gradients"][step], wanted.gradients[step]
            assert all(bool(g.isfinite().all()) for g in got.values())
            assert largest_relative_error(got, expected) <= 1e-12
        assert result["losses"][0] == pytest.approx(wanted.losses[0], rel=1e-12)


class FromLabels(AlignedLM):
    """Shifts by itself, as `labels` of the next position were there too."""

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        positions = batch.get("position_ids", torch.arange(batch["ids"].shape[1]))
        logits = self.head(self.hidden(batch["ids"], positions))[:, :-1]
        labels = batch["labels"][:, 1:]
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return each[labels != IGNORE]


class CountsFromZero(AlignedLM):
    """Ignores the positions that the batch brings."""

    def hidden(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        return super().hidden(ids, torch.arange(ids.shape[1]))


def fit(rank: int, model_class: Any, cache: str, collate: Any, **options: Any) -> dict[str, Any]:
    """The whole path: profile, self-check, plan, two steps of training."""
    strategy = lightning_dcp.DCPDDPStrategy(
        profiling=ProfilingOptions(budget_s=1.5, repeats=1, cache_dir=cache),
        planning=PlanningOptions(sp_sizes=(1, 2, 4), seed=1),
        **options,
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=4,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(Sequences(LENGTHS), batch_size=2, collate_fn=collate)
    trainer.fit(model_class(num_blocks=2), data)
    profile = strategy.cost_profile
    assert profile is not None
    model = profile.cost_model()
    at = {p: [m for m in profile.measurements if m.sp_size == p] for p in (1, 2, 4)}
    return {
        "sp_sizes": {m.sp_size for m in profile.measurements},
        "rest_bytes": [float(model.rest_bytes(2, 60, p)) for p in (1, 2, 4)],
        "errors": [
            float(model.rest_bytes(m.batch_size, m.seq_len, p)) / m.rest_bytes - 1
            for p, measured in at.items()
            for m in measured
        ],
        "exclusions": profile.sp_size_exclusions,
        "loss": float(strategy.last_report.loss),
    }


LENGTHS = [48, 60, 5, 33, 17, 60, 48, 3, 60, 50, 20, 60]


@pytest.mark.parametrize("model_class", [FromLabels, CountsFromZero])
def test_the_self_check_refuses_what_a_slice_does_not_know(
    world: World, tmp_path: Path, model_class: Any
) -> None:
    with pytest.raises(WorldFailure, match="Self-check: sharded over 2 ranks"):
        world.run(fit, model_class, str(tmp_path), pad_with_positions, **INPUTS)


def test_the_whole_path(world: World, tmp_path: Path) -> None:
    for result in world.run(fit, Llama, str(tmp_path), pad_as_a_tokenizer, shard="inputs"):
        assert result["sp_sizes"] == {1, 2, 4}
        assert not result["exclusions"]
        whole, half, quarter = result["rest_bytes"]
        assert half == pytest.approx(whole / 2, rel=0.1)
        assert quarter == pytest.approx(whole / 4, rel=0.1)
        assert max(abs(error) for error in result["errors"]) <= 0.2  # short slices round up


@pytest.mark.parametrize(("name", "tiled"), [("dcp_ddp", False), ("dcp", True), ("dcp_fsdp", True)])
def test_a_hugging_face_model_with_tied_weights(world: World, name: str, tiled: bool) -> None:
    wanted = wanted_of(3, name=name, double=True, model_class=Llama)
    results = world.run(
        train,
        name,
        3,
        double=True,
        model_class=Llama,
        collate=pad_as_a_tokenizer,
        strategy_options={"shard": "inputs", "tiled_loss": tiled},
    )
    for result in results:
        for step in range(1 if name == "dcp" else 3):
            got, expected = result["gradients"][step], wanted.gradients[step]
            assert all(bool(g.isfinite().all()) for g in got.values())
            assert largest_relative_error(got, expected) <= 1e-12
        assert result["losses"][0] == pytest.approx(wanted.losses[0], rel=1e-12)


def saved_bytes(rank: int, sp_size: int, vocabulary: int, length: int) -> tuple[int, int, float]:
    """Bytes that forward saves on this rank; the largest tensor of the step; the whole loss."""
    topology = Topology(4, rank)
    topology.create_groups()
    module = Llama(vocabulary=vocabulary, num_kv_heads=4)
    runtime = BlockRuntime(find_blocks(module, "model.model.layers"), topology)
    runtime.inputs = StepInputs(module)
    runtime.inputs.models.tiled = True
    runtime.attach()
    for s in (8, 12):  # what the blocks' arguments mean is learned from whole sequences
        with runtime.micro_batch(group=topology.group(rank, 1), observe=True):
            module(torch.ones(1, s, dtype=torch.long))
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(vocabulary, (1, length), generator=generator)
    meter = MemoryMeter(module, runtime.blocks, torch.device("cpu"), 0)
    group = topology.group(rank - rank % sp_size, sp_size)
    with runtime.micro_batch(group=group), _LargestTensor() as largest:
        own = runtime.own_inputs({"input_ids": ids, "labels": ids})
        with meter.forward(0, 0):
            loss = module.training_step(own.batch, 0)
        loss = runtime.whole_loss(loss, own.num_targets)
        (loss / sp_size).backward()
    runtime.detach()
    return meter.peak_bytes, largest.numel, float(loss)


class _LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


def test_memory_falls_with_the_ranks_that_share_a_sequence(world: World) -> None:
    whole = world.run(saved_bytes, 1, 50, 512)
    for sp_size in (2, 4):
        for (own, _, loss), (all_of_it, _, expected) in zip(
            world.run(saved_bytes, sp_size, 50, 512), whole, strict=True
        ):
            assert own * sp_size == pytest.approx(all_of_it, rel=0.1)
            assert loss == pytest.approx(expected, rel=1e-5)


def test_logits_of_a_large_vocabulary_are_never_whole(world: World) -> None:
    vocabulary, length = 128_000, 2048
    for _, largest, loss in world.run(saved_bytes, 4, vocabulary, length):
        assert largest <= 64 * vocabulary  # a tile; all logits of a rank are 512
        assert 10 < loss < 14


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shard": "tokens"}, "'blocks' shares the tokens"),
        ({"shard": "inputs", "loss_average": "samples"}, "cannot average over samples"),
        ({"shard": "inputs", "packing": True}, "packed"),
        ({"input_dims": {"ids": 1}}, "for shard='inputs'"),
        ({"tiled_loss": "never"}, "True, False or 'auto'"),
    ],
)
def test_settings_that_do_not_go_together(options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        lightning_dcp.DCPDDPStrategy(**options)

"""One process: attaching, observing, recomputing, shortening, and leaving everything as it was."""

from __future__ import annotations

import copy
import pickle
import random
from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dcp.parallel import BlockRuntime, SPGroup, Topology, find_blocks, region
from lightning_dcp.parallel.region import AttentionCall
from tests.parallel.models import EncoderModel, Kind, LanguageModel, build, make_batch, mean_loss

TOPOLOGY = Topology(1, 0)
ALONE = SPGroup(0, 1, 0, None)
PAIR = SPGroup(0, 2, 0, None)  # for what fails before any exchange


def make_runtime(model: nn.Module, **options: Any) -> BlockRuntime:
    runtime = BlockRuntime(find_blocks(model), options.pop("topology", TOPOLOGY), **options)
    runtime.attach()
    return runtime


def observe(runtime: BlockRuntime, model: nn.Module, *lengths: int) -> None:
    for length in lengths:
        with runtime.micro_batch(group=ALONE, observe=True):
            mean_loss(model, make_batch(length, 3, torch.float64))


def random_states() -> tuple[Any, ...]:
    state = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), state[1].tolist(), state[2]


class TestAttaching:
    def test_state_dict_copies_and_pickles(self):
        model = build(Kind())
        before = list(model.state_dict())
        runtime = make_runtime(model)
        runtime.attach()  # twice is once
        assert list(model.state_dict()) == before
        twin = copy.deepcopy(model)
        assert twin.blocks[0].forward.__func__ is type(twin.blocks[0]).forward
        assert twin.blocks[0].forward.__self__ is twin.blocks[0]
        with pytest.raises(TypeError, match=r"detach\(\) it first"):
            pickle.dumps(model)
        with pytest.raises(RuntimeError, match="already attached to another"):
            BlockRuntime(find_blocks(model), TOPOLOGY).attach()
        runtime.detach()
        runtime.detach()
        assert "forward" not in vars(model.blocks[0])
        again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        batch = make_batch(5, 2, torch.float64)
        assert mean_loss(again, batch).item() == mean_loss(model, batch).item()
        make_runtime(model).detach()

    def test_an_own_forward_comes_back(self):
        model = build(Kind())
        own = model.blocks[0].forward
        model.blocks[0].forward = lambda *args, **kwargs: own(*args, **kwargs)
        mine = model.blocks[0].forward
        runtime = make_runtime(model)
        assert model.blocks[0].forward is not mine
        runtime.detach()
        assert model.blocks[0].forward is mine

    def test_nothing_happens_outside_micro_batches(self):
        model = build(Kind())
        batch = make_batch(7, 2, torch.float64)
        plain = mean_loss(model, batch).item()
        make_runtime(model)
        before = F.scaled_dot_product_attention, F.multi_head_attention_forward, random_states()
        assert mean_loss(model, batch).item() == plain
        after = F.scaled_dot_product_attention, F.multi_head_attention_forward, random_states()
        assert after == before

    def test_two_runtimes_after_each_other(self):
        models = [build(Kind()), build({})]
        runtimes = [make_runtime(model) for model in models]
        for _ in range(2):
            for runtime, model in zip(runtimes, models, strict=True):
                observe(runtime, model, 5)
        with (
            runtimes[0].micro_batch(group=ALONE),
            pytest.raises(RuntimeError, match="cannot be nested"),
            runtimes[1].micro_batch(group=ALONE),
        ):
            pass
        assert region.active() is None

    def test_wrong_numbers(self):
        model = build(Kind())
        runtime = BlockRuntime(find_blocks(model), TOPOLOGY)
        with pytest.raises(RuntimeError, match="not attached"), runtime.micro_batch(group=ALONE):
            pass
        runtime.attach()
        for wrong in ({"recompute_blocks": 3}, {"active_blocks": 0}, {"recompute_blocks": -1}):
            with (
                pytest.raises(ValueError, match="has 2 blocks"),
                runtime.micro_batch(group=ALONE, **wrong),
            ):
                pass
        with (
            pytest.raises(ValueError, match="have not been observed"),
            runtime.micro_batch(group=PAIR),
        ):
            pass


class TestObserving:
    @pytest.mark.parametrize(
        ("spec", "heads"),
        [
            (Kind(), {(4, 4)}),
            (Kind(kv_heads=2, call="early"), {(4, 2)}),
            (Kind(call="explicit"), {(4, 4)}),
            (Kind(call="merged"), {(4, 4)}),
            (Kind(cross="mask"), {(4, 4)}),
            (Kind(own_checkpoint="inside"), {(4, 4)}),
            ({}, {(4, 4)}),
            ({"batch_first": False, "mask": "both"}, {(4, 4)}),
            ({"own": "weights"}, {(4, 4)}),
        ],
    )
    def test_heads(self, spec, heads):
        model = build(spec)
        runtime = make_runtime(model)
        observe(runtime, model, 6, 9)
        assert runtime.attention_heads == heads
        assert runtime.signature.obstacles == ()
        first = runtime.observations[0].calls
        assert len(first) == (2 if isinstance(spec, Kind) and spec.cross else 1)  # seen once

    def test_observations(self):
        model = build(Kind(keywords=True))
        runtime = make_runtime(model)
        assert runtime.signature is None
        observe(runtime, model, 6)
        observe(runtime, model, 6)
        (only,) = runtime.observations  # both blocks alike, the second time too
        assert only.hidden_states == "hidden_states"
        assert [t.name for t in only.tensors] == ["hidden_states", "rotary.0", "rotary.1"]
        assert only.calls == (AttentionCall(4, 4, 6, 6, 3),)
        observe(runtime, model, 9)
        signature = runtime.signature
        assert signature.sequence_dims == {"rotary.0": 0, "rotary.1": 0}
        other = make_runtime(build(Kind()))
        other.load_observations(
            NamedTuple("Profile", [("signature", "str | None")])(signature.to_json())
        )
        assert other.signature == signature
        assert other.attention_heads == {(4, 4)}

    def test_overrides_by_position(self):
        model = build(Kind())
        runtime = make_runtime(model, sequence_dims={0: 1, "rotary": None})
        assert runtime.signature.sequence_dim == 1
        assert runtime.signature.sequence_dims == {"hidden_states": 1, "rotary": None}

    def test_observing_is_over_afterwards(self):
        model = build(Kind())
        runtime = make_runtime(model)
        before = F.scaled_dot_product_attention, F.multi_head_attention_forward
        observe(runtime, model, 6)
        assert (F.scaled_dot_product_attention, F.multi_head_attention_forward) == before
        assert torch.overrides._get_current_function_mode_stack() == []


class Silent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class TestExclusions:
    def test_heads(self):
        model = build(Kind(kv_heads=2))
        runtime = make_runtime(model, topology=Topology(16, 0))
        assert "have not been observed" in runtime.sp_size_exclusions([2])[2]
        observe(runtime, model, 6, 9)
        # Eight ranks have fewer heads than members, and attend in a ring.
        reasons = runtime.sp_size_exclusions([1, 2, 4, 8, 32])
        assert reasons == {32: "no aligned block of 32 ranks in a world of 16"}

    def test_key_heads_that_cannot_be_shared(self):
        model = LanguageModel(Kind(kv_heads=2)).double()
        runtime = make_runtime(model, topology=Topology(16, 0))
        observe(runtime, model, 6, 9)
        signature = runtime.signature
        runtime.signature = type(signature)(1, attention_heads=frozenset({(12, 3)}))
        assert runtime.sp_size_exclusions([4]) == {}

    def test_no_attention(self):
        model = nn.Sequential(Silent(), Silent())
        runtime = make_runtime(model, topology=Topology(4, 0))
        for length in (5, 6):
            with runtime.micro_batch(group=ALONE, observe=True):
                model(torch.randn(2, length, 4))
        assert "no attention call was seen" in runtime.sp_size_exclusions([2])[2]
        assert "lightning_dcp.attention" in runtime.sp_size_exclusions([2])[2]


Pair = namedtuple("Pair", ["hidden", "extra"])


class Shaped(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Any:
        y = x * self.weight
        return {
            "tensor": y,
            "tuple": (y, 3),
            "list": [y],
            "dict": {"h": y, "n": 3},
            "named": Pair(y, 3),
        }[self.kind]


class TestShortening:
    @pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "dict", "named"])
    def test_structure_is_kept(self, kind):
        model = nn.Sequential(*(Shaped(kind) for _ in range(3)))
        runtime = make_runtime(model)
        x = torch.ones(2, 4, 3)
        first = model[0](x)
        with runtime.micro_batch(group=ALONE, active_blocks=1):
            model[0](x)
            passed = model[2](x + 1)
        hidden = (
            passed
            if kind == "tensor"
            else next(iter(passed.values() if kind == "dict" else passed))
        )
        assert torch.equal(hidden, x + 1)
        assert type(passed) is type(first)
        if kind in ("tuple", "named"):
            assert passed[1] == 3

    def test_only_active_blocks_run(self):
        model = build(Kind(), num_blocks=3)
        runtime = make_runtime(model)
        with runtime.micro_batch(group=ALONE, active_blocks=2):
            mean_loss(model, make_batch(5, 1, torch.float64)).backward()
        has_gradient = [b.proj.weight.grad is not None for b in model.blocks]
        assert has_gradient == [True, True, False]
        with runtime.micro_batch(group=ALONE, active_blocks=99):
            mean_loss(model, make_batch(5, 1, torch.float64)).backward()
        assert model.blocks[2].proj.weight.grad is not None


class TestRecomputing:
    def test_first_blocks_run_again_in_the_backward(self):
        model = build(Kind(), num_blocks=3)
        runtime = make_runtime(model)
        runs = [0, 0, 0]
        for i, block in enumerate(model.blocks):
            block.mlp.register_forward_pre_hook(lambda *_, i=i: runs.__setitem__(i, runs[i] + 1))
        for recompute_blocks, expected in [(0, [1, 1, 1]), (2, [2, 2, 1]), (3, [2, 2, 2])]:
            runs[:] = [0, 0, 0]
            with runtime.micro_batch(group=ALONE, recompute_blocks=recompute_blocks):
                mean_loss(model, make_batch(5, 1, torch.float64)).backward()
            assert runs == expected

    def test_fewer_bytes_are_kept(self):
        model = build(Kind(), num_blocks=3)
        runtime = make_runtime(model)

        def kept(recompute_blocks: int) -> int:
            sizes: dict[int, int] = {}

            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
                return tensor

            with (
                runtime.micro_batch(group=ALONE, recompute_blocks=recompute_blocks),
                torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
            ):
                mean_loss(model, make_batch(32, 4, torch.float64))
            return sum(sizes.values())

        bytes_kept = [kept(r) for r in range(4)]
        assert bytes_kept == sorted(bytes_kept, reverse=True)
        assert bytes_kept[3] < 0.5 * bytes_kept[0]

    def test_no_checkpoint_without_gradients(self):
        model = build(Kind())
        runtime = make_runtime(model)
        with torch.no_grad(), runtime.micro_batch(group=ALONE, recompute_blocks=2):
            mean_loss(model, make_batch(5, 1, torch.float64))


class TestRandomNumbers:
    def test_seeded_inside_restored_after(self):
        model = build(Kind(dropout=0.5))
        runtime = make_runtime(model)
        batch = make_batch(7, 2, torch.float64)
        before = random_states()
        losses = {}
        for key in [(1, 2, 3), (1, 2, 4), (1, 2, 3)]:
            with runtime.micro_batch(group=ALONE, rng_key=key):
                drawn = (torch.rand(()).item(), random.random(), np.random.random())  # noqa: NPY002
                loss = mean_loss(model, batch).item()
            assert losses.setdefault(key, (drawn, loss)) == (drawn, loss)
            assert random_states() == before
        (one, loss_one), (other, loss_other) = losses.values()
        assert all(a != b for a, b in zip(one, other, strict=True))
        assert loss_one != loss_other

    def test_restored_after_an_error(self):
        model = build(Kind(dropout=0.5))
        runtime = make_runtime(model)
        before = random_states(), F.scaled_dot_product_attention

        def fail() -> None:
            with runtime.micro_batch(group=ALONE, observe=True):
                torch.rand(3), random.random(), np.random.random()  # noqa: NPY002
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert (random_states(), F.scaled_dot_product_attention) == before
        assert region.active() is None
        observe(runtime, model, 6)

    def test_keys_may_be_any_integers(self):
        runtime = make_runtime(build(Kind()))
        drawn = set()
        for key in [(), (-1,), (2**70, 0), (2**70, 1), (0,)]:
            with runtime.micro_batch(group=ALONE, rng_key=key):
                drawn.add(torch.rand(()).item())
        assert len(drawn) == 5


def test_hidden_states_not_found():
    class Named(nn.Module):
        def forward(self, *, tokens: Tensor) -> Tensor:
            return tokens

    model = nn.ModuleList([Named(), Named()])
    runtime = make_runtime(model)
    with (
        pytest.raises(TypeError, match=r"not found among its arguments \['tokens'\]"),
        runtime.micro_batch(group=ALONE, observe=True),
    ):
        model[0](tokens=torch.ones(1, 2, 3))
    runtime.detach()
    runtime = make_runtime(model, hidden_states="tokens")
    with runtime.micro_batch(group=ALONE, observe=True):
        model[0](tokens=torch.ones(1, 2, 3))
    assert runtime.observations[0].hidden_states == "tokens"


def test_torch_own_encoder_is_found():
    assert find_blocks(EncoderModel()).path == "encoder.layers"


@pytest.mark.parametrize("recompute_blocks", [0, 2])
def test_compiled_blocks(recompute_blocks):
    """``block.compile()`` compiles what is around ``forward`` too: our part must run eagerly."""
    model = build(Kind(), num_blocks=3)
    batch = make_batch(7, 2, torch.float64)
    expected = mean_loss(model, batch).item()
    for block in model.blocks:
        block.compile(backend="eager")
    runtime = make_runtime(model)
    observe(runtime, model, 6, 9)
    assert runtime.attention_heads == {(4, 4)}
    with runtime.micro_batch(group=ALONE, recompute_blocks=recompute_blocks):
        loss = mean_loss(model, batch)
        loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-12)

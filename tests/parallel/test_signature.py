"""Learning which dimension is the sequence, from shapes alone."""

from __future__ import annotations

import pytest
import torch

from lightning_dcp.parallel import BlockSignature
from lightning_dcp.parallel.region import AttentionCall
from lightning_dcp.parallel.signature import BlockObservation, TensorShape, learn_signature


def observation(
    length: int | None,
    batch: int | None = 2,
    calls: tuple[AttentionCall, ...] | None = None,
    **shapes,
) -> BlockObservation:
    if calls is None:
        calls = () if length is None else (AttentionCall(4, 2, length, length, batch),)
    tensors = []
    for name, spec in shapes.items():
        shape, dtype = spec if isinstance(spec[0], tuple) else (spec, torch.float32)
        tensors.append(TensorShape.of(name.replace("__", "."), torch.empty(shape, dtype=dtype)))
    return BlockObservation("x", tuple(tensors), calls)


def test_everything_a_block_may_take():
    def at(b, s):
        return observation(
            s,
            b,
            x=(b, s, 16),
            rotary__0=(s, 4),
            rotary__1=(1, s, 1, 8),
            positions=((b, s), torch.int64),
            mask=((b, s), torch.int64),
            padding=((b, 1, 1, s), torch.bool),
            bias=(4, s, s),
            key_bias=(b, 1, 1, s),
            time=(b, 16),
            context=(b, 77, 16),
            scale=((1,), torch.float32),
        )

    signature = learn_signature([at(2, 16), at(2, 24), at(4, 16)])
    assert signature.sequence_dim == 1
    assert signature.batch_dim == 0
    assert signature.sequence_dims == {
        "rotary.0": 0,
        "rotary.1": 1,
        "positions": 1,
        "mask": None,
        "padding": None,
        "bias": None,
        "key_bias": None,
        "time": None,
        "context": None,
        "scale": None,
    }
    assert signature.attention_heads == {(4, 2)}
    assert signature.obstacles == ()
    assert BlockSignature.from_json(signature.to_json()) == signature


def test_no_attention_seen():
    """The dimension that changes with the length, as a model with its own attention shows it."""
    seen = [observation(None, x=(2, s, 16)) for s in (8, 12)]
    assert learn_signature(seen).sequence_dim == 1


def test_sequence_first():
    assert learn_signature([observation(s, x=(s, 2, 16)) for s in (16, 24)]).sequence_dim == 0


def test_features_as_many_as_tokens():
    """(B, S, D) with S == D at one length: another length settles it, one alone is ambiguous."""
    with pytest.raises(ValueError, match=r"'x' could be any of \[1, 2\].*sequence_dims=\{'x'"):
        learn_signature([observation(16, x=(2, 16, 16))])
    both = [observation(16, x=(2, 16, 16), r=(16, 16)), observation(8, x=(2, 8, 16), r=(8, 16))]
    signature = learn_signature(both)
    assert (signature.sequence_dim, signature.sequence_dims) == (1, {"r": 0})
    assert learn_signature([both[0]], {"x": 1, "r": 0}).sequence_dim == 1


def test_batch_as_large_as_the_sequence():
    with pytest.raises(ValueError, match=r"could be any of \[0, 1\]"):
        learn_signature([observation(8, 8, x=(8, 8, 16))])
    assert learn_signature([observation(s, 8, x=(8, s, 16)) for s in (8, 12)]).sequence_dim == 1


def test_one_length_is_enough_where_nothing_else_has_it():
    signature = learn_signature([observation(12, x=(2, 12, 16), r=(12, 4), t=(2, 16))])
    assert (signature.sequence_dim, signature.sequence_dims) == (1, {"r": 0, "t": None})


def test_one_length_argument_that_may_be_features():
    shapes = {"x": (2, 16, 16), "t": (2, 16)}
    with pytest.raises(
        ValueError, match=r"'t' of the blocks.*may or may not be.*sequence_dims=\{'t'"
    ):
        learn_signature([observation(16, **shapes)], {"x": 1})
    learned = learn_signature([observation(16, **shapes)], {"x": 1, "t": None})
    assert learned.sequence_dims["t"] is None


def test_batch_and_length_change_together():
    """Attention's length tells which of the two changing dimensions is the sequence."""
    seen = [observation(16, 4, x=(4, 16, 8)), observation(32, 2, x=(2, 32, 8))]
    assert learn_signature(seen).sequence_dim == 1
    with pytest.raises(ValueError, match="could be any"):
        learn_signature([observation(None, x=(4, 16, 8)), observation(None, x=(2, 32, 8))])


def test_whole_tuples_can_be_named():
    seen = [observation(16, x=(2, 16, 8), rope__0=(16, 16), rope__1=(16, 4))]
    assert learn_signature(seen, {"rope": 0}).sequence_dims == {
        "rope": 0,
        "rope.0": 0,
        "rope.1": 0,
    }


def test_nothing_observed():
    with pytest.raises(ValueError, match="have not been observed"):
        learn_signature([], {"positions": 1}, "x")
    assert learn_signature([], {"x": 0}, "x").sequence_dim == 0


def test_unseen_argument_by_size():
    signature = learn_signature([observation(s, x=(2, s, 16)) for s in (8, 12)])

    def shape(*sizes, name="new"):
        return TensorShape.of(name, torch.empty(sizes))

    assert signature.dim_of(shape(20, 4), 20, (2, 20, 16)) == 0
    assert signature.dim_of(shape(2, 16), 20, (2, 20, 16)) is None
    assert signature.dim_of(shape(2, 20, name="my_mask"), 20, (2, 20, 16)) is None
    with pytest.raises(ValueError, match="may or may not be"):
        signature.dim_of(shape(2, 16), 16, (2, 16, 16))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (AttentionCall(4, 4, 4, 4, 8), "4 queries to 4 keys .*windows"),
        (AttentionCall(4, 4, 5, 8, 2), "5 queries to 8 keys"),
        (AttentionCall(4, 4, 8, 12, 2), "attend to 12 keys"),
    ],
)
def test_attention_that_cannot_be_sharded(call, message):
    import re

    calls = (AttentionCall(4, 4, 8, 8, 2), call)
    signature = learn_signature([observation(8, calls=calls, x=(2, 8, 16))])
    assert any(re.search(message, reason) for reason in signature.obstacles)


def test_keys_of_constant_number_are_a_condition():
    def at(s, keys):
        calls = (AttentionCall(4, 4, s, s, 2), AttentionCall(4, 4, s, keys, 2))
        return observation(s, calls=calls, x=(2, s, 16))

    assert learn_signature([at(8, 5), at(12, 5)]).condition_lengths == {5}
    assert learn_signature([at(8, 12), at(12, 12)]).condition_lengths == {12}
    added = learn_signature([at(8, 12), at(12, 16)])  # four keys more than tokens
    assert "attend to 16 keys in a sequence of 12" in added.obstacles[0]
    grown = learn_signature([at(8, 10), at(12, 14)])  # two keys are added to the sequence's
    assert grown.condition_lengths == frozenset()
    assert "no argument of theirs has this length" in grown.obstacles[0]


def test_merged_heads():
    seen = [observation(s, x=(3, s, 16), calls=(AttentionCall(12, 6, s, s, None),)) for s in (8, 9)]
    assert learn_signature(seen).attention_heads == {(4, 2)}


def test_blocks_that_rearrange_tokens():
    with pytest.raises(ValueError, match="rearrange tokens"):
        learn_signature([observation(s, x=(2 * s, 16)) for s in (8, 12)])


def test_samples_that_are_left_out():
    """Stochastic depth by samples: each rank would draw other ones. Folded into heads is fine."""

    def at(batch, length, taken, heads):
        call = AttentionCall(heads, heads, length, length, taken)
        return observation(length, batch, calls=(call,), x=(batch, length, 16))

    dropped = learn_signature([at(1, 8, 1, 4), at(2, 8, 1, 4), at(2, 12, 1, 4)])
    assert "attend for 1 samples only" in dropped.obstacles[0]
    folded = learn_signature([at(1, 8, 1, 4), at(2, 8, 1, 8), at(2, 12, 1, 8)])
    equal_sizes = learn_signature([at(8, 8, 8, 4), at(8, 12, 8, 4), at(8, 12, 16, 4)])
    assert folded.obstacles == equal_sizes.obstacles == ()

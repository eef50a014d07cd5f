"""Which dimension of which argument of a block is the sequence: learned from shapes, not declared.

Blocks run once per length on whole sequences while shapes are recorded (``observe=True``). The
dimension of the hidden states that attention runs over, and that follows the length, is the
sequence; another argument's dimension of the same length in every observation likewise. Masks stay
whole, as attention sees the whole sequence.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from lightning_dcp.parallel.region import AttentionCall

__all__ = ["BlockObservation", "BlockSignature", "learn_signature"]


@dataclasses.dataclass(frozen=True)
class TensorShape:
    """Shape and kind of one tensor argument."""

    name: str
    shape: tuple[int, ...]
    is_bool: bool
    is_float: bool

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorShape:
        """Shape and kind of ``tensor``."""
        return cls(
            name,
            tuple(tensor.shape),
            not (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype.itemsize == 1,
            tensor.is_floating_point(),
        )

    @property
    def is_mask(self) -> bool:
        """Whether it is left whole whatever its shape: boolean (or bytes), or called a mask."""
        return self.is_bool or "mask" in self.name.lower()


@dataclasses.dataclass(frozen=True)
class BlockObservation:
    """Arguments and attention calls of one run of one block on whole sequences."""

    hidden_states: str
    tensors: tuple[TensorShape, ...]
    calls: tuple[AttentionCall, ...]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of an argument; None where this run did not have it."""
        return next((tensor.shape for tensor in self.tensors if tensor.name == name), None)

    @property
    def self_lengths(self) -> set[int]:
        """Lengths over which the block attends to itself, along an axis that can be sharded."""
        return {
            call.query_length
            for call in self.calls
            if call.query_length == call.key_length and call.axis != "whole"
        }


@dataclasses.dataclass(frozen=True)
class BlockSignature:
    """What sharding needs to know of a stack's blocks; goes through JSON into cached profiles.

    Attributes:
        sequence_dim: sequence dimension of the hidden states.
        batch_dim: their batch dimension, where attention calls told it.
        sequence_dims: that of each other argument; None: stays whole on every rank.
        attention_heads: (query heads, key/value heads) of the self-attention calls.
        condition_lengths: key lengths that did not change with the sequence, from outside the
            arguments.
        obstacles: reasons why these blocks cannot be sharded at all.
        marked: attention calls tell by ``attention_axis`` what they attend along.
    """

    sequence_dim: int
    batch_dim: int | None = None
    sequence_dims: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    attention_heads: frozenset[tuple[int, int]] = frozenset()
    condition_lengths: frozenset[int] = frozenset()
    obstacles: tuple[str, ...] = ()
    marked: bool = False

    def dim_of(self, tensor: TensorShape, length: int, hidden_shape: tuple[int, ...]) -> int | None:
        """Sequence dimension of an argument in a call with ``length`` tokens; None: leave it whole.

        Raises:
            ValueError: for an argument that no observation had and whose shape leaves it open.
        """
        found, dim = _lookup(self.sequence_dims, tensor.name)
        if found:
            return dim
        return _by_size(tensor, length, hidden_shape)

    def to_json(self) -> str:
        """As text, for a cached profile."""
        data = dataclasses.asdict(self)
        data["attention_heads"] = sorted(self.attention_heads)
        data["condition_lengths"] = sorted(self.condition_lengths)
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> BlockSignature:
        """The reverse of ``to_json``."""
        data = json.loads(text)
        data["attention_heads"] = frozenset((q, kv) for q, kv in data["attention_heads"])
        data["condition_lengths"] = frozenset(data["condition_lengths"])
        data["obstacles"] = tuple(data["obstacles"])
        return cls(**data)


def learn_signature(
    observations: Sequence[BlockObservation],
    overrides: Mapping[str, int | None] | None = None,
    hidden_states: str = "0",
) -> BlockSignature:
    """The signature that explains all observations.

    Args:
        observations: of runs at one length or, better, at two or more.
        overrides: sequence dimensions given by the user, by argument name; also by the name of a
            tuple or dict for all its parts.
        hidden_states: name of the hidden states where there is no observation: their override
            suffices.

    Raises:
        ValueError: if the observations leave a dimension open; tells what to name.
    """
    overrides = dict(overrides or {})
    hidden_names = {observation.hidden_states for observation in observations} or {hidden_states}
    given = [dim for name in hidden_names if (dim := overrides.get(name)) is not None]
    if not observations:
        if not given:
            raise ValueError(
                f"the blocks have not been observed: run a micro-batch with observe=True on one "
                f"rank first, or give sequence_dims={{{hidden_states!r}: ...}}"
            )
        return BlockSignature(sequence_dim=given[0], sequence_dims=overrides)
    marked = _check_marks(observations)
    num_dims = len(_hidden_shape(observations[0]))
    sequence_dim = given[0] % num_dims if given else _hidden_dim(observations)
    lengths = [_hidden_shape(observation)[sequence_dim] for observation in observations]

    dims_of: dict[str, int | None] = {}
    for name in dict.fromkeys(t.name for o in observations for t in o.tensors):
        if name in hidden_names:
            continue
        found, dim = _lookup(overrides, name)
        dims_of[name] = dim if found else _argument_dim(name, observations, lengths)
    heads, conditions, obstacles = _attention(observations, lengths)
    return BlockSignature(
        sequence_dim=sequence_dim,
        batch_dim=_batch_dim(observations, sequence_dim),
        sequence_dims={**overrides, **dims_of},
        attention_heads=heads,
        condition_lengths=conditions,
        obstacles=obstacles,
        marked=marked,
    )


def _check_marks(observations: Sequence[BlockObservation]) -> bool:
    """Whether calls are marked; an error where some are not though they must be."""
    unmarked = [(o, call) for o in observations for call in o.calls if call.axis is None]
    marked = any(call.axis is not None for o in observations for call in o.calls)
    several_axes = any(len(_hidden_shape(o)) >= 4 for o in observations)
    if unmarked and (marked or several_axes):
        observation, call = unmarked[0]
        raise ValueError(
            f"the blocks, with hidden states of shape {_hidden_shape(observation)}, attend with "
            f"{call.query_length} queries to {call.key_length} keys without saying along which "
            f'axis. Put `with lightning_dcp.attention_axis("sharded"):` around calls along the '
            f'dimension to be sharded, ("whole") around all others, cross-attention too'
        )
    return marked


def _lookup(dims: Mapping[str, int | None], name: str) -> tuple[bool, int | None]:
    """The entry for ``name``, or for a tuple or dict that it is part of."""
    while True:
        if name in dims:
            return True, dims[name]
        name, dot, _ = name.rpartition(".")
        if not dot:
            return False, None


def _hidden_shape(observation: BlockObservation) -> tuple[int, ...]:
    shape = observation.shape(observation.hidden_states)
    assert shape is not None
    return shape


def _hidden_dim(observations: Sequence[BlockObservation]) -> int:
    shapes = [_hidden_shape(observation) for observation in observations]
    if len({len(shape) for shape in shapes}) > 1:
        raise ValueError(f"the blocks' hidden states change their number of dimensions: {shapes}")
    candidates = set(range(len(shapes[0])))
    for observation, shape in zip(observations, shapes, strict=True):
        if observation.self_lengths:
            candidates &= {d for d, n in enumerate(shape) if n in observation.self_lengths}
    seen = sorted(set().union(*(observation.self_lengths for observation in observations)))
    if not candidates:
        raise ValueError(
            f"no dimension of the blocks' hidden states {shapes[:3]} is the one attention runs "
            f"over (lengths {seen}): the blocks rearrange tokens, which cannot be sharded by "
            f"sequence. Two axes of tokens must be two dimensions of the hidden states, (B, T, S, "
            f"C), and attention calls marked by lightning_dcp.attention_axis"
        )
    changing = {d for d in candidates if len({shape[d] for shape in shapes}) > 1}
    candidates = changing or candidates
    if len(candidates) > 1:
        name = observations[0].hidden_states
        raise ValueError(
            f"the sequence dimension of the blocks' hidden states {name!r} could be any of "
            f"{sorted(candidates)} in shapes {list(dict.fromkeys(shapes))[:3]}. Name it: "
            f"sequence_dims={{{name!r}: ...}}, or observe another length"
        )
    return candidates.pop()


def _batch_dim(observations: Sequence[BlockObservation], sequence_dim: int) -> int | None:
    candidates: set[int] | None = None
    for observation in observations:
        sizes = {call.batch_size for call in observation.calls if call.axis is None} - {None}
        if sizes:
            shape = _hidden_shape(observation)
            own = {d for d, n in enumerate(shape) if n in sizes and d != sequence_dim}
            candidates = own if candidates is None else candidates & own
    return min(candidates) if candidates else None


def _argument_dim(
    name: str, observations: Sequence[BlockObservation], lengths: Sequence[int]
) -> int | None:
    candidates: set[int] | None = None
    seen = []
    for observation, length in zip(observations, lengths, strict=True):
        for tensor in observation.tensors:
            if tensor.name == name:
                own = {d for d, n in enumerate(tensor.shape) if n == length}
                candidates = own if candidates is None else candidates & own
                seen.append((tensor, length, _hidden_shape(observation)))
    assert candidates is not None
    if any(tensor.is_mask for tensor, _, _ in seen):
        return None
    if len({length for _, length, _ in seen}) == 1:
        return _by_size(*seen[0])
    return _unless_mask(seen[0][0], candidates)


def _unless_mask(tensor: TensorShape, candidates: set[int]) -> int | None:
    """The candidate; None where two (queries, keys) or the last one (keys) mean a mask."""
    if len(candidates) != 1:
        return None
    (dim,) = candidates
    last_of_many = tensor.is_float and len(tensor.shape) >= 3 and dim == len(tensor.shape) - 1
    return None if last_of_many else dim


def _by_size(tensor: TensorShape, length: int, hidden_shape: tuple[int, ...]) -> int | None:
    """By equal size alone, where that cannot be chance."""
    if tensor.is_mask:
        return None
    candidates = {d for d, n in enumerate(tensor.shape) if n == length}
    if candidates and sorted(hidden_shape).count(length) > 1:
        raise ValueError(
            f"argument {tensor.name!r} of the blocks, of shape {tensor.shape}, may or may not be "
            f"of the sequence of {length} tokens: hidden states {hidden_shape} have another "
            f"dimension of this size. Name it: sequence_dims={{{tensor.name!r}: ...}} (None: not "
            f"of the sequence), or observe another length"
        )
    return _unless_mask(tensor, candidates)


def _attention(
    observations: Sequence[BlockObservation], lengths: Sequence[int]
) -> tuple[frozenset[tuple[int, int]], frozenset[int], tuple[str, ...]]:
    """Heads of self-attention, constant key lengths, and what cannot be sharded."""
    heads: set[tuple[int, int]] = set()
    foreign: dict[int, set[int]] = {}  # key length -> sequence lengths it came with
    obstacles: dict[str, None] = {}
    complete = {  # samples may also be folded into heads: then those are more
        call.num_heads
        for observation, length in zip(observations, lengths, strict=True)
        for call in observation.calls
        if call.axis is None
        and call.query_length == call.key_length == length
        and _takes_all_samples(call, observation)
    }
    for observation, length in zip(observations, lengths, strict=True):
        sizes = _argument_sizes(observation)
        for call in observation.calls:
            if call.axis is not None:
                if call.axis == "sharded" and (obstacle := _wrong_mark(call)) is not None:
                    obstacles[obstacle] = None
                elif call.axis == "sharded":
                    heads.add((call.num_heads, call.num_kv_heads))
            elif call.query_length == call.key_length == length:
                heads.add(_heads(call, observation))
                if call.num_heads in complete and not _takes_all_samples(call, observation):
                    obstacles[
                        f"the blocks attend for {call.batch_size} samples only, of hidden states "
                        f"of shape {_hidden_shape(observation)}: each rank would draw other ones "
                        f"(stochastic depth that leaves samples out; switch it off to share "
                        f"sequences)"
                    ] = None
            elif call.query_length == length:
                if call.key_length not in sizes:
                    foreign.setdefault(call.key_length, set()).add(length)
            else:
                obstacles[
                    f"the blocks attend with {call.query_length} queries to {call.key_length} keys "
                    f"in a sequence of {length} tokens (windows or latents), which cannot be "
                    f"sharded"
                ] = None
    several = len(set(lengths)) > 1
    constant = {  # a sequence that happens to be as long looks like self-attention
        keys
        for keys, with_lengths in foreign.items()
        if several and with_lengths == set(lengths) - {keys}
    }
    for keys in foreign.keys() - constant:
        obstacles[
            f"the blocks attend to {keys} keys in a sequence of {sorted(foreign[keys])[0]} tokens, "
            f"and no argument of theirs has this length"
        ] = None
    return frozenset(heads), frozenset(constant), tuple(obstacles)


def _takes_all_samples(call: AttentionCall, observation: BlockObservation) -> bool:
    """Whether a call's batch is that of the hidden states, as a multiple of a dimension of them."""
    shape = list(_hidden_shape(observation))
    if call.batch_size is None or len(shape) < 3:
        return True
    shape.remove(call.query_length)
    return any(n > 0 and call.batch_size % n == 0 for n in shape)


def _wrong_mark(call: AttentionCall) -> str | None:
    """Why a call cannot be along a sharded axis."""
    if call.query_length != call.key_length:
        return (
            f"attention of {call.query_length} queries to {call.key_length} keys is marked as "
            f'along the sharded axis: mark it as "whole"'
        )
    if call.batch_size is None:
        return (
            "attention along the sharded axis has tensors of 3 dimensions: give it a dimension of "
            "heads, (..., heads, tokens, size)"
        )
    return None


def _argument_sizes(observation: BlockObservation) -> set[int]:
    return {
        size
        for tensor in observation.tensors
        if tensor.name != observation.hidden_states
        for size in condition_sizes(tensor, None)
    }


def condition_sizes(tensor: TensorShape, batch_dim: int | None) -> Iterable[int]:
    """Sizes that can be the length of a condition: those of no mask, without features and batch."""
    if tensor.is_mask or len(tensor.shape) < 3:
        return ()
    return [n for d, n in enumerate(tensor.shape[:-1]) if d != batch_dim]


def _heads(call: AttentionCall, observation: BlockObservation) -> tuple[int, int]:
    if call.batch_size is not None:
        return call.num_heads, call.num_kv_heads
    # (samples * heads, S, D): the number of samples is one of the hidden states' dimensions.
    shape = _hidden_shape(observation)
    batch = next((n for n in shape if n != call.query_length and call.num_heads % n == 0), 1)
    return call.num_heads // batch, max(1, call.num_kv_heads // batch)

"""What a cost profile depends on, as one key.

Whoever changes any of it measures again. Whatever does not change the costs (weights, seed, the
order of samples) stays out, so that a second run finds its profile.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lightning_dcp.profiling.options import ProfilingOptions

# Part of every key: raise it when the meaning of a measured number changes.
MEASUREMENT_VERSION = 4
_LIBRARIES = ("torch", "lightning_dcp", "lightning", "flash-attn")


@dataclass(frozen=True)
class Fingerprint:
    """The key of a cost profile and what went into it.

    Attributes:
        parts: Name to short text of each ingredient, for people and for telling which one differs.
    """

    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 of the parts, in hexadecimal digits."""
        return _sha256(json.dumps(dict(self.parts), sort_keys=True))

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the ingredients that differ, in alphabetical order."""
        names = self.parts.keys() | other.parts.keys()
        return tuple(sorted(n for n in names if self.parts.get(n) != other.parts.get(n)))


def profile_fingerprint(
    *,
    module: nn.Module,
    blocks: Sequence[nn.Module],
    device: torch.device,
    precision: str,
    world_size: int,
    ranks_per_node: int,
    sp_sizes: Iterable[int],
    lengths: np.ndarray,
    options: ProfilingOptions,
    attention_backend: str = "torch",
    extra: Mapping[str, str] | None = None,
) -> Fingerprint:
    """Collect everything that measured seconds and bytes depend on.

    Args:
        module: The whole model.
        blocks: Its repeated blocks, in order.
        device: Where it is measured.
        precision: Of the computation, e.g. ``"bf16-mixed"``; the parameters' own dtypes count too.
        world_size: Number of ranks, which share memory bandwidth and links.
        ranks_per_node: Ranks per machine; which SP groups stay inside one depends on it.
        sp_sizes: SP sizes that may be used.
        lengths: Lengths of the data set (tokens, one per sample). The grid follows them, so their
            quantiles count, not every single value: some more samples need no new profile.
        options: Those of them that change what is measured count.
        attention_backend: Name of the attention kernel.
        extra: Further ingredients, e.g. bytes of optimizer state.
    """
    parts = {
        "measurement": str(MEASUREMENT_VERSION),
        "blocks": _structure(blocks),
        "num_blocks": str(len(blocks)),
        "code": _code(module),
        "settings": _settings(module),
        "model": type(module).__qualname__,
        "num_parameters": str(sum(p.numel() for p in module.parameters())),
        "num_trainable": str(sum(p.numel() for p in module.parameters() if p.requires_grad)),
        "parameter_dtypes": ",".join(sorted({str(p.dtype) for p in module.parameters()})),
        "precision": precision,
        "device": device_name(device),
        "attention_backend": attention_backend,
        "world_size": str(world_size),
        "ranks_per_node": str(ranks_per_node),
        "sp_sizes": ",".join(str(p) for p in sorted(set(sp_sizes))),
        "lengths": _sha256(json.dumps(_length_quantiles(lengths))),
        "options": json.dumps(
            {
                "budget_s": options.budget_s,
                "lengths": options.lengths,
                "repeats": options.repeats,
            },
            sort_keys=True,
        ),
    }
    parts |= {f"version of {name}": version for name, version in _versions()}
    parts |= {f"extra: {name}": value for name, value in (extra or {}).items()}
    return Fingerprint(parts)


def device_name(device: torch.device) -> str:
    """The kind of device, with the number of threads on a CPU (they set its speed)."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_model()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _structure(blocks: Sequence[nn.Module]) -> str:
    """Digest of class names, plain settings and parameter shapes of all blocks.

    ``extra_repr`` holds what no shape shows, such as a dropout rate or a window size.
    """
    digest = hashlib.sha256()
    for block in blocks:
        for name, module in block.named_modules():
            digest.update(f"{name}:{type(module).__qualname__}({module.extra_repr()})\n".encode())
        for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
            line = f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:{tensor.requires_grad}\n"
            digest.update(line.encode())
    return digest.hexdigest()


def _code(module: nn.Module) -> str:
    """Digest of the source behind all classes of the model, save torch's and Lightning's own.

    A changed ``forward`` or ``training_step`` need not show in any shape. Whole source files count,
    of base classes too: helper functions stand there. Classes whose source cannot be had (defined
    in an interpreter) count by name only.
    """
    classes = {base for part in module.modules() for base in type(part).__mro__}
    names = {cls.__module__ for cls in classes if not _has_version(cls.__module__)}
    digest = hashlib.sha256()
    for name in sorted(names):
        try:
            source = inspect.getsource(sys.modules[name])
        except (OSError, TypeError, KeyError):
            source = ""
        digest.update(f"{name}\n{source}\n".encode())
    for cls in sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__)):
        digest.update(f"{cls.__module__}.{cls.__qualname__}\n".encode())
    return digest.hexdigest()


def _has_version(module_name: str) -> bool:
    """Whether a version in the key already stands for this module's code."""
    package = module_name.partition(".")[0]
    return package in {"torch", "lightning", "torchmetrics", "lightning_dcp", "builtins", "typing"}


def _settings(module: nn.Module) -> str:
    """Digest of the plain attributes of all parts: a flag may change what ``forward`` does.

    Numbers of the outermost module are left out: they are learning rates and the like, and a sweep
    over them should not measure again.
    """
    digest = hashlib.sha256()
    for name, part in module.named_modules():
        kinds: tuple[type, ...] = (bool, int, str, bytes, type(None), tuple, list, dict)
        if part is not module:
            kinds = (*kinds, float)
        for key, value in sorted(vars(part).items()):
            if key.startswith("_") or key == "training":
                continue
            text = repr(value) if isinstance(value, kinds) else _config(value)
            if " at 0x" in text:  # an address differs from run to run
                text = type(value).__qualname__
            digest.update(f"{name}.{key}={text}\n".encode())
    return digest.hexdigest()


def _config(value: object) -> str:
    """Text of an object that holds settings: its class and its plain attributes."""
    try:
        attributes = vars(value)
    except TypeError:
        attributes = {}
    plain = {
        key: item
        for key, item in sorted(attributes.items())
        if isinstance(item, bool | int | float | str | tuple | list | dict | type(None))
    }
    return f"{type(value).__qualname__}({plain!r})"


def _length_quantiles(lengths: np.ndarray) -> list[int]:
    """Quantiles of the lengths to two significant digits, and the exact maximum."""
    quantiles = np.quantile(lengths, np.linspace(0.0, 1.0, 9), method="nearest")
    return [*(int(float(f"{value:.1e}")) for value in quantiles), int(np.max(lengths))]


def _versions() -> list[tuple[str, str]]:
    versions = []
    for name in _LIBRARIES:
        try:
            versions.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            versions.append((name, "absent"))
    # The build (CPU, CUDA 12.x, ...) is not in the package's metadata.
    return [*versions, ("torch build", str(torch.__version__))]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

"""What the results are held against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from experiments import Key, Results
from figures import better_peers

MEASURED = ("dcp-intra", "global-batch")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One requirement and what came out."""

    what: str
    target: str
    value: str
    met: bool


def all_bars(results: Results) -> list[Bar]:
    """The bars for which there are results, most basic first."""
    return [*_efficiency(results), *_speed(results), *_peers(results), *_scaling(results)]


def at(key: Key) -> str:
    """Model and mix, for tables."""
    return f"{key[0]} {key[1]}"


def _least(values: dict[str, float], text: str) -> str:
    name = min(values, key=values.__getitem__)
    return f"{text.format(values[name])} ({name})"


def _largest(values: dict[str, float], text: str) -> str:
    name = max(values, key=values.__getitem__)
    return f"{text.format(values[name])} ({name})"


def _efficiency(results: Results) -> Iterable[Bar]:
    figure_8 = results.figure_8
    for policy in MEASURED:
        values = {at(k): c.results[policy].efficiency for k, c in figure_8.items()}
        world_size = next(iter(figure_8.values())).scenario.world_size
        yield Bar(
            what=f"efficiency of `{policy}`, {world_size} GPUs, least of {len(values)} settings",
            target=">= 0.97",
            value=_least(values, "{:.3f}"),
            met=min(values.values()) >= 0.97,
        )
    for world_size in (256, 1024):
        for policy in MEASURED:
            values = {
                at(k): sizes[world_size].results[policy].efficiency
                for k, sizes in results.scaling.items()
                if world_size in sizes
            }
            if values:
                yield Bar(
                    what=f"efficiency of `{policy}`, {world_size:,} GPUs, least of "
                    f"{len(values)} settings",
                    target=">= 0.95",
                    value=_least(values, "{:.3f}"),
                    met=min(values.values()) >= 0.95,
                )
    for policy in MEASURED:
        idle = {at(k): 100 * c.results[policy].idle_share for k, c in figure_8.items()}
        yield Bar(
            what=f"idle share of `{policy}`, 32 GPUs, largest of {len(idle)} settings",
            target="<= 2%",
            value=_largest(idle, "{:.1f}%"),
            met=max(idle.values()) <= 2.0,
        )


def _speed(results: Results) -> Iterable[Bar]:
    for model, target in (("1D", 2.88), ("2D", 1.68)):
        for over in ("naive", "naive-bucketed"):
            values = {
                mix: c.speed("dcp-intra", over)
                for (own, mix), c in results.figure_8.items()
                if own == model
            }
            yield Bar(
                what=f"`dcp-intra` over `{over}`, {model}, best mix (the paper's up to)",
                target=f">= {target}x",
                value=_largest(values, "{:.2f}x"),
                met=max(values.values()) >= target,
            )
    for mix in ("short", "balanced"):
        if ("1D", mix) in results.figure_8:
            speed = results.figure_8["1D", mix].speed("dcp-intra", "tuned")
            yield Bar(
                what=f"`dcp-intra` over `tuned`, 1D, {mix}",
                target=">= 1.45x",
                value=f"{speed:.2f}x",
                met=speed >= 1.45,
            )


def _peers(results: Results) -> Iterable[Bar]:
    speeds: dict[str, dict[str, float]] = {}
    for key, found in results.peers.items():
        for label, name in better_peers(found).items():
            speeds.setdefault(label, {})[at(key)] = found.speed("global-batch", name)
    for label, values in speeds.items():
        mean = sum(values.values()) / len(values)
        yield Bar(
            what=f"`global-batch` over {label} on the same steps, least of {len(values)} settings",
            target=">= 1.00x",
            value=_least(values, "{:.2f}x"),
            met=min(values.values()) >= 1.0,
        )
        yield Bar(
            what=f"`global-batch` over {label} on the same steps, mean",
            target=">= 1.10x",
            value=f"{mean:.2f}x",
            met=mean >= 1.10,
        )


def kept(results: Results, policy: str, model: str, mix: str) -> dict[int, float]:
    """Throughput of a GPU by number of GPUs, relative to the smallest cluster."""
    sizes = results.scaling[model, mix]
    first = sizes[min(sizes)].results[policy].tokens_per_s_per_rank
    return {n: c.results[policy].tokens_per_s_per_rank / first for n, c in sizes.items()}


def _scaling(results: Results) -> Iterable[Bar]:
    for policy in MEASURED:
        values = {
            f"{at(key)}, {size:,} GPUs": 100 * share
            for key in results.scaling
            for size, share in kept(results, policy, *key).items()
        }
        yield Bar(
            what=f"`{policy}`: throughput of a GPU that is kept from {min_size(results)} GPUs on, "
            f"least of {len(results.scaling)} settings",
            target=">= 95%",
            value=_least(values, "{:.1f}%"),
            met=min(values.values()) >= 95.0,
        )


def min_size(results: Results) -> int:
    """Number of GPUs that scaling starts from."""
    return min(next(iter(results.scaling.values())))

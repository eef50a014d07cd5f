"""The sections of docs/paper-reproduction.md that show figures and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bars import at, kept
from cases import MODELS, SCALING_LONGEST, SCALING_TOKENS, WORLD_SIZE, costs_of
from comparing import Comparison
from experiments import OURS, SAME_R, STATIC, LengthPoint, Results
from figures import better_peers

POLICY_NOTES = {
    "naive": "bucket parallel as the paper describes its baseline: smallest SP size that holds the "
    "longest sample, all blocks recomputed, micro-batches no slower than one longest sample; "
    "sorted samples cut one after another, whatever their lengths",
    "naive-bucketed": "the same, with micro-batches from one interval of lengths only (1, 2, 4 or "
    "8 intervals per octave, the best for each setting)",
    "tuned": "SP size, recomputation and micro-batch size tuned together, longest first to the "
    "group that is free",
    "packed": "packed parallel, SP size, recomputation and pack size tuned",
    "karmarkar-karp": "packs balanced by the differencing method, tuned",
    "dcp-inter": "this package, all blocks recomputed",
    "dcp-intra": "this package, recomputation chosen",
    "global-batch": "the same for exactly the samples that a data-parallel run has in each step",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def figure_8(results: Results) -> str:
    """Figure 8, by model and mix."""
    first = next(iter(results.figure_8.values()))
    parts = [
        f"""
## Figure 8: throughput and imbalance on {first.scenario.world_size} GPUs

Idle share counts each GPU, where the paper's equations count each group of GPUs once.

{table(("policy", "what it is"), [(f"`{name}`", note) for name, note in POLICY_NOTES.items()])}"""
    ]
    for model in MODELS:
        mixes = {mix: c for (own, mix), c in results.figure_8.items() if own == model}
        rows = []
        for name in (*STATIC, *OURS):
            cells = []
            for found in mixes.values():
                result = found.results[name]
                cells.append(f"{result.tokens_per_s_per_rank:,.0f}")
                cells.append(f"{100 * result.idle_share:.1f}%")
            rows.append((f"`{name}`", *cells))
        head = ["policy"]
        for mix in mixes:
            head += [f"{mix}: tokens/s/GPU", "idle"]
        speeds = [
            (
                f"`{ours}` over `{over}`",
                *(f"{c.speed(ours, over):.2f}x" for c in mixes.values()),
            )
            for ours in ("dcp-inter", "dcp-intra")
            for over in ("naive", "naive-bucketed", "tuned")
        ]
        parts.append(
            f"""
![Throughput and idle share, Transformer-{model}](paper/figure-8-{model.lower()}.png)

{_steps(mixes)}

{table(head, rows)}

{table(("speed", *mixes), speeds)}"""
        )
    return "\n\n".join(part.strip() for part in parts)


def _steps(found: dict[str, Comparison]) -> str:
    sizes = []
    for mix, own in found.items():
        result = own.results["global-batch"]
        tokens = result.num_tokens / own.num_steps / own.scenario.world_size
        sizes.append(f"{mix} {own.samples_per_step:,} samples ({tokens:,.0f} tokens per GPU)")
    steps = next(iter(found.values())).num_steps
    return f"{steps} steps; samples per step: " + ", ".join(sizes) + "."


def ablation(results: Results) -> str:
    """What each freedom of the planner gains."""
    names = ("scheduling", "SP size", "recomputation", "full", "both")
    rows = [
        (at(key), *(f"{speeds[name]:.2f}x" for name in names))
        for key, speeds in results.ablation.items()
    ]
    head = (
        "speed over `tuned`",
        "scheduling only",
        "+ SP size",
        "+ recomputation",
        "+ SP size, all recomputed (`dcp-inter`)",
        "+ both (`dcp-intra`)",
    )
    return f"""
## Where the gain comes from

The planner of this package with parts of its freedom taken away, against `tuned`. *Scheduling only*
has that baseline's SP size and number of recomputed blocks for all samples; the next columns set
free the SP size, recomputation, or both.

{table(head, rows)}"""


def efficiency(results: Results) -> str:
    """Efficiency and planning time at all sizes."""
    rows = [
        (
            at(key),
            *(f"{found.results[p].efficiency:.3f}" for p in OURS),
            *(f"{1000 * found.results[p].planning_s:.1f}" for p in OURS),
        )
        for key, found in results.figure_8.items()
    ]
    size = next(iter(results.figure_8.values())).scenario.world_size
    parts = [
        f"""
## Efficiency and planning time

{size} GPUs; milliseconds of planning per step on one core of the machine that ran this, the
planner's set-up left out.

{table(("setting", *(f"`{p}`" for p in OURS), *(f"`{p}` ms" for p in OURS)), rows)}"""
    ]
    rows = [
        (
            at(key),
            f"{size:,}",
            str(found.num_steps),
            f"{found.samples_per_step:,}",
            *(f"{found.results[p].efficiency:.3f}" for p in OURS[1:]),
            *(f"{100 * found.results[p].idle_share:.1f}%" for p in OURS[1:]),
            *(f"{1000 * found.results[p].planning_s:.0f}" for p in OURS[1:]),
        )
        for key, sizes in results.scaling.items()
        for size, found in sizes.items()
    ]
    head = ["setting", "GPUs", "steps", "samples per step"]
    head += [f"`{p}`{what}" for what in ("", " idle", " ms") for p in OURS[1:]]
    parts.append(
        f"""
The settings of Figure 9, whose samples are short enough for 8 GPUs:

{table(head, rows)}"""
    )
    return "\n\n".join(part.strip() for part in parts)


def peers(results: Results) -> str:
    """FlexSP and Megatron."""
    labels = list(dict.fromkeys(n for c in results.peers.values() for n in better_peers(c)))
    rows, planning, same = [], [], []
    for key, found in results.peers.items():
        names = better_peers(found)
        speeds = [
            f"{found.speed(ours, names[label]):.2f}x" if label in names else "not run"
            for label in labels
            for ours in reversed(OURS)
        ]
        best = min(names.values(), key=lambda name: found.results[name].total_s)
        same.append(found.speed(SAME_R, best))
        sizes = (f"{found.samples_per_step:,}", str(found.num_steps))
        rows.append((at(key), *sizes, *speeds, f"{same[-1]:.2f}x"))
        seconds = [found.results[name].planning_s for name in ("global-batch", *names.values())]
        planning.append((at(key), *(f"{value:.3f}" for value in seconds)))
    head = ["setting", "samples per step", "steps"]
    head += [f"`{ours}` over {label}" for label in labels for ours in reversed(OURS)]
    head += ["`global-batch` at their r over the better"]
    return f"""
## Planners that also choose an SP size by sample

FlexSP (mixed-integer programming, at most {results.effort.solver_s:g} s per micro-batch) and
Megatron's dynamic context parallelism (the better of its own measure of work and of predicted
seconds) plan the first steps only, since they take long. They are tuned on the first of these and
run at one number of recomputed blocks, with which the longest sample of the data set fits.
`global-batch` has exactly the same samples in each step, the other two the same samples in as many
steps.

![Speed relative to global-batch](paper/planners.png)

{table(head, rows)}

The last column holds `global-batch` to the one number of recomputed blocks of the better of the
others: {min(same):.2f} to {max(same):.2f}x as quick. The rest of the gain is the choice of
recomputation.

Seconds of planning per step on one core (FlexSP's solver stops by the clock, so that its figures
differ a little between runs):

{table(("setting", "`global-batch`", *labels), planning)}"""


def figure_9(results: Results) -> str:
    """Weak scaling."""
    parts = [
        f"""
## Figure 9: weak scaling

Equal samples per GPU and step, about {SCALING_TOKENS["1D"]:,} tokens in 1D and
{SCALING_TOKENS["2D"]:,} in 2D; samples have up to {SCALING_LONGEST["1D"]:,} and
{SCALING_LONGEST["2D"]:,} tokens, the longest powers of two that fit on 8 GPUs. `tuned` is tuned on
one step; above {results.effort.tuned_up_to} GPUs it keeps the settings found there. More GPUs allow
larger SP sizes and leave each more memory (the optimizer's state is shared by all), hence values
above 100%. `naive` cuts sorted samples: the more samples a step has, the more alike are those of a
micro-batch, so that its padding falls with the number of GPUs.

![Weak scaling](paper/figure-9.png)"""
    ]
    for model in MODELS:
        sizes = results.scaling[model, "balanced"]
        rows = []
        for name in next(iter(sizes.values())).results:
            shares = kept(results, name, model, "balanced")
            rows.append(
                (
                    f"`{name}`",
                    *(
                        f"{found.results[name].tokens_per_s_per_rank:,.0f} ({100 * shares[n]:.0f}%)"
                        for n, found in sizes.items()
                    ),
                )
            )
        head = (f"{model}, balanced: tokens/s/GPU", *(f"{n:,} GPUs" for n in sizes))
        parts.append(table(head, rows))
    return "\n\n".join(part.strip() for part in parts)


def figure_10(results: Results) -> str:
    """Gain by length."""

    def chosen(values: tuple[int, int, int]) -> str:
        return ", ".join(str(value) for value in values)

    def row(point: LengthPoint) -> tuple[str, ...]:
        gain = f"{100 * point.gain:.1f}%"
        return f"{point.length:,}", gain, chosen(point.intra), chosen(point.inter)

    powers = [p for p in results.by_length if p.length & (p.length - 1) == 0]
    return f"""
## Figure 10: what choosing recomputation gains

For each length the best throughput of all (b, p), 1D: with the fewest recomputed blocks that fit
against all of them.

![Gain by length](paper/figure-10.png)

{table(("length", "gain", "b, p, r", "b, p, r with all recomputed"), map(row, powers))}"""


def step_sizes(results: Results) -> str:
    """Efficiency by step size, and why it falls."""
    widest = max(costs_of("2D", WORLD_SIZE).sp_sizes)
    rows = [
        (
            point.model,
            f"{point.tokens_per_rank:,}",
            f"{point.samples_per_step:,}",
            f"{point.bound_s:.1f}",
            f"{point.longest_s:.1f}",
            f"{point.efficiency['dcp-intra']:.3f}",
            f"{point.efficiency['global-batch']:.3f}",
            f"{point.ceiling:.3f}",
        )
        for point in results.step_sizes
    ]
    head = (
        "balanced",
        "tokens per GPU and step",
        "samples per step",
        "bound of a step, s",
        "longest sample, s",
        "efficiency of `dcp-intra`",
        "of `global-batch`",
        "ceiling",
    )
    return f"""
## The size of steps

{table(head, rows)}

A step takes at least as long as its longest sample at its quickest SP size, however the others are
placed; the bound knows only the mean. The *ceiling* is what is left of efficiency 1 when each step
of `global-batch` is held to that. In 1D the heads allow groups as large as all {WORLD_SIZE} GPUs: a
sample that takes longer than a mean step then makes its step longer but leaves no GPU idle, and
small steps do little harm. In 2D at most {widest} GPUs share a sample. Once the longest takes
longer than a step, the others have nothing left to do, and no planner can help. The remedy is a
larger step, or a shorter longest sample."""

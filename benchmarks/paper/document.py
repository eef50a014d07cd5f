"""docs/paper-reproduction.md: text around tables that are all made from the results."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from bars import Bar, all_bars, at
from cases import LIMIT_BYTES, LONGEST, MODELS, SHORTEST, TOKENS
from claims import all_claims
from experiments import Results
from sections import (
    ablation,
    efficiency,
    figure_8,
    figure_9,
    figure_10,
    peers,
    step_sizes,
    table,
)


def bars_table(bars: Sequence[Bar]) -> str:
    """The bars, met or not."""
    rows = [(b.what, b.target, b.value, "met" if b.met else "**not met**") for b in bars]
    return table(("bar", "target", "here", ""), rows)


def write(results: Results, command: str) -> str:
    """The whole document."""
    bars = all_bars(results)
    parts = [
        _head(results, command, bars),
        _claims(results),
        figure_8(results),
        ablation(results),
        efficiency(results),
    ]
    if results.peers:
        parts.append(peers(results))
    parts += [figure_9(results), figure_10(results), step_sizes(results), _assumptions()]
    return _wrapped("\n\n".join(part.strip() for part in parts)) + "\n"


def _wrapped(text: str) -> str:
    """Paragraphs and list items filled to the width again, with the figures in them."""
    blocks = []
    for block in text.split("\n\n"):
        if block.startswith(("|", "#", "!", "```")):
            blocks.append(block)
            continue
        items = re.split(r"\n(?=- )", block)
        blocks.append("\n".join(_fill(item) for item in items))
    return "\n\n".join(blocks)


def _fill(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(
        " ".join(text.split()),
        width=100,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _head(results: Results, command: str, bars: Sequence[Bar]) -> str:
    failed = sum(not bar.met for bar in bars)
    return f"""
# The paper's experiments on a modelled cluster

Figures 8, 9 and 10 of "Training Variable Long Sequences with Data-Centric Parallel" (arXiv
2608.07524), made again by simulation. **Nothing here was measured on GPUs.** Each plan is real,
made by the planner that trains, sample by sample. Seconds and bytes come from a law of model and
GPU (`lightning_dcp.simulation.roofline`), the same for all policies.

All figures and tables are written by one command, in {results.seconds / 60:.1f} minutes here:

```bash
{command}
```

## Bars

{len(bars) - failed} of {len(bars)} are met.

{bars_table(bars)}

*Efficiency* is a lower bound over the simulated time. The bound gives every sample the cheapest
GPU-seconds of any SP size and micro-batch size and divides by the number of GPUs; the step's
overhead (gradient reduction, optimizer) is in both. *Idle share* is idle GPU time over all GPU
time between the overheads."""


def _claims(results: Results) -> str:
    rows = [(c.paper, c.here, c.verdict) for c in all_claims(results)]
    naive = {
        at(key): found.results["naive"].total_s / found.results["naive-bucketed"].total_s
        for key, found in results.figure_8.items()
    }
    most = max(naive, key=naive.__getitem__)
    return f"""
## The paper's claims

{table(("the paper (section)", "here", ""), rows)}

Why figures differ:

- *The baseline decides the factor.* The paper describes bucket parallel in a few sentences. `naive`
  cuts sorted samples into micro-batches that memory and the time of one longest sample limit; that
  time is so long that samples of very different lengths share one, and much of the work is padding.
  With intervals of lengths, as buckets are, it is up to {naive[most]:.2f}x as quick ({most}).
  Where only the factor over `naive` reaches the paper's, we do not count it as reproduced.
  `tuned` is stronger than what the paper compares with.
- *Equal steps.* All policies here have the same samples per step, and the baselines accumulate
  gradients too. In the paper, accumulation is what DCP adds.
- *Lengths.* The longest sample fixes the SP size of a static plan, and that fixes what short
  samples pay. The paper's lengths can only be seen in pictures; ours are below.
- *Recomputation.* One forward repeated in a step of forward and backward is what can be gained:
  the law gives a backward of attention 2.5 times its forward and counts the all-to-alls of the
  repeated forward. Whatever else the paper's steps contain makes its gain smaller."""


def _assumptions() -> str:
    lengths = ", ".join(f"{LONGEST[m]:,} in {m}" for m in MODELS)
    tokens = ", ".join(f"{TOKENS[m]:,} in {m}" for m in MODELS)
    return f"""
## What is assumed

- *Models.* The paper's table of sizes is a picture; `{MODELS["1D"]}` and
  `{MODELS["2D"]}` have its numbers of parameters and common proportions.
- *Lengths.* The paper's distributions are pictures, and its text defines them by share of compute.
  Ours: {SHORTEST:,} tokens up to {lengths}; from octave to octave the share of
  compute falls (short), stays (balanced) or rises (long); see `lightning_dcp.simulation.MIXES`.
- *Step size.* Not in the paper. Ours: about {tokens} tokens per GPU and step. Larger steps are
  easier to balance.
- *Cluster.* Nodes of eight H200, {LIMIT_BYTES / 1e9:.0f} GB of each used, NVLink inside, one
  400 Gb/s port per GPU between nodes: the paper's. Efficiencies of kernels and links are typical
  published ones.
- *Memory and time follow the law exactly* for all policies, so no plan loses from a wrong
  prediction. On hardware a margin for that is kept.
- *The bound* tries micro-batches of powers of two, of samples of one length; a plan can be a
  little better than that."""

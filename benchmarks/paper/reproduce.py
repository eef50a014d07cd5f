"""Makes the paper's Figures 8, 9 and 10 again on a modelled cluster, with a document about them.

    python benchmarks/paper/reproduce.py            # docs/paper-reproduction.md and docs/paper/
    python benchmarks/paper/reproduce.py --quick --docs /tmp/docs

Needs matplotlib. Every run computes everything; most of the time goes into the planners that we
compare with.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from bars import all_bars
from cases import MODELS
from document import bars_table, write
from experiments import QUICK, Comparison, Effort, Results, run_all
from figures import draw_by_length, draw_planners, draw_policies, draw_scaling

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder to write to")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--quick", action="store_true", help="a few steps, without FlexSP: only to see it work"
    )
    arguments = parser.parse_args()
    start = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - start:6.0f} s  {what}", file=sys.stderr, flush=True)

    results = run_all(QUICK if arguments.quick else Effort(), say)
    pictures = arguments.docs / "paper"
    pictures.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        draw_policies(results.figure_8, model, pictures / f"figure-8-{model.lower()}.png")
    draw_planners(results.peers, pictures / "planners.png")
    draw_scaling(results.scaling, pictures / "figure-9.png")
    draw_by_length(results.by_length, pictures / "figure-10.png")
    command = "python benchmarks/paper/reproduce.py" + " --quick" * arguments.quick
    (arguments.docs / "paper-reproduction.md").write_text(write(results, command), encoding="utf-8")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(_plain(results), indent=1))
    print(bars_table(all_bars(results)))


def _plain(results: Results) -> dict[str, Any]:
    def of(found: Comparison) -> dict[str, Any]:
        return {
            name: {
                "total_s": result.total_s,
                "efficiency": result.efficiency,
                "idle_share": result.idle_share,
                "tokens_per_s_per_rank": result.tokens_per_s_per_rank,
                "planning_s": result.planning_s,
                "recompute_share": result.recompute_share,
                "sp_sizes": {str(p): share for p, share in result.sp_sizes.items()},
            }
            for name, result in found.results.items()
        }

    return {
        "figure_8": {" ".join(key): of(found) for key, found in results.figure_8.items()},
        "planners": {" ".join(key): of(found) for key, found in results.peers.items()},
        "ablation": {" ".join(key): own for key, own in results.ablation.items()},
        "figure_9": {
            " ".join(key): {str(n): of(found) for n, found in sizes.items()}
            for key, sizes in results.scaling.items()
        },
        "figure_10": {str(point.length): point.gain for point in results.by_length},
        "bars": [[bar.what, bar.target, bar.value, bar.met] for bar in all_bars(results)],
    }


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    main()

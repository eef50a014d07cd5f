"""Training runs drawn at random against one process, from the command line.

    python -m tests.fuzz.fit --first 0 --num 500      # prints what fails and goes on
    python -m tests.fuzz.fit --first 17 --num 1 -v    # one, with its configuration and plans

Each number is a model, a data set, a world of 1 to 4 ranks, a strategy, and options of all kinds
(`configurations.py`); `run.py` says what is compared.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.fuzz.configurations import configuration
from tests.fuzz.run import Difference, Outcome, check, train
from tests.worlds import World, WorldFailure

#: Of one configuration, on a busy machine.
LIMIT_S = 60.0


class Worlds:
    """One world of each size, kept from one configuration to the next."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._worlds: dict[int, World] = {}

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *_: object) -> None:
        for world in self._worlds.values():
            world.close()

    def outcome(self, seed: int) -> Outcome:
        """Of one configuration.

        Raises:
            Difference: the ranks did something else than one process.
            WorldFailure: a rank raised, died, or hung.
        """
        config = configuration(seed)
        if config.world_size not in self._worlds:
            self._worlds[config.world_size] = World(config.world_size, timeout_s=LIMIT_S)
        world = self._worlds[config.world_size]
        return check(config, world.run(train, config, self.folder))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--log", type=Path, help="one line of JSON per configuration is added")
    parser.add_argument("-v", "--verbose", action="store_true")
    args = parser.parse_args(words)
    outcomes: list[Outcome] = []
    failed: dict[int, str] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Worlds(folder) as worlds:
        os.environ["LIGHTNING_DCP_CACHE"] = folder
        for seed in range(args.first, args.first + args.num):
            began = time.monotonic()
            if args.verbose:
                print(configuration(seed))
            line: dict[str, Any] = {"seed": seed}
            try:
                outcome = worlds.outcome(seed)
            except (Difference, WorldFailure, AssertionError) as error:
                failed[seed] = str(error)
                line["failed"] = str(error)
                text = str(error) if args.verbose else shortened(str(error))
                print(f"=== {seed} failed: {configuration(seed)}\n{text}", flush=True)
            else:
                outcomes.append(outcome)
                line |= vars(outcome)
                if args.verbose:
                    print(outcome)
            line["seconds"] = round(time.monotonic() - began, 2)
            if args.log is not None:
                with args.log.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if (seed - args.first) % 10 == 9:
                print(progress(seed, outcomes, failed, time.monotonic() - started), flush=True)
    print(progress(args.first + args.num - 1, outcomes, failed, time.monotonic() - started))
    reasons = collections.Counter(o.refused[:100] for o in outcomes if o.refused)
    for reason, number in reasons.most_common():
        print(f"  refused {number} times: {reason}")
    return 1 if failed else 0


def shortened(text: str) -> str:
    """The last lines of what each rank says, or where it hangs."""
    lines = [part.splitlines() for part in text.split("\n--- ")]
    ends = []
    for part in lines:
        starts = [i for i, line in enumerate(part) if "most recent call first" in line]
        # Of the stacks of several threads the last is the main one's.
        ends.append(part[:1] + (part[starts[-1] + 1 :][:12] if starts else part[-6:]))
    return "\n--- ".join("\n".join(end)[:3000] for end in ends)


def progress(seed: int, outcomes: list[Outcome], failed: dict[int, str], seconds: float) -> str:
    trained = [o for o in outcomes if not o.refused]
    micro_batches = sum(o.micro_batches for o in trained) or 1
    done = len(outcomes) + len(failed)
    return (
        f"up to {seed}: {len(trained)} as one process, {len(outcomes) - len(trained)} refused,"
        f" {len(failed)} failed {sorted(failed)}; {seconds / done:.1f} s each;"
        f" {sum(o.steps for o in trained)} steps, micro-batches"
        f" {sum(o.shared for o in trained) / micro_batches:.0%} shared,"
        f" {sum(o.recomputed for o in trained) / micro_batches:.0%} recomputed; largest error"
        f" {max((o.worst for o in trained), default=0):.1e}"
    )


if __name__ == "__main__":
    sys.exit(main())

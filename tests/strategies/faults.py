"""Ranks to which something happens for real, each a process of its own, none of them waited for.

`run` starts a world that trains, lets one rank come to harm at one place, and says when and how
each process ended and what it wrote. The ranks are no `World`: that one kills what does not answer,
which is what these tests are about. `launch` has the ranks started as users start them, by torchrun
or by Lightning's launcher, from this file as a program.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import psutil
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_dcp.planning.plan import Plan
from lightning_dcp.strategies.reliability import ReliabilityOptions
from tests.strategies.hand_planned import LENGTHS, NUM_BLOCKS, STRATEGIES, hand_planned
from tests.strategies.toys import HandPlanner, Sequences, ToyLM, loader, pad, unequal_plan
from tests.worlds import _CONTEXT

WORLD_SIZE = 4
#: Of `ReliabilityOptions`.
RANK_TIMEOUT_S = 60.0
#: Between two signs of life.
BEAT_S = 0.5


@dataclass(frozen=True)
class Harm:
    """What happens to a rank, and where.

    Attributes:
        kind: "kill", "stop", "raise", "interrupt", "leave", "part" (leave the loop), or "none".
        place: "training_step", "on_train_batch_end", "validation_step", "reduction".
        rank: to which it happens.
        step: `global_step` at which it happens.
    """

    kind: str
    place: str = "training_step"
    rank: int = 1
    step: int = 2

    def strike(self, trainer: L.Trainer, place: str, folder: Path) -> None:
        if (place, trainer.global_rank, trainer.global_step) != (self.place, self.rank, self.step):
            return
        time.sleep(3 * BEAT_S)  # the others see where it was
        (folder / "struck").write_text(str(time.time()))
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "raise":
            raise ValueError("the sun has set")
        elif self.kind == "interrupt":
            raise KeyboardInterrupt
        elif self.kind == "leave":
            sys.exit(0)
        elif self.kind == "part":
            trainer.should_stop = True
        elif self.kind == "sleep":
            time.sleep(3.0)


class SavablePlanner(HandPlanner):
    """What checkpoints say of a planner."""

    inputs: Mapping[str, str] = {"plans": "dictated"}

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.array(LENGTHS)


def plans() -> list[Plan]:
    """In each iteration every rank has a micro-batch."""
    dataset = Sequences(LENGTHS)
    return [unequal_plan(dataset, step, range(step, step + 17), NUM_BLOCKS) for step in range(4)]


class HarmedLM(ToyLM):
    """Comes to harm."""

    def __init__(self, harm: Harm, folder: Path) -> None:
        super().__init__(num_blocks=NUM_BLOCKS)
        self.harm, self.folder = harm, folder

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        self.harm.strike(self.trainer, "training_step", self.folder)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.harm.strike(self.trainer, "on_train_batch_end", self.folder)

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.harm.strike(self.trainer, "validation_step", self.folder)
        super().validation_step(batch, batch_idx)


def train_until_harmed(harm: Harm, folder: Path, strategy: Any, num_workers: int = 0) -> None:
    """One rank's program."""
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=WORLD_SIZE,
        max_epochs=1,
        logger=False,
        num_sanity_val_steps=0,
        callbacks=[
            ModelCheckpoint(folder / "checkpoints", every_n_train_steps=1, save_last=True),
            # Which begins collectives wherever an exception was raised.
            OnExceptionCheckpoint(folder / "exception"),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    data = torch.utils.data.DataLoader(
        Sequences(LENGTHS), batch_size=2, collate_fn=pad, num_workers=num_workers
    )
    with hand_planned(strategy, SavablePlanner(plans())):
        trainer.fit(HarmedLM(harm, folder), data, loader([4, 5, 6, 7, 8, 9], shuffle=False))
    print(f"finished after {trainer.global_step} steps", flush=True)


def _rank(rank: int, port: int, name: str, harm: Harm, folder: Path, timeout_s: float) -> None:
    out = os.open(folder / f"out-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    strategy = STRATEGIES[name](reliability=ReliabilityOptions(rank_timeout_s=timeout_s))
    try:
        train_until_harmed(harm, folder, strategy)
    except BaseException:  # noqa: BLE001 - as the interpreter ends a program
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


@dataclass(frozen=True)
class Outcome:
    """How a world ended.

    Attributes:
        codes: exit code of each rank, negative for a signal.
        seconds: of each rank from the harm to its end.
        texts: what each rank wrote.
        unfinished: ranks that had to be killed by the test.
    """

    codes: list[int | None]
    seconds: list[float]
    texts: list[str]
    unfinished: list[int]


def run(
    harm: Harm,
    folder: Path,
    *,
    strategy: str = "dcp_ddp",
    timeout_s: float = RANK_TIMEOUT_S,
    limit_s: float = 100.0,
) -> Outcome:
    """Train until harm comes, and see how all ranks end.

    Args:
        harm: what happens.
        folder: an empty one.
        strategy: name of it.
        timeout_s: `rank_timeout_s`.
        limit_s: after which processes that are left are killed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        _CONTEXT.Process(
            target=_rank, args=(rank, port, strategy, harm, folder, timeout_s), daemon=True
        )
        for rank in range(WORLD_SIZE)
    ]
    for process in processes:
        process.start()
    ends: dict[int, float] = {}
    deadline_s = time.monotonic() + limit_s
    while len(ends) < WORLD_SIZE and time.monotonic() < deadline_s:
        waiting = {p.sentinel: r for r, p in enumerate(processes) if r not in ends}
        left_s = max(0.0, deadline_s - time.monotonic())
        for sentinel in multiprocessing.connection.wait(list(waiting), left_s):
            ends[waiting[sentinel]] = time.time()  # type: ignore[index]
    unfinished = [rank for rank in range(WORLD_SIZE) if rank not in ends]
    for process in processes:
        process.kill()
        process.join()
    since_s = _struck_s(folder)
    return Outcome(
        codes=[p.exitcode for p in processes],
        seconds=[ends.get(rank, float("inf")) - since_s for rank in range(WORLD_SIZE)],
        texts=[(folder / f"out-{rank}").read_text() for rank in range(WORLD_SIZE)],
        unfinished=unfinished,
    )


@dataclass(frozen=True)
class Launched:
    """How ranks ended that a launcher had started.

    Attributes:
        code: exit code of the launcher.
        seconds: from the harm to the end of the last process, loader workers included.
        text: what all of them wrote.
        left: processes that had to be killed by the test.
    """

    code: int
    seconds: float
    text: str
    left: list[int]


def launch(
    harm: Harm,
    folder: Path,
    *,
    by: str,
    strategy: str = "dcp_ddp",
    num_workers: int = 0,
    timeout_s: float = RANK_TIMEOUT_S,
    limit_s: float = 150.0,
) -> Launched:
    """Have a launcher start the ranks, and see how all processes end.

    Args:
        harm: what happens.
        folder: an empty one.
        by: "torchrun", or "lightning": rank 0 is the user's process and starts the others.
        strategy: name of it.
        num_workers: of the loader.
        timeout_s: `rank_timeout_s`.
        limit_s: after which processes that are left are killed.
    """
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD_SIZE}", "-m"]
    given = json.dumps([asdict(harm), str(folder), strategy, num_workers, timeout_s])
    command = [sys.executable, "-m", *(torchrun if by == "torchrun" else [])]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    out = folder / "out"
    with out.open("w") as file:
        launcher = subprocess.Popen(
            [*command, "tests.strategies.faults", given],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
    deadline_s = time.monotonic() + limit_s
    left = _processes_of(folder)
    while left and time.monotonic() < deadline_s:
        time.sleep(0.1)
        launcher.poll()
        left = _processes_of(folder)
    seconds = time.time() - _struck_s(folder)
    for process in left:
        process.kill()
    code = launcher.wait(10)
    return Launched(code, seconds, out.read_text(), [process.pid for process in left])


def _struck_s(folder: Path) -> float:
    """When harm came; now, if it has not."""
    struck = folder / "struck"
    return float(struck.read_text()) if struck.exists() else time.time()


def _processes_of(folder: Path) -> list[psutil.Process]:
    """All that were started with the folder as an argument, forked ones too."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and any(
                f'"{folder}"' in argument for argument in process.cmdline()
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def main() -> None:
    """Of each rank that `launch` has started."""
    harm, folder, name, num_workers, timeout_s = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    strategy = STRATEGIES[name](reliability=ReliabilityOptions(rank_timeout_s=timeout_s))
    train_until_harmed(Harm(**harm), Path(folder), strategy, num_workers)


if __name__ == "__main__":
    main()

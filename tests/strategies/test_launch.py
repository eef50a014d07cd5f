"""Started as a script, by torchrun, from LightningCLI, and twice in one process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_dcp.profiling.options import ProfilingOptions
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from tests.strategies.toys import ToyLM, loader
from tests.worlds import World

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import lightning as L
import lightning_dcp
from tests.strategies.toys import ToyLM, loader

if __name__ == "__main__":
    trainer = L.Trainer(
        strategy="{strategy}", accelerator="cpu", devices=2, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(ToyLM(), loader([9, 30, 5, 12, 7, 3, 11, 2, 8, 14, 1, 6]))
    print(f"rank {{trainer.global_rank}} of {{trainer.world_size}}: step {{trainer.global_step}},"
          f" strategy {{trainer.strategy.strategy_name}}", flush=True)
"""

CLI_SCRIPT = """
import lightning as L
from lightning.pytorch.cli import LightningCLI
{imports}
from tests.strategies.toys import ToyLM, loader

class Model(ToyLM):
    def __init__(self, lr: float = 0.01):
        super().__init__(lr=lr)

class Data({mixin}L.LightningDataModule):
    def __init__(self, batch_size: int = 2):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return loader([9, 30, 5, 12, 7, 3, 11, 2, 8, 14, 1, 6], self.batch_size)

if __name__ == "__main__":
    cli = LightningCLI(Model, Data, save_config_callback=None)
    if "fit" in __import__("sys").argv:
        trainer, strategy = cli.trainer, cli.trainer.strategy
        planning = strategy.settings.planning
        print(f"rank {{trainer.global_rank}}: step {{trainer.global_step}},"
              f" {{strategy.strategy_name}}, {{planning.policy}}, {{planning.tokens_per_step}}",
              flush=True)
"""

TRAINER_YAML = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy: {strategy}
"""

CLASS_PATH = """
    class_path: lightning_dcp.DCPStrategy
    init_args:
      policy: dcp-inter
      planning:
        tokens_per_step: 60
        max_accumulation: 4
      profiling:
        budget_s: 2
"""


def run(*command: str, folder: Path, check: bool = True) -> str:
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    env.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", LIGHTNING_DCP_CACHE=str(folder / "cache"))
    result = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=100
    )
    assert not check or result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.slow
def test_as_a_script(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", SCRIPT.format(strategy="dcp"))
    out = run(script, folder=tmp_path)
    for rank in range(2):
        assert f"rank {rank} of 2: step 3, strategy dcp" in out


def test_by_torchrun(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", SCRIPT.format(strategy="dcp_ddp"))
    out = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, folder=tmp_path
    )
    for rank in range(2):
        assert f"rank {rank} of 2: step 3, strategy dcp_ddp" in out


class TestLightningCLI:
    @pytest.mark.slow
    def test_strategy_by_name(self, tmp_path: Path) -> None:
        script = write(
            tmp_path / "train.py",
            CLI_SCRIPT.format(
                imports="import lightning_dcp", mixin="lightning_dcp.DCPDataModuleMixin, "
            ),
        )
        config = write(tmp_path / "config.yaml", TRAINER_YAML.format(strategy="dcp_ddp"))
        out = run(script, "fit", "--config", config, "--trainer.devices=1", folder=tmp_path)
        assert "rank 0: step 6, dcp_ddp, dcp-intra, None" in out

    @pytest.mark.slow
    def test_strategy_by_class_path_without_an_import(self, tmp_path: Path) -> None:
        script = write(tmp_path / "train.py", CLI_SCRIPT.format(imports="", mixin=""))
        config = write(tmp_path / "config.yaml", TRAINER_YAML.format(strategy=CLASS_PATH))
        out = run(script, "fit", "--config", config, folder=tmp_path)
        assert re.search(r"rank 0: step \d, dcp, dcp-inter, 60", out)
        assert re.search(r"rank 1: step \d, dcp, dcp-inter, 60", out)

    @pytest.mark.slow
    def test_wrong_values(self, tmp_path: Path) -> None:
        script = write(tmp_path / "train.py", CLI_SCRIPT.format(imports="", mixin=""))
        config = write(
            tmp_path / "config.yaml",
            TRAINER_YAML.format(strategy=CLASS_PATH.replace("dcp-inter", "dcp-outer")),
        )
        text = run(script, "fit", "--config", config, folder=tmp_path, check=False)
        assert "dcp-outer" in text and "dcp-intra" in text


# ---- twice in one process ------------------------------------------------------------------------


def fit_twice(rank: int) -> list[Any]:
    model = ToyLM()
    keys = list(model.state_dict())
    steps = []
    for attempt in range(3):
        trainer = L.Trainer(
            strategy=DCPDDPStrategy(profiling=ProfilingOptions(budget_s=1.0, repeats=1)),
            accelerator="cpu",
            devices=2,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader([9, 30, 5, 12, 7, 3, 11, 2]))
        if attempt == 2:  # the same Trainer again, further
            trainer.fit_loop.max_epochs = 2
            trainer.fit(model, loader([9, 30, 5, 12, 7, 3, 11, 2]))
        steps.append(trainer.global_step)
        assert list(model.state_dict()) == keys
        assert not any("forward" in vars(m) for m in model.blocks)
        assert "_on_before_batch_transfer" not in vars(model)
    ids = torch.ones(1, 5, dtype=torch.long)
    return [steps, model(ids).sum().item()]


def test_several_fits_in_one_process() -> None:
    with World(2, timeout_s=100) as world:
        first, second = world.run(fit_twice)
    assert first[0] == second[0] == [2, 2, 4]
    assert first[1] == pytest.approx(second[1])


@pytest.mark.slow
def test_the_trainer_of_pytorch_lightning_is_told_what_to_do(tmp_path: Path) -> None:
    code = """
import pytorch_lightning as pl
import lightning_dcp
try:
    pl.Trainer(strategy="dcp", accelerator="cpu", devices=1)
except Exception as error:
    print(type(error).__name__, error)
"""
    assert "`import lightning as L`" in run(write(tmp_path / "old.py", code), folder=tmp_path)


EXITING = """
import atexit, os, runpy, time
import torch
import torch.distributed as dist

atexit.register(lambda: print("groups are left:", dist.is_initialized(), flush=True))  # runs last

# by its path: without importing the package, which takes seconds
destroy_groups_at_exit = runpy.run_path({path!r})["destroy_groups_at_exit"]

if __name__ == "__main__":
    rank, pending = int(os.environ["RANK"]), {pending}
    dist.init_process_group("gloo")
    destroy_groups_at_exit()
    destroy_groups_at_exit()
    dist.all_reduce(torch.ones(3))
    if rank == 0 and pending:  # a collective that nobody else joins, as after an error
        dist.all_reduce(torch.ones(3), async_op=True)
        raise SystemExit(3)
    elif pending:
        time.sleep(60)
"""


PROCESS_EXIT = str(ROOT / "lightning_dcp" / "strategies" / "process_exit.py")


class TestProcessGroupsAtExit:
    def start(self, tmp_path: Path, pending: bool) -> list[subprocess.Popen[str]]:
        script = write(tmp_path / "exiting.py", EXITING.format(pending=pending, path=PROCESS_EXIT))
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        return [
            subprocess.Popen(
                [sys.executable, script],
                env={**env, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]

    @pytest.mark.slow
    def test_are_destroyed(self, tmp_path: Path) -> None:
        for process in self.start(tmp_path, pending=False):
            out, _ = process.communicate(timeout=100)
            assert process.returncode == 0, out
            assert "groups are left: False" in out

    @pytest.mark.slow
    def test_do_not_keep_a_failed_process(self, tmp_path: Path) -> None:
        failed, waiting = self.start(tmp_path, pending=True)
        try:
            out, _ = failed.communicate(timeout=50)
            assert failed.returncode == 3, out
            assert waiting.poll() is None
        finally:
            waiting.kill()
            waiting.communicate()

"""Saving checkpoints while the process is killed, the disk fills up, or writing is forbidden."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dcp.strategies.checkpointing import failures
from lightning_dcp.strategies.checkpointing.completeness import (
    MANIFEST,
    what_is_missing,
    whole_checkpoint,
)
from lightning_dcp.strategies.checkpointing.failures import together
from lightning_dcp.strategies.checkpointing.files import read_torch_folder
from lightning_dcp.strategies.checkpointing.replacing import is_left_over
from lightning_dcp.strategies.checkpointing.writing import (
    LocalCheckpointIO,
    write_folder,
    write_state,
)
from lightning_dcp.strategies.ddp import DCPDDPStrategy
from lightning_dcp.strategies.fsdp import DCPFSDPStrategy
from tests.strategies.faulty_files import Operations, failing_at_each, killed_at_each, watched
from tests.strategies.test_checkpoints import train
from tests.worlds import World, WorldFailure

# ---- one process, each operation on files --------------------------------------------------------


def state(number: int) -> dict[str, Any]:
    """What is saved; each number is another."""
    generator = torch.Generator().manual_seed(number)
    return {
        "state_dict": {f"w{i}": torch.randn(8, 8, generator=generator) for i in range(2)},
        "number": number,
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else bool(left == right)


def save_file(number: int, path: Path) -> None:
    together(path, lambda: LocalCheckpointIO().save_checkpoint(state(number), path), 520)


def read_file(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=True))


def save_torch(number: int, path: Path) -> None:
    rank_0: Any = SimpleNamespace(is_global_zero=True, global_rank=0)

    def write(folder: Path) -> None:
        DCPFSDPStrategy._write_shards(rank_0, state(number), folder)

    write_folder(path, write, is_global_zero=True, is_local_zero=True)


def read_torch(path: Path) -> dict[str, Any]:
    found = read_torch_folder(path, None)
    return {k: found[k] for k in ("state_dict", "number")}


def save_zero(number: int, path: Path) -> None:
    """The files of DeepSpeed's folder; the engine itself is in the tests with several ranks."""

    def write(folder: Path) -> None:
        (folder / "checkpoint").mkdir()
        for rank in range(2):
            with open(folder / "checkpoint" / f"{rank}_mp_rank_00_model_states.pt", "wb") as file:
                write_state({**state(number), "rank": rank}, file)
        (folder / "latest").write_text("checkpoint")

    write_folder(path, write, is_global_zero=True, is_local_zero=True)


def read_zero(path: Path) -> dict[str, Any]:
    folder = path / (path / "latest").read_text()
    first, second = (
        torch.load(folder / f"{rank}_mp_rank_00_model_states.pt", weights_only=True)
        for rank in range(2)
    )
    assert (first.pop("rank"), second.pop("rank")) == (0, 1) and same(first, second)
    return dict(first)


Save, Read = Callable[[int, Path], None], Callable[[Path], dict[str, Any]]
FORMS: dict[str, tuple[Save, Read]] = {
    "file": (save_file, read_file),
    "torch": (save_torch, read_torch),
    "zero": (save_zero, read_zero),
}


def read(path: Path) -> dict[str, Any]:
    if path.is_file():
        return read_file(path)
    return read_zero(path) if (path / "latest").is_file() else read_torch(path)


class LightningFinds:
    """What Lightning finds in a folder."""

    def __init__(self) -> None:
        self.saving = ModelCheckpoint(save_last=True)
        trainer = L.Trainer(
            callbacks=[self.saving],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.state.fn = TrainerFn.FITTING
        self.connector = trainer._checkpoint_connector

    def last(self, folder: Path) -> Path:
        """For `ckpt_path="last"`."""
        self.saving.dirpath = folder
        found = self.connector._parse_ckpt_path(TrainerFn.FITTING, "last", True, True)
        assert found is not None, "nothing found: the run would begin anew"
        return Path(found)

    def next_of_a_queued_job(self, folder: Path) -> str:
        """The name that a job which is queued again saves under."""
        return Path(self.connector.hpc_save_path(str(folder))).name


@pytest.fixture(scope="module")
def lightning_finds() -> LightningFinds:
    return LightningFinds()


def is_one_of(found: dict[str, Any], *numbers: int) -> bool:
    return any(same(found, {k: state(n)[k] for k in found}) for n in numbers)


@pytest.mark.filterwarnings("ignore:.*is assuming|.*assuming the intent:UserWarning")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("file", "file"),
        ("zero", "zero"),
        pytest.param("torch", "torch", marks=pytest.mark.slow),
        pytest.param("torch", "file", marks=pytest.mark.slow),
        pytest.param("file", "zero", marks=pytest.mark.slow),
    ],
)
def test_killed_in_each_operation(
    before: str, after: str, lightning_finds: LightningFinds, tmp_path: Path
) -> None:
    """Whenever: the former checkpoint or the new one is found, whole, and nothing else."""
    folder, saved = tmp_path / "run", tmp_path / "saved"
    path, numbered = folder / "last.ckpt", folder / "hpc_ckpt_1.ckpt"
    FORMS[before][0](1, saved / "last.ckpt")
    (saved / numbered.name).write_bytes(b"")
    save = FORMS[after][0]

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saved, folder)

    deaths, seen = [], set()
    num_writes = 14 if after == "file" else 8
    for name in killed_at_each(lambda: save(2, path), prepare, num_writes):
        deaths.append(name)
        for asked in (path, lightning_finds.last(folder)):
            found = read(Path(whole_checkpoint(asked)))
            assert is_one_of(found, 1, 2), f"after death {len(deaths)} in {name}"
            seen.add(found["number"])
        assert lightning_finds.next_of_a_queued_job(folder) == "hpc_ckpt_2.ckpt"
        save(3, path)
        assert is_one_of(read(path), 3)
        assert {p.name for p in folder.iterdir()} == {path.name, numbered.name}
    assert len(deaths) >= 20, deaths
    assert {"open", "write", "fsync", "replace"} <= set(deaths)
    assert seen == {1, 2}


def test_killed_while_a_folder_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"

    def prepare() -> None:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        save_zero(1, path)

    deaths = 0
    for _ in killed_at_each(lambda: LocalCheckpointIO().remove_checkpoint(path), prepare):
        deaths += 1
        found = [p for p in tmp_path.iterdir() if not is_left_over(p)]
        assert all(is_one_of(read(p), 1) for p in found)
    assert deaths >= 3


@pytest.mark.filterwarnings("ignore:.*is assuming|.*assuming the intent:UserWarning")
@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk(form: str, tmp_path: Path) -> None:
    """Full in any operation: the former checkpoint is there, nothing else, and it is said so."""
    folder, saved, (save, _) = tmp_path / "run", tmp_path / "saved", FORMS[form]
    path = folder / "last.ckpt"
    save(1, saved / "last.ckpt")

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saved, folder)

    failed = 0
    for error in failing_at_each(lambda: save(2, path), prepare, errno.ENOSPC):
        assert is_one_of(read(path), 1 if error is not None else 2)
        left = [p.name for p in folder.iterdir() if p != path]
        if error is None:  # that the former folder could not be removed is for the next save
            assert all(".replaced-" in name for name in left)
        else:
            failed += 1
            assert not left
            assert error.errno == errno.ENOSPC
            assert f"{str(path)!r} could not be saved: No space left on device" in str(error)
            assert "are free. Free some space, or save elsewhere (`dirpath`" in str(error)
    assert failed >= 10


def test_a_full_disk_is_told_of_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder is saved in parts; seen from rank 1 of two, whose disk is full."""
    path = tmp_path / "last.ckpt"
    answers = iter([lambda told: [None, told], lambda told: [told, told]])
    monkeypatch.setattr(failures, "gather_objects", lambda told: next(answers)(told))

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError) as caught:
        together(path, lambda: together(path, fail), 520)
    text = str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert f"{str(path)!r} could not be saved (on rank 1): No space left on device" in text
    assert text.count("could not be saved") == text.count("Free some space") == 1


def in_a_process(work: Callable[[], str]) -> str:
    """What `work` returns in a process of its own, whose limits and user may be changed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, work().encode())
        except BaseException as error:  # noqa: BLE001 - told to the parent
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        told = file.read().decode()
    os.waitpid(child, 0)
    return told


def message_of(save: Save, path: Path) -> str:
    try:
        save(2, path)
    except OSError as error:
        return f"{type(error).__name__} {error}"
    return "saved"


@pytest.mark.parametrize("form", ["file", "zero"])
def test_the_system_refuses(form: str, tmp_path: Path) -> None:
    """A limit of the size of files, and a folder of somebody else: by the system itself."""
    path, (save, _) = tmp_path / "run" / "last.ckpt", FORMS[form]
    save(1, path)

    def too_large() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
        return message_of(save, path)

    def forbidden() -> str:
        if os.getuid() == 0:
            os.setuid(65534)
        return message_of(save, path)

    text = in_a_process(too_large)
    assert text.startswith("OSError") and "File too large" in text
    needed = ", it takes about 520 bytes" if form == "file" else ""
    assert f"File too large{needed}. Raise the limit of `ulimit -f`" in text
    path.parent.chmod(0o555)
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    text = in_a_process(forbidden)
    assert text.startswith("PermissionError")
    assert "Permission denied ('" in text and "the right to write there" in text
    path.parent.chmod(0o755)
    assert is_one_of(read(path), 1)
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]


def test_a_save_that_goes_on_is_no_leftover(tmp_path: Path) -> None:
    """Another process saves into the same folder meanwhile."""
    reached, released = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:

        def wait() -> None:
            os.write(reached[1], b"x")
            os.read(released[0], 1)

        try:
            with watched(Operations(8, wait, only=("write",))):
                save_file(1, tmp_path / "a.ckpt")
        finally:
            os._exit(0)
    os.read(reached[0], 1)
    save_file(2, tmp_path / "b.ckpt")
    os.write(released[1], b"x")
    os.waitpid(child, 0)
    assert is_one_of(read(tmp_path / "a.ckpt"), 1) and is_one_of(read(tmp_path / "b.ckpt"), 2)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mine.txt").write_text("x")
    for save, _ in FORMS.values():
        with pytest.raises(IsADirectoryError, match="is a folder with other files"):
            save(1, tmp_path / "results")
    assert (tmp_path / "results" / "mine.txt").read_text() == "x"


# ---- what is incomplete is said so ---------------------------------------------------------------


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """At every length; the newest whole neighbour is named."""
    for number, name in enumerate(("old.ckpt", "new.ckpt", "cut.ckpt")):
        save_file(number, tmp_path / name)
        os.utime(tmp_path / name, (number, number))
    data = (tmp_path / "cut.ckpt").read_bytes()
    new, old = (repr(str(tmp_path / f"{name}.ckpt")) for name in ("new", "old"))
    for length in [*range(0, len(data), 41), len(data) - 1]:
        (tmp_path / "cut.ckpt").write_bytes(data[:length])
        with pytest.raises(MisconfigurationException) as caught:
            DCPDDPStrategy().load_checkpoint(tmp_path / "cut.ckpt")
        assert "is incomplete: the " in str(caught.value)
        assert str(caught.value).endswith(f"the newest first: {new}, {old}.")
    (tmp_path / "cut.ckpt").write_bytes(data)
    assert whole_checkpoint(tmp_path / "cut.ckpt") == tmp_path / "cut.ckpt"
    with pytest.raises(FileNotFoundError, match=r"gone\.ckpt\. Complete ones beside it"):
        LocalCheckpointIO().load_checkpoint(tmp_path / "gone.ckpt")


@pytest.mark.filterwarnings("ignore:.*is assuming|.*assuming the intent:UserWarning")
def test_a_folder_without_a_shard_is_refused(tmp_path: Path) -> None:
    save_torch(1, tmp_path / "a.ckpt")
    save_zero(2, tmp_path / "b.ckpt")
    shard = tmp_path / "a.ckpt" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(MisconfigurationException, match=r"`__0_0.distcp` has [\d,]+ of [\d,]+"):
        DCPDDPStrategy().load_checkpoint(tmp_path / "a.ckpt")
    shard.unlink()
    assert what_is_missing(tmp_path / "a.ckpt") == "`__0_0.distcp` is missing"
    (tmp_path / "a.ckpt" / MANIFEST).unlink()
    assert what_is_missing(tmp_path / "a.ckpt") is None  # torch says what it lacks itself
    gone = tmp_path / "b.ckpt" / "checkpoint" / "1_mp_rank_00_model_states.pt"
    gone.unlink()
    assert what_is_missing(tmp_path / "b.ckpt") == f"`checkpoint/{gone.name}` is missing"
    (tmp_path / "b.ckpt" / MANIFEST).write_text("{")
    assert what_is_missing(tmp_path / "b.ckpt") == f"`{MANIFEST}` is damaged"


def test_plugins_of_the_user_are_kept() -> None:
    class Mine(TorchCheckpointIO):
        pass

    assert type(DCPDDPStrategy(checkpoint_io=Mine()).checkpoint_io) is Mine
    assert type(DCPDDPStrategy().checkpoint_io) is LocalCheckpointIO
    wrapping = AsyncCheckpointIO()
    assert DCPDDPStrategy(checkpoint_io=wrapping).checkpoint_io is wrapping
    assert type(wrapping.checkpoint_io) is LocalCheckpointIO
    around = AsyncCheckpointIO(Mine())
    assert DCPDDPStrategy(checkpoint_io=around).checkpoint_io is around
    assert type(around.checkpoint_io) is Mine


# ---- several ranks -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2, timeout_s=110) as pair:
        yield pair


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def in_folders(trainer: L.Trainer, folders: bool) -> None:
    strategy: Any = trainer.strategy
    strategy.save_distributed_checkpoint = strategy._save_distributed_checkpoint = folders


class Interrupted(L.Callback):
    """Saves where it works and where it does not, in both forms, and trains on."""

    def __init__(self, folder: str, both: bool) -> None:
        self.folder, self.both = folder, both
        self.errors: list[tuple[str, int | None, str]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            for folders in (False, True)[: 1 + self.both]:
                in_folders(trainer, folders)
                trainer.save_checkpoint(f"{self.folder}/{folders}.ckpt")
        elif trainer.global_step == 3:
            for folders in (False, True)[: 1 + self.both]:
                in_folders(trainer, folders)
                before = [p.detach().clone() for p in module.parameters()]
                with full_disk(trainer.global_rank == int(folders)):
                    try:
                        trainer.save_checkpoint(f"{self.folder}/{folders}.ckpt")
                    except OSError as error:
                        self.errors.append((type(error).__name__, error.errno, str(error)))
                for old, new in zip(before, module.parameters(), strict=True):
                    assert (old == new).all()
                trainer.save_checkpoint(f"{self.folder}/{folders}_elsewhere.ckpt")


@contextmanager
def full_disk(full: bool) -> Iterator[None]:
    """On this rank."""

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # In the midst of a save, where other ranks are busy with theirs.
    with watched(Operations(3 if full else None, fail, only=("write",))):
        yield


FIVE_STEPS: dict[str, Any] = {"max_steps": 5, "planning": {"policy": "global-batch", "seed": 0}}


def saves(rank: int, name: str, cache: str, folder: str) -> dict[str, Any]:
    interrupted = Interrupted(folder, both=name != "dcp_ddp")
    result = train(rank, name, cache, folder, callbacks=[interrupted], **FIVE_STEPS)
    return {"losses": result["losses"], "errors": interrupted.errors}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dcp", marks=pytest.mark.slow),
        "dcp_ddp",
        pytest.param("dcp_fsdp", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_of_one_rank(pair: World, cache: str, name: str, tmp_path: Path) -> None:
    """All ranks get the same error, and train on as if nothing had been."""
    wanted = pair.run(train, name, cache, str(tmp_path), **FIVE_STEPS)
    found = pair.run(saves, name, cache, str(tmp_path))
    forms = (False, True)[: 1 + (name != "dcp_ddp")]
    assert found[0]["errors"] == found[1]["errors"]
    assert len(found[0]["errors"]) == len(forms)
    for bad_rank, (kind, number, text) in enumerate(found[0]["errors"]):
        assert (kind, number) == ("OSError", errno.ENOSPC)
        path = str(tmp_path / f"{bool(bad_rank)}.ckpt")
        assert f"{path!r} could not be saved (on rank {bad_rank}): No space left" in text
        assert "are free. Free some space, or save elsewhere" in text
        assert text.count("could not be saved") == 1
    for result in found:
        assert result["losses"] == wanted[0]["losses"]
    assert {p.name for p in tmp_path.iterdir()} == {
        f"{form}{where}.ckpt" for form in forms for where in ("", "_elsewhere")
    }
    old = str(tmp_path / f"{forms[-1]}.ckpt")
    again = pair.run(train, name, cache, str(tmp_path), **FIVE_STEPS, ckpt_path=old)
    assert again[0]["losses"] == wanted[0]["losses"][2:]


def monitored(rank: int, cache: str, folder: str) -> dict[str, Any]:
    """ModelCheckpoint's save of step 3 fails, which ends the run."""
    names = ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=1, save_last=True
    )

    class FullAt3(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                self.disk = full_disk(rank == 0)
                self.disk.__enter__()

    full = FullAt3()
    told = ""
    try:
        train(rank, "dcp_ddp", cache, folder, callbacks=[full, names], max_steps=5)
    except OSError as error:
        told = str(error)
    full.disk.__exit__(None, None, None)
    return {"told": told, "best": names.best_model_path, "last": names.last_model_path}


def test_names_of_what_was_not_saved(pair: World, cache: str, tmp_path: Path) -> None:
    """`ckpt_path="best"` would ask for a file that does not exist."""
    for found in pair.run(monitored, cache, str(tmp_path)):
        assert "'" + str(tmp_path / "step=3.ckpt") + "' could not be saved" in found["told"]
        assert found["best"] == str(tmp_path / "step=2.ckpt")
        assert found["last"] == str(tmp_path / "last.ckpt")
    assert {p.name for p in tmp_path.iterdir()} == {"step=2.ckpt", "last.ckpt"}


def ended_in_set_up(rank: int, cache: str, folder: str) -> str:
    class Fail(L.Callback):
        def on_fit_start(self, *_: Any) -> None:
            path.write_text("of the run before")  # not earlier: it would be resumed
            raise ZeroDivisionError("on purpose")

    saving = OnExceptionCheckpoint(folder)
    path = Path(saving.ckpt_path)
    with pytest.raises(ZeroDivisionError):
        train(rank, "dcp_ddp", cache, folder, callbacks=[Fail(), saving, ModelCheckpoint(folder)])
    return path.read_text()


def test_a_run_that_ends_in_set_up_saves_nothing(pair: World, cache: str, tmp_path: Path) -> None:
    """It would replace what it was to go on from by the state of a run that has not begun."""
    found = pair.run(ended_in_set_up, cache, str(tmp_path))
    assert found == ["of the run before"] * 2


def killed_in_a_save(rank: int, cache: str, folder: str, killed: bool) -> dict[str, Any]:
    """Rank 0 is killed while it writes its shard of the third checkpoint."""

    class Kill(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 2 and rank == 0:
                die = Operations(5, lambda: os.kill(os.getpid(), signal.SIGKILL), only=("write",))
                self.watched = watched(die)
                self.watched.__enter__()

    saving = ModelCheckpoint(dirpath=folder, save_last=True, save_top_k=0, every_n_train_steps=1)
    return train(
        rank,
        "dcp",
        cache,
        folder,
        **FIVE_STEPS,
        callbacks=[Kill(), saving] if killed else [saving],
        ckpt_path=None if killed else "last",
        strategy={"save_distributed_checkpoint": True},
    )


def test_a_rank_is_killed_while_it_saves(cache: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with World(2, timeout_s=110) as pair:
        wanted = pair.run(train, "dcp", cache, str(tmp_path), **FIVE_STEPS)
        with pytest.raises(WorldFailure, match="exit code -9"):
            pair.run(killed_in_a_save, cache, str(folder), True)
        left = [p for p in folder.iterdir() if p.name != "last.ckpt"]
        assert len(left) == 1 and is_left_over(left[0]) and any(left[0].rglob("*_states.pt"))
        found = pair.run(killed_in_a_save, cache, str(folder), False)
    for result in found:
        assert result["losses"] == wanted[0]["losses"][2:]
    assert [p.name for p in folder.iterdir()] == ["last.ckpt"]

"""A lock left by a killed build is removed; one that is held is waited for."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from lightning_dcp.strategies.extension_lock import build_lock, wait_for_build_lock


def make_lock(folder: Path, age_s: float) -> Path:
    lock = folder / "lock"
    lock.touch()
    os.utime(lock, (time.time() - age_s,) * 2)
    return lock


def test_abandoned_lock_is_removed(tmp_path: Path) -> None:
    lock = make_lock(tmp_path, age_s=1000)
    with pytest.warns(UserWarning, match=r"removed .*lock, 1\d\d\d s old"):
        wait_for_build_lock(lock)
    assert not lock.exists()


def test_held_lock_is_waited_for(tmp_path: Path) -> None:
    lock = make_lock(tmp_path, age_s=0)
    threading.Timer(0.5, lock.unlink).start()
    start = time.monotonic()
    wait_for_build_lock(lock)
    assert time.monotonic() - start >= 0.4
    assert not lock.exists()


def test_without_a_lock(tmp_path: Path) -> None:
    wait_for_build_lock(tmp_path / "nowhere" / "lock")


@pytest.mark.parametrize("own_folder", [False, True])
def test_it_is_the_lock_that_torch_uses(
    own_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    if not own_folder:
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
        # torch makes the folder where it asks for its name; not in the user's home, please.
        monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path))
        monkeypatch.setattr(
            "lightning_dcp.strategies.extension_lock.get_default_build_root", lambda: str(tmp_path)
        )
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    folder = cpp_extension._get_build_directory(ShareMemCommBuilder.NAME, verbose=False)
    assert build_lock() == Path(folder) / "lock"

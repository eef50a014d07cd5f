"""Cached profiles: found again, never trusted when damaged, never a reason to fail."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import stat
import time

import pytest

from lightning_dcp.planning.cost_model import Measurement
from lightning_dcp.profiling import cache as cache_module
from lightning_dcp.profiling.cache import CacheWarning, ProfileCache, load_or_measure
from lightning_dcp.profiling.cost_profile import CostProfile, SkippedTrial
from tests.strategies.faulty_files import failing_at_each, killed_at_each


def make_profile(fingerprint: str = "abc", forward_s: float = 0.125) -> CostProfile:
    return CostProfile(
        measurements=tuple(
            Measurement(
                batch_size=b,
                seq_len=s,
                sp_size=p,
                forward_s=forward_s * b * s / p / 3,
                backward_s=0.1 + b * s / p,
                rest_s=1e-9,
                saved_bytes=1000 * b * s / p,
                input_bytes=10.0 * b * s / p,
                rest_bytes=5.0,
            )
            for p in (1, 2)
            for s in (16, 32, 64)
            for b in (1, 2)
        ),
        num_blocks=6,
        fixed_bytes=10**12,
        signature='{"x": [0, 1]}',
        attention_heads=((8, 2), (8, 8)),
        sp_size_exclusions={4: "4 does not divide the 2 heads", 16: "what?"},
        fingerprint=fingerprint,
        skipped=(SkippedTrial(batch_size=1, seq_len=9, sp_size=2, reason="too long"),),
        duration_s=1.5,
    )


def test_json_round_trip() -> None:
    profile = make_profile()
    again = CostProfile.from_json(profile.to_json())
    assert again == profile
    assert again.to_json() == profile.to_json()
    assert again.sp_size_exclusions[4] == "4 does not divide the 2 heads"
    assert again.cost_model() == profile.cost_model()


@pytest.mark.parametrize("text", ["[]", "{}", '{"measurements": 3}', "not json", "null"])
def test_foreign_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        CostProfile.from_json(text)


def test_unknown_fields_are_an_error() -> None:
    content = json.loads(make_profile().to_json()) | {"colour": "blue"}
    with pytest.raises(ValueError, match="colour"):
        CostProfile.from_json(json.dumps(content))


def test_a_profile_that_measured_excluded_sizes_cannot_exist() -> None:
    content = json.loads(make_profile().to_json())
    content["sp_size_exclusions"] = {"2": "no"}
    with pytest.raises(ValueError, match=r"\[2\] are excluded and measured"):
        CostProfile.from_json(json.dumps(content))


def test_saved_profiles_are_found_again(tmp_path) -> None:
    cache = ProfileCache(tmp_path / "new" / "directory")
    profile, other = make_profile("a"), make_profile("b", forward_s=1.0)
    assert cache.load("a") is None
    path = cache.save(profile)
    cache.save(other)
    assert path is not None
    assert path.parent == tmp_path / "new" / "directory"
    assert ProfileCache(cache.directory).load("a") == profile
    assert cache.load("b") == other
    assert cache.load("c") is None
    cache.save(make_profile("a", forward_s=9.0))  # replaces
    assert cache.load("a") == make_profile("a", forward_s=9.0)
    assert not [entry for entry in cache.directory.iterdir() if entry.name.startswith(".")]


def test_directory_comes_from_argument_environment_or_user(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LIGHTNING_DCP_CACHE", str(tmp_path))
    assert ProfileCache().directory == tmp_path
    assert ProfileCache(tmp_path / "x").directory == tmp_path / "x"
    monkeypatch.delenv("LIGHTNING_DCP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert "lightning_dcp" in str(ProfileCache().directory)


def _edit(path) -> None:
    content = json.loads(path.read_text())
    content["profile"]["fixed_bytes"] = 1
    path.write_text(json.dumps(content))


def _other_format(path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"format": 99}))


def _flip_bits(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


DAMAGES = {
    "truncated": lambda path: path.write_text(path.read_text()[:-40]),
    "empty": lambda path: path.write_text(""),
    "not json": lambda path: path.write_text("hello"),
    "no object": lambda path: path.write_text("[1, 2]"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "bits flipped": _flip_bits,
    "edited": _edit,
    "other format": _other_format,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_files_are_named_and_redone(tmp_path, damage) -> None:
    cache = ProfileCache(tmp_path)
    path = cache.save(make_profile())
    assert path is not None
    damage(path)
    with pytest.warns(CacheWarning, match=path.name):
        assert cache.load("abc") is None
    cache.save(make_profile())
    assert cache.load("abc") == make_profile()


def test_a_file_with_another_fingerprint_is_not_used(tmp_path) -> None:
    cache = ProfileCache(tmp_path)
    path = cache.save(make_profile("a"))
    assert path is not None
    path.rename(cache.path("b"))
    with pytest.warns(CacheWarning, match="another model or machine"):
        assert cache.load("b") is None


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = ProfileCache(tmp_path / "file")
    with pytest.warns(CacheWarning, match="cannot be written"):
        assert cache.save(make_profile()) is None
    with pytest.warns(CacheWarning, match="cannot be read"):
        assert cache.load("abc") is None


def test_a_locked_file_is_a_warning(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "_LOCK_TIMEOUT_S", 0.05)
    cache = ProfileCache(tmp_path)
    lock = cache_module.filelock.FileLock(f"{cache.path('abc')}.lock")
    with lock, pytest.warns(CacheWarning, match="cannot be written"):
        assert cache.save(make_profile()) is None
    assert cache.save(make_profile()) is not None


def _clever(path, change) -> None:
    """Edit the profile in a file, and put its checksum right."""
    content = json.loads(path.read_text())
    del content["checksum"]
    change(content["profile"])
    path.write_text(json.dumps(content | {"checksum": cache_module._checksum(content)}))


FIRST = "measurements", 0
EDITS = [
    (*FIRST, "forward_s", -1.0),
    (*FIRST, "backward_s", float("nan")),
    (*FIRST, "rest_s", float("inf")),
    (*FIRST, "saved_bytes", "many"),
    (*FIRST, "input_bytes", None),
    (*FIRST, "rest_bytes", -5),
    (*FIRST, "batch_size", 1.5),
    (*FIRST, "batch_size", True),
    (*FIRST, "seq_len", 0),
    (*FIRST, "sp_size", 3),
    (*FIRST, "colour", "blue"),
    ("measurements", []),
    ("measurements", {}),
    ("measurements", [[]]),
    ("num_blocks", 0),
    ("num_blocks", 6.0),
    ("num_blocks", None),
    ("fixed_bytes", -1),
    ("fixed_bytes", 1e400),
    ("step_overhead_s", float("nan")),
    ("step_overhead_s", -1),
    ("duration_s", "long"),
    ("attention_heads", [[1]]),
    ("attention_heads", [[float("inf"), 1]]),
    ("sp_size_exclusions", {"two": "no"}),
    ("sp_size_exclusions", {"2": "no"}),
    ("skipped", [{"batch_size": 1}]),
    ("stacks", [{"path": "a", "num_blocks": 2}]),
    ("stacks", [{"path": 1, "num_blocks": 6}]),
    ("recompute_order", [1]),
    ("recompute_order", []),
    ("recompute_order", ["first"]),
    ("fingerprint", 7),
    ("fingerprint", "abd"),
    ("signature", 3),
]


@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_edited_with_the_right_checksum(tmp_path, edit) -> None:
    """Values that no profile can have are refused all the same."""
    cache = ProfileCache(tmp_path)
    path = cache.save(make_profile())
    assert path is not None
    *where, value = edit

    def change(profile) -> None:
        for name in where[:-1]:
            profile = profile[name]
        profile[where[-1]] = value

    _clever(path, change)
    with pytest.warns(CacheWarning, match="the costs are measured again"):
        assert cache.load("abc") is None


def test_truncated_anywhere_and_bits_flipped_anywhere(tmp_path) -> None:
    cache = ProfileCache(tmp_path)
    path = cache.save(make_profile())
    assert path is not None
    data = path.read_bytes()
    for at in range(0, len(data) - 1, 97):  # the last byte is the end of the line
        flipped = bytearray(data)
        flipped[at] ^= 0x04
        for damaged in (data[:at], bytes(flipped)):
            path.write_bytes(damaged)
            with pytest.warns(CacheWarning, match=path.name):
                assert cache.load("abc") is None
    path.write_text("[" * 100_000)
    with pytest.warns(CacheWarning, match="damaged or truncated"):
        assert cache.load("abc") is None


def test_killed_in_each_operation(tmp_path) -> None:
    """The former profile or the new one; what was left is removed by the next save."""
    cache = ProfileCache(tmp_path)
    old, new = make_profile(), make_profile(forward_s=9.0)
    deaths, seen = 0, set()
    for _ in killed_at_each(lambda: cache.save(new), lambda: cache.save(old) and None):
        deaths += 1
        found = cache.load("abc")  # a warning would be an error here
        assert found in (old, new)
        seen.add(found == new)
        assert cache.save(old) is not None  # nor does the lock outlive its process
        assert {p.name for p in tmp_path.iterdir()} <= {
            cache.path("abc").name,
            f"{cache.path('abc').name}.lock",
        }
    assert deaths >= 8 and seen == {False, True}


@pytest.mark.filterwarnings("ignore:.*cannot be written:lightning_dcp.profiling.cache.CacheWarning")
def test_a_full_disk_is_a_warning(tmp_path) -> None:
    cache = ProfileCache(tmp_path)
    old, new = make_profile(), make_profile(forward_s=9.0)
    results = []

    def save() -> None:
        results.append(cache.save(new))

    for error in failing_at_each(save, lambda: cache.save(old) and None, errno.ENOSPC):
        assert error is None
        assert cache.load("abc") == (old if results[-1] is None else new)
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert results.count(None) >= 5


def test_a_stopped_process_that_holds_the_lock(tmp_path, monkeypatch) -> None:
    """Is not waited for without end; of one that has died the lock is free."""
    monkeypatch.setattr(cache_module, "_LOCK_TIMEOUT_S", 0.2)
    cache = ProfileCache(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            with cache_module.filelock.FileLock(f"{cache.path('abc')}.lock"):
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(60)
        finally:
            os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    try:
        with pytest.warns(CacheWarning, match="could not be acquired"):
            assert cache.save(make_profile()) is None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert cache.save(make_profile()) is not None


def test_a_file_system_without_locks(tmp_path, monkeypatch) -> None:
    def refuse(*_, **__) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(cache_module.filelock.FileLock, "acquire", refuse)
    cache = ProfileCache(tmp_path)
    assert cache.save(make_profile()) == cache.path("abc")
    assert cache.load("abc") == make_profile()


def _save_often(directory: str, forward_s: float) -> None:
    cache = ProfileCache(directory)
    for _ in range(8):
        cache.save(make_profile(forward_s=forward_s))


def test_several_writers_leave_one_whole_file(tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_save_often, args=(str(tmp_path), i + 1.0)) for i in range(8)]
    for writer in writers:
        writer.start()
    cache = ProfileCache(tmp_path)
    while any(writer.is_alive() for writer in writers):
        loaded = cache.load("abc")  # a warning would be an error here
        assert loaded is None or loaded.num_blocks == 6
    assert all(writer.exitcode == 0 for writer in writers)
    assert cache.load("abc") is not None


def test_files_are_private_to_the_user(tmp_path) -> None:
    path = ProfileCache(tmp_path).save(make_profile())
    assert path is not None
    assert not stat.S_IMODE(path.stat().st_mode) & 0o022


class TestLoadOrMeasure:
    def test_second_run_measures_nothing(self, tmp_path) -> None:
        calls = []

        def measure() -> CostProfile:
            calls.append(1)
            return make_profile("key")

        for expected in (False, True):
            profile, cached = load_or_measure(
                measure,
                fingerprint="key",
                cache=ProfileCache(tmp_path),
                gather=lambda value: [value],
                is_writer=True,
            )
            assert cached is expected
            assert profile == make_profile("key")
        assert len(calls) == 1

    def test_other_ranks_take_what_rank_0_found(self, tmp_path) -> None:
        text = make_profile("key").to_json()
        profile, cached = load_or_measure(
            lambda: pytest.fail("measured"),
            fingerprint="another, e.g. of another kind of device",
            cache=ProfileCache(tmp_path),
            gather=lambda value: [text, value],
            is_writer=False,
        )
        assert cached
        assert profile == make_profile("key")
        assert not list(tmp_path.iterdir())

    def test_a_profile_that_the_run_refuses_is_measured_again(self, tmp_path) -> None:
        cache = ProfileCache(tmp_path)
        cache.save(make_profile("key"))

        def refuse(profile: CostProfile) -> None:
            raise ValueError("it has SP size 64, but there are 2 ranks")

        with pytest.warns(CacheWarning, match=r"is not used \(it has SP size 64"):
            profile, cached = load_or_measure(
                lambda: make_profile("key", forward_s=7.0),
                fingerprint="key",
                cache=cache,
                gather=lambda value: [value],
                is_writer=True,
                check=refuse,
            )
        assert not cached
        assert profile == cache.load("key") == make_profile("key", forward_s=7.0)

    def test_without_a_cache_nothing_is_written(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setenv("LIGHTNING_DCP_CACHE", str(tmp_path))
        _, cached = load_or_measure(
            make_profile, fingerprint="abc", cache=None, gather=lambda v: [v], is_writer=True
        )
        assert not cached
        assert not list(tmp_path.iterdir())

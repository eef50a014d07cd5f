"""Cached profiles: found again, never trusted when damaged, never a reason to fail."""

from __future__ import annotations

import json
import multiprocessing
import stat

import pytest

from lightning_dcp.planning.cost_model import Measurement
from lightning_dcp.profiling import cache as cache_module
from lightning_dcp.profiling.cache import CacheWarning, ProfileCache, load_or_measure
from lightning_dcp.profiling.cost_profile import CostProfile, SkippedTrial


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


def _save_often(directory: str, forward_s: float) -> None:
    cache = ProfileCache(directory)
    for _ in range(20):
        cache.save(make_profile(forward_s=forward_s))


def test_several_writers_leave_one_whole_file(tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_save_often, args=(str(tmp_path), i + 1.0)) for i in range(3)]
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

    def test_without_a_cache_nothing_is_written(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setenv("LIGHTNING_DCP_CACHE", str(tmp_path))
        _, cached = load_or_measure(
            make_profile, fingerprint="abc", cache=None, gather=lambda v: [v], is_writer=True
        )
        assert not cached
        assert not list(tmp_path.iterdir())

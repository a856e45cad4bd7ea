"""Another user of the machine can neither read nor exchange what is cached."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import benchmark
import data
from sdbench.cli import main
from tests.data import datasets
from tests.refusals import printed_refusal
from tests.runs import only_record

STRANGER = 12345
SMALL = ("--image_size", "16", "--batch_size", "4", "--num_workers", "0", "--num_batches", "2")


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def tars(tmp_path) -> Path:
    datasets.write_tars(tmp_path / "tars")
    return tmp_path / "tars"


@pytest.fixture
def victim(tmp_path) -> Path:
    """A file that nobody else may change."""
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    victim.chmod(0o640)
    yield victim
    assert victim.read_text() == "as it was"
    assert mode_of(victim) == 0o640


def feed(place: object, *argv: str) -> int:
    return data.main(["--remote", str(place), *SMALL, *argv])


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def modes_below(folder: Path) -> set[tuple[bool, int]]:
    """Whether it is a folder, and its mode, of all that is below a folder and of itself."""
    return {(path.is_dir(), mode_of(path)) for path in (folder, *folder.rglob("*"))}


@pytest.fixture
def refused(capsys):
    """A function that feeds from a place, which has to be refused for a cache folder."""

    def check(place: object, folder: Path | str) -> None:
        assert feed(place) == 2
        refusal = printed_refusal(capsys.readouterr().err)
        assert refusal.flag.startswith("XDG_CACHE_HOME")
        assert refusal.value == str(folder)

    return check


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user's")
@pytest.mark.parametrize("foreign", ["sdbench", "sdbench/tar-indexes"])
def test_links_in_a_folder_of_another_users_are_not_followed(
    foreign, home, tars, victim, refused, monkeypatch, tmp_path
):
    assert feed(tars) == 0
    # What another user can foresee.
    names = [path.relative_to(home) for path in home.rglob("*") if path.is_file()]
    trap = tmp_path / "trap"
    monkeypatch.setenv("XDG_CACHE_HOME", str(trap))
    for name in names:
        for link in (trap / name, (trap / name).with_suffix(".partial")):
            link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(victim)
    for folder in (trap / "sdbench", trap / "sdbench" / "tar-indexes"):
        folder.chmod(0o700)
    os.chown(trap / foreign, STRANGER, STRANGER)
    refused(tars, trap / foreign)


@pytest.mark.parametrize("name", ["sdbench", "sdbench/tar-indexes"])
@pytest.mark.parametrize("mode", [0o777, 0o720, 0o701, None])
def test_a_link_in_place_of_the_folder_is_refused(name, mode, home, tars, refused, tmp_path):
    """Or a folder that is open to others, or that they could exchange for another."""
    (home / "sdbench").mkdir(mode=0o700)
    (home / "sdbench" / "tar-indexes").mkdir(mode=0o700)
    if mode is None:
        (home / name).rename(tmp_path / "elsewhere")
        (home / name).symlink_to(tmp_path / "elsewhere")
    else:
        (home / name).chmod(mode)
    refused(tars, home / name)
    if mode == 0o777:
        (home / name).chmod(0o700)
        home.chmod(0o777)
        refused(tars, home / "sdbench")
        home.chmod(0o1777)
        assert feed(tars) == 0


@pytest.mark.parametrize(
    ("home", "named"),
    [
        ("/dev/null", "/dev/null/sdbench"),
        ("", "/proc/nobody/.cache/sdbench"),
        ("relative", "relative/sdbench"),
    ],
)
def test_without_a_home_no_other_folder_is_taken(home, named, tars, refused, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setenv("HOME", "/proc/nobody")
    refused(tars, named)
    assert not (tmp_path / "relative").exists()


ONE_STEP = (
    *("--model_name", "tiny", "--engine", "torch", "--use_synth_data", "--num_workers", "0"),
    *("--warmup_batches", "0", "--measure_batches", "1", "--no_measure_peak"),
    *("--batch_size", "1", "--profile_batches", "0", "--results_dir", "runs"),
)


@pytest.mark.slow
def test_training_goes_on_without_a_cache_unless_it_compiles(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert benchmark.main(ONE_STEP) == 0
    (note,) = only_record(Path("runs"))["notes"]
    assert "'/dev/null/sdbench'" in note and "XDG_CACHE_HOME" in note
    assert benchmark.main([*ONE_STEP, "--compile", "unet"]) == 2


@pytest.fixture
def pipe(tars) -> str:
    """A tar that has to be copied."""
    return f"pipe:cat {tars}/00000.tar"


def test_a_link_at_a_name_that_could_be_foreseen_is_not_followed(
    pipe, home, victim, tmp_path, capsys
):
    first, second = tmp_path / "first", tmp_path / "second"
    assert feed(pipe, "--local", str(first)) == 0
    (copy,), (lock,) = first.glob("*-pipe"), first.glob(".*.lock")
    second.mkdir()
    for name in (f".{copy.name}.partial", f"{copy.name}.partial", f"{copy.name}.tmp"):
        (second / name).symlink_to(victim)
    assert feed(pipe, "--local", str(second)) == 0
    assert (second / copy.name).read_bytes() == copy.read_bytes()
    (second / lock.name).unlink()
    (second / lock.name).symlink_to(victim)
    assert feed(pipe, "--local", str(second)) == 1
    assert lock.name in capsys.readouterr().err


def test_copies_and_indexes_are_for_this_user_alone(pipe, home, tmp_path):
    before = os.umask(0)
    try:
        assert feed(pipe) == 0
        assert feed(pipe, "--local", str(tmp_path / "made")) == 0
        (tmp_path / "given").mkdir(mode=0o755)
        assert feed(pipe, "--local", str(tmp_path / "given")) == 0
    finally:
        os.umask(before)
    private = {(False, 0o600), (True, 0o700)}
    assert modes_below(home / "sdbench") == modes_below(tmp_path / "made") == private
    assert modes_below(tmp_path / "given") == {(False, 0o600), (True, 0o755)}
    # A copy, the indexes of all three, and a lock for each of these.
    assert len([path for path in home.rglob("*") if path.is_file()]) == 8


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user's")
def test_no_data_set_is_prepared_in_a_folder_of_others(home, tars, tmp_path, capsys):
    shared = tmp_path / "shared"
    (shared / "out.partial").mkdir(parents=True)
    shared.chmod(0o1777)
    os.chown(shared / "out.partial", STRANGER, STRANGER)
    argv = ["convert", str(tars), "--folder", str(shared / "out"), "--num_workers", "0"]
    assert main(argv) == 2
    assert printed_refusal(capsys.readouterr().err).flag == "--folder"
    assert not list((shared / "out.partial").iterdir())
    assert main([*argv[:3], str(shared / "other"), *argv[4:]]) == 0

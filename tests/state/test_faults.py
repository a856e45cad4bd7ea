"""Checkpoints and kills, full disks, damaged files and files that were made to harm."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import sys

import pytest
import torch

from sdbench.base.errors import ConfigError, RunError
from sdbench.state import checkpoint_files
from sdbench.state.checkpoint_files import Checkpoint
from tests.harm import Harm
from tests.refusals import refused
from tests.state.states import flip_byte, holds, make_checkpoints, make_state, names, save

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def in_fork(work, *arguments):
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def save_and_die(folder, num_operations):
    """Save step 20, and be killed before the file operation of this number."""
    counter = itertools.count()

    def hook(event, arguments):
        is_ours = event == "open" and str(arguments[0]).startswith(str(folder))
        if (is_ours or event in CHANGES) and next(counter) == num_operations:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoints = make_checkpoints(folder, keep=1)
    sys.addaudithook(hook)
    save(checkpoints, 20)


def test_a_kill_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path):
    before = tmp_path / "before"
    save(make_checkpoints(before), 10)
    remains = before / "checkpoints" / ".step_00000015.writing"
    remains.mkdir()
    (remains / "__0_0.distcp").write_bytes(b"in part")
    newest = []
    for number in itertools.count():
        folder = tmp_path / str(number)
        shutil.copytree(before, folder)
        exit_code = in_fork(save_and_die, folder, number)
        checkpoints = make_checkpoints(folder, keep=1)
        found = checkpoints.newest()
        newest.append(found.step)
        assert holds(found, found.step)
        save(checkpoints, 30)
        assert names(folder) == ["step_00000030"]
        assert holds(checkpoints.newest(), 30)
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
    assert newest == sorted(newest) and set(newest) == {10, 20}
    assert newest.count(10) > 10


def save_too_much(folder, handler):
    """Save 4 MiB where no file may have more than 2."""
    signal.signal(signal.SIGXFSZ, handler)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, 2**21))
    checkpoints = make_checkpoints(folder)
    checkpoints.begin_save(20, {"weights": torch.zeros(2**20)}, {})
    with pytest.raises(RunError, match="step 20 was not saved: .*File too large"):
        checkpoints.finish()
    assert names(folder) == ["step_00000010"]
    save(checkpoints, 30)


def test_a_kill_in_the_middle_of_a_file_leaves_the_checkpoint_before(tmp_path, capsys):
    """And after a write that fails, the next save works."""
    save(make_checkpoints(tmp_path), 10)
    assert in_fork(save_too_much, tmp_path, signal.SIG_DFL) == -signal.SIGXFSZ
    assert names(tmp_path) == [".step_00000020.writing", "step_00000010"]
    assert holds(make_checkpoints(tmp_path).newest(), 10)
    assert ".step_00000020.writing" in capsys.readouterr().out
    assert in_fork(save_too_much, tmp_path, signal.SIG_IGN) == 0
    assert names(tmp_path) == ["step_00000010", "step_00000030"]


FILES = ("checkpoint.json", ".metadata", "__0_0.distcp")


@pytest.fixture
def two_checkpoints(tmp_path):
    checkpoints = make_checkpoints(tmp_path)
    save(checkpoints, 10)
    save(checkpoints, 20)
    return checkpoints


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [None, 0, -1])
def test_a_missing_or_truncated_file_is_named_and_the_checkpoint_passed_over(
    two_checkpoints, name, size, capsys
):
    path = two_checkpoints.folder / "step_00000020" / name
    if size is None:
        path.unlink()
    else:
        os.truncate(path, size if size >= 0 else path.stat().st_size + size - 1)
    assert two_checkpoints.newest().step == 10
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", [0, 0.5, 1])
def test_a_checkpoint_with_a_flipped_byte_is_passed_over(two_checkpoints, name, where, capsys):
    path = two_checkpoints.folder / "step_00000020" / name
    flip_byte(path, where=where)
    newest = two_checkpoints.newest()
    assert holds(newest, 10)
    (reason,) = newest.passed_over
    assert str(path) in reason
    assert reason in capsys.readouterr().out
    if name != "checkpoint.json":  # nothing of it is loaded
        state = make_state(-1)
        with refused("--resume", value=str(path)):
            Checkpoint.open(path.parent).load_into(state)
        assert all(torch.equal(state[key], tensor) for key, tensor in make_state(-1).items())


def test_a_checkpoint_of_another_version_is_passed_over(tmp_path, monkeypatch):
    """Of one with other files, or which draws other random weights from the same seed."""
    checkpoints = make_checkpoints(tmp_path)
    save(checkpoints, 10)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "SCHEMA_VERSION", checkpoint_files.SCHEMA_VERSION - 1)
        save(checkpoints, 20)
    newest = checkpoints.newest()
    (reason,) = newest.passed_over
    assert newest.step == 10
    assert f"schema_version {checkpoint_files.SCHEMA_VERSION - 1}" in reason


def test_where_all_checkpoints_are_damaged_none_is_taken(two_checkpoints):
    paths = [two_checkpoints.folder / f"step_000000{step}" / FILES[-1] for step in (20, 10)]
    for path in paths:
        flip_byte(path)
    with pytest.raises(ConfigError) as caught:
        two_checkpoints.newest()
    assert all(str(path) in fault for path, fault in zip(paths, caught.value.value, strict=True))


def write_metadata(checkpoints, step, content):
    """Replace the metadata of a checkpoint, with a checksum that is right."""
    folder = checkpoints.folder / f"step_{step:08d}"
    files = Checkpoint.open(folder).files
    (folder / ".metadata").write_bytes(content)
    files |= {".metadata": checkpoint_files.describe_file(folder / ".metadata")}
    checkpoint_files.write_description(folder, step=step, facts={}, files=files)
    return str(folder / ".metadata")


@pytest.mark.parametrize("place", ["alone", "beside tensors"])
def test_code_in_the_metadata_is_not_run(two_checkpoints, tmp_path, place):
    harm = Harm(tmp_path / "harm")
    metadata = two_checkpoints.newest().metadata
    tensors = {**metadata.state_dict_metadata, "harm": harm}
    harmful = dataclasses.replace(metadata, state_dict_metadata=tensors)
    content = pickle.dumps(harm if place == "alone" else harmful)
    path = write_metadata(two_checkpoints, 20, content)
    newest = two_checkpoints.newest()
    assert newest.step == 10 and path in newest.passed_over[0]
    harm.check_not_done(content)


def test_a_folder_that_has_the_name_of_another_step_is_refused(two_checkpoints):
    """A save of that step would remove it."""
    folder = two_checkpoints.folder
    (folder / "step_00000020").rename(folder / "step_00000030")
    with refused("the name of the folder") as caught:
        two_checkpoints.newest()
    assert "step_00000030, which holds step 20" in caught.value.value
    assert "step_00000020" in caught.value.allowed


def test_a_checkpoint_of_python_3_11_2_can_be_read(tmp_path, monkeypatch):
    """Its Enum pickles a member as an attribute, by `getattr`."""
    kind = checkpoint_files._MEM_FORMAT_ENCODING
    monkeypatch.setattr(
        kind, "__reduce_ex__", lambda member, protocol: (getattr, (kind, member.name))
    )
    checkpoints = make_checkpoints(tmp_path)
    save(checkpoints, 10)
    assert b"getattr" in (checkpoints.folder / "step_00000010" / ".metadata").read_bytes()
    assert holds(checkpoints.newest(), 10)


def test_an_attribute_of_anything_else_is_not_read(two_checkpoints):
    class Attribute:
        def __reduce__(self):
            return getattr, (torch.Size, "numel")

    path = write_metadata(two_checkpoints, 20, pickle.dumps(Attribute()))
    with refused("--resume", value=path):
        Checkpoint.open(two_checkpoints.folder / "step_00000020")
    assert two_checkpoints.newest().step == 10


def test_a_description_of_100_000_brackets_is_passed_over(two_checkpoints):
    path = two_checkpoints.folder / "step_00000020" / "checkpoint.json"
    path.write_text("[" * 100_000)
    assert two_checkpoints.newest().step == 10
    path.write_text("[]")
    assert two_checkpoints.newest().step == 10

"""Are real faults of an MDS data set loud, and are its samples right?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sdbench import sources
from sdbench.errors import RunError
from sdbench.sources.tokenizer import CaptionTokenizer


def captions_by_value(loader) -> dict[int, list[int]]:
    return {
        int(image[0, 0, 0]): ids.tolist()
        for batch in loader
        for image, ids in zip(batch["image"], batch["input_ids"], strict=True)
    }


def test_images_keep_their_captions(make_config):
    found = captions_by_value(sources.build(make_config("mds")))
    assert len(found) == 48
    tokenizer = CaptionTokenizer(pad_token_id=0)
    assert found == {5 * i: tokenizer(f"picture {i}").tolist() for i in (v // 5 for v in found)}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fault", ["missing", "truncated"])
def test_a_shard_lost_after_the_start_is_an_error_that_names_it(fault, num_workers, make_config):
    config = make_config("mds", num_workers=num_workers)
    loader = sources.build(config)
    shard = Path(config.remote, "shard.00001.mds")
    if fault == "missing":
        shard.unlink()
    else:
        os.truncate(shard, 3000)
    with pytest.raises(RunError, match=r"^Sample \d+ cannot be read from shard .*shard.00001.mds"):
        list(loader)
    assert loader.num_images_delivered < 48


def test_each_epoch_has_another_order(make_config):
    loader = sources.build(make_config("mds"))
    first, second = (list(captions_by_value(loader)) for _ in range(2))
    assert first != second


def test_a_shard_missing_at_the_remote_is_an_error(make_config, tmp_path):
    cache = str(tmp_path / "cache")
    config = make_config("mds", num_workers=2, local=cache)
    loader = sources.build(config)
    Path(config.remote, "shard.00002.mds").unlink()
    with pytest.raises(RunError, match=r"shard.00002.mds \(on disk: missing"):
        list(loader)


def test_both_folders_given_means_a_copy(make_config, tmp_path):
    cache = tmp_path / "cache"
    list(sources.build(make_config("mds", local=str(cache))))
    assert len(list(cache.glob("*.mds"))) == 4


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory is not a folder here")
def test_what_a_killed_run_leaves_does_not_stop_the_next(make_config, tmp_path):
    cache = str(tmp_path / "cache")
    config = make_config("mds", local=cache)
    script = (
        "import os, signal\n"
        "from multiprocessing import resource_tracker\n"
        "from pathlib import PosixPath\n"
        "from sdbench import sources\n"
        "from sdbench.sources.config import SourceConfig\n"
        f"loader = sources.build({config!r})\n"
        "next(iter(loader))\n"
        "os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    names = [path for path in Path("/dev/shm").glob("*_locals") if cache.encode() in _read(path)]
    assert len(names) == 1
    assert len(list(sources.build(config))) == 12


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_living_registrations_are_kept(make_config, tmp_path):
    config = make_config("mds", local=str(tmp_path / "cache"))
    living = sources.build(config)
    other = tmp_path / "other"
    shutil.copytree(config.remote, other)
    list(sources.build(make_config("mds", remote=str(other))))
    assert len(list(living)) == 12

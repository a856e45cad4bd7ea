"""Are an MDS data set's caches, streams and registrations what they should be?"""

from __future__ import annotations

import functools
import io
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import data as program
from sdbench import data
from sdbench.base.errors import RunError
from sdbench.data.batches.tokenizer import CaptionTokenizer
from sdbench.data.convert import verify
from sdbench.data.formats import compat
from tests.data import datasets
from tests.data.datasets import indices, read_epoch, write_shards
from tests.harm import Harm
from tests.refusals import printed_refusal, refused

make_config = functools.partial(datasets.make_source, "mds")
SHARD, INDEX = "shard.00002.mds", "index.json"


def cut(path: Path) -> None:
    os.truncate(path, 5000)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("damage", "file", "refused_value"),
    [
        (Path.unlink, SHARD, f"{{remote}}/{SHARD}"),
        (cut, SHARD, f"{{remote}}/{SHARD}"),
        (datasets.flip_a_bit, SHARD, None),
        (lambda path: os.truncate(path, 100), INDEX, f"{{remote}}/{INDEX}"),
        (Path.unlink, INDEX, "{remote}"),
    ],
    ids=["lost", "cut", "bit flip", "cut index", "no index"],
)
def test_the_culprit_is_named(damage, file, refused_value, mds_folder, tmp_path, capsys):
    """Before the run with the value, or, where that is None, when a worker meets it."""
    damage(mds_folder / file)
    argv = ["--remote", str(mds_folder), "--num_workers", "2", "--image_size", "16"]
    argv += ["--batch_size", "4", "--num_batches", "24", "--results_dir", str(tmp_path / "runs")]
    assert program.main(argv) == (1 if refused_value is None else 2)
    told = capsys.readouterr().err
    assert file in told
    if refused_value is not None:
        assert printed_refusal(told).value == refused_value.format(remote=mds_folder)


@pytest.mark.parametrize(("shuffle", "num_workers"), [(False, 0), (True, 2)])
@pytest.mark.parametrize("damage", [cut, datasets.flip_a_bit], ids=["cut", "bit flip"])
def test_a_damaged_copy_is_made_again(damage, shuffle, num_workers, mds_folder, tmp_path, capfd):
    cache = tmp_path / "cache"
    config = make_config(mds_folder, local=str(cache), shuffle=shuffle, num_workers=num_workers)
    expected = read_epoch(config)
    damage(cache / SHARD)
    assert read_epoch(config) == expected
    told = capfd.readouterr().err
    assert f"Shard {mds_folder}/{SHARD} is damaged" in told
    assert "Its copy is thrown away" in told
    assert str(cache) not in told
    assert (cache / SHARD).read_bytes() == (mds_folder / SHARD).read_bytes()


def test_a_cache_of_other_data_is_refused(mds_folder, tmp_path):
    cache = tmp_path / "cache"
    list(data.build(make_config(mds_folder, local=str(cache))))
    datasets.edit_index(mds_folder, lambda shards: shards.pop())
    with refused("--local", value=str(cache)):
        data.check(make_config(mds_folder, local=str(cache)))


@pytest.mark.parametrize("text", ["a", "a=", "a=0.5,b", "a=-1", "=1", "a=inf"])
def test_streams_of_another_form(text):
    with refused("--streams"):
        data.check(make_config(None, streams=text))


def test_hashes_that_are_not_there(mds_folder):
    with refused("--validate_hash", value="md5", allowed="auto, none, xxh64"):
        data.check(make_config(mds_folder, validate_hash="md5"))


def test_diffusion_benchmarks_data_set(mds_folder, tmp_path):
    from data import StreamingLAIONDataset

    pictures = [datasets.make_png(number) for number in range(8)]
    other = write_pictures(tmp_path / "other", "bytes", pictures)  # names its columns differently
    for place in (mds_folder, other):
        dataset = StreamingLAIONDataset(None, str(place), None, False, image_size=32)
        sample = dataset[7]
        assert sample["image"].shape == (3, 32, 32)
        assert (sample["image"] == 35).all()
        expected = CaptionTokenizer(pad_token_id=0)(["picture 7"])[0]
        assert sample["input_ids"].tolist() == expected.tolist()
        del dataset
    sizes = StreamingLAIONDataset(
        None, str(mds_folder), None, False, transform=lambda image: image.size
    )
    assert sizes[0]["image"] == (60, 40)
    assert len(sizes) == 49


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory is not a folder here")
def test_what_a_killed_run_leaves_does_not_stop_the_next(mds_folder, repository, tmp_path):
    cache = str(tmp_path / "cache")
    config = make_config(mds_folder, local=cache)
    script = (
        "import os, signal\n"
        "from multiprocessing import resource_tracker\n"
        "from sdbench import data\n"
        "from sdbench.base.conditions import Captions, Condition, ModelInputs\n"
        "from sdbench.data.source import SourceConfig\n"
        f"loader = data.build({config!r})\n"
        "next(iter(loader))\n"
        "os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], cwd=repository, check=False)
    assert killed.returncode == -9
    kept = subprocess.run(f"grep -l {cache} /dev/shm/*_locals", shell=True, capture_output=True)
    assert len(kept.stdout.splitlines()) == 1
    assert len(set(read_epoch(config))) == 48


def test_another_data_set_in_the_same_process_is_its_own(mds_folder, tmp_path):
    datasets.write_mds_latents(tmp_path / "latents")
    living = data.build(make_config(mds_folder, local=str(tmp_path / "cache")))
    latents = datasets.make_source("mds latents", tmp_path / "latents")
    assert len(read_epoch(latents)) == 48
    assert read_epoch(make_config(mds_folder, shuffle=False)) == list(range(48))
    assert len(set(indices(living))) == 48


def test_a_shard_lost_after_the_start_is_an_error_that_names_it(mds_folder):
    loader = data.build(make_config(mds_folder))
    (mds_folder / "shard.00001.mds").unlink()
    with pytest.raises(RunError, match=r"Shard shard.00001.mds cannot be had from .*pairs"):
        list(loader)
    assert loader.stats.num_images_delivered < 48


def write_pictures(folder: Path, encoding: str, pictures: list) -> Path:
    """A data set with the columns image and text, of Streaming's encodings of pictures."""
    rows = ((picture, f"picture {number}") for number, picture in enumerate(pictures))
    return write_shards(folder, {"image": encoding, "text": "str"}, rows)


def read_one(folder: Path) -> dict:
    return next(iter(data.build(make_config(folder, shuffle=False))))


@pytest.mark.parametrize("encoding", ["pil", "png", "jpeg"])
def test_streamings_encodings_of_pictures(encoding, tmp_path):
    pictures = [Image.open(io.BytesIO(datasets.make_png(number))) for number in range(4)]
    pictures[1] = pictures[1].convert("L")
    pictures[2] = pictures[2].convert("CMYK" if encoding != "png" else "RGBA")
    folder = write_pictures(tmp_path / "data", encoding, pictures)
    batch = read_one(folder)
    assert indices([batch]) == [0, 1, 2, 3]
    captions = [f"picture {number}" for number in range(4)]
    assert batch["input_ids"].tolist() == CaptionTokenizer(pad_token_id=0)(captions).tolist()


def test_pixels_that_lost_their_palette_are_bad(tmp_path):
    pictures = [Image.new("RGB", (8, 8))] * 3
    pictures.append(Image.new("P", (8, 8), 1))
    folder = write_pictures(tmp_path / "data", "pil", pictures)
    with pytest.raises(RunError, match=r"sample 3: .*mode P was stored without its palette"):
        read_one(folder)


def test_more_pixels_than_bytes_are_bad_before_there_is_room_for_them(tmp_path, monkeypatch):
    folder = write_pictures(tmp_path / "data", "pil", [Image.new("RGB", (8, 8))] * 4)
    shard = folder / "shard.00000.mds"
    wrong = struct.pack("<3I", 60_000, 60_000, 3)
    shard.write_bytes(shard.read_bytes().replace(struct.pack("<3I", 8, 8, 3), wrong, 1))
    monkeypatch.setattr(Image, "new", None)  # which makes the room
    with pytest.raises(RunError, match="sample 0: .*60000 x 60000 pixels in 192 bytes"):
        read_one(folder)


@pytest.mark.parametrize(
    ("columns", "value"),
    [
        ({"image": "bytes", "text": "json"}, "json"),
        ({"image": "json", "text": "str"}, "json"),
        ({"title": "bytes", "text": "str"}, "columns text, title"),
    ],
)
def test_columns_that_hold_no_pictures_or_no_text(columns, value, tmp_path):
    row = [b"a" if kind == "bytes" else "a" for kind in columns.values()]
    write_shards(tmp_path / "data", columns, [row])
    with refused(value=value):
        data.check(make_config(tmp_path / "data", device_batch_size=1))


@pytest.mark.parametrize("column", ["jpg", "more"])
def test_code_in_a_column_is_not_run(column, tmp_path):
    harm = Harm(tmp_path / "harm")
    columns = {"jpg": "bytes", "caption": "str"} | {column: "pkl"}
    row = {"jpg": datasets.make_png(0), "caption": "a caption"} | {column: harm}
    write_shards(tmp_path / "data", columns, [row.values()] * 4)
    place = ["--remote", str(tmp_path / "data"), "--results_dir", str(tmp_path / "runs")]
    sizes = ["--image_size", "16", "--batch_size", "4", "--num_workers", "0"]
    assert program.main([*place, *sizes]) == 2
    assert verify.main([str(tmp_path / "data"), "--deep"]) == 1
    harm.check_not_done()


def test_streams_may_name_their_columns_differently(mds_folder, tmp_path):
    pictures = [Image.open(io.BytesIO(datasets.make_png(50)))] * 49
    other = write_pictures(tmp_path / "other", "png", pictures)
    streams = f"{mds_folder}=0.75,{other}=0.25"
    config = make_config(None, streams=streams)
    assert data.check(config) == 98
    found = read_epoch(config)
    assert found.count(50) == 24
    assert len(found) == 96


def test_a_release_of_streaming_with_other_methods_is_refused(monkeypatch):
    for changed in (lambda self, shard, retries: 0, None):
        monkeypatch.setattr(compat.Stream, "prepare_shard", changed)
        with pytest.raises(ImportError, match="Stream.prepare_shard"):
            compat.check_overridden()

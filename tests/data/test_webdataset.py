"""Are tars read as the webdataset library reads them, and never less than all of them?"""

from __future__ import annotations

import functools
import json
import lzma
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from sdbench import data
from sdbench.base.cache import private_folder
from sdbench.base.errors import RunError
from sdbench.cli import main
from sdbench.data.checks import tell_once
from tests.data import datasets
from tests.data.datasets import encode, indices, make_png, make_source, read_epoch, write_tar
from tests.refusals import refused

PIXEL = make_png(0)
Members = list[tuple[str, bytes]]


@pytest.fixture(autouse=True)
def index_folder(temporary_folder) -> Path:
    """The folder that indexes come to, of this test alone."""
    return private_folder("tar-indexes")


def pair(number: int, *, image: bytes | None = None, **metadata) -> Members:
    """The members of a sample, with a json where there is metadata."""
    members = [(f"{number:03d}.png", make_png(number) if image is None else image)]
    members.append((f"{number:03d}.txt", f"picture {number}".encode()))
    if metadata:
        members.append((f"{number:03d}.json", json.dumps(metadata).encode()))
    return members


def pairs(*numbers: int) -> Members:
    return [member for number in numbers for member in pair(number)]


make_config = functools.partial(
    make_source, "webdataset", image_size=16, device_batch_size=1, shuffle=False
)


def read_all(place: Path | str, **changes) -> list[tuple[str, bytes | None, str | None]]:
    """Key, image and caption of each sample."""
    samples = data.open_samples(make_config(place, **changes))
    found = [samples.read(number) for number in range(len(samples))]
    return [(sample.name.rpartition(": ")[2], sample.image, sample.caption) for sample in found]


def test_samples_are_those_of_the_webdataset_library(tmp_path):
    members = [
        ("README", b"no sample"),
        ("__meta__/a.png", b"no sample"),
        ("a.png", b"0"),
        ("LICENSE", b"inside a sample"),
        ("a.txt", b"zero"),
        ("b.JPG", b"1"),
        ("b.seg.png", b"a mask"),
        ("b.Txt", b"one"),
        ("folder.d/a.jpeg", b"2"),
        ("folder.d/a.txt", b"two"),
        ("./deep/er/a.WebP", b"3"),
        ("./deep/er/a.txt", b"three"),
        ("d/a.jpg", b"4"),
        ("d/a.txt", b"another folder"),
        (f"{'long/' * 40}a.png", b"5"),
        (f"{'long/' * 40}a.txt", b"a name of more than 100 characters"),
    ]
    tar = write_tar(tmp_path / "a.tar", members)
    found = read_all(tar)
    library = webdataset.WebDataset(str(tar), shardshuffle=False, empty_check=False)
    for (key, image, caption), sample in zip(found, library, strict=True):
        assert (key, caption) == (sample["__key__"], sample["txt"].decode())
        kind = next(name for name in ("jpg", "jpeg", "png", "webp") if name in sample)
        assert image == sample[kind]
    assert [image for _, image, _ in found] == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_captions_come_from_txt_then_json_and_are_stripped(tmp_path):
    of_json = ("json", b'{"caption": "of the json"}')
    texts = {
        "Gr\u00fc\u00dfe": [of_json, ("txt", " Gr\u00fc\u00dfe\n".encode())],
        "of the json": [of_json],
        "marked": [("txt", "\ufeffmarked".encode())],
        "marked twice": [("json", '\ufeff{"caption": "\ufeffmarked twice"}'.encode())],
    }
    members = []
    for number, files in enumerate(texts.values()):
        members += [(f"{number}.{kind}", content) for kind, content in [("png", PIXEL), *files]]
    tar = write_tar(tmp_path / "a.tar", members)
    assert [caption for *_, caption in read_all(tar)] == [*texts]


@pytest.mark.parametrize("prompts", [["a cat", "a dog"], {"0": "a cat", "1": "a dog"}])
def test_class_prompts_name_the_classes(prompts, tmp_path):
    members = [("0.png", PIXEL), ("0.cls", b"1\n"), ("0.txt", b"dog.png")]
    members += [("1.png", PIXEL), ("1.cls", b"0")]
    tar = write_tar(tmp_path / "a.tar", members)
    (tmp_path / "classes.json").write_text(json.dumps(prompts), encoding="utf-8-sig")
    found = read_all(tar, class_prompts=str(tmp_path / "classes.json"))
    assert [caption for *_, caption in found] == ["a dog", "a cat"]


def test_class_prompts_that_cannot_be_read(tmp_path):
    tar = write_tar(tmp_path / "a.tar", pairs(0))
    path = tmp_path / "classes.json"
    for content in (None, "{", "5", '{"cat": "a cat"}', "[1, 2]", "[" * 100_000):
        if content is not None:
            path.write_text(content)
        with refused("--class_prompts", value=str(path)):
            data.check(make_config(tar, class_prompts=str(path)))


# One of each kind.
FILTERED = [
    pair(0, pwatermark=0.4, lang="en"),
    pair(1, pwatermark=0.6, lang="en"),
    pair(2, lang="en"),
    pair(3),
    pair(4, pwatermark=None, lang="en"),
    pair(5, pwatermark="0.4", lang="en"),
    [*pair(6), ("006.json", b"{broken")],
    [*pair(7), ("007.json", b"[0.4]")],
    pair(8, pwatermark=0.4, lang="de"),
    [("README.md", b"no sample: not counted")],
    [*pair(9), ("009.json", b"[" * 100_000)],
]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"pwatermark": "<=0.5"}, [0, 8]),
        ({"pwatermark": ">0.5 and <= 1"}, [1]),
        ({"pwatermark": "<=0.5", "lang": "== en"}, [0]),
        ({}, list(range(10))),
    ],
)
def test_filtered_samples_are_dropped_and_counted(filters, expected, tmp_path):
    tar = write_tar(tmp_path / "a.tar", [member for sample in FILTERED for member in sample])
    config = make_config(tar, filters=filters)
    assert data.check(config) == len(expected)
    loader = data.build(config)
    assert indices(list(loader)) == expected
    assert loader.stats.num_dropped_samples == 10 - len(expected)


def test_filters_that_drop_everything(tmp_path):
    config = make_config(write_tar(tmp_path / "a.tar", pair(0)), filters={"width": ">=512"})
    with refused("--filters", value={"width": ">=512"}):
        data.check(config)


# What is done to a tar whose members end at the byte `end`; each has a header of 512 bytes, and
# the text of the last one takes 512 more.
DAMAGE = {
    "cut behind a member": lambda tar, end: tar[:end],
    "cut behind a header": lambda tar, end: tar[: end - 512],
    "cut in a header": lambda tar, end: tar[: end - 600],
    "cut between png and txt": lambda tar, end: tar[: end - 1024],
    "cut in a png": lambda tar, end: tar[: end - 1100],
    "broken header": lambda tar, end: tar[: end - 1024] + b"x" + tar[end - 1023 :],
    "two tars": lambda tar, end: tar * 2,
    "too many zeros": lambda tar, end: tar + bytes(2**21),
    "a record of zeros too many": lambda tar, end: tar + bytes(10_240),
    "zeros from the second sample": lambda tar, end: tar[: end - 4096].ljust(20_480, b"\0"),
    "zeros alone": lambda tar, end: bytes(len(tar)),
    "nothing": lambda tar, end: b"",
    "text": lambda tar, end: b"no tar" * 1000,
    "zip": lambda tar, end: b"PK\x03\x04" + bytes(2000),
    "xz": lambda tar, end: lzma.compress(tar),
    "negative size": lambda tar, end: make_negative(tar, -512),
    "size of the member before": lambda tar, end: make_negative(tar, -1024),
}


def make_negative(tar: bytes, size: int) -> bytes:
    """Python's tarfile would go back, and read the members before without an end."""
    content = bytearray(tar)
    header = content[(begin := content.index(b"001.png")) : begin + 512]
    header[124:136] = b"\xff" + (256**11 + size).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    content[begin : begin + 512] = header
    return bytes(content)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_tar_or_none_is_named(damage, tmp_path):
    tar = write_tar(tmp_path / "a.tar", pairs(0, 1, 2))
    content = tar.read_bytes()
    end = len(content.rstrip(b"\0")) // 512 * 512 + 512
    tar.write_bytes(content[: end + 100])  # inside the blocks of zeros at the end
    assert data.check(make_config(tar)) == 3
    tar.write_bytes(DAMAGE[damage](content, end))
    told = ".*: a member has a negative size" if "size" in damage else ""
    with pytest.raises(RunError, match=f"a.tar is damaged{told}"):
        data.check(make_config(tar))


def test_a_tar_that_ends_with_as_many_zeros_as_fill_a_record_is_whole(tmp_path):
    # Its members take 19 of the 20 blocks of a record: the second zero block begins another one.
    blocks_of_png = -(-len(PIXEL) // 512)
    caption = b"a" * 512 * (19 - 1 - blocks_of_png - 1)
    tar = write_tar(tmp_path / "a.tar", [("0.png", PIXEL), ("0.txt", caption)])
    content = tar.read_bytes()
    assert len(content) - len(content.rstrip(b"\0")) == 10_240 + 512
    assert data.check(make_config(tar)) == 1


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar"])
def test_a_tar_that_is_packed_is_read_like_its_twin(name, tmp_path, temporary_folder, capsys):
    tar = write_tar(tmp_path / "packed" / name, pairs(0, 1, 2), mode="w:gz")
    before = tar.read_bytes()
    expected = read_all(write_tar(tmp_path / "twin.tar", pairs(0, 1, 2)))
    for place in (tar, tar.parent, f"pipe:cat {tar}"):
        assert read_all(place) == expected
        assert data.detect_format(str(place)) == "webdataset"
    assert [path.name for path in tar.parent.iterdir()] == [name]
    assert tar.read_bytes() == before
    assert f"are unpacked to {temporary_folder}/sdbench/" in capsys.readouterr().err
    assert read_all(tar, local=str(tmp_path / "mine")) == expected
    assert len(list((tmp_path / "mine").glob(f"*-{name}"))) == 1
    write_tar(tar, pairs(5), mode="w:gz")
    assert [key for key, *_ in read_all(tar)] == ["005"]


def test_a_packed_tar_that_is_damaged_is_named(tmp_path, capsys):
    tar = write_tar(tmp_path / "a.tar.gz", pairs(0, 1, 2), mode="w:gz")
    content = bytearray(tar.read_bytes())
    for damaged in (content[:-20], content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]):
        tar.write_bytes(damaged)
        assert main(["verify-data", str(tar), "--num_workers", "0"]) == 1
        assert f"broken: {tar} cannot be read: " in capsys.readouterr().out


def test_a_tar_that_is_there_twice_is_not_read_twice(tmp_path):
    tar = write_tar(tmp_path / "a.tar", pairs(0))
    with refused(value=str(tar)):
        data.check(make_config(f"{tmp_path}/{{a,a}}.tar"))
    link = tmp_path / "b.tar"
    link.symlink_to("a.tar")
    with refused(value=f"{tar}, {link}"):
        data.check(make_config(tmp_path))
    link.unlink()
    packed = write_tar(tmp_path / "a.tar.gz", pairs(0), mode="w:gz")
    with refused(value=f"{tar}, {packed}"):
        data.check(make_config(tmp_path))


@pytest.mark.parametrize("kind", ["symbolic", "hard", "sparse"])
def test_a_sample_that_is_no_whole_file_is_refused(kind, tmp_path):
    with (tmp_path / "000.png").open("wb") as file:
        file.truncate(100_000)
    for name, make in (("symbolic", os.symlink), ("hard", os.link), ("sparse", shutil.copy)):
        make(tmp_path / "000.png", tmp_path / f"{name}.png")
    names = ["000.png", f"{kind}.png"] if kind != "sparse" else ["--sparse", "000.png"]
    command = ["tar", "-C", str(tmp_path), "--format=posix", "-cf", str(tmp_path / "a.tar")]
    subprocess.run([*command, *names], check=True)
    with pytest.raises(RunError, match=f"a.tar holds {names[1]} as a link or a sparse file"):
        data.check(make_config(tmp_path / "a.tar"))


def test_what_programs_leave_in_a_tar_is_no_sample(tmp_path):
    """Not beside the pictures, nor in folders of its own; the archive's own `./` hides nothing."""
    left = ("./a/._0.png", "./__MACOSX/a/._0.png", "__MACOSX/0.png", ".ipynb_checkpoints/0.png")
    members = [(name, PIXEL) for name in left] + [(f"./a/{name}", file) for name, file in pairs(0)]
    found = read_all(write_tar(tmp_path / "a.tar", members))
    assert [(key, image) for key, image, _ in found] == [("./a/000", PIXEL)]


def test_a_tar_without_samples_and_a_member_that_is_there_twice(tmp_path):
    tar = write_tar(tmp_path / "empty.tar", [("README.md", b"no sample")])
    with refused(value=str(tar)):
        data.check(make_config(tar))
    tar = write_tar(tmp_path / "twice.tar", [("a.png", PIXEL), ("a.PNG", PIXEL)])
    with pytest.raises(RunError, match=r"twice.tar is damaged: it holds a.png twice"):
        data.check(make_config(tar))


def test_a_tar_without_members_is_refused_among_others(tmp_path, capsys):
    """As a copy leaves it that reserved its space, or a writer without samples."""
    write_tar(tmp_path / "0.tar", pairs(0, 1))
    empty = write_tar(tmp_path / "1.tar", [])
    with pytest.raises(RunError, match=r"1.tar is damaged: it is a tar without members"):
        data.check(make_config(tmp_path))
    assert main(["verify-data", str(tmp_path)]) == 1
    assert f"broken: {empty} is damaged" in capsys.readouterr().out
    sizes = tmp_path / "sizes.json"
    assert main(["verify-data", str(tmp_path), "--count", "--out", str(sizes)]) == 1
    assert json.loads(sizes.read_text()) == {"0.tar": 2}


APART = {
    "appended": [*pairs(0, 1, 2), ("001.txt", b"corrected")],
    "a whole sample appended": [*pairs(0, 1, 2), *pairs(1)],
    "pictures before captions": [pair(0)[0], pair(1)[0], pair(0)[1], pair(1)[1]],
}


@pytest.mark.parametrize("members", APART.values(), ids=APART)
def test_a_sample_whose_files_are_apart_is_named(members, tmp_path, capsys):
    """WebDataset takes them for two: both captions would be trained on, or neither."""
    tar = write_tar(tmp_path / "a.tar", members)
    told = r"a.tar holds files of 00[01] in two places.*--sort=name"
    with pytest.raises(RunError, match=told):
        data.check(make_config(tar))
    assert main(["verify-data", str(tar)]) == 1
    # The advice works.
    (tmp_path / "unpacked").mkdir()
    for command in (
        ["tar", "-C", "unpacked", "-xf", "a.tar"],
        ["tar", "-C", "unpacked", "--sort=name", "-cf", "b.tar", "."],
    ):
        subprocess.run(command, check=True, cwd=tmp_path)
    assert len(read_all(tmp_path / "b.tar")) == len({name[:3] for name, _ in members})


@pytest.mark.parametrize("target", ["real", "./real", "/data/real", "../real", "real/."])
def test_a_link_to_a_folder_is_refused(target, tmp_path):
    for name in ("linked", "linked.v2", "deep/linked"):
        link = tarfile.TarInfo(name)
        link.type, link.linkname = tarfile.SYMTYPE, target
        if name.startswith("deep") and not target.startswith("/"):
            link.linkname = f"../{target}"
        tar = write_tar(tmp_path / "a.tar", [(f"real/{name}", file) for name, file in pairs(0)])
        with tarfile.open(tar, "a") as file:
            file.addfile(link)
        leads_out = target in ("/data/real", "../real")
        what = "a link out of the tar" if leads_out else "a link to a folder"
        with pytest.raises(RunError, match=f"a.tar holds {name} as {what}.*--deref"):
            data.check(make_config(tar))


@pytest.mark.parametrize(
    ("name", "target", "is_refused"),
    [
        ("LICENSE", "../LICENSE", True),  # a folder may have this name
        ("sub", "../other.v2", True),
        ("README.md", "../README.md", False),
    ],
)
def test_a_link_out_of_the_tar_is_refused_if_it_may_be_a_folder(name, target, is_refused, tmp_path):
    tar = write_tar(tmp_path / "a.tar", pairs(0))
    with tarfile.open(tar, "a") as file:
        link = tarfile.TarInfo(name)
        link.type, link.linkname = tarfile.SYMTYPE, target
        file.addfile(link)
    if not is_refused:
        assert len(read_all(tar)) == 1
        return
    with pytest.raises(RunError, match=f"a.tar holds {name} as a link out of the tar"):
        data.check(make_config(tar))


def test_a_link_to_a_file_that_is_in_no_sample_is_no_harm(tmp_path):
    tar = write_tar(tmp_path / "a.tar", [("COPYING", b"a text"), *pairs(0)])
    with tarfile.open(tar, "a") as file:
        link = tarfile.TarInfo("LICENSE")
        link.type, link.linkname = tarfile.SYMTYPE, "COPYING"
        file.addfile(link)
    assert len(read_all(tar)) == 1


# Members beside eight samples, the pictures among them that are in no sample, and the first named.
UNUSED = {
    "edited": ([(f"{n:03d}.edit.png", PIXEL) for n in range(8)], 8, "000.edit.png"),
    "numbered": ([(f"photo.{n:03d}.png", PIXEL) for n in range(40)], 40, "photo.000.png"),
    "of other kinds": ([("a.gif", PIXEL), ("b.HEIC", PIXEL), ("b.md", b"a text")], 2, "a.gif"),
    "in two kinds": ([("000.jpg", PIXEL)], 1, "000.png"),
    "none": ([("a.md", b"a text"), ("000.json", b"{}")], 0, ""),
}


@pytest.mark.parametrize(("others", "num_unused", "first"), UNUSED.values(), ids=UNUSED)
def test_pictures_in_no_sample_are_counted_at_the_start(others, num_unused, first, tmp_path, capfd):
    members = sorted([*pairs(*range(8)), *others])
    tar = write_tar(tmp_path / "a.tar", members)
    for _ in range(2):  # the second time the index is kept
        tell_once.cache_clear()
        data.check(make_config(tar, read_avif=True))
        told = capfd.readouterr().err
        if not num_unused:
            assert told == ""
        else:
            are = "pictures of {} are" if num_unused > 1 else "picture of {} is"
            assert told.startswith(f"{num_unused} {are.format(tar)} in no sample: {first}")
    out = ["--folder", str(tmp_path / "out"), "--on_bad_sample", "skip", "--max_bad_fraction", "1"]
    for argv in (["verify-data", str(tar)], ["convert", str(tar), *out, "--num_workers", "0"]):
        tell_once.cache_clear()
        main(argv)
        assert (" in no sample: " in capfd.readouterr().err) == (num_unused > 0)


def test_pictures_in_no_sample_are_told_when_a_stream_of_them_ends(tmp_path, capfd):
    tar = write_tar(tmp_path / "a.tar", [("0.edit.png", PIXEL), ("0.png", PIXEL), ("0.txt", b"a")])
    (tmp_path / "sizes.json").write_text('{"a.tar": 1}')
    streamed = {"remote_files": "stream", "tar_sizes": str(tmp_path / "sizes.json")}
    list(data.build(make_config(f"pipe:cat {tar}", **streamed)))
    told = capfd.readouterr().err
    assert told.startswith(f"1 picture of 'pipe:cat {tar}' is in no sample: 0.edit.png.")


def half_of_a_picture(file_format: str, num_bytes: int) -> bytes:
    pixels = np.random.default_rng(0).integers(256, size=(40, 60, 3), dtype=np.uint8)
    return encode(Image.fromarray(pixels), file_format=file_format)[:num_bytes]


# Members beside or in place of the picture `PIXEL` by extension, with what is said of them.
BAD_SAMPLES = [
    ({"png": None, "txt": b"a text"}, "no image"),
    ({"png": None, "b.png": PIXEL, "b.txt": b"a key ends at the first dot"}, "no image"),
    ({}, "no caption"),
    ({"json": b'{"width": 5}'}, "no caption"),
    ({"cls": b"7"}, r"class 7 has no caption \(--class_prompts\)"),
    ({"txt": b"\xff"}, "txt cannot be read"),
    ({"json": b'{"caption": 5}'}, "json .* caption is not a text"),
    ({"json": b"[1]"}, "json cannot be read .it is not an object"),
    ({"json": b'{"caption": "one", "caption": "two"}'}, "the key 'caption' is there twice"),
    ({"json": b'{"caption": "\\ud800"}'}, "half of a character"),
    ({"json": b"[" * 100_000}, "json cannot be read"),
    ({"png": b"", "txt": b"a text"}, "the image has 0 bytes"),
    ({"png": half_of_a_picture("JPEG", 1500), "txt": b"a"}, "the image cannot be decoded"),
    ({"png": half_of_a_picture("PNG", 3000), "txt": b"a"}, "the image cannot be decoded"),
]


@pytest.mark.parametrize(("bad", "what"), BAD_SAMPLES)
def test_a_bad_sample_is_named_or_skipped(bad, what, tmp_path, capfd):
    """Among seven good samples a bad one, sample 1, is an error, or skipped and counted."""
    members = {"png": PIXEL, **bad}
    bad = [(f"bad.{name}", content) for name, content in members.items() if content is not None]
    tar = write_tar(tmp_path / "a.tar", [*pairs(0), *bad, *pairs(2, 3, 4, 5, 6, 7)])
    with pytest.raises(RunError, match=f"a.tar: bad: .*{what}.*--on_bad_sample skip"):
        list(data.build(make_config(tar, device_batch_size=4)))
    skipping = {"device_batch_size": 4, "on_bad_sample": "skip"}
    loader = data.build(make_config(tar, **skipping, max_bad_fraction=0.125))
    assert indices(list(loader)) == [0, 2, 3, 0, 4, 5, 6, 7]
    assert loader.stats.num_bad_samples == 1
    assert "Skipped a bad sample: " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "no text_embedding.npy"),
        (b"", "text_embedding.npy cannot be read"),
        (b"PK\x03\x04", "text_embedding.npy cannot be read"),
        (b"\x93NUMPY\x01\x00\x08\x00{'descr'", "text_embedding.npy cannot be read"),
        (np.zeros((77, 4), np.float16), r"shape \(77, 4\), \(77, 8\) is needed"),
        (np.zeros((77, 8), object), "text_embedding.npy cannot be read"),
    ],
)
def test_a_damaged_array_is_a_bad_sample(content, what, tmp_path):
    members = []
    for index in range(8):
        arrays = datasets.make_arrays(index)
        row = {"latent_moments_32": arrays["moments"], "text_embedding": arrays["text_embedding"]}
        if index == 1 and not isinstance(content, bytes):
            row["text_embedding"] = content
        row = {name: values for name, values in row.items() if values is not None}
        members += datasets.array_members(f"{index:03d}", row)
        if index == 1 and isinstance(content, bytes):
            members[-1] = (members[-1][0], content)
    tar = write_tar(tmp_path / "a.tar", members)
    place = functools.partial(datasets.make_source, "webdataset latents", tar, shuffle=False)
    with pytest.raises(RunError, match=f"a.tar: 001.*{what}.*--on_bad_sample skip"):
        list(data.build(place()))
    skipping = place(on_bad_sample="skip", max_bad_fraction=0.125)
    loader = data.build(skipping)
    assert indices(list(loader)) == [0, 2, 3, 0, 4, 5, 6, 7]
    assert loader.stats.num_bad_samples == 1


def test_latents_are_found_behind_a_tar_without_samples(tmp_path):
    write_tar(tmp_path / "0.tar", [("README.md", b"no sample")])
    members = []
    for index in range(4):
        arrays = datasets.make_arrays(index)
        row = {"latents_32": arrays["latent"], "text_embedding": arrays["text_embedding"]}
        members += datasets.array_members(f"{index:03d}", row)
    write_tar(tmp_path / "1.tar", members)
    place = datasets.make_source("webdataset latents", tmp_path, shuffle=False)
    assert read_epoch(place) == [0, 1, 2, 3]
    (tmp_path / "1.tar").unlink()
    with refused(value=str(tmp_path)):
        data.check(place)


def test_a_replaced_tar_is_indexed_anew_and_not_read_by_an_old_index(tmp_path):
    tar = write_tar(tmp_path / "a.tar", pairs(0, 1))
    samples = data.open_samples(make_config(tar))
    samples.read(0)
    other = write_tar(tmp_path / "other", pairs(3, 4))
    assert other.stat().st_size == tar.stat().st_size
    other.replace(tar)
    with pytest.raises(RunError, match=r"a.tar has been changed since it was indexed"):
        samples.read(1)
    assert read_epoch(make_config(tar)) == [3, 4]
    tar.unlink()
    with pytest.raises(RunError, match=r"a.tar cannot be read any more"):
        samples.read(1)


def test_a_tar_is_indexed_once(tmp_path, index_folder):
    write_tar(tmp_path / "a.tar", pairs(0, 1))
    write_tar(tmp_path / "b.tar", pairs(2))
    written = []
    for _ in range(2):
        assert data.check(make_config(tmp_path)) == 3
        written.append({path: path.stat().st_mtime_ns for path in index_folder.glob("*.json")})
    assert written[0] == written[1]
    assert len(written[0]) == 2
    assert {path.suffix for path in index_folder.iterdir()} == {".json", ".lock"}

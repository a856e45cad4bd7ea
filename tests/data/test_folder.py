"""Does a plain folder give its images and captions, and say what is wrong with it?"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from PIL import Image

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.cli import main as sdbench_main
from tests.data import datasets
from tests.data.datasets import indices, read_epoch
from tests.refusals import refused

OPTIONS = {"image_size": 8, "device_batch_size": 2, "shuffle": False}
make_config = functools.partial(datasets.make_source, "folder", **OPTIONS)


@pytest.fixture
def folder(tmp_path):
    """Four pictures in two folders, without captions."""
    for index, name in enumerate(("a.PNG", "b.jpeg", "sub/a.webp", "sub/c.png")):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(datasets.make_png(index))
    return tmp_path / "pictures"


def give_captions(folder, text: str = "a caption") -> None:
    for path in [*folder.glob("*.*"), *folder.glob("sub/*")]:
        path.with_suffix(".txt").write_text(text.format(path.stem), encoding="utf-8")


def read_all(folder) -> list:
    opened = data.open_samples(make_config(folder))
    return [opened.read(index) for index in range(len(opened))]


def test_a_text_beside_each_image(folder):
    give_captions(folder, "\ufeff caption of {}\n")
    found = read_all(folder)
    assert [sample.caption for sample in found] == [f"caption of {stem}" for stem in "abac"]
    assert read_epoch(make_config(folder)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "header"), [("captions.csv", "file,caption"), ("metadata.csv", "file_name,text")]
)
def test_a_table_of_captions(name, header, folder, capsys):
    (folder / name).write_text(
        f'\ufeff\n{header}\nsub/c.png,"last, and\nfirst"\n\na.PNG,"\ufeffa ""one"""\n'
    )
    assert [sample.caption for sample in read_all(folder)] == ["last, and\nfirst", 'a "one"']
    assert read_epoch(make_config(folder)) == [3, 0]
    told = f"Of {folder} 2 images are read, and no other files: 1 .jpeg, 1 .webp.\n"
    assert capsys.readouterr().err == told  # once, although opened twice above


@pytest.mark.parametrize(
    ("table", "value"),
    [
        (None, "{folder}"),
        ("file;caption\na;b\n", "file;caption"),
        ("file,caption\n", "{folder}"),
        ("file,caption\na.PNG,\nb.jpeg\n", "{folder}"),
        ("file,caption\nx.png,a\ny.png,b\n", "{folder}"),
    ],
)
def test_no_captions_or_a_table_that_is_of_no_use(table, value, folder):
    if table is not None:
        (folder / "captions.csv").write_text(table)
    with refused(value=value.format(folder=folder)):
        data.check(make_config(folder))


# Each loses the captions of a row or more to a reader that does not look for it: the line of that
# row, a part of what is said of it, and the table, which is JSON lines if it begins with a brace.
HEADER = "file,caption\n"
LOSSES = {
    "a comma without quotes": (3, "3 cells", f"{HEADER}a.PNG,1\nb.jpeg,2, and more\nsub/c.png,3\n"),
    "no end of a quote": (4, "cannot be read", f'{HEADER}a.PNG,1\n\nb.jpeg,"2\nsub/c.png,3\n'),
    "text behind a quote": (3, "cannot be read", f'{HEADER}a.PNG,1\nb.jpeg,"2" and more\n'),
    "the next row closes": (2, "cannot be read", f'{HEADER}a.PNG,"1\nb.jpeg,"2"\nsub/c.png,3\n'),
    "another column": (2, "not closed", 'file,by,caption\na.PNG,"Al,1\nb.jpeg,Bo 5",2\n'),
    "an inch closes a quote": (2, "not closed", f'{HEADER}a.PNG,"1\nb.jpeg,2 of 5"\nc.png,3\n'),
    "no UTF-8": (3, "cannot be read", f"{HEADER}a.PNG,one\nb.jpeg,\xe4\n"),
    "a column twice": (1, "a column twice", "file,caption,caption\na.PNG,one,two\n"),
    "a key twice": (1, "twice", '{"file_name": "a.PNG", "text": "1", "text": "2"}\n'),
    "Python": (2, "cannot be read", "{}\n{'file_name': 'a.PNG'}\n"),
    "deep": (2, "cannot be read", "{}\n" + "[" * 100_000),
    "a list": (2, "it is not an object", '{}\n["a.PNG", "one"]\n'),
    "two captions": (2, "is not a text", '{}\n{"file_name": "a.PNG", "text": ["one", "two"]}\n'),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_no_row_of_a_table_is_lost_without_a_word(kind, folder):
    line, fault, rows = LOSSES[kind]
    table = folder / ("metadata.jsonl" if rows.startswith("{") else "captions.csv")
    table.write_bytes(rows.encode("latin-1"))
    with refused() as caught:
        data.check(make_config(folder))
    assert f"row at line {line} of {table} " in caught.value.what
    assert fault in caught.value.what


def replace_by_link(image: Path, target: str) -> None:
    image.unlink()
    image.symlink_to(target)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "b.txt").unlink(), "b.jpeg: no caption."),
        (
            lambda folder: (folder / "b.txt").write_bytes(b"\xe4"),
            "b.jpeg: its caption is not UTF-8",
        ),
        (lambda folder: (folder / "b.jpeg").write_bytes(b""), "b.jpeg: the image has 0 bytes."),
        (
            lambda folder: replace_by_link(folder / "b.jpeg", "/nowhere/b"),
            "b.jpeg: the link leads to /nowhere/b, which is not there.",
        ),
        (  # as from a disk that fails: an I/O error
            lambda folder: replace_by_link(folder / "b.jpeg", "/proc/self/mem"),
            "b.jpeg: it cannot be read .Input/output error",
        ),
    ],
)
def test_one_bad_sample_stops_or_is_replaced(damage, message, folder, capsys):
    give_captions(folder)
    damage(folder)
    with pytest.raises(RunError, match=f"{message}.*--on_bad_sample skip goes on"):
        list(data.build(make_config(folder)))
    loader = data.build(make_config(folder, on_bad_sample="skip", max_bad_fraction=0.25))
    assert indices(list(loader)) == [0, 0, 2, 3]
    assert loader.stats.num_bad_samples == 1
    assert re.search(f"Skipped a bad sample: {folder}/{message}", capsys.readouterr().err)
    with pytest.raises(RunError, match=r"1 sample .* more than 24.00% of 4 \(--max_bad_fraction"):
        list(data.build(make_config(folder, on_bad_sample="skip", max_bad_fraction=0.24)))


def test_a_batch_without_any_good_sample_is_an_error(folder):
    (folder / "sub" / "a.txt").write_text("a caption")
    config = make_config(folder, on_bad_sample="skip", max_bad_fraction=1.0)
    with pytest.raises(RunError, match="All 2 samples of a batch are bad: .*a.PNG: no caption"):
        list(data.build(config))


def test_a_table_of_json_lines(folder, capsys):
    """As Hugging Face's image folders have it; U+2028 is no end of a line there."""
    (folder / "metadata.jsonl").write_text(
        '{"file_name": "sub/c.png", "text": "three\u2028four", "width": 60}\n\n'
        '{"text": " one ", "file_name": "a.PNG"}\n{"file_name": "b.jpeg", "text": null}\n'
    )
    assert [sample.caption for sample in read_all(folder)] == ["three\u2028four", "one", None]
    assert "3 images are read, and no other files: 1 .webp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ('{"file_name": "a.PNG", "text": "\\ud800"}', "a.PNG: the caption has half of a character"),
        ('{"file_name": "%s.png", "text": "one"}' % ("x" * 5000), "x.png: no image"),
        ('{"text": "one"}', "pictures/(row 2: no file): no image."),
    ],
)
def test_a_row_that_names_no_picture_or_text_of_a_disk_is_a_bad_sample(row, told, folder, capsys):
    (folder / "metadata.jsonl").write_text(f'{{"file_name": "b.jpeg", "text": "two"}}\n{row}\n')
    assert sdbench_main(["verify-data", str(folder), "--deep", "--num_workers", "0"]) == 1
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["data", "data/train", "training"])
def test_hugging_faces_folders(layout, folder, tmp_path, capsys):
    """The split for training is read; another beside it is named, not trained on."""
    dataset = tmp_path / "dataset"
    (dataset / layout).parent.mkdir(parents=True, exist_ok=True)
    (dataset / "README.md").touch()
    (dataset / ".gitattributes").touch()
    folder.rename(dataset / layout)
    (dataset / layout / "metadata.csv").write_text("file_name,text\na.PNG,one\nsub/c.png,two\n")
    assert data.detect_format(str(dataset)) == "folder"
    assert read_epoch(make_config(dataset)) == [0, 3]
    assert "split" not in capsys.readouterr().err
    if layout == "data":
        return
    test = (dataset / layout).with_name("test")
    test.mkdir()
    (test / "x.png").write_bytes(datasets.make_png(9))
    assert read_epoch(make_config(dataset)) == [0, 3]
    told = f"The split for training is read, not {test / 'x.png'}.\n"
    assert capsys.readouterr().err.count(told) == 1
    give_captions(dataset / layout)
    (dataset / layout / "metadata.csv").unlink()
    assert data.check(make_config(dataset)) == 4
    (dataset / layout).rename(test.parent / "more")
    assert data.check(make_config(dataset)) == 5  # one data set, without a split for training


def test_what_programs_leave_is_no_sample(folder):
    for name in ("._a.PNG", "__MACOSX/b.jpeg", ".ipynb_checkpoints/a-checkpoint.PNG"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\0\x05\x16\x07")
        (folder / name).with_suffix(".txt").write_text("a caption")
    give_captions(folder)
    assert read_epoch(make_config(folder)) == [0, 1, 2, 3]
    (folder / "captions.csv").write_text("file,caption\na.PNG,one\nb.jpeg,two\n")
    assert read_epoch(make_config(folder)) == [0, 1]


def test_folders_behind_links_are_read_once(folder, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    (other / "z.png").write_bytes(datasets.make_png(7))
    (folder / "linked").symlink_to(other)
    (folder / "again").symlink_to(folder / "sub")
    (other / "back").symlink_to(folder)
    for path in (*other.glob("*.png"), *folder.glob("*.*"), *folder.glob("sub/*")):
        path.with_suffix(".txt").write_text("a caption")
    config = make_config(folder, device_batch_size=5)
    assert read_epoch(config) == [0, 1, 7, 2, 3]
    told = capsys.readouterr().err.splitlines()
    assert told == [
        f"{path} is a folder that is read already, under another name."
        for path in (folder / "again", folder / "linked" / "back")
    ]


def test_a_link_to_no_picture_that_leads_nowhere_is_refused(folder, tmp_path):
    """It may have been a folder of a thousand pictures, on a disk that is not mounted."""
    give_captions(folder)
    (folder / "more").symlink_to(tmp_path / "gone")
    with refused(value=str(folder / "more")):
        data.check(make_config(folder))


def test_pictures_of_a_phone_are_named_with_the_way_to_convert_them(folder, capsys):
    """By name beside others, alone in a folder, and under the name of another kind."""
    give_captions(folder)
    heic = b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic"
    for name in ("IMG_1.HEIC", "sub/IMG_2.heif"):
        (folder / name).write_bytes(heic)
    assert data.check(make_config(folder)) == 4
    way = f"to make JPEG files of HEIC: mogrify -format jpg {folder}/*.HEIC {folder}/sub/*.heif ("
    assert f"1 .heic, 1 .heif.\nHEIC pictures are not read; {way}" in capsys.readouterr().err
    for path in [*folder.glob("*.*"), *folder.glob("sub/*")]:
        if path.suffix.lower() not in (".heic", ".heif"):
            path.unlink()
    with refused(value=str(folder)) as caught:
        data.check(make_config(folder))
    assert f"no images, but 1 .heic, 1 .heif; {way}" in str(caught.value)
    (folder / "a.jpg").write_bytes(heic)
    (folder / "a.txt").write_text("a caption")
    with pytest.raises(RunError, match=r"a.jpg: .*like a HEIC file \(ImageMagick"):
        list(data.build(make_config(folder, device_batch_size=1)))


def test_avif_is_read_only_if_asked_for(folder, tmp_path):
    """By name and by content."""
    give_captions(folder)
    avif = datasets.encode(Image.open(folder / "a.PNG"), file_format="AVIF")
    (folder / "d.avif").write_bytes(avif)
    (folder / "d.txt").write_text("a caption")
    assert data.check(make_config(folder)) == 4
    assert read_epoch(make_config(folder, read_avif=True)) == [0, 1, 0, 2]
    (folder / "a.PNG").write_bytes(avif)
    with pytest.raises(RunError, match=r"a.PNG: .*an AVIF file, .* AVIF files with --read_avif"):
        list(data.build(make_config(folder)))
    tars = [(f"0.{kind}", content) for kind, content in (("avif", avif), ("txt", b"a caption"))]
    datasets.write_tar(tmp_path / "tars" / "0.tar", tars)
    tars = functools.partial(datasets.make_source, "webdataset", tmp_path / "tars")
    assert read_epoch(tars(device_batch_size=1, read_avif=True)) == [0]
    with pytest.raises(RunError, match=": no image"):
        read_epoch(tars(device_batch_size=1))

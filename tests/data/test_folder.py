"""Does a plain folder give its images and captions, and say what is wrong with it?"""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest
from PIL import Image

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.cli import main as sdbench_main
from sdbench.data.source import SourceConfig
from tests.data import datasets
from tests.data.datasets import indices
from tests.refusals import refused


def make_config(folder, *, data_format: str = "folder", **changes) -> SourceConfig:
    options = {"image_size": 8, "device_batch_size": 2, "shuffle": False, **changes}
    return datasets.make_source(data_format, folder, **options)


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
    assert indices(list(data.build(make_config(folder)))) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "header"), [("captions.csv", "file,caption"), ("metadata.csv", "file_name,text")]
)
def test_a_table_of_captions(name, header, folder, capsys):
    (folder / name).write_text(
        f'\ufeff\n{header}\nsub/c.png,"last, and\nfirst"\n\na.PNG,"\ufeffa ""one"""\n'
    )
    assert [sample.caption for sample in read_all(folder)] == ["last, and\nfirst", 'a "one"']
    assert indices(list(data.build(make_config(folder)))) == [3, 0]
    told = f"Of {folder} 2 images are read, and no other files: 1 .jpeg, 1 .webp.\n"
    assert capsys.readouterr().err == told  # once, although opened twice above


@pytest.mark.parametrize(
    ("table", "value"),
    [
        (b"file;caption\na;b\n", "file;caption"),
        (b"file,caption\n", "{folder}"),
        (b"file,caption\na.PNG,\nb.jpeg\n", "{folder}"),
        (b"file,caption\nx.png,a\ny.png,b\n", "{folder}"),
    ],
)
def test_a_table_that_is_of_no_use(table, value, folder):
    (folder / "captions.csv").write_bytes(table)
    with refused(value=value.format(folder=folder)):
        data.check(make_config(folder))


# Each loses the captions of a row or more to a reader that does not look for it: the line of that
# row, a part of what is said of it, and the table, which is JSON lines if it begins with a brace.
LOSSES = {
    "a comma without quotes": (3, "3 cells", "a.PNG,one\nb.jpeg,two, and more\nsub/c.png,three\n"),
    "no end of a quote": (4, "cannot be read", 'a.PNG,one\n\nb.jpeg,"two\nsub/c.png,three\n'),
    "text behind a quote": (3, "cannot be read", 'a.PNG,one\nb.jpeg,"two" and more\n'),
    "a quote that the next row closes": (
        2,
        "cannot be read",
        'a.PNG,"one\nb.jpeg,"two"\nsub/c.png,3\n',
    ),
    "another column": (2, "not closed", 'a.PNG,"Al,one\nb.jpeg,Bo 5",two\nsub/c.png,Cy,three\n'),
    "an inch that closes a quote": (2, "not closed", 'a.PNG,"one\nb.jpeg,two of 5"\nc.png,three\n'),
    "no UTF-8": (3, "cannot be read", "a.PNG,one\nb.jpeg,\xe4\n"),
    "a column that is there twice": (1, "a column twice", "a.PNG,one,two\n"),
    "a key that is there twice": (1, "twice", '{"file_name": "a.PNG", "text": "1", "text": "2"}\n'),
    "Python": (2, "cannot be read", "{}\n{'file_name': 'a.PNG'}\n"),
    "deep": (2, "cannot be read", "{}\n" + "[" * 100_000),
    "a list": (2, "it is no object", '{}\n["a.PNG", "one"]\n'),
    "two captions": (2, "no text", '{}\n{"file_name": "a.PNG", "text": ["one", "two"]}\n'),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_no_row_of_a_table_is_lost_without_a_word(kind, folder):
    line, fault, rows = LOSSES[kind]
    table = folder / ("metadata.jsonl" if rows.startswith("{") else "captions.csv")
    headers = {"another column": "file,author,caption"}
    headers["a column that is there twice"] = "file,caption,caption"
    header = headers.get(kind, "file,caption")
    table.write_bytes((rows if table.suffix == ".jsonl" else f"{header}\n{rows}").encode("latin-1"))
    with refused() as caught:
        data.check(make_config(folder))
    assert f"row at line {line} of {table} " in caught.value.what
    assert fault in caught.value.what


def test_a_folder_without_captions_is_refused(folder):
    with refused(value=str(folder)) as caught:
        data.check(make_config(folder))
    assert caught.value.what == "None of the 4 images has a caption"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "b.txt").unlink(), "b.jpeg: no caption."),
        (
            lambda folder: (folder / "b.txt").write_bytes(b"\xe4"),
            "b.jpeg: its caption is not UTF-8",
        ),
        (lambda folder: (folder / "b.jpeg").write_bytes(b""), "b.jpeg: the image has 0 bytes."),
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
    assert f"Skipped a bad sample: {folder}/{message}" in capsys.readouterr().err
    with pytest.raises(RunError, match=r"1 samples .* more than 24.00% of 4 \(--max_bad_fraction"):
        list(data.build(make_config(folder, on_bad_sample="skip", max_bad_fraction=0.24)))


def test_a_picture_that_the_disk_does_not_give_is_a_bad_sample(folder, monkeypatch):
    give_captions(folder)
    read = Path.read_bytes

    def read_or_fail(path: Path) -> bytes:
        if path.name == "b.jpeg":
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_or_fail)
    with pytest.raises(RunError, match="b.jpeg: it cannot be read .Input/output error"):
        list(data.build(make_config(folder)))
    loader = data.build(make_config(folder, on_bad_sample="skip", max_bad_fraction=0.25))
    assert indices(list(loader)) == [0, 0, 2, 3]


def test_a_batch_without_any_good_sample_is_an_error(folder):
    (folder / "sub" / "a.txt").write_text("a caption")
    config = make_config(folder, on_bad_sample="skip", max_bad_fraction=1.0)
    with pytest.raises(RunError, match="All 2 samples of a batch are bad: .*a.PNG: no caption"):
        list(data.build(config))


def test_a_row_without_a_file_is_named(folder):
    (folder / "captions.csv").write_text("file,caption\na.PNG,one\n,two\nb.jpeg,three\n")
    with pytest.raises(RunError, match=r"pictures/\(row 2: no file\): no image."):
        list(data.build(make_config(folder)))


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
    ],
)
def test_what_json_can_hold_and_a_disk_cannot_is_a_bad_sample(row, told, folder, capsys):
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
    assert indices(list(data.build(make_config(dataset)))) == [0, 3]
    assert "split" not in capsys.readouterr().err
    if layout == "data":
        return
    test = (dataset / layout).with_name("test")
    test.mkdir()
    (test / "x.png").write_bytes(datasets.make_png(9))
    assert indices(list(data.build(make_config(dataset)))) == [0, 3]
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
    assert indices(list(data.build(make_config(folder)))) == [0, 1, 2, 3]
    (folder / "captions.csv").write_text("file,caption\na.PNG,one\nb.jpeg,two\n")
    assert indices(list(data.build(make_config(folder)))) == [0, 1]


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
    assert indices(list(data.build(config))) == [0, 1, 7, 2, 3]
    told = capsys.readouterr().err.splitlines()
    assert told == [
        f"{path} is a folder that is read already, under another name."
        for path in (folder / "again", folder / "linked" / "back")
    ]


def test_links_that_lead_nowhere(folder, tmp_path):
    give_captions(folder)
    gone = tmp_path / "gone"
    (folder / "b.jpeg").unlink()
    (folder / "b.jpeg").symlink_to(gone)
    with pytest.raises(RunError, match=f"b.jpeg: the link leads to {gone}, which is not there."):
        list(data.build(make_config(folder)))
    loader = data.build(make_config(folder, on_bad_sample="skip", max_bad_fraction=0.25))
    assert indices(list(loader)) == [0, 0, 2, 3]
    # It may have been a folder of a thousand pictures, on a disk that is not mounted.
    (folder / "more").symlink_to(gone)
    with refused(value=str(folder / "more")):
        data.check(make_config(folder))


def test_avif_is_read_only_if_asked_for(folder, tmp_path):
    """By name and by content."""
    give_captions(folder)
    avif = datasets.encode(Image.open(folder / "a.PNG"), file_format="AVIF")
    (folder / "d.avif").write_bytes(avif)
    (folder / "d.txt").write_text("a caption")
    assert data.check(make_config(folder)) == 4
    assert indices(list(data.build(make_config(folder, read_avif=True)))) == [0, 1, 0, 2]
    (folder / "a.PNG").write_bytes(avif)
    with pytest.raises(RunError, match=r"a.PNG: .*an AVIF file, .* AVIF files with --read_avif"):
        list(data.build(make_config(folder)))
    tars = [(f"0.{kind}", content) for kind, content in (("avif", avif), ("txt", b"a caption"))]
    datasets.write_tar(tmp_path / "tars" / "0.tar", tars)
    config = make_config(tmp_path / "tars", data_format="webdataset", device_batch_size=1)
    assert indices(list(data.build(dataclasses.replace(config, read_avif=True)))) == [0]
    with pytest.raises(RunError, match=": no image"):
        list(data.build(config))

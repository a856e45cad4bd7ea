"""Does a plain folder give its images and captions, and say what is wrong with it?"""

from __future__ import annotations

import pytest

from data import main as data_main
from sdbench import data
from sdbench.base.errors import RunError
from sdbench.cli import main as sdbench_main
from sdbench.data.pipeline.tokenizer import CaptionTokenizer
from sdbench.data.source import SourceConfig
from tests.data import datasets
from tests.data.datasets import indices
from tests.refusals import refused


def make_config(folder, **changes) -> SourceConfig:
    options = {"image_size": 8, "device_batch_size": 2, "seed": 0, "shuffle": False, **changes}
    return SourceConfig(data_format="folder", remote=str(folder), **options)


@pytest.fixture
def folder(tmp_path):
    """Four pictures in two folders, without captions."""
    for index, name in enumerate(("a.PNG", "b.jpeg", "sub/a.webp", "sub/c.png")):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(datasets.make_png(index))
    return tmp_path / "pictures"


def read_all(folder) -> list:
    opened = data.open_samples(make_config(folder))
    return [opened.read(index) for index in range(len(opened))]


def test_a_text_beside_each_image(folder):
    for path in [*folder.glob("*.*"), *folder.glob("sub/*")]:
        path.with_suffix(".txt").write_text(f" caption of {path.stem}\n")
    found = read_all(folder)
    assert [sample.caption for sample in found] == [f"caption of {stem}" for stem in "abac"]
    assert indices(list(data.build(make_config(folder)))) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "header"), [("captions.csv", "file,caption"), ("metadata.csv", "file_name,text")]
)
def test_a_table_of_captions(name, header, folder, capsys):
    (folder / name).write_text(
        f'\ufeff{header}\nsub/c.png,"last, and\nfirst"\n\na.PNG,"\ufeffa ""one"""\n'
    )
    assert [sample.caption for sample in read_all(folder)] == ["last, and\nfirst", 'a "one"']
    assert indices(list(data.build(make_config(folder)))) == [3, 0]
    told = f"2 images of {folder} are not in its table of captions.\n"
    assert capsys.readouterr().err == told * 2  # opened twice above


@pytest.mark.parametrize(
    ("table", "value"),
    [
        ("file;caption\na;b\n", "file;caption"),
        ("file,caption\n", "{folder}"),
        ("file,caption\na.PNG,\nb.jpeg\n", "{folder}"),
        ("file,caption\nx.png,a\ny.png,b\n", "{folder}"),
        (b"file,caption\na.PNG,\xe4\n", "{folder}/captions.csv"),
    ],
)
def test_a_table_that_is_of_no_use(table, value, folder):
    content = table if isinstance(table, bytes) else table.encode()
    (folder / "captions.csv").write_bytes(content)
    with refused(value=value.format(folder=folder)):
        data.check(make_config(folder))


# Each loses the captions of a row or more to a reader that does not look for it.
LOSSES = {
    "a comma without quotes": (3, "a.PNG,one\nb.jpeg,two, and more\nsub/c.png,three\n"),
    "no end of a quote": (4, 'a.PNG,one\n\nb.jpeg,"two\nsub/c.png,three\n'),
    "text behind a quote": (3, 'a.PNG,one\nb.jpeg,"two" and more\n'),
    "a quote that the next row closes": (2, 'a.PNG,"one\nb.jpeg,"two"\nsub/c.png,three\n'),
    "another column": (2, 'a.PNG,"Al,one\nb.jpeg,Bo 5",two\nsub/c.png,Cy,three\n'),
    "an inch that closes a quote": (2, 'a.PNG,"one\nb.jpeg,two of 5"\nsub/c.png,three\n'),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_no_row_of_a_table_is_lost_without_a_word(kind, folder, tmp_path, capsys):
    line, rows = LOSSES[kind]
    header = "file,author,caption" if kind == "another column" else "file,caption"
    (folder / "captions.csv").write_text(f"{header}\n{rows}")
    commands = {
        "data.py": lambda: data_main(["--remote", str(folder)]),
        "convert": lambda: sdbench_main(
            ["convert", str(folder), "--folder", str(tmp_path / "out")]
        ),
        "verify-data": lambda: sdbench_main(["verify-data", str(folder), "--deep"]),
    }
    for name, command in commands.items():
        assert command() == 2, name
        assert f"row at line {line} of {folder / 'captions.csv'} " in capsys.readouterr().err


def test_a_byte_order_mark_is_no_part_of_a_caption(folder):
    for path in [*folder.glob("*.*"), *folder.glob("sub/*")]:
        path.with_suffix(".txt").write_text("a caption", encoding="utf-8-sig")
    assert {sample.caption for sample in read_all(folder)} == {"a caption"}
    batch = next(iter(data.build(make_config(folder))))
    expected = CaptionTokenizer(pad_token_id=0)(["a caption"] * 2)
    assert batch["input_ids"].tolist() == expected.tolist()


def test_folders_without_images_or_captions(folder, tmp_path):
    with refused(value=str(folder)):
        data.check(make_config(folder))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").touch()
    with refused(value=str(tmp_path / "texts")):
        data.check(make_config(tmp_path / "texts"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "b.txt").unlink(), "b.jpeg: no caption."),
        (
            lambda folder: (folder / "b.txt").write_bytes(b"\xe4"),
            "b.jpeg: its caption is not UTF-8",
        ),
        (lambda folder: (folder / "b.txt").write_text(" \n"), "b.jpeg: no caption."),
        (lambda folder: (folder / "b.jpeg").write_bytes(b""), "b.jpeg: the image has 0 bytes."),
    ],
)
def test_one_bad_sample_stops_or_is_replaced(damage, message, folder, capsys):
    for path in [*folder.glob("*.*"), *folder.glob("sub/*")]:
        path.with_suffix(".txt").write_text("a caption")
    damage(folder)
    with pytest.raises(RunError, match=f"{message}.*--on_bad_sample skip goes on"):
        list(data.build(make_config(folder)))
    loader = data.build(make_config(folder, on_bad_sample="skip", max_bad_fraction=0.25))
    assert indices(list(loader)) == [0, 0, 2, 3]
    assert loader.stats.num_bad_samples == 1
    assert f"Skipped a bad sample: {folder}/{message}" in capsys.readouterr().err
    with pytest.raises(RunError, match=r"1 samples .* more than 24.00% of 4 \(--max_bad_fraction"):
        list(data.build(make_config(folder, on_bad_sample="skip", max_bad_fraction=0.24)))


def test_a_batch_without_any_good_sample_is_an_error(folder):
    for path in folder.glob("*.*"):
        path.with_suffix(".txt").touch()
    (folder / "sub" / "a.txt").write_text("a caption")
    config = make_config(folder, on_bad_sample="skip", max_bad_fraction=1.0)
    with pytest.raises(RunError, match="All 2 samples of a batch are bad: .*a.PNG: no caption"):
        list(data.build(config))


def test_a_row_without_a_file_is_named(folder):
    (folder / "captions.csv").write_text("file,caption\na.PNG,one\n,two\nb.jpeg,three\n")
    with pytest.raises(RunError, match=r"pictures/\(row 2: no file\): no image."):
        list(data.build(make_config(folder)))

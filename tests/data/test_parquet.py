"""Is parquet read in all the ways in which scripts write it, and its faults named?"""

from __future__ import annotations

import functools
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.cli import main
from sdbench.data.batches.tokenizer import CaptionTokenizer
from tests.data import datasets
from tests.data.datasets import indices, read_epoch
from tests.refusals import refused

NUM_ROWS = 8
LATENT, TEXT = "latents_32", "text_embedding"
OTHER_MODEL = "--model_name or --image_size"


OPTIONS = {"device_batch_size": 2, "shuffle": False}
make_config = functools.partial(datasets.make_source, "parquet", **OPTIONS)
latents_config = functools.partial(datasets.make_source, "parquet latents", **OPTIONS)
write = functools.partial(datasets.write_table, row_group_size=3)


def arrays(name: str) -> list[np.ndarray]:
    return [datasets.make_arrays(index)[name] for index in range(NUM_ROWS)]


def make_pictures(numbers) -> list[bytes]:
    return [datasets.make_png(number) for number in numbers]


def as_bytes(values: list[np.ndarray], dtype: str = "<f2") -> list[bytes]:
    return [value.astype(dtype).tobytes() for value in values]


def as_flat_lists(values: list[np.ndarray]) -> pyarrow.Array:
    kind = pyarrow.list_(pyarrow.float32(), values[0].size)
    return pyarrow.array([value.ravel().astype("f4") for value in values], type=kind)


def as_tensors(values: list[np.ndarray]) -> pyarrow.Array:
    kind = pyarrow.fixed_shape_tensor(pyarrow.float32(), values[0].shape)
    return pyarrow.ExtensionArray.from_storage(kind, as_flat_lists(values))


def as_nested_lists(values: list[np.ndarray]) -> list:
    return [value.astype("f8").tolist() for value in values]


def write_latents(path: Path, way: Callable = as_bytes) -> Path:
    return write(path, {LATENT: way(arrays("latent")), TEXT: way(arrays("text_embedding"))})


WAYS = {
    "float16 bytes": as_bytes,
    "float32 bytes": lambda values: as_bytes(values, "<f4"),
    "bytes of fixed length": lambda values: pyarrow.array(
        as_bytes(values), type=pyarrow.binary(2 * values[0].size)
    ),
    "flat lists": as_flat_lists,
    "nested lists": as_nested_lists,
    "tensors": as_tensors,
}


@pytest.mark.parametrize("way", WAYS)
def test_latents_are_read_however_they_are_stored(way, tmp_path):
    place = write_latents(tmp_path / "a.parquet", WAYS[way])
    assert data.check(latents_config(place)) == NUM_ROWS
    batches = list(data.build(latents_config(place)))
    assert indices(batches) == list(range(NUM_ROWS))
    for name in ("latent", "text_embedding"):
        found = np.concatenate([batch[name] for batch in batches])
        assert np.array_equal(found, np.stack(arrays(name)))


@pytest.mark.parametrize(
    ("part", "change", "told"),
    [
        (LATENT, lambda array: array.reshape(8, 8).tolist(), "(8, 8), not (4, 4, 4)"),
        (TEXT, lambda array: array.T.tolist(), "(8, 77), not (77, 8)"),
        (TEXT, lambda array: [[*array[0], 1.0], array[1][1:], *array[2:]], "not all of one"),
    ],
)
def test_lists_nested_in_another_order_are_no_latents(part, change, told, tmp_path):
    """As many numbers: in other lists, transposed, or in lists of different lengths."""
    columns = {}
    for column, name in ((LATENT, "latent"), (TEXT, "text_embedding")):
        values = [value.astype("f8") for value in arrays(name)]
        columns[column] = [change(one) if column == part else one.tolist() for one in values]
    with refused(OTHER_MODEL) as caught:
        data.check(latents_config(write(tmp_path / "a.parquet", columns)))
    assert told in str(caught.value)


def test_tensors_of_another_shape_are_no_latents(tmp_path):
    """Ray stores them flat, and their shape beside them."""
    latents, texts = (as_flat_lists(arrays(name)) for name in ("latent", "text_embedding"))

    def write_tensors(*shape_of_texts: int) -> Path:
        fields = []
        for name, values, shape in ((LATENT, latents, (4, 4, 4)), (TEXT, texts, shape_of_texts)):
            told = {"ARROW:extension:name": "ray.data.arrow_tensor_v2"}
            told["ARROW:extension:metadata"] = json.dumps(shape)
            fields.append(pyarrow.field(name, values.type, metadata=told))
        table = pyarrow.Table.from_arrays([latents, texts], schema=pyarrow.schema(fields))
        return write(tmp_path / "a.parquet", table)

    assert data.check(latents_config(write_tensors(77, 8))) == NUM_ROWS
    with refused(value="tensors of the shape (8, 77)"):
        data.check(latents_config(write_tensors(8, 77)))


def test_a_width_that_only_looks_right_is_refused(tmp_path):
    """77 x 4 float32 are as many bytes as 77 x 8 float16; here in the last of two files."""
    write_latents(tmp_path / "data" / "0.parquet")
    narrow = [value[:, :4] for value in arrays("text_embedding")]
    columns = {LATENT: as_bytes(arrays("latent"), "<f4"), TEXT: as_bytes(narrow, "<f4")}
    write(tmp_path / "data" / "1.parquet", columns)
    with refused(OTHER_MODEL, value="32 px, embeddings of width 8") as caught:
        data.check(latents_config(tmp_path / "data"))
    assert "1.parquet" in caught.value.what


def test_samples_may_be_pickled_after_a_read(tmp_path):
    samples = data.open_samples(latents_config(write_latents(tmp_path / "a.parquet")))
    first = samples.read(0).arrays["latent"]
    assert np.array_equal(pickle.loads(pickle.dumps(samples)).read(0).arrays["latent"], first)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "row 1 of row group 1, latents_32: no value."),
        (b"123", r"latents_32: 3 bytes; \(4, 4, 4\) is 128 as float16 or 256 as float32."),
        (np.full(64, np.nan, "<f2").tobytes(), "latent: a value is NaN"),
        (np.full(64, 1e5, "<f4").tobytes(), "latent: .*beyond float16's 65504"),
    ],
)
def test_a_bad_row_is_a_bad_sample(value, message, tmp_path):
    dtype = "<f4" if value is not None and len(value) == 256 else "<f2"
    latents, texts = (as_bytes(arrays(name), dtype) for name in ("latent", "text_embedding"))
    latents[4] = value
    place = write(tmp_path / "a.parquet", {LATENT: latents, TEXT: texts})
    with pytest.raises(RunError, match=message):
        read_epoch(latents_config(place))
    config = latents_config(place, on_bad_sample="skip", max_bad_fraction=0.2)
    assert read_epoch(config) == [0, 1, 2, 3, 5, 5, 6, 7]


@pytest.mark.parametrize(("image", "caption"), [("image.bytes", "TEXT"), ("struct", "text")])
def test_images_under_other_names(image, caption, tmp_path):
    """Also in Hugging Face's struct of bytes and path."""
    pictures = make_pictures(range(4))
    columns = {caption: list("abcd"), "hash": [1] * 4}
    if image == "struct":
        columns["image"] = [{"bytes": file, "path": "a.png"} for file in pictures]
    else:
        columns[image] = pictures
    place = write(tmp_path / "a.parquet", columns)
    assert read_epoch(make_config(place)) == [0, 1, 2, 3]


def test_files_may_differ_in_what_is_not_read(tmp_path):
    for number, width in enumerate(([1, 2], [1.0, 2.0])):
        pictures = make_pictures((2 * number, 2 * number + 1))
        columns = {"jpg": pictures, "caption": ["a", "b"], "width": width}
        write(tmp_path / "data" / f"{number}.parquet", columns)
    assert read_epoch(make_config(tmp_path / "data")) == [0, 1, 2, 3]
    write(tmp_path / "data" / "2.parquet", {"jpg": pictures, "title": list("ab")})
    with refused(value="columns jpg, title"):
        data.check(make_config(tmp_path / "data"))


@pytest.mark.parametrize(
    ("names", "values", "value"),
    [
        (["jpg", "caption"], [[1, 2], ["a", "b"]], "int64"),
        (["jpg", "caption"], [[b"a", b"b"], [1.0, 2.0]], "double"),
        (["url", "caption"], [["a", "b"], ["a", "b"]], "columns caption, url"),
        (["jpg", "caption", "caption"], [[b"a"], ["a"], ["b"]], "columns caption, caption, jpg"),
        ([LATENT, TEXT], [[[1] * 64], as_bytes(arrays("text_embedding")[:1])], "list<element: int"),
    ],
)
def test_columns_of_other_types_or_names(names, values, value, tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(column) for column in values], names=names)
    make = latents_config if LATENT in names else make_config
    with refused() as caught:
        data.check(make(write(tmp_path / "a.parquet", table)))
    assert caught.value.value.startswith(value)


def test_damaged_files_are_named(tmp_path):
    pictures = [datasets.make_png(index) * 20 for index in range(NUM_ROWS)]
    place = write(tmp_path / "a.parquet", {"jpg": pictures, "caption": list("abcdefgh")})
    whole = place.read_bytes()
    loader = data.build(make_config(place))
    place.write_bytes(whole[:40] + bytes(400) + whole[440:])
    with pytest.raises(RunError, match="a.parquet is damaged or missing"):
        list(loader)
    place.write_bytes(whole)
    os.truncate(place, len(whole) // 2)
    with refused(value=str(place)):
        data.check(make_config(place))
    with refused(value=str(tmp_path / "none.parquet")):
        data.check(make_config(tmp_path / "none.parquet"))


@pytest.mark.parametrize(
    ("of_pictures", "of_texts"),
    [
        (pyarrow.binary_view(), pyarrow.string_view()),
        (pyarrow.large_binary(), pyarrow.large_string()),
        (
            pyarrow.dictionary(pyarrow.int32(), pyarrow.binary()),
            pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
        ),
    ],
    ids=["views", "large", "categories"],
)
def test_the_types_that_pandas_and_polars_write(of_pictures, of_texts, tmp_path):
    captions = ["a cat", "a dog", "a cat", "a bird", "a cat", "a dog"]
    columns = {
        "jpg": pyarrow.array(make_pictures(range(6)), type=of_pictures),
        "caption": pyarrow.array(captions, type=of_texts),
    }
    place = write(tmp_path / "a.parquet", columns)
    stored = pyarrow.parquet.read_schema(place)
    assert [stored.field(name).type for name in columns] == [of_pictures, of_texts]
    (batch,) = data.build(make_config(place, device_batch_size=6))
    assert indices([batch]) == list(range(6))
    assert batch["input_ids"].tolist() == CaptionTokenizer(pad_token_id=0)(captions).tolist()


def test_a_caption_that_is_missing_is_bad_and_an_empty_one_is_not(tmp_path):
    columns = {"jpg": make_pictures(range(4)), "caption": ["a", "", "c", None]}
    place = write(tmp_path / "a.parquet", columns)
    skip = {"device_batch_size": 4, "on_bad_sample": "skip", "max_bad_fraction": 0.5}
    for empty_captions, expected in (("keep", [0, 1, 2, 0]), ("bad", [0, 2, 0, 2])):
        assert read_epoch(make_config(place, empty_captions=empty_captions, **skip)) == expected


def test_a_caption_that_is_no_utf_8_is_bad(tmp_path):
    stored = pyarrow.array([b"a", b"\xe4", b"c", b"d"])
    captions = pyarrow.Array.from_buffers(pyarrow.string(), 4, stored.buffers())
    columns = {"jpg": make_pictures(range(4)), "caption": captions}
    place = write(tmp_path / "a.parquet", columns, row_group_size=4)
    with pytest.raises(RunError, match="row 1 of row group 0: its caption is not UTF-8"):
        read_epoch(make_config(place))


def test_damage_that_no_decoder_sees_is_found(mds_folder, tmp_path, capsys):
    """A bit in the zeros behind the end of a picture, by the checksum of its page."""
    out = tmp_path / "out"
    flags = ["--out_format", "parquet", "--num_workers", "0"]
    assert main(["convert", str(mds_folder), "--folder", str(out), *flags]) == 0
    assert read_epoch(make_config(out)) == list(range(48))
    file, _ = sorted(out.glob("*.parquet"))
    datasets.flip_a_bit(file, position=file.read_bytes().index(bytes(60_000)))
    assert main(["verify-data", str(out), "--deep"]) == 1
    assert f"broken: {file} is damaged or missing" in capsys.readouterr().out
    with pytest.raises(RunError, match="is damaged or missing .*CRC"):
        read_epoch(make_config(out))


def test_hugging_faces_files_of_the_split_for_training(tmp_path, capsys):
    dataset = tmp_path / "dataset"
    for name, numbers in (
        ("train-00000-of-00002", (0, 1)),
        ("train-00001-of-00002", (2, 3)),
        ("test-00000-of-00001", (8, 9)),
        ("._train-00000-of-00002", ()),
    ):
        columns = {"image": make_pictures(numbers), "text": ["a caption"] * len(numbers)}
        write(dataset / "data" / f"{name}.parquet", columns)
    (dataset / "README.md").touch()
    for place in (dataset, dataset / "data"):
        assert data.detect_format(str(place)) == "parquet"
        assert read_epoch(make_config(place)) == [0, 1, 2, 3]
    told = f"The split for training is read, not {dataset}/data/test-00000-of-00001.parquet.\n"
    assert capsys.readouterr().err.count(told) == 1
    held_out = dataset / "data" / "test-{00000..00000}-of-00001.parquet"
    assert read_epoch(make_config(held_out)) == [8, 9]


def test_a_file_without_rows_is_refused(tmp_path):
    types = {"jpg": pyarrow.binary(), "caption": pyarrow.string()}
    columns = {name: pyarrow.array([], type=kind) for name, kind in types.items()}
    place = write(tmp_path / "a.parquet", columns)
    with refused(value=str(place), allowed="one with samples"):
        data.check(make_config(place))

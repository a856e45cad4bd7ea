"""Do batches have what a model asks for beside pictures or latents, exactly as it was stored?"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import sys

import numpy as np
import pytest
import torch

from sdbench import data
from sdbench.base.conditions import T5, Captions, Condition, ModelInputs
from sdbench.base.errors import ConfigError, RunError
from sdbench.data.convert.convert import main as convert
from sdbench.data.convert.verify import main as verify
from sdbench.data.formats.identity import PROVENANCE_NAME
from tests.data import datasets
from tests.data.datasets import NUM_SAMPLES, read_mds
from tests.refusals import PLACE_FLAGS, refused

# A model of three text encoders, which is told the sizes of pictures.
CAPTIONS = (
    Captions(),
    Captions(name="input_ids_2", pad_token_id=49407),
    Captions(name="input_ids_3", kind=T5, num_tokens=12),
)
CONDITIONS = (
    Condition(shape=(77, 8)),
    Condition(name="pooled_embedding", shape=(6,)),
    Condition(name="t5_embedding", shape=(12, 4), dtype="float32"),
)
INPUTS = ModelInputs(captions=CAPTIONS, conditions=CONDITIONS, latent_channels=16, tells_sizes=True)
# As precompute describes it.
ENCODED = {
    "latent_channels": 16,
    "tells_sizes": True,
    "conditions": [
        {"name": "text_embedding", "shape": [77, 8], "dtype": "float16"},
        {"name": "pooled_embedding", "shape": [6], "dtype": "float16"},
        {"name": "t5_embedding", "shape": [12, 4], "dtype": "float32"},
    ],
}
COLUMNS = {
    "latent_moments_32": "ndarray:float16:32,4,4",
    "text_embedding": "ndarray:float16:77,8",
    "pooled_embedding": "ndarray:float16:6",
    "t5_embedding": "ndarray:float32:12,4",
    "sizes_32": "ndarray:float32:6",
}


def make_row(index: int) -> dict[str, np.ndarray]:
    """A sample; T5's states are beyond float16."""
    row = {}
    for number, (name, encoding) in enumerate(COLUMNS.items()):
        _, dtype, shape = encoding.split(":")
        row[name] = np.full([int(side) for side in shape.split(",")], index + number, dtype)
    row["latent_moments_32"][16:] = -index
    row["t5_embedding"] *= 100_000
    row["sizes_32"][:] = [400 + index, 600, 0, 8, 32, 32]
    return row


def write_mds(folder, *, left_out: str | None = None, damage=lambda row: None):
    """Six samples in the columns of precompute, by Streaming's writer."""
    columns = {name: encoding for name, encoding in COLUMNS.items() if name != left_out}
    rows = [make_row(index) for index in range(6)]
    damage(rows[3])
    return datasets.write_shards(folder, columns, ([row[name] for name in columns] for row in rows))


def write_parquet(folder, *, left_out: str | None = None, damage=lambda row: None):
    """The same as bytes in a table."""
    rows = [make_row(index) for index in range(6)]
    damage(rows[3])
    names = [name for name in COLUMNS if name != left_out]
    columns = {name: [row[name].tobytes() for row in rows] for name in names}
    datasets.write_table(folder / "part.parquet", columns, row_group_size=4)
    return folder


def write_tar(folder, *, left_out: str | None = None, damage=lambda row: None):
    """The same as files of numpy's in a tar."""
    rows = [make_row(index) for index in range(6)]
    damage(rows[3])
    members = []
    for index, row in enumerate(rows):
        kept = {name: values for name, values in row.items() if name != left_out}
        members += datasets.array_members(f"{index:03d}", kept)
    datasets.write_tar(folder / "0.tar", members)
    return folder


WRITERS = {
    "mds latents": write_mds,
    "parquet latents": write_parquet,
    "webdataset latents": write_tar,
}
# T5's states as bfloat16, whose bits are those of the first half of a float32.
BITS_COLUMN, BITS_ENCODING = "t5_embedding_bf16", "ndarray:uint16:12,4"


@pytest.fixture
def with_bits(monkeypatch):
    """Whatever is written has the states of T5 as bfloat16."""
    columns = {
        (BITS_COLUMN if name == "t5_embedding" else name): encoding
        for name, encoding in COLUMNS.items()
    }
    columns[BITS_COLUMN] = BITS_ENCODING
    whole = make_row

    def make(index: int) -> dict[str, np.ndarray]:
        row = whole(index)
        states = torch.from_numpy(row["t5_embedding"]).to(torch.bfloat16)
        bits = states.view(torch.int16).numpy().view(np.uint16)
        return {name: bits if name == BITS_COLUMN else row[name] for name in columns}

    rows = [make(index) for index in range(6)]
    monkeypatch.setattr(sys.modules[__name__], "make_row", lambda index: rows[index])
    monkeypatch.setattr(sys.modules[__name__], "COLUMNS", columns)


@pytest.mark.parametrize("kind", WRITERS)
def test_states_stored_as_bfloat16_come_as_the_float32_of_the_same_value(kind, tmp_path, with_bits):
    folder = WRITERS[kind](tmp_path / "data")
    source = datasets.make_source(kind, folder, shuffle=False, device_batch_size=6, inputs=INPUTS)
    (batch,) = data.build(source)
    states = 100_000 * (torch.arange(6) + 3)[:, None, None].expand(6, 12, 4).float()
    assert torch.equal(batch["t5_embedding"], states.bfloat16().float())
    assert batch["sizes"].tolist() == [[400 + index, 600, 0, 8, 32, 32] for index in range(6)]


@pytest.mark.parametrize("kind", ["mds latents", "webdataset latents"])
def test_bits_of_another_type_are_not_taken_for_bfloat16(kind, tmp_path, with_bits, monkeypatch):
    half = {**COLUMNS, BITS_COLUMN: "ndarray:float16:12,4"}
    monkeypatch.setattr(sys.modules[__name__], "COLUMNS", half)
    rows = [make_row(index) for index in range(6)]
    for row in rows:
        row[BITS_COLUMN] = row[BITS_COLUMN].view(np.float16)
    folder = WRITERS[kind](tmp_path / "data")
    with pytest.raises((ConfigError, RunError), match="uint16 with the bits of bfloat16"):
        list(data.build(datasets.make_source(kind, folder, inputs=INPUTS)))


def test_a_bit_of_bfloat16_that_makes_a_value_infinite_is_found_by_verify(
    tmp_path, with_bits, capsys
):
    def damage(row: dict[str, np.ndarray]) -> None:
        row[BITS_COLUMN][5, 1] = 0x7F80

    folder = write_mds(tmp_path / "data", damage=damage)
    describe(folder, dtype="bfloat16")
    assert verify([str(folder), "--deep"]) == 1
    assert "t5_embedding_bf16: a value is NaN or infinite." in capsys.readouterr().out


@pytest.mark.parametrize("out_format", ["mds", "parquet", "webdataset"])
def test_a_copy_has_the_same_bits_of_bfloat16(out_format, tmp_path, with_bits):
    folder = write_mds(tmp_path / "data")
    describe(folder, dtype="bfloat16")
    flags = ["--latents", "precomputed", "--folder"]
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    assert convert([str(folder), *flags, there, "--out_format", out_format]) == 0
    assert convert([there, *flags, back]) == 0
    for row, index in zip(read_mds(tmp_path / "back"), range(6), strict=True):
        expected = make_row(index)
        assert row.keys() == expected.keys()
        assert all(np.array_equal(row[name], expected[name]) for name in row)


def describe(folder, *, dtype: str = "float32") -> dict:
    """Say of a folder what precompute says."""
    encoded = copy.deepcopy(ENCODED)
    encoded["conditions"][2]["dtype"] = dtype
    said = {"family": "new", "weights": {"vae": "0123abcd:9"}, "encoded": encoded}
    (folder / PROVENANCE_NAME).write_text(json.dumps({"command": "precompute", **said}))
    return said


@pytest.mark.parametrize("kind", WRITERS)
def test_latents_come_with_all_conditions_in_their_types(kind, tmp_path):
    folder = WRITERS[kind](tmp_path / "data")
    source = datasets.make_source(kind, folder, shuffle=False, device_batch_size=6, inputs=INPUTS)
    (batch,) = data.build(source)
    expected = {
        "latent_mean": ((6, 16, 4, 4), torch.float16),
        "latent_logvar": ((6, 16, 4, 4), torch.float16),
        "text_embedding": ((6, 77, 8), torch.float16),
        "pooled_embedding": ((6, 6), torch.float16),
        "t5_embedding": ((6, 12, 4), torch.float32),
        "sizes": ((6, 6), torch.float32),
    }
    assert {name: (tuple(one.shape), one.dtype) for name, one in batch.items()} == expected
    numbers = torch.arange(6)
    for name, values in {
        "latent_mean": numbers,
        "latent_logvar": -numbers,
        "text_embedding": numbers + 1,
        "pooled_embedding": numbers + 2,
        "t5_embedding": 100_000 * (numbers + 3),
    }.items():
        flat = batch[name].flatten(1).double()
        assert torch.equal(flat, values[:, None].expand_as(flat).double()), name
    assert batch["sizes"].tolist() == [[400 + index, 600, 0, 8, 32, 32] for index in range(6)]


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("left_out", ["pooled_embedding", "t5_embedding", "sizes_32"])
def test_a_column_that_is_missing_is_named(kind, left_out, tmp_path):
    folder = WRITERS[kind](tmp_path / "data", left_out=left_out)
    with refused(PLACE_FLAGS) as caught:
        data.check(datasets.make_source(kind, folder, inputs=INPUTS))
    assert caught.value.what == f"The data set holds no column {left_out}"
    assert caught.value.allowed == f"{left_out}; or --latents online for images"
    assert left_out not in caught.value.value


def test_another_resolution_is_told_from_a_missing_column(tmp_path):
    folder = write_mds(tmp_path / "data")
    with refused("--image_size", value="64") as caught:
        data.check(datasets.make_source("mds latents", folder, inputs=INPUTS, image_size=64))
    assert caught.value.allowed == "32"


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_state_of_t5_that_is_not_finite_is_found(kind, value, tmp_path):
    def damage(row: dict[str, np.ndarray]) -> None:
        row["t5_embedding"][5, 1] = value

    folder = WRITERS[kind](tmp_path / "data", damage=damage)
    source = datasets.make_source(kind, folder, shuffle=False, device_batch_size=6, inputs=INPUTS)
    with pytest.raises(RunError, match=r"t5_embedding: a value is NaN or infinite\."):
        list(data.build(source))


def test_conditions_of_another_shape_are_another_models(tmp_path):
    folder = write_mds(tmp_path / "data")
    wider = (*CONDITIONS[:2], Condition(name="t5_embedding", shape=(12, 5), dtype="float32"))
    with refused("--model_name", value="ndarray:float32:12,4"):
        inputs = dataclasses.replace(INPUTS, conditions=wider)
        data.check(datasets.make_source("mds latents", folder, inputs=inputs))


@pytest.mark.parametrize("out_format", ["mds", "parquet", "webdataset"])
def test_convert_and_verify_know_the_arrays_from_the_description(out_format, tmp_path, capsys):
    """Without one they take the states of Stable Diffusion, with the width of their flag."""
    folder = write_mds(tmp_path / "data")
    said = describe(folder)
    copy = tmp_path / "copy"
    flags = ["--latents", "precomputed", "--out_format", out_format]
    assert convert([str(folder), "--folder", str(copy), *flags]) == 0
    assert json.loads((copy / PROVENANCE_NAME).read_text()).items() >= said.items()
    if out_format == "mds":
        for row, index in zip(read_mds(copy), range(6), strict=True):
            expected = make_row(index)
            assert row.keys() == expected.keys()
            assert all(np.array_equal(row[name], expected[name]) for name in row)
    assert verify([str(copy), "--deep"]) == 0
    assert "each of the 6 samples can be used" in capsys.readouterr().out
    source = datasets.make_source(f"{out_format} latents", copy, device_batch_size=6, inputs=INPUTS)
    (batch,) = data.build(source)
    assert sorted(batch["t5_embedding"][:, 0, 0].tolist()) == [1e5 * (i + 3) for i in range(6)]


def test_parts_that_nothing_describes_are_not_left_out_of_a_copy(tmp_path):
    folder = write_mds(tmp_path / "data")
    flags = ["--latents", "precomputed", "--text_embedding_dim", "8", "--out_format", "parquet"]
    with refused("PLACE", value="pooled_embedding, sizes_32"):
        convert([str(folder), "--folder", str(tmp_path / "copy"), *flags])
    assert not list(tmp_path.glob("copy*"))


@pytest.mark.parametrize(
    "changes",
    [{"latent_channels": "?"}, {"conditions": [{}]}, {"conditions": 3}, {"dtype": "int8"}],
)
def test_a_description_that_cannot_be_read_is_refused(changes, tmp_path):
    folder = write_mds(tmp_path / "data")
    encoded = copy.deepcopy(ENCODED)
    (encoded["conditions"][0] if "dtype" in changes else encoded).update(changes)
    (folder / PROVENANCE_NAME).write_text(json.dumps({"encoded": encoded}))
    with refused("PLACE") as caught:
        verify([str(folder)])
    assert "does not describe its arrays" in caught.value.what


def test_pictures_come_with_the_ids_of_each_encoder_and_their_sizes(tmp_path):
    """Pictures of 60 x 40 pixels become 48 x 32; mirrored ones are mirrored before the crop."""
    datasets.write_folder(tmp_path / "data")
    source = datasets.make_source(
        "folder",
        tmp_path / "data",
        crop="random",
        horizontal_flip_probability=0.5,
        shuffle=False,
        num_workers=2,
        inputs=INPUTS,
    )
    batches = list(data.build(source))
    num_mirrored = 0
    for number, batch in enumerate(batches):
        assert list(batch["input_ids_3"].shape) == [4, 12]
        for row in range(4):
            index = 4 * number + row
            bytes_of_caption = [ord(letter) + 3 for letter in f"picture {index}"]
            ids = (bytes_of_caption[:11] + [1] + [0] * 12)[:12]
            assert batch["input_ids_3"][row].tolist() == ids
            first, second = batch["input_ids"][row].tolist(), batch["input_ids_2"][row].tolist()
            num_words = first.index(49407)
            assert first[: num_words + 1] == second[: num_words + 1]
            assert set(first[num_words + 1 :]) == {0}
            assert set(second[num_words + 1 :]) == {49407}
            x, _, flip, _ = np.random.default_rng([3, 0, index]).random(4)
            left = round(x * 20)
            if flip < 0.5:
                left = 20 - left
                num_mirrored += 1
            assert batch["sizes"][row].tolist() == [40, 60, 0, round(left * 0.8), 32, 32]
    assert 0 < num_mirrored < 48


def test_synthetic_pictures_have_the_sizes_of_squares():
    source = datasets.make_source("synthetic", None, inputs=INPUTS)
    batch = next(iter(data.build(source)))
    assert batch.keys() == {"image", "input_ids", "input_ids_2", "input_ids_3", "sizes"}
    assert batch["sizes"].tolist() == [[32, 32, 0, 0, 32, 32]] * 4
    ids = batch["input_ids_3"]
    assert ids.shape == (4, 12) and (ids[:, -1] == 1).all()
    assert ids[:, :-1].min() >= 3 and ids[:, :-1].max() < 259  # the bytes
    assert (batch["input_ids_2"][:, 0] == 49406).all()


def test_synthetic_latents_have_all_conditions():
    source = datasets.make_source("synthetic latents", None, inputs=INPUTS)
    batch = next(iter(data.build(source)))
    shapes = {name: (tuple(values.shape[1:]), values.dtype) for name, values in batch.items()}
    assert shapes == {
        "latent_mean": ((16, 4, 4), torch.float16),
        "latent_logvar": ((16, 4, 4), torch.float16),
        "text_embedding": ((77, 8), torch.float16),
        "pooled_embedding": ((6,), torch.float16),
        "t5_embedding": ((12, 4), torch.float32),
        "sizes": ((6,), torch.float32),
    }
    assert batch["sizes"].tolist() == [[32, 32, 0, 0, 32, 32]] * 4
    assert 0.7 < batch["t5_embedding"].std() < 1.3


def test_synthetic_samples_of_stable_diffusion_are_what_they_were():
    """Drawn here as they always were, in this order."""
    source = datasets.make_source("synthetic", None, num_images=NUM_SAMPLES, shuffle=False)
    batch = next(iter(data.build(source)))
    generator = np.random.default_rng([3, 0])
    images = generator.integers(0, 256, size=(64, 3, 32, 32), dtype=np.uint8)
    ids = generator.integers(0, 49408, size=(64, 77))
    ids[:, 0], ids[:, -1] = 49406, 49407
    assert np.array_equal(batch["image"].numpy(), images[:4])
    assert np.array_equal(batch["input_ids"].numpy(), ids[:4])
    source = datasets.make_source("synthetic latents", None, num_images=NUM_SAMPLES, shuffle=False)
    batch = next(iter(data.build(source)))
    generator = np.random.default_rng([3, 0])
    means = (generator.standard_normal((64, 4, 4, 4)) / 0.18215).astype(np.float16)
    texts = generator.standard_normal((64, 77, 8)).astype(np.float16)
    assert np.allclose(batch["latent_mean"].numpy(), means[:4], rtol=1e-3)
    assert np.array_equal(batch["text_embedding"].numpy(), texts[:4])


@pytest.mark.parametrize(
    ("files", "is_there"),
    [
        ({"tokenizer_config.json": '{"tokenizer_class": "ByT5Tokenizer"}'}, True),
        (
            {"tokenizer_config.json": '{"tokenizer_class": "T5Tokenizer"}', "spiece.model": ""},
            False,
        ),
        ({"tokenizer_config.json": "[]"}, False),
        ({"vocab.json": "{}", "merges.txt": ""}, False),
    ],
)
def test_a_tokenizer_of_t5_that_is_missing_is_named(files, is_there, tmp_path):
    datasets.write_folder(tmp_path / "data", num_samples=4)
    folder = tmp_path / "tokenizer_3"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    captions = (Captions(), Captions(name="input_ids_3", kind=T5, folder=folder))
    source = datasets.make_source(
        "folder", tmp_path / "data", inputs=ModelInputs(captions=captions)
    )
    if is_there:
        assert data.check(source) == 4
        return
    with refused("--model_name", value=str(folder)) as caught:
        data.check(source)
    assert re.match("tokenizer.json, or the files of a ByT5Tokenizer", caught.value.allowed)

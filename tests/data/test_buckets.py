"""Does every picture go to the bucket of its proportions, each once an epoch, whoever reads it?"""

from __future__ import annotations

import collections
import dataclasses
import io
import itertools
import math
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from sdbench import data
from sdbench.base.conditions import ModelInputs
from sdbench.base.errors import RunError
from sdbench.base.shape import Shape
from sdbench.cli import main as sdbench
from sdbench.data.buckets import TOO_SMALL, UNSERVED, Buckets, make_buckets
from sdbench.data.order import mixture
from sdbench.data.order.epochs import keys_of_first_epoch
from sdbench.data.samples import BadSampleError, shape_of
from sdbench.data.source import SourceConfig
from tests.data import datasets
from tests.data.datasets import NUM_SAMPLES, indices
from tests.refusals import refused

# Width and height of sample i: SIZES[i % 5]. Of these, (47, 40) is nearer to the square than to
# 40x24: ln(47 / 40) = 0.16, and ln(40 / 24) - 0.16 = 0.35.
SIZES = ((60, 40), (40, 60), (50, 50), (80, 40), (47, 40))
EXPECTED = ("40x24", "24x40", "32x32", "40x24", "32x32")
PICTURES = ("folder", "webdataset", "parquet", "mds")
KINDS = (*PICTURES, "webdataset latents", "parquet latents", "mds latents")
RESOLUTION = "32_buckets"


def settings(**changes) -> SimpleNamespace:
    """Settings of buckets, as the flags have them."""
    plain = {
        "buckets": "auto",
        "bucket_step": None,
        "max_aspect_ratio": 2.0,
        "small_pictures": "enlarge",
    }
    return SimpleNamespace(**{**plain, **changes})


def buckets_of(image_size: int = 32, multiple: int = 8, **changes) -> Buckets:
    return make_buckets(settings(**changes), image_size=image_size, multiple=multiple)


def shapes_of(*args, **changes) -> list[str]:
    return [str(shape) for shape in buckets_of(*args, **changes).shapes]


def make_picture(index: int) -> bytes:
    """The picture of a sample, all of the value 5 i, in its own size."""
    width, height = SIZES[index % len(SIZES)]
    return datasets.encode(Image.fromarray(np.full((height, width, 3), 5 * index, dtype=np.uint8)))


def make_moments(index: int) -> np.ndarray:
    """Moments of the shape of the sample's bucket: means of i / 8, log-variances of -i / 8."""
    width, height = (int(side) // 8 for side in EXPECTED[index % len(SIZES)].split("x"))
    mean = np.full((4, height, width), index / 8, dtype=np.float16)
    return np.concatenate([mean, -mean])


def write_latents(kind: str, folder: Path) -> None:
    """Latents of several shapes, as other programs could write them."""
    column, rows = f"latent_moments_{RESOLUTION}", range(NUM_SAMPLES)
    embeddings = [datasets.make_arrays(index)["text_embedding"] for index in rows]
    if kind.startswith("mds"):
        columns = {column: "ndarray:float16", "text_embedding": "ndarray:float16:77,8"}
        values = ((make_moments(index), embeddings[index]) for index in rows)
        datasets.write_shards(folder, columns, values, size_limit=2**15, hashes=["sha1"])
    elif kind.startswith("parquet"):
        table = {
            column: [[list(plane) for plane in make_moments(index)] for index in rows],
            "text_embedding": [embedding.tobytes() for embedding in embeddings],
        }
        datasets.write_table(folder / "part.parquet", table, row_group_size=16)
    else:
        members = []
        for index in rows:
            arrays = {column: make_moments(index), "text_embedding": embeddings[index]}
            members += datasets.array_members(f"{index:06d}", arrays)
        datasets.write_tar(folder / "0.tar", members)


@pytest.fixture(scope="module")
def make_config(tmp_path_factory):
    """A function from a kind of data, and what differs, to the config of its source."""
    root = tmp_path_factory.mktemp("buckets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "make_png", make_picture)
        for kind in PICTURES:
            datasets.WRITERS[kind](root / kind)
    for kind in KINDS[len(PICTURES) :]:
        write_latents(kind, root / kind)

    def make(kind: str, **changes) -> SourceConfig:
        place = None if kind.startswith("synthetic") else root / kind
        options = {"buckets": "auto", "shapes": buckets_of(), **changes}
        return datasets.make_source(kind, place, **options)

    return make


def test_the_shapes_of_a_size_have_at_most_its_pixels_and_the_longest_sides_that_fit():
    assert shapes_of(512, 64) == ["512x512", "448x576", "576x448", "384x640", "640x384"]
    assert shapes_of(512, 64, max_aspect_ratio=1.2) == ["512x512"]
    assert shapes_of(512, 64, bucket_step=128) == ["512x512", "384x640", "640x384"]
    # In SDXL's own list, of which these have at most 2: 1.81 and 1.71 are as near.
    assert {"1024x1024", "1152x896", "1216x832", "1344x768"} <= set(shapes_of(1024, 32))
    assert shapes_of(32, 8) == ["32x32", "24x40", "40x24"]
    # There is always a square: in steps of 64, 480 has none.
    assert shapes_of(480, 32)[0] == "480x480"
    # A small size takes the steps of the model: in steps of 64 there would be the square alone.
    assert shapes_of(64, 16) == ["64x64", "48x80", "80x48"]
    assert shapes_of(buckets="64x32,32x64,64x32") == ["64x32", "32x64"]
    mixed = buckets_of(32, 8, buckets="16=0.25,32=.75")
    assert [budget.share for budget in mixed.budgets] == [0.25, 0.75]
    assert [str(one) for one in mixed.shapes] == ["16x16", "32x32", "24x40", "40x24"]


def own_bucket(width: int, height: int, shapes: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The rule in other words: by how much the longer quotient of proportions exceeds 1."""

    def excess(shape: tuple[int, int]) -> float:
        quotient = (width / height) / (shape[0] / shape[1])
        return max(quotient, 1 / quotient)

    least = min(map(excess, shapes))
    nearest = [shape for shape in shapes if math.isclose(excess(shape), least, rel_tol=1e-9)]
    return None if least > 2 else max(nearest, key=lambda shape: shape[0] * shape[1])


def own_cut(picture: Image.Image, shape: tuple[int, int], crop: tuple[float, float] | None):
    """Scale to cover, cut off the rest: the box in the picture, and the pixels by PIL."""
    width, height = picture.size
    scale = max(shape[0] / width, shape[1] / height)
    box_width, box_height = (
        min(round(side / scale), most) for side, most in zip(shape, picture.size, strict=True)
    )
    spare = width - box_width, height - box_height
    if crop is None:
        left, top = (pixels // 2 for pixels in spare)
    else:
        left, top = (round(place * pixels) for place, pixels in zip(crop, spare, strict=True))
    box = picture.convert("RGB").crop((left, top, left + box_width, top + box_height))
    return (left, top, box_width, box_height), box.resize(shape, Image.Resampling.BICUBIC)


def make_pictures(folder: Path, sources: list[Image.Image]) -> list[Path]:
    """500 pictures of all kinds: formats, modes, orientations, sizes from 24 to 400 px a side."""
    random, paths = np.random.default_rng(7), []
    folder.mkdir()
    for number in range(500):
        width = int(random.integers(24, 400))
        height = round(width * 2 ** random.uniform(-2, 2))
        picture = sources[number % len(sources)].resize((width, max(height, 8)))
        ending = ("jpg", "png", "webp")[number % 3]
        mode = ("RGB", "L", "RGBA", "P")[number % 4] if ending == "png" else "RGB"
        path = folder / f"{number:03d}.{ending}"
        exif = Image.Exif()
        if ending == "jpg":
            exif[ExifTags.Base.Orientation] = 1 + number % 8
        picture.convert(mode).save(path, exif=exif, quality=92)
        path.with_suffix(".txt").write_text(f"picture {number}")
        paths.append(path)
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("crop", ["center", "random"])
def test_buckets_and_pixels_of_500_pictures_are_those_of_an_independent_reading(
    crop, tmp_path, repository
):
    with tarfile.open(repository / "tests/assets/openmoji-slice.tar") as tar:
        files = [
            tar.extractfile(member).read() for member in tar if member.name.endswith(("jpg", "png"))
        ]
    sources = [Image.open(io.BytesIO(file)).convert("RGB") for file in files[:12]]
    paths = make_pictures(tmp_path / "pictures", sources)
    shapes = buckets_of(64, 8)
    listed = [tuple(shape) for shape in shapes.shapes]
    config = datasets.make_source(
        "folder",
        tmp_path / "pictures",
        image_size=64,
        buckets="auto",
        shapes=shapes,
        crop=crop,
        on_bad_sample="skip",
        max_bad_fraction=0.2,
        inputs=ModelInputs(tells_sizes=True),
    )
    reader = data.open_batches(config)
    uprights = [ImageOps.exif_transpose(Image.open(path)) for path in paths]
    expected = [own_bucket(*upright.size, listed) for upright in uprights]
    assert 5 < expected.count(None) < 100 and len({*expected}) == len(listed) + 1
    assert (reader.mixture.bucket_of == UNSERVED).sum() == expected.count(None)
    own_enlarged = sum(
        upright.width < shape[0] or upright.height < shape[1]
        for upright, shape in zip(uprights, expected, strict=True)
        if shape is not None
    )
    assert reader.mixture.num_enlarged == own_enlarged > 50
    errors = []
    for of_shape in reader.split(range(500)):
        batch = reader.read_good(keys_of_first_epoch(of_shape))
        for position, index in enumerate(of_shape):
            assert shape_of(batch.tensors) == expected[index], paths[index]
            place = None
            if crop == "random":
                place = tuple(np.random.default_rng([3, 0, index]).random(4)[:2])
            box, pixels = own_cut(uprights[index], expected[index], place)
            found = batch.tensors["image"][position].permute(1, 2, 0).numpy()
            errors.append(np.abs(found.astype(int) - np.asarray(pixels)).mean())
            left, top, width, height = box
            corner = round(top * found.shape[0] / height), round(left * found.shape[1] / width)
            sizes = *uprights[index].size[::-1], *corner, *found.shape[:2]
            assert batch.tensors["sizes"][position].tolist() == list(sizes)
    assert len(errors) == 500 - expected.count(None)
    # Levels of 256: torch's bicubic filter and a JPEG decoder's own reduction differ from PIL's.
    assert np.median(errors) < 0.3
    assert max(errors) < 8


def test_a_small_picture_is_enlarged_left_out_or_taken_in_a_smaller_bucket_as_chosen():
    sizes = np.array([(31, 31), (64, 64), (20, 20), (39, 24), (40, 24), (100, 10)])
    both = "16=0.5,32=0.5"

    def assigned(**changes) -> list[str | int]:
        made = buckets_of(**changes)
        names = {TOO_SMALL: "small", UNSERVED: "unserved"}
        found = made.assign(sizes, seed=1)
        return [names.get(n, str(made.shapes[n]) if n >= 0 else "") for n in found.tolist()]

    assert assigned() == ["32x32", "32x32", "32x32", "40x24", "40x24", "unserved"]
    left_out = ["small", "32x32", "small", "small", "40x24", "unserved"]
    assert assigned(small_pictures="leave_out") == left_out
    # With one size, no shape that (31, 31) covers has fewer pixels.
    assert assigned(small_pictures="smaller_bucket") == left_out
    listed = "32x32,16x16,40x24"
    smaller = assigned(buckets=listed, small_pictures="smaller_bucket")
    assert smaller == ["16x16", "32x32", "16x16", "16x16", "40x24", "unserved"]
    # 8x24 is smaller than (31, 31), and of proportions that do not serve it.
    far = assigned(buckets="32x32,8x24,40x24", small_pictures="smaller_bucket")
    assert far == left_out
    # The seed decides which size a picture has: about half of many have each.
    made = buckets_of(buckets=both)
    found = made.assign(np.full((1000, 2), 64), seed=1)
    counts = collections.Counter(str(made.shapes[n]) for n in found.tolist())
    assert counts.keys() == {"16x16", "32x32"}
    assert 450 < counts["16x16"] < 550


def read_steps(configs: list[SourceConfig], states: list[dict] | None = None, *, epochs: int = 1):
    """The samples of each global batch, and the position after the first epoch's fifth batch."""
    steps: list[list[list[int]]] = []
    state = None
    for rank, config in enumerate(configs):
        loader = data.build(config)
        if states:
            loader.load_state_dict(states[0])
        of_rank = []
        for epoch in range(epochs):
            for number, batch in enumerate(loader):
                of_rank.append((indices([batch]), shape_of(batch)))
                if (rank, epoch, number) == (0, 0, 4):
                    state = loader.state_dict()
        loader.close()
        steps.append(of_rank)
    merged = []
    for parts in zip(*steps, strict=True):
        assert len({shape for _, shape in parts}) == 1, "all ranks have one shape in a step"
        merged.append((sorted(itertools.chain(*(some for some, _ in parts))), str(parts[0][1])))
    return merged, state


def ranks_of(config: SourceConfig, num_ranks: int, num_workers: int = 0) -> list[SourceConfig]:
    return [
        dataclasses.replace(
            config,
            rank=rank,
            world_size=num_ranks,
            num_workers=num_workers,
            device_batch_size=4 // num_ranks,
        )
        for rank in range(num_ranks)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_comes_once_an_epoch_in_its_bucket_on_any_ranks_and_workers(kind, make_config):
    config = make_config(kind)
    steps, state = read_steps(ranks_of(config, 1), epochs=3)
    for samples, shape in steps:
        assert {EXPECTED[index % len(SIZES)] for index in samples} == {shape}
    # 49 samples: 10, 10, 10, 10 and 9 of SIZES. So 20, 10 and 19 in the buckets: 3 x 20 / 4 = 15
    # batches in three epochs, 3 x 10 / 4 = 7 with two left over, 3 x 19 / 4 = 14 with one left.
    assert collections.Counter(shape for _, shape in steps) == {
        "40x24": 15,
        "24x40": 7,
        "32x32": 14,
    }
    counts = collections.Counter(itertools.chain(*(samples for samples, _ in steps)))
    missing = {index: 3 - counts[index] for index in range(NUM_SAMPLES) if counts[index] != 3}
    assert sorted(missing.values()) == [1, 1, 1]
    assert len({EXPECTED[index % 5] for index in missing}) == 2
    # The first batch of each bucket comes first; 5 + 2 + 4 batches, with 2 and 3 samples over.
    assert {shape for _, shape in steps[:3]} == {"40x24", "24x40", "32x32"}
    first = collections.Counter(itertools.chain(*(samples for samples, _ in steps[:11])))
    assert set(first.values()) == {1} and len(first) == 44
    # What was left over begins the first batch of its bucket in the next epoch.
    for bucket, num_left in (("24x40", 2), ("32x32", 3)):
        of_bucket = {i for i in range(NUM_SAMPLES) if EXPECTED[i % 5] == bucket}
        following = next(samples for samples, shape in steps[11:] if shape == bucket)
        assert len(of_bucket - first.keys()) == num_left
        assert of_bucket - first.keys() <= set(following)
    assert read_steps(ranks_of(config, 2), epochs=3)[0] == steps
    if kind in ("folder", "mds latents"):
        assert read_steps(ranks_of(config, 2, num_workers=2), epochs=3)[0] == steps
    # Resumed in the middle of an epoch by other numbers of ranks and workers.
    for num_ranks, num_workers in ((2, 0), (1, 2)):
        resumed = ranks_of(config, num_ranks, num_workers)
        assert read_steps(resumed, [state], epochs=3)[0] == steps[5:]


@pytest.mark.parametrize("kind", ["synthetic", "synthetic latents"])
def test_synthetic_samples_have_the_shapes_in_equal_shares(kind, make_config):
    config = make_config(kind, num_images=3000)
    counts = collections.Counter(shape_of(batch) for batch in data.build(config))
    assert counts.keys() == {Shape(32, 32), Shape(24, 40), Shape(40, 24)}
    assert all(200 < count < 300 for count in counts.values())


def test_a_bucket_smaller_than_a_batch_is_filled_over_the_epochs(make_config):
    """Two epochs of 20 samples fill a batch of 32, with 8 left; four fill two and a half."""
    config = dataclasses.replace(make_config("folder"), device_batch_size=32)
    loader = data.build(config)
    lengths = [sum(1 for _ in loader) for _ in range(5)]
    # 20, 10 and 19 samples an epoch in batches of 32.
    expected = [
        sum((n + 1) * count // 32 - n * count // 32 for count in (20, 10, 19)) for n in range(5)
    ]
    assert lengths == expected == [0, 2, 0, 3, 1]
    assert loader.names_before(loader.state_dict(), num_back=2)


def test_the_names_of_earlier_batches_are_those_that_were_read(make_config):
    loader = data.build(make_config("folder"))
    read = []
    for _ in range(2):
        for batch in loader:
            read.append(indices([batch]))
            for back, samples in enumerate(reversed(read)):
                names = loader.names_before(loader.state_dict(), num_back=back)
                assert [int(Path(name).stem) for name in names] == samples


def test_a_picture_that_is_changed_in_the_run_is_named_and_stops_it(make_config, tmp_path):
    datasets.write_folder(tmp_path / "pictures")
    config = datasets.make_source(
        "folder", tmp_path / "pictures", buckets="auto", shapes=buckets_of()
    )
    loader = data.build(config)
    taller = Image.fromarray(np.zeros((60, 41, 3), dtype=np.uint8))
    (tmp_path / "pictures" / "007.png").write_bytes(datasets.encode(taller))
    with pytest.raises(RunError, match=r"007.png has 41 x 60 pixels, and had 60 x 40"):
        list(loader)


def test_other_sizes_under_a_resume_are_refused(make_config):
    loader = data.build(make_config("folder"))
    next(iter(loader))
    state = loader.state_dict()
    other = data.build(make_config("folder", shapes=buckets_of(max_aspect_ratio=1.5)))
    with pytest.raises(Exception, match="other sizes of files, or another order"):
        other.load_state_dict(state)


def test_proportions_that_no_bucket_serves_are_bad_input_or_left_out_and_counted(tmp_path):
    folder = tmp_path / "pictures"
    datasets.write_folder(folder)
    wide = Image.fromarray(np.zeros((40, 200, 3), dtype=np.uint8))
    (folder / "011.png").write_bytes(datasets.encode(wide))
    config = datasets.make_source("folder", folder, buckets="auto", shapes=buckets_of())
    flag = "--max_aspect_ratio, --buckets, --on_bad_sample or --max_bad_fraction"
    with refused(flag, value="200 x 40 px") as caught:
        data.build(config)
    assert "011.png" in caught.value.what
    skipping = dataclasses.replace(config, on_bad_sample="skip", max_bad_fraction=0.05)
    loader = data.build(skipping)
    assert loader.stats.num_dropped_samples == 1
    assert 11 not in indices(loader)
    (folder / "012.png").write_bytes(b"no picture")
    with refused(flag):
        data.build(dataclasses.replace(skipping, max_bad_fraction=0.03))
    for buckets, num_left_out in (("40x24,32x32", 2), ("32x32", 2)):
        few = dataclasses.replace(skipping, buckets=buckets, shapes=buckets_of(buckets=buckets))
        assert data.open_mixture(few).num_left_out == num_left_out


def test_squares_alone_keep_their_batches_and_say_so(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index in range(NUM_SAMPLES):
        square = Image.fromarray(np.full((40, 40, 3), 5 * index, dtype=np.uint8))
        (folder / f"{index:03d}.png").write_bytes(datasets.encode(square))
        (folder / f"{index:03d}.txt").write_text(datasets.make_caption(index))
    plain = datasets.make_source("folder", folder)
    config = dataclasses.replace(plain, buckets="auto", shapes=buckets_of())
    assert "buckets change nothing" in data.open_mixture(config).describe(4)
    with_buckets, without = data.build(config), data.build(plain)
    for left, right in zip(with_buckets, without, strict=True):
        assert torch.equal(left["image"], right["image"])


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"buckets": "16=0.5,32=0.4"}, "--buckets"),
        ({"bucket_step": 12}, "--bucket_step"),
        ({"bucket_step": 64}, "--image_size or --bucket_step"),
    ],
)
def test_buckets_that_cannot_be_made_are_bad_input(changes, flag):
    with refused(flag):
        buckets_of(**changes)


def test_pictures_are_measured_once_and_unreadable_ones_again(tmp_path, monkeypatch):
    datasets.write_folder(tmp_path / "pictures")
    config = datasets.make_source(
        "folder", tmp_path / "pictures", buckets="auto", shapes=buckets_of()
    )
    read, measure = [], mixture.measure

    def count(samples, index: int, config: SourceConfig) -> tuple[int, int]:
        read.append(index)
        return measure(samples, index, config)

    monkeypatch.setattr(mixture, "measure", count)
    counts = [data.open_mixture(config).counts for _ in range(2)]
    assert counts == [[NUM_SAMPLES]] * 2
    assert read == list(range(NUM_SAMPLES))

    def fails(*_) -> tuple[int, int]:
        raise BadSampleError("the disk does not answer")

    datasets.write_folder(tmp_path / "others")
    skipping = dataclasses.replace(
        config, remote=str(tmp_path / "others"), on_bad_sample="skip", max_bad_fraction=1.0
    )
    monkeypatch.setattr(mixture, "measure", lambda s, i, c: fails() if i == 7 else measure(s, i, c))
    assert data.open_mixture(skipping).num_left_out == 1
    monkeypatch.setattr(mixture, "measure", measure)
    assert data.open_mixture(skipping).num_left_out == 0


@pytest.mark.parametrize("out_format", ["mds", "webdataset", "parquet"])
def test_a_converted_data_set_tells_its_sizes_until_its_files_change(
    out_format, make_config, tmp_path, monkeypatch
):
    source, out = make_config("folder").remote, tmp_path / "out"
    assert sdbench(["convert", source, "--folder", str(out), "--out_format", out_format]) == 0
    config = datasets.make_source(out_format, out, buckets="auto", shapes=buckets_of())
    expected = data.open_mixture(make_config("folder"))
    with monkeypatch.context() as patch:
        patch.setattr(mixture, "measure", lambda *_: pytest.fail("a picture is read"))
        assert data.open_mixture(config).bucket_of.tolist() == expected.bucket_of.tolist()
    # The sizes of another data set under the same name are not taken for its own.
    kept = (out / mixture.SIZES_NAME).read_bytes()
    shutil.rmtree(out)
    flags = ["--folder", str(out), "--out_format", out_format, "--samples_per_shard", "7"]
    assert sdbench(["convert", make_config("parquet").remote, *flags]) == 0
    (out / mixture.SIZES_NAME).write_bytes(kept)
    read, measure = [], mixture.measure

    def count(samples, index: int, config: SourceConfig) -> tuple[int, int]:
        read.append(index)
        return measure(samples, index, config)

    monkeypatch.setattr(mixture, "measure", count)
    assert data.open_mixture(config).counts == expected.counts
    assert read == list(range(NUM_SAMPLES))


def test_turned_pictures_are_measured_upright_from_their_headers():
    from sdbench.data.formats.image_files import open_image

    for orientation, size in ((1, (40, 20)), (3, (40, 20)), (6, (20, 40)), (8, (20, 40))):
        exif, file = Image.Exif(), io.BytesIO()
        exif[ExifTags.Base.Orientation] = orientation
        noise = Image.effect_noise((40, 20), 90).convert("RGB")
        noise.save(file, "JPEG", exif=exif, quality=100)
        assert open_image(file.getvalue()).size == size
        # Zeros for pixels, and the end: nothing is decoded.
        assert open_image(file.getvalue()[:-200] + bytes(198) + b"\xff\xd9").size == size

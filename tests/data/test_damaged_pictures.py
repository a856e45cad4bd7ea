"""Is each picture of others read as it is, or named; and by every reader alike?"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import struct
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.base.shape import Shape
from sdbench.cli import main as sdbench
from sdbench.data.batches import transforms
from sdbench.data.batches.transforms import decode_image, measure_image
from sdbench.data.formats.image_files import open_image
from sdbench.data.order.epochs import keys_of_first_epoch
from sdbench.data.samples import BadSampleError, decoding
from tests.data.damaged import chunk, mutations, on_disk, profile, tiff
from tests.data.datasets import make_source, write_shards, write_table, write_tar

PIXELS = np.random.default_rng(5).integers(0, 256, (6, 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
SHAPE = Shape(64, 48)


def encode(file_format: str = "PNG", *, mode: str = "RGB", **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(file, file_format, **options)
    return file.getvalue()


def with_chunk(data: bytes, name: bytes, content: bytes) -> bytes:
    """A PNG with one chunk more, before its pixels."""
    at = data.index(b"IDAT") - 4
    return data[:at] + chunk(name, content) + data[at:]


def with_segment(data: bytes, marker: int, content: bytes) -> bytes:
    """A JPEG with one segment more, before all others."""
    return data[:2] + struct.pack(">BBH", 255, marker, len(content) + 2) + content + data[2:]


def with_pixels(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A PNG with other compressed pixels, and with right checksums of its chunks."""
    begin, end = data.index(b"IDAT") + 4, data.index(b"IEND") - 8
    return data[: begin - 8] + chunk(b"IDAT", change(data[begin:end])) + data[end + 4 :]


EXIF = b"Exif\0\0"
TURNED = (0x0112, 3, 1, struct.pack("<H", 6))
# Pictures whose pixels are sound, and whether they are turned by a quarter.
ODD_METADATA = {
    "a resolution as text": (encode("JPEG", exif=tiff(TURNED, (0x011A, 2, 3, b"72\0"))), True),
    "EXIF without a header": (with_chunk(encode(), b"eXIf", bytes(16)), False),
    "EXIF that is cut": (encode("JPEG", exif=tiff(TURNED)[:20]), False),
    "EXIF that begins beyond its end": (
        encode("JPEG", exif=EXIF + b"II*\0\xff\xff\xff\xff" + bytes(4)),
        False,
    ),
    "an orientation as text": (encode("JPEG", exif=tiff((0x0112, 2, 2, b"6\0"))), False),
    "an orientation that is none": (
        encode("JPEG", exif=tiff((0x0112, 3, 1, struct.pack("<H", 99)))),
        False,
    ),
    "an orientation of four bytes": (
        encode("WEBP", exif=tiff((0x0112, 4, 1, struct.pack("<I", 6)))),
        True,
    ),
    "an offset to itself": (
        encode("JPEG", exif=tiff(TURNED, (0x8769, 4, 1, struct.pack("<I", 8)))),
        True,
    ),
    "pictures of a phone, cut": (with_segment(encode("JPEG"), 0xE2, b"MPF\0II*\0\x08\0"), False),
    "a broken block of Photoshop": (
        with_segment(encode("JPEG"), 0xED, b"Photoshop 3.0\x008BIM\x03\xed\xff"),
        False,
    ),
    "a text that is no Latin-1": (with_chunk(encode(), b"tEXt", b"\xff\xfe\0\xff"), False),
    "a text that unpacks to 100 MB": (
        with_chunk(encode(), b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8))),
        False,
    ),
    "a profile that cannot be unpacked": (with_chunk(encode(), b"iCCP", b"a\0\0abc"), False),
    "a resolution that is cut": (with_chunk(encode(), b"pHYs", b"\0"), False),
    "a wrong checksum of a text": (
        with_chunk(encode(), b"tEXt", b"a\0b").replace(chunk(b"tEXt", b"a\0b")[-4:], b"crc?"),
        False,
    ),
    "zeros behind the end": (encode("JPEG") + bytes(5000), False),
    "a wrong palette that is not used": (with_chunk(encode(), b"PLTE", bytes(7)), False),
    "bytes behind the pixels": (with_pixels(encode(), lambda packed: packed + b"more"), False),
}


@pytest.mark.parametrize("name", ODD_METADATA)
def test_sound_pixels_beside_odd_metadata_are_read(name):
    file, is_turned = ODD_METADATA[name]
    expected = np.rot90(PIXELS, -1) if is_turned else PIXELS
    size = expected.shape[1::-1]
    assert open_image(file).size == measure_image(file).size == size
    found = decode_image(file, shape=Shape(*size)).transpose(1, 2, 0)
    # Blocks of 8 pixels, of which a JPEG keeps the brightness.
    assert np.abs(found.mean(2) - expected.mean(2)).mean() < 5


def damaged_scan(mode: str = "RGB") -> bytes:
    """A JPEG with its end, and zeros for 40 bytes of its pixels."""
    file = encode("JPEG", mode=mode)
    at = file.index(b"\xff\xda") + 200
    return file[:at] + bytes(40) + file[at + 40 :]


def half_of(packed: bytes) -> bytes:
    """The first half of the rows of a PNG."""
    rows = zlib.decompress(packed)
    return zlib.compress(rows[: len(rows) // 2])


def webp(**options) -> bytes:
    return encode("WEBP", **(options or {"quality": 95}))


# Damaged files, each with what is told of it.
HALF = len(encode()) // 2
DAMAGED = {
    "PNG, cut": (encode()[:HALF], "cut off in the chunk"),
    "PNG, zeros from the middle": (encode()[:HALF] + bytes(HALF), "checksum of the chunk"),
    "PNG, a bit": (encode()[:HALF] + b"?" + encode()[HALF + 1 :], "checksum of the chunk b'IDAT'"),
    "PNG, without its end": (encode()[:-12], "cut off in the chunk"),
    "PNG, a wrong sum": (
        with_pixels(encode(), lambda packed: packed[:-4] + b"adle"),
        "libpng error: IDAT: incorrect data check",
    ),
    "PNG, a palette, half of the rows": (
        with_pixels(encode(mode="P"), half_of),
        "libpng error: Not enough image data",
    ),
    "JPEG, cut": (encode("JPEG")[:-100], "the marker of its end is missing"),
    "JPEG, without its end": (encode("JPEG")[:-2], "the marker of its end is missing"),
    "JPEG, zeros to the end": (encode("JPEG")[:-100] + bytes(900), "its end is missing"),
    "JPEG, zeros in the middle": (damaged_scan(), "Corrupt JPEG data"),
    "JPEG, CMYK, zeros in the middle": (damaged_scan("CMYK"), "Corrupt JPEG data"),
    "JPEG, cut in a header": (encode("JPEG")[:100], "cut off in the segment"),
    "WebP, cut": (webp()[:-9], "cut off"),
    "WebP, zeros to the end": (webp()[:200].ljust(len(webp()), b"\0"), "end with"),
    "WebP, lossless, zeros": (
        webp(lossless=True)[:90].ljust(len(webp(lossless=True)), b"\0"),
        "end with",
    ),
}


def tars(folder: Path, files: list[bytes]) -> None:
    members = [
        member
        for number, file in enumerate(files)
        for member in ((f"{number}.png", file), (f"{number}.txt", b"a"))
    ]
    write_tar(folder / "a.tar", members)


def pictures(folder: Path, files: list[bytes]) -> None:
    folder.mkdir()
    for number, file in enumerate(files):
        (folder / f"{number:05d}.png").write_bytes(file)
        (folder / f"{number:05d}.txt").write_text("a")


def parquet(folder: Path, files: list[bytes]) -> None:
    write_table(
        folder / "a.parquet", {"jpg": files, "caption": ["a"] * len(files)}, row_group_size=4
    )


def mds(folder: Path, files: list[bytes]) -> None:
    write_shards(folder, {"jpg": "bytes", "caption": "str"}, ((file, "a") for file in files))


WRITERS = {"folder": pictures, "webdataset": tars, "parquet": parquet, "mds": mds}


@pytest.mark.parametrize("kind", WRITERS)
def test_damage_is_named_by_every_reader_of_every_format(kind, tmp_path, capfd):
    """Among two sound pictures; and nothing is told of a file that has no name."""
    WRITERS[kind](tmp_path / "data", [encode(), *(file for file, _ in DAMAGED.values()), encode()])
    config = make_source(kind, tmp_path / "data", device_batch_size=1)
    reader = data.open_batches(config)
    names = [reader.name(number) for number in range(len(DAMAGED) + 2)]
    assert sdbench(["verify-data", str(tmp_path / "data"), "--deep", "--num_workers", "0"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == f"{len(DAMAGED)} broken things were found."
    for line, name, (_, told) in zip(lines, names[1:-1], DAMAGED.values(), strict=False):
        assert line.startswith(f"broken: {name}: the image cannot be decoded (") and told in line
    out = tmp_path / "out"
    argv = ["convert", str(tmp_path / "data"), "--folder", str(out), "--on_bad_sample", "skip"]
    argv += ["--max_bad_fraction", "1", "--num_workers", "0"]
    assert sdbench(argv) == 0
    assert f"Wrote 2 of the {len(DAMAGED) + 2} samples" in capfd.readouterr().out
    for number, name in enumerate(names):
        found = reader(keys_of_first_epoch([number]))
        is_damaged = 0 < number <= len(DAMAGED)
        assert isinstance(found, RunError) == is_damaged, name
        if is_damaged:
            assert str(found).startswith(f"{name}: the image cannot be decoded (")
            assert "--on_bad_sample skip" in str(found)
    printed = capfd.readouterr()
    assert "JPEG" not in printed.err and "libpng" not in printed.err


def test_what_others_write_while_a_picture_is_decoded_is_not_lost(monkeypatch, capfd):
    decode = transforms.decode_with_torchvision

    def write_too(*arguments, **options):
        os.write(2, b"from another thread\n")
        return decode(*arguments, **options)

    monkeypatch.setattr(transforms, "decode_with_torchvision", write_too)
    decode_image(encode("JPEG"), shape=SHAPE)
    with pytest.raises(OSError, match="^Corrupt JPEG data: [^\n]*$"):
        decode_image(damaged_scan(), shape=SHAPE)
    assert capfd.readouterr().err == "from another thread\n" * 2


def test_threads_that_decode_at_once_leave_stderr_where_it_was(monkeypatch, capfd):
    decode, both = transforms.decode_with_torchvision, threading.Barrier(2)

    def decode_together(*args, **options):
        # Both within a decoder at once, if that is possible.
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        return decode(*args, **options)

    monkeypatch.setattr(transforms, "decode_with_torchvision", decode_together)
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(lambda _: decode_image(encode("JPEG"), shape=SHAPE), range(2)):
            pass
    os.write(2, b"behind both\n")
    assert capfd.readouterr().err == "behind both\n"


def test_a_webp_of_one_colour_is_not_taken_for_one_that_ends_in_zeros():
    for side, lossless, colour in itertools.product((8, 700), (False, True), ("white", "teal")):
        file = io.BytesIO()
        Image.new("RGB", (side, side), colour).save(file, "WEBP", lossless=lossless, method=0)
        assert open_image(file.getvalue()).size == (side, side)


def test_a_time_limit_that_is_reached_inside_a_decoder_is_not_a_bad_sample():
    with pytest.raises(RunError, match="too long"), decoding("a.jpg"):
        raise RunError("too long")


# As in the profiles Adobe RGB (1998) and sRGB: the colours of the primaries at D50.
ADOBE = [(0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457)]
SRGB = [(0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410)]
ADOBE_PROFILE = profile("Adobe RGB (1998)", ADOBE, gamma=563 / 256)
LINEAR_GREY = profile("Linear grey", None, gamma=1.0)


def to_srgb(linear: np.ndarray) -> np.ndarray:
    curve = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return 255 * curve


def of_adobe(pixels: np.ndarray) -> np.ndarray:
    """sRGB of Adobe RGB by the arithmetic of the standards."""
    linear = (pixels / 255) ** (563 / 256) @ np.array(ADOBE) @ np.linalg.inv(np.array(SRGB))
    return to_srgb(linear.clip(0, 1))


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "JPEG"])
def test_colours_of_another_profile_become_srgb(file_format):
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}
    file = encode(file_format, icc_profile=ADOBE_PROFILE, **options.get(file_format, {}))
    found = decode_image(file, shape=SHAPE).transpose(1, 2, 0)
    expected = of_adobe(PIXELS)
    assert np.abs(found - expected).max() < (6 if file_format == "JPEG" else 2)
    assert np.abs(PIXELS - expected).max() > 40  # what it was without


def test_a_large_jpeg_of_another_profile_becomes_srgb():
    """It is decoded at an eighth of its size."""
    file = io.BytesIO()
    colour = np.array([30, 200, 40], np.uint8)
    picture = Image.fromarray(np.broadcast_to(colour, (600, 800, 3)).copy())
    picture.save(file, "JPEG", quality=100, subsampling=0, icc_profile=ADOBE_PROFILE)
    found = decode_image(file.getvalue(), shape=Shape(32, 24))
    assert np.abs(found[:, 9, 9] - of_adobe(colour)).max() < 4


def test_a_grey_profile_is_applied_and_one_of_other_pictures_is_not():
    grey = Image.new("L", (16, 16), 64)
    for icc, expected in ((LINEAR_GREY, to_srgb(np.array(64 / 255))), (b"", 64)):
        file = io.BytesIO()
        grey.save(file, "PNG", icc_profile=icc)
        found = decode_image(file.getvalue(), shape=Shape.square(8))
        assert np.abs(found - expected).max() <= 1
    for mode, icc in (("RGB", LINEAR_GREY), ("CMYK", ADOBE_PROFILE), ("RGB", b"no profile")):
        file, plain = (encode("JPEG", mode=mode, icc_profile=one) for one in (icc, None))
        assert np.array_equal(decode_image(file, shape=SHAPE), decode_image(plain, shape=SHAPE))
        assert "not used" in measure_image(file).profile


def test_srgb_is_left_as_it_is():
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for file_format in ("PNG", "JPEG"):
        file, plain = (encode(file_format, icc_profile=one) for one in (srgb, None))
        assert np.array_equal(decode_image(file, shape=SHAPE), decode_image(plain, shape=SHAPE))
        assert measure_image(file).profile is None


def test_colour_profiles_are_counted(tmp_path, capsys):
    """By verify-data, by convert, which leaves files as they are, and once an epoch."""
    files = [encode(icc_profile=icc) for icc in (None, ADOBE_PROFILE, None, ADOBE_PROFILE, b"?")]
    pictures(tmp_path / "data", files)
    told = (
        "2 pictures have the colour profile Adobe RGB (1998), converted to sRGB; 1 picture has the "
        "colour profile that cannot be read, not used."
    )
    assert sdbench(["verify-data", str(tmp_path / "data"), "--deep", "--num_workers", "0"]) == 0
    assert f"note: {told}\n" in capsys.readouterr().out
    out = tmp_path / "out"
    argv = ["convert", str(tmp_path / "data"), "--folder", str(out), "--out_format", "folder"]
    assert sdbench([*argv, "--num_workers", "0"]) == 0
    assert told in capsys.readouterr().out
    assert sorted(path.read_bytes() for path in out.glob("*/*.png")) == sorted(files)
    list(data.build(make_source("folder", tmp_path / "data", device_batch_size=1, shuffle=False)))
    lines = capsys.readouterr().err.splitlines()
    first = tmp_path / "data/00001.png"
    assert f"{first} has the colour profile Adobe RGB (1998), converted to sRGB." in lines
    assert f"In an epoch of this rank {told}" in lines


NUM_MUTATIONS = 20_000


def own_shape(file: bytes) -> Shape:
    """The shape of a picture, of which nothing is left out, unless its header makes it large."""
    width, height = open_image(file, read_avif=True).size
    return Shape(width, height) if width * height < 10**6 else Shape(100, 100)


@pytest.mark.parametrize(
    "num", [300, pytest.param(NUM_MUTATIONS, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
def test_a_mutated_picture_is_read_or_named_by_every_reader(num, capfd):
    """Whatever a decoder raises is a bad sample; damage is one for all that read all pixels."""
    counts = dict.fromkeys(("read", "named", "of no kind that is read"), 0)
    for number, file in enumerate(mutations(num)):
        name, found = f"picture {number}", {}
        readers: dict[str, Callable[[], object]] = {
            "measured": lambda file=file: measure_image(file, read_avif=True),
            "decoded": lambda file=file: decode_image(file, shape=own_shape(file), read_avif=True),
            "reduced": lambda file=file: decode_image(file, shape=Shape(5, 4), read_avif=True),
        }
        for reader, read in readers.items():
            try:
                with decoding(name):
                    found[reader] = read()
            except BadSampleError as error:
                assert str(error).startswith(f"{name}: the image cannot be decoded (")
                found[reader] = error
        errors = {reader for reader, one in found.items() if isinstance(one, BadSampleError)}
        assert errors in (set(), {"measured", "decoded"}, {*readers}), (number, found)
        if "reduced" not in errors:
            assert found["reduced"].shape == (3, 4, 5)
        if not errors:
            counts["read"] += 1
        elif "it begins" in str(found["measured"]):
            counts["of no kind that is read"] += 1
        else:
            counts["named"] += 1
    assert sum(counts.values()) == num and counts["read"] > num // 20 < counts["named"]
    printed = capfd.readouterr()
    assert "JPEG" not in printed.err and "libpng" not in printed.err
    print(counts)


def test_a_bomb_of_a_header_is_named_and_takes_no_memory(tmp_path):
    file = on_disk("PNG", width=60_000, height=60_000)
    pictures(tmp_path / "data", [file])
    reader = data.open_batches(make_source("folder", tmp_path / "data", device_batch_size=1))
    assert "00000.png: the image cannot be decoded" in str(reader(keys_of_first_epoch([0])))

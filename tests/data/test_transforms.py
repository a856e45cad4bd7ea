"""Does an image keep its shape and its colours on the way to a sample?"""

from __future__ import annotations

import io
import itertools
import struct
import tarfile
import zlib

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms, ImageOps, PngImagePlugin

from sdbench.base.shape import Shape
from sdbench.data.batches.transforms import decode_image, decode_picture, find_box, measure_image
from tests.data.datasets import encode

# Peak signal to noise in dB of a picture decoded at a fraction of its size, to one decoded wholly:
# the worst of those here has 39.4, and would have 33.6 without the factor of two.
MIN_PSNR = 39

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def stripes() -> Image.Image:
    """96 x 32 pixels: a third red, a third green, a third blue."""
    pixels = np.repeat(np.array([RED, GREEN, BLUE], dtype=np.uint8), 32, axis=0)
    return Image.fromarray(np.broadcast_to(pixels, (32, 96, 3)).copy())


def by_pil(picture: Image.Image, *, shape: Shape, crop=None) -> np.ndarray:
    """What PIL's own crop and bicubic filter make of an upright picture."""
    left, top, width, height = find_box(*picture.size, shape=shape, crop=crop)
    box = picture.convert("RGB").crop((left, top, left + width, top + height))
    return np.asarray(box.resize(shape, Image.Resampling.BICUBIC))


@pytest.fixture(scope="module")
def openmoji(repository) -> dict[str, bytes]:
    """Real pictures by name, in every kind of file."""
    with tarfile.open(repository / "tests/assets/openmoji-slice.tar") as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    return {name: data for name, data in files.items() if not name.endswith((".txt", ".json"))}


def grey16() -> Image.Image:
    return Image.fromarray(np.full((8, 8), 257 * 100, dtype=np.uint16))


def palette_with_transparency() -> Image.Image:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.info["transparency"] = 1
    return image


@pytest.mark.parametrize(
    ("image", "file_format", "rgb"),
    [
        (Image.new("L", (8, 8), 77), "PNG", (77, 77, 77)),
        (Image.new("1", (8, 8), 1), "PNG", (255, 255, 255)),
        (Image.new("LA", (8, 8), (77, 0)), "PNG", (255, 255, 255)),
        (Image.new("LA", (8, 8), (77, 255)), "PNG", (77, 77, 77)),
        (Image.new("RGBA", (8, 8), (10, 20, 30, 255)), "PNG", (10, 20, 30)),
        (Image.new("RGBA", (8, 8), (0, 0, 0, 51)), "PNG", (204, 204, 204)),
        (palette_with_transparency(), "PNG", (255, 255, 255)),
        (grey16(), "PNG", (100, 100, 100)),
        (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", (255, 0, 0)),
        (Image.new("RGB", (1, 1), (1, 2, 3)), "PNG", (1, 2, 3)),
    ],
)
def test_every_mode_becomes_rgb(image, file_format, rgb):
    found = decode_image(encode(image, file_format=file_format), shape=Shape.square(4))
    assert found.shape == (3, 4, 4)
    assert tuple(found[:, 1, 1].tolist()) == rgb


@pytest.mark.parametrize("cut", [12, 40, -100])
def test_damaged_images_raise(cut):
    noise = np.random.default_rng(0).integers(0, 256, size=(32, 32, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match="cut off in the chunk at byte"):
        decode_image(encode(Image.fromarray(noise))[:cut], shape=Shape.square(8))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("TIFF", "like a TIFF file"),
        ("BMP", "like a BMP file"),
        ("PPM", "like a PPM, PGM or PBM file"),
        ("GIF", "like a GIF file"),
        ("HTML", "like HTML, XML or SVG text"),
        ("?", r"with b'(\\x00){16}'"),
    ],
)
def test_no_decoder_of_another_kind_is_reached(kind, told, monkeypatch):
    starts = {"HTML": b"<html>404</html>", "?": bytes(20)}
    data = starts.get(kind) or encode(Image.new("RGB", (8, 8)), file_format=kind)
    Image.init()

    def reached(*arguments):
        raise AssertionError(f"the decoder of {kind} files was called")

    for name in set(Image.OPEN) - {"JPEG", "PNG", "WEBP"}:
        monkeypatch.setitem(Image.OPEN, name, (reached, reached))
    for read in (measure_image, lambda data: decode_image(data, shape=Shape.square(8))):
        with pytest.raises(ValueError, match=f"it begins {told}, and JPEG, PNG and WebP files"):
            read(data)


@pytest.mark.parametrize(("image_size", "tolerance"), [(300, 0.02), (128, 1.0)])
def test_real_pictures_are_what_pil_makes_of_them(image_size, tolerance, openmoji):
    """For every kind of file; at 128 px JPEGs are cut short."""
    kinds = set()
    for name, data in openmoji.items():
        picture = Image.open(io.BytesIO(data))
        kinds.add((picture.format, picture.mode))
        if profile := picture.info.get("icc_profile"):  # of one, a screen
            srgb = ImageCms.createProfile("sRGB")
            picture = ImageCms.profileToProfile(picture, io.BytesIO(profile), srgb)
        found = decode_image(data, shape=Shape.square(image_size)).transpose(1, 2, 0)
        difference = found.astype(int) - by_pil(picture, shape=Shape.square(image_size))
        assert np.abs(difference).mean() < (tolerance + 0.2 if profile else tolerance), name
    assert kinds == {("JPEG", "RGB"), ("PNG", "RGB"), ("PNG", "L"), ("WEBP", "RGB")}


def test_a_jpeg_decoded_at_a_fraction_of_its_size_is_what_resizing_makes_of_it(openmoji):
    """Over the sides at which the fraction changes."""
    num_reduced = 0
    for data in (data for name, data in openmoji.items() if name.endswith("jpg")):
        picture = Image.open(io.BytesIO(data))
        for divisor in (2, 3, 4, 6, 8, 16):
            image_size = min(picture.size) // divisor
            found = decode_image(data, shape=Shape.square(image_size)).transpose(1, 2, 0)
            difference = found.astype(float) - by_pil(picture, shape=Shape.square(image_size))
            error = np.square(difference).mean()
            num_reduced += error > 0.5  # of rounding
            assert 10 * np.log10(255**2 / max(error, 1e-9)) > MIN_PSNR, divisor
    assert num_reduced


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("crop", "size"), [(None, (809, 801)), ((0.3, 0.9), (1607, 1201))])
def test_a_jpeg_that_no_fraction_divides_is_not_stretched(orientation, crop, size):
    """Nor shifted, whichever way it is turned: its last column or row is a part of one."""
    rows, columns = np.mgrid[: size[1], : size[0]]
    waves = [np.sin(columns / 37), np.sin(rows / 41), np.sin((rows + columns) / 53)]
    pixels = (128 + 100 * np.stack(waves, axis=2)).astype(np.uint8)
    exif, file = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(pixels).save(file, "JPEG", quality=95, exif=exif)
    found = decode_image(file.getvalue(), shape=Shape.square(64), crop=crop).transpose(1, 2, 0)
    expected = by_pil(ImageOps.exif_transpose(Image.open(file)), shape=Shape.square(64), crop=crop)
    assert np.abs(found.astype(int) - expected).max() <= 4  # it was 11 to 20


@pytest.mark.parametrize(
    ("crop", "expected"), [(None, 10), ((0.0, 0.0), 0), ((1.0, 1.0), 20), ((0.25, 0.9), 5)]
)
def test_where_the_square_is_cut_out(crop, expected):
    columns = np.arange(30, dtype=np.uint8)
    for values, axis in ((np.broadcast_to(columns, (10, 30)), 0), (columns[:, None], 1)):
        picture = np.broadcast_to(values, (10, 30) if axis == 0 else (30, 10))
        data = encode(Image.fromarray(np.ascontiguousarray(picture)))
        place = crop if crop is None or axis == 0 else crop[::-1]
        square = decode_image(data, shape=Shape.square(10), crop=place)
        first = square[0, 0, 0]
        assert first == expected
        flipped = decode_image(data, shape=Shape.square(10), crop=place, flip=True)
        assert np.array_equal(flipped, square[:, :, ::-1])


def test_a_picture_of_a_phone_with_108_million_pixels_is_read():
    stripes = Image.new("L", (12_000, 9_000))
    stripes.paste(255, (0, 0, 6_000, 9_000))
    orientation = Image.Exif()
    orientation[ExifTags.Base.Orientation] = 6
    file = io.BytesIO()
    stripes.save(file, format="JPEG", exif=orientation)
    found = decode_image(file.getvalue(), shape=Shape.square(64))
    assert (found[:, :24] > 250).all() and (found[:, 40:] < 5).all()


def test_a_decompression_bomb_is_refused():
    header = encode(Image.new("L", (8, 8)))
    for side in (12_000, 60_000):
        chunk = make_chunk(b"IHDR", struct.pack(">II", side, side) + header[24:29])
        bomb = header[:8] + chunk + header[33:]
        with pytest.raises((ValueError, Image.DecompressionBombError), match="pixels"):
            decode_image(bomb, shape=Shape.square(8))


def make_chunk(name: bytes, content: bytes) -> bytes:
    """A piece of a PNG file."""
    check = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + check


def test_16_bits_a_channel_become_8():
    """25700 = 100 x 257, written by hand: PIL writes no such file."""
    row = b"\0" + struct.pack(">H", 25_700) * 3 * 8

    header = make_chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0))
    pixels = make_chunk(b"IDAT", zlib.compress(row * 8))
    data = b"\x89PNG\r\n\x1a\n" + header + pixels + make_chunk(b"IEND", b"")
    for image_size in (8, 4):
        found = decode_image(data, shape=Shape.square(image_size))
        assert found.dtype == np.uint8
        assert (found == 100).all()


def test_of_an_animation_the_first_picture_is_taken():
    buffer = io.BytesIO()
    first, second = (Image.new("RGB", (8, 8), color) for color in (RED, BLUE))
    first.save(buffer, "WEBP", save_all=True, append_images=[second], lossless=True)
    assert decode_image(buffer.getvalue(), shape=Shape.square(8))[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    ("file_format", "kind"),
    [*itertools.product(["JPEG", "PNG", "WEBP"], ["exif", "xmp"]), ("PNG", "late exif")],
)
def test_an_orientation_is_found_wherever_it_stands(file_format, kind):
    picture = stripes()
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x:xmpmeta>'
    options = {"exif": {"exif": exif.tobytes()}, "late exif": {}, "xmp": {"xmp": xmp}}[kind]
    if file_format == "PNG" and kind == "xmp":
        options = {"pnginfo": PngImagePlugin.PngInfo()}
        options["pnginfo"].add_itxt("XML:com.adobe.xmp", xmp.decode())
    buffer = io.BytesIO()
    picture.save(buffer, file_format, **options)
    data = buffer.getvalue()
    if kind == "late exif":
        end = data[-12:]
        data = data[:-12] + make_chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + end
    assert measure_image(data).size == (32, 96)
    # Turned, red is at the top; as stored, blue is at the right.
    found = decode_image(data, shape=Shape.square(32), crop=(1.0, 0.0))
    assert np.abs(found[:, 16, 16].astype(int) - RED).max() < 6


def on_disk(width: int, height: int, *, file_format: str, orientation: int) -> bytes:
    """A picture of this size as it is stored."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = orientation
    Image.new("RGB", (width, height), RED).save(file, file_format, exif=exif)
    return file.getvalue()


@pytest.mark.parametrize(
    ("stored", "orientation", "options", "sizes"),
    [
        # 90 x 60 becomes 30 x 20, of which 5 columns are left out on either side.
        ((90, 60), 1, {}, (60, 90, 0, 5, 20, 20)),
        ((90, 60), 1, {"crop": (1.0, 0.3)}, (60, 90, 0, 10, 20, 20)),
        ((90, 60), 1, {"crop": (0.0, 0.3)}, (60, 90, 0, 0, 20, 20)),
        # Mirrored before it is cropped: its left edge is then where its right edge was.
        ((90, 60), 1, {"crop": (1.0, 0.3), "flip": True}, (60, 90, 0, 0, 20, 20)),
        ((90, 60), 1, {"crop": (0.0, 0.3), "flip": True}, (60, 90, 0, 10, 20, 20)),
        # Turned, which PIL does: 60 x 90 becomes 20 x 30.
        ((90, 60), 6, {}, (90, 60, 5, 0, 20, 20)),
        ((90, 60), 6, {"crop": (0.9, 1.0), "flip": True}, (90, 60, 10, 0, 20, 20)),
        # A JPEG of these sizes is decoded at a quarter or an eighth, whose edges are no pixels.
        ((801, 401), 1, {}, (401, 801, 0, 10, 20, 20)),
        ((801, 401), 8, {"crop": (0.5, 0.25)}, (801, 401, 5, 0, 20, 20)),
        # Smaller than wanted: 10 x 15 becomes 20 x 30.
        ((10, 15), 1, {"crop": (0.0, 1.0)}, (15, 10, 10, 0, 20, 20)),
    ],
)
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_the_sizes_that_a_model_is_told(stored, orientation, options, sizes, file_format):
    file = on_disk(*stored, file_format=file_format, orientation=orientation)
    pixels, found, _ = decode_picture(file, shape=Shape.square(20), **options)
    assert pixels.shape == (3, 20, 20)
    assert found == sizes

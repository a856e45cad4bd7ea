"""Image files as others have them: odd metadata, colour profiles, and seeded mutations."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image, PngImagePlugin


def chunk(name: bytes, content: bytes) -> bytes:
    """A piece of a PNG file."""
    check = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + check


def tiff(*entries: tuple[int, int, int, bytes]) -> bytes:
    """An EXIF block with entries: tag, type, count, four bytes."""
    body = b"".join(struct.pack("<HHI", *entry[:3]) + entry[3].ljust(4, b"\0") for entry in entries)
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + body + bytes(4)


def on_disk(file_format: str, *, width: int, height: int) -> bytes:
    """A PNG of one pixel whose header says that it has this size."""
    assert file_format == "PNG"
    file = io.BytesIO()
    Image.new("L", (1, 1)).save(file, file_format)
    header = struct.pack(">II", width, height) + file.getvalue()[24:29]
    return file.getvalue()[:8] + chunk(b"IHDR", header) + file.getvalue()[33:]


def profile(name: str, primaries: Sequence[Sequence[float]] | None, *, gamma: float) -> bytes:
    """A colour profile (ICC 2) of three primaries, or of grey; their colours are at D50."""

    def xyz(values: Sequence[float]) -> bytes:
        return b"XYZ \0\0\0\0" + b"".join(struct.pack(">i", round(one * 65536)) for one in values)

    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + bytes(2)
    text = name.encode() + b"\0"
    tags = {
        b"desc": b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + bytes(78),
        b"wtpt": xyz((0.9642, 1.0, 0.8249)),
        **dict.fromkeys((b"rTRC", b"gTRC", b"bTRC") if primaries else (b"kTRC",), curve),
        **dict(zip((b"rXYZ", b"gXYZ", b"bXYZ"), map(xyz, primaries or ()), strict=False)),
    }
    table, contents, at = struct.pack(">I", len(tags)), b"", 132 + 12 * len(tags)
    for tag, content in tags.items():
        content += bytes(-len(content) % 4)
        table += tag + struct.pack(">II", at + len(contents), len(content))
        contents += content
    space = b"RGB " if primaries else b"GRAY"
    header = struct.pack(">I4xI", at + len(contents), 0x02100000) + b"mntr" + space + b"XYZ "
    header = header.ljust(36, b"\0") + b"acsp"
    white = struct.pack(">3i", *(round(one * 65536) for one in (0.9642, 1.0, 0.8249)))
    return (header.ljust(68, b"\0") + white).ljust(128, b"\0") + table + contents


def originals() -> list[bytes]:
    """A picture of each kind of file, with much beside its pixels."""
    rows, columns = np.mgrid[:40, :56]
    pixels = np.stack([5 * rows, 4 * columns, (rows * columns) % 256], 2).astype(np.uint8)
    rgb = Image.fromarray(pixels)
    turned = tiff(
        (0x0112, 3, 1, struct.pack("<H", 6)), (0x011A, 5, 1, bytes(4)), (0x8769, 4, 1, b"\x08")
    )
    icc = profile("A profile", [(0.6, 0.3, 0.02), (0.2, 0.6, 0.06), (0.15, 0.06, 0.7)], gamma=2.2)
    texts = PngImagePlugin.PngInfo()
    texts.add_text("a", "text", zip=True)
    texts.add_itxt("XML:com.adobe.xmp", '<a tiff:Orientation="6"/>')
    beside = {"exif": turned, "icc_profile": icc}
    kinds = [
        (rgb, "JPEG", beside),
        (rgb, "JPEG", {"progressive": True, "comment": b"a comment", "exif": turned}),
        (rgb, "JPEG", {"restart_marker_rows": 1}),
        (rgb.convert("CMYK"), "JPEG", {}),
        (rgb.convert("L"), "JPEG", {"exif": turned}),
        (rgb, "PNG", beside | {"pnginfo": texts}),
        (rgb.convert("P"), "PNG", {"transparency": 3, "exif": turned}),
        (rgb.convert("RGBA"), "PNG", {"icc_profile": icc}),
        (Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257), "PNG", {}),
        (rgb, "PNG", {"save_all": True, "append_images": [rgb]}),
        (rgb, "WEBP", beside),
        (rgb.convert("RGBA"), "WEBP", {"lossless": True, "exif": turned}),
        (rgb, "WEBP", {"save_all": True, "append_images": [rgb.rotate(9)]}),
        (rgb, "AVIF", beside),
    ]
    files = []
    for picture, file_format, options in kinds:
        file = io.BytesIO()
        picture.save(file, file_format, **options)
        files.append(file.getvalue())
    return files


def mutations(num: int, *, seed: int = 0) -> Iterator[bytes]:
    """Yield mutated pictures, always the same; half of the PNG files have right checksums."""
    files = originals()
    random = np.random.default_rng(seed)
    for number in range(num):
        data = files[number % len(files)]
        for _ in range(random.integers(1, 4)):
            data = _mutate(data, random)
        yield _with_checksums(data) if random.random() < 0.5 else data


def _mutate(data: bytes, random: np.random.Generator) -> bytes:
    # Headers and metadata come first, and are a small part.
    most = len(data) if random.random() < 0.5 else min(len(data), 400)
    first, length = int(random.integers(1 + most)), int(2 ** random.uniform(0, 8))
    last = min(first + length, len(data))
    match random.integers(8):
        case 0:
            return data[:first]
        case 1:
            return data[:first] + bytes(len(data) - first)
        case 2:
            return data[:first] + bytes(last - first) + data[last:]
        case 3:
            return data[:first] + data[last:]
        case 4:
            return data[:last] + data[first:last] + data[last:]
        case 5:
            return data[:first] + random.bytes(length) + data[last:]
        case 6:
            number = [b"\xff\xff", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff"][
                random.integers(4)
            ]
            return data[:first] + number + data[first + len(number) :]
    flipped = bytearray(data)
    if first < len(data):
        flipped[first] ^= 1 << int(random.integers(8))
    return bytes(flipped)


def _with_checksums(data: bytes) -> bytes:
    """A PNG file with right checksums, as far as it has chunks; other files as they are."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    at, pieces = 8, [data[:8]]
    while at + 12 <= len(data):
        length, name = struct.unpack(">I4s", data[at : at + 8])
        if at + 12 + length > len(data):
            break
        pieces.append(chunk(name, data[at + 8 : at + 8 + length]))
        at += 12 + length
    return b"".join([*pieces, data[at:]])

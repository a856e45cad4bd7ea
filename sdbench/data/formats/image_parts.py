"""`take_apart`: what decides the pixels of an image file, and its EXIF, XMP and colour profile.

Decoders get no metadata, so that an odd EXIF block cannot stop them. Each of them passes over
another kind of damage. So whether a file has its end, and pixels with the right checksums, is found
here, for all of them alike.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import NamedTuple

# Codes of JPEG: the end, the begin of a scan, and markers without a segment.
_END, _SCAN, _ALONE = 0xD9, 0xDA, (0x01, *range(0xD0, 0xD9))
# JPEG's application segments and comments. APP0 and APP14 tell how colours are stored.
_METADATA = {*range(0xE0, 0xF0), 0xFE} - {0xE0, 0xEE}
_MARKER = re.compile(rb"\xff+([^\x00\xff])", re.DOTALL)
# In a scan a byte of 255 is followed by 0, or by the number of a restart.
_AFTER_SCAN = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_EXIF, _XMP, _PROFILE = b"Exif\0", b"http://ns.adobe.com/xap/1.0/\0", b"ICC_PROFILE\0"
_XMP_OF_PNG = b"XML:com.adobe.xmp\0"
# Profiles of printers have up to 3 MB.
MAX_PROFILE_BYTES = 16 * 2**20

# The tag of the orientation in EXIF, and the length of a number by its type there.
_ORIENTATION, _LENGTHS = 0x0112, {1: 1, 3: 2, 4: 4}
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')


class Parts(NamedTuple):
    """An image file taken apart; `pixels` is a file too, and has the rest if no part is named."""

    pixels: bytes
    exif: bytes = b""
    xmp: bytes = b""
    profile: bytes = b""
    num_zeros: int = 0  # at the end of its pixels, where the format has no mark of the end


def take_apart(data: bytes, kind: str) -> Parts:
    """Take an image file of a kind, named as PIL does, apart; a `ValueError` if it is damaged."""
    take = {"JPEG": _take_jpeg, "PNG": _take_png, "WEBP": _take_webp}.get(kind, Parts)
    return take(data)


def _take_jpeg(data: bytes) -> Parts:
    view, at = memoryview(data), 2
    kept, beside, profile = [view[:at]], {_EXIF: b"", _XMP: b""}, {}
    while True:
        marker = _MARKER.match(data, at)
        if marker is None:
            what = "it is cut off" if at >= len(data) else "it has extraneous bytes"
            raise ValueError(f"{what} at byte {at}, where a marker should be")
        code, begin, end = marker[1][0], marker.end() - 2, marker.end()
        if code == _END:
            kept.append(view[begin:end])
            break
        if code not in _ALONE:
            length = int.from_bytes(data[end : end + 2], "big")
            content, end = view[end + 2 : end + length], end + length
            if length < 2 or end > len(data):
                raise ValueError(f"it is cut off in the segment at byte {begin}")
        if code == _SCAN:
            after = _AFTER_SCAN.search(data, end)
            if after is None:
                raise ValueError("it is cut off: the marker of its end is missing")
            end = after.start()
        if code not in _METADATA:
            kept.append(view[begin:end])
        elif content[: len(_PROFILE)] == _PROFILE and len(content) > len(_PROFILE):
            profile[content[len(_PROFILE)]] = content[len(_PROFILE) + 2 :]
        else:
            for name, found in beside.items():
                if not found and content[: len(name)] == name:
                    beside[name] = bytes(content)
        at = end
    pieces = [profile[number] for number in sorted(profile)]
    return Parts(b"".join(kept), beside[_EXIF], beside[_XMP], b"".join(pieces))


def _take_png(data: bytes) -> Parts:
    view, at, name = memoryview(data), 8, b""
    kept, exif, xmp, profile = [view[:at]], b"", b"", b""
    while name != b"IEND":
        length, name = struct.unpack(">I4s", data[at : at + 8].ljust(8, b"\xff"))
        content, end = view[at + 8 : at + 8 + length], at + 12 + length
        if end > len(data):
            raise ValueError(f"it is cut off in the chunk at byte {at}")
        # Decoders need the chunks that are named with a capital; tRNS is the transparency.
        if not name[0] & 0x20 or name == b"tRNS":
            if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
                raise ValueError(f"the checksum of the chunk {name!r} at byte {at} is wrong")
            kept.append(view[at:end])
        elif name == b"eXIf":
            exif = bytes(content)
        elif name == b"iTXt" and content[: len(_XMP_OF_PNG)] == _XMP_OF_PNG:
            xmp = bytes(content)
        elif name == b"iCCP":
            # The name of the profile, a zero, the method of compression.
            profile = _inflate(bytes(content).partition(b"\0")[2][1:])
        at = end
    return Parts(b"".join(kept), exif, xmp, profile)


def _inflate(data: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, MAX_PROFILE_BYTES)
    except zlib.error:
        return data  # which is no profile, as is found when it is opened


def _take_webp(data: bytes) -> Parts:
    at, end, num_zeros = 12, 8 + int.from_bytes(data[4:8], "little"), 0
    if end > len(data):
        raise ValueError(f"it is cut off: {len(data)} of {end} bytes are there")
    while at + 8 <= end:
        name, length = struct.unpack("<4sI", data[at : at + 8])
        if name in (b"VP8 ", b"VP8L", b"ANMF", b"\0\0\0\0"):
            content = data[at + 8 : min(at + 8 + length, end)]
            num_zeros = max(num_zeros, len(content) - len(content.rstrip(b"\0")))
        at += 8 + length + length % 2
    return Parts(data, num_zeros=num_zeros)


def find_orientation(exif: bytes, xmp: bytes) -> int:
    """Return the orientation, 1 to 8, that EXIF or else XMP tells; 1 if neither does.

    Nothing else of EXIF is looked at, and whatever it is, nothing is raised.
    """
    tiff = exif[6:] if exif.startswith(_EXIF) else exif
    order = {b"II*\0": "little", b"MM\0*": "big"}.get(tiff[:4])

    def number(at: int, length: int) -> int:
        return int.from_bytes(tiff[at : at + length], order)

    if order is not None:
        first = number(4, 4) + 2
        last = min(first + 12 * number(first - 2, 2), len(tiff))
        for entry in range(first, last, 12):
            if number(entry, 2) == _ORIENTATION:
                found = number(entry + 8, _LENGTHS.get(number(entry + 2, 2), 0))
                return found if 1 <= found <= 8 else 1
    found_in_xmp = _XMP_ORIENTATION.search(xmp)
    return 1 if found_in_xmp is None else int(found_in_xmp[1])
